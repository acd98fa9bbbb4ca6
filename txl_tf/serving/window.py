"""The signatures of a served vanilla language model: those of Transformer-XL, with a window as their state.

The state is one float32 tensor `[B, X]`: of every row the keys and values of its window, the tokens in it, to be read
again when it is full, and their number. See `txl_tf.models.vanilla.window`.
"""

from __future__ import annotations

import math

import tensorflow as tf

from txl_tf.models.vanilla.window import WindowState
from txl_tf.serving.signatures import ServingSignatures
from txl_tf.serving.text import Check, require_all


class WindowSignatures(ServingSignatures):
    """`ServingSignatures` of a `TransformerLM`."""

    def store_positions(self, weights: str) -> None:
        network, context_len = self.lm.network, self.lm.context_len
        keys = network.mem_len + context_len
        self.rings = [network.n_layer, 2, network.n_head, keys, network.d_head]
        self.memory = [math.prod(self.rings) + context_len + 1]

    def fresh_state(self, rows: tf.Tensor) -> tf.Tensor:
        return self._pack(self.lm.reader().initial_state(rows))

    def read_text(self, tokens: tf.Tensor) -> tf.Tensor:
        reader = self.lm.reader()
        return reader.read(tokens, reader.initial_state(tf.shape(tokens)[0]))[0]

    def _read(self, tokens: tf.Tensor, state: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        hidden, state = self.lm.reader().read(tokens, self._unpack(state))
        return hidden, self._pack(state)

    _read_one = _read

    def _unpack(self, state: tf.Tensor) -> WindowState:
        context_len, n_token = self.lm.context_len, self.lm.network.n_token
        rings, tokens, length = tf.split(state, [math.prod(self.rings), context_len, 1], 1)
        checks = [
            Check((length >= 0) & (length <= context_len), "state must be one that this model returned", length),
            Check((tokens >= 0) & (tokens < n_token), "state must be one that this model returned", tokens),
        ]
        with tf.control_dependencies([require_all(checks)]):
            rings = tf.reshape(tf.cast(rings, self.lm.compute_dtype), [-1, *self.rings])
        keys, values = (tuple(tf.unstack(rings[:, :, i], axis=1)) for i in (0, 1))
        return WindowState(keys, values, tf.cast(tokens, tf.int32), tf.cast(length[:, 0], tf.int32))

    def _pack(self, state: WindowState) -> tf.Tensor:
        rings = tf.stack([tf.stack(both, 1) for both in zip(state.keys, state.values, strict=True)], 1)
        rows = tf.shape(state.length)[0]
        parts = tf.reshape(rings, [rows, math.prod(self.rings)]), state.tokens, state.length[:, None]
        return tf.concat([tf.cast(part, tf.float32) for part in parts], 1)
