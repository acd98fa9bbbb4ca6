"""The feed-forward net in plain NumPy, and one layer of Transformer-XL against the plain port."""

import itertools

import keras
import numpy as np
import pytest
import reference_model
import tensorflow as tf

from txl_tf.nn.feed_forward import PositionwiseFF, positionwise_ff
from txl_tf.transformer_xl.attention import create_mask
from txl_tf.transformer_xl.layer import TransformerXLLayer


def randomised(layer, seed=0):
    layer.build()
    rng = np.random.default_rng(seed)
    for variable in layer.trainable_variables:
        variable.assign(rng.normal(0, 0.5, variable.shape))
    return layer


def normalise(x, gamma, beta):
    """Layer norm with the original's epsilon, 1e-12."""
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-12) * gamma + beta


@pytest.mark.parametrize("shape", [(6,), (3, 6), (2, 3, 6)], ids=str)
def test_positionwise_ff_in_plain_numpy(shape):
    """The function of any leading dimensions, one position after the other."""
    rng = np.random.default_rng(0)
    inp = rng.normal(size=shape).astype(np.float32)
    w1, b1, w2, b2 = (rng.normal(size=size).astype(np.float32) for size in ((6, 10), (10,), (10, 6), (6,)))
    expected = np.zeros(shape)
    for place in np.ndindex(shape[:-1]):
        inner = [max(0.0, inp[place] @ w1[:, unit] + b1[unit]) for unit in range(10)]
        expected[place] = [inner @ w2[:, unit] + b2[unit] for unit in range(6)]
    assert np.abs(expected).mean() > 0.1
    np.testing.assert_allclose(positionwise_ff(inp, w1, b1, w2, b2), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(positionwise_ff(inp, w1, b1, w2, b2, rate=0.5), positionwise_ff(inp, w1, b1, w2, b2))


def test_layer_in_plain_numpy():
    layer = randomised(PositionwiseFF(6, 10))
    inp = np.random.default_rng(1).normal(size=(2, 3, 6)).astype(np.float32)
    names = ["kernel_1", "bias_1", "kernel_2", "bias_2"]
    w1, b1, w2, b2 = (next(v.numpy() for v in layer.weights if v.path.endswith(name)) for name in names)
    output = np.maximum(inp @ w1 + b1, 0) @ w2 + b2
    expected = normalise(output + inp, layer.layer_norm.gamma.numpy(), layer.layer_norm.beta.numpy())
    np.testing.assert_allclose(layer(inp), expected, rtol=1e-5, atol=1e-5)


def test_layer_norm_s_epsilon_is_the_original_s():
    """Input whose variance is 1e-6: with Keras's epsilon of 1e-3 it would come out thirty times too small."""
    layer = PositionwiseFF(4, 4, kernel_initializer="zeros")
    layer.build()
    inp = 1e-3 * np.array([[[1, -1, 1, -1]]], np.float32)
    np.testing.assert_allclose(layer(inp), [[[1, -1, 1, -1]]], rtol=1e-5)


@pytest.mark.parametrize("mlen, same_length", [(0, False), (2, True), (7, False)])
def test_layer_is_the_plain_port_s_transposed(mlen, same_length):
    layer = randomised(TransformerXLLayer(8, 2, 3, 12))
    rng = np.random.default_rng(1)
    w, r, mems = (rng.normal(size=shape).astype(np.float32) for shape in ((2, 4, 8), (1, mlen + 4, 8), (2, mlen, 8)))
    u, v = rng.normal(size=(2, 2, 3)).astype(np.float32)
    attn, ff = layer.rel_attn, layer.ff
    weights = {
        "attn/qkv/kernel": attn.qkv_kernel,
        "attn/r/kernel": attn.r_kernel,
        "attn/o/kernel": attn.o_kernel,
        "attn/LayerNorm/gamma": attn.layer_norm.gamma,
        "attn/LayerNorm/beta": attn.layer_norm.beta,
        "ff/layer_1/kernel": ff.kernel_1,
        "ff/layer_1/bias": ff.bias_1,
        "ff/layer_2/kernel": ff.kernel_2,
        "ff/layer_2/bias": ff.bias_2,
        "ff/LayerNorm/gamma": ff.layer_norm.gamma,
        "ff/LayerNorm/beta": ff.layer_norm.beta,
    }
    weights = {name: variable.value for name, variable in weights.items()}
    off = {"dropout_rate": 0.0, "is_training": False}
    mask = reference_model.create_mask(4, mlen, same_length)
    expected = reference_model.rel_multihead_attn(
        w.transpose(1, 0, 2), r.transpose(1, 0, 2), u, v, mask, mems.transpose(1, 0, 2),
        n_head=2, d_head=3, dropatt=0.0, weights=weights, scope="attn", **off,
    )  # fmt: skip
    expected = reference_model.positionwise_ff(expected, weights=weights, scope="ff", **off)
    got = layer(w, r, u, v, create_mask(4, mlen, same_length), mems)
    np.testing.assert_allclose(got, tf.transpose(expected, [1, 0, 2]), rtol=1e-5, atol=1e-5)


def test_both_places_of_the_feed_forward_net_drop_at_its_rate(monkeypatch):
    """Constants make the two visible: each of 1,000 units inside adds a thousandth, each output is 1 or dropped."""
    layer = PositionwiseFF(40, 1000, dropout=0.3)
    layer.build()
    layer.kernel_1.assign(np.zeros([40, 1000]))
    layer.bias_1.assign(np.ones([1000]))
    layer.kernel_2.assign(np.full([1000, 40], 1e-3))
    monkeypatch.setattr(layer, "layer_norm", lambda x: x)
    inp = np.zeros([10, 20, 40], np.float32)
    np.testing.assert_allclose(layer(inp), np.ones(inp.shape), rtol=1e-5)

    dropped = layer(inp, dropout_key=tf.constant([1, 2, 0])).numpy()
    outer = dropped == 0
    assert abs(outer.mean() - 0.3) < 0.02  # standard error 0.005
    inner = dropped.max(-1) * 0.7  # one value for all outputs of a position: the share of units kept, over 0.7
    assert abs(inner.mean() - 1) < 0.01
    assert 0.01 < inner.std() < 0.03  # (0.3 / 0.7 / 1000) ** 0.5 = 0.02
    np.testing.assert_allclose(dropped[~outer], np.broadcast_to(inner[..., None] / 0.7, inp.shape)[~outer], rtol=1e-4)


def test_configs_round_trip_and_kernels_are_drawn_anew():
    initializer = keras.initializers.RandomNormal(stddev=0.5)
    layer = TransformerXLLayer(8, 2, 4, 8, 0.1, 0.2, initializer, dtype="mixed_bfloat16", name="layer_3")
    copy = TransformerXLLayer.from_config(layer.get_config())
    assert copy.get_config() == layer.get_config()
    ff = PositionwiseFF(8, 12, 0.3, initializer)
    assert PositionwiseFF.from_config(ff.get_config()).get_config() == ff.get_config()

    copy.build()
    assert (copy.rel_attn.dropout, copy.rel_attn.dropatt, copy.ff.dropout) == (0.1, 0.2, 0.1)
    attn, ff = copy.rel_attn, copy.ff
    kernels = [k.numpy() for k in (attn.r_kernel, attn.o_kernel, ff.kernel_1, ff.kernel_2)]
    for a, b in itertools.combinations(kernels, 2):
        assert np.abs(a - b).max() > 0.1
    assert np.std(np.concatenate(kernels)) == pytest.approx(0.5, rel=0.2)


@pytest.mark.parametrize("make_seed", [int, keras.random.SeedGenerator], ids=["seed", "generator"])
def test_kernels_of_a_layer_differ_with_a_seeded_initializer(make_seed):
    initializer = keras.initializers.RandomNormal(stddev=0.5, seed=make_seed(3))
    layer = TransformerXLLayer(8, 2, 4, 8, kernel_initializer=initializer)
    layer.build()
    kernels = [
        k.numpy() for k in (layer.rel_attn.r_kernel, layer.rel_attn.o_kernel, layer.ff.kernel_1, layer.ff.kernel_2)
    ]
    alone = PositionwiseFF(8, 8, kernel_initializer=initializer)
    alone.build()
    for a, b in [*itertools.combinations(kernels, 2), (alone.kernel_1.numpy(), alone.kernel_2.numpy())]:
        assert np.abs(a - b).max() > 0.1


def test_a_seed_of_the_initializer_decides_the_kernels():
    layers = [TransformerXLLayer(8, 2, 4, 8, kernel_initializer=keras.initializers.HeNormal(seed=3)) for _ in range(2)]
    layers.append(TransformerXLLayer.from_config(layers[0].get_config()))
    for layer in layers:
        layer.build()
    for layer in layers[1:]:
        for weight, other in zip(layer.get_weights(), layers[0].get_weights(), strict=True):
            np.testing.assert_array_equal(weight, other)
