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

import functools
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from txl_tf.layers.embedding import check_ids
from txl_tf.models.decoding.sampling import (
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
    uniform_draws,
)
from txl_tf.models.decoding.stopping import add_token, check_stops, spec_of, with_room


class TextState(NamedTuple):
    """Where a text has got to: all that its next token depends on."""

    hidden: tf.Tensor  # [B, E], after the last token
    state: tuple  # of the reader
    history: History


class Continuation(NamedTuple):
    """What was written."""

    tokens: tf.Tensor  # int32 [B, room], filled up with the stop token, or 0
    lengths: tf.Tensor  # int32 [B], how many there are
    ended: tf.Tensor  # bool [B], whether with a stop string
    excess: tf.Tensor  # int32 [B], units of the last token behind it
    nll: tf.Tensor | None  # float32 [B, room], nats
    text: TextState


class Texts(NamedTuple):
    """Prompts and what was written after them."""

    tokens: tf.Tensor  # int32 [B, n + room], filled up as those of `Continuation`
    lengths: tf.Tensor  # int32 [B], prompt and new tokens
    excess: tf.Tensor  # as of `Continuation`


def precompute_for(lm, reader):
    """What `next_token` computes from the weights alone: that of the reader, and the bins of the softmax."""
    return reader.precompute(), precompute_softmax(lm)


def next_token(reader, precomputed, text, uniform, sampling):
    """The next token of every row, sampled and read: the step of the loop.

    Args:
        reader: `lm.reader()`, with static shapes where this is for XLA.
        precomputed: `precompute_for(lm, reader)`.
        text: `TextState`, whose state is written into.
        uniform: float64 `[B, 2]`, of `uniform_draws`.
        sampling: `Sampling`.

    Returns:
        `(token, text)`: int32 `[B]`, and the `TextState` for the next one.
    """
    weights, bins = precomputed
    token = sample(bins, text.hidden, uniform, sampling, text.history, reader.static_shapes)
    hidden, state = reader.read_token(weights, token, text.state)
    return token, TextState(hidden, state, remember(text.history, token))


def continue_text(lm, reader, precomputed, text, uniform, limits, sampling, stops, with_nll=False):
    """Samples and reads, token by token, until every row has ended.

    Args:
        reader, precomputed, text, sampling: as of `next_token`.
        uniform: float64 `[room, B, 2]`, the draws of as many tokens as there is room for.
        limits: int32 `[B]`, or one for all rows: most tokens to write.
        stops: `Stops`, which end a row sooner.
        with_nll: whether to compute the nll too.

    Returns:
        `Continuation`.
    """
    room, batch, _ = keras.ops.shape(uniform)
    rows, filler = tf.range(batch), tf.maximum(stops.token, 0)
    has_strings = tf.reduce_any(stops.strings >= 0)
    tail = tf.broadcast_to(stops.tail, [batch, keras.ops.shape(stops.tail)[1]])
    zeros = tf.zeros([batch], tf.int32)

    def end(token, tail):
        """As `add_token`."""
        nothing = zeros > 0, zeros, tail
        if stops.strings.shape[1] == 0:  # known to have none
            return nothing
        return tf.cond(has_strings, lambda: add_token(stops._replace(tail=tail), token), lambda: nothing)

    def body(i, stopped, lengths, ended, excess, tail, tokens, nll, text):
        hidden = text.hidden
        token, text = next_token(reader, precomputed, text, uniform[i], sampling)
        token = tf.where(stopped, filler, token)
        places = tf.stack([rows, tf.fill([batch], i)], -1)
        if with_nll:
            nll = tf.tensor_scatter_nd_update(nll, places, lm.softmax.nll(hidden, token, lm.network.embedding))
        tokens = tf.tensor_scatter_nd_update(tokens, places, token)
        ends, behind, tail = end(token, tail)
        lengths = tf.where(stopped, lengths, i + 1)
        ended, excess = tf.where(stopped, ended, ends), tf.where(stopped, excess, behind)
        stopped |= ends | (token == stops.token) | (lengths >= limits)
        return i + 1, stopped, lengths, ended, excess, tail, tokens, nll, text

    nll = tf.zeros([batch, room if with_nll else 0])
    first = (0, zeros >= limits, zeros, zeros > 0, zeros, tail, tf.fill([batch, room], filler), nll, text)
    _, _, lengths, ended, excess, _, tokens, nll, text = tf.while_loop(
        lambda i, stopped, *_: ~tf.reduce_all(stopped), body, first, parallel_iterations=1
    )
    return Continuation(tokens, lengths, ended, excess, nll if with_nll else None, text)


