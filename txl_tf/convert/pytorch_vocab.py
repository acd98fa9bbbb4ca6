"""Vocabularies of PyTorch programs: Hugging Face's tokenizer, cache.pt, and the vocabulary in NVIDIA's checkpoints."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from txl_config.data import INFO_FILE
from txl_tf.convert.corpus_files import SourceCorpus, read_corpus, vocab_of
from txl_tf.convert.pickles import FileError, Named, is_text, items_with_text_keys, shown, text, texts_of
from txl_tf.convert.tensors import Tensor
from txl_tf.convert.torch_file import read_torch_file
from txl_tf.data.text.datasets import PAPER_DATASETS, SPLITS
from txl_tf.data.text.prepared_folder import VOCAB_FILE
from txl_tf.data.vocabulary import Vocab
from txl_tf.errors import ParameterError

FILES = ("vocab.pkl", "vocab.bin", "cache.pt", "cache.pkl", INFO_FILE, VOCAB_FILE)


def vocabulary_in(folder: str) -> str | None:
    """The path of the vocabulary file in a folder, the first of `FILES`; `None` if there is none."""
    paths = [os.path.join(folder, name) for name in FILES]
    return next(filter(os.path.isfile, paths), None)


def read_vocabulary(path: str, dataset: str | None = None) -> tuple[SourceCorpus, list[str]]:
    """Reads the vocabulary of a PyTorch program or of the original program, and the tokens if the file has them.

    Args:
        path: vocab.pkl, vocab.bin, cache.pt, a corpus file of the original, a list of words, or the folder of one.
        dataset: one of `PAPER_DATASETS`. If it is `None` and no file names it, the symbols decide how text becomes
            words; a corpus file of the original may need it, see `read_corpus`.

    Returns:
        `(source, notes)`: the vocabulary and the tokens, and sentences about what was changed or assumed.

    Raises:
        ValueError, OSError: a file is missing or wrong.
    """
    path = os.fspath(path)
    if os.path.isdir(path):
        file = vocabulary_in(path)
        if file is None:
            raise FileNotFoundError(f"there is no vocabulary in {path}: none of {', '.join(FILES)}")
        path = file
    name = os.path.basename(path)
    info_file = os.path.join(os.path.dirname(path), INFO_FILE)
    if path.endswith((".pkl", ".bin", ".pt")) and name != "cache.pkl":
        return vocabulary_of(read_torch_file(path), path, dataset)
    if name in ("cache.pkl", INFO_FILE) or os.path.isfile(info_file):
        return read_corpus(path, dataset), []
    options, note = _vocab_options(Vocab.load(path).symbols, dataset, {})
    return SourceCorpus(path, dataset, Vocab.load(path, **options), {}, {}), [note] if note else []


def vocabulary_of(
    content: Any, path: str, dataset: str | None = None, in_file: Any = None
) -> tuple[SourceCorpus, list]:  # fmt: skip
    """The vocabulary, and the tokens if there are any, in the content of a file.

    Args:
        content: the content of the file `path`: a `Vocab`, its `__dict__`, or a `Corpus` or dictionary that has one.
        in_file: the name of the dataset, if it is in another part of the file than `content`.

    For the other arguments, the result and the errors, see `read_vocabulary`.
    """
    corpus = _attributes(content)
    inner = _attributes(corpus.get("vocab"))
    vocab = inner if "idx2sym" in inner else corpus
    if "idx2sym" not in vocab:
        kind = f"a {shown(content.name)}" if isinstance(content, Named) else shown(content)
        message = (
            f"{path} contains no list of words (idx2sym), but {kind}. A vocabulary of subwords (NVIDIA's --vocab=bpe) "
            "is not supported"
        )
        raise FileError("path", path, "a vocabulary of words", message)
    try:
        symbols = texts_of(vocab["idx2sym"])
    except ValueError as error:
        raise FileError("path", path, "a vocabulary of words", f"{path} is no vocabulary: {error}") from None
    symbols, n_repaired = repaired(symbols)
    wrong = next((symbol for symbol in symbols if not symbol or not _is_unicode(symbol)), None)
    if wrong is not None:
        raise FileError("path", path, "a vocabulary of words", f"{path} is no vocabulary: {shown(wrong)} is no word")
    notes = [f"{n_repaired} words of {path} were UTF-8 read as latin1: repaired"] if n_repaired else []
    dataset = _agreed_dataset(dataset, corpus.get("dataset", in_file), path)
    options, note = _vocab_options(symbols, dataset, vocab)
    splits = {split: _tokens(corpus.get(split), path) for split in SPLITS}
    splits = {split: tokens for split, tokens in splits.items() if tokens is not None}
    return SourceCorpus(path, dataset, vocab_of(symbols, path, options), {}, splits), [*notes, note] if note else notes


def _attributes(value: Any) -> dict[str, Any]:
    """The attributes of a pickled object, or the items of a dictionary by their text keys; `{}` for anything else."""
    if isinstance(value, Named):
        return value.attributes
    return items_with_text_keys(value)


def _is_unicode(symbol: str) -> bool:
    """Whether a symbol can be written to a file. Half of a surrogate pair cannot."""
    return not any("\ud800" <= character <= "\udfff" for character in symbol)


def _agreed_dataset(given: str | None, in_file: Any, path: str) -> str | None:
    """Returns the dataset: the given one, else the one that the file `path` names, else `None`.

    Names in a file that are not in `PAPER_DATASETS` are ignored. Raises ParameterError if both are known and differ.
    """
    in_file = text(in_file) if is_text(in_file) and text(in_file) in PAPER_DATASETS else None
    if given and in_file and given != in_file:
        raise ParameterError("dataset", given, [in_file], f"dataset is {given}, but {path} says {in_file}")
    return given or in_file


def repaired(symbols: list[str]) -> tuple[list[str], int]:
    """Repairs words whose UTF-8 was decoded as latin1. Returns all symbols and the number of repaired words.

    Hugging Face's vocabulary has this mistake. Words are repaired only if the mistake is certain: every symbol, encoded
    as latin1, is UTF-8, and no two symbols become equal. Otherwise no symbol is changed.
    """
    try:
        better = [symbol.encode("latin1").decode("utf-8") for symbol in symbols]
    except UnicodeError:
        return symbols, 0
    if len(set(better)) < len(symbols):
        return symbols, 0
    return better, sum(before != after for before, after in zip(symbols, better, strict=True))


def _vocab_options(symbols: list[str], dataset: str | None, stored: dict) -> tuple[dict, str | None]:
    """Returns `(options, note)`: the arguments of `Vocab` for symbols that are words, and a sentence for the user.

    `note` is `None` if the dataset is known. `stored` are the attributes of the vocabulary in the file. If they contain
    `lower_case`, it replaces the `lower_case` of the dataset.
    """
    note = None
    if dataset is not None:
        options = dict(PAPER_DATASETS[dataset].vocab_options)
    else:
        known = set(symbols)
        eos = next((symbol for symbol in ("<eos>", "<S>") if symbol in known), None)
        unk = next((symbol for symbol in ("<unk>", "<UNK>") if symbol in known), None)
        options = {"level": "word", "eos": eos, "unk": unk, "bos": eos if eos == "<S>" else None}
        options["special"] = [eos] if eos == "<eos>" else []
        note = f"no dataset is known: a line ends in {eos}, and unknown words are {unk}, as the vocabulary has them"
    lower_case = stored.get("lower_case")
    return options | ({"lower_case": lower_case} if type(lower_case) is bool else {}), note


def _tokens(split: Any, path: str) -> np.ndarray | None:
    """Returns the tokens of a split in the file `path`, int64 `[n]`, or `None` if the file does not contain them.

    A split is a tensor or, in lm1b, a list of tensors. The training split of lm1b is a list of file names: `None`.

    Raises:
        FileError: the tokens are not int64 `[n]`, or more than the file has bytes.
    """
    pieces = [split] if isinstance(split, Tensor) else split
    if type(pieces) is not list or not pieces or not all(isinstance(piece, Tensor) for piece in pieces):
        return None
    wrong = [piece for piece in pieces if piece.dtype != "int64" or len(piece.shape) != 1]
    if wrong or sum(piece.size for piece in pieces) > os.path.getsize(path):
        got = f"{wrong[0].dtype} {list(wrong[0].shape)}" if wrong else "more of them than the file has bytes"
        raise FileError("path", path, "tokens that are int64 [n]", f"tokens of {path} must be int64 [n], got {got}")
    return np.concatenate([piece.array() for piece in pieces])
