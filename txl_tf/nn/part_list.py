"""Lists of layers that are attributes of a layer, such as the `decoder_layers` of a network.

Keras does not notice that an item of such a list is replaced. The new layer would compute, but would neither be trained
nor saved, and compiled graphs would keep the old one. So a constructor may change a list, and after that no one.
"""

import weakref
from collections.abc import Callable
from typing import Any

import keras

from txl_tf.errors import FixedAttributeError
from txl_tf.nn.parts import in_constructor, unlocked


def _class_of_lists() -> Any:
    """The class of the lists that Keras makes of those in a layer's attributes."""
    layer: Any = keras.layers.Layer()
    layer.items = []
    return type(layer.items)


KerasList: Any = _class_of_lists()


def _guarded(method: str) -> Callable[..., Any]:
    """A method of lists that changes the list, for `PartList`."""

    def change(self: Any, *args: Any, **kwargs: Any) -> Any:
        layer = self.owner()
        if layer is not None and not in_constructor(layer):
            name = f"{self.name} of {layer.name}"
            message = (
                f"{name} cannot change, because graphs and files would not notice. Change it in the constructor of a "
                f"subclass of {type(layer).__name__}. Or replace a part of a layer in it, or its __class__"
            )
            raise FixedAttributeError(self.name, "another list", "the list that the constructor made", message)
        result = getattr(KerasList, method)(self, *args, **kwargs)
        if layer is not None:
            _track_items(layer, self)
        return result

    return change


class PartList(KerasList):
    """A list of layers that changes only in a constructor of its owner, and then with Keras's list of all parts.

    Attributes:
        name: the attribute of the owner that is this list.
        owner: weak reference to the layer.
    """

    name: str
    owner: Callable[[], Any]

    __setitem__, __delitem__, __iadd__, __imul__ = map(_guarded, ("__setitem__", "__delitem__", "__iadd__", "__imul__"))
    append, insert, extend, remove = map(_guarded, ("append", "insert", "extend", "remove"))
    pop, clear, sort, reverse = map(_guarded, ("pop", "clear", "sort", "reverse"))

    def __reduce__(self) -> Any:
        """A copy has no owner, so it is a list of Keras."""
        return KerasList, (list(self),)


def guard_lists(layer: Any) -> None:
    """Makes a `PartList` of each list of layers in the attributes of `layer`."""
    for name, value in vars(layer).items():
        if type(value) is KerasList and any(isinstance(part, keras.Layer) for part in value):
            value.__class__ = PartList
            value.name, value.owner = name, weakref.ref(layer)


def _track_items(layer: Any, parts: Any) -> None:
    """Has Keras track the items of a list that it does not, in the places of those that no attribute holds any more."""
    tracked = layer._tracker.config["layers"][1]
    new = [part for part in parts if not any(part is other for other in tracked)]
    attributes = [value for name, value in vars(layer).items() if name != "_layers"]  # Keras's list of all parts
    held = keras.tree.flatten([list(value) if isinstance(value, list) else value for value in attributes])
    old = [part for part in tracked if not any(part is other for other in held)]
    with unlocked(layer):
        for i, part in enumerate(new):
            place = tracked.index(old[i]) if i < len(old) else len(tracked)
            vars(part).setdefault("_owner", weakref.ref(layer))  # see `Settings`
            layer._tracker.track(part)
            tracked.insert(place, tracked.pop())
        for part in old:
            layer._tracker.untrack(part)
