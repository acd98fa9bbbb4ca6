"""Layers as a loop over stacked weights: the numbers and gradients of the same layers one after the other."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import raises_parameter

from txl_tf import TransformerLM, TransformerXL, TransformerXLLM
from txl_tf.layers import PositionwiseFF, TransformerXLLayer
from txl_tf.transformer_xl.apply_layers import apply_layers

SIZES = {"n_token": 30, "n_layer": 3, "d_model": 8, "d_embed": 8, "n_head": 2, "d_head": 4, "d_inner": 12}
MODELS = {
    "own biases": (TransformerXLLM, {"mem_len": 5, "untie_r": True}),
    "shared biases": (TransformerXLLM, {"mem_len": 5, "same_length": True, "clamp_len": 4}),
    "absolute": (TransformerLM, {"mem_len": 0}),
    "bins": (TransformerXLLM, {"mem_len": 5, "cutoffs": [10, 20], "div_val": 2}),
}


def ids(seed):
    return tf.constant(np.random.default_rng(seed).integers(0, 30, [4, 6]), tf.int32)


def results(lm, static_shapes, training, segments=2):
    """nll of consecutive segments, memory, and gradients of all weights. The first memory is random."""
    rng = np.random.default_rng(2)
    mems = [tf.cast(rng.normal(size=mem.shape), mem.dtype) for mem in lm.initial_mems(4)]
    with tf.GradientTape() as tape:
        losses = []
        for i in range(segments):
            options = {"training": training, "dropout_key": tf.constant([3, i, 2])} if training else {}
            nll, _, mems = lm.segment_nll(ids(i), ids(i + 1), mems, static_shapes=static_shapes, **options)
            losses.append(nll)
        loss = tf.reduce_sum(losses)
    return losses, mems, tape.gradient(loss, lm.trainable_variables)


def in_mode(mode):
    """`results`, as the mode runs it. Code that AutoGraph writes anew would draw without --seed-offset."""
    if mode == "eager":
        return results
    return tf.function(results, autograph=False, jit_compile=mode == "xla")


def check(name, mode, recompute, trainings=(False, True), segments=2, **changes):
    model, options = MODELS[name]
    lm = model(**{**SIZES, **options, **changes}, dropout=0.2, dropatt=0.1, init_std=0.3, recompute=recompute, seed=1)
    for training in trainings:
        expected = results(lm, False, training, segments)
        found = in_mode(mode)(lm, True, training, segments)
        tf.nest.map_structure(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=2e-5), found, expected)
        assert all(np.abs(gradient).max() > 1e-3 for gradient in found[2])


@pytest.mark.parametrize(
    "name, recompute",
    [("shared biases", False), *(pytest.param(name, True, marks=pytest.mark.slow) for name in ("absolute", "bins"))],
)
def test_a_loop_in_eager_mode_gives_what_the_layers_give_one_after_the_other(name, recompute):
    check(name, "eager", recompute, segments=1)


@pytest.mark.ci
def test_a_loop_in_a_graph_gives_what_the_layers_give_one_after_the_other():
    check("own biases", "graph", recompute=True, trainings=[True], segments=1, n_layer=2)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("mode", ["graph", "xla"])
@pytest.mark.parametrize("name", MODELS)
def test_a_loop_gives_what_the_layers_give_one_after_the_other(name, mode, recompute):
    check(name, mode, recompute)


@pytest.mark.parametrize("mode", ["eager", pytest.param("graph", marks=pytest.mark.slow)])
def test_bfloat16_computes_in_bfloat16_and_keeps_the_weights_in_float32(mode):
    lm = TransformerXLLM(**{**SIZES, "n_layer": 2}, mem_len=5, init_std=0.3, seed=1, dtype="mixed_bfloat16")
    expected, found = (in_mode(mode)(lm, static, True, segments=1) for static in (False, True))
    tf.nest.map_structure(lambda a, b: np.testing.assert_array_equal(a, b), found[:2], expected[:2])
    assert {mem.dtype for mem in found[1]} == {tf.bfloat16} and {g.dtype for g in found[2]} == {tf.float32}
    for a, b in zip(found[2], expected[2], strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2**-7 * np.abs(b).max())


def test_inputs_are_what_each_layer_was_given():
    lm = TransformerXLLM(**SIZES, mem_len=5, init_std=0.3, seed=1)
    network, hidden = lm.network, tf.random.stateless_normal([4, 6, 8], [1, 2])
    pos_emb, mask = network.position_table(11), tf.zeros([6, 11])
    arguments = [(pos_emb, *network.biases(i), mask, tf.zeros([4, 5, 8])) for i in range(3)]
    output, inputs = apply_layers(network.decoder_layers, hidden, arguments, as_loop=True)
    for layer, given, of_layer in zip(network.decoder_layers, inputs, arguments, strict=True):
        np.testing.assert_allclose(given, hidden, atol=1e-6)
        hidden = layer(hidden, *of_layer)
    np.testing.assert_allclose(output, hidden, atol=1e-6)


def own_class(layers):
    class Louder(type(layers[1])):
        def call(self, *args, **kwargs):
            return 2 * super().call(*args, **kwargs)

    layers[1].__class__ = Louder


def own_call(layers):
    call = layers[1].call
    layers[1].call = lambda *args, **kwargs: 2 * call(*args, **kwargs)


def own_number(layers):
    class Scaled(type(layers[0])):
        def call(self, *args, **kwargs):
            return self._scale * super().call(*args, **kwargs)

    for i, layer in enumerate(layers):
        layer.__class__, layer._scale = Scaled, 1.0 + i


def own_dtype(layers):
    class Rounded(type(layers[0])):
        def call(self, hidden, *args, **kwargs):
            return super().call(hidden, *args, **kwargs) + 0.03 * tf.cast(self.compute_dtype == "bfloat16", tf.float32)

    for layer in layers:
        layer.__class__ = Rounded
    layers[1].store("dtype_policy", "mixed_bfloat16")
    layers[1].autocast = False


@pytest.mark.ci
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("change", [own_class, own_call, own_number, own_dtype])
def test_layers_that_differ_are_called_one_after_the_other(change, recompute):
    lm = TransformerXLLM(**SIZES, mem_len=5, dropout=0.0, init_std=0.3, recompute=recompute, seed=1)
    plain = lm.segment_nll(ids(0), ids(1), lm.initial_mems(4))[0]
    change(lm.network.decoder_layers)
    expected = results(lm, False, True, segments=1)
    assert np.abs(expected[0][0] - plain).max() > 0.01
    found = results(lm, True, True, segments=1)
    tf.nest.map_structure(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=2e-5), found, expected)


class Counting(TransformerXLLayer):
    """A layer with a Dropout of Keras that counts its calls, and with an additional loss."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.drop = keras.layers.Dropout(0.5, seed=7)

    def build(self, w_shape=None, **shapes):
        super().build(w_shape, **shapes)
        self.count = self.add_weight(name="count", shape=(), initializer="zeros", trainable=False)

    def call(self, w, *args, **kwargs):
        self.count.assign_add(1.0)
        output = self.drop(super().call(w, *args, **kwargs), training=True)
        self.add_loss(tf.reduce_sum(output))
        return output


