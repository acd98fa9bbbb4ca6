"""A new run that starts from another one: its model, its vocabulary, its weights; and what cannot start from it."""

import contextlib
import json
import shutil

import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    TEXT,
    TINY_RUN,
    assert_variables_equal,
    log_rows,
    make_run,
    mentions,
    program,
    raises_parameter,
    read_checkpoint,
    run_here,
    steps_of,
    train_run,
    write_splits,
)

from txl_tf.config import ModelConfig, TrainingConfig
from txl_tf.data.text.corpus import build_corpus, prepare
from txl_tf.data.vocabulary import Vocab
from txl_tf.errors import ParameterError
from txl_tf.runs import train
from txl_tf.runs.checkpoints import RunCheckpoints, average_checkpoints
from txl_tf.runs.evaluate import evaluate_run
from txl_tf.runs.folder import RunFolder
from txl_tf.runs.origin import Origin
from txl_tf.runs.setup import open_corpus, open_corpus_of_run
from txl_tf.runs.train import Run
from txl_tf.runs.weights import weights_by_name

OTHER = "and the cat, so the mat, and so on\n" * 60  # other text of the same symbols, in another order
STEPS = {"train_steps": 4, "iterations": 2, "save_steps": 2}
SLOWLY = {"optimizer": {"learning_rate": 1e-9}, "model": {"dropout": 0.0, "mem_len": 4}}


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "other.txt"
    path.write_text(OTHER)
    return str(path)


def tune(run_dir, text, source, training=(), **changes):
    return train_run(run_dir, text, training={**STEPS, "init_from": str(source), **dict(training)}, **changes)


@pytest.mark.slow
def test_a_run_starts_from_the_weights_and_goes_on_without_the_other_run(trained_run, run_dir, text, tmp_path, capsys):
    """With a fresh optimizer and from step 0; then bit for bit as without a stop, and the other folder may be gone."""
    source = tmp_path / "source"
    shutil.copytree(trained_run[0], source)
    tune(run_dir, text, source, **SLOWLY)
    said = capsys.readouterr().out
    assert mentions(said, "init_from", source, 12, "dropout 0.1 -> 0.0", "mem_len 8 -> 4")
    found, started, after = (
        read_checkpoint(path) for path in (run_dir / "ckpt-4", source / "ckpt-12", run_dir / "ckpt-2")
    )
    for name in (name for name in after if name.startswith("weights/")):
        np.testing.assert_allclose(after[name], started[name], atol=1e-6, err_msg=name)
    assert [int(row["step"]) for row in log_rows(run_dir)] == [2, 4]
    folder = RunFolder(run_dir)
    assert folder.read_config()["init_from"] == {"model_dir": str(source), "checkpoint": "ckpt-12"}
    symbols = folder.load_vocab().symbols
    assert symbols == RunFolder(source).load_vocab().symbols != build_corpus("text", text).vocab.symbols
    for path in run_dir.glob("ckpt-4.*"):
        path.unlink()
    shutil.rmtree(source)
    results = tune(run_dir, text, source, **SLOWLY)
    assert mentions(capsys.readouterr().out, f"{run_dir}/ckpt-2")
    assert_variables_equal(read_checkpoint(run_dir / "ckpt-4"), found)
    assert evaluate_run(run_dir)["valid"] == pytest.approx(results["valid"], rel=1e-5)
    average_checkpoints(str(run_dir), str(tmp_path / "mean"), num_last_checkpoints=2)
    assert open_corpus_of_run(RunFolder(tmp_path / "mean")).vocab.symbols == symbols
    settings = Origin(folder, source).settings
    assert settings["model"] == folder.read_config()["model"] and settings["training"]["train_steps"] == 4


@pytest.mark.slow
def test_a_first_start_that_left_no_checkpoint_starts_again(trained_run, run_dir, text, tmp_path, monkeypatch, capsys):
    """The first validation writes `best` before the first checkpoint: a kill between them leaves `best` alone."""

    class Killed(BaseException):
        pass

    def killed(*args, **kwargs):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(RunCheckpoints, "save", killed)
        with pytest.raises(Killed):
            tune(run_dir, text, trained_run[0])
    folder = RunFolder(run_dir)
    assert folder.find_best()["step"] == 2 and not folder.steps()
    tune(run_dir, text, trained_run[0])
    assert capsys.readouterr().out.count("init_from") == 2
    tune(tmp_path / "at_once", text, trained_run[0])
    found, expected = (read_checkpoint(path / "ckpt-4") for path in (run_dir, tmp_path / "at_once"))
    assert all(np.array_equal(array, expected[name]) for name, array in found.items())


