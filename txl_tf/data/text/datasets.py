"""Datasets: a `Recipe` says which files a dataset has, and how text becomes tokens. `encoding.py` does the work."""

from __future__ import annotations

import dataclasses
import fnmatch
import math
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from txl_tf.config import DATASETS, TextConfig, one_of
from txl_tf.data import inputs
from txl_tf.data.subwords import END, SUBWORDS, empty_vocab
from txl_tf.data.text.download import LM1B_SHARDS, LM1B_VOCAB, SPLITS
from txl_tf.data.text.parquet import Rows, table_rows
from txl_tf.data.text.sizes import TextSize
from txl_tf.data.text.texts import FilePart, Text, find_files, have_documents, read_texts, texts_of_rows
from txl_tf.data.text_files import Progress, pydoc_text
from txl_tf.data.vocabulary import KNOWN_SYMBOLS, Vocab
from txl_tf.errors import ParameterError, brief, named
from txl_tf.schema import check_left_out

PYDOC = "pydoc_data.topics"
FEWEST_WITH_BINS = 20_000  # smallest vocabulary that gets cutoffs by default
WHOLE = 1000  # default cutoffs are multiples of it

UNK = "<unk>"
_WORDS = {"level": "word", "special": ["<eos>"], "eos": "<eos>", "unk": UNK}
# Options that the datasets of the paper do not use.
_OWN_TEXT = (
    "level", "valid_fraction", "vocab_size", "subword_type", "documents", "text_field", "min_freq", "max_size",
    "lower_case", "skip_bad_lines",
)  # fmt: skip


class PaperDataset(NamedTuple):
    """What the original program does with a dataset."""

    vocab_options: dict[str, Any]  # arguments of `Vocab`
    counted_splits: tuple[str, ...]  # the splits whose words are counted
    cutoffs: list[int]


# The datasets of the paper, each a folder of train.txt, valid.txt and test.txt. The files of enwik8 have the values of
# bytes as numbers, those of text8 have letters, and _ for a space. White space separates these, so they are words for
# `Vocab`. lm1b has a vocabulary file, its training text is in shards, and valid.txt is also its test text.
PAPER_DATASETS = {
    "enwik8": PaperDataset({"level": "word", "lower_case": True}, SPLITS, []),
    "text8": PaperDataset({"level": "word", "lower_case": True}, SPLITS, []),
    "ptb": PaperDataset({**_WORDS, "lower_case": True}, SPLITS, []),
    "wt2": PaperDataset(_WORDS, SPLITS, []),
    "wt103": PaperDataset(_WORDS, ("train",), [20000, 40000, 200000]),
    "lm1b": PaperDataset({"level": "word", "bos": "<S>", "eos": "<S>", "unk": "<UNK>"}, (), [60000, 100000, 640000]),
}
_CHARACTERS = ("enwik8", "text8")  # datasets of words that are characters


