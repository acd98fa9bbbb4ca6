"""Callbacks of a training: progress, logs by step, validation, checkpoints, signals, divergence."""

from __future__ import annotations

import contextlib
import csv
import datetime
import io
import json
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

import keras
import tensorflow as tf

from txl_tf.config import RunConfig
from txl_tf.data.text.batches import Segments
from txl_tf.files import has_other_names, reading, write_atomic, writing
from txl_tf.runs.checkpoints import RunCheckpoints
from txl_tf.schema import brief
from txl_tf.training.trained_model import is_scaled

logger = logging.getLogger("txl_tf")


def step_of(model: keras.Model) -> int:
    """Number of training steps done, earlier sessions included."""
    return int(model.optimizer.iterations.numpy())


class Stopped(Exception):
    """Raised on all workers at the same step, after a signal to one of them."""


def _is_ending() -> bool:
    """Whether an exception that ends the program is on its way."""
    return isinstance(sys.exception(), (KeyboardInterrupt, SystemExit))


class StopOnSignal(keras.callbacks.Callback):
    """Ctrl-C, SIGTERM and SIGHUP stop training, and a validation, after the step that runs.

    A second Ctrl-C, unless it comes within a second, does it at once. As a context manager around `fit`, it handles the
    signals. All workers raise `Stopped` at the same step.
    """

    def __init__(self, model: keras.Model):
        super().__init__()
        self.trained = model  # `model` is what Keras sets, also in an evaluation
        self.received = None
        self.received_at = 0.0
        self.previous = {}

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():  # no other may handle signals
            numbers = [signal.SIGINT, signal.SIGTERM]
            if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as under nohup
                numbers.append(signal.SIGHUP)
            self.previous = {number: signal.signal(number, self.handle) for number in numbers}
        return self

    def __exit__(self, error_type, error, traceback):
        for number, handler in self.previous.items():
            signal.signal(number, self.handle_late if self.received else handler)

    def handle(self, number, frame):
        if number == signal.SIGINT and self.received == number:
            if time.monotonic() - self.received_at > 1 and not _is_ending():
                raise KeyboardInterrupt
            return
        if self.received is None:
            self.received, self.received_at = number, time.monotonic()
            self.trained.stop_requested = True
            again = " (Ctrl-C again to stop at once)" * (number == signal.SIGINT)
            with contextlib.suppress(OSError):  # a terminal that hung up takes no message
                os.write(1, f"\n{self.reason}: saving after this step{again}\n".encode())  # amid a print, print fails

    def handle_late(self, number, frame):
        """Signals that follow the one that ends the program are none to it. Once it has ended, they count again."""
        if not _is_ending():
            signal.signal(number, self.previous[number])
            signal.raise_signal(number)

    @property
    def reason(self):
        reasons = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated", signal.SIGHUP: "hung up"}
        return reasons.get(self.received, "stopped with the other workers")

    def on_test_batch_end(self, batch, logs=None):
        if self.model.stop_agreed:
            raise Stopped


class CheckFinite(keras.callbacks.Callback):
    """Raises ValueError when the loss or the gradients of a step are not finite, before anything of it is saved.

    Loss scaling takes care of gradients that overflow in half precision.
    """

    def __init__(self, checkpoints: RunCheckpoints):
        super().__init__()
        self.checkpoints = checkpoints

    def on_train_batch_end(self, batch, logs=None):
        finite = math.isfinite(logs["loss"])
        if finite:
            self.checkpoints.confirm()  # that of the step before
        if finite and (is_scaled(self.model.optimizer) or math.isfinite(logs["grad_norm"])):
            return
        found = f"loss {logs['loss']}, gradient norm {logs['grad_norm']}"
        raise self.checkpoints.diverged(found, self.model.steps_per_execution, loss_too=not finite)


