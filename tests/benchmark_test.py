"""The benchmark's contestants do the same work, in this process and in others, and its figures are what they say."""

import contextlib
import json
import math
import subprocess
import sys

import numpy as np
import pytest
import reference_data
import tensorflow as tf
from absl import flags
from helpers import ROOT, program
from reference_model import ReferenceModel

import txl_tf
from txl_tf.data.text import corpus
from txl_tf.models.decoding import generation
from txl_tf.training.distribution import processor_flags

REFERENCE = "reference float32"
SHAPE = {
    "n_layer": 2, "d_model": 8, "n_head": 2, "d_head": 4, "d_inner": 12, "n_token": 20, "cutoffs": [], "div_val": 1,
    "dropout": 0.1, "dropatt": 0.0, "same_length": False, "clamp_len": -1, "tgt_len": 5, "mem_len": 3, "batch_size": 2,
}  # fmt: skip


SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def benchmark():
    yield from program("tools/benchmark.py")


@pytest.fixture(scope="module")
def contestants(benchmark):
    return benchmark.contestants


@pytest.fixture(scope="module")
def processes(benchmark):
    return benchmark.processes


@pytest.fixture
def run(tmp_path):
    """Runs the benchmark as a program at the small shape; returns its figures as JSON, and what it printed."""
    shape = [f"--{name}={value}" for name, value in SHAPE.items() if name != "cutoffs"]

    def run(*arguments):
        path = tmp_path / "figures.json"
        command = [sys.executable, str(ROOT / "tools" / "benchmark.py"), *shape, f"--json={path}", *arguments]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads(path.read_text()), done.stdout

    return run


def operations_of(graph):
    """Floating-point operations of the matrix products of a graph, but for sums that are written as products."""
    total = 0
    for op in graph.get_operations():
        if op.type in ("MatMul", "BatchMatMulV2") and 1 not in op.outputs[0].shape[-2:]:
            transposed = op.get_attr("transpose_a" if op.type == "MatMul" else "adj_x")
            total += 2 * op.outputs[0].shape.num_elements() * op.inputs[0].shape[-2 if transposed else -1]
    return total


def test_operations_of_training_are_the_products_of_its_graph(contestants):
    lm = txl_tf.TransformerXLLM(**contestants.model_arguments(SHAPE))
    lm.compile(txl_tf.make_optimizer(1e-3))
    lm.optimizer.build(lm.trainable_variables)
    step = tf.function(lm.train_step, autograph=False)
    graph = step.get_concrete_function(contestants.random_batch(SHAPE), lm.initial_mems(2)).graph
    zero_keys = 3 * 2 * 2 * 2 * 5 * 8  # the column of zeros of rel_shift: three products of two layers
    assert operations_of(graph) == contestants.training_operations(SHAPE) + zero_keys


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["training", *(pytest.param(m, marks=SLOW) for m in ("evaluation", "generation"))])
def test_contestants_do_the_same_work(contestants, mode):
    uniform = math.log(SHAPE["n_token"])  # the loss of small initial weights
    makers = contestants.make_contestants(mode)
    reference, library = (makers[name]({**SHAPE, "n_layer": 1}) for name in list(makers)[:2])
    if mode == "generation":
        assert reference().shape == (1, 2)  # a token of every row
        assert library().shape == (2, 1 + 5)
    else:
        np.testing.assert_allclose([np.mean(reference()), np.mean(library())], uniform, rtol=0.02)


def test_a_token_reads_weights_keys_values_and_position_keys(contestants):
    lm = txl_tf.TransformerXLLM(**contestants.model_arguments(SHAPE))
    weights, bins = generation.precompute_for(lm, lm.decoding_cache())
    state = lm.decoding_cache().initial_state(SHAPE["batch_size"])
    kernels = [kernel for layer in weights for kernel in (layer.qkv, layer.o, *layer.ff[::2])]
    tables = [layer.position_keys[:, : SHAPE["mem_len"] + 1] for layer in weights]
    read = [*kernels, *tables, *state.keys, *state.values, bins[0][0]]
    assert contestants.bytes_of_token(SHAPE, 4) == 4 * sum(tensor.shape.num_elements() for tensor in read)


