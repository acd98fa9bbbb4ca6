"""Settings: the constructor arguments of a layer or model, after the layer or model was made.

    lm.mem_len = 16     # checked and passed on to the network; graphs that were compiled with the old value are dropped
    lm.n_layer = 3      # FixedAttributeError: the weights are those of n_layer=2

A setting is *free* if the weights fit every value. Dropout rates, lengths and switches are free. A new value must take
effect everywhere at once. So it is copied to every part that has a copy, and no compiled graph may keep the old value:

    graphs of the library's models     are dropped; the next call makes them again
    other graphs                       such as the `fit` of a Keras model that contains the layer: while such a graph
                                       exists, the setting cannot change

The other settings are *fixed*. The settings of a part, such as a layer of a network, are fixed if its owner cannot save
in its configuration that this part alone is different.

Without this file, `lm.dropout = 0.0` would have no effect: each layer, and each part of a layer, has its own copy of
the rate, because it can also be used alone; and compiled graphs contain the old rate as a constant.

What the library notes about a layer are attributes that begin with `_txl_`. They are set by `vars`, so that Keras does
not track them:

    _txl_given          see `own_arguments`, for `check_own_arguments`
    _txl_settings       the names whose values are checked when they are set
    _txl_owner          weak reference to the layer or model of which the layer is a part
    _txl_users          layers and models that the layer was given to, see `add_user`
    _txl_graphs         see `cached_result`
    _txl_seen_in        the graphs of a user in which the layer was called, see `remember_graph`
    _txl_changes        see `changes_of`
    _txl_replaced       what has replaced a part, a method or the class after the constructor, for a message
    _txl_changed        names of the parts and methods that were set after the constructor
"""

import functools
import gc
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from txl_tf.config.checks import NOT_NEGATIVE, RATE, Config, all_of, as_int, is_integer
from txl_tf.errors import FixedAttributeError, ParameterError, brief
from txl_tf.nn.arguments import own_arguments, stored_names
from txl_tf.nn.bases import MixedIntoLayer
from txl_tf.nn.part_list import PartList, fix_list, guard_lists, replace_list
from txl_tf.nn.parts import as_list, build_like, in_constructor, owner_of, release
from txl_tf.schema import check_field, check_type

# A function of the name and the value of a setting, which raises ParameterError for a wrong value.
Check = Callable[[str, Any], Any]


def of_type(kind: Any, *checks: Check) -> Check:
    """A check of the type of a value, followed by other `checks`; see `txl_tf.config.checks`."""

    def check(name: str, value: Any) -> None:
        check_type(name, value, kind)

    return all_of(check, *checks)


def _check_seed(name: str, value: Any) -> None:
    """Raises ParameterError unless a seed is an integer of 64 bits or `None`."""
    if value is not None and not (is_integer(value) and -(2**63) <= value < 2**63):
        raise ParameterError(name, value, "an integer of 64 bits, or None")


# Checks for `free_settings`.
FREE_RATE = of_type(float, RATE)
FREE_EPSILON = of_type(float, NOT_NEGATIVE)
FREE_SWITCH = of_type(bool)
FREE_SEED = _check_seed

# Advice for `fixed_settings`, see `Settings`.
OF_CLASS = "set it on the class, before a layer of the class is made"


