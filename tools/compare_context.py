"""Compares Transformer-XL with the vanilla Transformer, as in its paper: speed of evaluation, and an ablation.

    python tools/compare_context.py --data_path=tinyshakespeare.txt                 (both parts, and the picture)
    python tools/compare_context.py --part=speed --n_layer=3 --attn_lens=100,200    (one part, smaller)

speed      evaluation time per token, in seconds, if every token sees attn_len tokens (table 9 of the paper). The
           vanilla model reads a window of attn_len tokens for every token. Transformer-XL has them in its memory, and
           reads segments of 128 tokens. The sizes are those of configs/enwik8_base.cfg, with one text at a time. The
           models take turns; the numbers are medians over the rounds.
training   four models with about the same number of parameters, trained for as many steps on one text (table 6 of the
           paper): relative or absolute positions, with or without memory. The table has their validation loss, read in
           segments; and for models without memory, the loss of the first 20,000 tokens if each is predicted from a full
           window. The picture has the loss by the number of tokens before the predicted one. Absolute positions need
           fewer parameters, so these models have a larger d_inner. The runs are in output_dir. The same command resumes
           them.

The tables are Markdown. The picture needs matplotlib: pip install -e ".[plot]".
"""

import os
import statistics
import time
from typing import Any

from absl import flags

from txl_config import EvaluationConfig, ModelConfig, OptimizerConfig, TrainingConfig, TransformerLMConfig
from txl_programs.flag_values import FLAGS, check_used
from txl_programs.program import read_flags, run

flags.DEFINE_enum("part", "both", ["both", "speed", "training"], "What to compare.")
flags.DEFINE_list("attn_lens", ["800", "1800", "2800", "3800"], "For speed: number of tokens that every token sees.")
flags.DEFINE_integer("n_layer", 12, "For speed: number of layers.", lower_bound=1)
flags.DEFINE_integer("rounds", 3, "For speed: number of turns of each model.", lower_bound=1)
flags.DEFINE_string("data_path", None, "For training: text file. Default: Python's reference manual.")
flags.DEFINE_integer("train_steps", 3000, "For training: steps of each model.", lower_bound=200)
flags.DEFINE_string("output_dir", "runs/compare_context", "Folder of the runs.")
flags.DEFINE_string("output", None, "Picture to draw: a .png, .pdf or .svg file.")

read_flags(__name__)

import numpy as np
import tensorflow as tf

from txl_config.errors import ParameterError
from txl_programs.pictures.context import nll_of_windows
from txl_programs.pictures.drawing import Figure, check_matplotlib, check_picture, format_of
from txl_tf import TransformerLM, TransformerXLLM, load_run
from txl_tf.language.sliding_window import sliding_window_nll
from txl_tf.runs.metrics import to_metric
from txl_tf.runs.setup import open_corpus
from txl_tf.runs.train import train_run

SHAPE: Any = {"n_token": 204, "d_model": 512, "d_embed": 512, "n_head": 8, "d_head": 64, "d_inner": 2048}
PAPER = {800: 363, 1800: 773, 2800: 1409, 3800: 1874}  # attn_len: how many times faster, on the authors' GPU
TGT_LEN = 128  # tokens of a segment of Transformer-XL, for speed
SMALL: Any = {"n_layer": 4, "d_model": 128, "d_embed": 128, "n_head": 4, "d_head": 32, "dropout": 0.0, "dropatt": 0.0}
# Sizes of the models of the part "training":
MEMORY = 128  # positions
SEGMENT = 64  # tokens
D_INNER = 512  # with relative positions
CONTEXTS = 192  # the loss is measured for up to so many tokens before the predicted one


# ------------------------------------------------------------------------------------------------------------- speed


