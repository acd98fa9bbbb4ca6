"""Trackers of experiments: with `--tracker`, wandb or mlflow shows the numbers of a run, too.

The packages do the work: `fit` gets their Keras callbacks, and they read their environment variables. This module opens
the tracked run under the name of the run's folder, and closes it. `tracker.json` in the folder contains the id of the
tracked run, so that a resumed run continues it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from txl_tf.config import RunConfig
from txl_tf.environment import is_installed
from txl_tf.errors import ParameterError
from txl_tf.files import read_json, write_json
from txl_tf.runs.checkpoints import RunCheckpoints
from txl_tf.runs.folder import RunFolder
from txl_tf.schema import check_values

_NEEDED = {"wandb": ("wandb",), "mlflow": ("mlflow", "pandas")}  # mlflow-skinny does not install pandas
_PROJECT = "txl_tf"  # if neither the run nor the tracker's environment variables name a project


def check_tracker(name: str) -> None:
    """Raises ParameterError if a package that a tracker needs is not installed. It does not import the package."""
    for package in _NEEDED.get(name, ()):
        if not is_installed(package):
            message = f'tracker={name} needs the package {package}: pip install "txl_tf[{name}]"'
            raise ParameterError("tracker", name, f"a tracker whose package {package} is installed", message)


@dataclasses.dataclass
class _TrackerFile:
    """The content of `tracker.json`: the name of the tracker, and the id of the tracked run."""

    tracker: str
    id: str
    step: int = 0  # not used; files of earlier versions have it


@dataclasses.dataclass(frozen=True)
class Tracked:
    """A tracked run that is open. The defaults are for a training run without a tracker.

    Attributes:
        id: id of the tracked run.
        callbacks: callbacks for `fit` that log the training.
        log_results: function that logs `{name: value}`, the results of the evaluations at the end.
        error: class of the exceptions that the package raises if it cannot log; `()` for none.
    """

    id: str = ""
    callbacks: tuple[Any, ...] = ()
    log_results: Callable[[dict[str, float]], object] = lambda results: None
    error: type[Exception] | tuple[()] = ()


@contextlib.contextmanager
def tracked(training: RunConfig, checkpoints: RunCheckpoints, step: int) -> Iterator[Tracked]:
    """Opens the tracked run of a training run, and closes it after the block.

    Without a tracker, and on workers other than the chief, nothing is tracked.

    Args:
        training: settings of the training: `tracker` and `tracker_project`.
        checkpoints: the checkpoints of the run.
        step: the step from which the training resumes. A new tracked run begins at step 0, and if `tracker.json` names
            another tracker or does not exist.

    Yields:
        The tracked run.

    Raises:
        OSError: the package cannot log, for example without a login or a connection.
    """
    name = training.tracker
    folder = checkpoints.folder
    if name == "none" or not checkpoints.writes:
        yield Tracked()
        return
    file = os.path.join(folder.path, "tracker.json")
    recorded = _read(file) if step else None
    run_id = recorded.id if recorded and recorded.tracker == name else None
    open_run = {"wandb": _wandb_run, "mlflow": _mlflow_run}[name]
    with open_run(folder, training.tracker_project, run_id) as run:
        write_json(file, {"tracker": name, "id": run.id})
        try:
            yield run
        except run.error as error:
            raise OSError(f"tracker={name}: {error}\n{checkpoints.last_good}") from error


def _read(file: str) -> _TrackerFile | None:
    """Reads `tracker.json`; `None` if it does not exist. Raises ParameterError if its content is wrong."""
    if not tf.io.gfile.exists(file):
        return None
    return _TrackerFile(**read_json(file, lambda values: check_values(values, _TrackerFile)))


@contextlib.contextmanager
def _wandb_run(folder: RunFolder, project: str | None, run_id: str | None) -> Iterator[Tracked]:
    """Yields the `Tracked` of a run of Weights & Biases, which is open in the block.

    Args:
        folder: the run that is tracked.
        project: name of the project. `None`: the one that the environment names or, without one, `_PROJECT`.
        run_id: id of the tracked run to resume; `None` for a new one.
    """
    import wandb
    from wandb.integration.keras import WandbMetricsLogger

    project = project or os.environ.get("WANDB_PROJECT", _PROJECT)
    with _errors_named("wandb", wandb.Error):
        run = wandb.init(project=project, name=_name_of(folder), id=run_id, resume="allow")
    exit_code = 1
    try:
        with _errors_named("wandb", wandb.Error):
            run.config.update(folder.read_config(), allow_val_change=True)
        yield Tracked(id=run.id, callbacks=(WandbMetricsLogger(),), log_results=run.summary.update, error=wandb.Error)
        exit_code = 0
    finally:
        run.finish(exit_code)


@contextlib.contextmanager
def _mlflow_run(folder: RunFolder, project: str | None, run_id: str | None) -> Iterator[Tracked]:
    """Yields a run of MLflow, which is open in the block.

    Args:
        folder: the run that is tracked.
        project: MLflow's experiment. `None`: the one that the environment names or, without one, `_PROJECT`.
        run_id: id of the tracked run to resume; `None` for a new one.
    """
    import mlflow
    from mlflow.exceptions import MlflowException
    from mlflow.keras import MlflowCallback

    with _errors_named("mlflow", MlflowException):
        named_by_environment = any(os.environ.get(f"MLFLOW_EXPERIMENT_{what}") for what in ("NAME", "ID"))
        if project or not named_by_environment:
            mlflow.set_experiment(project or _PROJECT)
        run = mlflow.start_run(run_id=run_id, run_name=None if run_id else _name_of(folder))
    with run:
        with _errors_named("mlflow", MlflowException):
            mlflow.log_dict(folder.read_config(), "config.json")
        try:
            yield Tracked(
                id=run.info.run_id,
                callbacks=(MlflowCallback(),),
                log_results=mlflow.log_metrics,
                error=MlflowException,
            )
        finally:
            mlflow.flush_async_logging()


@contextlib.contextmanager
def _errors_named(name: str, package_error: type[Exception]) -> Iterator[None]:
    """In this block, an error of the tracker's package becomes an OSError that names the tracker."""
    try:
        yield
    except package_error as error:
        raise OSError(f"tracker={name}: {error}") from error


def _name_of(folder: RunFolder) -> str:
    """The name of a tracked run: that of the run's folder."""
    return os.path.basename(os.path.normpath(folder.path))


def final(results: dict) -> dict[str, float]:
    """Names the results of the evaluations at the end for a tracker: `{"final_valid_loss": ..., ...}`.

    Args:
        results: `{split: loss}` or `{split: {name: value}}`, see `Run.finish`.
    """
    named = {split: result if isinstance(result, dict) else {"loss": result} for split, result in results.items()}
    return {f"final_{split}_{name}": value for split, result in named.items() for name, value in result.items()}
