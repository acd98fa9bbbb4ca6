"""Sinusoidal position embeddings: the R of relative attention (paper, section 3.3).

Shapes:
    K: klen, the number of keys, mem_len + tgt_len
    E: d_model, even
"""

import tensorflow as tf


def inverse_frequencies(d_model):
    """The frequencies of the sinusoids, `1 / 10000^(2i / d_model)`.

    Args:
        d_model: even int, the width of the embedding.

    Returns:
        float32 `[d_model / 2]`.

    Raises:
        ValueError: `d_model` is odd: half the dimensions are sines and half cosines.
    """
    if d_model % 2:
        raise ValueError(f"d_model must be even (half sines, half cosines), got {d_model}")
    return 1 / (10000 ** (tf.range(0, d_model, 2.0) / d_model))


def relative_positions(klen, clamp_len=-1):
    """Distances from a query to its keys, farthest first: `klen - 1, ..., 1, 0`.

    Args:
        klen: int or int scalar tensor, the number of keys.
        clamp_len: distances beyond it are all taken to be `clamp_len`; no limit unless positive.

    Returns:
        float32 `[klen]`.
    """
    pos_seq = tf.range(tf.cast(klen, tf.float32) - 1, -1, -1.0)
    return tf.minimum(pos_seq, clamp_len) if clamp_len > 0 else pos_seq


def positional_embedding(pos_seq, inv_freq, bsz=None):
    """Sinusoids of the given positions, all sines before all cosines (`positional_embedding` of the original).

    Batch first: the original returns `[K, 1, E]` or `[K, bsz, E]`.

    Args:
        pos_seq: float `[K]`, positions.
        inv_freq: float `[E / 2]`, see `inverse_frequencies`.
        bsz: int, repeats the embedding for every row of a batch.

    Returns:
        `[1, K, E]`, or `[bsz, K, E]` where `bsz` is given.
    """
    sinusoid_inp = tf.einsum("i,j->ij", pos_seq, inv_freq)
    pos_emb = tf.concat([tf.sin(sinusoid_inp), tf.cos(sinusoid_inp)], -1)[None]
    return pos_emb if bsz is None else tf.tile(pos_emb, [bsz, 1, 1])