@dataclasses.dataclass
class Recipe:
    """The files of a dataset, and how they become tokens.

    Attributes:
        dataset: name of the dataset, one of `DATASETS`.
        vocab_options: arguments of `Vocab`.
        files: split -> its text files.
        counted: text files whose tokens are counted.
        options: the hyper-parameters that decide the result, for corpus-info.json. Only lm1b has `"num_shuffle"` and
            `"seed"`; only `"pydoc"` and `"text"` have `"valid_fraction"`.
        folder: folder of a dataset of the paper; otherwise `None`.
        vocab_file: file of the vocabulary; `None` if its tokens come from the text or `vocab` is given.
        vocab: an existing vocabulary, or `None`.
        raw_text: see `read_texts`.
        skip_bad_lines: whether rows without a text are left out.
        spooled: whether the only file contains the texts of `prepare_texts`, each in a JSON line.
    """

    dataset: str
    vocab_options: dict[str, Any]
    files: dict[str, list[str]]
    counted: list[str]
    options: dict[str, Any]
    folder: str | None = None
    vocab_file: str | None = None
    vocab: Vocab | None = None
    raw_text: bool = True
    skip_bad_lines: bool = False
    spooled: bool = False

    @property
    def shuffles(self) -> int:
        """In how many random orders the training shards are written; 0 for datasets that keep their order."""
        return self.options.get("num_shuffle", 0)

    @property
    def valid_fraction(self) -> float | None:
        """The fraction of train that becomes valid; `None` if the dataset has a file for it."""
        return self.options.get("valid_fraction")

    def read(
        self,
        portion: list[FilePart] | Rows,
        progress: Progress | None = None,
        numbered: bool = True,
        skipped: Callable[[str], None] | None = None,
    ) -> Iterator[Text]:
        """Yields the texts of a portion.

        Args:
            portion: see portions.py.
            progress, numbered: see `read_texts`.
            skipped: with `skip_bad_lines`, called with the reason for each row that is left out.
        """
        if self.dataset == "pydoc":
            return iter([Text(PYDOC, [pydoc_text()])])
        # With `bos`, a piece must not end within a line, because `bos` and `eos` mark the ends of whole lines.
        level = "line" if self.vocab_options.get("bos") else self.vocab_options["level"]
        skipped = (skipped or _ignore) if self.skip_bad_lines else None  # `None` makes such a row an error
        rows = {"raw_text": self.raw_text, "skipped": skipped}
        if isinstance(portion, Rows):
            return texts_of_rows(table_rows(portion), level, portion.field, **rows)
        advice = "level='byte' reads any file" if self.dataset == "text" and self.vocab is None else ""
        texts = read_texts(portion, level, self.options.get("text_field"), progress, numbered, advice=advice, **rows)
        if self.spooled:  # "texts.jsonl, line 3" becomes "text 3"
            return (text._replace(name=f"text {text.name.rpartition(' ')[2]}") for text in texts)
        return texts


def _ignore(reason: str) -> None:
    """Does nothing about a row that is left out. Only the pass that counts tokens reports such rows, see `count`."""


def make_recipe(config: TextConfig, vocab: Vocab | None = None) -> Recipe:
    """Checks the options for a text, and decides how it becomes tokens. Reads only the beginnings of the files.

    Args:
        config: the options.
        vocab: an existing vocabulary that `take_vocab` will give to the recipe.

    Raises:
        ParameterError: an option is wrong or has no effect, or options do not go together.
        FileNotFoundError: a pattern or a folder of `data_path` has no file.
    """
    one_of(DATASETS)("dataset", config.dataset)
    dataset = str(config.dataset)
    for error in unused_options(config, vocab).values():
        raise error
    if dataset in PAPER_DATASETS:
        return _paper_recipe(config, dataset)
    _check_options(config)
    if dataset == "pydoc":
        paths = [PYDOC]
    elif config.data_path:
        paths = find_files(config.data_path)
    else:
        message = "dataset 'text' needs data_path: a UTF-8 text file, or several separated by commas"
        raise ParameterError("data_path", config.data_path, "the path of a text", message)
    raw_text = bool(config.raw_text)
    has_rows = config.text_field is not None or (dataset == "text" and have_documents(paths, raw_text))
    if config.skip_bad_lines and not has_rows:
        why = "it skips rows of JSON lines, JSON arrays and Parquet, and the text has no such rows"
        check_left_out({"skip_bad_lines": True}, why)
    documents = has_rows if config.documents is None else config.documents
    vocab_options = _vocab_options(config, documents)
    empty_vocab(**vocab_options)  # checks the options
    return Recipe(
        dataset,
        vocab_options,
        {"train": paths},
        paths,
        _recorded_options(config, documents),
        vocab_file=config.vocab_path,
        raw_text=raw_text,
        skip_bad_lines=config.skip_bad_lines,
    )


_OF_SYMBOLS = ("level", "lower_case", "min_freq", "max_size")  # options that decide which symbols the text has


def _vocab_options(config: TextConfig, documents: bool) -> dict[str, Any]:
    """The arguments of `Vocab` for a text of one's own; with `documents`, the vocabulary has their end."""
    if config.level == "subword":
        options: dict[str, Any] = {"level": "subword"}
    else:
        options = {name: getattr(config, name) for name in _OF_SYMBOLS}
    if config.level == "word":
        options |= {"special": ["<eos>", UNK], "eos": "<eos>", "unk": UNK}
    elif config.min_freq > 1 or config.max_size is not None:
        options |= {"special": [UNK], "unk": UNK}
    if documents:
        options["document"] = END
    return options | {"raw_text": bool(config.raw_text)}