@SLOW
def test_contestants_of_scoring_score_the_same_lines(contestants):
    shape = {**SHAPE, "lines": 6}
    makers = contestants.make_contestants("scoring")
    alone, together = (makers[name](shape)() for name in list(makers)[:2])
    lengths = np.array([len(line.split()) + 1 for line in contestants.random_lines(shape)[0]])
    for nll in (alone, together):
        np.testing.assert_allclose(nll, lengths * math.log(SHAPE["n_token"]), rtol=0.05)  # small initial weights
    counts = [contestants.tokens_of_step("scoring", name, shape) for name in makers]
    assert counts == [lengths.sum(), lengths.sum(), 2 * 5]
    assert np.mean(makers[contestants.EVALUATION](shape)()) == pytest.approx(math.log(SHAPE["n_token"]), rel=0.05)


@SLOW
def test_contestants_of_writing_write_what_they_are_counted_for(contestants):
    makers, shape = contestants.make_contestants("writing"), {**SHAPE, "batch_size": 1}
    for name, make in makers.items():
        written, counted = make(shape)(), contestants.tokens_of_step("writing", name, shape)
        if name == "a prompt of 5,000 tokens is read":
            assert (written.shape, counted) == ((1, 5001), 5000)
        elif name == "a text of 5,000 tokens goes on":
            assert (written[0].shape, counted) == ((1, 5), 5)
        else:
            assert written[:, 1:].size == counted
    assert {contestants.tokens_of_step("writing", name, shape) for name in makers} == {5, 10, 20, 80, 5000}


def test_a_ratio_is_the_median_over_turns_and_above_1_where_the_contestant_is_better(benchmark, capsys):
    turns = {
        "reference": iter([{"seconds": 2.0, "mb": 5}, {"seconds": 4.0, "mb": 7}, {"seconds": 9.0, "mb": 6}]),
        "mine": iter([{"seconds": 1.0, "mb": 1}, {"seconds": 1.0, "mb": 1}, {"seconds": 3.0, "mb": 1}]),
    }
    measured = benchmark.take_turns({name: found.__next__ for name, found in turns.items()}, rounds=3)
    assert measured["reference"] == {"seconds": [2, 4, 9], "mb": [5, 7, 6]}
    rows = benchmark.rows_of("startup", "seconds", measured)
    common = {"mode": "startup", "mb": 6, "ratio_quartiles": [1, 1]}
    assert rows[0] == {**common, "contestant": "reference", "seconds": 4, "quartiles": [3, 6.5], "ratio": 1}
    common = {"mode": "startup", "mb": 1, "ratio_quartiles": [2.5, 3.5]}
    assert rows[1] == {**common, "contestant": "mine", "seconds": 1, "quartiles": [1, 2], "ratio": 3}
    rates = {name: {"words_per_second": figures["seconds"]} for name, figures in measured.items()}
    rows = benchmark.rows_of("preparation", "words_per_second", rates)
    np.testing.assert_allclose(rows[1]["ratio"], 1 / 3)
    benchmark.print_table("preparation", rows)
    *_, heading, first, second = (line.split() for line in capsys.readouterr().out.splitlines())
    assert heading == ["contestant", "words/s", "quartiles", "ratio", "quartiles"]
    assert first == ["reference", "4", "3", "-", "6", "1.000", "1.00", "-", "1.00"]
    assert second == ["mine", "1", "1", "-", "2", "0.333", "0.29", "-", "0.42"]


def test_costs_by_argument_are_of_the_shapes_that_the_argument_gives(benchmark, monkeypatch):
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


