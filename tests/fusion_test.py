"""What XLA compiles within a training step on CPUs computes what TensorFlow does; what it is depends on no chance."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import SMALL

from txl_tf import TransformerLM, TransformerXLLM, export_saved_model, make_optimizer, segments
from txl_tf.equations import FeedForward, feed_forward
from txl_tf.kernels import fusion, masked_softmax, project_heads, project_output, residual_norm
from txl_tf.kernels.dropout import Drop, dropout
from txl_tf.kernels.fusion import fused, fusing, pays
from txl_tf.kernels.gradients import recompute
from txl_tf.nn.ops import LayerNorm, norm_of
from txl_tf.transformer_xl.attention import create_mask

SLOW = pytest.mark.slow
KEY = np.array([3, 4, 0], np.int32)


@pytest.fixture
def any_size(monkeypatch):
    monkeypatch.setattr(fusion, "MIN_ELEMENTS", 1)


def random(*shape, seed=0):
    return tf.constant(np.random.default_rng(seed).normal(size=shape), tf.float32)


def traced(function, *args, active=True):
    """The result of a function of tensors in a graph, and whether XLA compiles a part of it."""

    def with_fusing(*args):
        with fusing(active):
            return function(*args)

    graph = tf.function(with_fusing, autograph=False).get_concrete_function(*args)
    return graph(*args), n_compiled(graph)


def n_compiled(graph):
    """How often a concrete function calls functions that XLA compiles."""
    definition = graph.graph.as_graph_def()
    nodes = [*definition.node, *(node for function in definition.library.function for node in function.node_def)]
    return sum(node.attr["_XlaMustCompile"].b for node in nodes)


def values_and_gradients(function, *inputs):
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        result = function(*inputs)
        loss = tf.reduce_sum(tf.cast(result, tf.float32) * random(*result.shape, seed=9))
    return [result, *tape.gradient(loss, inputs)]


def both_ways(function, *inputs, pieces):
    """Results and gradients in one pass and otherwise, float64."""
    found = []
    for active, number in ((True, pieces), (False, 0)):
        results, compiled = traced(lambda *inputs: values_and_gradients(function, *inputs), *inputs, active=active)
        assert compiled == number
        found.append([np.array(tf.cast(x, tf.float64)) for x in results])
    return zip(*found, strict=True)


def test_pays_for_large_tensors_of_known_shape_in_graphs_where_allowed(monkeypatch):
    answers = {}

    @tf.function
    def trace(dynamic):
        with fusing(True):
            n = tf.shape(dynamic)[0]
            answers.update(large=pays([256, 256]), small=pays([256, 255]), unknown=pays([256, 256, n]))
            with fusing(False), fusing(True):
                answers["within a block that says no"] = pays([256, 256])
            monkeypatch.setattr(tf.config, "list_logical_devices", lambda: [tf.config.LogicalDevice("GPU:0", "GPU")])
            answers["GPU"] = pays([256, 256])
            monkeypatch.undo()
        answers["outside"] = pays([256, 256])

    trace(tf.zeros([3]))
    with fusing(True):
        answers["eager"] = pays([256, 256])
    assert [name for name, answer in answers.items() if answer] == ["large"]


@pytest.mark.parametrize("shape, row_axis", [
    ([6, 50, 40], 0), pytest.param([4, 6, 30, 31], 1, marks=SLOW), pytest.param([70], 0, marks=SLOW), ([5, 33], None)
])  # fmt: skip
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_masks_are_the_same_bit_for_bit(any_size, shape, row_axis, dtype):
    ones = tf.ones(shape, dtype)
    compiled, n = traced(lambda key: dropout(ones, 0.3, key, row_axis), KEY)
    assert n == 1
    np.testing.assert_array_equal(tf.cast(compiled, tf.float32), tf.cast(dropout(ones, 0.3, KEY, row_axis), tf.float32))


@pytest.mark.parametrize("with_positions", [True, pytest.param(False, marks=SLOW)])
@pytest.mark.parametrize(
    "dtype, keys, pieces, rtol",
    [("float32", 64, 1, 1e-6), ("float64", 64, 1, 1e-14), ("bfloat16", 64, 2, 2**-6), ("bfloat16", 50, 1, 2**-6)],
)
def test_softmax_and_its_gradient(any_size, with_positions, dtype, keys, pieces, rtol):
    inputs = [tf.cast(3 * random(2, 3, 20, keys, seed=i), dtype) for i in range(1 + with_positions)]
    visible = create_mask(20, keys - 20) == 0
    for actual, expected in both_ways(
        lambda scores, *positions: masked_softmax(scores, visible, *positions), *inputs, pieces=pieces
    ):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=rtol * np.abs(expected).max())


def test_softmax_has_no_gradient_where_all_values_are_one(any_size):
    """Rounded probabilities do not add up to 1."""
    scores = tf.cast(3 * random(2, 3, 20, 64), tf.bfloat16)
    constant = tf.fill(scores.shape, tf.cast(100.0, tf.bfloat16))

    def of_constant(scores):
        with tf.GradientTape() as tape:
            tape.watch(scores)
            probs = masked_softmax(scores)
        return tape.gradient(probs, scores, constant)

    found, n = traced(of_constant, scores)
    assert n == 2
    np.testing.assert_allclose(tf.cast(found, tf.float32), np.zeros(scores.shape), atol=1e-4)


@pytest.mark.parametrize("rate", [pytest.param(0.0, marks=SLOW), 0.3])
def test_residual_and_norm_with_all_gradients(any_size, rate):
    layer = LayerNorm(1e-3, dtype="mixed_bfloat16")
    layer.build([None, None, 48])
    gamma, beta = random(48, seed=2), random(48, seed=3)

    def function(x, y, gamma, beta):
        return residual_norm(x, y, (gamma, beta, layer.epsilon), Drop(rate, KEY))

    inputs = [*(tf.cast(random(4, 30, 48, seed=i), tf.bfloat16) for i in range(2)), gamma, beta]
    for actual, expected in both_ways(function, *inputs, pieces=2):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=2**-6 * np.abs(expected).max())


@pytest.mark.parametrize("rate, key, pieces", [(0.0, KEY, 1), (0.3, KEY, 2), (0.3, None, 1)])
@pytest.mark.parametrize(
    "dtype, rtol", [("float32", 1e-6), pytest.param("float64", 1e-14, marks=SLOW), ("bfloat16", 2**-6)]
)
def test_the_feed_forward_net_with_all_gradients(any_size, rate, key, pieces, dtype, rtol):
    shapes = ([4, 30, 24], [24, 40], [40], [40, 24], [24])
    inputs = [tf.cast(random(*shape, seed=i), dtype) for i, shape in enumerate(shapes)]
    for actual, expected in both_ways(
        lambda x, *weights: feed_forward(x, FeedForward(*weights), Drop(rate, key)), *inputs, pieces=pieces
    ):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=rtol * np.abs(expected).max())


@pytest.mark.parametrize("dtype, rtol", [("float32", 1e-6), ("float64", 1e-14), ("bfloat16", 2**-6)])
def test_projections_of_heads_with_all_gradients(any_size, dtype, rtol):
    x, kernel, o_kernel = (tf.cast(random(*shape), dtype) for shape in ([2, 5, 6], [6, 3 * 4 * 7], [4 * 7, 6]))
    heads = tf.cast(random(4, 2, 5, 7), dtype)
    for function, *inputs in (
        (lambda x, kernel: tf.stack(project_heads(x, kernel, 3, 4)), x, kernel),
        (project_output, heads, o_kernel),
    ):
        for actual, expected in both_ways(function, *inputs, pieces=0):
            np.testing.assert_allclose(actual, expected, rtol=0, atol=rtol * np.abs(expected).max())


def test_another_activation_has_no_pass_of_its_own(any_size):
    inputs = [random(*shape) for shape in ([4, 30, 24], [24, 40], [40], [40, 24], [24])]
    for actual, expected in both_ways(
        lambda x, *weights: feed_forward(x, FeedForward(*weights), activation=tf.nn.gelu), *inputs, pieces=0
    ):
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_float32_and_float64_have_the_layer_s_own_norm(any_size, dtype):
    layer = LayerNorm(dtype=dtype)
    layer.build([None, None, 48])
    x, y = (tf.cast(random(4, 30, 48, seed=i), dtype) for i in range(2))
    result, n = traced(lambda x, y: residual_norm(x, y, norm_of(layer)), x, y)
    assert n == 0
    np.testing.assert_array_equal(result, layer(x + y))


def test_a_fused_function_has_no_other_inside(any_size):
    inner = fused(lambda shape, x: x + 1)
    outer = fused(lambda shape, x: inner(shape, x) * 2)
    result, n = traced(lambda x: outer([3], x), tf.constant([1.0, 2.0, 3.0]))
    assert n == 1
    np.testing.assert_array_equal(result, [4, 6, 8])


@pytest.mark.parametrize("way", ["fused", "recompute"])
def test_a_compiled_function_returns_its_result_alone_under_a_tape(any_size, way):
    """It would return what its gradient needs, too, and keep it in memory, if the tape knew its arguments."""
    wave = fused(lambda shape, x: tf.sin(tf.exp(x)))
    function = (lambda x: wave([2], x)) if way == "fused" else recompute(tf.function(lambda x: tf.sin(tf.exp(x))))

    @tf.function(autograph=False)
    def graph(x):
        with fusing(True), tf.GradientTape() as tape:
            tape.watch(x)
            y = function(x) * x
        return tape.gradient(y, x)

    concrete = graph.get_concrete_function(tf.ones([2]))
    first, *_ = (op for op in concrete.graph.get_operations() if "PartitionedCall" in op.type)
    assert len(first.outputs) == 1
    expected = np.sin(np.e) + (np.cos(np.e) * np.e if way == "recompute" else 0)
    np.testing.assert_allclose(concrete(tf.ones([2])), [expected] * 2, rtol=1e-6)


TOKENS = np.random.default_rng(0).integers(0, 23, 4 * 45)  # epochs of five segments of 8 and one of 4


def of_unknown_shape(dataset):
    spec = tf.TensorSpec([None, None], tf.int32)
    return tf.data.Dataset.from_generator(lambda: iter(dataset), output_signature=(spec, spec))


def trained(lm_class, dtype, steps, start=0, arrays=None, data=lambda dataset: dataset, parts=1, **options):
    """A model after `steps` steps from segment `start` on; with `arrays`, going on with another one's weights."""
    keras.utils.set_random_seed(0)
    lm = lm_class(**SMALL, mem_len=8, dropout=0.2, dropatt=0.1, seed=1, dtype=dtype, **options)
    lm.compile(make_optimizer(optimizer="sgd", learning_rate=0.1, train_steps=20), gradient_accumulation_steps=parts)
    lm.build_optimizer()

    def restore(*_):
        for variable, array in zip(variables, arrays["variables"], strict=True):
            variable.assign(array)
        lm.set_carried_arrays(arrays["carried"])

    variables = [*lm.variables, *lm.optimizer.variables]
    callbacks = [keras.callbacks.LambdaCallback(on_epoch_begin=restore)] if arrays else []
    dataset = data(segments(TOKENS, 4, 8, start, repeat=True))
    lm.fit(dataset, steps_per_epoch=steps, verbose=0, callbacks=callbacks)
    return {"variables": [variable.numpy() for variable in variables], "carried": lm.carried_arrays(), "lm": lm}


