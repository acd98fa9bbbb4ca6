"""Arguments of constructors, written once: stored under their own names, and returned by `get_config`.

class Scaled(Layer):
    @stored
    def __init__(self, units, rate=0.0, **kwargs):      # self.units and self.rate are set
        super().__init__(**kwargs)

class Network(Layer):
    @takes(NetworkConfig)                               # set, and checked as the fields of the group
    def __init__(self, *, n_token: int, n_layer: int, ..., seed: int | None = None, **kwargs):
        super().__init__(**kwargs)
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypedDict, TypeVar

import keras

from txl_tf.config import Config, already_checked, check_fields
from txl_tf.errors import ParameterError, UnknownArgumentError
from txl_tf.schema import brief, did_you_mean, keywords_of


class LayerOptions(TypedDict, total=False):
    """The arguments of every layer and model of Keras: `**kwargs: Unpack[LayerOptions]`."""

    name: str | None
    dtype: Any
    trainable: bool
    autocast: bool
    activity_regularizer: Any


_OF_KERAS = list(LayerOptions.__annotations__)
_OLD = {"input_shape", "input_dim"}  # Keras knows them for models of older versions

_INITIALIZERS = ("initializer", "init")  # how the names of arguments end that are initializers

# A constructor. Type checkers see it as it is written: a decorated one has the same arguments.
Init = TypeVar("Init", bound=Callable[..., None])


def stored(init: Init) -> Init:
    """Decorator of `__init__`: sets an attribute for each argument but `**kwargs`, before the body runs."""
    return _storing(init, inspect.signature(init))


def takes(group: type[Config], required: Iterable[str] = ()) -> Callable[[Init], Init]:
    """Decorator of `__init__`: the fields of `group` are keyword arguments, checked as the fields are; see `stored`.

    The constructor may write them in its signature, where editors and type checkers find them, with the defaults of the
    group (`tests/signatures_test.py` compares both). Fields that it does not write are taken all the same; the body
    does not get them: it reads the attributes.

    Args:
        group: subclass of `Config`. A field with a default is optional.
        required: names of fields that are not written and must be given all the same.
    """

    def decorate(init: Init) -> Init:
        *own, rest = inspect.signature(init).parameters.values()
        written = {parameter.name for parameter in own}
        defaults = {name: getattr(group, name, inspect.Parameter.empty) for name in group.names()}
        defaults |= dict.fromkeys(required, inspect.Parameter.empty)
        others = {name: default for name, default in defaults.items() if name not in written}
        fields = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=x) for name, x in others.items()]
        return _storing(init, inspect.Signature([*own, *fields, rest]), group, others)

    return decorate


def _storing(init, signature, group=None, not_of_body=()):
    _, *parameters = signature.parameters.values()
    names = [parameter.name for parameter in parameters if parameter.kind is not inspect.Parameter.VAR_KEYWORD]
    takes_others = len(names) < len(parameters)

    @functools.wraps(init)
    def call(self, *args, **kwargs):
        if not kwargs.keys() <= {*names, *_OF_KERAS}:
            check_known(type(self), kwargs, [*names, *_taken_by_bases(type(self))] if takes_others else names)
        try:
            given = signature.bind(self, *args, **kwargs)
        except TypeError as error:
            by_position = [x.name for x in parameters if x.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
            hint = f": those by position are {', '.join(by_position)}" if "too many positional" in str(error) else ""
            raise TypeError(f"{type(self).__name__}: {error}{hint}") from None
        given.apply_defaults()
        for name in names:
            setattr(self, name, given.arguments[name])
        if group is not None:
            check_fields(group, self)
        outermost = not vars(self).setdefault("_making", False)
        vars(self)["_making"] = True
        # A model gives its values to its network, which need not check them again.
        with already_checked(group, self) if group is not None else contextlib.nullcontext():
            init(self, *args, **{name: value for name, value in kwargs.items() if name not in not_of_body})
        if outermost and hasattr(self, "settle"):
            self.settle([given.arguments[name] for name in names])
        if getattr(self, "quantization_mode", None) is not None:
            raise ParameterError("dtype", self.dtype_policy.name, "a policy without quantization")
        if not getattr(self, "trainable", True):  # as in a file of a frozen layer: Keras does not pass it on
            for part in self._flatten_layers(include_self=False, recursive=False):
                part.trainable = False

    vars(call).update(__signature__=signature, stored=names, group=group)
    return call


def check_known(cls, arguments, known):
    """Raises UnknownArgumentError, which lists the names, for an argument of a constructor that is not `known`."""
    known = list(dict.fromkeys(known))
    unknown = {name: value for name, value in arguments.items() if name not in known and name not in _OLD}
    if unknown:
        name, value = next(iter(unknown.items()))
        message = f"Unrecognized keyword arguments passed to {cls.__name__}: {brief(unknown)}."
        message += f"{did_you_mean(name, known)} It takes {', '.join(known)}"
        raise UnknownArgumentError(name, value, known, message)


def _taken_by_bases(cls):
    """Names that `**kwargs` of a constructor may hold: the arguments of the base classes, and of Keras's layers."""
    inits = [(base.__module__, vars(base).get("__init__")) for base in cls.__mro__[1:]]
    stored = [name for _, init in inits for name in getattr(init, "stored", ())]
    others = [init for module, init in inits if init is not None and not module.startswith(("txl_tf.", "keras."))]
    return [*stored, *(name for init in others for name in keywords_of(init)), *_OF_KERAS]


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