class CountingNetwork(TransformerXL):
    layer_class = Counting


def counting(**options):
    """A network of two layers `Counting`."""
    network = CountingNetwork(**{**SIZES, "n_layer": 2}, mem_len=5, dropout=0.0, seed=1, **options)
    network.build_at_once()
    return network


def test_layers_that_change_variables_or_add_losses_are_called_one_after_the_other():
    plain, static = counting(), counting()
    static.set_weights(plain.get_weights())
    for n_calls in (1, 2):
        expected, found = (network(ids(0), static_shapes=network is static)[0] for network in (plain, static))
        np.testing.assert_allclose(found, expected, atol=1e-6)
        np.testing.assert_allclose(static.losses, plain.losses, rtol=1e-5)
        assert [float(layer.count) for layer in static.decoder_layers] == [n_calls, n_calls]


@pytest.mark.parametrize("static_shapes", [False, True])
def test_recompute_is_refused_for_layers_that_change_variables_or_add_losses(static_shapes):
    network = counting(recompute=True)
    network(ids(0), static_shapes=static_shapes)  # only training recomputes
    with raises_parameter("recompute", True, limit="False"):
        network(ids(0), training=True, static_shapes=static_shapes)


def has_loop(network):
    """Whether a call of `network` in training, with static shapes, is a loop over its layers."""

    @tf.function(autograph=False)
    def step(tokens):
        return network(tokens, training=True, static_shapes=True)[0]

    types = {operation.type for operation in step.get_concrete_function(ids(0)).graph.get_operations()}
    return bool(types & {"While", "StatelessWhile"})


@pytest.mark.parametrize("options", [{}, {"norm": "rms", "activation": "swiglu"}, {"lora_rank": 2}], ids=str)
def test_layers_that_differ_only_in_weights_are_one_loop(options):
    lm = TransformerXLLM(**SIZES, mem_len=5, dropout=0.1, seed=1, **options)
    lm(ids(0))
    assert has_loop(lm.network)


class Own(TransformerXLLayer):
    pass


def replace_class(layer):
    layer.__class__ = Own


def replace_part(layer):
    layer.ff = PositionwiseFF.from_config({**layer.ff.get_config(), "seed": 1})


@pytest.mark.parametrize("replace", [replace_class, replace_part])
def test_layers_whose_classes_or_parts_were_replaced_are_one_loop(replace):
    network = TransformerXL(**{**SIZES, "n_layer": 2}, mem_len=5, dropout=0.0, seed=1)
    for layer in network.decoder_layers:
        replace(layer)
    assert has_loop(network)
