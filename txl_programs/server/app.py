"""The ASGI application of the server: `Guard` decides which requests are answered, and `Server` answers each path."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from typing import Any

import tensorflow as tf
from starlette.applications import Starlette
from starlette.convertors import StringConvertor, register_url_convertor
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from txl_config.errors import shortened, visible
from txl_programs.server.completions import Completions
from txl_programs.server.errors import Failed
from txl_programs.server.predict import Signature
from txl_programs.web.senders import drain, host_of, is_of_other_site, is_own_host
from txl_tf.serving.batcher import Batcher
from txl_tf.serving.decoder import Busy

VERSION = "1"
SECONDS_TO_SEND = 30  # the body of a request

logger = logging.getLogger("txl_tf")


class NameConvertor(StringConvertor):
    """The type `name` in the paths of routes: a part of a path without a colon, as before `:predict`."""

    regex = "[^/:]+"


register_url_convertor("name", NameConvertor())


class Json(Response):
    """An answer with JSON in ASCII. All other characters are escaped, because UTF-8 cannot encode lone surrogates."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json.dumps(content).encode()


class Guard:
    """An ASGI application in front of another one, to which it passes the requests that may be answered.

    It refuses requests that name another host, that pages of other sites send, or that lack the API key, and requests
    with the method POST whose bodies are too large or of unknown size.

    Args:
        app: the application.
        host: address at which the server listens. Requests may name it as their host.
        allowed_hosts: other names that requests may give as their host.
        api_key: key that requests must have, `Authorization: Bearer KEY`; `None` for none.
        max_bytes: most bytes of a body.
    """

    def __init__(
        self, app: Callable, host: str, allowed_hosts: Collection[str] = (), api_key: str | None = None,
        max_bytes: int = 2**25,
    ):  # fmt: skip
        self.app = app
        self.host = host.strip("[]").lower()
        self.allowed_hosts = {name.lower() for name in allowed_hosts}
        self.api_key = api_key
        self.max_bytes = max_bytes

    async def __call__(self, scope: dict, receive: Callable, send: Callable) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":
            return await send({"type": "websocket.close", "code": 1008})
        try:
            self._check(scope)
        except Failed as failed:
            await drain(scope, receive)
            answer = failure(scope["path"], failed)
            answer.headers["connection"] = "close"
            return await answer(scope, receive, send)
        await self.app(scope, receive, send)

    def _check(self, scope: dict) -> None:
        """Raises Failed, with the status of the answer, if the request must be refused."""
        host = host_of(scope)
        if host is None or not is_own_host(host, self.host, self.allowed_hosts):
            raise Failed(400, "the request names another host than this server: see --host and --allowed_hosts")
        if is_of_other_site(scope):
            raise Failed(403, "the request comes from a page of another site")
        headers = dict(scope["headers"])
        if self.api_key is not None:
            given = headers.get(b"authorization", b"")
            if not hmac.compare_digest(given, f"Bearer {self.api_key}".encode()):
                raise Failed(401, "the request needs the API key of this server: Authorization: Bearer KEY")
        if scope["method"] != "POST":
            return
        length = headers.get(b"content-length", b"")
        if not length.isdigit() or int(length[:20]) > self.max_bytes or b"transfer-encoding" in headers:
            raise Failed(413, f"a request must say its length, and have at most {self.max_bytes:,} bytes")


def failure(path: str, error: Failed) -> Json:
    """Returns the answer to a request that failed. By its path, it has the form of TensorFlow Serving or of OpenAI."""
    message = shortened(visible(str(error)))
    if ":predict" in path or path.endswith("/metadata"):
        return Json({"error": message}, error.status)
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return Json({"error": {"message": message, "type": kind, "param": error.name, "code": None}}, error.status)


