"""Callbacks that a user gives `train_run`: what they see, also after a resume, and how they stop a training."""

import keras
import pytest
from helpers import assert_variables_equal, log_rows, raises_parameter, read_checkpoint, train_run

from txl_tf.runs.checkpoints import step_of

pytestmark = pytest.mark.ci

SLOW = pytest.mark.slow


class Recorder(keras.callbacks.Callback):
    """What a callback is told, and the steps at which it is called."""

    def __init__(self):
        super().__init__()
        self.batches, self.epochs = [], []

    def on_train_batch_end(self, batch, logs=None):
        self.batches.append(step_of(self.model))

    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append((epoch, dict(logs)))


class StopAt(keras.callbacks.Callback):
    """Stops the training at a step, at the end of a batch or of an epoch."""

    def __init__(self, step, event):
        super().__init__()
        self.step, self.event = step, event

    def on_train_batch_end(self, batch, logs=None):
        if self.event == "batch" and step_of(self.model) == self.step:
            self.model.stop_training = True

    def on_epoch_end(self, epoch, logs=None):
        if self.event == "epoch" and step_of(self.model) == self.step:
            self.model.stop_training = True


def go_back(run_dir, last):
    """As after a kill: the checkpoints after step `last` are gone."""
    for path in run_dir.glob("ckpt-*"):
        if int(path.name.split("-")[1].split(".")[0]) > last:
            path.unlink()


def assert_logged(recorder, run_dir, epochs):
    """The logs of the epochs are rows of log.csv."""
    assert [epoch for epoch, _ in recorder.epochs] == epochs
    rows = {int(row["epoch"]): row for row in log_rows(run_dir)}
    for epoch, logs in recorder.epochs:
        for name in ("step", "loss", "bpc", "grad_norm", "learning_rate"):
            assert logs[name] == pytest.approx(float(rows[epoch][name]), rel=1e-12), (epoch, name)
        last = epoch == max(rows)  # its validation comes after the training
        assert ("val_loss" in logs) == (rows[epoch]["val_loss"] != "NA" and not last)


def test_callbacks_see_every_interval_and_end_a_training_which_a_later_one_continues(run_dir, text_file, trained_run):
    first, later = Recorder(), Recorder()
    train_run(run_dir, text_file, [first, StopAt(3, "epoch")])
    assert (run_dir / "ckpt-3.index").exists() and [int(row["step"]) for row in log_rows(run_dir)] == [3]
    assert first.batches == [1, 2, 3]
    assert_logged(first, run_dir, [0])
    train_run(run_dir, text_file, [later])
    assert later.batches == [*range(4, 13)]
    assert_logged(later, run_dir, [1, 2, 3])
    assert_variables_equal(read_checkpoint(run_dir / "ckpt-12"), read_checkpoint(trained_run[0] / "ckpt-12"))
    assert [row["loss"] for row in log_rows(run_dir)] == [row["loss"] for row in log_rows(trained_run[0])]


@SLOW
@pytest.mark.parametrize("steps_per_execution", [1, 3])
def test_a_callback_sees_every_interval_also_after_a_resume(run_dir, text_file, steps_per_execution):
    recorder, resumed = Recorder(), Recorder()
    train_run(run_dir, text_file, [recorder], training={"steps_per_execution": steps_per_execution})
    assert recorder.batches == [*range(steps_per_execution, 13, steps_per_execution)]
    assert_logged(recorder, run_dir, [0, 1, 2, 3])
    go_back(run_dir, 6)
    train_run(run_dir, text_file, [resumed], training={"steps_per_execution": steps_per_execution})
    assert resumed.batches == [step for step in recorder.batches if step > 6]
    assert_logged(resumed, run_dir, [2, 3])
    assert [logs["loss"] for _, logs in resumed.epochs] == [logs["loss"] for _, logs in recorder.epochs[2:]]


@SLOW
@pytest.mark.parametrize(
    "step, event",
    [
        (3, "epoch"),
        (6, "epoch"),  # where a checkpoint is due
        (3, "batch"),  # at the end of an interval
        (4, "batch"),  # within one
    ],
)
def test_a_callback_ends_the_training_which_a_later_one_continues(run_dir, text_file, trained_run, step, event):
    train_run(run_dir, text_file, [StopAt(step, event)])
    assert (run_dir / f"ckpt-{step}.index").exists()
    steps = [int(row["step"]) for row in log_rows(run_dir)]
    assert steps[-1] == step and len(steps) == -(-step // 3)
    train_run(run_dir, text_file)
    assert_variables_equal(read_checkpoint(run_dir / "ckpt-12"), read_checkpoint(trained_run[0] / "ckpt-12"))


@pytest.mark.slow
def test_early_stopping_of_keras_works(run_dir, text_file):
    early = keras.callbacks.EarlyStopping(monitor="loss", mode="max", patience=1)  # the loss falls
    train_run(run_dir, text_file, (early,))
    assert early.stopped_epoch == 1 and [int(row["step"]) for row in log_rows(run_dir)] == [3, 6]


@pytest.mark.parametrize("bad, name", [("wandb", "callbacks"), ([Recorder], "callbacks[0]")])
def test_what_is_no_callback_is_refused_before_any_work(tmp_path, bad, name):
    with raises_parameter(name):
        train_run(tmp_path / "run", "/no/such/text", bad)
    assert not (tmp_path / "run").exists()
