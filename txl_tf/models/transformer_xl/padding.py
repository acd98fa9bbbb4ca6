"""Padding anywhere in a segment: the tokens of each row are packed to its front, and their results put back.

    tokens          a . b c .          packed      a b c . .          lengths     3
    padding_mask    1 0 1 1 0          unpacked    a . b c .

Packed, causality hides the padding that follows the tokens, and the distances of tokens and memory are right.
"""

import tensorflow as tf


def check_padding(padding_mask, tokens, mem, mem_len):
    """Raises ValueError where `padding_mask` does not fit tokens and memory."""
    if padding_mask.dtype != tf.bool or not padding_mask.shape.is_compatible_with(tokens.shape):
        raise ValueError(
            f"padding_mask must be bool and of the shape of tokens, {list(tokens.shape)}, "
            f"got {padding_mask.dtype.name} {list(padding_mask.shape)}"
        )
    if mem.shape[1] is not None and mem.shape[1] < mem_len:
        raise ValueError(
            f"with a padding_mask, mems must hold mem_len={mem_len} positions or more, as initial_mems does, "
            f"got {mem.shape[1]}"
        )


def pack(tokens, padding_mask):
    """`(packed, lengths)`: int `[B, T]`, each row's tokens in front, then zeros; int32 `[B]`, how many there are."""
    order = tf.argsort(tf.cast(~padding_mask, tf.int32), stable=True)
    packed = tf.gather(tf.where(padding_mask, tokens, 0), order, batch_dims=1)
    return packed, tf.reduce_sum(tf.cast(padding_mask, tf.int32), 1)


def unpack(hidden, padding_mask):
    """`hidden`, `[B, T, E]` of packed tokens, at the places of the tokens; zeros at padding. The mask goes along."""
    index = tf.cumsum(tf.cast(padding_mask, tf.int32), 1, exclusive=True)
    hidden = tf.where(padding_mask[:, :, None], tf.gather(hidden, index, batch_dims=1), 0)
    hidden._keras_mask = padding_mask
    return hidden
