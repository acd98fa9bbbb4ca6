"""The simulation of a training that fails, against formulas."""

import math
import re

import numpy as np
import pytest
from absl import flags
from benchmarking import failing
from helpers import program, raises_naming, raises_parameter, run_here


@pytest.fixture(scope="module")
def tool():
    yield from program("tools/simulate_training.py")


def test_a_step_is_its_tokens_and_a_ring_of_sums():
    """Four workers send 3/2 of 4 MB, at 1 MB/s 6 s, in 6 messages of 0.5 s."""
    sizes = dict(tokens=1000, tokens_per_second=50, parameters=1e6, gigabits=8e-3, message_seconds=0.5)
    assert failing.step_seconds(4, **sizes) == (5, 6 + 3)
    assert failing.step_seconds(1, **sizes) == (20, 0)
    assert failing.step_seconds(4, **sizes, shared=True) == (20, 9)


def test_the_time_of_a_training_is_that_of_the_formula():
    """Failures without memory: an interval of w seconds takes (mtbf + restart) (exp(w / mtbf) - 1) in the mean."""
    step, save_steps, save, restart, mtbf = 2.0, 30, 5.0, 20.0, 100.0
    runs = [
        failing.train(3000, step, save_steps, save, restart, mtbf, np.random.default_rng(seed)) for seed in range(40)
    ]
    seconds = np.mean([sum(run.values()) - run["failures"] for run in runs])
    expected = 100 * (mtbf + restart) * (math.exp((save_steps * step + save) / mtbf) - 1)
    assert seconds == pytest.approx(expected, rel=0.03)
    assert all(run["useful"] == 6000 and run["saving"] == 500 for run in runs)
    assert all(run["starting"] == 20 * run["failures"] for run in runs)


def test_youngs_interval_is_about_the_best():
    """No other of half or double its length takes less time."""
    step, save, restart, mtbf = 1.0, 4.0, 10.0, 5000.0
    best = failing.best_save_steps(step, save, mtbf)
    assert best == 200

    def seconds(k):
        return (mtbf + restart) * (math.exp((k * step + save) / mtbf) - 1) / k

    assert seconds(best) < min(seconds(best // 2), seconds(2 * best))


def test_a_training_that_never_ends_is_an_error():
    with raises_parameter("mtbf_hours", 1 / 3600):
        failing.train(1000, 1.0, 1000, 0.0, 0.0, 1.0, np.random.default_rng(0))


def test_the_table_has_a_line_for_every_number_of_workers(tool, capsys):
    run_here(tool, "--workers=1,64", "--tokens=1e9", "--runs=2")
    lines = capsys.readouterr().out.splitlines()
    assert len({line.count("|") for line in lines}) == 1
    assert [re.match(r"\| (\S+) \| (\S+) \+ (\S+) s", line).groups() for line in lines[2:]] == [
        ("1", "100", "0"), ("64", "1.56", "0.636"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "flag",
    ["--workers=0", "--workers=", "--workers=8,a", "--tokens_per_second=0", "--tokens=nan", "--mtbf_hours=inf",
     "--save_seconds=-1"],
)  # fmt: skip
def test_bad_flags_are_named(tool, flag):
    with raises_naming(flags.IllegalFlagValueError, flag.split("=")[0]):
        run_here(tool, flag)
