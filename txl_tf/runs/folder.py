"""The folder of a run. `RunFolder` alone knows what lies where:

config.json              data, model, vocabulary and training, see `txl_tf.config`
vocab.txt                a symbol a line, in the order of the ids
ckpt-<step>.*            checkpoints, and `checkpoint`, which names them to other programs
best/ckpt-<step>.*       weights with the lowest validation loss; best.json says which loss
ema/ckpt-<step>.*        moving average of the weights at the end of the training
log.csv, train/          curves
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from txl_tf.config import TextConfig, TrainingConfig
from txl_tf.data.vocabulary import Vocab
from txl_tf.files import lock, read_json, write_json, writing
from txl_tf.models.language_model import TransformerXLLM
from txl_tf.runs.weights import RUN_WEIGHTS, load_weights, weights_by_name, write_checkpoint, write_state

# What of the training a checkpoint depends on; the rest, such as train_steps, may change when a run is continued.
_FIXED = ("tgt_len", "train_batch_size", "mixed_precision", "optimizer", "ema", "static_shapes", "seed")


def load_run(model_dir: str | os.PathLike, ckpt_path: str | None = None, **changes) -> tuple[TransformerXLLM, Vocab]:
    """A trained, converted or averaged run, ready to score and generate.

    Args:
        model_dir: the run's folder.
        ckpt_path: a checkpoint of it by path or name, or `"best"`; by default the latest.
        **changes: arguments of `TransformerXLLM` to use instead of the run's own, such as `mem_len`.

    Returns:
        `(lm, vocab)`: the language model, not compiled, and its `Vocab`.

    Raises:
        ValueError: it is no run's folder, there is no such checkpoint or it is of another model.
    """
    folder = RunFolder(model_dir)
    return folder.load_lm(ckpt_path, **changes), folder.load_vocab()


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

    def save_weights(self, lm: TransformerXLLM, step: int) -> str:
        """Writes the weights alone as the checkpoint of a step; needs no optimizer. Returns its path.

        Every program opens it, but training does not go on from it: a new run starts from it, by `warm_start_path`.
        """
        path = self.checkpoint(step)
        write_checkpoint(path, run_weights(lm))
        self.write_state(self.steps())
        return path

    def write_state(self, steps: list[int]) -> None:
        """Tells other programs which checkpoints there are, the latest last."""
        write_state(self.path, [f"ckpt-{step}" for step in steps])


def run_weights(lm: TransformerXLLM) -> dict[str, Any]:
    """`{key in a run's checkpoint: variable}`."""
    return {f"{RUN_WEIGHTS}{name}": variable for name, variable in weights_by_name(lm).items()}


class RunFolder(CheckpointFolder):
    """The folder of a run, local or remote. Its methods raise ValueError that names the folder and what is missing."""

    def __init__(self, model_dir: str | os.PathLike):
        super().__init__(os.fspath(model_dir))
        self.config_file = os.path.join(self.path, "config.json")
        self.vocab_file = os.path.join(self.path, "vocab.txt")
        self.log_file = os.path.join(self.path, "log.csv")
        self.best = CheckpointFolder(os.path.join(self.path, "best"))
        self.best_file = os.path.join(self.best.path, "best.json")
        self.ema = CheckpointFolder(os.path.join(self.path, "ema"))

    def __str__(self) -> str:
        return self.path

    def __fspath__(self) -> str:
        return self.path

    # ------------------------------------------------------------------------------------ configuration, vocabulary

    def has_config(self) -> bool:
        """Whether there is a `config.json`, which a folder of the original program does not have."""
        return tf.io.gfile.exists(self.config_file)

    def read_config(self) -> dict:
        """`config.json`: `"data"`, what the run was trained on; `"model"` and `"vocab"`, arguments of `TransformerXLLM`
        and `Vocab`; and, if the run was trained here, `"training"`.
        """
        if not self.has_config():
            raise ValueError(f"model_dir {self} is not the folder of a run: {self.config_file} does not exist")
        return read_json(self.config_file)

    def load_vocab(self) -> Vocab:
        """The vocabulary of the run."""
        return Vocab.load(self.vocab_file, **self.read_config()["vocab"])

    def describe(self, config: dict, vocab: Vocab) -> None:
        """Writes `vocab.txt` and `config.json`."""
        vocab.save(self.vocab_file)
        write_json(self.config_file, config)

    def check_same_run(self, config: dict) -> None:
        """Raises ValueError where the folder holds checkpoints of another configuration."""
        if not self.steps():
            return
        before, config = self.read_config(), json.loads(json.dumps(config))
        defaults = {"data": TextConfig(), "training": TrainingConfig()}
        changes = []
        for part, values in config.items():
            for name, value in values.items():
                there = before.get(part, {}).get(name, getattr(defaults.get(part), name, None))
                if there != value and (part != "training" or name in _FIXED):
                    changes.append(f"{part}.{name}: {there!r} there, {value!r} now")
        if changes:
            raise ValueError(
                f"model_dir {self} holds a run of another configuration; choose another folder, or:\n  "
                + "\n  ".join(changes)
            )

    # ---------------------------------------------------------------------------------------------------- checkpoints

    def checkpoints(self) -> list[str]:
        """Paths of the checkpoints, from oldest to newest; also those of the original program."""
        steps = self.steps()
        if steps:
            return [self.checkpoint(step) for step in steps]
        state = tf.train.get_checkpoint_state(self.path)
        return list(state.all_model_checkpoint_paths) if state else []

    def find_checkpoint(self, ckpt_path: str | None = None) -> str:
        """`ckpt_path`, which may also be the name of a checkpoint in the folder, or `"best"`; by default the latest."""
        if ckpt_path is None:
            if not self.checkpoints():
                raise ValueError(f"model_dir {self} holds no checkpoint")
            return self.checkpoints()[-1]
        if ckpt_path == "best":
            best = self.find_best()
            if best is None:
                raise ValueError(f"model_dir {self} holds no best checkpoint: there was no validation yet")
            return best["path"]
        for path in (ckpt_path, os.path.join(self.path, ckpt_path)):
            if tf.io.gfile.exists(f"{path}.index"):
                return path
        raise ValueError(f"no checkpoint at {ckpt_path}, nor in {self}: {ckpt_path}.index does not exist")

    def find_best(self) -> dict | None:
        """`"path"`, `"step"` and `"val_loss"` (nats) of the checkpoint with the lowest validation loss, or `None`."""
        if not tf.io.gfile.exists(self.best_file):
            return None
        best = read_json(self.best_file)
        return {"path": self.best.checkpoint(best["step"]), **best}

    def load_lm(self, ckpt_path: str | None = None, **changes) -> TransformerXLLM:
        """The language model of the run; arguments as of `load_run`."""
        config = self.read_config()
        path = self.find_checkpoint(ckpt_path)
        lm = TransformerXLLM(**{**config["model"], **changes})
        load_weights(lm, path)
        return lm

    # -------------------------------------------------------------------------------------------------------- writing

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Makes the folder, checks that it can be written to, and keeps other runs out of it."""
        if not self.path:
            raise ValueError("model_dir must name the folder of the run")
        try:
            tf.io.gfile.makedirs(self.path)
            probe = os.path.join(self.path, f"writable.{os.getpid()}.tmp")
            with tf.io.gfile.GFile(probe, "w") as file:
                file.write("")
            tf.io.gfile.remove(probe)
        except (OSError, tf.errors.OpError) as error:
            raise OSError(f"model_dir {self} cannot be written to: {error}") from error
        with lock(self.path, f"another run is training in model_dir {self}"):
            yield

    def check_new(self) -> None:
        """Raises ValueError if the folder holds a run."""
        if self.has_config() or self.checkpoints():
            raise ValueError(f"{self} already holds a run: choose a new folder")

    def create(self, data: dict, model: dict, vocab: Vocab, lm: TransformerXLLM, step: int) -> str:
        """Writes a run that was not trained here, in a new folder; returns the path of its checkpoint.

        A new run can start from its weights, but training cannot go on from it.
        """
        self.check_new()
        with writing(self.path):
            tf.io.gfile.makedirs(self.path)
        path = self.save_weights(lm, step)
        self.describe({"data": data, "model": model, "vocab": vocab.get_config()}, vocab)
        return path
