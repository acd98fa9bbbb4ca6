"""Sampling: the next token of every row from its hidden state, and the options that say how.

Shapes:
    B: batch      N: n_token, the vocabulary      E: d_model
"""

import functools
import random
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from txl_tf.layers.adaptive import bin_logits, head_of, split_bins


class Sampling(NamedTuple):
    """How the rows of a batch are sampled: tensors `[B]`, see `generate`."""

    temperature: tf.Tensor  # float32; 0 takes the most likely token
    top_k: tf.Tensor  # int32; 0 for all
    top_p: tf.Tensor  # float32; 1 for all
    seeds: tf.Tensor  # int32


def sample_categorical(scores, uniform):
    """Draws from `softmax(scores)` by its cumulative sums: float `[B, n]` -> int32 `[B]`; -inf is never drawn.

    `uniform` is float64 `[B]` in [0, 1).
    """
    weights = tf.exp(tf.cast(scores - tf.reduce_max(scores, -1, keepdims=True), tf.float64))
    cumulative = tf.cumsum(weights, -1)
    chosen = tf.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:], side="right")[:, 0]
    return tf.minimum(chosen, tf.shape(scores)[-1] - 1)


def top_k_top_p(scores, top_k, top_p):
    """Leaves the most likely tokens: the first `top_k`, and of these the fewest that hold `top_p` of the probability.

    Args:
        scores: float `[B, N]`, log-probabilities up to a constant.
        top_k, top_p: of `Sampling`.

    Returns:
        `scores`, with -inf for the others.
    """
    batch, n = keras.ops.shape(scores)
    ordered, order = tf.math.top_k(scores, n)
    kept = tf.range(n) < tf.where(top_k > 0, top_k, n)[:, None]
    before = tf.cumsum(tf.nn.softmax(tf.where(kept, ordered, -np.inf)), -1, exclusive=True)
    kept &= (before < top_p[:, None]) | (top_p[:, None] == 1)  # where rounded sums may reach 1 too early
    places = tf.reshape(order + n * tf.range(batch)[:, None], [-1, 1])
    return tf.reshape(
        tf.scatter_nd(places, tf.reshape(tf.where(kept, ordered, -np.inf), [-1]), [batch * n]), [batch, n]
    )


def precompute_softmax(lm):
    """The bins of the softmax in the type they are used in, split and joined once rather than for every token.

    A tuple of `(weight, bias, projection)`, one a bin; the first has the clusters behind its words.
    """
    tables, projs, biases, clusters = lm.softmax.weights_with(lm.network.embedding)
    weights = split_bins(tables, biases)
    bins = [head_of(weights, biases, clusters), *zip(weights[1:], biases[1:], strict=True)]

    def cast(tensor):
        return None if tensor is None else tf.cast(tensor, lm.compute_dtype)

    return tuple(
        (cast(weight), tf.convert_to_tensor(bias), cast(proj)) for (weight, bias), proj in zip(bins, projs, strict=True)
    )


