"""Trains a run of any family, from the data to a folder with checkpoints and logs."""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import functools
import logging
import math
import os
import signal
from collections.abc import Sequence
from typing import Any, ClassVar

import keras
import tensorflow as tf

from txl_tf.config import STRATEGIES, Config, MachineConfig, OptimizerConfig, RunConfig, already_checked
from txl_tf.data.batching import EpochBatches
from txl_tf.data.vocabulary import UnknownSymbol
from txl_tf.errors import ParameterError
from txl_tf.kernels.precision import set_matmul_precision
from txl_tf.nn.parts import own_parts
from txl_tf.runs import trackers
from txl_tf.runs.callbacks import (
    CheckFinite,
    Progress,
    RunState,
    StepCSVLogger,
    StepTensorBoard,
    StopOnSignal,
    Stopped,
    Validate,
    complete_log,
    cut_log,
)
from txl_tf.runs.checkpoints import Resumed, RunCheckpoints, step_of
from txl_tf.runs.families.record import Family, family_of
from txl_tf.runs.folder import RunFolder
from txl_tf.runs.metrics import to_metric
from txl_tf.runs.origin import Origin
from txl_tf.runs.same_run import check_same_on_workers, check_same_run
from txl_tf.runs.setup import open_machine, worker_of
from txl_tf.runs.weights import check_exists, load_weights
from txl_tf.training.distribution import broadcast_from_chief, is_chief, num_workers
from txl_tf.training.optimization import make_optimizer
from txl_tf.training.schedules import schedule_of

# Settings of the training that `config.json` records for every family, so that a run can resume from its folder alone.
RECORDED = (
    "train_steps",
    "iterations",
    "save_steps",
    "patience",
    "max_to_keep",
    "seed",
    "jit_compile",
    "extend_vocab",
    "freeze",
    "tracker",
    "tracker_project",
    "mixed_precision",
    "matmul_precision",
)

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
    """Trains a model and evaluates it. All files are written to the folder of the run.

    If the folder contains checkpoints, the training resumes exactly from the newest one that is complete: weights,
    optimizer, memory, position in the data, dropout masks, and the sums of the current interval of steps are as if it
    had not been interrupted. Several workers that train together must see the same folder. Only the first of them, the
    chief, writes to it and logs. If TensorFlow has not started, a language model sets its threads for the rest of the
    process, see `choose_threads`.

    Args:
        folder: the folder of the run, or its path.
        data: the data: of a language model `{"data_dir": a prepared folder}` or arguments of `build_corpus`; of other
            models their group, such as `PairsConfig`.
        model: the hyper-parameters. Their class decides the family. Sizes of vocabularies, cutoffs and labels come from
            the data. With `init_from`, they must be those of the other run, except those that are `free`.
        optimizer: the optimizer.
        training: settings of the training, of the group of the family, such as `TaggerTrainingConfig`. With
            `init_from`, the text is read with the vocabularies of the other run.
        final: the evaluation at the end: of a language model an `EvaluationConfig`, whose `eval_split` is evaluated
            besides "valid" with `do_eval`; of an encoder-decoder a `SearchConfig`.
        machine: devices and types.
        callbacks: callbacks of Keras for `fit`, called on every worker. An epoch is an interval of `iterations` steps,
            and `logs` at its end is a row of `log.csv`, with `step`. If a callback sets `stop_training`, the run is
            saved and the training ends. A resumed run calls new callbacks from the epoch of its checkpoint on:
            checkpoints do not contain their state.

    Returns:
        `{split: result}`. The result of a language model is the mean nll of a token in nats. That of other models is
        `{"loss": mean nll, ...}`: of an encoder-decoder with the shares of wrong `"lines"` and `"symbols"`, if sources
        were translated; of a tagger with `"precision"`, `"recall"` and `"f1"`, or with `"accuracy"` and `"f1"` for tags
        that mark no entities. The results of a tagger are those of the checkpoint with the best F1 in validation.

    Raises:
        ParameterError, OSError: bad input, before any long work. All workers raise MisfitError if one of them has other
            settings or another text than the chief.
        ValueError, OSError: the training has diverged, the disk is full, or another worker died. The message names
            the last good checkpoint.
        KeyboardInterrupt: after Ctrl-C, when the run is saved.
        SystemExit(0): after SIGTERM, SIGHUP or a signal to another worker, when the run is saved.
    """
    family = family_of(type(model))
    machine = machine or MachineConfig()
    _check_machine(family, machine, training)
    folder = RunFolder(folder, family=family)
    # A resumed run does not read `warm_start_path`. With `init_from`, it may be a name, which `Origin` looks up.
    if training.warm_start_path and not training.init_from and not folder.steps():
        check_exists(training.warm_start_path)
    trackers.check_tracker(training.tracker)
    check_callbacks(callbacks)
    strategy, machine = open_machine(machine)
    chief = is_chief(strategy)
    final = final or (family.final and family.final())
    origin = Origin(folder, training.init_from) if training.init_from else None
    run = family.run(
        folder=folder,
        strategy=strategy,
        data=data,
        model_config=model,
        optimizer=optimizer,
        training=training,
        machine=machine,
        final=final,
        origin=origin,
        own_callbacks=tuple(callbacks),
    )
    if origin:
        origin.check(family, model, training.extend_vocab)
    run.prepare()
    schedule_of(optimizer, training.train_steps)  # checks the numbers of steps
    with worker_of(strategy, folder), folder.locked() if chief else contextlib.nullcontext():
        keras.utils.set_random_seed(training.seed)
        run.read()
        if num_workers(strategy) > 1:
            check_same_on_workers(folder, strategy, *run.shared())
        run.choose_threads()  # before TensorFlow starts: the next two calls start it
        set_matmul_precision(machine.matmul_precision)
        product_dtype = machine.mixed_precision if optimizer.optimizer == "muon" else None
        with strategy.scope():
            keras_optimizer = make_optimizer(
                train_steps=training.train_steps, product_dtype=product_dtype, **optimizer.to_dict()
            )
        config = run.config()
        check_same_run(folder, config, run.corpus.vocabs, training, run.remedy)
        run.make_model(keras_optimizer)
        if folder.steps():
            folder.check_parts(run.model)
        if parts := own_parts(run.model, count_keras=False):
            config["own_parts"] = parts
        state = run.restore()
        if chief:
            folder.write_config(config, run.corpus.vocabs)
        return run.train(state)


