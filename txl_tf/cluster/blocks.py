"""Blocks of lines answered by the workers of a Ray cluster. Ray Data deals them out, and again where a worker died."""

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
from txl_tf.files import reading, write_atomic

logger = logging.getLogger("txl_tf")
_TRIES = 3  # of a block that workers die of
_PATIENCE = 180  # seconds
_LATE = "nothing is answered after %d s: workers wait for room or for memory, or a block takes long (`ray status`)"


def answer_on_cluster(blocks: list[Block], make: Callable[[], Answering], cluster: ClusterConfig) -> Generator[str]:
    """Has blocks answered, each by one of the workers of a cluster; yields their parts, in the order they are done.

    Args:
        blocks: with paths that mean the same on every machine.
        make: called once in every worker, with its one model.
        cluster: how many workers, and what each takes.

    Raises:
        ValueError, OSError: there is no cluster, or no room in it for a worker; what a worker raises; a block is the
            end of its worker again and again.
    """
    with connected(cluster.ray_address) as ray:
        number = min(count_workers(ray, cluster), len(blocks))
        _be_quiet(ray)
        pool = ray.data.ActorPoolStrategy(
            min_size=1, max_size=number, initial_size=number, max_tasks_in_flight_per_actor=1
        )
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
    """How many workers to start: as many as asked for, or as there is room for. Raises ValueError for none."""
    needs = {name: number for name, number in cluster.resources.items() if number}
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    room = sum(min((int(node.get(name, 0) // number) for name, number in needs.items()), default=1) for node in nodes)
    if not room:
        most = ", ".join(f"{max(node.get(name, 0) for node in nodes):g} {name}" for name in needs)
        raise ValueError(
            f"the Ray cluster has no room for a worker of ray_cpus={cluster.ray_cpus} and ray_gpus={cluster.ray_gpus}: "
            f"of {len(nodes)} machines, none has more than {most}"
        )
    free = ray.available_resources()
    if any(free.get(name, 0) < number for name, number in needs.items()):
        logger.info("the Ray cluster has no room for a worker at the moment: waiting until others are done")
    return min(cluster.ray_workers or room, room)


def _be_quiet(ray: ModuleType) -> None:
    """Has Ray Data show neither progress bars nor messages: what counts comes as an exception."""
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = context.print_on_execution_start = False
    context.execution_no_progress_timeout_s = -1  # a block may take hours
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)


def _environment() -> dict[str, str]:
    """What workers need in theirs to import this very package, where it is not installed."""
    folder = str(Path(__file__).parents[2])
    if "site-packages" in folder:
        return {}
    return {"PYTHONPATH": os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])}


class _Worker:
    """A process of the cluster with a model.

    Args:
        make: see `answer_on_cluster`.
        cpus: cores that it may take; 0 for any.
        job: what tells the tries of this job from those of another.
    """

    def __init__(self, make: Callable[[], Answering], cpus: int, job: str):
        self.make, self.cpus, self.job = make, cpus, job

    @functools.cached_property
    def answering(self) -> Answering:
        tf.config.threading.set_intra_op_parallelism_threads(self.cpus)
        tf.config.threading.set_inter_op_parallelism_threads(self.cpus)
        return self.make()

    def __call__(self, row: dict) -> dict:
        """Answers a block, given by the values of its fields; says which, or the error that ends the job."""
        block = Block(**row)
        try:
            self.answer(block)
        except (ValueError, OSError, tf.errors.OpError) as error:
            return {"part": block.part, "error": pickle.dumps(error)}
        return {"part": block.part, "error": b""}

    def answer(self, block: Block) -> None:
        for path in (block.path, os.path.dirname(block.part)):
            if not tf.io.gfile.exists(path):
                raise FileNotFoundError(
                    f"{path} is not to be seen on {socket.gethostname()}: the machines of a cluster must share files"
                )
        self.count_try(block)
        answer_block(self.answering, block)

    def count_try(self, block: Block) -> None:
        """Notes on disk that a block is tried. Raises ValueError where its workers died: Ray would try for ever."""
        path = f"{block.part}.{self.job}"
        tries = 0
        if tf.io.gfile.exists(path):
            with reading(path), tf.io.gfile.GFile(path) as file:
                tries = int(file.read())
        if tries == _TRIES:
            raise ValueError(
                f"{block.name}, lines {block.first:,} to {block.first + block.lines - 1:,}: {tries} workers died of "
                "them, as they do where memory is short"
            )
        write_atomic(path, str(tries + 1))
