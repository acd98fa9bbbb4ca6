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

import random

import keras
import numpy as np
import tensorflow as tf

from txl_tf.adaptive import bin_logits, check_ids, head_of, split_bins
from txl_tf.cache import cached_forward, fix_weights, initial_state, memory_of, owned, state_from


def choose(scores, uniform):
    """Draws from `softmax(scores)` by its cumulative sums.

    Args:
        scores: float `[B, n]`; -inf is never drawn.
        uniform: float64 `[B]` in [0, 1).

    Returns:
        int32 `[B]`.
    """
    weights = tf.exp(tf.cast(scores - tf.reduce_max(scores, -1, keepdims=True), tf.float64))
    cumulative = tf.cumsum(weights, -1)
    chosen = tf.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:], side="right")[:, 0]
    return tf.minimum(chosen, tf.shape(scores)[-1] - 1)


def keep_likely(scores, top_k, top_p):
    """Leaves the most likely tokens: the first `top_k`, and of these the fewest that hold `top_p` of the probability.

    Args:
        scores: float `[B, N]`, log-probabilities up to a constant.
        top_k: int32 `[B]`, 0 for all.
        top_p: float32 `[B]` in (0, 1].

    Returns:
        `scores`, with -inf for the others.
    """
    batch, n = tf.unstack(tf.shape(scores))
    ordered, order = tf.math.top_k(scores, n)
    kept = tf.range(n) < tf.where(top_k > 0, top_k, n)[:, None]
    before = tf.cumsum(tf.nn.softmax(tf.where(kept, ordered, -np.inf)), -1, exclusive=True)
    kept &= (before < top_p[:, None]) | (top_p[:, None] == 1)  # where rounded sums may reach 1 too early
    places = tf.reshape(order + n * tf.range(batch)[:, None], [-1, 1])
    return tf.reshape(
        tf.scatter_nd(places, tf.reshape(tf.where(kept, ordered, -np.inf), [-1]), [batch * n]), [batch, n]
    )


def fix_softmax(lm):
    """The bins of the softmax in the type they are used in, split and joined once rather than for every token.

    Returns:
        tuple of `(weight, bias, projection)`, one a bin; the first has the clusters behind its words.
    """
    tables, projs, biases, clusters = lm.softmax.weights_with(lm.network.embedding)
    weights = split_bins(tables, biases)
    bins = [head_of(weights, biases, clusters), *zip(weights[1:], biases[1:], strict=True)]

    def cast(tensor):
        return None if tensor is None else tf.cast(tensor, lm.compute_dtype)

    return tuple(
        (cast(weight), tf.convert_to_tensor(bias), cast(proj)) for (weight, bias), proj in zip(bins, projs, strict=True)
    )


def sample(bins, hidden, uniform, temperature, top_k, top_p):
    """The next token of every row, drawn from its distribution.

    A token is drawn as the adaptive softmax is built: a word of the first bin or a bin, then a word of that bin. At
    temperature 1 and without limits, no bin is computed but those drawn.

    Args:
        bins: of `fix_softmax`.
        hidden: `[B, E]`.
        uniform: float64 `[B, 2]` in [0, 1).
        temperature: float32 `[B]`; 0 takes the most likely token.
        top_k, top_p: as in `keep_likely`.

    Returns:
        int32 `[B]`.
    """
    sizes = [bias.shape[0] for _, bias, _ in bins]
    sizes[0] -= len(bins) - 1
    starts = np.cumsum([0, *sizes[:-1]])

    def draw(head, tail_scores):
        """Given scores of the first bin's words and of the bins, and a function for those within bin i."""
        token = choose(head, uniform[:, 0])
        for i in range(1, len(bins)):
            rows = tf.where(token == sizes[0] + i - 1)
            word = choose(tail_scores(i, rows), tf.gather_nd(uniform[:, 1], rows))
            token = tf.tensor_scatter_nd_update(token, rows, -word - int(starts[i]))  # negative: not a bin's number
        return tf.abs(token)

    def plain():
        return draw(bin_logits(hidden, *bins[0]), lambda i, rows: bin_logits(tf.gather_nd(hidden, rows), *bins[i]))

    def general():
        head = tf.nn.log_softmax(bin_logits(hidden, *bins[0]))
        tails = [tf.nn.log_softmax(bin_logits(hidden, *tail)) for tail in bins[1:]]
        clusters = tf.split(head[:, sizes[0] :], len(tails), -1) if tails else []
        log_probs = tf.concat([head[:, : sizes[0]], *map(tf.add, clusters, tails)], -1)
        scores = log_probs / tf.where(temperature > 0, temperature, 1)[:, None]
        limited = tf.reduce_any((top_k > 0) | (top_p < 1))
        scores = tf.cond(limited, lambda: keep_likely(scores, top_k, top_p), lambda: scores)
        head, *tails = tf.split(scores, sizes, -1)
        head = tf.concat([head, *(tf.reduce_logsumexp(tail, -1, keepdims=True) for tail in tails)], -1)
        drawn = draw(head, lambda i, rows: tf.gather_nd(tails[i - 1], rows))
        return tf.where(temperature > 0, drawn, tf.argmax(log_probs, -1, output_type=tf.int32))

    unlimited = tf.reduce_all((temperature == 1) & (top_k == 0) & (top_p == 1))
    return tf.cond(unlimited, plain, general)


