"""What a run survives exactly, kills and signals, and what ends it with one clear error: damage, a full disk, nan."""

import contextlib
import os
import re
import shutil
import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    TEXT,
    assert_same_run,
    at_step,
    full_disk,
    log_rows,
    mentions,
    raises_naming,
    raises_parameter,
    read_checkpoint,
    terminate,
    train_run,
)

import txl_tf
from txl_tf.config import EvaluationConfig, TrainingConfig
from txl_tf.files import lock, write_atomic
from txl_tf.runs import setup
from txl_tf.runs.callbacks import RunState, StepCSVLogger, StopOnSignal, complete_log, cut_log
from txl_tf.runs.checkpoints import RunCheckpoints
from txl_tf.runs.evaluate import evaluate_run
from txl_tf.runs.folder import RunFolder
from txl_tf.training.distribution import to_replicas
from txl_tf.training.loop import LoopState

# Windows end at 5, 10, 12; checkpoints at 3, 6, 9, 12; validations at 5, 10.
STEPS = {"train_steps": 12, "iterations": 5, "save_steps": 3}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing happened to: its folder and its final result."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "text.txt").write_text(TEXT)
    return folder / "run", train_run(folder / "run", str(folder / "text.txt"), training=STEPS)


def assert_same(run_dir, result, whole):
    """Bit for bit, but for the speed."""
    expected_dir, expected = whole
    assert_same_run(run_dir, expected_dir, 12)
    assert result == expected


def die():
    raise RuntimeError("killed")


def of_whole(whole, run_dir, last):
    """A copy of the whole run as a kill leaves it: without the checkpoints after step `last`."""
    shutil.copytree(whole[0], run_dir)
    for path in run_dir.glob("ckpt-*"):
        if int(path.name.split("-")[1].split(".")[0]) > last:
            path.unlink()
    with open(run_dir / "log.csv", "a") as file:
        file.write("1,3.14")  # of a line that was being written


@pytest.mark.slow
def test_a_run_goes_on_in_the_middle_of_an_interval_is_stopped_in_a_validation_and_goes_on_again(
    run_dir, text_file, whole, monkeypatch, capfd
):
    of_whole(whole, run_dir, last=9)
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as end:
        at_step(patch, StopOnSignal, "on_test_batch_end", 10, terminate)
        train_run(run_dir, text_file, training=STEPS)
    assert end.value.code == 0 and len(log_rows(run_dir)) == 1
    printed = capfd.readouterr().out
    assert "terminated" in printed
    assert mentions(printed, "terminated", f"{run_dir}/ckpt-10")
    assert_same(run_dir, train_run(run_dir, text_file, training=STEPS), whole)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [[8], [2, 10]], ids=str)
def test_a_killed_run_goes_on_in_the_middle_of_an_interval(run_dir, text_file, whole, monkeypatch, steps):
    for step in steps:
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="killed"):
            at_step(patch, RunState, "on_epoch_end" if step == 10 else "on_train_batch_end", step, die)
            train_run(run_dir, text_file, training=STEPS)
    with open(run_dir / "log.csv", "a") as file:
        file.write("1,3.14")  # of a line that was being written
    assert_same(run_dir, train_run(run_dir, text_file, training=STEPS), whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    "owner, name, step", [(RunState, "on_train_batch_end", 8), (StopOnSignal, "on_test_batch_end", 10)]
)
def test_sigterm_saves_at_once_and_ends_without_error(run_dir, text_file, whole, monkeypatch, capfd, owner, name, step):
    """Also in a validation, which is done again."""
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as end:
        at_step(patch, owner, name, step, terminate)
        train_run(run_dir, text_file, training=STEPS)
    assert end.value.code == 0
    stopped = step + (step == 8)  # with the step after the signal
    printed = capfd.readouterr().out
    assert "terminated" in printed
    assert mentions(printed, "terminated", f"{run_dir}/ckpt-{stopped}")
    assert len(log_rows(run_dir)) == 1
    assert_same(run_dir, train_run(run_dir, text_file, training=STEPS), whole)


