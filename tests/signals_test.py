"""Signals and closed pipes, in any number: a training is saved, and ends with 0 or 130 and without noise."""

import ctypes
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from helpers import ROOT, TINY_RUN, free_ports, mentions, train_run

from txl_tf.environment import wait_for_all
from txl_tf.runs.callbacks import RunState, StopOnSignal
from txl_tf.runs.folder import RunFolder
from txl_tf.training.distribution import interruptible


@pytest.fixture(autouse=True)
def as_at_a_terminal():
    """Programs inherit SIGHUP, which nohup has ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def command(run_dir, text_file):
    options = {name: value for group in TINY_RUN.values() for name, value in group.items()}
    options |= {"data_path": text_file, "model_dir": run_dir, "iterations": 1, "save_steps": 10**6}
    flags = [f"--{name}={value}" for name, value in options.items() if name != "train_steps"]
    return [sys.executable, str(ROOT / "train.py"), *flags, f"--train_steps={10**6}"]


def own(errors):
    """What a program wrote to the standard error, without what TensorFlow writes at its start."""
    return "".join(re.findall(r"^(?!WARNING: All log|[IWE]0000 ).*\n", errors, re.MULTILINE))


def run_without_reader(path, *arguments):
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, str(ROOT / path), *arguments]
    return subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("number, status", [(signal.SIGTERM, 0), (signal.SIGINT, 130), (signal.SIGHUP, 0)])
def test_hundreds_of_signals_save_once_and_do_not_change_the_status(run_dir, command, number, status):
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for line in iter(process.stdout.readline, ""):
        if line.startswith("step"):
            break
    sent = 0
    while process.poll() is None and sent < 5000:
        process.send_signal(number)
        sent += 1
        time.sleep(0.0005)
    printed, errors = process.communicate(timeout=60)
    assert process.returncode == status and sent > 1, errors
    assert len(re.findall(r"^(terminated|interrupted|hung up)\b", printed, re.M)) == 2 and own(errors) == ""
    assert mentions(printed, RunFolder(run_dir).find_checkpoint())


@pytest.mark.slow
def test_a_training_whose_reader_is_gone_is_saved_and_ends_in_silence(run_dir, command):
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while not process.stdout.readline().startswith("step"):
            pass
        process.stdout.close()
        errors = process.stderr.read()
    assert (process.returncode, own(errors)) == (0, "")
    assert RunFolder(run_dir).steps()[-1] > 1
    rows = (run_dir / "log.csv").read_text().splitlines()
    assert len(rows) == RunFolder(run_dir).steps()[-1]  # the last step was saved before its line


@pytest.mark.slow
def test_another_program_whose_reader_is_gone_ends_in_silence(trained_run):
    for path, *arguments in [("tools/generate.py", "--prompt=the cat", "--greedy"), ("train.py", "--do_eval_only")]:
        done = run_without_reader(path, f"--model_dir={trained_run[0]}", *arguments)
        assert done.returncode == 0 and re.fullmatch(r"(.*\b12\n)?", own(done.stderr)), path


@pytest.mark.slow
def test_a_full_disk_under_the_output_is_an_error(command):
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    message = "train.py: the standard output cannot be written: No space left on device\n"
    assert (done.returncode, own(done.stderr)) == (1, message)


@pytest.mark.ci
@pytest.mark.parametrize("buffered", [True, False])
def test_a_full_disk_under_what_a_program_prints_is_an_error(buffered):
    command = [sys.executable, str(ROOT / "tools" / "estimate.py"), "--n_token=100"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120,
            env={**os.environ, "PYTHONUNBUFFERED": "" if buffered else "1"},
        )  # fmt: skip
    message = "estimate.py: the standard output cannot be written: No space left on device\n"
    assert (done.returncode, own(done.stderr)) == (1, message)


@pytest.mark.slow
def test_help_into_a_closed_pipe_and_a_closed_output_are_no_errors(trained_run):
    done = run_without_reader("train.py", "--help")
    assert own(done.stderr) == ""
    command = [sys.executable, str(ROOT / "train.py"), f"--model_dir={trained_run[0]}", "--do_eval_only"]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, preexec_fn=lambda: os.close(1))
    assert (done.returncode, own(done.stderr)) == (0, "")


def at_step(monkeypatch, step, action):
    function = RunState.on_train_batch_end

    def wrapper(self, *args, **kwargs):
        if self.model.optimizer.iterations.numpy() == step:
            action()
        function(self, *args, **kwargs)

    monkeypatch.setattr(RunState, "on_train_batch_end", wrapper)


@pytest.fixture
def half_done(trained_run, run_dir):
    """A run that goes on from its sixth step."""
    shutil.copytree(trained_run[0], run_dir)
    for path in run_dir.glob("ckpt-12*"):
        path.unlink()
    return run_dir


@pytest.mark.slow
def test_sighup_is_as_sigterm(half_done, text_file, monkeypatch, capfd):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as end:
        at_step(patch, 7, lambda: os.kill(os.getpid(), signal.SIGHUP))
        train_run(half_done, text_file)
    assert end.value.code == 0 and RunFolder(half_done).steps() == [6, 8]
    assert "hung up" in capfd.readouterr().out


class Model:
    stop_requested = False


@pytest.mark.parametrize("handler", [signal.SIG_DFL, signal.SIG_IGN])
def test_under_nohup_sighup_is_nothing(handler):
    before = signal.signal(signal.SIGHUP, handler)
    try:
        with StopOnSignal(Model()) as stop:
            signal.raise_signal(signal.SIGHUP)
            assert (stop.received == signal.SIGHUP) == stop.trained.stop_requested == (handler == signal.SIG_DFL)
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.slow
def test_a_signal_after_the_last_step_ends_the_run_that_was_resumed_once_it_is_saved(half_done, text_file, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as end:
        at_step(patch, 12, lambda: os.kill(os.getpid(), signal.SIGTERM))
        train_run(half_done, text_file)
    assert end.value.code == 0 and RunFolder(half_done).steps() == [6, 12]


@pytest.mark.slow
def test_sighup_is_as_sigterm_but_under_nohup(run_dir, text_file, monkeypatch, capfd):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as end:
        at_step(patch, 2, lambda: os.kill(os.getpid(), signal.SIGHUP))
        train_run(run_dir, text_file)
    assert end.value.code == 0 and RunFolder(run_dir).steps() == [3]
    assert "hung up" in capfd.readouterr().out
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with monkeypatch.context() as patch:
            at_step(patch, 4, lambda: os.kill(os.getpid(), signal.SIGHUP))
            train_run(run_dir, text_file)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert RunFolder(run_dir).steps()[-1] == 12


@pytest.mark.slow
def test_a_signal_after_the_last_step_ends_the_run_that_is_saved(run_dir, text_file, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as end:
        at_step(patch, 12, lambda: os.kill(os.getpid(), signal.SIGTERM))
        train_run(run_dir, text_file)
    assert end.value.code == 0 and RunFolder(run_dir).steps()[-1] == 12
    assert train_run(run_dir, text_file)["valid"] > 0


def test_a_second_ctrl_c_counts_after_a_second_and_late_signals_while_nothing_ends(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    stop, caught = StopOnSignal(Model()), []
    previous = {
        number: signal.signal(number, lambda *_: caught.append(1)) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        with pytest.raises(KeyboardInterrupt), stop:
            for _ in range(3):
                signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGTERM)  # does not take the place of the first
            assert stop.received == signal.SIGINT and stop.trained.stop_requested
            now[0] += 2
            signal.raise_signal(signal.SIGINT)
        try:
            raise SystemExit(0)
        except SystemExit:
            signal.raise_signal(signal.SIGTERM)
        assert not caught
        signal.raise_signal(signal.SIGTERM)  # the program goes on, as a notebook does
        assert caught
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


# ----------------------------------------------------------------------------------------- waiting for other workers


@pytest.mark.slow
@pytest.mark.parametrize("number, status", [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 130)])
def test_a_worker_that_waits_for_others_ends_at_once(command, number, status):
    own_port, other = free_ports(2)
    workers = [f"localhost:{own_port}", f"localhost:{other}"]
    task = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": 0}}
    environment = {**os.environ, "TF_CONFIG": json.dumps(task)}
    process = subprocess.Popen(
        [*command, "--strategy=multi_worker"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        next(line for line in process.stdout if mentions(line, 2, "workers"))
        time.sleep(6)  # TensorFlow's server has started, and sets handlers of its own
        sent = time.monotonic()
        process.send_signal(number)
        assert process.wait(20) == status
        assert time.monotonic() - sent < 2
        assert own(process.stderr.read()) == ""
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_processes_wait_until_all_listen_and_end_by_signals_meanwhile():
    addresses = [f"localhost:{port}" for port in free_ports(3)]
    script = f"""
