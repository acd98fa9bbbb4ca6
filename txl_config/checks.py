"""Groups of hyper-parameters: checks of their values, `option` for a field, and `Config`, the base of all groups."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import numbers
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar, cast, dataclass_transform

from txl_config.errors import ParameterError, brief
from txl_config.schema import Check, added_later, check_field


def at_least(least: int, most: int | None = None) -> Check:
    """A check for integers: `least` or more and, if `most` is given, not above it."""

    def check(name: str, value: Any) -> None:
        """Raises ParameterError unless the value is an integer within the bounds."""
        if not is_integer(value):
            raise ParameterError(name, value, "an integer")
        if value < least:
            raise ParameterError(name, value, f"at least {least}")
        if most is not None and value > most:
            raise ParameterError(name, value, f"at most {most}")

    return check


class _OneOf:
    """A check: the value must be one of several strings.

    Attributes:
        choices: the strings that are allowed. The flag of the hyper-parameter accepts only these.
        more: the end of the error, after the choices.
    """

    def __init__(self, choices: Collection[str], more: tuple[str, ...] = ()) -> None:
        self.choices = choices
        self.more = more

    def __call__(self, name: str, value: Any) -> None:
        if not isinstance(value, str) or value not in self.choices:
            raise ParameterError(name, value, [*self.choices, *self.more])


class _OneOfOrInitializer(_OneOf):
    """See `one_of_or_initializer`."""

    def __call__(self, name: str, value: Any) -> None:
        if not (isinstance(value, str) and value in self.choices) and keras_initializer(value) is None:
            message = (
                f"{name} must be one of {', '.join(self.choices)}, got {brief(value)}; "
                "or a Keras initializer: an object, its name or its configuration"
            )
            raise ParameterError(name, value, [*self.choices, "a Keras initializer"], message)


def one_of(choices: Collection[str], *more: str) -> Check:
    """A check: the value must be one of the strings `choices`. If `choices` grows later, the check allows more.

    `more` follows the choices in the error, for example to say how `choices` can grow.
    """
    return _OneOf(choices, more)


def one_of_or_initializer(choices: Collection[str]) -> Check:
    """A check: the value must be one of the strings `choices`, or a Keras initializer, see `keras_initializer`."""
    return _OneOfOrInitializer(choices)


def keras_initializer(value: Any) -> Callable[..., Any] | None:
    """Returns the Keras initializer that a value stands for; `None` if it stands for none.

    Args:
        value: an initializer or another callable, a class of initializers, or the name or the configuration of an
            initializer. All other values stand for none.
    """
    # Imported here, because it takes seconds, and programs should read their flags first. It has no stubs.
    import keras  # pyright: ignore[reportMissingTypeStubs]

    initializers: Any = keras.initializers  # Keras has no types for the functions below
    saving: Any = keras.saving
    if isinstance(value, dict):
        configuration: dict[str, Any] = dict(cast("dict[str, Any]", value))  # a copy, because Keras wraps dictionaries
        # A configuration from a file may name any module, but only classes that are registered are used.
        if configuration.get("module") not in (None, "keras.initializers"):
            if saving.get_registered_object(configuration.get("registered_name")) is None:
                return None
        value = configuration
    if not isinstance(value, str | dict) and not callable(value):
        return None
    try:
        initializer = initializers.get(value)
    except (ValueError, TypeError, KeyError, AttributeError):  # no initializer has this name or configuration
        return None
    is_initializer = isinstance(initializer, keras.initializers.Initializer)
    # Any function may be an initializer. But a name, a configuration or a class may stand for another object of Keras.
    return initializer if is_initializer or not isinstance(value, str | dict | type) else None


class _Satisfies:
    """See `satisfies`.

    Attributes:
        test, what: the arguments of `satisfies`, for code that makes its own errors.
    """

    def __init__(self, test: Callable[[Any], Any], what: str) -> None:
        self.test = test
        self.what = what

    def __call__(self, name: str, value: Any) -> None:
        if not self.test(value):
            shown: Any = list(cast("tuple[Any, ...]", value)) if isinstance(value, tuple) else value
            raise ParameterError(name, value, self.what.removeprefix("be "), f"{name} must {self.what}, got {shown}")


def satisfies(test: Callable[[Any], Any], what: str) -> Check:
    """A check: `test(value)` must be true. Otherwise the error says: name must `what`, got value."""
    return _Satisfies(test, what)


def all_of(*checks: Check) -> Check:
    """A check that calls all `checks`, one after the other."""

    def check(name: str, value: Any) -> None:
        for each in checks:
            each(name, value)

    return check


@added_later
def not_empty(name: str, value: Any) -> None:
    """A check: a name, such as that of a file, must not be empty. A list must have names, none of which may be empty.

    An empty name comes from a command line that uses a variable of the shell that is not set.
    """
    names = cast("Sequence[Any]", value) if isinstance(value, (list, tuple)) else [value]
    if not names or any(name == "" for name in names):
        raise ParameterError(name, value, "a name that is not empty, or left out")


def is_integer(value: Any) -> bool:
    """Whether a value is an integer of Python or NumPy. True and False are not."""
    return not isinstance(value, bool) and isinstance(value, numbers.Integral)


def as_int(value: Any) -> Any:
    """Returns a NumPy integer as an int, also inside a list or a tuple. It returns any other value as it is."""
    if type(value) in (list, tuple) and any(as_int(each) is not each for each in value):
        return type(value)(map(as_int, value))
    return int(value) if is_integer(value) and not isinstance(value, int) else value


def check_integer(name: str, value: Any, least: int, most: int = 2**31 - 1) -> None:
    """Raises ParameterError if `value` is not an integer from `least` to `most`."""
    if not is_integer(value) or not least <= value <= most:
        raise ParameterError(name, value, f"an integer from {least} to {most}")


def is_number(value: Any) -> bool:
    """Whether a value is a real number of Python or NumPy. True and False are not."""
    return not isinstance(value, bool) and isinstance(value, numbers.Real)


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

# Far above any real model. The bounds keep a wrong number in a file from taking all memory.
LAYERS = at_least(1, 10_000)
WIDTH = at_least(1, 1 << 18)
SYMBOLS = at_least(1, (1 << 31) - 1)
LENGTH = at_least(1, 1 << 20)
MEMORY = at_least(0, 1 << 20)
EVEN_SIZE = all_of(WIDTH, satisfies(lambda value: value % 2 == 0, "be even (half sines, half cosines)"))


def check_bins(n_token: int, d_embed: int, cutoffs: Sequence[int], div_val: int) -> None:
    """Raises ParameterError unless every cluster of the vocabulary has at least one word and one dimension.

    Args:
        n_token: size of the vocabulary.
        d_embed: width of the embeddings in the first cluster.
        cutoffs: first word of each later cluster.
        div_val: factor by which the embeddings become narrower from cluster to cluster.
    """
    at_least(1)("n_token", n_token)
    at_least(1)("d_embed", d_embed)
    at_least(1)("div_val", div_val)
    given: Any = cutoffs
    if not isinstance(given, Sequence):
        raise ParameterError("cutoffs", cutoffs, "a list of integers")
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


def check_parallel_parts(parallel_parts: int | None, static_shapes: bool | None, jit_compile: bool | str) -> None:
    """Raises ParameterError if there are parallel parts with static shapes or with XLA.

    Args: those of `compile` of a language model; or `None`, for a value that the program chooses.
    """
    if parallel_parts is not None and parallel_parts > 1 and (static_shapes or jit_compile):
        allowed = "1 with static_shapes or jit_compile"
        message = f"parallel_parts must be {allowed}, got {parallel_parts}: XLA computes one part after the other"
        raise ParameterError("parallel_parts", parallel_parts, allowed, message)


# ----------------------------------------------------------------------------------------------------------- groups

_REQUIRED = dataclasses.MISSING
Group = TypeVar("Group")


def option(
    help: str,
    check: Check | None = None,
    *,
    default: Any = _REQUIRED,
    flag: Any = _REQUIRED,
    free: bool | Callable[[Any], bool] = False,
) -> Any:
    """Defines a hyper-parameter, as `dataclasses.field` defines a field.

    Args:
        help: the flag's help text.
        check: function that raises ParameterError for a wrong value, see `Check`. If the default is `None`, the
            function is not called for the value `None`.
        default: the default of the argument. Without it, the argument is required.
        flag: default of the flag. By default, it is `default`, or `None` if the argument is required.
        free: whether a trained model may change the value, because its weights fit every value; or a function that
            takes the group and returns whether the model may.
    """
    flag = (None if default is _REQUIRED else default) if flag is _REQUIRED else flag
    return dataclasses.field(default=default, metadata={"help": help, "check": check, "flag": flag, "free": free})


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(option, dataclasses.field))
def group(cls: type[Group]) -> type[Group]:
    """Decorator that makes a class of hyper-parameters a frozen dataclass. Its fields are defined by `option`."""
    return dataclasses.dataclass(frozen=True, kw_only=True)(cls)


def unless(**values: Any) -> Callable[[Any], bool]:
    """A function for `free`: whether the group has none of these values, which are given by name."""
    return lambda config: all(getattr(config, name, None) != value for name, value in values.items())


def where(**values: Any) -> Callable[[Any], bool]:
    """A function for `free`: whether the group has one of these values, which are given by name."""
    return lambda config: any(getattr(config, name, None) == value for name, value in values.items())


# `{name: (value, (type, check))}` of hyper-parameters that have been checked, see `already_checked`.
_checked: contextvars.ContextVar[dict[str, tuple[Any, Any]] | None] = contextvars.ContextVar("checked", default=None)


def check_fields(group: type[Config], values: Any) -> None:
    """Checks those attributes of an object, such as a network, that are hyper-parameters of `group`.

    The object must have all of them. The function skips values that have been checked, see `already_checked`.

    Raises:
        ParameterError: a value is wrong.
    """
    known = _checked.get() or {}
    for field in dataclasses.fields(group):
        value = getattr(values, field.name)
        checked_value, checked_rule = known.get(field.name, (None, None))
        if checked_value is not value or checked_rule != _rule_of(field):
            check_field(field, group, value, field.name)


@contextlib.contextmanager
def already_checked(group: type[Config], values: Any) -> Generator[None]:
    """Within the block, `check_fields` skips hyper-parameters of `group` whose values are the same objects in `values`.

    A group checks its values when it is created. The model that is made from it, and the network in the model, get the
    same values. In this block, they check only those that differ.
    """
    rules = {field.name: (getattr(values, field.name), _rule_of(field)) for field in dataclasses.fields(group)}
    token = _checked.set(rules)
    try:
        yield
    finally:
        _checked.reset(token)


def _rule_of(field: dataclasses.Field[Any]) -> tuple[Any, Any]:
    """Returns the type and the check of a hyper-parameter."""
    return field.type, field.metadata["check"]


@group
class Config:
    """A group of hyper-parameters. Its constructor raises ParameterError for a wrong value."""

    removed: ClassVar[Mapping[str, Any]] = {}  # names that earlier versions had -> the only value that a file may have

    def __post_init__(self) -> None:
        for name in self.names():
            object.__setattr__(self, name, as_int(getattr(self, name)))  # the class is frozen
        check_fields(type(self), self)

    @classmethod
    def names(cls) -> list[str]:
        """The names of the hyper-parameters."""
        return [field.name for field in dataclasses.fields(cls)]

    @property
    def free(self) -> list[str]:
        """The names of the hyper-parameters that a trained model may change, because its weights fit every value."""
        return [field.name for field in self.free_fields(self)]

    @classmethod
    def free_fields(cls, values: Any) -> list[dataclasses.Field[Any]]:
        """The fields that are `free` for `values`, a group or a network that has the fields as attributes."""
        free = {field: field.metadata["free"] for field in dataclasses.fields(cls)}
        return [field for field, test in free.items() if (test(values) if callable(test) else test)]

    def to_dict(self) -> dict[str, Any]:
        """Returns `{name: value}`, as `config.json` stores it."""
        return {name: getattr(self, name) for name in self.names()}

    @classmethod
    def without_removed(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the values of a file without the hyper-parameters that were removed from the group.

        Raises:
            ParameterError: a removed hyper-parameter has a value that this version does not implement.
        """
        for name, only in cls.removed.items():
            if values.get(name, only) != only:
                message = f"{name} must be {only!r}, got {brief(values[name])}: other values were removed from txl_tf"
                raise ParameterError(name, values[name], [only], message)
        return {name: value for name, value in values.items() if name not in cls.removed}
