"""Cached inference with absolute positions: the vanilla language model sees a window of the text.

A window begins at position 0 and contains at most `context_len` tokens. When it is full and more tokens come, the model
reads its last `context_len // 2` tokens again, as the first tokens of a new window. The cached keys cannot be used
again, because their positions change. With a `context_len` of 4:

    tokens              a b c d     the window is full
    next token e        c d e       c and d are read again, at the positions 0 and 1
    next token f        c d e f     full again

So most tokens cost the computation of one position. Once in `context_len - context_len // 2` tokens,
`context_len // 2` more positions are computed. The results for a window are those of `lm.log_probs` for its tokens,
without `mems`.

Each row of a batch has its own window, so windows may have different lengths.

Shapes:
    B: batch      T: tgt_len      H: n_head      D: d_head      E: d_model      W: context_len      K: mem_len + W
"""

from typing import Any, NamedTuple

import tensorflow as tf

from txl_tf.equations import Block, OrderedKeyPositions, visible_keys
from txl_tf.kernels.attending import RowsFirst
from txl_tf.kernels.shapes import Tensor, shape_of
from txl_tf.language.loop import where_rows
from txl_tf.transformer_xl.decoding_cache import DecodingCache
from txl_tf.transformer_xl.inference import (
    call_with_cache,
    has_many_single_queries,
    initial_keys_and_values,
    layer_weights,
    row_by_row,
    writable_copy,
)
from txl_tf.transformer_xl.memory import CachedKeys, NetworkMemory
from txl_tf.transformer_xl.ring import write


class WindowState(NamedTuple):
    """The window as keys and values. It contains only tensors, so it can be an argument and a result of any graph."""

    keys: tuple  # n_layer tensors [B, H, K, D]: mem_len zeros, which are the empty memory, then the window
    values: tuple  # in the same shapes
    tokens: Tensor  # int32 [B, W], the tokens of the window, of which some are read again in the next window
    length: Tensor  # int32 [B], the number of tokens in the window


class WindowWeights(NamedTuple):
    """The values that inference computes only from the weights. They are outdated when the weights change."""

    layers: tuple  # n_layer LayerWeights
    positions: Tensor | None  # [W, E], such as sinusoids; `None` if nothing is added to embeddings


def window_start(length: Tensor, context_len: int) -> Tensor:
    """The position where the window begins after `length` tokens, both int32 `[...]`."""
    # While all tokens fit, it is 0. Afterwards, the start moves by `step` each time that a full window needs room.
    step = context_len - context_len // 2
    overflow = tf.maximum(length - context_len, 0)
    n_steps = (overflow + step - 1) // step  # rounded up
    return step * n_steps


