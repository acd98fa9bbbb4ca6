"""Attention: one core for every family of models.

    probs = attention_probs(q, k, position_scores, visible)     softmax over keys of q.k + position_scores
    out = attend(q, k, v, position_scores, visible)             probs times values

What the families differ in is `position_scores`:

    shifted_scores(q, r, first)     scores against a table of distances, moved to the keys by `rel_shift`
    pairwise_scores(q, r)           scores against a vector of its own for every pair of query and key

Shapes:
    B: batch        T: qlen, the queries        K: klen, the keys
    H: n_head       D: d_head                   E: d_model                 R: rows of a table of distances

Inside, heads come first: with `[H, B * T, D]` the position scores of a head are one matrix product for the whole
batch, where `[B, H, T, D]` would need one for every row.
"""

import keras
import tensorflow as tf

from txl_tf.errors import ParameterError
from txl_tf.layers.common.base import check_tensors, shown
from txl_tf.layers.common.dropout import dropout
from txl_tf.layers.common.dtypes import at_least_float32, is_half, wide_dtype
from txl_tf.layers.common.fusion import fused, pays
from txl_tf.layers.common.gradients import custom_gradient
from txl_tf.layers.common.ops import project
from txl_tf.layers.common.precision import matmul

# Columns that XLA has the maxima of at once; keys must be a multiple of them.
_LANES = 32

# ------------------------------------------------------------------------------------------------------------ core


def attend(q, k, v, position_scores=None, visible=None, scale=1.0, dropatt=0.0, dropout_key=None):
    """Attention: `softmax((q.k + position_scores) * scale)` over the keys, times the values.

    Args:
        q: `[H, ..., T, D]`, queries.
        k, v: `[H, ..., K, D]`, keys and values.
        position_scores: `[H, ..., T, K]`, see `shifted_scores` and `pairwise_scores`; `None` for none. Of one query
            also a list of the heads.
        visible: bool, `[T, K]` or what broadcasts to `[H, ..., T, K]`: which keys a query sees; `None` for all.
        scale: float. Transformer-XL scales its queries once, before both kinds of scores, and leaves this at 1.
        dropatt: dropout rate of the probabilities. Rows of the batch are axis 1.
        dropout_key: int `[3]`, see `dropout`, or `None` for no dropout.

    Returns:
        `[H, ..., T, D]`, in the dtype of `q`.
    """
    is_one = q.shape[-2] == 1 and len(q.shape) == 3 and (visible is None or len(visible.shape) == 2)
    if is_one and dropout_key is None and q.dtype != tf.float16:
        return _attend_with_one_query(*_scaled(q, position_scores, scale), k, v, visible)
    position_scores = tf.stack(position_scores) if isinstance(position_scores, list) else position_scores
    probs = attention_probs(q, k, position_scores, visible, scale)
    return head_matmul(dropout(probs, dropatt, dropout_key, row_axis=1), v)


def _scaled(q, position_scores, scale):
    """What gives both kinds of scores times the scale: of products the queries, which are fewer numbers than those."""
    if scale == 1.0:
        return q, position_scores
    return q * scale, None if position_scores is None else tf.multiply(position_scores, scale)


def _attend_with_one_query(q, position_scores, k, v, visible):
    """`attend` for `q` `[H, 1, D]`, head by head: the largest score and the sum are scalars, which are faster to apply.

    What the values add up to is divided by the sum: those are fewer numbers than probabilities. float16 might not hold
    them.
    """
    hidden = None if visible is None else _hidden(visible, wide_dtype(q))

    def attend_head(q, k, v, position_scores=None):
        scores = tf.matmul(q, k, transpose_b=True)
        scores = scores if position_scores is None else scores + position_scores
        scores = at_least_float32(scores) if hidden is None else at_least_float32(scores) - hidden
        exp = tf.exp(scores - tf.reduce_max(scores))
        values = at_least_float32(tf.matmul(tf.cast(exp, v.dtype), v))
        return tf.cast(values / tf.reduce_sum(exp), v.dtype)

    given = [q, k, v] if position_scores is None else [q, k, v, position_scores]
    return tf.stack([attend_head(*of_head) for of_head in zip(*map(_heads_of, given), strict=True)])


