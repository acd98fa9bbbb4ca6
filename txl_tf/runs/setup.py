"""The set-up of training and evaluation: opens devices and corpus, checks batches, and reports lost workers."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from txl_tf.config import Config, MachineConfig, ModelConfig, TextConfig, TransformerLMConfig
from txl_tf.data.text.corpus import Corpus, build_corpus, load_corpus
from txl_tf.data.text.datasets import unused_options
from txl_tf.data.text.encoding import encode_files
from txl_tf.data.text.prepared_folder import is_part
from txl_tf.data.text.sizes import TextSize
from txl_tf.data.text.texts import find_files, have_documents
from txl_tf.data.vocabulary import Vocab
from txl_tf.environment import processor_flags
from txl_tf.errors import ParameterError
from txl_tf.files import check_not_packed, check_writable, same_path
from txl_tf.kernels.precision import set_matmul_precision
from txl_tf.language.language_model import LanguageModel
from txl_tf.runs.folder import RunFolder, check_spares_runs
from txl_tf.schema import check_left_out
from txl_tf.training.distribution import choose_precision, is_chief, make_strategy, num_workers, only_chief_logs

logger = logging.getLogger("txl_tf")

# The most steps of one call on a TPU. With so many, the work of the host between two calls takes little of the time.
# After a signal to end, at most two calls remain, which take a few seconds.
MOST_STEPS_ON_TPU = 20

# Hyper-parameters of models that compute every row of a batch by itself. Those of another package may not.
ROW_BY_ROW = (ModelConfig, TransformerLMConfig)

# Errors of operations in which all workers take part, if one of them fails.
_COLLECTIVE_FAILED = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.DeadlineExceededError,
    tf.errors.InternalError,
    tf.errors.CancelledError,
)


def open_machine(machine: MachineConfig) -> tuple[tf.distribute.Strategy, MachineConfig]:
    """Makes the strategy. If `set_matmul_precision` must fail, raises its error already.

    The caller must call `set_matmul_precision` later, after it has chosen the threads: with bfloat16, the call starts
    TensorFlow.

    Returns:
        `(strategy, machine)`: the strategy, and `machine` with the `mixed_precision` that is chosen for "auto".
    """
    strategy = make_strategy(**machine.strategy_arguments)
    can_round = "amx_bf16" in processor_flags() and not tf.config.list_physical_devices("GPU")
    # These calls leave TensorFlow's threads open: float32 only reads the environment, and bfloat16 raises its error.
    if machine.matmul_precision == "float32" or not can_round:
        set_matmul_precision(machine.matmul_precision)
    return strategy, dataclasses.replace(machine, mixed_precision=choose_precision(machine.mixed_precision, strategy))


def open_corpus(
    data: dict, vocab: Vocab | None = None, extend_vocab: bool = False, recorded: dict | None = None
) -> Corpus:
    """The corpus that `"data"` of `config.json` describes.

    Args:
        data: `{"data_dir": a prepared folder}`, or arguments of `build_corpus`.
        vocab, extend_vocab: see `build_corpus`. Without effect on a prepared folder.
        recorded: `"data"` in the `config.json` of the run, if there is one. Earlier versions ignored some options that
            `build_corpus` refuses, and recorded them. If `data` has the same values, they are ignored here, too.

    Raises:
        ParameterError: `data` names no corpus, or describes it wrongly.
    """
    if data.get("data_dir"):
        return load_corpus(data["data_dir"])
    if not data.get("dataset"):
        message = (
            "no corpus: give data_path, a text, or data_dir, a folder that tools/prepare_data.py prepared, or dataset"
        )
        if data.get("data_path"):
            message = "data_path needs dataset, such as dataset='text'"
        raise ParameterError("data", data, "data_path, data_dir or dataset", message)
    # `by_character` is a property of the corpus that `config.json` records, not an option.
    options = {name: value for name, value in data.items() if name not in ("by_character", "data_dir")}
    if recorded:
        for name in unused_options(TextConfig(**options), vocab):
            if name in recorded and recorded[name] == options[name]:
                del options[name]
    return build_corpus(**options, vocab=vocab, extend_vocab=extend_vocab)


def open_corpus_of_run(folder: RunFolder, data: dict | None = None) -> Corpus:
    """The corpus that a run was trained on, or that of `data`.

    A prepared folder is opened as it is. The setting `raw_text` is that of `data` or, without it, that of the run. If
    the run started from another one, the vocabulary of `folder` is used, and `min_freq` and `max_size` are ignored.
    """
    config = folder.read_config()
    recorded = config["data"]
    data = data or recorded
    if "vocab" in config and data.get("raw_text") is None:
        data = {**data, "raw_text": folder.load_vocab().raw_text}
    if not config.get("init_from"):
        return open_corpus(data, recorded=recorded)
    return open_corpus(without_symbol_choice(data), folder.load_vocab(), recorded=recorded)


def without_symbol_choice(data: dict) -> dict:
    """`data` without the settings that choose the symbols of a vocabulary."""
    return {name: value for name, value in data.items() if name not in ("min_freq", "max_size")}


def encode_text(
    path: str, vocab: Vocab, data: dict, options_of_rows: dict | None = None, argument: str = "eval_path"
) -> tuple[np.ndarray, TextSize]:
    """The ids of a text, of one file or several, in the vocabulary of a run; and its size.

    Args:
        path: the files, as `find_files` takes them.
        vocab: vocabulary of the run.
        data: `"data"` of the `config.json` of the run. If one of the files has rows (JSON or Parquet), the `text_field`
            and `skip_bad_lines` in `data` are used for all files. As in training, a `text_field` means that all files
            except Parquet are read as JSON.
        options_of_rows: `text_field` and `skip_bad_lines` for this text, which replace those of the run. With
            `text_field`, all files count as files with rows.
        argument: name of the argument whose value is `path`, for errors.

    Raises:
        ParameterError: `skip_bad_lines` is given for a text without rows, and no `text_field`.
        ValueError, OSError: the text cannot be read or encoded.
    """
    paths = find_files(path, argument)
    options_of_rows = options_of_rows or {}
    has_rows = "text_field" in options_of_rows or have_documents(paths, vocab.raw_text)
    if not has_rows:
        check_left_out(
            {"skip_bad_lines": options_of_rows.get("skip_bad_lines")}, f"{path} has no rows of JSON or Parquet"
        )
    settings = {**data, **options_of_rows} if has_rows else {}
    return encode_files(paths, vocab, settings.get("text_field"), settings.get("skip_bad_lines", False))


def name_of(data: dict) -> str:
    """The name of a corpus in messages: the value of `data_dir` or, without it, of `dataset`."""
    return data.get("data_dir") or data["dataset"]


def check_documents(name: str, vocab: Vocab) -> None:
    """Raises ParameterError if a vocabulary has no symbol for ends of documents, which the option `name` needs."""
    if vocab.document is None:
        message = f"{name} needs a text of documents, each with its end: JSON lines, or --documents"
        raise ParameterError(name, True, "left out for a text without ends of documents", message)


def reset_token_of(vocab: Vocab, group: type[Config]) -> int | None:
    """The `reset_token` with which a model resets its memory before every document.

    Args:
        vocab: vocabulary of the text.
        group: class of the hyper-parameters of the model.

    Raises:
        ParameterError: the text has no ends of documents, or the model has no `reset_token`.
    """
    name = "reset_memory_at_documents"
    check_documents(name, vocab)
    if "reset_token" not in group.names():
        message = f"{name} is about memory, which --model=transformer does not have: leave it out"
        raise ParameterError(name, True, "left out", message)
    return vocab.document_id


def check_token_nll(path: str | None, folder: RunFolder, data: dict, eval_path: Any = None) -> None:
    """Checks the path of the file for the nll of every token.

    Args:
        path: the path; `None` if there is none.
        folder: folder of the run.
        data: the corpus, as `open_corpus` takes it.
        eval_path: the text that is evaluated instead of the corpus, as `find_files` takes it.

    Raises:
        ParameterError: `path` is a file of the text, the vocabulary, the prepared corpus or a run, or ends as a
            compressed file.
        OSError: `path` cannot be written to.
    """
    if not path:
        return
    read = {"eval_path": eval_path} if eval_path else {name: data.get(name) for name in ("data_path", "vocab_path")}
    overwritten = [name for name, files in read.items() if files and any(same_path(path, f) for f in find_files(files))]
    if data.get("data_dir") and is_part(path, data["data_dir"]):
        overwritten.append("data_dir")
    for name in overwritten:
        allowed = f"another file than {'one of ' if name == 'data_dir' else ''}{name}"
        raise ParameterError("token_nll", path, allowed, f"token_nll must be {allowed}, got {path}")
    check_spares_runs("token_nll", path, folder)
    check_not_packed("token_nll", path)
    check_writable(path)


def token_nll_of_worker(path: str | None, strategy: tf.distribute.Strategy) -> str | None:
    """The path to which this worker writes the nll of every token: `path` for the chief, `os.devnull` for others.

    All workers must evaluate in the same way, so the others write, too. Without a path, the result is `None`.
    """
    return path if not path or is_chief(strategy) else os.devnull


def check_divides(
    strategy: tf.distribute.Strategy, accumulation_steps: int = 1, parallel_parts: int = 1, **batch_size: int
) -> None:
    """Checks that a batch can be divided evenly among the replicas, and on each replica into parts.

    Args:
        strategy: strategy that has the replicas.
        accumulation_steps: `gradient_accumulation_steps`, parts of the rows of a replica.
        parallel_parts: parts of each of these parts.
        **batch_size: exactly one keyword, such as `train_batch_size=64`; errors use its name.

    Raises:
        ParameterError: the batch cannot be divided.
    """
    ((name, rows),) = batch_size.items()
    replicas = strategy.num_replicas_in_sync
    shares = replicas * accumulation_steps * parallel_parts
    if rows % shares:
        among = "1 replica" if replicas == 1 else f"{replicas} replicas"
        if accumulation_steps > 1:
            among += f" times gradient_accumulation_steps={accumulation_steps}"
        if parallel_parts > 1:
            among += f" times parallel_parts={parallel_parts}"
        raise ParameterError(name, rows, f"a multiple of {shares}, for {among}")


def log_model(name: str, corpus: Corpus, lm: LanguageModel, strategy: tf.distribute.Strategy, type_name: str) -> None:
    """Logs the sizes of a corpus and of a language model.

    Args:
        name: name of the corpus.
        corpus, lm: the corpus and the model.
        strategy: strategy that has the replicas.
        type_name: name of the types of the computation, such as "bfloat16", see `MachineConfig.type_name`.
    """
    n_symbol = f"{len(corpus.vocab):,}"
    if [*corpus.splits] == [name]:  # a file, read with the vocabulary of a run
        logger.info("%s: %s tokens; vocabulary: %s symbols", name, f"{len(corpus.splits[name]):,}", n_symbol)
    else:
        sizes = ", ".join(f"{len(tokens):,} {split}" for split, tokens in corpus.splits.items())
        logger.info("%s: %s symbols; tokens: %s", name, n_symbol, sizes)
    replicas = strategy.num_replicas_in_sync
    unit = "replica" if replicas == 1 else "replicas"
    parts = f", parallel_parts={lm.parallel_parts}" if lm.parallel_parts > 1 else ""
    logger.info("model: %s parameters, %s, %d %s%s", f"{lm.count_params():,}", type_name, replicas, unit, parts)


def warn_of_one_cluster(model: Mapping[str, Any]) -> None:
    """Logs a warning if hyper-parameters of clusters have no effect, because the vocabulary is not divided.

    They raise no error, because a text whose vocabulary has no cutoffs accepts the flags of one that has some.

    Args:
        model: hyper-parameters, by name.
    """
    without_effect = {"div_val": 1, "proj_share_all_but_first": False, "proj_same_dim": True}
    unused = [f"{name}={model[name]}" for name, value in without_effect.items() if model.get(name, value) != value]
    if unused and not model.get("cutoffs"):
        logger.warning("%s: no effect without cutoffs, because the vocabulary is one cluster", ", ".join(unused))


class WorkerGone(OSError):
    """A worker has failed or lost the connection to the other workers. A program then ends with the exit status 75.

    75 is EX_TEMPFAIL of sysexits.h: the same command may succeed when it is run again.
    """

    status = 75


@contextlib.contextmanager
def worker_of(strategy: tf.distribute.Strategy, folder: RunFolder) -> Iterator[None]:
    """In this block, only the chief of several workers logs, and a failed collective operation raises `WorkerGone`.

    Such an operation, in which all workers take part, fails if another worker died, or if it fails on this worker.
    With a single worker, the error is raised unchanged.

    Args:
        strategy: strategy that has the workers.
        folder: folder of the run, whose latest checkpoint the message names.
    """
    with only_chief_logs(strategy):
        try:
            yield
        except _COLLECTIVE_FAILED as error:
            if num_workers(strategy) == 1:
                raise
            saved = folder.checkpoints()
            raise WorkerGone(
                f"another worker died, or this one failed ({type(error).__name__}): start all {num_workers(strategy)} "
                "workers again, or another number of workers that divides the batch evenly; they resume from "
                f"{saved[-1] if saved else 'the beginning'}"
            ) from error
