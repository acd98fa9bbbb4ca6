"""Values from people and files are checked by the fields of a dataclass; an error names key, found and allowed."""

import dataclasses
from collections.abc import Iterable

import numpy as np
import pytest
from helpers import raises_parameter

from txl_tf.config import at_least
from txl_tf.schema import brief, check_values


@dataclasses.dataclass
class Part:
    level: str = "word"
    special: Iterable[str] = ()


@dataclasses.dataclass
class Example:
    step: int = dataclasses.field(metadata={"check": at_least(0)})
    rate: float
    sizes: list[int]
    names: dict[str, list[str]]
    flag: bool = False
    path: list[str] | str | None = None
    limit: int | None = 5
    part: Part | None = None


GOOD = {"step": 3, "rate": 0.5, "sizes": [1, 2], "names": {"a": ["b"]}}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rate": 1},
        {"rate": np.float32(0.5)},
        {"step": np.int64(4)},
        {"sizes": ()},
        {"path": "x"},
        {"path": ["x", "y"]},
        {"path": None},
        {"limit": None},
        {"part": None},
        {"part": {}},
        {"part": {"special": ["<eos>"]}},
    ],
    ids=str,
)
def test_good_values_pass(changes):
    check_values({**GOOD, **changes}, Example)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"step": "3"}, "step must be an integer, got '3'"),
        ({"step": True}, "step must be an integer, got True"),
        ({"step": 3.0}, "step must be an integer, got 3.0"),
        ({"step": None}, "step must be an integer, got None"),
        ({"step": -1}, "step must be at least 0, got -1"),
        ({"rate": "0.5"}, "rate must be a number, got '0.5'"),
        ({"rate": [1]}, "rate must be a number, got [1]"),
        ({"sizes": [1, "2"]}, "sizes must be a list (an integer each), got [1, '2']"),
        ({"sizes": None}, "sizes must be a list (an integer each), got None"),
        ({"names": ["a"]}, "names must be a JSON object (a list (a string each) each), got ['a']"),
        ({"names": {"a": "b"}}, "names must be a JSON object (a list (a string each) each), got {'a': 'b'}"),
        ({"flag": 1}, "flag must be True or False, got 1"),
        ({"path": 3}, "path must be a list (a string each) or a string, got 3"),
        ({"limit": "x"}, "limit must be an integer, got 'x'"),
        ({"part": []}, "part must be a JSON object, got []"),
        ({"part": {"level": 3}}, "part.level must be a string, got 3"),
        ({"part": {"special": "<eos>"}}, "part.special must be a list (a string each), got '<eos>'"),
        ({"part": {"levle": "x"}}, "part.levle is unknown; known are level, special"),
        ({"stpe": 1}, "stpe is unknown; known are flag, limit, names, part, path, rate, sizes, step"),
        ({"\x1b[2J": 1}, r"\x1b[2J is unknown; known are flag, limit, names, part, path, rate, sizes, step"),
    ],
    ids=str,
)
def test_a_bad_value_is_one_clear_error(changes, message):
    with pytest.raises(ValueError) as error:
        check_values({**GOOD, **changes}, Example)
    assert str(error.value) == message


def test_keys_without_default_may_be_missing_only_from_a_part():
    with raises_parameter("rate", None):
        check_values({"step": 3}, Example)
    check_values({"step": 3}, Example, partial=True)
    with raises_parameter("in.step", "x", "an integer"):
        check_values({"step": "x", "level": "char"}, Example, Part, partial=True, prefix="in.")
    for value in ([], "x", None, 3):
        with raises_parameter("it", value, "a JSON object"):
            check_values(value, Example)


def test_what_a_message_shows_is_short_and_visible():
    nested = [1]
    for _ in range(60):  # written out it would have 2 ** 60 ones
        nested = [nested, nested]
    broad = 1
    for _ in range(8):
        broad = [broad] * 9
    for value in ("x" * 10**7, b"x" * 10**7, ["x" * 300] * 10**5, nested, broad, {"x" * 10**6: "y" * 10**6}):
        assert len(brief(value)) < 1500
    assert brief("a\x1b[31m\u202e\n") == r"'a\x1b[31m\u202e\n'"
