"""Training on a Ray cluster: what a worker is told, how workers end and are replaced, and that numbers stay."""

import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import types

import pytest
from clusters import nodes, raylets
from helpers import ROOT, TEXT, free_ports, mentions, program, raises_naming, raises_parameter, run_here, run_program
from kills import final_state

from txl_programs.program import _train_on_workers
from txl_tf.cluster import connection
from txl_tf.cluster.training import Desk, _follow, _needed, _why, run_workers, variables_to_pass, worker_environment
from txl_tf.config import TrainingClusterConfig

MODEL = (
    "--level=char --n_layer=1 --d_model=16 --d_embed=16 --n_head=2 --d_head=8 --d_inner=16 --tgt_len=8 --mem_len=8 "
    "--train_batch_size=12 --eval_batch_size=12 --max_eval_batch=2 --learning_rate=0.01 --warmup_steps=2 --iterations=7"
).split()


def environment_of(index, workers, rows=()):
    """`worker_environment` of one of `workers`; its TF_CONFIG is parsed."""
    config = {"cluster": {"worker": [f"host{i}:1" for i in range(workers)]}, "task": {"type": "worker", "index": index}}
    found = worker_environment({"TF_CONFIG": json.dumps(config), "TF_USE_LEGACY_KERAS": "1", "HOME": "/root"}, rows)
    return found and {**found, "TF_CONFIG": json.loads(found["TF_CONFIG"])}


def test_a_worker_gets_rays_cluster_but_not_its_keras():
    config = {"cluster": {"worker": ["host0:1", "host1:1"]}, "task": {"type": "worker", "index": 1}}
    assert environment_of(1, 2) == {"TF_CONFIG": config, "HOME": "/root"}


def test_a_worker_gets_the_trackers_variables_of_the_command():
    kept = {"WANDB_MODE": "offline", "MLFLOW_TRACKING_URI": "sqlite:///a.db"}
    assert variables_to_pass({**kept, "HOME": "/root", "TF_CONFIG": "{}", "PATH": "/bin"}) == kept


@pytest.mark.parametrize(
    "workers, fewest, free, text",
    [
        (1, None, {"CPU": 1.0}, "1 worker, 1 CPU, 0 GPU: the cluster has 1 CPU, 0 GPU free"),
        (4, 1, {"CPU": 1.0}, "1 worker, 1 CPU, 0 GPU: the cluster has 1 CPU, 0 GPU free"),
        (2, None, {}, "2 workers, 2 CPU, 0 GPU: the cluster has 0 CPU, 0 GPU free"),
    ],
)
def test_the_fewest_workers_decide_whether_there_is_room(workers, fewest, free, text):
    cluster = TrainingClusterConfig(ray_workers=workers, ray_min_workers=fewest, ray_cpus=1)
    assert _needed(cluster, free) == (text, bool(free))


def test_as_many_workers_work_as_divide_the_rows():
    found = [environment_of(index, 5, rows=[12, 16]) for index in range(5)]
    workers = [f"host{i}:1" for i in range(4)]
    assert [each and each["TF_CONFIG"]["cluster"]["worker"] for each in found] == [workers] * 4 + [None]
    assert environment_of(0, 3, rows=[7])["TF_CONFIG"]["cluster"]["worker"] == ["host0:1"]


def test_the_first_failure_is_told_and_ends_the_others():
    desk = Desk()
    for rank in (0, 1, 2):
        desk.started(rank)
    desk.ended(2, -9, "", "worker 2 of 3 is gone (killed by SIGKILL)")
    desk.ended(0, 75, "another worker is gone", "worker 0 of 3 is gone (another worker is gone)")
    assert desk.wanted() is None and desk.read() == (b"", 1, "worker 0 of 3 is gone (another worker is gone)")
    desk.ended(1, 1, "no such file", "")
    assert desk.wanted() == signal.SIGKILL and desk.result()[:2] == (1, "no such file")
    assert not desk.stop(signal.SIGINT)


