"""Training on several replicas, in parts, and by several workers, against training on one device.

As a program, `python tests/distribution_test.py FUNCTION FILE`, this is one worker of those that TF_CONFIG names.
"""

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    ROOT,
    SMALL,
    WatchedTokens,
    free_ports,
    make_run,
    raises_naming,
    raises_parameter,
    train_run,
    word_vocab,
)

import txl_tf
from txl_tf.data.text.batches import Segments
from txl_tf.data.text.corpus import Corpus
from txl_tf.data.token_files import StoredTokens
from txl_tf.runs.families import language_model as runs_of_text
from txl_tf.runs.setup import check_divides
from txl_tf.training import distribution

ROWS, TGT_LEN, STEPS = 6, 5, 20


def text_rows(n=8, rows=ROWS):
    """Words 0 to 22, more rare than frequent ones; the first two rows have no word of the last two bins."""
    text = np.random.default_rng(0).integers(0, 23, [rows, n * TGT_LEN + 1], np.int32)
    text[:2] %= 6
    return text


def batches(n=8, rows=ROWS, repeat=False):
    text = text_rows(n, rows)
    segments = [text[:, i : i + TGT_LEN + 1] for i in range(0, n * TGT_LEN, TGT_LEN)]
    dataset = tf.data.Dataset.from_tensor_slices(np.stack(segments)).map(lambda x: (x[:, :-1], x[:, 1:]))
    return dataset.repeat() if repeat else dataset


