"""Models that Keras's own `fit` trains: a loss of their own, weighted labels, export, stop and exact resume."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from txl_tf.config import at_least
from txl_tf.data.text.checked_batches import plain_messages
from txl_tf.errors import ParameterError
from txl_tf.schema import check_names, known_names
from txl_tf.training.among_workers import AmongWorkers
from txl_tf.training.distribution import sum_over_replicas
from txl_tf.training.keras_arguments import (
    NO_METRICS,
    CompiledMetrics,
    by_name,
    is_own,
    names_of,
    refuse,
    refuse_hooks,
    takes_name,
)
from txl_tf.training.trained_model import TrainedModel, Turns, apply_gradients, as_numbers, results_of
from txl_tf.training.weighting import class_table

_REFUSED = {
    "loss_weights": "the loss is the model's own; sample_weight weighs rows and labels",
}
_HOOKS_REFUSED = {"stateless_compute_loss": "fit never calls it with TensorFlow: override compute_loss"}
_HOOKS = ("train_step", "test_step", "compute_loss", "compute_metrics", "get_metrics_result")  # that steps call


class OnEveryReplica:
    """Mixin for Keras metrics of which every replica counts all: any of them has the result, without asking others."""

    def add_variable(self, *args, **kwargs):
        return super().add_variable(*args, **{**kwargs, "aggregation": "only_first_replica"})


class Mean(OnEveryReplica, keras.metrics.Mean):
    """`keras.metrics.Mean` that every replica counts, see `Resumable.over_replicas`."""


class Resumable(AmongWorkers, TrainedModel):
    """Mixin for Keras models without state between batches; for those with memory there is `MemoryModel`.

    A subclass may override what Keras says that it may: `train_step`, `test_step`, `predict_step`, `compute_loss`,
    `compute_metrics`, `metrics`, `reset_metrics`, ... It defines `loss_share`.

    Threads: steps count in the metrics of the model, so one method runs at a time, see `Turns`.

    Attributes:
        measures: what the model measures itself, for a message.
        takes: what `fit` takes, for a message.
        n_classes: number of labels.
        own_metrics: its metrics, but for the norm of the gradients.
        own_names: names of metrics that the model measures in any case: `compile` may be given them, too.
        grad_norm: a metric, set by the model.
    """

    measures = takes = "loss"
    own_names = ()
    _extra_metrics = NO_METRICS  # what `compile` was given
    _class_weights = _class_weights_traced = None  # see `class_table`: of the `fit` that runs; of the compiled step
    _class_weights_used = _was_reset = False  # by the compiled step; the metrics, since a method began
    _uncounted = ()  # names of metrics that the step which reports does not count in

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._turns = Turns()

    # ------------------------------------------------------------------------------------------------------ training

    @property
    def metric_dtype(self) -> str | None:
        """The dtype of the metrics: float64 where the loss is, else `None`, Keras's default."""
        return self.loss_dtype if self.loss_dtype == "float64" else None

    @known_names
    def compile(
        self, optimizer=None, loss=None, loss_weights=None, metrics=None, weighted_metrics=None, run_eagerly=False,
        steps_per_execution=1, jit_compile=False, auto_scale_loss=True,
    ):  # fmt: skip
        """Configures Keras's `fit` and `evaluate`, as `keras.Model.compile`. The loss is the model's own.

        Args:
            optimizer: from `make_optimizer`, or any Keras optimizer; Adam where it is `None`.
            loss, loss_weights: none; Keras's names.
            metrics, weighted_metrics: lists of Keras metrics: names, metrics, functions of labels and outputs. The
                logs have them besides the model's own. They are updated with int labels `[batch, labels]`, outputs
                before any softmax `[batch, labels, classes]`, and weights `[batch, labels]`: of `metrics`, 1 where
                there is something and 0 at padding, of `weighted_metrics` those of `sample_weight` or `class_weight`.
                A function returns values `[batch, labels]` or `[batch]`, of which the weighted mean is taken, or one
                number.
            run_eagerly, steps_per_execution, jit_compile, auto_scale_loss: Keras's.

        Raises:
            ValueError: a loss is given; or a metric that Keras does not know, or under a name that is taken; or the
                model has a hook of its own that Keras does not call.
        """
        refuse_hooks(self, _HOOKS_REFUSED)
        if loss is not None:
            raise ParameterError("loss", loss, f"None: the model has its own, it measures {self.measures}")
        refuse("compile", {"loss_weights": loss_weights}, _REFUSED)
        at_least(1)("steps_per_execution", steps_per_execution)
        own = [name for metric in [*self.own_metrics, self.grad_norm] for name in names_of(metric)]
        with self.distribute_strategy.scope():
            self._extra_metrics = CompiledMetrics(metrics, weighted_metrics, own, self.own_names, self.n_classes)
        self.auto_scale_loss = auto_scale_loss
        super().compile(
            optimizer if optimizer is not None else "adam", run_eagerly=run_eagerly, jit_compile=jit_compile,
            steps_per_execution=steps_per_execution, auto_scale_loss=auto_scale_loss,
        )  # fmt: skip

    def compile_arguments(self):
        return {**super().compile_arguments(), **self._extra_metrics.given}

    def measure(self, labels, outputs, kept, weights):
        """Updates the metrics that `compile` was given; their results, of all replicas, as logs.

        Args:
            labels: int `[batch, labels]`.
            outputs: `[batch, labels, classes]`.
            kept, weights: float32 `[batch, labels]`, see `compile`.
        """
        return self._extra_metrics.update(labels, outputs, kept, weights)

    def fit(self, x=None, y=None, *args, **kwargs):
        """Trains, as `keras.Model.fit` does; what `x` and `y` are, and what weights do, the model's docstring says.

        Args:
            x, y: arrays; or `x` alone, what gives batches `(x, y)` or `(x, y, sample_weight)`, such as a dataset. Where
                several workers train together, a `tf.data.Dataset` of whole batches, the same on every worker.
            *args, **kwargs: of `keras.Model.fit`, such as `sample_weight` and `class_weight`.

        Returns:
            The Keras `History`.

        Raises:
            ValueError: there is no `y`, weights have another shape than labels or rows, both `sample_weight` and
                `class_weight` are given, or another thread runs `fit`.
        """
        kwargs = by_name(super().fit, x, y, *args, **kwargs)
        self.build_optimizer()
        if self.several_workers:
            self.own_batches(kwargs, "x", "steps_per_epoch")
            self.check_steps(kwargs["steps_per_epoch"])
            if kwargs.get("validation_data") is not None:
                self.own_batches(kwargs, "validation_data", "validation_steps")
        with self._turn("fit"), self._weighing_classes(kwargs.pop("class_weight", None)), plain_messages():
            return super().fit(**kwargs)

    def evaluate(self, x=None, y=None, *args, **kwargs):
        """Loss and metrics, as `keras.Model.evaluate` returns them; for `x` and `y` see `fit`.

        It waits while another thread evaluates. While another thread runs `fit`, it is an error.
        """
        kwargs = by_name(super().evaluate, x, y, *args, **kwargs)
        with self._turn("evaluate"), plain_messages():
            if self.several_workers:
                self.own_batches(kwargs, "x", "steps")
                self.steps_left = kwargs["steps"]
            return as_numbers(super().evaluate(**kwargs))

    def train_on_batch(self, x, y=None, sample_weight=None, class_weight=None, return_dict=False):
        """One step of training. Arguments and errors: see `fit`. Returns what Keras's returns."""
        self.build_optimizer()
        with self._turn("train_on_batch"), self._weighing_classes(class_weight):
            self._reset_before_batch()
            return as_numbers(super().train_on_batch(x, y, sample_weight, return_dict=return_dict))

    def test_on_batch(self, x, y=None, sample_weight=None, return_dict=False):
        """Loss and metrics of one batch, as `keras.Model.test_on_batch` returns them."""
        with self._turn("test_on_batch"):
            self._reset_before_batch()
            return as_numbers(super().test_on_batch(x, y, sample_weight, return_dict))

    def _reset_before_batch(self):
        """The logs of one batch are of that batch alone. Keras does so from 3.15 on."""
        if self.compiled:
            self.reset_metrics()

    @contextlib.contextmanager
    def _turn(self, method: str) -> Iterator[None]:
        """Within it, no other thread counts in the metrics of the model."""
        with self._turns(method):
            refuse_hooks(self, _HOOKS_REFUSED)
            self._was_reset = False
            yield

    @contextlib.contextmanager
    def _weighing_classes(self, class_weight) -> Iterator[None]:
        """Steps of training within it weigh labels so. Keras would take the largest id of a row for its class."""
        self._class_weights = class_table(class_weight, self.n_classes)
        try:
            yield
        finally:
            self._class_weights = None

    def make_train_function(self, force=False):
        changed = self._class_weights != self._class_weights_traced  # the weights are constants of the graph
        self._class_weights_traced = self._class_weights
        self.check_weights()
        force = self.hooks_changed("train_function", *_HOOKS) or changed or force
        self._class_weights_used &= self.train_function is not None and not force
        made = self.train_function
        super().make_train_function(force)
        if self.train_function is not made:
            self.train_function = self._watched(self.train_function)

    def make_test_function(self, force=False):
        made = self.test_function
        super().make_test_function(self.hooks_changed("test_function", *_HOOKS) or force)
        if self.test_function is not made:
            self.test_function = self._watched(self.test_function)

    def _watched(self, function: Callable) -> Callable:
        """The function of the next steps, with an error where a method of the user's passes over what it should do."""

        @functools.wraps(function)
        def watched(iterator):
            if not self._was_reset and is_own(self, "reset_metrics") and not is_own(self, "metrics"):
                allowed = "a method that calls super().reset_metrics(), which resets the metrics of the library"
                raise ParameterError("reset_metrics", self.reset_metrics, allowed)
            logs = function(iterator)
            if self._class_weights is not None and not self._class_weights_used:
                allowed = "left out where train_step is your own and does not call super().train_step(data)"
                raise ParameterError("class_weight", dict(enumerate(self._class_weights)), allowed)
            return logs

        return watched

    def first_row(self, rows):
        """The number of this replica's first row in the batch; Keras may give a last one in unequal shares."""
        context = tf.distribute.get_replica_context()
        number, replica = context.num_replicas_in_sync, context.replica_id_in_sync_group
        if number == 1:
            return tf.constant(0)
        shares = self.over_replicas(tf.one_hot(replica, number) * tf.cast(rows, tf.float32))
        return tf.cast(tf.reduce_sum(tf.where(tf.range(number) < replica, shares, 0.0)), tf.int32)

    def unpacked(self, data):
        """`(x, y, sample_weight)` of a batch with labels."""
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        if y is None:
            raise ValueError(f"x and y must both be given, {self.takes}, or a dataset of such pairs: got no y")
        return x, y, sample_weight

    def weights_in_training(self, labels, sample_weight):
        """The weights of a batch: those that it has, or of every label that of its class; `None` without any."""
        self._class_weights_used = True
        if self._class_weights is None:
            return sample_weight
        if sample_weight is not None:
            raise ValueError("class_weight must be None where there is a sample_weight, got both")
        return tf.gather(tf.constant(self._class_weights, self.loss_dtype), tf.cast(labels, tf.int32))

    @property
    def metrics(self):
        """Those of the library, those that `compile` was given, then those that are attributes of the model."""
        has_norm = hasattr(self.inner_optimizer, "gradient_norm")
        of_library = [*self.own_metrics, *([self.grad_norm] if has_norm else []), *self._extra_metrics.metrics]
        names = {metric.name for metric in (*of_library, self.grad_norm)}  # Keras has a "loss" of its own
        return [*of_library, *(metric for metric in super().metrics if metric.name not in names)]

    @property
    def only_in_evaluation(self) -> list[keras.metrics.Metric]:
        """Those of `own_metrics` that training does not count in."""
        return []

    def get_metrics_result(self):
        return results_of(metric for metric in self.metrics if metric.name not in self._uncounted)

    def reset_metrics(self):
        self._was_reset = True
        for metric in (*self.own_metrics, self.grad_norm, *super().metrics, *self.metrics):
            metric.reset_state()

    # ------------------------------------------------------------------------------------------------ one step of it

    def loss_share(self, x: Any, y: Any, y_pred: Any, sample_weight: Any) -> tf.Tensor:
        """The loss of the rows here over the sum of the weights of all replicas, without penalties."""
        raise NotImplementedError

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        """The loss that a step trains for, which a subclass may override, as in Keras.

        The loss of a batch is the mean of what the replicas return. What an own version returns is the `loss` of the
        logs, too; without one, that is the mean nll alone.

        Args:
            x, y, sample_weight: of a batch, see the model; `sample_weight` may be `None`.
            y_pred: what the call returned for `x`.
            training: whether this is a step of training.

        Returns:
            float32 scalar: the mean loss by the weights, with regularizers and what layers gave to `add_loss`.
        """
        loss = self.with_penalties(self.loss_share(x, y, y_pred, sample_weight))
        return loss * self.distribute_strategy.num_replicas_in_sync

    @property
    def needs_y_pred(self) -> bool:
        """Whether a method of the user's takes what the call returned."""
        return is_own(self, "compute_loss") or is_own(self, "compute_metrics")

    def own_loss(self, x, y, y_pred, sample_weight, training):
        """The share of an own `compute_loss` in the loss of the batch; `None` without one."""
        if not is_own(self, "compute_loss"):
            return None
        options = {"training": training} if takes_name(self.compute_loss, "training") else {}
        loss = self.compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, **options)
        return tf.cast(loss, tf.float32) / self.distribute_strategy.num_replicas_in_sync

    def reported(self, logs, x, y, y_pred, sample_weight, training):
        """What a step returns: `logs` and the metrics of the user's; or what methods of the user's make of them."""
        if not any(is_own(self, name) for name in ("compute_metrics", "get_metrics_result", "metrics")):
            names = {metric.name for metric in (*self.own_metrics, self.grad_norm)}
            return {**logs, **results_of(metric for metric in self.metrics if metric.name not in names)}
        uncounted = self.only_in_evaluation if training else [self.grad_norm]
        self._uncounted = tuple(metric.name for metric in uncounted)
        try:
            return self.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
        finally:
            self._uncounted = ()

    def apply_gradients_of(self, loss, tape):
        """Updates the weights; returns what the logs say of it."""
        variables = self.trainable_variables
        self.check_weights()  # without a strategy, the first step makes those of a network that knows no sizes
        if variables:
            apply_gradients(self.optimizer, tape.gradient(loss, variables), variables)
        if not hasattr(self.inner_optimizer, "gradient_norm"):
            return {}
        self.grad_norm.update_state(self.inner_optimizer.gradient_norm if variables else 0.0)
        return {"grad_norm": self.grad_norm.result()}

    @staticmethod
    def over_replicas(x):
        """The sum over all replicas.

        Keras takes the mean of the replicas' results, whatever they weigh: so every replica counts all in its metrics.
        """
        return sum_over_replicas(x)

    # --------------------------------------------------------------------------------------------------------- export

    def input_signature(self):
        """The inputs of the call, a structure of `keras.InputSpec`, for `export`."""
        raise NotImplementedError

    def export(self, filepath, format="tf_saved_model", verbose=None, input_signature=None, **kwargs):
        """Writes the call as a SavedModel, which works without this library, as `keras.Model.export` does.

        Args:
            filepath, format, verbose, **kwargs: Keras's.
            input_signature: by default, batches of any size and length, each input under its name.

        Raises:
            ValueError: nobody knows what the model is called with; the message says what to do.
        """
        if format == "tf_saved_model":  # the other formats have options of their own
            check_names("export", kwargs, ["filepath", "format", "verbose", "input_signature"])
        if input_signature is None:
            input_signature = [self.build_for_export()]
        super().export(filepath, format, verbose, input_signature=input_signature, **kwargs)

    def build_for_export(self):
        """`input_signature`, of a model that has its weights then."""
        signature = self.input_signature()
        if not self.has_all_weights:
            self(keras.tree.map_structure(_ones, signature))
        return signature

    @property
    def _default_save_signature(self):
        """What `tf.saved_model.save(model, folder)` serves: the call, as `export` does."""
        specs = keras.tree.map_structure(
            lambda spec: tf.TensorSpec(spec.shape, spec.dtype, spec.name), self.input_signature()
        )
        return tf.function(lambda inputs: self(inputs), autograph=False, input_signature=[specs])

    def _trackable_children(self, save_type="checkpoint", **kwargs):
        if save_type == "savedmodel":
            self.build_for_export()  # or the error that says what to do: TensorFlow drops those of the signature
        return super()._trackable_children(save_type, **kwargs)

    # ------------------------------------------------------------------------------------------ stopping and going on

    @property
    def metric_totals(self) -> np.ndarray:
        """float64 array, the sums that the logs of this epoch are computed from."""
        sums = [np.ravel(tf.convert_to_tensor(variable).numpy()) for variable in self._sums]
        return np.concatenate(sums).astype(np.float64)

    def set_metric_totals(self, array: np.ndarray) -> None:
        """Continues with sums from `metric_totals`. Call it once an epoch has begun, from a callback."""
        sizes = [math.prod(variable.shape) for variable in self._sums]
        if sum(sizes) != len(array):
            raise ParameterError("array", array, f"{sum(sizes)} numbers, as metric_totals has")
        for variable, values in zip(self._sums, np.split(array, np.cumsum(sizes)[:-1]), strict=True):
            variable.assign(np.reshape(values, variable.shape).astype(variable.dtype))

    @property
    def _sums(self) -> list[keras.Variable]:
        return [variable for metric in self.metrics for variable in metric.variables]


def _ones(spec):
    """A tensor as small as a `keras.InputSpec` allows."""
    return tf.ones([1 if size is None else size for size in spec.shape], spec.dtype)