def sample(bins, hidden, uniform, sampling, static_shapes=False):
    """The next token of every row, drawn from its distribution.

    A token is drawn as the adaptive softmax is built: a word of the first bin or a bin, then a word of that bin. At
    temperature 1 and without limits, no bin is computed but those drawn; with static shapes, all are.

    Args:
        bins: of `precompute_softmax`.
        hidden: `[B, E]`.
        uniform: float64 `[B, 2]` in [0, 1), of `uniform_draws`.
        static_shapes: whether it is for XLA.

    Returns:
        int32 `[B]`.
    """
    temperature, top_k, top_p, _ = sampling
    sizes = [bias.shape[0] for _, bias, _ in bins]
    sizes[0] -= len(bins) - 1
    starts = np.cumsum([0, *sizes[:-1]])

    def draw(head, tail_scores):
        """Draws from the scores of the first softmax, then within the drawn bin i from `tail_scores(i, pick)`.

        `pick` takes what belongs to the rows that drew that bin; with static shapes, all rows.
        """
        token = sample_categorical(head, uniform[:, 0])
        for i in range(1, len(bins)):
            drawn = token == sizes[0] + i - 1
            if static_shapes:
                word = sample_categorical(tail_scores(i, tf.identity), uniform[:, 1])
                token = tf.where(drawn, -word - int(starts[i]), token)  # negative: not a bin's number
            else:
                rows = tf.where(drawn)
                pick = functools.partial(tf.gather_nd, indices=rows)
                word = sample_categorical(tail_scores(i, pick), pick(uniform[:, 1]))
                token = tf.tensor_scatter_nd_update(token, rows, -word - int(starts[i]))
        return tf.abs(token)

    def plain():
        return draw(bin_logits(hidden, *bins[0]), lambda i, pick: bin_logits(pick(hidden), *bins[i]))

    def general():
        head = tf.nn.log_softmax(bin_logits(hidden, *bins[0]))
        tails = [tf.nn.log_softmax(bin_logits(hidden, *tail)) for tail in bins[1:]]
        clusters = tf.split(head[:, sizes[0] :], len(tails), -1) if tails else []
        log_probs = tf.concat([head[:, : sizes[0]], *map(tf.add, clusters, tails)], -1)
        scores = log_probs / tf.where(temperature > 0, temperature, 1)[:, None]
        limited = tf.reduce_any((top_k > 0) | (top_p < 1))
        scores = tf.cond(limited, lambda: top_k_top_p(scores, top_k, top_p), lambda: scores)
        head, *tails = tf.split(scores, sizes, -1)
        head = tf.concat([head, *(tf.reduce_logsumexp(tail, -1, keepdims=True) for tail in tails)], -1)
        drawn = draw(head, lambda i, pick: pick(tails[i - 1]))
        return tf.where(temperature > 0, drawn, tf.argmax(log_probs, -1, output_type=tf.int32))

    unlimited = tf.reduce_all((temperature == 1) & (top_k == 0) & (top_p == 1))
    return tf.cond(unlimited, plain, general)


def uniform_draws(seeds, first, number):
    """The numbers behind the tokens `first ... first + number - 1` of every row: float64 `[number, B, 2]` in [0, 1)."""
    batch = tf.shape(seeds)[0]
    place = tf.repeat(tf.range(first, first + number), batch)
    keys = tf.stack([tf.tile(seeds, [number]), place], -1)
    uniform = tf.map_fn(
        lambda key: tf.random.stateless_uniform([2], key, dtype=tf.float64, alg="philox"),
        keys,
        fn_output_signature=tf.TensorSpec([2], tf.float64),
    )
    return tf.reshape(uniform, [number, batch, 2])


def check_integer(name, value, least, most=2**31 - 1):
    """Raises ValueError if `value` is no integer from `least` to `most`."""
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"{name} must be an integer from {least} to {most}, got {value!r}")


def check_sampling(batch, temperature=1.0, top_k=None, top_p=None, seed=None):
    """Checks the options of sampling, see `generate`, and makes a `Sampling` of them."""
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature must be 0 or more, got {temperature}")
    if top_k is not None:
        check_integer("top_k", top_k, 1)
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must lie in (0, 1], got {top_p}")
    seeds = [random.randrange(2**31) for _ in range(batch)] if seed is None else seed
    seeds = np.broadcast_to(np.asarray(seeds), [batch]) if np.shape(seeds) in ((), (batch,)) else np.zeros(0)
    if seeds.shape != (batch,) or seeds.dtype.kind not in "iu" or seeds.min() < -(2**31) or seeds.max() >= 2**31:
        raise ValueError(f"seed must be an integer of 32 bits, or one for each of the {batch} rows, got {seed!r}")
    return Sampling(
        temperature=tf.fill([batch], tf.cast(temperature, tf.float32)),
        top_k=tf.fill([batch], 0 if top_k is None else int(top_k)),
        top_p=tf.fill([batch], tf.cast(1.0 if top_p is None else top_p, tf.float32)),
        seeds=tf.constant(seeds, tf.int32),
    )
