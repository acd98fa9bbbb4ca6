"""Processes of the benchmark: its own processes, which do tasks on request, and programs as users run them.

    with Process(checkout) as process:
        process.call("begin", mode="training", name="txl_tf float32", shape=...)
        process.call("turn", seconds=1)     # called again in every turn of this contestant

The request, such as `["turn", {"seconds": 1}]`, is a line of JSON on the standard input of tasks.py. The answer, a dict
of figures, is a line of JSON on its standard output. A process imports the txl_tf of its checkout.
"""

import contextlib
import json
import math
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarking.language_models import model_arguments, random_lines, words_of
from benchmarking.shapes import TAGGER
from benchmarking.turns import peak_memory

ROOT = Path(__file__).parents[2]
TASKS = Path(__file__).with_name("tasks.py")
PEERS = Path(__file__).with_name("peers.py")


class Process:
    """A new Python process that does the tasks of a program, by default tasks.py, with the txl_tf of a checkout.

    It is killed at the end of its `with` block.
    """

    def __init__(self, checkout=ROOT, program=None):
        self.errors = tempfile.TemporaryFile("w+")
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.errors}
        environment = environment_of(checkout, ROOT / "tools")
        self.process = subprocess.Popen([sys.executable, "-P", program or TASKS], **pipes, env=environment, text=True)

    def call(self, task, **arguments):
        """Does a task, and returns its figures.

        Raises:
            ValueError: the process has ended without an answer; see `failure`.
        """
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps([task, arguments]), file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            self.errors.seek(0)
            raise failure(f"{task} of {arguments}", self.errors.read())
        return json.loads(answer)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.process.kill()
        # Closes the pipes and the file, and waits for the end of the process.
        with self.errors, contextlib.suppress(BrokenPipeError), self.process:
            pass


def alone(task, checkout=ROOT, **arguments):
    """Does a task in a new process, and returns its figures. Raises ValueError if it fails, see `failure`."""
    with Process(checkout) as process:
        return process.call(task, **arguments)


def failure(what, output):
    """Returns the ValueError for a process that failed.

    The message contains the last line of the output. The cause of the error, which the benchmark prints with
    --verbosity=1, contains the last 3,000 characters.

    Args:
        what: the process, for the message.
        output: what it wrote to stderr.
    """
    # A program's own hint about --verbosity is not its error.
    lines = [line for line in output.splitlines() if line.strip() and not line.startswith("(--verbosity")]
    error = ValueError(f"{what} failed: {lines[-1] if lines else 'no output'}")
    error.__cause__ = RuntimeError(output[-3000:])
    return error


def loopback_bytes():
    """The number of bytes that all programs of this machine have sent over the loopback so far."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split(":")[1].split()[8]) for line in lines if line.strip().startswith("lo:"))


def free_ports(n):
    """Returns `n` different free ports. All are opened before the first is closed, so that none occurs twice."""
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(socket.create_server(("localhost", 0))) for _ in range(n)]
        return [server.getsockname()[1] for server in opened]


# -------------------------------------------------------------------------------------------- programs of a checkout

ONE_STEP = {"train_steps": 1, "iterations": 1, "save_steps": 1}
IMPORT = "import tensorflow"
ANSWERS = {  # program: folder of its run, further flags, the line to answer
    "generate.py": ("lm", {"prompt": "eta", "max_new_tokens": 1}, ""),
    "score.py": ("lm", {}, "eta\n"),
    "tag.py": ("tagger", {}, "高山在白石\n"),
}


def command_of(checkout, program, **flags):
    """The command of a program, as a list of words."""
    return [sys.executable, os.path.join(checkout, program), *(f"--{name}={value}" for name, value in flags.items())]


def environment_of(*folders, **variables):
    """The environment variables of this process, with `folders` as PYTHONPATH, and with `variables`."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders)), **variables}


def run(command, checkout):
    """Runs a program with the library of a checkout. Raises ValueError if it fails, see `failure`."""
    done = subprocess.run(command, env=environment_of(checkout), capture_output=True, text=True)
    if done.returncode:
        raise failure(command[1], done.stderr)


def train_command(checkout, shape, text, model_dir, **flags):
    """The command that trains a language model of this shape for one step, with train.py."""
    named = {**model_arguments(shape), "tgt_len": shape["tgt_len"]}
    del named["n_token"]  # the text decides
    named["cutoffs"] = ",".join(map(str, shape["cutoffs"]))
    named |= {"train_batch_size": shape["batch_size"], "eval_batch_size": shape["batch_size"], "preset": "base"}
    named |= {"dataset": "text", "data_path": text, "model_dir": model_dir, **ONE_STEP}
    return command_of(checkout, "train.py", **named, **flags)


