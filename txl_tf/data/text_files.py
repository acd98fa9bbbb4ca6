"""Text files, read in pieces that can be split into tokens one by one."""

from __future__ import annotations

import codecs
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TypeVar

from txl_tf.data import inputs
from txl_tf.data.encodings import not_utf8
from txl_tf.errors import ParameterError, named
from txl_tf.files import naming_read_errors

BLOCK_BYTES = 1 << 20  # of a file that are read at once
MOST_OF_A_WORD = 1 << 20  # characters; a longer word cannot be cut off from the next piece of its text

Progress = Callable[[int], object]  # called after each piece with the number of its bytes
Text = TypeVar("Text", str, bytes)
Piece = TypeVar("Piece", str, "bytes | None")


def pydoc_text() -> str:
    """Returns Python's reference manual as `help()` shows it, with its topics in alphabetical order."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


def read_files(
    paths: Iterable[str], level: str, progress: Progress | None = None, raw_text: bool = True
) -> Iterator[str | bytes]:
    r"""Yields the text of each file in turn, in pieces of about a megabyte.

    Args:
        paths: local or remote files.
        level: `"byte"`: pieces are bytes, of any file. `"char"`: pieces are str. `"word"`: str, cut between words.
            `"line"`: str, cut between lines. At levels `"word"` and `"line"`, a missing newline at the end of a file is
            added. `"subword"`: str, cut between words, and nothing is added.
        progress: called with the number of bytes of each piece.
        raw_text: whether `\r` and byte order marks are text; otherwise, see `plain_pieces`.

    Raises:
        FileNotFoundError: a file does not exist.
        ParameterError: a file is empty or, except at level `"byte"`, is not UTF-8 text or has a zero byte. Names the
            file, the byte and the probable encoding. Or at level `"word"`, a word is too long: see `cut_between`.
    """
    for path in paths:
        yield from pieces_of(blocks_of(path, progress), path, level, raw_text=raw_text)


def pieces_of(
    blocks: Iterator[bytes], name: str, level: str, begin: int = 0, raw_text: bool = True, advice: str = ""
) -> Iterator[str | bytes]:
    """Yields the text of blocks of bytes in pieces, as `read_files` does for a file. Errors: see there.

    Args:
        blocks: blocks of a file.
        name: how errors call the text.
        level: as in `read_files`.
        begin: position in the file of the first byte of `blocks`.
        raw_text: as in `read_files`.
        advice: what to do with a text that is not UTF-8, for the error.
    """
    if level == "byte":
        return blocks
    pieces = decoded_blocks(blocks, name, begin, advice)
    pieces = pieces if raw_text else plain_pieces(pieces)
    return pieces if level == "char" else cut_between(pieces, level, name)


def plain_text(text: str) -> str:
    r"""Returns a text with `\n` in place of `\r\n` and of every other `\r`, and without byte order marks."""
    return with_newlines(text).replace("\ufeff", "")


def plain_pieces(pieces: Iterable[str | bytes]) -> Iterator[str]:
    """Yields the pieces of a text, changed as `plain_text` changes a text. Raises ParameterError if one is bytes."""
    return (piece.replace("\ufeff", "") for piece in pieces_with_newlines(map(checked_string, pieces)))


def checked_string(piece: str | bytes) -> str:
    """Returns a piece of text unchanged. Raises ParameterError if it is bytes, which only level "byte" allows."""
    if isinstance(piece, bytes):
        raise ParameterError("texts", piece, "strings")
    return piece


def with_newlines(text: Text) -> Text:
    r"""Returns a text, or bytes, with `\n` in place of `\r\n` and of every other `\r`."""
    cr, lf = _line_ends(text)
    return text.replace(cr + lf, lf).replace(cr, lf) if cr in text else text


def pieces_with_newlines(pieces: Iterable[Piece]) -> Iterator[Piece]:
    r"""Yields the pieces of a text with `\n` in place of `\r\n`, even if split between two pieces, and of other `\r`.

    `None` among the pieces is yielded unchanged.
    """
    after_cr = False
    for piece in pieces:
        if not piece:
            yield piece
            continue
        text: Any = piece
        cr, lf = _line_ends(text)
        yield with_newlines(text[1:] if after_cr and text.startswith(lf) else text)
        after_cr = text.endswith(cr)


def _line_ends(text: str | bytes) -> tuple[Any, Any]:
    r"""Returns `\r` and `\n` in the type of the text."""
    return ("\r", "\n") if isinstance(text, str) else (b"\r", b"\n")


def numbered_lines(path: str) -> Iterator[tuple[int, str]]:
    r"""Yields the number (from 1) and the text of each line of a UTF-8 file, in bounded memory.

    Lines end with `\n`, `\r\n` or `\r`, which are not part of the text. Neither is a byte order mark.

    Raises:
        FileNotFoundError: the file does not exist.
        ParameterError: the file is empty or is not UTF-8 text.
    """
    pieces = pieces_with_newlines(decoded_blocks(blocks_of(path), path))
    for number, line in enumerate(lines_of(cut_between(pieces, "line")), 1):
        yield number, line.removeprefix("\ufeff") if number == 1 else line


def lines_of(pieces: Iterable[str]) -> Iterator[str]:
    """Yields the lines of pieces that are cut between lines."""
    for piece in pieces:
        yield from piece.split("\n")[:-1]


def blocks_of(path: str, progress: Progress | None = None, begin: int = 0, end: int | None = None) -> Iterator[bytes]:
    """Yields the bytes of a file in blocks of a megabyte.

    Blocks end at whole megabytes of the file. If `begin` is between two of them, the first block is larger: then
    `whole_lines` cuts a part of a file that begins at `line_start` as it cuts the whole file.

    Args:
        path: local or remote file.
        progress: called with the number of bytes of each block.
        begin: position of the first byte to yield.
        end: position after the last byte to yield; `None`: the end of the file.

    Raises:
        FileNotFoundError: the file does not exist.
        ParameterError: the file is empty, or is a folder.
    """
    if not inputs.exists(path):
        raise FileNotFoundError(f"there is no file {named(path)}")
    if inputs.is_folder(path):
        raise ParameterError(path, path, "a text file", f"{named(path)} is a folder, not a text file")
    with naming_read_errors(path), inputs.opened(path) as file:
        if begin:
            file.seek(begin)
        for block in blocks_in(file, path, begin, end):
            yield block
            if progress:
                progress(len(block))


class Readable(Protocol):
    """A file to read bytes from."""

    def read(self, size: int, /) -> bytes: ...


def blocks_in(file: Readable, name: str, begin: int = 0, end: int | None = None) -> Iterator[bytes]:
    """Yields the blocks of an open file, whose position is `begin`; see `blocks_of`.

    Raises:
        ParameterError: the file is empty. The error calls it `name`.
    """
    position = begin
    block_end = (math.ceil(begin / BLOCK_BYTES) + 1) * BLOCK_BYTES
    while end is None or position < end:
        block = file.read((block_end if end is None else min(block_end, end)) - position)
        if not block:
            break
        yield block
        position += len(block)
        block_end += BLOCK_BYTES
    if not position:
        raise ParameterError(name, b"", "a file that is not empty", f"{name} is empty")


def whole_lines(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Yields the blocks, each cut after its last newline: the rest becomes part of the next block.

    A block without a newline is not cut.
    """
    rest = b""
    for block in blocks:
        cut = block.rfind(b"\n") + 1 or len(block)
        yield rest + block[:cut]
        rest = block[cut:]
    if rest:
        yield rest


