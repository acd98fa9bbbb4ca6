"""Checks of the arguments of layers and of their calls: sizes, shapes, dtypes and token ids.

Errors name the argument, what was found and what is allowed.
"""

import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from txl_tf.config.checks import at_least, is_integer
from txl_tf.errors import ParameterError, brief
from txl_tf.kernels.shapes import Size, Tensor, shape_of

_COUNT = at_least(1)
_KINDS: dict[str, Callable[[tf.DType], bool]] = {
    "float": lambda dtype: dtype.is_floating,
    "int": lambda dtype: dtype.is_integer,
    "bool": lambda dtype: dtype.is_bool,
    "number": lambda dtype: dtype.is_floating or dtype.is_integer,
}


def check_eager(method: str) -> None:
    """Raises ParameterError in a graph, such as that of a `tf.function` or of `Dataset.map`."""
    if not tf.executing_eagerly():
        message = f"{method} runs in eager execution only: call it outside tf.function and Dataset.map"
        raise ParameterError(method, None, "called in eager execution", message)


def check_sizes(**sizes: Any) -> None:
    """Raises ParameterError unless all are positive integers."""
    for name, size in sizes.items():
        _COUNT(name, size)


def check_length(name: str, length: Any, least: int = 0) -> None:
    """Raises ParameterError unless a length is an integer from `least` on, or an integer tensor.

    The tensor must be a scalar or of unknown rank. Its value is not checked.
    """
    if isinstance(length, numbers.Number | np.bool_):
        at_least(least)(name, length)
        return
    is_tensor = hasattr(length, "shape") and hasattr(length, "dtype")
    if not is_tensor or tf.TensorShape(length.shape).rank or not tf.as_dtype(length.dtype).is_integer:
        raise tensor_error(name, length, "an integer, or an integer scalar tensor")


def checked_length(name: str, length: Size, most: int, allowed: str, message: str = "") -> Size:
    """`length` of the argument `name`, which must be at most `most`.

    A length that is known when a graph is traced is checked then. Any other is checked when the graph runs: wait for
    the result, so that no other operation can fail first. XLA drops this check.

    Args:
        name, length, most: see above.
        allowed: the limit, for the error.
        message: the error without the length that was found; by default, `name` must be `allowed`.

    Raises:
        ParameterError: the length is greater. If the graph checks it, it raises an InvalidArgumentError.
    """
    message = message or f"{name} must be {allowed}"
    if isinstance(length, int):
        if length > most:
            raise ParameterError(name, length, allowed, f"{message}, got {length}")
        return length
    with tf.control_dependencies([tf.debugging.Assert(length <= most, [f"{message}, got", length])]):
        return tf.identity(length)


def checked_sizes(**tensors: tuple[Any, str]) -> list[Any]:
    """The tensors, with checks of the sizes that `check_tensors` could not know when a graph was traced.

    A size that two tensors share is checked when the graph runs. If only the first dimension is unknown, nothing is
    checked, and the graph gets no operations. XLA drops the checks.

    Args:
        **tensors: for each argument, `(tensor, "batch length")`: the names of its first dimensions. A tensor of unknown
            rank is not checked.

    Raises:
        tf.errors.InvalidArgumentError: the graph raises it if two sizes of the same name differ.
    """
    values = [tensor for tensor, _ in tensors.values()]
    shapes = [tf.TensorShape(tensor.shape) for tensor in values]
    if all(None not in shape[1:] for shape in shapes if shape.rank is not None):
        return values
    first: dict[str, tuple[str, Any]] = {}  # for every dimension, the first argument that has it, and its size
    checks = []
    for (name, (tensor, dims)), shape in zip(tensors.items(), shapes, strict=True):
        sizes = () if shape.rank is None else shape_of(tensor)
        for dim, size in zip(dims.split(), sizes, strict=False):
            other, expected = first.setdefault(dim, (name, size))
            if other != name and not (isinstance(size, int) and isinstance(expected, int)):
                text = [f"{name} must have the {dim} of {other},", expected, "but has", size]
                checks.append(tf.debugging.Assert(tf.equal(size, expected), text))
    with tf.control_dependencies(checks):
        return [tf.identity(tensor) for tensor in values]


def checked_shape(name: str, tensor: Tensor, sizes: dict[str, Size]) -> Any:
    """The tensor of the argument `name`, with checks of the sizes that were not known when a graph was traced.

    They are checked when the graph runs. If only the first size may be unknown, nothing is checked, as in
    `checked_sizes`. XLA drops the checks.

    Args:
        name, tensor: the argument.
        sizes: `{name of a dimension: its size}` for all dimensions of the tensor, or for the first of them.

    Raises:
        tf.errors.InvalidArgumentError: the graph raises it if the tensor has another size.
    """
    found = shape_of(tensor)
    pairs = list(zip(sizes.items(), found, strict=False))
    if all(isinstance(size, int) and isinstance(expected, int) for (_, expected), size in pairs[1:]):
        return tensor
    checks = [
        tf.debugging.Assert(tf.equal(size, expected), [f"the size {dim} of {name} must be", expected, "but is", size])
        for (dim, expected), size in pairs
        if not (isinstance(size, int) and isinstance(expected, int))
    ]
    with tf.control_dependencies(checks):
        return tf.identity(tensor)