class WindowCache(DecodingCache):
    """The decoding cache of a network with absolute positions: keys and values of a window."""

    def precompute(self) -> Any:
        """The values that depend only on the weights, as `WindowWeights`."""
        network = self.network
        dtype = network.compute_dtype
        layers = tuple(layer_weights(layer, dtype) for layer in network.decoder_layers)
        if not network.scheme.overrides("enter"):  # then the scheme has no table that it adds to the embeddings
            return WindowWeights(layers, None)
        return WindowWeights(layers, tf.cast(network.position_table(self.context_len)[0], dtype))

    def initial_state(self, batch_size: int) -> WindowState:
        """The state before a text."""
        klen = self.network.mem_len + self.context_len
        keys, values = initial_keys_and_values(self.network, batch_size, klen)
        tokens = tf.zeros([batch_size, self.context_len], tf.int32)
        return WindowState(keys, values, tokens, tf.zeros([batch_size], tf.int32))

    def read_prompt(self, prompt: Tensor, lengths: Tensor, segment: None = None) -> tuple[Tensor, WindowState]:
        """Reads the last window of each prompt. Arguments and results: see `RingCache.read_prompt`.

        `segment` is always `None`: `generate` refuses another value for a model with windows.
        """
        batch, n = shape_of(prompt)
        start = window_start(lengths, self.context_len)
        columns = tf.minimum(start[:, None] + tf.range(tf.minimum(n, self.context_len)), n - 1)
        # A shorter row ends with padding, which it does not see. Its next tokens replace the padding.
        hidden, state = self.forward(
            self.precompute(), tf.gather(prompt, columns, batch_dims=1), self.initial_state(batch)
        )
        length = lengths - start
        state = state._replace(length=length)
        return tf.gather(hidden, length - 1, batch_dims=1), state if self.static_shapes else writable_copy(state)

    def read(self, tokens: Tensor, state: Any) -> tuple[Tensor, WindowState]:
        """Reads `tokens`, int32 `[B, n]`, window after window. Returns `(hidden, state)`, with hidden `[B, n, E]`."""
        weights = self.precompute()
        batch, n = shape_of(tokens)

        def read_piece(done, hidden, state):
            """Reads as many tokens as fit into every window."""
            state = self.with_room(weights, state)
            end = tf.minimum(n, done + self.context_len - tf.reduce_max(state.length))
            new_hidden, state = self.forward(weights, tokens[:, done:end], state)
            return end, tf.concat([hidden, new_hidden], 1), state

        nothing = self.lm.no_outputs(batch)
        shapes = tf.TensorShape([]), tf.TensorShape([tokens.shape[0], None, nothing.shape[2]])
        _, hidden, state = tf.while_loop(
            lambda done, *_: done < n,
            read_piece,
            (0, nothing, state),
            shape_invariants=(*shapes, tf.nest.map_structure(lambda tensor: tensor.shape, state)),
            parallel_iterations=1,
        )
        return hidden, writable_copy(state)

    def read_token(self, weights: Any, token: Tensor, state: Any) -> tuple[Tensor, WindowState]:
        """Reads one token for each row. Arguments and results: see `RingCache.read_token`."""
        state = self.with_room(weights, state)
        hidden, state = self.forward(weights, token[:, None], state, in_place=not self.static_shapes)
        return hidden[:, 0], state

    def with_room(self, weights: Any, state: Any) -> WindowState:
        """In every row whose window is full, starts a new window with the last half of the old one."""
        full = state.length == self.context_len

        def move_on():
            """Reads the last half of every window as the beginning of a new window, and uses it only in full rows."""
            last_half = state.tokens[:, self.context_len - self.context_len // 2 :]
            _, moved = self.forward(weights, last_half, self.initial_state(shape_of(last_half)[0]))
            return where_rows(full, moved, state)

        return tf.cond(tf.reduce_any(full), move_on, lambda: state)

    def forward(self, weights: Any, tokens: Tensor, state: Any, in_place: bool = False) -> tuple[Tensor, WindowState]:
        """Reads tokens that fit into every window.

        Args:
            weights: `WindowWeights`.
            tokens: int32 `[B, T]`. The sum of T and the longest window must not exceed `context_len`.
            state: `WindowState`.
            in_place: whether to overwrite the keys and values of `state`, which must not be used again.

        Returns:
            `(hidden, state)`: `[B, T, E]` and the state after the tokens.
        """
        memory = WindowMemory(self.network, weights, tokens, state, in_place, self.static_shapes)
        return call_with_cache(self.lm.outputs, tokens, memory, self.static_shapes)


class WindowMemory(NetworkMemory):
    """The memory of a network for one segment: the keys and values of a window.

    Args: those of `WindowCache.forward`, and
        network, static_shapes: see `WindowCache`.
    """

    def __init__(
        self, network: Any, weights: Any, tokens: Tensor, state: Any, in_place: bool, static_shapes: bool
    ) -> None:
        self.weights = weights
        self.tokens = tokens
        self.state = state
        self.in_place = in_place
        self.static_shapes = static_shapes
        self.window_positions = state.length[:, None] + tf.range(shape_of(tokens)[1])  # [B, T]
        self.slots = network.mem_len + self.window_positions  # [B, T], their indices among the keys
        key = tf.range(shape_of(state.keys[0])[2])
        self.visible = visible_keys(self.slots, key, network.mem_len, network.same_length)  # [B, T, K]
        self.slots_of_heads = tf.repeat(self.slots, network.n_head, 0)
        parts = zip(network.decoder_layers, weights.layers, state.keys, state.values, strict=True)
        self.layers = [WindowOfLayer(layer, layer_weights, self, k, v) for layer, layer_weights, k, v in parts]

    def added(self) -> Tensor | None:
        """The rows to add to the embeddings of the tokens: `[B, T, E]`, or `None`."""
        table = self.weights.positions
        return None if table is None else tf.gather(table, self.window_positions)

    def finish(self) -> WindowState:
        """The `WindowState` after the segment."""
        keys, values = self.keys_and_values()
        row = tf.broadcast_to(tf.range(shape_of(self.tokens)[0])[:, None], tf.shape(self.window_positions))
        indices = tf.stack([row, self.window_positions], -1)
        seen = tf.tensor_scatter_nd_update(self.state.tokens, indices, self.tokens)
        return WindowState(keys, values, seen, self.state.length + shape_of(self.tokens)[1])


class WindowOfLayer(CachedKeys):
    """The keys and values of one layer in a `WindowMemory`."""

    def token_positions(self, k: Tensor) -> Tensor:
        """How many tokens of the window precede each of the segment's keys `k`: int32 `[B, 1, T]`."""
        return self.network_memory.window_positions[:, None]

    def attend(self, block: Block, content_q: Any, position_q: Any, k: Tensor, v: Tensor) -> Any:
        """Writes keys and values of the segment into the window, and attends to the window."""
        memory = self.network_memory
        keys, values = (
            write(old, memory.slots_of_heads, new, memory.in_place) for old, new in ((self.keys, k), (self.values, v))
        )
        self.keys_and_values_after = keys, values
        klen = shape_of(keys)[2]
        # `query_indices` holds the indices of one row. The windows of rows differ in length, so a scheme that scores
        # positions computes row by row.
        if not self.layer.rel_attn.scheme.scores_positions:
            key_positions = OrderedKeyPositions(klen=klen, visible=memory.visible[:, None])
            if memory.static_shapes:
                # Rows come before heads, unlike in `Block`. Without scores by position, `attend` computes every head of
                # every row in the same way, so the order of these two axes does not matter.
                return block(content_q, position_q, keys, values, key_positions)
            if has_many_single_queries(content_q):
                return block(RowsFirst(content_q), position_q, RowsFirst(keys), RowsFirst(values), key_positions)

        def attend_row(b):
            key_positions = OrderedKeyPositions(klen=klen, visible=memory.visible[b], query_indices=memory.slots[b])
            return block(content_q[b], position_q[b], keys[b], values[b], key_positions)

        return row_by_row(attend_row, content_q)


class RereadWindow(DecodingCache):
    """Replaces `WindowCache` for a model whose keys and values cannot be cached.

    It reads the whole window again for every token.
    """

    def initial_state(self, batch_size: int) -> WindowState:
        """The state before a text."""
        tokens = tf.zeros([batch_size, self.context_len], tf.int32)
        return WindowState((), (), tokens, tf.zeros([batch_size], tf.int32))

    def read_prompt(self, prompt: Tensor, lengths: Tensor, segment: None = None) -> tuple[Tensor, WindowState]:
        """Reads the last window of each prompt. Arguments and results: see `RingCache.read_prompt`.

        `segment` is always `None`: `generate` refuses another value for a model with windows.
        """
        start = window_start(lengths, self.context_len)
        positions = tf.range(self.context_len)
        columns = tf.minimum(start[:, None] + positions, shape_of(prompt)[1] - 1)
        length = lengths - start
        tokens = tf.where(positions < length[:, None], tf.gather(prompt, columns, batch_dims=1), 0)
        state = WindowState((), (), tokens, length)
        return self._last(state), state

    def read(self, tokens: Tensor, state: Any) -> tuple[Tensor, WindowState]:
        """Reads `tokens`, int32 `[B, n]`, one by one. Returns `(outputs, state)`, with outputs `[B, n, any]`."""
        batch = shape_of(tokens)[0]
        nothing = self.lm.no_outputs(batch)
        before = tf.zeros([batch, nothing.shape[2]], nothing.dtype), state

        def read_one(last, token):
            output, state = self.read_token((), token, last[1])
            return tf.ensure_shape(output, last[0].shape), state

        outputs, states = tf.scan(read_one, tf.transpose(tokens), before, parallel_iterations=1)
        return tf.transpose(outputs, [1, 0, 2]), tf.nest.map_structure(lambda x: x[-1], states)

    def read_token(self, weights: Any, token: Tensor, state: Any) -> tuple[Tensor, WindowState]:
        """Reads one token for each row. Arguments and results: see `RingCache.read_token`."""
        half = self.context_len // 2
        positions = tf.range(self.context_len)
        full = state.length == self.context_len
        moved = tf.pad(state.tokens[:, self.context_len - half :], [[0, 0], [0, self.context_len - half]])
        length = tf.where(full, half, state.length)
        tokens = tf.where(full[:, None], moved, state.tokens)
        tokens = tf.where(positions == length[:, None], token[:, None], tokens)
        state = WindowState((), (), tokens, length + 1)
        return self._last(state), state

    def _last(self, state: Any) -> Tensor:
        """The model's output for the last token of every window: `[B, any]`."""
        outputs, _ = self.lm.outputs(state.tokens, self.lm.first_mems(shape_of(state.tokens)[0]))
        return tf.gather(outputs, state.length - 1, batch_dims=1)