def test_both_prepare_the_same_tokens_from_a_text_of_repeated_words(benchmark, processes, tmp_path):
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


@pytest.mark.slow
def test_the_exported_reference_predicts_what_the_model_does(contestants, processes, tmp_path):
    shape = {**SHAPE, "n_layer": 1}
    written = processes.export(REFERENCE, shape, str(tmp_path / "model"))
    loaded = processes.load(str(tmp_path / "model"))
    assert written["megabytes"] > 0 and loaded["load_seconds"] > 0
    assert processes.turn(seconds=0)["milliseconds_per_step"] > 0
    signatures = tf.saved_model.load(str(tmp_path / "model")).signatures
    state = signatures["initial_state"](batch_size=tf.constant(1))["state"]
    tokens = tf.constant([[3, 1, 2]])
    found = signatures["next"](tokens=tokens, state=state)
    model = ReferenceModel(**contestants.model_arguments(shape))
    expected = model.log_probs(tf.transpose(tokens), model.initial_mems(1))[-1]
    np.testing.assert_allclose(found["log_probs"], tf.math.top_k(expected, 10).values, rtol=1e-5)
    again = signatures["next"](tokens=tokens, state=found["state"])
    assert np.abs(again["log_probs"] - found["log_probs"]).max() > 1e-6  # the memory counts


@SLOW
def test_replicas_train_in_a_process(processes):
    found = processes.alone("train_replicas", name="txl_tf float32", shape=SHAPE, replicas=2, seconds=0)
    assert 0 < found["tokens_per_second"] < 1e6 and found["peak_memory_mb"] > 100


@SLOW
def test_a_step_of_two_workers_all_reduces_the_gradients_once_and_three_numbers(benchmark):
    lm = txl_tf.TransformerXLLM(**benchmark.contestants.model_arguments(SHAPE))
    buckets = [0]
    for variable in lm.trainable_variables:
        if buckets[-1] > 1000:
            buckets.append(0)
        buckets[-1] += variable.numpy().nbytes
    for size, count in ((0, 1), (1000, len(buckets))):
        with contextlib.ExitStack() as stack:
            shape = {**SHAPE, "batch_size": 4}
            found = benchmark.start_workers(shape, 2, seconds=0, stack=stack, bytes_per_pack=size)()
        assert found["parameter_bytes"] == sum(buckets)
        assert found["reduced_bytes"] == sum(buckets) + 8 + 8  # loss and tokens; whether one wants to stop
        assert found["collectives"] == count + 2
        assert found["loopback_mb"] * 1e6 > found["parameter_bytes"]
        np.testing.assert_allclose(found["tokens_per_second"], 20 / found["milliseconds_per_step"] * 1000)


ANSWERING = """
import json, os, sys
checkout = os.environ["PYTHONPATH"].split(os.pathsep)[0]
for line in sys.stdin:
    function, arguments = json.loads(line)
    if function == "no_such":
        raise KeyError(function)
    print(json.dumps({"function": function, "checkout": checkout, **arguments}), flush=True)
"""


def test_a_process_answers_with_figures_until_it_fails_and_says_why(processes, tmp_path, monkeypatch):
    (tmp_path / "answering.py").write_text(ANSWERING)
    monkeypatch.setattr(processes, "__file__", str(tmp_path / "answering.py"))
    with processes.Process("here") as process:
        for n in (1, 2):
            assert process.call("turn", n=n) == {"function": "turn", "checkout": "here", "n": n}
        with pytest.raises(ValueError, match="^no_such of {'n': 3} failed: KeyError: 'no_such'$") as error:
            process.call("no_such", n=3)
        assert "Traceback" in str(error.value.__cause__)
    assert processes.alone("turn", n=4) == {"function": "turn", "checkout": str(ROOT), "n": 4}


