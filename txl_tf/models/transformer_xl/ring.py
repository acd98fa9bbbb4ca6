"""The decoding cache of a layer: a ring of keys, and one of values, `[B, H, K, D]` of K = mem_len + max_segment slots.

Token number n of the text stands in slot n mod K. With mem_len 2 and max_segment 2, so K 4, segments of two tokens go
into the ring like this:

    slot           0   1   2   3
    tokens 0 1     t0  t1  0   0      the memory before the text is zeros
    tokens 2 3     t0  t1  t2  t3     queries t2 and t3; the memory is t0 t1
    tokens 4 5     t4  t5  t2  t3     t0 and t1 are overwritten; the memory is t2 t3

Keys and values never move. What moves are the position keys: seen from a query, the distances of the slots are those
of the row before it, moved by one. They repeat with period K, so that a rotated table of them is a slice of a longer
one.

Shapes:
    B: batch      T: tgt_len      H: n_head      D: d_head      K: slots
"""

import keras
import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla

from txl_tf.layers.attention import attend, products_of_heads, shifted_scores
from txl_tf.layers.transformer_xl.reset import attend_documents
from txl_tf.models.transformer_xl.inference import row_by_row

# Queries that attend at a time: bounds the memory that a long prompt takes, and changes no result.
QUERY_BLOCK = 256

# ------------------------------------------------------------------------------------------------------------ writing


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


def write_slice(ring, slots, new):
    """`write` into `slots` `[T]` that follow each other, as one operation of XLA."""
    return xla.dynamic_update_slice(ring, new, tf.stack([0, 0, slots[0], 0]))


def eraser(starts, slots, klen, n_head, in_place=False):
    """A function of a ring that overwrites what is older than a row's last document with zeros.

    Args:
        starts: int32 `[B, T]`, where in the segment the document of each token begins, see `document_starts`.
        slots: int32 `[T]`, of the segment.
    """
    oldest = keras.ops.shape(starts)[1] - 1 - starts[:, -1:]  # distance from the last token to its document's first
    kept = (slots[-1] - tf.range(klen)) % klen <= oldest  # [B, K]
    if not in_place:
        return lambda ring: tf.where(kept[:, None, :, None], ring, tf.zeros([], ring.dtype))
    row, slot = tf.unstack(tf.cast(tf.where(~kept), tf.int32), axis=1)  # none, as a rule
    erased = tf.reshape((row[:, None] * n_head + tf.range(n_head)) * klen + slot[:, None], [-1])

    def erase(ring):
        zeros = tf.zeros([tf.size(erased), ring.shape[3]], ring.dtype)
        flat = tf.raw_ops.InplaceUpdate(x=tf.reshape(ring, [-1, ring.shape[3]]), i=erased, v=zeros)
        return tf.reshape(flat, keras.ops.shape(ring))

    return erase


# ---------------------------------------------------------------------------------------------------------- attention


def attend_ring(q, keys, values, weights, first_slot, reach, since=None, static_shapes=False):
    """Attention over the ring, for a block of queries and a row of the batch at a time, which fits the CPU's cache.

    Args:
        q: `[B, H, T, D]`, scaled queries, of which the first stands in `first_slot`, an int scalar tensor.
        keys, values: `[B, H, K, D]`.
        weights: `LayerWeights`, whose `position_keys` are `ring_positions`.
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
    """`attend_ring` for one block of queries with u and v added."""
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
            position_scores = products_of_heads(rr_q, position_keys, transpose_b=True)
            position_scores = position_scores if content is None else tf.stack(position_scores)
        else:
            position_scores = shifted_scores(rr_q, position_keys, first=tgt_len - 1)[..., :klen]
        if content is None:
            return attend(rw_q, keys, values, position_scores, visible)
        return attend_documents(rw_q, keys, values, position_scores, visible, content)

    if static_shapes:
        heads_first = [tf.transpose(x, [1, 0, 2, 3]) for x in (rw_q, rr_q, keys, values)]
        return tf.transpose(attend_rows(*heads_first, visible, content), [1, 0, 2, 3])

    def attend_row(b):
        row_visible = visible if visible is None or len(visible.shape) == 2 else visible[b]
        row_content = None if content is None else content[b]
        return attend_rows(rw_q[b], rr_q[b], keys[b], values[b], row_visible, row_content)

    return row_by_row(attend_row, rw_q)


def ring_positions(r_k, max_segment):
    """The table of distances that a ring takes: `[H, 2 * K + max_segment, D]` of `r_k`, `[H, K, D]`, farthest first.

    Row x is that of the distance `(K - 1 - x) mod K`.
    """
    return tf.concat([r_k, r_k, r_k[:, :max_segment]], 1)


def _rotated(position_keys, first_slot, tgt_len, klen, by_head):
    """The position keys in the order of the slots: `[H, K + T, D]`, or `by_head`, for one query, a list of H `[K, D]`.

    Slot s has the distance `(first_slot + i - s) mod K` from query i. Row c of what is returned is that of the distance
    `(first_slot + T - 1 - c) mod K`, so that query i finds slot s in row `s + T - 1 - i`.
    """
    start = (klen - tgt_len - first_slot) % klen
    if by_head:
        return [tf.slice(table, [start, 0], [klen, -1]) for table in tf.unstack(position_keys)]
    return tf.slice(position_keys, [0, start, 0], [-1, klen + tgt_len, -1])
