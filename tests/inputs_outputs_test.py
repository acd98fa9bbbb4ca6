"""Inputs and outputs of networks and language models: features, ends of documents, hidden states of all layers."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import SMALL, eagerly, raises_parameter, randomise
from segments import close

import txl_tf
from txl_tf.transformer_xl.cache import cached_forward, initial_state, precompute

SLOW = pytest.mark.slow
RINGS = ("relative", "alibi", "rotary")
END = 1


@pytest.fixture
def eager():
    with eagerly():
        yield


def make(model=txl_tf.TransformerXLLM, **options):
    lm = model(**{**SMALL, "d_head": 4, "dropout": 0.0, "seed": 0, "mem_len": 5, **options})
    randomise(lm, scale=0.5)
    return lm


def words(rows=3, n=12, seed=0):
    return np.random.default_rng(seed).integers(2, SMALL["n_token"], [rows, n]).astype(np.int32)


def flags(rows, n, *places):
    """Bool `[rows, n]`, true at the places of each row."""
    done = np.zeros([rows, n], bool)
    for row, of_row in zip(done, places, strict=True):
        row[list(of_row)] = True
    return done


# ---------------------------------------- embeddings in place of ids


@pytest.mark.parametrize("positions", [*RINGS[:2], pytest.param("sinusoids", marks=SLOW)])
def test_embeddings_of_ids_give_what_the_ids_give(positions, eager):
    lm, text = make(positions=positions), words()
    network = lm.network
    _, mems = network(text[:, :6])
    expected, expected_mems = network(text[:, 6:], mems)
    embeds = network.embedding(text[:, 6:])
    hidden, new_mems = network(inputs_embeds=embeds, mems=mems)
    np.testing.assert_array_equal(hidden, expected)
    np.testing.assert_array_equal(new_mems[1], expected_mems[1])
    np.testing.assert_array_equal(lm(inputs_embeds=embeds, mems=mems)[0], lm(text[:, 6:], mems)[0])
    np.testing.assert_array_equal(network(None, mems, inputs_embeds=embeds)[0], expected)


def test_embeddings_have_dropout_padding_and_gradients(eager):
    network, text = make(n_layer=1, dropout=0.3).network, words(2, 6)
    embeds, key = network.embedding(text), tf.constant([1, 2, 0])
    expected, _ = network(text, training=True, dropout_key=key)
    np.testing.assert_array_equal(network(inputs_embeds=embeds, training=True, dropout_key=key)[0], expected)
    shown = np.array([[1, 0, 1, 1, 0, 1], [1, 1, 1, 0, 0, 0]], bool)
    expected, expected_mems = network(text, padding_mask=shown)
    hidden, new_mems = network(inputs_embeds=embeds, padding_mask=shown)
    np.testing.assert_array_equal(hidden, expected)
    np.testing.assert_array_equal(new_mems[0], expected_mems[0])
    masked = tf.identity(embeds)
    masked._keras_mask = tf.constant(shown)  # as Keras's Masking passes it on
    np.testing.assert_array_equal(network(inputs_embeds=masked)[0], expected)
    with tf.GradientTape() as tape:
        tape.watch(embeds)
        total = tf.reduce_sum(network(inputs_embeds=embeds)[0][:, 2] ** 2)
    gradient = tape.gradient(total, embeds).numpy()
    assert np.abs(gradient[:, :3]).min() > 0 and not gradient[:, 3:].any()  # saliency of the past alone


@pytest.mark.ci
def test_a_functional_model_of_features(tmp_path):
    features = keras.Input([6, 3])
    network = txl_tf.TransformerXL(**{**SMALL, "n_layer": 1, "n_head": 1, "dropout": 0.0}, mem_len=2)
    hidden, _ = network(inputs_embeds=keras.layers.Dense(8)(features))
    model = keras.Model(features, keras.layers.Dense(1)(hidden[:, -1]))
    x = np.random.default_rng(0).normal(size=[8, 6, 3]).astype(np.float32)
    model.compile("adam", "mse", run_eagerly=True)
    losses = [model.train_on_batch(x, x[:, -1, :1]) for _ in range(2)]
    assert losses[1] < losses[0]
    expected = model(x)
    model.save(tmp_path / "m.keras")
    np.testing.assert_array_equal(keras.saving.load_model(tmp_path / "m.keras")(x), expected)
    model.export(tmp_path / "served", verbose=False)
    served = tf.saved_model.load(tmp_path / "served")
    close(served.serve(x), expected)


def test_static_shapes_compute_the_same_of_features():
    network, text = make(n_layer=1).network, words(2, 5)
    embeds = network.embedding(text)
    by_xla = tf.function(lambda x: network(inputs_embeds=x, static_shapes=True)[0], jit_compile=True, autograph=False)
    close(by_xla(embeds), network(text)[0])


def test_other_inputs_are_refused(eager):
    network, text = make().network, words(2, 6)
    embeds = network.embedding(text)
    with raises_parameter("inputs_embeds", None):
        network()
    with raises_parameter("inputs_embeds"):
        network(text, inputs_embeds=embeds)
    with raises_parameter("inputs_embeds"):
        network(inputs_embeds=embeds[..., :7])
    with raises_parameter("inputs_embeds", limit="done"):
        make(reset_token=END).network(inputs_embeds=embeds)


# ---------------------------------------- ends of documents and episodes


@pytest.mark.ci
@pytest.mark.parametrize("positions", RINGS)
def test_flags_cut_the_memory_as_a_token_does(positions, eager):
    """A flag at a token is `reset_token` as the next one, which gets another document."""
    by_token, by_flag = make(positions=positions, reset_token=END), make(positions=positions)
    text = words(3, 18)
    text[0, [3, 6, 11]] = text[1, [1, 12]] = END
    done = np.pad(text[:, 1:] == END, [(0, 0), (0, 1)])
    mems = flag_mems = None
    for start in (0, 6, 12):
        part = slice(start, start + 6)
        expected, mems = by_token.network(text[:, part], mems)
        hidden, flag_mems = by_flag.network(text[:, part], flag_mems, done=done[:, part])
        close(hidden, expected)
        if start == 6:  # row 1 ends with a flag: its memory is empty already
            assert not any(np.any(mem[1]) for mem in flag_mems)
    close(flag_mems[1], mems[1])


def test_a_row_gets_what_its_episodes_get_alone(eager):
    lm, text = make(pre_lnorm=True), words(2, 12)
    done = flags(2, 12, (2, 5, 7), (11,))
    hidden, mems = lm.network(text, done=done)
    for start, end in ((0, 3), (3, 6), (6, 8), (8, 12)):
        expected, alone = lm.network(text[:1, start:end])
        close(hidden[0, start:end], expected[0])
    close(mems[1][0], alone[1][0])
    close(hidden[1], lm.network(text[1:])[0][0])
    assert not np.any(mems[1][1])


def test_both_ends_and_tokens_cut_the_memory(eager):
    lm, text = make(reset_token=END), words(1, 10)
    text[0, 6] = END
    hidden, _ = lm.network(text, done=flags(1, 10, (2,)))
    for start, end in ((0, 3), (3, 6), (6, 10)):
        close(hidden[0, start:end], lm.network(text[:, start:end])[0][0])


def test_padding_and_flags(eager):
    lm, text = make(), words(2, 8)
    shown = np.array([[1, 0, 1, 1, 0, 1, 1, 0], [1, 1, 1, 1, 0, 0, 0, 0]], bool)
    done = flags(2, 8, (2, 4), (3, 6))  # one at padding, which has no effect
    hidden, mems = lm.network(text, padding_mask=shown, done=done)
    for b in range(2):
        expected, own_mems = lm.network(text[b : b + 1][:, shown[b]], done=done[b : b + 1][:, shown[b]])
        close(hidden[b][shown[b]], expected[0])
        close(mems[0][b], own_mems[0][0])


@pytest.mark.ci
@pytest.mark.parametrize("positions", RINGS)
@pytest.mark.parametrize("options", [{"n_layer": 1}, {"reset_token": END, "pre_lnorm": True}], ids=str)
def test_cached_segments_are_those_of_the_network(positions, options, eager):
    network = make(positions=positions, **options).network
    text, done = words(3, 20), flags(3, 20, (0, 4, 5, 11), (9, 10, 19), ())
    text[0, 7] = text[2, [6, 11]] = END
    weights, state, mems = precompute(network, 6), initial_state(network, 3, 6), None
    start = 0
    for tgt_len in (5, 1, 6, 1, 1, 6):
        part = slice(start, start + tgt_len)
        expected, mems = network(text[:, part], mems, done=done[:, part])
        tokens = tf.constant(text[:, part])
        hidden, state = cached_forward(network, weights, tokens, state, done=tf.constant(done[:, part]))
        close(hidden, expected)
        start += tgt_len


def of_documents(text, done):
    """A dataset of segments of 5, with flags."""
    parts = [(text[:, i : i + 5], done[:, i : i + 5], text[:, i + 1 : i + 6]) for i in range(0, 15, 5)]
    tokens, ends, labels = (np.stack(x) for x in zip(*parts, strict=True))
    return tf.data.Dataset.from_tensor_slices(({"tokens": tokens, "done": ends}, labels))


@pytest.mark.ci
@pytest.mark.parametrize("static_shapes", [False, pytest.param(True, marks=SLOW)])
def test_datasets_with_flags(static_shapes):
    lm, text, done = make(n_layer=1), words(4, 16), flags(4, 16, (2, 9), (4,), (), (14,))
    lm.compile(keras.optimizers.SGD(0.0), static_shapes=static_shapes)

    def scores(done):
        mems, found = None, []
        for start in (0, 5, 10):
            part = slice(start, start + 5)
            nll, mems = lm.score(text[:, part], text[:, start + 1 : start + 6], mems, done=done[:, part])
            found.append(nll)
        return found

    expected = scores(done)
    assert abs(np.mean(scores(np.zeros_like(done))) - np.mean(expected)) > 1e-3
    dataset = of_documents(text, done)
    np.testing.assert_allclose(lm.evaluate(dataset, verbose=0), np.mean(expected), rtol=1e-5)
    history = lm.fit(dataset, validation_data=dataset, verbose=0).history
    np.testing.assert_allclose([history["loss"][0], history["val_loss"][0]], [np.mean(expected)] * 2, rtol=1e-5)
    lm.reset_memory()
    for nll, (x, y) in zip(expected, dataset, strict=True):
        np.testing.assert_allclose(lm.test_on_batch(x, y), np.mean(nll), rtol=1e-5)
        np.testing.assert_allclose(lm.train_on_batch(x, y, sample_weight=[1, 0, 0, 1]), np.mean(nll[::3]), rtol=1e-5)


def steps(lm, dataset, **options):
    lm.compile(keras.optimizers.SGD(0.1), **options)
    return lm.fit(dataset, verbose=0).history["loss"], lm.get_weights()


@SLOW
@pytest.mark.parametrize("options", [{"gradient_accumulation_steps": 2}, {"jit_compile": True}, {"recompute": True}])
def test_every_kind_of_step_trains_the_same_with_flags(options):
    text, done = words(4, 16), flags(4, 16, (2, 9), (4,), (), (14,))
    loss, expected = steps(make(), of_documents(text, done))
    of_model = {name: options[name] for name in options if name == "recompute"}
    of_compile = {name: options[name] for name in options if name != "recompute"}
    found_loss, found = steps(make(**of_model), of_documents(text, done), **of_compile)
    np.testing.assert_allclose(found_loss, loss, rtol=1e-5)
    for array, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(array, other, rtol=0, atol=1e-5)


@SLOW
def test_two_replicas_train_as_one_with_flags(two_replicas):
    text, done = words(4, 16), flags(4, 16, (2, 9), (4,), (), (14,))
    loss, expected = steps(make(), of_documents(text, done))
    with two_replicas.scope():
        lm = make()
    found_loss, found = steps(lm, of_documents(text, done))
    np.testing.assert_allclose(found_loss, loss, rtol=1e-5)
    for array, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(array, other, rtol=0, atol=1e-5)


class OwnCall(txl_tf.TransformerXLLM):
    def call(self, tokens, mems=None):
        return super().call(tokens, mems)


def test_flags_that_cannot_be_used_are_refused(eager):
    text, done = words(2, 6), flags(2, 6, (2,), ())
    with raises_parameter("done"):
        make(positions="sinusoids").score(text[:, :5], text[:, 1:], done=done[:, :5])
    with raises_parameter("done"):
        make().score(text[:, :5], text[:, 1:], done=done)
    with raises_parameter("done"):
        make(model=OwnCall).score(text[:, :5], text[:, 1:], done=done[:, :5])
    lm = make()
    lm.compile(keras.optimizers.SGD(0.0))
    with raises_parameter("done"):
        lm.test_on_batch({"tokens": text[:, :5], "done": done}, text[:, 1:])
    with raises_parameter("x"):
        lm.test_on_batch({"tokens": text[:, :5]}, text[:, 1:])
    with raises_parameter("x"):
        lm.evaluate(tf.data.Dataset.from_tensors(({"tokens": text[:, :5], "ends": done[:, :5]}, text[:, 1:])))


# ---------------------------------------- hidden states of all layers


@pytest.mark.parametrize("model", [txl_tf.TransformerXLLM, pytest.param(txl_tf.TransformerLM, marks=SLOW)])
def test_hidden_states_are_those_between_the_layers(model, eager):
    lm, text = make(model=model), words(2, 6)
    hidden, mems, states = lm.network(text, output_hidden_states=True)
    assert len(states) == SMALL["n_layer"] + 1
    expected, expected_mems = lm.network(text)
    np.testing.assert_array_equal(hidden, expected)
    np.testing.assert_array_equal(states[-1], hidden)
    for state, mem in zip(states, expected_mems, strict=False):  # the memory holds the inputs of the layers
        np.testing.assert_array_equal(state[:, -5:], mem)
    np.testing.assert_array_equal(lm(text, output_hidden_states=True)[2][1], states[1])
    assert len(lm(text)) == 2 and len(lm.network(text)) == 2


def test_hidden_states_of_padded_rows_and_in_functional_models(eager):
    network, text = make().network, words(2, 6)
    shown = np.array([[1, 0, 1, 1, 0, 1], [1, 1, 1, 1, 1, 1]], bool)
    _, _, states = network(text, padding_mask=shown, output_hidden_states=True)
    _, _, alone = network(text[:1, shown[0]], output_hidden_states=True)
    for state, expected in zip(states, alone, strict=True):
        close(state[0][shown[0]], expected[0])
        assert not np.any(state[0][~shown[0]])
    tokens = keras.Input([None], dtype="int32")
    _, _, states = network(tokens, output_hidden_states=True)
    probe = keras.Model(tokens, states[1])
    np.testing.assert_array_equal(probe(text), network(text, output_hidden_states=True)[2][1])
    fresh = txl_tf.TransformerXL(**SMALL, mem_len=5)
    hidden, mems, of_layers = fresh.compute_output_shape((2, 6), output_hidden_states=True)
    assert (hidden, len(mems), of_layers) == ((2, 6, 8), 2, [(2, 6, 8)] * 3)
    assert fresh.compute_output_shape(inputs_embeds_shape=(2, 6, 8))[0] == (2, 6, 8)


@SLOW
@pytest.mark.parametrize("options", [{"static_shapes": True}, {"training": True}], ids=str)
def test_hidden_states_by_the_loop_of_xla_and_by_recomputation(options):
    lm, text = make(recompute=True), words(2, 6)
    _, _, expected = lm.network(text, output_hidden_states=True)
    found = tf.function(lambda x: lm.network(x, output_hidden_states=True, **options)[2], autograph=False)(text)
    for state, other in zip(found, expected, strict=True):
        close(state, other)
