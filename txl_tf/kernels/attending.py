"""The core of attention, for every family of models: a softmax over keys, times the values.

    probs = attention_probs(q, k, position_scores, visible)     softmax over keys of q.k + position_scores
    out = attend(q, k, v, position_scores, visible)             probs times values

The families differ only in `position_scores`. They come from `shifted_scores` of the equations, which uses a table of
distances, or from `pairwise_scores`, which uses one vector for every pair of query and key.

Heads are the first axis: with `[H, B * T, D]`, the position scores of a head are one matrix product for the whole
batch. `[B, H, T, D]` would need one product for every row of the batch. The exception is `RowsFirst`.

Shapes:
    B: batch        T: tgt_len, the queries        K: keys        H: heads        D: d_head
"""

from typing import Any, NamedTuple

import tensorflow as tf

import txl_tf.kernels as ops
from txl_tf.kernels.dropout import dropout
from txl_tf.kernels.shapes import Tensor
from txl_tf.kernels.threads import operations_at_a_time, shares
from txl_tf.kernels.watching import current_record


class RowsFirst(NamedTuple):
    """A tensor in which rows come before heads, because the cache stores them so. Each row has a single query."""

    tensor: Tensor  # [B, H, 1, D] of queries, [B, H, K, D] of keys or values


def attention_probs(
    q: Tensor, k: Tensor, position_scores: Tensor | None = None, visible: Tensor | None = None, scale: float = 1.0,
    content: Tensor | None = None, zero_keys: Any = 0,
) -> Tensor:  # fmt: skip
    """`softmax((q.k + position_scores) * scale)` over the keys that a query sees.

    Args: as in `attend`, but `position_scores` cannot be a list.

    Returns:
        `[H, ..., T, K]`. With `zero_keys`, the probabilities of these keys come first: `[H, ..., T, zero_keys + K]`.
    """
    q, position_scores = _scaled(q, position_scores, scale)
    scores: Any = ops.head_matmul(q, k, transpose_b=True)  # [H, ..., T, K]
    scores = scores if content is None else scores * content
    if zero_keys:
        scores = tf.pad(scores, [[0, 0]] * (len(scores.shape) - 1) + [[zero_keys, 0]])
    if position_scores is not None:
        n_missing = len(scores.shape) - len(position_scores.shape)
        if zero_keys or n_missing:  # `masked_softmax` expects both in the same shape
            scores = scores + position_scores[:, *[None] * n_missing]  # [H, 1, T, K] for all rows
            position_scores = None
    return ops.masked_softmax(scores, visible, position_scores)


