"""What a Ray cluster does, one short test of each kind; `ray_*_test.py` and `bulk_test.py` have the others.

They take half a minute, but 2 GB beside those of the fast suite, which has 3 GB.
"""

import json
import os

import numpy as np
import pytest
from clusters import raylets
from helpers import make_run, program, run_here, word_vocab, write_text

import txl_tf
from txl_tf.cluster.training import run_workers
from txl_tf.config import TrainingClusterConfig

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def cluster():
    with raylets(2):
        yield


def test_a_cluster_prepares_what_one_process_prepares(tmp_path):
    """The same tokens and vocabulary by their checksums, in several files a split."""
    path = write_text(tmp_path / "a.txt", "".join(f"line {i} of {i % 7} words\n" for i in range(100_000)))
    for folder, ray in (("here", None), ("there", True)):
        options = {"level": "word", "shard_tokens": 200_000, "ray": ray}
        txl_tf.prepare(data_dir=tmp_path / folder, data_path=path, **options)
    here, there = (json.loads((tmp_path / name / "corpus-info.json").read_text()) for name in ("here", "there"))
    assert there == here and here["files"]["train"] == ["train-000.npy", "train-001.npy", "train-002.npy"]


def test_a_worker_answers_as_this_process(tmp_path, monkeypatch):
    make_run(tmp_path / "run", word_vocab(), n_layer=1)
    files, rng = {"a.txt": 8, "b/c.txt": 4}, np.random.default_rng(0)
    for name, lines in files.items():
        text = "".join(
            " ".join(f"w{i}" for i in rng.integers(21, size=rng.integers(1, 7))) + "\n" for _ in range(lines)
        )
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text(text)
    for tool in program("tools/score.py"):
        monkeypatch.setattr(tool, "TOGETHER", 3)  # lines of a block
        flags = [f"--model_dir={tmp_path / 'run'}", f"--input={tmp_path / 'in'}", "--columns=nll,tokens,text"]
        assert run_here(tool, *flags, f"--output={tmp_path / 'there'}", "--ray_workers=1") == 0
        assert run_here(tool, *flags, f"--output={tmp_path / 'here'}") == 0
    for name, lines in files.items():
        rows = [[line.split("\t") for line in (tmp_path / where / name).open()] for where in ("there", "here")]
        assert len(rows[1]) == lines and [row[1:] for row in rows[0]] == [row[1:] for row in rows[1]]
        nll = [[float(row[0]) for row in some] for some in rows]
        np.testing.assert_allclose(*nll, rtol=1e-5, atol=2e-6)


def test_workers_run_the_command_and_what_the_first_one_writes_comes_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = "import json, os, sys; print(json.loads(os.environ['TF_CONFIG'])['task'], sys.argv, os.getcwd())"
    written = []
    assert run_workers(["-c", code, "--flag"], TrainingClusterConfig(ray_workers=2), written.append) == (0, "")
    assert b"".join(written).decode() == f"{{'type': 'worker', 'index': 0}} ['-c', '--flag'] {os.getcwd()}\n"
