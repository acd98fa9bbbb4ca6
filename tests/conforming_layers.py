"""The layers of `layer_conformance_test.py`. A new one joins `LAYERS` by one line and gets all checks."""

import dataclasses
from collections.abc import Callable

import keras
import numpy as np

import txl_tf
from txl_tf import layers
from txl_tf.taggers.lattice import Pairs

B, T, E = 4, 5, 8  # batch, length, width
NETWORK = {"n_token": 20, "n_layer": 2, "d_model": E, "d_embed": E, "n_head": 2, "d_head": 4, "d_inner": 16}
READING = {"n_token": 20, "n_bigram": 9, "n_layer": 1, "d_model": E}
TAGGING = {"n_token": 20, "n_bigram": 9, "n_layer": 1, "d_model": E, "n_head": 2, "d_inner": 16}


def floats(*shape):
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def ids(*shape, high=20, low=1):
    return np.random.default_rng(sum(shape)).integers(low, high, shape).astype(np.int32)


@dataclasses.dataclass(eq=False)
class Layer:
    """A layer under test.

    name: name of its class.
    make: `make(**options)` -> the layer; options are dtype and, where it drops, one of its `rates`.
    inputs: by argument of the call, its arrays; the first comes first.
    rates: names of its rates of dropout.
    masked: whether it takes `mask`.
    more: arguments of the call that are no tensors.
    """

    name: str
    make: Callable
    inputs: dict
    rates: tuple = ()
    masked: bool = False
    more: dict = dataclasses.field(default_factory=dict)

    def dropping(self, **options):
        return self.make(**options, **dict.fromkeys(self.rates, 0.5))


def case(layer_class, *sizes, inputs=None, **about):
    """A case of a layer whose first input is `x` `[B, T, E]`, unless `inputs` says otherwise."""
    inputs = inputs or {"x": floats(B, T, E)}
    return Layer(layer_class.__name__, lambda **options: layer_class(*sizes, **options), inputs, **about)


SEGMENT = {"w": floats(B, T, E), "mems": floats(B, 3, E)}
RELATIVE = {"w": SEGMENT["w"], "r": floats(1, 8, E), "r_w_bias": floats(2, 4), "r_r_bias": floats(2, 4)}
RELATIVE["mems"] = SEGMENT["mems"]
LATTICE = {"x": floats(B, T, E), "r": floats(6, E), "index": ids(B, T, T, low=0, high=6)}
BOTH = ("dropout", "dropatt")
PAIRS = Pairs([ids(6, high=9, low=0) - 4 for _ in range(4)], ids(B, T, T, low=0, high=6), np.int32(5))
EMBEDDING = layers.AdaptiveEmbedding(20, E, E)
CHARS = {"chars": ids(B, T), "bigrams": ids(B, T, high=9)}
ITEMS = {
    "lattice": ids(B, T), "bigrams": CHARS["bigrams"], "seq_len": np.full(B, T, np.int32),
    "lex_num": np.zeros(B, np.int32), "pos_s": np.tile(np.arange(T, dtype=np.int32), (B, 1)),
}  # fmt: skip
ITEMS["pos_e"] = ITEMS["pos_s"]


def flat_layer(dropatt=0.0, **options):
    return layers.FlatLayer(E, 2, 16, attention={"dropatt": dropatt}, **options)


def network(model_class, sizes, inputs):
    """A case of a network, made without dropout."""
    return Layer(
        model_class.__name__, lambda **options: model_class(**sizes, **{"dropout": 0.0, **options}), inputs, BOTH
    )


LAYERS = [
    case(layers.Embeddings, 20, E, inputs={"ids": ids(B, T)}),
    case(layers.AdaptiveEmbedding, 20, E, E, inputs={"tokens": ids(B, T)}),
    case(layers.PositionalEncoding, E, 9, rates=("rate",)),
    case(layers.PositionEmbedding, E, 9, rates=("rate",)),
    case(layers.PositionWiseFFN, 16, E, inputs={"X": floats(B, T, E)}, rates=("rate",)),
    case(layers.PositionwiseFF, E, 16, inputs={"inp": floats(B, T, E)}, rates=("dropout",)),
    case(layers.LayerNorm, inputs={"inputs": floats(B, T, E)}),
    case(layers.RMSNorm, inputs={"inputs": floats(B, T, E)}),
    case(
        layers.MultiHeadAttention, E, 2, rates=("rate",), masked=True,
        inputs={"v": floats(B, T, E), "k": floats(B, T, E), "q": floats(B, 3, E)},
    ),
    case(layers.EncoderLayer, E, 2, 16, rates=("rate", "dropatt", "dropact"), masked=True),
    case(
        layers.DecoderLayer, E, 2, 16, rates=("rate", "dropatt", "dropact"), masked=True,
        inputs={"x": floats(B, T, E), "enc_output": floats(B, 6, E)},
    ),
    case(layers.RelMultiHeadAttn, E, 2, 4, inputs=RELATIVE, rates=BOTH),
    case(layers.TransformerXLLayer, E, 2, 4, 16, inputs=RELATIVE, rates=BOTH),
    case(layers.MultiHeadAttn, E, 2, 4, inputs=SEGMENT, rates=BOTH),
    case(layers.TransformerLMLayer, E, 2, 4, 16, inputs=SEGMENT, rates=BOTH),
    case(layers.TenerAttn, E, 2, rates=("dropatt",), masked=True),
    case(layers.TenerLayer, E, 2, 16, rates=BOTH, masked=True),
    case(layers.LatticeAttn, E, 2, inputs=LATTICE, rates=("dropatt",), masked=True),
    Layer("FlatLayer", flat_layer, LATTICE, BOTH, masked=True),
    case(layers.PositionFusion, E, inputs={"table": floats(9, E)}, more={"pairs": PAIRS}),
    case(layers.AdaptiveSoftmax, 20, E, E, inputs={"hidden": floats(B, T, E)}, more={"embedding": EMBEDDING}),
    case(layers.CRF, E, inputs={"emissions": floats(B, T, E)}, masked=True),
    network(txl_tf.TransformerXL, {**NETWORK, "mem_len": 3, "init_std": 0.3}, {"tokens": ids(B, T)}),
    network(txl_tf.Tener, TAGGING, {"inputs": CHARS}),
    network(txl_tf.Flat, TAGGING, {"inputs": ITEMS}),
    Layer("BiLSTM", lambda **options: txl_tf.BiLSTM(**READING, **options), {"inputs": CHARS}, ("embed_dropout",)),
]  # fmt: skip


def symbols(inputs):
    """Symbols of Keras for the inputs of a layer, of any batch and length where they have these."""

    def symbol(x):
        shape = [None if size in (B, T, 3, 6) else size for size in x.shape]
        known = len(x.shape) > 1 and x.shape[0] not in (B,)  # a bias, or a table of positions
        return keras.Input(batch_shape=x.shape if known else shape, dtype=x.dtype.name)

    return keras.tree.map_structure(symbol, inputs)
