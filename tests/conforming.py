"""The models of `conformance_test.py` and `gpu_test.py`. A new one joins `MODELS` and gets all their checks."""

from collections.abc import Callable
from typing import NamedTuple

import keras
import numpy as np
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
        optimizer = txl_tf.make_optimizer(0.02, train_steps=100)
        optimizer.epsilon = 1e-5  # so the rounding of a gradient near 0 does not become a step
        model.compile(optimizer=optimizer, **options)
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


def bilstm(dtype):
    sizes = {"n_token": 23, "n_bigram": 9, "d_embed": 6, "d_bigram": 4, "d_model": 8}
    return txl_tf.Tagger(txl_tf.BiLSTM(**sizes, n_layer=2, dtype=dtype), LABELS, dtype=dtype)


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
    Conforming("language_model", language_model(), segment),
    Conforming(
        "variant_language_model",
        language_model(
            pre_lnorm=True,
            norm="rms",
            activation="swiglu",
            positions="rotary",
            tie_weight=False,
            label_smoothing=0.1,
            z_loss=0.001,
            d_head=4,
            cutoffs=[8],
        ),  # fmt: skip
        segment,
    ),
    Conforming("pre_lnorm_language_model", language_model(pre_lnorm=True, activation="gelu", reset_token=3), segment),
    Conforming(
        "adaptive_vanilla_language_model",
        language_model(
            txl_tf.TransformerLM,
            cutoffs=[8],
            div_val=2,
            proj_share_all_but_first=True,
            same_length=True,
            pos_embed="learned",
        ),  # fmt: skip
        segment,
    ),
    Conforming("transformer", encoder_decoder(), pairs, takes=lambda batch: batch),
    Conforming(
        "transformer_pre_norm",
        encoder_decoder(norm_first=True, share_embeddings=True, label_smoothing=0.1, pos_embed="learned"),
        pairs,
        takes=lambda batch: batch,
    ),
    Conforming("tener", tagger(txl_tf.Tener, scale=True), tagged_chars),
    Conforming("flat", tagger(txl_tf.Flat, scale=True), tagged_lattice),
    Conforming("bilstm", bilstm, tagged_chars),
]
