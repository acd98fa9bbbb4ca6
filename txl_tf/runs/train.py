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
from txl_tf.models.language_model import TransformerXLLM
from txl_tf.runs.callbacks import (
    CheckFinite,
    Progress,
    RunState,
    StepCSVLogger,
    StepTensorBoard,
    StopOnSignal,
    Stopped,
    Validate,
    cut_log,
    step_of,
)
from txl_tf.runs.checkpoints import RunCheckpoints
from txl_tf.runs.evaluate import Evaluator
from txl_tf.runs.folder import RunFolder
from txl_tf.runs.setup import check_divides, check_token_nll, log_model, name_of, open_corpus, worker_of
from txl_tf.runs.weights import check_exists, load_weights
from txl_tf.training.distribution import broadcast_from_chief, is_chief, make_strategy
from txl_tf.training.optimization import make_optimizer

logger = logging.getLogger("txl_tf")

_PROMPT = 32  # tokens that a sample follows


def train_and_evaluate(
    model_dir: str,
    *,
    data: dict,
    model: ModelConfig,
    optimizer: OptimizerConfig,
    training: TrainingConfig,
    evaluation: EvaluationConfig | None = None,
    machine: MachineConfig | None = None,
) -> dict[str, float]:
    """Trains a language model and evaluates it; everything it leaves behind is in `model_dir`.

    A folder that holds checkpoints is continued from the newest that is whole, exactly: weights, optimizer, memory,
    place in the text, dropout and the sums of the window of steps that was under way.

    Where several workers train together, all must see the same `model_dir`; only the first writes to it and logs.

    Args:
        model_dir: folder of the run, see `RunFolder`.
        data: `data_dir`, a prepared folder; or the arguments of `build_corpus`.
        model: `ModelConfig`; vocabulary and cutoffs are those of the text.
        optimizer: `OptimizerConfig`.
        training: `TrainingConfig`.
        evaluation: `EvaluationConfig`. `"valid"` is evaluated in any case, `eval_split` with `do_eval`.
        machine: `MachineConfig`.

    Returns:
        dict `{split: mean nll in nats}` of the final evaluations.

    Raises:
        ValueError, OSError: bad input, before any long work; the message says what was found and what is allowed. Or
            the training diverged, the disk is full, another worker is gone: the last good checkpoint is named.
        KeyboardInterrupt, SystemExit(0): after Ctrl-C or SIGTERM, once the run is saved.
    """
    machine, evaluation = machine or MachineConfig(), evaluation or EvaluationConfig()
    eval_batch_size = evaluation.eval_batch_size or training.train_batch_size
    strategy = make_strategy(*machine.devices)
    if training.static_shapes is None:
        training = dataclasses.replace(training, static_shapes=isinstance(strategy, tf.distribute.TPUStrategy))
    _check_before_reading(data, model, training, evaluation, strategy, eval_batch_size)
    with strategy.scope():
        keras_optimizer = make_optimizer(train_steps=training.train_steps, **optimizer.to_dict())
    folder, chief = RunFolder(model_dir), is_chief(strategy)
    with worker_of(strategy, folder), folder.writing() if chief else contextlib.nullcontext():
        keras.utils.set_random_seed(training.seed)
        corpus = open_corpus(data)
        model = dataclasses.replace(model, n_token=len(corpus.vocab), cutoffs=corpus.cutoffs)
        evaluator = Evaluator(corpus, eval_batch_size, training.tgt_len, evaluation.max_eval_batch)
        splits = list(dict.fromkeys(["valid"] + [evaluation.eval_split] * evaluation.do_eval))
        lm = _make_lm(model, keras_optimizer, corpus, evaluator, splits, training, machine, strategy)
        checkpoints = RunCheckpoints(lm, folder, training.max_to_keep, write=chief)
        log_model(name_of(data), corpus, lm, strategy, machine.mixed_precision)

        config = _config_of(data, model, optimizer, training, corpus, eval_batch_size, machine)
        folder.check_same_run({**config, "vocab": corpus.vocab.get_config()})
        state = _restore(checkpoints, lm, training.warm_start_path, strategy)
        if chief:
            folder.describe(config, corpus.vocab)
        _fit(lm, corpus, training, evaluator, checkpoints, state)
        return _finish(lm, corpus, training, evaluation, evaluator, splits, checkpoints)


def _check_before_reading(
    data: dict,
    model: ModelConfig,
    training: TrainingConfig,
    evaluation: EvaluationConfig,
    strategy: tf.distribute.Strategy,
    eval_batch_size: int,
) -> None:
    """Raises ValueError or OSError for what can be told before any text is read."""
    if data.get("cutoffs"):
        check_bins(sys.maxsize, model.d_embed, data["cutoffs"], model.div_val)
    check_divides(strategy, training.gradient_accumulation_steps, train_batch_size=training.train_batch_size)
    check_divides(strategy, eval_batch_size=eval_batch_size)
    if training.warm_start_path:
        check_exists(training.warm_start_path)
    check_token_nll(evaluation.token_nll)


