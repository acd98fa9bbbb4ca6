"""Checks `sample_weight` and `class_weight`, and converts them to weights of labels or of rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from txl_tf.config.checks import is_integer, is_number
from txl_tf.data.text.checked_batches import check_of_weights, check_values
from txl_tf.errors import ParameterError
from txl_tf.nn.checks import as_array, tensor_error
from txl_tf.training.listed_data import WEIGHTS


def class_table(class_weight: dict[int, float] | None, n_classes: int) -> tuple[float, ...] | None:
    """The weights of the classes 0 ... `n_classes - 1`: the value in `class_weight`, or 1. `None` without it.

    Raises:
        ParameterError: `class_weight` is not a dictionary of weights, has an id that is not a class, or a weight is
            negative or not finite.
    """
    if class_weight is None:
        return None
    if not isinstance(class_weight, dict):
        raise ParameterError("class_weight", class_weight, "a dictionary of ids and weights")
    for label, weight in class_weight.items():
        if not is_integer(label) or not 0 <= label < n_classes:
            message = f"class_weight must have ids from 0 to {n_classes - 1}, got {label!r}"
            raise ParameterError("class_weight", class_weight, f"of ids from 0 to {n_classes - 1}", message)
        if not is_number(weight):
            message = f"class_weight must have numbers as weights, got {weight!r} for {label}"
            raise ParameterError("class_weight", class_weight, "of numbers as weights", message)
    weights = tuple(float(class_weight.get(label, 1.0)) for label in range(n_classes))
    check_values("class_weight", class_weight, np.array(weights))
    return weights


def check_sample_weight(name: str, sample_weight: Any) -> None:
    """Raises ParameterError if the argument `name`, an array or `None`, has a weight that is negative or not finite."""
    if sample_weight is None:
        return
    weights = as_array(name, sample_weight, WEIGHTS)
    if weights.dtype.kind not in "biuf":
        raise tensor_error(name, sample_weight, WEIGHTS)
    check_values(name, sample_weight, weights)


def finite_weights(sample_weight: Any, dtype: str) -> tf.Tensor:
    """The weights of a batch in a step, in the dtype.

    If a weight is negative or not finite, it raises a ParameterError; in a graph, running the graph raises an
    InvalidArgumentError. Under XLA, nothing is checked.
    """
    weights = tf.cast(sample_weight, dtype)
    if tf.executing_eagerly():
        check_sample_weight("sample_weight", weights)
        return weights
    with tf.control_dependencies([tf.debugging.Assert(*check_of_weights(weights))]):
        return tf.identity(weights)


def checked_weights(sample_weight: tf.Tensor, counted: tf.Tensor) -> tf.Tensor:
    """`sample_weight` in the shape `[batch]` or in that of `counted`, and in the dtype of `counted`.

    Weights `[batch, 1]` become `[batch]`. If a graph does not know that they are, or does not know their number of
    dimensions, they become those of the labels: each label gets the weight of its row.

    Raises:
        ParameterError: it has another shape. If sizes are unknown, the step raises TensorFlow's error instead.
    """
    weights = tf.cast(sample_weight, counted.dtype)
    if weights.shape.rank == 2 and weights.shape[1] == 1:  # Keras's form of `[batch]`
        weights = weights[:, 0]
    rows, length = counted.shape
    if not any(weights.shape.is_compatible_with(shape) for shape in ([rows], [rows, length])):
        shape = f"[batch, labels{'' if length is None else f'={length}'}]"
        message = f"sample_weight must be [batch] or {shape}, got {[*weights.shape]}"
        raise ParameterError("sample_weight", sample_weight, f"[batch] or {shape}", message)
    if weights.shape.is_fully_defined() and counted.shape.is_fully_defined():
        return weights
    full_sizes = tf.shape(counted)
    sizes = tf.shape(weights)
    message = ["sample_weight must be [batch] or [batch, labels],", full_sizes, "but is", sizes]
    padded_sizes = tf.concat([sizes, [1, 1]], 0)[:2]  # those of weights [batch, 1] or [batch, labels]
    has_axes = (tf.size(sizes) == 1) | (tf.size(sizes) == 2)
    fits = has_axes & (padded_sizes[0] == full_sizes[0]) & ((padded_sizes[1] == full_sizes[1]) | (padded_sizes[1] == 1))
    with tf.control_dependencies([tf.debugging.Assert(fits, message)]):
        if weights.shape.rank == 1:
            return tf.identity(weights)
        return tf.broadcast_to(tf.reshape(weights, padded_sizes), full_sizes)


def weights_of_labels(sample_weight: tf.Tensor | None, counted: tf.Tensor) -> tf.Tensor:
    """The weight of each label: its own or that of its row, and 0 if it does not count.

    Args:
        sample_weight: `[batch]` or `[batch, labels]`; `None` for 1 everywhere.
        counted: float `[batch, labels]`, 1 at labels that count, else 0.

    Returns:
        `[batch, labels]`, in the dtype of `counted`.
    """
    if sample_weight is None:
        return counted
    weights = checked_weights(sample_weight, counted)
    return counted * (weights[:, None] if weights.shape.rank == 1 else weights)


def weights_of_rows(sample_weight: tf.Tensor, counted: tf.Tensor) -> tf.Tensor:
    """The weight of each row: its own, or the mean over its labels that count; 0 if no label counts.

    Args:
        sample_weight: `[batch]` or `[batch, labels]`, not `None`.
        counted: see `weights_of_labels`.

    Returns:
        `[batch]`, in the dtype of `counted`.
    """
    weights = checked_weights(sample_weight, counted)
    count = tf.reduce_sum(counted, 1)
    if weights.shape.rank == 1:
        return tf.where(count > 0, weights, tf.zeros([], counted.dtype))
    return tf.math.divide_no_nan(tf.reduce_sum(weights * counted, 1), count)
