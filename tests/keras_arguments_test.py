"""Arguments of Keras's methods, of all models: wrong numbers, switches and weights are refused by name before any step.

So is data without a batch, whose loss would be 0.
"""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import SMALL, raises_naming, raises_parameter

import txl_tf
from txl_tf.errors import ParameterError
from txl_tf.training.keras_arguments import by_name

pytestmark = pytest.mark.ci

TOKENS = np.arange(12).reshape([3, 4])
SENTENCES = {"chars": np.array([[1, 2, 3], [3, 4, 0], [2, 2, 1], [5, 0, 0]])}
TAGS = np.array([[0, 1, 2], [1, 2, 0], [0, 0, 0], [1, 0, 0]])
SOURCES = np.array([[1, 2, 3], [3, 4, 0], [2, 2, 1], [5, 3, 0]])
MODELS = ["lm", "tagger", "pairs"]
KERAS_RUN = ["tagger", "pairs"]  # Keras's own loops train these models
NAN = float("nan")


def make(name):
    if name == "lm":
        return txl_tf.TransformerXLLM(**SMALL, mem_len=4, seed=1)
    if name == "tagger":
        network = txl_tf.Tener(n_token=9, n_layer=1, d_model=8, n_head=2, d_inner=8)
        return txl_tf.Tagger(network, ["O", "B-A", "I-A"], seed=1)
    sizes = {"num_layers": 1, "d_model": 8, "num_heads": 2, "dff": 8, "input_vocab_size": 9, "target_vocab_size": 9}
    return txl_tf.Transformer(**sizes, seed=1)


def compiled(name, run_eagerly=True):
    model = make(name)
    model.compile(keras.optimizers.SGD(0.1), run_eagerly=run_eagerly)
    return model


def arrays(name):
    return (SENTENCES, TAGS) if name == "tagger" else (SOURCES, SOURCES)


def dataset(name):
    """Two batches."""
    if name == "lm":
        return tf.data.Dataset.from_tensors((TOKENS, TOKENS)).repeat(2)
    return tf.data.Dataset.from_tensor_slices(arrays(name)).batch(2)


def emptied(data):
    """The data without a batch, of which TensorFlow does not know that it has none."""
    return data.filter(lambda *batch: False)


def assert_untrained(model, name):
    assert int(model.optimizer.iterations) == 0
    for weight, expected in zip(model.get_weights(), make(name).get_weights(), strict=True):
        assert weight.shape == expected.shape and np.isfinite(weight).all()


@pytest.mark.parametrize("name", MODELS)
def test_numbers_of_steps_epochs_and_rows_are_whole_and_positive_and_refused_before_any_step(name):
    model, data = compiled(name), dataset(name)
    numbers = ["steps_per_epoch", "validation_steps", "epochs", "batch_size", "validation_batch_size"]
    for value in (-1, 0, 1.5, True, "1", np.float32(2)):
        for number in numbers:
            with raises_parameter(number, value):
                model.fit(data, validation_data=data, verbose=0, **{number: value})
        for number in ("steps", "batch_size"):
            with raises_parameter(number, value):
                model.evaluate(data, verbose=0, **{number: value})
            if name != "lm":
                with raises_parameter(number, value):
                    model.predict(arrays(name)[0], verbose=0, **{number: value})
    for value in (-1, 0.5, False, None):
        with raises_parameter("initial_epoch", value):
            model.fit(data, verbose=0, initial_epoch=value)
    for value in (-0.5, 1.0, 2):
        with raises_parameter("validation_split", value):
            model.fit(data, verbose=0, validation_split=value)
    with raises_parameter("return_dict", "no", "True or False"):
        model.evaluate(data, verbose=0, return_dict="no")
    for callbacks, wrong in ((3.5, 3.5), ([keras.callbacks.Callback], keras.callbacks.Callback), ([None], None)):
        for method in (model.fit, model.evaluate):
            with raises_parameter("callbacks", wrong):
                method(data, verbose=0, callbacks=callbacks)
    assert_untrained(model, name)
    model.evaluate(data, verbose=0, callbacks=keras.callbacks.Callback())


