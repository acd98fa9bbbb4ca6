"""Training speed, measured side by side against tests/reference_model.py, the plain port of the original.

    python tools/benchmark.py
    python tools/benchmark.py --rounds=3 --tgt_len=64 --mem_len=64

All contestants take turns in one process, a few steps each, so that what else the machine does falls on all of them.
The table gives the median over all steps and the quartiles.
"""

import json
import os
import sys
import time
from pathlib import Path

from absl import app, flags, logging

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # errors come as exceptions; the rest is noise
sys.path.insert(0, str(Path(__file__).parents[1]))

import keras
import numpy as np
import tensorflow as tf

import txl_tf
from tests.reference_model import ReferenceModel

flags.DEFINE_integer("n_layer", 6, "Layers.")
flags.DEFINE_integer("d_model", 256, "Width of hidden states and embeddings.")
flags.DEFINE_integer("n_head", 4, "Attention heads.")
flags.DEFINE_integer("d_head", 64, "Width of a head.")
flags.DEFINE_integer("d_inner", 1024, "Width inside the feed-forward layers.")
flags.DEFINE_integer("tgt_len", 128, "Tokens of a segment.")
flags.DEFINE_integer("mem_len", 128, "Positions of memory.")
flags.DEFINE_integer("batch_size", 8, "Rows.")
flags.DEFINE_integer("n_token", 256, "Size of the vocabulary.")
flags.DEFINE_list("cutoffs", [], "Cutoffs of the adaptive softmax.")
flags.DEFINE_integer("div_val", 1, "Divide the width of the embeddings by it from bin to bin.")
flags.DEFINE_float("dropout", 0.1, "Dropout rate.")
flags.DEFINE_float("dropatt", 0.0, "Dropout rate of the attention probabilities.")
flags.DEFINE_integer("rounds", 10, "Turns of each contestant.")
flags.DEFINE_integer("steps", 4, "Steps in a turn.")
flags.DEFINE_bool("jit", False, "Measure with XLA, too.")
flags.DEFINE_string("json", None, "File to write the figures to.")

FLAGS = flags.FLAGS


def model_arguments():
    names = "n_layer d_model n_head d_head d_inner mem_len n_token div_val dropout dropatt"
    arguments = {name: FLAGS[name].value for name in names.split()}
    return {**arguments, "d_embed": FLAGS.d_model, "cutoffs": [int(cutoff) for cutoff in FLAGS.cutoffs]}


def random_batch():
    """Tokens and labels `[batch, tgt_len]`, word i about 1 / i as frequent as the first."""
    share = 1 / np.arange(1, FLAGS.n_token + 1)
    draws = np.random.default_rng(0).choice(FLAGS.n_token, [FLAGS.batch_size, FLAGS.tgt_len + 1], p=share / share.sum())
    return draws[:, :-1].astype(np.int32), draws[:, 1:].astype(np.int32)


def reference_step():
    """A function that trains the reference for one step."""
    model = ReferenceModel(**model_arguments())
    model.compile(learning_rate=1e-3, train_steps=10000)
    tokens, labels = (tf.constant(ids.T) for ids in random_batch())
    mems = model.initial_mems(FLAGS.batch_size)

    def step():
        nonlocal mems
        loss, _, _, mems = model.train_step(tokens, labels, mems)
        return float(loss)

    return step


def library_step(dtype, jit_compile=False):
    """A function that trains `TransformerXLLM` for one step, the function that `fit` calls."""
    lm = txl_tf.TransformerXLLM(**model_arguments(), dtype=dtype)
    lm.compile(txl_tf.make_optimizer(learning_rate=1e-3, train_steps=10000), jit_compile=jit_compile)
    steps = iter(tf.data.Dataset.from_tensors(random_batch()).repeat())
    lm.make_train_function()
    lm.carried_mems = lm.initial_mems(FLAGS.batch_size)
    return lambda: float(lm.train_function(steps)["loss"])


def main(argv):
    del argv
    logging.set_verbosity(logging.WARNING)
    keras.utils.set_random_seed(0)
    contestants = {
        "reference float32": reference_step(),
        "txl_tf float32": library_step("float32"),
        "txl_tf bfloat16": library_step("mixed_bfloat16"),
    }
    if FLAGS.jit:
        contestants["txl_tf float32, XLA"] = library_step("float32", jit_compile=True)
        contestants["txl_tf bfloat16, XLA"] = library_step("mixed_bfloat16", jit_compile=True)
    seconds = {name: [] for name in contestants}
    for name, step in contestants.items():
        started = time.perf_counter()
        step()
        print(f"{name}: first step after {time.perf_counter() - started:.1f} s", flush=True)
        for _ in range(3):
            step()
    for _ in range(FLAGS.rounds):
        for name, step in contestants.items():
            for _ in range(FLAGS.steps):
                started = time.perf_counter()
                step()
                seconds[name].append(time.perf_counter() - started)

    tokens = FLAGS.batch_size * FLAGS.tgt_len
    rates = {name: tokens / np.percentile(times, [75, 50, 25]) for name, times in seconds.items()}
    baseline = rates["reference float32"][1]
    print(f"\n{'training':24}{'tokens/s':>10}{'quartiles':>18}{'ratio':>8}")
    for name, (slow, median, fast) in rates.items():
        print(f"{name:24}{median:>10,.0f}{f'{slow:,.0f} - {fast:,.0f}':>18}{median / baseline:>8.2f}")
    if FLAGS.json:
        Path(FLAGS.json).write_text(json.dumps({name: list(rate) for name, rate in rates.items()}, indent=2))


if __name__ == "__main__":
    app.run(main)
