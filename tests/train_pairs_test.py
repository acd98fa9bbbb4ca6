"""Runs of an encoder-decoder: training, resuming, translating, serving; one clear error for each kind of bad input."""

import copy
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    ANY,
    assert_same_run,
    at_step,
    converse,
    log_rows,
    mentions,
    program,
    raises_naming,
    raises_parameter,
    read_checkpoint,
    run_here,
    run_program,
    terminate,
    write_text,
)

import txl_tf
from txl_tf.config import (
    MachineConfig,
    OptimizerConfig,
    PairsConfig,
    PairsTrainingConfig,
    SearchConfig,
    TransformerConfig,
)
from txl_tf.errors import ParameterError
from txl_tf.runs.callbacks import StopOnSignal
from txl_tf.runs.checkpoints import average_checkpoints
from txl_tf.runs.ensemble import members_of
from txl_tf.runs.families.encoder_decoder import PairsRun
from txl_tf.runs.folder import RunFolder
from txl_tf.runs.train import train_run
from txl_tf.runs.weights import weights_by_name
from txl_tf.serving.tables import GraphTokenizer
from txl_tf.serving.translation import TranslationSignatures
from txl_tf.vanilla.translator import Translator

MODEL = {"num_layers": 1, "d_model": 16, "num_heads": 2, "dff": 16, "max_len": 20, "norm_first": True}
TRAINING = {"train_steps": 12, "iterations": 3, "save_steps": 6, "batch_size": 16, "eval_sources": 20}


@pytest.fixture(scope="module")
def pairs_file(tmp_path_factory):
    """Words of a, b and c, and the same in capitals, backwards, parted by spaces."""
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(list("abc"), rng.integers(1, 7))) for _ in range(300)]
    lines = "".join(f"{word}\t{' '.join(word[::-1].upper())}\n" for word in dict.fromkeys(words))
    return write_text(tmp_path_factory.mktemp("pairs") / "pairs.tsv", lines)


def train(model_dir, path, model=(), training=(), data=(), optimizer=(), **options):
    data = {"train_path": path, "target_level": "word", **dict(data)}
    return train_run(
        str(model_dir),
        data=PairsConfig(**({} if "valid_path" in data else {"valid_fraction": 0.2}), **data),
        model=TransformerConfig(**{**MODEL, **dict(model)}),
        optimizer=OptimizerConfig(**{"learning_rate": 1e-2, "warmup_steps": 2, "clip": 1.0, **dict(optimizer)}),
        training=PairsTrainingConfig(**{**TRAINING, **dict(training)}),
        **options,
    )


@pytest.mark.slow
def test_the_evaluation_of_a_training_is_that_of_its_files_and_no_unknown_symbol_is_right(tmp_path):
    """Nearly every target is a name that occurs once: the model learns to write `<unk>`, which is nobody's name."""
    lines = "".join(f"{'red' * (1 + i % 3)}{chr(0xE0 + i % 9)}\tname{i}\n" for i in range(60))
    path = write_text(tmp_path / "pairs.tsv", lines)
    train_path = write_text(tmp_path / "train.tsv", lines + "a\ttwice\n" * 2)
    data = {"valid_path": path, "min_freq": 2}
    found = train(tmp_path / "run", train_path, training={**LEARNING, "eval_sources": -1}, data=data)["valid"]
    assert (found["lines"], found["symbols"]) == (1.0, 1.0)
    done = run_program("tools/translate.py", f"--model_dir={tmp_path / 'run'}", f"--pairs={path}")
    assert mentions(done.stderr, "100.00%", "9")


@pytest.mark.slow
def test_capitals_that_the_model_cannot_write_are_not_wrong(tmp_path):
    path = write_text(tmp_path / "pairs.tsv", "".join(f"{c}B\t{c}\n{c}b\t{c.lower()}\n" for c in "ACDE"))
    data = {"valid_path": path, "share_vocab": True, "lower_case": True, "target_level": "char"}
    found = train(tmp_path / "run", path, training={**LEARNING, "train_steps": 150}, data=data)["valid"]
    done = run_program("tools/translate.py", f"--model_dir={tmp_path / 'run'}", f"--pairs={path}")
    assert found["lines"] == 0.0 and mentions(done.stderr, "0.00%", "4")


LEARNING = {"train_steps": 60, "iterations": 20, "save_steps": 25, "max_to_keep": 9}


@pytest.fixture(scope="module")
def made(tmp_path_factory, pairs_file):
    """The folder of a run, and what its training returned."""
    folder = tmp_path_factory.mktemp("made") / "run"
    return folder, train(folder, pairs_file, training=LEARNING)


def test_a_run_learns_and_leaves_logs_checkpoints_and_vocabularies(made):
    folder, results = made
    rows = log_rows(folder)
    assert [int(row["step"]) for row in rows] == [20, 40, 60]
    losses = [float(row["loss"]) for row in rows]  # 1.6 to 1.1; in other seeds, 1.4 to 1.0
    assert losses[0] > 1.1 * losses[2] and losses[0] > 1.1 * results["valid"]["loss"]
    assert float(rows[0]["accuracy"]) < float(rows[2]["accuracy"]) < 1
    assert float(rows[1]["val_loss"]) > 0 and [row["val_accuracy"] == "NA" for row in rows] == [True, False, False]
    assert float(rows[2]["val_loss"]) == results["valid"]["loss"]
    assert float(rows[1]["val_ppl"]) == pytest.approx(np.exp(float(rows[1]["val_loss"])))
    assert 0 <= results["valid"]["symbols"] and 0 <= results["valid"]["lines"] <= 1
    assert {path.name for path in folder.iterdir()} >= {
        "source_vocab.txt",
        "target_vocab.txt",
        "ckpt-60.index",
        "best",
    }
    assert (folder / "target_vocab.txt").read_text().splitlines()[:3] == ["<pad>", "<s>", "</s>"]
    assert json.loads((folder / "config.json").read_text())["family"] == "transformer"


