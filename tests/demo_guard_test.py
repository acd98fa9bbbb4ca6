"""What reaches the page of tools/demo.py: its own visitors, open routes, small requests. Nothing else, and no terminal.

tests/demo_browser_test.py has the page itself in a browser.
"""

import asyncio
import contextlib
import io
import json
import os
import socket
import tracemalloc
from types import SimpleNamespace

import pytest
from helpers import mentions

from txl_programs.demo.limits import Limits
from txl_programs.web import senders, terminal

pytestmark = pytest.mark.ci

HOST = {"host": "127.0.0.1:7860"}
JOIN = "/gradio_api/queue/join"
OPEN_ROUTES = {  # each of Gradio's that a request can reach; the others may write files or show what they need not
    ("GET", "/"), ("HEAD", "/"), ("GET", "/config"), ("GET", "/config/"), ("GET", "/theme.css"),
    ("GET", "/favicon.ico"), ("GET", "/manifest.json"), ("GET", "/robots.txt"), ("GET", "/static/{path:path}"),
    ("GET", "/assets/{path:path}"), ("GET", "/gradio_api/queue/data"), ("GET", "/gradio_api/heartbeat/{session_hash}"),
    ("POST", "/gradio_api/queue/join"), ("POST", "/gradio_api/cancel"), ("POST", "/gradio_api/reset"),
    ("POST", "/gradio_api/reset/"),
}  # fmt: skip


def answer(text, number):
    return f"{text} {number}"


@pytest.fixture(scope="module", autouse=True)
def gr():
    """Gradio, which takes seconds and 100 MB: only the process that runs these tests imports it."""
    return pytest.importorskip("gradio")


@pytest.fixture(scope="module")
def guard(gr):
    from txl_programs.demo.server import guard

    return guard


@pytest.fixture(scope="module")
def connections(gr):
    from txl_programs.web import connections

    return connections


@pytest.fixture(scope="module")
def app(gr):
    from txl_programs.demo.shell import explain_wrong_values, make_app

    with gr.Blocks() as page:
        text, number, names = gr.Textbox(), gr.Slider(0, 2), gr.CheckboxGroup(["a", "b"])
        gr.Button().click(answer, [text, number], text)
        gr.Button().click(lambda names: names, names, names)
    for component in (text, number, names):
        explain_wrong_values(component)
    limits = Limits()
    return make_app(page.queue(max_size=limits.waiting, api_open=False), limits, "127.0.0.1")


@pytest.fixture(scope="module")
def client(app):
    from starlette.testclient import TestClient

    with TestClient(app, base_url="http://127.0.0.1:7860") as found:
        yield found


def routes_of(app, prefix=""):
    from starlette.routing import Mount

    for route in app.routes:
        if router := getattr(route, "original_router", None):  # included in FastAPI's way
            yield from routes_of(router, prefix)
        elif isinstance(route, Mount):
            yield from routes_of(route, prefix + route.path)
        else:
            yield from ((method, prefix + route.path) for method in getattr(route, "methods", None) or ())


def request(**changes):
    return {"data": ["x", 1], "fn_index": 0, "session_hash": "abc", "event_data": None, "trigger_id": 3, **changes}


# ------------------------------------------------------------------------------------------------------ who may ask


@pytest.mark.parametrize(
    "host", ["127.0.0.1:7860", "127.0.0.1", "localhost:7860", "LOCALHOST", "127.9.9.9:1", "[::1]:7"]
)
def test_the_page_answers_to_its_own_names(client, host):
    assert client.get("/theme.css", headers={"host": host}).status_code == 200
    assert client.get("/theme.css", headers={"host": host, "origin": f"http://{host.lower()}"}).status_code == 200


@pytest.mark.parametrize("host", [
    "x.localhost:7860", "localhost.:7860", "evil.test", "127.0.0.1.evil.test", "127.0.0.1:x", "localhost@evil.test", "",
    "192.0.2.2:7860", "0.0.0.0:7860", "2130706433", "127.1", "[::1", "::1", "localhost:7860/x", "127.0.0.1 ",
])  # fmt: skip
def test_another_host_is_refused(client, host):
    for path in ("/", "/config", "/gradio_api/queue/data?session_hash=a", "/gradio_api/heartbeat/a"):
        found = client.get(path, headers={"host": host})
        assert found.status_code == 400 and mentions(found.json()["error"], "--host"), path


