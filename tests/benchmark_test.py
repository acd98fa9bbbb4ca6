"""The benchmark's contestants do the same work, and its count of operations is that of the graph."""

import math

import numpy as np
import tensorflow as tf

import txl_tf
from tools import benchmark

SHAPE = {
    **benchmark.NETWORK, "n_layer": 2, "d_model": 8, "n_head": 2, "d_head": 4, "d_inner": 12, "n_token": 20,
    "tgt_len": 5, "mem_len": 3, "batch_size": 2,
}  # fmt: skip


def operations_of(graph):
    """Floating-point operations of the matrix products of a graph, of functions in it too."""
    total = 0
    for op in graph.get_operations():
        if op.type in ("MatMul", "BatchMatMulV2"):
            transposed = op.get_attr("transpose_a" if op.type == "MatMul" else "adj_x")
            total += 2 * op.outputs[0].shape.num_elements() * op.inputs[0].shape[-2 if transposed else -1]
    return total


def test_operations_of_training_are_the_products_of_its_graph():
    lm = txl_tf.TransformerXLLM(**benchmark.model_arguments(SHAPE))
    lm.compile(txl_tf.make_optimizer(1e-3))
    lm.optimizer.build(lm.trainable_variables)
    step = tf.function(lm.train_step, autograph=False)
    graph = step.get_concrete_function(benchmark.random_batch(SHAPE), lm.initial_mems(2)).graph
    zero_keys = 3 * 2 * 2 * 2 * 5 * 8  # the column of zeros of rel_shift: three products of two layers
    assert operations_of(graph) == benchmark.training_operations(SHAPE) + zero_keys


def test_contestants_do_the_same_work_and_are_compared():
    uniform = math.log(SHAPE["n_token"])  # the loss of small initial weights
    for mode in benchmark.SHAPES:
        contestants = benchmark.make_contestants(mode)
        reference, library = (contestants[name](SHAPE) for name in list(contestants)[:2])
        if mode == "generation":
            assert reference().shape == (1, 2)  # a token of every row
            assert library().shape == (2, 1 + 5)
        else:
            np.testing.assert_allclose([np.mean(reference()), np.mean(library())], uniform, rtol=0.02)
    first_two = dict(list(contestants.items())[:2])
    rows = benchmark.compare("generation", SHAPE, first_two, rounds=2, seconds=0, peaks={}, memory_of=None)
    assert [row["contestant"] for row in rows] == ["reference float32", "txl_tf float32"]
    assert rows[0]["ratio"] == 1
    np.testing.assert_allclose(rows[1]["ratio"], rows[1]["tokens_per_second"] / rows[0]["tokens_per_second"], rtol=0.5)