@pytest.mark.slow
def test_a_longer_run_learns_more(tmp_path, pairs_file):
    training = {"train_steps": 200, "iterations": 50, "save_steps": 50}
    results = train(tmp_path / "run", pairs_file, training=training)
    rows = log_rows(tmp_path / "run")
    # 1.8 on one processor, above 2 on another
    assert float(rows[0]["loss"]) > 1.3 * float(rows[3]["loss"]) and float(rows[3]["accuracy"]) > 0.4
    assert float(rows[0]["val_loss"]) > results["valid"]["loss"] and results["valid"]["lines"] < 1


@pytest.mark.slow
def test_resuming_gives_the_weights_of_the_uninterrupted_run(made, pairs_file, tmp_path):
    """Weights, optimizer, place in the pairs and dropout: bit for bit, from the middle of a window, too."""
    folder, results = made
    run = shutil.copytree(folder, tmp_path / "run")
    for path in run.glob("ckpt-60*"):  # step 50 is in the middle of the last window of twenty
        path.unlink()
    found = train(run, pairs_file, training={**LEARNING, "eval_sources": 0})  # which translates nothing
    assert found == {"valid": {"loss": results["valid"]["loss"]}}
    assert_same_run(run, folder, 60, more_than=60)


@pytest.mark.slow  # of taggers, the same in train_tagger_test.py
def test_a_run_that_is_stopped_in_a_validation_goes_on_as_if_it_had_not(made, pairs_file, tmp_path, monkeypatch):
    folder, results = made
    run = shutil.copytree(folder, tmp_path / "run")
    for path in [*run.glob("ckpt-50*"), *run.glob("ckpt-60*")]:  # the validation is after step 40
        path.unlink()
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        at_step(patch, StopOnSignal, "on_test_batch_end", 40, terminate)
        train(run, pairs_file, training=LEARNING)
    assert len(log_rows(run)) == 1 and (run / "ckpt-40.index").exists()
    assert train(run, pairs_file, training=LEARNING) == results
    assert_same_run(run, folder, 60, more_than=60)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"optimizer": {"ema": 0.5}, "training": {"batch_tokens": 120}}], ids=str)
def test_resuming_in_the_first_window_does_so_too(tmp_path, pairs_file, options):
    training = {"iterations": 5, "save_steps": 4, "max_to_keep": 9, **options.get("training", {})}
    options = {**options, "training": training}
    results = train(tmp_path / "run", pairs_file, **options)
    shutil.copytree(tmp_path / "run", tmp_path / "whole")
    for step in (8, 12):  # step 4 is in the middle of the first window of five
        for path in (tmp_path / "run").glob(f"ckpt-{step}*"):
            path.unlink()
    assert train(tmp_path / "run", pairs_file, **options) == results
    assert_same_run(tmp_path / "run", tmp_path / "whole", 12, more_than=60)


@pytest.mark.slow
def test_three_replicas_train_as_one(tmp_path, pairs_file):
    # The last rows of a batch are filled up. Adam turns rounding errors of gradients near 0 into steps of full length.
    options = {"training": {"batch_size": 16, "train_steps": 3}, "optimizer": {"learning_rate": 1e-3}}
    one = train(tmp_path / "one", pairs_file, **options)
    two = train(tmp_path / "two", pairs_file, **options, machine=MachineConfig(strategy="mirrored"))
    assert two["valid"]["loss"] == pytest.approx(one["valid"]["loss"], rel=1e-5)


@pytest.mark.slow
def test_runs_open_average_and_change_the_checkpoint(made, tmp_path):
    folder, _ = made
    model, (source_vocab, target_vocab) = txl_tf.load_run(folder)
    assert isinstance(model, txl_tf.Transformer) and len(target_vocab) == model.target_vocab_size == 7
    assert source_vocab.symbols[2] == "\n"
    average_checkpoints(folder, tmp_path / "average", num_last_checkpoints=2)
    averaged, _ = txl_tf.load_run(tmp_path / "average")
    weights = [txl_tf.load_run(folder, name)[0].get_weights()[0] for name in ("ckpt-50", "ckpt-60")]
    np.testing.assert_allclose(averaged.get_weights()[0], np.mean(weights, 0), rtol=1e-6)
    best = RunFolder(folder).find_best()
    assert best["step"] in (40, 60)
    assert txl_tf.load_run(folder, "best")[0].get_weights()[0].shape == weights[0].shape


# -------------------------------------------------------------------------------------------------------- translating


@pytest.fixture(scope="module")
def run(made):
    model, vocabs = txl_tf.load_run(made[0])
    return model, vocabs


@pytest.mark.ci
@pytest.mark.parametrize(
    "search",
    [pytest.param({}, marks=pytest.mark.slow), {"beam_size": 3, "n_best": 2, "length_penalty": 1.0}],
    ids=str,
)
def test_lines_are_translated_alike_alone_and_together(run, search):
    model, vocabs = run
    sources = ["abc", "a", "bbbbbb", "cabacc", "c" * 17, "ba"]
    translator = Translator(model, *vocabs, SearchConfig(**search), batch_size=4)
    for source, found in zip(sources, translator.translate(sources), strict=True):
        (alone,) = translator.translate([source])
        assert [text for text, _ in found] == [text for text, _ in alone] and len(found) == search.get("n_best", 1)
        np.testing.assert_allclose([score for _, score in found], [score for _, score in alone], rtol=1e-4)


