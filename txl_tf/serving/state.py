"""The state of a served language model: one float32 tensor, which an answer contains and the next request passes on.

There are three classes with the same methods: `ServedMemory` for keys and values, `ServedHiddenStates` for hidden
states, and `ServedWindow` for models with absolute positions.

Shapes:
    B: batch      T: tokens of a request      L: n_layer      H: n_head      M: mem_len      D: d_head
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from txl_tf.language.language_model import LanguageModel
from txl_tf.language.window import WindowState
from txl_tf.serving.request import Check, checked
from txl_tf.transformer_xl.cache import RingState, cached_forward, initial_state, precompute, state_from

# The number of tokens that a row has read is an int32, which wraps around. float32 cannot store all int32 numbers
# exactly, but all integers below COUNT_BASE. So the state contains the number as COUNT_DIGITS digits in this base.
COUNT_BASE = 1 << 16
COUNT_DIGITS = 2


class ServedMemory:
    """The memory of Transformer-XL as keys and values, the oldest first.

    Args:
        lm: the language model.
        weights: type in which `position_keys` are stored, see `export_saved_model`.

    Attributes:
        shape: shape of a row of the state, `[L, 2, H, M, D]`. If the position scheme rotates keys by the number of
            their token, it is `[X]`: the same numbers, and then the number of tokens that were read, in `COUNT_DIGITS`
            digits.
        position_keys: for each layer that has them, the position keys for a segment of a single token. They are stored,
            because to compute them again for every token would take most of the time.
    """

    def __init__(self, lm: LanguageModel, weights: str):
        network = lm.network
        klen = network.mem_len + 1  # keys of a token: the memory and the token itself
        self.network = network
        self.dtype = lm.compute_dtype
        self.outputs = lm.outputs
        self.memory_shape = [network.n_layer, 2, network.n_head, network.mem_len, network.d_head]
        self.has_count = network.scheme.turns
        self.shape = [math.prod(self.memory_shape) + COUNT_DIGITS] if self.has_count else self.memory_shape
        self.position_keys = [
            tf.Variable(tf.cast(layer.position_keys[:, :klen], weights), trainable=False)
            for layer in precompute(network)
            if layer.position_keys is not None
        ]

    def initial(self, rows: tf.Tensor) -> tf.Tensor:
        """The state before a text, `[B, ...]`. `rows` is B."""
        return self._pack(initial_state(self.network, rows))

    def read_text(self, tokens: tf.Tensor) -> tf.Tensor:
        """Hidden states `[B, T, d_model]` of whole texts, read as one segment after an empty memory."""
        network = self.network
        rows, length = tf.unstack(tf.shape(tokens))
        state = initial_state(network, rows, length, first_slot=network.mem_len)
        return cached_forward(network, precompute(network, length), tokens, state, call=self.outputs)[0]

    def read(self, tokens: tf.Tensor, state: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Hidden states `[B, T, d_model]` of tokens after a state, and the state after them."""
        length: Any = tf.shape(tokens)[1]
        return self._read(precompute(self.network, length), tokens, state, length)

    def read_token(self, tokens: tf.Tensor, state: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """The result of `read` for one token per row, hidden states `[B, 1, d_model]` and the state.

        Uses the stored position keys.
        """
        weights = precompute(self.network)
        if self.position_keys:
            # `_unpack` puts the memory first and the new token last. So the position keys need no rotation: the stored
            # rows, farthest first, are enough.
            weights = [
                layer._replace(position_keys=tf.cast(keys, layer.o.dtype))
                for layer, keys in zip(weights, self.position_keys, strict=True)
            ]
        return self._read(weights, tf.ensure_shape(tokens, [None, 1]), state, 1)

    def _read(
        self, weights: Sequence[Any], tokens: tf.Tensor, state: tf.Tensor, length: Any
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Hidden states of a segment of `length` tokens, and the state after it. `weights` come from `precompute`."""
        hidden, cached = cached_forward(self.network, weights, tokens, self._unpack(state, length), call=self.outputs)
        return hidden, self._pack(cached)

    def _unpack(self, state: Any, max_segment: Any) -> RingState:
        """The state in the form of the cache, with room for a segment of `max_segment` tokens.

        Adds a check of the number of tokens that were read.
        """
        n_layer, _, *memory = self.memory_shape
        count: Any = ()
        if self.has_count:
            state, digits = tf.split(state, [self.shape[0] - COUNT_DIGITS, COUNT_DIGITS], 1)
            check = Check(_are_integers(digits, COUNT_BASE - 1), "state must be one that this model returned", digits)
            digits = checked([check], digits)
            high, low = tf.unstack(tf.cast(digits, tf.int32), axis=1)
            count = high * COUNT_BASE + low
        state = tf.reshape(tf.cast(state, self.dtype), [tf.shape(state)[0], 2 * n_layer, *memory])
        rings = tf.unstack(state, axis=1)  # keys and values of each layer alternate
        return state_from(rings[::2], rings[1::2], max_segment, count)

    def _pack(self, cached: RingState) -> tf.Tensor:
        """The inverse of `_unpack`, for an empty state or one after a segment that fills the room for it.

        The memory is then in the last slots of the rings, the oldest token first.
        """
        rings = _rings(cached)
        max_segment = tf.shape(rings[0])[2] - self.network.mem_len
        state = tf.cast(tf.stack([ring[:, :, max_segment:] for ring in rings], 1), tf.float32)
        if not self.has_count:
            return tf.reshape(state, [tf.shape(state)[0], *self.shape])
        count: Any = cached.count
        digits = tf.stack([count // COUNT_BASE % COUNT_BASE, count % COUNT_BASE], 1)
        return tf.concat([tf.reshape(state, [tf.shape(state)[0], -1]), tf.cast(digits, tf.float32)], 1)


class ServedHiddenStates:
    """The memory of a model that cannot cache keys and values: hidden states, the oldest first.

    Attributes:
        shape: shape of a row of the state, `[L, M, d_model]`.
    """

    position_keys = ()

    def __init__(self, lm: LanguageModel):
        self.lm = lm
        self.shape = [lm.network.n_layer, lm.network.mem_len, lm.network.d_model]

    def initial(self, rows: tf.Tensor) -> tf.Tensor:
        """The state before a text, `[B, L, M, d_model]`: zeros, or the result of a user's `initial_mems`."""
        return tf.cast(tf.stack(self.lm.first_mems(rows), 1), tf.float32)

    def read_text(self, tokens: tf.Tensor) -> tf.Tensor:
        """The outputs `[B, T, any]` of whole texts, which begin with an empty memory."""
        return self.lm.outputs(tokens, self.lm.first_mems(tf.shape(tokens)[0]))[0]

    def read(self, tokens: tf.Tensor, state: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """The outputs `[B, T, any]` of a segment, and the state after it."""
        mems = tf.unstack(tf.cast(state, self.lm.network.compute_dtype), axis=1)
        outputs, mems = self.lm.outputs(tokens, mems)
        return outputs, tf.cast(tf.stack(mems, 1), tf.float32)

    read_token = read


class ServedWindow:
    """The window of a language model with absolute positions, see `txl_tf.language.window`.

    When the window is full and another token comes, the model reads the last part of the window again, as the beginning
    of a new window.

    Attributes:
        shape: shape of a row of the state, `[X]`: the keys and values of every layer, the tokens of the window, and
            their number. Models that cache no keys and values have only the tokens and their number.
    """

    position_keys = ()

    def __init__(self, lm: LanguageModel):
        self.lm = lm
        empty: Any = lm.decoding_cache().initial_state(1)
        self.empty_tensors = self._tensors_of(empty)
        self.sizes = [math.prod(tensor.shape) for tensor in self.empty_tensors]  # numbers of each tensor in a row
        self.shape = [sum(self.sizes)]

    def initial(self, rows: tf.Tensor) -> tf.Tensor:
        """The state before a text: an empty window, `[B, X]`."""
        state: Any = self.lm.decoding_cache().initial_state(rows)
        return self._pack(state)

    def read_text(self, tokens: tf.Tensor) -> tf.Tensor:
        """The outputs `[B, T, any]` of whole texts, read window after window."""
        cache = self.lm.decoding_cache()
        return cache.read(tokens, cache.initial_state(tf.shape(tokens)[0]))[0]

    def read(self, tokens: tf.Tensor, state: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """The outputs `[B, T, any]` of a segment, and the state after it."""
        cache: Any = self.lm.decoding_cache()
        hidden, window = cache.read(tokens, self._unpack(state))
        return hidden, self._pack(window)

    read_token = read

    def _unpack(self, state: Any) -> WindowState:
        """The state in the form of the cache. Adds to the graph checks of the tokens and of their number."""
        *keys_and_values, tokens, length = tf.split(state, self.sizes, 1)
        message = "state must be one that this model returned"
        checks = [
            Check(_are_integers(length, self.lm.context_len), message, length),
            Check(_are_integers(tokens, self.lm.network.n_token - 1), message, tokens),
        ]
        pairs = zip(checked(checks, *keys_and_values, tokens, length), self.empty_tensors, strict=True)
        in_shape = [tf.reshape(tf.cast(x, like.dtype), [-1, *like.shape[1:]]) for x, like in pairs]
        *keys_and_values, tokens, length = in_shape
        return WindowState(tuple(keys_and_values[::2]), tuple(keys_and_values[1::2]), tokens, length)

    def _pack(self, state: WindowState) -> tf.Tensor:
        """The inverse of `_unpack`."""
        pairs = zip(self._tensors_of(state), self.sizes, strict=True)
        rows = tf.shape(state.length)[0]
        return tf.concat([tf.reshape(tf.cast(x, tf.float32), [rows, size]) for x, size in pairs], 1)

    def _tensors_of(self, state: WindowState) -> list[Any]:
        """The tensors of a state, in the order that they have in a row: keys and values, tokens, number of tokens."""
        return [*_rings(state), state.tokens, state.length]


def _are_integers(x: tf.Tensor, most: int) -> tf.Tensor:
    """Whether each number of `x` is an integer from 0 to `most`: bool of the shape of `x`."""
    return (x >= 0) & (x <= most) & (x == tf.floor(x))


def _rings(state: RingState | WindowState) -> list[Any]:
    """The keys and values of all layers in one list: keys of layer 0, values of layer 0, keys of layer 1, ..."""
    return [ring for pair in zip(state.keys, state.values, strict=True) for ring in pair]
