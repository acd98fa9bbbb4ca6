"""Decorators that check a call by the signature of its function: names, number and types of the arguments."""

import os
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np
import pytest
from helpers import mentions, raises_parameter

from txl_config.calls import bind_call, checked_call, checked_init, known_names, unknown_name
from txl_config.errors import ArgumentTypeError, CallError, UnknownArgumentError, UnknownNameError
from txl_config.training import EvaluationConfig


@checked_call
def joined(text: str, *, times: int = 1, factor: float = 1.0, upper: bool = False) -> str:
    return (text.upper() if upper else text) * int(times * factor)


@checked_call
def read(
    path: str | os.PathLike[str] | None, names: Sequence[str] = (), texts: Iterable[str | bytes] = ()
) -> list[str]:
    return [*names, *map(str, texts)]


@checked_init
class Pair:
    def __init__(self, left: int, right: Any = None) -> None:
        self.sum = left, right

    @checked_call
    def plus(self, other: "Pair") -> "Pair":
        return self

    @classmethod
    @checked_call
    def twice(cls, left: int, **options: Any) -> "Pair":
        return cls(left, left, **options)


@checked_call
def count(texts: Iterable[str] | Collection[str]) -> int:
    return len(list(texts))


def test_sets_have_no_order():
    for given in ({"a", "b"}, frozenset("ab")):
        with raises_parameter("names", given, error=ArgumentTypeError, limit="list"):
            read(None, given)
        with raises_parameter("texts", given, error=ArgumentTypeError, limit="list"):
            read(None, [], given)
        assert count(given) == 2
    assert read(None, {"b": 1, "a": 2}.keys(), iter("ab")) == ["b", "a", "a", "b"]
    with raises_parameter("texts", {1}, error=ArgumentTypeError):
        count({1})


@pytest.mark.skipif(not hasattr(np.dtypes, "StringDType"), reason="NumPy 1 has no such strings")
def test_numpy_s_strings_of_any_length_are_strings():
    texts = np.array(["a", "bc"], np.dtypes.StringDType())
    assert read(None, texts, texts) == ["a", "bc", "a", "bc"]


def test_calls_that_fit_are_those_of_the_function(tmp_path):
    assert joined("ab", times=np.int64(2), factor=np.float32(1.5), upper=np.bool_(True)) == "ABABAB"
    assert joined("ab", factor=2, upper=1) == "ABAB"
    assert read(tmp_path, ["a"], iter(["b"])) == ["a", "b"]
    assert read(None, np.array(["a", "b"])) == ["a", "b"]
    assert read(None, (), np.array([b"a"])) == ["b'a'"]
    assert Pair.twice(3).sum == (3, 3) and Pair(1).plus(Pair(2)).sum == (1, None)


@pytest.mark.parametrize("call, name, value, allowed", [
    (lambda: joined(3), "text", 3, "a string"),
    (lambda: joined("a", times=2.5), "times", 2.5, "an integer"),
    (lambda: joined("a", times=True), "times", True, "an integer"),
    (lambda: joined("a", factor="2"), "factor", "2", "a number"),
    (lambda: joined("a", upper="False"), "upper", "False", "True or False"),
    (lambda: read(3), "path", 3, "a string, a path or None"),
    (lambda: read(None, "abc"), "names", "abc", "a list of strings"),
    (lambda: read(None, ["a", 3]), "names", ["a", 3], "a list of strings"),
    (lambda: read(None, (), "abc"), "texts", "abc", "a list of strings or bytes"),
    (lambda: Pair("1"), "left", "1", "an integer"),
    (lambda: Pair.twice(None), "left", None, "an integer"),
])  # fmt: skip
def test_a_value_of_another_type_is_named(call, name, value, allowed):
    with raises_parameter(name, value, allowed, ArgumentTypeError):
        call()


class Mine:
    """A user's own class, in a module whose name begins as those of the library do."""

    __module__ = "txl_mine.parts"


@checked_call
def evaluated(config: EvaluationConfig | None, mine: Mine | None = None) -> Any:
    return mine


def test_only_classes_of_the_library_are_checked_and_their_article_fits():
    assert evaluated(None, "a duck") == "a duck"
    with raises_parameter("config", 3, "an EvaluationConfig or None", ArgumentTypeError):
        evaluated(3)


@pytest.mark.parametrize("call, name, allowed", [
    (lambda: joined(), "joined", ["text", "times", "factor", "upper"]),
    (lambda: joined("a", 2), "joined", ["text", "times", "factor", "upper"]),
    (lambda: joined("a", text="b"), "joined", ["text", "times", "factor", "upper"]),
    (lambda: Pair(), "Pair", ["left", "right"]),
    (lambda: Pair(1).plus(), "plus", ["other"]),
])  # fmt: skip
def test_missing_and_superfluous_arguments_are_an_error_that_lists_all(call, name, allowed):
    with raises_parameter(name, allowed=allowed, error=CallError):
        call()


def test_an_unknown_name_is_an_error_and_options_pass(monkeypatch):
    with raises_parameter("tims", 2, error=UnknownArgumentError):
        joined("a", tims=2)
    with raises_parameter("middle", 2, ["left", "right"], UnknownArgumentError):
        Pair.twice(1, middle=2)

    @known_names
    def plain(number: int) -> int:
        return number

    assert plain("not checked") == "not checked"
    with raises_parameter("plain", allowed=["number"], error=CallError):
        plain()


def test_the_shortest_call_is_part_of_the_message():
    import inspect

    def function(a, b, c=1, *, d):
        pass

    with pytest.raises(CallError) as raised:
        bind_call("function", inspect.signature(function), (), {}, ". A hint")
    assert str(raised.value).endswith("Write function(a, b, d=d). A hint")


def test_a_name_that_a_module_does_not_have_names_the_place_or_the_nearest_name():
    found = unknown_name("module", "old", ["new"], {"old": "other.new"})
    assert isinstance(found, UnknownNameError) and isinstance(found, AttributeError)
    assert (found.name, found.value, found.allowed) == ("module.old", "old", "other.new")
    assert unknown_name("module", "nwe", ["new"], {}).allowed == ["new"]
    assert mentions(str(unknown_name("module", "nwe", ["new"], {})), "new")
    assert "other.place" in str(unknown_name("module", "formre", ["new"], {"former": "other.place"}))
