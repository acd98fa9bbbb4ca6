"""Tensors and their sizes, as annotations and type checkers know them."""

from typing import Any, TypeAlias

import keras

# Whatever TensorFlow accepts as a tensor: a tensor, a variable or an array. Type checkers see `Any`, because TensorFlow
# adds the operators of `tf.Tensor` only at run time: a checker would report `x + y` of two `tf.Tensor` as an error.
Tensor: TypeAlias = Any

# The size of a dimension: an int where it is known, an int32 scalar tensor where it is not.
Size: TypeAlias = int | Tensor


def shape_of(x: Tensor) -> Any:
    """The shape of a tensor as a tuple, with an int where the size is known and a scalar tensor where it is not.

    This is `keras.ops.shape`. Its result is typed `Any`, because type checkers take the sizes that Keras returns for
    `None`.
    """
    return keras.ops.shape(x)
