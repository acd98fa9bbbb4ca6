"""Corpora: from text to token arrays, in memory or in a prepared folder.

`prepare` writes a folder that `load_corpus` opens; `build_corpus` keeps a small corpus in memory. Both count the
symbols of the text in one pass, encode it in another, and hold no more than a megabyte of it at a time.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import logging
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from txl_tf.config import DATASETS, TextConfig
from txl_tf.data.datasets import (
    PAPER_DATASETS,
    PYDOC,
    SPLITS,
    Recipe,
    all_files,
    check_files,
    encode,
    is_by_character,
    make_cutoffs,
    make_recipe,
    make_vocab,
)
from txl_tf.data.download import fetch
from txl_tf.data.text_files import pydoc_text
from txl_tf.data.token_files import TokenWriter, open_tokens
from txl_tf.data.vocabulary import Vocab
from txl_tf.files import is_remote, lock, read_json

INFO_FILE = "corpus-info.json"
VOCAB_FILE = "vocab.txt"
_FORMAT = 1  # of the prepared folder

logger = logging.getLogger("txl_tf")


@dataclasses.dataclass
class Corpus:
    """A vocabulary and the token arrays of a text.

    Attributes:
        vocab: `Vocab`.
        cutoffs: list of int, the first ids of the adaptive softmax's bins, without 0 and `len(vocab)`.
        splits: dict, `"train"`, `"valid"` and perhaps `"test"` -> integer array `[n]`, in memory or on disk.
        by_character: whether tokens are characters or bytes, rather than words.
    """

    vocab: Vocab
    cutoffs: list
    splits: dict
    by_character: bool


# --------------------------------------------------------------------------------------------- text -> tokens


def build_corpus(dataset: str, data_path: Any = None, **options) -> Corpus:
    r"""Reads a dataset, makes its vocabulary and encodes its splits, all in memory.

    - `"pydoc"`: Python's own reference manual, as that of the Python that runs. Splits train, valid.
    - `"text"`: the UTF-8 file or files `data_path`. Splits train, valid.
    - `"enwik8"`, `"text8"`, `"ptb"`, `"wt2"`, `"wt103"`: train.txt, valid.txt and test.txt in the folder
      `data_path`, by the original's rules.
    - `"lm1b"`: in the folder `data_path`, 1b_word_vocab.txt, valid.txt (which is test, too) and the shards
      `LM1B_SHARDS`, the sentences of each in random order.

    For the first two the vocabulary is that of the whole text, and `level`, `valid_fraction`, `min_freq`, `max_size`
    and `lower_case` apply. At level `"word"` text is split at white space, which a Windows line end is part of, and
    each line, an empty one too, ends in `<eos>`. At level `"char"` and `"byte"` every character counts: `\r` is one.
    The symbols that `min_freq` and `max_size` leave out become `<unk>`.

    Args:
        dataset: one of `DATASETS`.
        data_path: file or folder; for `"text"` also several files, as a list or separated by commas.
        **options: the other hyper-parameters of `TextConfig`.

    Returns:
        `Corpus`.

    Raises:
        ValueError: an argument or the text is not what it should be.
        FileNotFoundError: a file is not there.
    """
    recipe = make_recipe(TextConfig(dataset=dataset, data_path=data_path, **options))
    check_files(recipe)
    vocab, n_counted = make_vocab(recipe)
    cutoffs = make_cutoffs(recipe, vocab)
    pieces = collections.defaultdict(list)
    for split, shard, ids in encode(recipe, vocab, n_counted):
        pieces[split, shard].append(ids)
    splits = {
        split: np.concatenate([ids for part in sorted(pieces) if part[0] == split for ids in pieces[part]])
        for split in dict.fromkeys(split for split, _ in pieces)
    }
    return Corpus(vocab, cutoffs, splits, is_by_character(dataset, vocab))


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
    """Makes `data_dir` a folder that `load_corpus` opens: corpus-info.json, vocab.txt and the token files.

    The files appear when all is done, corpus-info.json last: a run that is killed leaves nothing that looks
    finished. Where all is done already, by the same arguments from files of the same names and sizes, it stays.

    Args:
        data_dir: the folder, local or remote; made if it is not there.
        dataset, data_path: as in `build_corpus`, but the paper's datasets are in `data_dir` itself by default.
        download: whether to fetch what a dataset of the paper is made of, unless it is there.
        download_url: where its archives are, rather than where the original's getdata.sh finds them.
        verbose: 0 for silence, 1 for a progress bar.
        **options: the other hyper-parameters of `TextConfig`.

    Returns:
        `Corpus`.

    Raises:
        ValueError: as `build_corpus`; or the folder was prepared by other arguments or from other files. Names them.
        FileNotFoundError: a file is not there.
        OSError: the folder cannot be written to, or another process is preparing it.
    """
    data_dir = os.fspath(data_dir).rstrip("/")
    if dataset in PAPER_DATASETS and not data_path:
        data_path = data_dir
    config = TextConfig(dataset=dataset, data_path=data_path, **options)
    recipe = make_recipe(config)
    info = _read_info(data_dir)
    if info is not None:
        _check_same(data_dir, info, recipe)
        logger.info("%s is prepared already", data_dir)
        return load_corpus(data_dir)
    if download:
        fetch(dataset, recipe.folder, download_url)
        recipe = make_recipe(config)  # of the files that are there now
    check_files(recipe)
    with _new_files(data_dir) as folder:
        _write_corpus(folder, data_dir, recipe, verbose)
    return load_corpus(data_dir)


def _write_corpus(folder: str, data_dir: str, recipe: Recipe, verbose: int) -> None:
    read = recipe.counted + [path for paths in recipe.files.values() for path in paths]
    progress = _progress_bar(sum(map(_size, read))) if verbose and recipe.dataset != "pydoc" else None
    vocab, n_counted = make_vocab(recipe, progress)
    cutoffs = make_cutoffs(recipe, vocab)
    vocab.save(f"{folder}/{VOCAB_FILE}")
    files, n_tokens = _write_tokens(folder, recipe, vocab, n_counted, progress)
    info = {
        "vocab_size": len(vocab),
        "cutoffs": [0, *cutoffs, len(vocab)] if cutoffs else [],
        "dataset": recipe.dataset,
        "format": _FORMAT,
        "n_tokens": n_tokens,
        "files": files,
        "vocab": vocab.get_config(),
        "options": recipe.options,
        "inputs": {_input_name(path, data_dir): _size(path) for path in all_files(recipe)},
    }
    with open(f"{folder}/{INFO_FILE}", "w") as file:
        json.dump(info, file, indent=2)
        file.write("\n")


def _write_tokens(
    folder: str, recipe: Recipe, vocab: Vocab, n_counted: int, progress: Callable | None
) -> tuple[dict, dict]:
    """Writes the token files; returns their names and the number of tokens, by split."""
    writers = {}
    for split, shard, ids in encode(recipe, vocab, n_counted, progress):
        if (split, shard) not in writers:
            name = f"{split}-{shard:03d}.npy" if recipe.num_shuffle and split == "train" else f"{split}.npy"
            writers[split, shard] = TokenWriter(f"{folder}/{name}", len(vocab))
        writers[split, shard].add(ids)
    files, n_tokens = {}, {}
    for (split, _), writer in sorted(writers.items(), key=lambda item: (SPLITS.index(item[0][0]), item[0][1])):
        writer.close()
        files.setdefault(split, []).append(os.path.basename(writer.path))
        n_tokens[split] = n_tokens.get(split, 0) + writer.n_tokens
    for split in recipe.files:
        if not n_tokens.get(split):
            raise ValueError(f"{', '.join(recipe.files[split])}: no token in the split {split}")
    return files, n_tokens


def _size(path: str) -> int | None:
    """The size of an input in bytes; that of the manual, which is no file, in characters. `None`: there is none."""
    if path == PYDOC:
        return len(pydoc_text())
    return tf.io.gfile.stat(path).length if tf.io.gfile.exists(path) else None


def _input_name(path: str, data_dir: str) -> str:
    """The path as corpus-info.json has it: within the folder if it is there, so that the folder can be moved."""
    if path == PYDOC:
        return path
    path, data_dir = (p if is_remote(p) else os.path.abspath(p) for p in (path, data_dir))
    return path.removeprefix(f"{data_dir}/")


def _progress_bar(n_bytes: int) -> Callable[[int], None]:
    """A function to call with the number of bytes that are done."""
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
    """Gives a local folder for new files, which move to `data_dir` if all goes well, corpus-info.json last."""
    with contextlib.ExitStack() as stack:
        try:
            tf.io.gfile.makedirs(data_dir)
            if is_remote(data_dir):
                folder = stack.enter_context(tempfile.TemporaryDirectory())
            else:
                stack.enter_context(lock(data_dir, "another process is preparing it"))
                folder = os.path.join(data_dir, "prepare.tmp")
                shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
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


def _read_info(data_dir: str) -> dict | None:
    """corpus-info.json of a prepared folder; `None` if there is none, or only that of the original program."""
    path = f"{data_dir}/{INFO_FILE}"
    if not tf.io.gfile.exists(path):
        return None
    info = read_json(path)
    if info.get("format", _FORMAT) != _FORMAT:
        raise ValueError(f"{path} has format {info['format']}; this version reads format {_FORMAT}")
    return info if "format" in info else None


def _check_same(data_dir: str, info: dict, recipe: Recipe) -> None:
    """Raises ValueError if the folder was prepared otherwise. Text that was removed since then is not missed."""
    there = {"dataset": info["dataset"], **info["options"]}
    now = {"dataset": recipe.dataset, **recipe.options}
    sizes = {_input_name(path, data_dir): _size(path) for path in all_files(recipe)}
    sizes = {name: info["inputs"].get(name) if size is None else size for name, size in sizes.items()}
    if recipe.dataset in PAPER_DATASETS:
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


def load_corpus(data_dir: str) -> Corpus:
    """Opens a folder that `prepare` made. Tokens stay on disk until they are read.

    Args:
        data_dir: the folder. The tokens of a local one are memory-mapped, those of a remote one read in ranges.

    Returns:
        `Corpus`.

    Raises:
        FileNotFoundError: the folder is not prepared, or a file of it is missing.
        ValueError: files of the folder do not belong together.
    """
    data_dir = os.fspath(data_dir).rstrip("/")
    info = _read_info(data_dir)
    if info is None:
        raise FileNotFoundError(
            f"there is no {INFO_FILE} of a prepared corpus in {data_dir}: to prepare it, run\n"
            f"  python tools/prepare_data.py --dataset={{{','.join(DATASETS)}}} --data_dir={data_dir}"
        )
    vocab = Vocab.load(f"{data_dir}/{VOCAB_FILE}", **info["vocab"])
    if len(vocab) != info["vocab_size"]:
        raise ValueError(
            f"{data_dir}/{VOCAB_FILE} has {len(vocab)} symbols, but {INFO_FILE} says vocab_size {info['vocab_size']}"
        )
    splits = {}
    for split, names in info["files"].items():
        splits[split] = open_tokens([f"{data_dir}/{name}" for name in names])
        if len(splits[split]) != info["n_tokens"][split]:
            raise ValueError(
                f"the split {split} of {data_dir} has {len(splits[split])} tokens, but {INFO_FILE} says "
                f"{info['n_tokens'][split]}"
            )
    return Corpus(vocab, info["cutoffs"][1:-1], splits, is_by_character(info["dataset"], vocab))
