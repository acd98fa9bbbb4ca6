"""Holds the plain port to the numbers that the original program computed, and to itself."""

import itertools
import json

import numpy as np
import pytest
import reference_model
import tensorflow as tf
from helpers import CASES, GOLDENS
from reference_model import ReferenceModel

SLOW = pytest.mark.slow

# Everything but the options of the embedding and the softmax.
SMALL = dict(n_token=23, n_layer=2, d_model=8, n_head=2, d_head=4, d_inner=12)


class Case:
    """One folder of reference values: the model it describes, the batches time-major, the golden numbers."""

    def __init__(self, name):
        self.config = config = json.loads((GOLDENS / name / "config.json").read_text())
        with np.load(GOLDENS / name / "golden.npz") as golden:
            self.golden = dict(golden)
        sizes = ["n_token", "n_layer", "d_model", "d_embed", "n_head", "d_head", "d_inner"]
        options = ["untie_r", "cutoffs", "div_val", "proj_same_dim", "same_length", "clamp_len"]
        self.model = ReferenceModel(
            **{name: config[name] for name in sizes},
            **{name: config[name] for name in options if name in config},
            mem_len=config["mem"],
            proj_share_all_but_first=any(config["tie_projs"]),
        )
        self.model.assign(self.arrays("var/"))
        self.inputs = self.golden["inputs"].transpose(0, 2, 1)  # [segment, tgt_len, batch]
        self.labels = self.golden["labels"].transpose(0, 2, 1)

    def arrays(self, prefix):
        return {k.removeprefix(prefix): array for k, array in self.golden.items() if k.startswith(prefix)}

    def mems(self, segment):
        return [self.golden[f"mems/{segment}/{layer}"] for layer in range(self.config["n_layer"])]


@pytest.fixture(scope="module")
def case(request):
    return Case(request.param)


def of_cases(*fast):
    """A test for each case of the original; slow but for those that are `fast`."""
    params = [name if name in fast else pytest.param(name, marks=SLOW) for name in CASES]
    return pytest.mark.parametrize("case", params, indirect=True, scope="module")


@pytest.fixture
def fresh_case(case):
    """The case with its start weights, whatever an earlier test did to them."""
    case.model.assign(case.arrays("var/"))
    return case


@of_cases(*CASES)
def test_variables_are_the_original_s_in_its_order(case, request):
    assert list(case.model.weights) == list(case.arrays("var/"))
    checkpoint = GOLDENS / request.node.callspec.params["case"] / "model.ckpt-0"
    shapes = dict(tf.train.list_variables(str(checkpoint)))
    assert {name: list(variable.shape) for name, variable in case.model.weights.items()} == shapes


@of_cases("eval_same_length", "wt103_large", "lm1b")
def test_losses_and_memories_of_every_segment(fresh_case):
    model, golden = fresh_case.model, fresh_case.golden
    mems = model.initial_mems(fresh_case.config["batch"])
    for segment in range(fresh_case.config["segments"]):
        nll, mems = model.nll(fresh_case.inputs[segment], fresh_case.labels[segment], mems)
        np.testing.assert_allclose(np.mean(nll), golden["loss"][segment], rtol=1e-5)
        for mem, expected in zip(mems, fresh_case.mems(segment), strict=True):
            np.testing.assert_allclose(mem, expected, rtol=0, atol=1e-5)


@of_cases("eval_same_length", "wt103_large", "lm1b")
def test_gradients_of_the_last_segment(fresh_case):
    model, last = fresh_case.model, fresh_case.config["segments"] - 1
    with tf.GradientTape() as tape:
        nll, _ = model.nll(fresh_case.inputs[last], fresh_case.labels[last], fresh_case.mems(last - 1))
        loss = tf.reduce_mean(nll)
    gradients = {k: tf.convert_to_tensor(g) for k, g in tape.gradient(loss, model.weights).items()}
    expected_gradients = fresh_case.arrays("grad/")
    assert gradients.keys() == expected_gradients.keys()
    for name, expected in expected_gradients.items():
        atol = 1e-5 * np.abs(expected).max()
        np.testing.assert_allclose(gradients[name], expected, rtol=0, atol=atol, err_msg=name)
    grad_norm = tf.linalg.global_norm(list(gradients.values()))
    np.testing.assert_allclose(grad_norm, fresh_case.golden["grad_norm"], rtol=1e-5)


