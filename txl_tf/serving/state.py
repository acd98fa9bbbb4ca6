"""The state of a served language model as one float32 tensor that goes out with an answer and in with the next request.

Both classes have the same functions: one for a memory, one for a window.

Shapes:
    B: batch      T: tokens of a request      L: n_layer      H: n_head      M: mem_len      D: d_head
"""

from __future__ import annotations

import math

import tensorflow as tf

from txl_tf.language.language_model import LanguageModel
from txl_tf.language.window import WindowState
from txl_tf.serving.request import Check, checked
from txl_tf.transformer_xl.cache import CachedState, cached_forward, initial_state, precompute, state_from

# How many tokens a row has read is kept modulo COUNT_BASE**COUNT_DIGITS, which turns keys by the same angles.
COUNT_BASE, COUNT_DIGITS = 1 << 16, 2


class ServedMemory:
    """The memory of Transformer-XL as keys and values, the oldest first.

    Attributes:
        shape: of a row of the state: `[L, 2, H, M, D]`. Where keys are turned by the number of their token, `[X]`: the
            same numbers, and then how many tokens were read, as `COUNT_DIGITS` numbers that float32 holds exactly.
        position_keys: those that a single token needs, stored in the type `weights`, as they would otherwise take the
            most time.
    """

    def __init__(self, lm: LanguageModel, weights: str):
        self.network, self.dtype, self.model = lm.network, lm.compute_dtype, lm.outputs
        network, klen = lm.network, lm.network.mem_len + 1
        self.memory_shape = [network.n_layer, 2, network.n_head, network.mem_len, network.d_head]
        self.counts = network.scheme.turns
        self.shape = [math.prod(self.memory_shape) + COUNT_DIGITS] if self.counts else self.memory_shape
        self.position_keys = [
            tf.Variable(tf.cast(layer.position_keys[:, :klen], weights), trainable=False)
            for layer in precompute(network)
            if layer.position_keys is not None
        ]

    def initial(self, rows: tf.Tensor) -> tf.Tensor:
        """The state before a text, `[B, ...]`."""
        return self._pack(initial_state(self.network, rows))

    def read_text(self, tokens: tf.Tensor) -> tf.Tensor:
        """Hidden states `[B, T, d_model]` of whole texts, without copies of an empty state."""
        network, (rows, length) = self.network, tf.unstack(tf.shape(tokens))
        state = initial_state(network, rows, length)
        return cached_forward(network, precompute(network, length), tokens, state, model=self.model)[0]

    def read(self, tokens: tf.Tensor, state: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Hidden states `[B, T, d_model]` and the state after the segment."""
        length = tf.shape(tokens)[1]
        return self._read(precompute(self.network, length), tokens, state, length)

    def read_token(self, tokens: tf.Tensor, state: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """`read` of a single token a row, with the position keys that are stored."""
        weights = precompute(self.network)
        if self.position_keys:
            weights = [  # the token goes to the last slot, for which the table need not be rotated, nor be longer
                layer._replace(position_keys=tf.cast(keys, layer.qkv.dtype))
                for layer, keys in zip(weights, self.position_keys, strict=True)
            ]
        return self._read(weights, tf.ensure_shape(tokens, [None, 1]), state, 1)

    def _read(self, weights, tokens, state, length):
        hidden, cached = cached_forward(self.network, weights, tokens, self._unpack(state, length), model=self.model)
        return hidden, self._pack(cached)

    def _unpack(self, state: tf.Tensor, max_segment: tf.Tensor | int) -> CachedState:
        n_layer, _, *memory = self.memory_shape
        count = ()
        if self.counts:
            state, digits = tf.split(state, [self.shape[0] - COUNT_DIGITS, COUNT_DIGITS], 1)
            whole = tf.reduce_all((digits >= 0) & (digits < COUNT_BASE) & (digits == tf.floor(digits)), 1)
            check = Check(whole, "state must be one that this model returned", digits)
            digits = checked([check], digits)
            high, low = tf.unstack(tf.cast(digits, tf.int32), axis=1)
            count = high * COUNT_BASE + low
        state = tf.reshape(tf.cast(state, self.dtype), [tf.shape(state)[0], 2 * n_layer, *memory])
        rings = tf.unstack(state, axis=1)  # keys and values in turn
        return state_from(rings[::2], rings[1::2], max_segment, count)

    def _pack(self, cached: CachedState) -> tf.Tensor:
        """The inverse of `_unpack`, for a state at slot 0: fresh, or after a segment of `max_segment` tokens."""
        rings = _rings(cached)
        max_segment = tf.shape(rings[0])[2] - self.network.mem_len
        state = tf.cast(tf.stack([ring[:, :, max_segment:] for ring in rings], 1), tf.float32)
        if not self.counts:
            return tf.reshape(state, [tf.shape(state)[0], *self.shape])
        digits = tf.stack([cached.count // COUNT_BASE % COUNT_BASE, cached.count % COUNT_BASE], 1)
        return tf.concat([tf.reshape(state, [tf.shape(state)[0], -1]), tf.cast(digits, tf.float32)], 1)


class ServedHiddenStates:
    """The memory of a Transformer-XL that cannot be computed from cached keys and values: its hidden states.

    Attributes:
        shape: of a row of the state: `[L, M, d_model]`.
    """

    position_keys = ()

    def __init__(self, lm: LanguageModel):
        self.lm = lm
        self.shape = [lm.network.n_layer, lm.network.mem_len, lm.network.d_model]

    def initial(self, rows: tf.Tensor) -> tf.Tensor:
        return tf.zeros([rows, *self.shape])

    def read_text(self, tokens: tf.Tensor) -> tf.Tensor:
        return self.lm.outputs(tokens, self.lm.initial_mems(tf.shape(tokens)[0]))[0]

    def read(self, tokens: tf.Tensor, state: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        mems = tf.unstack(tf.cast(state, self.lm.network.compute_dtype), axis=1)
        outputs, mems = self.lm.outputs(tokens, mems)
        return outputs, tf.cast(tf.stack(mems, 1), tf.float32)

    read_token = read


class ServedWindow:
    """The window of the vanilla language model, see `txl_tf.language.window`.

    A row of the state, `[X]`, has the keys and values of every layer, the tokens of the window, which are read again
    when it is full, and their number.
    """

    position_keys = ()

    def __init__(self, lm: LanguageModel):
        self.lm, self.parts = lm, self._parts(lm.decoding_cache().initial_state(1))  # no rings without a cache
        self.sizes = [math.prod(part.shape) for part in self.parts]
        self.shape = [sum(self.sizes)]

    def initial(self, rows: tf.Tensor) -> tf.Tensor:
        return self._pack(self.lm.decoding_cache().initial_state(rows))

    def read_text(self, tokens: tf.Tensor) -> tf.Tensor:
        cache = self.lm.decoding_cache()
        return cache.read(tokens, cache.initial_state(tf.shape(tokens)[0]))[0]

    def read(self, tokens: tf.Tensor, state: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        hidden, state = self.lm.decoding_cache().read(tokens, self._unpack(state))
        return hidden, self._pack(state)

    read_token = read

    def _unpack(self, state: tf.Tensor) -> WindowState:
        *rings, tokens, length = tf.split(state, self.sizes, 1)
        message = "state must be one that this model returned"
        checks = [
            Check((length >= 0) & (length <= self.lm.context_len), message, length),
            Check((tokens >= 0) & (tokens < self.lm.network.n_token), message, tokens),
        ]
        parts = zip(checked(checks, *rings, tokens, length), self.parts, strict=True)
        *rings, tokens, length = (tf.reshape(tf.cast(part, like.dtype), [-1, *like.shape[1:]]) for part, like in parts)
        return WindowState(tuple(rings[::2]), tuple(rings[1::2]), tokens, length)

    def _pack(self, state: WindowState) -> tf.Tensor:
        parts, rows = zip(self._parts(state), self.sizes, strict=True), tf.shape(state.length)[0]
        return tf.concat([tf.reshape(tf.cast(part, tf.float32), [rows, size]) for part, size in parts], 1)

    def _parts(self, state: WindowState) -> list[tf.Tensor]:
        """The tensors of a state in the order in which a row has them."""
        return [*_rings(state), state.tokens, state.length]


def _rings(state: CachedState | WindowState) -> list[tf.Tensor]:
    """Keys and values of a state, layer by layer."""
    return [ring for pair in zip(state.keys, state.values, strict=True) for ring in pair]
