"""The folder of a run: what `load_run` makes of it, what is new, best and latest in it, and errors that name it."""

import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    SMALL,
    TEXT,
    assert_variables_equal,
    full_disk,
    make_run,
    mentions,
    raises_naming,
    raises_parameter,
    read_checkpoint,
    word_vocab,
    write_text,
)

import txl_tf
from txl_tf.config import EvaluationConfig
from txl_tf.convert.original import run_to_tf1
from txl_tf.files import write_json
from txl_tf.runs.checkpoints import average_checkpoints
from txl_tf.runs.evaluate import evaluate_run
from txl_tf.runs.folder import RunFolder, check_spares_runs
from txl_tf.runs.same_run import check_same_config
from txl_tf.runs.setup import check_token_nll
from txl_tf.runs.weights import CheckpointGone, CheckpointReader, MisfitError, delete_checkpoint, load_weights
from txl_tf.serving.export import check_new_folder

MODEL = {**SMALL, "mem_len": 4}


@pytest.fixture
def made(small_lm, run_dir):
    """A folder that `create` wrote, and its model."""
    lm = small_lm()
    folder = RunFolder(run_dir)
    folder.create({"dataset": "text"}, MODEL, [word_vocab()], lm, step=7)
    return folder, lm


def weights_of(folder, name):
    """The weights in a checkpoint of a run, under the original's names."""
    arrays = read_checkpoint(folder / name).items()
    return {key.removeprefix("weights/"): array for key, array in arrays if key.startswith("weights/")}


# --------------------------------------------------------------------------------------------------- a trained run


@pytest.mark.parametrize("ckpt_path, step", [pytest.param(None, 12, marks=pytest.mark.slow), ("ckpt-6", 6)])
def test_load_run_gives_the_model_that_was_trained_and_its_vocabulary(trained_run, ckpt_path, step):
    run_dir, results = trained_run
    lm, vocab = txl_tf.load_run(run_dir, ckpt_path)
    assert_variables_equal(txl_tf.tf1_variables(lm), weights_of(run_dir, f"ckpt-{step}"))
    assert vocab.symbols == RunFolder(run_dir).load_vocab().symbols and len(vocab) == lm.network.n_token == 14
    assert vocab.decode(vocab.encode(TEXT)) == TEXT

    evaluation = EvaluationConfig(eval_ckpt_path=ckpt_path, eval_batch_size=1)
    expected = evaluate_run(run_dir, evaluation=evaluation)["valid"]
    held_out = vocab.encode(TEXT)[-225:]  # 5 % of the text, which `valid` is
    nll, mems = [], None
    for tokens, labels in txl_tf.segments(held_out, 1, 8):
        found, mems = lm.score(tokens, labels, mems)
        nll.append(found[0])
    assert np.concatenate(nll).mean(dtype=np.float64) == pytest.approx(expected, rel=1e-5)


def test_best_is_the_checkpoint_of_the_lowest_validation_loss(trained_run):
    run_dir, results = trained_run
    best = json.loads((run_dir / "best" / "best.json").read_text())
    assert len(best.pop("checksum")) == 64
    text = RunFolder(run_dir).read_config()["fingerprints"]["valid"]
    assert best == {"step": 12, "val_loss": results["valid"], "text": text}
    assert RunFolder(run_dir).find_best() == {"path": str(run_dir / "best" / "ckpt-12"), **best}
    lm, _ = txl_tf.load_run(run_dir, "best")
    assert_variables_equal(txl_tf.tf1_variables(lm), weights_of(run_dir, "best/ckpt-12"))


def test_arguments_of_the_model_may_be_changed(trained_run):
    lm, _ = txl_tf.load_run(trained_run[0], mem_len=3, clamp_len=2)
    assert (lm.network.mem_len, lm.network.clamp_len, lm.network.n_layer) == (3, 2, 1)


def test_checkpoints_go_from_the_oldest_to_the_newest(trained_run):
    run_dir, _ = trained_run
    folder = RunFolder(run_dir)
    assert folder.steps() == [6, 12]
    assert folder.checkpoints() == [str(run_dir / "ckpt-6"), str(run_dir / "ckpt-12")]
    assert folder.find_checkpoint() == str(run_dir / "ckpt-12") == tf.train.latest_checkpoint(str(run_dir))
    assert {folder.find_checkpoint(name) for name in ("ckpt-6", str(run_dir / "ckpt-6"))} == {str(run_dir / "ckpt-6")}
    assert folder.find_checkpoint("latest") == folder.find_checkpoint()
    paths = folder.find_checkpoint(), folder.find_checkpoint("best"), folder.find_checkpoint("ckpt-6")
    assert [*map(folder.name_of, paths)] == ["latest, step 12", "best, step 12", str(run_dir / "ckpt-6")]


