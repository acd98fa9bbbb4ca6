"""The mean of several checkpoints' weights, as a run that every program opens."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from checkpoint_test import assert_variables_equal
from conftest import SMALL, randomise

import txl_tf
from txl_tf import averaging, runs
from txl_tf.checkpoint import RunCheckpoints
from txl_tf.vocabulary import Vocab

ROOT = Path(__file__).parents[1]


@pytest.fixture
def run(tmp_path):
    """A run with checkpoints of steps 1, 2 and 3, optimizer included, and the weights of each."""
    model = {**SMALL, "mem_len": 4, "cutoffs": [5, 12], "div_val": 2}
    lm = txl_tf.TransformerXLLM(**model)
    lm.compile(txl_tf.make_optimizer(learning_rate=1e-3, train_steps=1))
    lm.optimizer.build(lm.trainable_variables)
    folder = tmp_path / "run"
    checkpoints = RunCheckpoints(lm, str(folder))
    weights = []
    lm.carried_mems = lm.initial_mems(2)
    for step in (1, 2, 3):
        randomise(lm, seed=step)
        lm.optimizer.iterations.assign(step)
        checkpoints.save()
        weights.append(txl_tf.tf1_variables(lm))
    vocab = Vocab(special=["<eos>", "<unk>", *(f"w{i}" for i in range(21))], eos="<eos>", unk="<unk>")
    vocab.build()
    vocab.save(folder / "vocab.txt")
    config = {"data": {"dataset": "text"}, "model": model, "vocab": vocab.get_config()}
    (folder / "config.json").write_text(json.dumps(config))
    return folder, weights


def mean(weights):
    """Summed in float64, rounded once."""
    return {
        name: np.mean([np.float64(arrays[name]) for arrays in weights], 0).astype(np.float32) for name in weights[0]
    }


@pytest.mark.parametrize(
    "arguments, steps",
    [
        ({"num_last_checkpoints": 2}, [2, 3]),
        ({"num_last_checkpoints": 3}, [1, 2, 3]),
        ({"checkpoints": ["ckpt-1", "ckpt-3"]}, [1, 3]),
        ({"checkpoints": ["ckpt-2"]}, [2]),
    ],
    ids=str,
)
def test_weights_are_the_mean_and_the_folder_is_a_run(run, tmp_path, arguments, steps):
    folder, weights = run
    paths = averaging.average_checkpoints(folder, tmp_path / "average", **arguments)
    assert [Path(path).name for path in paths] == [f"ckpt-{step}" for step in steps]
    lm = runs.load_lm(tmp_path / "average")
    assert_variables_equal(txl_tf.tf1_variables(lm), mean([weights[step - 1] for step in steps]))

    assert runs.find_checkpoint(tmp_path / "average") == str(tmp_path / "average" / f"ckpt-{steps[-1]}")
    assert runs.read_config(tmp_path / "average") == runs.read_config(folder)
    assert runs.load_vocab(tmp_path / "average").symbols == runs.load_vocab(folder).symbols


def test_the_sum_is_not_rounded(run):
    """In float32, 2 ** 24 + 1 - 2 ** 24 is 0."""
    folder, _ = run
    lm = runs.load_lm(folder)
    bias = lm.network.r_w_bias
    paths = []
    for i, value in enumerate([2.0**24, 1.0, -(2.0**24)]):
        bias.assign(np.full(bias.shape, value))
        paths.append(runs.save_weights(lm, folder, 10 + i))
    averaging.average_weights(lm, paths)
    np.testing.assert_array_equal(bias, np.full(bias.shape, np.float32(1 / 3)))


def test_checkpoints_of_other_runs_and_of_the_original_count_too(run, small_lm, tmp_path):
    folder, weights = run
    other = small_lm(seed=9, cutoffs=[5, 12], div_val=2)
    txl_tf.save_tf1_checkpoint(other, tmp_path / "model.ckpt-8")
    averaging.average_checkpoints(folder, tmp_path / "average", ["ckpt-1", str(tmp_path / "model.ckpt-8")])
    expected = mean([weights[0], txl_tf.tf1_variables(other)])
    assert_variables_equal(txl_tf.tf1_variables(runs.load_lm(tmp_path / "average", "ckpt-8")), expected)


def test_weights_of_another_shape_are_named(run, small_lm, tmp_path):
    folder, _ = run
    path = runs.save_weights(small_lm(cutoffs=[5, 12], div_val=2, d_inner=9), tmp_path / "other", 4)
    with pytest.raises(
        ValueError,
        match=rf"(?s){path} does not fit.*transformer/layer_0/ff/layer_1/kernel is \[8, 9\] in the checkpoint and "
        r"\[8, 12\] in the model",
    ):
        averaging.average_checkpoints(folder, tmp_path / "average", ["ckpt-1", path])
    assert not (tmp_path / "average").exists()


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({}, "either checkpoints or num_last_checkpoints must say"),
        ({"checkpoints": ["ckpt-1"], "num_last_checkpoints": 2}, "either checkpoints or num_last_checkpoints must say"),
        ({"num_last_checkpoints": 4}, "num_last_checkpoints=4, but model_dir .*run holds 3: ckpt-1, ckpt-2, ckpt-3"),
        ({"num_last_checkpoints": 0}, "num_last_checkpoints must be at least 1, got 0"),
        ({"checkpoints": ["ckpt-7"]}, "no checkpoint at ckpt-7, nor in .*run"),
        ({"checkpoints": ["ckpt-1"], "model_dir": "nowhere"}, "model_dir nowhere is not the folder of a run"),
        ({"checkpoints": ["ckpt-1"], "output_dir": "."}, "run already holds a run: choose a new folder"),
    ],
    ids=str,
)
def test_bad_input_is_one_clear_error(run, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(run[0])
    if "output_dir" in arguments:
        arguments = {**arguments, "output_dir": run[0]}
    with pytest.raises(ValueError, match=message):
        averaging.average_checkpoints(**{"model_dir": run[0], "output_dir": tmp_path / "average", **arguments})
    assert not (tmp_path / "average").exists()


def test_the_program(run, tmp_path):
    command = [sys.executable, str(ROOT / "tools" / "average_checkpoints.py"), f"--model_dir={run[0]}"]
    flags = ["--checkpoints=ckpt-1,ckpt-3", f"--output_dir={tmp_path / 'average'}"]
    result = subprocess.run([*command, *flags], capture_output=True, text=True)
    assert result.stdout == f"{tmp_path / 'average'}: the average of {run[0]}/ckpt-1, {run[0]}/ckpt-3\n", result.stderr
    assert_variables_equal(txl_tf.tf1_variables(runs.load_lm(tmp_path / "average")), mean([run[1][0], run[1][2]]))

    result = subprocess.run([*command, *flags], capture_output=True, text=True)
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert "average_checkpoints.py: " in result.stderr and "already holds a run" in result.stderr
