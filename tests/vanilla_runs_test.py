"""Runs of the vanilla language model: training, resuming, evaluation by a sliding window; the paper's comparison."""

import re
import shutil

import numpy as np
import pytest
from helpers import (
    TEXT,
    TINY_RUN,
    assert_variables_equal,
    log_rows,
    mentions,
    program,
    raises_naming,
    raises_parameter,
    read_checkpoint,
    run_here,
    run_program,
    untimed_rows,
    write_text,
)

import txl_tf
from txl_tf.config import EvaluationConfig, ModelConfig, OptimizerConfig, TrainingConfig, TransformerLMConfig
from txl_tf.convert.original import run_to_tf1
from txl_tf.language.sliding_window import sliding_window_nll
from txl_tf.runs.evaluate import evaluate_run
from txl_tf.runs.folder import RunFolder
from txl_tf.runs.setup import open_corpus
from txl_tf.runs.train import train_run

SIZES = {name: value for name, value in TINY_RUN["model"].items() if name != "mem_len"}
BATCHES = {"eval_batch_size": 2, "max_eval_batch": 10}  # all of one length, so that there is one graph


def train(model_dir, text, model=None, final=None, **training):
    return train_run(
        str(model_dir),
        data={"dataset": "text", "data_path": text},
        model=model or TransformerLMConfig(**SIZES, context_len=16),
        optimizer=OptimizerConfig(**TINY_RUN["optimizer"]),
        training=TrainingConfig(**{**TINY_RUN["training"], **training}),
        final=EvaluationConfig(**BATCHES, **(final or {})),
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vanilla")
    return folder / "run", train(folder / "run", write_text(folder / "text.txt", TEXT))


def test_a_window_longer_than_the_learned_positions_is_refused_before_the_training(tmp_path):
    text, model = (
        write_text(tmp_path / "text.txt", TEXT),
        TransformerLMConfig(**SIZES, context_len=16, pos_embed="learned"),
    )
    with raises_parameter("sliding_window", limit="context_len=16"):
        train(tmp_path / "run", text, model, {"do_eval": True, "sliding_window": 17})
    assert not (tmp_path / "run").exists()


@pytest.mark.ci
def test_a_run_opens_and_evaluates(made):
    folder, results = made
    lm, vocab = txl_tf.load_run(folder)
    assert isinstance(lm, txl_tf.TransformerLM) and lm.context_len == 16 and lm.network.mem_len == 0
    found = evaluate_run(folder, evaluation=EvaluationConfig(**BATCHES))
    assert found["valid"] == pytest.approx(results["valid"], rel=1e-6)
    assert len(log_rows(folder)) == 4


@pytest.mark.slow
def test_a_run_writes(made):
    lm, vocab = txl_tf.load_run(made[0])
    assert lm.generate(vocab.encode("the cat")[None], 20, seed=1).shape == (1, 27)


@pytest.mark.ci
@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.slow), 5])
def test_a_sliding_window_is_what_the_function_gives(made, tmp_path, step):
    folder, _ = made
    path = tmp_path / "nll.txt"
    evaluation = EvaluationConfig(sliding_window=12, sliding_step=step, eval_batch_size=4, token_nll=str(path))
    found = evaluate_run(folder, evaluation=evaluation)["valid"]
    lm, _ = txl_tf.load_run(folder)
    text = open_corpus(RunFolder(folder).read_config()["data"]).splits["valid"]
    nll = sliding_window_nll(lm, text, 12, step=step)
    assert found == pytest.approx(nll.mean(dtype=np.float64), rel=1e-6)
    lines = path.read_text().splitlines()
    assert len(lines) == len(text) - 1
    np.testing.assert_allclose([float(line.split("\t")[1]) for line in lines], nll, atol=1e-6)


@pytest.mark.slow
def test_resuming_gives_the_weights_of_the_uninterrupted_run_whatever_window_ends_it(made, tmp_path, text_file):
    shutil.copytree(made[0], tmp_path / "run")
    whole = read_checkpoint(tmp_path / "run" / "ckpt-12")
    for path in (tmp_path / "run").glob("ckpt-12*"):
        path.unlink()
    found = train(tmp_path / "run", text_file, final={"sliding_window": 12})
    assert_variables_equal(read_checkpoint(tmp_path / "run" / "ckpt-12"), whole)
    assert found["valid"] != pytest.approx(made[1]["valid"], rel=1e-3)
    assert untimed_rows(tmp_path / "run") == untimed_rows(made[0])  # which has the validations by segments alone
    assert RunFolder(tmp_path / "run").find_best()["val_loss"] == RunFolder(made[0]).find_best()["val_loss"]


