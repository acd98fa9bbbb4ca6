"""Faster versions of the operations in `kernels/plain.py`, for training and inference on CPUs.

Some gradients are written out, because TensorFlow's gradients take more passes over the activations or run on one
thread. In training steps, XLA compiles chains of small operations on large tensors: those for which `pays` of
`kernels/fusion.py` is true. Functions that are also in `kernels/plain.py` have the same arguments and results there.

Shapes:
    B: batch      T: tgt_len, the queries      K: keys      H: heads      D: d_head      E: d_model
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from txl_tf.environment import processor_flags
from txl_tf.kernels import plain
from txl_tf.kernels.dropout import NO_DROP, Drop, dropout, scale_of_kept
from txl_tf.kernels.dtypes import at_least_float32, is_half, scalar, wide_dtype
from txl_tf.kernels.fusion import fused, only_cpus, pays
from txl_tf.kernels.gradients import custom_gradient
from txl_tf.kernels.plain import join_heads, mask_penalty, seen_scores
from txl_tf.kernels.precision import matmul
from txl_tf.kernels.shapes import Tensor, shape_of
from txl_tf.kernels.threads import operations_at_a_time, shares

# `_softmax_in_half_precision` keeps this many running maxima, so the number of keys must be a multiple of it.
_LANES = 32
# Up to this many rows are multiplied with a kernel in shares after `set_threads`, or with AVX2 by `query_matmul`, which
# makes generation of 1 and of 16 rows 1.08 to 1.13 times as fast.
_FEW_ROWS = 16
_LARGE_KERNEL = 2**15  # numbers; a smaller kernel is read faster than a second operation starts
# The columns of a block where `_gradient_takes_blocks`. On one core, oneDNN computes the gradient of a kernel
# `[256, 1024]` at 60 GFLOP/s in such blocks, and at 40 GFLOP/s without blocks.
_BLOCK_COLUMNS = 256

# ------------------------------------------------------------------------------------------------------- projections


def project(x: Tensor, kernel: Tensor) -> Any:
    """As `plain.project`.

    Few rows take other operations, and on processors without AVX512, some gradients are computed in blocks.
    """
    rows = tf.reshape(x, [-1, kernel.shape[0]])
    n_rows = rows.shape[0]
    if n_rows is not None and n_rows <= _FEW_ROWS and only_cpus():
        if _takes_shares(kernel):
            return tf.add_n([matmul(rows[:, share], kernel[share]) for share in shares(kernel.shape[0])])
        if _has_only_avx2() and operations_at_a_time() == 1:
            return query_matmul(rows, kernel)
    if not pays([n_rows, max(kernel.shape)]) or not _gradient_takes_blocks(kernel):
        return matmul(rows, kernel)

    @custom_gradient
    def product(rows: Tensor, kernel: Tensor) -> tuple[Any, Callable[[Any], Any]]:
        """The product, and a function that returns its gradients."""

        def grad(upstream: Tensor) -> Any:
            return matmul(upstream, kernel, transpose_b=True), _kernel_gradient(rows, upstream)

        return matmul(rows, kernel), grad

    return product(rows, kernel)


def _takes_shares(kernel: Tensor) -> bool:
    """Whether several operations multiply few rows with a kernel faster, each with some rows of the kernel.

    They do after `set_threads`: a kernel's rows are read by all cores, and slices of them are no copies. On a processor
    with AMX, one operation is faster in half precision.
    """
    is_large = math.prod(kernel.shape) >= _LARGE_KERNEL
    return is_large and operations_at_a_time() > 1 and (kernel.dtype == tf.float32 or _has_only_avx2())


def _gradient_takes_blocks(kernel: Tensor) -> bool:
    """Whether the gradient of a kernel `[E, F]` is computed faster in blocks.

    If a product has few rows or columns, oneDNN does not copy its factors to a better order. Then, with AVX2, it takes
    half as long again if the rows of a factor are a multiple of 4 KB apart: the L1 cache has few places for the numbers
    of a column.
    """
    rows, columns = kernel.shape
    without_copies = 1 / rows + 1 / columns > 0.0038  # oneDNN's rule for AVX2, `nocopy_checker_avx2`
    return without_copies and max(rows, columns) % 1024 == 0 and kernel.dtype == tf.float32 and _has_only_avx2()


@functools.cache
def _has_only_avx2() -> bool:
    """Whether the processor has AVX2, but not AVX512."""
    return "avx2" in processor_flags() and "avx512f" not in processor_flags()


def _kernel_gradient(rows: Tensor, upstream: Tensor) -> Any:
    """The gradient of a kernel `[E, F]`, in blocks of its longer side.

    Args:
        rows: `[n, E]`, what the kernel was multiplied with.
        upstream: `[n, F]`, the gradient of the product.
    """
    shape = [rows.shape[1], upstream.shape[1]]
    if shape[0] > shape[1]:
        return tf.reshape(tf.matmul(_column_blocks(rows), upstream[None], transpose_a=True), shape)
    blocks = tf.matmul(rows[None], _column_blocks(upstream), transpose_a=True)  # [F / C, E, C]
    return tf.reshape(tf.transpose(blocks, [1, 0, 2]), shape)


def _column_blocks(x: Tensor) -> Any:
    """The blocks of C = `_BLOCK_COLUMNS` columns of `x` `[n, width]`, a multiple of C columns: `[width / C, n, C]`."""
    return tf.transpose(tf.reshape(x, [x.shape[0], -1, _BLOCK_COLUMNS]), [1, 0, 2])


def add_bias(x: Tensor, bias: Tensor) -> Any:
    """As `plain.add_bias`.

    For bfloat16 on CPUs, the gradient of the bias is a matrix product, which adds in float32. TensorFlow adds in
    bfloat16 there: with 1,024 rows, its sums are off by 4%.
    """
    # One row needs no sum.
    tensorflow_adds_in_float32 = x.dtype != tf.bfloat16 or x.shape[0] == 1 or not only_cpus()
    return tf.nn.bias_add(x, bias) if tensorflow_adds_in_float32 else _add_bias(x, bias)


@custom_gradient
def _add_bias(x: Tensor, bias: Tensor) -> tuple[Any, Callable[[Any], Any]]:
    """The sum, and a function that returns the gradients of `x` and `bias`.

    With an axis between the product and the bias, TensorFlow does not fuse the two. On a processor with AMX, the fused
    operation takes up to 2.4 times as long as the two operations. With AVX512-BF16, both ways take the same time.
    """
    total = tf.squeeze(tf.nn.bias_add(x[None], bias), 0)
    return total, lambda upstream: (upstream, sum_of_rows(upstream))


def sum_of_rows(x: Tensor) -> Any:
    """Adds the rows of `x`, `[n, E]` to `[E]`, as a matrix product. `tf.reduce_sum` takes several times as long."""
    return tf.linalg.matvec(x, tf.ones([shape_of(x)[0]], x.dtype), transpose_a=True)


def project_heads(x: Tensor, kernel: Tensor, n: int, n_head: int) -> Any:
    """As `plain.project_heads`.

    Large tensors take one product for each head, so the result is heads first without a transposition.
    """
    batch, length, width = x.shape
    d_head = kernel.shape[1] // (n * n_head)
    if not pays([n * n_head, batch, length, d_head]):
        return plain.project_heads(x, kernel, n, n_head)

    @custom_gradient
    def product(rows: Tensor, kernel: Tensor) -> tuple[Any, Callable[[Any], Any]]:
        """The product, `[n * H, rows, D]`, and a function that returns its gradients."""

        def grad(upstream: Tensor) -> Any:
            upstream = tf.reshape(tf.transpose(upstream, [1, 0, 2]), [-1, kernel.shape[1]])  # [rows, n * H * D]
            return matmul(upstream, kernel, transpose_b=True), matmul(rows, upstream, transpose_a=True)

        return tf.matmul(rows[None], _by_head(kernel, n * n_head)), grad

    heads = product(tf.reshape(x, [-1, width]), kernel)
    return tf.unstack(tf.reshape(heads, [n, n_head, batch, length, d_head]))


def _by_head(kernel: Tensor, number: int) -> Any:
    """Splits a kernel `[E, number * D]` into the kernels of the heads: `[number, E, D]`."""
    return tf.transpose(tf.reshape(kernel, [kernel.shape[0], number, -1]), [1, 0, 2])


def project_output(attn_vec: Tensor, o_kernel: Tensor) -> Any:
    """As `plain.project_output`.

    The gradient of large tensors is one product for each head, so it is heads first without a transposition.
    """
    if not pays(attn_vec.shape):
        return plain.project_output(attn_vec, o_kernel)
    n_head, batch, qlen, d_head = attn_vec.shape

    @custom_gradient
    def product(attn_vec: Tensor, o_kernel: Tensor) -> tuple[Any, Callable[[Any], Any]]:
        """The product, and a function that returns its gradients."""
        rows: Any = tf.reshape(join_heads(attn_vec), [-1, n_head * d_head])

        def grad(upstream: Tensor) -> Any:
            heads_grad = tf.matmul(upstream[None], _by_head(tf.transpose(o_kernel), n_head))
            return tf.reshape(heads_grad, [n_head, batch, qlen, d_head]), matmul(rows, upstream, transpose_a=True)

        return matmul(rows, o_kernel), grad

    return tf.reshape(product(attn_vec, o_kernel), [batch, qlen, o_kernel.shape[1]])


# --------------------------------------------------------------------------------------------------------- attention


def head_matmul(a: Tensor, b: Tensor | list[Tensor], transpose_b: bool = False) -> Any:
    """As `plain.head_matmul`.

    For a single query, `[H, 1, any]`, it makes one product for each head: twice as fast. `b` may then be a list.
    """
    if a.shape[-2] != 1 or len(a.shape) > 3:
        return tf.matmul(a, b, transpose_b=transpose_b)
    return tf.stack(products_of_heads(a, b, transpose_b))


def products_of_heads(a: Tensor, b: Tensor | list[Tensor], transpose_b: bool = False) -> list[Any]:
    """The product of each head, as a list. `a` is `[H, n, any]`: one query of each of n rows. `b` may be a list."""
    heads = zip(tf.unstack(a), _heads_of(b), strict=True)
    n_rows = a.shape[-2] or 0
    if transpose_b and len(a.shape) == 3 and 1 < n_rows <= _FEW_ROWS and _has_only_avx2():
        # With the few rows as the right factor, and the result transposed: 1.7 times as fast.
        return [tf.transpose(tf.matmul(y, x, transpose_b=True)) for x, y in heads]
    return [tf.matmul(x, y, transpose_b=transpose_b) for x, y in heads]


def query_matmul(a: Tensor, b: Tensor, transpose_b: bool = False) -> Any:
    """As `plain.query_matmul`.

    In float32, it uses an operation that TensorFlow does not give to oneDNN, which multiplies few rows slowly.
    """
    if a.dtype != tf.float32:
        return tf.matmul(a, b, transpose_b=transpose_b)
    return tf.raw_ops.BatchMatMulV3(x=a, y=b, Tout=tf.float32, adj_y=transpose_b)


def _heads_of(x: Tensor | list[Tensor]) -> list[Any]:
    """The heads of a tensor `[H, ...]`, as a list. A list is returned unchanged."""
    return x if isinstance(x, list) else tf.unstack(x)


def takes_one_query(q: Tensor, visible: Tensor | None) -> bool:
    """Whether `attend_with_one_query` can be used: for a single query `[H, 1, D]`, with one mask for all heads.

    It adds values before it divides them. In float16, the sums could overflow, so it is not used there.
    """
    is_one_query = q.shape[-2] == 1 and len(q.shape) == 3
    return is_one_query and q.dtype != tf.float16 and (visible is None or len(visible.shape) == 2)


def attend_with_one_query(
    q: Tensor, k: Tensor, v: Tensor, position_scores: Tensor | list[Tensor] | None = None, visible: Tensor | None = None
) -> Any:
    """Attention of a single query `[H, 1, D]`, head by head.

    The largest score and the sum of one head are scalars: to subtract one and to divide by the other is fast. The
    weighted values are added first and divided afterwards, because they are fewer numbers than the probabilities.
    `position_scores` may be a list with one tensor for each head.
    """
    penalty = None if visible is None else mask_penalty(visible, wide_dtype(q))

    def attend_head(q: Tensor, k: Tensor, v: Tensor, position_scores: Tensor | None = None) -> Any:
        """Attention of the query of one head, `[1, D]`."""
        scores: Any = tf.matmul(q, k, transpose_b=True)
        scores = at_least_float32(scores if position_scores is None else scores + position_scores)
        scores = scores if penalty is None else scores - penalty
        exp: Any = tf.exp(scores - tf.reduce_max(scores))
        values = at_least_float32(tf.matmul(tf.cast(exp, v.dtype), v))
        return tf.cast(values / tf.reduce_sum(exp), v.dtype)

    arguments = [q, k, v] if position_scores is None else [q, k, v, position_scores]
    return tf.stack(
        [attend_head(*arguments_of_head) for arguments_of_head in zip(*map(_heads_of, arguments), strict=True)]
    )


def masked_softmax(scores: Tensor, visible: Tensor | None = None, position_scores: Tensor | None = None) -> Any:
    """As `plain.masked_softmax`.

    For large tensors (see `pays`), XLA compiles the gradient into one pass. In half precision, if the number of keys is
    a multiple of `_LANES`, XLA also compiles the forward pass.
    """
    if not pays(scores.shape):
        return _softmax(scores, visible, position_scores)
    shape = list(scores.shape)

    @custom_gradient
    def one_pass(*terms: Tensor) -> tuple[Any, Callable[[Any], Any]]:
        """The probabilities, and a function that returns the gradients of the terms of the scores."""
        if is_half(terms[0].dtype) and shape[-1] % _LANES == 0:
            probs = _softmax_in_half_precision(shape, visible, *terms)
        else:
            probs = _softmax(terms[0], visible, *terms[1:])

        def grad(upstream: Tensor) -> Any:
            # The one or two terms of the scores are added, so they have the same gradient.
            return [_softmax_grad(shape, probs, upstream)] * len(terms)

        return probs, grad

    return one_pass(scores) if position_scores is None else one_pass(scores, position_scores)


def _softmax(scores: Tensor, visible: Tensor | None = None, position_scores: Tensor | None = None) -> Any:
    """`plain.masked_softmax`; for a single query, by other operations, which are faster."""
    if scores.shape[-2] != 1:
        return plain.masked_softmax(scores, visible, position_scores)
    masked_scores = seen_scores(visible, scores, position_scores)
    # tf.nn.softmax takes three times as long.
    exp: Any = tf.exp(masked_scores - tf.reduce_max(masked_scores, -1, keepdims=True))
    return tf.cast(exp / tf.reduce_sum(exp, -1, keepdims=True), scores.dtype)


@fused
def _softmax_in_half_precision(shape: Sequence[int], visible: Tensor | None, *scores: Tensor) -> Any:
    """`_softmax` in the form that XLA compiles best.

    It keeps `_LANES` running maxima of a row, one for every `_LANES`-th column, and then takes the largest. It computes
    the sum as a matrix product. The number of columns must be a multiple of `_LANES`.
    """
    masked_scores = seen_scores(visible, *scores)
    lane_maxima = tf.reduce_max(tf.reshape(masked_scores, [*shape[:-1], -1, _LANES]), -2)
    exp: Any = tf.exp(masked_scores - tf.reduce_max(lane_maxima, -1, keepdims=True))
    return tf.cast(exp / _sum_of_columns(exp), scores[0].dtype)


@fused
def _softmax_grad(shape: Sequence[int], probs: Tensor, upstream: Tensor) -> Any:
    """The gradient of the scores, from the probabilities and their gradient `upstream`.

    For a constant upstream gradient it is 0 up to rounding in float32, even if the rounded `probs` do not sum to 1.
    """
    wide_probs = at_least_float32(probs)
    wide_upstream = at_least_float32(upstream)
    mean = _sum_of_columns(wide_upstream * wide_probs) / _sum_of_columns(wide_probs)
    return tf.cast((wide_upstream - mean) * wide_probs, probs.dtype)


def _sum_of_columns(x: Tensor) -> Any:
    """The sum over the last axis, which it keeps with size 1, as a matrix product."""
    return tf.linalg.matvec(x, tf.ones([x.shape[-1]], x.dtype))[..., None]


def pairwise_scores(q: Tensor, r: Tensor, index: Tensor | None = None) -> Any:
    """Scores of the queries with one vector for every pair of query and key: `q_i . r_ij` (FLAT).

    With `index`, all heads take one product, and the vectors of the pairs are not kept for the gradient.

    Args:
        q: `[H, B, T, D]`.
        r: `[H, B, T, K, D]`. With `index`, the distinct vectors, `[U, H, D]`.
        index: int32 `[B, T, K]`, the number of the vector for each pair.

    Returns:
        `[H, B, T, K]`.
    """
    return plain.pairwise_scores(q, r) if index is None else _indexed_scores(q, r, index)


@custom_gradient
def _indexed_scores(q: Tensor, r: Tensor, index: Tensor) -> tuple[Any, Callable[[Any], Any]]:
    """`pairwise_scores` of vectors that many pairs share.

    The vectors of the pairs are gathered in the forward pass and again in the backward pass, but not kept between them.

    The heads of a vector stay side by side: the vectors for the keys of a query are `[K, H * D]`. The query becomes a
    block-diagonal matrix `[H * D, H]` with one head in each block. So the scores of all heads are one product.
    """
    n_head, batch, qlen, d_head = shape_of(q)
    rows: Any = tf.reshape(r, [-1, n_head * d_head])  # [U, H * D]
    pairs = tf.reshape(index, [batch * qlen, -1])  # [B * T, K]
    queries: Any = tf.reshape(tf.transpose(q, [1, 2, 0, 3]), [batch * qlen, n_head, d_head])
    eye: Any = tf.eye(n_head, dtype=q.dtype)
    by_head = eye[:, None]
    blocks = tf.reshape(queries[..., None] * by_head, [batch * qlen, n_head * d_head, n_head])  # block-diagonal
    scores = tf.matmul(tf.gather(rows, pairs), blocks)  # [B * T, K, H]

    def grad(upstream: Tensor) -> Any:
        """The gradients of queries and vectors; the index has none."""
        upstream = tf.reshape(tf.transpose(upstream, [1, 2, 3, 0]), [batch * qlen, -1, n_head])
        blocks_grad: Any = tf.matmul(tf.gather(rows, pairs), upstream, transpose_a=True)  # [B * T, H * D, H]
        blocks_grad = tf.reshape(blocks_grad, [batch * qlen, n_head, d_head, n_head])
        queries_grad = tf.reduce_sum(blocks_grad * by_head, -1)
        pairs_grad = tf.reshape(tf.matmul(upstream, blocks, transpose_b=True), [-1, n_head * d_head])
        rows_grad = tf.math.unsorted_segment_sum(pairs_grad, tf.reshape(pairs, [-1]), tf.shape(rows)[0])
        q_grad = tf.transpose(tf.reshape(queries_grad, [batch, qlen, n_head, d_head]), [2, 0, 1, 3])
        return q_grad, tf.reshape(rows_grad, tf.shape(r)), None

    return tf.transpose(tf.reshape(scores, [batch, qlen, -1, n_head]), [3, 0, 1, 2]), grad


# --------------------------------------------------------------------------------------- every position separately


@custom_gradient
def embedding_lookup(table: Tensor, ids: Tensor) -> tuple[Any, Callable[[Any], Any]]:
    """Rows of `table` `[n, e]` at the integer `ids`, with a dense gradient.

    TensorFlow's gradient of a lookup is sparse. Added to the dense gradient of the softmax that shares the table, it
    would become a list of the rows of both: many times the size of the table, and with a wrong norm for clipping.
    """

    def grad(upstream: Tensor) -> Any:
        rows = tf.reshape(upstream, [-1, table.shape[1]])
        return tf.math.unsorted_segment_sum(rows, tf.reshape(ids, [-1]), table.shape[0]), None

    return tf.gather(table, ids), grad


@custom_gradient
def layer_norm(x: Tensor, gamma: Tensor, beta: Tensor, epsilon: float) -> tuple[Any, Callable[[Any], Any]]:
    """Normalises the last axis to mean 0 and variance 1, then multiplies by gamma and adds beta.

    It computes in float32, or in float64 if `x` is float64. The gradient computes its sums over rows and columns as
    matrix products, which are faster than sums.

    Args:
        x: `[..., E]`.
        gamma, beta: `[E]`.
        epsilon: float, added to the variance.

    Returns:
        A tensor like `x`.
    """
    dtype = x.dtype
    dtype_of_weights = gamma.dtype
    width = x.shape[-1]
    x = at_least_float32(x)
    gamma = tf.cast(gamma, x.dtype)
    beta = tf.cast(beta, x.dtype)
    centered = x - tf.reduce_mean(x, -1, keepdims=True)
    scale: Any = tf.math.rsqrt(tf.reduce_mean(tf.square(centered), -1, keepdims=True) + epsilon)
    normal = centered * scale

    def grad(upstream: Tensor) -> Any:
        """The gradients of x, gamma and beta; epsilon has none."""
        shape = tf.shape(upstream)
        upstream = tf.reshape(at_least_float32(upstream), [-1, width])
        normal_rows = tf.reshape(normal, [-1, width])
        to_scale = upstream * normal_rows
        mean: Any = tf.linalg.matvec(upstream, gamma / width)  # a matrix product is faster than a sum
        slope: Any = tf.linalg.matvec(to_scale, gamma / width)
        x_grad = (upstream * gamma - mean[:, None] - normal_rows * slope[:, None]) * tf.reshape(scale, [-1, 1])
        gamma_grad = tf.cast(sum_of_rows(to_scale), dtype_of_weights)
        beta_grad = tf.cast(sum_of_rows(upstream), dtype_of_weights)
        return tf.cast(tf.reshape(x_grad, shape), dtype), gamma_grad, beta_grad, None

    return tf.cast(normal * gamma + beta, dtype), grad


def residual_norm(x: Tensor, y: Tensor, norm: Any, drop: Drop = NO_DROP) -> Any:
    """As `plain.residual_norm`. In half precision, large tensors take one pass forwards and one pass backwards."""
    if callable(norm):
        return norm(x + drop(y))
    if not is_half(x.dtype) or not pays(x.shape):
        return layer_norm(x + drop(y), *norm)
    shape = list(x.shape)
    gamma, beta, epsilon = norm
    rate, dropout_key = drop

    @custom_gradient
    def one_pass(x: Tensor, y: Tensor, gamma: Tensor, beta: Tensor) -> tuple[Any, Callable[[Any], Any]]:
        """The result, and a function that returns the gradients of all arguments."""
        out, normal, scale = _residual_norm(shape, x, y, gamma, beta, epsilon, rate, dropout_key)

        def grad(upstream: Tensor) -> Any:
            x_grad, y_grad, to_scale = _residual_norm_grad(shape, upstream, normal, scale, gamma, rate, dropout_key)
            rows = tf.reshape(tf.cast(upstream, tf.float32), [-1, shape[-1]])
            return x_grad, y_grad, sum_of_rows(tf.reshape(to_scale, [-1, shape[-1]])), sum_of_rows(rows)

        return out, grad

    return one_pass(x, y, gamma, beta)


@fused
def _residual_norm(
    shape: Sequence[int], x: Tensor, y: Tensor, gamma: Tensor, beta: Tensor, epsilon: float, rate: float,
    dropout_key: Tensor | None,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """`(out, normal, scale)`: the result of `residual_norm`, the same before gamma and beta, and the factor that gave
    it variance 1.
    """
    both: Any = tf.cast(x + dropout(y, rate, dropout_key), tf.float32)
    centered = both - tf.reduce_mean(both, -1, keepdims=True)
    scale: Any = tf.math.rsqrt(tf.reduce_mean(tf.square(centered), -1, keepdims=True) + epsilon)
    normal = centered * scale
    return tf.cast(normal * gamma + beta, x.dtype), tf.cast(normal, x.dtype), scale


@fused
def _residual_norm_grad(
    shape: Sequence[int], upstream: Tensor, normal: Tensor, scale: Tensor, gamma: Tensor, rate: float,
    dropout_key: Tensor | None,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """The gradients of `x` and `y`, and a tensor whose sum over all rows is the gradient of gamma.

    The key draws the same dropout mask as in the forward pass, so the mask is not kept.
    """
    dtype = upstream.dtype
    upstream = tf.cast(upstream, tf.float32)
    normal = tf.cast(normal, tf.float32)
    to_scale = upstream * normal
    to_normal = upstream * gamma
    slope = tf.reduce_mean(to_scale * gamma, -1, keepdims=True)
    x_grad = tf.cast((to_normal - tf.reduce_mean(to_normal, -1, keepdims=True) - normal * slope) * scale, dtype)
    return x_grad, dropout(x_grad, rate, dropout_key), to_scale


def relu_layer(x: Tensor, kernel: Tensor, bias: Tensor, drop: Drop = NO_DROP) -> Any:
    """As `plain.relu_layer`.

    Large tensors take one pass after the product, and one pass backwards. The gradient is passed on where the result is
    positive, so no mask is kept.
    """
    shape = [*x.shape[:-1], kernel.shape[1]]
    if not pays(shape):
        inner = tf.nn.relu(add_bias(project(x, kernel), bias))
        return drop(tf.reshape(inner, [*shape_of(x)[:-1], kernel.shape[1]]))
    rate, dropout_key = drop
    drops = dropout_key is not None and rate > 0

    @custom_gradient
    def one_pass(product: Tensor, bias: Tensor) -> tuple[Any, Callable[[Any], Any]]:
        """The result, and a function that returns the gradients of product and bias."""
        inner: Any = tf.nn.relu(tf.nn.bias_add(product, bias))
        inner = _dropped(shape, inner, rate, dropout_key) if drops else tf.reshape(inner, shape)

        def grad(upstream: Tensor) -> Any:
            product_grad = _dropped_relu_grad(shape, upstream, inner, scale_of_kept(rate) if drops else 1.0)
            return product_grad, sum_of_rows(product_grad)

        return inner, grad

    return one_pass(project(x, kernel), bias)


@fused
def _dropped(shape: Sequence[int], x: Tensor, rate: float, dropout_key: Tensor | None) -> Any:
    """`x` in this shape, with dropout."""
    return dropout(tf.reshape(x, shape), rate, dropout_key)


@fused
def _dropped_relu_grad(shape: Sequence[int], upstream: Tensor, inner: Tensor, scale: float) -> Any:
    """The gradient of the input of the relu, `[n, F]`: `upstream * scale` where the result `inner` is positive."""
    product_grad = tf.where(inner > 0, upstream * scalar(scale, upstream.dtype), tf.zeros([], upstream.dtype))
    return tf.reshape(product_grad, [-1, shape[-1]])


@custom_gradient
def cross_entropy(labels: Tensor, logits: Tensor) -> tuple[Any, Callable[[Any], Any]]:
    """Negative log-likelihood of `labels` under the softmax of `logits`.

    On a CPU, `tf.nn.sparse_softmax_cross_entropy_with_logits` takes three times as long.

    Args:
        labels: int32 `[n]`, ids of classes.
        logits: float32 or float64 `[n, classes]`.

    Returns:
        `[n]`, nats, in the dtype of the logits.
    """
    probs: Any = tf.nn.softmax(logits)
    indices: Any = tf.stack([tf.range(tf.size(labels)), labels], 1)
    # log p(label) = logit of the label - largest logit + log of the largest probability. The largest probability is
    # never rounded to 0; the label's may be.
    largest: Any = tf.reduce_max(logits, 1)
    log_of_largest: Any = tf.math.log(tf.reduce_max(probs, 1))
    nll = (largest - tf.gather_nd(logits, indices)) - log_of_largest

    def grad(upstream: Tensor) -> Any:
        return None, tf.tensor_scatter_nd_sub(probs * upstream[:, None], indices, upstream)

    return nll, grad
