"""Trackers of experiments: with `--tracker`, wandb or mlflow shows a run's numbers, samples and configuration, too.

The packages do the work and read their own environment variables: where the server or the store is, offline or not.
Of a run that goes on, the tracked run goes on: `tracker.json` in the run's folder holds its id. What it lacks of the
steps before comes from `log.csv`; what it already has is not sent twice.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import html
import importlib
import logging
import math
import os
from collections.abc import Iterator

import keras
import tensorflow as tf

from txl_tf.config import RunConfig
from txl_tf.environment import is_installed
from txl_tf.files import read_json, reading, write_json
from txl_tf.runs.checkpoints import RunCheckpoints
from txl_tf.schema import check_values

logger = logging.getLogger("txl_tf")

_PROJECT = "txl_tf"  # where neither the run nor the tracker's environment variables name one
_PARAMS = 100  # that mlflow takes at once
_STOPPED = (KeyboardInterrupt, SystemExit)  # a signal: the run is saved, and may go on


def check_tracker(name: str) -> None:
    """Raises ValueError where the package of a tracker is not installed; imports nothing."""
    if name == "none":
        return
    if not is_installed(name):
        raise ValueError(f'tracker={name} needs the package {name}: in a clone, pip install -e ".[{name}]"')


@dataclasses.dataclass
class _TrackerFile:
    """`tracker.json`."""

    tracker: str
    id: str
    step: int = 0  # the last one that was logged offline


class Tracker(keras.callbacks.Callback):
    """Tracks nothing. `WandbTracker` and `MlflowTracker` follow a run.

    As a callback it logs every interval of steps. As a context manager around the training and the evaluations after
    it, it opens the tracked run, and closes it as finished, as stopped by a signal, or as failed.
    """

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, error_type, error, traceback):
        pass

    def log_text(self, name: str, text: str, step: int) -> None:
        """Shows a text, such as a sample, at a step."""

    def log_validation(self, logs: dict[str, float], step: int) -> None:
        """Shows the numbers of the validation after the last step, beside those of its interval."""

    def log_results(self, results: dict[str, float]) -> None:
        """Shows the numbers of the evaluations at the end."""


class ServiceTracker(Tracker):
    """Base of the trackers of both packages. The subclass of a package says:

        name, error             of the package, and its exception
        open(run)               goes on with a tracked run, or begins one; sets `logged` and returns the id
        log_config(config)      shows `config.json`
        log(values, step)       shows the numbers of a step
        close(error_type)       ends the tracked run

    Args:
        checkpoints: of the run. Its folder names the tracked run, and holds its id.
        project: wandb's project, or mlflow's experiment. `None`: what environment variables say, or txl_tf.
        step: step that the training goes on from. At step 0 a new tracked run begins.

    Raises:
        OSError: the package cannot log, as without a login or a connection.
    """

    def __init__(self, checkpoints: RunCheckpoints, project: str | None, step: int):
        super().__init__()
        self.package = importlib.import_module(self.name)
        self.checkpoints, self.folder = checkpoints, checkpoints.folder
        self.project, self.start = project, step
        self.file = os.path.join(self.folder.path, "tracker.json")
        self.logged = 0  # last step that the tracked run has

    @property
    def run_name(self) -> str:
        return os.path.basename(os.path.normpath(self.folder.path))

    def __enter__(self) -> Tracker:
        found = None
        if self.start and tf.io.gfile.exists(self.file):
            found = _TrackerFile(**read_json(self.file, lambda values: check_values(values, _TrackerFile)))
            found = found if found.tracker == self.name else None
        with contextlib.ExitStack() as stack:
            with self._errors():
                self.id = self.open(found)
                stack.push(self.__exit__)  # unless all of the following works
                self.log_config(self.folder.read_config())
                write_json(self.file, {"tracker": self.name, "id": self.id, "step": self.logged})
                logger.info("%s: run %s, %s", self.name, self.run_name, self.id)
                for step, values in self._rows():
                    if step > self.logged:
                        self._log(values, step)
            stack.pop_all()
        return self

    def __exit__(self, error_type, error, traceback):
        try:
            with self._errors():
                self.close(error_type)
        except OSError as failure:
            if error is None:
                raise
            logger.warning("%s", failure)  # the error on its way says more

    def on_epoch_end(self, epoch, logs=None):
        with self.checkpoints.naming_last(), self._errors():
            if logs["step"] > self.logged:
                self._log(logs, logs["step"])

    def log_validation(self, logs: dict[str, float], step: int) -> None:
        with self.checkpoints.naming_last(), self._errors():
            self._log(logs, step)

    def _log(self, values: dict[str, float], step: int) -> None:
        """Logs the finite numbers: the first interval has no tokens_per_second, where it is a single step."""
        finite = {name: float(value) for name, value in values.items() if math.isfinite(value) and name != "step"}
        self.log(finite, step)
        self.logged = step

    def _rows(self) -> Iterator[tuple[int, dict[str, float]]]:
        """The lines of `log.csv` that the training goes on from, from the first."""
        if not self.start or not tf.io.gfile.exists(self.folder.log_file):
            return
        with reading(self.folder.log_file), tf.io.gfile.GFile(self.folder.log_file) as file:
            rows = list(csv.DictReader(file))
        for row in rows:
            step = row.get("step") or ""
            if None not in row.values() and step.isdecimal() and int(step) <= self.start:
                numbers = {name: value for name, value in row.items() if value != "NA" and name != "epoch"}
                yield int(step), {name: float(value) for name, value in numbers.items()}

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except self.error as error:
            raise OSError(f"tracker={self.name}: {error}") from error


class WandbTracker(ServiceTracker):
    """Weights & Biases. `_step`, the axis of its charts, is the training step; steps can only rise."""

    name = "wandb"

    @property
    def error(self) -> type[Exception]:
        return self.package.Error

    def open(self, run: _TrackerFile | None) -> str:
        project = self.project or os.environ.get("WANDB_PROJECT", _PROJECT)
        tracked = run.id if run else None
        self.run = self.package.init(project=project, name=self.run_name, id=tracked, resume="allow")
        if self.run.offline:  # it cannot know what it had
            self.logged = run.step if run else 0
        elif self.run.resumed:
            self.logged = self.run.starting_step - 1
        self.had = self.logged
        return self.run.id

    def log_config(self, config: dict) -> None:
        self.run.config.update(config, allow_val_change=True)

    def log(self, values: dict[str, float], step: int) -> None:
        self.run.log(values, step=step)
        if self.run.offline:
            write_json(self.file, {"tracker": self.name, "id": self.run.id, "step": step})

    def log_text(self, name: str, text: str, step: int) -> None:
        if step > self.had:
            with self.checkpoints.naming_last(), self._errors():
                self.run.log({name: self.package.Html(f"<pre>{html.escape(text)}</pre>", inject=False)}, step=step)

    def log_results(self, results: dict[str, float]) -> None:
        with self._errors():
            self.run.summary.update(results)

    def close(self, error_type: type[BaseException] | None) -> None:
        if error_type is None:
            self.run.finish(exit_code=0)
        else:
            self.run.finish(exit_code=255 if issubclass(error_type, _STOPPED) else 1)  # as wandb has it of Ctrl-C


class MlflowTracker(ServiceTracker):
    """MLflow. Parameters of a run never change there: those of a run that goes on stay as they were.

    `config.json` among its artifacts is always the latest.
    """

    name = "mlflow"

    @property
    def error(self) -> type[Exception]:
        return self.package.exceptions.MlflowException

    def open(self, run: _TrackerFile | None) -> str:
        if run:
            self.tracked = self.package.start_run(run_id=run.id)
            history = self.package.MlflowClient().get_metric_history(run.id, "loss")
            self.logged = max((metric.step for metric in history), default=0)
        else:
            by_environment = any(os.environ.get(f"MLFLOW_EXPERIMENT_{what}") for what in ("NAME", "ID"))
            if self.project or not by_environment:
                self.package.set_experiment(self.project or _PROJECT)
            self.tracked = self.package.start_run(run_name=self.run_name)
        return self.tracked.info.run_id

    def log_config(self, config: dict) -> None:
        self.package.log_dict(config, "config.json")
        params = [item for item in _flat(config).items() if item[0] not in self.tracked.data.params]
        for first in range(0, len(params), _PARAMS):
            self.package.log_params(dict(params[first : first + _PARAMS]))

    def log(self, values: dict[str, float], step: int) -> None:
        self.package.log_metrics(values, step=step, run_id=self.id)

    def log_text(self, name: str, text: str, step: int) -> None:
        with self.checkpoints.naming_last(), self._errors():
            self.package.log_text(text, f"{name}/{step:08d}.txt", run_id=self.id)

    def log_results(self, results: dict[str, float]) -> None:
        with self._errors():
            self.log(results, self.logged)

    def close(self, error_type: type[BaseException] | None) -> None:
        if error_type is None:
            self.package.end_run("FINISHED")
        else:
            self.package.end_run("KILLED" if issubclass(error_type, _STOPPED) else "FAILED")


def make_tracker(training: RunConfig, checkpoints: RunCheckpoints, step: int) -> Tracker:
    """The tracker of a run, by its name; of several workers, only the chief tracks."""
    trackers = {"wandb": WandbTracker, "mlflow": MlflowTracker}
    if training.tracker == "none" or not checkpoints.write:
        return Tracker()
    return trackers[training.tracker](checkpoints, training.tracker_project, step)


def final(results: dict) -> dict[str, float]:
    """`{"final_valid_loss": ...}` of `{split: loss}`, or `{split: {name: value}}`."""
    named = {split: found if isinstance(found, dict) else {"loss": found} for split, found in results.items()}
    return {f"final_{split}_{name}": value for split, found in named.items() for name, value in found.items()}


def _flat(config: dict, prefix: str = "") -> dict:
    """`{"model.n_layer": 2}` of `{"model": {"n_layer": 2}}`."""
    flat = {}
    for name, value in config.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat
