"""Flat: embeddings in loops, equivalences, dropout and errors; golden cases are in check_reference_test.py."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf
from flat_program import FUSIONS, ProgramFlat
from helpers import raises_naming, raises_parameter, randomise
from small_runs import make_flat as make_run_of_flat

import txl_tf
from txl_tf.config import FlatConfig
from txl_tf.errors import UnknownArgumentError
from txl_tf.files import write_json
from txl_tf.runs.folder import RunFolder

N_TOKEN, N_BIGRAM = 9, 7
SENTENCES = [(4, [(1, 2), (0, 3)]), (2, [(0, 1)]), (3, [])]  # characters, and the words that are found in them
SETTINGS = {"n_layer": 2, "d_model": 8, "n_head": 2, "d_inner": 12, "d_embed": 6, "d_bigram": 5, "max_seq_len": 20}
KEY = np.array([1, 2, 0], np.int32)
SLOW = pytest.mark.slow


def make_flat(**options):
    """A `Flat` or, where there are options that only the original program has, the port of it."""
    make = ProgramFlat if options.keys() & {"kind", *FlatConfig.removed} else txl_tf.Flat
    network = make(**{"n_token": N_TOKEN, "n_bigram": N_BIGRAM, "seed": 0, **SETTINGS, **options})
    network.build()
    randomise(network, scale=0.8)
    return network


def make_inputs(sentences=SENTENCES, extra=0, seed=0):
    """Random ids for each sentence and its words, the same wherever it stands; `extra` columns of padding."""
    length = max(n for n, _ in sentences) + extra
    items = max(n + len(words) for n, words in sentences) + extra
    inputs = {name: np.zeros([len(sentences), items], np.int32) for name in ("lattice", "pos_s", "pos_e")}
    inputs["bigrams"] = np.zeros([len(sentences), length], np.int32)
    for row, (n, words) in enumerate(sentences):
        rng = np.random.default_rng([seed, n])
        inputs["bigrams"][row, :n] = rng.integers(1, N_BIGRAM, n)
        inputs["lattice"][row, : n + len(words)] = rng.integers(1, N_TOKEN, n + len(words))
        for i, (start, end) in enumerate([*((i, i) for i in range(n)), *words]):
            inputs["pos_s"][row, i], inputs["pos_e"][row, i] = start, end
    inputs["seq_len"] = np.array([n for n, _ in sentences], np.int32)
    inputs["lex_num"] = np.array([len(words) for _, words in sentences], np.int32)
    return {name: tf.constant(array) for name, array in inputs.items()}


VARIANTS = [
    {},
    {"residual": "own", "n_bigram": 0, "k_proj": False},
    {"kind": "attn", "fusion_shared": False, "pre": "n", "post": "a"},
    {"kind": "ff_two", "rel_pos_init": 0, "scale": True, "attn_ff": True},
]


def variants(*fast, more=()):
    """A test for each variant, and for `more`; slow but for those of the numbers `fast`."""
    every = [*VARIANTS, *more]
    params = [options if i in fast else pytest.param(options, marks=SLOW) for i, options in enumerate(every)]
    return pytest.mark.parametrize("options", params, ids=str)


# ---------------------------------------- what enters the first layer


def test_characters_are_embedded_with_their_bigrams_and_words_by_themselves():
    network, inputs = make_flat(), make_inputs()
    found = network.embed(inputs).numpy()
    expected = np.zeros(found.shape)
    for row, (n, words) in enumerate(SENTENCES):
        for i in range(n + len(words)):
            vector, projection = network.embedding.numpy()[inputs["lattice"][row, i]], network.lex_proj
            if i < n:
                vector = np.concatenate([vector, network.bigram_embedding.numpy()[inputs["bigrams"][row, i]]])
                projection = network.char_proj
            expected[row, i] = vector @ projection.kernel.numpy() + projection.bias.numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_masks_are_those_of_characters_and_of_items():
    network, inputs = make_flat(), make_inputs(extra=1)
    np.testing.assert_array_equal(network.mask_of(inputs), np.arange(5)[None] < np.array([[4], [2], [3]]))
    np.testing.assert_array_equal(network.items_of(inputs), np.arange(7)[None] < np.array([[6], [3], [3]]))


@pytest.mark.parametrize("fusion_shared", [True, False])
def test_layers_share_a_fusion_or_have_their_own(fusion_shared):
    network, inputs = make_flat(fusion_shared=fusion_shared), make_inputs()
    assert len(network.fusions) == (1 if fusion_shared else 2)
    found = network(inputs).numpy()
    network.fusions[-1].forward.kernel.assign(3 * network.fusions[-1].forward.kernel)
    x, items = network.embed(inputs), network.items_of(inputs)
    (fused, index), first = network.positions(inputs), network.stacked[0]
    x = network.stacked[1](first(x, fused[0], index, items), fused[-1], index, items)
    mask = network.mask_of(inputs).numpy()
    np.testing.assert_allclose(network(inputs).numpy()[mask], x.numpy()[:, :4][mask], rtol=1e-5, atol=1e-5)
    assert np.abs(network(inputs).numpy() - found)[mask].max() > 1e-3


# ---------------------------------------- equivalences


@variants(1, 2)
def test_neither_padding_nor_other_rows_change_a_sentence(options):
    network = make_flat(**options)
    found, longer = network(make_inputs()).numpy(), network(make_inputs(extra=3)).numpy()
    other = network(make_inputs([SENTENCES[0], (9, [(3, 8)])])).numpy()
    for row, (n, words) in enumerate(SENTENCES):
        alone = network(make_inputs([(n, words)])).numpy()[0]
        np.testing.assert_allclose(found[row, :n], alone, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(longer[row, :n], alone, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(other[0, :4], found[0], rtol=1e-4, atol=1e-5)


def test_positions_and_ids_at_padding_do_not_count():
    network, inputs = make_flat(), make_inputs(extra=2)
    items, mask = network.items_of(inputs), network.mask_of(inputs).numpy()
    changed = {name: tf.where(items, inputs[name], 6) for name in ("lattice", "pos_s", "pos_e")}
    changed = {**inputs, **changed, "bigrams": tf.where(mask, inputs["bigrams"], 6)}
    np.testing.assert_array_equal(network(changed).numpy()[mask], network(inputs).numpy()[mask])


@variants(2)
def test_a_sentence_without_words_is_a_lattice_of_characters_alone(options):
    """In a batch with words, with padding for them, and by itself; and words count where there are some."""
    network = make_flat(**options)
    with_words, without = network(make_inputs([SENTENCES[0], (3, [])])).numpy(), network(make_inputs([(3, [])])).numpy()
    np.testing.assert_allclose(with_words[1, :3], without[0], rtol=1e-4, atol=1e-5)
    assert np.abs(network(make_inputs([(3, [(0, 2)])])).numpy() - without).max() > 1e-3


def test_words_are_a_set():
    """Their order does not count: a lattice knows places, not turns."""
    network, inputs = make_flat(), make_inputs()
    order = [0, 1, 2, 3, 5, 4]
    turned = {name: tf.gather(inputs[name][:1], order, axis=1) for name in ("lattice", "pos_s", "pos_e")}
    rest = {name: inputs[name][:1] for name in ("bigrams", "seq_len", "lex_num")}
    np.testing.assert_allclose(network({**turned, **rest})[0], network(inputs)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shift", [5, -1, -7])
def test_moving_all_places_changes_nothing(shift):
    network, inputs = make_flat(), make_inputs()
    moved = {**inputs, **{name: inputs[name] + shift for name in ("pos_s", "pos_e")}}
    mask = network.mask_of(inputs).numpy()
    np.testing.assert_allclose(network(moved).numpy()[mask], network(inputs).numpy()[mask], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "name, place, number",
    [
        ("seq_len", (0,), 5), ("seq_len", (1,), -1), ("lex_num", (0,), 3), ("lex_num", (2,), -1),
        ("pos_e", (1, 1), 0), ("pos_e", (0, 4), 0),
    ],
)  # fmt: skip
def test_numbers_that_contradict_each_other_are_named(name, place, number):
    inputs = {key: x.numpy() for key, x in make_inputs().items()}
    inputs[name][place] = number
    tagger = txl_tf.Tagger(make_flat(), labels=["O", "S-X"])
    for use in (make_flat(), tagger.decode, lambda x: tagger.nll(x, np.zeros([3, 4], int))):
        with raises_parameter(f"inputs['{name}']{[*place]}", number):
            use(inputs)


def test_bigrams_are_not_wider_than_the_lattice():
    inputs = make_inputs()
    inputs["bigrams"] = tf.pad(inputs["bigrams"], [[0, 0], [0, inputs["lattice"].shape[1]]])
    for use in (make_flat(), tf.function(make_flat())):
        with raises_parameter("inputs['bigrams']", inputs["bigrams"].shape[1]):
            use(inputs)


def test_distances_of_the_program_have_the_longest_sentence_added():
    """`rel_pos_init` 0 is another model; its positions are those of distances d + max_seq_len."""
    inputs, options = make_inputs(), {"kind": "ff_linear"}
    ours, program = make_flat(**options), make_flat(rel_pos_init=0, **options)
    (of_ours,), _ = ours.positions(inputs)
    (of_program,), index = program.positions(inputs)
    fusion = program.fusions[0].forward
    # The query is character 0 and the key is the word 1-2 of the first sentence: ss -1, se -2, es -1, ee -2.
    places = [20 - 1, 20 - 2, 20 - 1, 20 - 2]
    angles = [place * 10000.0 ** (-np.arange(4) / 3) for place in places]
    sinusoids = np.concatenate([np.concatenate([np.sin(angle), np.cos(angle)]) for angle in angles])
    expected = sinusoids @ fusion.kernel.numpy() + fusion.bias.numpy()
    np.testing.assert_allclose(of_program[index[0, 0, 4]], expected, rtol=1e-4, atol=1e-5)
    assert np.abs(of_ours - of_program).max() > 0.1


@pytest.mark.slow
def test_a_graph_of_unknown_shapes_gives_the_same():
    network, inputs = make_flat(), make_inputs()
    signature = {name: tf.TensorSpec([None] * len(array.shape), tf.int32) for name, array in inputs.items()}
    in_graph = tf.function(network, input_signature=[signature])
    for given in (inputs, make_inputs([(1, []), (6, [(1, 4)])])):
        mask = network.mask_of(given).numpy()
        np.testing.assert_allclose(in_graph(given).numpy()[mask], network(given).numpy()[mask], rtol=1e-5, atol=1e-5)


@variants(2)
def test_attention_probabilities_are_those_of_the_layers(options):
    """They sum to 1, are 0 at padding, and those of the second layer come from the first one's result."""
    network, inputs = make_flat(**options), make_inputs()
    items = network.items_of(inputs).numpy()
    for layer in (0, 1):
        probs = network.attention_probs(inputs, layer).numpy()
        np.testing.assert_allclose(probs.sum(-1), 1, rtol=1e-5)
        assert probs[np.broadcast_to(~items[None, :, None], probs.shape)].max() == 0
    fused, index = network.positions(inputs)
    x = network.stacked[0](network.embed(inputs), fused[0], index, items)
    second = network.stacked[1]
    y = second.preprocess(x, x) if hasattr(second, "preprocess") else x
    expected = second.attn.attention_probs(y, fused[-1], index, items)
    np.testing.assert_allclose(probs[:, items], expected.numpy()[:, items], rtol=1e-5, atol=1e-7)


