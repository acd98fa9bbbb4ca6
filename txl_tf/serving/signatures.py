"""The signatures of a served model.

Shapes:
    B: batch      T: tokens of a request      L: n_layer      H: n_head      M: mem_len      D: d_head
    n: top_n, or sequences of a prompt      N: tokens of the longest row of a result      S: stop strings
"""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from txl_tf.config import WEIGHT_TYPES, one_of
from txl_tf.models.decoding.sampling import check_integer
from txl_tf.models.language_model import LanguageModel
from txl_tf.models.transformer_xl.cache import CachedState, cached_forward, initial_state, precompute, state_from
from txl_tf.serving.request import RequestLimits, check_ids
from txl_tf.serving.text import Check, GraphTokenizer, require, require_all
from txl_tf.serving.writing import DEFAULTS, WritingSignatures

# Rough bytes that go with an array of this many numbers: what `sample` computes from the scores, with the history, and
# a new token's random numbers.
SYMBOL_BYTES, NEW_TOKEN_BYTES = 48, 512


def check_arguments(
    n_token: int, weights: str, top_n: int, max_tokens: int, start_token: int, max_rows: int | None = None
) -> None:
    """Raises ValueError where an argument of `ServingSignatures` is out of range."""
    if max_rows is not None:
        check_integer("max_rows", max_rows, 1)
    one_of(WEIGHT_TYPES)("weights", weights)
    check_integer("top_n", top_n, 1)
    check_integer("max_tokens", max_tokens, 1)
    check_integer("start_token", start_token, 0, n_token - 1)


class SegmentLimits(RequestLimits):
    """`RequestLimits` of a language model."""

    def __init__(self, lm: LanguageModel, max_rows: int | None, max_tokens: int):
        network, (first, *others) = lm.network, lm.softmax.bin_sizes
        keys_and_values = 4 * network.n_layer * 2 * network.n_head * network.d_head  # of a position
        logits = first + len(others) + max(others, default=0)
        positions = network.mem_len + getattr(lm, "context_len", 0)
        self.fresh_bytes = positions * keys_and_values + SYMBOL_BYTES * network.n_token
        self.token_bytes = keys_and_values + 4 * (logits + 2 * network.d_inner)
        super().__init__(max_rows, max_tokens)

    def row_bytes(self, tokens, new_tokens=0):
        return self.fresh_bytes + tokens * self.token_bytes + new_tokens * NEW_TOKEN_BYTES


