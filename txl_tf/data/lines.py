"""Answers to a stream of text lines, in their order, block by block. A `LineError` replaces an answer that failed.

`encode(line)` prepares a line; if it raises ValueError, the line has no answer. `answer(prepared)` returns the answers
to a list of prepared lines, one for each, for example computed in batches of similar length:

    for found in answers(lines, encode, answer, strict=False):
        print(found)  # a `LineError` prints "in.txt, line 2 is empty"
"""

from __future__ import annotations

import codecs
import itertools
import json
import os
import re
import select
from collections.abc import Callable, Iterable, Iterator, Sized
from io import BufferedReader
from typing import Any

from txl_tf.calls import check_true_or_false
from txl_tf.data.encodings import conversion_advice, probable_encoding
from txl_tf.data.text_files import pieces_with_newlines
from txl_tf.errors import ParameterError, brief, shortened

_PAUSE = 0.1  # seconds without input after which the lines so far are answered
BLOCK_LINES = 20_000  # of a block by default: enough to find lines of equal length for every batch
BLOCK_SIZE = 16 << 20  # characters or bytes of lines; a block ends when it has so many
LINE = "text"  # how errors of `encode` call the line; `Vocab.encode` adds ", line 1"


class LineError(ValueError):
    """A line cannot be answered. The error is raised, or replaces the answer in the list of answers.

    Args:
        line: the line.
        number: number of the line, counted from 1.
        error: why `encode` refused the line. Its notes become notes of this error.
        name: how the message calls the lines, such as the path of their file.

    Attributes:
        number: as above.
        reason: such as "line 2 is empty".
        text: text of the line; bytes that are not UTF-8 are decoded by `surrogateescape`.
    """

    def __init__(self, line: str | bytes, number: int, error: ValueError, name: str):
        message = str(error)
        # "text, line 1 is empty" becomes "line 2 is empty"; another message follows a colon.
        rest = message.removeprefix(LINE).removeprefix(", line 1") if message.startswith(LINE) else f": {message}"
        self.number = number
        self.reason = f"line {number}{rest}"
        self.text = (line if isinstance(line, str) else line.decode("utf-8", "surrogateescape")).removesuffix("\n")
        super().__init__(shortened(f"{name}, {self.reason}"))
        for note in getattr(error, "__notes__", []):
            self.add_note(note)


def encoded(
    lines: Iterable,
    encode: Callable[..., Any],
    name: str = "text",
    strict: bool = True,
    numbers: Iterable[int] | None = None,
) -> Iterator:
    """Yields `encode(line)` for every line.

    Where that raises ValueError, raises a `LineError` or, if not `strict`, yields it.

    Args:
        lines: the lines.
        encode: see the top of this file.
        name: name of the lines in errors, such as the path of their file.
        strict: whether to raise the first `LineError` instead of yielding it.
        numbers: numbers of the lines, at least as many as lines; by default they are counted from 1.

    Raises:
        ParameterError: there are fewer numbers than lines, or `strict` is neither True nor False.
    """
    check_true_or_false(strict=strict)
    counter = itertools.count(1) if numbers is None else iter(numbers)
    for line in lines:
        number = next(counter, None)
        if number is None:
            raise ParameterError("numbers", None, "as many as lines", "numbers must be as many as lines, got fewer")
        try:
            result = encode(line)
        except ValueError as error:
            result = LineError(line, number, error, name)
            if strict:
                raise result from error
        yield result


def in_places(answer: Callable[[list], Iterable], items: Iterable) -> list:
    """Returns a list with the answer to each item, in order. A `LineError` is its own answer.

    Args:
        answer: function of a list of the items that are no `LineError`. It returns their answers, in order.
        items: prepared lines and `LineError`s, from `encoded`.
    """
    items = list(items)
    answers = iter(answer([item for item in items if not isinstance(item, LineError)]))
    return [item if isinstance(item, LineError) else next(answers) for item in items]


