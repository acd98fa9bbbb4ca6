"""Runs: progress, logs, checkpoints, resuming, Ctrl-C, and one clear error for each kind of bad input."""

import csv
import json
import math
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from txl_tf import training
from txl_tf.vocabulary import unescape

ROOT = Path(__file__).parents[1]

MODEL = {
    "n_layer": 1, "d_model": 16, "d_embed": 16, "n_head": 2, "d_head": 8, "d_inner": 16, "dropout": 0.1, "dropatt": 0.1,
    "mem_len": 8, "init": "normal", "div_val": 1,
}  # fmt: skip
OPTIMIZER = {"learning_rate": 1e-2, "warmup_steps": 2, "min_lr_ratio": 0.1, "clip": 0.25}


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("the cat sat on the mat, and so on and so on.\n" * 100)
    return str(path)


def run(tmp_path, text, **changes):
    """Trains 12 steps with a checkpoint at the 6th, or what `changes` say."""
    arguments = {
        "model_dir": str(tmp_path / "run"),
        "data": {"dataset": "text", "data_path": text},
        "model": MODEL,
        "optimizer": OPTIMIZER,
        "tgt_len": 8,
        "train_batch_size": 4,
        "eval_batch_size": 2,
        "train_steps": 12,
        "iterations": 3,
        "save_steps": 6,
    }
    for name, value in changes.items():
        arguments[name] = {**arguments[name], **value} if isinstance(value, dict) else value
    return training.train_and_evaluate(**arguments)


def evaluate(tmp_path, **arguments):
    return training.evaluate_run(str(tmp_path / "run"), **arguments)


def log_rows(tmp_path):
    with open(tmp_path / "run" / "log.csv") as file:
        return list(csv.DictReader(file))


def weights(tmp_path, name):
    """{variable: array} of a checkpoint, the optimizer's included."""
    path = str(tmp_path / "run" / name)
    return {key: tf.train.load_variable(path, key) for key, _ in tf.train.list_variables(path)}


def test_a_run_learns_and_leaves_logs_checkpoints_and_vocabulary(tmp_path, text, capsys):
    results = run(tmp_path, text, train_steps=60, iterations=20, save_steps=40)
    printed = capsys.readouterr().out
    rows = log_rows(tmp_path)
    assert [int(row["step"]) for row in rows] == [20, 40, 60]
    losses = [float(row["loss"]) for row in rows]
    assert losses[0] > losses[1] > losses[2]
    assert [row["val_loss"] for row in rows][::2] == ["NA", "NA"]
    for row in rows:
        assert float(row["bpc"]) == pytest.approx(float(row["loss"]) / math.log(2))
    assert float(rows[-1]["learning_rate"]) == pytest.approx(
        1e-2 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 57 / 58)))
    )
    assert results["valid"] < float(rows[1]["val_loss"])
    assert f"valid: loss {results['valid']:.6f} nats | bpc {results['valid'] / math.log(2):.4f}" in printed
    assert printed.count("tokens/s") == 4 and str(tmp_path / "run") in printed

    folder = tmp_path / "run"
    assert {path.name for path in folder.iterdir()} >= {
        "config.json",
        "vocab.txt",
        "log.csv",
        "ckpt-40.index",
        "ckpt-60.index",
    }
    config = json.loads((folder / "config.json").read_text())
    assert config["model"]["n_token"] == len((folder / "vocab.txt").read_text().splitlines())
    assert list((folder / "train").glob("events.*"))


def test_words_report_perplexity(tmp_path, text):
    results = run(tmp_path, text, data={"level": "word", "cutoffs": [3, 6]}, model={"div_val": 2})
    assert float(log_rows(tmp_path)[1]["val_ppl"]) == pytest.approx(math.exp(float(log_rows(tmp_path)[1]["val_loss"])))
    assert 0 < results["valid"] < math.log(20)


def test_resuming_gives_the_weights_of_the_uninterrupted_run(tmp_path, text, capsys):
    """Weights, optimizer, memory, place in the text and dropout: bit for bit."""
    run(tmp_path, text)
    whole, rows = weights(tmp_path, "ckpt-12"), log_rows(tmp_path)
    for path in (tmp_path / "run").glob("ckpt-12*"):
        path.unlink()
    tf.compat.v1.train.update_checkpoint_state(str(tmp_path / "run"), str(tmp_path / "run" / "ckpt-6"))
    run(tmp_path, text)
    resumed = weights(tmp_path, "ckpt-12")
    assert "continuing from" in capsys.readouterr().out
    assert whole.keys() == resumed.keys() and len(whole) > 30
    for name, array in whole.items():
        np.testing.assert_array_equal(resumed[name], array, err_msg=name)
    for name in ("loss", "grad_norm", "learning_rate"):
        assert [row[name] for row in log_rows(tmp_path)[-2:]] == [row[name] for row in rows[-2:]]


def test_a_finished_run_is_evaluated_and_not_trained(tmp_path, text, capsys):
    first = run(tmp_path, text)
    assert run(tmp_path, text) == first
    assert "already trained" in capsys.readouterr().out