def test_the_translation_is_that_of_the_ids(run):
    model, vocabs = run
    (((text, score),),) = Translator(model, *vocabs).translate(["abc"])
    source = vocabs[0].encode("abc\n")
    ids, scores = model.generate(source[None], start=1, end=2, max_new_tokens=20)
    assert text == vocabs[1].decode(ids[0][: list(ids[0]).index(2)]) and score == pytest.approx(
        scores[0].numpy(), rel=1e-5
    )


@pytest.mark.slow
def test_the_programs(made, tmp_path):
    """What a user types: train (already done), translate a file and a pipe, compare with targets."""
    folder, results = made
    sources = write_text(tmp_path / "in.txt", "abc\nca\n")
    done = run_program(
        "tools/translate.py", f"--model_dir={folder}", f"--input={sources}", f"--output={tmp_path / 'out'}"
    )
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "out").read_text().splitlines()
    assert len(lines) == 2 and set(lines[0]) <= set("ABC ")
    piped = run_program("tools/translate.py", f"--model_dir={folder}", "--beam_size=2", "--n_best=2", input="abc\nca\n")
    rows = [line.split("\t") for line in piped.stdout.splitlines()]
    assert [row[0] for row in rows] == ["1", "1", "2", "2"] and float(rows[0][1]) >= float(rows[1][1]), piped.stderr
    pairs = write_text(tmp_path / "pairs.tsv", f"abc\t{lines[0]}\nca\tB B\nca\t{lines[1]}\n")
    done = run_program("tools/translate.py", f"--model_dir={folder}", f"--pairs={pairs}")
    assert done.stdout.splitlines() == [*lines, lines[1]]
    assert mentions(done.stderr, "0.00%", "2")


@pytest.fixture(scope="module")
def tool(opened_once):
    yield from program("tools/translate.py")


# ------------------------------------------------------------------------------------------------------------ ensembles


@pytest.fixture(scope="module")
def two(made):
    """An ensemble of the latest checkpoint of the run and of an earlier one, and the vocabularies."""
    runs = [txl_tf.load_run(made[0], name) for name in ("latest", "ckpt-25")]
    return txl_tf.Ensemble([model for model, _ in runs]), runs[0][1]


@pytest.mark.ci
def test_the_program_translates_with_several_models(made, two, tool, tmp_path, capfd):
    folder, _ = made
    expected, alone = (
        [best for (best,) in Translator(model, *two[1]).translate(["abc", "ca"])]
        for model in (two[0], two[0].models[0])
    )
    sources = write_text(tmp_path / "in.txt", "abc\nca\n")
    flags = f"--model_dir={folder}", f"--ensemble={folder}/ckpt-25", f"--input={sources}", "--scores"
    assert run_here(tool, *flags) == 0
    printed = capfd.readouterr()
    assert mentions(printed.err, "ensemble", f"{folder}/ckpt-25")
    for line, best, of_one in zip(printed.out.splitlines(), expected, alone, strict=True):
        _, score, text = line.split("\t")
        assert text == best.text and float(score) == pytest.approx(best.score, abs=1e-3)
        assert float(score) != pytest.approx(of_one.score, abs=1e-2)


@pytest.mark.ci
def test_several_files_are_translated_again_after_the_ensemble_has_changed(made, tool, tmp_path, capfd):
    """The program keeps the answers of a command that is interrupted. It must not use them for another ensemble."""
    folder = shutil.copytree(made[0], tmp_path / "run")
    other = shutil.copytree(made[0], tmp_path / "other")
    (tmp_path / "in").mkdir()
    for name in ("1.txt", "2.txt"):
        write_text(tmp_path / "in" / name, "abc\nca\n")
    flags = f"--model_dir={folder}", f"--ensemble={other}", f"--input={tmp_path / 'in'}", f"--output={tmp_path / 'out'}"
    kept = []
    for _ in range(3):
        assert run_here(tool, *flags) == 0
        kept.append("answered before" in capfd.readouterr().err)
        if len(kept) == 2:
            for path in other.glob("ckpt-60*"):
                path.unlink()
    assert kept == [False, True, False]


