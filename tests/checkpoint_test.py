"""Parity with the original program, and its checkpoints."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf

import txl_tf

CASES = ["char_tied", "wt103_base", "wt103_large", "lm1b", "eval_same_length"]


class Case:
    """One folder of reference values: the model it describes with its start weights, and the golden numbers."""

    def __init__(self, folder):
        self.config = config = json.loads((folder / "config.json").read_text())
        self.checkpoint = str(folder / "model.ckpt-0")
        with np.load(folder / "golden.npz") as golden:
            self.golden = dict(golden)
        sizes = ["n_token", "n_layer", "d_model", "d_embed", "n_head", "d_head", "d_inner"]
        options = ["untie_r", "cutoffs", "div_val", "proj_same_dim", "same_length", "clamp_len"]
        self.lm = txl_tf.TransformerXLLM(
            **{name: config[name] for name in sizes},
            **{name: config[name] for name in options if name in config},
            mem_len=config["mem"],
            dropout=0.0,
            proj_share_all_but_first=any(config["tie_projs"]),
        )
        self.batches = self.golden["inputs"].astype(np.int32), self.golden["labels"].astype(np.int32)

    def arrays(self, prefix):
        return {k.removeprefix(prefix): array for k, array in self.golden.items() if k.startswith(prefix)}

    def mems(self, segment):
        """The original's memories are time-major."""
        mems = [self.golden[f"mems/{segment}/{layer}"] for layer in range(self.config["n_layer"])]
        return [mem.transpose(1, 0, 2) for mem in mems]


@pytest.fixture(params=CASES, scope="module")
def loaded_case(request, reference):
    return Case(reference / "model" / request.param)


@pytest.fixture
def case(loaded_case):
    """The case with its start weights, whatever an earlier test did to them."""
    txl_tf.load_tf1_checkpoint(loaded_case.lm, loaded_case.checkpoint)
    return loaded_case


def test_variables_of_the_original_are_loaded_bit_for_bit_in_its_order(case):
    variables = txl_tf.tf1_variables(case.lm)
    assert list(variables) == list(case.arrays("var/"))
    for name, expected in case.arrays("var/").items():
        np.testing.assert_array_equal(variables[name], expected, err_msg=name)


def test_losses_and_memories_of_every_segment(case):
    mems = case.lm.initial_mems(case.config["batch"])
    for segment, (tokens, labels) in enumerate(zip(*case.batches, strict=True)):
        nll, mems = case.lm.score(tokens, labels, mems)
        np.testing.assert_allclose(np.mean(nll), case.golden["loss"][segment], rtol=1e-5)
        for mem, expected in zip(mems, case.mems(segment), strict=True):
            np.testing.assert_allclose(mem, expected, rtol=0, atol=1e-5)


def test_gradients_of_the_last_segment(case):
    lm, last = case.lm, case.config["segments"] - 1
    with tf.GradientTape() as tape:
        nll, _ = lm.score(case.batches[0][last], case.batches[1][last], case.mems(last - 1))
        loss = tf.reduce_mean(nll)
    gradients = tape.gradient(loss, lm.trainable_variables)
    gradients = under_original_names(lm, gradients)
    assert gradients.keys() == case.arrays("grad/").keys()
    for name, expected in case.arrays("grad/").items():
        np.testing.assert_allclose(gradients[name], expected, rtol=0, atol=1e-4 * np.abs(expected).max(), err_msg=name)
    norm = tf.linalg.global_norm(list(gradients.values()))
    np.testing.assert_allclose(norm, case.golden["grad_norm"], rtol=1e-5)


def under_original_names(lm, values):
    """`{original variable name: value}` of values in the order of `lm.trainable_variables`."""
    before = [variable.numpy() for variable in lm.trainable_variables]
    for i, variable in enumerate(lm.trainable_variables):
        variable.assign(np.full(variable.shape, i))
    names = {int(array.flat[0]): name for name, array in txl_tf.tf1_variables(lm).items()}
    for variable, array in zip(lm.trainable_variables, before, strict=True):
        variable.assign(array)
    return {names[i]: value for i, value in enumerate(values)}


class Trajectory(keras.callbacks.Callback):
    """Records what the golden files have of every step: loss, learning rate and gradient norm."""

    def on_train_begin(self, logs=None):
        self.rows = []

    def on_train_batch_begin(self, batch, logs=None):
        self.learning_rate = float(self.model.optimizer.learning_rate)

    def on_train_batch_end(self, batch, logs):
        self.rows.append([logs["loss"], self.learning_rate, logs["grad_norm"]])


def test_training_trajectory_through_fit(case):
    config = case.config
    settings = ["learning_rate", "warmup_steps", "train_steps", "min_lr_ratio", "clip"]
    case.lm.compile(txl_tf.make_optimizer(**{name: config[name] for name in settings}))
    trajectory = Trajectory()
    dataset = tf.data.Dataset.from_tensor_slices(case.batches).repeat().take(config["train_steps"])
    case.lm.fit(dataset, verbose=0, callbacks=[trajectory])

    expected = [case.golden[f"train/{name}"] for name in ("loss", "lr", "grad_norm")]
    np.testing.assert_allclose(trajectory.rows, np.transpose(expected), rtol=1e-5)
    # Weights move by up to 8e-3. Adam divides by the gradient's size: rounding shows where that is near 0.
    variables = txl_tf.tf1_variables(case.lm)
    for name, array in case.arrays("train/var/").items():
        np.testing.assert_allclose(variables[name], array, rtol=1e-5, atol=2e-5, err_msg=name)


