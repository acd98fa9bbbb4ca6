"""The original's optimizer: schedule, Adam and clipping against its formulas."""

import itertools
import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import raises_parameter

import txl_tf
from txl_tf.config import OptimizerConfig
from txl_tf.errors import ParameterError
from txl_tf.training.optimization import SGD, Adam, AdamW, Lamb
from txl_tf.training.schedules import LinearSchedule, NoamSchedule, make_schedule

# ---------------------------------------- schedule


def original_learning_rate(step, learning_rate, warmup_steps, train_steps, min_lr_ratio):
    """The original's: linear from 0, then TF1's `cosine_decay` with `alpha`."""
    if step < warmup_steps:
        return step / warmup_steps * learning_rate
    done = min((step - warmup_steps) / (train_steps - warmup_steps), 1.0)
    cosine = 0.5 * (1 + math.cos(math.pi * done))
    return learning_rate * ((1 - min_lr_ratio) * cosine + min_lr_ratio)


def test_schedule_is_the_original_s_at_every_step():
    for warmup_steps, min_lr_ratio in itertools.product([0, 1, 7], [0.0, 0.1, 1.0]):
        schedule = make_schedule(2e-3, warmup_steps, 20, min_lr_ratio)
        found = [float(schedule(step)) for step in range(25)]  # and past the end
        expected = [original_learning_rate(step, 2e-3, warmup_steps, 20, min_lr_ratio) for step in range(25)]
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-9), (warmup_steps, min_lr_ratio)


def test_learning_rate_of_the_optimizer_follows_its_steps():
    optimizer = txl_tf.make_optimizer(1e-3, warmup_steps=4, train_steps=10, min_lr_ratio=0.1)
    variable = keras.Variable([1.0])
    for step in range(12):
        expected = original_learning_rate(step, 1e-3, 4, 10, 0.1)
        assert float(optimizer.learning_rate) == pytest.approx(expected, rel=1e-5, abs=1e-9)
        optimizer.apply([tf.constant([1.0])], [variable])


def test_defaults_are_those_of_the_original_s_flags():
    optimizer, flags = txl_tf.make_optimizer(), OptimizerConfig()
    for step in (0, 50_000, 100_000):
        optimizer.iterations.assign(step)
        expected = original_learning_rate(step, 2.5e-4, 0, 100_000, 0.004)
        assert float(optimizer.learning_rate) == pytest.approx(expected, rel=1e-4, abs=1e-10)
    assert (optimizer.clip, type(optimizer), flags.learning_rate) == (0.25, Adam, 2.5e-4)


BAD = [
    ({"learning_rate": 0.0}, "learning_rate", "positive"),
    ({"learning_rate": 1e-3, "warmup_steps": -1}, "warmup_steps", "[0, 100000)"),
    ({"learning_rate": 1e-3, "warmup_steps": 5, "train_steps": 5}, "warmup_steps", "[0, 5)"),
    ({"learning_rate": 1e-3, "min_lr_ratio": 1.5}, "min_lr_ratio", "[0, 1]"),
    ({"learning_rate": 1e-3, "clip": 0.0}, "clip", "None"),
    ({"clip_value": -1.0}, "clip_value", "None"),
    ({"momentum": 1.0}, "momentum", "[0, 1)"),
    ({"optimizer": "sgd", "weight_decay": 0.1}, "weight_decay", ""),
    ({"momentum": 0.5}, "momentum", "left out"),
    ({"optimizer": "sgd", "beta_2": 0.5}, "beta_2", "left out"),
    ({"schedule": "constant", "min_lr_ratio": 0.5}, "min_lr_ratio", "left out"),
    ({"schedule": "linear", "warmup_steps": 5, "train_steps": 5}, "warmup_steps", "[0, 5)"),
]


def test_bad_arguments_are_named():
    for arguments, name, limit in BAD:
        with raises_parameter(name, arguments[name], limit=limit):
            txl_tf.make_optimizer(**arguments)
            pytest.fail(f"no error: {arguments}")


# ---------------------------------------- Adam and clipping

SHAPES = [(3, 4), (5,), ()]


