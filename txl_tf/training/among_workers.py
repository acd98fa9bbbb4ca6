"""`fit` and `evaluate` of several workers that train together, each in its own process.

    fit_among_workers
        own_batches     this worker's rows of every batch
        fitting.fit     the loop over epochs and calls, with callbacks; training/fitting.py
        train_step      one step on each of this worker's replicas

Every worker calls the same methods with the same dataset of whole batches. These functions are for models without
memory (`MemorylessModel`). If a single worker trains them, it uses Keras's own methods.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from txl_tf.errors import ParameterError
from txl_tf.training import fitting
from txl_tf.training.distribution import any_worker, divided, num_workers, own_rows, replica_tensors
from txl_tf.training.keras_arguments import refuse
from txl_tf.training.trained_model import TrainedModel

OWN_BATCHES = "the batches are those of the dataset"
_IN_DATASET = "x is a dataset that also contains it"
_SINGLE_WORKER_ONLY = {
    "y": _IN_DATASET,
    "sample_weight": _IN_DATASET,
    "batch_size": OWN_BATCHES,
    "validation_batch_size": OWN_BATCHES,
    "validation_split": "give validation_data, a dataset",
}


class AmongWorkers(TrainedModel):
    """`TrainedModel` whose `train_step` and `test_step` return the same logs on every replica.

    The number of rows B of every batch must be a multiple of the number of replicas R. Replica r has the rows
    `[r * B / R, (r + 1) * B / R)`.
    """

    _stop_agreed: bool = False

    @property
    def several_workers(self) -> bool:
        """Whether several workers train together."""
        return num_workers(self.distribute_strategy) > 1

    @property
    def stop_agreed(self) -> bool:
        """Whether the current step should be the last. All workers have the same answer."""
        return self._stop_agreed if self.several_workers else self.stop_requested

    def with_checks(self, step: str, data: Any) -> Any:
        """Returns `data`; of a dataset, one that also checks its batches. The subclass defines it."""
        raise NotImplementedError

    def own_batches(self, arguments: dict[str, Any], name: str, steps: str, step: str) -> None:
        """Replaces the dataset in the argument `name` by this worker's rows of it, which repeat forever.

        If the dataset ended, all workers would have to agree at every step on whether it has. The argument `steps` gets
        the number of batches, unless it has a value. A dataset that is distributed already is not replaced. Then
        `steps` must have a value.

        Args:
            arguments: `{name: value}` of a call of `fit` or `evaluate`, which is changed.
            name: name of the argument that has the dataset.
            steps: name of the argument that is the number of steps.
            step: name of the method that takes the batches, such as "train_step".

        Raises:
            ParameterError: the argument is not a dataset, its number of batches is neither known nor given, or the
                model has no weights.
        """
        dataset = arguments.get(name)
        if isinstance(dataset, tf.distribute.DistributedDataset):  # of the user, or the `validation_data` of `fit`
            if not arguments.get(steps):
                allowed = f"the number of steps, because {name} is a distributed dataset, whose length is not known"
                raise ParameterError(steps, None, allowed, f"{steps} must be {allowed}")
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
        arguments[name] = divided(own_rows(self.with_checks(step, dataset), strategy).repeat(), strategy)

    def fit_among_workers(self, arguments: dict[str, Any]) -> keras.callbacks.History:
        """`fit` with the `arguments` of `keras.Model.fit`."""
        refuse("fit", arguments, _SINGLE_WORKER_ONLY)
        self.own_batches(arguments, "x", "steps_per_epoch", "train_step")
        self.check_steps("steps_per_epoch", arguments["steps_per_epoch"])
        validation = arguments.get("validation_data")
        if validation is not None:
            self.own_batches(arguments, "validation_data", "validation_steps", "test_step")
            validation = arguments["validation_data"]
        options = {"steps": arguments.get("validation_steps"), "return_dict": True}

        def validate(callbacks):
            return self.evaluate(validation, callbacks=callbacks, **options)

        epochs = self._epochs(arguments["x"], arguments["steps_per_epoch"])
        run_call = self._call_of("train_step", lambda: self.steps_per_execution)
        return fitting.fit(self, run_call, epochs, arguments, None if validation is None else validate)

    def evaluate_among_workers(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The logs of `evaluate` with the `arguments` of `keras.Model.evaluate`."""
        refuse("evaluate", arguments, _SINGLE_WORKER_ONLY)
        self.own_batches(arguments, "x", "steps", "test_step")
        left = arguments["steps"]

        def next_steps():
            nonlocal left
            steps = min(self.steps_per_execution, left)
            left -= steps
            return steps

        epochs = self._epochs(arguments["x"], arguments["steps"])
        return fitting.evaluate(self, self._call_of("test_step", next_steps), epochs, arguments)

    def _epochs(self, dataset: Any, steps: int) -> fitting.Epochs:
        """Divides epochs of `steps` steps into calls. The dataset is infinite."""
        return fitting.Epochs(dataset, tf.data.INFINITE_CARDINALITY, steps, self.steps_per_execution)

    def _call_of(self, name: str, next_steps: Callable[[], int]) -> fitting.RunCall:
        """Makes the function of one call: it takes an iterator of distributed batches, and returns logs.

        Args:
            name: "train_step" or "test_step".
            next_steps: function that a call asks, once, for the number of its steps.
        """
        strategy = self.distribute_strategy

        def run_call(iterator):
            self._stop_agreed = any_worker(strategy, self.stop_requested)
            logs = {}
            # Each step calls the graph again: in one graph of several steps, a sum over workers could not change its
            # shape from step to step.
            for _ in range(next_steps()):
                logs = self._step_of_workers(name)(iterator)
            return logs

        return run_call

    def _step_of_workers(self, name: str) -> Callable[[Any], dict[str, Any]]:
        """The function of one step on this worker's replicas. It takes an iterator, and returns the logs.

        It is compiled once, unless `run_eagerly` is set.
        """
        strategy = self.distribute_strategy

        def one_step(iterator):
            # A lambda, because `run` does not pass `self` to a method that has a decorator.
            logs = strategy.run(lambda batch: getattr(self, name)(batch), args=(iterator.get_next(),))
            # Not `name`: in Python 3.12 and 3.13, a comprehension over `name` hides it from the lambda.
            return {key: replica_tensors(value)[0] for key, value in logs.items()}

        return self.cached_result(
            name, lambda: one_step if self.run_eagerly else tf.function(one_step, autograph=False)
        )

    def refuse_batch_of_workers(self, method: str) -> None:
        """Raises ParameterError if the model trains on several workers: `method`, for a single batch, needs one."""
        if self.several_workers:
            message = f"several workers train together by fit and evaluate, with a tf.data.Dataset, not by {method}"
            raise ParameterError("x", method, "a tf.data.Dataset, given to fit or evaluate", message)
