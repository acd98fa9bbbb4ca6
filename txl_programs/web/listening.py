"""The socket at which a server listens, and its URL."""

import socket

from txl_config.errors import ParameterError, named


def listen(host: str, port: int) -> socket.socket:
    """Returns a socket that listens at an IPv4 or IPv6 address or a name, and at a port; 0 means any free port.

    Raises:
        ParameterError: this machine does not have the address, or another program listens at the port.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except (OSError, UnicodeError) as error:
        message = f"host and port must be free to listen at, got {named(host)} and {port}: {error}"
        raise ParameterError("port", port, "free to listen at", message) from error


def url_of(host: str, listening: socket.socket) -> str:
    """Returns the URL of a host at the port of a socket, such as `http://127.0.0.1:8501` or `http://[::1]:8501`."""
    address = f"[{host}]" if ":" in host else host
    return f"http://{address}:{listening.getsockname()[1]}"
