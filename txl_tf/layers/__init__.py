"""Functions and layers under their own names: pure functions for equations, layers that own the weights."""

from txl_tf.layers.adaptive import (
    AdaptiveSoftmax,
    adaptive_log_probs,
    mask_adaptive_logsoftmax,
    static_adaptive_logsoftmax,
)
from txl_tf.layers.attention import (
    RelMultiHeadAttn,
    attend,
    attention_probs,
    create_mask,
    pairwise_scores,
    rel_multihead_attn,
    rel_shift,
    shifted_scores,
)
from txl_tf.layers.dropout import dropout
from txl_tf.layers.embedding import AdaptiveEmbedding, embedding_lookup, mask_adaptive_embedding_lookup
from txl_tf.layers.feed_forward import PositionwiseFF, positionwise_ff
from txl_tf.layers.ops import LayerNorm, cross_entropy, layer_norm
from txl_tf.layers.positions import inverse_frequencies, positional_embedding, relative_positions
from txl_tf.layers.transformer_xl_layer import TransformerXLLayer

__all__ = [
    "AdaptiveEmbedding", "AdaptiveSoftmax", "LayerNorm", "PositionwiseFF", "RelMultiHeadAttn", "TransformerXLLayer",
    "adaptive_log_probs", "attend", "attention_probs", "create_mask", "cross_entropy", "dropout", "embedding_lookup",
    "inverse_frequencies", "layer_norm", "mask_adaptive_embedding_lookup", "mask_adaptive_logsoftmax",
    "pairwise_scores", "positional_embedding", "positionwise_ff", "rel_multihead_attn", "rel_shift",
    "relative_positions", "shifted_scores", "static_adaptive_logsoftmax",
]  # fmt: skip
