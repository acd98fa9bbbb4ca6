"""Evaluation of a run: of which checkpoint, text and settings, and one clear error for each kind of bad input."""

import shutil
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers import full_disk, mentions, program, raises_naming, raises_parameter, run_here

import txl_tf
from txl_tf.config import EvaluationConfig
from txl_tf.data.vocabulary import unescape
from txl_tf.runs import evaluate as evaluation_module
from txl_tf.runs.evaluate import Evaluator, evaluate_run
from txl_tf.runs.folder import RunFolder
from txl_tf.runs.setup import open_corpus_of_run
from txl_tf.runs.weights import CheckpointGone, MisfitError


@pytest.fixture
def trained(trained_run):
    return trained_run[0]


def evaluate(model_dir, data=None, model=None, **evaluation):
    return evaluate_run(model_dir, data=data, model=model, evaluation=EvaluationConfig(**evaluation))


@pytest.mark.ci
def test_evaluation_takes_the_checkpoint_and_settings_it_is_told(trained_run):
    trained, final = trained_run[0], trained_run[1]["valid"]
    before = evaluate(trained, eval_ckpt_path=str(trained / "ckpt-6"), max_eval_batch=10)["valid"]
    assert before > 1.01 * final
    told = {"tgt_len": 3, "eval_batch_size": 4, "max_eval_batch": 10, "eval_split": "train"}
    model = {"mem_len": 20, "same_length": True, "clamp_len": 9}
    lm, _ = txl_tf.load_run(trained, **model)
    mems, nll = None, []
    for tokens, labels in txl_tf.segments(open_corpus_of_run(RunFolder(trained)).splits["train"], 4, 3).take(10):
        found, mems = lm.score(tokens, labels, mems)
        nll.append(found)
    assert evaluate(trained, model=model, **told) == {"train": pytest.approx(np.mean(nll), rel=1e-5)}


@pytest.mark.slow
def test_evaluation_gives_what_the_training_gave_and_other_settings_do_not(trained_run):
    trained, final = trained_run[0], trained_run[1]["valid"]
    assert evaluate(trained)["valid"] == final
    assert evaluate(trained, eval_ckpt_path=str(trained / "ckpt-6"))["valid"] > final
    other = evaluate(trained, model={"mem_len": 20, "same_length": True, "clamp_len": 9}, tgt_len=3)
    assert other["valid"] == pytest.approx(final, rel=0.05) and other["valid"] != final
    assert set(evaluate(trained, eval_split="train", max_eval_batch=3)) == {"train"}


@pytest.mark.parametrize("n", [13, 4])
def test_the_bar_of_a_sliding_window_counts_every_token(small_lm, capsys, n):
    corpus: Any = SimpleNamespace(splits={"test": np.arange(n)}, by_character=True)
    settings = EvaluationConfig(sliding_window=5, sliding_step=2, tgt_len=2, eval_batch_size=2)
    tokens, nll = Evaluator(corpus, settings)._slide(small_lm(n_layer=1), "test", verbose=1)
    assert len(tokens) == len(nll) == n - 1 and f"{n - 1}/{n - 1}" in capsys.readouterr().out


