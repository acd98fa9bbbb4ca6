"""What all programs have in common: flags out of `txl_tf.config`, logging, and how they end."""

import contextlib
import dataclasses
import errno
import functools
import gc
import importlib.util
import io
import itertools
import locale
import logging
import os
import re
import signal
import sys

from absl import app, flags
from absl import logging as absl_logging

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # TensorFlow's errors come as exceptions; the rest is noise
if not os.environ.get("KERAS_BACKEND"):  # it counts more than the backend of ~/.keras/keras.json
    os.environ["KERAS_BACKEND"] = "tensorflow"
FLAGS = flags.FLAGS
flags.disclaim_key_flags()  # flags that are defined here are the calling program's in --help
_parsed = []  # what `read_flags` left over of the command line
_DEFINE = {"int": flags.DEFINE_integer, "float": flags.DEFINE_float, "bool": flags.DEFINE_bool}


def _defer_package():
    """Makes `txl_tf` a package whose `__init__`, which imports TensorFlow, runs where a name is first taken from it.

    `txl_tf.config` has all that flags need: --help and a wrong flag are answered at once.
    """
    spec = importlib.util.find_spec("txl_tf")
    package = sys.modules["txl_tf"] = importlib.util.module_from_spec(spec)

    def first_name(name):
        load_package()
        return getattr(package, name)

    package.__getattr__ = first_name


def _import_tensorflow():
    """Imports TensorFlow without the notes about processor and CUDA that it writes to the standard error meanwhile.

    Ends the program with one line where the environment names another backend for Keras.
    """
    from txl_tf.environment import check_backend

    try:
        check_backend()
    except ImportError as error:
        sys.exit(f"{os.path.basename(sys.argv[0])}: {error}")
    if "tensorflow" in sys.modules:
        return
    from txl_tf.stderr import without_notes

    quiet = os.environ.get("TF_CPP_MIN_LOG_LEVEL") != "0"
    with _hidden("IPython", "matplotlib", "pandas"), without_notes(_NOTE) if quiet else contextlib.nullcontext():
        importlib.import_module("tensorflow")


@contextlib.contextmanager
def _hidden(*packages):
    """Packages that Keras imports where they are installed, which takes a second: no program needs them of Keras."""
    hidden = {name: None for name in packages if name not in sys.modules}
    sys.modules.update(hidden)
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


_NOTE = re.compile(rb"WARNING: All log messages before absl::InitializeLog|[IW]\d{4} ")


def load_package():
    """Runs the `__init__` that `_defer_package` has put off."""
    package = sys.modules["txl_tf"]
    if vars(package).pop("__getattr__", None):
        package.__spec__.loader.exec_module(package)


if "txl_tf" not in sys.modules:
    _defer_package()


def define_flags(config, leave_out="", **defaults):
    """Defines a flag for every hyper-parameter of a class of `txl_tf.config`, unless there is one of that name.

    Args:
        config: the class.
        leave_out: names without a flag, in one string.
        **defaults: of this program, where they are other than those of the class.
    """
    for field in dataclasses.fields(config):
        if field.name in leave_out.split() or field.name in FLAGS:
            continue
        default = defaults.get(field.name, field.metadata["flag"])
        kind, help_text = field.type.split(" ")[0], field.metadata["help"]
        choices = getattr(field.metadata["check"], "choices", None)
        if choices:
            flags.DEFINE_enum(field.name, default, choices, help_text)
        elif kind.startswith(("list", "Sequence")):
            flags.DEFINE_list(field.name, default, help_text)
        else:
            _DEFINE.get(kind, flags.DEFINE_string)(field.name, default, help_text)
        if kind == "Sequence[int]":
            check_integers(field.name)


def check_integers(name):
    """Has the flag of a list refuse what is no integer, before the program runs."""
    flags.register_validator(
        name, lambda value: all(x.isdecimal() for x in value or []), "must be integers, as 20000,40000"
    )