def _heads_of(x):
    """The heads of a tensor `[H, ...]`, or the list that it is already."""
    return x if isinstance(x, list) else tf.unstack(x)


def attention_probs(q, k, position_scores=None, visible=None, scale=1.0):
    """The probabilities of `attend`: `[H, ..., T, K]`, in the dtype of `q`; each row sums to 1."""
    q, position_scores = _scaled(q, position_scores, scale)
    scores = head_matmul(q, k, transpose_b=True)
    return masked_softmax(scores, visible, position_scores)


def masked_softmax(scores, visible=None, position_scores=None):
    """The softmax of scores over the keys that a query sees, in their dtype.

    Args:
        scores: `[..., T, K]`.
        visible, position_scores: as in `attend`.
    """
    shape = keras.ops.shape(scores)
    if not pays(shape):
        return _softmax(scores, visible, position_scores)

    @custom_gradient
    def one_pass(*scores):
        if is_half(scores[0].dtype) and shape[-1] % _LANES == 0:
            probs = _half_softmax(shape, visible, *scores)
        else:
            probs = _softmax(scores[0], visible, *scores[1:])

        def grad(upstream):
            return [_softmax_grad(shape, probs, upstream)] * len(scores)

        return probs, grad

    return one_pass(scores) if position_scores is None else one_pass(scores, position_scores)


def _softmax(scores, visible=None, position_scores=None):
    dtype, scores = scores.dtype, _seen_scores(visible, scores, position_scores)
    if scores.shape[-2] == 1:  # TensorFlow's softmax takes three times as long for so few numbers
        probs = tf.exp(scores - tf.reduce_max(scores, -1, keepdims=True))
        probs /= tf.reduce_sum(probs, -1, keepdims=True)
    else:
        probs = tf.nn.softmax(scores)
    return tf.cast(probs, dtype)


def _seen_scores(visible, scores, position_scores=None):
    # Half precision holds neither -1e30 nor the sum of many small probabilities: the softmax is in float32.
    scores = at_least_float32(scores if position_scores is None else scores + position_scores)
    return scores if visible is None else scores - _hidden(visible, scores.dtype)


def _hidden(visible, dtype):
    """What is subtracted from scores: 1e30 where a key is not seen."""
    return 1e30 * tf.cast(~tf.cast(visible, tf.bool), dtype)


@fused
def _half_softmax(shape, visible, *scores):
    """`_softmax` as XLA compiles it best: first the maxima of every `_LANES`-th column, and a sum as a product."""
    seen = _seen_scores(visible, *scores)
    of_columns = tf.reduce_max(tf.reshape(seen, [*shape[:-1], -1, _LANES]), -2)
    exp = tf.exp(seen - tf.reduce_max(of_columns, -1, keepdims=True))
    return tf.cast(exp / _sum_of_columns(exp), scores[0].dtype)


@fused
def _softmax_grad(shape, probs, upstream):
    """The gradient of scores. It is 0 for an upstream that is one number everywhere, however `probs` are rounded."""
    dtype, probs, upstream = probs.dtype, at_least_float32(probs), at_least_float32(upstream)
    mean = _sum_of_columns(upstream * probs) / _sum_of_columns(probs)
    return tf.cast((upstream - mean) * probs, dtype)


def _sum_of_columns(x):
    return tf.linalg.matvec(x, tf.ones([x.shape[-1]], x.dtype))[..., None]


def head_matmul(a, b, transpose_b=False):
    """`tf.matmul` of `a` `[H, ..., T, any]`; of one query `[H, 1, any]` head by head, twice as fast.

    `b` may then be a list of its heads.
    """
    if a.shape[-2] != 1 or len(a.shape) > 3:
        return tf.matmul(a, b, transpose_b=transpose_b)
    return tf.stack(products_of_heads(a, b, transpose_b))


def products_of_heads(a, b, transpose_b=False):
    """`head_matmul` of one query, as a list of the heads."""
    heads = zip(tf.unstack(a), _heads_of(b), strict=True)
    return [tf.matmul(x, y, transpose_b=transpose_b) for x, y in heads]