@pytest.mark.parametrize("change", ["symbol", "lower_case", "max_len", "tagger", "nothing there"])
def test_runs_that_cannot_translate_together_are_refused(made, tmp_path, change):
    folder = RunFolder(made[0])
    other = shutil.copytree(made[0], tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    if change == "symbol":
        vocab = (other / "target_vocab.txt").read_text()
        write_text(other / "target_vocab.txt", vocab.replace("A", "Z"))
        del config["fingerprints"]
    elif change == "lower_case":
        config["source_vocab"]["lower_case"] = True
    elif change == "max_len":
        config["model"]["max_len"] += 1
    elif change == "tagger":
        config["family"] = "tener"
    else:
        other = tmp_path / "nothing"
    write_text(tmp_path / "other" / "config.json", json.dumps(config))
    with raises_parameter("ensemble", str(other)):
        members_of(folder, [other])
    with raises_parameter("ensemble", str(other)):
        txl_tf.pipeline(made[0], ensemble=[str(other)])


@pytest.mark.parametrize("given", ["runs/other", None, 3, [3], [""], [b"runs/other"]], ids=str)
def test_an_ensemble_is_a_list_of_paths(made, given):
    with raises_parameter("ensemble", given):
        txl_tf.pipeline(made[0], ensemble=given)


@pytest.mark.parametrize("name", ["", "ckpt-25", "best", "best/ckpt-40"])
def test_a_run_may_be_called_best(made, tmp_path, name):
    """Its checkpoints are not those of a run around it."""
    run = shutil.copytree(made[0], tmp_path / "best")
    best = RunFolder(run).find_best()["step"]
    path = str(run / name.replace("40", str(best)))
    ((folder, checkpoint),) = members_of(RunFolder(made[0]), [path])
    assert folder.path == str(run)
    assert checkpoint == {"": f"{run}/ckpt-60", "ckpt-25": f"{run}/ckpt-25"}.get(name, f"{run}/best/ckpt-{best}")
    assert [member.path for member in members_of(RunFolder(made[0]), [checkpoint])] == [checkpoint]


def test_a_checkpoint_of_the_current_folder_is_not_taken_for_that_of_another_run(made, monkeypatch):
    monkeypatch.chdir(made[0])
    other = f"{made[0].parent}/run/../other/ckpt-25"
    with raises_parameter("ensemble", other):
        members_of(RunFolder(made[0]), [other])


def test_a_damaged_checkpoint_of_an_ensemble_is_named(made, tmp_path):
    other = shutil.copytree(made[0], tmp_path / "other")
    for path in other.glob("ckpt-60.data*"):
        path.write_bytes(b"short")
    with raises_parameter("ensemble", f"{other}/ckpt-60", [f"{other}/ckpt-50"]):
        txl_tf.pipeline(made[0], ensemble=[other])


def test_a_copy_of_an_ensemble_translates_as_it_does(two):
    ensemble, vocabs = two
    expected = Translator(ensemble, *vocabs).translate(["abc"])
    assert Translator(copy.copy(ensemble), *vocabs).translate(["abc"]) == expected


def test_a_pipeline_takes_an_ensemble(made, two):
    translate = txl_tf.pipeline(made[0], ensemble=[f"{made[0]}/ckpt-25"])
    assert translate(["abc", "ca"]) == [found for (found,) in Translator(two[0], *two[1]).translate(["abc", "ca"])]


# ---------------------------------------------------------------------------------------------------------- its input


def test_a_source_that_cannot_be_translated_keeps_its_place(made, tool, tmp_path, capsys):
    folder, _ = made
    pipe = txl_tf.pipeline(folder)
    source = write_text(tmp_path / "in", b"abc\r\n\naxc\nb\xff\n" + b"a" * 20 + b"\ncab\n")
    abc, axc, cab = pipe(["abc", "axc", "cab"])
    arguments = [f"--model_dir={folder}", f"--input={source}"]
    assert run_here(tool, *arguments) == 1
    out, err = capsys.readouterr()
    assert out == f"{abc.text}\n\n{axc.text}\n\n\n{cab.text}\n" and mentions(err, "latest", 60)
    assert mentions(err, source, 2) and axc.unknown == 1
    assert mentions(err, "<unk>", 1)
    assert mentions(err, source, 4, 1)
    assert mentions(err, source, 5, 21)
    assert mentions(err, "3", "--strict")
    assert run_here(tool, *arguments, "--scores", f"--output={tmp_path / 'out'}") == 1
    rows = (tmp_path / "out").read_text().splitlines()
    assert [rows[i - 1] for i in (2, 4, 5)] == [f"{i}\t\t" for i in (2, 4, 5)] and rows[
        5
    ] == f"6\t{cab.score:.4f}\t{cab.text}"
    with raises_naming(ValueError, source, 2):
        run_here(tool, *arguments, "--strict")
    with raises_naming(ValueError, "source", 1, 2):
        pipe("a\nb")


@pytest.mark.slow
def test_pairs_are_numbered_as_in_their_file_and_what_has_no_translation_is_wrong(made, tool, tmp_path, capsys):
    folder, _ = made
    right = txl_tf.pipeline(folder)("abc").text
    long = "ab" * 10
    pairs = write_text(tmp_path / "pairs.tsv", f"abc\t{right}\nabc\tB\n{long}\tB A\n")
    assert run_here(tool, f"--model_dir={folder}", f"--pairs={pairs}") == 1
    out, err = capsys.readouterr()
    assert out == f"{right}\n{right}\n\n" and mentions(err, "pairs.tsv", "3", "21")
    assert mentions(err, "50.00%", 2, 3)
    with_bad = write_text(tmp_path / "bad.tsv", f"\nabc\t{right}\tCC-BY\n{long}\tB A\tCC-BY\nabc\t\tCC-BY\n")
    flags = ["--skip_bad_lines", "--bleu_tokenize=none"]
    assert run_here(tool, f"--model_dir={folder}", f"--pairs={with_bad}", *flags) == 0
    out, err = capsys.readouterr()
    assert out == f"{right}\n" and "skip_bad_lines: 2 (2 empty)" in err
    assert mentions(err, "skip_bad_lines", 1, "max_len=20", 3, 21)
    assert "3 columns" in err and ("|tok:none|" in err or "txl_tf[seq2seq]" in err)
    with raises_naming(ValueError, "--output", pairs):
        run_here(tool, f"--model_dir={folder}", f"--pairs={pairs}", f"--output={pairs}")


@pytest.mark.parametrize("n_pairs", [2, 5])
def test_error_rates_say_how_many_sources_and_pairs_they_are_about(tool, n_pairs, capsys):
    tool.FLAGS(["translate.py", "--model_dir=run"])
    tool.report(["A", "B"], [["A"], ["C"]], "char", n_pairs)
    err = capsys.readouterr().err
    assert mentions(err, "50.00%", 2) and mentions(err, "50.00%", 2, 5) == (n_pairs == 5)


def test_sources_are_translated_as_they_come(made, tool, monkeypatch):
    lines = converse(monkeypatch, tool, [b"abc\n", b"ca\n", b"abc\n"], f"--model_dir={made[0]}", "--scores")
    first, second, again = (line.decode().split("\t") for line in lines)
    assert [first[0], second[0], again[0]] == ["1", "2", "3"] and first[1:] == again[1:] != second[1:]


@pytest.mark.slow
def test_a_list_is_translated_to_a_list_and_an_iterator_one_by_one(made, run):
    model, vocabs = run
    pipe, taken = txl_tf.pipeline(made[0]), []
    expected = Translator(model, *vocabs, SearchConfig(beam_size=3, n_best=2)).translate(["abc", "ca"])
    assert pipe(["abc", "ca"], beam_size=3, n_best=2) == expected and pipe.checkpoint == "latest, step 60"
    found = pipe(taken.append(i) or ["abc", None][i % 2] for i in range(10**9))
    assert next(found) == next(found) == pipe("abc") and len(taken) < 5


# -------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "options, name, value, allowed",
    [
        ({"model": {"share_embeddings": True}}, "share_vocab", False, [True]),
        ({"training": {"warm_start_path": "nowhere"}}, "checkpoint", "nowhere", ANY),
        ({"final": SearchConfig(beam_size=2, n_best=2)}, "n_best", 2, ANY),
        (
            {"machine": MachineConfig(strategy="tpu")},
            "strategy",
            "tpu",
            ["auto", "one", "mirrored", "multi_worker"],
        ),
        (
            {"machine": MachineConfig(strategy="mirrored"), "training": {"jit_compile": True}},
            "jit_compile",
            True,
            "left out",
        ),
        (
            {"machine": MachineConfig(strategy="mirrored"), "training": {"steps_per_execution": 3}},
            "steps_per_execution",
            3,
            "left out",
        ),
    ],
    ids=str,
)
def test_settings_that_do_not_fit_are_refused_before_the_folder_has_a_run(
    tmp_path, pairs_file, options, name, value, allowed
):
    with raises_parameter(name, value, allowed):
        train(tmp_path / "run", pairs_file, **options)
    assert not (tmp_path / "run" / "config.json").exists()


