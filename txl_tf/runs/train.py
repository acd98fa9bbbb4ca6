"""Training of a run of any family, from what it reads to a folder of checkpoints and logs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import os
import signal
from collections.abc import Sequence

import keras
import tensorflow as tf

from txl_tf.config import STRATEGIES, Config, MachineConfig, OptimizerConfig, RunConfig
from txl_tf.data.batching import EpochBatches
from txl_tf.data.vocabulary import UnknownSymbol
from txl_tf.errors import ParameterError
from txl_tf.nn.parts import own_parts
from txl_tf.runs import callbacks, trackers
from txl_tf.runs.callbacks import StopOnSignal, Stopped, step_of
from txl_tf.runs.checkpoints import RunCheckpoints
from txl_tf.runs.families.record import family_of
from txl_tf.runs.folder import RunFolder
from txl_tf.runs.metrics import to_metric
from txl_tf.runs.origin import Origin
from txl_tf.runs.same_run import check_same_run
from txl_tf.runs.setup import open_machine, worker_of
from txl_tf.runs.weights import check_exists, load_weights
from txl_tf.training.distribution import broadcast_from_chief, is_chief, num_workers
from txl_tf.training.optimization import make_optimizer

# In `config.json`, of every family.
RECORDED = ("train_steps", "iterations", "save_steps", "seed", "mixed_precision", "matmul_precision")

logger = logging.getLogger("txl_tf")


def train_run(
    folder: RunFolder | str | os.PathLike,
    *,
    data: Config | dict,
    model: Config,
    optimizer: OptimizerConfig,
    training: RunConfig,
    final: Config | None = None,
    machine: MachineConfig | None = None,
    callbacks: Sequence[keras.callbacks.Callback] = (),
) -> dict:
    """Trains a model and evaluates it; everything it leaves behind is in the folder.

    A folder that holds checkpoints is continued from the newest that is whole, exactly: weights, optimizer, memory,
    place in the data, dropout and the sums of the interval of steps that was under way. Several workers that train
    together must see the same folder; only the first writes to it and logs.

    Args:
        folder: of the run, or its path.
        data: what is read. Of a language model, `{"data_dir": a prepared folder}` or arguments of `build_corpus`; of
            other models their group, such as `PairsConfig`.
        model: its class decides the family. Sizes of vocabularies, cutoffs and labels come from the data.
        training: group of the family, such as `TaggerTrainingConfig`. With `init_from`, `model` must be that of the
            other run, up to what its weights leave `free`, and text is read in its vocabularies.
        final: how the model is evaluated at the end: `EvaluationConfig` of a language model, whose `eval_split` is
            evaluated with `do_eval`, besides "valid"; `SearchConfig` of an encoder-decoder.
        callbacks: given to `fit`, on every worker. An epoch is an interval of `iterations` steps, and `logs` at its end
            is a row of `log.csv`, with `step`. Where a callback sets `stop_training`, the run is saved and the training
            ends. A resumed run calls new callbacks from the epoch of its checkpoint on: checkpoints do not hold their
            state.

    Returns:
        By split, the mean nll in nats: of a token, for a language model; for others `{"loss": mean nll, ...}` with the
        shares of `"lines"` and `"symbols"` that are wrong, where they were translated, or with `"precision"`,
        `"recall"` and `"f1"` of the checkpoint with the best F1 on the sentences to validate on.

    Raises:
        ValueError, OSError: bad input, before any long work; the message says what was found and what is allowed. Or
            the training diverged, the disk is full, another worker is gone: the last good checkpoint is named.
        KeyboardInterrupt, SystemExit(0): after Ctrl-C or SIGTERM, once the run is saved.
    """
    family, machine = family_of(type(model)), machine or MachineConfig()
    if machine.strategy not in family.run.strategies:
        allowed = ", ".join(family.run.strategies)
        raise ValueError(f"strategy must be one of {allowed} for {family.run.kind}, got {machine.strategy}")
    if machine.matmul_precision != "float32" and (training.jit_compile or not family.rounds):
        whose = "XLA's products: leave out jit_compile" if family.rounds else f"{family.name}: its products are Keras's"
        raise ValueError(f"matmul_precision={machine.matmul_precision} has no effect on {whose}")
    folder = RunFolder(folder, family=family)
    if training.warm_start_path and not training.init_from and not folder.steps():
        check_exists(training.warm_start_path)
    trackers.check_tracker(training.tracker)
    check_callbacks(callbacks)
    strategy, machine = open_machine(machine)
    chief = is_chief(strategy)
    final = final or (family.final and family.final())
    origin = Origin(folder, training.init_from) if training.init_from else None
    run = family.run(folder, strategy, data, model, optimizer, training, machine, final, origin, tuple(callbacks))
    if origin:
        origin.check(family, model, training.extend_vocab)
    run.prepare()
    with strategy.scope():
        keras_optimizer = make_optimizer(train_steps=training.train_steps, **optimizer.to_dict())
    with worker_of(strategy, folder), folder.writing() if chief else contextlib.nullcontext():
        keras.utils.set_random_seed(training.seed)
        run.read()
        config = run.config()
        check_same_run(folder, config, run.corpus.vocabs, training, run.remedy)
        run.make_model(keras_optimizer)
        if folder.steps():
            folder.check_parts(run.model)
        parts = own_parts(run.model, of_keras=False)
        config |= {"own_parts": parts} if parts else {}
        state = run.restore()
        if chief:
            folder.describe(config, run.corpus.vocabs)
        return run.train(state)


def check_callbacks(callbacks: Sequence[keras.callbacks.Callback]) -> None:
    """Raises ParameterError unless these are a list or tuple of Keras's callbacks."""
    if not isinstance(callbacks, (list, tuple)):
        raise ParameterError("callbacks", callbacks, "a list of keras.callbacks.Callback")
    for i, callback in enumerate(callbacks):
        if not isinstance(callback, keras.callbacks.Callback):
            raise ParameterError(f"callbacks[{i}]", callback, "a keras.callbacks.Callback")


