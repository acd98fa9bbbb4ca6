"""Inference with cached keys and values: the network's numbers, without projecting its memory again.

The network keeps hidden states as memory, which every layer projects to keys and values for every segment. While the
weights stay as they are, so do the projections:

    fixed = fix_weights(network, room=80)            # kernels and position keys, projected once
    state = initial_state(network, batch, room=80)   # zeros; or state_of(network, mems)
    hidden, state = cached_forward(network, fixed, tokens, state)       # == network(tokens, mems)

The keys and values of a layer are a ring `[B, H, K, D]` of K = mem_len + room slots. A segment of up to `room` tokens
is written over the oldest slots, then attended to together with the memory, slot by slot as it lies there. What has to
move is the position keys: they repeat with period K, so that a rotated table of them is a slice of a longer one. Zero
memories have zero keys and values, as the projections have no bias.

Shapes:
    B: batch      T: tgt_len      H: n_head      D: d_head      E: d_model      M: mem_len      K: M + room, the slots
"""

import functools
from typing import NamedTuple

import keras
import tensorflow as tf

from txl_tf.positions import inverse_frequencies, positional_embedding, relative_positions

# Queries that attend at a time: bounds the memory that a long prompt takes, and changes no result.
QUERY_BLOCK = 256
# Rows of a batch whose attention is written out one by one. More of them, or an unknown number, go through a loop.
MAX_UNROLLED_ROWS = 16


class CachedState(NamedTuple):
    """The memory as keys and values: nothing but tensors, so that it goes in and out of any graph.

    Attributes:
        keys, values: tuples of `n_layer` tensors `[B, H, K, D]`.
        position: int32 scalar, the slot that the next token goes to. Rows go in step.
    """

    keys: tuple
    values: tuple
    position: tf.Tensor


class LayerWeights(NamedTuple):
    """Weights of a layer in the type they are used in.

    Attributes:
        qkv: `[E, 3 * H * D]`, the queries' part times `D**-0.5`.
        o, ff_1, ff_bias_1, ff_2, ff_bias_2: as in the layer.
        r_w_bias, r_r_bias: `[H, D]`, u and v times `D**-0.5`.
        position_keys: `[H, 2 * K + room, D]`; row x is that of distance `(K - 1 - x) mod K`.
    """

    qkv: tf.Tensor
    o: tf.Tensor
    ff_1: tf.Tensor
    ff_bias_1: tf.Tensor
    ff_2: tf.Tensor
    ff_bias_2: tf.Tensor
    r_w_bias: tf.Tensor
    r_r_bias: tf.Tensor
    position_keys: tf.Tensor


def fix_weights(network, room=1):
    """What inference computes from the weights alone, to be computed again when they have changed.

    Args:
        network: `TransformerXL`.
        room: most tokens of a segment, as in `initial_state`.

    Returns:
        tuple of `n_layer` `LayerWeights`.
    """
    klen = network.mem_len + room
    pos_seq = relative_positions(klen, network.clamp_len)
    pos_emb = positional_embedding(pos_seq, inverse_frequencies(network.d_model))[0]
    scale = network.d_head**-0.5
    dtype = network.compute_dtype

    def layer_weights(i, layer):
        attn = layer.rel_attn
        width = network.n_head * network.d_head
        q_kernel, kv_kernel = tf.split(tf.convert_to_tensor(attn.qkv_kernel), [width, 2 * width], 1)
        r_k = tf.matmul(tf.cast(pos_emb, dtype), tf.cast(attn.r_kernel, dtype))
        r_k = tf.transpose(tf.reshape(r_k, [klen, network.n_head, network.d_head]), [1, 0, 2])
        biases = (bias[i] if network.untie_r else bias for bias in (network.r_w_bias, network.r_r_bias))
        r_w_bias, r_r_bias = (tf.cast(bias * scale, dtype) for bias in biases)
        return LayerWeights(
            qkv=tf.cast(tf.concat([q_kernel * scale, kv_kernel], 1), dtype),
            o=tf.cast(attn.o_kernel, dtype),
            ff_1=tf.cast(layer.ff.layer_1.kernel, dtype),
            ff_bias_1=tf.cast(layer.ff.layer_1.bias, dtype),
            ff_2=tf.cast(layer.ff.layer_2.kernel, dtype),
            ff_bias_2=tf.cast(layer.ff.layer_2.bias, dtype),
            r_w_bias=r_w_bias,
            r_r_bias=r_r_bias,
            position_keys=tf.concat([r_k, r_k, r_k[:, :room]], 1),
        )

    return tuple(layer_weights(i, layer) for i, layer in enumerate(network.decoder_layers))


