"""Converts the masks that callers give to the one form that layers use: bool, true where a query sees a key.

    argument                                        numbers are 1 where         bool is true where
    mask of [batch, keys], padding_mask,
    query_mask, value_mask, key_mask                there is an element         there is an element
    mask of [batch, queries, keys]                  refused: ambiguous          a key is seen
    attention_mask                                  a key is seen               a key is seen
    mask and padding_mask of four dimensions,
    look_ahead_mask, attn_mask                      a key is forbidden          a key is seen
    forbidden                                       a key is forbidden          a key is forbidden

The first three rows are Keras's convention. The others are the convention of the articles (docs/articles.md). Numbers
are 0 or 1. Eager calls raise an error for other numbers; graphs do not check them. In the vanilla Transformer, whose
`mask` may have several shapes, numbers of `mask` [batch, keys] must be integers.

The functions take the `name` of an argument, for errors, its mask, and `sizes`, the `{name: size}` of the dimensions
that are known. They raise a ParameterError if the mask has another shape, or if it is neither bool nor numbers. Where
the rank of a mask decides what its axes are, they also raise it if a graph does not know the rank.
"""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from txl_tf.errors import ParameterError
from txl_tf.kernels.shapes import Size, Tensor
from txl_tf.nn.checks import checked_shape, checked_sizes, dense_error, described, shown, tensor_error

_MASK = "a mask of bool or of numbers 0 and 1"
SWAP_BATCH_AND_HEADS = [1, 0, 2, 3]  # [batch, heads, queries, keys], the layout of callers, <-> [heads, batch, ...]


class _PassedOn(keras.Layer):
    """Base class of layers that compute nothing, but let Keras read or set the mask of a tensor."""

    def __init__(self) -> None:
        # Without a dtype, Keras would fix the policy for all layers to come when this library is imported.
        super().__init__(autocast=False, dtype="float32", name="mask")
        self.supports_masking = True
        self.built = True


class _MaskOf(_PassedOn):
    """The mask that Keras passes to the call of a layer, as the output `[mask]`."""

    def call(self, x: Any, mask: Any = None) -> list[Any]:
        return [mask]

    def compute_mask(self, inputs: Any, previous_mask: Any = None) -> None:
        """`None`, because the mask itself has no mask."""
        return None


class _WithMask(_PassedOn):
    """`x` of a pair `(x, mask)`, with this mask."""

    def call(self, pair: tuple[Any, Any]) -> Any:
        return pair[0]

    def compute_mask(self, inputs: tuple[Any, Any], previous_mask: Any = None) -> Any:
        return inputs[1]


_MASK_OF = _MaskOf()
_WITH_MASK = _WithMask()


def mask_of(x: Any) -> Any:
    """The mask that Keras's layers pass on with a tensor, or `None`."""
    return _MASK_OF(x)[0] if tf.is_tensor(x) else None


def with_mask(x: Any, mask: Any) -> Any:
    """A tensor with a mask that Keras's layers pass on."""
    return _WITH_MASK((x, mask))


def mask_of_call(x: Any, mask: Any) -> Any:
    """The mask of a call as bool: the argument `mask` or, if it is `None`, the mask that Keras passed on with `x`.

    `None` if there is neither.
    """
    mask = mask_of(x) if mask is None else mask
    return None if mask is None else as_bool("mask", mask)


def keys_seen_by_all(mask: Tensor | None) -> Any:
    """The mask of a call, `[B, T]`, as `attend` takes it: `[1, B, 1, T]`, the same for all heads and queries.

    `None`, no padding, remains `None`.
    """
    return None if mask is None else mask[None, :, None]


def as_bool(name: str, mask: Any) -> Any:
    """A mask of bool or of numbers 0 and 1, as bool."""
    return tf.cast(checked_numbers(name, mask), tf.bool)