def test_a_checkpoint_is_restored_on_another_number_of_replicas(run_dir, text_file, two_replicas, eager):
    steps = {"train_steps": 2, "iterations": 2, "save_steps": 1}
    one_batch = {"max_eval_batch": 1}
    train_run(run_dir, text_file, training=steps, optimizer={"warmup_steps": 0}, evaluation=one_batch)
    folder = RunFolder(run_dir)
    with two_replicas.scope():
        lm = folder.family.make(**folder.read_config()["model"])
        lm.compile(txl_tf.make_optimizer(learning_rate=1e-2, train_steps=12))
        lm.optimizer.build(lm.trainable_variables)
    empty = np.zeros([2, 8, 16], np.float32)  # two rows a replica
    lm.loop = LoopState(mems=[to_replicas(two_replicas, [empty, empty], tf.float32)])
    carried, sums = RunCheckpoints(lm, folder).restore(folder.checkpoint(1))
    expected = read_checkpoint(folder.checkpoint(1))
    np.testing.assert_array_equal(sums["window"], expected["window"])
    lm.set_carried_arrays(carried)
    np.testing.assert_array_equal(lm.carried_arrays()["mems"], expected["mems"])
    for name, array in txl_tf.tf1_variables(lm).items():
        np.testing.assert_array_equal(array, expected[f"weights/{name}"], err_msg=name)
    for variable in lm.trainable_variables:
        for copy in two_replicas.experimental_local_results(variable.value):
            np.testing.assert_array_equal(copy, variable)
    assert lm.optimizer.iterations.numpy() == 1 and expected["mems"].shape == (1, 4, 8, 16)


@pytest.mark.slow
def test_the_run_goes_on_with_another_number_of_replicas(run_dir, text_file, whole, monkeypatch, two_replicas):
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="killed"):
        at_step(patch, RunState, "on_train_batch_end", 8, die)
        train_run(run_dir, text_file, training=STEPS)
    monkeypatch.setattr(setup, "make_strategy", lambda *args, **kwargs: two_replicas)
    result = train_run(run_dir, text_file, training=STEPS)
    assert result["valid"] == pytest.approx(whole[1]["valid"], abs=1e-5)
    expected = read_checkpoint(whole[0] / "ckpt-12")
    for name, array in read_checkpoint(run_dir / "ckpt-12").items():
        if name.startswith("weights/"):
            np.testing.assert_allclose(array, expected[name], atol=1e-5, err_msg=name)


def test_the_best_checkpoint_is_that_of_the_lowest_validation_loss(trained_run):
    run_dir, result = trained_run
    losses = {int(row["step"]): float(row["val_loss"]) for row in log_rows(run_dir) if row["val_loss"] != "NA"}
    losses[12] = result["valid"]
    folder = RunFolder(run_dir)
    best = folder.find_best()
    assert best["step"] == min(losses, key=losses.get) and best["val_loss"] == min(losses.values())
    evaluated = evaluate_run(run_dir, evaluation=EvaluationConfig(eval_ckpt_path="best"))["valid"]
    assert evaluated == pytest.approx(best["val_loss"], rel=1e-6)
    assert folder.best.steps() == [best["step"]]


# ------------------------------------------------------------------------------------------ without any training


@pytest.fixture(scope="module")
def three(small_lm, tmp_path_factory):
    """A model, and a folder with checkpoints of steps 1, 2 and 3 with biases of 1, 2 and 3."""
    run_dir = tmp_path_factory.mktemp("three") / "run"
    lm = small_lm()
    lm.compile(txl_tf.make_optimizer(learning_rate=1e-3, train_steps=10))
    lm.optimizer.build(lm.trainable_variables)
    lm.loop = LoopState(mems=lm.initial_mems(2))  # as `fit` has it
    checkpoints = RunCheckpoints(lm, RunFolder(run_dir))
    for step in (1, 2, 3):
        set_step(lm, step)
        checkpoints.save()
    return lm, run_dir


@pytest.fixture
def saved(three, run_dir):
    """The model, and the `RunCheckpoints` of a copy of its folder."""
    lm, folder = three
    shutil.copytree(folder, run_dir)
    set_step(lm, 3)
    return lm, RunCheckpoints(lm, RunFolder(run_dir))


def set_step(lm, step):
    lm.optimizer.iterations.assign(step)
    lm.network.r_w_bias.assign(np.full(lm.network.r_w_bias.shape, step))


def bias(lm):
    return np.unique(lm.network.r_w_bias.numpy()).tolist()


INDEX, DATA = "ckpt-3.index", "ckpt-3.data-00000-of-00001"


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 4
    path.write_bytes(content)


