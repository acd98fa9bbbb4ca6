"""Attention against sums in loops, relative attention against equation (6) in loops and against the plain port."""

import itertools

import keras
import numpy as np
import pytest
import reference_model
import tensorflow as tf
from helpers import raises_parameter

from txl_tf.errors import ParameterError
from txl_tf.layers import attend, attention_probs, pairwise_scores, rel_shift, shifted_scores
from txl_tf.nn.positions import inverse_frequencies, positional_embedding, relative_positions
from txl_tf.transformer_xl.absolute_layer import multihead_attn
from txl_tf.transformer_xl.attention import RelMultiHeadAttn, create_mask, rel_multihead_attn

BATCH, QLEN, N_HEAD, D_HEAD, D_MODEL = 2, 4, 2, 3, 8
# (memory length, same_length): none, shorter than the segment, as long, longer
MEMORIES = [(0, False), (2, False), (2, True), (4, True), (7, False), (7, True)]


# ---------------------------------------- masks


def test_mask_a_every_query_sees_the_memory_and_the_segment_up_to_itself():
    expected = [
        [0, 0, 0, 0, 1, 1],
        [0, 0, 0, 0, 0, 1],
        [0, 0, 0, 0, 0, 0],
    ]
    np.testing.assert_array_equal(create_mask(3, 3), expected)


def test_mask_b_same_length_with_a_memory_as_long_as_the_segment_or_longer():
    expected = [
        [0, 0, 0, 0, 1, 1],
        [1, 0, 0, 0, 0, 1],
        [1, 1, 0, 0, 0, 0],
    ]
    np.testing.assert_array_equal(create_mask(3, 3, same_length=True), expected)
    expected = [
        [0, 0, 0, 0, 0, 1],
        [1, 0, 0, 0, 0, 0],
    ]
    np.testing.assert_array_equal(create_mask(2, 4, same_length=True), expected)


def test_mask_c_same_length_with_a_memory_shorter_than_the_segment():
    expected = [
        [0, 0, 1, 1, 1],
        [1, 0, 0, 1, 1],
        [1, 1, 0, 0, 1],
        [1, 1, 1, 0, 0],
    ]
    np.testing.assert_array_equal(create_mask(4, 1, same_length=True), expected)


def test_mask_without_memory():
    np.testing.assert_array_equal(create_mask(3, 0), [[0, 1, 1], [0, 0, 1], [0, 0, 0]])
    np.testing.assert_array_equal(create_mask(3, 0, same_length=True), [[0, 1, 1], [1, 0, 1], [1, 1, 0]])


@pytest.mark.parametrize("same_length", [False, True])
def test_mask_is_that_of_the_plain_port_and_takes_tensors(same_length):
    for qlen, mlen in itertools.product(range(1, 5), range(6)):
        expected = reference_model.create_mask(qlen, mlen, same_length)
        np.testing.assert_array_equal(create_mask(qlen, mlen, same_length), expected)
        np.testing.assert_array_equal(create_mask(tf.constant(qlen), tf.constant(mlen), same_length), expected)


# ---------------------------------------- shift


def test_rel_shift_of_a_small_matrix():
    # tens: the query, ones: the distance. Query i and key j are i + 1 - j apart: one position of memory, three queries.
    x = [[13, 12, 11, 10], [23, 22, 21, 20], [33, 32, 31, 30]]
    shifted = rel_shift(tf.constant(x, tf.float32)).numpy()
    np.testing.assert_array_equal(shifted[0, :2], [11, 10])
    np.testing.assert_array_equal(shifted[1, :3], [22, 21, 20])
    np.testing.assert_array_equal(shifted[2], [33, 32, 31, 30])


def test_rel_shift_moves_row_i_left_by_the_rows_below_it():
    """Equation (8) from (9): row i of L, counted from 1, moves L - i places; zeros or masked values follow it."""
    qlen, klen = 5, 7
    x = np.random.default_rng(0).normal(size=(2, 3, qlen, klen)).astype(np.float32)
    shifted = rel_shift(tf.constant(x)).numpy()
    for i in range(qlen):
        left = qlen - 1 - i
        np.testing.assert_array_equal(shifted[..., i, : klen - left], x[..., i, left:])


@pytest.mark.parametrize("qlen, klen", [(1, 1), (1, 4), (4, 4), (3, 8)])
def test_rel_shift_is_the_plain_port_s_transposed(qlen, klen):
    x = np.random.default_rng(0).normal(size=(qlen, klen, 2, 3)).astype(np.float32)
    expected = reference_model.rel_shift(tf.constant(x)).numpy().transpose(2, 3, 0, 1)
    np.testing.assert_array_equal(rel_shift(tf.constant(x.transpose(2, 3, 0, 1))), expected)
    np.testing.assert_array_equal(tf.function(rel_shift)(tf.constant(x.transpose(2, 3, 0, 1))), expected)