class Settings(MixedIntoLayer):
    """Mixin of layers and models whose constructor is decorated with `stored` or `takes`.

    Each class lists only its own settings in these attributes. The settings of its base classes are added.

    Attributes:
        free_settings: `{name: check}` of the free settings that are not fields of a `Config`; a `Config` knows which of
            its fields are free. A class without `free_settings` and without a `Config` has no settings. Its attributes
            can be set freely, except its `fixed_settings` while an instance is a part of another layer.
        fixed_settings: `{name: what to do instead}` of settings that are fixed although they are free in the `Config`
            or in a base class, and of other attributes that cannot be set. By default, "make a new one".
        copied_settings: `{name: ("part.name", ...)}`, the copies of a setting in parts. `part` may be an attribute with
            a list of parts.
        fixed_methods: `{name: what to do instead}` of methods that are never called when the layer is a part of another
            layer, so that replacing them would have no effect.
        weight_parts: names of parts of which the call uses only `kernel` and `bias`. Another layer in such a place must
            not compute anything else than their product and sum.
    """

    free_settings: Mapping[str, Check] | None = None
    fixed_settings: Mapping[str, str] = {"dtype_policy": "give dtype to the constructor"}  # each part has its own
    copied_settings: Mapping[str, tuple[str, ...]] = {}
    fixed_methods: Mapping[str, str] = {}
    weight_parts: tuple[str, ...] = ()

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        x: Any = super().__new__(cls, *args, **kwargs)
        vars(x)["_txl_given"] = own_arguments(cls, args, kwargs)
        return x

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("_txl_settings", ()):
            change(self, name, value)
        elif isinstance(self.__dict__.get(name), PartList):
            replace_list(self, name, value, super().__setattr__)
        elif {"_txl_settings", "_txl_owner"} & self.__dict__.keys() and replaces_part(self, name, value):
            change_part(self, name, value, super().__setattr__)
        else:
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__.get("_txl_settings", ()):
            message = f"{name} of {_named(self)} cannot be deleted: set it, or make a new {type(self).__name__}"
            raise FixedAttributeError(name, None, "set rather than deleted", message)
        part = self.__dict__.get(name)
        super().__delattr__(name)
        if isinstance(part, keras.Layer):
            release(self, part)

    def store(self, name: str, value: Any) -> None:
        """Sets an attribute, even a setting, without checks and without other effects."""
        super().__setattr__(name, value)
        if name in self.__dict__.get("_txl_settings", ()):
            fix_list(name, self.__dict__.get(name))

    def check_setting(self, name: str, value: Any) -> Any:
        """Checks a new value of a free setting as the constructor does, and returns the value to store.

        An override may return another value, such as a seed that it draws for `None`.

        Raises:
            ParameterError: the value has a wrong type or is out of range.
        """
        free_settings_of(self)[name](name, value)
        return value

    def settings_changed(self, names: Iterable[str]) -> None:
        """Called after the settings `names` have changed, in this layer or in one that contains it."""

    def drop_graphs(self) -> None:
        """Drops compiled graphs, so that the next calls compile again, even while `fit` or `evaluate` runs."""
        self.__dict__.pop("_txl_graphs", None)
        for kind in ("train", "test", "predict"):
            if getattr(self, f"{kind}_function", None) is not None:
                getattr(self, f"make_{kind}_function")(force=True)

    def cached_result(self, name: str, make: Callable[[], Any]) -> Any:
        """The result of `make()`, such as a compiled graph. It is kept under a `name` until `drop_graphs` is called."""
        graphs = self.__dict__.setdefault("_txl_graphs", {})
        if name not in graphs:
            graphs[name] = make()
        return graphs[name]

    def drop_results(self, *names: str) -> None:
        """Drops results of `cached_result`, so that the next calls make them again."""
        for name in names:
            self.__dict__.get("_txl_graphs", {}).pop(name, None)

    def settle(self, arguments: Iterable[Any]) -> None:
        """Called at the end of the outermost constructor. From here on, settings are checked when they are set.

        Layers in the arguments of the constructor keep their own settings. If such a layer changes later, the graphs of
        this one are dropped. All other layers inside this one are parts. For a class without settings, it does no
        more than to guard the lists of layers.

        Args:
            arguments: the values of the constructor's arguments.
        """
        for part in self._flatten_layers():
            if isinstance(part, Settings):
                guard_lists(part)
        classes = type(self).__mro__
        if not any(_group(cls) or vars(cls).get("free_settings") is not None for cls in classes):
            return
        given = [layer for value in arguments for layer in as_list(value) if isinstance(layer, keras.Layer)]
        given_layers = [part for layer in given for part in layer._flatten_layers()]
        for layer in given_layers:
            add_user(layer, self)
        ids = set(map(id, given_layers))
        for part in self._flatten_layers(include_self=False):
            if isinstance(part, Settings) and id(part) not in ids:
                part.__dict__.setdefault("_txl_owner", weakref.ref(self))
                part.__dict__.setdefault("_txl_settings", frozenset(_merged(type(part), "fixed_settings")))
        for name in stored_names(type(self)):
            fix_list(name, self.__dict__.get(name))
        self.__dict__["_txl_settings"] = frozenset([*stored_names(type(self)), *_merged(type(self), "fixed_settings")])


