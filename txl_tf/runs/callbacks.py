"""Callbacks of a training run: progress, logs by step, validation, checkpoints, signals, divergence."""

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from txl_tf.config import RunConfig
from txl_tf.data.text.batches import Segments
from txl_tf.errors import ParameterError, brief
from txl_tf.files import has_hard_links, naming_read_errors, naming_write_errors, write_atomic
from txl_tf.runs.checkpoints import Resumed, RunCheckpoints, step_of
from txl_tf.runs.folder import logged_step
from txl_tf.training.trained_model import is_scaled

logger = logging.getLogger("txl_tf")

_SECONDS_BETWEEN_LINES = 30  # at most, so that a slow training run does not seem to hang

# The columns that a `log.csv` must have for a run to append to it, besides those of the metrics, see `cut_log`. A new
# column needs no entry: all values that callbacks add to the logs of an epoch before `StepCSVLogger` is called get one.
_REQUIRED_COLUMNS = ("epoch", "step", "loss", "grad_norm", "learning_rate", "tokens_per_second", "val_loss")
_MOVE = "Move the file away to resume without it"  # advice in errors about `log.csv`

if TYPE_CHECKING:  # Keras declares that `model` and `params` may be `None`, but during `fit` they are not

    class Callback(keras.callbacks.Callback):
        model: Any  # pyright: ignore[reportIncompatibleMethodOverride, reportIncompatibleVariableOverride]
        params: Any
else:
    Callback = keras.callbacks.Callback


class Stopped(Exception):
    """Raised by callbacks on all workers at the same step, after a signal to one of them. It ends `fit`."""


def _is_ending() -> bool:
    """Whether the program is ending: an exception that ends it is being handled."""
    return isinstance(sys.exception(), (KeyboardInterrupt, SystemExit))


class StopOnSignal(Callback):
    """Stops a training run after the current step of training or validation on Ctrl-C, SIGTERM or SIGHUP.

    The callback is also a context manager, which must be open around `fit`: it sets the handlers of these signals. (It
    sets none in a thread other than the main thread.) A signal sets `stop_requested` of the model. The model then sets
    `stop_agreed` at the same step on all workers. After this step, a callback raises `Stopped`: this one in a
    validation, `RunState` in training. A second Ctrl-C raises KeyboardInterrupt at once, unless it comes within a
    second of the first.

    Args:
        model: the model that is trained.

    Attributes:
        received: number of the signal, or `None`.
        received_at: time of the signal, in seconds of `time.monotonic`.
        previous: `{number of a signal: its handler before `fit`}`.
    """

    def __init__(self, model: keras.Model):
        super().__init__()
        self.trained: Any = model  # Keras sets the attribute `model`, also in an evaluation
        self.received: int | None = None
        self.received_at = 0.0
        self.previous: dict[int, Any] = {}

    def __enter__(self) -> StopOnSignal:
        if threading.current_thread() is threading.main_thread():  # no other thread may set signal handlers
            numbers = [signal.SIGINT, signal.SIGTERM]
            if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup ignores it
                numbers.append(signal.SIGHUP)
            self.previous = {number: signal.signal(number, self.handle) for number in numbers}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, self.handle_late if self.received else handler)

    def handle(self, number: int, frame: Any) -> None:
        """The handler of signals during `fit`. The first signal requests the stop, and prints why.

        A second Ctrl-C, more than a second after the first, raises KeyboardInterrupt unless the program is ending
        already. The handler ignores all other later signals, also a Ctrl-C after SIGTERM or SIGHUP.
        """
        if number == signal.SIGINT and self.received == number:
            # Within a second, it counts as the same Ctrl-C. If the program is ending already, it is ignored.
            if time.monotonic() - self.received_at > 1 and not _is_ending():
                raise KeyboardInterrupt
            return
        if self.received is None:
            self.received = number
            self.received_at = time.monotonic()
            self.trained.stop_requested = True
            hint = " (Ctrl-C again to stop at once)" if number == signal.SIGINT else ""
            with contextlib.suppress(OSError):  # the terminal may be closed
                # `print` would fail if the signal came during another `print`.
                os.write(1, f"\n{self.reason}: saving after this step{hint}\n".encode())

    def handle_late(self, number: int, frame: Any) -> None:
        """The handler of signals after `fit`, if there was a signal in it.

        While the program ends because of that signal, later ones are ignored. Otherwise the handler that was set before
        `fit` gets them.
        """
        if not _is_ending():
            signal.signal(number, self.previous[number])
            signal.raise_signal(number)

    @property
    def reason(self) -> str:
        """Why the training stops, for messages."""
        reasons: dict[int | None, str] = {
            signal.SIGINT: "interrupted",
            signal.SIGTERM: "terminated",
            signal.SIGHUP: "hung up",
        }
        return reasons.get(self.received, "stopped with the other workers")

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.model.stop_agreed:
            raise Stopped


