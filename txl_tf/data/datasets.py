"""Datasets: which files each has, and how their text becomes a vocabulary and token ids.

`make_recipe` decides what to read and how, `make_vocab` counts symbols in a first pass, `encode` is a second pass.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import tensorflow as tf

from txl_tf.config import DATASETS, TextConfig, one_of
from txl_tf.data.download import LM1B_SHARDS, LM1B_VOCAB, SPLITS
from txl_tf.data.text_files import pydoc_text, read_files
from txl_tf.data.vocabulary import Vocab

PYDOC = "pydoc_data.topics"

_Pieces = Iterator[tuple[str, int, np.ndarray]]  # (split, shard, ids)
_WORDS = {"level": "word", "special": ["<eos>"], "eos": "<eos>", "unk": "<unk>"}

# The datasets of the paper, each a folder of train.txt, valid.txt and test.txt. enwik8 is byte values and text8 is
# letters with _ for space; white space separates them, so `Vocab` treats them as words. lm1b has a vocabulary file,
# training text in shards, and valid.txt is also its test text.
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
        vocab_options: arguments of `Vocab`.
        files: `{split: list of text files}`.
        counted: text files whose symbols are counted.
        options: hyper-parameters that decide the result. One's own text has `"valid_fraction"`, the share of train that
            becomes valid; lm1b has `"num_shuffle"`, the number of random orders to write.
        folder: folder of a dataset of the paper.
        vocab_file: the vocabulary, if it is not counted.
    """

    dataset: str
    vocab_options: dict
    files: dict
    counted: list
    options: dict
    folder: str | None = None
    vocab_file: str | None = None

    def texts(self, paths: Iterable[str], progress: Callable | None = None) -> Iterator[tuple[str, Iterable]]:
        """Yields name and pieces of each text of `paths`."""
        level = "line" if self.vocab_options.get("bos") else self.vocab_options["level"]
        for path in paths:
            yield path, [pydoc_text()] if self.dataset == "pydoc" else read_files([path], level, progress)


def make_recipe(config: TextConfig) -> Recipe:
    """Checks what a text is made of; reads none of it."""
    one_of(DATASETS)("dataset", config.dataset)
    if config.dataset in PAPER_DATASETS:
        return _paper_recipe(config)
    if config.vocab_path and (config.min_freq or config.max_size is not None):
        raise ValueError(f"min_freq and max_size choose symbols, but vocab_path={config.vocab_path} has them already")
    kept = {name: getattr(config, name) for name in ("level", "lower_case", "min_freq", "max_size")}
    vocab_options = dict(kept)
    if config.level == "word":
        vocab_options.update(special=["<eos>", "<unk>"], eos="<eos>", unk="<unk>")
    elif config.min_freq > 1 or config.max_size is not None:
        vocab_options.update(special=["<unk>"], unk="<unk>")
    Vocab(**vocab_options)  # checks the options
    paths = [PYDOC] if config.dataset == "pydoc" else config.data_path
    if not paths:
        raise ValueError("dataset 'text' needs data_path: a UTF-8 text file, or several separated by commas")
    if isinstance(paths, str):
        paths = [path.strip() for path in paths.split(",")]
    paths = [os.fspath(path) for path in ([paths] if isinstance(paths, os.PathLike) else paths)]
    options = {**kept, "valid_fraction": config.valid_fraction, "cutoffs": config.cutoffs and list(config.cutoffs)}
    return Recipe(config.dataset, vocab_options, {"train": paths}, paths, options, vocab_file=config.vocab_path)


def _paper_recipe(config: TextConfig) -> Recipe:
    dataset, data_path = config.dataset, config.data_path
    vocab_options, counted_splits, _ = PAPER_DATASETS[dataset]
    folders = [data_path] if isinstance(data_path, (str, os.PathLike)) else list(data_path or [])
    if len(folders) != 1 or not folders[0]:
        found = f", got {data_path!r}" if data_path else ""
        raise ValueError(f"dataset {dataset!r} needs data_path: a folder of train.txt, valid.txt, test.txt{found}")
    folder = os.fspath(folders[0]).rstrip("/")
    files = {split: [f"{folder}/{split}.txt"] for split in SPLITS}
    counted = [files[split][0] for split in counted_splits]
    options = {"cutoffs": config.cutoffs and list(config.cutoffs)}
    recipe = Recipe(dataset, vocab_options, files, counted, options, folder, config.vocab_path)
    if dataset == "lm1b":
        files.update(train=sorted(tf.io.gfile.glob(f"{folder}/{LM1B_SHARDS}")), test=files["valid"])
        options.update(num_shuffle=config.num_shuffle, seed=config.seed)
        recipe.vocab_file = config.vocab_path or f"{folder}/{LM1B_VOCAB}"
    return recipe


def all_files(recipe: Recipe) -> list[str]:
    """The files that a recipe reads, each once."""
    paths = dict.fromkeys(path for paths in recipe.files.values() for path in paths)
    return [*paths, *([recipe.vocab_file] if recipe.vocab_file else [])]


