"""A training program as several workers on a Ray cluster, each told by TF_CONFIG which one it is.

Ray Train places the workers and, where one is gone, starts all of them anew: they go on from the newest checkpoint. A
worker is the program as it was typed, in a process of its own. What it does with signals, memory and files is what it
does without Ray. The driver is where it was typed:

    driver: run_workers -> Ray Train -> worker: _work -> the program, with TF_CONFIG
       ^ what it writes, how it ended <- Desk -> a signal to end ^
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from txl_tf.cluster.connection import connected
from txl_tf.config import TrainingClusterConfig
from txl_tf.runs.setup import WorkerGone

logger = logging.getLogger("txl_tf")

_SECONDS_TO_START = 60
_PAUSE = 0.5  # seconds between two looks of the driver at the desk; workers take twice as long


def run_workers(
    command: list[str],
    cluster: TrainingClusterConfig,
    write: Callable[[bytes], Any],
    rows: list[int] = (),
) -> tuple[int, str]:
    """Runs a program on the workers of a cluster, until all of them have ended.

    Ctrl-C, SIGTERM and SIGHUP go on to the workers, which save; after them, or with a second Ctrl-C at once, they are
    raised here.

    Args:
        command: the program and its arguments, for Python. Workers run it in the directory of this process.
        cluster: which cluster, and how many workers.
        write: is given what the first worker writes to its standard output.
        rows: numbers of rows that the replicas of all workers must divide, or some workers stand by.

    Returns:
        `(status, errors)`: 0, or what the first worker that failed ended with; and its standard error.

    Raises:
        ValueError: Ray is not installed, or the address is none.
        ConnectionError: no cluster is there.
        OSError: workers were gone more often than `ray_restarts` allows.
    """
    with connected(cluster.ray_address) as ray, tempfile.TemporaryDirectory() as scratch:
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.tensorflow import TensorflowTrainer
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        desk = ray.remote(num_cpus=0, scheduling_strategy=here)(Desk).remote()
        most, least = cluster.ray_workers, cluster.ray_min_workers
        devices = max(cluster.ray_gpus, 1)
        trainer = TensorflowTrainer(
            _work,
            train_loop_config={
                "desk": desk,
                "command": command,
                "directory": os.getcwd(),
                "rows": [size // devices for size in rows],
                "environment": passed_on(os.environ),
            },
            scaling_config=ScalingConfig(
                num_workers=(least, most) if least else most,
                use_gpu=cluster.ray_gpus > 0,
                resources_per_worker=cluster.resources,
            ),
            run_config=RunConfig(
                storage_path=scratch,  # nothing is stored there: checkpoints are the program's own
                failure_config=FailureConfig(max_failures=cluster.ray_restarts),
            ),
        )
        fit = _Thread(trainer.fit)
        _follow(desk, fit, write, cluster)
        status, errors, gone = ray.get(desk.result.remote())
        if fit.error and not status:
            last = gone or _why(fit.error)
            raise OSError(
                f"workers were gone more than ray_restarts={cluster.ray_restarts} times, at last {last}: the same "
                "command goes on from the newest checkpoint"
            ) from fit.error
        return status, errors


# ------------------------------------------------------------------------------------------------------- the driver


class Desk:
    """What the driver and the workers tell each other: an actor on the driver's machine."""

    def __init__(self):
        self.written, self.signal = [], None
        self.running, self.starts, self.gone = set(), 0, ""
        self.failure = 0, ""

    def started(self, rank: int) -> None:
        self.starts += rank == 0
        self.running.add(rank)

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def ended(self, rank: int, status: int, errors: str, gone: str) -> None:
        """A program has ended. Of several that failed, the first counts: the others may do so because of it."""
        self.running.discard(rank)
        self.gone = gone or self.gone
        if status > 0 and not gone and not self.failure[0]:
            self.failure = status, errors

    def stop(self, number: int) -> bool:
        """Has the workers end by a signal. Returns whether there are any."""
        self.signal = number
        return bool(self.running)

    def wanted(self) -> int | None:
        """The signal that a worker is to pass on to its program."""
        return signal.SIGKILL if self.failure[0] else self.signal

    def read(self) -> tuple[bytes, int, str]:
        """What was written since the last time, how often the workers were started, and which one was gone last."""
        written, self.written = b"".join(self.written), []
        return written, self.starts, self.gone

    def result(self) -> tuple[int, str, str]:
        return *self.failure, self.gone


def _why(error: Exception) -> str:
    """What Ray Train says of the first worker that failed, such as that memory was short: the first line of many."""
    failures = getattr(error, "worker_failures", None) or {0: error}
    rank = min(failures)
    failure = getattr(failures[rank], "health_check_failure", failures[rank])
    return f"worker {rank}: {str(failure).splitlines()[0].rstrip('.')}"


class _Thread(threading.Thread):
    """Calls a function in a thread that does not keep the process; has its `error` once it is `done`.

    `join` does not serve: a signal amid it makes Python 3.11 take the thread for ended.
    """

    def __init__(self, function: Callable):
        super().__init__(daemon=True)
        self.function, self.error, self.done = function, None, threading.Event()
        self.start()

    def run(self):
        try:
            self.function()
        except Exception as error:
            self.error = error
        finally:
            self.done.set()


