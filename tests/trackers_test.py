"""Trackers, with the packages themselves: what a run leaves in wandb's files, mlflow's store and TensorBoard."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest
import tensorflow as tf
from helpers import (
    ROOT,
    assert_variables_equal,
    at_step,
    log_rows,
    made_up,
    mentions,
    raises_naming,
    raises_parameter,
    read_checkpoint,
    train_run,
    write_text,
)
from tensorboard.compat.proto import event_pb2

from txl_tf.config import (
    OptimizerConfig,
    PairsConfig,
    PairsTrainingConfig,
    RunConfig,
    TaggedConfig,
    TaggerTrainingConfig,
    TenerTaggerConfig,
    TransformerConfig,
)
from txl_tf.files import write_json
from txl_tf.runs import callbacks, trackers
from txl_tf.runs.checkpoints import RunCheckpoints
from txl_tf.runs.folder import RunFolder
from txl_tf.runs.trackers import final
from txl_tf.runs.train import train_run as train_family

pytestmark = pytest.mark.ci

TRACKED = ("loss", "bpc", "grad_norm", "learning_rate")  # speed differs between lines that are logged again
SAMPLE = "a sample at temperature 0.8, after 'the cat sat on the mat, and so o'"


@pytest.fixture
def wandb(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    wandb = pytest.importorskip("wandb")
    yield wandb
    wandb.teardown()  # it keeps what the environment says


@pytest.fixture(scope="module")
def mlflow_store(tmp_path_factory):
    """An empty store, which mlflow takes two seconds to make."""
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy", reason="mlflow's local store needs it")
    path = tmp_path_factory.mktemp("store") / "mlflow.db"
    mlflow.MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def mlflow(mlflow_store, tmp_path, monkeypatch):
    for name in ("MLFLOW_EXPERIMENT_ID", "MLFLOW_EXPERIMENT_NAME"):  # mlflow sets the first
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    mlflow = pytest.importorskip("mlflow")
    shutil.copy(mlflow_store, tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)  # artifacts go to ./mlruns
    yield mlflow
    mlflow.end_run()
    mlflow.tracking.fluent._active_experiment_id = None


def blocks(data):
    """The records of a file in LevelDB's log format: blocks of 32 KiB, in them pieces of records."""
    found, piece, at = [], b"", 7  # wandb's own header
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        piece += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last piece
            found.append(piece)
            piece = b""
    return found


def value_of(item):
    return ".".join(item.nested_key) or item.key, json.loads(item.value_json)


def read_wandb(folder):
    """What each of the offline runs in a folder holds, from the oldest."""
    import wandb
    from wandb.proto import wandb_internal_pb2 as proto

    wandb.teardown()  # writes what it still holds
    runs = []
    for path in sorted(Path(folder).glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns):
        run = types.SimpleNamespace(folder=path.parent, rows=[], config={}, summary={}, id=None, exit_code=None)
        for block in blocks(path.read_bytes()):
            record = proto.Record.FromString(block)
            if record.HasField("run"):
                run.id, run.name, run.project = record.run.run_id, record.run.display_name, record.run.project
            for config in (record.run.config, record.config):
                run.config |= dict(value_of(item) for item in config.update)
            if record.HasField("history"):
                run.rows.append(dict(value_of(item) for item in record.history.item))
            run.summary |= dict(value_of(item) for item in record.summary.update)
            if record.HasField("exit"):
                run.exit_code = record.exit.exit_code
        runs.append(run)
    return runs


def mlflow_history(mlflow, run_id, name):
    """`[(step, value)]` of a metric, as it was logged."""
    return [(metric.step, metric.value) for metric in mlflow.MlflowClient().get_metric_history(run_id, name)]


def only_run(mlflow, experiment="txl_tf"):
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
    return run


def tensorboard_texts(run_dir):
    """`[(name, step, text)]` of the event files, in the order of writing."""
    found = []
    for path in sorted((run_dir / "train").glob("events.*"), key=lambda path: path.stat().st_mtime_ns):
        for record in tf.data.TFRecordDataset(str(path)):
            event = event_pb2.Event.FromString(record.numpy())
            for value in event.summary.value:
                if value.metadata.plugin_data.plugin_name == "text":
                    found.append((value.tag, event.step, value.tensor.string_val[0].decode()))
    return found


def as_code(text):
    return "".join(f"    {line}\n" for line in text.split("\n"))


def go_back(run_dir, last):
    """As after a kill: the checkpoints after step `last` are gone."""
    for path in run_dir.glob("ckpt-*"):
        if int(path.name.split("-")[1].split(".")[0]) > last:
            path.unlink()