@pytest.mark.parametrize(
    "options, facts",
    [
        ({"model": {"max_len": 4}}, ["pairs.tsv", "max_len=4"]),
        ({"optimizer": {"schedule": "noam", "warmup_steps": 0}}, ["warmup_steps", 1, 0]),
        ({"data": {"target_symbols": "nowhere.txt"}}, ["nowhere.txt"]),
        ({"final": SearchConfig(beam_size=50)}, ["beam_size", 50]),
    ],
    ids=str,
)
def test_bad_input_is_refused_before_the_folder_has_a_run(tmp_path, pairs_file, options, facts):
    with raises_naming((ValueError, OSError), *facts):
        train(tmp_path / "run", pairs_file, **options)
    assert not (tmp_path / "run" / "config.json").exists()


def test_a_run_goes_on_with_its_own_pairs_only(made, pairs_file, tmp_path):
    folder, _ = made
    text = Path(pairs_file).read_text()
    try:
        write_text(Path(pairs_file), text.rsplit("\n", 41)[0] + "\n")
        with raises_parameter("text", ["train", "valid"]):
            train(folder, pairs_file, training=LEARNING)
    finally:
        write_text(Path(pairs_file), text)
    other = write_text(tmp_path / "other.tsv", text + "abd\tD\n" * 9)
    with raises_parameter("model_dir", str(folder)):  # another setting of the data comes before the vocabulary
        train(folder, other, training=LEARNING, data={"valid_path": pairs_file})
    with raises_parameter("model_dir", str(folder)) as raised:
        train(folder, pairs_file, training=LEARNING, model={"dff": 17})
    assert len(raised.value.differences) == 1 and mentions(raised.value.differences, "model.dff", 16, 17)


SLOWLY = {"learning_rate": 1e-9, "warmup_steps": 0}


@pytest.fixture
def other_lines(pairs_file):
    return "".join(Path(pairs_file).read_text().splitlines(keepends=True)[::-1][:100])


@pytest.mark.slow
def test_a_new_run_starts_from_another(made, other_lines, tmp_path, capsys):
    folder, _ = made
    other = write_text(tmp_path / "other.tsv", other_lines)
    training = {"init_from": str(folder), "train_steps": 2, "iterations": 2, "save_steps": 2}
    train(tmp_path / "new", other, training=training, model={"rate": 0.2}, optimizer=SLOWLY)
    assert mentions(capsys.readouterr().out, folder, 60, "rate 0.1 -> 0.2")
    before, after = (read_checkpoint(path / f"ckpt-{n}") for path, n in ((folder, 60), (tmp_path / "new", 2)))
    for name in after:
        if name.startswith("weights/"):
            np.testing.assert_allclose(after[name], before[name], atol=1e-6, err_msg=name)


