"""Dropout without hidden state: the mask is a function of an explicit seed and of the row."""

import math

import keras
import tensorflow as tf


def dropout(x, rate, seed, row_axis=0):
    """Zeroes a share `rate` of `x` and scales the rest by `1 / (1 - rate)`.

    The mask of a row of the batch is a function of the seed and of the row's number in the global batch: replicas, or
    parts of a batch, that hold contiguous rows each draw what one device draws for the whole batch. The same seed
    draws the same mask on every device and under XLA. The mask compares 16 random bits an element with the rate, so
    that the rate is met to 1 / 65536.

    Args:
        x: float tensor of any shape.
        rate: float in `[0, 1)`.
        seed: int `[3]`, two words of key and the number of the first row of `x` in the global batch, or `None` to
            leave `x` as it is (inference).
        row_axis: the axis of the rows, or `None` if `x` has none and all shares of the batch get the same mask.

    Returns:
        A tensor like `x`.
    """
    if seed is None or rate == 0:
        return x
    threshold = min(round(rate * 65536), 65535)
    keep_scale = 65536 / (65536 - threshold)
    seed = tf.cast(seed, tf.int32)
    first_row = tf.constant(0) if row_axis is None else seed[2]
    axis = row_axis or 0
    shape = keras.ops.shape(x)
    outer, rows, inner = math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])
    # Philox numbers its blocks of 4 draws of 32 bits, 8 elements. A row takes a whole number of blocks, so that the
    # blocks of a share of the rows are a contiguous piece of the batch's.
    blocks = (inner + 7) // 8
    first_block = tf.cast(first_row, tf.uint64) * tf.cast(outer * blocks, tf.uint64)
    draws = tf.raw_ops.StatelessRandomUniformFullIntV2(
        shape=[rows, outer, 4 * blocks],
        key=tf.bitcast(seed[None, :2], tf.uint64),
        counter=tf.stack([first_block, tf.constant(0, tf.uint64)]),  # low word first
        alg=tf.random.Algorithm.PHILOX.value,
        dtype=tf.int32,
    )
    bits = tf.reshape(tf.bitcast(draws, tf.uint16), [rows, outer, 8 * blocks])[..., :inner]
    keep = tf.cast(tf.cast(bits, tf.int32) >= threshold, x.dtype)
    mask = tf.transpose(keep * tf.cast(keep_scale, x.dtype), [1, 0, 2])
    return x * tf.reshape(mask, shape)


def split(seed, num):
    """Independent seeds for `num` places that drop: a list of `[3]` seeds, or of `None` where `seed` is `None`."""
    if seed is None:
        return [None] * num
    seed = tf.cast(seed, tf.int32)  # on larger ones XLA and the other kernels do not agree
    keys = tf.random.split(seed[:2], num, alg="philox")
    return [tf.concat([key, seed[2:]], 0) for key in tf.unstack(keys, num)]