def assert_rows_equal(tracked, logged, names=TRACKED):
    """`{step: {name: value}}` of a tracker and the lines of log.csv."""
    assert list(tracked) == [int(row["step"]) for row in logged]
    for row in logged:
        for name in names:
            assert tracked[int(row["step"])][name] == pytest.approx(float(row[name]), rel=1e-12), (row["step"], name)


# ------------------------------------------------------------------------------------------------------------- wandb


@pytest.mark.slow
def test_wandb_has_the_log_results_and_the_configuration(run_dir, text_file, tmp_path, wandb):
    results = train_run(run_dir, text_file, training={"tracker": "wandb"})
    (run,) = read_wandb(tmp_path)
    assert (run.name, run.project, run.exit_code) == ("run", "txl_tf", 0)
    assert json.loads((run_dir / "tracker.json").read_text())["id"] == run.id
    log = log_rows(run_dir)
    assert [row["epoch/epoch"] for row in run.rows] == [int(row["epoch"]) for row in log]
    tracked = {row["epoch/step"]: {name.removeprefix("epoch/"): row[name] for name in row} for row in run.rows}
    assert_rows_equal(tracked, log, ("loss", "bpc", "grad_norm", "tokens_per_second"))
    assert tracked[6]["val_loss"] == float(log[1]["val_loss"]) and "val_loss" not in tracked[3]
    config = json.loads((run_dir / "config.json").read_text())
    del config["checksum"]
    assert {name: run.config[name] for name in config} == config
    assert run.summary["final_valid_loss"] == results["valid"]


@pytest.mark.slow
def test_a_resumed_run_is_the_same_run_in_wandb(run_dir, text_file, tmp_path, wandb):
    train_run(run_dir, text_file, training={"tracker": "wandb"})
    go_back(run_dir, 6)
    train_run(run_dir, text_file, training={"tracker": "wandb", "train_steps": 18})
    first, second = read_wandb(tmp_path)
    assert first.id == second.id
    assert [row["epoch/step"] for row in first.rows] == [3, 6, 9, 12]
    assert [row["epoch/step"] for row in second.rows] == [9, 12, 15, 18]  # those after the checkpoint come again
    assert second.config["training"]["train_steps"] == 18


@pytest.mark.slow
def test_an_error_of_wandb_ends_the_training_and_names_the_last_checkpoint(run_dir, text_file, wandb, monkeypatch):
    def log(run, logs):
        if logs["epoch/step"] == 9:
            raise wandb.Error("the server is gone")

    train_run(run_dir, text_file, training={"train_steps": 6})
    monkeypatch.setattr(wandb.Run, "log", log)
    with raises_naming(OSError, "tracker=wandb", "the server is gone", "ckpt-6"):
        train_run(run_dir, text_file, training={"tracker": "wandb"})


def test_an_error_in_opening_is_one_before_the_training(run_dir, text_file, wandb, monkeypatch):
    def refuse(**options):
        raise wandb.Error("no login")

    monkeypatch.setattr(wandb, "init", refuse)
    with raises_naming(OSError, "tracker=wandb", "no login"):
        train_run(run_dir, text_file, training={"tracker": "wandb"})
    assert not (run_dir / "log.csv").exists()


def test_a_run_whose_configuration_wandb_refuses_is_closed(run_dir, wandb, monkeypatch):
    closed = []

    def refuse(*arguments, **options):
        raise wandb.Error("too large")

    run = types.SimpleNamespace(id="abc", config=types.SimpleNamespace(update=refuse), finish=closed.append)
    monkeypatch.setattr(wandb, "init", lambda **options: run)
    monkeypatch.setattr(RunFolder, "read_config", lambda folder: {})
    with raises_naming(OSError, "tracker=wandb", "too large"), trackers._wandb_run(RunFolder(run_dir), None, None):
        pass
    assert closed == [1]


# ------------------------------------------------------------------------------------------------------------ mlflow


@pytest.mark.slow
def test_mlflow_has_the_log_results_and_the_configuration(run_dir, text_file, mlflow):
    results = train_run(run_dir, text_file, training={"tracker": "mlflow"})
    run, rows = only_run(mlflow), log_rows(run_dir)
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    for name in ("step", *TRACKED, "tokens_per_second"):
        expected = [(int(row["epoch"]), float(row[name])) for row in rows]
        assert mlflow_history(mlflow, run.info.run_id, name) == expected
    assert mlflow_history(mlflow, run.info.run_id, "val_loss") == [(1, float(rows[1]["val_loss"]))]
    assert run.data.metrics["final_valid_loss"] == results["valid"]
    assert run.data.params["optimizer_name"]
    artifacts = Path(mlflow.artifacts.download_artifacts(run_id=run.info.run_id))
    config = json.loads((run_dir / "config.json").read_text())
    assert json.loads((artifacts / "config.json").read_text())["model"] == config["model"]
    assert "params" in (artifacts / "model_summary.txt").read_text()


