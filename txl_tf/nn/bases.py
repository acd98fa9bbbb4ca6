"""The base classes that mixins have for type checkers alone.

A mixin uses methods of the Keras class that it is mixed into. At run time it derives from `object`, so that methods are
found in the order that the classes write down.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import keras

    MixedIntoLayer = keras.layers.Layer
    MixedIntoModel = keras.Model
else:
    MixedIntoLayer = MixedIntoModel = object
