"""Padding anywhere in a row: what lies at its elements is packed to the front, and results are put back.

    x       a . b c .          packed      a b c . .
    mask    1 0 1 1 0          unpacked    a . b c .

Packed, causality hides the padding, distances between elements are right, and loops over time end with the elements.
"""

import tensorflow as tf


def packed_order(mask):
    """What packing puts at every place: int32 `[B, T]`, where it is in the row as given."""
    return tf.argsort(tf.cast(~mask, tf.int32), stable=True)


def packed_places(mask):
    """Where packing puts what is at a place, padding too: int32 `[B, T]`, the inverse of `packed_order`."""
    mask = tf.cast(mask, tf.int32)
    first_padding = tf.reduce_sum(mask, 1, keepdims=True)
    return tf.where(mask == 1, tf.cumsum(mask, 1), first_padding + tf.cumsum(1 - mask, 1)) - 1


def pack(mask, *tensors):
    """`(mask, *tensors)`, each `[B, T]` or `[B, T, any]`, with the elements of every row before its padding."""
    order = packed_order(mask)
    return [tf.gather(x, order, batch_dims=1) for x in (mask, *tensors)]


def unpack(mask, x):
    """Undoes `pack` for `x`, `[B, T]` or `[B, T, ...]`, of the `mask` that it was given; zeros at padding."""
    places = tf.cumsum(tf.cast(mask, tf.int32), 1, exclusive=True)
    visible = mask[..., *[None] * (len(x.shape) - 2)]
    return tf.where(visible, tf.gather(x, places, batch_dims=1), tf.zeros([], x.dtype))


def unpack_pairs(mask, x):
    """Undoes `pack` for both elements of pairs, queries and keys; `x` as it is where `mask` is `None`.

    Args:
        mask: bool `[B, T]`, the mask that `pack` was given.
        x: `[..., B, T, M + T]`: M keys that were not packed stand in front of the others.

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
    of_segment = tf.transpose(unpack(mask, tf.transpose(rows[:, :, before:], swapped)), swapped)
    return tf.transpose(tf.concat([rows[:, :, :before], of_segment], 2), [*range(3, rank), 0, 1, 2])
