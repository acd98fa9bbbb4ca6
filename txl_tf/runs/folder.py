"""The folder of a run. `RunFolder` alone knows what lies where:

config.json              family, data, model, vocabulary and training, see `txl_tf.config`
vocab.txt                a symbol a line, in the order of the ids; of subwords vocab.model; of pairs source_vocab.txt ..
ckpt-<step>.*            checkpoints, and `checkpoint`, which names them to other programs
best/ckpt-<step>.*       weights with the best validation; best.json says which loss, or F1
ema/ckpt-<step>.*        moving average of the weights at the end of the training
log.csv, train/          curves
tracker.json             id of the run where a tracker follows it
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from txl_tf.config import (
    Config,
    EvaluationConfig,
    MachineConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    TextConfig,
    TrainingConfig,
    TransformerLMConfig,
    at_least,
    check_bins,
    satisfies,
)
from txl_tf.data.subwords import empty_vocab, load_vocab, vocab_file
from txl_tf.data.vocabulary import Vocab
from txl_tf.files import check_writable, lock, read_json, removed_on_error, write_json, writing
from txl_tf.models.language_model import TransformerXLLM
from txl_tf.models.vanilla.transformer_lm import TransformerLM
from txl_tf.runs.weights import CheckpointFolder, load_weights, weight_shapes
from txl_tf.schema import brief, check_values

_LANGUAGE_MODEL = "a language model, for train.py, tools/generate.py and others"
FAMILIES = {  # what the runs of a family hold, and what opens them
    "transformer_xl": _LANGUAGE_MODEL,
    "transformer_lm": _LANGUAGE_MODEL,
    "transformer": "an encoder-decoder, for tools/train_seq2seq.py and tools/translate.py",
    "tener": "a tagger, for tools/train_ner.py and tools/tag.py",
    "flat": "a tagger with a lexicon, for tools/train_ner.py and tools/tag.py",
}


class Family(NamedTuple):
    """A kind of model."""

    model: type  # of Keras
    config: type  # group of its hyper-parameters


@dataclasses.dataclass(kw_only=True)
class ConfigFile:
    """`config.json` of any run. `fingerprints` are those of the vocabularies and of each split, see `Corpus`."""

    data: dict
    model: dict
    training: dict = dataclasses.field(default_factory=dict)
    fingerprints: dict[str, str] = dataclasses.field(default_factory=dict)
    family: str = "transformer_xl"


@dataclasses.dataclass(kw_only=True)
class _LanguageModelFile(ConfigFile):
    """`config.json` of a language model."""

    vocab: Vocab


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Data(TextConfig):
    data_dir: str | None = None
    by_character: bool = False


@dataclasses.dataclass
class _BestFile:
    step: int = dataclasses.field(metadata={"check": at_least(0)})
    val_loss: float = dataclasses.field(metadata={"check": satisfies(math.isfinite, "be finite")})
    text: str | None = None  # fingerprint of the text that was validated on


class RunFolder(CheckpointFolder):
    """The folder of a run, local or remote. Its methods raise ValueError that names the folder and what is missing.

    This one is of language models. Another kind of model has a subclass with its own values of the attributes here.

    Attributes:
        families: family in `config.json` -> its model and hyper-parameters.
        config_file_type: dataclass of `config.json`.
        groups: other keys in `config.json` -> groups of hyper-parameters that they hold; of two with one name, the last
            counts.
        vocabs: key in `config.json`, and name of a file, of each vocabulary -> hyper-parameter that is its size.
        required: hyper-parameters of the model that must be there, though they have a default elsewhere.
        fixed: what of the training a checkpoint depends on; the rest, such as train_steps, may change when a run goes
            on.
        places: what of the data says where the text lies, not what it is.
        monitor, best_of: what tells the best checkpoint, and which of two is better.
        best_file_type: dataclass of best.json.
    """

    families = {
        "transformer_xl": Family(TransformerXLLM, ModelConfig),
        "transformer_lm": Family(TransformerLM, TransformerLMConfig),
    }
    config_file_type = _LanguageModelFile
    groups = {"data": [_Data], "training": [EvaluationConfig, MachineConfig, OptimizerConfig, TrainingConfig]}
    vocabs = {"vocab": "n_token"}  # of size `None`: none says it
    required = ("n_token", "mem_len")
    fixed = (
        "tgt_len",
        "train_batch_size",
        "mixed_precision",
        "optimizer",
        "ema",
        "static_shapes",
        "shuffle_documents",
        "seed",
    )
    places = ("data_path", "data_dir", "vocab_path")
    monitor, best_of = "val_loss", min
    best_file_type = _BestFile

    def __init__(self, model_dir: str | os.PathLike):
        super().__init__(os.fspath(model_dir))
        self.config_file = os.path.join(self.path, "config.json")
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
        """`config.json`: `"data"`, what the run was trained on; `"model"` and the vocabularies, arguments of the model
        and of `Vocab`; and, if the run was trained here, `"training"`.
        """
        if not self.has_config():
            raise ValueError(f"model_dir {self} is not the folder of a run: {self.config_file} does not exist")
        return read_json(self.config_file, self._check_config)

    def _check_config(self, values: dict) -> None:
        family = values.get("family", "transformer_xl")
        if family not in self.families:
            holds = f": it is {FAMILIES[family]}" if isinstance(family, str) and family in FAMILIES else ""
            raise ValueError(f"family must be {' or '.join(self.families)}, got {brief(family)}{holds}")
        check_values(values, self.config_file_type)
        for key, groups in self.groups.items():
            check_values(values.get(key, {}), *groups, partial=True, prefix=f"{key}.")
        check_values(values["model"], self.families[family].config, prefix="model.")
        missing = [name for name in self.required if values["model"].get(name) is None]
        if missing:  # they have defaults elsewhere
            raise ValueError(f"model.{missing[0]} is missing")
        self.check_model(self.families[family].config(**values["model"]))
        for name in self.vocabs:
            empty_vocab(**values[name])  # checks them

    def check_model(self, model: Config) -> None:
        """Raises ValueError where the hyper-parameters of a model do not fit each other."""
        check_bins(model.n_token, model.d_embed, model.cutoffs, model.div_val)

    def load_vocabs(self) -> list[Vocab]:
        """The vocabularies of the run."""
        config, loaded = self.read_config(), []
        for name, size in self.vocabs.items():
            file = self._vocab_file(name, config[name].get("level"))
            vocab = load_vocab(file, **config[name])
            if config.get("fingerprints", {}).get(name, vocab.fingerprint()) != vocab.fingerprint():
                raise ValueError(f"{file} is not as it was written: config.json has another fingerprint of it")
            if size is not None and len(vocab) != config["model"][size]:
                raise ValueError(
                    f"{file} has {len(vocab)} symbols, but config.json says model.{size} {config['model'][size]}"
                )
            loaded.append(vocab)
        return loaded

    def load_vocab(self) -> Vocab:
        """The vocabulary of the run, which has one."""
        (vocab,) = self.load_vocabs()
        return vocab

    def _vocab_file(self, name: str, level: str | None) -> str:
        return os.path.join(self.path, vocab_file(name, level))

    def describe(self, config: dict, vocabs: list[Vocab]) -> None:
        """Writes `config.json` and, while there is no checkpoint that depends on them, the vocabularies."""
        named = dict(zip(self.vocabs, vocabs, strict=True))
        if not self.checkpoints():
            for name, vocab in named.items():
                vocab.save(self._vocab_file(name, vocab.level))
        fingerprints = {name: vocab.fingerprint() for name, vocab in named.items()}
        write_json(self.config_file, {**config, "fingerprints": {**config.get("fingerprints", {}), **fingerprints}})

    def check_vocab(self, vocabs: list[Vocab], remedy: str) -> None:
        """Raises ValueError unless a text has the vocabularies of the run; `remedy` ends the message."""
        for name, vocab, before in zip(self.vocabs, vocabs, self.load_vocabs(), strict=True):
            difference = vocab.difference(before)
            if difference:
                what = name.replace("_", " ").replace("vocab", "vocabulary")
                raise ValueError(
                    f"the text has another {what} ({len(vocab)} symbols) than the run in {self} ({len(before)} "
                    f"symbols): {difference}. {remedy}"
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
        groups = {**self.groups, "model": [self.family(config).config]}
        defaults = {key: {k: v for group in some for k, v in _defaults(group)} for key, some in groups.items()}
        now, then = (some.get("fingerprints", {}) for some in (config, before))
        same_text = then and all(then.get(split) == now.get(split) for split in ("train", "valid"))
        changes = []
        if self.family(before) != self.family(config):
            changes.append(f"family: {before.get('family')!r} there, {config['family']!r} now")
        for part in ("data", "model", *self.vocabs, "training"):
            for name, value in config.get(part, {}).items():
                there = before.get(part, {}).get(name, defaults.get(part, {}).get(name))
                if same_text and name in self.places:  # the same text by another name
                    continue
                if there != value and (part != "training" or name in self.fixed):
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
        """`"path"`, `"step"` and `monitor`, such as `"val_loss"` (nats), of the best checkpoint, or `None`."""
        if not tf.io.gfile.exists(self.best_file):
            return None
        best = read_json(self.best_file, lambda values: check_values(values, self.best_file_type))
        return {"path": self.best.checkpoint(best["step"]), **best}

    def stops_early(self, training: RunConfig, step: int) -> bool:
        """Whether a run has had no better validation for as long as it has patience, after that at `step`."""
        patience = getattr(training, "patience", None)
        best = self.find_best() if patience else None
        return best is not None and step - best["step"] >= patience

    def load_model(self, ckpt_path: str | None = None, **changes) -> keras.Model:
        """The model of the run, not compiled; arguments as of `load_run`."""
        config = self.read_config()
        arguments, group = {**config["model"], **changes}, self.family(config).config
        group(**{name: arguments[name] for name in group.names() if name in arguments})  # checks the changes
        path = self.find_checkpoint(ckpt_path)
        self.check_size(arguments, path)
        model = self.make_model({**config, "model": arguments})
        load_weights(model, path)
        return model

    def make_model(self, config: dict, **options) -> keras.Model:
        """The model that `config.json` describes, its weights new; `options` are of Keras, such as `dtype`."""
        return self.family(config).model(**config["model"], **options)

    def family(self, config: dict | None = None) -> Family:
        """The kind of model that `config.json` describes."""
        config = self.read_config() if config is None else config
        return self.families[config.get("family", "transformer_xl")]

    def check_size(self, model: dict, path: str) -> None:
        """Raises ValueError where `config.json` describes a far larger model than the checkpoint holds.

        Call it before the model is made, which might not fit into memory.
        """
        described = self.least_weights(model)
        found = sum(math.prod(shape) for shape in weight_shapes(path).values())
        if described > 2 * found:
            raise ValueError(
                f"{self.config_file} describes a model of at least {described:,} weights, but {path} holds {found:,}"
            )

    def least_weights(self, model: dict) -> int:
        """About how many weights a model of these hyper-parameters has, at least."""
        attention, feed_forward = 4 * model["n_head"] * model["d_head"], 2 * model["d_inner"]
        first_bin, d_embed = [*model.get("cutoffs", ()), model["n_token"]][0], model["d_embed"]
        layers = model["n_layer"] * model["d_model"] * (attention + feed_forward)
        return first_bin * d_embed + layers + (d_embed * model["d_model"] if d_embed != model["d_model"] else 0)

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
        """Raises ValueError if the folder holds a run, or is not named."""
        if not self.path:
            raise ValueError("model_dir must name the folder of the run")
        if self.has_config() or self.checkpoints():
            raise ValueError(f"{self} already holds a run: choose a new folder")

    def create(
        self, data: dict, model: dict, vocabs: list[Vocab], trained: keras.Model | dict[str, tf.Tensor], step: int,
        fingerprints: dict | None = None, model_class: type | None = None,
    ) -> str:  # fmt: skip
        """Writes a run that was not trained here, in a new folder; returns the path of its checkpoint.

        `trained` is a model, or its weights by name where `model_class` says of what model.
        A new run can start from its weights, but training cannot go on from it. An error leaves nothing behind.
        """
        self.check_new()
        with contextlib.ExitStack() as stack:
            if not tf.io.gfile.isdir(self.path):
                stack.enter_context(removed_on_error(self.path))
            files = [self._vocab_file(name, vocab.level) for name, vocab in zip(self.vocabs, vocabs, strict=True)]
            for path in (self.config_file, *files):
                stack.enter_context(removed_on_error(path))
            with writing(self.path):
                tf.io.gfile.makedirs(self.path)
            config = self.config(data, model, vocabs, model_class or type(trained))
            self.describe({**config, "fingerprints": fingerprints or {}}, vocabs)
            return self.save_weights(trained, step)

    def config(self, data: dict, model: dict, vocabs: list[Vocab], model_class: type) -> dict:
        """What `config.json` says of a run, but for its training."""
        (family,) = (name for name, known in self.families.items() if known.model is model_class)
        named = {name: vocab.get_config() for name, vocab in zip(self.vocabs, vocabs, strict=True)}
        return {"family": family, "data": data, "model": model, **named}


def _defaults(group: type) -> list[tuple[str, Any]]:
    fields = dataclasses.fields(group)
    return [(field.name, field.default) for field in fields if field.default is not dataclasses.MISSING]
