"""Checks of values that come from people and from files, by the fields of a dataclass: their names and types.

@dataclasses.dataclass
class Best:
    step: int
    val_loss: float

check_values({"step": 3, "val_loss": "x"}, Best)    # ValueError: val_loss must be a number, got 'x'
"""

from __future__ import annotations

import collections.abc
import dataclasses
import functools
import numbers
import operator
import os
import reprlib
import types
import typing
from typing import Any

_UNIONS = (typing.Union, types.UnionType)

_brief = reprlib.Repr()
_brief.maxstring = _brief.maxother = 200


def brief(value: Any) -> str:
    """`repr` of a value that may come from a stranger: never long, and nothing in it moves a terminal's cursor."""
    text = _brief.repr(value)
    return text if len(text) <= 1000 else f"{text[:1000]}..."


def check_values(values: Any, *groups: type, partial: bool = False, prefix: str = "") -> None:
    """Checks the keys and values of a JSON object.

    Args:
        values: the object, a dictionary.
        *groups: dataclasses, whose fields are its keys. A field may have a check of its own in its metadata, see
            `txl_tf.config`; a field whose type is a dataclass is an object in the object.
        partial: whether keys may be missing that have no default.
        prefix: what messages put before the name of a key.

    Raises:
        ValueError: names the key, what was found and what is allowed.
    """
    if not isinstance(values, dict):
        raise ValueError(f"{prefix.removesuffix('.') or 'it'} must be a JSON object, got {brief(values)}")
    fields = {field.name: (field, group) for group in groups for field in dataclasses.fields(group)}
    for name in values:
        if name not in fields:
            raise ValueError(f"{prefix}{brief(name).strip(chr(39))} is unknown; known are {', '.join(sorted(fields))}")
    for name, (field, group) in fields.items():
        if name in values:
            check_field(field, group, values[name], prefix + name)
        elif not partial and field.default is field.default_factory is dataclasses.MISSING:
            raise ValueError(f"{prefix}{name} is missing")


def check_field(field: dataclasses.Field, group: type, value: Any, name: str) -> None:
    """Checks one value by the type and the check of a field; a field with the default `None` may be `None`."""
    if value is None and field.default is None:
        return
    check = field.metadata.get("check")
    if not hasattr(check, "choices"):  # which say more than their type
        check_type(name, value, _types(group)[field.name])
    if check:
        check(name, value)


def check_type(name: str, value: Any, kind: Any) -> None:
    """Raises ValueError unless `value` is of the type `kind`: a plain type, a list, dictionary, union or dataclass."""
    if typing.get_origin(kind) in _UNIONS:
        kinds = typing.get_args(kind)
        if value is None and type(None) in kinds:
            return
        kind = functools.reduce(operator.or_, (kind for kind in kinds if kind is not type(None)))
    if dataclasses.is_dataclass(kind):
        check_values(value, kind, prefix=f"{name}.")
    elif not _matches(value, kind):
        raise ValueError(f"{name} must be {_describe(kind)}, got {brief(value)}")


@functools.cache
def _types(group: type) -> dict[str, Any]:
    return typing.get_type_hints(group)


def _matches(value: Any, kind: Any) -> bool:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return True
    if origin in _UNIONS:
        return any(_matches(value, argument) for argument in arguments)
    if origin in (list, collections.abc.Iterable):
        return isinstance(value, (list, tuple)) and all(_matches(item, arguments[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(_matches(item, arguments[1]) for item in value.values())
    if kind in (int, float) and isinstance(value, numbers.Integral):
        return not isinstance(value, bool) and abs(int(value)) < 1 << 63
    if kind is float:
        return isinstance(value, numbers.Real)
    if kind is int:
        return False
    if kind is str:
        return isinstance(value, (str, os.PathLike))
    return isinstance(value, kind)


_NAMES = {
    int: "an integer",
    float: "a number",
    bool: "True or False",
    str: "a string",
    dict: "a JSON object",
    types.NoneType: "null",
}


def _describe(kind: Any) -> str:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in _UNIONS:
        return " or ".join(map(_describe, arguments))
    if origin in (list, collections.abc.Iterable):
        return f"a list ({_describe(arguments[0])} each)"
    if origin is dict:
        return f"a JSON object ({_describe(arguments[1])} each)"
    return _NAMES[kind]
