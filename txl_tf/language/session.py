"""A session reads and writes a text in turns, with one memory: for streaming and conversations.

    session = Session(lm)
    session.read(prompt)
    tokens, _ = session.write(8, temperature=0.8)   # the next 8 tokens; then write again, or read an answer
    other = session.copy()                          # continues independently from the same text

Shapes:
    B: batch_size      n: tokens that are read      m: tokens that are written
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from txl_tf.calls import known_names
from txl_tf.config.checks import at_least, check_integer
from txl_tf.errors import ArgumentTypeError, ParameterError
from txl_tf.kernels.shapes import Tensor
from txl_tf.language.generation import TextState, continue_text, precompute_for
from txl_tf.language.loop import NewTokens
from txl_tf.language.sampling import (
    SAMPLING,
    Sampling,
    check_sampling,
    no_history,
    remember_segment,
    uniform_draws,
)
from txl_tf.language.stopping import Stops, check_stop_strings, check_stops, tail_of
from txl_tf.nn.checks import check_eager, int_array, tensor_error
from txl_tf.nn.embedding import check_ids
from txl_tf.nn.settings import add_user, changes_of
from txl_tf.schema import check_names, keywords_of
from txl_tf.transformer_xl.inference import writable_copy

# The first `write` of a session and its copies uses no graph if it is for at most this many tokens: to make the graph
# would take longer.
EAGER_TOKENS = 4


class _CompiledLater:
    """Computes `function` without a graph in the first call, and by a graph in later ones.

    To make a graph takes about a second, and the first call is often the only one. The results of both are equal up to
    rounding.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._eager = function
        self._graph = tf.function(function, reduce_retracing=True, autograph=False)
        self._is_first = True

    def __call__(self, *args: Any, is_short: bool = True) -> Any:
        """Calls the function. If the first call is not a short one, it uses a graph, too, which takes less time."""
        compute = self._eager if self._is_first and is_short else self._graph
        self._is_first = False
        return compute(*args)


