"""Functions and layers under their own names: pure functions for equations, layers that own the weights.

A call of a function here checks its arguments, see `public_calls.py`.
"""

from inspect import isroutine as _isroutine
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from txl_tf.calls import unknown_name as _unknown_name
from txl_tf.equations import shifted_scores
from txl_tf.kernels import cross_entropy, embedding_lookup, layer_norm, pairwise_scores
from txl_tf.kernels.attending import attend, attention_probs
from txl_tf.kernels.dropout import dropout
from txl_tf.nn.adaptive import AdaptiveSoftmax, adaptive_log_probs, mask_adaptive_logsoftmax, static_adaptive_logsoftmax
from txl_tf.nn.embedding import AdaptiveEmbedding, mask_adaptive_embedding_lookup
from txl_tf.nn.feed_forward import PositionwiseFF, PositionWiseFFN, point_wise_feed_forward_network, positionwise_ff
from txl_tf.nn.ops import LayerNorm, RMSNorm
from txl_tf.nn.position_schemes import (
    Alibi,
    Learned,
    Positions,
    Relative,
    Rotary,
    Sinusoids,
    alibi_slopes,
    register_positions,
)
from txl_tf.nn.positions import (
    get_angles,
    inverse_frequencies,
    positional_embedding,
    positional_encoding,
    rel_shift,
    relative_positions,
    tensor2tensor_frequencies,
)
from txl_tf.public_calls import OTHER_NAMES as _OTHER_NAMES
from txl_tf.public_calls import checked as _checked
from txl_tf.taggers.crf import CRF, crf_decode, crf_marginals, crf_nll
from txl_tf.taggers.flat_layers import FlatLayer, LatticeAttn
from txl_tf.taggers.lattice import Pairs, PositionFusion, distance_table, distinct_pairs, span_distances
from txl_tf.taggers.tener_layers import TenerAttn, TenerLayer, tener_position_scores, two_way_positions, two_way_scores
from txl_tf.transformer_xl.absolute_layer import MultiHeadAttn, TransformerLMLayer, multihead_attn
from txl_tf.transformer_xl.attention import RelMultiHeadAttn, create_mask, rel_multihead_attn
from txl_tf.transformer_xl.documents import document_mask
from txl_tf.transformer_xl.layer import TransformerXLLayer
from txl_tf.transformer_xl.score_terms import score_terms
from txl_tf.vanilla.embeddings import Embeddings, PositionalEncoding, PositionEmbedding
from txl_tf.vanilla.encoder_decoder import DecoderLayer, EncoderLayer
from txl_tf.vanilla.multi_head_attention import (
    MultiHeadAttention,
    create_look_ahead_mask,
    create_padding_mask,
    scaled_dot_product_attention,
)

__all__ = [
    "AdaptiveEmbedding", "AdaptiveSoftmax", "Alibi", "CRF", "DecoderLayer", "Embeddings", "EncoderLayer",
    "FlatLayer", "LatticeAttn", "LayerNorm", "Learned", "MultiHeadAttention", "MultiHeadAttn", "Pairs",
    "PositionEmbedding", "PositionFusion", "PositionWiseFFN", "PositionalEncoding", "Positions", "PositionwiseFF",
    "RMSNorm", "RelMultiHeadAttn", "Relative", "Rotary", "Sinusoids", "TenerAttn", "TenerLayer", "TransformerLMLayer",
    "TransformerXLLayer", "adaptive_log_probs", "alibi_slopes", "attend", "attention_probs",
    "create_look_ahead_mask", "create_mask", "create_padding_mask", "crf_decode", "crf_marginals", "crf_nll",
    "cross_entropy", "distance_table", "distinct_pairs", "document_mask", "dropout", "embedding_lookup",
    "get_angles", "inverse_frequencies", "layer_norm", "mask_adaptive_embedding_lookup", "mask_adaptive_logsoftmax",
    "multihead_attn", "pairwise_scores", "point_wise_feed_forward_network", "positional_embedding",
    "positional_encoding", "positionwise_ff", "register_positions", "rel_multihead_attn", "rel_shift",
    "relative_positions", "scaled_dot_product_attention", "score_terms", "shifted_scores", "span_distances",
    "static_adaptive_logsoftmax", "tener_position_scores", "tensor2tensor_frequencies", "two_way_positions",
    "two_way_scores",
]  # fmt: skip

if not _TYPE_CHECKING:  # type checkers report other names themselves

    def __getattr__(name: str) -> _Any:
        raise _unknown_name(__name__, name, __all__, _OTHER_NAMES)


# Under these names, functions check their arguments. Inside the library, layers call the same functions without checks.
globals().update(
    {name: _checked(name, value) for name, value in list(globals().items()) if name in __all__ and _isroutine(value)}
)
