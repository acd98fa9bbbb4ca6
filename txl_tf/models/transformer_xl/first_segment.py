"""The first segment of a text: the network's numbers after zero memories, without a product with them.

Zero memories have zero keys and values. Of their scores only those of their positions are left, and they add nothing to
what the heads find; they only take their share of the softmax. So many short texts side by side cost little more than
their own tokens, however long the memory is.

Shapes:
    B: batch      T: tgt_len      H: n_head      D: d_head      E: d_model      M: mem_len      K: M + T
"""

import tensorflow as tf

from txl_tf.layers.attention import masked_softmax, shifted_scores
from txl_tf.layers.transformer_xl.attention import create_mask
from txl_tf.models.transformer_xl.inference import projected_positions, run_layers, weights_with


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
    # A row of zeros, which `rel_shift` cuts off.
    position_keys = [tf.pad(r_k, [[0, 0], [0, 1], [0, 0]]) for r_k in projected_positions(network, mem_len + tgt_len)]
    weights = weights_with(network, position_keys)
    visible = create_mask(tgt_len, mem_len, network.same_length) == 0

    def attention(i, q, k, v):
        q, k, v = (tf.transpose(x, [1, 0, 2, 3]) for x in (q, k, v))  # heads first
        rw_q, rr_q = (q + bias[:, None, None] for bias in (weights[i].r_w_bias, weights[i].r_r_bias))
        position_scores = shifted_scores(rr_q, weights[i].position_keys, first=tgt_len - 1)
        of_memory, of_segment = position_scores[..., :mem_len], position_scores[..., mem_len:]
        scores = tf.concat([of_memory, of_segment + tf.matmul(rw_q, k, transpose_b=True)], -1)  # [H, B, T, K]
        probs = masked_softmax(scores, visible)
        return tf.transpose(tf.matmul(probs[..., mem_len:], v), [1, 0, 2, 3])

    return run_layers(network, weights, network.embedding(tokens), attention)
