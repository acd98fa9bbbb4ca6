"""A text that a Ray cluster prepares gives the tokens and the vocabulary that one process gives, also if machines die.

That portions of a text give what the whole gives is tested in tests/portions_test.py, without Ray; and that a cluster
prepares what one process does, in tests/cluster_test.py.
"""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from clusters import raylets
from helpers import ROOT, outside_data, raises_naming, raises_parameter, write_text

import txl_tf
from txl_tf.cluster.preparation import ClusterWorkers
from txl_tf.config import ClusterConfig
from txl_tf.data.text import corpus

LINES = "".join(f"line {i} of {i % 7} words\n" for i in range(100_000))  # 2.2 MB


@pytest.fixture(scope="module")
def machines():
    with raylets(3) as cluster:
        yield cluster


def info_of(folder):
    """What is in a prepared folder: `corpus-info.json`, which has checksums of all else."""
    return json.loads((folder / "corpus-info.json").read_text())


def prepare_here(folder, data_path, **options):
    corpus.prepare(folder, "text", data_path, **options)
    return info_of(folder)


def prepare_there(folder, data_path, ray_workers=None, **options):
    with ClusterWorkers(ClusterConfig(ray_workers=ray_workers)) as workers:
        corpus.prepare(folder, "text", data_path, workers=workers, **options)
    return info_of(folder)


def test_texts_without_a_cluster_or_a_place_are_refused(tmp_path):
    for arguments, name, value in (
        ({"texts": ["a"]}, "data_dir", None),
        ({"data_dir": tmp_path}, "texts", None),
        ({"texts": ["a"], "data_path": "a.txt", "data_dir": tmp_path}, "texts", ["a"]),
    ):
        with raises_parameter(name, value):
            txl_tf.prepare(**arguments)
    with raises_naming(OSError, "a.txt"):
        txl_tf.prepare(data_path="a.txt", data_dir=tmp_path, ray="local")
    assert os.listdir(tmp_path) == []


def test_without_ray_it_says_what_to_install(tmp_path, monkeypatch):
    path = write_text(tmp_path / "a.txt", LINES)
    monkeypatch.setitem(sys.modules, "ray", None)
    with raises_parameter("ray_address", None):
        txl_tf.prepare(data_dir=tmp_path / "made", data_path=path, ray=True)
    assert os.listdir(tmp_path / "made") == []