def generate_tokens(lm, prompt, lengths, limits, sampling, stops, number=1):
    """`generate` as a graph: all arguments but `lm` are tensors, and none is checked.

    Args:
        prompt, lengths, sampling: of as many rows as there are prompts.
        limits: int32 `[B]`: most new tokens of every sequence.
        stops: `Stops`, of one row for all sequences, or of a row for each.
        number: sequences for each prompt.

    Returns:
        `Texts`.
    """
    sampling = of_sequences(sampling, number)
    uniform = uniform_draws(sampling.seeds, 0, tf.reduce_max(limits))
    return _continue_prompt(lm, lm.reader(), prompt, lengths, uniform, limits, sampling, stops, number)


def generate_tokens_static(lm, prompt, lengths, uniform, limits, sampling, stops, number=1):
    """`generate_tokens` for XLA, with room for as many new tokens as there are numbers `uniform` to draw them with.

    The numbers are an argument, float64 `[room, B, 2]` of `uniform_draws`, as XLA would draw others. `sampling` and
    `stops.tail` have a row for each sequence already, or `stops.tail` one for all; `number` is an int.
    """
    reader = lm.reader(static_shapes=True)
    return _continue_prompt(lm, reader, prompt, lengths, uniform, limits, sampling, stops, number)


def _continue_prompt(lm, reader, prompt, lengths, uniform, limits, sampling, stops, number):
    prompt, lengths = tf.cast(prompt, tf.int32), tf.cast(lengths, tf.int32)
    n, room = keras.ops.shape(prompt)[1], keras.ops.shape(uniform)[0]
    nothing = no_history(keras.ops.shape(prompt)[0], lm.network.n_token)
    text = TextState(*reader.read_prompt(prompt, lengths), remember_segment(nothing, prompt, lengths))
    text, prompt, lengths = repeated((text, prompt, lengths), number)
    precomputed = precompute_for(lm, reader)
    written = continue_text(lm, reader, precomputed, text, uniform, limits, sampling, stops)
    tokens = tf.concat([prompt, written.tokens], 1)
    column, lengths = tf.range(n + room), lengths[:, None]
    source = tf.where(column < lengths, column, column + n - lengths)  # the new tokens follow a shorter prompt directly
    tokens = tf.gather(tokens, tf.minimum(source, n + room - 1), batch_dims=1)
    ends = lengths[:, 0] + written.lengths
    return Texts(tf.where(column < ends[:, None], tokens, tf.maximum(stops.token, 0)), ends, written.excess)


class GenerationGraphs:
    """Mixin of language models: the graphs of `generate`, which belong to the model and go with it."""

    @tf.function(autograph=False)
    def _generate_tokens(self, **arguments):
        return generate_tokens(self, **arguments)

    @tf.function(autograph=False)
    def _generate_on_replicas(self, number, **arguments):
        """`generate_tokens_static` on every replica, where a TPU has its weights; all find the same text."""
        strategy = self.distribute_strategy
        write = functools.partial(generate_tokens_static, self, number=number)
        return tf.nest.map_structure(
            lambda found: strategy.experimental_local_results(found)[0], strategy.run(write, kwargs=arguments)
        )

    @tf.function(autograph=False)
    def _uniform_draws(self, seeds, n_tokens):
        return uniform_draws(seeds, 0, n_tokens)


def _room(n):
    """The next power of two, 16 at least: prompts and texts of few lengths, each of which is compiled once."""
    return max(16, 1 << (n - 1).bit_length())


def _generate(lm, max_new_tokens, number, arguments):
    """`Texts` of checked arguments, by a graph that takes prompts and stop strings of any length."""
    specs = tf.nest.map_structure(tf.TensorSpec.from_tensor, arguments)
    specs["prompt"] = tf.TensorSpec([len(arguments["prompt"]), None], tf.int32)
    specs["stops"] = spec_of(arguments["stops"])
    graph = lm._generate_tokens.get_concrete_function(**specs, number=number)
    return graph(**arguments, number=number)


