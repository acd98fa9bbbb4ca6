"""Layers that are parts of other layers: layer norm, RMS norm and a linear layer. Copies of initializers."""

import functools
import itertools
import numbers
from typing import Any, Unpack

import keras
import tensorflow as tf

import txl_tf.kernels as ops
from txl_tf.config import NORMS, one_of
from txl_tf.config.checks import NOT_NEGATIVE
from txl_tf.kernels.dtypes import at_least_float32
from txl_tf.kernels.shapes import Tensor, shape_of
from txl_tf.nn.arguments import LayerOptions, stored
from txl_tf.nn.base import Layer
from txl_tf.nn.checks import check_tensors, width_of
from txl_tf.nn.parts import is_library
from txl_tf.nn.settings import FREE_EPSILON, remember_graph


def norm_of(layer_norm: Any) -> Any:
    """The argument `norm` of the equations for a layer.

    Returns:
        `(gamma, beta, epsilon)` of a `LayerNorm`, a function of a tensor for an `RMSNorm`, and a user's layer itself.
    """
    is_rms = is_library(layer_norm, RMSNorm)
    if not is_rms and not is_library(layer_norm, LayerNorm):
        return layer_norm
    if not tf.executing_eagerly():
        remember_graph(layer_norm)
    if is_rms:
        return functools.partial(ops.rms_norm, gamma=at_least_float32(layer_norm.gamma), epsilon=layer_norm.epsilon)
    return *layer_norm.weights_in_float32(), layer_norm.epsilon


def make_norm(norm: str, epsilon: float, **options: Any) -> Any:
    """The `LayerNorm` or `RMSNorm` for the argument `norm` of a layer: "layer" or "rms"."""
    one_of(NORMS)("norm", norm)
    return (RMSNorm if norm == "rms" else LayerNorm)(epsilon, **options)


def norm_of_zeros(layer_norm: Any, width: int, dtype: Any) -> Any:
    """The result of a norm for a vector of zeros: `[width]` in `dtype`, or `None`, which stands for zeros.

    It is beta for a `LayerNorm`, `None` for an `RMSNorm`, and computed for a user's layer. With `pre_lnorm`, a zero
    memory has the keys and values of this vector.
    """
    if is_library(layer_norm, RMSNorm):
        return None
    if is_library(layer_norm, LayerNorm):
        return tf.cast(layer_norm.beta, dtype)
    return tf.cast(layer_norm(tf.zeros([1, 1, width], dtype))[0, 0], dtype)


class _Norm(Layer):
    """Base class of the norms, with `epsilon` and the weight `gamma`. A subclass defines the call."""

    gamma: Any
    free_settings = {"epsilon": FREE_EPSILON}

    @stored
    def __init__(self, epsilon: float = 1e-12, **kwargs: Unpack[LayerOptions]) -> None:
        super().__init__(**kwargs)
        NOT_NEGATIVE("epsilon", epsilon)
        self.epsilon = float(epsilon)

    def build(self, input_shape: Any) -> None:
        shape = (width_of("inputs", input_shape),)
        self.gamma = self.add_weight(name="gamma", shape=shape, initializer="ones", autocast=False)

    def _checked(self, inputs: Tensor) -> Tensor:
        """The checked argument of a call, as a tensor, because custom gradients do not reach variables."""
        check_tensors({"width": self.gamma.shape[0]}, inputs=(inputs, "float ... width"))
        return tf.convert_to_tensor(inputs)


@keras.saving.register_keras_serializable("txl_tf")
class LayerNorm(_Norm):
    """`layer_norm` with its own weights `gamma` and `beta`.

    ```python
    normal = txl_tf.layers.LayerNorm()(tf.random.normal([2, 5, 32]))  # [2, 5, 32]
    ```

    Args:
        epsilon: added to the variance. The original Transformer-XL uses 1e-12.

    Call arguments:
        inputs: `[..., width]`.

    Returns:
        A tensor like `inputs`: its last axis is scaled to mean 0 and variance 1, times `gamma`, plus `beta`.
    """

    beta: Any

    def build(self, input_shape: Any) -> None:
        super().build(input_shape)
        self.beta = self.add_weight(name="beta", shape=self.gamma.shape, initializer="zeros", autocast=False)

    def call(self, inputs: Tensor) -> Tensor:
        return ops.layer_norm(self._checked(inputs), *self.weights_in_float32(), self.epsilon)

    def weights_in_float32(self) -> tuple[Tensor, Tensor]:
        """`(gamma, beta)` in float32, or in float64 if the layer is float64."""
        return at_least_float32(self.gamma), at_least_float32(self.beta)


