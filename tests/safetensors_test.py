"""Files of safetensors and indices of shards: read as they were written, and refused where they are wrong."""

import json
import os
import re
import time

import numpy as np
import pytest
from helpers import raises_naming, raises_parameter
from torch_files import BFloat16, arrays_of, assert_same, safetensors_of, write_safetensors, write_shards, write_zip

from txl_tf.convert.pickles import RefusedError
from txl_tf.convert.tensors import read_safetensors
from txl_tf.convert.torch_file import read_shards, read_tensors

ARRAY = np.arange(12, dtype=np.float32).reshape(3, 4)
DTYPES = "float32 float16 float64 int64 int32 int16 int8 uint8 bool".split()


def test_arrays_come_back_in_every_dtype(tmp_path):
    array = np.array([[0, 1, -2], [3.5, 100, -128]])
    arrays = {dtype: array.astype(dtype) for dtype in DTYPES}
    arrays |= {"empty": ARRAY[:0], "number": np.array(2.5, np.float32), "é": ARRAY[:, 2:]}
    assert_same(arrays_of(write_safetensors(tmp_path / "x.safetensors", arrays, {"format": "pt"})), arrays)


def test_bfloat16_becomes_float32(tmp_path):
    halves = np.array([[0x3F80, 0xC000], [0x7F80, 0x0001]], np.uint16)
    found = arrays_of(write_safetensors(tmp_path / "x.safetensors", {"a": BFloat16(halves)}))
    assert_same(found, {"a": np.array([[1, -2], [np.inf, 2.0**-133]], np.float32)})


def test_numbers_at_any_byte(tmp_path):
    for n_space in range(8):
        header = b'{"a":{"dtype":"F64","shape":[2],"data_offsets":[0,16]}}' + b" " * n_space
        path = safetensors_of(tmp_path / f"{n_space}.safetensors", header, np.array([1.5, -2]).tobytes())
        assert_same(arrays_of(path), {"a": np.array([1.5, -2])})


def entry(shape=(2,), offsets=(0, 8), dtype="F32", **others):
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **others}


def test_bytes_that_are_in_no_tensor_are_allowed(tmp_path):
    """Before the first tensor, between two, and after the last."""
    header = {"b": entry([1], [12, 16]), "a": entry([1], [4, 8]), "none": entry([0, 3], [8, 8])}
    data = np.arange(5, dtype=np.float32)
    path = safetensors_of(tmp_path / "x.safetensors", json.dumps(header).encode(), data.tobytes())
    assert_same(arrays_of(path), {"a": data[1:2], "b": data[3:4], "none": np.zeros([0, 3], np.float32)})


