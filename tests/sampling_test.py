"""Tokens are drawn from the distribution that `log_probs` tells, as the options say."""

import numpy as np
import pytest
import tensorflow as tf
from helpers import raises_parameter

from txl_tf.language.sampling import (
    Sampling,
    at_least_min_p,
    check_sampling,
    no_history,
    penalise,
    precompute_softmax,
    remember,
    remember_segment,
    sample,
    sample_categorical,
    sample_words,
    sampling_of_sequences,
    seeds_of_sequences,
    top_k_top_p,
    uniform_draws,
)

BINS = {"cutoffs": [5, 12], "div_val": 2}


NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "penalty": 1.0, "window": 64}


def expected_distribution(probs, text=(), **options):
    """The equations, word by word; `text` is what was read and written before."""
    temperature, top_k, top_p, min_p, penalty, window = {**NEUTRAL, **options}.values()
    log_probs = np.log(probs.astype(np.float64))
    for word in set(text[len(text) - min(window, len(text)) :]):
        log_probs[word] *= penalty
    if temperature == 0:
        return np.eye(len(probs))[np.argmax(log_probs)]
    probs = np.exp(log_probs / temperature)
    probs /= probs.sum()
    kept, held = np.zeros_like(probs), 0.0
    order = np.argsort(-probs)[: top_k or None]
    for word in order:
        if held < top_p * probs[order].sum() and probs[word] >= min_p * probs.max():
            kept[word] = probs[word]
        held += probs[word]
    return kept / kept.sum()


def sampling_of(rows, **options):
    """`Sampling` of the options of `NEUTRAL`, as they are in it."""
    values = {**NEUTRAL, **options}
    dtypes = "float32 int32 float32 float32 float32 int32".split()
    columns = [np.broadcast_to(np.asarray(x, dtype), [rows]) for x, dtype in zip(values.values(), dtypes, strict=True)]
    return Sampling(*map(tf.constant, columns), tf.zeros([rows], tf.int32))


TEXT = [3, 1, 4]
SAMPLINGS = [
    {},
    {"temperature": 1.7},
    {"temperature": 0.8, "top_k": 9},
    {"temperature": 1.2, "top_k": 15, "top_p": 0.8},
    {"min_p": 0.2},
    {"temperature": 2.0, "min_p": 0.5, "top_k": 12, "top_p": 0.9},
    {"penalty": 2.5},
    {"temperature": 0.9, "penalty": 0.5, "window": 2, "top_k": 8, "top_p": 0.95, "min_p": 0.05},
]


@pytest.mark.parametrize(
    "options, sampling",
    [
        (BINS, SAMPLINGS[0]),
        *(pytest.param(BINS, sampling, marks=pytest.mark.slow) for sampling in SAMPLINGS[1:-2]),
        (BINS, SAMPLINGS[-2]),
        ({}, SAMPLINGS[-1]),
        ({"cutoffs": [5, 12], "d_embed": 6}, SAMPLINGS[-1]),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [(BINS, SAMPLINGS[-1]), ({}, {}), ({"cutoffs": [5, 12], "d_embed": 6}, {})]
        ),
    ],
    ids=str,
)
def test_tokens_are_drawn_from_the_true_distribution(small_lm, options, sampling):
    lm, n = small_lm(**options), 20000
    hidden, _ = lm.network(np.array([TEXT]))
    uniform = tf.random.stateless_uniform([n, 2], [1, 2], dtype=tf.float64)
    history = remember_segment(no_history(n, 23), tf.constant([TEXT] * n), tf.fill([n], 3))
    drawn = sample(precompute_softmax(lm), tf.repeat(hidden[:, -1], n, 0), uniform, sampling_of(n, **sampling), history)
    log_probs = lm.log_probs(np.array([TEXT]))[0][0, -1]
    probs = expected_distribution(np.exp(log_probs), TEXT, **sampling)
    counts = np.bincount(drawn, minlength=23)
    assert counts[probs == 0].sum() == 0
    likely = probs * n > 5
    chi_square = np.sum((counts - probs * n)[likely] ** 2 / (probs * n)[likely])
    freedom = likely.sum() - 1
    assert chi_square < freedom + 4 * np.sqrt(2 * freedom)


