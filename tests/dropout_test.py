"""Dropout: rate, scale, and masks that are a function of the key alone."""

import numpy as np
import pytest
import tensorflow as tf

from txl_tf.layers.dropout import dropout, split

KEY = tf.constant([3, 4, 0], tf.int64)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_zeroes_a_share_of_the_elements_and_scales_the_rest(rate):
    x = np.random.default_rng(0).normal(1, 0.1, [500, 400]).astype(np.float32)
    dropped = dropout(tf.constant(x), rate, KEY).numpy()
    zeros = dropped == 0
    error = (rate * (1 - rate) / x.size) ** 0.5
    assert abs(zeros.mean() - rate) < 4 * error
    np.testing.assert_allclose(dropped[~zeros], x[~zeros] / (1 - rate), rtol=1e-4)


def test_elements_and_rows_are_independent():
    kept = dropout(tf.ones([400, 501]), 0.5, KEY).numpy() > 0
    for a, b in ((kept[:, :-1], kept[:, 1:]), (kept[:-1], kept[1:]), (kept[:, :-2], kept[:, 2:])):
        assert abs((a == b).mean() - 0.5) < 4 * 0.5 / a.size**0.5


@pytest.mark.parametrize("rate", [0.1, 0.002])
def test_elements_that_share_a_byte_hardly_depend_on_one_another(rate):
    """The first and the second half of a row are windows of two bytes each that overlap by one."""
    dropped = dropout(tf.ones([1000, 4000]), rate, KEY).numpy() == 0
    first, second = dropped[:, :2000], dropped[:, 2000:]
    error = 4 / first.size**0.5
    for a, b in ((first, second), (first[:, 1:], second[:, :-1])):  # sharing a byte as the high, then as the low one
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 1 / 256 + error


@pytest.mark.parametrize("shape", [(1,), (7,), (3, 5), (2, 3, 5, 7), (4, 6)], ids=str)
def test_the_same_key_draws_the_same_mask_eager_in_graphs_under_xla_and_with_dynamic_shapes(shape):
    x = tf.ones(shape)
    expected = dropout(x, 0.5, KEY)
    assert expected.shape == shape
    np.testing.assert_array_equal(dropout(x, 0.5, KEY), expected)
    for options in ({}, {"jit_compile": True}, {"input_signature": [tf.TensorSpec([None] * len(shape))]}):
        compiled = tf.function(lambda x: dropout(x, 0.5, KEY), **options)
        np.testing.assert_array_equal(compiled(x), expected)


def test_different_keys_draw_different_masks():
    keys = [KEY, KEY + [0, 1, 0], KEY + [1, 0, 0], KEY + [0, 0, 1], *split(KEY, 3)]
    masks = [dropout(tf.ones([2, 500]), 0.5, key).numpy() > 0 for key in keys]
    for i, mask in enumerate(masks):
        for other in masks[:i]:
            assert abs((mask == other).mean() - 0.5) < 0.08  # five standard errors


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("shape, axis", [((6, 5), 0), ((7, 3, 11), 0), ((3, 6, 5, 7), 1), ((5, 40, 301), 0)], ids=str)
def test_shares_of_the_rows_draw_the_masks_of_the_whole_batch(shape, axis, jit_compile):
    drop = tf.function(lambda x, key: dropout(x, 0.5, key, axis), jit_compile=jit_compile)
    first = 2**31 - 10  # blocks are numbered beyond 32 bits
    whole = drop(tf.ones(shape), KEY + [0, 0, first])
    rows = [row.tobytes() for row in np.moveaxis(whole, axis, 0)]
    assert len(set(rows)) == len(rows)
    for begin, size in ((0, 2), (2, 3), (shape[axis] - 1, 1)):
        share = tf.gather(whole, range(begin, begin + size), axis=axis)
        np.testing.assert_array_equal(drop(tf.ones_like(share), KEY + [0, 0, first + begin]), share)


def test_without_rows_every_share_gets_the_same_mask():
    x = tf.ones([1, 50, 10])
    np.testing.assert_array_equal(dropout(x, 0.5, KEY + [0, 0, 7], None), dropout(x, 0.5, KEY, None))


def test_more_places_than_keys_can_tell_apart_are_an_error():
    with pytest.raises(ValueError, match="num must be below 1024, got 1024"):
        split(KEY, 1024)


def test_keys_split_over_and_over_are_the_same_under_xla():
    def leaves(key):
        return tf.stack([leaf for branch in split(key, 3) for twig in split(branch, 2) for leaf in split(twig, 2)])

    key = tf.constant([2**40 + 5, -7, 6], tf.int64)
    expected = leaves(key).numpy()
    assert len({tuple(leaf) for leaf in expected}) == 12 and set(expected[:, 2]) == {6}
    np.testing.assert_array_equal(tf.function(leaves)(key), expected)
    np.testing.assert_array_equal(tf.function(leaves, jit_compile=True)(key), expected)


def test_nothing_is_dropped_at_rate_0_or_without_a_key():
    x = tf.constant([1.0, 2.0])
    assert dropout(x, 0.0, KEY) is x
    assert dropout(x, 0.5, None) is x
    assert split(None, 3) == [None, None, None]


def test_gradient_is_the_mask():
    x = tf.ones([50])
    with tf.GradientTape() as tape:
        tape.watch(x)
        dropped = dropout(x, 0.5, KEY)
    np.testing.assert_array_equal(tape.gradient(dropped, x), dropped)


def test_bfloat16_drops_the_same_elements():
    x = tf.ones([1000], tf.bfloat16)
    dropped = dropout(x, 0.25, KEY)
    assert dropped.dtype == tf.bfloat16
    np.testing.assert_allclose(tf.cast(dropped, tf.float32), dropout(tf.ones([1000]), 0.25, KEY), rtol=2**-8)


def test_a_rate_close_to_1_stays_finite():
    assert np.isfinite(dropout(tf.ones([1000]), 0.999999, KEY)).all()
