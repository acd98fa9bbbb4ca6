"""The operations of the equations. They decide what a formula does not say: kernels, fusion, dtypes and gradients.

    plain.py        every operation in ordinary TensorFlow
    cpu.py          faster versions for CPUs; the default
    attending.py    the softmax over keys, times the values
    routing.py      how rows reach their clusters in the adaptive embedding and softmax
    dropout.py      dropout as a function of an explicit key and of the row

With `TXL_KERNELS=plain` in the environment, a process uses only the plain versions. The numbers are the same up to
rounding.
"""

from txl_tf.kernels.attending import attend, attention_probs
from txl_tf.kernels.chosen import (
    add_bias,
    attend_with_one_query,
    cross_entropy,
    embedding_lookup,
    head_matmul,
    join_heads,
    layer_norm,
    logits,
    masked_softmax,
    pairwise_scores,
    products_of_heads,
    project,
    project_heads,
    project_output,
    relu_layer,
    residual_norm,
    rms_norm,
    takes_one_query,
)

__all__ = [
    "add_bias", "attend", "attend_with_one_query", "attention_probs", "cross_entropy", "embedding_lookup",
    "head_matmul", "join_heads", "layer_norm", "logits", "masked_softmax", "pairwise_scores", "products_of_heads",
    "project", "project_heads", "project_output", "relu_layer", "residual_norm", "rms_norm", "takes_one_query",
]  # fmt: skip
