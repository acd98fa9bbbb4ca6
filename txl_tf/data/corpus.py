"""Corpora: from text to token arrays, in memory or in a prepared folder.

`prepare` writes a folder that `load_corpus` opens; `build_corpus` keeps a small corpus in memory. Both read the text
twice, to count its symbols and to encode it, and hold about a megabyte of it at a time.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import logging
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from txl_tf.config import DATASETS, TextConfig
from txl_tf.data import datasets
from txl_tf.data.corpus_info import FORMAT, INFO_FILE, VOCAB_FILE, check_sums, read_prepared_info
from txl_tf.data.download import fetch
from txl_tf.data.text_files import pydoc_text
from txl_tf.data.token_files import TokenWriter, open_tokens
from txl_tf.data.vocabulary import Vocab
from txl_tf.files import is_remote, lock, sha256, write_json

_QUICK_BYTES = 1 << 30  # of token files, whose checksums take half a second

logger = logging.getLogger("txl_tf")


@dataclasses.dataclass
class Corpus:
    """A vocabulary and the token arrays of a text.

    Attributes:
        cutoffs: first ids of the adaptive softmax's bins, without 0 and `len(vocab)`.
        splits: `"train"`, `"valid"` and perhaps `"test"` -> integer array `[n]`, in memory or on disk.
        by_character: whether tokens are characters or bytes, not words.
        checksums: `{split: list of the SHA-256 of its token files}`, where they are known.
    """

    vocab: Vocab
    cutoffs: list[int]
    splits: dict
    by_character: bool
    checksums: dict = dataclasses.field(default_factory=dict)

    @property
    def vocabs(self) -> list[Vocab]:
        return [self.vocab]

    def fingerprint(self, split: str) -> str:
        """A SHA-256 that tells whether a split has changed. A prepared folder and the text itself have different ones.

        It takes no time where checksums are known. Otherwise it reads all tokens.
        """
        digest = hashlib.sha256()
        if split in self.checksums:
            digest.update("".join(self.checksums[split]).encode())
            return digest.hexdigest()
        tokens = self.splits[split]
        for start in range(0, len(tokens), 1 << 22):
            digest.update(np.asarray(tokens[start : start + (1 << 22)], "<i4").tobytes())
        return digest.hexdigest()


def build_corpus(dataset: str, data_path: Any = None, **options) -> Corpus:
    r"""Reads a dataset, makes its vocabulary and encodes its splits, all in memory.

    - `"pydoc"`: the reference manual of the running Python. Splits train, valid.
    - `"text"`: the UTF-8 file or files `data_path`. Splits train, valid.
    - `"enwik8"`, `"text8"`, `"ptb"`, `"wt2"`, `"wt103"`: train.txt, valid.txt and test.txt in the folder
      `data_path`, by the original's rules.
    - `"lm1b"`: 1b_word_vocab.txt, valid.txt (also the test text) and the shards `LM1B_SHARDS` in the folder
      `data_path`. The sentences of each shard are shuffled.

    The first two take their vocabulary from the whole text and follow `level`, `valid_fraction`, `min_freq`,
    `max_size` and `lower_case`. Level `"word"` splits text at white space, which includes `\r`, and ends every
    line, empty ones too, with `<eos>`. Levels `"char"` and `"byte"` keep every character, `\r` too. Symbols that
    `min_freq` and `max_size` leave out become `<unk>`.

    Args:
        dataset: one of `DATASETS`.
        data_path: file or folder; for `"text"` also several files, as a list or separated by commas.
        **options: the other hyper-parameters of `TextConfig`.

    Raises:
        ValueError: an argument or the text is wrong.
        FileNotFoundError: a file does not exist.
    """
    recipe = datasets.make_recipe(TextConfig(dataset=dataset, data_path=data_path, **options))
    datasets.check_files(recipe)
    vocab, n_counted = datasets.make_vocab(recipe)
    cutoffs = datasets.make_cutoffs(recipe, vocab)
    pieces = collections.defaultdict(list)
    for split, shard, ids in datasets.encode(recipe, vocab, n_counted):
        pieces[split, shard].append(ids)
    splits = {
        split: np.concatenate([ids for part in sorted(pieces) if part[0] == split for ids in pieces[part]])
        for split in dict.fromkeys(split for split, _ in pieces)
    }
    return Corpus(vocab, cutoffs, splits, datasets.is_by_character(dataset, vocab))


# ------------------------------------------------------------------------------------------ the prepared folder


def prepare(
    data_dir: str,
    dataset: str,
    data_path: Any = None,
    download: bool = False,
    download_url: str | None = None,
    verbose: int = 0,
    **options,
) -> Corpus:
    """Prepares a dataset in `data_dir`: corpus-info.json, vocab.txt and the token files, for `load_corpus`.

    The files appear at the end, corpus-info.json last: an interrupted call leaves nothing that looks finished. A folder
    that was prepared with the same arguments from files of the same names and sizes is left as it is.

    Args:
        data_dir: the folder, local or remote; made if it does not exist.
        dataset, data_path: as in `build_corpus`; by default, the paper's datasets are read from `data_dir` itself.
        download: whether to fetch the public archive of a paper's dataset if its files are not there.
        download_url: address of another folder that has the archive.
        verbose: 0 for silence, 1 for a progress bar.
        **options: the other hyper-parameters of `TextConfig`.

    Raises:
        ValueError: as `build_corpus`; or the folder was prepared with other arguments or from other files. Names them.
        FileNotFoundError: a file does not exist.
        OSError: the folder cannot be written to, or another process is preparing it.
    """
    data_dir = os.fspath(data_dir).rstrip("/")
    if dataset in datasets.PAPER_DATASETS and not data_path:
        data_path = data_dir
    config = TextConfig(dataset=dataset, data_path=data_path, **options)
    recipe = datasets.make_recipe(config)
    info = read_prepared_info(data_dir)
    if info is not None:
        _check_same(data_dir, info, recipe)
        logger.info("%s is prepared already", data_dir)
        return load_corpus(data_dir)
    if download:
        fetch(dataset, recipe.folder, download_url)
        recipe = datasets.make_recipe(config)  # finds the files that are there now
    datasets.check_files(recipe)
    with _new_files(data_dir) as folder:
        read = recipe.counted + [path for paths in recipe.files.values() for path in paths]
        progress = _progress_bar(sum(map(_size, read))) if verbose and dataset != "pydoc" else None
        vocab, n_counted = datasets.make_vocab(recipe, progress)
        cutoffs = datasets.make_cutoffs(recipe, vocab)
        pieces = datasets.encode(recipe, vocab, n_counted, progress)
        n_tokens = write_files(folder, dataset, vocab, cutoffs, pieces, recipe.options, _inputs(recipe, data_dir))
        for split, paths in recipe.files.items():
            if not n_tokens.get(split):
                raise ValueError(f"{', '.join(paths)}: no token in the split {split}")
    return load_corpus(data_dir)


def write_files(
    folder: str, dataset: str, vocab: Vocab, cutoffs: list[int], pieces: Iterable, options: dict, inputs: dict
) -> dict[str, int]:
    """Writes the files of a prepared corpus to a local folder; returns the number of tokens of each split.

    Args:
        pieces: `(split, shard, ids)`, the pieces of each shard in order.
        options: hyper-parameters that decided the result; with `"num_shuffle"`, each shard of train is a file.
        inputs: `{file: size in bytes}` of the text, to recognise it.
    """
    vocab.save(f"{folder}/{VOCAB_FILE}")
    writers = {}
    for split, shard, ids in pieces:
        if (split, shard) not in writers:
            name = f"{split}-{shard:03d}.npy" if split == "train" and "num_shuffle" in options else f"{split}.npy"
            writers[split, shard] = TokenWriter(f"{folder}/{name}", len(vocab))
        writers[split, shard].add(ids)
    files, n_tokens = {}, {}
    for split, shard in sorted(writers, key=lambda key: key[1]):  # the splits stay in order
        writer = writers[split, shard]
        writer.close()
        files.setdefault(split, []).append(os.path.basename(writer.path))
        n_tokens[split] = n_tokens.get(split, 0) + writer.n_tokens
    names = [VOCAB_FILE, *(name for names in files.values() for name in names)]
    info = {
        "vocab_size": len(vocab),
        "cutoffs": [0, *cutoffs, len(vocab)] if cutoffs else [],
        "dataset": dataset,
        "format": FORMAT,
        "n_tokens": n_tokens,
        "files": files,
        "vocab": vocab.get_config(),
        "options": options,
        "inputs": inputs,
        "sha256": {name: sha256(f"{folder}/{name}") for name in names},
    }
    write_json(f"{folder}/{INFO_FILE}", info)
    return n_tokens


def _size(path: str) -> int | None:
    """Size of an input in bytes, of the manual in characters; `None` if it does not exist."""
    if path == datasets.PYDOC:
        return len(pydoc_text())
    return tf.io.gfile.stat(path).length if tf.io.gfile.exists(path) else None


def _inputs(recipe: datasets.Recipe, data_dir: str) -> dict[str, int | None]:
    """`{file: size}`. Paths within `data_dir` are relative, so that the folder can be moved."""

    def absolute(path):
        return path if is_remote(path) or path == datasets.PYDOC else os.path.abspath(path)

    paths = map(absolute, datasets.all_files(recipe))
    return {path.removeprefix(f"{absolute(data_dir)}/"): _size(path) for path in paths}


def _progress_bar(n_bytes: int) -> Callable[[int], None]:
    """A function to call with the number of bytes of each piece that is done."""
    bar = keras.utils.Progbar(math.ceil(n_bytes / 1e6), unit_name="MB", verbose=1 if sys.stdout.isatty() else 2)
    done = shown = 0

    def progress(n):
        nonlocal done, shown
        done += n
        if done - shown >= 1e6 or done == n_bytes:
            shown = done
            bar.update(math.ceil(done / 1e6) if done == n_bytes else int(done / 1e6), finalize=done == n_bytes)

    return progress


@contextlib.contextmanager
def _new_files(data_dir: str) -> Iterator[str]:
    """Gives a local folder for new files and, without error, moves them to `data_dir`, corpus-info.json last."""
    with contextlib.ExitStack() as stack:
        try:
            tf.io.gfile.makedirs(data_dir)
            if is_remote(data_dir):
                folder = stack.enter_context(tempfile.TemporaryDirectory())
            else:
                stack.enter_context(lock(data_dir, "another process is preparing it"))
                folder = os.path.join(data_dir, "prepare.tmp")
                shutil.rmtree(folder, ignore_errors=True)  # of a killed process
                os.mkdir(folder)
                stack.callback(shutil.rmtree, folder, ignore_errors=True)
        except (OSError, tf.errors.OpError) as error:
            raise OSError(f"data_dir {data_dir} cannot be written to: {error}") from error
        yield folder
        if tf.io.gfile.exists(f"{data_dir}/{INFO_FILE}"):  # of the original program
            tf.io.gfile.remove(f"{data_dir}/{INFO_FILE}")
        for name in sorted(os.listdir(folder), key=lambda name: (name == INFO_FILE, name)):
            if is_remote(data_dir):
                tf.io.gfile.copy(os.path.join(folder, name), f"{data_dir}/{name}", overwrite=True)
            else:
                os.replace(os.path.join(folder, name), os.path.join(data_dir, name))


def _check_same(data_dir: str, info: dict, recipe: datasets.Recipe) -> None:
    """Raises ValueError if the folder was prepared differently. Text that was removed since then is no difference."""
    there = {"dataset": info["dataset"], **info["options"]}
    now = {"dataset": recipe.dataset, **recipe.options}
    sizes = _inputs(recipe, data_dir)
    sizes = {name: info["inputs"].get(name) if size is None else size for name, size in sizes.items()}
    if recipe.dataset in datasets.PAPER_DATASETS:
        sizes = {**info["inputs"], **sizes}
    for values, inputs in ((there, info["inputs"]), (now, sizes)):
        values.update({f"size of {name}": size for name, size in inputs.items()})
    changes = [
        f"{name}: {there.get(name)!r} there, {now.get(name)!r} now"
        for name in dict.fromkeys([*there, *now])
        if there.get(name) != now.get(name)
    ]
    if changes:
        raise ValueError(
            f"data_dir {data_dir} was prepared otherwise; choose another folder, or remove {data_dir}/{INFO_FILE} to "
            "prepare it anew:\n  " + "\n  ".join(changes)
        )


def load_corpus(data_dir: str, verify: bool | None = None) -> Corpus:
    """Opens a folder that `prepare` made. Tokens stay on disk until they are read.

    Args:
        verify: whether to check the checksums of the token files, which reads them once. `None`: if they are local and
            up to a gigabyte. That of the vocabulary is always checked.

    Raises:
        FileNotFoundError: the folder is not prepared, or a file is missing.
        ValueError: a file is damaged, or files of the folder do not belong together.
    """
    data_dir = os.fspath(data_dir).rstrip("/")
    info = read_prepared_info(data_dir)
    if info is None:
        raise FileNotFoundError(
            f"there is no {INFO_FILE} of a prepared corpus in {data_dir}: to prepare it, run\n"
            f"  python tools/prepare_data.py --dataset={{{','.join(DATASETS)}}} --data_dir={data_dir}"
        )
    splits = {split: open_tokens([f"{data_dir}/{name}" for name in names]) for split, names in info["files"].items()}
    for split, tokens in splits.items():
        if len(tokens) != info["n_tokens"][split]:
            raise ValueError(
                f"the split {split} of {data_dir} has {len(tokens)} tokens, but {INFO_FILE} says "
                f"{info['n_tokens'][split]}"
            )
    if verify and "sha256" not in info:
        raise ValueError(f"{data_dir}/{INFO_FILE} has no checksums to verify: prepare the corpus anew to have them")
    if verify is None:
        n_bytes = sum(len(tokens) * tokens.dtype.itemsize for tokens in splits.values())
        verify = not is_remote(data_dir) and n_bytes <= _QUICK_BYTES
    vocab = Vocab.load(f"{data_dir}/{VOCAB_FILE}", **info["vocab"])
    if len(vocab) != info["vocab_size"]:
        raise ValueError(
            f"{data_dir}/{VOCAB_FILE} has {len(vocab)} symbols, but {INFO_FILE} says vocab_size {info['vocab_size']}"
        )
    check_sums(data_dir, info, verify)
    sums = info.get("sha256", {})
    checksums = {split: [sums[name] for name in names] for split, names in info["files"].items()} if sums else {}
    by_character = datasets.is_by_character(info["dataset"], vocab)
    return Corpus(vocab, info["cutoffs"][1:-1], splits, by_character, checksums)
