"""The checkpoints of a training run, from which it resumes exactly; and the average of several checkpoints.

The arrays of a checkpoint by their keys:

    weights/NAME             a weight; NAME is a name of `weights_by_name`
    optimizer/I              variable I of the optimizer
    mems                     only of a `MemoryModel`: the memory, see its `carried_arrays`
    window                   only in the middle of an interval: the sums of its steps, see `metric_totals`
    window:log:NAME          the same of a value that a user's own training step returns
    window:metric:NAME       the same of a user's own metric of a `MemoryModel`

`CheckpointReader` of `runs/weights.py` says which keys of other programs and earlier versions are weights.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from txl_tf.config import RunConfig, at_least
from txl_tf.errors import ParameterError, brief, named
from txl_tf.files import check_scheme, remove, same_path, write_json
from txl_tf.runs.folder import RunFolder
from txl_tf.runs.same_run import check_vocab
from txl_tf.runs.weights import (
    UNFINISHED,
    CheckpointFolder,
    CheckpointReader,
    MisfitError,
    UnreadableCheckpoint,
    check_fits,
    check_whole,
    checkpoint_step,
    delete_checkpoint,
    load_weights,
    run_weights,
    weights_by_name,
    weights_reader,
    write_checkpoint,
)
from txl_tf.schema import differing
from txl_tf.training.distribution import broadcast_from_chief
from txl_tf.training.trained_model import SUMS

logger = logging.getLogger("txl_tf")


def step_of(model: Any) -> int:
    """The number of training steps that a model has done, including those of earlier sessions."""
    return int(model.optimizer.iterations.numpy())


class Resumed(NamedTuple):
    """The state of a training that resumes, besides weights and optimizer. A new training has none: both are `None`.

    Attributes:
        carried: the `carried_arrays` of the model.
        sums: the `metric_totals` of the interval in whose middle the checkpoint was saved, or `None`.
    """

    carried: dict[str, np.ndarray] | None = None
    sums: dict[str, np.ndarray] | None = None

    @property
    def interval_is_open(self) -> bool:
        """Whether the validation and the log line of this step's interval are still to come."""
        return self.sums is not None


