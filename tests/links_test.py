"""Symbolic links in the folders that programs write to: what they point to stays as it is."""

import ast
import os
import re
import shutil
import types
import zipfile

import numpy as np
import pytest
import tensorflow as tf
from helpers import ROOT, log_rows, train_run

from txl_tf.data.line_files import STATE, Answering, LineFile, Plan, answer_block
from txl_tf.data.text import download
from txl_tf.data.text.prepared_folder import new_files
from txl_tf.files import check_no_link, remove, removed_on_error, write_atomic
from txl_tf.runs.callbacks import cut_log
from txl_tf.runs.checkpoints import RunCheckpoints
from txl_tf.runs.folder import RunFolder
from txl_tf.runs.weights import UNFINISHED, delete_checkpoint, write_checkpoint
from txl_tf.serving import export


@pytest.fixture
def victim(tmp_path):
    """A folder that must not change; the test fails where it has."""
    folder = tmp_path / "victim"
    names = ["keep.txt", "sub/keep.txt", "train.txt", "ckpt-3.index", "corpus-info.json", "best.json"]
    (folder / "sub").mkdir(parents=True)
    for name in names:
        (folder / name).write_text(f"keep {name}")
    yield folder
    found = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}
    assert found == {name: f"keep {name}" for name in names}


def test_remove_takes_links_away_and_leaves_what_they_point_to(tmp_path, victim):
    folder = tmp_path / "folder"
    (folder / "inside").mkdir(parents=True)
    (folder / "inside" / "link").symlink_to(victim)
    for target in (victim, victim / "keep.txt", tmp_path / "nothing"):
        for slash in ("", "/"):
            (tmp_path / "link").symlink_to(target)
            remove(f"{tmp_path}/link{slash}")
            assert not os.path.lexists(tmp_path / "link")
    remove(folder)
    assert not folder.exists()
    remove(folder)  # nothing is there


def test_code_deletes_by_remove_alone():
    deletes = {"rmtree", "unlink", "rmdir", "removedirs"}
    found = set()
    words = re.compile(rf"\.({'|'.join(deletes)}|remove)\b")
    for path in [*(ROOT / "txl_tf").rglob("*.py"), *(ROOT / "txl_programs").rglob("*.py"), *ROOT.glob("tools/*.py")]:
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if words.search(text) else ():
            if isinstance(node, ast.Attribute) and node.attr in {*deletes, "remove"}:
                called = ast.unparse(node)
                if node.attr in deletes or called in ("os.remove", "tf.io.gfile.remove"):
                    found.add((str(path.relative_to(ROOT)), called))
    names = {"os.remove", "os.rmdir", "shutil.rmtree", "tf.io.gfile.remove", "tf.io.gfile.rmtree"}
    assert found == {("txl_tf/files.py", name) for name in names}


def test_a_link_that_was_there_before_an_error_stays(tmp_path, victim):
    for target in (victim, tmp_path / "nothing"):
        (tmp_path / "link").symlink_to(target)
        with pytest.raises(RuntimeError), removed_on_error(str(tmp_path / "link")):
            raise RuntimeError
        assert (tmp_path / "link").is_symlink()
        (tmp_path / "link").unlink()


@pytest.mark.parametrize("target", ["victim/keep.txt", "/dev/null", "nothing"])
def test_a_file_takes_the_place_of_a_link(tmp_path, victim, target):
    path = tmp_path / "config.json"
    path.symlink_to(target)
    write_atomic(str(path), "{}")
    assert not path.is_symlink() and path.read_text() == "{}"
    assert not (tmp_path / "nothing").exists()


def test_links_on_the_way_are_refused_by_name(tmp_path, victim):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "link").symlink_to(victim)
    (tmp_path / "around").symlink_to(tmp_path / "a")
    check_no_link(str(tmp_path / "around"), "", "b", "b/none/there")  # the folder itself is the user's to choose
    with pytest.raises(OSError) as caught:
        check_no_link(str(tmp_path / "a"), "none", "b/link/sub")
    assert f"{tmp_path}/a/b/link" in str(caught.value) and str(victim) in str(caught.value)


# ------------------------------------------------------------------------------------------------------------- runs


@pytest.mark.parametrize("name", ["best", "ema", "train", "validation", "log.csv"])
@pytest.mark.parametrize("target", ["../victim", "../victim/keep.txt", "../nothing"])
def test_a_run_that_is_trained_has_its_own_folders(tmp_path, victim, name, target):
    run = tmp_path / "run"
    run.mkdir()
    (run / name).symlink_to(target)
    with pytest.raises(OSError) as caught, RunFolder(run).locked():
        pass
    assert f"{run}/{name}" in str(caught.value)
    assert (run / name).is_symlink() and not (tmp_path / "nothing").exists()


def test_checkpoints_are_written_and_deleted_in_the_run_alone(tmp_path, victim):
    run = tmp_path / "run"
    run.mkdir()
    (run / UNFINISHED).symlink_to(victim)
    (run / "ckpt-3.index").symlink_to(victim / "ckpt-3.index")
    (run / "ckpt-3.data-00000-of-00001").symlink_to(victim)
    write_checkpoint(str(run / "ckpt-3"), {"a": np.arange(3)})
    assert tf.train.load_checkpoint(str(run / "ckpt-3")).get_tensor("a").tolist() == [0, 1, 2]
    assert {path.name for path in run.iterdir()} == {"ckpt-3.index", "ckpt-3.data-00000-of-00001"}
    (run / "ckpt-4.index").symlink_to(victim)
    delete_checkpoint(str(run / "ckpt-4"))
    assert not os.path.lexists(run / "ckpt-4.index")


