"""Weights in checkpoint files: names, reading, checks and writing.

A checkpoint of a run has the prefix `weights/` before the names of the weights, which separates them from the variables
of the optimizer.
"""

from __future__ import annotations

import contextlib
import glob
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from txl_tf.calls import checked_call
from txl_tf.config import ModelConfig
from txl_tf.errors import ParameterError, named
from txl_tf.files import (
    absolute,
    check_no_pattern,
    has_pattern,
    is_pipe,
    is_remote,
    naming_write_errors,
    remove,
    removed_on_error,
    write_atomic,
)
from txl_tf.language.language_model import TransformerXLLM
from txl_tf.nn.base import EMBEDDING_LIKE
from txl_tf.nn.parts import own_parts
from txl_tf.runs.families.record import families_of_model

RUN_WEIGHTS = "weights/"
_OLD_SUFFIX = "/.ATTRIBUTES/VARIABLE_VALUE"  # of the keys in checkpoints of earlier versions
UNFINISHED = "unfinished.tmp"  # folder of a checkpoint that is being written


def weights_by_name(model: keras.Model) -> dict[str, Any]:
    """The weights of a model: `{name in a checkpoint: Keras variable}`.

    Weights that another program has, too, have that program's names, see `Family.weight_names`. The name of any other
    weight is its path in Keras, without the name of the model itself and without `EMBEDDING_LIKE`, which only
    optimizers need.
    """
    paths = {variable.path.replace(f"/{EMBEDDING_LIKE}/", "/"): variable for variable in model.weights}
    by_path = {path.partition("/")[2]: variable for path, variable in paths.items()}
    family, *_ = families_of_model(model)
    known = family.weight_names(model)
    ids = {id(variable) for variable in known.values()}
    return known | {name: variable for name, variable in by_path.items() if id(variable) not in ids}


@checked_call
def tf1_variables(lm: TransformerXLLM) -> dict[str, np.ndarray]:
    """The weights of a language model, with the names, layouts and order of the original program.

    Args:
        lm: a Transformer-XL language model.

    Returns:
        `{name: NumPy array}`.

    Raises:
        ParameterError: the original program cannot compute a part of the model.
    """
    check_original(lm)
    return {name: variable.numpy() for name, variable in weights_by_name(lm).items()}


def check_original(lm: TransformerXLLM) -> None:
    """Raises ParameterError if the original program cannot compute a part of the model, such as a user's layer."""
    scheme = getattr(lm.network, "scheme", None)  # a user's network may have none
    positions = getattr(scheme, "known_as", "relative")
    if positions != "relative":
        message = (
            f"the original program has no positions={positions!r}, only 'relative': save the model by lm.save(path)"
        )
        raise ParameterError("positions", positions, ["relative"], message)
    for name in ("pre_lnorm", "activation", "norm", "tie_weight", "lora_rank"):
        value = getattr(lm, name, None)
        only = getattr(ModelConfig, name)  # the default is what the original program computes
        if value not in (None, only):
            message = f"the original program has no {name}={value}, only {only}: save the model by lm.save(path)"
            raise ParameterError(name, value, [only], message)
    parts = own_parts(lm)
    if parts:
        message = f"the original program cannot compute {', '.join(parts)}: save the model by lm.save(path)"
        raise ParameterError("lm", parts, "a model of the library's parts alone", message)


@checked_call
def load_tf1_checkpoint(lm: TransformerXLLM, path: str | os.PathLike) -> None:
    """Sets the weights of `lm` from a checkpoint of the original program.

    Other variables in the checkpoint, such as Adam's slots and the step, are not read.

    Args:
        lm: a model with the hyper-parameters of the checkpoint.
        path: prefix of the checkpoint, such as `"model.ckpt-0"`.

    Raises:
        ParameterError: there is no checkpoint at `path`, it cannot be read, a weight is not finite, or it does not fit
            the model. In the last case, the message names every variable that is missing, that has another shape (with
            both shapes) or that the model does not have. After an error, the weights of the model are as before.
    """
    load_weights(lm, path, check_finite=True)


