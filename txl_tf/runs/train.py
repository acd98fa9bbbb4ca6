"""Training of a run, from text to a folder of checkpoints and logs."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import signal
import sys

import keras
import numpy as np
import tensorflow as tf

from txl_tf.config import EvaluationConfig, MachineConfig, ModelConfig, OptimizerConfig, TrainingConfig, check_bins
from txl_tf.data.batches import choose_bin_capacities, num_batches, segments
from txl_tf.data.corpus import Corpus
from txl_tf.data.vocabulary import visible
from txl_tf.files import check_writable
from txl_tf.models.language_model import TransformerXLLM
from txl_tf.runs import callbacks
from txl_tf.runs.callbacks import StopOnSignal, Stopped, step_of
from txl_tf.runs.checkpoints import RunCheckpoints
from txl_tf.runs.evaluate import Evaluator
from txl_tf.runs.folder import RunFolder
from txl_tf.runs.setup import check_divides, log_model, name_of, open_corpus, worker_of
from txl_tf.runs.weights import check_exists, load_weights
from txl_tf.training.distribution import broadcast_from_chief, is_chief, make_strategy
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
        model: vocabulary and cutoffs are those of the text.
        evaluation: `"valid"` is evaluated in any case, `eval_split` with `do_eval`.

    Returns:
        dict `{split: mean nll in nats}` of the final evaluations.

    Raises:
        ValueError, OSError: bad input, before any long work; the message says what was found and what is allowed. Or
            the training diverged, the disk is full, another worker is gone: the last good checkpoint is named.
        KeyboardInterrupt, SystemExit(0): after Ctrl-C or SIGTERM, once the run is saved.
    """
    evaluation, machine = evaluation or EvaluationConfig(), machine or MachineConfig()
    evaluation = dataclasses.replace(
        evaluation, eval_batch_size=evaluation.eval_batch_size or training.train_batch_size, tgt_len=training.tgt_len
    )
    strategy = make_strategy(*machine.devices)
    if training.static_shapes is None:
        training = dataclasses.replace(training, static_shapes=isinstance(strategy, tf.distribute.TPUStrategy))
    if data.get("cutoffs"):
        check_bins(sys.maxsize, model.d_embed, data["cutoffs"], model.div_val)
    check_divides(strategy, training.gradient_accumulation_steps, train_batch_size=training.train_batch_size)
    check_divides(strategy, eval_batch_size=evaluation.eval_batch_size)
    if training.warm_start_path:
        check_exists(training.warm_start_path)
    check_writable(evaluation.token_nll)
    with strategy.scope():
        keras_optimizer = make_optimizer(train_steps=training.train_steps, **optimizer.to_dict())
    folder, chief = RunFolder(folder), is_chief(strategy)
    with worker_of(strategy, folder), folder.writing() if chief else contextlib.nullcontext():
        keras.utils.set_random_seed(training.seed)
        run = _Run(folder, open_corpus(data), training, evaluation, machine, strategy)
        model = dataclasses.replace(model, n_token=len(run.corpus.vocab), cutoffs=run.corpus.cutoffs)
        config = run.config(data, model, optimizer)
        run.check_same_run(config)
        lm = run.make_lm(model, keras_optimizer)
        log_model(name_of(data), run.corpus, lm, strategy, machine.mixed_precision)
        state = run.restore()
        if chief:
            folder.describe(config, run.corpus.vocab)
        run.fit(state)
        return run.finish()


