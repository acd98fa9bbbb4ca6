"""Targets of an encoder-decoder, symbol by symbol with cached keys and values: beam search, sampling, greedy.

`model` has two functions, see `Transformer`:

    start_decoding(source, rows_each, most) -> caches, sources, seen
    decode_step(ids, place, caches, sources, seen) -> log_probs, caches

Shapes:
    B: batch      K: beam_size      N: max_new_tokens      V: target_vocab_size
"""

import keras
import numpy as np
import tensorflow as tf

from txl_tf.data.pairs.parallel import PADDING
from txl_tf.layers.embedding import check_ids
from txl_tf.models.decoding.sampling import (
    check_integer,
    check_sampling,
    sample_categorical,
    top_k_top_p,
    uniform_draws,
)

_NONE = -1e9  # log-probability of what cannot be; finite, so that it can be multiplied


def check_generation(
    model, source, start, end, max_new_tokens, beam_size, n_best, length_penalty, temperature, top_k, top_p, seed
):
    """Checks the arguments of `Transformer.generate`: `(source, sampling)`, int32 `[B, S]`, and `None` for greedy."""
    source = np.asarray(source)
    if source.ndim != 2 or not np.issubdtype(source.dtype, np.integer) or 0 in source.shape:
        raise ValueError(f"source must be integers [batch, any], got {source.dtype.name} {list(source.shape)}")
    check_ids("source", source, model.input_vocab_size)
    if source.shape[1] > model.max_len:
        raise ValueError(f"source must be at most max_len={model.max_len} long, got {source.shape[1]}")
    if not np.any(source != PADDING, 1).all():
        raise ValueError(f"source must have a symbol in every row, got padding alone in row {np.argmin(source.any(1))}")
    searches = beam_size > 1 or n_best is not None
    for name, symbol in (("start", start), ("end", end)):
        if symbol is not None or name == "start" or searches:
            check_integer(name, symbol, 1, model.target_vocab_size - 1)
    check_integer("max_new_tokens", max_new_tokens, 1, model.max_len)
    check_integer("beam_size", beam_size, 1, model.target_vocab_size - 1)
    if n_best is not None:
        check_integer("n_best", n_best, 1, beam_size)
    if not 0 <= length_penalty < np.inf:
        raise ValueError(f"length_penalty must be 0 or more, got {length_penalty}")
    if searches and temperature:
        raise ValueError(f"temperature must be 0 for a beam search, got {temperature}")
    sampling = check_sampling(len(source), temperature, top_k, top_p, seed)
    return tf.constant(source, tf.int32), sampling if temperature else None


def sample_sequences(model, source, start, end, max_new_tokens, sampling):
    """One target for every source, greedily where `sampling` is `None`: `(ids, scores)`, int32 `[B, N]`, float32 `[B]`.

    See `Transformer.generate`.
    """
    batch, columns = keras.ops.shape(source)[0], tf.range(max_new_tokens)
    decode = _Decoder(model, source, 1, max_new_tokens)
    uniform = None if sampling is None else uniform_draws(sampling.seeds, 0, max_new_tokens)

    def body(i, last, written, scores, ended, caches):
        log_probs, caches = decode(last, i, caches)
        if sampling is None:
            chosen = tf.argmax(log_probs, -1, output_type=tf.int32)
        else:
            chosen = _draw(log_probs, uniform[i][:, 0], sampling)
        chosen = tf.where(ended, PADDING, chosen)
        scores += tf.where(ended, 0.0, tf.gather(log_probs, chosen, batch_dims=1))
        written = tf.where(columns == i, chosen[:, None], written)
        return i + 1, chosen, written, scores, ended | (chosen == end), caches

    rows = tf.ones([batch], tf.int32)
    state = (0, start * rows, tf.zeros([batch, max_new_tokens], tf.int32), tf.zeros([batch]), rows == 0, decode.caches)
    _, _, written, scores, _, _ = tf.while_loop(
        lambda i, last, written, scores, ended, caches: (i < max_new_tokens) & ~tf.reduce_all(ended),
        body, state, parallel_iterations=1,
    )  # fmt: skip
    return written, scores


