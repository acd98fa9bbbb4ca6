"""The base of all models: a loss of their own, stopping after a step, exact resume."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from txl_tf.errors import ParameterError
from txl_tf.kernels.dtypes import wide_dtype
from txl_tf.nn.quantization import Unquantized
from txl_tf.training.distribution import sum_over_replicas

_OF_KERAS = "optimizer run_eagerly steps_per_execution jit_compile auto_scale_loss"


class Turns:
    """One thread at a time runs the methods of a model that share state, such as metrics; the others wait.

    ```python
    with turns("evaluate"):     # the same thread may enter again, as `fit` does for its validation
        ...
    ```

    `fit` takes long: while it runs, the others get a ParameterError instead.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._thread = self._method = None  # of the outermost method that runs

    @contextlib.contextmanager
    def __call__(self, method: str) -> Iterator[None]:
        thread = threading.get_ident()
        with self._changed:
            while self._thread not in (None, thread):
                if self._method == "fit":
                    message = f"{method} cannot run: fit of the same model runs in another thread"
                    raise ParameterError(method, "fit", "called when no other thread runs fit", message)
                self._changed.wait()
            before = self._thread, self._method
            self._thread, self._method = thread, self._method or method
        try:
            yield
        finally:
            with self._changed:
                self._thread, self._method = before
                self._changed.notify_all()


class TrainedModel(Unquantized):
    """Mixin for Keras models with a `compile` of their own, which sets `auto_scale_loss`.

    A saved model has what `compile` was given and the optimizer's state; loaded, it goes on training as if it had never
    been saved.

    Attributes:
        seed: int that dropout derives from in training; set by the model.
        stop_requested: set it, as from a signal handler, to stop `fit` after the step that runs. Of several workers,
            all stop after the same one.
        carried_names: keys of `carried_arrays`.
    """

    smaller = 'txl_tf.export_saved_model(model, directory, weights="bfloat16") writes a model of half the size'
    stop_requested = False
    auto_scale_loss = True
    carried_names = ()
    _hooks_of = None

    @property
    def has_all_weights(self) -> bool:
        """Whether all weights exist, so that the optimizer can have its own."""
        return True

    def build_at_once(self, inputs_shape: Any) -> None:
        """`build` in a constructor. A subclass may still add layers after it, which Keras forbids what is built."""
        self.build(inputs_shape)
        self._tracker.unlock()

    # ------------------------------------------------------------------------------------------- `compile`, saved too

    def compile_arguments(self) -> dict[str, Any]:
        """The arguments that `compile` was given, by name."""
        return {name: getattr(self, name) for name in _OF_KERAS.split()}

    def get_compile_config(self) -> dict[str, Any] | None:
        if not self.compiled:
            return None
        frozen = [i for i, layer in enumerate(self._flatten_layers()) if not layer.trainable]
        return {**keras.saving.serialize_keras_object(self.compile_arguments()), "frozen": frozen}

    def compile_from_config(self, config: dict[str, Any]) -> None:
        layers = list(self._flatten_layers())
        for i in config.pop("frozen", ()):  # files of older versions have none
            layers[i].trainable = False
        self.compile(**keras.saving.deserialize_keras_object(config))
        self.build_optimizer()

    def build_optimizer(self) -> None:
        """Makes the variables of the optimizer, if the model has its weights: a failing step would make only some."""
        optimizer = getattr(self, "optimizer", None)
        if optimizer is not None and not optimizer.built and self.has_all_weights:
            with self.distribute_strategy.scope():  # within a step, some strategies could not
                optimizer.build(self.trainable_variables)

    def check_weights(self) -> None:
        """Raises ParameterError where weights to train are float16 or bfloat16, which lose small updates.

        In bfloat16, Adam's `beta_2` of 0.999 is 1, so that its steps are 0; in float16, its epsilon is 0.
        """
        dtypes = {variable.dtype: variable.path for variable in self.trainable_variables}
        for dtype in ("float16", "bfloat16"):
            if self.dtype_policy.variable_dtype == dtype or dtype in dtypes:
                where = f" for {dtypes[dtype]}" if dtype in dtypes else ""
                message = (
                    f"dtype must be mixed_{dtype} in training, which keeps the weights in float32, got {dtype}{where}"
                )
                raise ParameterError("dtype", dtype, [f"mixed_{dtype}", "float32", "float64"], message)

    @property
    def loss_dtype(self) -> str:
        """The dtype of the loss and of sums over labels: float64 where the model computes in it, else float32."""
        return wide_dtype(self.compute_dtype).name

    def check_steps(self, steps_per_epoch: int | None) -> None:
        """Raises ValueError where calls of `steps_per_execution` steps would go past the end of an epoch."""
        if (steps_per_epoch or 0) % self.steps_per_execution:
            raise ValueError(
                f"steps_per_epoch must be a multiple of steps_per_execution={self.steps_per_execution}, "
                f"got {steps_per_epoch}"
            )

    def hooks_changed(self, function: str, *names: str) -> bool:
        """Whether a method of `names` is another one than when the `function` of that name was made; notes them."""
        methods = [getattr(self, name) for name in names]
        found = [getattr(method, "__func__", method) for method in methods]  # a bound method would hold the model
        self._hooks_of = self._hooks_of or {}
        before = self._hooks_of.get(function, found)
        self._hooks_of[function] = found
        return found != before

    # ------------------------------------------------------------------------------------------------------- one step

    @property
    def inner_optimizer(self) -> keras.optimizers.Optimizer | None:
        """The optimizer itself, where Keras's loss-scaling optimizer wraps it."""
        optimizer = getattr(self, "optimizer", None)
        return getattr(optimizer, "inner_optimizer", optimizer)

    def step_key(self, rows: Any) -> tf.Tensor:
        """The dropout key of the step that runs, for the `rows` of this replica; see `dropout`."""
        step = self.optimizer.iterations
        if self.inner_optimizer.gradient_accumulation_steps:  # of Keras, which counts the updates: several batches each
            step = self.inner_optimizer._iterations.value
        return tf.stack([self.seed % 2**31, tf.cast(step, tf.int32), self.first_row(rows)])

    def first_row(self, rows: Any) -> tf.Tensor:
        """The number of this replica's first row in the batch; here every replica has `rows` of them."""
        return tf.distribute.get_replica_context().replica_id_in_sync_group * rows

    def with_penalties(self, loss: tf.Tensor, parts: int = 1, fraction: tf.Tensor | None = None) -> tf.Tensor:
        """The loss of one of `parts` of this replica's rows, with its share of regularizers and of `add_loss`.

        Args:
            fraction: what the share is multiplied by; `None` for 1.
        """
        if not self.losses:
            return loss
        penalties = tf.add_n([tf.cast(penalty, loss.dtype) for penalty in self.losses])
        penalties /= parts * self.distribute_strategy.num_replicas_in_sync
        return loss + (penalties if fraction is None else penalties * fraction)

    # ----------------------------------------------------------------------- what a checkpoint holds besides weights

    def training_logs(self) -> dict[str, float]:
        """What the logs of this epoch's training say: what a step returns, of all its steps."""
        return {name: float(value) for name, value in self.get_metrics_result().items()}

    def carried_arrays(self) -> dict[str, np.ndarray]:
        """The state that goes from batch to batch besides weights and optimizer. All workers must call it together."""
        return {}

    def set_carried_arrays(self, arrays: dict[str, np.ndarray]) -> None:
        """Continues with arrays from `carried_arrays`. Call it once `fit` has begun, from a callback."""


