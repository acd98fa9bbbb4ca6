"""The decoding cache of a layer: a ring of keys and one of values, `[B, H, K, D]` with K = mem_len + max_segment.

Token number n of the text is in slot n mod K. With mem_len 2 and max_segment 2, so K 4, segments of two tokens are
written to the ring like this:

    slot           0   1   2   3
    tokens 0 1     t0  t1  0   0      the memory before the text is zeros
    tokens 2 3     t0  t1  t2  t3     queries t2 and t3; the memory is t0 t1
    tokens 4 5     t4  t5  t2  t3     t0 and t1 are overwritten; the memory is t2 t3

Keys and values never move. The position keys move instead: from each query to the next, the distances of the slots
shift by one slot. They repeat with period K, so the table in the order of the slots is a slice of a longer table.

Shapes:
    B: batch      T: tgt_len      H: n_head      D: d_head
    K: slots      S: the slots among which some queries look for keys, all K or fewer
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from txl_tf.equations import Block, KeyPositions, shifted_scores
from txl_tf.kernels import products_of_heads
from txl_tf.kernels.attending import RowsFirst
from txl_tf.kernels.shapes import Size, Tensor, shape_of
from txl_tf.kernels.threads import operations_at_a_time
from txl_tf.transformer_xl.inference import has_many_single_queries, row_by_row, swap_rows_and_heads

# The number of queries that attend at a time. It limits the memory for a long prompt, and does not change the results.
QUERY_BLOCK = 256

# ------------------------------------------------------------------------------------------------------------ writing


def write(ring: Tensor, slots: Tensor, new: Tensor, in_place: bool = False) -> Any:
    """The `ring` `[B, H, K, D]` with `new` `[B, H, T, D]` in the `slots`, `[T]` or `[B * H, T]`.

    With `in_place`, it is written into the ring itself, which must not be used again.
    """
    batch, n_head, klen, d_head = shape_of(ring)
    # The numbers of the slots in the flat ring: [B * H * T].
    ring_numbers: Any = tf.range(batch * n_head)
    rows: Any = tf.reshape(ring_numbers[:, None] * klen + slots, [-1])
    flat: Any = tf.reshape(ring, [-1, d_head])
    new = tf.reshape(new, [-1, d_head])
    if in_place:
        flat = tf.raw_ops.InplaceUpdate(x=flat, i=rows, v=new)
    else:
        flat = tf.tensor_scatter_nd_update(flat, rows[:, None], new)
    return tf.reshape(flat, [batch, n_head, klen, d_head])


def write_slice(ring: Tensor, slots: Tensor, new: Tensor) -> Any:
    """`write` to consecutive `slots` `[T]`, as one operation of XLA."""
    return keras.ops.slice_update(ring, tf.stack([0, 0, slots[0], 0]), new)


def eraser(last: Tensor, slots: Tensor, klen: Size, n_head: int, in_place: bool = False) -> Callable[[Tensor], Any]:
    """Returns a function that takes a ring and returns it with zeros in all slots before the last document of a row.

    Args:
        last: int32 `[B, 1]`, the index in the segment at which the last document of a row begins, see `last_start`.
        slots: int32 `[T]`, the slots of the segment.
        klen: K.
        n_head: H.
        in_place: whether to write into the ring itself.
    """
    oldest = shape_of(slots)[0] - 1 - last  # distance from the last token to the first of its document
    in_last_document = (slots[-1] - tf.range(klen)) % klen <= oldest  # [B, K]; the left side is the age of each slot
    if not in_place:
        return lambda ring: tf.where(in_last_document[:, None, :, None], ring, tf.zeros([], ring.dtype))
    indices: Any = tf.cast(tf.where(~in_last_document), tf.int32)  # [n, 2]; usually empty
    row, slot = tf.unstack(indices, axis=1)
    erased: Any = tf.reshape((row[:, None] * n_head + tf.range(n_head)) * klen + slot[:, None], [-1])

    def erase(ring: Tensor) -> Any:
        """Writes zeros into the slots of earlier documents, in place."""
        zeros = tf.zeros([tf.size(erased), ring.shape[3]], ring.dtype)
        flat = tf.raw_ops.InplaceUpdate(x=tf.reshape(ring, [-1, ring.shape[3]]), i=erased, v=zeros)
        return tf.reshape(flat, shape_of(ring))

    return erase


# ---------------------------------------------------------------------------------------------------------- attention


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RingKeyPositions(KeyPositions):
    """`KeyPositions` of the keys in consecutive slots of a ring, for a block of queries.

    `klen` is S, and `r` is the result of `_in_slot_order`, or `None` without a table.
    """

    first_slot: Tensor  # int32 scalar, the slot of the first query, counted from the first of the S slots

    def distances(self, q: Tensor) -> Any:
        """As `KeyPositions.distances`; never negative: the keys in a query's future count as the oldest keys."""
        query: Any = tf.range(shape_of(q)[-2])
        return (self.first_slot + query[:, None] - tf.range(self.klen)) % self.klen

    def scores_by_distance(self, q: Tensor) -> Any:
        """As `KeyPositions.scores_by_distance`.

        If `r` is a list, for a single query, the result is a list with the scores of each head: `[1, S]`; or for
        queries `[H, B, 1, D]`, `[B, 1, S]`.
        """
        if isinstance(self.r, list):
            if len(q.shape) == 3:
                return products_of_heads(q, self.r, transpose_b=True)
            return [scores[:, None] for scores in products_of_heads(tf.squeeze(q, 2), self.r, transpose_b=True)]
        tgt_len = shape_of(q)[-2]
        klen = shape_of(self.r)[1] - tgt_len
        return shifted_scores(q, self.r, first=tgt_len - 1)[..., :klen]