@pytest.mark.parametrize(
    "flags, facts",
    [
        ("--ray_address=auto", "ray_address ray_min_workers ray_workers"),
        ("--ray_workers=2 --ray_min_workers=3", "ray_min_workers ray_workers=2 3"),
        ("--ray_workers=-1", "ray_workers 1 -1"),
        ("--ray_workers=2 --strategy=mirrored", "strategy auto multi_worker mirrored"),
        ("--ray_workers=2 --ray_min_workers=1", "ray_min_workers train_batch_size"),
        ("--ray_workers=2 --ray_min_workers=1 --train_batch_size=12", "ray_min_workers eval_batch_size"),
        ("--ray_workers=2 --ray_address=here", "ray_address auto local host:port 'here'"),
        ("--ray_workers=2 --ray_address=127.0.0.1:{port}", "ray_address=127.0.0.1:{port}"),
    ],
)
def test_what_cannot_be_is_said_before_anything_starts(monkeypatch, tmp_path, flags, facts):
    port = free_ports(1)[0]
    for tool in program("train.py"):
        monkeypatch.setattr(tool, "main", functools.partial(_train_on_workers, None, tool.rows_to_divide))
        with raises_naming((ValueError, ConnectionError), *facts.format(port=port).split()):
            run_here(tool, f"--model_dir={tmp_path}/run", *flags.format(port=port).split())
    assert not os.listdir(tmp_path)


def test_without_ray_one_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with raises_parameter("ray_address", None):
        connection.ray_package()


# ------------------------------------------------------------------------------------------- programs on a cluster


class Remote:
    """The methods of an actor, as Ray has them."""

    def __init__(self, actor):
        self.actor = actor

    def __getattr__(self, name):
        return types.SimpleNamespace(remote=functools.partial(functools.partial, getattr(self.actor, name)))


