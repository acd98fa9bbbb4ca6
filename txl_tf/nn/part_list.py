"""Lists that are attributes of a layer: of layers, such as the `decoder_layers` of a network, and of plain values.

Keras does not notice that an item of such a list is replaced. The new layer would compute, but would neither be trained
nor saved, and compiled graphs would keep the old one. So a constructor may change a list, and after that no one.
A list of plain values, such as the `labels` of a tagger, would also change without any effect on the rest of the layer.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras

from txl_tf.errors import FixedAttributeError
from txl_tf.nn.parts import as_list, build_like, in_constructor, keras_layer, owner_of, release, unlocked


def _class_of_lists() -> Any:
    """The class of the lists that Keras makes of those in a layer's attributes."""
    layer: Any = keras_layer()
    layer.items = []
    return type(layer.items)


KerasList: Any = _class_of_lists()


class PartList(KerasList):
    """A list of layers that changes only in a constructor of its owner, and then with Keras's list of all parts.

    Attributes:
        name: the attribute of the owner that is this list.
        owner: weak reference to the layer.
    """

    name: str
    owner: Callable[[], Any]

    def __reduce__(self) -> Any:
        """A copy has no owner, so it is a list of Keras."""
        return KerasList, (list(self),)


def _guarded(method: str) -> Callable[..., Any]:
    """A method of `PartList` that changes the list."""

    def change(self: Any, *args: Any, **kwargs: Any) -> Any:
        layer, before = self.owner(), list(self)
        if layer is not None:
            _check_in_constructor(layer, self.name)
        result = getattr(KerasList, method)(self, *args, **kwargs)
        if layer is not None:
            _replace_parts(layer, before, self)
        return result

    return change


class FixedList(KerasList):
    """A list of plain values that is a setting. It does not change; only another list may take its place.

    Attributes:
        name: the setting.
    """

    name: str

    def __reduce__(self) -> Any:
        """A copy may change, so it is a list of Keras."""
        return KerasList, (list(self),)

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        """Takes the place of all methods that change a list."""
        message = f"items of {self.name} cannot change, because other parts would not notice: give a whole new list"
        raise FixedAttributeError(self.name, "another list", list(self), message)


for _method in (
    "append", "extend", "insert", "remove", "pop", "clear", "sort", "reverse",
    "__setitem__", "__delitem__", "__iadd__", "__imul__",
):  # fmt: skip
    setattr(PartList, _method, _guarded(_method))
    setattr(FixedList, _method, FixedList._refuse)


def fix_list(name: str, value: Any) -> Any:
    """Makes a `FixedList` of the value of the setting `name`, and of lists in it, if they are lists of Keras.

    Returns the value.
    """
    if type(value) is KerasList:
        value.__class__, value.name = FixedList, name
        for each in value:
            fix_list(name, each)
    return value


def unfixed(value: Any) -> Any:
    """A `FixedList` as a new list, which may change. Any other value is returned as it is."""
    return [*map(unfixed, value)] if isinstance(value, FixedList) else value


def guard_lists(layer: Any) -> None:
    """Makes a `PartList` of each list of layers in the attributes of `layer`."""
    for name, value in vars(layer).items():
        if type(value) is KerasList and any(isinstance(part, keras.Layer) for part in value):
            value.__class__ = PartList
            value.name, value.owner = name, weakref.ref(layer)


def replace_list(layer: Any, name: str, value: Any, store: Callable[[str, Any], None]) -> None:
    """Sets an attribute that is a `PartList` to another list, in a constructor, see `_check_in_constructor`."""
    before = vars(layer)[name]
    if value is before:
        return
    _check_in_constructor(layer, name)
    with unlocked(layer):
        store(name, value)
    guard_lists(layer)
    _replace_parts(layer, before, as_list(value))


def _check_in_constructor(layer: Any, name: str) -> None:
    """Raises FixedAttributeError unless a constructor of `layer`, or of a model that it is a part of, is running."""
    owner = layer
    while owner is not None:
        if in_constructor(owner):
            return
        owner = owner_of(owner)
    message = (
        f"{name} of {layer.name} cannot change, because graphs and files would not notice. Change it in the "
        "constructor of a subclass of the model. Or replace a part of a layer in it, or its __class__"
    )
    raise FixedAttributeError(name, "another list", "the list that the constructor made", message)


def _replace_parts(layer: Any, before: Sequence[Any], after: Sequence[Any]) -> None:
    """Makes the new items of a list parts of `layer`, in the places of those that it has lost, and releases these."""
    tracked = layer._tracker.config["layers"][1]
    old = [part for part in before if not any(part is other for other in after)]
    new = [part for part in after if not any(part is other for other in before)]
    with unlocked(layer):
        for i, part in enumerate(new):
            vars(part).setdefault("_txl_owner", weakref.ref(layer))  # see `Settings`
            layer._tracker.untrack(part)  # Keras may have put it at the end
            place = tracked.index(old[i]) if i < len(old) else len(tracked)
            layer._tracker.track(part)
            tracked.insert(place, tracked.pop())
            if i < len(old):
                build_like(old[i], part)
        for part in old:
            release(layer, part)
