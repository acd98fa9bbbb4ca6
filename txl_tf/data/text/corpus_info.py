"""corpus-info.json: what it says of a prepared folder, and whether the folder's files are as they were written."""

from __future__ import annotations

import dataclasses
import logging
import os

import tensorflow as tf

from txl_tf.config import DATASETS, at_least, one_of
from txl_tf.data.subwords import empty_vocab, vocab_file
from txl_tf.data.text.texts import TextSize
from txl_tf.data.vocabulary import Vocab
from txl_tf.files import read_json, sha256
from txl_tf.schema import brief, check_values

INFO_FILE = "corpus-info.json"
VOCAB_FILE = "vocab.txt"
FORMAT = 1

logger = logging.getLogger("txl_tf")


@dataclasses.dataclass
class _OriginalInfo:
    """corpus-info.json of the original program, and that beside a checkpoint that was converted for it."""

    vocab_size: int = dataclasses.field(metadata={"check": at_least(1)})
    cutoffs: list[int]
    dataset: str | None = None
    vocab: Vocab | None = None


@dataclasses.dataclass
class _Info:
    """corpus-info.json of a prepared folder."""

    vocab_size: int = dataclasses.field(metadata={"check": at_least(1)})
    cutoffs: list[int]
    dataset: str = dataclasses.field(metadata={"check": one_of(DATASETS)})
    format: int
    n_tokens: dict[str, int]
    files: dict[str, list[str]]
    vocab: Vocab
    options: dict
    inputs: dict[str, int | None]
    sizes: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    sha256: dict[str, str] = dataclasses.field(default_factory=dict)


def _check_info(info: dict) -> None:
    if info.get("format", FORMAT) != FORMAT:
        raise ValueError(f"format must be {FORMAT}, which this version reads, got {brief(info['format'])}")
    own = {"format", "files"} & info.keys()
    check_values(info, _Info if own else _OriginalInfo)
    empty_vocab(**info.get("vocab") or {})  # checks them
    cutoffs, size = info["cutoffs"], info["vocab_size"]
    if cutoffs and (cutoffs[0] != 0 or cutoffs != sorted(set(cutoffs))):
        raise ValueError(f"cutoffs must rise from 0, got {cutoffs}")
    if not own:
        return
    if cutoffs and cutoffs[-1] != size:
        raise ValueError(f"cutoffs must end with vocab_size={size}, got {cutoffs}")
    for split, names in info["files"].items():
        if not names or any(name != os.path.basename(name) or not name for name in names):
            raise ValueError(f"files must name files in the folder for {brief(split)}, got {brief(names)}")
    files, n_tokens = info["files"].keys(), info["n_tokens"].keys()
    if files != n_tokens:
        raise ValueError(f"n_tokens must be of {', '.join(map(brief, files))}, got {', '.join(map(brief, n_tokens))}")
    sizes = info.get("sizes", {})
    if not sizes.keys() <= files or any(len(size) != len(TextSize._fields) for size in sizes.values()):
        raise ValueError(f"sizes must be {', '.join(TextSize._fields)} of splits, got {brief(sizes)}")


def vocab_name(info: dict) -> str:
    """The name of the vocabulary's file in a prepared folder."""
    return vocab_file("vocab", info["vocab"].get("level"))


def read_info(path: str) -> dict:
    """A corpus-info.json, also that of the original program, which has no `"format"`."""
    return read_json(path, _check_info)


def read_prepared_info(data_dir: str) -> dict | None:
    """corpus-info.json of a prepared folder; `None` if there is none, or only that of the original program."""
    path = f"{data_dir}/{INFO_FILE}"
    info = read_info(path) if tf.io.gfile.exists(path) else {}
    return info if "format" in info else None


def check_sums(data_dir: str, info: dict, tokens_too: bool) -> None:
    """Raises ValueError where a file of a prepared folder is not as it was written. Older folders have no checksums."""
    vocab = vocab_name(info)
    names = [vocab, *(name for names in info["files"].values() for name in names)]
    if "sha256" not in info:
        logger.warning("%s was prepared without checksums: damage to it goes unnoticed", data_dir)
        return
    if set(names) != info["sha256"].keys():
        allowed, found = (", ".join(map(brief, files)) for files in (names, info["sha256"]))
        raise ValueError(f"{data_dir}/{INFO_FILE}: sha256 must be of {allowed}, got {found}")
    for name in names if tokens_too else [vocab]:
        if sha256(f"{data_dir}/{name}") != info["sha256"][name]:
            raise ValueError(f"{data_dir}/{name} is damaged: its checksum is not that in {INFO_FILE}. Prepare it anew")
