"""Runs of a tagger: training, resuming, early stopping, tagging; one clear error for each kind of bad input."""

import contextlib
import json
import re
import shutil
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import (
    ANY,
    LEXICON,
    assert_same_run,
    at_step,
    converse,
    log_rows,
    made_up,
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
    BiLSTMTaggerConfig,
    ColumnsConfig,
    FlatTaggerConfig,
    MachineConfig,
    OptimizerConfig,
    TaggedConfig,
    TaggerTrainingConfig,
    TenerTaggerConfig,
)
from txl_tf.data.tagged.sentences import encoder_of, read_corpus, read_tagged, read_tagged_as
from txl_tf.data.tagged.tags import prf, spans_of
from txl_tf.errors import ParameterError
from txl_tf.runs import checkpoints
from txl_tf.runs.callbacks import RunState, StopOnSignal
from txl_tf.runs.checkpoints import average_checkpoints
from txl_tf.runs.families.pipeline import TaggedLine, line_sizes, with_lexicon
from txl_tf.runs.families.tagger import FLAT, TENER, TaggerRun
from txl_tf.runs.folder import RunFolder
from txl_tf.runs.metrics import confusion, format_confusion, format_scores, format_wrong, score_table, width_of
from txl_tf.runs.train import train_run
from txl_tf.runs.weights import weights_by_name
from txl_tf.taggers.text_tagger import Entity, TaggedText, TextTagger

MODEL = {"n_layer": 1, "d_model": 16, "n_head": 2, "d_inner": 16, "max_seq_len": 30, "d_embed": 8, "d_bigram": 8}
DROPS = {"dropout": 0.1, "dropatt": 0.1, "embed_dropout": 0.1, "token_dropout": 0.05, "output_dropout": 0.1}
LEARNING = {"train_steps": 90, "iterations": 30, "save_steps": 40, "max_to_keep": 9}
TRAINING = {"train_steps": 12, "iterations": 3, "save_steps": 6, "batch_size": 8}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tagged")
    paths = {f"{split}_path": write_text(folder / split, made_up(n, n)) for split, n in SPLITS.items()}
    return {**paths, "lexicon": write_text(folder / "words", "\n".join(LEXICON))}


SPLITS = {"train": 160, "valid": 40, "test": 41}


def train(model_dir, files, family="tener", model=(), training=(), data=(), optimizer=(), **options):
    group = {"tener": TenerTaggerConfig, "flat": FlatTaggerConfig}[family]
    files = {name: path for name, path in files.items() if name != "lexicon" or family == "flat"}
    recipe = {"learning_rate": 3e-2, "clip": 5.0, "optimizer": "adam", "schedule": "linear", "warmup_steps": 2}
    return train_run(
        str(model_dir),
        data=TaggedConfig(**{**files, **dict(data)}),
        model=group(**{**MODEL, **DROPS, **dict(model)}),
        optimizer=OptimizerConfig(**{**recipe, **dict(optimizer)}),
        training=TaggerTrainingConfig(**{**TRAINING, **dict(training)}),
        **options,
    )


SLOW = pytest.mark.slow


@pytest.fixture(scope="module", params=[pytest.param("tener", marks=SLOW), "flat"])
def made(request, tmp_path_factory, files):
    """The folder of a run, and what its training returned."""
    folder = tmp_path_factory.mktemp("made") / request.param
    return folder, train(folder, files, request.param, training=LEARNING)


@pytest.fixture(scope="module")
def text_tagger(made):
    """Of the best checkpoint of the run; its graphs are made once."""
    tagger, vocabs = txl_tf.load_run(made[0], "best")
    return TextTagger(tagger, encoder_of(*vocabs), batch_size=7)


def test_a_run_learns_and_leaves_logs_checkpoints_and_vocabularies(made):
    folder, results = made
    rows = log_rows(folder)
    assert [int(row["step"]) for row in rows] == [30, 60, 90]
    # It falls to a fifth, and F1 is 0.6 to 1.0 with other seeds: what a training reaches depends on the processor.
    assert float(rows[0]["loss"]) > 2 * float(rows[-1]["loss"]) and results["test"]["f1"] > 0.3
    assert [row["val_f1"] == "NA" for row in rows] == [True, False, False]  # the last: of the evaluation at the end
    best = json.loads((folder / "best" / "best.json").read_text())
    assert best["val_f1"] == results["valid"]["f1"] >= float(rows[1]["val_f1"])
    config = json.loads((folder / "config.json").read_text())
    assert config["family"] == folder.name and config["model"]["labels"][:3] == ["O", "B-LOC", "M-LOC"]
    assert (folder / "lexicon.txt").exists() == (folder.name == "flat")


@pytest.mark.slow
def test_results_are_those_of_tagging_every_sentence(made, files, text_tagger):
    _, results = made
    sentences = read_tagged(files["test_path"])
    found = text_tagger.tag([s.tokens for s in sentences])
    pairs = [({*spans_of(f.tags)}, {*spans_of(s.tags)}) for f, s in zip(found, sentences, strict=True)]
    counts = [sum(len(a & b) for a, b in pairs), sum(len(a) for a, _ in pairs), sum(len(b) for _, b in pairs)]
    expected = dict(zip(["precision", "recall", "f1"], prf(*counts), strict=True))
    assert {name: results["test"][name] for name in expected} == pytest.approx(expected)
    for text, tagged in zip(sentences, found, strict=True):
        assert [(e.kind, e.start, e.end) for e in tagged.entities] == spans_of(tagged.tags)
        assert len(tagged.tags) == len(text.tokens) and all(0 < e.prob <= 1 for e in tagged.entities)


@pytest.mark.slow
def test_a_sentence_is_tagged_alike_alone_and_together(text_tagger):
    texts = ["我在南京了", "", "他叫长江大桥了来在北京了", "好", "龘在京了"]
    together = text_tagger.tag(texts)
    for text, found in zip(texts, together, strict=True):
        (alone,) = text_tagger.tag([text])
        assert alone.tags == found.tags
        probs = [[entity.prob for entity in some.entities] for some in (alone, found)]
        np.testing.assert_allclose(*probs, rtol=1e-4)
    assert together[1] == ([], [])


