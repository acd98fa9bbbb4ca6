"""Portions of a text, which can be read by themselves, and who works on them.

What is done with a text is a generator function of a portion, such as `count` in `encoding.py`. `ThisProcess` calls it
for the whole text; in `txl_tf/cluster/preparation.py`, the machines of a cluster do so for many portions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from txl_tf.data import inputs, text_files
from txl_tf.data.text.parquet import is_parquet, row_groups
from txl_tf.data.text.texts import FilePart, sizes_in_zip


class ThisProcess:
    """Works on a text as a whole, as one portion."""

    def portions(self, paths: Iterable[str]) -> list[list[FilePart]]:
        return [[FilePart(path) for path in paths]]

    def each(self, function: Callable, calls: Iterable[tuple], progress: Callable | None = None) -> Iterator[Any]:
        """What a generator function yields for each tuple of arguments, in order.

        Args:
            function: is pure; its argument `progress` is called with the number of bytes that it has read.
            calls: taken as they are needed.
        """
        for call in calls:
            yield from function(*call, progress=progress)


THIS_PROCESS = ThisProcess()


def cut_in_portions(paths: Iterable[str], n_blocks: int) -> list[list[FilePart]]:
    """The parts of files, in order, in portions of about `n_blocks` megabytes.

    Small files share a portion. Large ones are cut: text between lines, a zip archive between its files, Parquet
    between its row groups. What gzip has packed can only be read as a whole.
    """
    portions, most, n_bytes = [], n_blocks * text_files.BLOCK_BYTES, 0
    for part, size in (sized for path in paths for sized in _parts_of(path, most)):
        if not portions or n_bytes + size > most:
            portions.append([])
            n_bytes = 0
        portions[-1].append(part)
        n_bytes += size
    return portions


def _parts_of(path: str, most: int) -> list[tuple[FilePart, int]]:
    """The parts of a file, and the size of each: `most` bytes, or as little as can be read by itself."""
    size = inputs.size(path)
    if size <= most or path.endswith(".gz"):
        return [(FilePart(path), min(size, most))]
    if path.endswith(".zip") or is_parquet(path):
        sizes = sizes_in_zip(path) if path.endswith(".zip") else row_groups(path)
        return [(FilePart(path, i, i + 1), size) for i, size in enumerate(sizes)]
    ends = [*range(most, size, most), None]
    return [(FilePart(path, begin, end), most) for begin, end in zip(range(0, size, most), ends, strict=True)]