def _check_machine(family: Family, machine: MachineConfig, training: RunConfig) -> None:
    """Raises ParameterError if the models of the family cannot be trained with this strategy or `matmul_precision`."""
    if machine.strategy not in family.run.strategies:
        allowed = list(family.run.strategies)
        message = f"strategy must be one of {', '.join(allowed)} for {family.run.kind}, got {machine.strategy}"
        raise ParameterError("strategy", machine.strategy, allowed, message)
    if machine.matmul_precision != "float32" and (training.jit_compile or not family.rounds):
        whose = "XLA's products: leave out jit_compile" if family.rounds else f"{family.name}: its products are Keras's"
        message = f"matmul_precision={machine.matmul_precision} has no effect on {whose}"
        raise ParameterError("matmul_precision", machine.matmul_precision, ["float32"], message)


def freeze_layers(model: keras.Model, patterns: Sequence[str]) -> None:
    """Freezes the layers of a model whose names match one of the patterns, such as "layer_*".

    Raises:
        ParameterError: a pattern matches no layer. The message lists the names of all layers.
    """
    layers = list(model._flatten_layers(include_self=False))
    for pattern in patterns:
        matching = [layer for layer in layers if fnmatch.fnmatchcase(layer.name, pattern)]
        if not matching:
            names = [*dict.fromkeys(layer.name for layer in layers)]
            message = f"freeze must name layers of the model, got {pattern!r}. They are {', '.join(names)}"
            raise ParameterError("freeze", pattern, names, message)
        for layer in matching:
            layer.trainable = False


