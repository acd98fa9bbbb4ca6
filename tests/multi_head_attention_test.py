"""The vanilla attention against loops over equation (1) of Vaswani et al. 2017, and masks as literal matrices."""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import raises_parameter

from txl_tf.errors import ParameterError
from txl_tf.layers import (
    CRF,
    Embeddings,
    EncoderLayer,
    FlatLayer,
    LatticeAttn,
    MultiHeadAttention,
    PositionFusion,
    PositionWiseFFN,
    create_look_ahead_mask,
    create_padding_mask,
    scaled_dot_product_attention,
)


def attention_in_loops(q, k, v, mask):
    """One head: `q` `[T, D]`, `k` `[K, D]`, `v` `[K, any]`, `mask` `[T, K]`; output and weights."""
    weights = np.zeros([len(q), len(k)])
    for i in range(len(q)):
        scores = [math.exp(q[i] @ k[j] / math.sqrt(q.shape[1])) * (1 - mask[i, j]) for j in range(len(k))]
        weights[i] = np.array(scores) / sum(scores)
    return weights @ v, weights


def numbers(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


def test_a_mask_of_an_unknown_length_is_refused_with_the_way_out():
    with pytest.raises(ParameterError, match="use_causal_mask") as caught:
        create_look_ahead_mask(None)
    assert (caught.value.name, caught.value.value) == ("size", None)


def test_masks_are_one_where_a_key_is_forbidden():
    np.testing.assert_array_equal(
        create_padding_mask(tf.constant([[7, 0, 3], [0, 0, 1]]))[:, 0, 0], [[0, 1, 0], [1, 1, 0]]
    )
    np.testing.assert_array_equal(create_look_ahead_mask(3), [[0, 1, 1], [0, 0, 1], [0, 0, 0]])


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("lead", [(), (2,), (2, 3)])
def test_attention_is_the_equation_in_loops(lead, queries):
    q, k, v = numbers(*lead, queries, 4), numbers(*lead, 5, 4, seed=1), numbers(*lead, 5, 6, seed=2)
    mask = np.float32(np.arange(5) > 2 + np.arange(queries)[:, None])
    output, weights = scaled_dot_product_attention(*map(tf.constant, (q, k, v, mask)))
    for place in np.ndindex(lead):
        expected, expected_weights = attention_in_loops(q[place], k[place], v[place], mask)
        np.testing.assert_allclose(output[place], expected, atol=1e-5)
        np.testing.assert_allclose(weights[place], expected_weights, atol=1e-6)


def test_heads_are_attentions_of_their_own_joined_and_projected():
    layer = MultiHeadAttention(d_model=6, num_heads=2)
    v, k, q = numbers(2, 4, 6), numbers(2, 4, 6, seed=1), numbers(2, 3, 6, seed=2)
    mask = np.float32([[[[0, 0, 1, 0]]], [[[0, 1, 0, 0]]]])  # a padding mask, [B, 1, 1, K]
    layer.build()
    for i, weight in enumerate(layer.weights):
        weight.assign(numbers(*weight.shape, seed=3 + i))
    output, weights = layer(v, k, q, mask)
    heads = {
        name: x @ linear.kernel.numpy() + linear.bias.numpy()
        for name, x, linear in (("q", q, layer.wq), ("k", k, layer.wk), ("v", v, layer.wv))
    }
    for b in range(2):
        joined = []
        for h in range(2):
            of_head = [heads[name][b][:, 3 * h : 3 * h + 3] for name in "qkv"]
            vectors, expected = attention_in_loops(*of_head, np.broadcast_to(mask[b, 0], [3, 4]))
            np.testing.assert_allclose(weights[b, h], expected, atol=1e-5)
            joined.append(vectors)
        expected = np.concatenate(joined, 1) @ layer.dense.kernel.numpy() + layer.dense.bias.numpy()
        np.testing.assert_allclose(output[b], expected, atol=1e-4)


def rotated_in_loops(x):
    """Queries or keys of one head, `[any, D]`: dimensions d and d + D / 2 of row n are a complex number that turns."""
    half = x.shape[1] // 2
    turned = np.zeros_like(x)
    for n in range(len(x)):
        for d in range(half):
            number = complex(x[n, d], x[n, half + d]) * np.exp(1j * n * 10000 ** (-2 * d / x.shape[1]))
            turned[n, d], turned[n, half + d] = number.real, number.imag
    return turned


@pytest.mark.parametrize("queries, dtype, atol", [(3, "float32", 1e-5), (4, "float32", 1e-5), (4, "float64", 1e-14)])
def test_rotary_positions_turn_queries_and_keys_of_every_head(queries, dtype, atol):
    layer = MultiHeadAttention(d_model=8, num_heads=2, positions="rotary", dtype=dtype)
    v, q = numbers(1, 4, 8).astype(dtype), numbers(1, queries, 8, seed=1).astype(dtype)
    layer.build()
    for i, weight in enumerate(layer.weights):
        weight.assign(numbers(*weight.shape, seed=2 + i))
    _, weights = layer(query=q, value=v, return_attention_scores=True)
    keys = v[0] @ layer.wk.kernel.numpy() + layer.wk.bias.numpy()
    queries_of_heads = q[0] @ layer.wq.kernel.numpy() + layer.wq.bias.numpy()
    for h in range(2):
        own_q, own_k = (rotated_in_loops(x[:, 4 * h : 4 * h + 4]) for x in (queries_of_heads, keys))
        _, expected = attention_in_loops(own_q, own_k, own_k, np.zeros([queries, 4]))
        np.testing.assert_allclose(weights[0, h], expected, rtol=10 * atol, atol=atol)


def test_rotary_positions_see_only_distances():
    layer = MultiHeadAttention(d_model=8, num_heads=2, positions="rotary")
    x = numbers(1, 5, 8)
    before = np.concatenate([numbers(1, 3, 8, seed=1), x], 1)
    seen = np.arange(8) >= 3
    _, weights = layer(query=before, value=before, value_mask=seen[None], return_attention_scores=True)
    _, expected = layer(query=x, value=x, return_attention_scores=True)
    np.testing.assert_allclose(weights[..., 3:, 3:], expected, rtol=1e-4, atol=1e-6)


def test_rotary_positions_need_pairs_of_dimensions():
    with raises_parameter("d_model", 6, limit="even"):
        MultiHeadAttention(d_model=6, num_heads=2, positions="rotary")
    with raises_parameter("positions", "alibi", limit="rotary"):
        MultiHeadAttention(d_model=8, num_heads=2, positions="alibi")


def test_one_product_for_all_projections_gives_what_three_give():
    layer = MultiHeadAttention(d_model=6, num_heads=3)
    x = tf.constant(numbers(2, 4, 6))
    together, apart = layer(x, x, x)[0], layer(v=tf.identity(x), k=tf.identity(x), q=x)[0]
    np.testing.assert_allclose(together, apart, atol=1e-6)


def test_heads_must_divide_the_width():
    with raises_parameter("d_model", 6, limit="num_heads=4"):
        MultiHeadAttention(d_model=6, num_heads=4)


@pytest.mark.parametrize("arguments, named, name, value, working", [
    ((), {"num_heads": 4, "key_dim": 16}, "key_dim", 16, "MultiHeadAttention(d_model=64, num_heads=4)"),
    ((4,), {"key_dim": 16}, "key_dim", 16, "MultiHeadAttention(d_model=64, num_heads=4)"),
    ((), {"d_model": 64, "num_heads": 4, "key_dim": 16}, "key_dim", 16, "MultiHeadAttention(d_model=64, num_heads=4)"),
    ((), {"key_dim": "16"}, "key_dim", "16", "MultiHeadAttention(d_model=num_heads * key_dim, num_heads=num_heads)"),
    ((4, 16), {}, "d_model", 4, "MultiHeadAttention(d_model=64, num_heads=4)"),
])  # fmt: skip
def test_the_constructor_of_keras_s_layer_is_an_error_that_names_the_working_call(
    arguments, named, name, value, working
):
    with pytest.raises(ParameterError) as caught:
        MultiHeadAttention(*arguments, **named)
    assert (caught.value.name, caught.value.value) == (name, value)
    assert working in str(caught.value)


def test_a_subclass_may_have_the_constructor_of_keras_s_layer():
    class ByHeads(MultiHeadAttention):
        def __init__(self, num_heads, key_dim):
            super().__init__(d_model=num_heads * key_dim, num_heads=num_heads)

    assert (ByHeads(2, 8).d_model, ByHeads(num_heads=2, key_dim=8).depth) == (16, 8)


class Own(keras.layers.Layer):
    def call(self, x):
        return x


@pytest.mark.parametrize("make", [
    lambda: keras.layers.Dense(8, activation="gelu"), lambda: keras.layers.Dense(8, use_bias=False), Own,
], ids=["with an activation", "without a bias", "of one's own"])  # fmt: skip
def test_a_part_whose_call_would_be_ignored_is_refused(make):
    part = make()
    for layer, name in (
        (MultiHeadAttention(8, 2), "wq"),
        (MultiHeadAttention(8, 2), "dense"),
        (PositionWiseFFN(8, 8), "dense1"),
        (LatticeAttn(8, 2), "w_k"),
        (FlatLayer(8, 2, 8), "ff_0"),
        (PositionFusion(8), "forward"),
    ):
        with raises_parameter(name, part):
            setattr(layer, name, part)


def test_a_plain_dense_in_place_of_a_part_has_its_own_weights():
    layer, x = PositionWiseFFN(8, 8), numbers(2, 3, 8)
    layer.dense1 = keras.layers.Dense(8, bias_initializer="ones")
    layer(x)
    expected = layer.dense2(keras.ops.relu(layer.dense1(x)))
    np.testing.assert_allclose(layer(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("length", [None, 5])
def test_a_functional_model_takes_the_articles_order(length):
    """Keras traces the call of a built layer with a new tensor for each argument."""
    memory, query = keras.Input([length, 8]), keras.Input([length, 8])
    layer = MultiHeadAttention(8, 2)
    model = keras.Model([memory, query], [layer(query, query, query)[0], layer(memory, memory, query)[0]])
    m, q = numbers(2, 5, 8), numbers(2, 5, 8, seed=1)
    alone, together = model([m, q])
    np.testing.assert_allclose(alone, layer(v=q, k=q, q=q)[0], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(together, layer(v=m, k=m, q=q)[0], rtol=1e-6, atol=1e-6)
    with raises_parameter("v"):
        layer(memory, query, query)


def test_switches_of_layers_must_be_true_or_false():
    for make, name in (
        (lambda **switch: EncoderLayer(8, 2, 8, **switch), "norm_first"),
        (lambda **switch: Embeddings(9, 8, **switch), "mask_zero"),
        (lambda **switch: LatticeAttn(8, 2, **switch), "scale"),
        (lambda **switch: CRF(3, **switch), "start_end"),
    ):
        with raises_parameter(name, "False"):
            make(**{name: "False"})
        assert getattr(make(**{name: np.False_}), name) == False  # noqa: E712


def test_the_attention_of_a_flat_layer_takes_no_seed():
    with raises_parameter("attention", {"seed": 3}):
        FlatLayer(8, 2, 8, attention={"seed": 3})
