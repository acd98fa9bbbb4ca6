"""Padding of the encoder-decoder anywhere in a row gives, to the bit, what padding at the end gives."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import eagerly, randomise

import txl_tf
from txl_tf.kernels.packing import pack, packed_order, packed_positions, unpack

WIDTH, START, END = 8, 1, 2
RNG = np.random.default_rng(0)
SOURCES = [RNG.integers(3, 9, n) for n in (4, 2, 6, 3)]
TARGETS = [np.array([START, *source[::-1], END]) for source in SOURCES]


def at_the_end(rows, width=WIDTH):
    return keras.utils.pad_sequences(rows, width, padding="post")


def in_front(rows, width=WIDTH):
    return keras.utils.pad_sequences(rows, width)  # Keras's default


def between(rows, width=WIDTH, seed=1):
    rng, padded = np.random.default_rng(seed), np.zeros([len(rows), width], np.int32)
    for row, ids in zip(padded, rows, strict=True):
        row[np.sort(rng.permutation(width)[: len(ids)])] = ids
    return padded


def mixed(rows):
    return np.concatenate([in_front(rows[:2]), between(rows[2:])])


ANYWHERE = pytest.mark.parametrize("padded", [mixed, pytest.param(in_front, marks=pytest.mark.slow)])


def make(rate=0.0, **options):
    keras.utils.set_random_seed(0)
    model = txl_tf.Transformer(
        num_layers=1, d_model=8, num_heads=2, dff=12, input_vocab_size=9, target_vocab_size=9, rate=rate, dropatt=rate,
        max_len=WIDTH, seed=3, **options,
    )  # fmt: skip
    randomise(model)
    model.compile(keras.optimizers.SGD(0.1), run_eagerly=True, metrics=["sparse_top_k_categorical_accuracy"])
    return model


def test_packing_and_its_inverse():
    mask = tf.constant([[0, 1, 0, 1, 1], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]]) == 1
    x = tf.constant([[0, 7, 0, 8, 9], [5, 6, 0, 0, 0], [0, 0, 0, 0, 0]])
    np.testing.assert_array_equal(packed_order(mask), [[1, 3, 4, 0, 2], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]])
    np.testing.assert_array_equal(packed_positions(mask), [[3, 0, 4, 1, 2], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]])
    np.testing.assert_array_equal(unpack(mask, pack(mask, x)[1]), x)


@ANYWHERE
@pytest.mark.parametrize("options", [{"pos_embed": "learned"}, pytest.param({}, marks=pytest.mark.slow)])
def test_logits_and_attention_of_tokens_are_those_of_padding_at_the_end(padded, options):
    model = make(**options)
    source, target = padded(SOURCES), padded(TARGETS)
    logits, weights = model.forward((source, target))
    expected, expected_weights = model.forward((at_the_end(SOURCES), at_the_end(TARGETS)))
    sides = {"encoder_layer0": (source, source), "decoder_layer0_block1": (target, target)}
    sides["decoder_layer0_block2"] = target, source
    for b in range(len(SOURCES)):
        n = np.count_nonzero(target[b])
        np.testing.assert_allclose(logits[b][target[b] > 0], expected[b][:n], rtol=1e-5, atol=1e-6)
        for name, (queries, keys) in sides.items():
            probs, whole = (found[name][b].numpy() for found in (weights, expected_weights))
            is_query, is_key = queries[b] > 0, keys[b] > 0
            of_tokens, expected_probs = probs[:, is_query][..., is_key], whole[:, : is_query.sum(), : is_key.sum()]
            np.testing.assert_allclose(of_tokens, expected_probs, rtol=1e-5, atol=1e-6)
            assert np.all(probs[:, is_query][..., ~is_key] == 0)


@ANYWHERE
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize(
    "method", ["test_on_batch", *(pytest.param(name, marks=pytest.mark.slow) for name in ("train_on_batch", "fit"))]
)
def test_training_and_evaluation_are_those_of_padding_at_the_end(padded, shifted, method):
    """Dropout, weights of labels, and the metrics that compile was given, too."""

    def data(padded):
        source, target, weights = padded(SOURCES), padded(TARGETS), np.zeros([len(TARGETS), WIDTH - 1], np.float32)
        for row, of_row in zip(target, weights, strict=True):
            places = np.flatnonzero(row)[1:] - 1  # of the labels: one before their own
            of_row[places] = np.arange(1, 1 + len(places))
        return ((source, target[:, :-1]), target[:, 1:], weights) if shifted else (source, target, weights)

    model, expected, logs = make(rate=0.3), make(rate=0.3), []
    for one, (x, y, weights) in ((model, data(padded)), (expected, data(at_the_end))):
        if method == "fit":
            options = {"batch_size": 2, "shuffle": False, "verbose": 0}
            logs.append(one.fit(x, y, sample_weight=weights, **options).history)
        else:
            logs.append(getattr(one, method)(x, y, weights, return_dict=True))
    assert logs[0] == logs[1]
    for weight, other in zip(model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_array_equal(weight, other)


def test_targets_that_are_no_shifted_pair_stay_as_they_are():
    """A label of 0 is left out, wherever it stands, and the others belong to the tokens at their places."""
    source, target = at_the_end(SOURCES), at_the_end(TARGETS)
    read, labels = target[:, :-1], target[:, 1:].copy()
    labels[:, 1] = 0
    model = make()
    weights = np.ones(labels.shape, np.float32)
    weights[:, 1] = 0
    found = model.test_on_batch((source, read), labels, return_dict=True)
    expected = model.test_on_batch((source, read), target[:, 1:], sample_weight=weights, return_dict=True)
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6)


@ANYWHERE
@pytest.mark.parametrize(
    "search",
    [
        {},
        *(
            pytest.param(search, marks=pytest.mark.slow)
            for search in ({"beam_size": 3, "n_best": 2}, {"temperature": 1.0, "seed": 5})
        ),
    ],
)
def test_what_is_written_is_that_of_padding_at_the_end(padded, search):
    model = make()
    with eagerly():
        found, expected = (
            model.generate(source, start=START, end=END, max_new_tokens=2, **search)
            for source in (padded(SOURCES), at_the_end(SOURCES))
        )
    np.testing.assert_array_equal(found[0], expected[0])
    np.testing.assert_array_equal(found[1], expected[1])


def test_a_row_of_padding_alone_counts_nothing():
    model, nothing = make(), np.zeros([1, WIDTH], np.int32)
    source, target = at_the_end(SOURCES), at_the_end(TARGETS)
    expected = model.test_on_batch(source, target, return_dict=True)
    both = model.test_on_batch(np.concatenate([source, nothing]), np.concatenate([target, nothing]), return_dict=True)
    assert both == pytest.approx(expected, rel=1e-6)
    assert np.all(np.isfinite(model.attention(nothing, nothing)))
    assert model.train_on_batch(nothing, nothing) == [0.0, 0.0, 0.0]
    assert all(np.all(np.isfinite(weight)) for weight in model.get_weights())


@pytest.mark.slow
@ANYWHERE
def test_a_served_model_takes_padding_anywhere(padded, tmp_path):
    model, labels = make(), [target[1:] for target in TARGETS]
    txl_tf.export_saved_model(model, tmp_path / "served", search={"beam_size": 2})
    served = tf.saved_model.load(tmp_path / "served")
    found, expected = (served.translate(tf.constant(padding(SOURCES))) for padding in (padded, at_the_end))
    for name in expected:
        np.testing.assert_array_equal(found[name], expected[name])
    rows = padded(labels)
    nll = served.score(tf.constant(padded(SOURCES)), tf.constant(rows))["nll"].numpy()
    whole = served.score(tf.constant(at_the_end(SOURCES)), tf.constant(at_the_end(labels)))["nll"].numpy()
    for row, of_row, of_whole in zip(rows, nll, whole, strict=True):
        np.testing.assert_array_equal(of_row[row > 0], of_whole[: np.count_nonzero(row)])
        assert not of_row[row == 0].any()
