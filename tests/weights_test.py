"""Weights by the original's names, and checkpoints of the original program: read, written, and refused by name."""

import numpy as np
import pytest
import tensorflow as tf
from helpers import assert_variables_equal, raises_naming, raises_parameter, read_checkpoint, write_checkpoint

import txl_tf
from txl_tf.runs.weights import CheckpointGone, CheckpointReader, MisfitError, load_weights

BINS = [
    {},
    {"d_embed": 6},
    {"cutoffs": [5, 12], "proj_share_all_but_first": True, "d_embed": 6, "untie_r": True},
    {"cutoffs": [5, 12], "div_val": 2, "proj_share_all_but_first": True, "untie_r": True},
    {"cutoffs": [5, 12], "div_val": 2, "proj_same_dim": False},
]


@pytest.mark.parametrize(
    "bins",
    [bins if i in (0, 2, 4) else pytest.param(bins, marks=pytest.mark.slow) for i, bins in enumerate(BINS)],
    ids=str,
)
def test_a_checkpoint_of_the_plain_port_is_read_and_written_bit_for_bit(small_pair, small_lm, tmp_path, bins):
    lm, model = small_pair(seed=1, **bins)
    assert list(txl_tf.tf1_variables(lm)) == list(model.weights)  # and in its order
    other = small_lm(seed=2, **bins)
    weights = {name: variable.numpy() for name, variable in model.weights.items()}
    txl_tf.load_tf1_checkpoint(other, write_checkpoint(tmp_path / "original.ckpt", weights))
    assert_variables_equal(txl_tf.tf1_variables(other), weights)

    path = str(tmp_path / "new" / "model.ckpt-3")
    txl_tf.save_tf1_checkpoint(lm, path)
    assert_variables_equal(read_checkpoint(path), weights)


@pytest.mark.parametrize("bins", [BINS[3], *(pytest.param(BINS[i], marks=pytest.mark.slow) for i in (0, 2))], ids=str)
def test_a_longer_vocabulary_keeps_the_rows_and_has_new_ones_at_its_end(small_lm, tmp_path, bins):
    """Probabilities of old tokens are what they were, but for the share that the last cluster gives to new ones."""
    short, long = small_lm(seed=1, n_token=23, **bins), small_lm(seed=2, n_token=26, **bins)
    txl_tf.save_tf1_checkpoint(short, tmp_path / "short")
    before, first = txl_tf.tf1_variables(long), txl_tf.tf1_variables(short)
    with raises_parameter("checkpoint", error=MisfitError):
        load_weights(long, tmp_path / "short")
    load_weights(long, tmp_path / "short", extend=True)
    longer = [name for name, array in first.items() if array.shape != before[name].shape]
    assert len(longer) == 2  # a table, shared with the softmax, and a bias
    for name, array in txl_tf.tf1_variables(long).items():
        n = len(first[name])
        np.testing.assert_array_equal(array[:n], first[name], err_msg=name)
        np.testing.assert_array_equal(array[n:], before[name][n:], err_msg=name)
    tokens = np.arange(23)[None]
    old, new = (np.exp(lm.log_probs(tokens, lm.initial_mems(1))[0]) for lm in (short, long))
    last = bins["cutoffs"][-1] if bins else 0
    np.testing.assert_allclose(new[..., :last], old[..., :last], rtol=1e-4)
    np.testing.assert_allclose(new[..., last:].sum(-1), old[..., last:].sum(-1), rtol=1e-4)
    share = new[..., last:23] / new[..., last:23].sum(-1, keepdims=True)
    np.testing.assert_allclose(share, old[..., last:] / old[..., last:].sum(-1, keepdims=True), rtol=1e-4)
    with raises_parameter("checkpoint", error=MisfitError):
        load_weights(short, CheckpointReader(txl_tf_checkpoint(long, tmp_path / "long")), extend=True)


def txl_tf_checkpoint(lm, path):
    txl_tf.save_tf1_checkpoint(lm, path)
    return path


def test_optimizer_slots_and_step_of_a_training_checkpoint_are_left_alone(small_pair, tmp_path):
    lm, model = small_pair(seed=1)
    other, _ = small_pair(seed=2)
    weights = {name: variable.numpy() for name, variable in model.weights.items()}
    slots = {f"{name}/{slot}": array + 1 for name, array in weights.items() for slot in ("Adam", "Adam_1")}
    rest = {"global_step": np.int64(7), "beta1_power": np.float32(0.5), "beta2_power": np.float32(0.5)}
    txl_tf.load_tf1_checkpoint(other, write_checkpoint(tmp_path / "model.ckpt-7", {**weights, **slots, **rest}))
    assert_variables_equal(txl_tf.tf1_variables(other), weights)


