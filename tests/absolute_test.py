"""Word embeddings and absolute positions: the claims of articles 2 and 3 in docs/articles.md, as tests."""

import numpy as np
import pytest
import tensorflow as tf
from helpers import raises_parameter

from txl_tf.errors import ParameterError
from txl_tf.layers import Embeddings, PositionalEncoding, PositionEmbedding, positional_encoding


def numbers(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


def test_a_lookup_is_a_one_hot_product_times_the_root_of_the_width():
    layer = Embeddings(5, 4)
    layer.build()
    ids = np.array([[3, 0, 3], [1, 4, 2]])
    expected = np.eye(5)[ids] @ layer.lut.numpy() * 2
    np.testing.assert_allclose(layer(tf.constant(ids)), expected, rtol=1e-6)


def test_every_row_of_the_table_has_a_gradient_where_it_is_used():
    layer = Embeddings(5, 4)
    layer.build()
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(tf.constant([[0, 2, 2]])))
    gradient = tf.convert_to_tensor(tape.gradient(loss, layer.lut.value))
    np.testing.assert_allclose(gradient, np.array([2, 0, 4, 0, 0])[:, None] * np.ones(4))


def test_logits_are_products_with_every_row():
    layer = Embeddings(5, 4)
    layer.build()
    hidden = numbers(2, 3, 4)
    np.testing.assert_allclose(layer.logits(tf.constant(hidden)), hidden @ layer.lut.numpy().T, atol=1e-5)


def test_sizes_in_the_other_order_are_an_error_by_position_and_not_by_name():
    with raises_parameter("vocab", 512):
        Embeddings(512, 1000)
    for layer in (Embeddings(vocab=3, d_model=8), Embeddings(3, d_model=8), Embeddings(1000, 512), Embeddings(4, 4)):
        assert (layer.vocab, layer.d_model) in {(3, 8), (1000, 512), (4, 4)}
    layer = Embeddings(vocab=3, d_model=8, dtype="mixed_bfloat16")
    assert Embeddings.from_config(layer.get_config()).get_config() == layer.get_config()


def test_a_subclass_with_a_constructor_of_its_own_may_have_another_order():
    class WidthFirst(Embeddings):
        def __init__(self, d_model, vocab, **kwargs):
            super().__init__(vocab=vocab, d_model=d_model, **kwargs)

    class RateSecond(PositionEmbedding):
        def __init__(self, d_model, dropout, max_len=50, **kwargs):
            super().__init__(d_model, max_len=max_len, rate=dropout, **kwargs)

    class Same(Embeddings):
        pass

    layer = WidthFirst(8, 20)
    assert (layer.d_model, layer.vocab) == (8, 20)
    for layer in (RateSecond(8, 0.1), RateSecond(8, dropout=0.1), RateSecond(8, 0.1, max_len=50)):
        assert (layer.d_model, layer.rate, layer.max_len) == (8, 0.1, 50)
    with raises_parameter("vocab", 8):
        Same(8, 20)


@pytest.mark.parametrize("rate", [0.1, 0, 0.0])
def test_a_rate_of_dropout_in_place_of_the_length_is_an_error_that_names_the_order(rate):
    with pytest.raises(ValueError, match=rf"got {rate}; .*\(d_model, dropout, max_len\).*\(16, rate={rate}, max_len="):
        PositionalEncoding(16, rate)


@pytest.mark.parametrize("layer_class", [PositionalEncoding, PositionEmbedding])
@pytest.mark.parametrize(
    "arguments, named, name",
    [
        ((512, 0.1), {"max_len": 50}, "max_len"),
        ((512, 0.1, 50), {}, "max_len"),
        ((), {"d_model": 512, "dropout": 0.1}, "dropout"),
        ((512,), {"dropout": 0.1, "max_len": 50}, "dropout"),
    ],
)
def test_every_way_to_call_the_other_constructor_is_an_error_that_names_the_argument(
    layer_class, arguments, named, name
):
    with pytest.raises(ParameterError) as caught:
        layer_class(*arguments, **named)
    assert (caught.value.name, caught.value.value) == (name, 0.1)
    assert f"{layer_class.__name__}(512, rate=0.1, max_len=...)" in str(caught.value)
    layer = layer_class(512, 50, 0.1)
    assert layer_class.from_config(layer.get_config()).get_config() == layer.get_config()


def test_positions_are_added_from_the_first_on():
    layer, x = PositionalEncoding(6, max_len=20), numbers(2, 4, 6)
    table = positional_encoding(20, 6).numpy()[0]
    np.testing.assert_allclose(layer(tf.constant(x)), x + table[:4], rtol=1e-6)
    np.testing.assert_allclose(layer(tf.constant(x), first=tf.constant(7)), x + table[7:11], rtol=1e-6)
    assert not layer.trainable_variables
    with raises_parameter("x", limit="max_len=20"):
        layer(tf.zeros([1, 21, 6]))


def test_learned_positions_are_rows_of_a_table_from_the_first_on():
    layer, x = PositionEmbedding(6, max_len=20), numbers(2, 4, 6)
    layer.build(x.shape)
    (table,) = layer.trainable_variables
    assert table.shape == (1, 20, 6) and 0.3 < np.std(table) < 0.5  # of 6**-0.5
    np.testing.assert_allclose(layer(tf.constant(x), first=tf.constant(7)), x + table.numpy()[0, 7:11], rtol=1e-6)
    with raises_parameter("x", limit="max_len=20"):
        layer(tf.zeros([1, 21, 6]))


def test_to_concatenate_a_one_hot_position_before_a_linear_layer_is_to_add_an_embedding_after_it():
    x, kernel, of_position = numbers(7, 4), numbers(4, 5, seed=1), numbers(7, 5, seed=2)
    concatenated = np.concatenate([x, np.eye(7, dtype=np.float32)], 1) @ np.concatenate([kernel, of_position])
    np.testing.assert_allclose(concatenated, x @ kernel + of_position, atol=1e-5)


def test_the_encoding_k_places_on_is_a_rotation_that_depends_on_k_alone():
    table, k = positional_encoding(60, 8).numpy()[0].astype(np.float64), 7
    for i in range(4):
        angle = k / 10000 ** (2 * i / 8)
        turn = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
        pairs = table[:, 2 * i : 2 * i + 2]  # sine and cosine
        np.testing.assert_allclose(pairs[k:], pairs[:-k] @ turn.T, atol=1e-5)


def test_products_of_encodings_depend_on_the_distance_alone_and_not_on_its_sign():
    table = positional_encoding(60, 8).numpy()[0].astype(np.float64)
    products = table @ table.T
    for k in range(30):
        np.testing.assert_allclose(np.diagonal(products, k), products[0, k], atol=1e-5)
        np.testing.assert_allclose(np.diagonal(products, -k), products[0, k], atol=1e-5)
    assert np.ptp(products[0]) > 1


def test_sines_stand_in_the_even_dimensions_and_cosines_in_the_odd():
    table = positional_encoding(9, 6).numpy()[0]
    for pos in range(9):
        for i in range(3):
            angle = pos / 10000 ** (2 * i / 6)
            np.testing.assert_allclose(table[pos, 2 * i : 2 * i + 2], [np.sin(angle), np.cos(angle)], atol=1e-6)
