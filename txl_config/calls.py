"""Checks of the arguments of a call by the signature of the function: their names, their number and their types.

```python
@checked_call
def repeat(text: str, times: int = 2) -> str: ...

repeat("a", 2.5)    # ArgumentTypeError: times must be an integer, got 2.5
repeat()            # CallError: repeat(): missing a required argument: 'text'. Write repeat(text)
repeat("a", n=3)    # UnknownArgumentError: repeat() got an unexpected keyword argument 'n'. It takes text, times
```
"""

from __future__ import annotations

import collections.abc
import functools
import inspect
import numbers
import os
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

from txl_config.checks import is_integer, is_number
from txl_config.errors import ArgumentTypeError, CallError, UnknownArgumentError, UnknownNameError
from txl_config.schema import check_names, keywords_of, nearest_name

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Class = TypeVar("_Class", bound=type)

# Annotations, such as `Sequence[int]`, whose arguments are described as "a list of ...".
_LISTS = (list, tuple, collections.abc.Iterable, collections.abc.Sequence, collections.abc.Collection)
_TEXTS = (str, bytes)


def known_names(function: _Function) -> _Function:
    """Decorator: a call with unknown, missing or too many arguments raises an error.

    The known arguments are those that the signature names. Other names are errors even if it has `**kwargs`. So the
    decorator is not for a function that passes `**kwargs` on.

    Raises, in a call:
        UnknownArgumentError: the function has no such argument.
        CallError: a required argument is missing, or there are too many.
    """
    known = keywords_of(function)
    called = _name_of(function)
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        check_names(called, kwargs, known)
        bind_call(called, signature, args, kwargs)
        return function(*args, **kwargs)

    return typing.cast("_Function", with_signature(call, signature))


def checked_call(function: _Function) -> _Function:
    """Decorator: a call with unknown, missing or too many arguments, or with one of another type, raises an error.

    The annotations give the types: int, float, bool, str, bytes, paths, `None`, lists and iterables of these, and
    classes of this library. Arguments with other annotations, such as tensors, are not checked. The elements of lists,
    tuples and sets are checked, those of other iterables are not. Only a `Collection` may be a set, which has no order.

    Raises, in a call:
        UnknownArgumentError: the function has neither such an argument nor `**kwargs`.
        CallError: see `known_names`.
        ArgumentTypeError: an argument has another type.
    """
    called = _name_of(function)
    signature = inspect.signature(function)

    @functools.cache  # at the first call, because annotations may name classes that are defined later
    def rules() -> dict[str, _Kind]:
        hints = typing.get_type_hints(function)
        kinds = {name: _kind_of(hint) for name, hint in hints.items() if name != "return"}
        return {name: kind for name, kind in kinds.items() if kind is not None}

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        arguments = bind_call(called, signature, args, kwargs).arguments
        for name, kind in rules().items():
            if name in arguments and not kind.has(arguments[name]):
                raise ArgumentTypeError(name, arguments[name], kind.name)
        return function(*args, **kwargs)

    return typing.cast("_Function", with_signature(call, signature))


def with_signature(call: Callable[..., Any], signature: inspect.Signature) -> Callable[..., Any]:
    """Gives `call`, the function that a decorator returns, a signature, and removes its attribute `__wrapped__`.

    `tf.function` would follow this link to the decorated function: it would call a method without its object and
    without the checks.

    Args:
        call: result of `functools.wraps`. It is changed and returned.
        signature: signature of the decorated function.
    """
    vars(call)["__signature__"] = signature
    del vars(call)["__wrapped__"]
    return call


def checked_init(cls: _Class) -> _Class:
    """Decorator of a class, which it changes: the constructor checks its arguments as `checked_call` does."""
    any_class: Any = cls
    any_class.__init__ = checked_call(any_class.__init__)
    return cls


def _name_of(function: Callable[..., Any]) -> str:
    """Returns the name of a function for errors. A constructor has the name of its class."""
    *classes, name = function.__qualname__.split(".")
    return classes[-1] if name == "__init__" else name


def bind_call(
    called: str, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any], hint: str = ""
) -> inspect.BoundArguments:
    """Returns the arguments of a call by their names, without defaults.

    Args:
        called: name of the function, for errors.
        signature: signature of the function.
        args, kwargs: arguments of the call.
        hint: text to put at the end of an error message.

    Raises:
        UnknownArgumentError: the function has neither such an argument nor `**kwargs`.
        CallError: a required argument is missing, or there are too many. The message shows the shortest call.
    """
    parameters = [parameter for name, parameter in signature.parameters.items() if name not in ("self", "cls")]
    named = [parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD]
    # With equal lengths, there is no `**kwargs`.
    if len(named) == len(parameters) and not kwargs.keys() <= set(named):
        try:
            check_names(called, kwargs, named)
        except UnknownArgumentError as error:
            raise UnknownArgumentError(error.name, error.value, named, f"{error}{hint}") from None
    try:
        return signature.bind(*args, **kwargs)
    except TypeError as error:
        message = f"{called}(): {error}. Write {shortest_call(called, parameters)}{hint}"
        by_position = list(args[len(signature.parameters) - len(parameters) :])  # without `self` or `cls`
        raise CallError(called, by_position, named, message) from None


