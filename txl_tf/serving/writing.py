"""Requests to a served language model to generate text: their options and stop strings, and the sequences.

Shapes:
    B: batch      T: tokens of a request      n: sequences of a prompt      N: tokens of the longest row of a result
    S: stop strings of a row      L: units (tokens or bytes) of the longest stop string
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf

from txl_tf.config import SamplingConfig
from txl_tf.language.generation import Texts, generate_tokens
from txl_tf.language.language_model import LanguageModel
from txl_tf.language.sampling import SPECS, Sampling, repeated, sampling_of_sequences, uniform_draws
from txl_tf.language.stopping import BEFORE, Stops, aligned, token_units
from txl_tf.serving.request import Check, RequestLimits, checked, in_vocabulary, largest
from txl_tf.serving.tables import GraphTokenizer

MAX_STOPS = 8  # most stop strings of a row
LONGEST_STOP = 64  # most tokens of a stop string of ids, and most bytes of a stop string of text

_INTS: Any = tf.TensorSpec([None], tf.int32)
OPTIONS = {"max_new_tokens": _INTS, "seed": _INTS, **SPECS}  # the options of a request, and their types
NUMBER = {"num_return_sequences": _INTS}  # a further option, of `generate` and `generate_texts`
# The values of options that a request leaves out. One row stands for all rows.
DEFAULTS = {
    "max_new_tokens": np.array([64], np.int32),
    "seed": np.array([0], np.int32),
    **{name: np.array([getattr(SamplingConfig, name)], spec.dtype.as_numpy_dtype) for name, spec in SPECS.items()},
    "num_return_sequences": np.array([1], np.int32),
    "stop_ids": np.zeros([1, 0, 0], np.int32),
    "stop": np.array([[""]]),
}
# The specs of the tensors of `generate_sequences`: `tokens`, `lengths`, `options` and `stops`.
_TABLE: Any = tf.TensorSpec([None, None], tf.int32)
_TABLES: Any = tf.TensorSpec([None, None, None], tf.int32)
_TOKEN: Any = tf.TensorSpec([], tf.int32)
GENERATE_SPECS = (_TABLE, _INTS, OPTIONS | NUMBER, Stops(_TOKEN, _TABLES, _TABLE, _TABLE))
_CHECKS = {field.name: field.metadata["check"] for field in dataclasses.fields(SamplingConfig)}
# The condition of each option, and the text that follows "must" in the message if it does not hold.
_RANGES = {
    **{name: (check.test, check.what) for name, check in _CHECKS.items()},
    "num_return_sequences": (lambda x: x >= 1, "be 1 or more"),
}


def stops_of_ids(stop_ids: Any, batch: tf.Tensor, n_token: int) -> Stops:
    """The `Stops` for stop strings of ids. Adds checks of the strings to the graph.

    Args:
        stop_ids: int32 `[B, S, L]`, or `[1, S, L]` for all rows, padded with -1 at the end.
        batch: B.
        n_token: size of the vocabulary.
    """
    valid = stop_ids >= 0
    longest = tf.shape(stop_ids)[2]
    checks = [
        *_check_stops("stop_ids", stop_ids, batch),
        Check(longest <= LONGEST_STOP, f"a stop string of stop_ids must have at most {LONGEST_STOP} ids", longest),
        Check(
            ~(valid[..., 1:] & ~valid[..., :-1]), "stop_ids may have -1 only after the ids of a stop string", stop_ids
        ),
        in_vocabulary("stop_ids", stop_ids, n_token, least=-1),
    ]
    lengths = tf.reduce_sum(tf.cast(valid, tf.int32), -1)
    return _stops_of_units(checked(checks, stop_ids), lengths, tf.range(n_token)[:, None], batch)


def stops_of_text(stop: tf.Tensor, batch: tf.Tensor, text: GraphTokenizer) -> Stops:
    """The `Stops` for stop strings of text. Adds checks of the strings to the graph.

    Args:
        stop: strings `[B, S]`, or `[1, S]` for all rows. "" is no stop string.
        batch: B.
        text: the vocabulary.
    """
    size = tf.strings.length(stop)
    short = Check(size <= LONGEST_STOP, f"a string of stop must have at most {LONGEST_STOP} bytes", size)
    stop = checked([*_check_stops("stop", stop, batch), short], stop)
    return _stops_of_units(*text.stop_units(stop), tf.constant(token_units(text.vocab)), batch)


def _stops_of_units(strings: tf.Tensor, lengths: tf.Tensor, units: tf.Tensor, batch: tf.Tensor) -> Stops:
    """The `Stops` for stop strings given as units.

    Args:
        strings: int32 `[B or 1, S, L]`, the units of each stop string.
        lengths: int32 `[B or 1, S]`, the number of units of each.
        units: int32 `[n_token, any]`, the units of every token of the vocabulary.
        batch: B.
    """
    _, count, longest = tf.unstack(tf.shape(strings))
    strings = tf.broadcast_to(aligned(strings, lengths), [batch, count, longest])
    return Stops(tf.constant(-1), strings, units, tf.fill([1, longest], BEFORE))


def _check_stops(name: str, stops: tf.Tensor, batch: tf.Tensor) -> list[Check]:
    """Checks of the number of rows of the argument `name`, and of the number of stop strings for each row."""
    rows, number = tf.unstack(tf.shape(stops)[:2])
    return [
        Check((rows == batch) | (rows == 1), f"{name} must have 1 row, or one for each row of the request", rows),
        Check(number <= MAX_STOPS, f"{name} must have at most {MAX_STOPS} stop strings for each row", number),
    ]


def checked_options(
    limits: RequestLimits, given: str, tokens: tf.Tensor, lengths: tf.Tensor, options: dict[str, tf.Tensor]
) -> tuple:
    """Adds the checks of a request to the graph, and returns its tokens, lengths and options.

    Args:
        limits: how large the request may be.
        given: name of the argument that contains the tokens, such as "text".
        tokens, lengths: the prompts, `[B, T]`, and their lengths, `[B]`.
        options: the options of `OPTIONS` and `NUMBER`, each `[B]` or `[1]`.

    Returns:
        `(tokens, lengths, options)`.
    """
    batch, n = tf.unstack(tf.shape(tokens))
    checks = _option_checks(limits, given, batch, n, {"lengths": lengths, **options})
    return checked(checks, tokens, lengths, options)


def generate_sequences(
    lm: LanguageModel, start_token: int, tokens: tf.Tensor, lengths: tf.Tensor, options: dict[str, tf.Tensor],
    stops: Stops,
) -> Texts:  # fmt: skip
    """Generates, for every prompt, as many continuations as its row asks for.

    `GENERATE_SPECS` has the specs of the tensors. Adds a check that all tokens are in the vocabulary to the graph.

    Args:
        lm: language model.
        start_token: token that a prompt of length 0 continues. It is not part of the result.
        tokens, lengths, options: as `checked_options` returns them.
        stops: the stop strings of each row of the request.

    Returns:
        `Texts` of prompts and new tokens together: `tokens` `[B, n, N]`, `lengths` and `excess` `[B, n]`, where n is
        the largest `num_return_sequences`. Sequences that a row does not ask for have length 0.
    """
    batch, prompt_len = tf.unstack(tf.shape(tokens))
    options = {name: tf.broadcast_to(vector, [batch]) for name, vector in options.items()}
    prompt = tf.where(tf.sequence_mask(lengths, prompt_len), tokens, 0)
    prompt = checked([in_vocabulary("tokens", prompt, lm.network.n_token)], prompt)

    # An empty prompt becomes `start_token`. If all prompts are empty, they get a column for it.
    empty = lengths == 0
    prompt = tf.pad(prompt, [[0, 0], [0, tf.cast(prompt_len == 0, tf.int32)]])
    first = tf.where(empty, start_token, prompt[:, 0])
    prompt = tf.concat([first[:, None], prompt[:, 1:]], 1)
    max_new_tokens = options.pop("max_new_tokens")
    n_wanted = options.pop("num_return_sequences")
    number: Any = tf.reduce_max(n_wanted)
    longest = prompt_len + tf.reduce_max(max_new_tokens)
    is_wanted = tf.range(number) < n_wanted[:, None]  # [B, n]
    sampling = sampling_of_sequences(Sampling(seeds=options.pop("seed"), **options), number)
    texts = generate_tokens(
        lm,
        prompt,
        tf.maximum(lengths, 1),
        uniform_draws(sampling.seeds, 0, tf.reduce_max(max_new_tokens)),
        tf.reshape(tf.where(is_wanted, max_new_tokens[:, None], 0), [-1]),
        sampling,
        stops._replace(strings=repeated(stops.strings, number)),
        number,
    )

    # The sequences of an empty prompt lose `start_token`, their first token.
    empty = tf.repeat(empty, number)
    tokens = tf.where(empty[:, None], tf.roll(texts.tokens, -1, 1), texts.tokens)[:, :longest]
    text_lengths = tf.where(tf.reshape(is_wanted, [-1]), texts.lengths - tf.cast(empty, tf.int32), 0)
    tokens = tf.where(tf.sequence_mask(text_lengths, longest), tokens, 0)
    return Texts(
        tf.reshape(tokens, [batch, number, longest]),
        tf.reshape(text_lengths, [batch, number]),
        tf.reshape(texts.excess, [batch, number]),
    )


def _option_checks(limits: RequestLimits, given: str, batch: Any, n: Any, vectors: dict[str, tf.Tensor]) -> list[Check]:
    """The checks of a request whose argument `given` has `[batch, n]` tokens.

    `vectors` are the lengths and the options of the rows by name, each `[batch]`; an option may also be `[1]`.
    """
    max_tokens = limits.max_tokens
    checks = limits.row_checks(given, batch)
    checks.append(Check(n <= max_tokens, f"tokens must be at most {max_tokens} a row", n))
    for name, vector in vectors.items():
        rows = tf.shape(vector)
        valid = (rows[0] == batch) | (rows[0] == 1) if name in DEFAULTS else rows[0] == batch
        checks.append(Check(valid, f"{name} must be [batch], as {given} are", rows))

    ranges_of_request = {
        "lengths": (lambda x: (x >= 0) & (x <= n), "lie between 0 and those of tokens"),
        "max_new_tokens": (lambda x: (x >= 0) & (x <= max_tokens), f"lie between 0 and {max_tokens}"),
    }
    for name, (holds, allowed) in (ranges_of_request | _RANGES).items():
        checks.append(Check(holds(vectors[name]), f"{name} must {allowed}", vectors[name]))
    checks.append(_window_check(vectors["repetition_window"], vectors["repetition_penalty"]))
    rows = tf.cast(batch, tf.int64) * tf.cast(tf.reduce_max(vectors["num_return_sequences"]), tf.int64)
    message = f"{given} must have at most {limits.max_rows} rows, times num_return_sequences"
    new_tokens = largest(vectors["max_new_tokens"])
    size = limits.size_check(given, rows, tf.maximum(n, 1), new_tokens)
    return [*checks, Check(rows <= limits.max_rows, message, rows), size]


def _window_check(window: tf.Tensor, penalty: tf.Tensor) -> Check:
    """A check that a `repetition_window` has an effect, as `SamplingConfig.check_used` has it. Each is `[B]` or `[1]`.

    Vectors of any lengths are compared, because the check of the lengths is evaluated at the same time.
    """
    is_default = window == SamplingConfig.repetition_window
    penalises = penalty != SamplingConfig.repetition_penalty
    used = tf.cond(
        tf.size(window) == tf.size(penalty),
        lambda: tf.reduce_all(is_default | penalises),
        lambda: tf.reduce_all(is_default) | tf.reduce_any(penalises),  # one of them stands for all rows
    )
    message = "repetition_window must be left out without a repetition_penalty other than 1"
    return Check(used, message, lambda: tf.boolean_mask(window, tf.logical_not(is_default))[:1])
