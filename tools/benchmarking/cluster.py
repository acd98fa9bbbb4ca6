"""The programs on a Ray cluster of this machine, beside the same programs without Ray; and a training that fails.

Every turn is a new command. The cluster has as many cores as there are workers, though the machine may have fewer: so
what Ray costs is the ratio to the same number of processes without it, not to one.
"""

import contextlib
import csv
import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from benchmarking import processes
from benchmarking.failing import train

MODEL = {
    "n_layer": 4, "d_model": 128, "d_embed": 128, "n_head": 4, "d_head": 32, "d_inner": 512, "tgt_len": 64,
    "mem_len": 64, "train_batch_size": 24, "eval_batch_size": 24, "max_eval_batch": 2, "level": "char",
}  # fmt: skip
LINES = 4000  # to score
SMALL = {**MODEL, "n_layer": 2, "d_model": 64, "d_embed": 64, "d_head": 16, "d_inner": 128}


@contextlib.contextmanager
def started(cores):
    """The address of a cluster of one node with so many cores."""
    from ray.cluster_utils import Cluster

    node = {"num_cpus": cores, "object_store_memory": 200 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    try:
        yield cluster.address
    finally:
        cluster.shutdown()


def command_of(program, **flags):
    return [sys.executable, str(processes.ROOT / program), *(f"--{name}={value}" for name, value in flags.items())]


def environment_of(**variables):
    return {**os.environ, "PYTHONPATH": str(processes.ROOT), "TF_CPP_MIN_LOG_LEVEL": "3", **variables}


def run(program, variables=(), **flags):
    """Runs a program to its end: seconds that it took, peak memory in MB of its process and of Ray's largest worker."""
    begun, peaks = time.perf_counter(), {}
    with tempfile.TemporaryFile("w+") as errors:
        command = command_of(program, **flags)
        environment = environment_of(**dict(variables))
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=errors)
        while process.poll() is None:
            note_peak(peaks, "peak_memory_mb", [process.pid])
            if "ray_address" in flags:
                note_peak(peaks, "worker_peak_mb", ray_workers())
            time.sleep(0.5)
        seconds = time.perf_counter() - begun
        if process.returncode:
            errors.seek(0)
            raise RuntimeError(f"{command} failed: {errors.read()[-3000:]}")
    return {"seconds": seconds, **peaks}


def note_peak(peaks, name, pids):
    for pid in pids:
        with contextlib.suppress(OSError, StopIteration):  # it has ended
            peaks[name] = max(peaks.get(name, 0), processes.peak_memory(pid))


