"""Batches: from token arrays to consecutive segments of text, and the checks of what `fit` is given.

Shapes:
    B: batch_size, rows of text read side by side
    T: tgt_len, tokens of a segment
    S: len(tokens) // B, tokens of a row
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from txl_tf.data.token_files import StoredTokens
from txl_tf.layers.embedding import id_error

_READ_AHEAD = 1 << 16  # tokens a row


def segments(
    tokens: np.ndarray,
    batch_size: int,
    tgt_len: int,
    start: int = 0,
    repeat: bool = False,
    drop_remainder: bool = False,
) -> tf.data.Dataset:
    """Cuts a token array into the batches of a language model, in order, as the original does.

    The tokens are laid out in B rows of S, those left over dropped. A batch is the next T columns of all
    rows, so row r of a batch goes on where row r of the batch before ended. 14 tokens, B = 2, T = 4:

        0 1 2  3 |  4  5  6      tokens [[0, 1, 2, 3], [7, 8, 9, 10]]   labels [[1, 2, 3, 4], [8, 9, 10, 11]]
        7 8 9 10 | 11 12 13      tokens [[4, 5], [11, 12]]              labels [[5, 6], [12, 13]]

    Args:
        tokens: integer array `[n]`. An `np.memmap` or `StoredTokens` is read piece by piece, any other array is held
            in memory.
        batch_size: B, over all replicas.
        tgt_len: T.
        start: index of the batch to begin with, to resume; with `repeat`, it may lie past the first epoch.
        repeat: whether to begin again after the last batch, for ever.
        drop_remainder: whether to leave out a shorter last batch, where all must have one shape.

    Returns:
        `tf.data.Dataset` of `(tokens, labels)`, int32 `[B, T]` each. The last batch of an epoch may be
        shorter, and `element_spec` then has `None` for T.

    Raises:
        ValueError: `tokens` is not such an array or too short, or a number is out of range.
    """
    tokens = _check_tokens(tokens)
    n_batch = num_batches(len(tokens), batch_size, tgt_len, drop_remainder)
    if start < 0 or (start > n_batch and not repeat):
        raise ValueError(f"start must be in [0, {n_batch}], the number of batches, got {start}")
    n_column = len(tokens) // batch_size  # S
    read_columns = _column_reader(tokens, batch_size, n_column)
    one_length = drop_remainder or (n_column - 1) % tgt_len == 0

    def segment(i):
        window = read_columns(i * tgt_len, (i + 1) * tgt_len + 1)  # [B, T + 1]; shorter where the rows end
        window = tf.ensure_shape(window, [batch_size, tgt_len + 1 if one_length else None])
        return window[:, :-1], window[:, 1:]

    order = tf.data.Dataset.range(start % n_batch if repeat else start, n_batch)
    if repeat:
        order = order.concatenate(tf.data.Dataset.range(n_batch).repeat())
    return order.map(segment).prefetch(tf.data.AUTOTUNE)


def _column_reader(tokens: np.ndarray, batch_size: int, n_column: int) -> Callable:
    """A function of tensors `(begin, end) -> columns [B, end - begin]`, int32, that embeds no array in a graph."""
    if isinstance(tokens, StoredTokens):
        read = _read_ahead(tokens, batch_size, n_column)
    else:
        rows = tokens[: batch_size * n_column].reshape(batch_size, n_column)
        if not isinstance(rows, np.memmap):
            with tf.device("CPU:0"):
                held = tf.convert_to_tensor(rows)
            return lambda begin, end: tf.cast(held[:, begin:end], tf.int32)

        def read(begin, end):
            return rows[:, begin:end].astype(np.int32)

    return lambda begin, end: tf.numpy_function(read, [begin, end], tf.int32)


def _read_ahead(tokens: StoredTokens, batch_size: int, n_column: int) -> Callable:
    """Reads long stretches of all rows at a time, and serves columns from the last ones read."""
    ahead = 0, np.zeros([batch_size, 0], np.int32)  # of this column on, these

    def read(begin, end):
        nonlocal ahead
        first, columns = ahead
        end = min(end, n_column)
        if begin < first or end > first + columns.shape[1]:
            last = min(n_column, max(end, begin + _READ_AHEAD))
            rows = [tokens[row * n_column + begin : row * n_column + last] for row in range(batch_size)]
            first, columns = ahead = begin, np.stack(rows).astype(np.int32)
        return np.ascontiguousarray(columns[:, begin - first : end - first])

    return read


def num_batches(n_tokens: int, batch_size: int, tgt_len: int, drop_remainder: bool = False, name: str = "text") -> int:
    """The number of batches that `segments` makes of `n_tokens` tokens; `name` is what an error calls them."""
    _check_enough(n_tokens, batch_size, tgt_len, tgt_len + 1 if drop_remainder else 2, name)
    n_label = n_tokens // batch_size - 1  # of a row
    return n_label // tgt_len if drop_remainder else math.ceil(n_label / tgt_len)


def choose_bin_capacities(tokens: np.ndarray, batch_size: int, tgt_len: int, cutoffs: list[int]) -> list[int]:
    """Chooses the adaptive softmax's bin capacities for static shapes, by the original's rule (`get_bin_sizes`).

    A capacity is the mean plus 2.5 standard deviations of a segment's tokens in the bin, to the nearest 8.

    Args:
        tokens: integer array `[n]`, the training text.
        batch_size: B, of one replica.
        tgt_len: T.
        cutoffs: list of int, as in `Corpus`.

    Returns:
        list of int, the capacity of each bin but the first.
    """
    tokens = _check_tokens(tokens)
    _check_enough(len(tokens), batch_size, tgt_len, tgt_len)
    n_batch = len(tokens) // batch_size // tgt_len
    counts = np.zeros([len(cutoffs), n_batch])  # of the tokens of each bin in each segment
    for row in range(batch_size):
        blocks = tokens[row * n_batch * tgt_len : (row + 1) * n_batch * tgt_len].reshape(n_batch, tgt_len)
        for count, (left, right) in zip(counts, itertools.pairwise([*cutoffs, np.inf]), strict=True):
            count += ((blocks >= left) & (blocks < right)).sum(1)
    capacities = []
    for share in counts / (batch_size * tgt_len):
        capacity = math.ceil(batch_size * tgt_len * (np.mean(share) + 2.5 * np.std(share)))
        capacities.append(max(8, (capacity + 4) // 8 * 8))
    return capacities


def _check_tokens(tokens: Any) -> np.ndarray | StoredTokens:
    if isinstance(tokens, StoredTokens):
        return tokens
    tokens = np.asanyarray(tokens)  # a memory map stays one
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(f"tokens must be a 1-D integer array, got {tokens.dtype} of shape {tokens.shape}")
    return tokens


def _check_enough(n_tokens: int, batch_size: int, tgt_len: int, row_tokens: int, name: str = "text") -> None:
    for argument, value in (("batch_size", batch_size), ("tgt_len", tgt_len)):
        if value < 1:
            raise ValueError(f"{argument} must be positive, got {value}")
    if n_tokens < batch_size * row_tokens:
        raise ValueError(
            f"the {name} has {n_tokens} tokens: batch_size={batch_size} and tgt_len={tgt_len} need at least "
            f"{batch_size * row_tokens}, {row_tokens} a row"
        )


# ------------------------------------------------------------------------------------------------- what `fit` is given


@dataclasses.dataclass
class Batches:
    """The batches that `fit` and `evaluate` read.

    Attributes:
        dataset: `tf.data.Dataset` of `(tokens, labels)`, or distributed.
        rows: of a batch, over all replicas.
        tgt_len: tokens of a segment, or of the first where they differ.
        count: number of batches, or one of TensorFlow's negative numbers for infinitely many and unknown.
        repeated: whether the dataset repeats these batches for ever. To find the end of a dataset, several workers
            would have to ask one another at every step.
    """

    dataset: Any
    rows: int
    tgt_len: int | None
    count: int
    repeated: bool = False

    def __post_init__(self) -> None:
        self._iterator, self._left = None, 0

    def calls(self, iterator: Any, k: int) -> list[int]:
        """Numbers of steps of the next calls: one call of `k` steps, or of as many as are left, or `k` calls of one."""
        if self.count == tf.data.INFINITE_CARDINALITY:
            return [k]
        if self.count < 0:
            return [1] * k
        if iterator is not self._iterator or (self.repeated and not self._left):
            self._iterator, self._left = iterator, self.count
        k = min(k, self._left)
        self._left -= k
        return [k]


def check_batches(dataset: tf.data.Dataset, n_token: int, static_shapes: bool, evaluation: bool = False) -> Batches:
    """Checks what `fit` or `evaluate` is given, and has every batch checked as it is read.

    Args:
        dataset: of `(tokens, labels)`, int `[batch, tgt_len]` each.
        n_token: size of the vocabulary.
        static_shapes: whether all segments must have one length; shorter ones of an evaluation are padded.
        evaluation: whether no segment may be longer than the first.

    Raises:
        ValueError: `dataset` is not such a dataset, or empty.
    """
    spec = getattr(dataset, "element_spec", None)
    pair = isinstance(spec, tuple) and len(spec) == 2 and all(s.dtype.is_integer for s in spec)
    if not (pair and spec[0].shape.rank in (None, 2) and spec[0].shape.is_compatible_with(spec[1].shape)):
        raise ValueError(
            "x must be a tf.data.Dataset of (tokens, labels), int [batch, tgt_len] each, "
            f"got {type(dataset).__name__}" + (f" of {spec}" if spec is not None else "")
        )
    rows, tgt_len = spec[0].shape if spec[0].shape.rank else (None, None)
    count = int(dataset.cardinality())
    if static_shapes and not evaluation and tgt_len is None:
        raise ValueError("static shapes need segments of one length: see drop_remainder of txl_tf.segments")
    if rows is None or (evaluation and tgt_len is None) or count == 0:
        first = next(iter(dataset), None)
        if first is None:
            raise ValueError("x must hold at least one batch, got an empty dataset")
        rows, tgt_len = first[0].shape
    dataset = _checked(dataset, rows, n_token, tgt_len if evaluation else None)
    return Batches(_padded(dataset, tgt_len) if static_shapes else dataset, rows, tgt_len, count)


def _checked(dataset: tf.data.Dataset, rows: int, n_token: int, longest: int | None) -> tf.data.Dataset:
    """The dataset, where a batch of other rows, a segment over `longest` or an id outside the vocabulary is an error.

    Checked in the input pipeline, on the host: a GPU would read zeros for such an id, and XLA drops checks.
    """

    def check(tokens, labels):
        found = tf.shape(tokens)[0]
        checks = [
            tf.debugging.Assert(found == rows, ["every batch must have the rows of the first,", rows, "found", found])
        ]
        if longest is not None:
            length = tf.shape(tokens)[1]
            text = f"segments of an evaluation must not be longer than the first, {longest}, found"
            checks.append(tf.debugging.Assert(length <= longest, [text, length]))
        for name, ids in (("tokens", tokens), ("labels", labels)):
            smallest, largest = tf.reduce_min(ids), tf.reduce_max(ids)
            worst = tf.where(smallest < 0, smallest, largest)
            checks.append(tf.debugging.Assert((smallest >= 0) & (largest < n_token), [id_error(name, n_token), worst]))
        same = tf.reduce_all(tf.shape(tokens) == tf.shape(labels))
        checks.append(
            tf.debugging.Assert(same, ["labels must have the shape of tokens,", tf.shape(tokens), tf.shape(labels)])
        )
        with tf.control_dependencies(checks):
            tokens, labels = tf.identity(tokens), tf.identity(labels)
        tokens.set_shape([rows, tokens.shape[1]])
        labels.set_shape([rows, labels.shape[1]])
        return tokens, labels

    return dataset.map(check)


def _padded(dataset: tf.data.Dataset, tgt_len: int) -> tf.data.Dataset:
    """The dataset with segments of `tgt_len`, where a shorter one ends in labels -1, which do not count."""

    def pad(ids, value):
        ids = tf.pad(ids, [[0, 0], [0, tgt_len - tf.shape(ids)[1]]], constant_values=value)
        return tf.ensure_shape(ids, [None, tgt_len])

    return dataset.map(lambda tokens, labels: (pad(tokens, 0), pad(tf.cast(labels, tf.int32), -1)))
