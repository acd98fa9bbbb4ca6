"""Evaluation: the mean nll of a split of a corpus or of a text file, and the metrics in which it is reported."""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from txl_tf.config import Config, EvaluationConfig, MachineConfig, TrainingConfig, at_least, check_position_count
from txl_tf.data.text.batches import Segments, num_batches
from txl_tf.data.text.corpus import Corpus
from txl_tf.data.text.datasets import is_by_character_in, measured
from txl_tf.data.vocabulary import Vocab, escape
from txl_tf.errors import ParameterError
from txl_tf.files import new_file
from txl_tf.kernels.precision import set_matmul_precision
from txl_tf.language.language_model import LanguageModel
from txl_tf.language.sliding_window import sliding_window_nll
from txl_tf.runs.folder import RunFolder
from txl_tf.runs.metrics import metric_of, to_metric
from txl_tf.runs.same_run import check_same_on_workers, check_text, check_vocab
from txl_tf.runs.setup import (
    MOST_STEPS_ON_TPU,
    ROW_BY_ROW,
    check_divides,
    check_token_nll,
    encode_text,
    log_model,
    name_of,
    open_corpus,
    open_corpus_of_run,
    open_machine,
    reset_token_of,
    token_nll_of_worker,
    warn_of_one_cluster,
    worker_of,
)
from txl_tf.runs.weights import CheckpointReader, load_weights
from txl_tf.training.distribution import is_default, num_workers
from txl_tf.training.threads import choose_parallel_parts, choose_threads

logger = logging.getLogger("txl_tf")


def evaluate_run(
    folder: RunFolder | str,
    *,
    data: dict | None = None,
    model: dict | None = None,
    evaluation: EvaluationConfig | None = None,
    machine: MachineConfig | None = None,
    reading: dict | None = None,
) -> dict[str, float]:
    """Evaluates a checkpoint on a split of a corpus, or on a text file.

    It sets TensorFlow's threads for the rest of the process, if TensorFlow has not started, see `choose_threads`.

    Args:
        folder: `RunFolder`, or its path. Without a `config.json`, `model` must have all hyper-parameters that have no
            defaults, except `n_token` and `cutoffs`, which come from the corpus.
        data: the corpus, as in `train_run`; if empty, the text that the run was trained on.
        model: arguments of the model that replace those of the run, such as `mem_len`.
        evaluation: how to evaluate. Sizes that it does not give are those of the training, or else defaults.
        machine: devices and types.
        reading: `text_field` and `skip_bad_lines` for reading `evaluation.eval_path`, which replace those of the run.

    Returns:
        `{split or eval_path: mean nll in nats}`.

    Raises:
        ParameterError, ValueError, OSError: bad input, before any long work.
        OSError: the file for `token_nll` cannot be written, or another worker died.
    """
    machine = machine or MachineConfig()
    folder = RunFolder(folder, "language_model")
    config = folder.read_config() if folder.has_config() else {"data": {}, "model": {}}
    evaluation, assumed_sizes = _with_sizes(evaluation or EvaluationConfig(), config.get("training", {}))
    tgt_len, rows = sizes_of(evaluation)
    check_token_nll(evaluation.token_nll, folder, data or config["data"], evaluation.eval_path)
    folder.find_checkpoint(evaluation.eval_ckpt_path)  # raises before the text is read
    strategy, machine = open_machine(machine)
    check_divides(strategy, eval_batch_size=rows)
    if evaluation.eval_path:
        corpus = _text_as_corpus(folder, config, evaluation.eval_path, reading)
        split = evaluation.eval_path
    else:
        corpus = _open_and_check_corpus(folder, config, data)
        split = evaluation.eval_split
    evaluator = Evaluator(corpus, evaluation)
    evaluator.check(split)
    if not (evaluation.eval_path or data):  # the text that the run was trained on
        remedy = "to evaluate the changed text, give it by data_dir, data_path or eval_path"
        check_text(folder, {split: corpus.fingerprint(split)}, remedy)
    arguments = {
        "n_token": len(corpus.vocab),
        "cutoffs": corpus.cutoffs,
        **config["model"],
        **_reset_token_setting(evaluation, corpus.vocab, folder.family.config),
        **(model or {}),  # the caller's values win
    }
    check_position_count(arguments, tgt_len=tgt_len, sliding_window=evaluation.sliding_window or 0)
    if num_workers(strategy) > 1:
        checkpoint = os.path.basename(folder.find_checkpoint(evaluation.eval_ckpt_path))
        settings = {
            "family": folder.family.name,
            "checkpoint": checkpoint,
            **{f"model.{name}": value for name, value in arguments.items()},
            **_shared_settings(evaluation, machine),
            "fingerprints.vocab": corpus.vocab.fingerprint()[:16],
            "fingerprints.text": corpus.fingerprint(split)[:16],
        }
        texts = {name: value for name, value in (data or config["data"]).items() if name in folder.family.paths}
        with worker_of(strategy, folder):
            check_same_on_workers(folder, strategy, settings, {"eval_path": evaluation.eval_path, **texts})
    on_tpu = isinstance(strategy, tf.distribute.TPUStrategy)
    parts = _choose_parallel_parts(evaluation, evaluator, split, strategy, folder.family.config)
    set_matmul_precision(machine.matmul_precision)

    def load(path: str) -> tuple[LanguageModel, str]:
        """Makes and compiles the model with the weights of a checkpoint. Returns the model and `path`."""
        reader = CheckpointReader(path)
        folder.check_size(arguments, reader)
        with strategy.scope():
            lm: Any = folder.family.make(**arguments, dtype=machine.dtype_policy)
            lm.compile(
                static_shapes=on_tpu, steps_per_execution=MOST_STEPS_ON_TPU if on_tpu else 1, parallel_parts=parts
            )
        load_weights(lm, reader)
        return lm, path

    lm, path = folder.with_checkpoint(evaluation.eval_ckpt_path, load, "eval_ckpt_path")
    with worker_of(strategy, folder):
        name = evaluation.eval_path or name_of(data or config["data"])
        log_model(name, corpus, lm, strategy, machine.type_name)
        warn_of_one_cluster(arguments)
        if assumed_sizes:
            values = ", ".join(f"{name} {value}" for name, value in assumed_sizes.items())
            logger.info("%s does not record %s; the defaults: %s", folder, ", ".join(assumed_sizes), values)
        logger.info("checkpoint: %s; evaluating it: %s", folder.name_of(path), evaluator.describe(lm))
        token_nll = token_nll_of_worker(evaluation.token_nll, strategy)
        return {split: evaluator.run(lm, split, token_nll)["loss"]}


