"""The corpus files of the original program: cache.pkl, corpus-info.json, a vocabulary."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from txl_config.data import INFO_FILE
from txl_tf.config import DATASETS
from txl_tf.convert.cache_pkl import read_cache_pkl
from txl_tf.data.subwords import load_vocab, vocab_file
from txl_tf.data.text.corpus import load_corpus
from txl_tf.data.text.datasets import PAPER_DATASETS
from txl_tf.data.text.download import LM1B_VOCAB
from txl_tf.data.text.prepared_folder import VOCAB_FILE, new_files, read_info, write_files
from txl_tf.data.vocabulary import Vocab, escape
from txl_tf.errors import ParameterError, named
from txl_tf.files import check_not_overwritten, is_remote, removed_on_error

CACHE_FILE = "cache.pkl"
# All white space of Unicode with its escapes, for `str.translate`.
WHITE_SPACE = {c: escape(chr(c)) for c in range(0x3001) if chr(c).isspace()}


@dataclasses.dataclass
class SourceCorpus:
    """The corpus that the model of a checkpoint was trained on, as far as the corpus files contain it.

    Attributes:
        path: the file that contains the vocabulary.
        dataset: name of the data set, which decides how text becomes tokens; `None` if it is not known.
        vocab: the vocabulary.
        cutoffs: `{file: cutoffs}` for the files that contain cutoffs. The cutoffs are without 0 and the size of the
            vocabulary.
        splits: `{split: int array [n]}`; empty if the files contain no tokens.
    """

    path: str
    dataset: Any  # str, or `None` if no file and no argument names it
    vocab: Vocab
    cutoffs: dict[str, list[int]]
    splits: dict[str, np.ndarray]

    def check_size(self, path: str, n_token: int) -> None:
        """Raises ParameterError unless the vocabulary has `n_token` symbols, as the model in the checkpoint `path`."""
        if len(self.vocab) != n_token:
            message = f"the vocabulary {self.path} has {len(self.vocab)} symbols, but {path} is of n_token={n_token}"
            raise ParameterError("corpus", len(self.vocab), f"a vocabulary of {n_token} symbols", message)


def vocab_of(symbols: list[str], path: str, options: dict) -> Vocab:
    """Makes a vocabulary. Escapes white space in symbols, which words of a file of Python 2 may contain.

    Args:
        symbols: the symbols in id order.
        path: the file that contains them, for error messages.
        options: the arguments of `Vocab`.
    """
    vocab = Vocab(**options)
    vocab.set_lines([symbol.translate(WHITE_SPACE) for symbol in symbols], path)
    return vocab


def read_corpus(path: str, dataset: str | None = None) -> SourceCorpus:
    """Reads the corpus files of the original or of `run_to_tf1`, or a plain vocabulary.

    Args:
        path: a cache.pkl; a vocabulary file with one word per line in id order; the folder of one of them; or the
            corpus-info.json in that folder. The corpus-info.json of the same folder is always read.
        dataset: one of `PAPER_DATASETS`, which has rules that turn text into words. Needed if no file names the dataset
            and no corpus-info.json contains the arguments of the vocabulary.

    Raises:
        ValueError, OSError: a file is missing or wrong, or two files contradict each other.
    """
    path = _vocabulary_in(os.fspath(path))
    info_path = os.path.join(os.path.dirname(path), INFO_FILE)
    info = read_info(info_path) if tf.io.gfile.exists(info_path) else {}
    cutoffs = {info_path: info["cutoffs"][1:-1]} if info else {}  # without 0 and the size of the vocabulary
    cache = read_cache_pkl(path) if path.endswith(".pkl") else None
    if cache and cache.cutoffs is not None:
        cutoffs[path] = cache.cutoffs

    dataset_by_source = {"dataset": dataset, info_path: info.get("dataset"), path: cache and cache.dataset}
    dataset_by_source = {source: name for source, name in dataset_by_source.items() if name is not None}
    known = {name for name in dataset_by_source.values() if name in DATASETS}
    if len(known) > 1:
        message = "it is not clear what dataset this is: " + ", ".join(
            f"{name} by {source}" for source, name in dataset_by_source.items()
        )
        raise ParameterError("dataset", dataset, sorted(known), message)
    dataset = next(iter(known), None)
    if dataset not in PAPER_DATASETS and "vocab" not in info:
        named_datasets = (
            f"; {', '.join(map(repr, dataset_by_source.values()))} is none of them" if dataset_by_source else ""
        )
        names = ", ".join(PAPER_DATASETS)
        message = f"dataset is needed, to tell how text becomes the words of {path}: one of {names}{named_datasets}"
        raise ParameterError("dataset", dataset, list(PAPER_DATASETS), message)
    options = info["vocab"] if "vocab" in info else dict(PAPER_DATASETS[str(dataset)].vocab_options)
    if cache and cache.lower_case is not None:
        options["lower_case"] = cache.lower_case
    vocab = vocab_of(cache.symbols, path, options) if cache else load_vocab(path, **options)
    if info.get("vocab_size", len(vocab)) != len(vocab):
        message = f"{path} has {len(vocab)} symbols, but {info_path} says vocab_size {info['vocab_size']}"
        raise ParameterError("vocab_size", info["vocab_size"], [len(vocab)], message)
    return SourceCorpus(path, dataset, vocab, cutoffs, cache.splits if cache else {})


def _vocabulary_in(path: str) -> str:
    """Returns the path of the file with the vocabulary: `path` itself, or a file of the folder that `path` stands for.

    `path` stands for a folder if it is one, or if it is the corpus-info.json in one. Raises FileNotFoundError if `path`
    does not exist, or the folder has no vocabulary.
    """
    if not tf.io.gfile.exists(path):
        raise FileNotFoundError(f"there is no corpus file or folder {named(path)}")
    is_info = os.path.basename(path) == INFO_FILE
    if not is_info and not tf.io.gfile.isdir(path):
        return path
    folder = os.path.dirname(path) if is_info else path
    names = (CACHE_FILE, VOCAB_FILE, LM1B_VOCAB, vocab_file("vocab", "subword"))
    for name in names:
        if tf.io.gfile.exists(os.path.join(folder, name)):
            return os.path.join(folder, name)
    hint = f". {INFO_FILE} has no words" if is_info else ""
    raise FileNotFoundError(f"there is no vocabulary in {named(folder or '.')}: none of {', '.join(names)}{hint}")


@contextlib.contextmanager
def written_corpus(
    data_dir: str | None, source: SourceCorpus, cutoffs: list[int], was_killed: bool = False
) -> Iterator[dict]:
    """Writes the tokens and the vocabulary to a folder. Yields the value of `"data"` for the new run's `config.json`.

    An error, also one in the block, leaves the folder as it was. Without `data_dir`, nothing is written.

    Args:
        data_dir: the folder; `None` to write nothing.
        source: contains the tokens and the vocabulary.
        cutoffs: the cutoffs of the model.
        was_killed: whether an earlier process of the same conversion was killed. Then the folder may already contain
            the same files, which are used.

    Raises:
        ParameterError: there are no tokens for `data_dir`, or it cannot take them, see `_check_new_corpus`.
        OSError: the folder cannot be written to.
    """
    data = {"dataset": source.dataset, "data_path": None, "level": source.vocab.level, "cutoffs": cutoffs}
    if not data_dir:
        yield data
        return
    if was_killed and _is_written(data_dir, source):
        yield {**data, "data_dir": os.fspath(data_dir)}
        return
    _check_new_corpus(data_dir, source)
    with removed_on_error(data_dir), new_files(data_dir) as folder:
        pieces = ((split, 0, ids) for split, ids in source.splits.items())
        write_files(folder, source.dataset, source.vocab, cutoffs, pieces, options={"cutoffs": None}, inputs={})
        load_corpus(folder)  # raises if a file is wrong
        yield {**data, "data_dir": os.fspath(data_dir)}


def _is_written(data_dir: str, source: SourceCorpus) -> bool:
    """Whether a folder already contains a prepared corpus with the vocabulary and the tokens of a source."""
    if not os.path.exists(os.path.join(data_dir, INFO_FILE)):
        return False
    corpus = load_corpus(data_dir)
    return corpus.vocab.get_data() == source.vocab.get_data() and all(
        split in corpus.splits and np.array_equal(corpus.splits[split][:], ids) for split, ids in source.splits.items()
    )


def _check_new_corpus(data_dir: str, source: SourceCorpus) -> None:
    """Raises ParameterError if the tokens of a source cannot be written to a folder.

    They cannot be written if there are none, or if an id is not in the vocabulary. The folder must be local, and must
    contain neither a prepared corpus nor another vocabulary. It may be the folder of the corpus files themselves.
    """
    if not source.splits:
        message = f"{source.path} has no tokens to write to data_dir {data_dir}"
        raise ParameterError("data_dir", data_dir, "left out for a corpus without tokens", message)
    info_path = os.path.join(data_dir, INFO_FILE)
    if is_remote(data_dir) or (os.path.exists(info_path) and "format" in read_info(info_path)):
        raise ParameterError(
            "data_dir", data_dir, "a local folder without a prepared corpus",
            f"data_dir must be a local folder without a prepared corpus, got {data_dir}",
        )  # fmt: skip
    for split, ids in source.splits.items():
        wrong = ids[(ids < 0) | (ids >= len(source.vocab))]
        if wrong.size:
            allowed = f"ids of its {len(source.vocab)} symbols"
            message = f"{source.path}: the tokens of {split} must be {allowed}, got {wrong[0]}"
            raise ParameterError(split, int(wrong[0]), allowed, message)
    check_not_overwritten(os.path.join(data_dir, VOCAB_FILE), source.vocab.get_data())
