"""Inference with cached keys and values: the network's numbers, without projecting its memory again.

The network keeps hidden states as memory, which every layer projects to keys and values for every segment. While the
weights stay as they are, so do the projections:

    weights = precompute(network, max_segment=80)            # kernels and position keys, projected once
    state = initial_state(network, batch, max_segment=80)    # zeros; or state_of(network, mems)
    hidden, state = cached_forward(network, weights, tokens, state)       # == network(tokens, mems)

Keys and values of a layer are rings, see `ring.py`. Zero memories have zero keys and values, as the projections have no
bias.

With a `reset_token`, a token of a document that begins in its segment takes the keys and values before it for zeros;
after the segment, all that are older than a row's last document are overwritten with zeros. A segment of one token
needs no masks: it overwrites them before.

With `static_shapes`, as XLA needs them, all segments have T tokens and K is a multiple of T (`whole_segments`): a
segment goes into the ring as one slice. All rows attend at once; a CPU is faster with one at a time.

Shapes:
    B: batch      T: tgt_len      H: n_head      D: d_head      E: d_model      M: mem_len      K: M + max_segment
"""

import functools
from typing import NamedTuple

import keras
import tensorflow as tf

from txl_tf.transformer_xl.documents import document_starts
from txl_tf.transformer_xl.inference import projected_positions, read, weights_with, zero_keys
from txl_tf.transformer_xl.memory import CachedKeys, NetworkMemory
from txl_tf.transformer_xl.ring import attend_ring, eraser, ring_positions, write, write_slice


class CachedState(NamedTuple):
    """The memory as keys and values: nothing but tensors, so that it goes in and out of any graph."""

    keys: tuple  # of n_layer tensors [B, H, K, D]
    values: tuple  # the same
    position: tf.Tensor  # int32 scalar, the slot that the next token goes to; rows go in step
    count: tf.Tensor | tuple = ()  # int32 [B], how many tokens stand before the next one, if keys are turned by that


def precompute(network, max_segment=1):
    """What inference computes from the weights alone, `n_layer` `LayerWeights`; stale when the weights change."""
    return weights_with(network, position_keys(network, max_segment))


def position_keys(network, max_segment=1):
    """The `position_keys` of all `LayerWeights`: the only ones that take more than a copy of the weights.

    There are none where the positions are not relative.
    """
    tables = projected_positions(network, network.mem_len + max_segment)
    return tuple(ring_positions(r_k, max_segment) for r_k in tables)


def whole_segments(mem_len, tgt_len):
    """The `max_segment` with which a ring holds whole segments of `tgt_len` tokens, as few as reach."""
    return tgt_len + -mem_len % tgt_len


# -------------------------------------------------------------------------------------------------------------- state


def initial_state(network, batch_size, max_segment=1):
    """The state before the first segment: zero memories of full length, which are attended to.

    `batch_size` and `max_segment`, the most tokens of a segment, are ints or int scalar tensors.
    """
    keys, values = (zero_keys(network, batch_size, network.mem_len + max_segment) for _ in "kv")
    count = tf.zeros([batch_size], tf.int32) if network.scheme.turns else ()
    return CachedState(keys, values, tf.constant(0), count)


def state_of(network, mems, max_segment=1):
    """The state that goes on where the uncached `network` would with `mems`, a list of `[B, M, E]`, one a layer."""
    width = network.n_head * network.d_head

    def heads(mem, kernel):
        if mem.shape[1] != network.mem_len:
            raise ValueError(f"mems must hold mem_len={network.mem_len} positions, got {mem.shape[1]}")
        heads = tf.matmul(tf.cast(mem, network.compute_dtype), tf.cast(kernel, network.compute_dtype))
        heads = tf.reshape(heads, [-1, network.mem_len, network.n_head, network.d_head])
        return tf.transpose(heads, [0, 2, 1, 3])

    kernels = [layer.rel_attn.qkv_kernel for layer in network.decoder_layers]
    keys = [heads(mem, kernel[:, width : 2 * width]) for mem, kernel in zip(mems, kernels, strict=True)]
    values = [heads(mem, kernel[:, 2 * width :]) for mem, kernel in zip(mems, kernels, strict=True)]
    if not network.scheme.turns:
        return state_from(keys, values, max_segment)
    keys = [network.scheme.turn(key, tf.range(network.mem_len)) for key in keys]
    return state_from(keys, values, max_segment, tf.fill([keras.ops.shape(mems[0])[0]], network.mem_len))


def memory_of(network, state):
    """`(keys, values)` of a state in the order of time: tuples of `n_layer` tensors `[B, H, M, D]`, oldest first."""

    def in_time(ring):
        max_segment = keras.ops.shape(ring)[2] - network.mem_len
        memory = tf.roll(ring, -state.position, 2)[:, :, max_segment:]
        memory.set_shape([ring.shape[0], network.n_head, network.mem_len, network.d_head])
        return memory

    return tuple(map(in_time, state.keys)), tuple(map(in_time, state.values))


def state_from(keys, values, max_segment=1, count=()):
    """The state whose `memory_of` is `keys` and `values`, with another `max_segment`; and the `count` of the state."""

    def ring(memory):
        return tf.pad(memory, [[0, 0], [0, 0], [0, max_segment], [0, 0]])

    return CachedState(tuple(map(ring, keys)), tuple(map(ring, values)), tf.constant(keys[0].shape[2]), count)


def resized(network, state, max_segment=1):
    """The same state with another `max_segment`."""
    return state_from(*memory_of(network, state), max_segment, state.count)