class ServingSignatures(WritingSignatures):
    """The signatures of a served model, and its weights as they are stored.

        initial_state(batch_size) -> state
        score(tokens [B, T], labels [B, T], state) -> nll [B, T], state
        next(tokens [B, T], state) -> log_probs [B, n], ids [B, n], state
        generate(tokens [B, T]; lengths, sampling, num_return_sequences [B]; stop_ids [B, S, L])
            -> tokens [B, N], lengths [B], sequences [B, n, N], sequence_lengths [B, n]
        score_text(text [B]) -> nll [B, N], symbols [B, N], lengths [B]
        generate_text(text, sampling [B]; stop [B, S]) -> text [B]
        generate_texts(text, sampling, num_return_sequences [B]; stop [B, S]) -> texts [B, n]

    where sampling stands for max_new_tokens, temperature, top_k, top_p, seed, min_p, repetition_penalty and
    repetition_window. The last three, `num_return_sequences`, `stop` and `stop_ids` have default values, which a server
    takes where a request leaves them out; a single row of them stands for all rows.

    Ids and numbers are int32; nll and log-probabilities float32, nats. `generate` does what `lm.generate` does, row by
    row, `top_k` 0 for all, with zeros beyond `lengths`; a row of length 0 continues `start_token`, which is no part of
    the result. The first of a row's `sequences` is `tokens`; those that it did not ask for have length 0. Stop strings
    are filled up with "", and with -1 behind the ids of shorter ones; a text ends with its stop string. The nll of a
    text's first symbol, which nothing predicts, is 0. Strings are bytes; at byte level, where they need not be UTF-8,
    the results are called `text_bytes`, `texts_bytes` and `symbols_bytes`, which makes TensorFlow Serving encode them
    in base64. Arguments: see `export_saved_model`.

    """

    def __init__(
        self, lm: LanguageModel, weights: str, top_n: int, max_tokens: int, start_token: int,
        text: GraphTokenizer | None, max_rows: int | None = None,
    ):  # fmt: skip
        super().__init__(lm, weights)
        self.lm = lm
        self.top_n = top_n
        self.max_tokens = max_tokens
        self.limits = SegmentLimits(lm, max_rows, max_tokens)
        self.start_token = start_token
        self.text = text
        self.store_positions(weights)
        self.resources.text = text

    def store_positions(self, weights: str) -> None:
        """Decides the shape of a row of the state, and stores the position keys in the type `weights`."""
        network = self.lm.network
        self.memory = [network.n_layer, 2, network.n_head, network.mem_len, network.d_head]
        # Those that `next` needs for a single token, which would otherwise take the most time.
        klen = network.mem_len + 1
        self.position_keys = [
            tf.Variable(tf.cast(layer.position_keys[:, :klen], weights), trainable=False)
            for layer in precompute(network)
        ]
        self.resources.position_keys = self.position_keys

    warmup_values = {"max_new_tokens": 1, "top_p": 1, "batch_size": 1, "text": "", "stop": "", "stop_ids": -1}
    warmup_values |= {"repetition_penalty": 1, "repetition_window": 1, "num_return_sequences": 1}

    def signatures(self) -> dict[str, Callable]:
        segment, state = tf.TensorSpec([None, None], tf.int32), tf.TensorSpec([None, *self.memory], tf.float32)
        arguments = {
            self.initial_state: {"batch_size": tf.TensorSpec(None, tf.int32)},
            self.score: {"tokens": segment, "labels": segment, "state": state},
            self.next: {"tokens": segment, "state": state},
        }
        if self.text is not None:
            arguments[self.score_text] = {"text": tf.TensorSpec([None], tf.string)}
        defaults = {name: tf.constant(value) for name, value in DEFAULTS.items()}
        return self.concrete(arguments | self.writing_arguments(), defaults)

    # ------------------------------------------------------------------------------------------------ signatures

    def initial_state(self, batch_size: tf.Tensor) -> dict:
        most = self.limits.max_rows  # a 1 for every row, rather than one number, is what a server can batch
        rows = tf.reduce_sum(tf.cast(batch_size, tf.int64))
        valid = tf.reduce_all(batch_size >= 0) & (rows <= most)
        with tf.control_dependencies([require(valid, f"batch_size must lie between 0 and {most}", batch_size)]):
            rows = tf.cast(rows, tf.int32)
        return {"state": self.fresh_state(rows)}

    def score(self, tokens: tf.Tensor, labels: tf.Tensor, state: tf.Tensor) -> dict:
        found = tf.shape(labels)
        same = Check(tf.shape(tokens) == found, "labels must have the shape of tokens", found)
        tokens, state, labels = self._check_segment(tokens, state, [same], labels)
        labels = self._check_ids("labels", labels)
        hidden, state = self._read(tokens, state)
        return {"nll": self.lm.softmax.nll(hidden, labels, self.lm.network.embedding), "state": state}

    def next(self, tokens: tf.Tensor, state: tf.Tensor) -> dict:
        tokens, state = self._check_segment(tokens, state)
        hidden, state = tf.cond(
            tf.shape(tokens)[1] == 1, lambda: self._read_one(tokens, state), lambda: self._read(tokens, state)
        )
        log_probs = self.lm.softmax(hidden[:, -1:], embedding=self.lm.network.embedding)
        top = tf.math.top_k(log_probs[:, 0], self.top_n)
        return {"log_probs": top.values, "ids": top.indices, "state": state}

    def score_text(self, text: tf.Tensor) -> dict:
        ids, lengths = self._encode(text)
        n = tf.shape(ids)[1]
        tokens = tf.pad(ids, [[0, 0], [0, tf.maximum(2 - n, 0)]])  # at least one to read and one to predict
        hidden = self.read_text(tokens[:, :-1])
        nll = self.lm.softmax.nll(hidden, tokens[:, 1:], self.lm.network.embedding)
        nll = tf.pad(nll, [[0, 0], [1, 0]])[:, :n]
        inside = tf.sequence_mask(lengths, n)
        symbols = tf.where(inside, self.text.spell(ids), "")
        return {"nll": tf.where(inside, nll, 0), self._named("symbols"): symbols, "lengths": lengths}

    # ------------------------------------------------------------------------------------------------- their parts

    def _named(self, result: str) -> str:
        return f"{result}_bytes" if self.text.vocab.level == "byte" else result

    def _encode(self, text: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Ids `[B, N]`, filled up with zeros, and lengths `[B]`."""
        rows = tf.shape(text)[0]
        before = [*self.limits.check_rows("text", rows), self.limits.check_bytes(text)]
        with tf.control_dependencies([require_all(before)]):
            ids = self.text.encode(tf.identity(text))
        lengths = tf.cast(ids.row_lengths(), tf.int32)
        longest = tf.reduce_max(tf.pad(lengths, [[0, 1]], constant_values=1))
        message = f"text must be at most {self.max_tokens} tokens long"
        after = [Check(lengths <= self.max_tokens, message, lengths), self.limits.check_size("text", rows, longest)]
        with tf.control_dependencies([require_all(after)]):
            return ids.to_tensor(0), tf.identity(lengths)

    def _check_ids(self, name: str, ids: tf.Tensor) -> tf.Tensor:
        return check_ids(name, ids, self.lm.network.n_token)

    def _check_segment(self, tokens: tf.Tensor, state: tf.Tensor, checks=(), *others: tf.Tensor) -> list[tf.Tensor]:
        """Tokens, state and `others` after these checks and the ones of `tokens` and `state`."""
        (batch, n), rows = tf.unstack(tf.shape(tokens)), tf.shape(state)[0]
        checks = [
            *self.limits.check_rows("tokens", batch),
            *checks,
            Check((n >= 1) & (n <= self.max_tokens), f"tokens must be 1 to {self.max_tokens} a row", n),
            Check(rows == batch, "state must have as many rows as tokens", rows),
            self.limits.check_size("tokens", batch, n),
        ]
        with tf.control_dependencies([require_all(checks)]):
            tokens, *others = map(tf.identity, (tokens, state, *others))
        return [self._check_ids("tokens", tokens), *others]

    def fresh_state(self, rows: tf.Tensor) -> tf.Tensor:
        """The state before a text, `[B, ...]`."""
        return self._pack(initial_state(self.lm.network, rows))

    def read_text(self, tokens: tf.Tensor) -> tf.Tensor:
        """Hidden states `[B, T, d_model]` of whole texts."""
        network, (rows, length) = self.lm.network, tf.unstack(tf.shape(tokens))
        return cached_forward(network, precompute(network, length), tokens, initial_state(network, rows, length))[0]

    def _unpack(self, state: tf.Tensor, max_segment: tf.Tensor | int) -> CachedState:
        _, n_layer, _, *memory = state.shape
        state = tf.reshape(tf.cast(state, self.lm.compute_dtype), [tf.shape(state)[0], 2 * n_layer, *memory])
        rings = tf.unstack(state, axis=1)  # keys and values in turn
        return state_from(rings[::2], rings[1::2], max_segment)

    def _pack(self, cached: CachedState) -> tf.Tensor:
        """The inverse of `_unpack`, for a state at slot 0: fresh, or after a segment of `max_segment` tokens."""
        rings = [ring for pair in zip(cached.keys, cached.values, strict=True) for ring in pair]
        max_segment = tf.shape(rings[0])[2] - self.lm.network.mem_len
        state = tf.cast(tf.stack([ring[:, :, max_segment:] for ring in rings], 1), tf.float32)
        return tf.reshape(state, [tf.shape(state)[0], *self.memory])

    def _read(self, tokens: tf.Tensor, state: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Hidden states `[B, T, d_model]` and the state after the segment."""
        network, length = self.lm.network, tf.shape(tokens)[1]
        hidden, cached = cached_forward(network, precompute(network, length), tokens, self._unpack(state, length))
        return hidden, self._pack(cached)

    def _read_one(self, tokens: tf.Tensor, state: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """`_read` of a single token, with the position keys that are stored."""
        network = self.lm.network
        weights = [  # the token goes to the last slot, for which the table need not be rotated, nor be longer
            layer._replace(position_keys=tf.cast(keys, layer.qkv.dtype))
            for layer, keys in zip(precompute(network), self.position_keys, strict=True)
        ]
        tokens = tf.ensure_shape(tokens, [None, 1])
        hidden, cached = cached_forward(network, weights, tokens, self._unpack(state, max_segment=1))
        return hidden, self._pack(cached)
