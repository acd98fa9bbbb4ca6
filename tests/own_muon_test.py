"""`--optimizer=muon`: orthogonal updates of matrices; clipping, schedules and replicas as in our other optimizers."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from conforming import segment
from helpers import raises_parameter

import txl_tf
from txl_tf.environment import too_old
from txl_tf.training.muon import orthogonalized, size_of_update
from txl_tf.training.optimization import Muon


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def by_numpy(matrix):
    """The iteration of Jordan et al. in float64, for a matrix with at most as many rows as columns."""
    x = matrix.astype(np.float64) / np.linalg.norm(matrix)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x - 4.7750 * gram @ x + 2.0315 * gram @ gram @ x
    return x


@pytest.mark.parametrize("shape", [(4, 4), (3, 8), (8, 3), (1, 5)])
def test_an_update_is_nearly_orthogonal_and_keeps_the_singular_vectors(shape):
    matrix = random(*shape)
    found = orthogonalized(tf.constant(matrix), "float32").numpy()
    expected = by_numpy(matrix) if shape[0] <= shape[1] else by_numpy(matrix.T).T
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    left, before, right = np.linalg.svd(matrix, full_matrices=False)
    after = left.T @ found @ right.T
    assert (before.max() / before.min() > 1.5) == (min(shape) > 1)
    np.testing.assert_allclose(after, np.diag(np.diag(after)), atol=1e-4)
    assert 0.6 < np.diag(after).min() and np.diag(after).max() < 1.3
    rms = size_of_update(*shape) * np.sqrt(np.mean(found**2))
    assert 0.6 * 0.2 < rms < 1.3 * 0.2


def test_products_in_bfloat16_are_close():
    matrix = tf.constant(random(16, 16))
    rounded = orthogonalized(matrix, "bfloat16")
    assert rounded.dtype == tf.float32
    exact = orthogonalized(matrix, "float32").numpy()
    assert 1e-4 < np.linalg.norm(rounded - exact) / np.linalg.norm(exact) < 0.1


def test_a_matrix_of_zeros_stays_where_it_is():
    assert not orthogonalized(tf.zeros([3, 4]), "float32").numpy().any()


needs_keras_muon = pytest.mark.skipif(
    not hasattr(keras.optimizers, "Muon") or too_old("keras", (3, 13), ""),
    reason=f"Keras {keras.__version__} has no Muon that works with TensorFlow",
)


@needs_keras_muon
def test_updates_equal_those_of_keras_muon(small_lm):
    """With decay, over three steps: kernels by Muon, the rest by AdamW."""
    lms = [small_lm() for _ in range(2)]
    decay = {"weight_decay": 0.1}
    theirs = keras.optimizers.Muon(0.01, adam_weight_decay=0.1, epsilon=1e-8, **decay)
    ours = txl_tf.make_optimizer(0.01, schedule="constant", optimizer="muon", clip=None, **decay)
    for lm, optimizer in zip(lms, (ours, theirs), strict=True):
        lm.compile(optimizer, run_eagerly=True)
        for _ in range(3):
            lm.train_on_batch(*segment())
    start = small_lm()
    for variable, expected, before in zip(*(lm.trainable_variables for lm in (*lms, start)), strict=True):
        np.testing.assert_allclose(variable, expected, rtol=1e-3, atol=1e-5, err_msg=variable.path)
        assert np.abs(variable - before).max() > 1e-3, variable.path


def test_the_layer_of_the_logits_and_weights_that_are_named_are_left_to_adamw():
    model = txl_tf.Transformer(
        num_layers=1, d_model=8, num_heads=2, dff=12, input_vocab_size=9, target_vocab_size=9, rate=0.0
    )
    model((np.ones([1, 2], np.int32), np.ones([1, 2], np.int32)))
    for more in ([], ["ffn"]):
        optimizer = Muon(left_to_adamw=["embedding", "final_layer", *more])
        optimizer.build(model.trainable_variables)
        by_muon = {v.path for v in model.trainable_variables if not optimizer.slots.has(v, "velocity")}
        kernels = {v.path for v in model.trainable_variables if v.name == "kernel" and "final_layer" not in v.path}
        assert by_muon == {path for path in kernels if not (more and "ffn" in path)} != set()


@pytest.mark.parametrize("compiled", [False, True])
def test_two_replicas_update_as_one(two_replicas, compiled):
    """The first has a quarter of the gradient, the second the rest; the sum is clipped. They share the matrices."""
    shapes = [(3, 4), (4,), (5, 2), (2, 2)]

    def make():
        optimizer = txl_tf.make_optimizer(0.1, train_steps=9, optimizer="muon", clip=0.3)
        variables = [keras.Variable(random(*shape)) for shape in shapes]
        optimizer.build(variables)
        return optimizer, variables

    single, expected = make()
    with two_replicas.scope():
        double, found = make()

    def step(gradients):
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        double.apply([gradient * (0.25 + 0.5 * tf.cast(replica, tf.float32)) for gradient in gradients], found)

    run = tf.function(two_replicas.run) if compiled else two_replicas.run
    for i in range(3):
        gradients = [tf.constant(random(*shape, seed=i + 1)) for shape in shapes]
        single.apply(gradients, expected)
        run(step, args=(gradients,))
    for variable, other in zip(found, expected, strict=True):
        for of_replica in two_replicas.experimental_local_results(variable.value):
            np.testing.assert_allclose(of_replica, other, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(double.gradient_norm, single.gradient_norm, rtol=1e-6)


def test_a_saved_optimizer_resumes():
    def apply(optimizer, variable, seeds):
        for seed in seeds:
            optimizer.apply([tf.constant(random(3, 4, seed=seed))], [variable])

    optimizer = txl_tf.make_optimizer(0.1, 2, 9, optimizer="muon", weight_decay=0.1, product_dtype="bfloat16")
    variable = keras.Variable(random(3, 4))
    apply(optimizer, variable, [1, 2])
    copy = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(optimizer))
    assert isinstance(copy, Muon) and copy.get_config() == optimizer.get_config()
    other = keras.Variable(variable.numpy())
    copy.build([other])
    copy.set_weights([x.numpy() for x in optimizer.variables])
    apply(optimizer, variable, [3])
    apply(copy, other, [3])
    np.testing.assert_array_equal(variable, other)


@pytest.mark.parametrize("options", [{"product_dtype": "bfloat16"}, {"product_dtype": "fp8", "optimizer": "muon"}])
def test_types_of_products_are_checked(options):
    with raises_parameter("product_dtype", options["product_dtype"]):
        txl_tf.make_optimizer(**options)
