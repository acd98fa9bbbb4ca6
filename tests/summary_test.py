"""`summary()` shows the output shapes of all layers and of their parts, before and after calls."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import txl_tf
from txl_tf import layers

SIZES = {"n_token": 20, "n_layer": 2, "d_model": 8, "d_embed": 8, "n_head": 2, "d_head": 4, "d_inner": 16}
TAGGING = {"n_token": 20, "n_layer": 1, "d_model": 8, "n_head": 2, "d_inner": 16}
PAIRS = {"num_layers": 1, "d_model": 8, "num_heads": 2, "dff": 16, "input_vocab_size": 9, "target_vocab_size": 7}
IDS = np.array([[1, 2, 3, 4]], np.int32)
CHARS = {"chars": IDS}
ITEMS = {
    "lattice": IDS, "bigrams": np.zeros([1, 3], int), "seq_len": np.array([3]), "lex_num": np.array([1]),
    "pos_s": np.array([[0, 1, 2, 0]]), "pos_e": np.array([[0, 1, 2, 1]]),
}  # fmt: skip


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")


def tagger(network):
    return txl_tf.Tagger(network, ["O", "B-X"])


MODELS = {  # a model, what it is called with, and shapes that it shows
    "TransformerXLLM": (
        lambda: txl_tf.TransformerXLLM(**SIZES, mem_len=3, cutoffs=[5], div_val=2), IDS,
        {"transformer": "((None, None, 8), [(None, 3, 8), (None, 3, 8)])", "adaptive_softmax": "(None, None, 20)",
         "adaptive_embed": "(None, None, 8)", "layer_1": "(None, None, 8)", "rel_attn": "(None, None, 8)"},
    ),
    "TransformerLM": (
        lambda: txl_tf.TransformerLM(**SIZES), IDS,
        {"transformer": "((None, None, 8), [(None, 0, 8), (None, 0, 8)])", "ff": "(None, None, 8)"},
    ),
    "TransformerXL": (
        lambda: txl_tf.TransformerXL(**SIZES), IDS, {"adaptive_embed": "(None, None, 8)", "layer_0": "(None, None, 8)"},
    ),
    "Transformer": (
        lambda: txl_tf.Transformer(**PAIRS), (IDS, IDS),
        {"encoder": "(None, None, 8)", "final_layer": "(None, None, 7)", "dense1": "(None, None, 16)",
         "mha": "((None, None, 8), (None, 2, None, None))", "source_embedding": "(None, None, 8)",
         "decoder": "((None, None, 8), {decoder_layer0_block1: (None, 2, None, None), decoder_layer0_block2: "
                    "(None, 2, None, None)})"},
    ),
    "Tener": (
        lambda: tagger(txl_tf.Tener(**TAGGING, name="tener")), CHARS,
        {"tener": "(None, None, 8)", "out_fc": "(None, None, 2)", "crf": "(None, None)", "dense1": "(None, None, 16)"},
    ),
    "Flat": (
        lambda: tagger(txl_tf.Flat(**TAGGING, name="flat")), ITEMS,
        {"flat": "(None, None, 8)", "fusion0": "(None, 8)", "attn": "(None, None, 8)", "ff_0": "(None, None, 16)"},
    ),
    "BiLSTM": (
        lambda: tagger(txl_tf.BiLSTM(n_token=20, n_layer=1, d_model=8, name="bi_lstm")), CHARS,
        {"bi_lstm": "(None, None, 8)", "layer0": "(None, None, 8)"},
    ),
}  # fmt: skip


def shapes_of(model, **options):
    """`{name of a layer: its output shape}` of the summary."""
    lines = []
    model.summary(line_length=400, expand_nested=True, print_fn=lambda text, **_: lines.append(text), **options)
    rows = [[cell.strip() for cell in row.split("│")[1:-1]] for row in lines[0].splitlines() if row.startswith("│")]
    return {row[0].lstrip("└ ").split(" ")[0]: row[1] for row in rows}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in ("TransformerXLLM", "Tener") else pytest.mark.slow) for name in MODELS],
)
def test_shapes_are_shown_before_calls_and_after_them(name):
    make, inputs, expected = MODELS[name]
    model = make()
    before = shapes_of(model)
    outputs = keras.tree.flatten(model(inputs))
    assert shapes_of(model) == before
    assert {layer: before[layer] for layer in expected} == expected
    assert not [layer for layer, shape in before.items() if "?" in shape]
    computed = model.compute_output_shape(keras.tree.map_structure(np.shape, inputs))
    computed = keras.tree.flatten(keras.tree.map_shape_structure(keras.KerasTensor, computed))
    assert all(tf.TensorShape(x.shape).is_compatible_with(y.shape) for x, y in zip(computed, outputs, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("loaded", [False, True])
def test_a_language_model_in_a_model_of_ones_own_shows_its_shapes(loaded, tmp_path):
    lm = txl_tf.TransformerXLLM(**SIZES, mem_len=3)
    if loaded:
        lm.save(tmp_path / "lm.keras")
        lm = keras.saving.load_model(tmp_path / "lm.keras")

    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.lm, self.norm = lm, layers.LayerNorm()

        def call(self, ids):
            return self.norm(self.lm(ids)[0])

    own = Own()
    own(IDS)
    assert shapes_of(own)[lm.name] == "((None, None, 20), [(None, 3, 8), (None, 3, 8)])"
    assert own.compute_output_spec(keras.KerasTensor((None, None), "int32")).shape == (None, None, 20)


def test_a_functional_model_shows_the_parts_of_its_layers():
    ids = keras.Input([None], dtype="int32")
    x = layers.EncoderLayer(8, 2, 16, name="encoder")(layers.Embeddings(20, 8, name="embed")(ids))
    shapes = shapes_of(keras.Model(ids, x))
    assert shapes["encoder"] == shapes["embed"] == shapes["layernorm2"] == "(None, None, 8)"
    assert shapes["dense1"] == "(None, None, 16)"


def test_the_parts_of_a_layer_are_no_attribute_that_files_name_weights_by(tmp_path):
    layer = layers.EncoderLayer(8, 2, 16)
    layer.build((None, None, 8))
    assert {part.name for part in layer.layers} == {"mha", "ffn", "layernorm1", "layernorm2"}
    assert "layers" not in dir(layer)
    assert not hasattr(layer, "nothing_of_this_name")
