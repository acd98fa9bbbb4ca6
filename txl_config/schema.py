"""Checks of values from users and from files, by the names and types of the fields of a dataclass.

```python
@dataclasses.dataclass
class Best:
    step: int
    val_loss: float

check_values({"step": 3, "val_loss": "x"}, Best)    # ParameterError: val_loss must be a number, got 'x'
```
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import numbers
import os
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from txl_config.errors import ParameterError, UnknownArgumentError, brief

Check = Callable[[str, Any], None]  # takes the name and the value of an argument, and raises ParameterError

_UNIONS = (typing.Union, types.UnionType)
_BY_NAME = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def check_names(function: str, given: dict[str, Any], known: Iterable[str]) -> None:
    """Raises UnknownArgumentError for the first name that is not in `known`. The error lists the known names.

    Args:
        function: name of the function that was called, for the message.
        given: `{name: value}` of the arguments.
        known: names of the arguments that the function takes.
    """
    known = list(dict.fromkeys(known))
    for name, value in given.items():
        if name not in known:
            takes = f"{did_you_mean(name, known)} It takes {', '.join(known)}"
            message = f"{function}() got an unexpected keyword argument '{name}'.{takes}"
            raise UnknownArgumentError(name, value, known, message)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns " Did you mean 'x'?" with the `known` name that is most similar; empty if no name is similar."""
    nearest = nearest_name(name, known)
    return f" Did you mean '{nearest}'?" if nearest else ""


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """Returns the `known` name that is most similar to `name`; `None` if no name is similar."""
    return next(iter(difflib.get_close_matches(str(name), list(known), 1)), None)


def keywords_of(function: Callable[..., Any]) -> list[str]:
    """Returns the names of the arguments that can be given by name, without `self`."""
    parameters = inspect.signature(function).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind in _BY_NAME and parameter.name != "self"]


def takes_keyword(function: Callable[..., Any], name: str) -> bool:
    """Whether a function takes an argument of this name: it has the argument, or `**kwargs`."""
    parameters = inspect.signature(function).parameters
    return name in parameters or any(x.kind is inspect.Parameter.VAR_KEYWORD for x in parameters.values())


