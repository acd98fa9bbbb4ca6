"""The four terms of Transformer-XL's attention scores, separately (paper, section 3.3, equation of A^rel).

Attention never computes them separately, see `attention` in `txl_tf/equations.py`. They are for pictures and tests.
"""

from typing import Any

import tensorflow as tf

import txl_tf.equations as equations
from txl_tf.kernels.shapes import Tensor
from txl_tf.kernels.watching import AttentionRecord, watching
from txl_tf.transformer_xl.attention import rel_multihead_attn


def score_terms(
    w: Tensor, r: Tensor, r_w_bias: Tensor, r_r_bias: Tensor, mems: Tensor | None, qkv_kernel: Tensor, r_kernel: Tensor,
    content_mask: Tensor | None = None,
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    """The terms (a) to (d) of the scores of every head. Their sum, masked, is the input of the softmax.

    Args:
        w, r, r_w_bias, r_r_bias, mems, content_mask: see `rel_multihead_attn`. `mems` may be `None`.
        qkv_kernel: `[E, 3 * H * D]`, the kernels of queries, keys and values, side by side.
        r_kernel: `[E, H * D]`.

    Returns:
        `(a, b, c, d)`, `[H, B, T, K]` each, in the dtype of `w`, divided by the square root of D. At keys in the
        future, (b) and (d) contain the score of another distance, see `rel_shift`.
    """
    o_kernel = tf.zeros(r_kernel.shape[::-1], r_kernel.dtype)  # the scores depend only on its shape
    with watching() as record:
        rel_multihead_attn(
            w, r, r_w_bias, r_r_bias, None, mems, qkv_kernel, r_kernel, o_kernel, content_mask=content_mask
        )
    return terms_of(record, r_w_bias, r_r_bias)


def terms_of(record: AttentionRecord, r_w_bias: Tensor, r_r_bias: Tensor, number: int = 0) -> tuple[Any, Any, Any, Any]:
    """The `score_terms` of one of the attentions that were watched: `number` counts them from 0 on."""
    q, k, key_positions = record.parts[number]
    scale = equations.score_scale(r_w_bias.shape[1])
    return equations.score_terms(q, k, key_positions, r_w_bias, r_r_bias, scale)