def ray_workers():
    """Ids of Ray's processes that do what programs asked for."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if path.read_bytes().startswith(b"ray::") and b"IDLE" not in path.read_bytes():
                yield int(path.parent.name)


def by_ray(address, workers):
    return {"ray_address": address, "ray_workers": workers} if workers else {}


def tasks(folder, address):
    """`(task, its figure, {contestant: turn})`, one after the other; the first contestant is the program without Ray.

    Args:
        folder: where `train.txt` and `valid.txt` are.
    """
    text = Path(f"{folder}/train.txt").read_text()
    words = len(text.split())
    names = {workers: f"{workers} on Ray" if workers else "the program" for workers in (0, 1, 2, 4)}
    turns = {name: lambda n=n: preparation(folder, address, n, words) for n, name in names.items()}
    yield "preparation", "words_per_second", turns
    turns = {"2 by hand": lambda: training(folder, None), "2 on Ray": lambda: training(folder, address)}
    yield "training", "tokens_per_second", turns
    lines = [line for line in text.splitlines() if line.strip()][:LINES]
    Path(f"{folder}/lines.txt").write_text("\n".join(lines) + "\n")
    train_to_score(folder)
    turns = {names[n]: lambda n=n: scoring(folder, address, n, len(lines)) for n in (0, 1, 2)}
    yield "scoring", "lines_per_second", turns


# ----------------------------------------------------------------------------------------------------- preparation


def preparation(folder, address, workers, words):
    """A turn of a preparation by so many workers, 0 for the program without Ray: seconds and words a second."""
    data_dir = f"{folder}/prepared-{time.monotonic_ns()}"
    flags = {"dataset": "text", "data_path": f"{folder}/train.txt", "level": "word", "data_dir": data_dir}
    found = run("tools/prepare_data.py", **flags, **by_ray(address, workers))
    return {"words_per_second": words / found["seconds"], **found}


# -------------------------------------------------------------------------------------------------------- training


def tokens_per_second(model_dir):
    """The median of the lines of log.csv, but the first, of which part was spent on tracing."""
    with open(f"{model_dir}/log.csv") as file:
        return statistics.median(float(row["tokens_per_second"]) for row in list(csv.DictReader(file))[1:])


def training(folder, address, steps=200):
    """A turn of a training by two workers: by Ray, or without an address by hand. Tokens a second of its steps."""
    model_dir = f"{folder}/run-{time.monotonic_ns()}"
    flags = {
        **MODEL, "data_path": f"{folder}/valid.txt", "model_dir": model_dir, "train_steps": steps, "iterations": 20,
        "save_steps": steps,
    }  # fmt: skip
    begun = time.perf_counter()
    if address:
        run("train.py", **flags, **by_ray(address, 2))
    else:
        workers = [f"localhost:{port}" for port in processes.free_ports(2)]
        configs = [{"cluster": {"worker": workers}, "task": {"type": "worker", "index": i}} for i in range(2)]
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda config: run("train.py", {"TF_CONFIG": json.dumps(config)}, **flags), configs))
    return {"tokens_per_second": tokens_per_second(model_dir), "seconds": time.perf_counter() - begun}


# --------------------------------------------------------------------------------------------------------- scoring


def train_to_score(folder):
    flags = {**MODEL, "data_path": f"{folder}/valid.txt", "model_dir": f"{folder}/run", "train_steps": 20}
    run("train.py", **flags)


def scoring(folder, address, workers, lines):
    """A turn of scoring lines by so many workers, 0 for the program without Ray: lines a second."""
    output = Path(f"{folder}/scores-{time.monotonic_ns()}")
    if workers:
        output.mkdir()
    flags = {"model_dir": f"{folder}/run", "input": f"{folder}/lines.txt", "output": output}
    found = run("tools/score.py", **flags, **by_ray(address, workers))
    return {"lines_per_second": lines / found["seconds"], **found}


# -------------------------------------------------------------------------------------------- a training that fails


class Watched:
    """A training by Ray of which a worker is killed now and then, and when its steps were done.

    Args:
        lasts: seconds from the first step after a start to the failure, one for each start that is to fail.
    """

    def __init__(self, folder, address, workers, steps, save_steps, lasts):
        self.model_dir = f"{folder}/failing-{workers}"
        flags = {
            **SMALL, "data_path": f"{folder}/valid.txt", "model_dir": self.model_dir, "train_steps": steps,
            "iterations": 1, "save_steps": save_steps,
        }  # fmt: skip
        self.command = command_of("train.py", **flags, **by_ray(address, workers))
        self.lasts, self.steps, self.starts, self.kills = list(lasts), [], [], []  # steps: (number, time)

    def run(self):
        with tempfile.TemporaryFile("w+") as errors:
            pipes = {"stdout": subprocess.PIPE, "stderr": errors, "text": True}
            with subprocess.Popen(self.command, env=environment_of(), **pipes) as process:
                for line in process.stdout:
                    self.look_at(line)
            if process.returncode:
                errors.seek(0)
                raise RuntimeError(f"{self.command} failed: {errors.read()[-3000:]}")
        return self

    def look_at(self, line):
        """Notes when a step was done; after the first one of a start, sets the next failure."""
        step = re.match(r"step +(\d+)/", line)
        if not step:
            return
        self.steps.append((int(step[1]), time.perf_counter()))
        if len(self.starts) == len(self.kills):
            self.starts.append(self.steps[-1])
            if len(self.starts) <= len(self.lasts):
                threading.Timer(self.lasts[len(self.starts) - 1], self.kill).start()

    def kill(self):
        """Kills one of the programs, whichever comes first."""
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                words = path.read_text().split("\0")
                if f"--model_dir={self.model_dir}" in words and "--ray_workers=0" in words:
                    os.kill(int(path.parent.name), signal.SIGKILL)
                    self.kills.append(time.perf_counter())
                    return

    def lasted(self):
        """Seconds from the first step of each start to its failure."""
        return [kill - start[1] for kill, start in zip(self.kills, self.starts, strict=False)]

    def figures(self, save_steps):
        """Seconds in the mean of a step, of saving, from a failure to the first step; and in all."""
        pairs = [(n, later - sooner) for (m, sooner), (n, later) in itertools.pairwise(self.steps) if n == m + 1]
        step = statistics.median(seconds for n, seconds in pairs if (n - 1) % save_steps)
        saving = statistics.mean(seconds for n, seconds in pairs if not (n - 1) % save_steps) - step
        starting = [start[1] - kill for kill, start in zip(self.kills, self.starts[1:], strict=True)]
        whole = self.steps[-1][1] - self.steps[0][1]
        return {"step": step, "saving": saving, "starting": np.mean(starting) if starting else 0.0, "real": whole}


def failures(folder, address, workers, steps=400, save_steps=40, failing=3):
    """A row: a training that fails, and what the simulation makes of steps, savings and starts of the same length."""
    lasts = np.random.default_rng(workers).uniform(2, 8, failing)
    found = Watched(folder, address, workers, steps, save_steps, lasts).run()
    measured = found.figures(save_steps)
    taken = train(
        steps, measured["step"], save_steps, measured["saving"], measured["starting"], 1.0, Given(found.lasted())
    )
    simulated = sum(taken.values()) - taken["failures"]
    row = {"mode": "ray_failures", "contestant": f"{workers} workers", "failures": taken["failures"]}
    return {**row, **measured, "simulated": simulated}


class Given:
    """A generator that draws what it is given, then never again."""

    def __init__(self, values):
        self.values = iter(values)

    def exponential(self, mean):
        return next(self.values, float("inf"))