def differing(first: dict[str, Any], second: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Returns `{name: (value in first, value in second)}` for the values that differ.

    `first` must have all names of `second`. A tuple equals a list of its values.
    """
    return {name: (first[name], value) for name, value in second.items() if _as_list(value) != _as_list(first[name])}


def _as_list(value: Any) -> Any:
    """Returns a tuple as the list that JSON makes of it, and any other value as it is."""
    return list(typing.cast("tuple[Any, ...]", value)) if isinstance(value, tuple) else value


# Checks that earlier versions did not make. Their files may hold empty values that these checks refuse.
_ADDED_LATER: set[Check] = set()


def added_later(check: Check) -> Check:
    """Decorator of a check that earlier versions did not make: `check_values` then accepts empty values in files."""
    _ADDED_LATER.add(check)
    return check


def check_left_out(values: dict[str, Any], why: str) -> None:
    """Raises ParameterError for the first value that is given. `None`, False, 0 and empty values count as left out.

    Args:
        values: `{name: value}`.
        why: why the values must be left out: the end of the message.
    """
    for name, value in values.items():
        if value:
            message = f"{name} must be left out, got {brief(value)}: {why}"
            raise ParameterError(name, value, "left out", message)


def check_values(values: Any, *groups: type[Any], partial: bool = False, prefix: str = "") -> None:
    """Checks the keys and values of a JSON object.

    Unknown keys are errors, and so are missing keys without a default. An empty string or list is accepted if its check
    was added later, see `added_later`.

    Args:
        values: the object, a dictionary.
        *groups: dataclasses. Their fields are the keys of the object. A field may have its own check in its metadata,
            see `txl_config`. A field whose type is a dataclass is an object inside the object.
        partial: whether keys without a default may be missing, too.
        prefix: text that messages put before the name of a key, such as "model.".

    Raises:
        ParameterError: a key or a value is wrong. The message names the key, what was found and what is allowed.
    """
    if not isinstance(values, dict):
        raise ParameterError(prefix.removesuffix(".") or "it", values, "a JSON object")
    fields = {field.name: (field, group) for group in groups for field in dataclasses.fields(group)}
    keys = typing.cast("dict[str, Any]", values)
    for name, value in keys.items():
        if name not in fields:
            unknown = prefix + brief(name).strip("'")
            known = sorted(fields)
            raise ParameterError(unknown, value, known, f"{unknown} is unknown; known are {', '.join(known)}")
    for name, (field, group) in fields.items():
        if name in keys:
            is_empty = isinstance(keys[name], (str, list)) and not keys[name]
            if is_empty and field.metadata.get("check") in _ADDED_LATER:
                continue
            check_field(field, group, keys[name], prefix + name)
        elif not partial and field.default is field.default_factory is dataclasses.MISSING:
            raise ParameterError(prefix + name, None, "given", f"{prefix}{name} is missing")


def check_field(field: dataclasses.Field[Any], group: type[Any], value: Any, name: str) -> None:
    """Checks one value by the type and the check of a field. A field with the default `None` may be `None`.

    Args:
        field: the field.
        group: the dataclass of the field.
        value: the value.
        name: name of the value, for the message.

    Raises:
        ParameterError: the value is wrong.
    """
    if value is None and field.default is None:
        return
    check: Check | None = field.metadata.get("check")
    if not hasattr(check, "choices"):  # otherwise `check` lists the choices, which says more than the type
        kind = _types(group)[field.name]
        if check and _is_beyond_64_bits(value) and int in (kind, *typing.get_args(kind)):
            check(name, value)  # a range says more than the number of bits
        check_type(name, value, kind)
    if check:
        check(name, value)


def check_type(name: str, value: Any, kind: Any) -> None:
    """Raises ParameterError unless a value has a type.

    Args:
        name: name of the value, for the message.
        value: the value. If `kind` is a dataclass: a dictionary with its fields.
        kind: the type: a plain type, a list, a dictionary with names as keys, a union or a dataclass.
    """
    if typing.get_origin(kind) in _UNIONS:
        kinds = typing.get_args(kind)
        if value is None and type(None) in kinds:
            return
        kind = typing.Union[tuple(kind for kind in kinds if kind is not type(None))]  # noqa: UP007 - a computed union
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        check_values(value, typing.cast("type[Any]", kind), prefix=f"{name}.")
        return
    described, is_of = _description_and_test(typing.cast("Any", kind))
    if not is_of(value):
        raise ParameterError(name, value, described + (" of at most 64 bits" if _is_beyond_64_bits(value) else ""))


@functools.cache
def _types(group: type[Any]) -> dict[str, Any]:
    """Returns the types of the fields of a dataclass, by name."""
    return typing.get_type_hints(group)


def _is_integer(value: Any) -> bool:
    """Whether a value is an integer of at most 64 bits. True and False are not."""
    is_whole = not isinstance(value, bool) and isinstance(value, numbers.Integral)
    return is_whole and not _is_beyond_64_bits(value)


def _is_beyond_64_bits(value: Any) -> bool:
    """Whether a value is an integer of more than 64 bits."""
    return isinstance(value, numbers.Integral) and abs(int(value)) >= 1 << 63


def _is_number(value: Any) -> bool:
    """Whether a value is a real number. An integer must have at most 64 bits. True and False are not numbers."""
    return _is_integer(value) if isinstance(value, numbers.Integral) else isinstance(value, numbers.Real)


_KINDS: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    Any: ("anything", lambda value: True),
    int: ("an integer", _is_integer),
    float: ("a number", _is_number),
    bool: ("True or False", lambda value: isinstance(value, bool)),
    str: ("a string", lambda value: isinstance(value, (str, os.PathLike))),
    dict: ("a JSON object", lambda value: isinstance(value, dict)),
    types.NoneType: ("null", lambda value: value is None),
}


@functools.cache
def _description_and_test(kind: Any) -> tuple[str, Callable[[Any], bool]]:
    """Returns how messages describe a type, and a function that tells whether a value has this type."""
    origin = typing.get_origin(kind)
    arguments = typing.get_args(kind)
    if origin in _UNIONS:
        kinds = [_description_and_test(argument) for argument in arguments]
        return " or ".join(described for described, _ in kinds), lambda value: any(is_of(value) for _, is_of in kinds)
    if origin in (list, Sequence, Iterable):
        each, is_of = _description_and_test(arguments[0])
        return f"a list ({each} each)", lambda value: isinstance(value, (list, tuple)) and _all_are(is_of, value)
    if origin is dict:
        each, is_of = _description_and_test(arguments[1])
        return f"a JSON object ({each} each)", lambda value: isinstance(value, dict) and _all_are(is_of, value.values())
    return _KINDS[kind]


def _all_are(is_of: Callable[[Any], bool], values: Any) -> bool:
    """Whether all values pass the test `is_of`."""
    return all(map(is_of, values))