def test_evaluation_takes_the_checkpoint_and_settings_it_is_told(tmp_path, text):
    final = run(tmp_path, text)["valid"]
    assert evaluate(tmp_path)["valid"] == final
    assert evaluate(tmp_path, eval_ckpt_path=str(tmp_path / "run" / "ckpt-6"))["valid"] > final
    other = evaluate(tmp_path, model={"mem_len": 20, "same_length": True, "clamp_len": 9}, tgt_len=3)
    assert other["valid"] == pytest.approx(final, rel=0.05) and other["valid"] != final
    assert set(evaluate(tmp_path, eval_split="train", max_eval_batch=3)) == {"train"}


def test_evaluation_of_a_file_uses_the_vocabulary_of_the_run_and_writes_every_token(tmp_path, text):
    run(tmp_path, text)
    other = tmp_path / "other.txt"
    other.write_text("so the cat and the mat\n")
    tokens_file = tmp_path / "tokens.tsv"
    arguments = {"eval_path": str(other), "tgt_len": 5, "max_eval_batch": 4}
    mean = evaluate(tmp_path, **arguments, token_nll=str(tokens_file))[str(other)]
    assert mean == pytest.approx(evaluate(tmp_path, **arguments)[str(other)], rel=1e-6)
    lines = [line.split("\t") for line in tokens_file.read_text().splitlines()]
    predicted = "o the cat " + "nd the mat"  # of two rows of 11 tokens all but the first
    assert "".join(unescape(token) for token, _ in lines) == predicted
    assert np.mean([float(nll) for _, nll in lines]) == pytest.approx(mean, abs=1e-5)


def test_evaluation_refuses_a_corpus_of_another_vocabulary(tmp_path, text):
    run(tmp_path, text)
    with pytest.raises(ValueError, match=r"another vocabulary \(103 symbols\) than the run .* \(14 symbols\)"):
        evaluate(tmp_path, data={"dataset": "pydoc"})


def test_the_average_of_the_weights_is_evaluated_and_training_goes_on_from_the_weights_themselves(tmp_path, text):
    options = {"optimizer": {"ema": 0.5}, "train_steps": 6, "iterations": 3, "save_steps": 3}
    averaged = run(tmp_path, text, **options)["valid"]
    own = evaluate(tmp_path)["valid"]
    assert averaged != own
    assert evaluate(tmp_path, eval_ckpt_path=str(tmp_path / "run" / "ema" / "ckpt-6"))["valid"] == averaged
    assert run(tmp_path, text, **options)["valid"] == averaged


@pytest.mark.parametrize("optimizer", ["adamw", "lamb"])
def test_other_optimizers_train(tmp_path, text, optimizer):
    run(tmp_path, text, optimizer={"optimizer": optimizer, "weight_decay": 0.01})
    losses = [float(row["loss"]) for row in log_rows(tmp_path)]
    assert losses[-1] < losses[0]


def test_warm_start_takes_the_weights_and_a_fresh_optimizer(tmp_path, text):
    run(tmp_path, text)
    source = tmp_path / "run" / "ckpt-12"
    run(
        tmp_path,
        text,
        model_dir=str(tmp_path / "warm"),
        warm_start_path=str(source),
        train_steps=1,
        optimizer={"warmup_steps": 0, "learning_rate": 1e-9},
    )
    before = weights(tmp_path, "ckpt-12")
    after = weights(tmp_path / "warm" / "..", "../warm/ckpt-1")
    moved = [name for name in before if name.startswith("weights/")]
    assert len(moved) > 10
    for name in moved:
        np.testing.assert_allclose(after[name], before[name], atol=1e-7, err_msg=name)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model": {"d_model": 15}}, "d_model must be even .* got 15"),
        ({"model": {"dropout": 1.0}}, r"dropout must lie in \[0, 1\), got 1.0"),
        ({"model": {"n_layer": 0}}, "n_layer must be at least 1, got 0"),
        ({"model": {"mem_len": -1}}, "mem_len must not be negative, got -1"),
        ({"model": {"init": "zeros"}}, "init must be .* got 'zeros'"),
        ({"data": {"cutoffs": [5, 3]}}, r"cutoffs must increase .* got \[5, 3\]"),
        ({"data": {"cutoffs": [3, 500]}}, r"cutoffs must .* 14, .* got \[3, 500\]"),
        (
            {"data": {"cutoffs": [3, 5, 7]}, "model": {"div_val": 4}},
            "div_val=4 divides d_embed=16 down to width 0 in bin 3",
        ),
        ({"data": {"dataset": "nope"}}, "dataset must be one of .* got 'nope'"),
        ({"data": {"data_path": None}}, "data_path"),
        ({"strategy": "tpus"}, "strategy must be one of auto, .* got 'tpus'"),
        ({"mixed_precision": "fp8"}, "mixed_precision must be one of float32, .* got 'fp8'"),
        ({"train_batch_size": 3000}, "the train split has 4275 tokens: batch_size=3000"),
        ({"eval_batch_size": 200}, "the valid split has 225 tokens: batch_size=200"),
        ({"eval_split": "test", "do_eval": True}, "eval_split must be one of train, valid, got 'test'"),
        ({"warm_start_path": "/no/ckpt-1"}, "no checkpoint at /no/ckpt-1"),
        ({"optimizer": {"optimizer": "sgd"}}, "optimizer must be one of adam, adamw, lamb, got 'sgd'"),
        ({"optimizer": {"weight_decay": 0.1}}, "weight_decay must be .* got 0.1 for adam"),
        ({"optimizer": {"warmup_steps": 12}}, r"warmup_steps must lie in \[0, train_steps=12\), got 12"),
        ({"optimizer": {"clip": 0.0}}, "clip must be positive"),
        ({"tgt_len": 0}, "tgt_len must be at least 1, got 0"),
        ({"steps_per_execution": 5}, "steps_per_execution=5 must divide train_steps=12"),
    ],
)
def test_bad_input_is_one_clear_error(tmp_path, text, changes, message):
    with pytest.raises(ValueError, match=message):
        run(tmp_path, text, **changes)


