"""Training steps that compute parts of a batch at the same time, against steps that compute the whole batch."""

import contextlib
import os
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import raises_parameter

import txl_tf
from txl_tf.config import EvaluationConfig, ModelConfig, OptimizerConfig, TrainingConfig
from txl_tf.runs.evaluate import evaluate_run
from txl_tf.runs.train import train_run
from txl_tf.training import threads

pytestmark = pytest.mark.ci

SLOW = pytest.mark.slow
ROWS = 4
DROPPING = {"n_layer": 2, "dropout": 0.2, "dropatt": 0.1}


def trained(small_lm, data, parts=1, model=DROPPING, **compiled):
    """Weights, memory and logs of an epoch of training."""
    keras.utils.set_random_seed(0)
    lm = small_lm(**model)
    lm.compile(txl_tf.make_optimizer(learning_rate=0.01, train_steps=9), parallel_parts=parts, **compiled)
    history = lm.fit(data, verbose=0).history
    return [variable.numpy() for variable in lm.trainable_variables], lm.carried_arrays()["mems"], history


def assert_same_training(small_lm, data, model=DROPPING, tolerance=2e-5, **compiled):
    expected, expected_mems, expected_history = trained(small_lm, data, model=model, run_eagerly=True)
    weights, mems, history = trained(small_lm, data, parts=2, model=model, **compiled)
    for found, array in zip(weights, expected, strict=True):
        np.testing.assert_allclose(found, array, rtol=0, atol=tolerance)
    np.testing.assert_allclose(mems, expected_mems, rtol=0, atol=10 * tolerance)
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(history[name], expected_history[name], rtol=10 * tolerance)


@pytest.mark.parametrize(
    "model, compiled",
    [
        ({"n_layer": 1}, {}),
        pytest.param({}, {}, marks=SLOW),
        pytest.param({}, {"gradient_accumulation_steps": 2}, marks=SLOW),
        pytest.param({}, {"run_eagerly": True}, marks=SLOW),
        pytest.param({}, {"run_eagerly": True, "gradient_accumulation_steps": 2}, marks=SLOW),
        pytest.param({}, {"steps_per_execution": 3}, marks=SLOW),
        pytest.param({"mem_len": 0}, {}, marks=SLOW),
        pytest.param({"recompute": True}, {}, marks=SLOW),
        pytest.param({"cutoffs": [5, 9], "div_val": 2}, {}, marks=SLOW),
        pytest.param({"positions": "rotary", "d_head": 4}, {}, marks=SLOW),
    ],
    ids=str,
)
def test_parts_train_as_the_whole_batch_does_dropout_included(small_lm, small_batches, model, compiled):
    data = tf.data.Dataset.from_tensor_slices(tuple(small_batches(n=3, batch=ROWS)))
    assert_same_training(small_lm, data, {**DROPPING, **model}, **compiled)


@SLOW
def test_parts_in_half_precision_train_nearly_as_the_whole_batch(small_lm, small_batches):
    data = tf.data.Dataset.from_tensor_slices(tuple(small_batches(n=3, batch=ROWS)))
    model = {**DROPPING, "dtype": "mixed_bfloat16"}
    assert_same_training(small_lm, data, model, tolerance=0.02)


def test_weights_count_over_the_whole_batch_even_if_a_part_has_none(small_lm, small_batches):
    tokens, labels = small_batches(n=2, batch=ROWS)
    weights = np.random.default_rng(0).uniform(size=labels.shape).astype(np.float32)
    weights[0, :2] = 0  # all of the first part
    done = np.zeros(tokens.shape, bool)
    done[0, 1, 2] = done[1, 3, 0] = True
    data = tf.data.Dataset.from_tensor_slices(({"tokens": tokens, "done": done}, labels, weights))
    assert_same_training(small_lm, data, {**DROPPING, "n_layer": 1})


@SLOW
def test_a_penalty_counts_once(small_lm, small_batches):
    def make(**options):
        lm = small_lm(**options)
        lm.network.embedding.weights[0].regularizer = keras.regularizers.L2(0.1)
        return lm

    data = tf.data.Dataset.from_tensor_slices(tuple(small_batches(n=2, batch=ROWS)))
    assert_same_training(make, data)


