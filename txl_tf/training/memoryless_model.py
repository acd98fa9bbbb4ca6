"""Models without memory: their own loss, weighted labels, export, stopping and exact resume.

On one machine, Keras's own `fit` trains them. Several workers use `fit_among_workers`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from txl_tf.calls import known_names
from txl_tf.config import at_least
from txl_tf.config.checks import is_integer
from txl_tf.data.batching import mapped
from txl_tf.data.text.checked_batches import check_of_weights, plain_messages
from txl_tf.errors import ParameterError
from txl_tf.kernels.shapes import Tensor
from txl_tf.nn.parts import is_overridden
from txl_tf.schema import check_names, keywords_of
from txl_tf.training.among_workers import OWN_BATCHES, AmongWorkers
from txl_tf.training.compiled_metrics import (
    NO_METRICS,
    CompiledMetrics,
    names_of,
    numbers_in,
    refuse_taken_names,
    results_of,
    set_numbers,
)
from txl_tf.training.distribution import sum_over_replicas
from txl_tf.training.fitting import called_by_fit, no_batches, scalars_as_floats
from txl_tf.training.keras_arguments import by_name, check_switches, refuse, refuse_hooks
from txl_tf.training.listed_data import as_arrays
from txl_tf.training.trained_model import SUMS, MethodLock, apply_gradients
from txl_tf.training.weighting import check_sample_weight, class_table, finite_weights

_REFUSED = {
    "loss_weights": "the loss is the model's own; sample_weight weighs rows and labels",
}
_NEVER_CALLED = {"stateless_compute_loss": "fit never calls it with TensorFlow: override compute_loss"}
_HOOKS = ("train_step", "test_step", "compute_loss", "compute_metrics", "get_metrics_result")  # a step calls them


if TYPE_CHECKING:
    MixedIntoMetric = keras.metrics.Metric
else:
    MixedIntoMetric = object


class OnEveryReplica(MixedIntoMetric):
    """Mixin for Keras metrics that every replica updates with sums over all replicas.

    So each replica has the result for the whole batch. Keras must not add up or average the replicas' variables.
    """

    def add_variable(self, *args: Any, **kwargs: Any) -> Any:
        return super().add_variable(*args, **{**kwargs, "aggregation": "only_first_replica"})


class Mean(OnEveryReplica, keras.metrics.Mean):
    """`keras.metrics.Mean` for sums over all replicas, see `MemorylessModel.over_replicas`."""


@dataclasses.dataclass
class _CompiledStep:
    """What is known of the compiled step of training.

    Attributes:
        class_weights: the class weights that it was made for, which are constants of its graph; see `class_table`.
        uses_class_weights: whether it uses them. A user's own step may ignore them. Set when the step is traced.
    """

    class_weights: tuple[float, ...] | None = None
    uses_class_weights: bool = False


class MemorylessModel(AmongWorkers):
    """Mixin for Keras models without memory between batches. The base of models with memory is `MemoryModel`.

    A subclass may override the methods that Keras allows to override: `train_step`, `test_step`, `predict_step`,
    `compute_loss`, `compute_metrics`, `metrics`, `reset_metrics`, ... It must define `loss_share`, `n_classes` and
    `own_metrics`.

    Threads: steps update the metrics of the model, so only one method runs at a time, see `MethodLock`.

    Attributes:
        measures: the names of the values that the model measures, for a message.
        form_of_batches: what `x` and `y` of `fit` are, for a message. The subclass sets it.
        unused_methods: `{name: reason, and what to do instead}` of methods that a subclass must not override, because
            some methods of the model compute the same without them.
        redundant_names: names of own metrics that Keras has, too, see `CompiledMetrics`.
        loss_mean, grad_norm: metrics, the mean loss and the norm of the gradients. The subclass sets them.
    """

    measures: str = "loss"
    form_of_batches: str
    unused_methods: Mapping[str, str] = {}
    redundant_names: tuple[str, ...] = ()
    loss_mean: keras.metrics.Metric
    grad_norm: keras.metrics.Metric
    _extra_metrics: CompiledMetrics = NO_METRICS  # the metrics that `compile` was given
    _class_weights: tuple[float, ...] | None = None  # the class weights of the `fit` that runs, see `class_table`
    _was_reset: bool = False  # whether `reset_metrics` of this class has run since the current method began
    _not_updated: tuple[str, ...] = ()  # names of metrics that the last step did not update

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._method_lock = MethodLock()
        self._compiled_step = _CompiledStep()

    # ------------------------------------------------------------------------------------------------------ training

    @property
    def metric_dtype(self) -> str | None:
        """The dtype of the metrics: float64 if the loss is float64, else `None`, Keras's default."""
        return self.loss_dtype if self.loss_dtype == "float64" else None

    @known_names
    def compile(
        self, optimizer: Any = None, loss: None = None, loss_weights: Any = None, metrics: Any = None,
        weighted_metrics: Any = None, run_eagerly: bool = False, steps_per_execution: int = 1,
        jit_compile: bool | str = False, auto_scale_loss: bool = True,
    ) -> None:  # fmt: skip
        """Configures `fit` and `evaluate`, as `keras.Model.compile` does. The loss is the model's own.

        Args:
            optimizer: from `make_optimizer`, or any Keras optimizer. `None` is Keras's "adam".
            loss, loss_weights: not supported.
            metrics, weighted_metrics: lists of Keras metrics: names, metrics, or functions of labels and outputs. They
                are reported in addition to the model's own metrics. They are updated with int labels `[batch, labels]`,
                outputs before any softmax, `[batch, labels, classes]`, and weights `[batch, labels]`. The weights of
                `metrics` are 1 at labels and 0 at padding; those of `weighted_metrics` come from `sample_weight` or
                `class_weight`. A function returns one number, or values `[batch, labels]` or `[batch]`, whose weighted
                mean is reported.
            run_eagerly, steps_per_execution, jit_compile, auto_scale_loss: see Keras.

        Raises:
            ParameterError: `loss` or `loss_weights` is given, `steps_per_execution` is less than 1, a switch is neither
                True nor False, a metric is not known to Keras, has a name that exists already or was made outside of
                the strategy's scope, or the model overrides `stateless_compute_loss`, which Keras does not call, or
                one of `unused_methods`.
        """
        self.refuse_unused()
        if loss is not None:
            raise ParameterError("loss", loss, f"None: the model has its own, it measures {self.measures}")
        refuse("compile", {"loss_weights": loss_weights}, _REFUSED)
        at_least(1)("steps_per_execution", steps_per_execution)
        check_switches(jit_compile, run_eagerly=run_eagerly, auto_scale_loss=auto_scale_loss)
        own_names = [name for metric in [*self.own_metrics, self.grad_norm] for name in names_of(metric)]
        with self.distribute_strategy.scope():
            self._extra_metrics = CompiledMetrics(
                metrics, weighted_metrics, own_names=own_names, redundant_names=self.redundant_names,
                n_classes=self.n_classes,
            )  # fmt: skip
        self.__dict__["auto_scale_loss"] = auto_scale_loss  # only `compile` can set it
        self.drop_results("train_step", "test_step")
        super().compile(
            optimizer if optimizer is not None else "adam", run_eagerly=run_eagerly, jit_compile=jit_compile,
            steps_per_execution=steps_per_execution, auto_scale_loss=auto_scale_loss,
        )  # fmt: skip

    def refuse_unused(self, *names: str) -> None:
        """Raises ParameterError if the model overrides a method that it does not use; with `names`, one of these."""
        unused = {**_NEVER_CALLED, **self.unused_methods}
        refuse_hooks(self, {name: unused[name] for name in names or unused})

    def compile_arguments(self) -> dict[str, Any]:
        return {**super().compile_arguments(), **self._extra_metrics.given}

    def measure(self, labels: Tensor, outputs: Tensor, counted: Tensor, weights: Any) -> dict[str, Any]:
        """Updates the metrics that `compile` was given. Returns their results over all replicas, as logs.

        Args:
            labels: int `[batch, labels]`, the rows of this replica.
            outputs: `[batch, labels, classes]`.
            counted: float `[batch, labels]`, the weights of `metrics`: 1 at labels, 0 at padding.
            weights: float `[batch, labels]`, the weights of `weighted_metrics`.
        """
        return self._extra_metrics.update(labels, outputs, counted, weights)

    def fit(self, x: Any = None, y: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Trains, as `keras.Model.fit` does. The docstring of the model describes `x`, `y` and weights.

        Args:
            x, y: arrays, or lists of rows. Or only `x`, with batches `(x, y)` or `(x, y, sample_weight)`, such as a
                dataset. With several workers, `x` must be a `tf.data.Dataset` of whole batches, the same on every
                worker.
            *args, **kwargs: arguments of `keras.Model.fit`, such as `sample_weight` and `class_weight`.

        Returns:
            The Keras `History`.

        Raises:
            ParameterError: `y` is missing, an epoch or a validation has no batch, a number such as `epochs` is out of
                its range, `batch_size` is given for a dataset or is no multiple of the number of replicas, weights have
                another shape than labels or rows, a weight is negative or not finite, both `sample_weight` and
                `class_weight` are given, `steps_per_execution` does not divide the steps of an epoch (see below), a
                metric of yours has the name of one of the model's, or another thread runs `fit`. On one worker,
                `steps_per_execution` must divide `steps_per_epoch` and `validation_steps` if they are given, unless
                they are the number of batches of a `tf.data.Dataset`. With several workers, it must divide
                `steps_per_epoch`, which is by default the number of batches.
            tf.errors.InvalidArgumentError: in a batch of a dataset, an id is in no table, or a weight is negative or
                not finite. For generators and other batches, XLA drops these checks.
        """
        kwargs = by_name(super().fit, x, y, *args, **kwargs)
        self._convert_lists("train_step", kwargs)
        _check_data("fit", kwargs)
        self.build_optimizer()
        self.check_averages()
        with self._running_alone("fit"), self._weighing_classes(kwargs.pop("class_weight", None)), plain_messages():
            self._check_arrays("train_step", kwargs.get("x"), kwargs.get("y"))
            held_out = kwargs.get("validation_split") or 0.0
            self._check_shares("batch_size", kwargs.get("batch_size"), kwargs.get("x"), held_out=held_out)
            validation = kwargs.get("validation_data")
            if isinstance(validation, (tuple, list)):
                self._check_arrays("test_step", *validation[:2])
                name = "batch_size" if kwargs.get("validation_batch_size") is None else "validation_batch_size"
                self._check_shares(name, kwargs.get(name), validation[0], "validation_data")
            self._trace_again("train")
            self._watch(kwargs)
            if self.several_workers:
                return self.fit_among_workers(kwargs)
            self._check_steps("steps_per_epoch", kwargs, kwargs.get("x"))
            self._check_steps("validation_steps", kwargs, kwargs.get("validation_data"))
            kwargs["x"] = self.with_checks("train_step", kwargs.get("x"))
            kwargs["validation_data"] = self.with_checks("test_step", validation)
            with self._naming_unequal_shares():
                return super().fit(**kwargs)

    def _check_shares(self, name: str, batch_size: Any, x: Any, data: str = "x", held_out: float = 0.0) -> None:
        """Raises ParameterError unless all replicas have equally many rows of the first batch of arrays.

        Keras adds up their shares of this batch. The last batch may be smaller, and its shares may differ.

        Args:
            name: the argument that is the batch size.
            batch_size: its value; `None` is Keras's 32.
            x: arrays, or batches, which are not checked.
            data: the argument that has `x`.
            held_out: the share of the rows of `x` that `validation_split` leaves out.
        """
        replicas = self.distribute_strategy.num_replicas_in_sync
        arrays = keras.tree.flatten(x)
        if replicas == 1 or not all(isinstance(array, np.ndarray | tf.Tensor) and len(array.shape) for array in arrays):
            return
        size = 32 if batch_size is None else batch_size
        if not is_integer(size):
            return  # Keras's own error follows
        if size % replicas:
            raise ParameterError(name, size, f"a multiple of {replicas}, the number of replicas")
        rows = int(arrays[0].shape[0] * (1 - held_out))
        if rows < size and rows % replicas:
            allowed = f"arrays of at least {name}={size} rows, or of a multiple of {replicas}, the number of replicas"
            raise ParameterError(data, rows, allowed, f"{data} must be {allowed}, got {rows}")

    @contextlib.contextmanager
    def _naming_unequal_shares(self, data: str = "x") -> Iterator[None]:
        """In this block, the error of Keras about the first batch of a dataset names the argument `data`.

        Keras adds up the replicas' shares of this batch, so that they must be equal, see `_check_shares`. Their sizes
        are known only after the dataset was read.
        """
        replicas = self.distribute_strategy.num_replicas_in_sync
        try:
            yield
        except tf.errors.InvalidArgumentError as error:
            shares = re.search(r"AddN must have the same .*: \[(\d+).* != input \d+: \[(\d+)", error.message)
            if replicas == 1 or shares is None:
                raise
            allowed = f"batches whose first has a multiple of {replicas} rows, for {replicas} replicas"
            found = f"{shares[1]} and {shares[2]} rows"
            message = f"{data} must be {allowed}, got a first batch with {found} for two of them"
            raise ParameterError(data, found, allowed, message) from error

    def _check_steps(self, name: str, kwargs: dict[str, Any], data: Any) -> None:
        """Raises ParameterError if Keras would read more batches than the argument `name` says.

        Keras reads `steps_per_execution` batches at a time. It reads no more than a dataset has.
        """
        steps = kwargs.get(name)
        if not (isinstance(data, tf.data.Dataset) and int(data.cardinality()) == steps):
            self.check_steps(name, steps)

    def evaluate(self, x: Any = None, y: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Loss and metrics, as `keras.Model.evaluate` returns them. See `fit` for `x` and `y`.

        It waits while another thread evaluates. It raises ParameterError while another thread runs `fit`, and, without
        several workers, if `steps_per_execution` does not divide `steps`, unless this is the number of batches of a
        `tf.data.Dataset`.
        """
        kwargs = by_name(super().evaluate, x, y, *args, **kwargs)
        self._convert_lists("test_step", kwargs)
        _check_data("evaluate", kwargs)
        with self._running_alone("evaluate"), plain_messages():
            self._check_arrays("test_step", kwargs.get("x"), kwargs.get("y"))
            self._check_shares("batch_size", kwargs.get("batch_size"), kwargs.get("x"))
            self._trace_again("test")
            self._watch(kwargs)
            if not self.several_workers:
                self._check_steps("steps", kwargs, kwargs.get("x"))
                if not called_by_fit(kwargs):  # `fit` has added the checks
                    kwargs["x"] = self.with_checks("test_step", kwargs.get("x"))
                with self._naming_unequal_shares("validation_data" if called_by_fit(kwargs) else "x"):
                    return scalars_as_floats(super().evaluate(**kwargs))
            logs = self.evaluate_among_workers(kwargs)
        if kwargs.get("return_dict"):
            return logs
        names = [metric.name for metric in self.metrics if metric.name in logs]
        results = [logs[name] for name in (*names, *sorted(logs.keys() - {*names}))]
        return results if len(results) > 1 else results[0]

    def predict(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """The results of the call for all rows of `x`, or of an overridden `predict_step`; see `keras.Model.predict`.

        Raises:
            ParameterError: `x` has no batch or another shape, or a number is out of its range. An error in a batch of a
                dataset is an InvalidArgumentError.
        """
        kwargs = by_name(super().predict, x, *args, **kwargs)
        self._convert_lists("predict_step", kwargs)
        _check_data("predict", kwargs)
        self._check_arrays("predict_step", kwargs.get("x"))
        kwargs["x"] = self.with_checks("predict_step", kwargs.get("x"))
        self._trace_again("predict")
        self._watch(kwargs)
        with plain_messages():
            return super().predict(**kwargs)

    def predict_on_batch(self, x: Any) -> Any:
        """The results of `predict` for one batch. Raises ParameterError as `predict` does."""
        x, *_ = as_arrays(x)
        self._check_arrays("predict_step", x)
        return super().predict_on_batch(x)

    def train_on_batch(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        class_weight: Any = None,
        return_dict: bool = False,
    ) -> Any:
        """One step of training. See `fit` for arguments and errors, and Keras for the result.

        Raises ParameterError if several workers train together.
        """
        self.refuse_batch_of_workers("train_on_batch")
        x, y, sample_weight = self._arrays_of("train_step", x, y, sample_weight)
        check_sample_weight("sample_weight", sample_weight)
        self.build_optimizer()
        with self._running_alone("train_on_batch"), self._weighing_classes(class_weight):
            self._check_arrays("train_step", x, y)
            self._trace_again("train")
            self._reset_before_batch()
            logs = scalars_as_floats(super().train_on_batch(x, y, sample_weight, return_dict=return_dict))
            self._check_class_weights()
        return logs

    def test_on_batch(self, x: Any, y: Any = None, sample_weight: Any = None, return_dict: bool = False) -> Any:
        """Loss and metrics of one batch, as `keras.Model.test_on_batch` returns them.

        Raises ParameterError if several workers train together, or another thread runs `fit`.
        """
        self.refuse_batch_of_workers("test_on_batch")
        x, y, sample_weight = self._arrays_of("test_step", x, y, sample_weight)
        check_sample_weight("sample_weight", sample_weight)
        with self._running_alone("test_on_batch"):
            self._check_arrays("test_step", x, y)
            self._trace_again("test")
            self._reset_before_batch()
            return scalars_as_floats(super().test_on_batch(x, y, sample_weight, return_dict))

    def _convert_lists(self, step: str, arguments: dict[str, Any]) -> None:
        """Replaces lists of numbers in the data of `fit`, `evaluate` or `predict` by arrays, see `as_arrays`.

        Args:
            step: the method that gets the data, but not `validation_data`.
            arguments: those of the call, which the method changes.
        """
        names = ("x", "y", "sample_weight")
        converted = self._arrays_of(step, *map(arguments.get, names))
        arguments.update((name, data) for name, data in zip(names, converted, strict=True) if name in arguments)
        validation = arguments.get("validation_data")
        if isinstance(validation, (tuple, list)) and len(validation) in (2, 3):
            names = [f"validation_data[{i}]" for i in range(3)]
            arguments["validation_data"] = self._arrays_of("test_step", *validation, names=names)[: len(validation)]

    def _arrays_of(self, step: str, *data: Any, **options: Any) -> tuple[Any, Any, Any]:
        """`as_arrays` for a `step`. A user's step gets the lists."""
        if is_overridden(self, step):
            x, y, sample_weight = (*data, None, None)[:3]
            return x, y, sample_weight
        return as_arrays(*data, **options)

    def _check_arrays(self, step: str, x: Any, y: Any = None) -> None:
        """Calls `check_batch` if `x` and `y` are arrays and the `step` is not a user's."""
        arrays = [array for array in keras.tree.flatten((x, y)) if array is not None]
        if not is_overridden(self, step) and all(isinstance(array, np.ndarray | tf.Tensor) for array in arrays):
            self.check_batch(x, y)

    def with_checks(self, step: str, data: Any) -> Any:
        """Returns `data`; of a dataset, one that calls `check_batch` for every batch, unless the `step` is a user's.

        The input pipeline checks the batches on the host, so a GPU does not wait, and XLA does not drop the checks. An
        eager step checks them itself.
        """
        if not isinstance(data, tf.data.Dataset) or is_overridden(self, step) or self.run_eagerly:
            return data
        is_spread = type(data.element_spec) is tuple  # `map` gives the elements of a tuple as arguments

        def check(*element: Any) -> Any:
            """Adds the checks of a batch to the graph in which the dataset makes it. Returns the batch."""
            batch = element if is_spread else element[0]
            x, y, weights = keras.utils.unpack_x_y_sample_weight(batch)
            if step == "predict_step":  # which uses no labels and weights
                y = weights = None
            self.check_batch(x, y)
            if weights is not None:
                tf.debugging.Assert(*check_of_weights(tf.cast(weights, "float32")))
            return batch

        return mapped(data, check)

    def check_batch(self, x: Any, y: Any = None) -> None:
        """Raises ParameterError if arrays have shapes or ids that no step accepts. `y` may be `None`.

        In a graph, it adds assertions about ids.

        A step would find a wrong row only when it reads it. It checks shapes when its graph is traced, which does not
        happen for every length. On a GPU and under XLA, it computes with ids that are in no table. A subclass may
        override this method.
        """

    def _reset_before_batch(self) -> None:
        """Resets the metrics, so that the logs of one batch are of that batch alone. Keras does so from 3.15 on.

        If the model is not compiled, it does nothing, and Keras raises its own error later. Raises ParameterError if an
        overridden `reset_metrics` does not call the one of this class.
        """
        if self.compiled:
            self.reset_metrics()
            self._check_was_reset()

    @contextlib.contextmanager
    def _running_alone(self, method: str) -> Iterator[None]:
        """Waits until no other thread uses the metrics, and checks the overridden methods. Then runs the block alone.

        Raises ParameterError if another thread runs `fit`, if a hook is overridden that Keras does not call, or if a
        user's metric has the name of one of the library's.
        """
        with self._method_lock(method):
            self.refuse_unused()
            library_metrics = self._library_metrics
            names = dict.fromkeys(metric.name for metric in (*library_metrics, self.grad_norm))
            refuse_taken_names(self, (*library_metrics, self.grad_norm), names)
            self._was_reset = False
            yield

    @contextlib.contextmanager
    def _weighing_classes(self, class_weight: Any) -> Iterator[None]:
        """In this block, a training step gives each label the weight of its class.

        Keras itself would give a row of labels a single weight, for the argmax of the row. That is a position, not a
        class.
        """
        self._class_weights = class_table(class_weight, self.n_classes)
        try:
            yield
        finally:
            self._class_weights = None

    def _trace_again(self, kind: str) -> None:
        """Drops a compiled step if a user has replaced a method that it calls, or if it has other class weights.

        For "train", it also raises ParameterError if weights have a dtype that loses small updates.

        Args:
            kind: "train", "test" or "predict".
        """
        changed = self.hooks_changed(f"{kind}_function", *_HOOKS)
        if kind == "train":
            self.check_weights()
            changed |= self._class_weights != self._compiled_step.class_weights
            if changed:
                self._compiled_step = _CompiledStep(self._class_weights)
        compiled, make = {
            "train": (self.train_function, self.make_train_function),
            "test": (self.test_function, self.make_test_function),
            "predict": (self.predict_function, self.make_predict_function),
        }[kind]
        if changed and compiled is not None:
            make(force=True)
        if changed:
            self.drop_results(f"{kind}_step")

    def _watch(self, arguments: dict[str, Any]) -> None:
        """Adds a `_Watch` to the callbacks in the arguments of `fit`, `evaluate` or `predict`."""
        if not called_by_fit(arguments):  # the list of `fit` has a `_Watch`
            arguments["callbacks"] = [_Watch(self), *keras.tree.flatten(arguments.get("callbacks") or [])]

    def _check_was_reset(self) -> None:
        """Raises ParameterError if an overridden `reset_metrics` has not called the one of this class.

        A model with `metrics` of its own need not call it.
        """
        if not self._was_reset and is_overridden(self, "reset_metrics") and not is_overridden(self, "metrics"):
            allowed = "a method that calls super().reset_metrics(), which resets the metrics of the library"
            raise ParameterError("reset_metrics", self.reset_metrics, allowed)

    def _check_class_weights(self) -> None:
        """Raises ParameterError if an overridden step has ignored the weights of the classes."""
        if self._class_weights is not None and not self._compiled_step.uses_class_weights:
            allowed = "left out where train_step is your own and does not call super().train_step(data)"
            raise ParameterError("class_weight", dict(enumerate(self._class_weights)), allowed)

    def first_row(self, rows: int) -> Any:
        """The index of this replica's first row in the batch, which Keras may have divided into unequal shares.

        Args:
            rows: number of rows of this replica.
        """
        context = tf.distribute.get_replica_context()
        number = context.num_replicas_in_sync
        replica = context.replica_id_in_sync_group
        if number == 1:
            return tf.constant(0)
        # [number]: the rows of every replica
        shares = self.over_replicas(tf.one_hot(replica, number) * tf.cast(rows, tf.float32))
        return tf.cast(tf.reduce_sum(tf.where(tf.range(number) < replica, shares, 0.0)), tf.int32)

    def unpacked(self, data: Any) -> tuple[Any, Any, Any]:
        """`(x, y, sample_weight)` of a batch, with a check of the weights in the graph.

        Raises ParameterError if it has no `y`.
        """
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        if y is None:
            allowed = f"given with x, {self.form_of_batches}, or in a dataset of such pairs"
            message = f"x and y must both be given, {self.form_of_batches}, or a dataset of such pairs: got no y"
            raise ParameterError("y", None, allowed, message)
        return x, y, None if sample_weight is None else finite_weights(sample_weight, self.loss_dtype)

    def weights_in_training(self, labels: Tensor, sample_weight: Any) -> Any:
        """The weights in a training step: `sample_weight`, or the weights of the labels' classes, or `None`.

        Raises ParameterError if both `sample_weight` and class weights are given.
        """
        self._compiled_step.uses_class_weights = True
        if self._class_weights is None:
            return sample_weight
        if sample_weight is not None:
            class_weight = dict(enumerate(self._class_weights))
            message = "class_weight must be None if there is a sample_weight, got both"
            raise ParameterError("class_weight", class_weight, "None if there is a sample_weight", message)
        return tf.gather(tf.constant(self._class_weights, self.loss_dtype), tf.cast(labels, tf.int32))

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        """The model's own metrics, those of `compile`, and then those that are attributes of the model."""
        library_metrics = self._library_metrics
        names = {metric.name for metric in (*library_metrics, self.grad_norm)}  # Keras has a "loss" of its own
        return [*library_metrics, *(metric for metric in super().metrics if metric.name not in names)]

    @property
    def _library_metrics(self) -> list[keras.metrics.Metric]:
        """The model's own metrics, `grad_norm` if the optimizer reports it, and the metrics of `compile`."""
        has_norm = hasattr(self.inner_optimizer, "gradient_norm")
        return [*self.own_metrics, *([self.grad_norm] if has_norm else []), *self._extra_metrics.metrics]

    @property
    def n_classes(self) -> int:
        """Number of classes, the width of the outputs."""
        raise NotImplementedError

    @property
    def own_metrics(self) -> list[keras.metrics.Metric]:
        """The metrics of the model itself, without `grad_norm`."""
        raise NotImplementedError

    @property
    def only_in_evaluation(self) -> list[keras.metrics.Metric]:
        """The metrics of `own_metrics` that training does not update."""
        return []

    def get_metrics_result(self) -> dict[str, Any]:
        """Keras's method: the results of the metrics, except those that the current step does not update."""
        return results_of(metric for metric in self.metrics if metric.name not in self._not_updated)

    def reset_metrics(self) -> None:
        """Keras's method: resets all metrics, also the library's metrics if a user's `metrics` leaves them out."""
        self._was_reset = True
        for metric in (*self.own_metrics, self.grad_norm, *super().metrics, *self.metrics):
            metric.reset_state()

    # ------------------------------------------------------------------------------------------------------- one step

    def loss_share(self, x: Any, y: Any, y_pred: Any, sample_weight: Any) -> tf.Tensor:
        """This replica's share of the mean loss of the batch, without regularizers.

        Args: see `compute_loss`.
        """
        raise NotImplementedError

    def compute_loss(
        self,
        x: Any = None,
        y: Tensor | None = None,
        y_pred: Tensor | None = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        """The loss that a training step minimises. A subclass may override this method, as in Keras.

        The loss of a batch is the mean of the results of all replicas. With an overridden method, the logs report its
        result as `loss`. Otherwise `loss` is the mean nll, without regularizers.

        Args:
            x, y, sample_weight: a batch, see the model; `sample_weight` may be `None`.
            y_pred: the result of the call for `x`.
            training: whether this is a training step.

        Returns:
            scalar in `loss_dtype`: the weighted mean of the loss, with regularizers and the losses of `add_loss`. With
            R replicas, it is R times this replica's share of the mean.
        """
        loss = self.with_penalties(self.loss_share(x, y, y_pred, sample_weight))
        return loss * self.distribute_strategy.num_replicas_in_sync

    def own_loss(self, x: Any, y: Tensor, y_pred: Tensor, sample_weight: Any, training: bool) -> Any:
        """This replica's share of the loss from a user's `compute_loss`; `None` if the user has not overridden it."""
        if not is_overridden(self, "compute_loss"):
            return None
        options = {"training": training} if "training" in keywords_of(self.compute_loss) else {}
        loss = self.compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, **options)
        return tf.cast(loss, self.loss_dtype) / self.distribute_strategy.num_replicas_in_sync

    def reported(
        self, logs: Any, x: Any, y: Tensor, y_pred: Tensor, sample_weight: Any, training: bool
    ) -> dict[str, Any]:
        """The result of a step: `logs` and the user's metrics.

        If the user has overridden `compute_metrics`, `get_metrics_result` or `metrics`, the result is what
        `compute_metrics` returns instead.

        Args:
            logs: the library's results of the step.
            x, y, y_pred, sample_weight: as in Keras's `compute_metrics`.
            training: whether it is a step of training.
        """
        if not any(is_overridden(self, name) for name in ("compute_metrics", "get_metrics_result", "metrics")):
            measured = (*self.own_metrics, self.grad_norm, *self._extra_metrics.metrics)  # over all replicas
            names = {metric.name for metric in measured}
            return {**logs, **results_of(metric for metric in self.metrics if metric.name not in names)}
        not_updated = self.only_in_evaluation if training else [self.grad_norm]
        self._not_updated = tuple(metric.name for metric in not_updated)
        try:
            return self.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
        finally:
            self._not_updated = ()

    def log_means(
        self, nll: Tensor, weight: Tensor, own_loss: Any, *others: tuple[keras.metrics.Metric, Tensor]
    ) -> dict[str, Any]:
        """Updates metrics with the means of a batch over all replicas, and returns their results as logs.

        Args:
            nll: this replica's sum of weight times nll, of labels or rows. The mean nll updates `loss_mean`.
            weight: this replica's sum of the weights.
            own_loss: the result of `own_loss`. Unless it is `None`, the logs report it instead of the nll.
            *others: `(metric, this replica's sum)` of other metrics.
        """
        if own_loss is not None:
            # The shares add up to the loss of the whole batch. The division below is by the weights of all replicas.
            nll = own_loss * self.over_replicas(weight)
        metrics = [self.loss_mean, *(metric for metric, _ in others)]
        sums = [nll, *(total for _, total in others), weight]
        *totals, weight = tf.unstack(self.over_replicas(tf.stack(sums)))
        for metric, total in zip(metrics, totals, strict=True):
            metric.update_state(tf.math.divide_no_nan(total, weight), sample_weight=weight)
        return {metric.name: metric.result() for metric in metrics}

    def apply_gradients_of(self, loss: Tensor, tape: Any) -> dict[str, Any]:
        """Updates the weights with the gradients of `loss` on `tape`.

        Returns `{"grad_norm": norm}`, or `{}` if the optimizer does not compute the norm.
        """
        variables = self.trainable_variables
        self.check_weights()  # again, because the first step may have created the weights
        if variables:
            apply_gradients(self.optimizer, tape.gradient(loss, variables), variables)
        if not hasattr(self.inner_optimizer, "gradient_norm"):
            return {}
        self.grad_norm.update_state(self.inner_optimizer.gradient_norm if variables else 0.0)
        return {"grad_norm": self.grad_norm.result()}

    @staticmethod
    def over_replicas(x: Tensor) -> Any:
        """The sum over all replicas.

        Keras takes the unweighted mean of the replicas' results. So every replica updates its metrics with these sums.
        """
        return sum_over_replicas(x)

    # --------------------------------------------------------------------------------------------------------- export

    def input_signature(self) -> Any:
        """The inputs of the call for `export`: a structure of `keras.InputSpec`."""
        raise NotImplementedError

    def export(
        self,
        filepath: Any,
        format: str = "tf_saved_model",
        verbose: Any = None,
        input_signature: Any = None,
        **kwargs: Any,
    ) -> None:
        """Writes the call as a SavedModel, as `keras.Model.export` does. It works without this library.

        Args:
            filepath, format, verbose, **kwargs: see Keras.
            input_signature: by default, batches of any size and length, each input under its name.

        Raises:
            ParameterError: the inputs of the model are not known; the message says what to do.
        """
        if format == "tf_saved_model":  # other formats have other options
            check_names("export", kwargs, ["filepath", "format", "verbose", "input_signature"])
        if input_signature is None:
            input_signature = [self.build_for_export()]
        super().export(filepath, format, verbose, input_signature=input_signature, **kwargs)

    def build_for_export(self) -> Any:
        """Creates the weights if necessary. Returns `input_signature`."""
        signature = self.input_signature()
        if not self.has_all_weights:
            self(keras.tree.map_structure(_ones, signature))
        return signature

    @property
    def _default_save_signature(self) -> Any:
        """The function that `tf.saved_model.save(model, folder)` writes as default signature.

        It is the model's call, on the inputs that `export` would use.
        """
        specs = keras.tree.map_structure(
            lambda spec: tf.TensorSpec(spec.shape, spec.dtype, spec.name), self.input_signature()
        )
        return tf.function(lambda inputs: self(inputs), autograph=False, input_signature=[specs])

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> Any:
        if save_type == "savedmodel":
            self.build_for_export()  # raises a clear error, unlike TensorFlow's call of the signature
        return super()._trackable_children(save_type, **kwargs)

    # ----------------------------------------------------------------------------------------- stopping and resuming

    @property
    def metric_totals(self) -> dict[str, np.ndarray]:
        return {SUMS: numbers_in(self.metrics)}

    def set_metric_totals(self, sums: dict[str, np.ndarray]) -> None:
        set_numbers(self.metrics, sums[SUMS])


class _Watch(keras.callbacks.Callback):
    """Checks the data and overridden methods, while `fit`, `evaluate` or `predict` of a `MemorylessModel` runs.

    At the end of an epoch, an evaluation or a prediction, it checks that there was a batch. Before each batch, it
    checks that `reset_metrics` has reset the metrics of the library. From the second training batch on, and at the end
    of an epoch, it checks that the step has used the class weights.
    """

    def __init__(self, watched: MemorylessModel) -> None:
        super().__init__()
        self.watched: Any = watched  # not `model`, which Keras sets
        self.evaluated = "x"  # the argument that has the batches of an evaluation
        self.epoch = 0
        self.has_trained = False  # whether the epoch has had a batch
        self.has_tested = False  # whether the evaluation or prediction has had a batch

    def on_train_begin(self, logs: Any = None) -> None:
        self.evaluated = "validation_data"

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch
        self.has_trained = False

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.watched._check_was_reset()
        if batch:
            self.watched._check_class_weights()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.has_trained = True

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if not self.has_trained:
            raise no_batches("x", epoch)
        self.watched._check_class_weights()

    def on_test_begin(self, logs: Any = None) -> None:
        self.has_tested = False

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.watched._check_was_reset()

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self.has_tested = True

    def on_test_end(self, logs: Any = None) -> None:
        if not self.has_tested:
            raise no_batches(self.evaluated, self.epoch)

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        self.has_tested = True

    def on_predict_end(self, logs: Any = None) -> None:
        if not self.has_tested:
            raise no_batches("x")


def _check_data(method: str, arguments: dict[str, Any]) -> None:
    """Checks the weights and the sizes of batches in the arguments of `fit`, `evaluate` or `predict`.

    If `fit` calls `evaluate`, it has checked them.

    Raises:
        ParameterError: a weight in an array is negative or not finite, or data that are batches already, such as a
            dataset, have a `batch_size`.
    """
    if method == "evaluate" and called_by_fit(arguments):
        return
    for data, size in (("x", "batch_size"), ("validation_data", "validation_batch_size")):
        given = arguments.get(data)
        if given is not None and not isinstance(given, list | tuple | dict) and not hasattr(given, "shape"):
            refuse(method, arguments, {size: OWN_BATCHES})
    check_sample_weight("sample_weight", arguments.get("sample_weight"))
    validation = arguments.get("validation_data")
    if isinstance(validation, list | tuple) and len(validation) == 3:
        check_sample_weight("validation_data[2]", validation[2])


def _ones(spec: Any) -> Any:
    """The smallest tensor that a `keras.InputSpec` allows."""
    return tf.ones([1 if size is None else size for size in spec.shape], spec.dtype)