def watch(shape, text, checkout):
    """Runs train.py for one step. Returns a dict of figures.

    `seconds` is the time until the line of the first step, `command_seconds` the time until the end of the program.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = train_command(checkout, shape, text, os.path.join(folder, "run"))
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        started = time.perf_counter()
        lines = []
        figures = {}
        process: Any
        with subprocess.Popen(command, env=environment_of(checkout), **pipes) as process:
            for line in process.stdout:
                lines.append(line)
                if line.startswith("step 1/1 "):
                    figures["seconds"] = time.perf_counter() - started
                    figures["peak_memory_mb"] = peak_memory(process.pid)
        figures["command_seconds"] = time.perf_counter() - started
    if process.returncode:
        raise failure("train.py", "".join(lines))
    return figures


def watch_reference(shape, text):
    """Trains the reference for one step in a new process.

    Returns a dict with the seconds since the process was started, and its peak memory.
    """
    started = time.perf_counter()
    with Process() as process:
        figures = process.call("start_reference", shape=shape, text=text)
        return {"seconds": time.perf_counter() - started, **figures}


def train_to_answer(checkout, shape, text, folder):
    """Trains two runs in `folder` for `answer`, one step each.

    They are `lm`, a language model of characters, and `tagger`, which finds entities.
    """
    train_to_serve(checkout, shape, text, folder)
    tagger = os.path.join(folder, "tagger")
    run(command_of(checkout, "tools/train_ner.py", model_dir=tagger, **TAGGER, **ONE_STEP), checkout)


def train_to_serve(checkout, shape, text, folder):
    """Trains a language model of characters for one step: `lm`."""
    run(train_command(checkout, shape, text, os.path.join(folder, "lm"), level="char"), checkout)


def train_to_score(checkout, shape, folder):
    """Trains a language model of the words of `random_lines` for one step: `lm`."""
    words = words_of(shape)
    lines = random_lines(shape)
    # Repeats make the text long, because its end is held out for validation.
    repeats = 1 + 20000 // sum(len(line.split()) for line in lines)
    text = Path(folder, "text.txt")
    text.write_text("\n".join([*words, *lines * repeats, ""]))
    run(train_command(checkout, shape, text, os.path.join(folder, "lm"), level="word"), checkout)


def answer(program, folder, checkout):
    """Runs a program on one line. Returns a dict of figures.

    They are the seconds until its answer is complete (`seconds`) and until its end (`command_seconds`), and the seconds
    of all cores together (`processor_seconds`).

    Args:
        program: a program of `ANSWERS`; or `IMPORT`, which only imports TensorFlow, for comparison. generate.py writes
            the prompt and one token.
        folder: contains the runs, see `train_to_answer`.
        checkout: folder of the checkout whose program it is.
    """
    command = [sys.executable, "-c", f"{IMPORT}\nprint()"]
    line = ""
    if program in ANSWERS:
        model, flags, line = ANSWERS[program]
        command = command_of(checkout, f"tools/{program}", model_dir=os.path.join(folder, model), **flags)
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    answered = math.nan
    started = time.perf_counter()
    before = os.times()
    process: Any
    with subprocess.Popen(command, env=environment_of(checkout), **pipes, bufsize=0) as process:
        process.stdin.write(line.encode())
        process.stdin.close()
        while process.stdout.read(1 << 16):
            answered = time.perf_counter() - started
        errors = process.stderr.read().decode()
    ended = time.perf_counter() - started
    after = os.times()
    if process.returncode:
        raise failure(program, errors)
    processor = after.children_user + after.children_system - before.children_user - before.children_system
    return {"seconds": answered, "command_seconds": ended, "processor_seconds": processor}


def import_seconds():
    """The seconds of `import txl_tf` and of some imports in it, by `-X importtime`: `{name: seconds}`.

    The seconds of an import include those of the imports that it makes.
    """
    command = [sys.executable, "-X", "importtime", "-c", "import txl_tf"]
    log = subprocess.run(command, env=environment_of(ROOT), capture_output=True, text=True, check=True).stderr
    found = re.findall(r"^import time: .* (\d+) \| +(txl_tf|keras|tensorflow|matplotlib\.pyplot)$", log, re.MULTILINE)
    # Python logs an import after the imports in it. Reversed, `txl_tf` comes first.
    return {name: int(microseconds) / 1e6 for microseconds, name in reversed(found)}