class View(NamedTuple):
    """The slots of a ring that consecutive queries see."""

    first_slot: Tensor  # int scalar, the slot of the first query
    max_distance: Any = None  # int [T] or [B, T]: a query sees keys up to this distance. `None`: it sees all keys
    # int [B, T]: keys and values at a greater distance count as zeros, because they belong to an earlier document.
    # `None`: no keys count as zeros.
    zero_beyond: Any = None

    def of_queries(self, start: Tensor, query: Tensor, slots: Size) -> "View":
        """The view of some of these queries.

        Args:
            start: int scalar tensor, the index of the first query.
            query: int `[any]`, the indices of the queries.
            slots: K, the number of slots in the ring.
        """

        def select(distance: Any) -> Any:
            return None if distance is None else tf.gather(distance, query, axis=-1)

        return View((self.first_slot + start) % slots, select(self.max_distance), select(self.zero_beyond))

    def seen_slots(self, slots: Size) -> tuple[Any, Any]:
        """Returns `(begin, S)`: the queries see only keys in the S slots from `begin` on.

        If these slots go beyond an end of the ring, it returns all slots, `(0, K)`. There must be a `max_distance`.
        """
        query: Any = tf.range(tf.shape(self.max_distance)[-1])
        distance_of_first: Any = tf.reduce_max(self.max_distance - query)
        begin: Any = self.first_slot - tf.maximum(distance_of_first, 0)  # queries at padding may see no key at all
        end = self.first_slot + tf.size(query)
        are_consecutive = (begin >= 0) & (end <= slots)
        return tf.where(are_consecutive, begin, 0), tf.where(are_consecutive, end - begin, slots)


def attend_ring(
    block: Block, content_q: Tensor, position_q: Tensor, keys: Tensor, values: Tensor, r: Tensor | None,
    view: View, static_shapes: bool = False,
) -> Any:  # fmt: skip
    """Attends from the queries of one segment to a ring of cached keys and values.

    It takes one block of queries and, without `static_shapes`, one row of the batch at a time. So the scores stay in
    the CPU's cache. After `set_threads`, it takes one block for each of the `operations_at_a_time`. If each of many
    rows has a single query, it takes all rows at once or, after `set_threads`, a few shares of them.

    A block takes all slots, except in a segment that may be longer than a block: without `static_shapes` and with a
    `max_distance`, a block of such a segment takes only the slots that its queries see, if these are consecutive.

    Args:
        block: `block` of `txl_tf.equations.attention`.
        content_q, position_q: `[B, H, T, D]`, queries.
        keys, values: `[B, H, K, D]`.
        r: `ring_positions`, or `None` if the scheme of positions has no table.
        view: the slots that the queries see.
        static_shapes: whether to compute all rows at once, for XLA.

    Returns:
        `[B, H, T, D]`.
    """
    batch, n_head, tgt_len, d_head = shape_of(content_q)
    static_len = content_q.shape[2]
    if static_len is not None and static_len <= QUERY_BLOCK:
        return _attend_block(block, content_q, position_q, keys, values, r, view, static_shapes)

    # A segment of unknown length may be shorter than a block.
    size: Any = QUERY_BLOCK if static_len is not None else tf.minimum(tgt_len, QUERY_BLOCK)
    selects = not static_shapes and view.max_distance is not None

    @tf.autograph.experimental.do_not_convert  # eager `map_fn` would convert all that it calls
    def attend_from(start: Tensor) -> Any:
        """Attends from the block of queries that begins at `start`. The last query fills up the last block."""
        query = tf.minimum(start + tf.range(size), tgt_len - 1)
        block_content_q = tf.gather(content_q, query, axis=2)
        block_position_q = tf.gather(position_q, query, axis=2)
        block_view = view.of_queries(start, query, shape_of(keys)[2])
        return _attend_block(
            block, block_content_q, block_position_q, keys, values, r, block_view, static_shapes, selects
        )

    shape = [content_q.shape[0], n_head, None if static_len is None else size, d_head]
    spec = tf.TensorSpec(shape, content_q.dtype)
    starts = tf.range(0, tgt_len, size)
    at_a_time = operations_at_a_time()
    blocks = tf.map_fn(attend_from, starts, fn_output_signature=spec, parallel_iterations=at_a_time)
    attn_vec = tf.transpose(blocks, [1, 2, 0, 3, 4])  # [B, H, blocks, size, D]
    all_queries: Any = tf.reshape(attn_vec, [batch, n_head, shape_of(blocks)[0] * size, d_head])
    return all_queries[:, :, :tgt_len]