CKPT_HELP = "Checkpoint to take: a path, a name, best or latest; default: of a tagger the best, else the latest."


def define_line_flags(lines, default="the standard input"):
    """Defines the flags of a program that answers lines: the run, where lines come from, and where answers go."""
    from txl_tf.config import ClusterConfig

    several = "Several files, folders and patterns: separated by commas"
    source = f"File of {lines}, a line each; - for the standard input. {several}. Default: {default}."
    flags.DEFINE_string("model_dir", None, "Folder of the run.")
    flags.DEFINE_string("ckpt_path", None, CKPT_HELP)
    flags.DEFINE_string("input", None, source)
    flags.DEFINE_string("output", None, "File to write to, rather than the standard output; of several files a folder.")
    flags.DEFINE_bool("strict", False, "Stop at the first line that cannot be answered, rather than answer the others.")
    flags.mark_flag_as_required("model_dir")
    define_flags(ClusterConfig)


def values(names, given_only=False):
    """`{name: value}` of the flags that a string, or a class of `txl_tf.config`, names.

    Args:
        names: names in one string, or the class.
        given_only: leave out flags that the command line does not give.
    """
    numbers = set()
    if not isinstance(names, str):
        fields = [field for field in dataclasses.fields(names) if field.name in FLAGS]
        numbers = {field.name for field in fields if field.type.startswith("Sequence[int]")}
        names = " ".join(field.name for field in fields)
    chosen = {name: FLAGS[name] for name in names.split()}
    found = {name: flag.value for name, flag in chosen.items() if flag.present or not given_only}
    return {name: [int(x) for x in value] if name in numbers and value else value for name, value in found.items()}


def given(names):
    """Those of `names`, one string or several, that are flags of the command line."""
    names = names.split() if isinstance(names, str) else names
    return [name for name in names if name in FLAGS and FLAGS[name].present]


def changed(names):
    """Those of `given` whose values are not the defaults: a default may undo what a flagfile says."""
    return [name for name in given(names) if FLAGS[name].value != FLAGS[name].default]


def check_used(*rules):
    """Raises ValueError where the command line gives a flag that would have no effect.

    Args:
        *rules: `(names, used, why)`: of `given`, whether they have an effect, and what is said of one that has none.
    """
    for names, used, why in rules:
        if not used and given(names):
            raise ValueError(f"--{given(names)[0]} {why}")


def completed(config, instead):
    """`values(config)`, with those of the dictionary `instead` where the command line gives none."""
    known = {name: value for name, value in instead.items() if name in config.names()}
    return {**values(config), **known, **values(config, given_only=True)}


def config_of(group, instead=()):
    """The config of a group's flags, with those of the dictionary `instead` where the command line gives none."""
    return group(**completed(group, dict(instead)))


def cluster_of(group):
    """The config of the flags of a cluster. Raises ValueError where they say how to use one, and none is asked for."""
    cluster = config_of(group)
    check_used(("ray_cpus ray_gpus ray_restarts", cluster.given, "is for a Ray cluster: it goes with --ray_workers"))
    return cluster


