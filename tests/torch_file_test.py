"""Files of PyTorch: read as they were written, in every layout, and refused where they would run or fill something."""

import collections
import copy
import inspect
import itertools
import json
import os
import pickle
import re
import struct
import sys
import zipfile
import zlib

import numpy as np
import pytest
from helpers import mentions, raises_naming, raises_parameter, read_hostile
from hostile import read_forked
from torch_files import (
    BFloat16,
    Instance,
    Module,
    Parameter,
    Storage,
    Tensor,
    arrays_of,
    assert_same,
    legacy_of,
    parameter_list,
    pickled,
    safetensors_of,
    write_legacy,
    write_safetensors,
    write_zip,
    zip_of,
)

from txl_tf.convert.pickles import Named, RefusedError
from txl_tf.convert.torch_file import named_tensors, read_tensors, read_torch_file


def write_compressed(path, tree, **options):
    return write_zip(path, tree, compress=True, **options)


def write_protocol_4(path, tree, **options):
    return write_zip(path, tree, protocol=4, **options)


WRITERS = [write_zip, write_compressed, write_protocol_4, write_legacy]
layouts = pytest.mark.parametrize("write", WRITERS)
ARRAY = np.arange(12, dtype=np.float32).reshape(3, 4)


# ------------------------------------------------------------------------------------------------------------- values


@layouts
def test_arrays_come_back_in_every_layout_and_dtype(tmp_path, write):
    for dtype in "float32 float16 float64 int64 int32 int16 int8 uint8 bool".split():
        array = np.array([[0, 1, -2], [3.5, 100, -128]]).astype(dtype)
        path = tmp_path / f"{dtype}.pt"  # which the error names
        assert_same(arrays_of(write(path, {"a": array, "b": array[0]})), {"a": array, "b": array[0]})


@layouts
def test_bfloat16_becomes_float32(tmp_path, write):
    halves = np.array([[0x3F80, 0xC000, 0x3E20], [0x7F80, 0x8000, 0x0001]], np.uint16)
    found = arrays_of(write(tmp_path / "x.pt", {"a": BFloat16(halves), "b": BFloat16(halves[1:])}))
    expected = np.array([[1, -2, 0.15625], [np.inf, -0.0, 2.0**-133]], np.float32)
    assert_same(found, {"a": expected, "b": expected[1:]})


@layouts
def test_views_share_their_storage(tmp_path, write):
    views = {
        "whole": ARRAY,
        "transposed": ARRAY.T,
        "rows": ARRAY[1:],
        "steps": ARRAY[::2, 1::2],
        "expanded": np.broadcast_to(ARRAY[2], [2, 4]),
        "number": ARRAY[1, 2:3].reshape([]),
        "ones": ARRAY[:1, None, :1],
        "empty": ARRAY[:, 4:],
    }
    path = write(tmp_path / "x.pt", views)
    found = read_torch_file(path)
    assert len({tensor.storage for tensor in found.values()}) == 1
    assert (found["steps"].offset, found["steps"].shape, found["steps"].stride) == (1, (2, 2), (8, 2))
    assert found["expanded"].stride == (0, 1)
    assert_same(arrays_of(path), views)


@layouts
def test_other_values_are_as_they_were(tmp_path, write):
    tree = {"step": 3, "lr": 0.5, "name": "é", "none": None, "flag": True, "list": [1, {"x": (2, "y")}], 4: 2**70}
    tree["ordered"] = collections.OrderedDict(b=[1], a={})
    tree["args"] = Instance("argparse", "Namespace", n_layer=3, cutoffs=[1, 2])
    tree["vocab"] = Instance("utils.vocabulary", "Vocab", idx2sym=["the", "of"], counter=collections.Counter("ab"))
    tree["set"] = {1, 2}
    tree["twice"] = [ARRAY, ARRAY]
    found = read_torch_file(write(tmp_path / "x.pt", tree))
    assert list(found) == list(tree)
    args, vocab = found.pop("args"), found.pop("vocab")
    assert (type(args), args.attributes) == (Named, {"n_layer": 3, "cutoffs": [1, 2]})
    assert (vocab.name, vocab.attributes["idx2sym"]) == ("Vocab", ["the", "of"])
    assert found["twice"][0] is found["twice"][1]
    for name in ("set", "twice"):
        found.pop(name), tree.pop(name)
    assert found == {name: tree[name] for name in found}


def test_a_pickle_alone(tmp_path):
    path = tmp_path / "vocab.pkl"
    for protocol in range(6):
        path.write_bytes(pickle.dumps({"idx2sym": ["a", "é"], "x": collections.OrderedDict([("b", 1)])}, protocol))
        assert read_torch_file(path) == {"idx2sym": ["a", "é"], "x": {"b": 1}}


NETWORK = Module(
    "mem_transformer",
    "MemTransformerLM",
    {"r_w_bias": ARRAY, "none": None},
    {
        "word_emb": Module(
            "mem_transformer",
            "AdaptiveEmbedding",
            modules={"layers": Module("torch.nn", "List", modules={"0": Module("utils", "E", {"weight": ARRAY + 1})})},
        ),
        "as_parameters": parameter_list(ARRAY + 2, None, ARRAY[:2]),
        "as_attributes": parameter_list(ARRAY + 3, None, ARRAY[2:], as_attributes=True),
        "none": None,
    },
    n_layer=3,
    cutoffs=[1, 2],
)  # fmt: skip


@layouts
def test_a_pickled_network_has_the_names_of_its_state_dict(tmp_path, write):
    path = write(tmp_path / "model.pt", NETWORK)
    expected = {
        "r_w_bias": ARRAY,
        "word_emb.layers.0.weight": ARRAY + 1,
        "as_parameters.0": ARRAY + 2,
        "as_parameters.2": ARRAY[:2],
        "as_attributes.0": ARRAY + 3,
        "as_attributes.2": ARRAY[2:],
    }
    assert_same(arrays_of(path), expected)
    found = read_torch_file(path)
    assert (found.name, found.attributes["n_layer"], found.attributes["cutoffs"]) == ("MemTransformerLM", 3, [1, 2])


def test_no_byte_order_and_any_folder_in_the_archive(tmp_path):
    path = write_zip(tmp_path / "x.pt", {"a": ARRAY}, byteorder=None, prefix="my model (1)")
    assert_same(arrays_of(path), {"a": ARRAY})


