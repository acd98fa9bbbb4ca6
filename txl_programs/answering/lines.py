"""Reads the lines of --input, and writes their answers, messages and progress."""

import contextlib
import itertools
import os
import sys
from collections.abc import Iterator
from typing import Any

import keras

from txl_config.errors import ParameterError, visible
from txl_programs.flag_values import FLAGS, given
from txl_tf.data.inputs import check_readable
from txl_tf.data.line_files import Tally, nothing
from txl_tf.data.lines import arriving, lines_in, without_mark
from txl_tf.data.text_files import read_files
from txl_tf.files import check_not_packed, check_writable, new_file
from txl_tf.runs.folder import check_spares_runs

# Flags that name files to read.
_READ = ("input", "tagged", "pairs", "lexicon", "json_schema", "text_path", "data_path", "figures", "font")


def input_lines(plain_text=True):
    """Opens --input, a file or the standard input. On a terminal, it prompts for lines with "> ".

    Args:
        plain_text: whether any end of a line counts, see `lines_in`, and a byte order mark at the beginning does not.

    Returns:
        `(lines, name)`: an iterator of the lines as bytes without line ends, with `None` wherever the standard input
        pauses; and the name of the input for messages.

    Raises:
        OSError, ParameterError: the file cannot be read or is empty, or the standard input is closed.
    """
    pieces: Iterator[Any]
    if FLAGS.input in (None, "-"):
        if sys.stdin is None:
            raise ParameterError("input", FLAGS.input, "a file", "the standard input is closed: give --input")
        prompt = (lambda: print("> ", end="", file=sys.stderr, flush=True)) if sys.stdin.isatty() else None
        stdin: Any = sys.stdin.buffer  # a BufferedReader, although its type does not say so
        pieces, name = arriving(stdin, prompt), "standard input"
    else:
        check_readable("input", FLAGS.input)
        pieces, name = read_files([FLAGS.input], "byte"), FLAGS.input  # bytes, with this level
        first = next(pieces)  # an unreadable file raises its error here, before a model is loaded
        pieces = itertools.chain([first], pieces)
    return lines_in(without_mark(pieces) if plain_text else pieces, any_end=plain_text), name


def check_output():
    """Checks --output.

    Raises:
        ParameterError: --output is a file that the program reads or a part of a run, or ends as a compressed file.
        OSError: it cannot be written.
    """
    if FLAGS.output:
        check_not_read(FLAGS.output)
    check_spares_runs("output", FLAGS.output)
    check_not_packed("output", FLAGS.output)
    check_writable(FLAGS.output)


def check_not_read(*outputs):
    """Raises ParameterError if one of the `outputs`, paths of files to write, is a file that another flag names."""
    written = set(map(os.path.realpath, outputs))
    for name in given(_READ):
        value: Any = FLAGS[name].value
        paths = [*value, ",".join(value)] if isinstance(value, list) else [value]  # a path may contain a comma
        for path in paths:
            if os.path.isfile(path) and os.path.realpath(path) in written:
                message = f"--output must not overwrite --{name}={path}, which is read, got {FLAGS.output}"
                raise ParameterError("output", FLAGS.output, f"another file than --{name}", message)


def write_answers(answers, text, numbers=nothing, raw=False):
    """Writes each answer as soon as it arrives: to the standard output, or to a new file.

    The new file becomes --output when all lines are answered.

    Args:
        answers: an iterator of answers, with a `LineError` for a line without an answer. The message of the error goes
            to the standard error.
        text, numbers: see `Answering`.
        raw: whether control characters are written to a terminal unchanged.

    Returns:
        The `Tally` of the answers, without messages.
    """
    tally = Tally()
    with _output(raw) as write:
        for number, answer in enumerate(answers, 1):
            tally.count(answer, numbers)
            say_missing(tally)
            write(text(answer, number))
    say_how_many(tally)
    return tally


def say_missing(tally):
    """Writes the messages of a tally to the standard error, and removes them from it."""
    for message in tally.messages:
        print(visible(message), file=sys.stderr)
    tally.messages.clear()


def say_how_many(tally):
    """Prints how many lines have no answer, and what can be done about it. Prints nothing if all lines have one."""
    if tally.missing:
        ends = f"lines without an answer: {tally.missing:,}; --strict stops at the first"
        print(*tally.notes, ends, sep="\n", file=sys.stderr)


def progress_bar(lines=None):
    """Returns Keras's progress bar, or `None` if the standard output is not a terminal.

    Args:
        lines: number of lines; `None` if it is unknown.
    """
    return keras.utils.Progbar(lines, verbose=1, unit_name="line") if sys.stdout.isatty() else None


@contextlib.contextmanager
def _output(raw):
    """Yields a function that writes an answer to --output or to the standard output.

    The file --output appears at the end of the block. `raw`: see `write_answers`.
    """
    bar = progress_bar() if FLAGS.output else None

    def write_to_file(text):
        """Writes an answer to --output, and advances the progress bar on a terminal."""
        file.write(text.encode("utf-8", "surrogateescape"))
        if bar:
            bar.add(1)

    def write_to_stdout(text):
        """Writes an answer to the standard output. On a terminal, control characters become visible, unless `raw`."""
        if sys.stdout.isatty() and not raw:
            sys.stdout.write(visible(text))
        else:
            sys.stdout.buffer.write(text.encode("utf-8", "surrogateescape"))
        sys.stdout.flush()

    if FLAGS.output:
        with new_file(FLAGS.output) as file:
            yield write_to_file
    else:
        yield write_to_stdout
