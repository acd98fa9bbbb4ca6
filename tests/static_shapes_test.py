"""The steps with static shapes, for TPU and XLA: training and evaluation of every published configuration, generation.

The configurations are traced here with 2 of their layers, the others being like them; all layers, a minute or two each:

    PYTHONPATH=. python tests/static_shapes_test.py
"""

import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl import flags
from helpers import ROOT, SMALL, bins_of, word_vocab

from tools.compile_for_tpu import PUBLISHED, unallocated, zipf_text
from txl_programs import train  # noqa: F401, which defines the flags
from txl_programs.flag_values import values
from txl_tf import TransformerLM, TransformerXLLM, make_optimizer
from txl_tf.config import ModelConfig, OptimizerConfig
from txl_tf.data.text.batches import choose_bin_capacities
from txl_tf.language.generation import TextState, generate_tokens, next_token, precompute_for
from txl_tf.language.sampling import check_sampling, no_history
from txl_tf.language.stopping import check_stops, with_room

# What XLA has no kernel for, or has one for that needs to know the data.
NOT_OF_XLA = {"InplaceUpdate", "DeepCopy", "Where", "Unique", "TensorStridedSliceUpdate"}

# What may have floats for results and ids among its arguments: look-ups, and what passes both on as they are.
LOOKUPS = {"GatherV2", "GatherNd", "ScatterNd", "TensorScatterSub", "UnsortedSegmentSum", "IdentityN"}


def values_of(name, rows="train_batch_size"):
    """`(arguments of the model, tgt_len, rows of a batch, arguments of the optimizer)` of a configuration."""
    flags.FLAGS.unparse_flags()
    flags.FLAGS(["train.py", f"--flagfile={ROOT}/configs/{name}.cfg"])
    model, optimizer = values(ModelConfig), {**values(OptimizerConfig), **values(("train_steps",))}
    tgt_len, rows = values(("tgt_len", rows)).values()
    flags.FLAGS.unparse_flags()
    return {**model, **bins_of(name.removesuffix("_eval"))}, tgt_len, rows, optimizer


def trace(name, **changes):
    """The graph of the configuration's training step, its model and the capacities of its bins."""
    model, tgt_len, rows, optimizer = values_of(name)
    model, rows = {**model, **changes}, rows // PUBLISHED[name][1]
    text = zipf_text(16 * rows * tgt_len, model["n_token"])
    bin_capacities = choose_bin_capacities(text, rows, tgt_len, model["cutoffs"])
    with unallocated():
        lm = TransformerXLLM(**model)
        lm.compile(make_optimizer(**optimizer), static_shapes=True, bin_capacities=bin_capacities)
        lm.optimizer.build(lm.trainable_variables)
    ids = tf.TensorSpec([rows, tgt_len], tf.int32)
    mems = [tf.TensorSpec([rows, model["mem_len"], model["d_model"]]) for _ in lm.network.decoder_layers]
    step = tf.function(lm.train_step, autograph=False).get_concrete_function((ids, ids), mems)
    return step.graph, lm, bin_capacities


def shapes_of(graph):
    """`(type, shape)` of the results of all operations, those in branches and loops included."""
    definition = graph.as_graph_def(add_shapes=True)
    nodes = [*definition.node, *(node for function in definition.library.function for node in function.node_def)]
    return [(node.op, tf.TensorShape(shape)) for node in nodes for shape in node.attr["_output_shapes"].list.shape]


def of_unknown_shape(graph):
    """Types of the operations that have a result whose shape is not fully known."""
    return {op for op, shape in shapes_of(graph) if not shape.is_fully_defined()}


def floats_of_ids(graph):
    """Types of the operations with results in floating point that take token ids, or integers computed from these."""
    ids = [tensor for tensor in graph.inputs if tensor.dtype == tf.int32]
    assert len(ids) == 2
    seen, found = set(), set()
    while ids:
        for op in ids.pop().consumers():
            if op.name not in seen:
                seen.add(op.name)
                found |= {op.type for tensor in op.outputs if tensor.dtype.is_floating}
                ids += [tensor for tensor in op.outputs if tensor.dtype.is_integer]
    return found