def _follow(desk, fit: _Thread, write: Callable, cluster: TrainingClusterConfig) -> None:
    """Shows what the first worker writes until `fit` ends. What ends this process meanwhile ends the workers first."""
    import ray

    in_words, there = _needed(cluster, ray.available_resources())
    latest, starts, waited, ending = time.monotonic() + there * _SECONDS_TO_START, 0, False, None
    with _signals_raised():
        while True:
            try:
                done = fit.done.is_set()  # before the last look
                written, now, gone = ray.get(desk.read.remote())
                if now > max(starts, 1):
                    logger.info("%s: all start again, restart %d of %d", gone, now - 1, cluster.ray_restarts)
                starts = now
                if not (starts or waited) and time.monotonic() > latest:
                    waited = True
                    logger.info("waiting for room for %s", in_words)
                if written and not isinstance(ending, OSError):
                    write(written)
                if done:
                    break
                fit.done.wait(_PAUSE)
            except (KeyboardInterrupt, SystemExit, OSError) as error:
                number = signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.SIGTERM
                if ending or not ray.get(desk.stop.remote(number)):
                    raise
                ending = error
    if ending:
        raise ending


def _needed(cluster: TrainingClusterConfig, free: dict[str, float]) -> tuple[str, bool]:
    """What the workers need, in words, and whether it is free, on whatever machines."""
    workers = cluster.ray_min_workers or cluster.ray_workers
    needed = {name: each * workers for name, each in cluster.resources.items()}
    enough = all(free.get(name, 0) >= amount for name, amount in needed.items())
    amounts, found = (", ".join(f"{some.get(name, 0):g} {name}" for name in needed) for some in (needed, free))
    return f"{workers} workers, {amounts}: the cluster has {found} free", enough


@contextlib.contextmanager
def _signals_raised() -> Iterator[None]:
    """SIGTERM and SIGHUP raise SystemExit, as Ctrl-C raises KeyboardInterrupt."""

    def end(number, frame):
        raise SystemExit(0)

    numbers = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, end) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ------------------------------------------------------------------------------------------------------- the worker


def _work(config: dict) -> None:
    """What Ray Train calls on every worker: runs the program to its end. Raises OSError where the worker is gone."""
    import ray

    desk, rank = config["desk"], ray.train.get_context().get_world_rank()
    environment = worker_environment({**os.environ, **config["environment"]}, config["rows"])
    if environment is None:
        return
    ray.get(desk.started.remote(rank))
    command = [sys.executable, *config["command"]]
    program = subprocess.Popen(
        command,
        cwd=config["directory"],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        preexec_fn=_own_signals,
    )
    errors = []
    readers = [_Thread(lambda: errors.append(program.stderr.read().decode(errors="replace")))]
    if rank == 0:
        readers.append(_Thread(lambda: _pass_on(program.stdout, desk)))
    ended, told = _Thread(program.wait), None
    while not ended.done.wait(2 * _PAUSE):
        wanted = ray.get(desk.wanted.remote())
        if wanted and wanted != told:
            program.send_signal(wanted)
            told = wanted
    for reader in readers:
        reader.done.wait()
    status, lost = program.returncode, ""
    if not told and (status < 0 or status == WorkerGone.status):
        how = "another worker is gone" if status == WorkerGone.status else f"killed by {signal.Signals(-status).name}"
        lost = f"worker {rank} of {ray.train.get_context().get_world_size()} is gone ({how})"
    ray.get(desk.ended.remote(rank, 0 if told else status, "".join(errors), lost))
    if lost:
        raise OSError(lost)


def passed_on(environment: Mapping[str, str]) -> dict[str, str]:
    """What a worker's program takes of the environment of the driver's, as its Ray may have been started elsewhere."""
    return {name: value for name, value in environment.items() if name.startswith(("WANDB_", "MLFLOW_"))}


def worker_environment(environment: dict[str, str], rows: list[int]) -> dict[str, str] | None:
    """The environment of the program of a worker, from that of Ray's process; `None` where the worker stands by.

    Of the workers in TF_CONFIG, as many work, the first ones, as divide all of `rows`.
    """
    config = json.loads(environment["TF_CONFIG"])
    workers = config["cluster"]["worker"]
    working = max(n for n in range(1, len(workers) + 1) if all(size % n == 0 for size in rows))
    if config["task"]["index"] >= working:
        return None
    config["cluster"]["worker"] = workers[:working]
    kept = {name: value for name, value in environment.items() if name != "TF_USE_LEGACY_KERAS"}  # Ray sets it
    return {**kept, "TF_CONFIG": json.dumps(config)}


def _pass_on(file, desk) -> None:
    import ray

    while data := os.read(file.fileno(), 1 << 16):
        ray.get(desk.write.remote(data))


_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


def _own_signals() -> None:
    """Has Ctrl-C reach a program, which Ray's processes keep from it; and the kernel kill it when Ray's process is
    gone: its place is another's then.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
