"""Datasets: which text each is made of, what its symbols are and where the adaptive softmax is cut."""

import os

import numpy as np
import pytest
from helpers import as_lists, mentions, raises_parameter, write_splits, write_text

from txl_tf.data import text_files
from txl_tf.data.text import corpus, datasets
from txl_tf.data.text.batches import segments
from txl_tf.data.text.download import LM1B_SHARDS
from txl_tf.data.vocabulary import Vocab

# --------------------------------------------------------------------------------------------- text -> tokens


def test_wt2_counts_all_splits_and_ends_lines_with_eos(tmp_path):
    path = write_splits(tmp_path, " \n = A = \n", "a <unk>\n", "a")
    made = corpus.build_corpus("wt2", path)
    assert made.vocab.symbols == ["<eos>", "=", "a", "A", "<unk>"]
    assert made.splits["train"].tolist() == [0, 1, 3, 1, 0]
    assert made.splits["valid"].tolist() == [2, 4, 0]
    assert made.splits["test"].tolist() == [2, 0]  # as if the last line had its newline
    assert made.splits["test"].dtype == np.int32


def test_ptb_is_lower_cased(tmp_path):
    made = corpus.build_corpus("ptb", write_splits(tmp_path, "A a b\n", "B\n", "C\n"))
    assert made.vocab.symbols == ["<eos>", "a", "b", "c"]
    assert made.splits["train"].tolist() == [1, 1, 2, 0]


@pytest.mark.parametrize("dataset", ["enwik8", "text8"])
def test_enwik8_and_text8_have_no_eos(tmp_path, dataset):
    made = corpus.build_corpus(dataset, write_splits(tmp_path, "97 98 98", "97 10", "99\n"))
    assert made.vocab.symbols == ["97", "98", "10", "99"]
    assert made.splits["train"].tolist() == [0, 1, 1]
    assert made.splits["test"].tolist() == [3]


def test_wt103_counts_train_only_and_has_the_originals_cutoffs(tmp_path):
    words = [f"w{i}" for i in range(30000)]
    path = write_splits(tmp_path, " ".join(["<unk>", *words]), "w7 new\n", "w8\n")
    made = corpus.build_corpus("wt103", path)
    assert made.vocab.symbols == ["<eos>", "<unk>", *words]
    assert made.cutoffs == [20000]  # of 20000, 40000, 200000, those that the vocabulary reaches
    assert made.splits["valid"].tolist() == [9, 1, 0]


def test_wt103_names_an_unknown_word_where_the_text_has_no_unk(tmp_path):
    path = write_splits(tmp_path, "a b\n", "a\nb new\n", "a\n")
    with raises_parameter(f"{tmp_path}/valid.txt, line 2", "new"):
        corpus.build_corpus("wt103", path)


def test_pydoc_is_the_manual_that_python_carries():
    made = corpus.build_corpus("pydoc", valid_fraction=0.05)
    text = text_files.pydoc_text()
    assert sum(map(len, made.splits.values())) == len(text) > 100_000
    assert len(made.splits["train"]) == int(len(text) * 0.95)
    assert made.vocab.decode(made.splits["train"][:500]) == text[:500]
    assert made.vocab.decode(made.splits["valid"][-500:]) == text[-500:]


def test_text_characters_split_at_exactly_the_fraction(tmp_path):
    text = "to be, or not\nto be\n"
    made = corpus.build_corpus("text", write_text(tmp_path / "a.txt", text), valid_fraction=0.1)
    assert made.vocab.decode(made.splits["train"]) == text[:18]
    assert made.vocab.decode(made.splits["valid"]) == text[18:]
    assert made.vocab.symbols[:2] == ["o", " "]
    assert list(made.splits) == ["train", "valid"]


def test_text_bytes_may_be_anything(tmp_path):
    data = bytes(range(256)) * 2
    made = corpus.build_corpus("text", write_text(tmp_path / "a.bin", data), level="byte", valid_fraction=0.5)
    assert made.splits["train"].tolist() == list(range(256))
    assert len(made.vocab) == 256


