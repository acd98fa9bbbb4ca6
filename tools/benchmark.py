"""Measures the speed of the library and of a plain port of the original, tests/reference_model.py.

    python tools/benchmark.py --json=figures.json               # the published figures, ten minutes
    python tools/benchmark.py --quick                           # small shapes and few turns, under three minutes
    python tools/benchmark.py --mode=training --tgt_len=64 --mem_len=64
    python tools/benchmark.py --mode=softmax_wt103,softmax_lm1b # large vocabularies, which need 6 GB of memory
    python tools/benchmark.py --against=../older --mode=all --runs=3    # this checkout and another one
    python tools/benchmark.py --scaling --json=scaling.json     # how the cost grows, ten minutes; needs 8 GB

Contestants take turns, so that other programs on the machine slow all of them equally. Without `--scaling`, each runs
in its own process. Tables show median and quartiles over the turns, and median and quartiles of the ratio to the first
contestant in the same turn: above 1 is faster. With `--runs=3`, everything is measured three times, each time with new
processes; the last table has the ratios of all runs and their median. Every mode has a shape (the sizes of its model
and data) in `SHAPES` of tools/benchmarking/shapes.py; flags change it.

    training, training_words,          tokens/s; a turn is as many steps as fill `--seconds`, at least one. Every core
    evaluation, generation             computes a part of the batch in training and evaluation, as with train.py; a
                                       contestant shows the speed without parts. The words are 33,278, in three
                                       clusters. On processors with AMX, training is also measured with float32
                                       products of factors rounded to bfloat16. The evaluation has the published shape
                                       of enwik8. Generation of up to 16 texts has the threads of generate.py; a
                                       contestant ("1 part") shows the speed without them. Others only read as many
                                       bytes as a token needs: a bound of its speed
    preparation                        words/s from a text like WikiText-103's to token files
    export                             a SavedModel is written, and loaded without this library; a step is a token that
                                       its signature `next` predicts
    startup                            seconds from the command to the end of the first training step of train.py
    first_answer                       seconds from the command to the first token of tools/generate.py, and to a line's
                                       answer of tools/score.py and tools/tag.py; compared with `import tensorflow`
    softmax_wt103, softmax_lm1b        training of one layer with the vocabularies of WikiText-103 and of lm1b
    seq2seq, seq2seq_decoding          the vanilla encoder-decoder against the tutorial's layers, both under Keras's
                                       `fit`, tests/reference_transformer.py; decoding is greedy
    seq2seq_pairs                      training on words and the same words backwards: the library groups pairs of
                                       similar length, the tutorial does not; symbols of targets/s, without padding
    tener, flat,                       training and tagging of sentences as long as those of Resume, against plain ports
    tener_tagging, flat_tagging        of the original programs, tests/reference_tagger.py: characters/s, without
                                       padding. FLAT has fusion=ff, which uses all four distances of a pair
    flat_long                          training of FLAT on sentences of 200 characters, for the column `peak MB`
    peers                              training of the same sizes by models of other libraries (extra `peers`): a GPT of
                                       nanoGPT's shape and x-transformers with memory, both in PyTorch, with and without
                                       torch.compile, and the paper's model in plain JAX. Ratios are to this library.
                                       The table also has the matrix products of a step alone: those of the library's
                                       model, computed by TensorFlow and by PyTorch, and those of the GPT
    workers                            training by 1, 2 and 4 processes of one thread, which divide a batch and sum up
                                       gradients over the loopback: in one bucket, as train.py does, and in several.
                                       They are compared with the same number of processes, each of which trains a
                                       model of its own on its rows
    ray                                the programs on a Ray cluster of this machine, and each of them without Ray:
                                       preparation by 1, 2 and 4 workers, training by 2, scoring by 1 and 2
    ray_failures                       training by 2, 3 and 4 workers, of which one is killed now and then, and the time
                                       that tools/simulate_training.py predicts for the same failures
    serving                            requests/s of tools/serve.py (extra `serve`) with 1, 8 and 32 clients. Each sends
                                       its next request when it has an answer. Ratios are to one client
    scoring                            lines of words to their nll, as in tools/score.py, against `lm.score` line by
                                       line; and the evaluation of a text in segments, for comparison
    writing                            `lm.generate` of one row, of several rows, with options of sampling, and after a
                                       prompt of 5,000 tokens

The library trains by `fit` and evaluates by `evaluate`; their preparations and their first step are not counted. In
preparation, export, startup, first_answer and the modes of the softmax, every turn is a new process. `of peak` is the
time that the matrix products of a training step would take at the speed of a large product, divided by the time of the
step. `peak MB` is the largest resident memory of the process, TensorFlow included.

`--against` compares the library of two checkouts of any age: the processes of each import its own txl_tf, use only
public names, start its own programs, and read runs that these programs have trained. It does not measure peers,
workers, Ray and serving. Without `--contestants`, bfloat16 is measured only in the first four modes and in seq2seq, and
only some cases of writing are measured. `--mode=all` measures every mode that the other flags allow. With `--scaling`,
models have two layers unless `--n_layer` is given.
"""

