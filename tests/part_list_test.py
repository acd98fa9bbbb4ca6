"""Lists of layers: a constructor may change them, and later changes are refused, as graphs would not notice."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import txl_tf
from txl_tf.errors import FixedAttributeError
from txl_tf.layers import TransformerXLLayer

SIZES = {"n_token": 20, "n_layer": 2, "d_model": 8, "d_embed": 8, "n_head": 2, "d_head": 4, "d_inner": 8, "mem_len": 4}
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
    assert all(gradient is not None for gradient in tape.gradient(hidden, own.trainable_variables)[2:])
    tf.train.Checkpoint(own=own).write(str(tmp_path / "weights"))
    shapes = dict(tf.train.list_variables(str(tmp_path / "weights")))
    assert sum("layer_0" in name or "decoder_layers-0" in name for name in shapes) > 5