@pytest.mark.parametrize("number, error", [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_signal_in_a_call_of_the_desk_loses_no_output(monkeypatch, number, error):
    desk, written, calls = Desk(), [], []
    fit = types.SimpleNamespace(done=threading.Event())
    desk.started(0)
    desk.write(b"before ")

    def get(call):
        found = call()
        calls.append(call.func.__name__)
        if len(calls) == 1:
            signal.raise_signal(number)  # the desk has given its output away
        if calls[-1] == "stop":
            desk.write(b"the end")
            fit.done.set()
        return found

    monkeypatch.setitem(sys.modules, "ray", types.SimpleNamespace(get=get))
    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    ending = _follow(Remote(desk), fit, written.append, TrainingClusterConfig(ray_workers=1), ("1 worker", True))
    assert isinstance(ending, error)
    assert b"".join(written) == b"before the end" and desk.signal == number
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_a_signal_without_a_program_and_a_second_one_end_it(monkeypatch):
    fit = types.SimpleNamespace(done=threading.Event())
    monkeypatch.setitem(sys.modules, "ray", types.SimpleNamespace(get=lambda call: call()))

    def end(*arguments):
        signal.raise_signal(signal.SIGTERM)

    for running in (False, True):
        desk = Desk()
        if running:
            desk.started(0)
            desk.stop = end
        desk.write(b"x")
        with pytest.raises(SystemExit):
            _follow(Remote(desk), fit, end, TrainingClusterConfig(ray_workers=1), ("1 worker", True))


@pytest.fixture(scope="module")
def cluster():
    with raylets(2) as cluster:
        yield cluster


PROGRAM = """
import json, os, pathlib, signal, sys
index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
print("worker", index, sys.argv[1:], os.getcwd(), flush=True)
{}
"""


def on_two_workers(code, restarts=10):
    """What `run_workers` returns, and what the first worker wrote."""
    written = []
    config = TrainingClusterConfig(ray_workers=2, ray_restarts=restarts)
    found = run_workers(["-c", PROGRAM.format(code), "--flag"], config, written.append)
    return *found, b"".join(written).decode()


@pytest.mark.slow
def test_a_worker_that_is_killed_is_replaced_with_all_others(cluster, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    die_once = "try:\n    pathlib.Path(f'died{index}').touch(exist_ok=False)\nexcept FileExistsError: sys.exit()\n"
    status, errors, written = on_two_workers(
        die_once + "if index: os.kill(os.getpid(), signal.SIGKILL)\nelse: signal.pause()"
    )
    assert (status, errors) == (0, "")
    assert written == f"worker 0 ['--flag'] {tmp_path}\n" * 2
    assert mentions(capsys.readouterr().out, 1, 2, "SIGKILL", 10)


@pytest.mark.slow
def test_an_error_of_a_program_is_told_and_not_tried_again(cluster):
    status, errors, written = on_two_workers("if index: sys.exit('no such file')\nelse: signal.pause()")
    assert (status, errors) == (1, "no such file\n") and written.count("worker 0") <= 1


@pytest.mark.slow
@pytest.mark.parametrize("number, error", [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_an_error_after_a_signal_is_told(cluster, number, error):
    """For example, worker 1 cannot save."""
    code = (
        f"signal.signal({number:d}, lambda *_: sys.exit({{}}))\nprint('ready', flush=True)\nwhile True: signal.pause()"
    )

    def signal_when_ready(data):
        if b"ready" in data:
            signal.raise_signal(number)

    config = TrainingClusterConfig(ray_workers=2)
    program = PROGRAM.format(code.format("'the disk is full' if index else None"))
    assert run_workers(["-c", program], config, signal_when_ready) == (1, "the disk is full\n")
    with pytest.raises(error):
        run_workers(["-c", PROGRAM.format(code.format(128 + number))], config, signal_when_ready)


@pytest.mark.slow
def test_too_many_deaths_end_it(cluster):
    with raises_naming(OSError, "ray_restarts=1", 1, 2):
        on_two_workers("os.kill(os.getpid(), signal.SIGKILL) if index else signal.pause()", restarts=1)


@pytest.mark.slow
def test_a_worker_whose_process_of_ray_is_killed_takes_its_program_along(cluster):
    """As Ray does where memory is short."""
    with raises_naming(OSError, "ray_restarts=0", 1, "The actor died"):
        on_two_workers("os.kill(os.getppid(), signal.SIGKILL) if index else signal.pause()", restarts=0)


def test_why_a_worker_is_gone_is_one_line():
    exceptions = pytest.importorskip("ray.exceptions", reason="the extra cluster is not installed")
    from ray.train import WorkerGroupError

    memory = exceptions.OutOfMemoryError("Task was killed due to the node running low on memory.\nMemory on the node")
    error = WorkerGroupError("", {2: ValueError("other"), 1: memory})
    assert _why(error) == "worker 1: Task was killed due to the node running low on memory"


def test_an_error_without_a_message_is_its_class():
    assert _why(RuntimeError()) == "worker 0: RuntimeError"


# ------------------------------------------------------------------------------------------------------- training


def flags_of(folder, text, *more):
    return [*MODEL, f"--data_path={text}", f"--model_dir={folder}", *more]


@contextlib.contextmanager
def driving(cluster, folder, text, *more):
    """A training on the cluster, as a program of its own; nothing of it is left."""
    command = [sys.executable, "train.py", *flags_of(folder, text, f"--ray_address={cluster.address}", *more)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=ROOT, **pipes) as driver:
        try:
            yield driver
        finally:
            driver.kill()
    wait_for(lambda: not workers_of(folder))


def workers_of(folder):
    """Process ids of the programs that train in a folder."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = open(f"/proc/{pid}/cmdline").read().split("\0")
        except OSError:  # it is gone
            continue
        if f"--model_dir={folder}" in words and "--ray_workers=0" in words:
            found.append(int(pid))
    return sorted(found)


def wait_for(test, seconds=240):
    end = time.monotonic() + seconds
    while not test():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.05)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT * 40)
    return path


def of_two_by_hand(folder, text, *more):
    """Two processes that TF_CONFIG names."""
    workers = [f"127.0.0.1:{port}" for port in free_ports(2)]
    threads = []
    for index in range(2):
        config = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}}
        environment = {**os.environ, "TF_CONFIG": json.dumps(config)}
        options = {"args": ("train.py", *flags_of(folder, text, *more)), "kwargs": {"env": environment}}
        threads.append(threading.Thread(target=run_program, **options))
        threads[-1].start()
    for thread in threads:
        thread.join()


def kill_one(driver, folder, checkpoint, worker):
    """Kills a worker once the checkpoint is there and both train, and waits until it is gone."""
    wait_for(lambda: (folder / f"{checkpoint}.index").exists() or driver.poll() is not None)
    wait_for(lambda: len(workers_of(folder)) == 2 or driver.poll() is not None)
    assert driver.poll() is None, driver.communicate()
    before = workers_of(folder)
    os.kill(before[worker], signal.SIGKILL)
    wait_for(lambda: not set(before) & set(workers_of(folder)))


@pytest.mark.slow
def test_workers_killed_twice_end_by_themselves_with_the_weights_of_undisturbed_ones(cluster, tmp_path, text):
    steps = "--train_steps=120", "--save_steps=10", "--dropout=0.1"
    of_two_by_hand(tmp_path / "peace", text, *steps)
    folder = tmp_path / "run"
    with driving(cluster, folder, text, "--ray_workers=2", *steps) as driver:
        kill_one(driver, folder, "ckpt-20", 0)
        kill_one(driver, folder, "ckpt-60", 1)
        output, _ = driver.communicate(timeout=300)
    assert driver.returncode == 0, output
    assert re.findall(r"\b(\d) of 10\b", output) == ["1", "2"], output
    assert final_state(folder, 120) == final_state(tmp_path / "peace", 120)


@pytest.mark.slow
@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_signal_to_the_driver_saves_and_ends_all(cluster, tmp_path, text, number, status):
    flags = "--ray_workers=2", "--train_steps=100000", "--save_steps=100000"
    with driving(cluster, tmp_path / "run", text, *flags) as driver:
        for line in driver.stdout:
            if line.startswith("step "):
                break
        driver.send_signal(number)
        output, _ = driver.communicate(timeout=120)
    assert driver.returncode == status, output
    assert re.search(r"step \d+ .*/ckpt-\d+", output)


@pytest.mark.slow
def test_a_wrong_flag_ends_it_with_the_programs_message(cluster, tmp_path, text):
    with driving(cluster, tmp_path / "run", text, "--ray_workers=2", "--train_batch_size=7") as driver:
        output, _ = driver.communicate(timeout=120)
    assert driver.returncode == 1
    assert mentions(output, "train.py", "train_batch_size", "2", "7")
    assert "Traceback" not in output


@pytest.mark.slow
def test_a_training_goes_on_with_fewer_workers_and_waits_for_room(tmp_path, text):
    """Three of 12 rows, then two; and none, until there is a second node again."""
    with nodes(3) as cluster:
        folder, saving = tmp_path / "run", "--save_steps=5"
        flags = "--ray_workers=3", "--ray_min_workers=2", "--train_steps=5000", saving
        with driving(cluster, folder, text, *flags) as driver:
            wait_for(lambda: (folder / "ckpt-10.index").exists() or driver.poll() is not None)
            assert len(workers_of(folder)) == 3
            cluster.remove_node(next(iter(cluster.worker_nodes)))
            wait_for(lambda: len(workers_of(folder)) == 2 or driver.poll() is not None)
            driver.send_signal(signal.SIGTERM)
            output, _ = driver.communicate(timeout=240)
        assert "1 of 10" in output, output

        flags = "--ray_workers=3", "--train_steps=60", saving
        with driving(cluster, tmp_path / "waits", text, *flags) as driver:
            for line in driver.stdout:
                if "3 CPU" in line:
                    break
            assert mentions(line, "3 workers", "3 CPU", "2 CPU", "0 GPU")
            cluster.add_node(num_cpus=1, object_store_memory=80 * 2**20)
            output, _ = driver.communicate(timeout=300)
        assert driver.returncode == 0, output