import compileall
import concurrent.futures
import contextlib
import functools
import json
import os
import re
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from absl import flags, logging
from benchmarking.shapes import (
    BFLOAT16_AGAINST,
    ONE_PART,
    PRODUCTS,
    REFERENCE,
    ROUNDED,
    SCALING,
    SHAPES,
    WRITING,
    WRITING_AGAINST,
)

from txl_programs.flag_values import FLAGS, check_integers
from txl_programs.program import read_flags, run

PAIRS = ("seq2seq", "seq2seq_pairs", "seq2seq_decoding")
TAGGING = ("tener", "tener_tagging", "flat", "flat_tagging", "flat_long")
# The modes in which a contestant has one process for all its turns.
LASTING = (
    "training", "training_words", "evaluation", "generation", "writing", "workers", "scoring", "peers", *PAIRS, *TAGGING
)  # fmt: skip
SOFTMAX = ("softmax_wt103", "softmax_lm1b")
OF_THEIR_OWN = ("workers", "ray", "ray_failures", "serving")
ON_REQUEST = (*SOFTMAX, *OF_THEIR_OWN, "scoring", "writing", "peers", *PAIRS, *TAGGING)  # left out without --mode
WORKERS = (1, 2, 4)
# Name in the table -> bytes of the buckets in which gradients are all-reduced; 0 for a single one.
BUCKETS = {"one bucket": 0, "4 MB buckets": 4 << 20, "1 MB buckets": 1 << 20}
flags.DEFINE_list("mode", None, f"Modes: all, or some of {', '.join(SHAPES)}; default: those before softmax_wt103.")
_DEFINE = {bool: flags.DEFINE_bool, int: flags.DEFINE_integer, float: flags.DEFINE_float, list: flags.DEFINE_list}
_LEAST = {"n_token": 1, "tgt_len": 1, "batch_size": 1, "megabytes": 0.001}  # other sizes are checked by the network
for _name, _value in SHAPES["startup"].items():
    _bounds = {"lower_bound": _LEAST[_name]} if _name in _LEAST else {}
    _help = "Replaces this size in the shapes; tgt_len of generation is the length of the text."
    _DEFINE[type(_value)](_name, None, _help, **_bounds)
check_integers("cutoffs")
_ROUNDS = "Turns of each contestant; default: 9, or 3 with a new process for each or --scaling; fewer with --runs."
flags.DEFINE_integer("rounds", None, _ROUNDS, lower_bound=1)
flags.DEFINE_integer("runs", 1, "How often to measure everything; the last table has the median ratios.", lower_bound=1)
flags.DEFINE_float("seconds", None, "Shortest length of a turn; default: 1, with --scaling 0.3.", lower_bound=0)
flags.DEFINE_bool("quick", False, "2 layers, texts of 2 MB, 2 turns of 0.2 s, or 1 with a new process for each.")
flags.DEFINE_bool("scaling", False, "Measure how the cost grows with each argument, and with the text's length.")
flags.DEFINE_string("against", None, "Folder of another checkout, to compare this one with instead of the reference.")
flags.DEFINE_list("contestants", None, "Only the reference, and contestants with one of these words in their name.")
flags.DEFINE_integer("inter_op_threads", None, "Operations that TensorFlow runs at a time; its default: all cores.")
flags.DEFINE_bool("jit", False, "Measure training with XLA, too.")
flags.DEFINE_string("json", None, "File to write the figures to.")

read_flags(__name__)

