"""The base of all models: a loss of their own, stopping after a step, exact resume."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from txl_tf.errors import ParameterError
from txl_tf.layers.common.dtypes import wide_dtype
from txl_tf.layers.mixins.quantization import Unquantized
from txl_tf.training.distribution import sum_over_replicas

_OF_KERAS = "optimizer run_eagerly steps_per_execution jit_compile auto_scale_loss"


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

    def with_penalties(self, loss: tf.Tensor, parts: int = 1) -> tf.Tensor:
        """The loss of one of `parts` of this replica's rows, with its share of regularizers and of `add_loss`."""
        if not self.losses:
            return loss
        penalties = tf.add_n([tf.cast(penalty, loss.dtype) for penalty in self.losses])
        return loss + penalties / (parts * self.distribute_strategy.num_replicas_in_sync)

    # ----------------------------------------------------------------------- what a checkpoint holds besides weights

    def training_logs(self) -> dict[str, float]:
        """What the logs of this epoch's training say: what a step returns, of all its steps."""
        return {name: float(value) for name, value in self.get_metrics_result().items()}

    def carried_arrays(self) -> dict[str, np.ndarray]:
        """The state that goes from batch to batch besides weights and optimizer. All workers must call it together."""
        return {}

    def set_carried_arrays(self, arrays: dict[str, np.ndarray]) -> None:
        """Continues with arrays from `carried_arrays`. Call it once `fit` has begun, from a callback."""


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
    """`optimizer.apply`, called on every replica.

    A step counts where half precision overflows, too: loss scaling skips its update, but the data goes on.

    Keras adds up gradients by `ReplicaContext.all_reduce` where there is one replica, too. That keeps the graph for
    ever (see `layers/common/gradients.py`), so a single replica goes round it where the optimizer does not look for it.
    """
    gradients = agree_on_overflow(gradients, optimizer)
    if is_scaled(optimizer):
        step = tf.convert_to_tensor(optimizer.iterations)
        optimizer.apply(gradients, variables)
        if not optimizer.inner_optimizer.gradient_accumulation_steps:  # else Keras counts updates, not steps
            optimizer.iterations.assign(step + 1)
    elif tf.distribute.has_strategy():
        optimizer.apply(gradients, variables)
    else:
        context = tf.distribute.get_replica_context()
        context.merge_call(lambda strategy: optimizer.apply(gradients, variables))


def is_scaled(optimizer):
    """Whether it is Keras's optimizer that scales losses, around another."""
    return isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
