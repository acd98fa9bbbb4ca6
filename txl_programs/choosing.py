"""Chooses the preset of a training by the size of its data and by the machine, and logs the choice."""

from __future__ import annotations

import logging
import os
from typing import Any, NamedTuple

from txl_config.presets import choose_preset
from txl_programs.flag_values import FLAGS


class Choice(NamedTuple):
    """A preset and the machine for which it was chosen."""

    preset: str
    accelerators: int  # GPUs, and a TPU
    machine: str  # in words


def chosen_preset(n_bytes: int) -> Choice:
    """The preset of --preset or, without it, the one for data of this size on this machine."""
    import tensorflow as tf

    accelerators = len(tf.config.list_physical_devices("GPU"))
    if FLAGS.strategy == "tpu":
        accelerators += 1  # a TPU is as fast as a GPU at least
    n_cores = os.cpu_count() or 1
    machine = "there is a GPU or a TPU" if accelerators else f"there is no GPU, but {n_cores} cores"
    return Choice(FLAGS.preset or choose_preset(n_bytes, accelerators, n_cores), accelerators, machine)


def log_choice(
    choice: Choice, weights: int, steps: int | None, data: str, weights_of_base: int, given_sizes: dict[str, Any]
) -> None:
    """Logs the preset, and why it was chosen.

    Args:
        choice: the preset and the machine.
        weights: of the layers of the model.
        steps: of the training; `None` to say nothing of them.
        data: the size of the data in words, such as "the text has 2 kB".
        weights_of_base: of the layers with the default sizes.
        given_sizes: sizes on the command line, which replace those of the preset.
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
