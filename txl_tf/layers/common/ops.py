"""Operations on every position by itself: products, layer norm, cross entropy.

The gradients are written out where TensorFlow's own take more passes over the activations, or run on one thread.
"""

import itertools
import numbers

import keras
import tensorflow as tf

from txl_tf.config.checks import NOT_NEGATIVE
from txl_tf.layers.common.arguments import stored
from txl_tf.layers.common.base import Layer, check_tensors, width_of
from txl_tf.layers.common.dropout import dropout
from txl_tf.layers.common.dtypes import at_least_float32, is_half
from txl_tf.layers.common.fusion import fused, only_cpus, pays
from txl_tf.layers.common.gradients import custom_gradient
from txl_tf.layers.common.precision import matmul
from txl_tf.layers.mixins.settings import FREE_EPSILON


def project(x, kernel):
    """`x` `[..., E]` times `kernel` `[E, F]`, as rows of a matrix, `[any, F]`.

    With `[batch, time, E]`, the gradient of the product is first one matrix for every row of the batch.
    """
    return matmul(tf.reshape(x, [-1, kernel.shape[0]]), kernel)


@custom_gradient
def layer_norm(x, gamma, beta, epsilon):
    """Normalises the last axis to mean 0 and variance 1, then scales and shifts.

    It computes in float32, or in float64 if `x` is float64.

    Args:
        x: `[..., E]`.
        gamma, beta: `[E]`.
        epsilon: float, added to the variance.

    Returns:
        A tensor like `x`.
    """
    dtype, shape, width = x.dtype, keras.ops.shape(x), x.shape[-1]
    dtype_of_weights = gamma.dtype
    x = at_least_float32(tf.reshape(x, [-1, width]))
    gamma, beta = tf.cast(gamma, x.dtype), tf.cast(beta, x.dtype)
    centered = x - tf.reduce_mean(x, 1, keepdims=True)
    scale = tf.math.rsqrt(tf.reduce_mean(tf.square(centered), 1, keepdims=True) + epsilon)
    normal = centered * scale

    def grad(upstream):
        upstream = at_least_float32(tf.reshape(upstream, [-1, width]))
        to_scale = upstream * normal
        mean = tf.linalg.matvec(upstream, gamma / width)[:, None]  # a matrix product is faster than a sum
        slope = tf.linalg.matvec(to_scale, gamma / width)[:, None]
        of_x = (upstream * gamma - mean - normal * slope) * scale
        of_gamma, of_beta = (tf.cast(sum_of_rows(rows), dtype_of_weights) for rows in (to_scale, upstream))
        return tf.cast(tf.reshape(of_x, shape), dtype), of_gamma, of_beta, None

    return tf.cast(tf.reshape(normal * gamma + beta, shape), dtype), grad


def residual_norm(layer_norm, x, y, rate=0.0, dropout_key=None):
    """`layer_norm(x + dropout(y))`: in half precision one pass forwards and one backwards, where that pays.

    Args:
        layer_norm: a `LayerNorm`.
        x, y: `[batch, time, E]`.
        rate, dropout_key: see `dropout`.

    Returns:
        A tensor like `x`.
    """
    shape = keras.ops.shape(x)
    if not is_half(x.dtype) or not pays(shape):
        return layer_norm(x + dropout(y, rate, dropout_key))

    @custom_gradient
    def one_pass(x, y, gamma, beta):
        epsilon = layer_norm.epsilon
        out, normal, scale = _residual_norm(shape, x, y, gamma, beta, epsilon, rate, dropout_key)

        def grad(upstream):
            of_x, of_y, to_scale = _residual_norm_grad(shape, upstream, normal, scale, gamma, rate, dropout_key)
            rows = tf.reshape(tf.cast(upstream, tf.float32), [-1, shape[-1]])
            return of_x, of_y, sum_of_rows(tf.reshape(to_scale, [-1, shape[-1]])), sum_of_rows(rows)

        return out, grad

    return one_pass(x, y, *layer_norm.weights_in_float32())


