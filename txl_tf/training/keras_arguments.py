"""Arguments and hooks of Keras: checks whether our models support them, with a reason for each that they do not.

A hook is a method or property of `keras.Model` that a subclass or an instance may override.
"""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from txl_tf.config.checks import RATE, at_least, is_integer
from txl_tf.errors import ParameterError
from txl_tf.nn.parts import is_overridden
from txl_tf.schema import Check, check_names, check_type, keywords_of

# Metrics that `compile` takes, as functions of the mean nll. A value that is too large for a float is infinity.
METRICS = {"perplexity": tf.exp, "bits": lambda nll: nll / tf.math.log(tf.constant(2, nll.dtype))}

_OWN_LOSS = "the loss is the model's own, the mean nll, which the adaptive softmax computes without all logits"
_ONE_WEIGHT = "every token counts the same, unless a third element of the dataset has weights of the labels"
IN_ORDER = "row r of a batch continues row r of the batch before"
_OWN_BATCHES = "the batches are those of the dataset, see txl_tf.segments(text, batch_size, tgt_len)"
_REFUSED = {
    "y": "x is a dataset that also contains the labels",
    "batch_size": _OWN_BATCHES,
    "validation_batch_size": _OWN_BATCHES,
    "shuffle": IN_ORDER,
    "validation_split": "give validation_data, a dataset of another text",
    "sample_weight": _ONE_WEIGHT,
    "class_weight": _ONE_WEIGHT,
    "weighted_metrics": _ONE_WEIGHT,
    "loss": _OWN_LOSS,
    "loss_weights": _OWN_LOSS,
}

# Hooks that a language model does not use, and what to override instead.
_NO_Y_PRED = (
    "the loss is computed without y_pred, the probabilities of all words: override segment_nll(tokens, labels, mems, "
    "**options), which returns (nll, is_counted, new_mems), or train_step(self, data, mems), which returns (logs, "
    "new_mems)"
)
_NO_PREDICT = "predict would neither take nor return the memory: use log_probs(tokens, mems)"
UNUSED_HOOKS = {
    "compute_loss": _NO_Y_PRED,
    "compute_metrics": _NO_Y_PRED,
    "stateless_compute_loss": _NO_Y_PRED,
    "predict_step": _NO_PREDICT,
    "make_predict_function": _NO_PREDICT,
    "get_metrics_result": "metrics that are attributes of the model, and all that a step logs, are reported anyway",
}


def _check_frequency(name: str, value: Any) -> None:
    """Raises ParameterError unless a value is a `validation_freq`: a positive integer, or a list of them."""
    numbers_of_epochs = value if isinstance(value, list) else [value]
    if not all(is_integer(number) and number >= 1 for number in numbers_of_epochs):
        raise ParameterError(name, value, "a positive integer, or a list of the epochs, counted from 1")


def _check_callbacks(name: str, value: Any) -> None:
    """Raises ParameterError unless a value is a callback, a `CallbackList`, or a structure such as a list of them."""
    for callback in keras.tree.flatten(value):
        if isinstance(callback, type) or not hasattr(callback, "set_model"):
            raise ParameterError(name, callback, "a keras.callbacks.Callback, or a list of them")


def _or_none(check: Check) -> Check:
    """A check that also allows `None`."""
    return lambda name, value: None if value is None else check(name, value)


# The checks of the arguments of `fit`, `evaluate` and `predict` that are numbers, switches or callbacks.
_CHECKS: dict[str, Check] = {
    "epochs": at_least(1),
    "initial_epoch": at_least(0),
    "steps": _or_none(at_least(1)),
    "steps_per_epoch": _or_none(at_least(1)),
    "validation_steps": _or_none(at_least(1)),
    "batch_size": _or_none(at_least(1)),
    "validation_batch_size": _or_none(at_least(1)),
    "validation_freq": _check_frequency,
    "validation_split": _or_none(RATE),
    "callbacks": _or_none(_check_callbacks),
    "return_dict": lambda name, value: check_type(name, value, bool),
}


# The arguments of `fit` that only a validation uses, with their defaults.
_OF_VALIDATION = {"validation_steps": None, "validation_batch_size": None, "validation_freq": 1}


