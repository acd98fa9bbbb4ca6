"""Weights in checkpoint files: the original's names, reading, checking and writing.

A checkpoint holds its weights under the original's variable names. Those of a run have the prefix `weights/`, which
keeps them apart from the optimizer.
"""

from __future__ import annotations

import contextlib
import glob
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from txl_tf.errors import ParameterError, named
from txl_tf.files import (
    absolute,
    check_no_pattern,
    has_pattern,
    is_pipe,
    is_remote,
    remove,
    removed_on_error,
    write_atomic,
    writing,
)
from txl_tf.language.language_model import LanguageModel, TransformerXLLM
from txl_tf.nn.base import EMBEDDING_LIKE
from txl_tf.nn.feed_forward import PositionwiseFF
from txl_tf.nn.parts import own_parts
from txl_tf.transformer_xl.attention import SegmentAttention

RUN_WEIGHTS = "weights/"
UNFINISHED = "unfinished.tmp"  # folder of a checkpoint that is being written


def weights_by_name(model: keras.Model) -> dict[str, Any]:
    """`{name in a checkpoint: Keras variable}`.

    Names are the original's where it has such a model. Otherwise they are Keras's paths without the name of the model
    itself and without `EMBEDDING_LIKE`, which is there for optimizers alone. So are those of a user's own parts.
    """
    paths = {variable.path.replace(f"/{EMBEDDING_LIKE}/", "/"): variable for variable in model.weights}
    by_path = {path.partition("/")[2]: variable for path, variable in paths.items()}
    if not isinstance(model, LanguageModel):
        return by_path
    original = _original_names(model)
    named = {id(variable) for variable in original.values()}
    return original | {name: variable for name, variable in by_path.items() if id(variable) not in named}


def _original_names(lm: LanguageModel) -> dict[str, Any]:
    """`{variable name of the original: Keras variable}`, of the weights that the original has."""
    network, softmax = lm.network, lm.softmax
    variables = {"r_w_bias": network.r_w_bias, "r_r_bias": network.r_r_bias, "pos_table": network.pos_table}

    scope = "adaptive_embed/cutoff_{}/" if network.embedding.div_val > 1 else "adaptive_embed/"
    for i, (table, proj) in enumerate(zip(network.embedding.tables, network.embedding.projs, strict=True)):
        variables[scope.format(i) + "lookup_table"] = table
        variables[scope.format(i) + "proj_W"] = proj

    for i, layer in enumerate(network.decoder_layers):
        attn, ff = getattr(layer, "rel_attn", None), getattr(layer, "ff", None)
        if not isinstance(attn, SegmentAttention) or not isinstance(ff, PositionwiseFF):
            continue  # of a user's own layer
        for name, variable in {
            "rel_attn/qkv/kernel": attn.qkv_kernel,
            "rel_attn/r/kernel": attn.r_kernel,
            "rel_attn/o/kernel": attn.o_kernel,
            "rel_attn/LayerNorm/beta": getattr(attn.layer_norm, "beta", None),
            "rel_attn/LayerNorm/gamma": getattr(attn.layer_norm, "gamma", None),
            "ff/layer_1/kernel": ff.kernel_1,
            "ff/layer_1/bias": ff.bias_1,
            "ff/layer_2/kernel": ff.kernel_2,
            "ff/layer_2/bias": ff.bias_2,
            "ff/LayerNorm/beta": getattr(ff.layer_norm, "beta", None),
            "ff/LayerNorm/gamma": getattr(ff.layer_norm, "gamma", None),
        }.items():
            variables[f"layer_{i}/{name}"] = variable

    if softmax.clusters is None:
        variables["adaptive_softmax/bias"] = softmax.biases[0]
    else:
        for i, (bias, proj) in enumerate(zip(softmax.biases, softmax.projs, strict=True)):
            variables[f"adaptive_softmax/cutoff_{i}/b"] = bias
            variables[f"adaptive_softmax/cutoff_{i}/proj"] = proj
            if i == 0:
                variables["adaptive_softmax/cutoff_0/cluster_W"] = softmax.clusters[0]
                variables["adaptive_softmax/cutoff_0/cluster_b"] = softmax.clusters[1]
    return {f"transformer/{name}": variable for name, variable in variables.items() if variable is not None}


def tf1_variables(lm: TransformerXLLM) -> dict[str, np.ndarray]:
    """The weights under the original's names, in its layouts and in its order of creation: `{name: NumPy array}`.

    Raises:
        ParameterError: the original cannot compute a part of the model.
    """
    check_original(lm)
    return {name: variable.numpy() for name, variable in weights_by_name(lm).items()}


