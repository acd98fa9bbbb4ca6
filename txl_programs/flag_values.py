"""Flags: programs define them from the hyper-parameters of `txl_config`, read their values, and refuse unused ones."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeVar

from absl import flags

from txl_config import ClusterConfig, Config, OptimizerConfig, RunConfig, TrainingClusterConfig
from txl_config.errors import ParameterError

FLAGS = flags.FLAGS
flags.disclaim_key_flags()  # --help lists a flag that is defined here as one of the calling program

Group = TypeVar("Group", bound=Config)

_DEFINE = {"int": flags.DEFINE_integer, "float": flags.DEFINE_float, "bool": flags.DEFINE_bool}

CKPT_HELP = (
    "Checkpoint: a path, a name in model_dir, best or latest. Default: the best one for a tagger, else the latest one."
)


# ------------------------------------------------------------------------------------------------------- definitions


def define_flags(config: type[Config], leave_out: Collection[str] = (), **defaults: Any) -> None:
    """Defines a flag for every hyper-parameter of a class of `txl_config`.

    A hyper-parameter gets no flag if a flag of its name exists already.

    Args:
        config: the class.
        leave_out: names of hyper-parameters without a flag.
        **defaults: `{name: default}` where this program has another default than the class.
    """
    for field in dataclasses.fields(config):
        if field.name in leave_out or field.name in FLAGS:
            continue
        default = defaults.get(field.name, field.metadata["flag"])
        kind = _kind_of(field)
        help_text = field.metadata["help"]
        choices = getattr(field.metadata["check"], "choices", None)
        if choices:
            flags.DEFINE_enum(field.name, default, choices, help_text)
        elif kind.startswith(("list", "Sequence")):
            flags.DEFINE_list(field.name, default, help_text)
        else:
            _DEFINE.get(kind, flags.DEFINE_string)(field.name, default, help_text)
        if kind == "Sequence[int]":
            check_integers(field.name)


def _kind_of(field: dataclasses.Field) -> str:
    """The first type in the annotation of a hyper-parameter, as text: "int" of `int | None`, "Sequence[int]", ..."""
    return str(field.type).split(" ")[0]


def check_integers(name: str) -> None:
    """Makes a list flag accept only integers from 0 up. Another value ends the program when it reads its flags."""
    flags.register_validator(
        name, lambda value: all(x.isdecimal() for x in value or []), "must be integers, as 20000,40000"
    )


def define_line_flags(lines: str, default: str = "the standard input") -> None:
    """Defines the flags of a program that answers lines: the run, the input, the output and the Ray cluster.

    Args:
        lines: what the lines of --input are, such as "prompts", for the help text of --input.
        default: what the program reads without --input, for the same help text.
    """
    several = "Separate several files, folders and patterns by commas"
    source = f"File of {lines}, one on each line; - for the standard input. {several}. Default: {default}."
    flags.DEFINE_string("model_dir", None, "Folder of the run.")
    flags.DEFINE_string("ckpt_path", None, CKPT_HELP)
    flags.DEFINE_string("input", None, source)
    flags.DEFINE_string(
        "output", None, "File to write. Default: the standard output. With several input files: a folder."
    )
    flags.DEFINE_bool("strict", False, "Stop at the first line that cannot be answered. Default: skip such lines.")
    flags.mark_flag_as_required("model_dir")
    define_flags(ClusterConfig)


# ------------------------------------------------------------------------------------------------------------ values


def values(of: Iterable[str] | type[Config], given_only: bool = False) -> dict[str, Any]:
    """Returns `{name: value}` of flags.

    Args:
        of: names of flags, or a class of `txl_config`, whose hyper-parameters without a flag are left out.
        given_only: whether to leave out flags that the command line does not give.
    """
    if isinstance(of, type):
        fields = [field for field in dataclasses.fields(of) if field.name in FLAGS]
        return {field.name: _value(field) for field in fields if FLAGS[field.name].present or not given_only}
    return {name: FLAGS[name].value for name in of if FLAGS[name].present or not given_only}


def _value(field: dataclasses.Field) -> Any:
    """The value of the flag of a hyper-parameter. A list of integers is converted from text."""
    value = FLAGS[field.name].value
    return [int(x) for x in value] if value and _kind_of(field) == "Sequence[int]" else value


# Whether these functions return the name of a flag that is ...
#
#                        on the command line itself   only in a flag file   with the default   with the run's value
#   given                yes                          yes                   yes                yes
#   changed              yes                          yes                   no                 yes
#   outside_flag_files   yes                          no                    yes                yes
#   newly_given          yes                          no                    no                 no
#
# The last two are in `command_line.py`. `outside_flag_files` takes names of flags that are given.


def given(names: Iterable[str]) -> list[str]:
    """Returns those of the `names` that are flags of this program and that the command line or a flag file gives."""
    return [name for name in names if name in FLAGS and FLAGS[name].present]


def changed(names: Iterable[str]) -> list[str]:
    """Returns those of the `names` that the command line or a flag file gives with another value than the default.

    A command line may repeat the default of a flag to undo the value of a flag file.
    """
    return [name for name in given(names) if FLAGS[name].value != FLAGS[name].default]


def unused(name: str, why: str) -> ParameterError:
    """Returns the error for a flag that is given and would have no effect. Its message is "--name" and then `why`."""
    return ParameterError(name, FLAGS[name].value, "left out", f"--{name} {why}")


def refuse(names: Iterable[str], why: str) -> None:
    """Raises ParameterError if the command line gives one of these flags, which have no effect.

    Args:
        names: names of the flags.
        why: why they have no effect. The message is the first of these flags on the command line, followed by `why`.
    """
    for name in given(names):
        raise unused(name, why)


def check_used(*rules: tuple[Collection[str], Any, str]) -> None:
    """Raises ParameterError if the command line gives a flag that would have no effect.

    Args:
        *rules: `(names, used, why)` each: names of flags, whether these flags have an effect, and why not, see
            `refuse`.
    """
    for names, used, why in rules:
        if not used:
            refuse(names, why)


def check_not_both(one: str, other: str) -> None:
    """Raises ParameterError if both flags have a value."""
    if FLAGS[one].value is not None and FLAGS[other].value is not None:
        message = f"--{one} and --{other} exclude each other: give one of them"
        raise ParameterError(one, FLAGS[one].value, f"left out with --{other}", message)


# --------------------------------------------------------------------------------- hyper-parameters from flags


def completed(
    group: type[Config], other_defaults: Mapping[str, Any], leave_out: Collection[str] = ()
) -> dict[str, Any]:
    """Returns `{name: value}` of the hyper-parameters of a class of `txl_config`.

    The value is that of the flag if the command line gives the flag, else the one in `other_defaults`, else the default
    of the flag. A hyper-parameter is left out if it has no flag and no value in `other_defaults`.

    Args:
        group: the class.
        other_defaults: `{name: value}`, values that replace defaults of flags.
        leave_out: names of more hyper-parameters to leave out.
    """
    completed_values = {}
    for field in dataclasses.fields(group):
        name = field.name
        if name in leave_out:
            continue
        if name in other_defaults and not (name in FLAGS and FLAGS[name].present):
            completed_values[name] = other_defaults[name]
        elif name in FLAGS:
            completed_values[name] = _value(field)
    return completed_values


def config_of(
    group: type[Group], other_defaults: Mapping[str, Any] | None = None, leave_out: Collection[str] = ()
) -> Group:
    """Returns an object of the class `group` with the values of `completed`. Raises ParameterError if one is wrong."""
    return group(**completed(group, other_defaults or {}, leave_out))


def cluster_of(group: type[ClusterConfig] | type[TrainingClusterConfig]) -> Any:
    """Returns the settings of the Ray cluster, from the flags.

    Args:
        group: the class of the settings.

    Raises:
        ParameterError: a value is wrong, or flags describe a cluster and no flag asks for one.
    """
    cluster = config_of(group)
    needs = "is for a Ray cluster: give --ray_workers, too"
    check_used((("ray_cpus", "ray_gpus", "ray_restarts"), cluster.given, needs))
    return cluster


def without_unused(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns arguments of `make_optimizer` without those that have no effect on the optimizer and the schedule.

    A value that the command line gives stays, so that `OptimizerConfig` raises the error. Other values are the default
    of the program, or come from a preset or a run.
    """
    unused = OptimizerConfig.unused(arguments["optimizer"], arguments["schedule"])
    return {name: value for name, value in arguments.items() if name not in unused or changed([name])}


def optimizer_config(training: RunConfig, other_defaults: Mapping[str, Any]) -> OptimizerConfig:
    """Returns the hyper-parameters of the optimizer.

    If --warmup_steps is not given, and its default or its value in `other_defaults` is not less than the number of
    training steps, the warm-up takes a tenth of the steps, and a message says so. The schedule noam keeps the value:
    its warm-up may be longer than the training.

    Args:
        training: the settings of the training.
        other_defaults: see `completed`.

    Raises:
        ParameterError: a value is wrong, or a flag is given that has no effect.
    """
    arguments = without_unused(completed(OptimizerConfig, other_defaults))
    steps = training.train_steps
    warmup = arguments["warmup_steps"]
    if warmup >= steps and arguments["schedule"] != "noam" and not FLAGS["warmup_steps"].present:
        arguments["warmup_steps"] = steps // 10
        message = "warmup_steps=%d, which is not given, must be less than train_steps=%d: warmup_steps=%d is used."
        logging.getLogger("txl_tf").info(message, warmup, steps, steps // 10)
    return OptimizerConfig(**arguments)
