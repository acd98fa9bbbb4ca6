"""`layer_norm_epsilon`: in layers, networks and all ways of inference, in saved models and in runs."""

import json

import keras
import numpy as np
import pytest
import reference_model
import tensorflow as tf
from helpers import SMALL, TEXT, TINY_RUN, assert_round_trips, raises_naming, randomise, train_run, word_vocab

import txl_tf
from txl_tf.language.session import Session
from txl_tf.language.sliding_window import sliding_window_nll
from txl_tf.layers import MultiHeadAttn, PositionwiseFF, RelMultiHeadAttn, TransformerLMLayer, TransformerXLLayer
from txl_tf.nn.ops import LayerNorm
from txl_tf.runs.checkpoints import average_checkpoints
from txl_tf.runs.evaluate import evaluate_run
from txl_tf.runs.folder import RunFolder
from txl_tf.runs.same_run import check_same_config
from txl_tf.runs.weights import weights_by_name
from txl_tf.serving.language_model import LanguageModelSignatures
from txl_tf.transformer_xl.attention import create_mask
from txl_tf.transformer_xl.cache import cached_forward, initial_state, precompute

EPSILON = 0.01  # the weights of these models are so small that it counts
IDS = np.random.default_rng(0).integers(0, 23, [2, 16]).astype(np.int32)
TOKENS, LABELS = IDS[:, :-1], IDS[:, 1:]


@pytest.fixture
def pair(small_lm, small_pair, monkeypatch):
    """A language model with the epsilon, and the plain port with the same weights and the same epsilon."""

    def make(**options):
        return small_lm(**{"n_layer": 1, "layer_norm_epsilon": EPSILON, **options}), small_pair(
            n_layer=options.get("n_layer", 1)
        )[1]

    monkeypatch.setattr(reference_model, "EPSILON", EPSILON)
    return make


def vanilla(**options):
    lm = txl_tf.TransformerLM(**{**SMALL, "n_layer": 1, "dropout": 0.0, "layer_norm_epsilon": EPSILON, **options})
    randomise(lm)
    return lm


def close(got, expected, atol=1e-5):
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=atol)


# ---------------------------------------- layers

LAYERS = [  # the sizes of each, and how often it normalises
    (PositionwiseFF, (4, 6), 1),
    (RelMultiHeadAttn, (4, 2, 3), 1),
    (MultiHeadAttn, (4, 2, 3), 1),
    (TransformerXLLayer, (4, 2, 3, 6), 2),
    (TransformerLMLayer, (4, 2, 3, 6), 2),
]


def rows(*values):
    return tf.constant([[values]], tf.float32)


def call(layer, x):
    """A layer of `x` `[1, 1, 4]`, without memory."""
    mask, nothing = create_mask(1, 0), tf.zeros([1, 0, 4])
    if isinstance(layer, PositionwiseFF):
        return layer(x)
    if isinstance(layer, (MultiHeadAttn, TransformerLMLayer)):
        return layer(x, mask, nothing)
    return layer(x, tf.zeros([1, 1, 4]), tf.zeros([2, 3]), tf.zeros([2, 3]), mask, nothing)


@pytest.mark.parametrize("layer_class, sizes, norms", LAYERS)
def test_a_layer_adds_it_to_the_variance(layer_class, sizes, norms):
    """Weights that are zeros leave only the residual: of ±0.1, whose variance is 0.01, ±0.1 / sqrt(0.01 + 0.01)."""
    for epsilon in (1e-12, EPSILON):
        layer = layer_class(*sizes, kernel_initializer="zeros", layer_norm_epsilon=epsilon)
        layer.build()
        expected = 0.1
        for _ in range(norms):
            expected /= np.sqrt(expected**2 + epsilon)
        close(call(layer, rows(0.1, -0.1, -0.1, 0.1)), rows(*np.array([1, -1, -1, 1]) * expected), atol=0)


@pytest.mark.parametrize("layer_class, sizes, _", LAYERS)
def test_a_layer_s_config_holds_it_and_one_without_means_the_original_s(layer_class, sizes, _):
    layer = layer_class(*sizes, layer_norm_epsilon=EPSILON)
    assert_round_trips(layer)
    config = layer.get_config()
    assert config.pop("layer_norm_epsilon") == EPSILON
    assert layer_class.from_config(config).layer_norm_epsilon == 1e-12


