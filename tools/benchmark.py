"""Speed of training, evaluation and generation, side by side with the port of the original, tests/reference_model.py.

    python tools/benchmark.py                                   # the published figures, ten minutes
    python tools/benchmark.py --quick                           # two layers and few turns, under three minutes
    python tools/benchmark.py --mode=training --tgt_len=64 --mem_len=64 --json=figures.json
    python tools/benchmark.py --mode=evaluation,generation --scaling

All contestants take turns in one process, so that what else the machine does falls on all of them. A turn is as many
steps as fill `--seconds`, at least one. The tables give medians over the turns, quartiles, and the median of the ratio
to the reference in the same round. Every mode has a shape of its own, see `SHAPES`, which flags change; that of the
evaluation is enwik8's published one.

`of peak` is what training would take if it were nothing but its matrix products, at the speed of a large one, over
what it takes. `peak MB` is the largest resident memory of a process that does nothing but train, TensorFlow included.
"""

import functools
import json
import os
import subprocess
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
from tests.reference_model import ReferenceModel, full_log_probs
from txl_tf.generation import Session

NETWORK = {
    "n_layer": 6, "d_model": 256, "n_head": 4, "d_head": 64, "d_inner": 1024, "n_token": 256, "cutoffs": [],
    "div_val": 1, "dropout": 0.1, "dropatt": 0.0, "same_length": False, "clamp_len": -1,
}  # fmt: skip
SHAPES = {
    "training": {**NETWORK, "tgt_len": 128, "mem_len": 128, "batch_size": 8},
    "evaluation": {
        **NETWORK, "n_layer": 12, "d_model": 512, "n_head": 8, "d_inner": 2048, "same_length": True, "clamp_len": 820,
        "tgt_len": 80, "mem_len": 2100, "batch_size": 10,
    },
    "generation": {**NETWORK, "tgt_len": 256, "mem_len": 1600, "batch_size": 1},
}  # fmt: skip
SCALING = {
    "training": {"tgt_len": [32, 64, 128, 256], "mem_len": [0, 128, 256, 512]},
    "evaluation": {"tgt_len": [20, 40, 80, 160], "mem_len": [525, 1050, 2100, 4200]},
    "generation": {"mem_len": [400, 800, 1600, 3200]},
}

FLAGS = flags.FLAGS


def define_flags():
    """Not on import: the programs have flags of the same names, and the tests import both."""
    flags.DEFINE_list("mode", list(SHAPES), f"What to measure, of {', '.join(SHAPES)}.")
    for name in "n_layer d_model n_head d_head d_inner tgt_len mem_len batch_size n_token div_val".split():
        flags.DEFINE_integer(name, None, "Of the shape. In generation, tgt_len is the length of the text.")
    for name in ("dropout", "dropatt"):
        flags.DEFINE_float(name, None, "Of the shape, in training.")
    flags.DEFINE_list("cutoffs", None, "Of the shape.")
    flags.DEFINE_integer("rounds", 9, "Turns of each contestant.")
    flags.DEFINE_float("seconds", 1.0, "Shortest length of a turn.")
    flags.DEFINE_bool("quick", False, "2 layers, 3 turns of 0.3 s.")
    flags.DEFINE_bool("scaling", False, "Measure how the cost grows with tgt_len, mem_len and the length of the text.")
    flags.DEFINE_integer("inter_op_threads", None, "Operations that TensorFlow runs at a time; its default: all cores.")
    flags.DEFINE_bool("jit", False, "Measure training with XLA, too.")
    flags.DEFINE_string("json", None, "File to write the figures to.")
    flags.DEFINE_string("peak_memory_of", None, "Only train this contestant, and print the peak memory in MB.")


def model_arguments(shape):
    """The arguments of `TransformerXLLM` and of `ReferenceModel`."""
    return {**{name: shape[name] for name in [*NETWORK, "mem_len"]}, "d_embed": shape["d_model"]}


