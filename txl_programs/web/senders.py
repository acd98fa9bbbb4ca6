"""Checks of a request: whether it names this server as its host, and whether a page of another site sends it."""

import asyncio
import contextlib
import ipaddress
import re
from collections.abc import Awaitable, Callable, Collection

MOST_TO_DRAIN = 16 * 2**20  # bytes of the body of a refused request
SECONDS_TO_DRAIN = 2  # time to wait for these bytes


def is_own_host(host: str, own: str, others: Collection[str] = ()) -> bool:
    """Whether the value of a Host header, in lower case, names this server.

    Names of this server are localhost, loopback addresses, the address `own` at which it listens, and the names
    `others`. A server that listens at all addresses of the machine also accepts every address as its own, but no other
    name: anyone can make a name of their site lead to this machine.
    """
    match = re.fullmatch(r"(?:\[([0-9a-f:.]+)\]|([^\[\]:]+))(?::\d{1,5})?", host)
    name = match and (match[1] or match[2])
    if not name:
        return False
    if name in ("localhost", own) or name in others:
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    return address.is_loopback or own in ("", "0.0.0.0", "::")


def host_of(scope: dict) -> str | None:
    """Returns the value of the Host header of a request in lower case; `None` without exactly one such header."""
    hosts = [value.decode("latin-1").lower() for name, value in scope["headers"] if name == b"host"]
    return hosts[0] if len(hosts) == 1 else None


def is_of_other_site(scope: dict) -> bool:
    """Whether a page of another site makes a browser send this request, by its Origin and Sec-Fetch headers.

    It is False for a link on another site that opens the page `/`, and for programs, which send no such headers.
    """
    headers = scope["headers"]
    host = host_of(scope)
    origins = [value.decode("latin-1").lower() for name, value in headers if name == b"origin"]
    if any(origin not in (f"http://{host}", f"https://{host}") for origin in origins):
        return True
    # Some requests of browsers, such as those for a picture, have no Origin, but Sec-Fetch-Site. "same-site" is another
    # port or another name of the same domain.
    fetch = {name: value for name, value in headers if name.startswith(b"sec-fetch-")}
    is_link = fetch.get(b"sec-fetch-mode") == b"navigate" and fetch.get(b"sec-fetch-dest") == b"document"
    opens_page = is_link and scope["path"] == "/" and scope["method"] == "GET"
    return fetch.get(b"sec-fetch-site") in (b"cross-site", b"same-site") and not opens_page


async def drain(scope: dict, receive: Callable[[], Awaitable[dict]]) -> None:
    """Reads and ignores the body of a refused request, because most clients send it before they read the answer.

    It does not read a body whose length is unknown or above `MOST_TO_DRAIN`, and stops after `SECONDS_TO_DRAIN`.
    """
    length = dict(scope["headers"]).get(b"content-length", b"0")
    left = int(length) if length.isdigit() and len(length) < 10 else MOST_TO_DRAIN + 1
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(SECONDS_TO_DRAIN):
            while 0 < left <= MOST_TO_DRAIN:
                message = await receive()
                left = left - len(message.get("body", b"")) if message.get("more_body") else 0