class Validate(keras.callbacks.Callback):
    """Evaluates at the end of every interval of steps in which a checkpoint is due, but the last of the training.

    Adds `val_loss`, and `val_` of the model's other metrics, to the epoch's logs. Keras's own validation would be
    missing for an interval whose steps ended in an earlier session. Raises ValueError when the loss is not finite,
    before anything of the step is saved.
    """

    def __init__(
        self, batches: tf.data.Dataset | Segments, stop: StopOnSignal, training: RunConfig, checkpoints: RunCheckpoints
    ):
        super().__init__()
        self.batches = batches
        self.stop = stop
        self.training = training
        self.checkpoints = checkpoints

    def on_epoch_end(self, epoch, logs=None):
        step, training = step_of(self.model), self.training
        if step < training.train_steps and step % training.save_steps < training.iterations:
            totals = self.model.metric_totals  # of the steps; of some models, an evaluation begins them anew
            try:
                found = self.model.evaluate(self.batches, verbose=0, return_dict=True, callbacks=[self.stop])
            finally:
                self.model.set_metric_totals(totals)
            self.checkpoints.check_validation(found["loss"])
            logs |= {f"val_{name}": value for name, value in found.items()}


class RunState(keras.callbacks.Callback):
    """Intervals, checkpoints and the end of the training.

    An interval is `iterations` steps, and a line of `log.csv`. To Keras it is an epoch: its callbacks write a line at
    the end of one. A resumed run may begin in the middle of an interval, so the number of the step ends the epoch, not
    the number of steps in it. With `iterations` 50, a run that was stopped after step 130 goes on like this:

        epoch (from 0)     2             3             4
        steps              131 ... 150   151 ... 200   201 ... 250
        sums of the line   101 ... 150   151 ... 200   201 ... 250

    `fit` starts with `initial_epoch=2`. `on_epoch_begin` puts the sums of the steps 101 to 130 back, which the
    checkpoint holds. After step 150, `on_train_batch_end` sets `stop_training`, which ends Keras's epoch early;
    `on_epoch_end` takes that back unless the training is done, or another callback set `stop_training`, too. For that,
    `before_epoch_end` is called first of all at the end of an epoch.

    Checkpoints in the middle of an interval are written after the step, those at its end after the validation and the
    loggers: `log.csv` has the lines of all intervals before a checkpoint.

    Args:
        state: `(carried, sums)` of `RunCheckpoints.restore`, or `(None, None)`.
        others: the callbacks that come before it.
    """

    def __init__(self, checkpoints: RunCheckpoints, state: tuple, training: RunConfig, others: list):
        super().__init__()
        self.checkpoints = checkpoints
        self.carried, self.sums = state
        self.training = training
        self.others = others
        self.stopped_by_others = False

    def on_train_begin(self, logs=None):
        self.saved_step = step = step_of(self.model)
        if self.carried is not None:
            self.model.set_carried_arrays(self.carried)
        if self.sums is not None and step % self.training.iterations == 0:
            self.finish_interval(step)

    def finish_interval(self, step):
        """Ends an interval whose steps have all been done by a session that was stopped in the validation."""
        epoch = step // self.training.iterations - 1
        for callback in [*self.others, self]:
            callback.on_epoch_begin(epoch)
        logs = self.model.training_logs()
        for callback in [*self.others, self]:
            callback.on_epoch_end(epoch, logs)
        if self.model.stop_training:  # that was the last: Keras would still train for one step
            self.model._initial_epoch = self.params["epochs"]
            self.checkpoints.save(proven=False)  # without the sums, so that it is done

    def on_epoch_begin(self, epoch, logs=None):
        if self.sums is not None:
            self.model.set_metric_totals(self.sums)
            self.sums = None

    def on_train_batch_end(self, batch, logs=None):
        step = step_of(self.model)
        self.stopped_by_others = self.model.stop_training
        if step >= self.training.train_steps or step % self.training.iterations == 0:
            self.model.stop_training = True  # that is, the epoch: see on_epoch_end
        elif self.is_due(step):
            self.save(mid_interval=True)
        if self.model.stop_agreed and step < self.training.train_steps:
            raise Stopped

    def before_epoch_end(self, epoch, logs=None):
        self.model.stop_training = self.stopped_by_others

    def on_epoch_end(self, epoch, logs=None):
        step = step_of(self.model)
        done = step >= self.training.train_steps or self.model.stop_training
        if "val_loss" in logs:
            self.checkpoints.save_best(logs[self.checkpoints.folder.family.monitor])
            done = done or self.checkpoints.stops_early(self.training, step)
        if done or self.is_due(step):
            self.save(proven="val_loss" in logs)
        if self.model.stop_agreed:
            raise Stopped
        self.model.stop_training = done

    def is_due(self, step):
        return step // self.training.save_steps > self.saved_step // self.training.save_steps

    def save(self, mid_interval=False, proven=False):
        """Writes a checkpoint, unless there is one of this step; see `RunCheckpoints.save`."""
        step = step_of(self.model)
        if step > self.saved_step:
            self.checkpoints.save(mid_interval, proven)
            self.saved_step = step


