"""Many files answered into many: by one process, and by the workers of a Ray cluster."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from clusters import children, raylets
from helpers import (
    ROOT,
    make_run,
    mentions,
    program,
    raises_naming,
    raises_parameter,
    randomise,
    run_here,
    word_vocab,
    write_text,
)
from small_runs import make_encoder_decoder, make_tagger

from txl_programs.answering import files as answering_files
from txl_tf.cluster.blocks import answer_on_cluster
from txl_tf.config import ClusterConfig
from txl_tf.data.line_files import LineFile, Plan
from txl_tf.runs.folder import RunFolder

WORDS = [f"w{i}" for i in range(21)]
BAD = b"\xff"  # a line without an answer


def make_language_model(folder):
    make_run(folder, word_vocab(), n_layer=1)


# Of each program: what makes its run, the symbols of a line and what joins them, flags.
CASES = {
    "score": (make_language_model, WORDS, " ", ["--format=json"]),
    "generate": (make_language_model, WORDS, " ", ["--seed=3", "--max_new_tokens=2", "--batch_size=2"]),
    "translate": (make_encoder_decoder, "abc", "", ["--max_new_tokens=5", "--scores", "--batch_size=2"]),
    "tag": (make_tagger, "abc", "", ["--batch_size=2"]),
}


class Case:
    """A program with a run and files of lines.

    Attributes:
        tool: its module.
        flags: of every call.
        input, output: folders.
    """

    def __init__(self, name, tool, folder):
        make, self.symbols, self.joint, flags = CASES[name]
        self.name, self.tool, self.input, self.output = name, tool, folder / "in", folder / "out"
        make(folder / "run")
        self.flags = [f"--model_dir={folder / 'run'}", *flags]

    def write(self, **sizes):
        """Writes files of so many random lines, the last but one of each without an answer; removes the others."""
        rng = np.random.default_rng(0)
        for path in self.input.rglob("*.txt"):
            path.unlink()
        for name, size in sizes.items():
            lines = [self.joint.join(rng.choice([*self.symbols], rng.integers(1, 7))).encode() for _ in range(size)]
            path = self.input / f"{name.replace('__', '/')}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"\n".join([*lines[:-2], BAD, *lines[-1:]]) + b"\n")

    def run(self, *flags, output=None):
        return run_here(self.tool, *self.flags, f"--input={self.input}", f"--output={output or self.output}", *flags)

    def answers(self, output=None):
        """`{name: bytes}` of all output files."""
        output = output or self.output
        paths = [path for path in output.rglob("*") if path.is_file() and ".answers" not in path.parts]
        return {str(path.relative_to(output)): path.read_bytes() for path in paths}


def case_of(name, tmp_path_factory):
    for tool in program(f"tools/{name}.py"):
        yield Case(name, tool, tmp_path_factory.mktemp(name))


@pytest.fixture(
    scope="module",
    params=["score", *(pytest.param(name, marks=pytest.mark.slow) for name in ("tag", "translate", "generate"))],
)
def case(request, tmp_path_factory):
    yield from case_of(request.param, tmp_path_factory)


@pytest.fixture(scope="module")
def scoring(tmp_path_factory):
    yield from case_of("score", tmp_path_factory)


@pytest.fixture
def small_blocks(monkeypatch):
    """Has a tool cut files into blocks of a few lines."""
    return lambda tool: monkeypatch.setattr(tool, "TOGETHER" if hasattr(tool, "TOGETHER") else "POOL", 3)


def assert_alike(name, found, expected):
    """Bytes that a program has written; scores up to rounding, as lines are in other batches."""
    if name != "score":
        assert found == expected
        return
    for row, other in zip(found.splitlines(), expected.splitlines(), strict=True):
        row, other = json.loads(row), json.loads(other)
        numbers = [[values.pop(key, 0) for key in ("nll", "ppl", "bpb")] for values in (row, other)]
        assert row == other
        np.testing.assert_allclose(*numbers, rtol=1e-5, atol=2e-6)


def test_many_files_are_answered_as_each_alone(case, small_blocks, eager, tmp_path, capsys):
    case.write(b=9, a__c=4, a=5)
    alone, messages = {}, []
    for name in ("a.txt", "a/c.txt", "b.txt"):  # the order of their names
        arguments = [f"--input={case.input / name}", f"--output={tmp_path / 'alone'}"]
        assert run_here(case.tool, *case.flags, *arguments) == 1
        alone[name] = (tmp_path / "alone").read_bytes()
        messages += re.findall(r".*\.txt, line .*\n", capsys.readouterr().err)
    small_blocks(case.tool)
    assert case.run(output=tmp_path / "out") == 1
    found, said = case.answers(tmp_path / "out"), capsys.readouterr().err
    assert found.keys() == alone.keys()
    for name, expected in alone.items():
        assert_alike(case.name, found[name], expected)
    assert re.findall(r".*\.txt, line .*\n", said) == messages and len(messages) == 3
    assert mentions(said, 3, "--strict") and said.count("checkpoint: ") == 1


def test_sums_of_many_files_are_those_of_one(scoring, small_blocks, tmp_path, capsys):
    scoring.write(a=11, b=7)
    both = write_text(tmp_path / "both", b"".join((scoring.input / f"{x}.txt").read_bytes() for x in "ab"))
    run_here(scoring.tool, *scoring.flags, f"--input={both}")
    whole = re.search(r"16 lines, .* bits per byte", capsys.readouterr().err)[0]
    small_blocks(scoring.tool)
    scoring.run(output=tmp_path / "out")
    assert f"{whole} | " in capsys.readouterr().err
    scoring.run(output=tmp_path / "out")
    said = capsys.readouterr().err
    assert mentions(said, 18) and mentions(said, 2, "--strict") and said.endswith(f"\n{whole}\n")
    with raises_parameter("strict"):
        scoring.run("--strict", output=tmp_path / "out")


@pytest.mark.slow
def test_a_file_is_one_text_where_memory_is_carried(scoring, tmp_path):
    scoring.write(a=9, b=6)
    scoring.run("--carry_memory", "--segment=4", output=tmp_path / "out")
    for name, found in scoring.answers(tmp_path / "out").items():
        run_here(
            scoring.tool,
            *scoring.flags,
            "--carry_memory",
            "--segment=4",
            f"--input={scoring.input / name}",
            f"--output={tmp_path / 'one'}",
        )
        assert found == (tmp_path / "one").read_bytes()


# ------------------------------------------------------------------------------------------------------------ resuming


@pytest.fixture
def counted(monkeypatch):
    """The blocks that are answered, each as `(file, first line)`; `counted.most` are answered before an error."""

    class Counted(list):
        most = 10**9

    plain, found = answering_files.answer_block, Counted()

    def answer_block(answering, block):
        if len(found) == found.most:
            raise OSError("killed")
        plain(answering, block)
        found.append((os.path.basename(block.path), block.first))

    monkeypatch.setattr(answering_files, "answer_block", answer_block)
    return found


@pytest.mark.slow
def test_what_is_done_is_not_done_again_and_not_mixed_with_other_answers(
    scoring, small_blocks, counted, tmp_path, capsys
):
    small_blocks(scoring.tool)
    scoring.write(a=8, b=5)
    blocks = [("a.txt", 1), ("a.txt", 4), ("a.txt", 7), ("b.txt", 1), ("b.txt", 4)]
    expected = tmp_path / "expected"
    scoring.run(output=expected)
    assert counted == blocks

    def run(*flags):
        counted.clear()
        scoring.run(*flags)
        return list(counted)

    counted.most = 4
    with pytest.raises(OSError, match="killed"):
        run()
    assert scoring.answers().keys() == {"a.txt"}  # and no half of b
    counted.most = 10**9
    capsys.readouterr()
    assert run() == blocks[4:] and mentions(capsys.readouterr().err, 11)
    assert scoring.answers() == scoring.answers(expected) and run() == []
    assert {path.name for path in (scoring.output / ".answers").rglob("*")} == {"a.txt", "b.txt", "done.json"}

    counted.most = 2
    with pytest.raises(OSError, match="killed"):
        run("--start=w1")  # other answers
    counted.most = 10**9
    assert run() == [] and scoring.answers() == scoring.answers(expected)  # the output files are still these
    assert run("--start=w1") == blocks[2:] and scoring.answers() != scoring.answers(expected)
    assert run() == blocks and scoring.answers() == scoring.answers(expected)
    (scoring.output / "a.txt").unlink()
    assert run() == blocks[:3]
    (scoring.output / "b.txt").write_text("spoilt")
    assert run() == blocks[3:]
    with open(scoring.input / "b.txt", "ab") as file:
        file.write(b"w1\n")
    assert run() == blocks[3:]
    scoring.run(output=tmp_path / "anew")
    assert scoring.answers() == scoring.answers(tmp_path / "anew")
    *others, last = scoring.answers()["b.txt"].splitlines(keepends=True)
    assert json.loads(last)["text"] == "w1"
    assert_alike("score", b"".join(others), scoring.answers(expected)["b.txt"])  # its batch is larger


@pytest.mark.slow
def test_another_checkpoint_answers_anew(counted, tmp_path):
    for tool in program("tools/tag.py"):
        tagging = Case("tag", tool, tmp_path)
        tagging.write(a=4)
        tagging.run()
        tagging.run()
        assert len(counted) == 1
        folder = RunFolder(tmp_path / "run")
        model = folder.load_model()
        randomise(model, seed=5)
        folder.save_weights(model, 2)
        tagging.run("--ckpt_path=ckpt-1")
        assert len(counted) == 1
        tagging.run()
        assert len(counted) == 2


def test_two_programs_do_not_write_to_one_folder(scoring, tmp_path):
    scoring.write(a=3)
    tmp_path.joinpath("out").mkdir()
    with (
        answering_files.lock(str(tmp_path / "out"), ""),
        raises_naming(OSError, tmp_path / "out"),
    ):
        scoring.run(output=tmp_path / "out")


def test_strict_stops_at_the_first_line_in_order_and_keeps_the_parts(scoring, small_blocks, counted, tmp_path):
    small_blocks(scoring.tool)
    scoring.write(a=8, b=5)
    with raises_naming(ValueError, "in/a.txt", 7, 0):
        scoring.run("--strict", output=tmp_path)
    assert len(counted) == 3 and not scoring.answers(tmp_path)
    assert scoring.run(output=tmp_path) == 1 and len(counted) == 5


# --------------------------------------------------------------------------------------------------------------- files


def write_some(folder):
    for name in ("a.txt", "b.txt", "empty.txt", "sub/a.txt"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("" if name == "empty.txt" else "w1\n")
    (folder / "link").symlink_to(folder)


@pytest.mark.parametrize(
    "inputs, flags, name, allowed",
    [
        ("a.txt,b.txt", [], "output", "a folder"),
        ("a.txt,b.txt", ["--output={tmp}/a.txt"], "output", "a folder"),
        ("*.txt", ["--output={tmp}"], "output", "a folder without files of --input"),
        ("a.txt,b.txt", ["--output={tmp}/link"], "output", "a folder without files of --input"),
        (".", ["--output={tmp}/out"], "output", "a folder outside of {tmp}"),
        ("sub/*", ["--output={tmp}/sub/out"], "output", "a folder outside of {tmp}/sub/*"),
        ("*/*", ["--output={tmp}/out"], "output", "a folder outside of {tmp}/*/*"),
        ("a.txt,sub/a.txt", ["--output={tmp}/out"], "input", "files of different names"),
        ("sub,a.txt,a.txt", ["--output={tmp}/out"], "input", "files of different names"),
        ("-", ["--ray_address=auto"], "input", "files, folders or patterns"),
        ("a.txt", ["--ray_workers=2"], "output", "a folder"),
        ("a.txt", ["--ray_workers=0"], "ray_workers", "at least 1"),
    ],
    ids=str,
)
def test_a_bad_flag_is_an_error_and_nothing_is_answered(scoring, counted, tmp_path, inputs, flags, name, allowed):
    write_some(tmp_path)
    paths = ",".join(path if path == "-" else str(tmp_path / path) for path in inputs.split(","))
    with raises_parameter(name, allowed=allowed.format(tmp=tmp_path)):
        run_here(scoring.tool, *scoring.flags, f"--input={paths}", *(flag.format(tmp=tmp_path) for flag in flags))
    assert not counted


@pytest.mark.parametrize("inputs, output", [("a.txt", "config.json"), ("a.txt,b.txt", ""), ("a.txt,b.txt", "best")])
def test_answers_are_not_written_over_the_run(scoring, counted, tmp_path, inputs, output):
    write_some(tmp_path)
    run = scoring.input.parent / "run"
    before = (run / "config.json").read_bytes()
    paths = ",".join(str(tmp_path / path) for path in inputs.split(","))
    with raises_parameter("output", f"{run}/{output}", "a path that is no part of a run"):
        run_here(scoring.tool, *scoring.flags, f"--input={paths}", f"--output={run}/{output}")
    assert not counted and (run / "config.json").read_bytes() == before


@pytest.mark.parametrize(
    "inputs, flags, named",
    [
        ("a.txt,nowhere.txt", ["--output={tmp}/out"], "nowhere.txt"),
        ("a.txt,empty.txt", ["--output={tmp}/out"], "empty.txt"),
        ("*.jsonl", ["--output={tmp}/out"], "*.jsonl"),
        ("a.txt,b.txt", ["--output={tmp}/a.txt/out"], "a.txt/out"),
        ("a.txt,b.txt", ["--output={tmp}/out", "--model_dir=nowhere"], "nowhere"),
    ],
    ids=str,
)
def test_bad_files_are_one_clear_error_and_nothing_is_answered(scoring, counted, tmp_path, inputs, flags, named):
    write_some(tmp_path)
    paths = ",".join(path if path == "-" else str(tmp_path / path) for path in inputs.split(","))
    with raises_naming((ValueError, OSError), named):
        run_here(scoring.tool, *scoring.flags, f"--input={paths}", *(flag.format(tmp=tmp_path) for flag in flags))
    assert not counted


def test_a_single_file_may_have_any_name(scoring, tmp_path):
    for name in ("a,b.txt", "c[1]*.txt"):
        run_here(
            scoring.tool, *scoring.flags, f"--input={write_text(tmp_path / name, 'w1')}", f"--output={tmp_path}/out"
        )
        assert json.loads((tmp_path / "out").read_text())["text"] == "w1"


def test_remote_files_are_answered_as_local_ones(scoring, tmp_path):
    """`file://` goes the way of gs:// and of other remote paths."""
    scoring.write(a=4, sub__b=3)
    scoring.run(output=tmp_path / "out")
    run_here(scoring.tool, *scoring.flags, f"--input=file://{scoring.input}", f"--output=file://{tmp_path}/remote")
    assert scoring.answers(tmp_path / "out") == scoring.answers(tmp_path / "remote")


