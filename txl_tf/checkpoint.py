"""Checkpoints: those of the original TF1 program, and those of a run, with all it needs to go on."""

import contextlib
import json
import math
import os
import re

import tensorflow as tf

from txl_tf.folders import remove, removed_on_error, write_whole, writing

_RUN_WEIGHTS = "weights/"
_BEST = "best"  # folder and file
_UNFINISHED = "unfinished.tmp"


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
    arrays = {name: read(name) for name in variables}  # all of them, before the first is set
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

    def read(name):
        with _reading(path):
            return reader.get_tensor(keys[name])

    return read


def weight_shapes(path):
    """`{variable name of the original: shape}` of the weights in a checkpoint of a run or of the original program.

    Raises:
        ValueError: there is no checkpoint at `path`.
    """
    return _weights_in(os.fspath(path))[1]


def _weights_in(path):
    """`{variable name of the original: key in the checkpoint}` and `{the same: shape}`."""
    check_exists(path)
    with _reading(path):
        shapes = dict(tf.train.list_variables(path))
    keys = {}
    for key in shapes:
        if key.startswith(_RUN_WEIGHTS):
            name = key.removeprefix(_RUN_WEIGHTS).removesuffix("/.ATTRIBUTES/VARIABLE_VALUE")
            keys[name.replace(".S", "/")] = key
        elif key.startswith("transformer/") and not key.endswith(("/Adam", "/Adam_1")):
            keys[key] = key
    return keys, {name: shapes[key] for name, key in keys.items()}


