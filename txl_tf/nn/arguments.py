"""Decorators that store the arguments of a constructor under their own names, for `get_config`.

class Scaled(Layer):
    @stored
    def __init__(self, units, rate=0.0, **kwargs):      # sets self.units and self.rate
        super().__init__(**kwargs)

class Network(Layer):
    @takes(NetworkConfig)                               # sets attributes, and checks them as fields of the group
    def __init__(self, *, n_token: int, n_layer: int, ..., seed: int | None = None, **kwargs):
        super().__init__(**kwargs)
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypedDict, TypeVar, cast

import keras

from txl_tf.calls import check_true_or_false
from txl_tf.config import Config, already_checked, check_fields
from txl_tf.config.checks import as_int
from txl_tf.errors import CallError, ParameterError, UnknownArgumentError
from txl_tf.nn.part_list import unfixed
from txl_tf.nn.parts import PART_CLASSES, is_overridden
from txl_tf.schema import brief, did_you_mean, keywords_of


class LayerOptions(TypedDict, total=False):
    """The arguments of every layer and model of Keras: `**kwargs: Unpack[LayerOptions]`."""

    name: str | None
    dtype: Any
    trainable: bool
    autocast: bool
    activity_regularizer: Any


_OF_KERAS = list(LayerOptions.__annotations__)
_OLD = {"input_shape", "input_dim"}  # Keras accepts them for models of older versions

_INITIALIZERS = ("initializer", "init")  # the name of an initializer ends with one of these

# A constructor. Type checkers see the signature that is written in the source, because a decorator does not change it.
Init = TypeVar("Init", bound=Callable[..., None])


def stored(init: Init) -> Init:
    """Decorator of `__init__`: before the body runs, sets each argument but `**kwargs` as an attribute.

    NumPy integers become ints. An argument that is annotated as `bool` must be True or False.
    """
    return _storing(init, inspect.signature(init))


def takes(group: type[Config], required: Iterable[str] = ()) -> Callable[[Init], Init]:
    """Decorator of `__init__`: the fields of `group` become keyword arguments. It sets attributes as `stored` does.

    It checks the values as the group checks its fields. The constructor should write the fields in its signature with
    the defaults of the group, where editors and type checkers find them; `tests/signatures_test.py` compares both.
    Fields that are not in the signature become keyword arguments, too, but the body does not get them: it reads the
    attributes.

    Args:
        group: subclass of `Config`. A field with a default is optional.
        required: fields that are not in the signature and must be given, whatever the defaults of the group are.
    """

    def decorate(init: Init) -> Init:
        """Adds the fields of the group to the signature, and returns the new constructor."""
        *own, rest = inspect.signature(init).parameters.values()
        written = {parameter.name for parameter in own}
        defaults = {name: getattr(group, name, inspect.Parameter.empty) for name in group.names()}
        defaults |= dict.fromkeys(required, inspect.Parameter.empty)
        unwritten = {name: default for name, default in defaults.items() if name not in written}
        fields = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=x) for name, x in unwritten.items()]
        return _storing(init, inspect.Signature([*own, *fields, rest]), group, list(unwritten))

    return decorate


def refusing(check: Callable[[str, tuple[Any, ...], dict[str, Any]], None]) -> Callable[[Init], Init]:
    """Decorator of a `stored` constructor: first, `check(name of the class, args, kwargs)` may raise an error.

    The constructor itself does not know which arguments were given by position. A subclass that has a constructor of
    its own is not checked, because it may have another order of arguments.
    """

    def decorate(init: Init) -> Init:
        @functools.wraps(init)
        def call(self: Any, *args: Any, **kwargs: Any) -> None:
            if type(self).__init__ is call:
                check(type(self).__name__, args, kwargs)
            init(self, *args, **kwargs)

        return cast(Init, call)

    return decorate


def _storing(
    init: Init, signature: inspect.Signature, group: type[Config] | None = None, not_of_body: Sequence[str] = ()
) -> Init:
    """The constructor that `stored` and `takes` return.

    Args:
        init: the constructor as it is written.
        signature: signature of the new constructor.
        group: checks the attributes; `None`: no check.
        not_of_body: arguments of the new constructor that `init` does not get.
    """
    _, *parameters = signature.parameters.values()
    names = [parameter.name for parameter in parameters if parameter.kind is not inspect.Parameter.VAR_KEYWORD]
    takes_others = len(names) < len(parameters)  # whether there is `**kwargs`
    switches = [parameter.name for parameter in parameters if parameter.annotation in (bool, "bool")]

    @functools.wraps(init)
    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        """The new constructor: checks and stores the arguments, then calls the constructor as it is written.

        At the end of the outermost constructor, it calls `settle`, see `Settings`. It checks the dtype, and freezes the
        parts of a frozen layer.
        """
        args = tuple(map(as_int, args))
        kwargs = {name: as_int(value) for name, value in kwargs.items()}
        if not kwargs.keys() <= {*names, *_OF_KERAS}:
            check_known(type(self), kwargs, [*names, *_taken_by_bases(type(self))] if takes_others else names)
        bound = _bound(signature, names, self, args, kwargs)
        check_true_or_false(**{name: bound.arguments[name] for name in switches})
        _check_dtype(kwargs.get("dtype"))
        for name in names:
            setattr(self, name, bound.arguments[name])
        if group is not None:
            check_fields(group, self)
        # A subclass calls this constructor inside its own. Only the outermost one ends with a complete layer.
        outermost = vars(self).setdefault("_txl_made_by", bound) is bound
        # A model passes its values to its network, which does not need to check them again.
        with already_checked(group, self) if group is not None else contextlib.nullcontext():
            init(self, *args, **{name: value for name, value in kwargs.items() if name not in not_of_body})
        if outermost:
            del vars(self)["_txl_made_by"]
            if hasattr(self, "settle"):
                self.settle([bound.arguments[name] for name in names])
        if isinstance(self, keras.Layer):
            _check_policy(self)
        if not getattr(self, "trainable", True):  # a file of a frozen layer; Keras does not pass it on to the parts
            for part in self._flatten_layers(include_self=False, recursive=False):
                part.trainable = False

    vars(call).update(__signature__=signature, stored=names, group=group)
    return cast(Init, call)


def _bound(
    signature: inspect.Signature, names: Sequence[str], x: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> inspect.BoundArguments:
    """The arguments of the constructor of `x`, with defaults. Raises CallError if they do not fit the signature.

    Args:
        signature: signature of the constructor.
        names: its parameters, without `self` and `**kwargs`.
        x: the new layer or model.
        args, kwargs: the arguments.
    """
    try:
        bound = signature.bind(x, *args, **kwargs)
    except TypeError as error:
        hint = ""
        if "too many positional" in str(error):
            by_name = [name for name in names if signature.parameters[name].kind is inspect.Parameter.KEYWORD_ONLY]
            by_position = [name for name in names if name not in by_name]
            hint = f": {', '.join(by_position) or 'none'} may be given by position, "
            hint += f"{', '.join(by_name) or 'others'} by name"
        called = type(x).__name__
        raise CallError(called, list(args), list(names), f"{called}: {error}{hint}") from None
    bound.apply_defaults()
    return bound


def _check_dtype(dtype: Any) -> None:
    """Raises ParameterError unless the argument `dtype` of a constructor is a floating-point dtype, a policy, or None.

    Policies with quantization and maps of policies are left to `_check_policy`.
    """
    if dtype is None:
        return
    allowed = 'a floating-point dtype such as "float32", or a policy such as "mixed_bfloat16"'
    try:
        policy: Any = keras.dtype_policies.get(dtype)
        dtypes = [policy.compute_dtype, policy.variable_dtype]
    except (ValueError, TypeError, AttributeError):  # Keras knows no such policy
        raise ParameterError("dtype", dtype, allowed) from None
    if not all(keras.backend.is_float_dtype(each) for each in dtypes):
        raise ParameterError("dtype", dtype, allowed)


def _check_policy(layer: keras.Layer) -> None:
    """Raises ParameterError if the dtype of a new layer is one with quantization, or a map for more than one layer.

    A layer computes with tensors of its parts, so all of them must have one policy. A map without entries is one.
    """
    policy = layer.dtype_policy
    if policy.quantization_mode is not None:
        raise ParameterError("dtype", policy.name, "a policy without quantization")
    is_map = isinstance(policy, keras.dtype_policies.DTypePolicyMap)
    has_entries = is_map and len(policy) > 0 and bool(layer._flatten_layers(include_self=False))
    if has_entries or (is_map and isinstance(layer, keras.Model)):
        allowed = "one policy for a layer or model and all its parts"
        raise ParameterError("dtype", "DTypePolicyMap", allowed, f"dtype must be {allowed}, got a DTypePolicyMap")


def check_known(cls: type, arguments: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raises UnknownArgumentError if an argument of a constructor is not one of the `known` names."""
    known = list(dict.fromkeys(known))
    unknown = {name: value for name, value in arguments.items() if name not in known and name not in _OLD}
    if unknown:
        name, value = next(iter(unknown.items()))
        message = f"Unrecognized keyword arguments passed to {cls.__name__}: {brief(unknown)}."
        message += f"{did_you_mean(name, known)} It takes {', '.join(known)}"
        raise UnknownArgumentError(name, value, known, message)


