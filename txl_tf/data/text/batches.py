"""Batches: cuts token arrays into consecutive segments of text. Also chooses the capacities of static clusters.

Shapes:
    B: batch_size, rows of text read in parallel
    T: tgt_len, tokens of a segment
    S: len(tokens) // B, tokens of a row
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from txl_tf.calls import checked_call, checked_init
from txl_tf.config.checks import POSITIVE, is_integer
from txl_tf.data.batching import mapped, prefetched
from txl_tf.data.text.documents import Documents
from txl_tf.data.token_files import StoredTokens
from txl_tf.errors import ParameterError
from txl_tf.nn.checks import as_ids

Tokens = np.ndarray | StoredTokens  # integers [n]
_READ_AHEAD = 1 << 16  # tokens per row that are read at once
_COUNTED_AT_ONCE = 1 << 22  # tokens


@checked_call
def segments(
    tokens: Tokens, batch_size: int, tgt_len: int, start: int = 0, repeat: bool = False, drop_remainder: bool = False
) -> tf.data.Dataset:
    """Cuts a token array into the batches of a language model, in the original's order.

    The tokens are arranged in B rows of S; the last tokens, fewer than B, are left out. A batch is the next T columns
    of all rows, so row r of a batch continues row r of the previous batch. For 14 tokens, B = 2 and T = 4:

        0 1 2  3 |  4  5  6      tokens [[0, 1, 2, 3], [7, 8, 9, 10]]   labels [[1, 2, 3, 4], [8, 9, 10, 11]]
        7 8 9 10 | 11 12 13      tokens [[4, 5], [11, 12]]              labels [[5, 6], [12, 13]]

    Args:
        tokens: integer array `[n]`. An `np.memmap` or `StoredTokens` is read in pieces; other arrays stay in memory.
        batch_size: B, over all replicas.
        tgt_len: T.
        start: index of the first batch; with `repeat`, it may be after the first epoch.
        repeat: whether to start again after the last batch, without end.
        drop_remainder: whether to leave out a shorter last batch, so that all have one shape.

    Returns:
        `tf.data.Dataset` of `(tokens, labels)`, int32 `[B, T]` each. If the last batch of an epoch is shorter, T is
        `None` in `element_spec`.

    Raises:
        ParameterError: `tokens` is not an integer array `[n]` or is too short, or a number is out of range.
    """
    return Segments(tokens, batch_size, tgt_len, start, repeat, drop_remainder).dataset()


@checked_init
@dataclasses.dataclass(eq=False)
class Segments:
    """A lazy description of batches. `dataset` reads them; each of several workers reads only its own rows.

    Args:
        tokens, batch_size, tgt_len, start, repeat, drop_remainder: as in `segments`.
        most: the largest number of batches; `None` for no limit.
        documents: `Documents` of `tokens`, for a new order of documents every epoch; `None`: the order of the text.

    Raises:
        ParameterError: as `segments`.
    """

    tokens: Tokens
    batch_size: int
    tgt_len: int
    start: int = 0
    repeat: bool = False
    drop_remainder: bool = False
    most: int | None = None
    documents: Documents | None = None

    def __post_init__(self) -> None:
        self.tokens = _check_tokens(self.tokens)
        self._n_batch = num_batches(len(self.tokens), self.batch_size, self.tgt_len, self.drop_remainder)
        beyond = is_integer(self.start) and self.start > self._n_batch and not self.repeat
        if not is_integer(self.start) or self.start < 0 or beyond:
            allowed = f"in [0, {self._n_batch}], the number of batches"
            raise ParameterError("start", self.start, allowed)
        # The dataset of each range of rows. Each is made once: TensorFlow never frees the functions that it calls.
        self._datasets: dict[range, tf.data.Dataset] = {}

    def dataset(self, rows: range | None = None) -> tf.data.Dataset:
        """Returns a dataset of the batches, or of only some consecutive `rows` of each. It reads only these rows."""
        rows = range(self.batch_size) if rows is None else rows
        if rows not in self._datasets:
            self._datasets[rows] = self._make_dataset(rows)
        return self._datasets[rows]

    def _make_dataset(self, rows: range) -> tf.data.Dataset:
        """Makes the dataset of these rows of every batch, as `(tokens, labels)`."""
        tgt_len = self.tgt_len  # T
        n_column = len(self.tokens) // self.batch_size  # S
        read_columns = self._column_reader(rows, n_column)
        is_one_length = self.drop_remainder or (n_column - 1) % tgt_len == 0  # whether all segments have T tokens

        def segment(i):
            """Segment i of all rows: `(tokens, labels)`, int32 `[rows, T]` each, or shorter at the end of the rows."""
            begin = i % self._n_batch * tgt_len
            epoch = 0 if self.documents is None else i // self._n_batch  # decides the order of documents
            columns = read_columns(epoch, begin, begin + tgt_len + 1)  # [rows, T + 1]; shorter where the rows end
            columns = tf.ensure_shape(columns, [len(rows), tgt_len + 1 if is_one_length else None])
            return columns[:, :-1], columns[:, 1:]

        order = tf.data.Dataset.range(self.start, self._n_batch)
        order = tf.data.Dataset.counter(self.start) if self.repeat else order
        dataset = prefetched(mapped(order if self.most is None else order.take(self.most), segment))
        # `element_spec` cannot say that only the last segment of an epoch is shorter.
        setattr(dataset, "tgt_len", tgt_len)  # noqa: B010 - TensorFlow's class does not declare it
        return dataset

    def _column_reader(self, rows: range, n_column: int) -> Callable[..., Any]:
        """Returns a function of tensors: `(epoch, begin, end) -> columns [rows, end - begin]`, int32.

        If `end` is beyond the last of the `n_column` columns, there are fewer columns.
        """
        tokens = self.tokens
        documents = self.documents
        if documents is not None:
            read = _read_ahead(documents.order, rows, n_column)
        elif isinstance(tokens, StoredTokens):
            read = _read_ahead(lambda epoch: tokens, rows, n_column)
        else:
            table = tokens[rows.start * n_column : rows.stop * n_column].reshape(len(rows), n_column)
            if not isinstance(table, np.memmap):
                with tf.device("CPU:0"):  # the input pipeline runs on the host
                    device_table = tf.convert_to_tensor(table)  # not a constant, which every graph would copy
                return lambda epoch, begin, end: as_ids("tokens", device_table[:, begin:end])

            def read(epoch, begin, end):
                return _as_int32(table[:, begin:end])

        return lambda epoch, begin, end: tf.numpy_function(read, [epoch, begin, end], tf.int32)


def _read_ahead(tokens_of: Callable[..., Any], rows: range, n_column: int) -> Callable[..., Any]:
    """Returns a function that returns the requested columns. To read seldom, it reads `_READ_AHEAD` columns at once.

    Args:
        tokens_of: function of the number of the epoch that returns its tokens.
        rows: the rows to read.
        n_column: columns of the text, S.
    """
    nothing = np.zeros([len(rows), 0], np.int32)
    held: tuple[Any, Any, int, np.ndarray] = (None, None, 0, nothing)  # epoch, its tokens, first column, columns

    def read(epoch: int, begin: int, end: int) -> np.ndarray:
        """Returns the columns from `begin` to `end`, or to the last column: int32 `[rows, any]`."""
        # `held` is read and replaced as a whole: the thread of an abandoned iterator may still call this function.
        nonlocal held
        current, tokens, first, columns = held
        if epoch != current:
            current = epoch
            tokens = tokens_of(epoch)
            columns = nothing
        end = min(end, n_column)
        if begin < first or end > first + columns.shape[1]:
            last = min(n_column, max(end, begin + _READ_AHEAD))
            pieces = [tokens[row * n_column + begin : row * n_column + last] for row in rows]
            first = begin
            columns = _as_int32(np.stack(pieces))
        held = current, tokens, first, columns
        return np.ascontiguousarray(columns[:, begin - first : end - first])

    return read


def _as_int32(ids: np.ndarray) -> np.ndarray:
    """Converts ids to int32. An id outside int32 becomes the nearest int32, which no vocabulary has either."""
    held = np.iinfo(np.int32)
    given = np.iinfo(ids.dtype)
    return ids.clip(max(held.min, given.min), min(held.max, given.max)).astype(np.int32)


def num_batches(
    n_tokens: int,
    batch_size: int,
    tgt_len: int,
    drop_remainder: bool = False,
    name: str = "the text",
    rows: str = "batch_size",
) -> int:
    """Returns the number of batches that `segments` makes from `n_tokens` tokens.

    Args:
        n_tokens, batch_size, tgt_len, drop_remainder: of `segments`.
        name: how errors call the text.
        rows: how errors call the argument `batch_size`.

    Raises:
        ParameterError: there is not even one batch, or a number is not positive.
    """
    _check_enough(n_tokens, batch_size, tgt_len, tgt_len + 1 if drop_remainder else 2, name, rows)
    n_label = n_tokens // batch_size - 1  # of a row
    return n_label // tgt_len if drop_remainder else math.ceil(n_label / tgt_len)


@checked_call
def choose_bin_capacities(tokens: Tokens, batch_size: int, tgt_len: int, cutoffs: Sequence[int]) -> list[int]:
    """Returns the capacity of each cluster of the adaptive softmax, except the first cluster, for static shapes.

    This is the original's rule (`get_bin_sizes`): count a cluster's tokens in each batch of the training text `tokens`.
    The capacity is the mean of these counts plus 2.5 standard deviations, rounded to a multiple of 8, at least 8.

    Args:
        tokens: integer array `[n]`.
        batch_size: rows of a batch of one replica.
        tgt_len: tokens of a segment.
        cutoffs: first ids of the clusters, except the first cluster.

    Raises:
        ParameterError: `tokens` is not an integer array `[n]` or is too short, or a number is not positive.
    """
    tokens = _check_tokens(tokens)
    _check_enough(len(tokens), batch_size, tgt_len, tgt_len)
    n_batch = len(tokens) // batch_size // tgt_len
    counts = np.zeros([len(cutoffs), n_batch])  # tokens of each cluster in each batch
    at_once = max(1, _COUNTED_AT_ONCE // tgt_len)  # batches
    for row, first in itertools.product(range(batch_size), range(0, n_batch, at_once)):
        last = min(first + at_once, n_batch)
        begin, end = ((row * n_batch + batch) * tgt_len for batch in (first, last))
        blocks = tokens[begin:end].reshape(last - first, tgt_len)  # of this row: [batches, T]
        for count, (left, right) in zip(counts, itertools.pairwise([*cutoffs, np.inf]), strict=True):
            count[first:last] += ((blocks >= left) & (blocks < right)).sum(1)
    shares = counts / (batch_size * tgt_len)
    capacities = batch_size * tgt_len * (shares.mean(1) + 2.5 * shares.std(1))
    return [max(8, (math.ceil(capacity) + 4) // 8 * 8) for capacity in capacities]


def _check_tokens(tokens: Any) -> Tokens:
    """Returns tokens as an array or `StoredTokens`. Raises ParameterError unless they are a row of integers."""
    if isinstance(tokens, StoredTokens):
        return tokens
    tokens = np.asanyarray(tokens)  # a memory map stays one
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        allowed = "a 1-D integer array"
        message = f"tokens must be {allowed}, got {tokens.dtype} of shape {tokens.shape}"
        raise ParameterError("tokens", tokens, allowed, message)
    return tokens


def _check_enough(
    n_tokens: int, batch_size: int, tgt_len: int, row_tokens: int, name: str = "the text", rows: str = "batch_size"
) -> None:
    """Raises ParameterError if a text has fewer than `row_tokens` tokens for each row, or if a number is not positive.

    Errors call the text `name`, and the argument `batch_size` by the name in `rows`.
    """
    POSITIVE(rows, batch_size)
    POSITIVE("tgt_len", tgt_len)
    if n_tokens < batch_size * row_tokens:
        least = batch_size * row_tokens
        message = (
            f"{name} has {n_tokens} tokens: {rows}={batch_size} and tgt_len={tgt_len} need at least {least}, "
            f"{row_tokens} a row"
        )
        raise ParameterError(name, n_tokens, f"at least {least} tokens", message)