def _make_lm(
    model: ModelConfig,
    optimizer: keras.optimizers.Optimizer,
    corpus: Corpus,
    evaluator: Evaluator,
    splits: list[str],
    training: TrainingConfig,
    machine: MachineConfig,
    strategy: tf.distribute.Strategy,
) -> TransformerXLLM:
    """The compiled model, its optimizer built. Checks first that every split is long enough."""
    for split in splits:
        evaluator.check(split)
    text, static_shapes = corpus.splits["train"], training.static_shapes
    num_batches(len(text), training.train_batch_size, training.tgt_len, static_shapes, name="train split")
    bin_capacities = None
    if static_shapes:
        parts = strategy.num_replicas_in_sync * training.gradient_accumulation_steps
        rows = training.train_batch_size // parts
        bin_capacities = choose_bin_capacities(text, rows, training.tgt_len, corpus.cutoffs) if corpus.cutoffs else []
    with strategy.scope():
        lm = TransformerXLLM(
            **model.to_dict(), recompute=training.recompute, seed=training.seed, dtype=machine.dtype_policy
        )
        lm.compile(
            optimizer,
            jit_compile=training.jit_compile,
            steps_per_execution=training.steps_per_execution,
            gradient_accumulation_steps=training.gradient_accumulation_steps,
            static_shapes=static_shapes,
            bin_capacities=bin_capacities,
        )
        lm.optimizer.build(lm.trainable_variables)  # before it is restored
    return lm


def _config_of(
    data: dict,
    model: ModelConfig,
    optimizer: OptimizerConfig,
    training: TrainingConfig,
    corpus: Corpus,
    eval_batch_size: int,
    machine: MachineConfig,
) -> dict:
    """What `config.json` says, but for the vocabulary."""
    names = "tgt_len train_batch_size train_steps iterations save_steps static_shapes seed"
    kept = {name: getattr(training, name) for name in names.split()}
    kept |= {"eval_batch_size": eval_batch_size, "mixed_precision": machine.mixed_precision}
    return {
        "data": {**data, "by_character": corpus.by_character},
        "model": model.to_dict(),
        "training": {**kept, **optimizer.to_dict()},
    }


def _restore(
    checkpoints: RunCheckpoints, lm: TransformerXLLM, warm_start_path: str | None, strategy: tf.distribute.Strategy
) -> tuple:
    """Sets what a checkpoint of the run, or else the warm start, gives; returns the state to go on with."""
    step = checkpoints.newest_whole()
    step = broadcast_from_chief(strategy, -1 if step is None else step)
    if step >= 0:
        path = checkpoints.folder.checkpoint(step)
        logger.info("continuing from %s", path)
        return checkpoints.restore(path)
    if checkpoints.write:  # what an earlier run left, whose checkpoints are gone
        checkpoints.remove_best()
    if warm_start_path:
        logger.info("starting from the weights of %s", warm_start_path)
        load_weights(lm, warm_start_path)
    return None, None


def _fit(
    lm: TransformerXLLM,
    corpus: Corpus,
    training: TrainingConfig,
    evaluator: Evaluator,
    checkpoints: RunCheckpoints,
    state: tuple,
) -> None:
    """Trains to the last step. A Keras epoch is a window of `iterations` steps, see `RunState`."""
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
    rows, drop_remainder = training.train_batch_size, training.static_shapes
    text = segments(corpus.splits["train"], rows, training.tgt_len, start, repeat=True, drop_remainder=drop_remainder)
    stop = StopOnSignal(lm)
    callbacks = [
        CheckFinite(checkpoints),
        Validate(evaluator.dataset("valid"), stop, training),
        Progress(training, evaluator.metric),
    ]
    if checkpoints.write:
        folder = checkpoints.folder
        mid_window = state[1] is not None
        cut_log(folder.log_file, start - 1 if mid_window else start)
        callbacks.append(StepTensorBoard(folder.path, checkpoints))
        callbacks.append(StepCSVLogger(folder.log_file, evaluator.metric, checkpoints))
    run_state = RunState(checkpoints, state, training, callbacks)
    with stop:
        try:
            lm.fit(
                text,
                initial_epoch=start // training.iterations,
                epochs=math.ceil(training.train_steps / training.iterations),
                steps_per_epoch=training.iterations,
                verbose=0,
                callbacks=[*callbacks, run_state],
            )
        except Stopped:
            run_state.save(mid_window=True)
            saved = f"step {step_of(lm)} is saved as {checkpoints.latest}"
            logger.info("%s: %s; the same command goes on from there", stop.reason, saved)
            raise KeyboardInterrupt if stop.received == signal.SIGINT else SystemExit(0) from None


def _finish(
    lm: TransformerXLLM,
    corpus: Corpus,
    training: TrainingConfig,
    evaluation: EvaluationConfig,
    evaluator: Evaluator,
    splits: list[str],
    checkpoints: RunCheckpoints,
) -> dict[str, float]:
    """Averaged weights, evaluations and a sample, at the end of the training."""
    folder, chief = checkpoints.folder, checkpoints.write
    if getattr(lm.optimizer, "inner_optimizer", lm.optimizer).use_ema:
        if chief:
            folder.ema.save_weights(lm, step_of(lm))
        logger.info("averaged weights: %s (for --eval_ckpt_path)", folder.ema.checkpoint(step_of(lm)))
    token_nll = evaluation.token_nll if chief else evaluation.token_nll and os.devnull
    results = {split: evaluator.run(lm, split, token_nll if split == splits[-1] else None) for split in splits}
    checkpoints.save_best(results["valid"])
    if training.sample_tokens and chief:
        prompt = np.array(corpus.splits["valid"][:_PROMPT])
        text = lm.generate(prompt[None], training.sample_tokens, temperature=0.8, seed=training.seed)[0]
        logger.info("a sample at temperature 0.8, after %r:", corpus.vocab.decode(prompt))
        logger.info("%s", corpus.vocab.decode(text[len(prompt) :]))
    logger.info("the run is in %s: log.csv, checkpoints, curves (tensorboard --logdir=%s)", folder, folder)
    return results
