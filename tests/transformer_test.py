"""The encoder-decoder: padding never counts, dropout is the same on any number of replicas, cached equals uncached."""

import numpy as np
import pytest
import tensorflow as tf
from helpers import randomise

import txl_tf
from txl_tf.models.transformer import Transformer

SMALL = {
    "num_layers": 2, "d_model": 12, "num_heads": 3, "dff": 20, "input_vocab_size": 9, "target_vocab_size": 9,
    "max_len": 30, "rate": 0.0,
}  # fmt: skip
ALL = {"norm_first": True, "share_embeddings": True}
OPTIONS = [
    ALL,
    *(pytest.param(one, marks=pytest.mark.slow) for one in ({"norm_first": True}, {"share_embeddings": True})),
]
PLAIN = pytest.param({}, marks=pytest.mark.slow)


def make(**options):
    model = Transformer(**{**SMALL, **options})
    randomise(model)
    return model


def pairs(rows=4, source=6, target=5, seed=0):
    rng = np.random.default_rng(seed)
    sources = rng.integers(3, 9, [rows, source]).astype(np.int32)
    targets = rng.integers(3, 9, [rows, target]).astype(np.int32)
    targets[:, 0] = 1
    return sources, targets


@pytest.mark.parametrize("options", [*OPTIONS, PLAIN], ids=str)
def test_padding_never_changes_a_result(options):
    model, (source, target) = make(**options), pairs()
    expected = model((source, target)).numpy()
    padded = model((np.pad(source, [[0, 0], [0, 4]]), np.pad(target, [[0, 0], [0, 3]])))
    np.testing.assert_allclose(padded[:, :5], expected, atol=2e-5)


def test_a_row_is_what_it_is_alone_and_the_future_does_not_count():
    model, (source, target) = make(), pairs()
    whole = model((source, target)).numpy()
    np.testing.assert_allclose(model((source[2:3], target[2:3]))[0], whole[2], atol=2e-5)
    changed = target.copy()
    changed[:, 3:] = 4
    np.testing.assert_allclose(model((source, changed))[:, :3], whole[:, :3], atol=2e-5)
    other = source.copy()
    other[:, 0] = 8
    assert np.abs(model((other, target)) - whole).max() > 1e-3


def test_the_loss_is_the_mean_over_labels_that_are_no_padding_smoothed():
    model, (source, target) = make(num_layers=1, label_smoothing=0.1), pairs()
    labels = np.pad(target[:, 1:], [[0, 0], [0, 1]])
    labels[1, 2:] = 0
    logits = model((source, target)).numpy().astype(np.float64)
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    nll = smoothed = right = count = 0
    for b, t in np.argwhere(labels):
        nll -= log_probs[b, t, labels[b, t]]
        smoothed -= 0.9 * log_probs[b, t, labels[b, t]] + 0.1 * log_probs[b, t].mean()
        right += logits[b, t].argmax() == labels[b, t]
        count += 1
    found = model.loss_of((source, target), tf.constant(labels))
    np.testing.assert_allclose(found, [nll, smoothed, right, count], rtol=1e-5)


def greedy(model, source, start, end, most):
    """Without a cache: the whole targets again for every symbol."""
    targets, scores = np.full([len(source), 1], start, np.int32), np.zeros(len(source))
    for _ in range(most):
        logits = model((source, targets))[:, -1].numpy().astype(np.float64)
        log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        log_probs[:, 0] = -np.inf
        written = np.logical_not(np.any(targets[:, 1:] == end, 1))
        best = np.where(written, log_probs.argmax(-1), 0)
        scores += np.where(written, np.take_along_axis(log_probs, best[:, None], 1)[:, 0], 0)
        targets = np.append(targets, best[:, None], 1).astype(np.int32)
    return targets[:, 1:], scores


@pytest.mark.parametrize("options", [*OPTIONS, {}], ids=str)
def test_cached_greedy_decoding_is_the_uncached_one(options):
    model, (source, _) = make(**options), pairs(rows=5)
    source[1, 3:] = 0
    ids, scores = model.generate(source, start=1, end=2, max_new_tokens=7)
    expected, expected_scores = greedy(model, source, 1, 2, 7)
    np.testing.assert_array_equal(ids, expected)
    np.testing.assert_allclose(scores, expected_scores, rtol=1e-4)


def test_sampling_follows_the_seed_of_a_row_and_no_other_row():
    model, (source, _) = make(num_layers=1), pairs(rows=3)
    options = {"start": 1, "end": 2, "max_new_tokens": 9, "temperature": 1.0}
    whole, scores = model.generate(source, seed=[5, 6, 7], **options)
    alone, score = model.generate(source[1:2], seed=[6], **options)
    np.testing.assert_array_equal(whole[1], alone[0])
    np.testing.assert_allclose(scores[1], score[0], rtol=1e-4)
    other, _ = model.generate(source, seed=[8, 9, 10], **options)
    assert np.any(other != whole)
    coldest, _ = model.generate(source, seed=1, top_k=1, **options)
    np.testing.assert_array_equal(coldest, model.generate(source, **{**options, "temperature": 0.0})[0])


