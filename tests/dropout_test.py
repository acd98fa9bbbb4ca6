"""Dropout: rate, scale, and masks that are a function of the key alone."""

import numpy as np
import pytest
import tensorflow as tf
from helpers import raises_parameter

from txl_tf.kernels.dropout import dropout, split

KEY = np.array([3, 4, 0])


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_zeroes_a_share_of_the_elements_and_scales_the_rest(rate):
    x = np.random.default_rng(0).normal(1, 0.1, [500, 400]).astype(np.float32)
    dropped = dropout(tf.constant(x), rate, KEY).numpy()
    zeros = dropped == 0
    error = (rate * (1 - rate) / x.size) ** 0.5
    assert abs(zeros.mean() - rate) < 4 * error
    np.testing.assert_allclose(dropped[~zeros], x[~zeros] / (1 - rate), rtol=1e-4)


RATES = [0.002, 0.1, 0.5, 0.9]
SLOW = pytest.mark.slow


def correlation(a, b):
    """Of two masks of one shape, in standard errors of that of independent ones."""
    p, q = a.mean(), b.mean()
    covariance = np.count_nonzero(a & b) / a.size - p * q
    return covariance / (p * (1 - p) * q * (1 - q)) ** 0.5 * a.size**0.5


def dropped_of(shape, rate, key=KEY):
    """Where elements are dropped; of 100 rows at a time, as TensorFlow never gives back the memory of large tensors."""
    rows, *rest = shape
    key = tf.pad(key, [[0, 4 - key.shape[0]]])
    keys = [key + [0, 0, first, 0] for first in range(0, rows, 100)]
    return np.concatenate([dropout(tf.ones([100, *rest]), rate, key).numpy() == 0 for key in keys])


@pytest.mark.parametrize("rate", RATES)
def test_every_row_and_every_column_loses_its_share(rate):
    dropped = dropped_of([1000, 8, 500], rate).reshape([1000, 4000])
    error = (rate * (1 - rate)) ** 0.5
    for axis in (0, 1):  # the mean shares scatter as binomial ones do
        shares = (dropped.mean(axis) - rate) / error * dropped.shape[axis] ** 0.5
        assert abs(shares.std() - 1) < 4 / (2 * len(shares)) ** 0.5
        assert abs(shares.mean()) < 4 / len(shares) ** 0.5


@pytest.mark.parametrize(
    "rate", [pytest.param(0.002, marks=SLOW), 0.1, *(pytest.param(r, marks=SLOW) for r in (0.5, 0.9))]
)
def test_elements_rows_places_steps_and_seeds_are_independent(rate):
    def dropped(key):
        return dropped_of([1000, 4000], rate, key)

    mask, (first, second) = dropped(KEY), split(KEY, 2)
    neighbours = {n: (mask[:, :-n], mask[:, n:]) for n in (1, 2, 3, 4, 8, 16, 128, 500)}  # along a row
    rows = {-n: (mask[:-n], mask[n:]) for n in (1, 2, 8, 64)}
    others = {"step": KEY + [0, 1, 0], "seed": KEY + [1, 0, 0], "place": first, "row": KEY + [0, 0, 1000]}
    pairs = {**neighbours, **rows, **{name: (mask, dropped(key)) for name, key in others.items()}}
    pairs["places"] = dropped(first), dropped(second)
    pairs["next step, one place on"] = mask[:, 1:], dropped(KEY + [0, 1, 0])[:, :-1]
    far = {
        name: value for name, value in ((name, correlation(*pair)) for name, pair in pairs.items()) if abs(value) > 4
    }
    assert not far


@pytest.mark.parametrize("rate", RATES)
def test_elements_that_share_a_byte_hardly_depend_on_one_another(rate):
    """The quarters of a row are windows of two bytes each into the same words, each overlapping the next by one."""
    dropped = dropped_of([1000, 4000], rate)
    quarters = np.split(dropped, 4, 1)
    for i, a in enumerate(quarters):
        for b in quarters[:i]:
            assert abs(correlation(a, b)) < a.size**0.5 / 256 + 4


