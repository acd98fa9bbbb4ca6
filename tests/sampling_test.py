"""Tokens are drawn from the distribution that `log_probs` tells, as the options say."""

import numpy as np
import pytest
import tensorflow as tf

from txl_tf.models.sampling import (
    Sampling,
    check_sampling,
    precompute_softmax,
    sample,
    sample_categorical,
    top_k_top_p,
    uniform_draws,
)

BINS = {"cutoffs": [5, 12], "div_val": 2}


def expected_distribution(probs, temperature, top_k, top_p):
    """The equations, word by word."""
    probs = probs ** (1 / temperature)
    probs /= probs.sum()
    kept, held = np.zeros_like(probs), 0.0
    order = np.argsort(-probs)[: top_k or None]
    for word in order:
        if held < top_p * probs[order].sum():
            kept[word] = probs[word]
        held += probs[word]
    return kept / kept.sum()


@pytest.mark.parametrize("options", [{}, BINS, {"cutoffs": [5, 12], "d_embed": 6}], ids=str)
@pytest.mark.parametrize("temperature, top_k, top_p", [(1.0, 0, 1.0), (1.7, 0, 1.0), (0.8, 9, 1.0), (1.2, 15, 0.8)])
def test_tokens_are_drawn_from_the_true_distribution(small_lm, options, temperature, top_k, top_p):
    lm, n = small_lm(**options), 20000
    hidden, _ = lm.network(np.array([[3, 1, 4]]))
    uniform = tf.random.stateless_uniform([n, 2], [1, 2], dtype=tf.float64)
    sampling = Sampling(tf.fill([n], temperature), tf.fill([n], top_k), tf.fill([n], top_p), tf.zeros([n], tf.int32))
    drawn = sample(precompute_softmax(lm), tf.repeat(hidden[:, -1], n, 0), uniform, sampling)
    log_probs = lm.log_probs(np.array([[3, 1, 4]]))[0][0, -1]
    probs = expected_distribution(np.exp(log_probs), temperature, top_k, top_p)
    counts = np.bincount(drawn, minlength=23)
    assert counts[probs == 0].sum() == 0
    likely = probs * n > 5
    chi_square = np.sum((counts - probs * n)[likely] ** 2 / (probs * n)[likely])
    freedom = likely.sum() - 1
    assert chi_square < freedom + 4 * np.sqrt(2 * freedom)


def test_top_k_takes_no_more_than_k_of_equals():
    scores = tf.constant([[0.0, 0.0, 0.0, -1.0], [0.0, 2.0, 0.0, 2.0]])
    kept = top_k_top_p(scores, tf.constant([2, 1]), tf.constant([1.0, 1.0]))
    np.testing.assert_array_equal(kept, [[0, 0, -np.inf, -np.inf], [-np.inf, 2, -np.inf, -np.inf]])


def test_the_most_likely_tokens_are_left_as_the_equations_say():
    rng = np.random.default_rng(0)
    scores = rng.normal(0, 2, [40, 9]).astype(np.float32)
    top_k, top_p = rng.integers(0, 12, 40).astype(np.int32), rng.uniform(0.05, 1, 40).astype(np.float32)
    top_p[:10] = 1
    kept = top_k_top_p(scores, top_k, top_p).numpy()
    for row in range(40):
        probs = np.exp(scores[row].astype(np.float64))
        expected = expected_distribution(probs, 1.0, top_k[row], top_p[row]) > 0
        np.testing.assert_array_equal(kept[row], np.where(expected, scores[row], -np.inf))


def test_a_category_is_where_the_cumulative_probability_first_exceeds_the_number():
    probs = np.array([0.1, 0.0, 0.4, 0.5])
    with np.errstate(divide="ignore"):
        scores = np.log(probs).astype(np.float32) + 5  # a constant changes nothing
    uniform = np.array([0.0, 0.09, 0.11, 0.49, 0.51, 0.999999999])
    drawn = sample_categorical(np.repeat(scores[None], len(uniform), 0), uniform)
    np.testing.assert_array_equal(drawn, [0, 0, 2, 2, 3, 3])
    certain = np.full([2, 4], -np.inf, np.float32)
    certain[:, 2] = -1000
    np.testing.assert_array_equal(sample_categorical(certain, np.array([0.0, 0.999])), [2, 2])


