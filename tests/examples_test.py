"""The examples of models of one's own: each is trained, saved, exported, and loaded where there is no txl_tf."""

import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import program

# Opens a SavedModel as a server does, and writes what it answers.
CLIENT = """
import sys
import numpy as np, tensorflow as tf
sys.modules["txl_tf"] = None
inputs = np.load(sys.argv[2])
model = tf.saved_model.load(sys.argv[1])
answer = model.signatures["serving_default"](**{name: tf.constant(inputs[name]) for name in inputs})
(values,) = answer.values()
np.save(sys.argv[3], values.numpy())
"""


@pytest.fixture(params=["classifier", "own_tagger", "encoder_decoder"])
def example(request):
    for module in program(f"examples/{request.param}.py"):
        yield request.param, module


FILES = {"classifier": "classifier.keras", "own_tagger": "tagger.keras", "encoder_decoder": "model.keras"}


@pytest.mark.slow
def test_an_example_learns_and_what_it_writes_is_loaded(example, tmp_path, capsys):
    name, module = example
    module.train(output=str(tmp_path), n_dates=1500, epochs=2, seed=0)
    assert "never seen: " in capsys.readouterr().out
    model = keras.saving.load_model(tmp_path / FILES[name])
    rows = np.random.default_rng(0).integers(32, 127, [3, 12]).astype(np.int32)
    rows[1, 7:] = 0
    inputs = {"classifier": {"tokens": rows}, "own_tagger": {"chars": rows}}.get(name)
    inputs = inputs or {"source": rows, "target": rows[:, :4]}
    expected = model(list(inputs.values()) if len(inputs) > 1 else rows)

    np.savez(tmp_path / "inputs.npz", **inputs)
    arguments = [str(tmp_path / part) for part in ("saved_model", "inputs.npz", "answer.npy")]
    subprocess.run([sys.executable, "-c", CLIENT, *arguments], check=True, cwd=tmp_path)
    np.testing.assert_allclose(np.load(tmp_path / "answer.npy"), expected, rtol=1e-4, atol=1e-5)


def test_the_tags_of_dates_are_where_year_and_month_are():
    for module in program("examples/own_tagger.py"):
        text = "Sat the 21st of Nov '26"
        chars, tags = module.to_arrays([(text, "2026-11-21")])
        assert bytes(chars[0].tolist()).rstrip(b"\0").decode() == text
        assert module.show(text, tags[0]) == "Nov MONTH, '26 YEAR"


def test_the_mask_of_the_classifier_leaves_padding_out():
    for module in program("examples/classifier.py"):
        classifier, rows = module.make_classifier(), module.to_ids(["1/2/1999", "Nov 21, 2026"])
        alone = classifier(rows[:1, :8])
        np.testing.assert_allclose(classifier(tf.constant(rows))[:1], alone, rtol=1e-4, atol=1e-5)
