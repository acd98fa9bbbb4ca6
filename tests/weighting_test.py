"""Weights of labels and rows in graphs with unknown sizes."""

import numpy as np
import pytest
import tensorflow as tf
from helpers import SMALL

import txl_tf
from txl_tf.errors import ParameterError
from txl_tf.training.weighting import weights_of_labels, weights_of_rows

COUNTED = np.float32([[1, 1, 0], [1, 0, 0]])


def in_graph(function, weights, counted=COUNTED, knows_rank=True):
    """Calls the function in a graph that knows the ranks of weights and labels alone, or only that of the labels."""
    specs = [tf.TensorSpec([None] * np.ndim(weights) if knows_rank else None), tf.TensorSpec([None, None])]
    return tf.function(function, input_signature=specs, autograph=False)(tf.constant(weights, tf.float32), counted)


@pytest.mark.parametrize("weights", [[2, 3], [[2], [3]], [[2, 2, 7], [3, 7, 7]]], ids=str)
@pytest.mark.parametrize("knows_rank", [True, False])
def test_weights_are_of_rows_or_of_labels(weights, knows_rank):
    np.testing.assert_array_equal(in_graph(weights_of_labels, weights, knows_rank=knows_rank), [[2, 2, 0], [3, 0, 0]])
    np.testing.assert_array_equal(in_graph(weights_of_rows, weights, knows_rank=knows_rank), [2, 3])


@pytest.mark.parametrize("function", [weights_of_labels, weights_of_rows])
@pytest.mark.parametrize("weights", [[2], [[2]], [[2, 2, 7]], [2, 3, 4], 2, [[[2]], [[3]]]], ids=str)
@pytest.mark.parametrize("knows_rank", [True, False])
def test_weights_of_another_shape_are_refused_in_place_of_being_repeated(function, weights, knows_rank):
    with pytest.raises((tf.errors.InvalidArgumentError, ParameterError)):
        in_graph(function, weights, knows_rank=knows_rank)


def test_weights_of_unknown_rank_are_of_rows_where_there_are_as_many_rows_as_labels():
    found = in_graph(weights_of_labels, [2, 3, 4], np.ones([3, 3], np.float32), knows_rank=False)
    np.testing.assert_array_equal(found, [[2] * 3, [3] * 3, [4] * 3])
    empty = in_graph(weights_of_labels, np.zeros([0], np.float32), np.ones([0, 3], np.float32), knows_rank=False)
    assert empty.shape == [0, 3]


@pytest.mark.ci
def test_an_encoder_decoder_weighs_rows_in_a_graph_that_does_not_know_the_shape():
    sizes = {"num_layers": 1, "d_model": 8, "num_heads": 2, "dff": 8, "input_vocab_size": 5, "target_vocab_size": 5}
    model = txl_tf.Transformer(**sizes, rate=0.0, seed=1)
    model.compile("sgd", run_eagerly=False)
    source, target = np.array([[1, 2, 3], [4, 3, 2], [2, 2, 1]]), np.array([[1, 4, 2, 3], [1, 3, 0, 0], [1, 2, 4, 0]])
    weights = np.array([1, 5, 3], np.float32)
    expected = model.evaluate(source, target, sample_weight=weights, verbose=0)
    ids = tf.TensorSpec([None, None], tf.int32)
    for known, given in (([None, None], weights[:, None]), (None, weights)):
        data = tf.data.Dataset.from_generator(
            lambda given=given: iter([(source, target, given)]), output_signature=(ids, ids, tf.TensorSpec(known))
        )
        model.compile("sgd", run_eagerly=False)  # or a graph of one of them would serve both
        np.testing.assert_allclose(model.evaluate(data, verbose=0), expected, rtol=1e-6, err_msg=str(known))


def test_a_score_weighs_rows_in_a_graph_that_does_not_know_the_rank():
    lm = txl_tf.TransformerXLLM(**SMALL, mem_len=2)
    tokens = np.array([[1, 2, 3], [3, 2, 1], [2, 2, 4]], np.int32)
    weights = np.array([1, 5, 3], np.float32)

    @tf.function(input_signature=[tf.TensorSpec(None)], autograph=False)
    def score(weights):
        return lm.score(tokens, tokens, sample_weight=weights)[0]

    expected = lm.score(tokens, tokens, sample_weight=weights)[0]
    np.testing.assert_allclose(score(weights), expected, rtol=1e-5)
    np.testing.assert_allclose(score(weights[:, None]), expected, rtol=1e-5)
    with pytest.raises(tf.errors.InvalidArgumentError):
        score(weights[:2])
