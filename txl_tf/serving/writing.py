"""The signatures of a served language model that write: what a request asks for, checked, and the answer in sequences.

Shapes:
    B: batch      T: tokens of a request      n: sequences of a prompt      N: tokens of the longest row of a result
    S: stop strings      L: tokens or bytes of the longest one
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from txl_tf.config import REPETITION_WINDOW
from txl_tf.models.decoding.generation import Texts, generate_tokens
from txl_tf.models.decoding.sampling import LONGEST_WINDOW, Sampling, repeated
from txl_tf.models.decoding.stopping import BEFORE, Stops, aligned, token_units
from txl_tf.serving.request import StoredModel, check_ids
from txl_tf.serving.text import Check, require_all

MOST_STOPS, LONGEST_STOP = 8, 64  # stop strings of a row; tokens or bytes of one

_INTS, _FLOATS = tf.TensorSpec([None], tf.int32), tf.TensorSpec([None], tf.float32)
OPTIONS = {"max_new_tokens": _INTS, "temperature": _FLOATS, "top_k": _INTS, "top_p": _FLOATS, "seed": _INTS}
# What a request may leave out, as a server then fills it in. One row stands for all.
MORE_OPTIONS = {"min_p": _FLOATS, "repetition_penalty": _FLOATS, "repetition_window": _INTS}
NUMBER = {"num_return_sequences": _INTS}
DEFAULTS = {
    "min_p": np.float32([0]),
    "repetition_penalty": np.float32([1]),
    "repetition_window": np.int32([REPETITION_WINDOW]),
    "num_return_sequences": np.int32([1]),
    "stop_ids": np.zeros([1, 0, 0], np.int32),
    "stop": np.array([[""]]),
}


class WritingSignatures(StoredModel):
    """`generate`, `generate_text` and `generate_texts` of `ServingSignatures`."""

    def writing_arguments(self) -> dict:
        """`{function: {argument: spec}}`."""
        segment, stop_ids = tf.TensorSpec([None, None], tf.int32), tf.TensorSpec([None, None, None], tf.int32)
        options = {**OPTIONS, **MORE_OPTIONS}
        found = {self.generate: {"tokens": segment, "lengths": _INTS, **options, **NUMBER, "stop_ids": stop_ids}}
        if self.text is not None:
            strings = {"text": tf.TensorSpec([None], tf.string), "stop": tf.TensorSpec([None, None], tf.string)}
            found[self.generate_text] = {**strings, **options}
            found[self.generate_texts] = {**strings, **options, **NUMBER}
        return found

    def generate(self, tokens: tf.Tensor, lengths: tf.Tensor, stop_ids: tf.Tensor, **options: tf.Tensor) -> dict:
        valid, (batch, n, most) = stop_ids >= 0, tf.unstack(tf.shape(stop_ids))
        gap = valid[..., 1:] & ~valid[..., :-1]
        checks = [
            *_check_stops("stop_ids", tf.shape(tokens)[0], batch, n),
            Check(most <= LONGEST_STOP, f"stop_ids must be at most {LONGEST_STOP} a stop string", most),
            Check(~gap, "stop_ids must have -1 behind ids alone", stop_ids),
        ]
        with tf.control_dependencies([require_all(checks)]):
            stop_ids = check_ids("stop_ids", tf.identity(stop_ids), self.lm.network.n_token, least=-1)
        units = tf.range(self.lm.network.n_token)[:, None]
        stops = stop_ids, tf.reduce_sum(tf.cast(valid, tf.int32), -1), units
        texts = self._write("tokens", tokens, lengths, stops, **options)
        first = {"tokens": texts.tokens[:, 0], "lengths": texts.lengths[:, 0]}
        return {**first, "sequences": texts.tokens, "sequence_lengths": texts.lengths}

    def generate_text(self, **arguments: tf.Tensor) -> dict:
        number = tf.constant(DEFAULTS["num_return_sequences"])
        return {self._named("text"): tf.reshape(self._texts(**arguments, num_return_sequences=number), [-1])}

    def generate_texts(self, **arguments: tf.Tensor) -> dict:
        return {self._named("texts"): self._texts(**arguments)}

    def _texts(self, text: tf.Tensor, stop: tf.Tensor, **options: tf.Tensor) -> tf.Tensor:
        """Strings `[B, n]`; one that was not asked for is "", and one that ends at a stop string ends with it."""
        size = tf.strings.length(stop)
        checks = [
            *_check_stops("stop", tf.shape(text)[0], *tf.unstack(tf.shape(stop))),
            Check(size <= LONGEST_STOP, f"stop must be at most {LONGEST_STOP} bytes a string", size),
        ]
        with tf.control_dependencies([require_all(checks)]):
            stops = *self.text.stop_units(tf.identity(stop)), tf.constant(token_units(self.text.vocab))
        texts = self._write("text", *self._encode(text), stops, **options)
        shape, longest = tf.shape(texts.lengths), tf.shape(texts.tokens)[-1]
        found = self.text.decode(tf.reshape(texts.tokens, [-1, longest]), tf.reshape(texts.lengths, [-1]))
        if self.text.vocab.level == "subword":
            kept = tf.strings.length(found) - tf.reshape(texts.excess, [-1])
            found = tf.strings.substr(found, tf.zeros_like(kept), kept)
        return tf.reshape(found, shape)

    def _write(self, given: str, tokens: tf.Tensor, lengths: tf.Tensor, stops: tuple, **options: tf.Tensor) -> Texts:
        """What `generate` writes after `tokens` `[B, T]`, which a request gave as `given`.

        Args:
            stops: stop strings in units, `[B, S, L]`, their lengths, `[B, S]`, and the units of all tokens.

        Returns:
            `Texts` whose tensors have sequences: `[B, n, N]` and `[B, n]`.
        """
        batch, n = tf.unstack(tf.shape(tokens))
        with tf.control_dependencies([require_all(self._check_options(given, tokens, lengths, **options))]):
            tokens, lengths = tf.identity(tokens), tf.identity(lengths)
            options = {name: tf.broadcast_to(vector, [batch]) for name, vector in options.items()}
        prompt = check_ids("tokens", tf.where(tf.sequence_mask(lengths, n), tokens, 0), self.lm.network.n_token)

        empty = lengths == 0
        prompt = tf.pad(prompt, [[0, 0], [0, tf.cast(n == 0, tf.int32)]])
        first = tf.where(empty, self.start_token, prompt[:, 0])
        prompt = tf.concat([first[:, None], prompt[:, 1:]], 1)
        limits, wanted = options.pop("max_new_tokens"), options.pop("num_return_sequences")
        number, longest = tf.reduce_max(wanted), n + tf.reduce_max(limits)
        asked = tf.range(number) < wanted[:, None]
        limits = tf.reshape(tf.where(asked, limits[:, None], 0), [-1])
        sampling = Sampling(seeds=options.pop("seed"), **options)
        written = generate_tokens(
            self.lm, prompt, tf.maximum(lengths, 1), limits, sampling, _stops_of(*stops, batch, number), number
        )

        empty = tf.repeat(empty, number)
        tokens = tf.where(empty[:, None], tf.roll(written.tokens, -1, 1), written.tokens)[:, :longest]
        ends = tf.where(tf.reshape(asked, [-1]), written.lengths - tf.cast(empty, tf.int32), 0)
        tokens = tf.where(tf.sequence_mask(ends, longest), tokens, 0)
        return Texts(
            tf.reshape(tokens, [batch, number, longest]),
            *(tf.reshape(vector, [batch, number]) for vector in (ends, written.excess)),
        )

    def _check_options(
        self, given, tokens, lengths, max_new_tokens, temperature, top_k, top_p, seed, **more
    ) -> list[Check]:
        (batch, n), most = tf.unstack(tf.shape(tokens)), self.max_tokens
        checks = [*self.limits.check_rows(given, batch), Check(n <= most, f"tokens must be at most {most} a row", n)]
        vectors = {"lengths": lengths, "max_new_tokens": max_new_tokens, "temperature": temperature}
        vectors |= {"top_k": top_k, "top_p": top_p, "seed": seed, **more}
        for name, vector in vectors.items():
            rows = tf.shape(vector)
            valid = (rows[0] == batch) | (rows[0] == 1) if name in more else rows[0] == batch
            checks.append(Check(valid, f"{name} must be [batch], as {given} are", rows))
        few, finite = (max_new_tokens >= 0) & (max_new_tokens <= most), temperature < float("inf")
        min_p, penalty = more["min_p"], more["repetition_penalty"]
        window, number = more["repetition_window"], more["num_return_sequences"]
        rows, most_rows = tf.cast(batch, tf.int64) * tf.cast(tf.reduce_max(number), tf.int64), self.limits.max_rows
        return [
            *checks,
            Check((lengths >= 0) & (lengths <= n), "lengths must lie between 0 and those of tokens", lengths),
            Check(few, f"max_new_tokens must lie between 0 and {most}", max_new_tokens),
            Check((temperature >= 0) & finite, "temperature must be 0 or more", temperature),
            Check(top_k >= 0, "top_k must be 1 or more, or 0 for all", top_k),
            Check((top_p > 0) & (top_p <= 1), "top_p must lie in (0, 1]", top_p),
            Check((min_p >= 0) & (min_p < 1), "min_p must lie in [0, 1)", min_p),
            Check((penalty > 0) & (penalty < float("inf")), "repetition_penalty must be positive", penalty),
            Check(
                (window >= 1) & (window <= LONGEST_WINDOW),
                f"repetition_window must lie between 1 and {LONGEST_WINDOW}",
                window,
            ),
            Check(number >= 1, "num_return_sequences must be 1 or more", number),
            Check(rows <= most_rows, f"{given} must have at most {most_rows} rows, times num_return_sequences", rows),
            self.limits.check_size(given, rows, tf.maximum(n, 1), tf.reduce_max(tf.pad(max_new_tokens, [[0, 1]]))),
        ]


def _check_stops(name: str, batch: tf.Tensor, rows: tf.Tensor, number: tf.Tensor) -> list[Check]:
    return [
        Check((rows == batch) | (rows == 1), f"{name} must have 1 row, or one for each row of the request", rows),
        Check(number <= MOST_STOPS, f"{name} must be at most {MOST_STOPS} stop strings a row", number),
    ]


def _stops_of(strings: tf.Tensor, lengths: tf.Tensor, units: tf.Tensor, batch: tf.Tensor, number: tf.Tensor) -> Stops:
    """`Stops` of every sequence."""
    _, count, most = tf.unstack(tf.shape(strings))
    strings = repeated(tf.broadcast_to(aligned(strings, lengths), [batch, count, most]), number)
    return Stops(tf.constant(-1), strings, units, tf.fill([1, most], BEFORE))