@of_cases()
def test_training_trajectory(fresh_case):
    model, golden, config = fresh_case.model, fresh_case.golden, fresh_case.config
    settings = ["learning_rate", "train_steps", "warmup_steps", "min_lr_ratio", "clip"]
    model.compile(**{name: config[name] for name in settings})
    mems = model.initial_mems(config["batch"])
    for step in range(config["train_steps"]):
        segment = step % config["segments"]
        inputs, labels = fresh_case.inputs[segment], fresh_case.labels[segment]
        *got, mems = model.train_step(inputs, labels, mems)
        expected = [golden[f"train/{name}"][step] for name in ["loss", "grad_norm", "lr"]]
        np.testing.assert_allclose(got, expected, rtol=1e-5, err_msg=f"loss, norm, rate of step {step}")
    # Weights move by up to 8e-3. Adam divides by the gradient's size: rounding shows where that is near 0.
    for name, expected in fresh_case.arrays("train/var/").items():
        np.testing.assert_allclose(model.weights[name], expected, rtol=1e-5, atol=2e-5, err_msg=name)


def small_model(**options):
    """A model with all weights random: the original's zeros for the clusters would hide a mistake there."""
    model = ReferenceModel(**{**SMALL, "d_embed": 8, "mem_len": 4, **options})
    rng = np.random.default_rng(1)
    model.assign({name: rng.normal(0, 0.3, variable.shape) for name, variable in model.weights.items()})
    return model


def small_batch(batch=3, tgt_len=5, dtype=np.int64):
    rng = np.random.default_rng(2)
    return rng.integers(0, SMALL["n_token"], [2, tgt_len, batch]).astype(dtype)  # inputs, labels


BINS = [
    dict(d_embed=8),
    dict(d_embed=6),
    dict(d_embed=8, cutoffs=[6, 14]),
    dict(d_embed=6, cutoffs=[6, 14]),
    dict(d_embed=8, cutoffs=[6, 14], div_val=2),
    dict(d_embed=16, cutoffs=[6, 14, 20], div_val=2),  # the second bin has the width of the model
]
FAST_BINS = [(1, True, False), (3, True, True), (5, False, True)]


@pytest.mark.parametrize(
    "bins, proj_share_all_but_first, proj_same_dim",
    [
        pytest.param(bins, *projs, marks=[] if (i, *projs) in FAST_BINS else SLOW)
        for i, bins in enumerate(BINS)
        for projs in itertools.product([False, True], repeat=2)
    ],
    ids=str,
)
def test_log_probs_are_a_distribution_and_agree_with_nll(bins, proj_share_all_but_first, proj_same_dim):
    projs = dict(proj_share_all_but_first=proj_share_all_but_first, proj_same_dim=proj_same_dim)
    model = small_model(**bins, **projs)
    inputs, labels = small_batch()
    mems = model.initial_mems(3)
    nll, mems = model.nll(inputs, labels, mems)
    nll, _ = model.nll(inputs, labels, mems)
    log_probs = model.log_probs(inputs, mems).numpy()
    assert log_probs.shape == (5, 3, SMALL["n_token"])
    np.testing.assert_allclose(np.exp(log_probs).sum(-1), 1.0, rtol=1e-5)
    of_labels = np.take_along_axis(log_probs, labels[:, :, None], -1)[:, :, 0]
    np.testing.assert_allclose(of_labels, -nll.numpy(), rtol=1e-5)


def test_bins_without_any_word_of_the_batch():
    model = small_model(cutoffs=[6, 14], div_val=2)
    inputs = labels = np.full([5, 3], 2)
    with tf.GradientTape() as tape:
        nll, _ = model.nll(inputs, labels, model.initial_mems(3))
    log_probs = model.log_probs(inputs, model.initial_mems(3)).numpy()
    np.testing.assert_allclose(nll, -log_probs[:, :, 2], rtol=1e-5)
    rare_bias = model.weights["transformer/adaptive_softmax/cutoff_2/b"]
    np.testing.assert_array_equal(tape.gradient(nll, rare_bias), np.zeros(9))


@pytest.mark.slow
def test_tf_function_and_int32_change_nothing():
    model = small_model(cutoffs=[6, 14], div_val=2)
    mems = model.initial_mems(3)
    expected, expected_mems = model.nll(*small_batch(), mems)
    nll, new_mems = tf.function(model.nll)(*small_batch(dtype=np.int32), mems)
    np.testing.assert_allclose(nll, expected, rtol=1e-5)
    np.testing.assert_allclose(new_mems[1], expected_mems[1], atol=1e-5)