def check_callbacks(callbacks: Sequence[keras.callbacks.Callback]) -> None:
    """Raises ParameterError unless the value is a list or tuple of Keras callbacks."""
    if not isinstance(callbacks, (list, tuple)):
        raise ParameterError("callbacks", callbacks, "a list of keras.callbacks.Callback")
    for i, callback in enumerate(callbacks):
        if not isinstance(callback, keras.callbacks.Callback):
            raise ParameterError(f"callbacks[{i}]", callback, "a keras.callbacks.Callback")


@dataclasses.dataclass
class Run:
    """One training run. `train_run` makes it, and calls its methods in this order:

        prepare         completes the settings
        read            reads the data; calls `open_corpus` and `from_data`
        shared          returns what all workers must have in common; only called with several workers
        choose_threads  sets TensorFlow's threads
        config          returns the content of `config.json`
        make_model      calls `options`, `start` and `log_model`
        restore         sets the weights
        train           calls `fit`, which calls `validation` and `batches`, and then `finish`

    The subclass of a task defines how data are read and batched, and how the model is evaluated. It must define the
    methods of the first section, and may override those of the second.

    Args: see `train_run`, and
        strategy: strategy of the devices.
        model_config: the hyper-parameters.
        origin: the run that this one starts from, or `None`.
        own_callbacks: callbacks of the user. `train` adds those of the tracker.

    Attributes:
        corpus: the data, from `read` on.
        fingerprints: `{split: fingerprint}` of the data, from `read` on. Equal data have equal fingerprints.
        model: the model, from `make_model` on.
        checkpoints: the checkpoints of the run, from `make_model` on.
        board: writer of curves and texts for TensorBoard, from `make_model` on.
        kind: what messages call the models; every task defines it.
        remedy: end of the message about data with another vocabulary than that of the run.
        strategies: values of `strategy` with which the models can be trained.
    """

    folder: RunFolder
    strategy: tf.distribute.Strategy
    data: Any  # of the classes that the record of the family names, as are the settings below
    model_config: Any
    optimizer: OptimizerConfig
    training: Any
    machine: MachineConfig
    final: Any = None
    origin: Origin | None = None
    own_callbacks: tuple[keras.callbacks.Callback, ...] = ()

    corpus: Any = dataclasses.field(init=False)
    fingerprints: dict[str, str] = dataclasses.field(init=False)
    model: Any = dataclasses.field(init=False)
    checkpoints: RunCheckpoints = dataclasses.field(init=False)
    board: StepTensorBoard = dataclasses.field(init=False)

    kind: ClassVar[str]
    remedy = ""
    strategies: ClassVar[Sequence[str]] = STRATEGIES

    # --------------------------------------------------------------------------------------- what subclasses define

    def open_corpus(self) -> Any:
        """Reads the data. Returns an object with `splits`, `vocabs` and `fingerprint(split)`."""
        raise NotImplementedError

    def from_data(self) -> dict[str, Any]:
        """`{name: value}` of the hyper-parameters that the data decides.

        Raises ParameterError if the data does not fit the model.
        """
        raise NotImplementedError

    def batches(self, start: int) -> Any:
        """The batches to train on, as `fit` takes them, without end. The first batch is for the step after `start`."""
        raise NotImplementedError

    def validation(self) -> Any:
        """The batches to validate on, as `evaluate` takes them."""
        raise NotImplementedError

    def tokens_per_step(self) -> float:
        """The mean number of tokens that a step predicts."""
        raise NotImplementedError

    def finish(self) -> dict[str, Any]:
        """Evaluates the trained model: `{split: result}`."""
        raise NotImplementedError

    # --------------------------------------------------------------------------------- what subclasses may override

    def prepare(self) -> None:
        """Completes the settings before the data is read.

        Raises ParameterError if settings do not fit each other or the machine.
        """

    @property
    def recorded_data(self) -> dict | None:
        """`"data"` of the run's `config.json`; `None` for a new run."""
        return self.folder.read_config()["data"] if self.folder.steps() and self.folder.has_config() else None

    def data_config(self) -> dict:
        """The value of `"data"` in `config.json`."""
        return self.data.to_dict()

    def measured(self) -> dict:
        """`{name: value}` of the properties of the data that `"training"` of `config.json` records besides settings."""
        return {}

    def choose_threads(self) -> None:
        """Sets TensorFlow's threads, from what is known about the model once the data is read."""

    def options(self) -> tuple[dict, dict]:
        """`(model_arguments, compile_arguments)`: additional arguments of the model, and of its `compile`, by name."""
        return {}, {}

    @property
    def new_weights(self) -> tuple[str, ...]:
        """Beginnings of the names of weights that are not taken from `origin`."""
        return ()

    def start(self) -> None:
        """Sets initial weights that come from the data. `restore` may replace them."""

    def log_model(self) -> None:
        """Logs the sizes of the model and of the data."""

    @property
    def samples(self) -> bool:
        """Whether `sample` is called after every validation."""
        return False

    @property
    def validation_metrics(self) -> Sequence[str]:
        """Names of the metrics that only validations have."""
        return ()

    @property
    def metric(self) -> str | None:
        """Unit in which the loss is logged besides nats, "ppl" or "bpc"; `None` for no other unit."""
        return None

    @property
    def metrics(self) -> Sequence[str]:
        """Names of the metrics of training and validation, besides the loss."""
        return [self.metric] if self.metric else []

    def as_text(self, logs: dict, prefix: str) -> str:
        """The loss, in nats and in the unit `metric`, and the metrics in `logs` as text.

        Args:
            logs: `{name: value}`.
            prefix: beginning of the names to use: "" for training, "val_" for validation.
        """
        loss = logs[prefix + "loss"]
        line = f"loss {loss:.4f}"
        return f"{line} | {self.metric} {to_metric(loss, self.metric):.3f}" if self.metric else line

    def sample(self) -> None:
        """Logs and records text that the model generates. It must not change the state of the training."""

    # ----------------------------------------------------- what train_run calls, besides prepare and choose_threads

    def read(self) -> None:
        """Reads the data, and completes the hyper-parameters with those that the data decides.

        Raises:
            ParameterError: the data is wrong; or, with `init_from`, it has a symbol that the other run's vocabulary
                does not have, and there is no unknown symbol.
        """
        try:
            self.corpus = self.open_corpus()
        except UnknownSymbol as error:
            if not self.origin:
                raise
            message = (
                f"{error}: init_from={self.origin.path} has this vocabulary. Leave such symbols out of the text, or "
                "start from a run with an unknown symbol, which min_freq=2 makes; or add them to the vocabulary by "
                "extend_vocab"
            )
            allowed = "a run whose vocabulary has the symbols of the text"
            raise ParameterError("init_from", self.origin.path, allowed, message) from error
        self.fingerprints = {split: self.corpus.fingerprint(split) for split in self.corpus.splits}
        settings = self.from_data()
        # `replace` makes a new group, which checks all its values. Only the new ones need it.
        with already_checked(type(self.model_config), self.model_config):
            self.model_config = dataclasses.replace(self.model_config, **settings)

    def shared(self) -> tuple[dict, dict]:
        """What several workers must have in common: `(settings, paths)` of `check_same_on_workers`.

        Of the checkpoint from which a new run starts, only the name must be equal, because the workers may have its
        folder at different paths.
        """
        family = self.folder.family
        training = {name: getattr(self.machine, name) for name in ("mixed_precision", "matmul_precision")}
        for group in (self.final, self.training, self.optimizer):
            training |= group.to_dict() if group else {}
        training |= {
            "warm_start_path": os.path.basename(self.training.warm_start_path or ""),
            "init_from": os.path.basename(self.origin.record(self.training)["checkpoint"]) if self.origin else "",
            "token_nll": bool(training.get("token_nll")),
        }
        vocabs = dict(zip(family.vocabs, self.corpus.vocabs, strict=True))
        fingerprints = {**self.fingerprints, **{name: vocab.fingerprint() for name, vocab in vocabs.items()}}
        data = self.data_config()
        # The fingerprints show whether the content of these files is the same.
        paths = (*family.paths, "source_symbols", "target_symbols")
        groups = {
            "data": {name: value for name, value in data.items() if name not in paths},
            "model": self.model_config.to_dict(),
            "training": {name: value for name, value in training.items() if name not in ("tracker", "tracker_project")},
            "fingerprints": {name: value[:16] for name, value in fingerprints.items()},
        }
        settings = {f"{group}.{name}": value for group, values in groups.items() for name, value in values.items()}
        of_data = {f"data.{name}": data[name] for name in paths if data.get(name)}
        return {"family": family.name, **settings}, of_data

    def config(self) -> dict:
        """The content of `config.json`."""
        family = self.folder.family
        settings = {}
        for group in (self.machine, self.final, self.training):  # if two have a setting, that of the training counts
            settings |= group.to_dict() if group else {}
        recorded = *family.batching, *RECORDED, *family.recorded
        return {
            **family.config_content(self.data_config(), self.model_config.to_dict(), self.corpus.vocabs),
            "training": {**{name: settings[name] for name in recorded}, **self.measured(), **self.optimizer.to_dict()},
            "fingerprints": self.fingerprints,
            **({"init_from": self.origin.record(self.training)} if self.origin else {}),
        }

    def make_model(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Makes and compiles the model, builds its optimizer, and prepares its checkpoints and TensorBoard."""
        training = self.training
        policy = self.machine.dtype_policy
        model_arguments, compile_arguments = self.options()
        with self.strategy.scope(), already_checked(type(self.model_config), self.model_config):
            arguments = self.model_config.to_dict()
            model: Any = self.folder.family.make(**arguments, seed=training.seed, dtype=policy, **model_arguments)
            freeze_layers(model, training.freeze or ())
            steps = training.steps_per_execution or 1
            model.compile(optimizer, jit_compile=training.jit_compile, steps_per_execution=steps, **compile_arguments)
        self.model = model
        self.start()
        with self.strategy.scope():
            model.optimizer.build(model.trainable_variables)  # its variables must exist before they are restored
        self.checkpoints = RunCheckpoints(
            model, self.folder, training.max_to_keep, is_chief(self.strategy), text=self.fingerprints["valid"]
        )
        self.board = StepTensorBoard(self.folder.path, self.checkpoints)
        self.board.set_model(model)
        self.log_model()

    def restore(self) -> Resumed:
        """Sets the weights from the newest checkpoint of the run, or else from `origin` or from `warm_start_path`.

        Returns the other state of the training, which is empty if it does not resume.
        """
        step = self.checkpoints.newest_whole()
        # All workers take the chief's checkpoint. Only integers can be sent, so -1 stands for `None`.
        step = broadcast_from_chief(self.strategy, -1 if step is None else step)
        if step >= 0:
            path = self.folder.checkpoint(step)
            logger.info("continuing from %s", path)
            if self.training.warm_start_path:
                logger.warning("warm_start_path=%s is for a new run: it is not read", self.training.warm_start_path)
            return self.checkpoints.restore(path)
        if self.checkpoints.writes:  # an earlier run, which has no checkpoints any more, may have left its best weights
            self.checkpoints.remove_best()
        if self.origin:
            self.origin.load(self.model, self.model_config, self.training, self.final, self.new_weights)
        elif self.training.warm_start_path:
            logger.info("starting from the weights of %s", self.training.warm_start_path)
            load_weights(self.model, self.training.warm_start_path, check_finite=True)
        self.model.inner_optimizer.start_average(self.model.trainable_variables)
        return Resumed()

    def train(self, state: Resumed) -> dict:
        """Trains and evaluates the model. Returns the results of `finish`, which the tracker gets, too.

        Args:
            state: result of `restore`.
        """
        with trackers.tracked(self.training, self.checkpoints, step_of(self.model)) as tracked:
            self.own_callbacks = (*tracked.callbacks, *self.own_callbacks)
            self.fit(state)
            self.save_average()
            results = self.finish()
            folder = self.folder
            logger.info("the run is in %s: log.csv, checkpoints, curves (tensorboard --logdir=%s)", folder, folder)
            self.log_best()
            tracked.log_results(trackers.final(results))
        return results

    # --------------------------------------------------------------------------- parts of the training, and helpers

    def fit(self, state: Resumed) -> None:
        """Trains to the last step. A Keras epoch is an interval of `iterations` steps, see `RunState`.

        If the training is done already, only replaces the weights by their moving average, if there is one.

        Args:
            state: result of `restore`.

        Raises:
            ParameterError: `steps_per_execution` does not divide the step to resume from.
            KeyboardInterrupt, SystemExit: see `train_run`.
        """
        model = self.model
        training = self.training
        if self.is_trained(state):
            # Sets the moving average of the weights, as the end of `fit` does.
            model.optimizer.finalize_variable_values(model.trainable_variables)
            return
        self.check_steps_per_execution()
        start = step_of(model)
        stop = StopOnSignal(model)
        callbacks = self.make_callbacks(state, stop)
        # `before_epoch_end` must be called before all callbacks, and `RunState` after all, see there.
        run_state = RunState(self.checkpoints, state, training, callbacks)
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
                    callbacks=[first, *callbacks, run_state],
                )
            except Stopped:
                run_state.save(mid_interval=True)
                stopped = True
            if stopped or stop.received:  # a signal may have come after the last step
                saved = f"step {step_of(model)} is saved as {self.checkpoints.latest}"
                logger.info("%s: %s; the same command resumes from this checkpoint", stop.reason, saved)
                raise KeyboardInterrupt if stop.received == signal.SIGINT else SystemExit(0)

    def is_trained(self, state: Resumed) -> bool:
        """Whether no step is left to train; logs why. An open interval may still end the training, see `RunState`."""
        step = step_of(self.model)
        training = self.training
        stops_early = not state.interval_is_open and self.checkpoints.stops_early(training, step)
        if not stops_early and step < training.train_steps:
            return False
        why = f"no better validation for patience={training.patience} steps" if stops_early else f"{step} steps"
        longer = "" if stops_early else ". A larger train_steps continues the training"
        logger.info("already trained: %s, train_steps=%d%s", why, training.train_steps, longer)
        return True

    def check_steps_per_execution(self) -> None:
        """Raises ParameterError unless `steps_per_execution` divides the step from which the training resumes."""
        step = step_of(self.model)
        if step % self.model.steps_per_execution:
            resumes_from = f"{step}, the step from which training resumes"
            message = f"steps_per_execution={self.model.steps_per_execution} must divide {resumes_from}"
            allowed = f"a divisor of {resumes_from}"
            raise ParameterError("steps_per_execution", self.model.steps_per_execution, allowed, message)

    def make_callbacks(self, state: Resumed, stop: StopOnSignal) -> list[keras.callbacks.Callback]:
        """The callbacks of `fit` in the order of their calls, except `RunState`. Cuts `log.csv` at the current step.

        Args:
            state: result of `restore`.
            stop: see `Validate`.
        """
        checkpoints = self.checkpoints
        callbacks: list[keras.callbacks.Callback] = [
            CheckFinite(checkpoints),
            Validate(self.validation(), stop, self.training, checkpoints),
            Progress(self.training, self.as_text, self.tokens_per_step(), self.samples),
            keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: self.add_metric(logs)),
        ]
        if checkpoints.writes:
            log_file = self.folder.log_file
            metrics = self.metrics
            validation_metrics = self.validation_metrics
            step = step_of(self.model)
            # The line of an open interval will be written again, even if this is the last step of the interval.
            cut_log(log_file, step - 1 if state.interval_is_open else step, metrics, validation_metrics)
            if self.samples:
                callbacks.append(keras.callbacks.LambdaCallback(on_epoch_end=self.sample_if_validated))
            callbacks += [self.board, StepCSVLogger(log_file, metrics, checkpoints, validation_metrics)]
        return [*callbacks, *self.own_callbacks]  # after the callbacks that add values to the logs of an epoch

    def add_metric(self, logs: dict) -> None:
        """Adds the losses of training and validation in the unit `metric` to `logs`, if there is such a unit."""
        for prefix in ("", "val_"):
            if self.metric and prefix + "loss" in logs:
                logs[prefix + self.metric] = to_metric(logs[prefix + "loss"], self.metric)

    def sample_if_validated(self, epoch: int, logs: dict) -> None:
        """Calls `sample` at the end of an interval of steps that has a validation."""
        if "val_loss" in logs:
            self.sample()

    def save_average(self) -> None:
        """If there is a moving average, which `fit` has put into the weights, writes them to the folder `ema`.

        Raises ValueError if a weight is not finite.
        """
        if not self.model.inner_optimizer.use_ema:
            return
        step = step_of(self.model)
        self.checkpoints.check_weights()
        if self.checkpoints.writes:
            self.folder.ema.save_weights(self.model, step)
        logger.info(
            "averaged weights: %s (open them with --ckpt_path; in train.py, --eval_ckpt_path)",
            self.folder.ema.checkpoint(step),
        )

    def record_validation(self, results: dict[str, float]) -> None:
        """Adds the validation after the last step to `log.csv` and the curves. Saves the weights if they are the best.

        Args:
            results: `{metric: value}` of the validation.

        Raises:
            ValueError: the loss is not finite, see `RunCheckpoints.diverged`.
        """
        self.checkpoints.check_validation(results["loss"])
        logs = {f"val_{name}": value for name, value in results.items()}
        self.add_metric(logs)
        if self.checkpoints.writes:
            with self.checkpoints.naming_last_good():
                is_new = complete_log(self.folder.log_file, step_of(self.model), logs)
            if is_new:  # the validation was not recorded by an earlier session
                self.board.on_epoch_end(None, logs)
        self.checkpoints.save_best(logs[self.folder.family.monitor])

    def show_text(self, name: str, text: str) -> None:
        """Writes a text for TensorBoard at the current step, if this worker is the chief."""
        if self.checkpoints.writes:
            self.board.log_text(name, text, step_of(self.model))

    def log_best(self) -> None:
        """Logs which step had the best validation, unless it is the last, or programs open its weights by default."""
        best = self.folder.find_best() if self.checkpoints.writes else None
        if best and self.folder.family.default_checkpoint != "best" and best["step"] != step_of(self.model):
            monitor = self.folder.family.monitor
            result = self.as_text({monitor: best[monitor]}, "val_")
            logger.info("the best validation was that of step %d (%s): --ckpt_path=best opens it", best["step"], result)


class EpochRun(Run):
    """One training run of a model without memory, on `EpochBatches`.

    Each of several workers makes whole batches, and the model takes the rows of its worker from them.
    """

    strategies = ("auto", "one", "mirrored", "multi_worker")

    def batches_of(self, split: str, seed: int | None = None) -> EpochBatches:
        """The batches of a split, in a random order that `seed` decides; without a seed, in the order of lengths."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Raises ParameterError for settings that do not work on several devices.

        They are `jit_compile` and, on the devices of one machine, `steps_per_execution`.
        """
        replicas = self.strategy.num_replicas_in_sync
        training = self.training
        where = f"for {self.kind} on several devices ({replicas})"
        if replicas > 1 and training.jit_compile:
            raise ParameterError("jit_compile", True, "left out", f"jit_compile must be left out {where}")
        on_one_machine = num_workers(self.strategy) == 1
        if replicas > 1 and on_one_machine and (training.steps_per_execution or 1) > 1:
            message = f"steps_per_execution must be left out {where}"
            raise ParameterError("steps_per_execution", training.steps_per_execution, "left out", message)

    @functools.cached_property
    def train_batches(self) -> EpochBatches:
        """The batches to train on."""
        return self.batches_of("train", self.training.seed)

    def batches(self, start: int) -> tf.data.Dataset:
        return self.train_batches.dataset(start, repeat=True)

    def validation(self) -> tf.data.Dataset:
        return self.batches_of("valid").dataset()

    def evaluate(self, split: str) -> dict[str, float]:
        """The metrics of the model on a split."""
        results = self.model.evaluate(self.batches_of(split).dataset(), verbose=0, return_dict=True)
        return {name: float(value) for name, value in results.items()}

    @property
    def held_out(self) -> list[str]:
        """The splits to evaluate: all except "train"."""
        return [split for split in self.corpus.splits if split != "train"]
