"""Documents in a segment: what a token sees of the text before its own document.

A document begins with `reset_token`, which ends the one before it. A text `a a E b b E c` of three documents, E the
token, in segments of four:

    segment     a a E b | b E c ...        places        0 1 2 3 | 0 1 2
                                           starts        . . 2 2 | . 1 1       . is BEFORE

For a token of a document that begins at place s of its segment, everything before s acts as the initial zero memory,
which the token attends to: the distances count, the content is zero, and there are no more of these keys than at the
beginning of a text. So a document gets exactly what it would get as a text by itself.

Shapes:
    B: batch      T: tgt_len, the segment      M: mlen, the memory      K: klen, the keys, M + T
    H: n_head     D: d_head
"""

from typing import NamedTuple

import keras
import tensorflow as tf

BEFORE = -(1 << 30)  # the place of a document's first token, where that is in an earlier segment


class Mask(NamedTuple):
    """What the queries of a segment see."""

    attn_mask: tf.Tensor  # float [T, K], or [B, T, K] where there are documents: 1 where masked, see `create_mask`
    content: tf.Tensor | None = None  # float [B, T, K], see `content_mask`; `None` without documents
    starts: tf.Tensor | None = None  # int32 [B, T], see `document_starts`

    def around(self, mem):
        """The arguments of a layer's call from `attn_mask` on."""
        return (self.attn_mask, mem) if self.content is None else (self.attn_mask, mem, self.content)

    def forget(self, mems, lengths=None):
        """The memories after the segment, with zeros before each row's last document; see `of_last_document`."""
        if self.starts is None:
            return mems
        lengths = keras.ops.shape(self.starts)[1] if lengths is None else lengths
        kept = of_last_document(self.starts, lengths, keras.ops.shape(mems[0])[1])
        return [mem * tf.cast(kept, mem.dtype) for mem in mems]


def document_mask(attn_mask, tokens, reset_token, same_length=False, lengths=None):
    """What the queries of a segment see where documents end within it: see the example of `TransformerXLLayer`.

    Args:
        attn_mask: float `[T, K]`, see `create_mask`.
        tokens: int `[B, T]`.
        reset_token: int, the id of the first token of a document.
        same_length: whether every query sees as many keys.
        lengths: int32 `[B]`, of how many tokens each row is. `None`: all.

    Returns:
        `Mask`. Layers take its `attn_mask` and its `content`, as `content_mask`; `forget` makes their memories forget.
    """
    qlen, klen = keras.ops.shape(attn_mask)
    counted = None if lengths is None else tf.range(qlen) < lengths[:, None]
    starts = document_starts(tokens, reset_token, counted)
    far = attn_mask if same_length else mask_far_zeros(attn_mask, starts)
    return Mask(far, content_mask(starts, klen - qlen), starts)


def document_starts(tokens, reset_token, counted=None):
    """The place in the segment at which the document of each token begins, or `BEFORE`.

    Args:
        tokens: int `[B, T]`.
        reset_token: int, the id of the first token of a document.
        counted: bool, what broadcasts to `[B, T]`; a token where it is False begins no document. `None`: all count.

    Returns:
        int32 `[B, T]`.
    """
    batch, tgt_len = keras.ops.shape(tokens)
    resets = tokens == reset_token
    if counted is not None:
        resets &= counted
    documents = tf.cumsum(tf.cast(resets, tf.int32), 1) + (tgt_len + 1) * tf.range(batch)[:, None]
    places = tf.where(resets, tf.range(tgt_len), BEFORE)  # of a document's tokens, the first alone has one
    return tf.gather(tf.math.unsorted_segment_max(places, documents, batch * (tgt_len + 1)), documents)


def content_mask(starts, mlen):
    """1 where a key, of memory or segment, is of the query's document or in its future, 0 where it counts as zero.

    Args:
        starts: int32 `[B, T]`, see `document_starts`.
        mlen: int or int scalar tensor, the length of the memory.

    Returns:
        float32 `[B, T, M + T]`.
    """
    places = tf.range(-mlen, keras.ops.shape(starts)[1])
    return tf.cast(places >= starts[..., None], tf.float32)


def mask_far_zeros(attn_mask, starts):
    """`attn_mask` with the keys masked that a query would not see in a text that begins with its document.

    At place i of such a text, a query sees the `M + i + 1` last keys, of which `M` are the zeros before it.

    Args:
        attn_mask: float32 `[T, K]`, 1 where masked, see `create_mask`.
        starts: int32 `[B, T]`.

    Returns:
        float32 `[B, T, K]`.
    """
    keys = tf.range(keras.ops.shape(attn_mask)[1])
    return tf.maximum(attn_mask, tf.cast(keys < starts[..., None], tf.float32))


def of_last_document(starts, lengths, kept):
    """1 at the last positions of memory and segment that are of a row's last document, 0 before it.

    Args:
        starts: int32 `[B, T]`.
        lengths: int, or int32 `[B]`, tokens of the segment that count.
        kept: int or int scalar tensor, how many of the last positions.

    Returns:
        float32 `[B, kept, 1]`.
    """
    places = tf.reshape(lengths, [-1, 1]) - kept + tf.range(kept)
    return tf.cast(places >= starts[:, -1:], tf.float32)[..., None]
