"""Every operation of the equations in ordinary TensorFlow, with TensorFlow's own gradients.

`kernels/cpu.py` has faster versions of most of them. `tests/kernels_test.py` compares the two. With
`TXL_KERNELS=plain` in the environment, a process uses the versions of this file.

Shapes:
    B: batch      T: tgt_len, the queries      K: keys      H: heads      D: d_head      E: d_model      F: d_inner
"""

from typing import Any

import tensorflow as tf

from txl_tf.kernels.dropout import NO_DROP, Drop
from txl_tf.kernels.dtypes import at_least_float32
from txl_tf.kernels.precision import matmul
from txl_tf.kernels.shapes import Tensor, shape_of

# ------------------------------------------------------------------------------------------------------- projections


def project(x: Tensor, kernel: Tensor) -> Any:
    """`x` `[..., E]` times `kernel` `[E, F]`: `[any, F]`, where the axes of `x` before the last are flattened.

    For a product with `[batch, time, E]`, TensorFlow's gradient would first make a gradient of the kernel for
    every row of the batch, and then add them up.
    """
    return matmul(tf.reshape(x, [-1, kernel.shape[0]]), kernel)


def add_bias(x: Tensor, bias: Tensor) -> Any:
    """`x` `[n, E]` plus `bias` `[E]`."""
    return tf.nn.bias_add(x, bias)


