"""Rows with padding anywhere: moves the elements of every row to the front, and moves results back.

    x       a . b c .          packed      a b c . .
    mask    1 0 1 1 0          unpacked    a . b c .

In packed rows, the causal mask hides the padding, the distances between elements are right, and loops over time can end
with the last element.
"""

import tensorflow as tf

from txl_tf.kernels.shapes import Tensor


def packed_order(mask: Tensor) -> Tensor:
    """For every position of the packed rows, where its value is in the given rows: int32 `[B, T]`."""
    return tf.argsort(tf.cast(~mask, tf.int32), stable=True)


def packed_positions(mask: Tensor) -> Tensor:
    """For every position of the given rows, its position in the packed rows: int32 `[B, T]`, also for padding.

    It is the inverse of `packed_order`.
    """
    mask = tf.cast(mask, tf.int32)
    first_padding = tf.reduce_sum(mask, 1, keepdims=True)
    return tf.where(mask == 1, tf.cumsum(mask, 1), first_padding + tf.cumsum(1 - mask, 1)) - 1


def pack(mask: Tensor, *tensors: Tensor) -> list[Tensor]:
    """`[mask, *tensors]`, each `[B, T]` or `[B, T, any]`, with the elements of every row before its padding."""
    order = packed_order(mask)
    return [tf.gather(x, order, batch_dims=1) for x in (mask, *tensors)]


def unpack(mask: Tensor, x: Tensor) -> Tensor:
    """Undoes `pack` for `x`, `[B, T]` or `[B, T, ...]`, with the mask that `pack` was given. Padding becomes zeros."""
    positions = tf.cumsum(tf.cast(mask, tf.int32), 1, exclusive=True)
    visible = mask[..., *[None] * (len(x.shape) - 2)]
    return tf.where(visible, tf.gather(x, positions, batch_dims=1), tf.zeros([], x.dtype))


def unpack_pairs(mask: Tensor | None, x: Tensor) -> Tensor:
    """Undoes `pack` for pairs of query and key. Returns `x` unchanged if `mask` is `None`.

    Args:
        mask: bool `[B, T]`, the mask that `pack` was given.
        x: `[..., B, T, M + T]`; the first M keys were not packed.

    Returns:
        A tensor like `x`, with zeros where the query or the key is padding.
    """
    if mask is None:
        return x
    rank = len(x.shape)
    rows = tf.transpose(x, [rank - 3, rank - 2, rank - 1, *range(rank - 3)])  # [B, T, M + T, ...]
    rows = unpack(mask, rows)
    swapped = [0, 2, 1, *range(3, rank)]
    before = tf.shape(rows)[2] - tf.shape(mask)[1]
    segment_columns = tf.transpose(unpack(mask, tf.transpose(rows[:, :, before:], swapped)), swapped)
    return tf.transpose(tf.concat([rows[:, :, :before], segment_columns], 2), [*range(3, rank), 0, 1, 2])
