"""Continuous batching: texts that join and leave a batch while it is generated.

    decoder = Decoder(lm, max_rows=16)
    job = Job(prompt, max_new_tokens=100, temperature=0.8, seed=1, deliver=print)
    decoder.submit(job)                # from any thread; `deliver` gets a `Piece` every few tokens, the last one `done`
    decoder.close()

A thread generates `PIECE` tokens of all texts in the batch at a time. Between two pieces, texts that have ended leave,
and waiting texts join. The prompts of those that join are read together, as one batch. The tokens of a text are those
of `lm.generate` with the same prompt and seed, up to rounding errors that depend on the number of rows.

Shapes:
    B: texts in the batch      n: tokens of the longest prompt      K: tokens of a piece      N: n_token      E: d_model
"""

from __future__ import annotations

import collections
import functools
import logging
import queue
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from txl_tf.config import SamplingConfig
from txl_tf.data.batching import padded
from txl_tf.kernels.shapes import Tensor
from txl_tf.language.generation import TextState, next_token, precompute_for
from txl_tf.language.language_model import LanguageModel
from txl_tf.language.loop import decode_until_ended, with_column
from txl_tf.language.sampling import (
    NEVER,
    SPECS,
    History,
    Sampling,
    no_history,
    remember_segment,
    sampling_of,
    uniform_draws,
)
from txl_tf.language.stopping import no_stops

PIECE = 8  # tokens that are generated before texts can join or leave
POSITIONS = 64  # positions of a prompt whose log-probabilities are computed at a time

logger = logging.getLogger("txl_tf")


class Busy(RuntimeError):
    """So many texts or requests are waiting that no more are accepted."""


class Alternatives(NamedTuple):
    """The log-probabilities of tokens, and the most likely tokens at their positions, in nats.

    The options of sampling, such as the temperature, do not change them.

    Attributes:
        log_probs: float32 `[K]`, of the tokens themselves.
        top_ids, top_log_probs: int32 and float32 `[K, top_n]`, the most likely tokens at each position, the most likely
            one first, and their log-probabilities.
    """

    log_probs: np.ndarray
    top_ids: np.ndarray
    top_log_probs: np.ndarray


class Piece(NamedTuple):
    """New tokens of a text.

    Attributes:
        tokens: list of ids.
        alternatives: the `Alternatives` of these tokens; `None` unless the job asks for them.
        done: whether the text has ended.
        stopped: whether it ended at the stop token, which is the last of the tokens.
        error: the exception that ended the text, if one did.
    """

    tokens: list[int]
    alternatives: Alternatives | None = None
    done: bool = False
    stopped: bool = False
    error: Exception | None = None


class Job:
    """A text to generate.

    Args:
        prompt: int `[n]`, n at least 1.
        max_new_tokens: most tokens to generate, at least 1.
        deliver: function that is called with every `Piece`, in the thread of the decoder. If it raises an error, the
            decoder logs the error and ends this text; other texts continue.
        with_alternatives: whether the pieces have `alternatives`.
        seed: see `generate`.
        **sampling: options of `SamplingConfig`.

    Attributes:
        cancelled: set it to True, in any thread, to end the text before its last token. The decoder then delivers no
            further piece. The decoder itself sets it after the last piece.
        written: number of tokens that have been generated.
    """

    def __init__(
        self, prompt: np.ndarray, max_new_tokens: int, deliver: Callable[[Piece], Any],
        with_alternatives: bool = False, seed: int = 0, **sampling: Any,
    ):  # fmt: skip
        self.prompt = prompt
        self.max_new_tokens = max_new_tokens
        self.deliver = deliver
        self.with_alternatives = with_alternatives
        self.seed = seed
        self.sampling = SamplingConfig(**sampling)
        self.cancelled = False
        self.written = 0