def results_of(metrics: Iterable[keras.metrics.Metric]) -> dict[str, Any]:
    """`{name: result}` of metrics; one that has several results has a name for each."""
    found = {}
    for metric in metrics:
        result = metric.result()
        found |= result if isinstance(result, dict) else {metric.name: result}
    return found


def as_numbers(results: Any) -> Any:
    """What a method of Keras returned, with a Python number for each scalar: before Keras 3.14, some are tensors."""
    return keras.tree.map_structure(lambda x: float(x) if getattr(x, "shape", None) == () else x, results)


# ------------------------------------------------------------------------------------------------------------ updates


def agree_on_overflow(gradients, optimizer):
    """`gradients`, but NaN on every replica where half precision overflowed on any: all of them then skip the step.

    Keras's `LossScaleOptimizer` looks at the gradients of each replica, or of the first, before they are added up.
    """
    context = tf.distribute.get_replica_context()
    if not is_scaled(optimizer) or context.num_replicas_in_sync == 1:
        return gradients
    finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(gradient)) for gradient in gradients])
    n_finite = sum_over_replicas(tf.cast(finite, tf.float32))
    factor = tf.where(n_finite < context.num_replicas_in_sync, float("nan"), 1.0)
    return [gradient * tf.cast(factor, gradient.dtype) for gradient in gradients]


def apply_gradients(optimizer, gradients, variables):
    """`optimizer.apply_gradients`, called on every replica.

    A step counts where half precision overflows, too: loss scaling skips its update, but the data goes on.

    Keras adds up gradients by `ReplicaContext.all_reduce` where there is one replica, too. That keeps the graph for
    ever (see `kernels/gradients.py`), so a single replica goes round it where the optimizer does not look for it.
    """
    gradients = agree_on_overflow(gradients, optimizer)
    if is_scaled(optimizer):
        step = tf.convert_to_tensor(optimizer.iterations)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        if not optimizer.inner_optimizer.gradient_accumulation_steps:  # else Keras counts updates, not steps
            optimizer.iterations.assign(step + 1)
    elif tf.distribute.has_strategy():
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
    else:
        context = tf.distribute.get_replica_context()
        context.merge_call(lambda strategy: optimizer.apply_gradients(zip(gradients, variables, strict=True)))


def is_scaled(optimizer):
    """Whether it is Keras's optimizer that scales losses, around another."""
    return isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
