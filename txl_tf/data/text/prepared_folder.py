"""A prepared folder: checks its `corpus-info.json`, and writes its files, which appear all together or not at all."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import math
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

from txl_config.data import INFO_FILE
from txl_tf.config import DATASETS, at_least, one_of
from txl_tf.data.inputs import exists, size
from txl_tf.data.subwords import empty_vocab, vocab_file
from txl_tf.data.text import datasets
from txl_tf.data.text.encoding import Piece
from txl_tf.data.text.sizes import Extent, TextSize
from txl_tf.data.text_files import pydoc_text
from txl_tf.data.token_files import TokenFiles, joined_sha256
from txl_tf.data.vocabulary import Vocab
from txl_tf.errors import ParameterError, brief, named
from txl_tf.files import (
    check_scheme,
    is_remote,
    lock,
    read_json,
    remove,
    remove_leftovers,
    same_path,
    sha256,
    write_json,
)
from txl_tf.schema import check_values

VOCAB_FILE = "vocab.txt"
_NEW = "prepare.tmp"  # folder of new files in the prepared folder. A remote one contains only corpus-info.json
_TOKENS = re.compile(r"(train|valid|test)(-\d{3,})?\.npy")  # names of token files
FORMAT = 1  # version of corpus-info.json; the file of the original program has no "format"

logger = logging.getLogger("txl_tf")


# ----------------------------------------------------------------------------------------------- corpus-info.json


@dataclasses.dataclass
class _OriginalInfo:
    """The values of corpus-info.json of the original program, or next to a checkpoint that was converted for it."""

    vocab_size: int = dataclasses.field(metadata={"check": at_least(1)})
    cutoffs: list[int]
    dataset: str | None = None
    vocab: Vocab | None = None
    model_dir: str | None = None


@dataclasses.dataclass
class _Info:
    """The values of corpus-info.json of a prepared folder.

    Attributes:
        vocab_size: number of symbols.
        cutoffs: 0, the first ids of the later clusters of the adaptive softmax, and `vocab_size`; or empty.
        dataset: one of `DATASETS`.
        format: always `FORMAT`.
        n_tokens: split -> number of tokens.
        files: split -> names of its token files.
        vocab: arguments of `Vocab`.
        options: hyper-parameters that decide the result, see `Recipe.options`.
        inputs: file of the text -> its size in bytes, see `inputs_of`.
        sizes: split -> values of its `TextSize`, if they are known.
        sha256: name of the vocabulary's file or of a token file -> its checksum; older folders have none.
        joined_sha256: with `shard_tokens`, split -> checksum of the one file that its shards would make.
        input_times, input_sha256: local file of the text -> time of its last change in nanoseconds, and its checksum.
            Folders of earlier versions have none.
    """

    vocab_size: int = dataclasses.field(metadata={"check": at_least(1)})
    cutoffs: list[int]
    dataset: str = dataclasses.field(metadata={"check": one_of(DATASETS)})
    format: int
    n_tokens: dict[str, int]
    files: dict[str, list[str]]
    vocab: Vocab
    options: dict  # pyright: ignore[reportMissingTypeArgument] - `check_values` describes it as "a JSON object"
    inputs: dict[str, int | None]
    sizes: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    sha256: dict[str, str] = dataclasses.field(default_factory=dict)
    joined_sha256: dict[str, str] = dataclasses.field(default_factory=dict)
    input_times: dict[str, int] = dataclasses.field(default_factory=dict)
    input_sha256: dict[str, str] = dataclasses.field(default_factory=dict)


def _check_info(info: dict[str, Any]) -> None:
    """Raises ParameterError if the values of a `corpus-info.json` are wrong, ours or the original program's."""
    if info.get("format", FORMAT) != FORMAT:
        raise ParameterError("format", info["format"], f"{FORMAT}, which this version reads")
    own = {"format", "files"} & info.keys()  # one of them is enough, so that a missing one is an error
    check_values(info, _Info if own else _OriginalInfo)
    empty_vocab(**info.get("vocab") or {})  # checks the options
    cutoffs = info["cutoffs"]
    size = info["vocab_size"]
    if cutoffs and (cutoffs[0] != 0 or cutoffs != sorted(set(cutoffs))):
        raise ParameterError("cutoffs", cutoffs, "numbers that rise from 0", f"cutoffs must rise from 0, got {cutoffs}")
    if not own:
        return
    if cutoffs and cutoffs[-1] != size:
        message = f"cutoffs must end with vocab_size={size}, got {cutoffs}"
        raise ParameterError("cutoffs", cutoffs, f"numbers that end with vocab_size={size}", message)
    for split, names in info["files"].items():
        if not names or any(name != os.path.basename(name) or not name for name in names):
            message = f"files must name files in the folder for {brief(split)}, got {brief(names)}"
            raise ParameterError("files", names, "names of files in the folder", message)
    files = info["files"].keys()
    n_tokens = info["n_tokens"].keys()
    if files != n_tokens:
        message = f"n_tokens must be of {', '.join(map(brief, files))}, got {', '.join(map(brief, n_tokens))}"
        raise ParameterError("n_tokens", list(n_tokens), list(files), message)
    sizes = info.get("sizes", {})
    if not sizes.keys() <= files or any(len(size) != len(TextSize._fields) for size in sizes.values()):
        raise ParameterError("sizes", sizes, f"{', '.join(TextSize._fields)} of splits")


