"""Files of word vectors: text or word2vec's binary format, plain or packed by gzip, zip, bzip2 or xz.

A text file has a word and its numbers on each line, perhaps after a header: the number of vectors and their width. A
binary file has the header, and then for each vector its word, a space and its numbers as float32.

```python
dim, vectors = open_vectors("vectors.bin.gz", {"Berlin", "Paris"})
for word, vector in vectors: ...                                # only the wanted words, in the order of the file
```
"""

from __future__ import annotations

import bz2
import collections
import contextlib
import gzip
import itertools
import lzma
import re
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import IO, Any

import numpy as np
import tensorflow as tf

from txl_tf.data import inputs
from txl_tf.data.text_files import blocks_in, cut_between, decoded_blocks, lines_of, pieces_with_newlines
from txl_tf.errors import ParameterError, brief, named
from txl_tf.files import naming_read_errors

_HEADER = re.compile(r"[0-9]+[ \t]+[0-9]+[ \t]*")
_BINARY_HEADER = re.compile(rb"([0-9]+)[ \t]+([0-9]+)[ \t]*\r?\n")
_NO_TEXT = re.compile(rb"[\x00-\x08\x0e-\x1f]")  # bytes that a text does not contain
_SAMPLE = 100  # first lines, which decide how many numbers a vector has
# First bytes of a packed file -> function that opens it.
_UNPACKERS: dict[bytes, Callable[[Any], Any]] = {
    b"\x1f\x8b": lambda file: gzip.GzipFile(fileobj=file),
    b"BZh": bz2.BZ2File,
    b"\xfd7zXZ": lzma.LZMAFile,
}
_ZIP = b"PK\x03\x04"  # first bytes of a zip archive
_EMPTY_ZIP = b"PK\x05\x06"
_UNREADABLE = (
    OSError,  # of bz2 and gzip; one with an `errno` is an error of the disk, not of the archive
    EOFError,
    zlib.error,
    lzma.LZMAError,
    zipfile.BadZipFile,
    NotImplementedError,  # a compression that zipfile does not know
    RuntimeError,  # encrypted
    tf.errors.InvalidArgumentError,  # a position before the beginning
)
# First bytes of a file -> its format, and what to do.
_OTHERS = {
    b"\xba\x16\x4f\x2f": "a model of fastText: its vectors are in the file of the same name that ends in .vec"
} | {
    bytes([0x80, protocol]): "a pickle: load it with gensim, and write its vectors with save_word2vec_format"
    for protocol in range(2, 6)
}
_ADVICE = (
    "vectors are read from text files and from word2vec's binary format, which gensim writes with "
    "KeyedVectors.save_word2vec_format"
)


def is_header(line: str) -> bool:
    """Whether the first line of a file is word2vec's header: two integers."""
    return bool(_HEADER.fullmatch(line))


def open_vectors(
    path: str, wanted: Collection[str], option: str = "path"
) -> tuple[int, Iterator[tuple[str, np.ndarray]]]:
    """Returns the width of the vectors of a file, and an iterator of `(word, float32 [dim])` for the `wanted` words.

    In a text file, the last `dim` fields of a line are the numbers, and the text before them is the word, which may
    contain spaces. Spaces and tabs separate fields; other white space, such as U+3000, can be a word. `dim` comes from
    the header; without a header, it is the number of numbers that most of the first lines have.

    Args:
        path: path of the file.
        wanted: the words whose vectors are read.
        option: name of the argument for the file, for errors.

    Raises:
        FileNotFoundError: the file does not exist.
        ParameterError: the header contradicts the lines; a line has too few fields, or a wanted word has something that
            is not a finite number; the file is empty, incomplete, not UTF-8, has another format or no vectors. Names
            file and line.
    """
    blocks = _blocks(path, option)
    first = next(blocks)
    blocks = itertools.chain([first], blocks)
    other = next((what for magic, what in _OTHERS.items() if first.startswith(magic)), None)
    if other:
        raise ParameterError(option, path, "a file of vectors", f"{path} is {other}")
    if _is_binary(first):
        return _open_binary(path, blocks, wanted)
    pieces = pieces_with_newlines(decoded_blocks(blocks, path, advice=_ADVICE))
    return _open_text(path, enumerate(lines_of(cut_between(pieces, "line")), 1), wanted, option)


