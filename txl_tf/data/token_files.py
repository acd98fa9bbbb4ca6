"""Token files: integer arrays on disk, written piece by piece and read whole or in parts, local or remote.

A token file is an ordinary .npy file of one dimension: `np.load(path, mmap_mode="r")` opens it.
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any, BinaryIO

import numpy as np
import tensorflow as tf

from txl_tf.files import is_remote

_HEADER_BYTES = 256  # enough for the header of any one-dimensional array


class TokenWriter:
    """Appends token ids to a new local .npy file. It keeps no tokens in memory and no file open.

    The file holds no tokens for a reader until `close` writes their number into the header. The size of the vocabulary,
    `n_symbols`, decides the type: uint8, uint16 or int32.
    """

    def __init__(self, path: str, n_symbols: int):
        self.path = path
        self.dtype = np.dtype(np.uint8 if n_symbols <= 1 << 8 else np.uint16 if n_symbols <= 1 << 16 else np.int32)
        self.n_tokens = 0
        with open(path, "wb") as file:
            self.header_bytes = self._write_header(file)

    def add(self, ids: np.ndarray) -> None:
        with open(self.path, "ab") as file:
            file.write(np.asarray(ids, self.dtype).tobytes())
        self.n_tokens += len(ids)

    def close(self) -> None:
        with open(self.path, "r+b") as file:
            if self._write_header(file) != self.header_bytes:  # NumPy leaves room for any count
                raise RuntimeError(f"the header of {self.path} does not fit its place")

    def _write_header(self, file: BinaryIO) -> int:
        shape = {"descr": np.lib.format.dtype_to_descr(self.dtype), "fortran_order": False, "shape": (self.n_tokens,)}
        np.lib.format.write_array_header_1_0(file, shape)
        return file.tell()


class StoredTokens:
    """One array made of `parts` (arrays or files), read when it is sliced: `tokens[begin:end]`, `len(tokens)`."""

    def __init__(self, parts: Iterable):
        self.parts = list(parts)
        self.begins = np.cumsum([0] + [len(part) for part in self.parts]).tolist()
        self.dtype = np.result_type(*(part.dtype for part in self.parts))

    def __len__(self) -> int:
        return self.begins[-1]

    def __getitem__(self, index: slice) -> np.ndarray:
        if not isinstance(index, slice) or index.step not in (None, 1):
            raise TypeError(f"stored tokens are read as tokens[begin:end], got {index!r}")
        first, last, _ = index.indices(len(self))
        pieces = [
            part[max(first - begin, 0) : last - begin]
            for part, begin in zip(self.parts, self.begins, strict=False)
            if begin < last and first < begin + len(part)
        ]
        return np.concatenate(pieces) if pieces else np.zeros([0], self.dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self[:].astype(dtype or self.dtype, copy=False)


class _RemoteFile:
    """A token file that `tf.io.gfile` reads, one range at a time."""

    def __init__(self, path: str):
        self.path = path
        with tf.io.gfile.GFile(path, "rb") as file:
            header = io.BytesIO(file.read(_HEADER_BYTES))
        np.lib.format.read_magic(header)
        (self.n_tokens,), _, self.dtype = np.lib.format.read_array_header_1_0(header)
        self.start = header.tell()
        found = (tf.io.gfile.stat(path).length - self.start) // self.dtype.itemsize
        if found != self.n_tokens:
            raise ValueError(f"it holds {found} of {self.n_tokens} tokens")

    def __len__(self) -> int:
        return self.n_tokens

    def __getitem__(self, index: slice) -> np.ndarray:
        first, last, _ = index.indices(self.n_tokens)
        with tf.io.gfile.GFile(self.path, "rb") as file:
            file.seek(self.start + first * self.dtype.itemsize)
            data = file.read(max(last - first, 0) * self.dtype.itemsize)
        return np.frombuffer(data, self.dtype)


def open_tokens(paths: Iterable[str]) -> np.memmap | StoredTokens:
    """Opens the token files of one split without reading tokens.

    A single local file becomes an `np.memmap` `[n]`; several files or a remote one (`gs://...`) `StoredTokens`.

    Raises:
        FileNotFoundError: a file does not exist.
        ValueError: a file is not a complete token file.
    """
    parts = []
    for path in paths:
        if not tf.io.gfile.exists(path):
            raise FileNotFoundError(f"there is no token file {path}")
        try:
            parts.append(_RemoteFile(path) if is_remote(path) else np.load(path, mmap_mode="r"))
        except ValueError as error:
            raise ValueError(f"{path} is not a whole token file: {error}") from error
    return parts[0] if len(parts) == 1 and isinstance(parts[0], np.memmap) else StoredTokens(parts)