def vocab_name(info: dict[str, Any]) -> str:
    """Returns the name of the vocabulary's file in a prepared folder."""
    return vocab_file("vocab", info["vocab"].get("level"))


def _files(info: dict[str, Any]) -> list[str]:
    """Returns the names of the vocabulary's file and of the token files of a prepared folder."""
    return [vocab_name(info), *(name for names in info["files"].values() for name in names)]


def read_info(path: str) -> dict[str, Any]:
    """Reads and checks a corpus-info.json, also of the original program, which has no `"format"`."""
    return read_json(path, _check_info)


def read_prepared_info(data_dir: str) -> dict[str, Any] | None:
    """Reads corpus-info.json of a prepared folder; `None` if it does not exist or is of the original program.

    Raises:
        ParameterError: there is no file system for the folder, or the file is damaged.
    """
    check_scheme("data_dir", data_dir)
    path = f"{data_dir}/{INFO_FILE}"
    info = read_info(path) if tf.io.gfile.exists(path) else {}
    return info if "format" in info else None


def check_sums(data_dir: str, info: dict[str, Any], tokens_too: bool) -> None:
    """Checks the checksum of the vocabulary and, with `tokens_too`, of all token files.

    A folder of an older version has no checksums: then it only logs a warning.

    Raises:
        FileNotFoundError: a file is missing.
        ParameterError: a checksum differs, or the checksums are not those of the files of the folder.
    """
    vocab = vocab_name(info)
    names = _files(info)
    if "sha256" not in info:
        logger.warning("%s was prepared without checksums: damage to it goes unnoticed", data_dir)
        return
    if set(names) != info["sha256"].keys():
        allowed, summed = (", ".join(map(brief, files)) for files in (names, info["sha256"]))
        message = f"{data_dir}/{INFO_FILE}: sha256 must be of {named(allowed)}, got {named(summed)}"
        raise ParameterError("sha256", list(info["sha256"]), names, message)
    for name in names if tokens_too else [vocab]:
        if not tf.io.gfile.exists(f"{data_dir}/{name}"):
            raise FileNotFoundError(f"there is no file {named(f'{data_dir}/{name}')}")
        if sha256(f"{data_dir}/{name}") != info["sha256"][name]:
            message = f"{data_dir}/{name} is damaged: its checksum differs from {INFO_FILE}. Prepare it again"
            raise ParameterError(f"{data_dir}/{name}", None, f"the file that {INFO_FILE} describes", message)


# --------------------------------------------------------------------------------------------------- writing


