"""Training a run: progress, logs, checkpoints, resuming, Ctrl-C, and one clear error for each kind of bad input."""

import contextlib
import json
import math
import re
import shutil
import signal
import subprocess
import sys
import types

import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    ROOT,
    TEXT,
    TINY_RUN,
    assert_same_run,
    log_rows,
    mentions,
    program,
    raises_naming,
    raises_parameter,
    read_checkpoint,
    run_program,
    steps_of,
    train_run,
    untimed_rows,
    write_text,
)

from txl_programs import program as programs
from txl_tf.config import EvaluationConfig, TrainingConfig
from txl_tf.data.text.batches import choose_bin_capacities
from txl_tf.runs.evaluate import evaluate_run
from txl_tf.runs.families import language_model
from txl_tf.runs.families.language_model import steps_per_call
from txl_tf.runs.folder import RunFolder
from txl_tf.runs.setup import open_corpus, warn_of_one_cluster


def test_a_run_learns_and_leaves_logs_checkpoints_and_vocabulary(run_dir, text_file, capsys):
    results = train_run(run_dir, text_file, training={"train_steps": 60, "iterations": 20, "save_steps": 40})
    printed = capsys.readouterr().out
    rows = log_rows(run_dir)
    assert [int(row["step"]) for row in rows] == [20, 40, 60]
    losses = [float(row["loss"]) for row in rows]
    assert losses[0] > losses[1] > losses[2] and losses[0] > 1.1 * losses[2]
    assert rows[0]["val_loss"] == "NA"
    assert float(rows[-1]["val_loss"]) == results["valid"]
    assert float(rows[-1]["val_bpc"]) == pytest.approx(results["valid"] / math.log(2))
    for row in rows:
        assert float(row["bpc"]) == pytest.approx(float(row["loss"]) / math.log(2))
    assert float(rows[-1]["learning_rate"]) == pytest.approx(
        1e-2 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 57 / 58)))
    )
    assert results["valid"] < float(rows[1]["val_loss"])
    assert mentions(printed, f"{results['valid']:.6f}", f"{results['valid'] / math.log(2):.4f}")
    assert printed.count("tokens/s") == 4 and str(run_dir) in printed
    assert (
        "bits per byte" in printed and "ppl" not in printed
    )  # a perplexity of words is noise where characters are read

    files = {path.name for path in run_dir.iterdir()}
    assert files >= {"config.json", "vocab.txt", "log.csv", "ckpt-40.index", "ckpt-60.index"}
    config = json.loads((run_dir / "config.json").read_text())
    assert config["model"]["n_token"] == len((run_dir / "vocab.txt").read_text().splitlines())
    assert list((run_dir / "train").glob("events.*"))


@pytest.mark.slow
def test_words_report_perplexity(averaged):
    run_dir, _, _, result = averaged
    row = log_rows(run_dir)[0]
    assert float(row["val_ppl"]) == pytest.approx(math.exp(float(row["val_loss"])))
    assert 0 < result < math.log(20)


def test_resuming_gives_the_weights_of_the_uninterrupted_run(run_dir, trained_run, text_file, capsys):
    """Weights, optimizer, memory, place in the text and dropout: bit for bit."""
    shutil.copytree(trained_run[0], run_dir)
    for path in run_dir.glob("ckpt-12*"):
        path.unlink()
    tf.compat.v1.train.update_checkpoint_state(str(run_dir), str(run_dir / "ckpt-6"))
    train_run(run_dir, text_file)
    assert mentions(capsys.readouterr().out, f"{run_dir}/ckpt-6")
    assert_same_run(run_dir, trained_run[0], 12)


@pytest.mark.slow
def test_a_finished_run_is_evaluated_and_not_trained(run_dir, text_file, capsys):
    first = train_run(run_dir, text_file)
    assert steps_of(capsys.readouterr().out)
    assert train_run(run_dir, text_file) == first
    assert not steps_of(capsys.readouterr().out)


