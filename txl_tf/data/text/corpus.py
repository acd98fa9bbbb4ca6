"""Corpora: from text to token arrays, in memory or in a prepared folder.

`prepare` writes a folder that `load_corpus` opens; `build_corpus` keeps the tokens of a small corpus in memory. Both
usually read the text twice, to count its tokens and to encode it; to make subwords, once more, for a sample. They read
it in pieces of about a megabyte; only a piece that cannot be cut, such as a JSON array or a long line, is larger.

`prepare_texts` prepares the texts of an iterable, and `prepare_ids` prepares ids.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import json
import logging
import os
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from txl_config.data import INFO_FILE
from txl_tf.config import DATASETS, TextConfig, at_least
from txl_tf.config.checks import check_integer
from txl_tf.data.subwords import load_vocab
from txl_tf.data.text import datasets, encoding
from txl_tf.data.text.download import fetch
from txl_tf.data.text.portions import THIS_PROCESS
from txl_tf.data.text.prepared_folder import (
    VOCAB_FILE,
    check_free,
    check_same,
    check_sums,
    described_inputs,
    new_files,
    progress_bar,
    read_prepared_info,
    size_of,
    vocab_name,
    write_files,
)
from txl_tf.data.text.sizes import Extent, TextSize
from txl_tf.data.text.texts import TEXT_FIELD, folder_around, text_of_row
from txl_tf.data.text_files import Progress
from txl_tf.data.token_files import open_tokens, read_header
from txl_tf.data.vocabulary import Vocab
from txl_tf.errors import ParameterError, brief, named, shortened
from txl_tf.files import absolute, is_remote, naming_write_errors, remove

_SPOOL = "texts.jsonl"  # temporary file of `prepare_texts`
_QUICK_BYTES = 1 << 30  # of token files, whose checksums take half a second: `load_corpus` checks them by default

logger = logging.getLogger("txl_tf")


@dataclasses.dataclass
class Corpus:
    """A vocabulary and the token arrays of a text.

    Attributes:
        cutoffs: first ids of the adaptive softmax's clusters, except the first cluster; empty for a single cluster.
        splits: `"train"`, usually `"valid"` and perhaps `"test"` -> integer array `[n]`, in memory or on disk.
        by_character: whether tokens are characters or bytes.
        checksums: split -> SHA-256 of each of its token files, if they are known. With `shard_tokens`, split -> the one
            SHA-256 of the file that the shards together would make.
        sizes: split -> size of its text, if it is known.
    """

    vocab: Vocab
    cutoffs: list[int]
    splits: dict[str, Any]
    by_character: bool
    checksums: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    sizes: dict[str, TextSize] = dataclasses.field(default_factory=dict)

    @property
    def level(self) -> str:
        """What a token is, one of `LEVELS`. It is the vocabulary's level, but `"char"` for enwik8 and text8."""
        return "char" if self.by_character and self.vocab.level == "word" else self.vocab.level

    @property
    def vocabs(self) -> list[Vocab]:
        """A list of the one vocabulary, as other corpora have several."""
        return [self.vocab]

    def fingerprint(self, split: str) -> str:
        """Returns a SHA-256 that changes if the split changes.

        If the checksums of the token files are known, it is computed from them, otherwise from the tokens, which
        are all read. So the same text has one fingerprint in a prepared folder and another one in memory.
        """
        digest = hashlib.sha256()
        if split in self.checksums:
            digest.update("".join(self.checksums[split]).encode())
            return digest.hexdigest()
        tokens = self.splits[split]
        for start in range(0, len(tokens), 1 << 22):
            digest.update(np.asarray(tokens[start : start + (1 << 22)], "<i4").tobytes())
        return digest.hexdigest()