@pytest.mark.slow
def test_dropout_is_the_same_on_two_replicas_and_under_xla(two_replicas):
    def train(**options):
        model = make(rate=0.2, dropatt=0.1, dropact=0.1, seed=3)
        model.compile(txl_tf.make_optimizer(learning_rate=1e-2, train_steps=100), **options)
        dataset = tf.data.Dataset.from_tensors(pairs(rows=4)).repeat(6)
        history = model.fit(dataset, verbose=0).history
        return history["loss"][0], [weight.numpy() for weight in model.trainable_variables]

    loss, weights = train()
    with two_replicas.scope():
        of_two = train()
    for found, found_weights in (of_two, train(jit_compile=True), train(steps_per_execution=3)):
        assert found == pytest.approx(loss, rel=1e-5)
        for array, expected in zip(found_weights, weights, strict=True):
            np.testing.assert_allclose(array, expected, atol=2e-4)


@pytest.mark.slow
def test_fit_takes_arrays_and_generators_as_keras_does_and_learns():
    rng = np.random.default_rng(0)
    source = rng.integers(3, 9, [256, 5]).astype(np.int32)
    target = np.pad(source[:, ::-1], [[0, 0], [1, 1]], constant_values=((0, 0), (1, 2)))  # to be read backwards
    model = Transformer(**{**SMALL, "norm_first": True}, seed=0)
    model.compile(txl_tf.make_optimizer(learning_rate=1e-2, train_steps=400, warmup_steps=20))
    model.fit(source, target, batch_size=32, epochs=40, verbose=0)
    loss, accuracy = model.evaluate(source, target, verbose=0)
    assert loss < 0.2 and accuracy > 0.95
    ids, _ = model.generate(source[:20], start=1, end=2, max_new_tokens=8, beam_size=3)
    assert np.mean(ids[:, :6] == target[:20, 1:]) > 0.9


BAD_ARGUMENTS = [
    ({"source": np.array([3, 4])}, r"source must be integers \[batch, any\], got int64 \[2\]"),
    ({"source": np.array([[3.0]])}, "source must be integers"),
    ({"source": np.array([[9]])}, "source must hold ids between 0 and n_token - 1 = 8, found 9"),
    ({"source": np.ones([1, 31], int)}, "source must be at most max_len=30 long, got 31"),
    ({"source": np.array([[3], [0]])}, "source must have a symbol in every row, got padding alone in row 1"),
    ({"start": 0}, "start must be an integer from 1 to 8, got 0"),
    ({"end": 9}, "end must be an integer from 1 to 8, got 9"),
    ({"end": None, "beam_size": 2}, "end must be an integer from 1 to 8, got None"),
    ({"max_new_tokens": 31}, "max_new_tokens must be an integer from 1 to 30, got 31"),
    ({"beam_size": 0}, "beam_size must be an integer from 1 to 8, got 0"),
    ({"beam_size": 2, "n_best": 3}, "n_best must be an integer from 1 to 2, got 3"),
    ({"length_penalty": -1.0}, "length_penalty must be 0 or more, got -1.0"),
    ({"beam_size": 2, "temperature": 0.5}, "temperature must be 0 for a beam search, got 0.5"),
    ({"top_p": 0.0}, r"top_p must lie in \(0, 1\], got 0.0"),
]


def test_bad_arguments_of_generate_are_one_clear_error():
    model = make(num_layers=1)
    for changes, message in BAD_ARGUMENTS:
        arguments = {"source": np.array([[3, 4]]), "start": 1, "end": 2, **changes}
        with pytest.raises(ValueError, match=message):
            model.generate(arguments.pop("source"), **arguments)
            pytest.fail(f"no error: {changes}")


BAD_OPTIONS = [
    ({"num_heads": 5}, "d_model must be a multiple of num_heads=5, got 12"),
    ({"share_embeddings": True, "target_vocab_size": 8}, "vocabularies of one size, got input_vocab_size=9 and"),
    ({"rate": 1.0}, r"rate must lie in \[0, 1\), got 1.0"),
    ({"num_layers": 0}, "num_layers must be at least 1, got 0"),
    ({"d_model": 13, "num_heads": 1}, "d_model must be even"),
]


def test_bad_hyper_parameters_are_named():
    for options, message in BAD_OPTIONS:
        with pytest.raises(ValueError, match=message):
            Transformer(**{**SMALL, **options})
            pytest.fail(f"no error: {options}")


def test_a_loss_or_metrics_are_refused():
    with pytest.raises(ValueError, match="loss and metrics must be None: the model has its own"):
        make(num_layers=1).compile("adam", loss="mse")
