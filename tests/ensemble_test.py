"""Several encoder-decoders that generate together, against a loop over the mean of their probabilities."""

import keras
import numpy as np
import pytest
from helpers import raises_parameter, randomise

import txl_tf

START, END, VOCAB, MOST = 1, 2, 6, 7
SIZES = {"d_model": 8, "num_heads": 2, "dff": 12, "input_vocab_size": 7, "target_vocab_size": VOCAB, "max_len": 20}
SOURCE = np.array([[3, 4, 5, 6], [6, 3, 0, 0], [5, 5, 4, 0]], np.int32)
OPTIONS = {"start": START, "end": END, "max_new_tokens": MOST}


class Doubled(txl_tf.Transformer):
    """A model whose keys and values cannot be cached."""

    def call(self, inputs, training=None, dropout_key=None):
        return 2 * super().call(inputs, training=training, dropout_key=dropout_key)


def make(seed, cls=txl_tf.Transformer, **options):
    model = cls(**{**SIZES, "num_layers": 1, **options})
    randomise(model, scale=0.6, seed=seed)
    return model


@pytest.fixture(scope="module")
def models():
    """Two models that differ in all that may differ."""
    return [make(0), make(1, num_layers=2, d_model=12, pos_embed="rotary", norm_first=True)]


def mean_log_probs(models, source, target):
    """The logarithm of the mean of the models' probabilities after each token of `target`, `[target, V]`."""
    logits = [model((source[None], np.array([target], np.int32)))[0].numpy().astype(np.float64) for model in models]
    probs = [np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in logits]
    return np.log(np.mean(probs, 0))


def greedy(models, source):
    """The likeliest tokens one after the other, and the log-probability of all."""
    target, total = [START], 0.0
    while len(target) <= MOST and target[-1] != END:
        log_probs = mean_log_probs(models, source, target)[-1]
        log_probs[0] = -np.inf  # padding
        target.append(int(np.argmax(log_probs)))
        total += log_probs[target[-1]]
    return target[1:], total


@pytest.mark.parametrize("cls", [txl_tf.Transformer, pytest.param(Doubled, marks=pytest.mark.ci)])
def test_a_symbol_has_the_mean_of_the_probabilities(models, cls):
    models = [models[0], models[1] if cls is txl_tf.Transformer else make(2, cls)]
    ids, scores = txl_tf.Ensemble(models).generate(SOURCE, **OPTIONS)
    for source, row, score in zip(SOURCE, ids.numpy(), scores.numpy(), strict=True):
        target, total = greedy(models, source[source > 0])
        assert row[: len(target)].tolist() == target and not row[len(target) :].any()
        assert score == pytest.approx(total, rel=1e-4)


@pytest.mark.ci
def test_the_score_of_a_beam_search_is_that_of_the_mean(models):
    ids, scores = txl_tf.Ensemble(models).generate(SOURCE, beam_size=3, n_best=3, length_penalty=0.0, **OPTIONS)
    assert (np.diff(scores) <= 0).all()
    for source, rows, row_scores in zip(SOURCE, ids.numpy(), scores.numpy(), strict=True):
        assert len({row.tobytes() for row in rows}) == 3
        for row, score in zip(rows, row_scores, strict=True):
            target = row[row > 0]
            log_probs = mean_log_probs(models, source[source > 0], [START, *target[:-1]])
            assert score == pytest.approx(sum(log_probs[np.arange(len(target)), target]), rel=1e-4)


@pytest.mark.ci
@pytest.mark.parametrize("options", [{"beam_size": 3}, {"temperature": 1.0, "seed": 4}], ids=str)
def test_equal_models_generate_what_one_of_them_does(models, options):
    expected, expected_scores = models[0].generate(SOURCE, **options, **OPTIONS)
    ids, scores = txl_tf.Ensemble([models[0]] * 3).generate(SOURCE, **options, **OPTIONS)
    np.testing.assert_array_equal(ids, expected)
    np.testing.assert_allclose(scores, expected_scores, rtol=1e-4)


@pytest.mark.ci
def test_a_part_that_is_replaced_has_an_effect(models):
    model = make(3)
    ensemble = txl_tf.Ensemble([model, models[1]])
    before = ensemble.generate(SOURCE, **OPTIONS)[1]
    dense = keras.layers.Dense(VOCAB)
    dense.build([None, None, SIZES["d_model"]])
    model.final_layer = dense
    assert not np.allclose(ensemble.generate(SOURCE, **OPTIONS)[1], before)


@pytest.mark.parametrize(
    "given", [[], ["one"], "one", 3, ["one", 3], ["one", "max_len"], ["one", "input_vocab_size"]], ids=str
)
def test_models_that_cannot_generate_together_are_refused(models, given):
    def model_of(x):
        return models[0] if x == "one" else make(4, **{x: 9}) if isinstance(x, str) else x

    with raises_parameter("models"):
        txl_tf.Ensemble([*map(model_of, given)] if isinstance(given, list) else model_of(given))