# ---------------------------------------------------------------------------------------------------------------- Ray


def test_without_ray_its_flags_say_what_to_install(case, monkeypatch, tmp_path):
    case.write(a=3)
    monkeypatch.setitem(sys.modules, "ray", None)
    with raises_parameter("ray_address", None):
        case.run("--ray_workers=1", output=tmp_path / "out")


CASES_OF_ONE_MACHINE = [
    ("tag", ["--tagged=a"]),
    ("translate", ["--pairs=a"]),
    ("generate", ["--prompt=a"]),
    ("generate", ["--interactive"]),
]


@pytest.mark.parametrize("name, flags", CASES_OF_ONE_MACHINE)
def test_what_does_not_go_with_a_cluster_is_said(name, flags, tmp_path_factory):
    for case in case_of(name, tmp_path_factory):
        with raises_parameter("ray_address", "auto"):
            run_here(case.tool, case.flags[0], "--ray_address=auto", *flags)


@pytest.fixture(scope="module")
def cluster():
    with raylets(3) as found:
        yield found


@pytest.mark.slow
def test_workers_of_a_cluster_answer_as_this_process(scoring, cluster, small_blocks, tmp_path, capsys):
    small_blocks(scoring.tool)
    scoring.write(a=8, b=4)
    capsys.readouterr()
    assert scoring.run("--ray_workers=1", output=tmp_path / "there") == 1
    said = capsys.readouterr().err
    assert scoring.run(output=tmp_path / "here") == 1
    without_rate = re.compile(r" \| .*tokens/s")
    assert without_rate.sub("", said) == without_rate.sub("", capsys.readouterr().err)
    there, here = scoring.answers(tmp_path / "there"), scoring.answers(tmp_path / "here")
    for name in ("a.txt", "b.txt"):
        assert_alike("score", there[name], here[name])