def draws(seeds, first, number):
    """The numbers behind the tokens `first ... first + number - 1` of every row: float64 `[number, B, 2]` in [0, 1).

    Args:
        seeds: int32 `[B]`.
        first, number: int32 scalars.
    """
    batch = tf.shape(seeds)[0]
    place = tf.repeat(tf.range(first, first + number), batch)
    keys = tf.stack([tf.tile(seeds, [number]), place], -1)
    uniform = tf.map_fn(
        lambda key: tf.random.stateless_uniform([2], key, dtype=tf.float64, alg="philox"),
        keys,
        fn_output_signature=tf.TensorSpec([2], tf.float64),
    )
    return tf.reshape(uniform, [number, batch, 2])


def continue_text(
    lm, fixed, bins, hidden, state, number, uniform, temperature, top_k, top_p, stop_token, with_nll=False
):
    """Samples and reads, token by token.

    Args:
        lm: `TransformerXLLM`.
        fixed, bins: `fix_weights` of its network and `fix_softmax`.
        hidden: `[B, E]`, after the last token.
        state: `CachedState` with room 1 that is `owned`, and written into.
        number: int32 scalar, tokens to sample.
        uniform: `draws` of that number.
        temperature, top_k, top_p: as in `sample`.
        stop_token: int32 scalar after which a row repeats it; -1 for none.
        with_nll: whether to compute the nll too.

    Returns:
        `(tokens, nll, hidden, state)`: int32 `[B, number]`; float32 `[B, number]`, nats, or `None`; and what the next
        call goes on with.
    """
    batch = keras.ops.shape(hidden)[0]
    rows = tf.range(batch)

    def body(i, tokens, nll, stopped, hidden, state):
        token = tf.where(stopped, stop_token, sample(bins, hidden, uniform[i], temperature, top_k, top_p))
        places = tf.stack([rows, tf.fill([batch], i)], -1)
        if with_nll:
            nll = tf.tensor_scatter_nd_update(nll, places, lm.softmax.nll(hidden, token, lm.network.embedding))
        tokens = tf.tensor_scatter_nd_update(tokens, places, token)
        hidden, state = cached_forward(lm.network, fixed, token[:, None], state, in_place=True)
        return i + 1, tokens, nll, stopped | (token == stop_token), hidden[:, 0], state

    tokens = tf.fill([batch, number], stop_token)
    nll = tf.zeros([batch, number if with_nll else 0])
    stopped = tf.zeros([batch], tf.bool)
    _, tokens, nll, _, hidden, state = tf.while_loop(
        lambda i, tokens, nll, stopped, *_: (i < number) & ~tf.reduce_all(stopped),
        body,
        (0, tokens, nll, stopped, hidden, state),
        parallel_iterations=1,
    )
    return tokens, nll if with_nll else None, hidden, state


def generate_tokens(lm, prompt, lengths, max_new_tokens, temperature, top_k, top_p, seeds, stop_token):
    """`generate` as a graph: all arguments but `lm` are tensors, and none is checked.

    Args:
        lm: `TransformerXLLM`.
        prompt: int `[B, n]`; lengths: int `[B]`.
        max_new_tokens: int32 scalar.
        temperature: float32 `[B]`; top_k: int32 `[B]`, 0 for all; top_p: float32 `[B]`, 1 for all.
        seeds: int32 `[B]`.
        stop_token: int32 scalar, -1 for none.

    Returns:
        int32 `[B, n + max_new_tokens]`: prompt, new tokens, then `stop_token` (0 if there is none).
    """
    prompt, lengths = tf.cast(prompt, tf.int32), tf.cast(lengths, tf.int32)
    n = tf.shape(prompt)[1]
    column = tf.range(n + max_new_tokens)
    padding = (n - lengths)[:, None]
    filler = tf.maximum(stop_token, 0)
    # All prompts end together, so that a row's first new token is everybody's.
    shifted = tf.gather(prompt, (column[:n] - padding) % n, batch_dims=1)
    shifted.set_shape(prompt.shape)
    network = lm.network
    state = initial_state(network, tf.shape(prompt)[0] if prompt.shape[0] is None else prompt.shape[0], room=n)
    hidden, state = cached_forward(network, fix_weights(network, room=n), shifted, state, lengths)
    state = owned(state_from(*memory_of(network, state)))
    new_tokens, _, _, _ = continue_text(
        lm, fix_weights(network), fix_softmax(lm), hidden[:, -1], state, max_new_tokens,
        draws(seeds, 0, max_new_tokens), temperature, top_k, top_p, stop_token,
    )  # fmt: skip
    text = tf.concat([shifted, tf.where(new_tokens < 0, filler, new_tokens)], 1)
    text = tf.gather(text, (column + padding) % (n + max_new_tokens), batch_dims=1)
    return tf.where(column < lengths[:, None] + max_new_tokens, text, filler)


