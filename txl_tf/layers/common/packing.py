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
    """Undoes `pack` for `x`, `[B, T]` or `[B, T, any]`, of the `mask` that it was given; zeros at padding."""
    places = tf.cumsum(tf.cast(mask, tf.int32), 1, exclusive=True)
    visible = mask[..., *[None] * (len(x.shape) - 2)]
    return tf.where(visible, tf.gather(x, places, batch_dims=1), tf.zeros([], x.dtype))
