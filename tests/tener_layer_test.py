"""TENER's attention against the equations of the paper and of its program, term by term in loops."""

import numpy as np
import pytest
import tensorflow as tf
from helpers import assert_round_trips, raises_parameter, randomise

from txl_tf.nn.positions import tensor2tensor_frequencies
from txl_tf.taggers.tener_layers import (
    TenerAttn,
    TenerLayer,
    tener_position_scores,
    two_way_positions,
    two_way_scores,
)

HEADS, BATCH, LENGTH, WIDTH = 2, 3, 5, 4
MASK = np.arange(LENGTH)[None] < np.array([[5], [3], [1]])


def arrays(*shapes, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.normal(0, 1, shape).astype(np.float32) for shape in shapes]


def sinusoid(distance, width):
    """[sin, ..., cos, ...] of one distance, in float64."""
    half = width // 2
    angles = distance * 10000.0 ** (-np.arange(half) / (half - 1))
    return np.concatenate([np.sin(angles), np.cos(angles)])


@pytest.fixture
def q_k():
    return arrays((HEADS, BATCH, LENGTH, WIDTH), (HEADS, BATCH, LENGTH, WIDTH))


# ---------------------------------------- positions


@pytest.mark.parametrize("width", [4, 6, 10])
def test_frequencies_reach_from_1_to_1_in_10000(width):
    found = tensor2tensor_frequencies(width).numpy()
    half = width // 2
    np.testing.assert_allclose(found, [10000 ** (-k / (half - 1)) for k in range(half)], rtol=1e-6)
    assert found[0] == 1 and found[-1] == pytest.approx(1e-4)


@pytest.mark.parametrize("width", [2, 5, 0])
def test_sinusoids_need_an_even_width_of_4_or_more(width):
    with raises_parameter("d_model", width):
        tensor2tensor_frequencies(width)


def test_the_table_holds_the_distances_of_both_directions():
    found = two_way_positions(LENGTH, WIDTH)
    expected = [sinusoid(distance, WIDTH) for distance in range(-LENGTH, LENGTH)]
    np.testing.assert_allclose(found, expected, atol=1e-6)


# ---------------------------------------- scores