# ---------------------------------------- dropout


RATES = ["dropout", "dropatt", "embed_dropout", "token_dropout"]


def test_training_without_any_rate_is_inference():
    network, inputs = make_flat(), make_inputs()
    np.testing.assert_array_equal(network(inputs, training=True), network(inputs))
    np.testing.assert_array_equal(network(inputs, training=True, dropout_key=KEY), network(inputs))


@pytest.mark.parametrize("rate", [*RATES[:2], *(pytest.param(rate, marks=SLOW) for rate in RATES[2:])])
def test_every_rate_drops_by_its_key_and_in_training_alone(rate):
    network, inputs = make_flat(n_layer=1, **{rate: 0.5}), make_inputs()
    expected = make_flat(n_layer=1)(inputs).numpy()
    np.testing.assert_array_equal(network(inputs), expected)
    np.testing.assert_array_equal(network(inputs, training=False, dropout_key=KEY), expected)
    dropped = network(inputs, training=True, dropout_key=KEY).numpy()
    assert np.abs(dropped - expected).max() > 0.01
    np.testing.assert_array_equal(network(inputs, training=True, dropout_key=KEY), dropped)
    drawn = [network(inputs, training=True).numpy() for _ in range(2)]
    for different in (network(inputs, training=True, dropout_key=KEY + 1).numpy(), *drawn):
        assert np.abs(different - dropped).max() > 1e-3
    assert np.abs(drawn[0] - drawn[1]).max() > 1e-3