def random_batch(shape):
    """Tokens and labels `[batch, tgt_len]`, word i about 1 / i as frequent as the first."""
    share = 1 / np.arange(1, shape["n_token"] + 1)
    size = [shape["batch_size"], shape["tgt_len"] + 1]
    draws = np.random.default_rng(0).choice(shape["n_token"], size, p=share / share.sum())
    return tf.constant(draws[:, :-1], tf.int32), tf.constant(draws[:, 1:], tf.int32)


def carrying(function, carried):
    """A step without arguments of `function(carried) -> (result, carried)`, which waits for the result."""

    def step():
        nonlocal carried
        result, carried = function(carried)
        return result.numpy()

    return step


def reference_step(mode, shape):
    """A function that trains the reference once, or evaluates a segment, or generates a token."""
    model = ReferenceModel(**model_arguments(shape))
    tokens, labels = map(tf.transpose, random_batch(shape))
    mems = model.initial_mems(shape["batch_size"])
    if mode == "training":
        model.compile(learning_rate=1e-3, train_steps=10000)
        return carrying(lambda mems: model.train_step(tokens, labels, mems)[::3], mems)
    if mode == "evaluation":
        nll = tf.function(model.nll)
        return carrying(lambda mems: nll(tokens, labels, mems), mems)

    @tf.function
    def next_token(carried):
        hidden, mems = model._hidden(*carried, is_training=False)
        token = tf.random.categorical(full_log_probs(hidden, **model._softmax_args())[0], 1, tf.int32)[None, :, 0]
        return token, (token, mems)

    return carrying(next_token, (tokens[:1], mems))


def library_step(mode, shape, dtype="float32", jit_compile=False, recompute=False):
    """The same of the library, by the functions that `fit` and `evaluate` call; generates a text of `tgt_len`."""
    lm = txl_tf.TransformerXLLM(**model_arguments(shape), dtype=dtype, recompute=recompute)
    tokens, labels = random_batch(shape)
    if mode == "training":
        lm.compile(txl_tf.make_optimizer(learning_rate=1e-3, train_steps=10000), jit_compile=jit_compile)
        lm.optimizer.build(lm.trainable_variables)
        lm.make_train_function()  # which compiles forward and backward pass, if asked to
        train_step = tf.function(lm.train_step, autograph=False)

        def train(mems):
            logs, mems = train_step((tokens, labels), mems)
            return logs["loss"], mems

        return carrying(train, lm.initial_mems(shape["batch_size"]))
    if mode == "evaluation":
        evaluation_nll = tf.function(lm.evaluation_nll, autograph=False)
        first = lm.start_evaluation(shape["batch_size"], shape["tgt_len"])
        return carrying(lambda carried: evaluation_nll(tokens, labels, carried)[::2], first)
    return lambda: lm.generate(tokens[:, :1], max_new_tokens=shape["tgt_len"], seed=0).numpy()


def make_contestants(mode, jit=False):
    """Functions from shape to step, by name, the reference first."""
    options = {"txl_tf float32": {}, "txl_tf bfloat16": {"dtype": "mixed_bfloat16"}}
    if jit and mode == "training":
        options |= {f"{name} XLA": {**some, "jit_compile": True} for name, some in options.items()}
    if mode == "training":
        options["txl_tf float32 recompute"] = {"recompute": True}
    library = {name: lambda shape, some=some: library_step(mode, shape, **some) for name, some in options.items()}
    return {"reference float32": lambda shape: reference_step(mode, shape), **library}


def tokens_of_step(mode, name, shape):
    return shape["batch_size"] * (1 if mode == "generation" and name.startswith("reference") else shape["tgt_len"])


def measure(steps, rounds, seconds):
    """`({name: array [rounds]}, {name: float})`: seconds of a step in every turn, and until the first was over."""
    first, taken = {}, {name: [] for name in steps}
    for name, step in steps.items():
        started = time.perf_counter()
        step()
        first[name] = time.perf_counter() - started
        step()
    for _ in range(rounds):
        for name, step in steps.items():
            n, started = 0, time.perf_counter()
            while n == 0 or time.perf_counter() - started < seconds:
                step()
                n += 1
            taken[name].append((time.perf_counter() - started) / n)
    return {name: np.array(times) for name, times in taken.items()}, first


