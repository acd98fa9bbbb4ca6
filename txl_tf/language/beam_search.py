"""Beam search, for language models and encoder-decoders.

Shapes:
    B: batch      K: beam_size      R: n_best      N: max_new_tokens      V: number of symbols
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from txl_tf.config.checks import NOT_NEGATIVE
from txl_tf.errors import ParameterError
from txl_tf.kernels.shapes import Tensor, shape_of
from txl_tf.language.loop import static_shapes, where_rows

NO_CHANCE = -1e9  # log-probability of impossible tokens and paths; finite, so that products with it are numbers
LENGTH_PENALTY = 0.6  # default


def check_length_penalty(length_penalty: Any, searches: bool) -> None:
    """Raises ParameterError for a negative penalty; without a beam search, for any but the default."""
    NOT_NEGATIVE("length_penalty", length_penalty)
    if not searches and length_penalty != LENGTH_PENALTY:
        raise ParameterError("length_penalty", length_penalty, "left out without a beam search")


def penalty_of(length: Any, length_penalty: Tensor) -> Any:
    """The number that divides the log-probability of a text of `length` tokens (Wu et al. 2016)."""
    return ((5.0 + tf.cast(length, length_penalty.dtype)) / 6.0) ** length_penalty


def search(
    decode: Callable[..., Any], select: Callable[..., Any], caches: Any, start: Any, end: Any, max_new_tokens: Any,
    beam_size: int, n_best: int, length_penalty: Tensor, limits: Tensor, cache_shapes: Any = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Searches the most likely texts of every row with `beam_size` hypotheses, whatever the model is.

    A step extends every hypothesis by every token. It keeps the `n_best` finished texts with the best scores, and the
    `beam_size` most likely of the other hypotheses. A row is done if none of its hypotheses can still get a better
    score than the worst of its finished texts. A hypothesis that has not ended after `max_new_tokens` is compared by
    its current score, so that a worse one does not win only because it has ended.

    Args:
        decode: function of the last tokens, int32 `[B * K]`, of their position (0 for `start`) and of the caches before
            them. Returns log-probabilities of the next tokens, float `[B * K, V]`, and the caches after the last
            tokens.
        select: function of caches and of row numbers, int32 `[B * K]`. Returns the caches of these rows.
        caches: the first caches.
        start: the last tokens of the first call of `decode`.
        end: id that ends a text, or `None`: no text ends before its limit.
        max_new_tokens: the largest number of tokens of a text.
        beam_size: number of hypotheses.
        n_best: number of texts of each row to return, at most `beam_size`.
        length_penalty: alpha, float scalar tensor in the dtype of the log-probabilities. Scores are divided by
            `((5 + length) / 6)**alpha`.
        limits: int32 `[B]`, the largest number of tokens in each row. The result of a row does not depend on the other
            rows.
        cache_shapes: static shapes of the caches that hold in every step; by default those of the first caches.

    Returns:
        `(ids, scores)`: int32 `[B, R, N]`, 0 after the end, and float `[B, R]`, the best first.
    """
    (batch,) = shape_of(limits)
    dtype = length_penalty.dtype
    none = tf.constant(NO_CHANCE, dtype)
    first_rows = tf.range(batch)[:, None] * beam_size
    columns = tf.range(max_new_tokens)

    def body(i, last, alive, totals, finished, scores, caches):
        """One step.

        Args:
            i: number of tokens that each hypothesis has, without the start.
            last: int32 `[B, K]`, the last token of each hypothesis.
            alive, totals: the hypotheses that have not ended, int32 `[B, K, N]`, and their log-probabilities `[B, K]`.
            finished, scores: the best texts that have ended, int32 `[B, R, N]`, and their scores `[B, R]`.
            caches: keys and values of the hypotheses.
        """
        before = (last, alive, totals, finished, scores)
        log_probs, caches = decode(tf.reshape(last, [-1]), i, caches)
        sums = totals[..., None] + tf.reshape(log_probs, [batch, beam_size, -1])  # [B, K, V]
        is_new = columns == i
        n_token = tf.shape(sums)[2]
        if end is not None:
            ended = tf.where(is_new, end, alive)
            # The score of an impossible text stays `none`: a division would bring it closer to 0.
            penalty = penalty_of(i + 1, length_penalty)
            ended_scores = tf.where(sums[..., end] > NO_CHANCE / 2, sums[..., end] / penalty, none)
            scores, best = tf.math.top_k(tf.concat([scores, ended_scores], 1), n_best)
            finished = tf.gather(tf.concat([finished, ended], 1), best, batch_dims=1)
            sums = tf.where(tf.range(n_token) == end, none, sums)  # a hypothesis that is followed further has not ended
        totals, best = tf.math.top_k(tf.reshape(sums, [batch, -1]), beam_size)
        parents = best // n_token
        last = best % n_token
        alive = tf.where(is_new, last[..., None], tf.gather(alive, parents, batch_dims=1))
        rows = tf.reshape(first_rows + parents, [-1])
        caches = select(caches, rows)
        after = (last, alive, totals, finished, scores)
        return i + 1, *where_rows(i < limits, after, before), caches  # a row at its limit does not change any more

    def more(i, last, alive, totals, finished, scores, caches):
        """Whether a hypothesis of a row can still get a better score than the worst of its finished texts."""
        # Log-probabilities can only fall, and penalties only grow.
        best = totals[:, 0] / penalty_of(limits, length_penalty)
        return tf.reduce_any((i < limits) & (best > scores[:, -1]))

    empty = tf.zeros([batch, beam_size, max_new_tokens], tf.int32)
    # At first, all hypotheses are equal, so only one of them counts.
    totals = tf.tile(tf.where(tf.range(beam_size) == 0, tf.zeros([], dtype), none)[None], tf.stack([batch, 1]))
    last = tf.fill([batch, beam_size], start)
    no_texts = empty[:, :n_best], tf.fill([batch, n_best], none)  # `finished` and `scores`
    state = (tf.constant(0), last, empty, totals, *no_texts, caches)
    shapes = None if cache_shapes is None else (*static_shapes(state[:-1]), cache_shapes)
    i, _, alive, totals, finished, scores, _ = tf.while_loop(
        more, body, state, shape_invariants=shapes, parallel_iterations=1
    )
    # If the search of a row stopped before its limit, all its finished texts are at least as good as the others.
    unended = totals / penalty_of(tf.minimum(i, limits), length_penalty)[:, None]
    scores, best = tf.math.top_k(tf.concat([scores, unended], 1), n_best)
    return tf.gather(tf.concat([finished, alive], 1), best, batch_dims=1), scores
