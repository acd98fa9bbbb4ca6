"""Token files: integer arrays on disk, written piece by piece, read whole or in parts, from here or from afar.

A token file is an ordinary .npy file of one dimension: `np.load(path, mmap_mode="r")` opens it.
"""

import io

import numpy as np
import tensorflow as tf

from txl_tf.files import is_remote

_HEADER_BYTES = 256  # enough for the header of any one-dimensional array


class TokenWriter:
    """Appends token ids to a new local .npy file; holds neither the tokens nor the open file.

    The file is an array only after `close`, which writes the number of tokens into the header.

    Args:
        path: the file.
        n_symbols: size of the vocabulary; sets the type: uint8, uint16 or int32.
    """

    def __init__(self, path, n_symbols):
        self.path = path
        self.dtype = np.dtype(np.uint8 if n_symbols <= 1 << 8 else np.uint16 if n_symbols <= 1 << 16 else np.int32)
        self.n_tokens = 0
        with open(path, "wb") as file:
            self.header_bytes = self._write_header(file)

    def add(self, ids):
        with open(self.path, "ab") as file:
            file.write(np.asarray(ids, self.dtype).tobytes())
        self.n_tokens += len(ids)

    def close(self):
        with open(self.path, "r+b") as file:
            if self._write_header(file) != self.header_bytes:  # NumPy leaves room for any count
                raise RuntimeError(f"the header of {self.path} does not fit its place")

    def _write_header(self, file):
        shape = {"descr": np.lib.format.dtype_to_descr(self.dtype), "fortran_order": False, "shape": (self.n_tokens,)}
        np.lib.format.write_array_header_1_0(file, shape)
        return file.tell()


class StoredTokens:
    """One array out of one or several files, read when it is sliced: `tokens[begin:end]`, `len(tokens)`.

    Args:
        parts: list of what has a `dtype`, a length and slices, such as arrays, in order.
    """

    def __init__(self, parts):
        self.parts = list(parts)
        self.begins = np.cumsum([0] + [len(part) for part in self.parts]).tolist()
        self.dtype = np.result_type(*(part.dtype for part in self.parts))

    def __len__(self):
        return self.begins[-1]

    def __getitem__(self, index):
        if not isinstance(index, slice) or index.step not in (None, 1):
            raise TypeError(f"stored tokens are read as tokens[begin:end], got {index!r}")
        first, last, _ = index.indices(len(self))
        pieces = [
            part[max(first - begin, 0) : last - begin]
            for part, begin in zip(self.parts, self.begins, strict=False)
            if begin < last and first < begin + len(part)
        ]
        return np.concatenate(pieces) if pieces else np.zeros([0], self.dtype)

    def __array__(self, dtype=None, copy=None):
        return self[:].astype(dtype or self.dtype, copy=False)


class _RemoteFile:
    """A token file that `tf.io.gfile` reads, one range at a time."""

    def __init__(self, path):
        self.path = path
        with tf.io.gfile.GFile(path, "rb") as file:
            header = io.BytesIO(file.read(_HEADER_BYTES))
        np.lib.format.read_magic(header)
        (self.n_tokens,), _, self.dtype = np.lib.format.read_array_header_1_0(header)
        self.start = header.tell()
        found = (tf.io.gfile.stat(path).length - self.start) // self.dtype.itemsize
        if found != self.n_tokens:
            raise ValueError(f"it holds {found} of {self.n_tokens} tokens")

    def __len__(self):
        return self.n_tokens

    def __getitem__(self, index):
        first, last, _ = index.indices(self.n_tokens)
        with tf.io.gfile.GFile(self.path, "rb") as file:
            file.seek(self.start + first * self.dtype.itemsize)
            data = file.read(max(last - first, 0) * self.dtype.itemsize)
        return np.frombuffer(data, self.dtype)


def open_tokens(paths):
    """Opens the token files of one split; reads no token yet.

    Args:
        paths: list of .npy files. Local ones are memory-mapped, others (`gs://...`) are read in ranges.

    Returns:
        `np.memmap` `[n]` where it is one local file, or else `StoredTokens`.

    Raises:
        FileNotFoundError: a file is not there.
        ValueError: a file is not a whole token file.
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