def _shared_settings(evaluation: EvaluationConfig, machine: MachineConfig) -> dict[str, Any]:
    """The settings, by name, that several workers must have in common. The paths of files may differ."""
    settings = {name: getattr(machine, name) for name in ("mixed_precision", "matmul_precision")}
    settings |= evaluation.to_dict() | {"token_nll": bool(evaluation.token_nll)}
    return {name: value for name, value in settings.items() if name not in ("eval_path", "eval_ckpt_path")}


def _with_sizes(evaluation: EvaluationConfig, trained: dict) -> tuple[EvaluationConfig, dict]:
    """Completes the sizes that an evaluation does not give.

    Args:
        evaluation: how to evaluate.
        trained: `"training"` of `config.json`.

    Returns:
        `(evaluation, assumed_sizes)`: the evaluation with sizes, those of the training if it records them; and the
        sizes that are neither given nor recorded, with their default values.
    """
    defaults = {"tgt_len": TrainingConfig.tgt_len, "eval_batch_size": TrainingConfig.train_batch_size}
    missing = [name for name in defaults if not getattr(evaluation, name)]
    assumed_sizes = {name: defaults[name] for name in missing if not trained.get(name)}
    recorded_sizes = {name: trained[name] for name in missing if name not in assumed_sizes}
    return dataclasses.replace(evaluation, **assumed_sizes, **recorded_sizes), assumed_sizes


def _choose_parallel_parts(
    evaluation: EvaluationConfig, evaluator: Evaluator, split: str, strategy: tf.distribute.Strategy, group: type
) -> int:
    """The `parallel_parts` of the evaluation: the given number or, on one processor, the fastest. Sets the threads.

    Args:
        group: the class of the model's hyper-parameters.

    Raises:
        ParameterError: a number is given for an evaluation that computes no parts.
    """
    given = evaluation.parallel_parts
    whole = [name for name in ("sliding_window", "token_nll") if getattr(evaluation, name)]
    if isinstance(strategy, tf.distribute.TPUStrategy):
        whole.append("strategy=tpu")
    if whole:
        if (given or 1) > 1:
            raise ParameterError("parallel_parts", given, f"1 with {whole[0]}")
        return 1
    check_divides(strategy, parallel_parts=given or 1, eval_batch_size=evaluator.batch_size)

    def fastest() -> int:
        if not is_default(strategy) or group not in ROW_BY_ROW:
            return 1
        return choose_parallel_parts(evaluator.batch_size, evaluator.num_labels(split))

    return choose_threads(given, fastest)