def _taken_by_bases(cls: type) -> list[str]:
    """Names that `**kwargs` of a constructor may contain: the arguments of the base classes, and of Keras's layers."""
    inits = [(base.__module__, vars(base).get("__init__")) for base in cls.__mro__[1:]]
    stored_arguments = [name for _, init in inits for name in getattr(init, "stored", ())]
    foreign_inits = [
        init for module, init in inits if init is not None and not module.startswith(("txl_tf.", "keras."))
    ]
    return [*stored_arguments, *(name for init in foreign_inits for name in keywords_of(init)), *_OF_KERAS]


def values_of(x: Any, names: Iterable[str]) -> dict[str, Any]:
    """`{name: attribute}` for these names of attributes."""
    return {name: getattr(x, name) for name in names}


def stored_names(cls: type) -> list[str]:
    """Names of the arguments that the constructors of a class and of its bases store."""
    return [name for base in cls.__mro__ for name in getattr(vars(base).get("__init__"), "stored", ())]


def own_arguments(cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> frozenset[str]:
    """Names of the arguments of a user's constructor that have other values than their defaults.

    Arguments in `*args` and `**kwargs` of the constructor do not count. For a class with the library's constructor, or
    if the arguments do not fit the constructor, there are none.
    """
    init: Any = cls.__init__
    if (getattr(init, "__module__", None) or "").startswith("txl_tf."):
        return frozenset()
    try:
        bound = inspect.signature(init).bind(None, *args, **kwargs)
    except TypeError:
        return frozenset()
    _, *parameters = bound.signature.parameters.values()
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    given = {x.name: x.default for x in parameters if x.kind not in several and x.name in bound.arguments}
    return frozenset(name for name, default in given.items() if not _is(bound.arguments[name], default))


def _is(value: Any, default: Any) -> bool:
    """Whether a value is equal to a default. Arrays of several elements are not, unless they are the same object."""
    try:
        return value is default or bool(value == default)
    except (TypeError, ValueError):
        return False


def check_own_arguments(layer: Any) -> None:
    """Raises ParameterError if a configuration would not have an argument that a user's subclass was made with.

    If the subclass has its own `get_config` or `from_config`, nothing is checked.
    """
    in_config = {*stored_names(type(layer)), *_OF_KERAS, *PART_CLASSES}
    lost = sorted(vars(layer).get("_txl_given", frozenset()) - in_config)
    if lost and not is_overridden(layer, "get_config") and not is_overridden(layer, "from_config"):
        allowed = f"in the result of get_config of {type(layer).__name__}"
        message = (
            f"{lost[0]} of {layer.name} must be {allowed}: a file or clone would not have it. Override get_config so "
            f"that it returns {{**super().get_config(), {lost[0]!r}: ...}}"
        )
        raise ParameterError(lost[0], None, allowed, message)


def arguments_of(layer: Any) -> dict[str, Any]:
    """Returns `{name: value}` of the stored arguments of a layer or model, with serialized initializers.

    Lists are copies, which may change.
    """
    values = {name: unfixed(value) for name, value in values_of(layer, stored_names(type(layer))).items()}
    for name, value in values.items():
        if name.endswith(_INITIALIZERS) and callable(value):
            values[name] = keras.initializers.serialize(keras.initializers.get(value))
    return values