@pytest.mark.slow
def test_scores_of_5000_lines_on_three_machines_are_those_of_one(scoring, cluster, monkeypatch, tmp_path):
    scoring.write(a=2500, b=1300, c=1200)
    scoring.run(output=tmp_path / "here")
    monkeypatch.setattr(scoring.tool, "TOGETHER", 300)
    scoring.run("--ray_workers=3", output=tmp_path / "there")
    here, there = scoring.answers(tmp_path / "here"), scoring.answers(tmp_path / "there")
    for name in ("a.txt", "b.txt", "c.txt"):
        assert_alike("score", there[name], here[name])


@pytest.mark.slow
def test_every_program_answers_on_a_cluster(case, cluster, small_blocks, tmp_path):
    small_blocks(case.tool)
    case.write(a=14, b__c=5)
    case.run(output=tmp_path / "here")
    case.run("--ray_workers=2", output=tmp_path / "there")
    there, here = case.answers(tmp_path / "there"), case.answers(tmp_path / "here")
    for name in ("a.txt", "b/c.txt"):
        assert_alike(case.name, there[name], here[name])


def started(case, cluster, *flags):
    """The program in a process of its own, that has answered some of its blocks."""
    flags = [
        *case.flags,
        f"--input={case.input}",
        f"--output={case.output}",
        f"--ray_address={cluster.address}",
        *flags,
    ]
    command = [sys.executable, str(ROOT / "tools" / f"{case.name}.py"), *flags]
    pipes, environment = (
        dict.fromkeys(["stdout", "stderr"], subprocess.PIPE),
        {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    process = subprocess.Popen(command, text=True, env=environment, **pipes)
    late = time.monotonic() + 120
    while len([*case.output.rglob("0*.json")]) < 2:
        assert process.poll() is None and time.monotonic() < late, process.communicate()
        time.sleep(0.05)
    return process


@pytest.fixture
def writing(tmp_path_factory, tmp_path):
    """A program that takes long for a block, in a folder of its own, and its answers on one machine."""
    for case in case_of("generate", tmp_path_factory):
        case.flags.append("--max_new_tokens=200")
        case.write(a=150, b=90)
        case.run(output=tmp_path / "here")
        yield case, case.answers(tmp_path / "here")


@pytest.mark.slow
def test_a_worker_that_is_killed_costs_its_block_alone(writing, cluster):
    case, expected = writing
    process = started(case, cluster)
    workers = [pid for pid, name in children().items() if "MapWorker" in name]
    os.kill(workers[0], signal.SIGKILL)
    _, said = process.communicate(timeout=200)
    assert process.returncode == 1 and len(workers) == 3, said
    assert case.answers() == expected and mentions(said, 2, "--strict") and "ray" not in said.lower()


@pytest.mark.slow
def test_a_program_that_is_killed_goes_on_where_it_was(writing, cluster):
    case, expected = writing
    process = started(case, cluster, "--ray_workers=2")
    process.kill()
    process.communicate()
    assert not {*case.answers()} - {"a.txt"}
    done = len([*case.output.rglob("0*.json")])
    process = started(case, cluster, "--ray_workers=2")
    _, said = process.communicate(timeout=200)
    assert case.answers() == expected
    before = int(re.search(r"lines answered before: (\d+)", said)[1])
    assert done * 16 - 16 <= before < 240  # blocks of 16 lines, the last of a file are fewer


@pytest.mark.slow
def test_ctrl_c_ends_it_within_seconds_and_keeps_what_is_done(writing, cluster):
    case, _ = writing
    process = started(case, cluster, "--ray_workers=2")
    pressed = time.monotonic()
    process.send_signal(signal.SIGINT)
    out, said = process.communicate(timeout=60)
    assert process.returncode == 130 and time.monotonic() - pressed < 15
    assert not out and re.fullmatch(r"checkpoint: .*\n(.*a.txt, line 149 .*\n)?", said)
    assert len([*case.output.rglob("0*.json")]) >= 2


@pytest.mark.parametrize("flag", ["ray_cpus", "ray_gpus"])
def test_flags_of_a_worker_are_refused_without_a_cluster(scoring, flag):
    scoring.write(a=5)
    with raises_parameter(flag):
        scoring.run(f"--{flag}=1")


@pytest.mark.slow
def test_what_is_wrong_on_a_cluster_is_one_sentence(scoring, cluster, tmp_path):
    scoring.write(a=5)
    with raises_naming(ValueError, "ray_cpus=1", "ray_gpus=1", 3):
        scoring.run("--ray_address=auto", "--ray_gpus=1")
    with raises_naming(ValueError, "ray_cpus=2"):
        scoring.run("--ray_cpus=2", "--ray_workers=1")
    make_language_model(tmp_path / "run")
    (weights,) = (tmp_path / "run").glob("*.data-*")
    weights.write_bytes(bytes(weights.stat().st_size))
    with pytest.raises((ValueError, OSError), match="ckpt-1") as found:
        scoring.run("--ray_workers=1", f"--model_dir={tmp_path / 'run'}")
    assert "ray" not in str(found.value).lower()


@pytest.mark.slow
def test_a_block_that_workers_die_of_ends_the_program(cluster, tmp_path):
    source = write_text(tmp_path / "in.txt", "a\nb\n")

    def make():
        os.kill(os.getpid(), signal.SIGKILL)

    plan = Plan([LineFile(source, "in.txt", str(tmp_path / "out"), None)], 2)
    with raises_naming(ValueError, "in.txt", 1, 2, 3):
        list(plan.answer(lambda blocks: answer_on_cluster(blocks, make, ClusterConfig(ray_workers=1))))
