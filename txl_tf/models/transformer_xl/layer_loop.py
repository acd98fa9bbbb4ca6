"""Many like layers as one loop: a compiled program holds one layer, however many the model has.

XLA writes out what it is given: a layer of enwik8's base model is 22 MB of a TPU's program. As a loop over stacked
weights, twelve of them are not much more than one.
"""

import functools

import keras
import tensorflow as tf

from txl_tf.layers.common import gradients


def run_in_loop(layers, hidden, arguments, dropout_keys, recompute=False):
    """What `hidden = layer(hidden, *arguments[i], dropout_key=dropout_keys[i])` gives for one layer after the other.

    Args:
        layers: Keras layers, all alike; their weights alone differ.
        hidden: tensor, what enters the first layer; every layer returns the like.
        arguments: for every layer a tuple of tensors, all alike. Gradients flow to them.
        dropout_keys: for every layer a key, or `None`.
        recompute: keep only what each layer was given, and compute the rest again in the backward pass.

    Returns:
        `(hidden, inputs)`: what the last layer gives, and a list of what each layer was given.
    """
    n_layer, first = len(layers), layers[0]
    variables = first.weights  # frozen ones, too: the first layer's stand for those of each
    columns = [*zip(*(layer.weights for layer in layers), strict=True), *zip(*arguments, strict=True)]
    tensors_of = [_stacked(column) for column in columns]
    key_of = _stacked(dropout_keys)

    def call(dropout_key, hidden, *tensors):
        weights, tensors = tensors[: len(variables)], tensors[len(variables) :]
        with keras.StatelessScope(list(zip(variables, weights, strict=True))):
            return first(hidden, *tensors, dropout_key=dropout_key)

    def body(i, hidden, inputs):
        decode = functools.partial(call, key_of(i))
        decode = gradients.recompute(decode) if recompute else decode
        return i + 1, decode(hidden, *(tensor(i) for tensor in tensors_of)), inputs.write(i, hidden)

    inputs = tf.TensorArray(hidden.dtype, n_layer, element_shape=hidden.shape)
    _, hidden, inputs = tf.while_loop(
        lambda i, *_: i < n_layer,
        body,
        (tf.constant(0), hidden, inputs),
        parallel_iterations=1,
        maximum_iterations=n_layer,
    )
    return hidden, tf.unstack(inputs.stack())


def _stacked(column):
    """A function of the layer's number that returns the layer's tensor of `column`, a list of one of every layer."""
    if all(tensor is column[0] for tensor in column):
        return lambda i: column[0]
    stack = tf.stack([tf.convert_to_tensor(tensor) for tensor in column])
    return lambda i: stack[i]