@pytest.mark.slow
def test_resuming_gives_the_weights_of_the_uninterrupted_run(made, files, tmp_path):
    """Weights, optimizer, place in the sentences and dropout: bit for bit, from the middle of a window, too."""
    folder, results = made
    run = tmp_path / folder.name
    shutil.copytree(folder, run)
    for path in run.glob("ckpt-90*"):  # step 80 is in the middle of the last window of thirty
        path.unlink()
    assert train(run, files, folder.name, training=LEARNING) == results
    assert_same_run(run, folder, 90)


@SLOW
def test_a_run_that_is_stopped_in_a_validation_goes_on_as_if_it_had_not(made, files, tmp_path, monkeypatch):
    folder, results = made
    run = shutil.copytree(folder, tmp_path / folder.name)
    for path in [*run.glob("ckpt-80*"), *run.glob("ckpt-90*")]:  # the validation is after step 60
        path.unlink()
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        at_step(patch, StopOnSignal, "on_test_batch_end", 60, terminate)
        train(run, files, folder.name, training=LEARNING)
    assert len(log_rows(run)) == 1 and (run / "ckpt-60.index").exists()
    assert train(run, files, folder.name, training=LEARNING) == results
    assert_same_run(run, folder, 90)


@SLOW
@pytest.mark.parametrize("family", ["tener", "flat"])
def test_resuming_with_clipped_values_goes_on_from_the_first_window(tmp_path, files, family):
    training = {"iterations": 5, "save_steps": 4, "max_to_keep": 9}
    options = {"training": training, "optimizer": {"optimizer": "sgd", "learning_rate": 1e-3, "clip_value": 1.0}}
    results = train(tmp_path / "run", files, family, **options)
    shutil.copytree(tmp_path / "run", tmp_path / "whole")
    for step in (8, 12):  # step 4 is in the middle of the first window of five
        for path in (tmp_path / "run").glob(f"ckpt-{step}*"):
            path.unlink()
    assert train(tmp_path / "run", files, family, **options) == results
    assert_same_run(tmp_path / "run", tmp_path / "whole", 12)


@pytest.fixture
def begun(monkeypatch):
    """Begins a training as `train` does; returns the run and its state, before any step."""

    def begin(folder, files, **options):
        with monkeypatch.context() as patch:
            patch.setattr(TaggerRun, "train", lambda run, state: (run, state))
            return train(folder, files, **options)

    return begin


PATIENT = {"training": {"train_steps": 60, "iterations": 3, "save_steps": 3, "patience": 6}}