def test_the_same_model_in_two_formats_has_the_same_tensors(reference):
    folder = reference / "pytorch" / "hf_wt103"
    of_pickle, safe = (arrays_of(str(folder / name)) for name in ("pytorch_model.bin", "model.safetensors"))
    assert len(safe) > 30
    assert set(safe) <= set(of_pickle)
    assert_same({name: of_pickle[name] for name in safe}, safe)


def test_a_pickled_network_and_its_state_dict_have_the_same_tensors(reference):
    folder = reference / "pytorch" / "kimi_char_legacy"
    network, dictionary = (arrays_of(str(folder / name)) for name in ("model.pt", "state_dict.pt"))
    assert len(network) > 20
    assert sorted(set(dictionary) - set(network)) == ["pos_emb.inv_freq"]  # a buffer
    assert_same(network, {name: dictionary[name] for name in network})


# ----------------------------------------------------------------------------------------------------------- laziness


@pytest.mark.parametrize(
    "write, name", [(write_zip, "x.pt"), (write_legacy, "x.pt"), (write_safetensors, "x.safetensors")]
)
def test_storages_are_mapped_into_memory(tmp_path, write, name):
    array = arrays_of(write(tmp_path / name, {"a": ARRAY}))["a"]
    bases = [array]
    while getattr(bases[-1], "base", None) is not None:
        bases.append(bases[-1].base)
    assert any(isinstance(base, np.memmap) for base in bases)
    assert not array.flags.writeable


def test_compressed_storages_are_unpacked(tmp_path):
    path = write_compressed(tmp_path / "x.pt", {"a": np.zeros([100], np.float32)})
    assert os.path.getsize(path) < 1000
    assert_same(arrays_of(path), {"a": np.zeros([100], np.float32)})


def write_hole_in_zip(path, numel):
    """A tensor `small`, and one of `numel` numbers in a hole of the file."""
    small, hole = Storage("Float", ARRAY.tobytes(), 12), Storage("Float", b"", numel)
    tree = {"small": Tensor(small, 0, (3, 4), (4, 1)), "hole": Tensor(hole, 0, (numel,), (1,))}
    program, storages = pickled(tree)
    zip_of(path, program, storages)
    with zipfile.ZipFile(path, "a") as archive:
        member = archive.getinfo("archive/data/1")
        member.header_offset, member.file_size, member.compress_size = archive.start_dir, 4 * numel, 4 * numel
        archive.fp.seek(archive.start_dir)
        archive.fp.write(b"PK\x03\x04" + bytes(26))
        archive.start_dir += 30 + 4 * numel
        archive._didModify = True


def write_hole_in_legacy(path, numel):
    small, hole = Storage("Float", ARRAY.tobytes(), 12), Storage("Float", b"", numel)
    write_legacy(path, {"small": Tensor(small, 0, (3, 4), (4, 1)), "hole": Tensor(hole, 0, (numel,), (1,))})
    os.truncate(path, os.path.getsize(path) + 4 * numel)


def write_hole_in_safetensors(path, numel):
    tensors = {"small": {"dtype": "F32", "shape": [3, 4], "data_offsets": [0, 48]}}
    tensors["hole"] = {"dtype": "F32", "shape": [numel], "data_offsets": [48, 48 + 4 * numel]}
    safetensors_of(path, json.dumps(tensors).encode(), ARRAY.tobytes())
    os.truncate(path, os.path.getsize(path) + 4 * numel)


# -------------------------------------------------------------------------------------------------- what would run


def string(text):
    return b"X" + struct.pack("<i", len(text.encode())) + text.encode()


def name(module, attribute):
    return f"c{module}\n{attribute}\n".encode()


def by_global(module, attribute, argument):
    return name(module, attribute) + b"(" + string(argument) + b"tR"


def by_stack_global(module, attribute, argument):
    return string(module) + string(attribute) + b"\x93" + string(argument) + b"\x85R"


def by_inst(module, attribute, argument):
    return b"(" + string(argument) + f"i{module}\n{attribute}\n".encode()


def by_obj(module, attribute, argument):
    return b"(" + name(module, attribute) + string(argument) + b"o"


def by_newobj(module, attribute, argument):
    return name(module, attribute) + string(argument) + b"\x85\x81"


def by_newobj_ex(module, attribute, argument):
    return name(module, attribute) + string(argument) + b"\x85}\x92"


def by_build(module, attribute, argument):
    """An object whose `__setstate__` is the function."""
    cls = name("torch.nn", "Module") + b")\x81"
    return cls + b"}" + string("__setstate__") + name(module, attribute) + b"sb" + string(argument) + b"b"


def by_reconstructor(module, attribute, argument):
    return name("copy_reg", "_reconstructor") + b"(" + name(module, attribute) + string(argument) + b"NtR"


def by_tensor(module, attribute, argument):
    """In place of the function that makes a tensor with attributes."""
    function = name("torch._tensor", "_rebuild_from_type_v2")
    return function + b"(" + name(module, attribute) + b"N" + string(argument) + b"\x85}tR"


def by_storage(module, attribute, argument):
    """As class of a storage, called by none."""
    return b"(" + string("storage") + name(module, attribute) + string("0") + string("cpu") + b"K\x01tQ"


def by_source(module, attribute, argument):
    """As class of a module, in the way of torch < 1.6."""
    cls = b"(" + string("module") + name(module, attribute) + string("x.py") + string("import os") + b"tQ"
    return cls + string(argument) + b"\x85R"


def by_default(module, attribute, argument):
    """What makes the missing values of a dictionary."""
    return name("collections", "defaultdict") + name(module, attribute) + b"\x85R"


PLAIN_CALLS = [by_global, by_stack_global, by_inst, by_obj]
CALLS = [
    *PLAIN_CALLS, by_newobj, by_newobj_ex, by_build, by_reconstructor, by_tensor, by_storage, by_source, by_default
]  # fmt: skip


def alone(path, program):
    path.write_bytes(program)
    return path


def in_zip(path, program):
    return zip_of(path, program, {})


def in_legacy(part):
    def place(path, program):
        return legacy_of(path, **{"program": pickle.dumps({}), "storages": {}, part: program})

    place.__name__ = f"in_legacy_{part}"
    return place


PLACES = [alone, in_zip, *map(in_legacy, ["magic", "version", "system", "program", "keys"])]


def assert_refused(path, start, case=""):
    """Reading a file raises a ValueError that begins like this, a regular expression."""
    try:
        read_torch_file(path)
    except ValueError as error:
        assert re.match(start, str(error)), case
    else:
        pytest.fail(f"{case or start}: not refused")