@pytest.mark.parametrize("epsilon", [1, np.float64(0.5), np.float32(0.25)])
def test_layer_norm_takes_any_number(epsilon):
    """In a graph, other types than Python's float would become tensors of another type than the variance."""
    layer = LayerNorm(epsilon)
    layer.build([None, 2])
    expected = 1 / np.sqrt(1 + float(epsilon))
    close(tf.function(lambda x: layer(x))(rows(1.0, -1.0)), rows(expected, -expected))


# ---------------------------------------- networks


@pytest.mark.slow
def test_scores_and_memory_are_those_of_the_plain_port(pair):
    lm, model = pair(n_layer=2)
    mems, expected_mems = lm.initial_mems(2), model.initial_mems(2)
    for start in (0, 5, 10):
        tokens, labels = TOKENS[:, start : start + 5], LABELS[:, start : start + 5]
        log_probs, _ = lm.log_probs(tokens, mems)
        close(log_probs, tf.transpose(model.log_probs(tokens.T, expected_mems), [1, 0, 2]))
        nll, mems = lm.score(tokens, labels, mems)
        expected, expected_mems = model.nll(tokens.T, labels.T, expected_mems)
        close(nll, expected.numpy().T)
        for mem, expected_mem in zip(mems, expected_mems, strict=True):
            close(mem, tf.transpose(expected_mem, [1, 0, 2]))
    other, _ = pair(n_layer=2, layer_norm_epsilon=1e-12)
    assert np.abs(other.score(TOKENS, LABELS)[0] - lm.score(TOKENS, LABELS)[0]).max() > 5e-4  # ten times `close`'s


@pytest.mark.parametrize("recompute", [pytest.param(False, marks=pytest.mark.slow), True])
def test_loss_and_gradients_in_training_are_those_of_the_plain_port(pair, recompute):
    lm, model = pair(recompute=recompute)
    with tf.GradientTape() as tape:
        expected_loss = tf.reduce_mean(model.nll(TOKENS.T, LABELS.T, model.initial_mems(2))[0])
    expected = tape.gradient(expected_loss, model.weights)
    with tf.GradientTape() as tape:
        hidden, _ = lm.network(TOKENS, training=True)
        loss = tf.reduce_mean(lm.softmax.nll(hidden, LABELS, lm.network.embedding))
    gradients = tape.gradient(loss, {name: variable.value for name, variable in weights_by_name(lm).items()})
    close(loss, expected_loss)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        close(tf.convert_to_tensor(gradient), tf.convert_to_tensor(expected[name]))


# ---------------------------------------- inference with cached keys and values
# Its layers are written anew, see `run_layers`: with another epsilon it would not be that of `score`.


def test_cached_segments_are_those_of_the_network(pair):
    network = pair()[0].network
    weights, state, mems = precompute(network, 5), initial_state(network, 2, 5), network.initial_mems(2)
    for start in (0, 5, 10):
        tokens = tf.constant(TOKENS[:, start : start + 5])
        expected, mems = network(tokens, mems)
        hidden, state = cached_forward(network, weights, tokens, state)
        close(hidden, expected)


@pytest.mark.slow
def test_evaluate_is_the_mean_of_score(pair, small_batches):
    lm, (tokens, labels) = pair()[0], small_batches(n=3)
    nll, mems = [], None
    for segment in zip(tokens, labels, strict=True):
        found, mems = lm.score(*segment, mems)
        nll.append(found)
    lm.compile(run_eagerly=True)
    close(lm.evaluate(tf.data.Dataset.from_tensor_slices((tokens, labels)), verbose=0), np.mean(nll))


@pytest.mark.slow
def test_a_text_read_and_written_has_the_numbers_of_score(pair):
    for lm in (pair(same_length=True)[0], vanilla(context_len=40)):  # a token sees the same, however it is computed
        session = Session(lm, batch_size=2)
        read = session.read(TOKENS[:, :4])
        written, nll = session.write(5, temperature=0, with_nll=True)
        found = np.concatenate([read, nll, session.read(TOKENS[:, 4:7])], 1)
        text = np.concatenate([TOKENS[:, :4], written, TOKENS[:, 4:7]], 1)
        close(found[:, 1:], lm.score(text[:, :-1], text[:, 1:])[0])
        np.testing.assert_array_equal(lm.generate(TOKENS[:, :4], 5, temperature=0), text[:, :9])


@pytest.mark.parametrize("of", [pytest.param(lambda pair: pair()[0], marks=pytest.mark.slow), lambda pair: vanilla()])
def test_a_sliding_window_has_the_numbers_of_score(pair, of):
    lm = of(pair)
    expected = [lm.score(IDS[:1, i : i + 6], IDS[:1, i + 1 : i + 7])[0] for i in range(10)]
    expected = np.concatenate([expected[0][0], *(nll[0, -1:] for nll in expected[1:])])
    close(sliding_window_nll(lm, IDS[0], window=6), expected)


