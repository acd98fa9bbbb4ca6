"""Datasets: which files each has, and what becomes of their text: `make_recipe` decides; `encoding.py` does it."""

from __future__ import annotations

import dataclasses
import fnmatch
import math
import os
from collections.abc import Callable, Iterator

import numpy as np
import tensorflow as tf

from txl_tf.config import DATASETS, TextConfig, one_of
from txl_tf.data import inputs
from txl_tf.data.subwords import END, SUBWORDS, empty_vocab
from txl_tf.data.text.download import LM1B_SHARDS, LM1B_VOCAB, SPLITS
from txl_tf.data.text.parquet import Rows, table_rows
from txl_tf.data.text.sizes import TextSize
from txl_tf.data.text.texts import FilePart, Text, find_files, have_documents, read_texts, texts_of_rows
from txl_tf.data.text_files import pydoc_text
from txl_tf.data.vocabulary import KNOWN_SYMBOLS, Vocab
from txl_tf.errors import ParameterError, brief, named
from txl_tf.schema import check_left_out

PYDOC = "pydoc_data.topics"
FEWEST_WITH_BINS, WHOLE = 20_000, 1000  # size of a vocabulary with cutoffs, which are whole thousands

UNK = "<unk>"
_WORDS = {"level": "word", "special": ["<eos>"], "eos": "<eos>", "unk": UNK}

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
    """The files of a dataset, and how they become tokens.

    Attributes:
        vocab_options: arguments of `Vocab`.
        files: `{split: list of text files}`.
        counted: text files whose tokens are counted.
        options: hyper-parameters that decide the result. One's own text has `"valid_fraction"`, the share of train that
            becomes valid; lm1b has `"num_shuffle"`, the number of random orders to write.
        folder: folder of a dataset of the paper.
        vocab_file: the vocabulary, if it is not counted.
        vocab: the same, where it is there already.
        raw_text: see `read_texts`.
        skip_bad_lines: whether rows without a text are left out.
        spooled: whether the only file holds the texts of `prepare_texts`, a JSON line each.
    """

    dataset: str
    vocab_options: dict
    files: dict
    counted: list
    options: dict
    folder: str | None = None
    vocab_file: str | None = None
    vocab: Vocab | None = None
    raw_text: bool = True
    skip_bad_lines: bool = False
    spooled: bool = False

    def read(
        self,
        portion: list[FilePart] | Rows,
        progress: Callable | None = None,
        numbered: bool = True,
        skipped: Callable[[str], None] | None = None,
    ) -> Iterator[Text]:
        """Yields the texts of a portion; `progress`, `numbered` and `skipped` as in `read_texts`."""
        if self.dataset == "pydoc":
            return iter([Text(PYDOC, [pydoc_text()])])
        level = "line" if self.vocab_options.get("bos") else self.vocab_options["level"]
        skipped = (skipped or _nothing) if self.skip_bad_lines else None
        rows = {"raw_text": self.raw_text, "skipped": skipped}
        if isinstance(portion, Rows):
            return texts_of_rows(table_rows(portion), level, portion.field, **rows)
        advice = "level='byte' reads any file" if self.dataset == "text" and self.vocab is None else ""
        found = read_texts(portion, level, self.options.get("text_field"), progress, numbered, advice=advice, **rows)
        if self.spooled:
            return (text._replace(name=f"text {text.name.rpartition(' ')[2]}") for text in found)  # its line's number
        return found


def _nothing(reason: str) -> None:
    """What is done about a row that is left out, where it has been counted before."""


