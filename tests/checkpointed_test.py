"""`tf.train.Checkpoint` and `tf.saved_model.save`: all weights of all models, and the state of dropout."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from conforming import MODELS, ONE_LAYER, SLOW
from helpers import raises_parameter

import txl_tf
from txl_tf import layers

FAST = "adaptive_language_model", "network_in_keras_model"
CASES = [
    pytest.param(case, id=case.name, marks=[] if case.name in FAST else [pytest.mark.slow]) for case in (*MODELS, *SLOW)
]


def saved(path, **objects):
    """The path of a new checkpoint, and the number of variables in it, without the counter of checkpoints."""
    path = tf.train.CheckpointManager(tf.train.Checkpoint(**objects), path, max_to_keep=1).save()
    names = [name for name, _ in tf.train.list_variables(path) if not name.startswith(("_CHECKPOINT", "save_counter"))]
    return path, len(names)


def restore(path, **objects):
    status = tf.train.Checkpoint(**objects).restore(path)
    status.assert_consumed()
    status.assert_existing_objects_matched()


def loss(case, model, batch):
    """The loss of a batch, of a model with a loss of its own or a functional model."""
    inputs, labels = batch
    if hasattr(model, "softmax"):
        return tf.reduce_mean(model.softmax.nll(model.network(inputs)[0], labels, model.network.embedding))
    if hasattr(model, "crf"):
        return tf.reduce_mean(model.nll(inputs, labels))
    if case.loss is None:
        return model.loss_of((inputs, labels), labels)[0]
    return case.loss(labels, model(inputs, training=True))


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_holds_every_variable_and_gives_the_same_loss(case, tmp_path):
    model, other, batch = case.make_random(), case.make("float32"), case.make_batch()
    for generator in (layer.seed_generator for layer in model._flatten_layers() if hasattr(layer, "seed_generator")):
        if generator is not None:
            generator.state.assign([3, 5])
    path, n = saved(tmp_path, model=model)
    assert n == len(model.variables) > len(model.weights)
    restore(path, model=other)
    for variable, restored in zip(model.variables, other.variables, strict=True):
        np.testing.assert_array_equal(restored, variable)
    assert float(loss(case, other, batch)) == float(loss(case, model, batch))


def make_lm():
    return txl_tf.TransformerXLLM(**ONE_LAYER, mem_len=4, cutoffs=[8], div_val=2)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_fit_goes_on_after_a_checkpoint_of_a_compiled_model(case, tmp_path):
    data = tf.data.Dataset.from_tensors(case.make_batch()).repeat(2)
    model, other = case.compile(case.make_random()), case.compile(case.make("float32"))
    model.fit(data, verbose=0)
    path, _ = saved(tmp_path, model=model)
    tf.train.Checkpoint(model=other).restore(path).assert_existing_objects_matched()
    if hasattr(other, "seed"):
        other.seed = model.seed
    assert other.fit(data, verbose=0).history == model.fit(data, verbose=0).history


# ---------------------------------------------------------------------------------------------- models of the user's


class Own(keras.Model):
    """A model of the user's with layers of the library as attributes."""

    def __init__(self):
        super().__init__()
        self.embedding = layers.AdaptiveEmbedding(20, 8, 8, cutoffs=[6], div_val=2)
        self.encoder = layers.EncoderLayer(8, 2, 16, rate=0.1)
        self.softmax = layers.AdaptiveSoftmax(20, 8, 8, cutoffs=[6], div_val=2)

    def call(self, tokens):
        return self.softmax(self.encoder(self.embedding(tokens)), embedding=self.embedding)


class InLists(keras.Model):
    """Keras shows TensorFlow no layer that a model has in a list."""

    def __init__(self):
        super().__init__()
        self.encoders = [layers.EncoderLayer(8, 2, 16, rate=0.1) for _ in range(2)]

    def call(self, x):
        for encoder in self.encoders:
            x = encoder(x)
        return x


