"""Hyper-parameters of networks and of the models around them."""

from __future__ import annotations

from typing import Any, ClassVar

from txl_tf.config.checks import (
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

ATTN_TYPES = ("adatrans", "transformer")
TOKEN_LEVELS = ("char", "word")
POS_EMBEDS = ("none", "sin", "fix")
POSITIONS = ("sin", "learned")
# Schemes of positions: name -> class. `txl_tf/layers/position_schemes.py` sets the classes, and users add their own.
SCHEMES = {"relative": None, "sinusoids": None, "learned": None, "alibi": None, "rotary": None}
FUSIONS = ("ff", "ff_two", "ff_linear", "attn", "gate")
RESIDUALS = ("input", "own")
ACTIVATIONS = ("relu", "leaky")


@group
class NetworkConfig(Config):
    """Arguments of `TransformerXL`. Vocabulary and cutoffs are `None` and empty until the text is read."""

    n_token: int | None = option(None, "Size of the vocabulary.", SYMBOLS)
    cutoffs: list[int] = option((), "First word of each cluster of the adaptive softmax.")
    n_layer: int = option(flag=6, help="Layers.", check=LAYERS)
    d_model: int = option(flag=500, help="Width of the hidden states.", check=EVEN_SIZE)
    d_embed: int = option(flag=500, help="Width of the embeddings.", check=WIDTH)
    n_head: int = option(flag=10, help="Attention heads.", check=WIDTH)
    d_head: int = option(flag=50, help="Width of a head.", check=WIDTH)
    d_inner: int = option(flag=1000, help="Width inside the feed-forward layers.", check=WIDTH)
    dropout: float = option(0.1, "Dropout rate.", RATE, free=True)
    dropatt: float = option(0.0, "Dropout rate of the attention probabilities.", RATE, flag=0.1, free=True)
    mem_len: int = option(0, "Positions of memory.", MEMORY, flag=70, free=True)
    same_length: bool = option(False, "Let every token attend to mem_len + 1 positions, not to all it can.", free=True)
    clamp_len: int = option(-1, "Treat distances beyond it as clamp_len; -1 for no limit.", free=True)
    untie_r: bool = option(False, "Give every layer its own r_w_bias and r_r_bias.")
    reset_token: int | None = option(None, "Token before which the memory is reset.", at_least(0), free=True)
    layer_norm_epsilon: float = option(1e-12, "Added to the variance in layer norm.", FRACTION, free=True)
    div_val: int = option(1, "Divide the width of the embeddings by it from cluster to cluster.", at_least(1))
    proj_same_dim: bool = option(True, "Project a cluster as wide as d_model too.")
    # Besides, a Keras initializer: an object, its name or its configuration.
    init: Any = option(
        "normal", "How weights are initialised.", one_of_or_initializer(("normal", "uniform")), free=True
    )
    init_std: float = option(0.02, "Standard deviation where init is normal.", INIT_SCALE, free=True)
    proj_init_std: float = option(
        0.01, "Standard deviation of the projections where init is normal.", INIT_SCALE, free=True
    )
    init_range: float = option(0.1, "Range where init is uniform.", INIT_SCALE, free=True)
    positions: str = option("relative", "What the network knows of positions.", one_of(SCHEMES))
    context_len: int = option(
        512, "With absolute positions, the most tokens that generation has in view.", at_least(2, 1 << 20),
        free=where(pos_embed="sin", positions="sinusoids"),
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.init, str | dict):  # an object: as `config.json` holds it
            from keras.initializers import serialize  # slow to import: programs read their flags before

            object.__setattr__(self, "init", serialize(keras_initializer(self.init)))


@group
class ModelConfig(NetworkConfig):
    """Arguments of `TransformerXLLM`."""

    proj_share_all_but_first: bool = option(False, "Share all projections of embedding and softmax but the first.")


@group
class TransformerLMConfig(ModelConfig):
    """Arguments of `TransformerLM`, which has neither distances nor resets."""

    mem_len: int = option(0, "Positions of memory; with absolute positions, for comparison only.", MEMORY, free=True)
    pos_embed: str = option("sin", "Positions: sinusoids, or a learned table of context_len rows.", one_of(POSITIONS))

    positions: ClassVar[str | None] = None  # no fields any more: pos_embed says it
    clamp_len: ClassVar[int] = -1
    untie_r: ClassVar[bool] = False
    reset_token: ClassVar[int | None] = None


@group
class TransformerConfig(Config):
    """Arguments of `Transformer`. The vocabularies are `None` until the text is read."""

    input_vocab_size: int | None = option(None, "Symbols of the source, padding included.", SYMBOLS)
    target_vocab_size: int | None = option(None, "Symbols of the target.", SYMBOLS)
    num_layers: int = option(flag=6, help="Layers of the encoder, and of the decoder.", check=LAYERS)
    d_model: int = option(flag=512, help="Width of the hidden states.", check=EVEN_SIZE)
    num_heads: int = option(flag=8, help="Attention heads.", check=WIDTH)
    dff: int = option(flag=2048, help="Width inside the feed-forward nets.", check=WIDTH)
    max_len: int = option(1000, "Most tokens of a source or of a target.", LENGTH, free=unless(pos_embed="learned"))
    pos_embed: str = option("sin", "Positions: sinusoids, or a learned table of max_len rows.", one_of(POSITIONS))
    rate: float = option(0.1, "Dropout rate.", RATE, free=True)
    norm_first: bool = option(False, "Normalise before every sublayer, not after it.")
    share_embeddings: bool = option(False, "One table for source, target and softmax.")
    label_smoothing: float = option(
        0.0, "Share of the probability that the loss gives to all tokens alike.", RATE, free=True
    )
    dropatt: float = option(0.0, "Dropout rate of the attention weights.", RATE, free=True)
    dropact: float = option(0.0, "Dropout rate after the relu.", RATE, free=True)
    target_lengths: list[int] | None = option(
        None,
        "Longest target of the training for sources of up to 16, 32, 64, ... symbols, which limits translations.",
        NEVER_FALLING,
    )


@group
class SentenceConfig(Config):
    """Base of networks that read sentences. Sizes of vocabularies are `None` until the text is read."""

    n_token: int | None = option(None, "Size of the vocabulary: characters, and words of a lattice.", SYMBOLS)
    n_bigram: int = option(0, "Size of the vocabulary of bigrams; 0 for none.", at_least(0, (1 << 31) - 1))
    d_embed: int = option(50, "Width of the embeddings; that of the vectors where they are given.", WIDTH)
    d_bigram: int = option(50, "Width of the embeddings of bigrams.", WIDTH)
    d_model: int = option(flag=128, help="Width of the hidden states.", check=EVEN_SIZE)
    max_seq_len: int = option(
        512, "Most tokens of a sentence, or of a window of a longer one.", LENGTH, free=unless(pos_embed="fix")
    )
    token_dropout: float = option(
        0.0, "Rate at which training takes <unk> for a character or a bigram.", RATE, free=True
    )


@group
class EncoderConfig(SentenceConfig):
    """Base of `TenerConfig` and `FlatConfig`."""

    n_layer: int = option(flag=1, help="Layers.", check=LAYERS)
    n_head: int = option(flag=8, help="Attention heads.", check=WIDTH)
    d_inner: int = option(flag=384, help="Width inside the feed-forward layers.", check=WIDTH)
    scale: bool = option(False, "Divide the attention scores by the square root of the width of a head.")
    dropout: float = option(0.0, "Dropout rate inside the feed-forward layers.", RATE, free=True)
    dropatt: float = option(0.0, "Dropout rate of the attention probabilities.", RATE, free=True)
    embed_dropout: float = option(0.0, "Dropout rate of the embeddings.", RATE, free=True)


@group
class TenerConfig(EncoderConfig):
    """Arguments of `Tener`."""

    attn_type: str = option("adatrans", "Direction-aware attention, or the vanilla Transformer's.", one_of(ATTN_TYPES))
    pos_embed: str = option("none", "Absolute positions to add: sinusoids or a learned table.", one_of(POS_EMBEDS))
    after_norm: bool = option(True, "Normalise after every sublayer, not before it.")
    key_position_term: bool = option(True, "Score keys by their distances too, as the program, not the paper, does.")


@group
class FlatConfig(EncoderConfig):
    """Arguments of `Flat`."""

    fusion: str = option(
        "ff", "How the distances of a pair, four or (ff_two) two, become one position.", one_of(FUSIONS)
    )
    fusion_shared: bool = option(True, "Share the fusion between the layers.")
    max_seq_len: int = option(
        512, "Most tokens of a sentence, or of a window of a longer one.", LENGTH, free=unless(rel_pos_init=0)
    )
    rel_pos_init: int = option(
        1, "1: distances as they are; 0: max_seq_len added, as the program does.", at_least(0, 1)
    )
    q_proj: bool = option(True, "Project the queries.")
    k_proj: bool = option(True, "Project the keys.")
    v_proj: bool = option(True, "Project the values.")
    r_proj: bool = option(True, "Project the positions.")
    attn_ff: bool = option(False, "Project the output of the attention.")
    pre: str = option("", "Before a sublayer: a adds, n normalises.")
    post: str = option("an", "After a sublayer, the same.")
    residual: str = option(
        "input", "What a of post adds: the sublayer's input, or, as the program, its own.", one_of(RESIDUALS)
    )
    activation: str = option("relu", "Of the feed-forward layers.", one_of(ACTIVATIONS))


@group
class BiLSTMConfig(SentenceConfig):
    """Arguments of `BiLSTM`."""

    n_layer: int = option(flag=1, help="Layers.", check=LAYERS)
    embed_dropout: float = option(0.0, "Dropout rate of the embeddings.", RATE, free=True)


@group
class LabelConfig(Config):
    """Arguments of `Tagger` besides its network. The labels are `None` until the text is read."""

    labels: list[str] | None = option(None, "Tags, in the order of their ids.")
    scheme: str | None = option(None, "none: the tags are no entities; default: bio, bioes or bmes.", one_of(("none",)))
    token_level: str = option("char", "What a token of a text is.", one_of(TOKEN_LEVELS))
    start_end: bool = option(True, "Give the CRF scores for the first and the last tag of a sentence.")
    constraints: bool = option(True, "Let decoding take only paths of tags that their scheme allows.", free=True)
    output_dropout: float = option(
        0.0, "Dropout rate of the hidden states before they become scores of tags.", RATE, free=True
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


def check_places(model: dict, **lengths: int) -> None:
    """Raises ValueError where a segment is longer than the learned positions of a model, of these hyper-parameters.

    Args:
        **lengths: option that says how long segments are -> its value.
    """
    most = model.get("context_len", TransformerLMConfig.context_len)
    for name, length in lengths.items():
        if "learned" in (model.get("pos_embed"), model.get("positions")) and length > most:
            raise ValueError(f"{name} must be at most context_len={most}, as many positions are learned, got {length}")
