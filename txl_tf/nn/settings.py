"""Settings: the constructor arguments of a layer or model, after it was made.

    lm.mem_len = 16     # checked, passed on to the network; graphs that were compiled with the old value are dropped
    lm.n_layer = 3      # FixedAttributeError: the weights are those of n_layer=2

A setting is *free* if the weights fit every value: rates of dropout, lengths, switches. Its new value must take effect
everywhere at once. So it goes to every part that holds a copy, and no compiled graph may be left that has the old one:

    graphs of the library's models     are dropped, and made again by the next call
    all others                         such as the fit of a Keras model around the layer: while one exists, the change
                                       is refused

The other settings are *fixed*. So are those of a part, such as a layer of a network, where the part's owner cannot say
in its configuration that this part alone is different.
"""

import functools
import gc
import inspect
import numbers
import weakref

import keras
import tensorflow as tf

from txl_tf.config.checks import NOT_NEGATIVE, RATE, all_of
from txl_tf.errors import FixedAttributeError, ParameterError, brief
from txl_tf.nn.arguments import stored_names
from txl_tf.schema import check_field, check_type


def of_type(kind, *checks):
    """A check of a value's type, and then the `checks`; see `txl_tf.config.checks`."""
    return all_of(lambda name, value: check_type(name, value, kind), *checks)


def _seed(name, value):
    if value is not None and (isinstance(value, bool) or not isinstance(value, numbers.Integral)):
        raise ParameterError(name, value, "an integer, or None")


# Checks for `free_settings`.
FREE_RATE = of_type(float, RATE)
FREE_EPSILON = of_type(float, NOT_NEGATIVE)
FREE_SWITCH = of_type(bool)
FREE_SEED = _seed

# For `fixed_settings`.
OF_CLASS = "set it on the class, before a layer of the class is made"


class Settings:
    """Mixin of layers and models whose constructor is decorated with `stored` or `takes`.

    The attributes of a class are about this class alone; those of its bases count besides.

    Attributes:
        free_settings: `{name: check}` of the free settings that are no fields of a `Config`; of those fields, the
            `Config` says which are free. A class that has neither `free_settings` nor a `Config` has no settings: all
            its attributes are plain ones.
        fixed_settings: `{name: what to do instead}` of settings that are fixed although the `Config` or a base calls
            them free, and of other attributes that cannot be set. By default, "make a new one".
        copied_settings: `{name: ("part.name", ...)}`, the copies of a setting in parts; `part` may be a list of them.
        fixed_parts: `{name: what to do instead}` of methods that nothing calls in a part of a layer, so that others
            cannot be put in their place.
    """

    free_settings = None
    fixed_settings = {}
    copied_settings = {}
    fixed_parts = {}

    def __setattr__(self, name, value):
        if name in self.__dict__.get("_settings", ()):
            change(self, name, value)
        elif "_settings" in self.__dict__ and is_part(self, name, value):
            change_part(self, name, value, super().__setattr__)
        else:
            super().__setattr__(name, value)

    def __delattr__(self, name):
        if name in self.__dict__.get("_settings", ()):
            message = f"{name} of {_named(self)} cannot be deleted: set it, or make a new {type(self).__name__}"
            raise FixedAttributeError(name, None, "set rather than deleted", message)
        part = self.__dict__.get(name)
        super().__delattr__(name)
        if isinstance(part, keras.Layer):
            self._tracker.untrack(part)

    def store(self, name, value):
        """Sets an attribute, a setting too, and nothing else."""
        super().__setattr__(name, value)

    def check_setting(self, name, value):
        """The value to store for a free setting, after the checks that the constructor makes.

        Raises:
            ParameterError: the value is out of its range.
        """
        free_settings_of(self)[name](name, value)
        return value

    def settings_changed(self, names):
        """Called after a change, of the settings `names` of this layer or of one that it is a part of."""

    def drop_graphs(self):
        """Lets the next calls compile again. `fit` and `evaluate` may be running."""
        self.__dict__.pop("_graphs", None)
        for kind in ("train", "test", "predict"):
            if getattr(self, f"{kind}_function", None) is not None:
                getattr(self, f"make_{kind}_function")(force=True)

    def settle(self, arguments):
        """Called at the end of the constructor that has the `arguments`: from here on, the settings are what they are.

        Layers that are among the arguments, or in one of them, have settings of their own. All others are parts.
        """
        classes = type(self).__mro__
        if not any(_group(cls) or vars(cls).get("free_settings") is not None for cls in classes):
            return
        given = [layer for value in arguments for layer in _layers_in(value)]
        for layer in given:
            add_user(layer, self)
        ids = set(map(id, given))
        for part in self._flatten_layers(include_self=False):
            if isinstance(part, Settings) and id(part) not in ids:
                part.__dict__.setdefault("_owner", weakref.ref(self))
        self.__dict__["_settings"] = frozenset([*stored_names(type(self)), *_fixed(type(self))])