def test_all_sizes_of_batches_are_the_other_run_s(trained_run, run_dir):
    taken = Origin(RunFolder(run_dir), trained_run[0]).settings["training"]
    expected = {**TINY_RUN["training"], **TINY_RUN["evaluation"]}
    sizes = ("tgt_len", "train_batch_size", "eval_batch_size")
    assert {name: taken[name] for name in sizes} == {name: expected[name] for name in sizes}


def test_the_folder_must_be_another_and_its_origin_stays(trained_run, run_dir, text, text_file):
    source = trained_run[0]
    with raises_parameter("model_dir", str(source)):
        tune(source, text, f"{source}/../{source.name}")
    with raises_parameter("init_from", str(run_dir / "nowhere"), "the folder of a run"):
        tune(run_dir, text, run_dir / "nowhere")
    assert not run_dir.exists()
    with raises_parameter("model_dir", str(source), "a new folder") as raised:
        tune(source, text_file, run_dir)
    assert mentions(str(raised.value), source, "init_from")
    shutil.copytree(source, run_dir)
    config = json.loads((run_dir / "config.json").read_text())
    del config["checksum"]
    config["init_from"] = {"model_dir": str(source), "checkpoint": "ckpt-12"}
    (run_dir / "config.json").write_text(json.dumps(config))
    with raises_parameter("init_from", None, [str(source)]):
        train_run(run_dir, text_file)
    with raises_parameter("model_dir", str(run_dir), "a new folder") as raised:
        tune(run_dir, text, "elsewhere")
    assert mentions(str(raised.value), source, "init_from=elsewhere")


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"n_layer": 2}},
        {"model": {"untie_r": True}},
        {"model": {"n_head": 4, "d_head": 4}},
        {"data": {"level": "word"}},
        {"data": {"min_freq": 2}},
        {"data": {"cutoffs": [3]}},
        {"data": {"documents": True}},
    ],
)
def test_what_does_not_fit_is_one_error_before_the_folder_has_a_run(trained_run, run_dir, text, changes):
    ((name, value), *_), *_ = [[*values.items()] for values in changes.values()]
    with raises_parameter(name, value):
        tune(run_dir, text, trained_run[0], **changes)
    assert not (run_dir / "config.json").exists()


def test_symbols_that_the_vocabulary_lacks_are_an_error_that_says_what_to_do(run_dir, tmp_path):
    vocab = Vocab(level="char")
    vocab.count("the catnmosd,.\n")
    vocab.build()
    make_run(tmp_path / "source", vocab)
    (tmp_path / "new.txt").write_text(f"the dog\n{TEXT}")
    model = RunFolder(tmp_path / "source").read_config()["model"]
    with raises_parameter("init_from", str(tmp_path / "source")) as raised:
        tune(run_dir, str(tmp_path / "new.txt"), tmp_path / "source", model=model)
    assert mentions(str(raised.value), 1, "'g'")


LONGER = {"extend_vocab": True, "train_steps": 1, "iterations": 1, "save_steps": 1, "tgt_len": 8}


@pytest.fixture
def extend(tmp_path, run_dir):
    """Starts a run of a longer text from one of `TEXT`, at a level; returns the vocabulary before and the run."""

    def extend(level, **data):
        special = {"special": ["<eos>", "<unk>"], "eos": "<eos>", "unk": "<unk>"} if level == "word" else {}
        vocab = Vocab(level=level, **special, raw_text=False)
        vocab.count(TEXT)
        vocab.build()
        if not (tmp_path / "source").exists():
            make_run(tmp_path / "source", vocab)
        text = tmp_path / "new.txt"
        text.write_text("the dog! sat on the mat,\n" * 40 + "q!\n" * 5 + TEXT[:180])
        changes = {"data": {"level": level, **data}, "optimizer": {"learning_rate": 1e-9, "warmup_steps": 0}}
        changes["model"] = {**RunFolder(tmp_path / "source").read_config()["model"], "n_token": None}
        return vocab, tune(run_dir, str(text), tmp_path / "source", LONGER, **changes)

    return extend


@pytest.mark.parametrize(
    "level, options, added",
    [("char", {}, ["!", "g", "q"]), ("word", {}, ["dog!", "q!"]), ("word", {"min_freq": 9}, ["dog!"])],
)
def test_a_vocabulary_is_extended_by_what_is_new_in_the_text(
    tmp_path, extend, monkeypatch, capsys, level, options, added
):
    monkeypatch.setattr(Run, "train", lambda run, state: run)
    vocab, run = extend(level, **options)
    assert mentions(capsys.readouterr().out, "extend_vocab", len(added), len(vocab))
    (longer,), n = run.corpus.vocabs, len(vocab)
    assert longer.symbols[:n] == vocab.symbols and sorted(longer.symbols[n:]) == added
    unknown = np.mean(np.concatenate([*run.corpus.splits.values()]) == longer.ids.get("<unk>", -1))
    assert (unknown > 0) == bool(options)
    before, weights = read_checkpoint(tmp_path / "source/ckpt-1"), weights_by_name(run.model)
    for name, variable in weights.items():
        array = before[f"weights/{name}"]
        np.testing.assert_array_equal(variable.numpy()[: len(array)], array, err_msg=name)
    table = weights["transformer/adaptive_embed/lookup_table"].numpy()
    assert len(table) == n + len(added) and np.all(table[n:].std(1) > 0)


