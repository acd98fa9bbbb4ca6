"""The names that the original program gives the weights of a language model in its checkpoints."""

from __future__ import annotations

from typing import Any

from txl_tf.language.language_model import LanguageModel
from txl_tf.nn.feed_forward import PositionwiseFF
from txl_tf.transformer_xl.attention import SegmentAttention


def original_names(lm: LanguageModel) -> dict[str, Any]:
    """`{name in the original program: Keras variable}`, in the original's order.

    Weights that the original does not have are left out, as are all weights of a user's own layer.
    """
    network = lm.network
    variables = {"r_w_bias": network.r_w_bias, "r_r_bias": network.r_r_bias, "pos_table": network.pos_table}

    scope = "adaptive_embed/cutoff_{}/" if network.embedding.div_val > 1 else "adaptive_embed/"
    for i, (table, proj) in enumerate(zip(network.embedding.tables, network.embedding.projs, strict=True)):
        variables[scope.format(i) + "lookup_table"] = table
        variables[scope.format(i) + "proj_W"] = proj

    for i, layer in enumerate(network.decoder_layers):
        attn = getattr(layer, "rel_attn", None)
        ff = getattr(layer, "ff", None)
        if isinstance(attn, SegmentAttention) and isinstance(ff, PositionwiseFF):
            variables |= {f"layer_{i}/{name}": variable for name, variable in _names_in_layer(attn, ff).items()}

    softmax = lm.softmax
    if not getattr(softmax, "tie_weight", True):  # the original has no such tables
        scope = "adaptive_softmax/cutoff_{}/" if len(softmax.tables) > 1 else "adaptive_softmax/"
        variables |= {scope.format(i) + "lookup_table": table for i, table in enumerate(softmax.tables)}
    if softmax.clusters is None:
        variables["adaptive_softmax/bias"] = softmax.biases[0]
    else:
        for i, (bias, proj) in enumerate(zip(softmax.biases, softmax.projs, strict=True)):
            variables[f"adaptive_softmax/cutoff_{i}/b"] = bias
            variables[f"adaptive_softmax/cutoff_{i}/proj"] = proj
            if i == 0:
                variables["adaptive_softmax/cutoff_0/cluster_W"] = softmax.clusters[0]
                variables["adaptive_softmax/cutoff_0/cluster_b"] = softmax.clusters[1]
    return {f"transformer/{name}": variable for name, variable in variables.items() if variable is not None}


def _names_in_layer(attn: SegmentAttention, ff: PositionwiseFF) -> dict[str, Any]:
    """`{name within the scope of a layer: variable}`; `None` for a weight that a user's layer norm does not have."""
    return {
        "rel_attn/qkv/kernel": attn.qkv_kernel,
        "rel_attn/r/kernel": attn.r_kernel,
        "rel_attn/o/kernel": attn.o_kernel,
        "rel_attn/LayerNorm/beta": getattr(attn.layer_norm, "beta", None),
        "rel_attn/LayerNorm/gamma": getattr(attn.layer_norm, "gamma", None),
        "ff/layer_1/kernel": ff.kernel_1,
        "ff/layer_1/bias": ff.bias_1,
        "ff/layer_2/kernel": ff.kernel_2,
        "ff/layer_2/bias": ff.bias_2,
        "ff/LayerNorm/beta": getattr(ff.layer_norm, "beta", None),
        "ff/LayerNorm/gamma": getattr(ff.layer_norm, "gamma", None),
    }
