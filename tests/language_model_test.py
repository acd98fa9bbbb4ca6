"""The language model: scores, distribution and memory against the plain port, saving, and what it refuses."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import eagerly, raises_naming, raises_parameter

from txl_tf.errors import ParameterError

SLOW = pytest.mark.slow

# Everything that changes how the memory is used: lengths none, shorter and longer than the segments of 5.
OPTIONS = [
    pytest.param({"mem_len": 4}, marks=SLOW),
    pytest.param({"mem_len": 0}, marks=SLOW),
    {"mem_len": 12, "same_length": True, "clamp_len": 6, "untie_r": True},
    pytest.param(
        {"mem_len": 2, "same_length": True, "cutoffs": [6, 14], "div_val": 2, "proj_share_all_but_first": True},
        marks=SLOW,
    ),
    {"mem_len": 5, "d_embed": 6, "cutoffs": [6, 14]},
]


def transposed(x):
    return np.swapaxes(np.asarray(x), 0, 1)


# ---------------------------------------- inference


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_score_log_probs_and_memory_are_those_of_the_plain_port(small_pair, small_batches, options):
    lm, model = small_pair(**options)
    mems, expected_mems = lm.initial_mems(2), model.initial_mems(2)
    for tokens, labels in zip(*small_batches(n=3), strict=True):
        log_probs, _ = lm.log_probs(tokens, mems)
        nll, mems = lm.score(tokens, labels, mems)
        expected_log_probs = model.log_probs(tokens.T, expected_mems)
        expected_nll, expected_mems = model.nll(tokens.T, labels.T, expected_mems)
        assert nll.dtype == log_probs.dtype == tf.float32
        np.testing.assert_allclose(nll, transposed(expected_nll), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(log_probs, transposed(expected_log_probs), rtol=1e-5, atol=1e-5)
        for mem, expected in zip(mems, expected_mems, strict=True):
            np.testing.assert_allclose(mem, transposed(expected), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(np.exp(log_probs.numpy().astype(np.float64)).sum(-1), 1, rtol=1e-5)
        of_labels = np.take_along_axis(log_probs.numpy(), labels[..., None], -1)[..., 0]
        np.testing.assert_allclose(nll, -of_labels, rtol=1e-5, atol=1e-5)


def test_memory_may_start_empty_and_grow(small_pair, small_batches, eager):
    lm, model = small_pair(mem_len=12)
    mems, expected_mems = [tf.zeros([2, 0, 8])] * 2, [tf.zeros([0, 2, 8])] * 2
    for length, tokens, labels in zip([5, 10, 12, 12], *small_batches(n=4), strict=True):
        nll, mems = lm.score(tokens, labels, mems)
        expected, expected_mems = model.nll(tokens.T, labels.T, expected_mems)
        np.testing.assert_allclose(nll, transposed(expected), rtol=1e-5, atol=1e-5)
        assert [mem.shape[1] for mem in mems] == [length] * 2


@SLOW
def test_segments_whose_memory_starts_empty_score_as_one_long_segment(small_lm, small_batches):
    """True while mem_len holds all that came before, since then every token has seen exactly the tokens before it."""
    lm = small_lm(mem_len=15)
    tokens, labels = small_batches(n=4)
    whole, _ = lm.score(np.concatenate(tokens, 1), np.concatenate(labels, 1), [tf.zeros([2, 0, 8])] * 2)
    mems, parts = [tf.zeros([2, 0, 8])] * 2, []
    for segment in zip(tokens, labels, strict=True):
        nll, mems = lm.score(*segment, mems)
        parts.append(nll)
    np.testing.assert_allclose(np.concatenate(parts, 1), whole, rtol=1e-5, atol=1e-5)


def test_no_memory_given_is_a_full_memory_of_zeros_that_is_attended_to(small_lm, small_batches, eager):
    lm = small_lm()
    (tokens,), (labels,) = small_batches(n=1)
    nll, mems = lm.score(tokens, labels)
    np.testing.assert_array_equal(nll, lm.score(tokens, labels, [tf.zeros([2, 4, 8])] * 2)[0])
    np.testing.assert_array_equal(lm.log_probs(tokens)[0], lm.log_probs(tokens, lm.initial_mems(2))[0])
    for mem in lm.initial_mems(2):
        np.testing.assert_array_equal(mem, np.zeros([2, 4, 8]))
    empty, _ = lm.log_probs(tokens, [tf.zeros([2, 0, 8])] * 2)
    differences = np.abs(lm.log_probs(tokens)[0] - empty).max(-1)
    assert differences.min() > 1e-5  # of every token, ten times the rounding


def test_score_and_log_probs_drop_nothing_and_call_is_log_probs(small_lm, small_batches, eager):
    plain, dropping = small_lm(n_layer=1), small_lm(n_layer=1, dropout=0.5, dropatt=0.5)
    (tokens,), (labels,) = small_batches(n=1)
    np.testing.assert_array_equal(dropping.score(tokens, labels)[0], plain.score(tokens, labels)[0])
    expected, expected_mems = plain.log_probs(tokens)
    np.testing.assert_array_equal(dropping.log_probs(tokens)[0], expected)
    log_probs, mems = dropping(tokens)
    np.testing.assert_allclose(log_probs, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(mems, expected_mems, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["uint8", *(pytest.param(name, marks=SLOW) for name in ("uint16", "int64"))])
def test_ids_of_any_integer_type_score_the_same(small_lm, small_batches, dtype, eager):
    lm = small_lm(n_layer=1, cutoffs=[6, 14], div_val=2)
    (tokens,), (labels,) = small_batches(n=1)
    expected, _ = lm.score(tokens, labels)
    np.testing.assert_array_equal(lm.score(tokens.astype(dtype), labels.astype(dtype))[0], expected)
    np.testing.assert_array_equal(lm.score(tokens.tolist(), labels.tolist())[0], expected)


# ---------------------------------------- save, load


def test_model_that_was_never_compiled_is_saved_and_loaded(small_lm, small_batches, tmp_path):
    lm = small_lm(n_layer=1)
    lm.save(tmp_path / "m.keras")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = keras.saving.load_model(tmp_path / "m.keras")
    (tokens,), (labels,) = small_batches(n=1)
    np.testing.assert_array_equal(loaded.score(tokens, labels)[0], lm.score(tokens, labels)[0])


def test_weights_file_round_trips(small_lm, small_batches, tmp_path, eager):
    lm, other = small_lm(seed=1, n_layer=1), small_lm(seed=2, n_layer=1)
    lm.save_weights(tmp_path / "m.weights.h5")
    other.load_weights(tmp_path / "m.weights.h5")
    (tokens,), (labels,) = small_batches(n=1)
    np.testing.assert_array_equal(other.score(tokens, labels)[0], lm.score(tokens, labels)[0])


# ---------------------------------------- errors


@pytest.mark.parametrize(
    "options, name, limit",
    [
        ({"d_model": 7}, "d_model", "even"),
        ({"n_token": 0}, "n_token", "1"),
        ({"n_token": 20.5}, "n_token", "an integer"),
        ({"n_layer": 2.5}, "n_layer", "an integer"),
        ({"mem_len": None}, "mem_len", "an integer"),
        ({"n_layer": 0}, "n_layer", "1"),
        ({"n_head": -1}, "n_head", "1"),
        ({"d_head": 0}, "d_head", "1"),
        ({"d_inner": 0}, "d_inner", "1"),
        ({"d_embed": 0}, "d_embed", "1"),
        ({"mem_len": -1}, "mem_len", "0"),
        ({"dropout": 1.0}, "dropout", "[0, 1)"),
        ({"dropatt": -0.1}, "dropatt", "[0, 1)"),
        ({"init": "xavier"}, "init", "uniform"),
        ({"cutoffs": [12, 5]}, "cutoffs", "n_token=23"),
        ({"cutoffs": [5, 24]}, "cutoffs", "n_token=23"),
        ({"cutoffs": [5, 12], "div_val": 3, "d_embed": 8}, "d_embed", "9"),
        ({"n_tokens": 5}, "n_tokens", ""),
    ],
    ids=str,
)
def test_bad_arguments_are_named(small_lm, options, name, limit):
    with raises_parameter(name, options[name], limit=limit):
        small_lm(**options)


@pytest.mark.parametrize("bad", [-1, 23, 1000])
def test_ids_outside_the_vocabulary_are_an_error_of_score_and_log_probs(small_lm, small_batches, bad):
    lm = small_lm(n_layer=1)
    (tokens,), (labels,) = small_batches(n=1)
    wrong = tokens.copy()
    wrong[1, 3] = bad
    with raises_parameter("tokens", bad, limit="22"):
        lm.score(wrong, labels)
    with raises_parameter("labels", bad, limit="22"):
        lm.score(tokens, wrong)
    with raises_parameter("tokens", bad, limit="22"):
        lm.log_probs(wrong)


def test_ids_that_are_no_matrix_of_integers_are_an_error(small_lm):
    lm = small_lm(n_layer=1)
    with raises_naming(ValueError, "tokens", "[batch, tgt_len]", "[2, 5]"):
        lm.log_probs(np.zeros([2, 5], np.float32))
    with raises_parameter("tokens", limit="[batch, tgt_len]"):
        lm.log_probs(np.zeros([5], np.int32))
    with raises_parameter("labels", limit="2, 5"):
        lm.score(np.zeros([2, 5], np.int32), np.zeros([2, 4], np.int32))
    of_unknown_rank = tf.TensorSpec(None, tf.int32)
    with raises_parameter("tokens", limit="[batch, tgt_len]"):
        tf.function(lm.log_probs, autograph=False).get_concrete_function(of_unknown_rank)
    with raises_parameter("labels", limit="[batch, tgt_len]"):
        tf.function(lm.score, autograph=False).get_concrete_function(tf.TensorSpec([2, 5], tf.int32), of_unknown_rank)


def test_memory_may_be_one_tensor_of_all_layers(small_lm, small_batches):
    """In every form that such a tensor has, wherever memory is taken, symbols included."""
    lm, (tokens, labels) = small_lm(), (batches[0] for batches in small_batches(n=1))
    with eagerly():
        _, mems = lm.score(tokens, labels)
        stacked = np.stack(mems)
        calls = [
            lambda mems: lm.score(tokens, labels, mems),
            lambda mems: lm.log_probs(tokens, mems),
            lambda mems: lm.alternatives(tokens, 2, mems),
            lambda mems: lm.attention(tokens, mems),
            lambda mems: lm.network(tokens, mems=mems),
            lambda mems: lm.network.attention(tokens, mems),
            lambda mems: lm.network.attention_probs(tokens, mems, 1),
        ]
        for i, call in enumerate(calls):
            form = [stacked, stacked.astype(np.float64), tf.stack(mems), tf.Variable(stacked), keras.Variable(stacked)]
            for found, expected in zip(tf.nest.flatten(call(form[i % 5])), tf.nest.flatten(call(mems)), strict=True):
                np.testing.assert_array_equal(found, expected)
    symbols = keras.Input([None], dtype="int32"), keras.Input(batch_shape=(2, None, 4, 8))
    model = keras.Model(symbols, lm.network(*symbols)[0])
    np.testing.assert_allclose(model([tokens, stacked]), lm.network(tokens, mems)[0], rtol=1e-5, atol=1e-6)


def test_the_error_for_an_empty_list_as_memory_says_that_it_is_empty(small_lm):
    with raises_parameter("mems", []):
        small_lm().network(np.zeros([2, 5], int), mems=[])


@pytest.mark.parametrize("shape", [(3, 2, 4, 8), (2, 3, 4, 8), (2, 2, 4, 7), (2, 4, 8)])
def test_one_tensor_of_another_shape_is_an_error(small_lm, shape):
    with pytest.raises(ParameterError) as caught:
        small_lm().score(np.zeros([2, 5], int), np.zeros([2, 5], int), np.zeros(shape, np.float32))
    assert caught.value.name.startswith("mems")


@pytest.mark.parametrize(
    "shapes",
    [[(2, 4, 8)], [(2, 4, 8)] * 3, [(3, 4, 8)] * 2, [(2, 4, 7)] * 2, [(2, 8)] * 2, [(2, 4, 8), (2, 3, 8)]],
    ids=str,
)
def test_memory_of_another_model_or_batch_is_an_error_that_gives_its_shapes(small_lm, small_batches, shapes):
    lm = small_lm()
    (tokens,), (labels,) = small_batches(n=1)
    mems = [np.zeros(shape, np.float32) for shape in shapes]
    with pytest.raises(ParameterError) as error:
        lm.score(tokens, labels, mems)
    assert error.value.name in ("mems", "mems[0]", "mems[1]")
    assert str(list(shapes[-1])) in str(error.value)


@pytest.mark.parametrize(
    "call, name, instead",
    [
        (lambda lm: lm.predict(np.zeros([2, 5], np.int32)), "predict", "lm.log_probs(tokens, mems), lm.score("),
        (lambda lm: lm.predict_on_batch(np.zeros([2, 5], np.int32)), "predict_on_batch", "lm.log_probs("),
        (lambda lm: lm.export("folder"), "export", "txl_tf.export_saved_model(lm, directory, vocab)"),
        (lambda lm: lm.network.export("folder"), "export", "keras.Model(tokens, network(tokens)[0]).export"),
    ],
    ids=["predict", "predict_on_batch", "export", "export of the network"],
)
def test_what_keras_s_methods_cannot_do_is_an_error_that_says_what_does_it(small_lm, call, name, instead):
    with raises_parameter(name, error=NotImplementedError, limit=instead) as raised:
        call(small_lm(n_layer=1))
    assert instead in str(raised.value)


@pytest.mark.slow
def test_the_network_is_exported_within_a_model_of_keras(small_lm, small_batches, tmp_path):
    network, (batch, _), _ = small_lm(n_layer=1).network, *small_batches()
    tokens = keras.Input([None], dtype="int32")
    keras.Model(tokens, network(tokens)[0]).export(tmp_path / "network", verbose=False)
    exported = tf.saved_model.load(str(tmp_path / "network"))
    np.testing.assert_allclose(exported.serve(batch), network(batch)[0], rtol=1e-5, atol=1e-6)


def test_the_summary_lists_layers_and_parameters(small_lm):
    lm, lines = small_lm(), []
    lm.summary(expand_nested=True, print_fn=lambda line, **_: lines.append(line))
    for name in ("transformer (TransformerXL)", "adaptive_embed", "layer_0", "layer_1", "adaptive_softmax"):
        assert name in lines[0]
    assert f"Total params: {lm.count_params():,} " in lines[0]