class RunCheckpoints:
    """The checkpoints of a training run, numbered by step.

    A checkpoint contains the weights, the variables of the optimizer and the memory, if the model has one. The memory
    is one array with the rows of all replicas, so that a run can resume on another number of replicas. A
    checkpoint in the middle of an interval of steps also contains the sums from which the line of the interval in
    `log.csv` is computed.

    Args:
        model: `MemoryModel` or `MemorylessModel`, compiled, with its optimizer built.
        folder: folder of the run.
        max_to_keep: how many of the latest checkpoints are kept; older ones are deleted. One more is kept until it is
            known that the weights of the latest have a finite loss.
        writes: whether this process writes files. Of several workers that train together, only the chief does, but all
            must call `save` and `save_best`.
        text: fingerprint of the text of the validation. The best loss on another text does not count.
    """

    def __init__(
        self, model: keras.Model, folder: RunFolder, max_to_keep: int = 5, writes: bool = True, text: str | None = None
    ):
        self._model = model
        self._text = text
        self.folder = folder
        self._max_to_keep = max_to_keep
        self.writes = writes
        self._latest: str | None = None  # path of the checkpoint that was saved or restored last
        # Step of `_latest`, until it is known that its weights have a finite loss.
        self._step_without_loss: int | None = None
        self._restored = False  # whether `_latest` was restored, and no checkpoint was saved since

    @property
    def latest(self) -> str | None:
        """The path of the checkpoint that was saved or restored last; without one, of the latest in the folder.

        `None` if there is no checkpoint.
        """
        if self._latest is None and (steps := self.folder.steps()):
            return self.folder.checkpoint(steps[-1])
        return self._latest

    @property
    def last_good(self) -> str:
        """A clause for error messages that names the last good checkpoint."""
        latest = self.latest
        return f"the last good checkpoint is {latest}" if latest else "there is no checkpoint yet"

    @contextlib.contextmanager
    def naming_last_good(self) -> Iterator[None]:
        """In this block, which writes files, an OSError gets a line that names the last good checkpoint."""
        try:
            yield
        except OSError as error:
            raise OSError(f"{error}\n{self.last_good}") from error

    def check_weights(self) -> None:
        """Raises ValueError, which names the last good checkpoint, unless all weights are finite."""
        for name, variable in weights_by_name(self._model).items():
            value = tf.convert_to_tensor(getattr(variable, "value", variable))
            if value.dtype.is_floating and not tf.reduce_all(tf.math.is_finite(value)):
                raise self.diverged(f"{name} has values that are not finite", bad_loss=False)

    def confirm(self) -> None:
        """Records that the weights of the latest checkpoint have a finite loss.

        Then deletes checkpoints beyond `max_to_keep`: `save` has kept one more until it is known that the loss is
        finite. Deletes none if the training has resumed from the latest checkpoint and has saved none since.
        """
        step = self._step_without_loss
        self._step_without_loss = None
        if step is not None and self.writes and not self._restored:
            self._delete_old(step, self._max_to_keep)

    def check_validation(self, loss: float) -> None:
        """Calls `confirm` if the loss of a validation is finite. Otherwise raises the error of `diverged`."""
        if not math.isfinite(loss):
            raise self.diverged(f"validation loss {loss}")
        self.confirm()

    def diverged(self, what: str, steps: int = 1, bad_loss: bool = True) -> ValueError:
        """Returns the error of a training that has diverged. Its message names the last good checkpoint.

        If the loss is not finite, the weights from which it was computed are bad. If they are those of the latest
        checkpoint, this checkpoint is deleted, also in the folder `ema`. But if the training has resumed from it, it
        stays, and the message says how to remove it.

        Args:
            what: what was found, such as `"loss nan"`.
            steps: the value was found in one of this many steps, the last of which is the current step.
            bad_loss: whether the loss is not finite. `False` if only gradients or weights are not finite.
        """
        step = step_of(self._model)
        where = f"step {step}" if steps == 1 else f"steps {step - steps + 1} to {step}"
        message = f"{where}: {what}. The training has diverged; nothing of this is saved, and {{}}. A lower "
        message += "learning_rate may help"
        if self._step_without_loss is None or not bad_loss:
            return ValueError(message.format(self.last_good))
        latest = self.folder.checkpoint(self._step_without_loss)
        if self._restored:  # with other settings it may be good: the user decides
            return ValueError(message.format(f"{latest}, from which it resumed, has no finite loss: remove {latest}.*"))
        if self.writes:
            for folder in (self.folder, self.folder.ema):
                if self._step_without_loss in folder.steps():
                    folder.delete(self._step_without_loss)
        self._latest = self._step_without_loss = None
        return ValueError(message.format(self.last_good))

    def newest_whole(self) -> int | None:
        """The step of the newest checkpoint that can be read to its end and has finite weights.

        Checkpoints that a killed program did not finish do not count. `None` if the folder has no finished checkpoint.
        Logs a warning for every newer one that is damaged.

        Raises:
            MisfitError: all checkpoints are damaged.
        """
        problems = []
        unfinished = CheckpointFolder(os.path.join(self.folder.path, UNFINISHED)).steps()  # left by a killed program
        for step in reversed(self.folder.steps(files="index|data.*")):
            if step in unfinished:
                continue
            path = self.folder.checkpoint(step)
            try:
                check_whole(path, check_finite=True)
            except ValueError as error:
                problems.append(str(error))
                continue
            for problem in problems:
                logger.warning("damaged checkpoint: %s; %s is used instead", problem, os.path.basename(path))
            return step
        if problems:
            allowed = "a folder with a checkpoint that can be read"
            message = f"no checkpoint in {self.folder} can be read:"
            raise MisfitError("model_dir", self.folder.path, allowed, message, problems)
        return None

    def save(self, mid_interval: bool = False, loss_is_finite: bool = True) -> str:
        """Writes a checkpoint of the current state and returns its path.

        Args:
            mid_interval: whether the step is in the middle of an interval, whose sums are then saved, too.
            loss_is_finite: whether the loss of these weights is known to be finite. If not, one more checkpoint is kept
                until `confirm` or `diverged` is called.

        Raises:
            ValueError: a weight is not finite.
            OSError: the checkpoint cannot be written.
        """
        self.check_weights()
        step = step_of(self._model)
        path = self.folder.checkpoint(step)
        carried = self._model.carried_arrays()  # all workers take part
        sums = self._model.metric_totals if mid_interval else {}
        if self.writes:
            with self.naming_last_good():
                write_checkpoint(path, {**run_weights(self._model), **self._optimizer_variables(), **carried, **sums})
                self._latest = path
                self._delete_old(step, self._max_to_keep + (0 if loss_is_finite else 1))
        self._latest = path
        self._step_without_loss = None if loss_is_finite else step
        self._restored = False
        return path

    def save_best(self, value: float) -> None:
        """Writes the weights to the folder `best`, if their validation is better than that of the weights in it.

        Args:
            value: value of the metric that the family monitors, such as the loss. With nan or infinity, nothing is
                written.

        Raises:
            ValueError: a weight is not finite.
        """
        self.check_weights()
        if not self.writes or not math.isfinite(value):
            return
        family = self.folder.family
        best = self.folder.best
        recorded = self.folder.find_best() or {}
        best_so_far = recorded[family.monitor] if recorded and recorded.get("text") in (None, self._text) else None
        if best_so_far is not None and (value == best_so_far or family.best_of(value, best_so_far) != value):
            return
        step = step_of(self._model)
        with self.naming_last_good():
            best.save_weights(self._model, step)
            text = {"text": self._text} if self._text else {}
            write_json(self.folder.best_file, {"step": step, family.monitor: value, **text})
            for other in best.steps(files="index|data.*"):  # after `best.json` names the new one
                if other != step:
                    delete_checkpoint(best.checkpoint(other))
            best.write_state([step])

    def remove_best(self) -> None:
        """Deletes the folder `best`."""
        remove(self.folder.best.path)

    # Another worker might read a file before the chief has written it. So in the next two methods, the chief reads for
    # all workers, and all of them must call these methods.

    def load_best(self) -> int:
        """Sets the weights to those in the folder `best`, which must exist, and returns their step."""
        best = self.folder.find_best() if self.writes else None
        step = self._from_chief(best["step"] if best else 0)
        load_weights(self._model, self.folder.best.checkpoint(step))
        return step

    def stops_early(self, training: RunConfig, step: int) -> bool:
        """`RunFolder.stops_early`, as the chief decides it for all workers."""
        return bool(self._from_chief(int(self.writes and self.folder.stops_early(training, step, self._text))))

    def _from_chief(self, number: int) -> int:
        """The `number` that the chief gives, on all workers."""
        return broadcast_from_chief(self._model.distribute_strategy, number)

    def restore(self, path: str) -> Resumed:
        """Sets weights and optimizer from a checkpoint, and returns the other state in it. An error changes nothing.

        Args:
            path: prefix of the checkpoint.

        Raises:
            ParameterError: the checkpoint has no optimizer, does not fit, or cannot be read.
        """
        reader = CheckpointReader(path)
        read = weights_reader(self._model, reader)
        optimizer_shapes = {key: shape for key, shape in reader.shapes.items() if key.startswith("optimizer/")}
        if not optimizer_shapes:
            allowed = "a checkpoint with an optimizer"
            message = f"{path} contains weights but no optimizer state, so training cannot resume from it. "
            message += f"Start a new run with warm_start_path={path}"
            raise ParameterError("checkpoint", path, allowed, message)
        check_fits(path, optimizer_shapes, self._optimizer_variables())
        arrays = {name: read(name) for name in weights_by_name(self._model)}
        # All arrays are read before the first variable is set.
        keys_of_sums = [key for key in reader.shapes if key.partition(":")[0] == SUMS]
        other_keys = [*optimizer_shapes, *self._model.carried_names, *keys_of_sums]
        arrays |= {key: reader.get(key) for key in other_keys}
        for key, variable in {**weights_by_name(self._model), **self._optimizer_variables()}.items():
            variable.assign(arrays[key])
        self._latest = path
        self._step_without_loss = checkpoint_step(path)
        self._restored = True
        carried = {name: arrays[name] for name in self._model.carried_names}
        return Resumed(carried, {key: arrays[key] for key in keys_of_sums} or None)

    def _optimizer_variables(self) -> dict[str, Any]:
        """`{key in a checkpoint: variable of the optimizer}`."""
        return {f"optimizer/{i}": variable for i, variable in enumerate(self._model.optimizer.variables)}

    def _delete_old(self, latest: int, max_to_keep: int) -> None:
        """Deletes old checkpoints: of those up to the step `latest`, the newest `max_to_keep` are kept.

        Checkpoints of later steps are damaged, because the training would have resumed from them otherwise. They stay
        until the training writes checkpoints of these steps again.
        """
        steps = [step for step in self.folder.steps(files="index|data.*") if step <= latest]
        for step in steps[:-max_to_keep]:
            delete_checkpoint(self.folder.checkpoint(step))
        self.folder.write_state(steps[-max_to_keep:])


