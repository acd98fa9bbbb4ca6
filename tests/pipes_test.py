"""Named pipes, folders and loops of links in place of files: one error that names the file, never an endless wait."""

import concurrent.futures
import hashlib
import os
import signal
import socket
import time

import numpy as np
import pytest
from helpers import make_run, mentions, word_vocab

import txl_tf
from txl_programs.pictures.curves import read_log
from txl_programs.pictures.scaling import read_figures
from txl_tf import files
from txl_tf.convert.corpus_files import read_corpus
from txl_tf.convert.original import find_tf1_checkpoint, model_arguments
from txl_tf.convert.pytorch_source import open_source
from txl_tf.data import inputs
from txl_tf.data.text.corpus import build_corpus
from txl_tf.data.text.texts import find_files, sizes_in_zip
from txl_tf.data.text_files import blocks_of, read_files
from txl_tf.data.vocabulary import Vocab
from txl_tf.files import is_pipe, new_file, read_json, sha256
from txl_tf.runs.folder import RunFolder
from txl_tf.runs.weights import UnreadableCheckpoint


@pytest.fixture(autouse=True)
def at_most_ten_seconds():
    """A test that waits for ever fails."""

    def late(number, frame):
        raise TimeoutError("waited for ten seconds")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(10)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def test_pipes_and_sockets_are_found_through_links_but_for_those_of_the_system(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    (tmp_path / "file").write_text("a")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(tmp_path / "socket"))
        assert all(is_pipe(tmp_path / name) for name in ("pipe", "link", "socket"))
    reader, writer = os.pipe()
    others = [tmp_path, tmp_path / "file", tmp_path / "none", "gs://a/b", "/dev/null", f"/dev/fd/{reader}", "a\0b"]
    assert not any(map(is_pipe, others))
    os.write(writer, b"a b\nb\n")
    os.close(writer)
    pipe = f"/dev/fd/{reader}"  # as a shell makes for <(command): it is read several times, and from any position
    for _ in range(2):
        assert "".join(read_files([pipe], "char")) == "a b\nb\n" and list(blocks_of(pipe, begin=2)) == [b"b\nb\n"]
    assert inputs.size(pipe) == 6
    assert build_corpus("text", pipe, level="word").vocab.symbols[2:] == ["b", "a"]
    assert sha256(pipe) == hashlib.sha256(b"a b\nb\n").hexdigest() and Vocab.load(pipe).symbols == ["a", "b"]
    os.close(reader)


@pytest.mark.parametrize(
    "read",
    [
        lambda path: read_json(path, lambda values: None),
        sha256,
        Vocab.load,
        lambda path: list(read_files([path], "char")),
    ],
)
def test_a_pipe_is_refused_by_name(tmp_path, read):
    path = str(tmp_path / "pipe")
    os.mkfifo(path)
    with pytest.raises(OSError) as caught:
        read(path)
    assert path in str(caught.value)


def test_a_pipe_for_results_is_written(tmp_path):
    path = str(tmp_path / "pipe")
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with new_file(path) as file:
        file.write("text")
    assert os.read(reader, 9) == b"text"
    os.close(reader)


def test_a_pipe_that_nobody_reads_is_an_error_and_a_late_reader_gets_all(tmp_path, monkeypatch):
    path = str(tmp_path / "pipe")
    os.mkfifo(path)
    monkeypatch.setattr(files, "_SECONDS_FOR_A_READER", 0.3)
    with pytest.raises(OSError) as caught, new_file(path) as file:
        file.write("text")
    assert path in str(caught.value)
    monkeypatch.setattr(files, "_SECONDS_FOR_A_READER", 9)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        found = pool.submit(lambda: (time.sleep(0.3), open(path).read())[1])
        with new_file(path) as file:
            file.write("text")
        assert found.result() == "text"


def pipe_in(folder, name):
    os.mkfifo(folder / name)
    return str(folder / name)


@pytest.mark.parametrize("name, read", [
    ("checkpoint", lambda folder: find_tf1_checkpoint(str(folder))),
    ("model.ckpt-1.index", lambda folder: model_arguments(f"{folder}/model.ckpt-1")),
    ("corpus-info.json", lambda folder: read_corpus(str(folder))),
    ("vocab.txt", lambda folder: read_corpus(f"{folder}/vocab.txt", "wt2")),
    ("cache.pkl", lambda folder: read_corpus(str(folder))),
    ("vocab.pkl", lambda folder: read_corpus(f"{folder}/vocab.pkl")),
    ("model.pt", lambda folder: open_source(f"{folder}/model.pt")),
    ("model.safetensors", lambda folder: open_source(f"{folder}/model.safetensors")),
    ("pytorch_model.bin", lambda folder: open_source(f"{folder}/pytorch_model.bin")),
    ("model.safetensors.index.json", lambda folder: open_source(f"{folder}/model.safetensors.index.json")),
    ("log.csv", lambda folder: read_log(folder)),
    ("scaling.json", lambda folder: read_figures(f"{folder}/scaling.json")),
])  # fmt: skip
def test_readers_of_other_programs_files_refuse_pipes(tmp_path, name, read):
    path = pipe_in(tmp_path, name)
    with pytest.raises((ValueError, OSError)) as caught:
        read(tmp_path)
    assert str(tmp_path) in str(caught.value) and os.path.exists(path)


