"""Answers blocks of lines on the workers of a Ray cluster. Ray Data gives each block to a worker, and retries it if
the worker dies.
"""

from __future__ import annotations

import functools
import logging
import os
import pickle
import socket
import threading
import uuid
from collections.abc import Callable, Generator
from pathlib import Path
from types import ModuleType

import tensorflow as tf

from txl_tf.cluster.connection import connected
from txl_tf.config import ClusterConfig
from txl_tf.data.line_files import Answering, Block, answer_block
from txl_tf.errors import ParameterError
from txl_tf.files import naming_read_errors, write_atomic

logger = logging.getLogger("txl_tf")
_TRIES = 3  # how often a block is tried if its workers die
_PATIENCE = 180  # if no block is answered in this time, in seconds, a log line gives possible reasons
_LATE = "nothing is answered after %d s: workers wait for room or for memory, or a block takes long (`ray status`)"


def answer_on_cluster(blocks: list[Block], make: Callable[[], Answering], cluster: ClusterConfig) -> Generator[str]:
    """Answers blocks on the workers of a cluster. Yields `Block.part` of each block when its answers are written.

    Args:
        blocks: blocks whose paths are valid on every machine.
        make: function that makes the model of a worker. Every worker calls it once.
        cluster: the number of workers, and the resources of each.

    Raises:
        ValueError, OSError: there is no cluster, it has no room for a worker, workers do not start, or `_TRIES` workers
            died of one block, or a worker raised the error.
    """
    with connected(cluster.ray_address) as ray:
        number = min(count_workers(ray, cluster), len(blocks))
        _be_quiet(ray)
        pool = ray.data.ActorPoolStrategy(
            min_size=1, max_size=number, initial_size=number, max_tasks_in_flight_per_actor=1
        )
        # One row is one of our blocks, and also a block of Ray Data: workers get them one by one.
        rows = ray.data.from_items([block._asdict() for block in blocks], override_num_blocks=len(blocks))
        answered = rows.map(
            _Worker,
            fn_constructor_args=(make, cluster.ray_cpus, uuid.uuid4().hex),
            compute=pool,
            num_cpus=cluster.ray_cpus,
            num_gpus=cluster.ray_gpus,
            runtime_env={"env_vars": _environment()},
        )
        late = threading.Timer(_PATIENCE, logger.info, [_LATE, _PATIENCE])
        late.daemon = True
        late.start()
        try:
            for row in answered.iter_rows():
                late.cancel()
                if row["error"]:
                    raise pickle.loads(row["error"])
                yield row["part"]
        except ray.exceptions.RayActorError as error:
            raise OSError(f"workers of the Ray cluster do not start: {str(error).splitlines()[-1]}") from error
        finally:
            late.cancel()


def count_workers(ray: ModuleType, cluster: ClusterConfig) -> int:
    """How many workers to start: the requested number, at most as many as the cluster has room for.

    Room is what all machines have, whether it is in use or not. If workers need no resources, each machine has room for
    one. Logs a line if all machines together have too little free for a worker.

    Raises:
        ParameterError: no machine has the resources for a worker.
    """
    needs = {name: number for name, number in cluster.resources.items() if number}
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    room = sum(min((int(node.get(name, 0) // number) for name, number in needs.items()), default=1) for node in nodes)
    if not room:
        largest = ", ".join(f"{max(node.get(name, 0) for node in nodes):g} {name}" for name in needs)
        message = (
            f"the Ray cluster has no room for a worker of ray_cpus={cluster.ray_cpus} and ray_gpus={cluster.ray_gpus}: "
            f"of {len(nodes)} machines, none has more than {largest}"
        )
        raise ParameterError("ray_cpus", cluster.ray_cpus, f"at most {largest}", message)
    free = ray.available_resources()
    if any(free.get(name, 0) < number for name, number in needs.items()):
        logger.info("the Ray cluster has no room for a worker at the moment: waiting until others are done")
    return min(cluster.ray_workers or room, room)


def _be_quiet(ray: ModuleType) -> None:
    """Turns off the progress bars and messages of Ray Data. Errors are raised as exceptions."""
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = context.print_on_execution_start = False
    context.execution_no_progress_timeout_s = -1  # a block may take hours
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)


def _environment() -> dict[str, str]:
    """Environment variables of the workers: they compute with or without oneDNN, as this process does.

    If this package is not installed in site-packages, `PYTHONPATH` tells the workers where it is.
    """
    variables = {name: os.environ[name] for name in ["TF_ENABLE_ONEDNN_OPTS"] if name in os.environ}
    folder = str(Path(__file__).parents[2])
    if "site-packages" not in folder:
        variables["PYTHONPATH"] = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
    return variables


class _Worker:
    """Answers blocks in a process of the cluster.

    Args:
        make: function that makes the `Answering`, which has the model.
        cpus: number of cores that the model may use; 0 for all.
        job: id of the call of `answer_on_cluster`. Tries are counted for each job.
    """

    def __init__(self, make: Callable[[], Answering], cpus: int, job: str):
        self.make = make
        self.cpus = cpus
        self.job = job

    @functools.cached_property
    def answering(self) -> Answering:
        """The `Answering`, made when the first block comes.

        Before that, it sets the number of threads of TensorFlow.
        """
        tf.config.threading.set_intra_op_parallelism_threads(self.cpus)
        tf.config.threading.set_inter_op_parallelism_threads(self.cpus)
        return self.make()

    def __call__(self, row: dict) -> dict:
        """Answers the `Block` with the fields `row`.

        Returns:
            A dictionary: "part" is `Block.part`, "error" the pickled error that ends the job, or b"".
        """
        block = Block(**row)
        try:
            self.answer(block)
        except (ValueError, OSError, tf.errors.OpError) as error:
            return {"part": block.part, "error": pickle.dumps(error)}
        return {"part": block.part, "error": b""}

    def answer(self, block: Block) -> None:
        """Answers a block.

        Raises:
            FileNotFoundError: this machine lacks the input file or the folder of the answers.
            ParameterError: `_TRIES` tries have ended without answers, see `count_try`.
        """
        for path in (block.path, os.path.dirname(block.part)):
            if not tf.io.gfile.exists(path):
                raise FileNotFoundError(
                    f"{socket.gethostname()} does not have {path}: the machines of a cluster must share files"
                )
        self.count_try(block)
        answer_block(self.answering, block)

    def count_try(self, block: Block) -> None:
        """Counts the tries of a block in a file. Raises ParameterError after `_TRIES`: Ray would try forever."""
        path = f"{block.part}.{self.job}"
        tries = 0
        if tf.io.gfile.exists(path):
            with naming_read_errors(path), tf.io.gfile.GFile(path) as file:
                tries = int(file.read())
        if tries == _TRIES:
            lines = f"lines {block.first:,} to {block.first + block.lines - 1:,}"
            message = (
                f"{block.name}, {lines}: {tries} workers died while they answered them. Was their memory too small?"
            )
            raise ParameterError(block.name, lines, "lines that a worker has the memory for", message)
        write_atomic(path, str(tries + 1))
