"""Text files, read in pieces that can be split into tokens one by one."""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import BinaryIO

import tensorflow as tf

from txl_tf.files import reading

_READ_BYTES = 1 << 20


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


def pieces_of(blocks: Iterator[bytes], name: str, level: str) -> Iterator[str | bytes]:
    """The text of blocks of bytes, in pieces as `read_files` gives them; errors call it `name`."""
    if level == "byte":
        return blocks
    pieces = decoded(blocks, name)
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


def blocks_of(path: str, progress: Callable | None = None) -> Iterator[bytes]:
    """Yields a file, which must not be empty, in blocks of a megabyte."""
    if not tf.io.gfile.exists(path):
        raise FileNotFoundError(f"there is no file {path}")
    if tf.io.gfile.isdir(path):
        raise ValueError(f"{path} is a folder, not a text file")
    with reading(path), tf.io.gfile.GFile(path, "rb") as file:
        for block in blocks_in(file, path):
            yield block
            if progress:
                progress(len(block))


def blocks_in(file: BinaryIO, name: str) -> Iterator[bytes]:
    """Yields what is in an open file, which must not be empty, in blocks of a megabyte; errors call it `name`."""
    block = file.read(_READ_BYTES)
    if not block:
        raise ValueError(f"{name} is empty")
    while block:
        yield block
        block = file.read(_READ_BYTES)


def decoded(blocks: Iterable[bytes], path: str) -> Iterator[str]:
    """Yields the text of blocks of UTF-8; errors name the file `path`."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    not_text = "{} is not UTF-8 text: see byte {}. level='byte' reads any file"
    position = 0  # of the block in the file
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
    """The pieces, and a newline if they do not end with one."""
    last = ""
    for piece in pieces:
        yield piece
        last = piece or last
    if not last.endswith("\n"):
        yield "\n"
