"""The benchmark's contestants do the same work, in this process and in others, and its figures are what they say."""

import ast
import contextlib
import gc
import http.server
import importlib.util
import json
import math
import subprocess
import sys
import threading

import numpy as np
import pytest
import reference_data
import tensorflow as tf
from absl import flags
from benchmarking import (
    contestants,
    language_models,
    pairs,
    peers,
    processes,
    products,
    scaling,
    serving,
    tables,
    taggers,
    tasks,
    work,
)
from benchmarking.shapes import SHAPES
from helpers import ROOT, program, raises_naming, raises_parameter
from reference_model import ReferenceModel

import txl_tf
from txl_tf.data.text import corpus
from txl_tf.language import generation
from txl_tf.training.distribution import processor_flags

REFERENCE = "reference float32"
SHAPE = {
    "n_layer": 2, "d_model": 8, "n_head": 2, "d_head": 4, "d_inner": 12, "n_token": 20, "cutoffs": [], "div_val": 1,
    "dropout": 0.1, "dropatt": 0.0, "same_length": False, "clamp_len": -1, "tgt_len": 5, "mem_len": 3, "batch_size": 2,
}  # fmt: skip


OF_THEIR_OWN = ("workers", "ray", "ray_failures", "serving")
SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def benchmark():
    yield from program("tools/benchmark.py")


@pytest.fixture(autouse=True)
def one_part(monkeypatch):
    """Contestants in this process have one part: the threads of several can only be set before TensorFlow starts."""
    monkeypatch.setattr(language_models, "set_threads", lambda parts: False)


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


# ------------------------------------------------------------------------------------------------------ the server


class Served(http.server.BaseHTTPRequestHandler):
    """Answers requests for a score with an error, and all others with an empty object."""

    protocol_version = "HTTP/1.1"
    bodies = []

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.bodies.append(body)
        fails = body.get("signature_name") == "score_text"
        self.send_response(500 if fails else 200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_):
        pass


def test_every_client_of_a_server_sends_requests_until_the_end_of_a_turn():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Served) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{server.server_port}"
        assert serving.turn(address, "completions, 64 tokens", clients=3, seconds=0)["requests_per_second"] > 0
        assert [body["max_tokens"] for body in Served.bodies] == [64] * 3
        serving.turn(address, "completions, 64 tokens", clients=1, seconds=0.1)
        assert len(Served.bodies) > 4
        with raises_naming(ValueError, "500", "predict"):
            serving.turn(address, "score_text, 320 characters", clients=2, seconds=0)
        server.shutdown()


@SLOW
def test_the_server_is_measured(run):
    figures, printed = run("--mode=serving", "--rounds=1", "--seconds=0", "--mem_len=4")
    assert [row["contestant"].split(",")[0] for row in figures["rows"][::3]] == [
        "completions",
        "generate_text",
        "score_text",
    ]
    assert all(row["requests_per_second"] > 0 for row in figures["rows"]) and "requests/s" in printed


# ------------------------------------------------------------------------------------------------------- the work


