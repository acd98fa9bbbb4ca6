"""Generates text with a language model: sampling and cached forward steps in a loop, in one compiled graph.

    generate(lm, prompt, max_new_tokens=100, temperature=0.8, top_p=0.9, seed=1)    # int [batch, n] -> [batch, n + 100]
    generate(lm, prompt, max_new_tokens=100, stop_strings=["\\n\\n"], vocab=vocab)    # may end sooner, see stopping.py

From `generate` to the model:

    generate, generate_texts    check the arguments
    _sample_texts               chooses the graph, `LanguageModel._generate_tokens`
    generate_tokens             reads the prompts (`read_prompt` of the cache)
    continue_text               the loop over new tokens, by `decode_until_ended` of loop.py
    next_token                  draws a token (sampling.py) and reads it (`read_token` of the cache)
        cached_forward          in a `RingCache`: `lm.outputs`, with a ring as memory (transformer_xl/cache.py)

In a beam search, `_search_texts` and `search_tokens` take the place of the four functions in the middle.

By default, the prompt is read as one segment, as in `lm.log_probs(prompt)`. After it, every segment is one token.

The random numbers of a row depend only on its seed and on the number of tokens it has drawn. So rows with the same seed
and the same prompt get the same text. For different texts, give every row its own seed.

Shapes:
    B: number of texts, the batch times the sequences for each prompt      n: length of the prompt
    N: n_token, the size of the vocabulary      E: d_model      room: largest number of new tokens
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from txl_tf.calls import check_true_or_false, known_names
from txl_tf.config import REPETITION_WINDOW
from txl_tf.config.checks import check_integer
from txl_tf.data.batching import next_power_of_two
from txl_tf.errors import ParameterError, brief
from txl_tf.kernels.shapes import Size, Tensor, shape_of
from txl_tf.language.beam_search import LENGTH_PENALTY, NO_CHANCE, check_length_penalty, penalty_of, search
from txl_tf.language.loop import NewTokens, decode_until_ended, with_column
from txl_tf.language.sampling import (
    SAMPLING,
    History,
    Sampling,
    check_sampling,
    no_history,
    precompute_softmax,
    remember,
    remember_segment,
    repeated,
    sample,
    sample_words,
    sampling_of_sequences,
)
from txl_tf.language.stopping import Stops, check_stops, spec_of, with_room
from txl_tf.nn.checks import as_array, check_eager, int_array
from txl_tf.nn.embedding import check_ids
from txl_tf.transformer_xl.decoding_cache import padded_left

# A part of the message of the error that a graph raises if the scores of a `logits_processor` are wrong.
_NO_TOKEN = "the logits_processor allows no token"


class TextState(NamedTuple):
    """The state of decoding, from which the next token of a text is computed."""

    hidden: Tensor  # [B, E], after the last token; see `LanguageModel.outputs`
    state: Any  # of the decoding cache
    history: History


class Texts(NamedTuple):
    """Prompts and the new tokens after them."""

    tokens: Tensor  # int32 [B, n + room], padded with the stop token, or 0
    lengths: Tensor  # int32 [B], of prompt and new tokens together
    excess: Tensor  # int32 [B], see `NewTokens`


def precompute_for(lm: Any, cache: Any) -> tuple[Any, tuple]:
    """The values of `next_token` that depend only on the weights: those of the cache and those of the softmax."""
    return cache.precompute(), precompute_softmax(lm)


def next_token(
    lm: Any, cache: Any, precomputed: Any, text: TextState, uniform: Tensor, sampling: Sampling, process: Any = None
) -> tuple[Tensor, TextState]:
    """Samples the next token of every row and reads it: one step of the loop.

    Args:
        lm: the language model.
        cache: `lm.decoding_cache()`, with static shapes for XLA.
        precomputed: `precompute_for(lm, cache)`.
        text: the state before the token. Do not use its `state` afterwards: it may be overwritten.
        uniform: float64 `[B, 2]`, from `uniform_draws`.
        sampling: `Sampling`.
        process: function of the log-probabilities of all words, `[B, N]`, that returns those to draw from; `None` for
            the model's own.

    Returns:
        `(token, text)`: int32 `[B]`, and the `TextState` after it.
    """
    weights, clusters = precomputed
    if clusters and process is None:
        token = sample(clusters, text.hidden, uniform, sampling, text.history, cache.static_shapes)
    else:
        log_probs = lm.log_probs_of(text.hidden[:, None])[:, 0]
        if process is not None:
            log_probs = process(log_probs)
        token = sample_words(log_probs, uniform, sampling, text.history)
    hidden, state = cache.read_token(weights, token, text.state)
    return token, TextState(hidden, state, remember(text.history, token))


def continue_text(
    lm: Any, cache: Any, precomputed: Any, text: TextState, uniform: Tensor, limits: Tensor, sampling: Sampling,
    stops: Stops, with_nll: bool = False, processor: Any = None, prompt_for_processor: Any = None,
) -> tuple[NewTokens, Tensor | None]:  # fmt: skip
    """Samples and reads tokens until every row has ended.

    Args:
        lm, cache, precomputed, text, sampling: see `next_token`.
        uniform: float64 `[room, B, 2]`, the random numbers for all tokens.
        limits: int32 `[B]`, the largest number of tokens of each row.
        stops: `Stops`, which can end a row sooner.
        with_nll: whether to compute the nll of the new tokens.
        processor: `logits_processor` of `generate`, or `None`.
        prompt_for_processor: the result of `marked_left`, int32 `[B, n]`; `None` without a processor.

    Returns:
        `(new, nll)`: a `NewTokens` whose state is a `TextState`; and `[B, room]` in nats, as of `lm.score`, or
        `None`.
    """
    room, batch, _ = shape_of(uniform)
    rows = tf.range(batch)

    def step(i, stopped, state):
        """See `decode_until_ended`. The state is the `TextState`, the nll, and the new tokens for the processor."""
        text, nll, so_far = state

        def process(log_probs: Tensor) -> Tensor:
            """Returns the log-probabilities of `processed`, after a check of the rows that have not ended."""
            log_probs, is_wrong = processed(processor, prompt_for_processor, so_far[:, :i], log_probs)
            with tf.control_dependencies([tf.debugging.Assert(tf.reduce_all(stopped | ~is_wrong), [_NO_TOKEN])]):
                return tf.identity(log_probs)

        token, new_text = next_token(
            lm, cache, precomputed, text, uniform[i], sampling, None if processor is None else process
        )
        if with_nll:
            nll = with_column(nll, rows, i, lm.nll_of(text.hidden[:, None], token[:, None])[:, 0])
        so_far = so_far if processor is None else with_column(so_far, rows, i, token)
        return token, (new_text, nll, so_far)

    so_far = tf.zeros([batch, 0 if processor is None else room], tf.int32)
    state = text, tf.zeros([batch, room if with_nll else 0], lm.loss_dtype), so_far
    new = decode_until_ended(step, state, room, limits, stops, filler=tf.maximum(stops.token, 0))
    text, nll, _ = new.state
    return new._replace(state=text), nll if with_nll else None


def processed(processor: Any, prompt: Tensor, new: Tensor, log_probs: Tensor) -> tuple[Tensor, Tensor]:
    """The log-softmax of the scores that a `logits_processor` returns, in the dtype of the log-probabilities.

    Args:
        processor: a function of tokens and log-probabilities; or a `Constraint`, which also takes `first`, the number
            of columns of the prompt.
        prompt, new: int32 `[B, n]` and `[B, any]`.
        log_probs: float `[B, N]`.

    Returns:
        `(log_probs, is_wrong)`: float `[B, N]`; and bool `[B]`, true for a row with a NaN or +inf, or with only -inf.
        The log-softmax of such a row is NaN.

    Raises:
        ParameterError: the scores have another shape than the log-probabilities, or are no floats.
    """
    tokens: Any = tf.concat([prompt, new], 1)
    end = {"first": shape_of(prompt)[1]} if getattr(processor, "sees_prompt_end", False) else {}
    returned = processor(tokens, log_probs, **end)
    try:
        scores: Any = tf.convert_to_tensor(returned)
    except (TypeError, ValueError):  # for example `None`, if the function has no `return`
        scores = None
    if scores is None or not scores.dtype.is_floating or not scores.shape.is_compatible_with(log_probs.shape):
        allowed = f"a function that returns float [batch, n_token={log_probs.shape[1]}]"
        found = brief(returned) if scores is None else f"{scores.dtype.name} {scores.shape}"
        message = f"logits_processor must be {allowed}, got {found}"
        raise ParameterError("logits_processor", processor, allowed, message)
    log_probs = tf.nn.log_softmax(tf.ensure_shape(tf.cast(scores, log_probs.dtype), log_probs.shape))
    return log_probs, tf.math.is_nan(tf.reduce_sum(log_probs, 1))


def search_tokens(
    lm: Any, prompt: Tensor, lengths: Tensor, room: Size, length_penalty: Tensor, stop_token: Tensor, *,
    has_stop_token: bool, beam_size: int, number: int, segment: int | None, logits_processor: Any,
) -> Texts:  # fmt: skip
    """The computation of a beam search of `generate`, for a graph. Arguments are not checked.

    Args:
        lm, prompt, lengths: see `generate_tokens`.
        room: the largest number of new tokens.
        length_penalty: see `generate`, float scalar in the dtype of the log-probabilities.
        stop_token, has_stop_token: int32 scalar, -1 if there is none; and whether there is one.
        number: number of the best texts of each prompt to return.
        beam_size, segment, logits_processor: see `generate`.
    """
    cache = lm.decoding_cache()
    hidden, state = cache.read_prompt(prompt, lengths, segment)
    weights = cache.precompute()
    batch, _ = shape_of(prompt)
    no_tokens = tf.zeros([batch, room], tf.int32)
    first = repeated((hidden, state, marked_left(prompt, lengths), no_tokens), beam_size)

    def decode(last: Tensor, i: Tensor, carried: Any) -> tuple[Any, Any]:
        """See the argument `decode` of `search`. The first step reads no token, because the prompts have been read."""
        hidden, state, prompt_for_processor, so_far = carried

        def read() -> Any:
            new_hidden, new_state = cache.read_token(weights, last, state)
            return new_hidden, new_state, with_column(so_far, tf.range(shape_of(last)[0]), i - 1, last)

        hidden, state, so_far = tf.cond(i > 0, read, lambda: (hidden, state, so_far))
        log_probs = lm.log_probs_of(hidden[:, None])[:, 0]
        if logits_processor is not None:
            log_probs, is_wrong = processed(logits_processor, prompt_for_processor, so_far[:, :i], log_probs)
            no_chance = tf.constant(NO_CHANCE, log_probs.dtype)
            log_probs = tf.where(is_wrong[:, None], no_chance, tf.maximum(log_probs, no_chance))
        return log_probs, (hidden, state, prompt_for_processor, so_far)

    def select(carried: Any, rows: Tensor) -> Any:
        return tf.nest.map_structure(lambda x: tf.gather(x, rows) if x.shape.rank else x, carried)

    start = 0  # any id, because the first call of `decode` does not read it
    end = stop_token if has_stop_token else None
    limits = tf.fill([batch], room)
    ids, scores = search(decode, select, first, start, end, room, beam_size, number, length_penalty, limits)
    if logits_processor is not None:
        ids = _checked_possible(ids, scores, stop_token, length_penalty)
    ids = tf.reshape(ids, [-1, room])
    prompt, lengths = repeated((prompt, lengths), number)
    has_ended = tf.cumsum(tf.cast(ids == stop_token, tf.int32), 1, exclusive=True) > 0
    new_lengths = tf.reduce_sum(tf.cast(~has_ended, tf.int32), 1)
    return joined(prompt, lengths, ids, new_lengths, tf.zeros_like(new_lengths), stop_token)


def _checked_possible(ids: Tensor, scores: Tensor, stop_token: Tensor, length_penalty: Tensor) -> Tensor:
    """`ids`, the texts that a beam search has found, after a check that the best one of each prompt is possible.

    `search` divides the scores of texts by the penalty of their length, but not those of impossible texts that have
    ended. The check needs the log-probabilities before the division.

    Args:
        ids: int32 `[B, beams, room]`, the best text first.
        scores: float `[B, beams]`.
        stop_token, length_penalty: see `generate`.
    """
    has_ended = tf.reduce_any(ids[:, 0] == stop_token, 1)
    log_probs = tf.where(has_ended, scores[:, 0], scores[:, 0] * penalty_of(shape_of(ids)[2], length_penalty))
    with tf.control_dependencies([tf.debugging.Assert(tf.reduce_all(log_probs > NO_CHANCE / 2), [_NO_TOKEN])]):
        return tf.identity(ids)


def marked_left(prompt: Tensor, lengths: Tensor) -> Any:
    """Prompts, int32 `[B, n]`, with -1 on the left of shorter ones, instead of padding on the right.

    A `logits_processor` gets them.
    """
    n = shape_of(prompt)[1]
    return tf.where(tf.range(n) >= (n - lengths)[:, None], padded_left(prompt, lengths), -1)


def joined(
    prompt: Tensor, lengths: Tensor, new: Tensor, new_lengths: Tensor, excess: Tensor, stop_token: Tensor
) -> Texts:
    """The `Texts` of prompts and new tokens. The new tokens come directly after the end of a shorter prompt.

    Args:
        prompt, lengths: int32 `[B, n]`, and `[B]`, the length of each prompt.
        new, new_lengths: int32 `[B, room]`, and `[B]`, the number of new tokens.
        excess: see `Texts`.
        stop_token: int32 scalar, which pads the result; -1 for none.
    """
    n = shape_of(prompt)[1]
    room = shape_of(new)[1]
    tokens = tf.concat([prompt, new], 1)
    column = tf.range(n + room)
    lengths = lengths[:, None]
    source = tf.where(column < lengths, column, column + n - lengths)
    tokens = tf.gather(tokens, tf.minimum(source, n + room - 1), batch_dims=1)
    ends = lengths[:, 0] + new_lengths
    return Texts(tf.where(column < ends[:, None], tokens, tf.maximum(stop_token, 0)), ends, excess)


def generate_tokens(
    lm: Any, prompt: Tensor, lengths: Tensor, uniform: Tensor, limits: Tensor, sampling: Sampling, stops: Stops,
    number: Size = 1, static_shapes: bool = False, segment: int | None = None, logits_processor: Any = None,
) -> Texts:  # fmt: skip
    """The computation of `generate` without a beam search, for a graph. Arguments are not checked.

    Args:
        lm: the language model.
        prompt, lengths: int32 `[prompts, n]` and `[prompts]`.
        uniform: float64 `[room, B, 2]`, from `uniform_draws`.
        limits, stops: see `continue_text`. `stops` may have one row for all sequences.
        sampling: `Sampling`.
        number: sequences for each prompt: an int or, without static shapes, a scalar tensor.
        static_shapes: whether the graph is for XLA.
        segment, logits_processor: see `generate`.
    """
    cache = lm.decoding_cache(static_shapes)
    nothing = no_history(shape_of(prompt)[0], lm.network.n_token)
    hidden, state = cache.read_prompt(prompt, lengths, segment)
    text = TextState(hidden, state, remember_segment(nothing, prompt, lengths))
    text, prompt, lengths = repeated((text, prompt, lengths), number)
    prompt_for_processor = None if logits_processor is None else marked_left(prompt, lengths)
    new, _ = continue_text(
        lm, cache, precompute_for(lm, cache), text, uniform, limits, sampling, stops,
        processor=logits_processor, prompt_for_processor=prompt_for_processor,
    )  # fmt: skip
    return joined(prompt, lengths, new.tokens, new.lengths, new.excess, stops.token)


def _check_prompt(prompt: Any, lengths: Any, n_token: int) -> tuple[np.ndarray, np.ndarray]:
    """Checks the arguments of `generate` and returns them as arrays, with 0 after the end of shorter prompts."""
    allowed = "integers [batch, n], n at least 1"
    prompt = int_array("prompt", prompt, 2, allowed)
    batch, n = prompt.shape
    allowed = f"[batch={batch}] integers between 1 and {n}"
    lengths = np.full([batch], n) if lengths is None else as_array("lengths", lengths, allowed)
    if lengths.shape != (batch,) or lengths.dtype.kind not in "iu" or lengths.min() < 1 or lengths.max() > n:
        raise ParameterError("lengths", lengths.tolist(), allowed)
    prompt = np.where(np.arange(n) < lengths[:, None], prompt, 0)
    check_ids("prompt", prompt, n_token)
    return prompt, lengths


@known_names
def generate(
    lm: Any, /, prompt: Any, max_new_tokens: int, *, lengths: Any = None, num_return_sequences: int = 1,
    stop_token: int | None = None, stop_strings: Iterable[str] | None = None, stop_at_newline: bool = False,
    vocab: Any = None, with_lengths: bool = False, repetition_penalty: float | None = None,
    repetition_window: int = REPETITION_WINDOW, temperature: float = 1.0, top_k: int | None = None,
    top_p: float | None = None, min_p: float | None = None, seed: Any = None, segment: int | None = None,
    logits_processor: Callable[..., Tensor] | None = None, beam_size: int = 1,
    length_penalty: float = LENGTH_PENALTY,
) -> Any:  # fmt: skip
    """Continues every row of `prompt` with cached keys and values.

    A model with absolute positions, such as `TransformerLM`, sees at most `context_len` tokens, at the positions 0, 1,
    ... When this window is full, the model reads the last half of it again, as the beginning of a new window. The
    probabilities of the next token are those that `log_probs` returns after the tokens of the window, see `window.py`.
    Windows have no memory in common, whatever `mem_len` is. If the prompt is longer, the model sees only its last
    window.

    Args:
        lm: `TransformerXLLM` or `TransformerLM`. The function is their method.
        prompt: int `[batch, n]`, n at least 1.
        max_new_tokens: int, at least 0.
        lengths: int `[batch]`, for prompts of different lengths: row b is `prompt[b, :lengths[b]]`.
        num_return_sequences: texts for every prompt, which are neighbours in the result. The first text is the same as
            with `num_return_sequences=1`. The others have their own seeds, see `seeds_of_sequences`.
        stop_token: id that ends a row.
        stop_strings: list of strings. A row ends with the token that completes one of them in the new text, even if the
            string ends inside that token; see `txl_tf.language.stopping`.
        stop_at_newline: whether "\\n" is a stop string.
        vocab: `Vocab` of the model, which stop strings need.
        with_lengths: whether to return the lengths, too.
        repetition_penalty: factor for the log-probabilities of the last tokens of prompt and text. Above 1, it makes
            them less likely. The options apply in this order: this one, `temperature`, `top_k`, `top_p`, `min_p`.
        repetition_window: number of these last tokens, by default 64. Another number needs a `repetition_penalty`.
        temperature: divides the log-probabilities. Below 1, likely tokens become more likely; 0 takes the most likely,
            which is always among those that `top_k`, `top_p` and `min_p` leave.
        top_k: sample only from the `top_k` most likely tokens.
        top_p: sample only from the smallest set of most likely tokens whose probabilities sum to at least `top_p`, in
            (0, 1]. With `top_k`, the probabilities are those among the tokens that `top_k` leaves.
        min_p: sample only from tokens that are at least `min_p` times as likely as the most likely one, in [0, 1).
        seed: int, or int `[batch]`, one for every row. The text of a row depends only on its prompt and its seed, so
            rows with the same prompt and seed are equal. `None` draws a seed for every row.
        segment: the largest number of tokens of a prompt that are read at a time, with the memory of the tokens before
            them, as in training. So a long prompt needs little more space than a short one. `None`: the whole prompt is
            one segment, as in `log_probs`. It must be `None` with static shapes and with absolute positions, which see
            only the last window.
        logits_processor: function of `tokens` and `log_probs` that returns scores of the next token, float `[batch,
            n_token]`, -inf for tokens that may not follow. It is a part of the graph. `tokens`, int32 `[batch, any]`,
            are prompt and text so far, the latest last, with -1 on the left of shorter prompts. The options above apply
            to the log-softmax of the scores. Give the same function in every call: each one has its own graph.
        beam_size: number of hypotheses of a beam search, which looks for the most likely text and draws nothing. The
            `num_return_sequences` best texts are returned, the best first. A hypothesis ends at `stop_token`; stop
            strings and the options of sampling are not accepted.
        length_penalty: of a beam search: the log-probability of a text is divided by `((5 + new tokens) /
            6)**length_penalty` (Wu et al. 2016).

    Returns:
        int32 `[batch * num_return_sequences, n + max_new_tokens]`: prompts and new tokens. The new tokens start
        directly after the end of a shorter prompt. Rows are padded with `stop_token`, or 0 without one. With
        `with_lengths`, `(tokens, lengths)`, where `lengths`, int32 `[batch * num_return_sequences]`, counts prompt and
        new tokens.

    Raises:
        ParameterError: an argument is out of its range, it has no effect because of another one, the vocabulary cannot
            spell a stop string, or `logits_processor` allows no text; or the call is in a graph.
        UnknownArgumentError: an option does not exist; the message lists those that do.
    """
    check_true_or_false(with_lengths=with_lengths)
    texts = generate_texts(
        lm, prompt, max_new_tokens, lengths=lengths, num_return_sequences=num_return_sequences, stop_token=stop_token,
        stop_strings=stop_strings, stop_at_newline=stop_at_newline, vocab=vocab, repetition_penalty=repetition_penalty,
        repetition_window=repetition_window, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed,
        segment=segment, logits_processor=logits_processor, beam_size=beam_size, length_penalty=length_penalty,
    )  # fmt: skip
    return (texts.tokens, texts.lengths) if with_lengths else texts.tokens


def generate_texts(
    lm: Any, prompt: Any, max_new_tokens: int, *, lengths: Any = None, num_return_sequences: int = 1,
    stop_token: int | None = None, stop_strings: Iterable[str] | None = None, stop_at_newline: bool = False,
    vocab: Any = None, segment: int | None = None, logits_processor: Any = None, beam_size: int = 1,
    length_penalty: float = LENGTH_PENALTY, **sampling: Any,
) -> Texts:  # fmt: skip
    """The `Texts` of `generate`, which describes the arguments. The caller has checked the names of `sampling`."""
    check_eager("generate")
    n_token = lm.network.n_token
    prompt, lengths = _check_prompt(prompt, lengths, n_token)
    check_integer("max_new_tokens", max_new_tokens, 0)
    max_new_tokens = int(max_new_tokens)  # a NumPy integer may have another dtype than int32
    check_integer("num_return_sequences", num_return_sequences, 1)
    options = check_sampling(len(prompt), **sampling)
    stops = check_stops(n_token, stop_token, stop_strings, stop_at_newline, vocab)
    static = {
        "number": int(num_return_sequences),
        "segment": checked_segment(lm, segment),
        "logits_processor": _checked_processor(lm, logits_processor, stop_token),
    }
    check_integer("beam_size", beam_size, 1, n_token)
    check_length_penalty(length_penalty, beam_size > 1)
    if beam_size == 1:
        with _naming_processor(logits_processor):
            return _sample_texts(lm, prompt, lengths, max_new_tokens, options, stops, **static)
    if lm.static_shapes:
        raise ParameterError("beam_size", beam_size, "1 with static_shapes")
    check_beam_options(beam_size, num_return_sequences, sampling)
    if stops.strings.shape[1]:
        name, value = ("stop_at_newline", True) if stop_at_newline else ("stop_strings", stop_strings)
        raise ParameterError(name, value, "left out in a beam search, which ends texts at stop_token")
    with _naming_processor(logits_processor):
        return _search_texts(
            lm, prompt, lengths, max_new_tokens, length_penalty, stops.token, has_stop_token=stop_token is not None,
            beam_size=int(beam_size), **static,
        )  # fmt: skip


@contextlib.contextmanager
def _naming_processor(processor: Any) -> Iterator[None]:
    """Replaces the error of a graph about scores of a `logits_processor` by a ParameterError."""
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        if _NO_TOKEN not in str(error):
            raise
        allowed = "a function that returns no NaN or +inf, and not -inf for all tokens of a text"
        raise ParameterError("logits_processor", processor, allowed) from None


def checked_segment(lm: Any, segment: Any) -> int | None:
    """`segment` of `generate`, checked."""
    if segment is None:
        return None
    check_integer("segment", segment, 1)
    if lm.has_window:
        raise ParameterError("segment", segment, f"None with absolute positions, which see {lm.context_len} tokens")
    if lm.static_shapes:
        raise ParameterError("segment", segment, "None with static_shapes, where a prompt is one segment")
    return int(segment)


def _checked_processor(lm: Any, processor: Any, stop_token: int | None) -> Any:
    """`logits_processor` of `generate`, checked."""
    if processor is None:
        return None
    if getattr(processor, "sees_prompt_end", False) and processor.stop_token != stop_token:
        allowed = f"{processor.stop_token}, as in the Constraint"
        raise ParameterError("stop_token", stop_token, allowed)
    if not callable(processor):
        raise ParameterError("logits_processor", processor, "a function of tokens and log_probs")
    if lm.static_shapes:
        raise ParameterError("logits_processor", processor, "None with static_shapes: it gets a growing text")
    return processor


def check_beam_options(beam_size: int, number: int, sampling: dict[str, Any]) -> None:
    """Raises ParameterError for a number of texts or for options of sampling that do not fit a beam search."""
    if number > beam_size:
        raise ParameterError("num_return_sequences", number, f"at most beam_size={beam_size}")
    for name, value in sampling.items():
        if value is not None and np.any(np.asarray(value) != SAMPLING[name]):
            raise ParameterError(name, value, "left out in a beam search, which draws nothing")


def _sample_texts(
    lm: Any, prompt: np.ndarray, lengths: np.ndarray, max_new_tokens: int, sampling: Sampling, stops: Stops,
    number: int, **static: Any,
) -> Texts:  # fmt: skip
    """Calls the graph of `generate_tokens` with checked arguments. `static` are those that are no tensors."""
    batch, n = prompt.shape
    room = max_new_tokens
    sampling = sampling_of_sequences(sampling, number)
    if lm.static_shapes:  # every shape is compiled, so there should be few
        room = next_power_of_two(max_new_tokens, 16)
        stops = with_room(stops)
        prompt = np.pad(prompt, [(0, 0), (0, next_power_of_two(n, 16) - n)])
    arguments = {
        "prompt": tf.constant(prompt, tf.int32),
        "lengths": tf.constant(lengths, tf.int32),
        "uniform": lm._uniform_draws(sampling.seeds, tf.constant(room)),
        "limits": tf.fill([batch * number], max_new_tokens),
        "sampling": sampling,
        "stops": stops,
    }
    specs = tf.nest.map_structure(tf.TensorSpec.from_tensor, arguments)
    if not lm.static_shapes:  # one graph for prompts, texts and stop strings of any length
        specs["prompt"] = tf.TensorSpec([batch, None], tf.int32)
        specs["uniform"] = tf.TensorSpec([None, batch * number, 2], tf.float64)
        specs["stops"] = spec_of(stops)
    # Chooses the graph by specs with unknown sizes. A call with the tensors themselves would trace a graph for every
    # length of prompt.
    graph = lm._generate_tokens.get_concrete_function(number, lm.static_shapes, **specs, **static)
    texts = graph(number, lm.static_shapes, **arguments, **static)
    return texts._replace(tokens=texts.tokens[:, : n + max_new_tokens])


def _search_texts(
    lm: Any, prompt: np.ndarray, lengths: np.ndarray, max_new_tokens: int, length_penalty: float,
    stop_token: Tensor, **static: Any,
) -> Texts:  # fmt: skip
    """Calls the graph of `search_tokens` with checked arguments. `static` are those that are no tensors."""
    arguments = {
        "prompt": tf.constant(prompt, tf.int32),
        "lengths": tf.constant(lengths, tf.int32),
        "room": tf.constant(max_new_tokens),
        "length_penalty": tf.constant(float(length_penalty), lm.loss_dtype),
        "stop_token": stop_token,
    }
    specs = tf.nest.map_structure(tf.TensorSpec.from_tensor, arguments)
    specs["prompt"] = tf.TensorSpec([len(prompt), None], tf.int32)  # one graph for prompts of any length
    # The graph is chosen by specs as in `_sample_texts`.
    return lm._search_tokens.get_concrete_function(**specs, **static)(**arguments, **static)
