"""The mean of several checkpoints' weights, as a run that every program opens."""

import contextlib
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from absl import flags
from helpers import (
    ANY,
    SMALL,
    assert_variables_equal,
    full_disk,
    make_run,
    mentions,
    program,
    raises_naming,
    raises_parameter,
    randomise,
    run_program,
    word_vocab,
)

import txl_tf
from txl_tf.config import EvaluationConfig
from txl_tf.files import write_json
from txl_tf.runs.checkpoints import RunCheckpoints, average_checkpoints, average_weights
from txl_tf.runs.evaluate import evaluate_run
from txl_tf.runs.folder import RunFolder
from txl_tf.runs.origin import Origin
from txl_tf.runs.weights import CheckpointFolder, MisfitError
from txl_tf.training.loop import LoopState


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run with checkpoints of steps 1, 2 and 3, optimizer included, and the weights of each."""
    model = {**SMALL, "mem_len": 4, "cutoffs": [5, 12], "div_val": 2}
    lm = txl_tf.TransformerXLLM(**model)
    lm.compile(txl_tf.make_optimizer(learning_rate=1e-3, train_steps=1))
    lm.optimizer.build(lm.trainable_variables)
    path = tmp_path_factory.mktemp("made") / "run"
    folder = RunFolder(path)
    checkpoints = RunCheckpoints(lm, folder)
    weights = []
    lm.loop = LoopState(mems=lm.initial_mems(2))  # as `fit` has it
    for step in (1, 2, 3):
        randomise(lm, seed=step)
        lm.optimizer.iterations.assign(step)
        checkpoints.save()
        weights.append(txl_tf.tf1_variables(lm))
    vocab = word_vocab()
    vocab.save(path / "vocab.txt")
    config = {"data": {"dataset": "text"}, "model": model, "vocab": vocab.get_config()}
    Path(folder.config_file).write_text(json.dumps(config))
    return path, weights


@pytest.fixture
def run(made, tmp_path):
    """A copy of it."""
    shutil.copytree(made[0], tmp_path / "run")
    return RunFolder(tmp_path / "run"), made[1]


def mean(weights):
    """Summed in float64, rounded once."""
    return {
        name: np.mean([np.float64(arrays[name]) for arrays in weights], 0).astype(np.float32) for name in weights[0]
    }


@pytest.mark.ci
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
    paths = average_checkpoints(folder.path, tmp_path / "average", **arguments)
    assert [Path(path).name for path in paths] == [f"ckpt-{step}" for step in steps]
    lm, vocab = txl_tf.load_run(tmp_path / "average")
    assert_variables_equal(txl_tf.tf1_variables(lm), mean([weights[step - 1] for step in steps]))

    average = RunFolder(tmp_path / "average")
    assert average.find_checkpoint() == str(tmp_path / "average" / f"ckpt-{steps[-1]}")
    added = {"family": "transformer_xl", "fingerprints": {"vocab": word_vocab().fingerprint()}}
    assert average.read_config() == {**folder.read_config(), **added}
    assert vocab.symbols == folder.load_vocab().symbols


def test_the_sum_is_not_rounded(run):
    """In float32, 2 ** 24 + 1 - 2 ** 24 is 0."""
    folder, _ = run
    lm = folder.load_model()
    bias = lm.network.r_w_bias
    paths = []
    for i, value in enumerate([2.0**24, 1.0, -(2.0**24)]):
        bias.assign(np.full(bias.shape, value))
        paths.append(folder.save_weights(lm, 10 + i))
    average_weights(lm, paths)
    np.testing.assert_array_equal(bias, np.full(bias.shape, np.float32(1 / 3)))


def test_a_checkpoint_has_a_name(small_lm, tmp_path):
    for path in ("", f"{tmp_path}/"):
        with raises_parameter("path", path):
            txl_tf.save_tf1_checkpoint(small_lm(), path)


def test_checkpoints_of_other_runs_and_of_the_original_count_too(run, small_lm, tmp_path):
    folder, weights = run
    other = small_lm(seed=9, cutoffs=[5, 12], div_val=2)
    txl_tf.save_tf1_checkpoint(other, tmp_path / "model.ckpt-8")
    average_checkpoints(folder.path, tmp_path / "average", ["ckpt-1", str(tmp_path / "model.ckpt-8")])
    expected = mean([weights[0], txl_tf.tf1_variables(other)])
    assert_variables_equal(txl_tf.tf1_variables(txl_tf.load_run(tmp_path / "average", "ckpt-8")[0]), expected)


def test_weights_of_another_shape_are_named(run, small_lm, tmp_path):
    folder, _ = run
    path = CheckpointFolder(tmp_path / "other").save_weights(small_lm(cutoffs=[5, 12], div_val=2, d_inner=9), 4)
    with raises_parameter("checkpoint", path, error=MisfitError) as raised:
        average_checkpoints(folder.path, tmp_path / "average", ["ckpt-1", path])
    kernel = "transformer/layer_0/ff/layer_1/kernel is [8, 9] in the checkpoint and [8, 12] in the model"
    assert kernel in raised.value.differences
    assert not (tmp_path / "average").exists()


def test_a_run_of_another_vocabulary_or_model_is_named(run, tmp_path):
    folder, _ = run
    model, vocab = folder.read_config()["model"], word_vocab()
    vocab.set_lines(vocab.symbols[::-1], "reversed")
    make_run(tmp_path / "reversed", vocab, **model)
    make_run(tmp_path / "heads", word_vocab(), **{**model, "n_head": 3, "d_head": 2})
    make_run(tmp_path / "free", word_vocab(), **{**model, "dropout": 0.0, "clamp_len": 3})
    paths = {name: f"{tmp_path}/{name}/ckpt-1" for name in ("reversed", "heads")}
    with raises_parameter("vocab") as raised:
        average_checkpoints(folder.path, tmp_path / "average", ["ckpt-1", paths["reversed"]])
    assert mentions(str(raised.value), folder)
    with raises_parameter("checkpoints", paths["heads"]) as raised:
        average_checkpoints(folder.path, tmp_path / "average", ["ckpt-1", paths["heads"]])
    assert mentions(str(raised.value), "n_head", 3)
    average_checkpoints(folder.path, tmp_path / "average", ["ckpt-1", f"{tmp_path}/free/ckpt-1"])


def test_the_best_checkpoint_counts_only_once(run, tmp_path):
    folder, weights = run
    Path(folder.best.path).mkdir()
    write_json(folder.best_file, {"step": 2, "val_loss": 1.0})
    folder.best.save_weights(folder.load_model("ckpt-2"), 2)
    with raises_parameter("checkpoints", ["ckpt-1", "ckpt-2", "best"], "different checkpoints"):
        average_checkpoints(folder.path, tmp_path / "average", ["ckpt-1", "ckpt-2", "best"])
    folder.best.save_weights(folder.load_model("ckpt-3"), 2)  # the best of another training
    average_checkpoints(folder.path, tmp_path / "average", ["ckpt-2", "best"])
    found = txl_tf.tf1_variables(txl_tf.load_run(tmp_path / "average")[0])
    assert_variables_equal(found, mean(weights[1:]))


@pytest.mark.parametrize(
    "arguments, name, value, allowed",
    [
        ({}, "checkpoints", None, ANY),
        ({"checkpoints": ["ckpt-1"], "num_last_checkpoints": 2}, "checkpoints", ["ckpt-1"], ANY),
        ({"num_last_checkpoints": 4}, "num_last_checkpoints", 4, "at most 3"),
        ({"num_last_checkpoints": 0}, "num_last_checkpoints", 0, "at least 1"),
        ({"checkpoints": ["ckpt-7"]}, "checkpoint", "ckpt-7", ANY),
        ({"checkpoints": ["ckpt-2", "", "ckpt-3"]}, "checkpoints", ["ckpt-2", "", "ckpt-3"], "names of checkpoints"),
        ({"checkpoints": ["ckpt-2", "ckpt-2"]}, "checkpoints", ["ckpt-2", "ckpt-2"], "different checkpoints"),
        ({"checkpoints": ["ckpt-3", "latest"]}, "checkpoints", ["ckpt-3", "latest"], "different checkpoints"),
        ({"checkpoints": ["ckpt-1"], "model_dir": "nowhere"}, "model_dir", "nowhere", "the folder of a run"),
        ({"checkpoints": ["ckpt-1"], "output_dir": "."}, "output_dir", ANY, "a new folder"),
        ({"checkpoints": ["ckpt-1"], "output_dir": "best"}, "output_dir", ANY, "a path that is no part of a run"),
    ],
    ids=str,
)
def test_bad_input_is_one_clear_error(run, tmp_path, monkeypatch, arguments, name, value, allowed):
    monkeypatch.chdir(run[0].path)
    if "output_dir" in arguments:
        arguments = {**arguments, "output_dir": os.path.join(run[0].path, arguments["output_dir"])}
    with raises_parameter(name, value, allowed):
        average_checkpoints(**{"model_dir": run[0].path, "output_dir": tmp_path / "average", **arguments})
    assert not (tmp_path / "average").exists()


def test_the_program_in_this_process(run, tmp_path, capsys):
    arguments = [f"--model_dir={run[0]}", "--checkpoints=ckpt-1,ckpt-3", f"--output_dir={tmp_path / 'average'}"]
    with contextlib.closing(program("tools/average_checkpoints.py")) as loaded:
        tool = next(loaded)
        flags.FLAGS(["average_checkpoints.py", *arguments])
        tool.main()
        expected = f"{tmp_path / 'average'}: the average of {run[0]}/ckpt-1, {run[0]}/ckpt-3\n"
        assert capsys.readouterr().out == expected
        found = txl_tf.tf1_variables(txl_tf.load_run(tmp_path / "average")[0])
        assert_variables_equal(found, mean([run[1][0], run[1][2]]))
        with raises_parameter("output_dir", allowed="a new folder"):
            tool.main()


@pytest.mark.slow
def test_the_program(run, tmp_path):
    arguments = [f"--model_dir={run[0]}", "--checkpoints=ckpt-1,ckpt-3", f"--output_dir={tmp_path / 'average'}"]
    result = run_program("tools/average_checkpoints.py", *arguments)
    assert mentions(result.stdout, tmp_path / "average", f"{run[0]}/ckpt-1", f"{run[0]}/ckpt-3"), result.stderr
    assert_variables_equal(txl_tf.tf1_variables(txl_tf.load_run(tmp_path / "average")[0]), mean([run[1][0], run[1][2]]))

    result = run_program("tools/average_checkpoints.py", *arguments)
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert "average_checkpoints.py: " in result.stderr and mentions(result.stderr, tmp_path / "average")


def test_a_full_disk_names_the_file_and_leaves_nothing(run, tmp_path):
    folder, _ = run
    for size in (1, 100, 1000):  # of the vocabulary, of config.json, of the checkpoint
        with full_disk(size), raises_naming(OSError, tmp_path / "average"):
            average_checkpoints(folder.path, tmp_path / "average", num_last_checkpoints=2)
        assert not (tmp_path / "average").exists()
    (tmp_path / "average").mkdir()
    with full_disk(1000), raises_naming(OSError, tmp_path / "average"):
        average_checkpoints(folder.path, tmp_path / "average", num_last_checkpoints=2)
    assert not list((tmp_path / "average").iterdir())


def test_a_folder_that_cannot_be_made_is_named(run, tmp_path):
    (tmp_path / "file").write_text("")
    with raises_naming(OSError, "file/average"):
        average_checkpoints(run[0].path, tmp_path / "file" / "average", num_last_checkpoints=2)


@pytest.mark.slow
def test_an_average_is_evaluated_as_its_run_and_a_new_run_takes_its_batches(trained_run, tmp_path, caplog):
    """The average of one checkpoint has its weights, so that evaluations with the same segments are equal."""
    mean = tmp_path / "mean"
    average_checkpoints(trained_run[0], mean, checkpoints=["ckpt-12"])
    training = RunFolder(mean).read_config()["training"]
    assert training == RunFolder(trained_run[0]).read_config()["training"]
    assert evaluate_run(mean)["valid"] == trained_run[1]["valid"]
    assert not [message for message in caplog.messages if message.startswith(f"{mean} ")]
    assert Origin(RunFolder(tmp_path / "new"), mean).settings["training"] == {
        "tgt_len": 8, "train_batch_size": 4, "eval_batch_size": 2, "shuffle_documents": False,
    }  # fmt: skip


@pytest.mark.slow
def test_an_evaluation_without_a_record_of_the_training_says_what_it_uses(trained_run, tmp_path, caplog):
    folder = RunFolder(shutil.copytree(trained_run[0], tmp_path / "run"))
    config = folder.read_config()
    Path(folder.config_file).write_text(json.dumps({**config, "training": {"eval_batch_size": 2}}))
    evaluate_run(folder.path, evaluation=EvaluationConfig(max_eval_batch=1))
    (message,) = [message for message in caplog.messages if message.startswith(f"{folder} ")]
    assert mentions(message, "tgt_len", 70)
    caplog.clear()
    evaluate_run(folder.path, evaluation=EvaluationConfig(tgt_len=3, max_eval_batch=1))
    assert not [message for message in caplog.messages if message.startswith(f"{folder} ")]