DAMAGES = {
    "index truncated": lambda run_dir: os.truncate(run_dir / INDEX, 30),
    "index empty": lambda run_dir: os.truncate(run_dir / INDEX, 0),
    "index missing": lambda run_dir: (run_dir / INDEX).unlink(),
    "data truncated": lambda run_dir: os.truncate(run_dir / DATA, 100),
    "data flipped": lambda run_dir: flip(run_dir / DATA),
    "data missing": lambda run_dir: (run_dir / DATA).unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_of_a_damaged_checkpoint_it_says_so_and_takes_the_one_before(saved, run_dir, capsys, damage):
    lm, checkpoints = saved
    DAMAGES[damage](run_dir)
    files = sorted(run_dir.iterdir())
    assert checkpoints.newest_whole() == 2
    (message,) = capsys.readouterr().out.splitlines()
    assert mentions(message, f"{run_dir}/ckpt-3")
    with raises_parameter("checkpoint", f"{run_dir}/ckpt-3"):
        checkpoints.restore(checkpoints.folder.checkpoint(3))
    assert bias(lm) == [3]
    checkpoints.restore(checkpoints.folder.checkpoint(2))
    assert bias(lm) == [2] and sorted(run_dir.iterdir()) == files
    set_step(lm, 3)
    checkpoints.save()
    assert checkpoints.newest_whole() == 3


def test_of_two_damaged_checkpoints_it_names_the_one_that_is_used(saved, run_dir, capsys):
    _, checkpoints = saved
    for number in (2, 3):
        os.truncate(run_dir / f"ckpt-{number}.index", 30)
    assert checkpoints.newest_whole() == 1
    for number, message in zip((3, 2), capsys.readouterr().out.splitlines(), strict=True):
        assert mentions(message, f"{run_dir}/ckpt-{number}", "ckpt-1")


def test_it_is_an_error_if_all_are_damaged(saved, run_dir):
    _, checkpoints = saved
    for path in run_dir.glob("*.data-*"):
        flip(path)
    with raises_parameter("model_dir", str(run_dir)) as raised:
        checkpoints.newest_whole()
    for number, problem in zip((3, 2, 1), raised.value.differences, strict=True):
        assert f"{run_dir}/ckpt-{number}" in problem and problem in str(raised.value)


@pytest.mark.parametrize("content", ["", "garbage {", None])
def test_the_file_that_lists_checkpoints_may_be_lost(saved, run_dir, content):
    _, checkpoints = saved
    path = run_dir / "checkpoint"
    path.unlink() if content is None else path.write_text(content)
    assert checkpoints.newest_whole() == 3
    assert checkpoints.folder.find_checkpoint() == str(run_dir / "ckpt-3")


def test_a_checkpoint_that_was_being_written_is_not_there(saved, run_dir, monkeypatch, capsys):
    lm, checkpoints = saved
    rename = tf.io.gfile.rename
    monkeypatch.setattr(tf.io.gfile, "rename", lambda old, new: die() if old.endswith(".index") else rename(old, new))
    monkeypatch.setattr("txl_tf.runs.weights.removed_on_error", contextlib.nullcontext)  # kill -9 removes nothing
    set_step(lm, 4)
    with pytest.raises(RuntimeError):
        checkpoints.save()
    assert (run_dir / "ckpt-4.data-00000-of-00001").exists()
    assert checkpoints.newest_whole() == 3 and capsys.readouterr().out == ""


def test_old_checkpoints_are_deleted_but_damaged_ones_past_the_present(saved, run_dir):
    (lm, _), folder = saved, RunFolder(run_dir)
    flip(run_dir / DATA)
    checkpoints = RunCheckpoints(lm, folder, max_to_keep=1)
    set_step(lm, 2)
    checkpoints.save()
    assert folder.steps() == [2, 3]
    set_step(lm, 4)
    checkpoints.save()
    assert folder.steps() == [4]
    assert tf.train.latest_checkpoint(run_dir) == str(run_dir / "ckpt-4")


def test_a_worker_that_is_not_the_chief_does_not_look_for_the_best(saved, monkeypatch):
    checkpoints = saved[1]
    monkeypatch.setattr(checkpoints, "writes", False)
    monkeypatch.setattr(RunFolder, "find_best", None)  # the chief may be writing it
    checkpoints.save_best(1.0)


def test_a_better_checkpoint_takes_the_place_of_the_best_and_no_other_does(saved, run_dir):
    (lm, checkpoints), folder = saved, RunFolder(run_dir)
    for step, val_loss, best in [(4, np.nan, None), (5, 2.0, 5), (6, 2.0, 5), (7, 2.5, 5), (8, 1.5, 8), (9, np.nan, 8)]:
        set_step(lm, step)
        checkpoints.save_best(val_loss)
        found = folder.find_best()
        assert (found and found["step"]) == best
    assert folder.best.steps() == [8]
    folder.best.save_weights(lm, 9)  # killed before it was named
    assert folder.find_checkpoint("best") == str(run_dir / "best" / "ckpt-8")
    with raises_parameter("model_dir", allowed="a folder with a best checkpoint"):
        RunFolder(run_dir.parent).find_checkpoint("best")


def test_a_full_disk_leaves_the_checkpoints_that_are_there(saved, run_dir):
    lm, checkpoints = saved
    files = sorted(run_dir.iterdir())
    set_step(lm, 4)
    with full_disk(), pytest.raises(OSError) as error:
        checkpoints.save()
    assert mentions(str(error.value), f"{run_dir}/ckpt-4")
    assert mentions(str(error.value), f"{run_dir}/ckpt-3")
    assert sorted(run_dir.iterdir()) == files
    assert checkpoints.newest_whole() == 3


def test_a_full_disk_leaves_the_file_that_was_there(tmp_path):
    path = tmp_path / "config.json"
    write_atomic(path, "before")
    with full_disk(), raises_naming(OSError, path):
        write_atomic(path, "x" * 2000)
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]


