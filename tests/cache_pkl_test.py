"""The original's cache.pkl: read whatever Python and script wrote it, and refused where it would run something."""

import collections
import os
import pickle
import struct
import sys

import numpy as np
import pytest
from helpers import CACHED_SYMBOLS, CACHED_TOKENS, Python2Pickler, make_cache

from txl_tf.convert.cache_pkl import read_cache_pkl


@pytest.mark.parametrize(
    "how",
    [
        *({"protocol": protocol} for protocol in range(6)),
        {"modules": ("__main__", "__main__")},
        {"modules": ("data_utils", "data_utils")},
        {"pickler": Python2Pickler},
        {"pickler": Python2Pickler, "modules": ("__main__", "vocabulary")},
    ],
    ids=str,
)
def test_what_is_in_it(tmp_path, monkeypatch, how):
    cache = read_cache_pkl(make_cache(tmp_path / "cache.pkl", monkeypatch, **how))
    assert (cache.symbols, cache.dataset, cache.cutoffs, cache.lower_case) == (CACHED_SYMBOLS, "wt103", [2, 3], False)
    assert {split: list(ids) for split, ids in cache.splits.items()} == CACHED_TOKENS
    for value in (*cache.symbols, cache.dataset, *cache.cutoffs, cache.lower_case):
        assert type(value) in (str, int, bool)


def test_training_text_may_be_a_list_of_files_and_cutoffs_may_be_absent(tmp_path, monkeypatch):
    cache = read_cache_pkl(make_cache(tmp_path / "cache.pkl", monkeypatch, train=["news.en-0"], cutoffs=None))
    assert cache.cutoffs is None
    assert list(cache.splits) == ["valid", "test"]


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("kind", ["i8", "i4", "u2"])
def test_integers_of_any_size_and_byte_order(tmp_path, monkeypatch, kind, order):
    ids = np.array([1, 2, 300], order + kind)
    cache = read_cache_pkl(make_cache(tmp_path / "cache.pkl", monkeypatch, train=ids))
    np.testing.assert_array_equal(cache.splits["train"], [1, 2, 300])


@pytest.mark.parametrize("dataset", ["enwik8", "text8", "ptb", "wt2"])
def test_caches_of_the_original_program(reference, dataset):
    cache = read_cache_pkl(reference / "corpus" / dataset / "cache.pkl")
    with np.load(reference / "corpus" / dataset / "golden.npz") as golden:
        assert cache.symbols == list(golden["vocab"])
        assert list(cache.splits) == ["train", "valid", "test"]
        for split, ids in cache.splits.items():
            np.testing.assert_array_equal(ids, golden[split])
    assert (cache.dataset, cache.cutoffs) == (dataset, [])


# ----------------------------------------------------------------------------------------------- what would run


def string(text):
    return b"X" + struct.pack("<i", len(text)) + text.encode()


def global_call(module, name, argument):
    return f"c{module}\n{name}\n".encode() + b"(" + string(argument) + b"tR"


def stack_global_call(module, name, argument):
    return b"\x80\x04" + string(module) + string(name) + b"\x93" + string(argument) + b"\x85R"


def inst_call(module, name, argument):
    return b"(" + string(argument) + f"i{module}\n{name}\n".encode()


def obj_call(module, name, argument):
    return b"(" + f"c{module}\n{name}\n".encode() + string(argument) + b"o"


def call_within_a_corpus(module, name, argument):
    attributes = string("dataset") + string("wt2") + string("vocab") + global_call(module, name, argument)
    return b"cdata_utils\nCorpus\n)\x81}(" + attributes + b"ub"


CALLS = [global_call, stack_global_call, inst_call, obj_call, call_within_a_corpus]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    "module, name",
    [("os", "system"), ("posix", "system"), ("builtins", "eval"), ("__builtin__", "eval"), ("subprocess", "Popen")],
)
def test_a_command_is_refused_by_name_and_not_run(tmp_path, call, module, name):
    marker = tmp_path / "it_ran"
    argument = f"open({str(marker)!r}, 'w')" if name == "eval" else f"touch {marker}"
    path = tmp_path / "cache.pkl"
    path.write_bytes(call(module, name, argument) + b".")
    with pytest.raises(ValueError, match=rf"{path} is refused: it names {module}\.{name}.*Nothing of it was run"):
        read_cache_pkl(path)
    assert not marker.exists()


