"""Arguments of Keras's methods: which of them our models take, and for each that cannot work the reason."""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from txl_tf.errors import ParameterError
from txl_tf.schema import check_names, keywords_of

# Metrics that `compile` takes, as functions of the mean nll. They are floats of any size: beyond all, infinity.
METRICS = {"perplexity": tf.exp, "bits": lambda nll: nll / tf.math.log(tf.constant(2, nll.dtype))}

_OWN_LOSS = "the loss is the model's own, the mean nll, which the adaptive softmax computes without all logits"
_ONE_WEIGHT = "every token counts the same in the mean nll"
_OWN_BATCHES = "the batches are those of the dataset, see txl_tf.segments(text, batch_size, tgt_len)"
_REFUSED = {
    "y": "x is a dataset that holds the labels, too",
    "batch_size": _OWN_BATCHES,
    "validation_batch_size": _OWN_BATCHES,
    "shuffle": "row r of a batch continues row r of the batch before",
    "validation_split": "give validation_data, a dataset of another text",
    "sample_weight": _ONE_WEIGHT,
    "class_weight": _ONE_WEIGHT,
    "weighted_metrics": _ONE_WEIGHT,
    "loss": _OWN_LOSS,
    "loss_weights": _OWN_LOSS,
}


def by_name(method: Callable, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """The arguments of a call of `method`, by position or by name: `{name: value}` of those that were given.

    Raises:
        UnknownArgumentError: `method` has no argument of this name. Names that begin with `_` are Keras's own.
    """
    check_names(method.__name__, {name: kwargs[name] for name in kwargs if name[0] != "_"}, keywords_of(method))
    arguments = inspect.signature(method).bind(*args, **kwargs).arguments
    return {**arguments.pop("kwargs", {}), **arguments}


def refuse(method: str, arguments: dict[str, Any], reasons: dict[str, str] = _REFUSED) -> None:
    """Raises ParameterError for an argument that `method` cannot take. `None`, 0 and False count as not given.

    Args:
        method: for the message.
        arguments: `{name: value}` of those that were given.
        reasons: `{name: why}` of those that it cannot take, by default for a model with memory.
    """
    for name, why in reasons.items():
        value = arguments.get(name)
        if value is not None and not (isinstance(value, numbers.Number) and not value):
            simple = isinstance(value, numbers.Number | str | dict | list) and len(repr(value)) < 40
            got = repr(value) if simple else type(value).__name__
            raise ParameterError(name, value, "left out", f"{method} takes no {name}, got {got}: {why}")


def metric_names(metrics: Iterable[str] | None) -> tuple[str, ...]:
    """The argument `metrics` of `compile`, checked."""
    if not isinstance(metrics or [], list | tuple):
        raise ParameterError("metrics", metrics, "a list of names, such as ['bits']")
    for metric in metrics or []:
        if not isinstance(metric, str) or metric not in METRICS:
            message = (
                f"metrics may hold 'perplexity' and 'bits', got {metric!r}: others need the probabilities of all "
                "words, which the adaptive softmax does not compute in training"
            )
            raise ParameterError("metrics", metrics, list(METRICS), message)
    return tuple(dict.fromkeys(metrics or []))