def make_recipe(config: TextConfig) -> Recipe:
    """Checks what a text is made of; reads only the beginnings of its files."""
    one_of(DATASETS)("dataset", config.dataset)
    if config.dataset in PAPER_DATASETS:
        return _paper_recipe(config)
    _check_options(config)
    paths = [PYDOC] if config.dataset == "pydoc" else config.data_path
    if not paths:
        raise ValueError("dataset 'text' needs data_path: a UTF-8 text file, or several separated by commas")
    paths, raw_text = paths if config.dataset == "pydoc" else find_files(paths), bool(config.raw_text)
    kept = {name: getattr(config, name) for name in ("level", "lower_case", "min_freq", "max_size")}
    options = {**kept, "valid_fraction": config.valid_fraction, "cutoffs": config.cutoffs and list(config.cutoffs)}
    if config.text_field is not None:
        options["text_field"] = config.text_field
    of_rows = config.text_field is not None or (config.dataset == "text" and have_documents(paths, raw_text))
    if config.documents or (config.documents is None and of_rows):
        options["documents"] = True
    if config.skip_bad_lines:
        if not of_rows:
            why = "it leaves out rows of JSON lines, JSON arrays and Parquet, and there are none"
            check_left_out({"skip_bad_lines": True}, why)
        options["skip_bad_lines"] = True
    if config.level == "subword":
        options.update(vocab_size=config.vocab_size or SUBWORDS, subword_type=config.subword_type)
        kept = {"level": "subword"}
    if config.level == "word":
        kept.update(special=["<eos>", UNK], eos="<eos>", unk=UNK)
    elif config.min_freq > 1 or config.max_size is not None:
        kept.update(special=[UNK], unk=UNK)
    if "documents" in options:
        kept.update(document=END)
    kept.update(raw_text=raw_text)
    empty_vocab(**kept)  # checks the options
    reading = {"raw_text": raw_text, "skip_bad_lines": config.skip_bad_lines}
    return Recipe(config.dataset, kept, {"train": paths}, paths, options, vocab_file=config.vocab_path, **reading)


def _check_options(config: TextConfig) -> None:
    """Raises ValueError where options do not go together."""
    if config.dataset == "pydoc" and config.data_path:
        raise ValueError(
            f"dataset 'pydoc' is Python's own manual and reads no data_path, got {named(config.data_path)}: "
            "leave dataset out, or give dataset=text, for a text of your own"
        )
    if config.vocab_path and (config.min_freq or config.max_size is not None or config.vocab_size):
        raise ValueError(
            f"min_freq, max_size and vocab_size choose symbols, but vocab_path={named(config.vocab_path)} has them "
            "already"
        )
    counted = {name: getattr(config, name) for name in ("lower_case", "min_freq", "max_size")}
    given = [name for name, value in counted.items() if value]
    if config.level == "subword" and given:
        raise ValueError(
            f"{given[0]} is not for level 'subword', got {brief(counted[given[0]])}: vocab_size says how many"
        )
    if config.level != "subword" and config.vocab_size is not None:
        raise ValueError(
            f"vocab_size={config.vocab_size} needs level 'subword', got {brief(config.level)}: max_size limits other "
            "symbols"
        )


def _paper_recipe(config: TextConfig) -> Recipe:
    dataset, data_path = config.dataset, config.data_path
    vocab_options, counted_splits, _ = PAPER_DATASETS[dataset]
    own = {"level": config.level == "subword"}
    names = ("vocab_size", "documents", "text_field", "min_freq", "max_size", "lower_case", "skip_bad_lines")
    own.update({name: getattr(config, name) for name in names}, raw_text=config.raw_text is False)
    given = [name for name, value in own.items() if value]
    if given:
        raise ValueError(
            f"{given[0]} is for your own text, got {brief(getattr(config, given[0]))}: dataset {brief(dataset)} has "
            "the original's tokens; dataset 'text' with data_path reads its files as any others"
        )
    folders = [data_path] if isinstance(data_path, (str, os.PathLike)) else list(data_path or [])
    if len(folders) != 1 or not folders[0]:
        found = f", got {brief(data_path)}" if data_path else ""
        raise ValueError(f"dataset {brief(dataset)} needs data_path: a folder of train.txt, valid.txt, test.txt{found}")
    folder = os.fspath(folders[0]).rstrip("/")
    files = {split: [f"{folder}/{split}.txt"] for split in SPLITS}
    counted = [files[split][0] for split in counted_splits]
    options = {"cutoffs": config.cutoffs and list(config.cutoffs)}
    recipe = Recipe(dataset, vocab_options, files, counted, options, folder, config.vocab_path)
    if dataset == "lm1b":
        shards, pattern = os.path.split(f"{folder}/{LM1B_SHARDS}")
        names = tf.io.gfile.listdir(shards) if tf.io.gfile.isdir(shards) else []
        files.update(train=[f"{shards}/{name}" for name in sorted(fnmatch.filter(names, pattern))], test=files["valid"])
        options.update(num_shuffle=config.num_shuffle, seed=config.seed)
        recipe.vocab_file = config.vocab_path or f"{folder}/{LM1B_VOCAB}"
    return recipe


