"""The four terms of Transformer-XL's attention scores, one by one (paper, section 3.3, equation of A^rel).

    (a) q . k     content: what the query holds against what is at the key
    (b) q . r     position, by what the query holds: against the distance of the key
    (c) u . k     content for every query alike: how much the key is worth looking at
    (d) v . r     position for every query alike: how much the distance is worth looking at

Attention never computes them apart: (a) and (c) are one product, `(q + u) . k`, and so are (b) and (d). Here they are
for pictures and tests.
"""

import keras
import tensorflow as tf

from txl_tf.layers.attention import project_heads, shifted_scores
from txl_tf.layers.transformer_xl.attention import project_segment


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
    n_head, d_head = r_w_bias.shape
    q, k, _ = project_segment(w, mems, qkv_kernel, n_head)
    (r_k,) = project_heads(r, r_kernel, 1, n_head)
    r_k = tf.pad(tf.squeeze(r_k, 1), [[0, 0], [1, 0], [0, 0]])  # a zero key for the zero column of rel_shift
    q, u, v = (
        tf.broadcast_to(x, tf.shape(q)) * d_head**-0.5 for x in (q, r_w_bias[:, None, None], r_r_bias[:, None, None])
    )
    a, c = (tf.matmul(x, k, transpose_b=True) for x in (q, u))
    b, d = (shifted_scores(x, r_k, first=keras.ops.shape(q)[2]) for x in (q, v))
    if content_mask is None:
        return a, b, c, d
    content_mask = tf.cast(content_mask, a.dtype)
    return a * content_mask, b, c * content_mask, d
