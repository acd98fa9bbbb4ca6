"""Generates targets with an encoder-decoder and cached keys and values: beam search, sampling, greedy search.

`Transformer` and `Ensemble`, the `model` of most functions here, have two methods for them:

    start_decoding(source, rows_each, max_new_tokens) -> caches, sources, seen
    decode_step(ids, position, caches, sources, seen) -> log_probs, caches

Shapes:
    B: batch      K: beam_size      R: n_best      N: max_new_tokens      V: target_vocab_size
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from txl_tf.calls import known_names
from txl_tf.config.checks import check_integer
from txl_tf.data.pairs.parallel import PADDING
from txl_tf.errors import ParameterError
from txl_tf.kernels.shapes import Tensor, shape_of
from txl_tf.language.beam_search import LENGTH_PENALTY, NO_CHANCE, check_length_penalty, search
from txl_tf.language.loop import decode_until_ended, static_shapes
from txl_tf.language.sampling import check_sampling, sample_categorical, tempered, top_k_top_p, uniform_draws
from txl_tf.language.stopping import no_stops
from txl_tf.nn.checks import check_eager, int_array
from txl_tf.nn.embedding import check_ids


@known_names
def generate(
    model: Any, /, source: Any, *, start: int, end: int | None, max_new_tokens: int | None = None, beam_size: int = 1,
    n_best: int | None = None, length_penalty: float = LENGTH_PENALTY, temperature: float = 0.0,
    top_k: int | None = None, top_p: float | None = None, seed: Any = None, suppress_tokens: Iterable[int] = (),
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Generates targets by greedy search, sampling or beam search, in one graph with cached keys and values.

    Args:
        model: `Transformer` or `Ensemble`. The function is its method.
        source: int `[batch, any]`, 0 at padding.
        start, end: ids with which targets begin and end. `end` may be `None`, except in a beam search.
        max_new_tokens: the largest number of tokens of a target, including the end; by default 100, or `max_len` if it
            is smaller.
        beam_size: number of hypotheses that a beam search follows. With 1, there is no beam search unless `n_best` is
            given.
        n_best: number of targets to return, each with its score. If it is given, a beam search finds them, also with
            `beam_size=1`, and the results have a dimension for it.
        length_penalty: of a beam search: alpha of Wu et al. 2016, by default 0.6. Scores are divided by
            `((5 + length) / 6)**alpha`. Without a beam search, it must be left out.
        temperature, top_k, top_p, seed: options of sampling, see `TransformerXLLM.generate`. With a temperature of 0,
            the default, the most likely token is taken.
        suppress_tokens: ids that no target may contain, such as those of `<s>` and `<unk>`.

    Returns:
        `(ids, scores)`: int32 `[batch, max_new_tokens]` without the start, and 0 after the end; and float32 (float64 if
        the model's dtype is) `[batch]`, the log-probability of the target. In a beam search, it is divided by the
        penalty. With `n_best`, `[batch, n_best, max_new_tokens]` and `[batch, n_best]`, the best first.

    Raises:
        ParameterError: an argument is out of its range, or has no effect because of another one; or the call is in a
            graph.
        UnknownArgumentError: an option does not exist; the message lists those that do.
    """
    check_eager("generate")
    source = _check_source(model, source)
    suppressed = check_suppressed(suppress_tokens, end, model.target_vocab_size)
    check_integer("beam_size", beam_size, 1, model.target_vocab_size - 1 - len(suppressed))
    searches = beam_size > 1 or n_best is not None
    n_tokens = min(100, model.max_len) if max_new_tokens is None else max_new_tokens
    check_integer("start", start, 1, model.target_vocab_size - 1)
    if end is not None or searches:
        check_integer("end", end, 1, model.target_vocab_size - 1)
    check_integer("max_new_tokens", n_tokens, 1, model.max_len)
    if n_best is not None:
        check_integer("n_best", n_best, 1, beam_size)
    check_length_penalty(length_penalty, searches)
    if searches and temperature:
        raise ParameterError("temperature", temperature, "0 for a beam search")
    for name, value in {"top_k": top_k, "top_p": top_p, "seed": seed}.items():
        if value is not None and not temperature:
            where = "for a beam search" if searches else "with a temperature of 0, which draws nothing"
            raise ParameterError(name, value, f"None {where}")
    sampling = check_sampling(len(source), temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    # NumPy's integers may have another dtype than int32.
    n_tokens, start, end, beam_size = int(n_tokens), int(start), -1 if end is None else int(end), int(beam_size)
    # The arguments become tensors, because every value of a Python number would get its own graph.
    source = tf.constant(source, tf.int32)
    limit = tf.constant(n_tokens)
    allowed = allowed_symbols(model, suppressed)
    if not searches:
        return model._sample(source, start, end, limit, sampling if temperature else None, allowed=allowed)
    penalty = tf.constant(length_penalty, model.loss_dtype)
    ids, scores = model._beam_search(source, start, end, limit, beam_size, int(n_best or 1), penalty, allowed=allowed)
    return (ids[:, 0], scores[:, 0]) if n_best is None else (ids, scores)


def _check_source(model: Any, source: Any) -> np.ndarray:
    """`source` of `generate` as an array.

    Raises ParameterError if it has another type or shape, an id outside the vocabulary, a row that is too long, or a
    row of only padding.
    """
    allowed = "integers [batch, any]"
    source = int_array("source", source, 2, allowed)
    check_ids("source", source, model.input_vocab_size)
    if source.shape[1] > model.max_len:
        allowed = f"at most max_len={model.max_len} long"
        raise ParameterError("source", source, allowed, f"source must be {allowed}, got {source.shape[1]}")
    if not np.any(source != PADDING, 1).all():
        message = f"source must have a symbol in every row, got only padding in row {np.argmin(source.any(1))}"
        raise ParameterError("source", source, "ids with a symbol in every row", message)
    return source


def check_suppressed(ids: Iterable[int], end: int | None, n_symbols: int) -> set[int]:
    """Checks `suppress_tokens` and returns them as a set.

    Raises ParameterError unless they are ids from 1 to `n_symbols - 1` other than the `end`.
    """
    if isinstance(ids, (str, bytes)) or not hasattr(ids, "__iter__"):
        raise ParameterError("suppress_tokens", ids, "several ids")
    ids = list(ids)
    for i in ids:
        check_integer("suppress_tokens", i, 1, n_symbols - 1)
        if i == end:
            allowed = f"ids other than the end, {end}, without which no target ends"
            raise ParameterError("suppress_tokens", ids, allowed)
    suppressed = {int(i) for i in ids}
    if len(suppressed) == n_symbols - 1:
        raise ParameterError("suppress_tokens", ids, f"fewer than all {n_symbols - 1} symbols")
    return suppressed


def allowed_symbols(model: Any, suppressed: Iterable[int]) -> Tensor:
    """The symbols that a target may contain, bool `[V]`: all except padding and the ids in `suppressed`."""
    allowed = np.ones([model.target_vocab_size], bool)
    allowed[[PADDING, *suppressed]] = False
    return tf.constant(allowed)


def sample_sequences(
    model: Any, source: Tensor, start: Any, end: Any, max_new_tokens: int, sampling: Any, limits: Tensor | None = None,
    allowed: Any = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Generates one target for every source by sampling, or by greedy search if `sampling` is `None`.

    Args:
        model, source, start, max_new_tokens, limits, allowed: see `beam_search`.
        end: id that ends a target; -1 for none.
        sampling: options of sampling, or `None`.

    Returns:
        `(ids, scores)`: int32 `[B, N]`, 0 after the end, and float `[B]`, the log-probabilities of the targets.
    """
    batch = shape_of(source)[0]
    zeros = tf.zeros([batch], model.loss_dtype)
    decode, caches = _decoder(model, source, 1, max_new_tokens, allowed, no_chance=-math.inf)
    uniform: Any = None if sampling is None else uniform_draws(sampling.seeds, 0, max_new_tokens)

    def step(i, stopped, state):
        """Returns the next token, int32 `[B]`, and the next state, which begins with that token."""
        last, scores, caches = state
        log_probs, caches = decode(last, i, caches)
        if sampling is None:
            token = tf.argmax(log_probs, -1, output_type=tf.int32)
        else:
            temperature, top_p = (tf.cast(x, log_probs.dtype) for x in (sampling.temperature, sampling.top_p))
            likely = top_k_top_p(tempered(log_probs, temperature), sampling.top_k, top_p)
            token = sample_categorical(likely, uniform[i][:, 0])  # a token has two random numbers; one is enough
        scores += tf.where(stopped, zeros, tf.gather(log_probs, token, batch_dims=1))
        return token, (token, scores, caches)

    state = tf.fill([batch], start), zeros, caches
    limits = tf.fill([batch], max_new_tokens) if limits is None else limits
    shapes = *static_shapes(state[:-1]), _growing(caches)
    new = decode_until_ended(step, state, max_new_tokens, limits, no_stops(1, end), PADDING, shapes)
    return new.tokens, new.state[1]


def _decoder(
    model: Any, source: Tensor, rows_each: int, max_new_tokens: int, allowed: Any = None, no_chance: float = NO_CHANCE
) -> tuple[Callable, Any]:
    """`(decode, caches)`: a function that calls `model.decode_step` for a source, and the first caches.

    Args:
        model, source, max_new_tokens, allowed: see `beam_search`.
        rows_each: number of targets for each source.
        no_chance: the log-probability of symbols that are not allowed. Sampling divides it by the temperature, which
            may be above 1e9, so it must be infinite there.
    """
    caches, *rest = model.start_decoding(source, rows_each, max_new_tokens)
    allowed = allowed_symbols(model, ()) if allowed is None else allowed

    def decode(ids, position, caches):
        """`model.decode_step`, in which symbols that are not allowed have the log-probability `no_chance`."""
        log_probs, caches = model.decode_step(ids, position, caches, *rest)
        return tf.where(allowed, log_probs, tf.constant(no_chance, log_probs.dtype)), caches

    return decode, caches


def _growing(caches: Any) -> Any:
    """Static shapes of the caches that hold in every step: any number of positions, which are axis 2."""
    return tf.nest.map_structure(lambda x: tf.TensorShape([*x.shape[:2], None, *x.shape[3:]]), caches)


def beam_search(
    model: Any, source: Tensor, start: Any, end: Any, max_new_tokens: int, beam_size: int, n_best: int,
    length_penalty: Any, limits: Any = None, allowed: Any = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Searches the most likely targets of every source with `beam_size` hypotheses, see `search`.

    Args:
        model: `Transformer` or `Ensemble`.
        source: int `[B, S]`.
        start, end: ids with which targets begin and end.
        max_new_tokens: the largest number of tokens of a target.
        beam_size: number of hypotheses.
        n_best: number of targets of each source to return, at most `beam_size`.
        length_penalty: alpha. Scores are divided by `((5 + length) / 6)**alpha`.
        limits: int32 `[B]`, the largest number of tokens in each row, by default `max_new_tokens`. The result of a row
            does not depend on the other rows.
        allowed: bool `[V]`, the symbols that a target may contain; by default all except padding.

    Returns:
        `(ids, scores)`: int32 `[B, R, N]`, 0 after the end, and float `[B, R]`, the best first.
    """
    batch = shape_of(source)[0]
    decode, caches = _decoder(model, source, beam_size, max_new_tokens, allowed)

    def select(caches: Any, rows: Tensor) -> Any:
        return tf.nest.map_structure(lambda cache: tf.gather(cache, rows, axis=1), caches)

    limits = tf.fill([batch], max_new_tokens) if limits is None else limits
    penalty = tf.convert_to_tensor(length_penalty, model.loss_dtype)
    return search(
        decode, select, caches, start, end, max_new_tokens, beam_size, n_best, penalty, limits, _growing(caches)
    )
