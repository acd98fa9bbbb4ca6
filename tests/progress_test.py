"""The lines that a training prints: when, what they estimate, and what they announce."""

import contextlib
import types

import pytest
import tensorflow as tf
from helpers import mentions
from tensorflow.core.util import event_pb2

from txl_tf.config import TrainingConfig
from txl_tf.runs import callbacks


@pytest.fixture
def training(monkeypatch, caplog):
    """A function that trains with a clock of its own, and returns the lines of the log.

    A step takes `seconds` seconds, the first one 5 more, a validation 40.
    """
    clock = types.SimpleNamespace(now=0.0)
    monkeypatch.setattr(callbacks.time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(callbacks, "step_of", lambda model: model.step)

    def train(seconds, steps, samples=False, **settings):
        config = TrainingConfig(**settings)
        progress = callbacks.Progress(config, lambda logs, prefix: f"{prefix}loss {logs[prefix + 'loss']}", 10, samples)
        optimizer = types.SimpleNamespace(schedule=None, learning_rate=1.0)
        model = types.SimpleNamespace(step=0, optimizer=optimizer, inner_optimizer=optimizer)
        progress.set_model(model)
        progress.on_train_begin()
        progress.on_epoch_begin(0)
        for step in range(1, steps + 1):
            clock.now += seconds + (5 if step == 1 else 0)
            model.step = step
            progress.on_train_batch_end(step, {"loss": 2.0})
            if step % config.iterations == 0 or step == config.train_steps:
                logs = {"loss": 2.0, "grad_norm": 1.0}
                if step % config.save_steps < config.iterations and step < config.train_steps:
                    clock.now += 40
                    logs["val_loss"] = 3.0
                progress.on_epoch_end(0, logs)
                progress.on_epoch_begin(0)
        return [record.message for record in caplog.records]

    with caplog.at_level("INFO", "txl_tf"):
        yield train


def test_no_two_lines_are_more_than_30_seconds_and_a_step_apart(training):
    lines = training(4.0, 50, train_steps=100, iterations=50, save_steps=100)
    steps = [int(line.split()[1].partition("/")[0]) for line in lines[1:]]
    assert steps == [3, 11, 19, 27, 35, 43, 50]  # 30 s are 8 steps
    assert all("4 s a step" in line for line in lines[1:-1])
    assert mentions(lines[1], "0:06:28", 100)
    assert lines[2].endswith("0:05:56 left")  # 89 steps of 4 s


def test_a_fast_training_has_a_line_for_each_interval(training):
    lines = training(0.1, 60, train_steps=100, iterations=20, save_steps=100)
    assert [line.split("|")[0].strip() for line in lines[1:]] == [f"step {n:3}/100" for n in (3, 20, 40, 60)]


def test_the_time_left_counts_validations_and_the_next_one_is_announced(training):
    """Validations are at the ends of the intervals in which a multiple of `save_steps` lies: 40, 60, 80."""
    lines = training(1.0, 60, samples=True, train_steps=100, iterations=20, save_steps=25)
    assert mentions(lines[1], "0:01:37", 40)
    at_40, at_60 = (next(line for line in lines if line.startswith(f"step  {n}/100 | loss")) for n in (40, 60))
    assert mentions(at_40, "0:03:00", "val_loss 3.0", 60)  # 60 + 3 * 40
    assert "0:02:00 left" in at_60 and at_60.endswith("step 80")  # 40 + 2 * 40


def test_a_long_validation_says_that_it_is_alive(monkeypatch, caplog):
    clock = types.SimpleNamespace(now=0.0)
    monkeypatch.setattr(callbacks.time, "perf_counter", lambda: clock.now)
    watch = callbacks.ValidationProgress()
    with caplog.at_level("INFO", "txl_tf"):
        watch.on_test_begin()
        for batch in range(5):
            clock.now += 20
            watch.on_test_batch_end(batch)
    assert [record.message for record in caplog.records] == [f"validating: {n} batches so far" for n in (2, 4)]


def test_curves_have_the_names_of_the_logs_over_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(callbacks, "step_of", lambda model: 7)
    board = callbacks.StepTensorBoard(str(tmp_path), types.SimpleNamespace(naming_last_good=contextlib.nullcontext))
    board.on_epoch_end(0, {"loss": 2.0, "bpc": 3.0, "val_loss": 4.0})
    board.on_train_end()
    for folder, expected in {"train": {"loss": 2.0, "bpc": 3.0}, "validation": {"loss": 4.0}}.items():
        (path,) = (tmp_path / folder).glob("events*")
        events = [event_pb2.Event.FromString(x.numpy()) for x in tf.data.TFRecordDataset(str(path))]
        values = {value.tag: float(tf.make_ndarray(value.tensor)) for e in events for value in e.summary.value}
        assert values == expected and {e.step for e in events if e.summary.value} == {7}