def test_rows_of_one_batch_may_differ_in_their_options(small_lm):
    """Each row draws what it draws where the whole batch has its options."""
    lm = small_lm(**BINS)
    hidden = tf.repeat(lm.network(np.array([[3, 1, 4]]))[0][:, -1], 300, 0)
    uniform = tf.random.stateless_uniform([300, 2], [1, 2], dtype=tf.float64)
    options = [(0.0, 0, 1.0), (1.0, 0, 1.0), (0.7, 4, 1.0), (1.5, 0, 0.6), (1.0, 1, 1.0)]

    def draw(*options):
        columns = zip(options, ("float32", "int32", "float32"), strict=True)
        columns = [tf.constant(np.broadcast_to(np.asarray(value, dtype), [300])) for value, dtype in columns]
        return sample(precompute_softmax(lm), hidden, uniform, Sampling(*columns, tf.zeros([300], tf.int32))).numpy()

    mixed = draw(*(np.resize(column, 300) for column in zip(*options, strict=True)))
    most_likely = np.argmax(lm.log_probs(np.array([[3, 1, 4]]))[0][0, -1])
    assert set(mixed[::5]) == set(mixed[4::5]) == {most_likely} and len(set(mixed)) > 5
    for i, given in enumerate(options):
        alone = draw(*given)
        np.testing.assert_array_equal(mixed[i::5], alone[i::5])


def test_numbers_depend_on_the_row_s_seed_and_on_how_many_it_has_drawn():
    seeds = tf.constant([7, -3, 7], tf.int32)
    draws = uniform_draws(seeds, 0, 6).numpy()
    assert draws.shape == (6, 3, 2) and draws.dtype == np.float64 and draws.min() >= 0 and draws.max() < 1
    np.testing.assert_array_equal(draws[:, 0], draws[:, 2])
    assert len(np.unique(draws[:, :2])) == 24
    np.testing.assert_array_equal(uniform_draws(seeds[1:2], 4, 2), draws[4:, 1:2])


def test_options_become_a_number_a_row():
    sampling = check_sampling(3, temperature=0.5, top_k=np.int64(4), top_p=0.9, seed=[1, -2, 3])
    assert isinstance(sampling, Sampling)
    for found, expected, dtype in zip(
        sampling, ([0.5] * 3, [4] * 3, [0.9] * 3, [1, -2, 3]), ("float32", "int32", "float32", "int32"), strict=True
    ):
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, np.array(expected, dtype))
    plain = check_sampling(2, seed=5)
    for found, expected in zip(plain, ([1, 1], [0, 0], [1, 1], [5, 5]), strict=True):
        np.testing.assert_array_equal(found, expected)
    unseeded = check_sampling(3).seeds.numpy()
    assert len(set(unseeded)) == 3


@pytest.mark.parametrize(
    "options, message",
    [
        ({"temperature": -0.1}, "temperature must be 0 or more, got -0.1"),
        ({"temperature": float("inf")}, "temperature must be 0 or more, got inf"),
        ({"top_k": 0}, "top_k must be an integer from 1 to 2147483647, got 0"),
        ({"top_k": 2.0}, "top_k must be an integer from 1 to 2147483647, got 2.0"),
        ({"top_k": True}, "top_k must be an integer from 1 to 2147483647, got True"),
        ({"top_p": 0.0}, r"top_p must lie in \(0, 1\], got 0.0"),
        ({"top_p": 1.5}, r"top_p must lie in \(0, 1\], got 1.5"),
        ({"seed": 2**31}, "seed must be an integer of 32 bits, or one for each of the 3 rows, got 2147483648"),
        ({"seed": [1, 2]}, r"seed must be .* one for each of the 3 rows, got \[1, 2\]"),
    ],
    ids=str,
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        check_sampling(3, **options)
