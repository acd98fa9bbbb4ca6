"""Groups of hyper-parameters: checks of their values, `option` for a field, and `Config`, the base of all groups."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, TypeVar, dataclass_transform

from txl_tf.errors import ParameterError, brief
from txl_tf.schema import check_field


def at_least(least: int, most: int | None = None) -> Callable:
    """A check for integers: `least` or more, and not above `most`."""

    def check(name: str, value: Any) -> None:
        if not is_integer(value):
            raise ParameterError(name, value, "an integer")
        if value < least:
            raise ParameterError(name, value, f"at least {least}")
        if most is not None and value > most:
            raise ParameterError(name, value, f"at most {most}")

    return check


def one_of(choices: Iterable[str]) -> Callable:
    """A check for strings, whose `choices` a flag takes, too."""

    def check(name: str, value: Any) -> None:
        if value not in list(choices):
            raise ParameterError(name, value, list(choices))

    check.choices = choices
    return check


def one_of_or_initializer(choices: Iterable[str]) -> Callable:
    """A check for one of the strings `choices`, which a flag takes, or a Keras initializer in any form."""

    def check(name: str, value: Any) -> None:
        if not (isinstance(value, str) and value in check.choices) and keras_initializer(value) is None:
            message = (
                f"{name} must be one of {', '.join(check.choices)}, got {brief(value)}; "
                "or a Keras initializer: an object, its name or its configuration"
            )
            raise ParameterError(name, value, [*check.choices, "a Keras initializer"], message)

    check.choices = list(choices)
    return check


def keras_initializer(value: Any) -> Callable | None:
    """The Keras initializer that an object, a class, a name or a configuration stands for; `None` where it is none."""
    import keras  # slow to import: programs read their flags before

    value = dict(value) if isinstance(value, dict) else value  # without Keras's wrapper of attributes
    if isinstance(value, dict) and value.get("module") not in (None, "keras.initializers"):
        if keras.saving.get_registered_object(value.get("registered_name")) is None:
            return None
    if not isinstance(value, str | dict) and not callable(value):
        return None
    try:
        found = keras.initializers.get(value)
    except (ValueError, TypeError, KeyError, AttributeError):  # a name or a configuration of nothing
        return None
    is_initializer = isinstance(found, keras.initializers.Initializer)
    return found if is_initializer or not isinstance(value, str | dict | type) else None


def satisfies(test: Callable, what: str) -> Callable:
    """A check by a `test` of the value. The error says: name must `what`, got value."""

    def check(name: str, value: Any) -> None:
        if not test(value):
            shown = list(value) if isinstance(value, tuple) else value
            raise ParameterError(name, value, what.removeprefix("be "), f"{name} must {what}, got {shown}")

    return check


def all_of(*checks: Callable) -> Callable:
    """A check that makes several `checks`, one after the other."""

    def check(name: str, value: Any) -> None:
        for each in checks:
            each(name, value)

    return check


def not_empty(name: str, value: Any) -> None:
    """A check: a name of a file or folder, or each of a list, must not be empty. Unset variables of a shell are."""
    names = value if isinstance(value, (list, tuple)) else [value]
    if not names or any(name == "" for name in names):
        raise ParameterError(name, value, "a name that is not empty, or left out")


not_empty.recorded = False  # earlier versions took empty names, and wrote them to config.json


def is_integer(value: Any) -> bool:
    """Whether a value is a whole number of Python's or NumPy's; True and False are none."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether a value is a real number of Python's or NumPy's; True and False are none."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


RATE = satisfies(lambda value: is_number(value) and 0 <= value < 1, "lie in [0, 1)")
SHARE = satisfies(lambda value: is_number(value) and 0 <= value <= 1, "lie in [0, 1]")
FRACTION = satisfies(lambda value: is_number(value) and 0 < value < 1, "be between 0 and 1, both excluded")
POSITIVE = all_of(
    satisfies(lambda value: is_number(value) and value > 0, "be positive"),
    satisfies(lambda value: value < float("inf"), "be finite"),
)
COUNT_OR_ALL = satisfies(lambda value: value == -1 or value > 0, "be 1 or more, or -1 for all")
NOT_NEGATIVE = satisfies(lambda value: is_number(value) and 0 <= value < float("inf"), "be 0 or more")
INIT_SCALE = all_of(NOT_NEGATIVE, satisfies(lambda value: value <= 1000, "be at most 1000"))
RISING = satisfies(
    lambda value: list(value) == sorted(set(value)) and min(value, default=1) >= 1, "be positive and rise"
)
NEVER_FALLING = satisfies(
    lambda value: len(value) > 0 and list(value) == sorted(value) and value[0] >= 1, "be positive and never fall"
)