def line_start(path: str, position: int) -> int:
    """Returns a position near `position` at which `whole_lines` cuts a file: after a newline.

    That is the last newline of the block before `position`, or else of the next block that has one. If none has one, it
    is the end of the file.

    Args:
        path: path of the file.
        position: a multiple of `BLOCK_BYTES`; for 0, the result is 0.
    """
    if not position:
        return 0
    begin = position - BLOCK_BYTES
    for block in blocks_of(path, begin=begin):
        cut = block.rfind(b"\n") + 1
        if cut:
            return begin + cut
        begin += len(block)
    return begin


def lines_before(path: str, position: int, raw_text: bool = True) -> int:
    r"""Counts the lines that end before a position in a file, with `\n` or, unless `raw_text`, also with `\r`."""
    count = 0
    after_cr = False
    for block in blocks_of(path, end=position) if position else ():
        count += block.count(b"\n")
        if not raw_text:
            count += block.count(b"\r") - block.count(b"\r\n")
            if after_cr and block.startswith(b"\n"):  # this newline belongs to the `\r` of the block before
                count -= 1
            after_cr = block.endswith(b"\r")
    return count


def decoded_blocks(blocks: Iterable[bytes], path: str, begin: int = 0, advice: str = "") -> Iterator[str]:
    """Yields the text of each block of UTF-8.

    Args:
        blocks: blocks of a file.
        path: path of the file, for errors.
        begin: position in the file of the first byte of `blocks`.
        advice: what to do with a text that is not UTF-8, for the error.

    Raises:
        ParameterError: the text is not UTF-8, or has a zero byte. Names the byte and the probable encoding.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    position = begin  # of the block in the file
    n_newlines = 0  # in earlier blocks
    is_utf8 = False  # whether an earlier block has a character that is not ASCII, and is UTF-8
    for block in itertools.chain(blocks, [b""]):  # at the empty one, a character that is not complete is an error
        data = decoder.getstate()[0] + block  # a character may have begun in the previous block
        start = position + len(block) - len(data)
        text = ""
        try:
            text = decoder.decode(block, final=not block)
            wrong = data.find(b"\0")
        except UnicodeDecodeError as error:
            wrong = error.start
        if wrong >= 0:
            where = f"byte {start + wrong}"
            if not begin:
                line = n_newlines + data.count(b"\n", 0, wrong) + 1
                where += f", line {line}"
            raise not_utf8(path, data, wrong, where, is_utf8, begins=start == 0, advice=advice)
        yield text
        position += len(block)
        n_newlines += block.count(b"\n")
        is_utf8 = is_utf8 or not text.isascii()


def cut_between(pieces: Iterable[str], level: str, name: str = "the text") -> Iterator[str]:
    """Yields the text of `pieces` in pieces that no word or no line spans. The rest of a piece goes to the next one.

    A piece is cut after its last newline. A piece without a newline is cut before its last word or, at level "word",
    after white space at its end; at level "line", it is not cut. A piece that cannot be cut stays in memory, joined to
    the next ones, until it can be cut. Results may be empty. The time is linear in the length of the text.

    Args:
        pieces: pieces of a text.
        level: "word", "line" or "subword". At level "subword", a word begins with the spaces before it. At the other
            levels, a missing newline at the end is added.
        name: how errors call the text.

    Raises:
        ParameterError: at level "word", more than `MOST_OF_A_WORD` characters have been read without a place to cut. A
            longer word that ends within its piece is accepted.
    """
    if level != "subword":
        pieces = with_last_newline(pieces)
    parts: list[str] = []  # the text since the last cut
    size = 0  # its length
    enough = 0  # the length at which to search it for a cut again
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
        parts = [text[cut:]]
        size -= cut
        # Each search reads the whole text. A search after every piece would take quadratic time.
        enough = 2 * size if not cut and size > MOST_OF_A_WORD else 0
    if size:
        yield "".join(parts)


def _last_cut(text: str, level: str) -> int:
    """Returns the position at which `cut_between` cuts a text; 0 if it cannot be cut."""
    if cut := text.rfind("\n") + 1:
        return cut
    if level == "subword":
        return len(text[: max(text.rfind(" "), 0)].rstrip(" "))
    if level == "word":
        return len(text) - len(text.rsplit(None, 1)[-1]) if text and not text[-1].isspace() else len(text)
    return 0


def _long_word(text: str, name: str) -> ParameterError:
    """Returns the error for a text with a word of more than `MOST_OF_A_WORD` characters."""
    message = (
        f"{name} has a word of more than {MOST_OF_A_WORD:,} characters, which begins with {text[:20]!r}. Level 'word' "
        "splits a text at white space: for a text without any, choose level 'char', 'byte' or 'subword'"
    )
    return ParameterError("level", "word", "char, byte or subword for a text without white space", message)


def with_last_newline(pieces: Iterable[str]) -> Iterator[str]:
    """Yields the pieces, and a newline if the text is not empty and does not end with one."""
    last = ""
    for piece in pieces:
        yield piece
        last = piece or last
    if last and not last.endswith("\n"):
        yield "\n"
