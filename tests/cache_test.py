"""Cached keys and values give what the network gives from its memory of hidden states."""

import numpy as np
import pytest
import tensorflow as tf
from helpers import SMALL, raises_parameter
from segments import state_of

from txl_tf.transformer_xl import inference, ring
from txl_tf.transformer_xl.cache import (
    cached_forward,
    initial_state,
    memory_of,
    precompute,
    state_from,
    whole_segments,
)
from txl_tf.transformer_xl.inference import writable_copy


def tokens(batch, tgt_len, seed=0):
    return tf.constant(np.random.default_rng(seed).integers(0, SMALL["n_token"], [batch, tgt_len]))


def assert_memory_is(network, state, mems, atol=1e-5):
    """Uncached memories, projected, are what the state holds."""
    found, expected = memory_of(network, state), memory_of(network, state_of(network, mems))
    for a, b in zip(tf.nest.flatten(found), tf.nest.flatten(expected), strict=True):
        np.testing.assert_allclose(tf.cast(a, tf.float32), tf.cast(b, tf.float32), atol=atol)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"mem_len": 9}, marks=pytest.mark.slow),
        pytest.param({"mem_len": 3, "same_length": True, "clamp_len": 2, "untie_r": True}, marks=pytest.mark.slow),
        pytest.param({"mem_len": 4, "clamp_len": 5, "cutoffs": [5, 12], "div_val": 2}, marks=pytest.mark.slow),
        {"mem_len": 8, "same_length": True, "untie_r": True, "cutoffs": [5, 12], "proj_share_all_but_first": True},
        pytest.param({"mem_len": 0, "clamp_len": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_segments_of_any_length_are_those_of_the_network(eager, small_lm, options):
    lm = small_lm(**options)
    network, max_segment = lm.network, 6
    weights, state, mems = precompute(network, max_segment), initial_state(network, 2, max_segment), lm.initial_mems(2)
    for i, tgt_len in enumerate([5, 1, 6, 2, 6]):  # goes round the ring of mem_len + 6 slots
        segment = tokens(2, tgt_len, seed=i)
        expected, mems_after = lm.log_probs(segment, mems)
        hidden, state = cached_forward(network, weights, segment, state)
        np.testing.assert_allclose(lm.softmax(hidden, embedding=network.embedding), expected, atol=1e-5)
        nll, mems = lm.score(segment, segment, mems)
        np.testing.assert_allclose(lm.softmax.nll(hidden, segment, network.embedding), nll, atol=1e-5)
        assert_memory_is(network, state, mems_after)
        if i == 2:  # from one form of memory to the other and back, with another max_segment
            state = state_of(network, mems, 7)
            state = state_from(*memory_of(network, state), max_segment)


def test_half_precision_is_as_close_as_the_uncached_network(small_lm):
    lm = small_lm(dtype="mixed_bfloat16", mem_len=7)
    network = lm.network
    exact = small_lm(mem_len=7).network
    weights, state = precompute(network, 4), initial_state(network, 2, 4)
    mems, exact_mems = lm.initial_mems(2), exact.initial_mems(2)
    for i in range(4):
        segment = tokens(2, 4, seed=i)
        expected, exact_mems = exact(segment, exact_mems)
        uncached, mems = network(segment, mems)
        hidden, state = cached_forward(network, weights, segment, state)
        error = np.abs(tf.cast(hidden, tf.float32) - expected).mean()
        assert 0 < error < 1.5 * np.abs(tf.cast(uncached, tf.float32) - expected).mean()


@pytest.mark.parametrize("at_a_time, options", [(1, {}), (2, {}), (1, {"same_length": True})])
def test_queries_in_blocks_and_rows_in_a_loop_change_nothing(small_lm, monkeypatch, at_a_time, options):
    network = small_lm(n_layer=1, mem_len=4, **options).network
    monkeypatch.setattr(ring, "operations_at_a_time", lambda: at_a_time)
    monkeypatch.setattr(ring, "QUERY_BLOCK", 4)
    monkeypatch.setattr(inference, "MAX_UNROLLED_ROWS", 1)
    weights = precompute(network, 11)
    structure = (weights, initial_state(network, 3, 11))
    specs = [tf.TensorSpec([None, None], tf.int64), *map(tf.TensorSpec.from_tensor, tf.nest.flatten(structure))]

    @tf.function(input_signature=specs, autograph=False)
    def forward(segment, *tensors):
        weights, state = tf.nest.pack_sequence_as(structure, tensors)
        return cached_forward(network, weights, segment, state)

    for first_slot in (0, 4):  # with 4, the blocks of the first segment see fewer slots
        state, mems = initial_state(network, 3, 11, first_slot), network.initial_mems(3)
        for tgt_len in (11, 5, 1, 11, 8):
            segment = tokens(3, tgt_len, seed=tgt_len)
            expected, mems = network(segment, mems)
            hidden, state = forward(segment, *tf.nest.flatten((weights, state)))
            message = f"from slot {first_slot} on, {tgt_len} tokens"
            np.testing.assert_allclose(hidden, expected, atol=1e-5, err_msg=message)


@pytest.mark.parametrize("options", [{"mem_len": 5}, {"mem_len": 3, "same_length": True}, {"mem_len": 0}], ids=str)
def test_rows_of_unequal_length_are_what_each_is_alone(small_lm, options):
    network = small_lm(**options).network
    text, after = tokens(3, 6), tokens(3, 6, seed=1)
    weights = precompute(network, 6)
    both, state = cached_forward(network, weights, text, initial_state(network, 3, 6), lengths=[6, 1, 4])
    next_hidden, _ = cached_forward(network, weights, after, state)
    for row, length in enumerate([6, 1, 4]):
        expected, mems = network(text[row : row + 1, -length:])
        np.testing.assert_allclose(both[row, -length:], expected[0], atol=1e-5)
        np.testing.assert_allclose(next_hidden[row], network(after[row : row + 1], mems)[0][0], atol=1e-5)


def test_only_in_place_changes_the_state_that_is_given(small_lm):
    network = small_lm().network
    weights, segment = precompute(network, 3), tokens(2, 3)
    start = writable_copy(initial_state(network, 2, 3))
    expected, after = cached_forward(network, weights, segment, start)
    assert all(np.all(ring == 0) for ring in start.keys + start.values)
    hidden, in_place = cached_forward(network, weights, segment, start, in_place=True)
    np.testing.assert_array_equal(hidden, expected)
    for old, same, other in zip(start.keys, in_place.keys, after.keys, strict=True):
        np.testing.assert_array_equal(same, other)
        np.testing.assert_array_equal(old, other)


@pytest.mark.parametrize(
    "options, tgt_len, jit_compile",
    [
        ({"mem_len": 9, "untie_r": True, "cutoffs": [5, 12], "div_val": 2}, 4, False),  # 16 slots
        pytest.param(
            {"mem_len": 8, "same_length": True, "clamp_len": 5, "n_layer": 1}, 4, True, marks=pytest.mark.slow
        ),
        pytest.param({"mem_len": 3}, 5, False, marks=pytest.mark.slow),  # the segment is longer than the memory
        pytest.param(
            {"mem_len": 3, "n_layer": 1}, 1, True, marks=pytest.mark.slow
        ),  # one token: all four slots are seen
        pytest.param({"mem_len": 0}, 4, False, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_with_static_shapes_whole_segments_go_round_the_ring(small_lm, options, tgt_len, jit_compile):
    lm = small_lm(**options)
    network, max_segment = lm.network, whole_segments(options["mem_len"], tgt_len)
    assert (network.mem_len + max_segment) % tgt_len == 0 and max_segment >= tgt_len
    weights, state, mems = precompute(network, max_segment), initial_state(network, 3, max_segment), lm.initial_mems(3)
    forward = tf.function(cached_forward, jit_compile=jit_compile, autograph=False)
    for i in range(6):
        segment = tokens(3, tgt_len, seed=i)
        expected, mems = network(segment, mems)
        hidden, state = forward(network, weights, segment, state, static_shapes=True)
        np.testing.assert_allclose(hidden, expected, atol=1e-5)
        assert_memory_is(network, state, mems)


@pytest.mark.parametrize("mem_len, tgt_len, slots", [(2100, 80, 2240), (3800, 128, 3968), (128, 32, 160), (5, 1, 6)])
def test_a_ring_of_whole_segments_is_as_short_as_it_can_be(mem_len, tgt_len, slots):
    assert mem_len + whole_segments(mem_len, tgt_len) == slots
    assert slots - tgt_len < mem_len + tgt_len <= slots


@pytest.mark.slow
def test_with_static_shapes_queries_in_blocks_and_rows_of_unequal_length_change_nothing(small_lm, monkeypatch):
    network = small_lm(mem_len=5, n_layer=1).network
    monkeypatch.setattr(ring, "QUERY_BLOCK", 4)
    weights, state = precompute(network, whole_segments(5, 10)), initial_state(network, 3, whole_segments(5, 10))
    text, lengths = tokens(3, 10), [10, 1, 7]
    forward = tf.function(cached_forward, jit_compile=True, autograph=False)
    hidden, state = forward(network, weights, text, state, tf.constant(lengths), static_shapes=True)
    for row, length in enumerate(lengths):
        expected, mems = network(text[row : row + 1, -length:])
        np.testing.assert_allclose(hidden[row, -length:], expected[0], atol=1e-5)
        (of_row, _), (projected, _) = memory_of(network, state), memory_of(network, state_of(network, mems))
        np.testing.assert_allclose(of_row[0][row], projected[0][0], atol=1e-5)


@pytest.mark.slow
def test_xla_computes_the_same(small_lm):
    network = small_lm(mem_len=4, n_layer=1).network
    weights, state, mems = precompute(network, 3), initial_state(network, 2, 3), network.initial_mems(2)
    forward = tf.function(cached_forward, jit_compile=True, autograph=False)
    for i in range(3):
        expected, mems = network(tokens(2, 3, seed=i), mems)
        hidden, state = forward(network, weights, tokens(2, 3, seed=i), state)
        np.testing.assert_allclose(hidden, expected, atol=1e-5)


def test_what_does_not_fit_is_an_error(small_lm):
    network = small_lm(mem_len=4).network
    with raises_parameter("tokens", 3, "at most max_segment=2 long"):
        cached_forward(network, precompute(network, 2), tokens(1, 3), initial_state(network, 1, 2))
