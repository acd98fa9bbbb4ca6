"""Compares all position schemes of txl_tf, as in the ablation of the paper (section 4.2, table 6).

    python tools/compare_positions.py --data_path=tinyshakespeare.txt --output=schemes.png
    python tools/compare_positions.py --positions=relative,alibi --train_steps=200        (some schemes, quick)

For every scheme, the program trains two models on one text: with and without memory. All models have about the same
number of parameters (a scheme with fewer parameters for positions gets a larger d_inner) and train for about the same
time: first the program measures the time of a step of each scheme. A scheme whose steps take half the time gets twice
as many steps.

The table is Markdown. Its numbers are nats per character of the last tenth of the text, in segments of 64:

    without memory    the model that was trained without memory
    with memory       the model that was trained with a memory of 128: mean and extremes over the seeds
    gain              the difference between both
    4 times           the model of "with memory", with a memory of 704: a token sees four times as many tokens
    train, evaluate   speed of training and evaluation with memory, relative to the first scheme

The picture needs matplotlib: pip install -e ".[plot]".
"""

import statistics
import time
from typing import Any

from absl import flags

from txl_config import SCHEMES
from txl_programs.flag_values import FLAGS, check_integers
from txl_programs.opening import bytes_for_training
from txl_programs.program import read_flags, run

flags.DEFINE_list("positions", list(SCHEMES), "Schemes to compare.")
flags.DEFINE_string("data_path", None, "Text file. Default: Python's reference manual.")
flags.DEFINE_integer(
    "train_steps", 2000, "Training steps of the first scheme. The others train for the same time.", lower_bound=1
)
flags.DEFINE_list("seeds", ["0"], "Seeds: one training run of every model for each.")
flags.DEFINE_integer("rounds", 5, "Number of turns that measure the speed.", lower_bound=1)
flags.DEFINE_string("output", None, "Picture to draw: a .png, .pdf or .svg file.")
check_integers("seeds")
flags.register_validator("seeds", bool, "must name at least one")
flags.register_validator("positions", bool, "must name at least one")

read_flags(__name__)

import keras
import numpy as np

import txl_tf
from txl_programs.pictures.drawing import COLORS, Figure, check_matplotlib, check_picture, format_of

SIZES = {
    "n_token": 256, "n_layer": 4, "d_model": 128, "d_embed": 128, "n_head": 4, "d_head": 32, "dropout": 0.0,
}  # fmt: skip
D_INNER = 512  # with relative positions
ROWS = 12  # of a training batch
SEGMENT = 64  # tokens
MEMORY = 128  # positions
LONGER = 4 * (SEGMENT + MEMORY) - SEGMENT  # memory with which a token sees four times as many tokens
STEPS_OF_A_TURN = 20


def make_model(positions, mem_len, seed):
    """A language model with these positions. Its d_inner gives it as many parameters as a model with relative ones.

    The numbers of parameters differ by less than the parameters of one unit of d_inner in each layer.
    """
    options: Any = {"context_len": SEGMENT} if positions == "learned" else {}

    def model(d_inner):
        return txl_tf.TransformerXLLM(
            **SIZES, d_inner=d_inner, mem_len=mem_len, positions=positions, seed=seed, **options
        )

    wanted = txl_tf.TransformerXLLM(**SIZES, d_inner=D_INNER, mem_len=mem_len).count_params()
    # A unit of d_inner is a column of a kernel, a row of another one and a number of a bias, in each layer.
    parameters_of_unit = SIZES["n_layer"] * (2 * SIZES["d_model"] + 1)
    return model(D_INNER + round((wanted - model(D_INNER).count_params()) / parameters_of_unit))


