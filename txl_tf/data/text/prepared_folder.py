"""How a prepared folder comes into being: all its files or none, corpus-info.json last."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator

import keras
import tensorflow as tf

from txl_tf.data.subwords import vocab_file
from txl_tf.data.text import datasets
from txl_tf.data.text.corpus_info import FORMAT, INFO_FILE
from txl_tf.data.text.texts import TextSize
from txl_tf.data.text_files import pydoc_text
from txl_tf.data.token_files import TokenWriter
from txl_tf.data.vocabulary import Vocab
from txl_tf.files import is_remote, lock, sha256, write_json


def write_files(
    folder: str, dataset: str, vocab: Vocab, cutoffs: list[int], pieces: Iterable, options: dict, inputs: dict
) -> dict[str, int]:
    """Writes the files of a prepared corpus to a local folder; returns the number of tokens of each split.

    Args:
        pieces: `(split, shard, ids)`, the pieces of each shard in order.
        options: hyper-parameters that decided the result; with `"num_shuffle"`, each shard of train is a file.
        inputs: `{file: size in bytes}` of the text, to recognise it.
    """
    vocab.save(f"{folder}/{vocab_file('vocab', vocab.level)}")
    writers, sizes = {}, {}
    for split, shard, ids, size in (datasets.Piece(*piece) for piece in pieces):
        if (split, shard) not in writers:
            name = f"{split}-{shard:03d}.npy" if split == "train" and "num_shuffle" in options else f"{split}.npy"
            writers[split, shard] = TokenWriter(f"{folder}/{name}", len(vocab))
        writers[split, shard].add(ids)
        if size is not None:
            sizes[split] = sizes.get(split, TextSize()) + size
    files, n_tokens = {}, {}
    for split, shard in sorted(writers, key=lambda key: key[1]):  # the splits stay in order
        writer = writers[split, shard]
        writer.close()
        files.setdefault(split, []).append(os.path.basename(writer.path))
        n_tokens[split] = n_tokens.get(split, 0) + writer.n_tokens
    names = [vocab_file("vocab", vocab.level), *(name for names in files.values() for name in names)]
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
        "sizes": datasets.measured(dataset, sizes),
        "sha256": {name: sha256(f"{folder}/{name}") for name in names},
    }
    write_json(f"{folder}/{INFO_FILE}", info)
    return n_tokens


def size_of(path: str) -> int | None:
    """Size of an input in bytes, of the manual in characters; `None` if it does not exist."""
    if path == datasets.PYDOC:
        return len(pydoc_text())
    return tf.io.gfile.stat(path).length if tf.io.gfile.exists(path) else None


def inputs_of(recipe: datasets.Recipe, data_dir: str) -> dict[str, int | None]:
    """`{file: size}`. Paths within `data_dir` are relative, so that the folder can be moved."""

    def absolute(path):
        return path if is_remote(path) or path == datasets.PYDOC else os.path.abspath(path)

    paths = map(absolute, datasets.all_files(recipe))
    return {path.removeprefix(f"{absolute(data_dir)}/"): size_of(path) for path in paths}


def progress_bar(n_bytes: int) -> Callable[[int], None]:
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
def new_files(data_dir: str) -> Iterator[str]:
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


def check_same(data_dir: str, info: dict, recipe: datasets.Recipe) -> None:
    """Raises ValueError if the folder was prepared differently. Text that was removed since then is no difference."""
    there = {"dataset": info["dataset"], **info["options"]}
    now = {"dataset": recipe.dataset, **recipe.options}
    sizes = {} if recipe.spooled else inputs_of(recipe, data_dir)
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