def test_new_symbols_of_pairs_get_rows_behind_the_others(made, other_lines, tmp_path, monkeypatch, capsys):
    """Also the columns of the last layer; `min_freq` is about the new ones."""
    folder, _ = made
    other = write_text(tmp_path / "other.tsv", "abd\tD B A\nd\tD\ne\tE\n" * 9 + other_lines)
    training = {"init_from": str(folder), "extend_vocab": True}
    monkeypatch.setattr(PairsRun, "train", lambda run, state: run)
    run = train(tmp_path / "new", other, training=training, data={"min_freq": 2})
    said, (source, target) = capsys.readouterr().out, run.corpus.vocabs
    assert mentions(said, "extend_vocab", "2", "7", "source_vocab", "target_vocab")
    assert sorted(source.symbols[7:]) == ["d", "e"] and sorted(target.symbols[7:]) == ["D", "E"]
    assert source.unk == target.unk == "<unk>" and mentions(said, "0.00%", "<unk>")
    before, weights, longer = read_checkpoint(folder / "ckpt-60"), weights_by_name(run.model), 0
    for name, variable in weights.items():
        array = before[f"weights/{name}"]
        longer += tuple(variable.shape) != array.shape
        np.testing.assert_array_equal(variable.numpy()[tuple(map(slice, array.shape))], array, err_msg=name)
    assert longer == 4  # two tables, and kernel and bias of the softmax


@pytest.mark.parametrize(
    "changes",
    [
        {"data": {"source_level": "word"}},
        {"data": {"min_freq": 2}},
        {"data": {"share_vocab": True}},
        {"model": {"norm_first": False}},
    ],
)
def test_a_new_run_refuses_what_the_other_does_not_have(made, other_lines, tmp_path, changes):
    path = write_text(tmp_path / "other.tsv", other_lines)
    ((name, value),) = (pair for values in changes.values() for pair in values.items())
    with raises_parameter(name, value):
        train(tmp_path / "no", path, training={"init_from": str(made[0])}, optimizer=SLOWLY, **changes)


@pytest.mark.slow
def test_a_run_of_an_earlier_version_has_no_unknown_symbol_and_goes_on(pairs_file, other_lines, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(PairsRun, "_has_unknown", lambda run: False)
        train(tmp_path / "old", pairs_file)
    train(tmp_path / "old", pairs_file, training={"train_steps": 15})
    model, vocabs = txl_tf.load_run(tmp_path / "old")
    assert [len(vocab) for vocab in vocabs] == [6, 6]
    with raises_naming(ValueError, "source", 2, "'x'", 6):
        Translator(model, *vocabs).translate(["abc", "axc"])
    path = write_text(tmp_path / "other.tsv", f"abd\tB A\n{other_lines}")
    with raises_parameter("init_from", str(tmp_path / "old")):
        train(tmp_path / "no", path, training={"init_from": str(tmp_path / "old")}, optimizer=SLOWLY)
    warm = {"warm_start_path": str(tmp_path / "old" / "ckpt-15"), "eval_sources": 0}
    train(tmp_path / "warm", pairs_file, training=warm)
    assert len(txl_tf.load_run(tmp_path / "warm")[1][0]) == 6


def without_record(folder, copy):
    """A copy of a run as earlier versions wrote it, without the lengths of its targets."""
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text())
    del config["model"]["target_lengths"], config["checksum"]
    (copy / "config.json").write_text(json.dumps(config))
    return copy


@pytest.mark.slow
def test_a_run_records_the_lengths_of_its_targets_and_programs_say_what_did_not_end(made, tool, tmp_path, capsys):
    folder, _ = made
    model, _ = txl_tf.load_run(folder)
    assert list(model.target_lengths) == [7] == model.get_config()["target_lengths"]
    source = write_text(tmp_path / "in", "abcabc\nab\n")
    assert not any(found.ended for found in txl_tf.pipeline(folder)(["abcabc", "ab"], max_new_tokens=1))
    run_here(tool, f"--model_dir={folder}", f"--input={source}", "--max_new_tokens=1")
    assert mentions(capsys.readouterr().err, "2", "1")
    old = without_record(folder, tmp_path / "old")
    with pytest.raises(ParameterError) as caught:
        run_here(tool, f"--model_dir={old}", f"--input={source}", "--max_new_tokens=21")
    assert (caught.value.name, caught.value.value) == ("max_new_tokens", 21)
    run_here(tool, f"--model_dir={old}", f"--input={source}")
    assert capsys.readouterr().err


@pytest.mark.slow
def test_a_run_without_lengths_of_targets_goes_on_and_a_new_one_knows_both_texts(made, pairs_file, tmp_path):
    old = without_record(made[0], tmp_path / "old")
    train(old, pairs_file, training={**LEARNING, "train_steps": 61})
    assert json.loads((old / "config.json").read_text())["model"]["target_lengths"] == [7]
    short = write_text(tmp_path / "short.tsv", "".join(f"{word}\tA\n" for word in "a b c ab bc abc ca cb".split()))
    data = {"valid_path": short}
    train(tmp_path / "new", short, training={**TRAINING, "init_from": str(made[0])}, data=data)
    assert list(txl_tf.load_run(tmp_path / "new")[0].target_lengths) == [7]


def test_a_folder_of_another_family_says_what_it_holds(made, run_dir, text_file, tmp_path):
    folder, _ = made
    with raises_parameter("family", "transformer", ["transformer_xl", "transformer_lm"]):
        RunFolder(folder, "language_model").read_config()
    (tmp_path / "config.json").write_text('{"data": {}, "model": {}, "vocab": {}}')
    with raises_parameter("family", "transformer_xl", ["transformer"]):
        RunFolder(tmp_path, "encoder_decoder").read_config()