def by_name(method: Callable, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """The checked arguments of a call of `fit`, `evaluate` or `predict` of Keras as `{name: value}`.

    Numbers of NumPy and TensorFlow become those of Python, and the epochs in `validation_freq` become a list, because
    Keras takes no others.

    Args:
        method: the method of Keras.
        *args, **kwargs: the arguments of the call, by position and by name.

    Raises:
        UnknownArgumentError: `method` has no argument of a given name. Names that begin with `_`, Keras's own, are not
            checked.
        TypeError: an argument is missing, there are too many, or `method` takes no argument of a name with `_`.
        ParameterError: a number is out of its range, see `_CHECKS`, or an argument of `fit` has no effect.
    """
    check_names(method.__name__, {name: kwargs[name] for name in kwargs if name[0] != "_"}, keywords_of(method))
    arguments = inspect.signature(method).bind(*args, **kwargs).arguments
    arguments = {**arguments.pop("kwargs", {}), **arguments}
    for name in arguments.keys() & _CHECKS.keys():
        value = arguments[name]
        if isinstance(value, np.generic | np.ndarray | tf.Tensor):
            value = np.asarray(value).tolist()
        elif isinstance(value, tuple | set | frozenset | range):
            value = list(value)
        _CHECKS[name](name, value)
        arguments[name] = value
    if method.__name__ == "fit":
        _check_together(arguments)
    return arguments


def _check_together(arguments: dict[str, Any]) -> None:
    """Raises ParameterError for an argument of `fit` that has no effect with the other arguments."""
    epochs = arguments.get("epochs", 1)
    initial_epoch = arguments.get("initial_epoch", 0)
    if initial_epoch > epochs:
        allowed = f"at most epochs={epochs}, which counts from the first epoch of all, not from initial_epoch"
        raise ParameterError("initial_epoch", initial_epoch, allowed)
    if arguments.get("validation_data") is None and not arguments.get("validation_split"):
        for name, default in _OF_VALIDATION.items():
            if arguments.get(name, default) != default:
                message = f"fit takes no {name} without validation_data, got {arguments[name]!r}"
                raise ParameterError(name, arguments[name], "left out without validation_data", message)


def check_switches(jit_compile: Any, **switches: Any) -> None:
    """Raises ParameterError unless arguments of `compile` are True or False. `jit_compile` may also be "auto"."""
    for name, value in switches.items():
        check_type(name, value, bool)
    if not isinstance(jit_compile, bool) and jit_compile != "auto":
        raise ParameterError("jit_compile", jit_compile, [True, False, "auto"])


def refuse(method: str, arguments: dict[str, Any], reasons: dict[str, str] = _REFUSED) -> None:
    """Raises ParameterError for an argument that a method does not support.

    `None`, 0 and False count as not given, because they switch an argument of Keras off.

    Args:
        method: its name, for the message.
        arguments: `{name: value}` of the given arguments.
        reasons: `{name: reason}` of unsupported arguments, by default those of a model with memory.
    """
    for name, why in reasons.items():
        value = arguments.get(name)
        if value is not None and not (isinstance(value, numbers.Number) and not value):
            simple = isinstance(value, numbers.Number | str | dict | list) and len(repr(value)) < 40
            got = repr(value) if simple else type(value).__name__
            raise ParameterError(name, value, "left out", f"{method} takes no {name}, got {got}: {why}")


def takes_by_position(method: Callable, n: int) -> bool:
    """Whether a method can be called with `n` arguments by position."""
    try:
        inspect.signature(getattr(method, "python_function", method)).bind(*range(n))  # of a tf.function, too
    except TypeError:
        return False
    return True


def refuse_hooks(model: Any, reasons: dict[str, str]) -> None:
    """Raises ParameterError if a user has overridden a hook that a model does not use.

    Args:
        model: the model.
        reasons: `{name of the hook: reason, and what to do instead}`.
    """
    for name, why in reasons.items():
        if is_overridden(model, name):
            message = f"{type(model).__name__} cannot have {name} of its own: {why}"
            raise ParameterError(name, getattr(model, name), "left as it is", message)


def check_steps_take(model: Any, *names: str) -> None:
    """Raises ParameterError unless an overridden step of a model with memory takes `(data, mems)` or `(data)`."""
    for name in names:
        step = getattr(model, name)
        if is_overridden(model, name) and not takes_by_position(step, 2) and not takes_by_position(step, 1):
            allowed = f"{name}(self, data, mems) that returns (logs, new_mems), or {name}(self, data) that returns logs"
            raise ParameterError(name, step, allowed)


def checked_metric_names(metrics: Iterable[str] | None) -> tuple[str, ...]:
    """The names in the argument `metrics` of `compile` for a model with memory, without repetitions.

    Raises:
        ParameterError: it is not a list, or has another element than the names in `METRICS`.
    """
    if not isinstance(metrics, list | tuple | None):
        raise ParameterError("metrics", metrics, "a list of names, such as ['bits']")
    for metric in metrics or []:
        if not isinstance(metric, str) or metric not in METRICS:
            message = (
                f"metrics may contain 'perplexity' and 'bits', got {metric!r}: others need the probabilities of all "
                "words, which the adaptive softmax does not compute in training"
            )
            raise ParameterError("metrics", metrics, list(METRICS), message)
    return tuple(dict.fromkeys(metrics or []))