def test_evaluation_without_a_checkpoint_is_an_error(tmp_path, text):
    with pytest.raises(ValueError, match="run holds no checkpoint"):
        evaluate(tmp_path)
    run(tmp_path, text)
    with pytest.raises(ValueError, match="no checkpoint at /no/ckpt-1"):
        evaluate(tmp_path, eval_ckpt_path="/no/ckpt-1")
    with pytest.raises(ValueError, match="eval_split must be one of train, valid, got 'test'"):
        evaluate(tmp_path, eval_split="test")


def test_a_folder_that_cannot_be_written_to_is_an_error(tmp_path, text):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="model_dir .*file/run cannot be written to"):
        run(tmp_path, text, model_dir=str(tmp_path / "file" / "run"))


def test_a_folder_of_another_configuration_is_refused_and_kept(tmp_path, text):
    run(tmp_path, text)
    config = (tmp_path / "run" / "config.json").read_text()
    with pytest.raises(ValueError, match="model.d_inner: 16 there, 32 now"):
        run(tmp_path, text, model={"d_inner": 32})
    assert (tmp_path / "run" / "config.json").read_text() == config


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"train_batch_size": 8}, "training.train_batch_size: 4 there, 8 now"),
        ({"tgt_len": 4}, "training.tgt_len: 8 there, 4 now"),
        ({"optimizer": {"optimizer": "lamb"}}, "training.optimizer: None there, 'lamb' now"),
    ],
)
def test_a_run_is_not_continued_by_another_training(tmp_path, text, changes, message):
    run(tmp_path, text)
    config = (tmp_path / "run" / "config.json").read_text()
    with pytest.raises(ValueError, match=message):
        run(tmp_path, text, **changes, train_steps=24)
    assert (tmp_path / "run" / "config.json").read_text() == config


@pytest.mark.parametrize("file", ["ckpt-12.index", "ckpt-12.data-00000-of-00001"])
def test_a_damaged_checkpoint_is_one_clear_error(tmp_path, text, file):
    run(tmp_path, text)
    path = tmp_path / "run" / file
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(ValueError, match="run/ckpt-12 cannot be read: "):
        evaluate(tmp_path)


def test_a_checkpoint_of_another_shape_names_the_variable_and_both_shapes(tmp_path, text):
    run(tmp_path, text)
    with pytest.raises(ValueError, match=r"layer_1/kernel is \[16, 16\] in the checkpoint and \[16, 32\] in the model"):
        evaluate(tmp_path, model={"d_inner": 32})


def test_ctrl_c_saves_says_where_and_the_same_command_goes_on(tmp_path, text):
    """As a user: train.py in a process of its own, a signal in the middle of the training."""
    flags = [f"--{name}={value}" for name, value in {**MODEL, **OPTIMIZER}.items()]
    command = [
        sys.executable, "train.py", f"--data_path={text}", f"--model_dir={tmp_path / 'run'}", *flags, "--tgt_len=8",
        "--train_batch_size=4", "--eval_batch_size=2", "--iterations=10", "--save_steps=100000",
    ]  # fmt: skip
    process = subprocess.Popen([*command, "--train_steps=100000"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    lines = iter(process.stdout.readline, "")
    for line in lines:
        if line.startswith("step"):
            break
    process.send_signal(signal.SIGINT)
    rest = "".join(lines)
    assert process.wait(timeout=60) == 130
    step = int(rest.split("interrupted: step ")[1].split()[0])
    assert f"is saved as {tmp_path}/run/ckpt-{step}" in rest
    done = subprocess.run(
        [*command, f"--train_steps={step + 10}"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert f"continuing from {tmp_path}/run/ckpt-{step}" in done.stdout
    assert f"step {step + 10}/{step + 10}" in done.stdout


def test_train_py_prints_errors_in_one_line(text):
    bad = subprocess.run(
        [sys.executable, "train.py", f"--data_path={text}", "--model_dir=/tmp", "--d_model=7"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert bad.returncode == 1
    assert "train.py: d_model must be even (half sines, half cosines), got 7" in bad.stderr
    assert "Traceback" not in bad.stderr