class Logs(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        self.rows = []

    def on_train_batch_end(self, batch, logs):
        self.rows.append([logs["loss"], logs["grad_norm"]])


def make_lm(strategy=None, optimizer=None, **options):
    """A model with bins and dropout, always of the same weights."""
    sizes = {**SMALL, "n_layer": 1, "cutoffs": [6, 14], "div_val": 2}
    with (strategy or tf.distribute.get_strategy()).scope():
        keras.utils.set_random_seed(1)
        lm = txl_tf.TransformerXLLM(**sizes, mem_len=4, dropout=0.2, dropatt=0.2, seed=3)
        lm.compile(optimizer or txl_tf.make_optimizer(1e-3, warmup_steps=2, train_steps=30), **options)
    return lm


def left_behind(lm, logs):
    return {
        **{f"weights/{i}": variable.numpy() for i, variable in enumerate(lm.trainable_variables)},
        "mems": lm.carried_arrays()["mems"],
        "logs": np.array(logs.rows),
    }


def train(strategy=None, make_batches=batches, **options):
    """What 20 steps leave behind."""
    lm, logs = make_lm(strategy, **options), Logs()
    fit = {"epochs": 2, "steps_per_epoch": STEPS // 2, "verbose": 0, "callbacks": [logs]}
    history = lm.fit(make_batches(repeat=True), validation_data=make_batches(n=3), **fit).history
    return {
        **left_behind(lm, logs),
        **{name: history[name] for name in ("loss", "grad_norm", "val_loss")},
        "evaluation": lm.evaluate(make_batches(), verbose=0),
    }


def assert_same(run, expected, steps_per_execution=1):
    for name, value in run.items():
        if name == "logs":  # those of the last step of a call
            reference = expected["logs"][steps_per_execution - 1 :: steps_per_execution]
        else:
            reference = expected[name]
        tolerance = 1e-6 if name.startswith("weights") else 1e-5
        np.testing.assert_allclose(value, reference, rtol=0, atol=tolerance, err_msg=name)


@pytest.fixture(scope="module")
def of_one_replica():
    return train()


def two_steps(strategy=None, **options):
    """What two steps leave behind, and the model."""
    lm, logs = make_lm(strategy, **options), Logs()
    lm.fit(batches(n=2), verbose=0, callbacks=[logs])
    return left_behind(lm, logs), lm


@pytest.fixture(scope="module")
def of_two_steps():
    """Eager mode is quick: a graph takes seconds to trace."""
    run, lm = two_steps(run_eagerly=True)
    return {**run, "evaluation": lm.evaluate(batches(n=1), verbose=0)}


def test_two_steps_of_two_replicas_are_those_of_one(two_replicas, of_two_steps):
    run, lm = two_steps(two_replicas, run_eagerly=True, static_shapes=True, bin_capacities=[15, 15])  # for every token
    assert_same({**run, "evaluation": lm.evaluate(batches(n=1), verbose=0)}, of_two_steps)


@pytest.mark.slow
def test_two_steps_in_parts_are_those_of_whole_batches(of_two_steps):
    assert_same(two_steps(gradient_accumulation_steps=3)[0], of_two_steps)


@pytest.mark.slow
@pytest.mark.parametrize(
    "replicas, options",
    [
        (1, {"gradient_accumulation_steps": 3}),
        (1, {"static_shapes": True, "bin_capacities": [30, 30]}),  # for every token
        (2, {"steps_per_execution": 5}),
        (2, {"jit_compile": True}),
        (3, {"static_shapes": True, "bin_capacities": [10, 10]}),
    ],
    ids=str,
)
def test_twenty_steps_with_dropout_are_those_of_one_replica(
    two_replicas, three_replicas, of_one_replica, replicas, options
):
    run = train({1: None, 2: two_replicas, 3: three_replicas}[replicas], **options)
    assert_same(run, of_one_replica, options.get("steps_per_execution", 1))


def make_half(strategy=None, run_eagerly=False):
    """A model of float16."""
    with (strategy or tf.distribute.get_strategy()).scope():
        keras.utils.set_random_seed(1)
        lm = txl_tf.TransformerXLLM(**SMALL, mem_len=4, dropout=0.2, seed=3, dtype="mixed_float16")
        lm.compile(keras.optimizers.SGD(0.5), run_eagerly=run_eagerly)
    return lm


@pytest.mark.slow
def test_float16_on_two_replicas_is_that_of_one_within_its_rounding(two_replicas):
    one, two = make_half(), make_half(two_replicas)
    for lm in (one, two):
        lm.fit(batches(n=6, rows=4), verbose=0)
        assert lm.optimizer.dynamic_scale.numpy() == 2**15  # nothing overflowed
    weights = [lm.get_weights() for lm in (one, two, make_half())]
    moved = max(np.abs(found - start).max() for _, found, start in zip(*weights, strict=True))
    differ = max(np.abs(found - expected).max() for expected, found, _ in zip(*weights, strict=True))
    assert differ < moved * 2**-10  # float16 has 11 bits


@pytest.mark.parametrize(
    "replica, run_eagerly",
    [pytest.param(0, False, marks=pytest.mark.slow), pytest.param(1, False, marks=pytest.mark.slow), (1, True)],
)
def test_an_overflow_on_one_replica_skips_the_step_on_all(two_replicas, replica, run_eagerly):
    lm = make_half(two_replicas, run_eagerly)
    before = lm.get_weights()
    loss_and_gradients = lm._loss_and_gradients

    def overflowing(*args):
        sums, gradients, new_mems = loss_and_gradients(*args)
        here = tf.distribute.get_replica_context().replica_id_in_sync_group
        return sums, [*gradients[:-1], gradients[-1] * tf.where(here == replica, np.inf, 1.0)], new_mems

    lm._loss_and_gradients = overflowing
    lm.fit(batches(n=1, rows=4), verbose=0)
    for expected, variable in zip(before, lm.trainable_variables, strict=True):
        for value in two_replicas.experimental_local_results(variable.value):
            np.testing.assert_array_equal(value, expected)
    assert lm.optimizer.dynamic_scale.numpy() == 2**14 and lm.optimizer.iterations.numpy() == 1


def run_two(function, folder):
    """Two workers call a function of this file, each in its process; returns the arrays that each leaves behind."""
    cluster = {"worker": [f"localhost:{port}" for port in free_ports(2)]}
    workers = []
    for index in range(2):
        config = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}})
        environment = {**os.environ, "TF_CONFIG": config, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, __file__, function, str(folder / f"{index}.npz")]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        workers.append(subprocess.Popen(command, env=environment, **pipes))
    output = [worker.communicate(timeout=240)[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], output
    return [dict(np.load(folder / f"{index}.npz")) for index in range(2)]


@pytest.mark.slow
def test_two_processes_train_as_one_and_each_reads_its_own_rows(of_one_replica, tmp_path):
    for index, run in enumerate(run_two("train_by_fit", tmp_path)):
        assert run.pop("agreed") == 5
        assert run.pop("any") and run.pop("chief") == (index == 0)
        own_rows = np.arange(ROWS) // (ROWS // 2) == index
        for n in (8, 3):  # of the training and of the validation
            np.testing.assert_array_equal(run.pop(f"read/{n}"), np.repeat(own_rows, n * TGT_LEN + 1))
        of_segments = {name: run.pop(f"segments/{name}") for name in of_one_replica}
        assert_same(run, of_one_replica, steps_per_execution=5)
        for name, value in of_segments.items():
            np.testing.assert_array_equal(value, run[name], err_msg=name)


def train_by_fit(path):
    strategy = distribution.make_strategy("multi_worker")
    chief = distribution.is_chief(strategy)
    agreed = distribution.broadcast_from_chief(strategy, 5 if chief else 7)
    anyone = distribution.any_worker(strategy, not chief)
    watched = {}

    def own_segments(n=8, **options):
        """The text of `batches(n)`."""
        watched[n] = watched.get(n) or WatchedTokens(text_rows(n).ravel())
        return Segments(StoredTokens([watched[n]]), ROWS, TGT_LEN, **options)

    run = train(strategy, steps_per_execution=5)
    of_segments = train(strategy, own_segments, steps_per_execution=5)
    run |= {f"segments/{name}": value for name, value in of_segments.items()}
    run |= {f"read/{n}": tokens.reads > 0 for n, tokens in watched.items()}
    np.savez(path, agreed=agreed, any=anyone, chief=chief, **run)


@pytest.mark.slow
def test_a_worker_of_the_program_reads_its_own_rows_of_every_split(tmp_path):
    for index, run in enumerate(run_two("train_by_program", tmp_path)):
        for split, n_tokens in SPLITS.items():
            first, end = np.array([index, index + 1]) * n_tokens // 2
            assert np.flatnonzero(run[split]).tolist() == list(range(first, end))


SPLITS = {"train": 400, "valid": 100, "test": 80}


def train_by_program(path):
    watched = {split: WatchedTokens(np.arange(n) % 23) for split, n in SPLITS.items()}
    tokens = {split: StoredTokens([part]) for split, part in watched.items()}
    known = {split: [split] for split in SPLITS}  # as if they were checksums of a prepared folder
    corpus = Corpus(word_vocab(), [], tokens, by_character=False, checksums=known)
    runs_of_text.open_corpus = lambda data, recorded: corpus
    train_run(Path(path).parent / "run", "text", evaluation={"do_eval": True, "eval_split": "test"})
    np.savez(path, **{split: part.reads > 0 for split, part in watched.items()})


SMALL_PROGRAM = (
    "--d_model=8 --d_embed=8 --n_head=2 --d_head=4 --d_inner=8 --n_layer=1 --tgt_len=4 --mem_len=4 --train_steps=4 "
    "--train_batch_size=4 --eval_batch_size=2"
).split()


def run_two_programs(folder, of_second, of_both=(*SMALL_PROGRAM, "--data_path=text.txt")):
    """Two workers run `train.py` in a folder, the second with more arguments; returns their statuses and errors."""
    cluster = {"worker": [f"localhost:{port}" for port in free_ports(2)]}
    workers = []
    for index, more in enumerate(([], of_second)):
        config = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}})
        command = [
            sys.executable,
            str(ROOT / "train.py"),
            *of_both,
            "--model_dir=run",
            *more,
        ]
        environment = {**os.environ, "TF_CONFIG": config}
        pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True, "cwd": folder}
        workers.append(subprocess.Popen(command, env=environment, **pipes))
    errors = [worker.communicate(timeout=240)[1] for worker in workers]
    return [worker.returncode for worker in workers], errors


