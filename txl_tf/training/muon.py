"""Muon's update of a matrix: its momentum, made orthogonal (Jordan et al. 2024, kellerjordan.github.io/posts/muon).

The size of the update is that of Liu et al. 2025, "Muon is Scalable for LLM Training" (arXiv 2502.16982), section 2.2.
"""

from typing import Any

import tensorflow as tf

from txl_tf.kernels import precision
from txl_tf.kernels.dtypes import scalar
from txl_tf.kernels.shapes import Tensor

MOMENTUM = 0.95
# Coefficients of the polynomial of Jordan et al. Five steps bring every singular value between 0.01 and 1 near 1.
POLYNOMIAL = (3.4445, -4.7750, 2.0315)
STEPS = 5
# AdamW changes an entry by about this fraction of the learning rate. Muon's updates get the same root mean square.
RMS_OF_ADAMW = 0.2


def orthogonalized(matrix: Tensor, product_dtype: Any) -> Any:
    """The matrix with the same singular vectors and singular values near 1, by the iteration of Newton and Schulz.

    Singular values of at least 0.01 of the matrix's norm become 0.7 to 1.2. Much smaller ones do not get so far, and
    zeros stay 0.

    Args:
        matrix: float `[m, n]`.
        product_dtype: the type of the products: that of the matrix, or a half type such as bfloat16.

    Returns:
        `[m, n]`, in the type of the matrix.
    """
    if matrix.shape[0] > matrix.shape[1]:  # the products are smallest if the matrix has few rows
        return tf.transpose(orthogonalized(tf.transpose(matrix), product_dtype))
    a, b, c = POLYNOMIAL
    norm = tf.norm(matrix)  # no singular value is larger
    x: Any = tf.cast(matrix / (norm + scalar(1e-7, matrix.dtype)), product_dtype)
    identity = tf.eye(matrix.shape[0], dtype=x.dtype)
    for _ in range(STEPS):  # x becomes (a + b g + c g^2) x
        g: Any = precision.matmul(x, x, transpose_b=True)
        x = precision.matmul(precision.matmul(g, c * g + b * identity) + a * identity, x)
    return tf.cast(x, matrix.dtype)


def size_of_update(rows: int, columns: int) -> float:
    """The factor of an orthogonal update. An update of full rank then has the root mean square `RMS_OF_ADAMW`."""
    return RMS_OF_ADAMW * max(rows, columns) ** 0.5