class Server:
    """Answers the requests for one model.

    Args:
        name: name of the model.
        signatures: `{name: function}`, from `StoredModel.signatures()`.
        batcher: `Batcher` that calls the signatures for several requests at a time.
        completions: `Completions` that answers /v1/completions; `None` unless the model is a language model.
    """

    def __init__(self, name: str, signatures: dict[str, Any], batcher: Batcher, completions: Completions | None = None):
        self.name = name
        self.signatures = {key: Signature(key, function) for key, function in signatures.items()}
        self.batcher = batcher
        self.completions = completions
        self.started = int(time.time())

    def routes(self) -> list[Route]:
        """Returns the routes of the server: paths with their methods and endpoints."""
        model_path = "/v1/models/{name:name}"
        endpoints = [
            ("/v1/models", self.models, "GET"),
            ("/v1/completions", self.complete, "POST"),
        ]
        for prefix in (model_path, model_path + "/versions/{version:name}"):
            endpoints += [
                (prefix, self.status, "GET"),
                (f"{prefix}/metadata", self.metadata, "GET"),
                (f"{prefix}:predict", self.predict, "POST"),
            ]
        return [Route(path, answering(function), methods=[method]) for path, function, method in endpoints]

    def check_name(self, request: Request) -> None:
        """Raises Failed if a request is for another model or version."""
        name = request.path_params["name"]
        if name != self.name:
            raise Failed(404, f"the server has no model {name}: its model is {self.name}")
        if request.path_params.get("version", VERSION) != VERSION:
            raise Failed(404, f"model {name} has only the version {VERSION}")

    async def models(self, request: Request) -> Response:
        """Answers with OpenAI's list of models, which contains one model."""
        return Json({"object": "list", "data": [self._as_openai()]})

    def _as_openai(self) -> dict[str, Any]:
        """Returns the entry of the model in OpenAI's list of models."""
        return {"id": self.name, "object": "model", "created": self.started, "owned_by": "txl_tf"}

    async def status(self, request: Request) -> Response:
        """Answers with the status of the model, for clients of TensorFlow Serving and of OpenAI alike."""
        self.check_name(request)
        ok = {"error_code": "OK", "error_message": ""}
        state = {"version": VERSION, "state": "AVAILABLE", "status": ok}
        return Json({**self._as_openai(), "model_version_status": [state]})

    async def metadata(self, request: Request) -> Response:
        """Answers with the signatures, in the form of TensorFlow Serving's metadata."""
        self.check_name(request)
        signatures = await asyncio.to_thread(  # the first call traces graphs
            lambda: {name: signature.described() for name, signature in self.signatures.items()}
        )
        kind = "type.googleapis.com/tensorflow.serving.SignatureDefMap"
        spec = {"name": self.name, "signature_name": "", "version": VERSION}
        return Json({"model_spec": spec, "metadata": {"signature_def": {"@type": kind, "signature_def": signatures}}})

    async def predict(self, request: Request) -> Response:
        """Answers with the results of a signature for the inputs of the request."""
        self.check_name(request)
        values = await body_of(request)
        for key in values:
            if key not in ("signature_name", "inputs", "instances"):
                raise Failed(400, f"a request has signature_name, and inputs or instances, and no {key}")
        name = values.get("signature_name", "serving_default")
        signature = self.signatures.get(name) if isinstance(name, str) else None
        if signature is None:
            raise Failed(404, f"signature_name must be one of {', '.join(self.signatures)}, got {name}")
        arrays = await asyncio.to_thread(signature.arguments, values)
        results = await while_connected(request, self.batcher.call(signature.name, arrays))
        return Json(await asyncio.to_thread(signature.answer, values, results))

    async def complete(self, request: Request) -> Response:
        """Answers as OpenAI's completions do, with one JSON object or, with `stream`, with server-sent events."""
        if self.completions is None:
            raise Failed(404, "/v1/completions is for language models: use the signatures of this model")
        values = await body_of(request)
        options = await asyncio.to_thread(self.completions.checked, values)
        if options.stream:
            events = self.completions.events(options)
            first = await anext(events)  # an error before the first event has a status of its own
            return StreamingResponse(with_error_event(first, events), media_type="text/event-stream")
        return Json(await while_connected(request, self.completions.answer(options)))