class CheckFinite(Callback):
    """Raises ValueError when the loss or the gradient norm of a step is not finite, before the step is saved.

    With loss scaling, only the loss must be finite: steps whose gradients overflow in half precision are skipped.
    """

    def __init__(self, checkpoints: RunCheckpoints):
        super().__init__()
        self.checkpoints = checkpoints

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        finite = math.isfinite(logs["loss"])
        if finite:
            self.checkpoints.confirm()  # if a checkpoint has the weights before this step, their loss is now known
        if finite and (is_scaled(self.model.optimizer) or math.isfinite(logs["grad_norm"])):
            return
        numbers = f"loss {logs['loss']}, gradient norm {logs['grad_norm']}"
        # `logs` are those of the last step of the call, or means over the interval so far, in which the steps before
        # this call were finite. So the cause is one of the steps of this call.
        raise self.checkpoints.diverged(numbers, self.model.steps_per_execution, bad_loss=not finite)


class Validate(Callback):
    """Evaluates the model at the end of every interval that contains a multiple of `save_steps`, except the last.

    It adds `val_loss`, and the other metrics with the prefix `val_`, to the logs of the epoch. After the last interval
    of the training, `Run.finish` evaluates the model. Keras's own validation would not run for an interval whose steps
    ended in an earlier session.

    Args:
        batches: the batches to evaluate.
        stop: stops the validation after a signal.
        training: settings of the training.
        checkpoints: the checkpoints of the run. If the loss is not finite, their `check_validation` raises ValueError
            before the step is saved.
    """

    def __init__(
        self, batches: tf.data.Dataset | Segments, stop: StopOnSignal, training: RunConfig, checkpoints: RunCheckpoints
    ):
        super().__init__()
        self.batches = batches
        self.stop = stop
        self.training = training
        self.checkpoints = checkpoints

    def on_epoch_end(self, epoch: Any, logs: Any = None) -> None:
        step = step_of(self.model)
        training = self.training
        if step < training.train_steps and step % training.save_steps < training.iterations:
            totals = self.model.metric_totals  # the evaluation of some models resets the sums of the training
            try:
                callbacks = [self.stop, ValidationProgress()]
                results = self.model.evaluate(self.batches, verbose=0, return_dict=True, callbacks=callbacks)
            finally:
                self.model.set_metric_totals(totals)
            self.checkpoints.check_validation(results["loss"])
            logs |= {f"val_{name}": value for name, value in results.items()}


class ValidationProgress(Callback):
    """Logs a line after every 30 seconds of a validation."""

    last_line: float  # time of the last line, or of the beginning of the validation

    def on_test_begin(self, logs: Any = None) -> None:
        self.last_line = time.perf_counter()

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        now = time.perf_counter()
        if now - self.last_line >= _SECONDS_BETWEEN_LINES:
            logger.info("validating: %s batches so far", f"{batch + 1:,}")
            self.last_line = now