def test_rel_shift_of_the_original_s_layout_is_the_plain_port_s():
    x = tf.constant(np.random.default_rng(0).normal(size=(3, 8, 2, 5)).astype(np.float32))
    expected = reference_model.rel_shift(x)
    np.testing.assert_array_equal(rel_shift(x, time_major=True), expected)
    np.testing.assert_array_equal(tf.function(rel_shift)(x, time_major=True), expected)
    table = tf.pad(x, [[0, 0], [1, 0], [0, 0], [0, 0]])
    np.testing.assert_array_equal(rel_shift(table, first=3, time_major=True), expected)
    with raises_parameter("x", allowed="float [qlen, klen, batch, n_head]"):
        rel_shift(x[..., 0], time_major=True)


# ---------------------------------------- the core: probabilities, and values weighted by them


def probs_in_loops(q, k, position_scores, visible, scale):
    """A score for every query and key, one by one, and the softmax over the keys that a query sees; float64."""
    *lead, qlen, _ = q.shape
    klen = k.shape[-2]
    probs = np.zeros([*lead, qlen, klen])
    for *place, i in np.ndindex(*lead, qlen):
        place = tuple(place)
        seen = [j for j in range(klen) if visible[(*place, i, j)]]
        scores = np.array([q[(*place, i)] @ k[(*place, j)] + position_scores[(*place, i, j)] for j in seen]) * scale
        weights = np.exp(scores - scores.max())
        for j, weight in zip(seen, weights, strict=True):
            probs[(*place, i, j)] = weight / weights.sum()
    return probs


def core_arguments(lead, qlen, klen=5):
    """Queries, keys, values, position scores, and which keys each query sees: the first and some others."""
    rng = np.random.default_rng(0)
    shapes = [(qlen, D_HEAD), (klen, D_HEAD), (klen, D_HEAD), (qlen, klen)]
    arrays = [rng.normal(size=(*lead, *shape)).astype(np.float32) for shape in shapes]
    visible = rng.random([qlen, klen]) < 0.6
    visible[:, 0] = True
    return *arrays, visible


LEADS = [(N_HEAD,), (N_HEAD, BATCH)]


