"""The connection to a Ray cluster."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from txl_config.cluster import cluster_address
from txl_tf.environment import check_listens
from txl_tf.errors import ParameterError, named
from txl_tf.stderr import without_notes

GONE = (
    "the Ray cluster ray_address={} ended this program: its raylet on this machine died, or somebody killed the "
    "program. The same command works again"
)
_NOTE = re.compile(rb"\[.*Set ray log level from environment variable")


def ray_package() -> ModuleType:
    """Imports and returns Ray, with quiet settings. Raises ParameterError if it is not installed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no reports to Ray's developers
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # errors are raised as exceptions
    os.environ.setdefault("RAY_task_oom_retries", "3")  # the default is endless
    try:
        import ray
    except ImportError as error:
        message = (
            'ray_address and ray_workers need the package ray, which is not installed: pip install "txl_tf[cluster]"'
        )
        raise ParameterError("ray_address", None, "left out without the package ray", message) from error
    return ray


@contextlib.contextmanager
def connected(address: str | None) -> Iterator[ModuleType]:
    """In this block, this process is connected to a Ray cluster.

    An existing connection is used, whatever the address is, and stays open after the block.

    Args:
        address: `"auto"`, `"host:port"`, or `"local"` for a cluster of this machine alone, which ends with the block.
            `None`: the environment variable `RAY_ADDRESS`, or else `"local"`.

    Yields:
        The package Ray.

    Raises:
        ValueError: Ray is not installed, or the address is malformed.
        ConnectionError: there is no cluster at the address.
    """
    ray = ray_package()
    if ray.is_initialized():
        yield ray
        return
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    if address not in ("auto", "local"):
        cluster_address("ray_address", address)
        check_listens(address, f"the Ray cluster ray_address={named(address)}")
    options = {"include_dashboard": False} if address == "local" else {}
    with last_words(f"{os.path.basename(sys.argv[0])}: {GONE.format(address)}"):
        try:
            with without_notes(_NOTE):
                ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **options)
        # A slow start raises the class Exception itself, and Ray's C++ part raises SystemExit.
        except (Exception, SystemExit) as error:
            what = (str(error) or type(error).__name__).splitlines()[0]
            raise ConnectionError(f"the Ray cluster ray_address={address} cannot be reached: {what}") from error
        ray._private.worker._worker_logs_enabled = False  # hides messages of machines that run out of memory or die
        try:
            yield ray
        finally:
            ray.shutdown()


@contextlib.contextmanager
def last_words(message: str) -> Iterator[None]:
    """Prints `message` to the standard error if this process ends within the block without an exception of Python.

    When the raylet, Ray's process on this machine, dies, Ray's C++ part ends this process without a message. So a small
    second process, the watcher, reads from a pipe. If the pipe is closed before this process has written to it, the
    watcher prints the message.
    """
    code = f"import os, sys\nif not os.read(0, 1): os.write(2, {(message + chr(10)).encode()!r})"
    command = [sys.executable, "-I", "-S", "-c", code]
    # A session of its own: Ctrl-C in a terminal goes to all processes of one session.
    options: dict[str, Any] = {"stdout": subprocess.DEVNULL, "start_new_session": True}
    watcher: Any = subprocess.Popen(command, stdin=subprocess.PIPE, **options)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # if the watcher was killed
            watcher.stdin.write(b".")
            watcher.stdin.close()
        watcher.wait()