import numpy as np
import tensorflow as tf
from benchmarking import cluster, contestants, language_models, peers, processes, serving, taggers
from benchmarking.scaling import measure, scale, scale_length
from benchmarking.tables import describe, print_summary, print_table, rows_of, summary_of, take_turns
from benchmarking.work import Calls

from txl_config.environment import processor_flags
from txl_config.errors import ParameterError
from txl_tf.files import check_writable
from txl_tf.runs.folder import check_spares_runs
from txl_tf.training.distribution import BFLOAT16_UNITS

# ----------------------------------------------------------------------------------------------------------- modes


def compare(mode, shape, rounds, seconds, peaks, folder):
    """Measures a mode, prints its table and returns its rows.

    Args:
        mode: the mode.
        shape: sizes of the model and of the data.
        rounds: number of turns of each contestant.
        seconds: shortest length of a turn.
        peaks: `{dtype: operations per second}`, see `matmul_peak`.
        folder: gets the texts and runs that contestants read.
    """
    figure_of_mode = {"preparation": "words_per_second", "startup": "seconds", "first_answer": "seconds"}
    figure = figure_of_mode.get(mode, "tokens_per_second")
    rows = []
    for group in groups_of(mode):
        with contextlib.ExitStack() as stack:
            # With --against, the processes of both checkouts start at the same time, to save time.
            pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(len(group) if FLAGS.against else 1))
            started = pool.map(lambda each: start(mode, *each, shape, seconds, folder, stack), group.values())
            turns = {name: turn for name, turn in zip(group, started, strict=True) if turn}
            rows += rows_of(mode, figure, take_turns(turns, rounds))
    for row in rows if language_models.is_training(mode) else ():
        if row["contestant"] in peers.PEERS:
            continue  # `training_operations` are those of the library's model
        rate = language_models.training_operations(shape) / row["milliseconds_per_step"] * 1000
        row["share_of_peak"] = rate / peaks[row["contestant"].split()[1]]  # the second word of a name is the dtype
    print_table(f"{mode}: {describe(shape)}", rows)
    if mode == "startup":
        rows[-1]["imports"] = imports = processes.import_seconds()
        parts = ", ".join(f"{name} {taken:.2f} s" for name, taken in imports.items())
        print(f"  imports by -X importtime, each with the imports in it: {parts}", flush=True)
    return rows


def compare_workers(shape, rounds, seconds):
    """Measures training by several numbers of workers, prints the table and returns its rows: the mode `workers`."""
    rows = []
    for n in WORKERS:
        with contextlib.ExitStack() as stack:
            turns = {f"{n} alone": start_workers(shape, n, seconds, stack)}
            for name, size in BUCKETS.items() if n > 1 else ():
                turns[f"{n} workers, {name}"] = start_workers(shape, n, seconds, stack, size)
            rows += rows_of("workers", "tokens_per_second", take_turns(turns, rounds))
    for row in rows:
        row["speedup"] = row["tokens_per_second"] / rows[0]["tokens_per_second"]
    print_table(f"workers: {describe(shape)}", rows)
    print(f"  bytes of the weights: {rows[0]['parameter_bytes']:,.0f}; bytes all-reduced: by one worker in one step")
    print(
        "  speed: tokens/s relative to one process; loopback: all that the machine sent to itself in a step", flush=True
    )
    return rows


def start_workers(shape, n, seconds, stack, bytes_per_pack=None):
    """Starts `n` processes, each of which is a worker.

    Args:
        shape: sizes of the model and of the batch.
        n: number of workers. Each trains on its part of every batch.
        seconds: how long a turn trains, roughly.
        stack: ends the processes.
        bytes_per_pack: size of the buckets in which gradients are all-reduced; 0 for a single one. `None`: the workers
            do not form a cluster, and each trains a model of its own.

    Returns:
        A function that lets all workers train for a turn and returns the figures.
    """
    group = [stack.enter_context(processes.Process()) for _ in range(n)]
    pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(n))
    rows = shape["batch_size"] // n
    arguments = {"shape": shape, "rows": rows}
    if bytes_per_pack is not None:
        cluster = [f"localhost:{port}" for port in processes.free_ports(n)]
        arguments |= {"cluster": cluster, "bytes_per_pack": bytes_per_pack}
    first_worker, *_ = pool.map(lambda i: group[i].call("begin_worker", index=i, **arguments), range(n))
    all_reduced = first_worker.pop("reduced_bytes")  # of each collective operation of a step

    def train(steps):
        return list(pool.map(lambda process: process.call("train_steps", steps=steps), group))

    steps = max(2, round(1000 * seconds / train(2)[0]["milliseconds_per_step"]))

    def turn():
        before = processes.loopback_bytes()
        of_workers = train(steps)
        sent = (processes.loopback_bytes() - before) / (steps + 1)  # `train_steps` makes one more step, not timed
        milliseconds = statistics.mean(figures["milliseconds_per_step"] for figures in of_workers)
        return {
            "tokens_per_second": 1000 * n * rows * shape["tgt_len"] / milliseconds,
            "milliseconds_per_step": milliseconds,
            "collectives": len(all_reduced), "reduced_bytes": sum(all_reduced), "loopback_mb": sent / 1e6,
            **first_worker,  # `parameter_bytes`
            "peak_memory_mb": max(figures["peak_memory_mb"] for figures in of_workers),
        }  # fmt: skip

    return turn


