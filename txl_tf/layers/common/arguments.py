"""Arguments of constructors, written once: stored under their own names, and returned by `get_config`.

    class Scaled(Layer):
        @stored
        def __init__(self, units, rate=0.0, **kwargs):      # self.units and self.rate are set
            super().__init__(**kwargs)

    class Network(Layer):
        @takes(NetworkConfig, required=["n_token"])         # n_token, n_layer, ... by name, set and checked
        def __init__(self, *, seed=None, **kwargs):
            super().__init__(**kwargs)

`inspect.signature`, and so the help of Jupyter, shows the arguments of the group with their defaults.
"""

import functools
import inspect

import keras

from txl_tf.config import check_fields

_INITIALIZERS = ("initializer", "init")  # how the names of arguments end that are initializers


def stored(init):
    """Decorator of `__init__`: sets an attribute for each argument but `**kwargs`, before the body runs."""
    return _storing(init, inspect.signature(init))


def takes(group, required=()):
    """Decorator of `__init__`: the fields of `group`, a `Config`, are keyword arguments too; see `stored`.

    They are checked as the fields are. The body gets none of them: it reads the attributes.

    Args:
        group: subclass of `Config`. A field with a default is optional.
        required: names of fields that must be given all the same.
    """

    def decorate(init):
        *own, rest = inspect.signature(init).parameters.values()
        defaults = {name: getattr(group, name, inspect.Parameter.empty) for name in group.names()}
        defaults |= dict.fromkeys(required, inspect.Parameter.empty)
        fields = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=x) for name, x in defaults.items()]
        return _storing(init, inspect.Signature([*own, *fields, rest]), group)

    return decorate


def _storing(init, signature, group=None):
    fields = group.names() if group is not None else []
    _, *parameters = signature.parameters.values()
    names = [parameter.name for parameter in parameters if parameter.kind is not inspect.Parameter.VAR_KEYWORD]

    @functools.wraps(init)
    def call(self, *args, **kwargs):
        try:
            given = signature.bind(self, *args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{type(self).__name__}: {error}") from None
        given.apply_defaults()
        for name in names:
            setattr(self, name, given.arguments[name])
        if group is not None:
            check_fields(group, self)
        outermost = not vars(self).setdefault("_making", False)
        vars(self)["_making"] = True
        init(self, *args, **{name: value for name, value in kwargs.items() if name not in fields})
        if outermost and hasattr(self, "settle"):
            self.settle([given.arguments[name] for name in names])
        if not getattr(self, "trainable", True):  # as in a file of a frozen layer: Keras does not pass it on
            for part in self._flatten_layers(include_self=False, recursive=False):
                part.trainable = False

    call.__signature__, call.stored, call.group = signature, names, group
    return call


def values_of(x, names):
    """`{name: attribute}` of the names in a string, separated by spaces."""
    return {name: getattr(x, name) for name in names.split()}


def stored_names(cls):
    """Names of the arguments that the constructors of a class and of its bases store."""
    return [name for base in cls.__mro__ for name in getattr(vars(base).get("__init__"), "stored", ())]


def arguments_of(x):
    """The stored arguments of a layer or model for its `get_config`: `{name: attribute}`; initializers as Keras's."""
    values = {name: getattr(x, name) for name in stored_names(type(x))}
    for name, value in values.items():
        if name.endswith(_INITIALIZERS) and callable(value):
            values[name] = keras.initializers.serialize(keras.initializers.get(value))
    return values
