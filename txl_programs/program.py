"""How a program starts, runs and ends. See `flag_values.py` for its flags, and `printing.py` for its output."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from absl import app
from absl import logging as absl_logging

from txl_config import TrainingClusterConfig
from txl_config.environment import check_backend
from txl_config.errors import ParameterError, shortened, visible
from txl_config.stderr import without_notes
from txl_programs.command_line import parse, refuse_empty, refuse_stray
from txl_programs.flag_values import FLAGS, check_used, cluster_of, given
from txl_programs.printing import (
    close_stdout,
    ending,
    is_of_stdout,
    log_to_stdout,
    message_of,
    program_name,
)

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # TensorFlow's errors come as exceptions; the rest is noise
if not os.environ.get("KERAS_BACKEND"):  # takes precedence over the backend in ~/.keras/keras.json
    os.environ["KERAS_BACKEND"] = "tensorflow"

_parsed: list[str] = []  # what `parse` has returned to `read_flags`; empty for a program that does not call it
_NOTE = re.compile(rb"WARNING: All log messages before absl::InitializeLog|[IW]\d{4} ")  # lines of TensorFlow's import


def read_flags(name: str) -> None:
    """Reads the flags, and imports TensorFlow. Does nothing unless the calling module, `name`, is "__main__".

    A program calls it before it imports the library, so that --help and a wrong flag need no TensorFlow. A wrong flag
    ends the program with status 1, --help ends it with status 0.
    """
    if name == "__main__":
        with ending():
            app.define_help_flags()
            try:
                _parsed[:] = parse(sys.argv)
            except OSError as error:  # --help could not be written
                close_stdout(error)
                sys.exit(0)
            refuse_stray(_parsed)
            _import_tensorflow()


def run(main: Callable[[], int | None]) -> None:
    """Runs a program: reads its flags unless `read_flags` has read them, prints the library's messages, calls `main()`.

    The result of `main` is the exit status. Stray arguments, ValueError, OSError and TensorFlow's errors end the
    program with a short message and status 1, or the attribute `status` of the error. Ctrl-C ends it with status 130; a
    training run saves a checkpoint first. With --verbosity, an error has its traceback. If the reader of the standard
    output has closed it, as with `| head`, the program ends silently with status 0. If the standard output cannot be
    written for another reason, such as a full disk, it ends with one line and status 1, or the status of its error.
    """
    with ending():
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell's background job ignores SIGINT
            signal.signal(signal.SIGINT, _interrupt)
        parser = parse if not _parsed else lambda argv: list(_parsed)
        try:
            app.run(functools.partial(_run, main), flags_parser=parser)
        finally:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # a second signal must not disturb the end
                signal.signal(number, signal.SIG_IGN)


def run_training(main: Callable[[], Any], rows_to_divide: Callable[[], list[int]] = list) -> None:
    """Runs a training program as `run` does: in this process or, with --ray_workers, on workers of Ray.

    Args:
        main: the function that trains, in this process or on a worker.
        rows_to_divide: function that returns batch sizes. It is called with --ray_min_workers: then the number of
            workers may change, and must divide each of them. By default, there are none.
    """
    run(functools.partial(_train_on_workers, main, rows_to_divide))


def _run(main: Callable[[], int | None], argv: Sequence[str]) -> int | None:
    """Runs a program whose flags are parsed, and turns errors into messages, as `run` describes.

    Args:
        main: see `run`.
        argv: the name of the program, and the words of the command line that belong to no flag.

    Returns:
        The result of `main`.
    """
    refuse_stray(argv)
    refuse_empty()
    verbose = FLAGS["verbosity"].present
    if not verbose:
        absl_logging.set_verbosity(absl_logging.WARNING)
    log_to_stdout()
    _import_tensorflow()
    gc.freeze()  # garbage collection can skip the objects that the imports made
    try:
        return main()
    except BrokenPipeError:
        close_stdout()
        sys.exit(0)
    except (ValueError, OSError, *_tensorflow_errors()) as error:
        if verbose:
            raise
        if isinstance(error, OSError) and is_of_stdout(error):
            close_stdout(error)  # `ending` reports it
            sys.exit(1)
        message = shortened(f"{program_name(argv[0])}: {visible(message_of(error))}", 460)
        message += "\n(--verbosity=1 shows where)"
        status = getattr(error, "status", None)
        if status is None:
            sys.exit(message)
        print(message, file=sys.stderr)
        sys.exit(status)


def _tensorflow_errors() -> tuple[type[Exception], ...]:
    """Returns the base class of TensorFlow's errors, such as a file without permission or too little memory.

    It is a function, because `except` calls it only after an error, and the import is slow.
    """
    from tensorflow import errors

    return (errors.OpError,)


def _interrupt(number: int, frame: Any) -> None:
    """Handles Ctrl-C: raises KeyboardInterrupt, unless a KeyboardInterrupt or SystemExit is already being handled."""
    if not isinstance(sys.exception(), (KeyboardInterrupt, SystemExit)):
        raise KeyboardInterrupt


def _train_on_workers(main: Callable[[], Any], rows_to_divide: Callable[[], list[int]]) -> Any:
    """Trains in this process or, with --ray_workers, runs the same command on workers of Ray, and waits for them.

    Args:
        main, rows_to_divide: see `run_training`.

    Returns:
        The exit status; `None`, the result of `main`, after training in this process.

    Raises:
        ParameterError: flags about the workers, the strategy or the tracker do not fit together.
    """
    has_tracker = given(["tracker"])
    check_used((("tracker_project",), has_tracker, "is for --tracker, which is not given"))
    if FLAGS.ray_workers == 0:  # this process is a worker
        return main()
    cluster = cluster_of(TrainingClusterConfig)
    if not cluster.given:
        return main()
    if FLAGS.strategy not in ("auto", "multi_worker"):
        message = f"strategy must be auto or multi_worker with ray_workers, got {FLAGS.strategy}"
        raise ParameterError("strategy", FLAGS.strategy, ["auto", "multi_worker"], message)
    from txl_tf.cluster.training import run_workers

    rows = rows_to_divide() if cluster.ray_min_workers else []
    status, errors = run_workers([*sys.argv, "--ray_workers=0"], cluster, _write_out, rows)
    sys.stderr.write(errors)
    return status


def _write_out(data: bytes) -> None:
    """Writes the output of a worker to the standard output."""
    sys.stdout.buffer.write(data)
    sys.stdout.flush()


# ------------------------------------------------------------------------------------------------ TensorFlow's import


def _import_tensorflow() -> None:
    """Imports TensorFlow, without the notes on the processor and CUDA that it writes to the standard error.

    With TF_CPP_MIN_LOG_LEVEL=0, the notes appear. TensorFlow computes with oneDNN, unless TF_ENABLE_ONEDNN_OPTS is set.
    Ends the program with one line if the environment names another backend for Keras.
    """
    try:
        check_backend()
    except ImportError as error:
        sys.exit(f"{program_name()}: {error}")
    if "tensorflow" in sys.modules:
        return
    # On processors without AVX512, TensorFlow leaves oneDNN off, but training is up to twice as fast with it.
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
    quiet = os.environ.get("TF_CPP_MIN_LOG_LEVEL") != "0"
    gc.disable()  # the objects of an import stay, so garbage collection during it only takes time
    with _hidden("IPython", "matplotlib", "pandas"), without_notes(_NOTE) if quiet else contextlib.nullcontext():
        importlib.import_module("tensorflow")
    gc.enable()


@contextlib.contextmanager
def _hidden(*packages: str) -> Iterator[None]:
    """In this block, makes the import of these packages fail, unless they are imported already.

    Keras imports them if they are installed, which takes a second, but does not need them. A program that needs one of
    them can import it after the block.
    """
    hidden: dict[str, Any] = {name: None for name in packages if name not in sys.modules}
    sys.modules.update(hidden)  # `None` makes Python raise ModuleNotFoundError
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
