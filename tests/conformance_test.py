"""What every model of the library must do. A new model joins the list in `conforming.py`."""

import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from conforming import MODELS, SLOW

from txl_tf.runs.families.record import FAMILIES, family_of_model


def cases(*fast):
    """All models as parameters; those that are not named `fast` are slow."""
    models = (*MODELS, *SLOW)
    assert set(fast) <= {case.name for case in models}
    return [pytest.param(case, id=case.name, marks=[pytest.mark.slow] * (case.name not in fast)) for case in models]


@pytest.fixture(params=cases(*(case.name for case in MODELS)), scope="module")
def case(request):
    return request.param


def fast_for(*names):
    """The test is fast for these models alone."""
    return pytest.mark.parametrize("case", cases(*names), indirect=True)


def repeated(batch, n):
    """A dataset of n times the same batch."""
    dataset = tf.data.Dataset.from_tensors(batch).repeat(n)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return dataset.with_options(options)


def outputs(model, inputs):
    """All outputs as float32 arrays."""
    return [tf.cast(output, tf.float32).numpy() for output in tf.nest.flatten(model(inputs))]


def weights(model):
    return [variable.numpy() for variable in model.trainable_variables]


def assert_all_close(arrays, expected, **tolerance):
    for got, array in zip(arrays, expected, strict=True):
        np.testing.assert_allclose(got, array, **tolerance)


# Eight steps move weights by up to 0.16. Where a gradient is near 0, Adam turns its rounding into a step.
AFTER_ADAM = {"rtol": 0, "atol": 5e-4}


def compiled(case, **options):
    model = case.compile(case.make_random(), **options)
    model.optimizer.build(model.trainable_variables)  # else the step is traced twice
    return model


@pytest.fixture(scope="module")
def trained(case):
    """Losses by epoch of eight steps on one batch, and the weights after them."""
    model = compiled(case)
    history = model.fit(repeated(case.make_batch(), 4), epochs=2, verbose=0).history
    return history["loss"], weights(model)


def test_fitting_one_batch_lowers_the_loss_and_moves_every_weight(case, trained):
    losses, after = trained
    assert losses[1] < losses[0]
    before = case.make_random().trainable_variables
    for variable, array in zip(before, after, strict=True):
        moved = np.abs(array - variable.numpy()).max() > 1e-4
        assert moved or variable.path.endswith(("wk/bias", "w_k/bias", "w_r/bias"))  # the same for all keys of a query


def test_the_summary_counts_the_weights(case):
    model, lines = case.make("float32"), []
    model(case.inputs())
    model.summary(expand_nested=True, print_fn=lambda line, **_: lines.append(line))
    assert f"Total params: {model.count_params():,}" in "".join(lines)


def test_keras_file_holds_all_of_the_model(case, tmp_path):
    inputs = case.inputs()
    model = case.make_random()
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert_all_close(outputs(loaded, inputs), outputs(model, inputs), rtol=0, atol=0)


@pytest.mark.ci
@fast_for("adaptive_language_model")
def test_xla_computes_the_same_outputs(case):
    inputs = case.inputs()
    model = case.make_random()
    by_xla = tf.function(model, jit_compile=True, autograph=False)
    assert_all_close(
        outputs(by_xla, tf.nest.map_structure(tf.constant, inputs)), outputs(model, inputs), rtol=1e-5, atol=1e-5
    )


@fast_for()
def test_fit_under_xla_trains_the_same(case, trained):
    model = compiled(case, jit_compile=True)
    history = model.fit(repeated(case.make_batch(), 4), epochs=2, verbose=0).history
    losses, expected = trained
    np.testing.assert_allclose(history["loss"], losses, rtol=1e-5)
    assert_all_close(weights(model), expected, **AFTER_ADAM)


@pytest.mark.parametrize(
    "policy, tolerance", [("mixed_bfloat16", 0.1), pytest.param("mixed_float16", 0.02, marks=pytest.mark.slow)]
)
def test_half_precision_is_close_to_single(case, policy, tolerance):
    inputs = case.inputs()
    expected = outputs(case.make_random(), inputs)
    got = outputs(case.make_random(policy), inputs)
    assert all(np.isfinite(array).all() for array in got)
    assert_all_close(got, expected, rtol=0, atol=tolerance)
    assert np.abs(got[0] - expected[0]).max() > 0  # it was not float32 after all