def test_embed_dropout_drops_components_of_characters_and_of_words_at_its_rate():
    network = make_flat(embed_dropout=0.25, d_embed=8, d_model=8, n_bigram=0)
    for projection in (network.char_proj, network.lex_proj):
        projection.kernel.assign(np.eye(8))
        projection.bias.assign(np.zeros(8))
    network.embedding.assign(np.ones(network.embedding.shape))
    inputs = make_inputs([(40, [(i, i + 1) for i in range(39)])] * 40)
    found = network.embed(inputs, [KEY + i for i in range(4)]).numpy()
    np.testing.assert_allclose(np.unique(found), [0, 1 / 0.75], rtol=1e-4)
    for part in (found[:, :40], found[:, 40:]):
        assert (part == 0).mean() == pytest.approx(0.25, abs=0.02)  # 12,000 draws: 0.004 is a deviation


# ---------------------------------------- saving and errors


@variants(2, 3, more=[{"kind": name} for name in FUSIONS])
def test_its_configuration_makes_it_again(options):
    network, inputs = make_flat(**options), make_inputs()
    copy = type(network).from_config(network.get_config())
    assert copy.get_config() == network.get_config()
    copy.build()
    copy.set_weights(network.get_weights())
    np.testing.assert_array_equal(copy(inputs), network(inputs))
    assert keras.saving.get_registered_object("txl_tf>Flat") is txl_tf.Flat


