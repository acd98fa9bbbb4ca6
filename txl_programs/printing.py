"""The output of programs: the library's messages, the message of an error, and a standard output that is closed."""

from __future__ import annotations

import contextlib
import errno
import gc
import io
import logging
import os
import re
import signal
import stat
import sys
from collections.abc import Iterator
from typing import Any

from txl_config.errors import shortened, visible

_lost_output: list[str] = []  # why the output could not be written, unless its reader has closed it


def program_name(path: str | None = None) -> str:
    """Returns the name of the program for messages, such as train.py: the last part of `path` or of sys.argv[0]."""
    return os.path.basename(sys.argv[0] if path is None else path)


def on_one_line(message: str) -> str:
    r"""Returns a message with `\n` instead of the newlines that come from the command line, such as from file names.

    A value of only white space, as that of `--stop` may be, is left as it is: it could be any newline of the message.
    """
    # A message may contain a word as a whole, or the value of a flag, or only what stands before "=".
    parts = {part for word in sys.argv for part in (word, *word.partition("=")[::2])}
    values = {part for part in parts if "\n" in part and not part.isspace()}
    for value in sorted(values, key=len, reverse=True):
        message = message.replace(value, value.replace("\n", "\\n"))
    return message


# -------------------------------------------------------------------------------------------- the library's messages


class _StdoutHandler(logging.StreamHandler):
    r"""Writes log messages to the stream that `sys.stdout` is at the time of the message.

    Control characters, which could move a cursor, are written like `\x1b`. Long lines are shortened.
    """

    def __init__(self) -> None:
        super().__init__(sys.stdout)

    @property
    def stream(self) -> Any:
        return sys.stdout

    @stream.setter
    def stream(self, value: Any) -> None:
        """Ignores the stream that the base class sets."""

    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(map(shortened, visible(super().format(record)).split("\n")))

    def handleError(self, record: logging.LogRecord) -> None:
        """Handles an error in writing a message. After an OSError, the program ends as it does after SIGHUP.

        A training run thus saves a checkpoint first. A program that ignores SIGHUP, as with nohup, continues without
        the output.
        """
        error = sys.exception()
        if not isinstance(error, OSError):
            super().handleError(record)
            return
        close_stdout(error)
        handler = signal.getsignal(signal.SIGHUP)
        if callable(handler):
            signal.raise_signal(signal.SIGHUP)
        elif handler == signal.SIG_DFL:  # not a training run: there is nothing to save
            sys.exit(0)


class _StderrHandler(_StdoutHandler):
    """Writes log messages to `sys.stderr` as `_StdoutHandler` writes them to `sys.stdout`."""

    @property
    def stream(self) -> Any:
        return sys.stderr

    @stream.setter
    def stream(self, value: Any) -> None:
        """Ignores the stream that the base class sets."""


@contextlib.contextmanager
def messages_to_stderr() -> Iterator[None]:
    """Sends the library's messages to the standard error, for programs that write answers to the standard output.

    It is a decorator, too: `@messages_to_stderr()` above the `main` of a program.
    """
    logger = logging.getLogger("txl_tf")
    before = logger.handlers
    logger.handlers = [_StderrHandler()]
    try:
        yield
    finally:
        logger.handlers = before


def log_to_stdout() -> None:
    """Sends the library's messages from the level INFO on to the standard output, and to no other handler."""
    logger = logging.getLogger("txl_tf")
    if not any(isinstance(handler, _StdoutHandler) for handler in logger.handlers):
        logger.addHandler(_StdoutHandler())
    logger.setLevel(logging.INFO)
    logger.propagate = False


# --------------------------------------------------------------------------------------------------- a program's end


@contextlib.contextmanager
def ending() -> Iterator[None]:
    """Handles the end of the program that runs in the block: flushes its output, and reports output that was lost.

    Ctrl-C ends the program with status 130, and a closed pipe with status 0. A long message in SystemExit is shortened.
    If output could not be written, the status is 1, or the status of the program if that is not 0.
    """
    if sys.stdout is None:  # closed, as after >&-
        sys.stdout = open(os.devnull, "w")
    if isinstance(sys.stdout, io.TextIOWrapper):  # write characters that its encoding lacks as \u8bd7
        sys.stdout.reconfigure(errors="backslashreplace")
    status = 0
    try:
        yield
    except KeyboardInterrupt:
        status = 130
        sys.exit(status)
    except SystemExit as end:
        if isinstance(end.code, str):
            sys.exit(shortened(end.code))
        status = end.code or 0
        raise
    except BrokenPipeError:  # for example, --help into a pipe that is closed
        close_stdout()
        sys.exit(0)
    finally:
        try:
            sys.stdout.flush()
        except OSError as error:
            close_stdout(error)
        gc.freeze()  # skip the garbage collection at the end of the process, which takes a second
        if _lost_output:
            message = f"{program_name()}: the standard output cannot be written: {_lost_output[0]}"
            if status == 0:
                sys.exit(message)
            print(message, file=sys.stderr)  # the program keeps its status


def close_stdout(error: OSError | None = None) -> None:
    """Redirects the standard output to /dev/null, because it cannot be written any more.

    Args:
        error: the reason. `ending` reports it, unless the reader has closed the pipe or the terminal.
    """
    if error is not None and not _reader_has_closed(error):
        _lost_output.append(error.strerror or str(error))
    with contextlib.suppress(OSError, ValueError):  # it has no file, as in tests
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def is_of_stdout(error: OSError) -> bool:
    """Whether an error says that the standard output cannot be written, for example because its disk is full.

    Everything that writes a file names it in its error, see `naming_write_errors`. So an error of the system without a
    name is one of the standard output.
    """
    of_disk = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
    return of_disk and error.filename is None


def _reader_has_closed(error: OSError) -> bool:
    """Whether an error of the standard output means that nobody reads it any more: a closed pipe or terminal.

    EIO of a file is an error of its disk. A closed terminal is still a character device, but no longer `isatty`.
    """
    if error.errno != errno.EIO:
        return error.errno == errno.EPIPE
    try:
        return stat.S_ISCHR(os.fstat(sys.stdout.fileno()).st_mode)
    except (OSError, ValueError):  # it has no file, as in tests
        return False


def message_of(error: Exception) -> str:
    """Returns the message of an error, and its notes on the lines after it.

    Newlines from the command line are written as in `on_one_line`. If an argument of the command line is not in the
    encoding of the locale, the message says so.
    """
    from txl_tf.files import reason

    message = str(error) if isinstance(error, (ValueError, OSError)) else reason(error)
    undecoded = [argument for argument in sys.argv if re.search("[\ud800-\udfff]", argument)]
    if isinstance(error, UnicodeEncodeError) and undecoded:
        argument = os.fsencode(undecoded[0]).decode("utf-8", "backslashreplace")
        encoding = sys.getfilesystemencoding()
        message = f"{argument} must be in {encoding}, the encoding of the locale; with PYTHONUTF8=1 in UTF-8"
    return "\n".join([on_one_line(message), *getattr(error, "__notes__", [])])
