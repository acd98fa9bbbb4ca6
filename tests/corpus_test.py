"""Tests of `txl_tf.corpus`."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from txl_tf import corpus, datasets, text_files
from txl_tf.token_files import StoredTokens
from txl_tf.vocabulary import Vocab

REFERENCE = Path(__file__).parents[2] / "shared" / "reference" / "corpus"
needs_reference = pytest.mark.skipif(
    not REFERENCE.exists(), reason=f"the original's reference files are not here: {REFERENCE}"
)


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    return str(path)


def write_splits(folder, train, valid, test):
    for split, text in (("train", train), ("valid", valid), ("test", test)):
        write(folder / f"{split}.txt", text)
    return str(folder)


def batches(dataset):
    return [(tokens.tolist(), labels.tolist()) for tokens, labels in dataset.as_numpy_iterator()]


# --------------------------------------------------------------------------------- the original's own numbers


@needs_reference
@pytest.mark.parametrize("where", ["in memory", "prepared", "prepared, streamed"])
@pytest.mark.parametrize("dataset", ["enwik8", "text8", "ptb", "wt2"])
def test_corpus_and_batches_are_the_originals(tmp_path, dataset, where):
    golden = np.load(REFERENCE / dataset / "golden.npz")
    if where == "in memory":
        made = corpus.build_corpus(dataset, REFERENCE / dataset)
    else:
        folder = f"file://{tmp_path}" if "streamed" in where else tmp_path
        made = corpus.prepare(folder, dataset, REFERENCE / dataset)
        original = json.loads((REFERENCE / dataset / "corpus-info.json").read_text())
        info = json.loads((tmp_path / "corpus-info.json").read_text())
        assert {name: info[name] for name in original} == original
    assert made.vocab.symbols == golden["vocab"].tolist()
    assert made.cutoffs == []
    for split, batch_size in (("train", 4), ("valid", 4), ("test", 2)):
        tokens = made.splits[split]
        np.testing.assert_array_equal(tokens, golden[split])
        assert corpus.num_segments(len(tokens), batch_size, 16) == golden[f"{split}_num_batch"]

        expected = list(zip(golden[f"{split}_inputs_full"], golden[f"{split}_labels_full"], strict=True))
        if f"{split}_inputs_last" in golden:
            expected.append((golden[f"{split}_inputs_last"], golden[f"{split}_labels_last"]))
        found = list(corpus.segments(tokens, batch_size, 16).as_numpy_iterator())
        assert len(found) == len(expected)
        for found_batch, expected_batch in zip(found, expected, strict=True):
            np.testing.assert_array_equal(found_batch[0], expected_batch[0])
            np.testing.assert_array_equal(found_batch[1], expected_batch[1])


@needs_reference
def test_bin_sizes_are_the_originals():
    golden = np.load(REFERENCE / "wt2" / "golden.npz")
    cutoffs = golden["cutoffs"][1:-1].tolist()
    for tokens in (golden["train"], StoredTokens([golden["train"][:99], golden["train"][99:]])):
        assert corpus.get_bin_sizes(tokens, 4, 16, cutoffs) == golden["bin_sizes_b4_t16"].tolist()


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
    with pytest.raises(ValueError, match=r"valid\.txt, line 2: 'new' is not in the vocabulary"):
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
    made = corpus.build_corpus("text", write(tmp_path / "a.txt", text), valid_fraction=0.1)
    assert made.vocab.decode(made.splits["train"]) == text[:18]
    assert made.vocab.decode(made.splits["valid"]) == text[18:]
    assert made.vocab.symbols[:2] == ["o", " "]
    assert list(made.splits) == ["train", "valid"]


def test_text_bytes_may_be_anything(tmp_path):
    data = bytes(range(256)) * 2
    made = corpus.build_corpus("text", write(tmp_path / "a.bin", data), level="byte", valid_fraction=0.5)
    assert made.splits["train"].tolist() == list(range(256))
    assert len(made.vocab) == 256


def test_text_words_of_several_files(tmp_path):
    files = [write(tmp_path / "a.txt", "B a\na"), write(tmp_path / "b.txt", "a c\r\n")]
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
    path = write(tmp_path / "a.txt", "aa b aa\n")
    made = corpus.build_corpus("text", path, level=level, valid_fraction=0.5, **options)
    assert made.vocab.symbols == symbols
    assert made.splits["train"].tolist() == train


@pytest.mark.parametrize("level", ["char", "word", "byte"])
def test_pieces_of_a_file_join_to_the_whole(tmp_path, monkeypatch, level):
    text = "é 😀😀 and\n\nlonger-than-a-piece words \u2028 at the end "
    path = write(tmp_path / "a.txt", text)
    whole = corpus.build_corpus("text", path, level=level)
    for size in (1, 2, 3, 5, 8):
        monkeypatch.setattr(text_files, "_READ_BYTES", size)
        pieces = corpus.build_corpus("text", path, level=level)
        assert pieces.vocab.symbols == whole.vocab.symbols
        np.testing.assert_array_equal(pieces.splits["train"], whole.splits["train"])
        np.testing.assert_array_equal(pieces.splits["valid"], whole.splits["valid"])


@pytest.mark.parametrize("separator", ["\t", "\u3000", "\r\n", " \n"])
def test_words_are_cut_at_any_white_space(tmp_path, monkeypatch, separator):
    path = write(tmp_path / "a.txt", separator.join(["one", "two", "three", "four"] * 5))
    whole = corpus.build_corpus("text", path, level="word")
    monkeypatch.setattr(text_files, "_READ_BYTES", 7)
    assert max(map(len, text_files.read_files([path], "word"))) < 30
    pieces = corpus.build_corpus("text", path, level="word")
    assert pieces.vocab.symbols == whole.vocab.symbols
    np.testing.assert_array_equal(pieces.splits["train"], whole.splits["train"])


def test_windows_line_ends(tmp_path):
    path = write(tmp_path / "a.txt", "a b\r\n\r\na\r\n")
    words = corpus.build_corpus("text", path, level="word", valid_fraction=0.5)
    assert words.vocab.symbols == ["<eos>", "<unk>", "a", "b"]
    assert [*words.splits["train"], *words.splits["valid"]] == [2, 3, 0, 0, 2, 0]
    characters = corpus.build_corpus("text", path, level="char", valid_fraction=0.5)
    assert sorted(characters.vocab.symbols) == ["\n", "\r", " ", "a", "b"]


def test_a_paper_dataset_takes_its_folder_as_a_flag_gives_it(tmp_path):
    folder = write_splits(tmp_path, "a\n", "a\n", "a\n")
    for data_path in (folder, tmp_path, [folder]):
        assert corpus.build_corpus("wt2", data_path).splits["train"].tolist() == [1, 0]


# ------------------------------------------------------------------------------------------------------- lm1b

SENTENCES = [["the cat", "a dog sat", "x", "", "the <S> end", "cat"], ["dog dog", "a", "the the the"]]


def write_lm1b(folder, vocab="<S>\t9\n<UNK> 8\nthe 7\na 6\ncat 5\ndog 4\n"):
    shards = folder / os.path.dirname(datasets.LM1B_SHARDS)
    shards.mkdir(parents=True)
    for i, lines in enumerate(SENTENCES):
        write(shards / f"news.en-{i + 1:05d}-of-00100", "".join(f"{line}\n" for line in lines))
    write(folder / "valid.txt", "the dog\nsat\n")
    write(folder / "1b_word_vocab.txt", vocab)
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
    expected = batches(corpus.segments(np.concatenate(shards), 3, 4))
    assert batches(corpus.segments(made.splits["train"], 3, 4)) == expected
    in_memory = corpus.build_corpus("lm1b", tmp_path, num_shuffle=3)
    np.testing.assert_array_equal(in_memory.splits["train"], made.splits["train"])


def test_lm1b_of_another_seed_has_the_same_sentences_in_another_order(tmp_path):
    write_lm1b(tmp_path)
    first, second = (corpus.build_corpus("lm1b", tmp_path, seed=seed).splits["train"] for seed in (0, 1))
    assert first.tolist() != second.tolist()
    assert sorted(first) == sorted(second)


def test_lm1b_names_what_is_missing(tmp_path):
    with pytest.raises(FileNotFoundError, match="no file .*valid.txt. Dataset 'lm1b' needs it; .* --download"):
        corpus.prepare(tmp_path, "lm1b")
    write(tmp_path / "valid.txt", "a\n")
    with pytest.raises(FileNotFoundError, match="no file .*1b_word_vocab.txt"):
        corpus.prepare(tmp_path, "lm1b")
    write(tmp_path / "1b_word_vocab.txt", "<S>\na\n")
    with pytest.raises(FileNotFoundError, match=r"no file .*tokenized.shuffled/news.en-\*"):
        corpus.prepare(tmp_path, "lm1b")
    write_lm1b(tmp_path / "whole", vocab="<S>\na\n")
    with pytest.raises(ValueError, match="unk symbol '<UNK>' is not in vocabulary file .*1b_word_vocab.txt"):
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
    path = write(tmp_path / "a.txt", " ".join(["the"] * 300_000 + [f"w{i}" for i in range(25000)]))
    assert corpus.build_corpus("text", path, level="word").cutoffs == [1000, 9000, 22000]
    assert corpus.build_corpus("text", path, level="word", cutoffs=[]).cutoffs == []
    assert corpus.build_corpus("text", path, level="word", cutoffs=[100, 25002]).cutoffs == [100, 25002]
    with pytest.raises(ValueError, match=r"cutoffs must be below 25003, .* got \[100, 25003\]"):
        corpus.build_corpus("text", path, level="word", cutoffs=[100, 25003])
    for bad in ([0, 5], [5, 5], [7, 5]):
        with pytest.raises(ValueError, match="cutoffs must be positive and rise"):
            corpus.build_corpus("text", path, level="word", cutoffs=bad)


# ---------------------------------------------------------------------------------------- the prepared folder

TEXT = "".join(f"line {i % 7} of {i}\n\n" for i in range(300))


def test_the_prepared_folder(tmp_path):
    path = write(tmp_path / "a.txt", "b a\na a c")
    folder = tmp_path / "made" / "here"
    made = corpus.prepare(folder, "text", path, level="word", valid_fraction=0.5, min_freq=2, cutoffs=[2])
    assert sorted(os.listdir(folder)) == ["corpus-info.json", "train.npy", "valid.npy", "vocab.txt"]
    assert json.loads((folder / "corpus-info.json").read_text()) == {
        "vocab_size": 3,
        "cutoffs": [0, 2, 3],
        "dataset": "text",
        "format": 1,
        "n_tokens": {"train": 3, "valid": 4},
        "files": {"train": ["train.npy"], "valid": ["valid.npy"]},
        "vocab": {
            "level": "word",
            "lower_case": False,
            "special": ["<eos>", "<unk>"],
            "unk": "<unk>",
            "bos": None,
            "eos": "<eos>",
            "min_freq": 2,
            "max_size": None,
        },
        "options": {
            "level": "word",
            "lower_case": False,
            "min_freq": 2,
            "max_size": None,
            "valid_fraction": 0.5,
            "cutoffs": [2],
        },
        "inputs": {path: 9},
    }
    assert (folder / "vocab.txt").read_text() == "<eos>\n<unk>\na\n"
    assert np.load(folder / "train.npy").tolist() == [1, 2, 0]
    assert np.load(folder / "valid.npy").tolist() == [2, 2, 1, 0]
    assert np.load(folder / "train.npy").dtype == np.uint8
    assert isinstance(made.splits["train"], np.memmap)
    assert (made.cutoffs, made.by_character) == ([2], False)


@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        ("text", {"level": "word"}),
        ("text", {"level": "char", "max_size": 5, "lower_case": True}),
        ("text", {"level": "byte", "valid_fraction": 0.3}),
        ("pydoc", {"level": "word"}),
    ],
)
@pytest.mark.parametrize("scheme", ["", "file://", "ram://"])
def test_prepared_streamed_and_in_memory_are_the_same(tmp_path, monkeypatch, dataset, options, scheme):
    monkeypatch.setattr(corpus, "_READ_AHEAD", 50)
    data_path = write(tmp_path / "a.txt", TEXT) if dataset == "text" else None
    expected = corpus.build_corpus(dataset, data_path, **options)
    folder = f"{scheme}{tmp_path}/made"
    corpus.prepare(folder, dataset, data_path, **options)
    found = corpus.load_corpus(folder)
    assert found.vocab.symbols == expected.vocab.symbols
    assert found.vocab.get_config() == expected.vocab.get_config()
    assert (found.cutoffs, found.by_character) == (expected.cutoffs, expected.by_character)
    assert list(found.splits) == list(expected.splits) == ["train", "valid"]
    for split, tokens in expected.splits.items():
        assert len(found.splits[split]) == len(tokens)
        assert isinstance(found.splits[split], StoredTokens if scheme else np.memmap)
        np.testing.assert_array_equal(found.splits[split][7:19], tokens[7:19])
        settings = {"start": 3, "drop_remainder": True} if split == "valid" else {}
        streamed = corpus.segments(found.splits[split], 2, 11, **settings).take(60)
        held = corpus.segments(tokens, 2, 11, **settings).take(60)
        assert streamed.element_spec == held.element_spec
        assert batches(streamed) == batches(held)
    train, streamed = expected.splits["train"], found.splits["train"]
    assert corpus.get_bin_sizes(streamed, 2, 8, [3, 5]) == corpus.get_bin_sizes(train, 2, 8, [3, 5])
    start = corpus.num_segments(len(train), 3, 50) - 1
    wrapped = batches(corpus.segments(streamed, 3, 50, start=start, repeat=True).take(3))
    assert wrapped == batches(corpus.segments(train, 3, 50, start=start, repeat=True).take(3))


def test_token_files_have_the_smallest_type_that_fits(tmp_path):
    for n_symbols, dtype in ((256, np.uint8), (257, np.uint16), (65536, np.uint16), (65537, np.int32)):
        text = " ".join(f"w{i}" for i in range(n_symbols - 2))
        made = corpus.prepare(
            tmp_path / str(n_symbols), "text", write(tmp_path / "a.txt", text), level="word", cutoffs=[]
        )
        assert len(made.vocab) == n_symbols
        assert made.splits["train"].dtype == dtype
        assert made.splits["train"][-1] == len(made.splits["train"]) + 1


def test_a_second_run_sees_that_the_work_is_done(tmp_path, capsys):
    write_splits(tmp_path, "a b\n", "b\n", "a\n")
    corpus.prepare(tmp_path, "wt2")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    again = corpus.prepare(tmp_path, "wt2", verbose=1)
    assert "is prepared already" in capsys.readouterr().out
    assert again.splits["train"].tolist() == [1, 2, 0]
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before
    (tmp_path / "train.txt").unlink()
    assert corpus.prepare(tmp_path, "wt2").splits["train"].tolist() == [1, 2, 0]


def test_a_moved_folder_is_the_same(tmp_path):
    (tmp_path / "old").mkdir()
    write_splits(tmp_path / "old", "a b\n", "b\n", "a\n")
    corpus.prepare(tmp_path / "old", "wt2")
    (tmp_path / "old").rename(tmp_path / "new")
    assert corpus.prepare(f"{tmp_path}/new/", "wt2").splits["test"].tolist() == [1, 0]


def test_a_folder_that_was_prepared_otherwise_is_refused_and_kept(tmp_path):
    path = write(tmp_path / "a.txt", TEXT)
    folder = tmp_path / "made"
    corpus.prepare(folder, "text", path)
    before = (folder / "corpus-info.json").read_bytes()
    with pytest.raises(ValueError, match=r"prepared otherwise; .*\n  level: 'char' there, 'word' now\n  min_freq: 0"):
        corpus.prepare(folder, "text", path, level="word", min_freq=2)
    with pytest.raises(ValueError, match="dataset: 'text' there, 'pydoc' now"):
        corpus.prepare(folder, "pydoc")
    other = write(tmp_path / "b.txt", TEXT)
    with pytest.raises(ValueError, match=f"size of {other}: None there, {len(TEXT)} now"):
        corpus.prepare(folder, "text", [path, other])
    write(tmp_path / "a.txt", TEXT + "more")
    with pytest.raises(ValueError, match=f"size of {path}: {len(TEXT)} there, {len(TEXT) + 4} now"):
        corpus.prepare(folder, "text", path)
    assert (folder / "corpus-info.json").read_bytes() == before
    (folder / "corpus-info.json").unlink()
    assert corpus.prepare(folder, "text", path, level="word").vocab.level == "word"


def test_a_folder_of_the_original_program_is_prepared_anew(tmp_path):
    write_splits(tmp_path, "a b\n", "b\n", "a\n")
    write(tmp_path / "corpus-info.json", '{"vocab_size": 3, "cutoffs": [], "dataset": "wt2"}')
    with pytest.raises(FileNotFoundError, match="no corpus-info.json of a prepared corpus in"):
        corpus.load_corpus(tmp_path)
    assert corpus.prepare(tmp_path, "wt2").splits["train"].tolist() == [1, 2, 0]
    assert corpus.load_corpus(tmp_path).vocab.symbols == ["<eos>", "a", "b"]


def test_a_failed_run_leaves_nothing(tmp_path):
    folder = tmp_path / "made"
    with pytest.raises(ValueError, match="a.txt is not UTF-8 text: see byte 2000000"):
        corpus.prepare(folder, "text", write(tmp_path / "a.txt", b"a " * 1_000_000 + b"\xff"), level="word")
    assert os.listdir(folder) == []
    write_splits(tmp_path, "a b\n", "a\nb new\n", "a\n")
    with pytest.raises(ValueError, match=r"valid\.txt, line 2: 'new' is not in the vocabulary"):
        corpus.prepare(folder, "wt103", tmp_path)
    assert os.listdir(folder) == []


def test_a_split_without_a_word_is_refused(tmp_path):
    write_splits(tmp_path, "97 98", "97", " \n")
    with pytest.raises(ValueError, match="test.txt: no token in the split test"):
        corpus.prepare(tmp_path, "enwik8")


def test_a_folder_is_not_made_for_text_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="no file .*nowhere.txt"):
        corpus.prepare(tmp_path / "made", "text", f"{tmp_path}/nowhere.txt")
    assert os.listdir(tmp_path) == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    path = write(tmp_path / "a.txt", TEXT)
    with pytest.raises(OSError, match="data_dir .*a.txt/made cannot be written to"):
        corpus.prepare(f"{path}/made", "text", path)


def test_two_processes_do_not_prepare_one_folder(tmp_path):
    path = write(tmp_path / "a.txt", TEXT)
    with corpus._new_files(f"{tmp_path}/made"):
        with pytest.raises(OSError, match="another process is preparing it"):
            corpus.prepare(tmp_path / "made", "text", path)
    assert len(corpus.prepare(tmp_path / "made", "text", path).splits["train"]) == int(len(TEXT) * 0.95)


def test_load_corpus_says_what_does_not_belong_together(tmp_path):
    write(tmp_path / "corpus-info.json", "{")
    with pytest.raises(ValueError, match="corpus-info.json is not JSON"):
        corpus.load_corpus(tmp_path)
    (tmp_path / "corpus-info.json").unlink()
    with pytest.raises(FileNotFoundError, match=f"python tools/prepare_data.py --dataset=.* --data_dir={tmp_path}$"):
        corpus.load_corpus(tmp_path)
    write_splits(tmp_path, "a b\n", "b\n", "a\n")
    corpus.prepare(tmp_path, "wt2")
    tokens = (tmp_path / "test.npy").read_bytes()
    (tmp_path / "test.npy").unlink()
    with pytest.raises(FileNotFoundError, match="no token file .*test.npy"):
        corpus.load_corpus(tmp_path)
    (tmp_path / "test.npy").write_bytes(tokens[:-1])
    for folder in (tmp_path, f"file://{tmp_path}"):
        with pytest.raises(ValueError, match="test.npy is not a whole token file"):
            corpus.load_corpus(folder)
    np.save(tmp_path / "test.npy", np.zeros(9, np.uint8))
    with pytest.raises(ValueError, match="the split test of .* has 9 tokens, but corpus-info.json says 2"):
        corpus.load_corpus(tmp_path)
    (tmp_path / "test.npy").write_bytes(tokens)
    write(tmp_path / "vocab.txt", "<eos>\na\n")
    with pytest.raises(ValueError, match="vocab.txt has 2 symbols, but corpus-info.json says vocab_size 3"):
        corpus.load_corpus(tmp_path)
    (tmp_path / "vocab.txt").unlink()
    with pytest.raises(FileNotFoundError, match="no vocabulary file .*vocab.txt"):
        corpus.load_corpus(tmp_path)
    info = json.loads((tmp_path / "corpus-info.json").read_text())
    write(tmp_path / "corpus-info.json", json.dumps({**info, "format": 2}))
    with pytest.raises(ValueError, match="corpus-info.json has format 2; this version reads format 1"):
        corpus.load_corpus(tmp_path)


def test_progress_counts_the_bytes_of_both_passes(tmp_path, monkeypatch):
    shown = []

    class Bar:
        def __init__(self, target, **_):
            shown.append(target)

        def update(self, current, finalize):
            shown.append((current, finalize))

    monkeypatch.setattr(corpus.keras.utils, "Progbar", Bar)
    path = write(tmp_path / "a.txt", "ab cd\n" * 400_000)  # 2.4 MB, read in three pieces
    corpus.prepare(tmp_path / "made", "text", path, level="word", verbose=1)
    assert shown == [5, (1, False), (2, False), (3, False), (4, False), (5, True)]


KILLED = """
import os, signal, sys
sys.path.insert(0, {root!r})
from txl_tf import corpus, text_files, token_files