@keras.saving.register_keras_serializable("txl_tf")
class RMSNorm(_Norm):
    """Divides by the root mean square, with a weight `gamma`.

    ```python
    scaled = txl_tf.layers.RMSNorm()(tf.random.normal([2, 5, 32]))  # [2, 5, 32]
    ```

    Args:
        epsilon: added to the mean square.

    Call arguments:
        inputs: `[..., width]`.

    Returns:
        A tensor like `inputs`: its last axis is scaled to the root mean square 1, times `gamma`.

    Reference:
        Zhang and Sennrich 2019.
    """

    def call(self, inputs: Tensor) -> Tensor:
        return ops.rms_norm(self._checked(inputs), at_least_float32(self.gamma), self.epsilon)


class Linear(Layer):
    """`x kernel + bias`.

    The layer that contains it may use only the weights, for example to compute several of them as one product.

    Args:
        units: width of the output.
    """

    kernel: Any
    bias: Any
    free_settings = {}
    fixed_methods = {
        "call": "the layer that contains it uses only its weights: override the call of that layer, or the properties "
        "kernel and bias"
    }

    @stored
    def __init__(self, units: int, **kwargs: Unpack[LayerOptions]) -> None:
        super().__init__(**kwargs)

    def build(self, input_shape: Any) -> None:
        shape = (width_of("x", input_shape), self.units)
        self.kernel = self.add_weight(name="kernel", shape=shape, initializer="glorot_uniform")
        self.bias = self.add_weight(name="bias", shape=(self.units,), initializer="zeros")

    def call(self, x: Tensor) -> Tensor:
        kernel = tf.cast(self.kernel, x.dtype)
        bias = tf.cast(self.bias, x.dtype)
        return tf.reshape(ops.add_bias(ops.project(x, kernel), bias), [*shape_of(x)[:-1], self.units])

    def compute_output_shape(self, *shapes: Any, **named: Any) -> Any:
        return (*self.named_shapes(shapes, named)["x"][:-1], self.units)


def own_initializer(initializer: Any) -> Any:
    """A copy of an initializer for one weight. A function is returned unchanged.

    One initializer of Keras draws the same numbers for every weight of the same shape. Without a seed, each copy draws
    numbers of its own. With a seed, all copies draw the same numbers, unless `initializer` comes from
    `for_many_weights`.
    """
    if not isinstance(initializer, keras.initializers.Initializer):
        return initializer
    return getattr(initializer, "next_copy", initializer.clone)()


def for_many_weights(initializer: Any) -> Any:
    """A copy of an initializer. Copies that `own_initializer` makes of it draw different numbers, also with a seed.

    If the seed is an int s, the copies have the seeds s, s + 1, ... If it is a `SeedGenerator`, they share a new one,
    which starts from the initial seed of that one. The given one does not advance. A function is returned unchanged.
    """
    if not isinstance(initializer, keras.initializers.Initializer):
        return initializer
    config = initializer.get_config()
    shared: Any = initializer.clone()
    seed = config.get("seed")
    if isinstance(seed, numbers.Integral):
        seeds = itertools.count(seed)
        shared.next_copy = lambda: type(initializer).from_config({**config, "seed": next(seeds)})
    elif seed is not None:
        shared.next_copy = lambda: shared
    return shared


def for_weights_of_layer(initializer: Any) -> Any:
    """`for_many_weights` of the initializer that a layer was given, if its copies would draw the same numbers.

    An initializer without a seed is returned unchanged: a copy would draw a seed from Python's `random`, which changes
    the weights that are made after it. So is one of `for_many_weights`, which a network shares among its layers.
    """
    is_keras_initializer = isinstance(initializer, keras.initializers.Initializer)
    if not is_keras_initializer or hasattr(initializer, "next_copy") or initializer.get_config().get("seed") is None:
        return initializer
    return for_many_weights(initializer)
