"""Inference with cached keys and values: the results of the network, without projecting its memory again.

The memory of a network is hidden states. In every segment, every layer projects them to keys and values. While the
weights do not change, the keys and values do not change either, so inference computes them once:

    weights = precompute(network, max_segment=80)            # kernels and position keys, projected once
    state = initial_state(network, batch, max_segment=80)    # zeros
    hidden, state = cached_forward(network, weights, tokens, state)       # == network(tokens, mems)

The keys and values of a layer are in rings, see `ring.py`. Zero memories have zero keys and values, because the
projections have no bias. With `pre_lnorm`, the rings contain differences to those of a zero memory, see `Zeros` of the
equations.

With a `reset_token`, a document may begin in a segment. For its tokens, the keys and values before the document count
as zeros. After the segment, everything older than a row's last document is overwritten with zeros. If a segment is one
token that begins a document, the keys and values before it are overwritten before it attends, so it needs no mask.

With `static_shapes`, for XLA, all segments have T tokens, and K is a multiple of T (`whole_segments`). So a segment is
written to the ring as one slice. All rows of the batch attend at once. Without `static_shapes`, one row attends after
the other, which is faster on a CPU; if each of many rows has a single query, they attend at once, too.

Shapes:
    B: batch      T: tgt_len      H: n_head      D: d_head      E: d_model      M: mem_len      K: M + max_segment
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from txl_tf.equations import Block
from txl_tf.errors import ParameterError
from txl_tf.kernels.shapes import Size, Tensor, shape_of
from txl_tf.transformer_xl.documents import document_starts, last_start
from txl_tf.transformer_xl.inference import (
    call_with_cache,
    initial_keys_and_values,
    projected_positions,
    weights_of_layers,
)
from txl_tf.transformer_xl.memory import CachedKeys, NetworkMemory
from txl_tf.transformer_xl.ring import View, attend_ring, eraser, ring_positions, write, write_slice


class RingState(NamedTuple):
    """The memory as keys and values. It contains only tensors, so it can be an argument and a result of any graph."""

    keys: tuple[Tensor, ...]  # n_layer tensors [B, H, K, D]
    values: tuple[Tensor, ...]  # the same
    position: Tensor  # int32 scalar, the slot of the next token, the same for all rows
    # int32 [B], how many tokens precede the next one. Unless the scheme turns keys, it is empty, not `None`: `tf.nest`
    # takes `None` for a leaf, so a state would not contain only tensors.
    count: Tensor = ()


def precompute(network: Any, max_segment: Size = 1) -> Any:
    """The `LayerWeights` of all layers, for states with this `max_segment`.

    They depend only on the weights: compute them again when the weights change.
    """
    return weights_of_layers(network, position_keys(network, max_segment))


def position_keys(network: Any, max_segment: Size = 1) -> tuple[Any, ...]:
    """The `position_keys` of all `LayerWeights`, see `projected_positions`; empty if the scheme needs none."""
    tables = projected_positions(network, network.mem_len + max_segment)
    return tuple(ring_positions(r_k, max_segment) for r_k in tables)


def whole_segments(mem_len: int, tgt_len: Size) -> Any:
    """The smallest `max_segment` of `tgt_len` or more with which the size of a ring is a multiple of `tgt_len`."""
    return tgt_len + -mem_len % tgt_len


# -------------------------------------------------------------------------------------------------------------- state


def initial_state(network: Any, batch_size: Size, max_segment: Size = 1, first_slot: int = 0) -> RingState:
    """The state before the first segment: zero memories of full length, to which queries attend.

    Args:
        network: `TransformerXL`.
        batch_size: int or int scalar tensor.
        max_segment: int or int scalar tensor, the maximum number of tokens in a segment.
        first_slot: the slot of the first token. With `mem_len`, a segment of `max_segment` tokens follows the memory
            without going round the ring, so the blocks of `attend_ring` take fewer slots.
    """
    keys, values = initial_keys_and_values(network, batch_size, network.mem_len + max_segment)
    count = tf.zeros([batch_size], tf.int32) if network.scheme.turns else ()
    return RingState(keys, values, tf.constant(first_slot), count)


def memory_of(network: Any, state: RingState) -> tuple[Any, Any]:
    """`(keys, values)` of a state in the order of time: tuples of `n_layer` tensors `[B, H, M, D]`, oldest first."""

    state = aligned(state)

    def oldest_first(ring: Tensor) -> Any:
        """The memory in an aligned ring. It follows the slots for the next segment."""
        memory: Any = ring[:, :, shape_of(ring)[2] - network.mem_len :]
        memory.set_shape([ring.shape[0], network.n_head, network.mem_len, network.d_head])
        return memory

    return tuple(map(oldest_first, state.keys)), tuple(map(oldest_first, state.values))


def state_from(keys: Sequence[Tensor], values: Sequence[Tensor], max_segment: Size = 1, count: Any = ()) -> RingState:
    """The state with this `max_segment` and this `count`, in which `memory_of` finds `keys` and `values`."""

    def ring(memory: Tensor) -> Any:
        """A ring with the memory in its first slots, and room for a segment after it."""
        return tf.pad(memory, [[0, 0], [0, 0], [0, max_segment], [0, 0]])

    return RingState(tuple(map(ring, keys)), tuple(map(ring, values)), tf.constant(keys[0].shape[2]), count)


def resized(network: Any, state: RingState, max_segment: Size = 1) -> RingState:
    """The same state with another `max_segment`."""
    return state_from(*memory_of(network, state), max_segment, state.count)


def aligned(state: RingState) -> RingState:
    """The same state with its rings rolled so that the next token goes to slot 0, as in other aligned states."""

    def rolled(rings: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(tf.roll(ring, -state.position, 2) for ring in rings)

    return state._replace(keys=rolled(state.keys), values=rolled(state.values), position=tf.zeros_like(state.position))


# ------------------------------------------------------------------------------------------------------------ forward


class RingMemory(NetworkMemory):
    """The memory of a network as rings of keys and values, for one segment.

    Args: as in `cached_forward`.

    Attributes:
        slots: int32 `[T]`, the slots of the segment's tokens.
        view: the slots that the segment's queries see.
        is_token: bool `[B, 1, T, 1]`, false at the padding to the left of a row; `None` without `lengths`.
        put: writes the keys or values of the segment into a ring, see `write`.
        erase_before, erase_after: see `_erasers`.
    """

    def __init__(
        self, network: Any, weights: Any, tokens: Tensor, state: RingState, lengths: Tensor | None = None,
        in_place: bool = False, static_shapes: bool = False, done: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.state = state
        self.static_shapes = static_shapes
        self.tgt_len = shape_of(tokens)[1]
        self.klen = shape_of(state.keys[0])[2]
        _check_segment(self.tgt_len, self.klen - network.mem_len)
        query: Any = tf.range(self.tgt_len)
        self.slots = (state.position + query) % self.klen
        padding: Any = None
        if lengths is not None:
            n_tokens: Any = tf.cast(lengths, tf.int32)
            padding = self.tgt_len - n_tokens[:, None]  # [B, 1], how many zeros stand to the left of each row
        # Padding keys are zeros, so a document boundary in the padding has no effect.
        starts: Any = None
        # `done` is not checked: only absolute positions refuse it, and their networks have no ring.
        if network.reset_token is not None or done is not None:
            starts = document_starts(tokens, network.reset_token, done=done)
        self.erase_before, self.erase_after = _erasers(network, starts, done, self.slots, self.klen, in_place)
        zero_beyond = None if starts is None or tokens.shape[1] == 1 else query - starts
        # The slots are M tokens of the memory and the query itself, so the query needs no mask.
        sees_every_slot = tokens.shape[1] == 1 and state.keys[0].shape[2] == network.mem_len + 1
        max_distance = None if sees_every_slot else _max_distance(network, query, padding, starts)
        self.view = View(self.slots[0], max_distance, zero_beyond)
        self.is_token = None if padding is None else (query >= padding)[:, None, :, None]  # [B, 1, T, 1]
        self.put = write_slice if static_shapes else functools.partial(write, in_place=in_place)
        rings = zip(network.decoder_layers, weights, state.keys, state.values, strict=True)
        self.layers = [RingOfLayer(layer, layer_weights, self, k, v) for layer, layer_weights, k, v in rings]

    def finish(self) -> RingState:
        """The `RingState` after the segment."""
        keys, values = self.keys_and_values()
        count = tf.nest.map_structure(lambda n: n + self.tgt_len, self.state.count)  # `()` stays `()`
        return RingState(keys, values, (self.state.position + self.tgt_len) % self.klen, count)


class RingOfLayer(CachedKeys):
    """The keys and values of one layer in a `RingMemory`."""

    def token_positions(self, k: Tensor) -> Any:
        """How many tokens of the text precede each of the segment's keys `k`: int32 `[B, 1, T]`."""
        return self.network_memory.state.count[:, None, None] + tf.range(shape_of(k)[2])

    def attend(self, block: Block, content_q: Tensor, position_q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Writes keys and values of the segment to the rings, and attends to the rings by `block`, see `attend_ring`.

        Erases documents that have ended from the rings, see `_erasers`: some before it writes, others after it attends.
        """
        memory = self.network_memory
        if memory.is_token is not None:  # the padding to the left of a shorter row becomes zeros
            is_token: Any = tf.cast(memory.is_token, content_q.dtype)
            k = k * is_token
            v = v * is_token
        keys = memory.put(memory.erase_before(self.keys), memory.slots, k)
        values = memory.put(memory.erase_before(self.values), memory.slots, v)
        attn_vec = attend_ring(
            block, content_q, position_q, keys, values, self.weights.position_keys, memory.view,
            memory.static_shapes,
        )  # fmt: skip
        with tf.control_dependencies([attn_vec]):  # attention must read the rings before they are erased in place
            self.keys_and_values_after = memory.erase_after(keys), memory.erase_after(values)
        return attn_vec


def cached_forward(
    network: Any, weights: Any, tokens: Tensor, state: RingState, lengths: Tensor | None = None,
    in_place: bool = False, static_shapes: bool = False, call: Any = None, done: Tensor | None = None,
) -> tuple[Any, RingState]:  # fmt: skip
    """`network(tokens, mems)`, with the memory as a `RingState`.

    Args:
        network: `TransformerXL`.
        weights: `precompute` of the network, with the `max_segment` of the state.
        tokens: int `[B, T]`, T at most `max_segment`.
        state: the memory.
        lengths: int `[B]`, for rows of unequal length: row b consists of its last `lengths[b]` tokens. The tokens to
            their left are ignored. Each row gets the result that its own tokens alone would get. The memory of a row
            with fewer than T tokens must be zeros. `None`: all rows have T tokens.
        in_place: whether to write into the tensors of `state`, instead of into a copy. They must not be used again. XLA
            has no such operation: it finds out itself which tensors it may overwrite.
        static_shapes: for XLA. All segments so far must have had T tokens, and `max_segment` must be `whole_segments`.
        call: function of tokens and memory that runs the network; by default the network itself.
        done: bool `[B, T]`, true at the last token of a document, or `None`.

    Returns:
        `(hidden, state)`: `[B, T, E]` and the `RingState` after the segment.

    Raises:
        NotCacheable: a part of the network needs hidden states as memory. It may also raise another error, if it
            computes with the memory as if it were tensors.
    """
    memory = RingMemory(network, weights, tokens, state, lengths, in_place, static_shapes, done)
    return call_with_cache(call or network, tokens, memory, static_shapes)


def _check_segment(tgt_len: Size, max_segment: Size) -> None:
    """Raises ParameterError if a segment is longer than its state allows.

    If one of the two lengths is a tensor, the error comes when the graph runs: InvalidArgumentError.
    """
    if not isinstance(tgt_len, int) or not isinstance(max_segment, int):
        tf.debugging.assert_less_equal(tgt_len, max_segment, "tokens must not be longer than the state's max_segment")
    elif tgt_len > max_segment:
        allowed = f"at most max_segment={max_segment} long"
        raise ParameterError("tokens", tgt_len, allowed)


def _erasers(
    network: Any, starts: Tensor | None, done: Tensor | None, slots: Tensor, klen: Size, in_place: bool
) -> tuple[Any, Any]:
    """`(before, after)`: two functions that take a ring, and return it without the documents that have ended.

    `before` is called before a segment is written, `after` after attention has read the ring. A function that has
    nothing to erase returns the ring unchanged.

    Args:
        network: `TransformerXL`.
        starts: int32 `[B, T]`, see `document_starts`; `None` without documents.
        done: see `cached_forward`.
        slots, klen, in_place: see `eraser`.
    """

    def keep(ring: Tensor) -> Tensor:
        return ring

    if starts is None:
        return keep, keep
    # If the segment has one token, the earlier documents can be erased before it attends. In a longer segment, the
    # tokens before the start of a document must still see them.
    before = after = keep
    if starts.shape[1] == 1 and network.reset_token is not None:
        before = eraser(starts, slots, klen, network.n_head, in_place)
    if starts.shape[1] != 1 or done is not None:
        after = eraser(last_start(starts, done), slots, klen, network.n_head, in_place)
    return before, after


def _max_distance(network: Any, query: Tensor, padding: Tensor | None, starts: Tensor | None) -> Any:
    """The distance of the farthest key that a query sees, int `[T]` or `[B, T]`.

    With `same_length`, it is `mem_len`. Otherwise it is `mem_len` plus the index of the query. The index counts from
    the first token of the segment that is not padding, or from the start of the query's document if that is later.
    Keys before the document are seen as zeros.
    """
    if network.same_length:
        return tf.fill([tf.size(query)], network.mem_len)
    distance = network.mem_len + query
    if starts is not None:
        return distance - tf.maximum(starts, 0 if padding is None else padding)
    return distance if padding is None else distance - padding