def _generate_with_static_shapes(lm, max_new_tokens, number, arguments):
    """`Texts` of checked arguments: prompt, new tokens and stop strings get some `_room`."""
    prompt, sampling = arguments["prompt"], of_sequences(arguments["sampling"], number)
    n = prompt.shape[1]
    changed = {
        "prompt": tf.pad(prompt, [[0, 0], [0, _room(n) - n]]),
        "uniform": lm._uniform_draws(sampling.seeds, tf.constant(_room(max_new_tokens))),
        "sampling": sampling,
        "stops": with_room(arguments["stops"]),
    }
    texts = lm._generate_on_replicas(number, **{**arguments, **changed})
    return texts._replace(tokens=texts.tokens[:, : n + max_new_tokens])


def _check_prompt(prompt, lengths, n_token):
    """`(prompt, lengths)` as arrays, found to be what `generate` says; ids beyond the lengths are 0."""
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


def generate(
    lm, prompt, max_new_tokens, *, lengths=None, num_return_sequences=1, stop_token=None, stop_strings=None,
    stop_at_newline=False, vocab=None, with_lengths=False, **sampling,
):  # fmt: skip
    """Continues every row of `prompt`.

    Args:
        lm: `TransformerXLLM` or `TransformerLM`.
        prompt: int `[batch, n]`, n at least 1.
        max_new_tokens: int, at least 0.
        lengths: int `[batch]`, where prompts are of unequal length: row b is `prompt[b, :lengths[b]]`.
        num_return_sequences: texts for every prompt, next to each other in the result. The first is the one that a
            single text would be; the others have seeds of their own, see `sampling.of_sequences`.
        stop_token: id that ends a row.
        stop_strings: list of strings. The token that completes one in the new text ends the row, wherever in that token
            the string ends: see `txl_tf.models.decoding.stopping`.
        stop_at_newline: whether "\\n" is a stop string.
        vocab: `Vocab` of the model, which stop strings need.
        with_lengths: whether to return the lengths too.
        **sampling: how to draw the next token, in the order in which it is applied:
            repetition_penalty: the log-probabilities of tokens among the last ones of prompt and text are multiplied by
                it; above 1 they become less likely.
            repetition_window: how many last tokens these are, by default 64.
            temperature: divides the log-probabilities; below 1 likely tokens become likelier, 0 takes the most likely
                one.
            top_k: sample from the `top_k` most likely tokens only.
            top_p: sample from the fewest most likely tokens that hold this share of the probability only, in (0, 1]; of
                those that `top_k` leaves, where both are given.
            min_p: sample from tokens at least `min_p` times as likely as the likeliest only, in [0, 1).
            seed: int, or int `[batch]`, one for every row. A row's text depends on its own prompt and seed alone: rows
                with the same of both are equal. `None` draws one for every row.

    Returns:
        int32 `[batch * num_return_sequences, n + max_new_tokens]`: prompt and new tokens. The new tokens of a shorter
        prompt follow it directly; the row is filled up with `stop_token` (0 where it is not given). With
        `with_lengths`, `(tokens, lengths)`: also int32 `[batch * num_return_sequences]`, the tokens of prompt and text.

    Raises:
        ValueError: an argument out of range, or a stop string that the vocabulary cannot spell. Names the argument.
    """
    n_token, number = lm.network.n_token, num_return_sequences
    prompt, lengths = _check_prompt(prompt, lengths, n_token)
    check_integer("max_new_tokens", max_new_tokens, 0)
    check_integer("num_return_sequences", number, 1)
    arguments = {
        "prompt": tf.constant(prompt, tf.int32),
        "lengths": tf.constant(lengths, tf.int32),
        "limits": tf.fill([len(prompt) * number], tf.constant(max_new_tokens, tf.int32)),
        "sampling": check_sampling(len(prompt), **sampling),
        "stops": check_stops(n_token, stop_token, stop_strings, stop_at_newline, vocab),
    }
    write = _generate_with_static_shapes if lm.static_shapes else _generate
    texts = write(lm, max_new_tokens, int(number), arguments)
    return (texts.tokens, texts.lengths) if with_lengths else texts.tokens
