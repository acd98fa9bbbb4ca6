"""The lexicon: the words of a sentence, and the files that words come from."""

import importlib.util
import json
import re
import subprocess

import numpy as np
import pytest
from helpers import ANY, ROOT, raises_parameter, write_text

from txl_tf.data.tagged.lexicon import Lexicon
from txl_tf.errors import ParameterError

GOLDEN = json.loads((ROOT / "tests/goldens/flat/lexicon/config.json").read_text())["sentences"]
WORDS = ["南京", "南京市", "京市", "市长", "长江", "长江大桥", "大桥", "江桥"]
BRIDGE = [
    (0, 1, "南京"),
    (0, 2, "南京市"),
    (1, 2, "京市"),
    (2, 3, "市长"),
    (3, 4, "长江"),
    (3, 6, "长江大桥"),
    (5, 6, "大桥"),
]


def test_words_are_found_by_start_then_end():
    assert Lexicon(WORDS).matches("南京市长江大桥") == BRIDGE
    assert Lexicon(reversed(WORDS)).matches(list("南京市长江大桥")) == BRIDGE
    assert Lexicon(WORDS).matches("") == Lexicon(WORDS).matches([]) == Lexicon(WORDS).matches("南") == []


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("jieba") is None, reason="jieba is not installed")
def test_words_of_jieba_are_found_as_by_the_original():
    jieba = Lexicon.load("jieba")
    assert len(jieba) == 337465 and min(map(len, jieba.words)) == 2
    for case in GOLDEN:
        assert [list(match) for match in jieba.matches(case["sentence"])] == case["words"]


def test_words_are_those_of_every_substring():
    rng = np.random.default_rng(0)
    words = {"".join(rng.choice(list("abc"), rng.integers(2, 6))) for _ in range(60)}
    text = "".join(rng.choice(list("abc"), 200))
    pieces = [(start, end, text[start : end + 1]) for start in range(200) for end in range(start + 1, 200)]
    assert Lexicon(words).matches(text) == [piece for piece in pieces if piece[2] in words]


def test_a_token_of_several_characters_is_one_place():
    lexicon = Lexicon(["ab", "bc", "cd", "abc", "abcd"])
    assert lexicon.matches(["ab", "c", "d"]) == [(0, 1, "abc"), (0, 2, "abcd"), (1, 2, "cd")]
    assert lexicon.matches(["x", "ab", "cd"]) == [(1, 2, "abcd")]
    assert lexicon.matches(["ab"]) == []


@pytest.mark.parametrize(
    "content",
    [
        "长江\n大桥\n",
        "长江 120 ns\n大桥 7 n\n",
        "2 3\n长江 0.1 -2 3e-4\n大桥 1 2 3 \n",
        "\ufeff2 3\r\n长江\t0.1\r\n\r\n  大桥\t1\r\n长江\t2\r\n",
    ],
)
def test_the_first_column_is_the_word(tmp_path, content):
    assert Lexicon.load(write_text(tmp_path / "words", content)).words == ["长江", "大桥"]


@pytest.mark.parametrize(
    "content, words",
    [
        ("New York\nLondon\nWestminster Abbey Road\n", ["New␣York", "London", "Westminster␣Abbey␣Road"]),
        ("New York\t3 nz\nLondon\t5 nz\nOld Town\n", ["New␣York", "London", "Old␣Town"]),
        ("New York 3 nz\nLondon 5\niphone 6 30 n\n长江 ns\n大桥\n", ["New␣York", "London", "iphone␣6", "长江", "大桥"]),
        ("3 2\nNew York 0.1 2e-3\nroom 101 -1 0.5\n2020 1 2\n", ["New␣York", "room␣101", "2020"]),
        ("长江 ns\n大桥 n\n", ["长江", "大桥"]),
        ("new york\nred fox\n", ["new␣york", "red␣fox"]),
        ("长江\u3000\n\u3000大桥\n南京\u30003\n", ["长江", "大桥", "南京"]),
        ("长江\u3000120\u3000ns\n大桥\u30007\n", ["长江", "大桥"]),
        ("10,000\n1,5\n长江\n", ["10,000", "1,5", "长江"]),
        ("近朱者赤，近墨者黑\n一不做，二不休\n", ["近朱者赤，近墨者黑", "一不做，二不休"]),
    ],
)
def test_where_a_word_ends_is_decided_from_the_whole_file(tmp_path, content, words):
    assert Lexicon.load(write_text(tmp_path / "words", content)).words == words


@pytest.mark.parametrize("mark", [",", ";", "|", "，", "/"])
def test_lines_of_csv_are_refused_with_the_command_that_mends_them(tmp_path, mark):
    rest = "n" if mark == "/" else f"3{mark}n"
    path = write_text(tmp_path / "words.csv", f"长江\n大桥{mark}{rest}\n南京市{mark}{rest}\n")
    with pytest.raises(ParameterError) as caught:
        Lexicon.load(path)
    assert (caught.value.name, caught.value.value) == ("lexicon", path) and "line 2: " in str(caught.value)
    command = re.search("(sed .*) leaves", str(caught.value))[1].replace("NEW_FILE", str(tmp_path / "new"))
    subprocess.run(command, shell=True, check=True)
    assert Lexicon.load(str(tmp_path / "new")).words == ["长江", "大桥", "南京市"]


def test_a_space_in_a_word_is_one_in_a_sentence():
    lexicon = Lexicon(["New York", "York␣City"])
    expected = [(0, 7, "New␣York"), (4, 12, "York␣City")]
    assert lexicon.matches("New York City") == lexicon.matches("New␣York␣City") == expected
    assert lexicon.matches(["N", "e", "w", "\t", *"York"]) == expected[:1]


def test_two_numbers_are_words_but_for_a_header(tmp_path):
    assert Lexicon.load(write_text(tmp_path / "words", "2020 5 m\n12 13\n")).words == ["2020", "12"]


def test_short_words_are_named_or_left_out(tmp_path):
    path = write_text(tmp_path / "words", "长江\n桥 1\n\u3000 0.5\n大桥\n")
    with raises_parameter(f"{tmp_path}/words, line 2", "桥"):
        Lexicon.load(path)
    assert Lexicon.load(path, skip_short=True).words == ["长江", "大桥"]
    with raises_parameter("words", "a"):
        Lexicon(["ab", "a"])


@pytest.mark.parametrize(
    "content, name, value",
    [
        ("", "{}/words", b""),
        ("\n \n", "lexicon", ANY),
        ("3 50\n", "lexicon", ANY),
        (b"\xe9\x95\xbf\xff\n", "{}/words", None),
    ],
)
def test_what_is_no_lexicon_is_named(tmp_path, content, name, value):
    with raises_parameter(name.format(tmp_path), value):
        Lexicon.load(write_text(tmp_path / "words", content))


def test_missing_files_are_named(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        Lexicon.load(str(tmp_path / "nowhere"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with raises_parameter("lexicon", "jieba"):
        Lexicon.load("jieba")
