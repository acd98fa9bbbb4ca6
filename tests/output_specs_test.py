"""What layers and models say of their outputs before a call: `compute_output_spec`, `compute_output_shape`, masks."""

import random

import keras
import numpy as np
import pytest
import tensorflow as tf
from conforming import MODELS, SLOW
from conforming_layers import LAYERS, B, E, T, floats, ids, symbols
from helpers import raises_parameter

import txl_tf
from txl_tf import layers
from txl_tf.errors import CallError, ParameterError

POLICIES = ("float32", "mixed_float16", "float64")
ALONE = [
    case for case in LAYERS
    if len(case.inputs) == 1 and not case.more and case.name not in ("Tener", "Flat", "BiLSTM", "TransformerXL")
]  # fmt: skip


def by_policy(cases, *fast):
    """Cases with dtype policies: mixed_bfloat16 is fast for the named cases, or for all where none is named."""

    def marks(case, policy):
        return [pytest.mark.slow] if policy != "mixed_bfloat16" or (fast and case.name not in fast) else []

    pairs = [(case, policy) for case in cases for policy in ("mixed_bfloat16", *POLICIES)]
    return pytest.mark.parametrize(
        "case, policy",
        [pytest.param(case, policy, id=f"{case.name}-{policy}", marks=marks(case, policy)) for case, policy in pairs],
    )


def as_symbols(inputs):
    return keras.tree.map_structure(lambda x: keras.KerasTensor(x.shape, dtype=x.dtype.name), inputs)


def shapes_and_dtypes(outputs):
    return [(tuple(x.shape), keras.backend.standardize_dtype(x.dtype)) for x in keras.tree.flatten(outputs)]


def plain(shapes):
    """A structure of shapes as a list of tuples."""
    return [x.shape for x in keras.tree.flatten(keras.tree.map_shape_structure(keras.KerasTensor, shapes))]


def nested(make, inputs):
    """A functional model of a functional model of what `make` makes."""
    layer, outer = make(), symbols(inputs)
    inner = symbols(inputs)
    model = keras.Model(inner, keras.tree.flatten(layer(inner) if isinstance(inner, tuple) else layer(**inner))[0])
    return keras.Model(outer, model(outer))


# -------------------------------------------------------------------------------------------------------------- specs


@by_policy(LAYERS, "TenerLayer", "LatticeAttn", "LayerNorm", "PositionEmbedding", "AdaptiveSoftmax")
def test_a_spec_is_that_of_the_result_with_weights_and_without(case, policy):
    layer, without = case.make(dtype=policy), case.make(dtype=policy)
    weights = len(without.weights)  # 1 of `PositionEmbedding`, else 0
    expected = shapes_and_dtypes(layer(**case.inputs, **case.more))
    given = as_symbols(case.inputs)
    assert shapes_and_dtypes(layer.compute_output_spec(**given, **case.more)) == expected
    assert shapes_and_dtypes(without.compute_output_spec(**given, **case.more)) == expected
    assert not without.built and len(without.weights) == weights


@by_policy([*MODELS, *SLOW], "vanilla_language_model")
def test_a_spec_of_a_model_is_that_of_its_result(case, policy):
    model, inputs = case.make(policy), case.inputs()
    expected = shapes_and_dtypes(model(inputs))
    assert shapes_and_dtypes(model.compute_output_spec(as_symbols(inputs))) == expected
    assert shapes_and_dtypes(case.make(policy).compute_output_spec(as_symbols(inputs))) == expected
    shapes = model.compute_output_shape(keras.tree.map_structure(np.shape, inputs))
    assert plain(shapes) == [shape for shape, _ in expected]


def test_a_spec_without_weights_changes_nothing_that_is_drawn_later():
    def weights(ask_first):
        keras.utils.set_random_seed(7)
        layer = layers.EncoderLayer(8, 2, 16, rate=0.5)
        if ask_first:
            layer.compute_output_spec(keras.KerasTensor([2, 3, 8]))
        layer(np.ones([2, 3, 8], np.float32))
        return layer.seed, layer.get_weights(), random.random()

    for one, other in zip(*map(weights, (False, True)), strict=True):
        np.testing.assert_equal(one, other)