@pytest.mark.parametrize("function", ["posix.system", "builtins.eval"])
def test_a_command_is_refused_by_name_and_not_run(tmp_path, function):
    marker = tmp_path / "it_ran"
    module, attribute = function.split(".")
    argument = f"open({str(marker)!r}, 'w')" if attribute == "eval" else f"touch {marker}"
    for call, place in itertools.product(CALLS, PLACES):
        case = f"{call.__name__} {place.__name__}"
        path = place(tmp_path / "x.pt", b"\x80\x02}" + string("a") + call(module, attribute, argument) + b"s.")
        assert_refused(path, rf"{path} .*\b{module}\.{attribute}\b", case)
        assert not marker.exists(), case


@pytest.mark.parametrize("call", PLAIN_CALLS)
def test_the_same_bytes_do_run_in_pickle(tmp_path, call):
    marker = tmp_path / "it_ran"
    pickle.loads(b"\x80\x02}" + string("a") + call("posix", "system", f"touch {marker}") + b"s.")
    assert marker.exists()


OTHER_NAMES = [
    ("os", "system"),
    ("nt", "system"),
    ("subprocess", "Popen"),
    ("builtins", "exec"),
    ("builtins", "getattr"),
    ("builtins", "__import__"),
    ("builtins", "open"),
    ("builtins", "type"),
    ("__builtin__", "eval"),
    ("functools", "partial"),
    ("functools", "reduce"),
    ("operator", "attrgetter"),
    ("importlib", "import_module"),
    ("pickle", "loads"),
    ("_pickle", "loads"),
    ("marshal", "loads"),
    ("types", "CodeType"),
    ("runpy", "run_path"),
    ("ctypes", "CDLL"),
    ("sys", "exit"),
    ("_codecs", "decode"),
    ("re", "compile"),
    ("collections", "namedtuple"),
    ("copy_reg", "add_extension"),
    ("tensorflow", "io"),
    ("txl_tf.convert.torch_file", "read_torch_file"),
    ("torchvision.models", "resnet"),
    ("numpy_financial", "x"),
    ("", "torch"),
    (".torch", "x"),
    # attributes of what is known
    ("collections", "OrderedDict.__init__.__globals__"),
    ("builtins", "set.__init__"),
    ("argparse", "Namespace.__init__"),
    # what is known, elsewhere
    ("os", "OrderedDict"),
    ("builtins", "Counter"),
]


def test_every_other_name_is_refused(tmp_path):
    for module, attribute in OTHER_NAMES:
        path = alone(tmp_path / "x.pt", b"\x80\x04" + by_stack_global(module, attribute, "x") + b".")
        assert_refused(path, rf".*it names {re.escape(module)}\.{re.escape(attribute)}, which no such file")


KNOWN_NAMES = [
    ("torch.hub", "load"),
    ("torch", "load"),
    ("torch._utils", "_import_dotted_name"),
    ("torch.serialization", "os.system"),
    ("numpy", "load"),
    ("numpy.testing._private.utils", "runstring"),
    ("numpy.f2py.crackfortran", "myeval"),
    ("transformers.utils", "import_utils"),
    ("utils", "run"),
    ("data_utils", "run"),
    ("__main__", "anything"),
]