class compiled_method:
    """Decorator of a method: makes a `tf.function` for every instance, without AutoGraph.

    `Settings.drop_graphs` drops it.

    Args: other arguments of `tf.function`.
    """

    method: Any

    def __init__(self, **options: Any) -> None:
        self.options = options

    def __call__(self, method: Any) -> Any:
        self.method = method
        return functools.update_wrapper(self, method)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is None:
            return self
        function = functools.partial(tf.function, self.method.__get__(instance), autograph=False, **self.options)
        return instance.cached_result(self.method.__name__, function)


def add_user(layer: Any, user: Any) -> None:
    """After this, changes of a `layer` also call `user.drop_graphs()`."""
    vars(layer).setdefault("_txl_users", weakref.WeakSet()).add(user)


def changes_of(layer: Any) -> int:
    """How often a setting or a part has changed: of a `layer`, of a part of it, or of a layer that was given to it."""
    return vars(layer).get("_txl_changes", 0)


def remember_graph(layer: Any) -> None:
    """Notes that a `layer` is called in the graph that is being traced, so that `change_graphs` knows of this graph."""
    graph: Any = tf.compat.v1.get_default_graph()
    # Leaves loops and nested functions, up to the outermost function: the graph around it has no `outer_graph`.
    while hasattr(getattr(graph, "outer_graph", None), "outer_graph"):
        graph = graph.outer_graph
    vars(layer).setdefault("_txl_seen_in", weakref.WeakSet()).add(graph)


# ------------------------------------------------------------------------------------------------------------- change


def change(x: Any, name: str, value: Any) -> None:
    """Sets a setting of a layer or model, and its copies in parts, after its constructor.

    Drops the graphs with the old value. In a running constructor, an attribute that is no free setting is just stored.

    Raises:
        FixedAttributeError: the setting is fixed; or a graph with the old value exists that the library cannot drop.
        ParameterError: the value has a wrong type or is out of range.
    """
    value = as_int(value)
    owner, setting = _governing(x, name)
    if setting is not None:  # set it where it comes from, which passes it on to `x`
        setattr(owner, setting, value)
        return
    # The constructor of a user's subclass, after the library's. It may use the name for something else: a value that is
    # not valid for the setting is stored as an ordinary attribute. But the parts have the old dtype policy already.
    may_be_another_attribute = in_constructor(x) and name != "dtype_policy"
    is_free = owner is None and name in free_settings_of(x)
    if is_free:
        try:
            value = x.check_setting(name, value)
        except ParameterError:
            if not may_be_another_attribute:
                raise
            is_free = False
    current = getattr(x, name, None)
    if not is_free and may_be_another_attribute:
        x.store(name, value)
    elif not _same(keras.dtype_policies.get(value) if name == "dtype_policy" else value, current):
        if not is_free:
            raise _fixed_error(x, name, value, current, owner)
        _set_with_copies(x, name, value, current)


def _set_with_copies(x: Any, name: str, value: Any, current: Any) -> None:
    """Sets a free setting and its copies in parts from `current` to `value`, and drops the graphs with `current`.

    Raises:
        FixedAttributeError: a part with a copy cannot change it, or another graph exists, see `change_graphs`.
    """
    copies = list(_copies(x, name))
    for part, _ in copies:
        if not isinstance(part, Settings):
            message = f"{name} of {_named(x)} cannot change: its part {_named(part)} would keep {brief(current)}"
            raise FixedAttributeError(name, value, f"{brief(current)}, as it was made", message)
    change_graphs(x, name, value, current)
    for part, own_name in copies:
        part.store(own_name, value)
    for layer in x._flatten_layers():
        if isinstance(layer, Settings):
            layer.settings_changed({own_name for part, own_name in copies if part is layer})


