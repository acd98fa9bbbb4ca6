"""A short form of kills.py: train.py, killed again and again, leaves what it leaves when nothing happens to it."""

import argparse
import re

import pytest
from helpers import mentions, run_program
from kills import Session, final_state, write_data


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["one", "pairs", "pairs_workers", "flat", "flat_workers", "iterator"])
def test_three_kills_leave_no_trace(setting):
    done = run_program("tests/kills.py", "--kills=3", "--steps=30", f"--setting={setting}", "--seed=1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"^ +[1-3] +[01]  \w+ +\d+ ", done.stdout, re.MULTILINE)) == 3, done.stdout
    verdict = rf"3 kills, {setting}: all \d{{2,}} variables, rows and results are bit for bit the same"
    assert re.fullmatch(verdict, done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_four_workers_lose_one_and_three_go_on():
    done = run_program("tests/kills.py", "--setting=elastic", "--steps=30", "--seed=1")
    assert done.returncode == 0, done.stdout + done.stderr
    four, five, three, verdict = done.stdout.splitlines()
    assert re.fullmatch(r"4 workers  worker \d killed at step \d+; the others: .*/ckpt-\d+", four)
    assert mentions(five, "train_batch_size", 5, 12)
    assert re.fullmatch(r"3 workers  from step \d+ to the end", three)
    assert re.fullmatch(r"four workers, then three: \d{2,} variables within .*, memory, .* within .*", verdict)


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["pairs_elastic", "flat_elastic"])
def test_any_number_of_workers_trains_on_pairs_and_on_sentences(setting):
    done = run_program("tests/kills.py", f"--setting={setting}", "--steps=30", "--seed=1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.match(r"4 workers  .*\n3 workers  from step [1-9]\d* to the end\nfour workers, then three:", done.stdout)


@pytest.mark.slow
def test_where_one_of_two_workers_is_told_to_stop_both_save_and_stop_and_go_on(tmp_path):
    args, text = argparse.Namespace(setting="pairs_workers", steps=20), write_data(tmp_path)
    for name, told in (("whole", None), ("stopped", (1, 8, "told", 0))):
        results = Session(args, text, tmp_path / name, told, workers=2).wait()
        assert [code for code, _ in results] == [0, 0], results
    (_, of_chief), (_, of_other) = results
    assert mentions(of_chief, 10, f"{tmp_path}/stopped/ckpt-10")
    assert "terminated" in of_other
    results = Session(args, text, tmp_path / "stopped", workers=2).wait()
    assert [code for code, _ in results] == [0, 0] and "/ckpt-10\n" in results[0][1], results
    assert final_state(tmp_path / "stopped", 20) == final_state(tmp_path / "whole", 20)