@pytest.mark.parametrize(
    "sources, facts", [(["abc", ""], ["source", 2]), (["abc", "a" * 20], ["source", 2, 21, "max_len=20"])]
)
def test_lines_that_cannot_be_translated_are_named(run, sources, facts):
    model, vocabs = run
    with raises_naming(ValueError, *facts):
        Translator(model, *vocabs).translate(sources)
    for wrong in ("abc", ["abc", None], iter(["abc", None])):
        with raises_parameter("lines"):
            Translator(model, *vocabs).translate(wrong)


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--beam_size=0"], "beam_size.*1.*0"),
        (["--beam_size=2", "--n_best=3"], "n_best.*beam_size=2.*3"),
        (["--input=nowhere.txt"], "nowhere.txt"),
        (["--input=a", "--pairs=b"], "--pairs.*--input"),
        (["--pairs="], "--pairs"),
        (["--length_penalty=2"], "--length_penalty"),
        (["--max_new_tokens=0"], "max_new_tokens.*1.*0"),
    ],
    ids=str,
)
@pytest.mark.slow
def test_bad_flags_are_one_line(made, flags, message):
    done = run_program("tools/translate.py", f"--model_dir={made[0]}", *flags, input="a\n")
    assert done.returncode == 1 and re.search(message, done.stderr) and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--train_path=a.tsv --n_pairs=5", "--n_pairs.*--dataset=dates"),
        ("--train_path=a.tsv --subword_type=bpe", "--subword_type.*--source_level=subword"),
        ("--train_path=a.tsv --tracker_project=mine", "--tracker_project.*--tracker"),
        ("--dataset=dates --valid_fraction=0.1", "--valid_fraction.*--valid_path"),
        ("--train_path=a.tsv --valid_path=b.tsv --valid_fraction=0.1", "--valid_fraction.*--valid_path"),
    ],
    ids=str,
)
@pytest.mark.slow
def test_flags_of_other_pairs_are_one_line(flags, message, tmp_path):
    for name in ("a.tsv", "b.tsv"):
        (tmp_path / name).write_text("1\t2\n" * 9)
        flags = flags.replace(name, str(tmp_path / name))
    done = run_program("tools/train_seq2seq.py", f"--model_dir={tmp_path / 'run'}", *flags.split())
    assert done.returncode == 1 and re.search(message, done.stderr) and "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


# ------------------------------------------------------------------------------------------------------------ served

# What a program that has no txl_tf does with the folder of a SavedModel.
STRANGER = """
import sys
sys.modules["txl_tf"] = None
import numpy as np
import tensorflow as tf

directory, out = sys.argv[1:]
found = {}
loaded = tf.saved_model.load(directory).signatures["translate_text"](text=tf.constant(["abc", "ca", "bbbbb"]))
found["loaded_text"], found["loaded_scores"] = loaded["text"].numpy(), loaded["scores"].numpy()
with tf.compat.v1.Session(graph=tf.Graph()) as session:
    meta = tf.compat.v1.saved_model.load(session, ["serve"], directory)
    signature = meta.signature_def["translate_text"]
    given = {signature.inputs["text"].name: ["abc", "ca", "bbbbb"]}
    names = {f"session_{name}": output.name for name, output in signature.outputs.items()}
    found |= session.run(names, given)
np.savez(out, **{name: value.astype("S") if value.dtype == object else value for name, value in found.items()})
"""


