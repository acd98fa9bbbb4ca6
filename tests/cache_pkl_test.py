"""The original's cache.pkl: read whatever Python and script wrote it, and refused where it would run something."""

import collections
import inspect
import itertools
import os
import pickle
import re
import struct
import sys

import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    CACHED_SYMBOLS,
    CACHED_TOKENS,
    Python2Pickler,
    make_cache,
    mentions,
    raises_naming,
    raises_parameter,
    read_hostile,
)
from hostile import read_forked

from txl_tf.convert.cache_pkl import read_cache_pkl
from txl_tf.convert.corpus_files import WHITE_SPACE
from txl_tf.convert.pickles import FileError, RefusedError

WAYS = [
    *({"protocol": protocol} for protocol in range(6)),
    {"modules": ("__main__", "__main__")},
    {"modules": ("data_utils", "data_utils")},
    {"pickler": Python2Pickler},
    {"pickler": Python2Pickler, "modules": ("__main__", "vocabulary")},
]


def test_what_is_in_it(tmp_path, monkeypatch):
    expected = CACHED_SYMBOLS, "wt103", [2, 3], False
    for way in WAYS:
        with monkeypatch.context() as patch:
            cache = read_cache_pkl(make_cache(tmp_path / "cache.pkl", patch, **way))
        assert (cache.symbols, cache.dataset, cache.cutoffs, cache.lower_case) == expected, way
        assert {split: list(ids) for split, ids in cache.splits.items()} == CACHED_TOKENS, way
        for value in (*cache.symbols, cache.dataset, *cache.cutoffs, cache.lower_case):
            assert type(value) in (str, int, bool), way


def test_training_text_may_be_a_list_of_files_and_cutoffs_may_be_absent(tmp_path, monkeypatch):
    cache = read_cache_pkl(make_cache(tmp_path / "cache.pkl", monkeypatch, train=["news.en-0"], cutoffs=None))
    assert cache.cutoffs is None
    assert list(cache.splits) == ["valid", "test"]


def test_integers_of_any_size_and_byte_order(tmp_path, monkeypatch):
    for kind in ("<i8", ">i8", "<i4", ">i4", "<u2", ">u2"):
        ids = np.array([1, 2, 300], kind)
        cache = read_cache_pkl(make_cache(tmp_path / "cache.pkl", monkeypatch, train=ids))
        np.testing.assert_array_equal(cache.splits["train"], [1, 2, 300], err_msg=kind)


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


COMMANDS = ["os.system", "posix.system", "builtins.eval", "__builtin__.eval", "subprocess.Popen"]


def test_a_command_is_refused_by_name_and_not_run(tmp_path):
    marker = tmp_path / "it_ran"
    for call, command in itertools.product(CALLS, COMMANDS):
        case = f"{call.__name__} {command}"
        module, name = command.split(".")
        argument = f"open({str(marker)!r}, 'w')" if name == "eval" else f"touch {marker}"
        path = tmp_path / "cache.pkl"
        path.write_bytes(call(module, name, argument) + b".")
        with pytest.raises(ValueError) as error:
            read_cache_pkl(path)
            pytest.fail(f"{case}: not refused")
        assert mentions(str(error.value), path, f"{module}.{name}"), case
        assert not marker.exists(), case


@pytest.mark.parametrize("call", CALLS[:-1])
def test_the_same_bytes_do_run_in_pickle(tmp_path, call):
    marker = tmp_path / "it_ran"
    pickle.loads(call("os", "system", f"touch {marker}") + b".")
    assert marker.exists()


OTHER_NAMES = [
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
]


def test_every_other_name_is_refused(tmp_path):
    path = tmp_path / "cache.pkl"
    for module, name in OTHER_NAMES:
        path.write_bytes(stack_global_call(module, name, "x") + b".")
        with raises_parameter("path", str(path), error=RefusedError) as error:
            read_cache_pkl(path)
            pytest.fail(f"{module}.{name}: not refused")
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
        with raises_parameter("path", str(path), error=FileError):
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
    with raises_parameter("path", str(path), error=FileError):
        read_cache_pkl(path)


