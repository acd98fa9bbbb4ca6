"""What a layer may be called without, its function and its maps of attention may be called without, too."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import raises_parameter, randomise

from txl_tf import layers
from txl_tf.errors import ParameterError

B, T, M, E, H, D = 2, 4, 3, 8, 2, 4
rng = np.random.default_rng(0)
W, MEMS = (rng.normal(size=(B, n, E)).astype(np.float32) for n in (T, M))
U, V = (rng.normal(size=(H, D)).astype(np.float32) for _ in range(2))
HIDDEN = np.array([[0, 0, 1, 0], [1, 0, 0, 0], [0, 1, 0, 1], [1, 0, 0, 0]], np.float32)  # of a segment: 1 is masked


def positions(mlen):
    return layers.positional_embedding(layers.relative_positions(mlen + T), layers.inverse_frequencies(E))


def forms(mlen):
    """Forms of `attn_mask`, and the `[B, T, mlen + T]` of 0 and 1 that each stands for."""
    causal, mask = np.triu(np.ones([T, mlen + T]), mlen + 1), np.pad(HIDDEN, [(0, 0), (mlen, 0)])
    rows = np.stack([mask, causal]).astype(np.float32)
    return [(None, [causal] * B), (mask, [mask] * B), (rows == 0, rows)]


def probs_in_loops(q, k, scores, mask):
    """`[H, B, T, K]`: the softmax over the keys that are not masked, query by query."""
    probs = np.zeros(np.shape(scores))
    for h, b, i in np.ndindex(H, B, T):
        seen = np.flatnonzero(np.asarray(mask[b][i]) == 0)
        exp = np.exp([(q[h, b, i] @ k[h, b, j] + scores[h, b, i, j]) / D**0.5 for j in seen])
        probs[h, b, i, seen] = exp / exp.sum()
    return probs


def projected(layer, mlen):
    """`(q, k, v)` of segment, of memory and segment: `[H, B, any, D]` each."""
    x = np.concatenate([MEMS[:, M - mlen :], W], 1) @ layer.qkv_kernel.numpy()
    q, k, v = np.transpose(x.reshape(B, mlen + T, 3, H, D), [2, 3, 0, 1, 4])
    return q[:, :, mlen:], k, v


@pytest.mark.parametrize("relative", [True, False])
def test_attention_without_memory_or_mask_is_that_of_the_layer_and_of_loops(relative):
    layer = layers.RelMultiHeadAttn(E, H, D) if relative else layers.MultiHeadAttn(E, H, D)
    layer.build((None, None, E))
    randomise(layer)
    kernels = [layer.qkv_kernel, *([layer.r_kernel] if relative else []), layer.o_kernel]
    function = layers.rel_multihead_attn if relative else layers.multihead_attn
    for mems, mlen in ((None, 0), (MEMS, M)):
        given = [W, *((positions(mlen), U, V) if relative else ())]
        q, k, v = projected(layer, mlen)
        scores = np.zeros([H, B, T, mlen + T])
        if relative:
            r_k = (positions(mlen)[0] @ layer.r_kernel.numpy()).numpy().reshape(mlen + T, H, D)
            for h, b, i, j in np.ndindex(scores.shape):
                distance = i + mlen - j  # row K - 1 - distance of the table; in the future it does not count
                row = r_k[mlen + T - 1 - distance, h] if distance >= 0 else 0 * r_k[0, h]
                scores[h, b, i, j] = (q[h, b, i] + V[h]) @ row
            q = q + U[:, None, None]
        for form, mask in forms(mlen):
            future = np.triu(np.ones([T, mlen + T]), mlen + 1)
            mask = np.maximum(mask, future) if relative else mask  # positions are defined for the past alone
            form = form if form is None or not relative else mask if form.dtype != bool else mask == 0
            probs = probs_in_loops(q, k, scores, mask)
            vectors = np.einsum("hbij,hbjd->bihd", probs, v).reshape(B, T, H * D)
            more = () if relative else (H,)
            output = function(*given, form, mems, *kernels, *more)
            np.testing.assert_allclose(output, vectors @ layer.o_kernel.numpy(), rtol=2e-4, atol=2e-5)
            form = None if form is None else tf.constant(form)
            np.testing.assert_allclose(layer(*given, form, mems), layer.layer_norm(W + output), rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(layer.attention_probs(*given, form, mems), probs, rtol=1e-4, atol=1e-6)


def test_content_may_be_bool_or_integers_and_there_may_be_no_memory():
    layer = layers.RelMultiHeadAttn(E, H, D)
    layer.build((None, None, E))
    randomise(layer)
    kernels, r = (layer.qkv_kernel, layer.r_kernel), positions(0)
    content = rng.integers(0, 2, [B, T, T])
    expected = layers.rel_multihead_attn(
        W, r, U, V, None, W[:, :0], *kernels, layer.o_kernel, content_mask=tf.constant(content, tf.float32)
    )
    terms = layers.score_terms(W, r, U, V, W[:, :0], *kernels, tf.constant(content, tf.float32))
    for form in (content, content.astype(bool)):
        got = layers.rel_multihead_attn(W, r, U, V, None, None, *kernels, layer.o_kernel, content_mask=form)
        np.testing.assert_array_equal(got, expected)
        np.testing.assert_array_equal(layers.score_terms(W, r, U, V, None, *kernels, form), terms)
    without = layers.rel_multihead_attn(W, r, U, V, None, None, *kernels, layer.o_kernel)
    assert np.abs(without - expected).max() > 0.01


def test_functions_of_the_crf_take_the_masks_of_the_layer():
    crf, emissions = layers.CRF(3), tf.constant(rng.normal(size=(2, 4, 3)), tf.float32)
    crf.build((None, None, 3))
    randomise(crf)
    weights, tags = (crf.transitions, crf.start_scores, crf.end_scores), rng.integers(0, 3, [2, 4])
    for mask in (None, np.array([[1, 1, 1, 1], [1, 1, 0, 0]])):
        seen = np.ones([2, 4], bool) if mask is None else mask == 1
        np.testing.assert_allclose(layers.crf_nll(emissions, tags, mask, *weights), crf.nll(emissions, tags, mask))
        for got, expected in zip(
            layers.crf_decode(emissions, mask, *weights), crf.decode(emissions, mask), strict=True
        ):
            np.testing.assert_allclose(got, expected)
        marginals = layers.crf_marginals(emissions, mask, *weights)
        np.testing.assert_allclose(tf.reduce_sum(marginals, -1), seen, atol=1e-5)
    with pytest.raises(ParameterError) as caught:
        layers.crf_decode(emissions, np.full([2, 4], 0.5), *weights)
    assert caught.value.name == "mask"


# ------------------------------------------------------------------------------------------------------ FLAT's pairs

POS_S, POS_E = np.array([[0, 1, 2, 0], [0, 1, 0, 0]], np.int32), np.array([[0, 1, 2, 1], [0, 1, 1, 0]], np.int32)
ITEMS = np.array([[1, 1, 1, 1], [1, 1, 1, 0]], np.int32)


def test_pairs_of_a_batch_may_have_no_mask_and_have_the_distances_of_spans():
    for mask in (None, ITEMS, ITEMS == 1):
        pairs, spans = layers.distinct_pairs(POS_S, POS_E, mask), layers.span_distances(POS_S, POS_E)
        both = np.ones([2, 4, 4], bool) if mask is None else (ITEMS[:, :, None] * ITEMS[:, None]) == 1
        for distances, name in zip(pairs.distances, ("ss", "se", "es", "ee"), strict=True):
            np.testing.assert_array_equal(tf.gather(distances, pairs.index)[both], spans[name][both])
        assert pairs.places == 3


@pytest.mark.slow
@pytest.mark.parametrize("has_mask", [True, False])
def test_a_functional_model_computes_its_pairs_is_saved_and_loads(has_mask, tmp_path):
    x, pos_s, pos_e, mask = (
        keras.Input([None, E]),
        *(keras.Input([None], dtype="int32") for _ in range(2)),
        keras.Input([None], dtype="bool"),
    )
    fusion, layer = layers.PositionFusion(E), layers.FlatLayer(E, H, 16)
    pairs = layers.distinct_pairs(pos_s, pos_e, mask if has_mask else None)
    r = fusion(pairs, layers.distance_table(pairs.places, E, shift=1))
    inputs = [x, pos_s, pos_e, mask][: 3 + has_mask]
    model = keras.Model(inputs, layer(x, r, pairs.index, mask if has_mask else None))
    randomise(model)
    arrays = [W, *map(tf.constant, (POS_S, POS_E, ITEMS == 1))][: len(inputs)]
    eager = layers.distinct_pairs(POS_S, POS_E, ITEMS if has_mask else None)
    table = layers.distance_table(eager.places, E, shift=1)
    expected = layer(W, fusion(eager, table), eager.index, tf.constant(ITEMS == 1) if has_mask else None)
    np.testing.assert_allclose(model(arrays), expected, rtol=1e-5, atol=1e-6)
    model.save(tmp_path / "flat.keras")
    loaded = keras.saving.load_model(tmp_path / "flat.keras")
    np.testing.assert_allclose(loaded(arrays), expected, rtol=1e-5, atol=1e-6)


def test_other_pairs_are_an_error_that_names_them():
    fusion, table = layers.PositionFusion(E), layers.distance_table(3, E)
    for pairs in (W, [W, W], layers.Pairs([POS_S[0]] * 2, POS_S, np.int32(3))):
        with pytest.raises(ParameterError) as caught:
            fusion(pairs, table)
        assert caught.value.name == "pairs" and "distinct_pairs" in caught.value.allowed
    layer = layers.FlatLayer(E, H, 16)
    for r, index, name in ((W, POS_S, "r"), (table, W, "index")):
        with pytest.raises(ParameterError) as caught:
            layer(W, r, index)
        assert caught.value.name == name


@pytest.mark.parametrize(
    "wrong", [7 * np.ones([2, 5, 8]), np.full([2, 5, 8], np.nan), np.ones([5, 8]), np.ones([2, 5, 1])]
)
def test_a_content_mask_is_checked_as_other_masks_are(wrong):
    layer = layers.MultiHeadAttn(16, 4, 4)
    w, mems = tf.ones([2, 5, 16]), tf.ones([2, 3, 16])
    ones = layer(w, mems=mems, content_mask=np.ones([2, 5, 8], bool))
    np.testing.assert_array_equal(ones, layer(w, mems=mems, content_mask=np.ones([2, 5, 8])))
    with raises_parameter("content_mask"):
        layer(w, mems=mems, content_mask=wrong)