# --------------------------------------------------------------------------------------- the average of checkpoints


def average_checkpoints(
    model_dir: str,
    output_dir: str,
    checkpoints: list[str] | None = None,
    num_last_checkpoints: int | None = None,
    merge_lora: bool = False,
) -> list[str]:
    """Averages checkpoints of a run, and writes the result as a new run, which every program opens.

    Args:
        model_dir: folder of the run. The new run has its configuration and vocabularies.
        output_dir: folder of the new run. The step of its checkpoint is the highest step of the averaged ones.
        checkpoints: list of checkpoints: names in `model_dir`, or paths, also of other runs of the same model.
        num_last_checkpoints: how many of the latest checkpoints of the run to average. Either this or `checkpoints`
            must be given.
        merge_lora: whether to add low-rank updates to the kernels, so that the new run has none.

    Returns:
        List of str, the paths of the checkpoints that were averaged.

    Raises:
        ParameterError: a checkpoint does not exist, is damaged, is the same as another one of its step, or belongs to
            another model or vocabulary; the new folder holds a run; both or neither of `checkpoints` and
            `num_last_checkpoints` are given; or `merge_lora` is given for a run without LoRA.
    """
    if bool(checkpoints) == (num_last_checkpoints is not None):
        found = "got both" if checkpoints else "got neither"
        message = f"either checkpoints or num_last_checkpoints must be given, {found}"
        raise ParameterError("checkpoints", checkpoints, "given without num_last_checkpoints, or the reverse", message)
    source = RunFolder(model_dir)
    check_scheme("output_dir", output_dir)
    output = RunFolder(output_dir)
    config = source.read_config()
    vocabs = source.load_vocabs()
    output.check_new(vocabs, source.family, "output_dir")
    if checkpoints:
        if "" in checkpoints:
            message = f"checkpoints must name a checkpoint each, got an empty name: {named(','.join(checkpoints))}"
            raise ParameterError("checkpoints", checkpoints, "names of checkpoints", message)
        paths = [source.find_checkpoint(path) for path in checkpoints]
    else:
        paths = _latest_paths(source, num_last_checkpoints or 0)
    for path in paths:
        _check_same_model(source, path)
    try:
        readers = [*map(CheckpointReader, paths)]
        _check_different(checkpoints, readers)
        source.check_size(config["model"], readers[0])
        model = source.family.make(**config["model"])
        average_weights(model, readers)
        if merge_lora:
            config["model"] = _merged(model, config["model"], model_dir)
    except UnreadableCheckpoint as error:
        raise source.damaged_error(error, "checkpoints") from error
    step = max(map(checkpoint_step, paths))
    copied: dict[str, Any] = {name: config.get(name) for name in ("fingerprints", "init_from", "training")}
    output.create(config["data"], config["model"], vocabs, model, step, **copied)
    return paths


