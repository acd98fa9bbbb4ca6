"""What every model of the library must do. A new model joins `MODELS` and gets all of these checks."""

from collections.abc import Callable
from typing import NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import SMALL, randomise

import txl_tf

ONE_LAYER = {**SMALL, "n_layer": 1}


class Conforming(NamedTuple):
    """A model under test.

    name: for the test's id.
    make: `make(dtype)` -> a new model that computes in the Keras dtype policy `dtype`, without dropout.
    make_batch: `make_batch()` -> (inputs, targets), NumPy arrays of four rows.
    loss: what `compile` is given as loss; `None` where the model has its own.
    takes: `takes(batch)` -> what the model is called with, by default the inputs.
    """

    name: str
    make: Callable
    make_batch: Callable
    loss: object = None
    takes: Callable = staticmethod(lambda batch: batch[0])

    def inputs(self):
        return self.takes(self.make_batch())

    def make_random(self, dtype="float32"):
        """`make`, with the same random numbers in all weights, so that none of them is hidden by a zero."""
        model = self.make(dtype)
        randomise(model)
        return model

    def compile(self, model, **options):
        if self.loss is not None:
            options["loss"] = self.loss
        model.compile(optimizer=txl_tf.make_optimizer(0.02, train_steps=100), **options)
        return model


def language_model(model=txl_tf.TransformerXLLM, **options):
    def make(dtype):
        return model(**{**ONE_LAYER, "mem_len": 4, "dropout": 0.0, "dtype": dtype, **options})

    return make


def segment():
    text = np.random.default_rng(0).integers(0, 23, [4, 6]).astype(np.int32)
    return text[:, :-1], text[:, 1:]


def classifier(dtype):
    """Stock Keras around the network: the last hidden state tells the class of a text."""
    tokens = keras.Input([5], dtype="int32")
    hidden, _ = txl_tf.TransformerXL(**ONE_LAYER, mem_len=4, dropout=0.0, dtype=dtype)(tokens)
    return keras.Model(tokens, keras.layers.Dense(3, dtype="float32")(hidden[:, -1]))


def classes():
    return segment()[0], np.array([0, 2, 1, 2], np.int32)


def encoder_decoder(**options):
    def make(dtype):
        return txl_tf.Transformer(
            num_layers=1, d_model=8, num_heads=2, dff=12, input_vocab_size=23, target_vocab_size=23, max_len=9,
            rate=0.0, dtype=dtype, **options,
        )  # fmt: skip

    return make


def pairs():
    source, target = segment()
    source[1, 3:] = target[2, 4:] = 0  # padding
    return source, target


LABELS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]


def tagger(network, **options):
    def make(dtype):
        sizes = {"n_token": 23, "n_bigram": 9, "d_embed": 6, "d_bigram": 4, "d_model": 8, "n_head": 2, "d_inner": 12}
        return txl_tf.Tagger(network(**sizes, n_layer=1, dtype=dtype, **options), LABELS, dtype=dtype)

    return make


def tagged_chars():
    rng = np.random.default_rng(0)
    chars, bigrams = rng.integers(1, [[[23]], [[9]]], [2, 4, 5]).astype(np.int32)
    chars[1, 3:] = bigrams[1, 3:] = 0  # padding
    return {"chars": chars, "bigrams": bigrams}, rng.integers(0, 5, [4, 5]).astype(np.int32)


def tagged_lattice():
    inputs, tags = tagged_chars()
    lattice = np.pad(inputs["chars"], [(0, 0), (0, 2)])
    pos_s, pos_e = (np.tile(np.pad(np.arange(5), (0, 2)), (4, 1)).astype(np.int32) for _ in range(2))
    lattice[0, 5:], pos_s[0, 5:], pos_e[0, 5:] = [7, 8], [0, 2], [1, 4]
    lattice[1, 3], pos_s[1, 3:], pos_e[1, 3:] = 9, [1, 0, 0, 0], [2, 0, 0, 0]
    lengths = {"seq_len": np.array([5, 3, 5, 5], np.int32), "lex_num": np.array([2, 1, 0, 0], np.int32)}
    return {"lattice": lattice, "bigrams": inputs["bigrams"], **lengths, "pos_s": pos_s, "pos_e": pos_e}, tags


MODELS = [
    Conforming("language_model", language_model(), segment),
    Conforming(
        "adaptive_language_model",
        language_model(cutoffs=[8], div_val=2, proj_share_all_but_first=True, untie_r=True, same_length=True),
        segment,
    ),
    Conforming(
        "network_in_keras_model",
        classifier,
        classes,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    ),
    Conforming("vanilla_language_model", language_model(txl_tf.TransformerLM, mem_len=0), segment),
]


