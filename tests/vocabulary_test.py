"""Vocabularies: from text to symbols, ids, text and files."""

import os

import numpy as np
import pytest
from helpers import mentions, raises_parameter

from txl_tf.config import COUNTED_LEVELS
from txl_tf.data import vocabulary


def make_vocab(text, **config):
    vocab = vocabulary.Vocab(**config)
    vocab.count(text)
    vocab.build()
    return vocab


# --------------------------------------------------------------------------------------------------- building


def test_special_symbols_come_first_then_the_most_frequent_then_the_first_seen():
    vocab = make_vocab("b a c a\nc a <eos> d\n", special=["<eos>", "<unk>"])
    assert vocab.symbols == ["<eos>", "<unk>", "a", "c", "b", "d"]
    assert len(vocab) == 6
    assert vocab.ids["b"] == 4


def test_min_freq_and_max_size_leave_out_the_rare():
    text = "a a a b b c d"
    assert make_vocab(text, min_freq=2).symbols == ["a", "b"]
    with raises_parameter("min_freq", 9, "at most 3, the number of the most frequent token"):
        make_vocab(text, min_freq=9, special=["<unk>"], unk="<unk>")
    assert make_vocab(text, max_size=3).symbols == ["a", "b", "c"]
    assert make_vocab(text, max_size=1, special=["<unk>"]).symbols == ["<unk>", "a"]


def test_counts_add_up_over_texts():
    vocab = vocabulary.Vocab()
    vocab.count("a b")
    vocab.count(["b c\n", "b c\n"])
    vocab.build()
    assert vocab.symbols == ["b", "c", "a"]
    assert vocab.counter == {"b": 3, "c": 2, "a": 1}


def test_char_level_has_every_character():
    assert make_vocab("aé \na\n\n", level="char").symbols == ["\n", "a", "é", " "]


def test_byte_level_is_always_all_bytes():
    vocab = make_vocab("", level="byte")
    assert [symbol.encode("utf-8", "surrogateescape") for symbol in vocab.symbols] == [
        bytes([value]) for value in range(256)
    ]


# ----------------------------------------------------------------------------------------------- text <-> ids


def test_words_with_eos_at_each_newline():
    vocab = vocabulary.Vocab(special=["<eos>"], eos="<eos>")
    vocab.count("a b\nc")
    vocab.build()
    ids = vocab.encode("a  b\n\nc\n a")
    assert ids.dtype == np.int32
    assert ids.tolist() == [1, 2, 0, 0, 3, 0, 1]
    assert vocab.decode(ids) == "a b\n\nc\na"


def test_words_without_eos():
    vocab = make_vocab("a b c")
    assert vocab.encode("a b\n\r\nc\n").tolist() == [0, 1, 2]
    assert vocab.decode([2, 0]) == "c a"


def test_lm1b_rule_puts_a_marker_at_both_ends_of_a_line():
    vocab = make_vocab("a b c", special=["<S>"], bos="<S>", eos="<S>")
    assert vocab.encode("a b\nc\n").tolist() == [0, 1, 2, 0, 0, 3, 0]
    assert vocab.encode("a\n\n").tolist() == [0, 1, 0, 0, 0]
    assert vocab.encode("a b").tolist() == [0, 1, 2]  # a prompt: its line goes on
    assert vocab.encode("").tolist() == []
    assert vocab.decode([0, 1, 2, 0, 0, 3, 0]) == "a b\nc\n"


def test_lower_case_spares_the_markers():
    vocab = make_vocab("A b", special=["<EOS>"], eos="<EOS>", lower_case=True)
    assert vocab.symbols == ["<EOS>", "a", "b"]
    assert vocab.encode("a B\n").tolist() == [1, 2, 0]


@pytest.mark.parametrize(
    ("config", "n"),
    [
        ({}, 4),
        ({"special": ["<eos>"], "eos": "<eos>"}, 7),
        ({"special": ["<S>"], "eos": "<S>", "bos": "<S>"}, 11),
        ({"level": "char", "lower_case": True}, 8),
        ({"level": "byte"}, 9),
    ],
)
def test_count_tells_how_many_ids_there_will_be(config, n):
    texts = ["a\n\n", "\u00c9 b\n", "", "c"]
    vocab = vocabulary.Vocab(**config)
    assert vocab.count(texts) == n
    vocab.build()
    assert len(vocab.encode(texts)) == n