def test_tokens_that_are_no_integers_and_symbols_that_are_no_text_are_errors(tmp_path, monkeypatch):
    path = make_cache(tmp_path / "cache.pkl", monkeypatch, train=np.array([1.5]))
    with raises_parameter("path", str(path), error=FileError) as error:
        read_cache_pkl(path)
    assert mentions(str(error.value), "tokens", "f8")
    with raises_parameter("path", str(path), error=FileError):
        read_cache_pkl(make_cache(tmp_path / "cache.pkl", monkeypatch, symbols=["the", 3]))


def test_a_remote_file(tmp_path, monkeypatch):
    path = make_cache(tmp_path / "cache.pkl", monkeypatch)
    assert read_cache_pkl(f"file://{path}").symbols == CACHED_SYMBOLS
    with raises_naming(FileNotFoundError, "absent.pkl"):
        read_cache_pkl(f"file://{tmp_path}/absent.pkl")


def test_a_remote_file_is_closed(tmp_path, monkeypatch):
    closed = []

    class File(tf.io.gfile.GFile):
        def __exit__(self, *error):
            super().__exit__(*error)
            closed.append(self.name)

    path = f"file://{make_cache(tmp_path / 'cache.pkl', monkeypatch)}"
    monkeypatch.setattr(tf.io.gfile, "GFile", File)
    read_cache_pkl(path)
    assert closed == [path]


def test_a_file_that_is_not_there(tmp_path):
    with raises_naming(FileNotFoundError, f"{tmp_path}{os.sep}cache.pkl"):
        read_cache_pkl(tmp_path / "cache.pkl")


# ------------------------------------------------------------------------------------------ what would fill the memory


