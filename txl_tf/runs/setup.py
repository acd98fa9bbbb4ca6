"""Set-up of training and evaluation: corpus, devices, checks of batches, workers."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from txl_tf.config import MachineConfig
from txl_tf.data.text.corpus import Corpus, build_corpus, load_corpus
from txl_tf.data.text.encoding import encode_files
from txl_tf.data.text.sizes import TextSize
from txl_tf.data.text.texts import find_files, have_documents
from txl_tf.data.vocabulary import Vocab
from txl_tf.files import check_writable, same_path
from txl_tf.kernels.precision import set_matmul_precision
from txl_tf.language.language_model import TransformerXLLM
from txl_tf.runs.folder import RunFolder
from txl_tf.schema import check_left_out
from txl_tf.training.distribution import choose_precision, make_strategy, num_workers, only_chief_logs

logger = logging.getLogger("txl_tf")

# Steps in one call on a TPU, at most. The host's work between two calls then is little beside them, and a machine that
# is told to end has two calls at most to finish, a few seconds.
MOST_STEPS_ON_TPU = 20

_COLLECTIVE_FAILED = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.DeadlineExceededError,
    tf.errors.InternalError,
    tf.errors.CancelledError,
)


def open_machine(machine: MachineConfig) -> tuple[tf.distribute.Strategy, MachineConfig]:
    """The strategy, and `machine` with the type of products that "auto" stands for there; sets their precision."""
    strategy = make_strategy(*machine.devices)
    set_matmul_precision(machine.matmul_precision)
    return strategy, dataclasses.replace(machine, mixed_precision=choose_precision(machine.mixed_precision, strategy))


def open_corpus(data: dict, vocab: Vocab | None = None, extend_vocab: bool = False) -> Corpus:
    """The corpus of `config.json`'s `"data"`: a prepared folder, `data_dir`, or the arguments of `build_corpus`."""
    if not data:
        raise ValueError(
            "no corpus: give data_path, a text, or data_dir, a folder that tools/prepare_data.py prepared, or dataset"
        )
    if data.get("data_dir"):
        return load_corpus(data["data_dir"])
    options = {name: value for name, value in data.items() if name not in ("by_character", "data_dir")}
    return build_corpus(**options, vocab=vocab, extend_vocab=extend_vocab)


def corpus_of(folder: RunFolder, data: dict | None = None) -> Corpus:
    """The corpus that a run was trained on, or that of `data`, read as the run reads texts."""
    config = folder.read_config()
    data = data or config["data"]
    if "vocab" in config and data.get("raw_text") is None:
        data = {**data, "raw_text": folder.load_vocab().raw_text}
    if not config.get("init_from"):
        return open_corpus(data)
    return open_corpus(without_choice(data), folder.load_vocab())


def without_choice(data: dict) -> dict:
    """`data` without what chose the symbols that a vocabulary was extended by."""
    return {name: value for name, value in data.items() if name not in ("min_freq", "max_size")}


def encode_text(path: str, vocab: Vocab, data: dict, reading: dict | None = None) -> tuple[np.ndarray, TextSize]:
    """Ids of a text, of one file or several, in the vocabulary of a run; and its size.

    Args:
        data: `"data"` of the run's `config.json`: its `text_field` and `skip_bad_lines` count for files with rows.
        reading: the same two settings for this text, which count more.
    """
    paths, reading = find_files(path), reading or {}
    of_rows = "text_field" in reading or have_documents(paths, vocab.raw_text)
    if not of_rows:
        check_left_out({"skip_bad_lines": reading.get("skip_bad_lines")}, f"{path} has no rows of JSON or Parquet")
    settings = {**data, **reading} if of_rows else {}
    return encode_files(paths, vocab, settings.get("text_field"), settings.get("skip_bad_lines", False))


def name_of(data: dict) -> str:
    return data.get("data_dir") or data["dataset"]


def check_documents(name: str, vocab: Vocab) -> None:
    """Raises ValueError where a text has no ends of documents, which the option `name` needs."""
    if vocab.document is None:
        raise ValueError(f"{name} needs a text of documents, each with its end: JSON lines, or --documents")


def reset_token_of(vocab: Vocab, group: type) -> int:
    """`reset_token` of a model, whose hyper-parameters are `group`, that starts every document anew."""
    name = "reset_memory_at_documents"
    check_documents(name, vocab)
    if "reset_token" not in group.names():
        raise ValueError(f"{name} is about memory, which --model=transformer does not have: leave it out")
    return vocab.document_id


def check_token_nll(path: str | None, **text: Any) -> None:
    """Raises ValueError where `path` is a file of the text, which `find_files` takes; OSError if it is not writable."""
    ((name, files),) = text.items()
    if path and files and any(same_path(path, file) for file in find_files(files)):
        raise ValueError(f"token_nll must be another file than {name}, got {path}")
    check_writable(path)


def check_divides(strategy: tf.distribute.Strategy, parts: int = 1, **batch_size: int) -> None:
    """Raises ValueError where a batch cannot be divided evenly among the replicas, and on each into `parts`."""
    ((name, rows),) = batch_size.items()
    replicas = strategy.num_replicas_in_sync
    if rows % (replicas * parts):
        among = f"{replicas} replicas" + f" times gradient_accumulation_steps={parts}" * (parts > 1)
        raise ValueError(f"{name} must be a multiple of {replicas * parts}, for {among}, got {rows}")


def log_model(name: str, corpus: Corpus, lm: TransformerXLLM, strategy: tf.distribute.Strategy, type_name: str) -> None:
    sizes = ", ".join(f"{len(tokens):,} {split}" for split, tokens in corpus.splits.items())
    logger.info("%s: %s symbols; tokens: %s", name, f"{len(corpus.vocab):,}", sizes)
    replicas = strategy.num_replicas_in_sync
    plural = "s" * (replicas > 1)
    logger.info("model: %s parameters, %s, %d replica%s", f"{lm.count_params():,}", type_name, replicas, plural)


class WorkerGone(OSError):
    """Another worker is gone. Programs end with its `status`, EX_TEMPFAIL of sysexits.h: to start again helps."""

    status = 75


@contextlib.contextmanager
def worker_of(strategy: tf.distribute.Strategy, folder: RunFolder) -> Iterator[None]:
    """Of several workers, only the chief logs; a worker that is gone ends the others with a message that says so."""
    with only_chief_logs(strategy):
        try:
            yield
        except _COLLECTIVE_FAILED as error:
            if num_workers(strategy) == 1:
                raise
            saved = folder.checkpoints()
            raise WorkerGone(
                f"another worker is gone ({type(error).__name__}): start all {num_workers(strategy)} again, or as many "
                f"as the batch divides among; they go on from {saved[-1] if saved else 'the beginning'}"
            ) from error
