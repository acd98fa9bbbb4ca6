"""The whole model, from the equations alone, is the model that the layers compute."""

import numpy as np
import pytest
import tensorflow as tf
from helpers import SMALL, randomise

from txl_tf import TransformerXLLM, equations
from txl_tf.kernels.routing import own_rows_only
from txl_tf.nn.adaptive import clusters_of
from txl_tf.nn.position_schemes import Relative
from txl_tf.transformer_xl.memory import HiddenStates


def model_nll(lm, tokens, labels, mems):
    """`lm.score`, written as the paper has it: `(nll, new_mems)`."""
    net, (batch, tgt_len), mem_len = lm.network, tokens.shape, mems[0].shape[1]
    table, projs = net.embedding.tables, net.embedding.projs
    starts = [0, *net.cutoffs] if len(table) > 1 else [0]
    clusters = [equations.Cluster(*cluster) for cluster in zip(starts, table, projs, strict=True)]
    h = equations.embed(tf.reshape(tokens, [-1]), clusters, net.d_model, "float32", own_rows_only)
    h = tf.reshape(h, [batch, tgt_len, net.d_model])

    distances = tf.range(mem_len + tgt_len - 1, -1, -1.0)
    distances = tf.minimum(distances, net.clamp_len) if net.clamp_len > 0 else distances
    r = equations.sinusoids(distances, 1 / 10000 ** (tf.range(0, net.d_model, 2.0) / net.d_model))[None]
    visible = equations.causal(tgt_len, mem_len, net.same_length)

    def layer(i, h):
        attn, ff = net.decoder_layers[i].rel_attn, net.decoder_layers[i].ff
        r_k = tf.pad(equations.project_distances(r, attn.r_kernel, net.n_head), [[0, 0], [1, 0], [0, 0]])
        u, v = (bias[i] if net.untie_r else bias for bias in (net.r_w_bias, net.r_r_bias))
        memory = HiddenStates(
            mems[i], equations.OrderedKeyPositions(klen=mem_len + tgt_len, visible=visible, r=r_k, first=tgt_len)
        )
        scale = net.d_head**-0.5
        biases = u[:, None, None], v[:, None, None]
        w = equations.Attention(attn.qkv_kernel, attn.o_kernel, net.n_head, scale, Relative(), *biases)
        h = equations.attention_block(h, memory, w, (*attn.layer_norm.weights_in_float32(), 1e-12))
        w = equations.FeedForward(ff.kernel_1, ff.bias_1, ff.kernel_2, ff.bias_2)
        return equations.feed_forward_block(h, w, (*ff.layer_norm.weights_in_float32(), 1e-12))

    inputs = []
    for i in range(net.n_layer):
        inputs.append(h)
        h = layer(i, h)
    tables, projs, biases, entries = lm.softmax.weights_with(net.embedding)
    rows, labels = tf.reshape(h, [-1, net.d_model]), tf.reshape(labels, [-1])
    nll = equations.nll(rows, labels, clusters_of(tables, projs, biases), entries, own_rows_only)
    new_mems = [equations.new_memory(mem, x, net.mem_len) for mem, x in zip(mems, inputs, strict=True)]
    return tf.reshape(nll, [batch, tgt_len]), new_mems


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"mem_len": 4}, marks=pytest.mark.slow),
        {"mem_len": 9, "same_length": True, "clamp_len": 5},
        {"mem_len": 4, "untie_r": True, "cutoffs": [5, 12], "div_val": 2},
        pytest.param({"mem_len": 4, "cutoffs": [5, 12], "proj_share_all_but_first": True}, marks=pytest.mark.slow),
        pytest.param({"mem_len": 4, "d_embed": 6}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_model_is_its_equations(options):
    lm = TransformerXLLM(**{**SMALL, **options})
    randomise(lm)
    rng, mems = np.random.default_rng(0), lm.initial_mems(2)
    for _ in range(2):
        tokens, labels = (tf.constant(rng.integers(0, SMALL["n_token"], [2, 5]), tf.int32) for _ in "xy")
        expected, expected_mems = model_nll(lm, tokens, labels, mems)
        nll, mems = lm.score(tokens, labels, mems)
        np.testing.assert_allclose(nll, expected, rtol=1e-5, atol=1e-6)
        for mem, expected_mem in zip(mems, expected_mems, strict=True):
            np.testing.assert_allclose(mem, expected_mem, rtol=1e-5, atol=1e-6)
