"""The examples of models of one's own: each is trained, saved, exported, and loaded where there is no txl_tf.

And examples/classify.py with labelled rows; keras_reuse_test.py has its passages.
"""

import json
import re
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl import flags
from helpers import SMALL, mentions, program, raises_naming, raises_parameter

import txl_tf
from txl_tf.data.vocabulary import Vocab
from txl_tf.language.transformer_lm import TransformerLM
from txl_tf.runs.folder import RunFolder

# Opens a SavedModel as a server does, and writes what it answers.
CLIENT = """
import sys
import numpy as np, tensorflow as tf
sys.modules["txl_tf"] = None
inputs = np.load(sys.argv[2])
model = tf.saved_model.load(sys.argv[1])
answer = model.signatures["serving_default"](**{name: tf.constant(inputs[name]) for name in inputs})
(values,) = answer.values()
np.save(sys.argv[3], values.numpy())
"""


@pytest.fixture(params=["classifier", "own_tagger", "encoder_decoder"])
def example(request):
    for module in program(f"examples/{request.param}.py"):
        yield request.param, module


@pytest.mark.parametrize("name, output", [
    ("classifier", "runs/months"), ("own_tagger", "runs/parts"), ("encoder_decoder", "runs/iso"),
])  # fmt: skip
def test_an_example_runs_without_flags(monkeypatch, name, output):
    seen = {}
    for module in program(f"examples/{name}.py"):
        monkeypatch.setattr(module, "train", lambda **values: seen.update(values))
        flags.FLAGS([name])  # fails if a flag is required
        module.main()
    assert seen["output"] == output and seen["n_dates"] >= 4000


