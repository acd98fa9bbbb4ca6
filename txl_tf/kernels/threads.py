"""How TensorFlow uses its threads on a CPU, as far as the choice and the order of operations depend on it."""

from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf


def operations_at_a_time() -> int:
    """How many operations TensorFlow computes at the same time, each on one thread, after `set_threads`.

    It is 1 if several threads work together on each operation, TensorFlow's default.
    """
    threading = tf.config.threading
    has_one_thread = threading.get_intra_op_parallelism_threads() == 1
    return max(threading.get_inter_op_parallelism_threads(), 1) if has_one_thread else 1


def at_the_same_time(compute: Callable[..., Any], arguments: Iterable[tuple[Any, ...]]) -> list[Any]:
    """`[compute(*a) for a in arguments]`. TensorFlow runs the calls at the same time, except in eager mode.

    In a graph, `compute` is traced only once, so all arguments must have the same shapes.
    """
    if not tf.executing_eagerly():
        compute = tf.function(compute, autograph=False)
    return [compute(*of_call) for of_call in arguments]