@pytest.fixture(scope="module")
def averaged(tmp_path_factory):
    """A run of words whose weights are averaged: its folder, its text, what it was trained with, and its result."""
    folder = tmp_path_factory.mktemp("averaged")
    text = write_text(folder / "text.txt", TEXT)
    options = {
        "data": {"level": "word", "cutoffs": [3, 6]},
        "model": {"div_val": 2, "dropout": 0.0, "dropatt": 0.0},
        "optimizer": {"ema": 0.5, "optimizer": "lamb", "weight_decay": 0.01},
        "training": {"train_steps": 6, "iterations": 3, "save_steps": 3},
        "evaluation": {"max_eval_batch": 3},  # all of one length, so that there is one graph
    }
    return folder / "run", text, options, train_run(folder / "run", text, **options)["valid"]


@pytest.mark.slow
def test_the_average_of_the_weights_is_evaluated_and_training_goes_on_from_the_weights_themselves(averaged, capsys):
    run_dir, text, options, result = averaged
    batches = options["evaluation"]
    of_ema = EvaluationConfig(eval_ckpt_path=str(run_dir / "ema" / "ckpt-6"), **batches)
    assert evaluate_run(run_dir, evaluation=EvaluationConfig(**batches))["valid"] != result
    assert evaluate_run(run_dir, evaluation=of_ema)["valid"] == result
    assert train_run(run_dir, text, **options)["valid"] == result  # evaluated again, and not trained
    assert not steps_of(capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "lamb", "muon"])
def test_other_optimizers_train(run_dir, text_file, optimizer):
    steps = {"train_steps": 60, "iterations": 20, "save_steps": 40}
    train_run(run_dir, text_file, optimizer={"optimizer": optimizer, "weight_decay": 0.01}, training=steps)
    losses = [float(row["loss"]) for row in log_rows(run_dir)]
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_warm_start_takes_the_weights_and_a_fresh_optimizer(trained_run, run_dir, text_file):
    train_run(
        run_dir,
        text_file,
        model={"dropout": 0.0, "dropatt": 0.0},
        training={"warm_start_path": str(trained_run[0] / "ckpt-12"), "train_steps": 1},
        optimizer={"warmup_steps": 0, "learning_rate": 1e-9},
        evaluation={"max_eval_batch": 3},
    )
    before = read_checkpoint(trained_run[0] / "ckpt-12")
    after = read_checkpoint(run_dir / "ckpt-1")
    moved = [name for name in before if name.startswith("weights/")]
    assert len(moved) > 10
    for name in moved:
        np.testing.assert_allclose(after[name], before[name], atol=1e-7, err_msg=name)


@pytest.mark.parametrize(
    "changes, facts",
    [
        ({"model": {"d_model": 15}}, ["d_model", 15]),
        ({"model": {"dropout": 1.0}}, ["dropout", "[0, 1)", 1.0]),
        ({"model": {"n_layer": 0}}, ["n_layer", 1, 0]),
        ({"model": {"mem_len": -1}}, ["mem_len", 0, -1]),
        ({"model": {"init": "xavier"}}, ["init", "'xavier'"]),
        ({"data": {"cutoffs": [5, 3]}}, ["cutoffs", "[5, 3]"]),
        ({"data": {"cutoffs": [3, 500]}}, ["cutoffs", 14, "[3, 500]"]),
        (
            {"data": {"cutoffs": [3, 5, 7]}, "model": {"div_val": 4}},
            ["div_val=4", "d_embed=16", "bin 3"],
        ),
        ({"data": {"dataset": "nope"}}, ["dataset", "'nope'"]),
        ({"data": {"data_path": None}}, ["data_path"]),
        ({"machine": {"strategy": "tpus"}}, ["strategy", "auto", "'tpus'"]),
        ({"machine": {"mixed_precision": "fp8"}}, ["mixed_precision", "float32", "'fp8'"]),
        (
            {"machine": {"matmul_precision": "bfloat16"}, "training": {"jit_compile": True}},
            ["matmul_precision=bfloat16", "jit_compile"],
        ),
        ({"training": {"train_batch_size": 3000}}, ["train", 4275, "train_batch_size=3000"]),
        ({"evaluation": {"eval_batch_size": 200}}, ["valid", 225, "eval_batch_size=200"]),
        ({"evaluation": {"eval_split": "test", "do_eval": True}}, ["eval_split", "train, valid", "'test'"]),
        ({"evaluation": {"eval_split": "test"}}, ["eval_split", "do_eval", "'test'"]),
        ({"evaluation": {"eval_path": "other.txt"}}, ["eval_path", "other.txt"]),
        ({"evaluation": {"eval_ckpt_path": "best"}}, ["eval_ckpt_path", "best"]),
        ({"training": {"warm_start_path": "/no/ckpt-1"}}, ["/no/ckpt-1"]),
        ({"optimizer": {"optimizer": "adagrad"}}, ["optimizer", "adam, adamw, lamb, sgd, muon", "'adagrad'"]),
        ({"optimizer": {"weight_decay": 0.1}}, ["weight_decay", 0.1, "adam"]),
        ({"optimizer": {"warmup_steps": 12}}, ["warmup_steps", "train_steps=12", 12]),
        ({"optimizer": {"clip": 0.0}}, ["clip", 0.0]),
        ({"training": {"tgt_len": 0}}, ["tgt_len", 1, 0]),
        ({"training": {"steps_per_execution": 5}}, ["steps_per_execution=5", "train_steps=12"]),
    ],
)
def test_bad_input_is_one_clear_error(run_dir, text_file, changes, facts):
    with raises_naming(ValueError, *facts):
        train_run(run_dir, text_file, **changes)


