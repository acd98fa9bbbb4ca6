"""How rows reach their cluster in the adaptive embedding and softmax, in three ways with the same results.

    route = ByNumber()
    y = route(mask, f, 0, x)        # f of the rows of x where the mask is true, zeros elsewhere

By default a cluster takes as many rows as it has. TPUs and XLA want shapes that do not depend on the data. There the
embedding computes every row in every cluster, and the softmax gives every cluster a fixed number of slots.

Shapes:
    n: rows
"""

import tensorflow as tf

from txl_tf.kernels import chosen as ops
from txl_tf.kernels.precision import matmul


def rows_of(table, projection, ids, dtype):
    """Rows of a table, projected: `[n, E]` of `ids` `[n]`, in `dtype`. Only the rows that are used are cast."""
    rows = tf.cast(ops.embedding_lookup(tf.convert_to_tensor(table), ids), dtype)
    return rows if projection is None else matmul(rows, tf.cast(projection, dtype))


class ByNumber:
    """A cluster takes as many rows as it has, by `where`, `gather` and `scatter_nd`."""

    def __call__(self, mask, function, fill, *rows):
        """`function(*rows)` where `mask`, bool `[n]`, is true, and zeros elsewhere.

        Args:
            fill: unused; see `EveryRow`.
            *rows: tensors `[n, ...]`.
        """
        places = tf.cast(tf.where(mask), tf.int32)  # how many there are, a GPU has to tell the host
        results = function(*(tf.gather(x, places[:, 0]) for x in rows))
        shape = tf.shape(mask) if len(results.shape) == 1 else [tf.size(mask), *results.shape[1:]]
        return tf.scatter_nd(places, results, shape)


class EveryRow:
    """Every cluster computes every row, and the results of other rows are not used."""

    def __call__(self, mask, function, fill, *rows):
        """As of `ByNumber`. Rows where `mask` is false are replaced by `fill`, which the function can take."""
        results = function(*(tf.where(_like(mask, x), x, tf.cast(fill, x.dtype)) for x in rows))
        return tf.where(_like(mask, results), results, tf.zeros([], results.dtype))


class BySlots:
    """Every cluster has a fixed number of slots: its first rows, in order, are computed; those past it are left out.

    Args:
        capacities: list of int, slots of every cluster that will be called, in order.

    Attributes:
        left_out: bool `[n]`, the rows that were left out so far; `None` before the first call.
    """

    def __init__(self, capacities):
        self.capacities = iter(capacities)
        self.left_out = None

    def __call__(self, mask, function, fill, *rows):
        """As of `ByNumber`, with zeros for the rows that are left out. The number of rows is known."""
        n = mask.shape[0]
        capacity = min(int(next(self.capacities)), n)
        count = tf.cumsum(tf.cast(mask, tf.int32))
        left_out = mask & (count > capacity)
        self.left_out = left_out if self.left_out is None else self.left_out | left_out
        slots = tf.searchsorted(count, tf.range(1, capacity + 1))  # where the count first reaches 1, 2, ...; else n
        # Slots that no row fills hold row number n: neither its result nor its gradient goes anywhere.
        results = function(*(_padded_rows(x, slots, fill) for x in rows))
        return tf.slice(tf.scatter_nd(slots[:, None], results, [n + 1]), [0], [n])


def _padded_rows(x, slots, fill):
    if x.dtype.is_integer:
        return tf.gather(tf.pad(x, [[0, 1]], constant_values=fill), slots)
    return ops.embedding_lookup(tf.pad(x, [[0, 1], [0, 0]]), slots)


def _like(mask, x):
    return tf.reshape(mask, [-1, *[1] * (len(x.shape) - 1)])
