"""Texts in a column of Parquet files, or of Apache Arrow tables, which are the blocks of Ray's datasets."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from txl_tf.data import inputs
from txl_tf.data.text_files import Progress
from txl_tf.errors import ParameterError, brief, named, shortened
from txl_tf.files import naming_read_errors, reason

_ROWS_AT_ONCE = 100


class Rows(NamedTuple):
    """Rows of a dataset of Ray that can be read independently.

    Attributes:
        table: `pyarrow.Table`, the rows.
        field: the column of the texts.
        first: number of the first of these rows in the dataset, from 1.
    """

    table: Any
    field: str
    first: int


def is_parquet(path: str) -> bool:
    """Whether the name of a file ends in .parquet."""
    return inputs.has_ending(path, ".parquet")


def row_groups(path: str) -> list[int]:
    """Returns the uncompressed bytes of each row group of a Parquet file."""
    with _opened(path) as file:
        return [file.metadata.row_group(i).total_byte_size for i in range(file.num_row_groups)]


def parquet_rows(
    path: str, field: str, begin: int = 0, end: int | None = None, progress: Progress | None = None
) -> Iterator[tuple[str, dict]]:
    """Yields the name and `{field: value}` of each row of some row groups.

    Args:
        path: local or remote Parquet file.
        field: the column of the texts.
        begin: number of the first row group.
        end: number after the last row group; `None`: to the end of the file.
        progress: called after each row group with its share of the bytes of the file.

    Raises:
        FileNotFoundError: the file does not exist.
        ParameterError: it is not a Parquet file, or has no such column; or pyarrow is not installed.
    """
    with _opened(path) as file:
        _check_column(file.schema_arrow.names, field, path)
        number = 1 + sum(file.metadata.row_group(i).num_rows for i in range(begin))
        n_groups = file.num_row_groups
        n_bytes = inputs.size(path)
        for group in range(n_groups)[begin:end]:
            batches = file.iter_batches(_ROWS_AT_ONCE, row_groups=[group], columns=[field])
            for row in _rows(batches, field):
                yield f"{path}, row {number}", row
                number += 1
            if progress:
                progress(n_bytes * (group + 1) // n_groups - n_bytes * group // n_groups)  # as if all had one size


def table_rows(rows: Rows) -> Iterator[tuple[str, dict]]:
    """Yields the name and `{field: value}` of each row of a table. Raises ParameterError without such a column."""
    _check_column(rows.table.column_names, rows.field, "the data set")
    batches = rows.table.select([rows.field]).to_batches(_ROWS_AT_ONCE)
    for number, row in enumerate(_rows(batches, rows.field), rows.first):
        yield f"text {number}", row


def _rows(batches: Iterable[Any], field: str) -> Iterator[dict]:
    """Yields `{field: value}` of each row of `pyarrow.RecordBatch`es with only the column `field`."""
    for batch in batches:
        yield from ({field: value} for value in batch.column(0).to_pylist())


def _check_column(names: list[str], field: str, where: str) -> None:
    """Raises ParameterError if no column has the name `field`.

    Args:
        names: names of the columns.
        field: the wanted name.
        where: how the error calls the file or the dataset with these columns.
    """
    if field not in names:
        columns = shortened(", ".join(map(brief, names)), 200) or "none"
        raise ParameterError("text_field", field, names, f"{where} has no column {brief(field)}; it has {columns}")


@contextlib.contextmanager
def _opened(path: str) -> Iterator[Any]:
    """Opens a Parquet file for the block: a `pyarrow.parquet.ParquetFile`. For errors, see `parquet_rows`."""
    pyarrow = inputs.pyarrow("Parquet files")
    from pyarrow.parquet import ParquetFile

    if not inputs.exists(path):
        raise FileNotFoundError(f"there is no file {named(path)}")
    try:
        with naming_read_errors(path), inputs.opened_by_pyarrow(path) as file, ParquetFile(file) as opened:
            yield opened
    except pyarrow.ArrowException as error:
        message = f"{path} cannot be read as Parquet: {reason(error)}"
        raise ParameterError(path, None, "a Parquet file", message) from error