def test_the_original_program_has_no_vanilla_model(made, tmp_path):
    with raises_naming(ValueError, "transformer_lm"):
        run_to_tf1(made[0], tmp_path / "back")


def test_a_run_of_one_family_does_not_go_on_as_the_other(made, text_file):
    with raises_parameter("model_dir", str(made[0])) as raised:
        train(made[0], text_file, ModelConfig(**SIZES))
    assert mentions(raised.value.differences[0], "family", "'transformer_lm'", "'transformer_xl'")


def test_a_step_longer_than_the_window_is_refused():
    with raises_parameter("sliding_step", 5, limit="sliding_window=4"):
        EvaluationConfig(sliding_window=4, sliding_step=5)


@pytest.mark.slow
def test_the_program(tmp_path, text_file):
    flags = [f"--{name}={value}" for name, value in {**SIZES, **TINY_RUN["training"]}.items()]
    flags += [
        "--model=transformer",
        f"--data_path={text_file}",
        f"--model_dir={tmp_path / 'run'}",
        "--eval_batch_size=2",
        "--untie_r=False",  # as after a flagfile
    ]
    done = run_program("train.py", *flags)
    assert done.returncode == 0, done.stderr
    done = run_program("train.py", *flags, "--clamp_len=5")
    assert done.returncode == 1 and mentions(done.stderr, "clamp_len", "--model=transformer")
    done = run_program("train.py", f"--model_dir={tmp_path / 'run'}", "--do_eval_only", "--sliding_window=8")
    assert mentions(done.stdout, 8, 1) and "valid: loss" in done.stdout, done.stderr
    done = run_program("tools/generate.py", f"--model_dir={tmp_path / 'run'}", "--prompt=the ", "--max_new_tokens=9")
    assert done.stdout.startswith("the "), done.stderr


@pytest.mark.slow
def test_the_comparison_has_its_tables_and_picture(tmp_path, text_file):
    flags = f"--attn_lens=32,64 --n_layer=1 --rounds=1 --train_steps=200 --data_path={text_file}"
    flags += f" --output_dir={tmp_path / 'runs'} --output={tmp_path / 'compare.png'}"
    done = run_program("tools/compare_context.py", *flags.split())
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^\| (32|64) \| [\d.e-]+ \| [\d.e-]+ \| [\d,]+ \|", done.stdout, re.M) == ["32", "64"]
    rows = re.findall(r"^\| (relative|absolute)(, memory)? \| ([\d,]+) \| ([\d.]+) \|", done.stdout, re.M)
    assert len(rows) == 4 and len({parameters for _, _, parameters, _ in rows}) == 1
    assert (tmp_path / "compare.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    "flags, name",
    [
        ("--part=speed --data_path=/nonexistent", "data_path"),
        ("--part=speed --train_steps=200", "train_steps"),
        ("--part=training --n_layer=1", "n_layer"),
        ("--part=training --attn_lens=32", "attn_lens"),
    ],
)
def test_flags_of_the_other_part_of_the_comparison_are_refused(flags, name):
    for tool in program("tools/compare_context.py"):
        with raises_parameter(name):
            run_here(tool, *flags.split())


@pytest.mark.slow
def test_the_comparison_of_positions_has_its_table_and_picture(tmp_path, text_file):
    flags = f"--positions=relative,learned,rotary --train_steps=5 --rounds=1 --data_path={text_file}"
    done = run_program("tools/compare_positions.py", *flags.split(), f"--output={tmp_path / 'positions.png'}")
    assert done.returncode == 0, done.stderr
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith("|")][2:]
    assert [row[0] for row in rows] == ["relative", "learned", "rotary"]
    parameters = [int(row[1].replace(",", "")) for row in rows]
    assert max(parameters) - min(parameters) < 0.01 * max(parameters)
    for row in rows:
        without, with_memory, gain, longer, of_training, of_evaluation = map(float, row[3:])
        assert abs(without - with_memory - gain) < 0.0011 and min(without, longer, of_training, of_evaluation) > 0
    assert (tmp_path / "positions.png").stat().st_size > 10_000
    done = run_program("tools/compare_positions.py", "--positions=absolute")
    assert done.returncode == 1 and "absolute" in done.stderr and "rotary" in done.stderr
