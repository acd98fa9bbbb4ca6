"""The benchmark's contestants do the same work, in this process and in others, and its figures are what they say."""

import math

import numpy as np
import pytest
import tensorflow as tf

import txl_tf
from tests import reference_data
from tests.reference_model import ReferenceModel
from tools import benchmark, contestants, processes
from txl_tf import corpus

SHAPE = {
    **contestants.NETWORK, "n_layer": 2, "d_model": 8, "n_head": 2, "d_head": 4, "d_inner": 12, "n_token": 20,
    "tgt_len": 5, "mem_len": 3, "batch_size": 2,
}  # fmt: skip
REFERENCE = contestants.REFERENCE


def operations_of(graph):
    """Floating-point operations of the matrix products of a graph, but for sums that are written as products."""
    total = 0
    for op in graph.get_operations():
        if op.type in ("MatMul", "BatchMatMulV2") and 1 not in op.outputs[0].shape[-2:]:
            transposed = op.get_attr("transpose_a" if op.type == "MatMul" else "adj_x")
            total += 2 * op.outputs[0].shape.num_elements() * op.inputs[0].shape[-2 if transposed else -1]
    return total


def test_operations_of_training_are_the_products_of_its_graph():
    lm = txl_tf.TransformerXLLM(**contestants.model_arguments(SHAPE))
    lm.compile(txl_tf.make_optimizer(1e-3))
    lm.optimizer.build(lm.trainable_variables)
    step = tf.function(lm.train_step, autograph=False)
    graph = step.get_concrete_function(contestants.random_batch(SHAPE), lm.initial_mems(2)).graph
    zero_keys = 3 * 2 * 2 * 2 * 5 * 8  # the column of zeros of rel_shift: three products of two layers
    assert operations_of(graph) == contestants.training_operations(SHAPE) + zero_keys


def test_contestants_do_the_same_work_and_are_compared():
    uniform = math.log(SHAPE["n_token"])  # the loss of small initial weights
    for mode in ("training", "evaluation", "generation"):
        makers = contestants.make_contestants(mode)
        reference, library = (makers[name](SHAPE) for name in list(makers)[:2])
        if mode == "generation":
            assert reference().shape == (1, 2)  # a token of every row
            assert library().shape == (2, 1 + 5)
        else:
            np.testing.assert_allclose([np.mean(reference()), np.mean(library())], uniform, rtol=0.02)
    first_two = dict(list(makers.items())[:2])
    rows = benchmark.compare("generation", SHAPE, first_two, rounds=2, seconds=0, peaks={}, memory_of=None)
    assert [row["contestant"] for row in rows] == [REFERENCE, "txl_tf float32"]
    assert rows[0]["ratio"] == 1
    np.testing.assert_allclose(rows[1]["ratio"], rows[1]["tokens_per_second"] / rows[0]["tokens_per_second"], rtol=0.5)


def test_a_ratio_is_the_median_over_turns_and_above_1_where_the_contestant_is_better(capsys):
    measured = {
        "reference": {"seconds": [2.0, 4.0, 9.0], "mb": [5, 7, 6]},
        "mine": {"seconds": [1.0, 1.0, 3.0], "mb": [1, 1, 1]},
    }
    rows = benchmark.rows_of("startup", "seconds", measured)
    common = {"mode": "startup", "mb": 6}
    assert rows[0] == {**common, "contestant": "reference", "seconds": 4, "quartiles": [3, 6.5], "ratio": 1}
    assert rows[1] == {**common, "mb": 1, "contestant": "mine", "seconds": 1, "quartiles": [1, 2], "ratio": 3}
    rates = {name: {"words_per_second": figures["seconds"]} for name, figures in measured.items()}
    rows = benchmark.rows_of("preparation", "words_per_second", rates)
    np.testing.assert_allclose(rows[1]["ratio"], 1 / 3)
    benchmark.print_table("preparation", rows, benchmark.speed("words"))
    assert capsys.readouterr().out.splitlines()[-1].split() == ["mine", "1", "1", "-", "2", "0.33"]


