"""A short form of kills.py: train.py, killed again and again, leaves what it leaves when nothing happens to it."""

import re

import pytest
from helpers import run_program


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["one", "pairs", "flat", "iterator"])
def test_three_kills_leave_no_trace(setting):
    done = run_program("tests/kills.py", "--kills=3", "--steps=30", f"--setting={setting}", "--seed=1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"^ +[1-3] +0  \w+ +\d+ ", done.stdout, re.MULTILINE)) == 3, done.stdout
    verdict = rf"3 kills, {setting}: all \d{{2,}} variables, rows and results are bit for bit the same"
    assert re.fullmatch(verdict, done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_four_workers_lose_one_and_three_go_on():
    done = run_program("tests/kills.py", "--setting=elastic", "--steps=30", "--seed=1")
    assert done.returncode == 0, done.stdout + done.stderr
    four, five, three, verdict = done.stdout.splitlines()
    assert re.fullmatch(r"4 workers  worker \d killed at step \d+; the others: .* they go on from .*ckpt-\d+", four)
    assert five.endswith("train_batch_size must be a multiple of 5, for 5 replicas, got 12")
    assert re.fullmatch(r"3 workers  from step \d+ to the end", three)
    assert re.fullmatch(r"four workers, then three: \d{2,} variables within .*, memory and log.csv within .*", verdict)