@dataclasses.dataclass
class _Run:
    """One training. `train_and_evaluate` calls the methods in the order in which they stand here."""

    folder: RunFolder
    corpus: Corpus
    training: TrainingConfig
    evaluation: EvaluationConfig
    machine: MachineConfig
    strategy: tf.distribute.Strategy

    def __post_init__(self):
        self.evaluator = Evaluator(self.corpus, self.evaluation)
        self.fingerprints = {split: self.corpus.fingerprint(split) for split in self.corpus.splits}
        self.splits = list(dict.fromkeys(["valid"] + [self.evaluation.eval_split] * self.evaluation.do_eval))

    def make_lm(self, model: ModelConfig, optimizer: keras.optimizers.Optimizer) -> TransformerXLLM:
        """The compiled model, its optimizer built. Checks first that every split is long enough."""
        for split in self.splits:
            self.evaluator.check(split)
        training, text = self.training, self.corpus.splits["train"]
        rows, static_shapes = training.train_batch_size, training.static_shapes
        num_batches(len(text), rows, training.tgt_len, static_shapes, name="train split")
        bin_capacities = None
        if static_shapes:
            rows //= self.strategy.num_replicas_in_sync * training.gradient_accumulation_steps
            bin_capacities = choose_bin_capacities(text, rows, training.tgt_len, model.cutoffs) if model.cutoffs else []
        with self.strategy.scope():
            options = {"recompute": training.recompute, "seed": training.seed, "dtype": self.machine.dtype_policy}
            self.lm = lm = TransformerXLLM(**model.to_dict(), **options)
            lm.compile(
                optimizer,
                jit_compile=training.jit_compile,
                steps_per_execution=training.steps_per_execution,
                gradient_accumulation_steps=training.gradient_accumulation_steps,
                static_shapes=static_shapes,
                bin_capacities=bin_capacities,
            )
            lm.optimizer.build(lm.trainable_variables)  # before it is restored
        write, text = is_chief(self.strategy), self.fingerprints["valid"]
        self.checkpoints = RunCheckpoints(lm, self.folder, training.max_to_keep, write, text)
        return lm

    def config(self, data: dict, model: ModelConfig, optimizer: OptimizerConfig) -> dict:
        """`config.json`."""
        names = "tgt_len train_batch_size train_steps iterations save_steps static_shapes seed"
        training = {name: getattr(self.training, name) for name in names.split()}
        training["eval_batch_size"] = self.evaluation.eval_batch_size
        training["mixed_precision"] = self.machine.mixed_precision
        return {
            "data": {**data, "by_character": self.corpus.by_character},
            "model": model.to_dict(),
            "vocab": self.corpus.vocab.get_config(),
            "training": {**training, **optimizer.to_dict()},
            "fingerprints": self.fingerprints,
        }

    def check_same_run(self, config: dict) -> None:
        """Raises ValueError where the folder holds checkpoints of another vocabulary, configuration or text."""
        folder, warm_start_path = self.folder, self.training.warm_start_path
        if folder.steps():
            folder.check_vocab(self.corpus.vocab)
            folder.check_same_run(config)
            if not self.training.allow_other_text:
                trained_on = {split: self.fingerprints[split] for split in ("train", "valid")}
                folder.check_text(trained_on, "choose another folder, or go on with --allow_other_text")
        elif warm_start_path:
            parent = os.path.dirname(warm_start_path)
            if os.path.basename(parent) in ("best", "ema"):
                parent = os.path.dirname(parent)
            source = RunFolder(parent)
            if source.has_config():
                source.check_vocab(self.corpus.vocab)

    def restore(self) -> tuple:
        """Sets what a checkpoint of the run, or else the warm start, gives; returns the state to go on with."""
        step = self.checkpoints.newest_whole()
        step = broadcast_from_chief(self.strategy, -1 if step is None else step)
        if step >= 0:
            path = self.folder.checkpoint(step)
            logger.info("continuing from %s", path)
            return self.checkpoints.restore(path)
        if self.checkpoints.write:  # what an earlier run left, whose checkpoints are gone
            self.checkpoints.remove_best()
        if self.training.warm_start_path:
            logger.info("starting from the weights of %s", self.training.warm_start_path)
            load_weights(self.lm, self.training.warm_start_path)
        return None, None

    def fit(self, state: tuple) -> None:
        """Trains to the last step. A Keras epoch is a window of `iterations` steps, see `RunState`."""
        lm, training, metric, checkpoints = self.lm, self.training, self.evaluator.metric, self.checkpoints
        start = step_of(lm)
        if start >= training.train_steps:
            logger.info("already trained: %d steps, train_steps=%d", start, training.train_steps)
            lm.optimizer.finalize_variable_values(lm.trainable_variables)  # the moving average, as at the end of `fit`
            return
        if start % lm.steps_per_execution:
            raise ValueError(
                f"steps_per_execution={lm.steps_per_execution} must divide the step to go on from, {start}: "
                "take one that does"
            )
        rows, text = training.train_batch_size, self.corpus.splits["train"]
        batches = segments(text, rows, training.tgt_len, start, repeat=True, drop_remainder=training.static_shapes)
        stop = StopOnSignal(lm)
        followers = [
            callbacks.CheckFinite(checkpoints),
            callbacks.Validate(self.evaluator.dataset("valid"), stop, training),
            callbacks.Progress(training, metric),
        ]
        if checkpoints.write:
            callbacks.cut_log(self.folder.log_file, start if state[1] is None else start - 1, metric)
            followers.append(callbacks.StepTensorBoard(self.folder.path, checkpoints))
            followers.append(callbacks.StepCSVLogger(self.folder.log_file, metric, checkpoints))
        run_state = callbacks.RunState(checkpoints, state, training, followers)
        stopped = False
        with stop:
            try:
                lm.fit(
                    batches,
                    initial_epoch=start // training.iterations,
                    epochs=math.ceil(training.train_steps / training.iterations),
                    steps_per_epoch=training.iterations,
                    verbose=0,
                    callbacks=[*followers, run_state],
                )
            except Stopped:
                run_state.save(mid_window=True)
                stopped = True
            if stopped or stop.received:  # perhaps after the last step
                saved = f"step {step_of(lm)} is saved as {checkpoints.latest}"
                logger.info("%s: %s; the same command goes on from there", stop.reason, saved)
                raise KeyboardInterrupt if stop.received == signal.SIGINT else SystemExit(0)

    def finish(self) -> dict[str, float]:
        """Averaged weights, evaluations and a sample, at the end of the training."""
        lm, corpus, folder, chief = self.lm, self.corpus, self.folder, self.checkpoints.write
        if getattr(lm.optimizer, "inner_optimizer", lm.optimizer).use_ema:
            if chief:
                folder.ema.save_weights(lm, step_of(lm))
            logger.info("averaged weights: %s (for --eval_ckpt_path)", folder.ema.checkpoint(step_of(lm)))
        token_nll = self.evaluation.token_nll if chief else self.evaluation.token_nll and os.devnull
        paths = {split: token_nll if split == self.splits[-1] else None for split in self.splits}
        results = {split: self.evaluator.run(lm, split, path) for split, path in paths.items()}
        self.checkpoints.save_best(results["valid"])
        if self.training.sample_tokens and chief:
            prompt = np.array(corpus.splits["valid"][:_PROMPT])
            text = lm.generate(prompt[None], self.training.sample_tokens, temperature=0.8, seed=self.training.seed)[0]
            logger.info("a sample at temperature 0.8, after %r:", corpus.vocab.decode(prompt))
            logger.info("%s", visible(corpus.vocab.decode(text[len(prompt) :])))
        logger.info("the run is in %s: log.csv, checkpoints, curves (tensorboard --logdir=%s)", folder, folder)
        return results