def _reset_token_setting(evaluation: EvaluationConfig, vocab: Vocab, group: type[Config]) -> dict[str, int | None]:
    """The `reset_token` of the model as `{"reset_token": id or None}`; `{}` to evaluate with the one of the run.

    Args:
        evaluation: `reset_memory_at_documents` says whether there is a `reset_token`. If it is `None`, the result is
            `{}`.
        vocab: vocabulary of the text.
        group: class of the hyper-parameters of the model.
    """
    if evaluation.reset_memory_at_documents is None:
        return {}
    return {"reset_token": reset_token_of(vocab, group) if evaluation.reset_memory_at_documents else None}


def _text_as_corpus(folder: RunFolder, config: dict, eval_path: str, reading: dict | None) -> Corpus:
    """A text file in the vocabulary of the run, as a corpus of one split."""
    if "vocab" not in config:
        message = f"eval_path needs the vocabulary of a run: {folder.config_file} does not exist"
        raise ParameterError("eval_path", eval_path, "left out for a folder without config.json", message)
    vocab = folder.load_vocab()
    data = config["data"]
    tokens, size = encode_text(eval_path, vocab, data, reading)
    note = vocab.note_on_unknown(int(np.sum(tokens == vocab.unk_id)), len(tokens), eval_path)
    if note:
        logger.warning(note)
    sizes = measured(data.get("dataset"), {eval_path: size})
    by_character = is_by_character_in(data, vocab)
    return Corpus(vocab, config["model"].get("cutoffs", []), {eval_path: tokens}, by_character, sizes=sizes)


def _open_and_check_corpus(folder: RunFolder, config: dict, data: dict | None) -> Corpus:
    """The corpus of `data`; if `data` is empty, the corpus that the run was trained on.

    Raises:
        ParameterError: neither names a text, or the vocabulary of the corpus is not that of the run.
    """
    data = data or config["data"]
    if not (data.get("data_dir") or data.get("data_path") or data.get("dataset") == "pydoc"):
        message = "no text to evaluate: give data_dir, dataset with its data_path, or eval_path"
        raise ParameterError("data", data, "data_dir, data_path or eval_path", message)
    corpus = open_corpus_of_run(folder, data) if folder.has_config() else open_corpus(data)
    if "vocab" in config:
        check_vocab(folder, [corpus.vocab], "eval_path evaluates a text in the vocabulary of the run")
    return corpus


def sizes_of(evaluation: EvaluationConfig) -> tuple[int, int]:
    """`(tgt_len, eval_batch_size)` of an evaluation. Raises ParameterError unless both are positive integers."""
    for name in ("tgt_len", "eval_batch_size"):
        at_least(1)(name, getattr(evaluation, name))
    return evaluation.tgt_len or 0, evaluation.eval_batch_size or 0


