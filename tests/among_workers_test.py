"""Encoder-decoders and taggers that several workers train, against one device: the steps, the logs, what is refused.

The two replicas of this process stand for two workers; `kills.py` trains in processes.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from conforming import LABELS, pairs, tagged_chars
from helpers import SMALL, raises_naming, raises_parameter, randomise

import txl_tf
from txl_tf.data.batching import EpochBatches
from txl_tf.training import among_workers

pytestmark = pytest.mark.ci


@pytest.fixture
def replicas_as_workers(monkeypatch):
    monkeypatch.setattr(among_workers, "num_workers", lambda strategy: strategy.num_replicas_in_sync)


def encoder_decoder():
    sizes = {"num_layers": 1, "d_model": 8, "num_heads": 2, "dff": 12}
    return txl_tf.Transformer(**sizes, input_vocab_size=23, target_vocab_size=23, max_len=9, rate=0.2, seed=3)


def tagger():
    sizes = {"n_token": 23, "n_bigram": 9, "d_embed": 6, "d_bigram": 4, "d_model": 8, "n_head": 2, "d_inner": 12}
    network = txl_tf.Tener(**sizes, n_layer=1, dropout=0.2, seed=3)
    return txl_tf.Tagger(network, LABELS, output_dropout=0.2, seed=4)


TASKS = {encoder_decoder: pairs, tagger: tagged_chars}


def batches(task, shortest=2):
    """An epoch of three batches of different rows."""
    batch, rows = TASKS[task](), [np.arange(4), np.arange(shortest), np.array([3, 1, 2, 0])]
    return EpochBatches(lambda rng: rows, lambda chosen: tf.nest.map_structure(lambda x: x[chosen], batch), None)


def compiled(task, strategy=None, **options):
    with (strategy or tf.distribute.get_strategy()).scope():
        model = task()
        randomise(model)
        model.compile(txl_tf.make_optimizer(0.05, 2, 30, optimizer="sgd"), **options)
        model.optimizer.build(model.trainable_variables)
    return model


def train(task, strategy=None, **options):
    """What four steps leave behind, in numbers, and the weights."""
    model, data = compiled(task, strategy, **options), batches(task)
    fit = {"steps_per_epoch": 4, "validation_data": data.dataset(), "shuffle": False, "verbose": 0}
    history = model.fit(data.dataset(repeat=True), **fit).history
    found = model.evaluate(data.dataset(), verbose=0, return_dict=True)
    found = {f"evaluated_{name}": value for name, value in found.items()}
    return {**history, **found, **model.metric_totals}, model.get_weights()


@pytest.mark.slow
@pytest.mark.parametrize("task", [encoder_decoder, tagger])
@pytest.mark.parametrize(
    "options", [{"run_eagerly": True}, {"steps_per_execution": 1}, {"steps_per_execution": 2}], ids=str
)
def test_workers_train_and_evaluate_as_one_device(two_replicas, replicas_as_workers, task, options):
    """With two steps a call, the last call of an evaluation has one step."""
    numbers, weights = train(task, run_eagerly=options.get("run_eagerly", False))
    found, found_weights = train(task, two_replicas, **options)
    assert found.keys() == numbers.keys() and {"val_loss", "grad_norm", "evaluated_loss"} < found.keys()
    for name, value in numbers.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-5, err_msg=name)
    for array, expected in zip(found_weights, weights, strict=True):
        np.testing.assert_allclose(array, expected, rtol=0, atol=1e-6)


def test_all_stop_where_one_is_told_to(two_replicas, replicas_as_workers, monkeypatch):
    model, seen = compiled(tagger, two_replicas, run_eagerly=True), []
    monkeypatch.setattr(among_workers, "any_worker", lambda strategy, flag: len(seen) == 1 or flag)
    note = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(model.stop_agreed))
    model.fit(batches(tagger).dataset(), shuffle=False, verbose=0, callbacks=[note])
    assert seen == [False, True, False]


def test_what_workers_cannot_train_on_is_refused(two_replicas, replicas_as_workers):
    model = compiled(encoder_decoder, two_replicas, steps_per_execution=2, run_eagerly=True)
    data = batches(encoder_decoder).dataset()
    endless = batches(encoder_decoder).dataset().repeat()
    for arguments, name, limit in [
        ({"x": pairs()[0]}, "x", "tf.data.Dataset of whole batches"),
        ({"x": endless}, "x", "steps_per_epoch"),
        ({"x": endless, "steps_per_epoch": 3}, "steps_per_epoch", "2"),
        ({"x": endless, "steps_per_epoch": 2, "validation_data": 3}, "validation_data", "tf.data.Dataset"),
    ]:
        with raises_parameter(name, limit=limit) as raised:
            model.fit(**arguments)
        assert raised.value.value is arguments[name]
    distributed = two_replicas.experimental_distribute_dataset(data)
    for call, name in [
        (lambda: model.evaluate(distributed), "steps"),
        (lambda: model.fit(distributed), "steps_per_epoch"),
        (lambda: model.fit(data, validation_data=distributed, steps_per_epoch=2), "validation_steps"),
    ]:
        with raises_parameter(name, None, limit="number of steps"):
            call()
    assert model.evaluate(distributed, steps=3, verbose=0) == model.evaluate(data, verbose=0)
    for method in (model.train_on_batch, model.test_on_batch):
        with raises_parameter("x", limit="tf.data.Dataset"):
            method(*pairs())
    uneven = batches(encoder_decoder, shortest=1).dataset()
    with raises_naming(tf.errors.InvalidArgumentError, "batch", 1, 2):
        model.evaluate(uneven, verbose=0)
    with two_replicas.scope():
        unbuilt = txl_tf.Tagger(txl_tf.TransformerXL(**SMALL), LABELS)
        unbuilt.compile("sgd")
    with raises_parameter("model"):
        unbuilt.fit(data)


@pytest.mark.parametrize("task", [encoder_decoder, tagger])
def test_steps_that_a_call_of_keras_would_exceed_are_refused(task):
    """For one device. The loop of several workers reads as many batches as an evaluation has steps."""
    model, data = compiled(task, steps_per_execution=2, run_eagerly=True), batches(task).dataset(repeat=True)
    for name, call in [
        ("steps", lambda: model.evaluate(data, steps=3)),
        ("steps_per_epoch", lambda: model.fit(data, steps_per_epoch=3)),
        ("validation_steps", lambda: model.fit(data, steps_per_epoch=2, validation_data=data, validation_steps=3)),
    ]:
        with raises_parameter(name, 3, limit="2"):
            call()
    assert int(model.optimizer.iterations) == 0
    model.fit(data, steps_per_epoch=2, validation_data=data, validation_steps=2, verbose=0)
    assert int(model.optimizer.iterations) == 2


def test_all_batches_of_a_dataset_may_be_given_as_a_number_of_steps():
    model = compiled(encoder_decoder, steps_per_execution=2, run_eagerly=True)
    data = batches(encoder_decoder).dataset().take(3)
    assert int(data.cardinality()) == 3
    model.fit(data, steps_per_epoch=3, validation_data=data, validation_steps=3, verbose=0)
    assert int(model.optimizer.iterations) == 3
    assert model.evaluate(data, steps=3, verbose=0) == model.evaluate(data, verbose=0)