def build_corpus(
    dataset: str, data_path: Any = None, vocab: Vocab | None = None, extend_vocab: bool = False, **options: Any
) -> Corpus:
    r"""Reads a dataset, makes its vocabulary and encodes its splits, in memory.

    - `"pydoc"`: the reference manual of the running Python. Splits train, valid.
    - `"text"`: the UTF-8 file or files `data_path`, also folders, patterns, JSON lines, gzip and zip: see `find_files`
      and `read_texts`. Splits train, valid.
    - `"enwik8"`, `"text8"`, `"ptb"`, `"wt2"`, `"wt103"`: train.txt, valid.txt and test.txt in the folder
      `data_path`, by the original's rules.
    - `"lm1b"`: 1b_word_vocab.txt, valid.txt (also the test text) and the shards `LM1B_SHARDS` in the folder
      `data_path`. The sentences of each shard are shuffled.

    Without `vocab` and `vocab_path`, the vocabulary of `"pydoc"` and `"text"` comes from the whole text. Only these two
    take `level`, `valid_fraction`, `min_freq`, `max_size` and `lower_case`. Only `"lm1b"` takes `num_shuffle` and
    `seed`. Lines end with `\n`, `\r\n` or `\r`, which become `\n`, and byte order marks are left out, except with
    `raw_text` or at level `"byte"`. Level `"word"` splits text at white space and ends every line, even an empty one,
    with `<eos>`. The other levels keep white space. Level `"subword"` makes `vocab_size` pieces from the text with
    SentencePiece. Tokens that `min_freq` and `max_size` leave out become `<unk>`. With `documents`, every file, JSON
    line or row ends with `</s>`.

    Args:
        dataset: one of `DATASETS`.
        data_path: file or folder; for `"text"` also several files, as a list or separated by commas.
        vocab: vocabulary to encode the text with, instead of a new one.
        extend_vocab: whether symbols of the text that `vocab` lacks get ids after its own, by frequency. `min_freq`
            and `max_size` apply to these symbols. It needs `vocab`.
        **options: the other hyper-parameters of `TextConfig`.

    Raises:
        ParameterError: an argument or the text is wrong, or an argument would have no effect.
        FileNotFoundError: a file does not exist.
    """
    if extend_vocab and vocab is None:
        raise ParameterError("extend_vocab", extend_vocab, "False without vocab")
    recipe = datasets.make_recipe(TextConfig(dataset=dataset, data_path=data_path, **options), vocab)
    if vocab is not None:
        datasets.take_vocab(recipe, vocab, extend_vocab)
    datasets.check_files(recipe)
    vocab, counts = encoding.make_vocab(recipe)
    if extend_vocab:
        min_freq = options.get("min_freq") or 0
        known = vocab.ids
        new = [symbol for symbol, n in vocab.counter.most_common() if symbol not in known and n >= min_freq]
        vocab = vocab.extended(new[: options.get("max_size")])
    cutoffs = datasets.make_cutoffs(recipe, vocab)
    ids_of = collections.defaultdict(list)  # (split, shard) -> arrays of ids
    extents = {}
    for split, shard, ids, extent in encoding.encode(recipe, vocab, counts):
        ids_of[split, shard].append(ids)
        extents[split] = extents.get(split, Extent()) + extent
    splits = {}
    for split in dict.fromkeys(split for split, _ in ids_of):
        arrays = [ids for key in sorted(ids_of) if key[0] == split for ids in ids_of[key]]
        splits[split] = np.concatenate(arrays, dtype=np.int32)
    sizes = datasets.measured(dataset, {split: extent.size for split, extent in extents.items()})
    return Corpus(vocab, cutoffs, splits, datasets.is_by_character(dataset, vocab), sizes=sizes)


# ------------------------------------------------------------------------------------------ the prepared folder


def prepare(
    data_dir: str,
    dataset: str,
    data_path: Any = None,
    download: bool = False,
    download_url: str | None = None,
    verbose: int = 0,
    shard_tokens: int | None = None,
    workers: Any = THIS_PROCESS,
    **options: Any,
) -> Corpus:
    """Prepares a dataset in `data_dir`: corpus-info.json, the vocabulary and the token files, for `load_corpus`.

    The files appear at the end, corpus-info.json last, so after an interrupted call, no folder with a corpus-info.json
    is incomplete. A folder that was prepared with the same arguments, from files of the same names and sizes, is not
    changed.

    Args:
        data_dir: the folder, local or remote; created if it does not exist.
        dataset, data_path: as in `build_corpus`. Without `data_path`, the paper's datasets are read from `data_dir`.
        download: whether to download the public archive of a paper's dataset if its files do not exist.
        download_url: address of another folder that has the archive.
        verbose: 1 for a progress bar on a terminal, 0 for none.
        shard_tokens: largest number of tokens in a file; `None`: each split is one file, but lm1b has a file for each
            of its own shards. The fingerprint of a split does not depend on `shard_tokens`.
        workers: object that does the work, see `portions.py`; by default this process.
        **options: the other hyper-parameters of `TextConfig`.

    Raises:
        ParameterError: as `build_corpus`; or the folder was prepared with other arguments or from other files; or it is
            the folder of a run, or has a vocabulary or token files that no preparation has written.
        FileNotFoundError: a file does not exist.
        OSError: the folder cannot be written to, another process is preparing it, or the download fails.
    """
    data_dir = os.fspath(data_dir).rstrip("/")
    if dataset in datasets.PAPER_DATASETS and not data_path:
        data_path = data_dir
    config = _with_raw_text_of(data_dir, TextConfig(dataset=dataset, data_path=data_path, **options))
    if dataset == "text":
        _check_outside(data_dir, data_path)
    recipe = datasets.make_recipe(config)
    _check_shards(recipe, shard_tokens)
    if _is_prepared(data_dir, recipe, shard_tokens):
        return load_corpus(data_dir)
    if download:
        fetch(dataset, recipe.folder or data_dir, download_url)
        recipe = datasets.make_recipe(config)  # finds the downloaded files
    datasets.check_files(recipe)
    with new_files(data_dir) as folder:
        read = recipe.counted + [path for paths in recipe.files.values() for path in paths]
        progress = progress_bar(sum(size_of(path) or 0 for path in read)) if verbose and dataset != "pydoc" else None
        _write_corpus(folder, recipe, described_inputs(recipe, data_dir), shard_tokens, workers, progress)
    return load_corpus(data_dir)