def check_original(lm: TransformerXLLM) -> None:
    """Raises ParameterError where a part of the model is a user's own, which the original program does not have."""
    parts = own_parts(lm)
    if parts:
        message = f"the original program cannot compute {', '.join(parts)}: save the model by lm.save(path)"
        raise ParameterError("lm", parts, "a model of the library's parts alone", message)
    positions = lm.network.scheme.known_as
    if positions != "relative":
        message = (
            f"the original program has no positions={positions!r}, only 'relative': save the model by lm.save(path)"
        )
        raise ParameterError("positions", positions, ["relative"], message)


def load_tf1_checkpoint(lm: TransformerXLLM, path: str | os.PathLike) -> None:
    """Sets the weights of `lm` from a checkpoint of the original program.

    Adam's slots, the step and other variables that are no weights are left alone.

    Args:
        lm: a model of the checkpoint's hyper-parameters.
        path: prefix of the checkpoint, such as `"model.ckpt-0"`.

    Raises:
        ValueError: there is no checkpoint at `path`, or it does not fit: every variable that is missing, that has
            another shape (both shapes are given) or that the model does not have is named. Nothing is changed then.
    """
    load_weights(lm, path)


def load_weights(
    model: keras.Model,
    checkpoint: str | os.PathLike | CheckpointReader,
    leave_out: tuple[str, ...] = (),
    extend: bool = False,
) -> None:
    """As `load_tf1_checkpoint`, for a model of any family, and for the checkpoint of a run too.

    Weights whose names begin with one of `leave_out` stay as they are. With `extend`, a weight of the model may be
    longer than that of the checkpoint in one dimension, that of a vocabulary: what is beyond it stays as it is.
    """
    read = weights_reader(model, checkpoint, leave_out, extend)
    variables = _others(weights_by_name(model), leave_out)
    arrays = {name: read(name) for name in variables}  # all of them, before the first is set
    for name, variable in variables.items():
        variable.assign(arrays[name])


def _others(weights: dict, leave_out: tuple[str, ...]) -> dict:
    return {name: weight for name, weight in weights.items() if not name.startswith(leave_out)}


def weights_reader(
    model: keras.Model,
    checkpoint: str | os.PathLike | CheckpointReader,
    leave_out: tuple[str, ...] = (),
    extend: bool = False,
) -> Callable[[str], np.ndarray]:
    """Checks that a checkpoint fits a model, and returns a function that reads one array by its name.

    `leave_out`, `extend`: see `load_weights`.

    Raises: as `load_tf1_checkpoint`.
    """
    reader = checkpoint if isinstance(checkpoint, CheckpointReader) else CheckpointReader(checkpoint)
    found, variables = _others(reader.weight_shapes, leave_out), _others(weights_by_name(model), leave_out)
    check_fits(reader.path, found, variables, extend)

    def read(name):
        array = reader.get(reader.weights[name])
        if array.shape == tuple(variables[name].shape):
            return array
        longer = keras.ops.convert_to_numpy(variables[name]).copy()
        longer[tuple(map(slice, array.shape))] = array
        return longer

    return read


class CheckpointGone(ValueError):
    """There is no checkpoint at a path, perhaps no more: a run that is trained deletes its old ones."""


class UnreadableCheckpoint(ParameterError):
    """Files of a checkpoint, whose path is the value, are damaged or missing."""