def _draw(log_probs, uniform, sampling):
    scores = log_probs / sampling.temperature[:, None]
    return sample_categorical(top_k_top_p(scores, sampling.top_k, sampling.top_p), uniform)


def beam_search(model, source, start, end, max_new_tokens, beam_size, length_penalty):
    """The likeliest targets of every source, as far as `beam_size` hypotheses lead to them.

    A step extends every hypothesis by every symbol. Those that end compete by their score for `beam_size` places of
    finished targets; of the others the `beam_size` likeliest go on. A row is done when no hypothesis can do better any
    more. What has not ended after `max_new_tokens` comes after all that have.

    Returns:
        `(ids, scores)`: int32 `[B, K, N]`, 0 after the end, and float32 `[B, K]`, the best first.
    """
    batch, size, most = keras.ops.shape(source)[0], beam_size, max_new_tokens
    decode = _Decoder(model, source, size, most)
    first_rows = tf.range(batch)[:, None] * size
    columns = tf.range(most)

    def penalty(length):
        return ((5.0 + tf.cast(length, tf.float32)) / 6.0) ** length_penalty

    def body(i, last, alive, totals, finished, scores, caches):
        log_probs, caches = decode(tf.reshape(last, [-1]), i, caches)
        sums = totals[..., None] + tf.reshape(log_probs, [batch, size, -1])  # [B, K, V]
        here = columns == i
        ended = tf.where(here, end, alive)
        ended_scores = tf.where(sums[..., end] > _NONE / 2, sums[..., end] / penalty(i + 1), _NONE)
        scores, kept = tf.math.top_k(tf.concat([scores, ended_scores], 1), size)
        finished = tf.gather(tf.concat([finished, ended], 1), kept, batch_dims=1)

        n_symbols = tf.shape(sums)[2]
        sums = tf.where(tf.range(n_symbols) == end, _NONE, sums)
        totals, kept = tf.math.top_k(tf.reshape(sums, [batch, -1]), size)
        parents, last = kept // n_symbols, kept % n_symbols
        alive = tf.where(here, last[..., None], tf.gather(alive, parents, batch_dims=1))
        rows = tf.reshape(first_rows + parents, [-1])
        caches = tf.nest.map_structure(lambda cache: tf.gather(cache, rows, axis=1), caches)
        return i + 1, last, alive, totals, finished, scores, caches

    def goes_on(i, last, alive, totals, finished, scores, caches):
        best = totals[:, 0] / penalty(most)  # log-probabilities only fall, penalties only grow
        return (i < most) & tf.reduce_any(best > scores[:, -1])

    empty = tf.zeros([batch, size, most], tf.int32)
    totals = tf.tile(tf.where(tf.range(size) == 0, 0.0, _NONE)[None], [batch, 1])  # all begin alike
    state = (0, tf.fill([batch, size], start), empty, totals, empty, tf.fill([batch, size], _NONE), decode.caches)
    i, _, alive, totals, finished, scores, _ = tf.while_loop(goes_on, body, state, parallel_iterations=1)
    # First all that ended, then the others; both are in order.
    n_ended = tf.reduce_sum(tf.cast(scores > _NONE, tf.int32), 1)[:, None]
    place = tf.range(size)[None]
    kept = tf.where(place < n_ended, place, size + place - n_ended)
    ids = tf.gather(tf.concat([finished, alive], 1), kept, batch_dims=1)
    return ids, tf.gather(tf.concat([scores, totals / penalty(i)], 1), kept, batch_dims=1)


class _Decoder:
    """`model.decode_step` for one source; padding is never written."""

    def __init__(self, model, source, rows_each, most):
        self.model = model
        self.caches, *self.rest = model.start_decoding(source, rows_each, most)

    def __call__(self, ids, place, caches):
        log_probs, caches = self.model.decode_step(ids, place, caches, *self.rest)
        return tf.where(tf.range(tf.shape(log_probs)[1]) == PADDING, _NONE, log_probs), caches
