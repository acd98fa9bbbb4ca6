"""Keeps weights and parts frozen in `.keras` files.

Keras stores `trainable` only of layers that are in its configurations, so not of single weights and of the parts that a
constructor makes. The library's layers and models store it in their build configurations. Keras reads these only for
layers that their constructor does not build, so compiled models also store it with the arguments of `compile`.
"""

from typing import Any


def frozen_in(layer: Any) -> dict[str, list[bool]]:
    """Whether each of a layer's `"parts"` (the layer itself, its parts and theirs) and `"weights"` is trainable."""
    return {
        "parts": [part.trainable for part in layer._flatten_layers()],
        "weights": [weight.trainable for weight in layer.weights],
    }


def freeze(layer: Any, frozen: Any) -> None:
    """Freezes what was `frozen_in` another layer with the same parts. `None` changes nothing.

    Before a layer is built, it may have fewer weights: then only parts are frozen, and their weights follow. It may
    have fewer parts, too, if it is tied to an embedding that it does not know yet.
    """
    parts = list(layer._flatten_layers())
    if isinstance(frozen, list):  # indices of frozen parts, in files of older versions
        frozen = {"parts": [i not in frozen for i in range(len(parts))]}
    for name, values in (("parts", parts), ("weights", layer.weights)):  # a part changes its own parts and weights
        trainable = (frozen or {}).get(name, ())
        if len(trainable) == len(values):
            for value, is_trainable in zip(values, trainable, strict=True):
                value.trainable = is_trainable


def with_frozen(config: dict[str, Any] | None, layer: Any) -> dict[str, Any] | None:
    """A build configuration with what is frozen in the layer, if anything is. `None` for a layer that is not built."""
    if config is None or all(weight.trainable for weight in layer.weights):
        return config
    return {**config, "frozen": frozen_in(layer)}