SLOW = [
    Conforming(
        "adaptive_vanilla_language_model",
        language_model(txl_tf.TransformerLM, cutoffs=[8], div_val=2, proj_share_all_but_first=True, same_length=True),
        segment,
    ),
    Conforming("transformer", encoder_decoder(), pairs, takes=lambda batch: batch),
    Conforming(
        "transformer_pre_norm",
        encoder_decoder(norm_first=True, share_embeddings=True, label_smoothing=0.1),
        pairs,
        takes=lambda batch: batch,
    ),
    Conforming("tener", tagger(txl_tf.Tener, scale=True), tagged_chars),
    Conforming("flat", tagger(txl_tf.Flat, scale=True), tagged_lattice),
]


@pytest.fixture(
    params=[*MODELS, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)],
    ids=lambda case: case.name,
    scope="module",
)
def case(request):
    return request.param


def repeated(batch, n):
    """A dataset of n times the same batch."""
    dataset = tf.data.Dataset.from_tensors(batch).repeat(n)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return dataset.with_options(options)


def outputs(model, inputs):
    """All outputs as float32 arrays."""
    return [tf.cast(output, tf.float32).numpy() for output in tf.nest.flatten(model(inputs))]


def weights(model):
    return [variable.numpy() for variable in model.trainable_variables]


def assert_all_close(arrays, expected, **tolerance):
    for got, array in zip(arrays, expected, strict=True):
        np.testing.assert_allclose(got, array, **tolerance)


# Eight steps move weights by up to 0.16. Where a gradient is near 0, Adam turns its rounding into a step.
AFTER_ADAM = {"rtol": 0, "atol": 5e-4}


@pytest.fixture(scope="module")
def trained(case):
    """Losses by epoch of eight steps on one batch, and the weights after them."""
    model = case.compile(case.make_random())
    history = model.fit(repeated(case.make_batch(), 4), epochs=2, verbose=0).history
    return history["loss"], weights(model)


def test_fitting_one_batch_lowers_the_loss_and_moves_every_weight(case, trained):
    losses, after = trained
    assert losses[1] < losses[0]
    before = case.make_random().trainable_variables
    for variable, array in zip(before, after, strict=True):
        moved = np.abs(array - variable.numpy()).max() > 1e-4
        assert moved or variable.path.endswith(("wk/bias", "w_k/bias", "w_r/bias"))  # the same for all keys of a query


def test_keras_file_holds_all_of_the_model(case, tmp_path):
    inputs = case.inputs()
    model = case.make_random()
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert_all_close(outputs(loaded, inputs), outputs(model, inputs), rtol=0, atol=0)


def test_xla_computes_the_same_outputs(case):
    inputs = case.inputs()
    model = case.make_random()
    compiled = tf.function(model, jit_compile=True, autograph=False)
    assert_all_close(
        outputs(compiled, tf.nest.map_structure(tf.constant, inputs)), outputs(model, inputs), rtol=1e-5, atol=1e-5
    )


def test_fit_under_xla_trains_the_same(case, trained):
    model = case.compile(case.make_random(), jit_compile=True)
    history = model.fit(repeated(case.make_batch(), 4), epochs=2, verbose=0).history
    losses, expected = trained
    np.testing.assert_allclose(history["loss"], losses, rtol=1e-5)
    assert_all_close(weights(model), expected, **AFTER_ADAM)


@pytest.mark.parametrize("policy, tolerance", [("mixed_bfloat16", 0.1), ("mixed_float16", 0.02)])
def test_half_precision_is_close_to_single(case, policy, tolerance):
    inputs = case.inputs()
    expected = outputs(case.make_random(), inputs)
    got = outputs(case.make_random(policy), inputs)
    assert all(np.isfinite(array).all() for array in got)
    assert_all_close(got, expected, rtol=0, atol=tolerance)
    assert np.abs(got[0] - expected[0]).max() > 0  # it was not float32 after all


def test_two_replicas_train_as_one(case, trained, two_replicas):
    with two_replicas.scope():
        model = case.compile(case.make_random())
    history = model.fit(repeated(case.make_batch(), 4), epochs=2, verbose=0).history
    losses, expected = trained
    np.testing.assert_allclose(history["loss"], losses, rtol=1e-5)
    assert_all_close(weights(model), expected, **AFTER_ADAM)
