"""The four terms of the scores against the paper's formula in loops, and their sum against what attention computes."""

import numpy as np
import pytest
import tensorflow as tf
from helpers import SMALL

from txl_tf.errors import ParameterError
from txl_tf.language.transformer_lm import TransformerLM
from txl_tf.nn.positions import inverse_frequencies, positional_embedding, relative_positions
from txl_tf.transformer_xl.attention import create_mask
from txl_tf.transformer_xl.score_terms import score_terms

BATCH, QLEN, MLEN, N_HEAD, D_HEAD, D_MODEL = 2, 3, 4, 2, 3, 8
TOKENS = np.random.default_rng(0).integers(0, 23, [BATCH, QLEN]).astype(np.int32)


def test_the_terms_are_those_of_the_paper_s_formula():
    rng = np.random.default_rng(0)
    w, mems = (rng.normal(size=[BATCH, n, D_MODEL]).astype(np.float32) for n in (QLEN, MLEN))
    u, v = rng.normal(size=[2, N_HEAD, D_HEAD]).astype(np.float32)
    qkv_kernel, r_kernel = (rng.normal(size=[D_MODEL, n * N_HEAD * D_HEAD]).astype(np.float32) for n in (3, 1))
    r = positional_embedding(relative_positions(MLEN + QLEN), inverse_frequencies(D_MODEL))
    found = np.array(score_terms(w, r, u, v, mems, qkv_kernel, r_kernel))

    seen = np.concatenate([mems, w], 1)
    by_distance = (r.numpy()[0][::-1] @ r_kernel).reshape(MLEN + QLEN, N_HEAD, D_HEAD)  # distance 0 first
    q_kernel, k_kernel, _ = np.split(qkv_kernel, 3, 1)
    n_checked = 0
    for h in range(N_HEAD):
        of_head = slice(h * D_HEAD, (h + 1) * D_HEAD)
        for b in range(BATCH):
            for i in range(QLEN):
                for j in range(MLEN + i + 1):
                    q, k = w[b, i] @ q_kernel[:, of_head], seen[b, j] @ k_kernel[:, of_head]
                    distance = by_distance[MLEN + i - j, h]
                    expected = np.array([q @ k, q @ distance, u[h] @ k, v[h] @ distance]) / D_HEAD**0.5
                    np.testing.assert_allclose(found[:, h, b, i, j], expected, rtol=1e-4, atol=1e-4)
                    n_checked += 1
    assert n_checked == N_HEAD * BATCH * (5 + 6 + 7)


@pytest.mark.parametrize(
    "options", [{"untie_r": True, "clamp_len": 3}, {"same_length": True, "reset_token": 0}], ids=str
)
def test_the_softmax_of_their_sum_is_the_attention(small_lm, options):
    """Of the second layer; a key before a `reset_token` has no content."""
    network = small_lm(**options).network
    tokens = np.where(np.arange(QLEN) == 1, 0, TOKENS)
    mems = [tf.constant(np.random.default_rng(i).normal(size=[BATCH, MLEN, D_MODEL]), tf.float32) for i in range(2)]
    terms = network.attention_terms(tokens, mems, layer=1)
    probs = network.attention_probs(tokens, mems, layer=1)
    mask = network.enter(tokens, mems)[2].attn_mask
    np.testing.assert_allclose(tf.nn.softmax(sum(terms) - 1e30 * mask), probs, rtol=1e-4, atol=1e-6)
    if network.reset_token is not None:
        assert not np.any(terms[0][:, :, 1:, :MLEN]) and np.all(terms[1][:, :, 1:, :MLEN])


def test_u_does_not_see_the_query_and_v_sees_the_distance_alone(small_lm):
    network = small_lm().network
    _, _, of_key, of_distance = (term.numpy() for term in network.attention_terms(TOKENS, network.initial_mems(2), 1))
    np.testing.assert_array_equal(of_key, np.broadcast_to(of_key[:, :, :1], of_key.shape))
    visible = create_mask(QLEN, MLEN).numpy() == 0
    for j in range(1, MLEN + QLEN):
        for i in range(1, QLEN):
            if visible[i, j]:
                np.testing.assert_allclose(of_distance[:, :, i, j], of_distance[:, :, i - 1, j - 1], rtol=1e-5)


def test_absolute_positions_have_no_terms():
    lm = TransformerLM(**SMALL)
    with pytest.raises(ParameterError) as caught:
        lm.network.attention_terms(TOKENS, lm.initial_mems(2), 0)
    assert (caught.value.name, caught.value.value) == ("positions", "sinusoids")