def optimizer_arguments(config, training, instead=()):
    """Those of the group `config`. A warm-up that nobody gave, and that is as long as the training, becomes a tenth."""
    found = completed(config, dict(instead))
    steps, warmup = training.train_steps, found["warmup_steps"]
    if warmup >= steps and found["schedule"] != "noam" and not FLAGS["warmup_steps"].present:
        found["warmup_steps"] = steps // 10
        message = "warmup_steps=%d, the default, is not below train_steps=%d: %d instead"
        logging.getLogger("txl_tf").info(message, warmup, steps, steps // 10)
    return found


def origin_of(folder, task):
    """The run that --init_from names, or `None`; and its `settings`."""
    if not FLAGS.init_from:
        return None, {"data": {}, "model": {}, "training": {}}
    from txl_tf.runs.origin import Origin

    origin = Origin(folder, FLAGS.init_from, task)
    return origin, origin.settings


def read_flags(name):
    """Reads the flags of a program whose module is `name`, if it runs. A program calls it before it imports the rest.

    Wrong flags end it with status 1, --help and the like as in absl.
    """
    if name == "__main__":
        with _ending():
            app.define_help_flags()
            try:
                _parsed[:] = _parse(sys.argv)
            except OSError as error:  # of --help
                _close_stdout(error)
                sys.exit(0)
            _refuse_stray(_parsed)
            _import_tensorflow()


def run(main):
    """Runs a program: reads its flags, if `read_flags` has not, has the library's messages printed, calls `main()`,
    whose result is the status to end with.

    Stray arguments, ValueError and OSError end it with one line and status 1, or the error's `status`; Ctrl-C with
    status 130. With --verbosity an error comes with its traceback instead. Where the standard output is closed, as by
    `| head`, it ends in silence with status 0; where its disk is full, with one line and status 1. A training saves
    first.
    """
    with _ending():
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not in a shell's background job
            signal.signal(signal.SIGINT, _interrupt)
        parser = _parse if not _parsed else lambda argv: list(_parsed)
        try:
            app.run(functools.partial(_run, main), flags_parser=parser)
        finally:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # it ends already
                signal.signal(number, signal.SIG_IGN)


def run_training(main, rows_to_divide=list):
    """Runs a program, as `run`, on the workers that its flags ask for.

    Args:
        main: what trains, here or on a worker.
        rows_to_divide: function without arguments that gives the numbers of rows that the workers must divide.
    """
    run(functools.partial(_train_on_workers, main, rows_to_divide))


def _train_on_workers(main, rows_to_divide):
    check_used(("tracker_project", given("tracker"), "is for --tracker, which is not given"))
    if FLAGS.ray_workers == 0:  # this is a worker
        return main()
    from txl_tf.config import TrainingClusterConfig

    cluster = cluster_of(TrainingClusterConfig)
    if not cluster.given:
        return main()
    if FLAGS.strategy not in ("auto", "multi_worker"):
        raise ValueError(f"strategy must be auto or multi_worker with ray_workers, got {FLAGS.strategy}")
    from txl_tf.cluster.training import run_workers

    rows = rows_to_divide() if cluster.ray_min_workers else []
    status, errors = run_workers([*sys.argv, "--ray_workers=0"], cluster, _write_out, rows)
    sys.stderr.write(errors)
    return status


def _write_out(data):
    sys.stdout.buffer.write(data)
    sys.stdout.flush()


@contextlib.contextmanager
def _ending():
    """What is left to do where a program may end: its output is written, or said to be lost; Ctrl-C is a status."""
    if sys.stdout is None:  # as after >&-
        sys.stdout = open(os.devnull, "w")
    if isinstance(sys.stdout, io.TextIOWrapper):  # what its encoding lacks is written as \u8bd7
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(130)
    except SystemExit as end:
        if isinstance(end.code, str):
            sys.exit(_shortened(end.code))
        raise
    except BrokenPipeError:  # of --help
        _close_stdout()
        sys.exit(0)
    finally:
        try:
            sys.stdout.flush()
        except OSError as error:
            _close_stdout(error)
        gc.freeze()  # where the process ends, it does so without a collection of all that is left, which takes a second
        if _lost_output:
            sys.exit(f"{os.path.basename(sys.argv[0])}: the standard output cannot be written: {_lost_output[0]}")


def _shortened(message, most=None):
    from txl_tf.errors import MOST_CHARACTERS, shortened

    return shortened(message, most or MOST_CHARACTERS)


def _parse(argv):
    """Reads the flags; of what absl has no line for, or a long one, says one short line."""
    from txl_tf.environment import is_pipe

    way = "\nPass --helpshort or --helpfull to see help on flags."
    flag_files = _flagfiles(argv)
    if pipes := list(filter(is_pipe, flag_files)):  # to read from which would wait for ever
        named = f"--flagfile={', '.join(pipes)} must be a file, and is a named pipe or a socket"
        sys.exit(_shortened(f"{os.path.basename(argv[0])}: {named}"))
    try:
        return FLAGS(argv)
    except UnicodeDecodeError:
        files = [path for path in flag_files if not _is_text(path)]
        error, way = f"--flagfile={', '.join(files)} must be a text file in {locale.getpreferredencoding(False)}", ""
    except flags.Error as found:
        error = f"FATAL Flags parsing error: {found}"
    except ValueError as found:  # a value for a negated switch, such as --nountie_r=true
        error, way = str(found), ""
    except RecursionError:  # absl compares an unknown flag with all others, letter by letter
        error = f"FATAL Flags parsing error: Unknown command line flag among {' '.join(argv[1:])}"
    start = "" if error.startswith("FATAL") else f"{os.path.basename(argv[0])}: "
    sys.exit(f"{start}{_shortened(_visible(_on_one_line(error)), 400)}{way}")


def _flagfiles(argv, known=()):
    """The files of flags that the command line names, and those that these name in their lines."""
    pairs = itertools.pairwise([*argv, ""])
    found = [re.fullmatch(r"--?flagfile(?:=(.*))?", word, re.S) and (word, following) for word, following in pairs]
    files = list(known)
    for word, following in filter(None, found):
        path = os.path.expanduser(word.partition("=")[2] or following)
        if path not in files:
            files = _flagfiles(_lines_of(path), [*files, path])
    return files


def _lines_of(path):
    """The lines of a plain file of flags; nothing of any other, such as /dev/stdin, which can be read once."""
    try:
        with open(path, errors="replace") if os.path.isfile(path) else io.StringIO() as file:
            return [line.strip() for line in file]
    except (OSError, ValueError):
        return []


def _is_text(path):
    try:
        with open(path) as file:
            file.read()
    except UnicodeDecodeError:
        return False
    return True


def _interrupt(number, frame):
    """As Python's own handler, but once: of many signals, the others must not hit the exception on its way."""
    if not isinstance(sys.exception(), (KeyboardInterrupt, SystemExit)):
        raise KeyboardInterrupt


_lost_output = []  # why what was to be printed is lost, unless nobody reads it


def _close_stdout(error=None):
    """Has nothing more written to an output that failed: a pipe or terminal that nobody reads, or a full disk."""
    if error is not None and error.errno not in (errno.EPIPE, errno.EIO):
        _lost_output.append(error.strerror)
    with contextlib.suppress(OSError, ValueError):  # it has no file, as in tests
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _StdoutHandler(logging.StreamHandler):
    """Writes to whatever `sys.stdout` is at the moment, and what could move a terminal's cursor as `\\x1b`."""

    def __init__(self):
        super().__init__(sys.stdout)

    stream = property(lambda self: sys.stdout, lambda self, value: None)

    def format(self, record):
        return "\n".join(map(_shortened, _visible(super().format(record)).split("\n")))

    def handleError(self, record):
        """Where nothing can be written, the program ends as after SIGHUP: a training is saved."""
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)
            return
        _close_stdout(sys.exception())
        handler = signal.getsignal(signal.SIGHUP)
        if callable(handler):
            signal.raise_signal(signal.SIGHUP)
        elif handler == signal.SIG_DFL:  # it has nothing to save
            sys.exit(0)