@fused
def _residual_norm(shape, x, y, gamma, beta, epsilon, rate, dropout_key):
    """The result of `residual_norm`, what it is before gamma and beta, and the factor that made its variance 1."""
    both = tf.cast(x + dropout(y, rate, dropout_key), tf.float32)
    centered = both - tf.reduce_mean(both, -1, keepdims=True)
    scale = tf.math.rsqrt(tf.reduce_mean(tf.square(centered), -1, keepdims=True) + epsilon)
    normal = centered * scale
    return tf.cast(normal * gamma + beta, x.dtype), tf.cast(normal, x.dtype), scale


@fused
def _residual_norm_grad(shape, upstream, normal, scale, gamma, rate, dropout_key):
    """Gradients of `x` and `y`, and what the gradient of gamma is the sum of."""
    dtype, upstream, normal = upstream.dtype, tf.cast(upstream, tf.float32), tf.cast(normal, tf.float32)
    to_scale, to_normal = upstream * normal, upstream * gamma
    slope = tf.reduce_mean(to_scale * gamma, -1, keepdims=True)
    of_x = tf.cast((to_normal - tf.reduce_mean(to_normal, -1, keepdims=True) - normal * slope) * scale, dtype)
    return of_x, dropout(of_x, rate, dropout_key), to_scale


def sum_of_rows(x):
    """`[n, E]` to `[E]`, as a product: a sum takes several times as long."""
    return tf.linalg.matvec(x, tf.ones([keras.ops.shape(x)[0]], x.dtype), transpose_a=True)


def add_bias(x, bias):
    """`x` `[n, E]` plus `bias` `[E]`, in bfloat16 with `sum_of_rows` as the bias's gradient.

    TensorFlow's own sums on CPUs are of bfloat16 numbers: with 1,024 rows of random numbers they are off by 4%.
    """
    sums_are_exact = x.dtype != tf.bfloat16 or x.shape[0] == 1 or not only_cpus()
    return tf.nn.bias_add(x, bias) if sums_are_exact else _add_bias(x, bias)


@custom_gradient
def _add_bias(x, bias):
    return tf.nn.bias_add(x, bias), lambda upstream: (upstream, sum_of_rows(upstream))


@custom_gradient
def cross_entropy(labels, logits):
    """Negative log-likelihood of `labels` under the softmax of `logits`.

    `tf.nn.sparse_softmax_cross_entropy_with_logits` takes three times as long on a CPU.

    Args:
        labels: int32 `[n]`, ids of classes.
        logits: float32 or float64 `[n, classes]`.

    Returns:
        `[n]`, nats, in the dtype of the logits.
    """
    probs = tf.nn.softmax(logits)
    places = tf.stack([tf.range(tf.size(labels)), labels], 1)
    # The largest probability is exp(0) over the sum of all: unlike the label's it is never rounded to 0.
    nll = (tf.reduce_max(logits, 1) - tf.gather_nd(logits, places)) - tf.math.log(tf.reduce_max(probs, 1))

    def grad(upstream):
        return None, tf.tensor_scatter_nd_sub(probs * upstream[:, None], places, upstream)

    return nll, grad


@keras.saving.register_keras_serializable("txl_tf")
class LayerNorm(Layer):
    """`layer_norm` with weights `gamma` and `beta` of its own. The epsilon of Transformer-XL's original is 1e-12.

    ```python
    normal = txl_tf.layers.LayerNorm()(tf.random.normal([2, 5, 32]))  # [2, 5, 32]
    ```
    """

    free_settings = {"epsilon": FREE_EPSILON}

    @stored
    def __init__(self, epsilon=1e-12, **kwargs):
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
        return layer_norm(inputs, *self.weights_in_float32(), self.epsilon)

    def weights_in_float32(self):
        """`(gamma, beta)` in float32; those of a float64 layer in float64."""
        return at_least_float32(self.gamma), at_least_float32(self.beta)


class Linear(Layer):
    """`x kernel + bias`. Several of one input may be one product, see `heads_of`."""

    free_settings = {}

    @stored
    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)

    def build(self, input_shape):
        shape = (width_of("x", input_shape), self.units)
        self.kernel = self.add_weight(name="kernel", shape=shape, initializer="glorot_uniform")
        self.bias = self.add_weight(name="bias", shape=(self.units,), initializer="zeros")

    def call(self, x):
        kernel, bias = tf.cast(self.kernel, x.dtype), tf.cast(self.bias, x.dtype)
        return tf.reshape(add_bias(project(x, kernel), bias), [*keras.ops.shape(x)[:-1], self.units])

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