@pytest.mark.slow
def test_a_run_that_a_signal_stopped_is_the_same_run_in_mlflow(run_dir, text_file, mlflow, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        at_step(patch, callbacks.StepCSVLogger, "on_epoch_end", 9, lambda: signal.raise_signal(signal.SIGTERM))
        train_run(run_dir, text_file, training={"tracker": "mlflow"})
    first = only_run(mlflow)
    assert first.info.status == "FAILED" and mlflow.active_run() is None
    train_run(run_dir, text_file, training={"tracker": "mlflow"})
    run = only_run(mlflow)
    assert run.info.run_id == first.info.run_id and run.info.status == "FINISHED"
    losses = mlflow_history(mlflow, run.info.run_id, "loss")
    assert sorted(losses) == [(int(row["epoch"]), float(row["loss"])) for row in log_rows(run_dir)]


@pytest.mark.slow
def test_a_store_that_mlflow_cannot_open_is_one_error_before_the_training(run_dir, text_file, mlflow, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nowhere://store")
    with pytest.raises(OSError, match="^tracker=mlflow: .*nowhere"):
        train_run(run_dir, text_file, training={"tracker": "mlflow"})
    assert not (run_dir / "log.csv").exists()


@pytest.mark.slow
def test_a_tracked_run_that_is_gone_is_an_error_and_leaves_none_open(run_dir, text_file, mlflow):
    train_run(run_dir, text_file, training={"tracker": "mlflow", "train_steps": 6})
    run = only_run(mlflow)
    mlflow.MlflowClient().delete_run(run.info.run_id)
    with pytest.raises(OSError, match=f"(?s)^tracker=mlflow: .*{run.info.run_id}.*deleted"):
        train_run(run_dir, text_file, training={"tracker": "mlflow"})
    assert mlflow.active_run() is None


@pytest.mark.slow
def test_encoder_decoders_are_tracked(tmp_path, mlflow):
    pairs = write_text(tmp_path / "pairs.tsv", "".join(f"{'ab'[i % 2] * (i + 1)}\t{'xy'[i % 2]}\n" for i in range(12)))
    results = train_family(
        str(tmp_path / "run"),
        data=PairsConfig(train_path=pairs, valid_fraction=0.3),
        model=TransformerConfig(num_layers=1, d_model=8, num_heads=2, dff=8, max_len=20),
        optimizer=OptimizerConfig(learning_rate=1e-2),
        training=PairsTrainingConfig(
            train_steps=4, iterations=2, save_steps=2, batch_size=8, tracker="mlflow", tracker_project="pairs"
        ),
    )
    run = only_run(mlflow, "pairs")
    for name in ("loss", "accuracy", "ppl", "val_loss"):
        rows = [row for row in log_rows(tmp_path / "run") if row[name] != "NA"]
        if name == "val_loss":
            rows = rows[:-1]  # the last validation comes after the training
        expected = [(int(row["epoch"]), float(row[name])) for row in rows]
        assert mlflow_history(mlflow, run.info.run_id, name) == expected and expected, name
    for name, value in results["valid"].items():
        assert run.data.metrics[f"final_valid_{name}"] == value


@pytest.mark.slow
def test_taggers_are_tracked(tmp_path, mlflow):
    train, valid = (write_text(tmp_path / f"{seed}.txt", made_up(20, seed)) for seed in (0, 1))
    results = train_family(
        str(tmp_path / "run"),
        data=TaggedConfig(train_path=train, valid_path=valid),
        model=TenerTaggerConfig(n_layer=1, d_model=8, n_head=2, d_inner=8, d_embed=8, d_bigram=8),
        optimizer=OptimizerConfig(learning_rate=1e-2),
        training=TaggerTrainingConfig(train_steps=4, iterations=2, save_steps=2, batch_size=8, tracker="mlflow"),
    )
    run, rows = only_run(mlflow), log_rows(tmp_path / "run")
    losses = [(int(row["epoch"]), float(row["loss"])) for row in rows]
    assert mlflow_history(mlflow, run.info.run_id, "loss") == losses
    assert mlflow_history(mlflow, run.info.run_id, "val_f1") == [(0, float(rows[0]["val_f1"]))]
    assert run.data.metrics["final_valid_f1"] == results["valid"]["f1"]


# ------------------------------------------------------------------------------------------------------- TensorBoard


@pytest.mark.slow
def test_tensorboard_gets_the_configuration_and_samples_which_do_not_touch_the_training(
    run_dir, text_file, trained_run, capsys
):
    train_run(run_dir, text_file, training={"sample_tokens": 8})
    texts = tensorboard_texts(run_dir)
    assert [(name, step) for name, step, _ in texts] == [("config", 0), ("sample", 6), ("sample", 12)]
    lines = texts[0][2].splitlines()
    assert all(line.startswith("    ") for line in lines)
    config = json.loads((run_dir / "config.json").read_text())
    del config["checksum"]
    assert json.loads("".join(lines)) == config
    printed = capsys.readouterr().out
    for _, _, text in texts[1:]:
        written = "".join(line.removeprefix("    ") for line in text.splitlines(keepends=True))
        assert written.startswith(SAMPLE) and written in printed

    found, expected = read_checkpoint(run_dir / "ckpt-12"), read_checkpoint(trained_run[0] / "ckpt-12")
    assert len(found) > 30
    assert_variables_equal(found, expected)


@pytest.mark.slow
def test_a_sample_of_a_run_that_is_trained_already_is_that_of_its_end(run_dir, text_file):
    train_run(run_dir, text_file, training={"sample_tokens": 8})
    texts = tensorboard_texts(run_dir)
    assert texts[1][2] != texts[2][2]

    train_run(run_dir, text_file, training={"sample_tokens": 8})  # it is trained already
    assert tensorboard_texts(run_dir)[3:] == [texts[2]]


@pytest.mark.slow
def test_with_static_shapes_there_is_a_sample_at_the_end_alone(run_dir, text_file):
    train_run(run_dir, text_file, training={"sample_tokens": 3, "static_shapes": True})
    assert [(name, step) for name, step, _ in tensorboard_texts(run_dir)] == [("config", 0), ("sample", 12)]


# -------------------------------------------------------------------------------------------------------- the others


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
@pytest.mark.parametrize("found", ["nothing", "a folder of that name"])
def test_a_package_that_is_not_installed_is_one_error_before_any_work(tmp_path, monkeypatch, name, found):
    (tmp_path / name).mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)] if found != "nothing" else [])
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "path_importer_cache", {})
    monkeypatch.setattr(sys, "meta_path", [finder for finder in sys.meta_path if "__editable__" not in repr(finder)])
    with raises_parameter("tracker", name) as error:
        train_run(tmp_path / "run", "/no/such/text", training={"tracker": name})
    assert mentions(str(error.value), name, f"txl_tf[{name}]")
    assert not (tmp_path / "run").exists()


