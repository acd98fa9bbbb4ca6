"""Which version of each operation a process uses: see `TXL_KERNELS` in `kernels/__init__.py`."""

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
project = plain.project
project_heads = _chosen.project_heads
project_output = _chosen.project_output
relu_layer = _chosen.relu_layer
residual_norm = _chosen.residual_norm
rms_norm = plain.rms_norm
takes_one_query = _chosen.takes_one_query

# The plain version has the docstring. That of the fast version is added to it.
for _name, _operation in list(globals().items()):
    if callable(_operation) and hasattr(plain, _name) and _operation is not getattr(plain, _name):
        _operation.__doc__ = "\n\n".join(filter(None, [getattr(plain, _name).__doc__, _operation.__doc__]))