import sys
from importlib.util import module_from_spec, spec_from_file_location
spec = spec_from_file_location("environment", {str(ROOT / "txl_config" / "environment.py")!r})
environment = module_from_spec(spec)
spec.loader.exec_module(environment)
print("waiting", flush=True)
environment.wait_for_all(sys.argv[1], sys.argv[1:])
host, port = sys.argv[1].split(":")
with environment.socket.create_server((host, int(port))):  # as TensorFlow's server does then
    print("all are here", flush=True)
    sys.stdin.read()
"""

    def start(i):
        command = [sys.executable, "-c", script, addresses[i], *addresses]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen(command, text=True, **pipes)
        process.stdout.readline()
        return process

    for number in (signal.SIGTERM, signal.SIGINT):
        process = start(0)
        time.sleep(0.5)
        process.send_signal(number)
        assert process.wait(2) == -number
    processes = [start(i) for i in range(2)]
    time.sleep(1)
    assert not any(select.select([process.stdout for process in processes], [], [], 0))
    processes.append(start(2))
    assert [process.stdout.readline() for process in processes] == 3 * ["all are here\n"]
    for process in processes:
        process.communicate()


def test_a_wait_in_a_thread_gives_its_result_or_its_error():
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        assert interruptible(threading.current_thread) is not threading.main_thread()
        with pytest.raises(ZeroDivisionError):
            interruptible(lambda: 1 // 0)
        signal.signal(signal.SIGTERM, lambda *_: None)  # as in a training, which saves first
        assert interruptible(threading.current_thread) is threading.main_thread()
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.ci
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_a_wait_that_never_returns_to_python(number):
    """The wait is in C, without the interpreter's lock, and ignores SIGTERM, as TensorFlow does while it waits.

    It runs in a fork of this process, as a process of its own would import TensorFlow for seconds.
    """

    def wait():
        libc = ctypes.CDLL(None)
        libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
        libc.signal(int(signal.SIGTERM), int(signal.SIG_IGN))
        time.sleep(0.3)
        while True:
            libc.sleep(100)

    child = os.fork()
    if not child:
        try:
            signal.alarm(30)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            threading.Timer(1, os.kill, [os.getpid(), number]).start()
            start = time.monotonic()
            interruptible(wait)
        except KeyboardInterrupt:
            os._exit(130 if time.monotonic() - start < 2 else 1)
        finally:
            os._exit(2)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == (130 if number == signal.SIGINT else -number)


def test_a_port_in_use_is_named():
    with socket.create_server(("localhost", 0)) as taken:
        own = f"localhost:{taken.getsockname()[1]}"
        with pytest.raises(ConnectionError) as caught:
            wait_for_all(own, [own, "localhost:1"])
    assert own in str(caught.value)


@pytest.mark.slow
def test_a_worker_whose_port_is_in_use_is_one_line(command):
    with socket.create_server(("localhost", 0)) as taken:
        workers = [f"localhost:{taken.getsockname()[1]}", "localhost:1"]
        task = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": 0}}
        environment = {**os.environ, "TF_CONFIG": json.dumps(task)}
        done = subprocess.run(
            [*command, "--strategy=multi_worker"], capture_output=True, text=True, env=environment, timeout=120
        )
    line, way = own(done.stderr).splitlines()
    assert done.returncode == 1 and workers[0] in line and way.startswith("(--verbosity")