@pytest.mark.parametrize("name", MODELS)
def test_numbers_of_numpy_and_tensorflow_are_numbers(name):
    model, data = compiled(name), dataset(name)
    numbers = {"steps_per_epoch": data.cardinality(), "epochs": np.int32(2), "initial_epoch": np.int64(1)}
    fitted = model.fit(data, validation_data=data, validation_steps=np.int64(2), validation_freq=np.int64(1), verbose=0,
                       **numbers)  # fmt: skip
    assert int(model.optimizer.iterations) == 2 and len(fitted.history["val_loss"]) == 1
    expected = model.evaluate(data, verbose=0)
    np.testing.assert_allclose(model.evaluate(data, steps=np.int64(2), verbose=0), expected, rtol=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_arguments_of_fit_without_effect_are_refused_before_any_step(name):
    model, data = compiled(name), dataset(name)
    for argument, value in (("validation_steps", 3), ("validation_freq", 2), ("validation_batch_size", 4)):
        with raises_parameter(argument, value):
            model.fit(data, verbose=0, **{argument: value})
    with raises_parameter("initial_epoch", 5):
        model.fit(data, epochs=2, initial_epoch=5, verbose=0)
    assert_untrained(model, name)
    model.fit(data, epochs=2, initial_epoch=2, validation_freq=1, verbose=0)  # a script that resumed at the end
    assert_untrained(model, name)


@pytest.mark.parametrize("name", MODELS)
def test_epochs_of_validation_may_be_given_in_every_form_and_wrong_ones_are_refused_before_any_step(name):
    model, data = compiled(name), dataset(name)
    for wrong in (0, -1, 1.0, "1", None, True, [0], [1, 1.5], {"1"}, {1: 2}):
        with raises_parameter("validation_freq", list(wrong) if isinstance(wrong, set) else wrong):
            model.fit(data, validation_data=data, validation_freq=wrong, verbose=0)
    assert_untrained(model, name)
    for frequency, expected in (([1, 3], [1, 3]), ((1, 2), [1, 2]), (np.array([2, 3]), [2, 3]), (range(1, 3), [1, 2])):
        arguments = by_name(keras.Model.fit, model, data, validation_data=data, validation_freq=frequency)
        assert arguments["validation_freq"] == expected
    fitted = model.fit(data, validation_data=data, epochs=2, validation_freq=np.int64(2), verbose=0)
    assert len(fitted.history["val_loss"]) == 1


@pytest.mark.parametrize("name", MODELS)
def test_data_without_a_batch_is_an_error_in_place_of_a_loss_of_0(name):
    model, data = compiled(name), dataset(name)
    seen = []
    logging = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(logs))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Keras warns that the data ran out
        with raises_parameter("x", limit="at least one batch"):
            model.evaluate(emptied(data), verbose=0)
        with raises_parameter("x", limit="at least one batch"):
            model.fit(emptied(data), verbose=0, callbacks=[logging])
        with raises_parameter("validation_data", limit="at least one batch"):
            model.fit(data, validation_data=emptied(data), verbose=0, callbacks=[logging])
        if name != "lm":
            with raises_parameter("x", limit="at least one batch"):
                model.predict(emptied(data.map(lambda x, y: x)), verbose=0)
        assert not seen
        endless = data.filter(lambda *batch: True)  # the number of batches is unknown
        with raises_parameter("x", limit="at least one batch") as raised:
            model.fit(endless, steps_per_epoch=2, epochs=2, verbose=0, callbacks=[logging])
    assert "epoch 2" in str(raised.value) and len(seen) == 1 and seen[0]["loss"] > 0