def matmul_peak(dtype, size=2048):
    """Floating-point operations a second of a large matrix product, the best of ten."""
    x = tf.cast(tf.random.normal([size, size]), dtype)
    product = tf.function(lambda x: tf.matmul(x, x)[0, 0])
    return 2 * size**3 / measure({"": lambda: product(x).numpy()}, rounds=10, seconds=0)[0][""].min()


def training_operations(shape):
    """Floating-point operations of the matrix products that a training step cannot do without.

    The backward pass has two products for every one of the forward pass, of memory and positions only one.
    """
    rows, tgt_len, mem_len, d_model = (shape[name] for name in ("batch_size", "tgt_len", "mem_len", "d_model"))
    tokens, klen, width = rows * tgt_len, mem_len + tgt_len, shape["n_head"] * shape["d_head"]
    layer = tokens * d_model * (4 * width + 2 * shape["d_inner"])  # queries, keys, values, output; feed-forward
    layer += 3 * tokens * klen * width  # scores of keys and of positions; values
    inputs = (2 * rows * mem_len + klen) * d_model * width  # keys and values of the memory; position keys
    ends = [*shape["cutoffs"], shape["n_token"]]
    softmax = tokens * d_model * (ends[0] + len(ends) - 1)
    labels = random_batch(shape)[1].numpy()
    for i, (start, end) in enumerate(zip(ends, ends[1:], strict=False), 1):
        softmax += ((labels >= start) & (labels < end)).sum() * (end - start) * (d_model // shape["div_val"] ** i)
    return int(2 * (3 * (shape["n_layer"] * layer + softmax) + 2 * shape["n_layer"] * inputs))


def peak_memory():
    """The largest resident memory of this process so far, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def peak_memory_of(name):
    """The same of a new process, with the flags of this one, that does nothing but train the contestant."""
    command = [sys.executable, __file__, *sys.argv[1:], "--mode=training", f"--peak_memory_of={name}"]
    return float(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def compare(mode, shape, contestants, rounds, seconds, peaks, memory_of):
    """Measures the contestants, prints their table and returns its rows as dicts."""
    taken, first = measure({name: make(shape) for name, make in contestants.items()}, rounds, seconds)
    rates = {name: tokens_of_step(mode, name, shape) / times for name, times in taken.items()}
    print(f"\n{mode:26}{'tokens/s':>10}{'quartiles':>18}{'ratio':>8}{'first step':>12}{'of peak':>9}{'peak MB':>9}")
    rows = []
    for name, rate in rates.items():
        low, median, high = np.percentile(rate, [25, 50, 75])
        row = {"mode": mode, "contestant": name, "tokens_per_second": median, "quartiles": [low, high]}
        row |= {"ratio": np.median(rate / rates["reference float32"]), "first_step_seconds": first[name]}
        line = f"{name:26}{median:>10,.0f}{f'{low:,.0f} - {high:,.0f}':>18}{row['ratio']:>8.2f}{first[name]:>10.1f} s"
        if mode == "training":
            row["share_of_peak"] = training_operations(shape) / np.median(taken[name]) / peaks[name.split()[1]]
            row["peak_memory_mb"] = memory_of(name)
            line += f"{row['share_of_peak']:>9.0%}{row['peak_memory_mb']:>9,.0f}"
        print(line, flush=True)
        rows.append(row)
    return rows


def scale(mode, shape, contestants, rounds, seconds):
    """As `compare`, of the cost of a token at several tgt_len and mem_len. One contestant's shapes take turns."""
    rows = []
    for argument, values in SCALING[mode].items():
        print(f"\n{f'{mode}: us a token, {argument}':34}" + "".join(f"{value:>10,}" for value in values))
        for name, make in contestants.items():
            shapes = [{**shape, argument: value} for value in values]
            taken, _ = measure({i: make(some) for i, some in enumerate(shapes)}, rounds, seconds)
            costs = [np.median(taken[i]) / tokens_of_step(mode, name, some) for i, some in enumerate(shapes)]
            rows += costs_of(mode, name, argument, values, costs)
    return rows


def scale_length(mode, shape, contestants, turns=96):
    """As `scale`, of the cost of a token after 1, 2, 4, ... segments of one text, but for the reference."""
    counts = [2**i for i in range(turns.bit_length())]
    values = [count * shape["tgt_len"] for count in counts]
    print(f"\n{f'{mode}: us a token, tokens before':34}" + "".join(f"{value:>10,}" for value in values))
    rows = []
    for name in list(contestants)[1:]:
        if mode == "generation":  # `generate` would begin a new text
            dtype = "mixed_bfloat16" if "bfloat16" in name else "float32"
            session = Session(txl_tf.TransformerXLLM(**model_arguments(shape), dtype=dtype), shape["batch_size"])
            session.read(np.zeros([shape["batch_size"], 1], int))
            step = functools.partial(session.write, shape["tgt_len"])
        else:
            step = contestants[name](shape)
        seconds = measure({name: step}, turns, seconds=0)[0][name] / tokens_of_step(mode, name, shape)
        rows += costs_of(mode, name, "tokens_before", values, [np.median(seconds[n // 2 : 3 * n // 2]) for n in counts])
    return rows


def costs_of(mode, name, argument, values, costs):
    """Prints a contestant's line of the table, and returns it as dicts."""
    print(f"  {name:32}" + "".join(f"{cost * 1e6:>10,.0f}" for cost in costs), flush=True)
    common = {"mode": mode, "contestant": name, "argument": argument}
    pairs = zip(values, costs, strict=True)
    return [{**common, "value": value, "microseconds_per_token": cost * 1e6} for value, cost in pairs]


def shape_of(mode):
    """The mode's shape, with what the flags say."""
    given = {name: FLAGS[name].value for name in SHAPES[mode] if name in FLAGS and FLAGS[name].value is not None}
    given["cutoffs"] = [int(cutoff) for cutoff in FLAGS.cutoffs or []]
    return {**SHAPES[mode], **({"n_layer": 2} if FLAGS.quick else {}), **given}


def main(argv):
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
    if unknown := set(FLAGS.mode) - set(SHAPES):
        raise app.UsageError(f"--mode must be of {', '.join(SHAPES)}, got {', '.join(sorted(unknown))}")
    logging.set_verbosity(logging.WARNING)
    if FLAGS.inter_op_threads:
        tf.config.threading.set_inter_op_parallelism_threads(FLAGS.inter_op_threads)
    keras.utils.set_random_seed(0)
    if FLAGS.peak_memory_of:
        step = make_contestants("training", FLAGS.jit)[FLAGS.peak_memory_of](shape_of("training"))
        for _ in range(5):
            step()
        print(peak_memory())
        return

    rounds, seconds = (3, 0.3) if FLAGS.quick else (FLAGS.rounds, FLAGS.seconds)
    peaks = {dtype: matmul_peak(dtype) for dtype in ("float32", "bfloat16")}
    load = os.getloadavg()[0]
    products = ", ".join(f"{peak / 1e9:,.0f} GFLOP/s in {dtype}" for dtype, peak in peaks.items())
    print(f"{os.cpu_count()} cores, load {load:.1f}, TensorFlow {tf.__version__}, matrix products {products}")
    rows, shapes = [], {mode: shape_of(mode) for mode in FLAGS.mode}
    for mode, shape in shapes.items():
        contestants = make_contestants(mode, FLAGS.jit)
        if FLAGS.scaling:
            rows += scale(mode, shape, contestants, rounds, seconds)
            if mode != "training":
                rows += scale_length(mode, {**shape, "tgt_len": min(shape["tgt_len"], 80)}, contestants)
        else:
            rows += compare(mode, shape, contestants, rounds, seconds, peaks, peak_memory_of)
    print(f"\nload at the end {os.getloadavg()[0]:.1f}")
    if FLAGS.json:
        machine = {
            "cpus": os.cpu_count(),
            "tensorflow": tf.__version__,
            "flops": peaks,
            "load": [load, os.getloadavg()[0]],
        }
        Path(FLAGS.json).write_text(json.dumps({"machine": machine, "shapes": shapes, "rows": rows}, indent=2))


if __name__ == "__main__":
    define_flags()
    app.run(main)
