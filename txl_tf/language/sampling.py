"""Samples the next token of every row from its hidden state, with the options of `generate`.

To add an option:

1. Add a field to the end of `SamplingConfig` of `txl_config/sampling.py`, and a field with the same name to `Sampling`
   below, between `repetition_window` and `seeds`. The tests of sampling expect both in the same order.
2. Add its effect to `apply_options` below. If the option has no effect without another one, see `check_used` of
   `SamplingConfig`, and `is_neutral` below.
3. Add an argument to `generate` (`language/generation.py`).
4. Add a component to the page of the demo (`txl_programs/demo/language_model_page.py`), and its texts and the option's
   name in Chinese to `txl_programs/demo/chinese.py`.
5. If the option changes the most likely token, add it to `also_greedy` in `txl_programs/generate.py`. Otherwise, the
   program refuses it together with `--greedy`.
6. Add it to the docs: the options in "Generate" of docs/guide.md, and in docs/serving.md the fields of a completion,
   the signatures and the defaults; also the docstring in `serving/language_model.py`.
7. Add a bad value to `BAD` in `tests/config_test.py`.

Flags, requests to servers and SavedModels get the option from `SamplingConfig`.

Shapes:
    B: batch      N: n_token, the vocabulary      E: d_model
"""

import dataclasses
import functools
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from txl_config.sampling import LONGEST_WINDOW
from txl_tf.config import SamplingConfig
from txl_tf.config.checks import check_integer
from txl_tf.equations import head_of
from txl_tf.errors import ParameterError
from txl_tf.kernels import logits
from txl_tf.kernels.shapes import Size, Tensor, shape_of
from txl_tf.nn.adaptive import clusters_of
from txl_tf.nn.checks import as_array

NEVER = -LONGEST_WINDOW - 1  # the time of tokens that have not been seen: no `repetition_window` reaches back to it
NEXT_SEED = 0x9E3779B9  # difference between the seeds of two sequences of a row

# The options of sampling and their defaults in `generate`.
SAMPLING = {field.name: field.metadata["flag"] for field in dataclasses.fields(SamplingConfig)} | {"seed": None}
# The specs of the options of any number of rows.
SPECS: dict[str, Any] = {
    field.name: tf.TensorSpec([None], tf.int32 if isinstance(field.default, int) else tf.float32)
    for field in dataclasses.fields(SamplingConfig)
}


class Sampling(NamedTuple):
    """The options of `SamplingConfig` and the seed of each row: tensors `[B]`."""

    temperature: Tensor  # float32; 0 takes the most likely token
    top_k: Tensor  # int32; 0 for all
    top_p: Tensor  # float32; 1 for all
    min_p: Tensor  # float32; 0 for all
    repetition_penalty: Tensor  # float32; 1 for none
    repetition_window: Tensor  # int32
    seeds: Tensor  # int32


class History(NamedTuple):
    """The time at which each token was seen last. The first new token has time 0, the last token of the prompt -1."""

    last_seen: Tensor  # int32 [B, N]; `NEVER` for tokens that have not been seen
    time: Tensor  # int32 scalar, the time of the next token in all rows


def no_history(batch_size: Size, n_token: int) -> History:
    """The `History` before a text."""
    return History(tf.fill([batch_size, n_token], NEVER), tf.constant(0))


def remember(history: History, token: Tensor) -> History:
    """The `History` after `token`, int32 `[B]`: one more token in each row."""
    indices = tf.stack([tf.range(shape_of(token)[0]), token], -1)
    times = tf.fill([shape_of(token)[0]], history.time)
    return History(tf.tensor_scatter_nd_update(history.last_seen, indices, times), history.time + 1)


def remember_segment(history: History, tokens: Tensor, lengths: Tensor) -> History:
    """The `History` after the first `lengths[b]` tokens of each row of `tokens`, int32 `[B]` and `[B, n]`.

    The next token has time 0 again. So the times of earlier tokens decrease by the old time of the next token, and by
    the number of tokens that are added to their row.
    """
    batch, n = shape_of(tokens)
    column = tf.range(n)
    lengths = lengths[:, None]
    moved = tf.maximum(history.last_seen - history.time - lengths, NEVER)
    indices = tf.stack([tf.broadcast_to(tf.range(batch)[:, None], [batch, n]), tokens], -1)
    times = tf.where(column < lengths, column - lengths, NEVER)
    return History(tf.tensor_scatter_nd_max(moved, indices, times), tf.zeros_like(history.time))