@pytest.mark.parametrize("host, taken, refused", [
    ("0.0.0.0", ["192.0.2.2:7860", "127.0.0.1", "[2001:db8::1]:1", "0.0.0.0:7860"], ["evil.test", "x.localhost"]),
    ("::", ["192.0.2.2:7860", "[::]:7860"], ["evil.test"]),
    ("box.lan", ["box.lan:7860", "BOX.lan", "localhost"], ["192.0.2.2", "x.box.lan", "box.lan."]),
    ("192.0.2.2", ["192.0.2.2:7860"], ["192.0.2.3:7860", "192.0.2.2.evil.test"]),
])  # fmt: skip
def test_other_hosts_depend_on_the_flag(host, taken, refused):
    own = host.lower()
    assert all(senders.is_own_host(name.lower(), own) for name in taken)
    assert not any(senders.is_own_host(name.lower(), own) for name in refused)


@pytest.mark.parametrize("headers", [
    {"origin": "http://evil.test"}, {"origin": "null"}, {"origin": "http://127.0.0.1:7861"}, {"origin": ""},
    {"origin": "http://x.localhost:7860"}, {"origin": "http://localhost:7860"}, {"origin": "file://127.0.0.1:7860"},
    {"sec-fetch-site": "cross-site"}, {"sec-fetch-site": "same-site"},
    {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "iframe"},
])  # fmt: skip
def test_a_page_of_another_site_is_refused(client, headers):
    for method, path in [
        ("GET", "/"), ("GET", "/config"), ("GET", "/gradio_api/queue/data?session_hash=a"), ("OPTIONS", JOIN),
        ("GET", "/gradio_api/heartbeat/a"), ("POST", JOIN), ("POST", "/gradio_api/cancel"),
    ]:  # fmt: skip
        found = client.request(method, path, headers=headers, json=request() if method == "POST" else None)
        assert found.status_code == 403 and "access-control-allow-origin" not in found.headers, (method, path)


def test_a_link_on_another_page_opens_the_page_and_nothing_else(client):
    link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
    assert client.get("/", headers=link).status_code == 200
    assert client.get("/config", headers=link).status_code == 403


# ------------------------------------------------------------------------------------------------- what may be asked


def test_the_open_routes_are_these(app, guard):
    found = {
        (method, route)
        for method, route in routes_of(app)
        if method in guard.OPEN and guard.OPEN[method].fullmatch(route.replace("{session_hash}", "a"))
    }
    assert found == OPEN_ROUTES
    assert {"/gradio_api/upload", "/gradio_api/process_recording"} <= {route for _, route in routes_of(app)}


@pytest.mark.parametrize("method, path", [
    ("GET", "/gradio_api/deep_link?session_hash=a"), ("POST", "/gradio_api/process_recording"),
    ("GET", "/openapi.json"), ("GET", "/gradio_api/heartbeat/" + "a" * 65),
    ("GET", "/gradio_api/openapi.json"), ("POST", "/gradio_api/component_server"), ("POST", "/gradio_api/run/predict"),
    ("POST", "/gradio_api/call/answer"), ("GET", "/gradio_api/file=/etc/hostname"), ("GET", "//gradio_api/deep_link"),
    ("GET", "/gradio_api/./deep_link"), ("PUT", JOIN), ("GET", "/monitoring"), ("POST", "/gradio_api/stream/a"),
    ("GET", "/gradio_api/queue/status"), ("GET", "/gradio_api/heartbeat/a%20b"),
])  # fmt: skip
def test_other_routes_are_not_there(client, method, path):
    assert client.request(method, path).status_code == 404