@pytest.fixture(scope="module")
def exported(run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("served") / "1"
    model, vocabs = run
    txl_tf.export_saved_model(model, folder, vocabs, search={"beam_size": 3, "n_best": 2}, max_rows=8, warmup=False)
    return folder


@pytest.mark.slow
def test_strangers_get_the_translations_of_the_model(made, run, tmp_path):
    flags = f"--model_dir={made[0]} --output={tmp_path / 'my'} --beam_size=3 --n_best=2"
    done = run_program("tools/export_saved_model.py", *flags.split())
    assert done.stdout == f"{tmp_path / 'my' / '1'}\n", done.stderr
    assert (tmp_path / "my" / "1" / "assets.extra").exists() == (
        importlib.util.find_spec("tensorflow_serving") is not None
    )
    command = [sys.executable, "-c", STRANGER, done.stdout.strip(), str(tmp_path / "found.npz")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    model, vocabs = run
    expected = Translator(model, *vocabs, SearchConfig(beam_size=3, n_best=2)).translate(["abc", "ca", "bbbbb"])
    found = np.load(tmp_path / "found.npz")
    for way in ("loaded", "session"):
        assert np.char.decode(found[f"{way}_text"]).tolist() == [[text for text, _ in both] for both in expected]
        scores = [[score for _, score in both] for both in expected]
        np.testing.assert_allclose(found[f"{way}_scores"], scores, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module", params=["not exported", pytest.param("exported", marks=pytest.mark.slow)])
def signatures(request, run, tmp_path_factory):
    if request.param == "exported":
        return tf.saved_model.load(str(request.getfixturevalue("exported"))).signatures
    folder, (model, vocabs) = tmp_path_factory.mktemp("vocabularies"), run
    for name, vocab in zip("st", vocabs, strict=True):
        vocab.save(folder / name)
    tables = {name: GraphTokenizer(vocab, str(folder / name)) for name, vocab in zip("st", vocabs, strict=True)}
    served = TranslationSignatures(model, tables, search=SearchConfig(beam_size=3, n_best=2), max_rows=8)
    return {name: getattr(served, name) for name in ("translate", "score", "translate_text", "score_text")}


@pytest.mark.slow
def test_an_exported_model_has_all_signatures(run, tmp_path, monkeypatch):
    """Its graph of the search, which takes long to make, is left out."""
    nothing = tf.zeros([1, 1, 1], tf.int32), tf.zeros([1, 1])
    monkeypatch.setattr(TranslationSignatures, "_search", lambda signatures, source: nothing)
    model, vocabs = run
    txl_tf.export_saved_model(model, tmp_path / "1", vocabs, warmup=False)
    signatures = tf.saved_model.load(str(tmp_path / "1")).signatures
    assert {*signatures} == {"translate", "score", "translate_text", "score_text"}
    found = signatures["score_text"](text=tf.constant(["abc"]), target_text=tf.constant(["C B A"]))
    source, labels = vocabs[0].encode("abc\n"), vocabs[1].encode("C B A\n")
    logits = model((source[None], np.array([[1, *labels[:-1]]])))
    nll = -tf.gather(tf.nn.log_softmax(logits)[0], labels, batch_dims=1)
    np.testing.assert_allclose(found["nll"][0], nll, rtol=1e-5, atol=1e-5)


def test_served_scores_are_those_of_the_model(run, signatures):
    model, vocabs = run
    texts, targets = ["abc", "c"], ["C B A", "B"]
    served = signatures["score_text"](text=tf.constant(texts), target_text=tf.constant(targets))
    assert served["lengths"].numpy().tolist() == [4, 2]
    assert served["symbols"].numpy().tolist() == [[b"C", b"B", b"A", b"</s>"], [b"B", b"</s>", b"", b""]]
    for row, (text, target) in enumerate(zip(texts, targets, strict=True)):
        source, labels = vocabs[0].encode(f"{text}\n"), vocabs[1].encode(f"{target}\n")
        logits = model((source[None], np.array([[1, *labels[:-1]]])))
        nll = -tf.gather(tf.nn.log_softmax(logits)[0], labels, batch_dims=1)
        np.testing.assert_allclose(served["nll"][row, : len(labels)], nll, rtol=1e-5, atol=1e-5)
        assert not np.any(served["nll"][row, len(labels) :])
    source = tf.constant([[*vocabs[0].encode("abc\n")], [*vocabs[0].encode("ca\n"), 0]])
    ids = signatures["translate"](source=source)
    text = signatures["translate_text"](text=tf.constant(["abc", "ca"]))
    np.testing.assert_allclose(ids["scores"], text["scores"], rtol=1e-5)
    for row, best in enumerate(ids["ids"][:, 0].numpy()):
        assert vocabs[1].decode(best[: ids["lengths"][row, 0] - 1]).encode() == text["text"][row, 0]


@pytest.mark.parametrize(
    "signature, arguments, facts",
    [
        ("translate_text", {"text": ["a", ""]}, ["text"]),
        ("translate_text", {"text": ["a", "a\nb"]}, ["text", 1]),
        ("translate_text", {"text": ["a" * 20]}, ["text", 20]),
        ("translate_text", {"text": ["a"] * 9}, ["text", 8]),
        ("translate_text", {"text": np.zeros([0], "S1")}, ["text", 1]),
        ("translate", {"source": [[3, 9]]}, ["source", 0, 6]),
        ("translate", {"source": [[0, 0]]}, ["source"]),
        ("score", {"source": [[3]], "target": [[3], [4]]}, ["target", "source"]),
    ],
    ids=str,
)
def test_bad_requests_name_the_argument(signatures, signature, arguments, facts):
    with raises_naming(tf.errors.InvalidArgumentError, *facts):
        signatures[signature](**{name: tf.constant(value) for name, value in arguments.items()})


def test_without_vocabularies_there_are_signatures_of_ids_alone(run):
    model, vocabs = run
    served = TranslationSignatures(model)
    assert served.signatures().keys() == {"translate", "score"} and served.warmup_values.keys() == {"source", "target"}
    found = served.translate(tf.constant([vocabs[0].encode("abc\n")]))
    (((text, score),),) = Translator(model, *vocabs).translate(["abc"])
    ids = found["ids"][0, 0, : int(found["lengths"][0, 0]) - 1]
    assert vocabs[1].decode(ids) == text and found["scores"].numpy() == pytest.approx(score, rel=1e-5)


@pytest.mark.slow
def test_an_export_without_vocabularies_takes_ids_alone(run, tmp_path):
    model, vocabs = run
    txl_tf.export_saved_model(model, tmp_path / "1", warmup=importlib.util.find_spec("tensorflow_serving") is not None)
    signatures = tf.saved_model.load(str(tmp_path / "1")).signatures
    assert {*signatures} == {"translate", "score"}
    source = tf.constant([[*vocabs[0].encode("abc\n")]])
    (((text, _),),) = Translator(model, *vocabs).translate(["abc"])
    assert vocabs[1].decode(signatures["translate"](source=source)["ids"][0, 0, :-1]) == text


@pytest.mark.parametrize(
    "options, name, value",
    [
        ({"top_n": 3}, "top_n", 3),
        ({"search": {"beam_size": 0}}, "beam_size", 0),
        ({"max_tokens": 21}, "max_tokens", 21),
        ({"weights": "int8"}, "weights", "int8"),
    ],
    ids=str,
)
def test_bad_arguments_of_an_export_are_named(run, tmp_path, options, name, value):
    model, vocabs = run
    with raises_parameter(name, value):
        txl_tf.export_saved_model(model, tmp_path / "1", vocabs, **options)
    wider = txl_tf.Vocab(special=list("01234567"))
    wider.build()
    with raises_parameter("target_vocab", 8, "the 7 symbols of the model"):
        txl_tf.export_saved_model(model, tmp_path / "1", [vocabs[0], wider])