def test_a_subclass_of_ones_own_is_traced_in_the_dtype_of_its_call():
    class Scaled(layers.EncoderLayer):
        def build(self, x_shape=None, **_):
            super().build(x_shape)
            self.scale = self.add_weight(shape=(8,), initializer="ones")

        def call(self, x, training=None):
            return super().call(x, training=training) * self.scale  # a plain weight, which Keras casts in calls

    layer = Scaled(8, 2, 16, dtype="mixed_bfloat16")
    layer.build((None, None, 8))
    assert layer.compute_output_spec(keras.KerasTensor([2, 3, 8])).dtype == "bfloat16"


def test_a_subclass_may_say_its_shape_in_keras_s_way():
    class Pooled(layers.EncoderLayer):
        def call(self, x, training=None):
            return tf.reduce_mean(super().call(x, training=training), 1)

        def compute_output_shape(self, x_shape):
            return x_shape[0], x_shape[2]

    x = keras.KerasTensor([2, 3, 8])
    for spec in (
        Pooled(8, 2, 16).compute_output_spec(x, training=True),
        Pooled(8, 2, 16).compute_output_spec(x=x),
        keras.Sequential([Pooled(8, 2, 16)]).compute_output_spec(x),
    ):
        assert spec.shape == (2, 8)


@pytest.mark.parametrize("call", ["__call__", "compute_output_spec"])
def test_an_error_in_a_layer_with_weights_keeps_its_fields(call):
    layer = layers.TenerLayer(8, 2, 16)
    layer.build((None, None, 8))
    with pytest.raises(ParameterError) as caught:
        getattr(layer, call)(keras.KerasTensor([None, 5, 7]))
    assert caught.value.name == "x" and "d_model=8" in caught.value.allowed


# ------------------------------------------------------------------------------------------------- in other models


@by_policy([case for case in LAYERS if not case.more], "TenerLayer", "LatticeAttn")
def test_a_functional_model_is_nested_in_another(case, policy):
    model = nested(lambda: case.make(dtype=policy), case.inputs)
    result = model(case.inputs)
    assert model.outputs[0].dtype == keras.tree.flatten(result)[0].dtype.name
    assert tf.TensorShape(model.outputs[0].shape).is_compatible_with(keras.tree.flatten(result)[0].shape)


@by_policy([case for case in (*MODELS, *SLOW) if case.name != "network_in_keras_model"], "none of them")
def test_a_functional_model_of_a_model_is_nested_in_another(case, policy):
    inputs, model = case.inputs(), case.make(policy)
    inner, outer = symbols(inputs), symbols(inputs)
    function = keras.Model(inner, keras.tree.flatten(model(inner))[0])
    result = keras.Model(outer, function(outer))(inputs)
    expected = keras.tree.flatten(model(inputs))[0]
    assert result.dtype == expected.dtype
    np.testing.assert_allclose(tf.cast(result, tf.float32), tf.cast(expected, tf.float32), rtol=1e-5, atol=1e-6)


@by_policy(ALONE, "TenerLayer", "Embeddings")
def test_a_layer_stands_in_time_distributed_and_in_sequential(case, policy):
    ((name, x),) = case.inputs.items()
    expected = shapes_and_dtypes(case.make(dtype=policy)(x))
    sequential = keras.Sequential([case.make(dtype=policy)])
    assert shapes_and_dtypes(sequential.compute_output_spec(*as_symbols([x]))) == expected
    assert [tuple(sequential.compute_output_shape(x.shape))] == [shape for shape, _ in expected]
    if case.name == "CRF":
        return  # Keras takes the results of `TimeDistributed` for floats
    wrapper = keras.layers.TimeDistributed(case.make(dtype=policy), dtype=policy)
    many = np.stack([x, x, x], 1)
    spec = shapes_and_dtypes(wrapper.compute_output_spec(*as_symbols([many])))
    model = nested(lambda: keras.layers.TimeDistributed(case.make(dtype=policy), dtype=policy), {"inputs": many})
    for result in (wrapper(many), model({"inputs": many})):
        assert spec == shapes_and_dtypes(result)


