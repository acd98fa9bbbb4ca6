"""Batches: cuts token arrays into consecutive segments of text, and checks the dataset that `fit` is given.

Shapes:
    B: batch_size, rows of text read in parallel
    T: tgt_len, tokens of a segment
    S: len(tokens) // B, tokens of a row
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from txl_tf.config.checks import POSITIVE, is_integer
from txl_tf.data.batching import prefetched
from txl_tf.data.text.documents import Documents
from txl_tf.data.token_files import StoredTokens
from txl_tf.errors import ParameterError
from txl_tf.layers.common.base import as_ids
from txl_tf.layers.embedding import check_ids, id_error
from txl_tf.schema import known_names

Tokens = np.ndarray | StoredTokens  # integers [n]
_READ_AHEAD = 1 << 16  # tokens a row
_COUNTED_AT_ONCE = 1 << 22  # tokens


@known_names
def segments(
    tokens: Tokens, batch_size: int, tgt_len: int, start: int = 0, repeat: bool = False, drop_remainder: bool = False
) -> tf.data.Dataset:
    """Cuts a token array into the batches of a language model, in the original's order.

    The tokens are laid out in B rows of S; the rest is dropped. A batch is the next T columns of all rows, so row r
    of a batch continues row r of the batch before. 14 tokens, B = 2, T = 4:

        0 1 2  3 |  4  5  6      tokens [[0, 1, 2, 3], [7, 8, 9, 10]]   labels [[1, 2, 3, 4], [8, 9, 10, 11]]
        7 8 9 10 | 11 12 13      tokens [[4, 5], [11, 12]]              labels [[5, 6], [12, 13]]

    Args:
        tokens: integer array `[n]`. An `np.memmap` or `StoredTokens` is read in pieces, any other is held in memory.
        batch_size: B, over all replicas.
        tgt_len: T.
        start: index of the first batch; with `repeat`, it may lie past the first epoch.
        repeat: whether to start again after the last batch, forever.
        drop_remainder: whether to leave out a shorter last batch, so that all have one shape.

    Returns:
        `tf.data.Dataset` of `(tokens, labels)`, int32 `[B, T]` each. If the last batch of an epoch is shorter, T is
        `None` in `element_spec`.

    Raises:
        ValueError: `tokens` is not an integer array `[n]` or is too short, or a number is out of range.
    """
    return Segments(tokens, batch_size, tgt_len, start, repeat, drop_remainder).dataset()


@dataclasses.dataclass(eq=False)
class Segments:
    """A lazy description of batches: nothing is read yet, so each of several workers can read its own rows alone.

    Args:
        tokens, batch_size, tgt_len, start, repeat, drop_remainder: as in `segments`.
        most: the largest number of batches, or `None`.
        documents: `Documents` of `tokens`, which come in a new order every epoch; `None` for the order of the text.

    Raises:
        ValueError: as `segments`.
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
        self._datasets = {}  # by rows; each is made once, for TensorFlow never frees what a dataset calls in Python

    def dataset(self, rows: range | None = None) -> tf.data.Dataset:
        """The batches; or only these consecutive `rows` of each: no token of another row is read."""
        rows = range(self.batch_size) if rows is None else rows
        if rows not in self._datasets:
            self._datasets[rows] = self._make_dataset(rows)
        return self._datasets[rows]

    def _make_dataset(self, rows: range) -> tf.data.Dataset:
        tgt_len, n_column = self.tgt_len, len(self.tokens) // self.batch_size  # T, S
        read_columns = self._column_reader(rows, n_column)
        one_length = self.drop_remainder or (n_column - 1) % tgt_len == 0

        def segment(i):
            begin = i % self._n_batch * tgt_len
            epoch = 0 if self.documents is None else i // self._n_batch  # which decides the order of documents
            read = read_columns(epoch, begin, begin + tgt_len + 1)  # [rows, T + 1]; shorter where the rows end
            read = tf.ensure_shape(read, [len(rows), tgt_len + 1 if one_length else None])
            return read[:, :-1], read[:, 1:]

        order = tf.data.Dataset.range(self.start, self._n_batch)
        order = tf.data.Dataset.counter(self.start) if self.repeat else order
        dataset = prefetched((order if self.most is None else order.take(self.most)).map(segment))
        dataset.tgt_len = tgt_len  # `element_spec` cannot say that only the last segment of an epoch is shorter
        return dataset

    def _column_reader(self, rows: range, n_column: int) -> Callable:
        """A function of tensors `(epoch, begin, end) -> columns [rows, end - begin]`, int32."""
        tokens, documents = self.tokens, self.documents
        if documents is not None:
            read = _read_ahead(documents.order, rows, n_column)
        elif isinstance(tokens, StoredTokens):
            read = _read_ahead(lambda epoch: tokens, rows, n_column)
        else:
            table = tokens[rows.start * n_column : rows.stop * n_column].reshape(len(rows), n_column)
            if not isinstance(table, np.memmap):
                with tf.device("CPU:0"):
                    held = tf.convert_to_tensor(table)  # no constant of a graph
                return lambda epoch, begin, end: as_ids("tokens", held[:, begin:end])

            def read(epoch, begin, end):
                return _as_int32(table[:, begin:end])

        return lambda epoch, begin, end: tf.numpy_function(read, [epoch, begin, end], tf.int32)