def compare_ray(shape, rounds, folder):
    """Measures programs with Ray and without it, prints their tables and returns their rows."""
    rows = []
    with cluster.started(cores=4) as address:
        for task, figure, turns in cluster.tasks(text_folder("ray", folder), address):
            rows += rows_of(f"ray {task}", figure, take_turns(turns, rounds))
            print_table(f"ray {task}: {describe(shape)}", [row for row in rows if row["mode"] == f"ray {task}"])
    return rows


def compare_failures(shape, folder):
    """Measures training runs that fail, prints their times next to the simulated ones, and returns the rows."""
    with cluster.started(cores=4) as address:
        rows = [cluster.failures(text_folder("ray_failures", folder), address, workers) for workers in (2, 3, 4)]
    print_table(f"ray_failures: {describe(shape)}", rows)
    return rows


def compare_serving(shape, rounds, seconds, folder):
    """Measures the server with several numbers of clients, prints the tables and returns their rows."""
    rows = []
    run = os.path.join(trained("serving", str(processes.ROOT), folder), serving.MODEL)
    with serving.started(run) as address:
        for name in serving.REQUESTS:
            turns = {
                f"{name}, clients: {n}": functools.partial(serving.turn, address, name, n, seconds)
                for n in serving.CLIENTS
            }
            take_turns(turns, rounds=1)  # the first requests compile graphs
            rows += rows_of("serving", "requests_per_second", take_turns(turns, rounds))
    print_table(f"serving: {describe(shape)}", rows)
    return rows


def groups_of(mode):
    """Divides the contestants of a mode into groups. In each group, the others are compared with the first one.

    Returns:
        List of `{name in the table: (name of the contestant, its checkout)}`. Without `--against` there is one group of
        all contestants; with it, a group of two checkouts for each contestant. Empty if `--contestants` excludes all.
    """
    special = {
        "preparation": ["reference", "txl_tf"],
        "export": [REFERENCE, "txl_tf float32", "txl_tf bfloat16 weights"],
        "startup": [REFERENCE, "txl_tf float32"],
        "peers": ["txl_tf float32", "txl_tf bfloat16", f"{PRODUCTS} float32", f"{PRODUCTS} bfloat16", *peers.PEERS],
        "first_answer": [processes.IMPORT, *processes.ANSWERS],
    }
    names = special.get(mode) or list(contestants.make_contestants(mode, FLAGS.jit))
    if "amx_bf16" not in processor_flags():
        names = [name for name in names if name != ROUNDED]
    words = FLAGS.contestants or [""]
    chosen = [name for name in names if any(word in name for word in words)]
    if not FLAGS.against:
        return [{name: (name, processes.ROOT) for name in dict.fromkeys([names[0], *chosen])}] if chosen else []
    checkouts = {"other": os.path.abspath(FLAGS.against), "this": processes.ROOT}
    groups = []
    for name in [name for name in chosen if takes_part_against(mode, name)]:
        label = name.removeprefix("txl_tf").strip()
        groups.append({f"{side} {label}".strip(): (name, path) for side, path in checkouts.items()})
    return groups


