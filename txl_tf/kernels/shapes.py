"""Sizes of tensors."""

from typing import Any

import keras


def shape_of(x: Any) -> Any:
    """The shape of a tensor as a tuple, with an int where the size is known and a scalar tensor where it is not.

    This is `keras.ops.shape`. Its result is typed `Any`: type
    checkers take the sizes that Keras returns for `None`.
    """
    return keras.ops.shape(x)