def test_original_reads_back_what_is_saved(case, tmp_path):
    case.lm.network.r_w_bias.assign_add(tf.ones_like(case.lm.network.r_w_bias))
    txl_tf.save_tf1_checkpoint(case.lm, str(tmp_path / "model.ckpt-7"))
    # What a tf.train.Saver of the original's graph asks of a file: its variables by name, shape and dtype.
    saved, original = [tf.train.load_checkpoint(path) for path in (str(tmp_path / "model.ckpt-7"), case.checkpoint)]
    assert saved.get_variable_to_shape_map() == original.get_variable_to_shape_map()
    assert saved.get_variable_to_dtype_map() == original.get_variable_to_dtype_map()
    for name in original.get_variable_to_shape_map():
        moved = 1 if name == "transformer/r_w_bias" else 0
        np.testing.assert_array_equal(saved.get_tensor(name), original.get_tensor(name) + np.float32(moved))


# The same ground without the reference values.

BINS = [
    {},
    {"d_embed": 6},
    {"cutoffs": [5, 12], "proj_share_all_but_first": True, "d_embed": 6, "untie_r": True},
    {"cutoffs": [5, 12], "div_val": 2, "proj_share_all_but_first": True, "untie_r": True},
    {"cutoffs": [5, 12], "div_val": 2, "proj_same_dim": False},
]


def write_checkpoint(path, arrays):
    path = str(path)
    arrays = {name: tf.constant(array) for name, array in arrays.items()}
    tf.raw_ops.SaveV2(
        prefix=path, tensor_names=list(arrays), shape_and_slices=[""] * len(arrays), tensors=list(arrays.values())
    )
    return path


def assert_variables_equal(variables, expected):
    assert variables.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(variables[name], array, err_msg=name)


@pytest.mark.parametrize("bins", BINS, ids=str)
def test_variables_have_the_names_and_the_order_of_the_documents_code(small_pair, bins):
    lm, model = small_pair(**bins)
    assert list(txl_tf.tf1_variables(lm)) == list(model.weights)


@pytest.mark.parametrize("bins", BINS, ids=str)
def test_a_checkpoint_of_the_documents_code_is_read_and_written_bit_for_bit(small_pair, tmp_path, bins):
    lm, model = small_pair(seed=1, **bins)
    other, _ = small_pair(seed=2, **bins)
    weights = {name: variable.numpy() for name, variable in model.weights.items()}
    txl_tf.load_tf1_checkpoint(other, write_checkpoint(tmp_path / "original.ckpt", weights))
    assert_variables_equal(txl_tf.tf1_variables(other), weights)

    path = str(tmp_path / "new" / "model.ckpt-3")
    txl_tf.save_tf1_checkpoint(lm, path)
    reader = tf.train.load_checkpoint(path)
    assert_variables_equal({name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}, weights)


def test_optimizer_slots_and_step_of_a_training_checkpoint_are_left_alone(small_pair, tmp_path):
    lm, model = small_pair(seed=1)
    other, _ = small_pair(seed=2)
    weights = {name: variable.numpy() for name, variable in model.weights.items()}
    slots = {f"{name}/{slot}": array + 1 for name, array in weights.items() for slot in ("Adam", "Adam_1")}
    rest = {"global_step": np.int64(7), "beta1_power": np.float32(0.5), "beta2_power": np.float32(0.5)}
    txl_tf.load_tf1_checkpoint(other, write_checkpoint(tmp_path / "model.ckpt-7", {**weights, **slots, **rest}))
    assert_variables_equal(txl_tf.tf1_variables(other), weights)


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


@pytest.mark.parametrize(
    "change, problem",
    [
        (
            lambda arrays: arrays.pop("transformer/layer_1/ff/layer_1/bias"),
            "transformer/layer_1/ff/layer_1/bias is missing",
        ),
        (
            lambda arrays: arrays.update({"transformer/layer_0/rel_attn/r/kernel": np.zeros([8, 7], np.float32)}),
            r"transformer/layer_0/rel_attn/r/kernel .*\[8, 7\].*\[8, 6\]",
        ),
        (
            lambda arrays: arrays.update({"transformer/layer_2/ff/layer_1/bias": np.zeros([12], np.float32)}),
            r"transformer/layer_2/ff/layer_1/bias \[12\] .*not in the model",
        ),
        (
            lambda arrays: arrays.update({"transformer/adaptive_embed/proj_W": np.zeros([8, 8], np.float32)}),
            r"transformer/adaptive_embed/proj_W \[8, 8\] .*not in the model",
        ),
    ],
    ids=["missing", "another shape", "extra layer", "extra projection"],
)
def test_a_checkpoint_that_does_not_fit_names_the_variable_and_changes_nothing(small_lm, tmp_path, change, problem):
    lm = small_lm(seed=1)
    before = txl_tf.tf1_variables(lm)
    arrays = {name: array + 1 for name, array in before.items()}
    change(arrays)
    path = write_checkpoint(tmp_path / "model.ckpt-0", arrays)
    with pytest.raises(ValueError, match=problem) as error:
        txl_tf.load_tf1_checkpoint(lm, path)
    assert path in str(error.value)
    assert str(error.value).count("transformer/") == 1  # the variables that do fit are not listed
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
    with pytest.raises(ValueError, match="no checkpoint at .*model.ckpt-1"):
        txl_tf.load_tf1_checkpoint(small_lm(), str(tmp_path / "model.ckpt-1"))
