"""Products, layer norm and cross entropy, and the gradients written out for them, against TensorFlow's own."""

import numpy as np
import pytest
import tensorflow as tf

from txl_tf.kernels import add_bias, cross_entropy, layer_norm
from txl_tf.nn.ops import LayerNorm


def random(*shape, seed=0, scale=1.0):
    return tf.constant(np.random.default_rng(seed).normal(size=shape) * scale, tf.float32)


def values_and_gradients(function, *inputs):
    """The result, and the gradients of a sum of it with fixed random weights."""
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        result = function(*inputs)
        loss = tf.reduce_sum(result * tf.cast(random(*result.shape, seed=9), result.dtype))
    return [result, *tape.gradient(loss, inputs)]


def assert_same(actual, expected, rtol):
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        a, b = (np.array(tf.cast(x, tf.float64)) for x in (a, b))
        np.testing.assert_allclose(a, b, rtol=0, atol=rtol * np.abs(b).max(initial=0))


@pytest.mark.parametrize("dtype, rtol", [("float32", 2e-6), ("bfloat16", 2**-7)])
def test_layer_norm_and_its_gradient(dtype, rtol):
    def expected(x, gamma, beta):
        x = tf.cast(x, tf.float32)
        mean, variance = tf.nn.moments(x, [-1], keepdims=True)
        return tf.cast((x - mean) / tf.sqrt(variance + 1e-3) * gamma + beta, dtype)

    inputs = tf.cast(random(3, 4, 5) * 2 + 7, dtype), random(5, seed=1), random(5, seed=2)
    actual = values_and_gradients(lambda *inputs: layer_norm(*inputs, 1e-3), *inputs)
    assert_same(actual, values_and_gradients(expected, *inputs), rtol)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_layer_norm_takes_policies_that_are_not_mixed(dtype):
    layer = LayerNorm(dtype=dtype)
    output = layer(tf.cast(random(5, 4), dtype))
    assert output.dtype == dtype
    np.testing.assert_allclose(tf.reduce_mean(tf.cast(output, tf.float32), 1), np.zeros(5), atol=0.01)


def test_layer_norm_s_weights_keep_their_precision_in_half_precision():
    layer = LayerNorm(dtype="mixed_bfloat16")
    layer.build([None, 4])
    layer.gamma.assign([1 + 2**-12] * 4)
    layer.beta.assign([-1, 1, 1, -1])
    x = tf.constant([[1.0, -1.0, -1.0, 1.0]], tf.bfloat16)
    np.testing.assert_array_equal(layer(x), tf.constant([[2**-12, -(2**-12), -(2**-12), 2**-12]], tf.bfloat16))


@pytest.mark.parametrize("dtype, rtol", [("float32", 1e-5), ("bfloat16", 2**-8)])
@pytest.mark.parametrize("rows", [1, 3000])
def test_a_bias_s_gradient_is_the_sum_of_the_rows_in_half_precision_too(dtype, rtol, rows):
    x, bias, upstream = tf.cast(random(rows, 4), dtype), tf.cast(random(4, seed=1), dtype), tf.ones([rows, 4], dtype)
    with tf.GradientTape() as tape:
        tape.watch([x, bias])
        result = add_bias(x, bias)
    of_x, of_bias = tape.gradient(result, [x, bias], upstream)
    assert_same([result, of_x], [x + bias, upstream], 0)
    np.testing.assert_allclose(tf.cast(of_bias, tf.float64), [rows] * 4, rtol=rtol)


@pytest.mark.parametrize("scale", [1.0, 300.0])  # with the latter, probabilities of labels are rounded to 0
def test_cross_entropy_is_tensorflow_s(scale):
    logits, labels = random(50, 7, scale=scale), tf.constant(np.random.default_rng(1).integers(0, 7, 50), tf.int32)
    actual = values_and_gradients(lambda logits: cross_entropy(labels, logits), logits)
    expected = values_and_gradients(
        lambda logits: tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits), logits
    )
    assert_same(actual, expected, 1e-6)
    np.testing.assert_allclose(actual[0], expected[0], rtol=1e-5, atol=3e-7)  # small ones, too
    assert scale < 100 or actual[0].numpy().max() > 100


def test_cross_entropy_of_no_rows():
    nll, gradient = values_and_gradients(
        lambda logits: cross_entropy(tf.zeros([0], tf.int32), logits), tf.zeros([0, 7])
    )
    assert nll.shape == [0] and gradient.shape == [0, 7]