@pytest.mark.parametrize("layer_class", [layers.TenerLayer, pytest.param(layers.EncoderLayer, marks=pytest.mark.slow)])
def test_a_wrapper_may_have_another_policy_than_its_layer(layer_class):
    x = floats(2, 3, T, E)
    for policies in (("float32", "mixed_bfloat16"), ("mixed_bfloat16", "float32")):
        wrapper = keras.layers.TimeDistributed(layer_class(8, 2, 16, dtype=policies[0]), dtype=policies[1])
        result, plain = wrapper(x), layer_class(8, 2, 16, dtype="float32")
        plain.build((None, None, 8))
        plain.set_weights(wrapper.get_weights())
        np.testing.assert_allclose(tf.cast(result[:, 0], tf.float32), plain(x[:, 0]), atol=0.1)


def test_masks_go_through_models_in_models():
    def encoder(ids):
        return layers.EncoderLayer(8, 2, 16, name="encoder")(
            layers.Embeddings(20, 8, mask_zero=True, name="words")(ids)
        )

    inner, outer = keras.Input([None], dtype="int32"), keras.Input([None], dtype="int32")
    model = keras.Model(inner, encoder(inner))
    whole = keras.Model(outer, keras.layers.GlobalAveragePooling1D()(model(outer)))
    tokens = np.array([[3, 4, 5, 0], [6, 7, 0, 0]], np.int32)
    padded = np.pad(tokens, [(0, 0), (0, 3)])
    np.testing.assert_allclose(whole(tokens), whole(padded), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(model(tokens)._keras_mask, tokens != 0)


# ------------------------------------------------------------------------------------------------------------- shapes


NETWORKS = "TransformerXL", "Tener", "Flat", "BiLSTM", "TransformerXLLayer"


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.name, marks=[pytest.mark.slow] * (case.name in NETWORKS)) for case in LAYERS]
)
def test_shapes_are_taken_by_the_names_of_the_call_in_any_order_and_by_position(case):
    layer = case.make()
    shapes = {f"{name}_shape": keras.tree.map_structure(np.shape, x) for name, x in case.inputs.items()}
    more = {f"{name}_shape": keras.tree.map_structure(np.shape, x) for name, x in case.more.items() if name == "pairs"}
    outputs = case.make()(**case.inputs, **case.more)
    expected = [tuple(x.shape) for x in keras.tree.flatten(outputs)]
    assert plain(layer.compute_output_shape(**shapes, **more)) == expected
    assert plain(layer.compute_output_shape(**dict(reversed(shapes.items())), **more)) == expected
    if not more:
        assert plain(layer.compute_output_shape(*shapes.values())) == expected
    if case.masked:
        assert plain(layer.compute_output_shape(mask_shape=(B, T), **shapes)) == expected
    with raises_parameter(f"{type(layer).__name__}.compute_output_shape", [], error=CallError):
        layer.compute_output_shape(size=3, **shapes)
    assert not layer.built or case.name == "PositionalEncoding"


X, SOURCE, WEIGHTS = (4, 5, 8), (4, 6, 8), (4, 2, 5, 5)
OPTIONS = [
    (layers.EncoderLayer, {"x_shape": X}, X),
    (layers.EncoderLayer, {"x_shape": X, "return_attention_scores": True}, (X, WEIGHTS)),
    (layers.DecoderLayer, {"x_shape": X, "enc_output_shape": SOURCE}, (X, WEIGHTS, (4, 2, 5, 6))),
    (layers.DecoderLayer, {"enc_output_shape": SOURCE, "x_shape": X, "return_attention_scores": False}, X),
    (layers.DecoderLayer, {"x_shape": X}, (X, WEIGHTS, (4, 2, 5, None))),
]


@pytest.mark.parametrize("layer_class, arguments, expected", OPTIONS)
def test_options_of_the_call_are_options_of_the_shape(layer_class, arguments, expected):
    layer = layer_class(8, 2, 16)
    assert layer.compute_output_shape(**arguments) == expected
    symbols_of = {name.removesuffix("_shape"): x for name, x in arguments.items()}
    symbols_of = {name: keras.KerasTensor(x) if isinstance(x, tuple) else x for name, x in symbols_of.items()}
    if len(symbols_of) > 1:
        assert [x.shape for x in keras.tree.flatten(layer.compute_output_spec(**symbols_of))] == plain(expected)