WRONG = {
    "no dictionary": ([], "the header is no dictionary"),
    "no entry": ({"a": 1}, "'a' has shape None, data_offsets None of 8 bytes"),
    "list as entry": ({"a": [1, 2]}, "'a' has shape None, data_offsets None of 8 bytes"),
    "no dtype": ({"a": {"shape": [2], "data_offsets": [0, 8]}}, "'a' has dtype None, which is none of F32, F16"),
    "dtype of 8 bits": ({"a": entry(dtype="F8_E4M3")}, "'a' has dtype 'F8_E4M3', which is none of F32, F16, F64, BF16"),
    "dtype in lower case": ({"a": entry(dtype="f32")}, "'a' has dtype 'f32', which is none of F32"),
    "list as dtype": ({"a": entry(dtype=["F32"])}, "'a' has dtype a list of length 1, which is none of F32"),
    "shape of a number": ({"a": entry(2)}, r"'a' has shape 2, data_offsets \[0, 8\] of 8 bytes"),
    "shape of a text": ({"a": entry("2")}, r"'a' has shape '2', data_offsets \[0, 8\] of 8 bytes"),
    "shape of a dictionary": ({"a": entry({"2": 1})}, r"'a' has shape a dict of length 1, data_offsets \[0, 8\]"),
    "shape of true": ({"a": entry([True])}, r"'a' has shape \[True\], data_offsets \[0, 8\] of 8 bytes"),
    "shape of floats": ({"a": entry([2.0])}, r"'a' has shape \[2.0\], data_offsets \[0, 8\] of 8 bytes"),
    "shape below 0": ({"a": entry([-2, -1])}, r"'a' has shape \[-2, -1\], data_offsets \[0, 8\] of 8 bytes"),
    "shape of lists": ({"a": entry([[2]])}, r"'a' has shape a list of length 1, data_offsets \[0, 8\] of 8 bytes"),
    "shape of no number": ({"a": entry([float("nan")])}, r"'a' has shape \[nan\], data_offsets \[0, 8\] of 8 bytes"),
    "infinite shape": ({"a": entry([float("inf")])}, r"'a' has shape \[inf\], data_offsets \[0, 8\] of 8 bytes"),
    "shape of 9 sizes": ({"a": entry([1] * 8 + [2])}, r"'a' has shape \[1, .*, 2\], data_offsets \[0, 8\] of 8 bytes"),
    "shape of terabytes": ({"a": entry([2**40])}, "'a' needs 4398046511104 bytes and has those from 0 to 8"),
    "shape beyond 64 bits": ({"a": entry([2**32, 2**31 + 1])}, "'a' needs 36893488164598972416 bytes and has those"),
    "shape that wraps": ({"a": entry([2**62, 2])}, "'a' needs 36893488147419103232 bytes and has those"),
    "nothing beyond 64 bits": ({"a": entry([0, 2**40, 2**40], [0, 0])}, "offset, shape and stride of a tensor are"),
    "offsets beyond the end": ({"a": entry(offsets=[4, 12])}, r"'a' has shape .*, data_offsets \[4, 12\] of 8 bytes"),
    "offsets far beyond": ({"a": entry(offsets=[2**64, 2**64 + 8])}, "'a' has shape .*, data_offsets a list of length"),
    "offsets below 0": ({"a": entry(offsets=[-8, 0])}, r"'a' has shape .*, data_offsets \[-8, 0\] of 8 bytes"),
    "offsets in reverse": ({"a": entry(offsets=[8, 0])}, "'a' needs 8 bytes and has those from 8 to 0"),
    "offsets of nothing, in reverse": ({"a": entry([0], [8, 4])}, "'a' needs 0 bytes and has those from 8 to 4"),
    "three offsets": ({"a": entry(offsets=[0, 4, 8])}, r"'a' has shape .*, data_offsets \[0, 4, 8\] of 8 bytes"),
    "one offset": ({"a": entry(offsets=[8])}, r"'a' has shape .*, data_offsets \[8\] of 8 bytes"),
    "offsets of text": ({"a": entry(offsets="08")}, "'a' has shape .*, data_offsets '08' of 8 bytes"),
    "fewer bytes": ({"a": entry(offsets=[0, 4])}, "'a' needs 8 bytes and has those from 0 to 4"),
    "more bytes": ({"a": entry([1])}, "'a' needs 4 bytes and has those from 0 to 8"),
    "the same bytes": ({"a": entry(), "b": entry()}, "'a' and 'b' lie in the same bytes"),
    "some same bytes": ({"b": entry([1], [3, 7]), "a": entry([1], [0, 4])}, "'a' and 'b' lie in the same bytes"),
    "bytes in others": ({"a": entry(), "b": entry([1], [0, 4])}, "'b' and 'a' lie in the same bytes"),
    "long name": ({"x" * 10**6: 1}, r"'x{200}'\.\.\. \(1000000 characters\) has shape None"),
    "lines in a name": ({"a\nb\u2028": 1}, r"'a\\nb\\u2028' has shape None"),
}  # fmt: skip


def refused(path, match, read=read_tensors, case=""):
    """Asserts that a file is one short error."""
    case = case or match
    with pytest.raises(ValueError) as error:
        read(str(path))
        pytest.fail(f"{case}: not refused")
    assert re.match(f"{re.escape(str(path))} .*{match}", str(error.value)), case
    assert len(str(error.value)) < 1000, case
    assert len(str(error.value).splitlines()) == 1, case


def test_what_is_wrong_in_a_header_is_one_clear_error(tmp_path):
    for name, (header, message) in WRONG.items():
        path = safetensors_of(tmp_path / "x.safetensors", json.dumps(header).encode(), bytes(8))
        refused(path, f"cannot be read as a .safetensors: ValueError: .*{message}", case=name)


