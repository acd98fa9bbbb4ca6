"""The mean of the weights of several checkpoints, which often does better than any one of them."""

from __future__ import annotations

import os

import keras
import numpy as np

from txl_tf.runs.folder import RunFolder
from txl_tf.runs.pairs_folder import open_folder
from txl_tf.runs.weights import checkpoint_step, weights_by_name, weights_reader


def average_checkpoints(
    model_dir: str, output_dir: str, checkpoints: list[str] | None = None, num_last_checkpoints: int | None = None
) -> list[str]:
    """Averages checkpoints of a run into the folder of a new one, which every program opens.

    Args:
        model_dir: the run's folder, whose configuration and vocabulary are those of the new one.
        output_dir: the new folder. Its checkpoint bears the highest step of those averaged.
        checkpoints: list of checkpoints: names in `model_dir`, or paths, also of other runs of the same model.
        num_last_checkpoints: how many of the run's latest to take; either this or `checkpoints`.

    Returns:
        list of str, the paths that were averaged.

    Raises:
        ValueError: a checkpoint is not there, or is of another model: names the variables that differ.
    """
    if bool(checkpoints) == (num_last_checkpoints is not None):
        raise ValueError("either checkpoints or num_last_checkpoints must say what to average")
    source = open_folder(model_dir)
    output = type(source)(output_dir)
    config = source.read_config()
    output.check_new()
    vocabs = source.load_vocabs()
    if checkpoints:
        paths = [source.find_checkpoint(path) for path in checkpoints]
    else:
        paths = _last(source, num_last_checkpoints)
    source.check_size(config["model"], paths[0])
    model = source.make_model(config)
    average_weights(model, paths)
    step = max(map(checkpoint_step, paths))
    output.create(config["data"], config["model"], vocabs, model, step, config.get("fingerprints"))
    return paths


def average_weights(model: keras.Model, paths: list[str]) -> None:
    """Sets the weights to the mean of those in the checkpoints, summed in float64, one variable at a time."""
    readers = [weights_reader(model, path) for path in paths]
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