def shortest_call(called: str, parameters: Iterable[inspect.Parameter]) -> str:
    """Returns a call with the required arguments, as text: "repeat(text)"; "repeat(...)" if none is required.

    An argument that can be given only by name is written as `name=name`.
    """
    required = [parameter for parameter in parameters if parameter.default is parameter.empty]
    arguments = [
        f"{parameter.name}={parameter.name}" if parameter.kind is parameter.KEYWORD_ONLY else parameter.name
        for parameter in required
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    return f"{called}({', '.join(arguments) or '...'})"


def unknown_name(module: str, name: str, known: Iterable[str], elsewhere: Mapping[str, str]) -> UnknownNameError:
    """Returns the error that the `__getattr__` of a module raises for a name that the module does not have.

    The message names the replacement of the name. Without one, it names the most similar name, and its replacement.

    Args:
        module: name of the module.
        name: the name.
        known: names that the module has.
        elsewhere: `{name that the module does not have: what to write instead}`.
    """
    known = list(known)
    replacement = elsewhere.get(name)
    meant = name if replacement is not None else nearest_name(name, [*known, *elsewhere]) or ""
    hint = "" if meant in ("", name) else f" Did you mean '{meant}'?"
    if meant in elsewhere:
        hint += f" Use {elsewhere[meant]}"
    message = f"module '{module}' has no attribute '{name}'.{hint}"
    return UnknownNameError(f"{module}.{name}", name, known if replacement is None else replacement, message)


# -------------------------------------------------------------------------------------------------------------- types


class _Kind(NamedTuple):
    """A type of values.

    Attributes:
        name: the type of one value, for messages, such as "an integer".
        several: the type of several values, for messages, such as "integers".
        has: function that tells whether a value has this type.
    """

    name: str
    several: str
    has: Callable[[Any], bool]


def check_true_or_false(**switches: Any) -> None:
    """Raises ArgumentTypeError, with the name of the argument, unless values are True or False (or 1 or 0)."""
    for name, value in switches.items():
        if not _is_true_or_false(value):
            raise ArgumentTypeError(name, value, _KINDS[bool].name)


def _is_true_or_false(value: Any) -> bool:
    """Whether a value is True, False, 0 or 1, in Python or NumPy."""
    return type(value).__name__ in ("bool", "bool_") or (isinstance(value, numbers.Integral) and value in (0, 1))


def _instance_of(cls: Any) -> Callable[[Any], bool]:
    """Returns a function that tells whether a value is an instance of the class `cls`."""

    def has(value: Any) -> bool:
        return isinstance(value, cls)

    return has


_KINDS: dict[Any, _Kind] = {
    int: _Kind("an integer", "integers", is_integer),
    float: _Kind("a number", "numbers", is_number),
    bool: _Kind("True or False", "True or False", _is_true_or_false),
    str: _Kind("a string", "strings", _instance_of(str)),
    bytes: _Kind("bytes", "bytes", _instance_of(bytes)),
    os.PathLike: _Kind("a path", "paths", _instance_of(os.PathLike)),
    types.NoneType: _Kind("None", "None", _instance_of(types.NoneType)),
}


_PACKAGES = ("txl_config", "txl_programs", "txl_tf")  # values with the classes of these packages are checked


def _kind_of(hint: Any) -> _Kind | None:
    """Returns the `_Kind` that an annotation describes; `None` if values with this annotation are not checked."""
    origin = typing.get_origin(hint)
    inner = typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        kinds = [_kind_of(x) for x in inner]
        known = [kind for kind in kinds if kind is not None]
        if len(known) < len(kinds):
            return None

        def has_one(value: Any) -> bool:
            return any(kind.has(value) for kind in known)

        return _Kind(_either([kind.name for kind in known]), _either([kind.several for kind in known]), has_one)
    if origin is os.PathLike:
        return _KINDS[os.PathLike]
    if origin in _LISTS and inner:
        return _list_of(_kind_of(inner[0]), ordered=origin is not collections.abc.Collection)
    if isinstance(hint, type) and hint.__module__.partition(".")[0] in _PACKAGES:
        article = "an" if hint.__name__[0] in "AEIO" else "a"
        return _Kind(f"{article} {hint.__name__}", f"{hint.__name__}s", _instance_of(hint))
    return _KINDS.get(hint)


def _either(names: list[str]) -> str:
    """Returns the different names as text: "a string, a path or None"."""
    *first, last = dict.fromkeys(names)
    return f"{', '.join(first)} or {last}" if first else last


def _list_of(element: _Kind | None, ordered: bool) -> _Kind | None:
    """Returns the `_Kind` of lists and other iterables whose elements have the `_Kind` `element`.

    It is `None` if `element` is `None`, so that values are not checked. A text is not a list of its characters. If the
    order counts (`ordered`), a set is not a list: in every process, a set of strings has another order.
    """
    if element is None:
        return None

    def has(value: Any) -> bool:
        if isinstance(value, _TEXTS) or not isinstance(value, collections.abc.Iterable):
            return False
        if ordered and isinstance(value, (set, frozenset)):
            return False
        if isinstance(value, (list, tuple, set, frozenset)):
            return all(map(element.has, typing.cast("Iterable[Any]", value)))
        # The elements of other iterables are not checked, because that would use up an iterator. But the dtype of an
        # array shows that it is not a list of strings: "U" and "T" are strings of NumPy, "S" bytes.
        is_array = hasattr(typing.cast("Any", value), "dtype")
        if is_array and "string" in element.several:
            kinds = "UTOS" if "bytes" in element.several else "UTO"
            return getattr(typing.cast("Any", value).dtype, "kind", " ") in kinds
        return True

    return _Kind(f"a list of {element.several}", f"lists of {element.several}", has)