@pytest.mark.slow
def test_ctrl_c_ends_the_program_and_its_cluster_and_leaves_nothing(tmp_path):
    pytest.importorskip("ray", reason="the extra cluster is not installed")
    path, made = write_text(tmp_path / "a.txt", LINES * 30), tmp_path / "made"
    command = [sys.executable, str(ROOT / "tools/prepare_data.py"), "--dataset=text", f"--data_path={path}"]
    command += ["--level=word", f"--data_dir={made}", "--ray_address=local"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as program:
        while program.poll() is None and not (made / "prepare.tmp").is_dir():
            time.sleep(0.1)
        time.sleep(8)  # the cluster starts, or works already
        program.send_signal(signal.SIGINT)
        output, _ = program.communicate(timeout=60)
    assert program.returncode == 130 and not re.search("Traceback|ray", output), output
    assert os.listdir(made) == []


@pytest.mark.slow
def test_errors_are_those_of_one_process_and_leave_nothing(tmp_path, machines):
    bad = write_text(tmp_path / "bad.jsonl", '{"text": "good"}\n' * 150_000 + '{"text": 3}\n')
    with raises_naming(ValueError, "bad.jsonl", 150001, "'text'", 3):
        prepare_there(tmp_path / "made", bad)
    assert os.listdir(tmp_path / "made") == []

    def fails(error, progress, numbered):
        yield 1
        raise error

    with ClusterWorkers(ClusterConfig()) as workers:
        with raises_naming(FileNotFoundError, "no file there"):
            list(workers.each(fails, [(FileNotFoundError("no file there"),)]))
        with raises_naming(OSError, "No module named 'here'"):
            list(workers.each(fails, [(ImportError("No module named 'here'"),)]))
        with pytest.raises(ZeroDivisionError):
            list(workers.each(fails, [(ZeroDivisionError("a mistake"),)]))
    config = ClusterConfig(ray_cpus=64)
    with raises_naming(OSError, "ray_cpus=64", "1"):
        txl_tf.prepare(data_dir=tmp_path / "made", data_path=bad, ray=config)
    assert os.listdir(tmp_path / "made") == []


@pytest.mark.slow
def test_a_data_set_of_ray_gives_what_its_texts_give(tmp_path, machines):
    import ray

    texts = [f"{line}\n" * (i % 4 + 1) for i, line in enumerate(LINES.split("\n")[:2000])]
    txl_tf.prepare(texts, tmp_path / "here", level="word")
    rows = [{"id": i, "body": text} for i, text in enumerate(texts)]
    dataset = ray.data.from_items(rows, override_num_blocks=7).map(lambda row: {**row, "more": 1})
    made = txl_tf.prepare(dataset, tmp_path / "there", ray=True, text_field="body", level="word")
    assert info_of(tmp_path / "there") == info_of(tmp_path / "here") and made.vocab.document == "</s>"
    with raises_parameter("ray", None, "True"):
        txl_tf.prepare(dataset, tmp_path / "nowhere")
    with raises_naming(ValueError, "'text'", "'id'", "'body'", "'more'"):
        txl_tf.prepare(dataset, tmp_path / "nowhere", ray=True)
    for bad, facts in ((["a", ""], [2, "'text'"]), ([], ["text"])):
        dataset = ray.data.from_items([{"text": text} for text in bad])
        with raises_naming(ValueError, *facts):
            txl_tf.prepare(dataset, tmp_path / "nowhere", ray=True)


@pytest.mark.slow
def test_a_worker_that_is_killed_costs_its_portion_alone(tmp_path, machines):
    def numbers(portion, progress, numbered):
        with open(tmp_path / f"{portion}", "a") as begun:
            begun.write("x")
        for i in range(4):
            if (portion, i) == (3, 2) and os.path.getsize(tmp_path / "3") == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            progress(10)
            yield 10 * portion + i

    read = []
    with ClusterWorkers(ClusterConfig(ray_workers=2)) as workers:
        found = list(workers.each(numbers, zip(range(8)), read.append))
    assert found == [10 * portion + i for portion, i in itertools.product(range(8), range(4))]
    assert sum(read) == 8 * 4 * 10
    assert [os.path.getsize(tmp_path / f"{portion}") for portion in range(8)] == [1, 1, 1, 2, 1, 1, 1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"level": "word"}, {"level": "subword", "vocab_size": 2000}], ids=str)
def test_wikitext_on_three_machines_of_which_one_dies(tmp_path, monkeypatch, machines, options):
    wikitext = outside_data("data", "wikitext-2")
    expected = prepare_here(tmp_path / "here", wikitext, **options)
    often = [wikitext / name for name in ("valid.txt", "test.txt")] * 4
    expected_often = prepare_here(tmp_path / "here, often", often, **options)
    for n in (1, 2, 3):
        assert prepare_there(tmp_path / str(n), wikitext, ray_workers=n, **options) == expected
    results, next_result = [], ClusterWorkers._next_result

    def next_result_and_death(*arguments):
        results.append(next_result(*arguments))
        if len(results) == 12:
            machines.remove_node([*machines.worker_nodes][0], allow_graceful=False)
        return results[-1]

    monkeypatch.setattr(ClusterWorkers, "_next_result", next_result_and_death)
    assert prepare_there(tmp_path / "killed", often, **options) == expected_often
    assert len(machines.worker_nodes) == 1 and len(results) > 24
    machines.add_node(num_cpus=1)