# No model comes near these. They keep a wrong number in a file from taking all memory.
LAYERS = at_least(1, 10_000)
WIDTH = at_least(1, 1 << 18)
SYMBOLS = at_least(1, (1 << 31) - 1)
LENGTH = at_least(1, 1 << 20)
MEMORY = at_least(0, 1 << 20)
EVEN_SIZE = all_of(WIDTH, satisfies(lambda value: value % 2 == 0, "be even (half sines, half cosines)"))


def check_bins(n_token: int, d_embed: int, cutoffs: Iterable[int], div_val: int) -> None:
    """Raises ParameterError unless `cutoffs` and `div_val` give clusters of at least one word and one dimension."""
    at_least(1)("n_token", n_token)
    at_least(1)("d_embed", d_embed)
    at_least(1)("div_val", div_val)
    if not all(map(is_integer, cutoffs)):
        raise ParameterError("cutoffs", list(cutoffs), "integers")
    ends = [0, *cutoffs, n_token]
    if any(left >= right for left, right in zip(ends, ends[1:], strict=False)):
        allowed = f"increase and lie between 0 and n_token={n_token}"
        message = f"cutoffs must {allowed}, got {list(cutoffs)}"
        raise ParameterError("cutoffs", list(cutoffs), f"numbers that {allowed}", message)
    last = len(ends) - 2
    if d_embed // div_val**last < 1:
        message = (
            f"div_val={div_val} divides d_embed={d_embed} down to width 0 in bin {last} of {last + 1}: "
            f"d_embed must be at least {div_val**last}, or div_val smaller"
        )
        raise ParameterError("d_embed", d_embed, f"at least {div_val**last}", message)


# ----------------------------------------------------------------------------------------------------------- groups

_REQUIRED = dataclasses.MISSING
Group = TypeVar("Group", bound=type)


def option(
    help: str,
    check: Callable | None = None,
    *,
    default: Any = _REQUIRED,
    flag: Any = _REQUIRED,
    free: bool | Callable = False,
) -> Any:
    """A hyper-parameter, as `dataclasses.field` is a field.

    Args:
        help: the flag's help text.
        check: called with name and value, but not for a default of `None`; raises ParameterError.
        default: by name, where type checkers look for it. Without it, the hyper-parameter is required.
        flag: the flag's default where the original program has another.
        free: whether a trained model may change it, since its weights fit every value; or a function of the group that
            says so.
    """
    flag = (None if default is _REQUIRED else default) if flag is _REQUIRED else flag
    return dataclasses.field(default=default, metadata={"help": help, "check": check, "flag": flag, "free": free})


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(option, dataclasses.field))
def group(cls: Group) -> Group:
    """Decorator of a class of hyper-parameters: a frozen dataclass, whose fields type checkers know from `option`."""
    return dataclasses.dataclass(frozen=True, kw_only=True)(cls)


def unless(**values: Any) -> Callable:
    """For `free`: whether a group has none of the `values` of hyper-parameters."""
    return lambda config: all(getattr(config, name, None) != value for name, value in values.items())


def where(**values: Any) -> Callable:
    """For `free`: whether a group has one of the `values` of hyper-parameters."""
    return lambda config: any(getattr(config, name, None) == value for name, value in values.items())


def check_fields(group: type[Config], values: Any) -> None:
    """Checks the attributes of `values`, such as a network, that have the names of the hyper-parameters of `group`."""
    for field in dataclasses.fields(group):
        check_field(field, group, getattr(values, field.name), field.name)


@group
class Config:
    """A group of hyper-parameters."""

    removed: ClassVar[Mapping[str, Any]] = {}  # options of earlier versions -> the only value that files may have

    def __post_init__(self) -> None:
        check_fields(type(self), self)

    @classmethod
    def names(cls) -> list[str]:
        return [field.name for field in dataclasses.fields(cls)]

    @property
    def free(self) -> list[str]:
        """The hyper-parameters that a trained model of these may change, since its weights fit every value."""
        return [field.name for field in self.free_fields(self)]

    @classmethod
    def free_fields(cls, values: Any) -> list[dataclasses.Field]:
        """The fields that are `free` in `values`, a group or a network that has the fields as attributes."""
        free = {field: field.metadata["free"] for field in dataclasses.fields(cls)}
        return [field for field, test in free.items() if (test(values) if callable(test) else test)]

    def to_dict(self) -> dict[str, Any]:
        """`{name: value}`, as `config.json` holds it."""
        return {name: getattr(self, name) for name in self.names()}

    @classmethod
    def without_removed(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Values from a file without the options that were removed.

        Raises:
            ParameterError: such an option has a value that this version does not implement.
        """
        for name, only in cls.removed.items():
            if values.get(name, only) != only:
                message = f"{name} must be {only!r}, got {brief(values[name])}: other values were removed from txl_tf"
                raise ParameterError(name, values[name], [only], message)
        return {name: value for name, value in values.items() if name not in cls.removed}
