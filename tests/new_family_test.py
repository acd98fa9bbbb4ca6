"""The walk-through of docs/development.md: a seventh family trains, resumes, opens, averages, exports and is served."""

import contextlib
import re
import shutil

import numpy as np
import pytest
import tensorflow as tf
from helpers import ROOT, assert_variables_equal, log_rows, made_up, read_checkpoint, write_text

import txl_tf
from txl_tf.data.tagged.batches import features
from txl_tf.data.tagged.sentences import encoder_of
from txl_tf.runs.checkpoints import average_checkpoints
from txl_tf.runs.families.record import FAMILIES
from txl_tf.runs.folder import RunFolder

FAMILY, USE = re.findall(
    r"^```python\n(.*?)^```", (ROOT / "docs" / "development.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
)


TRAIN, EXPORT = USE.split("\n\n", 1)[1].split("tagger, vocabs", 1)
EXPORT = f"tagger, vocabs{EXPORT}"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder in which the code of the page has trained, and the names that it defines."""
    folder, names = tmp_path_factory.mktemp("seventh"), {"__name__": "seventh"}
    for name, n in (("train.txt", 120), ("dev.txt", 30)):
        write_text(folder / name, made_up(n, n))
    with contextlib.chdir(folder):
        for code in (FAMILY, USE.split("\n\n", 1)[0], TRAIN):
            exec(code, names)
    yield folder, names
    del FAMILIES["bigru"]


def test_a_family_takes_60_lines_at_most():
    code = [line for line in FAMILY.splitlines() if line.strip() and not line.startswith(("import", "from"))]
    assert len(code) <= 60


def test_it_learns_and_its_folder_says_what_it_is(made):
    folder, names = made
    rows = log_rows(folder / "runs" / "bigru")
    assert [int(row["step"]) for row in rows] == [20, 40, 60]
    assert float(rows[0]["loss"]) > 2 * float(rows[-1]["loss"]) and float(rows[1]["val_f1"]) > 0.3
    run = RunFolder(folder / "runs" / "bigru", "tagger")
    assert run.family is names["BIGRU"] and run.read_config()["family"] == "bigru"
    with pytest.raises(ValueError, match="family must be .*, got 'bigru': it is a tagger with GRUs"):
        RunFolder(run, "language_model").read_config()


@pytest.mark.slow
def test_it_resumes_bit_for_bit(made, tmp_path):
    folder, names = made
    whole = read_checkpoint(folder / "runs" / "bigru" / "ckpt-60")
    shutil.copytree(folder / "runs", tmp_path / "runs")
    for path in (tmp_path / "runs" / "bigru").glob("ckpt-60*"):  # step 30 is in the middle of a window of twenty
        path.unlink()
    with contextlib.chdir(folder):
        exec(TRAIN.replace("runs/bigru", f"{tmp_path}/runs/bigru"), names)
    resumed = read_checkpoint(tmp_path / "runs" / "bigru" / "ckpt-60")
    assert any("both/forward_gru" in name for name in whole)
    assert_variables_equal(resumed, whole)


@pytest.mark.slow
def test_it_opens_averages_and_is_served(made, tmp_path):
    folder, names = made
    with contextlib.chdir(folder):
        exec(EXPORT, names)
    average_checkpoints(folder / "runs" / "bigru", tmp_path / "average", num_last_checkpoints=2)
    assert isinstance(txl_tf.load_run(tmp_path / "average")[0].network, names["BiGRU"])
    text = "我在南京了他叫北京了"
    inputs = features([encoder_of(*names["vocabs"]).encode(text)], lattice=False)
    expected = {name: array.numpy()[0] for name, array in names["tagger"].entities(inputs).items()}
    served = tf.saved_model.load(folder / "serving" / "bigru" / "1").signatures["tag_text"](text=tf.constant([text]))
    ends = np.flatnonzero(expected["ends"])
    assert served["ends"].numpy()[0].tolist() == [i + 1 for i in ends] and len(ends)
    assert served["starts"].numpy()[0].tolist() == expected["starts"][ends].tolist()
    np.testing.assert_allclose(served["probs"].numpy()[0], expected["probs"][ends], rtol=1e-5)