class RunState(Callback):
    """Ends intervals and the training, and saves checkpoints.

    An interval of `iterations` steps gives one line of `log.csv`. For Keras it is an epoch, because callbacks write a
    line at the end of an epoch. A resumed run may begin in the middle of an interval. So an epoch ends at a multiple of
    `iterations`, and may have fewer steps. With `iterations` 50, a run that was stopped after step 130 resumes like
    this:

        epoch (from 0)     2             3             4
        steps              131 ... 150   151 ... 200   201 ... 250
        sums of the line   101 ... 150   151 ... 200   201 ... 250

    `fit` starts with `initial_epoch=2`. `on_epoch_begin` restores the sums of the steps 101 to 130 from the checkpoint.
    After step 150, `on_train_batch_end` sets `stop_training` of the model, which ends Keras's epoch early. Another
    callback may have set `stop_training` before, to end the training. So `on_train_batch_end` notes the value of the
    other callbacks, `before_epoch_end` sets it again before any other callback is called, and `on_epoch_end` ends the
    training if it is true.

    A checkpoint in the middle of an interval is written directly after its step. A checkpoint at the end of an interval
    is written after the validation and the line of `log.csv`. So `log.csv` has the lines of all intervals before a
    checkpoint.

    Args:
        checkpoints: the checkpoints of the run.
        state: the result of `RunCheckpoints.restore`; empty for a run that does not resume.
        training: settings of the training.
        other_callbacks: the callbacks that are called before this one.

    Attributes:
        saved_step: step of the last checkpoint.
        stopped_by_others: value of `stop_training` that the other callbacks have set.
    """

    saved_step: int

    def __init__(self, checkpoints: RunCheckpoints, state: Resumed, training: RunConfig, other_callbacks: list):
        super().__init__()
        self.checkpoints = checkpoints
        self.carried, self.sums = state
        self.training = training
        self.other_callbacks = other_callbacks
        self.stopped_by_others = False

    def on_train_begin(self, logs: Any = None) -> None:
        """Restores the memory.

        Ends the interval if an earlier session did all steps of the interval, but not the work at its end: validation,
        log line and checkpoint.
        """
        step = step_of(self.model)
        self.saved_step = step
        if self.carried is not None:
            self.model.set_carried_arrays(self.carried)
        if self.sums is not None and step % self.training.iterations == 0:  # with sums: the interval was not ended
            self.finish_interval(step)

    def finish_interval(self, step: int) -> None:
        """Does the validation, the log line and the checkpoint at the end of the interval that ends with `step`.

        An earlier session has done all steps of the interval, and was stopped before its end or in its validation.
        """
        epoch = step // self.training.iterations - 1
        for callback in [*self.other_callbacks, self]:
            callback.on_epoch_begin(epoch)
        logs = self.model.training_logs()
        for callback in [*self.other_callbacks, self]:
            callback.on_epoch_end(epoch, logs)
        if self.model.stop_training:  # the training is done, but Keras would train for one more step
            self.model._initial_epoch = self.params["epochs"]
            # Replaces the checkpoint of this step by one without sums. With them, the next session would end the
            # interval again.
            self.checkpoints.save(loss_is_finite="val_loss" in logs)

    def on_epoch_begin(self, epoch: Any, logs: Any = None) -> None:
        if self.sums is not None:  # only in the first epoch of a session, which continues an interval
            self.model.set_metric_totals(self.sums)
            self.sums = None

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Ends the epoch after the last step of its interval. In the middle of it, saves a checkpoint if one is due."""
        step = step_of(self.model)
        self.stopped_by_others = self.model.stop_training
        if step >= self.training.train_steps or step % self.training.iterations == 0:
            self.model.stop_training = True  # ends the epoch, see `on_epoch_end`
        elif self.is_due(step):
            self.save(mid_interval=True)
        if self.model.stop_agreed and step < self.training.train_steps:
            raise Stopped

    def before_epoch_end(self, epoch: Any, logs: Any = None) -> None:
        """Sets `stop_training` to the value of the other callbacks, which `on_train_batch_end` has overwritten."""
        self.model.stop_training = self.stopped_by_others

    def on_epoch_end(self, epoch: Any, logs: Any = None) -> None:
        """Saves the checkpoints that are due, and ends a training that is done or stops early.

        Raises `Stopped` after a signal.
        """
        step = step_of(self.model)
        done = step >= self.training.train_steps or self.model.stop_training
        if "val_loss" in logs:
            self.checkpoints.save_best(logs[self.checkpoints.folder.family.monitor])
            if not done and self.checkpoints.stops_early(self.training, step):
                logger.info("stopping early: no better validation for patience=%d steps", self.training.patience)
                done = True
        if done or self.is_due(step):
            self.save(loss_is_finite="val_loss" in logs)
        if self.model.stop_agreed:
            raise Stopped
        self.model.stop_training = done

    def is_due(self, step: int) -> bool:
        """Whether there is a multiple of `save_steps` after the last checkpoint, up to `step`."""
        return step // self.training.save_steps > self.saved_step // self.training.save_steps

    def save(self, mid_interval: bool = False, loss_is_finite: bool = False) -> None:
        """Writes a checkpoint unless this step has one. Arguments: see `RunCheckpoints.save`."""
        step = step_of(self.model)
        if step > self.saved_step:
            self.checkpoints.save(mid_interval, loss_is_finite)
            self.saved_step = step


class Progress(Callback):
    """Logs a line at the end of every Keras epoch, which is an interval of `iterations` steps.

    It also logs a line after the third call of the training function in a session, when the speed of two calls is
    known, and whenever 30 seconds have passed without a line. The estimate of the time left includes validations as
    soon as one was measured.

    It adds values to the logs of the epoch, for the callbacks after it: `step`, `learning_rate` of the last step, and
    `tokens_per_second` of the training without validation (NaN if no step was measured).

    Args:
        training: settings of the training.
        as_text: function `(logs, prefix)` that returns the loss and the metrics as text. The prefix of their names in
            `logs` is "" or "val_".
        tokens_per_step: mean number of tokens that a step predicts.
        samples: whether a sample follows every validation.
    """

    begin: tuple[int, float]  # (step, time) at which the measured steps begin
    end: tuple[int, float]  # (step, time) at which they end
    ended_with_validation: bool = False  # whether the last interval did
    pause: float = 0.0  # seconds that a validation takes, with the sample and the checkpoint after it
    last_line: float  # time of the last line

    def __init__(
        self,
        training: RunConfig,
        as_text: Callable[[dict, str], str],
        tokens_per_step: float,
        samples: bool = False,
    ):
        super().__init__()
        self.train_steps = training.train_steps
        self.iterations = training.iterations
        self.save_steps = training.save_steps
        self.tokens_per_step = tokens_per_step
        self.as_text = as_text
        self.what_is_next = "validation and sample" if samples else "validation"
        self.calls = 0

    def on_train_begin(self, logs: Any = None) -> None:
        self.log("tracing the training step")

    def log(self, line: str) -> None:
        """Logs a line, and notes the time."""
        logger.info(line)
        self.last_line = time.perf_counter()

    def on_epoch_begin(self, epoch: Any, logs: Any = None) -> None:
        now = time.perf_counter()
        if self.ended_with_validation:
            self.pause = now - self.end[1]
        self.begin = self.end = (step_of(self.model), now)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Measures the time of the steps. Logs a line if one is due within an interval, see `Progress`."""
        self.end = (step_of(self.model), time.perf_counter())
        self.calls += 1
        if self.calls == 1:  # most of its time is spent on tracing, so it is not measured
            self.begin = self.end
        step, now = self.end
        if step % self.iterations == 0 or step >= self.train_steps:  # `on_epoch_end` logs a line
            return
        is_late = now - self.last_line >= _SECONDS_BETWEEN_LINES and self.calls > 1
        if self.calls == 3 or is_late:
            seconds = self.step_seconds()
            speed = f"{1 / seconds:.3g} steps/s" if seconds < 1 else f"{seconds:.3g} s a step"
            line = [self.step_text(step), f"loss {logs['loss']:.4f}", speed, self.time_left(step, seconds)]
            if self.calls == 3:
                line.append(self.next_validation(step))
            self.log(" | ".join(line))

    def step_seconds(self) -> float:
        """The mean time of the steps of this interval, without the first call of a session; NaN without steps."""
        first, started = self.begin
        step, ended = self.end
        return (ended - started) / (step - first) if step > first else float("nan")

    def step_text(self, step: int) -> str:
        """The number of a step and of all steps, such as "step  400/1200"."""
        return f"step {step:>{len(str(self.train_steps))}}/{self.train_steps}"

    def time_left(self, step: int, seconds: float) -> str:
        """The estimated time of the steps after `step`, at `seconds` each, and of the validations between them."""
        steps = self.train_steps - step
        validations = math.ceil(steps / max(self.save_steps, self.iterations))
        return f"{datetime.timedelta(seconds=round(steps * seconds + validations * self.pause))} left"

    def next_validation(self, step: int) -> str:
        """The step of the next validation, as text; see `Validate`."""
        end = step - step % self.iterations + self.iterations  # of this interval
        while end < self.train_steps and end % self.save_steps >= self.iterations:
            end += self.iterations
        return f"next {self.what_is_next} at step {min(end, self.train_steps)}"

    def on_epoch_end(self, epoch: Any, logs: Any = None) -> None:
        """Adds step, learning rate and speed to the logs of an interval, and logs a line with them."""
        step = self.end[0]
        self.ended_with_validation = "val_loss" in logs
        if self.ended_with_validation:
            self.pause = time.perf_counter() - self.end[1]
        seconds = self.step_seconds()
        optimizer = self.model.optimizer
        schedule: Any = self.model.inner_optimizer.schedule
        logs["step"] = step
        rate: Any = schedule(step - 1) if schedule else optimizer.learning_rate  # schedules count steps from 0
        logs["learning_rate"] = float(rate)
        logs["tokens_per_second"] = self.tokens_per_step / seconds
        line = [self.step_text(step), self.as_text(logs, "")]
        line += [f"lr {logs['learning_rate']:.3g}", f"grad norm {logs['grad_norm']:.2f}"]
        if not math.isnan(seconds):
            line += [f"{logs['tokens_per_second']:,.0f} tokens/s", self.time_left(step, seconds)]
        if logs.get("overflow"):
            unit = "token" if logs["overflow"] == 1 else "tokens"
            line.append(f"{logs['overflow']:,.0f} {unit} left out")
        if "val_loss" in logs:
            line.append("valid " + self.as_text(logs, "val_"))
            if step < self.train_steps:
                line.append(self.next_validation(step))
        self.log(" | ".join(line))