@pytest.mark.ci
@pytest.mark.parametrize(
    "of_second, facts",
    [
        (["--learning_rate=0.5", "--train_steps=6"], ["training.learning_rate", "0.5", "training.train_steps", "6"]),
        (["--mixed_precision=auto", "--optimizer=sgd"], ["training.optimizer", "'sgd'"]),
        (["--data_path=other.txt"], ["data.data_path", "other.txt", "fingerprints.train"]),
    ],
)
def test_a_worker_with_other_settings_or_text_is_named_on_all_workers(tmp_path, of_second, facts):
    (tmp_path / "text.txt").write_text("the cat sat on the mat\n" * 40)
    (tmp_path / "other.txt").write_text("the cat sat on the mat\n" * 20 + "the mat sat on the cat\n" * 20)
    statuses, errors = run_two_programs(tmp_path, of_second)
    assert statuses == [1, 1], errors
    for error in errors:
        assert all(fact in error for fact in ["worker 1", *facts]), error
    assert not list(tmp_path.glob("run/*"))


@pytest.mark.parametrize(
    "of_second, statuses",
    [
        pytest.param(["--mem_len=2"], [1, 1], marks=pytest.mark.ci),
        pytest.param(["--eval_path=same.txt"], [0, 0], marks=pytest.mark.slow),
    ],
)
def test_workers_evaluate_with_the_same_settings(tmp_path, of_second, statuses):
    for name in ("text.txt", "same.txt"):
        (tmp_path / name).write_text("w1 w2 w3\n" * 40)
    make_run(tmp_path / "run", word_vocab())
    both = ["--do_eval_only", "--eval_path=text.txt", "--eval_batch_size=2", "--tgt_len=4"]
    found, errors = run_two_programs(tmp_path, of_second, both)
    assert found == statuses, errors
    assert all(("worker 1" in error and "model.mem_len" in error) == any(statuses) for error in errors), errors


