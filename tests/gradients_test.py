"""Gradients of one's own: in eager mode, in graphs, in loops, under XLA; and none of them stays behind."""

import numpy as np
import pytest
import tensorflow as tf

from txl_tf.kernels.gradients import custom_gradient, recompute


@custom_gradient
def cubed(x, factor):
    """A gradient that is 10 times too large, to tell it from TensorFlow's own."""
    y = factor * x**3

    def grad(upstream):
        return 30 * factor * x**2 * upstream, None

    return y, grad


def by_tape(x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.reduce_sum(cubed(x, 2.0))
    return y, tape.gradient(y, x)


def of_a_graph_within(x):
    """The tape is outside of the graph of `cubed`."""
    inner = tf.function(lambda x: tf.reduce_sum(cubed(x, 2.0)))
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = inner(x)
    return y, tape.gradient(y, x)


def in_a_loop(x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        _, y = tf.while_loop(
            lambda i, y: i < 1,
            lambda i, y: (i + 1, y + tf.reduce_sum(cubed(x, 2.0))),
            (tf.constant(0), tf.constant(0.0)),
            maximum_iterations=1,
        )
    return y, tape.gradient(y, x)


@pytest.mark.parametrize("mode", ["eager", "graph", "xla"])
@pytest.mark.parametrize("function", [by_tape, of_a_graph_within, in_a_loop])
def test_the_gradient_is_the_one_that_is_given(function, mode):
    call = function if mode == "eager" else tf.function(function, jit_compile=mode == "xla")
    y, gradient = call(tf.constant([1.0, 2.0]))
    assert float(y) == 18
    np.testing.assert_array_equal(gradient, [60, 240])


@pytest.mark.parametrize("mode", ["eager", "graph", "xla"])
def test_recomputation_changes_no_number_and_is_taken_twice(mode):
    calls = []

    def layer(x, kernel):
        calls.append(1)
        return tf.tanh(x @ kernel)

    def run(function):
        x, kernel = tf.constant([[0.5, -1.0]]), tf.constant([[1.0, 2.0], [3.0, -0.5]])
        with tf.GradientTape() as tape:
            tape.watch([x, kernel])
            y = function(function(x, kernel), kernel)
        return y, *tape.gradient(y, [x, kernel])

    expected, plain = run(layer), len(calls)
    call = run if mode == "eager" else tf.function(run, jit_compile=mode == "xla")
    found = call(recompute(layer))
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    assert len(calls) == plain + 2 * plain


def test_an_argument_without_a_part_in_the_result_has_a_gradient_of_zeros():
    x, unused = tf.constant(3.0), tf.constant([1.0, 2.0])
    with tf.GradientTape() as tape:
        tape.watch([x, unused])
        y = recompute(lambda x, unused: x**2)(x, unused)
    of_x, of_unused = tape.gradient(y, [x, unused])
    assert float(of_x) == 6
    np.testing.assert_array_equal(of_unused, [0, 0])
