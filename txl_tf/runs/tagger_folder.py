"""The folders of taggers' runs: one with characters alone, one with the words of a lexicon."""

from __future__ import annotations

import dataclasses
import math

from txl_tf.config import (
    FlatTaggerConfig,
    LabelConfig,
    MachineConfig,
    OptimizerConfig,
    TaggedConfig,
    TaggerTrainingConfig,
    TenerTaggerConfig,
    at_least,
    satisfies,
)
from txl_tf.data.vocabulary import Vocab
from txl_tf.models.taggers.flat import Flat
from txl_tf.models.taggers.tagger import Tagger
from txl_tf.models.taggers.tener import Tener
from txl_tf.runs.folder import ConfigFile, Family, RunFolder


@dataclasses.dataclass(kw_only=True)
class _TenerConfigFile(ConfigFile):
    """`config.json` of a tagger."""

    vocab: Vocab
    bigram_vocab: Vocab


@dataclasses.dataclass(kw_only=True)
class _FlatConfigFile(_TenerConfigFile):
    """`config.json` of a tagger with a lexicon."""

    lexicon: Vocab


@dataclasses.dataclass
class _BestFile:
    step: int = dataclasses.field(metadata={"check": at_least(0)})
    val_f1: float = dataclasses.field(metadata={"check": satisfies(math.isfinite, "be finite")})
    text: str | None = None  # fingerprint of the text that was validated on


class TenerFolder(RunFolder):
    """The folder of a run of TENER."""

    families = {"tener": Family(Tener, TenerTaggerConfig)}
    config_file_type = _TenerConfigFile
    groups = {"data": [TaggedConfig], "training": [MachineConfig, OptimizerConfig, TaggerTrainingConfig]}
    vocabs = {"vocab": "n_token", "bigram_vocab": None}
    required = ("n_token", "labels")
    fixed = ("batch_size", "mixed_precision", "optimizer", "ema", "seed")
    places = ("train_path", "valid_path", "test_path", "lexicon", "char_vectors", "bigram_vectors", "word_vectors")
    monitor, best_of = "val_f1", max
    best_file_type = _BestFile

    def check_model(self, model: TenerTaggerConfig) -> None:
        """Nothing more than it checks itself."""

    def make_model(self, config: dict, **options) -> Tagger:
        return make_tagger(self.family(config).model, config["model"], **options)

    def least_weights(self, model: dict) -> int:
        layers = model["n_layer"] * model["d_model"] * (model["d_model"] + 2 * model["d_inner"])
        return layers + model["n_token"] * model.get("d_embed", 1)

    def config(self, data: dict, model: dict, vocabs: list[Vocab], model_class: type) -> dict:
        (family,) = self.families
        named = {name: vocab.get_config() for name, vocab in zip(self.vocabs, vocabs, strict=True)}
        return {"family": family, "data": data, "model": model, **named}


class FlatFolder(TenerFolder):
    """The folder of a run of FLAT."""

    families = {"flat": Family(Flat, FlatTaggerConfig)}
    config_file_type = _FlatConfigFile
    vocabs = {**TenerFolder.vocabs, "lexicon": None}


TAGGER_FOLDERS = {"tener": TenerFolder, "flat": FlatFolder}


def make_tagger(network_class: type, values: dict, seed: int | None = None, dtype: str | None = None) -> Tagger:
    """A new tagger of the hyper-parameters `values`, such as `config.json` has them."""
    dtype = values.get("dtype", dtype)  # a change of `load_run`
    sizes = {name: values[name] for name in network_class.config.names() if name in values}
    network = network_class(**sizes, seed=seed, dtype=dtype, name="network")
    options = {name: values[name] for name in LabelConfig.names() if name in values}
    return Tagger(network, **options, seed=seed, dtype=dtype)
