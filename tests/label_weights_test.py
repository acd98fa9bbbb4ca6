"""Weights of labels in language models, and labels of -100: loss, gradients, logs and scores are weighted means.

Whatever the replicas, the parts of a batch and the shapes are, against loops over `lm.score` of every segment.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import eagerly, mentions, raises_naming, raises_parameter

import txl_tf
from txl_tf.data.text.checked_batches import IGNORED, check_batches, check_weights
from txl_tf.training.segment_step import weighted_sums

SLOW = pytest.mark.slow
BINS = {"cutoffs": [6, 14], "div_val": 2}

# The rows, and so replicas and parts, have unequal weights; a row and a whole segment have none.
OF_FOUR = np.random.default_rng(3).uniform(0.5, 2, [3, 4, 5]).astype(np.float32)
OF_FOUR[:, 1] *= 0.01
OF_FOUR[0, 0, 2:] = OF_FOUR[1, 1] = OF_FOUR[2] = 0
WEIGHTS = OF_FOUR[:, :2]


def some_ignored(labels):
    """Labels of which the weights above 0.5 alone count; in the first segment, all do."""
    counts = (OF_FOUR[:, : labels.shape[1]] > 0.5) | (np.arange(3) == 0)[:, None, None]
    return np.where(counts, labels, IGNORED).astype(np.int32)


def make(small_lm, strategy=None, **options):
    """A compiled model; gradients of SGD are the differences of its weights."""
    of_model = {name: options.pop(name) for name in ("cutoffs", "div_val", "mem_len", "dtype") if name in options}
    with (strategy or tf.distribute.get_strategy()).scope():
        lm = small_lm(n_layer=1, **of_model)
        lm.compile(keras.optimizers.SGD(options.pop("rate", 1.0)), **{"run_eagerly": True, **options})
    return lm


def arrays_of(lm):
    return [variable.numpy() for variable in lm.trainable_variables]


def train_by_hand(lm, tokens, labels, weights, rate=1.0):
    """Weighted mean, gradient and update of every segment, with memory: `(loss and weight of every segment)`."""
    mems, found = None, []
    for *segment, of_labels in zip(tokens, labels, weights, strict=True):
        with eagerly(), tf.GradientTape() as tape:
            nll, mems = lm.score(*segment, mems)
            loss = tf.reduce_sum(nll * of_labels) / max(of_labels.sum(), 1e-30)
        for variable, gradient in zip(lm.trainable_variables, tape.gradient(loss, lm.trainable_variables), strict=True):
            variable.assign_sub(rate * tf.convert_to_tensor(gradient))
        found.append((float(loss), float(of_labels.sum())))
    return np.array(found)


WAYS = [
    {"static_shapes": True, **BINS},
    *(
        pytest.param(options, marks=SLOW)
        for options in (
            {},
            {"gradient_accumulation_steps": 2},
            {"run_eagerly": False},
            {"run_eagerly": False, "steps_per_execution": 2},
            {"run_eagerly": False, "jit_compile": True},
            {"run_eagerly": False, "static_shapes": True, "steps_per_execution": 3},
            {"static_shapes": True, "gradient_accumulation_steps": 2},
            {"mem_len": 0},
            {"dtype": "mixed_bfloat16"},
        )
    ),
]


@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.parametrize("ignoring", [False, pytest.param(True, marks=SLOW)], ids=["weights", "ignored"])
def test_fit_trains_for_the_weighted_mean_and_logs_it(small_lm, small_batches, options, ignoring):
    check_training(small_lm, small_batches(n=3), options, ignoring)


def check_training(small_lm, batches, options, ignoring, strategy=None):
    tokens, labels = batches
    weights = (some_ignored(labels) != IGNORED).astype(np.float32) if ignoring else OF_FOUR[:, : labels.shape[1]]
    lm = make(small_lm, strategy, **options)
    other = make(small_lm, **{name: options[name] for name in options if name in ("mem_len", "dtype", *BINS)})
    expected = train_by_hand(other, tokens, labels, weights)

    given = (tokens, some_ignored(labels)) if ignoring else (tokens, labels, weights)
    history = lm.fit(tf.data.Dataset.from_tensor_slices(given), verbose=0).history
    rtol, atol = (0.03, 0.03) if "dtype" in options else (1e-5, 1e-5)
    np.testing.assert_allclose(history["loss"], np.average(expected[:, 0], weights=expected[:, 1]), rtol=rtol)
    assert history.get("overflow", [0]) == [0]
    for found, array in zip(arrays_of(lm), arrays_of(other), strict=True):
        np.testing.assert_allclose(found, array, rtol=0, atol=atol)


@pytest.mark.parametrize(
    "options",
    [
        {},
        *(
            pytest.param(options, marks=SLOW)
            for options in ({"run_eagerly": False}, {"gradient_accumulation_steps": 2}, WAYS[0])
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("ignoring", [pytest.param(False, marks=SLOW), True], ids=["weights", "ignored"])
@SLOW
def test_two_replicas_train_as_one_whatever_weights_each_has(small_lm, small_batches, two_replicas, options, ignoring):
    check_training(small_lm, small_batches(n=3, batch=4), {**options}, ignoring, two_replicas)


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"static_shapes": True, "metrics": ["bits"]}, marks=SLOW)], ids=str
)
def test_evaluate_is_the_weighted_mean_over_all_batches(small_lm, small_batches, options):
    tokens, labels = small_batches(n=3)
    lm = make(small_lm, **options)
    mems, nll = None, []
    for segment in zip(tokens, labels, strict=True):
        with eagerly():
            of_segment, mems = lm.score(*segment, mems)
        nll.append(of_segment)
    for given in ((labels, WEIGHTS), (some_ignored(labels),), (some_ignored(labels), WEIGHTS[:, :, 0] + 1)):
        counts = given[0] != IGNORED
        weights = counts * (given[1] if given[1:] and given[1].ndim == 3 else given[1][:, :, None] if given[1:] else 1)
        expected = np.average(nll, weights=weights)
        found = lm.evaluate(tf.data.Dataset.from_tensor_slices((tokens, *given)), verbose=0)
        expected = [expected, expected / np.log(2)] if "metrics" in options else expected
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    lm.reset_memory()
    batches = zip(tokens, labels, WEIGHTS, strict=True)
    one_by_one = [lm.test_on_batch(*batch, return_dict=True)["loss"] for batch in batches]
    assert one_by_one[2] == 0  # nothing counts
    evaluated = lm.evaluate(tf.data.Dataset.from_tensor_slices((tokens, labels, WEIGHTS)), verbose=0, return_dict=True)
    np.testing.assert_allclose(np.average(one_by_one, weights=WEIGHTS.sum((1, 2))), evaluated["loss"], rtol=1e-5)


def test_a_batch_in_which_nothing_counts_changes_neither_weights_nor_means_but_the_memory(small_lm, small_batches):
    tokens, labels = small_batches(n=2)
    lm = make(small_lm)
    before = arrays_of(lm)
    assert lm.train_on_batch(tokens[0], np.full_like(labels[0], IGNORED)) == 0
    for found, array in zip(arrays_of(lm), before, strict=True):
        np.testing.assert_array_equal(found, array)
    with eagerly():
        _, mems = lm.score(tokens[0], labels[0])
        expected = lm.score(tokens[1], labels[1], mems)[0].numpy().mean()
    np.testing.assert_allclose(lm.train_on_batch(tokens[1], labels[1]), expected, rtol=1e-5)


def test_weights_of_one_are_no_weights_and_those_of_rows_are_those_of_their_labels(small_lm, small_batches):
    tokens, labels = small_batches(n=1)
    trained = []
    for weights in (None, np.ones([2, 5]), [True, True], [[3], [3]]):
        lm = make(small_lm)
        logs = lm.train_on_batch(tokens[0], labels[0], weights, return_dict=True)
        trained.append([*logs.values(), *map(np.ravel, arrays_of(lm))])
    for other in trained[1:]:
        for found, expected in zip(other, trained[0], strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)


def test_labels_that_do_not_count_take_no_room_in_a_bin(small_lm, small_batches, eager):
    (tokens,), _ = small_batches(n=1)
    labels = np.array([[20, 21, 22, 1, 7], [15, 16, 17, 18, 19]], np.int32)  # eight rare words, for two places
    weights = np.array([[0, 1, 0, 1, 1], [0, 0, 0, 2, 3]], np.float32)
    for given in ((labels, weights), (np.where(weights > 0, labels, IGNORED), None)):
        lm = make(small_lm, rate=0.0, static_shapes=True, bin_capacities=[8, 2], **BINS)
        logs = lm.train_on_batch(tokens, *given, return_dict=True)
        assert logs["overflow"] == 1  # the last
        kept = np.where(labels == 19, 0, weights > 0 if given[1] is None else weights)
        nll, _ = lm.score(tokens, labels)
        np.testing.assert_allclose(logs["loss"], np.average(nll, weights=kept), rtol=1e-5)


def test_a_regularizer_counts_once_however_few_labels_count(small_lm, small_batches):
    (tokens,), (labels,) = small_batches(n=1)
    labels[:, 1:] = IGNORED
    for options in ({}, {"static_shapes": True}, {"static_shapes": True, "gradient_accumulation_steps": 2}):
        lm, tables = make(small_lm, rate=0.1, **options), []
        (table, *_), start = lm.network.embedding.weights, lm.get_weights()
        before = table.numpy()
        for regularizer in (None, keras.regularizers.L2(0.5)):
            lm.set_weights(start)
            lm.reset_memory()
            table.regularizer = regularizer
            lm.train_on_batch(tokens, labels)
            tables.append(table.numpy())
        np.testing.assert_allclose(tables[1], tables[0] - 0.1 * before, rtol=0, atol=1e-5)


def test_a_step_called_by_hand_takes_weights(small_lm, small_batches):
    (tokens,), (labels,) = small_batches(n=1)
    lm, other = make(small_lm), make(small_lm)
    weights = WEIGHTS[0]
    loss = other.train_on_batch(tokens, labels, weights)
    anything = tf.constant(np.where(weights > 0, labels, -7))
    logs, _ = lm.train_step((tf.constant(tokens), anything, tf.constant(weights)), lm.initial_mems(2))
    np.testing.assert_allclose([logs["loss"], logs["tokens"]], [loss, weights.sum()], rtol=1e-6)
    for found, expected in zip(arrays_of(lm), arrays_of(other), strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("model", [txl_tf.TransformerXLLM, txl_tf.TransformerLM])
def test_score_multiplies_by_the_weights_in_place_and_the_memory_stays(eager, small_batches, model):
    (tokens, _), (labels, _) = small_batches(n=2)
    lm = model(n_token=23, n_layer=1, d_model=8, d_embed=8, n_head=2, d_head=3, d_inner=12, mem_len=4)
    nll, mems = lm.score(tokens, labels)
    ignored = np.where(WEIGHTS[0] > 0.5, labels, IGNORED)
    for given, weights, expected in (
        (labels, WEIGHTS[0], WEIGHTS[0]),
        (labels, [0.5, 2], np.array([[0.5], [2]])),
        (ignored, None, WEIGHTS[0] > 0.5),
        (ignored, [[3], [1]], (WEIGHTS[0] > 0.5) * [[3], [1]]),
    ):
        found, new_mems = lm.score(tokens, given, sample_weight=weights)
        np.testing.assert_allclose(found, nll * expected, rtol=1e-6)
        np.testing.assert_array_equal(new_mems, mems)


def test_a_label_of_weight_zero_may_have_an_infinite_nll(small_lm):
    """For example padding that is never predicted, because its bias is -inf."""
    lm, tokens, labels, weights = small_lm(n_layer=1), [[1, 2, 3]], [[2, 3, 0]], [[1.0, 0.5, 0.0]]
    (bias,) = (weight for weight in lm.weights if weight.shape == (23,))
    bias.assign([-np.inf, *bias[1:]])
    with eagerly():
        found, expected = (lm.score(tokens, labels, sample_weight=x)[0].numpy() for x in (weights, None))
    np.testing.assert_allclose(found, [[expected[0, 0], 0.5 * expected[0, 1], 0]])
    nll, total = weighted_sums(tf.constant(expected), None, weights)
    np.testing.assert_allclose([nll, total], [found.sum(), 1.5])

    sizes = {"num_layers": 1, "d_model": 8, "num_heads": 2, "dff": 8, "input_vocab_size": 5, "target_vocab_size": 4}
    pairs = txl_tf.Transformer(**sizes, label_smoothing=0.0)
    sums = pairs.sums_of(tf.constant([[[-np.inf, 0.0, 0.0, 0.0]] * 2]), tf.constant([[2, 0]]))
    np.testing.assert_allclose([float(x) for x in sums], [np.log(3), np.log(3), 0, 1], rtol=1e-6)


def test_score_in_a_graph_knows_ignored_labels_too(small_lm, small_batches):
    (tokens,), (labels,) = small_batches(n=1)
    lm = small_lm(n_layer=1)
    score = tf.function(lambda labels: lm.score(tf.constant(tokens), labels)[0], autograph=False)
    with eagerly():
        expected = lm.score(tokens, labels)[0] * (WEIGHTS[0] > 0.5)
    np.testing.assert_allclose(score(np.where(WEIGHTS[0] > 0.5, labels, IGNORED)), expected, rtol=1e-5, atol=1e-6)


# ---------------------------------------- errors

IDS = np.zeros([2, 5], np.int32)


@pytest.mark.ci
@pytest.mark.parametrize("bad", [-0.5, np.nan, np.inf])
def test_a_weight_that_is_negative_or_not_finite_is_refused(small_lm, bad):
    weights = np.ones([2, 5], np.float32)
    weights[1, 2] = bad
    lm = make(small_lm)
    for call in (
        lambda: lm.train_on_batch(IDS, IDS, weights),
        lambda: lm.test_on_batch(IDS, IDS, weights),
        lambda: lm.score(IDS, IDS, sample_weight=weights),
        lambda: lm.score(IDS, IDS, sample_weight=weights[:, 2]),
    ):
        with pytest.raises(txl_tf.ParameterError) as caught:
            call()
        assert (caught.value.name, caught.value.allowed) == ("sample_weight", "finite and not negative")
    dataset = tf.data.Dataset.from_tensors((IDS, IDS, weights))
    for method in (lm.fit, lm.evaluate):
        with pytest.raises(tf.errors.InvalidArgumentError) as caught:
            method(dataset, verbose=0)
        assert mentions(str(caught.value), "weights", bad)


@pytest.mark.parametrize("weights", [np.array([None, 1.0]), np.ones(2, "datetime64[s]")])
def test_weights_of_a_type_that_tensorflow_lacks_are_refused(weights):
    with raises_parameter("sample_weight"):
        check_weights(weights, IDS)


def test_weights_of_another_kind_or_shape_are_refused(small_lm):
    lm = make(small_lm)
    for weights in (np.ones([2, 4]), np.ones([5]), np.ones([2, 5, 1]), 2.0, ["a", "b"], np.ones([2, 5], complex)):
        for call in (
            lambda weights=weights: lm.train_on_batch(IDS, IDS, weights),
            lambda weights=weights: lm.score(IDS, IDS, sample_weight=weights),
        ):
            with pytest.raises(txl_tf.ParameterError) as caught:
                call()
            assert caught.value.name == "sample_weight" and np.shape(caught.value.value) == np.shape(weights)
        for name, call in (("x", lm.evaluate), ("validation_data", None)):
            call = call or (lambda data: lm.fit(tf.data.Dataset.from_tensors((IDS, IDS)), validation_data=data))
            with pytest.raises(txl_tf.ParameterError) as caught:
                call(tf.data.Dataset.from_tensors((IDS, IDS, weights)))
            assert caught.value.name == name
    unknown = tf.TensorSpec([None, None], tf.float32)
    spec = tf.TensorSpec([2, None], tf.int32)
    dataset = tf.data.Dataset.from_generator(
        lambda: iter([(IDS, IDS, np.ones([2, 3]))]), output_signature=(spec, spec, unknown)
    )
    with raises_naming(tf.errors.InvalidArgumentError, "weights"):
        lm.evaluate(dataset, verbose=0)


@pytest.mark.parametrize("shape", [[2], [2, 5, 1]], ids=str)
def test_labels_of_another_rank_are_refused_with_weights_too(shape):
    labels = np.zeros(shape, np.int32)
    specs = (tf.TensorSpec(None, tf.int32), tf.TensorSpec(shape, tf.int32), tf.TensorSpec([2, 5], tf.float32))
    dataset = tf.data.Dataset.from_generator(lambda: iter([(IDS, labels, np.ones([2, 5]))]), output_signature=specs)
    with raises_parameter("x", dataset):
        check_batches(dataset, 23, static_shapes=False)


def checked_weights(weights):
    """What `check_batches` makes of weights whose rank is unknown in the graph."""
    spec = tf.TensorSpec([2, None], tf.int32)
    specs = (spec, spec, tf.TensorSpec(None, tf.float32))
    dataset = tf.data.Dataset.from_generator(lambda: iter([(IDS, IDS, weights)]), output_signature=specs)
    ((_, _, found),) = check_batches(dataset, 23, static_shapes=False).dataset
    return found


@pytest.mark.parametrize("shape", [[2], [2, 1], [2, 5]], ids=str)
def test_weights_of_unknown_rank_are_of_labels_or_of_rows(shape):
    weights = np.arange(1, 1 + np.prod(shape), dtype=np.float32).reshape(shape)
    expected = np.broadcast_to(weights.reshape(2, -1), [2, 5])
    np.testing.assert_array_equal(checked_weights(weights), expected)


@pytest.mark.ci
@pytest.mark.parametrize("shape", [[], [5], [3], [2, 0], [2, 4], [1, 5], [2, 5, 1]], ids=str)
def test_weights_of_unknown_rank_and_another_shape_are_refused(shape):
    with raises_naming(tf.errors.InvalidArgumentError, "weights", "[batch]", "[batch, tgt_len]"):
        checked_weights(np.ones(shape, np.float32))


def test_other_ids_outside_the_vocabulary_stay_errors(small_lm):
    lm = make(small_lm)
    for bad in (-1, -99, -101, 23):
        labels = IDS + bad
        for call in (lambda labels=labels: lm.score(IDS, labels), lambda labels=labels: lm.train_on_batch(IDS, labels)):
            with raises_parameter("labels", bad, limit="22"):
                call()
        with pytest.raises(tf.errors.InvalidArgumentError, match=rf"found\W+{bad}"):
            lm.evaluate(tf.data.Dataset.from_tensors((IDS, labels)), verbose=0)
    with raises_parameter("tokens"):
        lm.score(IDS + IGNORED, IDS)
    with pytest.raises(txl_tf.ParameterError) as caught:
        lm.train_on_batch(IDS, IDS, class_weight={1: 2.0})
    assert caught.value.name == "class_weight"


# ---------------------------------------- the form of batches


@pytest.mark.ci
@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.int64, np.uint8])
def test_batches_without_ignored_labels_have_no_column_of_weights(dtype):
    """So that they take the step without weights."""
    ids = np.arange(10).reshape(2, 1, 5).astype(dtype)
    labels = ids.copy()
    if dtype != np.uint8:
        labels[1, 0, 3] = IGNORED
    dataset = tf.data.Dataset.from_tensor_slices((ids, labels))
    (_, _, none), (_, second, weights) = check_batches(dataset, 23, static_shapes=False).dataset
    assert none.shape == (1, 0)
    if dtype == np.uint8:
        assert weights.shape == (1, 0) and second.numpy().tolist() == labels[1].tolist()
        return
    assert weights.numpy().tolist() == [[1, 1, 1, 0, 1]] and second.numpy().tolist() == [[5, 6, 7, 0, 9]]
    (_, plain), (_, left_out) = check_batches(dataset, 23, static_shapes=True).dataset
    assert plain.numpy().tolist() == [[0, 1, 2, 3, 4]] and left_out.numpy().tolist() == [[5, 6, 7, -1, 9]]
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"found\W+-100"):
        list(check_batches(dataset, 23, static_shapes=False, weighs="never").dataset)