def test_the_best_weights_of_an_earlier_run_are_removed_without_what_links_lead_to(tmp_path, victim):
    run = tmp_path / "run"
    (run / "best").mkdir(parents=True)
    (run / "best" / "link").symlink_to(victim)
    checkpoints = RunCheckpoints(None, RunFolder(run))
    checkpoints.remove_best()
    (run / "best").symlink_to(victim)
    checkpoints.remove_best()
    assert list(run.iterdir()) == []


# ---------------------------------------------------------------------------------------------- other folders


def test_a_corpus_is_prepared_in_its_folder_alone(tmp_path, victim):
    data = tmp_path / "data"
    data.mkdir()
    for name, target in [("prepare.tmp", victim), ("corpus-info.json", victim / "keep.txt"), ("a.npy", victim)]:
        (data / name).symlink_to(target)
    with new_files(str(data)) as folder:
        for name in ("corpus-info.json", "a.npy"):
            with open(f"{folder}/{name}", "w") as file:
                file.write("new")
    assert {path.name: path.read_text() for path in data.iterdir()} == {"corpus-info.json": "new", "a.npy": "new"}
    assert not any(path.is_symlink() for path in data.iterdir())


def test_a_data_set_is_downloaded_to_its_folder_alone(tmp_path, victim, monkeypatch):
    monkeypatch.setattr(download, "HELD_OUT", 1)
    data = tmp_path / "data"
    data.mkdir()
    with zipfile.ZipFile(tmp_path / "enwik8.zip", "w") as archive:
        archive.writestr("enwik8", b"abcde")
    for name, target in [("download.tmp", victim), ("enwik8.zip.tmp", victim / "keep.txt"), ("train.txt", "none")]:
        (data / name).symlink_to(target)
    download.fetch("enwik8", data, tmp_path.as_uri())
    assert (data / "train.txt").read_bytes() == b"97 98 99" and not (data / "none").exists()
    assert {path.name for path in data.iterdir()} == {"enwik8.zip", "train.txt", "valid.txt", "test.txt"}


@pytest.mark.parametrize("link", [STATE, f"{STATE}/sub/a.txt", "sub"])
def test_answers_to_files_are_written_in_their_folder_alone(tmp_path, victim, link):
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    answers = Answering(
        lambda lines, *_, **__: (line.decode().upper() for line in lines), lambda answer, number: f"{answer}\n"
    )

    def answer(output):
        def run(blocks):
            for block in blocks:
                answer_block(answers, block)
                yield block.part

        list(Plan([LineFile(str(tmp_path / "a.txt"), "sub/a.txt", str(output), "key")], 1).answer(run))

    answer(tmp_path / "whole")
    assert (tmp_path / "whole/sub/a.txt").read_text() == "ONE\nTWO\n"
    path = tmp_path / "output" / link
    path.parent.mkdir(parents=True)
    path.symlink_to(victim)
    with pytest.raises(OSError) as caught:
        answer(tmp_path / "output")
    assert str(path) in str(caught.value)


def test_a_served_model_is_written_in_its_folder_alone(tmp_path, victim, monkeypatch):
    def save(resources, folder, signatures):
        os.mkdir(folder)
        write_atomic(f"{folder}/saved_model.pb", "model")

    monkeypatch.setattr(tf.saved_model, "save", save)
    stored = types.SimpleNamespace(signatures=dict, resources=None)
    (tmp_path / "empty").mkdir()
    (tmp_path / f"1.{os.getpid()}.tmp").symlink_to(victim)
    (tmp_path / "1").symlink_to(tmp_path / "empty")
    export._write(lambda folder: stored, str(tmp_path / "1"), False)
    assert (tmp_path / "1/saved_model.pb").read_text() == "model" and not (tmp_path / "1").is_symlink()
    assert list((tmp_path / "empty").iterdir()) == [] and not os.path.lexists(tmp_path / f"1.{os.getpid()}.tmp")


# ------------------------------------------------------------------------------------------------------- hard links


@pytest.mark.parametrize(
    "name", ["log.csv", "config.json", "checkpoint", "vocab.txt", "best/best.json", "ckpt-6.index"]
)
@pytest.mark.slow
def test_a_hard_link_of_a_backup_stays_as_it_was(trained_run, tmp_path, name):
    """As `cp -al` makes it."""
    shutil.copytree(trained_run[0], tmp_path / "run")
    kept = tmp_path / "backup"
    os.link(tmp_path / "run" / name, kept)
    before = kept.read_bytes()
    train_run(tmp_path / "run", str(trained_run[0].parent / "text.txt"), training={"train_steps": 18, "max_to_keep": 1})
    assert kept.read_bytes() == before
    assert len(log_rows(tmp_path / "run")) == 6


def test_a_log_that_is_a_hard_link_becomes_a_file_of_its_own(tmp_path):
    log, backup = tmp_path / "log.csv", tmp_path / "backup.csv"
    columns = "epoch,bpc,grad_norm,learning_rate,loss,step,tokens_per_second,val_bpc,val_loss"
    log.write_text(f"{columns}\n0,1,1,1,1,5,1,1,1\n")
    cut_log(str(log), 5, ["bpc"])
    before, number = log.read_text(), log.stat().st_ino
    os.link(log, backup)
    cut_log(str(log), 5, ["bpc"])
    assert log.read_text() == backup.read_text() == before
    assert backup.stat().st_ino == number != log.stat().st_ino