@pytest.mark.slow
@pytest.mark.parametrize(
    "lm_class, dtype, rtol",
    [
        (TransformerXLLM, "mixed_bfloat16", 0.1),
        pytest.param(TransformerXLLM, "float32", 1e-4, marks=SLOW),
        pytest.param(TransformerLM, "mixed_bfloat16", 0.1, marks=SLOW),
        pytest.param(TransformerLM, "float32", 1e-4, marks=SLOW),
    ],
)
def test_training_is_that_of_tensorflow_alone(monkeypatch, lm_class, dtype, rtol):
    expected = trained(lm_class, dtype, 5)["variables"]
    monkeypatch.setattr(fusion, "MIN_ELEMENTS", 1)
    actual = trained(lm_class, dtype, 5)["variables"]
    assert any((a != b).any() for a, b in zip(actual, expected, strict=True))  # rounded otherwise
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=rtol * np.abs(b).max(initial=1e-3))


@SLOW
@pytest.mark.parametrize("dtype, rtol", [("float32", 1e-4), ("mixed_float16", 0.1)])
@pytest.mark.parametrize("options", [None, {"parts": 2}, {"recompute": True}])
def test_replicas_parts_and_recomputed_layers_train_as_one(any_size, two_replicas, options, dtype, rtol):
    expected = trained(TransformerXLLM, dtype, 3)["variables"]
    with contextlib.nullcontext() if options else two_replicas.scope():
        actual = trained(TransformerXLLM, dtype, 3, **options or {})["variables"]
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=rtol * np.abs(b).max(initial=1e-3))


@SLOW
@pytest.mark.parametrize(  # the next segment is an epoch's shorter last one, or the first
    "before, data", [(5, lambda dataset: dataset), (5, of_unknown_shape), (6, of_unknown_shape)]
)
def test_what_comes_first_does_not_decide_what_is_compiled(any_size, before, data):
    whole = trained(TransformerXLLM, "mixed_bfloat16", 9, data=data)
    first = trained(TransformerXLLM, "mixed_bfloat16", before, data=data)
    rest = trained(TransformerXLLM, "mixed_bfloat16", 9 - before, before, first, data=data)
    for a, b in zip(rest["variables"], whole["variables"], strict=True):
        np.testing.assert_array_equal(a, b)


@SLOW
def test_evaluation_and_export_know_nothing_of_it(any_size, tmp_path):
    lm = trained(TransformerXLLM, "float32", 1)["lm"]
    lm.evaluate(segments(TOKENS, 4, 8), verbose=0)
    export_saved_model(lm, tmp_path / "served")
    saved = tf.saved_model.load(str(tmp_path / "served"))
    assert saved.signatures
    assert not any(n_compiled(signature) for signature in saved.signatures.values())
