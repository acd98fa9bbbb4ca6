"""How TensorFlow uses its threads on a CPU, as far as the choice of an operation depends on it."""

import tensorflow as tf


def operations_at_a_time() -> int:
    """How many operations TensorFlow computes at the same time, each on one thread, after `set_threads`.

    It is 1 if several threads work together on each operation, TensorFlow's default.
    """
    threading = tf.config.threading
    has_one_thread = threading.get_intra_op_parallelism_threads() == 1
    return max(threading.get_inter_op_parallelism_threads(), 1) if has_one_thread else 1
