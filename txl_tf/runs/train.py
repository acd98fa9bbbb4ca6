"""Training of a run, from text to a folder of checkpoints and logs."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import sys

import keras
import numpy as np
import tensorflow as tf

from txl_tf.config import EvaluationConfig, MachineConfig, ModelConfig, OptimizerConfig, TrainingConfig, check_bins
from txl_tf.data.text.batches import Segments, choose_bin_capacities, num_batches
from txl_tf.data.text.documents import Documents
from txl_tf.data.vocabulary import visible
from txl_tf.files import check_writable
from txl_tf.models.language_model import LanguageModel
from txl_tf.runs.callbacks import step_of
from txl_tf.runs.evaluate import Evaluator
from txl_tf.runs.folder import RunFolder
from txl_tf.runs.run import Run
from txl_tf.runs.setup import (
    MOST_STEPS_ON_TPU,
    check_divides,
    check_documents,
    log_model,
    name_of,
    open_corpus,
    open_machine,
    reset_token_of,
    worker_of,
)
from txl_tf.runs.trackers import check_tracker
from txl_tf.runs.weights import check_exists
from txl_tf.training.distribution import broadcast_from_chief, is_chief
from txl_tf.training.optimization import make_optimizer

logger = logging.getLogger("txl_tf")

_PROMPT = 32  # tokens that a sample follows


def train_and_evaluate(
    folder: RunFolder | str,
    *,
    data: dict,
    model: ModelConfig,
    optimizer: OptimizerConfig,
    training: TrainingConfig,
    evaluation: EvaluationConfig | None = None,
    machine: MachineConfig | None = None,
) -> dict[str, float]:
    """Trains a language model and evaluates it; everything it leaves behind is in the folder.

    A folder that holds checkpoints is continued from the newest that is whole, exactly: weights, optimizer, memory,
    place in the text, dropout and the sums of the window of steps that was under way. Several workers that train
    together must see the same folder; only the first writes to it and logs.

    Args:
        folder: `RunFolder`, or its path.
        data: `data_dir`, a prepared folder; or the arguments of `build_corpus`.
        model: its class decides the kind of model. Vocabulary and cutoffs are those of the text.
        evaluation: `"valid"` is evaluated in any case, `eval_split` with `do_eval`.

    Returns:
        dict `{split: mean nll in nats}` of the final evaluations.

    Raises:
        ValueError, OSError: bad input, before any long work; the message says what was found and what is allowed. Or
            the training diverged, the disk is full, another worker is gone: the last good checkpoint is named.
        KeyboardInterrupt, SystemExit(0): after Ctrl-C or SIGTERM, once the run is saved.
    """
    evaluation, machine = evaluation or EvaluationConfig(), machine or MachineConfig()
    rows = evaluation.eval_batch_size or training.train_batch_size
    evaluation = dataclasses.replace(evaluation, eval_batch_size=rows, tgt_len=training.tgt_len)
    strategy, machine = open_machine(machine)
    if training.static_shapes is None:
        training = dataclasses.replace(training, static_shapes=isinstance(strategy, tf.distribute.TPUStrategy))
    if data.get("cutoffs"):
        check_bins(sys.maxsize, model.d_embed, data["cutoffs"], model.div_val)
    check_divides(strategy, training.gradient_accumulation_steps, train_batch_size=training.train_batch_size)
    check_divides(strategy, eval_batch_size=evaluation.eval_batch_size)
    if training.warm_start_path:
        check_exists(training.warm_start_path)
    check_tracker(training.tracker)
    check_writable(evaluation.token_nll)
    with strategy.scope():
        keras_optimizer = make_optimizer(train_steps=training.train_steps, **optimizer.to_dict())
    folder, chief = RunFolder(folder), is_chief(strategy)
    with worker_of(strategy, folder), folder.writing() if chief else contextlib.nullcontext():
        keras.utils.set_random_seed(training.seed)
        run = _Run(folder, open_corpus(data), training, machine, strategy)
        run.prepare(evaluation)
        model = run.of_the_text(model)
        config = run.config(data, model, optimizer)
        run.check_same_run(config)
        lm = run.make_lm(model, keras_optimizer)
        log_model(name_of(data), run.corpus, lm, strategy, machine.mixed_precision)
        state = run.restore()
        if chief:
            folder.describe(config, run.corpus.vocabs)
        return run.train(state)


def steps_per_call(most: int, *ends: int) -> int:
    """The most steps, up to `most`, that a call may take so that a call ends at every multiple of each of `ends`."""
    return max(k for k in range(1, most + 1) if math.gcd(*ends) % k == 0)


class _Run(Run):
    """One training of a language model; `train_and_evaluate` calls its methods."""

    remedy = "Choose another folder to train on this text; eval_path evaluates it in the vocabulary of the run"

    def prepare(self, evaluation: EvaluationConfig) -> None:
        if self.training.shuffle_documents:
            check_documents("shuffle_documents", self.corpus.vocab)
        self.evaluator = Evaluator(self.corpus, evaluation)
        self.evaluation, self.metric = evaluation, self.evaluator.metric
        self.splits = list(dict.fromkeys(["valid"] + [evaluation.eval_split] * evaluation.do_eval))

    def of_the_text(self, model: ModelConfig) -> ModelConfig:
        """The hyper-parameters with those that come from the text."""
        vocab = self.corpus.vocab
        found = {"n_token": len(vocab), "cutoffs": self.corpus.cutoffs}
        if self.training.reset_memory_at_documents:
            found["reset_token"] = reset_token_of(vocab, type(model))
        return dataclasses.replace(model, **found)

    def config(self, data: dict, model: ModelConfig, optimizer: OptimizerConfig) -> dict:
        """`config.json`."""
        names = "tgt_len train_batch_size train_steps iterations save_steps static_shapes shuffle_documents seed"
        training = {name: getattr(self.training, name) for name in names.split()}
        training["eval_batch_size"] = self.evaluation.eval_batch_size
        training["mixed_precision"] = self.machine.mixed_precision
        data = {**data, "by_character": self.corpus.by_character}
        return {
            **self.folder.config(data, model.to_dict(), self.corpus.vocabs, self.model_class(model)),
            "training": {**training, **optimizer.to_dict()},
            "fingerprints": self.fingerprints,
        }

    def model_class(self, model: ModelConfig) -> type:
        (found,) = (family.model for family in self.folder.families.values() if family.config is type(model))
        return found

    def make_lm(self, model: ModelConfig, optimizer: keras.optimizers.Optimizer) -> LanguageModel:
        """The compiled model, its optimizer built. Checks first that every split is long enough."""
        for split in self.splits:
            self.evaluator.check(split)
        training, text = self.training, self.corpus.splits["train"]
        rows, static_shapes = training.train_batch_size, training.static_shapes
        num_batches(len(text), rows, training.tgt_len, static_shapes, name="train split")
        bin_capacities = self._bin_capacities(model.cutoffs) if static_shapes else None
        with self.strategy.scope():
            options = {"recompute": training.recompute, "seed": training.seed, "dtype": self.machine.dtype_policy}
            lm = self.model_class(model)(**model.to_dict(), **options)
            lm.compile(
                optimizer,
                jit_compile=training.jit_compile,
                steps_per_execution=training.steps_per_execution or 1,
                gradient_accumulation_steps=training.gradient_accumulation_steps,
                static_shapes=static_shapes,
                bin_capacities=bin_capacities,
            )
        self.use(lm)
        return lm

    def _bin_capacities(self, cutoffs: list[int]) -> list[int]:
        """Of all bins but the first, for static shapes. The chief counts the whole text for all workers."""
        capacities, parts = [0] * len(cutoffs), self.training.gradient_accumulation_steps
        if cutoffs and is_chief(self.strategy):
            rows = self.training.train_batch_size // (self.strategy.num_replicas_in_sync * parts)
            capacities = choose_bin_capacities(self.corpus.splits["train"], rows, self.training.tgt_len, cutoffs)
        return [broadcast_from_chief(self.strategy, capacity) for capacity in capacities]

    def fit(self, state: tuple) -> None:
        training = self.training
        if training.steps_per_execution is None and isinstance(self.strategy, tf.distribute.TPUStrategy):
            ends = training.train_steps, training.iterations, training.save_steps, step_of(self.model)
            self.model.steps_per_execution = steps_per_call(MOST_STEPS_ON_TPU, *ends)
        super().fit(state)

    def batches(self, start: int) -> Segments:
        rows, drop_remainder = self.training.train_batch_size, self.training.static_shapes
        text, documents = self.corpus.splits["train"], None
        if self.training.shuffle_documents:
            documents = Documents(text, self.corpus.vocab.document_id, self.training.seed)
        tgt_len = self.training.tgt_len
        return Segments(text, rows, tgt_len, start, repeat=True, drop_remainder=drop_remainder, documents=documents)

    def validation(self) -> Segments:
        return self.evaluator.batches("valid")

    def tokens_per_step(self) -> float:
        return self.training.train_batch_size * self.training.tgt_len

    def finish(self) -> dict[str, float]:
        """Averaged weights, evaluations and a sample, at the end of the training."""
        lm, chief = self.model, self.checkpoints.write
        self.save_average()
        token_nll = self.evaluation.token_nll if chief else self.evaluation.token_nll and os.devnull
        paths = {split: token_nll if split == self.splits[-1] else None for split in self.splits}
        results = {split: self.evaluator.run(lm, split, path) for split, path in paths.items()}
        self.checkpoints.save_best(results["valid"])
        if self.training.sample_tokens and chief:
            self.sample()
        self.log_end()
        return results

    @property
    def samples(self) -> bool:
        """Not with static shapes, where the graph that writes takes long to compile."""
        return bool(self.training.sample_tokens) and not self.training.static_shapes

    def sample(self) -> None:
        vocab, prompt = self.corpus.vocab, np.array(self.corpus.splits["valid"][:_PROMPT])
        number, seed = self.training.sample_tokens, self.training.seed
        tokens = self.model.generate(prompt[None], number, temperature=0.8, seed=seed)[0]
        title = f"a sample at temperature 0.8, after {vocab.decode(prompt)!r}:"
        text = visible(vocab.decode(tokens[len(prompt) :]))
        logger.info("%s", title)
        logger.info("%s", text)
        self.show_text("sample", f"{title}\n{text}")
