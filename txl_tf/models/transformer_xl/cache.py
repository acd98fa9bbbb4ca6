"""Inference with cached keys and values: the network's numbers, without projecting its memory again.

The network keeps hidden states as memory, which every layer projects to keys and values for every segment. While the
weights stay as they are, so do the projections:

    weights = precompute(network, max_segment=80)            # kernels and position keys, projected once
    state = initial_state(network, batch, max_segment=80)    # zeros; or state_of(network, mems)
    hidden, state = cached_forward(network, weights, tokens, state)       # == network(tokens, mems)

The keys and values of a layer are a ring `[B, H, K, D]` of K = mem_len + max_segment slots. Token number n of the text
stands in slot n mod K. With mem_len 2 and max_segment 2, so K 4, segments of two tokens go into the ring like this:

    slot           0   1   2   3
    tokens 0 1     t0  t1  0   0      the memory before the text is zeros
    tokens 2 3     t0  t1  t2  t3     queries t2 and t3; the memory is t0 t1
    tokens 4 5     t4  t5  t2  t3     t0 and t1 are overwritten; the memory is t2 t3

Keys and values never move. What moves are the position keys: seen from a query, the distances of the slots are those
of the row before it, moved by one. They repeat with period K, so that a rotated table of them is a slice of a longer
one. Zero memories have zero keys and values, as the projections have no bias.

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
from tensorflow.compiler.tf2xla.python import xla

from txl_tf.layers.attention import attend, head_matmul, shifted_scores
from txl_tf.layers.feed_forward import positionwise_ff
from txl_tf.layers.transformer_xl.reset import document_starts

# Queries that attend at a time: bounds the memory that a long prompt takes, and changes no result.
QUERY_BLOCK = 256
# Rows of a batch whose attention is written out one by one. More of them, or an unknown number, go through a loop.
MAX_UNROLLED_ROWS = 16


class CachedState(NamedTuple):
    """The memory as keys and values: nothing but tensors, so that it goes in and out of any graph."""

    keys: tuple  # of n_layer tensors [B, H, K, D]
    values: tuple  # the same
    position: tf.Tensor  # int32 scalar, the slot that the next token goes to; rows go in step


class LayerWeights(NamedTuple):
    """Weights of a layer in the type they are used in."""

    qkv: tf.Tensor  # [E, 3 * H * D], the queries' part times D**-0.5
    o: tf.Tensor  # [H * D, E]
    ff: tuple  # kernels and biases, as `positionwise_ff` takes them
    # Of relative attention alone:
    r_w_bias: tf.Tensor | None = None  # [H, D], u times D**-0.5
    r_r_bias: tf.Tensor | None = None  # [H, D], v times D**-0.5
    position_keys: tf.Tensor | None = None  # [H, 2 * K + max_segment, D]; row x is that of distance (K - 1 - x) mod K


def precompute(network, max_segment=1):
    """What inference computes from the weights alone, `n_layer` `LayerWeights`; stale when the weights change."""
    return weights_with(network, position_keys(network, max_segment))


def position_keys(network, max_segment=1):
    """The `position_keys` of all `LayerWeights`: the only ones that take more than a copy of the weights."""
    klen, dtype = network.mem_len + max_segment, network.compute_dtype
    pos_emb = tf.cast(network.positions(klen)[0], dtype)

    def table(layer):
        r_k = tf.matmul(pos_emb, tf.cast(layer.rel_attn.r_kernel, dtype))
        r_k = tf.transpose(tf.reshape(r_k, [klen, network.n_head, network.d_head]), [1, 0, 2])
        return tf.concat([r_k, r_k, r_k[:, :max_segment]], 1)

    return tuple(map(table, network.decoder_layers))


def weights_with(network, position_keys):
    """`precompute`, where the position keys are there already."""
    dtype = network.compute_dtype

    def of_layer(i, layer):
        r_w_bias, r_r_bias = (tf.cast(bias * network.d_head**-0.5, dtype) for bias in network.biases(i))
        return layer_weights(layer, dtype, r_w_bias, r_r_bias, position_keys[i])

    return tuple(of_layer(i, layer) for i, layer in enumerate(network.decoder_layers))


def layer_weights(layer, dtype, *position_weights):
    """`LayerWeights` of a layer, with those of relative attention."""
    attn, ff = layer.rel_attn, layer.ff
    width = attn.n_head * attn.d_head
    q_kernel, kv_kernel = tf.split(tf.convert_to_tensor(attn.qkv_kernel), [width, 2 * width], 1)
    return LayerWeights(
        tf.cast(tf.concat([q_kernel * attn.d_head**-0.5, kv_kernel], 1), dtype),
        tf.cast(attn.o_kernel, dtype),
        tuple(tf.cast(weight, dtype) for weight in (ff.kernel_1, ff.bias_1, ff.kernel_2, ff.bias_2)),
        *position_weights,
    )


def whole_segments(mem_len, tgt_len):
    """The `max_segment` with which a ring holds whole segments of `tgt_len` tokens, as few as reach."""
    return tgt_len + -mem_len % tgt_len


def initial_state(network, batch_size, max_segment=1):
    """The state before the first segment: zero memories of full length, which are attended to.

    `batch_size` and `max_segment`, the most tokens of a segment, are ints or int scalar tensors.
    """
    shape = [batch_size, network.n_head, network.mem_len + max_segment, network.d_head]
    rings = [tuple(tf.zeros(shape, network.compute_dtype) for _ in range(network.n_layer)) for _ in "kv"]
    return CachedState(*rings, position=tf.constant(0))


def state_of(network, mems, max_segment=1):
    """The state that goes on where the uncached `network` would with `mems`, a list of `[B, M, E]`, one a layer."""
    width = network.n_head * network.d_head

    def ring(mem, kernel):
        if mem.shape[1] != network.mem_len:
            raise ValueError(f"mems must hold mem_len={network.mem_len} positions, got {mem.shape[1]}")
        heads = tf.matmul(tf.cast(mem, network.compute_dtype), tf.cast(kernel, network.compute_dtype))
        heads = tf.reshape(heads, [-1, network.mem_len, network.n_head, network.d_head])
        return tf.pad(tf.transpose(heads, [0, 2, 1, 3]), [[0, 0], [0, 0], [0, max_segment], [0, 0]])

    kernels = [layer.rel_attn.qkv_kernel for layer in network.decoder_layers]
    keys = tuple(ring(mem, kernel[:, width : 2 * width]) for mem, kernel in zip(mems, kernels, strict=True))
    values = tuple(ring(mem, kernel[:, 2 * width :]) for mem, kernel in zip(mems, kernels, strict=True))
    return CachedState(keys, values, tf.constant(network.mem_len))


def memory_of(network, state):
    """`(keys, values)` of a state in the order of time: tuples of `n_layer` tensors `[B, H, M, D]`, oldest first."""

    def in_time(ring):
        max_segment = keras.ops.shape(ring)[2] - network.mem_len
        memory = tf.roll(ring, -state.position, 2)[:, :, max_segment:]
        memory.set_shape([ring.shape[0], network.n_head, network.mem_len, network.d_head])
        return memory

    return tuple(map(in_time, state.keys)), tuple(map(in_time, state.values))


def state_from(keys, values, max_segment=1):
    """The state whose `memory_of` is `keys` and `values`, with another `max_segment`."""

    def ring(memory):
        return tf.pad(memory, [[0, 0], [0, 0], [0, max_segment], [0, 0]])

    return CachedState(tuple(map(ring, keys)), tuple(map(ring, values)), tf.constant(keys[0].shape[2]))


def writable_copy(state):
    """A copy that nothing else refers to, not even a constant of the graph, so that `in_place` may write into it."""
    return tf.nest.map_structure(lambda tensor: tf.raw_ops.DeepCopy(x=tensor), state)


def cached_forward(network, weights, tokens, state, lengths=None, in_place=False, static_shapes=False):
    """`network(tokens, mems)`, with the memory as a `CachedState`.

    Args:
        network: `TransformerXL`, for its settings, embedding and layer norms.
        weights: `precompute` of the network, of the state's `max_segment`.
        tokens: int `[B, T]`, T not above `max_segment`.
        state: `CachedState`.
        lengths: int `[B]`, for rows of unequal length: row b is its last `lengths[b]` tokens; what stands to their left
            is ignored. Each row gets the result of its own tokens alone. The memory must be zeros. `None`: all T.
        in_place: write into the tensors of `state`, which must not be used again, instead of a copy of them. XLA, which
            finds out by itself what it may overwrite, has no such operation.
        static_shapes: for XLA: all segments so far had T tokens, and `max_segment` is `whole_segments`.

    Returns:
        `(hidden, state)`: `[B, T, E]` and the `CachedState` after the segment.
    """
    batch, tgt_len = keras.ops.shape(tokens)
    klen = keras.ops.shape(state.keys[0])[2]
    _check_segment(tgt_len, klen - network.mem_len)
    query = tf.range(tgt_len)
    slots = (state.position + query) % klen
    padding = None if lengths is None else tgt_len - tf.cast(lengths, tf.int32)[:, None]
    starts = since = erase_before = erase_after = None
    if network.reset_token is not None:
        starts = document_starts(tokens, network.reset_token)  # in the padding there are zeros in any case
        erase = _eraser(tgt_len - 1 - starts[:, -1:], slots[-1], klen, network.n_head, in_place)
        if tokens.shape[1] == 1:
            erase_before = erase
        else:
            since, erase_after = query - starts, erase
    reach = _reach(network, query, padding, starts)
    if tokens.shape[1] == 1 and state.keys[0].shape[2] == network.mem_len + 1:
        reach = None  # every slot is seen

    put = _write_slice if static_shapes else functools.partial(write, in_place=in_place)
    new_keys, new_values = [], []

    def attention(i, q, k, v):
        if padding is not None:
            kept = tf.cast(query >= padding, q.dtype)[:, None, :, None]  # [B, 1, T, 1]
            k, v = k * kept, v * kept  # the zeros that a shorter row has before it
        rings = state.keys[i], state.values[i]
        rings = map(erase_before, rings) if erase_before else rings
        keys, values = (put(ring, slots, new) for ring, new in zip(rings, (k, v), strict=True))
        attn_vec = _attend(q, keys, values, weights[i], slots[0], reach, since, static_shapes)
        if erase_after:
            with tf.control_dependencies([attn_vec]):  # which reads what is erased in place
                keys, values = erase_after(keys), erase_after(values)
        new_keys.append(keys)
        new_values.append(values)
        return attn_vec

    hidden = run_layers(network, weights, network.embedding(tokens, static_shapes=static_shapes), attention)
    return hidden, CachedState(tuple(new_keys), tuple(new_values), (state.position + tgt_len) % klen)


def run_layers(network, weights, hidden, attention):
    """The layers of a network, one after the other, as inference computes them.

    Args:
        weights: `n_layer` `LayerWeights`.
        hidden: `[B, T, E]`, what enters the first.
        attention: `attention(i, q, k, v)`, of layer i: scaled queries, keys and values of the segment, `[B, H, T, D]`
            each, to what the heads find, the same.

    Returns:
        `[B, T, E]`.
    """
    batch, tgt_len, _ = keras.ops.shape(hidden)
    heads = [batch, tgt_len, 3, network.n_head, network.d_head]
    # Rows of a matrix from here on: a product of rank 3 with a kernel is one for every row of the batch.
    output = tf.reshape(hidden, [-1, network.d_model])
    for i, (layer, of_layer) in enumerate(zip(network.decoder_layers, weights, strict=True)):
        qkv = tf.reshape(tf.matmul(output, of_layer.qkv), heads)
        attn_vec = attention(i, *tf.unstack(tf.transpose(qkv, [2, 0, 3, 1, 4])))
        attn_vec = tf.reshape(tf.transpose(attn_vec, [0, 2, 1, 3]), [-1, network.n_head * network.d_head])
        output = layer.rel_attn.layer_norm(output + tf.matmul(attn_vec, of_layer.o))
        output = layer.ff.layer_norm(output + positionwise_ff(output, *of_layer.ff))
    return tf.reshape(output, [batch, tgt_len, network.d_model])


def _check_segment(tgt_len, max_segment):
    """An error where a segment is longer than its state allows; both may be tensors."""
    if not isinstance(tgt_len, int) or not isinstance(max_segment, int):
        tf.debugging.assert_less_equal(tgt_len, max_segment, "tokens must not be longer than the state's max_segment")
    elif tgt_len > max_segment:
        raise ValueError(f"tokens must be at most max_segment={max_segment} long, got {tgt_len}")


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


def _eraser(oldest, last_slot, klen, n_head, in_place):
    """A function of a ring that overwrites what is older than a row's document with zeros.

    Args:
        oldest: int32 `[B, 1]`, the distance from the last token, in `last_slot`, to the first of its document.
    """
    kept = (last_slot - tf.range(klen)) % klen <= oldest  # [B, K]
    if not in_place:
        return lambda ring: tf.where(kept[:, None, :, None], ring, tf.zeros([], ring.dtype))
    row, slot = tf.unstack(tf.cast(tf.where(~kept), tf.int32), axis=1)  # none, as a rule
    erased = tf.reshape((row[:, None] * n_head + tf.range(n_head)) * klen + slot[:, None], [-1])

    def erase(ring):
        zeros = tf.zeros([tf.size(erased), ring.shape[3]], ring.dtype)
        flat = tf.raw_ops.InplaceUpdate(x=tf.reshape(ring, [-1, ring.shape[3]]), i=erased, v=zeros)
        return tf.reshape(flat, keras.ops.shape(ring))

    return erase


def write(ring, slots, new, in_place=False):
    """`ring` `[B, H, K, D]` with `new` `[B, H, T, D]` in the `slots`, `[T]` or `[B * H, T]`."""
    batch, n_head, klen, d_head = keras.ops.shape(ring)
    rows = tf.reshape(tf.range(batch * n_head)[:, None] * klen + slots, [-1])
    flat, new = tf.reshape(ring, [-1, d_head]), tf.reshape(new, [-1, d_head])
    if in_place:
        flat = tf.raw_ops.InplaceUpdate(x=flat, i=rows, v=new)
    else:
        flat = tf.tensor_scatter_nd_update(flat, rows[:, None], new)
    return tf.reshape(flat, [batch, n_head, klen, d_head])


def _write_slice(ring, slots, new):
    """`write` into `slots` `[T]` that follow each other, as one operation of XLA."""
    return xla.dynamic_update_slice(ring, new, tf.stack([0, 0, slots[0], 0]))


def _attend(q, keys, values, weights, first_slot, reach, since=None, static_shapes=False):
    """Attention over the ring, for a block of queries and a row of the batch at a time, which fits the CPU's cache.

    Args:
        q: `[B, H, T, D]`, scaled queries, of which the first stands in `first_slot`, an int scalar tensor.
        keys, values: `[B, H, K, D]`.
        reach: int `[T]` or `[B, T]`, distance to the farthest key that is seen; `None` if all are.
        since: int `[B, T]`, distance beyond which keys and values count as zeros; `None` for none.
        static_shapes: all rows at once.
    """
    batch, n_head, tgt_len, d_head = keras.ops.shape(q)
    rw_q = q + weights.r_w_bias[:, None]
    rr_q = q + weights.r_r_bias[:, None]
    if (q.shape[2] or tf.int32.max) <= QUERY_BLOCK:
        return _attend_block(rw_q, rr_q, keys, values, weights.position_keys, first_slot, reach, since, static_shapes)

    block = QUERY_BLOCK if q.shape[2] else tf.minimum(tgt_len, QUERY_BLOCK)
    padding = -tgt_len % block

    rw_q, rr_q = (tf.pad(x, [[0, 0], [0, 0], [0, padding], [0, 0]]) for x in (rw_q, rr_q))
    reach, since = (
        x if x is None else tf.pad(x, [[0, 0]] * (len(x.shape) - 1) + [[0, padding]]) for x in (reach, since)
    )

    def attend_block(start):
        slot = (first_slot + start) % keras.ops.shape(keys)[2]
        queries = [tf.slice(x, [0, 0, start, 0], [-1, -1, block, -1]) for x in (rw_q, rr_q)]
        of_block = [x if x is None else tf.gather(x, start + tf.range(block), axis=-1) for x in (reach, since)]
        return _attend_block(*queries, keys, values, weights.position_keys, slot, *of_block, static_shapes)

    spec = tf.TensorSpec([q.shape[0], n_head, block if q.shape[2] else None, d_head], q.dtype)
    blocks = tf.map_fn(attend_block, tf.range(0, tgt_len, block), fn_output_signature=spec, parallel_iterations=1)
    attn_vec = tf.transpose(blocks, [1, 2, 0, 3, 4])  # [B, H, blocks, block, D]
    return tf.reshape(attn_vec, [batch, n_head, tgt_len + padding, d_head])[:, :, :tgt_len]


def _attend_block(rw_q, rr_q, keys, values, position_keys, first_slot, reach, since, static_shapes):
    """`_attend` for one block of queries with u and v added."""
    tgt_len, klen = keras.ops.shape(rw_q)[2], keras.ops.shape(keys)[2]
    by_head = rw_q.shape[2] == 1 and not static_shapes
    position_keys = _rotated(position_keys, first_slot, tgt_len, klen, by_head)
    visible = content = None
    if reach is not None:
        distance = (first_slot + tf.range(tgt_len)[:, None] - tf.range(klen)) % klen  # [T, K]
        visible = distance <= reach[..., None]  # [T, K] or [B, T, K]
        content = None if since is None else tf.cast(distance <= since[..., None], rw_q.dtype)  # [B, T, K]

    def attend_rows(rw_q, rr_q, keys, values, visible, content):
        """Of one row, `[H, T, D]`, or of several, `[H, B, T, D]`."""
        if by_head:
            position_scores = head_matmul(rr_q, position_keys, transpose_b=True)
        else:
            position_scores = shifted_scores(rr_q, position_keys, first=tgt_len - 1)[..., :klen]
        return attend(rw_q, keys, values, position_scores, visible, content=content)

    if static_shapes:
        heads_first = [tf.transpose(x, [1, 0, 2, 3]) for x in (rw_q, rr_q, keys, values)]
        return tf.transpose(attend_rows(*heads_first, visible, content), [1, 0, 2, 3])

    def attend_row(b):
        row_visible = visible if visible is None or len(visible.shape) == 2 else visible[b]
        row_content = None if content is None else content[b]
        return attend_rows(rw_q[b], rr_q[b], keys[b], values[b], row_visible, row_content)

    return row_by_row(attend_row, rw_q)


def row_by_row(attend_row, q):
    """`attend_row(b)`, `[H, T, D]`, of all rows of the queries `[B, H, T, D]`: a row at a time fits the CPU's cache."""
    batch = q.shape[0]
    if batch is not None and batch <= MAX_UNROLLED_ROWS:
        return tf.stack([attend_row(b) for b in range(batch)])
    rows, spec = tf.range(keras.ops.shape(q)[0]), tf.TensorSpec(q.shape[1:], q.dtype)
    return tf.map_fn(attend_row, rows, fn_output_signature=spec, parallel_iterations=1)


def _rotated(position_keys, first_slot, tgt_len, klen, by_head):
    """The position keys in the order of the slots: `[H, K + T, D]`, or `by_head`, for one query, a list of H `[K, D]`.

    Slot s has the distance `(first_slot + i - s) mod K` from query i. Row c of what is returned is that of the distance
    `(first_slot + T - 1 - c) mod K`, so that query i finds slot s in row `s + T - 1 - i`.
    """
    start = (klen - tgt_len - first_slot) % klen
    if by_head:
        return [tf.slice(table, [start, 0], [klen, -1]) for table in tf.unstack(position_keys)]
    return tf.slice(position_keys, [0, start, 0], [-1, klen + tgt_len, -1])
