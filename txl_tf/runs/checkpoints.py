"""Checkpoints of a training: all that it needs to go on exactly; and the average of several."""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from txl_tf.config import RunConfig
from txl_tf.errors import named
from txl_tf.files import remove, same_path, write_json
from txl_tf.runs.folder import RunFolder
from txl_tf.runs.same_run import check_vocab
from txl_tf.runs.weights import (
    UNFINISHED,
    CheckpointFolder,
    CheckpointReader,
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
from txl_tf.schema import brief, differing
from txl_tf.training.distribution import broadcast_from_chief

logger = logging.getLogger("txl_tf")
SUMS = "window"  # the key, in a checkpoint, of the sums since the last line of `log.csv`


class RunCheckpoints:
    """The checkpoints of a training, numbered by step.

    They hold the weights (a language model's by the original's names), the optimizer's variables and the memory, if the
    model has one. The memory is one array of all replicas' rows, so that another number of replicas can continue. A
    checkpoint in the middle of an interval of steps also holds the sums behind the interval's line in `log.csv`.

    Args:
        model: `MemoryModel` or `Resumable`, compiled, its optimizer built.
        max_to_keep: older checkpoints are deleted.
        write: whether to write at all. Of several workers that train together only the chief does; all must call
            `save` and `save_best`.
        text: fingerprint of the text that is validated on; best losses on another text are ignored.
    """

    def __init__(
        self, model: keras.Model, folder: RunFolder, max_to_keep: int = 5, write: bool = True, text: str | None = None
    ):
        self._model = model
        self._text = text
        self.folder = folder
        self._max_to_keep = max_to_keep
        self.write = write
        self._last: str | None = None
        self._unproven: int | None = None  # step of a checkpoint that is the latest, and whose loss is not known yet
        self._restored = False  # whether that checkpoint is the one that the training goes on from

    @property
    def latest(self) -> str | None:
        """Path of the checkpoint that was saved or restored last, or else of the latest in the folder, or `None`."""
        if self._last is None and (steps := self.folder.steps()):
            return self.folder.checkpoint(steps[-1])
        return self._last

    @property
    def last_good(self) -> str:
        """A sentence for error messages."""
        latest = self.latest
        return f"the last good checkpoint is {latest}" if latest else "there is no checkpoint yet"

    @contextlib.contextmanager
    def naming_last(self) -> Iterator[None]:
        """Adds to an error in writing which checkpoint there is to go on from."""
        try:
            yield
        except OSError as error:
            raise OSError(f"{error}\n{self.last_good}") from error

    def check_weights(self) -> None:
        """Raises ValueError, which names the last good checkpoint, unless all weights are finite."""
        for name, variable in weights_by_name(self._model).items():
            value = tf.convert_to_tensor(getattr(variable, "value", variable))
            if value.dtype.is_floating and not tf.reduce_all(tf.math.is_finite(value)):
                raise self.diverged(f"{name} has values that are not finite", loss_too=False)

    def confirm(self) -> None:
        """The weights of the latest checkpoint have a finite loss: it is a good one, and older ones may be deleted."""
        step, self._unproven = self._unproven, None
        if step is not None and self.write and not self._restored:
            self._sweep(step, self._max_to_keep)

    def check_validation(self, loss: float) -> None:
        """Raises ValueError, which names the last good checkpoint, unless the loss of a validation is finite."""
        if not math.isfinite(loss):
            raise self.diverged(f"validation loss {loss}")
        self.confirm()

    def diverged(self, what: str, steps: int = 1, loss_too: bool = True) -> ValueError:
        """The error of a training that has diverged; deletes the latest checkpoint where its weights have no loss.

        Args:
            what: what was found.
            steps: in how many steps it was found, the last of them the present one.
            loss_too: whether the loss is not finite, which the weights before this step then gave.
        """
        step = int(self._model.optimizer.iterations.numpy())
        where = f"step {step}" if steps == 1 else f"steps {step - steps + 1} to {step}"
        message = f"{where}: {what}. The training has diverged; nothing of this is saved, and {{}}. A lower "
        message += "learning_rate may help"
        if self._unproven is None or not loss_too:
            return ValueError(message.format(self.last_good))
        latest = self.folder.checkpoint(self._unproven)
        if self._restored:  # perhaps good for other settings: the user decides
            return ValueError(message.format(f"{latest}, where it began, has no finite loss: remove {latest}.*"))
        if self.write:
            for folder in (self.folder, self.folder.ema):
                if self._unproven in folder.steps():
                    folder.delete(self._unproven)
        self._last = self._unproven = None
        return ValueError(message.format(self.last_good))

    def newest_whole(self) -> int | None:
        """Step of the newest checkpoint that can be read from end to end and has finite weights; logs which are not.
        `None` in a new folder.

        Raises:
            ValueError: there are checkpoints, and none can be read.
        """
        problems = []
        unfinished = CheckpointFolder(os.path.join(self.folder.path, UNFINISHED)).steps()  # of a killed program
        for step in reversed(self.folder.steps(files="index|data.*")):
            if step in unfinished:
                continue
            try:
                check_whole(self.folder.checkpoint(step), finite=True)
            except ValueError as error:
                problems.append(str(error))
                continue
            for problem in problems:
                logger.warning("damaged checkpoint: %s; going on from the one before", problem)
            return step
        if problems:
            raise ValueError(f"no checkpoint in {self.folder} can be read:\n  " + "\n  ".join(problems))
        return None

    def save(self, mid_interval: bool = False, proven: bool = True) -> str:
        """Writes a checkpoint of the present state and returns its path.

        Args:
            mid_interval: whether steps have been done since the last line of `log.csv`, which the next will count.
            proven: whether the loss of these weights is known to be finite. If not, one more checkpoint is kept until
                `confirm` or `diverged` says so.

        Raises:
            ValueError: a weight is not finite.
        """
        self.check_weights()
        step = int(self._model.optimizer.iterations.numpy())
        path = self.folder.checkpoint(step)
        carried = self._model.carried_arrays()  # of all workers
        if self.write:
            sums = {SUMS: self._model.metric_totals} if mid_interval else {}
            with self.naming_last():
                write_checkpoint(path, {**run_weights(self._model), **self._optimizer(), **carried, **sums})
                self._last = path
                self._sweep(step, self._max_to_keep + (0 if proven else 1))
        self._last = path
        self._unproven, self._restored = None if proven else step, False
        return path

    def save_best(self, value: float) -> None:
        """Writes the weights to the folder `best`, if their validation is better than the one there.

        Args:
            value: what the folder monitors, such as the loss.

        Raises:
            ValueError: a weight is not finite.
        """
        self.check_weights()
        if not self.write or not math.isfinite(value):
            return
        family, best = self.folder.family, self.folder.best
        found = self.folder.find_best() or {}
        rival = found[family.monitor] if found and found.get("text") in (None, self._text) else None
        if rival is not None and (value == rival or family.best_of(value, rival) != value):
            return
        step = int(self._model.optimizer.iterations.numpy())
        with self.naming_last():
            best.save_weights(self._model, step)
            text = {"text": self._text} if self._text else {}
            write_json(self.folder.best_file, {"step": step, family.monitor: value, **text})
            for other in best.steps(files="index|data.*"):  # not before the new one is named
                if other != step:
                    delete_checkpoint(best.checkpoint(other))
            best.write_state([step])

    def remove_best(self) -> None:
        remove(self.folder.best.path)

    # What the chief writes, others may read too early: it reads for all workers, who must all call these.

    def load_best(self) -> int:
        """Sets the weights to those with the best validation; returns their step."""
        step = self._from_chief(self.folder.find_best()["step"] if self.write else 0)
        load_weights(self._model, self.folder.best.checkpoint(step))
        return step

    def stops_early(self, training: RunConfig, step: int) -> bool:
        """`RunFolder.stops_early`."""
        return bool(self._from_chief(int(self.write and self.folder.stops_early(training, step, self._text))))

    def _from_chief(self, number: int) -> int:
        return broadcast_from_chief(self._model.distribute_strategy, number)

    def restore(self, path: str) -> tuple[dict[str, np.ndarray], np.ndarray | None]:
        """Sets weights and optimizer from a checkpoint, or nothing at all if it does not fit.

        Returns:
            `(carried, sums)`: `carried_arrays` to go on with, and `metric_totals` of the interval in whose middle it
            was saved, or `None`.
        """
        reader = CheckpointReader(path)
        read = weights_reader(self._model, reader)
        optimizer = {key: shape for key, shape in reader.shapes.items() if key.startswith("optimizer/")}
        if not optimizer:
            raise ValueError(
                f"{path} has weights alone, no optimizer to go on with: start a new run with warm_start_path={path}"
            )
        check_fits(path, optimizer, self._optimizer())
        arrays = {name: read(name) for name in weights_by_name(self._model)}
        others = [*optimizer, *self._model.carried_names, *({SUMS} & reader.shapes.keys())]
        arrays |= {key: reader.get(key) for key in others}
        for key, variable in {**weights_by_name(self._model), **self._optimizer()}.items():
            variable.assign(arrays[key])
        self._last = path
        self._unproven, self._restored = checkpoint_step(path), True
        return {name: arrays[name] for name in self._model.carried_names}, arrays.get(SUMS)

    def _optimizer(self) -> dict[str, Any]:
        return {f"optimizer/{i}": variable for i, variable in enumerate(self._model.optimizer.variables)}

    def _sweep(self, latest: int, most: int) -> None:
        """Deletes old checkpoints. Those past `latest` are damaged: they stay until others take their place."""
        steps = [step for step in self.folder.steps(files="index|data.*") if step <= latest]
        for step in steps[:-most]:
            delete_checkpoint(self.folder.checkpoint(step))
        self.folder.write_state(steps[-most:])


# ------------------------------------------------------------------------------------------------------ their average


def average_checkpoints(
    model_dir: str, output_dir: str, checkpoints: list[str] | None = None, num_last_checkpoints: int | None = None
) -> list[str]:
    """Averages checkpoints of a run into the folder of a new one, which every program opens.

    Args:
        model_dir: the run's folder; the new one has its configuration and vocabulary.
        output_dir: the new folder. Its checkpoint bears the highest step of those averaged.
        checkpoints: list of checkpoints: names in `model_dir`, or paths, also of other runs of the same model.
        num_last_checkpoints: how many of the run's latest to take; either this or `checkpoints`.

    Returns:
        list of str, the paths that were averaged.

    Raises:
        ValueError: a checkpoint is not there, or is of another model or vocabulary: names what differs.
    """
    if bool(checkpoints) == (num_last_checkpoints is not None):
        raise ValueError("either checkpoints or num_last_checkpoints must say what to average")
    source, output = RunFolder(model_dir), RunFolder(output_dir)
    config = source.read_config()
    vocabs = source.load_vocabs()
    output.check_new(vocabs, source.family)
    if checkpoints:
        if "" in checkpoints:
            raise ValueError(
                f"checkpoints must name a checkpoint each, got an empty name: {named(','.join(checkpoints))}"
            )
        paths = [source.find_checkpoint(path) for path in checkpoints]
    else:
        paths = _last(source, num_last_checkpoints)
    for path in paths:
        _check_same_model(source, path)
    try:
        readers = [*map(CheckpointReader, paths)]
        source.check_size(config["model"], readers[0])
        model = source.family.make(**config["model"])
        average_weights(model, readers)
    except UnreadableCheckpoint as error:
        raise source.way_out(error, "checkpoints") from error
    step = max(map(checkpoint_step, paths))
    others = {name: config.get(name) for name in ("fingerprints", "init_from", "training")}
    output.create(config["data"], config["model"], vocabs, model, step, **others)
    return paths


def _check_same_model(source: RunFolder, path: str) -> None:
    """Raises ValueError where a checkpoint lies in the folder of another run, of another model or vocabulary."""
    folder = RunFolder.around(path)
    if same_path(folder.path, source.path) or not folder.has_config():
        return
    here, there = source.family, folder.family
    if here is not there:
        raise ValueError(f"{path} is of the family {there.name}, and model_dir {source} of {here.name}")
    check_vocab(folder, source.load_vocabs(), "An average needs one vocabulary", f"model_dir {source}")
    model, other = (here.config(**some.read_config()["model"]) for some in (source, folder))
    for name, (before, now) in differing(other.to_dict(), model.to_dict()).items():
        if name not in model.free:
            found = f"{name} is {brief(before)} there and {brief(now)} here"
            raise ValueError(f"{path} is of another model than model_dir {source}: {found}")


def average_weights(model: keras.Model, checkpoints: list[str | CheckpointReader]) -> None:
    """Sets the weights to the mean of those in the checkpoints, summed in float64, one variable at a time."""
    readers = [weights_reader(model, checkpoint) for checkpoint in checkpoints]
    for name, variable in weights_by_name(model).items():
        total = np.zeros(variable.shape)
        for read in readers:
            total += read(name)
        variable.assign((total / len(readers)).astype(variable.dtype))


def _last(folder: RunFolder, number: int) -> list[str]:
    if number < 1:
        raise ValueError(f"num_last_checkpoints must be at least 1, got {number}")
    paths = folder.checkpoints()
    if len(paths) < number:
        names = ", ".join(map(os.path.basename, paths)) or "none"
        raise ValueError(f"num_last_checkpoints={number}, but model_dir {folder} holds {len(paths)}: {names}")
    return paths[-number:]