QUERY, VALUE = (4, 3, 8), (4, 5, 8)
OF_ATTENTION = [
    ({"query": QUERY, "value": VALUE}, False),
    ({"query": QUERY, "value": VALUE, "key": VALUE}, False),
    ({"key": VALUE, "value": VALUE, "query": QUERY, "return_attention_scores": True}, True),
    ({"v": VALUE, "k": VALUE, "q": QUERY}, True),
    ({"q": QUERY, "k": VALUE, "v": VALUE, "return_attention_scores": False}, False),
    ({"query": QUERY, "value": VALUE, "attention_mask": (4, 3, 5), "query_mask": (4, 3)}, False),
]


@pytest.mark.parametrize("given, with_scores", OF_ATTENTION)
@pytest.mark.parametrize("built", [False, True])
def test_attention_takes_keras_s_names_wherever_the_call_does(given, with_scores, built):
    layer = layers.MultiHeadAttention(8, 2, dtype="mixed_bfloat16")
    if built:
        layer.build()
    expected = [(QUERY, "bfloat16"), ((4, 2, 3, 5), "bfloat16")][: 1 + with_scores]
    tensors = {name: keras.KerasTensor(x) if isinstance(x, tuple) else x for name, x in given.items()}
    assert shapes_and_dtypes(layer.compute_output_spec(**tensors)) == expected
    shapes = {f"{name}_shape" if isinstance(x, tuple) else name: x for name, x in given.items()}
    assert plain(layer.compute_output_shape(**shapes)) == [shape for shape, _ in expected]


def test_names_of_attention_that_do_not_belong_together_are_refused():
    layer = layers.MultiHeadAttention(8, 2)
    both = {"query_shape": QUERY, "value_shape": VALUE}
    for name, wrong in (
        ("value", {"query_shape": QUERY}), ("query", {"value_shape": VALUE}), ("value", {**both, "v_shape": X})
    ):  # fmt: skip
        with pytest.raises(ParameterError) as caught:
            layer.compute_output_shape(**wrong)
        assert caught.value.name == name
    with pytest.raises(ParameterError):
        layer.compute_output_shape(QUERY, VALUE, VALUE)  # as Keras orders them
    assert layer.compute_output_shape(VALUE, VALUE, QUERY)[0] == QUERY


@pytest.mark.parametrize("mem_len", [0, 3, 9])
@pytest.mark.parametrize("mlen", [None, 0, 2, 9])
def test_the_shape_of_a_network_s_memory_is_that_of_the_call(mem_len, mlen):
    sizes = {"n_token": 20, "n_layer": 1, "d_model": 8, "d_embed": 8, "n_head": 2, "d_head": 4, "d_inner": 8}
    network, tokens = txl_tf.TransformerXL(**sizes, mem_len=mem_len), ids(B, T)
    mems = None if mlen is None else [floats(B, mlen, E)]
    shapes = None if mlen is None else [(B, mlen, E)]
    expected = [tuple(x.shape) for x in keras.tree.flatten(network(tokens, mems))]
    assert plain(network.compute_output_shape((B, T), shapes)) == expected
    assert plain(network.compute_output_shape(tokens_shape=(B, T), mems_shape=shapes)) == expected


# -------------------------------------------------------------------------------------------------------------- masks


def test_the_mask_of_embeddings_is_computed_from_the_ids_alone():
    layer, tokens = layers.Embeddings(50, 16, mask_zero=True), np.array([[1, 2, 0]])
    np.testing.assert_array_equal(layer.compute_mask(tokens), [[True, True, False]])
    np.testing.assert_array_equal(layer.compute_mask(tokens, None), [[True, True, False]])
    assert layers.Embeddings(50, 16).compute_mask(tokens) is None


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in LAYERS])
def test_every_layer_computes_masks_with_keras_s_signature(case):
    layer, inputs = case.make(), next(iter(case.inputs.values()))
    layer.compute_mask(inputs)
    mask = layer.compute_mask(inputs, previous_mask=tf.ones([B, T], tf.bool))
    own = case.name in ("Embeddings", "MultiHeadAttention", "Tener", "Flat", "BiLSTM")
    assert own or mask.shape == (B, T)