def takes_part_against(mode, name):
    """Whether a contestant takes part with `--against`.

    Only contestants of the library do. Without `--contestants`, most of those in bfloat16 and some cases of writing do
    not.
    """
    of_library = name.startswith("txl_tf") or name in WRITING or name in processes.ANSWERS
    if not of_library or name in (ONE_PART, ROUNDED, taggers.AS_THEY_COME):
        return False
    usual = name in WRITING_AGAINST if name in WRITING else "bfloat16" not in name or mode in BFLOAT16_AGAINST
    return usual or FLAGS.contestants is not None


def start(mode, name, checkout, shape, seconds, folder, stack):
    """Starts a contestant. Returns a function that measures one turn of it and returns `{figure: value}`.

    If a contestant has a new process in every turn, its function starts the process. If a peer cannot be built, prints
    the reason and returns `None`.

    Args:
        mode, name, shape: the contestant.
        checkout: folder of the checkout whose library it uses.
        seconds: shortest length of a turn.
        folder: gets the texts and runs that it reads.
        stack: an `ExitStack`. When it closes, it ends the process of the contestant.
    """
    contestant = {"mode": mode, "name": name, "shape": shape, "jit": FLAGS.jit}
    if name in peers.PEERS:
        process = stack.enter_context(processes.Process(program=processes.PEERS))
        try:
            first = process.call("begin", **contestant)
        except ValueError as error:
            print(f"  {name} does not take part: {error}", flush=True)
            return None
        return lambda: first | process.call("turn", seconds=seconds)
    if mode in LASTING:
        process = stack.enter_context(processes.Process(checkout))
        if mode == "scoring":
            contestant["run"] = os.path.join(trained(mode, checkout, folder), "lm")
        first = process.call("begin", **contestant)
        return lambda: first | process.call("turn", seconds=seconds)
    if mode == "preparation":
        return lambda: processes.alone("prepare", checkout, name=name, folder=text_folder(mode, folder))
    if mode == "startup":
        text = os.path.join(text_folder(mode, folder), "train.txt")
        if name == REFERENCE:
            return lambda: processes.watch_reference(shape, text)
        return lambda: processes.watch(shape, text, checkout)
    if mode == "first_answer":
        return lambda: processes.answer(name, trained(mode, checkout, folder), checkout)

    def export():
        """One turn: a new process exports the model, and another one loads it without txl_tf to predict tokens."""
        with tempfile.TemporaryDirectory() as parent, processes.Process() as process:
            directory = os.path.join(parent, "1")
            figures = processes.alone("export", checkout, name=name, shape=shape, directory=directory)
            figures |= process.call("load", directory=directory)
            return figures | process.call("turn", seconds=seconds, least=3)

    def train_anew():
        """One turn: a new process makes the model and trains it."""
        with processes.Process(checkout) as process:
            return process.call("begin", **contestant) | process.call("turn", seconds=seconds, least=2)

    return export if mode == "export" else train_anew


@functools.cache
def text_folder(mode, folder):
    """Writes train.txt, valid.txt and test.txt of random words to a new folder in `folder`, and returns its path.

    Later calls for the same mode return the same folder.
    """
    shape = shape_of(mode)
    folder = tempfile.mkdtemp(dir=folder)
    n_token = 5000 if mode in ("startup", "first_answer", "serving") else shape["n_token"]
    for split, megabytes in (("train", shape["megabytes"]), ("valid", 0.2), ("test", 0.2)):
        write_text(os.path.join(folder, f"{split}.txt"), n_token, megabytes)
    return folder


@functools.cache
def trained(mode, checkout, folder):
    """Trains the runs of a mode with the programs of a checkout, to a new folder in `folder`. Returns its path.

    Later calls for the same mode and checkout return the same folder.
    """
    shape = shape_of(mode)
    runs = tempfile.mkdtemp(dir=folder)
    if mode == "scoring":
        processes.train_to_score(checkout, shape, runs)
    elif mode == "serving":
        processes.train_to_serve(checkout, shape, os.path.join(text_folder(mode, folder), "train.txt"), runs)
    else:
        processes.train_to_answer(checkout, shape, os.path.join(text_folder(mode, folder), "train.txt"), runs)
    return runs


