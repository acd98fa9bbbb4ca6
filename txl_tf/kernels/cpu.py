"""Faster versions of the operations in `kernels/plain.py`, for training and inference on CPUs.

Their gradients are written out where TensorFlow's own take more passes over the activations, or run on one thread.
XLA compiles a chain of small operations where that pays, see `kernels/fusion.py`. Arguments and results are those of
the plain versions, which have the docstrings.

Shapes:
    B: batch      T: tgt_len, the queries      K: keys      H: heads      D: d_head      E: d_model
"""

import keras
import tensorflow as tf

from txl_tf.kernels import plain
from txl_tf.kernels.dropout import NO_DROP, dropout, scale_of_kept
from txl_tf.kernels.dtypes import at_least_float32, is_half, scalar, wide_dtype
from txl_tf.kernels.fusion import fused, only_cpus, pays
from txl_tf.kernels.gradients import custom_gradient
from txl_tf.kernels.plain import hidden, join_heads, project, seen_scores
from txl_tf.kernels.precision import matmul

# XLA takes the maxima of this many columns at once; the number of keys must be a multiple of it.
_LANES = 32

# ------------------------------------------------------------------------------------------------------- projections


def add_bias(x, bias):
    """TensorFlow adds up the gradient of the bias in bfloat16 on CPUs: with 1,024 rows it is off by 4%."""
    sums_are_exact = x.dtype != tf.bfloat16 or x.shape[0] == 1 or not only_cpus()
    return tf.nn.bias_add(x, bias) if sums_are_exact else _add_bias(x, bias)


@custom_gradient
def _add_bias(x, bias):
    return tf.nn.bias_add(x, bias), lambda upstream: (upstream, sum_of_rows(upstream))


def sum_of_rows(x):
    """`[n, E]` to `[E]`, as a product: a sum takes several times as long."""
    return tf.linalg.matvec(x, tf.ones([keras.ops.shape(x)[0]], x.dtype), transpose_a=True)


def project_heads(x, kernel, n, n_head):
    batch, length, width = x.shape
    d_head = kernel.shape[1] // (n * n_head)
    if not pays([n * n_head, batch, length, d_head]):
        return plain.project_heads(x, kernel, n, n_head)
    heads = _heads_first(tf.reshape(x, [-1, width]), kernel, n * n_head)
    return tf.unstack(tf.reshape(heads, [n, n_head, batch, length, d_head]))


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


def project_output(attn_vec, o_kernel):
    if not pays(attn_vec.shape):
        return plain.project_output(attn_vec, o_kernel)
    n_head, batch, qlen, d_head = attn_vec.shape

    @custom_gradient
    def product(attn_vec, o_kernel):
        rows = tf.reshape(join_heads(attn_vec), [-1, n_head * d_head])

        def grad(upstream):
            of_heads = tf.matmul(upstream[None], _by_head(tf.transpose(o_kernel), n_head))
            return tf.reshape(of_heads, [n_head, batch, qlen, d_head]), matmul(rows, upstream, transpose_a=True)

        return matmul(rows, o_kernel), grad

    return tf.reshape(product(attn_vec, o_kernel), [batch, qlen, o_kernel.shape[1]])


# --------------------------------------------------------------------------------------------------------- attention


def head_matmul(a, b, transpose_b=False):
    """Of one query, `[H, 1, any]`, head by head: twice as fast. `b` may then be a list of its heads."""
    if a.shape[-2] != 1 or len(a.shape) > 3:
        return tf.matmul(a, b, transpose_b=transpose_b)
    return tf.stack(products_of_heads(a, b, transpose_b))


def products_of_heads(a, b, transpose_b=False):
    """`head_matmul` of one query, as a list of the heads."""
    heads = zip(tf.unstack(a), _heads_of(b), strict=True)
    return [tf.matmul(x, y, transpose_b=transpose_b) for x, y in heads]


def _heads_of(x):
    """The heads of a tensor `[H, ...]`, or the list that it is already."""
    return x if isinstance(x, list) else tf.unstack(x)


def takes_one_query(q, visible):
    """Whether `attend_with_one_query` takes the queries. float16 might not hold its sums."""
    return q.shape[-2] == 1 and len(q.shape) == 3 and q.dtype != tf.float16 and (
        visible is None or len(visible.shape) == 2
    )  # fmt: skip