def gradients_of_steps(n=20):
    """Norms from 0.02 to 5, below and above a clip of 0.25, and a gradient of zeros."""
    rng = np.random.default_rng(0)
    sizes = np.geomspace(0.005, 1, n)
    rng.shuffle(sizes)
    sizes[3] = 0
    return [[(size * rng.normal(size=shape)).astype(np.float32) for shape in SHAPES] for size in sizes]


@pytest.mark.parametrize(
    "warmup_steps, clip",
    [(5, 0.25), (0, None), *(pytest.param(*case, marks=pytest.mark.slow) for case in [(0, 0.25), (5, None)])],
)
def test_updates_are_those_of_tf1_s_adam_and_the_norm_is_that_before_clipping(clip, warmup_steps):
    start = [np.random.default_rng(i).normal(size=shape).astype(np.float32) for i, shape in enumerate(SHAPES)]
    variables = [keras.Variable(array) for array in start]
    optimizer = txl_tf.make_optimizer(0.01, warmup_steps, train_steps=20, min_lr_ratio=0.1, clip=clip)

    expected = [tf.Variable(array) for array in start]
    rate = tf.Variable(0.0)
    original = tf.compat.v1.train.AdamOptimizer(rate.value)
    for step, gradients in enumerate(gradients_of_steps()):
        optimizer.apply([tf.constant(gradient) for gradient in gradients], variables)
        norm = math.sqrt(sum((gradient.astype(np.float64) ** 2).sum() for gradient in gradients))
        assert float(optimizer.gradient_norm.numpy()) == pytest.approx(norm, rel=1e-5)

        rate.assign(original_learning_rate(step, 0.01, warmup_steps, 20, 0.1))
        scale = 1 if clip is None else min(1, clip / norm) if norm else 1
        original.apply_gradients([(scale * g, v) for g, v in zip(gradients, expected, strict=True)])
        for variable, array in zip(variables, expected, strict=True):
            np.testing.assert_allclose(variable.numpy(), array, rtol=1e-5, atol=1e-6, err_msg=f"step {step}")
    assert np.abs(variables[0].numpy() - start[0]).max() > 0.02


