"""What the library finds where it runs: packages that may not be installed, servers that may not be there."""

from __future__ import annotations

import importlib.util
import socket

_SECONDS_TO_ANSWER = 20


def is_installed(package: str) -> bool:
    """Whether a package can be imported; imports nothing."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None  # as a folder of that name has none, such as wandb's logs


def is_address(address: str) -> bool:
    """Whether it is `host:port`."""
    host, _, port = address.rpartition(":")
    return bool(host) and port.isdigit() and "/" not in host


def check_listens(address: str, what: str) -> None:
    """Raises ConnectionError, which names `what`, where nobody listens at `host:port`. Libraries would wait."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_SECONDS_TO_ANSWER).close()
    except OSError as error:
        raise ConnectionError(f"{what} cannot be reached: {error}") from error