def sample_categorical(scores: Tensor, uniform: Tensor) -> Tensor:
    """Draws one index for every row, with the probabilities `softmax(scores)`.

    It looks the random numbers up in the cumulative sums. It never draws an index whose score is -inf.

    Args:
        scores: float `[B, n]`.
        uniform: float64 `[B]` in [0, 1).

    Returns:
        int32 `[B]`.
    """
    weights = tf.exp(tf.cast(scores - tf.reduce_max(scores, -1, keepdims=True), tf.float64))
    cumulative = tf.cumsum(weights, -1)
    index = tf.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:], side="right")[:, 0]
    return tf.minimum(index, tf.shape(scores)[-1] - 1)  # `searchsorted` returns n if scores are NaN


def top_k_top_p(scores: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Sets the scores of unlikely tokens to -inf.

    It keeps the `top_k` most likely tokens and, of these, the smallest set of most likely ones whose probabilities,
    renormalised over the `top_k`, sum to at least `top_p`. The most likely token always stays.

    Args:
        scores: float `[B, N]`, log-probabilities up to a constant.
        top_k: int32 `[B]`; 0 keeps all tokens.
        top_p: float `[B]`, at most 1; 1 keeps all of the `top_k`. 0, which a tiny number becomes in float32, keeps one.
    """
    batch, n = shape_of(scores)
    ordered, order = tf.math.top_k(scores, n)
    is_likely = tf.range(n) < tf.where(top_k > 0, top_k, n)[:, None]
    probability_before = tf.cumsum(tf.nn.softmax(tf.where(is_likely, ordered, -np.inf)), -1, exclusive=True)
    # A rounded sum may reach 1 too early, so `top_p` = 1 is a case of its own.
    is_likely &= (probability_before < top_p[:, None]) | (top_p[:, None] == 1) | (tf.range(n) == 0)
    indices = tf.reshape(order + n * tf.range(batch)[:, None], [-1, 1])
    return tf.reshape(
        tf.scatter_nd(indices, tf.reshape(tf.where(is_likely, ordered, -np.inf), [-1]), [batch * n]), [batch, n]
    )


def penalise(log_probs: Tensor, history: History, penalty: Tensor, window: Tensor) -> Tensor:
    """Multiplies the log-probabilities, float `[B, N]`, of the last `window` tokens of a row by `penalty`.

    So a probability p becomes p**penalty, before the softmax. CTRL (Keskar et al. 2019) divides positive scores and
    multiplies negative ones. Log-probabilities are never positive, so they are always multiplied.
    """
    recent = history.last_seen >= (history.time - window)[:, None]
    return tf.where(recent, log_probs * penalty[:, None], log_probs)


def tempered(log_probs: Tensor, temperature: Tensor) -> Tensor:
    """Divides log-probabilities, float `[B, N]`, by the temperature, float `[B]`. The result is finite for the highest.

    The result is correct up to a constant in each row, which the softmax removes.
    """
    divisor = tf.maximum(temperature, 1e-30)[:, None]  # a tiny number may be 0 in float32
    # With a low temperature, all quotients could become -inf. So the highest log-probability is subtracted before.
    highest = tf.reduce_max(log_probs, -1, keepdims=True)
    return (log_probs - tf.where(divisor < 1e-3, highest, 0)) / divisor


def at_least_min_p(scores: Tensor, min_p: Tensor) -> Tensor:
    """Sets the scores, float `[B, N]`, of tokens less likely than `min_p` times the most likely one to -inf."""
    least = tf.reduce_max(scores, -1, keepdims=True) + tf.math.log(min_p)[:, None]
    return tf.where(scores >= least, scores, -np.inf)


def is_neutral(sampling: Sampling) -> Tensor:
    """Whether the options leave the model's distribution unchanged in all rows: bool scalar."""
    names = [name for name in SPECS if name != "repetition_window"]  # which has no effect without a penalty
    return tf.reduce_all([getattr(sampling, name) == getattr(SamplingConfig, name) for name in names])


def apply_options(log_probs: Tensor, sampling: Sampling, history: History) -> tuple[Tensor, Tensor]:
    """Applies the options to log-probabilities, float `[B, N]`. An option that changes nothing in any row is skipped.

    The order is that of Hugging Face: repetition penalty, temperature, `top_k`, `top_p`, `min_p`. So `top_p` is a share
    of the probability of the tokens that `top_k` leaves. The most likely token always stays, so `min_p` compares with
    the same token before and after `top_k` and `top_p`.

    Returns:
        `(log_probs, scores)`: float `[B, N]` each. The first has only the repetition penalty, the second all options;
        its value is -inf for tokens that must not be drawn.
    """
    floats = {name: x for name, x in sampling._asdict().items() if x.dtype.is_floating}
    options = sampling._replace(**{name: tf.cast(x, log_probs.dtype) for name, x in floats.items()})
    penalty, window = options.repetition_penalty, options.repetition_window
    penalised = tf.reduce_any(penalty != 1)
    log_probs = tf.cond(penalised, lambda: penalise(log_probs, history, penalty, window), lambda: log_probs)
    scores = tempered(log_probs, options.temperature)
    limited = tf.reduce_any((options.top_k > 0) | (options.top_p < 1))
    scores = tf.cond(limited, lambda: top_k_top_p(scores, options.top_k, options.top_p), lambda: scores)
    scores = tf.cond(tf.reduce_any(options.min_p > 0), lambda: at_least_min_p(scores, options.min_p), lambda: scores)
    return log_probs, scores


def precompute_softmax(lm: Any) -> tuple:
    """The weights of the softmax in the dtype of the computation, split into clusters once instead of for every token.

    Returns:
        A tuple of `(weight, bias, projection)`, one for each cluster. The first cluster has an entry for each of the
        others after its words. The tuple is empty if a user's `call` computes the probabilities.
    """
    if lm.has_own_probabilities:
        return ()
    tables, projs, biases, entries = lm.softmax.weights_with(lm.network.embedding)
    first, *later = clusters_of(tables, projs, biases)
    weights_and_biases = [head_of(first, entries), *((cluster.table, cluster.bias) for cluster in later)]

    def cast(tensor):
        """A tensor in the dtype of the computation; `None` for `None`."""
        return None if tensor is None else tf.cast(tensor, lm.compute_dtype)

    return tuple(
        (cast(weight), tf.convert_to_tensor(bias), cast(proj))
        for (weight, bias), proj in zip(weights_and_biases, projs, strict=True)
    )


def sample_words(log_probs: Tensor, uniform: Tensor, sampling: Sampling, history: History) -> Tensor:
    """Samples from the log-probabilities of all words, float `[B, N]`. Other arguments and result: see `sample`."""
    log_probs, scores = apply_options(log_probs, sampling, history)
    drawn = sample_categorical(scores, uniform[:, 0])
    return tf.where(sampling.temperature > 0, drawn, tf.argmax(log_probs, -1, output_type=tf.int32))


def sample(
    clusters: tuple, hidden: Tensor, uniform: Tensor, sampling: Sampling, history: History, static_shapes: bool = False
) -> Tensor:
    """Samples the next token of every row.

    It follows the adaptive softmax: it draws a word of the first cluster or another cluster, and then a word of that
    cluster. If no option changes the distribution, only the clusters that were drawn are computed. With static shapes,
    all are.

    Args:
        clusters: the clusters, from `precompute_softmax`.
        hidden: `[B, E]`.
        uniform: float64 `[B, 2]` in [0, 1), from `uniform_draws`.
        sampling: the options.
        history: the tokens that were seen, for the repetition penalty.
        static_shapes: whether the graph is for XLA.

    Returns:
        int32 `[B]`.
    """
    sizes = [bias.shape[0] for _, bias, _ in clusters]
    sizes[0] -= len(clusters) - 1
    starts = np.cumsum([0, *sizes[:-1]]).tolist()

    def draw(head, tail_scores):
        """Draws from the scores of the first cluster, then from `tail_scores(i, pick)` in the rows that drew cluster i.

        `pick(x)` is the rows of `x` that drew cluster i. With static shapes, it is all rows of `x`, and the words that
        the others draw are discarded.
        """
        drawn_in_head = token = sample_categorical(head, uniform[:, 0])
        for i in range(1, len(clusters)):
            drawn = drawn_in_head == sizes[0] + i - 1
            if static_shapes:
                word = sample_categorical(tail_scores(i, tf.identity), uniform[:, 1])
                token = tf.where(drawn, starts[i] + word, token)
            else:
                rows = tf.where(drawn)
                pick = functools.partial(tf.gather_nd, indices=rows)
                word = sample_categorical(tail_scores(i, pick), pick(uniform[:, 1]))
                token = tf.tensor_scatter_nd_update(token, rows, starts[i] + word)
        return token

    def plain():
        """Draws from the model's distribution."""
        return draw(logits(hidden, *clusters[0]), lambda i, pick: logits(pick(hidden), *clusters[i]))

    def general():
        """Draws with all options, which apply to the log-probabilities of all words."""
        head = tf.nn.log_softmax(logits(hidden, *clusters[0]))
        tails = [tf.nn.log_softmax(logits(hidden, *tail)) for tail in clusters[1:]]
        entries = tf.split(head[:, sizes[0] :], len(tails), -1) if tails else []  # of the later clusters, see `head_of`
        log_probs = tf.concat([head[:, : sizes[0]], *map(tf.add, entries, tails)], -1)
        log_probs, scores = apply_options(log_probs, sampling, history)
        head, *tails = tf.split(scores, sizes, -1)
        # The score of a cluster is the sum over its words.
        head = tf.concat([head, *(tf.reduce_logsumexp(tail, -1, keepdims=True) for tail in tails)], -1)
        drawn = draw(head, lambda i, pick: pick(tails[i - 1]))
        return tf.where(sampling.temperature > 0, drawn, tf.argmax(log_probs, -1, output_type=tf.int32))

    return tf.cond(is_neutral(sampling), plain, general)


def uniform_draws(seeds: Tensor, first: Size, number: Size) -> Tensor:
    """Random numbers for the tokens `first ... first + number - 1` of every row: float64 `[number, B, 2]` in [0, 1).

    Each token gets two: one to draw from the first cluster of the softmax, one to draw a word within another cluster.
    `first` may also be int32 `[B]`, with a number for every row.

    The numbers do not change if TF_XLA_FLAGS makes TensorFlow compile clusters of operations.
    """
    batch = tf.shape(seeds)[0]
    position = tf.reshape(tf.broadcast_to(first, [batch]) + tf.range(number)[:, None], [-1])
    keys = tf.stack([tf.tile(seeds, [number]), position], -1)

    no_limit: Any = None  # integers of all 32 bits

    @tf.autograph.experimental.do_not_convert  # eager `map_fn` would convert all that it calls
    def draw(key):
        """The two numbers of one token."""
        # From the same words, XLA makes other float64 numbers than TensorFlow's kernel. So this makes the kernel's: 52
        # of the bits of two words are the digits after the point.
        words = tf.random.stateless_uniform([2, 2], key, no_limit, no_limit, tf.int32, alg="philox")
        high, low = tf.unstack(tf.cast(words, tf.int64), axis=1)
        digits = (high & 0xFFFFF) * 2**32 + (low & 0xFFFFFFFF)
        return tf.cast(digits, tf.float64) * 2.0**-52

    uniform = tf.map_fn(draw, keys, fn_output_signature=tf.TensorSpec([2], tf.float64))
    return tf.reshape(uniform, [number, batch, 2])


def check_sampling(batch: int, *, seed: Any = None, **options: Any) -> Sampling:
    """Checks the options of sampling, see `generate`, and returns them as a `Sampling` for `batch` rows.

    Without a `seed`, it draws one for each row. Raises ParameterError if an option is out of its range, or if it has no
    effect because of another one.
    """
    options = {name: as_number(value) for name, value in options.items()}
    if options.get("top_k") is not None:  # here, `None` stands for all tokens; 0 does so only in requests to servers
        check_integer("top_k", options["top_k"], 1)
    config = SamplingConfig(**options)
    config.check_used()
    allowed = f"an integer of 32 bits, or one for each of the {batch} rows"
    seeds = as_array("seed", [random.randrange(2**31) for _ in range(batch)] if seed is None else seed, allowed)
    is_number = seeds.shape in ((), (batch,)) and seeds.dtype.kind in "iu"
    if not is_number or seeds.min() < -(2**31) or seeds.max() >= 2**31:
        raise ParameterError("seed", seed, allowed)
    return sampling_of([config] * batch, np.broadcast_to(seeds, [batch]))


def as_number(value: Any) -> Any:
    """Returns a number in an array or a tensor `[]` as a number of Python, and any other value as it is."""
    return np.asarray(value).item() if getattr(value, "shape", None) == () else value


def sampling_of(rows: Sequence[SamplingConfig], seeds: Any) -> Sampling:
    """The `Sampling` of rows with these options and seeds."""
    options = {name: tf.constant([getattr(row, name) for row in rows], spec.dtype) for name, spec in SPECS.items()}
    return Sampling(**options, seeds=tf.constant(seeds, tf.int32))


def repeated(rows: Any, number: Size) -> Any:
    """Repeats every row `number` times, in all tensors of a structure except scalars."""
    if isinstance(number, int) and number == 1:
        return rows
    return tf.nest.map_structure(lambda tensor: tf.repeat(tensor, number, 0) if tensor.shape.rank else tensor, rows)


def sampling_of_sequences(sampling: Sampling, number: Size) -> Sampling:
    """The options for `number` sequences of every row, which are neighbours in the result: `[B * number]`.

    The seeds are those of `seeds_of_sequences`.
    """
    sequence = tf.tile(tf.range(number), tf.shape(sampling.seeds))
    sampling = repeated(sampling, number)
    return sampling._replace(seeds=sampling.seeds + sequence * (NEXT_SEED - 2**32))  # int32, which overflows


def seeds_of_sequences(seed: int | None, number: int) -> list[int]:
    """The seeds of the `number` sequences of a row. Without a `seed`, it draws them.

    The first sequence has the seed of the row. Every other has the seed of the previous one plus `NEXT_SEED`, in 32
    bits.
    """
    if seed is None:
        return [random.randrange(2**31) for _ in range(number)]
    return [(seed + i * NEXT_SEED + 2**31) % 2**32 - 2**31 for i in range(number)]