def test_a_run_without_patience_stops_and_stays_stopped(tmp_path, files, begun, capsys):
    run, state = begun(tmp_path / "run", files, **PATIENT)
    windows, stopped = RunState(run.checkpoints, state, run.training, []), []
    windows.set_model(run.model)
    run.model.stop_agreed = False
    windows.on_train_begin()
    for step in (3, 6, 9):
        run.model.optimizer.iterations.assign(step)
        windows.on_epoch_end(step // 3 - 1, {"val_loss": 1.0, "val_f1": 0.5})
        stopped.append(run.model.stop_training)
    assert stopped == [False, False, True] and RunFolder(tmp_path / "run").find_best()["step"] == 3
    run, state = begun(tmp_path / "run", files, **PATIENT)
    run.fit(state)
    assert mentions(capsys.readouterr().out, "patience=6", "train_steps=60")
    assert run.model.optimizer.iterations.numpy() == 9


@pytest.mark.parametrize("f1, last", [(0.4, 9), pytest.param(0.6, 10, marks=pytest.mark.slow)])
def test_a_run_that_is_stopped_in_a_validation_learns_of_its_patience_from_that(
    tmp_path, files, begun, monkeypatch, f1, last
):
    """Step 9 would be the last, if its validation found nothing better; and then there is no step 10."""
    run, state = begun(tmp_path / "run", files, **PATIENT)
    run.model.optimizer.iterations.assign(3)
    run.checkpoints.save_best(0.5)
    run.model.optimizer.iterations.assign(9)
    run.checkpoints.save(mid_interval=True)
    run, state = begun(tmp_path / "run", files, **PATIENT)
    found = {"loss": 1.0, "precision": f1, "recall": f1, "f1": f1}
    monkeypatch.setattr(run.model, "evaluate", lambda *args, **kwargs: found)
    at_step(monkeypatch, RunState, "on_train_batch_end", 10, die)
    with pytest.raises(RuntimeError, match="step 10") if last == 10 else contextlib.nullcontext():
        run.fit(state)
    assert run.model.optimizer.iterations.numpy() == last
    _, state = begun(tmp_path / "run", files, **PATIENT)
    assert (state[1] is None) == (last == 9)  # that is, whether it is done


def die():
    raise RuntimeError("step 10")


def test_the_best_of_another_text_does_not_end_a_run(made):
    folder, patient = RunFolder(made[0]), types.SimpleNamespace(patience=1)
    best = folder.find_best()
    assert folder.stops_early(patient, best["step"] + 1) and folder.stops_early(patient, 10**6, best["text"])
    assert not folder.stops_early(patient, best["step"]) and not folder.stops_early(patient, 10**6, "another")


def test_the_chief_tells_when_to_stop_and_which_weights_are_best(made, monkeypatch):
    best, (tagger, _) = RunFolder(made[0]).find_best(), txl_tf.load_run(made[0], "latest")
    worker = checkpoints.RunCheckpoints(tagger, RunFolder(made[0]), writes=False)
    monkeypatch.setattr(RunFolder, "find_best", None)  # a worker may not see it yet
    monkeypatch.setattr(checkpoints, "broadcast_from_chief", lambda strategy, number: best["step"])
    assert worker.stops_early(None, 0) and worker.load_best() == best["step"]
    expected = read_checkpoint(best["path"])["weights/crf/transitions"]
    np.testing.assert_array_equal(tagger.crf.transitions, expected)


@SLOW
def test_a_trained_run_without_patience_stops_and_stays_stopped(tmp_path, files):
    options = {**PATIENT, "optimizer": {"learning_rate": 1e-7}}  # nothing gets better
    results = train(tmp_path / "run", files, **options)
    assert [int(row["step"]) for row in log_rows(tmp_path / "run")] == [3, 6, 9]
    assert RunFolder(tmp_path / "run").find_best()["step"] == 3
    assert train(tmp_path / "run", files, **options) == results
    assert [int(row["step"]) for row in log_rows(tmp_path / "run")] == [3, 6, 9]


@SLOW
def test_three_replicas_train_as_one(tmp_path, files):
    # FLAT alone: the collectives of several strategies in one process get mixed up. Tener is in conformance_test.py.
    # The last rows of a batch are filled up. SGD: Adam turns rounding errors into steps of full length.
    options = {"training": {"train_steps": 6}, "optimizer": {"optimizer": "sgd", "learning_rate": 1e-2}}
    one = train(tmp_path / "one", files, "flat", **options)
    three = train(tmp_path / "three", files, "flat", **options, machine=MachineConfig(strategy="mirrored"))
    assert three["valid"]["loss"] == pytest.approx(one["valid"]["loss"], rel=1e-5)
    assert three["test"]["f1"] == one["test"]["f1"]


def test_runs_open_and_average(made, tmp_path):
    folder, _ = made
    assert RunFolder(folder).family is {"tener": TENER, "flat": FLAT}[folder.name]
    tagger, vocabs = txl_tf.load_run(folder)
    assert isinstance(tagger.network, {"tener": txl_tf.Tener, "flat": txl_tf.Flat}[folder.name])
    assert len(vocabs) == (3 if folder.name == "flat" else 2) and len(vocabs[0]) == tagger.network.n_token
    average_checkpoints(folder, tmp_path / "average", num_last_checkpoints=2)
    averaged, _ = txl_tf.load_run(tmp_path / "average")
    weights = [txl_tf.load_run(folder, name)[0].get_weights() for name in ("ckpt-80", "ckpt-90")]
    for found, *both in zip(averaged.get_weights(), *weights, strict=True):
        np.testing.assert_allclose(found, np.mean(both, 0), rtol=1e-5, atol=1e-7)


@SLOW
def test_bfloat16_learns_too(tmp_path, files):
    training = {"train_steps": 200, "iterations": 40, "save_steps": 40}
    results = train(tmp_path / "run", files, training=training, machine=MachineConfig(mixed_precision="bfloat16"))
    assert results["test"]["f1"] > 0.5


@pytest.mark.parametrize("unit, expected", [(False, [3, 4, 0]), (True, [0.6, 0.8, 0])])
def test_vectors_are_where_training_starts(tmp_path, files, begun, unit, expected):
    vectors = write_text(tmp_path / "vectors", "我 3 4 0\n京 0 0 2\n")
    data = {"char_vectors": vectors, "unit_vectors": unit}
    with raises_parameter("d_embed", 8):
        begun(tmp_path / "other", files, data=data, model={"d_embed": 8})
    run, _ = begun(tmp_path / "run", files, data=data, model={"d_embed": 50})  # the default
    run.checkpoints.save()
    tagger, (vocab, _) = txl_tf.load_run(tmp_path / "run")
    table = tagger.network.embedding.numpy()
    assert table.shape[1] == 3 and not np.any(table[0])
    np.testing.assert_allclose(table[vocab.ids["我"]], expected, atol=1e-6)


@pytest.mark.parametrize("start", ["init_from", "warm_start_path"])
def test_vectors_are_not_scaled_where_weights_are_there(made, tmp_path, files, start):
    folder, _ = made
    path = str(folder) if start == "init_from" else RunFolder(folder).find_checkpoint()
    data = {**files, "unit_vectors": True}
    with raises_parameter("unit_vectors", True):
        train(tmp_path / "run", data, folder.name, training={start: path})


# ------------------------------------------------------------------------------------------------------- the programs


@SLOW
def test_the_programs(made, files, tmp_path, text_tagger):
    """What a user types: train (already done), tag a pipe and a file, compare with tags."""
    folder, results = made
    text = "我在南京了\n\n他叫北京了\n"
    done = run_program("tools/tag.py", f"--model_dir={folder}", input=text)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["text"] for row in found] == text.splitlines() and found[1]["entities"] == []
    for row, (_, entities) in zip(found, text_tagger.tag(text.splitlines()), strict=True):
        assert [(e["kind"], e["start"], e["end"]) for e in row["entities"]] == [e[:3] for e in entities]
    for row in found:
        for entity in row["entities"]:
            assert row["text"][entity["start"] : entity["end"]] == entity["text"] and 0 < entity["prob"] <= 1
    source = write_text(tmp_path / "in.txt", text)
    flags = [f"--model_dir={folder}", f"--input={source}", f"--output={tmp_path / 'out'}", "--format=conll"]
    done = run_program("tools/tag.py", *flags)
    rows = (tmp_path / "out").read_text().split("\n\n")
    assert [len(row.splitlines()) for row in rows] == [5, 0, 5] or rows[0].startswith("我 O\n在 O\n南 B-LOC\n京 E-LOC")
    done = run_program("tools/tag.py", f"--model_dir={folder}", f"--tagged={files['test_path']}")
    assert f"{results['test']['f1']:.2%}" in done.stdout and "expected / found" in done.stdout


@pytest.fixture(scope="module")
def tool(opened_once):
    yield from program("tools/tag.py")


def test_every_program_opens_the_best_weights_unless_told_otherwise(made):
    folder = RunFolder(made[0])
    best = folder.find_best()
    assert folder.find_checkpoint() == best["path"] and folder.find_checkpoint("latest") == folder.checkpoints()[-1]
    assert folder.name_of(best["path"]) == f"best, step {best['step']}" == txl_tf.pipeline(made[0]).checkpoint
    expected = read_checkpoint(best["path"])["weights/crf/transitions"]
    np.testing.assert_array_equal(txl_tf.load_run(made[0])[0].crf.transitions, expected)


def test_lines_are_tagged_in_their_places_and_what_is_written_is_read(made, tool, text_tagger, tmp_path, capsys, eager):
    """Spaces in a text, too; they are no token of a file."""
    lines = ["我在南京了", "", "在 南京\t了 "]
    expected = [text_tagger.describe(*both) for both in zip(lines, text_tagger.tag(lines), strict=True)]
    source = write_text(tmp_path / "in", "\n".join(lines).encode() + b"\nb\xff\n")
    arguments = [f"--model_dir={made[0]}", f"--input={source}"]
    assert run_here(tool, *arguments) == 1
    out, err = capsys.readouterr()
    *rows, last = map(json.loads, out.splitlines())
    assert rows == expected and last == {"text": "b\\xff", "error": "line 4 is not UTF-8 text: see its byte 1"}
    assert mentions(err, source, 4) and mentions(err, "best")
    assert run_here(tool, *arguments, "--format=conll", f"--output={tmp_path / 'out'}") == 1
    written = (tmp_path / "out").read_text()
    assert re.sub(" .*", "", written) == "我\n在\n南\n京\n了\n\n\n在\n␣\n南\n京\n␣\n了\n␣\n\n\n"
    capsys.readouterr()
    run_here(tool, f"--model_dir={made[0]}", f"--tagged={tmp_path / 'out'}", "--format=conll")
    assert capsys.readouterr().out == written.replace("\n\n\n", "\n\n")
    with raises_naming(ValueError, "--output", tmp_path / "out"):
        run_here(tool, f"--model_dir={made[0]}", f"--tagged={tmp_path / 'out'}", f"--output={tmp_path / 'out'}")
    with raises_naming(ValueError, source, 4, 1):
        run_here(tool, *arguments, "--strict")


