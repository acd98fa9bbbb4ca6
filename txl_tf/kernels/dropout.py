"""Dropout without hidden state: the mask is a function of an explicit key and of the row."""

from typing import Any, NamedTuple

import tensorflow as tf

from txl_tf.config.checks import RATE
from txl_tf.errors import ParameterError
from txl_tf.kernels.dtypes import scalar
from txl_tf.kernels.fusion import fused
from txl_tf.kernels.shapes import Tensor, shape_of

# `split` makes fewer keys than this at a time. So a place takes 10 bits of an int32 for each of up to three splits.
_MAX_KEYS = 1024

# Factors of the hash: odd numbers with irregular bits. _STEP is 2**32 divided by the golden ratio; the others are Chris
# Wellons's.
_STEP = 0x9E3779B9
_FIRST = 0x21F0AAAD
_SECOND = 0x735A2D97


def dropout(x: Tensor, rate: float, dropout_key: Tensor | None, row_axis: int | None = 0) -> Tensor:
    """Sets a share `rate` of the elements of `x` to zero and scales the others by `1 / (1 - rate)`.

    The mask of a row is a function of the key and of the row's number in the global batch. So several replicas, each
    with contiguous rows, draw the masks that one device would draw for the whole batch. The same is true for the parts
    of a batch. The same key gives the same mask on every device and with XLA.

    An element is dropped if a random number of 16 bits is below `65536 * rate`, so rates are exact to 1 / 65536. Four
    elements share a random word. The high bytes of their numbers are independent. The low byte decides only for one
    element in 256. The same byte is also the high byte of another element of the row, or is added to it; the
    correlation of these two elements is at most 1 / 256.

    Args:
        x: float tensor of any shape.
        rate: float in `[0, 1)`.
        dropout_key: int `[3]`, two words of key and the number of the first row of `x` in the global batch; or one of
            the keys that `split` makes of it; or `None`, which returns `x` unchanged (inference).
        row_axis: the axis of the rows, or `None` if `x` has no rows: then all parts of the batch get the same mask.

    Returns:
        A tensor like `x`.
    """
    if dropout_key is None:
        return x
    RATE("rate", rate)
    if rate == 0:
        return x
    return x * _mask(shape_of(x), _key_of_four(dropout_key), rate, row_axis, x.dtype)


class Drop(NamedTuple):
    """Dropout in one place of a model, as a function of the tensor in that place."""

    rate: float = 0.0
    key: Tensor | None = None  # int [3], see `dropout`; `None` returns tensors unchanged

    def __call__(self, x: Tensor, row_axis: int | None = 0) -> Tensor:
        return dropout(x, self.rate, self.key, row_axis)


NO_DROP = Drop()


def scale_of_kept(rate: float) -> float:
    """The factor of the elements that `dropout` does not drop."""
    return 65536 / (65536 - _threshold(rate))


def _threshold(rate: float) -> int:
    """How many of the 65,536 numbers of 16 bits drop an element. Fewer than all, so that `scale_of_kept` exists."""
    return min(round(rate * 65536), 65535)


@fused
def _mask(shape: Any, dropout_key: Tensor, rate: float, row_axis: int | None, dtype: Any) -> Tensor:
    """The factors of `dropout`: 0 for elements that are dropped, else `scale_of_kept`."""
    words = _random_words(shape, dropout_key, row_axis)
    # Each word gives four numbers of 16 bits, in the top two bytes. The bytes below them are smaller than the unit of
    # the threshold, so they need not be cleared. The high byte of the last number is the sum of the word's lowest byte
    # and its highest; its low byte is the word's second highest.
    shift: Any = tf.bitwise.left_shift
    numbers = [words, shift(words, _u32(8)), shift(words, _u32(16)), words * _u32(2**24 + 1)]
    limit = _u32(_threshold(rate) << 16)
    keep: Any = tf.concat([number >= limit for number in numbers], -1)
    if len(shape) == (row_axis or 0) + 1:  # the rows are the last axis: one number for each
        keep = keep[..., 0]
    elif not isinstance(shape[-1], int) or shape[-1] % 4:
        keep = keep[..., : shape[-1]]
    return tf.cast(keep, dtype) * scalar(scale_of_kept(rate), dtype)


def _random_words(shape: Any, dropout_key: Tensor, row_axis: int | None) -> Tensor:
    """Random uint32, one for four elements: a hash of two random words of the row and of the position in the row."""
    axis = row_axis or 0
    if axis == len(shape) - 1:
        shape = [*shape, 1]
    first_row = tf.constant(0) if row_axis is None else dropout_key[2]
    row_words: Any = tf.raw_ops.StatelessRandomUniformFullIntV2(
        shape=[shape[axis], 4],  # a block of Philox
        key=tf.bitcast(dropout_key[None, :2], tf.uint64),
        counter=tf.cast(tf.stack([first_row, dropout_key[3]]), tf.uint64),  # low word first
        alg=tf.random.Algorithm.PHILOX.value,
        dtype=tf.uint32,
    )
    row_words = tf.reshape(row_words, [shape[axis], *[1] * (len(shape) - axis - 1), 4])
    size = (shape[-1] + 3) // 4
    # Add the second word of the key. Without it, XLA would know the positions when it compiles, and write them out as a
    # large constant of its program.
    place: Any = tf.cast(tf.range(size) + dropout_key[1], tf.uint32) * _u32(_STEP)
    for i in reversed(range(len(shape) - 1)):
        if i != axis:
            along: Any = tf.cast(tf.range(shape[i]) * size, tf.uint32) * _u32(_STEP)
            place += tf.reshape(along, [-1, *[1] * (len(shape) - 1 - i)])
            size *= shape[i]
    words: Any = tf.bitwise.bitwise_xor(place, row_words[..., 0]) * _u32(_FIRST)
    words = (_fold(words) + row_words[..., 1]) * _u32(_SECOND)
    return _fold(words)


def _fold(words: Tensor) -> Any:
    """Mixes the high bits of uint32 words into their low bits."""
    return tf.bitwise.bitwise_xor(words, tf.bitwise.right_shift(words, _u32(15)))


def _u32(number: int) -> Any:
    return tf.constant(number, tf.uint32)


def split(dropout_key: Tensor | None, num: int) -> list[Any]:
    """Independent keys for `num` places of a model that use dropout. Keys can be split up to three times.

    Returns:
        A list of int `[4]`: the three numbers of `dropout_key`, and the number of the place, which chooses one of the
        random streams of the key. If `dropout_key` is `None`, a list of `None`.

    Raises:
        ParameterError: `num` is 1024 or more.
    """
    if dropout_key is None:
        return [None] * num
    if num >= _MAX_KEYS:
        raise ParameterError("num", num, f"below {_MAX_KEYS}")
    first = _key_of_four(dropout_key) * [1, 1, 1, _MAX_KEYS]
    return [first + [0, 0, 0, place] for place in range(1, num + 1)]


def _key_of_four(dropout_key: Tensor) -> Any:
    """A key of three numbers with the place 0 as the fourth, or a key that `split` made, unchanged."""
    dropout_key = tf.cast(dropout_key, tf.int32)
    return tf.pad(dropout_key, [[0, 4 - dropout_key.shape[0]]])
