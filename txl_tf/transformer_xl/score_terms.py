"""The four terms of Transformer-XL's attention scores, one by one (paper, section 3.3, equation of A^rel).

Attention never computes them apart, see `attention` in `txl_tf/equations.py`. Here they are for pictures and tests.
"""

import tensorflow as tf

import txl_tf.equations as equations
from txl_tf.kernels.watching import watching
from txl_tf.transformer_xl.attention import rel_multihead_attn


def score_terms(w, r, r_w_bias, r_r_bias, mems, qkv_kernel, r_kernel, content_mask=None):
    """The terms (a) to (d) of the scores of every head; their sum is what the softmax gets, before the mask.

    Args: those of `rel_multihead_attn`, without `attn_mask` and `o_kernel`:
        w, r, r_w_bias, r_r_bias, mems, content_mask: as there; `mems` may be `None`.
        qkv_kernel: `[E, 3 * H * D]`, queries, then keys, then values.
        r_kernel: `[E, H * D]`.

    Returns:
        `(a, b, c, d)`, `[H, B, T, K]` each, in the dtype of `w`, divided by the square root of D. (b) and (d) have some
        other distance's score at keys that lie in the future, see `rel_shift`.
    """
    o_kernel = tf.zeros(r_kernel.shape[::-1], r_kernel.dtype)  # of no effect on the scores
    with watching() as watched:
        rel_multihead_attn(
            w, r, r_w_bias, r_r_bias, None, mems, qkv_kernel, r_kernel, o_kernel, content_mask=content_mask
        )
    return terms_of(watched, r_w_bias, r_r_bias)


def terms_of(watched, r_w_bias, r_r_bias, number=0):
    """`score_terms` of an attention that a `Seen` has."""
    q, k, places = watched.parts[number]
    scale = r_w_bias.shape[1] ** -0.5
    return equations.score_terms(q, k, places.r, r_w_bias, r_r_bias, scale, places.first, **places.special)