def test_a_space_in_text_and_its_sign_in_files_are_tagged_alike(text_tagger, eager):
    """In a vocabulary that has the sign, and in one that has not."""
    for text in ("在 南京 了", "在\t南京了"):
        tags = [found.tags for found in text_tagger.tag([text, re.sub("[ \t]", "␣", text)])]
        assert tags[0] == tags[1]
    spaced = [text_tagger.encoder.encode(text) for text in (" 南", "␣南")]
    for one, other in zip(*spaced, strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_report_goes_to_the_standard_output_and_lists_what_is_wrong(
    made, tool, text_tagger, tmp_path, capsys, eager
):
    sentences = ["我在南京了", "他叫北京了", "了"]
    tags = [found.tags for found in text_tagger.tag(sentences)]
    changed = [["S-PER" if tag == "O" else "O" for tag in tags[0]], *tags[1:]]
    pairs = [zip(*both, strict=True) for both in zip(sentences, changed, strict=True)]
    rows = ["".join(f"{c}\t{tag}\n" for c, tag in pair) for pair in pairs]
    path = write_text(tmp_path / "tagged", "# text = 1\n" + "\n".join(rows))
    arguments = [f"--model_dir={made[0]}", f"--tagged={path}"]
    run_here(tool, *arguments, "--list_wrong")
    out, err = capsys.readouterr()
    report, listed = out.rsplit("\n\n", 1)
    assert report.startswith("kind") and "expected / found" in report and mentions(err, 1)
    first, *rest = listed.splitlines()
    assert mentions(first, 1, 3) and rest[:2] == [f"{path}, line 2: 我在南京了", "  expected  PER  我  (0-1)"]
    run_here(tool, *arguments, "--format=conll")
    written, err = capsys.readouterr()
    assert written.startswith("我 ") and report in err
    for flag in ("--list_wrong", "--tag_column=2", "--nocomments"):
        with raises_naming(ValueError, f"--{flag.split('=')[0].removeprefix('--').removeprefix('no')}"):
            run_here(tool, f"--model_dir={made[0]}", f"--input={path}", flag)


def test_tagged_files_are_read_in_the_columns_of_the_run(made, tool, tmp_path):
    """Those that it was trained on, others that flags name, and what the program itself writes."""
    config = RunFolder(made[0]).read_config()
    rows = [("在", "O"), ("␣", "O"), ("南", "S-LOC")]
    shown = TaggedLine("在 南", list("在\t南"), [tag for _, tag in rows], [])
    written = "".join(f"{c} {tag}\n" for c, tag in rows)
    numbered = "".join(f"{i}\t{c}\t{tag}\t_\n" for i, (c, tag) in enumerate(rows))
    swapped = "".join(f"{tag} {c}\n" for c, tag in rows)
    for columns, content, flags, out in (
        ((None, None), written, [], written),
        ((2, 3), numbered, [], written),
        ((2, 3), written, [], written),
        ((2, 3), f"{swapped}\n", ["--token_column=-1", "--tag_column=1"], written),
        ((2, 1), swapped, [], swapped),
        ((-1, 1), swapped, [], swapped),
    ):
        data = {**config["data"], **dict(zip(("token_column", "tag_column"), columns, strict=True))}
        folder = types.SimpleNamespace(read_config=lambda data=data: {**config, "data": data})
        path = write_text(tmp_path / "tagged", content)
        for name in tool.FLAGS:
            tool.FLAGS[name].unparse()
        tool.FLAGS(["tag.py", f"--model_dir={made[0]}", f"--tagged={path}", "--format=conll", *flags])
        (sentence,) = tool.read_tagged(folder)
        assert list(zip(sentence.tokens, sentence.tags, strict=True)) == rows
        assert tool.text_function(folder)(shown) == f"{out}\n"
    path = write_text(tmp_path / "tagged", written)
    for flag, name, column in (  # the file has two columns
        ("--tag_column=7", "tag_column", 7),
        ("--token_column=7", "token_column", 7),
        ("--tag_column=1", "tag_column", 1),
        ("--token_column=2", "tag_column", -1),
    ):
        with raises_parameter(name, column):
            run_here(tool, f"--model_dir={made[0]}", f"--tagged={path}", flag)


def test_entities_of_tagged_tokens_stand_where_these_do(text_tagger):
    """Tokens that a line of text would not have: of several characters, or with a space within."""
    tokens = ["2010年", "在", "南", "京", "了"]
    found = TaggedText(["O", "O", "B-LOC", "E-LOC", "O"], [Entity("LOC", 2, 4, 0.9)])
    (entity,) = text_tagger.describe("".join(tokens), found, tokens)["entities"]
    assert (entity["start"], entity["end"], entity["text"]) == (6, 8, "南京")
    apart = [*tokens[:1], "1\xa00", *tokens[2:]]
    (entity,) = text_tagger.describe(" ".join(apart), found, apart)["entities"]
    assert (entity["start"], entity["end"], entity["text"]) == (10, 13, "南 京")


def test_a_byte_order_mark_is_no_part_of_the_first_line(made, tool, tmp_path, capsys):
    source = write_text(tmp_path / "in", "\ufeff我在南京了\n\ufeff\n")
    run_here(tool, f"--model_dir={made[0]}", f"--input={source}")
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["text"], second["text"]) == ("我在南京了", "\ufeff")


