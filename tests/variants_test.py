"""Variants of the network: where it normalises, what activation and norm it has. Equations, caches, files, training."""

import contextlib
import math

import keras
import numpy as np
import own_parts
import pytest
import tensorflow as tf
from helpers import SMALL, eagerly, eagerly_in_generation, raises_parameter, randomise, word_vocab
from own_parts import SETTINGS, assert_all_methods_agree
from reference_model import ReferenceModel
from segments import (
    END,
    assert_a_cache_continues_hidden_states,
    assert_cached_segments_are_those_of,
    assert_documents_get_what_they_get_alone,
    assert_padding_changes_nothing,
    assert_prompts_of_unequal_length_get_what_they_get_alone,
    close,
    words,
)

import txl_tf
from txl_tf.kernels.dropout import split
from txl_tf.layers import PositionwiseFF, RMSNorm
from txl_tf.transformer_xl.cache import cached_forward, initial_state, precompute
from txl_tf.transformer_xl.first_segment import first_segment

SLOW = pytest.mark.slow
PRE = {"pre_lnorm": True}
LLAMA = {"pre_lnorm": True, "norm": "rms", "activation": "swiglu", "positions": "rotary"}
VARIANTS = {
    "pre": PRE,
    "pre_rotary": {**PRE, "positions": "rotary", "activation": "gelu"},
    "pre_alibi": {**PRE, "positions": "alibi"},
    "pre_sinusoids": {**PRE, "positions": "sinusoids", "context_len": 9},
    "llama": LLAMA,
    "post_rms": {"norm": "rms", "activation": "swiglu"},
}


def of(*fast):
    """All variants as parameters; those that are not `fast` are slow."""
    params = [pytest.param(VARIANTS[name], id=name, marks=[SLOW] * (name not in fast)) for name in VARIANTS]
    return pytest.mark.parametrize("variant", params)


def make(variant, **options):
    lm = txl_tf.TransformerXLLM(**{**SMALL, "d_head": 4, "dropout": 0.0, "seed": 0, "mem_len": 5, **variant, **options})
    randomise(lm, scale=0.5)
    return lm


@pytest.fixture
def eager():
    with eagerly():
        yield


# ---------------------------------------- the equations


def normal(x, layer):
    """Layer norm or RMS norm of the last axis, by their definitions."""
    if isinstance(layer, RMSNorm):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + layer.epsilon) * layer.gamma.numpy()
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + layer.epsilon)
    return x * layer.gamma.numpy() + layer.beta.numpy()


def gelu(x):
    """x times the probability that a normal random number is below x, by the error function's series."""
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / np.sqrt(2)))


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("activation", ["relu", "gelu", "swiglu"])
@pytest.mark.parametrize("pre_lnorm", [False, True])
def test_a_feed_forward_net_is_its_equation(pre_lnorm, activation, norm):
    ff = PositionwiseFF(4, 6, pre_lnorm=pre_lnorm, activation=activation, norm=norm)
    x = np.random.default_rng(1).normal(size=[2, 3, 4]).astype(np.float32)
    ff.build()
    randomise(ff, scale=1.0)
    k1, b1, k2, b2 = (weight.numpy() for weight in (ff.kernel_1, ff.bias_1, ff.kernel_2, ff.bias_2))
    assert k1.shape == ((4, 12) if activation == "swiglu" else (4, 6)) and k2.shape == (6, 4)
    inner = (normal(x, ff.layer_norm) if pre_lnorm else x) @ k1 + b1
    if activation == "swiglu":
        gates, values = inner[..., :6], inner[..., 6:]
        inner = gates / (1 + np.exp(-gates)) * values
    else:
        inner = gelu(inner) if activation == "gelu" else np.maximum(inner, 0)
    expected = x + inner @ k2 + b2
    close(ff(x), expected if pre_lnorm else normal(expected, ff.layer_norm))


def test_dropout_of_a_gated_net_falls_on_its_product():
    """The two places of dropout have the keys that they have in the net of the paper."""
    ff, plain = (PositionwiseFF(4, 8, rate, activation="swiglu", pre_lnorm=True) for rate in (0.5, 0.0))
    ff.build()
    plain.build()
    x, key = tf.random.stateless_normal([3, 5, 4], [0, 1]), tf.constant([1, 2, 0])
    plain.set_weights(ff.get_weights())
    inner_key, output_key = split(key, 2)
    inner = (
        txl_tf.layers.layer_norm(x, *ff.layer_norm.weights_in_float32(), 1e-12) @ ff.kernel_1.value + ff.bias_1.value
    )
    inner = txl_tf.layers.dropout(tf.nn.silu(inner[..., :8]) * inner[..., 8:], 0.5, inner_key)
    expected = x + txl_tf.layers.dropout(inner @ ff.kernel_2.value + ff.bias_2.value, 0.5, output_key)
    close(ff(x, training=True, dropout_key=key), expected)
    assert np.abs(plain(x, training=True, dropout_key=key) - expected).max() > 0.1