def as_bool_like(name: str, mask: Any, tokens: Tensor) -> Any:
    """As `as_bool`. Raises ParameterError unless the mask is `[batch, length]`, as `tokens` or their embeddings are."""
    mask = as_bool(name, mask)
    if not mask.shape.is_compatible_with(tokens.shape[:2]):
        raise tensor_error(name, mask, f"bool and of the shape of tokens, {list(tokens.shape[:2])}")
    return checked_sizes(**{"tokens": (tokens, "batch tgt_len"), name: (mask, "batch tgt_len")})[1]


def as_mask(name: str, mask: Any) -> Any:
    """A mask as a tensor. Raises ParameterError if it is no array, or if it is ragged or sparse."""
    if isinstance(mask, tf.RaggedTensor | tf.SparseTensor):
        raise dense_error(name, mask, _MASK)
    try:
        return tf.convert_to_tensor(mask)
    except (TypeError, ValueError):
        raise tensor_error(name, mask, _MASK) from None


def checked_numbers(name: str, mask: Any) -> Any:
    """A mask as a tensor. Raises ParameterError unless it is bool or numbers, which eager calls check to be 0 or 1."""
    mask = as_mask(name, mask)
    if not (mask.dtype.is_bool or mask.dtype.is_integer or mask.dtype.is_floating):
        raise tensor_error(name, mask, _MASK)
    if tf.executing_eagerly() and not mask.dtype.is_bool:
        numbers = np.asarray(mask)
        other_numbers = numbers[(numbers != 0) & (numbers != 1)]
        if other_numbers.size:
            message = f"{name} must be {_MASK}, got {shown(mask)} with the number {other_numbers.flat[0]}"
            raise ParameterError(name, mask, _MASK, message)
    return mask


def check_broadcasts(name: str, mask: Any, sizes: dict[str, Any], dims: Sequence[str], hint: str = "") -> None:
    """Raises ParameterError unless a mask has two or more dimensions and broadcasts to the last dimensions of `dims`.

    The message ends with the `hint`. A mask of unknown rank is refused, too: its rank decides what its axes are.
    """
    if mask.shape.rank is None:
        raise tensor_error(name, mask, f"a mask whose number of dimensions is known, {described('', dims, sizes)}")
    expected_sizes = [sizes.get(dim) for dim in dims[-mask.shape.rank :]]
    fits = len(expected_sizes) == mask.shape.rank > 1 and all(
        size in (None, 1, expected) or expected is None
        for size, expected in zip(mask.shape.as_list(), expected_sizes, strict=True)
    )
    if not fits:
        allowed = f"of a shape that broadcasts to {described('', dims, sizes)}"
        message = f"{name} must broadcast to {described('', dims, sizes)}, got {shown(mask)}{hint}"
        raise ParameterError(name, mask, allowed, message)


def seen_by_article(name: str, mask: Any, sizes: dict[str, Any], dims: Sequence[str]) -> Any:
    """Converts a mask as in the articles about the Transformer: the result is true where a query sees a key.

    In such a mask, the number 1 hides a key and 0 shows it. A bool mask is true where a query sees a key. The mask must
    broadcast to the last dimensions of `dims`.
    """
    mask = checked_numbers(name, mask)
    check_broadcasts(name, mask, sizes, dims)
    return seen(mask)


def seen(mask: Any) -> Any:
    """Converts a mask as `seen_by_article` does, without its checks."""
    mask = tf.convert_to_tensor(mask)
    return mask if mask.dtype.is_bool else mask == 0


def seen_by_heads(name: str, mask: Any, sizes: dict[str, Any]) -> Any:
    """Converts a mask as in the articles (`seen_by_article`) and moves its heads to the front, as `attend` needs them.

    Args:
        mask: broadcasts to `[batch, num_heads, queries, keys]`.

    Returns:
        bool that broadcasts to `[num_heads, batch, queries, keys]`, true where a query sees a key.
    """
    visible = seen_by_article(name, mask, sizes, ["batch", "num_heads", "queries", "keys"])
    return tf.transpose(visible[(None,) * (4 - visible.shape.rank)], SWAP_BATCH_AND_HEADS)


