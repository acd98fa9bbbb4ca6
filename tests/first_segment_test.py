"""The network's numbers after zero memories, without products with them."""

import numpy as np
import pytest
import tensorflow as tf
from helpers import SMALL, randomise

import txl_tf
from txl_tf.transformer_xl.first_segment import first_segment

SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "options, tolerance",
    [
        pytest.param({"mem_len": 0}, 1e-5, marks=pytest.mark.slow),
        ({"mem_len": 11, "clamp_len": 3, "untie_r": True}, 1e-5),
        ({"mem_len": 3, "same_length": True, "d_embed": 6, "cutoffs": [5, 12], "div_val": 2}, 1e-5),
        ({"mem_len": 4, "dtype": "mixed_bfloat16"}, 0.1),
    ],
    ids=str,
)
def test_it_is_the_network_after_zero_memories(small_lm, options, tolerance):
    lm = small_lm(**options)
    compiled = tf.function(lambda tokens: first_segment(lm.network, tokens), [tf.TensorSpec([None, None], tf.int32)])
    for tgt_len in (1, 2, 7):
        tokens = np.random.default_rng(0).integers(0, SMALL["n_token"], [3, tgt_len])
        expected, _ = lm.network(tokens, lm.initial_mems(3))
        found = compiled(tokens)
        assert found.dtype == expected.dtype
        np.testing.assert_allclose(tf.cast(found, "float32"), tf.cast(expected, "float32"), atol=tolerance)


@pytest.mark.parametrize("family, mem_len", [
    (txl_tf.TransformerXLLM, 3), (txl_tf.TransformerLM, 0), pytest.param(txl_tf.TransformerXLLM, 0, marks=SLOW),
    pytest.param(txl_tf.TransformerLM, 3, marks=SLOW),
])  # fmt: skip
def test_first_nll_is_that_of_score(family, mem_len, small_batches):
    lm = family(**{**SMALL, "mem_len": mem_len})
    randomise(lm)
    (tokens,), (labels,) = small_batches(n=1, batch=3)
    np.testing.assert_allclose(lm.first_nll(tokens, labels), lm.score(tokens, labels)[0], rtol=1e-5, atol=1e-5)