class Progress(keras.callbacks.Callback):
    """A line of progress at the end of every Keras epoch, which is an interval of `iterations` steps; one after the
    first steps of a session, with their speed.

    Adds to the epoch's logs, for the loggers after it: `step`, `learning_rate` of the last step and
    `tokens_per_second` of training alone, from the mean number of tokens of a step.

    Args:
        show: function of the logs and of the prefix of names in them, "" or "val_", that says in a few words what was
            measured; it may add to the logs.
    """

    def __init__(self, training: RunConfig, show: Callable[[dict, str], str], tokens_per_step: float):
        super().__init__()
        self.train_steps, self.iterations = training.train_steps, training.iterations
        self.tokens_per_step = tokens_per_step
        self.show = show
        self.calls = 0

    def on_train_begin(self, logs=None):
        logger.info("tracing the training step")

    def on_epoch_begin(self, epoch, logs=None):
        self.begin = self.end = (step_of(self.model), time.perf_counter())

    def on_train_batch_end(self, batch, logs=None):
        self.end = (step_of(self.model), time.perf_counter())
        self.calls += 1
        if self.calls == 1:  # it was spent on tracing
            self.begin = self.end
        step = self.end[0]
        if self.calls == 3 and step % self.iterations and step < self.train_steps:  # where no line comes anyway
            seconds = self.step_seconds()
            speed = f"{1 / seconds:.3g} steps/s" if seconds < 1 else f"{seconds:.3g} s a step"
            logger.info(" | ".join([self.place(step), f"loss {logs['loss']:.4f}", speed, self.left(step, seconds)]))

    def step_seconds(self):
        """Seconds a step, of those since the interval, or the first step, began; NaN where there was none."""
        (first, started), (step, ended) = self.begin, self.end
        return (ended - started) / (step - first) if step > first else float("nan")

    def place(self, step):
        return f"step {step:>{len(str(self.train_steps))}}/{self.train_steps}"

    def left(self, step, seconds):
        return f"{datetime.timedelta(seconds=round((self.train_steps - step) * seconds))} left"

    def on_epoch_end(self, epoch, logs=None):
        step, seconds = self.end[0], self.step_seconds()
        optimizer = self.model.optimizer
        schedule = getattr(optimizer, "inner_optimizer", optimizer)._learning_rate
        logs["step"] = step
        logs["learning_rate"] = float(schedule(step - 1) if callable(schedule) else optimizer.learning_rate)
        logs["tokens_per_second"] = self.tokens_per_step / seconds
        line = [self.place(step), self.show(logs, "")]
        line += [f"lr {logs['learning_rate']:.3g}", f"grad norm {logs['grad_norm']:.2f}"]
        if seconds == seconds:
            line += [f"{logs['tokens_per_second']:,.0f} tokens/s", self.left(step, seconds)]
        if logs.get("overflow"):
            line.append(f"{logs['overflow']:,.0f} token{'s' if logs['overflow'] > 1 else ''} left out")
        if "val_loss" in logs:
            line.append("valid " + self.show(logs, "val_"))
        logger.info(" | ".join(line))


class StepTensorBoard(keras.callbacks.TensorBoard):
    """TensorBoard curves over training steps, rather than epochs; `config.json` and samples as text."""

    def __init__(self, log_dir: str, checkpoints: RunCheckpoints):
        super().__init__(log_dir, write_graph=False)
        self.checkpoints = checkpoints

    def on_train_begin(self, logs=None):
        super().on_train_begin(logs)
        config = self.checkpoints.folder.read_config()
        self.log_text("config", json.dumps(config, indent=2, ensure_ascii=False), step_of(self.model))

    def on_epoch_end(self, epoch, logs=None):
        with self.checkpoints.naming_last(), writing(self.log_dir):
            super().on_epoch_end(step_of(self.model), logs)

    def on_train_end(self, logs=None):
        super().on_train_end(logs)
        self.set_model(self.model)  # forgets the writers, which are closed: the last sample comes after the training

    def log_text(self, name: str, text: str, step: int) -> None:
        """Shows a text as it stands: TensorBoard takes indented lines of Markdown for code."""
        code = "".join(f"    {line}\n" for line in text.split("\n"))
        with self.checkpoints.naming_last(), writing(self.log_dir), self._train_writer.as_default():
            tf.summary.text(name, code, step)
            self._train_writer.flush()


