"""How the tests run: their fixtures, what they take in time and memory, and its limits.

The process that deals out the tests imports no TensorFlow. It prints how long all took, the slowest tests, and the most
memory that all processes took at a time. Where the environment has CI=true, a fast test of more than 10 s (of the
processor, where the machine is busy) and a worker of more than 1.5 GB fail the run.

A worker that has grown gets no more files and another takes its place: TensorFlow keeps every program that XLA
compiled, and most of the memory that graphs once took.
"""

import ctypes
import gc
import os
import resource
import signal
import threading
import time
from pathlib import Path

import pytest
from xdist.scheduler import LoadFileScheduling

MOST_SECONDS = 10  # of a test that is not marked slow
MOST_MEMORY = 1500  # MB, of a process that runs tests
GROWN = 1100  # MB, from which on another takes its place: a file adds 400 MB or less
FIRST = [f"tests/{name}_test.py" for name in ("export", "serve", "decoding_options")]  # add more: for new workers


def pytest_addoption(parser):
    parser.addoption(
        "--seed-offset",
        type=int,
        default=0,
        help="added to the seeds of the tests' random data, which no test may hang on",
    )
    parser.addoption("--grappler", action="store_true", help="have TensorFlow rewrite the graphs of fast tests, too")


def pytest_configure(config):
    # Programs that tests run take this checkout's packages, also where another checkout is installed.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(config.rootpath), *filter(None, [os.environ.get("PYTHONPATH")])])
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in a shell's background job: programs would not hear it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if getattr(config.option, "numprocesses", None):  # this process deals out the tests
        config.pluginmanager.register(Meter(config), "meter")
    else:
        config.pluginmanager.register(Worker(config), "worker")
        config.pluginmanager.import_plugin("common_fixtures")


class Worker:
    """In a process that runs tests: gives back memory after every file, and watches the limits."""

    def __init__(self, config):
        self.config, self.file, self.problems = config, None, []
        gc.disable()  # until all modules are imported, which makes much that stays

    def pytest_collection_finish(self):
        # All modules are imported now. They stay: the collector need not look at them after every file, nor between.
        # Tests make many objects and little garbage: it looks less often, which saves a tenth of the time.
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000, 20, 40)
        gc.enable()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item, nextitem):
        started, seconds = time.perf_counter(), _processor_seconds()
        result = yield
        seconds, wall = _processor_seconds() - seconds, time.perf_counter() - started
        if not item.get_closest_marker("slow") and min(seconds, wall) > MOST_SECONDS:
            self.problems.append(
                f"{item.nodeid} took {min(seconds, wall):.1f} s: fast tests take {MOST_SECONDS} s at most"
            )
        if nextitem is None or nextitem.path != item.path:
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self):
        report = yield
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        report.worker_memory = pages * resource.getpagesize() >> 20  # MB, for the scheduler
        return report

    def pytest_sessionfinish(self, session):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        if peak > MOST_MEMORY:
            self.problems.append(f"a worker took {peak:,} MB: {MOST_MEMORY:,} MB at most")
        output = getattr(self.config, "workeroutput", None)
        if output is None:
            _say(session, self.problems)
        else:
            output["problems"], output["peak"] = self.problems, peak


class Scheduler(LoadFileScheduling):
    """Deals out whole files, and none to a worker that has grown."""

    def __init__(self, config, log):
        super().__init__(config, log)
        self.grown = set()

    def schedule(self):
        super().schedule()
        for node in self.nodes:  # a worker runs a test only once it knows the next one
            self._reschedule(node)
            self._reschedule(node)

    def _assign_work_unit(self, node):
        for file in reversed(FIRST):
            if file in self.workqueue:
                self.workqueue.move_to_end(file, last=False)
        super()._assign_work_unit(node)

    def _reschedule(self, node):
        if node in self.grown and self.workqueue and not node.shutting_down:
            node.shutdown()  # after what it has been given; `Meter` starts another
        elif node in self.registered_collections:  # which it is not while it starts
            super()._reschedule(node)

    def release(self):
        """Lets workers end that wait for a next test, where there is none: another had taken it, and crashed."""
        for node in [node for node in self.nodes if node in self.registered_collections]:
            if not self.workqueue and not node.shutting_down:
                node.shutdown()


class Meter:
    """In the process that deals out the tests: the memory of all, every two seconds, and what workers found."""

    def __init__(self, config):
        self.config, self.scheduler = config, None
        self.problems, self.peaks, self.most, self.ended = [], [], 0, threading.Event()
        threading.Thread(target=self.watch, daemon=True).start()

    def watch(self):
        while not self.ended.wait(2):
            self.most = max(self.most, sum(map(_memory, _tree(os.getpid()))))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config, log):
        if config.option.dist == "loadfile":
            self.scheduler = Scheduler(config, log)
        return self.scheduler

    def pytest_runtest_logreport(self, report):
        if self.scheduler and getattr(report, "worker_memory", 0) > GROWN:
            self.scheduler.grown.add(report.node)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node, error):
        session = self.config.pluginmanager.get_plugin("dsession")
        if not error and self.scheduler and self.scheduler.workqueue and not session.shuttingdown:
            node.ensure_teardown()  # or its process would wait for the end
            session._clone_node(node)
        if self.scheduler:
            self.scheduler.release()
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
