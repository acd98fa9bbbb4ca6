"""docs/research.md: its code runs from top to bottom, and computes what the page says."""

import re

import numpy as np
import pytest
from helpers import ROOT

import txl_tf

PAGE = (ROOT / "docs" / "research.md").read_text()


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    """What the blocks of Python define, after each of them ran: a list of dictionaries."""
    found, seen = {}, []
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("research"))
        for code in re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S):
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