def _with_raw_text_of(data_dir: str, config: TextConfig) -> TextConfig:
    """Returns `config` with the `raw_text` of the prepared folder, unless `config` has a `raw_text` of its own.

    So a folder of an earlier version, in which `raw_text` was always true, counts as prepared with the same arguments.
    If the folder is not prepared, returns `config` unchanged.
    """
    info = read_prepared_info(data_dir) if config.raw_text is None else None
    return dataclasses.replace(config, raw_text=info["vocab"].get("raw_text", True)) if info else config


def _is_prepared(data_dir: str, recipe: datasets.Recipe, shard_tokens: int | None) -> bool:
    """Whether the folder is already prepared, by this recipe.

    Raises:
        ParameterError: it was prepared by another recipe, see `check_same`; or the files do not have `shard_tokens`
            tokens each; or it must not be prepared, see `check_free`.
    """
    info = read_prepared_info(data_dir)
    if info is None:
        check_free(data_dir, recipe.vocab_options["level"])
    else:
        check_same(data_dir, info, recipe)
        if shard_tokens is not None:
            _check_sizes_of_files(data_dir, info["files"], shard_tokens)
        logger.info("%s is prepared already", data_dir)
    return info is not None


def _check_sizes_of_files(data_dir: str, files: dict[str, list[str]], shard_tokens: int) -> None:
    """Raises ParameterError if a token file of the prepared folder is not as large as `shard_tokens` makes it.

    Args:
        data_dir, shard_tokens: as in `prepare`.
        files: split -> names of its token files.
    """
    for split, names in files.items():
        sizes = [read_header(f"{data_dir}/{name}")[1] for name in names]
        if sizes != [min(shard_tokens, rest) for rest in range(sum(sizes), 0, -shard_tokens)]:
            message = (
                f"data_dir {data_dir} was prepared with another shard_tokens than {shard_tokens}: the files of {split} "
                f"have {brief(sizes)} tokens. Choose another folder"
            )
            raise ParameterError("shard_tokens", shard_tokens, "as in the folder, or left out", message)


def _check_outside(data_dir: str, data_path: Any) -> None:
    """Raises ParameterError if the prepared files in `data_dir` would be among the files of `data_path`."""
    files = [f"{data_dir}/{name}" for name in (INFO_FILE, VOCAB_FILE, "train.npy")]
    folder = data_path and folder_around(files, data_path)
    if folder:
        message = (
            f"data_dir must be outside of {folder}, because all files in it are the text of data_path, got {data_dir}"
        )
        raise ParameterError("data_dir", data_dir, f"a folder outside of {folder}", message)


def _check_shards(recipe: datasets.Recipe, shard_tokens: int | None) -> None:
    """Raises ParameterError unless `shard_tokens` is positive and the dataset has no shards of its own."""
    if shard_tokens is None:
        return
    at_least(1)("shard_tokens", shard_tokens)
    if recipe.shuffles:
        message = f"shard_tokens={shard_tokens} is not for {recipe.dataset}: each of its own shards is a file"
        raise ParameterError("shard_tokens", shard_tokens, f"left out with dataset={recipe.dataset}", message)


