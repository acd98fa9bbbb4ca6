"""Lines that are answered as they come: each in its place, or what is wrong with it."""

import os
import time

import numpy as np
import pytest
from helpers import mentions, raises_naming, raises_parameter

from txl_programs import printing
from txl_tf.data import lines
from txl_tf.data.line_files import _lines_with_ends
from txl_tf.data.lines import LineError, answers, arriving, as_json, in_blocks, lines_in, sentence_of, text_of


def encode(line):
    if not line:
        raise ValueError("text, line 1 is empty")
    if line == "?":
        raise ValueError("no answer")
    return int(line)


def doubled(items):
    assert all(isinstance(item, int) for item in items)
    return [2 * item for item in items]


def test_answers_are_in_their_places_beside_what_is_wrong():
    found = list(answers(["1", "", "3", "?", "text"], encode, doubled, "in.txt", strict=False, most=2))
    assert [x for x in found if not isinstance(x, LineError)] == [2, 6]
    errors = found[1], found[3], found[4]
    assert [(error.number, error.text) for error in errors] == [(2, ""), (4, "?"), (5, "text")]
    assert [error.reason for error in errors[:2]] == ["line 2 is empty", "line 4: no answer"]
    assert str(errors[0]) == "in.txt, line 2 is empty" and isinstance(errors[0], ValueError)
    assert mentions(errors[2].reason, 5)


def test_the_way_out_of_an_error_goes_with_it():
    def encode(line):
        error = ValueError("text, line 1: 'é' is not known")
        error.add_note("Train with min_freq=2.")
        raise error

    (found,) = answers(["é"], encode, doubled, strict=False)
    assert printing.message_of(found) == "text, line 1: 'é' is not known\nTrain with min_freq=2."


def test_strict_stops_at_the_first_and_blocks_before_it_are_answered():
    found = answers(["1", "2", "", "?"], encode, doubled, strict=True, most=2)
    assert [next(found), next(found)] == [2, 4]
    with raises_naming(LineError, "text", 3):
        next(found)


def test_lines_have_the_numbers_that_are_given():
    found = list(answers(["", "1", ""], encode, doubled, strict=False, numbers=[3, 7, 9]))
    assert [found[0].number, found[1], found[2].number] == [3, 2, 9]


def test_an_answer_comes_at_a_pause_and_no_line_is_read_before_it_is_needed():
    read = []
    given = (read.append(line) or line for line in ["1", None, "2", "3", None, "4"])
    found = answers(given, encode, doubled, most=2)
    assert next(found) == 2 and read == ["1", None]
    assert next(found) == 4 and read[2:] == ["2", "3"]
    assert list(found) == [6, 8]


@pytest.mark.parametrize("given", ["abc", {"a", "b"}], ids=["text", "set"])
def test_one_line_is_not_taken_for_many_nor_a_set_for_a_list(given):
    with raises_parameter("lines", given):
        next(in_blocks(given))


@pytest.mark.parametrize(
    "given, value",
    [(["a", None, "b"], None), (np.array(["a", None], object), None), (iter(["a", 3]), 3), (["a", ["b"]], ["b"])],
)
def test_what_is_no_line_is_refused_because_later_answers_would_shift(given, value):
    with raises_parameter("lines", value, "strings or bytes") as caught:
        list(in_blocks(given))
    assert "number 2 " in str(caught.value)


def test_pieces_are_cut_into_lines():
    assert list(lines_in([b"a\nb", b"c", None, b"\n\n\xff", b""])) == [b"a", None, b"bc", b"", b"\xff"]
    pieces = [b"a\rb\r", None, b"\nc\r\n", b"\nd\n\r", b"\re"]
    assert list(lines_in(pieces, any_end=True)) == [b"a", b"b", None, b"c", b"", b"d", b"", b"", b"e"]
    assert list(lines_in(pieces)) == [None, b"a\rb\r", b"c\r", b"", b"d", b"\r\re"]


@pytest.mark.parametrize("any_end", [False, True])
def test_a_long_line_is_cut_in_linear_time(any_end):
    """Joining all pieces so far at every piece would copy 50 GB."""
    pieces = [b"x" * 1024] * 10_000
    started = time.process_time()
    assert [*map(len, lines_in([*pieces, b"\n"], any_end))] == [10_240_000]
    assert [*map(len, _lines_with_ends([*pieces, b"\r\n"], any_end))] == [10_240_002]
    assert time.process_time() - started < 2


def test_a_line_is_text_without_its_end():
    assert [text_of("é\n"), text_of("é\n".encode()), text_of(b"\n"), text_of("\r\n")] == ["é", "é", "", "\r"]
    assert text_of(b"\xffa", "surrogateescape") == "\udcffa" and sentence_of(b"a b\r\n") == "a b"
    with raises_parameter("text", None):
        text_of(b"ab\xff")
    with raises_parameter("text", 3, "a string or bytes"):
        text_of(3)
    with raises_parameter("text", "a\nb\nc"):
        sentence_of("a\nb\nc")


@pytest.mark.skipif(os.name != "posix", reason="a pipe says that nothing comes where select can watch it")
def test_a_pipe_has_a_pause_wherever_nothing_more_comes():
    reader, writer = os.pipe()
    turns = []
    with os.fdopen(reader, "rb") as pipe:
        found = lines_in(arriving(pipe, lambda: turns.append(1)))
        os.write(writer, b"a\nb")
        assert [next(found), next(found)] == [b"a", None]
        os.write(writer, b"c\nd\n")
        os.close(writer)
        assert [line for line in found if line is not None] == [b"bc", b"d"]
    assert len(turns) == 3


def test_json_shows_single_bytes_as_text():
    assert as_json({"é": "\udcff\n"}) == '{"é": "\\\\xff\\n"}\n'


def test_block_sizes_end_blocks(monkeypatch):
    monkeypatch.setattr(lines, "BLOCK_SIZE", 4)
    assert list(in_blocks(iter([b"ab", b"c", b"de", None, b"f"]), 2)) == [[b"ab", b"c"], [b"de"], [b"f"]]
    assert list(in_blocks([b"abcde", b"c"])) == [[b"abcde"], [b"c"]]


def test_numbers_must_be_as_many_as_lines():
    for numbers in ([7], []):
        with raises_parameter("numbers", None):
            list(answers(["a", "b"], str, list, numbers=numbers))
    assert list(answers(["a", "b"], str, list, numbers=[7, 9])) == ["a", "b"]


@pytest.mark.parametrize("lines", [None, 3])
def test_lines_must_be_a_list_or_an_iterator(lines):
    with raises_parameter("lines", lines):
        list(answers(lines, str, list))


def test_a_line_with_a_zero_byte_is_an_error_except_among_any_bytes():
    for read in (text_of, sentence_of):
        with raises_parameter("text", allowed="text without zero bytes"):
            read(b"a\0b\n")
        assert read("a\0b\n") == "a\0b"
    assert text_of(b"a\0\xff", "surrogateescape") == "a\0\udcff" and text_of(b"a\0b", zeros=True) == "a\0b"
    utf16 = "abc\nabd\nabe".encode("utf-16-le").split(b"\n")
    found = list(answers(utf16, text_of, list, strict=False))
    assert [error.number for error in found] == [1, 2, 3]
    notes = {note for error in found for note in getattr(error, "__notes__", [])}
    assert len(notes) == 1 and mentions(notes.pop(), "utf-16le")
