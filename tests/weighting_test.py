"""Weights of labels and rows in graphs with unknown sizes."""

import numpy as np
import pytest
import tensorflow as tf

from txl_tf.training.weighting import weights_of_labels, weights_of_rows

COUNTED = np.float32([[1, 1, 0], [1, 0, 0]])


def in_graph(function, weights):
    """Calls the function in a graph that knows the ranks of weights and labels alone."""
    specs = [tf.TensorSpec([None] * np.ndim(x), tf.float32) for x in (weights, COUNTED)]
    return tf.function(function, input_signature=specs, autograph=False)(tf.constant(weights, tf.float32), COUNTED)


@pytest.mark.parametrize("weights", [[2, 3], [[2], [3]], [[2, 2, 7], [3, 7, 7]]], ids=str)
def test_weights_are_of_rows_or_of_labels(weights):
    np.testing.assert_array_equal(in_graph(weights_of_labels, weights), [[2, 2, 0], [3, 0, 0]])
    np.testing.assert_array_equal(in_graph(weights_of_rows, weights), [2, 3])


@pytest.mark.parametrize("function", [weights_of_labels, weights_of_rows])
@pytest.mark.parametrize("weights", [[2], [[2]], [[2, 2, 7]], [2, 3, 4]], ids=str)
def test_weights_of_another_shape_are_refused_in_place_of_being_repeated(function, weights):
    with pytest.raises(tf.errors.InvalidArgumentError):
        in_graph(function, weights)