def check(name, **changes):
    graph, lm, bin_capacities = trace(name, **changes)
    assert not of_unknown_shape(graph)
    assert floats_of_ids(graph) <= LOOKUPS
    shapes = {tuple(tensor.shape) for op in graph.get_operations() for tensor in op.outputs if op.type == "MatMul"}
    assert set(zip(bin_capacities, lm.softmax.bin_sizes[1:], strict=True)) <= shapes  # the logits of every bin
    types = [op.type for op in graph.get_operations()]
    assert types.count("ResourceApplyAdam") == len(lm.trainable_variables)  # the whole step: Adam's update
    return len(types), bin_capacities


# A tenth of the words: TensorFlow never gives back what it notes down of a large table's memory, written to or not.
SMALLER_WT103 = pytest.param(
    "wt103_base", {"n_token": 26774, "cutoffs": [2000, 4000, 20000]}, id="wt103_base of fewer words"
)


def published(*fast):
    """A smaller configuration, and all published ones; of these, those that are not named `fast` are slow."""
    marks = {name: [pytest.mark.slow] * (name not in fast) for name in PUBLISHED}
    return [SMALLER_WT103, *(pytest.param(name, {}, id=name, marks=marks[name]) for name in PUBLISHED)]


@pytest.mark.slow
@pytest.mark.parametrize("name, changes", published())
def test_the_training_step_of_every_configuration_has_static_shapes(name, changes):
    check(name, n_layer=2, **changes)


