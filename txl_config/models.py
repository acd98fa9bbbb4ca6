"""Hyper-parameters of networks and of the models around them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from txl_config.checks import (
    EVEN_SIZE,
    FRACTION,
    INIT_SCALE,
    LAYERS,
    LENGTH,
    MEMORY,
    NEVER_FALLING,
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
POS_EMBEDS = ("none", "sin", "fix")
POSITIONS = ("sin", "learned")
# Schemes of positions: name -> class. `txl_tf/nn/position_schemes.py` sets the classes, and users add their own.
SCHEMES: dict[str, Any] = {"relative": None, "sinusoids": None, "learned": None, "alibi": None, "rotary": None}
FUSIONS = ("ff", "ff_two", "ff_linear", "attn", "gate")
RESIDUALS = ("input", "own")
ACTIVATIONS = ("relu", "leaky")


@group
class DecoderConfig(Config):
    """What `NetworkConfig` and `TransformerLMConfig` share. Vocabulary and cutoffs are `None` and empty until the text
    is read."""

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
        "Let every token attend to mem_len + 1 positions, not to all it can.", default=False, free=True
    )
    layer_norm_epsilon: float = option("Added to the variance in layer norm.", FRACTION, default=1e-12, free=True)
    div_val: int = option("Divide the width of the embeddings by it from cluster to cluster.", at_least(1), default=1)
    proj_same_dim: bool = option("Project a cluster as wide as d_model too.", default=True)
    # Besides, a Keras initializer: an object, its name or its configuration.
    init: Any = option(
        "How weights are initialised.", one_of_or_initializer(("normal", "uniform")), default="normal", free=True
    )
    init_std: float = option("Standard deviation where init is normal.", INIT_SCALE, default=0.02, free=True)
    proj_init_std: float = option(
        "Standard deviation of the projections where init is normal.", INIT_SCALE, default=0.01, free=True
    )
    init_range: float = option("Range where init is uniform.", INIT_SCALE, default=0.1, free=True)
    context_len: int = option(
        "With absolute positions, the most tokens that generation has in view.",
        at_least(2, 1 << 20),
        default=512,
        free=where(pos_embed="sin", positions="sinusoids"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.init, str | dict):  # an object: as `config.json` holds it
            from keras.initializers import serialize  # slow to import: programs read their flags before

            object.__setattr__(self, "init", serialize(keras_initializer(self.init)))


@group
class NetworkConfig(DecoderConfig):
    """Arguments of `TransformerXL`."""

    clamp_len: int = option("Treat distances beyond it as clamp_len; -1 for no limit.", default=-1, free=True)
    untie_r: bool = option("Give every layer its own r_w_bias and r_r_bias.", default=False)
    reset_token: int | None = option("Token before which the memory is reset.", at_least(0), default=None, free=True)
    positions: str = option("What the network knows of positions.", one_of(SCHEMES), default="relative")


@group
class SoftmaxConfig(Config):
    """What the softmax of a language model has besides."""

    proj_share_all_but_first: bool = option(
        "Share all projections of embedding and softmax but the first.", default=False
    )


@group
class ModelConfig(SoftmaxConfig, NetworkConfig):
    """Arguments of `TransformerXLLM`."""


@group
class TransformerLMConfig(SoftmaxConfig, DecoderConfig):
    """Arguments of `TransformerLM`, which has neither distances nor resets."""

    mem_len: int = option(
        "Positions of memory; with absolute positions, for comparison only.", MEMORY, default=0, free=True
    )
    pos_embed: str = option(
        "Positions: sinusoids, or a learned table of context_len rows.", one_of(POSITIONS), default="sin"
    )


@group
class TransformerConfig(Config):
    """Arguments of `Transformer`. The vocabularies are `None` until the text is read."""

    input_vocab_size: int | None = option("Symbols of the source, padding included.", SYMBOLS, default=None)
    target_vocab_size: int | None = option("Symbols of the target.", SYMBOLS, default=None)
    num_layers: int = option("Layers of the encoder, and of the decoder.", LAYERS, flag=6)
    d_model: int = option("Width of the hidden states.", EVEN_SIZE, flag=512)
    num_heads: int = option("Attention heads.", WIDTH, flag=8)
    dff: int = option("Width inside the feed-forward nets.", WIDTH, flag=2048)
    max_len: int = option(
        "Most tokens of a source or of a target.", LENGTH, default=1000, free=unless(pos_embed="learned")
    )
    pos_embed: str = option(
        "Positions: sinusoids, or a learned table of max_len rows.", one_of(POSITIONS), default="sin"
    )
    rate: float = option("Dropout rate.", RATE, default=0.1, free=True)
    norm_first: bool = option("Normalise before every sublayer, not after it.", default=False)
    share_embeddings: bool = option("One table for source, target and softmax.", default=False)
    label_smoothing: float = option(
        "Share of the probability that the loss gives to all tokens alike.", RATE, default=0.0, free=True
    )
    dropatt: float = option("Dropout rate of the attention weights.", RATE, default=0.0, free=True)
    dropact: float = option("Dropout rate after the relu.", RATE, default=0.0, free=True)
    target_lengths: Sequence[int] | None = option(
        "Longest target of the training for sources of up to 16, 32, 64, ... symbols, which limits translations.",
        NEVER_FALLING,
        default=None,
    )


@group
class SentenceConfig(Config):
    """Base of networks that read sentences. Sizes of vocabularies are `None` until the text is read."""

    n_token: int | None = option("Size of the vocabulary: characters, and words of a lattice.", SYMBOLS, default=None)
    n_bigram: int = option("Size of the vocabulary of bigrams; 0 for none.", at_least(0, (1 << 31) - 1), default=0)
    d_embed: int = option("Width of the embeddings; that of the vectors where they are given.", WIDTH, default=50)
    d_bigram: int = option("Width of the embeddings of bigrams.", WIDTH, default=50)
    d_model: int = option("Width of the hidden states.", EVEN_SIZE, flag=128)
    max_seq_len: int = option(
        "Most tokens of a sentence, or of a window of a longer one.", LENGTH, default=512, free=unless(pos_embed="fix")
    )
    token_dropout: float = option(
        "Rate at which training takes <unk> for a character or a bigram.", RATE, default=0.0, free=True
    )


@group
class EncoderConfig(SentenceConfig):
    """Base of `TenerConfig` and `FlatConfig`."""

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
        "Score keys by their distances too, as the program, not the paper, does.", default=True
    )


@group
class FlatConfig(EncoderConfig):
    """Arguments of `Flat`."""

    fusion: str = option(
        "How the distances of a pair, four or (ff_two) two, become one position.", one_of(FUSIONS), default="ff"
    )
    fusion_shared: bool = option("Share the fusion between the layers.", default=True)
    max_seq_len: int = option(
        "Most tokens of a sentence, or of a window of a longer one.", LENGTH, default=512, free=unless(rel_pos_init=0)
    )
    rel_pos_init: int = option(
        "1: distances as they are; 0: max_seq_len added, as the program does.", at_least(0, 1), default=1
    )
    q_proj: bool = option("Project the queries.", default=True)
    k_proj: bool = option("Project the keys.", default=True)
    v_proj: bool = option("Project the values.", default=True)
    r_proj: bool = option("Project the positions.", default=True)
    attn_ff: bool = option("Project the output of the attention.", default=False)
    pre: str = option("Before a sublayer: a adds, n normalises.", default="")
    post: str = option("After a sublayer, the same.", default="an")
    residual: str = option(
        "What a of post adds: the sublayer's input, or, as the program, its own.", one_of(RESIDUALS), default="input"
    )
    activation: str = option("Of the feed-forward layers.", one_of(ACTIVATIONS), default="relu")


@group
class BiLSTMConfig(SentenceConfig):
    """Arguments of `BiLSTM`."""

    n_layer: int = option("Layers.", LAYERS, flag=1)
    embed_dropout: float = option("Dropout rate of the embeddings.", RATE, default=0.0, free=True)


@group
class LabelConfig(Config):
    """Arguments of `Tagger` besides its network. The labels are `None` until the text is read."""

    labels: Sequence[str] | None = option("Tags, in the order of their ids.", default=None)
    scheme: str | None = option(
        "none: the tags are no entities; default: bio, bioes or bmes.", one_of(("none",)), default=None
    )
    token_level: str = option("What a token of a text is.", one_of(TOKEN_LEVELS), default="char")
    start_end: bool = option("Give the CRF scores for the first and the last tag of a sentence.", default=True)
    constraints: bool = option(
        "Let decoding take only paths of tags that their scheme allows.", default=True, free=True
    )
    output_dropout: float = option(
        "Dropout rate of the hidden states before they become scores of tags.", RATE, default=0.0, free=True
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


def check_places(model: dict[str, Any], **lengths: int) -> None:
    """Raises ParameterError if a segment has more tokens than the model has learned positions.

    Args:
        model: the model's hyper-parameters, by name.
        **lengths: the options that set the length of segments, with their values.
    """
    most = model.get("context_len", TransformerLMConfig.context_len)
    for name, length in lengths.items():
        if "learned" in (model.get("pos_embed"), model.get("positions")) and length > most:
            raise ParameterError(name, length, f"at most context_len={most}, as many positions are learned")