class Evaluator:
    """Evaluates the splits of a corpus, all in the same way.

    Args:
        corpus: the corpus.
        evaluation: how to evaluate, with `tgt_len` and `eval_batch_size`.

    Attributes:
        metric: `"bpc"`, bits per character or byte, if tokens are characters or bytes; else `"ppl"`, perplexity.
        max_batches: the most batches to evaluate; `None` for all.
    """

    def __init__(self, corpus: Corpus, evaluation: EvaluationConfig):
        self.corpus = corpus
        self.sliding_window = evaluation.sliding_window
        self.tgt_len, self.batch_size = sizes_of(evaluation)
        self.sliding_step = evaluation.sliding_step
        self.max_batches = None if evaluation.max_eval_batch < 0 else evaluation.max_eval_batch
        self.eval_path = evaluation.eval_path
        self.metric = metric_of(corpus.by_character)

    def check(self, split: str) -> None:
        """Raises ParameterError if the corpus has no such split, or if the split is too short for a batch."""
        if split not in self.corpus.splits:
            raise ParameterError("eval_split", split, list(self.corpus.splits))
        name = split if split == self.eval_path else f"the {split} split"
        num_batches(len(self.corpus.splits[split]), self.batch_size, self.tgt_len, name=name, rows="eval_batch_size")

    def batches(self, split: str) -> Segments:
        """The batches to evaluate."""
        return Segments(self.corpus.splits[split], self.batch_size, self.tgt_len, most=self.max_batches)

    def describe(self, lm: LanguageModel) -> str:
        """A few words on how a model is evaluated, for messages."""
        if self.sliding_window:
            return f"sliding window {self.sliding_window}, step {self.sliding_step}, batch {self.batch_size}"
        return f"tgt_len {self.tgt_len}, mem_len {lm.network.mem_len}, batch {self.batch_size}"

    def run(self, lm: LanguageModel, split: str, token_nll: str | None = None) -> dict[str, float]:
        """Evaluates a language model, and logs the loss. Returns the results: `"loss"`, and metrics of the user's own.

        Args:
            lm: the model, compiled.
            split: name of the split.
            token_nll: path of a file to write, with the nll of every predicted token. Its lines have the token and its
                nll in nats, separated by a tab. The tokens are in the order of the text, one row of the batches after
                the other.
        """
        started = time.perf_counter()
        verbose = 1 if sys.stdout.isatty() and logger.isEnabledFor(logging.INFO) else 0
        if self.sliding_window or token_nll:
            score = self._slide if self.sliding_window else self._score
            labels, values = score(lm, split, verbose)
            results = {"loss": float(values.mean(dtype=np.float64))}
            count = len(values)
            if token_nll:
                self._write(token_nll, labels, values)
        else:
            results = lm.evaluate(self.batches(split), verbose=verbose, return_dict=True)
            count = self.num_labels(split)
        nll = results["loss"]
        rate = count / (time.perf_counter() - started)
        figures = f"loss {nll:.6f} nats | {self.metric} {to_metric(nll, self.metric):.4f}"
        logger.info("%s: %s | %s tokens | %s tokens/s", split, figures, f"{count:,}", f"{rate:,.0f}")
        if split in self.corpus.sizes:
            logger.info("%s: %s", split, self._by_text(nll, split))
        return results

    def num_labels(self, split: str) -> int:
        """The number of tokens that the batches predict."""
        labels = len(self.corpus.splits[split]) // self.batch_size - 1  # of a row
        return self.batch_size * (min(labels, self.max_batches * self.tgt_len) if self.max_batches else labels)

    def _score(self, lm: LanguageModel, split: str, verbose: int) -> tuple[np.ndarray, np.ndarray]:
        """The predicted tokens of a split, row by row, and the nll of each in nats: two arrays `[number of tokens]`."""
        dataset = self.batches(split).dataset()
        mems = None
        columns = []
        progress = keras.utils.Progbar(int(dataset.cardinality()), verbose=verbose)
        for tokens, labels in dataset:
            nll, mems = lm.score(tokens, labels, mems)
            columns.append((labels.numpy(), nll.numpy()))
            progress.add(1)
        labels, values = zip(*columns, strict=True)  # arrays [rows, tokens of a segment]
        return np.concatenate(labels, 1).ravel(), np.concatenate(values, 1).ravel()

    def _slide(self, lm: LanguageModel, split: str, verbose: int) -> tuple[np.ndarray, np.ndarray]:
        """The predicted tokens of a split, and the nll of each in nats with a sliding window: two arrays `[n - 1]`.

        The split is read as one text of n tokens. At most as many are predicted as by `max_batches` batches.
        `batch_size` windows are computed at a time.
        """
        n_tokens = self.max_batches * self.batch_size * self.tgt_len + 1 if self.max_batches else None
        tokens = np.asarray(self.corpus.splits[split][:n_tokens])
        bar = keras.utils.Progbar(len(tokens) - 1, verbose=verbose, unit_name="token")
        window: Any = self.sliding_window
        nll = sliding_window_nll(lm, tokens, window, self.batch_size, self.sliding_step, progress=bar.add)
        bar.add(min(window, len(nll)))  # the first window, which `sliding_window_nll` does not count
        return tokens[1:], nll

    def _write(self, path: str, labels: np.ndarray, nll: np.ndarray) -> None:
        """Writes the file `token_nll` of `run`."""
        symbols = [escape(symbol) for symbol in self.corpus.vocab.symbols]
        with new_file(path) as file:
            for label, value in zip(labels, nll, strict=True):
                file.write(f"{symbols[label]}\t{value:.6f}\n")

    def _by_text(self, nll: float, split: str) -> str:
        """Bits per byte and per character of a split, as text; at levels "word" and "subword" also perplexity per word.

        These numbers can be compared between different vocabularies. All tokens of the split are assumed to have the
        mean `nll`, even if only some of them were evaluated.
        """
        total_nll = nll * len(self.corpus.splits[split])
        per_byte, per_character, per_word = (total_nll / max(n, 1) for n in self.corpus.sizes[split])
        bits = (
            f"bits per byte {to_metric(per_byte, 'bpc'):.4f} | bits per character {to_metric(per_character, 'bpc'):.4f}"
        )
        return bits if self.corpus.by_character else f"{bits} | ppl per word {to_metric(per_word, 'ppl'):.2f}"