def load_weights(
    model: keras.Model,
    checkpoint: str | os.PathLike | CheckpointReader,
    leave_out: tuple[str, ...] = (),
    extend: bool = False,
    check_finite: bool = False,
) -> None:
    """Sets the weights of a model of any family from a checkpoint of a run or of the original program.

    Args:
        model: a model with the hyper-parameters of the checkpoint.
        checkpoint: prefix of the checkpoint, or its reader.
        leave_out: beginnings of the names of weights that stay as they are.
        extend: whether a weight of the model may be longer in one dimension than in the checkpoint, as with an extended
            vocabulary. The rest of the weight keeps its values.
        check_finite: whether a weight that is not finite is an error.

    After an error, the weights of the model are as before.

    Raises: as `load_tf1_checkpoint`.
    """
    reader = checkpoint if isinstance(checkpoint, CheckpointReader) else CheckpointReader(checkpoint)
    read = weights_reader(model, reader, leave_out, extend)
    variables = _without(weights_by_name(model), leave_out)
    arrays = {name: read(name) for name in variables}  # all of them, before the first is set
    for name, array in arrays.items():
        if check_finite and not is_finite(array):
            message = f"{reader.path} has weights that are not finite: {name}"
            raise UnreadableCheckpoint("checkpoint", reader.path, "finite weights", message)
    for name, variable in variables.items():
        variable.assign(arrays[name])


def is_finite(array: np.ndarray) -> bool:
    """Whether all numbers of an array are finite. `np.isfinite(array)` would need memory for a bool for each."""
    return not array.size or bool(np.isfinite(array.min()) and np.isfinite(array.max()))


def _without(weights: dict[str, Any], leave_out: tuple[str, ...]) -> dict[str, Any]:
    """The weights whose names do not begin with one of `leave_out`."""
    return {name: weight for name, weight in weights.items() if not name.startswith(leave_out)}


def weights_reader(
    model: keras.Model,
    checkpoint: str | os.PathLike | CheckpointReader,
    leave_out: tuple[str, ...] = (),
    extend: bool = False,
) -> Callable[[str], np.ndarray]:
    """Checks that a checkpoint fits a model, and returns a function that reads one array by the name of its weight.

    Args: see `load_weights`.

    Raises: as `load_tf1_checkpoint`.
    """
    reader = checkpoint if isinstance(checkpoint, CheckpointReader) else CheckpointReader(checkpoint)
    variables = _without(weights_by_name(model), leave_out)
    check_fits(reader.path, _without(reader.weight_shapes, leave_out), variables, extend)

    def read(name: str) -> np.ndarray:
        """The array of a weight, in the shape of the model's weight. If this is longer, the rest has current values."""
        array = reader.get(reader.weights[name])
        if array.shape == tuple(variables[name].shape):
            return array
        longer = np.array(keras.ops.convert_to_numpy(variables[name]))
        longer[tuple(map(slice, array.shape))] = array
        return longer

    return read


class CheckpointGone(ParameterError):
    """There is no checkpoint at a path. A training run may have deleted it.

    Attributes:
        value: the path.
    """


class UnreadableCheckpoint(ParameterError):
    """A file of a checkpoint is damaged or missing, or a weight is not finite.

    Attributes:
        value: path of the checkpoint.
    """


class MisfitError(ParameterError):
    """A checkpoint does not fit a model, a run has another configuration, or no checkpoint of a run can be read.

    Attributes:
        value: path of the checkpoint or of the run.
        differences: descriptions of what does not fit, or cannot be read. Each is a line of the message, which may be
            longer than that of other errors.
    """

    def __init__(self, name: str, path: str, allowed: str, message: str, differences: Sequence[str] = ()):
        super().__init__(name, path, allowed, message)
        self.differences = list(differences)

    def __str__(self) -> str:
        return "\n  ".join([super().__str__(), *self.differences])


