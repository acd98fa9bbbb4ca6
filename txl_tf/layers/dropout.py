"""Dropout without hidden state: the mask is a function of an explicit key and of the row."""

import math

import keras
import tensorflow as tf

# Of the places that `split` tells apart at once.
_PLACES = 1024


def dropout(x, rate, dropout_key, row_axis=0):
    """Zeroes a share `rate` of `x` and scales the rest by `1 / (1 - rate)`.

    The mask of a row is a function of the key and of the row's number in the global batch. Replicas, or parts of a
    batch, that hold contiguous rows each therefore draw what one device draws for the whole batch. The same key draws
    the same mask on every device and under XLA.

    An element is dropped where a random number of 16 bits is below the rate, so rates are exact to 1 / 65536. A number
    is two neighbouring bytes of a random stream, and one begins at every byte: an element costs one byte. Each has a
    high byte of its own. The low byte, which decides for one element in 256, is the high byte of another element of the
    row; the correlation of the two is at most 1 / 256.

    Args:
        x: float tensor of any shape.
        rate: float in `[0, 1)`.
        dropout_key: int `[3]`, two words of key and the number of the first row of `x` in the global batch, or what
            `split` makes of it, or `None` to leave `x` as it is (inference).
        row_axis: the axis of the rows, or `None` if `x` has none and all shares of the batch get the same mask.

    Returns:
        A tensor like `x`.
    """
    if dropout_key is None or rate == 0:
        return x
    threshold = min(round(rate * 65536), 65535)
    keep_scale = 65536 / (65536 - threshold)
    dropout_key = _with_place(dropout_key)
    axis = row_axis or 0
    shape = keras.ops.shape(x)
    outer, rows, inner = math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])
    # Philox numbers its blocks of 16 bytes. A row takes a whole number of blocks, so that the blocks of a share of the
    # rows are a contiguous piece of the batch's.
    n = inner + inner % 2
    blocks = n // 16 + 1
    first_row = tf.constant(0) if row_axis is None else dropout_key[2]
    first_block = tf.cast(first_row, tf.uint64) * tf.cast(outer * blocks, tf.uint64)
    draws = tf.raw_ops.StatelessRandomUniformFullIntV2(
        shape=[rows, outer, 4 * blocks],
        key=tf.bitcast(dropout_key[None, :2], tf.uint64),
        counter=tf.stack([first_block, tf.cast(dropout_key[3], tf.uint64)]),  # low word first
        alg=tf.random.Algorithm.PHILOX.value,
        dtype=tf.int32,
    )
    stream = tf.reshape(tf.bitcast(draws, tf.int8), [rows, outer, 16 * blocks])  # a GPU does not slice uint8
    windows = [tf.slice(stream, [0, 0, first], [-1, -1, n]) for first in (0, 1)]
    windows = [tf.bitcast(tf.reshape(window, [rows, outer, n // 2, 2]), tf.uint16) for window in windows]
    keep = tf.concat(windows, 2)[..., :inner] >= tf.constant(threshold, tf.uint16)
    mask = tf.cast(keep, x.dtype) * tf.cast(keep_scale, x.dtype)
    if axis:
        mask = tf.transpose(mask, [1, 0, 2])
    return x * tf.reshape(mask, shape)


def split(dropout_key, num):
    """Independent keys for `num` places that drop, up to three levels deep.

    Returns:
        A list of int `[4]`: the words of `dropout_key`, and the number of the place, which picks one of the streams of
        the key. Or a list of `None` where `dropout_key` is `None`.
    """
    if dropout_key is None:
        return [None] * num
    if num >= _PLACES:
        raise ValueError(f"num must be below {_PLACES}, got {num}")
    dropout_key = _with_place(dropout_key) * [1, 1, 1, _PLACES]
    return [dropout_key + [0, 0, 0, place] for place in range(1, num + 1)]


def _with_place(dropout_key):
    dropout_key = tf.cast(dropout_key, tf.int32)
    return tf.pad(dropout_key, [[0, 4 - dropout_key.shape[0]]])
