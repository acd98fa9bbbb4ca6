"""Contestants that are taggers: plain ports of the original programs, tests/reference_tagger.py, and the library.

A maker is a function `make(lattice, shape)`, which returns `(model, tag)`: a compiled model, FLAT with `lattice` and
TENER without it; and a function that returns the tags for inputs.

Shapes:
    n: characters of a sentence, w: its words    L: the longest n of a batch    T: the longest n + w of a batch
"""

import functools
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from benchmarking.shapes import REFERENCE
from benchmarking.work import Calls, Steps, padded, port, repeated

SIZES = ["n_token", "n_bigram", "d_embed", "d_model", "n_head", "d_inner", "dropout", "embed_dropout"]
AS_THEY_COME = "txl_tf float32 as they come"  # the library with the batches of the reference, of any lengths
LABELS = ["O", *(f"{prefix}-{kind}" for kind in range(8) for prefix in "BMES")]


def is_tagging(mode):
    """Whether the contestants of a mode are taggers."""
    return mode.startswith(("tener", "flat"))


def contestants(mode):
    """The contestants: `{name: function of a shape that returns the work}`."""
    makers = {
        REFERENCE: (plain_tagger, False),
        AS_THEY_COME: (library_tagger, False),
        "txl_tf float32": (library_tagger, True),
        "txl_tf bfloat16": (functools.partial(library_tagger, dtype="mixed_bfloat16"), True),
    }
    return {name: functools.partial(work, mode, make, by_length) for name, (make, by_length) in makers.items()}


def work(mode, make, by_length, shape):
    """The work of a contestant: it tags all sentences once, or trains on them once.

    `by_length` groups sentences of similar length in batches.
    """
    lattice = mode.startswith("flat")
    batches = sentence_batches(shape, lattice, by_length)
    model, tag = make(lattice, shape)
    model(batches[0][0])  # builds it
    if mode.endswith("tagging"):
        return Calls(lambda: [np.asarray(tag(inputs)) for inputs, _ in batches])
    return Steps(model, repeated(batches), steps=len(batches))


def plain_tagger(lattice, shape):
    """The maker of the plain ports."""
    import keras

    reference = port("reference_tagger")
    sizes = {name: shape[name] for name in SIZES}
    network = reference.PlainFlat(**sizes, fusion=shape["fusion"], most=200) if lattice else None
    network = network or reference.PlainTener(**sizes, n_layer=shape["n_layer"])
    model = reference.PlainTagger(network, shape["n_tag"], rate=0.3)
    model.compile(keras.optimizers.SGD(8e-4, 0.9))
    return model, model.tag


def library_network(lattice, shape, dtype="float32"):
    """The library's network: `Flat` with `lattice`, else `Tener`."""
    import txl_tf

    sizes: Any = {name: shape[name] for name in [*SIZES, "n_layer"]} | {"d_bigram": shape["d_embed"]}
    own: Any = {"fusion": shape["fusion"], "k_proj": False, "residual": "own"} if lattice else {"dropatt": 0.15}
    return (txl_tf.Flat if lattice else txl_tf.Tener)(**sizes, **own, dtype=dtype)


def library_tagger(lattice, shape, dtype="float32"):
    """The maker of the library's tagger."""
    import txl_tf

    options = {"start_end": False, "constraints": False, "output_dropout": 0.3, "dtype": dtype}
    model = txl_tf.Tagger(library_network(lattice, shape, dtype), LABELS, **options)
    model.compile(txl_tf.make_optimizer(8e-4, clip=None, clip_value=5.0, optimizer="sgd"))
    return model, tf.function(lambda inputs: model.decode(inputs)[0], reduce_retracing=True)


# ------------------------------------------------------------------------------------------------------- sentences


class Sentence(NamedTuple):
    """A sentence with the words of its lattice, as int32 ids and positions."""

    chars: np.ndarray  # [n]
    words: np.ndarray  # [w]
    bigrams: np.ndarray  # [n]
    starts: np.ndarray  # [w], first character of each word
    ends: np.ndarray  # [w], last character of each word
    tags: np.ndarray  # [n]


def random_sentences(shape):
    """Random sentences. Each has half as many words as characters.

    Their lengths are as in the dataset Resume; or `tgt_len`, if that is not 0.
    """
    rng = np.random.default_rng(0)
    sentences = []
    for _ in range(shape["sentences"]):
        n = shape["tgt_len"] or int(np.clip(rng.lognormal(3.2, 0.75), 2, 180))
        starts = np.sort(rng.integers(0, n, n // 2))
        ends = np.minimum(starts + rng.choice([1, 2, 3], len(starts), p=[0.75, 0.17, 0.08]), n - 1)
        ids = rng.integers(2, shape["n_token"], n + len(starts))
        bigrams = rng.integers(2, shape["n_bigram"], n)
        sentences.append([ids[:n], ids[n:], bigrams, starts, ends])
    tags = [rng.integers(0, shape["n_tag"], len(chars)) for chars, *_ in sentences]
    tagged = zip(sentences, tags, strict=True)
    return [Sentence(*(x.astype(np.int32) for x in [*ids, tags_of_one])) for ids, tags_of_one in tagged]


def sentence_batches(shape, lattice, by_length):
    """Batches `(inputs, tags)` of all sentences, in a random order. `by_length` groups similar lengths."""
    sentences = random_sentences(shape)
    order = np.random.default_rng(1).permutation(len(sentences))
    if by_length:
        lengths = [len(sentence.chars) + lattice * len(sentence.words) for sentence in sentences]
        order = order[np.argsort([lengths[i] for i in order], kind="stable")]
    indices_of_batches = np.random.default_rng(2).permutation(order.reshape(-1, shape["batch_size"]))
    inputs = lattice_inputs if lattice else character_inputs
    batches = [[sentences[i] for i in indices] for indices in indices_of_batches]
    return [(inputs(batch), padded([sentence.tags for sentence in batch])) for batch in batches]


def character_inputs(batch):
    """The inputs of `txl_tf.Tener`, int32 `[batch, L]` each."""
    return {
        "chars": padded([sentence.chars for sentence in batch]),
        "bigrams": padded([sentence.bigrams for sentence in batch]),
    }


def lattice_inputs(batch):
    """The inputs of `txl_tf.Flat`: `lattice`, `pos_s` and `pos_e` `[batch, T]`, and `bigrams` `[batch, L]`."""
    return {
        "lattice": padded([np.concatenate([sentence.chars, sentence.words]) for sentence in batch]),
        "bigrams": padded([sentence.bigrams for sentence in batch]),
        "seq_len": np.array([len(sentence.chars) for sentence in batch], np.int32),
        "lex_num": np.array([len(sentence.words) for sentence in batch], np.int32),
        "pos_s": padded([np.append(np.arange(len(sentence.chars)), sentence.starts) for sentence in batch]),
        "pos_e": padded([np.append(np.arange(len(sentence.chars)), sentence.ends) for sentence in batch]),
    }
