"""Speed of all that this library does, side by side with the port of the original, tests/reference_model.py.

    python tools/benchmark.py --json=figures.json               # the published figures, ten minutes
    python tools/benchmark.py --quick                           # small shapes and few turns, under three minutes
    python tools/benchmark.py --mode=training --tgt_len=64 --mem_len=64
    python tools/benchmark.py --mode=softmax_wt103,softmax_lm1b # large vocabularies, which need 6 GB of memory
    python tools/benchmark.py --scaling --json=scaling.json     # how the cost grows, ten minutes; needs 8 GB

Contestants take turns, so that what else the machine does falls on all of them. Tables give medians over the turns,
quartiles, and the median of the ratio to the reference in the same turn. Every mode has a shape of its own, see
`SHAPES`, which flags change; that of the evaluation is enwik8's published one.

    training, training_words,          tokens/s, all contestants in one process; a turn is as many steps as fill
    evaluation, generation             `--seconds`, at least one. With words: 33,278, in three bins
    preparation                        words/s from a text like WikiText-103's to token files
    export                             a SavedModel written and loaded without this library; a token by its `next`
    startup                            seconds from the command to the end of the first training step, stage by stage
    softmax_wt103, softmax_lm1b        training of one layer with the vocabularies of WikiText-103 and of lm1b

From the preparation on, a turn is a process of its own. `of peak` is what training would take if it were nothing but
its matrix products, at the speed of a large one, over what it takes. `peak MB` is the largest resident memory of a
process that does nothing else, TensorFlow included. `--scaling` has two layers unless `--n_layer` says otherwise.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from absl import flags, logging

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # errors come as exceptions; the rest is noise
sys.path.insert(0, str(Path(__file__).parents[1]))

import keras
import numpy as np
import tensorflow as tf
from txl_tf.program import run

from tools.contestants import (
    REFERENCE,
    SHAPES,
    frequencies,
    going_on,
    make_contestants,
    model_arguments,
    tokens_of_step,
    training_operations,
    work_of,
)
from tools.processes import IMPORTS, WORK, alone, seconds_of, watch

DEFAULT_MODES = [mode for mode in SHAPES if not mode.startswith("softmax")]
QUICK = {"n_layer": 2, "megabytes": 2}
SCALING = {
    "training": {
        "tgt_len": [32, 64, 128, 256], "mem_len": [0, 128, 256, 512], "batch_size": [2, 4, 8, 16],
        "n_layer": [1, 2, 4, 8], "n_token": [256, 4096, 33278, 267735], "replicas": [1, 2, 4],
    },
    "evaluation": {"tgt_len": [20, 40, 80, 160], "mem_len": [525, 1050, 2100, 4200]},
    "generation": {"mem_len": [400, 800, 1600, 3200]},
}  # fmt: skip
CUTOFFS = {33278: [2000, 10000], 267735: [20000, 40000, 200000]}  # of the vocabularies in SCALING

FLAGS = flags.FLAGS


def define_flags():
    """Not on import: the programs have flags of the same names, and the tests import both."""
    flags.DEFINE_list("mode", None, f"What to measure, of {', '.join(SHAPES)}; default: all before softmax_wt103.")
    for name in "n_layer d_model n_head d_head d_inner tgt_len mem_len batch_size n_token div_val".split():
        flags.DEFINE_integer(name, None, "Of the shape. In generation, tgt_len is the length of the text.")
    for name in ("dropout", "dropatt"):
        flags.DEFINE_float(name, None, "Of the shape, in training.")
    flags.DEFINE_list("cutoffs", None, "Of the shape.")
    flags.DEFINE_float("megabytes", None, "Of the text that is prepared.")
    flags.DEFINE_integer("rounds", None, "Turns of each contestant; default: 9, and 3 of processes and with --scaling.")
    flags.DEFINE_float("seconds", None, "Shortest length of a turn; default: 1, with --scaling 0.3.")
    flags.DEFINE_bool("quick", False, "2 layers, texts of 2 MB, 2 turns of 0.2 s, 1 of processes.")
    flags.DEFINE_bool("scaling", False, "Measure how the cost grows with each argument, and with the text's length.")
    flags.DEFINE_integer("inter_op_threads", None, "Operations that TensorFlow runs at a time; its default: all cores.")
    flags.DEFINE_bool("jit", False, "Measure training with XLA, too.")
    flags.DEFINE_string("json", None, "File to write the figures to.")


# ------------------------------------------------------------------------------------------------------- measuring


def measure(steps, rounds, seconds):
    """`({name: array [rounds]}, {name: float})`: seconds of a step in every turn, and until the first was over."""
    first, taken = {}, {name: [] for name in steps}
    for name, step in steps.items():
        first[name] = seconds_of(step, 0)
        step()
    for _ in range(rounds):
        for name, step in steps.items():
            taken[name].append(seconds_of(step, seconds))
    return {name: np.array(times) for name, times in taken.items()}, first


def matmul_peak(dtype, size=2048):
    """Floating-point operations a second of a large matrix product, the best of ten."""
    x = tf.cast(tf.random.normal([size, size]), dtype)
    product = tf.function(lambda x: tf.matmul(x, x)[0, 0])
    return 2 * size**3 / measure({"": lambda: product(x).numpy()}, rounds=10, seconds=0)[0][""].min()


def processor():
    """Its name, and what it computes bfloat16 with."""
    lines = [line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().splitlines() if ":" in line]
    known = {key.strip(): value.strip() for key, value in lines}
    units = [unit for unit in ("amx_bf16", "avx512_bf16") if unit in known.get("flags", "").split()]
    return f"{known.get('model name', 'unknown processor')} ({', '.join(units) or 'no unit for bfloat16'})"


def measure_processes(processes, rounds):
    """`{name: {figure: list over the rounds}}` of functions that return dicts of figures."""
    figures = {name: [] for name in processes}
    for _ in range(rounds):
        for name, process in processes.items():
            figures[name].append(process())
    return {name: {key: [turn[key] for turn in turns] for key in turns[0]} for name, turns in figures.items()}


def row_of(mode, name, figure, values, reference):
    """A row of the results: median, quartiles and ratio of a figure; a ratio above 1 is better than the reference.

    Args:
        figure: its name. More is better, but for seconds.
        values, reference: array `[rounds]`, of the contestant and of the reference.
    """
    values, reference = np.array(values), np.array(reference)
    low, median, high = np.percentile(values, [25, 50, 75]).tolist()
    ratio = np.median(reference / values if figure == "seconds" else values / reference).item()
    return {"mode": mode, "contestant": name, figure: median, "quartiles": [low, high], "ratio": ratio}


def rows_of(mode, figure, measured):
    """As `row_of`, for each of what `measure_processes` gives, with the medians of its other figures."""
    reference = next(iter(measured.values()))[figure]
    return [
        {key: statistics.median(values) for key, values in figures.items() if isinstance(values[0], (int, float))}
        | row_of(mode, name, figure, figures[figure], reference)
        for name, figures in measured.items()
    ]


def print_table(heading, rows, columns):
    """Prints rows, of which `columns` are `{key: (heading, format)}`; the heading says what they are."""
    lines = [["contestant", *(title for title, _ in columns.values())]]
    for row in rows:
        cells = {**row, "quartiles": " - ".join(columns["quartiles"][1].format(value) for value in row["quartiles"])}
        formats = {key: "{}" if key == "quartiles" else form for key, (_, form) in columns.items()}
        lines.append([row["contestant"], *(form.format(cells[key]) for key, form in formats.items())])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    print(f"\n{heading}")
    for name, *cells in lines:
        padded = [f"{cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True)]
        print("  ".join([f"  {name:{widths[0]}}", *padded]), flush=True)


def said(shape):
    """A shape in words, without what is off."""
    return ", ".join(f"{name} {value}" for name, value in shape.items() if value not in (False, -1, []))


RATIO = {"ratio": ("ratio", "{:.2f}")}
MEMORY = {"peak_memory_mb": ("peak MB", "{:,.0f}")}


def speed(unit):
    return {f"{unit}_per_second": (f"{unit}/s", "{:,.0f}"), "quartiles": ("quartiles", "{:,.0f}"), **RATIO}


# ----------------------------------------------------------------------------------------------------------- modes


def compare(mode, shape, contestants, rounds, seconds, peaks, memory_of):
    """Measures the contestants of one process, prints their table and returns its rows as dicts."""
    taken, first = measure({name: make(shape) for name, make in contestants.items()}, rounds, seconds)
    rates = {name: tokens_of_step(mode, name, shape) / times for name, times in taken.items()}
    rows = []
    for name, rate in rates.items():
        row = row_of(mode, name, "tokens_per_second", rate, rates[REFERENCE])
        row["first_step_seconds"] = first[name]
        if work_of(mode) == "training":
            peak = peaks[name.split()[1]]
            row["share_of_peak"] = float(training_operations(shape) / np.median(taken[name]) / peak)
            row["peak_memory_mb"] = memory_of(name)
        rows.append(row)
    columns = {**speed("tokens"), "first_step_seconds": ("first step", "{:.1f} s")}
    if work_of(mode) == "training":
        columns |= {"share_of_peak": ("of peak", "{:.0%}"), **MEMORY}
    print_table(f"{mode}: {said(shape)}", rows, columns)
    return rows


def compare_softmax(mode, shape, rounds, seconds, peaks):
    """As `compare`, of the training with a large vocabulary, a process for each turn."""
    processes = {
        name: lambda name=name: alone("train", mode=mode, name=name, shape=shape, seconds=seconds)
        for name in make_contestants(mode)
    }
    rows = rows_of(mode, "tokens_per_second", measure_processes(processes, rounds))
    for row in rows:
        row["share_of_peak"] = (
            training_operations(shape) / row["seconds_per_step"] / peaks[row["contestant"].split()[1]]
        )
    columns = {**speed("tokens"), "seconds_per_step": ("step", "{:.2f} s"), "build_seconds": ("build", "{:.1f} s")}
    columns |= {"first_step_seconds": ("first step", "{:.1f} s"), "share_of_peak": ("of peak", "{:.0%}"), **MEMORY}
    print_table(f"{mode}: {said(shape)}", rows, columns)
    return rows


def compare_preparation(shape, rounds):
    with tempfile.TemporaryDirectory() as folder:
        for split, megabytes in (("train", shape["megabytes"]), ("valid", 0.2), ("test", 0.2)):
            write_text(os.path.join(folder, f"{split}.txt"), shape["n_token"], megabytes)
        names = ("reference", "txl_tf")
        processes = {name: lambda name=name: alone("prepare", name=name, folder=folder) for name in names}
        rows = rows_of("preparation", "words_per_second", measure_processes(processes, rounds))
    print_table(f"preparation: {said(shape)}", rows, {**speed("words"), **MEMORY})
    return rows


def write_text(path, n_token, megabytes):
    """Writes words as a text has them: most are rare, a rare one comes in bursts, and lines repeat.

    Of the words `[0, n_token)`, as frequent as `frequencies`, every fourth of a line comes from the line before it. A
    tenth of all lines are empty, a tenth are one of a hundred headings. `<unk>` is the third word.
    """
    rng = np.random.default_rng(0)
    letters = np.array(list("etaoinshrdlu"))
    words = ["".join(letters[[int(digit, 12) for digit in np.base_repr(i, 12)]]) for i in range(n_token)]
    words[2] = "<unk>"
    total = np.cumsum(frequencies(n_token))
    headings = [" = " + " ".join(words[i] for i in rng.integers(n_token, size=3)) + " = \n" for _ in range(100)]
    written, before = 0, []
    with open(path, "w") as file:
        while written < megabytes * 1e6:
            kind = rng.random()
            if kind < 0.2:
                line = headings[rng.integers(100)] if kind < 0.1 else " \n"
            else:
                ids = np.searchsorted(total, rng.random(rng.integers(5, 160))).clip(max=n_token - 1).tolist()
                ids = [ids[i] if i % 4 or i >= len(before) else before[i] for i in range(len(ids))]
                before = ids
                line = " " + " ".join([words[i] for i in ids]) + " \n"
            written += file.write(line)


def compare_export(shape, rounds, seconds):
    def process(name):
        with tempfile.TemporaryDirectory() as folder:
            directory = os.path.join(folder, "1")
            figures = alone("export", name=name, shape=shape, directory=directory)
            return {**figures, **alone("load", directory=directory, seconds=seconds)}

    names = (REFERENCE, "txl_tf float32", "txl_tf bfloat16 weights")
    processes = {name: lambda name=name: process(name) for name in names}
    rows = rows_of("export", "tokens_per_second", measure_processes(processes, rounds))
    columns = {**speed("tokens"), "milliseconds_per_token": ("a token", "{:.1f} ms")}
    columns |= {"first_request_seconds": ("first", "{:.1f} s"), "export_seconds": ("export", "{:.1f} s")}
    columns |= {"megabytes": ("on disk", "{:.0f} MB"), "load_seconds": ("load", "{:.1f} s")}
    print_table(f"export: {said(shape)}", rows, columns)
    return rows


def compare_startup(shape, rounds):
    with tempfile.TemporaryDirectory() as folder:
        text = os.path.join(folder, "text.txt")
        write_text(text, n_token=5000, megabytes=shape["megabytes"])
        model = model_arguments(shape)
        processes = {
            name: lambda name=name: alone("start", name=name, shape=shape, model=model, text=text)
            for name in (REFERENCE, "txl_tf float32")
        }
        processes["train.py"] = lambda: watch(shape, text)
        measured = measure_processes(processes, rounds)
    command = measured.pop("train.py")
    rows = rows_of("startup", "seconds", measured)
    for row in rows:
        turns = measured[row["contestant"]]["stages"]
        row["stages"] = {stage: statistics.median(turn[stage] for turn in turns) for stage in (*IMPORTS, *WORK)}
    columns = {"seconds": ("first step after", "{:.1f} s"), "quartiles": ("quartiles", "{:.1f}"), **RATIO}
    print_table(f"startup: {said(shape)}", rows, columns)
    for stage in (*IMPORTS, *WORK):
        print(f"    {stage:24}" + "".join(f"{row['stages'][stage]:>10.2f} s" for row in rows))
    rows[-1] |= {key: statistics.median(values) for key, values in command.items()}
    print(
        "  python train.py --train_steps=1, as it is: the step's line after {step_seconds:.1f} s, the last line after "
        "{last_line_seconds:.1f} s, ended after {command_seconds:.1f} s".format(**rows[-1]),
        flush=True,
    )
    return rows


# --------------------------------------------------------------------------------------------------------- scaling


def scale(mode, shape, contestants, rounds, seconds):
    """As `compare`, of the cost of a token at several values of each argument; those of a contestant take turns."""
    rows = []
    for argument, values in SCALING[mode].items():
        print_scale(mode, shape, argument, values)
        if argument == "replicas":
            rows += scale_replicas(shape, values, list(contestants)[1:], rounds, seconds)
            continue
        for name, make in contestants.items():
            shapes = [{**shape, argument: value} for value in values]
            if argument == "n_token":
                shapes = [{**some, "cutoffs": CUTOFFS.get(some["n_token"], [])} for some in shapes]
            taken, _ = measure({i: make(some) for i, some in enumerate(shapes)}, rounds, seconds)
            costs = [np.median(taken[i]) / tokens_of_step(mode, name, some) for i, some in enumerate(shapes)]
            rows += costs_of(mode, name, argument, values, costs)
    return rows


def scale_replicas(shape, values, names, rounds, seconds):
    """The same of replicas on this machine's cores, by `fit`, in processes of their own."""
    rows = []
    for name in names:
        processes = {
            n: lambda n=n, name=name: alone("train_replicas", name=name, shape=shape, replicas=n, seconds=seconds)
            for n in values
        }
        measured = measure_processes(processes, 1 if rounds < 3 else 2)
        costs = [1 / statistics.median(measured[n]["tokens_per_second"]) for n in values]
        rows += costs_of("training", name, "replicas", values, costs)
    return rows