def test_text_words_of_several_files(tmp_path):
    files = [write_text(tmp_path / "a.txt", "B a\na"), write_text(tmp_path / "b.txt", "a c\r\n")]
    for data_path in (files, ",".join(files)):
        made = corpus.build_corpus("text", data_path, level="word", valid_fraction=0.5, lower_case=True)
        assert made.vocab.symbols == ["<eos>", "<unk>", "a", "b", "c"]
        assert made.splits["train"].tolist() == [3, 2, 0, 2]
        assert made.splits["valid"].tolist() == [0, 2, 4, 0]


@pytest.mark.parametrize(
    ("level", "options", "symbols", "train"),
    [
        ("word", {"min_freq": 2}, ["<eos>", "<unk>", "aa"], [2, 1]),
        ("char", {"max_size": 1}, ["<unk>", "a"], [1, 1, 0, 0]),
    ],
)
def test_text_symbols_left_out_become_unk(tmp_path, level, options, symbols, train):
    path = write_text(tmp_path / "a.txt", "aa b aa\n")
    made = corpus.build_corpus("text", path, level=level, valid_fraction=0.5, **options)
    assert made.vocab.symbols == symbols
    assert made.splits["train"].tolist() == train


@pytest.mark.parametrize("level", ["char", "word", "byte"])
def test_pieces_of_a_file_join_to_the_whole(tmp_path, monkeypatch, level):
    text = "é 😀😀 and\n\nlonger-than-a-piece words \u2028 at the end "
    path = write_text(tmp_path / "a.txt", text)
    whole = corpus.build_corpus("text", path, level=level)
    for size in (1, 2, 3, 5, 8):
        monkeypatch.setattr(text_files, "BLOCK_BYTES", size)
        pieces = corpus.build_corpus("text", path, level=level)
        assert pieces.vocab.symbols == whole.vocab.symbols
        np.testing.assert_array_equal(pieces.splits["train"], whole.splits["train"])
        np.testing.assert_array_equal(pieces.splits["valid"], whole.splits["valid"])


@pytest.mark.parametrize("separator", ["\t", "\u3000", "\r\n", " \n"])
def test_words_are_cut_at_any_white_space(tmp_path, monkeypatch, separator):
    path = write_text(tmp_path / "a.txt", separator.join(["one", "two", "three", "four"] * 5))
    whole = corpus.build_corpus("text", path, level="word")
    monkeypatch.setattr(text_files, "BLOCK_BYTES", 7)
    assert max(map(len, text_files.read_files([path], "word"))) < 30
    pieces = corpus.build_corpus("text", path, level="word")
    assert pieces.vocab.symbols == whole.vocab.symbols
    np.testing.assert_array_equal(pieces.splits["train"], whole.splits["train"])


def test_a_word_without_end_is_refused_and_the_rest_is_cut_in_linear_time(monkeypatch):
    monkeypatch.setattr(text_files, "MOST_OF_A_WORD", 100)
    words = ["a " * 99, "x" * 60, "x" * 40, " b", "\n"]
    assert "".join(text_files.cut_between(words, "word")) == "".join(words)
    read = []
    with raises_parameter("level", "word"):
        list(text_files.cut_between((read.append(i) or "x" * 10 for i in range(10**6)), "word", "big.txt"))
    assert len(read) == 11
    searched = []
    monkeypatch.setattr(text_files, "_last_cut", lambda text, level: searched.append(len(text)) or 0)
    pieces = ["x" * 10] * 1000 + ["\n"]
    for level in ("line", "subword"):
        assert "".join(text_files.cut_between(pieces, level)) == "".join(pieces)
    assert sum(searched) < 8 * 10_000