def test_a_closed_standard_input_is_one_clear_error(made, tool, monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    with raises_naming(ValueError, "--input"):
        run_here(tool, f"--model_dir={made[0]}")


@pytest.mark.slow
def test_sentences_are_tagged_as_they_come(made, tool, text_tagger, monkeypatch):
    lines = ["我在南京了", "他叫北京了", "好"]
    written = converse(monkeypatch, tool, [f"{line}\n".encode() for line in lines], f"--model_dir={made[0]}")
    tagged = [text_tagger.describe(*both) for both in zip(lines, text_tagger.tag(lines), strict=True)]
    assert [*map(json.loads, written)] == tagged


@pytest.mark.slow
def test_a_list_is_tagged_to_a_list_and_an_iterator_one_by_one(made, text_tagger):
    pipe, lines = txl_tf.pipeline(made[0]), ["我在南京了", "他叫北京了"]
    for line, found, (tags, entities) in zip(lines, pipe(lines), text_tagger.tag(lines), strict=True):
        assert (found.text, found.tokens, found.tags) == (line, list(line), tags)
        assert [(e["kind"], e["start"], e["end"]) for e in found.entities] == [entity[:3] for entity in entities]
        assert [e["text"] for e in found.entities] == [line[e["start"] : e["end"]] for e in found.entities]
    found = pipe.tag_lines(["好", None][i % 2] for i in range(10**9))
    assert next(found) == next(found) == pipe("好")


@SLOW
def test_train_ner_reads_its_flags(files, tmp_path):
    paths = [f"--{name}={path}" for name, path in files.items()]
    flags = "--model=flat --fusion=ff_two --nok_proj --d_model=16 --n_head=2 --d_inner=16 "
    flags += "--train_steps=4 --iterations=2 --warmup_steps=1"
    done = run_program(
        "tools/train_ner.py", f"--model_dir={tmp_path / 'run'}", *paths, *flags.split(), "--save_steps=2"
    )
    assert done.returncode == 0 and "precision" in done.stdout, done.stderr
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["model"]["fusion"] == "ff_two" and config["model"]["k_proj"] is False
    done = run_program("tools/train_ner.py", f"--model_dir={tmp_path / 'no'}", *paths, "--fusion=ff_two")
    assert done.returncode == 1 and mentions(done.stderr, "--fusion", "--model=tener")
    done = run_program("tools/train_ner.py", f"--model_dir={tmp_path / 'no'}", *paths, "--n_sentences=9")
    assert done.returncode == 1 and mentions(done.stderr, "--n_sentences", "--dataset=towns")
    no_bigrams = ["--nobigrams", "--d_bigram=9"]
    done = run_program("tools/train_ner.py", f"--model_dir={tmp_path / 'no'}", *paths, *no_bigrams)
    assert done.returncode == 1 and mentions(done.stderr, "--d_bigram", "bigrams")


def test_tables_of_scores_and_of_confusion():
    expected = [["B-PER", "I-PER", "O", "B-LOC"], ["O", "B-LOC", "I-LOC"]]
    found = [["B-PER", "I-PER", "O", "B-PER"], ["B-LOC", "O", "O"]]
    rows = score_table(found, expected)
    assert [(kind, *(round(x, 3) for x in scores), n) for kind, *scores, n in rows] == [
        ("LOC", 0, 0, 0, 2), ("PER", 0.5, 1, 0.667, 1), ("all", 0.333, 0.333, 0.333, 3),
    ]  # fmt: skip
    table = confusion(found, expected)
    none = "(none)"
    assert table == {("PER", "PER"): 1, ("LOC", "PER"): 1, ("LOC", none): 1, (none, "LOC"): 1}
    assert format_scores(rows).splitlines()[2].split() == ["PER", "50.00%", "100.00%", "66.67%", "1"]
    assert format_confusion(table).splitlines()[1].split() == ["LOC", ".", "1", "1"]


def test_tables_of_chinese_labels_line_up():
    expected = [["B-检查-项目", "I-检查-项目", "O", "B-药"], ["O", "B-药", "I-药"]]
    found = [["B-检查-项目", "I-检查-项目", "O", "O"], ["O", "B-药", "I-药"]]

    def width(text):
        return sum(2 if "一" <= c <= "鿿" else 1 for c in text)

    scores = format_scores(score_table(found, expected)).splitlines()
    assert {width(line) for line in scores} == {width(scores[0])} and scores[1].startswith("检查-项目  ")
    matrix = format_confusion(confusion(found, expected)).splitlines()
    assert {width(line) for line in matrix} == {width(matrix[0])}
    ends = {width(line[: line.index(mark) + len(mark)]) for line, mark in zip(matrix, ("检查-项目", "1"), strict=False)}
    assert len(ends) == 1 and width_of("e\u0301检\uff21\u200b") == 5


def test_sentences_that_were_tagged_wrongly_are_listed():
    tokens = [["Anna", "met", "Bob"], ["Oslo"], ["a", "b"]]
    expected = [["B-PER", "O", "B-PER"], ["B-LOC"], ["O", "O"]]
    found = [["B-PER", "O", "O"], ["B-PER"], ["O", "O"]]
    first, *listed = format_wrong(
        ["f, line 1", "f, line 5", "f, line 7"], tokens, found, expected, space=" "
    ).splitlines()
    assert mentions(first, 2, 3)
    assert listed == [
        "f, line 1: Anna met Bob",
        "  expected  PER  Bob  (2-3)",
        "f, line 5: Oslo",
        "  expected  LOC  Oslo  (0-1)",
        "  found     PER  Oslo  (0-1)",
    ]
    first, *single = format_wrong(["p"], [["a", "b"]], [["N", "V"]], [["N", "N"]], "none").splitlines()
    assert mentions(first, 1) and single == ["p: ab", "  expected  N  b  (1-2)", "  found     V  b  (1-2)"]


# ---------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "family, options, name, value, allowed",
    [
        ("tener", {"data": {"lexicon": "words"}}, "lexicon", "words", "left out"),
        ("flat", {"data": {"lexicon": None}}, "lexicon", None, "a file of words, a line each, jieba, or towns"),
        ("flat", {"data": {"lexicon": None, "token_level": "word"}}, "token_level", "word", ["char"]),
        ("tener", {"model": {"max_seq_len": 4}}, "max_seq_len", ANY, "at most 4"),
        (
            "tener",
            {"machine": MachineConfig(strategy="tpu")},
            "strategy",
            "tpu",
            ["auto", "one", "mirrored", "multi_worker"],
        ),
        ("tener", {"training": {"warm_start_path": "nowhere"}}, "checkpoint", "nowhere", ANY),
    ],
    ids=str,
)
def test_bad_input_is_refused_before_the_folder_has_a_run(tmp_path, files, family, options, name, value, allowed):
    with raises_parameter(name, value, allowed):
        train(tmp_path / "run", files, family, **options)
    assert not (tmp_path / "run" / "config.json").exists()


