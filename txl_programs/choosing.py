"""Chooses the preset of a training run by the size of its data and by the machine, and logs the choice."""

from __future__ import annotations

import logging
import os
from typing import Any, NamedTuple

from txl_config.presets import choose_preset
from txl_programs.flag_values import FLAGS


class Choice(NamedTuple):
    """A preset and the machine for which it was chosen."""

    preset: str
    accelerators: int  # number of GPUs, plus 1 with --strategy=tpu
    machine: str  # in words


def chosen_preset(n_bytes: int) -> Choice:
    """Returns the preset of --preset or, without it, the one for `n_bytes` of training data on this machine."""
    import tensorflow as tf

    accelerators = len(tf.config.list_physical_devices("GPU"))
    if FLAGS.strategy == "tpu":
        accelerators += 1  # a TPU is at least as fast as a GPU
    n_cores = os.cpu_count() or 1
    machine = "there is a GPU or a TPU" if accelerators else f"there is no GPU, but {n_cores} cores"
    return Choice(FLAGS.preset or choose_preset(n_bytes, accelerators, n_cores), accelerators, machine)


def log_choice(
    choice: Choice, weights: int, steps: int | None, data: str, weights_of_base: int, given_sizes: dict[str, Any]
) -> None:
    """Logs the preset and, unless --preset named it, why it was chosen.

    Args:
        choice: the preset and the machine.
        weights: number of weights of the model, without its embeddings.
        steps: number of training steps; `None` to leave it out.
        data: the size of the data in words, such as "the text has 2 kB".
        weights_of_base: like `weights`, for the preset base.
        given_sizes: `{name: value}` of the sizes on the command line, which replace those of the preset.
    """
    message = f"preset {choice.preset}: {weights / 1e6:.1f} M parameters besides the embeddings"
    if steps is not None:
        message += f", {steps:,} steps"
    if not FLAGS.preset:
        base = f"--preset=base for {weights_of_base / 1e6:.1f} M parameters"
        message += f", because {data} and {choice.machine}; {base}"
    if given_sizes:
        as_given = ", ".join(f"{name}={value}" for name, value in given_sizes.items())
        message += f"; {as_given} as given, all else as in the preset"
    logging.getLogger("txl_tf").info(message)