@pytest.mark.parametrize("body, status", [
    (b"", 422), (b"{", 422), (b"[]", 422), (b"3", 422), (b'"' * 9, 422), (b'{"data": "\\u00', 422), (b"\xff\xfe", 422),
    (json.dumps(request()).encode("utf-16"), 422),
    (b"[" * 900, 422), (b"[" * 5000, 413), (b'"",' * 5000, 413),
    *((json.dumps(request(**some)).encode(), 422) for some in (
        {"data": None}, {"data": ["x"]}, {"data": ["x", 1, 2]}, {"data": {"a": 1}}, {"fn_index": 999}, {"fn_index": -1},
        {"fn_index": "0"}, {"fn_index": True}, {"fn_index": None}, {"fn_index": 10**30}, {"session_hash": None},
        {"session_hash": "a b"}, {"session_hash": ["a"]}, {"session_hash": "a" * 65}, {"trigger_id": "x"},
        {"batched": True}, {"event_id": "a"},
    )),
])  # fmt: skip
def test_a_request_of_a_wrong_form_gets_an_error_message(client, capfd, body, status):
    found = client.post(JOIN, content=body, headers={"content-type": "application/json"})
    assert found.status_code == status and found.json()["error"] == found.json()["detail"] != ""
    assert capfd.readouterr() == ("", "")


def test_what_is_no_json_by_its_type_is_refused(client):
    for kind in ("text/plain", "multipart/form-data; boundary=x", "application/x-www-form-urlencoded"):
        assert client.post(JOIN, content=json.dumps(request()), headers={"content-type": kind}).status_code == 415


@pytest.mark.parametrize("number, fn, value", [
    *((0, ["x", value], value) for value in ("a", [1], {"a": 1}, 3, -1, "9" * 5000, "\x1b[31m", [[[]]])),
    *((1, [value], value) for value in (3, "c", [["a"]], [{}], {"c": 1}, True)),
])  # fmt: skip
def test_values_that_a_box_does_not_take_get_a_sentence(client, capfd, number, fn, value):
    event = client.post(JOIN, json=request(fn_index=number, data=fn)).json()["event_id"]
    with client.stream("GET", "/gradio_api/queue/data?session_hash=abc") as stream:
        messages = [json.loads(line.removeprefix("data:")) for line in stream.iter_lines() if line.startswith("data:")]
    (done,) = [some for some in messages if some["msg"] == "process_completed" and some["event_id"] == event]
    assert not done["success"] and 0 < len(done["output"]["error"]) <= 500
    assert capfd.readouterr() == ("", "")


def test_a_request_of_the_right_form_is_answered(client):
    assert client.post(JOIN, json=request()).status_code == 200
    with client.stream("GET", "/gradio_api/queue/data?session_hash=abc") as stream:
        assert any('"x 1' in line for line in stream.iter_lines())


# ------------------------------------------------------------------------------------------------------------ bounds


def test_a_large_request_is_refused_by_its_length(guard):
    async def receive():
        return {"type": "http.disconnect"}

    sent = []

    async def send(message):
        sent.append(message)

    limits = Limits()
    for length in (b"4194304", b"unknown", b"9" * 4000, b"-1", str(limits.most_bytes + 1).encode()):
        headers = [(b"host", b"localhost"), (b"content-type", b"application/json"), (b"content-length", length)]
        scope = {"type": "http", "method": "POST", "path": JOIN, "headers": headers, "query_string": b""}
        asyncio.run(guard.Guard(None, None, limits, "127.0.0.1")(scope, receive, send))
        assert sent.pop(0)["status"] == 413 and mentions(sent.pop(0)["body"], "305,536")


def test_values_are_counted_before_they_are_made(guard):
    body = b'{"data":[' + b"[]," * 1_390_000 + b'[]],"fn_index":0}'
    tracemalloc.start()
    with pytest.raises(guard.Refused):
        guard.parsed(body)
    assert tracemalloc.get_traced_memory()[1] < 3 * len(body)
    tracemalloc.stop()
    hidden = '{"data":["Ģ",' + "[]," * 50_000 + '[]],"fn_index":0}'  # a byte of Ģ in UTF-16 is that of a quote
    for encoding in ("utf-16", "utf-16-le", "utf-32"):
        with pytest.raises(guard.Refused) as refused:
            guard.parsed(hidden.encode(encoding))
        assert refused.value.status in (413, 422)
    text = '[{,\\"' * 60_000
    assert guard.parsed(json.dumps({"data": [text]}).encode()) == {"data": [text]}


