"""Errors keep their fields wherever they are raised: in a layer, in a graph that AutoGraph converted, in a pickle."""

import pickle

import keras
import pytest
import tensorflow as tf

import txl_tf
from txl_tf import layers
from txl_tf.data.lines import LineError
from txl_tf.errors import FixedAttributeError, ParameterError, brief, shortened


def test_the_default_message_names_argument_allowed_values_and_value():
    error = ParameterError("n_layer", 0, "at least 1")
    assert str(error) == "n_layer must be at least 1, got 0"
    assert str(ParameterError("pos_embed", "x", ["sin", "learned"])) == "pos_embed must be one of sin, learned, got 'x'"


@pytest.mark.parametrize("kind", [ParameterError, FixedAttributeError])
def test_a_pickled_error_keeps_its_fields(kind):
    error = pickle.loads(pickle.dumps(kind("n_layer", 0, "at least 1", "text")))
    assert (type(error), error.name, error.value, error.allowed, str(error)) == (
        kind,
        "n_layer",
        0,
        "at least 1",
        "text",
    )


def test_a_fixed_attribute_is_an_attribute_error_and_a_value_error():
    with pytest.raises(AttributeError):
        raise FixedAttributeError("rate", 0.5, "set in the constructor")
    assert issubclass(FixedAttributeError, ValueError)


def layer_call():
    layers.EncoderLayer(8, 2, 16)(tf.zeros([2, 3, 7]))


def functional_call():
    layers.EncoderLayer(8, 2, 16)(keras.Input([3, 7]))


def converted_graph():
    layer = layers.EncoderLayer(8, 2, 16)
    layer.build((None, None, 8))
    tf.function(lambda x: layer(x))(tf.zeros([2, 3, 7]))


@pytest.mark.parametrize("call", [layer_call, functional_call, converted_graph])
def test_an_error_in_a_layer_keeps_its_type_and_fields(call):
    with pytest.raises(txl_tf.ParameterError) as caught:
        call()
    assert caught.value.name == "x" and "7" in str(caught.value) and "d_model=8" in caught.value.allowed


@pytest.mark.parametrize("size", [0, True, 2.5, "2"])
def test_sizes_are_positive_integers(size):
    with pytest.raises(txl_tf.ParameterError) as caught:
        layers.Embeddings(vocab=size, d_model=8)
    assert caught.value.name == "vocab" and caught.value.value is size


def test_a_message_has_at_most_500_characters_and_the_fields_are_whole():
    value, names = "x" * 10**6, [f"name{i}" for i in range(10**4)]
    for error in (ParameterError("name", value, names), ParameterError(value, 1, "small", f"{value} The way out.")):
        assert len(str(error)) <= 500 and str(pickle.loads(pickle.dumps(error))) == str(error)
    assert str(error).startswith("xxx") and str(error).endswith("The way out.")
    assert (error.name, ParameterError("name", value, names).value, error.allowed) == (value, value, "small")
    assert len(str(LineError("line", 3, ValueError(value), value))) <= 500


@pytest.mark.parametrize("kind", range(4))
def test_brief_is_brief(kind):
    value = ("x" * 10**5, [["x" * 100] * 9] * 9, {i: "x" * 99 for i in range(99)}, 10**9999)[kind]
    assert len(brief(value)) <= 200


@pytest.mark.parametrize("most", [0, 1, 10, 60, 61, 500, 999, 1000])
def test_shortened_keeps_the_beginning_and_the_end(most):
    text = "a" * 500 + "b" * 500
    found = shortened(text, most)
    assert len(found) <= most and (found == text) == (most == 1000)
    assert most < 100 or (found.startswith("aaa") and found.endswith("bbb"))
