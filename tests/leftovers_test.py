"""After a program was killed, the same command works, and the next program removes what the dead one left."""

import os
import subprocess
import sys

import pytest
from helpers import make_run, word_vocab

from txl_tf.files import is_alive, remove_leftovers
from txl_tf.runs import folder as folders
from txl_tf.runs.checkpoints import average_checkpoints
from txl_tf.runs.folder import RunFolder


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
    with RunFolder(tmp_path).writing():
        left = tmp_path / f"log.csv.{dead}.0123abcd.tmp"
        left.write_text("")
        with pytest.raises(OSError, match="another run is training"), RunFolder(tmp_path).writing():
            pass
        assert left.exists()
    with RunFolder(tmp_path).writing():
        assert not left.exists()


MOMENTS = ("describe", "save_weights", "end")


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
            (before(self, *arguments, **named) if moment == "describe" else None, os._exit(9))
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
    with pytest.raises(ValueError, match="already holds a run"):
        average_checkpoints(str(folder / "run"), str(folder / moment), num_last_checkpoints=1)
