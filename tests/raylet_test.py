"""A raylet that dies at any moment ends the program with status 1 and one line, or costs nothing."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest
from clusters import children
from helpers import ROOT, TEXT, TINY_RUN, make_run, word_vocab, write_text

LINES = "".join(f"line {i} of {i % 7} words\n" for i in range(200_000))


def prepare(folder):
    path = write_text(folder / "a.txt", LINES * 10)
    return ["tools/prepare_data.py", "--dataset=text", f"--data_path={path}", "--level=word", f"--data_dir={folder}/a"]


def score(folder):
    make_run(folder / "run", word_vocab())
    (folder / "lines").mkdir()
    for i in range(20):
        write_text(folder / "lines" / f"{i}.txt", "w1 w2 w3\n" * 5000)
    return ["tools/score.py", f"--model_dir={folder}/run", f"--input={folder}/lines/", f"--output={folder}/scores"]


def train(folder):
    options = {name: value for group in TINY_RUN.values() for name, value in group.items()} | {"train_steps": 10**6}
    path = write_text(folder / "text.txt", TEXT)
    flags = [f"--{name}={value}" for name, value in options.items()]
    return ["train.py", f"--data_path={path}", f"--model_dir={folder}/run", *flags]


def raylet_of(process, seconds=60):
    """The number of the raylet below a process, as soon as it exists; `None` if the process ends before."""
    last = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < last:
        found = [number for number, name in children(process.pid).items() if re.search(r"raylet/raylet\s", name)]
        if found:
            return found[0]
        time.sleep(0.05)
    return None


@pytest.mark.slow
@pytest.mark.parametrize(
    "make, seconds",
    [(prepare, 0), (prepare, 1), (prepare, 3), (prepare, 5), (prepare, 9), (score, 0.5), (score, 6), (score, 12)]
    + [(train, 2), (train, 8), (train, 16)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_raylet_that_is_killed_is_one_line(tmp_path, make, seconds):
    pytest.importorskip("ray", reason="the extra cluster is not installed")
    command = [sys.executable, *make(tmp_path), "--ray_address=local", "--ray_workers=1"]
    command[1] = str(ROOT / command[1])
    with open(tmp_path / "out", "w") as out, open(tmp_path / "err", "w") as err:
        process = subprocess.Popen(command, stdout=out, stderr=err, cwd=tmp_path, start_new_session=True)
        try:
            raylet = raylet_of(process)
            assert raylet, (tmp_path / "err").read_text()
            time.sleep(seconds)
            ended = process.poll() is not None
            if not ended:
                os.kill(raylet, signal.SIGKILL)
            status = process.wait(90)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    time.sleep(1)  # what the program's last words are printed by outlives it
    errors = re.sub(
        r"^(WARNING: All log|[WIEF]\d{4} |lines answered before).*\n", "", (tmp_path / "err").read_text(), flags=re.M
    )
    errors = re.sub(r"^(checkpoint: .*|\(--verbosity=1 shows where\))\n", "", errors, flags=re.M)
    if status == 0:  # it did not need the raylet any more
        assert ended or make is not train
        return
    assert status == 1 and len(errors.splitlines()) == 1 and len(errors) < 500, (status, errors)