@pytest.mark.parametrize(
    "options, name, value",
    [({"data": {"train_path": None}}, "train_path", None), ({"model": {"n_head": 3}}, "d_model", 16)],
    ids=str,
)
def test_errors_of_data_and_layers_come_before_the_folder_has_a_run(tmp_path, files, options, name, value):
    with raises_parameter(name, value):
        train(tmp_path / "run", files, "tener", **options)
    assert not (tmp_path / "run" / "config.json").exists()


def test_a_long_sentence_is_named_by_its_line(tmp_path, files):
    with raises_naming(ParameterError, files["train_path"], "max_seq_len=4"):
        train(tmp_path / "run", files, "tener", model={"max_seq_len": 4})


def test_products_of_lstms_are_not_rounded_in_silence(tmp_path, files):
    settings = {"optimizer": OptimizerConfig(), "training": TaggerTrainingConfig()}
    machine = MachineConfig(matmul_precision="bfloat16")
    with raises_parameter("matmul_precision", "bfloat16", ["float32"]):
        train_run(
            tmp_path / "run",
            data=TaggedConfig(),
            model=BiLSTMTaggerConfig(n_layer=1, d_model=16),
            machine=machine,
            **settings,
        )


def test_a_run_goes_on_with_its_own_sentences_only(made, files, tmp_path):
    folder, _ = made
    text = Path(files["train_path"]).read_text()
    other = {**files, "train_path": write_text(tmp_path / "train", text.rsplit("\n\n", 1)[0])}
    with raises_naming(ValueError, folder):
        train(folder, other, folder.name, training=LEARNING)
    with raises_parameter("model_dir", str(folder)) as raised:
        train(folder, files, folder.name, training=LEARNING, model={"d_inner": 17})
    assert len(raised.value.differences) == 1 and mentions(raised.value.differences, "model.d_inner", 16, 17)


def test_a_run_of_an_earlier_version_goes_on_with_its_tags(tmp_path, files):
    """Its config.json names no columns. Tags that break their scheme as a rule stay what they were."""
    texts = {split: re.sub("[BMES]-", "I-", Path(files[f"{split}_path"]).read_text()) for split in ("train", "valid")}
    data = TaggedConfig(**{f"{split}_path": write_text(tmp_path / split, text) for split, text in texts.items()})
    fingerprints = [read_corpus(data, as_before=old).fingerprint("train") for old in (False, True)]
    assert fingerprints[0] != fingerprints[1]
    recorded = data.to_dict()
    for expected in fingerprints:
        run = TaggerRun.__new__(TaggerRun)
        run.folder = types.SimpleNamespace(
            steps=lambda: [3], has_config=lambda: True, read_config=lambda known=recorded: {"data": dict(known)}
        )
        run.data, run.origin = data, None
        assert run.open_corpus().fingerprint("train") == expected
        assert run.data_config() == recorded  # or the run would not be old any more
        recorded = {name: value for name, value in recorded.items() if name not in ColumnsConfig.names()}


@SLOW
def test_a_new_run_starts_from_another_with_its_labels_or_with_a_new_head(made, files, tmp_path, capsys):
    """Where the types of entities are known, the labels stay, and their scheme; else only the network is taken."""
    folder, _ = made
    config = RunFolder(folder).read_config()
    few = write_text(tmp_path / "few", re.sub(".-PER", "O", made_up(20, 5)))
    new = write_text(tmp_path / "new", Path(few).read_text().replace("LOC", "PLACE"))
    model = {name: value for name, value in config["model"].items() if name not in ("n_token", "labels")}
    options = {
        "family": folder.name,
        "model": {**model, "dropout": 0.2},
        "optimizer": {"learning_rate": 1e-9, "warmup_steps": 0},
    }
    training = {"train_steps": 2, "iterations": 2, "save_steps": 2, "init_from": str(folder)}
    before = read_checkpoint(RunFolder(folder).find_checkpoint())
    for path in (few, new):
        run_dir = tmp_path / f"run_{Path(path).name}"
        train(
            run_dir, {**files, "train_path": path, "valid_path": path, "test_path": None}, training=training, **options
        )
        after = read_checkpoint(run_dir / "ckpt-2")
        names = [name for name in after if name.startswith("weights/")]
        kept = {name for name in names if np.array_equal(after[name].shape, before[name].shape)}
        kept = {name for name in kept if np.allclose(after[name], before[name], atol=1e-6)}
        network = {name for name in names if name.startswith("weights/network")}
        labels = RunFolder(run_dir).read_config()["model"]["labels"]
        assert kept == (set(names) if path == few else network)
        assert (labels == config["model"]["labels"]) == (path == few)
    said = capsys.readouterr().out
    assert "dropout 0.1 -> 0.2\n" in said
    assert mentions(said, "dropout 0.1 -> 0.2", "labels 9 -> 5", "out_fc/", "crf/")
    wrong = {**files, "char_vectors": "x"} if folder.name == "tener" else {**files, "lexicon": "x"}
    with raises_naming((ValueError, FileNotFoundError), "x"):
        train(tmp_path / "no", wrong, training=training, **options)


def test_a_new_run_has_rows_for_new_symbols_and_another_lexicon(made, files, begun, tmp_path, capsys):
    """Without extend_vocab, a warning says how much is unknown. What is old keeps its weights."""
    folder, _ = made
    new = write_text(tmp_path / "new", made_up(20, 5).replace("我", "她").replace("看", "听"))
    data = {**files, "train_path": new, "valid_path": new, "test_path": None}
    if folder.name == "flat":
        word = "".join(read_tagged(new)[0].tokens[:2])
        data["lexicon"] = write_text(tmp_path / "more", "\n".join([*LEXICON, word]))
    model = RunFolder(folder).read_config()["model"]
    model = {name: value for name, value in model.items() if name not in ("n_token", "labels")}
    options = {"family": folder.name, "model": model, "training": {"init_from": str(folder)}}
    text = Path(new).read_text()
    share = (text.count("她") + text.count("听")) / text.count(" ")
    begun(tmp_path / "unknown", data, **options)
    assert mentions(capsys.readouterr().out, f"{share:.2%}", "<unk>")
    run, _ = begun(tmp_path / "run", data, **{**options, "training": {"init_from": str(folder), "extend_vocab": True}})
    said = capsys.readouterr().out
    assert mentions(said, "0.00%", "<unk>")
    old, longer = RunFolder(folder).load_vocabs(), run.corpus.vocabs
    assert longer[0].symbols[: len(old[0])] == old[0].symbols and longer[1].symbols[: len(old[1])] == old[1].symbols
    added = longer[0].symbols[len(old[0]) :]
    assert {"她", "听"} <= set(added)
    if folder.name == "flat":
        assert longer[2].symbols == [*LEXICON, word] and word in added and "of these have no row" not in said
    before, names = read_checkpoint(RunFolder(folder).find_checkpoint()), weights_by_name(run.model)
    assert names["network/embedding"].shape[0] == len(longer[0])
    for name, variable in names.items():
        old_rows = before[f"weights/{name}"]
        np.testing.assert_array_equal(variable.numpy()[: len(old_rows)], old_rows, err_msg=name)