def compiled(lm, steps):
    """Compiles a model for a training run of `steps` steps, and returns it."""
    schedule = {"warmup_steps": steps // 20, "train_steps": steps, "min_lr_ratio": 0.1}
    lm.compile(txl_tf.make_optimizer(learning_rate=1e-3, **schedule))
    return lm


def batches(text):
    """Endless training batches of a text."""
    return txl_tf.segments(text, ROWS, SEGMENT, repeat=True)


def seconds_of(function):
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def compare_speed(schemes, train, valid):
    """Measures training and evaluation of all schemes in turns.

    Returns:
        `{scheme: (training, evaluation)}`: the seconds of a turn, medians over the rounds.
    """
    turns = []
    for positions in schemes:
        lm = compiled(make_model(positions, MEMORY, seed=0), 1_000_000)
        part = valid[: STEPS_OF_A_TURN * 4 * SEGMENT]
        turns.append(lambda lm=lm: lm.fit(batches(train), steps_per_epoch=STEPS_OF_A_TURN, verbose=0))
        turns.append(lambda lm=lm, part=part: lm.evaluate(txl_tf.segments(part, 4, SEGMENT), verbose=0))
    for turn in turns:  # traces
        turn()
    seconds = [[seconds_of(turn) for turn in turns] for _ in range(FLAGS.rounds)]
    medians = [statistics.median(column) for column in zip(*seconds, strict=True)]
    return dict(zip(schemes, zip(medians[::2], medians[1::2], strict=True), strict=True))


def compare_training(positions, steps, train, valid, seed):
    """Trains a model without memory and one with memory.

    Returns:
        Their validation loss in nats: `(without memory, with memory, the latter with four times the context)`.
    """
    nats = []
    for mem_len in (0, MEMORY):
        keras.utils.set_random_seed(seed)
        lm = compiled(make_model(positions, mem_len, seed), steps)
        lm.fit(batches(train), steps_per_epoch=steps, verbose=0)
        nats.append(lm.evaluate(txl_tf.segments(valid, 4, SEGMENT), verbose=0))
    lm.mem_len = LONGER  # of the model with memory, which was trained last
    return *nats, lm.evaluate(txl_tf.segments(valid, 4, SEGMENT), verbose=0)


def with_extremes(values):
    """The mean as text, with the smallest and the largest value if there are several."""
    mean = f"{statistics.mean(values):.3f}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.3f} to {max(values):.3f})"


def print_row(positions, steps, losses, ratios):
    """Prints a row of the table: the losses of all seeds, and the ratios of the speeds of training and evaluation."""
    without, with_memory, longer = zip(*losses, strict=True)
    gain = [a - b for a, b in zip(without, with_memory, strict=True)]
    cells = [with_extremes(values) for values in (without, with_memory, gain, longer)]
    parameters = make_model(positions, MEMORY, seed=0).count_params()
    print(
        f"| {positions} | {parameters:,} | {steps:,} | {' | '.join(cells)} | {ratios[0]:.2f} | {ratios[1]:.2f} |",
        flush=True,
    )


def draw(losses):
    """Bars with the losses in `{scheme: [(without memory, with memory, longer), ...]}`, averaged over the seeds."""
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    labels = "without memory", f"memory {MEMORY}", f"memory {LONGER}, trained with {MEMORY}"
    means = np.array([np.mean(scheme_losses, 0) for scheme_losses in losses.values()])
    positions = np.arange(len(losses))
    for i, label in enumerate(labels):
        bars = axes.bar(positions + (i - 1) * 0.27, means[:, i], 0.25, label=label, color=COLORS[i])
        axes.bar_label(bars, fmt="%.2f", fontsize=7)
    axes.set_xticks(positions, list(losses))
    axes.set(ylabel="nats a character", ylim=(0.9 * means.min(), None))
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def main():
    unknown = [name for name in FLAGS.positions if name not in SCHEMES]
    if unknown:
        raise txl_tf.ParameterError("positions", unknown[0], list(SCHEMES))
    if FLAGS.output:
        check_matplotlib()
        check_picture(FLAGS.output)
    train, valid = bytes_for_training(more_than=4 * SEGMENT)
    seconds = compare_speed(FLAGS.positions, train, valid)
    first = seconds[FLAGS.positions[0]]
    print("| positions | parameters | steps | without memory | with memory | gain | 4 times | train | evaluate |")
    print("|---|---|---|---|---|---|---|---|---|")
    losses = {}
    for positions, times in seconds.items():
        ratios = [a / b for a, b in zip(first, times, strict=True)]
        steps = max(1, round(FLAGS.train_steps * ratios[0]))
        losses[positions] = [compare_training(positions, steps, train, valid, int(seed)) for seed in FLAGS.seeds]
        print_row(positions, steps, losses[positions], ratios)
    if FLAGS.output:
        draw(losses).savefig(FLAGS.output, format=format_of(FLAGS.output), dpi=150)
        print(FLAGS.output)


if __name__ == "__main__":
    run(main)