async def with_error_event(first: bytes, events: Any) -> AsyncIterator[bytes]:
    """Yields `first` and the remaining server-sent events. If an error ends them, it becomes the last event.

    The error cannot change the status of the answer, which the server has already sent.
    """
    try:
        yield first
        async for event in events:
            yield event
    except Exception as error:  # of any kind: the client must not believe that the text is complete
        logger.error("a stream ended early: %s", error)
        yield b"data: " + json.dumps({"error": {"message": shortened(str(error)), "type": "server_error"}}).encode()
        yield b"\n\n"
    finally:
        await events.aclose()


async def while_connected(request: Request, answer: Awaitable[Any]) -> Any:
    """Awaits and returns the answer to a request. If the client closes the connection, cancels it and raises Failed."""
    task = asyncio.ensure_future(answer)
    disconnection = asyncio.ensure_future(disconnected(request))
    try:
        await asyncio.wait({task, disconnection}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Failed(499, "the client has closed the connection")
        return task.result()
    finally:
        disconnection.cancel()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task


async def disconnected(request: Request) -> None:
    """Returns when the client has closed the connection. The body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def body_of(request: Request) -> dict:
    """Returns the JSON object in the body of a request. Raises Failed if it is no JSON object or arrives too slowly."""
    try:
        body = await asyncio.wait_for(request.body(), SECONDS_TO_SEND)
    except TimeoutError:
        raise Failed(408, f"the request took more than {SECONDS_TO_SEND} seconds to come") from None
    try:
        values = await asyncio.to_thread(json.loads, body)
    except (ValueError, RecursionError):
        raise Failed(400, "the request is not JSON") from None
    if not isinstance(values, dict):
        raise Failed(400, "the request is no JSON object")
    return values


def answering(function: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    """Returns an endpoint that calls `function`. If `function` raises an error, the endpoint answers with its message.

    The status is that of `Failed`; 503 for `Busy`; 400 if the model refuses a value, or a value cannot become a tensor;
    500 for other errors of TensorFlow, and for too little memory. Errors of other types are raised.
    """

    async def endpoint(request: Request) -> Response:
        try:
            return await function(request)
        except Failed as failed:
            return failure(request.url.path, failed)
        except Busy as busy:
            answer = failure(request.url.path, Failed(503, str(busy)))
            answer.headers["retry-after"] = "1"
            return answer
        except (tf.errors.InvalidArgumentError, tf.errors.FailedPreconditionError) as error:
            return failure(request.url.path, Failed(400, message_for_client(error)))
        except (tf.errors.OpError, MemoryError) as error:
            return failure(request.url.path, Failed(500, message_for_client(error)))
        except (ValueError, TypeError) as error:  # of the conversion to tensors
            return failure(request.url.path, Failed(400, str(error)))

    return endpoint


def message_for_client(error: Exception) -> str:
    """Returns the message of an error of TensorFlow without the operations, files and lines of code that it names.

    Of a failed assertion, it returns the values that the graph reports: a message and, in most cases, a value.
    """
    message = getattr(error, "message", None) or str(error)
    assertion = re.search(r"assertion failed: \[(.*)\]$", message, re.MULTILINE)  # [message] [value] ...
    if assertion:
        return assertion[1].replace("] [", " ")
    message = re.split(r"\s*\[\[\{\{node|\s*\[Op:", message)[0]  # the operation, after the message
    if message.startswith("Graph execution error:"):  # a traceback and an empty line stand before the message
        message = message.rpartition("\n\n")[2]
    return re.sub(r"^\{\{.*?\}\}\s*", "", message)  # the function, before the message


def make_app(
    server: Server, host: str, allowed_hosts: Collection[str] = (), api_key: str | None = None, max_bytes: int = 2**25
) -> Guard:
    """Returns the application of a server, with a `Guard` in front of it. See `Guard` for the arguments.

    Another path than those of `Server.routes` is answered with status 404, another method with 405.
    """

    async def missing(request: Request, error: Exception) -> Response:
        return failure(request.url.path, Failed(404, "this server has no such address"))

    async def wrong_method(request: Request, error: Exception) -> Response:
        return failure(request.url.path, Failed(405, "this address takes another method"))

    app = Starlette(routes=server.routes(), exception_handlers={404: missing, 405: wrong_method})
    return Guard(app, host, allowed_hosts, api_key, max_bytes)