def test_windows_line_ends(tmp_path):
    path = write_text(tmp_path / "a.txt", "a b\r\n\r\na\r\n")
    words = corpus.build_corpus("text", path, level="word", valid_fraction=0.5)
    assert words.vocab.symbols == ["<eos>", "<unk>", "a", "b"]
    assert [*words.splits["train"], *words.splits["valid"]] == [2, 3, 0, 0, 2, 0]
    characters = corpus.build_corpus("text", path, level="char", valid_fraction=0.5)
    assert sorted(characters.vocab.symbols) == ["\n", " ", "a", "b"]
    raw = corpus.build_corpus("text", path, level="char", valid_fraction=0.5, raw_text=True)
    assert sorted(raw.vocab.symbols) == ["\n", "\r", " ", "a", "b"]


def test_a_paper_dataset_takes_its_folder_as_a_flag_gives_it(tmp_path):
    folder = write_splits(tmp_path, "a\n", "a\n", "a\n")
    for data_path in (folder, tmp_path, [folder]):
        assert corpus.build_corpus("wt2", data_path).splits["train"].tolist() == [1, 0]


# ------------------------------------------------------------------------------------------------------- lm1b

SENTENCES = [["the cat", "a dog sat", "x", "", "the <S> end", "cat"], ["dog dog", "a", "the the the"]]


def write_lm1b(folder, vocab="<S>\t9\n<UNK> 8\nthe 7\na 6\ncat 5\ndog 4\n"):
    shards = folder / os.path.dirname(LM1B_SHARDS)
    shards.mkdir(parents=True)
    for i, lines in enumerate(SENTENCES):
        write_text(shards / f"news.en-{i + 1:05d}-of-00100", "".join(f"{line}\n" for line in lines))
    write_text(folder / "valid.txt", "the dog\nsat\n")
    write_text(folder / "1b_word_vocab.txt", vocab)
    return folder


def lm1b_shards_by_the_original(num_shuffle):
    """Its loop: sentences as arrays, shuffled in place by NumPy's global generator, again and again."""
    ids = {"<S>": 0, "<UNK>": 1, "the": 2, "a": 3, "cat": 4, "dog": 5}
    made = {}
    np.random.seed(123456)
    for shard, lines in enumerate(SENTENCES):
        sentences = [np.array([0, *(ids.get(word, 1) for word in line.split()), 0]) for line in lines]
        for shuffle in range(num_shuffle):
            np.random.shuffle(sentences)
            made[shuffle, shard] = np.concatenate(sentences)
    return [made[key] for key in sorted(made)]


@pytest.mark.parametrize(
    ("data", "level", "by_character"),
    [
        ({"dataset": "enwik8"}, "word", True),  # a run that was converted does not say
        ({"dataset": "wt103"}, "word", False),
        ({}, "char", True),
        ({"dataset": "text", "by_character": False}, "char", False),
    ],
)
def test_whether_a_run_reads_characters(data, level, by_character):
    assert datasets.is_by_character_in(data, Vocab(level=level)) == by_character


def test_lm1b_is_shuffled_as_in_the_original(tmp_path):
    made = corpus.prepare(write_lm1b(tmp_path), "lm1b", num_shuffle=3)
    shards = lm1b_shards_by_the_original(3)
    for i, expected in enumerate(shards):
        np.testing.assert_array_equal(np.load(tmp_path / f"train-{i:03d}.npy"), expected)
    np.testing.assert_array_equal(made.splits["train"], np.concatenate(shards))
    assert made.splits["valid"].tolist() == [0, 2, 5, 0, 0, 1, 0]
    assert made.splits["test"].tolist() == made.splits["valid"].tolist()
    assert made.vocab.symbols == ["<S>", "<UNK>", "the", "a", "cat", "dog"]
    assert not made.by_character
    expected = as_lists(segments(np.concatenate(shards), 3, 4))
    assert as_lists(segments(made.splits["train"], 3, 4)) == expected
    in_memory = corpus.build_corpus("lm1b", tmp_path, num_shuffle=3)
    np.testing.assert_array_equal(in_memory.splits["train"], made.splits["train"])