NO_HEADER = {
    "twice": (b'{"a":{"shape":[2]},"b":1,"a":2}', "a name occurs twice"),
    "inside": (b'{"a":{"shape":[2],"dtype":"F32","data_offsets":[0,8],"shape":[1]}}', "a name occurs twice"),
    "inf": (b'{"a":{"shape":[1e400],"dtype":"F32","data_offsets":[0,8]}}', r"'a' has shape \[inf\]"),
    "nan": (b'{"a":NaN}', "'a' has shape None"),
    "extra": (b'{"a":1} {}', "JSONDecodeError: Extra data"),
    "cut": (b'{"a":1', "JSONDecodeError: Expecting"),
    "text": (b"not json", "JSONDecodeError: Expecting value"),
    "utf16": ("[é".encode("utf-16"), "JSONDecodeError: Expecting value"),
    "utf8": (b'{"\xff":1}', "UnicodeDecodeError: utf-8 cannot be decoded"),
    "zeros": (b"\0" * 8, "JSONDecodeError"),
    "digits": (b'{"a":' + b"9" * 5000 + b"}", r"Exceeds the limit \(4300 digits\)"),
    "dictionaries": (b'{"a":' * 100_000, "RecursionError"),
    "lists": (b"[" * 100_000, "RecursionError"),
    "both": (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "RecursionError"),
}


def test_what_is_no_header_is_one_clear_error(tmp_path):
    for name, (header, message) in NO_HEADER.items():
        path = safetensors_of(tmp_path / "x.safetensors", header, bytes(8))
        refused(path, f"cannot be read as a .safetensors: .*{message}", case=name)


def test_a_header_lies_in_the_file(tmp_path):
    for length in (0, 1, 11, 2**31, 2**40, 2**63, 2**64 - 1):
        path = safetensors_of(tmp_path / "x.safetensors", b"{}" + b" " * 8, length=length)
        refused(path, f"a header of {length} bytes in a file of 18")


def test_a_huge_header_is_not_read(tmp_path):
    path = safetensors_of(tmp_path / "x.safetensors", b"{}", length=2**32)
    os.truncate(path, 2**33)
    refused(path, "a header of 4294967296 bytes in a file of 8589934592")


def test_what_is_no_file_of_safetensors_is_one_clear_error(tmp_path):
    path = tmp_path / "model.safetensors"
    for content, message in [
        (b"", "a header of 0 bytes in a file of 0"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
            "it only points to a file that git lfs",
        ),
        (b"<!DOCTYPE html>\n<html>", "a header of 5789751444030890300 bytes in a file of 22"),
        (b"Entry not found", "a header of .* bytes in a file of 15"),
        (b"PK\x03\x04" + bytes(20), "a header of 67324752 bytes in a file of 24"),
    ]:
        path.write_bytes(content)
        refused(path, f"cannot be read as a .safetensors: ValueError: {message}")


def test_a_file_cut_anywhere_is_refused(tmp_path):
    path = write_safetensors(tmp_path / "x.safetensors", {"a": ARRAY, "b": ARRAY[1:]})
    for length in reversed(range(os.path.getsize(path))):
        os.truncate(path, length)
        refused(path, "", read_safetensors, f"cut at {length}")


def test_a_file_with_a_wrong_byte_is_read_or_refused(tmp_path):
    path = write_safetensors(tmp_path / "x.safetensors", {"a": ARRAY, "b": BFloat16(np.array([1, 2], np.uint16))})
    refusals = 0
    with open(path, "r+b", buffering=0) as file:
        data = file.read()
        for i, byte in enumerate(data):
            for wrong in (byte ^ 1, byte ^ 0x80, 0xFF, ord("9")):
                file.seek(i)
                file.write(bytes([wrong]))
                try:
                    assert all(array.size <= 24 for array in arrays_of(path).values())
                except (ValueError, OSError) as error:
                    assert str(error).startswith(str(path))
                    refusals += 1
            file.seek(i)
            file.write(bytes([byte]))
    assert len(data) < refusals < 4 * len(data)


# ------------------------------------------------------------------------------------------------------------- shards

ARRAYS = {f"layers.{i}.weight": ARRAY + i for i in range(5)}
kinds = pytest.mark.parametrize("kind", ["bin", "safetensors"])


@kinds
@pytest.mark.parametrize("n", [1, 3, 5])
def test_shards_together_hold_all_tensors(tmp_path, kind, n):
    index = write_shards(tmp_path, ARRAYS, n, kind)
    assert len(list(tmp_path.iterdir())) == n + 1
    assert_same(arrays_of(index), ARRAYS)


def change_index(path, **changes):
    with open(path) as file:
        index = json.load(file)
    for name, shard in changes.items():
        index["weight_map"][name] = shard
    with open(path, "w") as file:
        json.dump(index, file)


@kinds
def test_a_missing_shard_is_named(tmp_path, kind):
    index = write_shards(tmp_path, ARRAYS, 2, kind)
    (shard,) = tmp_path.glob(f"*-00002-of-00002.{kind}")
    shard.unlink()
    with raises_naming(FileNotFoundError, shard):
        read_tensors(index)


