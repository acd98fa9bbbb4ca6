"""Corpora: from text to token arrays, and from token arrays to the batches of a language model.

`prepare` writes a folder that `load_corpus` opens; `build_corpus` keeps a small corpus in memory. Both do the same:
count the symbols of the text in one pass, encode it in another, and hold no more than a megabyte of it at a time.

Shapes:
    B: batch_size, rows of text read side by side
    T: tgt_len, tokens a segment
    S: n_token_of_the_split // B, tokens a row
"""

import collections
import contextlib
import dataclasses
import itertools
import json
import math
import os
import shutil
import sys
import tempfile

import keras
import numpy as np
import tensorflow as tf

from txl_tf.datasets import (
    DATASETS,
    PAPER_DATASETS,
    PYDOC,
    SPLITS,
    all_files,
    check_files,
    encode,
    is_by_character,
    make_cutoffs,
    make_recipe,
    make_vocab,
)
from txl_tf.download import fetch
from txl_tf.folders import lock
from txl_tf.text_files import pydoc_text
from txl_tf.token_files import StoredTokens, TokenWriter, is_remote, open_tokens
from txl_tf.vocabulary import LEVELS as LEVELS  # for train.py
from txl_tf.vocabulary import Vocab

INFO_FILE = "corpus-info.json"
_FORMAT = 1  # of the prepared folder
_READ_AHEAD = 1 << 16  # tokens a row


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


def build_corpus(
    dataset,
    data_path=None,
    level="char",
    valid_fraction=0.05,
    min_freq=0,
    max_size=None,
    lower_case=False,
    cutoffs=None,
    num_shuffle=1,
    seed=123456,
):
    """Reads a dataset, makes its vocabulary and encodes its splits, all in memory.

    - `"pydoc"`: Python's own reference manual, as that of the Python that runs. Splits train, valid.
    - `"text"`: the UTF-8 file or files `data_path`. Splits train, valid.
    - `"enwik8"`, `"text8"`, `"ptb"`, `"wt2"`, `"wt103"`: train.txt, valid.txt and test.txt in the folder
      `data_path`, by the original's rules.
    - `"lm1b"`: in the folder `data_path`, 1b_word_vocab.txt, valid.txt (which is test, too) and the shards
      `LM1B_SHARDS`, the sentences of each in random order.

    For the first two the vocabulary is that of the whole text, and `level`, `valid_fraction`, `min_freq`, `max_size`
    and `lower_case` apply. At level `"word"` text is split at white space, which a Windows line end is part of, and
    each line, an empty one too, ends in `<eos>`. At level `"char"` and `"byte"` every character counts: `\\r` is one.
    The symbols that `min_freq` and `max_size` leave out become `<unk>`.

    Args:
        dataset: one of `DATASETS`.
        data_path: file or folder; for `"text"` also several files, as a list or separated by commas.
        level: `"char"`, `"byte"` or `"word"`.
        valid_fraction: the share of the tokens, at the end, that is held out as `valid`; in (0, 1).
        min_freq, max_size, lower_case: see `Vocab`.
        cutoffs: list of int, to use instead of the dataset's own, or for the first two of `choose_cutoffs`.
        num_shuffle: for lm1b, the number of random orders in which the training text follows itself.
        seed: for lm1b, of the random order; the default gives the original's.

    Returns:
        `Corpus`.

    Raises:
        ValueError: an argument or the text is not what it should be.
        FileNotFoundError: a file is not there.
    """
    recipe = make_recipe(
        dataset, data_path, level, valid_fraction, min_freq, max_size, lower_case, cutoffs, num_shuffle, seed
    )
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


