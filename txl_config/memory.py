"""How much memory a training step of a language model needs, from its hyper-parameters.

    memory = training_memory(ModelConfig(n_token=..., n_layer=12, ...), rows=24, tgt_len=512)
    memory.weights, memory.gradients, memory.optimizer, memory.activations, memory.total      # bytes

With float32, 4 bytes for each number:

    weights      W
    gradients    2 W: the gradients, and their clipped copies; W more for every further part of `parallel_parts`
    optimizer    2 W with Adam, AdamW and LAMB (two moments), W with SGD, 2 W less the kernels of the layers with Muon;
                 W more with a moving average of the weights
    activations  of each layer B (3 T E + 2.5 K H D + 2 T F + 2.75 H T K), and of the softmax 3.5 B T V;
                 with gelu 5.5 T F, with swiglu 6.5 T F; with label smoothing 4.5 B T V; with cutoffs and without label
                 smoothing, V is the first cluster and a tenth of the others
    memory       2 L B M E: before and after a step
    runtime      95 MB: graphs and threads of TensorFlow, besides what its import takes

The factors of the activations and the runtime are fitted to ten training runs on a CPU, those of gelu, swiglu
and label smoothing to five further ones, see docs/performance.md.

Shapes:
    B: rows of a replica      T: tgt_len      M: mem_len      K: M + T      E: d_model      H: n_head      D: d_head
    F: d_inner      V: n_token      L: n_layer      W: number of weights
"""

from __future__ import annotations

import dataclasses
from typing import Any

from txl_config.errors import ParameterError
from txl_config.models import GATED_ACTIVATIONS, Bin, NetworkConfig, bins, has_learned_positions

FLOAT = 4  # bytes
# How many arrays of each kind a layer stores for its gradient, fitted to measurements: see docs/performance.md.
# Shapes: hidden [B, T, E], keys [B, K, H * D], inner [B, T, F], scores [B, H, T, K].
ARRAYS = {"hidden": 3.0, "keys": 2.5, "scores": 2.75}
INNER_ARRAYS = {"relu": 2.0, "gelu": 5.5, "swiglu": 6.5}  # activation -> number of arrays "inner"
LOGITS = 3.5  # how many arrays of the size of the logits the softmax stores
SMOOTHED_LOGITS = 4.5  # with label smoothing: also the log-probabilities of all words
RUNTIME = 95_000_000  # bytes
# Numbers that an optimizer stores for each weight. Muon stores one less for the kernels of the layers.
MOMENTS = {"adam": 2, "adamw": 2, "lamb": 2, "sgd": 1, "muon": 2}