def test_names_of_known_packages_are_only_names(tmp_path, monkeypatch):
    """They are neither imported nor taken from what is imported, and called with anything they do nothing."""
    marker = tmp_path / "it_ran"
    for package in ("utils", "data_utils"):
        (tmp_path / f"{package}.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys.modules["__main__"], "anything", lambda *_: marker.touch(), raising=False)
    before = set(sys.modules)
    calls = [*PLAIN_CALLS, by_newobj, by_build, by_reconstructor, by_source]
    for (module, attribute), call in itertools.product(KNOWN_NAMES, calls):
        case = f"{module}.{attribute} {call.__name__}"
        path = alone(tmp_path / "x.pt", b"\x80\x02" + call(module, attribute, f"touch {marker}") + b".")
        found = read_torch_file(path)
        assert type(found) is Named, case
        assert found.name in (attribute, "Module"), case
        assert not {imported for imported in set(sys.modules) - before if "txl_tf" not in imported}, case
        assert not marker.exists(), case


CLASSES = ["collections.OrderedDict", "torch.FloatStorage", "torch._utils._rebuild_tensor_v2", "torch.nn.Linear"]


def test_what_stands_for_a_class_cannot_be_changed(tmp_path):
    changes = {"b": b"}" + string("update") + b"Ns", "s": string("update") + b"N", "a": string("x")}
    for known, operation in itertools.product([*CLASSES, "builtins.set"], changes):
        given = name(*known.rsplit(".", 1)) + changes[operation] + operation.encode()
        path = alone(tmp_path / "bad.pkl", b"\x80\x02" + given + b".")
        assert_refused(path, f"{path} cannot be read as a file of PyTorch: ", f"{known} {operation}")
        assert_same(arrays_of(write_zip(tmp_path / "good.pt", {"a": ARRAY})), {"a": ARRAY})


def test_attributes_with_the_names_of_python_are_only_data(tmp_path):
    state = {"__class__": "x", "__dict__": {"name": "y"}, "__setstate__": 1, "name": "z", "state": {}, "attributes": {}}
    path = write_zip(tmp_path / "x.pt", {"object": Instance("torch.nn", "Linear", **state), "a": ARRAY})
    found = read_torch_file(path)["object"]
    assert (type(found), found.name, found.attributes) == (Named, "Linear", state)


@pytest.mark.parametrize("folder", ["evil_bin", "evil_legacy", "evil_vocab"])
def test_hostile_files_of_the_reference(reference, folder):
    (path,) = (path for path in (reference / "pytorch" / "refuse" / folder).iterdir() if path.suffix != ".json")
    with raises_parameter("path", str(path), error=RefusedError) as raised:
        read_torch_file(path)
    assert re.search(r"posix.system|(builtins|__builtin__).(eval|exec)", str(raised.value))
    assert not os.path.exists("models/hf/PWNED")


# ----------------------------------------------------------------------------- what would fill the memory, or take long

BAD_KEY = "the keys of a dictionary must be text or small numbers"
LIST = "there are no tensors in a list of length"
SHAPE = "offset, shape and stride of a tensor are"
STORAGE_IS = "a storage is of .*, key"

M = 1_000_000
FOUR = np.arange(4, dtype="<f4").tobytes()
STORAGE = {"0": Storage("Float", FOUR, 4)}
REBUILD = name("torch._utils", "_rebuild_tensor_v2")
ORDERED = name("collections", "OrderedDict")
BOMB = string("x") + b"2\x86" * 40  # a tuple that holds the one before twice, 40 times: 2**40 texts
LENGTH = struct.pack("<Q", 2**40)
X = r"'x{200}'\.\.\. \(1000000 characters\)"
SEVEN = r"'7{200}'\.\.\. \(1000000 characters\)"


def storage(key, numel):
    return b"(" + string("storage") + name("torch", "FloatStorage") + key + string("cpu") + numel + b"tQ"


def rebuilt(shape=b"K\x02\x85", stride=b"K\x01\x85", offset=b"K\x00", key=b"U\x010", numel=b"K\x04"):
    """A tensor of the first 2 numbers of `STORAGE`, or of what is given."""
    return b"\x80\x02" + REBUILD + b"(" + storage(key, numel) + offset + shape + stride + b"\x89NtR"


def remembered(value, *uses):
    """A list of what `uses` the value number 0 many times."""
    return b"\x80\x02" + value + b"q\x000](" + b"".join(uses) + b"e"


GROWING = (  # lists that grow after a tensor was made of them: it keeps what was checked
    b"}" + string("a") + rebuilt(b"](K\x02eq\x05", b"](K\x01eq\x06") + b"s"
    + string("b") + b"h\x05J\x00\x00\x00\x10as" + string("c") + b"h\x06K\x01as"
)  # fmt: skip


def programs():
    """`{name: (program, the error)}`. Built when asked for, like the next two: all take 100 MB."""
    text, digits = string("x" * M), string("7" * M)
    huge = b"\x8b" + struct.pack("<i", M) + b"\x7f" * M  # an integer of 8 million bits
    pairs = b"](" + b"".join(b"J" + struct.pack("<i", i) + b"N\x86" for i in range(60_000)) + b"e"
    long_tuple = b"(" + b"N" * M + b"t"
    return {
        "place in the memo": (b"\x80\x02Nr\x00\x00\x00\x10", "no tensors in None"),
        "places in the memo": (b"\x80\x04N" + b"\x94" * 2 * M, "more than 260000 objects in a file of 2000004"),
        "marks": (b"(" * 3 * M, "more than 100 lists, tuples and dictionaries in one another"),
        "lists": (b"]" * M, "more than 135000 objects in a file of 1000001 bytes"),
        "lists in one another": (b"]" * 300_000 + b"a" * 299_999, "more than 85000 objects in a file of 600000 bytes"),
        "tuples in one another": (b")" + b"\x85" * 20_000 + b"N0" * 100_000, "no tensors in a tuple of length 1"),
        "dictionaries in one another": (
            (b"}(" + string("a")) * 101 + b"N" + b"u" * 101,
            "more than 100 lists, tuples and dictionaries in one another",
        ),
        "the same text": (b"](" + text + b"2" * 300_000 + b"e", f"{LIST} 300001"),
        "laughs": (  # each dictionary has the one before ten times
            b"}q\x00" + (b"0}(" + b"".join(b"U\x01%dh\x00" % i for i in range(10)) + b"uq\x00") * 40,
            "^sums: 0$",
        ),
        # keys
        "key of a tuple": (b"}" + BOMB + b"Ns", BAD_KEY),
        "keys of tuples": (b"}(" + BOMB + b"Nu", BAD_KEY),
        "keys of a new dictionary": (b"(" + BOMB + b"Nd", BAD_KEY),
        "key of an ordered dictionary": (ORDERED + b")R" + BOMB + b"Ns", BAD_KEY),
        "pair of an ordered dictionary": (ORDERED + b"](" + BOMB + b"N\x86e\x85R", BAD_KEY),
        "ordered dictionary of no pairs": (ORDERED + text + b"\x85\x85R", "the items of a dictionary are no pairs"),
        "key of a large number": (b"}" + b"\x8a\x05" + b"\x00\x00\x00\x00\x01" + b"Ns", BAD_KEY),
        "key of a huge number": (b"}" + huge + b"Ns", BAD_KEY),
        "key of true": (b"}\x88Ns", BAD_KEY),
        "set": (b"\x8f(" + BOMB + b"\x90", "no tensors in a StandIn"),
        "set by name": (name("builtins", "set") + b"](" + BOMB + b"e\x85R", "no tensors in a StandIn"),
        "frozen set": (b"(" + BOMB + b"\x91", "the operation 0x91 is not one"),
        # the same value many times
        "copies of a dictionary": (
            remembered(pairs, (name("collections", "Counter") + b"h\x00\x85R") * 9000), f"{LIST} 9000"
        ),
        "copies of pairs": (remembered(pairs, (ORDERED + b"h\x00\x85R") * 30_000), "more than .* pairs in a file of"),
        "copies of pairs by instance": (
            remembered(pairs, (b"(" + ORDERED + b"h\x00o") * 30_000), "more than .* pairs in a file of"
        ),
        "arguments": (
            remembered(long_tuple, name("torch", "x") + b"q\x01" + b"h\x01h\x00R" * 30_000),
            "the arguments of a call are a tuple of length 1000000",
        ),
        "arguments of a class": (
            remembered(long_tuple, name("torch", "x") + b"q\x01" + b"h\x01h\x00\x81" * 30_000),
            "the arguments of a call are a tuple of length 1000000",
        ),
        "text as arguments": (
            remembered(text, name("torch", "x") + b"q\x01" + b"h\x01h\x00R" * 30_000),
            f"the arguments of a call are {X}",
        ),
        "names": (b"(" + b"".join(name("torch", f"x{i}") for i in range(1001)) + b"l", "more than 1000 classes"),
        "a name, many times": (
            remembered(string("torch." + "x" * M), string("x") + b"q\x01", b"h\x00h\x01\x93)R" * 9000), f"{LIST} 9001"
        ),
        # storages and tensors
        "long key": (rebuilt(key=digits), f"{STORAGE_IS} {SEVEN}, 4 numbers"),
        "long key, many times": (remembered(digits, storage(b"h\x00", b"K\x04") * 9000), f"{STORAGE_IS} {SEVEN}"),
        "key of other digits": (rebuilt(key=string("\u00b2")), f"{STORAGE_IS} '\u00b2', 4 numbers"),
        "key that is a path": (rebuilt(key=string("../../x")), f"{STORAGE_IS} '../../x', 4 numbers"),
        "key that is a number": (rebuilt(key=b"K\x00"), f"{STORAGE_IS} 0, 4 numbers"),
        "storage of two sizes": (rebuilt() + b"0" + rebuilt(numel=b"K\x05"), "storage 0 is of two kinds"),
        "numel of a huge number": (rebuilt(numel=huge), "key '0', 7999999 bits numbers"),
        "numel of true": (rebuilt(numel=b"\x88"), "key '0', True numbers"),
        "numel below 0": (rebuilt(numel=b"J\xff\xff\xff\xff"), "key '0', -1 numbers"),
        "numel beyond 64 bits": (
            rebuilt(numel=b"\x8a\x09" + bytes(8) + b"\x01"), "key '0', 18446744073709551616 numbers"
        ),
        "missing storage": (rebuilt(key=string("1")), "storage 1 of 16 bytes is missing"),
        "missing storage that no tensor has": (storage(string("2"), b"K\x01"), "storage 2 of 4 bytes is missing"),
        "storage of a class": (
            b"(" + string("storage") + name("torch.nn", "M") + string("0") + b"NK\x04tQ", f"{STORAGE_IS} '0'"
        ),
        "part of a storage": (
            b"(" + string("storage") + name("torch", "FloatStorage") + string("0") + b"NK\x04(K\x00ttQ",
            "it refers to a tuple of length 6, which is no storage, or the view of one",
        ),
        "persistent id of tuples": (BOMB + b"Q", "it refers to a tuple of length 2, which is no storage"),
        "persistent id of text": (text + b"Q", f"it refers to {X}, which is no storage"),
        "persistent id in text": (b"P" + b"x" * M + b"\n", "the operation 0x50 is not one"),
        "shape of tuples": (rebuilt(shape=BOMB), SHAPE),
        "shape of text": (rebuilt(shape=text), rf"a tensor of shape {X}, stride \[1\]"),
        "stride of text": (rebuilt(stride=text), rf"a tensor of shape \[2\], stride {X}"),
        "shape of true": (rebuilt(shape=b"\x88\x85"), SHAPE),
        "shape of a float": (rebuilt(shape=b"G" + bytes(8) + b"\x85"), SHAPE),
        "shape of a huge number": (rebuilt(shape=huge + b"\x85"), SHAPE),
        "shape of a million": (rebuilt(shape=b"(" + b"K\x01" * 100_000 + b"t"), SHAPE),
        "offset of a huge number": (rebuilt(offset=huge), rf"{SHAPE} 7999999 bits, \[2\], \[1\]"),
        "offset of text": (rebuilt(offset=text), rf"{SHAPE} {X}, \[2\], \[1\]"),
        "tensor of text": (REBUILD + b"(" + text + b"K\x00))tR", f"a tensor of {X}"),
        "tensor of a tensor of a tensor": (
            name("torch._tensor", "_rebuild_from_type_v2") + b"q\x00(h\x00N(h\x00N)tNtR",
            "a tensor rebuilt by a function",
        ),
        "attributes of a tensor": (rebuilt() + b"}" + string("shape") + b"Nsb", "attributes of a Tensor"),
        "attributes of a storage": (storage(string("0"), b"K\x04") + b"}" + string("numel") + b"Nsb", "attributes of"),
        # names, in messages
        "long module": (
            b"c" + b"a" * M + b"\nb\n", r"is refused: it names a{200}\.\.\. \(1000000 characters\)\.b, which"
        ),
        "lines in a name": (
            b"\x80\x04" + string("a\nb\r\0\u2028") + string("\u202ec") + b"\x93",
            r"it names a\\nb\\r\\x00\\u2028\.\\u202ec, which",
        ),
        "half of a surrogate": (b"\x80\x04X\x03\0\0\0\xed\xa0\x80" + string("c") + b"\x93", r"names \\ud800\.c, which"),
        # lengths
        "bytes": (b"\x80\x04\x8e" + LENGTH, "a string of 1099511627776 bytes in a file of 12"),
        "frame": (b"\x80\x04\x95" + LENGTH, "a string of 1099511627776 bytes in a file of 12"),
        "byte array": (b"\x80\x05\x96" + LENGTH, "a string of 1099511627776 bytes in a file of 12"),
        "extension": (b"\x80\x02\x82\x01", "the operation 0x82 is not one"),
        "buffer": (b"\x80\x05\x97", "the operation 0x97 is not one"),
        "digits": (b"I" + b"9" * M + b"\n", r"Exceeds the limit \(4300 digits\)"),
        "shape that grows": (GROWING, "^sums: 1.0$"),
    }  # fmt: skip


def module(modules=(), parameters=(), **attributes):
    return Module("torch.nn", "M", parameters, modules, **attributes)


def many(value, n=20_000):
    """As many names for a value."""
    return {f"{i:x}": value for i in range(n)}


def with_parameters(parameters, attributes=()):
    """A module with these, whatever they are."""
    tree = module()
    tree.attributes = {**tree.attributes, "_parameters": parameters} | dict(attributes)
    return tree


def nested(depth):
    """Each module has two names for the next one."""
    tree = module(parameters={"a": ARRAY})
    for _ in range(depth):
        tree = module({"0": tree, "1": tree})
    return tree


def in_itself(name):
    tree = module(parameters={"a": ARRAY})
    tree.attributes["_modules"][name] = tree
    return tree


TOO_MANY = "a network of more than 100000 parts, or with names of more than 200 characters"


def trees():
    """`{name: (tree, the error)}`."""
    return {
        "modules with two names each": (nested(20), TOO_MANY),
        "a module in itself": (in_itself("m"), TOO_MANY),
        "a module in itself, without a name": (in_itself(""), TOO_MANY),
        "a module with many names": (module(many(module(many(None)))), TOO_MANY),
        "parameters with many names": (module(many(with_parameters(many(Parameter(ARRAY))))), TOO_MANY),
        "attributes with many names": (module(many(module(**many(1)))), TOO_MANY),
        "modules with many names each": (module(many(module(many(module())))), TOO_MANY),
        "a long name": (module(many(module({"x" * M: module(parameters={"a": ARRAY})}), 9000)), TOO_MANY),
        "a long name of a parameter": (module(many(module(parameters={"x" * M: ARRAY}), 9000)), TOO_MANY),
        "numbers as names": (with_parameters({0: ARRAY, "a": ARRAY}, {1: ARRAY}), "^sums: 66.0$"),
    }


def change(target, **changes):
    for attribute, value in changes.items():
        setattr(target, attribute, value)


def edited(edit, compress=False):
    """A writer of a zip archive whose directory lies."""

    def write(path):
        write_zip(path, {"a": ARRAY, "b": ARRAY + 1}, compress=compress)
        with zipfile.ZipFile(path, "a") as archive:
            edit(archive)
            archive._didModify = True

    return write


def changed(member, **changes):
    """An edit of what the directory says of a member."""
    return lambda archive: change(archive.getinfo(f"archive/{member}"), **changes)


def overlapping(archive):
    """Both storages are said to be in the same bytes, and each to be as large as the file."""
    size = archive.start_dir
    for i in range(2):
        change(archive.getinfo(f"archive/data/{i}"), header_offset=0, file_size=size, compress_size=size)


def renamed(**names):
    """An edit that copies members under other names."""

    def edit(archive):
        for member, filename in names.items():
            twin = copy.copy(archive.getinfo(f"archive/{member.replace('_', '.')}"))
            twin.filename = filename
            archive.filelist.append(twin)

    return edit


def inflating(claim, n_byte=600 * M):
    """A writer of a data.pkl that unpacks to many zeros, and says to how many."""

    def write(path):
        packer = zlib.compressobj(9, zlib.DEFLATED, -15)
        part = packer.compress(bytes(M)) + packer.flush(zlib.Z_FULL_FLUSH)
        zip_of(path, part * (n_byte // M) + packer.flush(), {})
        with zipfile.ZipFile(path, "a") as archive:
            change(archive.getinfo("archive/data.pkl"), compress_type=zipfile.ZIP_DEFLATED, file_size=claim)
            archive._didModify = True

    return write


def longer_than_declared(path):
    """Writes a data.pkl of which only the first half has the size and the checksum that the directory declares."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    zip_of(path, packer.compress(b"N." * 2) + packer.flush(), {})
    with zipfile.ZipFile(path, "a") as archive:
        declared = {"compress_type": zipfile.ZIP_DEFLATED, "file_size": 2, "CRC": zlib.crc32(b"N.")}
        change(archive.getinfo("archive/data.pkl"), **declared)
        archive._didModify = True


def packed(program, method=zipfile.ZIP_DEFLATED):
    def write(path):
        with zipfile.ZipFile(path, "w", method) as archive:
            archive.writestr("archive/data.pkl", program)

    return write


def headed(header, length=None, hole=0):
    """A writer of a .safetensors that begins with these bytes and ends in a hole."""

    def write(path):
        safetensors_of(path, header, length=length)
        os.truncate(path, os.path.getsize(path) + hole)

    return write


def writes(write, *args, **options):
    return lambda path: write(path, *args, **options)


def in_legacy_layout(**options):
    return writes(legacy_of, **{"program": rebuilt() + b".", "storages": STORAGE} | options)


PICKLE, DATA = "the member 'archive/data.pkl'", "the member 'archive/data/0'"
KEYS = "its list of storages is not that of its tensors"


def files():
    """`{name: (function that writes the file, the error)}`."""
    text = string("x" * M)
    return {
        # archives
        "size that lies.pt": (
            edited(changed("data/0", file_size=2**40)), "storage 0 of 48 bytes has 1099511627776 bytes"
        ),
        "size of a pickle that lies.pt": (
            edited(changed("data.pkl", file_size=2**31)), f"{PICKLE} says that .* bytes unpack to 2147483648"
        ),
        "sizes that lie.pt": (
            edited(changed("data.pkl", file_size=2**40, compress_size=2**40)),
            "the members of the archive lie in the same",
        ),
        "members in the same bytes.pt": (edited(overlapping), "the members of the archive lie in the same bytes"),
        "member beyond the end.pt": (edited(changed("data/0", header_offset=10**9)), f"{DATA} has no header"),
        "member far beyond the end.pt": (edited(changed("data/0", header_offset=2**62)), f"{DATA} has no header"),
        "member beyond 64 bits.pt": (
            edited(changed("data/0", header_offset=2**64 - 1)), "cannot be read as a file of Py"
        ),
        "member elsewhere.pt": (edited(changed("data/0", header_offset=1)), f"{DATA} has no header"),
        "encrypted pickle.pt": (
            edited(changed("data.pkl", flag_bits=1)), f"{PICKLE} is encrypted, or packed by another"
        ),
        "encrypted storage.pt": (edited(changed("data/0", flag_bits=1)), f"{DATA} is encrypted, or packed by another"),
        "another checksum.pt": (edited(changed("data/0", CRC=1), compress=True), f"{DATA} is damaged"),
        "another checksum of the pickle.pt": (edited(changed("data.pkl", CRC=1)), f"{PICKLE} is damaged"),
        "storage cut short.pt": (edited(changed("data/0", compress_size=9), compress=True), f"{DATA} is damaged"),
        "two members of one name.pt": (
            edited(renamed(data_pkl="archive/data.pkl")), "two members of the archive have one"
        ),
        "names that are one when cut.pt": (
            edited(renamed(version="archive/version\0x")), "cannot be read as a file of Py"
        ),
        "member above the archive.pt": (edited(renamed(version="archive/../../x")), "'archive/../../x' lies outside"),
        "member of the system.pt": (edited(renamed(version="/etc/x")), "the member '/etc/x' lies outside the archive"),
        "two pickles.pt": (edited(renamed(data_pkl="other/data.pkl")), "one data.pkl .* has 2"),
        "no pickle.pt": (edited(changed("data.pkl", filename="archive/code.py")), "one data.pkl .* has 0"),
        "long name.pt": (edited(renamed(version="../" + "x" * 60_000)), r"'\.\./x{197}'\.\.\. .60003 characters. lies"),
        "big-endian.pt": (writes(write_zip, {"a": ARRAY}, "big"), "its byte order is not little-endian"),
        "bzip2.pt": (packed(bytes(M), zipfile.ZIP_BZIP2), f"{PICKLE} is encrypted, or packed by another"),
        "lzma.pt": (packed(bytes(M), zipfile.ZIP_LZMA), f"{PICKLE} is encrypted, or packed by another"),
        "bomb.pt": (inflating(600 * M), "its data.pkl is compressed, and has 600000000 bytes"),
        "bomb of terabytes.pt": (inflating(2**40), "its data.pkl is compressed, and has 1099511627776 bytes"),
        "bomb of 3 MB.pt": (inflating(3 * M, 3 * M), f"{PICKLE} says that .* bytes unpack to 3000000"),
        "bomb that says it is small.pt": (inflating(60_000), f"{PICKLE} is damaged"),
        "bomb that says it is nothing.pt": (inflating(0), f"{PICKLE} is damaged"),
        "longer than declared.pt": (longer_than_declared, f"{PICKLE} is damaged"),
        "packed storage.pt": (
            writes(write_zip, {"a": np.zeros(M, np.float32)}, compress=True), f"{DATA} .* unpack to 4000000"
        ),
        "shape that grows beyond what is unpacked.pt": (
            writes(zip_of, GROWING + b".", STORAGE, compress=True), "^sums: 1.0$"
        ),
        "packed lists.pt": (packed(b"]" * 3 * M + b"."), "unpack to 3000001"),
        # as before torch 1.6
        "storages in a pickle alone.pt": (
            writes(alone, rebuilt() + b"."), "torch.save"
        ),
        "another number of numbers.pt": (
            in_legacy_layout(storages={"0": Storage("Float", FOUR, 5)}), "storage 0 of 4 numbers has 5"
        ),
        "big-endian legacy.pt": (writes(write_legacy, {"a": ARRAY}, "big"), "or it is not little-endian"),
        "another version.pt": (in_legacy_layout(version=b"M\xea\x03."), "its version is 1002, not 1001, or it is not"),
        "long version.pt": (
            in_legacy_layout(version=text + b"."), f"its version is {X}, not 1001, or it is not little-e"
        ),
        "system in a list.pt": (in_legacy_layout(system=b"]."), "or it is not little-endian"),
        "system without text.pt": (in_legacy_layout(system=b"}K\x01Ns."), "or it is not little-endian"),
        "no keys.pt": (in_legacy_layout(keys=b"]."), KEYS),
        "more keys.pt": (in_legacy_layout(keys=pickle.dumps(["0", "1"])), KEYS),
        "a key twice.pt": (in_legacy_layout(keys=pickle.dumps(["0", "0"])), KEYS),
        "a key twice, as bytes.pt": (in_legacy_layout(keys=pickle.dumps(["0", b"0"])), KEYS),
        "keys of numbers.pt": (in_legacy_layout(keys=pickle.dumps([0])), KEYS),
        "keys of tuples.pt": (in_legacy_layout(keys=b"]" + BOMB + b"a."), KEYS),
        "keys of long bytes.pt": (
            in_legacy_layout(keys=remembered(b"T" + struct.pack("<i", M) + b"7" * M, b"h\x00" * 9000) + b"."), KEYS
        ),
        "storage among the keys.pt": (in_legacy_layout(keys=b"]" + storage(string("1"), b"K\x04") + b"a."), KEYS),
        "lists in each pickle.pt": (
            in_legacy_layout(version=text + b"0](" + b"]" * 100_000 + b"e.", system=b"](" + b"]" * 100_000 + b"e."),
            "more than 160.* objects in a file of 1200",
        ),
        # .safetensors
        "header of terabytes.safetensors": (headed(b"{}", 2**40), "a header of 1099511627776 bytes in a file of 10"),
        "header of all that is.safetensors": (
            headed(b"{}", 2**64 - 1), "a header of 18446744073709551615 bytes in a fi"
        ),
        "header of a hole.safetensors": (
            headed(b"{}", 2**32, 2**32), "a header of 4294967296 bytes in a file of 42949673"
        ),
        "lists in lists.safetensors": (headed(b"[" * M), "RecursionError"),
        "dictionaries in dictionaries.safetensors": (headed(b'{"a":' * M), "RecursionError"),
        "many dictionaries.safetensors": (headed(b"[" + b"{}," * 3 * M + b"1]"), "the header is no dictionary"),
        "many dictionaries by name.safetensors": (
            headed(b"{%s}" % b",".join(b'"%x":{}' % i for i in range(100_000))), "'0' has shape None, data_offsets None"
        ),
        "long number.safetensors": (headed(b'{"a":' + b"9" * M + b"}"), r"Exceeds the limit \(4300 digits\)"),
        "long name.safetensors": (
            headed(b'{"' + b"x" * M + b'":1}'), f"{X} has shape None, data_offsets None of 0 bytes"
        ),
        "long dtype.safetensors": (
            headed(b'{"a":{"shape":[],"data_offsets":[0,0],"dtype":"' + b"x" * M + b'"}}'),
            f"'a' has dtype {X}, which is",
        ),
        "long shape.safetensors": (
            headed(b'{"a":{"dtype":"F32","data_offsets":[0,0],"shape":[%s1]}}' % (b"1," * M)),
            "'a' has shape a list of len",
        ),
        # tensors of 4 GB that nobody asks for
        "hole.pt": (writes(write_hole_in_zip, 2**30), "^sums: 66.0$"),
        "hole in legacy.pt": (writes(write_hole_in_legacy, 2**30), "^sums: 66.0$"),
        "hole.safetensors": (writes(write_hole_in_safetensors, 2**30), "^sums: 66.0$"),
    }  # fmt: skip


TERABYTES = "storage 0 (of 4398046511104 bytes has 16|goes to byte 4398046.* cut off)"
CLAIMS = [  # what, numel of the storage, offset, shape, stride, message
    ("more numbers", 4, 0, (5,), (1,), r"shape \[5\] needs 5 numbers of a storage that has 4"),
    ("offset", 4, 1, (4,), (1,), r"shape \[4\] needs 5 numbers of a storage that has 4"),
    ("offset of none", 4, 5, (0,), (1,), r"shape \[0\] needs 5 numbers of a storage that has 4"),
    ("offset below 0", 4, -1, (4,), (1,), rf"{SHAPE} -1, \[4\], \[1\]"),
    ("stride", 4, 0, (3,), (2,), r"shape \[3\] needs 5 numbers of a storage that has 4"),
    ("stride below 0", 4, 3, (4,), (-1,), SHAPE),
    ("stride of a single number", 4, 0, (1,), (2**62,), SHAPE),
    ("size below 0", 4, 0, (-4,), (1,), SHAPE),
    ("two sizes below 0", 4, 0, (-2, -2), (2, 1), SHAPE),
    ("stride 0", 4, 0, (2**40,), (0,), r"shape \[1099511627776\] needs 1099511627776 numbers of a"),
    ("two strides 0", 4, 0, (2**20,) * 2, (0, 0), r"\[1048576, 1048576\] needs 1099511627776 numbers"),
    ("product of 64 bits", 4, 0, (2**32,) * 2, (0, 0), SHAPE),
    ("product of nothing", 4, 0, (0, 2**40, 2**40), (1, 1, 1), SHAPE),
    ("nine sizes", 4, 0, (1,) * 9, (1,) * 9, SHAPE),
    ("two sizes, one stride", 4, 0, (2, 2), (1,), SHAPE),
    ("terabytes", 2**40, 0, (4,), (1,), TERABYTES),
    ("a storage that is shorter", 5, 0, (4,), (1,), "storage 0 (of 20 bytes has 16|goes .* cut off)"),
    ("terabytes of nothing", 2**40, 0, (0,), (1,), TERABYTES),
]


@layouts
def test_a_tensor_lies_in_its_storage_and_that_in_the_file(tmp_path, write):
    for case, numel, offset, shape, stride, message in CLAIMS:
        path = write(tmp_path / "x.pt", {"a": Tensor(Storage("Float", FOUR, numel), offset, shape, stride)})
        assert_refused(path, f"{path} cannot be read as a file of PyTorch: ValueError: .*{message}", case)


def attempt(path):
    tensors = read_tensors(str(path))
    tensors.pop("hole", None)  # it is not read
    return f"sums: {sum(float(tensor.array().sum()) for tensor in tensors.values())}"


ATTEMPT = "from txl_tf.convert.torch_file import read_tensors\n\n" + inspect.getsource(attempt)


def attacks():
    """The name of each file, the function that writes it, and the error."""
    for key, (program, message) in programs().items():
        yield f"{key}.pt", writes(zip_of, program + b".", STORAGE), message
    for key, (tree, message) in trees().items():
        yield f"{key}.pt", writes(write_zip, tree), message
    for name, (write, message) in files().items():
        yield name, write, message


LONG = [  # they take long, and a limit stops them that stops others, too
    "arguments of a class.pt", "attributes with many names.pt", "copies of a dictionary.pt",
    "copies of pairs by instance.pt", "lists in each pickle.pt", "lists in one another.pt",
    "many dictionaries.safetensors", "modules with many names each.pt", "parameters with many names.pt",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("each_alone", [False, True])
def test_a_file_that_would_fill_the_memory_is_one_short_error(tmp_path, each_alone):
    messages = {}
    for name, write, message in attacks():
        if each_alone or name not in LONG:
            write(tmp_path / name)
            messages[name] = message
    found, stderr = read_hostile(tmp_path, ATTEMPT) if each_alone else (read_forked(tmp_path, attempt), "")
    for name, expected in messages.items():
        assert name in found, f"{name} {stderr}"
        message, length, size, growth, seconds = found[name]
        assert re.search(expected, message), f"{name}: {message[:500]}"
        assert message.startswith("sums: ") or f"{name} " in message, f"{name}: {message[:500]}"
        assert len(message.splitlines()) == 1, name
        assert length < 1000, name
        assert growth < min(10 * size, 2**27) + 200 * 2**20, name
        assert seconds < 10, name


# ------------------------------------------------------------------------------------------------------------- damage


def all_values(path):
    """The tensors and numbers of a dictionary, or "refused"."""
    try:
        found = read_torch_file(path)
        tensors = named_tensors(found) if isinstance(found, dict | Named) else {}
        return (found if isinstance(found, dict) else {}) | {name: t.array().tolist() for name, t in tensors.items()}
    except (ValueError, OSError) as error:
        assert str(path) in str(error)
        assert len(str(error)) < 1000
        return "refused"


TREE = {"a": ARRAY, "b": ARRAY.T, "c": BFloat16(np.array([1, 2], np.uint16)), "e": ARRAY[:0].copy(), "step": 3}


@layouts
def test_a_file_cut_anywhere_is_refused(tmp_path, write):
    path = tmp_path / "x.pt"
    write(path, TREE)
    assert all_values(path)["a"] == ARRAY.tolist()
    for length in reversed(range(path.stat().st_size)):
        os.truncate(path, length)
        assert all_values(path) == "refused", length


def test_a_pickle_cut_anywhere_is_refused(tmp_path):
    path = tmp_path / "x.pkl"
    for protocol in range(6):
        data = pickle.dumps({"symbols": ["a", "b"], "x": {"y": (1, 2.5, None)}}, protocol)
        for length in range(len(data)):
            path.write_bytes(data[:length])
            assert all_values(path) == "refused", length
        path.write_bytes(data + b"more")
        assert all_values(path)["symbols"] == ["a", "b"]


@pytest.mark.ci
@pytest.mark.parametrize(
    "write",
    [write_zip, write_legacy, *(pytest.param(write, marks=pytest.mark.slow) for write in WRITERS[1:3])],
)
def test_a_file_with_a_wrong_byte_is_read_or_refused(tmp_path, write):
    path = tmp_path / "x.pt"
    write(path, TREE)
    data, refused = path.read_bytes(), 0
    with open(path, "r+b", buffering=0) as file:
        for i, byte in enumerate(data):
            for wrong in (byte ^ 1, byte ^ 0x80, 0xFF):
                file.seek(i)
                file.write(bytes([wrong]))
                refused += all_values(path) == "refused"
            file.seek(i)
            file.write(bytes([byte]))
    assert len(data) < refused < 3 * len(data)


# -------------------------------------------------------------------------------------------------- what is no file


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "''"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "git lfs"),
        (b"<!DOCTYPE html>\n<html>", "'<!DOCTYPE html>.n<"),
        (b"Entry not found", "'Entry not found'"),
        (b"the\nof\n", "'the.nof.n'"),
        (b"\x89HDF\r\n\x1a\n", ""),
        (b"PK\x03\x04", "BadZipFile"),
        (b"\x80", ""),
    ],
    ids=["empty", "git lfs", "html", "text", "words", "hdf5", "zip", "byte"],
)
def test_what_is_no_file_of_pytorch_is_one_clear_error(tmp_path, content, message):
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(content)
    for read in (read_torch_file, read_tensors):
        with pytest.raises(ValueError, match=f"^{path} .*{message}"):
            read(str(path))


def test_no_tensors_are_in_a_file_of_something_else(tmp_path):
    path = tmp_path / "vocab.pkl"
    path.write_bytes(pickle.dumps(["the", "of"]))
    with raises_parameter("path", str(path), "a file of tensors") as error:
        read_tensors(str(path))
    assert mentions(str(error.value), "list", 2)


@pytest.mark.parametrize("read", [read_torch_file, read_tensors])
def test_paths_that_are_no_file(tmp_path, read):
    for path in (tmp_path, tmp_path / "not there", tmp_path / "x.safetensors", tmp_path / "x.bin.index.json"):
        with raises_naming(FileNotFoundError, path):
            read(str(path))
    os.mkfifo(tmp_path / "pipe")
    with raises_naming(FileNotFoundError, tmp_path / "pipe"):
        read(str(tmp_path / "pipe"))
    with raises_parameter("path", "gs://bucket/model.bin", "a local file"):
        read("gs://bucket/model.bin")
