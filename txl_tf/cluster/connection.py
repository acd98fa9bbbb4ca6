"""The connection to a Ray cluster."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Iterator
from types import ModuleType

from txl_tf.environment import check_listens, is_address
from txl_tf.stderr import without_notes

_NOTE = re.compile(rb"\[.*Set ray log level from environment variable")


def ray_package() -> ModuleType:
    """Ray, which the extra `cluster` installs. Raises ValueError where it is not installed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # it would report to its makers
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # what is wrong comes as an exception
    os.environ.setdefault("RAY_task_oom_retries", "3")  # without end, by default
    try:
        import ray
    except ImportError as error:
        raise ValueError(
            'ray_address and ray_workers need the package ray, which is not installed: pip install "ray[data,train]"'
        ) from error
    return ray


@contextlib.contextmanager
def connected(address: str | None) -> Iterator[ModuleType]:
    """Connects this process to a Ray cluster, unless it is connected already.

    Args:
        address: `"auto"`, `"host:port"`, or `"local"` for a cluster of this machine alone, which ends with the block.
            `None` is the cluster of the environment variable `RAY_ADDRESS`, else local.

    Yields:
        The package.

    Raises:
        ValueError: Ray is not installed, or the address is none.
        ConnectionError: no cluster is there.
    """
    ray = ray_package()
    if ray.is_initialized():
        yield ray
        return
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    if address not in ("auto", "local"):
        if not is_address(address):
            raise ValueError(f"ray_address must be auto, local or host:port, got {address}")
        check_listens(address, f"the Ray cluster ray_address={address}")
    options = {"include_dashboard": False} if address == "local" else {}
    try:
        with without_notes(_NOTE):
            ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **options)
    except (ConnectionError, RuntimeError, SystemExit) as error:  # SystemExit is what its C++ part ends with
        what = (str(error) or type(error).__name__).splitlines()[0]
        raise ConnectionError(f"the Ray cluster ray_address={address} cannot be reached: {what}") from error
    ray._private.worker._worker_logs_enabled = False  # what machines say that run out of memory, or die
    try:
        yield ray
    finally:
        ray.shutdown()