@SLOW
def test_a_process_that_fails_says_why(processes):
    with pytest.raises(ValueError, match="^no_such of {'n': 1} failed: KeyError: 'no_such'$"):
        processes.alone("no_such", n=1)


@SLOW
def test_a_process_imports_the_library_of_its_checkout(processes, tmp_path):
    (tmp_path / "txl_tf").mkdir()
    (tmp_path / "txl_tf/__init__.py").write_text("raise ImportError('the other txl_tf')")
    with (
        processes.Process(tmp_path) as process,
        pytest.raises(ValueError, match="ImportError: the other txl_tf"),
    ):
        process.call("begin", mode="generation", name="txl_tf float32", shape=SHAPE)


# ------------------------------------------------------------------------------------------------ the program


@SLOW
def test_contestants_are_compared(run):
    figures, printed = run("--mode=generation", "--rounds=2", "--seconds=0.1")
    rows = figures["rows"]
    assert figures["shapes"] == {"generation": SHAPE}
    read = [f"read of its bytes {dtype}" for dtype in ("float32", "bfloat16")]
    assert [row["contestant"] for row in rows] == [REFERENCE, "txl_tf float32", "txl_tf bfloat16", *read]
    assert rows[0]["ratio"] == 1
    np.testing.assert_allclose(rows[1]["ratio"], rows[1]["tokens_per_second"] / rows[0]["tokens_per_second"], rtol=0.5)
    for row in rows:
        name = row["contestant"]
        assert row["mode"] == "generation"
        tokens = 2 * (1 if name == REFERENCE else 5)
        np.testing.assert_allclose(row["tokens_per_second"], 1000 * tokens / row["milliseconds_per_step"], rtol=0.5)
        assert row["peak_memory_mb"] > 100 and row["first_step_seconds"] > 0
        assert f"  {name}  " in printed


@SLOW
def test_training_preparation_and_export_are_compared(run):
    modes = "softmax_wt103,preparation,export"
    shape = ("--cutoffs=5,10", "--megabytes=0.05")
    figures, _ = run(f"--mode={modes}", "--rounds=1", "--seconds=0.1", *shape)
    rows = {(row["mode"], row["contestant"]): row for row in figures["rows"]}
    library = ["txl_tf float32", "txl_tf bfloat16", *["txl_tf bfloat16 products"] * ("amx_bf16" in processor_flags())]
    assert list(rows) == [
        *(("softmax_wt103", name) for name in (REFERENCE, *library)),
        *(("preparation", name) for name in ("reference", "txl_tf")),
        *(("export", name) for name in (REFERENCE, "txl_tf float32", "txl_tf bfloat16 weights")),
    ]
    assert figures["shapes"]["softmax_wt103"] == {**SHAPE, "cutoffs": [5, 10]}
    for name in (REFERENCE, *library):
        row = rows["softmax_wt103", name]
        assert 0 < row["share_of_peak"] < 1 and row["build_seconds"] > 0
    prepared = [rows["preparation", name] for name in ("reference", "txl_tf")]
    assert prepared[0]["words"] == prepared[1]["words"] > 10000
    rates = [row["words_per_second"] for row in prepared]
    np.testing.assert_allclose(prepared[1]["ratio"], rates[1] / rates[0])
    exported = [rows["export", name]["megabytes"] for name in (REFERENCE, "txl_tf float32", "txl_tf bfloat16 weights")]
    assert 0 < min(exported) and max(exported) < 3


@SLOW
def test_the_start_up_is_that_of_train_py_and_its_imports_are_part_of_it(run):
    figures, printed = run("--mode=startup", "--rounds=1", "--megabytes=0.02")
    reference, library = figures["rows"]
    assert (reference["contestant"], library["contestant"]) == (REFERENCE, "txl_tf float32")
    np.testing.assert_allclose(library["ratio"], reference["seconds"] / library["seconds"])
    imports = library["imports"]
    assert list(imports) == ["txl_tf", "keras", "matplotlib.pyplot", "tensorflow"]
    assert 0.1 < imports["tensorflow"] < imports["txl_tf"]
    assert all(0 < seconds <= imports["txl_tf"] for seconds in imports.values())
    assert 0.1 < library["seconds"] < library["command_seconds"]
    assert min(reference["peak_memory_mb"], library["peak_memory_mb"]) > 100
    assert f"txl_tf {imports['txl_tf']:.2f} s, keras" in printed