def _write_corpus(
    folder: str,
    recipe: datasets.Recipe,
    inputs: dict[str, Any],
    shard_tokens: int | None,
    workers: Any,
    progress: Progress | None = None,
) -> None:
    """Makes vocabulary and clusters, and writes the files of a prepared corpus to an empty folder.

    Args:
        folder: the empty folder.
        recipe: files and rules of the text.
        inputs: see `write_files`.
        shard_tokens, workers: as in `prepare`.
        progress: called with the number of bytes of each piece of the text, in the pass that counts tokens and in the
            pass that encodes them.

    Raises:
        ParameterError: the text is wrong, or a split has no token.
    """
    vocab, counts = encoding.make_vocab(recipe, workers, progress)
    cutoffs = datasets.make_cutoffs(recipe, vocab)
    pieces = encoding.encode(recipe, vocab, counts, workers, progress)
    n_tokens = write_files(folder, recipe.dataset, vocab, cutoffs, pieces, recipe.options, inputs, shard_tokens)
    for split, paths in recipe.files.items():
        if not n_tokens.get(split):
            message = f"{shortened(', '.join(paths), 300)}: the split {split} has no token"
            raise ParameterError("data_path", paths, "files with a token", message)


def prepare_texts(
    texts: Iterable | None,
    data_dir: str,
    *,
    text_field: str = TEXT_FIELD,
    documents: bool = True,
    shard_tokens: int | None = None,
    workers: Any = THIS_PROCESS,
    **options: Any,
) -> Corpus:
    """Prepares a corpus from an iterable of texts, in bounded memory. Its public name is `txl_tf.prepare`.

        dataset = datasets.load_dataset("roneneldan/TinyStories", split="train", streaming=True)   # of Hugging Face
        corpus = txl_tf.prepare(dataset, "data/stories", level="subword", vocab_size=8000)
        corpus = txl_tf.prepare(tf.data.TextLineDataset("my.txt").as_numpy_iterator(), "data/mine")

    `texts` is iterated once; until the end, a temporary file has the texts: in `data_dir`, or for a remote `data_dir`
    on this machine. If the folder was prepared before with the same options, no text is read and the folder is not
    changed: a program that is started again uses the prepared folder.

    Args:
        texts: strings, UTF-8 bytes, or dictionaries that have the text at `text_field`. `None`: the texts are the
            portions that `workers` returns, for example the blocks of a dataset of Ray.
        data_dir: as in `prepare`.
        text_field: key of the text in dictionaries.
        documents: whether each text is a document, which ends with `</s>`.
        shard_tokens, workers: as in `prepare`.
        **options: the other hyper-parameters of `TextConfig`, such as `level` and `valid_fraction`.

    Raises:
        ParameterError: an element of `texts` has no text or an empty one, unless `skip_bad_lines` skips and counts such
            elements. The error names the number of the element, from 1. Or as `prepare`.
        OSError: the folder cannot be written to, or another process is preparing it.
    """
    if not isinstance(data_dir, (str, os.PathLike)) or not os.fspath(data_dir).strip("/"):
        raise ParameterError("data_dir", data_dir, "the path of a folder")
    if texts is not None and not isinstance(texts, Iterable):
        raise ParameterError("texts", texts, "an iterable of texts")
    if isinstance(texts, (str, bytes, Mapping)):
        message = f"texts must be an iterable of texts, got one {type(texts).__name__}: put it in a list"
        raise ParameterError("texts", texts, "an iterable of texts", message)
    data_dir = os.fspath(data_dir).rstrip("/")
    config = TextConfig(dataset="text", data_path=_SPOOL, documents=documents, **options)
    recipe = datasets.make_recipe(_with_raw_text_of(data_dir, config))
    recipe.spooled = True
    if texts is not None and text_field != TEXT_FIELD:
        recipe.options["text_field"] = text_field
    if config.vocab_path is not None:
        recipe.options["vocab_path"] = absolute(config.vocab_path)
    _check_shards(recipe, shard_tokens)
    if _is_prepared(data_dir, recipe, shard_tokens):
        return load_corpus(data_dir)
    with new_files(data_dir) as folder, contextlib.ExitStack() as stack:
        if texts is not None:
            path = os.path.join(folder, _SPOOL)
            _write_texts(path, texts, text_field, recipe.skip_bad_lines)
            recipe.files = {"train": [path]}
            recipe.counted = [path]
            stack.callback(remove, path)
        _write_corpus(folder, recipe, {}, shard_tokens, workers)
    return load_corpus(data_dir)


