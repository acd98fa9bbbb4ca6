"""Masks as callers give them, and the one form in which layers compute: bool, true where a query sees a key.

    argument                                        numbers are 1 where         bool is true where
    mask of [batch, keys], padding_mask,
    query_mask, value_mask, key_mask                there is an element         there is an element
    mask of [batch, queries, keys]                  refused: ambiguous          a key is seen
    attention_mask                                  a key is seen               a key is seen
    mask and padding_mask of four dimensions,
    look_ahead_mask, attn_mask                      a key is forbidden          a key is seen
    forbidden                                       a key is forbidden          a key is forbidden

The first three rows are Keras's convention, the others that of the articles (docs/articles.md). Numbers are 0 or 1.
Eager calls raise an error for other numbers, graphs do not look at them.
"""

import numpy as np
import tensorflow as tf

from txl_tf.errors import ParameterError
from txl_tf.nn.base import described, shown, tensor_error

HEADS_FIRST = [1, 0, 2, 3]  # from [batch, heads, queries, keys], as callers have it, to the layout of `attend`


def mask_of(x):
    """The mask that Keras's layers pass on with a tensor, or `None`."""
    return getattr(x, "_keras_mask", None)


def mask_of_call(x, mask):
    """The mask that a call is given or, without one, that Keras passed on with `x`, as bool; `None` without either."""
    mask = mask_of(x) if mask is None else mask
    return None if mask is None else as_bool("mask", mask)


def as_bool(name, mask):
    """A mask of bool or of numbers 0 and 1, true where there is something, as bool.

    Raises:
        ParameterError: the mask is neither.
    """
    return tf.cast(checked_numbers(name, mask), tf.bool)


def checked_numbers(name, mask):
    """A mask as a tensor. Raises ParameterError unless it is bool or, where an eager call can look, all 0 and 1."""
    mask = tf.convert_to_tensor(mask)
    allowed = "a mask of bool or of numbers 0 and 1"
    if not (mask.dtype.is_bool or mask.dtype.is_integer or mask.dtype.is_floating):
        raise tensor_error(name, mask, allowed)
    if tf.executing_eagerly() and not mask.dtype.is_bool:
        numbers = np.asarray(mask)
        others = numbers[(numbers != 0) & (numbers != 1)]
        if others.size:
            message = f"{name} must be {allowed}, got {shown(mask)} with the number {others.flat[0]}"
            raise ParameterError(name, mask, allowed, message)
    return mask


def check_broadcasts(name, mask, sizes, dims, hint=""):
    """Raises ParameterError unless the shape of a mask of two or more dimensions broadcasts to the last of `dims`.

    Args:
        name: of the argument, for the error.
        mask: a tensor.
        sizes: see `check_tensors`.
        dims: names of the dimensions.
        hint: what follows in the message.
    """
    whole = [sizes.get(dim) for dim in dims[-mask.shape.rank :]]
    known = len(whole) == mask.shape.rank > 1 and zip(mask.shape, whole, strict=True)
    if not known or any(None not in (size, other) and size not in (1, other) for size, other in known):
        allowed = f"of a shape that broadcasts to {described('', dims, sizes)}"
        message = f"{name} must broadcast to {described('', dims, sizes)}, got {shown(mask)}{hint}"
        raise ParameterError(name, mask, allowed, message)


def seen_by_article(name, mask, sizes, dims):
    """Which keys an article's mask leaves visible: numbers are 1 where forbidden, bool is true where seen.

    Args: as of `check_broadcasts`.

    Returns:
        bool, of the mask's shape.

    Raises:
        ParameterError: the mask does not broadcast, or has other numbers than 0 and 1.
    """
    mask = checked_numbers(name, mask)
    if mask.shape.rank is not None:
        check_broadcasts(name, mask, sizes, dims)
    return seen(mask)