class StepCSVLogger(keras.callbacks.CSVLogger):
    """`log.csv`, with "NA" in the columns of the validation where there was none. Lines are appended.

    Args:
        metrics: names of what is measured in training and in validation, besides the loss.
        validated: names of what is measured in validation alone.
    """

    def __init__(self, filename: str, metrics: list[str], checkpoints: RunCheckpoints, validated: list[str] = ()):
        super().__init__(filename, append=True)
        self.validated = ["val_loss", *(f"val_{metric}" for metric in [*metrics, *validated])]
        self.checkpoints = checkpoints

    def on_train_begin(self, logs=None):
        super().on_train_begin(logs)
        if not self.append_header:
            with tf.io.gfile.GFile(self.filename) as file:
                self.keys = next(csv.reader([file.readline()]))[1:]

    def on_epoch_end(self, epoch, logs=None):
        with self.checkpoints.naming_last(), writing(self.filename):
            super().on_epoch_end(epoch, {**dict.fromkeys(self.validated, "NA"), **logs})


def cut_log(filename: str, last_step: int, metrics: list[str], validated: list[str] = ()) -> None:
    """Drops from `log.csv` the lines after step `last_step`, and the last one where it was not finished.

    A file that has another name, a hard link, becomes a file of its own: lines are appended to it.

    Args:
        metrics, validated: see `StepCSVLogger`.

    Raises:
        ValueError: it is not a log of these columns. Names the line.
    """
    if not tf.io.gfile.exists(filename):
        return
    with reading(filename), tf.io.gfile.GFile(filename, "rb") as file:
        data = file.read()
    lines = [line for line in data.splitlines(keepends=True) if line.endswith(b"\n")]
    header, *rows = [line.rstrip().decode("latin1").split(",") for line in lines] or [[]]
    known = {*_COLUMNS, *metrics, *(f"val_{metric}" for metric in [*metrics, *validated])}
    right = header[:1] == ["epoch"] and len({*header}) == len(header) and {*header} - {"overflow"} == known
    if lines and not right:
        others = ", ".join(sorted(known - {"epoch"}))
        raise ValueError(f"{filename}: line 1 must be epoch, then {others}, got {brief(header)}. {_MOVE}")
    kept = lines[:1]
    for i, (line, row) in enumerate(zip(lines[1:], rows, strict=True), 2):
        step = row[header.index("step")] if len(row) == len(header) else ""
        if not step.isdecimal() or len(step) > 18:
            raise ValueError(
                f"{filename}: line {i} must have {len(header)} values and a step, got {brief(row)}. {_MOVE}"
            )
        if int(step) <= last_step:
            kept.append(line)
    if b"".join(kept) != data or has_other_names(filename):
        write_atomic(filename, b"".join(kept))


def complete_log(filename: str, step: int, found: dict) -> bool:
    """Writes the validation at the end of a training into the line of its last step in `log.csv`, where it says "NA".

    Args:
        found: `{column: value}`.

    Returns:
        Whether there was such a line.
    """
    if not tf.io.gfile.exists(filename):
        return False
    with reading(filename), tf.io.gfile.GFile(filename) as file:
        *before, last = list(csv.DictReader(file)) or [{}]
    empty = {name: value for name, value in found.items() if last.get(name) == "NA"}
    if last.get("step") != str(step) or not empty:
        return False
    with io.StringIO(newline="") as text:
        writer = csv.DictWriter(text, last)
        writer.writeheader()
        writer.writerows([*before, {**last, **empty}])
        write_atomic(filename, text.getvalue().encode())
    return True


_COLUMNS = ("epoch", "step", "loss", "grad_norm", "learning_rate", "tokens_per_second", "val_loss")
_MOVE = "Move the file away to go on without it"