def test_new_symbols_of_another_text_start_from_vectors(made, files, begun, tmp_path, capsys):
    """Old rows keep their weights, and new ones without a vector are random. The same command continues."""
    folder, _ = made
    new = write_text(tmp_path / "new", made_up(20, 5).replace("我", "她").replace("看", "听"))
    vectors = write_text(tmp_path / "vectors", "在 9 9 9 9 9 9 9 9\n她 1 2 3 4 5 6 7 8\n")
    data = {**files, "train_path": new, "valid_path": new, "test_path": None, "char_vectors": vectors}
    model = RunFolder(folder).read_config()["model"]
    model = {name: value for name, value in model.items() if name not in ("n_token", "labels")}
    training = {"init_from": str(folder), "extend_vocab": True}
    run, _ = begun(tmp_path / "run", data, family=folder.name, model=model, training=training)
    vocab, table = run.corpus.vocab, run.model.network.embedding.numpy()
    before = read_checkpoint(RunFolder(folder).find_checkpoint())["weights/network/embedding"]
    np.testing.assert_array_equal(table[: len(before)], before)
    np.testing.assert_array_equal(table[vocab.ids["她"]], range(1, 9))
    assert 0 < np.abs(table[vocab.ids["听"]]).max() < 1
    assert mentions(capsys.readouterr().out, f"init_from={folder}")
    run.checkpoints.save()
    again, _ = begun(tmp_path / "run", data, family=folder.name, model=model, training=training)
    np.testing.assert_array_equal(again.model.network.embedding.numpy(), table)
    for path, extend, allowed in (
        (vectors, False, "left out"),
        (write_text(tmp_path / "narrow", "她 1 2\n"), True, "have 8 numbers"),
    ):
        with pytest.raises(ParameterError) as caught:
            training = {"init_from": str(folder), "extend_vocab": extend}
            begun(tmp_path / "no", {**data, "char_vectors": path}, family=folder.name, model=model, training=training)
        assert (caught.value.name, caught.value.value) == ("char_vectors", path) and allowed in caught.value.allowed


def test_the_lexicon_of_a_served_model_can_be_another(made, tmp_path, monkeypatch, capsys):
    folder, words = made[0], write_text(tmp_path / "words", "在南\n长江\n长江 北京\n")
    given = []
    monkeypatch.setattr(txl_tf, "export_saved_model", lambda model, path, vocab, **options: given.append(vocab))
    arguments = [f"--model_dir={folder}", f"--output={tmp_path / 'served'}"]
    for exporter in program("tools/export_saved_model.py"):
        if folder.name != "flat":
            with pytest.raises(ParameterError) as caught:
                run_here(exporter, *arguments, f"--lexicon={words}")
            assert (caught.value.name, caught.value.value) == ("lexicon", words)
            continue
        run_here(exporter, *arguments)
        run_here(exporter, *arguments, f"--lexicon={words}")
        with pytest.raises(ParameterError) as caught:
            run_here(exporter, *arguments, "--skip_short_words")
        assert caught.value.name == "skip_short_words"
        assert [vocab[2].symbols for vocab in given] == [LEXICON, txl_tf.Lexicon.load(words).words]
        out, err = capsys.readouterr()
        assert out == f"{tmp_path / 'served' / '1'}\n" * 2 and f"lexicon {words}: 3 words" in err


def test_windows_are_as_long_as_the_longest_training_sentence(made, files, caplog):
    folder, longest = made[0], max(len(s.tokens) for s in read_tagged(files["train_path"]))
    config = RunFolder(folder).read_config()
    assert config["training"]["longest_sentence"] == longest < config["model"]["max_seq_len"]
    assert [config["training"][name] for name in ("usual_sentences", "most_sentences")] == [1, 1]
    pipe, long = txl_tf.pipeline(folder), "我在南京了。" * 9
    assert (pipe.tagger.window, txl_tf.pipeline(folder, max_seq_len=7).tagger.window) == (longest, 7)
    wide = txl_tf.pipeline(folder, max_seq_len=60)
    assert wide.tagger.window == wide.model.network.max_seq_len == 60
    with caplog.at_level("WARNING", "txl_tf"):
        pipe.warn_of_length("好" * longest, "text, line 1", False)
        pipe.warn_of_length(long, "text, line 2", True)
        pipe.warn_of_length(long, "text, line 3", False)
        pipe.warn_of_length(long, "text, line 4", False)
    (message,) = caplog.messages
    assert mentions(message, "text", 3, 54, longest)


def test_lines_of_several_sentences_are_cut_and_this_is_said_once(made, text_tagger, monkeypatch, caplog, eager):
    """Training sentences have one end; a pipeline with a window of its own reads lines as a whole."""
    folder, text = made[0], "我在南京了。他叫北京了！"
    pipe = txl_tf.pipeline(folder)
    monkeypatch.setattr(pipe.tagger, "tag", text_tagger.tag)  # whose graphs are there
    with caplog.at_level("WARNING", "txl_tf"):
        cut, again = pipe.tag_lines([text, text])
        parts = [*pipe.tag_lines(["我在南京了。", "他叫北京了！"])]
    assert cut == again and cut.tags == parts[0].tags + parts[1].tags
    (message,) = caplog.messages
    assert mentions(message, "text", 1, 2, "99%")
    caplog.clear()
    (whole,) = pipe.tag_lines([text], split_sentences=False)
    assert whole.tags == text_tagger.tag([text])[0].tags and not caplog.messages
    assert txl_tf.pipeline(folder, max_seq_len=30).tagger.pieces(text) == [text]