def check_files(recipe: Recipe) -> None:
    """Raises FileNotFoundError if a file of the recipe is not there."""
    if recipe.dataset == "pydoc":
        return
    hint = f". Dataset {recipe.dataset!r} needs it; tools/prepare_data.py --download fetches the public archive"
    hint = hint if recipe.dataset in PAPER_DATASETS else ""
    for path in all_files(recipe):
        if not tf.io.gfile.exists(path):
            raise FileNotFoundError(f"there is no file {path}{hint}")
    if not recipe.files["train"]:
        raise FileNotFoundError(f"there is no file {recipe.folder}/{LM1B_SHARDS}{hint}")


def make_vocab(recipe: Recipe, progress: Callable | None = None) -> tuple[Vocab, int]:
    """The vocabulary, and the number of tokens in the counted files."""
    if recipe.vocab_file:
        vocab = Vocab.load(recipe.vocab_file, **recipe.vocab_options)
        if vocab.unk is not None and vocab.unk not in vocab.ids:
            raise ValueError(f"unk symbol {vocab.unk!r} is not in vocabulary file {recipe.vocab_file}")
    else:
        vocab = Vocab(**recipe.vocab_options)
    n_counted = sum(vocab.count(pieces) for _, pieces in recipe.texts(recipe.counted, progress))
    if not recipe.vocab_file:
        vocab.build()
    return vocab, n_counted


def make_cutoffs(recipe: Recipe, vocab: Vocab) -> list[int]:
    """The given cutoffs, or else the dataset's own that lie within the vocabulary."""
    cutoffs = recipe.options["cutoffs"]
    if cutoffs is None and recipe.dataset in PAPER_DATASETS:
        return [cutoff for cutoff in PAPER_DATASETS[recipe.dataset][2] if cutoff < len(vocab)]
    if cutoffs is None:
        return choose_cutoffs(vocab)
    if cutoffs and cutoffs[-1] >= len(vocab):
        raise ValueError(f"cutoffs must be below {len(vocab)}, the size of the vocabulary, got {cutoffs}")
    return cutoffs


def choose_cutoffs(vocab: Vocab) -> list[int]:
    """Cutoffs of the adaptive softmax from the counts of a built vocabulary; none below 20,000 symbols.

    The first bin holds the most frequent symbols, which make up 90% of the text. The next two reach 95% and 99%, the
    last holds the rest. Cutoffs are whole thousands.
    """
    if len(vocab) < 20000:
        return []
    counts = np.cumsum([vocab.counter[symbol] for symbol in vocab.symbols])
    ends = [np.searchsorted(counts, share * counts[-1]) + 1 for share in (0.90, 0.95, 0.99)]
    return [end for end in sorted({math.ceil(end / 1000) * 1000 for end in ends}) if end < len(vocab)]


def is_by_character(dataset: str | None, vocab: Vocab) -> bool:
    """Whether tokens are characters or bytes, even if spelt as words."""
    return dataset in ("enwik8", "text8") or vocab.level != "word"


def encode(recipe: Recipe, vocab: Vocab, n_counted: int, progress: Callable | None = None) -> _Pieces:
    """Yields the pieces of each split in order; the shard is 0 except for shuffled files."""
    for split, paths in recipe.files.items():
        if split == "train" and "num_shuffle" in recipe.options:
            yield from _encode_shuffled(recipe, vocab, progress)
            continue
        pieces = (ids for path, texts in recipe.texts(paths, progress) for ids in vocab.encode_stream(texts, path))
        if "valid_fraction" in recipe.options:
            yield from _cut_off_valid(pieces, n_counted, recipe.options["valid_fraction"])
        else:
            yield from ((split, 0, ids) for ids in pieces)


def _cut_off_valid(pieces: Iterable[np.ndarray], n_tokens: int, valid_fraction: float) -> _Pieces:
    n_train = int(n_tokens * (1 - valid_fraction))
    if n_train in (0, n_tokens):
        raise ValueError(f"a text of {n_tokens} tokens is too short to hold out {valid_fraction} of it")
    position = 0
    for ids in pieces:
        for split, part in zip(("train", "valid"), np.split(ids, [max(n_train - position, 0)]), strict=True):
            if len(part):
                yield split, 0, part
        position += len(ids)


def _encode_shuffled(recipe: Recipe, vocab: Vocab, progress: Callable | None) -> _Pieces:
    """The training files of lm1b, the sentences of each in random order; the original's order for the same seed.

    With several shuffles, all files follow in a first order, then all in a second, ...
    """
    rng = np.random.RandomState(recipe.options["seed"])
    paths = recipe.files["train"]
    for shard, (path, texts) in enumerate(recipe.texts(paths, progress)):
        pieces, lengths = [], []
        for text in texts:
            pieces.append(vocab.encode(text, name=path))
            lengths.extend(len(line.split()) + 2 for line in text.split("\n")[:-1])  # with both markers
        sentences = np.split(np.concatenate(pieces), np.cumsum(lengths)[:-1])
        for shuffle in range(recipe.options["num_shuffle"]):
            rng.shuffle(sentences)
            yield "train", shuffle * len(paths) + shard, np.concatenate(sentences)