def test_the_last_validation_takes_the_place_of_na_and_of_nothing_else(tmp_path):
    path = tmp_path / "log.csv"
    path.write_bytes(HEADER + row(3) + row(6))
    assert complete_log(str(path), 6, {"val_loss": 1.25, "loss": 9.0, "val_f1": 9.0})
    assert path.read_bytes() == HEADER + row(3) + row(6).replace(b"NA\r", b"1.25\r")
    for step, found in ((6, {"val_loss": 9.0}), (7, {"val_bpc": 9.0})):  # validated already; another step
        assert not complete_log(str(path), step, found)
    assert b"9.0" not in path.read_bytes() and not complete_log(str(tmp_path / "none"), 6, {"val_loss": 1.0})


def test_a_full_disk_while_logging_names_the_file_and_the_last_checkpoint(saved, tmp_path):
    lm, checkpoints = saved
    logger = StepCSVLogger(str(tmp_path / "log.csv"), ["bpc"], checkpoints)
    logger.set_model(lm)
    logger.on_train_begin()
    with full_disk(), raises_naming(OSError, "log.csv", "ckpt-3"):
        logger.on_epoch_end(0, {"step": 3, "loss": "1" * 2000})


def test_a_value_that_comes_later_gets_a_column(saved, tmp_path):
    lm, checkpoints = saved
    path = tmp_path / "log.csv"
    first = [(0, {"step": 3}), (1, {"step": 6, "own": 1.5, "also": 2})]
    resumed = [(2, {"step": 9, "own": 2.5}), (3, {"new": 1})]
    for epochs in (first, resumed):
        logger = StepCSVLogger(str(path), [], checkpoints)
        logger.set_model(lm)
        logger.on_train_begin()
        for epoch, logs in epochs:
            logger.on_epoch_end(epoch, logs)
        logger.on_train_end()
    assert path.read_text().splitlines() == [
        "epoch,step,val_loss,also,own,new",
        "0,3,NA,NA,NA,NA",
        "1,6,NA,2,1.5,NA",
        "2,9,NA,NA,2.5,NA",
        "3,NA,NA,NA,NA,1",
    ]


HEADER = b"epoch,bpc,grad_norm,learning_rate,loss,step,tokens_per_second,val_bpc,val_loss\r\n"


def row(step):
    return b"0,1.5,0.1,0.01,3.5,%d,99,NA,NA\r\n" % step