def _blocks(path: str, option: str) -> Iterator[bytes]:
    """Yields the bytes of a file in blocks, unpacked if its first bytes show that it is packed.

    Raises:
        FileNotFoundError: the file does not exist.
        OSError: the file cannot be read.
        ParameterError: the file is empty, a folder, or an archive that is damaged or in which `_in_zip` does not find
            exactly one file.
    """
    if not inputs.exists(path):
        raise FileNotFoundError(f"there is no file {named(path)}")
    if inputs.is_folder(path):
        message = f"{named(path)} is a folder, not a file of vectors"
        raise ParameterError(option, path, "a file of vectors", message)
    with naming_read_errors(path), inputs.opened(path) as packed, contextlib.ExitStack() as stack:
        magic = packed.read(6)
        packed.seek(0)
        unpack = next((unpack for begin, unpack in _UNPACKERS.items() if magic.startswith(begin)), None)
        is_zip = magic.startswith((_ZIP, _EMPTY_ZIP))
        if not is_zip and unpack is None:
            yield from blocks_in(packed, path)
            return
        try:
            opened = unpack(packed) if unpack else _in_zip(packed, path, option)
            yield from blocks_in(stack.enter_context(opened), path)
        except _UNREADABLE as error:
            if getattr(error, "errno", None) is not None:
                raise
            message = f"{path} cannot be unpacked: {error}"
            raise ParameterError(option, path, "an archive that is whole", message) from error


def _in_zip(packed: IO[bytes], path: str, option: str) -> IO[bytes]:
    """Opens the only file in a zip archive, apart from hidden files.

    Raises:
        ParameterError: there is not exactly one.
    """
    is_empty = packed.read(len(_EMPTY_ZIP)) == _EMPTY_ZIP
    packed.seek(0)
    archive = None if is_empty else zipfile.ZipFile(packed)  # which would seek before the beginning of an empty one
    names = [member.filename for member in inputs.files_in_zip(archive)] if archive else []
    if archive is None or len(names) != 1:
        message = f"{path} must contain one file, the vectors, got {len(names)}: {', '.join(names[:5]) or 'none'}"
        raise ParameterError(option, path, "an archive of one file", message)
    return archive.open(names[0])


# -------------------------------------------------------------------------------------------------------------- text


def _open_text(
    path: str, numbered: Iterator[tuple[int, str]], wanted: Collection[str], option: str
) -> tuple[int, Iterator]:
    """Does the work of `open_vectors` for a text file.

    Args:
        path, wanted, option: as in `open_vectors`.
        numbered: the lines with their numbers.
    """
    lines = ((number, line.removeprefix("\ufeff") if number == 1 else line) for number, line in numbered)
    lines = ((number, line.rstrip(" \t")) for number, line in lines)
    lines = ((number, line) for number, line in lines if line)
    first = list(itertools.islice(lines, _SAMPLE))
    # The number and the width of the vectors in the header, or `None` without a header.
    has_header = first and first[0][0] == 1 and is_header(first[0][1])
    n_vectors, declared = map(int, first.pop(0)[1].split()) if has_header else (None, None)
    if not first:
        raise ParameterError(option, path, "a file of vectors", f"{path} has no vectors")
    counts = [_count_numbers(line) for _, line in first]
    ((usual, _),) = collections.Counter(count for count in counts if count or not any(counts)).most_common(1)
    if declared is not None and usual > declared:
        message = f"{path}, line 1 says that vectors have {declared} numbers, but line {first[0][0]} has {usual}"
        raise ParameterError(option, path, f"vectors of {declared} numbers", message)
    dim = usual if declared is None else declared
    return dim, _text_vectors(path, itertools.chain(first, lines), n_vectors or 0, dim, wanted)