def initial_state(network, batch_size, room=1):
    """The state before the first segment: zero memories of full length, which are attended to.

    Args:
        network: `TransformerXL`.
        batch_size: int or int scalar tensor.
        room: most tokens of a segment; 1 for generation.

    Returns:
        `CachedState`.
    """
    shape = [batch_size, network.n_head, network.mem_len + room, network.d_head]
    rings = [tuple(tf.zeros(shape, network.compute_dtype) for _ in range(network.n_layer)) for _ in "kv"]
    return CachedState(*rings, position=tf.constant(0))


def state_of(network, mems, room=1):
    """The state that goes on where the uncached `network` would with `mems`.

    Args:
        network: `TransformerXL`.
        mems: list of `n_layer` tensors `[B, M, E]`, as the network returns.
        room: most tokens of a segment.

    Returns:
        `CachedState`.

    Raises:
        ValueError: a memory is shorter or longer than `mem_len`.
    """
    width = network.n_head * network.d_head

    def ring(mem, kernel):
        if mem.shape[1] != network.mem_len:
            raise ValueError(f"mems must hold mem_len={network.mem_len} positions, got {mem.shape[1]}")
        heads = tf.matmul(tf.cast(mem, network.compute_dtype), tf.cast(kernel, network.compute_dtype))
        heads = tf.reshape(heads, [-1, network.mem_len, network.n_head, network.d_head])
        return tf.pad(tf.transpose(heads, [0, 2, 1, 3]), [[0, 0], [0, 0], [0, room], [0, 0]])

    kernels = [layer.rel_attn.qkv_kernel for layer in network.decoder_layers]
    keys = tuple(ring(mem, kernel[:, width : 2 * width]) for mem, kernel in zip(mems, kernels, strict=True))
    values = tuple(ring(mem, kernel[:, 2 * width :]) for mem, kernel in zip(mems, kernels, strict=True))
    return CachedState(keys, values, tf.constant(network.mem_len))


def memory_of(network, state):
    """The memory in the order of time: what a state is, whatever its room and position.

    Returns:
        `(keys, values)`: tuples of `n_layer` tensors `[B, H, M, D]`, oldest first.
    """

    def in_time(ring):
        room = keras.ops.shape(ring)[2] - network.mem_len
        memory = tf.roll(ring, -state.position, 2)[:, :, room:]
        memory.set_shape([ring.shape[0], network.n_head, network.mem_len, network.d_head])
        return memory

    return tuple(map(in_time, state.keys)), tuple(map(in_time, state.values))


def state_from(keys, values, room=1):
    """The state whose `memory_of` is `keys` and `values`, with another room."""

    def ring(memory):
        return tf.pad(memory, [[0, 0], [0, 0], [0, room], [0, 0]])

    return CachedState(tuple(map(ring, keys)), tuple(map(ring, values)), tf.constant(keys[0].shape[2]))


def owned(state):
    """A copy that nothing else refers to, not even a constant of the graph: what `in_place` may write into."""
    return tf.nest.map_structure(lambda tensor: tf.raw_ops.DeepCopy(x=tensor), state)


