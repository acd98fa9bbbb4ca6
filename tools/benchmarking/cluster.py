"""Measures the programs on a Ray cluster of this machine and without Ray, and training runs whose workers fail.

Every turn is a new command. The cluster has as many cores as there are workers, even if the machine has fewer. So the
cost of Ray is the ratio to the same number of processes without Ray, not to a single process.
"""

import contextlib
import csv
import functools
import json
import os
import re
import signal
import statistics
import subprocess
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from benchmarking import processes
from benchmarking.failing import train as simulate
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

MODEL = {
    "n_layer": 4, "d_model": 128, "d_embed": 128, "n_head": 4, "d_head": 32, "d_inner": 512, "tgt_len": 64,
    "mem_len": 64, "train_batch_size": 24, "eval_batch_size": 24, "max_eval_batch": 2, "level": "char",
}  # fmt: skip
LINES = 4000  # most lines to score


@contextlib.contextmanager
def started(cores):
    """Starts a cluster of one node with this number of cores; yields its address."""
    from ray.cluster_utils import Cluster

    node = {"num_cpus": cores, "object_store_memory": 200 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    try:
        yield cluster.address
    finally:
        cluster.shutdown()


command_of = functools.partial(processes.command_of, processes.ROOT)
environment_of = functools.partial(processes.environment_of, processes.ROOT, TF_CPP_MIN_LOG_LEVEL="3")


@contextlib.contextmanager
def running(command, stdout=subprocess.DEVNULL, **variables):
    """Starts a command, yields its process, and waits for its end. Raises ValueError if it fails, see `failure`."""
    with tempfile.TemporaryFile("w+") as errors:
        pipes = {"stdout": stdout, "stderr": errors, "text": True}
        with subprocess.Popen(command, env=environment_of(**variables), **pipes) as process:
            yield process
        if process.returncode:
            errors.seek(0)
            raise processes.failure(" ".join(command), errors.read())


def run(program, variables=(), **flags):
    """Runs a program of this checkout. Returns its seconds and its peak memory in MB: a dict of figures.

    With `ray_address`, except for train.py, it also returns the peak memory of Ray's largest worker, `worker_peak_mb`.

    Args:
        program: path in the checkout.
        variables: environment variables, a dict or pairs.
        **flags: flags of the program.
    """
    begun = time.perf_counter()
    peaks = {}
    with running(command_of(program, **flags), **dict(variables)) as process:
        while process.poll() is None:
            note_peak(peaks, "peak_memory_mb", [process.pid])
            if "ray_address" in flags and program != "train.py":  # it trains in processes that Ray's workers start
                note_peak(peaks, "worker_peak_mb", ray_workers())
            time.sleep(0.5)
        seconds = time.perf_counter() - begun
    return {"seconds": seconds, **peaks}


def note_peak(peaks, name, pids):
    """Raises `peaks[name]` to the largest peak memory, in MB, of some processes."""
    for pid in pids:
        with contextlib.suppress(OSError, StopIteration):  # it has ended
            peaks[name] = max(peaks.get(name, 0), processes.peak_memory(pid))


def commands():
    """Yields `(id, list of the words of the command)` for every process of this machine."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            yield int(path.parent.name), path.read_text().split("\0")


def ray_workers():
    """Ids of Ray's worker processes that have work."""
    return (pid for pid, words in commands() if words[0].startswith("ray::") and "IDLE" not in words[0])


def by_ray(address, workers):
    """The flags with which a program uses Ray; none for 0 workers."""
    return {"ray_address": address, "ray_workers": workers} if workers else {}


def tasks(folder, address):
    """Yields `(task, figure to compare, {contestant: turn})`. The first contestant is the program without Ray.

    Args:
        folder: contains `train.txt` and `valid.txt`, and gets the results.
        address: address of the Ray cluster.
    """
    text = Path(f"{folder}/train.txt").read_text()
    words = len(text.split())
    names = {workers: f"{workers} on Ray" if workers else "the program" for workers in (0, 1, 2, 4)}
    turns = {name: lambda n=n: preparation(folder, address, n, words) for n, name in names.items()}
    yield "preparation", "words_per_second", turns
    turns = {"2 by hand": lambda: training(folder, None), "2 on Ray": lambda: training(folder, address)}
    yield "training", "tokens_per_second", turns
    with on_core(1), started(2) as other:
        turns = {"2 by hand": lambda: training(folder, None, 0), "2 on Ray": lambda: training(folder, other, 0)}
        yield "training on one core, Ray on the other", "tokens_per_second", turns
    lines = [line for line in text.splitlines() if line.strip()][:LINES]
    Path(f"{folder}/lines.txt").write_text("\n".join(lines) + "\n")
    train_to_score(folder)
    turns = {names[n]: lambda n=n: scoring(folder, address, n, len(lines)) for n in (0, 1, 2)}
    yield "scoring", "lines_per_second", turns


# ----------------------------------------------------------------------------------------------------- preparation


def preparation(folder, address, workers, words):
    """Prepares a text once. Returns seconds and words per second.

    Args:
        folder: contains train.txt, and gets the results.
        address: of the Ray cluster.
        workers: number of workers; 0 for the program without Ray.
        words: number of words of the text.
    """
    data_dir = f"{folder}/prepared-{time.monotonic_ns()}"
    flags = {"dataset": "text", "data_path": f"{folder}/train.txt", "level": "word", "data_dir": data_dir}
    found = run("tools/prepare_data.py", **flags, **by_ray(address, workers))
    return {"words_per_second": words / found["seconds"], **found}


# -------------------------------------------------------------------------------------------------------- training


def tokens_per_second(model_dir):
    """The median of tokens per second in log.csv, without the first line, whose time includes tracing."""
    with open(f"{model_dir}/log.csv") as file:
        return statistics.median(float(row["tokens_per_second"]) for row in list(csv.DictReader(file))[1:])


@contextlib.contextmanager
def on_core(core):
    """In this block, new threads and processes run only on the given core. With `None`, nothing changes."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, before if core is None else {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def programs_in(model_dir):
    """Ids of the processes that train the run `model_dir` as workers on Ray."""
    return (pid for pid, words in commands() if f"--model_dir={model_dir}" in words and "--ray_workers=0" in words)


def move(pid, core):
    """Makes every thread of a process run on the given core."""
    with contextlib.suppress(OSError):  # it has ended
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), {core})


@contextlib.contextmanager
def kept_on_core(model_dir, core):
    """In this block, keeps the workers on Ray that train the run `model_dir` on the given core; `None` moves none."""
    ended = threading.Event()

    def keep():
        while not ended.wait(0.5):
            for pid in programs_in(model_dir):
                move(pid, core)

    if core is not None:
        threading.Thread(target=keep).start()
    try:
        yield
    finally:
        ended.set()


def training(folder, address, core=None, steps=200):
    """Trains once with two workers. Returns tokens per second of the steps, and the seconds of the whole program.

    Args:
        folder: contains valid.txt, and gets the results.
        address: of the Ray cluster; `None` starts the workers without Ray.
        core: the only core that the workers run on. `None`: all cores.
        steps: number of steps.
    """
    model_dir = f"{folder}/run-{time.monotonic_ns()}"
    flags = {
        **MODEL, "data_path": f"{folder}/valid.txt", "model_dir": model_dir, "train_steps": steps, "iterations": 20,
        "save_steps": steps,
    }  # fmt: skip
    begun = time.perf_counter()
    if address:
        with kept_on_core(model_dir, core):
            run("train.py", **flags, **by_ray(address, 2))
    else:
        workers = [f"localhost:{port}" for port in processes.free_ports(2)]
        configs = [{"cluster": {"worker": workers}, "task": {"type": "worker", "index": i}} for i in range(2)]
        with on_core(core), ThreadPoolExecutor() as pool:
            list(pool.map(lambda config: run("train.py", {"TF_CONFIG": json.dumps(config)}, **flags), configs))
    return {"tokens_per_second": tokens_per_second(model_dir), "seconds": time.perf_counter() - begun}


# --------------------------------------------------------------------------------------------------------- scoring


def train_to_score(folder):
    """Trains the run that `scoring` uses."""
    flags = {**MODEL, "data_path": f"{folder}/valid.txt", "model_dir": f"{folder}/run", "train_steps": 20}
    run("train.py", **flags)


def scoring(folder, address, workers, lines):
    """Scores lines once. Returns seconds and lines per second.

    Args:
        folder: contains the run and lines.txt, and gets the results.
        address: of the Ray cluster.
        workers: number of workers; 0 for the program without Ray.
        lines: number of lines.
    """
    output = Path(f"{folder}/scores-{time.monotonic_ns()}")
    if workers:
        output.mkdir()
    flags = {"model_dir": f"{folder}/run", "input": f"{folder}/lines.txt", "output": output}
    found = run("tools/score.py", **flags, **by_ray(address, workers))
    return {"lines_per_second": lines / found["seconds"], **found}


# ------------------------------------------------------------------------------------- training runs that fail


class Watched:
    """A training run on Ray of which a worker is killed at planned times. All workers then start again.

    Args:
        folder: contains valid.txt, and gets the run.
        address: address of the Ray cluster.
        workers, steps, save_steps: number of workers, of steps, and of steps between checkpoints.
        until_kill: for each start that is to fail, the seconds from its first step until a worker is killed.

    Attributes:
        kills: the times at which a worker was killed, in seconds since 1970.
    """

    def __init__(self, folder, address, workers, steps, save_steps, until_kill):
        self.model_dir = f"{folder}/failing-{time.monotonic_ns()}"
        flags = {
            **MODEL, "data_path": f"{folder}/valid.txt", "model_dir": self.model_dir, "train_steps": steps,
            "iterations": 1, "save_steps": save_steps,
        }  # fmt: skip
        self.command = command_of("train.py", **flags, **by_ray(address, workers))
        self.until_kill = list(until_kill)
        self.has_made_a_step = False  # since the workers started
        self.kills = []

    def run(self):
        """Trains until the last step, and returns `self`."""
        process: Any
        with running(self.command, subprocess.PIPE) as process:
            for line in process.stdout:
                self.look_at(line)
        return self

    def look_at(self, line):
        """Reads a line of the output. At the first step after a start, plans the next kill."""
        if "all start again" in line:
            self.has_made_a_step = False
        elif re.match(r"step +\d+/", line) and not self.has_made_a_step and len(self.kills) < len(self.until_kill):
            self.has_made_a_step = True
            threading.Timer(self.until_kill[len(self.kills)], self.kill).start()

    def kill(self):
        """Kills one of the processes that train, and records the time."""
        for pid in programs_in(self.model_dir):
            with contextlib.suppress(OSError):  # it has ended
                os.kill(pid, signal.SIGKILL)
                self.kills.append(time.time())
                return

    def figures(self, save_steps):
        """Computes the seconds that the parts of the run took, from the times at which its steps ended.

        Returns:
            `(seconds, until_kill)`: a dict with the seconds of a step (`step`), to save a checkpoint (`saving`), from a
            kill to the next step (`starting`), and of the whole run (`real`); and for each start that failed, the
            seconds from its first step to the kill.
        """
        # For each start, the times at which its steps ended.
        starts = [times for times in map(times_of, sorted(Path(self.model_dir, "train").glob("*.v2"))) if times]
        steps = np.concatenate([np.diff(times) for times in starts])
        first = np.array([times[0] for times in starts])
        last = starts[-1][-1]
        # One of `save_steps` steps saves a checkpoint, and takes longer than the median. The first steps after a start
        # do, too; their extra time counts as saving.
        return {
            "step": np.median(steps), "saving": (np.mean(steps) - np.median(steps)) * save_steps,
            "starting": np.mean(first[1:] - self.kills), "real": last - first[0],
        }, np.array(self.kills) - first[:-1]  # fmt: skip


def times_of(path):
    """The times at which the steps in a file of TensorBoard ended, in seconds since 1970."""
    events = EventFileLoader(str(path)).Load()
    return [event.wall_time for event in events if any(value.tag == "epoch_step" for value in event.summary.value)]


def failures(folder, address, workers, steps=150, save_steps=15, n_failures=3):
    """Measures a training run whose workers are killed, and simulates it. Returns a row of the table.

    The row has the measured seconds of the run and of its parts, see `Watched.figures`, the number of failures, and the
    seconds of the run that the simulation predicts. The simulation gets the measured seconds of a step, of saving a
    checkpoint, from a kill to the next step, and from the first step after each start to the next kill.
    """
    planned = np.random.default_rng(workers).uniform(4, 12, n_failures)  # seconds from the first step to the kill
    measured, until_kill = Watched(folder, address, workers, steps, save_steps, planned).run().figures(save_steps)
    mtbf = 1.0  # has no effect, because `GivenTimes` draws the times between failures
    simulated = simulate(
        steps, measured["step"], save_steps, measured["saving"], measured["starting"], mtbf, GivenTimes(until_kill)
    )
    number = simulated.pop("failures")  # all other values in `simulated` are seconds
    row = {"mode": "ray_failures", "contestant": f"{workers} workers", "failures": number}
    seconds = {name: float(value) for name, value in measured.items()}
    return {**row, **seconds, "simulated": float(sum(simulated.values()))}


class GivenTimes:
    """Stands for a random generator: it draws the given values, and then infinity, so that no failure follows."""

    def __init__(self, values):
        self.values = iter(values)

    def exponential(self, mean):
        return next(self.values, float("inf"))