@pytest.mark.parametrize("call", CALLS[:-1])
def test_the_same_bytes_do_run_in_pickle(tmp_path, call):
    marker = tmp_path / "it_ran"
    pickle.loads(call("os", "system", f"touch {marker}") + b".")
    assert marker.exists()


@pytest.mark.parametrize(
    "module, name",
    [
        ("functools", "partial"),
        ("builtins", "getattr"),
        ("importlib", "import_module"),
        ("operator", "attrgetter"),
        ("pickle", "loads"),
        ("numpy", "load"),
        ("numpy.testing._private.utils", "runstring"),
        ("_codecs", "decode"),
        ("collections", "namedtuple"),
        ("torch._utils", "_rebuild_tensor_v2"),
        # attributes of what is known
        ("collections", "Counter.__init__"),
        ("data_utils", "Corpus.__init__.__globals__"),
        ("numpy", "ndarray.tofile"),
        ("numpy.core.multiarray", "_reconstruct.__globals__"),
        # what is known, elsewhere
        ("os", "Corpus"),
        ("__main__", "Counter"),
        ("txl_tf.vocabulary", "Vocab"),
    ],
)
def test_every_other_name_is_refused(tmp_path, module, name):
    path = tmp_path / "cache.pkl"
    path.write_bytes(stack_global_call(module, name, "x") + b".")
    with pytest.raises(ValueError, match="is refused: it names") as error:
        read_cache_pkl(path)
    assert f"{module}.{name}" in str(error.value)


def test_no_module_is_imported(tmp_path, monkeypatch):
    (tmp_path / "data_utils.py").write_text("raise SystemExit('imported')")
    (tmp_path / "other.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "cache.pkl"
    for module in ("data_utils", "other"):
        path.write_bytes(global_call(module, "Corpus", "x") + b".")
        with pytest.raises(ValueError):
            read_cache_pkl(path)
        assert module not in sys.modules


def test_attributes_set_on_a_class_reach_neither_the_class_nor_the_next_file(tmp_path, monkeypatch):
    before = collections.Counter.update
    path = tmp_path / "bad.pkl"
    for known in (b"ccollections\nCounter\n", b"cdata_utils\nCorpus\n", b"cnumpy.core.multiarray\n_reconstruct\n"):
        path.write_bytes(b"\x80\x02" + known + b"N}(" + string("update") + string("x") + b"u\x86b.")
        with pytest.raises(ValueError, match="cannot be read"):
            read_cache_pkl(path)
    assert collections.Counter.update is before
    assert read_cache_pkl(make_cache(tmp_path / "good.pkl", monkeypatch)).symbols == CACHED_SYMBOLS


@pytest.mark.parametrize(
    "data",
    [b"", b"the\nof\n", b"PK\x03\x04", pickle.dumps({"vocab": 1}), pickle.dumps([]), pickle.dumps(CACHED_SYMBOLS)[:-4]],
    ids=["empty", "text", "zip", "dict", "list", "cut short"],
)
def test_what_is_no_cache_is_one_clear_error(tmp_path, data):
    path = tmp_path / "cache.pkl"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=f"{path} cannot be read as the original's cache.pkl"):
        read_cache_pkl(path)


def test_tokens_that_are_no_integers_and_symbols_that_are_no_text_are_errors(tmp_path, monkeypatch):
    path = make_cache(tmp_path / "cache.pkl", monkeypatch, train=np.array([1.5]))
    with pytest.raises(ValueError, match="tokens must be a 1-D integer array, got f8"):
        read_cache_pkl(path)
    with pytest.raises(ValueError, match="no corpus with a vocabulary"):
        read_cache_pkl(make_cache(tmp_path / "cache.pkl", monkeypatch, symbols=["the", 3]))


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"there is no file {tmp_path}{os.sep}cache.pkl"):
        read_cache_pkl(tmp_path / "cache.pkl")
