"""The first segment of a text: the network's numbers after zero memories, without a product with them.

Zero memories have zero keys and values. Of their scores only those of their positions are left, and they add nothing to
what the heads find; they only take their share of the softmax. So many short texts side by side cost little more than
their own tokens, however long the memory is.

Shapes:
    B: batch      T: tgt_len      H: n_head      D: d_head      E: d_model      M: mem_len      K: M + T
"""

import tensorflow as tf

from txl_tf.layers.attention import create_mask, shifted_scores
from txl_tf.models.transformer_xl.cache import run_layers, weights_with


def first_segment(network, tokens):
    """`network(tokens, network.initial_mems(B))`, without the new memory.

    Args:
        network: `TransformerXL`.
        tokens: int `[B, T]`. What stands to the right of a token does not count for it, so that rows of unequal length
            may be filled up.

    Returns:
        `[B, T, E]`.
    """
    tgt_len, mem_len = tf.shape(tokens)[1], network.mem_len
    weights = weights_with(network, _position_keys(network, mem_len + tgt_len))
    masked = 1e30 * create_mask(tgt_len, mem_len, network.same_length)

    def attention(i, q, k, v):
        q, k, v = (tf.transpose(x, [1, 0, 2, 3]) for x in (q, k, v))  # heads first
        rw_q, rr_q = (q + bias[:, None, None] for bias in (weights[i].r_w_bias, weights[i].r_r_bias))
        position_scores = shifted_scores(rr_q, weights[i].position_keys, first=tgt_len - 1)
        of_memory, of_segment = position_scores[..., :mem_len], position_scores[..., mem_len:]
        scores = tf.concat([of_memory, of_segment + tf.matmul(rw_q, k, transpose_b=True)], -1)  # [H, B, T, K]
        probs = tf.nn.softmax(tf.cast(scores, tf.float32) - masked)  # in float32, as `attention_probs`
        return tf.transpose(tf.matmul(tf.cast(probs[..., mem_len:], v.dtype), v), [1, 0, 2, 3])

    return run_layers(network, weights, network.embedding(tokens), attention)


def _position_keys(network, klen):
    """Of each layer `[H, K + 1, D]`: of the distances `K - 1, ..., 0`, and a row of zeros that `rel_shift` cuts off."""
    pos_emb = tf.cast(network.positions(klen)[0], network.compute_dtype)

    def table(layer):
        r_k = tf.matmul(pos_emb, tf.cast(layer.rel_attn.r_kernel, pos_emb.dtype))
        r_k = tf.transpose(tf.reshape(r_k, [klen, network.n_head, network.d_head]), [1, 0, 2])
        return tf.pad(r_k, [[0, 0], [0, 1], [0, 0]])

    return tuple(map(table, network.decoder_layers))
