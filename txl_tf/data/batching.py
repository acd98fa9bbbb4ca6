"""Batches of rows of different lengths: rows of similar length share a batch, padded to one length."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from txl_tf.errors import ParameterError


def by_length(
    lengths: np.ndarray | Sequence[np.ndarray], max_rows: int | Callable[[np.ndarray], Any]
) -> Iterator[np.ndarray]:
    """Yields batches of rows of similar length, the shortest first: int `[B]`, the indices of rows.

    Args:
        lengths: int `[rows]`; or several such arrays, such as the lengths of sources and of targets. Rows that are
            equal in the first array are sorted by the second one, and so on.
        max_rows: number of rows of a batch; the last batch may have fewer. Or a function that returns the number of
            rows of the next batch. Its argument is the indices of the remaining rows, the shortest row first. A batch
            has at least one row, even if the function returns 0.
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
        batches: the indices of the items in each batch, from `by_length`.
    """
    answers: list[Any] = [None] * len(items)
    for rows in batches:
        for row, item_answer in zip(rows, answer([items[row] for row in rows]), strict=True):
            answers[row] = item_answer
    return answers


def next_power_of_two(n: int, least: int = 1) -> int:
    """The smallest power of two that is at least `n` and at least `least`, a power of two.

    Sizes are padded to it, so that there are few shapes, and TensorFlow makes few graphs.
    """
    return 1 << (max(n, least) - 1).bit_length()


def padded(rows: Sequence[np.ndarray], multiple: int = 1, width: int = 0) -> np.ndarray:
    """Pads rows with 0 on the right to one length: int32 `[rows, length]`.

    Args:
        rows: int arrays `[any]`.
        multiple: rows of zeros are added until the number of rows is a multiple of this number, such as the number of
            replicas.
        width: the length, unless a row is longer: then the length of the longest row.
    """
    table = np.zeros([len(rows) + -len(rows) % multiple, max([width, *map(len, rows)])], np.int32)
    for padded_row, row in zip(table, rows, strict=False):
        padded_row[: len(row)] = row
    return table


class EpochBatches:
    """Batches in a new order every epoch. A run can resume at any step.

    The batch of a step depends only on the seed and on the number of the step.

    Args:
        cut: function that divides the rows of the data into the batches of an epoch. Its argument is a random
            generator, or `None` for the order by length. It returns a list of the rows of each batch, int `[B]`. The
            number of batches must be the same in every epoch.
        collate: function that makes the batch of some rows: int32 arrays in any structure. Each array must have the
            same number of dimensions in every batch.
        seed: seed of the orders; `None`: every epoch has the order by length.
    """

    def __init__(
        self,
        cut: Callable[[np.random.Generator | None], list[np.ndarray]],
        collate: Callable[[np.ndarray], Any],
        seed: int | None,
    ):
        self._cut = cut
        self._collate = collate
        self.seed = seed
        self._epoch = None  # the epoch of `_batches`; `None`: they are in the order by length
        self._batches = cut(None)

    def __len__(self) -> int:
        """Returns the number of batches of an epoch."""
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
        """Returns a dataset of the batches from step `start` on.

        With `repeat`, one epoch follows the other without end. Otherwise the dataset ends with the first epoch.
        """
        example = self.batch(start)
        dimensions = [array.ndim for array in tf.nest.flatten(example)]

        def read(step):
            """Reads the batch of a step, as tensors in the structure of the example."""
            arrays = tf.numpy_function(
                lambda step: tf.nest.flatten(self.batch(step)), [step], [tf.int32] * len(dimensions)
            )
            arrays = [tf.ensure_shape(array, [None] * n) for array, n in zip(arrays, dimensions, strict=True)]
            return tf.nest.pack_sequence_as(example, arrays)

        steps = tf.data.Dataset.range(start, 2**62 if repeat else len(self))  # 2**62 steps never end
        return prefetched(mapped(steps, read))


def shuffled(batches: list, rng: np.random.Generator | None) -> list:
    """Returns the batches in a random order; without a generator, in their own order."""
    return batches if rng is None else [batches[i] for i in rng.permutation(len(batches))]


def mapped(dataset: tf.data.Dataset, function: Callable[..., Any]) -> tf.data.Dataset:
    """`dataset.map(function)`, but AutoGraph does not convert the code of the function first, which takes time."""
    return dataset.map(tf.function(function, autograph=False))


def prefetched(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns a dataset that prepares its next two batches while a step runs.

    Autotuning is off. Its thread may sleep for a minute, and deleting an iterator would wait for this thread.
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.prefetch(2).with_options(options)


def hold_out(texts: Sequence[str], fraction: float, what: str) -> np.ndarray:
    """Returns which of the texts are held out for validation: bool `[texts]`, about `fraction` of them.

    A hash of the text decides, so that equal texts are in the same split.

    Args:
        texts: the texts.
        fraction: between 0 and 1.
        what: what error messages call the texts, such as "pairs".

    Raises:
        ParameterError: no text, or every text, is held out.
    """
    hashes = np.array([zlib.crc32(text.encode()) for text in texts]) / 2**32  # from 0 to 1
    is_held_out = hashes < fraction
    if not 0 < np.sum(is_held_out) < len(texts):
        n_different = len(set(texts))
        different = f" ({n_different} different ones; equal {what} stay together)" if n_different < len(texts) else ""
        share = f"valid_fraction={fraction} of {len(texts)} {what}{different}"
        message = f"{share} leaves none for training or for validation: give valid_path, or another valid_fraction"
        raise ParameterError("valid_fraction", fraction, f"a share of at least one of the {what}", message)
    return is_held_out