def check_key(name: str, key: Any, least: int = 3) -> None:
    """Raises ParameterError unless a value may be a dropout key, see `txl_tf.layers.dropout`.

    With `least=2`, the number of the first row may be missing. It is then 0.
    """
    allowed = "int [3]: two words of key and the number of the first row"
    array: Any = as_array(name, key, allowed) if isinstance(key, (list, tuple)) else key
    is_tensor = hasattr(array, "shape") and hasattr(array, "dtype")
    shape = tf.TensorShape(array.shape if is_tensor else [])
    if not any(shape.is_compatible_with([size]) for size in range(least, 5)) or not tf.as_dtype(array.dtype).is_integer:
        raise tensor_error(name, key, allowed)


def check_heads(d_model: Any, heads_name: str, heads: Any) -> None:
    """Raises ParameterError unless both are positive integers and the heads divide `d_model`."""
    check_sizes(**{"d_model": d_model, heads_name: heads})
    if d_model % heads:
        raise ParameterError("d_model", d_model, f"a multiple of {heads_name}={heads}")


def check_layer(layer: int, n_layer: int) -> int:
    """The index of a layer, from 0 on. A negative `layer` counts from the last: -1 is the last layer.

    Raises ParameterError if there is no such layer.
    """
    at_least(-n_layer, n_layer - 1)("layer", layer)
    return layer % n_layer


def as_ids(name: str, ids: Any, rank: int | None = None) -> Any:
    """Ids as int32. If `rank` is given and a graph does not know the rank of `ids`, it fails if they have another.

    The error then names the argument, but not under XLA.

    They may have any integer dtype, or be whole numbers in floats: Keras makes floats when it traces.

    An id outside the range of int32 becomes the nearest int32. No table has a row for it either.

    Raises:
        ParameterError: they are not numbers, not whole, or the tensor is ragged or sparse. For fractions in a graph,
            running the graph raises an InvalidArgumentError, but not under XLA.
    """
    values: Any = ids if hasattr(ids, "dtype") else as_array(name, ids, "integers")
    if isinstance(values, tf.RaggedTensor | tf.SparseTensor):
        raise dense_error(name, values, "filled up to one length, of integers")
    is_array = isinstance(values, np.ndarray)
    if not (values.dtype.kind in "iuf" if is_array else _KINDS["number"](tf.as_dtype(values.dtype))):
        raise ParameterError(name, ids, "integers", f"{name} must be integers, got {shown(ids)}")
    if tf.as_dtype(values.dtype).is_floating:
        values = _checked_whole(name, values)
    if tf.as_dtype(values.dtype) in (tf.int64, tf.uint32, tf.uint64):
        values = tf.clip_by_value(tf.cast(values, tf.int64), tf.int32.min, tf.int32.max)
    ids = tf.cast(values, tf.int32)
    if rank is None or ids.shape.rank is not None:
        return ids
    message = f"{name} must be integers with {rank} dimensions, but has the shape"
    with tf.control_dependencies([tf.debugging.Assert(tf.equal(tf.rank(ids), rank), [message, tf.shape(ids)])]):
        return tf.ensure_shape(tf.identity(ids), [None] * rank)


def _checked_whole(name: str, values: Any) -> Any:
    """Floats, with a check that they are whole numbers, see `as_ids`."""
    whole = tf.reduce_all(tf.equal(values, tf.floor(values)))
    message = f"{name} must be whole numbers, got fractions"
    if tf.executing_eagerly():
        if not whole:
            raise ParameterError(name, values, "whole numbers", f"{message} in {shown(values)}")
        return values
    with tf.control_dependencies([tf.debugging.Assert(whole, [message])]):
        return tf.identity(values)


def width_of(name: str, shape: Any) -> int:
    """The last dimension of the `shape` for which a layer is built. Raises ParameterError if it is not known.

    `name` is the argument of the layer's call with this shape.
    """
    if not isinstance(shape, (tuple, list, tf.TensorShape)) or not len(shape) or not is_integer(shape[-1]):
        raise ParameterError(name, shape, "float [..., width] of a known width")
    width: Any = shape[-1]
    return int(width)


def check_width(name: str, shape: Any, width_name: str, width: int) -> None:
    """Raises ParameterError if the `shape` for which a layer is built has another width. An unknown width passes."""
    if isinstance(shape, (tuple, list)) and shape and is_integer(shape[-1]) and shape[-1] != width:
        raise ParameterError(name, list(shape), f"[..., {width_name}={width}]")


def shown(value: Any) -> str:
    """A value as an error message shows it. Tensors are shown by dtype and shape."""
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        return brief(value)
    shape = tf.TensorShape(value.shape)
    dtype = getattr(value.dtype, "name", value.dtype)  # Keras has strings as dtypes
    return f"{dtype} {[*shape] if shape.rank is not None else '[...]'}"


