"""Beam search against brute force over all targets."""

import functools
import itertools

import numpy as np
import pytest
import tensorflow as tf
from helpers import raises_parameter, randomise

from txl_tf.vanilla.generation import beam_search, sample_sequences
from txl_tf.vanilla.transformer import Transformer

START, END, MOST, VOCAB = 1, 2, 4, 6  # symbols 3, 4, 5 and the end may be written, and the start


@pytest.fixture(scope="module")
def model():
    model = Transformer(
        num_layers=1, d_model=8, num_heads=2, dff=12, input_vocab_size=7, target_vocab_size=VOCAB, max_len=20, rate=0.0
    )
    randomise(model, scale=0.6)
    return model


def all_targets():
    """Every target of at most MOST symbols: those that end, then those that do not."""
    symbols = [symbol for symbol in range(1, VOCAB) if symbol != END]
    ended = [(*body, END) for n in range(MOST) for body in itertools.product(symbols, repeat=n)]
    return ended, list(itertools.product(symbols, repeat=MOST))


def score_all(model, source, length_penalty):
    """`{target: score}` of those that end, and of those that do not."""
    groups = []
    for targets in all_targets():
        scores = {}
        for n in sorted({len(target) for target in targets}):
            some = [target for target in targets if len(target) == n]
            inputs = np.array([[START, *target[:-1]] for target in some], np.int32)
            logits = model((np.repeat(source[None], len(some), 0), inputs)).numpy().astype(np.float64)
            log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
            for target, row in zip(some, log_probs, strict=True):
                total = sum(row[t, symbol] for t, symbol in enumerate(target))
                scores[target] = total / ((5 + n) / 6) ** length_penalty
        groups.append(scores)
    return groups


SOURCE = np.array([[3, 4, 5, 6], [6, 3, 0, 0]], np.int32)


@pytest.fixture(scope="module")
def wide(model):
    """What a search with a length penalty finds whose beam is wider than all targets are many: `(ids, scores)`."""
    return functools.cache(
        lambda length_penalty: model._beam_search(SOURCE, START, END, MOST, 400, 400, length_penalty)
    )


@pytest.mark.parametrize(
    "length_penalty", [pytest.param(0.0, marks=pytest.mark.slow), 0.6, pytest.param(2.0, marks=pytest.mark.slow)]
)
def test_a_wide_beam_finds_the_best_of_all_targets_whether_they_end_or_not(model, wide, length_penalty):
    wide = wide(length_penalty)
    for b in range(2):
        ended, unended = score_all(model, SOURCE[b][SOURCE[b] > 0], length_penalty)
        best = sorted({**ended, **unended}.items(), key=lambda item: -item[1])[:30]
        assert {END in target for target, _ in best} == {True, False}
        for k, (target, score) in enumerate(best):
            assert tuple(symbol for symbol in wide[0][b, k].numpy() if symbol) == target
            assert float(wide[1][b, k]) == pytest.approx(score, rel=1e-4)


class Speller:
    """A model of one target, 3 4 5 3 4 5 END, that ends too early with a small probability. It stands for its search.

    The likeliest symbol has a probability of 0.99, all others have the same.
    """

    target_vocab_size, loss_dtype, target = VOCAB, tf.float32, [3, 4, 5, 3, 4, 5, END]

    def start_decoding(self, source, rows_each, most):
        return (tf.zeros([1, len(source) * rows_each, most, 1]),), None

    def decode_step(self, ids, place, caches, nothing):
        right = tf.gather(self.target, tf.minimum(place, len(self.target) - 1))
        probs = tf.where(tf.range(VOCAB) == right, 0.99, 0.01 / (VOCAB - 1))
        return tf.math.log(tf.repeat(probs[None], len(ids), 0)), caches


