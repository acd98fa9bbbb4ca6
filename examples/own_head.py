"""A head of your own on Transformer-XL, with memory: which kind of character comes next in a text?

    python examples/own_head.py

The labels are classes instead of tokens: letter, digit, space or other. `fit` and `evaluate` still carry the memory
from segment to segment, because the model is a language model whose `segment_nll` computes another loss. For labels of
whole texts, see classifier.py; for tags of the tokens of a sentence, own_tagger.py.
"""

from pathlib import Path

from absl import flags

from txl_programs.flag_values import values
from txl_programs.program import read_flags, run

flags.DEFINE_string("output", "runs/kinds", "Folder for model.keras.")
flags.DEFINE_integer("n_chars", 200_000, "Characters of Python's manual to learn from.")
flags.DEFINE_integer("epochs", 2, "Epochs of the training.")
flags.DEFINE_integer("seed", 0, "Seed of weights and of dropout.")

read_flags(__name__)

import keras
import numpy as np
import tensorflow as tf

import txl_tf
from txl_tf.data.text_files import pydoc_text

SIZES = {"n_token": 128, "n_layer": 2, "d_model": 64, "d_embed": 64, "n_head": 4, "d_head": 16, "d_inner": 128}
KINDS = ["letter", "digit", "space", "other"]


@keras.saving.register_keras_serializable("examples")
class Kinds(txl_tf.TransformerXLLM):
    """Predicts a class for every token of a stream."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.head = keras.layers.Dense(len(KINDS), name="head")
        self.head.build((None, None, self.network.d_model))

    def segment_nll(self, tokens, labels, mems, **options):
        """Returns `(nll [batch, tgt_len], is_counted, new_mems)`. `is_counted` is `None`: all labels count."""
        hidden, new_mems = self.outputs(tokens, mems, **options)
        nll = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, self.head(hidden))
        return nll, None, new_mems

    def probabilities(self, tokens, mems=None):
        """The probabilities of the classes, `[batch, tgt_len, kinds]`, and the memory for the next segment."""
        hidden, new_mems = self.network(tokens, mems)
        return tf.nn.softmax(self.head(hidden)), new_mems


def kinds_of(text):
    """The class of every character: indices of `KINDS`, int32 `[n]`. `text` is an array of the characters' codes."""
    # The class is the first test that a character passes. The last test, for "other", is always true.
    tests = [[*map(getattr(str, f"is{kind}"), map(chr, text))] for kind in ("alpha", "digit", "space")]
    return np.argmax([*tests, np.ones(len(text), bool)], 0).astype(np.int32)


def train(output, n_chars, epochs, seed):
    """Trains the model, prints its loss and an example from held-out text, and saves it."""
    Path(output).mkdir(parents=True, exist_ok=True)  # before the training: an error here costs no training
    keras.utils.set_random_seed(seed)
    text = np.frombuffer(pydoc_text().encode("ascii", "replace")[:n_chars], np.uint8).astype(np.int32) % 128
    text, held_out = np.split(text, [len(text) * 9 // 10])
    table = tf.constant(kinds_of(np.arange(128)))

    def segments(text, rows):
        """Segments of a text, with the classes of the next characters as labels."""
        return txl_tf.segments(text, rows, 32).map(lambda tokens, labels: (tokens, tf.gather(table, labels)))

    model = Kinds(**SIZES, mem_len=32, seed=seed)
    steps = len(text) // (16 * 32)
    model.compile(txl_tf.make_optimizer(learning_rate=5e-3, warmup_steps=steps // 10, train_steps=steps * epochs))
    model.fit(segments(text, 16), epochs=epochs, verbose=2)
    print(f"held out: {model.evaluate(segments(held_out, 4), verbose=0):.3f} nats per character")
    probs, _ = model.probabilities(held_out[None, :40])
    print(f"after {bytes(held_out[:40].tolist())!r}: {KINDS[np.argmax(probs[0, -1])]}")
    model.save(Path(output) / "model.keras")


def main():
    train(**values(("output", "n_chars", "epochs", "seed")))


if __name__ == "__main__":
    run(main)
