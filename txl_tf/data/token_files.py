"""Token files: integer arrays on disk, written piece by piece and read whole or in parts, local or remote.

A token file is an ordinary .npy file of one dimension: `np.load(path, mmap_mode="r")` opens it.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

import numpy as np
import tensorflow as tf

from txl_tf.errors import ArgumentTypeError, ParameterError, brief, named
from txl_tf.files import is_remote, naming_read_errors, naming_write_errors

_HEADER_BYTES = 256  # more than the header of any one-dimensional array


def token_type(n_symbols: int) -> np.dtype:
    """Returns the smallest integer type for the ids of a vocabulary: uint8, uint16 or int32."""
    if n_symbols <= 1 << 8:
        return np.dtype(np.uint8)
    return np.dtype(np.uint16 if n_symbols <= 1 << 16 else np.int32)


class TokenWriter:
    """Appends token ids to a new local .npy file. Between calls, it keeps no tokens in memory and no file open.

    For a reader, the file has no tokens until `close` writes their number into the header.

    Args:
        path: path of the file, which is created or emptied.
        n_symbols: size of the vocabulary. It decides the type of the ids: see `token_type`.
    """

    def __init__(self, path: str, n_symbols: int):
        self.path = path
        self.dtype = token_type(n_symbols)
        self.n_tokens = 0
        with naming_write_errors(path), open(path, "wb") as file:
            self.header_bytes = self._write_header(file)

    def add(self, ids: np.ndarray) -> None:
        """Appends ids to the file."""
        with naming_write_errors(self.path), open(self.path, "ab") as file:
            file.write(np.asarray(ids, self.dtype).tobytes())
        self.n_tokens += len(ids)

    def close(self) -> None:
        """Writes the number of tokens into the header."""
        with naming_write_errors(self.path), open(self.path, "r+b") as file:
            if self._write_header(file) != self.header_bytes:  # NumPy leaves space for any count
                raise RuntimeError(f"the header of {self.path} has changed its length")

    def _write_header(self, file: BinaryIO) -> int:
        """Writes the header at the start of the open file. Returns its length in bytes."""
        file.write(_header(self.dtype, self.n_tokens))
        return file.tell()


def _header(dtype: np.dtype, n_tokens: int) -> bytes:
    """Returns the header of a .npy file of `n_tokens` ids."""
    file = io.BytesIO()
    shape = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (n_tokens,)}
    np.lib.format.write_array_header_1_0(file, shape)
    return file.getvalue()


class TokenFiles:
    """Appends token ids to several new files in turn, each written by a `TokenWriter`.

    Args:
        paths: paths of the files, in order; only as many as necessary are used.
        n_symbols: size of the vocabulary.
        max_tokens: largest number of tokens in a file; `None`: the first file has all tokens.

    Attributes:
        files: the `TokenWriter` of each file; `add` appends to the last one.
    """

    def __init__(self, paths: Iterator[str], n_symbols: int, max_tokens: int | None = None):
        self._paths = paths
        self._n_symbols = n_symbols
        self._max_tokens = max_tokens
        self.files = [TokenWriter(next(paths), n_symbols)]

    @property
    def n_tokens(self) -> int:
        return sum(file.n_tokens for file in self.files)

    def add(self, ids: np.ndarray) -> None:
        """Appends ids. While they do not fit into the last file, fills it and begins the next one."""
        while self._max_tokens and len(ids) > (room := self._max_tokens - self.files[-1].n_tokens):
            self.files[-1].add(ids[:room])
            self.close()
            self.files.append(TokenWriter(next(self._paths), self._n_symbols))
            ids = ids[room:]
        self.files[-1].add(ids)

    def close(self) -> None:
        """Closes the last file; `add` has closed the others."""
        self.files[-1].close()


def joined_sha256(paths: Iterable[str]) -> str:
    """Returns the checksum that one local token file with the tokens of several files would have."""
    headers = {path: read_header(path) for path in paths}
    ((dtype, *_), *_) = headers.values()
    digest = hashlib.sha256(_header(dtype, sum(n_tokens for _, n_tokens, _ in headers.values())))
    for path, (_, _, start) in headers.items():
        with open(path, "rb") as file:
            file.seek(start)
            while block := file.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()


class StoredTokens:
    """An array `[n]` that consists of several arrays or token files. A slice reads it: `tokens[begin:end]`.

    Args:
        parts: arrays `[any]`, or objects with a `dtype`, a length and slices, in order.

    Attributes:
        parts: as above, as a list.
        begins: position of the first token of each part, and the number of all tokens.
        dtype: a type for the tokens of all parts.
    """

    def __init__(self, parts: Iterable):
        self.parts = list(parts)
        self.begins = np.cumsum([0] + [len(part) for part in self.parts]).tolist()
        self.dtype = np.result_type(*(part.dtype for part in self.parts))

    def __len__(self) -> int:
        return self.begins[-1]

    def __getitem__(self, index: slice) -> np.ndarray:
        """Reads a slice. Raises ArgumentTypeError for another index, or for a slice with a step."""
        if not isinstance(index, slice) or index.step not in (None, 1):
            message = f"stored tokens are read as tokens[begin:end], got {brief(index)}"
            raise ArgumentTypeError("index", index, "a slice without a step", message)
        first, last, _ = index.indices(len(self))
        pieces = [
            part[max(first - begin, 0) : last - begin]
            for part, begin in zip(self.parts, self.begins, strict=False)
            if begin < last and first < begin + len(part)
        ]
        return np.concatenate(pieces) if pieces else np.zeros([0], self.dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self[:].astype(dtype or self.dtype, copy=False)


def read_header(path: str) -> tuple[np.dtype, int, int]:
    """Returns the type, the number of tokens, and the length of the header in bytes of a token file.

    Raises:
        ParameterError: it is not a one-dimensional .npy file of integers, or its size differs from its header.
        OSError: the file cannot be read.
    """
    with naming_read_errors(path), tf.io.gfile.GFile(path, "rb") as file:
        head = io.BytesIO(file.read(_HEADER_BYTES))
        size = tf.io.gfile.stat(path).length
    not_whole = f"{path} is not a whole token file:"
    try:
        np.lib.format.read_magic(head)
        (n_tokens,), _, dtype = np.lib.format.read_array_header_1_0(head)
        start = head.tell()
        expected = head.tell() + n_tokens * dtype.itemsize
    except Exception as error:  # of many kinds: NumPy evaluates the header
        message = f"{not_whole} it does not begin as a .npy file of one row"
        raise ParameterError(path, None, "a .npy file of one row", message) from error
    if dtype.kind not in "iu":
        raise ParameterError(path, dtype, "integers", f"{not_whole} it must contain integers, got {dtype}")
    if size != expected:
        message = f"{not_whole} {n_tokens} tokens make {expected} bytes, and it has {size}"
        raise ParameterError(path, size, f"{expected} bytes", message)
    return dtype, n_tokens, start


class _RemoteFile:
    """A remote token file. A slice reads its range of the file, by `tf.io.gfile`."""

    def __init__(self, path: str):
        self.path = path
        self.dtype, self.n_tokens, self.start = read_header(path)

    def __len__(self) -> int:
        return self.n_tokens

    def __getitem__(self, index: slice) -> np.ndarray:
        first, last, _ = index.indices(self.n_tokens)
        with naming_read_errors(self.path), tf.io.gfile.GFile(self.path, "rb") as file:
            file.seek(self.start + first * self.dtype.itemsize)
            data = file.read(max(last - first, 0) * self.dtype.itemsize)
        return np.frombuffer(data, self.dtype)


def open_tokens(paths: Iterable[str]) -> np.memmap | StoredTokens:
    """Opens the token files of one split without reading tokens.

    Returns:
        A memory map, `[n]`, of a single local file. For several files, or a remote one (`gs://...`), `StoredTokens`.

    Raises:
        FileNotFoundError: a file does not exist.
        ParameterError: a file is not a complete token file.
    """
    parts = []
    for path in paths:
        if not tf.io.gfile.exists(path):
            raise FileNotFoundError(f"there is no token file {named(path)}")
        if is_remote(path):
            parts.append(_RemoteFile(path))
        else:
            dtype, n_tokens, start = read_header(path)
            parts.append(np.memmap(path, dtype, "r", start, (n_tokens,)))
    return parts[0] if len(parts) == 1 and isinstance(parts[0], np.memmap) else StoredTokens(parts)
