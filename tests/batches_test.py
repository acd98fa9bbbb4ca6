"""Batches: a text in rows, cut into segments in order, from arrays in memory, on disk and far away."""

import itertools
import mmap
import os
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from helpers import ANY, WatchedTokens, as_lists, raises_parameter

from txl_tf.data.text import batches
from txl_tf.data.text.batches import Segments, choose_bin_capacities, num_batches, segments
from txl_tf.data.token_files import StoredTokens, TokenWriter, open_tokens


def test_segments_of_a_small_text():
    assert as_lists(segments(np.arange(15), 2, 4)) == [
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
    assert as_lists(segments(tokens, 2, tgt_len)) == expected
    assert num_batches(n_tokens, 2, tgt_len) == len(expected)


@pytest.mark.parametrize(
    "dtype", [np.uint16, np.int64, *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in (np.uint8, np.int32))]
)
def test_segments_of_a_memory_map_are_those_of_the_array(tmp_path, dtype):
    tokens = np.arange(50, dtype=dtype)
    tokens.tofile(tmp_path / "tokens.bin")
    mapped = np.memmap(tmp_path / "tokens.bin", dtype, mode="r")
    from_map, from_array = segments(mapped, 3, 5), segments(tokens, 3, 5)
    assert from_map.element_spec == from_array.element_spec
    assert as_lists(from_map) == as_lists(from_array)


FAST_ROWS = {"memory": range(2), "map": range(2, 4), "parts": range(1, 4)}


@pytest.mark.parametrize(
    "kind, rows",
    [
        pytest.param(kind, rows, marks=[] if FAST_ROWS[kind] == rows else pytest.mark.slow)
        for kind in FAST_ROWS
        for rows in FAST_ROWS.values()
    ],
    ids=str,
)
def test_some_rows_are_those_of_the_whole_batches(tmp_path, kind, rows):
    tokens = np.random.default_rng(0).integers(0, 99, 61)
    tokens.tofile(tmp_path / "tokens.bin")
    mapped = np.memmap(tmp_path / "tokens.bin", tokens.dtype, mode="r")
    source = {"memory": tokens, "map": mapped, "parts": StoredTokens([mapped[:20], tokens[20:]])}[kind]
    some = Segments(source, 4, 6, start=1, most=2)
    here = slice(rows.start, rows.stop)
    expected = [(tokens[here], labels[here]) for tokens, labels in as_lists(segments(tokens, 4, 6, start=1).take(2))]
    assert as_lists(some.dataset(rows)) == expected
    assert as_lists(some.dataset()) == as_lists(segments(tokens, 4, 6, start=1).take(2))


def test_no_token_of_another_row_is_read(monkeypatch):
    monkeypatch.setattr(batches, "_READ_AHEAD", 5)
    parts = [WatchedTokens(np.arange(13)), WatchedTokens(np.arange(13, 42))]
    found = as_lists(Segments(StoredTokens(parts), 4, 3).dataset(range(2, 4)))  # rows of 10
    assert found[0] == ([[20, 21, 22], [30, 31, 32]], [[21, 22, 23], [31, 32, 33]])
    reads = np.concatenate([part.reads for part in parts])
    assert np.flatnonzero(reads).tolist() == list(range(20, 40))


