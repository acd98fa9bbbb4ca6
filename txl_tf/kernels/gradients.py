"""Functions with a gradient of their own, which goes when the graph goes that it was traced in; recomputation.

`tf.custom_gradient` enters the gradient of every trace in a table of the process, and never takes it out. The entry
holds tensors of the graph, these hold the graph, and the graph what it captured: a model that was once trained or asked
to write stays in memory to the end of the process. Here the operation of the graph itself holds its gradient.
"""

import functools

import tensorflow as tf
from tensorflow.python.eager import record

from txl_tf.kernels.dtypes import wide_dtype


def custom_gradient(f):
    """`tf.custom_gradient` of a function that uses no variables.

    A graph that was saved and loaded has TensorFlow's own gradients of the operations in `f` instead.

    Args:
        f: function of tensors that returns `(y, grad)`: one tensor, and a function of its gradient that returns those
            of all arguments, `None` where there is none. An argument may be a Python float, too.

    Returns:
        The function that returns `y`.
    """
    eager = tf.custom_gradient(f)

    @tf.autograph.experimental.do_not_convert
    @functools.wraps(f)
    def call(*args):
        if tf.executing_eagerly():
            return eager(*args)
        dtype = wide_dtype(*(x for x in args if not isinstance(x, float)))
        args = [tf.constant(x, dtype) if isinstance(x, float) else tf.convert_to_tensor(x) for x in args]
        y, grad = f(*args)

        def backward(upstream, *_):  # of what `tf.identity_n` returns
            return [None, *grad(upstream)]

        graph = tf.compat.v1.get_default_graph()
        with graph._override_gradient_function({"IdentityN": lambda operation, *upstream: backward(*upstream)}):
            results = tf.identity_n([y, *args])  # the graph's gradients, as those of loops
        record.record_operation(f.__name__, results, [y, *args], backward)  # those of tapes
        return results[0]

    del call.__wrapped__  # at which AutoGraph would look, and call `f` alone
    return call


def recompute(f):
    """Gradient checkpointing: the backward pass computes `f` again, and only its arguments are kept for it.

    As `tf.recompute_grad`, which enters two gradients of every trace in the table of the process.

    Args:
        f: function of tensors, its weights among them, that returns a tensor. Arguments are numbers, not bools.

    Returns:
        The same function. Every argument has a gradient, 0 where the result does not depend on it.
    """

    @custom_gradient
    def call(*args):
        with record.stop_recording():
            y = f(*args)

        def grad(upstream):
            # XLA knows no control dependencies: the arguments depend on what comes in from above by a 0 or NaN.
            first = tf.cast(tf.reduce_max(tf.reshape(upstream, [-1])[:1]), tf.bool)
            zero = tf.where(first == first, 0.0, float("nan"))
            with tf.GradientTape() as tape:
                copies = [x + tf.cast(zero, x.dtype) for x in args]
                tape.watch(copies)
                again = f(*copies)
            return tape.gradient(again, copies, upstream, unconnected_gradients="zero")

        return y, grad

    return call