def _attend_block(
    block: Block, content_q: Tensor, position_q: Tensor, keys: Tensor, values: Tensor, r: Any,
    view: View, static_shapes: bool, selects: bool = False,
) -> Any:  # fmt: skip
    """Attends to the ring from one block of queries. The arguments are those of `attend_ring`, for these queries.

    With `selects`, it takes only the slots of `View.seen_slots`.
    """
    tgt_len = shape_of(content_q)[2]
    slots = shape_of(keys)[2]
    begin, klen = view.seen_slots(slots) if selects else (0, slots)
    first_slot = view.first_slot - begin
    if r is not None:
        by_head = content_q.shape[2] == 1 and not static_shapes
        r = _in_slot_order(r, first_slot, tgt_len, klen, slots, by_head)
    key_positions = RingKeyPositions(klen=klen, r=r, first_slot=first_slot)
    if view.max_distance is not None:
        distance = key_positions.distances(content_q)  # [T, S]
        visible = distance <= view.max_distance[..., None]  # [T, S] or [B, T, S]
        key_positions = dataclasses.replace(key_positions, visible=visible)
        if view.zero_beyond is not None:
            content = tf.cast(distance <= view.zero_beyond[..., None], content_q.dtype)  # [B, T, S]
            key_positions = dataclasses.replace(key_positions, content=content)

    if static_shapes:
        content_q, position_q, keys, values = map(swap_rows_and_heads, (content_q, position_q, keys, values))
        return swap_rows_and_heads(block(content_q, position_q, keys, values, key_positions))
    if view.max_distance is None and has_many_single_queries(content_q):
        heads_first = tf.stack(tf.unstack(position_q, axis=1))  # faster than a transposition of so few numbers
        return block(RowsFirst(content_q), heads_first, RowsFirst(keys), RowsFirst(values), key_positions)

    def attend_row(b: Any) -> Tensor:
        """Attention of row b of the batch."""
        visible = key_positions.visible
        content = key_positions.content
        of_row = dataclasses.replace(
            key_positions,
            visible=visible if visible is None or len(visible.shape) == 2 else visible[b],
            content=None if content is None else content[b],
        )
        k, v = keys[b], values[b]
        if selects:
            k, v = (tf.slice(ring, [0, begin, 0], [-1, klen, -1]) for ring in (k, v))
        return block(content_q[b], position_q[b], k, v, of_row)

    return row_by_row(attend_row, content_q)


def ring_positions(r_k: Tensor, max_segment: Size) -> Any:
    """The table of distances for a ring, `[H, 2 * K + max_segment, D]`. `_in_slot_order` returns slices of it.

    Row x belongs to the distance `(K - 1 - x) mod K`.

    Args:
        r_k: `[H, K, D]`, the keys of the distances, farthest first.
        max_segment: the maximum number of tokens in a segment.
    """
    return tf.concat([r_k, r_k, r_k[:, :max_segment]], 1)


def _in_slot_order(table: Tensor, first_slot: Tensor, tgt_len: Size, klen: Size, slots: Size, by_head: bool) -> Any:
    """The position keys in the order of the slots.

    Slot s has the distance `(first_slot + i - s) mod K` from query i. Row c of the result belongs to the distance
    `(first_slot + T - 1 - c) mod K`. So query i finds slot s in row `s + T - 1 - i`.

    Args:
        table: from `ring_positions`, `[H, 2 * K + max_segment, D]`.
        first_slot: slot of the first query.
        tgt_len: T, number of queries.
        klen: S, the number of slots that the queries see.
        slots: K, the number of slots in the ring.
        by_head: whether to return a list, see below.

    Returns:
        `[H, S + T, D]`; or if `by_head`, for a single query, a list of H tensors `[S, D]`.
    """
    start = (slots - tgt_len - first_slot) % slots
    if by_head:
        return [tf.slice(of_head, [start, 0], [klen, -1]) for of_head in tf.unstack(table)]
    return tf.slice(table, [0, start, 0], [-1, klen + tgt_len, -1])
