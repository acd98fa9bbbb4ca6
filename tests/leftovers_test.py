"""After a program was killed, the same command works, and the next program removes what the dead one left."""

import os
import subprocess
import sys

import pytest
from helpers import make_cache, make_run, raises_naming, raises_parameter, word_vocab

from txl_tf.convert.original import run_to_tf1
from txl_tf.files import is_alive, remove_leftovers
from txl_tf.runs import folder as folders
from txl_tf.runs.checkpoints import average_checkpoints
from txl_tf.runs.folder import RunFolder

pytestmark = pytest.mark.ci


@pytest.fixture(scope="module")
def dead():
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_process_is_alive_until_it_has_ended(dead):
    assert is_alive(os.getpid()) and is_alive(os.getppid()) and not is_alive(dead)


def test_files_of_dead_processes_go_and_all_others_stay(tmp_path, dead):
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "file").write_text("keep")
    folder = tmp_path / "run"
    folder.mkdir()
    gone = {f"config.json.{dead}.0123abcd.tmp", f"checkpoint.{dead}.0123abcd.tmp", f"a\nb.{dead}.0123abcd.tmp"}
    stay = {"config.json", f"config.json.{os.getpid()}.0123abcd.tmp", "notes.tmp", f"{dead}.tmp", f"x.{dead}.tmpx"}
    for name in gone | stay:
        (folder / name).write_text("")
    (folder / f"1.{dead}.tmp").mkdir()
    (folder / f"1.{dead}.tmp" / "weights").write_text("")
    (folder / f"link.{dead}.tmp").symlink_to(tmp_path / "victim")
    assert remove_leftovers(str(folder), "2") == []
    assert remove_leftovers(str(folder), "1") == [f"1.{dead}.tmp"]
    assert set(remove_leftovers(str(folder))) == gone | {f"link.{dead}.tmp"}
    assert set(os.listdir(folder)) == stay and (tmp_path / "victim" / "file").read_text() == "keep"
    assert remove_leftovers(str(tmp_path / "nowhere")) == []


def test_a_training_removes_them_while_it_holds_the_lock(tmp_path, dead):
    with RunFolder(tmp_path).locked():
        left = tmp_path / f"log.csv.{dead}.0123abcd.tmp"
        left.write_text("")
        with raises_naming(OSError, tmp_path), RunFolder(tmp_path).locked():
            pass
        assert left.exists()
    with RunFolder(tmp_path).locked():
        assert not left.exists()


MOMENTS = ("write_config", "save_weights", "end")


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A run, an average of it that was killed at each step of the writing, and the status of each of these processes.

    They are forks of one process, which imports TensorFlow and starts nothing of it.
    """
    folder = tmp_path_factory.mktemp("killed")
    make_run(folder / "run", word_vocab())
    script = f"""
import os
from txl_tf.runs import folder as folders
from txl_tf.runs.checkpoints import average_checkpoints
from txl_tf.runs.folder import RunFolder

def die_at(moment):
    if moment == "end":
        folders.remove = lambda path: os._exit(9)
    else:
        def dies(self, *arguments, **named):
            (before(self, *arguments, **named) if moment == "write_config" else None, os._exit(9))
        before = getattr(RunFolder, moment)
        setattr(RunFolder, moment, dies)

for moment in {MOMENTS!r}:
    child = os.fork()
    if not child:
        try:
            die_at(moment)
            average_checkpoints({str(folder / "run")!r}, {str(folder)!r} + "/" + moment, num_last_checkpoints=1)
        finally:
            os._exit(1)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return folder, dict(zip(MOMENTS, map(int, done.stdout.split()), strict=True))


@pytest.mark.parametrize("moment", MOMENTS)
def test_an_average_that_was_killed_works_again(killed, moment):
    """`os._exit` in a process of its own, at each step of the writing; then the same call in this process."""
    folder, statuses = killed
    assert statuses[moment] == 9
    average = RunFolder(folder / moment)
    assert average.has_config() and (folder / moment / folders.CREATING).exists()
    average_checkpoints(str(folder / "run"), str(folder / moment), num_last_checkpoints=1)
    assert not (folder / moment / folders.CREATING).exists() and len(average.checkpoints()) == 1
    average.load_model()
    with raises_parameter("output_dir", str(folder / moment)):
        average_checkpoints(str(folder / "run"), str(folder / moment), num_last_checkpoints=1)


# Forks for each moment at which a conversion changes a file, and kills the fork there. Then the same call must work.
_KILLS = """
import os, shutil, signal, sys
from pathlib import Path
import tensorflow as tf
from txl_tf import files
from txl_tf.convert.original import run_to_tf1, tf1_to_run

folder, target = Path(sys.argv[1]), Path(sys.argv[1]) / "target"
WORK = {
    "from tf1": lambda: tf1_to_run(
        str(folder / "tf1"), str(folder / "cache.pkl"), str(target / "run"), mem_len=4, data_dir=str(target / "data")
    ),
    "to tf1": lambda: run_to_tf1(str(folder / "run"), str(target / "back")),
}
CHANGES = [(os, "replace"), (os, "rename"), (os, "mkdir"), (os, "remove"), (shutil, "rmtree"), (tf.io.gfile, "rename"),
           (tf.io.gfile, "makedirs"), (tf.io.gfile, "remove"), (tf.raw_ops, "SaveV2"), (files._NewFile, "write"),
           (files._NewFile, "close"), (tf.io.gfile, "copy")]

def run(work, moment):
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    moments = iter(range(1, 10_000))
    for owner, name in CHANGES:
        def changed(*args, function=getattr(owner, name), **options):
            if next(moments) == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **options)
        setattr(owner, name, changed)
    try:
        work()
    except BaseException as error:
        print(type(error).__name__, error, flush=True)
        os._exit(1)
    os._exit(0)

def found():
    return {str(path.relative_to(target)): path.read_bytes() for path in target.rglob("*") if path.is_file()}

for name, work in WORK.items():
    shutil.rmtree(target, ignore_errors=True)
    assert run(work, 0) == 0
    expected = found()
    moment = 1
    while True:
        shutil.rmtree(target)
        status = run(work, moment)
        if status == 0:
            break
        assert status == -signal.SIGKILL, (name, moment, status)
        again = run(work, 0)
        assert again == 0, (name, moment, sorted(found()))
        now = found()
        assert sorted(now) == sorted(expected), (name, moment, sorted(now))
        different = [path for path in now if now[path] != expected[path] and not path.endswith(".index")]
        assert not different, (name, moment, different)
        moment += 1
    print(name, moment - 1, flush=True)
"""


@pytest.mark.slow
def test_a_conversion_that_was_killed_at_any_moment_works_again(tmp_path, monkeypatch):
    symbols = ["<eos>", *(f"w{i}" for i in range(22))]
    make_run(tmp_path / "run", word_vocab())
    run_to_tf1(str(tmp_path / "run"), str(tmp_path / "tf1"))
    make_cache(tmp_path / "cache.pkl", monkeypatch, symbols=symbols, cutoffs=[])
    done = subprocess.run([sys.executable, "-c", _KILLS, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    moments = [int(line.split()[-1]) for line in done.stdout.splitlines()]
    assert len(moments) == 2 and min(moments) > 10
