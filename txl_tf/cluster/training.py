"""Runs a training program as several workers on a Ray cluster. TF_CONFIG says to each of them which worker it is.

The driver is the program that the user started. Ray Train starts the workers. If one of them is lost, it restarts all
of them, and they resume from the newest checkpoint. A worker runs the same command as the driver in a process of its
own, which handles signals, memory and files as it does without Ray:

    driver: run_workers -> Ray Train -> worker: _work -> the program, with TF_CONFIG
       ^ output and exit status <- Desk -> a signal to end ^
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from txl_tf.cluster.connection import connected
from txl_tf.config import TrainingClusterConfig
from txl_tf.files import reason
from txl_tf.runs.setup import WorkerGone

logger = logging.getLogger("txl_tf")

_SECONDS_TO_START = 60  # after this time, a line says that the workers wait for room
_PAUSE = 0.5  # seconds between two calls of the desk by the driver; workers wait twice as long


def run_workers(
    command: list[str],
    cluster: TrainingClusterConfig,
    write: Callable[[bytes], Any],
    batch_sizes: Sequence[int] = (),
) -> tuple[int, str]:
    """Runs a program on the workers of a cluster, until all of them have ended.

    After Ctrl-C, SIGTERM or SIGHUP, the workers get a signal, save and end. If all of them succeed, KeyboardInterrupt
    or SystemExit is raised here then. A second signal is raised at once.

    Args:
        command: the program and its arguments, for Python. Workers run it in the working directory of this process.
        cluster: the cluster, and the number of workers.
        write: called with the standard output of worker 0.
        batch_sizes: batch sizes of the program. As many workers train as can divide all of them, see
            `worker_environment`. The other workers do nothing.

    Returns:
        `(status, errors)`: the exit status and the standard error of the program that failed first, or `(0, "")`.

    Raises:
        ValueError: Ray is not installed, or the address is malformed.
        ConnectionError: there is no cluster at the address.
        OSError: workers were lost more often than `ray_restarts` allows.
    """
    with connected(cluster.ray_address) as ray, tempfile.TemporaryDirectory() as scratch:
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.tensorflow import TensorflowTrainer
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        this_node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        desk = ray.remote(num_cpus=0, scheduling_strategy=this_node)(Desk).remote()
        max_workers: Any = cluster.ray_workers
        least = cluster.ray_min_workers
        devices = max(cluster.ray_gpus, 1)
        trainer = TensorflowTrainer(
            _work,
            train_loop_config={
                "desk": desk,
                "command": command,
                "directory": os.getcwd(),
                "batch_sizes": [size // devices for size in batch_sizes],
                "environment": variables_to_pass(os.environ),
            },
            scaling_config=ScalingConfig(
                num_workers=(least, max_workers) if least else max_workers,
                use_gpu=cluster.ray_gpus > 0,
                resources_per_worker=cluster.resources,
            ),
            run_config=RunConfig(
                storage_path=scratch,  # stays empty: the program writes its own checkpoints
                failure_config=FailureConfig(max_failures=cluster.ray_restarts),
            ),
        )
        needed = _needed(cluster, ray.available_resources())  # before Ray Train, which takes some of them
        fit = _Thread(trainer.fit)
        ending = _follow(desk, fit, write, cluster, needed)
        status, errors, lost = ray.get(desk.result.remote())
        if ending and not status:
            raise ending
        if fit.error and not status:
            last = lost or _why(fit.error)
            raise OSError(
                f"workers died more than ray_restarts={cluster.ray_restarts} times; the last error: {last}. The same "
                "command resumes from the newest checkpoint"
            ) from fit.error
        return status, errors


# ------------------------------------------------------------------------------------------------------- the driver


class Desk:
    """Messages between the driver and the workers: an actor on the driver's machine.

    Attributes:
        unread_output: standard output of worker 0, in pieces, that the driver has not read yet.
        signal: signal to send to all programs, or `None`.
        running: ranks of the workers whose program runs.
        n_starts: how often the workers were started, counted by worker 0.
        last_lost: description of the worker that was lost last, or "".
        first_failure: exit status and standard error of the first program that failed, or `(0, "")`.
    """

    def __init__(self) -> None:
        self.unread_output: list[bytes] = []
        self.signal: int | None = None
        self.running: set[int] = set()
        self.n_starts = 0
        self.last_lost = ""
        self.first_failure: tuple[int, str] = (0, "")

    def started(self, rank: int) -> None:
        """Records that the program of a worker has started."""
        if rank == 0:
            self.n_starts += 1
        self.running.add(rank)

    def write(self, data: bytes) -> None:
        """Stores output of worker 0 for the driver."""
        self.unread_output.append(data)

    def ended(self, rank: int, status: int, errors: str, lost: str) -> None:
        """Records that the program of a worker has ended.

        The first failure is stored, because it may have caused the others. A lost worker, or a program that a signal
        killed, is no failure.

        Args:
            rank: rank of the worker.
            status, errors: exit status and standard error of the program.
            lost: how the worker was lost; "" if it was not.
        """
        self.running.discard(rank)
        self.last_lost = lost or self.last_lost
        if status > 0 and not lost and not self.first_failure[0]:
            self.first_failure = status, errors

    def stop(self, number: int) -> bool:
        """Requests that the workers send a signal to their programs. Returns whether any program is running."""
        self.signal = number
        return bool(self.running)

    def wanted(self) -> int | None:
        """The signal that a worker should send to its program, or `None`. After a failure, it is SIGKILL for all."""
        return signal.SIGKILL if self.first_failure[0] else self.signal

    def read(self) -> tuple[bytes, int, str]:
        """The output since the last call, how often the workers were started, and the worker that was lost last."""
        output = b"".join(self.unread_output)
        self.unread_output = []
        return output, self.n_starts, self.last_lost

    def result(self) -> tuple[int, str, str]:
        """`(status, errors, lost)`: the first failure, and the worker that was lost last."""
        status, errors = self.first_failure
        return status, errors, self.last_lost


def _why(error: Exception) -> str:
    """The first line of Ray Train's error about the first worker that failed, for example that memory was short."""
    failures = getattr(error, "worker_failures", None) or {0: error}
    rank = min(failures)
    failure = getattr(failures[rank], "health_check_failure", failures[rank])
    return f"worker {rank}: {reason(failure).rstrip('.')}"


