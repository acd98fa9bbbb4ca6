"""The loops of `training/fitting.py` against those of Keras: what callbacks see, the logs, and the weights."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import mentions, raises_parameter

from txl_tf.training import fitting

CALLS = [
    f"on_{kind}_{when}"
    for kind in ("train", "epoch", "train_batch", "test", "test_batch")
    for when in ("begin", "end")
]  # fmt: skip


class Recorder(keras.callbacks.Callback):
    """Notes all calls, with their numbers and logs."""

    def __init__(self):
        super().__init__()
        self.seen = []


def recording(name):
    def call(self, *args, logs=None):
        *numbers, logs = args if args and isinstance(args[-1], dict | None) else (*args, logs)
        self.seen.append((name, *numbers, dict(logs or {})))

    return call


for name in CALLS:
    setattr(Recorder, name, recording(name))


class StopAfter(keras.callbacks.Callback):
    def __init__(self, batch):
        super().__init__()
        self.batch = batch

    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training = batch == self.batch


def make():
    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile(keras.optimizers.SGD(0.01, use_ema=True), "mse", run_eagerly=True)
    return model


def dataset(known=True):
    x = np.arange(12, dtype=np.float32).reshape([3, 2, 2])
    data = tf.data.Dataset.from_tensor_slices((x, x[:, :, :1]))
    return data if known else data.filter(lambda x, y: True)


def by_keras(data, options):
    model, recorder = make(), Recorder()
    callbacks = [recorder, *options.pop("callbacks", [])]
    history = model.fit(data, shuffle=False, verbose=0, callbacks=callbacks, **options)
    return recorder.seen, history.history, model.get_weights()


def by_us(data, options):
    model, recorder = make(), Recorder()
    arguments = {**options, "callbacks": [recorder, *options.pop("callbacks", [])], "verbose": 0}
    validation = options.get("validation_data")

    def epochs(data, steps=None):
        return fitting.Epochs(data, int(data.cardinality()), steps, 1)

    def validate(callbacks):
        model.make_test_function()
        return fitting.evaluate(model, model.test_function, epochs(validation), {"callbacks": callbacks})

    model.make_train_function()
    calls = epochs(data, options.get("steps_per_epoch"))
    history = fitting.fit(model, model.train_function, calls, arguments, validate if validation is not None else None)
    return recorder.seen, history.history, model.get_weights()


@pytest.mark.ci
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {"epochs": 2},
        {"epochs": 3, "initial_epoch": 1, "validation_freq": 2},
        {"epochs": 4, "validation_freq": [1, 4]},
        {"epochs": 3, "steps_per_epoch": 2},
        {"epochs": 2, "steps_per_epoch": 3},
        {"epochs": 3, "callbacks": [StopAfter(1)]},
    ],
    ids=["epochs", "every_second", "some", "across_epochs", "as_many", "stopped"],
)
def test_callbacks_logs_and_weights_are_those_of_keras(options, known):
    if not known and options.get("steps_per_epoch") == 3:
        pytest.skip("the second epoch has no batch, which is an error, unlike in Keras: see below")
    if "validation_freq" in options:
        options = {**options, "validation_data": dataset()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the end of the data, of which Keras warns more often
        expected, found = by_keras(dataset(known), {**options}), by_us(dataset(known), {**options})
    assert [seen[:-1] for seen in found[0]] == [seen[:-1] for seen in expected[0]]
    for (*call, logs), (*_, of_keras) in zip(found[0], expected[0], strict=True):
        assert logs == pytest.approx(of_keras), call
    assert found[1].keys() == expected[1].keys()
    for name, values in expected[1].items():
        np.testing.assert_allclose(found[1][name], values, rtol=1e-6)
    for weight, of_keras in zip(found[2], expected[2], strict=True):
        np.testing.assert_array_equal(weight, of_keras)


def test_steps_after_the_end_of_the_data_are_warned_of():
    with pytest.warns(UserWarning, match="ran out of data"):
        by_us(dataset(), {"epochs": 2, "steps_per_epoch": 2})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        by_us(dataset(), {"epochs": 2})
        by_us(dataset(known=False), {"epochs": 2})
        by_us(dataset().repeat(), {"epochs": 2, "steps_per_epoch": 2})


def test_an_epoch_without_a_batch_is_an_error_in_place_of_a_loss_of_0():
    with pytest.warns(UserWarning, match="ran out of data"), raises_parameter("x") as raised:
        by_us(dataset(known=False), {"epochs": 2, "steps_per_epoch": 3})
    assert mentions(str(raised.value), "epoch 2", "at least one batch")
    empty = dataset().filter(lambda x, y: False)
    with raises_parameter("x", limit="at least one batch"):
        by_us(empty, {"epochs": 2})
    with raises_parameter("validation_data", limit="at least one batch"):
        by_us(dataset(), {"validation_data": empty})


def test_calls_of_several_steps_end_with_the_epoch():
    epochs = fitting.Epochs(dataset(), 3, None, 2)
    for _ in range(2):
        assert [call[:2] for call in epochs.calls()] == [(0, 1), (2, 3)]
    assert epochs.length == 3 and fitting.Epochs(dataset(), -1, None, 1).length is None


def test_a_callback_list_is_used_as_it_is_and_the_first_epoch_may_be_set_by_a_callback():
    class Later(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.model._initial_epoch = 2  # as `BackupAndRestore` does

    model, recorder = make(), Recorder()
    callbacks = keras.callbacks.CallbackList([recorder, Later()], add_history=True, model=model)
    model.make_train_function()
    calls = fitting.Epochs(dataset(), 3, None, 1)
    history = fitting.fit(model, model.train_function, calls, {"epochs": 3, "callbacks": callbacks})
    assert history.epoch == [2] and len(history.history["loss"]) == 1
    assert [seen[1] for seen in recorder.seen if seen[0] == "on_epoch_begin"] == [2]