def hashed(place, a, b):
    """The random word of one element and of those a quarter, a half and three quarters of the row further on."""
    word = (place * 0x9E3779B9 % 2**32 ^ a) * 0x21F0AAAD % 2**32
    word = ((word ^ word >> 15) + b) * 0x735A2D97 % 2**32
    return word ^ word >> 15


def test_masks_stay_as_they_are():
    kept = dropout(tf.ones([4, 6, 10]), 0.3, tf.constant([3, 4, 5])).numpy() > 0
    assert np.packbits(kept).tobytes().hex() == "effebefb77f47be7fbbd706d7ec397a6d92cfbbfd7afbeeb79ffeffbabea"


def test_masks_are_those_of_the_equation_word_by_word():
    rows, length, width, rate, step = 3, 4, 10, 0.3, 7
    key = tf.constant([5, step, 2])
    found = dropout(tf.ones([rows, length, width]), rate, key).numpy() > 0
    a, b, *_ = tf.raw_ops.StatelessRandomUniformFullIntV2(
        shape=[rows, 4], key=[tf.bitcast([5, step], tf.uint64)], counter=tf.constant([2, 0], tf.uint64), alg=1,
        dtype=tf.uint32,
    ).numpy().T.tolist()  # fmt: skip
    quarter = 3  # 10 elements take three words
    for row, t, column in np.ndindex(rows, length, width):
        byte, place = divmod(column, quarter)
        word = hashed(place + step + t * quarter, a[row], b[row])
        number = (word << 8 * byte if byte < 3 else word + (word << 24)) >> 16 & 0xFFFF
        assert found[row, t, column] == (number >= round(rate * 65536))


@pytest.mark.parametrize(
    "shape", [*(pytest.param(shape, marks=SLOW) for shape in [(1,), (3, 5), (2, 3, 5, 7), (4, 6)]), (7,)], ids=str
)
def test_the_same_key_draws_the_same_mask_eager_in_graphs_under_xla_and_with_dynamic_shapes(shape):
    x = tf.ones(shape)

    def drop(x):
        return [dropout(x, rate, KEY) for rate in (*RATES, 0.25)]

    expected = drop(x)
    assert expected[0].shape == shape
    np.testing.assert_array_equal(drop(x), expected)
    for options in ({}, {"jit_compile": True}, {"input_signature": [tf.TensorSpec([None] * len(shape))]}):
        np.testing.assert_array_equal(tf.function(drop, **options)(x), expected)


def test_different_keys_draw_different_masks():
    keys = [KEY, KEY + [0, 1, 0], KEY + [1, 0, 0], KEY + [0, 0, 1], *split(KEY, 3)]
    masks = [dropout(tf.ones([2, 500]), 0.5, key).numpy() > 0 for key in keys]
    for i, mask in enumerate(masks):
        for other in masks[:i]:
            assert abs((mask == other).mean() - 0.5) < 0.08  # five standard errors


@pytest.mark.parametrize("jit_compile", [False, pytest.param(True, marks=SLOW)])
@pytest.mark.parametrize(
    "shape, axis",
    [
        *(pytest.param(*case, marks=SLOW) for case in [((6, 45), 0), ((7, 3, 11), 0), ((5, 40, 301), 0)]),
        ((3, 6, 5, 7), 1),
    ],
    ids=str,
)
def test_shares_of_the_rows_draw_the_masks_of_the_whole_batch(shape, axis, jit_compile):
    @tf.function(jit_compile=jit_compile)
    def drop(x, key):
        return sum(10**i * dropout(x, rate, key, axis) for i, rate in enumerate((0.1, 0.5, 0.9)))

    first = 2**31 - 10  # rows are numbered beyond 31 bits
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
    with raises_parameter("num", 1024, "below 1024"):
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