@pytest.mark.parametrize("lead", LEADS, ids=["[H, T, D]", "[H, B, T, D]"])
@pytest.mark.parametrize("qlen", [QLEN, 1])  # a single query goes head by head
@pytest.mark.parametrize("with_positions", [False, True])
@pytest.mark.parametrize("with_visible", [False, True])
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_attend_is_the_softmax_over_visible_keys_times_the_values(lead, qlen, with_positions, with_visible, scale):
    q, k, v, position_scores, visible = core_arguments(lead, qlen)
    given = {"scale": scale}
    if with_positions:
        given["position_scores"] = position_scores
    if with_visible:
        given["visible"] = visible
    probs = attention_probs(q, k, **given).numpy()
    out = attend(q, k, v, **given)

    everywhere = np.broadcast_to(visible if with_visible else True, position_scores.shape)
    expected = probs_in_loops(q, k, position_scores if with_positions else 0 * position_scores, everywhere, scale)
    np.testing.assert_allclose(probs, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(probs[~everywhere], 0)
    np.testing.assert_allclose(probs.sum(-1), 1, rtol=1e-6)
    expected_out = np.zeros(q.shape)
    for place in np.ndindex(*lead, qlen):
        for j in range(k.shape[-2]):
            expected_out[place] += expected[(*place, j)] * v[(*place[:-1], j)]
    np.testing.assert_allclose(out, expected_out, rtol=1e-5, atol=1e-6)


def test_scores_of_all_rows_are_added_to_every_leading_axis():
    q, k, v, position_scores, visible = core_arguments((N_HEAD, N_HEAD, BATCH), QLEN)
    for_all = position_scores[:, 0, 0]
    whole = attend(q, k, v, for_all, visible)
    for i in range(N_HEAD):
        np.testing.assert_allclose(
            whole[:, i], attend(q[:, i], k[:, i], v[:, i], for_all, visible), rtol=1e-5, atol=1e-6
        )


def test_every_row_and_head_may_see_other_keys():
    q, k, v, position_scores, _ = core_arguments((N_HEAD, BATCH), QLEN)
    rng = np.random.default_rng(1)
    for shape in ([BATCH, QLEN, 5], [N_HEAD, BATCH, QLEN, 5], [N_HEAD, 1, 1, 5]):
        visible = rng.random(shape) < 0.5
        visible[..., 2] = True
        everywhere = np.broadcast_to(visible, position_scores.shape)
        expected = probs_in_loops(q, k, position_scores, everywhere, 0.5)
        probs = attention_probs(q, k, position_scores, visible, 0.5)
        np.testing.assert_allclose(probs, expected, rtol=1e-5, atol=1e-6)
        out = attend(q, k, v, position_scores, visible, 0.5)
        np.testing.assert_allclose(out, np.einsum("hbij,hbjd->hbid", expected, v), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype, rtol", [("float32", 1e-5), ("float16", 2e-3), ("bfloat16", 2e-2)])
def test_a_single_query_of_every_type_whose_scores_are_a_list_or_whose_heads_see_other_keys(dtype, rtol):
    *arrays, visible = core_arguments((N_HEAD,), 1)
    q, k, v, position_scores = (tf.cast(10 * array, dtype) for array in arrays)  # scores of hundreds
    exact = [tf.cast(x, tf.float64).numpy() for x in (q, k, v, position_scores)]
    by_head = np.stack([visible, ~visible])
    for seen in (None, visible, by_head):
        everywhere = np.broadcast_to(True if seen is None else seen, position_scores.shape)
        expected = probs_in_loops(*exact[:2], exact[3], everywhere, 0.01) @ exact[2]
        for scores in (position_scores, tf.unstack(position_scores)):
            out = tf.cast(attend(q, k, v, scores, seen, 0.01), tf.float64)
            np.testing.assert_allclose(out, expected, rtol=0, atol=rtol * np.abs(expected).max())


@pytest.mark.parametrize("qlen", [QLEN, 1])
def test_probabilities_sum_to_1_where_scores_are_large_and_in_half_precision(qlen):
    q, k, v, position_scores, visible = core_arguments((N_HEAD, BATCH), qlen)
    probs = attention_probs(100 * q, 100 * k, position_scores, visible).numpy()
    assert probs.max() > 0.999
    np.testing.assert_allclose(probs.sum(-1), 1, rtol=1e-6)
    halves = [tf.cast(x, tf.bfloat16) for x in (q, k, position_scores)]
    probs = attention_probs(*halves, visible)
    assert probs.dtype == attend(*halves[:2], tf.cast(v, tf.bfloat16), halves[2], visible).dtype == tf.bfloat16
    np.testing.assert_allclose(np.sum(tf.cast(probs, tf.float32), -1), 1, rtol=2**-7)
    expected = attention_probs(q, k, position_scores, visible)
    np.testing.assert_allclose(tf.cast(probs, tf.float32), expected, rtol=0, atol=0.03)


# ---------------------------------------- scores of positions


def shifted_in_loops(x, first):
    """`out[..., i, j] = x[..., i, first + j - i]`, NaN where `x` has no such column."""
    qlen, width = x.shape[-2:]
    out = np.full([*x.shape[:-1], width - 1], np.nan)
    for i, j in np.ndindex(qlen, width - 1):
        if 0 <= first + j - i < width:
            out[..., i, j] = x[..., i, first + j - i]
    return out


def assert_equal_where_known(found, expected, **tolerance):
    found = np.asarray(found)
    assert found.shape == expected.shape
    known = ~np.isnan(expected)
    np.testing.assert_allclose(found[known], expected[known], **tolerance)
    return known


@pytest.mark.parametrize("lead", [(), (2,), (2, 3)], ids=str)
@pytest.mark.parametrize("qlen, klen", [(1, 1), (1, 4), (4, 4), (3, 7)])
def test_rel_shift_with_distances_in_one_direction(lead, qlen, klen):
    """As in Transformer-XL: zeros, then the distances K - 1 ... 0; every key up to the query has its column."""
    x = np.random.default_rng(0).normal(size=(*lead, qlen, klen + 1)).astype(np.float32)
    known = assert_equal_where_known(rel_shift(tf.constant(x), first=qlen), shifted_in_loops(x, qlen), rtol=0)
    assert np.all(known[..., create_mask(qlen, klen - qlen) == 0])
    of_last_query = x[..., -1, 1:]
    np.testing.assert_array_equal(rel_shift(tf.constant(x), first=qlen)[..., -1, :], of_last_query)
    x[..., 0] = 0
    np.testing.assert_array_equal(rel_shift(tf.constant(x), first=qlen), rel_shift(tf.constant(x[..., 1:])))


@pytest.mark.parametrize("qlen", [1, 2, 5])
def test_rel_shift_with_distances_in_both_directions(qlen):
    """As in TENER: 2 L rows for the distances -L ... L - 1, and every pair of L queries and L keys has its column."""
    distances = np.arange(-qlen, qlen)
    x = np.random.default_rng(0).normal(size=(2, 3, qlen, 2 * qlen)).astype(np.float32)
    shifted = rel_shift(tf.constant(x), first=qlen)
    known = assert_equal_where_known(shifted, shifted_in_loops(x, qlen), rtol=0)
    assert np.all(known[..., :qlen])
    for i, j in np.ndindex(qlen, qlen):
        np.testing.assert_array_equal(shifted[..., i, j], x[..., i, list(distances).index(j - i)])


@pytest.mark.parametrize("compiled", [False, True])
def test_rel_shift_from_any_column_given_as_a_number_or_a_tensor(compiled):
    x = np.random.default_rng(0).normal(size=(2, 3, 6)).astype(np.float32)
    shift = tf.function(rel_shift, jit_compile=True) if compiled else rel_shift
    for first in range(4):
        expected = shifted_in_loops(x, first)
        assert np.sum(~np.isnan(expected)) >= 2 * (1 + 2 + 3)
        for number in (first, tf.constant(first)):
            assert_equal_where_known(shift(tf.constant(x), number), expected, rtol=0)


@pytest.mark.parametrize("lead", LEADS, ids=["[H, T, D]", "[H, B, T, D]"])
@pytest.mark.parametrize(
    "qlen, rows, first", [(QLEN, 8, QLEN), (QLEN, 8, QLEN - 1), (QLEN, 5, 0), (1, 6, 1), (1, 6, 0)]
)
def test_shifted_scores_are_those_of_the_row_of_query_and_key(lead, qlen, rows, first):
    rng = np.random.default_rng(0)
    q = rng.normal(size=(*lead, qlen, D_HEAD)).astype(np.float32)
    r = rng.normal(size=(N_HEAD, rows, D_HEAD)).astype(np.float32)
    expected = np.full([*lead, qlen, rows - 1], np.nan)
    for *place, i, j in np.ndindex(*expected.shape):
        if 0 <= first + j - i < rows:
            expected[(*place, i, j)] = q[(*place, i)] @ r[place[0], first + j - i]
    known = assert_equal_where_known(shifted_scores(q, r, first), expected, rtol=1e-5, atol=1e-6)
    assert known.any()


def test_pairwise_scores_have_a_vector_for_every_pair():
    rng = np.random.default_rng(0)
    q = rng.normal(size=(N_HEAD, BATCH, QLEN, D_HEAD)).astype(np.float32)
    r = rng.normal(size=(N_HEAD, BATCH, QLEN, 5, D_HEAD)).astype(np.float32)
    expected = np.zeros([N_HEAD, BATCH, QLEN, 5])
    for h, b, i, j in np.ndindex(*expected.shape):
        expected[h, b, i, j] = q[h, b, i] @ r[h, b, i, j]
    np.testing.assert_allclose(pairwise_scores(q, r), expected, rtol=1e-5, atol=1e-6)


def test_pairwise_scores_of_vectors_by_distance_are_shifted_scores():
    rng = np.random.default_rng(0)
    q = rng.normal(size=(N_HEAD, BATCH, QLEN, D_HEAD)).astype(np.float32)
    table = rng.normal(size=(N_HEAD, 2 * QLEN, D_HEAD)).astype(np.float32)
    pairs = QLEN + np.arange(QLEN) - np.arange(QLEN)[:, None]  # the row of query i and key j
    r = np.repeat(table[:, None, pairs], BATCH, 1)
    np.testing.assert_allclose(
        pairwise_scores(q, r), shifted_scores(q, table, first=QLEN)[..., :QLEN], rtol=1e-5, atol=1e-6
    )


INDEXED = {  # shapes of queries, vectors and index
    "few vectors": ((N_HEAD, BATCH, QLEN, D_HEAD), (3, N_HEAD, D_HEAD), (BATCH, QLEN, 5)),
    "more vectors than pairs": ((N_HEAD, BATCH, QLEN, D_HEAD), (70, N_HEAD, D_HEAD), (BATCH, QLEN, QLEN)),
    "one": ((1, 1, 1, D_HEAD), (1, 1, D_HEAD), (1, 1, 1)),
}


@pytest.mark.parametrize("shapes", INDEXED.values(), ids=INDEXED)
@pytest.mark.parametrize("compiled", [False, True])
def test_pairwise_scores_of_indexed_vectors_are_those_of_a_vector_for_every_pair(shapes, compiled):
    """Values, and gradients of queries and vectors."""
    rng = np.random.default_rng(0)
    of_q, of_r, of_index = shapes
    q, r, upstream = (
        tf.constant(rng.normal(size=shape), tf.float32) for shape in (of_q, of_r, (*of_q[:3], of_index[2]))
    )
    index = tf.constant(rng.integers(0, of_r[0], of_index), tf.int32)

    def indexed(q, r):
        return pairwise_scores(q, r, index)

    def unindexed(q, r):
        return pairwise_scores(q, tf.transpose(tf.gather(r, index), [3, 0, 1, 2, 4]))

    def scores_and_gradients(function):
        with tf.GradientTape() as tape:
            tape.watch([q, r])
            scores = function(q, r)
        return scores, *(tf.convert_to_tensor(g) for g in tape.gradient(scores, [q, r], upstream))

    found = (tf.function(scores_and_gradients) if compiled else scores_and_gradients)(indexed)
    for ours, expected in zip(found, scores_and_gradients(unindexed), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-5)


# ---------------------------------------- equation (6)


def random_arrays(mlen, seed=0, qlen=QLEN):
    """Arguments of `rel_multihead_attn`, as NumPy arrays of order 1."""
    rng = np.random.default_rng(seed)
    width = N_HEAD * D_HEAD
    shapes = {
        "w": (BATCH, qlen, D_MODEL),
        "r": (1, mlen + qlen, D_MODEL),
        "r_w_bias": (N_HEAD, D_HEAD),
        "r_r_bias": (N_HEAD, D_HEAD),
        "mems": (BATCH, mlen, D_MODEL),
        "qkv_kernel": (D_MODEL, 3 * width),
        "r_kernel": (D_MODEL, width),
        "o_kernel": (width, D_MODEL),
    }
    return {name: rng.normal(0, 0.6, shape).astype(np.float32) for name, shape in shapes.items()}


def equation_6(q, k, r_k, u, v, d_head):
    """Score of one query and one key: terms (a) to (d), scaled as in equation (4)."""
    a, b, c, d = q @ k, q @ r_k, u @ k, v @ r_k
    return (a + b + c + d) / np.sqrt(d_head)


def attention_in_loops(q, k, v, r_k, u, v_bias, same_length):
    """Heads, rows, queries and keys one by one in float64; q `[H, B, T, D]`, k, v `[H, B, K, D]`."""
    n_head, batch, qlen, d_head = q.shape
    klen = k.shape[2]
    mlen = klen - qlen
    out = np.zeros(q.shape)
    for n, b, i in itertools.product(range(n_head), range(batch), range(qlen)):
        first = i if same_length else 0
        seen = range(first, mlen + i + 1)
        # R of distance x is row klen - 1 - x, and key j lies mlen + i - j before query i
        scores = [
            equation_6(q[n, b, i], k[n, b, j], r_k[n, klen - 1 - (mlen + i - j)], u[n], v_bias[n], d_head) for j in seen
        ]
        weights = np.exp(np.array(scores) - max(scores))
        weights /= weights.sum()
        out[n, b, i] = sum(weight * v[n, b, j] for weight, j in zip(weights, seen, strict=True))
    return out


def test_rel_shift_of_the_original_s_layout_without_its_name_is_an_error():
    x = tf.random.stateless_normal([4, 7, 5, 2], [1, 2])  # qlen, klen, batch, n_head
    with pytest.raises(ParameterError) as caught:
        rel_shift(x)
    assert caught.value.name == "x" and "time_major=True" in str(caught.value)
    assert rel_shift(x, time_major=True).shape == x.shape
    with pytest.raises(ParameterError) as caught:
        rel_shift(tf.transpose(x, [1, 0, 2, 3]), time_major=True)  # fewer keys than queries
    assert caught.value.value.shape == [7, 4, 5, 2] and "time_major" not in str(caught.value)
    assert rel_shift(tf.transpose(x, [2, 3, 0, 1])).shape == [5, 2, 4, 7]
    graph = tf.function(rel_shift, input_signature=[tf.TensorSpec([None, None])])  # nothing is known there
    np.testing.assert_array_equal(graph(x[:, :, 0, 0]), rel_shift(x[:, :, 0, 0]))


@pytest.mark.parametrize("qlen, mlen, name", [(3, -2, "mlen"), (-1, 2, "qlen"), (2.0, 1, "qlen")])
def test_lengths_of_a_mask_are_integers_from_0_on(qlen, mlen, name):
    with pytest.raises(ParameterError) as caught:
        create_mask(qlen, mlen)
    assert caught.value.name == name
    np.testing.assert_array_equal(create_mask(tf.constant(3), tf.constant(2)), create_mask(3, 2))


@pytest.mark.parametrize("mlen, same_length", MEMORIES)
def test_attention_with_shifted_scores_is_equation_6_in_loops(mlen, same_length):
    rng = np.random.default_rng(0)
    klen = mlen + QLEN
    shapes = [(N_HEAD, BATCH, QLEN, D_HEAD), *[(N_HEAD, BATCH, klen, D_HEAD)] * 2, (N_HEAD, klen, D_HEAD)]
    arrays = [rng.normal(size=shape).astype(np.float32) for shape in [*shapes, *[(N_HEAD, D_HEAD)] * 2]]
    q, k, v, r_k, u, v_bias = arrays
    r_k = np.pad(r_k, [(0, 0), (1, 0), (0, 0)])  # row `klen - distance`: the first query is `mlen` behind the first key
    position_scores = shifted_scores(q + v_bias[:, None, None], r_k, first=QLEN)
    visible = create_mask(QLEN, mlen, same_length) == 0
    got = attend(q + u[:, None, None], k, v, position_scores, visible, scale=D_HEAD**-0.5)
    expected = attention_in_loops(*[array.astype(np.float64) for array in arrays], same_length)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def heads_of(a):
    """Queries, keys, values `[H, B, any, D]` and positions `[H, K, D]` of the arguments of `rel_multihead_attn`."""

    def heads(x, kernel):
        return (x @ kernel).reshape(*x.shape[:-1], N_HEAD, D_HEAD)

    cat = np.concatenate([a["mems"], a["w"]], 1)
    w_q, w_k, w_v = np.split(a["qkv_kernel"], 3, 1)
    q, k, v = (heads(x, kernel).transpose(2, 0, 1, 3) for x, kernel in ((a["w"], w_q), (cat, w_k), (cat, w_v)))
    return q, k, v, heads(a["r"][0], a["r_kernel"]).transpose(1, 0, 2)


@pytest.mark.parametrize("mlen, same_length", MEMORIES)
def test_rel_multihead_attn_is_equation_6_in_loops_between_projections(mlen, same_length):
    arrays = random_arrays(mlen)
    got = rel_multihead_attn(**arrays, attn_mask=create_mask(QLEN, mlen, same_length))

    a = {name: array.astype(np.float64) for name, array in arrays.items()}
    q, k, v, r_k = heads_of(a)
    attn_vec = attention_in_loops(q, k, v, r_k, a["r_w_bias"], a["r_r_bias"], same_length)
    expected = attn_vec.transpose(1, 2, 0, 3).reshape(BATCH, QLEN, -1) @ a["o_kernel"]
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", [lambda mask: mask == 0, lambda mask: mask.numpy() == 0, lambda mask: None])
def test_the_functions_take_a_mask_in_every_form_that_the_layers_take(form):
    arrays, mask = random_arrays(mlen=2), create_mask(QLEN, 2)
    expected = rel_multihead_attn(**arrays, attn_mask=mask)
    np.testing.assert_array_equal(rel_multihead_attn(**arrays, attn_mask=form(mask)), expected)
    without = {name: arrays[name] for name in ("w", "mems", "qkv_kernel", "o_kernel")}
    expected = multihead_attn(**without, attn_mask=mask, n_head=N_HEAD)
    np.testing.assert_array_equal(multihead_attn(**without, attn_mask=form(mask), n_head=N_HEAD), expected)
    layer, _ = layer_and_weights(arrays)
    given = [arrays[name] for name in ("w", "r", "r_w_bias", "r_r_bias")]
    expected = layer.attention_probs(*given, mask, arrays["mems"])
    np.testing.assert_array_equal(layer.attention_probs(*given, form(mask), arrays["mems"]), expected)


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (2, 1, 5)])
def test_numbers_say_which_keys_are_visible_as_bool_does(shape):
    q = tf.random.stateless_normal(shape, [1, 2])
    visible = np.arange(shape[-2]) < 2
    visible = np.broadcast_to(visible, [shape[-2]] * 2)
    np.testing.assert_array_equal(attend(q, q, q, None, visible.astype(np.int32)), attend(q, q, q, None, visible))


