"""Adaptive softmax, and with its embedding, against the plain port, for every combination of their options."""

import itertools

import keras
import numpy as np
import pytest
import reference_model
import tensorflow as tf
from helpers import assert_round_trips, raises_parameter

import txl_tf
from txl_tf.layers import AdaptiveEmbedding
from txl_tf.nn.adaptive import AdaptiveSoftmax, adaptive_log_probs, mask_adaptive_logsoftmax

N_TOKEN, D_MODEL = 30, 64
COMBINATIONS = [
    {
        "cutoffs": cutoffs,
        "div_val": div_val,
        "d_embed": d_embed,
        "proj_share_all_but_first": share,
        "proj_same_dim": same_dim,
    }
    for cutoffs, div_val, d_embed, share, same_dim in itertools.product(
        [(), (7, 15), (7, 15, 22)], [1, 2, 4], [64, 128], [False, True], [False, True]
    )
]


# ---------------------------------------- every combination


def original_softmax(model):
    """The softmax's arguments in the plain port, after the hidden states and labels."""
    return {
        "n_token": model.n_token,
        "cutoffs": model.cutoffs,
        "div_val": model.div_val,
        "tie_projs": model.tie_projs,
        "weights": model.weights,
        "scope": "transformer/adaptive_softmax",
    }