@dataclasses.dataclass(frozen=True)
class TrainingMemory:
    """Bytes of a training step on one replica.

    Attributes:
        n_weights: number of weights.
        weights, gradients, optimizer, activations: bytes, see the module. The activations include those of the softmax.
        memory: bytes of the memory of the model, before and after a step.
        runtime: bytes of graphs and threads of TensorFlow.
    """

    n_weights: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    memory: int
    runtime: int = RUNTIME

    @property
    def total(self) -> int:
        """The sum of all parts, in bytes."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.memory + self.runtime


def count_weights(model: Any) -> int:
    """Returns the number of weights of a `TransformerXLLM` or `TransformerLM`.

    Args:
        model: `ModelConfig` or `TransformerLMConfig`, with `n_token`.

    Raises:
        ParameterError: `n_token` is `None`, or the model has LoRA.
    """
    if model.n_token is None:
        raise ParameterError("n_token", None, "the size of the vocabulary")
    if model.lora_rank:
        raise ParameterError("lora_rank", model.lora_rank, "0: LoRA is not estimated")
    feed_forward_biases = _inner_width(model) + model.d_model
    norms = 2 * model.d_model * (1 if model.norm == "rms" else 2)  # gamma, and beta of layer norm
    layers = _kernels(model) + model.n_layer * (feed_forward_biases + norms)
    biases = 0
    if _is_relative(model):
        n_biases = model.n_layer if model.untie_r else 1  # pairs of r_w_bias and r_r_bias
        biases = 2 * model.n_head * model.d_head * n_biases
    table = model.context_len * model.d_model if has_learned_positions(model.to_dict()) else 0
    return layers + biases + table + _embedding(model)


def _kernels(model: Any) -> int:
    """Returns the number of weights in the matrices of attention and feed-forward nets, in all layers."""
    n_kernels = 5 if _is_relative(model) else 4  # queries, keys, values and the output; relative: also position keys
    attention = model.d_model * model.n_head * model.d_head * n_kernels
    feed_forward = model.d_model * (_inner_width(model) + model.d_inner)
    return model.n_layer * (attention + feed_forward)


def _inner_width(model: Any) -> int:
    """Returns the number of columns of the first kernel of the feed-forward net."""
    return model.d_inner * (2 if model.activation in GATED_ACTIVATIONS else 1)


def _is_relative(model: Any) -> bool:
    """Returns whether the model has relative positions, with position keys and their biases."""
    return isinstance(model, NetworkConfig) and model.positions == "relative"


def _bins(model: Any) -> list[Bin]:
    """Returns the clusters of embedding and softmax."""
    return bins(model.n_token, model.d_embed, model.d_model, model.cutoffs, model.div_val, model.proj_same_dim)


def _embedding(model: Any) -> int:
    """Returns the number of weights of embedding and softmax, which may share their tables (`tie_weight`)."""
    clusters = _bins(model)
    # With div_val 1, all clusters have the same width, and one table.
    tables = clusters if model.div_val > 1 else [Bin(model.n_token, model.d_embed, clusters[0].is_projected)]
    embedding = sum(words * width + width * model.d_model * is_projected for words, width, is_projected in tables)
    softmax = model.n_token  # biases
    if not model.tie_weight:
        softmax += sum(words * width for words, width, _ in tables)
    if model.cutoffs:
        softmax += len(model.cutoffs) * (model.d_embed + 1)  # weights and biases of the entries of later clusters
        # Clusters whose projections the softmax does not share with the embedding.
        own = clusters[:1] if model.proj_share_all_but_first else clusters
        softmax += sum(width * model.d_model * is_projected for _, width, is_projected in own)
    return embedding + softmax


def training_memory(
    model: Any,
    rows: int,
    tgt_len: int,
    *,
    optimizer: str = "adam",
    ema: bool = False,
    recompute: bool = False,
    mixed_precision: bool = False,
    parallel_parts: int = 1,
) -> TrainingMemory:
    """Estimates the memory of a training step on one replica.

    Args:
        model: `ModelConfig` or `TransformerLMConfig`, with `n_token`.
        rows: rows of the replica that are computed together: the batch, divided by the number of replicas and by the
            number of parts of gradient accumulation.
        tgt_len: tokens of a segment.
        optimizer: a key of `MOMENTS`.
        ema: whether there is a moving average of the weights.
        recompute: whether activations of layers are computed again in the backward pass.
        mixed_precision: whether a number in the activations has 2 bytes instead of 4.
        parallel_parts: number of parts of the rows that are computed at the same time.

    Raises:
        ParameterError: see `count_weights`.
    """
    n_weights = count_weights(model)
    weights = FLOAT * n_weights
    one_layer = _layer_activations(model, rows, tgt_len)
    all_layers = model.n_layer * one_layer
    if recompute:  # one layer at a time, and the input of every layer
        all_layers = one_layer + model.n_layer * FLOAT * rows * tgt_len * model.d_model
    arrays = SMOOTHED_LOGITS if _is_smoothed(model) else LOGITS
    logits = arrays * FLOAT * rows * tgt_len * _logits_per_token(model)
    return TrainingMemory(
        n_weights=n_weights,
        weights=weights,
        gradients=(1 + parallel_parts) * weights,
        optimizer=(MOMENTS[optimizer] + ema) * weights - (FLOAT * _kernels(model) if optimizer == "muon" else 0),
        activations=int((all_layers + logits) / (2 if mixed_precision else 1)),
        memory=2 * FLOAT * model.n_layer * rows * model.mem_len * model.d_model,
    )


def _layer_activations(model: Any, rows: int, tgt_len: int) -> float:
    """Returns the bytes of the arrays that the gradient of one layer needs, in float32."""
    width = model.n_head * model.d_head
    keys = model.mem_len + tgt_len
    sizes = {  # of one array, for one row of the batch
        "hidden": tgt_len * model.d_model,
        "keys": keys * width,
        "inner": tgt_len * model.d_inner,
        "scores": model.n_head * tgt_len * keys,
    }
    arrays = {**ARRAYS, "inner": INNER_ARRAYS[model.activation]}
    return FLOAT * rows * sum(arrays[name] * size for name, size in sizes.items())


def _is_smoothed(model: Any) -> bool:
    """Whether the loss has label smoothing."""
    return bool(model.label_smoothing)


def _logits_per_token(model: Any) -> float:
    """Returns how many logits the softmax computes for a token, on average.

    Without clusters, it computes a logit for each word of the vocabulary. With clusters, it computes one for each word
    of the first cluster, and one for each later cluster. Without label smoothing, only tokens of a later cluster need
    the logits of its words: a token is assumed to need a tenth of the logits of all later clusters. With label
    smoothing, every token needs all of them.
    """
    first, *others = _bins(model)
    share = 1.0 if _is_smoothed(model) else 0.1
    return first.words + len(others) + share * sum(cluster.words for cluster in others)
