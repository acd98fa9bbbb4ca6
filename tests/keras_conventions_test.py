"""Conventions of Keras that its own test of layers leaves out: build configs, policies, stateless calls, inputs."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf
from conforming_layers import LAYERS
from helpers import randomise
from keras import dtype_policies

from txl_tf import layers
from txl_tf.errors import ParameterError

FAST = "LayerNorm", "MultiHeadAttention", "LatticeAttn"
ALL = pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.name, marks=[pytest.mark.slow] * (case.name not in FAST)) for case in LAYERS]
)


def first(outputs):
    return np.asarray(tf.cast(keras.tree.flatten(outputs)[0], tf.float32))


def made(case, **options):
    """A layer with random weights, and its first output."""
    layer = case.make(**options)
    layer(**case.inputs, **case.more)
    randomise(layer)
    return layer, first(layer(**case.inputs, **case.more))


@ALL
def test_a_build_config_makes_all_weights_again(case):
    layer, expected = made(case)
    again = type(layer).from_config(layer.get_config())
    again.build_from_config(json.loads(json.dumps(layer.get_build_config())))
    assert again.built
    again.set_weights(layer.get_weights())
    np.testing.assert_array_equal(first(again(**case.inputs, **case.more)), expected)


@ALL
def test_a_config_keeps_every_kind_of_dtype_policy(case):
    """A model takes no map, see `test_a_map_of_dtypes_is_refused`."""
    half = "mixed_bfloat16"
    for policy in (dtype_policies.DTypePolicy(half), dtype_policies.DTypePolicyMap(default_policy=half)):
        if isinstance(policy, dtype_policies.DTypePolicyMap) and isinstance(made(case)[0], keras.Model):
            continue
        layer = case.make(dtype=policy)
        again = type(layer).from_config(layer.get_config())
        assert again.get_config() == layer.get_config()
        assert again.dtype_policy.get_config() == layer.dtype_policy.get_config()
        assert {part.compute_dtype for part in (layer, *layer._flatten_layers())} <= {"bfloat16", "float32"}
        assert layer.compute_dtype == again.compute_dtype == "bfloat16"


@ALL
def test_a_stateless_call_uses_the_weights_that_it_is_given(case):
    layer, expected = made(case)
    inputs = keras.tree.map_structure(tf.constant, case.inputs)
    outputs, _ = layer.stateless_call(layer.trainable_variables, layer.non_trainable_variables, **inputs, **case.more)
    np.testing.assert_array_equal(first(outputs), expected)
    if layer.trainable_variables and case.name != "CRF":
        others = [variable * 0.5 for variable in layer.trainable_variables]
        outputs, _ = layer.stateless_call(others, layer.non_trainable_variables, **inputs, **case.more)
        assert np.abs(first(outputs) - expected).max() > 1e-4


@ALL
def test_inputs_may_be_arrays_tensors_and_variables_of_any_precision(case):
    layer, expected = made(case)
    kinds = (
        lambda x: x.astype(np.float64 if x.dtype.kind == "f" else np.int64),
        tf.constant,
        tf.Variable,
        lambda x: keras.Variable(x, dtype=x.dtype.name),
    )
    for kind in kinds:
        inputs = keras.tree.map_structure(kind, case.inputs)
        np.testing.assert_allclose(first(layer(**inputs, **case.more)), expected, rtol=1e-4, atol=1e-5)


@ALL
def test_weights_have_paths_and_are_counted(case):
    layer, _ = made(case)
    assert layer.count_params() == sum(np.prod(weight.shape) for weight in layer.weights)
    assert len({variable.path for variable in layer.variables}) == len(layer.variables)
    assert all(part.path.startswith(layer.path) for part in layer._flatten_layers())


def ragged():
    return tf.RaggedTensor.from_tensor(np.ones([2, 3, 8], np.float32), lengths=[3, 1])


def sparse():
    return tf.sparse.from_dense(np.ones([2, 3, 8], np.float32))


DENSE = [
    (layers.EncoderLayer, (8, 2, 16), "x"),
    (layers.LayerNorm, (), "inputs"),
    (layers.PositionWiseFFN, (16, 8), "X"),
    (layers.CRF, (8,), "emissions"),
]


@pytest.mark.parametrize("layer_class, sizes, name", DENSE)
@pytest.mark.parametrize("make", [ragged, sparse])
def test_ragged_and_sparse_inputs_are_refused_by_name(layer_class, sizes, name, make):
    layer = layer_class(*sizes)
    layer.build((None, None, 8))
    with pytest.raises(ParameterError) as caught:
        layer(make())
    assert caught.value.name == name and "dense" in caught.value.allowed
    if make is sparse:
        with pytest.raises(ParameterError) as caught:
            layer(keras.Input([3, 8], sparse=True))
        assert caught.value.name == name


@pytest.mark.parametrize("make", [tf.RaggedTensor.from_tensor, tf.sparse.from_dense])
def test_ragged_and_sparse_ids_are_refused_by_name(make):
    with pytest.raises(ParameterError) as caught:
        layers.Embeddings(9, 8)(make(np.array([[1, 2], [3, 4]])))
    assert caught.value.name == "ids"
