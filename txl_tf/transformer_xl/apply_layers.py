"""One layer after the other, in one of three ways with the same numbers.

A compiled program and its memory differ:

    plainly         a call for every layer
    as a loop       one layer over stacked weights. XLA writes out what it is given, 22 MB of a TPU's program for
                    a layer of enwik8's base model; as a loop, twelve of them are not much more than one
    recomputed      gradient checkpointing: the forward pass keeps what each layer was given, the backward pass computes
                    the rest again
"""

import functools

import keras
import tensorflow as tf

from txl_tf.kernels import gradients


def apply_layers(layers, hidden, arguments, dropout_keys=None, as_loop=False, recompute=False):
    """`hidden = layer(hidden, *arguments[i], dropout_key=dropout_keys[i])` for one layer after the other.

    Args:
        layers: Keras layers, every one of which returns the like of its first argument.
        hidden: tensor, what enters the first layer.
        arguments: for every layer a tuple of tensors. Gradients flow to them.
        dropout_keys: for every layer a key, or `None`.
        as_loop: the layers differ in their weights alone, and are computed as a loop.
        recompute: keep only what each layer was given, and compute the rest again in the backward pass.

    Returns:
        `(hidden, inputs)`: what the last layer gives, and a list of what each layer was given.
    """
    dropout_keys = dropout_keys or [None] * len(layers)
    if as_loop:
        return _run_in_loop(layers, hidden, arguments, dropout_keys, recompute)
    inputs = []
    for layer, of_layer, key in zip(layers, arguments, dropout_keys, strict=True):
        inputs.append(hidden)
        call = _recomputed(layer, key) if recompute else functools.partial(layer, dropout_key=key)
        hidden = call(hidden, *of_layer)
    return hidden, inputs


def _run_in_loop(layers, hidden, arguments, dropout_keys, recompute):
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


def _recomputed(layer, dropout_key):
    """`layer` with a dropout key, of which the forward pass keeps only the arguments."""
    variables = layer.weights

    def call(zero, *args):
        weights, (w, *args) = args[: len(variables)], args[len(variables) :]
        # Masks depend on the key alone: TensorFlow would draw those of all layers at the start and keep them.
        with tf.control_dependencies([w]):
            layer_key = dropout_key + tf.cast(zero, dropout_key.dtype)
        with keras.StatelessScope(list(zip(variables, weights, strict=True))):
            return layer(w, *args, dropout_key=layer_key)

    return functools.partial(gradients.recompute(call), tf.zeros([]), *map(tf.convert_to_tensor, variables))
