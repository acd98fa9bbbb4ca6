"""Calls the layers one after the other, in one of three ways with the same results.

They differ in the size of the compiled program and in memory:

    plain           one call for every layer
    as a loop       a loop over one layer with stacked weights. XLA writes out every call: a layer of enwik8's base
                    model takes 22 MB of a TPU program. In a loop, twelve layers take little more than one
    recomputed      gradient checkpointing: the forward pass keeps only the input of each layer, and the backward pass
                    computes the rest again
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from txl_tf.errors import ParameterError
from txl_tf.kernels import gradients
from txl_tf.kernels.shapes import Tensor
from txl_tf.nn.parts import alike


def apply_layers(
    layers: Sequence[Any], hidden: Tensor, arguments: Sequence[tuple[Tensor, ...]],
    dropout_keys: Sequence[Any] | None = None, as_loop: bool = False, recompute: bool = False,
) -> tuple[Any, Any]:  # fmt: skip
    """`hidden = layer(hidden, *arguments[i], dropout_key=dropout_keys[i])` for one layer after the other.

    Args:
        layers: Keras layers. The output of each has the shape and dtype of its first argument.
        hidden: tensor, the input of the first layer.
        arguments: a tuple of tensors for every layer. Gradients flow to them.
        dropout_keys: a key for every layer, or `None`. `recompute` without `as_loop` needs keys.
        as_loop: whether to compute the layers in a loop. Layers that differ in more than their weights, such as one of
            a user's class among others, are called one after the other anyway. So are layers of a user whose call
            changes variables or adds losses.
        recompute: whether to keep only the input of each layer, and compute the rest again in the backward pass.

    Returns:
        `(hidden, inputs)`: the output of the last layer, and a list with the input of each layer.

    Raises:
        ParameterError: with `recompute`, the call of a layer changes variables or adds losses.
    """
    dropout_keys = dropout_keys or [None] * len(layers)
    if as_loop and all(alike(layers[0], layer) for layer in layers[1:]):
        with contextlib.suppress(_EffectsLost):
            return _run_in_loop(layers, hidden, arguments, dropout_keys, recompute)
    inputs: list[Tensor] = []
    for layer, layer_arguments, key in zip(layers, arguments, dropout_keys, strict=True):
        inputs.append(hidden)
        call = _recomputed(layer, key) if recompute else functools.partial(layer, dropout_key=key)
        hidden = call(hidden, *layer_arguments)
    return hidden, inputs


def _run_in_loop(
    layers: Sequence[Any], hidden: Tensor, arguments: Sequence[tuple[Tensor, ...]], dropout_keys: Sequence[Any],
    recompute: bool,
) -> tuple[Any, Any]:  # fmt: skip
    """`apply_layers` as a loop, in which the first layer is called with the weights of each layer."""
    n_layer = len(layers)
    first = layers[0]
    variables = first.weights  # also the frozen ones
    columns = [*zip(*(layer.weights for layer in layers), strict=True), *zip(*arguments, strict=True)]
    tensors_of = [_stacked(column) for column in columns]
    key_of = _stacked(dropout_keys)

    def call(dropout_key: Any, hidden: Tensor, *tensors: Tensor) -> Any:
        """Calls the first layer with the weights and the other arguments in `tensors`."""
        weights, others = tensors[: len(variables)], tensors[len(variables) :]
        return _call_with(first, weights, hidden, *others, dropout_key=dropout_key)

    def body(i: Any, hidden: Tensor, inputs: Any) -> tuple[Any, Any, Any]:
        """Computes layer i, and adds its input to `inputs`."""
        layer = functools.partial(call, key_of(i))
        layer = gradients.recompute(layer) if recompute else layer
        return i + 1, layer(hidden, *(tensor(i) for tensor in tensors_of)), inputs.write(i, hidden)

    inputs: Any = tf.TensorArray(hidden.dtype, n_layer, element_shape=hidden.shape)
    _, hidden, inputs = tf.while_loop(
        lambda i, *_: i < n_layer,
        body,
        (tf.constant(0), hidden, inputs),
        parallel_iterations=1,
        maximum_iterations=n_layer,
    )
    return hidden, tf.unstack(inputs.stack())


def _stacked(column: Sequence[Any]) -> Callable[[Any], Any]:
    """A function of a layer's number that returns the layer's tensor.

    Args:
        column: a list with one tensor for every layer, or with `None` for every layer. If all are the same object,
            nothing is stacked, and the function returns this object.
    """
    if all(tensor is column[0] for tensor in column):
        return lambda i: column[0]
    stack: Any = tf.stack([tf.convert_to_tensor(tensor) for tensor in column])
    return lambda i: stack[i]


def _recomputed(layer: Any, dropout_key: Any) -> Callable[..., Any]:
    """A function of the layer's arguments that calls the layer with gradient checkpointing."""
    variables = layer.weights

    # In the backward pass, `recompute` adds to every argument a zero that it computes from the upstream gradient.
    # `zero` is an argument so that the key, an integer, depends on this gradient, too.
    def call(zero: Tensor, *args: Tensor) -> Any:
        weights = args[: len(variables)]
        hidden, *other_arguments = args[len(variables) :]
        # Dropout masks depend only on the key. Without this dependency on `hidden`, TensorFlow would draw the masks of
        # all layers at the start, and keep them in memory.
        with tf.control_dependencies([hidden]):
            layer_key = dropout_key + tf.cast(zero, dropout_key.dtype)
        return _call_with(layer, weights, hidden, *other_arguments, dropout_key=layer_key)

    return functools.partial(gradients.recompute(call), tf.zeros([]), *map(tf.convert_to_tensor, variables))


class _EffectsLost(ParameterError):
    """The call of a layer changes variables or adds losses. A call with other tensors for its weights loses them."""


def _call_with(layer: Any, weights: Sequence[Tensor], *args: Tensor, **kwargs: Any) -> Any:
    """Calls a layer with these tensors in place of its weights. Raises _EffectsLost if the call does more."""
    with keras.StatelessScope(list(zip(layer.weights, weights, strict=True)), collect_losses=True) as scope:
        values = dict(scope.state_mapping)
        output = layer(*args, **kwargs)
    if scope.losses or any(value is not values.get(key) for key, value in scope.state_mapping.items()):
        message = (
            f"recompute must be False for {type(layer).__name__} {layer.name!r}: its call changes variables, such as "
            "the state of a Dropout of Keras, or adds losses, and the backward pass would compute them again"
        )
        raise _EffectsLost("recompute", True, "False for layers that change variables or add losses", message)
    return output
