"""Tener: embeddings in loops, equivalences, dropout and errors; golden cases are in check_reference_test.py."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import raises_parameter, randomise

import txl_tf

N_TOKEN, N_BIGRAM = 9, 7
LENGTHS = [5, 2, 1]
SETTINGS = {"n_layer": 2, "d_model": 8, "n_head": 2, "d_inner": 12, "d_embed": 6, "d_bigram": 5}
KEY = np.array([1, 2, 0], np.int32)
SLOW = pytest.mark.slow


def make_tener(**options):
    network = txl_tf.Tener(**{"n_token": N_TOKEN, "n_bigram": N_BIGRAM, "seed": 0, **SETTINGS, **options})
    network.build()
    randomise(network, scale=0.8)
    return network


def make_inputs(lengths=LENGTHS, extra=0, seed=0):
    """Random ids, unknown ones included, and 0 at padding; `extra` columns of padding."""
    rng = np.random.default_rng(seed)
    mask = np.arange(max(lengths) + extra)[None] < np.array(lengths)[:, None]
    sizes = {"chars": N_TOKEN, "bigrams": N_BIGRAM}
    ids = {name: rng.integers(1, size, [len(lengths), max(lengths)]) for name, size in sizes.items()}
    ids = {name: np.pad(array, [[0, 0], [0, extra]]) for name, array in ids.items()}
    return {name: tf.constant(np.where(mask, array, 0), tf.int32) for name, array in ids.items()}


def row_of(inputs, row, length):
    return {name: array[row : row + 1, :length] for name, array in inputs.items()}


VARIANTS = [
    {},
    {"n_bigram": 0},
    {"attn_type": "transformer", "pos_embed": "sin"},
    {"pos_embed": "fix", "after_norm": False, "max_seq_len": 9},
    {"key_position_term": False, "scale": True},
]


def variants(*fast):
    """A test for each variant; slow but for those of the numbers `fast`."""
    params = [options if i in fast else pytest.param(options, marks=SLOW) for i, options in enumerate(VARIANTS)]
    return pytest.mark.parametrize("options", params, ids=str)


# ---------------------------------------- what enters the first layer


def test_embeddings_are_projected_together_and_positions_added_from_1_on():
    inputs = make_inputs()
    for pos_embed in ("none", "sin", "fix"):
        network = make_tener(pos_embed=pos_embed, max_seq_len=5)
        found = network.embed(inputs).numpy()
        weight, half = network.in_fc.kernel.numpy(), 4
        for b, t in np.argwhere(network.mask_of(inputs)):
            char, bigram = (int(inputs[name][b, t]) for name in ("chars", "bigrams"))
            tables = network.embedding.numpy()[char], network.bigram_embedding.numpy()[bigram]
            expected = np.concatenate(tables) @ weight + network.in_fc.bias.numpy()
            if pos_embed == "sin":
                angles = (t + 1) * 10000.0 ** (-np.arange(half) / (half - 1))
                expected = expected + np.concatenate([np.sin(angles), np.cos(angles)])
            elif pos_embed == "fix":
                expected = expected + network.pos_table.numpy()[t + 1]
            np.testing.assert_allclose(found[b, t], expected, rtol=1e-4, atol=1e-5, err_msg=pos_embed)


def test_the_mask_is_that_of_the_characters():
    expected = np.arange(6)[None] < np.array(LENGTHS)[:, None]
    np.testing.assert_array_equal(make_tener().mask_of(make_inputs(extra=1)), expected)


def test_no_bigrams_are_needed_where_there_are_none():
    network, inputs = make_tener(n_bigram=0), make_inputs()
    assert network.bigram_embedding is None
    np.testing.assert_array_equal(network(inputs), network({"chars": inputs["chars"]}))


# ---------------------------------------- equivalences


@variants(3, 4)
def test_neither_padding_nor_other_rows_change_a_sentence(options):
    network, inputs = make_tener(**options), make_inputs()
    found = network(inputs).numpy()
    longer = network(make_inputs(extra=3)).numpy()
    for row, length in enumerate(LENGTHS):
        alone = network(row_of(inputs, row, length)).numpy()[0]
        np.testing.assert_allclose(found[row, :length], alone, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(longer[row, :length], alone, rtol=1e-5, atol=1e-5)
    other = {name: tf.concat([array[:1], array[:0:-1]], 0) for name, array in inputs.items()}
    np.testing.assert_array_equal(network(other).numpy()[0], found[0])


def test_the_embedding_of_padding_does_not_count():
    network, inputs = make_tener(), make_inputs()
    mask, found = network.mask_of(inputs).numpy(), network(inputs).numpy()
    for table in (network.embedding, network.bigram_embedding):
        table.assign(np.concatenate([[[7.0] * table.shape[1]], table.numpy()[1:]]))
    np.testing.assert_array_equal(network(inputs).numpy()[mask], found[mask])


def test_a_graph_of_unknown_shapes_gives_the_same():
    network, inputs = make_tener(), make_inputs()
    specs = {name: tf.TensorSpec([None, None], tf.int32) for name in inputs}
    in_graph = tf.function(network, input_signature=[specs], autograph=False)
    for given in (inputs, row_of(inputs, 0, 3)):
        np.testing.assert_allclose(in_graph(given), network(given), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_xla_gives_the_same():
    network, inputs = make_tener(), make_inputs()
    found = tf.function(network, jit_compile=True)(inputs)
    np.testing.assert_allclose(found, network(inputs), rtol=1e-5, atol=1e-5)


@variants(3)
def test_attention_probabilities_are_those_of_the_layers(options):
    """They sum to 1, are 0 at padding, and give the second layer's attention from the first one's result."""
    network, inputs = make_tener(**options), make_inputs()
    mask = network.mask_of(inputs).numpy()
    for layer in (0, 1):
        probs = network.attention_probs(inputs, layer).numpy()
        np.testing.assert_allclose(probs.sum(-1), 1, rtol=1e-5)
        assert probs[np.broadcast_to(~mask[None, :, None], probs.shape)].max() == 0
    x = network.stacked[0](network.embed(inputs), mask)
    x = x if network.after_norm else network.stacked[1].norm1(x)
    np.testing.assert_allclose(probs, network.stacked[1].self_attn.attention_probs(x, mask), rtol=1e-5, atol=1e-7)


# ---------------------------------------- dropout


RATES = ["dropout", "dropatt", "embed_dropout", "token_dropout"]


def test_training_without_any_rate_is_inference():
    network, inputs = make_tener(), make_inputs()
    np.testing.assert_array_equal(network(inputs, training=True), network(inputs))
    np.testing.assert_array_equal(network(inputs, training=True, dropout_key=KEY), network(inputs))


@pytest.mark.parametrize("rate", [*RATES[:2], *(pytest.param(rate, marks=SLOW) for rate in RATES[2:])])
def test_every_rate_drops_by_its_key_and_in_training_alone(rate):
    network, inputs = make_tener(n_layer=1, **{rate: 0.5}), make_inputs()
    expected = make_tener(n_layer=1)(inputs).numpy()
    np.testing.assert_array_equal(network(inputs), expected)
    np.testing.assert_array_equal(network(inputs, training=False, dropout_key=KEY), expected)
    dropped = network(inputs, training=True, dropout_key=KEY).numpy()
    assert np.abs(dropped - expected).max() > 0.01
    np.testing.assert_array_equal(network(inputs, training=True, dropout_key=KEY), dropped)
    other = network(inputs, training=True, dropout_key=KEY + 1).numpy()
    drawn = [network(inputs, training=True).numpy() for _ in range(2)]
    for different in (other, *drawn):
        assert np.abs(different - dropped).max() > 0.01
    assert np.abs(drawn[0] - drawn[1]).max() > 0.01


MANY = {name: np.full([40, 50], 2, np.int32) for name in ("chars", "bigrams")}


def test_token_dropout_takes_the_unknown_id_at_its_rate_for_characters_and_bigrams_apart():
    network = make_tener(token_dropout=0.2)
    network.embedding.assign(np.arange(N_TOKEN)[:, None] * np.ones([1, 6]))  # a row is its id
    found = {name: network.lookup(network.embedding, MANY[name], KEY + i).numpy() for i, name in enumerate(MANY)}
    for array in found.values():
        assert set(np.unique(array)) == {1.0, 2.0}
        assert (array[..., 0] == 1).mean() == pytest.approx(0.2, abs=0.03)  # 2000 draws: 0.009 is a deviation
    assert (found["chars"] != found["bigrams"]).any()
    padding = network.lookup(network.embedding, tf.zeros([40, 50], tf.int32), KEY)
    np.testing.assert_array_equal(padding, 0)  # padding stays padding


def test_embed_dropout_drops_components_at_its_rate_and_scales_the_others():
    """A projection that copies shows what is dropped, of characters and of bigrams."""
    network = make_tener(embed_dropout=0.25, d_embed=4, d_bigram=4)
    network.in_fc.kernel.assign(np.eye(8))
    network.in_fc.bias.assign(np.zeros(8))
    for table in (network.embedding, network.bigram_embedding):
        table.assign(np.ones(table.shape))
    keys = [KEY + i for i in range(4)]
    found = network.embed(MANY, keys).numpy()
    np.testing.assert_allclose(np.unique(found), [0, 1 / 0.75], rtol=1e-4)
    for part in (found[..., :4], found[..., 4:]):
        assert (part == 0).mean() == pytest.approx(0.25, abs=0.02)


# ---------------------------------------- saving and errors


@variants(2, 3)
def test_its_configuration_makes_it_again(options):
    network, inputs = make_tener(**options), make_inputs()
    copy = txl_tf.Tener.from_config(network.get_config())
    assert copy.get_config() == network.get_config()
    copy.build()
    copy.set_weights(network.get_weights())
    np.testing.assert_array_equal(copy(inputs), network(inputs))
    assert keras.saving.get_registered_object("txl_tf>Tener") is txl_tf.Tener


BAD = [
    ({"n_token": 0}, "n_token", "1"),
    ({"n_bigram": -1}, "n_bigram", "0"),
    ({"d_model": 7}, "d_model", "even"),
    ({"d_model": 10, "n_head": 4}, "d_model", "n_head=4"),
    ({"attn_type": "naive"}, "attn_type", "transformer"),
    ({"pos_embed": "learned"}, "pos_embed", "fix"),
    ({"after_norm": "yes"}, "after_norm", "True"),
    ({"embed_dropout": 1.0}, "embed_dropout", "[0, 1)"),
    ({"token_dropout": -0.5}, "token_dropout", "[0, 1)"),
    ({"max_seq_len": 0}, "max_seq_len", "1"),
]


def test_bad_arguments_are_errors():
    for options, name, limit in BAD:
        with raises_parameter(name, options[name], limit=limit):
            make_tener(**options)
            pytest.fail(f"no error: {options}")