def test_two_way_scores_are_those_of_key_minus_query(q_k):
    q, _ = q_k
    (r,) = arrays((2 * LENGTH, WIDTH), seed=1)
    expected = np.zeros([HEADS, BATCH, LENGTH, LENGTH])
    for h, b, i, j in np.ndindex(*expected.shape):
        expected[h, b, i, j] = q[h, b, i] @ r[j - i + LENGTH]
    np.testing.assert_allclose(two_way_scores(tf.constant(q), tf.constant(r)), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("key_position_term", [True, False])
def test_position_scores_in_loops(q_k, key_position_term):
    q, k = q_k
    (v_bias,) = arrays((HEADS, WIDTH), seed=1)
    expected = np.zeros([HEADS, BATCH, LENGTH, LENGTH])
    for h, b, i, j in np.ndindex(*expected.shape):
        expected[h, b, i, j] = (q[h, b, i] + v_bias[h]) @ sinusoid(j - i, WIDTH)
        if key_position_term:
            expected[h, b, i, j] += k[h, b, j] @ sinusoid(i - j, WIDTH)
    found = tener_position_scores(*map(tf.constant, (q, k, v_bias)), key_position_term)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_scores_of_one_element_and_in_a_graph_of_unknown_length(q_k):
    q, k = q_k
    v_bias = np.zeros([HEADS, WIDTH], np.float32)
    signature = [tf.TensorSpec([HEADS, None, None, WIDTH])] * 2
    in_graph = tf.function(lambda q, k: tener_position_scores(q, k, v_bias), input_signature=signature)
    for length in (1, LENGTH):
        part = tf.constant(q[:, :, :length]), tf.constant(k[:, :, :length])
        np.testing.assert_allclose(in_graph(*part), tener_position_scores(*part, v_bias), rtol=1e-5, atol=1e-6)


# ---------------------------------------- the layers


def make_attn(**options):
    attn = TenerAttn(HEADS * WIDTH, HEADS, **options)
    attn.build()
    randomise(attn, scale=0.5)
    return attn


def weights_of(attn):
    """`(W_q, W_k, W_v, u, v)`, by head."""
    kernel = attn.qkv_kernel.numpy().reshape([HEADS * WIDTH, 3, HEADS, WIDTH])
    return *kernel.transpose(1, 2, 0, 3), attn.r_r_bias.numpy(), attn.r_w_bias.numpy()


def probs_in_loops(x, mask, weights, scale, key_position_term, distance=lambda i, j: j - i):
    """`[H, B, T, T]` of the paper's equation, and the heads' vectors side by side."""
    w_q, w_k, w_v, u, v = weights
    probs, vectors = np.zeros([HEADS, *mask.shape, mask.shape[1]]), np.zeros(x.shape)
    for h, b, i in np.ndindex(*probs.shape[:3]):
        scores = np.full(mask.shape[1], -np.inf)
        q = x[b, i] @ w_q[h]
        for j in np.flatnonzero(mask[b]):
            k = x[b, j] @ w_k[h]
            scores[j] = (q + u[h]) @ k + (q + v[h]) @ sinusoid(distance(i, j), WIDTH)
            if key_position_term:
                scores[j] += k @ sinusoid(-distance(i, j), WIDTH)
        scores = np.exp((scores - scores.max()) / (WIDTH**0.5 if scale else 1))
        probs[h, b, i] = scores / scores.sum()
        vectors[b, i, h * WIDTH : (h + 1) * WIDTH] = probs[h, b, i] @ (x[b] @ w_v[h])
    return probs, vectors


@pytest.mark.parametrize("scale", [False, True])
@pytest.mark.parametrize("key_position_term", [True, False])
def test_attention_in_loops(scale, key_position_term):
    attn = make_attn(scale=scale, key_position_term=key_position_term)
    (x,) = arrays((BATCH, LENGTH, HEADS * WIDTH))
    probs, vectors = probs_in_loops(x, MASK, weights_of(attn), scale, key_position_term)
    np.testing.assert_allclose(attn.attention_probs(x, MASK), probs, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(attn(x, MASK), vectors, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scale", [False, True])
def test_attention_without_positions_in_loops(scale):
    attn = make_attn(attn_type="transformer", scale=scale)
    (x,) = arrays((BATCH, LENGTH, HEADS * WIDTH))
    kernel = attn.qkv_kernel.numpy().reshape([HEADS * WIDTH, 3, HEADS, WIDTH])
    expected = np.zeros(x.shape)
    for h, b, i in np.ndindex(HEADS, BATCH, LENGTH):
        q, k, v = (x[b] @ kernel[:, part, h] for part in range(3))
        scores = np.where(MASK[b], q[i] @ k.T / (WIDTH**0.5 if scale else 1), -np.inf)
        scores = np.exp(scores - scores.max())
        expected[b, i, h * WIDTH : (h + 1) * WIDTH] = scores / scores.sum() @ v
    expected = expected @ attn.fc.kernel.numpy() + attn.fc.bias.numpy()
    np.testing.assert_allclose(attn(x, MASK), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("key_position_term", [True, False])
def test_the_paper_s_distances_are_the_same_model_with_its_sines_negated(key_position_term):
    """`R_{i-j}` in the place of `R_{j-i}`: negate what meets sines in queries, keys, u and v."""
    attn = make_attn(key_position_term=key_position_term)
    (x,) = arrays((BATCH, LENGTH, HEADS * WIDTH))
    w_q, w_k, w_v, u, v = weights_of(attn)
    signs = np.repeat([-1.0, 1.0], WIDTH // 2)
    turned = w_q * signs, w_k * signs, w_v, u * signs, v * signs
    paper = probs_in_loops(x, MASK, turned, False, key_position_term, distance=lambda i, j: i - j)
    np.testing.assert_allclose(attn.attention_probs(x, MASK), paper[0], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(attn(x, MASK), paper[1], rtol=1e-4, atol=1e-5)
    other, _ = probs_in_loops(x, MASK, weights_of(attn), False, key_position_term, distance=lambda i, j: i - j)
    assert np.abs(other - paper[0]).max() > 0.01  # without that it is another model


def test_direction_counts_with_relative_positions_alone():
    """Reversed sentences give reversed results where attention has no positions, and others where it has."""
    (x,) = arrays((1, LENGTH, HEADS * WIDTH))
    mask = np.ones([1, LENGTH], bool)
    for attn_type, same in (("transformer", True), ("adatrans", False)):
        attn = make_attn(attn_type=attn_type)
        there, back = attn(x, mask).numpy(), attn(x[:, ::-1], mask).numpy()[:, ::-1]
        assert np.allclose(there, back, atol=1e-5) == same


def make_layer(**options):
    layer = TenerLayer(HEADS * WIDTH, HEADS, 12, **options)
    layer.build()
    randomise(layer, scale=0.5)
    return layer


def norm_of(x, norm):
    normal = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    return normal * norm.gamma.numpy() + norm.beta.numpy()


@pytest.mark.parametrize("after_norm", [True, False])
def test_a_layer_is_attention_and_feed_forward_net_with_residuals_and_norms(after_norm):
    layer = make_layer(after_norm=after_norm)
    (x,) = arrays((BATCH, LENGTH, HEADS * WIDTH))

    def attention(y):
        return layer.self_attn(tf.constant(y, tf.float32), MASK).numpy()

    def feed_forward(y):
        first, second = layer.ffn.dense1, layer.ffn.dense2
        inner = np.maximum(y @ first.kernel.numpy() + first.bias.numpy(), 0)
        return inner @ second.kernel.numpy() + second.bias.numpy()

    if after_norm:
        expected = norm_of(x + attention(x), layer.norm1)
        expected = norm_of(expected + feed_forward(expected), layer.norm2)
    else:
        expected = x + attention(norm_of(x, layer.norm1))
        expected = expected + feed_forward(norm_of(expected, layer.norm2))
    np.testing.assert_allclose(layer(x, MASK), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", [{}, {"attn_type": "transformer"}, {"after_norm": False}], ids=str)
def test_padding_changes_nothing(options):
    layer = make_layer(**options)
    (x,) = arrays((BATCH, LENGTH, HEADS * WIDTH))
    found = layer(x, MASK).numpy()
    (noise,) = arrays(x.shape, seed=1)
    np.testing.assert_array_equal(layer(np.where(MASK[..., None], x, 9 * noise), MASK).numpy()[MASK], found[MASK])
    for row, length in enumerate(MASK.sum(1)):
        alone = layer(x[row : row + 1, :length], MASK[row : row + 1, :length])
        np.testing.assert_allclose(found[row, :length], alone[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("attn_type", ["adatrans", "transformer"])
def test_layers_round_trip(attn_type):
    options = {"attn_type": attn_type, "scale": True, "key_position_term": False, "dropatt": 0.1}
    assert_round_trips(TenerAttn(8, 2, **options))
    assert_round_trips(TenerLayer(8, 2, 12, after_norm=False, dropout=0.2, **options))


def test_every_rate_is_applied_in_its_own_place():
    """A key alone changes nothing; each rate changes the results; the same key gives the same results again."""
    (x,) = arrays((BATCH, LENGTH, HEADS * WIDTH))
    key = tf.constant([1, 2, 0])
    plain = make_layer()
    expected = plain(x, MASK).numpy()
    np.testing.assert_array_equal(plain(x, MASK, dropout_key=key), expected)
    for rate in ("dropout", "dropatt"):
        layer = make_layer(**{rate: 0.5})
        np.testing.assert_array_equal(layer(x, MASK), expected)
        dropped = layer(x, MASK, dropout_key=key).numpy()
        assert np.abs(dropped - expected).max() > 0.1
        np.testing.assert_array_equal(layer(x, MASK, dropout_key=key), dropped)
    attn = make_attn(dropatt=0.5)
    assert np.abs(attn(x, MASK, dropout_key=key).numpy() - attn(x, MASK).numpy()).max() > 0.1


@pytest.mark.parametrize("make", [TenerAttn, lambda *args, **options: TenerLayer(*args, 12, **options)])
def test_bad_arguments_are_errors(make):
    with raises_parameter("d_model", 8, limit="n_head=3"):
        make(8, 3)
    for odd in (4, 6):
        with raises_parameter("d_model", odd, limit="n_head=2"):
            make(odd, 2)
    make(6, 2, attn_type="transformer")
    with raises_parameter("attn_type", "naive", ["adatrans", "transformer"]):
        make(8, 2, attn_type="naive")
