"""Text files, read in pieces that can be split into tokens one by one."""

from __future__ import annotations

import codecs
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import AnyStr, BinaryIO

from txl_tf.data import inputs
from txl_tf.data.encodings import not_utf8
from txl_tf.errors import ParameterError, named
from txl_tf.files import reading

BLOCK_BYTES = 1 << 20  # of a file that are read at once
MOST_OF_A_WORD = 1 << 20  # characters of a word that goes on from one piece of a text to the next


def pydoc_text() -> str:
    """Python's reference manual as `help()` shows it, with its topics in alphabetical order."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


def read_files(
    paths: Iterable[str], level: str, progress: Callable | None = None, raw_text: bool = True
) -> Iterator[str | bytes]:
    r"""Yields the text of one file after the other, in pieces of about a megabyte.

    Args:
        paths: local or remote files.
        level: `"byte"`: pieces are bytes, of any file. `"char"`: pieces are str. `"word"`: str, cut between words.
            `"line"`: str, cut between lines. At these two levels, a missing newline at the end of a file is added.
            `"subword"`: str, cut between words, and nothing is added.
        progress: called with the number of bytes of each piece.
        raw_text: whether `\r` and byte order marks are text; else see `plain_pieces`.

    Raises:
        FileNotFoundError: a file does not exist.
        ValueError: a file is empty or is not UTF-8 text. Names the file, the byte and the probable encoding.
    """
    for path in paths:
        yield from pieces_of(blocks_of(path, progress), path, level, raw_text=raw_text)


def pieces_of(
    blocks: Iterator[bytes], name: str, level: str, begin: int = 0, raw_text: bool = True, advice: str = ""
) -> Iterator[str | bytes]:
    """The text of blocks, from the byte `begin` on, in pieces as `read_files` gives them; errors call it `name`.

    `advice` is a way out for a text that is not UTF-8.
    """
    if level == "byte":
        return blocks
    pieces = decoded(blocks, name, begin, advice)
    pieces = pieces if raw_text else plain_pieces(pieces)
    return pieces if level == "char" else cut_between(pieces, level, name)


def plain_text(text: str) -> str:
    r"""A text with `\n` for `\r\n` and for every other `\r`, and without byte order marks."""
    return with_newlines(text).replace("\ufeff", "")


def plain_pieces(pieces: Iterable[str]) -> Iterator[str]:
    """`plain_text` of a text that comes in pieces."""
    return (piece.replace("\ufeff", "") for piece in pieces_with_newlines(pieces))


def with_newlines(text: AnyStr) -> AnyStr:
    r"""A text, or bytes, with `\n` for `\r\n` and for every other `\r`."""
    cr, lf = ("\r", "\n") if isinstance(text, str) else (b"\r", b"\n")
    return text.replace(cr + lf, lf).replace(cr, lf) if cr in text else text


def pieces_with_newlines(pieces: Iterable[AnyStr | None]) -> Iterator[AnyStr | None]:
    r"""`with_newlines` of what comes in pieces: a `\r\n` may begin in one and end in the next. `None` stays."""
    after_cr = False
    for piece in pieces:
        if not piece:
            yield piece
            continue
        cr, lf = ("\r", "\n") if isinstance(piece, str) else (b"\r", b"\n")
        rest = piece[1:] if after_cr and piece.startswith(lf) else piece
        after_cr = piece.endswith(cr)
        yield with_newlines(rest)


def numbered_lines(path: str) -> Iterator[tuple[int, str]]:
    r"""The lines of a UTF-8 file from number 1 on, in bounded memory, without their ends and a byte order mark.

    Lines end with `\n`, `\r\n` or `\r`.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is empty or is not UTF-8 text.
    """
    pieces = pieces_with_newlines(decoded(blocks_of(path), path))
    for number, line in enumerate(lines_of(cut_between(pieces, "line")), 1):
        yield number, line.removeprefix("\ufeff") if number == 1 else line


def lines_of(pieces: Iterable[str]) -> Iterator[str]:
    """The lines of pieces that are cut between lines."""
    for piece in pieces:
        yield from piece.split("\n")[:-1]


def blocks_of(path: str, progress: Callable | None = None, begin: int = 0, end: int | None = None) -> Iterator[bytes]:
    """Yields a file, which must not be empty, in blocks of a megabyte.

    Args:
        progress: called with the number of bytes of each block.
        begin, end: the first byte to yield, and that behind the last one; `None`: the end of the file. Blocks end at
            whole megabytes of the file; the first one is larger than a megabyte if it begins within one.
    """
    if not inputs.exists(path):
        raise FileNotFoundError(f"there is no file {named(path)}")
    if inputs.is_folder(path):
        raise ValueError(f"{named(path)} is a folder, not a text file")
    with reading(path), inputs.opened(path) as file:
        if begin:
            file.seek(begin)
        for block in blocks_in(file, path, begin, end):
            yield block
            if progress:
                progress(len(block))


def blocks_in(file: BinaryIO, name: str, begin: int = 0, end: int | None = None) -> Iterator[bytes]:
    """The blocks of an open file, which is at `begin`, as those of `blocks_of`; errors call it `name`."""
    end = math.inf if end is None else end
    place, goal = begin, (math.ceil(begin / BLOCK_BYTES) + 1) * BLOCK_BYTES  # where the block begins and ends
    while place < end and (block := file.read(min(goal, end) - place)):
        yield block
        place, goal = place + len(block), goal + BLOCK_BYTES
    if not place:
        raise ValueError(f"{name} is empty")


def whole_lines(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """The blocks, each cut after its last newline, if it has one: what follows goes to the next block."""
    rest = b""
    for block in blocks:
        cut = block.rfind(b"\n") + 1 or len(block)
        yield rest + block[:cut]
        rest = block[cut:]
    if rest:
        yield rest


def line_start(path: str, place: int) -> int:
    """Where a file can be cut near `place`, which is between two blocks: after a newline, as `whole_lines` cuts it.

    That is the last newline of the block before `place`, or else of the next one that has any, or the end of the file.
    """
    if not place:
        return 0
    begin = place - BLOCK_BYTES
    for block in blocks_of(path, begin=begin):
        cut = block.rfind(b"\n") + 1
        if cut:
            return begin + cut
        begin += len(block)
    return begin


def lines_before(path: str, place: int, raw_text: bool = True) -> int:
    r"""How many lines end before the byte `place` of a file, with `\n` or, unless it is `raw_text`, also with `\r`."""
    count, last = 0, b""
    for block in blocks_of(path, end=place) if place else ():
        count += block.count(b"\n")
        if not raw_text:
            count += block.count(b"\r") - block.count(b"\r\n") - (last == b"\r" and block[:1] == b"\n")
            last = block[-1:]
    return count


def decoded(blocks: Iterable[bytes], path: str, begin: int = 0, advice: str = "") -> Iterator[str]:
    """Yields the text of blocks of UTF-8; errors name the file `path`, of which byte `begin` is the first one."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    position, is_utf8 = begin, False  # of the block in the file; whether there are characters of several bytes before
    for block in itertools.chain(blocks, [b""]):
        data = decoder.getstate()[0] + block  # a character may have begun in the block before
        start = position + len(block) - len(data)
        try:
            text, wrong = decoder.decode(block, final=not block), data.find(b"\0")
        except UnicodeDecodeError as error:
            wrong = error.start
        if wrong >= 0:
            raise not_utf8(path, data, wrong, f"byte {start + wrong}", is_utf8, begins=start == 0, advice=advice)
        yield text
        position += len(block)
        is_utf8 = is_utf8 or not text.isascii()


