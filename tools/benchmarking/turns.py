"""The process of a contestant: it answers requests on its standard input, and measures its work when told to.

This file imports neither TensorFlow nor another framework, so that a process imports only that of its contestant.
"""

import json
import os
import sys
import time
from pathlib import Path

from benchmarking.work import mean_seconds

begun = {}  # the work that `turn` repeats, and its number of tokens


def do_twice(work, tokens):
    """Does the work twice, which traces graphs and allocates memory. Returns the seconds of the first time.

    Puts the work into `begun`, where `turn` finds it. `tokens` is the number of tokens in the work.
    """
    started = time.perf_counter()
    work.once()
    first = time.perf_counter() - started
    work.once()
    begun.update(work=work, tokens=tokens)
    return first


def turn(seconds, least=1):
    """Repeats the work in `begun` for `seconds`, at least `least` times. Returns a dict of figures."""
    taken = mean_seconds(begun["work"], seconds, least)
    figures = {"tokens_per_second": begun["tokens"] / taken, "milliseconds_per_step": 1000 * taken}
    return {**figures, "peak_memory_mb": peak_memory()}


def peak_memory(process="self"):
    """The largest resident memory of a process so far, in MB. `process` is its id, or "self"."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def answer_requests(*tasks):
    """Answers each line of the standard input, `[name of a task, arguments]`, with the figures of the task."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries that print to stdout now print to stderr, so that only answers reach the reader
    named = {task.__name__: task for task in tasks}
    for request in sys.stdin:
        name, arguments = json.loads(request)
        print(json.dumps(named[name](**arguments)), file=answers, flush=True)
