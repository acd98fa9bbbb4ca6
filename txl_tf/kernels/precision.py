"""Products of float32 matrices whose factors are rounded to bfloat16, on CPUs.

oneDNN, which multiplies for TensorFlow on CPUs, can round the factors to bfloat16 and add up in float32. With AMX that
is several times as fast. TensorFlow allows it by a variable of the environment, which it reads before its first
product, and only in products of rank 3.
"""

import os

import tensorflow as tf

from txl_tf.config import MATMUL_PRECISIONS, one_of

VARIABLE = "TF_SET_ONEDNN_FPMATH_MODE"
_OF_ONEDNN = "ONEDNN_DEFAULT_FPMATH_MODE"  # the same for every program that uses it


def set_matmul_precision(precision: str) -> None:
    """Chooses the type that the factors of float32 products are rounded to, for all models of the process.

    Call it before TensorFlow multiplies for the first time, and after logical devices and strategies are made. Weights,
    activations and sums stay in float32. The layers of this library round; Keras's LSTM does not, nor does what XLA
    compiles.

    Args:
        precision: "float32", or "bfloat16", which has 8 of the 24 bits of a float32's digits.

    Raises:
        ValueError: `precision` is another word, or the process rounds otherwise: there is a GPU or a TPU, the processor
            has no AMX, TensorFlow has multiplied before, or the environment says so.
    """
    one_of(MATMUL_PRECISIONS)("matmul_precision", precision)
    if precision == "float32":
        for name in (VARIABLE, _OF_ONEDNN):
            if os.environ.get(name, "STRICT").upper() != "STRICT":
                raise ValueError(f"matmul_precision=float32 cannot be had where {name}={os.environ[name]}: unset it")
        return
    accelerators = [device.name for device in tf.config.list_logical_devices() if device.device_type in ("GPU", "TPU")]
    if accelerators:
        raise ValueError(f"matmul_precision=bfloat16 is for CPUs, but there is {accelerators[0]}")
    before = os.environ.get(VARIABLE, "STRICT")
    os.environ[VARIABLE] = "BF16"
    just_above_1 = tf.fill([1, 64, 64], 1 + 2.0**-12)
    if tf.reduce_max(tf.matmul(just_above_1, tf.ones([1, 64, 64]))) > 64:
        os.environ[VARIABLE] = before
        raise ValueError(
            "matmul_precision=bfloat16 has no effect: it needs a processor with AMX, and must be set before TensorFlow "
            "multiplies for the first time"
        )


def rounds() -> bool:
    """Whether `set_matmul_precision` has chosen bfloat16."""
    return os.environ.get(VARIABLE) == "BF16"


def matmul(a, b, **transposed):
    """`tf.matmul` of two matrices, whose factors are rounded as `set_matmul_precision` says."""
    if a.dtype != tf.float32 or not rounds():
        return tf.matmul(a, b, **transposed)
    return tf.squeeze(tf.matmul(tf.expand_dims(a, 0), tf.expand_dims(b, 0), **transposed), 0)