def _visible(text):
    from txl_tf.errors import visible

    return visible(text)


def names_of(model_dirs):
    """The last names of folders, or the whole paths where two are the same."""
    names = [os.path.basename(os.path.normpath(path)) for path in model_dirs]
    return names if len(set(names)) == len(names) else model_dirs


def with_checkpoint(folder, use):
    """`use(path)` of the checkpoint that --ckpt_path names, and a line on the standard error that says which it is.

    It is called again where a training deletes the checkpoint before it is read.
    """

    def named(path):
        print(f"checkpoint: {folder.name_of(path)}", file=sys.stderr)
        return use(path)

    return folder.with_checkpoint(FLAGS.ckpt_path, named)


def load_model(folder, **changes):
    """The model of a run with the weights of that checkpoint."""
    return with_checkpoint(folder, functools.partial(folder.load_model, **changes))


class _StderrHandler(_StdoutHandler):
    """The same for `sys.stderr`."""

    stream = property(lambda self: sys.stderr, lambda self, value: None)


@contextlib.contextmanager
def messages_to_stderr():
    """Has the library's messages written to the standard error, where the standard output is for answers.

    A decorator, too: `@messages_to_stderr()` above the `main` of a program.
    """
    logger = logging.getLogger("txl_tf")
    before, logger.handlers = logger.handlers, [_StderrHandler()]
    try:
        yield
    finally:
        logger.handlers = before