def cached_forward(network, fixed, tokens, state, lengths=None, in_place=False):
    """`network(tokens, mems)`, with the memory as a `CachedState`.

    Args:
        network: `TransformerXL`; its embedding, biases and layer norms are used, and its settings.
        fixed: `fix_weights` of the network, of the state's room.
        tokens: int `[B, T]`, T not above the room.
        state: `CachedState`.
        lengths: int `[B]`, for rows of unequal length: row b is its last `lengths[b]` tokens, and what is to their left
            is no part of it. It gives what it gives alone, given that the memory before it is zeros. `None`: all T.
        in_place: write into the tensors of `state`, which must not be used again, instead of a copy of them.

    Returns:
        `(hidden, state)`: `[B, T, E]` and the `CachedState` after the segment.
    """
    batch, tgt_len = keras.ops.shape(tokens)
    klen = keras.ops.shape(state.keys[0])[2]
    room = klen - network.mem_len
    if isinstance(tgt_len, int) and isinstance(room, int):  # known before the graph runs
        if tgt_len > room:
            raise ValueError(f"tokens must be at most room={room} long, got {tgt_len}")
    else:
        tf.debugging.assert_less_equal(tgt_len, room, "tokens must not be longer than the state's room")

    query = tf.range(tgt_len)
    padding = None if lengths is None else tgt_len - tf.cast(lengths, tf.int32)[:, None]
    # How far back a query sees, [T] or [B, T]: as far as in a segment that begins where the row does.
    reach = tf.fill([tgt_len], network.mem_len) if network.same_length else network.mem_len + query
    if padding is not None and not network.same_length:
        reach -= padding
    if tokens.shape[1] == 1 and state.keys[0].shape[2] == network.mem_len + 1:
        reach = None  # every slot is seen

    # Rows of a matrix from here on: a product of rank 3 with a kernel is one for every row of the batch.
    output = tf.reshape(network.embedding(tokens), [-1, network.d_model])
    slots = (state.position + query) % klen
    new_keys, new_values = [], []
    for layer, weights, keys, values in zip(network.decoder_layers, fixed, state.keys, state.values, strict=True):
        qkv = tf.reshape(tf.matmul(output, weights.qkv), [batch, tgt_len, 3, network.n_head, network.d_head])
        q, k, v = tf.unstack(tf.transpose(qkv, [2, 0, 3, 1, 4]))  # [B, H, T, D] each
        if padding is not None:
            kept = tf.cast(query >= padding, q.dtype)[:, None, :, None]  # [B, 1, T, 1]
            k, v = k * kept, v * kept  # the zeros that a shorter row has before it
        keys, values = _write(keys, slots, k, in_place), _write(values, slots, v, in_place)
        new_keys.append(keys)
        new_values.append(values)
        attn_vec = tf.transpose(_attend(q, keys, values, weights, slots[0], reach), [0, 2, 1, 3])
        attn_vec = tf.reshape(attn_vec, [-1, network.n_head * network.d_head])
        output = layer.rel_attn.layer_norm(output + tf.matmul(attn_vec, weights.o))
        inner = tf.nn.relu(tf.nn.bias_add(tf.matmul(output, weights.ff_1), weights.ff_bias_1))
        inner = tf.nn.bias_add(tf.matmul(inner, weights.ff_2), weights.ff_bias_2)
        output = layer.ff.layer_norm(output + inner)
    hidden = tf.reshape(output, [batch, tgt_len, network.d_model])
    return hidden, CachedState(tuple(new_keys), tuple(new_values), (state.position + tgt_len) % klen)


def _write(ring, slots, new, in_place):
    """`ring` `[B, H, K, D]` with `new` `[B, H, T, D]` in the `slots` `[T]`."""
    batch, n_head, klen, d_head = keras.ops.shape(ring)
    rows = tf.reshape(tf.range(batch * n_head)[:, None] * klen + slots, [-1])
    flat, new = tf.reshape(ring, [-1, d_head]), tf.reshape(new, [-1, d_head])
    if in_place:
        flat = tf.raw_ops.InplaceUpdate(x=flat, i=rows, v=new)
    else:
        flat = tf.tensor_scatter_nd_update(flat, rows[:, None], new)
    return tf.reshape(flat, [batch, n_head, klen, d_head])


def _attend(q, keys, values, weights, first_slot, reach):
    """Attention over the ring, for a block of queries and a row of the batch at a time, which fits the cache.

    Args:
        q: `[B, H, T, D]`, scaled queries, of which the first stands in `first_slot`.
        keys, values: `[B, H, K, D]`.
        weights: `LayerWeights`.
        first_slot: int scalar tensor.
        reach: int `[T]` or `[B, T]`, distance to the farthest key that is seen; `None` if all are.

    Returns:
        `[B, H, T, D]`.
    """
    batch, n_head, tgt_len, d_head = keras.ops.shape(q)
    rw_q = q + weights.r_w_bias[:, None]
    rr_q = q + weights.r_r_bias[:, None]
    if (q.shape[2] or tf.int32.max) <= QUERY_BLOCK:
        return _attend_block(rw_q, rr_q, keys, values, weights.position_keys, first_slot, reach)

    block = tf.minimum(tgt_len, QUERY_BLOCK)
    padding = -tgt_len % block

    rw_q, rr_q = (tf.pad(x, [[0, 0], [0, 0], [0, padding], [0, 0]]) for x in (rw_q, rr_q))
    reach = tf.pad(reach, [[0, 0]] * (len(reach.shape) - 1) + [[0, padding]])

    def attend(start):
        end = start + block
        slot = (first_slot + start) % keras.ops.shape(keys)[2]
        queries = rw_q[:, :, start:end], rr_q[:, :, start:end]
        return _attend_block(*queries, keys, values, weights.position_keys, slot, reach[..., start:end])

    spec = tf.TensorSpec([q.shape[0], n_head, None, d_head], q.dtype)
    blocks = tf.map_fn(attend, tf.range(0, tgt_len, block), fn_output_signature=spec, parallel_iterations=1)
    attn_vec = tf.transpose(blocks, [1, 2, 0, 3, 4])  # [B, H, blocks, block, D]
    return tf.reshape(attn_vec, [batch, n_head, tgt_len + padding, d_head])[:, :, :tgt_len]


