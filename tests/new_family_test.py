"""The families of docs/development.md, a tagger and a language model: they train, resume, open, export, are served."""

import contextlib
import dataclasses
import re
import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    ROOT,
    SMALL,
    assert_variables_equal,
    at_step,
    log_rows,
    made_up,
    mentions,
    raises_parameter,
    read_checkpoint,
    terminate,
    train_run,
    write_text,
)

import txl_tf
from txl_tf.config import Config, ModelConfig
from txl_tf.data.tagged.batches import features
from txl_tf.data.tagged.sentences import encoder_of
from txl_tf.language.session import Session
from txl_tf.runs.callbacks import RunState
from txl_tf.runs.checkpoints import average_checkpoints
from txl_tf.runs.families.record import FAMILIES, family_of, family_of_model
from txl_tf.runs.folder import RunFolder
from txl_tf.runs.weights import weights_by_name

pytestmark = pytest.mark.ci

FAMILY, USE, LM_FAMILY, LM_USE = re.findall(
    r"^```python\n(.*?)^```", (ROOT / "docs" / "development.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
)


# ------------------------------------------------------------------------------------------------------------ a tagger

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
    with raises_parameter("family", "bigru", ["transformer_xl", "transformer_lm"]):
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


# ---------------------------------------------------------------------------------------------------- a language model

LM_IMPORTS, LM_USE = LM_USE.split("\n\n", 1)
LM_TRAIN, LM_OPEN = LM_USE.split("nll = ", 1)
LM_OPEN, LM_EXPORT = f"nll = {LM_OPEN}".split("txl_tf.export_saved_model", 1)
LM_EXPORT = f"txl_tf.export_saved_model{LM_EXPORT}"


@pytest.fixture(scope="module")
def made_lm(tmp_path_factory):
    """The folder in which the code of the page has trained and opened the run, and the names that it defines."""
    folder, names = tmp_path_factory.mktemp("eighth"), {"__name__": "eighth"}
    lines = ["the cat sat on the mat", "a dog ran to the hill", "she said the sun is up"]
    order = np.random.default_rng(0).integers(len(lines), size=285)  # all segments have one length, so one graph
    write_text(folder / "train.txt", "\n".join(lines[i] for i in order))
    with contextlib.chdir(folder):
        for code in (LM_FAMILY, LM_IMPORTS, LM_TRAIN, LM_OPEN):
            exec(code, names)
    yield folder, names
    del FAMILIES["gru"]


def test_a_language_model_takes_70_lines_at_most():
    code = [line for line in LM_FAMILY.splitlines() if line.strip() and not line.startswith(("import", "from"))]
    assert len(code) <= 70


def test_a_language_model_learns_and_evaluates_what_its_folder_holds(made_lm):
    folder, names = made_lm
    rows = log_rows(folder / "runs" / "gru")
    assert [int(row["step"]) for row in rows] == [20, 40, 60]
    assert float(rows[0]["loss"]) > 1.5 * float(rows[-1]["loss"])
    assert RunFolder(folder / "runs" / "gru", "language_model").family is names["GRU"]
    np.testing.assert_allclose(names["nll"]["valid"], float(rows[-1]["val_loss"]), rtol=1e-5)
    assert {name.split("/")[0] for name in weights_by_name(names["lm"])} == {
        "adaptive_embed",
        "adaptive_softmax",
        "gru",
    }


def test_the_memory_is_a_hidden_state_that_every_method_carries_on(made_lm):
    lm = made_lm[1]["lm"]
    tokens = np.random.default_rng(1).integers(lm.network.n_token, size=(2, 13))
    nll, mems = lm.score(tokens[:, :12], tokens[:, 1:])
    assert [tuple(mem.shape) for mem in mems] == [(2, 1, 32)]
    first, mems = lm.score(tokens[:, :5], tokens[:, 1:6])
    rest, _ = lm.score(tokens[:, 5:12], tokens[:, 6:], mems)
    np.testing.assert_allclose(np.concatenate([first, rest], 1), nll, rtol=1e-4, atol=1e-6)
    written = lm.generate(tokens[:, :12], 3, temperature=0, lengths=[12, 7])
    for row, n in enumerate((12, 7)):
        for i in range(3):
            log_probs, _ = lm.log_probs(written[row : row + 1, : n + i])
            assert written[row, n + i] == np.argmax(log_probs[0, -1])
    session = Session(lm)
    session.read(tokens[:1, :12])
    np.testing.assert_array_equal(session.write(3, temperature=0)[0], written[:1, 12:])
    state = lm.decoding_cache().initial_state(2)
    assert not lm.has_cache and [tuple(part.shape) for part in state] == [(2, 1, 32)]


@pytest.mark.slow
def test_a_language_model_resumes_bit_for_bit(made_lm, tmp_path):
    folder, names = made_lm
    whole = read_checkpoint(folder / "runs" / "gru" / "ckpt-60")
    shutil.copytree(folder / "runs", tmp_path / "runs")
    for path in (tmp_path / "runs" / "gru").glob("ckpt-60*"):
        path.unlink()
    with contextlib.chdir(folder):
        exec(LM_TRAIN.replace("runs/gru", f"{tmp_path}/runs/gru"), names)
    assert_variables_equal(read_checkpoint(tmp_path / "runs" / "gru" / "ckpt-60"), whole)


@pytest.mark.slow
def test_a_language_model_is_saved_and_served(made_lm, tmp_path):
    folder, names = made_lm
    lm, vocab = names["lm"], names["vocab"]
    with contextlib.chdir(folder):
        exec(LM_EXPORT, names)
    text = "the cat sat"
    tokens = vocab.encode(text)[None]
    nll, _ = lm.score(tokens[:, :-1], tokens[:, 1:])
    lm.save(tmp_path / "lm.keras")
    again, _ = keras.saving.load_model(tmp_path / "lm.keras").score(tokens[:, :-1], tokens[:, 1:])
    np.testing.assert_allclose(again, nll, rtol=1e-6)
    served = tf.saved_model.load(folder / "serving" / "gru" / "1").signatures
    found = served["score_text"](text=tf.constant([text]))["nll"]
    np.testing.assert_allclose(found[:, 1:], nll, rtol=1e-5)
    state = served["initial_state"](batch_size=tf.constant(1))["state"]
    found = served["score"](tokens=tf.constant(tokens[:, :4]), labels=tf.constant(tokens[:, 1:5]), state=state)
    rest = served["score"](tokens=tf.constant(tokens[:, 4:-1]), labels=tf.constant(tokens[:, 5:]), state=found["state"])
    np.testing.assert_allclose(np.concatenate([found["nll"], rest["nll"]], 1), nll, rtol=1e-5)


# ---------------------------------------------------------------------------------------------- metrics of one's own


class Measured(txl_tf.TransformerXLLM):
    """Reports the loss as a metric of Keras, and in bits as a log of its steps."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.mean = keras.metrics.Mean("mean")

    def train_step(self, data):
        return self.measured(super().train_step(data))

    def test_step(self, data):
        return self.measured(super().test_step(data))

    def measured(self, logs):
        self.mean.update_state(logs["loss"])
        return {**logs, "bits": logs["loss"] / np.log(2)}


@pytest.mark.parametrize("step", [3, pytest.param(5, marks=pytest.mark.slow)])  # 5: also the end of the interval
def test_a_run_with_metrics_of_one_s_own_resumes_in_the_middle_of_an_interval(run_dir, text_file, monkeypatch, step):
    family = dataclasses.replace(FAMILIES["transformer_xl"], model=Measured, make=Measured)
    monkeypatch.setitem(FAMILIES, "transformer_xl", family)
    training = {"iterations": 6}
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        at_step(patch, RunState, "on_train_batch_end", step, terminate)
        train_run(run_dir, text_file, training=training)
    train_run(run_dir, text_file, training=training)
    rows = [{name: float(value) for name, value in row.items()} for row in log_rows(run_dir)]
    assert [row["step"] for row in rows] == [6, 12]
    for row in rows:
        for prefix, tolerance in (("", 1e-6), ("val_", 1e-3)):  # the last segment of a validation is shorter
            assert row[f"{prefix}bits"] == pytest.approx(row[f"{prefix}bpc"], rel=tolerance)
            assert row[f"{prefix}mean"] == pytest.approx(row[f"{prefix}loss"], rel=tolerance)


# ---------------------------------------------------------------------------------------------- how a family is found


class OwnLM(txl_tf.TransformerXLLM):
    """A user's language model."""


class OwnConfig(ModelConfig):
    """A user's hyper-parameters."""


class OwnTener(txl_tf.Tener):
    """A user's network."""


def test_a_subclass_belongs_to_the_family_of_its_base():
    assert family_of_model(OwnLM(**SMALL, mem_len=2)).name == "transformer_xl"
    assert family_of(OwnConfig).name == "transformer_xl"
    network = OwnTener(n_token=9, n_layer=1, d_model=8, n_head=2, d_inner=8)
    assert family_of_model(txl_tf.Tagger(network, ["O", "B-X", "I-X"])).name == "tener"


def test_a_model_of_no_family_is_refused_by_name(tmp_path):
    model = keras.Sequential(name="mine")
    known = ["Transformer", "TransformerXLLM", "TransformerLM", "Tagger"]
    with raises_parameter("model", "Sequential") as raised:
        txl_tf.export_saved_model(model, tmp_path / "export")
    assert raised.value.allowed[:4] == known
    with raises_parameter("model", "Config"):
        family_of(Config)
    tagger = txl_tf.Tagger(keras.layers.Embedding(9, 8), ["O", "B-X", "I-X"])
    with raises_parameter("network", "Embedding") as raised:
        family_of_model(tagger)
    assert raised.value.allowed[:3] == ["Tener", "Flat", "BiLSTM"]
    assert mentions(str(raised.value), "Embedding", "Tener", "Flat")
