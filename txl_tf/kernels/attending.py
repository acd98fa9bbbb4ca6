"""The core of attention, for every family of models: a softmax over keys, times the values.

    probs = attention_probs(q, k, position_scores, visible)     softmax over keys of q.k + position_scores
    out = attend(q, k, v, position_scores, visible)             probs times values

What the families differ in is `position_scores`: `shifted_scores` of the equations, from a table of distances, or
`pairwise_scores`, from a vector of its own for every pair of query and key.

Inside, heads come first: with `[H, B * T, D]` the position scores of a head are one matrix product for the whole
batch, where `[B, H, T, D]` would need one for every row.

Shapes:
    B: batch        T: tgt_len, the queries        K: keys        H: heads        D: d_head
"""

import tensorflow as tf

from txl_tf.kernels import chosen as ops
from txl_tf.kernels.dropout import dropout
from txl_tf.kernels.watching import watched


def attention_probs(q, k, position_scores=None, visible=None, scale=1.0, content=None, zero_keys=0):
    """`softmax((q.k + position_scores) * scale)` over the keys that a query sees: `[H, ..., T, K]`.

    Args: as in `attend`.
    """
    q, position_scores = _scaled(q, position_scores, scale)
    scores = ops.head_matmul(q, k, transpose_b=True)  # [H, ..., T, K]
    scores = scores if content is None else scores * content
    if zero_keys:
        scores = tf.pad(scores, [[0, 0]] * (len(scores.shape) - 1) + [[zero_keys, 0]])
    is_for_all_rows = position_scores is not None and len(position_scores.shape) < len(scores.shape)
    if is_for_all_rows:
        position_scores = position_scores[:, None]  # [H, 1, T, K]
    if position_scores is not None and (zero_keys or is_for_all_rows):
        scores, position_scores = scores + position_scores, None
    return ops.masked_softmax(scores, visible, position_scores)


def attend(
    q, k, v, position_scores=None, visible=None, scale=1.0, dropatt=0.0, dropout_key=None, *, content=None, zero_keys=0
):
    """Attention: `softmax((q.k + position_scores) * scale)` over the keys, times the values.

    Args:
        q: `[H, ..., T, D]`, queries.
        k, v: `[H, ..., K, D]`, keys and values.
        position_scores: `[H, ..., T, K]`, see `shifted_scores` and `pairwise_scores`, or `[H, T, K]` for all rows;
            `None` for none. Of one query also a list of the heads.
        visible: bool, `[T, K]` or what broadcasts to `[H, ..., T, K]`: which keys a query sees; `None` for all.
        scale: float. Transformer-XL scales its queries once, before both kinds of scores, and leaves this at 1.
        dropatt: dropout rate of the probabilities. Rows of the batch are axis 1.
        dropout_key: int `[3]`, see `dropout`, or `None` for no dropout.
        content: `[H, ..., T, K]` or what broadcasts to it, 0 where key and value count as zeros for a query, else 1.
        zero_keys: int; as many keys and values of zeros stand in front of `k` and `v`, without being computed.

    Returns:
        `[H, ..., T, D]`, in the dtype of `q`.
    """
    is_plain = dropout_key is None and content is None and not zero_keys and watched() is None
    if is_plain and ops.takes_one_query(q, visible):
        q, position_scores = _scaled(q, position_scores, scale)
        return ops.attend_with_one_query(q, k, v, position_scores, visible)
    position_scores = tf.stack(position_scores) if isinstance(position_scores, list) else position_scores
    probs = attention_probs(q, k, position_scores, visible, scale, content, zero_keys)
    if watched() is not None:
        watched().probs.append(probs)
    probs = dropout(probs, dropatt, dropout_key, row_axis=1)
    probs = probs if content is None else probs * content
    return ops.head_matmul(probs[..., zero_keys:] if zero_keys else probs, v)


def _scaled(q, position_scores, scale):
    """`(q * scale, position_scores * scale)`. To scale `q` is cheaper than to scale `q.k`."""
    if scale == 1.0:
        return q, position_scores
    return q * scale, None if position_scores is None else tf.multiply(position_scores, scale)
