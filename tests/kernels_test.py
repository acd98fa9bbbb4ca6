"""Every fast operation of `kernels/cpu.py` computes what its plain version does: values and gradients."""

import numpy as np
import pytest
import tensorflow as tf

from txl_tf.kernels import attending, cpu, fusion, plain
from txl_tf.kernels import threads as kernel_threads
from txl_tf.kernels.dropout import Drop
from txl_tf.kernels.dtypes import at_least_float32
from txl_tf.kernels.fusion import fusing

DROP = Drop(0.3, np.array([3, 4, 0], np.int32))
IDS = np.array([[1, 0, 3, 3], [2, 2, 0, 1]], np.int32)
INDEX = np.random.default_rng(5).integers(0, 6, [2, 4, 4]).astype(np.int32)
VISIBLE = np.tril(np.ones([4, 32]), 3) > 0
TOLERANCE = {"float32": 2e-6, "float64": 1e-14, "bfloat16": 2**-5}

# name: (shapes of the tensors, arguments after them)
OPERATIONS = {
    "project": ([[2, 4, 6], [6, 8]], []),
    "add_bias": ([[8, 6], [6]], []),
    "project_heads": ([[2, 4, 6], [6, 18]], [3, 2]),
    "project_output": ([[2, 3, 4, 5], [10, 6]], []),
    "head_matmul": ([[2, 1, 4], [2, 4, 5]], []),
    "query_matmul": ([[2, 3, 1, 4], [2, 3, 4, 5]], []),
    "masked_softmax": ([[2, 3, 4, 32]], [VISIBLE]),
    "pairwise_scores": ([[2, 2, 4, 3], [6, 2, 3]], [INDEX]),
    "embedding_lookup": ([[5, 3]], [IDS]),
    "layer_norm": ([[2, 4, 6], [6], [6]], [1e-3]),
    "residual_norm": ([[2, 4, 6], [2, 4, 6], [6], [6]], []),
    "relu_layer": ([[2, 4, 6], [6, 8], [8]], []),
}


def call(module, name, tensors, more):
    operation = getattr(module, name)
    if name == "residual_norm":
        x, y, gamma, beta = *tensors[:2], *map(at_least_float32, tensors[2:])  # as layers hand them on
        return operation(x, y, (gamma, beta, 1e-3), DROP)
    if name == "relu_layer":
        return operation(*tensors, DROP)
    return operation(*tensors, *more)


def values_and_gradients(module, name, tensors, more):
    """The results as a list, and the gradients of a sum of them with unequal weights."""

    def loss_of(x):
        x = tf.cast(tf.reshape(x, [-1]), tf.float32)
        return tf.reduce_sum(x * tf.sin(tf.range(tf.cast(tf.size(x), tf.float32))))

    def compute(*tensors):
        with fusing(True), tf.GradientTape() as tape:
            tape.watch(tensors)
            results = call(module, name, tensors, more)
            results = list(results) if isinstance(results, list | tuple) else [results]
            loss = tf.add_n([loss_of(x) for x in results])
        return [*results, *map(tf.convert_to_tensor, tape.gradient(loss, tensors))]

    return tf.function(compute, autograph=False)(*tensors)