class StepTensorBoard(Callback):
    """Writes curves over training steps, and `config.json` and samples as text, for TensorBoard.

    The folders, `train` and `validation`, are those of `keras.callbacks.TensorBoard`. Its curves are over epochs, so
    their names begin with `epoch_`. The names of these curves have no such prefix.

    Args:
        log_dir: folder of the run.
        checkpoints: the checkpoints of the run.
    """

    def __init__(self, log_dir: str, checkpoints: RunCheckpoints):
        super().__init__()
        self.log_dir = log_dir
        self.checkpoints = checkpoints
        self.writers: dict[str, Any] = {}  # by folder, made when the first value is written

    def on_train_begin(self, logs: Any = None) -> None:
        config = self.checkpoints.folder.read_config()
        self.log_text("config", json.dumps(config, indent=2, ensure_ascii=False), step_of(self.model))

    def on_epoch_end(self, epoch: Any, logs: Any = None) -> None:
        validation = {name.removeprefix("val_"): value for name, value in logs.items() if name.startswith("val_")}
        with self.checkpoints.naming_last_good():
            self.log_curves("train", {name: value for name, value in logs.items() if not name.startswith("val_")})
            self.log_curves("validation", validation)

    def on_train_end(self, logs: Any = None) -> None:
        for writer in self.writers.values():
            writer.close()
        self.writers = {}  # `log_text` may be called again, and then makes a new writer

    def log_curves(self, folder: str, values: dict[str, float]) -> None:
        """Adds values to the curves in a folder."""
        if values:
            with self.writing_to(folder, step_of(self.model)):
                for name, value in values.items():
                    tf.summary.scalar(name, value)

    def log_text(self, name: str, text: str, step: int) -> None:
        """Writes a text so that TensorBoard shows it unchanged: in Markdown, indented lines are code."""
        code = "".join(f"    {line}\n" for line in text.split("\n"))
        with self.checkpoints.naming_last_good(), self.writing_to("train", step):
            tf.summary.text(name, code)

    @contextlib.contextmanager
    def writing_to(self, folder: str, step: int) -> Iterator[None]:
        """In this block, functions of `tf.summary` write to the events in a folder of `log_dir`, at a step."""
        with naming_write_errors(self.log_dir):
            if folder not in self.writers:
                self.writers[folder] = tf.summary.create_file_writer(os.path.join(self.log_dir, folder))
            with self.writers[folder].as_default(step):
                yield
            self.writers[folder].flush()