def attend_with_one_query(q, k, v, position_scores=None, visible=None):
    """Attention of `q` `[H, 1, D]`, head by head: the largest score and the sum are scalars, which are fast to apply.

    The values are added up first, and then divided by the sum: those are fewer numbers than probabilities.
    `position_scores` may be a list of the heads.
    """
    unseen = None if visible is None else hidden(visible, wide_dtype(q))

    def attend_head(q, k, v, position_scores=None):
        scores = tf.matmul(q, k, transpose_b=True)
        scores = scores if position_scores is None else scores + position_scores
        scores = at_least_float32(scores) if unseen is None else at_least_float32(scores) - unseen
        exp = tf.exp(scores - tf.reduce_max(scores))
        values = at_least_float32(tf.matmul(tf.cast(exp, v.dtype), v))
        return tf.cast(values / tf.reduce_sum(exp), v.dtype)

    given = [q, k, v] if position_scores is None else [q, k, v, position_scores]
    return tf.stack([attend_head(*of_head) for of_head in zip(*map(_heads_of, given), strict=True)])


def masked_softmax(scores, visible=None, position_scores=None):
    if not pays(scores.shape):
        return _softmax(scores, visible, position_scores)
    shape = list(scores.shape)

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
    if scores.shape[-2] != 1:
        return plain.masked_softmax(scores, visible, position_scores)
    dtype, scores = scores.dtype, seen_scores(visible, scores, position_scores)
    probs = tf.exp(scores - tf.reduce_max(scores, -1, keepdims=True))  # tf.nn.softmax takes three times as long
    return tf.cast(probs / tf.reduce_sum(probs, -1, keepdims=True), dtype)


@fused
def _half_softmax(shape, visible, *scores):
    """`_softmax` as XLA compiles it best: first the maxima of every `_LANES`-th column, and a sum as a product."""
    seen = seen_scores(visible, *scores)
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


def pairwise_scores(q, r, index=None):
    return plain.pairwise_scores(q, r) if index is None else _indexed_scores(q, r, index)


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


# ---------------------------------------------------------------------------------------- on every position by itself


@custom_gradient
def embedding_lookup(table, ids):
    """The gradient is dense.

    TensorFlow's own gradient of a lookup is sparse, and adding it to the dense one of the softmax that shares the
    table concatenates the two into rows of both: many times the size of the table, and a wrong norm to clip by.
    """

    def grad(upstream):
        rows = tf.reshape(upstream, [-1, table.shape[1]])
        return tf.math.unsorted_segment_sum(rows, tf.reshape(ids, [-1]), table.shape[0]), None

    return tf.gather(table, ids), grad


@custom_gradient
def layer_norm(x, gamma, beta, epsilon):
    dtype, width, dtype_of_weights = x.dtype, x.shape[-1], gamma.dtype
    x, gamma, beta = at_least_float32(x), tf.cast(gamma, wide_dtype(x)), tf.cast(beta, wide_dtype(x))
    centered = x - tf.reduce_mean(x, -1, keepdims=True)
    scale = tf.math.rsqrt(tf.reduce_mean(tf.square(centered), -1, keepdims=True) + epsilon)
    normal = centered * scale

    def grad(upstream):
        shape, upstream = tf.shape(upstream), tf.reshape(at_least_float32(upstream), [-1, width])
        normal_rows = tf.reshape(normal, [-1, width])
        to_scale = upstream * normal_rows
        mean = tf.linalg.matvec(upstream, gamma / width)[:, None]  # a matrix product is faster than a sum
        slope = tf.linalg.matvec(to_scale, gamma / width)[:, None]
        of_x = (upstream * gamma - mean - normal_rows * slope) * tf.reshape(scale, [-1, 1])
        of_gamma, of_beta = (tf.cast(sum_of_rows(rows), dtype_of_weights) for rows in (to_scale, upstream))
        return tf.cast(tf.reshape(of_x, shape), dtype), of_gamma, of_beta, None

    return tf.cast(normal * gamma + beta, dtype), grad