def _recorded_options(config: TextConfig, documents: bool) -> dict[str, Any]:
    """The options of a text of one's own that decide the result, for corpus-info.json."""
    options: dict[str, Any] = {
        **{name: getattr(config, name) for name in _OF_SYMBOLS},
        "valid_fraction": config.valid_fraction,
        "cutoffs": config.cutoffs and list(config.cutoffs),
    }
    if config.text_field is not None:
        options["text_field"] = config.text_field
    if documents:
        options["documents"] = True
    if config.skip_bad_lines:
        options["skip_bad_lines"] = True
    if config.level == "subword":
        options |= {"vocab_size": config.vocab_size or SUBWORDS, "subword_type": config.subword_type}
    return options


def unused_options(config: TextConfig, vocab: Vocab | None = None) -> dict[str, ParameterError]:
    """Returns `{name: error}` of the options that differ from their defaults and would have no effect.

    Args:
        config: the options, with a dataset.
        vocab: an existing vocabulary for the text, or `None`. A dataset of the paper may repeat its `level` and
            `lower_case`.
    """
    dataset = config.dataset
    errors = {}

    def add(names: Iterable[str], purpose: str, why: str, allowed: str) -> None:
        """Adds the errors of those of the options that are given: "name is for purpose, got value why"."""
        for name in names:
            value = getattr(config, name)
            repeats = vocab is not None and name in ("level", "lower_case") and value == getattr(vocab, name)
            if value != getattr(TextConfig, name) and not repeats:
                message = f"{name} is for {purpose}, got {brief(value)}{why}"
                errors[name] = ParameterError(name, value, allowed, message)

    if dataset in PAPER_DATASETS:
        # False for `documents` and True for `raw_text` describe these datasets, so they may be given.
        own = [name for name in _OWN_TEXT if name != "documents" or config.documents]
        own += ["raw_text"] if config.raw_text is False else []
        why = (
            f": dataset {brief(dataset)} has the original's tokens; dataset 'text' with data_path reads its files like "
            "any others"
        )
        add(own, "your own text", why, f"left out with dataset={dataset}")
    elif config.level != "subword":
        why = f" and level {brief(config.level)}"
        add(["subword_type"], "level 'subword'", why, f"left out at level {config.level}")
    elif config.vocab_path:  # `_check_options` refuses `vocab_size`
        why = f": vocab_path={named(config.vocab_path)} has them already"
        add(["subword_type"], "making subwords", why, "left out with vocab_path")
    elif vocab is not None:
        why = ": the given vocabulary has them already"
        add(["subword_type", "vocab_size"], "making subwords", why, "left out with a given vocabulary")
    if dataset != "lm1b":
        why = f" and dataset {brief(dataset)}"
        add(["num_shuffle", "seed"], "dataset 'lm1b'", why, "left out without dataset=lm1b")
    return errors


def _check_options(config: TextConfig) -> None:
    """Raises ParameterError if options for the datasets `"pydoc"` and `"text"` do not go together."""
    if config.dataset == "pydoc" and config.data_path:
        message = (
            f"dataset 'pydoc' is Python's own manual and reads no data_path, got {named(config.data_path)}: "
            "leave dataset out, or give dataset=text, for a text of your own"
        )
        raise ParameterError("data_path", config.data_path, "left out with dataset=pydoc", message)
    if config.vocab_path and (config.min_freq or config.max_size is not None or config.vocab_size):
        message = (
            f"min_freq, max_size and vocab_size choose symbols, but vocab_path={named(config.vocab_path)} has them "
            "already"
        )
        allowed = "left out with min_freq, max_size or vocab_size"
        raise ParameterError("vocab_path", config.vocab_path, allowed, message)
    not_for_subwords = {
        "lower_case": "subwords keep capitals",
        "min_freq": "vocab_size sets the size of the vocabulary",
        "max_size": "vocab_size sets the size of the vocabulary",
    }
    given_names = [name for name in not_for_subwords if getattr(config, name)]
    if config.level == "subword" and given_names:
        name = given_names[0]
        value = getattr(config, name)
        message = f"{name} is not for level 'subword', got {brief(value)}: {not_for_subwords[name]}"
        raise ParameterError(name, value, "left out at level subword", message)
    if config.level != "subword" and config.vocab_size is not None:
        message = (
            f"vocab_size={config.vocab_size} needs level 'subword', got {brief(config.level)}: max_size limits other "
            "symbols"
        )
        raise ParameterError("vocab_size", config.vocab_size, f"left out at level {config.level}", message)


