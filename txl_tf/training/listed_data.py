"""Lists of numbers in the data of `fit`, `evaluate` and single batches become arrays.

Keras's own loops take no lists of numbers, and their errors blame `x` for a list in any argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from txl_tf.nn.checks import as_array, tensor_error

WEIGHTS = "numbers [batch] or [batch, labels]"


def as_arrays(
    x: Any, y: Any = None, sample_weight: Any = None, *, names: Sequence[str] = ("x", "y", "sample_weight")
) -> tuple[Any, Any, Any]:  # fmt: skip
    """`(x, y, sample_weight)` with arrays in place of lists of numbers. Other values are returned unchanged.

    Args:
        x: inputs. In a dictionary, a tuple or a list, each input is converted.
        y, sample_weight: labels and weights, or `None`.
        names: the names of the three arguments, for errors.

    Raises:
        ParameterError: a list contains rows of different lengths; or `y` or `sample_weight` contains other values than
            numbers.
    """
    return (
        _inputs(names[0], x),
        _rows(names[1], y, "integers [batch, labels]"),
        _rows(names[2], sample_weight, WEIGHTS),
    )


def _inputs(name: str, x: Any) -> Any:
    if isinstance(x, dict):
        named = {key: _input(f"{name}[{key!r}]", value) for key, value in x.items()}
        return x if all(named[key] is value for key, value in x.items()) else named
    if not isinstance(x, (list, tuple)) or not x:
        return x
    are_rows = all(getattr(element, "ndim", 0) == 1 for element in x)  # an input has at least two dimensions
    if (_has_arrays(x) and not are_rows) or _depth(x) > 2:  # several inputs
        inputs = [_inputs(f"{name}[{i}]", value) for i, value in enumerate(x)]
        if all(new is old for new, old in zip(inputs, x, strict=True)):
            return x
        return inputs if isinstance(x, list) else tuple(inputs)
    return _input(name, x)


def _input(name: str, x: Any) -> Any:
    """One input: an array in place of a list of rows. Another value, and a list of text, is returned unchanged."""
    if not isinstance(x, (list, tuple)) or not x:
        return x
    array = as_array(name, x, "rows of one length")
    if array.dtype.kind == "f":
        return array.astype(keras.config.floatx())  # as Keras converts numbers of Python
    return array if array.dtype.kind in "iub" else x


def _rows(name: str, value: Any, allowed: str) -> Any:
    if not isinstance(value, (list, tuple)):
        return value
    array = as_array(name, value, allowed)
    if array.dtype.kind not in "iufb":
        raise tensor_error(name, value, allowed)
    return array


def _has_arrays(value: Any) -> bool:
    """Whether a nested list contains an array or tensor with a dimension. Numbers of NumPy have none."""
    return any(getattr(leaf, "ndim", 0) for leaf in keras.tree.flatten(value))


def _depth(value: Any) -> int:
    """The number of dimensions of a nested list, by its first elements."""
    depth = 0
    while isinstance(value, (list, tuple)) and value:
        value = value[0]
        depth += 1
    return depth
