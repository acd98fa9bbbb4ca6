"""A text read segment by segment: what was likely, where the model looked, what its memory is worth."""

import numpy as np
import pytest
import tensorflow as tf
from helpers import eagerly, raises_parameter, randomise

import txl_tf
from txl_tf.language.reading import look_back, memory_after, nll_by_memory, read_text

IDS = np.random.default_rng(0).integers(0, 23, 12).astype(np.int32)
SEGMENTS = [(0, 5), (5, 10), (10, 11)]  # of five tokens that are read; the last token of all is not


@pytest.fixture(scope="module")
def lm(small_lm):
    return small_lm()


@pytest.fixture(autouse=True)
def without_graphs():
    with eagerly():
        yield


def memories(lm):
    """The memory before each of the segments, by the network's own calls."""
    mems, found = lm.initial_mems(1), []
    for start, end in SEGMENTS:
        found.append(mems)
        _, mems = lm.network(IDS[None, start:end], mems)
    return found


def test_a_text_is_read_as_score_and_log_probs_read_its_segments(lm):
    readings = list(read_text(lm, IDS, tgt_len=5, number=4))
    assert [reading.start for reading in readings] == [1, 6, 11]
    for reading, mems, (start, end) in zip(readings, memories(lm), SEGMENTS, strict=True):
        log_probs = lm.log_probs(IDS[None, start:end], mems)[0].numpy()[0]
        labels = IDS[start + 1 : end + 1]
        np.testing.assert_allclose(reading.nll, -log_probs[range(len(labels)), labels], rtol=1e-5)
        np.testing.assert_array_equal(reading.ids, np.argsort(-log_probs, 1)[:, :4])
        np.testing.assert_allclose(reading.log_probs, -np.sort(-log_probs, 1)[:, :4], rtol=1e-5)


@pytest.mark.parametrize("place", [1, pytest.param(8, marks=pytest.mark.slow), 11])
def test_looking_back_is_the_attention_of_the_token_before_and_its_nll_with_less_memory(lm, place):
    look = look_back(lm, IDS, place, tgt_len=5)
    i = (place - 1) // 5
    start, mems = SEGMENTS[i][0], memories(lm)[i]
    assert (look.first_key, look.segment, look.kept) == (start - 4, start, (0, 2, 4))
    for layer in range(2):
        probs = lm.network.attention_probs(tf.constant(IDS[None, start:place]), mems, layer)
        np.testing.assert_allclose(look.probs[layer], probs[:, 0, -1], rtol=1e-5)
    np.testing.assert_allclose(look.probs.sum(-1), np.ones([2, 2]), rtol=1e-5)
    for kept, nll in zip(look.kept, look.nll, strict=True):
        last = [mem[:, 4 - kept :] for mem in mems]
        expected = lm.score(IDS[None, start:place], IDS[None, start + 1 : place + 1], last)[0][0, -1]
        np.testing.assert_allclose(nll, expected, rtol=1e-5)


@pytest.mark.slow
def test_nll_along_a_text_with_some_of_its_memory_is_that_of_looking_back_at_each_token(lm):
    starts, nll = zip(*nll_by_memory(lm, IDS, 5, kept=[0, 2, 4]), strict=True)
    assert starts == (1, 6, 11)
    nll = np.concatenate(nll, 1)
    places = 5, 6, 11  # the last of a segment, the first, the last of all
    expected = np.stack([look_back(lm, IDS, place, 5).nll for place in places], 1)
    np.testing.assert_allclose(nll[:, [place - 1 for place in places]], expected, rtol=1e-4)
    assert np.abs(nll[0] - nll[2]).max() > 1e-3


def test_the_vanilla_model_is_read_without_memory():
    lm = txl_tf.TransformerLM(n_token=23, n_layer=2, d_model=8, d_embed=8, n_head=2, d_head=3, d_inner=12)
    randomise(lm)
    look = look_back(lm, IDS, place=8, tgt_len=5)
    assert (look.first_key, look.segment, look.kept) == (5, 5, (0, 0, 0)) and look.probs.shape == (2, 2, 3)
    readings = list(read_text(lm, IDS, 5, 2))
    np.testing.assert_allclose(readings[1].nll, lm.score(IDS[None, 5:10], IDS[None, 6:11])[0][0], rtol=1e-5)
    np.testing.assert_allclose(look.nll, [readings[1].nll[2]] * 3, rtol=1e-4)


@pytest.mark.parametrize(
    "options",
    [pytest.param({}, marks=pytest.mark.slow), {"reset_token": 3}, {"untie_r": True, "same_length": True}],
    ids=str,
)
def test_attention_of_all_layers_is_that_of_each_and_its_memory_that_of_the_call(small_lm, options):
    lm = small_lm(**options)
    tokens = np.array([[1, 3, 2, 5], [7, 8, 3, 3]], np.int32)
    mems = memory_after(lm, IDS, 5)
    mems = [tf.repeat(mem, 2, 0) for mem in mems]
    probs, new_mems = lm.attention(tokens, mems)
    for layer in range(2):
        expected = lm.network.attention_probs(tf.constant(tokens), mems, layer)
        np.testing.assert_allclose(probs[layer], expected, rtol=1e-5, atol=1e-7)
    for mem, expected in zip(new_mems, lm.network(tokens, mems)[1], strict=True):
        np.testing.assert_allclose(mem, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("call, name, value, limit", [
    (lambda lm: next(read_text(lm, IDS[:1], 5)), "ids", IDS[:1], "two"),
    (lambda lm: next(read_text(lm, IDS, 0)), "tgt_len", 0, "from 1"),
    (lambda lm: next(read_text(lm, IDS, 5, 24)), "number", 24, "1 to 23"),
    (lambda lm: look_back(lm, IDS, 12, 5), "place", 12, "1 to 11"),
    (lambda lm: look_back(lm, IDS, 0, 5), "place", 0, "1 to 11"),
    (lambda lm: next(nll_by_memory(lm, IDS, 5, [5])), "kept", 5, "0 to 4"),
])  # fmt: skip
def test_what_is_out_of_range_is_named(lm, call, name, value, limit):
    with raises_parameter(name, value, limit=limit):
        call(lm)
