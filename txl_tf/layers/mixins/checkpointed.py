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
        self._show(name, value)  # at once: a checkpoint restored before `build` waits for the parts to come

    def _trackable_children(self, save_type="checkpoint", **kwargs):
        for name, value in list(vars(self).items()):  # lists may have grown
            self._show(name, value)
        others = [part for part in self._flatten_layers(False, False) if not isinstance(part, Checkpointed)]
        for i, part in enumerate(others):  # a network of the user's, a layer of Keras: they do not show all of theirs
            self._show(f"others-{i}", part.variables)
        return super()._trackable_children(save_type, **kwargs)

    def _show(self, name, value):
        if not name.startswith("_"):
            for path, part in parts_in(value):
                self.show("-".join(map(str, (name, *path))), part)

    def show(self, name, part):
        """Makes a layer or variable visible to TensorFlow, and not to Keras."""
        if self.checkpointed is None:
            self.checkpointed = tf.Module()
        if getattr(self.checkpointed, name, None) is not part:
            setattr(self.checkpointed, name, part)


def parts_in(value):
    """`[(path, part)]` of the layers and variables in an attribute's value which TensorFlow does not see."""
    if isinstance(value, keras.random.SeedGenerator):
        return [((), value.state)]
    if not isinstance(value, (list, tuple, dict)):
        return []
    found = keras.tree.flatten_with_path(value)
    return [(path, part) for path, part in found if isinstance(part, (keras.Layer, keras.Variable))]