def _read_ahead(tokens_of: Callable, rows: range, n_column: int) -> Callable:
    """Reads `_READ_AHEAD` columns of an epoch's tokens at a time and serves the requested columns from them."""
    nothing = np.zeros([len(rows), 0], np.int32)
    held = None, None, 0, nothing  # epoch, its tokens, number of the first column, columns

    def read(epoch, begin, end):
        nonlocal held  # as a whole: an iterator that was left may still read, in its thread, while the next one does
        current, tokens, first, columns = held
        if epoch != current:
            current, tokens, columns = epoch, tokens_of(epoch), nothing
        end = min(end, n_column)
        if begin < first or end > first + columns.shape[1]:
            last = min(n_column, max(end, begin + _READ_AHEAD))
            pieces = [tokens[row * n_column + begin : row * n_column + last] for row in rows]
            first, columns = begin, _as_int32(np.stack(pieces))
        held = current, tokens, first, columns
        return np.ascontiguousarray(columns[:, begin - first : end - first])

    return read


def _as_int32(ids: np.ndarray) -> np.ndarray:
    """As `as_ids`: an id that int32 does not hold becomes the nearest that it does, which is in no table either."""
    held, given = np.iinfo(np.int32), np.iinfo(ids.dtype)
    return ids.clip(max(held.min, given.min), min(held.max, given.max)).astype(np.int32)


def num_batches(
    n_tokens: int,
    batch_size: int,
    tgt_len: int,
    drop_remainder: bool = False,
    name: str = "the text",
    rows: str = "batch_size",
) -> int:
    """The number of batches that `segments` makes of `n_tokens` tokens.

    Errors call the text `name` and the argument `batch_size` `rows`.
    """
    _check_enough(n_tokens, batch_size, tgt_len, tgt_len + 1 if drop_remainder else 2, name, rows)
    n_label = n_tokens // batch_size - 1  # of a row
    return n_label // tgt_len if drop_remainder else math.ceil(n_label / tgt_len)