def _merged(model: Any, hyper_parameters: dict[str, Any], model_dir: str) -> dict[str, Any]:
    """Adds the low-rank updates of a model to its kernels, and returns its new hyper-parameters.

    Raises:
        ParameterError: the model has no low-rank updates.
    """
    if not hyper_parameters.get("lora_rank"):
        message = f"merge_lora is for a run with lora_rank, got {model_dir}, which has none"
        raise ParameterError("merge_lora", True, "left out for a run without lora_rank", message)
    model.merge_lora()
    return {**hyper_parameters, "lora_rank": 0, "lora_alpha": None}


def _check_different(checkpoints: Any, readers: Sequence[CheckpointReader]) -> None:
    """Raises ParameterError if two checkpoints of the same step have the same weights, as "best" and "latest" may.

    Args:
        checkpoints: the names that were given, for the error.
        readers: the checkpoints.
    """
    for reader, other in itertools.combinations(readers, 2):
        if checkpoint_step(reader.path) != checkpoint_step(other.path) or reader.weight_shapes != other.weight_shapes:
            continue
        keys = reader.weights
        if all(np.array_equal(reader.get(keys[name]), other.get(other.weights[name])) for name in keys):
            found = f"{other.path} twice"
            if not same_path(reader.path, other.path):
                found = f"{reader.path} and {other.path}, which have the same weights"
            message = f"checkpoints must be different checkpoints, got {found}"
            raise ParameterError("checkpoints", checkpoints, "different checkpoints", message)


