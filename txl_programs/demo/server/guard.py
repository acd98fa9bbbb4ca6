"""Decides which requests reach the page: only requests of the form, size and routes that the page itself uses."""

import asyncio
import contextlib
import json
import re
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import parse_qs

import gradio as gr
from fastapi.responses import JSONResponse

from txl_programs.demo.language import preferred, said, speaking
from txl_programs.demo.limits import Limits
from txl_programs.web.senders import drain, host_of, is_of_other_site, is_own_host

# The page loads everything from this server. The browser refuses to load from elsewhere, even if a later version of
# Gradio asks for it.
POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; worker-src 'self' blob:; form-action 'self'; base-uri 'self'; "
    "frame-ancestors 'self'"
)
HEADERS = [
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"vary", b"accept-language"),
]
SESSION = r"[A-Za-z0-9_-]{1,64}"
JOIN = "/gradio_api/queue/join"
DATA = "/gradio_api/queue/data"
CANCEL = "/gradio_api/cancel"
# All routes that the page uses. Gradio has many more; some of them write files (deep links, recordings, uploads).
OPEN = {
    "GET": re.compile(
        "/|/config/?|/theme.css|/favicon.ico|/manifest.json|/robots.txt|/static/.+|/assets/.+|"
        f"{DATA}|/gradio_api/heartbeat/{SESSION}"
    ),
    "HEAD": re.compile("/"),
    "POST": re.compile(f"{JOIN}|{CANCEL}|/gradio_api/reset/?"),
}
STREAMS = re.compile(f"{DATA}|/gradio_api/heartbeat/.*")  # routes whose answers stay open
MOST_VALUES = 1000  # in the JSON of a request
SECONDS_TO_SEND = 10  # time for the body of a request
SECONDS_TO_ANSWER = 60  # time for the answer to a request that is no stream
TOO_MUCH = "A request to this page has at most {most:,} bytes, and no files."


class Refused(Exception):
    """The error for a request that does not reach the page, with the status and the sentence of the answer."""

    def __init__(self, status: int, sentence: str, **values: Any):
        super().__init__(said(sentence, **values))
        self.status = status


class Guard:
    """An ASGI application in front of the page. It passes the page's own requests on, and refuses others with an error.

    Args:
        app: ASGI application of the page.
        page: the page.
        limits: limits of bodies and streams.
        host: address at which the server listens. Requests may name it as their host.
    """

    def __init__(self, app: Callable, page: gr.Blocks, limits: Limits, host: str):
        self.app = app
        self.page = page
        self.limits = limits
        self.host = host.strip("[]").lower()
        self._streams = 0

    async def __call__(self, scope: dict, receive: Callable, send: Callable) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":  # the page has no web sockets
            return await send({"type": "websocket.close", "code": 1008})
        languages = b",".join(value for name, value in scope["headers"] if name == b"accept-language")
        with speaking(preferred(languages.decode("latin-1"))):
            await self._respond(scope, receive, send)

    async def _respond(self, scope: dict, receive: Callable, send: Callable) -> None:
        """Passes a request to the page if all checks allow it, else answers with the message of the refusal.

        Messages are in the language of `speaking`.
        """

        async def send_with_policy(message):
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *HEADERS]
            await send(message)

        body = None
        try:
            self._check_sender(scope)
            self._check_route(scope)
            self._check_size(scope)
            body = await self._read(scope, receive)
            self._check_body(scope, body)
        except Refused as refused:
            content = {"detail": str(refused), "error": str(refused)}
            answer = JSONResponse(content, refused.status, {"connection": "close"})
            if body is None:
                await drain(scope, receive)
            return await answer(scope, receive, send_with_policy)
        await self._answer(scope, replayed(body, receive), send_with_policy)

    def _check_sender(self, scope: dict) -> None:
        """Raises Refused if a request names another host than this server, or comes from a page of another site."""
        host = host_of(scope)
        if host is None or not is_own_host(host, self.host):
            raise Refused(400, "The request names another host than this page's: see --host.")
        if is_of_other_site(scope):
            raise Refused(403, "The request comes from a page of another site.")

    def _check_route(self, scope: dict) -> None:
        """Raises Refused if the page does not use the route, a stream has no session, or too many streams are open."""
        path = scope["path"]
        method = scope["method"]
        if path.startswith("/gradio_api/upload"):
            raise Refused(413, TOO_MUCH, most=self.limits.most_bytes)
        if method not in OPEN or not OPEN[method].fullmatch(path):
            raise Refused(404, "This page has no such address.")
        if path == DATA:
            sessions = parse_qs(scope["query_string"].decode("latin-1")).get("session_hash", [])
            if len(sessions) != 1 or not re.fullmatch(SESSION, sessions[0]):
                raise Refused(422, "The request names no session.")
        if STREAMS.fullmatch(path) and self._streams >= self.limits.streams:
            raise Refused(503, "Too many visitors have this page open: try again later.")

    def _check_size(self, scope: dict) -> None:
        """Raises Refused unless the headers announce a small body of JSON or, if the method is not POST, no body."""
        headers = dict(scope["headers"])
        takes_body = scope["method"] == "POST"
        length = headers.get(b"content-length", b"unknown" if takes_body else b"0")
        max_bytes = self.limits.most_bytes if takes_body else 0
        # Python refuses to convert thousands of digits. A number of 20 digits is too large anyway.
        if not length.isdigit() or int(length[:20]) > max_bytes or b"transfer-encoding" in headers:
            raise Refused(413, TOO_MUCH, most=self.limits.most_bytes)
        kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        if takes_body and kind != b"application/json":
            raise Refused(415, "The request is not JSON.")

    async def _read(self, scope: dict, receive: Callable) -> bytes:
        """Returns the body of a request, empty unless the method is POST. Raises Refused if it arrives too slowly."""
        if scope["method"] != "POST":
            return b""
        try:
            return await asyncio.wait_for(whole_body(receive), SECONDS_TO_SEND)
        except TimeoutError:
            sentence = "The request took more than {seconds} seconds to come."
            raise Refused(408, sentence, seconds=SECONDS_TO_SEND) from None

    def _check_body(self, scope: dict, body: bytes) -> None:
        """Raises Refused unless the body has the form in which the page sends it."""
        if scope["method"] != "POST":
            return
        values = parsed(body)
        if scope["path"] == JOIN:
            self._check_join(values)
        elif scope["path"] == CANCEL:
            check_fields(values, {"session_hash": is_session, "fn_index": is_whole, "event_id": is_event})
        else:
            check_fields(values, {"event_id": is_event})

    def _check_join(self, values: dict) -> None:
        """Raises Refused unless `values`, a request to call a handler, has the form in which the page sends it."""
        check_fields(values, {"session_hash": is_session, "fn_index": is_whole, "data": is_list})
        function = self.page.fns.get(values["fn_index"])
        if function is None or function.fn is None:
            raise Refused(422, "The request asks for what this page does not have: load the page again.")
        if len(values["data"]) != len(function.inputs):
            raise Refused(422, "The request has more or fewer values than this page sends: load the page again.")
        if any(values.get(name) for name in ("batched", "simple_format", "event_id")):
            raise Refused(422, "The request has a field that this page does not send: load the page again.")
        if values.get("trigger_id") is not None and not is_whole(values["trigger_id"]):
            raise Refused(422, "trigger_id must be a whole number.")

    async def _answer(self, scope: dict, receive: Callable, send: Callable) -> None:
        """Passes a request to the page. Counts open streams, and cancels other requests after `SECONDS_TO_ANSWER`."""
        if not STREAMS.fullmatch(scope["path"]):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.app(scope, receive, send), SECONDS_TO_ANSWER)
            return self._forget()
        self._streams += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self._streams -= 1

    def _forget(self) -> None:
        """Removes the events of sessions whose messages Gradio's queue has removed, once there are too many.

        Gradio would keep the events for ever.
        """
        queue = self.page._queue
        if len(queue.pending_event_ids_session) > 2 * self.limits.sessions:
            for session in queue.pending_event_ids_session.keys() - queue.pending_messages_per_session.keys():
                del queue.pending_event_ids_session[session]