class Decoder:
    """Generates many texts at a time, see the module.

    Args:
        lm: `TransformerXLLM` or `TransformerLM`. Its weights and settings must not change any more.
        stop_token: id that ends a text; `None` for none.
        max_rows: most texts in the batch.
        max_waiting: most texts that wait until they can join the batch.
        max_read: most tokens of prompts, with their padding, that are read together. A single prompt may be longer.
        top_n: number of most likely tokens in `Alternatives`.

    Attributes:
        largest: largest number of texts that were in the batch so far.
    """

    def __init__(
        self, lm: LanguageModel, stop_token: int | None = None, *, max_rows: int = 16, max_waiting: int = 128,
        max_read: int = 4096, top_n: int = 5,
    ):  # fmt: skip
        self.lm: Any = lm
        self.max_rows = max_rows
        self.max_waiting = max_waiting
        self.max_read = max_read
        self.top_n = min(top_n, lm.network.n_token)
        self.largest = 0
        self._stops = no_stops(lm.network.n_token, -1 if stop_token is None else stop_token)
        self._stop_token = stop_token
        self._cache = lm.decoding_cache()
        self._precomputed = precompute_for(lm, self._cache)
        self._jobs: list[Job] = []  # in the order of the rows of `_text`
        self._text: TextState | None = None
        self._waiting: collections.deque[Job] = collections.deque()
        self._arrived: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._closed = False
        # The graphs of the functions with these names. The thread of the decoder calls the first five, the thread that
        # calls `alternatives` the last two.
        self._first_state_graph: Callable[..., Any]
        self._joined_graph: Callable[..., Any]
        self._rows_of_graph: Callable[..., Any]
        self._next_piece_graph: Callable[..., Any]
        self._next_piece_with_alternatives_graph: Callable[..., Any]
        self._all_hidden_graph: Callable[..., Any]
        self._alternatives_of_graph: Callable[..., Any]
        self._make_graphs()
        self._thread = threading.Thread(target=self._run, name="decoder", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Puts a job into the queue, and returns at once.

        Raises:
            Busy: `max_waiting` jobs are waiting.
            RuntimeError: `close` was called.
        """
        if self._closed:
            raise RuntimeError("the decoder is closed: it takes no more jobs")
        if len(self._waiting) + self._arrived.qsize() >= self.max_waiting:
            raise Busy(f"{self.max_waiting} texts are waiting: try again later")
        self._arrived.put(job)

    def close(self) -> None:
        """Waits for the piece that the thread is generating, and ends the thread.

        Texts that are not complete then get no further piece.
        """
        self._closed = True
        self._arrived.put(None)
        self._thread.join()

    def alternatives(self, tokens: np.ndarray) -> Alternatives:
        """The `Alternatives` of given tokens, such as a prompt, from the second one on.

        Args:
            tokens: int `[n]`, n at least 2. K is n - 1.
        """
        hidden = self._all_hidden_graph(tf.constant(tokens[None, :-1], tf.int32))
        starts = range(0, len(tokens) - 1, POSITIONS)
        labels = tf.constant(tokens[1:], tf.int32)
        parts = [self._alternatives_of_graph(hidden[i : i + POSITIONS], labels[i : i + POSITIONS]) for i in starts]
        return Alternatives(*(np.concatenate(part) for part in zip(*parts, strict=True)))

    # -------------------------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        """The thread: generates until `close` is called. An error ends the texts in the batch, not the thread."""
        while not self._closed:
            try:
                self._admit()
                if self._jobs:
                    self._generate_piece()
            except Exception as error:  # every kind of error must reach those who wait
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Ends all texts in the batch, and delivers the error to each job that has neither ended nor been cancelled."""
        jobs, self._jobs, self._text = self._jobs, [], None
        for job in jobs:
            if not job.cancelled:
                _deliver(job, Piece([], done=True, error=error))
            job.cancelled = True

    def _admit(self) -> None:
        """Lets waiting jobs join the batch, and reads their prompts. Waits for a job if the batch is empty."""
        while self._is_idle() or not self._arrived.empty():
            job = self._arrived.get()
            if job is not None:  # `close` puts `None`, so that `get` returns
                self._waiting.append(job)
        new: list[Job] = []
        while self._waiting and len(self._jobs) + len(new) < self.max_rows:
            longest = max(len(job.prompt) for job in [*new, self._waiting[0]])
            if new and longest * (len(new) + 1) > self.max_read:
                break  # the other jobs join after the next piece
            job = self._waiting.popleft()
            new += [] if job.cancelled else [job]
        if not new:
            return
        lengths = np.array([len(job.prompt) for job in new], np.int32)
        self._jobs = [*self._jobs, *new]  # before the prompts are read: an error must reach the new jobs, too
        prompts = tf.constant(padded([job.prompt for job in new]), tf.int32)
        text = self._first_state_graph(prompts, tf.constant(lengths))
        self._text = text if self._text is None else self._joined_graph(self._text, text)
        self.largest = max(self.largest, len(self._jobs))

    def _is_idle(self) -> bool:
        """Whether the thread can only wait: it has no texts, and `close` was not called."""
        return not self._jobs and not self._waiting and not self._closed

    def _generate_piece(self) -> None:
        """Generates the next tokens of all texts, delivers them, and removes texts that have ended or are cancelled."""
        jobs = self._jobs
        sampling = sampling_of([job.sampling for job in jobs], [job.seed for job in jobs])
        limits = np.array([min(PIECE, job.max_new_tokens - job.written) for job in jobs], np.int32)
        first = tf.constant([job.written for job in jobs], tf.int32)
        with_alternatives = any(job.with_alternatives for job in jobs)
        next_piece = self._next_piece_with_alternatives_graph if with_alternatives else self._next_piece_graph
        tokens, lengths, found, self._text = next_piece(self._text, first, tf.constant(limits), sampling)
        tokens, lengths = tokens.numpy(), lengths.numpy()
        arrays = [array.numpy() for array in found]
        for i, job in enumerate(jobs):
            n = lengths[i]
            job.written += int(n)
            ids = tokens[i, :n].tolist()
            stopped = bool(ids) and ids[-1] == self._stop_token
            done = stopped or job.written >= job.max_new_tokens
            alternatives = Alternatives(*(array[i, :n] for array in arrays)) if job.with_alternatives else None
            if not job.cancelled:
                _deliver(job, Piece(ids, alternatives, done, stopped))
            job.cancelled |= done
        left = [i for i, job in enumerate(jobs) if not job.cancelled]
        if len(left) < len(jobs):
            self._jobs = [jobs[i] for i in left]
            self._text = self._rows_of_graph(self._text, tf.constant(left, tf.int32)) if left else None

    # -------------------------------------------------------------------------------------------------- the graphs

    def _make_graphs(self) -> None:
        """Makes the graphs, each for any number of rows."""
        ints: Any = tf.TensorSpec([None], tf.int32)
        table: Any = tf.TensorSpec([None, None], tf.int32)
        one = self._first_state(tf.zeros([1, 1], tf.int32), tf.ones([1], tf.int32))
        text: Any = tf.nest.map_structure(_any_rows, one)
        hidden: Any = tf.TensorSpec([None, *one.hidden.shape[1:]], one.hidden.dtype)

        def graph(function: Callable, *specs: Any) -> Callable:
            return tf.function(function, input_signature=specs, autograph=False)

        self._first_state_graph = graph(self._first_state, table, ints)
        self._joined_graph = graph(self._joined, text, text)
        self._rows_of_graph = graph(_rows_of, text, ints)
        piece = (text, ints, ints, Sampling(**SPECS, seeds=ints))
        self._next_piece_graph = graph(functools.partial(self._next_piece, False), *piece)
        self._next_piece_with_alternatives_graph = graph(functools.partial(self._next_piece, True), *piece)
        self._all_hidden_graph = graph(self._all_hidden, tf.TensorSpec([1, None], tf.int32))
        self._alternatives_of_graph = graph(self._alternatives_of, hidden, ints)

    def _first_state(self, prompt: Tensor, lengths: Tensor) -> TextState:
        """The state after prompts `[B, n]` of the given lengths `[B]`."""
        hidden, state = self._cache.read_prompt(prompt, lengths)
        history = remember_segment(no_history(tf.shape(prompt)[0], self.lm.network.n_token), prompt, lengths)
        return TextState(hidden, state, history)

    def _joined(self, one: TextState, other: TextState) -> TextState:
        """The state with the rows of both states, first those of `one`."""
        one, other = (self._aligned(text) for text in (one, other))
        return tf.nest.map_structure(lambda a, b: tf.concat([a, b], 0) if a.shape.rank else a, one, other)

    def _aligned(self, text: TextState) -> TextState:
        """The same state, in a form in which states can be joined.

        All rows of a state share the time of its history, and the position in the rings of its cache. States can be
        joined if these are equal. So both become 0, and the tensors of the rows change accordingly.
        """
        last_seen, time = text.history
        history = History(tf.maximum(last_seen - time, NEVER), tf.zeros_like(time))
        return text._replace(state=self._cache.aligned(text.state), history=history)

    def _next_piece(
        self, with_alternatives: bool, text: TextState, first: Tensor, limits: Tensor, sampling: Sampling
    ) -> tuple[Tensor, Tensor, Any, TextState]:
        """Generates up to K tokens of every row.

        Args:
            with_alternatives: whether to compute the arrays of `Alternatives`.
            text: the state of the texts.
            first: int32 `[B]`, how many tokens of each text were generated before. They choose the random numbers, so
                that a text does not depend on when it has joined the batch.
            limits: int32 `[B]`, most new tokens of each.
            sampling: the options, each `[B]`.

        Returns:
            `(tokens [B, K], lengths [B], alternatives, state)`. `alternatives` are the three arrays of `Alternatives`,
            each `[B, K, ...]`, or `[B, 0, ...]` without `with_alternatives`.
        """
        (batch,) = tf.unstack(tf.shape(limits))
        rows = tf.range(batch)
        uniform = uniform_draws(sampling.seeds, first, PIECE)
        columns = PIECE if with_alternatives else 0
        tables = (
            tf.zeros([batch, columns]),
            tf.zeros([batch, columns, self.top_n], tf.int32),
            tf.zeros([batch, columns, self.top_n]),
        )

        def step(i: Tensor, stopped: Tensor, state: Any) -> tuple[Tensor, Any]:
            text, tables = state
            token, new_text = next_token(self.lm, self._cache, self._precomputed, text, uniform[i], sampling)
            if with_alternatives:
                found = self._alternatives_of(text.hidden, token)
                tables = tuple(with_column(table, rows, i, x) for table, x in zip(tables, found, strict=True))
            return token, (new_text, tables)

        new = decode_until_ended(step, (text, tables), PIECE, limits, self._stops, filler=0)
        text, tables = new.state
        return new.tokens, new.lengths, tables, text

    def _alternatives_of(self, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The arrays of `Alternatives` for labels `[B]` after hidden states `[B, E]`."""
        log_probs = tf.cast(self.lm.log_probs_of(hidden[:, None])[:, 0], tf.float32)
        top = tf.math.top_k(log_probs, self.top_n)
        return tf.gather(log_probs, labels, batch_dims=1), top.indices, top.values

    def _all_hidden(self, tokens: Tensor) -> Tensor:
        """The hidden states `[n, E]` of a text `[1, n]`."""
        return self._cache.read(tokens, self._cache.initial_state(1))[0][0]


def _deliver(job: Job, piece: Piece) -> None:
    """Delivers a piece. If the job cannot take it, such as for an event loop that is closed, the job is cancelled."""
    try:
        job.deliver(piece)
    except Exception:  # every kind of error: none may end the thread of the decoder, or other texts
        logger.exception("a text ends, because its piece cannot be delivered")
        job.cancelled = True


def _any_rows(tensor: Tensor) -> Any:
    """The spec of a tensor like this one with any number of rows; of a scalar, which all rows share, a scalar."""
    return tf.TensorSpec([None, *tensor.shape[1:]] if tensor.shape.rank else [], tensor.dtype)


def _rows_of(text: TextState, rows: Tensor) -> TextState:
    """The state with only the rows whose indices are in `rows`, int32 `[any]`."""
    return tf.nest.map_structure(lambda tensor: tf.gather(tensor, rows) if tensor.shape.rank else tensor, text)
