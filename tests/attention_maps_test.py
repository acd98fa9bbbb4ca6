"""Maps of attention: `None` as in the call, and padding, whose rows get what their tokens alone would get."""

import numpy as np
import pytest
import tensorflow as tf
from helpers import raises_parameter, randomise

import txl_tf

SIZES = {"n_token": 20, "n_layer": 2, "d_model": 8, "d_embed": 8, "n_head": 2, "d_head": 4, "d_inner": 16}
rng = np.random.default_rng(0)
MASK = np.array([[1, 1, 0, 0, 0], [0, 1, 1, 0, 1]], bool)
TOKENS = np.where(MASK, rng.integers(0, 20, MASK.shape), 99)  # no id of the vocabulary at padding


def padded(alone, mask, mem_len):
    """The map `[..., n, mem_len + n]` of a row without padding, in its places in a row with it."""
    whole = np.zeros([*alone.shape[:-2], len(mask), mem_len + len(mask)], np.float32)
    keys = [*range(mem_len), *mem_len + np.flatnonzero(mask)]
    whole[..., np.flatnonzero(mask)[:, None], keys] = alone
    return whole


@pytest.fixture(scope="module")
def relative():
    lm = txl_tf.TransformerXLLM(**SIZES, mem_len=3, same_length=True, reset_token=4)
    randomise(lm)
    return lm


@pytest.fixture(scope="module")
def absolute():
    lm = txl_tf.TransformerLM(**SIZES, mem_len=2)
    randomise(lm)
    return lm


@pytest.mark.parametrize(
    "kind, carried", [("relative", True), *(pytest.param("absolute", x, marks=pytest.mark.slow) for x in (True, False))]
)
def test_rows_with_padding_have_the_maps_of_their_tokens_alone(kind, carried, request):
    lm = request.getfixturevalue(kind)
    network, mem_len = lm.network, lm.mem_len
    mems = [tf.constant(rng.normal(size=[2, mem_len, 8]), tf.float32) for _ in range(2)] if carried else None
    probs, new_mems = lm.attention(TOKENS, mems, padding_mask=MASK)
    of_layer = network.attention_probs(TOKENS, mems, -1, padding_mask=MASK)
    np.testing.assert_allclose(of_layer, probs[-1], rtol=1e-4, atol=1e-6)
    for row, mask in enumerate(MASK):
        tokens = TOKENS[row : row + 1, mask]
        alone = None if mems is None else [mem[row : row + 1] for mem in mems]
        expected, expected_mems = network.attention(tokens, alone)
        np.testing.assert_allclose(
            probs[:, :, row], padded(expected[:, :, 0].numpy(), mask, mem_len), rtol=1e-4, atol=1e-6
        )
        for mem, expected_mem in zip(new_mems, expected_mems, strict=True):
            np.testing.assert_allclose(mem[row], expected_mem[0], rtol=1e-4, atol=1e-5)


def test_terms_of_scores_take_none_and_padding(relative):
    network, row, mask = relative.network, 1, MASK[1]
    terms = network.attention_terms(TOKENS, layer=1, padding_mask=MASK)
    alone = network.attention_terms(TOKENS[row : row + 1, mask], None, 1)
    seen = padded(np.tri(3, 6, 3, np.float32), mask, 3)  # in the future, (b) and (d) are other distances' scores
    for term, expected in zip(terms, alone, strict=True):
        np.testing.assert_allclose(
            term[:, row] * seen, padded(expected[:, 0].numpy(), mask, 3) * seen, rtol=1e-4, atol=1e-5
        )


def test_none_is_the_memory_before_the_first_segment_and_a_network_needs_no_call_before():
    network = txl_tf.TransformerXL(**SIZES, mem_len=3)
    probs, _ = network.attention(TOKENS % 20, None)
    for mems in (None, network.initial_mems(2)):
        np.testing.assert_array_equal(network.attention_probs((TOKENS % 20).tolist(), mems, 1), probs[1])
    np.testing.assert_allclose(tf.reduce_sum(probs, -1), np.ones(probs.shape[:-1]), rtol=1e-5)
    tener = txl_tf.Tener(n_token=20, n_layer=1, d_model=8, n_head=2, d_inner=8)
    assert tener.attention_probs({"chars": TOKENS % 20}, -1).shape == [2, 2, 5, 5]


@pytest.mark.parametrize("layer", [2, -3, True, 0.0])
def test_layers_that_are_none_are_named(relative, layer):
    with pytest.raises(txl_tf.ParameterError) as caught:
        relative.network.attention_probs(TOKENS % 20, None, layer)
    assert caught.value.name == "layer" and caught.value.value is layer


def test_padding_masks_of_other_shapes_are_named_and_ids_of_tokens_are_checked(relative):
    with pytest.raises(ValueError, match="padding_mask"):
        relative.attention(TOKENS, padding_mask=MASK[:, :4])
    with raises_parameter("tokens", 99):
        relative.attention(TOKENS, padding_mask=np.ones_like(MASK))


# ------------------------------------------------------------------------------------- families that know their padding


@pytest.mark.slow
def test_keys_of_padding_are_not_looked_at_by_the_other_families():
    """Positions of an encoder-decoder count padding in front: `transformer_test.py`."""
    model = txl_tf.Transformer(
        num_layers=2, d_model=8, num_heads=2, dff=8, input_vocab_size=9, target_vocab_size=9, rate=0.0
    )
    source, target = np.array([[1, 2, 3, 0, 0]]), np.array([[1, 4, 5, 0]])
    for which, queries, keys in (("cross", 3, 3), ("encoder", 3, 3), ("decoder", 3, 3)):
        found = model.attention(source, target, which)[:, :, 0]
        alone = model.attention(source[:, :3], target[:, :3], which)[:, :, 0]
        np.testing.assert_allclose(found[:, :, :queries, :keys], alone, rtol=1e-4, atol=1e-6)
        assert not np.any(found[:, :, :queries, keys:])

    tener = txl_tf.Tener(n_token=9, n_layer=2, d_model=8, n_head=2, d_inner=8)
    chars, mask = np.array([[0, 1, 2, 0, 3]]), np.array([0, 1, 1, 0, 1], bool)
    assert not np.any(tener.attention_probs({"chars": chars}, 1).numpy()[..., ~mask])
    of_front = tener.attention_probs({"chars": np.array([[0, 0, 1, 2, 3]])}, 1)[:, 0, 2:, 2:]
    alone = tener.attention_probs({"chars": np.array([[1, 2, 3]])}, 1)[:, 0]
    np.testing.assert_allclose(of_front, alone, rtol=1e-4, atol=1e-6)

    flat = txl_tf.Flat(n_token=9, n_layer=2, d_model=8, n_head=2, d_inner=8)
    items = {"lattice": [1, 2, 3, 4], "pos_s": [0, 1, 2, 0], "pos_e": [0, 1, 2, 1]}
    others = {"bigrams": np.zeros([1, 3], int), "seq_len": np.array([3]), "lex_num": np.array([1])}
    found, alone = (
        flat.attention_probs({**{name: np.array([ids + [0] * n]) for name, ids in items.items()}, **others}, 1)[:, 0]
        for n in (2, 0)
    )
    np.testing.assert_allclose(found[:, :4, :4], alone, rtol=1e-4, atol=1e-6)
    assert not np.any(found[:, :4, 4:])