def change_graphs(x: Any, name: str, value: Any, current: Any) -> None:
    """Drops the graphs in which `x` was called, because its attribute `name` changes from `current` to `value`.

    These are the graphs of `x`, of the layers that contain it, and of those that it was given to as an argument.

    Raises:
        FixedAttributeError: another graph exists, which the library cannot drop, in which `x` or a part was called.
    """
    waiting: list[Any] = [x]
    done: list[Any] = []
    while waiting:
        one = waiting.pop()
        if one is None or any(one is other for other in done):
            continue
        done.append(one)
        one.drop_graphs()
        waiting += [owner_of(one), *vars(one).get("_txl_users", ())]

    def other_graph_exists() -> bool:
        """Whether a graph in which `x` or a part was called still exists."""
        return any(vars(layer).get("_txl_seen_in") for layer in x._flatten_layers())

    if other_graph_exists():
        gc.collect()  # dropped graphs are in reference cycles
    if other_graph_exists():
        message = (
            f"{name} of {_named(x)} cannot change from {brief(current)} to {brief(value)}: a compiled graph outside "
            f"this library still uses {brief(current)}. If it is of a Keras model, compile() frees it (after predict, "
            f"del model.predict_function first). A tf.function can be deleted. Or make a new {type(x).__name__}"
        )
        raise FixedAttributeError(name, value, f"{brief(current)} while compiled graphs have it", message)
    for one in done:
        vars(one)["_txl_changes"] = changes_of(one) + 1


def replaces_part(x: Any, name: str, value: Any) -> bool:
    """Whether setting the attribute `name` of `x` to `value` replaces its class, one of its methods or of its parts."""
    if name == "__class__" or (callable(value) and inspect.isfunction(getattr(type(x), name, None))):
        return True
    return isinstance(value, keras.Layer) and isinstance(getattr(x, name, None), keras.Layer)


def _is_linear(layer: Any) -> bool:
    """Whether the call of a layer is `x @ kernel + bias`, as that of the library's `Linear` or of a plain `Dense`."""
    call = getattr(type(layer), "call", None)
    if "call" in vars(layer) or call is None:
        return False
    if call is keras.layers.Dense.call:
        return layer.use_bias and layer.activation is keras.activations.linear
    return call.__module__ == "txl_tf.nn.ops"


def change_part(x: Any, name: str, value: Any, store: Callable[[str, Any], None]) -> None:
    """Replaces a part of a layer or model, its class or a method, after its constructor. Drops the old graphs.

    A new part is built at once if the old one is. It gets the place of the old one in the order of the weights, as in a
    model that is made from the configuration, unless a constructor of `x` replaces the part.

    Raises:
        FixedAttributeError: the change would replace a method of `fixed_methods`; a layer that replaces one of
            `weight_parts` computes something else; or a graph with the old part exists that the library cannot drop.
    """
    current = type(x) if name == "__class__" else getattr(x, name, None)
    if value is current:
        return
    fixed = _merged(type(x), "fixed_methods")

    def is_replaced(method: str) -> bool:
        """Whether the change replaces this method of `x`."""
        if name == "__class__":
            return getattr(value, method, None) is not getattr(current, method, None)
        return method == name

    changed = [method for method in fixed if is_replaced(method)]
    if changed:
        message = f"{changed[0]} of {_named(x)} cannot change: {fixed[changed[0]]}"
        raise FixedAttributeError(changed[0], value, f"that of {type(x).__name__}", message)
    if name in x.weight_parts and type(x).call.__module__.startswith("txl_tf.") and not _is_linear(value):
        allowed = "a layer with a kernel and a bias that does nothing else, such as keras.layers.Dense"
        message = (
            f"{name} of {_named(x)} must be {allowed}: {type(x).__name__} uses only its weights; override its call"
        )
        raise FixedAttributeError(name, value, allowed, message)
    if isinstance(current, keras.Layer) and isinstance(value, keras.Layer):
        build_like(current, value)
    change_graphs(x, name, value, current)
    layers = x._tracker.config["layers"][1]
    before = list(layers)
    store(name, value)
    is_being_made = in_constructor(x)
    if isinstance(current, keras.Layer):
        if not is_being_made and current in before and layers[len(before) :]:  # Keras has put it at the end
            layers.insert(before.index(current), layers.pop())
        release(x, current)
    if not is_being_made:
        changed_layer = value if isinstance(value, keras.Layer) else x
        changed_layer.__dict__["_txl_replaced"] = f"{name} of {x.name}"
        x.__dict__.setdefault("_txl_changed", set()).add(name)
    if isinstance(value, Settings):
        value.__dict__.setdefault("_txl_owner", weakref.ref(x))