class compiled_method:
    """Decorator of a method: a `tf.function` for every instance, which `Settings.drop_graphs` drops.

    Args: those of `tf.function`.
    """

    def __init__(self, **options):
        self.options = options

    def __call__(self, method):
        self.method = method
        return functools.update_wrapper(self, method)

    def __get__(self, instance, owner=None):
        if instance is None:
            return self
        graphs = instance.__dict__.setdefault("_graphs", {})
        name = self.method.__name__
        if name not in graphs:
            graphs[name] = tf.function(self.method.__get__(instance), **self.options)
        return graphs[name]


def add_user(layer, user):
    """Lets changes of a `layer` call `user.drop_graphs()`, too."""
    vars(layer).setdefault("_users", weakref.WeakSet()).add(user)


def remember_graph(layer):
    """Notes which graph a `layer` is called in; called while one is traced."""
    graph = tf.compat.v1.get_default_graph()
    while hasattr(getattr(graph, "outer_graph", None), "outer_graph"):  # out of loops and nested functions
        graph = graph.outer_graph
    vars(layer).setdefault("_seen_in", weakref.WeakSet()).add(graph)


# ------------------------------------------------------------------------------------------------------------- change


def change(x, name, value):
    """Sets a setting of `x` that has been made.

    Raises:
        FixedAttributeError: it is fixed, or a graph that nobody here can drop has the old value.
        ParameterError: the value is out of its range.
    """
    current, (owner, setting) = getattr(x, name, None), _governing(x, name)
    if setting is not None:
        setattr(owner, setting, value)
        return
    is_free = owner is None and name in free_settings_of(x)
    if _in_constructor(x):  # of a subclass, which may use the name for something else
        try:
            value, is_free = (x.check_setting(name, value), True) if is_free else (value, False)
        except ParameterError:
            is_free = False
        if not is_free:
            x.store(name, value)
            return
    elif is_free:
        value = x.check_setting(name, value)
    if _same(value, current):
        return
    if not is_free:
        raise _fixed_error(x, name, value, current, owner)
    copies = list(_copies(x, name))
    for part, _ in copies:
        if not isinstance(part, Settings):
            message = f"{name} of {_named(x)} cannot change: its part {_named(part)} would keep {brief(current)}"
            raise FixedAttributeError(name, value, f"{brief(current)}, as it was made", message)
    _drop_graphs_of(x)
    _check_no_graph(x, name, value, current)
    for part, own_name in copies:
        part.store(own_name, value)
    for layer in x._flatten_layers():
        if isinstance(layer, Settings):
            layer.settings_changed({own_name for part, own_name in copies if part is layer})


def is_part(x, name, value):
    """Whether an attribute of a layer that was made decides what it computes: its class, its call, or a part."""
    if name in ("__class__", "call"):
        return True
    return isinstance(value, keras.Layer) and isinstance(getattr(x, name, None), keras.Layer)


def change_part(x, name, value, store):
    """Sets a part of a layer or model that has been made, or its class, by `store`. Compiled graphs of it are dropped.

    Raises:
        FixedAttributeError: a graph that nobody here can drop has the old part.
    """
    current = type(x) if name == "__class__" else getattr(x, name, None)
    if value is current:
        return
    fixed = _of_bases(type(x), "fixed_parts")
    changed = [
        method for method in fixed if method == name or (name == "__class__" and _differ(value, current, method))
    ]
    if changed:
        message = f"{changed[0]} of {_named(x)} cannot change: {fixed[changed[0]]}"
        raise FixedAttributeError(changed[0], value, f"that of {type(x).__name__}", message)
    _drop_graphs_of(x)
    _check_no_graph(x, name, value, current)
    store(name, value)
    if isinstance(current, keras.Layer):
        x._tracker.untrack(current)  # Keras would keep it and its weights
    if not _in_constructor(x):
        changed = value if isinstance(value, keras.Layer) else x
        changed.__dict__["_was_put_in"] = True
    if isinstance(value, Settings):
        value.__dict__.setdefault("_owner", weakref.ref(x))


def _differ(cls, other, method):
    return getattr(cls, method, None) is not getattr(other, method, None)