class StepCSVLogger(Callback):
    """Appends a line to `log.csv` for each interval, in the form of `keras.callbacks.CSVLogger`.

    The columns are those of the header of an existing file. In a new file, they are "epoch", the names in the first
    logs, and `val_loss` and the other metrics of validations. If later logs have other names, such as that of a
    metric of the user's own, the file gets more columns. A column without a value has "NA".

    Args:
        filename: path of the file.
        metrics: names of the metrics of training and validation, besides the loss.
        checkpoints: the checkpoints of the run.
        validation_metrics: names of the metrics that only validations have.
    """

    def __init__(
        self,
        filename: str,
        metrics: Sequence[str],
        checkpoints: RunCheckpoints,
        validation_metrics: Sequence[str] = (),
    ):
        super().__init__()
        self.filename = filename
        self.validation_columns = ["val_loss", *(f"val_{metric}" for metric in [*metrics, *validation_metrics])]
        self.checkpoints = checkpoints
        self.file: Any = None
        self.columns: list[str] = []  # `[]` until they are known

    def on_train_begin(self, logs: Any = None) -> None:
        self.columns = []
        if tf.io.gfile.exists(self.filename):
            with tf.io.gfile.GFile(self.filename) as file:
                self.columns = next(csv.reader([file.readline()]), [])
        self.file = tf.io.gfile.GFile(self.filename, "a")

    def on_epoch_end(self, epoch: Any, logs: Any = None) -> None:
        row = {"epoch": epoch, **dict.fromkeys(self.validation_columns, "NA"), **logs}
        with self.checkpoints.naming_last_good(), naming_write_errors(self.filename):
            new_columns = sorted(row.keys() - {*self.columns, "epoch"})
            if not self.columns:
                self.columns = ["epoch", *new_columns]
                csv.writer(self.file).writerow(self.columns)
            elif new_columns:
                self._add_columns(new_columns)
            writer = csv.DictWriter(self.file, self.columns, restval="NA")
            writer.writerow(row)
            self.file.flush()

    def on_train_end(self, logs: Any = None) -> None:
        self.file.close()

    def _add_columns(self, names: list[str]) -> None:
        """Replaces the file by one that has more columns, with "NA" in the lines so far."""
        self.file.close()
        self.columns += names
        _write_rows(self.filename, self.columns, _rows_of(self.filename))
        self.file = tf.io.gfile.GFile(self.filename, "a")


