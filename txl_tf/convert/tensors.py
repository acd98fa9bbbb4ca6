"""Tensors in files, whose positions are checked against the size of the file. Reads .safetensors.

`Tensor.array` reads the numbers when it is called. It maps them into memory unless the file compresses them.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import zipfile
import zlib
from typing import Any

import numpy as np

from txl_tf.convert.pickles import are_sizes, raises_file_error, shown

# A member of a zip archive may unpack to MAX_RATIO times its bytes and MAX_SMALL bytes more, because a small tensor of
# zeros is packed far better than other tensors.
MAX_RATIO = 20
MAX_SMALL = 1 << 16
MAX_HEADER = 10_000_000  # bytes of JSON, which may become 30 times as many in memory
MAX_RANK = 8
LFS = b"version https://git-lfs"  # the beginning of a pointer of git lfs
MAX_NUMBERS = 1 << 56  # NumPy refuses shapes of 2**63 bytes or more. In an empty shape, it counts a size of 0 as 1
DTYPES = {  # NumPy has no bfloat16, which is the upper half of float32
    "F32": "float32", "F16": "float16", "F64": "float64", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip


@dataclasses.dataclass(eq=False)
class Storage:
    """Numbers that follow each other in a file.

    Attributes:
        path: the file.
        dtype: name of their dtype, of the values of `DTYPES`.
        numel: how many numbers there are.
        offset: the position in the file of the first byte; `None` until the reader has found the storage.
        member: if a zip archive contains the numbers compressed, their member of the archive, which begins at `offset`.
    """

    path: str
    dtype: str
    numel: int
    offset: Any = None
    member: zipfile.ZipInfo | None = None

    @property
    def raw(self) -> np.dtype:
        """The dtype of the numbers as they are in the file: little-endian, and uint16 for bfloat16."""
        return np.dtype("uint16" if self.dtype == "bfloat16" else self.dtype).newbyteorder("<")

    def read(self, start: int, stop: int) -> np.ndarray:
        """The numbers from index `start` up to `stop`, read-only. bfloat16 becomes float32."""
        if start == stop:
            numbers = np.zeros([0], self.raw)
        elif self.member is None:
            first_byte = self.offset + start * self.raw.itemsize
            numbers = np.memmap(self.path, self.raw, "r", first_byte, (stop - start,))
        else:
            numbers = np.frombuffer(data_of_member(self.path, self.member, self.offset), self.raw)[start:stop]
        return (numbers.astype(np.uint32) << 16).view(np.float32) if self.dtype == "bfloat16" else numbers


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A view of a storage: `offset` of the first number, and `stride` of every dimension, both counted in numbers.

    Raises:
        ValueError: a value is wrong, or the storage has too few numbers.
    """

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def __post_init__(self):
        numel = self.storage.numel
        sizes = (self.shape, self.stride, (self.offset,))
        if (
            not all(are_sizes(values, MAX_NUMBERS) for values in sizes)
            or not len(self.shape) == len(self.stride) <= MAX_RANK
            or math.prod(n or 1 for n in self.shape) > MAX_NUMBERS
        ):
            values = ", ".join(map(shown, (self.offset, self.shape, self.stride)))
            raise ValueError(f"offset, shape and stride of a tensor are {values}")
        # With a stride of 0, a tensor repeats numbers. It must not have more than its storage: a small file could
        # otherwise fill the memory.
        if self.offset + self.extent > numel or self.size > numel:
            raise ValueError(
                f"a tensor of shape {list(self.shape)} needs {max(self.offset + self.extent, self.size)} numbers of a "
                f"storage that has {numel}"
            )

    @property
    def size(self) -> int:
        """How many numbers the tensor has."""
        return math.prod(self.shape)

    @property
    def extent(self) -> int:
        """How many numbers of the storage there are from the tensor's first to its last, both included."""
        return 1 + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True)) if self.size else 0

    @property
    def dtype(self) -> str:
        return self.storage.dtype

    def array(self) -> np.ndarray:
        """The numbers as an array of the shape `shape`, read-only. bfloat16 becomes float32."""
        numbers = self.storage.read(self.offset, self.offset + self.extent)
        strides = [step * numbers.itemsize for step in self.stride]
        return np.lib.stride_tricks.as_strided(numbers, self.shape, strides, writeable=False)