def test_min_p_keeps_what_is_that_many_times_as_likely_as_the_likeliest():
    rng = np.random.default_rng(0)
    scores, min_p = rng.normal(0, 2, [40, 9]).astype(np.float32), rng.uniform(0, 1, 40).astype(np.float32)
    min_p[:5], scores[5, 3], scores[6, [2, 7]] = 0, -np.inf, 9  # all; one that is left out already; two of equals
    kept = at_least_min_p(scores, min_p).numpy()
    for row in range(40):
        probs = np.exp(scores[row].astype(np.float64))
        np.testing.assert_array_equal(kept[row], np.where(probs >= min_p[row] * probs.max(), scores[row], -np.inf))
    np.testing.assert_array_equal(kept[:5], scores[:5])
    assert np.isfinite(kept[6]).sum() >= 2 and np.isfinite(kept).sum(1).min() == 1


def test_the_penalty_is_for_the_last_tokens_of_prompt_and_text():
    """Token by token against a list of what was read and written, in rows of unequal prompts."""
    rng = np.random.default_rng(1)
    lengths, windows, penalties = [5, 1, 3], np.int32([1, 4, 100]), np.float32([2, 0.5, 1.5])
    prompt = rng.integers(0, 7, [3, 5]).astype(np.int32)
    texts = [list(row[:length]) for row, length in zip(prompt, lengths, strict=True)]
    history = remember_segment(no_history(3, 7), tf.constant(prompt), tf.constant(lengths))

    def compare():
        log_probs = np.log(rng.dirichlet(np.ones(7), 3)).astype(np.float32)
        found = penalise(log_probs, history, penalties, windows).numpy()
        for row in range(3):
            last = texts[row][-windows[row] :]
            expected = [x * penalties[row] if i in last else x for i, x in enumerate(log_probs[row])]
            np.testing.assert_array_equal(found[row], np.float32(expected))

    compare()
    for i in range(12):
        if i == 7:  # somebody answers
            segment = rng.integers(0, 7, [3, 4]).astype(np.int32)
            history = remember_segment(history, tf.constant(segment), tf.fill([3], 4))
            for text, row in zip(texts, segment, strict=True):
                text += list(row)
        token = rng.integers(0, 7, 3).astype(np.int32)
        history = remember(history, tf.constant(token))
        for text, new in zip(texts, token, strict=True):
            text.append(new)
        compare()


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
        expected = expected_distribution(probs, top_k=top_k[row], top_p=top_p[row]) > 0
        np.testing.assert_array_equal(kept[row], np.where(expected, scores[row], -np.inf))


@pytest.mark.parametrize("options", [{"top_p": 1e-60}, *({"temperature": x} for x in (1e-60, 1e-42, 1e-38))], ids=str)
def test_with_tiny_options_the_most_likely_word_is_drawn(options):
    log_probs = tf.constant([[-9.0, -8.0, -9.0, -10.0]])
    sampling = check_sampling(1, **options)
    for number in (0.0, 0.6, 0.99):
        uniform = tf.constant([[number, 0.5]], tf.float64)
        assert sample_words(log_probs, uniform, sampling, no_history(1, 4)).numpy() == [1]


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
    history = remember_segment(no_history(300, 23), tf.constant([TEXT] * 300), tf.fill([300], 3))
    options = [
        {"temperature": 0.0}, {}, {"temperature": 0.7, "top_k": 4}, {"temperature": 1.5, "top_p": 0.6}, {"top_k": 1},
        {"min_p": 0.3}, {"penalty": 3.0, "window": 2}, {"temperature": 0.0, "penalty": 30.0},
    ]  # fmt: skip

    def draw(options):
        return sample(precompute_softmax(lm), hidden, uniform, sampling_of(300, **options), history).numpy()

    n = len(options)
    mixed = draw({name: np.resize([{**NEUTRAL, **given}[name] for given in options], 300) for name in NEUTRAL})
    probs = np.exp(lm.log_probs(np.array([TEXT]))[0][0, -1])
    assert set(mixed[::n]) == set(mixed[4::n]) == {np.argmax(probs)} and len(set(mixed)) > 5
    assert set(mixed[7::n]) == {np.argmax(expected_distribution(probs, TEXT, **options[7]))}
    for i, given in enumerate(options):
        np.testing.assert_array_equal(mixed[i::n], draw(given)[i::n])


def test_numbers_depend_on_the_row_s_seed_and_on_how_many_it_has_drawn():
    seeds = tf.constant([7, -3, 7], tf.int32)
    draws = uniform_draws(seeds, 0, 6).numpy()
    assert draws.shape == (6, 3, 2) and draws.dtype == np.float64 and draws.min() >= 0 and draws.max() < 1
    np.testing.assert_array_equal(draws[:, 0], draws[:, 2])
    assert len(np.unique(draws[:, :2])) == 24
    np.testing.assert_array_equal(uniform_draws(seeds[1:2], 4, 2), draws[4:, 1:2])


