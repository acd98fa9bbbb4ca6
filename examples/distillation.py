"""Distils a language model into a smaller one, which learns from the text and from the teacher's probabilities.

    python examples/distillation.py

Both models read the same segments, each with its own memory: `fit` carries whatever `initial_mems` and `segment_nll`
return. The student is saved as an ordinary `TransformerXLLM`. On the help texts of Python's manual, it is compared with
the same model trained without a teacher.
"""

import math
from pathlib import Path
from typing import Any

from absl import flags

from txl_programs.flag_values import values
from txl_programs.program import read_flags, run

flags.DEFINE_string("output", "runs/distilled", "Folder for student.keras.")
flags.DEFINE_integer("n_chars", 200_000, "Characters of Python's manual to learn from.")
flags.DEFINE_integer("epochs", 3, "Epochs of each training.")
flags.DEFINE_integer("seed", 0, "Seed of weights and of dropout.")

read_flags(__name__)

import keras
import numpy as np
import tensorflow as tf

import txl_tf
from txl_tf.data.text_files import pydoc_text

TEACHER: dict[str, Any] = {"n_layer": 4, "d_model": 96, "d_embed": 96, "n_head": 4, "d_head": 24, "d_inner": 192}
STUDENT: dict[str, Any] = {"n_layer": 2, "d_model": 48, "d_embed": 48, "n_head": 4, "d_head": 12, "d_inner": 96}
COMMON: dict[str, Any] = {"n_token": 128, "mem_len": 32, "dropout": 0.0}
WEIGHT = 0.5  # of the teacher in the student's loss


def student_of(teacher, **sizes):
    """Makes a language model with the arguments `sizes` that learns from the text and from the teacher."""
    n_layer = sizes["n_layer"]

    class Student(txl_tf.TransformerXLLM):
        """A model whose list of memories contains those of its own layers, then those of the teacher's layers."""

        def initial_mems(self, batch_size):
            return [*super().initial_mems(batch_size), *teacher.initial_mems(batch_size)]

        def segment_nll(self, tokens, labels, mems, training=None, dropout_key=None, **options):
            own = {"training": training, "dropout_key": dropout_key}
            hidden, own_mems = self.outputs(tokens, mems[:n_layer], **own, **options)
            nll = self.nll_of(hidden, labels)
            teacher_hidden, teacher_mems = teacher.outputs(tokens, mems[n_layer:], **options)
            if training:
                probs = tf.stop_gradient(tf.exp(teacher.log_probs_of(teacher_hidden)))
                cross_entropy = -tf.reduce_sum(probs * self.log_probs_of(hidden), -1)
                nll = (1 - WEIGHT) * nll + WEIGHT * cross_entropy
            return nll, None, [*own_mems, *teacher_mems]

    return Student(**sizes)


def trained(lm, text, epochs, steps):
    """Trains a model, and returns it. `steps`: the number of steps of an epoch, for the learning rate."""
    lm.compile(txl_tf.make_optimizer(learning_rate=5e-3, warmup_steps=steps // 10, train_steps=steps * epochs))
    lm.fit(txl_tf.segments(text, 16, 32), epochs=epochs, verbose=2)
    return lm


def train(output, n_chars, epochs, seed):
    """Trains the teacher, the student, and the same model without a teacher. Prints their losses, saves the student."""
    Path(output).mkdir(parents=True, exist_ok=True)  # before the training: an error here costs no training
    keras.utils.set_random_seed(seed)
    text = np.frombuffer(pydoc_text().encode("ascii", "replace")[:n_chars], np.uint8).astype(np.int32) % 128
    text, held_out = np.split(text, [len(text) * 9 // 10])
    steps = math.ceil((len(text) - 1) // 16 / 32)  # batches of an epoch; the last segment may be shorter
    teacher = trained(txl_tf.TransformerXLLM(**COMMON, **TEACHER, seed=seed), text, epochs, steps)
    alone = trained(txl_tf.TransformerXLLM(**COMMON, **STUDENT, seed=seed), text, epochs, steps)
    student = trained(student_of(teacher, **COMMON, **STUDENT, seed=seed), text, epochs, steps)

    distilled = txl_tf.TransformerXLLM(**COMMON, **STUDENT)
    distilled.set_weights(student.get_weights())
    for name, lm in {"teacher": teacher, "student alone": alone, "student of the teacher": distilled}.items():
        lm.compile()
        print(f"{name}: {lm.evaluate(txl_tf.segments(held_out, 4, 32), verbose=0):.3f} nats per character")
    distilled.save(Path(output) / "student.keras")


def main():
    train(**values(("output", "n_chars", "epochs", "seed")))


if __name__ == "__main__":
    run(main)