def cut_log(filename: str, last_step: int, metrics: Sequence[str], validation_metrics: Sequence[str] = ()) -> None:
    """Removes from `log.csv` the lines of steps after `last_step`, and a last line that does not end.

    If the file has hard links, a copy takes its place, because lines will be appended to it.

    Args:
        filename: path of the file. It need not exist.
        last_step: the last step whose line stays.
        metrics, validation_metrics: see `StepCSVLogger`.

    Raises:
        ParameterError: the file is not a log with these columns, or a line has another number of values or no step.
            The message names the line.
    """
    if not tf.io.gfile.exists(filename):
        return
    with naming_read_errors(filename), tf.io.gfile.GFile(filename, "rb") as file:
        data = file.read()
    lines = [line for line in data.splitlines(keepends=True) if line.endswith(b"\n")]
    header, *rows = [line.rstrip().decode("latin1").split(",") for line in lines] or [[]]
    required = {*_REQUIRED_COLUMNS, *metrics, *(f"val_{metric}" for metric in [*metrics, *validation_metrics])}
    # Other columns, such as metrics of the user's own, may be among them.
    is_log = header[:1] == ["epoch"] and len({*header}) == len(header) and required <= {*header}
    if lines and not is_log:
        other_columns = ", ".join(sorted(required - {"epoch"}))
        message = f"{filename}: line 1 must be epoch, then {other_columns}, got {brief(header)}. {_MOVE}"
        raise ParameterError("log.csv", header, ["epoch", *sorted(required - {"epoch"})], message)
    lines_to_keep = lines[:1]
    for i, (line, row) in enumerate(zip(lines[1:], rows, strict=True), 2):
        step = logged_step(row[header.index("step")]) if len(row) == len(header) else None
        if step is None:
            allowed = f"{len(header)} values and a step"
            message = f"{filename}: line {i} must have {allowed}, got {brief(row)}. {_MOVE}"
            raise ParameterError("log.csv", row, allowed, message)
        if step <= last_step:
            lines_to_keep.append(line)
    if b"".join(lines_to_keep) != data or has_hard_links(filename):
        write_atomic(filename, b"".join(lines_to_keep))


def complete_log(filename: str, step: int, validation: dict) -> bool:
    """Replaces "NA" in the last line of `log.csv` by the results of the final validation.

    Args:
        filename: path of the file.
        step: the last step of the training. If the last line is that of another step, nothing is written.
        validation: `{column: value}`.

    Returns:
        Whether a value was written.
    """
    if not tf.io.gfile.exists(filename):
        return False
    *earlier, last = _rows_of(filename) or [{}]
    new_values = {name: value for name, value in validation.items() if last.get(name) == "NA"}
    if last.get("step") != str(step) or not new_values:
        return False
    _write_rows(filename, last, [*earlier, {**last, **new_values}])
    return True


def _rows_of(filename: str) -> list[dict[str, str]]:
    """Reads the lines of `log.csv` as `{column: value}`."""
    with naming_read_errors(filename), tf.io.gfile.GFile(filename) as file:
        return list(csv.DictReader(file))


def _write_rows(filename: str, columns: Iterable[str], rows: Iterable[dict[str, Any]]) -> None:
    """Replaces `log.csv` by one with these columns and lines. A column that a line lacks gets "NA"."""
    with io.StringIO(newline="") as text:
        writer = csv.DictWriter(text, list(columns), restval="NA")
        writer.writeheader()
        writer.writerows(rows)
        write_atomic(filename, text.getvalue().encode())