@SLOW
def test_two_replicas_with_two_parts_each_train_as_one(small_lm, small_batches, two_replicas):
    def make(**options):
        with two_replicas.scope():
            return small_lm(**options)

    data = tf.data.Dataset.from_tensor_slices(tuple(small_batches(n=3, batch=ROWS)))
    expected, _, _ = trained(small_lm, data)
    with two_replicas.scope():
        found, _, _ = trained(make, data, parts=2)
    for array, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(array, other, rtol=0, atol=2e-5)


def test_what_parts_cannot_do_is_refused(small_lm, small_batches):
    lm = small_lm(n_layer=1)
    for compiled in ({"jit_compile": True}, {"static_shapes": True}):
        with raises_parameter("parallel_parts", 2, limit="1"):
            lm.compile("sgd", parallel_parts=2, **compiled)
    with raises_parameter("parallel_parts", 0, limit="1"):
        lm.compile("sgd", parallel_parts=0)
    lm.compile("sgd", parallel_parts=3)
    batches = small_batches(n=1, batch=ROWS)
    with raises_parameter("batch", ROWS, limit="3"):
        lm.fit(tf.data.Dataset.from_tensor_slices(tuple(batches)))
    with raises_parameter("batch", ROWS, limit="3"):
        lm.train_on_batch(*(ids[0] for ids in batches))


# ---------------------------------------- evaluation


def evaluated(small_lm, data, parts, model, **compiled):
    lm = small_lm(**{"n_layer": 1, **model})
    lm.compile(parallel_parts=parts, metrics=["bits"], **compiled)
    return lm.evaluate(data, verbose=0)


@pytest.mark.parametrize(
    "model, compiled",
    [
        ({}, {}),
        pytest.param({}, {"run_eagerly": True}, marks=SLOW),
        pytest.param({}, {"steps_per_execution": 2}, marks=SLOW),
        pytest.param({"mem_len": 0}, {}, marks=SLOW),
        pytest.param({"cutoffs": [5, 9], "div_val": 2}, {}, marks=SLOW),
        pytest.param({"dtype": "mixed_bfloat16"}, {}, marks=SLOW),
    ],
    ids=str,
)
def test_an_evaluation_in_parts_is_that_of_the_whole_batch(small_lm, small_batches, model, compiled):
    tokens, labels = small_batches(n=3, batch=ROWS)
    weights = np.random.default_rng(0).uniform(size=labels.shape).astype(np.float32)
    done = np.zeros(tokens.shape, bool)
    done[0, 1, 2] = done[1, 3, 0] = True
    given = {"tokens": tokens, "done": done} if model.get("mem_len") != 0 else tokens
    data = tf.data.Dataset.from_tensor_slices((given, labels, weights))
    expected = evaluated(small_lm, data, 1, model, run_eagerly=True)
    for parts in (2, 6):  # of 6 parts and 4 rows, the parts are 2
        rtol = 1e-2 if "dtype" in model else 1e-5
        np.testing.assert_allclose(evaluated(small_lm, data, parts, model, **compiled), expected, rtol=rtol)


def test_a_step_of_one_s_own_evaluates_the_whole_batch(small_batches):
    rows = []

    class Own(txl_tf.TransformerXLLM):
        def test_step(self, data, carried):
            nll, _, carried = self.evaluation_nll(*data, carried)
            rows.append(nll.shape[0])
            return {"loss": tf.reduce_mean(nll)}, carried

    lm = Own(n_token=11, n_layer=1, d_model=4, d_embed=4, n_head=1, d_head=4, d_inner=4, mem_len=4)
    lm.compile(parallel_parts=2)
    lm.evaluate(tf.data.Dataset.from_tensor_slices(tuple(small_batches(n=1, batch=ROWS, n_token=11))), verbose=0)
    assert rows == [ROWS]


# ---------------------------------------- threads, and the number of parts that a run chooses


