"""Adds to Keras's `fit` and `evaluate` what several workers need to train together, each in its own process.

    fit -> own_batches, this worker's rows of every batch -> the loop over steps -> train_step on this worker's replicas

Every worker calls the same methods with the same dataset of whole batches. A single worker uses Keras's own loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from txl_tf.errors import ParameterError
from txl_tf.training.distribution import any_worker, divided, num_workers, own_rows
from txl_tf.training.trained_model import TrainedModel


class AmongWorkers(TrainedModel):
    """`TrainedModel` whose `train_step` and `test_step` return the same logs on every replica.

    The number of rows B of every batch must be a multiple of the number of replicas R. Replica r has the rows
    `[r * B / R, (r + 1) * B / R)`.

    Attributes:
        steps_left: number of remaining steps of the current evaluation.
    """

    steps_left: int = 0
    _stop_agreed: bool = False

    @property
    def several_workers(self) -> bool:
        return num_workers(self.distribute_strategy) > 1

    @property
    def stop_agreed(self) -> bool:
        """Whether the current step should be the last, the same on every worker."""
        return self._stop_agreed if self.several_workers else self.stop_requested

    def own_batches(self, arguments: dict[str, Any], name: str, steps: str) -> None:
        """Replaces the dataset in the argument `name` by this worker's rows of it.

        The new dataset repeats forever. Otherwise, all workers would have to agree at every step on whether it has
        ended. The argument `steps` gets the number of batches, unless it has a value.

        Raises:
            ParameterError: the argument is not a dataset with a known number of batches, or the model has no weights.
        """
        dataset = arguments.get(name)
        if isinstance(dataset, tf.distribute.DistributedDataset):  # the `validation_data` of `fit`
            return
        if not isinstance(dataset, tf.data.Dataset):
            allowed = "a tf.data.Dataset of whole batches where several workers train together"
            message = f"{name} must be {allowed}, got {type(dataset).__name__}"
            raise ParameterError(name, dataset, allowed, message)
        arguments[steps] = arguments.get(steps) or int(dataset.cardinality())
        if arguments[steps] < 1:
            allowed = f"of a known number of batches where several workers train together, or {steps} given"
            raise ParameterError(name, dataset, allowed, f"{name} must be {allowed}")
        if not self.has_all_weights:
            message = "the model must have its weights where several workers train together: call it on a batch"
            raise ParameterError("model", self, "called on a batch", message)
        strategy = self.distribute_strategy
        arguments[name] = divided(own_rows(dataset, strategy).repeat(), strategy)

    # -------------------------------------------------------------------------------------- methods that Keras calls

    def make_train_function(self, force: bool = False) -> None:
        """Keras's method. Several workers get a loop of their own."""
        if not self.several_workers:
            super().make_train_function(force)
        elif self.train_function is None or force:
            self.train_function = self._loop(self.train_step, lambda: self.steps_per_execution)

    def make_test_function(self, force: bool = False) -> None:
        """Keras's method. Several workers get a loop of their own."""
        if not self.several_workers:
            super().make_test_function(force)
        elif self.test_function is None or force:
            self.test_function = self._loop(self.test_step, self._next_steps)

    def _next_steps(self) -> int:
        """The number of steps in the next call of an evaluation."""
        steps = min(self.steps_per_execution, self.steps_left)
        self.steps_left -= steps
        return steps

    def _loop(self, step: Callable, next_steps: Callable[[], int]) -> Callable:
        """Makes the function that Keras calls for the next steps, with an iterator of distributed batches."""
        strategy = self.distribute_strategy

        def one_step(iterator):
            logs = strategy.run(tf.autograph.experimental.do_not_convert(step), args=(next(iterator),))
            return {name: strategy.experimental_local_results(value)[0] for name, value in logs.items()}

        if not self.run_eagerly:
            one_step = tf.function(one_step)

        def function(iterator):
            """Makes the next steps. Returns the logs of the last one."""
            if not isinstance(iterator, tf.distribute.DistributedIterator):  # train_on_batch or test_on_batch
                message = "several workers train together by fit and evaluate, with a tf.data.Dataset"
                raise ParameterError("x", iterator, "a tf.data.Dataset, given to fit or evaluate", message)
            self._stop_agreed = any_worker(strategy, self.stop_requested)
            logs = {}
            # A Python loop: in one graph, the sums over workers would need the same shapes in every step. But, for
            # example, the gradient of an embedding has a row for every token of the batch.
            for _ in range(next_steps()):
                logs = one_step(iterator)
            return logs

        return function

    def _maybe_symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> None:
        """Keras's method, which is not called for several workers: it fails there, and their models are built."""
        if not self.several_workers:
            super()._maybe_symbolic_build(iterator, data_batch)
