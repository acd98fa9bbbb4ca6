"""The operations of the equations. They decide what a formula does not say: kernels, fusion, dtypes and gradients.

    plain.py        every operation in ordinary TensorFlow
    cpu.py          faster versions for CPUs; the default
    attending.py    the softmax over keys, times the values
    routing.py      how rows reach their clusters in the adaptive embedding and softmax
    dropout.py      dropout as a function of an explicit key and of the row

This file chooses one version of each operation for the process. With `TXL_KERNELS=plain` in the environment, it chooses
the plain version of every operation that has one. The numbers are the same up to rounding.
"""

import os

from txl_tf.config import one_of
from txl_tf.kernels import cpu, plain

VARIABLE = "TXL_KERNELS"

_CHOICES = {"fast": cpu, "plain": plain}
one_of(_CHOICES)(VARIABLE, os.environ.get(VARIABLE, "fast"))
_chosen = _CHOICES[os.environ.get(VARIABLE, "fast")]

add_bias = _chosen.add_bias
attend_with_one_query = cpu.attend_with_one_query
cross_entropy = _chosen.cross_entropy
embedding_lookup = _chosen.embedding_lookup
head_matmul = _chosen.head_matmul
join_heads = plain.join_heads
layer_norm = _chosen.layer_norm
logits = plain.logits
masked_softmax = _chosen.masked_softmax
pairwise_scores = _chosen.pairwise_scores
products_of_heads = cpu.products_of_heads
project = _chosen.project
project_heads = _chosen.project_heads
project_output = _chosen.project_output
query_matmul = _chosen.query_matmul
relu_layer = _chosen.relu_layer
residual_norm = _chosen.residual_norm
rms_norm = plain.rms_norm
takes_one_query = _chosen.takes_one_query