def residual_norm(x, y, norm, drop=NO_DROP):
    """In half precision one pass forwards and one backwards, where that pays."""
    if callable(norm):
        return norm(x + drop(y))
    if not is_half(x.dtype) or not pays(x.shape):
        return layer_norm(x + drop(y), *norm)
    shape = list(x.shape)
    (gamma, beta, epsilon), (rate, dropout_key) = norm, drop

    @custom_gradient
    def one_pass(x, y, gamma, beta):
        out, normal, scale = _residual_norm(shape, x, y, gamma, beta, epsilon, rate, dropout_key)

        def grad(upstream):
            of_x, of_y, to_scale = _residual_norm_grad(shape, upstream, normal, scale, gamma, rate, dropout_key)
            rows = tf.reshape(tf.cast(upstream, tf.float32), [-1, shape[-1]])
            return of_x, of_y, sum_of_rows(tf.reshape(to_scale, [-1, shape[-1]])), sum_of_rows(rows)

        return out, grad

    return one_pass(x, y, gamma, beta)


@fused
def _residual_norm(shape, x, y, gamma, beta, epsilon, rate, dropout_key):
    """The result of `residual_norm`, what it is before gamma and beta, and the factor that made its variance 1."""
    both = tf.cast(x + dropout(y, rate, dropout_key), tf.float32)
    centered = both - tf.reduce_mean(both, -1, keepdims=True)
    scale = tf.math.rsqrt(tf.reduce_mean(tf.square(centered), -1, keepdims=True) + epsilon)
    normal = centered * scale
    return tf.cast(normal * gamma + beta, x.dtype), tf.cast(normal, x.dtype), scale


@fused
def _residual_norm_grad(shape, upstream, normal, scale, gamma, rate, dropout_key):
    """Gradients of `x` and `y`, and what the gradient of gamma is the sum of."""
    dtype, upstream, normal = upstream.dtype, tf.cast(upstream, tf.float32), tf.cast(normal, tf.float32)
    to_scale, to_normal = upstream * normal, upstream * gamma
    slope = tf.reduce_mean(to_scale * gamma, -1, keepdims=True)
    of_x = tf.cast((to_normal - tf.reduce_mean(to_normal, -1, keepdims=True) - normal * slope) * scale, dtype)
    return of_x, dropout(of_x, rate, dropout_key), to_scale


def relu_layer(x, kernel, bias, drop=NO_DROP):
    """One pass after the product and one backwards. The gradient goes where the result is above 0: no mask is kept."""
    shape = [*x.shape[:-1], kernel.shape[1]]
    if not pays(shape):
        inner = tf.nn.relu(add_bias(project(x, kernel), bias))
        return drop(tf.reshape(inner, [*keras.ops.shape(x)[:-1], kernel.shape[1]]))
    rate, dropout_key = drop
    drops = dropout_key is not None and rate > 0

    @custom_gradient
    def one_pass(product, bias):
        inner = tf.nn.relu(tf.nn.bias_add(product, bias))
        inner = _dropped(shape, inner, rate, dropout_key) if drops else tf.reshape(inner, shape)

        def grad(upstream):
            of_product = _dropped_relu_grad(shape, upstream, inner, scale_of_kept(rate) if drops else 1.0)
            return of_product, sum_of_rows(of_product)

        return inner, grad

    return one_pass(project(x, kernel), bias)


@fused
def _dropped(shape, x, rate, dropout_key):
    return dropout(tf.reshape(x, shape), rate, dropout_key)


@fused
def _dropped_relu_grad(shape, upstream, inner, scale):
    """The gradient of what the relu was taken of, `[n, F]`."""
    of_product = tf.where(inner > 0, upstream * scalar(scale, upstream.dtype), tf.zeros([], upstream.dtype))
    return tf.reshape(of_product, [-1, shape[-1]])


@custom_gradient
def cross_entropy(labels, logits):
    """`tf.nn.sparse_softmax_cross_entropy_with_logits` takes three times as long on a CPU."""
    probs = tf.nn.softmax(logits)
    places = tf.stack([tf.range(tf.size(labels)), labels], 1)
    # The largest probability is exp(0) over the sum of all: unlike the label's it is never rounded to 0.
    nll = (tf.reduce_max(logits, 1) - tf.gather_nd(logits, places)) - tf.math.log(tf.reduce_max(probs, 1))

    def grad(upstream):
        return None, tf.tensor_scatter_nd_sub(probs * upstream[:, None], places, upstream)

    return nll, grad
