"""How much memory a training step of a language model needs, from its hyper-parameters.

    memory = training_memory(ModelConfig(n_token=..., n_layer=12, ...), rows=24, tgt_len=512)
    memory.weights, memory.gradients, memory.optimizer, memory.activations, memory.total      # bytes

With float32, 4 bytes for each number:

    weights      W
    gradients    W, and W again while they are clipped
    optimizer    2 W with Adam, AdamW and LAMB (two moments), W with SGD; W more with a moving average of the weights
    activations  of each layer: what its gradient needs
    memory       of each layer: B M E, twice

Shapes:
    B: rows of a replica      T: tgt_len      M: mem_len      K: M + T      E: d_model      H: n_head      D: d_head
    F: d_inner      V: n_token      L: n_layer      W: number of weights
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from txl_config.errors import ParameterError

FLOAT = 4  # bytes
# Arrays of each kind that a layer keeps for its gradient, fitted to measurements: see docs/performance.md.
ARRAYS = {"hidden": 8.0, "heads": 8.0, "keys": 3.0, "inner": 2.0, "scores": 3.0}
MOMENTS = {"adam": 2, "adamw": 2, "lamb": 2, "sgd": 1}
GATED = ("swiglu",)  # activations with a third product
LOGITS = 3.0  # arrays of logits of the softmax


@dataclasses.dataclass(frozen=True)
class TrainingMemory:
    """Bytes of a training step on one replica.

    Attributes:
        n_weights: number of weights.
        weights, gradients, optimizer, activations: see the module; the activations include those of the softmax.
        memory: the memory of the model, before and after a step.
    """

    n_weights: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    memory: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.memory


def count_weights(model: Any) -> int:
    """The number of weights of a `TransformerXLLM` or `TransformerLM`.

    Args:
        model: `ModelConfig` or `TransformerLMConfig`, with `n_token`.

    Raises:
        ParameterError: `n_token` is `None`.
    """
    if model.n_token is None:
        raise ParameterError("n_token", None, "the size of the vocabulary")
    width = model.n_head * model.d_head
    positions = getattr(model, "positions", None)
    relative = positions == "relative"
    attention = model.d_model * width * (5 if relative else 4)  # queries, keys, values, result; position keys
    if getattr(model, "lora_rank", 0):
        raise ParameterError("lora_rank", model.lora_rank, "0: LoRA is not estimated")
    inner = model.d_inner * (2 if getattr(model, "activation", "relu") in GATED else 1)
    feed_forward = model.d_model * inner + inner + model.d_inner * model.d_model + model.d_model
    norms = 2 * model.d_model * (1 if getattr(model, "norm", "layer") == "rms" else 2)
    layers = model.n_layer * (attention + feed_forward + norms)
    biases = 2 * width * (model.n_layer if getattr(model, "untie_r", False) else 1) if relative else 0
    learned = "learned" in (positions, getattr(model, "pos_embed", None))
    table = model.context_len * model.d_model if learned else 0
    return layers + biases + table + _embedding(model)


def bins(model: Any) -> list[tuple[int, int, bool]]:
    """`(words, width, whether there is a projection)` of each cluster of embedding and softmax."""
    ends = [0, *model.cutoffs, model.n_token]
    clusters: list[tuple[int, int, bool]] = []
    for i, (left, right) in enumerate(itertools.pairwise(ends)):
        width = model.d_embed // model.div_val**i
        clusters.append((right - left, width, width != model.d_model or (model.div_val > 1 and model.proj_same_dim)))
    return clusters


def _embedding(model: Any) -> int:
    """The weights of embedding and softmax, whose tables are shared."""
    clusters = bins(model)
    tables = clusters if model.div_val > 1 else [(model.n_token, model.d_embed, clusters[0][2])]
    embedding = sum(words * width + width * model.d_model * projected for words, width, projected in tables)
    softmax = model.n_token
    if not getattr(model, "tie_weight", True):
        softmax += sum(words * width for words, width, _ in tables)
    if model.cutoffs:
        softmax += len(model.cutoffs) * (model.d_embed + 1)
        shared = model.proj_share_all_but_first
        own = [cluster for i, cluster in enumerate(clusters) if not (shared and i > 0)]
        softmax += sum(width * model.d_model * projected for _, width, projected in own)
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
) -> TrainingMemory:
    """Estimates the memory of a training step on one replica.

    Args:
        model: `ModelConfig` or `TransformerLMConfig`, with `n_token`.
        rows: rows of the replica that are computed together: the batch, divided by the number of replicas and by the
            number of parts of gradient accumulation.
        tgt_len: tokens of a segment.
        optimizer: a name of `OPTIMIZERS`.
        ema: whether there is a moving average of the weights.
        recompute: whether activations of layers are computed again in the backward pass.
        mixed_precision: whether activations have 2 bytes.
    """
    weights = FLOAT * count_weights(model)
    of_layer = _layer_activations(model, rows, tgt_len)
    kept = model.n_layer * of_layer
    if recompute:
        kept = of_layer + model.n_layer * FLOAT * rows * tgt_len * model.d_model
    logits = LOGITS * FLOAT * rows * tgt_len * _logits(model)
    activations = (kept + logits) / (2 if mixed_precision else 1)
    return TrainingMemory(
        count_weights(model),
        weights,
        2 * weights,
        (MOMENTS[optimizer] + ema) * weights,
        int(activations),
        2 * FLOAT * model.n_layer * rows * model.mem_len * model.d_model,
    )


def _layer_activations(model: Any, rows: int, tgt_len: int) -> float:
    """Bytes that the gradient of one layer needs."""
    width = model.n_head * model.d_head
    keys = model.mem_len + tgt_len
    numbers = {
        "hidden": tgt_len * model.d_model,
        "heads": tgt_len * width,
        "keys": keys * width,
        "inner": tgt_len * model.d_inner,
        "scores": model.n_head * tgt_len * keys,
    }
    return FLOAT * rows * sum(ARRAYS[name] * number for name, number in numbers.items())


def _logits(model: Any) -> float:
    """Logits of a token: all words, or with clusters those of the first and about a tenth of the others."""
    first, *others = bins(model)
    return first[0] + len(others) + 0.1 * sum(words for words, _, _ in others)
