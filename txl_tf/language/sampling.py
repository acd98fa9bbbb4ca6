"""Sampling: the next token of every row from its hidden state, and the options that say how.

Shapes:
    B: batch      N: n_token, the vocabulary      E: d_model
"""

import contextlib
import functools
import random
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from txl_tf.config import REPETITION_WINDOW
from txl_tf.equations import head_of
from txl_tf.errors import brief
from txl_tf.kernels import logits
from txl_tf.nn.adaptive import clusters_of
from txl_tf.schema import keywords_of

NEVER = -(2**30)  # time of what has not been seen
LONGEST_WINDOW = -NEVER - 1


class Sampling(NamedTuple):
    """How the rows of a batch are sampled: tensors `[B]`, see `generate`."""

    temperature: tf.Tensor  # float32; 0 takes the most likely token
    top_k: tf.Tensor  # int32; 0 for all
    top_p: tf.Tensor  # float32; 1 for all
    min_p: tf.Tensor  # float32; 0 for all
    repetition_penalty: tf.Tensor  # float32; 1 for none
    repetition_window: tf.Tensor  # int32
    seeds: tf.Tensor  # int32


class History(NamedTuple):
    """When each token was seen last: time 0 is that of the first new token, the prompt's last one has -1."""

    last_seen: tf.Tensor  # int32 [B, N]; `NEVER` for those that were not
    time: tf.Tensor  # int32 scalar, of the next token; rows go in step


def no_history(batch_size, n_token):
    """The `History` before a text."""
    return History(tf.fill([batch_size, n_token], NEVER), tf.constant(0))


def remember(history, token):
    """The `History` after one more token a row, int32 `[B]`."""
    places = tf.stack([tf.range(keras.ops.shape(token)[0]), token], -1)
    times = tf.fill([keras.ops.shape(token)[0]], history.time)
    return History(tf.tensor_scatter_nd_update(history.last_seen, places, times), history.time + 1)


def remember_segment(history, tokens, lengths):
    """The `History` after the first `lengths[b]` tokens of each row of `tokens`, int32 `[B]` and `[B, n]`.

    The next token has time 0 again: the times of earlier tokens are moved back by as much as their row has grown.
    """
    batch, n = keras.ops.shape(tokens)
    column, lengths = tf.range(n), lengths[:, None]
    moved = tf.maximum(history.last_seen - history.time - lengths, NEVER)
    places = tf.stack([tf.broadcast_to(tf.range(batch)[:, None], [batch, n]), tokens], -1)
    times = tf.where(column < lengths, column - lengths, NEVER)
    return History(tf.tensor_scatter_nd_max(moved, places, times), tf.zeros_like(history.time))


def sample_categorical(scores, uniform):
    """Draws from `softmax(scores)` by its cumulative sums: float `[B, n]` -> int32 `[B]`; -inf is never drawn.

    `uniform` is float64 `[B]` in [0, 1).
    """
    weights = tf.exp(tf.cast(scores - tf.reduce_max(scores, -1, keepdims=True), tf.float64))
    cumulative = tf.cumsum(weights, -1)
    chosen = tf.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:], side="right")[:, 0]
    return tf.minimum(chosen, tf.shape(scores)[-1] - 1)


def top_k_top_p(scores, top_k, top_p):
    """`scores` of the most likely tokens, the first `top_k`, of these the fewest that hold `top_p` of the probability.

    `scores`, float `[B, N]`, are log-probabilities up to a constant; other tokens get -inf.
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


def penalise(log_probs, history, penalty, window):
    """The log-probabilities, float `[B, N]`, of tokens among a row's last `window` ones times `penalty`.

    So a probability p becomes p**penalty. Log-probabilities are never positive: of the two rules of CTRL (Keskar et
    al. 2019), to divide positive scores and to multiply negative ones, the second is the one that applies.
    """
    recent = history.last_seen >= (history.time - window)[:, None]
    return tf.where(recent, log_probs * penalty[:, None], log_probs)


def at_least_min_p(scores, min_p):
    """`scores`, float `[B, N]`, with -inf for tokens less likely than `min_p` times the likeliest one."""
    least = tf.reduce_max(scores, -1, keepdims=True) + tf.math.log(min_p)[:, None]
    return tf.where(scores >= least, scores, -np.inf)


def is_neutral(sampling):
    """Whether tokens of all rows are drawn from the model's own distribution: bool scalar."""
    temperature, top_k, top_p, min_p, penalty, _, _ = sampling
    return tf.reduce_all((temperature == 1) & (top_k == 0) & (top_p == 1) & (min_p == 0) & (penalty == 1))


