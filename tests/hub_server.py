"""A stand-in for the Hugging Face Hub on the loopback interface: the requests that huggingface_hub makes, and no more.

with hub_server() as hub:
    hub.add("owner/name", {"config.json": b"..."})      # hub.url is the address, hub.requests what was asked
"""

import base64
import contextlib
import hashlib
import http.server
import json
import re
import threading
from urllib.parse import unquote

REVISIONS = {"main"}


class Hub:
    """The repositories and the requests of a server.

    Attributes:
        url: its address.
        repositories: `{name: {file: bytes}}`.
        requests: list of (method, path).
        private: names of new private repositories.
    """

    def __init__(self):
        self.url = ""
        self.repositories = {}
        self.requests = []
        self.private = []

    def add(self, name, files):
        self.repositories[name] = dict(files)

    def commit(self, name):
        """The commit of a repository, which changes with its files."""
        files = sorted(self.repositories[name].items())
        return hashlib.sha1(repr(files).encode()).hexdigest()


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.answer()

    do_GET = do_POST = do_HEAD

    def answer(self):
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        path = unquote(self.path.partition("?")[0])
        self.hub.requests.append((self.command, path))
        if match := re.fullmatch(r"/api/models/([\w.-]+/[\w.-]+)(?:/revision/(\w+))?", path):
            return self.describe(match[1], match[2] or "main")
        if match := re.fullmatch(r"/([\w.-]+/[\w.-]+)/resolve/(\w+)/(.+)", path):
            return self.send_file(match[1], match[3])
        if path == "/api/repos/create":
            return self.create(json.loads(body))
        if path == "/api/validate-yaml":
            return self.send_json({"errors": [], "warnings": []})
        if match := re.fullmatch(r"/api/models/([\w.-]+/[\w.-]+)/preupload/\w+", path):
            files = [{"path": file["path"], "uploadMode": "regular"} for file in json.loads(body)["files"]]
            return self.send_json({"files": [{**file, "shouldIgnore": False} for file in files]})
        if match := re.fullmatch(r"/api/models/([\w.-]+/[\w.-]+)/commit/\w+", path):
            return self.take_commit(match[1], body)
        return self.send_json({"error": "not found"}, 404)

    def describe(self, name, revision):
        if name not in self.hub.repositories:
            return self.send_json({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
        commit = self.hub.commit(name)
        if revision not in (*REVISIONS, commit):
            return self.send_json({"error": "Invalid rev id"}, 404, {"X-Error-Code": "RevisionNotFound"})
        siblings = [{"rfilename": file} for file in self.hub.repositories[name]]
        return self.send_json({"id": name, "modelId": name, "sha": commit, "siblings": siblings, "tags": []})

    def send_file(self, name, file):
        data = self.hub.repositories.get(name, {}).get(file)
        if data is None:
            return self.send_json({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"})
        etag = hashlib.sha256(data).hexdigest()
        headers = {"X-Repo-Commit": self.hub.commit(name), "ETag": f'"{etag}"', "Accept-Ranges": "bytes"}
        return self.send(data, 200, "application/octet-stream", headers)

    def create(self, values):
        name = f"{values['organization']}/{values['name']}" if values.get("organization") else f"me/{values['name']}"
        if name in self.hub.repositories:
            return self.send_json({"url": f"{self.hub.url}/{name}"}, 409)
        self.hub.repositories[name] = {}
        if values.get("private") or values.get("visibility") == "private":
            self.hub.private.append(name)
        return self.send_json({"url": f"{self.hub.url}/{name}", "name": name})

    def take_commit(self, name, body):
        for line in filter(None, body.splitlines()):
            found = json.loads(line)
            if found["key"] == "file":
                assert found["value"]["encoding"] == "base64"
                self.hub.repositories[name][found["value"]["path"]] = base64.b64decode(found["value"]["content"])
        commit = self.hub.commit(name)
        return self.send_json(
            {
                "success": True,
                "commitOid": commit,
                "commitUrl": f"{self.hub.url}/{name}/commit/{commit}",
                "hookOutput": "",
            }
        )

    def send_json(self, values, status=200, headers=None):
        self.send(json.dumps(values).encode(), status, "application/json", headers or {})

    def send(self, data, status, kind, headers):
        self.send_response(status)
        for key, value in {"Content-Type": kind, "Content-Length": str(len(data)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


@contextlib.contextmanager
def hub_server():
    """Yields a `Hub` whose server runs in a thread."""
    hub = Hub()
    handler = type("OwnHandler", (Handler,), {"hub": hub})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
