"""Batches of rows of different lengths: rows of similar length share a batch, padded to one length."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from txl_tf.errors import ParameterError


def by_length(lengths: np.ndarray | Sequence[np.ndarray], max_rows: int | Callable[..., Any]) -> Iterator[np.ndarray]:
    """Yields batches of rows of similar length, the shortest first: int `[B]`, the indices of rows.

    Args:
        lengths: int `[rows]`; or several such arrays, each of which breaks the ties of the arrays before it.
        max_rows: number of rows of a batch; or a function that returns it for the indices of the remaining rows, the
            shortest row first. A batch always has at least one row.
    """
    order = np.lexsort(np.atleast_2d(lengths)[::-1])
    while order.size:
        size = max(1, int(max_rows(order))) if callable(max_rows) else max_rows
        yield order[:size]
        order = order[size:]


def in_order(answer: Callable[..., Any], items: Sequence, batches: Iterator[np.ndarray]) -> list:
    """Computes the answers to items in batches, and returns them in the order of the items.

    Args:
        answer: function that takes a list of items and returns a list of answers.
        items: the items.
        batches: indices of items, from `by_length`.
    """
    answers: list[Any] = [None] * len(items)
    for rows in batches:
        for row, item_answer in zip(rows, answer([items[row] for row in rows]), strict=True):
            answers[row] = item_answer
    return answers


def padded(rows: Sequence[np.ndarray], multiple: int = 1, width: int = 0) -> np.ndarray:
    """Pads rows with 0 to the length of the longest row: int32 `[rows, longest]`.

    Args:
        rows: int arrays `[any]`.
        multiple: rows of zeros are added until the number of rows is a multiple of it, such as the number of replicas.
        width: smallest length of the result.
    """
    table = np.zeros([len(rows) + -len(rows) % multiple, max([width, *map(len, rows)])], np.int32)
    for padded_row, row in zip(table, rows, strict=False):
        padded_row[: len(row)] = row
    return table


class EpochBatches:
    """Batches in a new order every epoch. A run can resume at any step.

    The batch of a step depends only on the seed and on the number of the step.

    Args:
        cut: function of a random generator, or of `None` for the order by length, that gives an epoch: the rows of
            every batch, as many batches every time.
        collate: function of rows that gives the batch: int32 arrays in any structure, always of the same dimensions.
        seed: of the orders; `None` for the order by length, every epoch.
    """

    def __init__(
        self, cut: Callable[[np.random.Generator | None], list], collate: Callable[[np.ndarray], Any], seed: int | None
    ):
        self._cut = cut
        self._collate = collate
        self.seed = seed
        self._epoch = None
        self._batches = cut(None)

    def __len__(self) -> int:
        return len(self._batches)

    def rows(self, step: int) -> np.ndarray:
        """Returns the rows of the batch of a step, int `[B]`. The numbers of steps continue from epoch to epoch."""
        epoch, i = divmod(step, len(self))
        if epoch != self._epoch and self.seed is not None:
            self._epoch = epoch
            self._batches = self._cut(np.random.default_rng([self.seed, epoch]))
        return self._batches[i]

    def batch(self, step: int) -> Any:
        """Returns the batch of a step."""
        return self._collate(self.rows(step))

    def dataset(self, start: int = 0, repeat: bool = False) -> tf.data.Dataset:
        """Returns the batches from step `start` on; without `repeat`, until the end of the first epoch."""
        example = self.batch(start)
        dimensions = [array.ndim for array in tf.nest.flatten(example)]

        def read(step):
            """Reads the batch of a step, as tensors in the structure of the example."""
            arrays = tf.numpy_function(
                lambda step: tf.nest.flatten(self.batch(step)), [step], [tf.int32] * len(dimensions)
            )
            arrays = [tf.ensure_shape(array, [None] * n) for array, n in zip(arrays, dimensions, strict=True)]
            return tf.nest.pack_sequence_as(example, arrays)

        steps = tf.data.Dataset.range(start, 2**62 if repeat else len(self))
        return prefetched(steps.map(read))


def shuffled(batches: list, rng: np.random.Generator | None) -> list:
    """Returns the batches in a random order; without a generator, in their own order."""
    return batches if rng is None else [batches[i] for i in rng.permutation(len(batches))]


def prefetched(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns a dataset that prepares its next two batches while a step runs.

    It has no autotuning: deleting an iterator would wait for the thread of that, which may sleep for a minute.
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.prefetch(2).with_options(options)


def hold_out(texts: Sequence[str], fraction: float, what: str) -> np.ndarray:
    """Chooses the rows of `texts` that are held out for validation: bool `[rows]`.

    A hash of the text decides, so that equal texts are in the same split.

    Raises:
        ParameterError: no row, or every row, is held out. The message calls the rows `what`.
    """
    share = np.array([zlib.crc32(text.encode()) for text in texts]) / 2**32
    if not 0 < np.sum(share < fraction) < len(share):
        leaves = f"valid_fraction={fraction} of {len(share)} {what} leaves none for training or for validation"
        message = f"{leaves}: give valid_path, or another valid_fraction"
        raise ParameterError("valid_fraction", fraction, f"a share of at least one of the {what}", message)
    return share < fraction
