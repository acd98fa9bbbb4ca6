"""Keras's `quantize` is not supported: an error or a warning says so.

Cached inference and the fused products read the kernels directly, so weights of 8 bits would not work. Weights in
bfloat16 make a smaller model.
"""

import inspect
import math
import re
import warnings
from collections.abc import Sequence
from typing import Any

import keras

from txl_tf.errors import UnsupportedError
from txl_tf.nn.bases import MixedIntoLayer


class Unquantized(MixedIntoLayer):
    """Mixin of layers and models whose weights Keras cannot quantize.

    Attributes:
        smaller: how to get a smaller model, for messages.
    """

    smaller: str = 'dtype="bfloat16" in the constructor makes weights of half the size'

    def quantize(self, mode: Any = None, type_check: bool = True, config: Any = None, filters: Any = None) -> None:
        """Raises UnsupportedError, which says how to get a smaller model.

        `keras.Model.quantize` calls this method of every layer in a model. Keras quantizes its own layers, and those of
        the library keep their weights. From version 3.16, Keras lists the layers that raise in its report. In older
        versions, the first of this library's layers warns instead of raising, once for all of them.
        """
        call = None if isinstance(self, keras.Model) else _call_of_model()
        if call is None:
            message = (
                f"quantize({mode!r}) is not supported: {type(self).__name__} computes with its weights as they are. "
                f"Use instead: {self.smaller}"
            )
            raise UnsupportedError("quantize", mode, self.smaller, message)
        model, filters = call
        # The layers without parts, whose method `keras.Model.quantize` calls, in its order.
        leaves = [layer for layer in model._flatten_layers() if len(layer._flatten_layers()) == 1]
        layers = [layer for layer in leaves if _is_chosen(layer, filters)]
        if self is next(layer for layer in layers if isinstance(layer, Unquantized)):
            warnings.warn(_report(mode, model, layers), stacklevel=5)  # shows the line that calls `model.quantize`


def _call_of_model() -> tuple[Any, Any] | None:
    """`(model, filters)` if a `keras.Model.quantize` that makes no report is running, else `None`.

    Keras passes neither the model nor the filters to a layer. Without them, each layer could only warn for itself, and
    no message could say how much of the model is quantized. So the function looks for the call of the model among the
    callers.
    """
    code = inspect.unwrap(keras.Model.quantize).__code__
    calls = [caller.frame.f_locals for caller in inspect.stack(context=0) if caller.frame.f_code is code]
    if not calls or "report" in code.co_varnames:
        return None
    return calls[0]["self"], calls[0].get("filters")  # older versions of Keras have no filters


def _is_chosen(layer: Any, filters: Any) -> bool:
    """Whether the `filters` of `keras.Model.quantize` let a layer through."""
    if callable(filters):
        return bool(filters(layer))
    patterns = [filters] if isinstance(filters, str) else filters
    return patterns is None or any(re.search(pattern, layer.name) for pattern in patterns)


def _report(mode: Any, model: Any, leaves: Sequence[Any]) -> str:
    """The warning: how much of a model Keras can quantize, and which of its layers keep their weights.

    Args:
        mode: argument of `quantize`.
        model: the model whose `quantize` was called.
        leaves: the layers whose `quantize` Keras calls.
    """
    weights = {id(weight): weight for layer in leaves if _can_quantize(layer) for weight in layer.weights}
    kernels = [weight for weight in weights.values() if len(weight.shape) > 1]  # Keras leaves biases as they are
    count = sum(math.prod(kernel.shape) for kernel in kernels)
    total = model.count_params()
    ours = [layer for layer in model.layers if isinstance(layer, Unquantized)] or model._flatten_layers()
    kinds = sorted({type(layer).__name__ for layer in ours if isinstance(layer, Unquantized)})
    quantizable_share = f"at most {count:,} of the {total:,} weights of {model.name}, {count / total:.1%}"
    unchanged = f"The weights of {', '.join(kinds)} do not change. For a smaller model: {Unquantized.smaller}"
    return f"quantize({mode!r}) quantizes {quantizable_share}. {unchanged}"


def _can_quantize(layer: Any) -> bool:
    """Whether Keras can quantize the weights of a layer."""
    return not isinstance(layer, Unquantized) and type(layer).quantize is not keras.layers.Layer.quantize
