"""Shows `tf.train.Checkpoint` and SavedModels all weights of layers and models, and the states of seed generators.

TensorFlow follows the attributes of an object to other objects. It sees the layers and variables that are attributes of
a Keras object, but not those in lists, tuples and dictionaries, and not the variable of a seed generator.
"""

from typing import Any

import keras
import tensorflow as tf

from txl_tf.nn.bases import MixedIntoLayer


class Checkpointed(MixedIntoLayer):
    """Mixin of layers and models that shows TensorFlow the parts in their lists. It comes before the Keras class.

    Attributes:
        checkpointed: `tf.Module` with these parts as attributes, such as `"decoder_layers-0"` for `decoder_layers[0]`.
            TensorFlow follows it. Keras ignores it, so Keras's list of weights and its files do not change. `None` if
            there are no such parts.
    """

    checkpointed: Any = None

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        # Show the parts at once. A checkpoint that was restored before `build` is waiting for them.
        for key, part in named_parts(name, value).items():
            self.show(key, part)

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> Any:
        """TensorFlow's method: the parts that a checkpoint contains, with those that TensorFlow does not see itself."""
        parts: dict[str, Any] = {}
        for name, value in vars(self).items():  # lists may have grown since they were set
            parts |= named_parts(name, value)
        other_parts = self._flatten_layers(include_self=False, recursive=False)
        other_parts = [part for part in other_parts if not isinstance(part, Checkpointed)]
        for i, part in enumerate(other_parts):
            # A user's network or a layer of Keras does not show the parts in its lists.
            parts |= named_parts(f"others-{i}", part.variables)
        for key, part in parts.items():
            self.show(key, part)
        return super()._trackable_children(save_type, **kwargs)

    def show(self, name: str, part: Any) -> None:
        """Makes a layer or variable visible to TensorFlow, but not to Keras."""
        if self.checkpointed is None:
            self.checkpointed = tf.Module()
        if getattr(self.checkpointed, name, None) is not part:
            setattr(self.checkpointed, name, part)


def named_parts(name: str, value: Any) -> dict[str, Any]:
    """`{"name-0": part}` for the layers and variables in a list, tuple or dictionary that is the attribute `name`.

    For a seed generator, `{name: state}`. For other values and for private attributes, an empty dictionary.
    """
    if name.startswith("_"):
        return {}
    if isinstance(value, keras.random.SeedGenerator):
        return {name: value.state}
    if not isinstance(value, (list, tuple, dict)):
        return {}
    value = list(value) if isinstance(value, list) else value  # Keras does not look into a `PartList`
    paths_and_parts: Any = keras.tree.flatten_with_path(value)
    parts = {"-".join(map(str, (name, *path))): part for path, part in paths_and_parts}
    return {key: part for key, part in parts.items() if isinstance(part, (keras.Layer, keras.Variable))}