@pytest.mark.parametrize(
    "pickler, protocol",
    [
        (pickle.Pickler, 5),
        (Python2Pickler, 2),  # Python 2 had three protocols
        *(pytest.param(pickle.Pickler, protocol, marks=pytest.mark.slow) for protocol in range(5)),
        *(pytest.param(Python2Pickler, protocol, marks=pytest.mark.slow) for protocol in range(2)),
    ],
)
def test_many_short_symbols_are_no_attack(tmp_path, monkeypatch, protocol, pickler):
    """The most objects that a file of its size has: of some bytes each, and all of them remembered."""
    symbols = [chr(33 + i // 1000) + chr(33 + i % 1000) for i in range(30_000)]
    symbols = [symbol for symbol in symbols if symbol.isprintable()]
    vocab = {"idx2sym": symbols, "sym2idx": collections.OrderedDict((s, [i]) for i, s in enumerate(symbols))}
    how = {"protocol": protocol, "pickler": pickler, "symbols": symbols, "counter": vocab["sym2idx"]}
    assert read_cache_pkl(make_cache(tmp_path / "cache.pkl", monkeypatch, **how)).symbols == symbols


def instance(cls, **attributes):
    items = b"".join(string(name) + value for name, value in attributes.items())
    return f"c{cls}\n".encode() + b")\x81}(" + items + b"ub"


def corpus(vocab=(), **attributes):
    """The pickle of a corpus; the attributes are pickles too."""
    vocab = {"idx2sym": SYMBOLS, **dict(vocab)}
    return b"\x80\x02" + instance("data_utils\nCorpus", vocab=instance("vocabulary\nVocab", **vocab), **attributes)


def remembered(value, *uses):
    """What `uses` the value number 0 many times, itself left out."""
    return value + b"q\x000](" + b"".join(uses) + b"e"


def array(shape=b"K\x02\x85", dtype=b"", data=b"U\x02\x00\x01"):
    return b"cnumpy.core.multiarray\n_reconstruct\n)R(K\x01" + shape + (dtype or DTYPE) + b"\x89" + data + b"tb"


M = 1_000_000
SYMBOLS = b"](" + string("the") + string("of") + b"e"
DTYPE = b"cnumpy\ndtype\n(U\x02i1K\x00K\x01tR"
BOMB = string("x") + b"2\x86" * 40  # a tuple that holds the one before twice, 40 times: 2**40 texts
ENCODE = b"c_codecs\nencode\n"
CLASS = b"cdata_utils\nCorpus\n"
LENGTH = struct.pack("<Q", 2**40)


def test_a_number_in_the_byte_order_of_another_machine(tmp_path):
    big_endian = b"cnumpy\ndtype\n(U\x02u2K\x00K\x01tR(K\x03U\x01>NNNK\x00K\x00K\x00tb"
    one = b"cnumpy.core.multiarray\nscalar\n(" + big_endian + b"U\x02\x00\x01tR"
    (tmp_path / "cache.pkl").write_bytes(corpus(cutoffs=b"](K\x00" + one + b"K\x02e") + b".")
    assert read_cache_pkl(tmp_path / "cache.pkl").cutoffs == [1]


def attacks():
    """`{name: (data, the error)}`. Built when asked for: all take 50 MB."""
    long_text = string("x" * M)
    long_bytes = b"T" + struct.pack("<i", M) + b"\xff" * M  # a string of Python 2, which is no UTF-8
    counter = b"}(" + b"".join(string(f"word {i}") + b"K\x01" for i in range(30_000)) + b"u"
    digits = b"I" + b"9" * M + b"\n"
    huge = b"\x8b" + struct.pack("<i", M) + b"\x7f" * M  # an integer of 8 million bits
    return {
        "place in the memo": (b"\x80\x02Nr\x00\x00\x00\x10.", "no corpus with a vocabulary"),
        "place in the memo, as text": (b"Np268435456\n.", "no corpus with a vocabulary"),
        "places in the memo": (b"\x80\x04N" + b"\x94" * 2 * M + b".", "more than 260000 objects in a file of 2000004"),
        # the same value many times
        "symbol": (corpus({"idx2sym": remembered(long_text, b"h\x00" * 3000)}), r"idx2sym holds 'x{200}'... \(10000"),
        "symbol of bytes": (
            corpus({"idx2sym": remembered(long_bytes, b"h\x00" * 3000)}), r"idx2sym holds '(.xff){50}'..."
        ),
        "symbol as text and bytes": (
            corpus({"idx2sym": b"](" + long_text + b"U\x01yT" + struct.pack("<i", M) + b"x" * M + b"e"}),
            r"idx2sym holds 'x{200}'... \(1000000 characters\) twice, the second time at 2",
        ),
        "name of a dtype": (
            remembered(long_bytes, b"cnumpy\ndtype\nh\x00\x85R" * 3000),
            "name of a dtype must be a text of at most 100 characters",
        ),
        "order of a dtype": (
            remembered(long_bytes, (DTYPE + b"K\x03h\x00\x86b") * 3000), "byte order of a dtype must be .* at most 100"
        ),
        "encoded text": (
            remembered(long_text, (ENCODE + b"h\x00U\x06latin1\x86R") * 3000),
            "2000000 bytes of arrays in a file of 10840",
        ),
        "encoding": (
            remembered(long_bytes, (ENCODE + b"U\x01xh\x00\x86R") * 300), r"encoding must be latin1, got '(.xff){50}"
        ),
        "copy of a dictionary": (remembered(counter, b"ccollections\nCounter\nh\x00\x85R" * 3000), "no corpus with"),
        "attributes": (remembered(counter, (CLASS + b")\x81h\x00b") * 3000), "no corpus with a vocabulary"),
        "attributes of a class": (counter + b"q\x00" + CLASS + b"h\x00b.", "attributes of a type"),
        "tokens": (
            corpus(train=array(b"J\x40\x42\x0f\x00\x85", data=b"T" + struct.pack("<i", M) + b"\x01" * M + b"q\x05"),
                   **{name: array(b"J\x40\x42\x0f\x00\x85", data=b"h\x05") for name in ("valid", "test")}),
            "3000000 tokens in a file of 1000",
        ),
        # long messages
        "module": (b"c" + b"a" * M + b"\nb\n.", r"is refused: it names a{200}... \(1000000 characters\).b, which"),
        "name": (b"cb\n" + b"a" * M + b"\n.", r"is refused: it names b.a{200}... \(1000000 characters\), which"),
        "module of bytes": (b"c" + b"\xff" * M + b"\nb\n.", "UnicodeDecodeError: utf-8 cannot be decoded: inv"),
        "name of a class": (b"(" + b"i" + b"\xff" * M + b"\nb\n.", "UnicodeDecodeError: ascii cannot be decoded"),
        "text of bytes": (
            b"X" + struct.pack("<i", M) + b"\xff" * M + b".", "UnicodeDecodeError: utf-8 cannot be decoded"
        ),
        "dataset": (corpus(dataset=long_text), r"dataset must have at most 100 characters, got 'x{200}'... \(1000000"),
        "class": (b"ccopy_reg\n_reconstructor\n" + long_text + b"\x85R.", r"an instance of 'x{200}'... \(10"),
        "attribute": (CLASS + b"N}" + long_text + b"Ns\x86b.", "attributes of a type"),
        "persistent id": (b"P" + b"x" * M + b"\n.", "the operation 0x50 is not one"),
        # long times and texts of what is nested
        **{
            f"tuples of tuples as {name}": (data + b".", message)
            for name, data, message in [
                ("corpus", BOMB, "no corpus with a vocabulary"),
                ("symbols", corpus({"idx2sym": BOMB}), "no corpus with a vocabulary"),
                ("symbol", corpus({"idx2sym": b"]" + BOMB + b"a"}), "no corpus with a vocabulary"),
                ("cutoffs", corpus(cutoffs=BOMB), "cutoffs must be integers from 0 to the 2 .*, got a tu"),
                ("cutoff", corpus(cutoffs=b"]" + BOMB + b"a"), "cutoffs must be integers .*, got a list of length 1"),
                ("shape", corpus(train=array(shape=BOMB)), "tokens must be a 1-D .*, got i1, its shape a tuple of"),
                ("size", corpus(train=array(shape=BOMB + b"\x85")), "got i1, its shape a tuple of length 1"),
                ("dtype", corpus(train=array(dtype=BOMB)), "tokens must be a 1-D integer array, got None, its "),
                ("data", corpus(train=array(data=BOMB)), "2 tokens of i1 in a tuple of length 2"),
                ("state", b"cnumpy.core.multiarray\n_reconstruct\n)R" + BOMB + b"b",
                 "an array must be 5 values, got a tu"),
                ("name", b"cnumpy\ndtype\n" + BOMB + b"\x85R", "name of a dtype must be .*, got a tuple of length 2"),
                ("order", DTYPE + BOMB + b"b", "the byte order of a dtype must be a text .*, got a tuple"),
                ("encoding", ENCODE + string("x") + BOMB + b"\x86R",
                 "encoding must be latin1, got a tuple of length 2"),
                ("text", ENCODE + BOMB + b"U\x06latin1\x86R", "encoding must be latin1, got 'latin1' for a tuple"),
                ("class", b"ccopy_reg\n_reconstructor\n" + BOMB + b"\x85R", "an instance of a tuple of length 2"),
                ("function", BOMB + b")R", "TypeError: 'tuple' object is not callable"),
                ("key", b"}" + BOMB + b"Ns", "the keys of a dictionary must be text"),
                ("keys", b"}(" + BOMB + b"Nu", "the keys of a dictionary must be text"),
                ("key of a new dictionary", b"(" + BOMB + b"Nd", "the keys of a dictionary must be text"),
                ("key of a counter", b"ccollections\nCounter\n)\x81" + BOMB + b"Ns", "no corpus with a vocabulary"),
                ("set", b"\x8f(" + BOMB + b"\x90", "no corpus with a vocabulary"),
                ("frozen set", b"(" + BOMB + b"\x91", "the operation 0x91 is not one"),
                ("persistent id", BOMB + b"Q", "unsupported persistent id encountered"),
            ]
        },
        "marks": (b"(" * 3 * M + b".", "more than 100 lists, tuples and dictionaries in one another"),
        "lists": (b"]" * 3 * M + b".", "more than 385000 objects in a file of 3000001 bytes"),
        "dictionaries": (b"}" * 3 * M + b".", "more than 385000 objects in a file of 3000001 bytes"),
        "tuples": (b")" + b"\x85" * 3 * M + b".", "more than 385000 objects in a file of 3000002 bytes"),
        "instances": (CLASS + b"q\x00(" + b"h\x00)R" * M + b"l.", "more than 510003 objects in a file of 4000024"),
        # lengths that are not there
        "bytes": (b"\x80\x04\x8e" + LENGTH + b".", "a string of 1099511627776 bytes in a file of 12"),
        "text": (b"\x80\x04\x8d" + LENGTH + b".", "a string of 1099511627776 bytes in a file of 12"),
        "byte array": (b"\x80\x05\x96" + LENGTH + b".", "a string of 1099511627776 bytes in a file of 12"),
        "byte array of 16 GB": (
            b"\x80\x05\x96" + struct.pack("<Q", 2**34) + b".", "a string of 17179869184 bytes in a"
        ),
        "frame": (b"\x80\x04\x95" + LENGTH + b".", "a string of 1099511627776 bytes in a file of 12"),
        "long": (b"\x80\x02\x8b" + struct.pack("<i", 2**31 - 1) + b".", "a string of 2147483647 bytes in a file of 8"),
        # integers
        "digits": (corpus(cutoffs=b"]" + digits + b"a") + b".", r"ValueError: Exceeds the limit \(4300 digits\)"),
        "huge cutoff": (corpus(cutoffs=b"](" + huge + b"q\x00" + b"h\x00" * 3000 + b"e"), "got a list of length 3001"),
        "huge shape": (corpus(train=array(shape=huge + b"\x85")) + b".", "got i1, its shape a tuple of length 1"),
        "shape of another array": (corpus(train=array(shape=b"K\xff\x85")) + b".", "255 tokens of i1 in '.x00.x01'"),
        "extension of 1 byte": (b"\x80\x02\x82\x01.", "the operation 0x82 is not one"),
        "extension of 2 bytes": (b"\x80\x02\x83\x01\x00.", "the operation 0x83 is not one"),
        "extension of 4 bytes": (b"\x80\x02\x84\x01\x00\x00\x00.", "the operation 0x84 is not one"),
    }  # fmt: skip


def attempt(path):
    read_cache_pkl(path)
    return "no error"


ATTEMPT = "from txl_tf.convert.cache_pkl import read_cache_pkl\n\n" + inspect.getsource(attempt)


LONG = ["instances", "tuples"]  # the limit that stops them stops lists, too


@pytest.mark.slow
@pytest.mark.parametrize("each_alone", [False, True])
def test_a_file_that_would_fill_the_memory_is_one_short_error(tmp_path, each_alone):
    messages = {}
    for name, (data, message) in attacks().items():
        if each_alone or name not in LONG:
            (tmp_path / f"{name}.pkl").write_bytes(data if data.endswith(b".") else data + b".")
            messages[name] = message
    found, stderr = read_hostile(tmp_path, ATTEMPT) if each_alone else (read_forked(tmp_path, attempt), "")
    for name, expected in messages.items():
        assert f"{name}.pkl" in found, f"{name} {stderr}"
        message, length, size, growth, _ = found[f"{name}.pkl"]
        assert re.search(r"cache.pkl: |\.pkl is refused: ", message), f"{name}: {message[:500]}"
        assert re.search(expected, message), f"{name}: {message[:500]}"
        assert length < 1000, name
        assert growth < 10 * size + 200 * 2**20, name


def test_white_space_in_symbols_becomes_escapes():
    assert {chr(c) for c in WHITE_SPACE} == {chr(c) for c in range(sys.maxunicode + 1) if chr(c).isspace()}
    assert "a b\u3000c\n\x85é\\".translate(WHITE_SPACE) == "a\\x20b\\u3000c\\n\\x85é\\"
