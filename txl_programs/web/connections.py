"""A server that ends silently, limits the number of connections, and closes idle ones."""

import logging
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

try:
    import resource
except ImportError:  # not on Windows
    resource = None

MOST_CONNECTIONS = 256
BACKLOG = 32  # connections that may wait to be accepted
SECONDS_WITHOUT_REQUEST = 10


def most_connections() -> int:
    """Returns how many connections the server keeps: half of the files that it may open, 8 to `MOST_CONNECTIONS`."""
    if resource is None:
        return MOST_CONNECTIONS
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MOST_CONNECTIONS if files == resource.RLIM_INFINITY else max(8, min(MOST_CONNECTIONS, files // 2))


class Connection(H11Protocol):
    """A connection that is closed after one to two times `SECONDS_WITHOUT_REQUEST` without a request.

    After an answer, Uvicorn closes it earlier, after its `timeout_keep_alive`.

    Attributes:
        most: largest number of connections of the server, see `connection_made`.
    """

    most = MOST_CONNECTIONS

    def connection_made(self, transport):
        """Accepts a connection. If there are too many, closes the oldest one that is idle, or this one if none is."""
        super().connection_made(transport)
        self.made_at = self.loop.time()
        if len(self.connections) > self.most:
            older: list[Any] = [connection for connection in self.connections if connection is not self]
            idle = [connection for connection in older if connection.is_idle]
            min(idle, key=lambda other: other.made_at, default=self).transport.abort()
        if not transport.is_closing():
            self._check_later()

    @property
    def is_idle(self) -> bool:
        """Whether no request is being answered."""
        return (self.cycle is None or self.cycle.response_complete) and not self.transport.is_closing()

    def _check_later(self):
        """Calls `_check` after `SECONDS_WITHOUT_REQUEST`, with the state of the connection now."""
        self.loop.call_later(SECONDS_WITHOUT_REQUEST, self._check, self.cycle, self.is_idle)

    def _check(self, before, was_idle):
        """Closes the connection if it has been idle since the last check. Otherwise, checks again later.

        Args:
            before: the request that the last check found, or `None`.
            was_idle: whether the connection was idle then. If not, an answer may have ended just now.
        """
        if self.transport.is_closing():
            return
        if was_idle and self.is_idle and self.cycle is before:
            self.transport.abort()
        else:
            self._check_later()


class Server(uvicorn.Server):
    """A server that ends silently, even if browsers still have the page open. It closes their connections."""

    def handle_exit(self, sig, frame):
        """Ends the server after a signal. Hides Uvicorn's errors about connections that are still open."""
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        super().handle_exit(sig, frame)


def make_server(app) -> Server:
    """Returns the server of an ASGI application. Its method `run(sockets=[...])` serves until a signal arrives."""
    kind = type("Connection", (Connection,), {"most": most_connections()})
    options = {"log_level": "warning", "access_log": False, "timeout_graceful_shutdown": 1, "backlog": BACKLOG}
    return Server(uvicorn.Config(app, http=kind, ws="none", **options))