def shifted_scores(q, r, first):
    """Scores of the queries against a table of distances, moved so that they stand at their keys.

    Row x of the table belongs to the key j of the query i for which `x = first + j - i`. Distances in one direction
    (Transformer-XL) are a table of `K + 1` rows, distances in both (TENER) one of `2 * T` rows.

    Args:
        q: `[H, ..., T, D]`, queries.
        r: `[H, R, D]`, the table.
        first: int or int scalar tensor in `[0, T]`, the row of the first query and the first key.

    Returns:
        `[H, ..., T, R - 1]`; see `rel_shift` for columns that have no row.
    """
    n_head, *rows, d_head = keras.ops.shape(q)
    scores = tf.matmul(tf.reshape(q, [n_head, -1, d_head]), r, transpose_b=True)
    return rel_shift(tf.reshape(scores, [n_head, *rows, keras.ops.shape(r)[1]]), first)


def pairwise_scores(q, r, index=None):
    """Scores of the queries against a vector for every pair: `q_i . r_ij` (FLAT).

    Args:
        q: `[H, B, T, D]`.
        r: `[H, B, T, K, D]`. With `index`, the vectors that differ, `[U, H, D]`.
        index: int32 `[B, T, K]`, which of the vectors each pair has.

    Returns:
        `[H, B, T, K]`.
    """
    if index is None:
        return tf.linalg.matvec(r, q)
    return _indexed_scores(q, r, index)


@custom_gradient
def _indexed_scores(q, r, index):
    """`pairwise_scores` of vectors that many pairs share. Those of the pairs are made twice, but never kept.

    The heads of a vector stay side by side, `[T * K, H * D]`: with the query as a matrix `[H * D, H]` that holds each
    head in its own rows and column, the scores of all heads are one product.
    """
    n_head, batch, qlen, d_head = keras.ops.shape(q)
    rows = tf.reshape(r, [-1, n_head * d_head])
    pairs = tf.reshape(index, [batch * qlen, -1])
    queries = tf.reshape(tf.transpose(q, [1, 2, 0, 3]), [batch * qlen, n_head, d_head])
    by_head = tf.eye(n_head, dtype=q.dtype)[:, None]
    blocks = tf.reshape(queries[..., None] * by_head, [batch * qlen, n_head * d_head, n_head])
    scores = tf.matmul(tf.gather(rows, pairs), blocks)  # [B * T, K, H]

    def grad(upstream):
        upstream = tf.reshape(tf.transpose(upstream, [1, 2, 3, 0]), [batch * qlen, -1, n_head])
        of_blocks = tf.matmul(tf.gather(rows, pairs), upstream, transpose_a=True)  # [B * T, H * D, H]
        of_queries = tf.reduce_sum(tf.reshape(of_blocks, [batch * qlen, n_head, d_head, n_head]) * by_head, -1)
        of_pairs = tf.reshape(tf.matmul(upstream, blocks, transpose_b=True), [-1, n_head * d_head])
        of_rows = tf.math.unsorted_segment_sum(of_pairs, tf.reshape(pairs, [-1]), tf.shape(rows)[0])
        of_q = tf.transpose(tf.reshape(of_queries, [batch, qlen, n_head, d_head]), [2, 0, 1, 3])
        return of_q, tf.reshape(of_rows, tf.shape(r)), None

    return tf.transpose(tf.reshape(scores, [batch, qlen, -1, n_head]), [3, 0, 1, 2]), grad


