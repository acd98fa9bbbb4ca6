"""Lines that are answered as they come: where they come from, and where the answers go."""

import contextlib
import itertools
import os
import sys

import keras

from txl_programs.program import FLAGS
from txl_tf.data.line_files import Tally, nothing
from txl_tf.data.lines import arriving, lines_in, without_mark
from txl_tf.data.text_files import read_files
from txl_tf.errors import visible
from txl_tf.files import check_writable, new_file, same_path


def input_lines(any_end=True):
    """`(lines, name)` of --input: bytes without line ends, and `None` wherever nothing more comes for the moment.

    A file that cannot be read is an error at once. `any_end`: see `lines_in`.
    """
    if FLAGS.input in (None, "-"):
        if sys.stdin is None:
            raise ValueError("the standard input is closed: give --input")
        prompt = (lambda: print("> ", end="", file=sys.stderr, flush=True)) if sys.stdin.isatty() else None
        return lines_in(without_mark(arriving(sys.stdin.buffer, prompt)), any_end), "standard input"
    pieces = read_files([FLAGS.input], "byte")
    return lines_in(without_mark(itertools.chain([next(pieces)], pieces)), any_end), FLAGS.input


def check_output(*inputs):
    """Raises ValueError where --output is one of the files `inputs`, and OSError where it cannot be written."""
    for path in inputs:
        if FLAGS.output and path and os.path.isfile(path) and same_path(path, FLAGS.output):
            raise ValueError(f"--output must be another file than {path}, whose lines are answered, got {FLAGS.output}")
    check_writable(FLAGS.output)


def write_answers(answers, text, numbers=nothing, raw=False):
    """Writes what there is to be written of each answer to --output or the standard output, as the answers come.

    Args:
        answers: an iterator, with a `LineError` for a line that has no answer. That is written to the standard error.
        text, numbers: see `Answering`.
        raw: whether control characters go to a terminal as they are.

    Returns:
        Their `Tally`, without messages.
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
    """Takes the messages out of a tally and writes them to the standard error."""
    for message in tally.messages:
        print(visible(message), file=sys.stderr)
    tally.messages.clear()


def say_how_many(tally):
    """Says of all lines how many have no answer, if any, and what can be done about it."""
    if tally.missing:
        ends = f"lines without an answer: {tally.missing:,}; --strict stops at the first"
        print(*tally.notes, ends, sep="\n", file=sys.stderr)


def progress_bar(lines=None):
    """Keras's, on a terminal, else `None`."""
    return keras.utils.Progbar(lines, verbose=1, unit_name="line") if sys.stdout.isatty() else None


@contextlib.contextmanager
def _output(raw):
    """A function that writes text to --output, which appears when it is whole, or to the standard output."""
    if FLAGS.output:
        bar = progress_bar()
        with new_file(FLAGS.output) as file:
            yield lambda text: (file.write(text.encode("utf-8", "surrogateescape")), bar and bar.add(1))
        return

    def write(text):
        if sys.stdout.isatty() and not raw:
            sys.stdout.write(visible(text))
        else:
            sys.stdout.buffer.write(text.encode("utf-8", "surrogateescape"))
        sys.stdout.flush()

    yield write