def test_only_the_chief_tracks_and_none_is_the_default(run_dir):
    checkpoints = RunCheckpoints(None, RunFolder(run_dir), writes=False)
    for name, writes in {"wandb": False, "none": True}.items():
        checkpoints.writes = writes
        with trackers.tracked(RunConfig(tracker=name), checkpoints, 0) as run:
            assert run == trackers.Tracked() and run.callbacks == ()


def test_results_have_the_names_of_their_splits():
    assert final({"valid": 1.25, "test": {"loss": 2.0, "f1": 0.5}}) == {
        "final_valid_loss": 1.25,
        "final_test_loss": 2.0,
        "final_test_f1": 0.5,
    }


@pytest.mark.parametrize("step, found", [(0, None), (12, "abc")])
def test_the_tracked_run_of_an_earlier_version_is_continued(run_dir, monkeypatch, step, found):
    run_dir.mkdir()
    write_json(str(run_dir / "tracker.json"), {"tracker": "mlflow", "id": "abc", "step": 9})

    @contextlib.contextmanager
    def open_run(folder, project, run_id):
        assert (folder.path, project, run_id) == (str(run_dir), "mine", found)
        yield trackers.Tracked("another" if run_id is None else run_id)

    monkeypatch.setattr(trackers, "_mlflow_run", open_run)
    with trackers.tracked(
        RunConfig(tracker="mlflow", tracker_project="mine"), RunCheckpoints(None, RunFolder(run_dir)), step
    ) as run:
        assert run.id == (found or "another")
    assert json.loads((run_dir / "tracker.json").read_text())["id"] == run.id


@pytest.mark.slow
def test_the_library_does_not_import_the_packages():
    code = "import sys, txl_tf, txl_tf.runs.train, txl_tf.runs.trackers; print({'wandb', 'mlflow'} & {*sys.modules})"
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.stdout == "set()\n", done.stderr