def test_a_training_writes_no_vocabulary_over_a_text(run_dir):
    run_dir.mkdir()
    path = run_dir / "vocab.txt"
    path.write_text(TEXT)
    with raises_parameter(str(path), allowed="a file of the same content, or no file"):
        train_run(run_dir, str(path))
    assert path.read_text() == TEXT and not (run_dir / "config.json").exists()


@pytest.mark.parametrize(
    "model, warned",
    [
        ({"div_val": 2, "proj_same_dim": False}, ["div_val=2", "proj_same_dim=False"]),
        ({"proj_share_all_but_first": True}, ["proj_share_all_but_first=True"]),
        ({"div_val": 2, "cutoffs": [9]}, []),
        ({"div_val": 1, "cutoffs": ()}, []),
    ],
)
def test_settings_of_clusters_without_cutoffs_are_a_warning(caplog, model, warned):
    warn_of_one_cluster(model)
    assert len(caplog.messages) == bool(warned)
    assert not warned or mentions(caplog.messages, *warned)


def test_a_training_writes_no_nll_over_its_text_and_says_how_a_text_is_given(run_dir, text_file):
    with raises_parameter("token_nll", str(text_file), "another file than data_path"):
        train_run(run_dir, text_file, evaluation={"token_nll": str(text_file)})
    for data in ({}, {"cutoffs": [], "documents": False}, {"data_path": str(text_file)}):
        with raises_parameter("data", data):
            open_corpus(data)


@pytest.mark.parametrize(
    "ends, expected",
    [
        ((400000, 200, 4000, 0), 20),  # enwik8_base from its start
        ((400000, 200, 4000, 130), 10),  # stopped at step 130 by another number of steps a call
        ((12, 3, 6, 0), 3),
        ((19150, 383, 383, 0), 1),
    ],
)
def test_calls_take_as_many_steps_as_divide_all_ends(ends, expected):
    assert steps_per_call(20, *ends) == expected


def run_of_text(text, **training):
    """What a run of a language model knows of its text, without a model."""
    run = object.__new__(language_model.LanguageModelRun)

    def decode(ids):
        return "".join("ab\x1bd"[i] for i in ids)

    vocab = types.SimpleNamespace(decode=decode, level="char", eos=None, ids={})
    run.corpus = types.SimpleNamespace(splits={"train": text, "valid": text}, vocab=vocab)
    run.training = TrainingConfig(**training)
    run.strategy = tf.distribute.get_strategy()
    return run


def test_clusters_get_room_for_the_rows_of_a_replica_and_of_a_part_of_the_batch():
    text = np.random.default_rng(0).integers(0, 30, 4000).astype(np.int32)
    run = run_of_text(text, train_batch_size=8, tgt_len=16, gradient_accumulation_steps=2)
    assert run._bin_capacities([10, 20]) == choose_bin_capacities(text, 4, 16, [10, 20])
    assert run._bin_capacities([10, 20]) != choose_bin_capacities(text, 8, 16, [10, 20])
    assert run._bin_capacities([]) == []