def project_heads(x: Tensor, kernel: Tensor, n: int, n_head: int) -> Any:
    """The `n` projections of `x` `[B, any, E]` whose kernels are side by side in `kernel`: `[H, B, any, D]` each."""
    batch, length, _ = shape_of(x)
    heads = tf.reshape(project(x, kernel), [batch, length, n, n_head, kernel.shape[1] // (n * n_head)])
    return tf.unstack(tf.transpose(heads, [2, 3, 0, 1, 4]))


def join_heads(x: Tensor) -> Any:
    """Heads `[H, B, T, D]` side by side: `[B, T, H * D]`."""
    n_head, batch, length, d_head = shape_of(x)
    return tf.reshape(tf.transpose(x, [1, 2, 0, 3]), [batch, length, n_head * d_head])


def project_output(attn_vec: Tensor, o_kernel: Tensor) -> Any:
    """Concatenates the results of the heads, `[H, B, T, D]`, and projects them: `[B, T, E]`."""
    _, batch, length, _ = shape_of(attn_vec)
    return tf.reshape(project(join_heads(attn_vec), o_kernel), [batch, length, o_kernel.shape[1]])


# --------------------------------------------------------------------------------------------------------- attention


def head_matmul(a: Tensor, b: Tensor, transpose_b: bool = False) -> Any:
    """`tf.matmul`, head by head: `a` is `[H, ..., T, any]`."""
    return tf.matmul(a, b, transpose_b=transpose_b)


def query_matmul(a: Tensor, b: Tensor, transpose_b: bool = False) -> Any:
    """`tf.matmul` of single queries, `a` `[..., 1, any]`."""
    return tf.matmul(a, b, transpose_b=transpose_b)


def takes_one_query(q: Tensor, visible: Tensor | None) -> bool:
    """Whether `attend_with_one_query` may be used. Only `kernels/cpu.py` has it, so the result is always false here."""
    return False


def masked_softmax(scores: Tensor, visible: Tensor | None = None, position_scores: Tensor | None = None) -> Any:
    """The softmax over the keys that a query sees, computed in float32 or float64.

    Args:
        scores: `[..., T, K]`.
        visible: bool, broadcasts to `scores`, true where a query sees a key. `None`: queries see all keys.
        position_scores: `[..., T, K]`, added to the scores; or `None`.

    Returns:
        `[..., T, K]` in the dtype of `scores`. A query that sees no key gets the same probability for every key.
    """
    return tf.cast(tf.nn.softmax(seen_scores(visible, scores, position_scores)), scores.dtype)


def seen_scores(visible: Tensor | None, scores: Tensor, position_scores: Tensor | None = None) -> Any:
    """The sum of the two kinds of scores, cast to float32 or float64, minus 1e30 for keys that a query does not see."""
    # float16 does not hold -1e30, and no half precision holds the sum of many small probabilities.
    scores = at_least_float32(scores if position_scores is None else scores + position_scores)
    return scores if visible is None else scores - mask_penalty(visible, scores.dtype)


def mask_penalty(visible: Tensor, dtype: Any) -> Any:
    """The numbers to subtract from scores: 1e30 for keys that a query does not see, else 0."""
    return 1e30 * tf.cast(~tf.cast(visible, tf.bool), dtype)


def pairwise_scores(q: Tensor, r: Tensor, index: Tensor | None = None) -> Any:
    """Scores of the queries with one vector for every pair of query and key: `q_i . r_ij` (FLAT).

    Args:
        q: `[H, B, T, D]`.
        r: `[H, B, T, K, D]`. With `index`, the distinct vectors, `[U, H, D]`.
        index: int32 `[B, T, K]`, the number of the vector for each pair.

    Returns:
        `[H, B, T, K]`.
    """
    if index is not None:
        r = tf.transpose(tf.gather(r, index), [3, 0, 1, 2, 4])
    return tf.linalg.matvec(r, q)


# --------------------------------------------------------------------------------------- every position separately


def embedding_lookup(table: Tensor, ids: Tensor) -> Any:
    """Rows of `table` `[n, e]` at the integer `ids`, with a dense gradient."""
    dense: Any = tf.reshape(table, shape_of(table))  # the gradient of a reshape is dense, that of tf.gather is not
    return tf.gather(dense, ids)


def layer_norm(x: Tensor, gamma: Tensor, beta: Tensor, epsilon: float) -> Any:
    """Normalises the last axis to mean 0 and variance 1, then multiplies by gamma and adds beta.

    It computes in float32, or in float64 if `x` is float64.

    Args:
        x: `[..., E]`.
        gamma, beta: `[E]`.
        epsilon: float, added to the variance.

    Returns:
        A tensor like `x`.
    """
    wide = at_least_float32(x)
    centered = wide - tf.reduce_mean(wide, -1, keepdims=True)
    scale: Any = tf.math.rsqrt(tf.reduce_mean(tf.square(centered), -1, keepdims=True) + epsilon)
    return tf.cast(centered * scale * tf.cast(gamma, wide.dtype) + tf.cast(beta, wide.dtype), x.dtype)


def rms_norm(x: Tensor, gamma: Tensor, epsilon: float) -> Any:
    """Divides the last axis by its root mean square, then multiplies by gamma (Zhang and Sennrich 2019).

    It computes in float32, or in float64 if `x` is float64.

    Args:
        x: `[..., E]`.
        gamma: `[E]`.
        epsilon: float, added to the mean square.

    Returns:
        A tensor like `x`.
    """
    wide = at_least_float32(x)
    scale: Any = tf.math.rsqrt(tf.reduce_mean(tf.square(wide), -1, keepdims=True) + epsilon)
    return tf.cast(wide * scale * tf.cast(gamma, wide.dtype), x.dtype)


def residual_norm(x: Tensor, y: Tensor, norm: Any, drop: Drop = NO_DROP) -> Any:
    """`norm(x + drop(y))`, with `x` and `y` `[B, T, E]`.

    Args:
        x, y: the input and the output of a part of a layer.
        norm: `(gamma, beta, epsilon)` of layer norm, or a function of a tensor.
        drop: dropout of `y`.
    """
    y = x + drop(y)
    return norm(y) if callable(norm) else layer_norm(y, *norm)


def relu_layer(x: Tensor, kernel: Tensor, bias: Tensor, drop: Drop = NO_DROP) -> Any:
    """`drop(relu(x kernel + bias))`: `[..., E]` to `[..., F]`."""
    *rows, _ = shape_of(x)
    inner = tf.nn.relu(add_bias(project(x, kernel), bias))
    return drop(tf.reshape(inner, [*rows, kernel.shape[1]]))


def logits(h: Tensor, table: Tensor, bias: Tensor, projection: Tensor | None = None) -> Any:
    """`(h projection^T) table^T + bias`: `[..., E]` to `[..., N]`.

    Products are computed in the dtype of `h`, the sum in float32, or in float64 if `h` is float64.
    """
    if projection is not None:
        h = matmul(h, tf.cast(projection, h.dtype), transpose_b=True)
    product = at_least_float32(matmul(h, tf.cast(table, h.dtype), transpose_b=True))
    return product + tf.cast(bias, product.dtype)


def cross_entropy(labels: Tensor, logits: Tensor) -> Any:
    """Negative log-likelihood of `labels` under the softmax of `logits`.

    Args:
        labels: int32 `[n]`, ids of classes.
        logits: float32 or float64 `[n, classes]`.

    Returns:
        `[n]`, nats, in the dtype of the logits.
    """
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
