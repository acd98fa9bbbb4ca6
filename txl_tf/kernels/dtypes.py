"""The dtype of sums, norms, softmaxes and losses: float32 in half precision, float64 where a model computes in it."""

import tensorflow as tf


def wide_dtype(*values):
    """float64 if one of the tensors, variables, arrays or dtypes is float64, else float32: a `tf.DType`.

    Python's numbers and lists have no dtype, so they do not count.
    """
    return tf.float64 if any(getattr(value, "dtype", value) == tf.float64 for value in values) else tf.float32


def at_least_float32(x):
    """A tensor or variable in float32, or in float64 if it is float64. A tensor that is float32 stays as it is."""
    return tf.cast(x, wide_dtype(x))


def is_half(dtype):
    """Whether a dtype is float16 or bfloat16."""
    return dtype in (tf.float16, tf.bfloat16)


def scalar(number, dtype):
    """A Python number as a tensor. `tf.cast(number, tf.float64)` alone would round it to float32 first."""
    return tf.cast(tf.constant(number, wide_dtype(dtype)), dtype)
