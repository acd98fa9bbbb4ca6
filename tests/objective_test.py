"""The softmax of a language model with tables of its own; label smoothing and the z-loss in training."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import SMALL, eagerly, raises_parameter, randomise

import txl_tf
from txl_tf.layers import AdaptiveEmbedding, AdaptiveSoftmax

SLOW = pytest.mark.slow
BINS = {"cutoffs": [6, 14], "div_val": 2}
BOTH = {"label_smoothing": 0.2, "z_loss": 0.05}
STEP = 0.1  # learning rate of SGD


@pytest.fixture
def eager():
    with eagerly():
        yield


def make(seed=1, **options):
    model = options.pop("model", txl_tf.TransformerXLLM)
    lm = model(**{**SMALL, "n_layer": 1, "mem_len": 4, "dropout": 0.0, "seed": 0, **options})
    randomise(lm, seed, 0.5)
    return lm


def batch(rows=4, n=6):
    text = np.random.default_rng(0).integers(0, SMALL["n_token"], [rows, n]).astype(np.int32)
    return text[:, :-1], text[:, 1:]


def objective_in_loops(lm, tokens, labels, label_smoothing, z_loss):
    """The objective's mean over the labels, of the logits of each softmax, one word after the other."""
    hidden, _ = lm.network(tokens)
    tables, projs, biases, clusters = lm.softmax.weights_with(lm.network.embedding)
    ends = [0, *lm.network.cutoffs, SMALL["n_token"]]
    tables = tf.split(tables[0], np.diff(ends)) if len(tables) < len(biases) else [x.value for x in tables]
    total = 0.0
    for h, label in zip(tf.reshape(hidden, [-1, SMALL["d_model"]]), labels.ravel(), strict=True):
        inner = [h if proj is None else tf.linalg.matvec(proj.value, h) for proj in projs]
        logits = [tf.linalg.matvec(table, x) + b for table, x, b in zip(tables, inner, biases, strict=True)]
        if clusters:
            entries = tf.linalg.matvec(clusters[0].value, inner[0]) + clusters[1]
            logits[0] = tf.concat([logits[0], entries], 0)
        log_z = [tf.reduce_logsumexp(x) for x in logits]
        log_probs = []
        for word in range(SMALL["n_token"]):
            i = np.searchsorted(ends[1:-1], word, side="right")
            first = word if i == 0 else ends[1] + i - 1
            log_prob = logits[0][first] - log_z[0]
            log_probs.append(log_prob if i == 0 else log_prob + logits[i][word - ends[i]] - log_z[i])
        of_label = np.searchsorted(ends[1:-1], label, side="right")
        total -= (1 - label_smoothing) * log_probs[label] + label_smoothing * tf.reduce_mean(log_probs)
        total += z_loss * (log_z[0] ** 2 + (log_z[of_label] ** 2 if of_label else 0.0))
    return total / labels.size


def name_of(weight):
    """The path of a weight without the name of the model."""
    return weight.path.partition("/")[2]


def trained(lm, data, **options):
    """The loss that a step of SGD reports, and the weights after it."""
    lm.compile(keras.optimizers.SGD(STEP), **options)
    loss = lm.train_on_batch(*data)
    return float(np.ravel(loss)[0]), {name_of(weight): weight.numpy() for weight in lm.trainable_variables}


@pytest.mark.parametrize("options", [{}, BINS], ids=str)
def test_a_step_follows_the_gradient_of_the_objective_and_reports_the_nll(options, eager):
    lm, data = make(**options, **BOTH), batch(rows=2)
    nll, _ = lm.score(*data)
    with tf.GradientTape() as tape:
        objective = objective_in_loops(lm, *data, **BOTH)
    weights = lm.trainable_variables
    gradients = tape.gradient(objective, [weight.value for weight in weights])
    expected = {name_of(weight): weight - STEP * g for weight, g in zip(weights, gradients, strict=True)}
    loss, found = trained(lm, data)
    np.testing.assert_allclose(loss, tf.reduce_mean(nll), rtol=1e-6)
    for path, array in found.items():
        np.testing.assert_allclose(array, expected[path], rtol=0, atol=2e-5, err_msg=path)


def test_each_part_of_the_objective_counts(eager):
    data = batch()
    steps = [trained(make(**options), data)[1] for options in ({}, {"label_smoothing": 0.2}, {"z_loss": 0.05}, BOTH)]
    for i, one in enumerate(steps):
        for other in steps[:i]:
            assert max(np.abs(one[path] - other[path]).max() for path in one) > 1e-4


@pytest.mark.ci
@pytest.mark.parametrize(
    "options",
    [
        {"static_shapes": True},
        pytest.param({"jit_compile": True, "static_shapes": True}, marks=SLOW),
        pytest.param({"gradient_accumulation_steps": 2}, marks=SLOW),
    ],
    ids=str,
)
def test_the_objective_is_the_same_in_every_kind_of_step(options):
    data = batch()
    loss, expected = trained(make(**BINS, **BOTH), data, run_eagerly=True)
    found_loss, found = trained(make(**BINS, **BOTH), data, **options)
    np.testing.assert_allclose(found_loss, loss, rtol=1e-6)
    for path, array in found.items():
        np.testing.assert_allclose(array, expected[path], rtol=0, atol=1e-5, err_msg=path)


@SLOW
def test_two_replicas_follow_the_same_objective(two_replicas):
    data = batch()
    loss, expected = trained(make(**BINS, **BOTH), data)
    with two_replicas.scope():
        lm = make(**BINS, **BOTH)
    found_loss, found = trained(lm, data)
    np.testing.assert_allclose(found_loss, loss, rtol=1e-6)
    for path, array in found.items():
        np.testing.assert_allclose(array, expected[path], rtol=0, atol=1e-5, err_msg=path)


