"""Tensors and their sizes, as annotations and type checkers know them."""

from typing import Any, TypeAlias

import keras
import tensorflow as tf

# Whatever TensorFlow accepts as a tensor: a tensor, a variable or an array. Type checkers see `Any`, because TensorFlow
# adds the operators of `tf.Tensor` only at run time: a checker would report `x + y` of two `tf.Tensor` as an error.
Tensor: TypeAlias = Any

# The size of a dimension: an int where it is known, an int32 scalar tensor where it is not.
Size: TypeAlias = int | Tensor


def shape_of(x: Tensor) -> Any:
    """The shape of a tensor as a tuple, with an int where the size is known and a scalar tensor where it is not.

    `keras.ops.shape` returns the same, but adds about four operations to a graph for each unknown size; this adds two
    for all. Type checkers take the sizes that Keras returns for `None`, so the result is typed `Any`.
    """
    if not isinstance(x, tf.Tensor):
        return keras.ops.shape(x)
    sizes = x.shape.as_list()
    if None not in sizes:
        return tuple(sizes)
    found = tf.unstack(tf.shape(x), len(sizes))
    return tuple(found[i] if size is None else size for i, size in enumerate(sizes))
