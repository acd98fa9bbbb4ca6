"""Layers that are parts of others: layer norm and a linear layer; and initializers."""

import itertools
import numbers
from typing import Unpack

import keras
import tensorflow as tf

import txl_tf.kernels as ops
from txl_tf.config.checks import NOT_NEGATIVE
from txl_tf.kernels.dtypes import at_least_float32
from txl_tf.nn.arguments import LayerOptions, stored
from txl_tf.nn.base import Layer, check_tensors, width_of
from txl_tf.nn.parts import is_library
from txl_tf.nn.settings import FREE_EPSILON, remember_graph


def norm_of(layer_norm):
    """`norm` of the equations: weights and epsilon of a `LayerNorm`; or the layer itself, where it is a user's."""
    if not is_library(layer_norm, LayerNorm):
        return layer_norm
    if not tf.executing_eagerly():
        remember_graph(layer_norm)
    return *layer_norm.weights_in_float32(), layer_norm.epsilon


@keras.saving.register_keras_serializable("txl_tf")
class LayerNorm(Layer):
    """`layer_norm` with weights `gamma` and `beta` of its own. The epsilon of Transformer-XL's original is 1e-12.

    ```python
    normal = txl_tf.layers.LayerNorm()(tf.random.normal([2, 5, 32]))  # [2, 5, 32]
    ```
    """

    free_settings = {"epsilon": FREE_EPSILON}

    @stored
    def __init__(self, epsilon: float = 1e-12, **kwargs: Unpack[LayerOptions]) -> None:
        super().__init__(**kwargs)
        NOT_NEGATIVE("epsilon", epsilon)
        self.epsilon = float(epsilon)

    def build(self, input_shape):
        shape = (width_of("inputs", input_shape),)
        self.gamma = self.add_weight(name="gamma", shape=shape, initializer="ones", autocast=False)
        self.beta = self.add_weight(name="beta", shape=shape, initializer="zeros", autocast=False)

    def call(self, inputs):
        check_tensors({"width": self.gamma.shape[0]}, inputs=(inputs, "float ... width"))
        inputs = tf.convert_to_tensor(inputs)  # of a variable, whose gradient the function does not give
        return ops.layer_norm(inputs, *self.weights_in_float32(), self.epsilon)

    def weights_in_float32(self):
        """`(gamma, beta)` in float32; those of a float64 layer in float64."""
        return at_least_float32(self.gamma), at_least_float32(self.beta)


class Linear(Layer):
    """`x kernel + bias`. Several of one input may be one product, see `heads_of`: its owner takes the weights alone."""

    free_settings = {}
    fixed_parts = {
        "call": "the layer that it is a part of takes its weights alone: override the call of that layer, or the "
        "properties kernel and bias"
    }

    @stored
    def __init__(self, units: int, **kwargs: Unpack[LayerOptions]) -> None:
        super().__init__(**kwargs)

    def build(self, input_shape):
        shape = (width_of("x", input_shape), self.units)
        self.kernel = self.add_weight(name="kernel", shape=shape, initializer="glorot_uniform")
        self.bias = self.add_weight(name="bias", shape=(self.units,), initializer="zeros")

    def call(self, x):
        kernel, bias = tf.cast(self.kernel, x.dtype), tf.cast(self.bias, x.dtype)
        return tf.reshape(ops.add_bias(ops.project(x, kernel), bias), [*keras.ops.shape(x)[:-1], self.units])

    def compute_output_shape(self, *shapes, **named):
        return (*self.named_shapes(shapes, named)["x"][:-1], self.units)


def own_initializer(initializer):
    """A copy of an initializer that draws its own numbers: one of Keras's draws the same every time. Functions stay."""
    if not isinstance(initializer, keras.initializers.Initializer):
        return initializer
    return getattr(initializer, "next_copy", initializer.clone)()


def for_many_weights(initializer):
    """An initializer like this one. Each `own_initializer` of it draws other numbers, also where it has a seed.

    With the seed s, an int, the copies have the seeds s, s + 1, ...; those of a `SeedGenerator` draw from it in turn.
    """
    if not isinstance(initializer, keras.initializers.Initializer):
        return initializer
    config = initializer.get_config()
    shared, seed = initializer.clone(), config.get("seed")
    if isinstance(seed, numbers.Integral):
        seeds = itertools.count(seed)
        shared.next_copy = lambda: type(initializer).from_config({**config, "seed": next(seeds)})
    elif seed is not None:
        shared.next_copy = lambda: shared
    return shared
