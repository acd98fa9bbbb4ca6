"""Base classes of mixins, for type checkers only.

A mixin uses methods of the Keras class that it is mixed into, so a type checker must take it for a subclass of that
class. At run time it derives from `object`. So the order of methods is the order of the bases that a class writes down.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import keras

    MixedIntoLayer = keras.layers.Layer
    MixedIntoModel = keras.Model
else:
    MixedIntoLayer = MixedIntoModel = object
