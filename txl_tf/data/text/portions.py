"""Portions of a text, which can be read independently, and the object that calls functions of them.

A portion is a list of `FilePart`s, or `Rows`. Each step of the work on a text is a generator function of a portion,
such as `count` in `encoding.py`. `ThisProcess` calls it for the whole text as one portion; in
`txl_tf/cluster/preparation.py`, the machines of a cluster call it for many portions.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from txl_tf.data import inputs, text_files
from txl_tf.data.text.parquet import is_parquet, row_groups
from txl_tf.data.text.texts import FilePart, is_json_array, sizes_in_zip
from txl_tf.data.text_files import Progress

_PORTIONS_OF_WORKER = 8  # at least so many, so that no worker waits long for the others at the end
_MOST_BLOCKS = 64  # blocks of a megabyte in a portion. If a worker dies, the work on its portion starts again


class ThisProcess:
    """Works on a text as a whole, as one portion."""

    def portions(self, paths: Iterable[str]) -> list[list[FilePart]]:
        """Returns one portion, all of these files."""
        return [[FilePart(path) for path in paths]]

    def each(
        self, function: Callable[..., Any], calls: Iterable[tuple], progress: Progress | None = None
    ) -> Iterator[Any]:
        """Calls a generator function for each tuple of arguments, and yields all that it yields, in order.

        Args:
            function: its results depend only on its arguments. It also takes `progress` by keyword, and calls it after
                each piece with the number of bytes that it has read.
            calls: tuples of arguments, each taken when the function is called with it.
            progress: passed to `function`.
        """
        for call in calls:
            yield from function(*call, progress=progress)


THIS_PROCESS = ThisProcess()


def cut_in_portions(paths: Iterable[str], n_workers: int) -> list[list[FilePart]]:
    """Cuts files into portions, in order; if possible, at least eight for each worker.

    The limit for a portion is between 1 and 64 megabytes. Small files share a portion. Large files are cut: text
    between lines, a zip archive between its files, Parquet between its row groups. A gzip file, a JSON array and a part
    of an archive or of Parquet cannot be cut, so their portions may be larger.
    """
    files = [(path, inputs.size(path)) for path in paths]
    n_blocks = sum(size for _, size in files) // (_PORTIONS_OF_WORKER * n_workers * text_files.BLOCK_BYTES)
    max_bytes = min(max(n_blocks, 1), _MOST_BLOCKS) * text_files.BLOCK_BYTES
    portions = []
    n_bytes = 0
    for part, size in itertools.chain.from_iterable(_parts_of(*file, max_bytes) for file in files):
        if not portions or n_bytes + size > max_bytes:
            portions.append([])
            n_bytes = 0
        portions[-1].append(part)
        n_bytes += size
    return portions


def _parts_of(path: str, size: int, max_bytes: int) -> list[tuple[FilePart, int]]:
    """Returns the parts of a file, and the bytes of each part, for `cut_in_portions`.

    A file that must be read as a whole counts as at most `max_bytes`, so that it is a portion of its own or fits into
    one. The sizes of row groups of Parquet are uncompressed.
    """
    is_zip = inputs.has_ending(path, ".zip")
    if size <= max_bytes or inputs.has_ending(path, ".gz"):
        return [(FilePart(path), min(size, max_bytes))]
    if is_zip or is_parquet(path):
        sizes = sizes_in_zip(path) if is_zip else row_groups(path)
        return [(FilePart(path, i, i + 1), size) for i, size in enumerate(sizes)]
    if is_json_array(path):
        return [(FilePart(path), max_bytes)]
    ends = [*range(max_bytes, size, max_bytes), None]
    return [(FilePart(path, begin, end), max_bytes) for begin, end in zip(range(0, size, max_bytes), ends, strict=True)]