@pytest.mark.parametrize("level", COUNTED_LEVELS)
def test_a_list_of_texts_is_encoded_as_one(level):
    lines = ["a b\n", "\n", "c é\n"]
    vocab = make_vocab(lines, level=level)
    np.testing.assert_array_equal(vocab.encode(lines), vocab.encode("".join(lines)))
    np.testing.assert_array_equal(np.concatenate(list(vocab.encode_stream(lines))), vocab.encode(lines))
    assert vocab.encode([]).tolist() == []


def test_characters_round_trip():
    text = "a\tb \u2028\U0001f600\r\n\\ é"
    vocab = make_vocab(text, level="char")
    assert vocab.decode(vocab.encode(text)) == text


def test_bytes_round_trip_and_broken_characters_are_replaced():
    vocab = make_vocab("", level="byte")
    assert vocab.encode("é\n").tolist() == [0xC3, 0xA9, 10]
    assert vocab.encode(b"\xff\x00").tolist() == [0xFF, 0]
    assert vocab.decode([0xC3, 0xA9, 10]) == "é\n"
    assert vocab.decode([0x61, 0xC3]) == "a\ufffd"


def test_unknown_symbols_become_unk_whether_special_or_from_the_text():
    assert make_vocab("a", special=["<unk>"], unk="<unk>").encode("a x").tolist() == [1, 0]
    assert make_vocab("a <unk>", unk="<unk>").encode("a x").tolist() == [0, 1]


@pytest.mark.parametrize(
    ("level", "texts", "name", "value"),
    [
        ("word", "a b\na\nb x y\n", "news.txt, line 3", "x"),
        ("word", ["a\na\n", "b ", "b\nx"], "news.txt, line 4", "x"),
        ("word", "a\u2028b\nx", "news.txt, line 2", "x"),  # only \n ends a line
        ("char", "a\nb", "news.txt, line 1", "\n"),
    ],
)
def test_an_unknown_symbol_is_named_with_its_line(level, texts, name, value):
    config = {"special": ["<eos>"], "eos": "<eos>"} if level == "word" else {"level": level}
    vocab = make_vocab("a b", unk="<unk>", **config)
    with raises_parameter(name, value) as raised:
        vocab.encode(texts, name="news.txt")
    assert mentions(raised.value.__notes__[0], "min_freq=2")


@pytest.mark.parametrize("bad", [3, -1])
def test_decode_refuses_ids_out_of_range(bad):
    with raises_parameter("ids", bad, "in [0, 3), the size of the vocabulary"):
        make_vocab("a b c").decode([0, bad])


# ------------------------------------------------------------------------------------------------------ files

NASTY = "\n\r\t \\nx20\x00\x1c\x85\xa0\u2028\u2029\u0301\ufeff\U0001f600é\x0b\x7f"


def test_file_is_one_escaped_symbol_a_line(tmp_path):
    make_vocab("\n\n\n\n  \\\\é\u2028", level="char").save(tmp_path / "vocab.txt")
    assert (tmp_path / "vocab.txt").read_text(encoding="utf-8") == "\\n\n\\x20\n\\\\\né\n\\u2028\n"


@pytest.mark.parametrize(
    ("text", "config"),
    [
        (NASTY, {"level": "char", "special": ["<unk>", "two words"], "unk": "<unk>"}),
        ("", {"level": "byte"}),
        ("a \\n \\ \\x20 b\\\\ é \x00 <unk>\n", {"special": ["<eos>"], "eos": "<eos>", "lower_case": True}),
        ("a a\n", {"special": ["<S>"], "eos": "<S>", "bos": "<S>", "min_freq": 2, "max_size": 9}),
    ],
)
def test_save_and_load_give_the_same_vocabulary(tmp_path, text, config):
    vocab = make_vocab(text, **config)
    vocab.save(tmp_path / "vocab.txt")
    again = vocabulary.Vocab.load(tmp_path / "vocab.txt", **vocab.get_config())
    assert again.symbols == vocab.symbols
    assert again.get_config() == vocab.get_config()
    np.testing.assert_array_equal(again.encode(text), vocab.encode(text))
    assert os.listdir(tmp_path) == ["vocab.txt"]  # no temporary file is left


