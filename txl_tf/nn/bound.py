"""Weights that are read and cast once, before a loop, for layers that are called within it.

weights = [(layer, layer.computed_weights()) for layer in layers]
with bound(weights):        # in the body of the loop
    model(x)                # the layers compute with these tensors
"""

import contextlib
import contextvars

_bound = contextvars.ContextVar("bound", default=())


@contextlib.contextmanager
def bound(weights):
    """Layers compute with these weights in this block.

    Args:
        weights: list of `(layer, weights)`, the weights as the layer's `computed_weights` returns them.
    """
    token = _bound.set((*weights, *_bound.get()))
    try:
        yield
    finally:
        _bound.reset(token)


def bound_weights(layer):
    """The weights that are bound to a layer, or `None`."""
    return next((weights for other, weights in _bound.get() if other is layer), None)
