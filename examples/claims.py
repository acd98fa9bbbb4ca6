"""Tests what the articles claim about positions and memory, in short training runs with several seeds each.

    python examples/claims.py --data_path=tinyshakespeare.txt                     all claims
    python examples/claims.py --data_path=tinyshakespeare.txt --claim=memory      one claim

positions  Sinusoids and learned positions work equally well in the vanilla language model, also beyond the lengths in
           the training.
biases     The scores of Transformer-XL need two biases, u for content and v for positions.
memory     To use memory in evaluation, a model needs memory in training.

The models have 4 layers of width 128 and read characters (bytes) in segments of 64. The tables show nats per character
on the last tenth of the text: the mean over the seeds, with the lowest and the highest value. The default text is
Python's reference manual.
"""

from absl import flags

from txl_programs.flag_values import FLAGS, check_integers
from txl_programs.opening import bytes_for_training
from txl_programs.program import read_flags, run

flags.DEFINE_string("data_path", None, "Text file; default: Python's reference manual.")
flags.DEFINE_enum("claim", "all", ["all", "positions", "biases", "memory"], "Claim to test.")
flags.DEFINE_integer("train_steps", 2000, "Steps of each training run.", lower_bound=1)
flags.DEFINE_list("seeds", ["0", "1", "2"], "Seeds of each training run.")
check_integers("seeds")
flags.register_validator("seeds", bool, "must name at least one")

read_flags(__name__)

import keras
import numpy as np

import txl_tf

SIZES = {
    "n_token": 256, "n_layer": 4, "d_model": 128, "d_embed": 128, "n_head": 4, "d_head": 32, "d_inner": 512,
    "dropout": 0.0,
}  # fmt: skip
ROWS, SEGMENT = 12, 64  # rows of a training batch, and characters of each
LONGEST = 3 * SEGMENT  # most characters that a vanilla model reads at once


def trained(lm, text):
    """Trains a model on a text, and returns the model."""
    steps = FLAGS.train_steps
    optimizer = txl_tf.make_optimizer(learning_rate=1e-3, warmup_steps=steps // 20, train_steps=steps, min_lr_ratio=0.1)
    lm.compile(optimizer)
    lm.fit(txl_tf.segments(text, ROWS, SEGMENT, repeat=True), steps_per_epoch=steps, verbose=0)
    return lm


def nll(lm, text, mem_len=None):
    """Mean nll of a text, in nats. With `mem_len`, a model with the same weights and this length of memory reads it."""
    if mem_len is not None:
        weights = lm.get_weights()
        lm = txl_tf.TransformerXLLM(**SIZES, mem_len=mem_len)
        lm.set_weights(weights)
        lm.compile()
    return lm.evaluate(txl_tf.segments(text, 4, SEGMENT), verbose=0)


def tied(lm):
    """Makes a model use the bias u in place of v, which is then not trained. Returns the model."""
    lm.network.r_r_bias.trainable = False
    lm.network.r_r_bias = lm.network.r_w_bias
    return lm


def nll_by_length(lm, text, n_windows=256):
    """Mean nll of the first, second and third `SEGMENT` characters of a window, float `[3]`, in nats.

    The mean is over `n_windows` windows of the text.
    """
    starts = np.linspace(0, len(text) - LONGEST - 1, n_windows).astype(int)
    windows = text[starts[:, None] + np.arange(LONGEST + 1)]
    nll_of_characters, _ = lm.score(windows[:, :-1], windows[:, 1:])
    return nll_of_characters.numpy().reshape(n_windows, 3, SEGMENT).mean((0, 2))


def positions(train, valid, seed):
    """The loss with sinusoids and with learned positions: `{row: {column: nats}}`."""
    rows = {}
    for name, pos_embed in (("sinusoids", "sin"), ("learned", "learned")):
        lm = trained(txl_tf.TransformerLM(**SIZES, pos_embed=pos_embed, context_len=LONGEST, seed=seed), train)
        places = (f"characters {i * SEGMENT + 1} to {(i + 1) * SEGMENT}" for i in range(3))
        rows[name] = {"segments": nll(lm, valid), **dict(zip(places, nll_by_length(lm, valid), strict=True))}
    return rows


def biases(train, valid, seed):
    """The loss with two biases and with one: `{row: {column: nats}}`."""
    models = {name: txl_tf.TransformerXLLM(**SIZES, mem_len=SEGMENT, seed=seed) for name in ("u and v", "u = v")}
    tied(models["u = v"])
    return {name: {"nats": nll(trained(lm, train), valid)} for name, lm in models.items()}


def memory(train, valid, seed):
    """The loss with and without memory, in training and in evaluation: `{row: {column: nats}}`."""
    rows = {}
    for mem_len in (0, SEGMENT):
        lm = trained(txl_tf.TransformerXLLM(**SIZES, mem_len=mem_len, seed=seed), train)
        columns = {f"{length} in evaluation": nll(lm, valid, length) for length in (0, SEGMENT, 4 * SEGMENT)}
        rows[f"{mem_len} in training"] = columns
    return rows


def print_table(title, by_seed):
    """Prints a Markdown table of the means over the seeds, with the smallest and the largest value.

    `by_seed` is a list with the `{row: {column: nats}}` of each seed.
    """
    first = by_seed[0]
    columns = list(next(iter(first.values())))
    print(f"\n| {title} | {' | '.join(columns)} |\n|{'---|' * (1 + len(columns))}", flush=True)
    for row in first:
        cells = []
        for column in columns:
            values = [rows[row][column] for rows in by_seed]
            cells.append(f"{np.mean(values):.3f} ({min(values):.3f} to {max(values):.3f})")
        print(f"| {row} | {' | '.join(cells)} |", flush=True)


def main():
    train, valid = bytes_for_training(more_than=LONGEST)
    for claim in (positions, biases, memory):
        if FLAGS.claim in ("all", claim.__name__):
            by_seed = []
            for seed in map(int, FLAGS.seeds):
                keras.utils.set_random_seed(seed)
                by_seed.append(claim(train, valid, seed))
            print_table(claim.__name__, by_seed)


if __name__ == "__main__":
    run(main)
