"""Requests per second of `tools/serve.py`: the mode `serving`.

    with started(run) as address:
        turn(address, "completions", clients=8, seconds=1)

A client sends its next request when it has the answer to the last one. The clients are threads of this process.
"""

import contextlib
import http.client
import json
import subprocess
import tempfile
import threading
import time
import urllib.parse
from typing import Any

from benchmarking.processes import ROOT, command_of, environment_of, failure

CLIENTS = (1, 8, 32)
MODEL = "lm"  # its name, and the folder of its run
PROMPT = "eta oin ath " * 27  # `write_text` writes these letters
_PREDICT = f"/v1/models/{MODEL}:predict"


def _signature(name, **inputs):
    return _PREDICT, {"signature_name": name, "inputs": inputs}


REQUESTS = {  # name in the table: path and body
    "completions, 64 tokens": ("/v1/completions", {"model": MODEL, "prompt": PROMPT[:80], "max_tokens": 64}),
    "generate_text, 64 tokens": _signature("generate_text", text=[PROMPT[:80]], max_new_tokens=[64], temperature=[1.0]),
    "score_text, 320 characters": _signature("score_text", text=[PROMPT[:320]]),
}


@contextlib.contextmanager
def started(run):
    """Starts a server for the run in a folder. Yields its address, such as `localhost:40001`; ends it at the end.

    Raises:
        ValueError: the server ends before it listens, see `failure`.
    """
    flags = {"model_dir": run, "name": MODEL, "port": 0, "max_rows": max(CLIENTS)}
    command = command_of(ROOT, "tools/serve.py", **flags)
    process: Any
    with tempfile.TemporaryFile("w+") as errors:
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": errors, "text": True}
        with subprocess.Popen(command, env=environment_of(ROOT), **pipes) as process:
            line = process.stdout.readline()  # the address, when the server listens
            if not line:
                errors.seek(0)
                raise failure("tools/serve.py", errors.read())
            try:
                yield urllib.parse.urlsplit(line).netloc
            finally:
                process.terminate()


def ask(connection, path, body):
    """Sends a request and reads the answer. Raises ValueError unless its status is 200."""
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    answer = response.read()
    if response.status != 200:
        raise ValueError(f"{path} answered {response.status}: {answer[:300].decode(errors='replace')}")
    return json.loads(answer)


def turn(address, name, clients, seconds):
    """Lets clients send a request of `REQUESTS` again and again. Returns `{"requests_per_second": ...}`.

    Args:
        address: the server's.
        name: the request.
        clients: how many send it at the same time.
        seconds: time after which a client sends no new request. A client sends at least one.
    """
    answers = []
    errors = []
    started = time.perf_counter()

    def client():
        connection = http.client.HTTPConnection(address)
        with contextlib.closing(connection):
            while True:
                try:
                    answers.append(ask(connection, *REQUESTS[name]))
                except (OSError, ValueError, http.client.HTTPException) as error:
                    errors.append(error)
                    return
                if time.perf_counter() - started >= seconds:
                    return

    threads = [threading.Thread(target=client) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise ValueError(f"the server failed: {errors[0]}") from errors[0]
    return {"requests_per_second": len(answers) / (time.perf_counter() - started)}