def write_text(path, n_token, megabytes):
    """Writes random words with properties of real text: most words are rare, rare words repeat, and so do some lines.

    There are `n_token` words, with the `frequencies` of the benchmark. Every fourth word of a line is that of the line
    before, in the same place. A tenth of all lines are empty, and a tenth are one of a hundred headings. The third word
    is `<unk>`.

    Args:
        path: the new file.
        n_token: number of different words.
        megabytes: least size of the file.
    """
    rng = np.random.default_rng(0)
    letters = np.array(list("etaoinshrdlu"))
    words = ["".join(letters[[int(digit, 12) for digit in np.base_repr(i, 12)]]) for i in range(n_token)]
    words[2] = "<unk>"
    total = np.cumsum(language_models.frequencies(n_token))
    headings = [" = " + " ".join(words[i] for i in rng.integers(n_token, size=3)) + " = \n" for _ in range(100)]
    written = 0
    before = []
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


# --------------------------------------------------------------------------------------------------------- program


def processor():
    """The name of the processor, and its units for bfloat16."""
    text = Path("/proc/cpuinfo").read_text()
    units = [unit for unit in BFLOAT16_UNITS if unit in processor_flags()]
    name = re.search(r"model name\s*: (.*)", text)
    return f"{name.group(1) if name else 'unknown processor'} ({', '.join(units) or 'no unit for bfloat16'})"


def matmul_peak(dtype, size=2048):
    """Floating-point operations per second in a product of matrices `[size, size]`, the best of ten."""
    x = tf.cast(tf.random.normal([size, size]), dtype)
    product = tf.function(lambda x: tf.matmul(x, x)[0, 0])
    return 2 * size**3 / measure([Calls(lambda: product(x).numpy())], rounds=10, seconds=0).min()


def shape_of(mode):
    """The sizes of the model and data of a mode, see `SHAPES`, as changed by flags.

    A flag for a size wins over --scaling and --quick.
    """
    shape = dict(SHAPES[mode])
    if FLAGS.scaling:
        shape["n_layer"] = 2
    if FLAGS.quick:
        shape |= {name: min(2, shape[name]) for name in ("n_layer", "megabytes") if name in shape}
    given: dict[str, Any] = {
        name: FLAGS[name].value for name in shape if name in FLAGS and FLAGS[name].value is not None
    }
    if "cutoffs" in given:
        given["cutoffs"] = [int(cutoff) for cutoff in given["cutoffs"]]
    return {**shape, **given}


def check_mode(mode, shape):
    """Raises ParameterError unless a mode can measure a shape, and `--contestants` fits it."""
    if mode == "writing" and shape["batch_size"] != 1:
        allowed = "1 for mode=writing, which tries several numbers of rows"
        raise ParameterError("batch_size", shape["batch_size"], allowed)
    if mode == "workers" and shape["batch_size"] % WORKERS[-1]:
        raise ParameterError("batch_size", shape["batch_size"], f"a multiple of {WORKERS[-1]}, the most workers")
    contestants.check_shape(mode, shape)
    if FLAGS.contestants and (FLAGS.scaling or mode in OF_THEIR_OWN or not groups_of(mode)):
        allowed = f"left out with mode={mode} or with scaling"
        raise ParameterError("contestants", FLAGS.contestants, allowed)