@pytest.mark.parametrize("name", KERAS_RUN)
def test_a_dataset_has_its_own_batches(name):
    model, data, (x, y) = compiled(name), dataset(name), arrays(name)
    with raises_parameter("batch_size", 5, "left out"):
        model.fit(data, batch_size=5, verbose=0)
    with raises_parameter("batch_size", 5, "left out"):
        model.evaluate(data, batch_size=5, verbose=0)
    with raises_parameter("batch_size", 5, "left out"):
        model.predict(data.map(lambda x, y: x), batch_size=5, verbose=0)
    with raises_parameter("batch_size", 5, "left out"):
        model.fit(iter([(x, y)]), batch_size=5, verbose=0)
    with raises_parameter("validation_batch_size", 5, "left out"):
        model.fit(x, y, validation_data=data, validation_batch_size=5, verbose=0)
    assert_untrained(model, name)
    model.fit(x, y, batch_size=1, validation_data=data, verbose=0)
    assert int(model.optimizer.iterations) == 4
    model.fit(x, y, validation_data=(x, y), validation_batch_size=2, verbose=0)


@pytest.mark.parametrize("name", KERAS_RUN)
@pytest.mark.parametrize("wrong", [-1.0, NAN, float("inf")])
def test_weights_are_finite_and_not_negative(name, wrong):
    model, (x, y) = compiled(name), arrays(name)
    weights = np.array([1.0, wrong, 2.0, 0.0], np.float32)
    for method in (model.fit, model.evaluate):
        with raises_parameter("sample_weight", allowed="finite and not negative"):
            method(x, y, sample_weight=weights, verbose=0)
    for method in (model.train_on_batch, model.test_on_batch):
        with raises_parameter("sample_weight", allowed="finite and not negative"):
            method(x, y, weights)
    with raises_parameter("validation_data[2]", allowed="finite and not negative"):
        model.fit(x, y, validation_data=(x, y, weights), verbose=0)
    for method in (model.fit, model.train_on_batch):
        with raises_parameter("class_weight", allowed="finite and not negative"):
            method(x, y, class_weight={1: wrong})
    data = tf.data.Dataset.from_tensors((x, y, weights))
    for method in (model.fit, model.evaluate):
        with raises_parameter("sample_weight", allowed="finite and not negative"):
            method(data, verbose=0)
    assert_untrained(model, name)
    assert np.isfinite(model.evaluate(x, y, sample_weight=np.array([1, 0, 2, 0]), verbose=0)).all()


@pytest.mark.parametrize("name", KERAS_RUN)
def test_weights_of_a_dataset_are_checked_in_the_graph_before_they_change_anything(name):
    model, (x, y) = compiled(name, run_eagerly=False), arrays(name)
    before = model.get_weights()
    data = tf.data.Dataset.from_tensors((x, y, np.array([1, NAN, 2, 0], np.float32)))
    for method in (model.fit, model.evaluate):
        with pytest.raises(
            tf.errors.InvalidArgumentError, match="^weights must be finite and not negative, found nan$"
        ):
            method(data, verbose=0)
    for weight, expected in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(weight, expected)


@pytest.mark.parametrize("name", MODELS)
def test_switches_of_compile_are_true_or_false(name):
    model = make(name)
    switches = ["run_eagerly", "jit_compile", "auto_scale_loss", *(["static_shapes"] if name == "lm" else [])]
    for switch in switches:
        for value in ("no", "False", 0, 1, None):
            with raises_parameter(switch, value):
                model.compile("sgd", **{switch: value})
    assert not model.compiled
    model.compile("sgd", jit_compile="auto", run_eagerly=True)
    assert model.jit_compile is False and model.run_eagerly is True