def test_a_sample_goes_on_from_the_validation_text_and_moves_no_cursor(caplog):
    run, shown = run_of_text(np.zeros(100, np.int32), sample_tokens=4, seed=7), []
    prompt = np.zeros([1, language_model._PROMPT], np.int32)

    def generate(tokens, number, temperature, seed):
        assert (tokens == prompt).all() and tokens.shape == prompt.shape and (number, seed) == (4, 7)
        return np.concatenate([tokens, [[1, 2, 3, 0]]], 1)

    run.model, run.show_text = types.SimpleNamespace(generate=generate), lambda *found: shown.append(found)
    assert run.samples
    with caplog.at_level("INFO", "txl_tf"):
        run.sample()
    title = f"a sample at temperature 0.8, after {'a' * prompt.size!r}:"
    assert [record.message for record in caplog.records] == [title, r"b\x1bda"]
    assert shown == [("sample", f"{title}\n" + r"b\x1bda")]


@pytest.mark.parametrize(
    "text, expected",
    [
        ("ow of a table\n\nNotes:\n\n1. one\n2. two\n", "Notes:\n\n1. one\n"),  # whole lines that begin a paragraph
        ("the end\nof a line\nand more\n", "of a line\n"),  # no paragraph
        ("ending\na long line that goes on and on", "a long lin"),  # no end of a line near
        ("no line at all", "no line at"),
        ("short", "short"),
        ("one line\n", "one line\n"),
    ],
)
def test_a_sample_begins_at_the_beginning_of_a_line(text, expected):
    tokens = np.array([ord(c) for c in text], np.int32)
    prompt = language_model.sample_prompt(tokens, ord("\n"), least=10)
    assert "".join(map(chr, prompt)) == expected
    np.testing.assert_array_equal(language_model.sample_prompt(tokens, None, least=10), tokens[:10])


@pytest.mark.ci
def test_the_last_line_of_a_training_names_the_best_step(run_dir, text_file, capsys):
    """With such a rate, nearly nothing changes, so that soon no validation is better than an earlier one."""
    options = {
        "training": {"train_steps": 40, "iterations": 4, "save_steps": 4, "patience": 8},
        "optimizer": {"learning_rate": 1e-9, "warmup_steps": 0},
        "evaluation": {"max_eval_batch": 3},  # all of one length, so that there is one graph
    }
    train_run(run_dir, text_file, **options)
    printed = capsys.readouterr().out
    best = RunFolder(run_dir).find_best()
    last = int(log_rows(run_dir)[-1]["step"])
    assert last == best["step"] + 8 < 40 and mentions(printed, "patience=8")
    assert mentions(printed.splitlines()[-1], best["step"])
    assert "--ckpt_path=best" in printed.splitlines()[-1]
    train_run(run_dir, text_file, **options)
    assert mentions(capsys.readouterr().out, "patience=8")


@pytest.mark.slow
def test_on_a_tpu_calls_of_several_steps_end_at_logs_and_checkpoints(tmp_path, text_file, monkeypatch):
    """Every strategy counts as a TPU's here."""
    steps = {"train_steps": 12, "iterations": 6, "save_steps": 4}
    expected = train_run(tmp_path / "plain", text_file, training={**steps, "static_shapes": True})
    taken = []
    monkeypatch.setattr(tf.distribute, "TPUStrategy", tf.distribute.Strategy)
    monkeypatch.setattr(
        language_model, "steps_per_call", lambda *ends: taken.append(steps_per_call(*ends)) or taken[-1]
    )
    assert train_run(tmp_path / "tpu", text_file, training=steps) == expected
    assert taken == [2]
    evaluated = evaluate_run(tmp_path / "tpu", evaluation=EvaluationConfig(eval_split="valid"))
    assert evaluated == {"valid": pytest.approx(expected["valid"], rel=1e-6)}
    rows = [untimed_rows(tmp_path / name) for name in ("plain", "tpu")]
    assert rows[0] == rows[1] and [row["step"] for row in rows[0]] == ["6", "12"]
    names = [sorted(path.name for path in (tmp_path / name).glob("ckpt-*")) for name in ("plain", "tpu")]
    assert names[0] == names[1]
    assert {int(name.split("-")[1].split(".")[0]) for name in names[0]} == {4, 8, 12}