def vanilla_turn(attn_len, tokens=3):
    """Returns a function that evaluates a vanilla model with a sliding window, and returns the seconds per token.

    The text needs `tokens + 1` windows of `attn_len` tokens. The first two are not timed.
    """
    lm = TransformerLM(**SHAPE, n_layer=FLAGS.n_layer)
    text = np.random.default_rng(0).integers(SHAPE["n_token"], size=attn_len + tokens + 1)

    def turn():
        times = []
        sliding_window_nll(lm, text, attn_len, batch_size=1, progress=lambda _: times.append(time.perf_counter()))
        return (times[-1] - times[0]) / (len(times) - 1)

    return turn


def memory_turn(attn_len, segments=2):
    """Returns a function that evaluates a Transformer-XL on `segments` segments, and returns the seconds per token.

    With its memory of `attn_len - 1` tokens, every token sees `attn_len` tokens.
    """
    lm = TransformerXLLM(**SHAPE, n_layer=FLAGS.n_layer, mem_len=attn_len - 1, same_length=True)
    evaluation_nll = tf.function(lm.evaluation_nll, autograph=False)
    tokens = tf.constant(np.random.default_rng(0).integers(SHAPE["n_token"], size=[1, TGT_LEN]), tf.int32)
    carried = lm.start_evaluation(1, TGT_LEN)

    def turn():
        """Evaluates some segments, whose memory the next turn continues."""
        nonlocal carried
        started = time.perf_counter()
        nll = None
        for _ in range(segments):
            nll, _, carried = evaluation_nll(tokens, tokens, carried)
        np.asarray(nll)  # waits until it is computed
        return (time.perf_counter() - started) / (segments * TGT_LEN)

    return turn


def compare_speed():
    """Measures the speed for every length, and prints the table.

    Returns:
        Rows `(attn_len, seconds per token of the vanilla model, of Transformer-XL, median ratio)`.
    """
    rows = []
    print("| tokens that each sees | vanilla, s a token | Transformer-XL, s a token | times faster | in the paper |")
    print("|---|---|---|---|---|")
    for attn_len in map(int, FLAGS.attn_lens):
        turns = vanilla_turn(attn_len), memory_turn(attn_len)
        for turn in turns:  # traces
            turn()
        times = [[turn() for turn in turns] for _ in range(FLAGS.rounds)]
        vanilla, memory = (statistics.median(seconds) for seconds in zip(*times, strict=True))
        ratio = statistics.median(a / b for a, b in times)
        rows.append((attn_len, vanilla, memory, ratio))
        print(f"| {attn_len} | {vanilla:.3g} | {memory:.3g} | {ratio:,.0f} | {PAPER.get(attn_len, '')} |", flush=True)
    return rows


# ---------------------------------------------------------------------------------------------------------- training


def configs():
    """`{name: hyper-parameters}` of models with about the same number of parameters."""
    per_layer = SMALL["n_head"] * SMALL["d_head"] * SMALL["d_model"]  # of the projection of positions
    wider = D_INNER + round(per_layer / (2 * SMALL["d_model"] + 1))
    return {
        "relative, memory": ModelConfig(**SMALL, d_inner=D_INNER, mem_len=MEMORY),
        "relative": ModelConfig(**SMALL, d_inner=D_INNER, mem_len=0),
        "absolute": TransformerLMConfig(**SMALL, d_inner=wider, mem_len=0),
        "absolute, memory": TransformerLMConfig(**SMALL, d_inner=wider, mem_len=MEMORY),
    }


def nll_by_position(lm, text, n_windows=256):
    """Mean nll of the tokens that have 1, 2, ... `CONTEXTS` tokens before them, float `[CONTEXTS]`.

    The mean is over `n_windows` windows of the text. A model with memory reads a window in segments, as in training;
    another one reads it as a whole.
    """
    starts = np.linspace(0, len(text) - CONTEXTS - 1, n_windows).astype(int)
    windows = np.asarray(text)[starts[:, None] + np.arange(CONTEXTS + 1)].astype(np.int32)
    return nll_of_windows(lm, windows, SEGMENT if lm.network.mem_len else CONTEXTS).mean(0)


