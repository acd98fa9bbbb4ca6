"""Keras's Muon with its default arguments trains the matrices of all models; AdamW trains the rest."""

import re

import keras
import numpy as np
import pytest
from conforming import MODELS, SLOW, segment
from conforming_layers import LAYERS
from helpers import SMALL

import txl_tf
from txl_tf import layers
from txl_tf.environment import too_old
from txl_tf.runs.weights import weights_by_name

if not hasattr(keras.optimizers, "Muon") or too_old("keras", (3, 13), ""):
    pytest.skip(f"Keras {keras.__version__} has no Muon that works with TensorFlow", allow_module_level=True)


def taken(variables):
    """The variables that Muon updates by its own rule, and those that it leaves to AdamW."""
    optimizer = keras.optimizers.Muon()
    optimizer.build(variables)
    with_velocity = [velocity is not None for velocity in optimizer.adam_velocities]
    return [[v for v, adamw in zip(variables, with_velocity, strict=True) if adamw == wanted] for wanted in (0, 1)]


def names(variables):
    """Paths without the names of the models, which count their instances, and without numbers of layers."""
    return {re.sub(r"(layer_?)\d+", r"\1", v.path.partition("/")[2].removeprefix("transformer/")) for v in variables}


OF_LANGUAGE_MODELS = {f"layer_/rel_attn/{name}_kernel" for name in ("qkv", "o", "r")}
OF_LANGUAGE_MODELS |= {f"layer_/ff/kernel_{i}" for i in (1, 2)}
OF_VANILLA = OF_LANGUAGE_MODELS - {"layer_/rel_attn/r_kernel"}
OF_HEADS = [f"{name}/kernel" for name in ("wq", "wk", "wv", "dense")]
OF_TRANSFORMER = {
    *(f"{side}/layer/ffn/dense{i}/kernel" for side in ("encoder", "decoder") for i in (1, 2)),
    *(f"encoder/layer/mha/{name}" for name in OF_HEADS),
    *(f"decoder/layer/mha{i}/{name}" for i in (1, 2) for name in OF_HEADS),
}
OF_TENER = {"in_fc", "layer/ffn/dense1", "layer/ffn/dense2"}
OF_FLAT = {"char_proj", "lex_proj", "fusion0/forward", "layer/ff_0", "layer/ff_1"}
OF_FLAT |= {f"layer/attn/w_{name}" for name in "qkvr"}
TAKEN = {
    "adaptive_language_model": OF_LANGUAGE_MODELS,
    "network_in_keras_model": OF_LANGUAGE_MODELS | {"kernel"},  # of Keras's Dense
    "language_model": OF_LANGUAGE_MODELS,
    "vanilla_language_model": OF_VANILLA,
    "adaptive_vanilla_language_model": OF_VANILLA,
    "transformer": OF_TRANSFORMER | {"final_layer/kernel"},
    "transformer_pre_norm": OF_TRANSFORMER,
    "tener": {"out_fc/kernel", "layer/self_attn/qkv_kernel", *(f"{name}/kernel" for name in OF_TENER)},
    "flat": {"out_fc/kernel", *(f"{name}/kernel" for name in OF_FLAT)},
    "bilstm": {"out_fc/kernel"} | {
        f"layer/{way}ward_lstm/lstm_cell/{name}kernel" for way in ("for", "back") for name in ("", "recurrent_")
    },
}  # fmt: skip


@pytest.mark.parametrize("case", [
    *(pytest.param(case, id=case.name) for case in MODELS),
    *(pytest.param(case, id=case.name, marks=pytest.mark.slow) for case in SLOW),
])  # fmt: skip
def test_muon_takes_the_kernels_of_every_family_and_nothing_else(case):
    model = case.make("float32")
    matrices, others = taken(model.trainable_variables)
    network = getattr(getattr(model, "network", None), "name", "")
    assert {name.removeprefix(f"{network}/") for name in names(matrices)} == TAKEN[case.name]
    assert not [v.path for v in others if "kernel" in v.name]


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in LAYERS])
def test_muon_takes_kernels_alone_of_layers_of_any_name(case):
    layer = case.make(name="words")
    layer(**case.inputs, **case.more)
    if layer.trainable_variables:
        matrices, others = taken(layer.trainable_variables)
        assert all("kernel" in v.name for v in matrices)
        assert not [v.path for v in others if "kernel" in v.name]


def test_tables_and_biases_of_heads_are_left_to_adamw_with_every_option():
    lm = txl_tf.TransformerXLLM(**SMALL, mem_len=4, untie_r=True, cutoffs=[6, 14], div_val=2)
    vanilla = txl_tf.TransformerLM(**SMALL, pos_embed="learned")
    tener = txl_tf.Tener(n_token=20, n_layer=1, d_model=8, n_head=2, d_inner=16, pos_embed="fix")
    tener.build()
    projected = txl_tf.TransformerXLLM(**{**SMALL, "d_embed": 4}, mem_len=4)
    others = [lm.network.r_w_bias, lm.network.r_r_bias, vanilla.network.pos_table, tener.pos_table]
    for layer in (lm.network.embedding, lm.softmax, projected.network.embedding):
        others += layer.weights
    assert len(others) == 20 and taken(others)[0] == []


def test_muon_moves_all_but_the_kernels_as_adamw_does(small_lm):
    lms = [small_lm() for _ in range(2)]
    for lm, optimizer in zip(lms, (keras.optimizers.Muon, keras.optimizers.AdamW), strict=True):
        lm.compile(optimizer(0.01), run_eagerly=True)
        lm.train_on_batch(*segment())
    for variable, expected in zip(*(lm.trainable_variables for lm in lms), strict=True):
        is_same = np.allclose(variable.numpy(), expected.numpy(), rtol=0, atol=1e-6)
        assert is_same == ("kernel" not in variable.name), variable.path


# ---------------------------------------- what the paths must not change


def test_names_in_checkpoints_are_as_before():
    """Run folders of older versions have them."""
    case = next(case for case in SLOW if case.name == "tener")
    found = weights_by_name(case.make("float32"))
    network = next(name for name in found if name.endswith("layer0/self_attn/r_w_bias")).partition("/")[0]
    assert {f"{network}/layer0/self_attn/r_r_bias", f"{network}/embedding", "crf/transitions"} <= set(found)
    case = next(case for case in SLOW if case.name == "transformer")
    found = weights_by_name(case.make("float32"))
    assert {"decoder/target_embedding/lut", "encoder/source_embedding/lut"} <= set(found)


@pytest.mark.parametrize("trainable", [True, False])
def test_a_table_is_a_weight_as_add_weight_makes_it(trainable):
    """In the order of the calls, in the layer's dtype, and frozen where the layer is."""

    class Both(layers.LayerNorm):
        def build(self, shape):
            self.add_weight(name="first", shape=(2,), initializer="ones")
            self.add_table("second", (2, 3), "ones", autocast=False)
            self.add_weight(name="third", shape=(2,), initializer="ones")

    layer = Both(dtype="mixed_bfloat16", name="both")
    layer.trainable = trainable
    layer.build((None, 3))
    assert [weight.name for weight in layer.weights] == ["first", "second", "third"]
    assert layer.second.path == "both/embedding_like/second" and layer.second.dtype == "float32"
    outer = keras.Sequential([layer])
    assert len(outer.trainable_variables) == 3 * trainable
    layer.trainable = True
    assert len(outer.trainable_variables) == 3