def rel_shift(x, first=None, time_major=False):
    """`[..., T, K]` by distance to `[..., T, K]` by key; with `time_major`, the original's `[T, K, B, H]` (appendix B).

    Moves row i of a matrix i places to the right: `out[..., i, j] = x[..., i, first + j - i]`.

    Row i of `x` holds the scores of query i by distance; attention wants them by key, and the distance of a key falls
    from one query to the next. Read with rows one shorter, every row starts one place later than the one before it.
    With 2 queries, `first` 2:

        0 a b c    without the first 2,    b c 0
        0 d e f    as rows of 3: ----->    d e f

    A column whose index lies outside of its row of `x` holds what stands there in memory, some other row's score. In
    Transformer-XL those are the keys to the right of the diagonal, which lie in the future and are masked.

    Args:
        x: `[..., T, R]`, at least two dimensions; with `time_major`, float `[T, R, B, H]`.
        first: int or int scalar tensor in `[0, T]`. `None` is the original's function: `x` is `[..., T, K]` with the
            distances `K - 1, ..., 0` of the last query; a column of zeros is put in front, and `first` is T.
        time_major: whether queries and keys come first, in `x` and in the result, as in the original.

    Returns:
        `[..., T, R - 1]`, or `[T, R - 1, B, H]`; where `first` is `None`, a tensor like `x`.

    Raises:
        ParameterError: `first` is `None` and there are fewer keys than queries, as in the original's layout.
    """
    if time_major:
        check_tensors({}, x=(x, "float qlen klen batch n_head"))
        return tf.transpose(rel_shift(tf.transpose(x, [2, 3, 0, 1]), first), [2, 3, 0, 1])
    if first is None:
        qlen, klen = x.shape[-2:]
        if None not in (qlen, klen) and klen < qlen:
            allowed = "[..., qlen, klen] with klen of qlen or more"
            message = f"x must be {allowed}, got {shown(x)}: did you mean time_major=True?"
            raise ParameterError("x", x, allowed, message)
        x = tf.pad(x, [[0, 0]] * (len(x.shape) - 1) + [[1, 0]])
        first = keras.ops.shape(x)[-2]
    *lead, qlen, width = keras.ops.shape(x)
    x = tf.reshape(x, [-1, qlen * width])
    x = tf.slice(x, [0, first], [-1, qlen * (width - 1)])  # the gradient of x[:, first:] is ten times slower
    return tf.reshape(x, [*lead, qlen, width - 1])


# --------------------------------------------------------------------------------------------------- projections


def project_heads(x, kernel, n, n_head):
    """The `n` projections of `x` `[B, any, E]` that stand side by side in `kernel`, `[H, B, any, D]` each."""
    batch, length, width = keras.ops.shape(x)
    d_head = kernel.shape[1] // (n * n_head)
    if pays([n * n_head, batch, length, d_head]):
        heads = _heads_first(tf.reshape(x, [-1, width]), kernel, n * n_head)
        return tf.unstack(tf.reshape(heads, [n, n_head, batch, length, d_head]))
    heads = tf.reshape(project(x, kernel), [batch, length, n, n_head, d_head])
    return tf.unstack(tf.transpose(heads, [2, 3, 0, 1, 4]))


def _heads_first(rows, kernel, number):
    """`rows` `[n, E]` times `kernel` `[E, number * D]`, a product for every head: `[number, n, D]`, without a copy."""

    @custom_gradient
    def product(rows, kernel):
        def grad(upstream):
            upstream = tf.reshape(tf.transpose(upstream, [1, 0, 2]), [-1, kernel.shape[1]])
            return matmul(upstream, kernel, transpose_b=True), matmul(rows, upstream, transpose_a=True)

        return tf.matmul(rows[None], _by_head(kernel, number)), grad

    return product(rows, kernel)


def _by_head(kernel, number):
    """The parts of a kernel `[E, number * D]` one after the other: `[number, E, D]`."""
    return tf.transpose(tf.reshape(kernel, [kernel.shape[0], number, -1]), [1, 0, 2])


def join_heads(x):
    """Heads `[H, B, T, D]` side by side: `[B, T, H * D]`."""
    n_head, batch, length, d_head = keras.ops.shape(x)
    return tf.reshape(tf.transpose(x, [1, 2, 0, 3]), [batch, length, n_head * d_head])


def project_output(attn_vec, o_kernel):
    """What the heads found, `[H, B, T, D]`, side by side and projected: `[B, T, E]`.

    Where that pays, its gradient is a product for every head, as in `_heads_first`.
    """
    n_head, batch, qlen, d_head = keras.ops.shape(attn_vec)
    shape = [batch, qlen, o_kernel.shape[1]]
    if not pays([n_head, batch, qlen, d_head]):
        return tf.reshape(project(join_heads(attn_vec), o_kernel), shape)

    @custom_gradient
    def product(attn_vec, o_kernel):
        rows = tf.reshape(join_heads(attn_vec), [-1, n_head * d_head])

        def grad(upstream):
            of_heads = tf.matmul(upstream[None], _by_head(tf.transpose(o_kernel), n_head))
            return tf.reshape(of_heads, [n_head, batch, qlen, d_head]), matmul(rows, upstream, transpose_a=True)

        return matmul(rows, o_kernel), grad

    return tf.reshape(product(attn_vec, o_kernel), shape)