@pytest.mark.parametrize(
    "content, last_step, kept",
    [
        (HEADER + row(5) + row(10) + row(15), 10, HEADER + row(5) + row(10)),
        (HEADER + row(5) + row(1)[:-3], 10, HEADER + row(5)),
        (b"epoch,a," + HEADER[6:] + row(5).replace(b",", b",7,", 1), 5, b"epoch,a," + HEADER[6:] + b"0,7" + row(5)[1:]),
        (b"epoch,lo", 0, b""),
        (b"", 0, b""),
    ],
)
def test_the_log_is_cut_back_to_the_step_to_go_on_from(tmp_path, content, last_step, kept):
    path = tmp_path / "log.csv"
    path.write_bytes(content)
    cut_log(str(path), last_step, ["bpc"])
    assert path.read_bytes() == kept


@pytest.mark.parametrize(
    "content, line",
    [
        (HEADER.replace(b"loss", b"mss", 1), 1),
        (HEADER.replace(b"bpc", b"ppl"), 1),
        (HEADER.replace(b"s", b"\xff"), 1),
        (b"step,bpc,grad_norm,learning_rate,loss,epoch" + HEADER[HEADER.index(b",tokens") :], 1),
        (HEADER.replace(b"bpc,", b"loss,", 1), 1),
        (HEADER + row(5) + row(10).replace(b"10", b"1" * 5000), 3),
        (HEADER + row(5) + row(10).replace(b"10", b"1x"), 3),
        (HEADER + row(5).replace(b"5,", b"\x00", 1), 2),
        (HEADER + b"\r\n", 2),
    ],
)
def test_a_damaged_log_names_the_line_and_is_left_as_it_is(tmp_path, content, line):
    path = tmp_path / "log.csv"
    path.write_bytes(content)
    with raises_parameter("log.csv", content.splitlines()[line - 1].rstrip().decode("latin1").split(",")) as raised:
        cut_log(str(path), 10, ["bpc"])
    assert path.read_bytes() == content
    assert mentions(str(raised.value), path, line)
    assert raised.value.allowed[:2] == ["epoch", "bpc"] if line == 1 else mentions(raised.value.allowed, 9)


