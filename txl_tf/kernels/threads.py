"""How TensorFlow uses its threads on a CPU, as far as the choice and the order of operations depend on it."""

import itertools
import os
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf


def operations_at_a_time() -> int:
    """How many operations TensorFlow computes at the same time, each on one thread, after `set_threads`.

    It is 1 if several threads work together on each operation, TensorFlow's default. TensorFlow reads the environment
    for what the program has not set.
    """
    threading = tf.config.threading
    threads = threading.get_intra_op_parallelism_threads() or _number_in("TF_NUM_INTRAOP_THREADS")
    operations = threading.get_inter_op_parallelism_threads() or _number_in("TF_NUM_INTEROP_THREADS")
    return max(operations, 1) if threads == 1 else 1


def _number_in(variable: str) -> int:
    """The number in a variable of the environment; 0 if there is none."""
    text = os.environ.get(variable, "")
    return int(text) if text.isdigit() else 0


def shares(number: int, of_each: int = 1) -> list[slice]:
    """Cuts `number` items into slices of about equal length.

    There are `of_each` slices for each of the `operations_at_a_time`, and at most `number` slices.

    Args:
        number: at least 1.
        of_each: above 1 if one core starts later: it then takes fewer slices.
    """
    n_shares = min(operations_at_a_time() * of_each, number)
    borders = [number * share // n_shares for share in range(n_shares + 1)]
    return [slice(*pair) for pair in itertools.pairwise(borders)]


def at_the_same_time(compute: Callable[..., Any], arguments: Iterable[tuple[Any, ...]]) -> list[Any]:
    """`[compute(*a) for a in arguments]`. TensorFlow runs the calls at the same time, except in eager mode.

    In a graph, `compute` is traced only once, so all arguments must have the same shapes.
    """
    if not tf.executing_eagerly():
        compute = tf.function(compute, autograph=False)
    return [compute(*of_call) for of_call in arguments]
