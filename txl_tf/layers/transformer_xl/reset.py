"""Documents in a segment: what a token sees of the text before its own document.

A document begins with `reset_token`, which ends the one before it. A text `a a E b b E c` of three documents, E the
token, in segments of four:

    segment     a a E b | b E c ...        places        0 1 2 3 | 0 1 2
                                           starts        . . 2 2 | . 1 1       . is BEFORE

For a token of a document that begins at place s of its segment, all before s is what it is before a text begins: a
memory of zeros, which the token attends to. Their distances count, their content is zero, and there are no more of them
than at the beginning of a text. So a document gets exactly what it would get as a text by itself.

Shapes:
    B: batch      T: tgt_len, the segment      M: mlen, the memory      K: klen, the keys, M + T
"""

import keras
import tensorflow as tf

BEFORE = -(1 << 30)  # the place of a document's first token, where that is in an earlier segment


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
