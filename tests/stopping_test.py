"""Stop strings are found where a search in the text finds them, unit by unit, and spelled as the vocabulary does."""

import numpy as np
import pytest
import tensorflow as tf
from helpers import ANY, Subwords, mentions, raises_parameter, word_vocab

from txl_tf.data.vocabulary import Vocab
from txl_tf.language.stopping import (
    BEFORE,
    NONE,
    add_token,
    aligned,
    check_stops,
    spell,
    tail_of,
    token_of,
    with_room,
)

STRINGS = ["ab", "bab", "ser: ", "\n\n", "é", "日a", "r: ab", "s"]


def made(**options):
    vocab = Vocab(**options)
    vocab.build()
    return vocab


def text_with(vocab, text, **options):
    """A `Vocab` that has counted a text."""
    vocab = Vocab(level=vocab, **options)
    vocab.count(text)
    vocab.build()
    return vocab


@pytest.mark.parametrize("room", [pytest.param(False, marks=pytest.mark.slow), True])
def test_stop_strings_are_found_where_a_search_finds_them(room):
    """Token by token in 20 rows, each of which goes on behind its stop strings."""
    vocab, rng = Subwords(), np.random.default_rng(0)
    tokens = rng.choice(23, [30, 20], p=np.r_[0, np.full(22, 1 / 22)])
    excesses, step = set(), tf.function(add_token)
    for strings in (STRINGS[:1], STRINGS[1:3], STRINGS):
        stops, wanted = check_stops(23, None, strings, False, vocab), [string.encode() for string in strings]
        stops = with_room(stops) if room else stops
        stops = stops._replace(tail=tf.repeat(stops.tail, 20, 0))
        texts = [b""] * 20
        for token in tokens:
            ended, excess, tail = step(stops, tf.constant(token, tf.int32))
            stops = stops._replace(tail=tail)
            ended, excess, tail = ended.numpy(), excess.numpy(), tail.numpy()
            for row in range(20):
                before, texts[row] = texts[row], texts[row] + vocab.token_bytes[token[row]]
                ends = [
                    end for end in range(len(before) + 1, len(texts[row]) + 1)
                    if texts[row][:end].endswith(tuple(wanted))
                ]  # fmt: skip
                assert ended[row] == bool(ends)
                assert excess[row] == (len(texts[row]) - ends[0] if ends else 0)
                excesses.add(int(excess[row]))
                length = tail.shape[1]
                expected = [BEFORE] * length + list(texts[row])
                np.testing.assert_array_equal(tail[row], expected[len(expected) - length :])
    assert excesses >= {0, 1, 2, 3}


def test_the_tail_of_a_text_is_what_its_tokens_leave():
    vocab = Subwords()
    stops = check_stops(23, None, ["r: ab"], False, vocab)
    step = stops._replace(tail=tf.fill([1, 5], BEFORE))
    written = []
    for token in (7, 10, 15, 3, 18):
        np.testing.assert_array_equal(tail_of(stops, written), step.tail)
        step = step._replace(tail=add_token(step, tf.constant([token]))[2])
        written.append(token)
    assert tail_of(check_stops(23), written).shape == [1, 0]


def test_strings_are_moved_to_the_end():
    strings = tf.constant([[[5, 6, -1], [7, -1, -1]], [[1, 2, 3], [-1, -1, -1]]])
    expected = [[[NONE, 5, 6], [NONE, NONE, 7]], [[1, 2, 3], [NONE] * 3]]
    np.testing.assert_array_equal(aligned(strings, tf.constant([[2, 1], [3, 0]])), expected)


def test_an_empty_place_is_no_stop_string():
    """What is filled up with NONE ends no row."""
    stops = check_stops(23, 3, ["w1 w2", "w4"], True, word_vocab())
    room = with_room(stops)
    assert room.strings.shape == [1, 4, 16] and room.tail.shape == [1, 16]
    ended, excess, _ = add_token(room, tf.constant([0], tf.int32))
    assert ended[0] and excess[0] == 0  # the newline
    ended, _, _ = add_token(room, tf.constant([4], tf.int32))  # w2, and nothing before it
    assert not ended[0]
    assert with_room(check_stops(23, 3)).strings.shape == [1, 0, 0]