@pytest.mark.parametrize("most", [3, 5, 6, 7, 9])
def test_a_beam_does_not_prefer_a_target_because_the_right_one_could_not_end(most):
    ids, scores = beam_search(Speller(), SOURCE[:1], START, END, most, 4, 4, 0.6)
    right = Speller.target[:most]
    assert ids[0, 0, : len(right)].numpy().tolist() == right and not ids[0, 0, len(right) :].numpy().any()
    assert float(scores[0, 0]) == pytest.approx(len(right) * np.log(0.99) / ((5 + len(right)) / 6) ** 0.6, rel=1e-4)
    assert np.all(np.diff(scores[0]) <= 0)


class CountingSpeller(Speller):
    """A `Speller` that counts its steps."""

    def __init__(self):
        self.steps = 0

    def decode_step(self, *arguments):
        self.steps += 1
        return super().decode_step(*arguments)


def test_a_search_stops_when_the_targets_to_return_cannot_change():
    steps = {}
    for n_best in (1, 4):
        speller = CountingSpeller()
        beam_search(speller, SOURCE[:1], START, END, 20, 4, n_best, 0.6)
        steps[n_best] = speller.steps
    assert len(Speller.target) <= steps[1] < steps[4]


@pytest.mark.parametrize("length_penalty", [0.0, 1.0])
def test_the_best_target_alone_is_the_first_of_several(model, length_penalty):
    source = np.random.default_rng(5).integers(3, 7, [8, 5]).astype(np.int32)
    options = {"start": START, "end": END, "max_new_tokens": 9, "beam_size": 4, "length_penalty": length_penalty}
    several, scores = model.generate(source, n_best=4, **options)
    best, best_scores = model.generate(source, **options)
    np.testing.assert_array_equal(best, several[:, 0])
    np.testing.assert_allclose(best_scores, scores[:, 0], rtol=1e-5)


@pytest.mark.ci
@pytest.mark.parametrize(
    "options",
    [{}, {"beam_size": 2, "n_best": 2}, pytest.param({"temperature": 1.0, "seed": 3}, marks=pytest.mark.slow)],
    ids=str,
)
def test_suppressed_symbols_are_not_written(options, model):
    bias = model.final_layer.bias.numpy()
    source = np.random.default_rng(4).integers(3, 7, [8, 5]).astype(np.int32)
    options = {"start": START, "end": END, "max_new_tokens": 8, **options}
    model.final_layer.bias.assign([0.0, 8.0, 0.0, 4.0, 8.0, 4.0])
    try:
        likely = model.generate(source, **options)[0]
        ids, scores = model.generate(source, suppress_tokens=(i for i in [START, 4]), **options)
    finally:
        model.final_layer.bias.assign(bias)
    assert {*likely.numpy().ravel()} & {START, 4}
    assert {*ids.numpy().ravel()} <= {0, END, 3, 5} and np.all(scores.numpy() > -200)


def test_the_highest_temperatures_write_no_padding_and_no_suppressed_symbols(model):
    """All other symbols are equally likely then."""
    source, options = np.tile([[3, 4, 5]], [100, 1]), {"start": START, "end": END, "max_new_tokens": 1}
    for temperature in (1e9, 1e30):
        sampling = {"temperature": temperature, "seed": np.arange(100)}
        ids, scores = model.generate(source, suppress_tokens=[START, 4], **sampling, **options)
        assert {*ids.numpy()[:, 0]} == {END, 3, 5} and np.all(scores.numpy() > -200)


@pytest.mark.parametrize(
    "given, name",
    [([END], "suppress_tokens"), ([VOCAB], "suppress_tokens"), (3, "suppress_tokens"), ([1, 3], "beam_size")],
)
def test_symbols_that_cannot_be_suppressed_are_refused(model, given, name):
    with raises_parameter(name):
        model.generate(SOURCE, start=START, end=END, suppress_tokens=given, beam_size=4)


