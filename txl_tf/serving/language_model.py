"""The signatures of a served language model.

Shapes:
    B: batch      T: tokens of a request      n: top_n, or sequences of a prompt
    N: tokens of the longest row of a result      S: stop strings      L: tokens of the longest one
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from txl_tf.data.vocabulary import line_start_ids, newline_ids
from txl_tf.language.language_model import LanguageModel
from txl_tf.serving.request import (
    Check,
    RequestLimits,
    StoredModel,
    checked,
    finite,
    in_vocabulary,
    same_rows,
    same_shape,
)
from txl_tf.serving.state import ServedHiddenStates, ServedMemory, ServedWindow
from txl_tf.serving.tables import GraphTokenizer, read_text
from txl_tf.serving.writing import (
    DEFAULTS,
    NUMBER,
    OPTIONS,
    WRITTEN,
    checked_options,
    stops_of_ids,
    stops_of_text,
    write,
)

# Rough bytes that go with an array of this many numbers: what `sample` computes from the scores, with the history, and
# a new token's random numbers.
TOKEN_BYTES, NEW_TOKEN_BYTES = 48, 512


def limits_of(lm: LanguageModel, max_rows: int | None, max_tokens: int) -> RequestLimits:
    """`RequestLimits` of a language model."""
    network, (first, *others) = lm.network, lm.softmax.bin_sizes
    keys_and_values = 4 * network.n_layer * 2 * network.n_head * network.d_head  # of a position
    logits = first + len(others) + max(others, default=0)
    positions = network.mem_len + (lm.context_len if lm.has_window else 0)
    fresh = positions * keys_and_values + TOKEN_BYTES * network.n_token
    of_token = keys_and_values + 4 * (logits + 2 * network.d_inner)

    def row_bytes(tokens, new_tokens=0):
        return fresh + tokens * of_token + new_tokens * NEW_TOKEN_BYTES

    return RequestLimits(row_bytes, max_rows, max_tokens)


class LanguageModelSignatures(StoredModel):
    """The signatures of a served language model, and its weights as they are stored.

        initial_state(batch_size) -> state
        score(tokens [B, T], labels [B, T], state) -> nll [B, T], state
        next(tokens [B, T], state) -> log_probs [B, n], ids [B, n], state
        generate(tokens [B, T]; lengths, sampling, num_return_sequences [B]; stop_ids [B, S, L])
            -> tokens [B, N], lengths [B], sequences [B, n, N], sequence_lengths [B, n]
        score_text(text [B]) -> nll [B, N], symbols [B, N], lengths [B]
        score_lines(text [B]) -> the same, of lines as tools/score.py scores them
        generate_text(text, sampling [B]; stop [B, S]) -> text [B]
        generate_texts(text, sampling, num_return_sequences [B]; stop [B, S]) -> texts [B, n]

    where sampling stands for max_new_tokens, temperature, top_k, top_p, seed, min_p, repetition_penalty and
    repetition_window. They, `num_return_sequences`, `stop` and `stop_ids` have default values, which a server takes
    where a request leaves them out; a single row of them stands for all rows. A model of documents stops at the end
    of one by default.

    Ids and numbers are int32; nll and log-probabilities float32, nats. `generate` does what `lm.generate` does, row by
    row, `top_k` 0 for all, with zeros beyond `lengths`; a row of length 0 continues `start_token`, which is no part of
    the result. The first of a row's `sequences` is `tokens`; those that it did not ask for have length 0. Stop strings
    are filled up with "", and with -1 behind the ids of shorter ones; a text ends with its stop string. For
    `score_text` nothing predicts a text's first token, and its nll is 0; for `score_lines` what `line_start_ids` says
    comes before it, and the end of the line counts, where the vocabulary has one. Strings are bytes; at byte level,
    where they need not be UTF-8, the results are called `text_bytes`, `texts_bytes` and `symbols_bytes`, which makes
    TensorFlow Serving encode them in base64.

    Args:
        lm: language model.
        tables: `{"vocab": GraphTokenizer}`; nothing for ids alone.
        weights, max_tokens, max_rows, top_n, start_token: see `export_saved_model`.
    """

    def __init__(
        self, lm: LanguageModel, tables: dict[str, GraphTokenizer] | None = None, *, weights: str = "float32",
        max_tokens: int = 4096, max_rows: int | None = None, top_n: int = 10, start_token: int = 0,
    ):  # fmt: skip
        super().__init__(lm, weights)
        self.lm, self.text, self.start_token = lm, (tables or {}).get("vocab"), start_token
        self.top_n = min(top_n, lm.network.n_token)
        self.limits = limits_of(lm, max_rows, max_tokens)
        if lm.has_window:
            self.state = ServedWindow(lm)
        else:
            self.state = ServedMemory(lm, weights) if lm.why_not_cached() is None else ServedHiddenStates(lm)
        self.resources.text, self.resources.position_keys = self.text, self.state.position_keys
        table, state = self.specs = tf.TensorSpec([None, None], tf.int32), tf.TensorSpec([None, *self.state.shape])
        self._read = self.shared(self.state.read, table, state)
        self._write = self.shared(functools.partial(write, lm, start_token), *WRITTEN)
        self._nll_of_texts = self.shared(self._next_nll, table)

    warmup_values = {"max_new_tokens": 1, "top_p": 1, "batch_size": 1, "text": "", "stop": "", "stop_ids": -1}
    warmup_values |= {"repetition_penalty": 1, "repetition_window": 1, "num_return_sequences": 1}

    def signatures(self) -> dict[str, Callable]:
        tokens, state = self.specs
        lengths, stop_ids = tf.TensorSpec([None], tf.int32), tf.TensorSpec([None, None, None], tf.int32)
        arguments = {
            self.initial_state: {"batch_size": tf.TensorSpec(None, tf.int32)},
            self.score: {"tokens": tokens, "labels": tokens, "state": state},
            self.next: {"tokens": tokens, "state": state},
            self.generate: {"tokens": tokens, "lengths": lengths, **OPTIONS, **NUMBER, "stop_ids": stop_ids},
        }
        if self.text is not None:
            text, stop = {"text": tf.TensorSpec([None], tf.string)}, {"stop": tf.TensorSpec([None, None], tf.string)}
            arguments |= {
                self.score_text: text,
                self.score_lines: text,
                self.generate_text: {**text, **OPTIONS, **stop},
                self.generate_texts: {**text, **OPTIONS, **NUMBER, **stop},
            }
        own = {"max_new_tokens": np.minimum(DEFAULTS["max_new_tokens"], self.limits.max_tokens)}
        vocab = self.text and self.text.vocab
        if vocab and vocab.document is not None:
            own |= {"stop": np.array([[vocab.document]]), "stop_ids": np.int32([[[vocab.document_id]]])}
        return self.concrete(arguments, {name: tf.constant(value) for name, value in (DEFAULTS | own).items()})

    # --------------------------------------------------------------------------------------------------------- ids

    def initial_state(self, batch_size: tf.Tensor) -> dict:
        most = self.limits.max_rows  # a 1 for every row, rather than one number, is what a server can batch
        rows = tf.reduce_sum(tf.cast(batch_size, tf.int64))
        valid = tf.reduce_all(batch_size >= 0) & (rows <= most)
        rows = checked([Check(valid, f"batch_size must lie between 0 and {most}", batch_size)], rows)
        return {"state": self.state.initial(tf.cast(rows, tf.int32))}

    def score(self, tokens: tf.Tensor, labels: tf.Tensor, state: tf.Tensor) -> dict:
        same = same_shape("labels", labels, "tokens", tokens)
        checks = [*self._segment_checks(tokens, state, same), in_vocabulary("labels", labels, self.lm.network.n_token)]
        tokens, labels, state = checked(checks, tokens, labels, state)
        hidden, state = self._read(tokens, state)
        return {"nll": self._nll(hidden, labels), "state": state}

    def next(self, tokens: tf.Tensor, state: tf.Tensor) -> dict:
        tokens, state = checked(self._segment_checks(tokens, state), tokens, state)
        hidden, state = tf.cond(
            tf.shape(tokens)[1] == 1,
            lambda: self.state.read_token(tokens, state),
            lambda: self._read(tokens, state),
        )
        log_probs = self.lm.log_probs_of(hidden[:, -1:])
        top = tf.math.top_k(log_probs[:, 0], self.top_n)
        return {"log_probs": top.values, "ids": top.indices, "state": state}

    def generate(self, tokens: tf.Tensor, lengths: tf.Tensor, stop_ids: tf.Tensor, **options: tf.Tensor) -> dict:
        stops = stops_of_ids(stop_ids, tf.shape(tokens)[0], self.lm.network.n_token)
        texts = self._write(*checked_options(self.limits, "tokens", tokens, lengths, options), stops)
        first = {"tokens": texts.tokens[:, 0], "lengths": texts.lengths[:, 0]}
        return {**first, "sequences": texts.tokens, "sequence_lengths": texts.lengths}

    # -------------------------------------------------------------------------------------------------------- text

    def score_text(self, text: tf.Tensor) -> dict:
        return self._scores(*self._encode(text), [])

    def score_lines(self, text: tf.Tensor) -> dict:
        vocab, text = self.text.vocab, read_text(self.text.vocab, text)
        size = tf.strings.length(text)
        ended = tf.strings.substr(text, tf.maximum(size - 1, 0), tf.ones_like(size)) == "\n"
        line = tf.strings.substr(text, tf.zeros_like(size), size - tf.cast(ended, tf.int32))
        line = tf.strings.join([line, "\n"]) if newline_ids(vocab) else line
        return self._scores(*self._encode(line), line_start_ids(vocab))

    def _scores(self, ids: tf.Tensor, lengths: tf.Tensor, start: list[int]) -> dict:
        """The results of texts `[B, N]` and of their lengths, after the tokens `start`."""
        batch, n = tf.unstack(tf.shape(ids))
        tokens = tf.concat([tf.tile(tf.constant([start], tf.int32), [batch, 1]), ids], 1)
        missing = tf.maximum(2 - len(start) - n, 0)  # at least one to read and one to predict
        nll = self._nll_of_texts(tf.pad(tokens, [[0, 0], [0, missing]]))[:, len(start) :][:, :n]
        inside = tf.sequence_mask(lengths, n)
        symbols = tf.where(inside, self.text.spell(ids), "")
        return {"nll": tf.where(inside, nll, 0), self._named("symbols"): symbols, "lengths": lengths}

    def generate_text(self, **arguments: tf.Tensor) -> dict:
        one = {"num_return_sequences": tf.constant(DEFAULTS["num_return_sequences"])}
        return {self._named("text"): tf.reshape(self._texts(**arguments, **one), [-1])}

    def generate_texts(self, **arguments: tf.Tensor) -> dict:
        return {self._named("texts"): self._texts(**arguments)}

    def _texts(self, text: tf.Tensor, stop: tf.Tensor, **options: tf.Tensor) -> tf.Tensor:
        """Strings `[B, n]`; one that was not asked for is "", and one that ends at a stop string ends with it."""
        stops = stops_of_text(stop, tf.shape(text)[0], self.text)
        texts = self._write(*checked_options(self.limits, "text", *self._encode(text), options), stops)
        shape, longest = tf.shape(texts.lengths), tf.shape(texts.tokens)[-1]
        found = self.text.decode(tf.reshape(texts.tokens, [-1, longest]), tf.reshape(texts.lengths, [-1]))
        if self.text.vocab.level == "subword":
            kept = tf.strings.length(found) - tf.reshape(texts.excess, [-1])
            found = tf.strings.substr(found, tf.zeros_like(kept), kept)
        return tf.reshape(found, shape)

    # ------------------------------------------------------------------------------------------------- their parts

    def _named(self, result: str) -> str:
        return f"{result}_bytes" if self.text.vocab.level == "byte" else result

    def _next_nll(self, tokens: tf.Tensor) -> tf.Tensor:
        """The nll of whole texts `[B, T]`, 0 for their first tokens."""
        return tf.pad(self._nll(self.state.read_text(tokens[:, :-1]), tokens[:, 1:]), [[0, 0], [1, 0]])

    def _nll(self, hidden: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        return self.lm.nll_of(hidden, labels)

    def _encode(self, text: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Ids `[B, N]`, filled up with zeros, and lengths `[B]`."""
        limits, most = self.limits, self.limits.max_tokens
        ids = self.text.encode(limits.checked_text("text", text))
        lengths = tf.cast(ids.row_lengths(), tf.int32)
        longest = tf.reduce_max(tf.pad(lengths, [[0, 1]], constant_values=1))
        short = Check(lengths <= most, f"text must be at most {most} tokens long", lengths)
        ids, lengths = checked([short, limits.check_size("text", tf.shape(text)[0], longest)], ids, lengths)
        return ids.to_tensor(0), lengths

    def _segment_checks(self, tokens: tf.Tensor, state: tf.Tensor, *checks: Check) -> list[Check]:
        return [
            *self.limits.check_ids("tokens", tokens),
            *checks,
            same_rows("state", state, "tokens", tokens),
            finite("state", state),
            in_vocabulary("tokens", tokens, self.lm.network.n_token),
        ]