def test_the_objective_may_change_between_two_steps():
    data, lm = batch(), make()
    lm.compile(keras.optimizers.SGD(STEP))
    lm.train_on_batch(*data)
    before = lm.get_weights()
    lm.z_loss, lm.label_smoothing = BOTH["z_loss"], BOTH["label_smoothing"]
    lm.reset_memory()
    lm.train_on_batch(*data)
    other = make(**BOTH)
    other.set_weights(before)
    other.compile(keras.optimizers.SGD(STEP), run_eagerly=True)
    other.train_on_batch(*data)
    for found, expected in zip(lm.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


class Tempered(txl_tf.TransformerXLLM):
    """A call of a user's own, which returns log-probabilities."""

    def call(self, tokens, mems=None):
        log_probs, new_mems = super().call(tokens, mems)
        return tf.nn.log_softmax(0.5 * log_probs), new_mems


def test_a_call_of_ones_own_has_label_smoothing_and_no_z_loss(eager):
    data, lm = batch(), make(model=Tempered, label_smoothing=0.2)
    with tf.GradientTape() as tape:
        log_probs, _ = lm(data[0])
        of_label = tf.gather(log_probs, data[1], batch_dims=2)
        objective = -tf.reduce_mean(0.8 * of_label + 0.2 * tf.reduce_mean(log_probs, -1))
    weights = lm.trainable_variables
    gradients = tape.gradient(objective, [weight.value for weight in weights])
    expected = {name_of(weight): weight - STEP * g for weight, g in zip(weights, gradients, strict=True)}
    for path, array in trained(lm, data)[1].items():
        np.testing.assert_allclose(array, expected[path], rtol=0, atol=2e-5, err_msg=path)
    with raises_parameter("z_loss", 0.1):
        trained(make(model=Tempered, z_loss=0.1), data)


# ---------------------------------------- tables of the softmax's own


@pytest.mark.parametrize("options", [{"d_embed": 6}, {**BINS, "proj_share_all_but_first": True}], ids=str)
def test_a_softmax_with_its_own_tables_is_that_of_another_embedding(options, eager):
    """With the tables copied to the embedding of a second model, that model has the same softmax."""
    lm, tied = make(tie_weight=False, **options), make(**options)
    for table in lm.softmax.tables:
        assert not any(table is other for other in lm.network.embedding.tables)
    hidden = tf.random.stateless_normal([2, 3, SMALL["d_model"]], [1, 2])
    embedding = AdaptiveEmbedding(
        **{name: getattr(lm.network, name) for name in ("n_token", "d_embed", "cutoffs", "div_val")},
        d_proj=SMALL["d_model"],
    )
    embedding.build()
    for table, own in zip(embedding.tables, lm.softmax.tables, strict=True):
        table.assign(own)
    for proj, shared in zip(embedding.projs, lm.network.embedding.projs, strict=True):
        proj.assign(shared)
    names = {name_of(weight): weight for weight in lm.softmax.weights}
    for weight in tied.softmax.weights:
        weight.assign(names[name_of(weight)])
    expected = tied.softmax(hidden, embedding=embedding)
    np.testing.assert_array_equal(lm.softmax(hidden, embedding=lm.network.embedding), expected)


@pytest.mark.ci
@pytest.mark.parametrize("model", [txl_tf.TransformerXLLM, txl_tf.TransformerLM])
def test_all_of_the_tables_are_trained_saved_and_restored(model, tmp_path, eager):
    lm, data = make(model=model, tie_weight=False, **BINS), batch()
    before = [table.numpy() for table in lm.softmax.tables]
    trained(lm, data)
    assert all(np.abs(table - array).max() > 0 for table, array in zip(lm.softmax.tables, before, strict=True))
    lm.save(tmp_path / "m.keras")
    loaded = keras.saving.load_model(tmp_path / "m.keras")
    np.testing.assert_array_equal(loaded.score(*data)[0], lm.score(*data)[0])
    nll, _ = lm.score(*data)
    np.testing.assert_allclose(lm.first_nll(*data), nll, rtol=1e-5)


def test_the_original_program_has_no_such_tables(tmp_path):
    with raises_parameter("tie_weight", False):
        txl_tf.save_tf1_checkpoint(make(tie_weight=False), tmp_path / "model.ckpt-0")


def test_a_softmax_with_its_own_tables_needs_no_embedding(tmp_path):
    hidden = keras.Input([None, 8])
    softmax = AdaptiveSoftmax(23, 8, 8, tie_weight=False)
    model = keras.Model(hidden, softmax(hidden))
    x = np.random.default_rng(0).normal(size=[2, 3, 8]).astype(np.float32)
    expected = model(x)
    np.testing.assert_allclose(tf.reduce_sum(tf.exp(expected), -1), np.ones([2, 3]), rtol=1e-5)
    model.save(tmp_path / "m.keras")
    np.testing.assert_array_equal(keras.saving.load_model(tmp_path / "m.keras")(x), expected)
    projected = AdaptiveSoftmax(23, 6, 8, tie_weight=False)  # whose projection is the embedding's
    with raises_parameter("embedding", None):
        projected(x)


@pytest.mark.parametrize(
    "name, value", [("label_smoothing", 1.0), ("label_smoothing", -0.1), ("z_loss", -1e-4), ("tie_weight", 1)]
)
def test_other_values_are_refused(name, value):
    with raises_parameter(name, value):
        make(**{name: value})