def free_settings_of(x: Any) -> dict[str, Check]:
    """`{name: check}` of the settings of a layer or model that can change after its constructor.

    They are those of its `Config`s and of `free_settings`, without those of `fixed_settings`.
    """
    free: dict[str, Check] = {}
    for cls in reversed(type(x).__mro__):
        group = _group(cls)
        if group is not None:
            free |= {field.name: _check_of(field, group) for field in group.free_fields(x)}
        free |= vars(cls).get("free_settings") or {}
    fixed = _merged(type(x), "fixed_settings")
    return {name: check for name, check in free.items() if name not in fixed}


def _check_of(field: Any, group: type[Config]) -> Check:
    """The check of a field of a `Config`."""
    return lambda name, value: check_field(field, group, value, name)


def _group(cls: type) -> type[Config] | None:
    """The `Config` whose fields the class's own constructor takes, or `None`."""
    return getattr(vars(cls).get("__init__"), "group", None)


def _copies(x: Any, name: str) -> Iterator[tuple[Any, str]]:
    """`(layer, name)` of every layer with a copy of a setting: `x` itself, then its parts and their parts."""
    yield x, name
    for part, own_name in _parts_with(x, name):
        yield from _copies(part, own_name) if isinstance(part, Settings) else [(part, own_name)]


def _parts_with(x: Any, name: str) -> Iterator[tuple[Any, str]]:
    """`(part, name)` of the parts of `x` with a copy of its setting."""
    for path in _merged(type(x), "copied_settings").get(name, ()):
        *names, own_name = path.split(".")
        parts = [x]
        for attribute in names:
            parts = [part for owner in parts for part in as_list(getattr(owner, attribute))]
        for part in parts:
            yield part, own_name


def _merged(cls: type, name: str) -> dict[str, Any]:
    """Merges the dictionaries that a class and its base classes have as the attribute `name`."""
    return {key: value for base in reversed(cls.__mro__) for key, value in vars(base).get(name, {}).items()}


def _governing(x: Any, name: str) -> tuple[Any, str | None]:
    """`(owner, setting)`: the layer that contains `x`, and its setting whose only copy is `name` of `x`.

    `owner` is `None` if no layer contains `x`. `setting` is `None` if there is no such setting.
    """
    owner = owner_of(x)
    if owner is None:
        return None, None
    for setting in _merged(type(owner), "copied_settings"):
        parts = list(_parts_with(owner, setting))
        if len(parts) == 1 and parts[0][0] is x and parts[0][1] == name:
            return owner, setting
    return owner, None


def _fixed_error(x: Any, name: str, value: Any, current: Any, owner: Any) -> FixedAttributeError:
    """The error of a setting that cannot change."""
    if owner is not None:
        reason_or_advice = f"it is a part of {_named(owner)}, whose settings apply to all its parts"
    else:
        advice_of_class = _merged(type(x), "fixed_settings").get(name)
        reason_or_advice = advice_of_class or f"make a new {type(x).__name__} with {name}={brief(value)}"
    message = f"{name} of {_named(x)} is {brief(current)} and cannot change to {brief(value)}: {reason_or_advice}"
    return FixedAttributeError(name, value, f"{brief(current)}, as it was made", message)


def _same(value: Any, other: Any) -> bool:
    """Whether two values are equal, and of one type. Arrays of several elements must be the same object."""
    try:
        return value is other or (type(value) is type(other) and bool(value == other))
    except (TypeError, ValueError):  # arrays of several elements
        return False


def _named(x: Any) -> str:
    """A layer or model as messages name it."""
    name = getattr(x, "name", None)
    return f"{type(x).__name__} {name!r}" if name else type(x).__name__