def rows_of_mode(mode, shape, peaks, folder):
    """Measures a mode, prints its tables and returns their rows."""
    default = 0.2 if FLAGS.quick else 0.3 if FLAGS.scaling else 1.0
    seconds = default if FLAGS.seconds is None else FLAGS.seconds
    few, many = (1, 2) if FLAGS.quick else (3, 3 if FLAGS.scaling else 9)  # turns in new processes, and in a single one
    if FLAGS.runs > 1:  # every run has new processes anyway
        few, many = 1, max(1, many // 3)
    rounds = FLAGS.rounds or (many if mode in LASTING else few)
    if mode == "workers":
        return compare_workers(shape, rounds, seconds)
    if mode == "ray":
        return compare_ray(shape, FLAGS.rounds or few, folder)
    if mode == "ray_failures":
        return compare_failures(shape, folder)
    if mode == "serving":
        return compare_serving(shape, rounds, seconds, folder)
    if not FLAGS.scaling:
        return compare(mode, shape, rounds, seconds, peaks, folder)
    makers = contestants.make_contestants(mode)
    # All run in this process, whose threads cannot change any more. So every core works on each operation.
    ours = {name: functools.partial(makers[name], parts=1) for name in ("txl_tf float32", "txl_tf bfloat16")}
    makers = {REFERENCE: makers[REFERENCE], **ours}
    rows = scale(mode, shape, makers, rounds, seconds)
    if mode != "training":
        shape = {**shape, "tgt_len": min(shape["tgt_len"], 80)}
        rows += scale_length(mode, shape, makers, segments=12 if FLAGS.quick else 96)
    return rows


def chosen_modes():
    """The modes that `--mode` names. Raises ParameterError if one does not exist, or other flags exclude it."""
    left_out = (*OF_THEIR_OWN, "peers") if FLAGS.against else ()
    known = [mode for mode in SHAPES if mode not in left_out and (mode in SCALING or not FLAGS.scaling)]
    if FLAGS.mode is None:
        return [mode for mode in known if mode not in ON_REQUEST]
    modes = known if FLAGS.mode == ["all"] else FLAGS.mode
    unknown = set(modes) - set(known)
    if unknown or not modes:
        message = f"mode must be some of {', '.join(known)}, got {', '.join(sorted(unknown)) or 'none'}"
        raise ParameterError("mode", sorted(unknown), list(known), message)
    return modes


def compile_modules(checkout):
    """Compiles the modules of a checkout to bytecode, as an installation does.

    Python may be set to write no bytecode. Then it would compile the library again at every start that is measured.
    """
    for folder in ("txl_config", "txl_tf", "txl_programs"):
        path = os.path.join(checkout, folder)
        if os.path.isdir(path):  # older checkouts have no txl_config
            compileall.compile_dir(path, quiet=2)


def commit_of(checkout):
    """The commit of a checkout, with `-dirty` if files differ from it; `None` without Git."""
    command = ["git", "-C", checkout, "describe", "--always", "--dirty", "--exclude=*"]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main():
    modes = chosen_modes()
    if FLAGS.against and (FLAGS.scaling or not os.path.isdir(os.path.join(FLAGS.against, "txl_tf"))):
        raise ParameterError("against", FLAGS.against, "a folder with a txl_tf, and left out with scaling")
    if FLAGS.jit and (FLAGS.scaling or not any(language_models.is_training(mode) or mode in PAIRS for mode in modes)):
        message = f"jit is for modes of training without scaling, got {', '.join(modes)}"
        raise ParameterError("jit", FLAGS.jit, "left out for these modes", message)
    check_spares_runs("json", FLAGS.json)
    check_writable(FLAGS.json)
    logging.set_verbosity(logging.ERROR)  # with --scaling, TensorFlow warns of many functions
    if FLAGS.inter_op_threads:
        os.environ["TF_NUM_INTEROP_THREADS"] = str(FLAGS.inter_op_threads)  # the processes inherit it
    shapes = {mode: shape_of(mode) for mode in modes}
    for mode, shape in shapes.items():
        check_mode(mode, shape)
    started = time.perf_counter()
    peaks = {dtype: matmul_peak(dtype) for dtype in ("float32", "bfloat16")}
    machine = {"cpus": os.cpu_count(), "processor": processor(), "tensorflow": tf.__version__, "flops": peaks}
    load = os.getloadavg()[0]
    products = ", ".join(f"{peak / 1e9:,.0f} GFLOP/s in {dtype}" for dtype, peak in peaks.items())
    print(f"{machine['cpus']} cores, {machine['processor']}, load {load:.1f}, TensorFlow {tf.__version__}")
    print(f"matrix products: {products}")
    checkouts = {"this": str(processes.ROOT)} | ({"other": os.path.abspath(FLAGS.against)} if FLAGS.against else {})
    commits = {side: commit_of(path) for side, path in checkouts.items()}
    for path in checkouts.values():
        compile_modules(path)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(1, FLAGS.runs + 1):
            for mode, shape in shapes.items():
                rows += [{**row, "run": number} for row in rows_of_mode(mode, shape, peaks, folder)]
    summary = summary_of(rows)
    if FLAGS.runs > 1 and summary:
        sides = ", ".join(f"{side} {commit or checkouts[side]}" for side, commit in commits.items())
        print_summary(f"ratios on {machine['cpus']} cores of {machine['processor']}; {sides}", summary)
    machine["load"] = [load, os.getloadavg()[0]]
    print(f"\nload at the end {machine['load'][1]:.1f}, {time.perf_counter() - started:.0f} s in all")
    if FLAGS.json:
        figures = {"machine": machine, "commits": commits, "shapes": shapes, "rows": rows, "summary": summary}
        Path(FLAGS.json).write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    run(main)
