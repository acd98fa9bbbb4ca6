"""Products of float32 matrices whose factors are rounded to bfloat16, on CPUs.

TensorFlow uses oneDNN for products on CPUs. oneDNN can round the factors to bfloat16 and add in float32, which is
several times as fast on processors with AMX. An environment variable switches this on. TensorFlow reads it before its
first product, and rounds only the factors of products of rank 3.
"""

import os
from typing import Any

import tensorflow as tf

from txl_tf.calls import checked_call
from txl_tf.config import MATMUL_PRECISIONS, one_of
from txl_tf.errors import ParameterError
from txl_tf.kernels.shapes import Tensor

VARIABLE = "TF_SET_ONEDNN_FPMATH_MODE"
_OF_ONEDNN = "ONEDNN_DEFAULT_FPMATH_MODE"  # has the same effect in every program that uses oneDNN


@checked_call
def set_matmul_precision(precision: str) -> None:
    """Chooses the type to which the factors of float32 products are rounded, in all models of the process.

    Call it before TensorFlow multiplies for the first time, and after logical devices and strategies are made. Weights,
    activations and sums stay in float32. It affects the layers of this library, but not Keras's LSTM or programs that
    XLA compiles.

    Args:
        precision: "float32", or "bfloat16", which keeps 8 of the 24 significant bits of a float32.

    Raises:
        ParameterError: `precision` has another value; or the process cannot compute as requested. "bfloat16": there is
            a GPU or TPU, the processor has no AMX, or TensorFlow has multiplied before. "float32": an environment
            variable, or an earlier call of this function, has chosen another mode.
    """
    one_of(MATMUL_PRECISIONS)("matmul_precision", precision)
    if precision == "float32":
        for name in (VARIABLE, _OF_ONEDNN):
            if os.environ.get(name, "STRICT").upper() != "STRICT":
                allowed = f"bfloat16 where {name}={os.environ[name]}"
                message = (
                    f"matmul_precision=float32 is not possible with {name}={os.environ[name]}, which the environment "
                    "or an earlier matmul_precision=bfloat16 has set: start another process without it"
                )
                raise ParameterError("matmul_precision", precision, allowed, message)
        return
    accelerators = [device.name for device in tf.config.list_logical_devices() if device.device_type in ("GPU", "TPU")]
    if accelerators:
        message = f"matmul_precision=bfloat16 works only on CPUs, but TensorFlow found {accelerators[0]}"
        raise ParameterError("matmul_precision", precision, "float32 where there is a GPU or TPU", message)
    before = os.environ.get(VARIABLE, "STRICT")
    os.environ[VARIABLE] = "BF16"
    # 1 + 2**-12 becomes 1 in bfloat16. So the products below sum to 64 if factors are rounded, and to more if not.
    just_above_1 = tf.fill([1, 64, 64], 1 + 2.0**-12)
    largest: Any = tf.reduce_max(tf.matmul(just_above_1, tf.ones([1, 64, 64])))
    if largest > 64:
        os.environ[VARIABLE] = before
        message = (
            "matmul_precision=bfloat16 has no effect: it needs a processor with AMX, and must be set before TensorFlow "
            "multiplies for the first time"
        )
        raise ParameterError("matmul_precision", precision, "float32 in this process", message)


def rounds() -> bool:
    """Whether `VARIABLE` chooses bfloat16. Either `set_matmul_precision` or the user's environment has set it."""
    return os.environ.get(VARIABLE) == "BF16"


def matmul(a: Tensor, b: Tensor, transpose_a: bool = False, transpose_b: bool = False) -> Any:
    """`tf.matmul` of two matrices, whose factors are rounded as `set_matmul_precision` has chosen."""
    if a.dtype != tf.float32 or not rounds():
        return tf.matmul(a, b, transpose_a, transpose_b)
    return tf.squeeze(tf.matmul(tf.expand_dims(a, 0), tf.expand_dims(b, 0), transpose_a, transpose_b), 0)
