"""docs/research.md: its code runs from top to bottom, and computes what the page says."""

import re

import keras
import numpy as np
import pytest
from helpers import ROOT

import txl_tf
from txl_tf.environment import is_installed

PAGE = (ROOT / "docs" / "research.md").read_text()


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    """What the blocks of Python define, after each of them ran: a list of dictionaries."""
    found, seen = {}, []
    found["folder"] = folder = tmp_path_factory.mktemp("research")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for code in re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S):
            if "Constraint(" not in code or is_installed("outlines_core"):
                exec(code, found)
            seen.append(dict(found))
    return seen


@pytest.mark.slow
def test_the_variants_and_the_loss(names):
    variant, smoothed = names[0]["lm"], names[1]["lm"]
    assert variant.get_config()["activation"] == "swiglu" and variant.softmax.tables
    assert names[0]["nll"].shape == (2, 16) and smoothed.z_loss == 0.0
    fresh = txl_tf.TransformerXLLM(**names[1]["sizes"], d_inner=64)
    relu, gated = (model.network.decoder_layers[0].ff.kernel_1.shape[1] for model in (fresh, variant))
    assert (relu, gated) == (64, 2 * 48)
    assert np.isfinite(np.ravel(names[1]["loss"])).all()


@pytest.mark.slow
def test_inputs_and_outputs(names):
    lm, text = names[2]["lm"], names[0]["text"]
    saliency = names[2]["saliency"].numpy()
    assert saliency.shape == (2, 16) and (saliency > 0).all()
    nll, done = names[3]["nll"].numpy(), names[3]["done"]
    assert nll.shape == (2, 16) and done.any()
    _, _, states = lm.network(text, output_hidden_states=True)
    np.testing.assert_allclose(names[4]["middle"], states[1], atol=1e-5)
    assert names[5]["vectors"].shape == names[5]["of_first_layer"].shape == (2, 32)
    expected, mems = lm.network(text[:, :16])
    np.testing.assert_allclose(names[6]["first"], expected, atol=1e-5)
    np.testing.assert_allclose(names[6]["second"], lm.network(text[:, 16:32], mems)[0], atol=1e-5)


@pytest.mark.slow
def test_fine_tuning(names):
    tuned, text = names[7]["tuned"], names[0]["text"]
    found, merged = (keras.saving.load_model(names[7]["folder"] / f"{name}.keras") for name in ("tuned", "merged"))
    expected, _ = tuned.log_probs(text)
    np.testing.assert_allclose(found.log_probs(text)[0], expected, atol=1e-4)
    np.testing.assert_allclose(merged.log_probs(text)[0], expected, atol=1e-6)
    assert (found.lora_rank, merged.lora_rank) == (4, 0)


@pytest.mark.slow
def test_generation_and_choices(names):
    written, best = names[8]["written"].numpy(), names[8]["best"]
    assert (written[:, 20:] != written[:, 19:-1]).all() and best.shape == (4, 32)
    lm, choices, prompt = names[10]["lm"], names[10]["choices"], names[10]["prompt"][0]
    for choice, found in zip(choices, names[10]["log_likelihood"].numpy(), strict=True):
        row = np.array([*prompt, *choice])[None]
        nll, _ = lm.score(row[:, :-1], row[:, 1:])
        np.testing.assert_allclose(found, -nll[0, len(prompt) - 1 :].numpy().sum(), rtol=1e-4)


@pytest.mark.slow
def test_a_constraint(names):
    pytest.importorskip("outlines_core")
    dates = names[9]["characters"].decode(names[9]["text_of_date"].numpy()[0])
    assert re.fullmatch(r"abc\d{4}-\d\d-\d\d<end>", dates), dates