_generate_tokens = tf.function(generate_tokens, autograph=False)


def generate(
    lm, prompt, max_new_tokens, *, temperature=1.0, top_k=None, top_p=None, seed=None, stop_token=None, lengths=None
):
    """Continues every row of `prompt`.

    Args:
        lm: `TransformerXLLM`.
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
        **sampling_options(batch, temperature, top_k, top_p, seed),
    }
    specs = {name: tf.TensorSpec.from_tensor(tensor) for name, tensor in arguments.items()}
    specs["prompt"] = tf.TensorSpec([batch, None], tf.int32)  # one graph for prompts of any length
    return _generate_tokens.get_concrete_function(lm, **specs)(**arguments)


def check_integer(name, value, least, most=2**31 - 1):
    """Raises ValueError if `value` is no integer from `least` to `most`."""
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"{name} must be an integer from {least} to {most}, got {value!r}")


def sampling_options(batch, temperature=1.0, top_k=None, top_p=None, seed=None):
    """Checks the options of sampling and makes them tensors `[batch]`: dict of arguments of `generate_tokens`.

    Raises:
        ValueError: an option is out of range; the message names it.
    """
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature must be 0 or more, got {temperature}")
    if top_k is not None:
        check_integer("top_k", top_k, 1)
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must lie in (0, 1], got {top_p}")
    seeds = [random.randrange(2**31) for _ in range(batch)] if seed is None else seed
    seeds = np.broadcast_to(np.asarray(seeds), [batch]) if np.shape(seeds) in ((), (batch,)) else np.zeros(0)
    if seeds.shape != (batch,) or seeds.dtype.kind not in "iu" or seeds.min() < -(2**31) or seeds.max() >= 2**31:
        raise ValueError(f"seed must be an integer of 32 bits, or one for each of the {batch} rows, got {seed!r}")
    return {
        "temperature": tf.fill([batch], tf.cast(temperature, tf.float32)),
        "top_k": tf.fill([batch], 0 if top_k is None else int(top_k)),
        "top_p": tf.fill([batch], tf.cast(1.0 if top_p is None else top_p, tf.float32)),
        "seeds": tf.constant(seeds, tf.int32),
    }


class Session:
    """A text that is read and written in turns, in one memory: streaming, and conversations.

    The weights are those of the moment it is made. All rows are read and written in step.

    Args:
        lm: `TransformerXLLM`.
        batch_size: rows.
    """

    def __init__(self, lm, batch_size=1):
        self.lm = lm
        self.batch_size = batch_size
        self._fixed = tf.function(lambda: (fix_weights(lm.network), fix_softmax(lm)), autograph=False)()
        self._state = initial_state(lm.network, batch_size)
        self._hidden = None
        self._drawn = 0
        self._read = tf.function(self._read_segment, reduce_retracing=True, autograph=False)
        self._write = tf.function(self._write_tokens, autograph=False)

    def read(self, tokens):
        """Reads a segment.

        Args:
            tokens: int `[batch_size, n]`, n at least 1.

        Returns:
            float32 array `[batch_size, n]`, the nll of the tokens in nats; NaN for the first of all.

        Raises:
            ValueError: the shape or an id is wrong.
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

    def write(self, number, *, temperature=1.0, top_k=None, top_p=None, seed=None, with_nll=False):
        """Samples the next tokens, and reads them.

        Args:
            number: int, how many. With one seed, writing twice 4 gives the same as writing 8.
            temperature, top_k, top_p, seed: as in `generate`.
            with_nll: whether to compute the nll too.

        Returns:
            `(tokens, nll)`: int32 `[batch_size, number]`, and float32 `[batch_size, number]`, nats at temperature 1, or
            `None`.

        Raises:
            ValueError: nothing was read yet, or an option is out of range.
        """
        if self._hidden is None:
            raise ValueError("read a text first: there is nothing to continue")
        check_integer("number", number, 0)
        options = sampling_options(self.batch_size, temperature, top_k, top_p, seed)
        tokens, nll, self._hidden, self._state = self._write(
            self._fixed,
            self._hidden,
            self._state,
            tf.constant(self._drawn),
            tf.constant(number),
            **options,
            with_nll=with_nll,
        )
        self._drawn += number
        return tokens.numpy(), nll.numpy() if with_nll else None

    def _read_segment(self, tokens, hidden, state):
        network = self.lm.network
        room = tf.shape(tokens)[1]
        state = state_from(*memory_of(network, state), room=room)
        new_hidden, state = cached_forward(network, fix_weights(network, room), tokens, state)
        nll = self.lm.softmax.nll(tf.concat([hidden[:, None], new_hidden[:, :-1]], 1), tokens, network.embedding)
        return nll, new_hidden[:, -1], owned(state_from(*memory_of(network, state)))

    def _write_tokens(self, fixed, hidden, state, first, number, temperature, top_k, top_p, seeds, with_nll):
        return continue_text(
            self.lm, *fixed, hidden, state, number, draws(seeds, first, number),
            temperature, top_k, top_p, stop_token=tf.constant(-1), with_nll=with_nll,
        )  # fmt: skip