@pytest.mark.parametrize(
    "rows, n_tokens, weights_per_token, expected",
    [
        (8, 1e6, 0, 4),
        (8, 1e6, 9_000, 4),
        (6, 1e6, 0, 2),  # 3 parts would leave a core idle
        (7, 1e6, 0, 1),
        (8, 1e4, 0, 1),  # too few tokens
        (8, 1e6, 11_000, 1),  # too many weights
    ],
)
def test_the_number_of_parts(monkeypatch, rows, n_tokens, weights_per_token, expected):
    monkeypatch.setattr(threads, "cores", lambda: 4)
    assert threads.choose_parallel_parts(rows, n_tokens, weights_per_token) == expected


@pytest.mark.parametrize("cores, expected", [(3, 1), (6, 2), (12, 4), (16, 8)])
def test_the_parts_leave_no_core_idle(monkeypatch, cores, expected):
    monkeypatch.setattr(threads, "cores", lambda: cores)
    assert threads.choose_parallel_parts(64, 1e6) == expected


def test_an_accelerator_computes_the_whole_batch(monkeypatch):
    monkeypatch.setattr(threads, "cores", lambda: 4)
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: ["GPU:0"] if kind == "GPU" else [])
    assert threads.choose_parallel_parts(8, 1e6) == 1


class Begun(Exception):
    """Ends a run when its training begins."""


class RecordParts(keras.callbacks.Callback):
    """Records the number of parts of a run whose training begins, and ends it unless `trains`."""

    def __init__(self, trains):
        super().__init__()
        self.trains = trains

    def on_train_begin(self, logs=None):
        self.parts = self.model.parallel_parts
        if not self.trains:
            raise Begun


def run_of(tmp_path, final=None, trains=False, **training):
    """Starts a run of a small model, or trains it for two steps. Returns the number of its parts."""
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "text.txt").write_text("to be or not to be\n" * 60)
    record = RecordParts(trains)
    with contextlib.suppress(Begun):
        train_run(
            tmp_path / "run",
            data={"dataset": "text", "data_path": str(tmp_path / "text.txt"), "level": "char"},
            model=ModelConfig(n_layer=1, d_model=8, d_embed=8, n_head=1, d_head=4, d_inner=8, mem_len=4),
            optimizer=OptimizerConfig(),
            training=TrainingConfig(
                tgt_len=8, train_batch_size=4, train_steps=2, iterations=2, save_steps=2, **training
            ),
            final=EvaluationConfig(eval_batch_size=4, max_eval_batch=1, **(final or {})),
            callbacks=[record],
        )
    return record.parts


@pytest.fixture
def two_cores(monkeypatch):
    """A machine of two cores, whose threads can be set. Returns the numbers of parts for which they are set."""
    set_for = []
    monkeypatch.setattr(threads, "MIN_TOKENS", 0)
    monkeypatch.setattr(threads, "cores", lambda: 2)
    monkeypatch.setattr(threads, "set_threads", set_for.append)
    monkeypatch.setattr(threads, "can_set_threads", lambda: True)
    return set_for


def test_a_run_chooses_parts_and_sets_the_threads(two_cores, tmp_path):
    assert run_of(tmp_path / "chosen", trains=True) == 2
    assert run_of(tmp_path / "given", parallel_parts=4) == 4
    assert two_cores == [2, 4]


def test_a_run_has_the_parts_of_the_threads_if_they_cannot_be_set(two_cores, monkeypatch, tmp_path):
    monkeypatch.setattr(threads, "can_set_threads", lambda: False)
    assert run_of(tmp_path / "late") == 1
    monkeypatch.setattr(threads, "_set_for", 2)  # by an earlier run of this process
    assert run_of(tmp_path / "second") == 2
    assert run_of(tmp_path / "late_and_given", parallel_parts=2) == 2
    assert two_cores == []


def test_parts_that_a_run_cannot_have_are_an_error(two_cores, tmp_path):
    with raises_parameter("parallel_parts", 2, limit="1"):
        run_of(tmp_path / "xla", parallel_parts=2, jit_compile=True)
    with raises_parameter("parallel_parts", 4, limit="2"):
        run_of(tmp_path / "final", final={"parallel_parts": 4}, parallel_parts=2)
    with raises_parameter("train_batch_size", 4, limit="3"):
        run_of(tmp_path / "rows", parallel_parts=3)


