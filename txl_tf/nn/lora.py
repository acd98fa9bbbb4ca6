"""Low-rank updates of kernels (LoRA, Hu et al. 2022): fine-tuning with few weights.

A kernel W `[in, out]` stays as it is. Two small weights A `[in, rank]` and B `[rank, out]` are trained, and the layer
computes with `W + A B * alpha / rank`. B begins with zeros, so the results do not change at first. `merge_lora` adds
the update to W; then the model is an ordinary one again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from txl_tf.config import at_least
from txl_tf.config.checks import POSITIVE
from txl_tf.errors import ParameterError
from txl_tf.nn.bases import MixedIntoLayer
from txl_tf.nn.parts import unlocked
from txl_tf.nn.settings import change_graphs

_ADVICE = "call enable_lora, after merge_lora if there are low-rank updates already"


class LowRank(MixedIntoLayer):
    """Mixin of layers with kernels that may get low-rank updates. It comes before the other base classes.

    A subclass reads these kernels by `kernel`.

    Attributes:
        lora_kernels: names of the kernels.
        lora_enabled: whether they have low-rank updates.
        lora_rank, lora_alpha: the arguments of `enable_lora`.
    """

    fixed_settings = {name: _ADVICE for name in ("lora_kernels", "lora_enabled", "lora_rank", "lora_alpha")}
    lora_kernels: tuple[str, ...] = ()
    lora_enabled = False
    lora_rank: int | None = None
    lora_alpha: float | None = None

    def enable_lora(
        self, rank: int, lora_alpha: float | None = None, a_initializer: Any = "he_uniform",
        b_initializer: Any = "zeros",
    ) -> None:  # fmt: skip
        """Adds low-rank updates to the kernels of the layer, and freezes the kernels, as Keras's Dense does.

        Args:
            rank: rank of the updates, 1 or more.
            lora_alpha: the updates are multiplied by `lora_alpha / rank`. `None`: by 1.
            a_initializer, b_initializer: initializers of A and B.

        Raises:
            ParameterError: an argument is out of its range, the layer is not built, or it has low-rank updates already.
        """
        at_least(1)("rank", rank)
        if lora_alpha is not None:
            POSITIVE("lora_alpha", lora_alpha)
        if not self.built or self.lora_enabled:
            allowed = "a layer that is built" if not self.built else "a layer without low-rank updates"
            raise ParameterError("enable_lora", self.name, allowed, f"enable_lora needs {allowed}: {self.name}")
        change_graphs(self, "lora_rank", rank, None)
        self._add_updates(rank, lora_alpha, a_initializer, b_initializer)

    def restore_lora(self) -> None:
        """Called at the end of `build`: adds the updates that the configuration of the layer describes, if any.

        They are zeros until the values come from a file or from `set_weights`.
        """
        described = self.__dict__.pop("_described_lora", None)
        if described is not None:
            rank, lora_alpha = described
            self._add_updates(rank, lora_alpha, "zeros", "zeros")

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        return {**config, "lora": [self.lora_rank, self.lora_alpha]} if self.lora_enabled else config

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        layer: Any = super().from_config({name: value for name, value in config.items() if name != "lora"})
        if "lora" in config:
            vars(layer)["_described_lora"] = config["lora"]
        return layer

    def _add_updates(self, rank: int, lora_alpha: float | None, a_initializer: Any, b_initializer: Any) -> None:
        """Makes A and B of every kernel, freezes the kernels, and sets the attributes."""
        with unlocked(self):
            for name in self.lora_kernels:
                kernel = getattr(self, name)
                n_in, n_out = kernel.shape
                parts = (("a", (n_in, rank), a_initializer), ("b", (rank, n_out), b_initializer))
                for part, shape, part_initializer in parts:
                    initializer: Any = keras.initializers.get(part_initializer)
                    weight = self.add_weight(name=f"{name}_lora_{part}", shape=shape, initializer=initializer)
                    setattr(self, f"{name}_lora_{part}", weight)
                kernel.trainable = False
        self._set_lora(True, int(rank), float(rank if lora_alpha is None else lora_alpha))

    def _set_lora(self, lora_enabled: bool, lora_rank: int | None, lora_alpha: float | None) -> None:
        """Sets the attributes, which are fixed for all other code."""
        layer: Any = self
        layer.store("lora_enabled", lora_enabled)
        layer.store("lora_rank", lora_rank)
        layer.store("lora_alpha", lora_alpha)

    def merge_lora(self) -> None:
        """Adds the low-rank updates to the kernels, and makes the kernels trainable again.

        Does nothing if there are no updates.
        """
        if not self.lora_enabled:
            return
        change_graphs(self, "lora_rank", None, self.lora_rank)
        for name in self.lora_kernels:
            kernel = getattr(self, name)
            kernel.assign(LowRank.kernel(self, name))  # a user's `kernel` changes the sum, also after this
            kernel.trainable = True
            for part in ("a", "b"):
                delattr(self, f"{name}_lora_{part}")
        self._set_lora(False, None, None)

    def kernel(self, name: str) -> Any:
        """A kernel plus its low-rank update, if there is one. The layer computes with this sum."""
        kernel = getattr(self, name)
        if not self.lora_enabled:
            return kernel
        a, b = (tf.convert_to_tensor(getattr(self, f"{name}_lora_{part}")) for part in ("a", "b"))
        scale = (self.lora_alpha or 0.0) / (self.lora_rank or 1)
        update: Any = tf.matmul(a, b) * scale
        return tf.convert_to_tensor(kernel) + tf.cast(update, tf.convert_to_tensor(kernel).dtype)


def low_rank_parts(layers: Iterable[Any]) -> list[Any]:
    """All parts of these layers that may have low-rank updates."""
    return [part for layer in layers for part in layer._flatten_layers() if isinstance(part, LowRank)]


def is_low_rank(weight: Any) -> bool:
    """Whether a weight is the A or the B of a low-rank update."""
    return weight.name.endswith(("_lora_a", "_lora_b"))


def freeze_others(model: Any) -> None:
    """Freezes all weights of a model that are not part of low-rank updates. `thaw` undoes it."""
    frozen = [weight for weight in model.trainable_variables if not is_low_rank(weight)]
    for weight in frozen:
        weight.trainable = False
    vars(model).setdefault("_frozen_by_lora", []).extend(frozen)  # by `vars`, so that Keras does not track the list


def thaw(model: Any) -> None:
    """Makes the weights that `freeze_others` froze trainable again."""
    for weight in vars(model).pop("_frozen_by_lora", []):
        weight.trainable = True
