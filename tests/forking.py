"""Tests in child processes of pytest-xdist's workers.

A worker imports TensorFlow and collects all tests, which takes 8 s. It runs no test itself: it forks a child, which
runs them. TensorFlow keeps every program that XLA compiled, and most of the memory that graphs once took. So a child
that has grown ends after its file, and the next child starts within milliseconds.
"""

import multiprocessing
import os
import resource
import traceback
import warnings
from pathlib import Path

import pytest

GROWN = 900  # MB, from which on another child runs the next file: a file adds 600 MB or less


class Parent:
    """A plugin of a worker: makes children run the tests, and passes their reports to pytest-xdist.

    Its process must run no operation of TensorFlow, because a fork does not copy the threads that execute operations.
    """

    def __init__(self, config, plugin_of_child):
        self.config, self.plugin_of_child = config, plugin_of_child
        self.child = None  # its process id
        self.memory = 0  # MB of the child
        self.problems, self.peak = [], 0  # of all children

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector):
        """Refuses a module of tests that makes a tensor or a variable when it is imported: this starts threads."""
        from tensorflow.python.eager import context  # not above: the process that deals out the tests does without

        report = yield
        if report.passed and context.context()._initialized:
            report.outcome = "failed"
            report.longrepr = f"{collector.nodeid} makes a tensor when it is imported: use an array, or a function"
        return report

    def pytest_collection_finish(self, session):
        session.config._tmp_path_factory.getbasetemp()  # made here, because a child that makes it empties it
        self.indices = {item: index for index, item in enumerate(session.items)}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item, nextitem):
        if self.child is None:
            self.fork(item.session)
        if nextitem is not None and nextitem.path != item.path and self.memory > GROWN:
            nextitem = None  # so the child tears down all fixtures, and ends
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        self.connection.send((self.indices[item], self.indices.get(nextitem)))
        try:
            while (message := self.connection.recv())[0] != "end":
                self.replay(*message)
            self.memory, peak, problems = message[1]
            self.peak = max(self.peak, peak)
            self.problems += problems
        except (EOFError, ConnectionResetError):
            self.report_crash(item)
        else:
            if nextitem is None:
                self.wait()
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def fork(self, session):
        self.connection, connection = multiprocessing.Pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of the threads of pytest-xdist
            self.child = os.fork()
        if self.child == 0:
            try:
                self.connection.close()
                self.config.pluginmanager.unregister(self)
                with_room(Child(self.config, connection, self.plugin_of_child()).run, session.items)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)  # in any case: the other frames of this stack belong to the parent
        connection.close()

    def wait(self):
        """Waits until the child has ended; returns its exit code, or minus the number of its signal."""
        code = os.waitstatus_to_exitcode(os.waitpid(self.child, 0)[1])
        self.child, self.memory = None, 0
        return code

    def replay(self, kind, content):
        """Calls the hook that a child's report or warning has called in the child."""
        if kind == "report":
            report = self.config.hook.pytest_report_from_serializable(config=self.config, data=content)
            self.config.hook.pytest_runtest_logreport(report=report)
        else:
            details, place = content
            recorded = {"warning_message": warnings.WarningMessage(*details), **place}
            self.config.hook.pytest_warning_recorded.call_historic(kwargs=recorded)

    def report_crash(self, item):
        message = f"the process that ran this test ended unexpectedly, with exit code {self.wait()}"
        self.config.hook.pytest_runtest_logreport(
            report=pytest.TestReport(item.nodeid, item.location, {}, "failed", message, "call")
        )


class Child:
    """A plugin of a child: runs the tests that the parent names, and sends it their reports and warnings."""

    def __init__(self, config, connection, limits):
        self.config, self.connection, self.limits = config, connection, limits
        self.running = False

    def run(self, items):
        plugins = self.config.pluginmanager
        for plugin in plugins.get_plugins():
            if type(plugin).__name__ == "WorkerInteractor":  # it writes to the pipe of the parent
                plugins.unregister(plugin)
        plugins.register(self)  # pytest passes it all warnings of earlier children, which the parent knows
        plugins.register(self.limits)
        self.running = True
        following = 0
        while following is not None:
            index, following = self.connection.recv()
            nextitem = None if following is None else items[following]
            self.config.hook.pytest_runtest_protocol(item=items[index], nextitem=nextitem)
            self.connection.send(("end", (memory(), peak_memory(), self.limits.problems)))
            self.limits.problems = []

    def pytest_runtest_logreport(self, report):
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        self.connection.send(("report", data))

    def pytest_warning_recorded(self, warning_message, when, nodeid, location):
        if not self.running:
            return
        details = str(warning_message.message), warning_message.category, warning_message.filename
        place = {"when": when, "nodeid": nodeid, "location": location}
        self.connection.send(("warning", ([*details, warning_message.lineno], place)))


def with_room(function, argument):
    """Calls a function in a frame so large that Python has room for the frames of all calls below it.

    Python gets memory for frames in pieces of 16 KB, and gives a piece back when its last frame ends. If a loop calls
    functions at the border of two pieces, each call gets a piece from the system and gives it back. For this function's
    frame of 560 KB, Python gets a piece of 1 MB, in which the frames below it have room, too.
    """
    return function(argument)


with_room.__code__ = with_room.__code__.replace(co_stacksize=70_000)


def memory():
    """MB that this process takes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() >> 20


def peak_memory():
    """MB that this process took at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