def test_a_name_is_that_of_the_runs_own_checkpoint(trained_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ckpt-6.index").write_text("another run's")
    assert RunFolder(trained_run[0]).find_checkpoint("ckpt-6") == str(trained_run[0] / "ckpt-6")
    assert RunFolder(trained_run[0]).find_checkpoint(f"{tmp_path}/ckpt-6") == f"{tmp_path}/ckpt-6"


# ----------------------------------------------------------------------------------------------- a run that was made


def test_a_checkpoint_may_be_a_pathlib_path(made, run_dir):
    folder, _ = made
    for path in ("latest", "ckpt-7", run_dir / "ckpt-7"):
        assert folder.find_checkpoint(Path(path)) == str(run_dir / "ckpt-7")
    with raises_parameter("checkpoint", "ckpt-8", error=CheckpointGone):
        folder.find_checkpoint(Path("ckpt-8"))


def test_a_run_that_is_made_is_one_that_opens(made, run_dir, small_batches):
    folder, lm = made
    opened, vocab = txl_tf.load_run(run_dir)
    tokens, labels = (ids[0] for ids in small_batches())
    np.testing.assert_array_equal(opened.score(tokens, labels)[0], lm.score(tokens, labels)[0])
    assert vocab.symbols == word_vocab().symbols
    config = {"family": "transformer_xl", "data": {"dataset": "text"}, "model": MODEL, "vocab": vocab.get_config()}
    assert folder.read_config() == {**config, "fingerprints": {"vocab": vocab.fingerprint()}}
    assert folder.find_checkpoint() == str(run_dir / "ckpt-7") and folder.find_best() is None
    with raises_parameter("model_dir", str(run_dir), "a new folder"):
        folder.create({"dataset": "text"}, MODEL, [vocab], lm, step=8)
    assert folder.steps() == [7]


def test_a_run_is_made_beside_files_of_the_user_that_stay(small_lm, run_dir):
    run_dir.mkdir()
    folder, vocab, file = RunFolder(run_dir), word_vocab(), run_dir / "vocab.txt"
    file.write_text("the 12\n")
    arguments = {"data": {"dataset": "text"}, "model": MODEL, "vocabs": [vocab], "trained": small_lm(), "step": 1}
    with raises_parameter(str(file), None):
        folder.create(**arguments)
    assert file.read_text() == "the 12\n"
    vocab.save(file)
    with full_disk(1000), raises_naming(OSError, run_dir):
        folder.create(**arguments)
    assert [*run_dir.iterdir()] == [file] and file.read_text() == vocab.get_data()
    folder.create(**arguments)
    assert folder.load_vocab().symbols == vocab.symbols


def test_an_error_after_the_checkpoint_is_written_leaves_an_existing_folder_as_it_was(small_lm, run_dir):
    run_dir.mkdir()
    (run_dir / "notes.txt").write_text("mine")
    folder, vocab = RunFolder(run_dir), word_vocab()
    arguments = {"data": {"dataset": "text"}, "model": MODEL, "vocabs": [vocab], "trained": small_lm(), "step": 1}
    written = []

    def finish():
        written.extend(path.name for path in run_dir.iterdir())
        raise OSError("the text cannot be written")

    with pytest.raises(OSError, match="the text cannot be written"):
        folder.create(**arguments, finish=finish)
    assert {"ckpt-1.index", "checkpoint", "config.json"} <= {*written}
    assert [path.name for path in run_dir.iterdir()] == ["notes.txt"]
    folder.create(**arguments)
    assert folder.steps() == [1]


def test_a_file_in_the_place_of_the_folder_stays(small_lm, run_dir):
    run_dir.write_text("mine")
    with raises_naming(OSError, run_dir):
        RunFolder(run_dir).create({"dataset": "text"}, MODEL, [word_vocab()], small_lm(), step=1)
    assert run_dir.read_text() == "mine"


def test_a_checkpoint_of_the_original_is_found_too(small_lm, run_dir):
    txl_tf.save_tf1_checkpoint(small_lm(), run_dir / "model.ckpt-3")
    folder = RunFolder(run_dir)
    assert folder.find_checkpoint() == str(run_dir / "model.ckpt-3")
    assert folder.name_of(folder.find_checkpoint()) == "latest, step 3"
    with raises_parameter("model_dir", str(run_dir), "a new folder"):
        folder.check_new()


def test_the_latest_checkpoint_of_another_program_is_not_replaced_by_an_older_one(small_lm, run_dir):
    txl_tf.save_tf1_checkpoint(small_lm(), run_dir / "model.ckpt-3")
    paths = [str(run_dir / f"model.ckpt-{step}") for step in (3, 4)]
    (run_dir / "checkpoint").write_text(
        f'model_checkpoint_path: "{paths[1]}"\n' + "".join(f'all_model_checkpoint_paths: "{path}"\n' for path in paths)
    )
    with raises_parameter("model_dir", str(run_dir)):
        RunFolder(run_dir).find_checkpoint("latest")
    assert RunFolder(run_dir).find_checkpoint("model.ckpt-3") == paths[0]


def test_a_run_of_another_configuration_names_every_change(made):
    folder, _ = made
    config = folder.read_config()
    check_same_config(folder, config)
    check_same_config(folder, {**config, "training": {"train_steps": 5, "seed": 0}})  # seed 0 is the default
    changed = {**config, "model": {**config["model"], "d_inner": 9, "n_head": 1}, "training": {"seed": 4}}
    with raises_parameter("model_dir", folder.path, error=MisfitError) as raised:
        check_same_config(folder, changed)
    assert str(raised.value).splitlines()[1:] == [
        "  model.n_head: 2 in the existing run, 1 requested",
        "  model.d_inner: 12 in the existing run, 9 requested",
        "  training.seed: 0 in the existing run, 4 requested",
    ]
    assert pickle.loads(pickle.dumps(raised.value)).differences == raised.value.differences


def test_writing_keeps_out_others_and_leaves_no_file(run_dir):
    with RunFolder(run_dir).locked():
        assert list(run_dir.iterdir()) == []
        with raises_naming(OSError, run_dir):
            with RunFolder(run_dir).locked():
                pass
    with RunFolder(run_dir).locked():
        pass


def test_an_error_removes_a_new_folder_if_it_is_empty(run_dir):
    def fail(*names):
        with pytest.raises(KeyError), RunFolder(run_dir).locked():
            for name in names:
                (run_dir / name).write_text("")
            raise KeyError

    fail()
    assert not run_dir.exists()
    fail("file")
    assert (run_dir / "file").exists()
    (run_dir / "file").unlink()
    fail()
    assert run_dir.exists()


# --------------------------------------------------------------------------------------------------------- errors


def test_nothing_is_written_over_a_part_of_a_run(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text('{"data": {}, "model": {}}')
    (tmp_path / "link").symlink_to(run)
    own = ["", "config.json", "vocab.txt", "target_vocab.model", "ckpt-20", "ckpt-7.index", "best", "best/best.json"]
    for path in (*(str(run / name) for name in own), str(tmp_path / "link"), f"{tmp_path}/link/log.csv"):
        with raises_parameter("output", path, "a path that is no part of a run"):
            check_spares_runs("output", path)
    shutil.copytree(run, tmp_path / "best")  # a run of this name
    with raises_parameter("output", f"{tmp_path}/best/config.json"):
        check_spares_runs("output", f"{tmp_path}/best/config.json")
    with raises_parameter("token_nll", str(tmp_path / "new/log.csv")):  # of a run that is about to be made
        check_token_nll(str(tmp_path / "new/log.csv"), RunFolder(tmp_path / "new"), {})
    with raises_parameter("model_dir", str(run / "ema")):
        RunFolder(run / "ema").check_new()
    with raises_parameter("directory", str(run / "ckpt-20")):
        check_new_folder(str(run / "ckpt-20"))
    for path in (None, "", run / "answers.txt", run / "best/1.txt", run / "served", tmp_path / "config.json"):
        check_spares_runs("output", path and str(path))
    for other in ('{"name": "another program\'s"}', "[1]", "no JSON", ""):
        (tmp_path / "config.json").write_text(other)
        for name in ("", "config.json", "train", "vocab.txt"):
            check_spares_runs("output", str(tmp_path / name))


def test_what_is_missing_is_named_with_the_folder(made, run_dir, tmp_path):
    folder, _ = made
    for load in (txl_tf.load_run, lambda path: RunFolder(path).read_config()):
        with raises_parameter("model_dir", str(tmp_path), "the folder of a run"):
            load(tmp_path)
    with raises_parameter("checkpoint", "ckpt-8", error=CheckpointGone) as raised:
        txl_tf.load_run(run_dir, "ckpt-8")
    assert mentions(str(raised.value), "ckpt-8", run_dir)
    with raises_parameter("model_dir", str(run_dir), "a folder with a best checkpoint"):
        txl_tf.load_run(run_dir, "best")
    for path in run_dir.glob("ckpt-7.*"):
        path.unlink()
    with raises_parameter("model_dir", str(run_dir), "a folder with a checkpoint") as raised:
        txl_tf.load_run(run_dir)
    assert mentions(str(raised.value), "checkpoint", run_dir / "ckpt-7.index")
    (run_dir / "checkpoint").unlink()
    with raises_parameter("model_dir", str(run_dir), "a folder with a checkpoint"):
        txl_tf.load_run(run_dir)


def test_a_best_checkpoint_without_its_files_is_not_read(made, run_dir):
    folder, _ = made
    Path(folder.best.path).mkdir()
    write_json(folder.best_file, {"step": 3, "val_loss": 1.0})
    used = []
    with raises_parameter("checkpoint", str(run_dir / "best" / "ckpt-3"), error=CheckpointGone):
        folder.with_checkpoint("best", used.append)
    assert not used


def test_a_model_that_does_not_fit_names_the_checkpoint_and_the_variable(made, run_dir):
    with raises_parameter("d_inner", 9, [12]) as raised:
        txl_tf.load_run(run_dir, d_inner=9)
    assert mentions(str(raised.value), "d_inner", 12, run_dir, 9)
    config = json.loads((run_dir / "config.json").read_text())
    del config["checksum"]
    config["model"]["d_inner"] = 9
    (run_dir / "config.json").write_text(json.dumps(config))
    with raises_parameter("checkpoint", f"{run_dir}/ckpt-7", error=MisfitError) as raised:
        txl_tf.load_run(run_dir)
    assert mentions([str(raised.value)], f"{run_dir}/ckpt-7", "transformer/layer_0/ff")
    kernels = [line for line in raised.value.differences if "layer_0/ff/layer_1/kernel" in line]
    assert len(kernels) == 1 and mentions(kernels, "[8, 12]", "[8, 9]")


def test_a_learned_table_of_positions_fixes_its_length(run_dir):
    model = {**MODEL, "context_len": 16}
    for name, positions in {"sin": {}, "learned": {"pos_embed": "learned"}}.items():
        lm = txl_tf.TransformerLM(**model, **positions)
        RunFolder(run_dir / name).create({"dataset": "text"}, {**model, **positions}, [word_vocab()], lm, step=1)
    assert txl_tf.load_run(run_dir / "sin", context_len=32)[0].context_len == 32
    with raises_parameter("context_len", 32, [16]):
        txl_tf.load_run(run_dir / "learned", context_len=32)


def test_what_the_model_does_not_have_cannot_be_changed(run_dir):
    model = {**SMALL, "mem_len": 4}
    RunFolder(run_dir).create({"dataset": "text"}, model, [word_vocab()], txl_tf.TransformerLM(**model), step=1)
    with raises_parameter("clamp_len", 8, error=txl_tf.UnknownArgumentError) as raised:
        txl_tf.load_run(run_dir, clamp_len=8)
    assert {"mem_len", "dtype"} <= set(raised.value.allowed) and "load_run" in str(raised.value)
    lm, _ = txl_tf.load_run(run_dir, mem_len=2, dtype="bfloat16", seed=3, recompute=True, name="lm", trainable=False)
    assert (lm.network.mem_len, lm.compute_dtype, lm.name) == (2, "bfloat16", "lm")


def test_a_folder_without_a_name_is_an_error():
    with raises_parameter("model_dir", ""):
        with RunFolder("").locked():
            pass


# ----------------------------------------------------------------------------- paths that TensorFlow takes as patterns


@pytest.mark.parametrize(
    "name", ["x=[1,2]", "s*?{y} z,ü", *(pytest.param(name, marks=pytest.mark.slow) for name in ("a\\b", "[open"))]
)
def test_a_folder_of_any_name_opens(tmp_path, small_batches, name):
    lm = make_run(tmp_path / name, word_vocab(), n_layer=1)
    (tmp_path / "x=1").mkdir()  # what the pattern x=[1,2] would match
    tokens, labels = (ids[0] for ids in small_batches())
    opened, _ = txl_tf.load_run(tmp_path / name)
    np.testing.assert_array_equal(opened.score(tokens, labels)[0], lm.score(tokens, labels)[0])
    average_checkpoints(tmp_path / name, tmp_path / f"mean {name}", num_last_checkpoints=1)
    assert_variables_equal(
        txl_tf.tf1_variables(txl_tf.load_run(tmp_path / f"mean {name}")[0]), txl_tf.tf1_variables(lm)
    )


@pytest.mark.parametrize("name", ["x[1", "x]1", "a\\b"])
def test_a_path_that_no_program_could_read_from_is_refused_first(small_lm, tmp_path, name):
    lm, path = small_lm(n_layer=1), str(tmp_path / name)
    make_run(tmp_path / "run", word_vocab(), n_layer=1)
    for argument, write in {
        "directory": lambda: txl_tf.export_saved_model(lm, path),
        "path": lambda: txl_tf.save_tf1_checkpoint(lm, f"{path}/model.ckpt-1"),
        "tf1_checkpoint": lambda: run_to_tf1(tmp_path / "run", path),
        "model_dir": lambda: RunFolder(f"gs://bucket/{name}").check_new(),
    }.items():
        with pytest.raises(txl_tf.ParameterError) as caught:
            write()
        assert caught.value.name == argument and name in caught.value.value
    assert [file.name for file in tmp_path.iterdir()] == ["run"]


# -------------------------------------------------------------------- checkpoints that are damaged, or gone meanwhile


@pytest.fixture
def several(tmp_path):
    """A run with the checkpoints 1, 2 and 3, and its model."""
    lm, folder = make_run(tmp_path / "run", word_vocab(), n_layer=1), RunFolder(tmp_path / "run")
    for step in (2, 3):
        folder.save_weights(lm, step)
    return folder, lm


@pytest.mark.parametrize("damage", ["no data", "short data", "short index"])
def test_a_damaged_checkpoint_names_the_newest_that_is_complete(several, tmp_path, damage):
    folder, _ = several
    for step in (2, 3):
        data = next(Path(folder.path).glob(f"ckpt-{step}.data*"))
        file = data if "data" in damage else Path(f"{folder.checkpoint(step)}.index")
        file.unlink() if damage == "no data" else file.write_bytes(file.read_bytes()[:100])
    text = write_text(tmp_path / "text", "w1 w2 w3\n" * 9)
    evaluation = EvaluationConfig(eval_path=text, eval_batch_size=1, tgt_len=2)
    for argument, read in {
        "ckpt_path": lambda: txl_tf.pipeline(folder.path),
        "eval_ckpt_path": lambda: evaluate_run(folder.path, evaluation=evaluation),
        "checkpoints": lambda: average_checkpoints(folder.path, tmp_path / "mean", num_last_checkpoints=1),
    }.items():
        with pytest.raises(txl_tf.ParameterError) as caught:
            read()
        assert (caught.value.name, caught.value.value) == (argument, folder.checkpoint(3))
        assert caught.value.allowed == ["ckpt-1"] and f"--{argument}=ckpt-1" in str(caught.value)
    assert txl_tf.load_run(folder.path, "ckpt-1")


def test_a_newer_checkpoint_without_an_index_is_named(several):
    folder, _ = several
    assert folder.name_of(folder.find_checkpoint()) == "latest, step 3"
    Path(f"{folder.checkpoint(3)}.index").unlink()
    assert mentions(folder.name_of(folder.find_checkpoint()), "latest", 2, "ckpt-3")


@pytest.mark.parametrize("ckpt_path", ["latest", "best"])
def test_a_checkpoint_that_a_training_deletes_meanwhile_is_chosen_again(several, monkeypatch, ckpt_path):
    """Each time that one is chosen, the training writes the next one first and deletes it; after a while it ends."""
    folder, lm = several
    best, find = folder.best, RunFolder.find_checkpoint
    best.save_weights(lm, 3)
    write_json(folder.best_file, {"step": 3, "val_loss": 1.0})
    found = []

    def find_checkpoint(self, ckpt_path=None):
        path = find(self, ckpt_path)
        found.append(path)
        if len(found) < 4:
            step = 3 + len(found)
            for some in (folder, best):
                some.save_weights(lm, step)
                delete_checkpoint(some.checkpoint(step - 1))
            write_json(folder.best_file, {"step": step, "val_loss": 1.0})
        return path

    monkeypatch.setattr(RunFolder, "find_checkpoint", find_checkpoint)
    opened, _ = txl_tf.load_run(folder.path, ckpt_path)
    assert_variables_equal(txl_tf.tf1_variables(opened), txl_tf.tf1_variables(lm))
    assert [Path(path).name for path in found] == ["ckpt-3", "ckpt-4", "ckpt-5", "ckpt-6"]


def test_a_checkpoint_that_is_open_may_be_deleted(several):
    folder, lm = several
    reader = CheckpointReader(folder.checkpoint(3))
    delete_checkpoint(folder.checkpoint(3))
    load_weights(lm, reader)
    with pytest.raises(CheckpointGone):
        CheckpointReader(folder.checkpoint(3))