@contextlib.contextmanager
def _reading(path):
    """Makes one kind of error of all that a damaged checkpoint causes."""
    try:
        yield
    except (tf.errors.OpError, IndexError, RuntimeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def _check_whole(path):
    """Raises ValueError where any array of a checkpoint is not as it was written: checksums are verified."""
    check_exists(path)
    with _reading(path):
        reader = tf.train.load_checkpoint(path)
        for key in reader.get_variable_to_shape_map():
            reader.get_tensor(key)


def save_tf1_checkpoint(lm, path):
    """Writes the weights of `lm` as a checkpoint that the original program evaluates.

    Args:
        lm: `TransformerXLLM`.
        path: prefix of the checkpoint, such as `"model.ckpt-0"`. Its folder is made where it is missing, and the
            folder's `checkpoint` file names it as the latest.
    """
    path = os.fspath(path)
    folder, name = os.path.dirname(path) or ".", os.path.basename(path)
    _write(path, weights_by_name(lm))
    _write_state(folder, [name])


def _write(path, variables):
    """Writes a checkpoint that appears whole, its index file last, and of which nothing is left if that fails.

    Args:
        path: its prefix.
        variables: dict of Keras variables and arrays.

    Raises:
        OSError: it cannot be written.
    """
    folder, name = os.path.dirname(path) or ".", os.path.basename(path)
    unfinished = os.path.join(folder, _UNFINISHED)
    with writing(path):
        remove(unfinished)  # of a program that was killed
        tf.io.gfile.makedirs(unfinished)
        with removed_on_error(unfinished):
            tf.raw_ops.SaveV2(
                prefix=os.path.join(unfinished, name),
                tensor_names=list(variables),
                shape_and_slices=[""] * len(variables),
                tensors=[tf.convert_to_tensor(getattr(value, "value", value)) for value in variables.values()],
            )
            _delete(path)  # a damaged one
            for file in sorted(tf.io.gfile.listdir(unfinished)):  # *.data-..., *.index
                tf.io.gfile.rename(os.path.join(unfinished, file), os.path.join(folder, file))
        remove(unfinished)


def _write_state(folder, names):
    """Writes the file that tells other programs which checkpoints there are, the latest last."""
    lines = [f'model_checkpoint_path: "{names[-1]}"', *(f'all_model_checkpoint_paths: "{name}"' for name in names)]
    write_whole(os.path.join(folder, "checkpoint"), "\n".join(lines) + "\n")


def _delete(path):
    """Deletes the files of a checkpoint, the index file first."""
    folder, name = os.path.dirname(path) or ".", os.path.basename(path)
    for file in sorted(tf.io.gfile.listdir(folder), reverse=True):
        if file.startswith((f"{name}.index", f"{name}.data-")):
            tf.io.gfile.remove(os.path.join(folder, file))


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


def saved_steps(folder, files="index"):
    """Steps of the checkpoints `ckpt-<step>` in a folder, ascending.

    Args:
        files: which of its files, as a regular expression, tells that there is one.
    """
    pattern = re.compile(rf"ckpt-(\d+)\.({files})")
    names = tf.io.gfile.listdir(folder) if tf.io.gfile.isdir(folder) else []
    return sorted({int(match[1]) for match in map(pattern.fullmatch, names) if match})


def save_weights(lm, folder, step):
    """Writes the weights alone as checkpoint number `step` of a run's folder; needs no optimizer.

    Every program opens it, but training does not go on from it: it starts anew, by `warm_start_path`.

    Returns:
        path of the checkpoint.

    Raises:
        OSError: it cannot be written.
    """
    path = _path(folder, step)
    _write(path, _weights(lm))
    _write_state(folder, [f"ckpt-{saved}" for saved in saved_steps(folder)])
    return path


def find_best(model_dir):
    """What is known of the checkpoint with the lowest validation loss.

    Returns:
        dict: `"path"`, `"step"` and `"val_loss"` in nats; `None` where there is none.
    """
    folder = os.path.join(model_dir, _BEST)
    file = os.path.join(folder, f"{_BEST}.json")
    if not tf.io.gfile.exists(file):
        return None
    with tf.io.gfile.GFile(file) as opened:
        best = json.load(opened)
    return {"path": _path(folder, best["step"]), **best}


def _path(folder, step):
    return os.path.join(folder, f"ckpt-{step}")


def _weights(lm):
    return {f"{_RUN_WEIGHTS}{name}": variable for name, variable in weights_by_name(lm).items()}


class RunCheckpoints:
    """The checkpoints in a run's folder, numbered by training step: all that training needs to go on exactly.

    They hold the weights by the original's names, the optimizer's variables, the memory as one array of all replicas'
    rows, so that another number of replicas can go on with it, and, in the middle of a window of steps, the sums that
    the line of the window is computed from.

    Args:
        lm: compiled `TransformerXLLM`, its optimizer built.
        folder: the run's folder.
        max_to_keep: older checkpoints are deleted.
        write: whether to write at all. Of several workers that train together only the chief does; all must call
            `save` and `save_best`.
    """

    def __init__(self, lm, folder, max_to_keep=5, write=True):
        self._lm = lm
        self._folder = os.fspath(folder)
        self._max_to_keep = max_to_keep
        self.write = write

    @property
    def latest(self):
        """Path of the latest checkpoint in the folder, or `None`."""
        steps = saved_steps(self._folder)
        return self.path(steps[-1]) if steps else None

    def path(self, step):
        """Path of the checkpoint of a step."""
        return _path(self._folder, step)

    @property
    def last_good(self):
        """A sentence for error messages."""
        return f"the last good checkpoint is {self.latest}" if self.latest else "there is no checkpoint yet"

    @contextlib.contextmanager
    def naming_last(self):
        """Adds to an error in writing which checkpoint there is to go on from."""
        try:
            yield
        except OSError as error:
            raise OSError(f"{error}\n{self.last_good}") from error

    def newest_whole(self):
        """Step of the newest checkpoint that can be read from end to end; says which cannot. `None` in a new folder.

        Raises:
            ValueError: there are checkpoints, and none can be read.
        """
        problems = []
        interrupted = saved_steps(os.path.join(self._folder, _UNFINISHED))  # when the program was killed
        for step in reversed(saved_steps(self._folder, files="index|data.*")):
            if step in interrupted:
                continue
            try:
                _check_whole(self.path(step))
            except ValueError as error:
                problems.append(str(error))
                continue
            for problem in problems:
                print(f"damaged checkpoint: {problem}; going on from the one before", flush=True)
            return step
        if problems:
            raise ValueError(f"no checkpoint in {self._folder} can be read:\n  " + "\n  ".join(problems))
        return None

    def save(self, mid_window=False):
        """Writes a checkpoint of the present state and returns its path.

        Args:
            mid_window: whether steps have been done since the last line of `log.csv`, that the next will count.

        Raises:
            OSError: it cannot be written. The checkpoints before it stay.
        """
        step = int(self._lm.optimizer.iterations.numpy())
        path = self.path(step)
        mems = self._lm.carried_mems_array()  # of all workers
        if self.write:
            window = {"window": self._lm.metric_totals} if mid_window else {}
            with self.naming_last():
                _write(path, {**_weights(self._lm), **self._optimizer(), "mems": mems, **window})
                self._sweep(step)
        return path

    def save_best(self, val_loss):
        """Writes the weights to the folder's `best`, unless those there have a validation loss as low."""
        best = find_best(self._folder)
        if not self.write or not val_loss < (best["val_loss"] if best else math.inf):
            return
        step = int(self._lm.optimizer.iterations.numpy())
        folder = os.path.join(self._folder, _BEST)
        with self.naming_last():
            save_weights(self._lm, folder, step)
            write_whole(os.path.join(folder, f"{_BEST}.json"), json.dumps({"step": step, "val_loss": val_loss}) + "\n")
            for other in saved_steps(folder):  # not before the new one is named
                if other != step:
                    _delete(_path(folder, other))
            _write_state(folder, [f"ckpt-{step}"])

    def remove_best(self):
        """Removes the folder `best`."""
        remove(os.path.join(self._folder, _BEST))

    def restore(self, path):
        """Sets weights and optimizer to those of a checkpoint, or nothing at all if it is not right.

        Returns:
            `(mems, window)`: the memory to go on with, see `carried_mems_array`, and `metric_totals` of the window in
            whose middle it was saved, or `None`.

        Raises:
            ValueError: there is no such checkpoint, or it is of another model or of no training.
        """
        read = weights_reader(self._lm, path)
        with _reading(path):
            reader = tf.train.load_checkpoint(path)
            shapes = reader.get_variable_to_shape_map()
            optimizer = {key: shape for key, shape in shapes.items() if key.startswith("optimizer/")}
            if not optimizer:
                raise ValueError(
                    f"{path} has weights alone, no optimizer to go on with: start a new run with warm_start_path={path}"
                )
            _check_fits(path, optimizer, self._optimizer())
            arrays = {name: read(name) for name in weights_by_name(self._lm)}
            arrays |= {key: reader.get_tensor(key) for key in [*optimizer, "mems", *({"window"} & shapes.keys())]}
        for key, variable in {**weights_by_name(self._lm), **self._optimizer()}.items():
            variable.assign(arrays[key])
        return arrays["mems"], arrays.get("window")

    def _optimizer(self):
        return {f"optimizer/{i}": variable for i, variable in enumerate(self._lm.optimizer.variables)}

    def _sweep(self, latest):
        """Deletes old checkpoints. Those past `latest` are damaged: they stay until others take their place."""
        steps = [step for step in saved_steps(self._folder, files="index|data.*") if step <= latest]
        for step in steps[: -self._max_to_keep]:
            _delete(self.path(step))
        _write_state(self._folder, [f"ckpt-{step}" for step in steps[-self._max_to_keep :]])