def _text_vectors(
    path: str, lines: Iterable, n_vectors: int, dim: int, wanted: Collection[str]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields `(word, vector)` for the wanted words. The last `dim` fields of a line are the vector.

    The file must have at least `n_vectors` lines.
    """
    count = 0
    for number, line in lines:
        count += 1
        if line.count(" ") == dim > 0 and "\t" not in line:  # most lines; this way is faster
            word, _, numbers = line.partition(" ")
            fields = None
        else:
            *words, numbers = re.split("[ \t]+", line)
            fields = [*words, numbers]
            if len(fields) <= dim or not dim:
                expected = f"{dim} numbers" if dim else "numbers"
                where = f"{path}, line {number}"
                message = f"{where} must have a word and {expected}, got {len(fields) - 1}: {brief(line)}"
                raise ParameterError(where, line, f"a word and {expected}", message)
            word = " ".join(fields[:-dim])
        if word in wanted:
            yield word, _parse(numbers.split(" ") if fields is None else fields[-dim:], path, number)
    if count < n_vectors:
        message = f"{path} is not whole: line 1 says that it has {n_vectors:,} vectors, but it has {count:,}"
        raise ParameterError(path, count, f"{n_vectors} vectors", message)


def _count_numbers(line: str) -> int:
    """Returns how many fields at the end of a line are numbers; the first field does not count."""
    _, *fields = re.split("[ \t]+", line)
    return sum(1 for _ in itertools.takewhile(is_number, reversed(fields)))


def is_number(field: str | bytes) -> bool:
    """Whether a field of a line is a number that Python can read."""
    try:
        float(field)
    except ValueError:
        return False
    return True


def _parse(numbers: list[str], path: str, line_number: int) -> np.ndarray:
    """Returns a vector. Raises ParameterError, which names the line, unless all fields are finite numbers."""
    where = f"{path}, line {line_number}"
    try:
        vector = np.array(numbers, np.float32)
    except ValueError as error:
        raise ParameterError(where, numbers, "numbers", f"{where}: {error}") from error
    if not np.all(np.isfinite(vector)):
        message = f"{where}: numbers must be finite, got {brief(' '.join(numbers))}"
        raise ParameterError(where, numbers, "finite numbers", message)
    return vector


# ------------------------------------------------------------------------------------------------------------ binary


def _is_binary(block: bytes) -> bool:
    """Whether a file that begins with `block` has word2vec's binary format: a header, and then bytes, not text."""
    header = _BINARY_HEADER.match(block)
    if not header or _NO_TEXT.search(block):
        return bool(header)
    try:
        block.decode("utf-8")
    except UnicodeDecodeError as error:
        line = block[header.end() :].partition(b"\n")[0].split()  # of text in another encoding, perhaps
        is_text = all(map(is_number, line[-int(header[2]) :]))
        return error.start < len(block) - 4 and not is_text  # the block may end within a character
    return False


def _open_binary(path: str, blocks: Iterator[bytes], wanted: Collection[str]) -> tuple[int, Iterator]:
    """Does the work of `open_vectors` for a file in word2vec's binary format, given in blocks."""
    block = next(blocks)
    line, _, rest = block.partition(b"\n")
    n_vectors, dim = map(int, line.split())
    return dim, _binary_vectors(path, itertools.chain([rest], blocks), n_vectors, dim, wanted)


def _binary_vectors(
    path: str, blocks: Iterator[bytes], n_vectors: int, dim: int, wanted: Collection[str]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields `(word, vector)` for the wanted words of a file in word2vec's binary format.

    Args:
        path: path of the file, for errors.
        blocks: the bytes after the header.
        n_vectors, dim: from the header.
        wanted: as in `open_vectors`.
    """
    data = b""
    position = 0  # of the next vector in `data`
    for number in range(1, n_vectors + 1):
        while (space := data.find(b" ", position)) < 0 or len(data) < space + 1 + 4 * dim:
            block = next(blocks, None)
            if block is None:
                message = f"{path} is not whole: it ends in vector {number:,} of {n_vectors:,}"
                raise ParameterError(path, number - 1, f"{n_vectors} vectors", message)
            data = data[position:] + block
            position = 0
        # Some programs write a newline after each vector.
        word = data[position:space].lstrip(b"\n").decode("utf-8", "surrogateescape")
        position = space + 1 + 4 * dim
        if word in wanted:
            vector = np.frombuffer(data, "<f4", dim, space + 1).astype(np.float32)
            if not np.all(np.isfinite(vector)):
                where = f"{path}, vector {number:,}"
                message = f"{where}: numbers must be finite, got {brief(vector.tolist())}"
                raise ParameterError(where, vector.tolist(), "finite numbers", message)
            yield word, vector