class Longer(layers.EncoderLayer):
    """A layer of the library with more layers, in a list that grows and in a dictionary."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.more, self.named = [], {"last": (keras.layers.Dense(8),)}
        for _ in range(2):
            self.more.append(keras.layers.Dense(8))

    def build(self, x_shape):
        super().build(x_shape)
        for layer in (*self.more, *self.named["last"]):
            layer.build(x_shape)


def test_a_model_of_the_user_s_is_whole(tmp_path):
    tokens = np.random.default_rng(0).integers(0, 20, [2, 5])
    model, other = Own(), Own()
    expected, _ = model(tokens), other(tokens)
    path, n = saved(tmp_path, model=model)
    assert n == len(model.variables)
    restore(path, model=other)
    np.testing.assert_array_equal(other(tokens), expected)


@pytest.mark.ci
@pytest.mark.parametrize(
    "make_optimizer",
    [
        pytest.param(lambda: txl_tf.make_optimizer(0.01, train_steps=20), id="make_optimizer"),
        pytest.param(lambda: keras.optimizers.SGD(0.1, momentum=0.9), id="SGD", marks=pytest.mark.slow),
    ],
)
def test_a_loop_of_ones_own_goes_on_with_the_optimizer(make_optimizer, tmp_path):
    tokens = np.random.default_rng(0).integers(0, 20, [2, 5])

    def step(model, optimizer):
        with tf.GradientTape() as tape:
            loss = -tf.reduce_mean(model(tokens, training=True)[..., 0])  # it drops
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return float(loss)

    model, optimizer, other, fresh = Own(), make_optimizer(), Own(), make_optimizer()
    other(tokens)
    step(model, optimizer)
    path, _ = saved(tmp_path, model=model, optimizer=optimizer)
    expected = [step(model, optimizer) for _ in range(2)]
    tf.train.Checkpoint(model=other, optimizer=fresh).restore(path).assert_existing_objects_matched()
    assert [step(other, fresh) for _ in range(2)] == expected and expected[0] != expected[1]


def test_layers_in_lists_of_a_subclass_are_seen(tmp_path):
    layer, other = Longer(8, 2, 16, rate=0.1), Longer(8, 2, 16, rate=0.1)
    for each in (layer, other):
        each.build((None, None, 8))
    path, n = saved(tmp_path, layer=layer)
    assert n == len(layer.variables) == 16 + 3 * 2 + 1
    restore(path, layer=other)
    for variable, restored in zip(layer.variables, other.variables, strict=True):
        np.testing.assert_array_equal(restored, variable)


def test_a_network_of_the_user_s_in_a_tagger_is_whole(tmp_path):
    class Network(keras.Model):
        def __init__(self):
            super().__init__()
            self.parts = [keras.layers.Embedding(20, 4), keras.layers.Dense(4)]

        def call(self, tokens):
            return self.parts[1](self.parts[0](tokens))

    tokens = np.random.default_rng(0).integers(0, 20, [2, 5]).astype(np.int32)
    tagger, other = (txl_tf.Tagger(Network(), ["O", "B-A", "I-A"]) for _ in range(2))
    expected, _ = tagger(tokens), other(tokens)
    path, n = saved(tmp_path, tagger=tagger)
    assert n == len(tagger.variables)
    restore(path, tagger=other)
    np.testing.assert_array_equal(other(tokens), expected)


def test_a_list_of_a_keras_model_is_saved_by_its_variables(tmp_path):
    """The way round that docs/guide.md gives."""
    x = np.random.default_rng(0).normal(size=[2, 3, 8]).astype(np.float32)
    model, other = InLists(), InLists()
    expected, _ = model(x), other(x)
    path, n = saved(tmp_path, variables=model.variables)
    assert n == len(model.variables)
    restore(path, variables=other.variables)
    np.testing.assert_array_equal(other(x), expected)


def test_a_network_is_restored_before_it_is_built(tmp_path):
    tokens = np.random.default_rng(0).integers(0, 23, [2, 5])
    network, other = (txl_tf.TransformerXL(**ONE_LAYER, cutoffs=[8], div_val=2) for _ in range(2))
    hidden, _ = network(tokens)
    path, _ = saved(tmp_path, network=network)
    status = tf.train.Checkpoint(network=other).restore(path)
    np.testing.assert_array_equal(other(tokens)[0], hidden)
    status.assert_consumed()


def test_keras_takes_no_notice(tmp_path):
    """Lists that TensorFlow sees are no further layers, weights or files of Keras."""
    network = make_lm().network
    assert {"decoder_layers-0", "seed_generator"} <= {*vars(network.checkpointed)}
    assert len(network.layers) == 2 and len(network.weights) == len({id(weight) for weight in network.weights})


# -------------------------------------------------------------------------------------------------------- SavedModels


@pytest.mark.parametrize("case", [pytest.param(*case.values, id=case.id, marks=pytest.mark.slow) for case in CASES[1:]])
def test_a_saved_model_computes_the_same(case, tmp_path):
    model, inputs = case.make_random(), case.inputs()
    tf.saved_model.save(model, tmp_path / "saved")
    serve = tf.saved_model.load(tmp_path / "saved").signatures["serving_default"]
    named = dict(zip(("source", "target"), inputs, strict=True)) if isinstance(inputs, tuple) else inputs
    tensors = keras.tree.map_structure(tf.constant, named)
    (output, *_) = (serve(**tensors) if isinstance(tensors, dict) else serve(tensors)).values()
    np.testing.assert_allclose(output, keras.tree.flatten(model(inputs))[0], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_saved_language_model_serves_the_log_probs_of_texts(tmp_path):
    lm, tokens = make_lm(), np.random.default_rng(0).integers(0, 23, [2, 5]).astype(np.int32)
    expected, _ = lm(tokens)
    tf.saved_model.save(lm, tmp_path / "lm")
    loaded = tf.saved_model.load(tmp_path / "lm")
    served = loaded.signatures["serving_default"](tokens=tf.constant(tokens))
    np.testing.assert_allclose(served["log_probs"], expected, rtol=1e-5, atol=1e-5)


def test_a_tagger_that_was_never_called_is_no_saved_model(tmp_path):
    tagger = txl_tf.Tagger(keras.layers.Embedding(20, 4), ["O", "B-A"])
    with raises_parameter("export", None):
        tf.saved_model.save(tagger, tmp_path / "tagger")