@pytest.mark.parametrize("size", ["small", pytest.param("compiled", marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", OPERATIONS)
def test_fast_operations_are_the_plain_ones(name, dtype, size, monkeypatch):
    if size == "compiled":
        monkeypatch.setattr(fusion, "MIN_ELEMENTS", 1)
    shapes, more = OPERATIONS[name]
    rng = np.random.default_rng(1)
    tensors = [tf.cast(rng.normal(size=shape), dtype) for shape in shapes]
    exact = values_and_gradients(plain, name, [tf.cast(x, tf.float64) for x in tensors], more)
    expected, actual = (values_and_gradients(module, name, tensors, more) for module in (plain, cpu))
    for found, like, wanted in zip(actual, expected, exact, strict=True):
        assert found.dtype == like.dtype and found.shape == like.shape
        scale = np.abs(wanted).max()
        np.testing.assert_allclose(tf.cast(found, tf.float64), wanted, rtol=0, atol=TOLERANCE[dtype] * scale)


@pytest.mark.parametrize("at_a_time", [1, 2, 5])
@pytest.mark.parametrize("kernel", [[6, 1024], [1024, 6], [6, 1000], [1024, 1024]], ids=str)
def test_projections_with_avx2_are_the_plain_ones(kernel, at_a_time, monkeypatch):
    monkeypatch.setattr(fusion, "MIN_ELEMENTS", 1)
    monkeypatch.setattr(cpu, "_LARGE_KERNEL", 1)
    monkeypatch.setattr(cpu, "_has_only_avx2", lambda: True)
    for module in (cpu, kernel_threads):
        monkeypatch.setattr(module, "operations_at_a_time", lambda: at_a_time)
    rng = np.random.default_rng(4)
    for rows in ([3, 7], [2, 1]):  # few rows take another operation
        tensors = [tf.constant(rng.normal(size=shape), tf.float32) for shape in ([*rows, kernel[0]], kernel)]
        expected, actual = (values_and_gradients(module, "project", tensors, []) for module in (plain, cpu))
        for found, wanted in zip(actual, expected, strict=True):
            np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-6 * np.abs(wanted).max())


@pytest.mark.parametrize("avx2", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 16, 17])
def test_products_of_heads_are_those_of_tensorflow(rows, avx2, monkeypatch):
    monkeypatch.setattr(cpu, "_has_only_avx2", lambda: avx2)
    rng = np.random.default_rng(5)
    a, b = rng.normal(size=[2, rows, 4]), rng.normal(size=[2, 5, 4])
    for transposed, factor in ((True, b), (False, b.swapaxes(1, 2))):
        products = cpu.products_of_heads(tf.constant(a), tf.constant(factor), transpose_b=transposed)
        np.testing.assert_allclose(tf.stack(products), a @ b.swapaxes(1, 2), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("n_rows", [1, 5, 8])
@pytest.mark.parametrize("of_all_rows", [True, False])
def test_rows_attend_in_shares_as_they_do_at_once(n_rows, of_all_rows, monkeypatch):
    rng = np.random.default_rng(6)
    q, k, v = (tf.constant(rng.normal(size=[n_rows, 2, length, 3])) for length in (1, 6, 6))
    scores = tf.constant(rng.normal(size=[2, 1, 6] if of_all_rows else [2, n_rows, 1, 6]))
    if of_all_rows:
        scores = tf.unstack(scores)
    visible = tf.constant(rng.random([1 if of_all_rows else n_rows, 1, 1, 6]) < 0.7)
    rows_first = [attending.RowsFirst(x) for x in (q, k, v)]
    expected = attending.attend(*rows_first, scores, visible)
    for module in (attending, kernel_threads):
        monkeypatch.setattr(module, "operations_at_a_time", lambda: 2)
    np.testing.assert_allclose(attending.attend(*rows_first, scores, visible), expected, rtol=1e-12)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_cross_entropy_is_the_plain_one(dtype):
    rng = np.random.default_rng(2)
    logits, labels = tf.cast(rng.normal(size=[7, 5]) * 9, dtype), tf.constant(rng.integers(0, 5, 7), tf.int32)
    found = []
    for module in (plain, cpu):
        with tf.GradientTape() as tape:
            tape.watch(logits)
            nll = module.cross_entropy(labels, logits)
        found.append((nll, tape.gradient(nll, logits, tf.cast(tf.range(7), dtype))))
    for expected, actual in zip(*found, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE[dtype] * 20)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("visible", [None, VISIBLE[:1]], ids=["all", "masked"])
@pytest.mark.parametrize("position", [False, True])
def test_one_query_is_the_softmax_times_the_values(dtype, visible, position):
    rng = np.random.default_rng(3)
    q, k, v = (tf.cast(rng.normal(size=shape), dtype) for shape in ([2, 1, 4], [2, 32, 4], [2, 32, 4]))
    scores = tf.cast(rng.normal(size=[2, 1, 32]), dtype) if position else None
    probs = plain.masked_softmax(plain.head_matmul(q, k, transpose_b=True), visible, scores)
    expected = tf.cast(plain.head_matmul(probs, v), tf.float64)
    assert cpu.takes_one_query(q, visible)
    for given in [scores, scores if scores is None else tf.unstack(scores)]:
        actual = tf.cast(cpu.attend_with_one_query(q, k, v, given, visible), tf.float64)
        np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE[dtype] * np.abs(expected).max())