def test_evaluation_of_a_file_uses_the_vocabulary_of_the_run_and_writes_every_token(trained, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("so the cat and the mat\n")
    tokens_file = tmp_path / "tokens.tsv"
    arguments = {"eval_path": str(other), "tgt_len": 5, "max_eval_batch": 4}
    mean = evaluate(trained, **arguments, token_nll=str(tokens_file))[str(other)]
    assert mean == pytest.approx(evaluate(trained, **arguments)[str(other)], rel=1e-6)
    lines = [line.split("\t") for line in tokens_file.read_text().splitlines()]
    predicted = "o the cat " + "nd the mat"  # of two rows of 11 tokens all but the first
    assert "".join(unescape(token) for token, _ in lines) == predicted
    assert np.mean([float(nll) for _, nll in lines]) == pytest.approx(mean, abs=1e-5)


def test_the_text_that_is_evaluated_is_not_written_over(trained, tmp_path):
    other, link = tmp_path / "other.txt", tmp_path / "link.txt"
    other.write_text("so the cat and the mat\n")
    link.symlink_to(other)
    for told in ({"eval_path": str(other)}, {"data": {"dataset": "text", "data_path": [str(other)]}}):
        name = {"data": "data_path"}.get(*told, "eval_path")
        with raises_parameter("token_nll", str(link), f"another file than {name}"):
            evaluate(trained, token_nll=str(link), **told)
    prepared = {"data": {"data_dir": str(tmp_path)}}
    for name, told in (("train.npy", prepared), ("vocab.txt", prepared), ("corpus-info.json", prepared)):
        with raises_parameter("token_nll", str(tmp_path / name), "another file than one of data_dir"):
            evaluate(trained, token_nll=str(tmp_path / name), **told)
    data = {"dataset": "text", "data_path": "no", "vocab_path": str(other)}
    with raises_parameter("token_nll", str(other), "another file than vocab_path"):
        evaluate(trained, token_nll=str(other), data=data)


def test_a_file_that_is_too_short_is_named_with_the_size_of_the_batches(trained, tmp_path):
    (tmp_path / "short.txt").write_text("so")
    with raises_parameter(f"{tmp_path}/short.txt", 2):
        evaluate(trained, eval_path=str(tmp_path / "short.txt"))


def test_evaluation_refuses_a_corpus_of_another_vocabulary(trained):
    with raises_parameter("vocab"):
        evaluate(trained, data={"dataset": "pydoc"})


def test_evaluation_without_a_checkpoint_is_an_error(trained, run_dir):
    with raises_parameter("model_dir", str(run_dir), "a folder with a checkpoint"):
        evaluate(run_dir)
    with raises_parameter("checkpoint", "/no/ckpt-1", error=CheckpointGone):
        evaluate(trained, eval_ckpt_path="/no/ckpt-1")
    with raises_parameter("eval_split", "test", ["train", "valid"]):
        evaluate(trained, eval_split="test")


@pytest.mark.parametrize("file", ["ckpt-12.index", "ckpt-12.data-00000-of-00001"])
def test_a_damaged_checkpoint_is_one_clear_error(trained, run_dir, file):
    shutil.copytree(trained, run_dir)
    path = run_dir / file
    path.write_bytes(path.read_bytes()[:20])
    with raises_parameter("eval_ckpt_path", str(run_dir / "ckpt-12")):
        evaluate(run_dir)


def test_a_checkpoint_of_another_shape_names_the_variable_and_both_shapes(trained):
    with raises_parameter("checkpoint", error=MisfitError) as raised:
        evaluate(trained, model={"d_inner": 32})
    assert any(mentions(line, "layer_1/kernel", "[16, 16]", "[16, 32]") for line in raised.value.differences)


def test_token_nll_on_a_full_disk_names_the_file_and_leaves_what_was_there(trained, tmp_path):
    path = tmp_path / "tokens.tsv"
    path.write_text("before")
    with full_disk(500), raises_naming(OSError, "tokens.tsv"):
        evaluate(trained, token_nll=str(path))
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]


def test_token_nll_where_nothing_can_be_written_is_refused_at_once(trained, tmp_path):
    with raises_naming(OSError, "none/tokens.tsv"):
        evaluate(trained, token_nll=str(tmp_path / "none" / "tokens.tsv"), eval_split="nothing so far")
    with raises_naming(OSError, tmp_path):
        evaluate(trained, token_nll=str(tmp_path), eval_split="nothing so far")


def test_a_file_for_token_nll_is_not_compressed(trained, tmp_path):
    with raises_parameter("token_nll", str(tmp_path / "nll.tsv.gz")):
        evaluate(trained, token_nll=str(tmp_path / "nll.tsv.gz"))