class _Thread(threading.Thread):
    """A daemon thread that calls a function, and starts at once.

    `done` is set when the function has ended. `error` is the exception that it raised, or `None`.

    `join` cannot be used: after a signal in the middle of it, Python 3.11 believes that the thread has ended.
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self.function = function
        self.error: Exception | None = None
        self.done = threading.Event()
        self.start()

    def run(self) -> None:
        """Calls the function. Stores its error for the thread that waits."""
        try:
            self.function()
        except Exception as error:
            self.error = error
        finally:
            self.done.set()


def _follow(
    desk: Any, fit: _Thread, write: Callable[[bytes], Any], cluster: TrainingClusterConfig, needed: tuple[str, bool]
) -> BaseException | None:
    """Passes the output of worker 0 to `write` until `fit` ends. Logs restarts, and that workers wait for room.

    A signal to this process, or an error of `write`, ends the workers. If no program is running, its exception is
    raised at once; so is that of a second signal or error. A first signal does not interrupt a call of the desk or of
    `write`, so that no output is lost.

    Args:
        desk: the actor of the class `Desk`.
        fit: the thread of Ray Train.
        write, cluster: see `run_workers`.
        needed: from `_needed`.

    Returns:
        The exception that ended the workers, or `None`.
    """
    import ray

    needed_in_words, is_enough = needed
    # Where resources are missing, the line about waiting comes at once.
    log_waiting_at = time.monotonic() + (_SECONDS_TO_START if is_enough else 0)
    known_starts = 0
    has_logged_waiting = False
    ending = None  # the exception that ends the workers
    with _signals_noted() as signals:
        while True:
            try:
                if signals and signals[0] is not ending:
                    raise signals[0]
                done = fit.done.is_set()  # before `read`, which then has all of the output
                output, n_starts, lost = ray.get(desk.read.remote())
                if n_starts > max(known_starts, 1):
                    logger.info("%s: all start again, restart %d of %d", lost, n_starts - 1, cluster.ray_restarts)
                known_starts = n_starts
                if not (known_starts or has_logged_waiting) and time.monotonic() > log_waiting_at:
                    has_logged_waiting = True
                    logger.info("waiting for room for %s", needed_in_words)
                if output and not isinstance(ending, OSError):
                    write(output)
                if done:
                    break
                fit.done.wait(_PAUSE)
            except (KeyboardInterrupt, SystemExit, OSError) as error:  # OSError: the output cannot be written
                number = signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.SIGTERM
                if ending or not ray.get(desk.stop.remote(number)):
                    raise
                ending = error
    return ending or (signals[0] if signals else None)


def _needed(cluster: TrainingClusterConfig, free: Mapping[str, float]) -> tuple[str, bool]:
    """Returns `(text, is_enough)` about the resources that the fewest workers that may train need, and the free ones.

    Args:
        cluster: the numbers of workers, and the resources of each.
        free: `{name of a resource: free amount}`.

    Returns:
        A text with the needed and the free amounts, and whether the cluster as a whole has enough.
    """
    workers: Any = cluster.ray_min_workers or cluster.ray_workers
    needed = {name: each * workers for name, each in cluster.resources.items()}
    enough = all(free.get(name, 0) >= amount for name, amount in needed.items())
    amounts, free_amounts = (
        ", ".join(f"{resources.get(name, 0):g} {name}" for name in needed) for resources in (needed, free)
    )
    number = "1 worker" if workers == 1 else f"{workers} workers"
    return f"{number}, {amounts}: the cluster has {free_amounts} free", enough


@contextlib.contextmanager
def _signals_noted() -> Iterator[list[KeyboardInterrupt | SystemExit]]:
    """Yields a list. In this block, the first Ctrl-C, SIGTERM or SIGHUP adds its exception, which is not raised.

    The exception is KeyboardInterrupt for Ctrl-C and SystemExit(0) for the others. Later signals raise theirs at once.
    Signals that are ignored stay ignored.
    """
    noted: list[KeyboardInterrupt | SystemExit] = []

    def note(number, frame):
        error = KeyboardInterrupt() if number == signal.SIGINT else SystemExit(0)
        if noted:
            raise error
        noted.append(error)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, note) for number in numbers if signal.getsignal(number) != signal.SIG_IGN}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ------------------------------------------------------------------------------------------------------- the worker


def _work(config: dict) -> None:
    """Runs the program of a worker to its end. Ray Train calls this function on every worker.

    It tells the desk when the program starts and ends, and passes signals from the desk to the program. A worker that
    does not train returns at once.

    Args:
        config: `train_loop_config` of `run_workers`.

    Raises:
        OSError: the program was killed, or ended because another worker was lost. Then Ray Train restarts all workers.
    """
    import ray.train

    desk = config["desk"]
    rank = ray.train.get_context().get_world_rank()
    environment = worker_environment({**os.environ, **config["environment"]}, config["batch_sizes"])
    if environment is None:
        return
    ray.get(desk.started.remote(rank))
    command = [sys.executable, *config["command"]]
    program: Any = subprocess.Popen(
        command,
        cwd=config["directory"],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        preexec_fn=_prepare_process,
    )
    errors = []
    readers = [_Thread(lambda: errors.append(program.stderr.read().decode(errors="replace")))]
    if rank == 0:
        readers.append(_Thread(lambda: _send_output(program.stdout, desk)))
    ended = _Thread(program.wait)
    sent = None  # the last signal that was sent to the program
    while not ended.done.wait(2 * _PAUSE):
        wanted = ray.get(desk.wanted.remote())
        if wanted and wanted != sent:
            program.send_signal(wanted)
            sent = wanted
    for reader in readers:
        reader.done.wait()
    status = program.returncode
    lost = ""
    if sent in (-status, status - 128):  # it ended because of the signal
        status = 0
    elif not sent and (status < 0 or status == WorkerGone.status):
        how = "another worker died" if status == WorkerGone.status else f"killed by {signal.Signals(-status).name}"
        lost = f"worker {rank} of {ray.train.get_context().get_world_size()} died ({how})"
    ray.get(desk.ended.remote(rank, status, "".join(errors), lost))
    if lost:
        raise OSError(lost)


def variables_to_pass(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of Weights & Biases and MLflow in the driver's environment, for the programs of all workers.

    The environment of Ray's processes may lack them.
    """
    return {name: value for name, value in environment.items() if name.startswith(("WANDB_", "MLFLOW_"))}


