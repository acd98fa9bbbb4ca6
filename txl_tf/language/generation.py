"""Text from a language model: the loop of sampling and cached forward steps, in one compiled graph.

    generate(lm, prompt, max_new_tokens=100, temperature=0.8, top_p=0.9, seed=1)    # int [batch, n] -> [batch, n + 100]
    generate(lm, prompt, max_new_tokens=100, stop_strings=["\\n\\n"], vocab=vocab)    # ends sooner, see stopping.py

The first new token follows the prompt as one segment, `lm.log_probs(prompt)`; from then on a segment is one token.

What a row draws depends on its seed and on how many tokens it has drawn before, and on no other row. Rows that share a
seed and a prompt therefore share their text: give every row its own seed for different ones.

Shapes:
    B: batch; of texts, times the sequences for each prompt      n: prompt      N: n_token, the vocabulary
    E: d_model      room: most new tokens
"""

from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from txl_tf.config import REPETITION_WINDOW
from txl_tf.language.loop import with_column, write_tokens
from txl_tf.language.sampling import (
    SAMPLING,
    History,
    check_integer,
    check_sampling,
    no_history,
    of_sequences,
    precompute_softmax,
    remember,
    remember_segment,
    repeated,
    sample,
    sample_words,
)
from txl_tf.language.stopping import check_stops, spec_of, with_room
from txl_tf.nn.embedding import check_ids
from txl_tf.schema import check_names, keywords_of, known_names


class TextState(NamedTuple):
    """State of decoding: all that the next token of a text depends on."""

    hidden: tf.Tensor  # [B, E], after the last token; see `LanguageModel.outputs`
    state: tuple  # of the decoding cache
    history: History


class Texts(NamedTuple):
    """Prompts and what was written after them."""

    tokens: tf.Tensor  # int32 [B, n + room], filled up with the stop token, or 0
    lengths: tf.Tensor  # int32 [B], prompt and new tokens
    excess: tf.Tensor  # int32 [B], see `Written`


def precompute_for(lm, cache):
    """Values of `next_token` that depend on the weights alone: those of the cache, and the bins of the softmax."""
    return cache.precompute(), precompute_softmax(lm)


def next_token(lm, cache, precomputed, text, uniform, sampling):
    """The next token of every row, sampled and read: the step of the loop.

    Args:
        cache: `lm.decoding_cache()`, with static shapes where this is for XLA.
        precomputed: `precompute_for(lm, cache)`.
        text: `TextState`, whose state is written into.
        uniform: float64 `[B, 2]`, of `uniform_draws`.
        sampling: `Sampling`.

    Returns:
        `(token, text)`: int32 `[B]`, and the `TextState` for the next one.
    """
    weights, bins = precomputed
    if bins:
        token = sample(bins, text.hidden, uniform, sampling, text.history, cache.static_shapes)
    else:
        token = sample_words(lm.log_probs_of(text.hidden[:, None])[:, 0], uniform, sampling, text.history)
    hidden, state = cache.read_token(weights, token, text.state)
    return token, TextState(hidden, state, remember(text.history, token))


def continue_text(lm, cache, precomputed, text, uniform, limits, sampling, stops, with_nll=False):
    """Samples and reads, token by token, until every row has ended.

    Args:
        cache, precomputed, text, sampling: see `next_token`.
        uniform: float64 `[room, B, 2]`, the draws of as many tokens as there is room for.
        limits: int32 `[B]`: most tokens to write.
        stops: `Stops`, which end a row sooner.
        with_nll: whether to compute the nll of the new tokens.

    Returns:
        `(written, nll)`: `Written`, whose state is a `TextState`; `[B, room]`, nats, as of `lm.score`, or `None`.
    """
    room, batch, _ = keras.ops.shape(uniform)
    rows = tf.range(batch)

    def step(i, stopped, state):
        text, nll = state
        token, new_text = next_token(lm, cache, precomputed, text, uniform[i], sampling)
        if with_nll:
            nll = with_column(nll, rows, i, lm.nll_of(text.hidden[:, None], token[:, None])[:, 0])
        return token, (new_text, nll)

    state = text, tf.zeros([batch, room if with_nll else 0], lm.loss_dtype)
    written = write_tokens(step, state, room, limits, stops, filler=tf.maximum(stops.token, 0))
    text, nll = written.state
    return written._replace(state=text), nll if with_nll else None