@SLOW
def test_the_first_answers_are_those_of_the_programs(run):
    figures, _ = run("--mode=first_answer", "--rounds=1", "--megabytes=0.02", "--n_layer=1")
    rows = figures["rows"]
    assert [row["contestant"] for row in rows] == ["import tensorflow", "generate.py", "score.py", "tag.py"]
    for row in rows:
        assert 0.1 < row["seconds"] <= row["command_seconds"] and row["processor_seconds"] > 0.1
        np.testing.assert_allclose(row["ratio"], rows[0]["seconds"] / row["seconds"])


@SLOW
def test_this_checkout_is_compared_with_another(run):
    figures, _ = run("--mode=generation,startup", f"--against={ROOT}", "--rounds=1", "--seconds=0.1")
    rows = figures["rows"]
    names = ["other float32", "this float32", "other bfloat16", "this bfloat16"]
    assert [row["contestant"] for row in rows] == [*names, *names[:2]]
    for other, this in zip(rows[::2], rows[1::2], strict=True):
        assert other["mode"] == this["mode"] and other["ratio"] == 1
        low, high = this["ratio_quartiles"]
        assert 0.05 < low == this["ratio"] == high < 20
        np.testing.assert_allclose(this["peak_memory_mb"], other["peak_memory_mb"], rtol=0.2)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--mode=training,reading"], "mode must be of training, .*, got reading"),
        (["--mode=export", f"--against={ROOT}"], "mode must be of training, .*, got export"),
        (["--mode=workers", "--batch_size=6"], "batch_size must be a multiple of 4, the most workers, got 6"),
        (["--mode=softmax_wt103,workers", "--batch_size=6"], "batch_size must be a multiple of 4, .* got 6"),
        (["--mode="], "mode must be of training, .*, got none"),
        (["--mode=training", "--dropout=2"], r"dropout must lie in \[0, 1\), got 2"),
        (["--mode=startup,seq2seq", "--n_head=3"], "d_model must be a multiple of num_heads=3, got 256"),
        (["--mode=flat_long", "--n_head=3"], "d_model must be a multiple of n_head=3, got 128"),
        (["--mode=training_words", "--n_token=9000"], r"cutoffs must increase and lie between 0 and n_token=9000"),
        (
            ["--mode=writing", "--batch_size=4"],
            "batch_size must be 1 for mode=writing, which tries several rows, got 4",
        ),
        (
            ["--mode=generation,evaluation", "--jit"],
            "jit is for modes of training without scaling, got generation, eva",
        ),
        (["--cutoffs=abc"], "--cutoffs=.*must be integers, as 20000,40000"),
        (["--rounds=-1"], "rounds.* positive integer"),
        (["--seconds=-1"], "seconds.* non-negative number"),
        (["--batch_size=0"], "batch_size.* positive integer"),
        (["--megabytes=0"], "megabytes.* 0.001"),
        (["--against=nowhere"], "against must be a folder with a txl_tf, and without scaling, got nowhere"),
    ],
    ids=str,
)
def test_bad_flags_are_one_clear_error(benchmark, arguments, message, monkeypatch):
    def measured(dtype):
        raise AssertionError("measured")

    monkeypatch.setattr(benchmark, "matmul_peak", measured)
    benchmark.FLAGS.unparse_flags()
    with pytest.raises((ValueError, flags.Error), match=message):
        benchmark.FLAGS(["benchmark.py", *arguments])
        benchmark.main()