def test_costs_by_argument_are_of_the_shapes_that_the_argument_gives(monkeypatch):
    monkeypatch.setattr(benchmark, "SCALING", {"training": {"tgt_len": [2, 4], "n_token": [9, 20]}})
    monkeypatch.setattr(benchmark, "CUTOFFS", {20: [4]})
    made = []

    def make(shape):
        made.append((shape["tgt_len"], shape["n_token"], shape["cutoffs"]))
        return lambda: None

    rows = benchmark.scale("training", SHAPE, {REFERENCE: make}, rounds=1, seconds=0)
    assert made == [(2, 20, []), (4, 20, []), (5, 9, []), (5, 20, [4])]
    found = [(row["mode"], row["contestant"], row["argument"], row["value"]) for row in rows]
    pairs = [("tgt_len", 2), ("tgt_len", 4), ("n_token", 9), ("n_token", 20)]
    assert found == [("training", REFERENCE, *pair) for pair in pairs]
    assert all(0 < row["microseconds_per_token"] < 1e6 for row in rows)


# ------------------------------------------------------------------------------------------- other processes


def test_both_prepare_the_same_tokens_from_a_text_of_repeated_words(tmp_path):
    for split, megabytes in (("train", 0.05), ("valid", 0.01), ("test", 0.01)):
        benchmark.write_text(tmp_path / f"{split}.txt", n_token=500, megabytes=megabytes)
    expected = reference_data.prepare(tmp_path, tmp_path / "reference")
    prepared = corpus.prepare(tmp_path / "library", "wt103", data_path=tmp_path)
    for split, ids in expected.items():
        np.testing.assert_array_equal(prepared.splits[split], ids)
    assert (tmp_path / "reference/vocab.txt").read_text() == (tmp_path / "library/vocab.txt").read_text()
    assert len(expected["train"]) == processes.prepare("txl_tf", tmp_path)["words"] - len(expected["valid"]) * 2
    counts = np.bincount(expected["train"])
    assert len(counts) > 300 and counts.max() > 20 * np.median(counts)


def test_the_exported_reference_predicts_what_the_model_does(tmp_path):
    written = processes.export(REFERENCE, SHAPE, str(tmp_path / "model"))
    loaded = processes.load(str(tmp_path / "model"), seconds=0)
    assert written["megabytes"] > 0 and loaded["milliseconds_per_token"] > 0
    signatures = tf.saved_model.load(str(tmp_path / "model")).signatures
    state = signatures["initial_state"](batch_size=tf.constant(1))["state"]
    tokens = tf.constant([[3, 1, 2]])
    found = signatures["next"](tokens=tokens, state=state)
    model = ReferenceModel(**contestants.model_arguments(SHAPE))
    expected = model.log_probs(tf.transpose(tokens), model.initial_mems(1))[-1]
    np.testing.assert_allclose(found["log_probs"], tf.math.top_k(expected, 10).values, rtol=1e-5)
    again = signatures["next"](tokens=tokens, state=found["state"])
    assert np.abs(again["log_probs"] - found["log_probs"]).max() > 1e-6  # the memory counts


def test_stages_of_the_start_up_add_up_to_it(tmp_path):
    benchmark.write_text(tmp_path / "text.txt", n_token=50, megabytes=0.01)
    arguments = {"shape": SHAPE, "model": contestants.model_arguments(SHAPE), "text": str(tmp_path / "text.txt")}
    found = processes.alone("start", name="txl_tf float32", **arguments)
    stages = found["stages"]
    assert list(stages) == [*processes.IMPORTS, *processes.WORK]
    assert all(seconds >= 0 for seconds in stages.values())
    np.testing.assert_allclose(sum(stages.values()) - stages["second step"], found["seconds"])
    assert stages["second step"] < stages["trace, first step"] and stages["import TensorFlow"] > 0.1


def test_replicas_train_in_a_process():
    found = processes.alone("train_replicas", name="txl_tf float32", shape=SHAPE, replicas=2, seconds=0)
    assert 0 < found["tokens_per_second"] < 1e6 and found["peak_memory_mb"] > 100


def test_a_process_that_fails_says_why():
    with pytest.raises(RuntimeError, match="(?s)no_such of {'n': 1} failed: .*KeyError: 'no_such'"):
        processes.alone("no_such", n=1)