def _paper_recipe(config: TextConfig, dataset: str) -> Recipe:
    """Returns the recipe of a dataset of the paper, whose files are in the folder `data_path`.

    Raises:
        ParameterError: `data_path` is not one folder.
    """
    data_path = config.data_path
    original = PAPER_DATASETS[dataset]
    folders = [data_path] if isinstance(data_path, (str, os.PathLike)) else list(data_path or [])
    if len(folders) != 1 or not folders[0]:
        got = f", got {brief(data_path)}" if data_path else ""
        allowed = "a folder of train.txt, valid.txt, test.txt"
        message = f"dataset {brief(dataset)} needs data_path: {allowed}{got}"
        raise ParameterError("data_path", data_path, allowed, message)
    folder = os.fspath(folders[0]).rstrip("/")
    files = {split: [f"{folder}/{split}.txt"] for split in SPLITS}
    counted = [files[split][0] for split in original.counted_splits]
    options: dict[str, Any] = {"cutoffs": config.cutoffs and list(config.cutoffs)}
    recipe = Recipe(dataset, original.vocab_options, files, counted, options, folder, config.vocab_path)
    if dataset == "lm1b":
        shards, pattern = os.path.split(f"{folder}/{LM1B_SHARDS}")
        names = tf.io.gfile.listdir(shards) if tf.io.gfile.isdir(shards) else []
        files.update(train=[f"{shards}/{name}" for name in sorted(fnmatch.filter(names, pattern))], test=files["valid"])
        options.update(num_shuffle=config.num_shuffle, seed=config.seed)
        recipe.vocab_file = config.vocab_path or f"{folder}/{LM1B_VOCAB}"
    return recipe


def take_vocab(recipe: Recipe, vocab: Vocab, extends: bool = False) -> None:
    """Makes a recipe use an existing vocabulary, such as the vocabulary of a run, and its `vocab_options`.

    Args:
        recipe: is changed.
        vocab: the vocabulary.
        extends: whether the text will extend the vocabulary. Then options may choose the new symbols.

    Raises:
        ParameterError: an option chooses symbols, without `extends`; or the recipe has another level, `lower_case`,
            `raw_text` or `documents` than the vocabulary; or the vocabulary cannot be extended.
    """
    options = recipe.options
    if extends:
        vocab.check_extendable()
    else:
        check_left_out({name: options.get(name) for name in ("min_freq", "max_size")}, KNOWN_SYMBOLS)
    if recipe.dataset != "lm1b":
        check_left_out({"vocab_path": recipe.vocab_file}, KNOWN_SYMBOLS)
    for name in ("level", "lower_case", "raw_text") if recipe.dataset not in PAPER_DATASETS else ("level",):
        value = recipe.vocab_options.get(name, False)
        known = getattr(vocab, name)
        if value != known:
            message = f"{name} must be {known!r}, as in the given vocabulary, got {value!r}"
            raise ParameterError(name, value, [known], message)
    has_end = vocab.document is not None
    if ("documents" in options) != has_end:
        has = "has a" if has_end else "has no"
        message = f"documents must be {has_end}: the given vocabulary {has} token for the end of a document"
        raise ParameterError("documents", not has_end, [has_end], message)
    recipe.vocab = vocab
    recipe.vocab_options = vocab.get_config()
    recipe.vocab_file = None