def test_a_folder_that_cannot_be_written_to_is_an_error(tmp_path, text_file):
    (tmp_path / "file").write_text("")
    with raises_naming(OSError, "model_dir", "file/run"):
        train_run(tmp_path / "file" / "run", text_file)


def test_a_folder_of_another_configuration_is_refused_and_kept(trained_run, text_file):
    run_dir, _ = trained_run
    config = (run_dir / "config.json").read_text()
    with raises_parameter("model_dir", str(run_dir)) as raised:
        train_run(run_dir, text_file, model={"d_inner": 32})
    assert len(raised.value.differences) == 1 and mentions(raised.value.differences, "model.d_inner", 16, 32)
    assert (run_dir / "config.json").read_text() == config


@pytest.mark.parametrize(
    "changes, facts",
    [
        ({"training": {"train_batch_size": 8}}, ["training.train_batch_size", 4, 8]),
        ({"training": {"tgt_len": 4}}, ["training.tgt_len", 8, 4]),
        ({"optimizer": {"optimizer": "lamb"}}, ["training.optimizer", "'adam'", "'lamb'"]),
    ],
)
def test_a_run_is_not_continued_by_another_training(trained_run, text_file, changes, facts):
    run_dir, _ = trained_run
    config = (run_dir / "config.json").read_text()
    with raises_naming(ValueError, *facts):
        train_run(run_dir, text_file, **{**changes, "training": {"train_steps": 24, **changes.get("training", {})}})
    assert (run_dir / "config.json").read_text() == config


@pytest.mark.slow
def test_ctrl_c_saves_says_where_and_the_same_command_goes_on(run_dir, text_file):
    """As a user: train.py in a process of its own, a signal in the middle of the training."""
    options = {name: value for group in TINY_RUN.values() for name, value in group.items()}
    options |= {"data_path": text_file, "model_dir": run_dir, "iterations": 10, "save_steps": 100000}
    flags = [f"--{name}={value}" for name, value in options.items() if name != "train_steps"]
    command = [sys.executable, "train.py", *flags, "--train_steps=100000"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    lines = iter(process.stdout.readline, "")
    for line in lines:
        if line.startswith("step"):
            break
    process.send_signal(signal.SIGINT)
    rest = "".join(lines)
    assert process.wait(timeout=60) == 130
    step = int(re.search(rf"{run_dir}/ckpt-(\d+)", rest)[1])
    done = run_program("train.py", *flags, f"--train_steps={step + 10}")
    assert done.returncode == 0, done.stderr
    assert mentions(done.stdout, f"{run_dir}/ckpt-{step}")
    assert f"step {step + 10}/{step + 10}" in done.stdout


MESSAGE = "train.py: d_model must be even (half sines, half cosines), got 7"


def test_an_error_of_train_py_is_one_line(text_file):
    with contextlib.closing(program("train.py")) as loaded:
        train_py = next(loaded)
        train_py.FLAGS(["train.py", f"--data_path={text_file}", "--model_dir=/tmp", "--d_model=7"])
        with pytest.raises(SystemExit, match=re.escape(MESSAGE)):
            programs._run(train_py.main, ["train.py"])


@pytest.mark.slow
def test_train_py_prints_errors_in_one_line(text_file):
    bad = run_program("train.py", f"--data_path={text_file}", "--model_dir=/tmp", "--d_model=7")
    assert bad.returncode == 1
    assert MESSAGE in bad.stderr
    assert "Traceback" not in bad.stderr


@pytest.mark.parametrize("flags, seed", [([], 7), (["--seed=3"], 7), (["--dataset=text"], None)])
def test_a_run_of_lm1b_keeps_the_seed_of_its_text(flags, seed):
    """The program has no flag for it, because `--seed` is the seed of the weights."""
    recorded = {"dataset": "lm1b", "data_path": "folder", "seed": 7}
    for train in program("train.py"):
        train.FLAGS(["train.py", "--model_dir=run", *flags])
        assert train.data_arguments(recorded).get("seed") == seed
        assert "seed" not in train.data_arguments({"dataset": "lm1b", "data_path": "folder"})
