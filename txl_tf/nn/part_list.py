"""Lists of layers that are attributes of a layer, such as the `decoder_layers` of a network.

Keras does not notice that an item of such a list is replaced. The new layer would compute, but would neither be trained
nor saved, and compiled graphs would keep the old one. So a constructor may change a list, and after that no one.
"""

import weakref
from collections.abc import Callable
from typing import Any

import keras

from txl_tf.errors import FixedAttributeError
from txl_tf.nn.parts import build_like, in_constructor, unlocked


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
        if layer is not None:
            _check_in_constructor(layer, self.name)
        result = getattr(KerasList, method)(self, *args, **kwargs)
        if layer is not None:
            _track_items(layer, self)
        return result

    return change


def _check_in_constructor(layer: Any, name: str) -> None:
    """Raises FixedAttributeError unless a constructor of `layer`, or of a model that it is a part of, is running."""
    owner = layer
    while owner is not None:
        if in_constructor(owner):
            return
        owner = vars(owner).get("_owner", lambda: None)()
    message = (
        f"{name} of {layer.name} cannot change, because graphs and files would not notice. Change it in the "
        f"constructor of a subclass of the model. Or replace a part of a layer in it, or its __class__"
    )
    raise FixedAttributeError(name, "another list", "the list that the constructor made", message)


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


def replace_list(layer: Any, name: str, value: Any, store: Callable[[str, Any], None]) -> None:
    """Sets an attribute that is a `PartList` to another list, in a constructor, see `_check_in_constructor`."""
    if value is vars(layer)[name]:
        return
    _check_in_constructor(layer, name)
    with unlocked(layer):
        store(name, value)
    guard_lists(layer)
    _track_items(layer, value)


def _track_items(layer: Any, parts: Any) -> None:
    """Has Keras track the items of a list, in the places of those that no attribute holds any more, and builds them."""
    tracked = layer._tracker.config["layers"][1]
    attributes = [value for name, value in vars(layer).items() if name != "_layers"]  # Keras's list of all parts
    held = keras.tree.flatten([list(value) if isinstance(value, list) else value for value in attributes])
    old = [part for part in tracked if not any(part is other for other in held)]
    new = [part for part in parts if not any(part is other for other in tracked) or "_owner" not in vars(part)]
    with unlocked(layer):
        for i, part in enumerate(new):
            vars(part).setdefault("_owner", weakref.ref(layer))  # see `Settings`
            layer._tracker.untrack(part)
            place = tracked.index(old[i]) if i < len(old) else len(tracked)
            layer._tracker.track(part)
            tracked.insert(place, tracked.pop())
            if i < len(old):
                build_like(old[i], part)
        for part in old:
            layer._tracker.untrack(part)
