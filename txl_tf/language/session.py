"""A text that is read and written in turns, in one memory: streaming, and conversations.

    session = Session(lm)
    session.read(prompt)
    tokens, _ = session.write(8, temperature=0.8)   # the next 8; write again, or read what somebody answers
    other = session.copy()                          # continues from here on its own

Shapes:
    B: batch_size      n: tokens that are read      m: tokens that are written
"""

import copy

import numpy as np
import tensorflow as tf

from txl_tf.errors import ParameterError
from txl_tf.language.generation import TextState, continue_text, precompute_for
from txl_tf.language.sampling import (
    SAMPLING,
    check_integer,
    check_sampling,
    no_history,
    remember_segment,
    uniform_draws,
)
from txl_tf.language.stopping import check_stops, tail_of
from txl_tf.nn.embedding import check_ids
from txl_tf.nn.settings import add_user
from txl_tf.schema import check_names, keywords_of, known_names
from txl_tf.transformer_xl.inference import writable_copy


class Session:
    """A text that is read and written in turns. All rows are read and written in step.

    The weights of the model must stay as they are while it is used: part of them is read once, when it is made. Once a
    setting of the model has changed, such as `lm.mem_len`, the session is an error.

    Attributes:
        ended: whether the last `write` ended at a stop string.
        excess: units, see `txl_tf.language.stopping`, of its last token after the stop string.
    """

    @known_names
    def __init__(self, lm, batch_size=1):
        self.lm = lm
        self.batch_size = batch_size
        self.ended, self.excess = False, 0
        self._cache = cache = lm.decoding_cache()
        self._precomputed = tf.function(precompute_for, autograph=False)(lm, cache)
        nothing = lm.no_outputs(batch_size)
        hidden = tf.zeros([batch_size, nothing.shape[2]], nothing.dtype)
        self._text = TextState(hidden, cache.initial_state(batch_size), no_history(batch_size, lm.network.n_token))
        self._empty = True
        self._drawn = 0
        self._checked = None  # what ends a text, and its `Stops`
        self._written = []  # of a single row, since the last `read`
        self._read = tf.function(self._read_segment, reduce_retracing=True, autograph=False)
        self._write = tf.function(self._write_tokens, reduce_retracing=True, autograph=False)
        self._is_stale = False
        add_user(lm, self)

    def drop_graphs(self):
        """Called after a setting of the model has changed: what this session has read is of the old one."""
        self._is_stale = True

    def _check_fresh(self):
        if self._is_stale:
            message = "a setting of the model has changed since this session was made: make a new Session(lm)"
            raise ParameterError("lm", self.lm, "as it was when the session was made", message)

    def copy(self):
        """A session that continues from here, with a memory of its own."""
        other = copy.copy(self)
        add_user(self.lm, other)
        other._text = self._text._replace(state=writable_copy(self._text.state))
        other._written = list(self._written)
        return other

    def read(self, tokens):
        """Reads a segment, int `[batch_size, n]`, n at least 1. What was written before it is no part of a stop string.

        Returns:
            float32 (float64 if the model's dtype is) array `[batch_size, n]`, the nll of the tokens in nats; NaN for
            the first of all.
        """
        self._check_fresh()
        tokens = np.asarray(tokens)
        if tokens.ndim != 2 or tokens.shape[0] != self.batch_size or not tokens.size or tokens.dtype.kind not in "iu":
            raise ValueError(
                f"tokens must be integers [batch_size={self.batch_size}, n], n at least 1, "
                f"got {tokens.dtype.name} {list(tokens.shape)}"
            )
        check_ids("tokens", tokens, self.lm.network.n_token)
        nll, self._text = self._read(tf.constant(tokens, tf.int32), self._text)
        nll = nll.numpy()
        if self._empty:
            nll[:, 0] = np.nan
        self._empty, self._written = False, []
        return nll

    def write(
        self, max_new_tokens, *, stop_strings=None, stop_at_newline=False, vocab=None, with_nll=False, **sampling
    ):
        """Samples the next tokens, and reads them.

        `generate` describes the arguments; `repetition_window` counts tokens that were read and written. With one seed,
        writing twice 4 tokens gives the same as writing 8. A stop string may begin in one call and end in the next; it
        needs a `batch_size` of 1.

        Returns:
            `(tokens, nll)`: int32 and float `[batch_size, m]`, nats at temperature 1; without `with_nll`, `None`. m
            is `max_new_tokens`, or less where a stop string ended the text.
        """
        check_names("write", sampling, [*keywords_of(Session.write), *SAMPLING])
        self._check_fresh()
        if self._empty:
            raise ValueError("read a text first: there is nothing to continue")
        check_integer("max_new_tokens", max_new_tokens, 0)
        stops = self._stops_of(stop_strings, stop_at_newline, vocab)
        if stops.strings.shape[1] and self.batch_size > 1:
            raise ValueError(f"stop_strings need a session of batch_size 1, got {self.batch_size}: rows go in step")
        stops = stops._replace(tail=tail_of(stops, self._written))
        numbers = tf.constant(self._drawn), tf.constant(max_new_tokens)
        sampling = check_sampling(self.batch_size, **sampling)
        written, nll = self._write(self._precomputed, self._text, *numbers, sampling, stops, with_nll)
        length = int(written.lengths[0])
        self._text = written.state
        self._drawn += length
        tokens = written.tokens.numpy()[:, :length]
        if self.batch_size == 1:
            self._written += tokens[0].tolist()
        self.ended, self.excess = bool(written.ended[0]), int(written.excess[0])
        return tokens, nll.numpy()[:, :length] if with_nll else None

    def _stops_of(self, stop_strings, *others):
        """`check_stops`, once for many calls with the same stop strings."""
        given = (stop_strings if isinstance(stop_strings, str) else tuple(stop_strings or ()), *others)
        if self._checked is None or self._checked[0] != given:
            self._checked = given, check_stops(self.lm.network.n_token, None, *given)
        return self._checked[1]

    def _read_segment(self, tokens, text):
        new_hidden, state = self._cache.read(tokens, text.state)
        before = tf.concat([text.hidden[:, None], new_hidden[:, :-1]], 1)
        nll = self.lm.nll_of(before, tokens)
        lengths = tf.fill([self.batch_size], tf.shape(tokens)[1])
        return nll, TextState(new_hidden[:, -1], state, remember_segment(text.history, tokens, lengths))

    def _write_tokens(self, precomputed, text, first, max_new_tokens, sampling, stops, with_nll):
        uniform = uniform_draws(sampling.seeds, first, max_new_tokens)
        limits = tf.fill([self.batch_size], max_new_tokens)
        return continue_text(self.lm, self._cache, precomputed, text, uniform, limits, sampling, stops, with_nll)