def _attend_block(rw_q, rr_q, keys, values, position_keys, first_slot, reach):
    """`_attend` for one block of queries with u and v added."""
    tgt_len, klen = keras.ops.shape(rw_q)[2], keras.ops.shape(keys)[2]
    position_keys = _rotated(position_keys, first_slot, tgt_len, klen)
    mask = None
    if reach is not None:
        slot = tf.range(klen)
        distance = (first_slot + tf.range(tgt_len)[:, None] - slot) % klen  # [T, K]
        mask = -1e30 * tf.cast(distance > reach[..., None], tf.float32)  # [T, K] or [B, T, K]

    def attend_row(b):
        row_mask = mask if mask is None or len(mask.shape) == 2 else mask[b]
        return _attend_row(rw_q[b], rr_q[b], keys[b], values[b], position_keys, row_mask)

    batch = rw_q.shape[0]
    if batch is not None and batch <= MAX_UNROLLED_ROWS:
        return tf.stack([attend_row(b) for b in range(batch)])
    rows = tf.range(keras.ops.shape(rw_q)[0])
    spec = tf.TensorSpec(rw_q.shape[1:], rw_q.dtype)
    return tf.map_fn(attend_row, rows, fn_output_signature=spec, parallel_iterations=1)


def _rotated(position_keys, first_slot, tgt_len, klen):
    """The position keys in the order of the slots.

    Slot s is `(first_slot + i - s) mod K` from query i. Column c of what is returned is that of the distance
    `(first_slot + T - 1 - c) mod K`, so that query i finds slot s in column `s + T - 1 - i`.

    Returns:
        list of H tensors `[K, D]` for a single query, which slicing gives without a copy; else `[H, K + T, D]`.
    """
    start = (klen - tgt_len - first_slot) % klen
    if isinstance(tgt_len, int) and tgt_len == 1:
        return [tf.slice(table, [start, 0], [klen, -1]) for table in tf.unstack(position_keys)]
    return tf.slice(position_keys, [0, start, 0], [-1, klen + tgt_len, -1])


def _attend_row(rw_q, rr_q, keys, values, position_keys, mask):
    """Attention of one row: queries `[H, T, D]`, keys and values `[H, K, D]` -> `[H, T, D]`."""
    n_head, tgt_len, _ = keras.ops.shape(rw_q)
    klen = keras.ops.shape(keys)[1]
    single = rw_q.shape[1] == 1
    ac = _products(rw_q, keys, transpose_b=True)  # [H, T, K]
    bd = _products(rr_q, position_keys, transpose_b=True)  # [H, T, K + T], or [H, 1, K]
    if not single:
        # Row i starts at its column T - 1 - i: read with rows one shorter, each starts one place earlier.
        bd = tf.slice(tf.reshape(bd, [n_head, -1]), [0, tgt_len - 1], [-1, tgt_len * (klen + tgt_len - 1)])
        bd = tf.reshape(bd, [n_head, tgt_len, klen + tgt_len - 1])[:, :, :klen]
    score = tf.cast(ac + bd, tf.float32)
    if mask is not None:
        score += mask
    if single:  # TensorFlow's softmax takes three times as long for so few numbers
        prob = tf.exp(score - tf.reduce_max(score, -1, keepdims=True))
        prob /= tf.reduce_sum(prob, -1, keepdims=True)
    else:
        prob = tf.nn.softmax(score)
    return _products(tf.cast(prob, rw_q.dtype), values)


def _products(a, b, transpose_b=False):
    """`matmul` head by head for a single query, of which the batched product is twice as slow on a CPU."""
    if a.shape[1] != 1:
        return tf.matmul(a, b, transpose_b=transpose_b)
    heads = b if isinstance(b, list) else tf.unstack(b)
    product = functools.partial(tf.matmul, transpose_b=transpose_b)
    return tf.stack([product(x, y) for x, y in zip(tf.unstack(a), heads, strict=True)])