def write_files(
    folder: str,
    dataset: str,
    vocab: Vocab,
    cutoffs: list[int],
    pieces: Iterable,
    options: dict[str, Any],
    inputs: dict[str, Any],
    shard_tokens: int | None = None,
) -> dict[str, int]:
    """Writes the files of a prepared corpus to a local folder; returns `{split: number of its tokens}`.

    Args:
        folder: an empty folder, see `new_files`.
        dataset: name of the dataset.
        vocab: vocabulary of the ids.
        cutoffs: first ids of the later clusters of the adaptive softmax.
        pieces: `Piece`s, or tuples of their fields. Those of different shards may be mixed; the pieces of one shard are
            in the order of its text.
        options: see `Recipe.options`.
        inputs: entries of corpus-info.json by which a change of the text is detected later, see `described_inputs`.
        shard_tokens: largest number of tokens in a file. `None`: one file for each split; but with `"num_shuffle"` in
            `options`, one file for each shard of train.
    """
    vocab.save(f"{folder}/{vocab_file('vocab', vocab.level)}")
    writers = {}
    extents = {}
    for split, shard, ids, extent in (Piece(*piece) for piece in pieces):
        if (split, shard) not in writers:
            # Otherwise the split has only shard 0, and its file has no number.
            numbered = shard_tokens is not None or (split == "train" and "num_shuffle" in options)
            paths = _paths(f"{folder}/{split}", shard if numbered else None)
            writers[split, shard] = TokenFiles(paths, len(vocab), shard_tokens)
        writers[split, shard].add(ids)
        if extent is not None:
            extents[split] = extents.get(split, Extent()) + extent
    files = {}
    n_tokens = {}
    for split, shard in sorted(writers, key=lambda key: key[1]):  # stable: the splits stay in order
        writer = writers[split, shard]
        writer.close()
        files.setdefault(split, []).extend(os.path.basename(file.path) for file in writer.files)
        n_tokens[split] = n_tokens.get(split, 0) + writer.n_tokens
    all_names = [vocab_file("vocab", vocab.level), *itertools.chain.from_iterable(files.values())]
    info = {
        "vocab_size": len(vocab),
        "cutoffs": [0, *cutoffs, len(vocab)] if cutoffs else [],
        "dataset": dataset,
        "format": FORMAT,
        "n_tokens": n_tokens,
        "files": files,
        "vocab": vocab.get_config(),
        "options": options,
        **{"inputs": {}, **inputs},
        "sizes": datasets.measured(dataset, {split: extent.size for split, extent in extents.items()}),
        "sha256": {name: sha256(f"{folder}/{name}") for name in all_names},
    }
    if shard_tokens:  # the checksum of each split as if it were one file, for fingerprints of the text
        info["joined_sha256"] = {
            split: joined_sha256([f"{folder}/{name}" for name in names]) for split, names in files.items()
        }
    write_json(f"{folder}/{INFO_FILE}", info)
    return n_tokens


def _paths(start: str, number: int | None) -> Iterator[str]:
    """Yields the paths of token files: only `train.npy`; or with `number` 5, `train-005.npy`, `train-006.npy`, ..."""
    return iter([f"{start}.npy"]) if number is None else (f"{start}-{i:03d}.npy" for i in itertools.count(number))


def size_of(path: str) -> int | None:
    """Returns the size of a file in bytes, or of Python's manual in characters; `None` if the file does not exist."""
    if path == datasets.PYDOC:
        return len(pydoc_text())
    return size(path) if exists(path) else None


def inputs_of(recipe: datasets.Recipe, data_dir: str) -> dict[str, int | None]:
    """Returns `{file: size}` of the files that a recipe reads, as in `size_of`.

    Paths in `data_dir` are relative to it, so that the folder can be moved; other paths are absolute.
    """

    def absolute(path):
        return path if is_remote(path) or path == datasets.PYDOC else os.path.abspath(path)

    paths = map(absolute, datasets.all_files(recipe))
    return {path.removeprefix(f"{absolute(data_dir)}/"): size_of(path) for path in paths}


