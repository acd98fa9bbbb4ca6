"""Batches of rows of different lengths: those of like lengths together, filled up to one length, epoch after epoch."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from txl_tf.errors import ParameterError


def by_length(lengths: np.ndarray | Sequence[np.ndarray], most: int | Callable) -> Iterator[np.ndarray]:
    """Batches of rows of like lengths, the shortest first: int `[B]` each, numbers of rows.

    Args:
        lengths: int `[rows]`; or several of them, where each one orders the rows that are alike in those before it.
        most: how many rows a batch takes; or a function that says it of the rows that are left, in order. It takes at
            least one.
    """
    order = np.lexsort(np.atleast_2d(lengths)[::-1])
    while order.size:
        size = max(1, int(most(order))) if callable(most) else most
        yield order[:size]
        order = order[size:]


def in_order(answer: Callable, items: Sequence, batches: Iterator[np.ndarray]) -> list:
    """The answers to items that are asked for in batches, in the order of the items.

    Args:
        answer: function of a list of items that gives a list of answers.
        batches: of `by_length`.
    """
    answers = [None] * len(items)
    for rows in batches:
        for row, found in zip(rows, answer([items[row] for row in rows]), strict=True):
            answers[row] = found
    return answers


def padded(rows: Sequence[np.ndarray], multiple: int = 1, width: int = 0) -> np.ndarray:
    """Rows filled up with 0 to the length of the longest: int32 `[rows, longest]`.

    Args:
        rows: int arrays `[any]`.
        multiple: rows of zeros are added until there is a multiple of it, such as the number of replicas.
        width: the least length.
    """
    table = np.zeros([len(rows) + -len(rows) % multiple, max([width, *map(len, rows)])], np.int32)
    for place, row in zip(table, rows, strict=False):
        place[: len(row)] = row
    return table


class EpochBatches:
    """Batches that come in a new order every epoch, of which a run can go on anywhere.

    What a step trains on is a function of the seed and of its number.

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
        """Which rows the batch of a step has, int `[B]`; steps go on from epoch to epoch."""
        epoch, i = divmod(step, len(self))
        if epoch != self._epoch and self.seed is not None:
            self._epoch = epoch
            self._batches = self._cut(np.random.default_rng([self.seed, epoch]))
        return self._batches[i]

    def batch(self, step: int) -> Any:
        """The batch of a step."""
        return self._collate(self.rows(step))

    def dataset(self, start: int = 0, repeat: bool = False) -> tf.data.Dataset:
        """The batches from that of step `start` on; without `repeat`, of one epoch."""
        example = self.batch(start)
        dimensions = [array.ndim for array in tf.nest.flatten(example)]

        def read(step):
            arrays = tf.numpy_function(
                lambda step: tf.nest.flatten(self.batch(step)), [step], [tf.int32] * len(dimensions)
            )
            arrays = [tf.ensure_shape(array, [None] * n) for array, n in zip(arrays, dimensions, strict=True)]
            return tf.nest.pack_sequence_as(example, arrays)

        steps = tf.data.Dataset.range(start, 2**62 if repeat else len(self))
        return prefetched(steps.map(read))


def shuffled(batches: list, rng: np.random.Generator | None) -> list:
    """The batches in a new order; as they are without a generator."""
    return batches if rng is None else [batches[i] for i in rng.permutation(len(batches))]


def prefetched(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """A dataset whose next two batches are made while a step runs.

    Without tf.data's autotuning: deleting an iterator waits for its thread, which may sleep for a minute.
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.prefetch(2).with_options(options)


def hold_out(texts: Sequence[str], fraction: float, what: str) -> np.ndarray:
    """Which rows of `texts` are held out to validate on, bool. A hash decides, so that equal texts are on one side.

    Raises:
        ParameterError: none are, or all. The message calls them `what`.
    """
    share = np.array([zlib.crc32(text.encode()) for text in texts]) / 2**32
    if not 0 < np.sum(share < fraction) < len(share):
        leaves = f"valid_fraction={fraction} of {len(share)} {what} leaves none to train or validate on"
        message = f"{leaves}: give valid_path, or another valid_fraction"
        raise ParameterError("valid_fraction", fraction, f"a share of at least one of the {what}", message)
    return share < fraction