def test_masked_keys_have_no_influence_whatever_they_hold():
    arrays = random_arrays(mlen=2)
    mask = create_mask(QLEN, 2)
    expected = rel_multihead_attn(**arrays, attn_mask=mask).numpy()
    arrays["w"][:, 2] *= 1e4
    changed = rel_multihead_attn(**arrays, attn_mask=mask).numpy()
    np.testing.assert_allclose(changed[:, :2], expected[:, :2], rtol=1e-6)
    assert np.abs(changed[:, 2:] - expected[:, 2:]).max() > 1


# ---------------------------------------- layer and plain port


def layer_and_weights(arrays, **options):
    """The layer with the arrays as weights, and the same under the names of the plain port."""
    layer = RelMultiHeadAttn(D_MODEL, N_HEAD, D_HEAD, **options)
    layer.build()
    layer.qkv_kernel.assign(arrays["qkv_kernel"])
    layer.r_kernel.assign(arrays["r_kernel"])
    layer.o_kernel.assign(arrays["o_kernel"])
    rng = np.random.default_rng(9)
    layer.layer_norm.gamma.assign(rng.normal(1, 0.3, D_MODEL))
    layer.layer_norm.beta.assign(rng.normal(0, 0.3, D_MODEL))
    weights = {
        "attn/qkv/kernel": layer.qkv_kernel.value,
        "attn/r/kernel": layer.r_kernel.value,
        "attn/o/kernel": layer.o_kernel.value,
        "attn/LayerNorm/gamma": layer.layer_norm.gamma.value,
        "attn/LayerNorm/beta": layer.layer_norm.beta.value,
    }
    return layer, weights