@kinds
def test_tensors_must_be_where_the_index_says(tmp_path, kind):
    index = write_shards(tmp_path, ARRAYS, 2, kind)
    first, second = sorted(path.name for path in tmp_path.glob(f"*.{kind}"))
    change_index(index, more=second)
    refused(index, f"cannot be read as an index of shards: ValueError: 'more' is not in '{second}'")
    write_shards(tmp_path, ARRAYS, 2, kind)
    change_index(index, **{"layers.1.weight": second})
    refused(index, f"'layers.1.weight' is in '{first}' and belongs in '{second}'")
    write_shards(tmp_path, ARRAYS, 2, kind)
    write = write_zip if kind == "bin" else write_safetensors
    write(tmp_path / second, {**{f"layers.{i}.weight": ARRAY for i in (3, 4)}, "layers.1.weight": ARRAY})
    refused(index, f"'layers.1.weight' is in '{second}' and belongs in '{first}'")
    write(tmp_path / second, {**{f"layers.{i}.weight": ARRAY for i in (3, 4)}, "other": ARRAY})
    refused(index, f"'other' is in '{second}' and belongs in None")


ELSEWHERE = "../x.bin /etc/x.bin a/x.bin x.txt x .. x.bin.index.json x.bin/ gs://x/x.bin".split() + ["", "x\n.pt"]


def test_a_shard_lies_in_the_folder_of_its_index(tmp_path):
    for shard in ELSEWHERE:
        index = write_shards(tmp_path, ARRAYS, 1)
        change_index(index, more=shard)
        refused(index, f"{re.escape(repr(shard))} must be a .bin or .safetensors of the same folder")


def test_the_name_of_a_shard_is_short(tmp_path):
    index = write_shards(tmp_path, ARRAYS, 1)
    change_index(index, more="x" * 10**6 + ".bin")
    refused(index, r"'x{200}'\.\.\. \(1000004 characters\) must be a .bin or .safetensors of the same folder")


def test_a_wrong_shard_is_one_error_that_names_it(tmp_path):
    index = write_shards(tmp_path, ARRAYS, 1)
    (shard,) = tmp_path.glob("*.bin")
    shard.write_bytes(b"\x80\x02cos\nsystem\n.")
    with raises_parameter("path", str(shard), error=RefusedError) as error:
        read_tensors(index)
    assert "os.system" in str(error.value)


NO_INDEX = {
    "empty": ("", "JSONDecodeError"),
    "list": ("[]", "it has no weight_map from names to files"),
    "dictionary": ("{}", "it has no weight_map from names to files"),
    "names": ('{"weight_map": ["x.bin"]}', "it has no weight_map from names to files"),
    "number": ('{"weight_map": {"a": 1}}', "it has no weight_map from names to files"),
    "files": ('{"weight_map": {"a": ["x.bin"]}}', "it has no weight_map from names to files"),
    "twice": ('{"weight_map": {"a": "x.bin", "a": "y.bin"}}', "a name occurs twice"),
    "maps": ('{"weight_map": {}, "weight_map": {"a": "y.bin"}}', "a name occurs twice"),
    "deep": ('{"weight_map":' * 100_000, "RecursionError"),
    "digits": ("9" * 5000, r"Exceeds the limit \(4300 digits\)"),
}


def test_what_is_no_index_is_one_clear_error(tmp_path):
    path = tmp_path / "pytorch_model.bin.index.json"
    for name, (content, message) in NO_INDEX.items():
        path.write_text(content)
        refused(path, f"cannot be read as an index of shards: .*{message}", case=name)


def test_a_huge_index_is_not_read(tmp_path):
    path = tmp_path / "model.safetensors.index.json"
    path.touch()
    os.truncate(path, 2**33)
    refused(path, "it has 8589934592 bytes")


@pytest.mark.slow
def test_many_shards_and_names_take_no_long_time(tmp_path):
    names = [f"{i:x}" for i in range(60_000)]
    entries = ",".join(f'"{name}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}' for name in names)
    safetensors_of(tmp_path / "model.safetensors", b"{%s}" % entries.encode())
    weight_map = dict.fromkeys(names, "model.safetensors")
    for i in range(3000):
        weight_map[f"of {i}"] = f"{i}.safetensors"
        safetensors_of(tmp_path / f"{i}.safetensors", json.dumps({f"of {i}": entry([0], [0, 0])}).encode())
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    start = time.process_time()
    assert len(read_shards(str(index))) == 63_000
    assert time.process_time() - start < 10