def test_streams_sessions_and_waiting_requests_are_bounded(app, guard):
    from starlette.routing import Mount

    limits = Limits(visitors=2)
    assert (limits.waiting, limits.sessions) == (16, 72)
    one = guard.Guard(None, None, limits, "127.0.0.1")
    one._streams = limits.streams
    scope = {"type": "http", "method": "GET", "path": "/gradio_api/heartbeat/a", "headers": [(b"host", b"localhost")]}
    with pytest.raises(guard.Refused) as caught:
        one._check_route({**scope, "query_string": b""})
    assert caught.value.status == 503
    gradio_app = next(route.app for route in app.routes if isinstance(route, Mount))
    assert gradio_app.state_holder.capacity == Limits().sessions
    queue = gradio_app.get_blocks()._queue
    for i in range(3 * Limits().sessions):
        queue.pending_messages_per_session[f"s{i}"] = queue.pending_event_ids_session[f"s{i}"] = set()
    assert len(queue.pending_messages_per_session) == Limits().sessions
    guard.Guard(None, gradio_app.get_blocks(), Limits(), "127.0.0.1")._forget()
    assert queue.pending_event_ids_session.keys() == queue.pending_messages_per_session.keys()


def test_connections_are_bounded_and_end_where_no_request_comes(monkeypatch, connections):
    monkeypatch.setattr(connections, "most_connections", lambda: 3)
    monkeypatch.setattr(connections, "SECONDS_WITHOUT_REQUEST", 0.3)

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 204, "headers": []})
        if scope["path"] == "/wait":
            await asyncio.sleep(60)
        await send({"type": "http.response.body"})

    async def main():
        server = connections.make_server(app)
        server.config.lifespan = "off"
        listening = socket.create_server(("127.0.0.1", 0))
        task = asyncio.create_task(server.serve(sockets=[listening]))
        while not server.started:
            await asyncio.sleep(0.01)
        address = listening.getsockname()
        some = [await asyncio.open_connection(*address) for _ in range(3)]
        for reader, writer in some[1:]:
            writer.write(b"GET /wait HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await reader.readline()
        reader, writer = await asyncio.open_connection(*address)  # one too many: the one without a request goes
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 204")
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(some[0][0].read(), 0.2) == b""
        writer.close()
        slow_reader, slow_writer = await asyncio.open_connection(*address)
        slow_writer.write(b"GET / HT")
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(slow_reader.read(), 2) == b""  # after a while
        server.should_exit = server.force_exit = True
        await task

    asyncio.run(main())


def test_a_connection_is_not_idle_for_long_after_a_long_answer(connections):
    """One whose answer ended just before a check stays open until the check after it."""
    later, aborted = [], []
    connection = connections.Connection.__new__(connections.Connection)
    connection.loop = SimpleNamespace(call_later=lambda seconds, check, *state: later.append((check, state)))
    connection.transport = SimpleNamespace(is_closing=lambda: bool(aborted), abort=lambda: aborted.append(True))
    connection.cycle = SimpleNamespace(response_complete=False)
    connection._check_later()
    for response_complete in (False, True, True):
        assert not aborted
        connection.cycle.response_complete = response_complete
        ((check, state),) = later
        later.clear()
        check(*state)
    assert aborted and not later


@pytest.mark.parametrize("files, most", [(1024, 256), (256, 128), (4, 8), (-1, 256)])
def test_connections_leave_files_for_the_program(monkeypatch, connections, files, most):
    if connections.resource is None:
        pytest.skip("no limits of open files here")
    monkeypatch.setattr(connections.resource, "getrlimit", lambda kind: (files, files))
    assert connections.most_connections() == most


# ---------------------------------------------------------------------------------------------------------- terminal


def test_control_characters_do_not_reach_the_terminal(monkeypatch):
    output = io.StringIO()
    monkeypatch.setattr("sys.stdout", output)
    monkeypatch.setattr("sys.stderr", output)
    with terminal.plain_output():
        print("\x1b[31mRED\x07\u202e\tend")
        os.sys.stderr.write("x" * 10_000 + "\nsecond\n")
    first, second, third = output.getvalue().splitlines()
    assert (first, len(second), third) == ("\\x1b[31mRED\\x07\\u202e\tend", 500, "second")
