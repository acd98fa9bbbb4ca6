"""Hyper-parameters of networks, and of the models that contain them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from txl_config.checks import (
    EVEN_SIZE,
    FRACTION,
    INIT_SCALE,
    LAYERS,
    LENGTH,
    MEMORY,
    NEVER_FALLING,
    NOT_NEGATIVE,
    POSITIVE,
    RATE,
    SYMBOLS,
    WIDTH,
    Config,
    at_least,
    group,
    keras_initializer,
    one_of,
    one_of_or_initializer,
    option,
    unless,
    where,
)
from txl_config.errors import ParameterError

ATTN_TYPES = ("adatrans", "transformer")
TOKEN_LEVELS = ("char", "word")
# Values of `pos_embed`: of TENER, and of the vanilla models. The argument `positions` takes `SCHEMES`.
POS_EMBEDS = ("none", "sin", "fix")
POSITIONS = ("sin", "learned")
# Schemes of positions: name -> class. `txl_tf/nn/position_schemes.py` sets the classes, and users add their own.
SCHEMES: dict[str, Any] = {"relative": None, "sinusoids": None, "learned": None, "alibi": None, "rotary": None}
# The end of the error for another name. A run of a user's scheme can only be opened if its class is registered.
OWN_SCHEMES = "or a name given to txl_tf.layers.register_positions: import the module that registers it first"
# Arguments of a network that a scheme does not accept: `{argument: why}`.
REFUSED_BY_DEFAULT: Mapping[str, str] = {
    "clamp_len": "limits the sinusoids of distances, which only positions='relative' has",
    "untie_r": "is about the biases u and v, which only positions='relative' has",
    "context_len": "is the number of positions in a segment, which positions='sinusoids' and 'learned' have",
}
_REFUSED_IF_ABSOLUTE = {
    **dict.fromkeys(("clamp_len", "untie_r"), "is about distances, which absolute positions do not use"),
    "reset_token": "resets the memory within a segment, but absolute positions do not restart there",
}
# The same by the name of the scheme. Schemes of users are added when they are registered.
REFUSED: dict[str, Mapping[str, str]] = {
    "relative": {"context_len": REFUSED_BY_DEFAULT["context_len"]},
    "sinusoids": _REFUSED_IF_ABSOLUTE,
    "learned": _REFUSED_IF_ABSOLUTE,
    "alibi": REFUSED_BY_DEFAULT,
    "rotary": REFUSED_BY_DEFAULT,
}
# To add an activation:
# - code: add its name here and, if it is gated, to `GATED_ACTIVATIONS` and to the help text of `activation` below; its
#   function to `_ACTIVATIONS` of `txl_tf/nn/feed_forward.py`; and its arrays to `INNER_ARRAYS` of
#   `txl_config/memory.py`, after a measurement as in `tests/memory_estimate_test.py`;
# - docs: the docstrings of `PositionwiseFF` and of `TransformerXL` (`txl_tf/transformer_xl/network.py`), the table of
#   variants in docs/research.md, and the factors of the estimate in docs/performance.md and at the top of
#   `txl_config/memory.py`;
# - tests: the names in `tests/config_test.py`, and its equation in `tests/variants_test.py`.
ACTIVATIONS = ("relu", "gelu", "swiglu")
GATED_ACTIVATIONS = ("swiglu",)  # kernel_1 is [E, 2 F]: half of its result gates the other half
NORMS = ("layer", "rms")
FUSIONS = ("ff", "ff_two")
RESIDUALS = ("input", "own")
INITIAL = ("init", "init_std", "proj_init_std", "init_range")  # hyper-parameters that decide the initial weights
# Hyper-parameters of all models that only training uses.
TRAINING_ONLY = (
    *INITIAL, "dropout", "dropatt", "dropact", "rate", "embed_dropout", "token_dropout", "output_dropout",
    "label_smoothing", "z_loss",
)  # fmt: skip


@group
class DecoderConfig(Config):
    """Hyper-parameters that `NetworkConfig` and `TransformerLMConfig` share.

    `n_token` is `None`, and `cutoffs` is empty, until the text is read.
    """

    n_token: int | None = option("Size of the vocabulary.", SYMBOLS, default=None)
    cutoffs: Sequence[int] = option("First word of each cluster of the adaptive softmax.", default=())
    n_layer: int = option("Layers.", LAYERS, flag=6)
    d_model: int = option("Width of the hidden states.", EVEN_SIZE, flag=500)
    d_embed: int = option("Width of the embeddings.", WIDTH, flag=500)
    n_head: int = option("Attention heads.", WIDTH, flag=10)
    d_head: int = option("Width of a head.", WIDTH, flag=50)
    d_inner: int = option("Width inside the feed-forward layers.", WIDTH, flag=1000)
    dropout: float = option("Dropout rate.", RATE, default=0.1, free=True)
    dropatt: float = option("Dropout rate of the attention probabilities.", RATE, default=0.0, flag=0.1, free=True)
    mem_len: int = option("Positions of memory.", MEMORY, default=0, flag=70, free=True)
    same_length: bool = option(
        "Limit the attention of every token to the last mem_len + 1 positions.", default=False, free=True
    )
    layer_norm_epsilon: float = option(
        "Constant that layer norm adds to the variance.", FRACTION, default=1e-12, free=True
    )
    pre_lnorm: bool = option("Normalise before each sublayer, not after its residual connection.", default=False)
    activation: str = option(
        "Activation of the feed-forward nets; swiglu has a third product, which gates the first.",
        one_of(ACTIVATIONS),
        default="relu",
    )
    norm: str = option("Layer norm, or division by the root mean square alone.", one_of(NORMS), default="layer")
    lora_rank: int = option(
        "Rank of LoRA, which trains only low-rank updates of the kernels of the layers; 0 for none.",
        at_least(0, 1 << 18),
        default=0,
    )
    lora_alpha: float | None = option(
        "Alpha of LoRA: updates are multiplied by alpha / rank. Default: the rank.", POSITIVE, default=None
    )
    div_val: int = option("Factor by which embeddings become narrower from cluster to cluster.", at_least(1), default=1)
    proj_same_dim: bool = option("With div_val above 1, also project a cluster as wide as d_model.", default=True)
    # It can also be a Keras initializer: an object, its name or its configuration.
    init: Any = option(
        "Distribution of the initial weights.",
        one_of_or_initializer(("normal", "uniform")),
        default="normal",
        free=True,
    )
    init_std: float = option("Standard deviation if init is normal.", INIT_SCALE, default=0.02, free=True)
    proj_init_std: float = option(
        "Standard deviation of the projections if init is normal.", INIT_SCALE, default=0.01, free=True
    )
    init_range: float = option("Range if init is uniform.", INIT_SCALE, default=0.1, free=True)
    context_len: int = option(
        "With absolute positions, how many tokens generation sees at most.",
        at_least(2, 1 << 20),
        default=512,
        free=where(pos_embed="sin", positions="sinusoids"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.init, str | dict):  # a Keras object becomes its configuration, as in `config.json`
            # Imported here, because it takes seconds. It has no stubs.
            import keras  # pyright: ignore[reportMissingTypeStubs]

            initializers: Any = keras.initializers
            object.__setattr__(self, "init", initializers.serialize(keras_initializer(self.init)))


@group
class NetworkConfig(DecoderConfig):
    """Arguments of `TransformerXL`."""

    clamp_len: int = option(
        "Treat larger distances as clamp_len; 0 or -1 for no limit.", at_least(-1), default=-1, free=True
    )
    untie_r: bool = option("Give every layer its own r_w_bias and r_r_bias.", default=False)
    reset_token: int | None = option("Token before which the memory is reset.", at_least(0), default=None, free=True)
    positions: str = option("How the network sees positions.", one_of(SCHEMES, OWN_SCHEMES), default="relative")


@group
class SoftmaxConfig(Config):
    """Hyper-parameters of the softmax of a language model."""

    proj_share_all_but_first: bool = option(
        "Share all projections of embedding and softmax except the first.", default=False
    )
    tie_weight: bool = option("Use the tables of the embedding in the softmax, too.", default=True)
    label_smoothing: float = option(
        "Fraction of the probability that the training loss spreads evenly over all tokens.",
        RATE,
        default=0.0,
        free=True,
    )
    z_loss: float = option(
        "Weight, in the training loss, of the squared logarithm of the softmax's normalizer.",
        NOT_NEGATIVE,
        default=0.0,
        free=True,
    )


@group
class ModelConfig(SoftmaxConfig, NetworkConfig):
    """Arguments of `TransformerXLLM`."""


@group
class TransformerLMConfig(SoftmaxConfig, DecoderConfig):
    """Arguments of `TransformerLM`, which has no relative positions and no resets of memory."""

    mem_len: int = option(
        "Positions of memory; with absolute positions, for comparison only.", MEMORY, default=0, free=True
    )
    pos_embed: str = option(
        "Positions: sinusoids, or a learned table of context_len rows.", one_of(POSITIONS), default="sin"
    )


class Bin(NamedTuple):
    """A cluster of the adaptive embedding and softmax."""

    words: int
    width: int  # of the embeddings
    is_projected: bool  # to the width of the hidden states


def bins(
    n_token: int, d_embed: int, d_model: int, cutoffs: Sequence[int], div_val: int, proj_same_dim: bool
) -> list[Bin]:
    """Returns the clusters of the vocabulary. Cluster i has the width `d_embed // div_val**i`.

    A cluster of another width than `d_model` is projected to it. With `proj_same_dim` and a `div_val` above 1, all
    clusters are projected. Without `cutoffs`, there is one cluster, and `div_val` has no effect.
    """
    div_val = div_val if cutoffs else 1
    ends = [0, *cutoffs, n_token]
    sizes = [right - left for left, right in itertools.pairwise(ends)]
    widths = [d_embed // div_val**i for i in range(len(sizes))]
    always = div_val > 1 and proj_same_dim
    return [Bin(words, width, always or width != d_model) for words, width in zip(sizes, widths, strict=True)]


@group
class TransformerConfig(Config):
    """Arguments of `Transformer`. The vocabularies are `None` until the text is read."""

    input_vocab_size: int | None = option("Number of source symbols, with padding.", SYMBOLS, default=None)
    target_vocab_size: int | None = option("Number of target symbols, with padding.", SYMBOLS, default=None)
    num_layers: int = option("Layers of the encoder, and also of the decoder.", LAYERS, flag=6)
    d_model: int = option("Width of the hidden states.", EVEN_SIZE, flag=512)
    num_heads: int = option("Attention heads.", WIDTH, flag=8)
    dff: int = option("Width inside the feed-forward nets.", WIDTH, flag=2048)
    max_len: int = option(
        "Most tokens of a source or of a target.", LENGTH, default=1000, free=unless(pos_embed="learned")
    )
    pos_embed: str = option(
        "Positions: sinusoids; a learned table of max_len rows; or rotary, in every attention.",
        one_of((*POSITIONS, "rotary")),
        default="sin",
    )
    rate: float = option("Dropout rate.", RATE, default=0.1, free=True)
    norm_first: bool = option("Normalise before each sublayer, not after it.", default=False)
    share_embeddings: bool = option("Use one table for source, target and softmax.", default=False)
    label_smoothing: float = option(
        "Fraction of the probability that the loss spreads evenly over all tokens.", RATE, default=0.0, free=True
    )
    dropatt: float = option("Dropout rate of the attention weights.", RATE, default=0.0, free=True)
    dropact: float = option("Dropout rate after the relu.", RATE, default=0.0, free=True)
    target_lengths: Sequence[int] | None = option(
        "Longest training target for sources of up to 16, 32, 64, ... symbols. They limit translations.",
        NEVER_FALLING,
        default=None,
    )


@group
class SentenceConfig(Config):
    """Hyper-parameters of all networks that read sentences. `n_token` is `None` until the text is read."""

    n_token: int | None = option("Size of the vocabulary: characters, and words of a lattice.", SYMBOLS, default=None)
    n_bigram: int = option("Size of the vocabulary of bigrams; 0 for none.", at_least(0, (1 << 31) - 1), default=0)
    d_embed: int = option("Width of the embeddings; if there are vectors, their width.", WIDTH, default=50)
    d_bigram: int = option("Width of the embeddings of bigrams.", WIDTH, default=50)
    d_model: int = option("Width of the hidden states.", EVEN_SIZE, flag=128)
    max_seq_len: int = option(
        "Most tokens of a sentence, or of a window of a longer one.", LENGTH, default=512, free=unless(pos_embed="fix")
    )
    token_dropout: float = option(
        "Rate at which training replaces a character, a bigram or a word of a lattice with <unk>.",
        RATE,
        default=0.0,
        free=True,
    )


@group
class EncoderConfig(SentenceConfig):
    """Hyper-parameters that `TenerConfig` and `FlatConfig` share."""

    n_layer: int = option("Layers.", LAYERS, flag=1)
    n_head: int = option("Attention heads.", WIDTH, flag=8)
    d_inner: int = option("Width inside the feed-forward layers.", WIDTH, flag=384)
    scale: bool = option("Divide the attention scores by the square root of the width of a head.", default=False)
    dropout: float = option("Dropout rate inside the feed-forward layers.", RATE, default=0.0, free=True)
    dropatt: float = option("Dropout rate of the attention probabilities.", RATE, default=0.0, free=True)
    embed_dropout: float = option("Dropout rate of the embeddings.", RATE, default=0.0, free=True)


@group
class TenerConfig(EncoderConfig):
    """Arguments of `Tener`."""

    attn_type: str = option(
        "Direction-aware attention, or the vanilla Transformer's.", one_of(ATTN_TYPES), default="adatrans"
    )
    pos_embed: str = option(
        "Absolute positions to add: sinusoids or a learned table.", one_of(POS_EMBEDS), default="none"
    )
    after_norm: bool = option("Normalise after every sublayer, not before it.", default=True)
    key_position_term: bool = option(
        "Also score keys by their distances, as the original program does, but not the paper.", default=True
    )


@group
class FlatConfig(EncoderConfig):
    """Arguments of `Flat`."""

    removed = {
        "q_proj": True, "v_proj": True, "r_proj": True, "attn_ff": False, "pre": "", "post": "an", "activation": "relu",
    }  # fmt: skip

    fusion: str = option(
        "How the four distances of a pair, or two with ff_two, become one position.", one_of(FUSIONS), default="ff"
    )
    fusion_shared: bool = option("Share the fusion between the layers.", default=True)
    max_seq_len: int = option(
        "Most tokens of a sentence, or of a window of a longer one.", LENGTH, default=512, free=unless(rel_pos_init=0)
    )
    rel_pos_init: int = option(
        "1: distances are used as they are; 0: max_seq_len is added to them, as in the original program.",
        at_least(0, 1),
        default=1,
    )
    k_proj: bool = option("Project the keys.", default=True)
    residual: str = option(
        "What is added to a sublayer's output: its input, or, as in the program, the output itself.",
        one_of(RESIDUALS),
        default="input",
    )


@group
class BiLSTMConfig(SentenceConfig):
    """Arguments of `BiLSTM`."""

    n_layer: int = option("Layers.", LAYERS, flag=1)
    embed_dropout: float = option("Dropout rate of the embeddings.", RATE, default=0.0, free=True)


@group
class LabelConfig(Config):
    """Arguments of `Tagger`, except its network. The labels are `None` until the text is read."""

    labels: Sequence[str] | None = option("Tags, in the order of their ids.", default=None)
    scheme: str | None = option(
        "none: the tags do not mark entities; default: bio, bioes or bmes.", one_of(("none",)), default=None
    )
    token_level: str = option("What a token of a text is: a character or a word.", one_of(TOKEN_LEVELS), default="char")
    start_end: bool = option("Let the CRF score the first and the last tag of a sentence.", default=True)
    constraints: bool = option("Decode only sequences of tags that their scheme allows.", default=True, free=True)
    output_dropout: float = option(
        "Dropout rate of the hidden states before the layer that scores tags.", RATE, default=0.0, free=True
    )


@group
class TenerTaggerConfig(LabelConfig, TenerConfig):
    """Arguments of a `Tagger` and of the `Tener` in it."""


@group
class FlatTaggerConfig(LabelConfig, FlatConfig):
    """Arguments of a `Tagger` and of the `Flat` in it."""


@group
class BiLSTMTaggerConfig(LabelConfig, BiLSTMConfig):
    """Arguments of a `Tagger` and of the `BiLSTM` in it."""


def has_learned_positions(model: Mapping[str, Any]) -> bool:
    """Whether the model's hyper-parameters, given by name, choose learned absolute positions."""
    return "learned" in (model.get("pos_embed"), model.get("positions"))


def check_position_count(model: dict[str, Any], **lengths: int) -> None:
    """Raises ParameterError if a segment has more tokens than the model has learned positions.

    A model whose positions are not learned accepts every length.

    Args:
        model: the model's hyper-parameters, by name.
        **lengths: the options that set the length of segments, with their values.
    """
    n_positions = model.get("context_len", TransformerLMConfig.context_len)
    for name, length in lengths.items():
        if has_learned_positions(model) and length > n_positions:
            raise ParameterError(name, length, f"at most context_len={n_positions}, as many positions are learned")
