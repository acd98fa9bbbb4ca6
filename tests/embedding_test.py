"""Adaptive embedding: words and bins in plain NumPy, the gradient of the lookup, and which weights there are."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import assert_round_trips, raises_naming, raises_parameter

from txl_tf.errors import CallError
from txl_tf.kernels import embedding_lookup
from txl_tf.nn.adaptive import AdaptiveSoftmax
from txl_tf.nn.embedding import AdaptiveEmbedding, mask_adaptive_embedding_lookup


@pytest.mark.parametrize("static_shapes", [False, True])
def test_every_word_is_its_row_of_its_bin_projected_and_scaled(static_shapes):
    """Bins [0, 3), [3, 4) and [4, 9) of the widths 6, 3 and 1, of which the first is not projected."""
    rng = np.random.default_rng(0)
    tables = [rng.normal(size=shape).astype(np.float32) for shape in ((3, 6), (1, 3), (5, 1))]
    projs = [None, *(rng.normal(size=(width, 6)).astype(np.float32) for width in (3, 1))]
    x = rng.permutation(np.arange(9).repeat(2)).reshape(3, 6)
    expected = np.zeros([3, 6, 6])
    for place, word in np.ndenumerate(x):
        i = int(word >= 3) + int(word >= 4)
        row = tables[i][word - (0, 3, 4)[i]]
        expected[place] = (row if projs[i] is None else row @ projs[i]) * np.sqrt(6)
    y = mask_adaptive_embedding_lookup(tf.constant(x), tables, projs, [3, 4], d_proj=6, static_shapes=static_shapes)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


def test_words_of_a_bin_are_scattered_to_their_places():
    """The words 2, 3 and 4 of [[1, 2], [3, 4], [5, 6]] are embedded in their places, all others by other bins."""
    x = tf.constant([[1, 2], [3, 4], [5, 6]])
    table = np.array([
        [-2.7328973, -0.01377826, -0.78023756, -1.1186032],
        [-1.7653402, -0.8459847, -0.3368531, -0.27648798],
        [0.2573444, 1.1644957, 1.0869092, 1.3614684],
    ], np.float32)  # fmt: skip
    tables = [np.zeros([2, 4], np.float32), table, np.zeros([2, 4], np.float32)]  # bins [0, 2), [2, 5), [5, 7)
    y = mask_adaptive_embedding_lookup(x, tables, [None] * 3, cutoffs=[2, 5], d_proj=4)
    zeros = np.zeros(4)
    expected = [[zeros, table[0]], [table[1], table[2]], [zeros, zeros]]
    np.testing.assert_array_equal(y, np.array(expected) * 2)  # emb_scale = sqrt(4)


def test_embeddings_are_scaled_by_the_root_of_the_projected_width():
    table, proj = np.eye(3, 2, dtype=np.float32), np.ones([2, 9], np.float32)
    y = mask_adaptive_embedding_lookup(tf.constant([[0, 2]]), [table], [proj], cutoffs=[], d_proj=9)
    np.testing.assert_array_equal(y, [[[3] * 9, [0] * 9]])


def test_ids_that_float32_does_not_have_are_embedded_exactly():
    """2**24 + 1 would become 2**24. Without dynamic shapes, a bin that no token is in need not be that long."""
    tables = [np.zeros([1, 4], np.float32), np.arange(16, dtype=np.float32).reshape(4, 4)]
    tokens = 2**24 + tf.constant([[3, 1, 0, 2]])
    y = mask_adaptive_embedding_lookup(tokens, tables, [None] * 2, cutoffs=[2**24], d_proj=4, static_shapes=True)
    np.testing.assert_array_equal(y, 2 * tables[1][[[3, 1, 0, 2]]])


def test_whole_numbers_of_any_type_are_ids_and_others_an_error():
    with raises_parameter("tokens", allowed="integers"):
        mask_adaptive_embedding_lookup(tf.constant([[True]]), [np.eye(3)], [None], cutoffs=[], d_proj=3)
    with raises_naming(ValueError, "tokens", "[2, None]"):
        mask_adaptive_embedding_lookup(tf.ragged.constant([[1], [1, 2]]), [np.eye(3)], [None], cutoffs=[], d_proj=3)
    for dtype in ("uint8", "int64", "float32"):
        y = mask_adaptive_embedding_lookup(tf.cast([[1, 2]], dtype), [np.eye(3)], [None], cutoffs=[], d_proj=3)
        np.testing.assert_array_equal(y[0], np.eye(3, dtype="float32")[1:] * np.float32(3**0.5))
    for wide in (tf.constant([[2**32 + 1]], tf.int64), tf.constant([[2**31 + 1]], tf.uint32)):  # not wrapped to 1
        with pytest.raises(tf.errors.InvalidArgumentError):
            mask_adaptive_embedding_lookup(wide, [np.eye(3)], [None], cutoffs=[], d_proj=3)


# ---------------------------------------- the lookup's gradient


def test_gradient_of_the_lookup_is_dense_and_adds_up_repeated_words():
    table = tf.constant(np.random.default_rng(0).normal(size=(5, 3)), tf.float32)
    ids = tf.constant([[1, 3, 1], [1, 0, 3]])
    factors = tf.constant(np.random.default_rng(1).normal(size=(2, 3, 3)), tf.float32)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(table)
        rows = embedding_lookup(table, ids)
        loss = tf.reduce_sum(rows**2 * factors)
        sparse_loss = tf.reduce_sum(tf.gather(table, ids) ** 2 * factors)
    np.testing.assert_array_equal(rows, table.numpy()[ids.numpy()])
    gradient, sparse = tape.gradient(loss, table), tape.gradient(sparse_loss, table)
    assert isinstance(gradient, tf.Tensor) and isinstance(sparse, tf.IndexedSlices)
    np.testing.assert_allclose(gradient, tf.convert_to_tensor(sparse), rtol=1e-6)
    np.testing.assert_array_equal(gradient[2], np.zeros(3))


def test_gradient_of_a_frequent_word_keeps_its_sum_in_half_precision():
    """A word that occurs 4,096 times: added up in bfloat16, the sum would stop growing at 256 of its terms."""
    embedding = AdaptiveEmbedding(5, 8, 8, dtype="mixed_bfloat16")
    embedding.build()
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.cast(embedding(np.full([4, 1024], 2)), tf.float32))
    gradient = tape.gradient(loss, embedding.tables[0].value)
    np.testing.assert_allclose(gradient[2], np.full(8, 4096 * 8**0.5), rtol=0.01)


# ---------------------------------------- weights


def test_config_round_trips_and_initialisers_reach_their_weights():
    embedding = AdaptiveEmbedding(
        5000, 64, 32, cutoffs=[1000, 3000], div_val=2, proj_same_dim=False,
        initializer=keras.initializers.RandomNormal(stddev=0.5),
        proj_initializer=keras.initializers.RandomNormal(stddev=0.1),
    )  # fmt: skip
    assert_round_trips(embedding)
    for table in embedding.tables:
        assert np.std(table.numpy()) == pytest.approx(0.5, rel=0.02)
    assert embedding.projs[1] is None  # 32 wide already
    for proj in (embedding.projs[0], embedding.projs[2]):
        assert np.std(proj.numpy()) == pytest.approx(0.1, rel=0.1)


@pytest.mark.parametrize("cutoffs", [np.array([5, 12]), np.array([]), 5, None, "ab", iter([5, 12]), {5, 12}])
def test_cutoffs_that_are_no_list_are_an_error(cutoffs):
    with raises_parameter("cutoffs"):
        AdaptiveEmbedding(23, 16, 8, cutoffs=cutoffs)


@pytest.mark.parametrize(
    "cutoffs", [[10, 10], [12, 5], [0, 5], [5, 23], [5, 30], [-3, 5]], ids=lambda cutoffs: str(cutoffs)
)
def test_cutoffs_that_leave_a_bin_empty_are_an_error(cutoffs):
    with raises_parameter("cutoffs", cutoffs) as raised:
        AdaptiveEmbedding(23, 8, 8, cutoffs=cutoffs)
    assert "n_token=23" in raised.value.allowed


def test_a_bin_of_width_0_is_an_error_that_names_it():
    with raises_parameter("d_embed", 15, "at least 16"):
        AdaptiveEmbedding(23, 15, 8, cutoffs=[5, 12], div_val=4)
    AdaptiveEmbedding(23, 16, 8, cutoffs=[5, 12], div_val=4)


@pytest.mark.parametrize("layer_class", [AdaptiveEmbedding, AdaptiveSoftmax])
def test_cutoffs_by_position_are_an_error_that_names_them(layer_class):
    with raises_parameter(layer_class.__name__, [20, 16, 16, [6, 12]], error=CallError) as raised:
        layer_class(20, 16, 16, [6, 12])
    assert "cutoffs" in str(raised.value)
    assert layer_class(20, 16, 16, cutoffs=[6, 12]).bin_sizes == [6, 6, 8]