def test_sequences_of_a_row_have_seeds_of_their_own():
    sampling = check_sampling(2, seed=[7, -(2**31)], top_k=5, min_p=0.25)
    many = sampling_of_sequences(sampling, 3)
    np.testing.assert_array_equal(many.seeds[::3], sampling.seeds)
    steps = [(seed + k * 0x9E3779B9 + 2**31) % 2**32 - 2**31 for seed in (7, -(2**31)) for k in range(3)]
    np.testing.assert_array_equal(many.seeds, steps)
    for found, given in zip(many[:-1], sampling[:-1], strict=True):
        np.testing.assert_array_equal(found, np.repeat(given, 3))
    np.testing.assert_array_equal(sampling_of_sequences(sampling, tf.constant(3)).seeds, steps)
    assert seeds_of_sequences(7, 3) + seeds_of_sequences(-(2**31), 3) == steps
    neighbours = sampling_of_sequences(check_sampling(100, seed=np.arange(100)), 100).seeds.numpy()
    assert len(set(neighbours)) == 10000


def test_options_become_a_number_a_row():
    given = {"temperature": 0.5, "top_k": np.int64(4), "top_p": 0.9, "min_p": np.float32(0.1), "seed": [1, -2, 3]}
    sampling = check_sampling(3, **given, repetition_penalty=1.5, repetition_window=9)
    expected = [[0.5] * 3, [4] * 3, [0.9] * 3, [0.1] * 3, [1.5] * 3, [9] * 3, [1, -2, 3]]
    dtypes = "float32 int32 float32 float32 float32 int32 int32".split()
    for found, value, dtype in zip(sampling, expected, dtypes, strict=True):
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, np.array(value, dtype))
    plain = check_sampling(2, seed=5)
    for found, value in zip(plain, [1, 0, 1, 0, 1, 64, 5], strict=True):
        np.testing.assert_array_equal(found, [value, value])
    unseeded = check_sampling(3).seeds.numpy()
    assert len(set(unseeded)) == 3


@pytest.mark.parametrize(
    "options, name, limit",
    [
        ({"temperature": -0.1}, "temperature", "0"),
        ({"temperature": float("inf")}, "temperature", ""),
        ({"top_k": 0}, "top_k", "1 to 2147483647"),
        ({"top_k": 2.0}, "top_k", "1 to 2147483647"),
        ({"top_k": True}, "top_k", "1 to 2147483647"),
        ({"top_p": 0.0}, "top_p", "(0, 1]"),
        ({"top_p": 1.5}, "top_p", "(0, 1]"),
        ({"temperature": "hot"}, "temperature", ""),
        ({"min_p": 1}, "min_p", "[0, 1)"),
        ({"min_p": -0.1}, "min_p", "[0, 1)"),
        ({"repetition_penalty": 0}, "repetition_penalty", ""),
        ({"repetition_penalty": float("inf")}, "repetition_penalty", ""),
        ({"repetition_penalty": 1e39}, "repetition_penalty", "1e30"),
        ({"temperature": 1e39}, "temperature", "1e30"),
        ({"temperature": [[1.0], [2.0, 3.0]]}, "temperature", ""),
        ({"seed": [[1], [2, 3]]}, "seed", "3 rows"),
        ({"repetition_window": 0}, "repetition_window", "1 to 1073741823"),
        ({"repetition_window": None}, "repetition_window", "an integer"),
        ({"repetition_window": 3}, "repetition_window", "repetition_penalty"),
        ({"repetition_window": 3, "repetition_penalty": 1.0}, "repetition_window", "repetition_penalty"),
        ({"seed": 2**31}, "seed", "3 rows"),
        ({"seed": [1, 2]}, "seed", "3 rows"),
    ],
    ids=str,
)
def test_bad_options_and_those_without_effect_are_named(options, name, limit):
    with raises_parameter(name, options[name], limit=limit):
        check_sampling(3, **options)


def test_options_that_have_their_defaults_may_always_be_given():
    options = {"temperature": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "repetition_window": 64}
    sampling = check_sampling(2, top_k=None, seed=3, **options)
    assert sampling.repetition_window.numpy().tolist() == [64, 64] and sampling.seeds.numpy().tolist() == [3, 3]
    nothing = check_sampling(2, top_k=None, top_p=None, min_p=None, repetition_penalty=None, temperature=0, seed=3)
    tf.nest.map_structure(np.testing.assert_array_equal, sampling, nothing)


def test_draws_for_batches_of_any_size_share_a_graph(small_lm):
    lm = small_lm()
    for batch in (1, 2, 3, 5, 8):
        lm._uniform_draws(tf.zeros([batch], tf.int32), tf.constant(2))
    assert lm._uniform_draws.experimental_get_tracing_count() <= 2
