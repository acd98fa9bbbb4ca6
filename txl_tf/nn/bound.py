"""Weights that are read and cast once, before a loop, for the layers that are called in the loop.

weights = [(layer, layer.computed_weights()) for layer in layers]
with bound(weights):        # in the body of the loop
    model(x)                # the layers compute with these tensors
"""

import contextlib
import contextvars
from collections.abc import Generator, Iterable
from typing import Any

_bound: contextvars.ContextVar[tuple[tuple[Any, Any], ...]] = contextvars.ContextVar("bound", default=())


@contextlib.contextmanager
def bound(weights: Iterable[tuple[Any, Any]]) -> Generator[None, None, None]:
    """In this block, layers that call `bound_weights` compute with these weights.

    Args:
        weights: `(layer, weights)` for some layers, with the result of the layer's `computed_weights`. They come before
            the weights that an outer block binds to the same layer.
    """
    token = _bound.set((*weights, *_bound.get()))
    try:
        yield
    finally:
        _bound.reset(token)


def bound_weights(layer: Any) -> Any:
    """The weights that are bound to a layer, or `None`."""
    return next((weights for other, weights in _bound.get() if other is layer), None)