def prepare_ids(
    ids: Mapping[str, Any],
    data_dir: str | os.PathLike,
    vocab: Vocab | None = None,
    *,
    n_token: int | None = None,
    shard_tokens: int | None = None,
) -> Corpus:
    """Prepares a folder from ids of your own. `train.py --data_dir` trains on it; all programs can read its run.

        txl_tf.prepare_ids({"train": train_ids, "valid": valid_ids}, "data/mine", n_token=512)
        # python train.py --data_dir=data/mine --model_dir=runs/mine

    Args:
        ids: `{split: ids}` for the splits train and perhaps valid and test. The ids are an array or a list of integers
            `[n]`, or an iterable of such arrays.
        data_dir: a folder without a corpus, local or remote; created if it does not exist.
        vocab: vocabulary of the ids. By default, the symbols of the ids are their numbers, so that a text is a list
            of numbers: "12 7 300".
        n_token: size of the vocabulary, without `vocab`. By default 1 more than the largest id.
        shard_tokens: as in `prepare`.

    Raises:
        ParameterError: a split or an id is wrong; or `data_dir` has a corpus, or is the folder of a run.
        OSError: the folder cannot be written to, or another process is preparing it.
    """
    data_dir = os.fspath(data_dir).rstrip("/")
    if not isinstance(ids, Mapping) or "train" not in ids or not ids.keys() <= {"train", "valid", "test"}:
        allowed = "a dictionary of the splits train, valid and test, with train"
        raise ParameterError("ids", ids, allowed, f"ids must be {allowed}, got {brief(ids)}")
    if vocab is not None and not isinstance(vocab, Vocab):
        raise ParameterError("vocab", vocab, "a Vocab")
    if vocab is not None and n_token is not None:
        raise ParameterError("n_token", n_token, "left out with vocab")
    if read_prepared_info(data_dir) is not None:
        raise ParameterError("data_dir", data_dir, "a folder that is not prepared yet")
    check_free(data_dir, vocab.level if vocab else "word")
    if n_token is not None:
        check_integer("n_token", n_token, 1)
    if shard_tokens is not None:
        check_integer("shard_tokens", shard_tokens, 1)
    arrays = {split: [_checked_ids(split, array) for array in _arrays_of(split, ids[split])] for split in ids}
    for split, parts in arrays.items():
        if sum(map(len, parts)) < 2:
            raise ParameterError("ids", split, "at least two ids in each split", f"ids has too few ids in {split}")
    largest = max(int(array.max()) for parts in arrays.values() for array in parts if array.size)
    given_size = n_token if vocab is None else len(vocab)
    size = largest + 1 if given_size is None else given_size
    if largest >= size:
        name = "n_token" if vocab is None else "vocab"
        raise ParameterError(name, size, f"more than {largest}, the largest id")
    if vocab is None:
        vocab = Vocab(level="word", special=[str(i) for i in range(size)], raw_text=False)
        vocab.build()
    pieces = ((split, 0, array, None) for split, parts in arrays.items() for array in parts)
    with new_files(data_dir) as folder:
        options = {"level": vocab.level, "own_ids": True}
        write_files(folder, "text", vocab, [], pieces, options, {}, shard_tokens)
    return load_corpus(data_dir)


def _arrays_of(split: str, ids: Any) -> Iterable:
    """Returns the arrays of a split: its only one, perhaps a list of numbers, or those of an iterable.

    Raises ParameterError if the ids are neither.
    """
    if hasattr(ids, "dtype") or (isinstance(ids, (list, tuple)) and len(ids) > 0 and np.ndim(ids[0]) == 0):
        return [ids]
    if isinstance(ids, (str, bytes)) or not isinstance(ids, Iterable):
        message = f"ids[{split!r}] must be integers [n], got {brief(ids)}"
        raise ParameterError("ids", ids, "integers [n]", message)
    return ids


def _checked_ids(split: str, array: Any) -> np.ndarray:
    """Returns an array of ids as int32. Raises ParameterError unless it has integers `[n]` from 0 to 2**31 - 1."""
    array = np.asarray(array)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        allowed = "integers [n]"
        message = f"ids[{split!r}] must be {allowed}, got {array.dtype.name} {list(array.shape)}"
        raise ParameterError("ids", array, allowed, message)
    outside = array[(array < 0) | (array >= 2**31)]
    if outside.size:
        allowed = f"from 0 to {2**31 - 1}"
        raise ParameterError("ids", array, allowed, f"ids[{split!r}] must be {allowed}, got {outside[0]}")
    return array.astype(np.int32)


