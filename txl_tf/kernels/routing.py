"""Three ways to compute each cluster of the adaptive embedding and softmax for the rows that belong to it.

    route = own_rows_only
    y = route(mask, f, 0, x)        # f of the rows of x where the mask is true, zeros elsewhere

By default, a cluster computes exactly its own rows (`own_rows_only`). TPUs and XLA need shapes that do not depend on
the data. For them, the embedding computes every row in every cluster (`every_row`), and the softmax gives every cluster
a fixed number of slots (`BySlots`). The results are the same, except for rows for which `BySlots` has no slot.

Shapes:
    n: rows
"""

from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

import txl_tf.kernels as ops
from txl_tf.kernels.precision import matmul
from txl_tf.kernels.shapes import Tensor


def rows_of(table: Tensor, projection: Tensor | None, ids: Tensor, dtype: Any) -> Any:
    """The rows of a table at `ids` `[n]`, projected: `[n, E]` in `dtype`. Only the rows that are used are cast."""
    rows = tf.cast(ops.embedding_lookup(tf.convert_to_tensor(table), ids), dtype)
    return rows if projection is None else matmul(rows, tf.cast(projection, dtype))


def own_rows_only(mask: Tensor, function: Callable[..., Any], fill: int, *rows: Tensor) -> Any:
    """`function(*rows)` for exactly the rows where `mask` is true, and zeros for the others.

    Args:
        mask: bool `[n]`.
        function: function of any number of rows, which returns a tensor `[any, ...]`.
        fill: unused; see `every_row`.
        *rows: tensors `[n, ...]`.

    Returns:
        `[n, ...]`.
    """
    # The number of rows decides the shapes of what follows, so a GPU has to send it to the host here.
    indices: Any = tf.cast(tf.where(mask), tf.int32)  # [any, 1]
    results = function(*(tf.gather(x, indices[:, 0]) for x in rows))
    shape = tf.shape(mask) if len(results.shape) == 1 else [tf.size(mask), *results.shape[1:]]
    return tf.scatter_nd(indices, results, shape)


def every_row(mask: Tensor, function: Callable[..., Any], fill: int, *rows: Tensor) -> Any:
    """As `own_rows_only`, but computes every row, and replaces the results where `mask` is false by zeros.

    Before the call, rows where `mask` is false become `fill`, a value that `function` accepts.
    """
    results = function(*(tf.where(_like(mask, x), x, tf.cast(fill, x.dtype)) for x in rows))
    return tf.where(_like(mask, results), results, tf.zeros([], results.dtype))


class BySlots:
    """A route with a fixed number of slots for every cluster.

    A cluster computes its first rows, one in each slot. It leaves out the rows for which no slot is free.

    Args:
        capacities: the number of slots of every cluster, in the order in which the clusters are computed.

    Attributes:
        left_out: bool `[n]`, the rows that were left out so far; `None` before the first call.
    """

    left_out: Any

    def __init__(self, capacities: Iterable[int]) -> None:
        self.capacities = iter(capacities)
        self.left_out = None

    def __call__(self, mask: Tensor, function: Callable[..., Any], fill: int, *rows: Tensor) -> Any:
        """`function(*rows)` where `mask` is true and a slot is free, and zeros for the other rows.

        Arguments and result are those of `own_rows_only`, but n must be static, and `function` must return one number
        for each row. In an unused slot, an id is `fill`, and a vector is zeros.
        """
        n = mask.shape[0]
        capacity = min(int(next(self.capacities)), n)
        count: Any = tf.cumsum(tf.cast(mask, tf.int32))
        left_out = mask & (count > capacity)
        self.left_out = left_out if self.left_out is None else self.left_out | left_out
        # The rows at which the count first reaches 1, 2, ... A slot that no row fills gets the number n: a row that is
        # added to the rows, and whose result is cut off, so that it gets no gradient.
        slots: Any = tf.searchsorted(count, tf.range(1, capacity + 1))
        results = function(*(_padded_rows(x, slots, fill) for x in rows))
        return tf.slice(tf.scatter_nd(slots[:, None], results, [n + 1]), [0], [n])


def _padded_rows(x: Tensor, row_of_slot: Tensor, fill: int) -> Any:
    """The row of `x` `[n, ...]` for each slot. An unused slot has the row number n.

    For it, ids get `fill`, and vectors get zeros.
    """
    if x.dtype.is_integer:
        return tf.gather(tf.pad(x, [[0, 1]], constant_values=fill), row_of_slot)
    return ops.embedding_lookup(tf.pad(x, [[0, 1], [0, 0]]), row_of_slot)


def _like(mask: Tensor, x: Tensor) -> Any:
    """`mask` `[n]` with as many dimensions as `x` `[n, ...]`, so that it broadcasts."""
    return tf.reshape(mask, [-1, *[1] * (len(x.shape) - 1)])