def test_some_symbol_is_not_suppressed(model):
    with raises_parameter("suppress_tokens"):
        model.generate(SOURCE, start=START, end=None, max_new_tokens=3, suppress_tokens=[*range(1, VOCAB)])


@pytest.mark.ci
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 3}, {"beam_size": 3, "n_best": 2}], ids=str)
def test_numbers_may_be_numpy_s(model, options):
    numbers = {"start": START, "end": END, "max_new_tokens": 4, **options}
    of_numpy = {name: np.array(number)[()] for name, number in numbers.items()}
    assert isinstance(of_numpy["end"], np.int64)
    for found, expected in zip(model.generate(SOURCE, **of_numpy), model.generate(SOURCE, **numbers), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("temperature", [1e-60, 1e-38])
def test_a_tiny_temperature_is_greedy(model, temperature):
    options = {"start": START, "end": END, "max_new_tokens": 5}
    ids, _ = model.generate(SOURCE, temperature=temperature, seed=1, **options)
    np.testing.assert_array_equal(ids, model.generate(SOURCE, **options)[0])


def test_a_beam_of_one_is_greedy_and_a_wider_one_is_never_worse(model):
    source = np.random.default_rng(1).integers(3, 7, [8, 5]).astype(np.int32)
    options = {"start": START, "end": END, "max_new_tokens": 10}
    greedy, greedy_scores = model.generate(source, **options)
    options["length_penalty"] = 0.0
    one, one_scores = model.generate(source, n_best=1, **options)
    ends = (greedy.numpy() == END).any(1)
    assert ends.any()
    np.testing.assert_array_equal(one.numpy()[ends, 0], greedy.numpy()[ends])
    np.testing.assert_allclose(one_scores.numpy()[ends, 0], greedy_scores.numpy()[ends], rtol=1e-4)
    _, wider = model.generate(source, beam_size=5, **options)
    assert np.all(wider.numpy()[ends] >= greedy_scores.numpy()[ends] - 1e-4)


@pytest.mark.ci
@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_rows_of_different_limits_are_searched_as_alone(model, size):
    source = np.random.default_rng(2).integers(3, 7, [6, 4]).astype(np.int32)
    limits = np.array([1, 2, 3, 5, 7, 7], np.int32)
    together = beam_search(model, source, START, END, 7, size, size, 0.6, tf.constant(limits))
    for b, most in enumerate(limits):
        ids, scores = beam_search(model, source[b : b + 1], START, END, most, size, size, 0.6)
        np.testing.assert_array_equal(together[0][b], np.pad(ids[0], [[0, 0], [0, 7 - most]]))
        np.testing.assert_allclose(together[1][b], scores[0], rtol=1e-4)
    greedy, scores = sample_sequences(model, source, START, END, 7, None, tf.constant(limits))
    for b, most in enumerate(limits):
        alone, score = sample_sequences(model, source[b : b + 1], START, END, most, None)
        np.testing.assert_array_equal(greedy[b], np.pad(alone[0], [0, 7 - most]))
        np.testing.assert_allclose(scores[b], score[0], rtol=1e-4)


def test_rows_do_not_see_each_other_and_any_number_of_them_goes(model):
    source = np.random.default_rng(2).integers(3, 7, [5, 4]).astype(np.int32)
    options = {"start": START, "end": END, "max_new_tokens": 6, "beam_size": 5, "n_best": 3, "length_penalty": 0.0}
    ids, scores = model.generate(source, **options)
    assert ids.shape == (5, 3, 6) and scores.shape == (5, 3)
    for b in range(5):
        alone, alone_scores = model.generate(source[b : b + 1], **options)
        np.testing.assert_array_equal(alone[0], ids[b])
        np.testing.assert_allclose(alone_scores[0], scores[b], rtol=1e-4)
    for row in ids.numpy().reshape(-1, 6):  # nothing but zeros follows an end
        ends = np.flatnonzero(row == END)
        assert not ends.size or not row[ends[0] + 1 :].any()