@pytest.mark.slow
def test_workers_may_have_the_same_text_at_different_paths(tmp_path):
    for name in ("text.txt", "copy.txt"):
        (tmp_path / name).write_text("the cat sat on the mat\n" * 40)
    statuses, errors = run_two_programs(tmp_path, ["--data_path=copy.txt", "--strategy=multi_worker"])
    assert statuses == [0, 0], errors


# ---------------------------------------- what is left out for static shapes


@pytest.mark.slow
@pytest.mark.parametrize("run_eagerly", [True, False])
def test_tokens_beyond_a_bin_s_capacity_are_counted_and_left_out_of_loss_and_gradient(two_replicas, run_eagerly):
    """One step against the mean nll, and its gradient, of the tokens within the capacities of their replica.

    Three labels too many of the one bin are on one replica, one of the other bin on the other replica.
    """
    rng, bins = np.random.default_rng(0), []
    for numbers in ([8, 5, 2], [10, 0, 5]):
        bins += list(rng.permutation(np.repeat(range(3), numbers)))
    labels = rng.integers(np.array([0, 6, 14])[bins], np.array([6, 14, 23])[bins]).astype(np.int32)
    tokens, labels = rng.integers(0, 23, [ROWS, TGT_LEN], np.int32), labels.reshape(ROWS, TGT_LEN)
    static = {"static_shapes": True, "bin_capacities": [2, 4], "run_eagerly": run_eagerly}
    lm = make_lm(two_replicas, optimizer=keras.optimizers.SGD(1.0), **static)
    lm.network.dropout = 0.0
    for layer in lm.network.decoder_layers:
        layer.rel_attn.dropout = layer.rel_attn.dropatt = layer.ff.dropout = 0.0
    before = [variable.numpy() for variable in lm.trainable_variables]
    kept = np.ones([ROWS, TGT_LEN], bool)
    for share in (slice(0, 3), slice(3, 6)):
        for (left, right), capacity in {(6, 14): 2, (14, 23): 4}.items():
            there = np.argwhere((labels[share] >= left) & (labels[share] < right))
            for row, column in there[capacity:]:
                kept[share][row, column] = False
    with tf.GradientTape() as tape:
        nll, _ = lm.score(tokens, labels)
        loss = tf.reduce_sum(tf.where(kept, nll, 0.0)) / kept.sum()
    gradients = tape.gradient(loss, lm.trainable_variables)
    history = lm.fit(tf.data.Dataset.from_tensors((tokens, labels)), verbose=0).history
    assert history["overflow"] == [(~kept).sum()] == [3 + 1]
    np.testing.assert_allclose(history["loss"], [loss], rtol=1e-5)
    np.testing.assert_allclose(history["grad_norm"], [tf.linalg.global_norm(gradients)], rtol=1e-5)
    for variable, start, gradient in zip(lm.trainable_variables, before, gradients, strict=True):
        np.testing.assert_allclose(variable, start - gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_evaluation_with_static_shapes_leaves_out_nothing_and_takes_a_shorter_last_segment():
    plain, static = (
        make_lm(**options, run_eagerly=True) for options in ({}, {"static_shapes": True, "bin_capacities": [1, 1]})
    )
    text = np.random.default_rng(0).integers(0, 23, 3 * 14).astype(np.int32)
    dataset = txl_tf.segments(text, 3, TGT_LEN)  # 5, 5 and 3 long
    expected = plain.evaluate(dataset, verbose=0)
    np.testing.assert_allclose(static.evaluate(dataset, verbose=0), expected, rtol=1e-6)
    with raises_naming(ValueError, "drop_remainder"):
        static.fit(dataset, verbose=0)


# ---------------------------------------- the gradient norm; rows


@pytest.mark.slow
def test_gradient_norm_of_a_plain_optimizer_is_that_of_the_averaged_gradient(two_replicas):
    """Not the mean over replicas of the norms of their shares of it."""
    norms = []
    for strategy in (None, two_replicas):
        lm = make_lm(strategy, optimizer="sgd")
        norms.append(lm.fit(batches(n=1), verbose=0).history["grad_norm"])
    np.testing.assert_allclose(norms[1], norms[0], rtol=1e-5)


def test_rows_that_do_not_divide_among_replicas_and_parts_are_an_error(two_replicas):
    with raises_parameter("batch", 3, limit="2"):
        make_lm(two_replicas).fit(batches(rows=3), verbose=0)
    with raises_parameter("batch", 6, limit="4 rows"):
        make_lm(two_replicas, gradient_accumulation_steps=2).fit(batches(), verbose=0)
    with raises_parameter("gradient_accumulation_steps", 0, limit="1"):
        make_lm(gradient_accumulation_steps=0)
    with raises_parameter("train_batch_size", 4, limit="3, for 1 replica "):
        check_divides(tf.distribute.get_strategy(), 3, train_batch_size=4)
    with raises_parameter("eval_batch_size", 3, limit="2, for 2 replicas"):
        check_divides(two_replicas, eval_batch_size=3)


# ---------------------------------------- make_strategy


WORKERS = {"worker": ["localhost:1", "localhost:2"]}


@pytest.mark.parametrize(
    "config, reason",
    [
        (None, "TF_CONFIG"),
        ("{not json", "JSONDecodeError"),
        ({"cluster": WORKERS}, "KeyError: 'task'"),
        ({"cluster": WORKERS, "task": {"type": "worker", "index": 2}}, "task"),
        ({"cluster": WORKERS, "task": {"type": "ps", "index": 0}}, "task"),
        ({"cluster": {"worker": ["one:two"]}, "task": {"type": "worker", "index": 0}}, "host:port"),
    ],
    ids=str,
)
def test_a_bad_tf_config_is_one_clear_error(monkeypatch, config, reason):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    given = config if config is None or isinstance(config, str) else json.dumps(config)
    if given is not None:
        monkeypatch.setenv("TF_CONFIG", given)
    with raises_parameter("TF_CONFIG", given) as raised:
        distribution.make_strategy("multi_worker")
    assert reason in str(raised.value)


@pytest.mark.parametrize("n_workers", [1, 2])
def test_a_worker_warns_once_that_its_port_is_open(monkeypatch, caplog, n_workers):
    config = {"cluster": {"worker": WORKERS["worker"][:n_workers]}, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    monkeypatch.setattr(tf.distribute, "MultiWorkerMirroredStrategy", lambda: "strategy")
    monkeypatch.setattr(distribution, "wait_for_all", lambda own, others: None)
    assert distribution.make_strategy("multi_worker") == "strategy"
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == (n_workers > 1) and all(WORKERS["worker"][1] in warning for warning in warnings)


@pytest.mark.parametrize(
    "arguments, name, limit",
    [
        ({"strategy": "all"}, "strategy", "multi_worker"),
        ({"strategy": "tpu", "tpu": None}, "tpu", "grpc://host:port"),
        ({"strategy": "one", "tpu": "node-1"}, "strategy", "tpu is given"),
        ({"strategy": "one", "tpu_zone": "eu"}, "strategy", "tpu_zone"),
        ({"strategy": "tpu", "tpu": "grpc://nowhere"}, "tpu", "grpc://host:port"),
        ({"strategy": "mirrored", "logical_cpus": 0.5}, "logical_cpus", "an integer"),
        ({"strategy": "mirrored", "logical_cpus": 0}, "logical_cpus", "1"),
        ({"strategy": "one", "logical_cpus": 2}, "logical_cpus", "left out"),
        ({"strategy": "multi_worker", "logical_cpus": 2}, "logical_cpus", "left out"),
        ({"tpu": "node-1", "logical_cpus": 2}, "logical_cpus", "left out"),
    ],
    ids=str,
)
def test_a_bad_strategy_is_one_clear_error(arguments, name, limit):
    with raises_parameter(name, arguments[name], limit=limit):
        distribution.make_strategy(**arguments)


def test_logical_cpus_train_together_on_one_machine_without_gpus(monkeypatch):
    made = distribution.make_strategy("auto", logical_cpus=3)  # as many as `common_fixtures.py` makes
    assert made.num_replicas_in_sync == 3 and isinstance(made, tf.distribute.MirroredStrategy)
    with monkeypatch.context() as patch, raises_parameter("logical_cpus", 3):
        patch.setattr(distribution, "workers_in_environment", lambda: 2)
        distribution.make_strategy("auto", logical_cpus=3)
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: ["a device"])
    with raises_parameter("logical_cpus", 3):
        distribution.make_strategy("mirrored", logical_cpus=3)


@pytest.mark.parametrize(
    "capability, flags, choice",
    [
        ((8, 0), "", "bfloat16"),
        ((9, 0), "", "bfloat16"),
        ((7, 5), "avx512_bf16", "float16"),
        (None, "avx2 avx512_bf16", "bfloat16"),
        (None, "amx_bf16", "bfloat16"),
        (None, "avx2 avx512f", "float32"),
    ],
    ids=str,
)
def test_the_type_of_the_products_that_the_machine_is_fast_in(monkeypatch, capability, flags, choice):
    devices = [] if capability is None else ["gpu"]
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: devices)
    monkeypatch.setattr(tf.config.experimental, "get_device_details", lambda gpu: {"compute_capability": capability})
    monkeypatch.setattr(distribution, "processor_flags", lambda: set(flags.split()))
    strategy = tf.distribute.get_strategy()
    assert distribution.choose_precision("auto", strategy) == choice
    assert distribution.choose_precision("float32", strategy) == "float32"


