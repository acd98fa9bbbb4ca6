"""Lists of layers: a constructor may change them, and later changes are refused, as graphs would not notice."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import SMALL

import txl_tf
from txl_tf.errors import FixedAttributeError
from txl_tf.layers import EncoderLayer, TransformerXLLayer

pytestmark = pytest.mark.ci

SIZES = {**SMALL, "mem_len": 4}
IDS = np.arange(6)[None]

CHANGES = {
    "item": lambda layers: layers.__setitem__(0, layers[1]),
    "slice": lambda layers: layers.__setitem__(slice(0, 1), layers[1:]),
    "append": lambda layers: layers.append(layers[0]),
    "insert": lambda layers: layers.insert(0, layers[0]),
    "extend": lambda layers: layers.extend(layers[:1]),
    "+=": lambda layers: layers.__iadd__(layers[:1]),
    "pop": lambda layers: layers.pop(),
    "del": lambda layers: layers.__delitem__(0),
    "remove": lambda layers: layers.remove(layers[0]),
    "clear": lambda layers: layers.clear(),
    "reverse": lambda layers: layers.reverse(),
}


@keras.saving.register_keras_serializable("part_list_test")
class Doubling(TransformerXLLayer):
    def call(self, *args, **kwargs):
        return super().call(*args, **kwargs) * 2


@keras.saving.register_keras_serializable("part_list_test")
class Network(txl_tf.TransformerXL):
    """Replaces the first of its layers."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.decoder_layers[0] = Doubling.from_config(self.decoder_layers[0].get_config())


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_list_does_not_change_after_the_constructor(change):
    network = txl_tf.TransformerXL(**SIZES)
    before = list(network.decoder_layers)
    with pytest.raises(FixedAttributeError, match="decoder_layers"):
        change(network.decoder_layers)
    assert list(network.decoder_layers) == before


def test_a_layer_that_a_constructor_replaces_computes_trains_and_is_saved(tmp_path):
    plain, own = txl_tf.TransformerXL(**SIZES), Network(**SIZES)
    for network in (plain, own):
        network(IDS)
    names = [[weight.path.split("/", 1)[1] for weight in network.weights] for network in (plain, own)]
    assert names[0] == names[1] and [layer.name for layer in own.layers] == [layer.name for layer in plain.layers]
    own.set_weights(plain.get_weights())
    layers = own.decoder_layers
    assert isinstance(layers[0], Doubling) and any(layer is layers[0] for layer in own._flatten_layers())
    own.dropout = 0.4
    assert layers[0].dropout == 0.4
    with tf.GradientTape() as tape:
        hidden = own(IDS)[0]
    assert not np.allclose(hidden, plain(IDS)[0])
    assert all(gradient is not None for gradient in tape.gradient(hidden, own.trainable_variables))
    tf.train.Checkpoint(own=own).write(str(tmp_path / "weights"))
    shapes = dict(tf.train.list_variables(str(tmp_path / "weights")))
    assert sum("layer_0" in name or "decoder_layers-0" in name for name in shapes) > 5


@keras.saving.register_keras_serializable("part_list_test")
class Tripling(EncoderLayer):
    def call(self, x, *args, return_attention_scores=False, **kwargs):
        outputs = super().call(x, *args, return_attention_scores=return_attention_scores, **kwargs)
        return tf.nest.map_structure(lambda output: 3 * output, outputs)


@keras.saving.register_keras_serializable("part_list_test")
class Translator(txl_tf.Transformer):
    """Replaces the first layer of the encoder: as an item, or with the whole list."""

    def __init__(self, *args, whole=False, **kwargs):
        super().__init__(*args, **kwargs)
        self.whole = whole
        own = Tripling.from_config(self.encoder.stacked[0].get_config())
        if whole:
            self.encoder.stacked = [own, *self.encoder.stacked[1:]]
        else:
            self.encoder.stacked[0] = own

    def get_config(self):
        return {**super().get_config(), "whole": self.whole}


PAIRS = {"num_layers": 2, "d_model": 8, "num_heads": 2, "dff": 8, "input_vocab_size": 7, "target_vocab_size": 7}


@pytest.mark.parametrize("whole", [False, True])
def test_a_constructor_may_change_the_layers_of_an_encoder(whole, tmp_path):
    model, ids = Translator(**PAIRS, max_len=9, rate=0.0, whole=whole), np.arange(6)[None] + 1
    model.compile("adam")
    own = model.encoder.stacked[0]
    before = [weight.numpy() for weight in own.trainable_weights]
    model.fit(ids, ids, verbose=0)
    after = [weight.numpy() for weight in own.trainable_weights]
    assert before and all(np.any(old != new) for old, new in zip(before, after, strict=True))
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert isinstance(loaded.encoder.stacked[0], Tripling)
    np.testing.assert_allclose(loaded((ids, ids)), model((ids, ids)), rtol=1e-6)


def test_later_changes_of_an_encoder_and_whole_lists_are_refused():
    model = txl_tf.Transformer(**PAIRS, max_len=9)
    network = txl_tf.TransformerXLLM(**SIZES).network
    tener = txl_tf.Tener(n_token=9, n_layer=2, d_model=8, n_head=2, d_inner=8)
    for layer, name in ((model.encoder, "stacked"), (network, "decoder_layers"), (tener, "stacked")):
        layers = getattr(layer, name)
        with pytest.raises(FixedAttributeError, match=name):
            layers[0] = layers[1]
        with pytest.raises(FixedAttributeError, match=name):
            setattr(layer, name, layers[::-1])
        setattr(layer, name, layers)  # the same list
        assert getattr(layer, name) is layers


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_lists_of_plain_values_do_not_change(change):
    """Their copies in configurations may."""
    lm = txl_tf.TransformerXLLM(**SIZES, cutoffs=[5, 12], div_val=2)
    with pytest.raises(FixedAttributeError, match="cutoffs"):
        change(lm.cutoffs)
    config = lm.get_config()
    assert lm.cutoffs == [5, 12] and list(config["cutoffs"]) == [5, 12]


def test_all_lists_of_settings_are_fixed():
    tagger = txl_tf.Tagger(txl_tf.Tener(n_token=9, n_layer=1, d_model=8, n_head=2, d_inner=8), ["O", "B-X", "I-X"])
    lm = txl_tf.TransformerXLLM(**SIZES, cutoffs=[5, 12], div_val=2)
    capacities = [4, 3]
    lm.compile("adam", static_shapes=True, bin_capacities=capacities)
    capacities[0] = 9
    assert lm.bin_capacities == lm.get_compile_config()["bin_capacities"] == [4, 3]
    for values in (tagger.labels, tagger.crf.allowed[0], lm.bin_capacities):
        with pytest.raises(FixedAttributeError):
            values[0] = values[-1]
    config = tagger.get_config()
    config["labels"] += ["B-Y", "I-Y"]
    assert txl_tf.Tagger.from_config(config).labels == ["O", "B-X", "I-X", "B-Y", "I-Y"]
    assert tagger.labels == ["O", "B-X", "I-X"] and type(tagger.get_config()["labels"]) is list
    crf = txl_tf.layers.CRF(1)
    crf.allowed = np.ones([3, 3], bool)  # another list, of a free setting
    with pytest.raises(FixedAttributeError, match="allowed"):
        crf.allowed[0][0] = False
