"""How the tests run, and their limits of time and memory.

The process that deals out the tests imports no TensorFlow. It prints how long the run took, the slowest tests, and the
most memory that all processes took at a time. If the environment has CI=true, a fast test of more than 10 s (of the
processor, if the machine is busy) and a process of more than 1.5 GB fail the run. The module `forking` says in which
processes the tests run.
"""

import ctypes
import gc
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path

import forking
import pytest

MOST_SECONDS = 10  # of a test that is not marked slow
MOST_MEMORY = 1500  # MB, of a process that runs tests
TIDY, STEP = 700, 50  # MB, from which on a process gives back memory after a file, and again after how much more
SECONDS_BETWEEN_SUMS = 10  # of the memory of all processes: the system takes long to divide shared pages among them


def pytest_addoption(parser):
    parser.addoption(
        "--seed-offset",
        type=int,
        default=0,
        help="added to the seeds of the tests' random data, on which no test may depend",
    )
    parser.addoption("--ci", action="store_true", help="do not count tests that are marked ci as slow")
    parser.addoption("--grappler", action="store_true", help="make TensorFlow rewrite the graphs of fast tests, too")


def pytest_configure(config):
    # Programs that tests run take this checkout's packages, also where another checkout is installed.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(config.rootpath), *filter(None, [os.environ.get("PYTHONPATH")])])
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in a shell's background job: programs would not hear it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if getattr(config.option, "numprocesses", None):  # this process deals out the tests
        config.pluginmanager.register(Meter(), "meter")
        return
    gc.disable()  # until all modules are imported, which makes many objects that stay
    if hasattr(config, "workerinput") and sys.platform == "linux":  # macOS ends forked processes that use its libraries
        config.pluginmanager.register(forking.Parent(config, Limits), "limits")
    else:
        config.pluginmanager.register(Limits(), "limits")
    config.pluginmanager.import_plugin("common_fixtures")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Without --ci, a test that is marked ci is slow, too."""
    if not config.getoption("ci"):
        for item in items:
            if item.get_closest_marker("ci"):
                item.add_marker("slow")


@pytest.hookimpl(trylast=True)
def pytest_collection_finish():
    # All modules are imported now. They stay: the collector need not look at them after every file, nor between.
    # Tests make many objects and little garbage: it looks less often, which saves a tenth of the time.
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 40)
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    """Says what exceeded a limit, or passes it on to the process that deals out the tests."""
    limits = session.config.pluginmanager.get_plugin("limits")
    if limits is None:
        return
    peak = max(limits.peak, forking.peak_memory())
    problems = limits.problems
    if peak > MOST_MEMORY:
        problems = [*problems, f"a process took {peak:,} MB: {MOST_MEMORY:,} MB at most"]
    output = getattr(session.config, "workeroutput", None)
    if output is None:
        _say(session, problems)
    else:
        output["problems"], output["peak"] = problems, peak


class Limits:
    """In a process that runs tests: gives back memory after a file, and notes tests that take too long."""

    def __init__(self):
        self.problems, self.peak = [], 0
        self.kept = TIDY - STEP  # MB after the last time

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item, nextitem):
        started, seconds = time.perf_counter(), _processor_seconds()
        result = yield
        seconds, wall = _processor_seconds() - seconds, time.perf_counter() - started
        if not item.get_closest_marker("slow") and min(seconds, wall) > MOST_SECONDS:
            self.problems.append(
                f"{item.nodeid} took {min(seconds, wall):.1f} s: fast tests take {MOST_SECONDS} s at most"
            )
        if (nextitem is None or nextitem.path != item.path) and forking.memory() > self.kept + STEP:
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)
            self.kept = forking.memory()
        return result


class Meter:
    """In the process that deals out the tests: the memory of all, every ten seconds, and what workers found."""

    def __init__(self):
        self.problems, self.peaks, self.most, self.ended = [], [], 0, threading.Event()
        threading.Thread(target=self.watch, daemon=True).start()

    def watch(self):
        while not self.ended.wait(SECONDS_BETWEEN_SUMS):
            self.most = max(self.most, sum(map(_memory, _tree(os.getpid()))))

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node):
        output = getattr(node, "workeroutput", {})
        self.problems += output.get("problems", [])
        self.peaks += [output["peak"]] if "peak" in output else []

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session):
        self.ended.set()
        _say(session, self.problems)

    def pytest_terminal_summary(self, terminalreporter):
        peaks = ", ".join(f"{peak:,}" for peak in self.peaks)
        terminalreporter.write_line(f"memory: at most {self.most:,} MB of all processes at a time; workers {peaks} MB")


def _say(session, problems):
    for problem in problems:
        print(f"\nLIMIT: {problem}")
    if problems and os.environ.get("CI") == "true":
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED


def _processor_seconds():
    """Of this process and of those that it waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def _tree(pid):
    """A process and all below it."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        children = []
    return [pid, *(below for child in children for below in _tree(int(child)))]


def _memory(pid):
    """MB of a process, of pages that several share its part."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:  # it has ended
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) // 1024
