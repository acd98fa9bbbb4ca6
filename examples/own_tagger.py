"""Builds a tagger from your own Keras encoder, here a BiLSTM, and the CRF of txl_tf: which part of a date is the year?

    python examples/own_tagger.py

`txl_tf.Tagger` adds the emission layer and the CRF to a network, trains them by the likelihood of whole sequences of
tags, and reports precision, recall and F1 of the parts (year and month). The tagger is saved, and exported as a
SavedModel that does not need txl_tf. F1 on held-out dates is 1.00, after 20 s on two CPU cores.
"""

import re
from pathlib import Path

from absl import flags

from txl_programs.flag_values import values
from txl_programs.program import read_flags, run

flags.DEFINE_string("output", "runs/parts", "Folder for tagger.keras and the SavedModel.")
flags.DEFINE_integer("n_dates", 4000, "Dates to learn from.")
flags.DEFINE_integer("epochs", 4, "Epochs of the training.")
flags.DEFINE_integer("seed", 0, "Seed of weights, of shuffling and of dropout.")

read_flags(__name__)

import keras
import numpy as np

import txl_tf
from txl_tf.data.pairs.dates import make_dates

LABELS = ["O", "B-YEAR", "I-YEAR", "B-MONTH", "I-MONTH"]
LENGTH = 40  # characters of the longest date
MONTHS = "jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec"


def to_arrays(pairs):
    """The characters of dates and their tags, 0 at padding: int32 `[rows, LENGTH]` each.

    `pairs` is a list of `(date as written, the same date in ISO 8601)`. A month that is written as a number has no tag.
    """
    chars = np.array([list(written.encode().ljust(LENGTH, b"\0")) for written, _ in pairs], np.int32)
    tags = np.zeros_like(chars)
    for row, (written, iso) in zip(tags, pairs, strict=True):
        for kind, pattern in (("YEAR", rf"{iso[:4]}|'{iso[2:4]}"), ("MONTH", rf"\b({MONTHS})[a-z]*")):
            part = re.search(pattern, written, re.IGNORECASE)
            if part:
                row[part.start() : part.end()] = LABELS.index(f"I-{kind}")
                row[part.start()] = LABELS.index(f"B-{kind}")
    return chars, tags


def make_tagger(seed=0):
    """Makes a tagger around a bidirectional LSTM of Keras."""
    chars = keras.Input([None], dtype="int32", name="chars")
    x = keras.layers.Embedding(128, 32, mask_zero=True)(chars)
    x = keras.layers.Bidirectional(keras.layers.LSTM(32, return_sequences=True))(x)
    return txl_tf.Tagger(keras.Model(chars, x), LABELS, output_dropout=0.1, seed=seed)


def show(text, tags):
    """Returns the parts that the tags (ids of `LABELS`) mark in a text, in one line: `2026 YEAR, Nov MONTH`."""
    names = np.array(LABELS)[tags]
    starts = [i for i, name in enumerate(names) if name.startswith("B-")]
    n = len(names)
    # A part ends before the next tag that is not I-, or with the last tag.
    ends = [next((j for j in range(i + 1, n) if not names[j].startswith("I-")), n) for i in starts]
    return ", ".join(f"{text[i:j]} {names[i][2:]}" for i, j in zip(starts, ends, strict=True))


def train(output, n_dates, epochs, seed):
    """Trains the tagger on written dates, and prints its F1.

    Saves it as `.keras` and as a SavedModel.
    """
    Path(output).mkdir(parents=True, exist_ok=True)  # before the training: an error here costs no training
    keras.utils.set_random_seed(seed)
    pairs = make_dates(n_dates, seed)
    tagger = make_tagger(seed)
    tagger.compile(keras.optimizers.Adam(5e-3))
    tagger.fit(*to_arrays(pairs["train"]), batch_size=64, epochs=epochs, verbose=2)

    chars, tags = to_arrays(pairs["test"])
    print(f"F1 of dates never seen: {tagger.evaluate(chars, tags, return_dict=True, verbose=0)['f1']:.3f}")
    print(f"{pairs['test'][0][0]}: {show(pairs['test'][0][0], tagger.predict_on_batch(chars[:1])[0])}")

    # To load the file, another program imports txl_tf first and then calls keras.saving.load_model(path).
    tagger.save(Path(output) / "tagger.keras")
    tagger.export(Path(output) / "saved_model", verbose=False)


def main():
    train(**values(("output", "n_dates", "epochs", "seed")))


if __name__ == "__main__":
    run(main)