def all_files(recipe: Recipe) -> list[str]:
    """Returns the files that a recipe reads, each once."""
    paths = dict.fromkeys(path for paths in recipe.files.values() for path in paths)
    return [*paths, *([recipe.vocab_file] if recipe.vocab_file else [])]


def check_files(recipe: Recipe) -> None:
    """Raises FileNotFoundError if a file of the recipe does not exist, or if lm1b has no shards."""
    if recipe.dataset == "pydoc":
        return
    hint = f". Dataset {recipe.dataset!r} needs it; tools/prepare_data.py --download fetches the public archive"
    hint = hint if recipe.dataset in PAPER_DATASETS else ""
    folder = recipe.folder
    if folder and inputs.exists(folder) and not inputs.is_folder(folder):
        hint = f". Dataset {recipe.dataset!r} is a folder of files; dataset 'text' reads {named(folder)} itself"
    for path in all_files(recipe):
        if not inputs.exists(path):
            hint = ". The standard input is the file /dev/stdin" if path == "-" else hint
            raise FileNotFoundError(f"there is no file {named(path)}{hint}")
    if not recipe.files["train"]:
        raise FileNotFoundError(f"there is no file {named(recipe.folder)}/{LM1B_SHARDS}{hint}")


def make_cutoffs(recipe: Recipe, vocab: Vocab) -> list[int]:
    """Returns the cutoffs of the adaptive softmax: the option's, or the dataset's, or those of `choose_cutoffs`.

    A cutoff of a paper's dataset is left out if it is not an id of the vocabulary.

    Raises:
        ParameterError: the given cutoffs are not ids of the vocabulary.
    """
    cutoffs = recipe.options["cutoffs"]
    if cutoffs is None and recipe.dataset in PAPER_DATASETS:
        return [cutoff for cutoff in PAPER_DATASETS[recipe.dataset].cutoffs if cutoff < len(vocab)]
    if cutoffs is None:
        return choose_cutoffs(vocab)
    if cutoffs and cutoffs[-1] >= len(vocab):
        allowed = f"below {len(vocab)}, the size of the vocabulary"
        raise ParameterError("cutoffs", cutoffs, allowed, f"cutoffs must be {allowed}, got {named(cutoffs)}")
    return cutoffs


def choose_cutoffs(vocab: Vocab) -> list[int]:
    """Chooses cutoffs of the adaptive softmax by the counts of a vocabulary; none for fewer than 20,000 symbols.

    The first cluster has the most frequent symbols, whose tokens are 90% of the text. The first two clusters together
    have 95% of the text, the first three 99%, and the last cluster has all other symbols. Cutoffs are rounded up to
    multiples of 1000, so there may be fewer clusters.
    """
    if len(vocab) < FEWEST_WITH_BINS:
        return []
    counts = np.cumsum([vocab.counter[symbol] for symbol in vocab.symbols])
    ends = [np.searchsorted(counts, share * counts[-1]) + 1 for share in (0.90, 0.95, 0.99)]
    return [end for end in sorted({math.ceil(end / WHOLE) * WHOLE for end in ends}) if end < len(vocab)]


def token_level(dataset: str | None, level: str) -> str:
    """Returns what a token is: `level`, the vocabulary's, except in enwik8 and text8, whose words are characters."""
    return "char" if dataset in _CHARACTERS else level


def is_by_character(dataset: str | None, vocab: Vocab) -> bool:
    """Whether tokens are characters or bytes."""
    return token_level(dataset, vocab.level) in ("char", "byte")


def is_by_character_in(data: dict[str, Any], vocab: Vocab) -> bool:
    """Whether the tokens of a run are characters or bytes, by the `"data"` in its `config.json`.

    The `config.json` of a converted run does not record this: then the dataset and the vocabulary decide.
    """
    return data.get("by_character", is_by_character(data.get("dataset"), vocab))


def measured(dataset: str | None, sizes: dict[str, TextSize]) -> dict[str, TextSize]:
    """Returns `sizes`; for enwik8 and text8 an empty dictionary, because their files are lists of bytes, not text."""
    return {} if dataset in _CHARACTERS else sizes
