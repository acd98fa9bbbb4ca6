"""One training step of one replica: sums, gradients, overflow, and parts of a batch computed one after the other."""

import keras
import tensorflow as tf

from txl_tf.training.distribution import sum_over_replicas


def sum_and_count(nll, kept):
    """`[nll, tokens counted]` of a segment, float32 `[2]`; `kept`, bool, says which tokens count (`None`: all)."""
    count = tf.size(nll) if kept is None else tf.math.count_nonzero(kept, dtype=tf.int32)
    return tf.stack([tf.reduce_sum(nll), tf.cast(count, tf.float32)])


def agree_on_overflow(gradients, optimizer):
    """`gradients`, but NaN on every replica where half precision overflowed on any: all of them then skip the step.

    Keras's `LossScaleOptimizer` looks at the gradients of each replica, or of the first, before they are added up.
    """
    context = tf.distribute.get_replica_context()
    scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if not scaled or context.num_replicas_in_sync == 1:
        return gradients
    finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(gradient)) for gradient in gradients])
    n_finite = sum_over_replicas(tf.cast(finite, tf.float32))
    factor = tf.where(n_finite < context.num_replicas_in_sync, float("nan"), 1.0)
    return [gradient * factor for gradient in gradients]


def apply_gradients(optimizer, gradients, variables):
    """`optimizer.apply`, called on every replica.

    Keras adds up gradients by `ReplicaContext.all_reduce` where there is one replica, too. That keeps the graph for
    ever (see `layers/common/gradients.py`), so a single replica goes round it where the optimizer does not look for it.
    """
    gradients = agree_on_overflow(gradients, optimizer)
    if tf.distribute.has_strategy() or isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer.apply(gradients, variables)
    else:
        context = tf.distribute.get_replica_context()
        context.merge_call(lambda strategy: optimizer.apply(gradients, variables))


def part_by_part(step, parts, variables, tokens, labels, mems, dropout_key):
    """Calls `step` for one part of the rows after the other: the result is that of all rows, in the memory of one part.

    Args:
        step: function of `(tokens, labels, mems, dropout_key)` that returns `(sums, gradients, new_mems)`.
        parts: number of parts, a divisor of the rows.
        variables: those that the gradients are of.
        dropout_key: int `[3]`, see `dropout`; each part gets the number of its first row.

    Returns:
        `(sums, gradients, new_mems)`: sums and gradients added up, the memories of all rows.
    """

    def split(x):
        return tf.reshape(x, [parts, x.shape[0] // parts, *keras.ops.shape(x)[1:]])

    tokens, labels, mems = split(tokens), split(labels), [split(mem) for mem in mems]
    rows = tokens.shape[1]

    def body(i, sums, gradients, new_mems):
        of_part, of_gradients, of_mems = step(
            tokens[i], labels[i], [mem[i] for mem in mems], dropout_key + tf.stack([0, 0, i * rows])
        )
        gradients = [total + part for total, part in zip(gradients, of_gradients, strict=True)]
        new_mems = [ta.write(i, mem) for ta, mem in zip(new_mems, of_mems, strict=True)]
        return [i + 1, sums + of_part, gradients, new_mems]  # a list as the first values are: eager mode looks

    zeros = [tf.zeros(variable.shape, variable.dtype) for variable in variables]
    arrays = [tf.TensorArray(mem.dtype, parts) for mem in mems]
    _, sums, gradients, new_mems = tf.while_loop(
        lambda i, *_: i < parts,
        body,
        [0, tf.zeros([2]), zeros, arrays],
        parallel_iterations=1,
        maximum_iterations=parts,
    )
    new_mems = [ta.stack() for ta in new_mems]
    return sums, gradients, [tf.reshape(mem, [parts * rows, *keras.ops.shape(mem)[2:]]) for mem in new_mems]
