"""Text from a language model: the loop of sampling and cached forward steps, in one compiled graph.

    generate(lm, prompt, max_new_tokens=100, temperature=0.8, top_p=0.9, seed=1)    # int [batch, n] -> [batch, n + 100]

    session = Session(lm)                           # or token by token, the memory going on
    session.read(prompt)
    tokens = session.write(8, temperature=0.8)      # the next 8; write again, or read what somebody answers

The first new token follows the prompt as one segment, `lm.log_probs(prompt)`; from then on a segment is one token.

What a row draws depends on its seed and on how many tokens it has drawn before, and on no other row. Rows that share a
seed and a prompt therefore share their text: give every row its own seed for different ones.

Shapes:
    B: batch      n: prompt      N: n_token, the vocabulary      E: d_model
"""

import functools

import keras
import numpy as np
import tensorflow as tf

from txl_tf.layers.embedding import check_ids
from txl_tf.models.sampling import check_integer, check_sampling, precompute_softmax, sample, uniform_draws


def precompute_for(lm, reader):
    """What `next_token` computes from the weights alone: that of the reader, and the bins of the softmax."""
    return reader.precompute(), precompute_softmax(lm)


def next_token(reader, precomputed, hidden, state, uniform, sampling):
    """The next token of every row, sampled and read: the step of the loop.

    Args:
        reader: `lm.reader()`, with static shapes where this is for XLA.
        precomputed: `precompute_for(lm, reader)`.
        hidden: `[B, E]`, after the last token.
        state: of the reader, which is written into.
        uniform: float64 `[B, 2]`, of `uniform_draws`.
        sampling: `Sampling`.

    Returns:
        `(token, hidden, state)`: int32 `[B]`, and hidden state and memory for the next one.
    """
    weights, bins = precomputed
    token = sample(bins, hidden, uniform, sampling, reader.static_shapes)
    return token, *reader.read_token(weights, token, state)


def continue_text(
    lm, reader, precomputed, hidden, state, uniform, max_new_tokens, sampling, stop_token, with_nll=False
):
    """Samples and reads, token by token.

    Args:
        reader, precomputed, hidden, state, sampling: as of `next_token`.
        uniform: float64 `[n, B, 2]`, the draws of as many tokens as there is room for.
        max_new_tokens: int32 scalar, tokens to sample, n at most.
        stop_token: int32 scalar after which a row repeats it; -1 for none.
        with_nll: whether to compute the nll too.

    Returns:
        `(tokens, nll, hidden, state)`: int32 `[B, n]`, filled up with `stop_token`; float32 `[B, n]`, nats, or `None`;
        and hidden state and memory for the next call.
    """
    room, batch, _ = keras.ops.shape(uniform)
    rows = tf.range(batch)

    def body(i, tokens, nll, stopped, hidden, state):
        token, new_hidden, state = next_token(reader, precomputed, hidden, state, uniform[i], sampling)
        token = tf.where(stopped, stop_token, token)
        places = tf.stack([rows, tf.fill([batch], i)], -1)
        if with_nll:
            nll = tf.tensor_scatter_nd_update(nll, places, lm.softmax.nll(hidden, token, lm.network.embedding))
        tokens = tf.tensor_scatter_nd_update(tokens, places, token)
        return i + 1, tokens, nll, stopped | (token == stop_token), new_hidden, state

    tokens = tf.fill([batch, room], stop_token)
    nll = tf.zeros([batch, room if with_nll else 0])
    stopped = tf.zeros([batch], tf.bool)
    _, tokens, nll, _, hidden, state = tf.while_loop(
        lambda i, tokens, nll, stopped, *_: (i < max_new_tokens) & ~tf.reduce_all(stopped),
        body,
        (0, tokens, nll, stopped, hidden, state),
        parallel_iterations=1,
    )
    return tokens, nll if with_nll else None, hidden, state


def generate_tokens(lm, prompt, lengths, max_new_tokens, sampling, stop_token):
    """`generate` as a graph: all arguments but `lm` are tensors, and none is checked. `stop_token` is -1 for none."""
    uniform = uniform_draws(sampling.seeds, 0, max_new_tokens)
    return _continue_prompt(lm, lm.reader(), prompt, lengths, uniform, max_new_tokens, sampling, stop_token)