class CheckpointReader:
    """The arrays in a checkpoint of a run or of the original program.

    Its files are open as long as the object lives: in a local folder they may be deleted meanwhile.

    Args:
        path: prefix of the checkpoint.

    Attributes:
        shapes: `{key: shape}` of all arrays.
        weights: `{variable name of the original: key}` of the weights.

    Raises:
        CheckpointGone: there is none at `path`.
        UnreadableCheckpoint: its index is damaged.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = os.fspath(path)
        check_exists(self.path)
        with reading_checkpoint(self.path):
            self._reader = tf.train.load_checkpoint(self._plain_path())
            self.shapes = dict(sorted(self._reader.get_variable_to_shape_map().items()))
            if self.shapes:  # the file of the arrays is opened with the first that is read
                self._reader.get_tensor(min(self.shapes, key=lambda key: math.prod(self.shapes[key])))
        self.weights = {}
        for key in self.shapes:
            if key.startswith(RUN_WEIGHTS):
                name = key.removeprefix(RUN_WEIGHTS).removesuffix("/.ATTRIBUTES/VARIABLE_VALUE")
                self.weights[name.replace(".S", "/")] = key
            elif key.startswith("transformer/") and not key.endswith(("/Adam", "/Adam_1")):
                self.weights[key] = key

    def _plain_path(self) -> str:
        """The path for TensorFlow, which takes it as a pattern: of links to it, where it has [, ] or a backslash."""
        if not has_pattern(self.path) or is_remote(self.path):
            return self.path
        folder, name = os.path.split(os.path.abspath(self.path))
        self._links = tempfile.TemporaryDirectory()  # they are gone with this object
        for file in os.listdir(folder):
            if file.startswith((f"{name}.index", f"{name}.data-")):
                os.symlink(os.path.join(folder, file), os.path.join(self._links.name, file.replace(name, "ckpt", 1)))
        return os.path.join(self._links.name, "ckpt")

    @property
    def weight_shapes(self) -> dict[str, list]:
        """`{name: shape}` of the weights."""
        return {name: self.shapes[key] for name, key in self.weights.items()}

    def get(self, key: str) -> np.ndarray:
        """An array. Raises UnreadableCheckpoint where it is not as it was written: its checksum is verified."""
        with reading_checkpoint(self.path):
            return self._reader.get_tensor(key)


def weight_shapes(path: str | os.PathLike) -> dict[str, list]:
    """`{name: shape}` of the weights in a checkpoint of a run or of the original program."""
    return CheckpointReader(path).weight_shapes


@contextlib.contextmanager
def reading_checkpoint(path: str) -> Iterator[None]:
    """Turns every error of reading a checkpoint into an UnreadableCheckpoint or a CheckpointGone that names it."""
    try:
        yield
    except (tf.errors.OpError, OSError, IndexError, RuntimeError) as error:
        check_exists(path)
        allowed, message = "a checkpoint that can be read", f"{path} cannot be read: {error}"
        raise UnreadableCheckpoint("checkpoint", path, allowed, message) from error


def check_whole(path: str, finite: bool = False) -> None:
    """Raises UnreadableCheckpoint where any array of a checkpoint is not as it was written; with `finite`, also where a
    weight of a run's checkpoint is not finite.
    """
    reader = CheckpointReader(path)
    for key in reader.shapes:
        array = reader.get(key)
        if finite and key.startswith(RUN_WEIGHTS) and not np.isfinite(array).all():
            message = f"{path} has weights that are not finite: {key.removeprefix(RUN_WEIGHTS)}"
            raise UnreadableCheckpoint("checkpoint", path, "finite weights", message)


def save_tf1_checkpoint(lm: TransformerXLLM, path: str | os.PathLike) -> None:
    """Writes the weights of `lm` as a checkpoint that the original program evaluates.

    `path` is its prefix, such as `"model.ckpt-0"`, without `[`, `]` and backslash. A missing folder is made, and its
    file `checkpoint` names the latest one.
    """
    path = os.fspath(path)
    check_no_pattern("path", absolute(path))
    folder, name = os.path.dirname(path) or ".", os.path.basename(path)
    check_original(lm)
    write_checkpoint(path, weights_by_name(lm))
    write_state(folder, [name])


def write_checkpoint(path: str, variables: dict[str, Any]) -> None:
    """Writes a checkpoint of Keras variables and arrays atomically, its index file last: a failed write leaves none."""
    folder, name = os.path.dirname(path) or ".", os.path.basename(path)
    unfinished = os.path.join(folder, UNFINISHED)
    with writing(path):
        remove(unfinished)  # of a program that was killed
        with removed_on_error(unfinished):
            tf.io.gfile.makedirs(unfinished)
            tf.raw_ops.SaveV2(
                prefix=os.path.join(unfinished, name),
                tensor_names=list(variables),
                shape_and_slices=[""] * len(variables),
                tensors=[tf.convert_to_tensor(getattr(value, "value", value)) for value in variables.values()],
            )
            delete_checkpoint(path)  # a damaged one
            for file in sorted(tf.io.gfile.listdir(unfinished)):  # *.data-..., *.index
                tf.io.gfile.rename(os.path.join(unfinished, file), os.path.join(folder, file))
        remove(unfinished)


def write_state(folder: str, names: list[str]) -> None:
    """Writes the file that tells other programs which checkpoints there are, the latest last."""
    lines = [f'model_checkpoint_path: "{names[-1]}"', *(f'all_model_checkpoint_paths: "{name}"' for name in names)]
    write_atomic(os.path.join(folder, "checkpoint"), "\n".join(lines) + "\n")


def delete_checkpoint(path: str) -> None:
    """Deletes the files of a checkpoint, the index file first."""
    folder, name = os.path.dirname(path) or ".", os.path.basename(path)
    for file in sorted(tf.io.gfile.listdir(folder), reverse=True):
        if file.startswith((f"{name}.index", f"{name}.data-")):
            remove(os.path.join(folder, file))


def check_exists(path: str | os.PathLike) -> None:
    """Raises CheckpointGone if there is no checkpoint at the prefix `path`."""
    path = os.fspath(path)
    if not tf.io.gfile.exists(f"{path}.index"):
        raise CheckpointGone(f"no checkpoint at {named(path)}: {named(path)}.index does not exist")
    for file in [f"{path}.index", *([] if is_remote(path) else glob.glob(f"{glob.escape(path)}.data-*"))]:
        if is_pipe(file):  # TensorFlow would wait for ever
            message = f"{path} cannot be read: {file} is a named pipe or a socket, not a file"
            raise UnreadableCheckpoint("checkpoint", path, "a checkpoint that can be read", message)


def check_fits(path: str, found: dict[str, list], variables: dict[str, Any], extend: bool = False) -> None:
    """Raises ValueError that names every difference between the shapes `found` in a checkpoint and the model's.

    With `extend`, the model's may be longer in one dimension.
    """
    problems = []
    for name, variable in variables.items():
        if name not in found:
            problems.append(f"{name} is missing from the checkpoint")
        elif list(found[name]) != list(variable.shape) and not (extend and _is_longer(variable.shape, found[name])):
            problems.append(f"{name} is {list(found[name])} in the checkpoint and {list(variable.shape)} in the model")
    for name in sorted(set(found) - set(variables)):
        problems.append(f"{name} {list(found[name])} is in the checkpoint and not in the model")
    if problems:
        raise ValueError(f"{path} does not fit the model:\n  " + "\n  ".join(problems))


def _is_longer(shape: tuple[int, ...], than: list[int]) -> bool:
    """Whether a shape is longer than another in one dimension and the same in all others."""
    pairs = [pair for pair in zip(shape, than, strict=False) if pair[0] != pair[1]]
    return len(shape) == len(than) and len(pairs) == 1 and pairs[0][0] > pairs[0][1]


def checkpoint_step(path: str | os.PathLike) -> int:
    """The training step of a checkpoint: the number that its name ends in, or else 0."""
    number = re.search(r"-(\d+)$", os.fspath(path))
    return int(number[1]) if number else 0


class CheckpointFolder:
    """A folder of checkpoints `ckpt-<step>`."""

    def __init__(self, path: str):
        self.path = path

    def checkpoint(self, step: int) -> str:
        """Path of the checkpoint of a step."""
        return os.path.join(self.path, f"ckpt-{step}")

    def steps(self, files: str = "index") -> list[int]:
        """Steps of the checkpoints, ascending. A step counts if a file `ckpt-<step>.<files>`, a pattern, exists."""
        pattern = re.compile(rf"ckpt-(\d+)\.({files})")
        names = tf.io.gfile.listdir(self.path) if tf.io.gfile.isdir(self.path) else []
        return sorted({int(match[1]) for match in map(pattern.fullmatch, names) if match})

    def save_weights(self, model: keras.Model | dict[str, Any], step: int) -> str:
        """Writes the weights alone, of a model or by name, as the checkpoint of a step. Returns its path.

        Every program opens it, but training does not go on from it: a new run starts from it, by `warm_start_path`.
        """
        path = self.checkpoint(step)
        write_checkpoint(path, run_weights(model))
        self.write_state(self.steps())
        return path

    def write_state(self, steps: list[int]) -> None:
        """Tells other programs which checkpoints there are, the latest last."""
        if steps:
            write_state(self.path, [f"ckpt-{step}" for step in steps])
        else:
            remove(os.path.join(self.path, "checkpoint"))

    def delete(self, step: int) -> None:
        """Deletes the checkpoint of a step."""
        delete_checkpoint(self.checkpoint(step))
        self.write_state(self.steps())


def run_weights(model: keras.Model | dict[str, Any]) -> dict[str, Any]:
    """`{key in a run's checkpoint: variable}`, of a model or of `{name: tensor}`."""
    weights = model if isinstance(model, dict) else weights_by_name(model)
    return {f"{RUN_WEIGHTS}{name}": variable for name, variable in weights.items()}