def is_whole(value: Any) -> bool:
    """Whether a value is an integer from 0 to 2**31 - 1."""
    return type(value) is int and 0 <= value < 2**31


def is_session(value: Any) -> bool:
    """Whether a value has the form of the id of a session."""
    return isinstance(value, str) and re.fullmatch(SESSION, value) is not None


def is_event(value: Any) -> bool:
    """Whether a value has the form of the id of an event. It is the same form as for a session."""
    return is_session(value)


def is_list(value: Any) -> bool:
    return isinstance(value, list)


def check_fields(values: dict, fields: dict[str, Callable[[Any], bool]]) -> None:
    """Raises Refused if one of the `fields`, `{name: test of its value}`, is missing in `values` or fails its test."""
    for name, is_right in fields.items():
        if not is_right(values.get(name)):
            raise Refused(422, "The request has no {name}, or a wrong one: load the page again.", name=name)


def parsed(body: bytes) -> dict:
    """Returns the JSON object in a body of UTF-8.

    The values are counted in the bytes, so that too many values are never made. An empty list or object counts twice.

    Raises:
        Refused: there is no JSON object, or it may have more than `MOST_VALUES` values.
    """
    unescaped = body.replace(rb"\\", b"").replace(rb"\"", b"")
    too_many = unescaped.count(b'"') > 4 * MOST_VALUES  # a value has at most four quotes: two, and two of its key
    outside_strings = b"" if too_many else b"".join(unescaped.split(b'"')[::2])
    if too_many or sum(map(outside_strings.count, (b"[", b"{", b","))) > MOST_VALUES:
        raise Refused(413, "A request to this page has at most {most:,} values.", most=MOST_VALUES)
    try:
        values = json.loads(body.decode())  # `json.loads(body)` would also read UTF-16, in which the counts are wrong
    except (ValueError, RecursionError):
        raise Refused(422, "The request is not JSON.") from None
    if not isinstance(values, dict):
        raise Refused(422, "The request is no JSON object.")
    return values


async def whole_body(receive: Callable[[], Awaitable[dict]]) -> bytes:
    """Returns the body of a request. Its length is not checked. Raises Refused if the client closes the connection."""
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Refused(400, "The request ended too early.")
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


def replayed(body: bytes, receive: Callable[[], Awaitable[dict]]) -> Callable[[], Awaitable[dict]]:
    """Returns a function like `receive`. It returns `body`, which was read before, and then calls `receive`."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def again():
        return messages.pop() if messages else await receive()

    return again