def described_inputs(recipe: datasets.Recipe, data_dir: str) -> dict[str, Any]:
    """Returns the entries `inputs`, `input_times` and `input_sha256` of corpus-info.json for the files of a recipe."""
    sizes = inputs_of(recipe, data_dir)
    paths = {name: os.path.join(data_dir, name) for name in sizes if name != datasets.PYDOC}
    paths = {name: path for name, path in paths.items() if not is_remote(path) and os.path.isfile(path)}
    times = {name: os.stat(path).st_mtime_ns for name, path in paths.items()}
    return {"inputs": sizes, "input_times": times, "input_sha256": {name: sha256(paths[name]) for name in paths}}


def progress_bar(n_bytes: int) -> Callable[[int], None]:
    """Returns a function to call after each piece of a text of `n_bytes`, with the bytes of the piece.

    It draws a bar if the standard output is a terminal.
    """
    bar = keras.utils.Progbar(math.ceil(n_bytes / 1e6), unit_name="MB", verbose=int(sys.stdout.isatty()))
    done = shown = 0

    def progress(n):
        """Adds n bytes, and draws the bar after every megabyte."""
        nonlocal done, shown
        done += n
        if done - shown >= 1e6 or done == n_bytes:
            shown = done
            bar.update(math.ceil(done / 1e6) if done == n_bytes else int(done / 1e6), finalize=done == n_bytes)

    return progress


def is_part(path: str, data_dir: str) -> bool:
    """Whether a path is that of a file of a prepared folder, by its name."""
    names = (INFO_FILE, vocab_file("vocab", None), vocab_file("vocab", "subword"))
    folder, name = os.path.split(path)
    return same_path(folder, data_dir) and (name in names or bool(_TOKENS.fullmatch(name)))


def check_free(data_dir: str, level: str) -> None:
    """Checks whether a folder without corpus-info.json may be prepared at this level.

    Files that an interrupted preparation has left may be overwritten. If a user removed corpus-info.json of a prepared
    folder on purpose, the vocabulary and the token files must be removed, too.

    Raises:
        ParameterError: it is the folder of a run, or has a vocabulary or token files that no preparation has left.
    """
    if tf.io.gfile.exists(f"{data_dir}/config.json"):
        message = f"data_dir must not be the folder of a run, got {data_dir}, which has a config.json"
        raise ParameterError("data_dir", data_dir, "another folder than that of a run", message)
    existing = tf.io.gfile.listdir(data_dir) if tf.io.gfile.isdir(data_dir) else []
    names = [name for name in existing if name == vocab_file("vocab", level) or _TOKENS.fullmatch(name)]
    foreign = sorted({*names} - {*_left_by_interrupted_preparation(data_dir)})
    if foreign:
        message = (
            f"data_dir must not contain {brief(foreign)}, which no preparation has written, got {data_dir}: choose "
            "another folder, or move these files"
        )
        raise ParameterError("data_dir", data_dir, f"a folder without {brief(foreign)}", message)


def _left_by_interrupted_preparation(data_dir: str) -> list[str]:
    """Returns the names of the files that an interrupted preparation has already moved to the folder."""
    new = f"{data_dir}/{_NEW}"
    if os.path.islink(new):  # a preparation never creates a link
        return []
    info = read_prepared_info(new)  # written after the files, and moved after them
    return [name for name in _files(info) if not tf.io.gfile.exists(f"{new}/{name}")] if info else []


@contextlib.contextmanager
def _naming_folder(data_dir: str) -> Iterator[None]:
    """In this block, errors of files become an OSError, which says that `data_dir` cannot be written to."""
    try:
        yield
    except (OSError, tf.errors.OpError) as error:
        raise OSError(f"data_dir {named(data_dir)} cannot be written to: {named(error)}") from error