def _check_same_model(source: RunFolder, path: str) -> None:
    """Raises ParameterError if a checkpoint is in the folder of a run with another model or vocabulary than `source`.

    Folders without `config.json` are not checked.
    """
    folder = RunFolder.around(path)
    if same_path(folder.path, source.path) or not folder.has_config():
        return
    family = source.family
    allowed = f"checkpoints of the model of {source}"
    if folder.family is not family:
        message = f"{path} is of the family {folder.family.name}, and model_dir {source} of {family.name}"
        raise ParameterError("checkpoints", path, allowed, message)
    check_vocab(folder, source.load_vocabs(), "An average needs one vocabulary", f"model_dir {source}")
    model = family.config(**source.read_config()["model"])
    other_model = family.config(**folder.read_config()["model"])
    for name, (other_value, value) in differing(other_model.to_dict(), model.to_dict()).items():
        if name not in model.free:
            difference = f"{name} is {brief(other_value)} in {folder} and {brief(value)} in model_dir"
            message = f"{path} is of another model than model_dir {source}: {difference}"
            raise ParameterError("checkpoints", path, allowed, message)


def average_weights(model: keras.Model, checkpoints: Sequence[str | CheckpointReader]) -> None:
    """Sets the weights of a model to the mean of the weights in the checkpoints, which is computed in float64.

    One variable is read at a time, so the checkpoints need not fit into memory.

    Raises: as `load_tf1_checkpoint`, but after an error, some weights may be set.
    """
    readers = [weights_reader(model, checkpoint) for checkpoint in checkpoints]
    for name, variable in weights_by_name(model).items():
        total = np.zeros(variable.shape)
        for read in readers:
            total += read(name)
        variable.assign((total / len(readers)).astype(variable.dtype))


def _latest_paths(folder: RunFolder, number: int) -> list[str]:
    """The paths of the latest `number` checkpoints of a run, see `RunFolder.checkpoints`.

    Raises ParameterError if there are fewer, or if the number is below 1.
    """
    at_least(1)("num_last_checkpoints", number)
    paths = folder.checkpoints()
    if len(paths) < number:
        names = ", ".join(map(os.path.basename, paths)) or "none"
        message = f"num_last_checkpoints={number}, but model_dir {folder} contains {len(paths)}: {names}"
        raise ParameterError("num_last_checkpoints", number, f"at most {len(paths)}", message)
    return paths[-number:]
