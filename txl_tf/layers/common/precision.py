"""Products of matrices of float32 numbers, on processors also of numbers that are rounded to bfloat16.

oneDNN, which multiplies for TensorFlow on CPUs, can round the factors to bfloat16 and add up in float32. With units for
it (AMX, AVX512-BF16) that is several times as fast. TensorFlow allows it by a variable of the environment, which it
reads at its first product, and in products of rank 3, not in those of two matrices.
"""

import os

import tensorflow as tf

from txl_tf.config import MATMUL_PRECISIONS, one_of

VARIABLE = "TF_SET_ONEDNN_FPMATH_MODE"


def set_matmul_precision(precision: str) -> None:
    """Chooses what float32 numbers are rounded to before they are multiplied. Call it before TensorFlow multiplies.

    Weights, activations, sums and everything else stay in float32. It holds to the process's end, for products that
    XLA does not compile.

    Args:
        precision: "float32", not rounded, or "bfloat16", 8 bits of their 24.

    Raises:
        ValueError: `precision` is another word, or cannot be had: there is a GPU or a TPU, the processor has no units
            for bfloat16, or TensorFlow has multiplied before.
    """
    one_of(MATMUL_PRECISIONS)("matmul_precision", precision)
    if precision == "float32":
        if rounds():
            raise ValueError(f"matmul_precision must be bfloat16 where {VARIABLE} is set to BF16, got float32")
        return
    accelerators = [device.name for device in tf.config.list_logical_devices() if device.device_type in ("GPU", "TPU")]
    if accelerators:
        raise ValueError(f"matmul_precision=bfloat16 is for processors, but there is {accelerators[0]}")
    os.environ[VARIABLE] = "BF16"
    just_above_1 = tf.fill([1, 64, 64], 1 + 2.0**-12)
    if tf.reduce_max(tf.matmul(just_above_1, tf.ones([1, 64, 64]))) > 64:
        del os.environ[VARIABLE]
        raise ValueError(
            "matmul_precision=bfloat16 has no effect: it needs a processor with AMX or AVX512-BF16, and must be set "
            "before TensorFlow multiplies for the first time"
        )


def rounds() -> bool:
    """Whether float32 numbers are rounded to bfloat16 before they are multiplied."""
    return os.environ.get(VARIABLE) == "BF16"


def matmul(a, b, transpose_b=False):
    """`tf.matmul` of two matrices, in the precision of `set_matmul_precision`."""
    if a.dtype != tf.float32 or not rounds():
        return tf.matmul(a, b, transpose_b=transpose_b)
    return tf.squeeze(tf.matmul(a[None], b[None], transpose_b=transpose_b), 0)