def take_vocab(recipe: Recipe, vocab: Vocab, extends: bool = False) -> None:
    """Has a text encoded in a vocabulary that is there already, such as a run's, by its rules.

    Raises:
        ValueError: options choose symbols, unless it `extends` the vocabulary, or tokens or documents are not those of
            the vocabulary, or the vocabulary cannot be extended.
    """
    config, chosen = recipe.options, recipe.vocab_options
    if extends:
        vocab.check_extendable()
    else:
        check_left_out({name: config.get(name) for name in ("min_freq", "max_size")}, KNOWN_SYMBOLS)
    if recipe.dataset != "lm1b":
        check_left_out({"vocab_path": recipe.vocab_file}, KNOWN_SYMBOLS)
    for name in ("level", "lower_case", "raw_text") if recipe.dataset not in PAPER_DATASETS else ("level",):
        found, known = chosen.get(name, False), getattr(vocab, name)
        if found != known:
            message = f"{name} must be {known!r}, as that of the vocabulary to use, got {found!r}"
            raise ParameterError(name, found, [known], message)
    if ("documents" in config) != (vocab.document is not None):
        has = "has" if vocab.document is not None else "has no"
        raise ValueError(
            f"documents must be {vocab.document is not None}: the vocabulary to use {has} end of a document"
        )
    recipe.vocab, recipe.vocab_options, recipe.vocab_file = vocab, vocab.get_config(), None


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
        if not inputs.exists(path):
            raise FileNotFoundError(f"there is no file {named(path)}{hint}")
    if not recipe.files["train"]:
        raise FileNotFoundError(f"there is no file {named(recipe.folder)}/{LM1B_SHARDS}{hint}")


def make_cutoffs(recipe: Recipe, vocab: Vocab) -> list[int]:
    """The given cutoffs, or else the dataset's own that lie within the vocabulary."""
    cutoffs = recipe.options["cutoffs"]
    if cutoffs is None and recipe.dataset in PAPER_DATASETS:
        return [cutoff for cutoff in PAPER_DATASETS[recipe.dataset][2] if cutoff < len(vocab)]
    if cutoffs is None:
        return choose_cutoffs(vocab)
    if cutoffs and cutoffs[-1] >= len(vocab):
        raise ValueError(f"cutoffs must be below {len(vocab)}, the size of the vocabulary, got {named(cutoffs)}")
    return cutoffs


def choose_cutoffs(vocab: Vocab) -> list[int]:
    """Cutoffs of the adaptive softmax from the counts of a built vocabulary; none below 20,000 symbols.

    The first cluster holds the most frequent tokens, which make up 90% of the text. The next two reach 95% and 99%, the
    last holds the rest. Cutoffs are whole thousands.
    """
    if len(vocab) < FEWEST_WITH_BINS:
        return []
    counts = np.cumsum([vocab.counter[symbol] for symbol in vocab.symbols])
    ends = [np.searchsorted(counts, share * counts[-1]) + 1 for share in (0.90, 0.95, 0.99)]
    return [end for end in sorted({math.ceil(end / WHOLE) * WHOLE for end in ends}) if end < len(vocab)]


def is_by_character(dataset: str | None, vocab: Vocab) -> bool:
    """Whether tokens are characters or bytes, even if spelt as words."""
    return dataset in ("enwik8", "text8") or vocab.level in ("char", "byte")


def is_by_character_in(data: dict, vocab: Vocab) -> bool:
    """`is_by_character` of a run's text, `"data"` of its `config.json`; a converted run does not say."""
    return data.get("by_character", is_by_character(data.get("dataset"), vocab))


def measured(dataset: str | None, sizes: dict[str, TextSize]) -> dict[str, TextSize]:
    """How much text the splits are. Files of enwik8 and text8 are not the text, but a list of what it is made of."""
    return {} if dataset in ("enwik8", "text8") else sizes