def test_lm1b_of_another_seed_has_the_same_sentences_in_another_order(tmp_path):
    write_lm1b(tmp_path)
    first, second = (corpus.build_corpus("lm1b", tmp_path, seed=seed).splits["train"] for seed in (0, 1))
    assert first.tolist() != second.tolist()
    assert sorted(first) == sorted(second)


def test_a_file_for_a_dataset_that_is_a_folder_names_the_dataset_text(tmp_path):
    file = write_text(tmp_path / "a.txt", "a\n")
    with pytest.raises(FileNotFoundError, match=f"dataset 'text' reads {file} itself"):
        corpus.build_corpus("ptb", file)


def test_lm1b_names_what_is_missing(tmp_path):
    with pytest.raises(FileNotFoundError, match="valid.txt.* --download"):
        corpus.prepare(tmp_path, "lm1b")
    write_text(tmp_path / "valid.txt", "a\n")
    with pytest.raises(FileNotFoundError, match="1b_word_vocab.txt"):
        corpus.prepare(tmp_path, "lm1b")
    write_text(tmp_path / "1b_word_vocab.txt", "<S>\na\n")
    with pytest.raises(FileNotFoundError, match=r"tokenized.shuffled/news.en-\*"):
        corpus.prepare(tmp_path, "lm1b")
    write_lm1b(tmp_path / "whole", vocab="<S>\na\n")
    with raises_parameter("vocab_path", f"{tmp_path}/whole/1b_word_vocab.txt"):
        corpus.prepare(tmp_path / "whole", "lm1b")


# ---------------------------------------------------------------------------------------------------- cutoffs


def test_cutoffs_end_where_the_counts_say():
    vocab = Vocab(special=["<eos>"], eos="<eos>")
    vocab.count(f"w{i}" for i in range(20000) for _ in range(100 if i < 2500 else 10 if i < 6000 else 1))
    vocab.build()  # 299,000 words: 2,500 make up 83.6 %, 6,000 95.3 %; 90 % are within 4,410, 99 % within 17,010
    assert datasets.choose_cutoffs(vocab) == [5000, 6000, 18000]
    vocab.counter = dict.fromkeys(vocab.symbols, 1)  # 90 %, 95 % and 99 % of 20,001 equally frequent words
    assert datasets.choose_cutoffs(vocab) == [19000, 20000]
    vocab.symbols = vocab.symbols[:19999]
    assert datasets.choose_cutoffs(vocab) == []


def test_a_large_text_vocabulary_has_cutoffs_unless_told_otherwise(tmp_path):
    path = write_text(tmp_path / "a.txt", " ".join(["the"] * 300_000 + [f"w{i}" for i in range(25000)]))
    assert corpus.build_corpus("text", path, level="word").cutoffs == [1000, 9000, 22000]
    assert corpus.build_corpus("text", path, level="word", cutoffs=[]).cutoffs == []
    assert corpus.build_corpus("text", path, level="word", cutoffs=[100, 25002]).cutoffs == [100, 25002]
    with raises_parameter("cutoffs", [100, 25003]):
        corpus.build_corpus("text", path, level="word", cutoffs=[100, 25003])
    for bad in ([0, 5], [5, 5], [7, 5]):
        with raises_parameter("cutoffs", bad):
            corpus.build_corpus("text", path, level="word", cutoffs=bad)


# ----------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("dataset", "options", "name", "value"),
    [
        ("wiki", {}, "dataset", "wiki"),
        ("wt2", {}, "data_path", None),
        ("text", {}, "data_path", None),
        ("pydoc", {"data_path": ["my.txt"]}, "data_path", ["my.txt"]),
        ("pydoc", {"level": "bpe"}, "level", "bpe"),
        ("pydoc", {"valid_fraction": 0}, "valid_fraction", 0),
        ("pydoc", {"valid_fraction": 1.0}, "valid_fraction", 1.0),
    ],
)
def test_bad_arguments_are_refused(dataset, options, name, value):
    with raises_parameter(name, value):
        corpus.build_corpus(dataset, **options)


