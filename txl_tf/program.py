"""What all programs have in common: how they end, and flags as arguments of the library."""

import functools
import gc
import os
import sys

from absl import app, flags, logging


def run(main):
    """Runs a program: reads its flags and calls `main()`.

    Stray arguments, ValueError and OSError end it with one line and status 1, Ctrl-C with status 130. With --verbosity
    an error comes with its traceback instead.
    """
    gc.freeze()  # collections need not look at what the imports made
    try:
        app.run(functools.partial(_run, main))
    finally:
        gc.freeze()  # and the process ends without one over all that is left, which takes a second


def _run(main, argv):
    path, *stray = argv
    name = os.path.basename(path)
    if stray:
        sys.exit(f"{name}: unexpected arguments: {' '.join(stray)}")
    verbose = flags.FLAGS["verbosity"].present
    if not verbose:
        logging.set_verbosity(logging.WARNING)
    try:
        main()
    except (ValueError, OSError) as error:
        if verbose:
            raise
        sys.exit(f"{name}: {error}\n(--verbosity=1 shows where)")
    except KeyboardInterrupt:
        sys.exit(130)


def values(names, given_only=False):
    """`{name: value}` of the flags that a string names, or of those of them alone that were given."""
    chosen = {name: flags.FLAGS[name] for name in names.split()}
    return {name: flag.value for name, flag in chosen.items() if flag.present or not given_only}
