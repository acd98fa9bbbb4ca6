"""The metrics that `compile` gets, measured over all replicas; checks of the names of metrics."""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from txl_tf.errors import ParameterError, brief
from txl_tf.kernels.shapes import Tensor
from txl_tf.nn.parts import is_overridden
from txl_tf.training.distribution import sum_over_replicas

# Keras's cross-entropy under its names, and as classes and functions. By default, it expects probabilities, but the
# outputs of the models are logits.
_NAMES_OF_CROSS_ENTROPY = ("crossentropy", "ce", "sparse_categorical_crossentropy", "SparseCategoricalCrossentropy")
_CROSS_ENTROPIES = (
    keras.metrics.SparseCategoricalCrossentropy,
    keras.losses.SparseCategoricalCrossentropy,
    keras.metrics.sparse_categorical_crossentropy,
    keras.losses.sparse_categorical_crossentropy,
)


class MeanOfFunction(keras.metrics.Mean):
    """The weighted mean of the results of a function of labels and outputs.

    Args:
        function: returns values `[batch, labels]`, each with the weight of its label; or `[batch]`, each with the mean
            weight of the row's labels whose weight is not 0; or one number, with the same weight for every batch.
        name: name of the metric.
    """

    def __init__(self, function: Callable, name: str, **kwargs: Any) -> None:
        super().__init__(name=name, **kwargs)
        self.function = function

    def update_state(self, labels: Any, outputs: Any, sample_weight: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        values = tf.convert_to_tensor(self.function(labels, outputs))
        if values.shape.rank == 0:
            sample_weight = None
        elif values.shape.rank == 1:
            sample_weight = tf.convert_to_tensor(sample_weight)
            count = tf.math.count_nonzero(sample_weight, 1, dtype=sample_weight.dtype)
            sample_weight = tf.math.divide_no_nan(tf.reduce_sum(sample_weight, 1), count)
        super().update_state(values, sample_weight=sample_weight)


class CompiledMetrics:
    """The metrics that `compile` was given.

    Args:
        metrics, weighted_metrics: arguments of `compile`.
        own_names: names of the model's own metrics in the logs.
        redundant_names: names in `own_names` under which Keras has the same metric. If `compile` gets such a name, it
            is ignored.
        n_classes: width of the outputs.

    Attributes:
        given: `{"metrics": metrics, "weighted_metrics": weighted_metrics}`.
        metrics: list of `keras.metrics.Metric`.

    Raises:
        ParameterError: a value is not a metric, its name exists already, or it was made outside of the strategy.
    """

    def __init__(
        self,
        metrics: Any = None,
        weighted_metrics: Any = None,
        own_names: Iterable[str] = (),
        redundant_names: Iterable[str] = (),
        n_classes: int = 1,
    ) -> None:
        self.given = {"metrics": metrics, "weighted_metrics": weighted_metrics}
        self._plain, self._weighted = (_metrics_of(name, given, redundant_names) for name, given in self.given.items())
        self.metrics = [*self._plain, *self._weighted]
        used_names = [*own_names]
        arguments = ["metrics"] * len(self._plain) + ["weighted_metrics"] * len(self._weighted)
        for argument, metric in zip(arguments, self.metrics, strict=True):
            if metric.name in used_names and metric in self._weighted and not _is_given(metric, weighted_metrics):
                metric.name = f"weighted_{metric.name}"  # as Keras names it
            if metric.name in used_names:
                others = ", ".join(own_names)
                message = f"metrics must have different names, and none of {others}, found {metric.name} again"
                raise ParameterError(argument, metric.name, f"names other than {', '.join(used_names)}", message)
            used_names.append(metric.name)
            _make_variables(argument, metric, n_classes)

    def update(self, labels: Tensor, outputs: Tensor, counted: Tensor, weights: Any) -> dict[str, tf.Tensor]:
        """Updates the metrics, and returns their results over all replicas.

        Arguments: see `MemorylessModel.measure`.
        """
        for metrics, label_weights in ((self._plain, counted), (self._weighted, weights)):
            for metric in metrics:
                metric.update_state(labels, outputs, sample_weight=label_weights)
        return results_of(self.metrics, _result)


def results_of(
    metrics: Iterable[keras.metrics.Metric], result_of: Callable[[Any], Any] = lambda metric: metric.result()
) -> dict[str, Any]:
    """`{name: result}` of metrics. A metric whose result is a dictionary adds its items instead.

    Args:
        metrics: the metrics.
        result_of: function that returns the result of a metric.
    """
    results = {}
    for metric in metrics:
        result = result_of(metric)
        results |= result if isinstance(result, dict) else {metric.name: result}
    return results


def numbers_in(metrics: Iterable[keras.metrics.Metric]) -> np.ndarray:
    """The values of all variables of metrics, one after the other, as one float64 array."""
    values = [np.ravel(tf.convert_to_tensor(x).numpy()) for metric in metrics for x in metric.variables]
    return np.concatenate([*values, []])


def set_numbers(metrics: Sequence[keras.metrics.Metric], numbers: Any) -> None:
    """Sets the variables of metrics to `numbers_in` them. Raises ParameterError if these are of other metrics."""
    variables = [variable for metric in metrics for variable in metric.variables]
    sizes = [math.prod(variable.shape) for variable in variables]
    if sum(sizes) != len(numbers):
        names = [metric.name for metric in metrics]
        allowed = f"metrics with {len(numbers)} numbers, as the checkpoint has for its metrics"
        message = f"the metrics {names} have {sum(sizes)} numbers, but the checkpoint has {len(numbers)}"
        raise ParameterError("metrics", names, allowed, message)
    for variable, values in zip(variables, np.split(numbers, np.cumsum(sizes)[:-1]), strict=True):
        variable.assign(np.reshape(values, variable.shape).astype(variable.dtype))


def refuse_taken_names(
    model: keras.Model, library_metrics: Iterable[keras.metrics.Metric], names: Iterable[str]
) -> None:
    """Raises ParameterError if a user's metric has one of `names`, of logs that the library reports.

    A user's metrics are attributes of the model and of its layers. If the user has overridden `metrics`, that property
    decides what is reported, and there is no error.

    Args:
        model: the model. If it was not compiled, Keras raises an error later.
        library_metrics: the metrics of the library among the attributes.
        names: names of the logs.
    """
    if is_overridden(model, "metrics"):
        return
    library_ids = {id(metric) for metric in library_metrics}
    keras_metrics: Any = keras.Model.metrics  # the models of this library have a property of their own
    for metric in keras_metrics.fget(model)[1:]:  # the first one is Keras's own "loss"
        if metric.name in names and id(metric) not in library_ids:
            allowed = f"other names than {', '.join(names)}"
            message = (
                f"metrics must have {allowed}, which the model reports itself; found {metric.name} as an attribute"
            )
            raise ParameterError("metrics", metric.name, allowed, message)


def names_of(metric: keras.metrics.Metric) -> list[str]:
    """The names of a metric in the logs."""
    result = metric.result()
    return [*result] if isinstance(result, dict) else [metric.name]


def _metrics_of(argument: str, given: Any, redundant_names: Iterable[str]) -> list[keras.metrics.Metric]:
    """The metrics in one argument of `compile`, without those in `redundant_names`. Lists in it are flattened."""
    if not isinstance(given, list | tuple | types.NoneType):
        raise ParameterError(argument, given, "a list of metrics")
    metrics = []
    for identifier in given or []:
        if isinstance(identifier, list | tuple):  # Keras accepts a list for each output
            metrics += _metrics_of(argument, identifier, redundant_names)
        elif not (isinstance(identifier, str) and identifier in redundant_names):
            metrics.append(_metric(argument, identifier))
    return metrics


def _is_given(metric: keras.metrics.Metric, given: Any) -> bool:
    """Whether a metric was itself given to `compile`, and was not made from a name or a function."""
    return any(metric is one for one in keras.tree.flatten(given))


def _metric(argument: str, identifier: Any) -> keras.metrics.Metric:
    """The metric that `compile` was given in the argument `argument`.

    It may be given as an object, a name, a class, a function or a configuration.

    Raises:
        ParameterError: it is no metric, or it is a metric of Keras that was made for probabilities or for other labels.
    """
    name = identifier if isinstance(identifier, str) else None
    if name in ("accuracy", "acc"):
        return keras.metrics.SparseCategoricalAccuracy(name=name)
    if name in _NAMES_OF_CROSS_ENTROPY:
        return keras.metrics.SparseCategoricalCrossentropy(name=name, from_logits=True)
    if any(identifier is cross_entropy for cross_entropy in _CROSS_ENTROPIES):
        return keras.metrics.SparseCategoricalCrossentropy(from_logits=True)
    try:
        metric: Any = identifier if isinstance(identifier, keras.metrics.Metric) else keras.metrics.get(identifier)
    except (ValueError, TypeError) as error:
        raise ParameterError(argument, identifier, "a Keras metric", f"{argument}: {error}") from error
    is_keras = str(getattr(metric, "__module__", "")).startswith("keras.")
    if is_keras and not _is_for_classes(metric):
        allowed = "one that takes numbers of classes as labels, such as SparseCategoricalAccuracy"
        message = f"{argument} contains {name or brief(metric)}, but a metric must be {allowed}"
        raise ParameterError(argument, identifier, allowed, message)
    if is_keras and _config_of(metric).get("from_logits") is False:
        allowed = "from_logits=True, because the outputs are logits"
        message = f"{argument} contains {brief(metric)}, which needs {allowed}"
        raise ParameterError(argument, identifier, f"a metric with {allowed}", message)
    if isinstance(metric, keras.metrics.Metric):
        if name is not None:
            metric.name = name
        return metric
    name = name or getattr(metric, "__name__", None)
    if not callable(metric):
        message = f"{argument} contains no metric: {brief(identifier)}"
        raise ParameterError(argument, identifier, "a Keras metric", message)
    return MeanOfFunction(metric, name or getattr(metric, "name", None) or type(metric).__name__)


def _is_for_classes(metric: Any) -> bool:
    """Whether one of Keras's metrics, an object or a function, takes numbers of classes as labels, and logits.

    Other metrics expect labels of the shape of the outputs. They fail in the first step, or compare other numbers.
    """
    if isinstance(metric, keras.metrics.IoU):
        config = metric.get_config()
        return bool(config.get("sparse_y_true")) and config["sparse_y_pred"] is False
    name = getattr(metric, "__name__", type(metric).__name__)
    return name.lower().startswith("sparse") or type(metric) is keras.metrics.MeanMetricWrapper


def _config_of(metric: Any) -> dict[str, Any]:
    """The configuration of a metric or loss of Keras; empty for a function."""
    return metric.get_config() if hasattr(metric, "get_config") else {}


def _make_variables(argument: str, metric: keras.metrics.Metric, n_classes: int) -> None:
    """Creates the variables of a metric that creates them in its first update: makes this update and resets the metric.

    `argument` is the argument of `compile` with the metric, for messages.

    Raises ParameterError if the metric was made outside of the strategy's scope: then replicas would lack variables.
    """
    strategy = tf.distribute.get_strategy()
    if not metric.variables:
        labels = tf.zeros([1, 1], tf.int32)
        outputs = tf.zeros([1, 1, n_classes])
        strategy.run(lambda: metric.update_state(labels, outputs, sample_weight=tf.ones([1, 1])))
        metric.reset_state()
    for variable in metric.variables:
        if not strategy.extended.variable_created_in_scope(variable.value):
            message = f"metric {metric.name} must be made within the scope of the strategy that the model is in"
            raise ParameterError(argument, metric.name, "made within strategy.scope()", message)


def _result(metric: keras.metrics.Metric) -> Any:
    """The result over all replicas of a metric that every replica has updated with its own rows."""
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return metric.result()
    return metric.stateless_result([_over_replicas(variable) for variable in metric.variables])


def _over_replicas(variable: keras.Variable) -> Any:
    """The sum of a metric's variable over all replicas.

    Before Keras 3.10, updating the variable already sums over the replicas. Then the variable is this sum.
    """
    value = tf.convert_to_tensor(variable)
    is_per_replica = variable.value.synchronization == tf.VariableSynchronization.ON_READ
    return sum_over_replicas(value) if is_per_replica else value


NO_METRICS = CompiledMetrics()
