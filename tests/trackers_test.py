"""Trackers, with the packages themselves: what a run leaves in wandb's files, mlflow's store and TensorBoard."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from helpers import ROOT, assert_variables_equal, log_rows, made_up, read_checkpoint, train_run, write_text
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


def follower(cls, folder, step, project=None):
    """A tracker of a run that goes on after `step`, for use without a training."""
    return cls(RunCheckpoints(None, RunFolder(folder)), project, step)


@pytest.fixture
def trained(trained_run, run_dir):
    """A copy of the run of twelve steps."""
    shutil.copytree(trained_run[0], run_dir)
    return run_dir


@pytest.mark.slow
def test_wandb_shows_the_log_samples_results_and_the_configuration(trained, tmp_path, wandb, capfd):
    with follower(trackers.WandbTracker, trained, 12) as tracker:
        tracker.on_epoch_end(4, {"step": 15, "loss": 1.5, "val_loss": math.nan})
        tracker.log_text("sample", "it's", 15)
        tracker.on_epoch_end(5, {"step": 18, "loss": 1.25})
        tracker.log_validation({"val_loss": 2.5}, 18)
        tracker.log_results(final({"valid": 1.25}))
    (run,) = read_wandb(tmp_path)
    assert (run.name, run.project, run.exit_code) == ("run", "txl_tf", 0)
    assert f"wandb: run run, {run.id}" in capfd.readouterr().out
    assert json.loads((trained / "tracker.json").read_text())["id"] == run.id
    rows, log = {row["_step"]: row for row in run.rows}, log_rows(trained)
    assert rows[15]["loss"] == 1.5 and "val_loss" not in rows[15]
    last = rows.pop(18)
    assert (last["loss"], last["val_loss"]) == (1.25, 2.5)
    html = (run.folder / "files" / rows.pop(15)["sample.path"]).read_text()
    assert html == "<pre>it&#x27;s</pre>"
    assert_rows_equal(rows, log)
    assert rows[6]["val_loss"] == float(log[1]["val_loss"]) and "val_loss" not in rows[3]
    config = json.loads((trained / "config.json").read_text())
    del config["checksum"]
    assert {name: run.config[name] for name in config} == config
    assert run.summary["final_valid_loss"] == 1.25


@pytest.mark.slow
def test_wandb_has_numbers_at_their_steps_samples_and_the_configuration(run_dir, text_file, tmp_path, wandb, capfd):
    results = train_run(run_dir, text_file, training={"tracker": "wandb", "sample_tokens": 8})
    (run,) = read_wandb(tmp_path)
    assert (run.name, run.project, run.exit_code) == ("run", "txl_tf", 0)
    assert f"wandb: run run, {run.id}" in capfd.readouterr().out
    assert json.loads((run_dir / "tracker.json").read_text())["id"] == run.id
    rows = {row["_step"]: row for row in run.rows}
    assert_rows_equal(rows, log_rows(run_dir), [*TRACKED, "tokens_per_second"])
    assert rows[6]["val_loss"] == float(log_rows(run_dir)[1]["val_loss"]) and "val_loss" not in rows[3]
    config = json.loads((run_dir / "config.json").read_text())
    del config["checksum"]
    assert {name: run.config[name] for name in config} == config
    assert run.summary["final_valid_loss"] == results["valid"] == pytest.approx(rows[12]["val_loss"])
    texts = tensorboard_texts(run_dir)
    for step in (6, 12):  # at the validation, and at the end
        (sample,) = [text for name, at, text in texts if (name, at) == ("sample", step)]
        html = (run.folder / "files" / rows[step]["sample.path"]).read_text()
        assert html.startswith(f"<pre>{SAMPLE.replace(chr(39), '&#x27;')}") and html.endswith("</pre>")
        assert as_code(html[5:-6].replace("&#x27;", "'")) == sample
    assert "sample.path" not in rows[9]


@pytest.mark.slow
def test_a_resumed_run_goes_on_in_wandb_and_no_step_comes_twice(run_dir, text_file, tmp_path, wandb):
    train_run(run_dir, text_file, training={"tracker": "wandb"})
    go_back(run_dir, 6)
    train_run(run_dir, text_file, training={"tracker": "wandb", "train_steps": 18})
    first, second = read_wandb(tmp_path)
    assert first.id == second.id
    assert [row["_step"] for row in first.rows] == [3, 6, 9, 12]
    assert [row["_step"] for row in second.rows] == [15, 18]
    assert second.config["training"]["train_steps"] == 18


class Run:
    """Stands for a wandb run that goes on online, where the server has the steps up to 6."""

    offline, resumed, starting_step, id = False, True, 7, "abc"

    def __init__(self):
        self.rows, self.summary, self.config = {}, {}, types.SimpleNamespace(update=lambda config, **options: None)

    def log(self, values, step):
        self.rows.setdefault(step, {}).update(values)

    def finish(self, exit_code):
        self.exit_code = exit_code


def test_what_wandb_lacks_of_a_run_comes_from_the_log_and_nothing_twice(trained, wandb, monkeypatch):
    write_json(str(trained / "tracker.json"), {"tracker": "wandb", "id": "abc", "step": 9})
    run, asked = Run(), {}
    monkeypatch.setattr(wandb, "init", lambda **options: asked.update(options) or run)
    with follower(trackers.WandbTracker, trained, 12, "mine") as tracker:
        tracker.on_epoch_end(1, {"step": 6, "loss": 1.0})  # which the server has
        tracker.log_text("sample", "text", 6)
    assert (asked["resume"], asked["id"], asked["project"], asked["name"]) == ("allow", "abc", "mine", "run")
    assert_rows_equal(run.rows, log_rows(trained)[2:])
    assert "val_loss" not in run.rows[9] and run.exit_code == 0

    offline = Run()
    offline.offline = True  # it has what tracker.json says
    monkeypatch.setattr(wandb, "init", lambda **options: asked.update(options) or offline)
    with follower(trackers.WandbTracker, trained, 12):
        assert_rows_equal(offline.rows, log_rows(trained)[2:])  # of the run that is online: it has no more than 6
    assert json.loads((trained / "tracker.json").read_text())["step"] == 12
    offline.rows.clear()
    with pytest.raises(SystemExit), follower(trackers.WandbTracker, trained, 12):
        raise SystemExit(0)
    assert offline.rows == {} and offline.exit_code == 255
    with follower(trackers.WandbTracker, trained, 0):
        assert asked["id"] is None and asked["project"] == "txl_tf"  # a training from the beginning is another run


@pytest.mark.slow
def test_steps_that_wandb_s_server_lacks_come_from_the_log(run_dir, text_file, trained_run, wandb, monkeypatch):
    shutil.copytree(trained_run[0], run_dir)
    write_json(str(run_dir / "tracker.json"), {"tracker": "wandb", "id": "abc"})
    run, asked = Run(), {}
    monkeypatch.setattr(wandb, "init", lambda **options: asked.update(options) or run)
    train_run(run_dir, text_file, training={"tracker": "wandb", "train_steps": 18, "tracker_project": "mine"})
    assert asked["resume"] == "allow" and asked["id"] == "abc" and asked["project"] == "mine"
    assert_rows_equal(run.rows, log_rows(run_dir)[2:])
    assert "val_loss" not in run.rows[9] and run.exit_code == 0
    with trackers.WandbTracker(RunCheckpoints(None, RunFolder(run_dir)), None, 0):
        assert asked["id"] is None and asked["project"] == "txl_tf"  # a training from the beginning is another run


def test_an_error_of_the_tracker_ends_the_training_and_names_the_last_checkpoint(trained_run, wandb, monkeypatch):
    def log(values, step):
        raise wandb.Error("the server is gone")

    run = Run()
    monkeypatch.setattr(wandb, "init", lambda **options: run)
    monkeypatch.setattr(trackers, "write_json", lambda path, values: None)  # the folder is of other tests, too
    with pytest.raises(OSError, match="(?s)^tracker=wandb: the server is gone\n.* checkpoint is .*ckpt-12"):
        with trackers.WandbTracker(RunCheckpoints(None, RunFolder(trained_run[0])), None, 0) as tracker:
            run.log = log
            tracker.on_epoch_end(4, {"step": 15, "loss": 1.0})
    assert run.exit_code == 1


# ------------------------------------------------------------------------------------------------------------ mlflow


class Mlflow(types.ModuleType):
    """Stands for mlflow, which takes seconds to import; the slow tests use the package itself."""

    class MlflowException(Exception):
        pass

    def __init__(self):
        super().__init__("mlflow")
        self.exceptions, self.tracked = self, types.SimpleNamespace(data=types.SimpleNamespace(params={}))
        self.metrics, self.texts, self.experiments, self.started, self.ended = [], {}, [], [], []
        self.tracked.info = types.SimpleNamespace(run_id="abc")

    def set_experiment(self, name):
        self.experiments.append(name)

    def start_run(self, **options):
        self.started.append(options)
        return self.tracked

    def log_params(self, params):
        assert 0 < len(params) <= 100 and not params.keys() & self.tracked.data.params.keys()  # as mlflow demands
        self.tracked.data.params |= params

    def log_dict(self, values, name):
        self.texts[name] = values

    def log_text(self, text, name, run_id):
        self.texts[run_id, name] = text

    def log_metrics(self, values, step, run_id):
        self.metrics.append((run_id, step, values))

    def MlflowClient(self):
        return self

    def get_metric_history(self, run_id, name):
        return [types.SimpleNamespace(step=step) for _, step, values in self.metrics if name in values]

    def end_run(self, status):
        self.ended.append(status)


def test_mlflow_is_given_the_log_samples_results_and_the_configuration(trained, monkeypatch):
    for name in ("MLFLOW_EXPERIMENT_ID", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    mlflow, log = Mlflow(), log_rows(trained)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    with follower(trackers.MlflowTracker, trained, 0) as tracker:  # a new run, which has no rows so far
        for row in log[:2]:
            tracker.on_epoch_end(0, {name: float(value) for name, value in row.items() if value != "NA"})
        tracker.log_text("sample", "a text", 6)
    assert mlflow.experiments == ["txl_tf"] and mlflow.started == [{"run_name": "run"}]
    assert mlflow.ended == ["FINISHED"] and mlflow.texts["abc", "sample/00000006.txt"] == "a text"
    config = RunFolder(trained).read_config()
    assert mlflow.texts["config.json"] == config
    params = mlflow.tracked.data.params
    assert params["model.d_inner"] == 16 and params["training.learning_rate"] == 0.01
    assert params.keys() > {f"model.{name}" for name in config["model"]}

    with pytest.raises(SystemExit), follower(trackers.MlflowTracker, trained, 12) as tracker:  # it goes on
        tracker.log_validation({"val_loss": 2.5}, 12)
        tracker.log_results(final({"valid": {"loss": 1.25}}))
        raise SystemExit(0)
    assert mlflow.started[1:] == [{"run_id": "abc"}] and mlflow.ended[1:] == ["KILLED"]
    assert mlflow.metrics.pop() == ("abc", 12, {"final_valid_loss": 1.25})
    assert mlflow.metrics.pop() == ("abc", 12, {"val_loss": 2.5})
    assert_rows_equal({step: values for _, step, values in mlflow.metrics}, log)
    assert [len(mlflow.metrics), "val_loss" in mlflow.metrics[1][2], "val_loss" in mlflow.metrics[2][2]] == [
        4,
        True,
        False,
    ]

    def refuse(**options):
        raise mlflow.MlflowException("no store")

    with pytest.raises(ValueError, match="an error"), follower(trackers.MlflowTracker, trained, 0, "other"):
        raise ValueError("an error")
    assert mlflow.ended[2:] == ["FAILED"] and mlflow.experiments[1:] == ["other"]
    monkeypatch.setattr(mlflow, "start_run", refuse)
    with pytest.raises(OSError, match="^tracker=mlflow: no store"), follower(trackers.MlflowTracker, trained, 12):
        pass


@pytest.mark.slow
def test_mlflow_has_numbers_at_their_steps_samples_and_the_configuration(run_dir, text_file, mlflow):
    results = train_run(run_dir, text_file, training={"tracker": "mlflow", "sample_tokens": 8})
    run, rows = only_run(mlflow), log_rows(run_dir)
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    for name in (*TRACKED, "tokens_per_second"):
        expected = [(int(row["step"]), float(row[name])) for row in rows]
        assert mlflow_history(mlflow, run.info.run_id, name) == expected
    assert mlflow_history(mlflow, run.info.run_id, "val_loss") == [
        (6, float(rows[1]["val_loss"])),
        (12, float(rows[3]["val_loss"])),
    ]
    assert mlflow_history(mlflow, run.info.run_id, "final_valid_loss") == [(12, results["valid"])]
    config = json.loads((run_dir / "config.json").read_text())
    assert run.data.params["model.d_inner"] == "16" and run.data.params["training.learning_rate"] == "0.01"
    assert run.data.params.keys() > {f"model.{name}" for name in config["model"]}
    artifacts = Path(mlflow.artifacts.download_artifacts(run_id=run.info.run_id))
    assert json.loads((artifacts / "config.json").read_text())["model"] == config["model"]
    texts = {path.name: path.read_text() for path in (artifacts / "sample").iterdir()}
    assert texts.keys() == {"00000006.txt", "00000012.txt"} and all(text.startswith(SAMPLE) for text in texts.values())
    shown = {step: text for name, step, text in tensorboard_texts(run_dir) if name == "sample"}
    assert {f"{step:08d}.txt": text for step, text in shown.items()} == {k: as_code(v) for k, v in texts.items()}


@pytest.mark.slow
def test_a_run_that_a_signal_stopped_goes_on_in_mlflow(run_dir, text_file, trained_run, mlflow, monkeypatch):
    """And so does one that an error ended. What was done before the tracker was asked for comes from the log."""
    write = callbacks.StepCSVLogger.on_epoch_end

    def end_by(what):
        def on_epoch_end(self, epoch, logs=None):
            write(self, epoch, logs)
            if logs["step"] == 9:
                what()

        monkeypatch.setattr(callbacks.StepCSVLogger, "on_epoch_end", on_epoch_end)

    def fail():
        raise ValueError("an error")

    shutil.copytree(trained_run[0], run_dir)
    go_back(run_dir, 6)
    tracked = {"tracker": "mlflow", "train_steps": 12}
    end_by(lambda: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(SystemExit):
        train_run(run_dir, text_file, training=tracked)
    first = only_run(mlflow)
    assert first.info.status == "KILLED"
    assert [step for step, _ in mlflow_history(mlflow, first.info.run_id, "loss")] == [3, 6, 9]

    go_back(run_dir, 6)  # which takes the ninth step again
    end_by(fail)
    with pytest.raises(ValueError, match="an error"):
        train_run(run_dir, text_file, training=tracked)
    assert only_run(mlflow).info.status == "FAILED" and mlflow.active_run() is None

    monkeypatch.setattr(callbacks.StepCSVLogger, "on_epoch_end", write)
    train_run(run_dir, text_file, training={**tracked, "save_steps": 3})
    run = only_run(mlflow)
    assert run.info.run_id == first.info.run_id and run.info.status == "FINISHED"
    assert run.data.params["training.save_steps"] == "6"  # mlflow keeps parameters as they were
    losses = mlflow_history(mlflow, run.info.run_id, "loss")
    assert_rows_equal({step: {"loss": loss} for step, loss in losses}, log_rows(run_dir), ["loss"])
    assert len(losses) == 4


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
        expected = [(int(row["step"]), float(row[name])) for row in log_rows(tmp_path / "run") if row[name] != "NA"]
        assert mlflow_history(mlflow, run.info.run_id, name) == expected and expected, name
    for name, value in results["valid"].items():
        assert run.data.metrics[f"final_valid_{name}"] == value
    sample = Path(mlflow.artifacts.download_artifacts(run_id=run.info.run_id)) / "sample_valid" / "00000004.txt"
    assert sample.read_text().count("  ->  ") == 3
    assert ("sample_valid", 4, as_code(sample.read_text())) in tensorboard_texts(tmp_path / "run")


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
    assert mlflow_history(mlflow, run.info.run_id, "loss") == [(int(row["step"]), float(row["loss"])) for row in rows]
    assert mlflow_history(mlflow, run.info.run_id, "val_f1") == [
        (int(row["step"]), float(row["val_f1"])) for row in rows
    ]
    assert run.data.metrics["final_valid_f1"] == results["valid"]["f1"]
    assert "model.labels" in run.data.params and len(run.data.params) > 60


# ------------------------------------------------------------------------------------------------------- TensorBoard


class Recorder(trackers.Tracker):
    """What a training gives its tracker."""

    def __init__(self):
        super().__init__()
        self.rows, self.texts, self.results, self.opened = {}, [], {}, 0

    def __enter__(self):
        self.opened += 1
        return self

    def on_epoch_end(self, epoch, logs=None):
        self.rows[logs["step"]] = dict(logs)

    def log_text(self, name, text, step):
        self.texts.append((name, step, as_code(text)))

    def log_results(self, results):
        self.results |= results


@pytest.mark.slow
def test_tensorboard_and_the_tracker_get_numbers_and_samples_which_do_not_touch_the_training(
    run_dir, text_file, trained_run, capsys, monkeypatch
):
    tracker = Recorder()
    monkeypatch.setattr(trackers, "make_tracker", lambda *args: tracker)
    results = train_run(run_dir, text_file, training={"sample_tokens": 8})
    texts = tensorboard_texts(run_dir)
    assert [(name, step) for name, step, _ in texts] == [("config", 0), ("sample", 6), ("sample", 12)]
    assert tracker.texts == texts[1:] and tracker.opened == 1
    assert_rows_equal(tracker.rows, log_rows(run_dir), [*TRACKED, "tokens_per_second"])
    assert tracker.results == {"final_valid_loss": results["valid"]}
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
    with pytest.raises(ValueError) as error:
        train_run(tmp_path / "run", "/no/such/text", training={"tracker": name})
    assert str(error.value) == f'tracker={name} needs the package {name}: in a clone, pip install -e ".[{name}]"'
    assert not (tmp_path / "run").exists()


def test_only_the_chief_tracks_and_none_is_the_default(run_dir):
    checkpoints = RunCheckpoints(None, RunFolder(run_dir), write=False)
    assert type(trackers.make_tracker(RunConfig(tracker="wandb"), checkpoints, 0)) is trackers.Tracker
    checkpoints.write = True
    assert type(trackers.make_tracker(RunConfig(), checkpoints, 0)) is trackers.Tracker


def test_numbers_that_are_not_finite_are_left_out():
    logged = {}
    tracker = trackers.ServiceTracker.__new__(trackers.ServiceTracker)
    tracker.log = lambda values, step: logged.update({step: values})
    tracker._log({"loss": np.float32(1.5), "tokens_per_second": math.nan, "val_loss": math.inf, "step": 3}, 3)
    assert logged == {3: {"loss": 1.5}} and tracker.logged == 3


@pytest.mark.slow
def test_the_library_does_not_import_the_packages():
    code = "import sys, txl_tf, txl_tf.runs.train, txl_tf.runs.trackers; print({'wandb', 'mlflow'} & {*sys.modules})"
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.stdout == "set()\n", done.stderr