def answers(
    lines: Iterable[str | bytes | None],
    encode: Callable[[str | bytes], Any],
    answer: Callable[[list], Iterable],
    name: str = "text",
    strict: bool = True,
    most: int | None = None,
    numbers: Iterable[int] | None = None,
) -> Iterator:
    """Yields the answer to every line, or its `LineError`, in the order of the lines and in bounded memory.

    Args:
        lines: see `in_blocks`.
        encode, answer: see the top of this file.
        name, strict, numbers: see `encoded`.
        most: largest number of lines that are answered together, see `in_blocks`.
    """
    numbers = itertools.count(1) if numbers is None else iter(numbers)
    for block in in_blocks(lines, most):
        yield from in_places(answer, encoded(block, encode, name, strict, itertools.islice(numbers, len(block))))


def in_blocks(lines: Iterable[str | bytes | None], most: int | None = None) -> Iterator[list[str | bytes]]:
    """Yields lists of lines, to be answered together.

    A list ends when it has `most` lines, by default `BLOCK_LINES`, or `BLOCK_SIZE` characters or bytes. `None` from an
    iterator ends a list at once, for example when a pipe has no more lines for the moment. In a list of lines, which
    never has to wait, `None` is a missing line.

    Raises:
        ParameterError: `lines` is one string or bytes, a set, which has no order, or nothing that can be iterated; or
            one of them is neither string nor bytes.
    """
    if isinstance(lines, (str, bytes, set, frozenset)) or not isinstance(lines, Iterable):
        allowed = "a list or an iterator of lines"
        raise ParameterError("lines", lines, allowed, f"lines must be {allowed}, got one {type(lines).__name__}")
    most = most or BLOCK_LINES
    may_pause = not isinstance(lines, Sized)
    block = []
    size = 0
    for number, line in enumerate(lines, 1):
        if not isinstance(line, (str, bytes)) and not (line is None and may_pause):
            message = f"lines must be strings or bytes, got {brief(line)}, which is number {number:,} of them"
            raise ParameterError("lines", line, "strings or bytes", message)
        if line is not None:
            block.append(line)
            size += len(line)
        if block and (line is None or len(block) >= most or size >= BLOCK_SIZE):
            yield block
            block = []
            size = 0
    if block:
        yield block


def arriving(file: BufferedReader, before: Callable[[], None] | None = None) -> Iterator[bytes | None]:
    """Yields the pieces of a file as they arrive, and `None` when nothing more has arrived for a tenth of a second.

    On systems that are not POSIX, it cannot wait, so it never yields `None`.

    Args:
        file: a file or a pipe.
        before: called before each read, for example to print a prompt.
    """
    while True:
        if before:
            before()
        piece = file.read1(1 << 20)
        if not piece:
            return
        yield piece
        if os.name == "posix" and not select.select([file], [], [], _PAUSE)[0]:
            yield None


def without_mark(pieces: Iterable[bytes | None]) -> Iterator[bytes | None]:
    """Yields the pieces of a file without the byte order mark at its beginning, if it has one.

    `None` among the pieces is yielded, too. The first other piece must contain the whole mark.
    """
    pieces = iter(pieces)
    for piece in pieces:
        yield piece and piece.removeprefix(codecs.BOM_UTF8)
        if piece:
            break
    yield from pieces


def lines_in(pieces: Iterable[bytes | None], any_end: bool = False) -> Iterator[bytes | None]:
    r"""Yields the lines in pieces of bytes, without their ends. `None` among the pieces is yielded, too.

    A line ends with `\n`; with `any_end` also with `\r\n` or `\r`. The last line may have no end.
    """
    pieces = pieces_with_newlines(pieces) if any_end else pieces
    return joined_lines(None if piece is None else _at_newlines(piece) for piece in pieces)


def _at_newlines(piece: bytes) -> tuple[list[bytes], bytes]:
    """Cuts a piece at its newlines: `(lines, rest)`, see `joined_lines`. The lines have no ends."""
    *lines, rest = piece.split(b"\n")
    return lines, rest


