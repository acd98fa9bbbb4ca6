"""Texts in a column of Parquet files, or of Apache Arrow tables, which are the blocks of Ray's data sets."""

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
    """Rows of a data set that can be read independently.

    Attributes:
        table: `pyarrow.Table`.
        field: its column of texts.
        first: number of the first row in the data set, from 1.
    """

    table: Any
    field: str
    first: int


def is_parquet(path: str) -> bool:
    return inputs.has_ending(path, ".parquet")


def row_groups(path: str) -> list[int]:
    """Returns the uncompressed bytes of each row group of a Parquet file."""
    with _opened(path) as file:
        return [file.metadata.row_group(i).total_byte_size for i in range(file.num_row_groups)]


def parquet_rows(
    path: str, field: str, begin: int = 0, end: int | None = None, progress: Progress | None = None
) -> Iterator[tuple[str, dict]]:
    """Yields the name and `{field: value}` of each row of the row groups from `begin` to `end`.

    Raises:
        FileNotFoundError: the file does not exist.
        ParameterError: it is not a Parquet file, or has no such column; or pyarrow is not installed.
    """
    with _opened(path) as file:
        _check_column(file.schema_arrow.names, field, path)
        number = 1 + sum(file.metadata.row_group(i).num_rows for i in range(begin))
        shares = [inputs.size(path) * i // file.num_row_groups for i in range(file.num_row_groups + 1)]
        for group in range(file.num_row_groups)[begin:end]:
            batches = file.iter_batches(_ROWS_AT_ONCE, row_groups=[group], columns=[field])
            for row in _rows(batches, field):
                yield f"{path}, row {number}", row
                number += 1
            if progress:
                progress(shares[group + 1] - shares[group])


def table_rows(rows: Rows) -> Iterator[tuple[str, dict]]:
    """Yields the name and `{field: value}` of each row of a table. Raises ParameterError without such a column."""
    _check_column(rows.table.column_names, rows.field, "the data set")
    batches = rows.table.select([rows.field]).to_batches(_ROWS_AT_ONCE)
    for number, row in enumerate(_rows(batches, rows.field), rows.first):
        yield f"text {number}", row


def _rows(batches: Iterable[Any], field: str) -> Iterator[dict]:
    for batch in batches:
        yield from ({field: value} for value in batch.column(0).to_pylist())


def _check_column(names: list[str], field: str, where: str) -> None:
    if field not in names:
        columns = shortened(", ".join(map(brief, names)), 200) or "none"
        raise ParameterError("text_field", field, names, f"{where} has no column {brief(field)}; it has {columns}")


@contextlib.contextmanager
def _opened(path: str) -> Iterator[Any]:
    """Yields a `pyarrow.parquet.ParquetFile`."""
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