BAD = [
    ({"n_token": 0}, "n_token", "1"),
    ({"d_model": 7}, "d_model", "even"),
    ({"d_model": 10, "n_head": 4}, "d_model", "n_head=4"),
    ({"fusion": "sum"}, "fusion", "ff_two"),
    ({"fusion": "gate"}, "fusion", "ff_two"),
    ({"rel_pos_init": 2}, "rel_pos_init", "1"),
    ({"residual": "both"}, "residual", "own"),
    ({"k_proj": "no"}, "k_proj", "True"),
    ({"embed_dropout": 1.0}, "embed_dropout", "[0, 1)"),
]


def test_bad_arguments_are_errors():
    for options, name, limit in BAD:
        with raises_parameter(name, options[name], limit=limit):
            make_flat(**options)
            pytest.fail(f"no error: {options}")


@pytest.mark.parametrize("cls", [txl_tf.Flat, txl_tf.layers.FlatLayer, txl_tf.layers.LatticeAttn])
def test_configurations_of_earlier_versions_load_unless_an_option_was_removed(cls):
    options = {**SETTINGS, "n_token": N_TOKEN} if cls is txl_tf.Flat else {"d_model": 8, "n_head": 2}
    options |= {"d_inner": 12} if cls is txl_tf.layers.FlatLayer else {}
    old = {**options, **FlatConfig.removed}
    assert cls.from_config(old).get_config().keys() == cls(**options).get_config().keys()
    for name, value in {"q_proj": False, "r_proj": False, "attn_ff": True, "pre": "n", "activation": "leaky"}.items():
        with raises_parameter(name, value, [FlatConfig.removed[name]]):
            cls.from_config({**old, name: value})
    with raises_parameter("pre", "", error=UnknownArgumentError):
        cls(**options, pre="")


def test_the_attention_of_an_old_layer_is_checked_too():
    layer = txl_tf.layers.FlatLayer(8, 2, 12, attention={"k_proj": False})
    config = layer.get_config()
    old = {**config, "attention": {**config["attention"], "q_proj": True, "attn_ff": False}}
    assert txl_tf.layers.FlatLayer.from_config(old).get_config() == config
    with raises_parameter("q_proj", False):
        txl_tf.layers.FlatLayer.from_config({**config, "attention": {"q_proj": False}})


def test_a_run_of_an_earlier_version_loads_unless_an_option_was_removed(tmp_path):
    make_run_of_flat(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["model"] |= FlatConfig.removed
    write_json(str(tmp_path / "config.json"), {name: value for name, value in config.items() if name != "checksum"})
    tagger, _ = txl_tf.load_run(tmp_path)
    assert isinstance(tagger.network, txl_tf.Flat) and not RunFolder(tmp_path).read_config()["model"].keys() & {"pre"}

    config["model"]["attn_ff"] = True
    write_json(str(tmp_path / "config.json"), {name: value for name, value in config.items() if name != "checksum"})
    with raises_naming(ValueError, "config.json", "attn_ff", True):
        txl_tf.load_run(tmp_path)