def log_to_stdout():
    """Has the library's messages printed to the standard output, as they are."""
    logger = logging.getLogger("txl_tf")
    if not any(isinstance(handler, _StdoutHandler) for handler in logger.handlers):
        logger.addHandler(_StdoutHandler())
    logger.setLevel(logging.INFO)
    logger.propagate = False


def _tensorflow_errors():
    """Such as a file that may not be read, or too little memory; evaluated only after an error."""
    from tensorflow import errors

    return (errors.OpError,)


def _message_of(error):
    from txl_tf.files import reason

    message = str(error) if isinstance(error, (ValueError, OSError)) else reason(error)
    undecoded = [argument for argument in sys.argv if re.search("[\ud800-\udfff]", argument)]
    if isinstance(error, UnicodeEncodeError) and undecoded:
        argument = os.fsencode(undecoded[0]).decode("utf-8", "backslashreplace")
        encoding = sys.getfilesystemencoding()
        message = f"{argument} must be in {encoding}, the encoding of the locale; with PYTHONUTF8=1 in UTF-8"
    return "\n".join([_on_one_line(message), *getattr(error, "__notes__", [])])


def _on_one_line(message):
    """A message in which newlines of the command line's values are written as \\n, as in a name of a file."""
    values = {word.partition("=")[2] or word for word in sys.argv if "\n" in word}
    for value in sorted(values, key=len, reverse=True):
        message = message.replace(value, value.replace("\n", "\\n"))
    return message


def _refuse_stray(argv):
    path, *stray = argv
    if stray:
        named = _visible(_on_one_line(" ".join(stray)))
        sys.exit(f"{os.path.basename(path)}: unexpected arguments: {named}")


_NAMES = (  # flags that name a file, a folder or an address; those of `txl_tf.config` are checked there
    "ckpt_path", "corpus", "data_dir", "download_url", "figures", "font", "host", "input", "lexicon", "output",
    "output_dir", "prompt_file", "pytorch_checkpoint", "text_path", "tf1_checkpoint",
)  # fmt: skip


def _refuse_empty():
    """Ends the program where a flag names a file by nothing, as an unset variable of a shell does."""
    for name in given(_NAMES):
        if FLAGS[name].value == "":
            sys.exit(f"{os.path.basename(sys.argv[0])}: --{name} must not be empty: name a file, or leave it out")


def _run(main, argv):
    _refuse_stray(argv)
    _refuse_empty()
    verbose = FLAGS["verbosity"].present
    if not verbose:
        absl_logging.set_verbosity(absl_logging.WARNING)
    log_to_stdout()
    _import_tensorflow()
    load_package()
    gc.freeze()  # collections need not look at what the imports made
    try:
        return main()
    except BrokenPipeError:
        _close_stdout()
        sys.exit(0)
    except (ValueError, OSError, *_tensorflow_errors()) as error:
        if verbose:
            raise
        message = _shortened(f"{os.path.basename(argv[0])}: {_visible(_message_of(error))}", 460)
        message += "\n(--verbosity=1 shows where)"
        status = getattr(error, "status", None)
        if status is None:
            sys.exit(message)
        print(message, file=sys.stderr)
        sys.exit(status)