def check_evaluation(name, **changes):
    """The evaluation step of a configuration is for XLA, and projects no memory."""
    model, tgt_len, rows, _ = values_of(f"{name}_eval", "eval_batch_size")
    with unallocated():
        lm = TransformerXLLM(**{**model, **changes})
        lm.compile(static_shapes=True)
    carried = tf.function(lambda: lm.start_evaluation(rows, tgt_len), autograph=False).get_concrete_function()
    ids = tf.TensorSpec([rows, tgt_len], tf.int32)
    step = tf.function(lm.test_step, autograph=False).get_concrete_function((ids, ids), carried.structured_outputs)
    shapes = shapes_of(step.graph)
    assert not of_unknown_shape(step.graph)
    assert not NOT_OF_XLA & {op for op, _ in shapes}
    slots = -(-(model["mem_len"] + tgt_len) // tgt_len) * tgt_len
    ring = ("XlaDynamicUpdateSlice", [rows, model["n_head"], slots, model["d_head"]])
    assert shapes.count(ring) == 2 * len(lm.network.decoder_layers)
    width = model["n_head"] * model["d_head"]  # of queries, keys and values
    projected = [shape[0] for op, shape in shapes if op == "MatMul" and shape[1] == width]
    assert len(projected) >= 3 * len(lm.network.decoder_layers)
    assert {*projected} == {rows * tgt_len}
    return len(shapes)


@pytest.mark.parametrize("name, changes", published("text8_large"))
def test_the_evaluation_step_of_every_configuration_has_static_shapes(name, changes):
    check_evaluation(name, n_layer=2, **changes)


@pytest.mark.parametrize(
    "model, options",
    [(TransformerXLLM, {"mem_len": 5}), pytest.param(TransformerLM, {"context_len": 6}, marks=pytest.mark.slow)],
)
def test_generation_has_static_shapes(model, options):
    lm = model(**SMALL, cutoffs=[5, 12], div_val=2, **options)
    cache, sampling, vocab = lm.decoding_cache(static_shapes=True), check_sampling(6, seed=1), word_vocab()
    uniform = tf.zeros([16, 6, 2], tf.float64)
    text = TextState(tf.zeros([6, lm.network.d_model]), cache.initial_state(6), no_history(6, lm.network.n_token))
    step = tf.function(next_token, autograph=False).get_concrete_function(
        lm, cache, precompute_for(lm, cache), text, uniform[0], sampling
    )
    prompt, lengths, limits = tf.zeros([3, 16], tf.int32), tf.ones([3], tf.int32), tf.fill([6], 9)
    stops = with_room(check_stops(lm.network.n_token, 3, ["w1\n", "w2"], True, vocab))
    whole = tf.function(generate_tokens, autograph=False).get_concrete_function(
        lm, prompt, lengths, uniform, limits, sampling, stops, number=2, static_shapes=True
    )
    for function in (step, whole):
        assert not of_unknown_shape(function.graph)
        assert not NOT_OF_XLA & {op for op, _ in shapes_of(function.graph)}


@pytest.mark.slow
def test_an_evaluation_step_compiled_as_a_whole_is_the_uncached_evaluation(small_lm, small_batches):
    lm = small_lm(mem_len=7, same_length=True, clamp_len=6, cutoffs=[6, 14], div_val=2, n_layer=1)
    lm.compile(static_shapes=True)
    batches = [(tf.constant(tokens), tf.constant(labels)) for tokens, labels in zip(*small_batches(n=5), strict=True)]
    step, carried, mems = tf.function(lm.test_step, jit_compile=True), lm.start_evaluation(2, 5), None
    for tokens, labels in batches[:4]:
        nll, mems = lm.score(tokens, labels, mems)
        logs, carried = step((tokens, labels), carried)
        np.testing.assert_allclose(logs["loss"], np.mean(nll), rtol=1e-5)
        assert logs["tokens"] == 10
    tokens, labels = (ids.numpy() for ids in batches[4])
    nll, _ = lm.score(tokens[:, :3], labels[:, :3], mems)  # a shorter last segment is filled up
    tokens[:, 3:], labels[:, 3:] = 0, -1
    logs, _ = step((tf.constant(tokens), tf.constant(labels)), carried)
    np.testing.assert_allclose(logs["loss"], np.mean(nll), rtol=1e-5)
    assert logs["tokens"] == 6
    assert step.experimental_get_tracing_count() == 1


@pytest.mark.slow
def test_a_step_compiled_as_a_whole_trains_to_the_same_weights(small_lm, small_batches):
    options = {"cutoffs": [6, 14], "div_val": 2, "dropout": 0.1, "dropatt": 0.1, "n_layer": 1}
    batches = list(zip(*small_batches(n=5, batch=3, tgt_len=6), strict=True))
    static, dynamic = small_lm(**options), small_lm(**options)
    for lm in (static, dynamic):
        lm.seed = 3  # of dropout; that of `small_lm` is of the weights
        shapes = {"static_shapes": True, "bin_capacities": [12, 12]} if lm is static else {}
        lm.compile(make_optimizer(3e-3, train_steps=10), **shapes)
        lm.optimizer.build(lm.trainable_variables)
        step, mems = tf.function(lm.train_step, jit_compile=lm is static), lm.initial_mems(3)
        for batch in batches:
            logs, mems = step([tf.constant(ids) for ids in batch], mems)
        assert logs.get("overflow", 0) == 0
        if lm is static:
            assert floats_of_ids(step.get_concrete_function(batches[0], mems).graph) <= LOOKUPS
    before = small_lm(**options).trainable_variables
    for found, expected, old in zip(static.trainable_variables, dynamic.trainable_variables, before, strict=True):
        assert np.abs(expected.numpy() - old.numpy()).max() > 1e-3
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5, err_msg=found.path)


if __name__ == "__main__":
    for name in PUBLISHED:
        start = time.perf_counter()
        count, capacities = check(name)
        seconds = time.perf_counter() - start
        print(f"{name}: {count} operations, all of static shapes; capacities {capacities}; {seconds:.0f} s", flush=True)
        keras.backend.clear_session()
        print(f"{name}_eval: {check_evaluation(name)} results, all of static shapes", flush=True)
        keras.backend.clear_session()
