"""Every operation of the equations in ordinary TensorFlow, with TensorFlow's own gradients.

`kernels/cpu.py` has a faster version of most of them. `tests/kernels_test.py` compares the two, and
`TXL_KERNELS=plain` makes a process use these alone.

Shapes:
    B: batch      T: tgt_len, the queries      K: keys      H: heads      D: d_head      E: d_model
"""

import keras
import tensorflow as tf

from txl_tf.kernels.dropout import NO_DROP
from txl_tf.kernels.dtypes import at_least_float32
from txl_tf.kernels.precision import matmul

# ------------------------------------------------------------------------------------------------------- projections


def project(x, kernel):
    """`x` `[..., E]` times `kernel` `[E, F]`, as rows of a matrix: `[any, F]`.

    With `[batch, time, E]`, the gradient of the product would first be one matrix for every row of the batch.
    """
    return matmul(tf.reshape(x, [-1, kernel.shape[0]]), kernel)


def add_bias(x, bias):
    """`x` `[n, E]` plus `bias` `[E]`."""
    return tf.nn.bias_add(x, bias)


def project_heads(x, kernel, n, n_head):
    """The `n` projections of `x` `[B, any, E]` whose kernels stand side by side in `kernel`: `[H, B, any, D]` each."""
    batch, length, _ = keras.ops.shape(x)
    heads = tf.reshape(project(x, kernel), [batch, length, n, n_head, kernel.shape[1] // (n * n_head)])
    return tf.unstack(tf.transpose(heads, [2, 3, 0, 1, 4]))


def join_heads(x):
    """Heads `[H, B, T, D]` side by side: `[B, T, H * D]`."""
    n_head, batch, length, d_head = keras.ops.shape(x)
    return tf.reshape(tf.transpose(x, [1, 2, 0, 3]), [batch, length, n_head * d_head])


def project_output(attn_vec, o_kernel):
    """What the heads found, `[H, B, T, D]`, side by side and projected: `[B, T, E]`."""
    _, batch, length, _ = keras.ops.shape(attn_vec)
    return tf.reshape(project(join_heads(attn_vec), o_kernel), [batch, length, o_kernel.shape[1]])


# --------------------------------------------------------------------------------------------------------- attention


def head_matmul(a, b, transpose_b=False):
    """`tf.matmul`, head by head: `a` is `[H, ..., T, any]`."""
    return tf.matmul(a, b, transpose_b=transpose_b)


def takes_one_query(q, visible):
    """Whether `attend_with_one_query` of `kernels/cpu.py` takes the queries: there is no plain version of it."""
    return False


def masked_softmax(scores, visible=None, position_scores=None):
    """The softmax over the keys that a query sees, in the dtype of `scores`; computed in float32 or float64.

    Args:
        scores: `[..., T, K]`.
        visible: bool, broadcasts to `scores`: which keys a query sees; `None` for all.
        position_scores: `[..., T, K]`, added to the scores; `None` for none.
    """
    return tf.cast(tf.nn.softmax(seen_scores(visible, scores, position_scores)), scores.dtype)


def seen_scores(visible, scores, position_scores=None):
    """The scores in float32 or float64, minus 1e30 where a key is not seen."""
    # Half precision holds neither -1e30 nor the sum of many small probabilities.
    scores = at_least_float32(scores if position_scores is None else scores + position_scores)
    return scores if visible is None else scores - hidden(visible, scores.dtype)


def hidden(visible, dtype):
    """What is subtracted from scores: 1e30 where a key is not seen."""
    return 1e30 * tf.cast(~tf.cast(visible, tf.bool), dtype)


def pairwise_scores(q, r, index=None):
    """Scores of the queries against a vector for every pair: `q_i . r_ij` (FLAT).

    Args:
        q: `[H, B, T, D]`.
        r: `[H, B, T, K, D]`. With `index`, the vectors that differ, `[U, H, D]`.
        index: int32 `[B, T, K]`, which of the vectors each pair has.

    Returns:
        `[H, B, T, K]`.
    """
    if index is not None:
        r = tf.transpose(tf.gather(r, index), [3, 0, 1, 2, 4])
    return tf.linalg.matvec(r, q)


# ----------------------------------------------------------------------------------------- on every position by itself


def embedding_lookup(table, ids):
    """Rows of `table` `[n, e]` at the integer `ids`, with a dense gradient."""
    return tf.gather(tf.reshape(table, keras.ops.shape(table)), ids)  # the gradient of a reshape is dense


def layer_norm(x, gamma, beta, epsilon):
    """Normalises the last axis to mean 0 and variance 1, then scales and shifts.

    It computes in float32, or in float64 if `x` is float64.

    Args:
        x: `[..., E]`.
        gamma, beta: `[E]`.
        epsilon: float, added to the variance.

    Returns:
        A tensor like `x`.
    """
    dtype, x = x.dtype, at_least_float32(x)
    centered = x - tf.reduce_mean(x, -1, keepdims=True)
    scale = tf.math.rsqrt(tf.reduce_mean(tf.square(centered), -1, keepdims=True) + epsilon)
    return tf.cast(centered * scale * tf.cast(gamma, x.dtype) + tf.cast(beta, x.dtype), dtype)


def residual_norm(x, y, norm, drop=NO_DROP):
    """`norm(x + drop(y))`, of `x` and `y` `[B, T, E]`.

    Args:
        norm: `(gamma, beta, epsilon)` of layer norm; or another function of a tensor.
        drop: `Drop`.
    """
    y = x + drop(y)
    return norm(y) if callable(norm) else layer_norm(y, *norm)


def relu_layer(x, kernel, bias, drop=NO_DROP):
    """`drop(relu(x kernel + bias))`: `[..., E]` to `[..., F]`."""
    *rows, _ = keras.ops.shape(x)
    inner = tf.nn.relu(add_bias(project(x, kernel), bias))
    return drop(tf.reshape(inner, [*rows, kernel.shape[1]]))


def logits(h, table, bias, projection=None):
    """`(h projection^T) table^T + bias`: `[..., E]` to `[..., N]`.

    Products are in the dtype of `h`, sums in float32, or in float64 if `h` is float64.
    """
    if projection is not None:
        h = matmul(h, tf.cast(projection, h.dtype), transpose_b=True)
    product = at_least_float32(matmul(h, tf.cast(table, h.dtype), transpose_b=True))
    return product + tf.cast(bias, product.dtype)


def cross_entropy(labels, logits):
    """Negative log-likelihood of `labels` under the softmax of `logits`.

    Args:
        labels: int32 `[n]`, ids of classes.
        logits: float32 or float64 `[n, classes]`.

    Returns:
        `[n]`, nats, in the dtype of the logits.
    """
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
