"""`tf.custom_gradient` and `tf.recompute_grad` without their memory leak.

`tf.custom_gradient` registers the gradient of every trace in a table of the process, and never removes it. The entry
refers to tensors of the graph, the tensors to the graph, and the graph to the model. So a model that was once trained,
or that once generated text, stays in memory until the process ends. Here the operation in the graph refers to its own
gradient, so the gradient is freed with the graph.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import record

from txl_tf.kernels.dtypes import wide_dtype
from txl_tf.kernels.shapes import Tensor


def custom_gradient(f: Callable[..., tuple[Tensor, Callable[..., Any]]]) -> Callable[..., Tensor]:
    """`tf.custom_gradient` for a function that uses no variables.

    In a graph that was saved and loaded, the gradients are those of the operations in `f`.

    Args:
        f: function of tensors that returns `(y, grad)`. `y` is a tensor. `grad` takes the gradient of `y`, and returns
            the gradients of all arguments, or `None` for an argument without a gradient. An argument may also be a
            Python float.

    Returns:
        The function that returns `y`.
    """
    eager: Any = tf.custom_gradient(f)

    @functools.wraps(f)
    def call(*args: Any) -> Tensor:
        if tf.executing_eagerly():  # tensors, because `f` may not use variables
            return eager(*(x if isinstance(x, float) else tf.convert_to_tensor(x) for x in args))
        dtype = wide_dtype(*(x for x in args if not isinstance(x, float)))
        tensors: Any = [tf.constant(x, dtype) if isinstance(x, float) else tf.convert_to_tensor(x) for x in args]
        y, grad = f(*tensors)

        def backward(upstream: Tensor, *_: Tensor) -> list[Any]:
            """The gradients of `[y, *tensors]`, from those of all results of `tf.identity_n`."""
            return [None, *grad(upstream)]

        graph: Any = tf.compat.v1.get_default_graph()
        with graph._override_gradient_function({"IdentityN": lambda _, *upstream: backward(*upstream)}):
            results: Any = tf.identity_n([y, *tensors])  # for gradients of the graph, such as those of loops
        record.record_operation(f.__name__, results, [y, *tensors], backward)  # for gradients of tapes
        return results[0]

    vars(call)["__signature__"] = inspect.signature(f)
    del call.__wrapped__  # AutoGraph would follow it, and call `f` without its gradient
    return call


def recompute(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Gradient checkpointing: the forward pass keeps only the arguments of `f`; the backward pass computes `f` again.

    It replaces `tf.recompute_grad`, which registers two gradients of every trace in the table of the process.

    Args:
        f: function that returns a tensor. Its arguments are tensors of numbers, not bools, and contain its weights.

    Returns:
        A function with the result of `f`. Every argument has a gradient: 0 if the result does not depend on it.
    """

    @custom_gradient
    def call(*args: Tensor) -> tuple[Tensor, Callable[[Tensor], Any]]:
        # With stop_gradient, compiled functions in `f` do not return the tensors that gradients need.
        y = f(*map(tf.stop_gradient, args))

        def grad(upstream: Tensor) -> Any:
            """Computes f again, and returns the gradients of its arguments."""
            # The second computation must wait for the backward pass. XLA ignores control dependencies, so the arguments
            # get a data dependency: a zero that is computed from the upstream gradient. The cast to bool keeps it 0 for
            # a NaN. `first == first` is always true, which XLA does not see.
            first: Any = tf.cast(tf.reduce_max(tf.reshape(upstream, [-1])[:1]), tf.bool)
            zero: Any = tf.where(first == first, 0.0, float("nan"))
            with tf.GradientTape() as tape:
                copies = [x + tf.cast(zero, x.dtype) for x in args]
                tape.watch(copies)
                outputs = f(*copies)
            return tape.gradient(outputs, copies, upstream, unconnected_gradients=tf.UnconnectedGradients.ZERO)

        return y, grad

    return call