@SLOW
def test_without_memory_the_memory_stays_empty_and_training_runs():
    model = small_model(mem_len=0)
    model.compile(learning_rate=0.01, train_steps=10)
    inputs, labels = small_batch()
    mems = model.initial_mems(3)
    before, _ = model.nll(inputs, labels, mems)
    for _ in range(3):
        *_, mems = model.train_step(inputs, labels, mems)
    after, _ = model.nll(inputs, labels, mems)
    assert [mem.shape for mem in mems] == [(0, 3, 8)] * 2
    assert np.mean(after) < np.mean(before)


def test_div_val_without_cutoffs_is_one_bin():
    assert list(small_model(div_val=4).weights) == list(small_model().weights)


def test_dropout_only_in_training():
    x = reference_model.dropout(tf.ones([200, 100]), 0.25, is_training=True).numpy()
    np.testing.assert_allclose(np.unique(x), [0, 1 / 0.75])
    assert 0.24 < np.mean(x == 0) < 0.26

    plain, dropping = small_model(), small_model(dropout=0.5, dropatt=0.5)
    inputs, labels = small_batch()
    mems = plain.initial_mems(3)
    expected, _ = plain.nll(inputs, labels, mems)
    np.testing.assert_array_equal(dropping.nll(inputs, labels, mems)[0], expected)
    assert np.abs(dropping.nll(inputs, labels, mems, is_training=True)[0] - expected).min() > 0


def test_rel_shift():
    x = np.array([[12, 11, 10], [22, 21, 20]], np.float32)  # query i, distance 2 ... 0; tgt_len 2, mem_len 1
    shifted = reference_model.rel_shift(x[:, :, None, None])[:, :, 0, 0]
    np.testing.assert_array_equal(shifted, [[11, 10, 0], [22, 21, 20]])


def test_create_mask():
    mask = reference_model.create_mask(3, 2)
    np.testing.assert_array_equal(mask, [[0, 0, 0, 1, 1], [0, 0, 0, 0, 1], [0, 0, 0, 0, 0]])
    mask = reference_model.create_mask(3, 2, same_length=True)
    np.testing.assert_array_equal(mask, [[0, 0, 0, 1, 1], [1, 0, 0, 0, 1], [1, 1, 0, 0, 0]])


def test_assign_names_what_does_not_fit():
    model = small_model()
    arrays = {name: variable.numpy() for name, variable in model.weights.items()}
    bias = arrays.pop("transformer/adaptive_softmax/bias")
    with pytest.raises(ValueError, match="missing .*adaptive_softmax/bias"):
        model.assign(arrays)
    with pytest.raises(ValueError, match="unknown .*global_step"):
        model.assign({**arrays, "transformer/adaptive_softmax/bias": bias, "global_step": np.zeros([])})
    with pytest.raises(ValueError, match=r"bias must have shape \(23,\), got \(22,\)"):
        model.assign({**arrays, "transformer/adaptive_softmax/bias": bias[1:]})


def test_initial_weights():
    model = ReferenceModel(**{**SMALL, "d_embed": 64, "n_token": 2000, "cutoffs": [1000]}, init_std=0.5)
    weights = {k.removeprefix("transformer/"): variable.numpy() for k, variable in model.weights.items()}
    assert np.std(weights["adaptive_embed/lookup_table"]) == pytest.approx(0.5, rel=0.05)
    assert np.std(weights["adaptive_embed/proj_W"]) == pytest.approx(0.01, rel=0.2)
    assert np.std(weights["adaptive_softmax/cutoff_1/proj"]) == pytest.approx(0.01, rel=0.2)
    np.testing.assert_array_equal(weights["layer_1/ff/LayerNorm/gamma"], np.ones(8))
    np.testing.assert_array_equal(weights["layer_1/ff/LayerNorm/beta"], np.zeros(8))
    np.testing.assert_array_equal(weights["layer_1/ff/layer_1/bias"], np.zeros(12))
    np.testing.assert_array_equal(weights["adaptive_softmax/cutoff_0/cluster_W"], np.zeros([1, 64]))


def test_train_step_needs_compile():
    model = small_model()
    with pytest.raises(ValueError, match="compile"):
        model.train_step(*small_batch(), model.initial_mems(3))