@SLOW
def test_lines_may_be_split_into_sentences(made, tool, tmp_path, capsys):
    folder, long = made[0], "我在南京了。" * 9
    pipe, source = txl_tf.pipeline(folder), write_text(tmp_path / "in", f"好\n{long}\n")
    (once,), (split,) = pipe.tag_lines(["我在南京了。"]), pipe.tag_lines([long], split_sentences=True)
    assert split.tags == once.tags * 9
    assert [(e["start"], e["text"]) for e in split.entities] == [
        (e["start"] + 6 * i, e["text"]) for i in range(9) for e in once.entities
    ]
    for flags, entities in ((["--max_seq_len=9"], None), (["--split_sentences"], split.entities)):
        capsys.readouterr()
        run_here(tool, f"--model_dir={folder}", f"--input={source}", *flags)
        out, err = capsys.readouterr()
        rows = [json.loads(line) for line in out.splitlines()]
        assert [row["text"] for row in rows] == ["好", long] and entities in (None, rows[1]["entities"])
        assert (mentions(err, source, 2, 54)) == (entities is None)


def test_runs_that_do_not_record_their_longest_sentence_take_it_from_the_file(made, files, tmp_path, caplog):
    run = shutil.copytree(made[0], tmp_path / "run")
    longest = max(len(s.tokens) for s in read_tagged(files["train_path"]))
    config = json.loads((run / "config.json").read_text())
    del config["checksum"], config["training"]["longest_sentence"], config["training"]["most_sentences"]
    for path, window in ((files["train_path"], longest), ("gone", MODEL["max_seq_len"])):
        config["data"]["train_path"] = path
        (run / "config.json").write_text(json.dumps(config))
        with caplog.at_level("INFO", "txl_tf"):
            assert txl_tf.pipeline(run).tagger.window == window
    assert mentions(caplog.messages[-2], files["train_path"], longest)
    assert mentions(caplog.messages[-1], 30, "max_seq_len")
    config["training"]["longest_sentence"] = 9  # of a version that recorded this alone
    (run / "config.json").write_text(json.dumps(config))
    text = "好。" * 4
    assert line_sizes(RunFolder(run)) == (9, 1, None) and txl_tf.pipeline(run).tagger.pieces(text) == [text]


@pytest.mark.parametrize("given", [{"given": ["长江"]}, {"skip_short_words": True}], ids=str)
def test_a_model_without_words_takes_no_option_of_a_lexicon(given):
    folder: Any = types.SimpleNamespace(family=TENER)
    vocabs: Any = [None, None]  # of characters and bigrams
    (value,) = given.values()
    with raises_parameter("lexicon" if "given" in given else "skip_short_words", value):
        with_lexicon(folder, vocabs, **given)


def test_the_lexicon_of_a_run_can_be_another(made, tmp_path, capsys):
    folder, words = made[0], write_text(tmp_path / "words", "在南\n长江\n长江 北京\n")
    lines = ["我在南京了", "长江 北京"]
    if folder.name != "flat":
        with pytest.raises(ParameterError) as caught:
            txl_tf.pipeline(folder, lexicon=words)
        assert (caught.value.name, caught.value.value) == ("lexicon", words)
        return
    pipe = txl_tf.pipeline(folder, lexicon=words)
    assert mentions(capsys.readouterr().out, f"lexicon {words}", 3, 1, "<unk>")
    vocab = pipe.vocabs[0]
    ids = [encoded.ids.tolist() for encoded in pipe.tagger.encode(lines)]
    assert ids[0][5:] == [1] and ids[1][5:] == [vocab.ids["长江"], 1]
    for lexicon in (["在南", "长江", "长江 北京"], txl_tf.Lexicon(["在南", "长江", "长江 北京"])):
        other = txl_tf.pipeline(folder, lexicon=lexicon).tagger
        assert [encoded.ids.tolist() for encoded in other.encode(lines)] == ids
    with raises_naming(ValueError, 1, "'桥'"):
        txl_tf.pipeline(folder, lexicon=write_text(tmp_path / "short", "桥\n北京\n"))
    short = txl_tf.pipeline(folder, lexicon=str(tmp_path / "short"), skip_short_words=True)
    assert short.vocabs[2].symbols == ["北京"]
    with pytest.raises(ParameterError):
        txl_tf.pipeline(folder, skip_short_words=True)


@SLOW
def test_tag_takes_another_lexicon(made, tool, tmp_path, capsys):
    words, lines = write_text(tmp_path / "words", "在南\n长江\n长江 北京\n"), ["我在南京了", "长江 北京"]
    arguments = [f"--model_dir={made[0]}", f"--input={write_text(tmp_path / 'in', chr(10).join(lines))}"]
    if Path(made[0]).name != "flat":
        with pytest.raises(ParameterError):
            run_here(tool, *arguments, f"--lexicon={words}")
        return
    expected = txl_tf.pipeline(made[0], lexicon=words)(lines)
    capsys.readouterr()
    run_here(tool, *arguments, f"--lexicon={words}")
    out, err = capsys.readouterr()
    assert [json.loads(line)["entities"] for line in out.splitlines()] == [line.entities for line in expected]
    assert mentions(err, words, 3, 1)


def test_folders_of_other_families_say_what_they_hold(made, tmp_path):
    folder, _ = made
    with raises_parameter("family", folder.name, ["transformer"]):
        RunFolder(folder, "encoder_decoder").read_config()
    (tmp_path / "config.json").write_text('{"data": {}, "model": {}, "vocab": {}}')
    with raises_parameter("family", "transformer_xl"):
        RunFolder(tmp_path, "tagger").read_config()


def test_sentences_that_cannot_be_compared_are_named(made, tmp_path):
    tagger, _ = txl_tf.load_run(made[0])
    path = write_text(tmp_path / "test", "我 O\n京 S-ORG\n")
    with raises_naming(ValueError, "test", 2, "'S-ORG'", "LOC", "PER"):
        read_tagged_as(path, tagger.labels)


@SLOW
@pytest.mark.parametrize(
    "flags, facts",
    [
        (["--input=nowhere.txt"], ["nowhere.txt"]),
        (["--input=a", "--tagged=b"], ["--tagged", "--input"]),
        (["--tagged="], ["--tagged"]),
        (["--ckpt_path=ckpt-3"], ["ckpt-3"]),
    ],
    ids=str,
)
def test_bad_flags_are_one_line(made, flags, facts):
    done = run_program("tools/tag.py", f"--model_dir={made[0]}", *flags, input="a\n")
    assert done.returncode == 1 and mentions(done.stderr, *facts) and "Traceback" not in done.stderr