def test_a_configuration_or_a_shard_that_is_a_pipe_is_refused(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    config = pipe_in(tmp_path, "config.json")
    with pytest.raises((ValueError, OSError)):
        open_source(str(tmp_path / "pytorch_model.bin"))
    os.remove(config)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "b.safetensors"}}')
    shard = pipe_in(tmp_path, "b.safetensors")
    with pytest.raises((ValueError, OSError)) as caught:
        open_source(str(tmp_path / "model.safetensors.index.json"))
    assert shard in str(caught.value)


FILES = ["config.json", "vocab.txt", "checkpoint", "ckpt-1.index", "ckpt-1.data-00000-of-00001"]


@pytest.mark.ci
@pytest.mark.parametrize("name", [*FILES, "log.csv", "tracker.json"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "folder"])
def test_a_run_with_a_pipe_or_a_folder_in_place_of_a_file_is_one_error(tmp_path, name, make):
    make_run(tmp_path / "run", word_vocab())
    path = tmp_path / "run" / name
    path.unlink(missing_ok=True)
    make(path)
    if name in FILES and name != "checkpoint":  # which is for other programs
        with pytest.raises((ValueError, OSError)) as caught:
            txl_tf.load_run(tmp_path / "run")
        assert str(path).partition(".data")[0].removesuffix(".index") in str(caught.value)
    if make is os.mkfifo:
        with pytest.raises(OSError) as caught, RunFolder(tmp_path / "run").locked():
            pass
        assert str(path) in str(caught.value)


def test_a_damaged_checkpoint_that_is_a_pipe_has_a_way_out(tmp_path):
    lm = make_run(tmp_path / "run", word_vocab())
    folder = RunFolder(tmp_path / "run")
    folder.save_weights(lm, 5)
    (tmp_path / "run/ckpt-5.index").unlink()
    os.mkfifo(tmp_path / "run/ckpt-5.index")
    with pytest.raises(UnreadableCheckpoint):
        txl_tf.runs.weights.CheckpointReader(folder.checkpoint(5))
    with pytest.raises(ValueError) as caught:
        txl_tf.load_run(tmp_path / "run")
    assert mentions(str(caught.value), "--ckpt_path=ckpt-1")
    assert np.isfinite(
        txl_tf.load_run(tmp_path / "run", "ckpt-1")[0].score(np.ones([1, 3], int), np.ones([1, 3], int))[0]
    ).all()


@pytest.mark.parametrize("name", ["train", "validation", "best", "ema"])
def test_a_file_in_place_of_a_folder_of_a_run_is_named(tmp_path, name):
    (tmp_path / name).write_text("")
    with pytest.raises(OSError) as caught, RunFolder(tmp_path).locked():
        pass
    assert str(tmp_path / name) in str(caught.value)
    assert (tmp_path / name).read_text() == ""


def test_loops_of_links_are_left_out_of_a_folder(tmp_path, caplog):
    for name in ("a/b", "c"):
        (tmp_path / "text" / name).mkdir(parents=True)
        (tmp_path / "text" / name / "some.txt").write_text(name)
    text = tmp_path / "text"
    for link, target in [
        ("a/b/up", ".."),
        ("self", "self"),
        ("a/x", "../c"),
        ("c/y", "../a"),
        ("one", "two"),
        ("two", "one"),
    ]:
        (text / link).symlink_to(target)
    (text / "a/b/same.txt").symlink_to("some.txt")
    found = [os.path.relpath(path, text) for path in find_files(str(text))]
    assert found == ["a/b/same.txt", "a/b/some.txt", "a/x/some.txt", "c/some.txt", "c/y/b/same.txt", "c/y/b/some.txt"]
    for link in ("a/b/up", "self", "one", "two"):
        assert f"{text}/{link}" in caplog.text
    (text / "gone").symlink_to("nothing")  # no loop: its reader says that it does not exist
    assert f"{text}/gone" in find_files(str(text))


def test_an_empty_zip_file_says_so(tmp_path):
    (tmp_path / "a.zip").write_bytes(b"")
    with pytest.raises(ValueError) as caught:
        sizes_in_zip(str(tmp_path / "a.zip"))
    assert mentions(str(caught.value), f"{tmp_path}/a.zip")
