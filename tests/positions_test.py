"""Sinusoids against equations (1) and (2) in loops."""

import math

import numpy as np
import pytest
import reference_model
import tensorflow as tf
from helpers import raises_parameter

from txl_tf.errors import ParameterError
from txl_tf.nn.positions import (
    inverse_frequencies,
    positional_embedding,
    positional_encoding,
    relative_positions,
)


def sinusoids_in_loops(positions, d_model):
    """Equation (1) for all sines, equation (2) for all cosines, the latter behind the former."""
    expected = np.zeros([len(positions), d_model])
    for row, pos in enumerate(positions):
        for i in range(d_model // 2):
            angle = pos / 10000 ** (2 * i / d_model)
            expected[row, i] = math.sin(angle)
            expected[row, d_model // 2 + i] = math.cos(angle)
    return expected


@pytest.mark.parametrize("d_model", [2, 6, 32])
def test_positional_embedding_is_equations_1_and_2_in_halves(d_model):
    positions = np.array([40, 3, 2, 1, 0], np.float32)
    got = positional_embedding(tf.constant(positions), inverse_frequencies(d_model))
    np.testing.assert_allclose(got, sinusoids_in_loops(positions, d_model)[None], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "call, name",
    [
        (lambda: positional_embedding(9, inverse_frequencies(8)), "pos_seq"),
        (lambda: positional_embedding(tf.range(9), inverse_frequencies(8)), "pos_seq"),
        (lambda: positional_embedding(tf.range(9.0), 8.0), "inv_freq"),
        (lambda: positional_embedding(tf.range(9.0), inverse_frequencies(8), convention="turns"), "convention"),
        (lambda: inverse_frequencies(7), "d_model"),
        (lambda: relative_positions(-1), "klen"),
        (lambda: positional_encoding(0, 8), "position"),
    ],
)
def test_wrong_arguments_are_named(call, name):
    with pytest.raises(ParameterError) as caught:
        call()
    assert caught.value.name == name


def test_bsz_repeats_the_embedding_for_every_row():
    pos_seq, inv_freq = relative_positions(4), inverse_frequencies(6)
    single = positional_embedding(pos_seq, inv_freq).numpy()
    np.testing.assert_array_equal(positional_embedding(pos_seq, inv_freq, bsz=3), np.repeat(single, 3, 0))


@pytest.mark.parametrize("bsz", [None, 3])
def test_positional_embedding_is_the_plain_port_s_transposed(bsz):
    pos_seq = tf.range(6.0, -1, -1.0)
    inv_freq = 1 / (10000 ** (tf.range(0, 8, 2.0) / 8))
    expected = reference_model.positional_embedding(pos_seq, inv_freq, bsz)
    got = positional_embedding(relative_positions(7), inverse_frequencies(8), bsz)
    np.testing.assert_array_equal(got, tf.transpose(expected, [1, 0, 2]))


def test_interleaved_is_halves_in_another_order_and_the_vanilla_encoding():
    pos_seq, inv_freq = tf.range(9.0), inverse_frequencies(6)
    halves = positional_embedding(pos_seq, inv_freq).numpy()
    interleaved = positional_embedding(pos_seq, inv_freq, convention="interleaved").numpy()
    np.testing.assert_array_equal(interleaved, halves[..., [0, 3, 1, 4, 2, 5]])
    np.testing.assert_allclose(interleaved, positional_encoding(9, 6), atol=1e-6)
    in_graph = tf.function(lambda n: positional_embedding(tf.range(n), inv_freq, 2, "interleaved"))(tf.constant(9.0))
    np.testing.assert_array_equal(in_graph, np.repeat(interleaved, 2, 0))
    with raises_parameter("convention", "pairs", ["halves", "interleaved"]):
        positional_embedding(pos_seq, inv_freq, convention="pairs")


def test_relative_positions_fall_to_0_and_stop_at_clamp_len():
    np.testing.assert_array_equal(relative_positions(5), [4, 3, 2, 1, 0])
    np.testing.assert_array_equal(relative_positions(5, clamp_len=2), [2, 2, 2, 1, 0])
    np.testing.assert_array_equal(relative_positions(5, clamp_len=9), [4, 3, 2, 1, 0])
    for no_limit in (0, -1):
        np.testing.assert_array_equal(relative_positions(3, clamp_len=no_limit), [2, 1, 0])
    np.testing.assert_array_equal(tf.function(relative_positions)(tf.constant(3)), [2, 1, 0])


def test_far_positions_are_exact_to_single_precision():
    """1,600 + 128 keys, as in evaluation: float32 holds the angles, so that sinusoids are off by 1e-4 at most."""
    got = positional_embedding(relative_positions(1728), inverse_frequencies(64))[0]
    np.testing.assert_allclose(got, sinusoids_in_loops(range(1727, -1, -1), 64), rtol=0, atol=2e-4)


def test_odd_d_model_is_an_error():
    with raises_parameter("d_model", 7):
        inverse_frequencies(7)
