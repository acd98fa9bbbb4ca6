"""Tests of `txl_tf.corpus`."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from txl_tf import corpus

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
@pytest.mark.parametrize("dataset", ["enwik8", "text8", "ptb", "wt2"])
def test_corpus_and_batches_are_the_originals(dataset):
    golden = np.load(REFERENCE / dataset / "golden.npz")
    made = corpus.build_corpus(dataset, REFERENCE / dataset)
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
    assert corpus.get_bin_sizes(golden["train"], 4, 16, cutoffs) == golden["bin_sizes_b4_t16"].tolist()


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
    text = corpus.pydoc_text()
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
        monkeypatch.setattr(corpus, "_READ_BYTES", size)
        pieces = corpus.build_corpus("text", path, level=level)
        assert pieces.vocab.symbols == whole.vocab.symbols
        np.testing.assert_array_equal(pieces.splits["train"], whole.splits["train"])
        np.testing.assert_array_equal(pieces.splits["valid"], whole.splits["valid"])


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
        ("wiki", {}, "dataset must be one of pydoc, text, .*, wt103, got 'wiki'"),
        ("lm1b", {}, "dataset 'lm1b' is not available yet"),
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
    monkeypatch.setattr(corpus, "_READ_BYTES", read_bytes)
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