def _write_texts(path: str, texts: Iterable, text_field: str, skip_bad_lines: bool) -> None:
    """Writes texts to a new local file, as JSON lines with the field `text_field`.

    Args:
        path: path of the file.
        texts, text_field: as in `prepare_texts`.
        skip_bad_lines: whether to leave out elements of `texts` without a text, and log their number.

    Raises:
        ParameterError: an element has no text, without `skip_bad_lines`; or no text was written.
    """
    skipped = []
    with open(path, "w", encoding="utf-8") as file:
        for number, value in enumerate(texts, 1):
            try:
                text = text_of_row(value, text_field, f"text {number}")
            except ValueError as error:
                if not skip_bad_lines:
                    raise
                skipped.append(str(error))
                continue
            with naming_write_errors(path):
                file.write(json.dumps({text_field: text}, ensure_ascii=False) + "\n")
        with naming_write_errors(path):
            file.flush()
    encoding.log_skipped(len(skipped), skipped[0] if skipped else None)
    if not os.path.getsize(path):
        got = f"only {len(skipped):,} element(s) without one" if skipped else "none"
        raise ParameterError("texts", 0, "at least one text", f"texts must contain at least one text, got {got}")


def load_corpus(data_dir: str, verify: bool | None = None) -> Corpus:
    """Opens a folder that `prepare` or `prepare_ids` made. Tokens stay on disk until they are read.

    Args:
        data_dir: the folder, local or remote.
        verify: whether to check the checksums of the token files, which reads all of them. `None`: only if the files
            are local and have at most a gigabyte together. The checksum of the vocabulary is always checked. Folders of
            the earliest versions have no checksums. Unless `verify` is true, they are opened with a warning.

    Raises:
        FileNotFoundError: the folder is not prepared, or a file is missing.
        ParameterError: a file is damaged, or files of the folder do not belong together; or `verify` is true, and the
            folder has no checksums.
    """
    data_dir = os.fspath(data_dir).rstrip("/")
    info = read_prepared_info(data_dir)
    if info is None:
        message = (
            f"there is no {INFO_FILE} of a prepared corpus in {named(data_dir)}: to prepare it, run\n"
            f"  python tools/prepare_data.py --dataset={{{','.join(DATASETS)}}} --data_dir={named(data_dir)}"
        )
        raise FileNotFoundError(shortened(message))
    splits = {split: open_tokens([f"{data_dir}/{name}" for name in names]) for split, names in info["files"].items()}
    for split, tokens in splits.items():
        if len(tokens) != info["n_tokens"][split]:
            n_tokens = info["n_tokens"][split]
            message = f"the split {split} of {data_dir} has {len(tokens)} tokens, but {INFO_FILE} has {n_tokens}"
            raise ParameterError("n_tokens", n_tokens, f"{len(tokens)} for {split}", message)
    if verify and "sha256" not in info:
        message = f"{data_dir}/{INFO_FILE} has no checksums to verify: prepare the corpus again to get them"
        raise ParameterError("verify", verify, "False for a folder without checksums", message)
    if verify is None:
        n_bytes = sum(len(tokens) * tokens.dtype.itemsize for tokens in splits.values())
        verify = not is_remote(data_dir) and n_bytes <= _QUICK_BYTES
    check_sums(data_dir, info, verify)  # before a damaged vocabulary is read
    vocab = load_vocab(f"{data_dir}/{vocab_name(info)}", **info["vocab"])
    if len(vocab) != info["vocab_size"]:
        path = f"{data_dir}/{vocab_name(info)}"
        message = f"{path} has {len(vocab)} symbols, but {INFO_FILE} has vocab_size {info['vocab_size']}"
        raise ParameterError("vocab_size", info["vocab_size"], f"{len(vocab)}, the symbols of {path}", message)
    sums = info.get("sha256", {})
    checksums = {split: [sums[name] for name in names] for split, names in info["files"].items()} if sums else {}
    checksums.update({split: [joined] for split, joined in info.get("joined_sha256", {}).items()})
    by_character = datasets.is_by_character(info["dataset"], vocab)
    sizes = {split: TextSize(*size) for split, size in info.get("sizes", {}).items()}
    return Corpus(vocab, info["cutoffs"][1:-1], splits, by_character, checksums, sizes)
