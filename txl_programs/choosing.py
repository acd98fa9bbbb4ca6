"""Chooses the preset of a training run by the size of its data and by the machine, and logs the choice."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from txl_config import Config, OptimizerConfig, TransformerLMConfig
from txl_config.models import REFUSED
from txl_config.presets import choose_preset
from txl_programs.flag_values import FLAGS, changed, completed, refuse

# Hyper-parameters of the optimizer that do not decide which other ones have an effect.
_NOT_KINDS = [name for name in OptimizerConfig.names() if name not in ("optimizer", "schedule")]
CORES_OF_TPU = 8  # of a TPU v2-8 or v3-8; other small slices have 1, 4 or 8, all of which divide this number


class Choice(NamedTuple):
    """A preset and the machine for which it was chosen."""

    preset: str
    gpus: int  # number of GPUs of this machine
    machine: str  # in words


def is_on_tpu() -> bool:
    """Whether the flags ask for a TPU: --strategy=tpu, or --tpu, which --strategy=auto uses."""
    return FLAGS.strategy == "tpu" or bool("tpu" in FLAGS and FLAGS.tpu)


def batch_divisor(gpus: int) -> int:
    """Returns a number whose multiples can be divided among the replicas of the training run that the flags describe.

    It is the number of replicas. On a TPU, which is not connected yet, it is `CORES_OF_TPU`: the batch of a slice with
    more cores must be given.

    Args:
        gpus: number of GPUs of this machine. Other machines are assumed to have as many.

    Raises:
        ParameterError: `TF_CONFIG` or Slurm's variables are malformed.
    """
    if is_on_tpu():
        return CORES_OF_TPU
    if FLAGS.strategy == "one":
        return 1
    from txl_tf.training.distribution import workers_in_environment

    workers = 1 if FLAGS.strategy == "mirrored" else workers_in_environment()
    if workers > 1 or FLAGS.strategy == "multi_worker":  # a worker without a GPU is one replica
        return workers * max(gpus, 1)
    return FLAGS.logical_cpus or max(gpus, 1)


def given_steps() -> int | None:
    """Returns the value of --train_steps; `None` if the command line does not give it."""
    return FLAGS.train_steps if FLAGS["train_steps"].present else None


def chosen_preset(n_bytes: int) -> Choice:
    """Returns the preset of --preset or, without it, the one for `n_bytes` of training data on this machine."""
    import tensorflow as tf

    from txl_tf.training.threads import cores

    gpus = len(tf.config.list_physical_devices("GPU"))
    has_accelerator = gpus > 0 or is_on_tpu()  # a TPU is at least as fast as a GPU
    machine = "there is a GPU or a TPU" if has_accelerator else f"there is no GPU, but {cores()} cores"
    return Choice(FLAGS.preset or choose_preset(n_bytes, has_accelerator, cores()), gpus, machine)


def accepted_settings(preset: Mapping[str, Any], group: type[Config], run: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a preset of a language model that the model and the optimizer of the flags accept.

    The presets are for a Transformer-XL with relative positions and the cosine schedule. Without the other settings,
    the defaults of the flags count.

    Args:
        preset: `{name: value}` of the preset.
        group: the class of the model's hyper-parameters.
        run: `{name: value}` of the run that resumes, for flags that are not given; empty for a new run.
    """
    left_out = set(OptimizerConfig.unused(**completed(OptimizerConfig, run, leave_out=_NOT_KINDS)))
    if group is TransformerLMConfig:
        left_out.add("mem_len")
    else:
        left_out |= REFUSED.get(completed(group, run)["positions"], {}).keys()
    return {name: value for name, value in preset.items() if name not in left_out}


def check_model_flags(group: type[Config], positions: str) -> None:
    """Raises ParameterError if a flag is given that this kind of model, or its scheme of positions, does not use.

    Args:
        group: the class of the model's hyper-parameters.
        positions: name of the scheme, see --positions.
    """
    if group is TransformerLMConfig:
        only = "is for --model=transformer_xl: --model=transformer takes --pos_embed=sin or learned"
        refuse(["positions"], only)
        none = "is about distances, which --model=transformer does not have: leave it out"
        refuse(changed(REFUSED["sinusoids"]), none)
        return
    refuse(["pos_embed"], "is for --model=transformer: --model=transformer_xl takes --positions")
    for name, why in REFUSED.get(positions, {}).items():
        # With other positions, a command may undo --untie_r of a flag file by repeating the default.
        refuse([name] if positions == "relative" else changed([name]), f"{why}: leave it out")


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