@contextlib.contextmanager
def new_files(data_dir: str) -> Iterator[str]:
    """Yields an empty local folder for new files. After the block, moves them to `data_dir`, corpus-info.json last.

    If `data_dir` is remote, copies the files. After an error in the block, the new files are removed. A local
    `data_dir` is locked during the block. Files that an interrupted preparation has left in `data_dir` are removed
    first.

    Raises:
        OSError: `data_dir` cannot be written to, or another process is preparing it.
    """
    with contextlib.ExitStack() as stack:
        new = f"{data_dir}/{_NEW}"
        with _naming_folder(data_dir):
            tf.io.gfile.makedirs(data_dir)
            if not is_remote(data_dir):
                stack.enter_context(lock(data_dir, "another process is preparing it"))
                remove_leftovers(data_dir)
            for name in _left_by_interrupted_preparation(data_dir):
                remove(f"{data_dir}/{name}")
            if is_remote(data_dir):
                folder = stack.enter_context(tempfile.TemporaryDirectory())
            else:
                folder = new
                remove(folder)  # a killed process may have left it
                os.mkdir(folder)
        try:
            yield folder
        except BaseException:
            with contextlib.suppress(OSError):  # the first error counts
                remove(folder)
            raise
        with _naming_folder(data_dir):
            if is_remote(data_dir):
                # Shows an interrupted copy, see `_left_by_interrupted_preparation`.
                tf.io.gfile.makedirs(new)
                tf.io.gfile.copy(os.path.join(folder, INFO_FILE), f"{new}/{INFO_FILE}", overwrite=True)
            if tf.io.gfile.exists(f"{data_dir}/{INFO_FILE}"):  # a corpus-info.json of the original program
                remove(f"{data_dir}/{INFO_FILE}")
            for name in sorted(os.listdir(folder), key=lambda name: (name == INFO_FILE, name)):
                if is_remote(data_dir):
                    tf.io.gfile.copy(os.path.join(folder, name), f"{data_dir}/{name}", overwrite=True)
                else:
                    os.replace(os.path.join(folder, name), os.path.join(data_dir, name))
            remove(new)


def check_same(data_dir: str, info: dict[str, Any], recipe: datasets.Recipe) -> None:
    """Checks that the folder was prepared by this recipe. A file of the text that no longer exists is ignored.

    A local file is read only if the time of its last change differs: it may have the same text as before.

    Args:
        data_dir: the prepared folder.
        info: its corpus-info.json.
        recipe: the requested preparation.

    Raises:
        ParameterError: an argument, or the size or the checksum of a file, differs. The error names the first
            difference; its message lists all of them.
    """
    existing = {"dataset": info["dataset"], **info["options"], "raw_text": info["vocab"].get("raw_text", True)}
    requested = {"dataset": recipe.dataset, **recipe.options, "raw_text": recipe.vocab_options.get("raw_text", True)}
    sizes = {} if recipe.spooled else inputs_of(recipe, data_dir)
    sizes = {name: info["inputs"].get(name) if size is None else size for name, size in sizes.items()}
    if recipe.dataset in datasets.PAPER_DATASETS:  # a removed shard of lm1b is not among the files of the recipe
        sizes = {**info["inputs"], **sizes}
    for values, inputs in ((existing, info["inputs"]), (requested, sizes)):
        values.update({f"size of {name}": size for name, size in inputs.items()})
    for name, time in info.get("input_times", {}).items():
        path = os.path.join(data_dir, name)
        is_same_size = sizes.get(name) == info["inputs"].get(name)
        if is_same_size and os.path.isfile(path) and os.stat(path).st_mtime_ns != time:
            existing[f"checksum of {name}"] = info["input_sha256"].get(name)
            requested[f"checksum of {name}"] = sha256(path)
    names = dict.fromkeys([*existing, *requested])
    differing = [name for name in names if existing.get(name) != requested.get(name)]
    if differing:
        first = differing[0]
        message = (
            f"data_dir {data_dir} was prepared with other arguments; choose another folder, or remove {INFO_FILE}, "
            f"{vocab_name(info)} and the .npy files in it to prepare it again:"
        )
        for name in differing:
            message += f"\n  {name}: {existing.get(name)!r} in the folder, {requested.get(name)!r} requested"
        raise ParameterError(first, requested.get(first), [existing.get(first)], message)
