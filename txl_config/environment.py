"""The environment: the processor, installed packages, Keras's backend, servers that listen, pipes in place of files."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import json
import os
import re
import socket
import stat
import sys
import time
from collections.abc import Iterable

from txl_config.errors import shortened

_SECONDS_TO_ANSWER = 20
_OLDEST = {"tensorflow": (2, 18), "keras": (3, 8)}  # as in pyproject.toml


def is_installed(package: str) -> bool:
    """Whether a package can be imported. It is not imported."""
    spec = importlib.util.find_spec(package)
    # A mere folder of that name, such as wandb's logs, has no origin.
    return spec is not None and spec.origin is not None


def processor_flags() -> set[str]:
    """All words in Linux's `/proc/cpuinfo`, with the processor's features among them; empty on other systems."""
    try:
        with open("/proc/cpuinfo") as file:
            return set(file.read().split())
    except FileNotFoundError:
        return set()


def is_pipe(path: str | os.PathLike[str]) -> bool:
    """Whether a local path is a named pipe or a socket, or a link to one.

    False in /dev and /proc: there, a user names a pipe on purpose, such as /dev/stdin.
    """
    return _leads_to_pipe(path) and not _is_of_system(path)


def is_system_pipe(path: str | os.PathLike[str]) -> bool:
    """Whether a local path in /dev or /proc leads to a pipe, such as the /dev/fd/63 of a shell's `<(command)`."""
    return _is_of_system(path) and _leads_to_pipe(path)


def _is_of_system(path: str | os.PathLike[str]) -> bool:
    return os.path.abspath(path).startswith(("/dev/", "/proc/"))


def _leads_to_pipe(path: str | os.PathLike[str]) -> bool:
    """Whether a path leads to a pipe or a socket."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):  # it does not exist, or is remote
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def check_backend() -> None:
    """Raises ImportError if Keras's backend is not TensorFlow. Call it before Keras is imported."""
    name, remedy = _keras_backend()
    if name != "tensorflow":
        raise ImportError(f"txl_tf needs the TensorFlow backend of Keras, got {name}: {remedy}")


def _keras_backend() -> tuple[str, str]:
    """Returns `(backend, remedy)`: the backend that Keras has, or will have after its import, and how to change it."""
    if "keras" in sys.modules:
        backend = sys.modules["keras"].config.backend()
        return backend, "set KERAS_BACKEND=tensorflow before keras is imported"
    variable = os.environ.get("KERAS_BACKEND")
    if variable:
        return variable, f"unset the environment variable KERAS_BACKEND={variable}, or set it to tensorflow"
    home = os.environ.get("KERAS_HOME", os.path.join("~", ".keras"))
    file = os.path.expanduser(os.path.join(home, "keras.json"))
    try:
        with open(file, encoding="utf-8") as opened:
            backend = json.load(opened).get("backend", "tensorflow")
    except (OSError, ValueError, AttributeError):  # then Keras uses its default, or raises its own error
        backend = "tensorflow"
    return backend, f'write "backend": "tensorflow" in {file}, or set KERAS_BACKEND=tensorflow'


def check_versions() -> None:
    """Raises ImportError if TensorFlow or Keras is older than the library supports. The message names the version."""
    for name, oldest in _OLDEST.items():
        if problem := too_old(name, oldest, "txl_tf needs"):
            raise ImportError(problem)


def too_old(name: str, oldest: tuple[int, int], needs: str) -> str | None:
    """Returns a message about a package if its version is older than `oldest`; otherwise `None`.

    The version is that of the imported module, because the module `tensorflow` may come from another package, such as
    `tf-nightly`.

    Args:
        name: name of the module.
        oldest: the first two numbers of the oldest version that will do.
        needs: beginning of the message, such as "txl_tf needs".
    """
    version: str = __import__(name).__version__  # `python -X importtime` does not list imports by `import_module`
    if tuple(map(int, re.findall(r"\d+", version)[:2])) >= oldest:
        return None
    at_least = ".".join(map(str, oldest))
    message = f"{needs} {name} {at_least} or later, got {name} {version}"
    from importlib import metadata  # takes a while

    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:  # the module is from another package, and pip would install over it
        return message
    return f"{message}: pip install '{name}>={at_least}'"


def is_address(address: str) -> bool:
    """Whether `address` has the form `host:port`."""
    host, _, port = address.rpartition(":")
    return bool(host) and "/" not in host and port.isdecimal() and len(port) <= 5 and int(port) < 1 << 16


def check_listens(address: str, what: str) -> None:
    """Raises ConnectionError, which names `what`, unless a server accepts a connection at `address`, `host:port`.

    It waits for at most 20 seconds. Without this check, libraries would wait for the server without end.
    """
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_SECONDS_TO_ANSWER).close()
    except (OSError, UnicodeError) as error:
        raise ConnectionError(shortened(f"{what} cannot be reached: {error}")) from error


def wait_for_all(own: str, others: Iterable[str]) -> None:
    """Waits until a process listens at every address in `others`, and listens at `own` meanwhile.

    All processes of a group call it before they start servers at their addresses. Each call returns once all processes
    have started. It waits in Python, so Ctrl-C and SIGTERM end it at once.

    It does not wait if this process cannot listen at `own` for another reason than those below, for example because
    the name of the host is unknown. The server then reports the reason.

    Args:
        own: `host:port` of this process.
        others: `host:port` of each process of the group; may contain `own`.

    Raises:
        ConnectionError: the port of `own` is in use, or not allowed for this user. The message names the address.
    """
    missing = set(others) - {own}
    try:
        listening = _listening(own)
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            return
        message = f"this worker cannot listen at {own}, its address in TF_CONFIG: {os.strerror(error.errno)}"
        raise ConnectionError(message) from error
    with listening:
        listening.setblocking(False)
        while missing:
            with contextlib.suppress(BlockingIOError):  # raised when no other process is waiting for a connection
                while True:
                    listening.accept()[0].close()
            missing -= {address for address in missing if _listens(address)}
            if missing:
                time.sleep(0.2)


def _listening(address: str) -> socket.socket:
    """Returns a socket that listens at an address, `host:port`. Raises OSError if it cannot.

    If this machine does not have the address, the socket listens at the port of all its addresses.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    family = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0][0]
    try:
        return socket.create_server((host, int(port)), family=family)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        return socket.create_server(("", int(port)))  # other machines reach this one by an address of a router


def _listens(address: str) -> bool:
    """Whether a process listens at an address, `host:port`."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=1).close()
    except (OSError, UnicodeError):
        return False
    return True
