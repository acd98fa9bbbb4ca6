"""The dtype of sums, norms, softmaxes and losses: float64 if the model computes in float64, else float32."""

from typing import Any

import numpy as np
import tensorflow as tf

from txl_tf.kernels.shapes import Tensor


def wide_dtype(*values: Any) -> tf.DType:
    """float64 if one of the tensors, variables, arrays or dtypes is float64, else float32.

    Python's numbers and lists have no dtype, so they do not count.
    """
    kinds = (str, type, tf.DType, np.dtype)  # of dtypes
    dtypes = [value if isinstance(value, kinds) else getattr(value, "dtype", None) for value in values]
    return tf.float64 if any(dtype == tf.float64 for dtype in dtypes) else tf.float32


def at_least_float32(x: Tensor) -> Tensor:
    """A tensor or variable cast to float32, or to float64 if it is float64. A float32 tensor is returned unchanged."""
    return tf.cast(x, wide_dtype(x))


def is_half(dtype: Any) -> bool:
    """Whether a dtype is float16 or bfloat16."""
    return dtype in (tf.float16, tf.bfloat16)


def scalar(number: float, dtype: Any) -> Tensor:
    """A Python number as a tensor of a dtype. `tf.cast(number, tf.float64)` alone would round it to float32 first."""
    return tf.cast(tf.constant(number, wide_dtype(dtype)), dtype)