def prepare(data_dir, dataset, data_path=None, download=False, download_url=None, verbose=0, **options):
    """Makes `data_dir` a folder that `load_corpus` opens: corpus-info.json, vocab.txt and the token files.

    The files appear when all is done, corpus-info.json last: a run that is killed leaves nothing that looks
    finished. Where all is done already, by the same arguments from files of the same names and sizes, it stays.

    Args:
        data_dir: the folder, local or remote; made if it is not there.
        dataset, data_path: as in `build_corpus`, but the paper's datasets are in `data_dir` itself by default.
        download: whether to fetch what a dataset of the paper is made of, unless it is there.
        download_url: where its archives are, rather than where the original's getdata.sh finds them.
        verbose: 0 for silence, 1 for a progress bar.
        **options: the other arguments of `build_corpus`.

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
    recipe = make_recipe(dataset, data_path, **options)
    info = _read_info(data_dir)
    if info is not None:
        _check_same(data_dir, info, recipe)
        if verbose:
            print(f"{data_dir} is prepared already")
        return load_corpus(data_dir)
    if download:
        fetch(dataset, recipe.folder, download_url)
        recipe = make_recipe(dataset, data_path, **options)  # of the files that are there now
    check_files(recipe)
    with _new_files(data_dir) as folder:
        _write_corpus(folder, data_dir, recipe, verbose)
    return load_corpus(data_dir)


def _write_corpus(folder, data_dir, recipe, verbose):
    read = recipe.counted + [path for paths in recipe.files.values() for path in paths]
    progress = _progress_bar(sum(map(_size, read))) if verbose and recipe.dataset != "pydoc" else None
    vocab, n_counted = make_vocab(recipe, progress)
    cutoffs = make_cutoffs(recipe, vocab)
    vocab.save(f"{folder}/vocab.txt")
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


def _write_tokens(folder, recipe, vocab, n_counted, progress):
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


def _size(path):
    """The size of an input in bytes; that of the manual, which is no file, in characters. `None`: there is none."""
    if path == PYDOC:
        return len(pydoc_text())
    return tf.io.gfile.stat(path).length if tf.io.gfile.exists(path) else None


def _input_name(path, data_dir):
    """The path as corpus-info.json has it: within the folder if it is there, so that the folder can be moved."""
    if path == PYDOC:
        return path
    path, data_dir = (p if is_remote(p) else os.path.abspath(p) for p in (path, data_dir))
    return path.removeprefix(f"{data_dir}/")


def _progress_bar(n_bytes):
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
def _new_files(data_dir):
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


def _read_info(data_dir):
    """corpus-info.json of a prepared folder; `None` if there is none, or only that of the original program."""
    path = f"{data_dir}/{INFO_FILE}"
    if not tf.io.gfile.exists(path):
        return None
    with tf.io.gfile.GFile(path) as file:
        try:
            info = json.load(file)
        except ValueError as error:
            raise ValueError(f"{path} is not JSON: {error}") from error
    if info.get("format", _FORMAT) != _FORMAT:
        raise ValueError(f"{path} has format {info['format']}; this version reads format {_FORMAT}")
    return info if "format" in info else None


def _check_same(data_dir, info, recipe):
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


def load_corpus(data_dir):
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
    vocab = Vocab.load(f"{data_dir}/vocab.txt", **info["vocab"])
    if len(vocab) != info["vocab_size"]:
        raise ValueError(
            f"{data_dir}/vocab.txt has {len(vocab)} symbols, but {INFO_FILE} says vocab_size {info['vocab_size']}"
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


# ------------------------------------------------------------------------------------------ tokens -> batches


def segments(tokens, batch_size, tgt_len, start=0, repeat=False, drop_remainder=False):
    """Cuts a token array into the batches of a language model, in order, as the original does.

    The tokens are laid out in B rows of S, those left over dropped. A batch is the next T columns of all
    rows, so row r of a batch goes on where row r of the batch before ended. 14 tokens, B = 2, T = 4:

        0 1 2  3 |  4  5  6      tokens [[0, 1, 2, 3], [7, 8, 9, 10]]   labels [[1, 2, 3, 4], [8, 9, 10, 11]]
        7 8 9 10 | 11 12 13      tokens [[4, 5], [11, 12]]              labels [[5, 6], [12, 13]]

    Args:
        tokens: integer array `[n]`. An `np.memmap` or `StoredTokens` is read piece by piece, any other array is held
            in memory.
        batch_size: B, over all replicas.
        tgt_len: T.
        start: index of the batch to begin with, to resume; with `repeat`, it may lie past the first epoch.
        repeat: whether to begin again after the last batch, for ever.
        drop_remainder: whether to leave out a shorter last batch, where all must have one shape.

    Returns:
        `tf.data.Dataset` of `(tokens, labels)`, int32 `[B, T]` each. The last batch of an epoch may be
        shorter, and `element_spec` then has `None` for T.

    Raises:
        ValueError: `tokens` is not such an array or too short, or a number is out of range.
    """
    tokens = _check_tokens(tokens)
    n_batch = num_segments(len(tokens), batch_size, tgt_len, drop_remainder)
    if start < 0 or (start > n_batch and not repeat):
        raise ValueError(f"start must be in [0, {n_batch}], the number of batches, got {start}")
    n_column = len(tokens) // batch_size  # S
    read_columns = _column_reader(tokens, batch_size, n_column)
    one_length = drop_remainder or (n_column - 1) % tgt_len == 0

    def segment(i):
        window = read_columns(i * tgt_len, (i + 1) * tgt_len + 1)  # [B, T + 1]; shorter where the rows end
        window = tf.ensure_shape(window, [batch_size, tgt_len + 1 if one_length else None])
        return window[:, :-1], window[:, 1:]

    order = tf.data.Dataset.range(start % n_batch if repeat else start, n_batch)
    if repeat:
        order = order.concatenate(tf.data.Dataset.range(n_batch).repeat())
    return order.map(segment).prefetch(tf.data.AUTOTUNE)


def _column_reader(tokens, batch_size, n_column):
    """A function of tensors `(begin, end) -> columns [B, end - begin]`, int32, that embeds no array in a graph."""
    if isinstance(tokens, StoredTokens):
        read = _read_ahead(tokens, batch_size, n_column)
    else:
        rows = tokens[: batch_size * n_column].reshape(batch_size, n_column)
        if not isinstance(rows, np.memmap):
            with tf.device("CPU:0"):
                held = tf.convert_to_tensor(rows)
            return lambda begin, end: tf.cast(held[:, begin:end], tf.int32)

        def read(begin, end):
            return rows[:, begin:end].astype(np.int32)

    return lambda begin, end: tf.numpy_function(read, [begin, end], tf.int32)


def _read_ahead(tokens, batch_size, n_column):
    """Reads long stretches of all rows at a time, and serves columns from the last ones read."""
    ahead = 0, np.zeros([batch_size, 0], np.int32)  # of this column on, these

    def read(begin, end):
        nonlocal ahead
        first, columns = ahead
        end = min(end, n_column)
        if begin < first or end > first + columns.shape[1]:
            last = min(n_column, max(end, begin + _READ_AHEAD))
            rows = [tokens[row * n_column + begin : row * n_column + last] for row in range(batch_size)]
            first, columns = ahead = begin, np.stack(rows).astype(np.int32)
        return np.ascontiguousarray(columns[:, begin - first : end - first])

    return read


def num_segments(n_tokens, batch_size, tgt_len, drop_remainder=False, name="text"):
    """The number of batches that `segments` makes of `n_tokens` tokens; `name` is what an error calls them."""
    _check_enough(n_tokens, batch_size, tgt_len, tgt_len + 1 if drop_remainder else 2, name)
    n_label = n_tokens // batch_size - 1  # of a row
    return n_label // tgt_len if drop_remainder else math.ceil(n_label / tgt_len)


def get_bin_sizes(tokens, batch_size, tgt_len, cutoffs):
    """Chooses the adaptive softmax's bin capacities for static shapes, by the original's rule.

    A capacity is the mean plus 2.5 standard deviations of a segment's tokens in the bin, to the nearest 8.

    Args:
        tokens: integer array `[n]`, the training text.
        batch_size: B, of one replica.
        tgt_len: T.
        cutoffs: list of int, as in `Corpus`.

    Returns:
        list of int, the capacity of each bin but the first.
    """
    tokens = _check_tokens(tokens)
    _check_enough(len(tokens), batch_size, tgt_len, tgt_len)
    n_batch = len(tokens) // batch_size // tgt_len
    counts = np.zeros([len(cutoffs), n_batch])  # of the tokens of each bin in each segment
    for row in range(batch_size):
        blocks = tokens[row * n_batch * tgt_len : (row + 1) * n_batch * tgt_len].reshape(n_batch, tgt_len)
        for count, (left, right) in zip(counts, itertools.pairwise([*cutoffs, np.inf]), strict=True):
            count += ((blocks >= left) & (blocks < right)).sum(1)
    bin_sizes = []
    for share in counts / (batch_size * tgt_len):
        size = math.ceil(batch_size * tgt_len * (np.mean(share) + 2.5 * np.std(share)))
        bin_sizes.append(max(8, (size + 4) // 8 * 8))
    return bin_sizes


def _check_tokens(tokens):
    if isinstance(tokens, StoredTokens):
        return tokens
    tokens = np.asanyarray(tokens)  # a memory map stays one
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(f"tokens must be a 1-D integer array, got {tokens.dtype} of shape {tokens.shape}")
    return tokens


def _check_enough(n_tokens, batch_size, tgt_len, row_tokens, name="text"):
    for argument, value in (("batch_size", batch_size), ("tgt_len", tgt_len)):
        if value < 1:
            raise ValueError(f"{argument} must be positive, got {value}")
    if n_tokens < batch_size * row_tokens:
        raise ValueError(
            f"the {name} has {n_tokens} tokens: batch_size={batch_size} and tgt_len={tgt_len} need at least "
            f"{batch_size * row_tokens}, {row_tokens} a row"
        )
