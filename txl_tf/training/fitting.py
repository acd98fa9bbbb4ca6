"""The loops of `fit` and `evaluate`, for models that take their batches from a `tf.data.Dataset`.

    fit                 epochs: reset the metrics, the steps, the validation; callbacks before and after each of them
        Epochs          the calls of an epoch, each with the iterator that it takes its batches from
        run_call        one call: the next `steps_per_execution` steps, see `training/loop.py`
    evaluate            one pass over the dataset, without training

Callbacks get the same calls as from `keras.Model.fit` and `evaluate`, in the same order, with the same logs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

from txl_tf.errors import ParameterError

RunCall = Callable[[Any], dict[str, Any]]  # takes an iterator of batches, runs the steps of one call, returns logs

_OUT_OF_DATA = (
    "Your input ran out of data; interrupting training. Make sure that your dataset can generate at least "
    "`steps_per_epoch * epochs` batches. You may need to use the `.repeat()` function when building your dataset."
)


def no_batches(name: str, epoch: int = 0) -> ParameterError:
    """The error of an epoch or an evaluation without a batch. The logs would contain a loss of 0.

    Args:
        name: the argument of `fit` or `evaluate` that has the batches.
        epoch: number of the epoch, counted from 0.
    """
    message = f"{name} must have at least one batch, got an empty dataset"
    if epoch:
        message = f"{name} must have at least one batch in every epoch, got none in epoch {epoch + 1}: see repeat()"
    return ParameterError(name, None, "a dataset of at least one batch", message)


class Epochs:
    """Divides every epoch into calls.

    With `steps`, an epoch continues the dataset where the last epoch stopped. If the dataset ends within an epoch, a
    warning says so, the epoch ends early, and the next epoch starts the dataset again. Without `steps`, an epoch is the
    whole dataset.

    Args:
        dataset: `tf.data.Dataset`, or a distributed one.
        count: number of its batches; a negative number if it is infinite or unknown.
        steps: number of steps in an epoch, or `None`.
        steps_per_call: number of steps in a call, `steps_per_execution` of Keras.
    """

    def __init__(self, dataset: Any, count: int, steps: int | None, steps_per_call: int) -> None:
        self.dataset = dataset
        self.count = count if count >= 0 else None
        self.steps = steps
        self.steps_per_call = steps_per_call
        self.iterator: Any = None  # `None` before the dataset starts
        self.taken = 0  # batches since its start

    @property
    def length(self) -> int | None:
        """The number of steps in an epoch, if it is known."""
        return self.steps or self.count

    def calls(self) -> Iterator[tuple[int, int, Any]]:
        """Yields `(first step, last step, iterator)` of each call of the next epoch. Steps are counted from 0.

        As in Keras, the last call of an epoch counts as `steps_per_call` steps, even if fewer batches are left.
        """
        if not self.steps:
            self.iterator = None  # every epoch starts the dataset
        first = 0
        while self.length is None or first < self.length:
            if self.iterator is None:
                self.iterator = iter(self.dataset)
                self.taken = 0
            elif self.count is not None and self.taken >= self.count:
                self.end()
                return
            self.taken += self.steps_per_call
            yield first, first + self.steps_per_call - 1, self.iterator
            first += self.steps_per_call
        if self.count is not None and self.taken >= self.count:
            self.iterator = None

    def end(self) -> None:
        """Makes the next epoch start the dataset again. With `steps`, warns that the dataset was too short.

        Call it when the dataset has ended before the epoch.
        """
        if self.steps:
            warnings.warn(_OUT_OF_DATA, stacklevel=2)
        self.iterator = None


def fit(
    model: Any,
    run_call: RunCall,
    epochs: Epochs,
    arguments: dict[str, Any],
    validate: Callable[[keras.callbacks.CallbackList], dict[str, Any]] | None = None,
) -> keras.callbacks.History:
    """Trains a model.

    Args:
        model: a compiled model with an optimizer.
        run_call: trains for the steps of one call. It raises StopIteration or OutOfRangeError at the end of the
            dataset.
        epochs: divides the epochs into calls.
        arguments: arguments of `keras.Model.fit`. `epochs`, `initial_epoch`, `callbacks`, `verbose` and
            `validation_freq` are used.
        validate: function of the callbacks that evaluates the model on the validation data and returns the logs.

    Returns:
        The Keras `History`.

    Raises:
        ParameterError: an epoch has no batch.
    """
    n_epochs = arguments.get("epochs", 1)
    callbacks = _callbacks(model, arguments, epochs=n_epochs, steps=epochs.length, add_history=True)
    model.stop_training = False
    callbacks.on_train_begin()
    logs: dict[str, Any] | None = None
    # `BackupAndRestore` and `RunState` set the first epoch on the model.
    for epoch in range(model._initial_epoch or arguments.get("initial_epoch", 0), n_epochs):
        model.reset_metrics()
        callbacks.on_epoch_begin(epoch)
        step_logs: dict[str, Any] | None = None
        for first, last, iterator in epochs.calls():
            callbacks.on_train_batch_begin(first)
            try:
                step_logs = run_call(iterator)
            except (StopIteration, tf.errors.OutOfRangeError):
                epochs.end()
                break
            callbacks.on_train_batch_end(last, step_logs)
            if model.stop_training:
                break
        if step_logs is None:
            raise no_batches("x", epoch)
        logs = _logs_of_epoch(model, step_logs)
        if validate is not None and is_due(epoch, arguments.get("validation_freq", 1)):
            logs |= {f"val_{name}": value for name, value in validate(callbacks).items()}
        callbacks.on_epoch_end(epoch, logs)
        if model.stop_training:
            break
    model.optimizer.finalize_variable_values(model.trainable_weights)  # sets them to their moving averages, if any
    callbacks.on_train_end(logs)
    return model.history


def evaluate(model: Any, run_call: RunCall, epochs: Epochs, arguments: dict[str, Any]) -> dict[str, Any]:
    """Evaluates a model on one epoch.

    Args:
        model: a compiled model.
        run_call: evaluates the batches of one call. It raises StopIteration or OutOfRangeError at the end of the
            dataset.
        epochs: divides the evaluation, one epoch, into calls.
        arguments: arguments of `keras.Model.evaluate`. `callbacks` and `verbose` are used.

    Returns:
        The logs, with Python floats for scalars.

    Raises:
        ParameterError: the dataset has no batch.
    """
    callbacks = _callbacks(model, arguments, epochs=1, steps=epochs.length)
    model.stop_evaluating = False
    callbacks.on_test_begin()
    model.reset_metrics()
    step_logs: dict[str, Any] | None = None
    for first, last, iterator in epochs.calls():
        callbacks.on_test_batch_begin(first)
        try:
            step_logs = run_call(iterator)
        except (StopIteration, tf.errors.OutOfRangeError):
            epochs.end()
            break
        callbacks.on_test_batch_end(last, step_logs)
        if model.stop_evaluating:
            break
    if step_logs is None:
        raise no_batches("validation_data" if called_by_fit(arguments) else "x")
    logs = _logs_of_epoch(model, step_logs)
    callbacks.on_test_end(logs)
    return logs


def called_by_fit(arguments: dict[str, Any]) -> bool:
    """Whether `fit` calls `evaluate` with these arguments, for a validation: then it passes its `CallbackList`."""
    return isinstance(arguments.get("callbacks"), keras.callbacks.CallbackList)


def is_due(epoch: int, frequency: int | Iterable[int]) -> bool:
    """Whether an epoch, counted from 0, ends with a validation.

    Args:
        epoch: number of the epoch.
        frequency: n, for a validation after every n-th epoch; or the numbers of epochs, counted from 1.
    """
    return (epoch + 1) % frequency == 0 if isinstance(frequency, int) else epoch + 1 in frequency


def _logs_of_epoch(model: Any, step_logs: dict[str, Any]) -> dict[str, Any]:
    """The logs at the end of an epoch: the results of the model's metrics.

    If their names are not those in `step_logs`, the logs of the last step, the result is `step_logs`, as in Keras.
    """
    epoch_logs = model.get_metrics_result()
    return scalars_as_floats(epoch_logs if epoch_logs.keys() == step_logs.keys() else step_logs)


def scalars_as_floats(logs: Any) -> Any:
    """Logs, a dictionary or a list, with a Python float for each scalar. Other values do not change.

    Before Keras 3.14, Keras itself returns some scalars as tensors.
    """
    return keras.tree.map_structure(lambda x: float(x) if getattr(x, "shape", None) == () else x, logs)


def _callbacks(
    model: Any, arguments: dict[str, Any], *, epochs: int, steps: int | None, add_history: bool = False
) -> keras.callbacks.CallbackList:
    """The callbacks of `fit` or `evaluate`, as Keras calls them.

    A `CallbackList` among the arguments is returned: `fit` passes its own to `evaluate`.
    """
    callbacks: Any = arguments.get("callbacks")
    if called_by_fit(arguments):
        return callbacks
    verbose = arguments.get("verbose", "auto")
    return keras.callbacks.CallbackList(
        callbacks, add_history=add_history, add_progbar=verbose != 0, model=model, verbose=verbose, epochs=epochs,
        steps=steps,
    )  # fmt: skip
