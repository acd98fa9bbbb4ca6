"""What a run needs of a model that Keras's own `fit` trains: to stop after a step, and to go on exactly from there; and
what such models have in common: a loss of their own, dropout by global row, sums over all replicas.
"""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from txl_tf.training.distribution import sum_over_replicas
from txl_tf.training.step import apply_gradients


class Resumable:
    """Mixin for Keras models without state between batches; `MemoryModel` has the same of its own.

    Attributes:
        stop_requested: set it, as from a signal handler, to stop `fit` after the step that runs.
        measures: what the model measures itself, for a message.
        own_metrics: its metrics, but for the norm of the gradients.
        seed, grad_norm: set by the model: an int, and a metric.
    """

    stop_requested = False
    carried_names = ()  # keys of `carried_arrays`
    measures = "loss"

    # ------------------------------------------------------------------------------------------------------ training

    def compile(self, optimizer=None, jit_compile=False, **kwargs):
        """Configures Keras's `fit` and `evaluate`. The loss is the model's own; `kwargs` are of `keras.Model.compile`.

        Raises:
            ValueError: a loss or metrics are given.
        """
        if kwargs.get("loss") is not None or kwargs.get("metrics"):
            raise ValueError(f"loss and metrics must be None: the model has its own, {self.measures}")
        super().compile(optimizer if optimizer is not None else "adam", jit_compile=jit_compile, **kwargs)

    @property
    def metrics(self):
        return [*self.own_metrics, *[self.grad_norm] * hasattr(self._inner_optimizer, "gradient_norm")]

    @property
    def _inner_optimizer(self):
        """The optimizer itself, where another around it scales the loss."""
        optimizer = getattr(self, "optimizer", None)
        return getattr(optimizer, "inner_optimizer", optimizer)

    def step_key(self, rows):
        """The dropout key of the step that runs, for the `rows` of this replica; see `dropout`."""
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        return tf.stack([self.seed % 2**31, tf.cast(self.optimizer.iterations, tf.int32), replica * rows])

    def apply_gradients_of(self, loss, tape):
        """Updates the weights; returns what the logs say of it."""
        variables = self.trainable_variables
        apply_gradients(self.optimizer, tape.gradient(loss, variables), variables)
        if not hasattr(self._inner_optimizer, "gradient_norm"):
            return {}
        self.grad_norm.update_state(self._inner_optimizer.gradient_norm)
        return {"grad_norm": self.grad_norm.result()}

    @staticmethod
    def over_replicas(x):
        """The sum over all replicas.

        Keras takes the mean of the replicas' results, whatever they weigh: so every replica counts all in its metrics.
        """
        return sum_over_replicas(x)

    # ------------------------------------------------------------------------------------------ stopping and going on

    @property
    def stop_agreed(self) -> bool:
        return self.stop_requested

    @property
    def metric_totals(self) -> np.ndarray:
        """float64 array, the sums that the logs of this epoch are computed from."""
        return np.array([keras.ops.convert_to_numpy(variable) for variable in self._sums], np.float64)

    def set_metric_totals(self, array: np.ndarray) -> None:
        """Goes on with sums from `metric_totals`. Call it once an epoch has begun, from a callback."""
        for variable, value in zip(self._sums, array, strict=True):
            variable.assign(value)

    @property
    def _sums(self) -> list[keras.Variable]:
        return [variable for metric in self.metrics for variable in metric.variables]

    def carried_arrays(self) -> dict[str, np.ndarray]:
        """What goes from batch to batch besides weights and optimizer, for a checkpoint: nothing."""
        return {}

    def set_carried_arrays(self, arrays: dict[str, np.ndarray]) -> None:
        """Goes on with arrays from `carried_arrays`."""