def joined_lines(pieces: Iterable[tuple[list[bytes], bytes] | None]) -> Iterator[Any]:
    """Yields the lines of pieces, of which a line may span any number. `None` among the pieces is yielded, too.

    The time is linear in the length of the text.

    Args:
        pieces: `(lines, rest)` of each piece: the lines that end in it, and the beginning of a line that does not.
            After the last piece, a rest that is not empty is a line.
    """
    begun: list[bytes] = []  # the parts of a line that has not ended yet
    for piece in pieces:
        if piece is None:
            yield None
            continue
        lines, rest = piece
        if lines:
            yield b"".join([*begun, lines[0]])
            yield from lines[1:]
            begun = []
        begun.append(rest)
    last = b"".join(begun)
    if last:
        yield last


def as_json(values: dict[str, Any]) -> str:
    r"""Returns values as one line of JSON, with a newline.

    Strings may be decoded by `surrogateescape`: a byte that is not UTF-8 becomes text such as `\xe9`, because JSON is
    text. Other halves of surrogate pairs become U+FFFD.
    """
    line = json.dumps(values, ensure_ascii=False)
    line = re.sub("[\udc80-\udcff]", lambda match: f"\\\\x{ord(match[0]) - 0xDC00:02x}", line)
    return re.sub("[\ud800-\udfff]", "\ufffd", line) + "\n"


def decoded(text: str | bytes, errors: str = "strict", name: str = LINE) -> str:
    """Decodes a text from a user or a file.

    Args:
        text: bytes, or a string that was decoded by `surrogateescape`.
        errors: as in `bytes.decode`.
        name: how errors call the text.

    Raises:
        ParameterError: the text is not UTF-8, and `errors` is "strict": the value of the error is the probable
            encoding. Or a string has half of a surrogate pair, whatever `errors` is; or the text is neither a string
            nor bytes.
    """
    if not isinstance(text, (str, bytes)):
        raise ParameterError(name, text, "a string or bytes")
    try:
        data = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
    except UnicodeEncodeError as error:  # half of a surrogate pair
        raise ParameterError(name, None, "UTF-8", f"{name} is not UTF-8 text: see its byte {error.start}") from error
    try:
        return data.decode("utf-8", errors)
    except UnicodeDecodeError as error:
        message = f"{name} is not UTF-8 text: see its byte {error.start}"
        failure = ParameterError(name, probable_encoding(data), "UTF-8", message)
        if advice := conversion_advice(data):
            failure.add_note(advice)
        raise failure from error


def text_of(line: str | bytes, errors: str = "strict", zeros: bool = False) -> str:
    """Decodes a line as `decoded` does, and removes the newline at its end.

    Args:
        line: see `decoded`.
        errors: as in `bytes.decode`. Unless it is "strict", the line may have any bytes.
        zeros: whether bytes may have zero bytes. A string may have them, as in the rows of JSON that a model reads in
            training; but plain files of training text have none.

    Raises:
        ParameterError: as in `decoded`; or the line is bytes and has a zero byte.
    """
    text = decoded(line, errors)
    if isinstance(line, bytes) and b"\0" in line and errors == "strict" and not zeros:
        where = line.index(b"\0")
        message = f"{LINE} has a zero byte (NUL), which no text contains: see its byte {where}"
        failure = ParameterError(LINE, None, "text without zero bytes", message)
        # A later line of UTF-16 begins with the second byte of a newline, and looks as if its bytes were swapped.
        if where and (advice := conversion_advice(line)):
            failure.add_note(advice)
        raise failure
    return text.removesuffix("\n")


def sentence_of(line: str | bytes) -> str:
    r"""Decodes a line, and removes `\n` or `\r\n` at its end.

    Raises:
        ParameterError: the line is not UTF-8, is bytes with a zero byte, or consists of several lines.
    """
    text = text_of(line).removesuffix("\r")
    if "\n" in text:
        raise ParameterError(LINE, text, "one line", f"{LINE} must be one line, got {text.count(chr(10)) + 1}")
    return text
