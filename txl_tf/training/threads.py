"""TensorFlow's threads on a processor, for steps that compute several parts of a batch at the same time.

By default, all cores work together on one operation after the other, and wait for each other at the end of each. A
training step has more than a thousand operations. If every core computes a part of the batch instead, with one thread
for each operation, the cores wait only at the end of the step. docs/performance.md has measurements.

    set_threads(2)                          before TensorFlow starts
    lm.compile(..., parallel_parts=2)
"""

import math
import os
from collections.abc import Callable

import tensorflow as tf

from txl_tf.calls import checked_call
from txl_tf.config import at_least

MAX_PARTS = 8  # every part computes gradients of all weights, which memory must hold
# Adding the gradients of the parts takes as long as the parts save if there are more weights for each token of a batch.
MAX_WEIGHTS_PER_TOKEN = 10_000
# TensorFlow prepares a step of several parts for about a second longer. A run of fewer tokens does not regain it.
MIN_TOKENS = 100_000
FEW_TEXTS = 16  # are generated faster with one thread for each operation, on two cores

_set_for = 1  # the number of parts for which `set_threads` has set the threads


@checked_call
def set_threads(parallel_parts: int) -> None:
    """Sets TensorFlow's threads for `compile(parallel_parts=...)`. Call it before TensorFlow computes anything.

    TensorFlow then runs as many operations at a time as there are parts, at most one on each core, and divides the
    cores among them. With 1 part, it uses all cores for each operation, its default. On two cores, 2 parts also speed
    up the generation of up to 16 texts.

    Raises:
        ParameterError: `parallel_parts` is not a positive integer.
        RuntimeError: TensorFlow has started already, so its threads cannot change.
    """
    global _set_for
    at_least(1)("parallel_parts", parallel_parts)
    operations = threads = 0  # TensorFlow's defaults
    if parallel_parts > 1:
        operations = min(parallel_parts, cores())
        threads = cores() // operations
    tf.config.threading.set_inter_op_parallelism_threads(operations)
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    _set_for = parallel_parts


def choose_threads(given: int | None, fastest: Callable[[], int]) -> int:
    """The number of parts for a run, which sets TensorFlow's threads unless TensorFlow has started.

    Args:
        given: the number that the user gives, or `None`.
        fastest: returns the number to use otherwise. If TensorFlow has started, as many parts of it are used as the
            threads were set for, by an earlier run of the process.
    """
    if can_set_threads():
        parts = given or fastest()
        set_threads(parts)
        return parts
    return given or math.gcd(fastest(), _set_for)


def choose_parallel_parts(rows: int, n_tokens: float, weights_per_token: float = 0.0) -> int:
    """The number of parts with which a processor is fastest: at most one for each core, and a divisor of the rows.

    Of such numbers, it is the one that uses most cores, and then the largest. It is 1 if there is an accelerator, or if
    the parts would gain less than they cost.

    Args:
        rows: rows of a batch or, with gradient accumulation, of a part of it; of several batches, a number that divides
            the rows of each.
        n_tokens: tokens of all steps.
        weights_per_token: of a training, the number of weights divided by the tokens of these rows.
    """
    has_accelerator = bool(tf.config.list_physical_devices("GPU") or tf.config.list_physical_devices("TPU"))
    if has_accelerator or n_tokens < MIN_TOKENS or weights_per_token > MAX_WEIGHTS_PER_TOKEN:
        return 1
    divisors = [parts for parts in range(1, min(cores(), MAX_PARTS) + 1) if rows % parts == 0]
    return max(divisors, key=lambda parts: (parts * (cores() // parts), parts))


def set_threads_for_texts(rows: int) -> None:
    """Sets TensorFlow's threads for the generation of so many texts at a time, if it helps and is not too late.

    The operations for a token are so small that a second thread takes longer to begin than it saves. So each operation
    gets one thread, and the cores compute different operations, such as heads or shares of a product. This was measured
    on two cores only. With more cores, or with more than `FEW_TEXTS`, TensorFlow keeps its default.
    """
    if rows <= FEW_TEXTS and cores() == 2 and can_set_threads():
        set_threads(2)


def can_set_threads() -> bool:
    """Whether TensorFlow has not started, and neither the program nor the environment has set its threads."""
    threading = tf.config.threading
    if threading.get_intra_op_parallelism_threads() or threading.get_inter_op_parallelism_threads():
        return False
    if {"TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"} & os.environ.keys():
        return False
    try:
        threading.set_intra_op_parallelism_threads(1)  # raises RuntimeError only if the number changes
    except RuntimeError:
        return False
    threading.set_intra_op_parallelism_threads(0)
    return True


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