# Every value of every option, and the most demanding ones together.
FAST = [
    ((), 1, 64, False, True),
    ((7, 15), 1, 128, False, True),
    ((7, 15, 22), 2, 64, True, True),
    ((7, 15, 22), 4, 128, False, False),
    ((7, 15), 2, 128, True, False),
]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(
            options,
            id="-".join(map(str, options.values())),
            marks=[pytest.mark.slow] * (tuple(options.values()) not in FAST),
        )
        for options in COMBINATIONS
    ],
)
def test_embedding_and_softmax_are_those_of_the_plain_port(small_pair, options):
    # small_pair also asserts that both have the same variables, by name and shape.
    lm, model = small_pair(n_token=N_TOKEN, n_layer=1, d_model=D_MODEL, n_head=1, d_head=2, d_inner=2, **options)
    rng = np.random.default_rng(0)
    tokens = rng.permutation(np.arange(N_TOKEN, dtype=np.int32)).reshape(3, 10)  # every word once, in every bin
    labels = rng.permutation(np.arange(N_TOKEN, dtype=np.int32)).reshape(3, 10)
    hidden = tf.constant(rng.normal(size=(3, 10, D_MODEL)), tf.float32)

    with tf.GradientTape() as tape:
        embeddings = lm.network.embedding(tokens)
        mixed = 0.01 * embeddings + 0.3 * hidden  # small, so that no probability saturates
        nll = lm.softmax.nll(mixed, labels, lm.network.embedding)
        loss = tf.reduce_mean(nll)
    gradients = tape.gradient(loss, lm.trainable_variables)
    log_probs = lm.softmax(mixed, embedding=lm.network.embedding)

    with tf.GradientTape() as tape:
        expected_embeddings = reference_model.mask_adaptive_embedding_lookup(
            tokens.T, N_TOKEN, D_MODEL, model.cutoffs, model.div_val, model.weights, "transformer/adaptive_embed"
        )
        expected_mixed = 0.01 * expected_embeddings + 0.3 * tf.transpose(hidden, [1, 0, 2])
        expected_nll = reference_model.mask_adaptive_logsoftmax(expected_mixed, labels.T, **original_softmax(model))
        loss = tf.reduce_mean(expected_nll)
    expected_gradients = tape.gradient(loss, model.weights)
    expected_log_probs = reference_model.full_log_probs(expected_mixed, **original_softmax(model))

    np.testing.assert_allclose(embeddings, tf.transpose(expected_embeddings, [1, 0, 2]), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(nll, tf.transpose(expected_nll), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(log_probs, tf.transpose(expected_log_probs, [1, 0, 2]), rtol=1e-5, atol=1e-5)

    np.testing.assert_allclose(np.exp(log_probs.numpy().astype(np.float64)).sum(-1), 1, rtol=1e-5)
    of_labels = np.take_along_axis(log_probs.numpy(), labels[..., None], -1)[..., 0]
    np.testing.assert_allclose(-of_labels, nll, rtol=1e-5, atol=1e-5)

    gradients = {variable.path: gradient for variable, gradient in zip(lm.trainable_variables, gradients, strict=True)}
    for name, variable in lm_variables_by_original_name(lm).items():
        expected = expected_gradients[name]
        if expected is None:  # the decoder's
            continue
        expected = tf.convert_to_tensor(expected).numpy()
        gradient = gradients[variable.path]
        assert isinstance(gradient, tf.Tensor), f"{name}: one dense gradient for a tied table, not {type(gradient)}"
        np.testing.assert_allclose(gradient, expected, rtol=0, atol=1e-5 * np.abs(expected).max(), err_msg=name)


def lm_variables_by_original_name(lm):
    arrays = {name: array.tobytes() for name, array in txl_tf.tf1_variables(lm).items()}
    by_bytes = {variable.numpy().tobytes(): variable for variable in lm.trainable_variables}
    return {name: by_bytes[data] for name, data in arrays.items()}


# ---------------------------------------- by hand


def test_nll_of_a_small_softmax_in_plain_numbers():
    """Two words in the head, three behind cluster 0, one behind cluster 1; logits are the biases alone."""
    biases = [np.log([1.0, 2.0]), np.log([1.0, 2.0, 5.0]), np.log([3.0])]
    cluster_b = np.log([4.0, 1.0])  # the head: 1, 2, 4, 1 of 8
    float32 = [np.asarray(bias, np.float32) for bias in biases]
    clusters = np.zeros([2, 2], np.float32), np.asarray(cluster_b, np.float32)
    tables = [np.zeros([size, 2], np.float32) for size in (2, 3, 1)]
    arguments = (tables, [None] * 3, float32, clusters)
    probabilities = [1 / 8, 2 / 8, 4 / 8 * 1 / 8, 4 / 8 * 2 / 8, 4 / 8 * 5 / 8, 1 / 8]

    hidden = np.ones([2, 3, 2], np.float32)
    target = np.array([[0, 1, 2], [5, 4, 3]])
    nll = mask_adaptive_logsoftmax(hidden, target, *arguments)
    np.testing.assert_allclose(nll, -np.log(probabilities)[target], rtol=1e-6)
    log_probs = adaptive_log_probs(hidden, *arguments)
    np.testing.assert_allclose(log_probs, np.broadcast_to(np.log(probabilities), [2, 3, 6]), rtol=1e-6)


def test_words_of_absent_bins_get_zero_gradients(small_lm):
    lm = small_lm(n_layer=1, cutoffs=[6, 14], div_val=2)
    tokens = np.full([2, 5], 3, np.int32)
    with tf.GradientTape() as tape:
        nll = lm.softmax.nll(lm.network(tokens)[0], tokens, lm.network.embedding)
    rare = [lm.network.embedding.tables[2], lm.softmax.biases[2], lm.softmax.projs[2]]
    for gradient in tape.gradient(nll, [variable.value for variable in rare]):
        np.testing.assert_array_equal(gradient, np.zeros(gradient.shape))
    log_probs, _ = lm(tokens)
    np.testing.assert_allclose(nll, -log_probs[..., 3], rtol=1e-5)


# ---------------------------------------- static shapes

STATIC_OPTIONS = [
    {},
    {"cutoffs": [6, 14]},
    {"cutoffs": [6, 14], "div_val": 2},
    {"cutoffs": [6, 14], "div_val": 2, "d_embed": 16, "proj_share_all_but_first": True, "proj_same_dim": False},
]


def score_and_gradients(lm, tokens, labels, capacities=None, counted=True):
    """nll, kept and the gradients of all weights of embedding and softmax, by the dynamic path without capacities.

    The loss is a weighted sum of nll over the tokens that are `counted`.
    """
    static, embedding, softmax = capacities is not None, lm.network.embedding, lm.softmax
    variables = [variable.value for variable in (*embedding.trainable_variables, *softmax.trainable_variables)]
    factors = np.linspace(0.5, 1.5, np.prod(tokens.shape), dtype=np.float32).reshape(tokens.shape)
    with tf.GradientTape() as tape:
        hidden = tf.tanh(embedding(tokens, static_shapes=static))
        if static:
            nll, kept = softmax.static_nll(hidden, labels, embedding, capacities)
        else:
            nll, kept = softmax.nll(hidden, labels, embedding), tf.ones(labels.shape, tf.bool)
        loss = tf.reduce_sum(tf.where(counted, nll, 0) * factors)
    return nll, kept, tape.gradient(loss, variables)


def assert_same(found, expected, tolerance=1e-6):
    nll, kept, gradients = found
    expected_nll, expected_kept, expected_gradients = expected
    np.testing.assert_array_equal(kept, expected_kept)
    np.testing.assert_allclose(nll, np.where(expected_kept, expected_nll, 0), rtol=tolerance, atol=tolerance)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        assert isinstance(gradient, tf.Tensor)
        np.testing.assert_allclose(gradient, expected_gradient, rtol=tolerance, atol=tolerance)


STATIC_CASES = [*itertools.product(STATIC_OPTIONS, ["exactly", "a little", "everything"])]


@pytest.mark.parametrize(
    "options, size",
    [pytest.param(*case, marks=[pytest.mark.slow] * (i not in (0, 4, 8, 9))) for i, case in enumerate(STATIC_CASES)],
    ids=str,
)
def test_static_shapes_equal_the_dynamic_path_when_nothing_overflows(small_lm, small_batches, options, size):
    lm = small_lm(**options)
    (tokens,), (labels,) = small_batches(n=1, batch=3, tgt_len=9)
    counts = np.histogram(labels, [0, *lm.softmax.cutoffs, 23])[0][1:]
    capacities = {"exactly": counts, "a little": [*(counts + 3)], "everything": [27, 1000][: len(counts)]}[size]
    assert_same(score_and_gradients(lm, tokens, labels, capacities), score_and_gradients(lm, tokens, labels))


@pytest.mark.parametrize("xla", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_tokens_beyond_a_capacity_and_labels_of_padding_are_left_out(small_lm, small_batches, xla):
    lm, capacities = small_lm(cutoffs=[6, 14], div_val=2), [4, 1000]
    (tokens,), (labels,) = small_batches(n=1, batch=3, tgt_len=9)
    expected_kept, left = np.ones(labels.shape, bool), {1: 4, 2: 1000}
    labels[0, 2] = labels[2, 6:] = -1
    for place, label in np.ndenumerate(labels):
        i = int(label >= 6) + int(label >= 14)
        if label < 0 or (i > 0 and left[i] == 0):
            expected_kept[place] = False
        elif i > 0:
            left[i] -= 1
    overflow = (labels >= 6) & (labels < 14) & ~expected_kept
    assert left[1] == 0 and overflow.sum() == 4 and left[2] < 1000

    dynamic, _, gradients = score_and_gradients(lm, tokens, np.maximum(labels, 0), counted=expected_kept)
    static = score_and_gradients(lm, tokens, labels, capacities)
    assert_same(static, (dynamic, expected_kept, gradients))
    np.testing.assert_array_equal(static[0].numpy()[~expected_kept], 0)
    if xla:
        compiled = tf.function(
            lambda: score_and_gradients(lm, tokens, labels, capacities), autograph=False, jit_compile=True
        )
        assert_same(compiled(), static)


def test_infinite_logits_of_other_bins_do_no_harm_in_empty_slots(small_lm):
    """No token is in bin 2, and the hidden states of those there are would overflow in it."""
    lm = small_lm(cutoffs=[6, 14], div_val=2)
    tokens = np.arange(12, dtype=np.int32).reshape(2, 6)
    lm.softmax.projs[2].assign(tf.fill([8 // 4, 8], 3e38))
    nll, kept, gradients = score_and_gradients(lm, tokens, tokens, capacities=[8, 8])
    assert np.isfinite(nll).all() and kept.numpy().all()
    for gradient in gradients:
        assert np.isfinite(gradient).all()
    of_weights = [*lm.network.embedding.trainable_variables, *lm.softmax.trainable_variables]
    by_path = dict(zip([weight.path for weight in of_weights], gradients, strict=True))
    for weight in (lm.network.embedding.tables[2], lm.softmax.biases[2], lm.softmax.projs[2]):
        np.testing.assert_array_equal(by_path[weight.path], np.zeros(weight.shape))


@pytest.mark.parametrize(
    "options", [pytest.param(STATIC_OPTIONS[1], marks=pytest.mark.slow), STATIC_OPTIONS[2]], ids=str
)
def test_every_shape_is_static_and_no_id_becomes_a_float(small_lm, small_batches, options):
    lm = small_lm(n_layer=1, **options)

    def operations(capacities):
        function = tf.function(lambda *ids: score_and_gradients(lm, *ids, capacities), autograph=False)
        (tokens,), (labels,) = small_batches(n=1)
        specs = [tf.TensorSpec(ids.shape, tf.int32) for ids in (tokens, labels)]
        return function.get_concrete_function(*specs).graph.get_operations()

    def of_unknown_shape(operations):
        return [op.name for op in operations if not all(tensor.shape.is_fully_defined() for tensor in op.outputs)]

    assert of_unknown_shape(operations(None))
    assert of_unknown_shape(static := operations([4, 4])) == []
    types = {op.type for op in static}
    assert {"LowerBound", "ScatterNd", "UnsortedSegmentSum"} <= types  # forward and backward pass are there
    assert not any("PartitionedCall" in name or name == "Where" for name in types)
    casts = [(op.inputs[0].dtype, op.outputs[0].dtype) for op in static if op.type == "Cast"]
    assert not any(source.is_integer and result.is_floating for source, result in casts)


@pytest.mark.parametrize("capacities", [[], [8], [8, 8, 8], [8, 0], [8, -1], [8, 8.0], {7, 8}], ids=str)
def test_capacities_that_are_not_one_a_bin_are_an_error(small_lm, capacities):
    lm = small_lm(cutoffs=[6, 14])
    with raises_parameter("bin_capacities", capacities if isinstance(capacities, list) else [capacities]):
        lm.softmax.static_nll(tf.zeros([1, 2, 8]), tf.zeros([1, 2], tf.int32), lm.network.embedding, capacities)


# ---------------------------------------- layers on their own


def test_a_table_is_tied_in_training(small_lm):
    """The table's gradient is the sum of embedding's and softmax's, in one variable."""
    lm = small_lm()
    names = [name for name in txl_tf.tf1_variables(lm) if "lookup_table" in name or "softmax" in name]
    assert names == ["transformer/adaptive_embed/lookup_table", "transformer/adaptive_softmax/bias"]


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_ids_of_either_width_give_the_same(small_lm, dtype):
    lm = small_lm(cutoffs=[6, 14], div_val=2)
    ids = np.arange(23).reshape(1, 23)
    expected = lm.network.embedding(tf.constant(ids, tf.int32))
    np.testing.assert_array_equal(lm.network.embedding(tf.constant(ids, dtype)), expected)
    expected_nll = lm.softmax.nll(expected, tf.constant(ids, tf.int32), lm.network.embedding)
    nll = lm.softmax.nll(expected, tf.constant(ids, dtype), lm.network.embedding)
    np.testing.assert_array_equal(nll, expected_nll)


@pytest.mark.parametrize("cutoffs", [[], [6, 14]])
def test_a_negative_label_is_no_word(small_lm, cutoffs):
    lm, hidden, labels = small_lm(cutoffs=cutoffs), tf.zeros([1, 2, 8]), tf.constant([[3, -100]])
    with raises_parameter("labels", value=-100):
        lm.softmax.nll(hidden, labels, lm.network.embedding)
    with pytest.raises(tf.errors.InvalidArgumentError, match="indices"):
        tf.function(lambda: lm.softmax.nll(hidden, labels, lm.network.embedding), autograph=False)()


def test_log_probs_and_nll_agree_in_mixed_precision(small_lm):
    lm = small_lm(cutoffs=[6, 14], div_val=2, dtype="mixed_bfloat16")
    hidden = tf.constant(np.random.default_rng(0).normal(size=(2, 5, 8)), tf.bfloat16)
    labels = np.random.default_rng(1).integers(0, 23, [2, 5])
    nll = lm.softmax.nll(hidden, labels, lm.network.embedding)
    log_probs = lm.softmax(hidden, embedding=lm.network.embedding)
    assert nll.dtype == log_probs.dtype == tf.float32
    np.testing.assert_allclose(np.exp(log_probs.numpy().astype(np.float64)).sum(-1), 1, rtol=1e-5)
    np.testing.assert_allclose(-np.take_along_axis(log_probs.numpy(), labels[..., None], -1)[..., 0], nll, rtol=1e-5)


def test_config_round_trips_and_initialisers_reach_their_weights():
    softmax = AdaptiveSoftmax(
        5000, 64, 32, cutoffs=[1000, 3000], div_val=2, proj_same_dim=False, proj_share_all_but_first=True,
        proj_initializer=keras.initializers.RandomNormal(stddev=0.1),
    )  # fmt: skip
    assert_round_trips(softmax)
    assert np.std(softmax.projs[0].numpy()) == pytest.approx(0.1, rel=0.1)
    assert softmax.projs[1:] == [None, None]
    for zeros in (*softmax.biases, *softmax.clusters):
        np.testing.assert_array_equal(zeros.numpy(), np.zeros(zeros.shape))


def test_bad_bins_are_an_error():
    with raises_parameter("div_val", 0, "at least 1"):
        AdaptiveSoftmax(23, 8, 8, cutoffs=[5], div_val=0)


def test_the_arguments_of_nll_are_checked():
    sizes = {"n_token": 23, "d_embed": 8, "d_proj": 8, "cutoffs": [5, 9], "div_val": 2}
    embedding, softmax = AdaptiveEmbedding(**sizes), AdaptiveSoftmax(**sizes)
    hidden, labels = tf.ones([1, 3, 8]), tf.constant([[22, 0, 7]])
    nll = softmax.nll(hidden, labels, embedding)  # builds both
    np.testing.assert_allclose(nll, softmax.nll(hidden, [[22.0, 0.0, 7.0]], embedding))
    np.testing.assert_allclose(nll, softmax.static_nll(hidden, labels, embedding, [3, 3])[0], rtol=1e-6)
    wrong = (
        {"labels": [[22, 0, 23]]}, {"labels": [[22, 0]]}, {"labels": [22, 0, 7]}, {"labels": [[0.5, 1, 2]]},
        {"labels": [["a", "b", "c"]]}, {"hidden": hidden[..., :4]}, {"embedding": None},
        {"embedding": AdaptiveEmbedding(**{**sizes, "d_embed": 16})}, {"label_smoothing": "much"}, {"z_loss": -1.0},
    )  # fmt: skip
    for change in wrong:
        arguments = {"hidden": hidden, "labels": labels, "embedding": embedding, **change}
        for compute, others in ((softmax.nll, {}), (softmax.static_nll, {"bin_capacities": [3, 3]})):
            with raises_parameter(*change):
                compute(**arguments, **others)
    with raises_parameter("labels", value=-1):
        softmax.nll(hidden, [[22, 0, -1]], embedding)
    assert softmax.static_nll(hidden, [[22, 0, -1]], embedding, [3, 3])[1].numpy().tolist() == [[True, True, False]]


def test_div_val_without_cutoffs_is_one_bin(small_lm):
    assert list(txl_tf.tf1_variables(small_lm(div_val=64))) == list(txl_tf.tf1_variables(small_lm()))