@pytest.mark.parametrize("steps_per_execution", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_training_that_diverges_stops_at_once(run_dir, text_file, steps_per_execution, eager):
    steps = {"train_steps": 12, "iterations": 6, "save_steps": 2, "steps_per_execution": steps_per_execution}
    with raises_naming(ValueError, "loss", "nan") as error:
        train_run(run_dir, text_file, optimizer={"learning_rate": 1e30, "warmup_steps": 3}, training=steps)
    *_, step = map(int, re.findall(r"\d+", str(error.value).split(":")[0]))
    assert step <= 4  # the rates of the first steps are 0, 3e29 and 7e29
    assert RunFolder(run_dir).steps() == []  # the weights of ckpt-2 were finite, but their loss was not
    assert not (run_dir / "checkpoint").exists()


GOOD = {"train_steps": 4, "iterations": 2, "save_steps": 2}


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A run with the checkpoints 2 and 4."""
    folder = tmp_path_factory.mktemp("good")
    (folder / "text.txt").write_text(TEXT)
    train_run(folder / "run", str(folder / "text.txt"), training=GOOD)
    return folder


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param({"train_steps": 9, "iterations": 1, "save_steps": 1}, marks=pytest.mark.slow),  # validation of 5
        pytest.param({"train_steps": 5, "iterations": 1, "save_steps": 1}, marks=pytest.mark.slow),  # that at the end
        pytest.param({"train_steps": 9, "iterations": 9, "save_steps": 1}, marks=pytest.mark.slow),  # loss of step 6
        pytest.param({"train_steps": 9, "iterations": 9, "save_steps": 1, "max_to_keep": 1}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_last_finite_checkpoint_stays_the_newest(good, tmp_path, steps):
    run_dir, text_file = tmp_path / "run", str(good / "text.txt")
    shutil.copytree(good / "run", run_dir)
    before = read_checkpoint(run_dir / "ckpt-4")
    for _ in range(2):
        with pytest.raises(ValueError) as error:
            train_run(run_dir, text_file, optimizer={"learning_rate": 1e30}, training=steps)
        assert "nan" in str(error.value) and mentions(str(error.value), f"{run_dir}/ckpt-4")
        assert RunFolder(run_dir).steps()[-1] == 4 and not (run_dir / "ema").exists()
        assert tf.train.latest_checkpoint(run_dir) == str(run_dir / "ckpt-4")
        assert RunFolder(run_dir).best.steps() == [4]
        for key, values in read_checkpoint(run_dir / "ckpt-4").items():
            np.testing.assert_array_equal(values, before[key], err_msg=key)
    assert np.isfinite(train_run(run_dir, text_file, training={**GOOD, "train_steps": 6})["valid"])
    assert RunFolder(run_dir).steps()[-2:] == [4, 6]


def test_no_weights_that_are_not_finite_are_saved(saved, run_dir):
    """Also where no loss depends on them, as those of a rare word."""
    lm, checkpoints = saved
    for value in (np.nan, np.inf):
        set_step(lm, 4)
        lm.network.r_w_bias.assign(np.full(lm.network.r_w_bias.shape, value))
        for save in (checkpoints.save, lambda: checkpoints.save_best(1.0)):
            with raises_naming(ValueError, f"{run_dir}/ckpt-3"):
                save()
    assert RunFolder(run_dir).steps()[-1] == 3 and RunFolder(run_dir).find_best() is None


def test_a_checkpoint_of_weights_that_are_not_finite_is_passed_over(saved, run_dir, monkeypatch, caplog):
    lm, checkpoints = saved
    monkeypatch.setattr(checkpoints, "check_weights", lambda: None)  # as in earlier versions
    set_step(lm, 4)
    lm.network.r_w_bias.assign(np.full(lm.network.r_w_bias.shape, np.nan))
    checkpoints.save()
    assert checkpoints.newest_whole() == 3
    assert f"{run_dir}/ckpt-4" in caplog.text


def test_a_checkpoint_that_a_run_starts_from_is_not_deleted(saved, run_dir):
    """Its loss may be finite with other settings, such as another precision."""
    lm, checkpoints = saved
    checkpoints.restore(str(run_dir / "ckpt-3"))
    set_step(lm, 4)
    error = checkpoints.diverged("loss nan")
    assert f"remove {run_dir}/ckpt-3.*" in str(error) and RunFolder(run_dir).steps()[-1] == 3


def test_an_older_checkpoint_stays_until_the_new_one_has_a_finite_loss(saved, run_dir):
    lm, folder = saved[0], RunFolder(run_dir)
    checkpoints = RunCheckpoints(lm, folder, max_to_keep=1)
    set_step(lm, 4)
    checkpoints.save(loss_is_finite=False)
    assert folder.steps() == [3, 4]
    checkpoints.confirm()
    assert folder.steps() == [4]
    set_step(lm, 5)
    checkpoints.save(loss_is_finite=False)
    assert folder.steps() == [4, 5]
    set_step(lm, 6)
    assert mentions(str(checkpoints.diverged("loss nan")), f"{run_dir}/ckpt-4")
    assert folder.steps() == [4] and tf.train.latest_checkpoint(run_dir) == str(run_dir / "ckpt-4")


@pytest.mark.parametrize("validates", [False, True])
def test_the_loss_of_an_interval_that_a_later_session_ends_is_finite_after_its_validation(validates):
    model = types.SimpleNamespace(stop_training=False, stop_agreed=False, training_logs=dict, set_metric_totals=list)
    model.optimizer = types.SimpleNamespace(iterations=tf.Variable(5))
    saved = []
    checkpoints = types.SimpleNamespace(save=lambda **options: saved.append(options), save_best=float)
    checkpoints.folder = types.SimpleNamespace(family=types.SimpleNamespace(monitor="val_loss"))

    def end(epoch, logs):
        model.stop_training = True
        if validates:
            logs["val_loss"] = 1.0

    other = keras.callbacks.LambdaCallback(on_epoch_end=end)
    state = RunState(checkpoints, (None, np.zeros(5)), TrainingConfig(**STEPS), [other])
    state.set_model(model)
    state.set_params({"epochs": 3})
    state.on_train_begin()
    assert saved == [{"loss_is_finite": validates}] and model._initial_epoch == 3


def test_a_second_run_in_the_folder_is_refused(run_dir, text_file):
    run_dir.mkdir()
    with lock(run_dir, ""), raises_naming(OSError, run_dir):
        train_run(run_dir, text_file)


def test_a_worker_that_is_gone_is_named_by_the_others(saved, run_dir, monkeypatch):
    monkeypatch.setattr(setup, "num_workers", lambda strategy: 2)
    with raises_naming(OSError, "UnavailableError", 2, f"{run_dir}/ckpt-3"):
        with setup.worker_of(tf.distribute.get_strategy(), RunFolder(run_dir)):
            raise tf.errors.UnavailableError(None, None, "Connection reset by peer")