@pytest.mark.parametrize(
    "ours, theirs, options",
    [
        (Adam, keras.optimizers.Adam, {}),
        (Adam, keras.optimizers.Adam, {"amsgrad": True}),
        (AdamW, keras.optimizers.AdamW, {"weight_decay": 0.1}),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", pytest.param("float64", marks=pytest.mark.slow)])
def test_one_operation_updates_as_keras_does(ours, theirs, options, dtype):
    ours, theirs = (make(0.01, epsilon=1e-8, **options) for make in (ours, theirs))
    pairs = [[keras.Variable(np.ones(shape), dtype=dtype) for shape in SHAPES] for _ in range(2)]
    for gradients in gradients_of_steps(5):
        for optimizer, variables in zip((ours, theirs), pairs, strict=True):
            optimizer.apply([tf.constant(gradient) for gradient in gradients], variables)
    for variable, expected in zip(*pairs, strict=True):
        np.testing.assert_allclose(variable.numpy(), expected.numpy(), rtol=1e-6)
    assert np.abs(pairs[0][0].numpy() - 1).max() > 0.02


def test_clipping_counts_repeated_rows_of_a_sparse_gradient_once_summed():
    """Keras's own clipping takes the norm of the rows before they are added up: 2 instead of 4."""
    variable = keras.Variable(np.zeros([3, 1], np.float32))
    optimizer = txl_tf.make_optimizer(0.01, train_steps=20)
    slices = tf.IndexedSlices(tf.ones([4, 1]), tf.constant([1, 1, 1, 1]), tf.constant([3, 1]))
    optimizer.apply([slices], [variable])
    assert float(optimizer.gradient_norm.numpy()) == pytest.approx(4)


def test_config_round_trips_with_the_schedule_and_the_clip():
    optimizer = txl_tf.make_optimizer(2e-3, warmup_steps=3, train_steps=9, min_lr_ratio=0.2, clip=0.7)
    config = keras.saving.serialize_keras_object(optimizer)
    copy = keras.saving.deserialize_keras_object(config)
    assert isinstance(copy, Adam)
    assert (copy.clip, copy.beta_1, copy.beta_2, copy.epsilon) == (0.7, 0.9, 0.999, 1e-8)
    schedule = copy.get_config()["learning_rate"]
    assert schedule == optimizer.get_config()["learning_rate"]
    variable = keras.Variable([1.0])
    for step in range(9):
        expected = original_learning_rate(step, 2e-3, 3, 9, 0.2)
        assert float(copy.learning_rate) == pytest.approx(expected, rel=1e-5, abs=1e-9)
        copy.apply([tf.constant([1.0])], [variable])


def test_the_noam_schedule_peaks_at_the_learning_rate_and_falls_with_the_square_root_of_the_step():
    optimizer = txl_tf.make_optimizer(learning_rate=1e-3, warmup_steps=100, schedule="noam", beta_2=0.98)
    rates = [float(optimizer.schedule(step)) for step in (0, 50, 100, 400)]
    np.testing.assert_allclose(rates, [0, 5e-4, 1e-3, 5e-4], rtol=1e-6)
    assert optimizer.beta_2 == 0.98
    with raises_parameter("warmup_steps", 0, limit="1"):
        txl_tf.make_optimizer(schedule="noam")


# ---------------------------------------- SGD, clipping by value, and the schedules of the taggers' programs


def start_values():
    return [np.random.default_rng(i).normal(size=shape).astype(np.float32) for i, shape in enumerate(SHAPES)]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("compiled", [False, True])
def test_sgd_is_pytorch_s_where_the_rate_changes(momentum, compiled):
    """`v = momentum v + g`, then `p = p - rate v`: the rate is not in the velocity."""
    variables, expected = [keras.Variable(x) for x in start_values()], [x.astype(np.float64) for x in start_values()]
    optimizer = SGD(0.1, momentum=momentum)
    optimizer.build(variables)

    def apply(gradients):
        optimizer.apply(gradients, variables)

    if compiled:
        apply = tf.function(apply, autograph=False)
    velocities = [np.zeros(shape) for shape in SHAPES]
    rates = [0.1, 0.5, 0.01, 0.01, 0.3, 0.0, 0.2]
    for rate, gradients in zip(rates, gradients_of_steps(len(rates)), strict=True):
        optimizer.learning_rate = rate
        apply([tf.constant(gradient) for gradient in gradients])
        for i, gradient in enumerate(gradients):
            velocities[i] = momentum * velocities[i] + gradient
            expected[i] = expected[i] - rate * velocities[i]
            np.testing.assert_allclose(variables[i].numpy(), expected[i], rtol=1e-5, atol=1e-6)
    theirs = [keras.Variable(x) for x in start_values()]
    keras_sgd = keras.optimizers.SGD(0.1, momentum=momentum)
    for rate, gradients in zip(rates, gradients_of_steps(len(rates)), strict=True):
        keras_sgd.learning_rate = rate
        keras_sgd.apply([tf.constant(gradient) for gradient in gradients], theirs)
    assert np.allclose(theirs[0].numpy(), expected[0], atol=1e-4) == (momentum == 0)  # Keras's form is another


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_values_are_clipped_before_the_norm_is(optimizer, clip):
    gradient = np.array([3.0, -0.2, -7.0, 0.5], np.float32)
    clipped = np.array([0.5, -0.2, -0.5, 0.5])
    scale = 1 if clip is None else min(1, clip / np.linalg.norm(clipped))
    made = txl_tf.make_optimizer(0.1, optimizer=optimizer, clip=clip, clip_value=0.5, schedule="constant", momentum=0)
    variable = keras.Variable(np.zeros(4, np.float32))
    made.apply([tf.constant(gradient)], [variable])
    assert float(made.gradient_norm.numpy()) == pytest.approx(np.linalg.norm(gradient))
    if optimizer == "sgd":
        np.testing.assert_allclose(variable.numpy(), -0.1 * scale * clipped, rtol=1e-5)
    else:  # the first step of Adam is the sign, and its first moment is a tenth of what it was given
        np.testing.assert_allclose(made.slots.of(variable, "momentum").numpy(), 0.1 * scale * clipped, rtol=1e-5)


def test_a_norm_that_clipping_by_value_has_made_small_is_not_clipped():
    made = txl_tf.make_optimizer(1.0, optimizer="sgd", clip=1.0, clip_value=0.1, schedule="constant", momentum=0)
    variable = keras.Variable(np.zeros(4, np.float32))
    made.apply([tf.constant([9.0, -9.0, 9.0, 0.05])], [variable])
    np.testing.assert_allclose(variable.numpy(), [-0.1, 0.1, -0.1, -0.05], rtol=1e-5)


def fastnlp_rate(step, warmup_steps, train_steps, constant):
    """fastNLP's `WarmupCallback`, `step` from 1 on, as a share of the highest rate."""
    progress, warmup = step / train_steps, warmup_steps / train_steps
    if progress < warmup:
        return progress / warmup
    return 1.0 if constant else max((progress - 1) / (warmup - 1), 0)


@pytest.mark.parametrize("warmup_steps", [0, 1, 4])
@pytest.mark.parametrize("schedule", ["linear", "constant"])
def test_linear_and_constant_schedules_are_fastnlp_s_at_every_step(schedule, warmup_steps):
    optimizer = txl_tf.make_optimizer(0.02, warmup_steps, train_steps=10, schedule=schedule, optimizer="sgd")
    variable = keras.Variable([1.0])
    for step in range(13):  # and past the end
        expected = 0.02 * fastnlp_rate(step + 1, warmup_steps, 10, schedule == "constant")
        assert float(optimizer.learning_rate) == pytest.approx(expected, rel=1e-5, abs=1e-8), step
        optimizer.apply([tf.constant([1.0])], [variable])


def test_some_rates_of_the_linear_schedule():
    linear, constant = LinearSchedule(2.0, 4, 8), LinearSchedule(2.0, 4, 8, constant=True)
    np.testing.assert_allclose([linear(s) for s in range(9)], [0.5, 1, 1.5, 2, 1.5, 1, 0.5, 0, 0], rtol=1e-6)
    np.testing.assert_allclose([constant(s) for s in range(9)], [0.5, 1, 1.5, 2, 2, 2, 2, 2, 2], rtol=1e-6)


@pytest.mark.parametrize("warmup_steps", [-1, 8, 9])
def test_a_linear_schedule_warms_up_for_fewer_steps_than_there_are(warmup_steps):
    with raises_parameter("warmup_steps", warmup_steps):
        LinearSchedule(2.0, warmup_steps, 8)
    if warmup_steps > 0:
        assert float(LinearSchedule(2.0, warmup_steps, 8, constant=True)(20)) == 2.0


@pytest.mark.parametrize(
    "schedule, good, name, bad",
    [
        (NoamSchedule, {"d_model": 4, "warmup_steps": 3}, "d_model", 0),
        (NoamSchedule, {"d_model": 4, "warmup_steps": 3}, "warmup_steps", "3"),
        (NoamSchedule, {"d_model": 4}, "scale", -1.0),
        (LinearSchedule, {"learning_rate": 1.0, "warmup_steps": 1, "train_steps": 3}, "learning_rate", "1"),
        (LinearSchedule, {"learning_rate": 1.0, "warmup_steps": 1, "train_steps": 3}, "train_steps", -1),
        (make_schedule, {"warmup_steps": 0, "train_steps": 3, "min_lr_ratio": 0.1}, "learning_rate", -1.0),
        (make_schedule, {"learning_rate": 1.0, "warmup_steps": 0, "train_steps": 3}, "min_lr_ratio", 2.0),
    ],
)
def test_numbers_of_schedules_are_in_their_range(schedule, good, name, bad):
    with raises_parameter(name, bad):
        schedule(**{**good, name: bad})


def test_gradients_without_weights_need_an_optimizer_that_knows_them():
    optimizer, weights = SGD(0.5), [keras.Variable([1.0]), keras.Variable([2.0])]
    with raises_parameter("trainable_variables", None):
        optimizer.apply([tf.constant([1.0])])
    optimizer.build(weights)
    with raises_parameter("grads", 1, limit="2"):
        optimizer.apply([tf.constant([1.0])])
    optimizer.apply([tf.constant([1.0]), tf.constant([2.0])])
    np.testing.assert_allclose(tf.stack([weight.value for weight in weights]), [[0.5], [1.0]])


def test_sgd_and_its_schedule_round_trip():
    options = {"schedule": "linear", "momentum": 0.8, "clip": None, "clip_value": 5.0, "ema": 0.9}
    optimizer = txl_tf.make_optimizer(0.1, 3, 9, optimizer="sgd", **options)
    assert isinstance(optimizer, SGD)
    copy = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(optimizer))
    assert isinstance(copy, SGD) and isinstance(copy.schedule, LinearSchedule)
    assert copy.get_config() == optimizer.get_config()
    assert (copy.momentum, copy.clip, copy.clip_value, copy.use_ema) == (0.8, None, 5.0, True)


def two_weights():
    kernel, bias = keras.Variable(np.ones([2, 3]), name="kernel"), keras.Variable(np.ones([3]), name="bias")
    kernel.constraint = keras.constraints.MaxNorm(1.3)
    return [kernel, bias]


@pytest.mark.parametrize("ours, theirs", [(Adam, keras.optimizers.Adam), (Lamb, keras.optimizers.Lamb)])
@pytest.mark.parametrize(
    "options",
    [
        {"weight_decay": 0.5},
        {"use_ema": True, "ema_momentum": 0.9, "ema_overwrite_frequency": 2},
        {"loss_scale_factor": 8.0},
    ],
    ids=["decay", "average", "scale"],
)
@pytest.mark.parametrize("exclude", [{}, {"var_names": ["bias"]}, {"var_list": [0]}], ids=["", "name", "weight"])
def test_an_update_is_that_of_keras_with_decay_averages_constraints_and_scales(ours, theirs, options, exclude):
    rng, found = np.random.default_rng(0), []
    gradients = [[rng.normal(size=[2, 3]), rng.normal(size=[3])] for _ in range(3)]
    for optimizer in (ours(0.1, **options), theirs(0.1, **options)):
        weights = two_weights()
        if exclude:
            listed = [weights[i] for i in exclude.get("var_list", [])]
            optimizer.exclude_from_weight_decay(**{**exclude, **({"var_list": listed} if listed else {})})
        for step in gradients:
            optimizer.apply([tf.constant(gradient, tf.float32) for gradient in step], weights)
        optimizer.finalize_variable_values(weights)
        found.append([*weights, optimizer.iterations])
    for weight, expected in zip(*found, strict=True):
        np.testing.assert_allclose(weight.numpy(), expected.numpy(), rtol=1e-5)


def test_averages_belong_to_their_weights_after_some_were_frozen():
    weights = [keras.Variable([number]) for number in (1.0, 10.0, 100.0)]
    optimizer = SGD(1.0, use_ema=True, ema_momentum=0.5)
    optimizer.build(weights)
    optimizer.apply([tf.ones([1])] * 3, weights)
    optimizer.apply([tf.ones([1])] * 2, weights[1:])
    assert [float(weight[0]) for weight in weights] == [0, 8, 98]
    optimizer.finalize_variable_values(weights[1:])  # the first update sets the averages to the weights, 9 and 99
    assert [float(weight[0]) for weight in weights] == [0, 8.5, 98.5]


def test_averages_are_set_on_every_replica(two_replicas):
    with two_replicas.scope():
        weights = [keras.Variable([number]) for number in (1.0, 10.0, 100.0)]
        optimizer = SGD(1.0, use_ema=True, ema_momentum=0.5)
        optimizer.build(weights)
    for updated in (weights, weights[1:]):
        two_replicas.run(lambda updated=updated: optimizer.apply([tf.fill([1], 0.5)] * len(updated), updated))
    optimizer.finalize_variable_values(weights[1:])
    for weight, expected in zip(weights, [0, 8.5, 98.5], strict=True):
        assert [float(value[0]) for value in weight.value.values] == [expected] * 2


def test_replicas_set_weights_to_their_averages_in_the_updates_that_are_due(two_replicas):
    """The averages after the updates: 9, (9 + 8) / 2; then the weight goes on from 8.5: 7.5, (8.5 + 7.5) / 2."""
    with two_replicas.scope():
        weights = [keras.Variable([10.0])]
        optimizer = SGD(1.0, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2)
        optimizer.build(weights)
    found = []
    for _ in range(3):
        two_replicas.run(lambda: optimizer.apply([tf.fill([1], 0.5)], weights))
        found.append([float(value[0]) for value in weights[0].value.values])
    assert found == [[9.0] * 2, [8.5] * 2, [7.5] * 2]


def test_frozen_weights_are_not_set_to_their_averages():
    weights = [keras.Variable([number]) for number in (1.0, 10.0)]
    optimizer = SGD(1.0, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=4)
    optimizer.build(weights)
    for updated in (weights, weights, weights, weights[1:]):
        optimizer.apply([tf.ones([1])] * len(updated), updated)
    assert float(weights[0][0]) == -2.0  # after three steps, and its average is higher
    assert float(weights[1][0]) == 6.875  # the averages are 9, 8.5 and 7.75; then (7.75 + 6) / 2


@pytest.mark.ci
def test_an_optimizer_of_keras_cannot_set_the_weights_of_replicas_during_fit(two_replicas):
    with two_replicas.scope():
        model = txl_tf.Transformer(num_layers=1, d_model=8, num_heads=2, dff=8, input_vocab_size=5, target_vocab_size=5)
        model.compile(keras.optimizers.Adam(use_ema=True, ema_overwrite_frequency=2))
    with raises_parameter("ema_overwrite_frequency"):
        model.fit(np.ones([2, 3], np.int32), np.ones([2, 3], np.int32), verbose=0)


def test_gradients_that_are_missing_or_of_other_weights_are_named():
    weights, optimizer = two_weights(), SGD(0.1)
    optimizer.build(weights)
    with pytest.warns(UserWarning, match="bias"):
        optimizer.apply([tf.ones([2, 3]), None], weights)
    assert float(weights[1][0]) == 1 > float(weights[0][0, 0])
    for grads, of_weights in (([None, None], weights), ([tf.ones([2, 3])], two_weights()[:1])):
        with pytest.raises(ParameterError) as caught:
            optimizer.apply(grads, of_weights)
        assert caught.value.name == "trainable_variables"
    for name in ("clipnorm", "clipvalue", "global_clipnorm"):
        with pytest.raises(ParameterError) as caught:
            Adam(**{name: 1.0})
        assert (caught.value.name, caught.value.value) == (name, 1.0)


# ---------------------------------------- several batches an update

ACCUMULATING = [
    {"optimizer": "adam"}, {"optimizer": "adamw", "weight_decay": 0.1}, {"optimizer": "sgd", "momentum": 0.9},
    {"optimizer": "lamb", "ema": 0.9}, {"optimizer": "sgd", "schedule": "linear", "clip": None},
    {"optimizer": "muon", "weight_decay": 0.1, "ema": 0.9},
]  # fmt: skip
OF_BATCHES = np.random.default_rng(1).normal(size=[7, 2, 3]).astype(np.float32)


def accumulating(gradient_accumulation_steps, **options):
    arguments = {"learning_rate": 0.1, "warmup_steps": 1, "train_steps": 9, "clip": 0.3, **options}
    optimizer = txl_tf.make_optimizer(**arguments, gradient_accumulation_steps=gradient_accumulation_steps)
    variable = keras.Variable(np.ones([2, 3], np.float32))
    optimizer.build([variable])
    return optimizer, variable


def assert_equal_state(optimizer, variable, expected, other):
    np.testing.assert_allclose(variable, other, rtol=1e-6)
    assert optimizer.iterations.numpy() == expected.iterations.numpy()
    assert float(optimizer.learning_rate) == float(expected.learning_rate)
    np.testing.assert_allclose(optimizer.gradient_norm, expected.gradient_norm, rtol=1e-6)
    if optimizer.use_ema:
        averages = optimizer.slots.of(variable, "average"), expected.slots.of(other, "average")
        np.testing.assert_allclose(*averages, rtol=1e-6)


@pytest.mark.parametrize("options", ACCUMULATING)
def test_every_third_batch_updates_with_the_mean_of_three(options):
    """Clipping, schedule, decay and moving average are those of an update with the mean, after every batch."""
    (optimizer, variable), (by_hand, other) = (accumulating(n, **options) for n in (3, 1))
    for i, gradient in enumerate(OF_BATCHES):
        optimizer.apply([tf.constant(gradient)], [variable])
        if i % 3 == 2:
            by_hand.apply([tf.constant(OF_BATCHES[i - 2 : i + 1].mean(0))], [other])
        assert_equal_state(optimizer, variable, by_hand, other)
    again = type(optimizer).from_config(optimizer.get_config())
    assert again.batches_per_update == optimizer.batches_per_update == 3


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_two_replicas_add_up_batch_by_batch(two_replicas, compiled):
    """Each has half of the gradient; what the variables hold between two updates is the same on both."""
    by_hand, other = accumulating(3, ema=0.9)
    with two_replicas.scope():
        optimizer, variable = accumulating(3, ema=0.9)

    def step(gradient):
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        optimizer.apply([gradient * (0.25 + 0.5 * tf.cast(replica, tf.float32))], [variable])

    run = tf.function(two_replicas.run) if compiled else two_replicas.run
    for gradient in OF_BATCHES:
        run(step, args=(tf.constant(gradient),))
        by_hand.apply([tf.constant(gradient)], [other])
        assert_equal_state(optimizer, variable, by_hand, other)
        total = optimizer.slots.of(variable, "total")
        for of_replica in two_replicas.experimental_local_results(total.value):
            np.testing.assert_allclose(of_replica, by_hand.slots.of(other, "total"), rtol=1e-6, atol=1e-7)


def test_an_optimizer_that_is_saved_between_two_updates_goes_on():
    (optimizer, variable), (resumed, other) = accumulating(3), accumulating(3)
    for i, gradient in enumerate(OF_BATCHES):
        if i == 4:
            resumed.set_weights([x.numpy() for x in optimizer.variables])
            other.assign(variable)
        optimizer.apply([tf.constant(gradient)], [variable])
        if i >= 4:
            resumed.apply([tf.constant(gradient)], [other])
    np.testing.assert_array_equal(variable, other)


@pytest.mark.parametrize("steps", [0, 2.0, True])
def test_numbers_of_batches_are_checked(steps):
    with pytest.raises(ParameterError) as caught:
        txl_tf.make_optimizer(gradient_accumulation_steps=steps)
    assert (caught.value.name, caught.value.value) == ("gradient_accumulation_steps", steps)


@pytest.mark.slow
def test_a_language_model_trains_on_the_mean_of_batches(tmp_path):
    """By hand, with the dropout of each batch; and a file that is saved between two updates goes on."""

    def make(n):
        keras.utils.set_random_seed(0)
        lm = txl_tf.TransformerXLLM(
            n_token=9, n_layer=1, d_model=8, d_embed=8, n_head=2, d_head=4, d_inner=8, mem_len=3, dropout=0.3, seed=5
        )
        lm.compile(txl_tf.make_optimizer(0.1, 1, 9, optimizer="sgd", clip=0.1, gradient_accumulation_steps=n))
        return lm

    lm, by_hand, mems, gradients = make(2), make(1), None, []
    text = np.random.default_rng(0).integers(0, 9, [6, 2, 5]).astype(np.int32)
    by_hand.build_optimizer()
    mems = by_hand.initial_mems(2)
    for i, tokens in enumerate(text):
        lm.train_on_batch(tokens, tokens)
        with tf.GradientTape() as tape:
            key = tf.constant([5, i, 0])
            nll, _, mems = by_hand.segment_nll(tokens, tokens, mems, training=True, dropout_key=key)
            loss = tf.reduce_mean(nll)
        gradients += [[tf.convert_to_tensor(x) for x in tape.gradient(loss, by_hand.trainable_variables)]]
        if i % 2:
            mean = [(first + second) / 2 for first, second in zip(*gradients, strict=True)]
            by_hand.optimizer.apply(mean, by_hand.trainable_variables)
            gradients = []
        if i == 2:
            lm.save(tmp_path / "lm.keras")
    for found, expected in zip(lm.get_weights(), by_hand.get_weights(), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)
    loaded = keras.models.load_model(tmp_path / "lm.keras")
    assert int(loaded.optimizer.batches) == 3 and int(loaded.optimizer.iterations) == 1
    for model in (lm, loaded):
        model.set_weights(by_hand.get_weights())
    loaded.train_on_batch(text[0], text[0])
    assert any(np.any(x != y) for x, y in zip(loaded.get_weights(), by_hand.get_weights(), strict=True))
