"""Text files, read in pieces that can be split into tokens one by one."""

from __future__ import annotations

import codecs
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import BinaryIO

from txl_tf.data import inputs
from txl_tf.files import reading

BLOCK_BYTES = 1 << 20  # of a file that are read at once


def pydoc_text() -> str:
    """Python's reference manual as `help()` shows it, with its topics in alphabetical order."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


def read_files(paths: Iterable[str], level: str, progress: Callable | None = None) -> Iterator[str | bytes]:
    """Yields the text of one file after the other, in pieces of about a megabyte.

    Args:
        paths: local or remote files.
        level: `"byte"`: pieces are bytes, of any file. `"char"`: pieces are str. `"word"`: str, cut between words.
            `"line"`: str, cut between lines. At these two levels, a missing newline at the end of a file is added.
            `"subword"`: str, cut between words, and nothing is added.
        progress: called with the number of bytes of each piece.

    Raises:
        FileNotFoundError: a file does not exist.
        ValueError: a file is empty or is not UTF-8 text. Names the file and the byte.
    """
    for path in paths:
        yield from pieces_of(blocks_of(path, progress), path, level)


def pieces_of(blocks: Iterator[bytes], name: str, level: str, begin: int = 0) -> Iterator[str | bytes]:
    """The text of blocks, from the byte `begin` on, in pieces as `read_files` gives them; errors call it `name`."""
    if level == "byte":
        return blocks
    pieces = decoded(blocks, name, begin)
    return pieces if level == "char" else cut_between(pieces, level)


def numbered_lines(path: str) -> Iterator[tuple[int, str]]:
    r"""The lines of a UTF-8 file from number 1 on, in bounded memory, without `\n`, `\r\n` and a byte order mark.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is empty or is not UTF-8 text.
    """
    for number, line in enumerate(lines_of(read_files([path], "line")), 1):
        line = line.removesuffix("\r")
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
        raise FileNotFoundError(f"there is no file {path}")
    if inputs.is_folder(path):
        raise ValueError(f"{path} is a folder, not a text file")
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


def lines_before(path: str, place: int) -> int:
    """How many lines end before the byte `place` of a file."""
    return sum(block.count(b"\n") for block in blocks_of(path, end=place)) if place else 0


def decoded(blocks: Iterable[bytes], path: str, begin: int = 0) -> Iterator[str]:
    """Yields the text of blocks of UTF-8; errors name the file `path`, of which byte `begin` is the first one."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    not_text = "{} is not UTF-8 text: see byte {}. level='byte' reads any file"
    position = begin  # of the block in the file
    for block in itertools.chain(blocks, [b""]):
        start = position - len(decoder.getstate()[0])  # a character may have begun in the block before
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            raise ValueError(not_text.format(path, start + error.start)) from error
        if b"\0" in block:
            raise ValueError(not_text.format(path, position + block.index(b"\0")))
        yield text
        position += len(block)


def cut_between(pieces: Iterable[str], level: str) -> Iterator[str]:
    """Cuts each piece after its last newline. A piece without one is cut before its last word; not at level "line".

    At levels "word" and "line", a missing newline at the end is added. At level "subword", a word begins with the
    spaces before it.
    """
    if level != "subword":
        pieces = with_last_newline(pieces)
    text = ""
    for piece in pieces:
        text += piece
        cut = text.rfind("\n") + 1
        if not cut and level == "subword":
            cut = len(text[: max(text.rfind(" "), 0)].rstrip(" "))
        elif not cut and level == "word":
            cut = len(text) - len(text.rsplit(None, 1)[-1]) if text and not text[-1].isspace() else len(text)
        yield text[:cut]
        text = text[cut:]
    if text:
        yield text


def with_last_newline(pieces: Iterable[str]) -> Iterator[str]:
    """The pieces, and a newline if there is something in them that does not end with one."""
    last = ""
    for piece in pieces:
        yield piece
        last = piece or last
    if last and not last.endswith("\n"):
        yield "\n"
