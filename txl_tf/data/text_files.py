"""Text files, read in pieces that can be cut into symbols one by one."""

import codecs
import itertools

import tensorflow as tf

_READ_BYTES = 1 << 20


def pydoc_text():
    """Python's reference manual as `help()` shows it, its topics in alphabetical order."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


def read_files(paths, level, progress=None):
    """Yields the text of one file after the other, in pieces of about a megabyte.

    Args:
        paths: list of files, local or remote.
        level: `"char"`: pieces are str; `"word"`: the same, cut between words, and the last line of each file
            ends with a newline; `"line"`: that, cut between lines; `"byte"`: pieces are bytes, and the files may hold
            anything.
        progress: function that is called with the number of bytes of each piece.

    Raises:
        FileNotFoundError: a file is not there.
        ValueError: a file is empty, or is not UTF-8 text. Names the file and the byte.
    """
    for path in paths:
        pieces = _read_blocks(path, progress)
        if level != "byte":
            pieces = _decode(pieces, path)
        if level in ("word", "line"):
            pieces = _cut_between(pieces, level)
        yield from pieces


def _read_blocks(path, progress):
    if not tf.io.gfile.exists(path):
        raise FileNotFoundError(f"there is no file {path}")
    if tf.io.gfile.isdir(path):
        raise ValueError(f"{path} is a folder, not a text file")
    with tf.io.gfile.GFile(path, "rb") as file:
        block = file.read(_READ_BYTES)
        if not block:
            raise ValueError(f"{path} is empty")
        while block:
            yield block
            if progress:
                progress(len(block))
            block = file.read(_READ_BYTES)


def _decode(blocks, path):
    decoder = codecs.getincrementaldecoder("utf-8")()
    position = 0  # of the block in the file
    for block in itertools.chain(blocks, [b""]):
        start = position - len(decoder.getstate()[0])  # a character may have begun in the block before
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            raise _not_text(path, start + error.start) from error
        if b"\0" in block:
            raise _not_text(path, position + block.index(b"\0"))
        yield text
        position += len(block)


def _not_text(path, position):
    return ValueError(f"{path} is not UTF-8 text: see byte {position}. level='byte' reads any file")


def _cut_between(pieces, level):
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