def test_save_replaces_a_file(tmp_path):
    path = str(tmp_path / "vocab.txt")
    make_vocab("a b").save(path)
    make_vocab("c").save(path)
    assert vocabulary.Vocab.load(path).symbols == ["c"]


def test_a_word_list_loads_as_it_is(tmp_path):
    path = tmp_path / "vocab.txt"
    # A byte order mark, a Windows line end, counts beside the words, no newline at the end.
    path.write_bytes("\ufeff<S>\r\n\\text 512\nc:\\new 40\né".encode())
    assert vocabulary.Vocab.load(path).symbols == ["<S>", "\\text", "c:\\new", "é"]


def test_the_word_list_of_a_published_model_loads_as_it_is(reference):
    vocab = vocabulary.Vocab.load(reference / "pretrained_word" / "vocab.txt", eos="<eos>", unk="<unk>")
    assert len(vocab) == 13777
    assert vocab.symbols[:4] == ["<eos>", "the", "<unk>", ","]
    assert vocab.encode("the , qwertyuiop\n").tolist() == [1, 3, 2, 0]


@pytest.mark.parametrize(
    ("content", "config", "name", "value"),
    [
        (b"a\n\nb\n", {}, "{}/vocab.txt, line 2", ""),
        (b"", {}, "{}/vocab.txt, line 1", ""),
        (b"a\nb\na\n", {}, "{}/vocab.txt, line 1", "a"),
        (b"a\nb\xff\n", {}, "{}/vocab.txt", None),
        (b"a\nb\n", {"eos": "<eos>"}, "eos", "<eos>"),
        (b"a\nb\n", {"level": "byte"}, "{}/vocab.txt", ["a", "b"]),
    ],
)
def test_bad_files_are_refused(tmp_path, content, config, name, value):
    (tmp_path / "vocab.txt").write_bytes(content)
    with raises_parameter(name.format(tmp_path), value):
        vocabulary.Vocab.load(tmp_path / "vocab.txt", **config)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere.txt"):
        vocabulary.Vocab.load(tmp_path / "nowhere.txt")


@pytest.mark.parametrize(
    ("config", "name", "value"),
    [
        ({"level": "bpe"}, "level", "bpe"),
        ({"level": "char", "eos": "<eos>"}, "eos", "<eos>"),
        ({"level": "byte", "lower_case": True}, "lower_case", True),
        ({"special": ["two words"]}, "special", ["two words"]),
        ({"max_size": 0}, "max_size", 0),
    ],
)
def test_bad_arguments_are_refused(config, name, value):
    with raises_parameter(name, value):
        vocabulary.Vocab(**config)


def test_eos_must_have_an_id():
    with raises_parameter("eos", "<eos>"):
        make_vocab("a b", eos="<eos>")


@pytest.mark.parametrize(
    "config, symbols, expected",
    [
        ({"level": "word", "eos": "<eos>"}, ["a", "<eos>"], [1]),
        ({"level": "word"}, ["a"], []),
        ({"level": "char"}, ["a", "b", "\n"], [2]),
        ({"level": "char", "unk": "?"}, ["?"], []),
        ({"level": "byte"}, [], [10]),
    ],
    ids=str,
)
def test_newline_ids_are_those_of_a_newline(config, symbols, expected):
    vocab = vocabulary.Vocab(**config, special=symbols)
    vocab.build()
    assert vocabulary.newline_ids(vocab) == expected


@pytest.mark.parametrize("name", ["bos", "eos"])
def test_the_end_of_a_document_is_no_end_of_a_line(name):
    options = {"special": ["</s>"], name: "</s>", "document": "</s>"}
    with raises_parameter("document", "</s>", f"another token than {name}"):
        make_vocab("a b\n", **options)
    vocab = vocabulary.Vocab(**options)
    vocab.set_lines(["</s>", "a"], "an existing file")
    with raises_parameter("document", "</s>", f"another token than {name}"):
        vocab.encode("a\n")


def test_the_end_of_a_document_does_not_replace_unknown_words():
    vocab = make_vocab("a b", unk="</s>", document="</s>")
    assert vocab.encode("a b").tolist() == [1, 2]
    with raises_parameter("document", "</s>", "another token than unk"):
        vocab.encode("a c")