def as_array(name: str, value: Any, allowed: str) -> np.ndarray:
    """A value as an array. Raises ParameterError if it is rows of different lengths, or no array for another reason."""
    try:
        return np.asarray(value)
    except (TypeError, ValueError):
        raise tensor_error(name, value, allowed) from None


def int_array(name: str, value: Any, rank: int, allowed: str) -> np.ndarray:
    """A value as an array. Raises ParameterError unless it has `rank` dimensions of integers and is not empty."""
    array = as_array(name, value, allowed)
    if array.ndim != rank or array.dtype.kind not in "iu" or not array.size:
        raise tensor_error(name, array, allowed)
    return array


def tensor_error(name: str, tensor: Any, allowed: str) -> ParameterError:
    """A ParameterError about a tensor. Its message shows dtype and shape, not the numbers."""
    return ParameterError(name, tensor, allowed, f"{name} must be {allowed}, got {shown(tensor)}")


def dense_error(name: str, tensor: Any, allowed: str) -> ParameterError:
    """A ParameterError about a tensor that is ragged or sparse."""
    if isinstance(tensor, tf.SparseTensor):
        kind, remedy = "sparse", "tf.sparse.to_dense"
    else:
        kind, remedy = "ragged", ".to_tensor()"
    message = f"{name} must be {allowed}, got a {kind} {shown(tensor)}: {remedy} makes it dense"
    return ParameterError(name, tensor, f"dense, {allowed}", message)


def check_tensors(sizes: dict[str, Any], **tensors: tuple[Any, str]) -> None:
    """Raises ParameterError unless tensors have the right kinds and shapes. An unknown dimension matches any size.

    Args:
        sizes: `{name: size}` of the dimensions that are known. The function adds the sizes that it finds in tensors.
        **tensors: for each argument, `(tensor, "float batch length d_model")`: its kind and the names of its
            dimensions. A name stands for the same size in all tensors. "float?" also allows `None`. "float ... width"
            allows any number of dimensions before the width; the same dimensions of other tensors must broadcast to
            them. A dimension may also be a number, or be computed: "n_head*d_head", "mem_len+tgt_len".
    """
    for name, (tensor, what) in tensors.items():
        kind, *dims = what.split()
        is_optional = kind.endswith("?")
        kind = kind.rstrip("?")
        if not hasattr(tensor, "shape") or not hasattr(tensor, "dtype"):
            if tensor is None and is_optional:
                continue
            raise tensor_error(name, tensor, f"a tensor, {described(kind, dims, sizes)}")
        if isinstance(tensor, tf.RaggedTensor | tf.SparseTensor):
            raise dense_error(name, tensor, described(kind, dims, sizes))
        shape = tf.TensorShape(tensor.shape)
        all_dims = dims
        if "..." in dims and shape.rank is not None:
            first = dims.index("...")
            others = max(shape.rank - len(dims) + 1, 0)
            all_dims = [*dims[:first], *["..."] * others, *dims[first + 1 :]]
            _check_leading(name, tensor, shape[first : first + others], sizes)
        expected = [size_of(dim, sizes) for dim in all_dims]
        if not _KINDS[kind](tf.as_dtype(tensor.dtype)) or not shape.is_compatible_with(expected):
            raise tensor_error(name, tensor, described(kind, dims, sizes))
        if shape.rank is not None:
            named_sizes = zip(all_dims, shape.as_list(), strict=True)
            sizes.update((dim, size) for dim, size in named_sizes if size is not None and dim.isidentifier())


def _check_leading(name: str, tensor: Any, leading: Any, sizes: dict[str, Any]) -> None:
    """Checks that the dimensions `leading`, in the place of "...", and those of earlier tensors broadcast to one shape.

    Stores this shape in `sizes["..."]`.
    """
    before = sizes.get("...", leading)
    try:
        sizes["..."] = tf.broadcast_static_shape(leading, before)
    except ValueError:
        raise tensor_error(
            name, tensor, f"of a shape whose dimensions {[*leading]} broadcast with {[*before]}"
        ) from None


def size_of(dim: str, sizes: dict[str, Any]) -> Any:
    """The size of a dimension of `check_tensors`; `None` if it is not known.

    A dimension is a number, a name, or a sum or a product of these, such as "mem_len+tgt_len".
    """
    if dim.isdigit():
        return int(dim)
    for sign, combine in (("+", sum), ("*", math.prod)):
        if sign in dim:
            parts = [size_of(part, sizes) for part in dim.split(sign)]
            return combine(parts) if all(isinstance(part, int) for part in parts) else None
    return None if dim == "..." else sizes.get(dim)


def described(kind: str, dims: Sequence[str], sizes: dict[str, Any]) -> str:
    """A kind and the names of dimensions as error messages show them: `float [batch, d_model=32]`."""

    def shown_as(dim: str) -> str:
        size = size_of(dim, sizes)
        return dim if size is None or dim.isdigit() else f"{dim}={size}"

    return f"{kind} [{', '.join(map(shown_as, dims))}]".lstrip()