def generate_tokens(lm, prompt, lengths, uniform, limits, sampling, stops, number=1, static_shapes=False):
    """`generate` as a graph: all arguments but `lm` and `static_shapes` are tensors, and none is checked.

    Args:
        prompt, lengths: int32 `[prompts, n]` and `[prompts]`.
        uniform: float64 `[room, B, 2]`, of `uniform_draws`: an argument, as XLA would draw others.
        limits, sampling, stops: see `continue_text`; `stops` may have one row for all sequences.
        number: sequences for each prompt; an int with static shapes.
        static_shapes: whether this is for XLA.

    Returns:
        `Texts`.
    """
    cache, room, n = lm.decoding_cache(static_shapes), keras.ops.shape(uniform)[0], keras.ops.shape(prompt)[1]
    nothing = no_history(keras.ops.shape(prompt)[0], lm.network.n_token)
    text = TextState(*cache.read_prompt(prompt, lengths), remember_segment(nothing, prompt, lengths))
    text, prompt, lengths = repeated((text, prompt, lengths), number)
    written, _ = continue_text(lm, cache, precompute_for(lm, cache), text, uniform, limits, sampling, stops)
    tokens = tf.concat([prompt, written.tokens], 1)
    column, lengths = tf.range(n + room), lengths[:, None]
    source = tf.where(column < lengths, column, column + n - lengths)  # the new tokens follow a shorter prompt directly
    tokens = tf.gather(tokens, tf.minimum(source, n + room - 1), batch_dims=1)
    ends = lengths[:, 0] + written.lengths
    return Texts(tf.where(column < ends[:, None], tokens, tf.maximum(stops.token, 0)), ends, written.excess)


def _room(n):
    """The next power of two, 16 at least: prompts and texts have few lengths, each of which is compiled once."""
    return max(16, 1 << (n - 1).bit_length())


def _check_prompt(prompt, lengths, n_token):
    """`(prompt, lengths)` as arrays that `generate` takes, else a ValueError; ids beyond the lengths are 0."""
    prompt = np.asarray(prompt)
    if prompt.ndim != 2 or not np.issubdtype(prompt.dtype, np.integer) or 0 in prompt.shape:
        raise ValueError(
            f"prompt must be integers [batch, n], n at least 1, got {prompt.dtype.name} {list(prompt.shape)}"
        )
    batch, n = prompt.shape
    lengths = np.full([batch], n) if lengths is None else np.asarray(lengths)
    if lengths.shape != (batch,) or lengths.dtype.kind not in "iu" or lengths.min() < 1 or lengths.max() > n:
        raise ValueError(f"lengths must be [batch={batch}] integers between 1 and {n}, got {lengths.tolist()}")
    prompt = np.where(np.arange(n) < lengths[:, None], prompt, 0)
    check_ids("prompt", prompt, n_token)
    return prompt, lengths