def compare_training():
    """Trains the models, and prints the table. Returns `{name: result of nll_by_position}`."""
    data = {"dataset": "text", "data_path": FLAGS.data_path, "level": "char", "valid_fraction": 0.1}
    data = data if FLAGS.data_path else {"dataset": "pydoc"}
    training: Any = {"tgt_len": SEGMENT, "train_batch_size": 12, "train_steps": FLAGS.train_steps, "iterations": 100}
    evaluation: Any = {"tgt_len": SEGMENT, "eval_batch_size": 4}
    rows = []
    curves = {}
    for name, model in configs().items():
        folder = os.path.join(FLAGS.output_dir, name.replace(", ", "_"))
        results = train_run(
            folder,
            data=data,
            model=model,
            optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=100, min_lr_ratio=0.1),
            training=TrainingConfig(**training, save_steps=FLAGS.train_steps),
            final=EvaluationConfig(**evaluation),
        )
        lm, _ = load_run(folder)
        text = open_corpus(data).splits["valid"]
        curves[name] = nll_by_position(lm, text)
        full = "" if model.mem_len else f"{sliding_window_nll(lm, text[:20001], SEGMENT, 256).mean():.4f}"
        rows.append((name, lm.count_params(), results["valid"], to_metric(results["valid"], "bpc"), full))
    print("\n| positions, memory | parameters | nats | bpc | nats, a full window before every token |")
    print("|---|---|---|---|---|")
    for name, parameters, nll, bpc, full in rows:
        print(f"| {name} | {parameters:,} | {nll:.4f} | {bpc:.3f} | {full} |")
    return curves


# ----------------------------------------------------------------------------------------------------------- picture


def draw(speed, curves):
    """Draws the comparisons that were made: seconds per token by attn_len, and nll by the number of tokens before.

    `speed` and `curves` are the results of `compare_speed` and `compare_training`, or empty.
    """
    figure = Figure(figsize=(11, 4), layout="constrained")
    parts = [part for part in (speed, curves) if part]
    for axes, part in zip(figure.subplots(1, len(parts), squeeze=False)[0], parts, strict=True):
        if part is speed:
            lengths, vanilla, memory, _ = zip(*speed, strict=True)
            axes.semilogy(lengths, vanilla, "o-", label="vanilla, sliding window")
            axes.semilogy(lengths, memory, "o-", label="Transformer-XL, memory")
            axes.set(xlabel="tokens that every token sees", ylabel="seconds a token of evaluation")
        else:
            for name, nll in curves.items():
                smooth = nll[: len(nll) // 8 * 8].reshape(-1, 8).mean(1)
                axes.plot(np.arange(len(smooth)) * 8 + 4.5, smooth, label=name)
            axes.axvline(SEGMENT, color="gray", linewidth=0.8, linestyle=":")
            label = f"  {SEGMENT}: the segments of training"
            transform = axes.get_xaxis_transform()
            axes.text(SEGMENT, 0.45, label, color="dimgray", fontsize=9, va="center", transform=transform)
            axes.set(xlabel="tokens before the one that is predicted", ylabel="nats a character", ylim=(None, 3))
        axes.grid(alpha=0.25)
        axes.legend(frameon=False)
    return figure


def main():
    check_used(
        (("attn_lens", "n_layer", "rounds"), FLAGS.part != "training", "is for --part=speed, got --part=training"),
        (("data_path", "train_steps", "output_dir"), FLAGS.part != "speed", "is for --part=training, got --part=speed"),
    )
    if not all(length.isdigit() and int(length) > 1 for length in FLAGS.attn_lens):
        raise ParameterError("attn_lens", FLAGS.attn_lens, "integers above 1, such as 800,1800")
    if FLAGS.output:
        check_matplotlib()
        check_picture(FLAGS.output)
    speed = compare_speed() if FLAGS.part in ("both", "speed") else []
    curves = compare_training() if FLAGS.part in ("both", "training") else {}
    if FLAGS.output:
        draw(speed, curves).savefig(FLAGS.output, format=format_of(FLAGS.output), dpi=150)
        print(FLAGS.output)


if __name__ == "__main__":
    run(main)