class CheckpointReader:
    """The arrays in a checkpoint of a run or of the original program.

    Its files stay open as long as the object exists. So in a local folder, they may be deleted while they are read.

    Args:
        path: prefix of the checkpoint.

    Attributes:
        shapes: `{key: shape}` of all arrays.
        weights: `{name in weights_by_name: key in the file}` of the weights.

    Raises:
        CheckpointGone: there is no checkpoint at `path`.
        UnreadableCheckpoint: its index is damaged, or a file of arrays is missing.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = os.fspath(path)
        check_exists(self.path)
        with naming_checkpoint_errors(self.path):
            self._reader = tf.train.load_checkpoint(self._plain_path())
            self.shapes = dict(sorted(self._reader.get_variable_to_shape_map().items()))
            if self.shapes:  # reading an array opens the file of the arrays: a missing one is noticed now
                self._reader.get_tensor(min(self.shapes, key=lambda key: math.prod(self.shapes[key])))
        self.weights = {}
        for key in self.shapes:
            if key.startswith(RUN_WEIGHTS):
                self.weights[_weight_name(key.removeprefix(RUN_WEIGHTS))] = key
            elif key.startswith("transformer/") and not key.endswith(("/Adam", "/Adam_1")):
                self.weights[key] = key  # of the original program, without the moments of its optimizer

    def _plain_path(self) -> str:
        """A path to the checkpoint that TensorFlow can open, although it takes paths for patterns.

        If a local path contains [, ] or a backslash, links to the files are made in a temporary folder, and their path
        is returned. Other paths are returned as they are.
        """
        if not has_pattern(self.path) or is_remote(self.path):
            return self.path
        folder, name = os.path.split(os.path.abspath(self.path))
        self._links = tempfile.TemporaryDirectory()  # deleted with this object
        for file in os.listdir(folder):
            if file.startswith((f"{name}.index", f"{name}.data-")):
                os.symlink(os.path.join(folder, file), os.path.join(self._links.name, file.replace(name, "ckpt", 1)))
        return os.path.join(self._links.name, "ckpt")

    @property
    def weight_shapes(self) -> dict[str, list]:
        """`{name: shape}` of the weights."""
        return {name: self.shapes[key] for name, key in self.weights.items()}

    def get(self, key: str) -> np.ndarray:
        """The array of a key. Raises UnreadableCheckpoint if its checksum is wrong."""
        with naming_checkpoint_errors(self.path):
            return self._reader.get_tensor(key)


def _weight_name(key: str) -> str:
    """The name of a weight, from its key in the checkpoint of a run without `RUN_WEIGHTS`.

    Earlier versions wrote a `tf.train.Checkpoint`, which adds a suffix, and writes ".S" for "/" and ".." for ".".
    """
    name = key.removesuffix(_OLD_SUFFIX)
    return name if name == key else re.sub(r"\.(S|\.)", lambda match: "/" if match[1] == "S" else ".", name)


def weight_shapes(path: str | os.PathLike) -> dict[str, list]:
    """`{name: shape}` of the weights in a checkpoint of a run or of the original program."""
    return CheckpointReader(path).weight_shapes


@contextlib.contextmanager
def naming_checkpoint_errors(path: str) -> Iterator[None]:
    """In this block, which reads a checkpoint, an error of reading becomes an UnreadableCheckpoint.

    It becomes a CheckpointGone if the checkpoint does not exist any more.
    """
    try:
        yield
    except (tf.errors.OpError, OSError, IndexError, RuntimeError) as error:
        check_exists(path)
        message = f"{path} cannot be read: {error}"
        raise UnreadableCheckpoint("checkpoint", path, "a checkpoint that can be read", message) from error


def check_whole(path: str, check_finite: bool = False) -> None:
    """Reads all arrays of a checkpoint.

    Args:
        path: prefix of the checkpoint.
        check_finite: whether a weight that is not finite is an error; only for checkpoints of runs.

    Raises:
        CheckpointGone: there is no such checkpoint.
        UnreadableCheckpoint: an array cannot be read, has a wrong checksum, or is a weight that is not finite.
    """
    reader = CheckpointReader(path)
    for key in reader.shapes:
        array = reader.get(key)
        if check_finite and key.startswith(RUN_WEIGHTS) and not np.isfinite(array).all():
            message = f"{path} has weights that are not finite: {key.removeprefix(RUN_WEIGHTS)}"
            raise UnreadableCheckpoint("checkpoint", path, "finite weights", message)


@checked_call
def save_tf1_checkpoint(lm: TransformerXLLM, path: str | os.PathLike) -> None:
    """Writes the weights of `lm` as a checkpoint that the original program evaluates.

    A missing folder is made. The file `checkpoint` in the folder then names the new checkpoint as the latest.

    Args:
        lm: a Transformer-XL language model.
        path: prefix of the checkpoint, such as `"model.ckpt-0"`, without `[`, `]` and backslash.

    Raises:
        ParameterError: `path` has one of these characters or no last part, or the original program cannot compute a
            part of the model.
        OSError: the checkpoint cannot be written.
    """
    path = os.fspath(path)
    if not os.path.basename(path):
        raise ParameterError("path", path, "the prefix of the new checkpoint, such as model.ckpt-0")
    check_no_pattern("path", absolute(path))
    check_original(lm)
    write_checkpoint(path, weights_by_name(lm))
    write_state(os.path.dirname(path) or ".", [os.path.basename(path)])


def write_checkpoint(path: str, variables: dict[str, Any]) -> None:
    """Writes a checkpoint of Keras variables and arrays.

    The files are written to a temporary folder and then moved, the index file last. So after an error, there is no
    checkpoint at `path`, or the old one.

    Args:
        path: prefix of the checkpoint.
        variables: `{key: variable or array}`.

    Raises:
        OSError: a file cannot be written.
    """
    folder = os.path.dirname(path) or "."
    name = os.path.basename(path)
    unfinished = os.path.join(folder, UNFINISHED)
    with naming_write_errors(path):
        remove(unfinished)  # left by a program that was killed
        with removed_on_error(unfinished):
            tf.io.gfile.makedirs(unfinished)
            tf.raw_ops.SaveV2(
                prefix=os.path.join(unfinished, name),
                tensor_names=list(variables),
                shape_and_slices=[""] * len(variables),
                tensors=[tf.convert_to_tensor(getattr(value, "value", value)) for value in variables.values()],
            )
            delete_checkpoint(path)  # an older one, perhaps damaged, might have other files
            for file in sorted(tf.io.gfile.listdir(unfinished)):  # *.data-... before *.index
                tf.io.gfile.rename(os.path.join(unfinished, file), os.path.join(folder, file))
        remove(unfinished)


def write_state(folder: str, names: list[str]) -> None:
    """Writes the file `checkpoint`, by which TensorFlow finds the checkpoints of a folder.

    Args:
        folder: the folder.
        names: names of the checkpoints, the latest last.
    """
    lines = [f'model_checkpoint_path: "{names[-1]}"', *(f'all_model_checkpoint_paths: "{name}"' for name in names)]
    write_atomic(os.path.join(folder, "checkpoint"), "\n".join(lines) + "\n")


def delete_checkpoint(path: str) -> None:
    """Deletes the files of a checkpoint, the index file first."""
    folder = os.path.dirname(path) or "."
    name = os.path.basename(path)
    for file in sorted(tf.io.gfile.listdir(folder), reverse=True):
        if file.startswith((f"{name}.index", f"{name}.data-")):
            remove(os.path.join(folder, file))


def check_exists(path: str | os.PathLike) -> None:
    """Checks that there is a checkpoint at the prefix `path`.

    Raises:
        CheckpointGone: there is no index file.
        UnreadableCheckpoint: a file is a named pipe or a socket.
    """
    path = os.fspath(path)
    if not tf.io.gfile.exists(f"{path}.index"):
        message = f"no checkpoint at {named(path)}: {named(path)}.index does not exist"
        raise CheckpointGone("checkpoint", path, "the prefix of a checkpoint", message)
    data_files = [] if is_remote(path) else glob.glob(f"{glob.escape(path)}.data-*")
    for file in [f"{path}.index", *data_files]:
        if is_pipe(file):  # TensorFlow would wait for ever
            message = f"{path} cannot be read: {file} is a named pipe or a socket, not a file"
            raise UnreadableCheckpoint("checkpoint", path, "a checkpoint that can be read", message)


def check_fits(path: str, shapes: dict[str, list], variables: dict[str, Any], extend: bool = False) -> None:
    """Raises MisfitError, which names every difference, unless a checkpoint has exactly the variables of a model.

    Args:
        path: prefix of the checkpoint, for the message.
        shapes: `{name: shape}` of its arrays.
        variables: `{name: variable}` of the model.
        extend: whether a variable may be longer in one dimension than its array.
    """
    problems = []
    for name, variable in variables.items():
        if name not in shapes:
            problems.append(f"{name} is missing from the checkpoint")
        elif list(shapes[name]) != list(variable.shape) and not (extend and _is_longer(variable.shape, shapes[name])):
            problems.append(f"{name} is {list(shapes[name])} in the checkpoint and {list(variable.shape)} in the model")
    for name in sorted(set(shapes) - set(variables)):
        problems.append(f"{name} {list(shapes[name])} is in the checkpoint and not in the model")
    if problems:
        allowed = "a checkpoint that fits the model"
        raise MisfitError("checkpoint", path, allowed, f"{path} does not fit the model:", problems)


def _is_longer(shape: tuple[int, ...], than: list[int]) -> bool:
    """Whether a shape is longer than another in one dimension and the same in all others."""
    pairs = [pair for pair in zip(shape, than, strict=False) if pair[0] != pair[1]]
    return len(shape) == len(than) and len(pairs) == 1 and pairs[0][0] > pairs[0][1]


def checkpoint_step(path: str | os.PathLike) -> int:
    """The training step of a checkpoint: the number at the end of its name, or 0 without one."""
    number = re.search(r"-(\d+)$", os.fspath(path))
    return int(number[1]) if number else 0


class CheckpointFolder:
    """A folder of checkpoints `ckpt-<step>`."""

    def __init__(self, path: str):
        self.path = path

    def checkpoint(self, step: int) -> str:
        """The path of the checkpoint of a step."""
        return os.path.join(self.path, f"ckpt-{step}")

    def steps(self, files: str = "index") -> list[int]:
        """Steps of the checkpoints, ascending.

        Args:
            files: regular expression. A step counts if the folder has a file `ckpt-<step>.<end>` whose `<end>` matches
                it. By default, that is the index file, which is written last.
        """
        pattern = re.compile(rf"ckpt-(\d+)\.({files})")
        names = tf.io.gfile.listdir(self.path) if tf.io.gfile.isdir(self.path) else []
        return sorted({int(match[1]) for match in map(pattern.fullmatch, names) if match})

    def save_weights(self, model: keras.Model | dict[str, Any], step: int) -> str:
        """Writes only the weights as the checkpoint of a step, and returns its path.

        Every program can open the checkpoint. A run cannot resume from it, because it has no optimizer. But a new run
        can start from it by `warm_start_path`.

        Args:
            model: the model, or `{name: weight}`.
            step: number of the step.
        """
        path = self.checkpoint(step)
        write_checkpoint(path, run_weights(model))
        self.write_state(self.steps())
        return path

    def write_state(self, steps: list[int]) -> None:
        """Writes the file `checkpoint`, by which TensorFlow finds these checkpoints; without steps, removes it."""
        if steps:
            write_state(self.path, [f"ckpt-{step}" for step in steps])
        else:
            remove(os.path.join(self.path, "checkpoint"))

    def delete(self, step: int) -> None:
        """Deletes the checkpoint of a step."""
        delete_checkpoint(self.checkpoint(step))
        self.write_state(self.steps())


def run_weights(model: keras.Model | dict[str, Any]) -> dict[str, Any]:
    """`{key in the checkpoint of a run: variable}` of a model, or of `{name: weight}`."""
    weights = model if isinstance(model, dict) else weights_by_name(model)
    return {f"{RUN_WEIGHTS}{name}": variable for name, variable in weights.items()}