@pytest.mark.slow
def test_an_extended_run_goes_on_and_is_evaluated_in_its_own_vocabulary(run_dir, extend, capsys):
    vocab, results = extend("word", min_freq=9)
    symbols = RunFolder(run_dir).load_vocab().symbols
    assert symbols == [*vocab.symbols, "dog!"]
    assert evaluate_run(run_dir)["valid"] == pytest.approx(results["valid"], rel=1e-5)
    capsys.readouterr()
    extend("word", min_freq=9)
    said = capsys.readouterr().out
    assert not steps_of(said) and "extend_vocab" not in said
    assert RunFolder(run_dir).load_vocab().symbols == symbols


def test_levels_with_a_fixed_number_of_symbols_are_not_extended(run_dir, text, tmp_path):
    vocab = Vocab(level="byte", raw_text=False)
    vocab.build()
    make_run(tmp_path / "source", vocab)
    with pytest.raises(ParameterError) as caught:
        tune(run_dir, text, tmp_path / "source", {"extend_vocab": True}, data={"level": "byte"},
             model=RunFolder(tmp_path / "source").read_config()["model"])  # fmt: skip
    assert (caught.value.name, caught.value.allowed) == ("extend_vocab", "left out at level byte")


@pytest.mark.parametrize("share, level", [(0.04, "INFO"), (0.06, "WARNING")])
def test_much_unknown_text_is_a_warning(trained_run, run_dir, caplog, share, level):
    origin = Origin(RunFolder(run_dir), trained_run[0])
    with caplog.at_level("INFO", "txl_tf"):
        origin.log_unknown({"characters": (share * 1000, 1000), "bigrams": (500, 1000)}, "<unk>", ["characters"])
    (record,) = caplog.records
    assert record.levelname == level
    assert mentions(record.getMessage(), f"{share:.2%}", "50.00%", "<unk>")


def test_a_prepared_text_needs_the_same_vocabulary(trained_run, run_dir, text, tmp_path):
    data = {"data_dir": str(tmp_path / "other"), "dataset": None, "data_path": None}
    prepare(tmp_path / "other", "text", text)
    with raises_parameter("vocab") as raised:
        tune(run_dir, None, trained_run[0], data=data)
    assert mentions(str(raised.value), f"vocab_path={trained_run[0]}")


# ---------------------------------------------------------------------------------------------------------- train.py


@pytest.fixture
def settings_of():
    """Of a command line of train.py: the group of the model, and the settings for flags that are not given."""
    with contextlib.closing(program("train.py")) as loaded:
        train_py = next(loaded)

        def settings_of(run_dir, *line):
            train_py.FLAGS.unparse_flags()
            train_py.FLAGS(["train.py", f"--model_dir={run_dir}", *line])
            group, settings = train_py.settings_of(RunFolder(run_dir))
            training = TrainingConfig(**train_py.completed(TrainingConfig, settings["training"]))
            instead = train_py.model_defaults(group, settings["model"])
            model = train_py.config_of(group, instead, leave_out=train_py.FROM_TEXT)
            optimizer = train_py.optimizer_config(training, settings["training"])
            return train_py.data_arguments(settings["data"]), model, training, optimizer

        yield settings_of


