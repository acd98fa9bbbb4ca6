"""Keeps weights and parts frozen in `.keras` files.

Keras stores `trainable` only of layers that are in its configurations, so not of single weights and of the parts that a
constructor makes. The library's layers and models store it in their build configurations. Keras reads these only for
layers that their constructor does not build, so compiled models also store it with the arguments of `compile`.
"""

from typing import Any


def frozen_in(layer: Any) -> dict[str, Any]:
    """What is frozen in a layer.

    Returns:
        `"parts"`: the indices of the frozen layers, among the layer itself and all of its parts; `"trainable_weights"`:
        for each weight, whether it is trainable.
    """
    return {
        "parts": [i for i, part in enumerate(layer._flatten_layers()) if not part.trainable],
        "trainable_weights": [weight.trainable for weight in layer.weights],
    }


def freeze(layer: Any, frozen: Any) -> None:
    """Freezes what was `frozen_in` another layer with the same parts. `None` changes nothing.

    Before a layer is built, only its parts can be frozen; their weights follow.
    """
    frozen = {"parts": frozen} if isinstance(frozen, list) else frozen or {}  # a list in files of older versions
    parts = list(layer._flatten_layers())
    for i in frozen.get("parts", ()):
        parts[i].trainable = False
    trainable = frozen.get("trainable_weights", ())
    if len(trainable) == len(layer.weights):
        for weight, value in zip(layer.weights, trainable, strict=True):
            weight.trainable = value


def with_frozen(config: dict[str, Any] | None, layer: Any) -> dict[str, Any] | None:
    """A build configuration with what is frozen in the layer, if anything is. `None` for a layer that is not built."""
    if config is None or all(weight.trainable for weight in layer.weights):
        return config
    return {**config, "frozen": frozen_in(layer)}
