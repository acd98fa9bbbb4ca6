"""What a `.keras` file keeps of `compile`, so that a loaded model trains on."""

from __future__ import annotations

from typing import Any

import keras

_OF_KERAS = "optimizer run_eagerly steps_per_execution jit_compile auto_scale_loss"


class Compiled:
    """Mixin for Keras models with a `compile` of their own, which sets `auto_scale_loss`.

    A saved model has what `compile` was given and the optimizer's state; loaded, it goes on training as if it had never
    been saved.
    """

    @property
    def has_all_weights(self) -> bool:
        """Whether all weights exist, so that the optimizer can have its own."""
        return True

    def compile_arguments(self) -> dict[str, Any]:
        """What `compile` would be given to make of another model one like this."""
        return {name: getattr(self, name) for name in _OF_KERAS.split()}

    def get_compile_config(self) -> dict[str, Any] | None:
        return keras.saving.serialize_keras_object(self.compile_arguments()) if self.compiled else None

    def compile_from_config(self, config: dict[str, Any]) -> None:
        self.compile(**keras.saving.deserialize_keras_object(config))
        self.build_optimizer()

    def build_optimizer(self) -> None:
        """Makes the variables of the optimizer, if those of the model exist: a step that fails would leave a part."""
        optimizer = getattr(self, "optimizer", None)
        if optimizer is not None and not optimizer.built and self.has_all_weights:
            with self.distribute_strategy.scope():  # within a step, some strategies could not
                optimizer.build(self.trainable_variables)
