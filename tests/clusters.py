"""A Ray cluster of this machine: several raylets, as several machines have them."""

import contextlib
import logging
import os
import unittest.mock
from pathlib import Path

import pytest


@contextlib.contextmanager
def nodes(number, cpus=1):
    """A cluster of so many nodes of `cpus` cores each; without Ray, the test skips.

    Yields the `ray.cluster_utils.Cluster`: it has an `address`, `add_node`, `remove_node`.
    """
    pytest.importorskip("ray", reason="the extra cluster is not installed")
    from ray.cluster_utils import Cluster

    node = {"num_cpus": cpus, "object_store_memory": 80 * 2**20}
    with unittest.mock.patch.dict(os.environ, RAY_worker_niceness="0"):  # 15 by default: other work starves it
        cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
        try:
            for _ in range(number - 1):
                cluster.add_node(**node)
            yield cluster
        finally:
            cluster.shutdown()


@contextlib.contextmanager
def raylets(number, cpus=1):
    """`nodes`, to which this process is connected."""
    with nodes(number, cpus) as cluster:
        import ray

        ray.init(cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        try:
            yield cluster
        finally:
            ray.shutdown()


def children(pid=None):
    """The processes below one, by default this one: `{pid: what it is called}`."""
    pid, found = pid or os.getpid(), {}
    with contextlib.suppress(OSError):  # it has ended
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found[int(child)] = Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ")
                found |= children(int(child))
    return found