def test_an_evaluation_chooses_parts(tmp_path, trained_run, request, eager):
    folder, _ = trained_run

    def evaluated(**evaluation):
        sizes = {"tgt_len": 8, "eval_batch_size": 4, "max_eval_batch": 2}
        (nll,) = evaluate_run(str(folder), evaluation=EvaluationConfig(**{**sizes, **evaluation})).values()
        return nll

    expected = evaluated()
    chosen = request.getfixturevalue("two_cores")
    assert evaluated() == pytest.approx(expected, rel=1e-5)
    assert evaluated(parallel_parts=4) == pytest.approx(expected, rel=1e-5)
    evaluated(eval_batch_size=1)
    assert chosen == [2, 4, 1]
    evaluated(token_nll=str(tmp_path / "nll.txt"))
    assert chosen == [2, 4, 1]
    for options in ({"token_nll": str(tmp_path / "nll.txt")}, {"sliding_window": 4}):
        with raises_parameter("parallel_parts", 2, limit="1"):
            evaluated(parallel_parts=2, **options)
    with raises_parameter("eval_batch_size", 4, limit="3"):
        evaluated(parallel_parts=3)


@pytest.mark.parametrize("cores, rows, set_for", [(1, 1, []), (2, 1, [2]), (2, 16, [2]), (2, 17, []), (3, 1, [])])
def test_a_few_texts_have_one_thread_for_each_operation_on_two_cores(two_cores, monkeypatch, cores, rows, set_for):
    monkeypatch.setattr(threads, "cores", lambda: cores)
    threads.set_threads_for_texts(rows)
    assert two_cores == set_for
    monkeypatch.setattr(threads, "can_set_threads", lambda: False)
    threads.set_threads_for_texts(rows)
    assert two_cores == set_for


IN_NEW_PROCESS = """
import sys
import tensorflow as tf
sys.path.insert(0, {tests!r})
from pathlib import Path
from txl_tf.training import threads
threads.cores = lambda: 2
threads.MIN_TOKENS = 0
{body}
get = tf.config.threading
print(get.get_inter_op_parallelism_threads(), get.get_intra_op_parallelism_threads())
"""


def output_of(body, **environment):
    program = IN_NEW_PROCESS.format(tests=os.path.dirname(__file__), body=body)
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={**os.environ, **environment}, check=True
    )
    return found.stdout.split()


@SLOW
def test_a_run_in_a_new_process_sets_the_threads(tmp_path):
    body = "from parallel_parts_test import run_of\nprint(run_of(Path({})))".format
    assert output_of(body(repr(str(tmp_path / "free")))) == ["2", "2", "1"]
    assert output_of(body(repr(str(tmp_path / "set"))), TF_NUM_INTEROP_THREADS="2")[0] == "1"


@SLOW
@pytest.mark.parametrize("parts, operations", [(1, 1), (2, 2), (3, 2)])
def test_as_many_operations_as_parts_run_at_a_time_but_not_more_than_cores(parts, operations):
    body = "from txl_tf.kernels.threads import operations_at_a_time as found\nthreads.set_threads({})\nprint(found())"
    assert output_of(body.format(parts))[0] == str(operations)
    by_variables = body.replace("threads.set_threads({})", "")
    variables = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": str(parts)}
    assert output_of(by_variables, **variables)[0] == str(parts)


@SLOW
def test_threads_are_set_before_tensorflow_starts():
    tried = "tf.constant(1)\ntry:\n    threads.set_threads(2)\nexcept RuntimeError:\n    print('too late')"
    assert output_of("threads.set_threads(2)\n" + tried.replace("2)", "1)")) == ["too", "late", "2", "1"]
    assert output_of("threads.set_threads(1)\n" + tried)[:2] == ["too", "late"]
    assert output_of("print(threads.can_set_threads())\ntf.constant(1)\nprint(threads.can_set_threads())")[:2] == [
        "True",
        "False",
    ]