@pytest.mark.parametrize("name", MODELS)
def test_attributes_that_only_compile_sets(name):
    model = make(name)
    for compiled in (False, True):
        for attribute, value in [("loss", "mse"), ("loss_weights", [2.0]), ("auto_scale_loss", False)]:
            with raises_parameter(attribute, value, error=txl_tf.FixedAttributeError):
                setattr(model, attribute, value)
        for steps in (0, -1, 1.5, "2"):
            with raises_parameter("steps_per_execution", steps):
                model.steps_per_execution = steps
        assert (model.loss, model.auto_scale_loss, model.steps_per_execution) == (None, True, 1)
        if not compiled:
            model.compile("sgd")
    model.compile("sgd", auto_scale_loss=False, steps_per_execution=2)
    assert (model.auto_scale_loss, model.steps_per_execution) == (False, 2)


LISTED = {
    "lists": lambda array: array.tolist(),
    "lists of numbers of NumPy": lambda array: [list(row) if array.ndim > 1 else row for row in array],
    "arrays of rows": list,
}


LISTED_WEIGHTS = {"rows": np.array([0.5, 2.0, 0.0, 1.0]), "labels": np.linspace(0, 2, 12).reshape([4, 3])}


@pytest.mark.parametrize("kind, how", zip(["rows", "labels", "rows"], LISTED, strict=True))
@pytest.mark.parametrize("name", [*KERAS_RUN, "pairs of two inputs"])
def test_lists_of_numbers_are_arrays(name, kind, how):
    x, y = arrays(name)
    x = (x, x) if name == "pairs of two inputs" else x
    weights = LISTED_WEIGHTS[kind]
    data = (x, y, weights[:, :2] if (name, kind) == ("pairs", "labels") else weights)  # the decoder reads y[:, 0]

    def results(x, y, weights):
        keras.utils.set_random_seed(1)
        model = compiled(name.split()[0])
        options = {"validation_data": (x, y, weights), "shuffle": False, "verbose": 0}
        history = model.fit(x, y, sample_weight=weights, **options).history
        return [
            *history.values(),
            model.evaluate(x, y, sample_weight=weights, verbose=0),
            model.train_on_batch(x, y, weights),
            model.test_on_batch(x, y, weights),
            *([model.predict(x, verbose=0), model.predict_on_batch(x)] if isinstance(x, tuple | dict) else []),
        ]

    for found, expected in zip(results(*keras.tree.map_structure(LISTED[how], data)), results(*data), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", KERAS_RUN)
def test_lists_that_are_no_arrays_are_named(name):
    model = compiled(name)
    x, y = arrays(name)
    for wrong in ([[1], [1, 2], [1], [1]], [["a"]] * 4):
        for method in (model.fit, model.evaluate, model.train_on_batch, model.test_on_batch):
            with raises_parameter("y", wrong):
                method(x, wrong)
            with raises_parameter("sample_weight", wrong):
                method(x, y, sample_weight=wrong)
        with raises_parameter("validation_data[1]", wrong):
            model.fit(x, y, validation_data=(x, wrong))
        with raises_parameter("validation_data[2]", wrong):
            model.fit(x, y, validation_data=(x, y, wrong))
    assert_untrained(model, name)


@pytest.mark.parametrize("name", KERAS_RUN)
def test_a_dataset_without_batches_is_named_also_after_arrays(name):
    model = compiled(name, run_eagerly=False)
    model.fit(*arrays(name), verbose=0)
    rows = tf.data.Dataset.from_tensor_slices(arrays(name))
    for call in (
        lambda: model.fit(rows, verbose=0),
        lambda: model.evaluate(rows, verbose=0),
        lambda: model.fit(*arrays(name), validation_data=rows, verbose=0),
    ):
        with pytest.raises(ParameterError) as caught:
            call()
        assert caught.value.name == ("inputs['chars']" if name == "tagger" else "y")
    row = keras.tree.map_structure(lambda array: array[0], arrays(name))
    with raises_naming(tf.errors.InvalidArgumentError, "tags" if name == "tagger" else "y", "2", "3"):
        model.fit((row for _ in range(2)), verbose=0)