def pages_in_memory(array):
    """For each page of a memory map, whether this process has read it: bool `[pages]`."""
    with open("/proc/self/pagemap", "rb") as file:
        file.seek(array.ctypes.data // mmap.PAGESIZE * 8)
        entries = np.frombuffer(file.read(-(-array.nbytes // mmap.PAGESIZE) * 8), np.uint64)
    return (entries >> np.uint64(63)).astype(bool)


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_text_of_20_gigabytes_is_read_in_pieces(tmp_path, scheme):
    writer = TokenWriter(str(tmp_path / "huge.npy"), n_symbols=60000)
    writer.n_tokens = 10**10
    writer.close()
    os.truncate(writer.path, writer.header_bytes + 2 * 10**10)  # zeros that take no room
    before = resident_memory()
    tokens = open_tokens([scheme + writer.path])
    worker_2_of_2 = Segments(tokens, 64, 128, start=10**6, repeat=True).dataset(range(32, 64))
    for found, labels in worker_2_of_2.take(3):
        assert found.shape == labels.shape == [32, 128] and not tf.reduce_any(found != labels)
    assert resident_memory() - before < 200e6  # the pieces that are read ahead, and TensorFlow's functions
    if not scheme:
        pages = pages_in_memory(tokens)
        assert not pages[: len(pages) // 2 - 64].any() and 32 <= pages.sum() < 5000


def resident_memory():
    """Bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_shapes_are_static_where_all_batches_are_alike():
    def shape(*args, **kwargs):
        tokens, labels = segments(np.arange(28), *args, **kwargs).element_spec
        assert tokens == labels
        assert tokens.dtype == tf.int32
        return tokens.shape.as_list()

    assert shape(4, 3) == [4, 3]
    assert shape(4, 4) == [4, None]
    assert shape(4, 4, drop_remainder=True) == [4, 4]


def test_drop_remainder_leaves_out_the_shorter_batch_only():
    tokens = np.arange(29)
    for tgt_len, n_short in ((5, 1), (13, 0)):
        full = as_lists(segments(tokens, 2, tgt_len))
        kept = full[: len(full) - n_short]
        assert as_lists(segments(tokens, 2, tgt_len, drop_remainder=True)) == kept
        assert num_batches(29, 2, tgt_len, drop_remainder=True) == len(kept)


def test_start_gives_the_tail_of_the_stream():
    tokens = np.arange(41)
    full = as_lists(segments(tokens, 2, 3))
    assert len(full) == 7
    for start in range(8):
        assert as_lists(segments(tokens, 2, 3, start=start)) == full[start:]


def test_repeat_wraps_at_the_end_of_the_epoch():
    tokens = np.arange(23)
    epoch = as_lists(segments(tokens, 2, 4))
    assert len(epoch) == 3
    for start in (0, 2, 3, 3_000_000_001):
        endless = segments(tokens, 2, 4, start=start, repeat=True)
        assert endless.cardinality() == tf.data.INFINITE_CARDINALITY
        expected = list(itertools.islice(itertools.cycle(epoch), start % 3, start % 3 + 10))
        assert as_lists(endless.take(10)) == expected


def test_rows_stay_on_their_replica():
    cpus = tf.config.list_logical_devices("CPU")
    if len(cpus) < 2:
        pytest.skip("needs two logical CPU devices")
    strategy = tf.distribute.MirroredStrategy([cpu.name for cpu in cpus[:2]])
    tokens = np.arange(41)
    expected = as_lists(segments(tokens, 4, 4))
    distributed = list(strategy.experimental_distribute_dataset(segments(tokens, 4, 4)))
    assert len(distributed) == len(expected)
    for batch, whole in zip(distributed, expected, strict=True):
        for values, rows in zip(batch, whole, strict=True):
            found = [part.numpy().tolist() for part in strategy.experimental_local_results(values)]
            assert found == [rows[:2], rows[2:]]


def test_bin_capacities_of_a_small_text():
    # Two batches of 2 x 16 tokens. Bin 10-19: 4 and 12 of them, mean 8, deviation 4: 8 + 2.5 * 4 = 18 -> 16.
    # Bin 20-: 20 in each: 20 -> 24. An empty bin gets 8.
    first, second = [10] * 4 + [20] * 20 + [0] * 8, [10] * 12 + [20] * 20
    tokens = np.concatenate([first[:16], second[:16], first[16:], second[16:], [0, 0, 0]])
    assert choose_bin_capacities(tokens, 2, 16, [10, 20]) == [16, 24]
    assert choose_bin_capacities(tokens, 2, 16, [10, 20, 30]) == [16, 24, 8]
    assert choose_bin_capacities(tokens, 2, 16, []) == []


def test_bin_capacities_are_the_originals(reference, monkeypatch):
    golden = np.load(reference / "corpus" / "wt2" / "golden.npz")
    cutoffs = golden["cutoffs"][1:-1].tolist()
    for tokens in (golden["train"], StoredTokens([golden["train"][:99], golden["train"][99:]])):
        for at_once in (1 << 22, 100):  # tokens, which are counted in pieces
            monkeypatch.setattr(batches, "_COUNTED_AT_ONCE", at_once)
            assert choose_bin_capacities(tokens, 4, 16, cutoffs) == golden["bin_sizes_b4_t16"].tolist()


# ----------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("tokens", "options", "name", "value"),
    [
        (np.arange(9), {"batch_size": 0}, "batch_size", 0),
        (np.arange(9), {"tgt_len": -3}, "tgt_len", -3),
        (np.arange(7), {}, "the text", 7),
        (np.arange(11), {"drop_remainder": True}, "the text", 11),
        (np.arange(9.0), {}, "tokens", ANY),
        (np.zeros([3, 4], int), {}, "tokens", ANY),
        (np.arange(9), {"start": -1}, "start", -1),
        (np.arange(9), {"start": 2}, "start", 2),
    ],
)
def test_segments_refuse_bad_arguments(tokens, options, name, value):
    with raises_parameter(name, value):
        segments(tokens, **{"batch_size": 4, "tgt_len": 2, **options})


@pytest.mark.parametrize("dtype", [np.int64, np.uint64])
def test_an_id_that_int32_does_not_hold_is_no_other_id(tmp_path, dtype):
    tokens = np.array([1, 2**32 + 5, 3], dtype)
    path = tmp_path / "tokens"
    tokens.tofile(path)
    for text in (tokens, np.memmap(path, dtype, "r")):
        ((read, labels),) = segments(text, 1, 2)
        assert read.numpy().tolist() == [[1, 2**31 - 1]] and labels.numpy().tolist() == [[2**31 - 1, 3]]


def test_bin_capacities_refuse_a_text_shorter_than_a_batch():
    with raises_parameter("the text", 31):
        choose_bin_capacities(np.arange(31), 2, 16, [10])