def free_settings_of(x):
    """`{name: check}` of all free settings of `x`."""
    free = {}
    for cls in reversed(type(x).__mro__):
        group = _group(cls)
        if group is not None:
            free |= {field.name: functools.partial(_check_of_group, field, group) for field in group.free_fields(x)}
        free |= vars(cls).get("free_settings") or {}
    fixed = _fixed(type(x))
    return {name: check for name, check in free.items() if name not in fixed}


def _check_of_group(field, group, name, value):
    check_field(field, group, value, name)


def _group(cls):
    """The `Config` that the constructor of `cls` itself takes, or `None`."""
    return getattr(vars(cls).get("__init__"), "group", None)


def _fixed(cls):
    return _of_bases(cls, "fixed_settings")


def _copies(x, name):
    """`(part, name)` of every place that holds a setting, `x` itself first."""
    yield x, name
    for part, own_name in _parts_with(x, name):
        yield from _copies(part, own_name) if isinstance(part, Settings) else [(part, own_name)]


def _parts_with(x, name):
    """`(part, name)` of the parts of `x` that hold a copy of its setting."""
    for path in _copied(type(x)).get(name, ()):
        *names, own_name = path.split(".")
        parts = [x]
        for attribute in names:
            parts = [part for owner in parts for part in _as_list(getattr(owner, attribute))]
        for part in parts:
            yield part, own_name


def _copied(cls):
    return _of_bases(cls, "copied_settings")


def _of_bases(cls, name):
    """A dictionary that is an attribute of classes, of `cls` and all its bases together."""
    return {key: value for base in reversed(cls.__mro__) for key, value in vars(base).get(name, {}).items()}


def _as_list(x):
    return list(x) if isinstance(x, (list, tuple)) else [] if x is None else [x]


def _governing(x, name):
    """`(owner, setting)`: what `x` is a part of, and its setting that is copied to `name` of `x` and nowhere else."""
    owner = vars(x).get("_owner", lambda: None)()
    if owner is None:
        return None, None
    for setting in _copied(type(owner)):
        parts = list(_parts_with(owner, setting))
        if len(parts) == 1 and parts[0][0] is x and parts[0][1] == name:
            return owner, setting
    return owner, None


def _fixed_error(x, name, value, current, owner):
    if owner is not None:
        todo = f"it is a part of {_named(owner)}, whose own settings count for all its parts"
    else:
        todo = _fixed(type(x)).get(name) or f"make a new {type(x).__name__} with {name}={brief(value)}"
    message = f"{name} of {_named(x)} is {brief(current)} and cannot change to {brief(value)}: {todo}"
    return FixedAttributeError(name, value, f"{brief(current)}, as it was made", message)


def _drop_graphs_of(x):
    """Drops the graphs of `x`, and of all that it is a part of or was given to."""
    waiting, done = [x], []
    while waiting:
        one = waiting.pop()
        if one is None or any(one is other for other in done):
            continue
        done.append(one)
        one.drop_graphs()
        waiting += [vars(one).get("_owner", lambda: None)(), *vars(one).get("_users", ())]


def _check_no_graph(x, name, value, current):
    """Raises FixedAttributeError while a graph exists that `x` or a part of it was called in."""

    def exists():
        return any(vars(layer).get("_seen_in") for layer in x._flatten_layers())

    if exists():
        gc.collect()  # graphs that were dropped are in cycles
    if exists():
        message = (
            f"{name} of {_named(x)} cannot change from {brief(current)} to {brief(value)}: a compiled graph that "
            f"somebody else made still has {brief(current)}. Of a Keras model, compile() frees it (after predict, del "
            f"model.predict_function first); a tf.function can be deleted; or make a new {type(x).__name__}"
        )
        raise FixedAttributeError(name, value, f"{brief(current)} while compiled graphs have it", message)


def _layers_in(value):
    """All layers in an argument: a layer, or a list of some."""
    for layer in _as_list(value):
        if isinstance(layer, keras.Layer):
            yield from layer._flatten_layers()


def _in_constructor(x):
    """Whether a constructor of `x` is running."""
    frame = inspect.currentframe()
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__init__" and code.co_varnames and frame.f_locals.get(code.co_varnames[0]) is x:
            return True
        frame = frame.f_back
    return False


def _same(value, other):
    try:
        return value is other or (type(value) is type(other) and bool(value == other))
    except (TypeError, ValueError):  # arrays
        return False


def _named(x):
    name = getattr(x, "name", None)
    return f"{type(x).__name__} {name!r}" if name else type(x).__name__