def attend(
    q: Tensor, k: Tensor, v: Tensor, position_scores: Tensor | list[Tensor] | None = None,
    visible: Tensor | None = None, scale: float = 1.0, dropatt: float = 0.0, dropout_key: Tensor | None = None, *,
    content: Tensor | None = None, zero_keys: Any = 0, zero_value: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attention: `softmax((q.k + position_scores) * scale)` over the keys, times the values.

    Args:
        q: `[H, ..., T, D]`, queries.
        k, v: `[H, ..., K, D]`, keys and values. `q`, `k` and `v` may also be `RowsFirst`. Then position scores are
            still heads first, but `visible` is rows first; the last three arguments must have their defaults.
        position_scores: `[H, ..., T, K]`, see `shifted_scores` and `pairwise_scores`; or `[H, T, K]`, the same for all
            rows of the batch; or `None`. For a single query, also a list with one tensor for each head.
        visible: bool, true where a query sees a key; `[T, K]` or another shape that broadcasts to `[H, ..., T, K]`.
            `None`: queries see all keys.
        scale: factor of the scores. Transformer-XL scales its queries once, before it computes both kinds of scores,
            so it leaves this at 1.
        dropatt: dropout rate of the probabilities. Axis 1 is the row of the batch.
        dropout_key: int `[3]`, see `dropout`, or `None` for no dropout.
        content: 0 where key and value count as zeros for a query, else 1; broadcasts to `[H, ..., T, K]`.
        zero_keys: int, the number of keys and values that are zeros and come before `k` and `v`. They get their share
            of the softmax, but nothing is multiplied by them. `position_scores` and `visible` have columns for them,
            too: the first of `zero_keys + K`.
        zero_value: broadcasts to `[H, ..., 1, D]`, the vector that was subtracted from all values, see `Zeros` of the
            equations. It is added to the result, times the sum of the probabilities.

    Returns:
        `[H, ..., T, D]`, in the dtype of `q`; for `RowsFirst`, `[B, H, 1, D]`.
    """
    if isinstance(q, RowsFirst):
        q, position_scores = _scaled(q.tensor, position_scores, scale)
        return _attend_rows_first(q, k.tensor, v.tensor, position_scores, visible, dropatt, dropout_key)
    needs_no_probs = dropout_key is None and content is None and not zero_keys and current_record() is None
    if needs_no_probs and ops.takes_one_query(q, visible):
        q, position_scores = _scaled(q, position_scores, scale)
        return ops.attend_with_one_query(q, k, v, position_scores, visible)
    position_scores = tf.stack(position_scores) if isinstance(position_scores, list) else position_scores
    probs = attention_probs(q, k, position_scores, visible, scale, content, zero_keys)
    record = current_record()
    if record is not None:
        record.probs.append(probs)
    probs = dropout(probs, dropatt, dropout_key, row_axis=1)
    added = None if zero_value is None else tf.reduce_sum(probs, -1, keepdims=True) * zero_value
    probs = probs if content is None else probs * content
    output = ops.head_matmul(probs[..., zero_keys:] if zero_keys else probs, v)
    return output if added is None else output + added


def _attend_rows_first(
    q: Tensor, k: Tensor, v: Tensor, position_scores: Any, visible: Tensor | None, dropatt: float, dropout_key: Any
) -> Any:
    """`attend` for a single query in each row, see `RowsFirst`.

    Args:
        q: `[B, H, 1, D]`.
        k, v: `[B, H, K, D]`.
        position_scores: heads first, as in `attend`.
        visible: broadcasts to `[B, H, 1, K]`.
        dropatt, dropout_key: as in `attend`.

    Returns:
        `[B, H, 1, D]`.
    """
    if isinstance(position_scores, list):
        # From `[B, 1, K]` of each head to `[B, H, 1, K]`, or from `[1, K]` of each head to `[H, 1, K]`.
        position_scores = tf.stack(position_scores, len(position_scores[0].shape) - 2)
    elif position_scores is not None and len(position_scores.shape) == 4:
        position_scores = tf.transpose(position_scores, [1, 0, 2, 3])

    def attend_rows(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, position_scores: Tensor | None) -> Any:
        """Attention of all rows that the arguments have."""
        probs = ops.masked_softmax(ops.query_matmul(q, k, transpose_b=True), visible, position_scores)
        return ops.query_matmul(dropout(probs, dropatt, dropout_key), v)

    arguments = (q, k, v, visible, position_scores)
    n_rows = q.shape[0]
    if n_rows is None or dropout_key is not None or operations_at_a_time() == 1:
        return attend_rows(*arguments)
    # One core computes the position scores first, so there are two shares for each core.
    return tf.concat([attend_rows(*(_some_rows(x, rows) for x in arguments)) for rows in shares(n_rows, 2)], 0)


def _some_rows(x: Tensor | None, rows: slice) -> Tensor | None:
    """These rows of a tensor `[B, H, any, any]`. What is the same for all rows is returned unchanged."""
    return x if x is None or len(x.shape) < 4 or x.shape[0] == 1 else x[rows]


def _scaled(q: Tensor, position_scores: Tensor | None, scale: float) -> tuple[Tensor, Tensor | None]:
    """`(q * scale, position_scores * scale)`. Scaling `q` is cheaper than scaling `q.k`."""
    if scale == 1.0:
        return q, position_scores
    # `tf.multiply` also accepts a list with the scores of each head.
    return q * scale, None if position_scores is None else tf.multiply(position_scores, scale)
