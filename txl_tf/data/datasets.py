"""Datasets: the files of each, and the way from their text to a vocabulary and token ids.

`make_recipe` says what to read and how, `make_vocab` takes a first pass over the text, `encode` another.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import tensorflow as tf

from txl_tf.config import DATASETS, TextConfig, one_of
from txl_tf.data.download import LM1B_SHARDS, LM1B_VOCAB
from txl_tf.data.text_files import pydoc_text, read_files
from txl_tf.data.vocabulary import Vocab

SPLITS = ("train", "valid", "test")
PYDOC = "pydoc_data.topics"

_WORDS = {"level": "word", "special": ["<eos>"], "eos": "<eos>", "unk": "<unk>"}

# The datasets of the paper, each a folder of train.txt, valid.txt and test.txt. enwik8 is byte values, text8 is
# letters with _ for the space; white space separates them, so to `Vocab` they are words. lm1b has its vocabulary
# in a file, its training text in shards, and for test.txt it takes valid.txt.
# name: (options of Vocab, splits whose words are counted, cutoffs)
PAPER_DATASETS = {
    "enwik8": ({"level": "word", "lower_case": True}, SPLITS, []),
    "text8": ({"level": "word", "lower_case": True}, SPLITS, []),
    "ptb": ({**_WORDS, "lower_case": True}, SPLITS, []),
    "wt2": (_WORDS, SPLITS, []),
    "wt103": (_WORDS, ("train",), [20000, 40000, 200000]),
    "lm1b": ({"level": "word", "bos": "<S>", "eos": "<S>", "unk": "<UNK>"}, (), [60000, 100000, 640000]),
}


@dataclasses.dataclass
class Recipe:
    """What a dataset is made of, and how.

    Attributes:
        dataset: its name.
        vocab_options: dict, arguments of `Vocab`.
        files: dict, split -> list of text files.
        counted: list of the text files whose symbols are counted.
        options: dict, the hyper-parameters that decide what comes out, `"cutoffs"` among them.
        folder: where the files of a dataset of the paper are, or `None`.
        vocab_file: the file that is the vocabulary, or `None`: it is counted.
        valid_fraction: share of the split train that becomes valid, or `None`.
        num_shuffle: times that the training files are shuffled, or `None`: they stay as they are.
    """

    dataset: str
    vocab_options: dict
    files: dict
    counted: list
    options: dict
    folder: str | None = None
    vocab_file: str | None = None
    valid_fraction: float | None = None
    num_shuffle: int | None = None

    def texts(self, paths: Iterable[str], progress: Callable | None = None) -> Iterator[tuple[str, Iterable]]:
        """Yields name and pieces of each text of `paths`."""
        for path in paths:
            if self.dataset == "pydoc":
                yield path, [pydoc_text()]
            else:
                level = "line" if self.vocab_options.get("bos") else self.vocab_options["level"]
                yield path, read_files([path], level, progress)


def make_recipe(config: TextConfig) -> Recipe:
    """Checks what a text is made of; reads none of it."""
    one_of(DATASETS)("dataset", config.dataset)
    if config.dataset in PAPER_DATASETS:
        return _paper_recipe(config)
    kept = {name: getattr(config, name) for name in ("level", "lower_case", "min_freq", "max_size")}
    vocab_options = dict(kept)
    if config.level == "word":
        vocab_options.update(special=["<eos>", "<unk>"], eos="<eos>", unk="<unk>")
    elif config.min_freq > 1 or config.max_size is not None:
        vocab_options.update(special=["<unk>"], unk="<unk>")
    Vocab(**vocab_options)  # raises if an option is not what it should be
    paths = [PYDOC] if config.dataset == "pydoc" else _split_paths(config.data_path)
    options = {**kept, "valid_fraction": config.valid_fraction, "cutoffs": config.cutoffs and list(config.cutoffs)}
    files = {"train": paths}
    return Recipe(config.dataset, vocab_options, files, paths, options, valid_fraction=config.valid_fraction)


def _paper_recipe(config: TextConfig) -> Recipe:
    dataset, data_path = config.dataset, config.data_path
    vocab_options, counted_splits, _ = PAPER_DATASETS[dataset]
    folders = [data_path] if isinstance(data_path, (str, os.PathLike)) else list(data_path or [])
    if len(folders) != 1 or not folders[0]:
        found = f", got {data_path!r}" if data_path else ""
        raise ValueError(f"dataset {dataset!r} needs data_path: a folder of train.txt, valid.txt, test.txt{found}")
    folder = os.fspath(folders[0]).rstrip("/")
    options = {"cutoffs": config.cutoffs and list(config.cutoffs)}
    if dataset == "lm1b":
        shards = sorted(tf.io.gfile.glob(f"{folder}/{LM1B_SHARDS}"))
        held_out = [f"{folder}/valid.txt"]
        files = {"train": shards, "valid": held_out, "test": held_out}
        options.update(num_shuffle=config.num_shuffle, seed=config.seed)
        vocab_file = f"{folder}/{LM1B_VOCAB}"
        return Recipe(dataset, vocab_options, files, [], options, folder, vocab_file, num_shuffle=config.num_shuffle)
    files = {split: [f"{folder}/{split}.txt"] for split in SPLITS}
    return Recipe(dataset, vocab_options, files, [files[split][0] for split in counted_splits], options, folder)


def _split_paths(data_path: str | os.PathLike | Iterable | None) -> list[str]:
    if not data_path:
        raise ValueError("dataset 'text' needs data_path: a UTF-8 text file, or several separated by commas")
    if isinstance(data_path, str):
        return [path.strip() for path in data_path.split(",")]
    return [os.fspath(path) for path in ([data_path] if isinstance(data_path, os.PathLike) else data_path)]


def all_files(recipe: Recipe) -> list[str]:
    """The files that a recipe reads, each once."""
    paths = dict.fromkeys(path for paths in recipe.files.values() for path in paths)
    return [*paths, *([recipe.vocab_file] if recipe.vocab_file else [])]


def check_files(recipe: Recipe) -> None:
    """Raises FileNotFoundError if a file of the recipe is not there."""
    if recipe.dataset == "pydoc":
        return
    hint = ""
    if recipe.dataset in PAPER_DATASETS:
        hint = f". Dataset {recipe.dataset!r} needs it; tools/prepare_data.py --download fetches the public archive"
    for path in all_files(recipe):
        if not tf.io.gfile.exists(path):
            raise FileNotFoundError(f"there is no file {path}{hint}")
    if not recipe.files["train"]:
        raise FileNotFoundError(f"there is no file {recipe.folder}/{LM1B_SHARDS}{hint}")


def make_vocab(recipe: Recipe, progress: Callable | None = None) -> tuple[Vocab, int]:
    """The vocabulary, and the number of tokens of what was counted."""
    if recipe.vocab_file:
        vocab = Vocab.load(recipe.vocab_file, **recipe.vocab_options)
        if vocab.unk not in vocab.ids:
            raise ValueError(f"unk symbol {vocab.unk!r} is not in vocabulary file {recipe.vocab_file}")
        return vocab, 0
    vocab = Vocab(**recipe.vocab_options)
    n_counted = sum(vocab.count(pieces) for _, pieces in recipe.texts(recipe.counted, progress))
    vocab.build()
    return vocab, n_counted


def make_cutoffs(recipe: Recipe, vocab: Vocab) -> list[int]:
    """The cutoffs that were asked for, or else the dataset's own, as far as the vocabulary reaches."""
    cutoffs = recipe.options["cutoffs"]
    if cutoffs is None and recipe.dataset in PAPER_DATASETS:
        return [cutoff for cutoff in PAPER_DATASETS[recipe.dataset][2] if cutoff < len(vocab)]
    if cutoffs is None:
        return choose_cutoffs(vocab)
    if cutoffs and cutoffs[-1] >= len(vocab):
        raise ValueError(f"cutoffs must be below {len(vocab)}, the size of the vocabulary, got {cutoffs}")
    return cutoffs


