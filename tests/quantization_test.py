"""Keras's `quantize` and quantized dtypes: our models refuse them, other models quantize the other layers."""

import inspect

import keras
import numpy as np
import pytest
from helpers import raises_parameter

import txl_tf
from txl_config.environment import too_old
from txl_tf import layers
from txl_tf.errors import UnsupportedError
from txl_tf.nn.quantization import Unquantized

SIZES = {"n_token": 20, "n_layer": 1, "d_model": 8, "d_embed": 8, "n_head": 2, "d_head": 4, "d_inner": 8}
TAGGING = {"n_token": 20, "n_layer": 1, "d_model": 8, "n_head": 2, "d_inner": 8}
PAIRS = {"num_layers": 1, "d_model": 8, "num_heads": 2, "dff": 8, "input_vocab_size": 9, "target_vocab_size": 9}
MODELS = {
    "TransformerXLLM": lambda **dtype: txl_tf.TransformerXLLM(**SIZES, mem_len=2, **dtype),
    "TransformerLM": lambda **dtype: txl_tf.TransformerLM(**SIZES, **dtype),
    "TransformerXL": lambda **dtype: txl_tf.TransformerXL(**SIZES, **dtype),
    "Transformer": lambda **dtype: txl_tf.Transformer(**PAIRS, **dtype),
    "Tener": lambda **dtype: txl_tf.Tener(**TAGGING, **dtype),
    "Tagger": lambda **dtype: txl_tf.Tagger(txl_tf.Tener(**TAGGING), ["O", "B-X"], **dtype),
    "EncoderLayer": lambda **dtype: layers.EncoderLayer(8, 2, 8, **dtype),
    "LayerNorm": lambda **dtype: layers.LayerNorm(**dtype),
}
IDS = np.array([[1, 2, 3]])
# Older versions of Keras refuse "int4" themselves, and name the modes that they have.
MODES = ["int8", "float8"] if too_old("keras", (3, 11), "int4 needs") else ["int8", "int4", "float8"]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in ("Tagger", "EncoderLayer") else pytest.mark.slow) for name in MODELS],
)
def test_models_and_layers_refuse_and_name_the_way_to_a_smaller_model(name):
    model = MODELS[name]()
    if not model.built:
        model.build((None, None, 8))
    before = model.get_weights()
    for mode in MODES:
        with raises_parameter("quantize", mode, error=UnsupportedError) as raised:
            model.quantize(mode)
        assert "bfloat16" in raised.value.allowed and name in str(raised.value)
        assert isinstance(raised.value, NotImplementedError)
    for weight, old in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(weight, old)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", ["int8_from_float32", "float8_from_mixed_bfloat16"])
def test_quantized_dtypes_are_refused_where_they_are_given(name, dtype):
    with pytest.raises(txl_tf.ParameterError) as caught:
        MODELS[name](dtype=dtype)
    assert (caught.value.name, caught.value.value) == ("dtype", dtype)


def functional():
    ids = keras.Input([None], dtype="int32")
    x = layers.EncoderLayer(8, 2, 16, name="encoder")(keras.layers.Embedding(20, 8)(ids))
    return keras.Model(ids, keras.layers.Dense(5, name="head")(x))


def with_network():
    ids = keras.Input([None], dtype="int32")
    return keras.Model(ids, keras.layers.Dense(5, name="head")(txl_tf.TransformerXL(**SIZES, mem_len=2)(ids)[0]))


REPORTS = "report" in inspect.unwrap(keras.Model.quantize).__code__.co_varnames  # from Keras 3.16


@pytest.mark.skipif(not REPORTS, reason=f"Keras {keras.__version__} has no report of what it quantizes")
def test_keras_reports_which_layers_keep_their_weights(capsys):
    model = functional()
    expected = model(IDS)
    model.quantize("int8")
    quantized_layers, skipped = capsys.readouterr().out.split("Skipped")
    assert "head (int8)" in quantized_layers and "encoder" not in quantized_layers
    assert "encoder/mha/wq" in skipped
    assert model.get_layer("head").kernel.dtype == "int8"
    np.testing.assert_allclose(model(IDS), expected, atol=0.1)


@pytest.mark.skipif(REPORTS, reason=f"Keras {keras.__version__} has a report of its own")
@pytest.mark.parametrize("make", [functional, pytest.param(with_network, marks=pytest.mark.slow)])
def test_a_model_of_keras_quantizes_its_own_layers_and_warnings_name_the_others(make):
    model = make()
    expected = model(IDS)
    with pytest.warns(UserWarning) as caught:
        model.quantize("int8")
    messages = {str(warning.message) for warning in caught if "txl_tf" in str(warning.message)}
    assert all(Unquantized.smaller in message for message in messages)
    named = {"LayerNorm", "Linear"} if make is functional else {"LayerNorm", "AdaptiveEmbedding"}
    assert {name for name in named if any(name in message for message in messages)} == named
    assert len(messages) == len(named)  # Python shows equal ones once
    assert model.get_layer("head").kernel.dtype == "int8"
    np.testing.assert_allclose(model(IDS), expected, atol=0.1)