# ------------------------------------------------------------------------------- flags of train.py in an evaluation


@pytest.fixture
def evaluated(trained, monkeypatch):
    """Runs `train.py --do_eval_only` with flags, without the evaluation; returns the arguments of `evaluate_run`."""

    def settings(*flags):
        got = {}
        monkeypatch.setattr(evaluation_module, "evaluate_run", lambda folder, **settings: got.update(settings))
        for tool in program("train.py"):
            run_here(tool, f"--model_dir={trained}", "--do_eval_only", *flags)
        return got

    return settings


@pytest.mark.parametrize(
    "flags, name",
    [
        ("--valid_fraction=0.5", "valid_fraction"),
        ("--min_freq=100", "min_freq"),
        ("--level=word", "level"),
        ("--lower_case", "lower_case"),
        ("--documents", "documents"),
        ("--raw_text", "raw_text"),
        ("--cutoffs=5,9", "cutoffs"),
        ("--vocab_path=nowhere", "vocab_path"),
        ("--eval_path=other.txt --level=word", "level"),
        ("--data_path=other.txt --eval_path=other.txt --lower_case", "lower_case"),
        ("--init_from=nowhere", "init_from"),
        ("--warm_start_path=nowhere", "warm_start_path"),
        ("--train_steps=5 --save_steps=-3", "train_steps"),
        ("--patience=5", "patience"),
        ("--ema=0.5", "ema"),
        ("--preset=tiny", "preset"),
        ("--dropout=0.5", "dropout"),
        ("--label_smoothing=0.3", "label_smoothing"),
        ("--init=uniform", "init"),
        ("--lora_alpha=3", "lora_alpha"),
        ("--sliding_step=3", "sliding_step"),
        ("--sliding_window=8 --tgt_len=4", "tgt_len"),
        ("--eval_path=other.txt --eval_split=test", "eval_split"),
    ],
)
def test_a_flag_without_effect_on_an_evaluation_is_refused(evaluated, flags, name):
    with raises_parameter(name):
        evaluated(*flags.split())


def test_the_command_of_the_training_evaluates(evaluated, trained, tmp_path, monkeypatch):
    training = RunFolder(trained).read_config()["training"]
    of_run = [f"--{name}={training[name]}" for name in ("train_steps", "save_steps", "learning_rate", "seed")]
    assert evaluated("--level=char", *of_run)["data"] == {}
    assert evaluated("--dropout=0", "--mem_len=9")["model"] == {"dropout": 0.0, "mem_len": 9}
    with_text = evaluated("--data_path=other.txt", "--level=word", "--train_steps=99", "--preset=tiny", "--ema=0.5")
    assert (with_text["data"]["data_path"], with_text["data"]["level"]) == (["other.txt"], "word")
    sliding = evaluated("--sliding_window=8", "--tgt_len=4", "--max_eval_batch=3")["evaluation"]
    assert (sliding.sliding_window, sliding.tgt_len, sliding.max_eval_batch) == (8, 4, 3)
    (tmp_path / "recipe.cfg").write_text("--train_steps=99\n--eval_split=test\n")
    monkeypatch.setattr("sys.argv", ["train.py", f"--flagfile={tmp_path / 'recipe.cfg'}"])
    assert evaluated(f"--flagfile={tmp_path / 'recipe.cfg'}")["evaluation"].eval_split == "test"
    of_user = {
        "valid_fraction": "--eval_path=other.txt --valid_fraction=0.4",
        "documents": "--nodocuments",
        "save_steps": "--save_steps 3",
    }
    for name, line in of_user.items():
        words = [f"--flagfile={tmp_path / 'recipe.cfg'}", *line.split()]
        monkeypatch.setattr("sys.argv", ["train.py", *words])
        with raises_parameter(name):
            evaluated(*words)
    with raises_parameter("model_dir", str(trained)):
        evaluated("--data_path=other.txt", "--init_from=nowhere")
