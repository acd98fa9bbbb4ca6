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
import dataclasses
import json
import math
import os
import re
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from txl_tf.config import (
    EvaluationConfig,
    MachineConfig,
    ModelConfig,
    OptimizerConfig,
    TextConfig,
    TrainingConfig,
    at_least,
    check_bins,
    satisfies,
)
from txl_tf.data.vocabulary import Vocab
from txl_tf.files import check_writable, lock, read_json, removed_on_error, write_json, writing
from txl_tf.models.language_model import TransformerXLLM
from txl_tf.runs.weights import (
    RUN_WEIGHTS,
    load_weights,
    weight_shapes,
    weights_by_name,
    write_checkpoint,
    write_state,
)
from txl_tf.schema import check_values

# What of the training a checkpoint depends on; the rest, such as train_steps, may change when a run is continued.
_FIXED = ("tgt_len", "train_batch_size", "mixed_precision", "optimizer", "ema", "static_shapes", "seed")


@dataclasses.dataclass
class _ConfigFile:
    """`config.json`. `fingerprints` are those of the vocabulary and of each split of the text, see `Corpus`."""

    data: dict
    model: dict
    vocab: Vocab
    training: dict = dataclasses.field(default_factory=dict)
    fingerprints: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Data(TextConfig):
    data_dir: str | None = None
    by_character: bool = False


@dataclasses.dataclass
class _BestFile:
    step: int = dataclasses.field(metadata={"check": at_least(0)})
    val_loss: float = dataclasses.field(metadata={"check": satisfies(math.isfinite, "be finite")})
    text: str | None = None  # fingerprint of the text that was validated on