class Session:
    """Reads and writes a text in turns. All rows have the same length.

    The weights of the model must not change while the session is used, because the constructor reads part of them.
    After a setting of the model has changed, such as `lm.mem_len`, the methods raise an error.

    Args:
        lm: `TransformerXLLM` or `TransformerLM`.
        batch_size: number of texts that advance together.

    Attributes:
        ended: whether the last `write` ended at a stop string.
        excess: number of units of its last token after the stop string, see `txl_tf.language.stopping`.
    """

    @known_names
    def __init__(self, lm: Any, batch_size: int = 1) -> None:
        check_eager("session")
        at_least(1)("batch_size", batch_size)
        self.lm = lm
        self.batch_size = batch_size
        self.ended = False
        self.excess = 0
        self._cache = cache = lm.decoding_cache()
        self._precomputed = precompute_for(lm, cache)
        nothing = lm.no_outputs(batch_size)
        hidden = tf.zeros([batch_size, nothing.shape[2]], nothing.dtype)
        self._text = TextState(hidden, cache.initial_state(batch_size), no_history(batch_size, lm.network.n_token))
        self._empty = True
        self._drawn = 0  # the number of tokens that were written, each with its own random numbers
        self._checked: tuple[Any, Stops] | None = None  # the arguments of the last `check_stops`, and its result
        self._written: list[int] = []  # tokens since the last `read`, of a session with one row
        self.drop_graphs()
        self._changes_before = changes_of(lm)
        add_user(lm, self)

    def drop_graphs(self) -> None:
        """Replaces the graphs by new ones, which later calls trace.

        The model calls it before one of its settings changes, see `add_user`.
        """
        self._read = _CompiledLater(self._read_segment)
        self._write = _CompiledLater(self._write_tokens)

    def _check_fresh(self) -> None:
        """Raises ParameterError if a setting of the model has changed."""
        if changes_of(self.lm) != self._changes_before:
            message = "a setting of the model has changed since this session was made: make a new Session(lm)"
            raise ParameterError("lm", self.lm, "as it was when the session was made", message)

    def copy(self) -> Session:
        """A session with the same text, and with its own memory from now on."""
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        add_user(self.lm, other)
        other._text = self._text._replace(state=writable_copy(self._text.state))
        other._written = list(self._written)
        return other

    def __copy__(self) -> Session:
        return self.copy()

    def __deepcopy__(self, memo: Any) -> Session:
        """For `copy.deepcopy`. The copy has the same model."""
        return self.copy()

    def __reduce__(self) -> Any:
        """For `pickle`. Raises ParameterError."""
        message = "a Session cannot be pickled: pickle the model and the tokens, and read them in a new session"
        raise ArgumentTypeError("session", self, "not pickled", message)

    def read(self, tokens: Any) -> np.ndarray:
        """Reads a segment.

        Args:
            tokens: int `[batch_size, n]`, n at least 1. A stop string of the next `write` cannot begin before or in
                them.

        Returns:
            float32 (float64 if the model's dtype is) array `[batch_size, n]`, the nll of the tokens in nats. The first
            token of the text has the nll NaN, because nothing predicts it.

        Raises:
            ParameterError: `tokens` has another shape or ids outside the vocabulary, a setting of the model has
                changed, or the call is in a graph.
        """
        check_eager("read")
        self._check_fresh()
        allowed = f"integers [batch_size={self.batch_size}, n], n at least 1"
        tokens = int_array("tokens", tokens, 2, allowed)
        if len(tokens) != self.batch_size:
            raise tensor_error("tokens", tokens, allowed)
        check_ids("tokens", tokens, self.lm.network.n_token)
        nll, self._text = self._read(tf.constant(tokens, tf.int32), self._text)
        nll = nll.numpy()
        if self._empty:
            nll[:, 0] = np.nan
        self._empty = False
        self._written = []
        return nll

    def write(
        self, max_new_tokens: int, *, stop_strings: Iterable[str] | None = None, stop_at_newline: bool = False,
        vocab: Any = None, with_nll: bool = False, **sampling: Any,
    ) -> tuple[np.ndarray, np.ndarray | None]:  # fmt: skip
        """Samples the next tokens, and reads them.

        `generate` describes the arguments. `repetition_window` counts the tokens that were read and written. With the
        same seed, writing 4 tokens twice gives the same text as writing 8, unless rounding decides between two tokens.
        A stop string may begin in one call and end in the next. Stop strings need a `batch_size` of 1. `with_nll` also
        returns the nll of the new tokens.

        Returns:
            `(tokens, nll)`: int32 `[batch_size, m]`; and float32 (float64 if the model's dtype is) `[batch_size, m]` in
            nats, at temperature 1, or `None` without `with_nll`. m is `max_new_tokens`, or less if a stop string ended
            the text.

        Raises:
            ParameterError: an argument is out of its range, the session has read nothing, a setting of the model has
                changed, or the call is in a graph.
            UnknownArgumentError: an option does not exist; the message lists those that do.
        """
        check_eager("write")
        check_names("write", sampling, [*keywords_of(Session.write), *SAMPLING])
        self._check_fresh()
        if self._empty:
            message = "write continues the text that the session has read: call read first"
            raise ParameterError("write", None, "called after read", message)
        check_integer("max_new_tokens", max_new_tokens, 0)
        stops = self._stops_of(stop_strings, stop_at_newline, vocab)
        if stops.strings.shape[1] and self.batch_size > 1:
            message = f"stop_strings need a session of batch_size 1, got {self.batch_size}: all rows advance together"
            raise ParameterError("stop_strings", stop_strings, "None in a session of several rows", message)
        stops = stops._replace(tail=tail_of(stops, self._written))
        options = check_sampling(self.batch_size, **sampling)
        new, nll = self._write(
            self._precomputed,
            self._text,
            tf.constant(self._drawn),
            tf.constant(max_new_tokens, tf.int32),
            options,
            stops,
            with_nll,
            is_short=max_new_tokens <= EAGER_TOKENS,
        )
        length = int(new.lengths[0])
        self._text = new.state
        self._drawn += length
        tokens = new.tokens.numpy()[:, :length]
        if self.batch_size == 1:
            self._written += tokens[0].tolist()
        self.ended = bool(new.ended[0])
        self.excess = int(new.excess[0])
        return tokens, nll.numpy()[:, :length] if with_nll else None

    def _stops_of(self, stop_strings: Iterable[str] | None, *options: Any) -> Stops:
        """`check_stops` without a stop token. Its last result is kept for calls with the same arguments.

        `options` are `stop_at_newline` and `vocab`.
        """
        check_stop_strings(stop_strings)
        arguments = (tuple(stop_strings or ()), *options)
        if self._checked is None or self._checked[0] != arguments:
            self._checked = arguments, check_stops(self.lm.network.n_token, None, *arguments)
        return self._checked[1]

    def _read_segment(self, tokens: Tensor, text: TextState) -> tuple[Tensor, TextState]:
        """Reads tokens, int `[B, n]`. Returns their nll and the state of the text after them."""
        new_hidden, state = self._cache.read(tokens, text.state)
        before = tf.concat([text.hidden[:, None], new_hidden[:, :-1]], 1)
        nll = self.lm.nll_of(before, tokens)
        lengths = tf.fill([self.batch_size], tf.shape(tokens)[1])
        return nll, TextState(new_hidden[:, -1], state, remember_segment(text.history, tokens, lengths))

    def _write_tokens(
        self, precomputed: Any, text: TextState, first: Tensor, max_new_tokens: Tensor, sampling: Sampling,
        stops: Stops, with_nll: bool,
    ) -> tuple[NewTokens, Tensor | None]:  # fmt: skip
        """Generates up to `max_new_tokens` tokens.

        `first` says how many tokens the session has written before. Token n always gets the same random numbers, so
        writing 4 tokens twice equals writing 8.
        """
        uniform = uniform_draws(sampling.seeds, first, max_new_tokens)
        limits = tf.fill([self.batch_size], max_new_tokens)
        return continue_text(self.lm, self._cache, precomputed, text, uniform, limits, sampling, stops, with_nll)