@pytest.mark.parametrize("options", [{}, pytest.param({"untie_r": True, "cutoffs": [6, 14], "div_val": 2}, marks=SLOW)])
def test_a_network_with_pre_lnorm_is_the_plain_port(options, eager):
    lm, text = make(PRE, **options), words(3, 16)
    port = ReferenceModel(**{**SMALL, "d_head": 4, "mem_len": 5, "pre_lnorm": True, **options})
    names = txl_tf.runs.weights.weights_by_name(lm)
    port.assign({name: names[name].numpy() for name in port.weights})
    mems, port_mems = None, port.initial_mems(3)
    for start in (0, 5, 10):
        tokens, labels = text[:, start : start + 5], text[:, start + 1 : start + 6]
        with tf.GradientTape() as tape:
            expected, port_mems = port.nll(tokens.T, labels.T, port_mems)
            loss = tf.reduce_mean(expected)
        expected_gradients = tape.gradient(loss, port.weights)
        with tf.GradientTape() as tape:
            nll, mems = lm.score(tokens, labels, mems)
            loss = tf.reduce_mean(nll)
        gradients = tape.gradient(loss, {name: names[name].value for name in port.weights})
        close(nll, expected.numpy().T)
        for mem, of_port in zip(mems, port_mems, strict=True):
            close(mem, tf.transpose(of_port, [1, 0, 2]))
        for name, gradient in expected_gradients.items():
            close(tf.convert_to_tensor(gradients[name]), tf.convert_to_tensor(gradient), 1e-4)


# ---------------------------------------- caches


@pytest.mark.parametrize(
    "options",
    [
        {"mem_len": 3, "same_length": True, "reset_token": END},
        *(
            pytest.param(each, marks=SLOW)
            for each in ({"mem_len": 5}, {"mem_len": 0}, {"mem_len": 12, "reset_token": END})
        ),
    ],
    ids=str,
)
@of("pre")
def test_cached_segments_are_those_of_the_network(variant, options, eager):
    if variant.get("positions") == "sinusoids":
        pytest.skip("a window")
    assert_cached_segments_are_those_of(make(variant, **options).network)


@of("pre", "pre_rotary", "llama")
def test_a_state_of_hidden_states_and_the_first_segment(variant, eager):
    if variant.get("positions") == "sinusoids":
        pytest.skip("a window")
    network, text = make(variant, mem_len=7).network, words(2, 20)
    close(first_segment(network, tf.constant(text[:, :9])), network(text[:, :9])[0])
    assert_a_cache_continues_hidden_states(network)


@of("pre_rotary")
def test_prompts_of_unequal_length_get_what_they_get_alone(variant, eager):
    if variant.get("positions") == "sinusoids":
        pytest.skip("a window")
    assert_prompts_of_unequal_length_get_what_they_get_alone(make(variant, mem_len=4, reset_token=END).network)


@of("pre")
def test_padding_changes_nothing(variant, eager):
    assert_padding_changes_nothing(make(variant, mem_len=4).network, words(2, 12))


@of("pre_rotary")
def test_documents_get_what_they_get_alone(variant, eager):
    if variant.get("positions") == "sinusoids":
        pytest.skip("refused")
    assert_documents_get_what_they_get_alone(*(make(variant, mem_len=6, reset_token=token) for token in (END, None)))


def test_dropout_of_probabilities_reaches_the_value_of_a_zero_memory(eager):
    """A row whose document begins at the segment's first token has the dropout of a segment after a zero memory."""
    lm, alone = (make(PRE, mem_len=6, dropatt=0.4, reset_token=token) for token in (END, None))
    text, key = words(2, 6, borders=[(0,), (0,)]), tf.constant([3, 4, 0])
    _, mems = alone.network(words(2, 6)[:, ::-1])
    found, _ = lm.network(text, mems, training=True, dropout_key=key)
    close(found, alone.network(text, None, training=True, dropout_key=key)[0])


