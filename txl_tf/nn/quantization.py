"""Keras's `quantize`: our layers have no weights of 8 bits, and an error or a warning says so.

Cached inference and the fused products read the kernels directly. Weights in bfloat16 make a smaller model.
"""

import inspect
import math
import re
import warnings

import keras


class Unquantized:
    """Mixin of layers and models whose weights Keras cannot quantize.

    Attributes:
        smaller: the way to a smaller model, for messages.
    """

    smaller = 'dtype="bfloat16" in the constructor makes weights of half the size'

    def quantize(self, mode=None, type_check=True, config=None, filters=None):
        """Raises NotImplementedError, which names the way to a smaller model.

        When `keras.Model.quantize` calls this method of the layers in a model, the first of our layers warns instead,
        for all of them: Keras quantizes its own layers, ours stay as they are.
        """
        call = None if isinstance(self, keras.Model) else _call_of_model()
        if call is None:
            raise NotImplementedError(
                f"quantize({mode!r}) would change nothing, {type(self).__name__} reads its weights as they are; use "
                f"instead: {self.smaller}"
            )
        model, filters = call
        asked = [layer for layer in _leaves(model) if _is_chosen(layer, filters)]
        if self is next(layer for layer in asked if isinstance(layer, Unquantized)):
            warnings.warn(_report(mode, model, asked), stacklevel=5)  # the line that calls `model.quantize`


def _call_of_model():
    """`(model, filters)` if `keras.Model.quantize` is running, else `None`.

    Keras gives a layer neither. Without them, each of our layers could only warn by itself, and no message could say
    how much of the model is quantized.
    """
    code, frame = inspect.unwrap(keras.Model.quantize).__code__, inspect.currentframe()
    while frame is not None:
        if frame.f_code is code:
            return frame.f_locals["self"], frame.f_locals.get("filters")  # older versions of Keras have none
        frame = frame.f_back
    return None


def _leaves(model):
    """The layers whose method `keras.Model.quantize` calls, in its order: those without parts."""
    return [layer for layer in model._flatten_layers() if len(layer._flatten_layers()) == 1]


def _is_chosen(layer, filters):
    """Whether the `filters` of `keras.Model.quantize` let a layer through."""
    if callable(filters):
        return filters(layer)
    patterns = [filters] if isinstance(filters, str) else filters
    return patterns is None or any(re.search(pattern, layer.name) for pattern in patterns)


def _report(mode, model, asked):
    """How much of a model Keras can quantize, and which of its layers stay as they are."""
    weights = {id(weight): weight for layer in asked if _can_quantize(layer) for weight in layer.weights}
    kernels = [weight for weight in weights.values() if len(weight.shape) > 1]  # Keras leaves biases as they are
    count, total = sum(math.prod(kernel.shape) for kernel in kernels), model.count_params()
    ours = [layer for layer in model.layers if isinstance(layer, Unquantized)] or model._flatten_layers()
    kinds = sorted({type(layer).__name__ for layer in ours if isinstance(layer, Unquantized)})
    found = f"at most {count:,} of the {total:,} weights of {model.name}, {count / total:.1%}"
    left = f"The weights of {', '.join(kinds)} stay as they are: {Unquantized.smaller}"
    return f"quantize({mode!r}) quantizes {found}. {left}"


def _can_quantize(layer):
    """Whether it is a layer that Keras quantizes."""
    return not isinstance(layer, Unquantized) and type(layer).quantize is not keras.layers.Layer.quantize