@known_names
def generate(
    lm, /, prompt, max_new_tokens, *, lengths=None, num_return_sequences=1, stop_token=None, stop_strings=None,
    stop_at_newline=False, vocab=None, with_lengths=False, repetition_penalty=None,
    repetition_window=REPETITION_WINDOW, temperature=1.0, top_k=None, top_p=None, min_p=None, seed=None,
):  # fmt: skip
    """Continues every row of `prompt`, token by token, with cached keys and values.

    A `TransformerLM` has at most `context_len` tokens in view, at the positions 0, 1, ... When this window is full, its
    last half is read again as the beginning of a new one, and the text goes on. The next token's probabilities are
    those that `log_probs` gives after the tokens of the window, see `window.py`. No memory is carried from window to
    window, whatever `mem_len` is. Of a longer prompt, the model sees its last window.

    Args:
        lm: `TransformerXLLM` or `TransformerLM`; the function is their method.
        prompt: int `[batch, n]`, n at least 1.
        max_new_tokens: int, at least 0.
        lengths: int `[batch]`, where prompts are of unequal length: row b is `prompt[b, :lengths[b]]`.
        num_return_sequences: texts for every prompt, next to each other in the result. The first is the one that a
            single text would be; the others have seeds of their own, see `sampling.of_sequences`.
        stop_token: id that ends a row.
        stop_strings: list of strings. The token that completes one in the new text ends the row, wherever in that token
            the string ends: see `txl_tf.language.stopping`.
        stop_at_newline: whether "\\n" is a stop string.
        vocab: `Vocab` of the model, which stop strings need.
        with_lengths: whether to return the lengths too.
        repetition_penalty: the log-probabilities of tokens among the last ones of prompt and text are multiplied by it;
            above 1 they become less likely. This option and those below apply in this order.
        repetition_window: how many last tokens these are, by default 64.
        temperature: divides the log-probabilities; below 1 likely tokens become likelier, 0 takes the most likely one.
        top_k: sample from the `top_k` most likely tokens only.
        top_p: sample from the fewest most likely tokens that hold this share of the probability only, in (0, 1]; of
            those that `top_k` leaves, where both are given.
        min_p: sample from tokens at least `min_p` times as likely as the likeliest only, in [0, 1).
        seed: int, or int `[batch]`, one for every row. A row's text depends on its own prompt and seed alone: rows with
            the same of both are equal. `None` draws one for every row.

    Returns:
        int32 `[batch * num_return_sequences, n + max_new_tokens]`: prompt and new tokens. The new tokens of a shorter
        prompt follow it directly; the row is filled up with `stop_token` (0 where it is not given). With
        `with_lengths`, `(tokens, lengths)`: also int32 `[batch * num_return_sequences]`, the tokens of prompt and text.

    Raises:
        ValueError: an argument out of range, or a stop string that the vocabulary cannot spell. Names the argument.
        UnknownArgumentError: there is no such option; the message lists those that there are.
    """
    texts = write_texts(
        lm, prompt, max_new_tokens, lengths=lengths, num_return_sequences=num_return_sequences, stop_token=stop_token,
        stop_strings=stop_strings, stop_at_newline=stop_at_newline, vocab=vocab, repetition_penalty=repetition_penalty,
        repetition_window=repetition_window, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed,
    )  # fmt: skip
    return (texts.tokens, texts.lengths) if with_lengths else texts.tokens


def write_texts(
    lm, prompt, max_new_tokens, *, lengths=None, num_return_sequences=1, stop_token=None, stop_strings=None,
    stop_at_newline=False, vocab=None, **sampling,
):  # fmt: skip
    """`Texts` of `generate`, which describes the arguments."""
    check_names("write_texts", sampling, [*keywords_of(write_texts), *SAMPLING])
    n_token, number = lm.network.n_token, num_return_sequences
    prompt, lengths = _check_prompt(prompt, lengths, n_token)
    check_integer("max_new_tokens", max_new_tokens, 0)
    check_integer("num_return_sequences", number, 1)
    sampling = check_sampling(len(prompt), **sampling)
    stops = check_stops(n_token, stop_token, stop_strings, stop_at_newline, vocab)
    return _write(lm, prompt, lengths, max_new_tokens, sampling, stops, int(number))


def _write(lm, prompt, lengths, max_new_tokens, sampling, stops, number):
    """`Texts` of `generate`, whose arguments are checked, by a graph of the model."""
    (batch, n), room, sampling = prompt.shape, max_new_tokens, of_sequences(sampling, number)
    if lm.static_shapes:  # few of them, as each is compiled
        room, stops = _room(room), with_room(stops)
        prompt = np.pad(prompt, [(0, 0), (0, _room(n) - n)])
    arguments = {
        "prompt": tf.constant(prompt, tf.int32),
        "lengths": tf.constant(lengths, tf.int32),
        "uniform": lm._uniform_draws(sampling.seeds, tf.constant(room)),
        "limits": tf.fill([batch * number], tf.constant(max_new_tokens, tf.int32)),
        "sampling": sampling,
        "stops": stops,
    }
    specs = tf.nest.map_structure(tf.TensorSpec.from_tensor, arguments)
    if not lm.static_shapes:  # one graph for prompts, texts and stop strings of any length
        specs["prompt"] = tf.TensorSpec([batch, None], tf.int32)
        specs["uniform"] = tf.TensorSpec([None, batch * number, 2], tf.float64)
        specs["stops"] = spec_of(stops)
    graph = lm._generate_tokens.get_concrete_function(number, lm.static_shapes, **specs)
    texts = graph(number, lm.static_shapes, **arguments)
    return texts._replace(tokens=texts.tokens[:, : n + max_new_tokens])
