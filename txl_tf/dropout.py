"""Dropout without hidden state: the mask is a function of an explicit seed."""

import keras
import tensorflow as tf


def dropout(x, rate, seed):
    """Zeroes a share `rate` of `x` and scales the rest by `1 / (1 - rate)`.

    The same seed always draws the same mask, on every device and under XLA. The mask compares 16 random bits an
    element with the rate, two elements to a 32-bit draw: half the cost of a float an element, and the rate is
    met to 1 / 65536.

    Args:
        x: float tensor of any shape.
        rate: float in `[0, 1)`.
        seed: int `[2]`, or `None` to leave `x` as it is (inference).

    Returns:
        A tensor like `x`.
    """
    if seed is None or rate == 0:
        return x
    threshold = min(round(rate * 65536), 65535)
    keep_scale = 65536 / (65536 - threshold)
    shape = keras.ops.shape(x)
    size = 1
    for dim in shape:
        size = size * dim
    seed = tf.cast(seed, tf.int32)  # on larger ones XLA and the other kernels do not agree
    draws = tf.random.stateless_uniform([(size + 1) // 2], seed, minval=None, maxval=None, dtype=tf.int32, alg="philox")
    bits = tf.reshape(tf.bitcast(draws, tf.uint16), [-1])[:size]
    keep = tf.reshape(tf.cast(bits, tf.int32) >= threshold, shape)
    return x * (tf.cast(keep, x.dtype) * tf.cast(keep_scale, x.dtype))


def split(seed, num):
    """Independent seeds for `num` places that drop: a list of `[2]` seeds, or of `None` where `seed` is `None`."""
    return [None] * num if seed is None else tf.unstack(tf.random.split(tf.cast(seed, tf.int32), num, alg="philox"))