def test_train_py_takes_the_model_from_the_run_and_the_steps_from_the_text(trained_run, run_dir, text, settings_of):
    line = [f"--init_from={trained_run[0]}", f"--data_path={text}", "--dropout=0.2"]
    data, model, training, optimizer = settings_of(run_dir, *line)
    sizes = {**TINY_RUN["model"], "dropout": 0.2}
    assert {name: getattr(model, name) for name in sizes} == sizes and data["level"] == "char"
    assert (training.tgt_len, training.train_batch_size) == (8, 4)
    assert training.train_steps == 100 * (3 * len(OTHER) // 32 // 100) and optimizer.warmup_steps == 10
    _, _, training, optimizer = settings_of(run_dir, *line, "--train_steps=5000")
    assert (training.train_steps, training.save_steps, optimizer.warmup_steps) == (5000, 1250, 500)
    with raises_parameter("preset", "tiny"):
        settings_of(run_dir, *line, "--preset=tiny")


def test_train_py_refuses_another_distribution_of_initial_weights(trained_run, run_dir, text, monkeypatch):
    got = {}
    monkeypatch.setattr(train, "train_run", lambda folder, **settings: got.update(settings))
    line = [f"--model_dir={run_dir}", f"--init_from={trained_run[0]}", f"--data_path={text}", "--init_std=0.5"]
    for tool in program("train.py"):
        for flags, name, value in (([], "init_std", 0.5), (["--init=uniform"], "init", "uniform")):
            with raises_parameter(name, value):
                run_here(tool, *line, *flags)
        run_here(tool, *line, "--extend_vocab")  # the rows of new symbols are random
    assert got["model"].init_std == 0.5


def test_train_py_reads_a_paper_dataset_at_the_level_of_the_run(run_dir, tmp_path, settings_of):
    data_path = write_splits(tmp_path, "A a b\n" * 9, "B\n", "b\n")
    made = build_corpus("ptb", data_path)
    make_run(tmp_path / "words", made.vocab)
    line = [f"--init_from={tmp_path / 'words'}", "--dataset=ptb", f"--data_path={data_path}"]
    data, *_ = settings_of(run_dir, *line)
    assert (data["level"], data["lower_case"]) == ("word", True)  # as in the vocabulary of the run
    assert open_corpus(data, made.vocab).splits["train"].tolist() == made.splits["train"].tolist()
    with raises_parameter("level", "byte"):
        settings_of(run_dir, *line, "--level=byte")
    data, *_ = settings_of(run_dir, *line[1:], "--level=byte")
    with raises_parameter("level", "byte", "left out with dataset=ptb"):
        open_corpus(data)


def test_own_text_takes_a_preset_that_its_size_and_the_machine_decide(run_dir, text, settings_of, capsys, monkeypatch):
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: [])
    monkeypatch.setattr("txl_tf.training.threads.cores", lambda: 2)
    _, model, training, optimizer = settings_of(run_dir, f"--data_path={text}", "--dropatt=0.3", "--train_steps=15")
    assert (model.n_layer, model.d_model, model.dropatt, model.mem_len) == (4, 192, 0.3, 96)
    assert (training.tgt_len, training.train_batch_size, training.train_steps) == (96, 2, 15)
    assert (training.save_steps, optimizer.learning_rate, optimizer.warmup_steps) == (3, 2e-3, 3)
    (preset,) = capsys.readouterr().out.splitlines()
    assert mentions(preset, "tiny", "1.9 M", "2 kB", "2 cores", "--preset=base", "13.5 M")
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: ["a GPU"])
    assert settings_of(run_dir, f"--data_path={text}", "--preset=small")[1].d_model == 256
    _, model, training, optimizer = settings_of(run_dir, f"--data_path={text}", "--n_layer=2", "--d_inner=60")
    assert (model.n_layer, model.d_inner, model.d_model, model.untie_r) == (2, 60, 192, True)
    assert (training.tgt_len, training.train_steps, optimizer.warmup_steps) == (96, 100, 20)
    said = capsys.readouterr().out.splitlines()[-1]
    assert mentions(said, "tiny", "0.4") and "100 steps" in said and "n_layer=2, d_inner=60" in said
    as_before = (
        f"--data_path={text} --preset=base",
        "--dataset=pydoc",
        "--data_dir=x",
    )
    for line in as_before:
        _, model, training, optimizer = settings_of(run_dir, *line.split())
        assert (model.d_model, model.mem_len, training.train_steps) == (500, 70, 100000), line
        assert optimizer.warmup_steps == 0
        assert "100,000 steps" in capsys.readouterr().out  # never in silence


def test_a_run_that_is_there_keeps_its_settings(trained_run, settings_of, capsys):
    """Without a word of sizes, whatever they are."""
    config = RunFolder(trained_run[0]).read_config()
    line = [f"--data_path={config['data']['data_path']}"]
    _, model, training, optimizer = settings_of(trained_run[0], *line)
    assert model == ModelConfig(**{**config["model"], "cutoffs": ()})  # which the text decides
    assert (training.train_steps, training.save_steps, optimizer.warmup_steps) == (12, 6, 2)
    assert capsys.readouterr().out == ""
    with raises_parameter("preset", "tiny"):  # whose sizes are other ones
        settings_of(trained_run[0], *line, "--preset=tiny")


def test_a_warm_up_that_was_given_is_an_error_that_names_both(run_dir, text):
    with raises_parameter("warmup_steps", 9, limit="[0, 4)"):
        train_run(run_dir, text, training=STEPS, optimizer={"warmup_steps": 9})
