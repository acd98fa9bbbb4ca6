"""Builds an encoder-decoder from the layers of txl_tf with Keras's functional API. It converts dates to ISO 8601.

    python examples/encoder_decoder.py

The layers apply dropout in `fit`, and Keras passes the padding masks from layer to layer. The model is saved, and
exported as a SavedModel that does not need txl_tf. (`txl_tf.Transformer` is the same model as one class, with label
smoothing, cached generation and beam search.) Of 1,000 held-out dates, 97% are right, after 140 s on two CPU cores.
"""

from pathlib import Path

from absl import flags

from txl_programs.flag_values import values
from txl_programs.program import read_flags, run

flags.DEFINE_string("output", "runs/iso", "Folder for model.keras and the SavedModel.")
flags.DEFINE_integer("n_dates", 20000, "Dates to learn from.")
flags.DEFINE_integer("epochs", 6, "Epochs of the training.")
flags.DEFINE_integer("seed", 0, "Seed of weights, of shuffling and of dropout.")

read_flags(__name__)

import keras
import numpy as np

from txl_tf import layers
from txl_tf.data.pairs.dates import make_dates

D_MODEL, HEADS, DFF, RATE = 64, 4, 128, 0.1
START = 1  # id of the symbol before a target
LENGTH, ISO_LENGTH = 40, 10  # most characters of a source, and of a target


def to_ids(texts, length):
    """The bytes of texts as ids, 0 at padding: int32 `[rows, length]`."""
    return np.array([list(text.encode().ljust(length, b"\0")) for text in texts], np.int32)


def embed(ids):
    """Embeds characters and adds their positions. Id 0 is padding; Keras passes its mask to all later layers."""
    x = layers.Embeddings(128, D_MODEL, mask_zero=True)(ids)
    return layers.PositionalEncoding(D_MODEL, max_len=64, rate=RATE)(x)


def make_model(n_layer=2):
    """Makes the model, from `[source, target]`, int `[batch, any]` each, to logits `[batch, any, 128]`.

    The logits at a position of the target are scores of the character after it.
    """
    source = keras.Input([None], dtype="int32", name="source")
    target = keras.Input([None], dtype="int32", name="target")
    encoded, decoded = embed(source), embed(target)
    for _ in range(n_layer):
        encoded = layers.EncoderLayer(D_MODEL, HEADS, DFF, RATE)(encoded)
    for _ in range(n_layer):
        decoder = layers.DecoderLayer(D_MODEL, HEADS, DFF, RATE)
        decoded = decoder(decoded, encoded, use_causal_mask=True, return_attention_scores=False)
    return keras.Model([source, target], keras.layers.Dense(128, name="logits")(decoded))


def translate(model, source):
    """Translates sources greedily: the likeliest next character at each step. Returns a list of texts."""
    target = np.full([len(source), 1], START, np.int32)
    for _ in range(ISO_LENGTH):
        logits = model.predict_on_batch([source, target])
        target = np.concatenate([target, logits[:, -1:].argmax(-1).astype(np.int32)], 1)
    return [bytes(row.tolist()).decode(errors="replace") for row in target[:, 1:]]


def train(output, n_dates, epochs, seed):
    """Trains the model on written dates, and prints its share of right translations.

    Saves it as `.keras` and as a SavedModel.
    """
    Path(output).mkdir(parents=True, exist_ok=True)  # before the training: an error here costs no training
    keras.utils.set_random_seed(seed)
    pairs = make_dates(n_dates, seed)
    source = to_ids([written for written, _ in pairs["train"]], LENGTH)
    labels = to_ids([iso for _, iso in pairs["train"]], ISO_LENGTH)
    target = np.pad(labels[:, :-1], [(0, 0), (1, 0)], constant_values=START)

    model = make_model()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(2e-3), loss, metrics=["accuracy"])
    model.fit([source, target], labels, batch_size=64, epochs=epochs)

    written, iso = zip(*pairs["test"], strict=True)
    translations = translate(model, to_ids(written, LENGTH))
    print(f"{written[0]}  ->  {translations[0]}")
    is_right = [translation == date for translation, date in zip(translations, iso, strict=True)]
    print(f"right dates of {len(iso)} never seen: {np.mean(is_right):.3f}")

    # To load the file, another program imports txl_tf first and then calls keras.saving.load_model(path).
    model.save(Path(output) / "model.keras")
    model.export(Path(output) / "saved_model", verbose=False)


def main():
    train(**values(("output", "n_dates", "epochs", "seed")))


if __name__ == "__main__":
    run(main)
