"""What the training of every kind of model has in common: the same run, restoring, `fit`, signals, the end."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import signal
from typing import Any

import keras
import tensorflow as tf

from txl_tf.config import MachineConfig, RunConfig
from txl_tf.data.text.batches import Segments
from txl_tf.runs import callbacks
from txl_tf.runs.callbacks import StopOnSignal, Stopped, step_of
from txl_tf.runs.checkpoints import RunCheckpoints
from txl_tf.runs.evaluate import to_metric
from txl_tf.runs.folder import RunFolder
from txl_tf.runs.trackers import final, make_tracker
from txl_tf.runs.weights import load_weights
from txl_tf.training.distribution import broadcast_from_chief, is_chief

# A warm start may change them.
NOT_IN_WEIGHTS = ("mem_len", "same_length", "clamp_len", "layer_norm_epsilon", "reset_token")

logger = logging.getLogger("txl_tf")


@dataclasses.dataclass
class Run:
    """One training. A subclass makes the model and says what it is trained on.

    Attributes:
        corpus: has `splits`, `vocabs` and `fingerprint(split)`.
        metric: name of what the loss is shown as besides nats: "ppl" or "bpc".
    """

    folder: RunFolder
    corpus: Any
    training: RunConfig
    machine: MachineConfig
    strategy: tf.distribute.Strategy

    metric = "ppl"
    samples = False  # whether `sample` is called at every validation
    validated = ()  # what is measured in validation alone
    remedy = "Choose another folder to train on this text"  # where its vocabulary is another

    def __post_init__(self):
        self.fingerprints = {split: self.corpus.fingerprint(split) for split in self.corpus.splits}

    # ------------------------------------------------------------------------------------------- what subclasses say

    def batches(self, start: int) -> tf.data.Dataset | Segments:
        """The batches to train on, from that of step `start` on, forever."""
        raise NotImplementedError

    def validation(self) -> tf.data.Dataset | Segments:
        """The batches to validate on."""
        raise NotImplementedError

    def tokens_per_step(self) -> float:
        """How many tokens a step predicts, in the mean."""
        raise NotImplementedError

    @property
    def metrics(self) -> list[str]:
        """Names of what is measured in training and in validation, besides the loss."""
        return [self.metric, *(metric.name for metric in self.model.metrics if metric.name == "accuracy")]

    def show(self, logs: dict, prefix: str) -> str:
        """What was measured, for a line of progress; adds the loss as `metric` to the logs. See `Progress`."""
        logs[prefix + self.metric] = to_metric(logs[prefix + "loss"], self.metric)
        line = f"loss {logs[prefix + 'loss']:.4f} | {self.metric} {logs[prefix + self.metric]:.3f}"
        return line + (f" | {logs[prefix + 'accuracy']:.2%} right" if prefix + "accuracy" in logs else "")

    def sample(self) -> None:
        """Shows what the model writes as it is, see `show_text`. It must not touch the state of the training."""

    def finish(self, *options: Any) -> dict:
        """Averaged weights and evaluations, at the end of the training; by split."""
        raise NotImplementedError

    # ---------------------------------------------------------------------------------- in the order of their calls

    def use(self, model: keras.Model) -> None:
        """Takes the compiled model to train, builds its optimizer, and prepares its checkpoints."""
        with self.strategy.scope():
            model.optimizer.build(model.trainable_variables)  # before it is restored
        write, text = is_chief(self.strategy), self.fingerprints["valid"]
        self.model, self.checkpoints = model, RunCheckpoints(model, self.folder, self.training.max_to_keep, write, text)
        self.board = callbacks.StepTensorBoard(self.folder.path, self.checkpoints)
        self.board.set_model(model)

    def check_same_run(self, config: dict) -> None:
        """Raises ValueError where the folder holds checkpoints of another vocabulary, configuration or text."""
        folder, warm_start_path = self.folder, self.training.warm_start_path
        if folder.steps():
            folder.check_vocab(self.corpus.vocabs, self.remedy)
            folder.check_same_run(config)
            if not self.training.allow_other_text:
                trained_on = {split: self.fingerprints[split] for split in ("train", "valid")}
                folder.check_text(trained_on, "choose another folder, or go on with --allow_other_text")
        elif warm_start_path:
            parent = os.path.dirname(warm_start_path)
            if os.path.basename(parent) in ("best", "ema"):
                parent = os.path.dirname(parent)
            source = type(folder)(parent)
            if source.has_config():
                source.check_vocab(self.corpus.vocabs, self.remedy)
                before, now = source.read_config()["model"], config["model"]
                names = [name for name in NOT_IN_WEIGHTS if before.get(name, now.get(name)) != now.get(name)]
                if names:
                    was, has = (", ".join(f"{name}={model[name]}" for name in names) for model in (before, now))
                    logger.warning("%s has %s; this run has %s", parent, was, has)

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
            load_weights(self.model, self.training.warm_start_path)
        return None, None

    def train(self, state: tuple, *options: Any) -> dict:
        """`fit(state)`, then `finish(*options)`, whose results it returns; the tracker follows both."""
        with make_tracker(self.training, self.checkpoints, step_of(self.model)) as self.tracker:
            self.fit(state)
            results = self.finish(*options)
            self.tracker.log_results(final(results))
        return results

    def show_text(self, name: str, text: str) -> None:
        """Shows a text in TensorBoard and in the tracker, at the step that is done. Only the chief calls it."""
        step = step_of(self.model)
        self.board.log_text(name, text, step)
        self.tracker.log_text(name, text, step)

    def sample_if_validated(self, epoch: int, logs: dict) -> None:
        """At the end of a window of steps with a validation."""
        if "val_loss" in logs:
            self.sample()

    def fit(self, state: tuple) -> None:
        """Trains to the last step. A Keras epoch is a window of `iterations` steps, see `RunState`."""
        model, training, checkpoints = self.model, self.training, self.checkpoints
        start = step_of(model)
        stops_early = self.folder.stops_early(training, start // training.save_steps * training.save_steps)
        if stops_early or start >= training.train_steps:
            why = f"no better F1 for patience={training.patience} steps" if stops_early else f"{start} steps"
            logger.info("already trained: %s, train_steps=%d", why, training.train_steps)
            model.optimizer.finalize_variable_values(model.trainable_variables)  # the average, as at the end of `fit`
            return
        if start % model.steps_per_execution:
            raise ValueError(
                f"steps_per_execution={model.steps_per_execution} must divide the step to go on from, {start}: "
                "take one that does"
            )
        stop = StopOnSignal(model)
        followers = [
            callbacks.CheckFinite(checkpoints),
            callbacks.Validate(self.validation(), stop, training),
            callbacks.Progress(training, self.show, self.tokens_per_step()),
        ]
        if checkpoints.write:
            log_file, metrics, validated = self.folder.log_file, self.metrics, self.validated
            callbacks.cut_log(log_file, start if state[1] is None else start - 1, metrics, validated)
            if self.samples:
                followers.append(keras.callbacks.LambdaCallback(on_epoch_end=self.sample_if_validated))
            csv_logger = callbacks.StepCSVLogger(log_file, metrics, checkpoints, validated)
            followers += [self.board, csv_logger, self.tracker]
        run_state = callbacks.RunState(checkpoints, state, training, followers)
        stopped = False
        with stop:
            try:
                model.fit(
                    self.batches(start),
                    initial_epoch=start // training.iterations,
                    epochs=math.ceil(training.train_steps / training.iterations),
                    steps_per_epoch=training.iterations,
                    shuffle=False,
                    verbose=0,
                    callbacks=[*followers, run_state],
                )
            except Stopped:
                run_state.save(mid_window=True)
                stopped = True
            if stopped or stop.received:  # perhaps after the last step
                saved = f"step {step_of(model)} is saved as {checkpoints.latest}"
                logger.info("%s: %s; the same command goes on from there", stop.reason, saved)
                raise KeyboardInterrupt if stop.received == signal.SIGINT else SystemExit(0)

    def save_average(self) -> None:
        """Writes the moving average of the weights, if there is one; the end of `fit` has put it in their place."""
        if not getattr(self.model.optimizer, "inner_optimizer", self.model.optimizer).use_ema:
            return
        step = step_of(self.model)
        if self.checkpoints.write:
            self.folder.ema.save_weights(self.model, step)
        logger.info("averaged weights: %s (for --eval_ckpt_path)", self.folder.ema.checkpoint(step))

    def log_end(self) -> None:
        folder = self.folder
        logger.info("the run is in %s: log.csv, checkpoints, curves (tensorboard --logdir=%s)", folder, folder)