@pytest.mark.parametrize("mlen, same_length", MEMORIES)
def test_layer_and_its_gradients_are_those_of_the_plain_port(mlen, same_length):
    arrays = random_arrays(mlen)
    layer, weights = layer_and_weights(arrays)
    inputs = [tf.constant(arrays[name]) for name in ("w", "r", "r_w_bias", "r_r_bias", "mems")]
    factors = np.random.default_rng(5).normal(size=(BATCH, QLEN, D_MODEL)).astype(np.float32)
    variables = list(weights.values())

    with tf.GradientTape() as tape:
        tape.watch(inputs)
        w, r, u, v, mems = inputs
        output = layer(w, r, u, v, create_mask(QLEN, mlen, same_length), mems)
        loss = tf.reduce_sum(output * factors)
    gradients = tape.gradient(loss, inputs + variables)

    with tf.GradientTape() as tape:
        tape.watch(inputs)
        w, r, u, v, mems = inputs
        expected = reference_model.rel_multihead_attn(
            tf.transpose(w, [1, 0, 2]),
            tf.transpose(r, [1, 0, 2]),
            u,
            v,
            reference_model.create_mask(QLEN, mlen, same_length),
            tf.transpose(mems, [1, 0, 2]),
            n_head=N_HEAD,
            d_head=D_HEAD,
            dropout_rate=0.0,
            dropatt=0.0,
            is_training=False,
            weights=weights,
            scope="attn",
        )
        expected = tf.transpose(expected, [1, 0, 2])
        loss = tf.reduce_sum(expected * factors)
    expected_gradients = tape.gradient(loss, inputs + variables)

    np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-5)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        largest = np.abs(expected_gradient).max(initial=0)
        np.testing.assert_allclose(gradient, expected_gradient, rtol=0, atol=1e-5 * largest)


