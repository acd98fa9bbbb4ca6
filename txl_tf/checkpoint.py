"""Checkpoints: those of the original TF1 program, and those of a run, with all it needs to go on."""

import io
import os
import re

import numpy as np
import tensorflow as tf

_RUN_WEIGHTS = "weights/"


def tf1_variables(lm):
    """The weights under the original's names and in its layouts.

    Args:
        lm: `TransformerXLLM`.

    Returns:
        dict `{variable name: NumPy array}`, in the original's order of creation.
    """
    return {name: variable.numpy() for name, variable in weights_by_name(lm).items()}


def load_tf1_checkpoint(lm, path):
    """Sets the weights of `lm` from a checkpoint of the original program.

    Adam's slots, the step and other variables that are no weights are left alone.

    Args:
        lm: `TransformerXLLM` of the checkpoint's hyper-parameters.
        path: prefix of the checkpoint, such as `"model.ckpt-0"`.

    Raises:
        ValueError: there is no checkpoint at `path`, or it does not fit: every variable that is missing, that has
            another shape (both shapes are given) or that the model does not have is named. Nothing is changed then.
    """
    load_weights(lm, path)


def load_weights(lm, path):
    """`load_tf1_checkpoint`, of a checkpoint of a run as well, whose optimizer and memory are left alone."""
    read = weights_reader(lm, path)
    variables = weights_by_name(lm)
    try:
        arrays = {name: read(name) for name in variables}  # all of them, before the first is set
    except (tf.errors.OpError, IndexError, RuntimeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    for name, variable in variables.items():
        variable.assign(arrays[name])


def weights_reader(lm, path):
    """Opens a checkpoint of a run or of the original program, and checks that it fits `lm`.

    Args: those of `load_tf1_checkpoint`. Raises: the same.

    Returns:
        function that reads one array by its variable's name in the original.
    """
    path = os.fspath(path)
    keys, shapes = _weights_in(path)
    _check_fits(path, shapes, weights_by_name(lm))
    reader = tf.train.load_checkpoint(path)
    return lambda name: reader.get_tensor(keys[name])


def weight_shapes(path):
    """`{variable name of the original: shape}` of the weights in a checkpoint of a run or of the original program.

    Raises:
        ValueError: there is no checkpoint at `path`.
    """
    return _weights_in(os.fspath(path))[1]


def _weights_in(path):
    """`{variable name of the original: key in the checkpoint}` and `{the same: shape}`."""
    check_exists(path)
    try:
        shapes = dict(tf.train.list_variables(path))
    except (tf.errors.OpError, RuntimeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    keys = {}
    for key in shapes:
        if key.startswith(_RUN_WEIGHTS):
            name = key.removeprefix(_RUN_WEIGHTS).removesuffix("/.ATTRIBUTES/VARIABLE_VALUE")
            keys[name.replace(".S", "/")] = key
        elif key.startswith("transformer/") and not key.endswith(("/Adam", "/Adam_1")):
            keys[key] = key
    return keys, {name: shapes[key] for name, key in keys.items()}


def save_tf1_checkpoint(lm, path):
    """Writes the weights of `lm` as a checkpoint that the original program evaluates.

    Args:
        lm: `TransformerXLLM`.
        path: prefix of the checkpoint, such as `"model.ckpt-0"`. Its folder is made where it is missing, and the
            folder's `checkpoint` file names it as the latest.
    """
    path = os.fspath(path)
    folder = os.path.dirname(path) or "."
    tf.io.gfile.makedirs(folder)
    variables = weights_by_name(lm)
    tf.raw_ops.SaveV2(
        prefix=path,
        tensor_names=list(variables),
        shape_and_slices=[""] * len(variables),
        tensors=[tf.convert_to_tensor(variable.value) for variable in variables.values()],
    )
    with tf.io.gfile.GFile(os.path.join(folder, "checkpoint"), "w") as file:
        file.write(f'model_checkpoint_path: "{os.path.basename(path)}"\n')


def weights_by_name(lm):
    """`{variable name of the original: Keras variable}`."""
    network, softmax = lm.network, lm.softmax
    variables = {"r_w_bias": network.r_w_bias, "r_r_bias": network.r_r_bias}

    scope = "adaptive_embed/cutoff_{}/" if network.embedding.div_val > 1 else "adaptive_embed/"
    for i, (table, proj) in enumerate(zip(network.embedding.tables, network.embedding.projs, strict=True)):
        variables[scope.format(i) + "lookup_table"] = table
        variables[scope.format(i) + "proj_W"] = proj

    for i, layer in enumerate(network.decoder_layers):
        attn, ff = layer.rel_attn, layer.ff
        for name, variable in {
            "rel_attn/qkv/kernel": attn.qkv_kernel,
            "rel_attn/r/kernel": attn.r_kernel,
            "rel_attn/o/kernel": attn.o_kernel,
            "rel_attn/LayerNorm/beta": attn.layer_norm.beta,
            "rel_attn/LayerNorm/gamma": attn.layer_norm.gamma,
            "ff/layer_1/kernel": ff.layer_1.kernel,
            "ff/layer_1/bias": ff.layer_1.bias,
            "ff/layer_2/kernel": ff.layer_2.kernel,
            "ff/layer_2/bias": ff.layer_2.bias,
            "ff/LayerNorm/beta": ff.layer_norm.beta,
            "ff/LayerNorm/gamma": ff.layer_norm.gamma,
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


def check_exists(path):
    """Raises ValueError if there is no checkpoint at the prefix `path`."""
    if not tf.io.gfile.exists(f"{path}.index"):
        raise ValueError(f"no checkpoint at {path}: {path}.index does not exist")


def _check_fits(path, found, variables):
    """Raises ValueError that names every difference between the shapes `found` in a checkpoint and the model's."""
    problems = []
    for name, variable in variables.items():
        if name not in found:
            problems.append(f"{name} is missing from the checkpoint")
        elif list(found[name]) != list(variable.shape):
            problems.append(f"{name} is {list(found[name])} in the checkpoint and {list(variable.shape)} in the model")
    for name in sorted(set(found) - set(variables)):
        problems.append(f"{name} {list(found[name])} is in the checkpoint and not in the model")
    if problems:
        raise ValueError(f"{path} does not fit the model:\n  " + "\n  ".join(problems))


def checkpoint_step(path):
    """The training step of a checkpoint: the number that its name ends in, or else 0."""
    number = re.search(r"-(\d+)$", os.fspath(path))
    return int(number[1]) if number else 0


def save_weights(lm, folder, step):
    """Writes the weights alone as checkpoint number `step` of a run's folder; needs no optimizer.

    Every program opens it, but training does not go on from it: it starts anew, by `warm_start_path`.

    Returns:
        path of the checkpoint.
    """
    weights = {name: variable.value for name, variable in weights_by_name(lm).items()}
    manager = tf.train.CheckpointManager(tf.train.Checkpoint(weights=weights), folder, None, checkpoint_name="ckpt")
    return manager.save(checkpoint_number=step)


class RunCheckpoints:
    """The checkpoints in a run's folder: weights, optimizer and memory, numbered by training step.

    Weights go by the original's names. `tf.train.Checkpoint` of a Keras model would lose the layers held in lists.

    Args:
        lm: compiled `TransformerXLLM`, its optimizer built.
        folder: the run's folder.
        max_to_keep: older checkpoints are deleted.
    """

    def __init__(self, lm, folder, max_to_keep=5):
        self._lm = lm
        self._mems = _CarriedMems(lm)
        weights = {name: variable.value for name, variable in weights_by_name(lm).items()}
        optimizer = {str(i): variable.value for i, variable in enumerate(lm.optimizer.variables)}
        self._run = tf.train.Checkpoint(weights=weights, optimizer=optimizer, mems=self._mems)
        self._manager = tf.train.CheckpointManager(self._run, folder, max_to_keep, checkpoint_name="ckpt")

    @property
    def latest(self):
        """Path of the latest checkpoint in the folder, or `None`."""
        return self._manager.latest_checkpoint

    def save(self):
        """Writes a checkpoint of the present state and returns its path."""
        return self._manager.save(checkpoint_number=int(self._lm.optimizer.iterations.numpy()))

    def restore(self, path):
        """Sets weights and optimizer, and returns the memory to go on with, see `carried_mems_array`.

        Raises:
            ValueError: there is no checkpoint at `path`, or it is of another model or of no training.
        """
        weights_reader(self._lm, path)
        if not any(name.startswith("optimizer/") for name, _ in tf.train.list_variables(path)):
            raise ValueError(
                f"{path} has weights alone, no optimizer to go on with: start a new run with warm_start_path={path}"
            )
        self._run.restore(path).assert_existing_objects_matched()
        return self._mems.array


class _CarriedMems(tf.train.experimental.PythonState):
    """The memory as one array of all replicas' rows, so that another number of replicas can go on with it."""

    def __init__(self, lm):
        self._lm = lm
        self.array = None

    def serialize(self):
        buffer = io.BytesIO()
        np.save(buffer, self._lm.carried_mems_array())
        return buffer.getvalue()

    def deserialize(self, string_value):
        self.array = np.load(io.BytesIO(string_value), allow_pickle=False)