@fast_for()
def test_two_replicas_train_as_one(case, trained, two_replicas):
    with two_replicas.scope():
        model = compiled(case)
    history = model.fit(repeated(case.make_batch(), 4), epochs=2, verbose=0).history
    losses, expected = trained
    np.testing.assert_allclose(history["loss"], losses, rtol=1e-5)
    assert_all_close(weights(model), expected, **AFTER_ADAM)


def assert_frozen(model, optimizer, case):
    before = model.get_weights()
    model.compile(optimizer, loss=case.loss)
    logs = model.fit(repeated(case.make_batch(), 1), verbose=0).history
    assert np.isfinite(logs["loss"][0]) and logs.get("grad_norm", [0.0]) == [0.0]
    assert_all_close(model.get_weights(), before, rtol=0, atol=0)


@fast_for()
def test_a_wholly_frozen_model_is_fitted_without_a_change(case):
    model = compiled(case)
    model.trainable = False
    for optimizer in (model.optimizer, keras.optimizers.SGD(0.1)):  # one that has trained it; one that finds nothing
        assert_frozen(model, optimizer, case)


@fast_for()
def test_a_wholly_frozen_model_of_two_replicas_is_fitted_without_a_change(case, two_replicas):
    with two_replicas.scope():
        model = case.make_random()
        model.trainable = False
        optimizer = keras.optimizers.SGD(0.1)
    assert_frozen(model, optimizer, case)


# ---------------------------------------- what trains by Keras's own `fit`, with a loss of its own


def fast_of_slow(*fast):
    """The cases of `SLOW` that Keras's own `fit` trains: all but the language models."""
    names = [case.name for case in SLOW if "language_model" not in case.name]
    of_keras = [param for param in cases(*fast) if param.values[0].name in names]
    return pytest.mark.parametrize("case", of_keras, indirect=True)


@fast_of_slow()
def test_a_loaded_keras_file_goes_on_training_as_the_model_would(case, tmp_path):
    model, data = compiled(case, run_eagerly=True, steps_per_execution=2), repeated(case.make_batch(), 2)
    model.fit(data, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert (loaded.run_eagerly, loaded.steps_per_execution, int(loaded.optimizer.iterations)) == (True, 2, 2)
    assert loaded.fit(data, verbose=0).history == model.fit(data, verbose=0).history
    assert_all_close(weights(loaded), weights(model), rtol=0, atol=0)


IN_ANOTHER_PROCESS = """
import sys
import numpy as np, tensorflow as tf
served, arrays = tf.saved_model.load(sys.argv[1]), np.load(sys.argv[2])
inputs = {name: tf.constant(arrays[name]) for name in arrays if name != "expected"}
inputs = (inputs["0"], inputs["1"]) if "0" in inputs else inputs
np.testing.assert_allclose(served.serve(inputs), arrays["expected"], atol=1e-5)
assert not [name for name in sys.modules if name.startswith("txl_tf")]
"""


@pytest.mark.ci
@fast_of_slow("transformer")
def test_an_export_gives_the_outputs_for_batches_of_any_size_and_length(case, tmp_path):
    model = case.make_random()
    model.export(tmp_path / "model", verbose=False)  # never called
    inputs = case.inputs()
    short = inputs if case.name == "flat" else keras.tree.map_structure(lambda x: x[:3, :4], inputs)
    served = tf.saved_model.load(tmp_path / "model")
    np.testing.assert_allclose(served.serve(keras.tree.map_structure(tf.constant, short)), model(short), atol=1e-5)


@pytest.mark.slow
@fast_of_slow()
def test_an_export_after_training_works_in_a_process_without_this_library(case, tmp_path):
    model = compiled(case)
    model.fit(repeated(case.make_batch(), 1), verbose=0)
    model.export(tmp_path / "model", verbose=False)
    inputs = case.inputs()
    named = inputs if isinstance(inputs, dict) else {str(i): x for i, x in enumerate(inputs)}
    np.savez(tmp_path / "arrays.npz", **named, expected=outputs(model, inputs)[0])
    command = [sys.executable, "-c", IN_ANOTHER_PROCESS, tmp_path / "model", tmp_path / "arrays.npz"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_every_family_of_the_library_has_a_case():
    models = [case.make("float32") for case in (*MODELS, *SLOW) if case.name != "network_in_keras_model"]
    families = [family.name for family in FAMILIES.values() if family.model.__module__.startswith("txl_tf.")]
    assert len(families) == 6 and set(families) <= {family_of_model(model).name for model in models}