def cut_between(pieces: Iterable[str], level: str, name: str = "the text") -> Iterator[str]:
    """Cuts each piece after its last newline. A piece without one is cut before its last word; not at level "line".

    At levels "word" and "line", a missing newline at the end is added. At level "subword", a word begins with the
    spaces before it.

    It takes linear time. What cannot be cut stays in memory until it can be, except at level "word".

    Raises:
        ParameterError: at level "word", a word has more characters than `MOST_OF_A_WORD`. Names the text as `name`.
    """
    if level != "subword":
        pieces = with_last_newline(pieces)
    parts, size, enough = [], 0, 0  # the text since the last cut, its length, and the length at which to look again
    for piece in pieces:
        parts.append(piece)
        size += len(piece)
        if size < enough:
            continue
        text = "".join(parts)
        cut = _last_cut(text, level)
        if not cut and level == "word" and size > MOST_OF_A_WORD:
            raise _long_word(text, name)
        yield text[:cut]
        parts, size = [text[cut:]], size - cut
        # The whole text is searched again each time: if that were done at every piece, the time would be quadratic.
        enough = 2 * size if not cut and size > MOST_OF_A_WORD else 0
    if size:
        yield "".join(parts)


def _last_cut(text: str, level: str) -> int:
    """Where `cut_between` cuts a text; 0 if it cannot be cut."""
    if cut := text.rfind("\n") + 1:
        return cut
    if level == "subword":
        return len(text[: max(text.rfind(" "), 0)].rstrip(" "))
    if level == "word":
        return len(text) - len(text.rsplit(None, 1)[-1]) if text and not text[-1].isspace() else len(text)
    return 0


def _long_word(text: str, name: str) -> ParameterError:
    message = (
        f"{name} has a word of more than {MOST_OF_A_WORD:,} characters, which begins with {text[:20]!r}. Level 'word' "
        "splits a text at white space: for a text without any, choose level 'char', 'byte' or 'subword'"
    )
    return ParameterError("level", "word", "char, byte or subword for a text without white space", message)


def with_last_newline(pieces: Iterable[str]) -> Iterator[str]:
    """The pieces, and a newline if there is something in them that does not end with one."""
    last = ""
    for piece in pieces:
        yield piece
        last = piece or last
    if last and not last.endswith("\n"):
        yield "\n"