data_path, folder = sys.argv[1:]
text_files._READ_BYTES = 2000
moments = 0

def killed_at(moment, function):
    def called(*args, **options):
        global moments
        moments += 1
        if moments == moment:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **options)
    return called

def run(moment):
    child = os.fork()
    if not child:
        os.replace = killed_at(moment, os.replace)
        token_files.TokenWriter.add = killed_at(moment, token_files.TokenWriter.add)
        token_files.TokenWriter.close = killed_at(moment, token_files.TokenWriter.close)
        corpus.Vocab._tokenize = killed_at(moment, corpus.Vocab._tokenize)
        corpus.prepare(folder, "text", data_path, level="word")
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

moment = 1
while (status := run(moment)) == -signal.SIGKILL:
    print(sorted(os.listdir(folder)), flush=True)
    try:
        corpus.load_corpus(folder)
        sys.exit("looks finished")
    except FileNotFoundError:
        moment += 1
sys.exit(status)
"""


def test_a_run_that_is_killed_looks_unfinished_and_the_next_one_succeeds(tmp_path):
    path = write(tmp_path / "a.txt", TEXT)
    program = KILLED.format(root=str(Path(__file__).parents[1]))
    result = subprocess.run(
        [sys.executable, "-c", program, path, str(tmp_path / "made")], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr
    left_behind = result.stdout.splitlines()  # after each kill -9, from the first piece of text to the last move
    assert len(left_behind) > 10
    assert left_behind[0] == "['prepare.tmp']"
    assert left_behind[-1] == "['prepare.tmp', 'train.npy', 'valid.npy', 'vocab.txt']"
    expected = corpus.build_corpus("text", path, level="word")
    found = corpus.load_corpus(tmp_path / "made")
    for split in ("train", "valid"):
        np.testing.assert_array_equal(found.splits[split], expected.splits[split])
    assert sorted(os.listdir(tmp_path / "made")) == ["corpus-info.json", "train.npy", "valid.npy", "vocab.txt"]


# ------------------------------------------------------------------------------------------ tokens -> batches


def test_segments_of_a_small_text():
    assert batches(corpus.segments(np.arange(15), 2, 4)) == [
        ([[0, 1, 2, 3], [7, 8, 9, 10]], [[1, 2, 3, 4], [8, 9, 10, 11]]),
        ([[4, 5], [11, 12]], [[5, 6], [12, 13]]),
    ]


@pytest.mark.parametrize(("n_tokens", "tgt_len"), [(14, 6), (14, 3), (14, 4), (15, 100), (4, 1), (29, 7)])
def test_segments_follow_the_rule_written_as_a_loop(n_tokens, tgt_len):
    tokens = np.random.default_rng(0).integers(0, 99, n_tokens)
    rows = tokens[: n_tokens // 2 * 2].reshape(2, n_tokens // 2)
    expected = []
    for t in range(0, rows.shape[1] - 1, tgt_len):
        end = min(t + tgt_len, rows.shape[1] - 1)
        expected.append((rows[:, t:end].tolist(), rows[:, t + 1 : end + 1].tolist()))
    assert batches(corpus.segments(tokens, 2, tgt_len)) == expected
    assert corpus.num_segments(n_tokens, 2, tgt_len) == len(expected)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32, np.int64])
def test_segments_of_a_memory_map_are_those_of_the_array(tmp_path, dtype):
    tokens = np.arange(50, dtype=dtype)
    tokens.tofile(tmp_path / "tokens.bin")
    mapped = np.memmap(tmp_path / "tokens.bin", dtype, mode="r")
    from_map, from_array = corpus.segments(mapped, 3, 5), corpus.segments(tokens, 3, 5)
    assert from_map.element_spec == from_array.element_spec
    assert batches(from_map) == batches(from_array)


def test_shapes_are_static_where_all_batches_are_alike():
    def shape(*args, **kwargs):
        tokens, labels = corpus.segments(np.arange(28), *args, **kwargs).element_spec
        assert tokens == labels
        assert tokens.dtype == tf.int32
        return tokens.shape.as_list()

    assert shape(4, 3) == [4, 3]
    assert shape(4, 4) == [4, None]
    assert shape(4, 4, drop_remainder=True) == [4, 4]


def test_drop_remainder_leaves_out_the_shorter_batch_only():
    tokens = np.arange(29)
    for tgt_len, n_short in ((5, 1), (13, 0)):
        full = batches(corpus.segments(tokens, 2, tgt_len))
        kept = full[: len(full) - n_short]
        assert batches(corpus.segments(tokens, 2, tgt_len, drop_remainder=True)) == kept
        assert corpus.num_segments(29, 2, tgt_len, drop_remainder=True) == len(kept)


def test_start_gives_the_tail_of_the_stream():
    tokens = np.arange(41)
    full = batches(corpus.segments(tokens, 2, 3))
    assert len(full) == 7
    for start in range(8):
        assert batches(corpus.segments(tokens, 2, 3, start=start)) == full[start:]


def test_repeat_wraps_at_the_end_of_the_epoch():
    tokens = np.arange(23)
    epoch = batches(corpus.segments(tokens, 2, 4))
    assert len(epoch) == 3
    for start in (0, 2, 3, 3_000_000_001):
        endless = corpus.segments(tokens, 2, 4, start=start, repeat=True)
        assert endless.cardinality() == tf.data.INFINITE_CARDINALITY
        expected = list(itertools.islice(itertools.cycle(epoch), start % 3, start % 3 + 10))
        assert batches(endless.take(10)) == expected


def test_rows_stay_on_their_replica():
    cpus = tf.config.list_logical_devices("CPU")
    if len(cpus) < 2:
        pytest.skip("needs two logical CPU devices")
    strategy = tf.distribute.MirroredStrategy([cpu.name for cpu in cpus[:2]])
    tokens = np.arange(41)
    expected = batches(corpus.segments(tokens, 4, 4))
    distributed = list(strategy.experimental_distribute_dataset(corpus.segments(tokens, 4, 4)))
    assert len(distributed) == len(expected)
    for batch, whole in zip(distributed, expected, strict=True):
        for values, rows in zip(batch, whole, strict=True):
            found = [part.numpy().tolist() for part in strategy.experimental_local_results(values)]
            assert found == [rows[:2], rows[2:]]


def test_bin_sizes_of_a_small_text():
    # Two batches of 2 x 16 tokens. Bin 10-19: 4 and 12 of them, mean 8, deviation 4: 8 + 2.5 * 4 = 18 -> 16.
    # Bin 20-: 20 in each: 20 -> 24. An empty bin gets 8.
    first, second = [10] * 4 + [20] * 20 + [0] * 8, [10] * 12 + [20] * 20
    tokens = np.concatenate([first[:16], second[:16], first[16:], second[16:], [0, 0, 0]])
    assert corpus.get_bin_sizes(tokens, 2, 16, [10, 20]) == [16, 24]
    assert corpus.get_bin_sizes(tokens, 2, 16, [10, 20, 30]) == [16, 24, 8]
    assert corpus.get_bin_sizes(tokens, 2, 16, []) == []


# ----------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [
        ("wiki", {}, "dataset must be one of pydoc, text, .*, lm1b, got 'wiki'"),
        ("wt2", {}, "dataset 'wt2' needs data_path: a folder of train.txt, valid.txt, test.txt"),
        ("text", {}, "dataset 'text' needs data_path: a UTF-8 text file"),
        ("pydoc", {"level": "bpe"}, "level must be one of word, char, byte, got 'bpe'"),
        ("pydoc", {"valid_fraction": 0}, "valid_fraction must be between 0 and 1, both excluded, got 0"),
        ("pydoc", {"valid_fraction": 1.0}, "valid_fraction must be between 0 and 1, both excluded, got 1.0"),
    ],
)
def test_bad_arguments_are_refused(dataset, options, message):
    with pytest.raises(ValueError, match=message):
        corpus.build_corpus(dataset, **options)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"a\.txt is empty"),
        (b"a", "a text of 1 tokens is too short to hold out 0.05 of it"),
        (b"ab\xc3\xa9\xff", r"a\.txt is not UTF-8 text: see byte 4. level='byte' reads any file"),
        (b"ab\xc3\xa9\xe2\x80", r"a\.txt is not UTF-8 text: see byte 4"),
        (b"ab\x00", r"a\.txt is not UTF-8 text: see byte 2"),
    ],
)
@pytest.mark.parametrize("read_bytes", [1, 1 << 20])
def test_bad_files_are_refused(tmp_path, monkeypatch, content, message, read_bytes):
    monkeypatch.setattr(text_files, "_READ_BYTES", read_bytes)
    with pytest.raises(ValueError, match=message):
        corpus.build_corpus("text", write(tmp_path / "a.txt", content))


def test_missing_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no file .*nowhere.txt"):
        corpus.build_corpus("text", str(tmp_path / "nowhere.txt"))
    write(tmp_path / "train.txt", "a\n")
    with pytest.raises(FileNotFoundError, match="no file .*valid.txt"):
        corpus.build_corpus("wt2", str(tmp_path))
    with pytest.raises(ValueError, match="is a folder, not a text file"):
        corpus.build_corpus("text", str(tmp_path))


@pytest.mark.parametrize(
    ("tokens", "options", "message"),
    [
        (np.arange(9), {"batch_size": 0}, "batch_size must be positive, got 0"),
        (np.arange(9), {"tgt_len": -3}, "tgt_len must be positive, got -3"),
        (np.arange(7), {}, "the text has 7 tokens: batch_size=4 and tgt_len=2 need at least 8, 2 a row"),
        (np.arange(11), {"drop_remainder": True}, "the text has 11 tokens: .* need at least 12, 3 a row"),
        (np.arange(9.0), {}, r"tokens must be a 1-D integer array, got float64 of shape \(9,\)"),
        (np.zeros([3, 4], int), {}, r"tokens must be a 1-D integer array, got int64 of shape \(3, 4\)"),
        (np.arange(9), {"start": -1}, r"start must be in \[0, 1\], the number of batches, got -1"),
        (np.arange(9), {"start": 2}, r"start must be in \[0, 1\], the number of batches, got 2"),
    ],
)
def test_segments_refuse_bad_arguments(tokens, options, message):
    with pytest.raises(ValueError, match=message):
        corpus.segments(tokens, **{"batch_size": 4, "tgt_len": 2, **options})


def test_bin_sizes_refuse_a_text_shorter_than_a_batch():
    with pytest.raises(ValueError, match="the text has 31 tokens: .* need at least 32, 16 a row"):
        corpus.get_bin_sizes(np.arange(31), 2, 16, [10])
