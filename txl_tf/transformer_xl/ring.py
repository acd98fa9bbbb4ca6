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

from typing import NamedTuple

import keras
import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla

from txl_tf.equations import shifted_scores
from txl_tf.kernels import products_of_heads
from txl_tf.transformer_xl.inference import row_by_row

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


class RingPlaces(NamedTuple):
    """`Places` of the keys in a ring, seen from a block of queries."""

    klen: tf.Tensor | int  # K
    visible: tf.Tensor | None
    r: tf.Tensor | list | None  # [H, K + T, D], see `_rotated`; of one query a list of H [K, D]
    first_slot: tf.Tensor  # int32 scalar, of the first query
    special: dict

    def distances(self, q):
        """See `Places`. None is below 0: what lies in the future of a query counts as the oldest."""
        return (self.first_slot + tf.range(keras.ops.shape(q)[-2])[:, None] - tf.range(self.klen)) % self.klen

    def scores_by_distance(self, q):
        """See `Places`; of one query a list of the heads."""
        if isinstance(self.r, list):
            scores = products_of_heads(q, self.r, transpose_b=True)
            return scores if not self.special else tf.stack(scores)
        tgt_len = keras.ops.shape(q)[-2]
        klen = keras.ops.shape(self.r)[1] - tgt_len
        return shifted_scores(q, self.r, first=tgt_len - 1)[..., :klen]


def attend_ring(block, content_q, position_q, keys, values, r, first_slot, reach, since=None, static_shapes=False):
    """Attention over the ring, for a part of the queries and a row of the batch at a time, which fits the CPU's cache.

    Args:
        block: `block(content_q, position_q, k, v, places)` of `txl_tf.equations.attention`.
        content_q, position_q: `[B, H, T, D]`, queries, of which the first stands in `first_slot`, an int scalar tensor.
        keys, values: `[B, H, K, D]`.
        r: `ring_positions`, or `None` where the scheme of positions has no table.
        reach: int `[T]` or `[B, T]`, distance to the farthest key that is seen; `None` if all are.
        since: int `[B, T]`, distance beyond which keys and values count as zeros; `None` for none.
        static_shapes: all rows at once.
    """
    queries = content_q, position_q
    batch, n_head, tgt_len, d_head = keras.ops.shape(content_q)
    known = content_q.shape[2]
    if (known or tf.int32.max) <= QUERY_BLOCK:
        return _attend_part(block, *queries, keys, values, r, first_slot, reach, since, static_shapes)

    size = QUERY_BLOCK if known else tf.minimum(tgt_len, QUERY_BLOCK)
    padding = -tgt_len % size

    queries = [tf.pad(x, [[0, 0], [0, 0], [0, padding], [0, 0]]) for x in queries]
    reach, since = (
        x if x is None else tf.pad(x, [[0, 0]] * (len(x.shape) - 1) + [[0, padding]]) for x in (reach, since)
    )

    def attend_part(start):
        slot = (first_slot + start) % keras.ops.shape(keys)[2]
        of_part = [tf.slice(x, [0, 0, start, 0], [-1, -1, size, -1]) for x in queries]
        for x in of_part:
            x.set_shape([content_q.shape[0], n_head, size if known else None, d_head])
        limits = [x if x is None else tf.gather(x, start + tf.range(size), axis=-1) for x in (reach, since)]
        return _attend_part(block, *of_part, keys, values, r, slot, *limits, static_shapes)

    spec = tf.TensorSpec([content_q.shape[0], n_head, size if known else None, d_head], content_q.dtype)
    parts = tf.map_fn(attend_part, tf.range(0, tgt_len, size), fn_output_signature=spec, parallel_iterations=1)
    attn_vec = tf.transpose(parts, [1, 2, 0, 3, 4])  # [B, H, parts, size, D]
    return tf.reshape(attn_vec, [batch, n_head, tgt_len + padding, d_head])[:, :, :tgt_len]


def _attend_part(block, content_q, position_q, keys, values, r, first_slot, reach, since, static_shapes):
    """`attend_ring` for as many queries as attend at a time."""
    tgt_len, klen = keras.ops.shape(content_q)[2], keras.ops.shape(keys)[2]
    if r is not None:
        r = _rotated(r, first_slot, tgt_len, klen, by_head=content_q.shape[2] == 1 and not static_shapes)
    visible, content = None, None
    if reach is not None:
        distance = (first_slot + tf.range(tgt_len)[:, None] - tf.range(klen)) % klen  # [T, K]
        visible = distance <= reach[..., None]  # [T, K] or [B, T, K]
        content = None if since is None else tf.cast(distance <= since[..., None], content_q.dtype)  # [B, T, K]

    if static_shapes:
        heads_first = [tf.transpose(x, [1, 0, 2, 3]) for x in (content_q, position_q, keys, values)]
        places = RingPlaces(klen, visible, r, first_slot, _special(content))
        return tf.transpose(block(*heads_first, places), [1, 0, 2, 3])

    def attend_row(b):
        of_row = visible if visible is None or len(visible.shape) == 2 else visible[b]
        places = RingPlaces(klen, of_row, r, first_slot, _special(None if content is None else content[b]))
        return block(content_q[b], position_q[b], keys[b], values[b], places)

    return row_by_row(attend_row, content_q)


def _special(content):
    return {} if content is None else {"content": content}


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