def row_major(shape: list[int]) -> tuple[int, ...]:
    """The strides of a tensor whose numbers follow each other row by row."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


# ------------------------------------------------------------------------------------------------------------ reading


def check_fetched(path: str) -> None:
    """Raises ValueError if a file is a pointer of git lfs instead of the file itself."""
    with open(path, "rb") as file:
        if file.read(len(LFS)) == LFS:
            raise ValueError("it only points to a file that git lfs has not fetched yet: run git lfs pull")


@raises_file_error("a zip archive")
def data_of_member(path: str, member: zipfile.ZipInfo, offset: int) -> bytes:
    """Returns the data of a member of a zip archive, and unpacks it if it is compressed.

    Unlike `zipfile`, this function never unpacks more than the declared size and one byte.

    Args:
        path: the archive.
        member: the member.
        offset: the byte of the archive at which the member's data begins.

    Raises:
        FileError: the data has another size or checksum than the archive declares.
    """
    with open(path, "rb") as file:
        file.seek(offset)
        data = file.read(member.compress_size)
    if member.compress_type == zipfile.ZIP_DEFLATED:
        # One byte more than declared is enough to notice that the member is too long.
        data = zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, member.file_size + 1)
    if len(data) != member.file_size or zlib.crc32(data) != member.CRC:
        raise ValueError(f"the member {shown(member.filename)} is damaged")
    return data


def check_packed(member: zipfile.ZipInfo) -> None:
    """Raises ValueError if a member cannot be unpacked, or declares a size that is far larger than its packed bytes."""
    name = shown(member.filename)
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or member.flag_bits & 1:
        raise ValueError(f"the member {name} is encrypted, or packed by another method than deflate")
    is_packed = member.compress_type == zipfile.ZIP_DEFLATED
    if member.file_size > (MAX_RATIO * member.compress_size + MAX_SMALL if is_packed else member.compress_size):
        raise ValueError(f"the member {name} says that {member.compress_size} bytes unpack to {member.file_size}")


@raises_file_error("a .safetensors")
def read_safetensors(path: str) -> dict[str, Tensor]:
    """The tensors of a .safetensors, by name.

    Raises:
        FileError: the file is damaged, two tensors share bytes of it, or git lfs has not fetched it.
        OSError: the file cannot be read.
    """
    check_fetched(path)
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(size - 8, MAX_HEADER):
            raise ValueError(f"a header of {length} bytes in a file of {size}")
        header = json.loads(file.read(length), object_pairs_hook=unique)
    if type(header) is not dict:
        raise ValueError("the header is no dictionary")
    header.pop("__metadata__", None)
    start = 8 + length
    located = sorted(_located_tensor(path, name, entry, start, size - start) for name, entry in header.items())
    for (_, end, name, _), (begin, _, other, _) in itertools.pairwise(located):
        if begin < end:
            raise ValueError(f"{shown(name)} and {shown(other)} lie in the same bytes")
    return {name: tensor for _, _, name, tensor in located}


def unique(pairs: list) -> dict:
    """The pairs of a JSON object as a dictionary. Raises ValueError if a name occurs twice."""
    items = dict(pairs)
    if len(items) < len(pairs):
        raise ValueError("a name occurs twice")
    return items


def _located_tensor(path: str, name: str, entry: Any, start: int, n_byte: int) -> tuple[int, int, str, Tensor]:
    """Checks the entry of a tensor in the header of a .safetensors.

    Args:
        path: the file.
        name: name of the tensor.
        entry: its entry.
        start: the byte at which the data of all tensors begins.
        n_byte: number of bytes of this data.

    Returns:
        `(first, end, name, tensor)`: the first byte of the tensor and the byte after its last, both counted from
        `start`; its name; and the tensor.

    Raises:
        ValueError: the entry is wrong.
    """
    entry = entry if type(entry) is dict else {}
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not are_sizes(shape, 1 << 62) or not are_sizes(offsets, n_byte) or len(offsets) != 2 or len(shape) > MAX_RANK:
        raise ValueError(f"{shown(name)} has shape {shown(shape)}, data_offsets {shown(offsets)} of {n_byte} bytes")
    if type(dtype) is not str or dtype not in DTYPES:
        raise ValueError(f"{shown(name)} has dtype {shown(dtype)}, which is none of {', '.join(DTYPES)}")
    storage = Storage(path, DTYPES[dtype], math.prod(shape), start + offsets[0])
    n_needed = storage.numel * storage.raw.itemsize
    if offsets[1] - offsets[0] != n_needed:
        raise ValueError(f"{shown(name)} needs {n_needed} bytes and has those from {offsets[0]} to {offsets[1]}")
    return offsets[0], offsets[1], name, Tensor(storage, 0, tuple(shape), row_major(shape))