# ------------------------------------------------------------------------------------------------------------ forward


class RingMemory(NetworkMemory):
    """The memory of a network as rings of keys and values, for one segment.

    Args: as in `cached_forward`.
    """

    def __init__(self, network, weights, tokens, state, lengths=None, in_place=False, static_shapes=False):
        self.state, self.static_shapes = state, static_shapes
        self.tgt_len, self.klen = keras.ops.shape(tokens)[1], keras.ops.shape(state.keys[0])[2]
        _check_segment(self.tgt_len, self.klen - network.mem_len)
        query = tf.range(self.tgt_len)
        self.slots = (state.position + query) % self.klen
        padding = None if lengths is None else self.tgt_len - tf.cast(lengths, tf.int32)[:, None]
        # Padding keys are zero, so a document may begin there.
        starts = None if network.reset_token is None else document_starts(tokens, network.reset_token)
        self.erase_before, self.erase_after = _erasers(network, starts, self.slots, self.klen, in_place)
        self.since = None if starts is None or tokens.shape[1] == 1 else query - starts
        every_slot = tokens.shape[1] == 1 and state.keys[0].shape[2] == network.mem_len + 1
        self.reach = None if every_slot else _reach(network, query, padding, starts)
        self.kept = None if padding is None else (query >= padding)[:, None, :, None]  # [B, 1, T, 1]
        self.put = write_slice if static_shapes else functools.partial(write, in_place=in_place)
        rings = zip(network.decoder_layers, weights, state.keys, state.values, strict=True)
        self.layers = [RingOfLayer(layer, of_layer, self, k, v) for layer, of_layer, k, v in rings]

    def numbers(self):
        """int32 `[B, 1, T]`: how many tokens of the text stand before each token of the segment."""
        return self.state.count[:, None, None] + tf.range(self.tgt_len)

    def finish(self):
        """The `CachedState` after the segment."""
        keys, values = self.keys_and_values()
        count = self.state.count if isinstance(self.state.count, tuple) else self.state.count + self.tgt_len
        return CachedState(keys, values, (self.state.position + self.tgt_len) % self.klen, count)


class RingOfLayer(CachedKeys):
    """The keys and values of one layer in a `RingMemory`."""

    def numbers(self, k):
        """See `Memory`."""
        return self.segment.numbers()

    def attend(self, block, content_q, position_q, k, v):
        """Writes keys and values of the segment into the rings, and attends to those."""
        at = self.segment
        if at.kept is not None:
            kept = tf.cast(at.kept, content_q.dtype)
            k, v = k * kept, v * kept  # the zeros that a shorter row has before it
        keys, values = (
            at.put(at.erase_before(ring), at.slots, new) for ring, new in ((self.keys, k), (self.values, v))
        )
        r, first_slot = self.weights.position_keys, at.slots[0]
        attn_vec = attend_ring(
            block, content_q, position_q, keys, values, r, first_slot, at.reach, at.since, at.static_shapes
        )
        with tf.control_dependencies([attn_vec]):  # which reads what is erased in place
            self.after = at.erase_after(keys), at.erase_after(values)
        return attn_vec


def cached_forward(network, weights, tokens, state, lengths=None, in_place=False, static_shapes=False, model=None):
    """`network(tokens, mems)`, with the memory as a `CachedState`.

    Args:
        network: `TransformerXL`.
        weights: `precompute` of the network, of the state's `max_segment`.
        tokens: int `[B, T]`, T not above `max_segment`.
        state: `CachedState`.
        lengths: int `[B]`, for rows of unequal length: row b is its last `lengths[b]` tokens; what stands to their left
            is ignored. Each row gets the result of its own tokens alone. The memory must be zeros. `None`: all T.
        in_place: write into the tensors of `state`, which must not be used again, instead of a copy of them. XLA, which
            finds out by itself what it may overwrite, has no such operation.
        static_shapes: for XLA: all segments so far had T tokens, and `max_segment` is `whole_segments`.
        model: what is called with the memory; the network unless it is given.

    Returns:
        `(hidden, state)`: `[B, T, E]` and the `CachedState` after the segment.

    Raises:
        NotCacheable: a part of the network needs hidden states as memory.
    """
    memory = RingMemory(network, weights, tokens, state, lengths, in_place, static_shapes)
    return read(model or network, tokens, memory, static_shapes)


def _check_segment(tgt_len, max_segment):
    """An error where a segment is longer than its state allows; both may be tensors."""
    if not isinstance(tgt_len, int) or not isinstance(max_segment, int):
        tf.debugging.assert_less_equal(tgt_len, max_segment, "tokens must not be longer than the state's max_segment")
    elif tgt_len > max_segment:
        raise ValueError(f"tokens must be at most max_segment={max_segment} long, got {tgt_len}")


def _erasers(network, starts, slots, klen, in_place):
    """What is done to every ring before a segment is written into it, and after it was read: functions of the ring."""

    def keep(ring):
        return ring

    if starts is None:
        return keep, keep
    erase = eraser(starts, slots, klen, network.n_head, in_place)
    return (erase, keep) if starts.shape[1] == 1 else (keep, erase)


def _reach(network, query, padding, starts):
    """Distance to the farthest key that a query sees, int `[T]` or `[B, T]`.

    It is that of a segment of the row's length which begins with the query's document.
    """
    if network.same_length:
        return tf.fill([tf.size(query)], network.mem_len)
    reach = network.mem_len + query
    if starts is not None:
        return reach - tf.maximum(starts, 0 if padding is None else padding)
    return reach if padding is None else reach - padding