class OwnNorm(txl_tf.layers.LayerNorm):
    """A user's layer norm, which turns zeros into something else than beta."""

    def call(self, inputs):
        return super().call(inputs) + 0.5


def test_a_norm_of_ones_own(eager):
    lm = make(PRE, reset_token=END)
    for layer in lm.network.decoder_layers:
        layer.rel_attn.layer_norm.__class__ = OwnNorm
    network, text = lm.network, words(2, 15, borders=[(2, 7), (9,)])
    weights, state, mems = precompute(network, 5), initial_state(network, 2, 5), None
    for start in (0, 5, 10):
        expected, mems = network(text[:, start : start + 5], mems)
        hidden, state = cached_forward(network, weights, tf.constant(text[:, start : start + 5]), state)
        close(hidden, expected)


# A kind of model and use for each variant: each compiles a dozen graphs.
METHODS = [
    ("pre_rotary", "eager"), ("pre", "static_shapes"), ("pre_rotary", "jit_compile"), ("pre_alibi", "used_before"),
    ("pre_sinusoids", "plain"), ("llama", "recompute"), ("post_rms", "reloaded"),
]  # fmt: skip


@pytest.mark.ci
@pytest.mark.parametrize(
    "variant, setting",
    [
        pytest.param(VARIANTS[variant], setting, id=f"{variant}-{setting}", marks=[SLOW] * (setting != "eager"))
        for variant, setting in METHODS
    ],
)
def test_all_methods_compute_the_model_s_own_call(variant, setting, tmp_path):
    """Scores, evaluation, texts, sessions, what is served and training; by cache, XLA, recomputation, from a file."""
    setting = SETTINGS[setting]
    window = variant.get("positions") == "sinusoids"
    sizes = {**own_parts.SIZES, **own_parts.ADAPTIVE, "dropout": 0.0, "seed": 3, **variant}
    memory = {"mem_len": 0, "context_len": 16} if window else {"mem_len": 4}
    lm = txl_tf.TransformerXLLM(**{**sizes, **memory, **setting.options})
    own_parts.randomise(lm)
    with eagerly_in_generation() if setting.eager else contextlib.nullcontext():
        assert_all_methods_agree(lm, setting, tmp_path)


# ---------------------------------------- files, other programs, errors


@pytest.mark.parametrize("model", [txl_tf.TransformerXLLM, txl_tf.TransformerLM])
def test_files_hold_the_variant(model, tmp_path, eager):
    variant = {"pre_lnorm": True, "norm": "rms", "activation": "swiglu"}
    lm, text = model(**SMALL, mem_len=4, **variant), words(2, 7)
    lm.save(tmp_path / "m.keras")
    loaded = keras.saving.load_model(tmp_path / "m.keras")
    expected, _ = lm.score(text[:, :6], text[:, 1:])
    np.testing.assert_array_equal(loaded.score(text[:, :6], text[:, 1:])[0], expected)
    config = {**SMALL, "mem_len": 4, **variant}
    vocab = word_vocab()
    txl_tf.runs.folder.RunFolder(tmp_path / "run").create({"dataset": "text"}, config, [vocab], lm, step=1)
    again, _ = txl_tf.load_run(tmp_path / "run")
    if model is txl_tf.TransformerXLLM:
        np.testing.assert_allclose(again.score(text[:, :6], text[:, 1:])[0], expected, rtol=1e-6)
    for name, value in variant.items():
        assert getattr(loaded, name) == getattr(again, name) == value


@pytest.mark.parametrize("name, value", [("pre_lnorm", True), ("activation", "gelu"), ("norm", "rms")])
def test_the_original_program_has_no_variants(name, value, tmp_path):
    lm = txl_tf.TransformerXLLM(**SMALL, mem_len=4, **{name: value})
    with raises_parameter(name, value):
        txl_tf.save_tf1_checkpoint(lm, tmp_path / "model.ckpt-0")


@pytest.mark.parametrize("name, value", [("activation", "selu"), ("norm", "batch"), ("pre_lnorm", "yes")])
def test_other_values_are_refused(name, value):
    sizes = {"d_model": 8, "n_head": 2, "d_head": 4, "d_inner": 12}
    for make_it in (
        lambda: txl_tf.TransformerXLLM(**SMALL, mem_len=4, **{name: value}),
        lambda: txl_tf.layers.TransformerXLLayer(**sizes, **{name: value}),
    ):
        with raises_parameter(name, value):
            make_it()
