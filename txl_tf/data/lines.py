"""Answers to a stream of text lines, in their order, block by block. A `LineError` replaces an answer that failed.

`encode(line)` prepares a line; if it raises ValueError, the line has no answer. `answer(encoded)` returns the answers
to a list of prepared lines, for example in batches of similar length:

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
from collections.abc import Callable, Iterable, Iterator
from io import BufferedReader
from typing import Any

from txl_tf.data.encodings import converting, probable_encoding
from txl_tf.data.text_files import pieces_with_newlines
from txl_tf.errors import ParameterError, shortened

_PAUSE = 0.1  # seconds without input after which the lines so far are answered
BLOCK_LINES = 20_000  # enough to find lines of equal length for every batch
BLOCK_SIZE = 16 << 20  # characters or bytes
LINE = "text"  # how errors of `encode` call the line; `Vocab.encode` adds ", line 1"


class LineError(ValueError):
    """A line cannot be answered. The error is raised, or replaces the answer in the list of answers.

    Attributes:
        number: of the line, counted from 1.
        reason: such as "line 2 is empty".
        text: of the line; bytes that are not UTF-8 are decoded by `surrogateescape`.
    """

    def __init__(self, line: str | bytes, number: int, error: ValueError, name: str):
        what = str(error)
        what = what.removeprefix(LINE).removeprefix(", line 1") if what.startswith(LINE) else f": {what}"
        self.number = number
        self.reason = f"line {number}{what}"
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
    """Yields `encode(line)` for every line, or a `LineError` if that failed.

    Args:
        lines, encode: see above.
        name: how errors call the lines.
        strict: whether to raise the `LineError`.
        numbers: numbers of the lines; by default they are counted from 1.
    """
    for number, line in zip(numbers or itertools.count(1), lines, strict=False):
        try:
            result = encode(line)
        except ValueError as error:
            result = LineError(line, number, error, name)
            if strict:
                raise result from error
        yield result


def in_places(answer: Callable[[list], Iterable], items: Iterable) -> list:
    """Returns the answers to the items that are not a `LineError`; a `LineError` keeps its position."""
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
    """Yields the answers to lines, in their order and in bounded memory.

    Args:
        lines: see `in_blocks`.
        encode, answer: see above.
        name, strict, numbers: see `encoded`.
        most: number of lines that are answered together, see `in_blocks`.
    """
    numbers = itertools.count(1) if numbers is None else iter(numbers)
    for block in in_blocks(lines, most):
        yield from in_places(answer, encoded(block, encode, name, strict, itertools.islice(numbers, len(block))))


def in_blocks(lines: Iterable[str | bytes | None], most: int | None = None) -> Iterator[list[str | bytes]]:
    """Yields lists of `most` or `BLOCK_LINES` lines, to be answered together.

    `None` among the lines ends a list at once, for example when a pipe has no more lines for the moment.
    """
    if isinstance(lines, (str, bytes)):
        allowed = "a list or an iterator of lines"
        raise ParameterError("lines", lines, allowed, f"lines must be {allowed}, got one {type(lines).__name__}")
    most = most or BLOCK_LINES
    block = []
    size = 0
    for line in lines:
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
    """Yields the pieces of a file as they arrive, and `None` wherever nothing more comes for a while.

    Args:
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
    """Yields the pieces of a file without a byte order mark at its beginning. The mark must be in the first piece."""
    pieces = iter(pieces)
    for piece in pieces:
        yield piece and piece.removeprefix(codecs.BOM_UTF8)
        if piece:
            break
    yield from pieces


def lines_in(pieces: Iterable[bytes | None], any_end: bool = False) -> Iterator[bytes | None]:
    r"""Yields the lines in pieces of bytes, without their ends. `None` among the pieces stays.

    A line ends with `\n`; with `any_end` also with `\r\n` or `\r`.
    """
    rest = b""
    for piece in pieces_with_newlines(pieces) if any_end else pieces:
        if piece is None:
            yield None
            continue
        *lines, rest = (rest + piece).split(b"\n")
        yield from lines
    if rest:
        yield rest


def as_json(values: dict[str, Any]) -> str:
    r"""Returns a line of JSON. A byte that is not part of a character becomes the text `\xe9`, because JSON is text."""
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
        ParameterError: it is not UTF-8, and `errors` is "strict". The value is the probable encoding.
    """
    try:
        data = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
    except UnicodeEncodeError as error:  # half of a surrogate pair
        raise ParameterError(name, None, "UTF-8", f"{name} is not UTF-8 text: see its byte {error.start}") from error
    try:
        return data.decode("utf-8", errors)
    except UnicodeDecodeError as error:
        message = f"{name} is not UTF-8 text: see its byte {error.start}"
        failure = ParameterError(name, probable_encoding(data), "UTF-8", message)
        if way := converting(data):
            failure.add_note(way)
        raise failure from error


def text_of(line: str | bytes, errors: str = "strict") -> str:
    """Returns a line as `decoded` does, without the newline at its end."""
    return decoded(line, errors).removesuffix("\n")


def sentence_of(line: str | bytes) -> str:
    r"""Returns a line as text, without `\n` or `\r\n` at its end. Raises ParameterError if there are several lines."""
    text = text_of(line).removesuffix("\r")
    if "\n" in text:
        raise ParameterError(LINE, text, "one line", f"{LINE} must be one line, got {text.count(chr(10)) + 1}")
    return text