def choose_bin_capacities(tokens: Tokens, batch_size: int, tgt_len: int, cutoffs: list[int]) -> list[int]:
    """Capacities of all clusters but the first of the adaptive softmax, for static shapes.

    The original's rule (`get_bin_sizes`): count a cluster's tokens in each batch of the training text `tokens`. The
    capacity is their mean plus 2.5 standard deviations, rounded to a multiple of 8. `batch_size` is that of a replica.
    """
    tokens = _check_tokens(tokens)
    _check_enough(len(tokens), batch_size, tgt_len, tgt_len)
    n_batch = len(tokens) // batch_size // tgt_len
    counts = np.zeros([len(cutoffs), n_batch])  # tokens of each cluster in each batch
    at_once = max(1, _COUNTED_AT_ONCE // tgt_len)  # batches
    for row, first in itertools.product(range(batch_size), range(0, n_batch, at_once)):
        last = min(first + at_once, n_batch)
        begin, end = ((row * n_batch + batch) * tgt_len for batch in (first, last))
        blocks = tokens[begin:end].reshape(last - first, tgt_len)
        for count, (left, right) in zip(counts, itertools.pairwise([*cutoffs, np.inf]), strict=True):
            count[first:last] += ((blocks >= left) & (blocks < right)).sum(1)
    shares = counts / (batch_size * tgt_len)
    capacities = batch_size * tgt_len * (shares.mean(1) + 2.5 * shares.std(1))
    return [max(8, (math.ceil(capacity) + 4) // 8 * 8) for capacity in capacities]


def _check_tokens(tokens: Any) -> Tokens:
    if isinstance(tokens, StoredTokens):
        return tokens
    tokens = np.asanyarray(tokens)  # a memory map stays one
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(f"tokens must be a 1-D integer array, got {tokens.dtype} of shape {tokens.shape}")
    return tokens


def _check_enough(
    n_tokens: int, batch_size: int, tgt_len: int, row_tokens: int, name: str = "the text", rows: str = "batch_size"
) -> None:
    POSITIVE(rows, batch_size)
    POSITIVE("tgt_len", tgt_len)
    if n_tokens < batch_size * row_tokens:
        raise ValueError(
            f"{name} has {n_tokens} tokens: {rows}={batch_size} and tgt_len={tgt_len} need at least "
            f"{batch_size * row_tokens}, {row_tokens} a row"
        )


# ------------------------------------------------------------------------------------------------- what `fit` is given


@dataclasses.dataclass
class Batches:
    """The batches that `fit` and `evaluate` read.

    Attributes:
        dataset: `tf.data.Dataset` of `(tokens, labels)`, or a distributed one.
        rows: rows of a batch, over all replicas.
        tgt_len: tokens of a segment, or, if lengths differ, of the first one or of all but an epoch's last; `None` in
            training where that is not known.
        count: number of batches, or TensorFlow's negative number for infinite or unknown.
        repeated: whether the dataset repeats these batches forever. Workers would otherwise have to agree at every
            step on whether the dataset has ended.
    """

    dataset: Any
    rows: int
    tgt_len: int | None
    count: int
    repeated: bool = False

    def __post_init__(self) -> None:
        self._iterator, self._left = None, 0

    def calls(self, iterator: Any, k: int) -> list[int]:
        """Steps of each of the next calls: one call of `k` steps or of what is left, or `k` calls of one step."""
        if self.count == tf.data.INFINITE_CARDINALITY:
            return [k]
        if self.count < 0:
            return [1] * k
        if iterator is not self._iterator or (self.repeated and not self._left):
            self._iterator, self._left = iterator, self.count
        k = min(k, self._left)
        self._left -= k
        return [k]


def check_batches(
    dataset: tf.data.Dataset, n_token: int, static_shapes: bool, evaluation: bool = False, name: str = "x"
) -> Batches:
    """Checks the dataset that `fit` or `evaluate` is given, and adds checks of every batch.

    Ids must be below `n_token`. With `static_shapes`, all training segments must have one length, and shorter
    evaluation segments are padded. No evaluation segment may be longer than the first. Errors call the dataset `name`.

    Raises:
        ValueError: `dataset` does not hold `(tokens, labels)`, int `[batch, tgt_len]` each, or is empty.
    """
    spec = getattr(dataset, "element_spec", None)
    pair = isinstance(spec, tuple) and len(spec) == 2 and all(isinstance(s, tf.TensorSpec) for s in spec)
    pair = pair and all(s.dtype.is_integer for s in spec)
    if not (pair and spec[0].shape.rank in (None, 2) and spec[0].shape.is_compatible_with(spec[1].shape)):
        raise ValueError(
            f"{name} must be a tf.data.Dataset of (tokens, labels), int [batch, tgt_len] each, "
            f"got {type(dataset).__name__}" + (f" of {spec}" if spec is not None else "")
            + f": row r of a batch continues row r of the batch before, whose memory it is given; {_remedy(dataset)}"
        )  # fmt: skip
    rows, tgt_len = spec[0].shape if spec[0].shape.rank else (None, None)
    usual_len = getattr(dataset, "tgt_len", None)  # what `Segments` says
    count = int(dataset.cardinality())
    if static_shapes and not evaluation and tgt_len is None:
        raise ValueError("static shapes need segments of one length: see drop_remainder of txl_tf.segments")
    if rows is None or (evaluation and tgt_len is None) or count == 0:
        first = next(iter(dataset), None)
        if first is None:
            raise ValueError(f"{name} must hold at least one batch, got an empty dataset")
        rows, first_len = first[0].shape
        tgt_len = first_len if evaluation else tgt_len
    dataset = _checked(dataset, rows, n_token, tgt_len if evaluation else None)
    return Batches(_padded(dataset, tgt_len) if static_shapes else dataset, rows, tgt_len or usual_len, count)


def _remedy(data: Any) -> str:
    """How to make a dataset of what `fit` was given instead: of an array or of a generator."""
    gives_batches = hasattr(data, "__iter__") or hasattr(data, "__getitem__")
    arrays_or_dataset = hasattr(data, "shape") or hasattr(data, "element_spec")
    if not gives_batches or arrays_or_dataset or isinstance(data, list | tuple | dict | str):
        return "txl_tf.segments(text, batch_size, tgt_len) makes one of a text"
    return (
        "tf.data.Dataset.from_generator(function, output_signature=(spec, spec)) makes one of it, where function() "
        "gives a new iterator and spec is tf.TensorSpec([batch, None], tf.int32)"
    )


def check_batch(tokens: Any, labels: Any, n_token: int) -> list[np.ndarray]:
    """The one batch `x, y` that a method of Keras is given, int32 `[batch, tgt_len]` each; checked."""
    arrays = []
    for argument, name, ids in (("x", "tokens", tokens), ("y", "labels", labels)):
        array = np.asarray(ids)
        if array.ndim != 2 or 0 in array.shape or not np.issubdtype(array.dtype, np.integer):
            found = type(ids).__name__ if array.dtype == object else f"{array.dtype} {list(array.shape)}"
            what = "the tokens of one batch" if argument == "x" else "the labels of x"
            raise ValueError(f"{argument} must be integers [batch, tgt_len], {what}, got {found}")
        check_ids(name, array, n_token)
        arrays.append(array.astype(np.int32))
    if arrays[0].shape != arrays[1].shape:
        raise ValueError(f"y must have the shape of x, {list(arrays[0].shape)}, got {list(arrays[1].shape)}")
    return arrays


def _checked(dataset: tf.data.Dataset, rows: int, n_token: int, longest: int | None) -> tf.data.Dataset:
    """The dataset with an error for a batch of other rows, a segment over `longest` or an id outside the vocabulary.

    The input pipeline checks this on the host: a GPU reads zeros for such an id, and XLA drops assertions.
    """

    def check(tokens, labels):
        shape = tf.shape(tokens)
        hint = "(drop_remainder=True leaves out a shorter last batch)"
        text = f"every batch must have the rows of the first, {rows}, found"
        checks = [(shape[0] == rows, [text, shape[0], hint])]
        if longest is not None:
            text = f"segments of an evaluation must not be longer than the first, {longest}, found"
            checks.append((shape[1] <= longest, [text, shape[1]]))
        for name, ids in (("tokens", tokens), ("labels", labels)):
            smallest, largest = tf.reduce_min(ids), tf.reduce_max(ids)
            worst = tf.where(smallest < 0, smallest, largest)
            checks.append(((smallest >= 0) & (largest < n_token), [id_error(name, n_token), worst]))
        found = tf.shape(labels)
        text = ["labels must have the shape of tokens,", shape[0], "x", shape[1]]
        checks.append((tf.reduce_all(shape == found), [*text, "but are", found[0], "x", found[1]]))
        with tf.control_dependencies([tf.debugging.Assert(*check) for check in checks]):
            return tuple(tf.ensure_shape(ids, [rows, ids.shape[1]]) for ids in (tokens, labels))

    return dataset.map(check)


@contextlib.contextmanager
def plain_messages() -> Iterator[None]:
    """Where a check of a batch fails, its message becomes one sentence, without the nodes of TensorFlow's graph."""
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        found = re.search(r"assertion failed: \[(.*)\]$", error.message, re.MULTILINE)  # [text] [number] [text] ...
        if not found:
            raise
        raise tf.errors.InvalidArgumentError(None, None, found[1].replace("] [", " ")) from None


def _padded(dataset: tf.data.Dataset, tgt_len: int) -> tf.data.Dataset:
    """The dataset with shorter segments padded to `tgt_len`; padded labels are -1, which the loss leaves out."""

    def pad(ids, value):
        ids = tf.pad(ids, [[0, 0], [0, tgt_len - tf.shape(ids)[1]]], constant_values=value)
        return tf.ensure_shape(ids, [None, tgt_len])

    return dataset.map(lambda tokens, labels: (pad(tokens, 0), pad(tf.cast(labels, tf.int32), -1)))