def layer_probs(arrays, mlen, same_length, **options):
    """`RelMultiHeadAttn.attention_probs` of a layer with the arrays as weights."""
    layer, _ = layer_and_weights(arrays, **options)
    names = ("w", "r", "r_w_bias", "r_r_bias")
    return layer.attention_probs(
        *(arrays[name] for name in names), create_mask(QLEN, mlen, same_length), arrays["mems"]
    )


@pytest.mark.parametrize("mlen, same_length", MEMORIES)
def test_the_layer_s_probabilities_are_those_of_equation_6(mlen, same_length):
    arrays = random_arrays(mlen)
    probs = layer_probs(arrays, mlen, same_length, dropout=0.5, dropatt=0.5)  # which drop nothing here

    a = {name: array.astype(np.float64) for name, array in arrays.items()}
    q, k, _, r_k = heads_of(a)
    klen = mlen + QLEN
    position_scores = np.zeros([N_HEAD, BATCH, QLEN, klen])
    for n, b, i, j in np.ndindex(*position_scores.shape):
        if j <= mlen + i:
            position_scores[n, b, i, j] = (q[n, b, i] + a["r_r_bias"][n]) @ r_k[n, klen - 1 - (mlen + i - j)]
    visible = np.broadcast_to(create_mask(QLEN, mlen, same_length) == 0, position_scores.shape)
    expected = probs_in_loops(q + a["r_w_bias"][:, None, None], k, position_scores, visible, D_HEAD**-0.5)
    np.testing.assert_allclose(probs, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(probs.numpy()[~visible], 0)
    np.testing.assert_allclose(np.sum(probs, -1), 1, rtol=1e-6)


def test_the_layer_s_probabilities_in_half_precision_sum_to_1():
    arrays = random_arrays(mlen=2)
    expected = layer_probs(arrays, 2, True)
    probs = layer_probs(arrays, 2, True, dtype="mixed_bfloat16")
    assert probs.dtype == tf.bfloat16
    probs = tf.cast(probs, tf.float32)
    np.testing.assert_allclose(np.sum(probs, -1), 1, rtol=2**-7)
    np.testing.assert_allclose(probs, expected, rtol=0, atol=0.03)
    assert np.abs(probs - expected).max() > 0  # it was not float32 after all


def constant_values_layer(dropout, dropatt):
    """Every value vector is a one, so that without dropout of probabilities the attention's output is a one."""
    layer = RelMultiHeadAttn(6, 2, 3, dropout, dropatt)
    layer.build()
    layer.qkv_kernel.assign(np.zeros([6, 18]))
    layer.r_kernel.assign(np.zeros([6, 6]))
    layer.o_kernel.assign(np.eye(6))
    return layer


def attention_output(layer, monkeypatch, dropout_key):
    """What the layer adds to `w`, the layer norm left out, for values that are all ones; `[B, T, 2, 3]`."""
    monkeypatch.setattr(layer, "layer_norm", lambda x: x)
    w = np.zeros([40, 30, 6], np.float32)
    # the values are one sixth of the sum of a constant memory's entries
    layer.qkv_kernel.assign(np.concatenate([np.zeros([6, 12]), np.full([6, 6], 1 / 6)], 1))
    zeros = np.zeros([2, 3], np.float32)
    mems = np.ones([40, 10, 6], np.float32)
    output = layer(w, np.zeros([1, 40, 6], np.float32), zeros, zeros, tail_mask(30, 10), mems, dropout_key=dropout_key)
    return output.numpy().reshape(40, 30, 2, 3)


def tail_mask(qlen, mlen):
    """Only the memory is seen."""
    return np.concatenate([np.zeros([qlen, mlen]), np.ones([qlen, qlen])], 1).astype(np.float32)


def test_dropatt_drops_probabilities_at_its_own_rate(monkeypatch):
    key = tf.constant([1, 2, 0])
    plain = attention_output(constant_values_layer(0.0, 0.0), monkeypatch, key)
    np.testing.assert_allclose(plain, 1, rtol=1e-6)

    # Ten equal probabilities of which each is dropped: the number kept is binomial, and the same for a head's outputs.
    dropped = attention_output(constant_values_layer(0.0, 0.3), monkeypatch, key)
    kept = dropped * 0.7 * 10
    np.testing.assert_allclose(kept, np.round(kept), atol=1e-3)
    np.testing.assert_allclose(dropped, dropped[..., :1] + 0 * dropped, rtol=1e-6)
    assert abs(kept[..., 0].mean() - 7) < 0.12  # standard error 0.03
    assert abs(kept[..., 0].std() - np.sqrt(10 * 0.3 * 0.7)) < 0.1


def test_dropout_drops_outputs_at_its_own_rate(monkeypatch):
    dropped = attention_output(constant_values_layer(0.3, 0.0), monkeypatch, tf.constant([1, 2, 0]))
    np.testing.assert_allclose(np.unique(np.round(dropped, 4)), [0, 1.4286], rtol=1e-4)
    assert abs((dropped == 0).mean() - 0.3) < 0.025  # standard error 0.005


def test_without_a_key_nothing_is_dropped():
    arrays = random_arrays(mlen=2)
    layer, _ = layer_and_weights(arrays)
    dropping, _ = layer_and_weights(arrays, dropout=0.5, dropatt=0.5)
    inputs = [arrays[name] for name in ("w", "r", "r_w_bias", "r_r_bias")]
    inputs += [create_mask(QLEN, 2), arrays["mems"]]
    np.testing.assert_array_equal(dropping(*inputs), layer(*inputs))
    assert np.abs(dropping(*inputs, dropout_key=tf.constant([0, 1, 0])) - layer(*inputs)).max() > 0.1


# ---------------------------------------- memory, precision


def test_memory_and_segment_are_one_sequence():
    """Queries of a later segment with the earlier one as memory get what they get in one long segment."""
    arrays = random_arrays(mlen=0, qlen=9)
    r = positional_embedding(relative_positions(9), inverse_frequencies(D_MODEL))
    whole = rel_multihead_attn(**{**arrays, "r": r}, attn_mask=create_mask(9, 0))
    for mlen in (3, 8):
        parts = {**arrays, "r": r, "mems": arrays["w"][:, :mlen], "w": arrays["w"][:, mlen:]}
        last = rel_multihead_attn(**parts, attn_mask=create_mask(9 - mlen, mlen))
        np.testing.assert_allclose(last, whole[:, mlen:], rtol=1e-5, atol=1e-6)


def test_a_key_influences_a_query_by_its_distance_alone():
    """Shifting memory and segment by one position, with same_length, shifts the output."""
    arrays = random_arrays(mlen=3)
    text = np.random.default_rng(3).normal(size=(BATCH, 8, D_MODEL)).astype(np.float32)

    def attend(start):
        mems, w = text[:, start : start + 3], text[:, start + 3 : start + 7]
        return rel_multihead_attn(**{**arrays, "mems": mems, "w": w}, attn_mask=create_mask(4, 3, True)).numpy()

    np.testing.assert_allclose(attend(0)[:, 1:], attend(1)[:, :-1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype, tolerance", [("bfloat16", 0.05), ("float16", 0.006)])
def test_half_precision_is_close_with_masked_keys(dtype, tolerance):
    arrays = random_arrays(mlen=2)
    mask = create_mask(QLEN, 2)
    expected = rel_multihead_attn(**arrays, attn_mask=mask)
    halves = {name: tf.cast(array, dtype) for name, array in arrays.items()}
    got = rel_multihead_attn(**halves, attn_mask=mask)
    assert got.dtype == dtype
    np.testing.assert_allclose(tf.cast(got, tf.float32), expected, rtol=0, atol=tolerance)


def attend_to(arrays):
    mask = create_mask(tf.shape(arrays["w"])[1], tf.shape(arrays["mems"])[1])
    return rel_multihead_attn(**arrays, attn_mask=mask)


@pytest.mark.slow
def test_dynamic_shapes_give_the_same():
    arrays = {name: tf.constant(array) for name, array in random_arrays(mlen=3).items()}
    anything = {
        name: tf.TensorSpec([None] * 3 if name in ("w", "mems", "r") else array.shape, tf.float32)
        for name, array in arrays.items()
    }
    dynamic = tf.function(attend_to, input_signature=[anything])
    np.testing.assert_allclose(dynamic(arrays), attend_to(arrays), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_xla_gives_the_same():
    arrays = {name: tf.constant(array) for name, array in random_arrays(mlen=3).items()}
    np.testing.assert_allclose(
        tf.function(attend_to, jit_compile=True)(arrays), attend_to(arrays), rtol=1e-5, atol=1e-6
    )


def test_kernels_are_initialised_differently_and_config_round_trips():
    layer = RelMultiHeadAttn(6, 1, 6, 0.1, 0.2, keras.initializers.RandomNormal(stddev=0.5))
    layer.build()
    # equal shapes: any two kernels that drew the same numbers would be equal
    assert np.abs(layer.r_kernel.numpy() - layer.o_kernel.numpy()).max() > 0.1
    copy = RelMultiHeadAttn.from_config(layer.get_config())
    assert copy.get_config() == layer.get_config()
    assert (copy.dropout, copy.dropatt, copy.kernel_initializer.stddev) == (0.1, 0.2, 0.5)