def scale_length(mode, shape, contestants, turns):
    """As `scale`, of the cost of a token after 1, 2, 4, ... segments of one text, but for the reference."""
    counts = [2**i for i in range(turns.bit_length())]
    values = [count * shape["tgt_len"] for count in counts]
    print_scale(mode, shape, "tokens_before", values)
    rows = []
    for name in list(contestants)[1:]:
        dtype = "mixed_bfloat16" if "bfloat16" in name else "float32"
        step = going_on(shape, dtype) if mode == "generation" else contestants[name](shape)
        seconds = measure({name: step}, turns, seconds=0)[0][name] / tokens_of_step(mode, name, shape)
        rows += costs_of(mode, name, "tokens_before", values, [np.median(seconds[n // 2 : 3 * n // 2]) for n in counts])
    return rows


def print_scale(mode, shape, argument, values):
    others = {name: value for name, value in shape.items() if name != argument}
    print(f"\n{mode}: {said(others)}")
    print(f"  {f'us a token, by {argument}':32}" + "".join(f"{value:>10,}" for value in values))


def costs_of(mode, name, argument, values, costs):
    """Prints a contestant's line of the table, and returns it as dicts."""
    print(f"  {name:32}" + "".join(f"{cost * 1e6:>10,.0f}" for cost in costs), flush=True)
    common = {"mode": mode, "contestant": name, "argument": argument}
    pairs = zip(values, costs, strict=True)
    return [{**common, "value": value, "microseconds_per_token": float(cost * 1e6)} for value, cost in pairs]


# --------------------------------------------------------------------------------------------------------- program


def shape_of(mode):
    """The mode's shape, with what the flags say."""
    shape = dict(SHAPES[mode])
    if FLAGS.scaling:
        shape["n_layer"] = 2
    if FLAGS.quick:
        shape |= {name: min(value, shape[name]) for name, value in QUICK.items() if name in shape}
    given = {name: FLAGS[name].value for name in shape if name in FLAGS and FLAGS[name].value is not None}
    if "cutoffs" in given:
        given["cutoffs"] = [int(cutoff) for cutoff in given["cutoffs"]]
    return {**shape, **given}


def rows_of_mode(mode, shape, peaks):
    """Measures a mode, prints its tables and returns their rows."""
    seconds = FLAGS.seconds or (0.2 if FLAGS.quick else 0.3 if FLAGS.scaling else 1.0)
    rounds = FLAGS.rounds or (2 if FLAGS.quick else 3 if FLAGS.scaling else 9)
    few = FLAGS.rounds or (1 if FLAGS.quick else 3)
    if FLAGS.scaling:
        contestants = {name: make for name, make in make_contestants(mode).items() if "recompute" not in name}
        rows = scale(mode, shape, contestants, rounds, seconds)
        if mode != "training":
            shape = {**shape, "tgt_len": min(shape["tgt_len"], 80)}
            rows += scale_length(mode, shape, contestants, turns=12 if FLAGS.quick else 96)
        return rows
    if mode == "preparation":
        return compare_preparation(shape, few)
    if mode == "export":
        return compare_export(shape, few, seconds)
    if mode == "startup":
        return compare_startup(shape, few)
    if mode.startswith("softmax"):
        return compare_softmax(mode, shape, few, seconds, peaks)

    def memory_of(name):
        return alone("train", mode=mode, name=name, shape=shape, seconds=0, jit=FLAGS.jit)["peak_memory_mb"]

    return compare(mode, shape, make_contestants(mode, FLAGS.jit), rounds, seconds, peaks, memory_of)


def main():
    known = list(SCALING if FLAGS.scaling else SHAPES)
    modes = FLAGS.mode or [mode for mode in known if mode in DEFAULT_MODES]
    if unknown := set(modes) - set(known):
        raise ValueError(f"mode must be of {', '.join(known)}, got {', '.join(sorted(unknown))}")
    logging.set_verbosity(logging.ERROR)  # with --scaling, TensorFlow warns of many functions
    if FLAGS.inter_op_threads:
        os.environ["TF_NUM_INTEROP_THREADS"] = str(FLAGS.inter_op_threads)  # which the processes inherit
    keras.utils.set_random_seed(0)
    started = time.perf_counter()
    peaks = {dtype: matmul_peak(dtype) for dtype in ("float32", "bfloat16")}
    load = os.getloadavg()[0]
    products = ", ".join(f"{peak / 1e9:,.0f} GFLOP/s in {dtype}" for dtype, peak in peaks.items())
    print(f"{os.cpu_count()} cores, {processor()}, load {load:.1f}, TensorFlow {tf.__version__}")
    print(f"matrix products: {products}")
    rows, shapes = [], {mode: shape_of(mode) for mode in modes}
    for mode, shape in shapes.items():
        rows += rows_of_mode(mode, shape, peaks)
    loads = [load, os.getloadavg()[0]]
    print(f"\nload at the end {loads[1]:.1f}, {time.perf_counter() - started:.0f} s in all")
    if FLAGS.json:
        machine = {"cpus": os.cpu_count(), "processor": processor(), "tensorflow": tf.__version__}
        machine |= {"flops": peaks, "load": loads}
        Path(FLAGS.json).write_text(json.dumps({"machine": machine, "shapes": shapes, "rows": rows}, indent=2))


if __name__ == "__main__":
    define_flags()
    run(main)