def apply_options(log_probs, sampling, history):
    """Applies the options to log-probabilities, float `[B, N]`; those that are neutral in all rows cost nothing.

    They apply in the order of Hugging Face: the penalty of repetitions, the temperature, `top_k`, `top_p`, `min_p`. As
    the likeliest token always stays, `min_p` leaves the same tokens before the two others as after them, but the share
    of `top_p` is one of all tokens that `top_k` leaves.

    Returns:
        `(log_probs, scores)`: `[B, N]`, with the penalty alone, and with all options, -inf for what they leave out.
    """
    temperature, top_k, top_p, min_p, penalty, window, _ = sampling
    temperature, top_p, min_p, penalty = (tf.cast(x, log_probs.dtype) for x in (temperature, top_p, min_p, penalty))
    penalised = tf.reduce_any(penalty != 1)
    log_probs = tf.cond(penalised, lambda: penalise(log_probs, history, penalty, window), lambda: log_probs)
    scores = log_probs / tf.where(temperature > 0, temperature, 1)[:, None]
    limited = tf.reduce_any((top_k > 0) | (top_p < 1))
    scores = tf.cond(limited, lambda: top_k_top_p(scores, top_k, top_p), lambda: scores)
    scores = tf.cond(tf.reduce_any(min_p > 0), lambda: at_least_min_p(scores, min_p), lambda: scores)
    return log_probs, scores


def precompute_softmax(lm):
    """The bins of the softmax in the type they are used in, split and joined once rather than for every token.

    A tuple of `(weight, bias, projection)`, one a bin; the first has the clusters after its words. It is empty where
    the words' probabilities come from a user's `call`.
    """
    if lm.has_own_probabilities:
        return ()
    tables, projs, biases, entries = lm.softmax.weights_with(lm.network.embedding)
    first, *others = clusters_of(tables, projs, biases)
    bins = [head_of(first, entries), *((cluster.table, cluster.bias) for cluster in others)]

    def cast(tensor):
        return None if tensor is None else tf.cast(tensor, lm.compute_dtype)

    return tuple(
        (cast(weight), tf.convert_to_tensor(bias), cast(proj)) for (weight, bias), proj in zip(bins, projs, strict=True)
    )


def sample_words(log_probs, uniform, sampling, history):
    """`sample` from the log-probabilities of all words, float `[B, N]`."""
    log_probs, scores = apply_options(log_probs, sampling, history)
    drawn = sample_categorical(scores, uniform[:, 0])
    return tf.where(sampling.temperature > 0, drawn, tf.argmax(log_probs, -1, output_type=tf.int32))


def sample(bins, hidden, uniform, sampling, history, static_shapes=False):
    """The next token of every row, drawn from its distribution.

    A token is drawn as the adaptive softmax is built: a word of the first bin or a bin, then a word of that bin. Where
    all options are neutral, no bin is computed but those drawn; with static shapes, all are.

    Args:
        bins: of `precompute_softmax`.
        hidden: `[B, E]`.
        uniform: float64 `[B, 2]` in [0, 1), of `uniform_draws`.
        sampling: `Sampling`.
        history: `History`.
        static_shapes: whether it is for XLA.

    Returns:
        int32 `[B]`.
    """
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
        return draw(logits(hidden, *bins[0]), lambda i, pick: logits(pick(hidden), *bins[i]))

    def general():
        head = tf.nn.log_softmax(logits(hidden, *bins[0]))
        tails = [tf.nn.log_softmax(logits(hidden, *tail)) for tail in bins[1:]]
        clusters = tf.split(head[:, sizes[0] :], len(tails), -1) if tails else []
        log_probs = tf.concat([head[:, : sizes[0]], *map(tf.add, clusters, tails)], -1)
        log_probs, scores = apply_options(log_probs, sampling, history)
        head, *tails = tf.split(scores, sizes, -1)
        head = tf.concat([head, *(tf.reduce_logsumexp(tail, -1, keepdims=True) for tail in tails)], -1)
        drawn = draw(head, lambda i, pick: pick(tails[i - 1]))
        return tf.where(sampling.temperature > 0, drawn, tf.argmax(log_probs, -1, output_type=tf.int32))

    return tf.cond(is_neutral(sampling), plain, general)