def seen(mask):
    """`seen_by_article` without its checks."""
    mask = tf.convert_to_tensor(mask)
    return mask if mask.dtype.is_bool else mask == 0


def seen_by_heads(name, mask, sizes):
    """`seen_by_article` of a mask that broadcasts to `[batch, num_heads, queries, keys]`, as `attend` takes it.

    Returns:
        bool that broadcasts to `[num_heads, batch, queries, keys]`.
    """
    visible = seen_by_article(name, mask, sizes, ["batch", "num_heads", "queries", "keys"])
    return tf.transpose(visible[(None,) * (4 - visible.shape.rank)], HEADS_FIRST)


def seen_by_keras(name, mask, sizes):
    """Which keys a mask as Keras has it, true or 1 where a key is seen, leaves visible.

    Args:
        name: of the argument, for the errors.
        mask: `[queries, keys]`, `[batch, queries, keys]` or `[batch, num_heads, queries, keys]`; a dimension may be 1.
        sizes: see `check_tensors`.

    Returns:
        bool that broadcasts to `[num_heads, batch, queries, keys]`.

    Raises:
        ParameterError: the mask has another shape, or other numbers than 0 and 1.
    """
    mask = as_bool(name, mask)
    if mask.shape.rank == 4:
        check_broadcasts(name, mask, sizes, ["batch", "num_heads", "queries", "keys"])
        return tf.transpose(mask, HEADS_FIRST)
    check_broadcasts(name, mask, sizes, ["batch", "queries", "keys"], hint="; a mask [batch, keys] is given as mask=")
    return mask[(None,) * (4 - mask.shape.rank)]


def seen_elements(name, mask, sizes, dim):
    """Which elements of a sequence there are, by a mask `[batch, dim]`: bool `[1, batch, 1, keys]`, or queries first.

    Args:
        name: of the argument, for the errors.
        mask: bool or numbers 0 and 1, true or 1 where there is an element.
        sizes: see `check_tensors`.
        dim: "queries" or "keys".

    Raises:
        ParameterError: the mask has another shape, or other numbers than 0 and 1.
    """
    mask = as_bool(name, mask)
    if not mask.shape.is_compatible_with([sizes.get("batch"), sizes.get(dim)]):
        raise tensor_error(name, mask, f"{described('', ['batch', dim], sizes)}, true where there is an element")
    return mask[None, :, None] if dim == "keys" else mask[None, :, :, None]


def seen_of_mask(name, mask, sizes):
    """Which keys `mask` of a vanilla layer leaves visible, a name that Keras and the articles both have.

    Args:
        name: of the argument, for the errors.
        mask: see the table above.
        sizes: see `check_tensors`.

    Returns:
        bool that broadcasts to `[num_heads, batch, queries, keys]`.

    Raises:
        ParameterError: the mask has another shape, or says in numbers what both conventions read differently.
    """
    mask = tf.convert_to_tensor(mask)
    rank, dtype = mask.shape.rank, mask.dtype
    if rank == 4:
        return seen_by_heads(name, mask, sizes)
    if rank == 3 and dtype.is_bool:
        check_broadcasts(name, mask, sizes, ["batch", "queries", "keys"])
        return mask[None]
    of_elements = mask.shape.is_compatible_with([sizes.get("batch"), sizes.get("keys")])
    if of_elements and (dtype.is_bool or dtype.is_integer):
        return seen_elements(name, mask, sizes, "keys")
    shapes = [described("", dims, sizes) for dims in (["batch", "keys"], ["batch", "queries", "keys"])]
    allowed = f"bool {shapes[0]} or {shapes[1]}, true where a key is seen"
    message = f"{name} must be {allowed}, got {shown(mask)}"
    if not dtype.is_bool:
        message += (
            ": Keras's masks are 1 where a key is seen, the articles' where it is forbidden. Cast a mask of Keras's "
            "kind to bool, and give one of the articles' kind four dimensions"
        )
    raise ParameterError(name, mask, allowed, message)
