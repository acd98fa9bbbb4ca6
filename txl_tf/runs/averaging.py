"""The mean of the weights of several checkpoints, which often does better than any one of them."""

from __future__ import annotations

import os

import numpy as np

from txl_tf.models.language_model import TransformerXLLM
from txl_tf.runs.folder import RunFolder
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
    source, output = RunFolder(model_dir), RunFolder(output_dir)
    config = source.read_config()
    output.check_new()
    vocab = source.load_vocab()
    if checkpoints:
        paths = [source.find_checkpoint(path) for path in checkpoints]
    else:
        paths = _last(source, num_last_checkpoints)
    source.check_size(config["model"], paths[0])
    lm = TransformerXLLM(**config["model"])
    average_weights(lm, paths)
    step = max(map(checkpoint_step, paths))
    output.create(config["data"], config["model"], vocab, lm, step, config.get("fingerprints"))
    return paths


def average_weights(lm: TransformerXLLM, paths: list[str]) -> None:
    """Sets the weights of `lm` to the mean of those in the checkpoints, summed in float64, one variable at a time."""
    readers = [weights_reader(lm, path) for path in paths]
    for name, variable in weights_by_name(lm).items():
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
