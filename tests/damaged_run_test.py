"""Every file of a run, a prepared folder, a converted checkpoint and an export, damaged in every way.

A program ends with one clear error or with a right answer, in bounded time; it changes nothing outside, and loses no
other file.
"""

import collections
import json
import os
import subprocess
import sys

import pytest
from absurd import problems_of
from damaged import PROGRAMS, UNHARMED, make_folder
from helpers import ROOT

LEAST_CASES = 400


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """`[program, file, damage, seconds, status, end of the output, errors, files lost or changed]` of all cases."""
    folder = tmp_path_factory.mktemp("damaged")
    make_folder(folder)
    command = [sys.executable, str(ROOT / "tests" / "damaged.py"), str(folder), "3"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def answer_of(output):
    """What the output says, but for speeds and the folders of scratch files."""
    return [line.split(" tokens/s")[0].rpartition("|")[0] or line for line in output.splitlines()]


@pytest.mark.slow
def test_one_clear_error_or_an_answer_and_nothing_lost(found):
    wrong = []
    for program, file, damage, seconds, status, _, errors, lost in found:
        problems = problems_of(status, errors, lost, seconds)
        wrong += [f"{program}, {file} {damage}: {problem}; {errors[-300:]}" for problem in problems]
    assert not wrong, "\n".join(wrong)
    assert len(found) > LEAST_CASES


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_what_is_right_is_answered_and_every_answer_is_right(found, program):
    cases = [case for case in found if case[0] == program]
    (_, _, _, _, status, whole, errors, _), *damaged = cases
    assert status == (1 if program == "export the same" else 0), errors
    ends = collections.Counter(status for *_, status, _, _, _ in damaged)
    if status == 0:
        assert ends[0] > 0
    wrong = []
    for _, file, damage, _, end, output, errors, _ in damaged:
        same = answer_of(output) == answer_of(whole)
        if damage in UNHARMED and end != status and not errors.count("symbolic link"):
            wrong.append(f"{file} {damage}: {errors}")
        if end == 0 and not same and not is_told(output + errors, file):
            wrong.append(f"{file} {damage}: another answer, {output[-500:]}")
    assert not wrong, "\n".join(wrong)


def is_told(text, file):
    """Whether a program says that it goes on without a file, or that it makes it anew."""
    name = os.path.basename(file).partition(".")[0]
    return name in text or "incomplete" in text