def test_names_of_weights_may_contain_what_earlier_versions_wrote_for_a_slash(tmp_path):
    array = np.arange(3, dtype=np.float32)
    old = "weights/enc..Self.S.S..A/.ATTRIBUTES/VARIABLE_VALUE"  # enc.Self//.A
    path = write_checkpoint(tmp_path / "ckpt-1", {"weights/enc.Self/a..b": array, "weights/plain/a": array, old: array})
    assert CheckpointReader(path).weights == {
        "enc.Self/a..b": "weights/enc.Self/a..b", "plain/a": "weights/plain/a", "enc.Self//.A": old,
    }  # fmt: skip


def test_the_latest_checkpoint_of_the_folder_is_the_saved_one(small_lm, tmp_path, monkeypatch):
    lm = small_lm()
    txl_tf.save_tf1_checkpoint(lm, str(tmp_path / "a" / "model.ckpt-1"))
    assert tf.train.latest_checkpoint(str(tmp_path / "a")) == str(tmp_path / "a" / "model.ckpt-1")

    monkeypatch.chdir(tmp_path)
    txl_tf.save_tf1_checkpoint(lm, "b/model.ckpt-2")
    latest = tf.train.latest_checkpoint("b")
    assert latest is not None
    txl_tf.load_tf1_checkpoint(lm, latest)


def test_paths_may_be_pathlib_paths(small_lm, tmp_path):
    lm, other = small_lm(seed=1), small_lm(seed=2)
    txl_tf.save_tf1_checkpoint(lm, tmp_path / "model.ckpt-0")
    txl_tf.load_tf1_checkpoint(other, tmp_path / "model.ckpt-0")
    assert_variables_equal(txl_tf.tf1_variables(other), txl_tf.tf1_variables(lm))


def test_tf1_variables_are_copies(small_lm):
    lm = small_lm()
    array = txl_tf.tf1_variables(lm)["transformer/r_w_bias"]
    before = array.copy()
    lm.network.r_w_bias.assign(tf.zeros_like(lm.network.r_w_bias))
    np.testing.assert_array_equal(array, before)


DOES_NOT_FIT = [
    (
        lambda arrays: arrays.pop("transformer/layer_1/ff/layer_1/bias"),
        ["transformer/layer_1/ff/layer_1/bias"],
    ),
    (
        lambda arrays: arrays.update({"transformer/layer_0/rel_attn/r/kernel": np.zeros([8, 7], np.float32)}),
        ["transformer/layer_0/rel_attn/r/kernel", "[8, 7]", "[8, 6]"],
    ),
    (
        lambda arrays: arrays.update({"transformer/layer_2/ff/layer_1/bias": np.zeros([12], np.float32)}),
        ["transformer/layer_2/ff/layer_1/bias", "[12]"],
    ),
    (
        lambda arrays: arrays.update({"transformer/adaptive_embed/proj_W": np.zeros([8, 8], np.float32)}),
        ["transformer/adaptive_embed/proj_W", "[8, 8]"],
    ),
    (
        lambda arrays: arrays["transformer/layer_1/ff/layer_1/bias"].fill(-np.inf),
        ["transformer/layer_1/ff/layer_1/bias"],
    ),
]


def test_a_checkpoint_that_does_not_fit_names_the_variable_and_changes_nothing(small_lm, tmp_path):
    lm = small_lm(seed=1)
    before = txl_tf.tf1_variables(lm)
    for i, (change, facts) in enumerate(DOES_NOT_FIT):
        arrays = {name: array + 1 for name, array in before.items()}
        change(arrays)
        path = write_checkpoint(tmp_path / f"model.ckpt-{i}", arrays)
        with raises_naming(ValueError, path, *facts) as error:
            txl_tf.load_tf1_checkpoint(lm, path)
        assert str(error.value).count("transformer/") == 1, facts  # the variables that do fit are not listed
        assert_variables_equal(txl_tf.tf1_variables(lm), before)


def test_every_variable_that_does_not_fit_is_named(small_lm, tmp_path):
    lm = small_lm()
    arrays = txl_tf.tf1_variables(lm)
    del arrays["transformer/r_r_bias"]
    arrays["transformer/r_w_bias"] = np.zeros([2, 2, 3], np.float32)
    with pytest.raises(ValueError, match="r_r_bias") as error:
        txl_tf.load_tf1_checkpoint(lm, write_checkpoint(tmp_path / "model.ckpt-0", arrays))
    assert "transformer/r_w_bias" in str(error.value) and "[2, 2, 3]" in str(error.value)


def test_a_path_without_checkpoint_is_named(small_lm, tmp_path):
    with raises_parameter("checkpoint", str(tmp_path / "model.ckpt-1"), error=CheckpointGone):
        txl_tf.load_tf1_checkpoint(small_lm(), str(tmp_path / "model.ckpt-1"))
