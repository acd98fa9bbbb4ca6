"""The folder of an encoder-decoder's run, and of a run of any kind."""

from __future__ import annotations

import dataclasses
import os

import keras

from txl_tf.config import MachineConfig, OptimizerConfig, PairsConfig, PairsTrainingConfig, TransformerConfig
from txl_tf.data.vocabulary import Vocab
from txl_tf.files import read_json
from txl_tf.models.vanilla.transformer import Transformer
from txl_tf.runs.folder import ConfigFile, Family, RunFolder
from txl_tf.runs.tagger_folder import FlatFolder, TenerFolder


@dataclasses.dataclass(kw_only=True)
class _PairsConfigFile(ConfigFile):
    """`config.json` of an encoder-decoder."""

    source_vocab: Vocab
    target_vocab: Vocab


class PairsFolder(RunFolder):
    """The folder of a run that learned from pairs of lines."""

    families = {"transformer": Family(Transformer, TransformerConfig)}
    config_file_type = _PairsConfigFile
    groups = {
        "data": [PairsConfig],
        "training": [MachineConfig, OptimizerConfig, PairsTrainingConfig],
    }
    vocabs = {"source_vocab": "input_vocab_size", "target_vocab": "target_vocab_size"}
    required = tuple(vocabs.values())
    fixed = ("batch_size", "batch_tokens", "mixed_precision", "optimizer", "ema", "seed")
    places = ("train_path", "valid_path", "test_path")

    def check_model(self, model: TransformerConfig) -> None:
        """Nothing more than it checks itself."""

    def least_weights(self, model: dict) -> int:
        layers = model["num_layers"] * (3 * 4 * model["d_model"] + 2 * 2 * model["dff"])
        return model["d_model"] * (layers + model["target_vocab_size"])


def open_folder(model_dir: str | os.PathLike) -> RunFolder:
    """The folder of a run, of the class that its `config.json` calls for; a `RunFolder` if there is none."""
    folder = RunFolder(model_dir)
    config = read_json(folder.config_file, lambda values: None) if folder.has_config() else {}
    folders = {family: kind for kind in (PairsFolder, TenerFolder, FlatFolder) for family in kind.families}
    family = config.get("family")
    return folders[family](model_dir) if isinstance(family, str) and family in folders else folder


def load_run(
    model_dir: str | os.PathLike, ckpt_path: str | None = None, **changes
) -> tuple[keras.Model, Vocab | list[Vocab]]:
    """A trained, converted or averaged run, ready to score and generate.

    Args:
        model_dir: the run's folder.
        ckpt_path: a checkpoint of it by path or name, or `"best"`; by default the latest.
        **changes: arguments of the model to use instead of the run's own, such as `mem_len`.

    Returns:
        `(lm, vocab)`: the language model, not compiled, and its `Vocab`. Of an encoder-decoder, `(model,
        [source_vocab, target_vocab])`; of a tagger, `(tagger, [vocab, bigram_vocab])` and, of FLAT, the words of the
        lexicon as a third.

    Raises:
        ValueError: it is no run's folder, there is no such checkpoint or it is of another model.
    """
    folder = open_folder(model_dir)
    vocabs = folder.load_vocabs()
    return folder.load_model(ckpt_path, **changes), vocabs[0] if len(vocabs) == 1 else vocabs