def _check_config(values: dict) -> None:
    check_values(values, _ConfigFile)
    check_values(values["data"], _Data, partial=True, prefix="data.")
    check_values(values["model"], ModelConfig, prefix="model.")
    missing = [f"model.{name}" for name in ("n_token", "mem_len") if values["model"].get(name) is None]
    if missing:  # they have defaults elsewhere
        raise ValueError(f"{missing[0]} is missing")
    model = ModelConfig(**values["model"])
    check_bins(model.n_token, model.d_embed, model.cutoffs, model.div_val)
    Vocab(**values["vocab"])  # checks them
    groups = EvaluationConfig, MachineConfig, OptimizerConfig, TrainingConfig  # the last ones count
    check_values(values.get("training", {}), *groups, partial=True, prefix="training.")


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
        return read_json(self.config_file, _check_config)

    def load_vocab(self) -> Vocab:
        """The vocabulary of the run."""
        config = self.read_config()
        vocab = Vocab.load(self.vocab_file, **config["vocab"])
        if config.get("fingerprints", {}).get("vocab", vocab.fingerprint()) != vocab.fingerprint():
            raise ValueError(f"{self.vocab_file} is not as it was written: config.json has another fingerprint of it")
        n_token = config["model"]["n_token"]
        if len(vocab) != n_token:
            raise ValueError(
                f"{self.vocab_file} has {len(vocab)} symbols, but config.json says model.n_token {n_token}"
            )
        return vocab

    def describe(self, config: dict, vocab: Vocab) -> None:
        """Writes `config.json` and, while there is no checkpoint that depends on it, `vocab.txt`."""
        if not self.checkpoints():
            vocab.save(self.vocab_file)
        fingerprints = {**config.get("fingerprints", {}), "vocab": vocab.fingerprint()}
        write_json(self.config_file, {**config, "fingerprints": fingerprints})

    def check_vocab(self, vocab: Vocab) -> None:
        """Raises ValueError unless a text has the vocabulary of the run."""
        before = self.load_vocab()
        difference = vocab.difference(before)
        if difference:
            raise ValueError(
                f"the text has another vocabulary ({len(vocab)} symbols) than the run in {self} ({len(before)} "
                f"symbols): {difference}. Choose another folder to train on this text; eval_path evaluates it in the "
                "vocabulary of the run"
            )

    def check_text(self, fingerprints: dict[str, str], remedy: str) -> None:
        """Raises ValueError where a split of the text is not what the run was trained on; `remedy` ends the message.

        Args:
            fingerprints: of the splits to compare, see `Corpus.fingerprint`.
        """
        before = self.read_config().get("fingerprints", {})
        changed = [split for split, found in fingerprints.items() if before.get(split, found) != found]
        if changed:
            splits = " and ".join(changed)
            raise ValueError(f"the text of the run in {self} has changed since it was trained on ({splits}): {remedy}")

    def check_same_run(self, config: dict) -> None:
        """Raises ValueError where the folder holds checkpoints of another configuration, or a damaged best.json."""
        if not self.steps():
            return
        self.find_best()
        before, config = self.read_config(), json.loads(json.dumps(config))
        defaults = {"data": TextConfig(), "training": TrainingConfig()}
        now, then = (some.get("fingerprints", {}) for some in (config, before))
        same_text = then and all(then.get(split) == now.get(split) for split in ("train", "valid"))
        changes = []
        for part in ("data", "model", "vocab", "training"):
            for name, value in config.get(part, {}).items():
                there = before.get(part, {}).get(name, getattr(defaults.get(part), name, None))
                if same_text and name in ("data_path", "data_dir"):  # the same text by another name
                    continue
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
        best = read_json(self.best_file, lambda values: check_values(values, _BestFile))
        return {"path": self.best.checkpoint(best["step"]), **best}

    def load_lm(self, ckpt_path: str | None = None, **changes) -> TransformerXLLM:
        """The language model of the run; arguments as of `load_run`."""
        model = {**self.read_config()["model"], **changes}
        ModelConfig(**{name: model[name] for name in ModelConfig.names() if name in model})  # checks the changes
        path = self.find_checkpoint(ckpt_path)
        self.check_size(model, path)
        lm = TransformerXLLM(**model)
        load_weights(lm, path)
        return lm

    def check_size(self, model: dict, path: str) -> None:
        """Raises ValueError where `config.json` describes a far larger model than the checkpoint holds.

        Call it before the model is made, which might not fit into memory.
        """
        attention, feed_forward = 4 * model["n_head"] * model["d_head"], 2 * model["d_inner"]
        first_bin, d_embed = [*model.get("cutoffs", ()), model["n_token"]][0], model["d_embed"]
        described = first_bin * d_embed + model["n_layer"] * model["d_model"] * (attention + feed_forward)
        described += d_embed * model["d_model"] if d_embed != model["d_model"] else 0
        found = sum(math.prod(shape) for shape in weight_shapes(path).values())
        if described > 2 * found:
            raise ValueError(
                f"{self.config_file} describes a model of at least {described:,} weights, but {path} holds {found:,}"
            )

    # -------------------------------------------------------------------------------------------------------- writing

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Makes the folder, checks that it can be written to, and keeps other runs out of it."""
        if not self.path:
            raise ValueError("model_dir must name the folder of the run")
        try:
            tf.io.gfile.makedirs(self.path)
            check_writable(self.config_file)
        except (OSError, tf.errors.OpError) as error:
            raise OSError(f"model_dir {self} cannot be written to: {error}") from error
        with lock(self.path, f"another run is training in model_dir {self}"):
            yield

    def check_new(self) -> None:
        """Raises ValueError if the folder holds a run."""
        if self.has_config() or self.checkpoints():
            raise ValueError(f"{self} already holds a run: choose a new folder")

    def create(
        self, data: dict, model: dict, vocab: Vocab, lm: TransformerXLLM, step: int, fingerprints: dict | None = None
    ) -> str:
        """Writes a run that was not trained here, in a new folder; returns the path of its checkpoint.

        A new run can start from its weights, but training cannot go on from it. An error leaves nothing behind.
        """
        self.check_new()
        with contextlib.ExitStack() as stack:
            if not tf.io.gfile.isdir(self.path):
                stack.enter_context(removed_on_error(self.path))
            for path in (self.config_file, self.vocab_file):
                stack.enter_context(removed_on_error(path))
            with writing(self.path):
                tf.io.gfile.makedirs(self.path)
            config = {"data": data, "model": model, "vocab": vocab.get_config(), "fingerprints": fingerprints or {}}
            self.describe(config, vocab)
            return self.save_weights(lm, step)
