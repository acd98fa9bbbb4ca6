"""Files that were saved before the layers had one forward pass are loaded, and give the numbers that they gave then."""

import pickle
import subprocess
import sys

import keras
import numpy as np
import pytest
from helpers import eagerly_in_generation
from saved_models import CASES, RUNS, STRANGER, FunctionalCase, ask, main, served_numbers, unpack

import txl_tf
from txl_tf.environment import too_old

FAST = ("xl_adaptive", "in_keras_layer")


def parameters(cases, fast=()):
    return [pytest.param(case, id=case.name, marks=marks_of(case, fast)) for case in cases]


def marks_of(case, fast=()):
    made = (case.folder / "numbers.npz").exists()
    skip = pytest.mark.skipif(not made, reason=f"not made yet: python tests/saved_models.py {case.name}")
    return [skip] + [pytest.mark.slow] * (case.name not in fast)


def assert_found(found, expected, prefix, rtol=1e-5):
    """All numbers of `expected` whose names begin with `prefix`, and no others; ids and strings exactly."""
    found = {name.removeprefix(prefix): x for name, x in found.items()}
    expected = {name.removeprefix(prefix): x for name, x in expected.items() if name.startswith(prefix)}
    assert found.keys() == expected.keys() and expected
    for name, array in expected.items():
        got = np.asarray(found[name])
        assert got.shape == array.shape, name
        if array.dtype.kind != "f":
            np.testing.assert_array_equal(got, array, err_msg=name)
            continue
        # Of numbers near 0 the rounding of their largest summand is left.
        atol = rtol * np.nanmax(np.abs(array), initial=1e-2)
        np.testing.assert_allclose(got, array, rtol=rtol, atol=atol, err_msg=name)


def distance(arrays, others):
    """Between two lists of arrays, each taken as one vector."""
    return np.sqrt(sum(np.sum(np.square(np.subtract(*pair))) for pair in zip(arrays, others, strict=True)))


@pytest.mark.parametrize("case", parameters(CASES, FAST))
def test_a_keras_file_gives_the_numbers_of_then(case):
    if case.name == "in_keras_layer" and too_old("keras", (3, 15), ""):
        pytest.skip(f"Keras {keras.__version__} cannot read operations in a file of Keras 3.15")
    model = keras.saving.load_model(case.folder / "model.keras")
    with eagerly_in_generation():
        assert_found(case.answers(model), case.numbers(), "answer/")


@pytest.mark.parametrize("case", parameters(case for case in CASES if not isinstance(case, FunctionalCase)))
def test_a_keras_file_goes_on_training_as_it_would_have_then(case):
    model = keras.saving.load_model(case.folder / "model.keras")
    np.testing.assert_allclose(case.go_on(model), case.numbers()["go_on/loss"], rtol=1e-5)


@pytest.mark.parametrize("case", parameters(CASES, FAST))
def test_a_seed_gives_the_initial_weights_of_then(case):
    model, expected = case.prepared(), case.numbers()
    found = case.start(model)
    assert list(found.pop("names")) == list(expected["names"])
    assert_found(found, {name: x for name, x in expected.items() if name.startswith("start/")}, "", rtol=1e-6)


@pytest.mark.parametrize("case", parameters(CASES, ("in_keras_layer",)))
def test_steps_with_dropout_give_the_losses_and_gradients_of_then(case):
    model, expected = case.prepared(), case.numbers()
    found = case.first_step(model)
    if found:
        np.testing.assert_allclose(found.pop("step/loss"), expected["step/loss"], rtol=1e-5)
        gradients = {name: x for name, x in expected.items() if name.startswith("gradient/")}
        assert found.keys() == gradients.keys() and gradients
        for name, gradient in gradients.items():
            # Processors round differently, which moves single numbers of FLAT's gradient by 3e-4 of them.
            assert distance([found[name]], [gradient]) < 1e-3 * np.linalg.norm(gradient) + 1e-5, name
    for name, loss in case.train(model).items():
        np.testing.assert_allclose(loss, expected[name], rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("case", parameters(RUNS))
def test_the_folder_of_a_run_gives_the_numbers_of_then(case, tmp_path):
    unpack(case.folder / "run.zip", tmp_path / "run")
    assert_found(case.answers(tmp_path / "run"), case.numbers(), "answer/")


@pytest.mark.parametrize("case", parameters(RUNS))
def test_the_folder_of_a_run_goes_on_from_its_checkpoint_to_the_weights_of_then(case, tmp_path):
    run = tmp_path / "run"
    unpack(case.folder / "run.zip", run)
    expected = [v.numpy() for v in txl_tf.load_run(run, "ckpt-12")[0].weights]
    for file in [*run.glob("ckpt-12.*"), *run.glob("checkpoint")]:
        file.unlink()
    case.train(run, case.data(tmp_path))
    found = [v.numpy() for v in txl_tf.load_run(run, "ckpt-12")[0].weights]
    before = [v.numpy() for v in txl_tf.load_run(run, "ckpt-6")[0].weights]
    # Adam's steps have one size: a weight whose gradient is 0 but for rounding goes another way on another processor.
    assert distance(found, expected) < 0.01 * distance(before, expected)
    assert max(np.abs(old - new).max() for old, new in zip(before, expected, strict=True)) > 1e-2


SERVED = [case for case in (*CASES, *RUNS) if (case.folder / "served.zip").exists()]


@pytest.fixture(scope="module")
def strangers(tmp_path_factory):
    """The answers of all SavedModels, of one process that has no txl_tf."""
    folder = tmp_path_factory.mktemp("served")
    requests = {
        case.name: (unpack(case.folder / "served.zip", folder / case.name), case.requests()) for case in SERVED
    }  # fmt: skip
    with open(folder / "requests", "wb") as file:
        pickle.dump(requests, file)
    command = [sys.executable, "-c", STRANGER, folder / "requests", folder / "answers"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert result.returncode == 0, result.stderr
    with open(folder / "answers", "rb") as file:
        return pickle.load(file)


@pytest.mark.slow
@pytest.mark.parametrize("case", SERVED, ids=lambda case: case.name)
def test_a_saved_model_answers_as_then_without_this_library(case, strangers):
    assert_found(served_numbers(strangers[case.name]), case.numbers(), "served/")


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in SERVED if case in CASES], ids=lambda case: case.name)
def test_a_new_export_of_a_keras_file_answers_as_the_one_of_then(case, tmp_path):
    model = keras.saving.load_model(case.folder / "model.keras")
    case.export(model, tmp_path / "1")
    assert_found(served_numbers(ask(tmp_path / "1", case.requests())), case.numbers(), "served/")


def test_a_name_of_no_case_is_refused():
    with pytest.raises(SystemExit):
        main(["no_case"])
