"""Dropout without hidden state: the mask is a function of an explicit key and of the row."""

from typing import NamedTuple

import keras
import tensorflow as tf

from txl_tf.config.checks import RATE
from txl_tf.kernels.dtypes import scalar
from txl_tf.kernels.fusion import fused

# Of the places that `split` tells apart at once.
_PLACES = 1024

# Of the hash: odd, with bits in no order. The first is 2**32 over the golden ratio, the others are Chris Wellons's.
_STEP, _FIRST, _SECOND = 0x9E3779B9, 0x21F0AAAD, 0x735A2D97


def dropout(x, rate, dropout_key, row_axis=0):
    """Zeroes a share `rate` of `x` and scales the rest by `1 / (1 - rate)`.

    The mask of a row is a function of the key and of the row's number in the global batch. Replicas, or parts of a
    batch, that hold contiguous rows each therefore draw what one device draws for the whole batch. The same key draws
    the same mask on every device and under XLA.

    An element is dropped where a random number of 16 bits is below the rate, so rates are exact to 1 / 65536. Four
    elements share a random word: the high bytes of their numbers are independent. The low byte, which decides for one
    element in 256, is one that the high byte of another element of the row is made of; the correlation of the two is at
    most 1 / 256.

    Args:
        x: float tensor of any shape.
        rate: float in `[0, 1)`.
        dropout_key: int `[3]`, two words of key and the number of the first row of `x` in the global batch, or what
            `split` makes of it, or `None` to leave `x` as it is (inference).
        row_axis: the axis of the rows, or `None` if `x` has none and all shares of the batch get the same mask.

    Returns:
        A tensor like `x`.
    """
    if dropout_key is None:
        return x
    RATE("rate", rate)
    if rate == 0:
        return x
    return x * _mask(keras.ops.shape(x), _with_place(dropout_key), rate, row_axis, x.dtype)


class Drop(NamedTuple):
    """Dropout at one place of a model: a function of the tensor there."""

    rate: float = 0.0
    key: tf.Tensor | None = None  # int [3], see `dropout`; `None` to leave tensors as they are

    def __call__(self, x, row_axis=0):
        return dropout(x, self.rate, self.key, row_axis)


NO_DROP = Drop()


def scale_of_kept(rate):
    """What `dropout` multiplies the elements by that it keeps."""
    return 65536 / (65536 - _threshold(rate))


def _threshold(rate):
    return min(round(rate * 65536), 65535)


@fused
def _mask(shape, dropout_key, rate, row_axis, dtype):
    """What `dropout` multiplies by: 0, or the scale of what is kept."""
    words = _random_words(shape, dropout_key, row_axis)
    # The top two bytes are the number; what is below them is smaller than the threshold's unit. The last is the word's
    # lowest byte plus its highest, before the word's second.
    shift = tf.bitwise.left_shift
    numbers = [words, shift(words, _u32(8)), shift(words, _u32(16)), words * _u32(2**24 + 1)]
    limit = _u32(_threshold(rate) << 16)
    keep = tf.concat([number >= limit for number in numbers], -1)
    if len(shape) == (row_axis or 0) + 1:
        keep = keep[..., 0]
    elif not isinstance(shape[-1], int) or shape[-1] % 4:
        keep = keep[..., : shape[-1]]
    return tf.cast(keep, dtype) * scalar(scale_of_kept(rate), dtype)


def _random_words(shape, dropout_key, row_axis):
    """Random uint32, a quarter as many as elements: a hash of two random words of the row and of the place in it."""
    axis = row_axis or 0
    if axis == len(shape) - 1:
        shape = [*shape, 1]
    first_row = tf.constant(0) if row_axis is None else dropout_key[2]
    row_words = tf.raw_ops.StatelessRandomUniformFullIntV2(
        shape=[shape[axis], 4],  # a block of Philox
        key=tf.bitcast(dropout_key[None, :2], tf.uint64),
        counter=tf.cast(tf.stack([first_row, dropout_key[3]]), tf.uint64),  # low word first
        alg=tf.random.Algorithm.PHILOX.value,
        dtype=tf.uint32,
    )
    row_words = tf.reshape(row_words, [shape[axis], *[1] * (len(shape) - axis - 1), 4])
    size = (shape[-1] + 3) // 4
    # From the second word of the key on, which no compiler knows: the places would be a large constant of its program.
    place = tf.cast(tf.range(size) + dropout_key[1], tf.uint32) * _u32(_STEP)
    for i in reversed(range(len(shape) - 1)):
        if i != axis:
            along = tf.cast(tf.range(shape[i]) * size, tf.uint32) * _u32(_STEP)
            place += tf.reshape(along, [-1, *[1] * (len(shape) - 1 - i)])
            size *= shape[i]
    words = tf.bitwise.bitwise_xor(place, row_words[..., 0]) * _u32(_FIRST)
    words = (_fold(words) + row_words[..., 1]) * _u32(_SECOND)
    return _fold(words)


def _fold(words):
    return tf.bitwise.bitwise_xor(words, tf.bitwise.right_shift(words, _u32(15)))


def _u32(number):
    return tf.constant(number, tf.uint32)


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