def choose_cutoffs(vocab: Vocab) -> list[int]:
    """Chooses the adaptive softmax's bins from a vocabulary's counts: none below 20,000 symbols.

    The first bin has the most frequent symbols, which make up 90 % of the text, the next two go to 95 % and 99 %,
    and the last has the rest. They end at whole thousands.

    Args:
        vocab: `Vocab` that has counted a text and been built.

    Returns:
        list of int, as `Corpus.cutoffs`.
    """
    if len(vocab) < 20000:
        return []
    counts = np.cumsum([vocab.counter[symbol] for symbol in vocab.symbols])
    ends = [np.searchsorted(counts, share * counts[-1]) + 1 for share in (0.90, 0.95, 0.99)]
    return [end for end in sorted({math.ceil(end / 1000) * 1000 for end in ends}) if end < len(vocab)]


def is_by_character(dataset: str | None, vocab: Vocab) -> bool:
    """Whether a dataset's tokens are characters or bytes, spelt as words or not."""
    return dataset in ("enwik8", "text8") or vocab.level != "word"


def encode(
    recipe: Recipe, vocab: Vocab, n_counted: int, progress: Callable | None = None
) -> Iterator[tuple[str, int, np.ndarray]]:
    """Yields `(split, shard, ids)`, the pieces of each split in order; shard is 0 but for shuffled training files."""
    for split, paths in recipe.files.items():
        if split == "train" and recipe.num_shuffle:
            yield from _encode_shuffled(recipe, vocab, progress)
            continue
        pieces = (ids for path, texts in recipe.texts(paths, progress) for ids in vocab.encode_stream(texts, path))
        if recipe.valid_fraction:
            yield from _cut_off_valid(pieces, n_counted, recipe.valid_fraction)
        else:
            yield from ((split, 0, ids) for ids in pieces)


def _cut_off_valid(pieces, n_tokens, valid_fraction):
    n_train = int(n_tokens * (1 - valid_fraction))
    if n_train in (0, n_tokens):
        raise ValueError(f"a text of {n_tokens} tokens is too short to hold out {valid_fraction} of it")
    position = 0
    for ids in pieces:
        cut = min(max(n_train - position, 0), len(ids))
        if cut > 0:
            yield "train", 0, ids[:cut]
        if cut < len(ids):
            yield "valid", 0, ids[cut:]
        position += len(ids)


def _encode_shuffled(recipe, vocab, progress):
    """The training files of lm1b, the sentences of each in random order: the original's order, for the same seed.

    With several shuffles, all files follow in a first order, then all in a second, ...
    """
    rng = np.random.RandomState(recipe.options["seed"])
    paths = recipe.files["train"]
    for shard, path in enumerate(paths):
        pieces, lengths = [], []
        for text in read_files([path], "line", progress):
            pieces.append(vocab.encode(text, name=path))
            lengths.extend(len(line.split()) + 2 for line in text.split("\n")[:-1])  # with both markers
        sentences = np.split(np.concatenate(pieces), np.cumsum(lengths)[:-1])
        for shuffle in range(recipe.num_shuffle):
            rng.shuffle(sentences)
            yield "train", shuffle * len(paths) + shard, np.concatenate(sentences)