@dataclasses.dataclass
class Run:
    """One training. The subclass of a family says how data are read and batched, and how the model is evaluated:

        open_corpus()       the data: `splits`, `vocabs`, `fingerprint(split)`
        from_data()         the hyper-parameters that the data decides; ValueError where the data does not fit
        batches(start)      what `fit` takes: the batches to train on from that of step `start` on, forever
        validation()        what `evaluate` takes
        tokens_per_step()   how many tokens a step predicts, in the mean
        finish()            the evaluations at the end: returns what they found, by split

    Attributes:
        kind: what a message calls the models.
        remedy: ends the message where the vocabulary of the data is another than that of the run.
        metric: name of what the loss is shown as besides nats: "ppl" or "bpc".
        samples: whether `sample` is called at every validation.
        validated: names of what is measured in validation alone.
        own_callbacks: callbacks of the tracker and of the user.
    """

    folder: RunFolder
    strategy: tf.distribute.Strategy
    data: Config | dict
    model_config: Config
    optimizer: OptimizerConfig
    training: RunConfig
    machine: MachineConfig
    final: Config | None = None
    origin: Origin | None = None
    own_callbacks: tuple[keras.callbacks.Callback, ...] = ()

    kind, remedy, metric = "language models", "", "ppl"
    strategies, samples, validated = STRATEGIES, False, ()

    # --------------------------------------------------------------------------------- what subclasses may say, too

    def prepare(self) -> None:
        """Completes the settings. Raises ValueError where they do not fit each other, or the machine."""

    def options(self) -> tuple[dict, dict]:
        """Further options of the model and of its `compile`."""
        return {}, {}

    @property
    def anew(self) -> tuple[str, ...]:
        """How the names of those weights begin that are not taken from the run that this one starts from."""
        return ()

    def start(self) -> None:
        """Sets initial weights that come from the data, where there are such."""

    def log_model(self) -> None:
        """Says what is trained, and on what."""

    @property
    def metrics(self) -> list[str]:
        """Names of what is measured in training and in validation, besides the loss."""
        return [self.metric, *(metric.name for metric in self.model.metrics if metric.name == "accuracy")]

    def show(self, logs: dict, prefix: str) -> str:
        """The measurements as a line of progress; adds the loss as `metric` to the logs. See `Progress`."""
        logs[prefix + self.metric] = to_metric(logs[prefix + "loss"], self.metric)
        line = f"loss {logs[prefix + 'loss']:.4f} | {self.metric} {logs[prefix + self.metric]:.3f}"
        return line + (f" | {logs[prefix + 'accuracy']:.2%} right" if prefix + "accuracy" in logs else "")

    def sample(self) -> None:
        """Shows what the model writes as it is, see `show_text`. It must not touch the state of the training."""

    # ---------------------------------------------------------------------------------- in the order of their calls

    def read(self) -> None:
        """Reads the data, and completes the hyper-parameters with those that it decides."""
        try:
            self.corpus = self.open_corpus()
        except UnknownSymbol as error:
            if not self.origin:
                raise
            raise ValueError(
                f"{error}: it is that of init_from={self.origin.path}. Leave such symbols out of the text, or start "
                "from a run with an unknown symbol, as min_freq=2 gives it; or extend_vocab adds them to the vocabulary"
            ) from error
        self.fingerprints = {split: self.corpus.fingerprint(split) for split in self.corpus.splits}
        self.model_config = dataclasses.replace(self.model_config, **self.from_data())

    def config(self) -> dict:
        """`config.json`."""
        family, settings = self.folder.family, {}
        for group in (self.machine, self.final, self.training):
            settings |= group.to_dict() if group else {}
        recorded = *family.batching, *RECORDED, *family.recorded
        return {
            **family.describe(self.data_config(), self.model_config.to_dict(), self.corpus.vocabs),
            "training": {**{name: settings[name] for name in recorded}, **self.measured(), **self.optimizer.to_dict()},
            "fingerprints": self.fingerprints,
            **({"init_from": self.origin.record(self.training)} if self.origin else {}),
        }

    def data_config(self) -> dict:
        """`"data"` of `config.json`."""
        return self.data.to_dict()

    def measured(self) -> dict:
        """What `"training"` of `config.json` says of the data, besides settings."""
        return {}

    def make_model(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Makes the model, its optimizer built, and prepares its checkpoints."""
        training, policy = self.training, self.machine.dtype_policy
        of_model, of_compile = self.options()
        with self.strategy.scope():
            model = self.folder.family.make(**self.model_config.to_dict(), seed=training.seed, dtype=policy, **of_model)
            steps = training.steps_per_execution or 1
            model.compile(optimizer, jit_compile=training.jit_compile, steps_per_execution=steps, **of_compile)
        self.model = model
        self.start()
        with self.strategy.scope():
            model.optimizer.build(model.trainable_variables)  # before it is restored
        write, text = is_chief(self.strategy), self.fingerprints["valid"]
        self.checkpoints = RunCheckpoints(model, self.folder, training.max_to_keep, write, text)
        self.board = callbacks.StepTensorBoard(self.folder.path, self.checkpoints)
        self.board.set_model(model)
        self.log_model()

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
        if self.origin:
            self.origin.load(self.model, self.model_config, self.training, self.final, self.anew)
        elif self.training.warm_start_path:
            logger.info("starting from the weights of %s", self.training.warm_start_path)
            load_weights(self.model, self.training.warm_start_path)
        self.model.inner_optimizer.start_average(self.model.trainable_variables)
        return None, None

    def train(self, state: tuple) -> dict:
        """`fit`, then the evaluations at the end, whose results it returns; the tracker is given both."""
        with trackers.tracked(self.training, self.checkpoints, step_of(self.model)) as tracked:
            self.own_callbacks = (*tracked.callbacks, *self.own_callbacks)
            self.fit(state)
            self.save_average()
            results = self.finish()
            folder = self.folder
            logger.info("the run is in %s: log.csv, checkpoints, curves (tensorboard --logdir=%s)", folder, folder)
            tracked.log_results(trackers.final(results))
        return results

    def show_text(self, name: str, text: str) -> None:
        """Shows a text in TensorBoard, at the step that is done. Only the chief does so."""
        if self.checkpoints.write:
            self.board.log_text(name, text, step_of(self.model))

    def sample_if_validated(self, epoch: int, logs: dict) -> None:
        """At the end of an interval of steps with a validation."""
        if "val_loss" in logs:
            self.sample()

    def fit(self, state: tuple) -> None:
        """Trains to the last step. A Keras epoch is an interval of `iterations` steps, see `RunState`."""
        model, training, checkpoints = self.model, self.training, self.checkpoints
        start = step_of(model)
        stops_early = state[1] is None and checkpoints.stops_early(training, start)  # else a validation is yet to come
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
            callbacks.Validate(self.validation(), stop, training, checkpoints),
            callbacks.Progress(training, self.show, self.tokens_per_step()),
        ]
        if checkpoints.write:
            log_file, metrics, validated = self.folder.log_file, self.metrics, self.validated
            callbacks.cut_log(log_file, start if state[1] is None else start - 1, metrics, validated)
            if self.samples:
                followers.append(keras.callbacks.LambdaCallback(on_epoch_end=self.sample_if_validated))
            csv_logger = callbacks.StepCSVLogger(log_file, metrics, checkpoints, validated)
            followers += [self.board, csv_logger]
        followers += self.own_callbacks  # when the logs of an epoch are complete
        run_state = callbacks.RunState(checkpoints, state, training, followers)
        first = keras.callbacks.LambdaCallback(on_epoch_end=run_state.before_epoch_end)
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
                    callbacks=[first, *followers, run_state],
                )
            except Stopped:
                run_state.save(mid_interval=True)
                stopped = True
            if stopped or stop.received:  # perhaps after the last step
                saved = f"step {step_of(model)} is saved as {checkpoints.latest}"
                logger.info("%s: %s; the same command goes on from there", stop.reason, saved)
                raise KeyboardInterrupt if stop.received == signal.SIGINT else SystemExit(0)

    def record_validation(self, found: dict[str, float]) -> None:
        """Adds the validation after the last step to the curves, and keeps the weights if it is the best.

        Args:
            found: what `evaluate` of the model returned.

        Raises:
            ValueError: the loss is not finite. The checkpoint of the last step is deleted.
        """
        self.checkpoints.check_validation(found["loss"])
        logs = {f"val_{name}": value for name, value in found.items()}
        self.show(logs, "val_")
        if self.checkpoints.write:
            with self.checkpoints.naming_last():
                missing = callbacks.complete_log(self.folder.log_file, step_of(self.model), logs)
            if missing:
                self.board.on_epoch_end(None, logs)
        self.checkpoints.save_best(logs[self.folder.family.monitor])

    def save_average(self) -> None:
        """Writes the moving average of the weights, if there is one; the end of `fit` has put it in their place."""
        if not getattr(self.model.optimizer, "inner_optimizer", self.model.optimizer).use_ema:
            return
        step = step_of(self.model)
        self.checkpoints.check_weights()
        if self.checkpoints.write:
            self.folder.ema.save_weights(self.model, step)
        logger.info(
            "averaged weights: %s (for --ckpt_path, of train.py --eval_ckpt_path)", self.folder.ema.checkpoint(step)
        )


class EpochRun(Run):
    """Training of a model that Keras's own `fit` trains; its batches are `EpochBatches`.

    A subclass has `batches_of(split, seed=None)`, the batches of a split in an order by the seed or by length. Each of
    several workers makes whole batches, of which the model takes the worker's rows.
    """

    strategies = ("auto", "one", "mirrored", "multi_worker")

    def prepare(self) -> None:
        """Raises ValueError for what fails on several devices: XLA; of one machine, several steps a call."""
        replicas, training = self.strategy.num_replicas_in_sync, self.training
        where = f"for {self.kind} on several devices, got {replicas}"
        if replicas > 1 and training.jit_compile:
            raise ValueError(f"jit_compile must be left out {where}")
        if replicas > 1 == num_workers(self.strategy) and (training.steps_per_execution or 1) > 1:
            raise ValueError(f"steps_per_execution must be left out {where}")

    @functools.cached_property
    def train_batches(self) -> EpochBatches:
        return self.batches_of("train", self.training.seed)

    def batches(self, start: int) -> tf.data.Dataset:
        return self.train_batches.dataset(start, repeat=True)

    def validation(self) -> tf.data.Dataset:
        return self.batches_of("valid").dataset()

    def evaluate(self, split: str) -> dict[str, float]:
        """The metrics of the model on a split."""
        found = self.model.evaluate(self.batches_of(split).dataset(), verbose=0, return_dict=True)
        return {name: float(value) for name, value in found.items()}

    @property
    def held_out(self) -> list[str]:
        """The splits to evaluate."""
        return [split for split in self.corpus.splits if split != "train"]