def uniform_draws(seeds, first, number):
    """Random numbers for the tokens `first ... first + number - 1` of every row: float64 `[number, B, 2]` in [0, 1).

    They are the same where TF_XLA_FLAGS makes TensorFlow compile clusters of operations.
    """
    batch = tf.shape(seeds)[0]
    place = tf.repeat(tf.range(first, first + number), batch)
    keys = tf.stack([tf.tile(seeds, [number]), place], -1)

    def draw(key):
        # Philox under XLA draws other numbers of type float64 than TensorFlow's kernel.
        in_graph = not tf.executing_eagerly()
        with tf.xla.experimental.jit_scope(compile_ops=False) if in_graph else contextlib.nullcontext():
            return tf.random.stateless_uniform([2], key, dtype=tf.float64, alg="philox")

    uniform = tf.map_fn(draw, keys, fn_output_signature=tf.TensorSpec([2], tf.float64))
    return tf.reshape(uniform, [number, batch, 2])


def check_integer(name, value, least, most=2**31 - 1):
    """Raises ValueError if `value` is no integer from `least` to `most`."""
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"{name} must be an integer from {least} to {most}, got {brief(value)}")


# What options must be, Python's numbers and tensors alike: `{name: (test, what messages say)}`.
OPTIONS = {
    "temperature": (lambda x: (x >= 0) & (x < np.inf), "be 0 or more"),
    "top_p": (lambda x: (x > 0) & (x <= 1), "lie in (0, 1]"),
    "min_p": (lambda x: (x >= 0) & (x < 1), "lie in [0, 1)"),
    "repetition_penalty": (lambda x: (x > 0) & (x < np.inf), "be positive"),
}


def check_sampling(
    batch,
    temperature=1.0,
    top_k=None,
    top_p=None,
    seed=None,
    min_p=None,
    repetition_penalty=None,
    repetition_window=REPETITION_WINDOW,
):
    """Checks the options of sampling, see `generate`, and makes a `Sampling` of them."""
    floats = {
        "temperature": temperature,
        "top_p": 1.0 if top_p is None else top_p,
        "min_p": 0.0 if min_p is None else min_p,
        "repetition_penalty": 1.0 if repetition_penalty is None else repetition_penalty,
    }
    for name, value in floats.items():
        (holds, allowed), number = OPTIONS[name], np.asarray(value)
        if number.ndim or number.dtype.kind not in "fiu" or not holds(number):
            raise ValueError(f"{name} must {allowed}, got {brief(value)}")
    if top_k is not None:
        check_integer("top_k", top_k, 1)
    check_integer("repetition_window", repetition_window, 1, LONGEST_WINDOW)
    seeds = [random.randrange(2**31) for _ in range(batch)] if seed is None else seed
    seeds = np.broadcast_to(np.asarray(seeds), [batch]) if np.shape(seeds) in ((), (batch,)) else np.zeros(0)
    if seeds.shape != (batch,) or seeds.dtype.kind not in "iu" or seeds.min() < -(2**31) or seeds.max() >= 2**31:
        raise ValueError(f"seed must be an integer of 32 bits, or one for each of the {batch} rows, got {brief(seed)}")
    return Sampling(
        **{name: tf.fill([batch], tf.cast(value, tf.float32)) for name, value in floats.items()},
        top_k=tf.fill([batch], int(top_k or 0)),
        repetition_window=tf.fill([batch], int(repetition_window)),
        seeds=tf.constant(seeds, tf.int32),
    )


SAMPLING = keywords_of(check_sampling)[1:]  # the names of the options


def repeated(rows, number):
    """Every row `number` times, of all tensors in a structure that have rows."""
    if isinstance(number, int) and number == 1:
        return rows
    return tf.nest.map_structure(lambda tensor: tf.repeat(tensor, number, 0) if tensor.shape.rank else tensor, rows)


def of_sequences(sampling, number):
    """The `Sampling` of `number` sequences for every row, a row's next to each other: `[B * number]`.

    The first sequence of a row keeps its seed. Each other has that of the one before plus 0x9E3779B9, in 32 bits.
    """
    sequence = tf.tile(tf.range(number), [tf.shape(sampling.seeds)[0]])
    sampling = repeated(sampling, number)
    return sampling._replace(seeds=sampling.seeds + sequence * (0x9E3779B9 - 2**32))