def worker_environment(environment: dict[str, str], batch_sizes: Sequence[int]) -> dict[str, str] | None:
    """The environment of a worker's program; `None` if the worker does not train.

    The first n workers in TF_CONFIG train, where n is the largest number, up to the number of workers, that divides all
    of `batch_sizes`.

    Args:
        environment: the environment of Ray's process, with TF_CONFIG of all workers.
        batch_sizes: batch sizes, divided by the number of devices of a worker.
    """
    config = json.loads(environment["TF_CONFIG"])
    workers = config["cluster"]["worker"]
    n_training = max(n for n in range(1, len(workers) + 1) if all(size % n == 0 for size in batch_sizes))
    if config["task"]["index"] >= n_training:
        return None
    config["cluster"]["worker"] = workers[:n_training]
    others = {name: value for name, value in environment.items() if name != "TF_USE_LEGACY_KERAS"}  # Ray sets this one
    return {**others, "TF_CONFIG": json.dumps(config)}


def _send_output(file: Any, desk: Any) -> None:
    """Sends the output of a program, which it writes to `file`, to the desk as soon as it is written."""
    import ray

    while data := os.read(file.fileno(), 1 << 16):
        ray.get(desk.write.remote(data))


_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


def _prepare_process() -> None:
    """Prepares the process of a program. Runs in the new process, between fork and exec.

    It unblocks Ctrl-C, which Ray's processes block. On Linux, it also makes the kernel kill the program when the thread
    of Ray's process that started it ends, because Ray may then start another program in its place.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