def generate_tokens_static(lm, prompt, lengths, uniform, max_new_tokens, sampling, stop_token):
    """`generate_tokens` for XLA, with room for as many new tokens as there are numbers `uniform` to draw them with.

    The numbers are an argument, float64 `[room, B, 2]` of `uniform_draws`, as XLA would draw others. The result is
    `[B, n + room]`, int32.
    """
    reader = lm.reader(static_shapes=True)
    return _continue_prompt(lm, reader, prompt, lengths, uniform, max_new_tokens, sampling, stop_token)


def _continue_prompt(lm, reader, prompt, lengths, uniform, max_new_tokens, sampling, stop_token):
    prompt, lengths = tf.cast(prompt, tf.int32), tf.cast(lengths, tf.int32)
    n, room, filler = keras.ops.shape(prompt)[1], keras.ops.shape(uniform)[0], tf.maximum(stop_token, 0)
    hidden, state = reader.read_prompt(prompt, lengths)
    precomputed = precompute_for(lm, reader)
    new_tokens, _, _, _ = continue_text(
        lm, reader, precomputed, hidden, state, uniform, max_new_tokens, sampling, stop_token
    )
    text = tf.concat([prompt, tf.where(new_tokens < 0, filler, new_tokens)], 1)
    column, lengths = tf.range(n + room), lengths[:, None]
    source = tf.where(column < lengths, column, column + n - lengths)  # the new tokens follow a shorter prompt directly
    text = tf.gather(text, tf.minimum(source, n + room - 1), batch_dims=1)
    return tf.where(column < lengths + max_new_tokens, text, filler)


_generate_tokens = tf.function(generate_tokens, autograph=False)
_uniform_draws = tf.function(uniform_draws, autograph=False)


@functools.partial(tf.function, autograph=False)
def _generate_on_replicas(lm, **arguments):
    """`generate_tokens_static` on every replica of the model, where a TPU has its weights; all find the same text."""
    strategy = lm.distribute_strategy
    found = strategy.run(functools.partial(generate_tokens_static, lm), kwargs=arguments)
    return strategy.experimental_local_results(found)[0]


def _room(n):
    """The next power of two, 16 at least: prompts and texts of few lengths, each of which is compiled once."""
    return max(16, 1 << (n - 1).bit_length())


def _generate_with_static_shapes(lm, max_new_tokens, arguments):
    """`generate` of its checked arguments: prompt and new tokens get some `_room`."""
    prompt = arguments["prompt"]
    n = prompt.shape[1]
    prompt = tf.pad(prompt, [[0, 0], [0, _room(n) - n]])
    uniform = _uniform_draws(arguments["sampling"].seeds, tf.constant(0), tf.constant(_room(max_new_tokens)))
    text = _generate_on_replicas(lm, **{**arguments, "prompt": prompt, "uniform": uniform})
    return text[:, : n + max_new_tokens]


def generate(
    lm, prompt, max_new_tokens, *, temperature=1.0, top_k=None, top_p=None, seed=None, stop_token=None, lengths=None
):
    """Continues every row of `prompt`.

    Args:
        lm: `TransformerXLLM` or `TransformerLM`.
        prompt: int `[batch, n]`, n at least 1.
        max_new_tokens: int, at least 0.
        temperature: divides the log-probabilities; below 1 likely tokens become likelier, 0 takes the most likely one.
        top_k: sample from the `top_k` most likely tokens only.
        top_p: sample from the fewest most likely tokens that hold this share of the probability only, in (0, 1]; of
            those that `top_k` leaves, where both are given.
        seed: int, or int `[batch]`, one for every row. A row's text depends on its own prompt and seed alone: rows with
            the same of both are equal. `None` draws one for every row.
        stop_token: id that ends a row; it is repeated up to the end of the row.
        lengths: int `[batch]`, where prompts are of unequal length: row b is `prompt[b, :lengths[b]]`.

    Returns:
        int32 `[batch, n + max_new_tokens]`: prompt and new tokens. The new tokens of a shorter prompt follow it
        directly; the row is filled up with `stop_token` (0 where it is not given).

    Raises:
        ValueError: an argument out of range; the message names it.
    """
    prompt = np.asarray(prompt)
    n_token = lm.network.n_token
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
    check_integer("max_new_tokens", max_new_tokens, 0)
    if stop_token is not None:
        check_integer("stop_token", stop_token, 0, n_token - 1)
    stop = np.int32(-1 if stop_token is None else stop_token)
    arguments = {
        "prompt": tf.constant(prompt, tf.int32),
        "lengths": tf.constant(lengths, tf.int32),
        "max_new_tokens": tf.constant(max_new_tokens, tf.int32),
        "stop_token": tf.constant(stop),
        "sampling": check_sampling(batch, temperature, top_k, top_p, seed),
    }
    if lm.static_shapes:
        return _generate_with_static_shapes(lm, max_new_tokens, arguments)
    specs = tf.nest.map_structure(tf.TensorSpec.from_tensor, arguments)
    specs["prompt"] = tf.TensorSpec([batch, None], tf.int32)  # one graph for prompts of any length
    return _generate_tokens.get_concrete_function(lm, **specs)(lm, **arguments)