@pytest.mark.slow
def test_a_served_model_has_the_numbers_of_score(pair):
    lm, _ = pair()
    served = LanguageModelSignatures(lm, top_n=3, max_tokens=50)
    state = served.initial_state(tf.constant(2))["state"]
    answer = served.score(tf.constant(TOKENS), tf.constant(LABELS), tf.constant(state))
    close(answer["nll"], lm.score(TOKENS, LABELS)[0])


# ---------------------------------------- saved models


@pytest.mark.parametrize("of", [lambda pair: pair()[0], lambda pair: pair()[0].network, lambda pair: vanilla()])
def test_a_keras_file_holds_it_and_a_config_without_means_the_original_s(pair, of, tmp_path):
    model = of(pair)
    model.save(tmp_path / "m.keras")
    loaded = keras.saving.load_model(tmp_path / "m.keras")
    assert loaded.get_config() == model.get_config()
    for got, expected in zip(loaded(TOKENS), model(TOKENS), strict=True):
        np.testing.assert_array_equal(got, expected)

    config = model.get_config()
    assert config.pop("layer_norm_epsilon") == EPSILON
    assert type(model).from_config(config).get_config()["layer_norm_epsilon"] == 1e-12


# ---------------------------------------- runs


@pytest.mark.parametrize("of", [lambda pair: pair()[0], pytest.param(lambda pair: vanilla(), marks=pytest.mark.slow)])
def test_a_run_is_opened_and_averaged_with_it(pair, of, run_dir, tmp_path):
    lm, folder = of(pair), RunFolder(run_dir)
    model = {key: lm.get_config()[key] for key in (*SMALL, "mem_len", "layer_norm_epsilon")}
    folder.create({"dataset": "text"}, model, [word_vocab()], lm, step=3)
    average_checkpoints(folder.path, tmp_path / "averaged", num_last_checkpoints=1)
    for path in (folder.path, tmp_path / "averaged"):
        np.testing.assert_array_equal(txl_tf.load_run(path)[0].score(TOKENS, LABELS)[0], lm.score(TOKENS, LABELS)[0])


def test_a_run_whose_config_does_not_say_it_has_the_original_s(small_lm, run_dir):
    lm, folder = small_lm(n_layer=1), RunFolder(run_dir)
    folder.create({"dataset": "text"}, {**SMALL, "n_layer": 1, "mem_len": 4}, [word_vocab()], lm, step=3)
    config = json.loads((run_dir / "config.json").read_text())
    assert "layer_norm_epsilon" not in config["model"]
    loaded, _ = txl_tf.load_run(run_dir)
    assert loaded.network.layer_norm_epsilon == 1e-12
    np.testing.assert_array_equal(loaded.score(TOKENS, LABELS)[0], lm.score(TOKENS, LABELS)[0])

    config = folder.read_config()
    check_same_config(folder, {**config, "model": {**config["model"], "layer_norm_epsilon": 1e-12}})
    with raises_naming(ValueError, "model.layer_norm_epsilon", 1e-12, 1e-05):
        check_same_config(folder, {**config, "model": {**config["model"], "layer_norm_epsilon": 1e-5}})


@pytest.mark.slow
def test_a_run_is_trained_and_evaluated_with_it_and_goes_on_with_no_other(run_dir, text_file):
    trained = train_run(run_dir, text_file, model={"layer_norm_epsilon": EPSILON}, training={"train_steps": 6})
    lm, vocab = txl_tf.load_run(run_dir)
    assert lm.network.layer_norm_epsilon == EPSILON
    assert evaluate_run(run_dir)["valid"] == pytest.approx(trained["valid"], rel=1e-6)

    rows, length = TINY_RUN["evaluation"]["eval_batch_size"], TINY_RUN["training"]["tgt_len"]
    nll, mems = [], None
    for tokens, labels in txl_tf.segments(vocab.encode(TEXT)[-225:], rows, length):  # 5 %, which `valid` is
        found, mems = lm.score(tokens, labels, mems)
        nll.append(found)
    assert np.concatenate(nll, 1).mean(dtype=np.float64) == pytest.approx(trained["valid"], rel=1e-5)

    with raises_naming(ValueError, "model.layer_norm_epsilon", 0.01, 1e-12):
        train_run(run_dir, text_file)