def seen_by_keras(name: str, mask: Any, sizes: dict[str, Any]) -> Any:
    """Converts a mask by Keras's convention: it is true or 1 where a query sees a key.

    Args:
        mask: `[queries, keys]`, `[batch, queries, keys]` or `[batch, num_heads, queries, keys]`; a dimension may be 1.

    Returns:
        bool that broadcasts to `[num_heads, batch, queries, keys]`, true where a query sees a key.
    """
    mask = as_bool(name, mask)
    if mask.shape.rank == 4:
        check_broadcasts(name, mask, sizes, ["batch", "num_heads", "queries", "keys"])
        return tf.transpose(mask, SWAP_BATCH_AND_HEADS)
    check_broadcasts(name, mask, sizes, ["batch", "queries", "keys"], hint="; a mask [batch, keys] is given as mask=")
    return mask[(None,) * (4 - mask.shape.rank)]


def seen_elements(name: str, mask: Any, sizes: dict[str, Any], dim: str, found_sizes: dict[str, Size]) -> Any:
    """Converts a mask of the elements of a sequence, `[batch, dim]`, which is false at padding.

    Args:
        mask: bool or numbers 0 and 1, true or 1 where there is an element.
        dim: "queries" or "keys".
        found_sizes: `batch` and `dim`, which may be scalar tensors. Then the graph checks the mask when it runs, see
            `checked_shape`.

    Returns:
        bool `[1, batch, 1, keys]` for "keys", `[1, batch, queries, 1]` for "queries".
    """
    mask = as_bool(name, mask)
    if mask.shape.rank is None:  # the graph checks the shape when it runs
        mask = tf.ensure_shape(mask, [sizes.get("batch"), sizes.get(dim)])
    if not mask.shape.is_compatible_with([sizes.get("batch"), sizes.get(dim)]):
        raise tensor_error(name, mask, f"{described('', ['batch', dim], sizes)}, true where there is an element")
    mask = checked_shape(name, mask, {"batch": found_sizes["batch"], dim: found_sizes[dim]})
    return mask[None, :, None] if dim == "keys" else mask[None, :, :, None]


def seen_of_mask(name: str, mask: Any, sizes: dict[str, Any], found_sizes: dict[str, Size]) -> Any:
    """Converts the argument `mask` of a layer of the vanilla Transformer, a name that Keras and the articles share.

    Args:
        mask: bool or integers `[batch, keys]`; bool `[batch, queries, keys]`; or bool or numbers of four dimensions, as
            in `seen_by_heads`.
        found_sizes: see `seen_elements`.

    Returns:
        bool that broadcasts to `[num_heads, batch, queries, keys]`, true where a query sees a key.

    Raises:
        ParameterError: also if the two conventions read the numbers of the mask differently.
    """
    mask = as_mask(name, mask)
    rank = mask.shape.rank
    dtype = mask.dtype
    if rank == 4:
        return seen_by_heads(name, mask, sizes)
    if rank == 3 and dtype.is_bool:
        check_broadcasts(name, mask, sizes, ["batch", "queries", "keys"])
        return mask[None]
    has_shape_of_elements = mask.shape.is_compatible_with([sizes.get("batch"), sizes.get("keys")])
    if has_shape_of_elements and (dtype.is_bool or dtype.is_integer):
        return seen_elements(name, mask, sizes, "keys", found_sizes)
    shapes = [described("", dims, sizes) for dims in (["batch", "keys"], ["batch", "queries", "keys"])]
    allowed = f"bool {shapes[0]} or {shapes[1]}, true where a key is seen"
    message = f"{name} must be {allowed}, got {shown(mask)}"
    if not dtype.is_bool:
        message += (
            ": Keras's masks are 1 where a key is seen, the articles' where it is forbidden. Cast a mask of Keras's "
            "kind to bool, and give one of the articles' kind four dimensions"
        )
    raise ParameterError(name, mask, allowed, message)