@pytest.mark.parametrize(
    ("content", "wrong_byte"),
    [(b"", None), (b"ab\xc3\xa9\xff", 4), (b"ab\xc3\xa9\xe2\x80", 4), (b"ab\x00", 2)],
)
@pytest.mark.parametrize("read_bytes", [1, 1 << 20])
def test_bad_files_are_refused(tmp_path, monkeypatch, content, wrong_byte, read_bytes):
    monkeypatch.setattr(text_files, "BLOCK_BYTES", read_bytes)
    path = write_text(tmp_path / "a.txt", content)
    with raises_parameter(path) as raised:
        corpus.build_corpus("text", path)
    if wrong_byte is not None:
        assert mentions(str(raised.value), wrong_byte, "level='byte'")


def test_a_text_that_is_too_short_to_hold_out_a_part_is_refused(tmp_path):
    with raises_parameter("valid_fraction", 0.05):
        corpus.build_corpus("text", write_text(tmp_path / "a.txt", "a"))


def test_missing_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere.txt"):
        corpus.build_corpus("text", str(tmp_path / "nowhere.txt"))
    write_text(tmp_path / "train.txt", "a\n")
    with pytest.raises(FileNotFoundError, match="valid.txt"):
        corpus.build_corpus("wt2", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="[*].jsonl"):
        corpus.build_corpus("text", str(tmp_path / "*.jsonl"))


def test_a_text_in_a_given_vocabulary(tmp_path):
    """As that of a run to start from: in its order, other words are <unk>, and the cutoffs come from the counts."""
    symbols = write_text(tmp_path / "vocab.txt", "<eos>\nb\n<unk>\na\n")
    text = write_text(tmp_path / "a.txt", "a b c a\n" * 5)
    made = corpus.build_corpus("text", text, level="word", vocab_path=symbols, valid_fraction=0.2)
    assert made.vocab.symbols == ["<eos>", "b", "<unk>", "a"] and made.cutoffs == []
    np.testing.assert_array_equal(made.splits["train"], [3, 1, 2, 3, 0] * 4)
    np.testing.assert_array_equal(made.splits["valid"], [3, 1, 2, 3, 0])
    chars = write_text(tmp_path / "chars.txt", "b\na\n\\n\n")
    made = corpus.build_corpus("text", write_text(tmp_path / "b.txt", "ab\nba\n"), vocab_path=chars, valid_fraction=0.5)
    np.testing.assert_array_equal(made.splits["train"], [1, 0, 2])
    unknown = write_text(tmp_path / "unknown.txt", "<unk>\nb\na\n\\n\n")  # as that of a run with min_freq=2
    made = corpus.build_corpus("text", write_text(tmp_path / "c.txt", "aï <"), vocab_path=unknown, valid_fraction=0.5)
    np.testing.assert_array_equal([*made.splits["train"], *made.splits["valid"]], [2, 0, 0, 0])
    assert (made.vocab.unk, made.vocab.special) == ("<unk>", ["<unk>"])
    with raises_parameter(f"{tmp_path}/a.txt, line 1", " "):
        corpus.build_corpus("text", text, vocab_path=chars)
    words = write_text(tmp_path / "words.txt", "<eos>\n<unk>\n[PAD]\nThe\nthe\n")
    corpus.build_corpus("text", text, level="word", vocab_path=words)
    for options, n_lost in (({"level": "word", "lower_case": True}, 1), ({"level": "char"}, 2)):
        with raises_parameter("vocab_path", words) as caught:
            corpus.build_corpus("text", text, vocab_path=words, **options)
        assert mentions(str(caught.value), n_lost, "The", options["level"])
    with raises_parameter("vocab_path", f"{tmp_path}/vocab.txt"):
        corpus.build_corpus("text", text, level="word", vocab_path=symbols, min_freq=2)
    with pytest.raises(FileNotFoundError, match="absent"):
        corpus.build_corpus("text", text, vocab_path=str(tmp_path / "absent"))
