"""Text files, read in pieces that can be split into symbols one by one."""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Callable, Iterable, Iterator

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
            `"line"`: str, cut between lines. At the last two levels, a missing newline at the end of a file is added.
        progress: called with the number of bytes of each piece.

    Raises:
        FileNotFoundError: a file does not exist.
        ValueError: a file is empty or is not UTF-8 text. Names the file and the byte.
    """
    for path in paths:
        pieces = _read_blocks(path, progress)
        if level != "byte":
            pieces = _decode(pieces, path)
        if level in ("word", "line"):
            pieces = _cut_between(pieces, level)
        yield from pieces


def numbered_lines(path: str) -> Iterator[tuple[int, str]]:
    r"""The lines of a UTF-8 file from number 1 on, in bounded memory, without `\n`, `\r\n` and a byte order mark.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is empty or is not UTF-8 text.
    """
    number = 0
    for piece in read_files([path], "line"):
        for line in piece.split("\n")[:-1]:
            number += 1
            line = line.removesuffix("\r")
            yield number, line.removeprefix("\ufeff") if number == 1 else line


def _read_blocks(path: str, progress: Callable | None) -> Iterator[bytes]:
    if not tf.io.gfile.exists(path):
        raise FileNotFoundError(f"there is no file {path}")
    if tf.io.gfile.isdir(path):
        raise ValueError(f"{path} is a folder, not a text file")
    with reading(path), tf.io.gfile.GFile(path, "rb") as file:
        block = file.read(_READ_BYTES)
        if not block:
            raise ValueError(f"{path} is empty")
        while block:
            yield block
            if progress:
                progress(len(block))
            block = file.read(_READ_BYTES)


def _decode(blocks: Iterator[bytes], path: str) -> Iterator[str]:
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


def _cut_between(pieces: Iterator[str], level: str) -> Iterator[str]:
    """Cuts each piece after its last newline; at level "word", a piece without newline before its last word."""
    text = last = ""
    for piece in pieces:
        text += piece
        last = piece or last
        cut = text.rfind("\n") + 1
        if not cut and level == "word":
            cut = len(text) - len(text.rsplit(None, 1)[-1]) if text and not text[-1].isspace() else len(text)
        yield text[:cut]
        text = text[cut:]
    if not last.endswith("\n"):
        yield text + "\n"