@pytest.mark.parametrize(
    "vocab, text, expected",
    [
        (word_vocab(), "w3", ["w3"]),
        (word_vocab(), " w3\n w4 ", ["w3", "<eos>", "w4"]),
        (word_vocab(), "\n\n", ["<eos>", "<eos>"]),
        (word_vocab(), "<eos>", ["<eos>"]),
        (word_vocab(), "<unk>", ["<unk>"]),
        (word_vocab(), "w1 <unk>", ["w1", "<unk>"]),
        (made(special=["<S>", "</S>", "a"], bos="<S>", eos="</S>"), "a\na\n", ["a", "</S>", "<S>", "a", "</S>"]),
        (made(special=["<S>", "a"], bos="<S>", eos="<S>"), "\n", ["<S>"]),
        (made(special=["<S>", "a"], bos="<S>", eos="<S>"), "a\na", ["a", "<S>", "<S>", "a"]),
        (made(special=["a", "b"], lower_case=True), "A b", ["a", "b"]),
        (text_with("char", "User:\né"), "r:\né", list("r:\né")),
        (text_with("char", "ab", special=["<end>"]), "<end>", ["<end>"]),
        (text_with("char", "a <unk>", special=["<unk>"], unk="<unk>"), "a <unk>", list("a <unk>")),
        (text_with("char", "ab?", unk="?"), "a?", ["a", "?"]),
    ],
)
def test_spelling_in_symbols(vocab, text, expected):
    assert spell(vocab, text) == [vocab.ids[symbol] for symbol in expected]


def test_spelling_in_bytes():
    assert spell(made(level="byte"), "é\n") == [*"é\n".encode()]
    assert spell(made(level="byte"), "\udcc3") == [0xC3]
    assert spell(Subwords(), "User: 日") == [*"User: 日".encode()]
    assert spell(Subwords(), "<end>") == [256]  # a symbol that is no text is a unit of its own


@pytest.mark.parametrize(
    "vocab, text",
    [
        (word_vocab(), "w3 w99"),
        (word_vocab(), "<unk> w99"),
        (word_vocab(), "  "),
        (made(special=["a"]), "a b"),
        (made(special=["a"]), "\n"),
        (text_with("char", "ab"), "ac"),
        (text_with("char", "ab", special=["<unk>"], unk="<unk>"), "ac"),
        (text_with("char", "a <unk>", special=["<unk>"], unk="<unk>"), "q <unk>"),
        (Subwords(), "ax"),
        (Subwords(), "ü"),
        (Subwords(), "\ud83d"),
        (made(level="byte"), "a\ud800"),
    ],
)
def test_what_cannot_be_spelled_is_an_error(vocab, text):
    with raises_parameter("stop_strings", text) as raised:
        spell(vocab, text)
    assert mentions(str(raised.value), len(vocab))


@pytest.mark.parametrize(
    "arguments, name, value, limit",
    [
        ({"stop_strings": [""]}, "stop_strings", "", ""),
        ({"stop_strings": [3]}, "stop_strings", 3, ""),
        ({"stop_strings": "w1"}, "stop_strings", "w1", "list"),
        ({"stop_strings": ["w1"], "vocab": made(special=["a"])}, "vocab", ANY, "23 symbols"),
        ({"stop_strings": ["w1"], "vocab": None}, "vocab", None, "['w1']"),
        ({"stop_token": 23}, "stop_token", 23, "0 to 22"),
    ],
)
def test_bad_arguments_are_named(arguments, name, value, limit):
    with raises_parameter(name, value, limit=limit):
        check_stops(23, **{"vocab": word_vocab(), **arguments})


def test_the_one_token_of_a_stop_string():
    words = word_vocab()
    assert [token_of(words, text) for text in ("\n", "<eos>", "w3", "w3 w4")] == [0, 0, words.ids["w3"], None]
    characters = text_with("char", "ab\n")
    assert [token_of(characters, text) for text in ("\n", "ab")] == [characters.ids["\n"], None]
    subwords = Subwords()
    ids = subwords.ids
    assert token_of(subwords, "<end>") == ids["<end>"] and token_of(subwords, "ser:") == ids["ser:"]
    assert token_of(subwords, "\n") is None  # there is also a token of two newlines
    assert token_of(subwords, "ser: ") is None
    with raises_parameter("stop_strings", "w99"):
        token_of(words, "w99")