class Session:
    """A text that is read and written in turns, in one memory: streaming, and conversations.

    The weights are those of the moment it is made. All rows are read and written in step.
    """

    def __init__(self, lm, batch_size=1):
        self.lm = lm
        self.batch_size = batch_size
        self._reader = reader = lm.reader()
        self._precomputed = tf.function(precompute_for, autograph=False)(lm, reader)
        self._state = reader.initial_state(batch_size)
        self._hidden = None
        self._drawn = 0
        self._read = tf.function(self._read_segment, reduce_retracing=True, autograph=False)
        self._write = tf.function(self._write_tokens, autograph=False)

    def read(self, tokens):
        """Reads a segment, int `[batch_size, n]`, n at least 1.

        Returns:
            float32 array `[batch_size, n]`, the nll of the tokens in nats; NaN for the first of all.
        """
        tokens = np.asarray(tokens)
        if tokens.ndim != 2 or tokens.shape[0] != self.batch_size or not tokens.size or tokens.dtype.kind not in "iu":
            raise ValueError(
                f"tokens must be integers [batch_size={self.batch_size}, n], n at least 1, "
                f"got {tokens.dtype.name} {list(tokens.shape)}"
            )
        check_ids("tokens", tokens, self.lm.network.n_token)
        first = self._hidden is None
        if first:
            self._hidden = tf.zeros([self.batch_size, self.lm.network.d_model], self.lm.compute_dtype)
        nll, self._hidden, self._state = self._read(tf.constant(tokens, tf.int32), self._hidden, self._state)
        nll = nll.numpy()
        if first:
            nll[:, 0] = np.nan
        return nll

    def write(self, max_new_tokens, *, temperature=1.0, top_k=None, top_p=None, seed=None, with_nll=False):
        """Samples the next tokens, and reads them.

        Arguments as of `generate`. With one seed, writing twice 4 tokens gives the same as writing 8.

        Returns:
            `(tokens, nll)`: int32 and float32 `[batch_size, max_new_tokens]`, nats at temperature 1; without
            `with_nll`, `None`.
        """
        if self._hidden is None:
            raise ValueError("read a text first: there is nothing to continue")
        check_integer("max_new_tokens", max_new_tokens, 0)
        sampling = check_sampling(self.batch_size, temperature, top_k, top_p, seed)
        numbers = tf.constant(self._drawn), tf.constant(max_new_tokens)
        tokens, nll, self._hidden, self._state = self._write(
            self._precomputed, self._hidden, self._state, *numbers, sampling, with_nll
        )
        self._drawn += max_new_tokens
        return tokens.numpy(), nll.numpy() if with_nll else None

    def _read_segment(self, tokens, hidden, state):
        new_hidden, state = self._reader.read(tokens, state)
        before = tf.concat([hidden[:, None], new_hidden[:, :-1]], 1)
        return self.lm.softmax.nll(before, tokens, self.lm.network.embedding), new_hidden[:, -1], state

    def _write_tokens(self, precomputed, hidden, state, first, max_new_tokens, sampling, with_nll):
        uniform, stop = uniform_draws(sampling.seeds, first, max_new_tokens), tf.constant(-1)
        return continue_text(
            self.lm, self._reader, precomputed, hidden, state, uniform, max_new_tokens, sampling, stop, with_nll
        )
