"""Opens the runs that flags name, and the text that --data_path names."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from txl_config import Config
from txl_config.errors import ParameterError
from txl_programs.flag_values import FLAGS, given, refuse, unused

if TYPE_CHECKING:  # slow to import: programs read their flags first
    from txl_tf.data.vocabulary import Vocab
    from txl_tf.runs.folder import RunFolder
    from txl_tf.runs.origin import Origin

Result = TypeVar("Result")


def names_of(model_dirs: Sequence[str]) -> list[str]:
    """Returns a name for each run: the last part of its path. If two runs would have the same name, the whole paths."""
    names = [os.path.basename(os.path.normpath(path)) for path in model_dirs]
    return names if len(set(names)) == len(names) else list(model_dirs)


def with_checkpoint(folder: RunFolder, use: Callable[[str], Result]) -> Result:
    """Calls `use` with the path of the checkpoint that --ckpt_path names, and returns the result of `use`.

    Before the call, it prints the name of the checkpoint to the standard error. If a training run deletes the
    checkpoint before `use` reads it, the function looks --ckpt_path up again, and repeats the call.
    """

    def named(path: str) -> Result:
        print(f"checkpoint: {folder.name_of(path)}", file=sys.stderr)
        return use(path)

    return folder.with_checkpoint(FLAGS.ckpt_path, named)


@functools.lru_cache(maxsize=1)
def vocabs_of(folder: RunFolder) -> list[Vocab]:
    """Returns the vocabularies of a run. They are read only once, although several functions of a program need them."""
    return folder.load_vocabs()


def vocab_of(folder: RunFolder) -> Vocab:
    """Returns the vocabulary of a run that has exactly one, see `vocabs_of`."""
    (vocab,) = vocabs_of(folder)
    return vocab


def load_model(folder: RunFolder, **changes: Any) -> Any:
    """Prints the name of the checkpoint that --ckpt_path names, and returns the model of a run with its weights.

    Args:
        folder: folder of the run.
        **changes: hyper-parameters of the model that differ from those of the run.
    """
    return with_checkpoint(folder, functools.partial(folder.load_model, **changes))


def settings_to_resume(folder: RunFolder, places: Sequence[str]) -> dict[str, Any] | None:
    """Returns all settings of the run in `folder` if its training resumes and the flags do not say where the data is.

    Args:
        folder: folder of the run.
        places: names of the flags that say where the data is.

    Returns:
        `{"data": ..., "model": ..., "training": ...}`, each with values by name. If the run started from another one,
        "training" also has `init_from`. `None` if the folder has no checkpoint or no config.json, or if the command
        line gives one of the flags `places`.

    Raises:
        ParameterError: --preset is given, which the settings of the run would replace; or the run has no checkpoint,
            and no flag says where the data of a new run is. Its config.json does not record `warm_start_path`.
    """
    if given(places) or not folder.has_config():
        return None
    if not folder.steps():
        if FLAGS.init_from:
            return None
        message = (
            f"model_dir {folder} contains a run without a checkpoint, so the training starts from scratch: give the "
            "whole command again"
        )
        raise ParameterError("model_dir", folder.path, "a run with a checkpoint", message)
    refuse(["preset"], "has no effect on a run that resumes: it has its settings already")
    config = folder.read_config()
    training = config.get("training", {})
    if "init_from" in config:
        training = {**training, "init_from": config["init_from"]["model_dir"]}
    return {"data": config["data"], "model": config["model"], "training": training}


def check_model_of_run(folder: RunFolder, models: Mapping[str, type[Config]]) -> None:
    """Raises ParameterError if --model is given and the run in `folder` has another model.

    Args:
        folder: folder of the run.
        models: `{value of --model: class of its hyper-parameters}`.
    """
    if FLAGS["model"].present and models[FLAGS.model] is not folder.family.config:
        message = f"model must be {folder.family.name}, as in model_dir {folder}, got {FLAGS.model}"
        raise ParameterError("model", FLAGS.model, folder.family.name, message)


# Settings of a preset that depend on the size of the data, on the machine or on --train_steps.
_BY_DATA = ("train_batch_size", "eval_batch_size", "train_steps", "iterations", "save_steps", "warmup_steps")


def check_preset_of_run(preset: dict[str, Any], sizes: Sequence[str], run: dict[str, Any]) -> None:
    """Raises ParameterError if --preset has another value than the run that resumes. The run keeps its own values.

    Settings that the command line gives are not compared, and neither are those in `_BY_DATA`: they can change if the
    same preset is chosen again.

    Args:
        preset: `{name: value}` of the preset; empty for `base`, which has the defaults of the flags.
        sizes: names of the sizes of the model.
        run: `{name: value}` of the run.
    """
    if not FLAGS.preset:
        return
    settings = preset or {name: FLAGS[name].default for name in (*sizes, "learning_rate")}
    for name, value in settings.items():
        if name not in _BY_DATA and not given([name]) and run.get(name, value) != value:
            raise unused("preset", f"{FLAGS.preset} has {name}={value}, but the run to resume has {name}={run[name]}")


def origin_of(folder: RunFolder, task: str) -> tuple[Origin | None, dict[str, Any]]:
    """Returns the run that --init_from names, and its settings by group.

    Args:
        folder: folder of the new run.
        task: task that the other run must have, such as "tagger".

    Returns:
        `(origin, settings)`: the other run, and `{"data": ..., "model": ..., "training": ...}`, each group with values
        by name. Without --init_from, `origin` is `None`, and each group is empty.

    Raises:
        ParameterError: see `Origin`.
    """
    if not FLAGS.init_from:
        return None, {"data": {}, "model": {}, "training": {}}
    from txl_tf.runs.origin import Origin

    origin = Origin(folder, FLAGS.init_from, task)
    return origin, origin.settings


def bytes_for_training(more_than: int) -> list[Any]:
    """Returns the bytes of --data_path, or of Python's reference manual: `[training, validation]`, int32 `[n]` each.

    The last tenth of the bytes is for validation.

    Raises:
        ParameterError: the last tenth does not have more than `more_than` bytes.
    """
    import numpy as np

    from txl_tf.data.text_files import pydoc_text

    text = Path(FLAGS.data_path).read_bytes() if FLAGS.data_path else pydoc_text().encode()
    parts = np.split(np.frombuffer(text, np.uint8).astype(np.int32), [len(text) * 9 // 10])
    if len(parts[1]) <= more_than:
        allowed = f"a file of more than {10 * more_than} bytes"
        where = FLAGS.data_path or "the reference manual"
        message = f"data_path must be {allowed}, got {len(text)} bytes in {where}"
        raise ParameterError("data_path", FLAGS.data_path, allowed, message)
    return parts
