"""Adds an auxiliary loss to a language model: a second head also predicts the character after the next one.

    python examples/auxiliary_loss.py

A subclass of `TransformerXLLM` has one more layer and its own `segment_nll`, which `fit` calls with the memory of each
row. The second head is used only in training. The logs, `evaluate` and everything else are still those of the language
model, because `only_gradient` makes a term with the gradient of the auxiliary loss and the value 0.
"""

from pathlib import Path

from absl import flags

from txl_programs.flag_values import values
from txl_programs.program import read_flags, run

flags.DEFINE_string("output", "runs/two_ahead", "Folder for model.keras.")
flags.DEFINE_integer("n_chars", 200_000, "Characters of Python's manual to learn from.")
flags.DEFINE_integer("epochs", 3, "Epochs of the training.")
flags.DEFINE_integer("seed", 0, "Seed of weights and of dropout.")

read_flags(__name__)

import keras
import numpy as np
import tensorflow as tf

import txl_tf
from txl_tf.data.text_files import pydoc_text
from txl_tf.equations import only_gradient

SIZES = {"n_token": 128, "n_layer": 2, "d_model": 64, "d_embed": 64, "n_head": 4, "d_head": 16, "d_inner": 128}
WEIGHT = 0.3  # of the auxiliary loss


@keras.saving.register_keras_serializable("examples")
class TwoAhead(txl_tf.TransformerXLLM):
    """A language model that learns to predict two characters at a time."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.second_head = keras.layers.Dense(self.network.n_token, name="second_head")
        self.second_head.build((None, None, self.network.d_model))

    def segment_nll(self, tokens, labels, mems, training=None, **options):
        """Returns `(nll [batch, tgt_len], is_counted, new_mems)`. `is_counted` is `None`: all labels count."""
        hidden, new_mems = self.outputs(tokens, mems, training=training, **options)
        nll = self.nll_of(hidden, labels)  # [batch, tgt_len]
        if training:
            # The label of the next position is the character after the next one. The last position has none.
            logits = self.second_head(hidden[:, :-1])
            second = tf.nn.sparse_softmax_cross_entropy_with_logits(labels[:, 1:], logits)
            nll += only_gradient(WEIGHT * tf.pad(second, [[0, 0], [0, 1]]))
        return nll, None, new_mems


def train(output, n_chars, epochs, seed):
    """Trains the model, prints its loss on held-out text, and saves it."""
    Path(output).mkdir(parents=True, exist_ok=True)  # before the training: an error here costs no training
    keras.utils.set_random_seed(seed)
    text = np.frombuffer(pydoc_text().encode("ascii", "replace")[:n_chars], np.uint8).astype(np.int32) % 128
    text, held_out = np.split(text, [len(text) * 9 // 10])
    lm = TwoAhead(**SIZES, mem_len=32, seed=seed)
    steps = len(text) // (16 * 32)
    lm.compile(txl_tf.make_optimizer(learning_rate=5e-3, warmup_steps=steps // 10, train_steps=steps * epochs))
    lm.fit(txl_tf.segments(text, 16, 32), epochs=epochs, verbose=2)
    print(f"held out: {lm.evaluate(txl_tf.segments(held_out, 4, 32), verbose=0):.3f} nats per character")
    lm.save(Path(output) / "model.keras")


def main():
    train(**values(("output", "n_chars", "epochs", "seed")))


if __name__ == "__main__":
    run(main)
