"""A short form of kills.py: train.py, killed again and again, leaves what it leaves when nothing happens to it."""

import re

import pytest
from helpers import run_program


@pytest.mark.parametrize(
    "setting", ["one", *(pytest.param(name, marks=pytest.mark.slow) for name in ("pairs", "flat"))]
)
def test_three_kills_leave_no_trace(setting):
    done = run_program("tests/kills.py", "--kills=3", "--steps=30", f"--setting={setting}", "--seed=1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"^ +[1-3] +0  \w+ +\d+ ", done.stdout, re.MULTILINE)) == 3, done.stdout
    verdict = rf"3 kills, {setting}: all \d{{2,}} variables, rows and results are bit for bit the same"
    assert re.fullmatch(verdict, done.stdout.splitlines()[-1])
