"""BiLSTM: the recurrence in loops, from both sides, and nothing of the padding."""

import numpy as np
import pytest
import tensorflow as tf
from helpers import randomise

import txl_tf

CHARS = np.array([[3, 1, 4, 2, 5], [2, 6, 0, 0, 0]])
BIGRAMS = np.array([[2, 3, 1, 4, 2], [5, 1, 0, 0, 0]])


def make(n_bigram=7):
    network = txl_tf.BiLSTM(n_token=9, n_bigram=n_bigram, d_embed=3, d_bigram=2, d_model=8, n_layer=2, seed=0)
    network.build()
    randomise(network, scale=0.8)
    return network


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def lstm(x, kernel, recurrent, bias):
    """Hidden states `[time, units]` of one sequence."""
    h = c = np.zeros(recurrent.shape[0])
    states = []
    for row in x:
        i, f, g, o = np.split(row @ kernel + h @ recurrent + bias, 4)
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        h = sigmoid(o) * np.tanh(c)
        states.append(h)
    return np.array(states)


@pytest.mark.parametrize("n_bigram", [7, 0])
def test_it_is_the_recurrence_from_both_sides(n_bigram):
    network = make(n_bigram)
    found = network({"chars": tf.constant(CHARS), "bigrams": tf.constant(BIGRAMS)}).numpy()
    for row, length in enumerate([5, 2]):
        x = network.embedding.numpy()[CHARS[row, :length]]
        if n_bigram:
            x = np.concatenate([x, network.bigram_embedding.numpy()[BIGRAMS[row, :length]]], 1)
        for layer in network.stacked:
            forward, backward = (
                [weight.numpy() for weight in side.weights] for side in (layer.forward_layer, layer.backward_layer)
            )
            x = np.concatenate([lstm(x, *forward), lstm(x[::-1], *backward)[::-1]], 1)
        np.testing.assert_allclose(found[row, :length], x, atol=1e-6)


def test_the_mask_is_that_of_the_characters():
    hidden = make()({"chars": tf.constant(CHARS), "bigrams": tf.constant(BIGRAMS)})
    np.testing.assert_array_equal(hidden._keras_mask, CHARS != 0)
