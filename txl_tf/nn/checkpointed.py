"""What `tf.train.Checkpoint` and SavedModels see of layers and models: all weights, and the states of seed generators.

TensorFlow follows attributes from object to object. Of the attributes of a Keras object it sees layers and variables,
but not those in lists, tuples and dictionaries, and not the variable of a seed generator.
"""

import keras
import tensorflow as tf


class Checkpointed:
    """Mixin of layers and models that shows TensorFlow what they have in lists. It comes before the Keras class.

    Attributes:
        checkpointed: `tf.Module` whose attributes are these parts, `"decoder_layers-0"` for `decoder_layers[0]`.
            TensorFlow follows it; Keras takes no notice, so that weights and files of Keras stay as they are. `None`
            where there are no such parts.
    """

    checkpointed = None

    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        for key, part in named_parts(name, value).items():  # at once: a checkpoint restored before `build` waits for it
            self.show(key, part)

    def _trackable_children(self, save_type="checkpoint", **kwargs):
        parts = {}
        for name, value in vars(self).items():  # lists may have grown
            parts |= named_parts(name, value)
        others = self._flatten_layers(include_self=False, recursive=False)
        others = [part for part in others if not isinstance(part, Checkpointed)]
        for i, part in enumerate(
            others
        ):  # a network of the user, a layer of Keras: they do not show all that they have
            parts |= named_parts(f"others-{i}", part.variables)
        for key, part in parts.items():
            self.show(key, part)
        return super()._trackable_children(save_type, **kwargs)

    def show(self, name, part):
        """Makes a layer or variable visible to TensorFlow, and not to Keras."""
        if self.checkpointed is None:
            self.checkpointed = tf.Module()
        if getattr(self.checkpointed, name, None) is not part:
            setattr(self.checkpointed, name, part)


def named_parts(name, value):
    """`{"name-0": part}` of the layers and variables in an attribute's value that TensorFlow does not see."""
    if name.startswith("_"):
        return {}
    if isinstance(value, keras.random.SeedGenerator):
        return {name: value.state}
    if not isinstance(value, (list, tuple, dict)):
        return {}
    found = keras.tree.flatten_with_path(value)
    parts = {"-".join(map(str, (name, *path))): part for path, part in found}
    return {key: part for key, part in parts.items() if isinstance(part, (keras.Layer, keras.Variable))}
