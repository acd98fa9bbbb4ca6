"""Files appear whole or not at all, and small JSON files tell when they are damaged."""

import json
import os
import stat

import pytest
import tensorflow as tf
from helpers import mentions, raises_naming, raises_parameter

from txl_tf import files
from txl_tf.config import PairsConfig, TaggedConfig
from txl_tf.data.pairs.parallel import read_pairs
from txl_tf.data.tagged.sentences import read_corpus
from txl_tf.data.text.prepared_folder import read_prepared_info
from txl_tf.data.text.texts import find_files, find_named_files
from txl_tf.runs.checkpoints import average_checkpoints
from txl_tf.runs.folder import RunFolder, check_spares_runs


def accept(values):
    pass


@pytest.fixture
def path(tmp_path):
    path = str(tmp_path / "a.json")
    files.write_json(path, {"b": [1, None, 0.1], "a": {"ü": "\udc80"}})
    return path


def test_a_json_file_holds_its_values_and_a_checksum(path):
    assert files.read_json(path, accept) == {"b": [1, None, 0.1], "a": {"ü": "\udc80"}}
    assert set(json.loads(open(path).read())) == {"a", "b", "checksum"}


def test_the_line_of_the_checksum_can_be_removed_by_hand(path):
    lines = open(path).read().splitlines(True)
    open(path, "w").writelines(line for line in lines if '"checksum"' not in line)
    assert files.read_json(path, accept) == {"b": [1, None, 0.1], "a": {"ü": "\udc80"}}


def test_a_change_is_noticed_unless_the_checksum_is_removed(path):
    values = json.loads(open(path).read())
    values["b"][0] = 2
    open(path, "w").write(json.dumps(values))
    with raises_parameter("checksum", "39d2a35f37a1894e1e45b131feb39422b3a36360edce0bc46dfda95f3e3c3931"):
        files.read_json(path, accept)
    del values["checksum"]
    open(path, "w").write(json.dumps(values))
    assert files.read_json(path, accept)["b"] == [2, None, 0.1]


@pytest.mark.parametrize(
    "content, value",
    [
        (b"", None),
        (b"{", None),
        (b'{"a": 1', None),
        (b"\xff\xfe\x00", None),
        (b"[" * 100000, None),
        (b'{"a": ' + b"9" * 5000 + b"}", None),
        (b"[]", []),
        (b"3", 3),
        (b"null", None),
        (b"{}", None),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_is_no_json_object_is_one_clear_error(path, content, value):
    def check(values):
        if "a" not in values:
            raise ValueError("a must be there")

    open(path, "wb").write(content)
    with raises_parameter(path, value) as raised:
        files.read_json(path, check)
    assert str(raised.value).startswith(path) and len(str(raised.value).splitlines()) == 1


def test_a_file_that_cannot_be_read_is_an_oserror_that_names_it(tmp_path):
    for path in (tmp_path, tmp_path / "none"):
        with raises_naming(OSError, path):
            files.read_json(str(path), accept)
        with raises_naming(OSError, path):
            files.sha256(str(path))


def test_a_new_file_appears_at_the_end_and_an_error_leaves_the_old_one(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("before")
    with files.new_file(str(path)) as file:
        file.write("after")
        assert path.read_text() == "before"
    assert path.read_text() == "after"
    with pytest.raises(KeyError), files.new_file(str(path)) as file:
        file.write("lost")
        raise KeyError
    assert path.read_text() == "after" and list(tmp_path.iterdir()) == [path]


def test_an_error_that_is_not_the_new_files_keeps_its_message(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    for error in (OSError("the input is gone"), tf.errors.ResourceExhaustedError(None, None, "no memory")):
        with pytest.raises(type(error), match="^the input is gone$|^no memory$"), files.new_file(str(path)):
            raise error
    with (
        raises_naming(OSError, path, "the disk is full"),
        files.new_file(str(path)) as file,
    ):
        monkeypatch.setattr(tf.io.gfile.GFile, "write", unwritable)
        file.write("x")
    assert not list(tmp_path.iterdir())


def unwritable(file, data):
    raise tf.errors.ResourceExhaustedError(None, None, "the disk is full")


def test_what_is_no_ordinary_file_is_written_to_as_it_is():
    files.check_writable(os.devnull)
    with files.new_file(os.devnull) as file:
        file.write("x")
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)


def test_whether_a_file_can_be_written_is_found_out_without_a_trace(tmp_path):
    path = tmp_path / "a.txt"
    files.check_writable(str(path))
    assert not list(tmp_path.iterdir())
    for bad in (tmp_path / "none" / "a.txt", tmp_path):
        with raises_naming(OSError, bad):
            files.check_writable(str(bad))
    assert not list(tmp_path.iterdir())


def test_the_checksum_of_a_file_is_that_of_sha256sum(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    assert files.sha256(str(tmp_path / "a")) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_where_there_are_no_locks_it_says_so(tmp_path, monkeypatch, capsys):
    def flock(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(files.fcntl, "flock", flock)
    with files.lock(str(tmp_path), "in use"):
        pass
    with files.lock("ram://folder", "in use"):
        pass
    first, second = capsys.readouterr().out.splitlines()
    assert mentions(first, tmp_path) and mentions(second, "ram://folder")


@pytest.mark.parametrize("message, expected", [
    ("", "ValueError"),
    ("{{node x}} ", "ValueError"),
    ("\n", "ValueError"),
    ("{{function_node f}} {{node x}} no memory [Op:MatMul]\nmore", "no memory"),
    ("\nno memory\nmore", "no memory"),
])  # fmt: skip
def test_the_reason_is_the_first_line_or_the_class(message, expected):
    assert files.reason(ValueError(message)) == expected


def test_a_path_with_a_scheme_of_no_file_system_is_refused_by_name(tmp_path):
    for path in ("https://host/a", "http://host/a", "unknown://a"):
        for name, refuse in {
            "data_path": lambda path: find_files(["a", path]),
            "input": lambda path: find_named_files(f"a,{path}", "input"),
            "data_dir": read_prepared_info,
            "model_dir": RunFolder,
            "ckpt_path": RunFolder(tmp_path).find_checkpoint,
            "output_dir": lambda path: average_checkpoints(str(tmp_path), path, num_last_checkpoints=1),
            "output": lambda path: check_spares_runs("output", path),
            "train_path": lambda path: read_pairs(PairsConfig(train_path=f"a,{path}")),
            "test_path": lambda path: read_pairs(PairsConfig(train_path="a", test_path=["a", path])),
            "source_symbols": lambda path: read_pairs(PairsConfig(train_path="a", source_symbols=path)),
            "valid_path": lambda path: read_corpus(TaggedConfig(train_path="a", valid_path=path)),
            "lexicon": lambda path: read_corpus(TaggedConfig(train_path="a", lexicon=path)),
        }.items():
            with raises_parameter(name, path):
                refuse(path)
    for path in ("a", "a/b://c", "gs://bucket/a", "ram://a", f"file://{tmp_path}"):
        files.check_scheme("path", path)
    files.check_scheme("path", "s3://bucket/a", "s3")