class Clock:
    """A clock that stands still unless somebody works; it takes the place of the module `time`."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(work, "time", self)

    def perf_counter(self):
        return self.now


class Trainee:
    """`fit` and `evaluate` as Keras has them: 5 s of set-up, then steps of 1, 2, 3, ... seconds, and at last 7 s."""

    def __init__(self, clock):
        self.clock, self.taken = clock, []

    def fit(self, batches, steps_per_epoch, verbose, callbacks):
        self.history = {"loss": [self.steps("stop_training", steps_per_epoch, callbacks[0].on_train_batch_end)]}
        return self

    def evaluate(self, batches, steps, verbose, callbacks):
        return self.steps("stop_evaluating", steps, callbacks[0].on_test_batch_end)

    def steps(self, stop, steps, on_end):
        setattr(self, stop, False)
        self.clock.now += 5
        self.taken.append(0)
        while not getattr(self, stop) and self.taken[-1] < steps:
            self.taken[-1] += 1
            self.clock.now += self.taken[-1]
            on_end(self.taken[-1] - 1, {"loss": 0.5})
        self.clock.now += 7
        return 0.25


@pytest.mark.parametrize("evaluation", [False, True])
def test_the_time_of_steps_counts_from_the_end_of_the_first(monkeypatch, evaluation):
    trainee = Trainee(Clock(monkeypatch))
    steps = work.Steps(trainee, None, evaluation=evaluation)
    assert steps.once() == 0.25
    assert work.mean_seconds(steps, seconds=0) == 2  # of the second step alone
    assert work.mean_seconds(steps, seconds=6) == (2 + 3 + 4) / 3
    assert work.mean_seconds(steps, seconds=0, least=3) == (2 + 3 + 4) / 3
    assert trainee.taken == [1, 2, 4, 4]


def test_several_steps_are_one_work(monkeypatch):
    trainee = Trainee(Clock(monkeypatch))
    steps = work.Steps(trainee, None, steps=3)
    steps.once()
    assert work.mean_seconds(steps, seconds=0) == 2 + 3 + 4
    assert work.mean_seconds(steps, seconds=10) == (2 + 3 + 4 + 5 + 6 + 7) / 2  # whole works only
    assert trainee.taken == [3, 4, 7]


def test_the_time_of_calls_is_all_of_it(monkeypatch):
    clock, done = Clock(monkeypatch), []

    def call():
        done.append(len(done) + 1)
        clock.now += done[-1]
        return done[-1]

    calls = work.Calls(call)
    assert calls.once() == 1
    assert work.mean_seconds(calls, seconds=0) == 2
    assert work.mean_seconds(calls, seconds=6) == (3 + 4) / 2
    assert work.mean_seconds(calls, seconds=0, least=3) == (5 + 6 + 7) / 3


def test_batches_come_again_and_again():
    one = (np.array([[1, 2]], np.int32), np.array([[3, 4]], np.int32))
    dataset = work.repeated([one])
    assert [spec.shape for spec in dataset.element_spec] == [(1, 2), (1, 2)]  # XLA needs to know them
    for found in dataset.take(3):
        np.testing.assert_array_equal(found, one)
    several = [({"x": np.full([2, n], n, np.int32)}, np.zeros([2, n], np.int32)) for n in (1, 2)]
    dataset = work.repeated(several)
    assert [inputs["x"].shape for inputs, _ in dataset.take(5)] == [(2, 1), (2, 2), (2, 1), (2, 2), (2, 1)]
    assert not dataset.options().autotune.enabled


FILES = ("work", "contestants", "language_models", "pairs", "taggers", "tasks", "processes")  # in other checkouts, too


def test_contestants_use_public_names_alone():
    """But for the one that goes on with a text, of this checkout only."""
    private, used = [], set()
    for name in FILES:
        tree = ast.parse((ROOT / f"tools/benchmarking/{name}.py").read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] in (
                "txl_config",
                "txl_tf",
                "txl_programs",
            ):
                private.append(node.module)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "txl_tf":
                used.add(node.attr)
    assert private == ["txl_tf.language.session"]
    assert used < set(txl_tf.__all__) and "TransformerXLLM" in used


# ------------------------------------------------------------------------------------------------ the contestants


def operations_of(graph):
    """Floating-point operations of the matrix products of a graph, but for sums that are written as products."""
    total = 0
    for op in graph.get_operations():
        if op.type in ("MatMul", "BatchMatMulV2") and 1 not in op.outputs[0].shape[-2:]:
            transposed = op.get_attr("transpose_a" if op.type == "MatMul" else "adj_x")
            total += 2 * op.outputs[0].shape.num_elements() * op.inputs[0].shape[-2 if transposed else -1]
    return total


def graphs():
    return {id(found): found for found in gc.get_objects() if isinstance(found, tf.Graph)}


@pytest.mark.slow
def test_operations_of_training_are_the_products_of_its_graph():
    before = graphs()
    training = language_models.library_work("training", SHAPE)
    training.once()
    new = [graph for key, graph in graphs().items() if key not in before]
    (graph,) = [graph for graph in new if any(op.type == "ResourceApplyAdam" for op in graph.get_operations())]
    zero_keys = 3 * 2 * 2 * 2 * 5 * 8  # the column of zeros of rel_shift: three products of two layers
    assert operations_of(graph) == language_models.training_operations(SHAPE) + zero_keys


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["training", *(pytest.param(m, marks=SLOW) for m in ("evaluation", "generation"))])
def test_contestants_do_the_same_work(mode):
    uniform = math.log(SHAPE["n_token"])  # the loss of small initial weights
    makers = contestants.make_contestants(mode)
    reference, library = (makers[name]({**SHAPE, "n_layer": 1}) for name in list(makers)[:2])
    if mode == "generation":
        assert reference.once().shape == (1, 2)  # a token of every row
        assert library.once().shape == (2, 1 + 5)
    else:
        np.testing.assert_allclose([np.mean(reference.once()), library.once()], uniform, rtol=0.02)


def test_a_token_reads_weights_keys_values_and_position_keys():
    lm = txl_tf.TransformerXLLM(**language_models.model_arguments(SHAPE))
    weights, bins = generation.precompute_for(lm, lm.decoding_cache())
    state = lm.decoding_cache().initial_state(SHAPE["batch_size"])
    kernels = [kernel for layer in weights for kernel in (*layer.qkv, layer.o, *layer.ff[::2])]
    tables = [layer.position_keys[:, : SHAPE["mem_len"] + 1] for layer in weights]
    read = [*kernels, *tables, *state.keys, *state.values, bins[0][0]]
    assert language_models.bytes_of_token(SHAPE, 4) == 4 * sum(tensor.shape.num_elements() for tensor in read)


@SLOW
def test_contestants_of_scoring_score_the_same_lines(tmp_path):
    shape = {**SHAPE, "lines": 6}
    processes.train_to_score(ROOT, shape, tmp_path)
    makers = contestants.make_contestants("scoring", run=tmp_path / "lm")
    alone, together = (makers[name](shape).once() for name in list(makers)[:2])
    lengths = np.array([len(line.split()) + 1 for line in language_models.random_lines(shape)])
    np.testing.assert_allclose(alone, together, rtol=1e-4)
    np.testing.assert_allclose(together, lengths * math.log(SHAPE["n_token"]), rtol=0.05)  # small initial weights
    counts = [contestants.tokens_of_work("scoring", name, shape) for name in makers]
    assert counts == [lengths.sum(), lengths.sum(), 2 * 5]
    evaluation = makers[language_models.EVALUATION](shape)
    assert evaluation.once() == pytest.approx(math.log(SHAPE["n_token"]), rel=0.05)


@SLOW
def test_contestants_of_writing_write_what_they_are_counted_for():
    makers, shape = contestants.make_contestants("writing"), {**SHAPE, "batch_size": 1}
    for name, make in makers.items():
        written, counted = make(shape).once(), contestants.tokens_of_work("writing", name, shape)
        if name == "a prompt of 5,000 tokens is read":
            assert (written.shape, counted) == ((1, 5001), 5000)
        elif name == "a text of 5,000 tokens goes on":
            assert (written[0].shape, counted) == ((1, 5), 5)
        else:
            assert written[:, 1:].size == counted
    assert {contestants.tokens_of_work("writing", name, shape) for name in makers} == {5, 10, 20, 80, 5000}


def test_pairs_are_words_and_the_same_backwards_in_batches():
    shape = {"batch_size": 4, "pairs": 40}
    sources, targets = pairs.word_pairs(40)
    assert targets == [[*reversed(source[:-1]), 2] for source in sources]
    assert {i for source in sources for i in source[:-1]} <= set(range(3, 29))  # a to z
    assert {source[-1] for source in sources} == {2}
    widths = {}
    for by_length in (False, True):
        found = pairs.pair_batches(shape, by_length)
        assert len(found) == 10
        rows = [row for source, target in found for row in zip(source.tolist(), target.tolist(), strict=True)]
        unpadded = [([i for i in source if i], [i for i in target if i]) for source, target in rows]
        expected = [(source, [1, *target]) for source, target in zip(sources, targets, strict=True)]
        assert sorted(unpadded) == sorted(expected)
        widths[by_length] = sum(source.size for source, _ in found)
    assert sum(map(len, sources)) <= widths[True] < widths[False]
    assert contestants.tokens_of_work("seq2seq_pairs", REFERENCE, shape) == sum(map(len, targets))


def test_inputs_of_taggers_are_characters_and_then_their_words():
    def sentence(*arrays):
        return taggers.Sentence(*(np.array(array, np.int32) for array in arrays))

    batch = [
        sentence([5, 6, 7], [9], [15, 16, 17], [1], [2], [0, 1, 2]),
        sentence([8], [], [18], [], [], [3]),
    ]
    inputs = taggers.lattice_inputs(batch)
    assert {name: array.tolist() for name, array in inputs.items()} == {
        "lattice": [[5, 6, 7, 9], [8, 0, 0, 0]],
        "bigrams": [[15, 16, 17], [18, 0, 0]],
        "seq_len": [3, 1],
        "lex_num": [1, 0],
        "pos_s": [[0, 1, 2, 1], [0, 0, 0, 0]],
        "pos_e": [[0, 1, 2, 2], [0, 0, 0, 0]],
    }
    characters = {name: array.tolist() for name, array in taggers.character_inputs(batch).items()}
    assert characters == {"chars": [[5, 6, 7], [8, 0, 0]], "bigrams": [[15, 16, 17], [18, 0, 0]]}


LOSSES = """
import json, sys
from benchmarking import peers
work, weights = peers.make_work(sys.argv[1], json.loads(sys.argv[2]))
print(json.dumps([weights, [work.once() for _ in range(100)]]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["GPT float32", "x-transformers float32", "JAX float32"])
def test_peers_learn_their_batch(name):
    for package in ["jax"] if name.startswith("JAX") else ["torch", "x_transformers"]:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: it is in the extra peers")
    shape = {**SHAPE, "tgt_len": 8, "mem_len": 8, "d_model": 64, "d_head": 32}
    command = [sys.executable, "-c", LOSSES, name, json.dumps(shape)]  # PyTorch and TensorFlow do not share a process
    environment = processes.environment_of(ROOT / "tools")
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    weights, losses = json.loads(done.stdout.splitlines()[-1])
    assert weights > 20 * 64
    assert abs(losses[0] - np.log(20)) < 0.5 and losses[-1] < 1.5


def test_products_alone_are_those_of_a_training_step():
    shape = {**SHAPE, "cutoffs": [], "tgt_len": 4, "mem_len": 12, "n_layer": 3}
    made = []
    products.products_work(shape, lambda them: made.append(them) or (lambda: None))()
    layer, softmax = (sum(product.operations for product in them) for them in made)
    assert 3 * layer + softmax == language_models.training_operations(shape)


@pytest.mark.parametrize("transposed", ["", "a", "b"])
def test_the_gradients_of_a_product_are_the_products_of_its_factors(transposed):
    product = products.Product(2, 3, 4, 5, transposed)
    a, b = (np.ones(size) for size in product.factors)
    a, b = a.swapaxes(1, 2) if transposed == "a" else a, b.swapaxes(1, 2) if transposed == "b" else b
    upstream = a @ b
    for gradient, factor in ((products.input_gradient(product), a), (products.weight_gradient(product), b)):
        assert (gradient.rows, gradient.columns) == factor.shape[1:]
        assert 2 * upstream.size * 4 == gradient.operations == product.operations


def test_a_model_without_memory_sees_as_many_tokens():
    shape = peers.without_memory({**SHAPE, "tgt_len": 4, "mem_len": 12, "batch_size": 8})
    assert (shape["batch_size"], shape["tgt_len"], shape["mem_len"]) == (2, 16, 0)


def test_a_step_that_does_not_fill_a_row_of_a_model_without_memory_is_refused():
    shape = {**SHAPE, "tgt_len": 4, "mem_len": 12}
    with raises_parameter("batch_size", 3, limit="4"):
        peers.without_memory({**shape, "batch_size": 3})
    assert peers.without_memory({**shape, "batch_size": 4})["batch_size"] == 1


@pytest.mark.parametrize("name, tokens", [("GPT float32", 32), ("GPT-products bfloat16", 32), ("JAX float32", 44)])
def test_the_tokens_of_a_peer_are_those_that_it_computes(monkeypatch, name, tokens):
    """Eleven rows of 4 tokens are two rows of 16, and 12 tokens more."""
    counted = []
    monkeypatch.setattr(peers, "make_work", lambda name, shape: (None, 7))
    monkeypatch.setattr(peers, "do_twice", lambda work, tokens: counted.append(tokens))
    peers.begin("peers", name, {**SHAPE, "tgt_len": 4, "mem_len": 12, "batch_size": 11})
    assert counted == [tokens]


DEEP = """
import json, sys
from benchmarking import peers
print(json.dumps([peers.jax_work({**json.loads(sys.argv[1]), "n_layer": n})[1] for n in (1, 20)]))
"""


@pytest.mark.slow
def test_a_peer_in_jax_may_have_many_layers():
    if importlib.util.find_spec("jax") is None:
        pytest.skip("jax is not installed: it is in the extra peers")
    command = [sys.executable, "-c", DEEP, json.dumps(SHAPE)]
    done = subprocess.run(command, capture_output=True, text=True, env=processes.environment_of(ROOT / "tools"))
    assert done.returncode == 0, done.stderr[-2000:]
    one, twenty = json.loads(done.stdout.splitlines()[-1])
    d_model, width, d_inner = 8, 8, 12
    of_layer = d_model * 3 * width + d_model * width + width * d_model + 2 * d_model * d_inner + d_inner + 5 * d_model
    assert twenty - one == 19 * of_layer


def test_a_peer_that_cannot_be_built_is_named(benchmark, set_flags, monkeypatch, capsys):
    class Failing(contextlib.nullcontext):
        def __init__(self, program):
            super().__init__(self)

        def call(self, task, **arguments):
            raise ValueError("No module named 'torch'")

    set_flags()
    monkeypatch.setattr(processes, "Process", Failing)
    with contextlib.ExitStack() as stack:
        assert benchmark.start("peers", "GPT float32", ROOT, SHAPE, 1, "folder", stack) is None
    assert "GPT float32" in (printed := capsys.readouterr().out) and "torch" in printed


@pytest.mark.parametrize("lattice", [False, True])
def test_sentences_are_all_in_the_batches_and_those_of_similar_lengths_together(lattice):
    shape = {"sentences": 40, "batch_size": 4, "tgt_len": 0, "n_token": 50, "n_bigram": 60, "n_tag": 5}
    sentences = taggers.random_sentences(shape)
    assert all(len(some.words) == len(some.chars) // 2 for some in sentences)
    assert all((some.starts <= some.ends).all() and (some.ends < len(some.chars)).all() for some in sentences)
    sizes = {}
    for by_length in (False, True):
        batches = taggers.sentence_batches(shape, lattice, by_length)
        rows = [row[row > 0].tolist() for inputs, _ in batches for row in inputs["lattice" if lattice else "chars"]]
        expected = [[*some.chars, *(some.words if lattice else [])] for some in sentences]
        assert sorted(rows) == sorted(expected)
        assert all(inputs["bigrams"].shape == tags.shape for inputs, tags in batches)
        sizes[by_length] = sum(tags.size for _, tags in batches)
    tokens = contestants.tokens_of_work("flat" if lattice else "tener", REFERENCE, shape)
    assert tokens == sum(len(some.chars) for some in sentences) <= sizes[True] < sizes[False]


# ------------------------------------------------------------------------------------------------------- the tables


def test_every_other_round_goes_backwards():
    order = []
    turns = {name: lambda name=name: order.append(name) or {"seconds": len(order)} for name in "abc"}
    measured = tables.take_turns(turns, rounds=3)
    assert "".join(order) == "abccbaabc"
    assert measured["c"]["seconds"] == [3, 4, 9]


def test_a_ratio_is_the_median_over_turns_and_above_1_where_the_contestant_is_better(capsys):
    turns = {
        "reference": iter([{"seconds": 2.0, "mb": 5}, {"seconds": 4.0, "mb": 7}, {"seconds": 9.0, "mb": 6}]),
        "mine": iter([{"seconds": 1.0, "mb": 1}, {"seconds": 1.0, "mb": 1}, {"seconds": 3.0, "mb": 1}]),
    }
    measured = tables.take_turns({name: found.__next__ for name, found in turns.items()}, rounds=3)
    assert measured["reference"] == {"seconds": [2, 4, 9], "mb": [5, 7, 6]}
    rows = tables.rows_of("startup", "seconds", measured)
    common = {"mode": "startup", "mb": 6, "ratio_quartiles": [1, 1]}
    assert rows[0] == {**common, "contestant": "reference", "seconds": 4, "quartiles": [3, 6.5], "ratio": 1}
    common = {"mode": "startup", "mb": 1, "ratio_quartiles": [2.5, 3.5]}
    assert rows[1] == {**common, "contestant": "mine", "seconds": 1, "quartiles": [1, 2], "ratio": 3}
    rates = {name: {"words_per_second": figures["seconds"]} for name, figures in measured.items()}
    rows = tables.rows_of("preparation", "words_per_second", rates)
    np.testing.assert_allclose(rows[1]["ratio"], 1 / 3)
    tables.print_table("preparation", rows)
    *_, heading, first, second = (line.split() for line in capsys.readouterr().out.splitlines())
    assert heading == ["contestant", "words/s", "quartiles", "ratio", "quartiles"]
    assert first == ["reference", "4", "3", "-", "6", "1.000", "1.00", "-", "1.00"]
    assert second == ["mine", "1", "1", "-", "2", "0.333", "0.29", "-", "0.42"]


def test_the_summary_has_the_median_of_the_runs(capsys):
    ratios = {"other": [1.0, 1.0, 1.0], "this": [0.9, 1.2, 1.1]}
    rows = [
        {"mode": mode, "contestant": name, "ratio": ratios[name][run] + (name == "this") * shift, "run": run + 1}
        for run in range(3)
        for mode, shift in (("training", 0), ("writing", 1))
        for name in ratios
    ]
    rows.append({"mode": "ray_failures", "contestant": "2 workers", "run": 1})  # compared with nothing
    summary = tables.summary_of(rows)
    assert summary[1] == {"mode": "training", "contestant": "this", "ratios": [0.9, 1.2, 1.1], "median": 1.1}
    assert [(row["mode"], row["contestant"], row["median"]) for row in summary] == [
        ("training", "other", 1), ("training", "this", 1.1), ("writing", "other", 1), ("writing", "this", 2.1)
    ]  # fmt: skip
    tables.print_summary("ratios", summary)
    assert capsys.readouterr().out.splitlines() == [
        "",
        "ratios",
        "  mode      contestant  run 1  run 2  run 3  median",
        "  training  this        0.900  1.200  1.100   1.100",
        "  writing   this        1.900  2.200  2.100   2.100",
    ]


def test_costs_by_argument_are_of_the_shapes_that_the_argument_gives(monkeypatch):
    monkeypatch.setattr(scaling, "SCALING", {"training": {"tgt_len": [2, 4], "n_token": [9, 20]}})
    monkeypatch.setattr(scaling, "CUTOFFS", {20: [4]})
    made = []

    def make(shape):
        made.append((shape["tgt_len"], shape["n_token"], shape["cutoffs"]))
        return work.Calls(lambda: None)

    rows = scaling.scale("training", SHAPE, {REFERENCE: make}, rounds=1, seconds=0)
    assert made == [(2, 20, []), (4, 20, []), (5, 9, []), (5, 20, [4])]
    found = [(row["mode"], row["contestant"], row["argument"], row["value"]) for row in rows]
    pairs = [("tgt_len", 2), ("tgt_len", 4), ("n_token", 9), ("n_token", 20)]
    assert found == [("training", REFERENCE, *pair) for pair in pairs]
    assert all(0 < row["microseconds_per_token"] < 1e6 for row in rows)


def test_costs_by_length_are_medians_around_a_number_of_segments(monkeypatch):
    clock = Clock(monkeypatch)
    makers = {REFERENCE: None, "txl_tf float32": lambda shape: work.Steps(Trainee(clock), None, evaluation=True)}
    rows = scaling.scale_length("evaluation", {**SHAPE, "tgt_len": 10}, makers, segments=4)
    assert [row["value"] for row in rows] == [10, 20, 40]  # tokens
    seconds = [2, np.median([3, 4]), np.median([4, 5])]  # of the steps after the first: 2, 3, 4 and 5 s
    np.testing.assert_allclose([row["microseconds_per_token"] for row in rows], np.array(seconds) / 20 * 1e6)


# ------------------------------------------------------------------------------------------- other processes


def test_both_prepare_the_same_tokens_from_a_text_of_repeated_words(benchmark, tmp_path):
    for split, megabytes in (("train", 0.05), ("valid", 0.01), ("test", 0.01)):
        benchmark.write_text(tmp_path / f"{split}.txt", n_token=500, megabytes=megabytes)
    expected = reference_data.prepare(tmp_path, tmp_path / "reference")
    prepared = corpus.prepare(tmp_path / "library", "wt103", data_path=tmp_path)
    for split, ids in expected.items():
        np.testing.assert_array_equal(prepared.splits[split], ids)
    assert (tmp_path / "reference/vocab.txt").read_text() == (tmp_path / "library/vocab.txt").read_text()
    assert tasks.prepare("txl_tf", tmp_path)["words"] == sum(map(len, expected.values()))
    counts = np.bincount(expected["train"])
    assert len(counts) > 300 and counts.max() > 20 * np.median(counts)


@pytest.mark.slow
def test_the_exported_reference_predicts_what_the_model_does(tmp_path):
    shape = {**SHAPE, "n_layer": 1}
    written = tasks.export(REFERENCE, shape, str(tmp_path / "model"))
    loaded = tasks.load(str(tmp_path / "model"))
    assert written["megabytes"] > 0 and loaded["load_seconds"] > 0
    assert tasks.turn(seconds=0)["milliseconds_per_step"] > 0
    signatures = tf.saved_model.load(str(tmp_path / "model")).signatures
    state = signatures["initial_state"](batch_size=tf.constant(1))["state"]
    tokens = tf.constant([[3, 1, 2]])
    found = signatures["next"](tokens=tokens, state=state)
    model = ReferenceModel(**language_models.model_arguments(shape))
    expected = model.log_probs(tf.transpose(tokens), model.initial_mems(1))[-1]
    np.testing.assert_allclose(found["log_probs"], tf.math.top_k(expected, 10).values, rtol=1e-5)
    again = signatures["next"](tokens=tokens, state=found["state"])
    assert np.abs(again["log_probs"] - found["log_probs"]).max() > 1e-6  # the memory counts


@SLOW
def test_replicas_train_in_a_process():
    found = processes.alone("train_replicas", name="txl_tf float32", shape=SHAPE, replicas=2, seconds=0)
    assert 0 < found["tokens_per_second"] < 1e6 and found["peak_memory_mb"] > 100


@SLOW
def test_a_step_of_two_workers_all_reduces_the_gradients_once_and_three_numbers(benchmark):
    lm = txl_tf.TransformerXLLM(**language_models.model_arguments(SHAPE))
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


def test_a_process_answers_with_figures_until_it_fails_and_says_why(tmp_path, monkeypatch):
    (tmp_path / "answering.py").write_text(ANSWERING)
    monkeypatch.setattr(processes, "TASKS", tmp_path / "answering.py")
    with processes.Process("here") as process:
        for n in (1, 2):
            assert process.call("turn", n=n) == {"function": "turn", "checkout": "here", "n": n}
        with pytest.raises(ValueError, match="^no_such of {'n': 3} failed: KeyError: 'no_such'$") as error:
            process.call("no_such", n=3)
        assert "Traceback" in str(error.value.__cause__)
    assert processes.alone("turn", n=4) == {"function": "turn", "checkout": str(ROOT), "n": 4}


@SLOW
def test_a_process_that_fails_says_why():
    with pytest.raises(ValueError, match="^no_such of {'n': 1} failed: KeyError: 'no_such'$"):
        processes.alone("no_such", n=1)


@SLOW
def test_a_process_imports_the_library_of_its_checkout(tmp_path):
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
    ours = ["txl_tf float32", "txl_tf bfloat16", "txl_tf float32 1 part"]
    assert [row["contestant"] for row in rows] == [REFERENCE, *ours, *read]
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
    assert next(iter(imports)) == "txl_tf" and "tensorflow" in imports  # Keras may be an import of TensorFlow's
    assert 0.1 < imports["tensorflow"] < imports["txl_tf"]
    assert all(0 < seconds <= imports["txl_tf"] for seconds in imports.values())
    assert 0.1 < library["seconds"] < library["command_seconds"]
    assert min(reference["peak_memory_mb"], library["peak_memory_mb"]) > 100
    assert f"txl_tf {imports['txl_tf']:.2f} s, " in printed


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
    figures, printed = run("--mode=scoring,startup", f"--against={ROOT}", "--rounds=1", "--seconds=0.1", "--runs=2")
    rows = figures["rows"]
    names = "other float32", "this float32"
    expected = [(run, mode, name) for run in (1, 2) for mode in ("scoring", "startup") for name in names]
    assert [(row["run"], row["mode"], row["contestant"]) for row in rows] == expected
    for other, this in zip(rows[::2], rows[1::2], strict=True):
        assert other["ratio"] == 1
        low, high = this["ratio_quartiles"]
        assert 0.05 < low == this["ratio"] == high < 20
        np.testing.assert_allclose(this["peak_memory_mb"], other["peak_memory_mb"], rtol=0.2)
    assert [(row["mode"], row["contestant"]) for row in figures["summary"]] == [row[1:] for row in expected[:4]]
    assert figures["summary"][1]["ratios"] == [rows[1]["ratio"], rows[5]["ratio"]]
    assert f"{figures['machine']['processor']}; this {figures['commits']['this']}, other" in printed


FIRST_STEP = """
import sys, time, txl_tf
print("step 1/1 ", flush=True)
time.sleep(0.2)
sys.exit(txl_tf.status)
"""


def test_programs_are_those_of_a_checkout_and_import_its_library(tmp_path):
    for name, status in (("other", 0), ("failing", "out of luck")):
        (tmp_path / name / "txl_tf").mkdir(parents=True)
        (tmp_path / name / "txl_tf/__init__.py").write_text(f"status = {status!r}")
        (tmp_path / name / "tools").mkdir()
        for program_name in ("train.py", "tools/score.py"):
            (tmp_path / name / program_name).write_text(FIRST_STEP)
    figures = processes.watch(SHAPE, "text.txt", tmp_path / "other")
    assert 0 < figures["seconds"] < figures["command_seconds"] - 0.2
    figures = processes.answer("score.py", tmp_path, tmp_path / "other")
    assert 0 < figures["seconds"] < figures["command_seconds"] - 0.2
    with raises_naming(ValueError, "train.py", "out of luck"):
        processes.watch(SHAPE, "text.txt", tmp_path / "failing")
    with raises_naming(ValueError, "score.py", "out of luck"):
        processes.answer("score.py", tmp_path, tmp_path / "failing")


@pytest.fixture
def set_flags(benchmark):
    """Sets the flags of the benchmark, all others to their defaults."""

    def set_flags(*arguments):
        benchmark.FLAGS.unparse_flags()
        for name in benchmark.FLAGS:
            benchmark.FLAGS[name].unparse()
        benchmark.FLAGS(["benchmark.py", *arguments])

    return set_flags


def test_modes_are_those_that_the_flags_name(benchmark, set_flags):
    set_flags()
    first = ["training", "training_words", "evaluation", "generation"]
    assert benchmark.chosen_modes() == [*first, "preparation", "export", "startup", "first_answer"]
    set_flags("--mode=all")
    assert benchmark.chosen_modes() == list(SHAPES)
    set_flags("--mode=all", f"--against={ROOT}")
    assert benchmark.chosen_modes() == [mode for mode in SHAPES if mode not in (*OF_THEIR_OWN, "peers")]
    set_flags("--scaling")
    assert benchmark.chosen_modes() == ["training", "evaluation", "generation"]


def test_contestants_are_those_that_the_flags_name(benchmark, set_flags):
    set_flags("--contestants=bfloat16,row")
    (group,) = benchmark.groups_of("generation")
    assert list(group) == [REFERENCE, "txl_tf bfloat16", "read of its bytes bfloat16"]
    (group,) = benchmark.groups_of("writing")
    assert list(group) == ["one row", "2 rows", "4 rows", "16 rows"]
    set_flags("--against=/other")
    both = {
        mode: [list(group) for group in benchmark.groups_of(mode)]
        for mode in SHAPES
        if mode not in (*OF_THEIR_OWN, "peers")
    }
    assert both["preparation"] == [["other", "this"]]
    assert both["scoring"] == both["startup"] == [["other float32", "this float32"]]
    assert both["seq2seq"] == [["other float32", "this float32"], ["other bfloat16", "this bfloat16"]]
    assert both["flat"] == [["other float32", "this float32"]]
    assert [this for _, this in both["writing"]] == [
        "this 4 rows", "this top_p 0.9", "this a prompt of 5,000 tokens is read"
    ]  # fmt: skip
    assert [this for _, this in both["first_answer"]] == ["this generate.py", "this score.py", "this tag.py"]
    recomputed = "this float32 recompute"
    assert [this for _, this in both["training"]] == ["this float32", "this bfloat16", recomputed]
    assert all(both.values())
    (group,) = benchmark.groups_of("scoring")
    assert group == {"other float32": ("txl_tf float32", "/other"), "this float32": ("txl_tf float32", ROOT)}
    set_flags("--against=/other", "--contestants=bfloat16,row")
    assert [list(group) for group in benchmark.groups_of("flat")] == [["other bfloat16", "this bfloat16"]]
    assert [this for _, this in benchmark.groups_of("writing")] == [
        "this one row", "this 2 rows", "this 4 rows", "this 16 rows"
    ]  # fmt: skip


def test_several_runs_have_a_third_of_the_turns_each(benchmark, set_flags, monkeypatch):
    monkeypatch.setattr(benchmark, "compare", lambda mode, shape, rounds, *_: rounds)

    def rounds(*arguments):
        set_flags(*arguments)
        return [benchmark.rows_of_mode(mode, SHAPE, {}, "folder") for mode in ("training", "startup")]

    assert rounds() == [9, 3]
    assert rounds("--runs=3") == [3, 1]
    assert rounds("--quick") == [2, 1]
    assert rounds("--runs=3", "--quick") == [1, 1]
    assert rounds("--runs=3", "--rounds=4") == [4, 4]


def not_measured(dtype):
    raise AssertionError("measured")


@pytest.mark.parametrize(
    "arguments, name, value",
    [
        (["--mode=training,reading"], "mode", ["reading"]),
        (["--mode=export,ray", f"--against={ROOT}"], "mode", ["ray"]),
        (["--mode=writing,training", "--contestants=row"], "contestants", ["row"]),
        (["--mode=workers", "--contestants=row"], "contestants", ["row"]),
        (["--scaling", "--contestants=float32"], "contestants", ["float32"]),
        (["--mode=workers", "--batch_size=6"], "batch_size", 6),
        (["--mode=softmax_wt103,workers", "--batch_size=6"], "batch_size", 6),
        (["--mode="], "mode", []),
        (["--mode=training", "--dropout=2"], "dropout", 2),
        (["--mode=startup,seq2seq", "--n_head=3"], "d_model", 256),
        (["--mode=flat_long", "--n_head=3"], "d_model", 128),
        (["--mode=writing", "--batch_size=4"], "batch_size", 4),
        (["--mode=generation,evaluation", "--jit"], "jit", True),
        (["--against=nowhere"], "against", "nowhere"),
    ],
    ids=str,
)
def test_a_bad_flag_is_an_error_with_its_name(benchmark, set_flags, arguments, name, value, monkeypatch):
    monkeypatch.setattr(benchmark, "matmul_peak", not_measured)
    with raises_parameter(name, value):
        set_flags(*arguments)
        benchmark.main()


@pytest.mark.parametrize(
    "arguments, facts",
    [
        (["--mode=training", "--runs=0"], ["runs"]),
        (["--mode=training_words", "--n_token=9000"], ["cutoffs", "n_token=9000"]),
        (["--cutoffs=abc"], ["--cutoffs", "'abc'", "20000,40000"]),
        (["--rounds=-1"], ["rounds"]),
        (["--seconds=-1"], ["seconds"]),
        (["--batch_size=0"], ["batch_size"]),
        (["--megabytes=0"], ["megabytes", 0.001]),
    ],
    ids=str,
)
def test_bad_flags_are_one_clear_error(benchmark, set_flags, arguments, facts, monkeypatch):
    monkeypatch.setattr(benchmark, "matmul_peak", not_measured)
    with raises_naming((ValueError, flags.Error), *facts):
        set_flags(*arguments)
        benchmark.main()