def test_the_default_run_of_the_fine_tuning_example_is_named_where_it_is_missing(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for module in program("examples/classify.py"):
        flags.FLAGS(["classify"])
        with raises_parameter("model_dir", "runs/quickstart", "the folder of a run") as raised:
            module.main()
        assert "train.py --flagfile=configs/quickstart.cfg" in str(raised.value)


FILES = {"classifier": "classifier.keras", "own_tagger": "tagger.keras", "encoder_decoder": "model.keras"}


@pytest.mark.slow
def test_an_example_learns_and_what_it_writes_is_loaded(example, tmp_path, capsys):
    name, module = example
    module.train(output=str(tmp_path), n_dates=1500, epochs=2, seed=0)
    assert re.search(r"\d\.\d", capsys.readouterr().out)
    model = keras.saving.load_model(tmp_path / FILES[name])
    rows = np.random.default_rng(0).integers(32, 127, [3, 12]).astype(np.int32)
    rows[1, 7:] = 0
    inputs = {"classifier": {"tokens": rows}, "own_tagger": {"inputs": rows}}.get(name)
    inputs = inputs or {"source": rows, "target": rows[:, :4]}
    expected = model(list(inputs.values()) if len(inputs) > 1 else rows)

    np.savez(tmp_path / "inputs.npz", **inputs)
    arguments = [str(tmp_path / part) for part in ("saved_model", "inputs.npz", "answer.npy")]
    subprocess.run([sys.executable, "-c", CLIENT, *arguments], check=True, cwd=tmp_path)
    np.testing.assert_allclose(np.load(tmp_path / "answer.npy"), expected, rtol=1e-4, atol=1e-5)


def test_the_tags_of_dates_are_where_year_and_month_are():
    for module in program("examples/own_tagger.py"):
        text = "Sat the 21st of Nov '26"
        chars, tags = module.to_arrays([(text, "2026-11-21")])
        assert bytes(chars[0].tolist()).rstrip(b"\0").decode() == text
        assert module.show(text, tags[0]) == "Nov MONTH, '26 YEAR"
        assert module.show(text, tags[0][: len(text)]) == "Nov MONTH, '26 YEAR"  # the last tag ends the last part


def test_the_mask_of_the_classifier_leaves_padding_out():
    for module in program("examples/classifier.py"):
        classifier, rows = module.make_classifier(), module.to_ids(["1/2/1999", "Nov 21, 2026"])
        alone = classifier(rows[:1, :8])
        np.testing.assert_allclose(classifier(tf.constant(rows))[:1], alone, rtol=1e-4, atol=1e-5)


def test_a_model_with_one_bias_scores_places_by_that_of_content():
    for module in program("examples/claims.py"):
        lm = module.tied(txl_tf.TransformerXLLM(**SMALL, mem_len=4))
        u, tokens = lm.network.r_w_bias, np.random.default_rng(0).integers(0, 23, [2, 6])
        assert sum(weight.path.endswith("_bias") for weight in lm.network.trainable_weights) == 1
        u.assign(tf.random.stateless_normal(u.shape, [0, 1]))
        other = txl_tf.TransformerXLLM(**SMALL, mem_len=4)
        other.set_weights(lm.get_weights())
        other.network.r_r_bias.assign(u)
        np.testing.assert_array_equal(lm.log_probs(tokens)[0], other.log_probs(tokens)[0])


def test_a_table_of_claims_has_the_mean_and_the_extremes_over_the_seeds(capsys):
    for module in program("examples/claims.py"):
        module.print_table("biases", [{"u = v": {"nats": nll}} for nll in (1.5, 1.25, 1.3)])
        assert capsys.readouterr().out.splitlines()[1:] == [
            "| biases | nats |", "|---|---|", "| u = v | 1.350 (1.250 to 1.500) |"
        ]  # fmt: skip


@pytest.mark.slow
def test_claims_are_tried_and_make_tables(tmp_path, capsys):
    for module in program("examples/claims.py"):
        text = tmp_path / "text.txt"
        text.write_bytes(np.random.default_rng(0).integers(97, 101, 30_000).astype(np.uint8).tobytes())
        module.FLAGS(["claims.py", f"--data_path={text}", "--train_steps=40", "--seeds=0"])
        module.main()
        rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|") and "(" in line]
        names = ["sinusoids", "learned", "u and v", "u = v", "0 in training", "64 in training"]
        assert [row.split("|")[1].strip() for row in rows] == names
        found = [float(number) for row in rows for number in re.findall(r"\d+\.\d+", row)]
        assert min(found) > 1.35 and max(found) < 3  # of four letters by chance: 1.386 nats at best


# ------------------------------------------------------------------------------------------- rows with their labels

LETTERS = "abcdefghijklmnopqrstu \n"  # 23 symbols, as `small_lm` has


@pytest.fixture(scope="module")
def classify():
    yield from program("examples/classify.py")


@pytest.fixture
def vocab():
    vocab = Vocab(level="char", special=list(LETTERS))
    vocab.build()
    return vocab


def write_rows(path, rows, end="\n"):
    path.write_text("".join(f"{label}\t{text}{end}" for label, text in rows))
    return str(path)


ROWS = [("good", "a" * n) for n in range(1, 11)] + [("bad", "b" * n) for n in range(5, 0, -1)]


def test_labelled_rows_are_filled_up_and_every_fifth_of_a_label_is_held_out(classify, vocab, tmp_path, capsys):
    path = write_rows(tmp_path / "rows.tsv", ROWS, "\r\n")
    names, (tokens, labels), (held_out, held_out_labels) = classify.labelled(vocab, [path], 7)
    assert names == ["good", "bad"]
    assert labels.tolist() == [0] * 8 + [1] * 4 and held_out_labels.tolist() == [0, 0, 1]
    assert tokens[:2].tolist() == [[0, 22, -1, -1, -1, -1, -1], [0, 0, 22, -1, -1, -1, -1]]
    assert held_out.tolist() == [[0] * 5 + [22, -1], [0] * 7, [1, 22] + [-1] * 5]
    assert mentions(capsys.readouterr().out, path, 4, 15, 7)

    second = write_rows(tmp_path / "test.tsv", [("bad", "ab")])
    _, (tokens, _), (held_out, held_out_labels) = classify.labelled(vocab, [path, second], 20)
    assert tokens.shape == (15, 11) and held_out.tolist() == [[0, 1, 22]] and held_out_labels.tolist() == [1]


@pytest.mark.parametrize(
    "rows, facts",
    [
        (["good\tab", "bad ab"], [2, "label<TAB>text", "'bad ab'"]),
        (["good\t "], [1, "label<TAB>text"]),
        (["good\tab"] * 6, ["'good'"]),
        (["good\tab"] * 6 + ["bad\tb"] * 4, [4, "'bad'"]),
        (["good\tab"] * 6 + ["bad\tb"] * 4 + ["bad\tX"], [11, "'X'"]),
        ([""], [1, "label<TAB>text"]),
        ([], []),
    ],
)
def test_bad_rows_are_named(classify, vocab, tmp_path, rows, facts):
    (tmp_path / "rows.tsv").write_text("".join(f"{row}\n" for row in rows))
    with raises_naming(ValueError, "rows.tsv", *facts):
        classify.labelled(vocab, [str(tmp_path / "rows.tsv")], 10)


def test_a_label_that_is_held_out_alone_is_refused(classify, vocab, tmp_path):
    paths = [write_rows(tmp_path / "rows.tsv", ROWS), write_rows(tmp_path / "test.tsv", [("new", "ab")])]
    with raises_parameter("rows", "new", ["good", "bad"]):
        classify.labelled(vocab, paths, 10)
    with raises_parameter("rows", [*paths, paths[0]]):
        classify.labelled(vocab, [*paths, paths[0]], 10)


def test_the_sentences_of_the_manual_are_rows(classify):
    rows = classify.read_rows("manual")
    assert {label for label, _ in rows} == {*classify.SECTIONS}
    assert len({len(text) for _, text in rows}) > 50 and min(len(text) for _, text in rows) == 30


def test_padding_does_not_change_what_a_row_is_taken_for(classify, small_lm):
    classifier = classify.make_classifier(small_lm().network, 3)
    row = np.array([[3, 1, 4, 1, 5]], np.int32)
    longer = np.pad(row, [[0, 0], [0, 4]], constant_values=classify.PADDING)
    np.testing.assert_allclose(classifier(longer), classifier(row), rtol=1e-5, atol=1e-6)
    assert np.abs(classifier(longer) - classifier(row[:, :4])).max() > 1e-4


def test_a_run_of_another_family_is_refused(classify, vocab, tmp_path):
    def refused(*fields):
        with raises_parameter(*fields):
            classify.classify(str(tmp_path), None, None, None, 20, 8, 0.01, "float32", False, 0)

    (tmp_path / "config.json").write_text(json.dumps({"family": "transformer", "model": {}, "data": {}}))
    refused("family", "transformer")
    (tmp_path / "config.json").unlink()
    absolute = {**SMALL, "mem_len": 0}
    RunFolder(tmp_path).create({}, absolute, [vocab], TransformerLM(**absolute), step=1)
    refused("model_dir")


@pytest.mark.slow
def test_the_program_learns_from_rows(classify, vocab, small_lm, tmp_path, capsys):
    RunFolder(tmp_path / "run").create({}, {**SMALL, "mem_len": 4}, [vocab], small_lm(), step=1)
    letters = {"up": LETTERS, "down": LETTERS[20::-1]}
    rows = [(label, text[:n]) for n in range(2, 12) for label, text in letters.items()]
    path, output = write_rows(tmp_path / "rows.tsv", rows * 5), tmp_path / "classifier.keras"
    classify.classify(str(tmp_path / "run"), None, [path], str(output), 20, 8, 0.01, "float32", False, 0)
    printed = capsys.readouterr().out
    assert "fine-tuned 1.000" in printed and mentions(printed, "0.500")
    assert re.search(r"\bup\b.*\bup\b.*'ab", printed) and re.search(r"\bdown\b.*\bdown\b.*'ut", printed)
    logits = keras.saving.load_model(output)(np.array([[0, 1, 2, 22, -1], [20, 19, 18, 17, 22]], np.int32))
    assert np.argmax(logits, 1).tolist() == [0, 1]


# ---------------------------------------- recipes of language models


RECIPES = {"distillation": "student", "auxiliary_loss": "model", "own_head": "model"}


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_learns_with_memory_and_what_it_writes_is_loaded(name, tmp_path, capsys):
    for module in program(f"examples/{name}.py"):
        module.train(output=str(tmp_path), n_chars=8000, epochs=1, seed=0)
        shown = [float(x) for x in re.findall(r": ([0-9.]+) nats", capsys.readouterr().out)]
        assert len(shown) == (3 if name == "distillation" else 1) and max(shown) < np.log(128)
        model = keras.saving.load_model(tmp_path / f"{RECIPES[name]}.keras")
        assert model.network.n_token == 128


def test_the_loss_of_a_student_is_a_mean_of_nll_and_of_the_teachers_cross_entropy():
    for module in program("examples/distillation.py"):
        sizes = {**SMALL, "n_layer": 1, "mem_len": 3, "dropout": 0.0}
        teacher = txl_tf.TransformerXLLM(**{**sizes, "n_layer": 2, "seed": 1})
        student = module.student_of(teacher, **sizes)
        tokens = np.arange(20).reshape(2, 10)
        mems = student.initial_mems(2)
        nll, _, mems = student.segment_nll(tokens[:, :5], tokens[:, 1:6], mems, training=True)
        found, _, _ = student.segment_nll(tokens[:, 5:9], tokens[:, 6:], mems, training=True)
        log_probs, _ = student.log_probs(tokens[:, 5:9], mems[:1])
        known, _ = teacher.log_probs(tokens[:, 5:9], mems[1:])
        of_label = np.take_along_axis(log_probs.numpy(), tokens[:, 6:, None], 2)[..., 0]
        expected = -0.5 * of_label - 0.5 * np.sum(np.exp(known) * log_probs, -1)
        np.testing.assert_allclose(found, expected, rtol=1e-5)
        assert len(mems) == 3


@pytest.mark.parametrize("name", ["auxiliary_loss", "distillation", "own_head"])
def test_the_memory_of_a_recipe_ends_with_a_document(name):
    for module in program(f"examples/{name}.py"):
        sizes = {**SMALL, "n_layer": 1, "mem_len": 3, "dropout": 0.0}
        if name == "distillation":
            lm = module.student_of(txl_tf.TransformerXLLM(**sizes), **sizes)
        else:
            lm = module.TwoAhead(**sizes) if name == "auxiliary_loss" else module.Kinds(**sizes)
        tokens = np.arange(20).reshape(2, 10)
        labels = tokens % 3
        done = tokens == tokens[:, 4:5]  # the document ends with the first segment
        _, _, mems = lm.segment_nll(tokens[:, :5], labels[:, :5], lm.initial_mems(2), done=done[:, :5])
        found = lm.segment_nll(tokens[:, 5:], labels[:, 5:], mems)[0]
        new = lm.segment_nll(tokens[:, 5:], labels[:, 5:], lm.initial_mems(2))[0]
        np.testing.assert_allclose(found, new, rtol=1e-5)


@pytest.mark.slow
def test_the_auxiliary_loss_changes_gradients_alone():
    for module in program("examples/auxiliary_loss.py"):
        lm = module.TwoAhead(**{**SMALL, "mem_len": 3, "dropout": 0.0})
        tokens = np.arange(20).reshape(2, 10)
        with tf.GradientTape() as tape:
            nll, _, _ = lm.segment_nll(tokens[:, :9], tokens[:, 1:], lm.initial_mems(2), training=True)
        np.testing.assert_allclose(nll, lm.score(tokens[:, :9], tokens[:, 1:])[0], rtol=1e-5)
        assert np.abs(tape.gradient(nll, lm.second_head.kernel.value)).max() > 0