def test_one_device_is_one_replica_and_one_worker():
    strategy = distribution.make_strategy("one")
    assert strategy.num_replicas_in_sync == distribution.num_workers(strategy) == 1
    assert distribution.is_chief(strategy)
    assert distribution.broadcast_from_chief(strategy, 5) == 5
    assert distribution.any_worker(strategy, True) and not distribution.any_worker(strategy, False)


@pytest.mark.parametrize(
    "workers, task, rows",
    [
        ({"worker": ["a:1", "b:1", "c:1"]}, ("worker", 0), range(4)),
        ({"worker": ["a:1", "b:1", "c:1"]}, ("worker", 2), range(8, 12)),
        ({"chief": ["a:1"], "worker": ["b:1", "c:1"]}, ("chief", 0), range(4)),
        ({"chief": ["a:1"], "worker": ["b:1", "c:1"]}, ("worker", 0), range(4, 8)),
    ],
    ids=str,
)
def test_the_chief_has_the_first_rows_and_every_worker_its_own(monkeypatch, workers, task, rows):
    cluster = tf.train.ClusterSpec(workers)
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(cluster, task_type=task[0], task_id=task[1])
    monkeypatch.setattr(distribution, "num_workers", lambda strategy: 3)
    strategy = types.SimpleNamespace(cluster_resolver=resolver, num_replicas_in_sync=3)
    assert distribution.rows_of_this_worker(strategy, 12) == rows
    batches = tf.data.Dataset.from_tensor_slices([12, 3]).map(lambda n: (tf.range(n), tf.ones([n, 2])))
    (large, of_large), (small, of_small) = distribution.own_rows(batches, strategy)
    assert large.numpy().tolist() == [*rows] and small.numpy().tolist() == [rows.start // 4]
    assert (of_large.shape, of_small.shape) == ([4, 2], [1, 2])
    assert distribution.is_chief(strategy) == (rows.start == 0)


def test_what_every_worker_gives_is_summed_once_a_worker_and_its_rows_stand_in_order(two_replicas):
    """The graphs of several workers, on the two replicas of one."""
    assert int(distribution._sum_function(two_replicas)(tf.constant(5, tf.int64))) == 5
    numbers = tf.data.Dataset.range(12)
    no_weights = numbers.batch(4).map(lambda x: tf.zeros([tf.size(x), 0]))
    shares = iter(distribution.divided(tf.data.Dataset.zip((numbers.batch(4), no_weights)), two_replicas))
    for first in (0, 4, 8):
        share, empty = next(shares)
        assert [part.shape for part in distribution.replica_tensors(empty)] == [[2, 0], [2, 0]]
        assert [part.numpy().tolist() for part in two_replicas.experimental_local_results(share)] == [
            [first, first + 1],
            [first + 2, first + 3],
        ]
        (rows,) = distribution._gather_function(two_replicas)([share])
        assert rows.numpy().tolist() == list(range(first, first + 4))
    endless = distribution.divided(tf.data.Dataset.zip((numbers.batch(4).take(1),)).repeat(), two_replicas)
    assert [next(iter(endless))[0].values[1].numpy().tolist() for _ in range(2)] == [[2, 3], [2, 3]]


def test_workers_other_than_the_chief_log_warnings_alone(monkeypatch, caplog):
    for chief, expected in ((False, ["warning"]), (True, ["warning", "line"])):
        monkeypatch.setattr(distribution, "worker_index", lambda strategy, chief=chief: int(not chief))
        caplog.clear()
        with caplog.at_level("INFO", "txl_tf"), distribution.only_chief_logs(None):
            distribution.logger.warning("warning")
            distribution.logger.info("line")
        assert [record.message for record in caplog.records] == expected


def test_a_tpu_that_does_not_answer_is_named_with_its_place(monkeypatch):
    with raises_naming(ConnectionError, "grpc://localhost:1"):
        distribution.make_strategy("tpu", "grpc://localhost:1")

    def not_found(tpu, zone, project):
        raise LookupError(f"no {tpu} with these attrs: many")

    monkeypatch.setattr(tf.distribute.cluster_resolver.TPUClusterResolver, "connect", not_found)
    with raises_naming(ConnectionError, "node-1", "eu", "p"):
        distribution.make_strategy("tpu", "node-1", "eu", "p")


if __name__ == "__main__":
    globals()[sys.argv[1]](sys.argv[2])
