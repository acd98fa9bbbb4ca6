"""Keras's methods of a model with memory, against loops of training steps written by hand; and what they refuse."""

import inspect
import json
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import assert_regularized, eagerly, raises_naming, raises_parameter

import txl_tf

SLOW = pytest.mark.slow


class Losses(keras.callbacks.Callback):
    """The logs of every call of the train function, of all epochs of one `fit`."""

    def on_train_begin(self, logs=None):
        self.loss, self.grad_norm = [], []

    def on_train_batch_end(self, batch, logs):
        self.loss.append(logs["loss"])
        self.grad_norm.append(logs["grad_norm"])


def dataset_of(tokens, labels):
    """A dataset of the segments, which may differ in length."""
    if len({segment.shape for segment in tokens}) == 1:
        return tf.data.Dataset.from_tensor_slices((np.stack(tokens), np.stack(labels)))
    spec = tf.TensorSpec([tokens[0].shape[0], None], tokens[0].dtype)
    dataset = tf.data.Dataset.from_generator(lambda: zip(tokens, labels, strict=True), output_signature=(spec, spec))
    return dataset.apply(tf.data.experimental.assert_cardinality(len(tokens)))


def fit(lm, dataset, **options):
    """The logs of every call in `lm.fit`."""
    losses = Losses()
    lm.fit(dataset, verbose=0, callbacks=[losses], **options)
    return losses


def weights_of(lm):
    return [variable.numpy() for variable in lm.trainable_variables]


def assert_weights_equal(weights, expected, atol=1e-6):
    for got, array in zip(weights, expected, strict=True):
        np.testing.assert_allclose(got, array, rtol=0, atol=atol)


# ---------------------------------------- training


def no_learning():
    """With it, the loss of a batch is its score, and tells what memory it was given."""
    return keras.optimizers.SGD(0.0)


def some_learning():
    return txl_tf.make_optimizer(0.01, warmup_steps=2, train_steps=20)


@pytest.fixture(scope="module")
def _scoring_lm(small_lm):
    lm = small_lm(n_layer=1)
    lm.compile(no_learning())
    return lm


@pytest.fixture
def scoring_lm(_scoring_lm):
    """A compiled model that does not learn. Tests share it, and so its graphs; none compiles it or changes a weight."""
    _scoring_lm.reset_memory()
    return _scoring_lm


@pytest.fixture(scope="module")
def three_steps_lm(small_lm):
    """The model of `scoring_lm` with three steps in a call of the graph."""
    lm = small_lm(n_layer=1)
    lm.compile(no_learning(), steps_per_execution=3)
    return lm


def mean_scores(lm, tokens, labels, mems=None):
    means = []
    for segment in zip(tokens, labels, strict=True):
        nll, mems = lm.score(*segment, mems)
        means.append(nll.numpy().mean())
    return np.array(means), mems


def batches_that_hang_on_memory(lm, small_batches, n):
    """The first labels are the words that the memory after all segments makes likelier most: no mean hides it."""
    tokens, labels = small_batches(n)
    _, mems = mean_scores(lm, tokens, labels)
    labels[0] = np.argmax(lm.log_probs(tokens[0], mems)[0] - lm.log_probs(tokens[0])[0], -1)
    return tokens, labels


@pytest.mark.parametrize(
    "options",
    [
        {"mem_len": 2, "same_length": True},
        pytest.param(
            {"mem_len": 2, "same_length": True, "cutoffs": [6, 14], "div_val": 2, "proj_share_all_but_first": True},
            marks=SLOW,
        ),
    ],
    ids=str,
)
def test_fit_is_a_loop_of_training_steps_that_hand_the_memory_on(small_lm, small_batches, options):
    batches = small_batches(n=3)
    lm = small_lm(n_layer=1, **options)
    lm.compile(some_learning())
    losses = fit(lm, dataset_of(*batches))

    other, mems, optimizer = small_lm(n_layer=1, **options), None, some_learning()
    expected_losses, expected_norms = [], []
    for tokens, labels in zip(*batches, strict=True):
        with eagerly(), tf.GradientTape() as tape:
            nll, mems = other.score(tokens, labels, mems)
            loss = tf.reduce_mean(nll)
        gradients = tape.gradient(loss, other.trainable_variables)
        optimizer.apply(gradients, other.trainable_variables)
        expected_losses.append(loss)
        expected_norms.append(tf.linalg.global_norm(gradients))
    np.testing.assert_allclose(losses.loss, expected_losses, rtol=1e-5)
    np.testing.assert_allclose(losses.grad_norm, expected_norms, rtol=1e-5)
    assert_weights_equal(weights_of(lm), weights_of(other), atol=1e-5)


def test_memory_starts_from_zeros_in_every_fit_and_goes_on_over_epochs(scoring_lm, small_batches):
    lm, batches = scoring_lm, batches_that_hang_on_memory(scoring_lm, small_batches, n=3)
    first, mems = mean_scores(lm, *batches)
    second, _ = mean_scores(lm, *batches, mems)
    assert first[0] - second[0] > 1e-4 * first[0]
    for _ in range(2):
        losses = fit(lm, dataset_of(*batches), epochs=2)
        np.testing.assert_allclose(losses.loss, [*first, *second], rtol=1e-5)


@pytest.mark.ci
@pytest.mark.parametrize("k", [1, pytest.param(2, marks=SLOW)])
def test_segments_may_differ_in_length_and_history_holds_means_over_tokens(small_lm, scoring_lm, k):
    rng = np.random.default_rng(0)
    batches = [[rng.integers(0, 23, [2, length], np.int32) for length in (5, 3, 7)] for _ in range(2)]
    lm = scoring_lm
    if k > 1:
        lm = small_lm(n_layer=1)
        lm.compile(no_learning(), steps_per_execution=k)
    expected, _ = mean_scores(lm, *batches)
    losses = fit(lm, dataset_of(*batches))
    np.testing.assert_allclose(losses.loss, expected[[1, 2]] if k == 2 else expected, rtol=1e-5)
    assert sorted(lm.history.history) == ["grad_norm", "loss"]
    np.testing.assert_allclose(lm.history.history["loss"], [np.average(expected, weights=[5, 3, 7])], rtol=1e-5)


DROPPING = {"n_layer": 1, "dropout": 0.2, "dropatt": 0.2}


def dropping_lm(small_lm, **compile_options):
    keras.utils.set_random_seed(1)
    lm = small_lm(**DROPPING)
    lm.compile(some_learning(), **compile_options)
    return lm


@pytest.fixture(scope="module")
def plain_run(small_lm, small_batches):
    """Losses and weights of two epochs of three batches with dropout, step by step in graph mode."""
    lm = dropping_lm(small_lm)
    losses = fit(lm, dataset_of(*small_batches(n=3)), epochs=2)
    return losses, weights_of(lm)


@pytest.mark.slow
@pytest.mark.parametrize(
    "k, cardinality",
    [pytest.param(3, "known", marks=SLOW), pytest.param(2, "known", marks=SLOW), (2, "unknown")],
)
def test_steps_per_execution_changes_nothing_whether_it_divides_the_batches_or_not(
    small_lm, small_batches, plain_run, k, cardinality
):
    losses, expected = plain_run
    lm = dropping_lm(small_lm, steps_per_execution=k)
    dataset = dataset_of(*small_batches(n=3))
    if cardinality == "unknown":
        dataset = dataset.filter(lambda *_: True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Your input ran out of data")
        k_losses = fit(lm, dataset, epochs=2)
    assert int(lm.optimizer.iterations.numpy()) == 6
    assert_weights_equal(weights_of(lm), expected)
    ends = [min(k * (i + 1), 3) + 3 * epoch - 1 for epoch in range(2) for i in range(-(-3 // k))]
    np.testing.assert_allclose(k_losses.loss, np.array(losses.loss)[ends], rtol=1e-5)


def test_steps_per_epoch_that_steps_per_execution_would_exceed_is_an_error(three_steps_lm, small_batches):
    """Keras would run six steps for four."""
    with raises_parameter("steps_per_epoch", 4, limit="3"):
        three_steps_lm.fit(dataset_of(*small_batches(n=3)).repeat(), steps_per_epoch=4)


@pytest.mark.ci
def test_an_evaluation_reads_no_batch_after_its_steps(three_steps_lm, scoring_lm, small_batches):
    lm, batches = three_steps_lm, small_batches(n=5)
    expected = mean_scores(scoring_lm, *batches)[0][:4].mean()
    for name, data in {"finite": dataset_of(*batches), "repeated": dataset_of(*batches).repeat()}.items():
        np.testing.assert_allclose(lm.evaluate(data, steps=4, verbose=0), expected, rtol=1e-5, err_msg=name)
        lm.fit(data, steps_per_epoch=3, validation_data=data, validation_steps=4, verbose=0)
        np.testing.assert_allclose(lm.history.history["val_loss"], [expected], rtol=1e-5, err_msg=name)


@SLOW
@pytest.mark.parametrize(
    "compile_options",
    [
        {"jit_compile": True},
        {"run_eagerly": True},
        {"run_eagerly": True, "gradient_accumulation_steps": 2},
    ],
    ids=str,
)
def test_compiled_and_eager_training_equal_the_graph_s_masks_included(
    small_lm, small_batches, plain_run, compile_options
):
    losses, expected = plain_run
    lm = dropping_lm(small_lm, **compile_options)
    others = fit(lm, dataset_of(*small_batches(n=3)), epochs=2)
    np.testing.assert_allclose(others.loss, losses.loss, rtol=1e-5)
    np.testing.assert_allclose(others.grad_norm, losses.grad_norm, rtol=1e-4)
    assert_weights_equal(weights_of(lm), expected, atol=2e-5)


@pytest.mark.slow
def test_a_training_step_can_be_called_in_a_loop_of_one_s_own(small_lm, small_batches, plain_run):
    losses, expected = plain_run
    lm = dropping_lm(small_lm)
    mems = lm.initial_mems(2)
    tokens, labels = small_batches(n=3)
    for loss, *segment in zip(losses.loss, [*tokens] * 2, [*labels] * 2, strict=True):
        logs, mems = lm.train_step(segment, mems)
        np.testing.assert_allclose(logs["loss"], loss, rtol=1e-5)
    assert_weights_equal(weights_of(lm), expected, atol=1e-5)


@pytest.mark.slow
def test_dropout_acts_in_fit_anew_at_every_step_and_the_same_from_the_same_seed(small_lm, small_batches):
    batches = [list(ids) * 3 for ids in small_batches(n=1)]
    runs = []
    for seed in (1, 1, 2):
        keras.utils.set_random_seed(seed)
        lm = small_lm(n_layer=1, mem_len=0, dropout=0.3)
        lm.compile(no_learning(), run_eagerly=True)
        runs.append(fit(lm, dataset_of(*batches)).loss)
    assert len(set(runs[0])) == 3  # one batch, no learning, no memory: only the masks differ
    assert runs[0] == runs[1]
    assert not set(runs[0]) & set(runs[2])
    nothing_dropped, _ = mean_scores(lm, *batches)
    np.testing.assert_allclose(lm.evaluate(dataset_of(*batches), verbose=0), nothing_dropped[0], rtol=1e-5)


@pytest.mark.parametrize(
    "optimizer",
    [pytest.param("adam", marks=SLOW), {"class_name": "Adam", "config": {"loss_scale_factor": 1024.0}}],
    ids=["", "scaled"],
)
def test_a_plain_keras_optimizer_trains_and_the_gradient_norm_is_reported(small_lm, small_batches, optimizer):
    batches = [list(ids) * 4 for ids in small_batches(n=1)]
    lm = small_lm(n_layer=1, mem_len=0)
    with eagerly(), tf.GradientTape() as tape:
        loss = tf.reduce_mean(lm.score(batches[0][0], batches[1][0])[0])
    norm = tf.linalg.global_norm(tape.gradient(loss, lm.trainable_variables))
    lm.compile(keras.optimizers.get(optimizer), run_eagerly=True)
    losses = fit(lm, dataset_of(*batches))
    assert losses.loss[-1] < losses.loss[0]
    np.testing.assert_allclose(losses.grad_norm[0], norm, rtol=1e-5)


def test_a_plain_keras_optimizer_trains_in_float64_as_in_float32(small_lm, small_batches):
    runs = []
    for dtype in ("float32", "float64"):
        lm = small_lm(n_layer=1, dtype=dtype)
        lm.compile("sgd", run_eagerly=True)
        found = fit(lm, dataset_of(*small_batches(n=2)))
        runs.append(found.loss + found.grad_norm)
    np.testing.assert_allclose(runs[1], runs[0], rtol=1e-5)


def test_weights_in_float16_are_not_trained(small_lm, small_batches):
    lm = small_lm(n_layer=1, dtype="float16")
    lm.compile("adam")
    for train in (lm.fit, lambda dataset: lm.train_on_batch(*next(iter(dataset)))):
        with raises_parameter("dtype", "float16", limit="mixed_float16"):
            train(dataset_of(*small_batches(n=1)))


@pytest.mark.slow
def test_an_evaluation_takes_the_weights_that_a_callback_sets_as_it_begins(small_lm, small_batches):
    """As `keras.callbacks.SwapEMAWeights` does."""
    lm, other, dataset = small_lm(seed=1), small_lm(seed=2), dataset_of(*small_batches())
    lm.compile()
    other.compile()
    put = keras.callbacks.LambdaCallback()
    put.on_test_begin = lambda logs=None: lm.set_weights(other.get_weights())
    assert lm.evaluate(dataset, callbacks=[put], verbose=0) == other.evaluate(dataset, verbose=0)


@SLOW
@pytest.mark.parametrize("parts", [1, 2])
def test_regularizers_are_trained_for(small_lm, small_batches, parts):
    def table_after_a_step(regularizer):
        lm = small_lm()
        (table, *_) = lm.network.embedding.weights
        table.regularizer, before = regularizer, table.numpy()
        lm.compile(keras.optimizers.SGD(0.1), gradient_accumulation_steps=parts)
        lm.train_on_batch(*(ids[0] for ids in small_batches()))
        return before, table.numpy()

    assert_regularized(table_after_a_step)


@pytest.mark.slow
def test_mixed_bfloat16_trains_close_to_float32(small_lm, small_batches):
    runs = []
    for dtype in ("float32", "mixed_bfloat16"):
        lm = small_lm(n_layer=1, dtype=dtype)
        lm.compile(some_learning())
        runs.append(fit(lm, dataset_of(*small_batches(n=4)), epochs=2).loss)
        assert {variable.dtype for variable in lm.trainable_variables} == {"float32"}
    np.testing.assert_allclose(runs[1], runs[0], rtol=0.02)
    assert runs[0] != runs[1]


# ---------------------------------------- static shapes


@pytest.mark.parametrize("run_eagerly", [True, False])
@pytest.mark.parametrize("bins", [{}, {"cutoffs": [6, 14], "div_val": 2}], ids=str)
@SLOW
def test_static_shapes_without_capacities_leave_out_nothing_and_equal_dynamic_ones(
    small_lm, small_batches, bins, run_eagerly
):
    batches, runs = small_batches(n=1), []
    for static_shapes in (False, True):
        lm = small_lm(n_layer=1, **bins)
        lm.compile(some_learning(), static_shapes=static_shapes, bin_capacities=None, run_eagerly=run_eagerly)
        losses = fit(lm, dataset_of(*batches), epochs=2)
        runs.append((losses, weights_of(lm), lm.evaluate(dataset_of(*batches), verbose=0), lm.history.history))
    (dynamic, expected, evaluation, _), (static, weights, static_evaluation, history) = runs
    assert history["overflow"] == [0, 0]
    np.testing.assert_allclose(static.loss, dynamic.loss, rtol=1e-5)
    np.testing.assert_allclose(static.grad_norm, dynamic.grad_norm, rtol=1e-5)
    np.testing.assert_allclose(static_evaluation, evaluation, rtol=1e-5)
    assert_weights_equal(weights, expected, atol=1e-5)


# ---------------------------------------- evaluation


def text_with_a_short_end():
    text = np.random.default_rng(0).integers(0, 23, [2, 18]).astype(np.int32)
    cuts = [slice(0, 5), slice(5, 10), slice(10, 15), slice(15, 17)]
    return [text[:, :-1][:, cut] for cut in cuts], [text[:, 1:][:, cut] for cut in cuts]


@pytest.mark.parametrize("model", [pytest.param("scoring_lm", marks=SLOW), "three_steps_lm"])
def test_evaluate_is_the_mean_over_tokens_with_memory_from_zeros(scoring_lm, model, request):
    lm = request.getfixturevalue(model)
    tokens, labels = batches = text_with_a_short_end()
    labels[-1] = np.argmin(scoring_lm.log_probs(tokens[-1])[0], -1).astype(np.int32)  # the unlikeliest
    means, _ = mean_scores(scoring_lm, *batches)
    expected = np.average(means, weights=[5, 5, 5, 2])
    assert np.mean(means) - expected > 1e-3  # it is not the mean over segments
    for _ in range(2):
        np.testing.assert_allclose(lm.evaluate(dataset_of(*batches), verbose=0), expected, rtol=1e-5)
    result = lm.evaluate(dataset_of(*batches), verbose=0, return_dict=True)
    assert list(result) == ["loss"]
    np.testing.assert_allclose(result["loss"], expected, rtol=1e-5)


@pytest.mark.slow
def test_validation_may_have_other_rows_and_leaves_the_training_s_memory_alone(scoring_lm, small_batches):
    lm, batches = scoring_lm, small_batches(n=3)
    validation = small_batches(n=2, batch=3, seed=5)
    expected = mean_scores(lm, *validation)[0].mean()
    alone = fit(lm, dataset_of(*batches), epochs=2)
    losses = fit(lm, dataset_of(*batches), epochs=2, validation_data=dataset_of(*validation))
    np.testing.assert_array_equal(losses.loss, alone.loss)
    np.testing.assert_allclose(lm.history.history["val_loss"], [expected] * 2, rtol=1e-5)


def check_any_rows(lm, small_batches, numbers):
    for rows in numbers:
        batches = small_batches(n=2, batch=rows)
        expected = mean_scores(lm, *batches)[0]
        np.testing.assert_allclose(fit(lm, dataset_of(*batches)).loss[-1], expected[-1], rtol=1e-5)
        np.testing.assert_allclose(lm.evaluate(dataset_of(*batches), verbose=0), expected.mean(), rtol=1e-5)


@pytest.mark.slow
def test_one_model_takes_batches_of_any_number_of_rows(scoring_lm, small_batches):
    check_any_rows(scoring_lm, small_batches, (2, 3))


@SLOW
@pytest.mark.parametrize("k", [1, 2])
def test_one_model_takes_batches_of_any_number_of_rows_several_steps_a_call(small_lm, small_batches, k):
    lm = small_lm(n_layer=1)
    lm.compile(no_learning(), steps_per_execution=k)
    check_any_rows(lm, small_batches, (2, 4, 3))


def test_a_step_whose_half_precision_overflows_counts_and_changes_no_weight(small_lm, small_batches):
    lm = small_lm(n_layer=1, dtype="mixed_float16")
    lm.compile(some_learning(), run_eagerly=True)
    for variable in lm.trainable_variables:
        variable.assign(variable * 20)
    before = weights_of(lm)
    fit(lm, dataset_of(*small_batches(n=3)))
    assert_weights_equal(weights_of(lm), before, atol=0)
    assert int(lm.optimizer.iterations.numpy()) == 3


def test_carried_mems_are_those_of_score_and_can_be_set(small_lm, small_batches):
    lm = small_lm()
    batches = batches_that_hang_on_memory(lm, small_batches, n=2)
    means, mems = mean_scores(lm, *batches)
    lm.compile(no_learning(), run_eagerly=True)
    fit(lm, dataset_of(*batches))
    np.testing.assert_allclose(lm.carried_arrays()["mems"], np.stack(mems), rtol=1e-5, atol=1e-6)

    class GoOn(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.model.set_carried_arrays({"mems": np.stack(mems)})

    losses = Losses()
    lm.fit(dataset_of(*batches), verbose=0, callbacks=[GoOn(), losses])
    np.testing.assert_allclose(losses.loss, mean_scores(lm, *batches, mems)[0], rtol=1e-5)
    assert means[0] - losses.loss[0] > 1e-4 * means[0]
    with raises_parameter("mems", limit="[2, 2, 4, 8]"):
        lm.set_carried_arrays({"mems": np.zeros([2, 3, 4, 8])})


# ---------------------------------------- one batch at a time


def on_batches(lm, batches):
    """The logs of `train_on_batch` over the batches."""
    return [lm.train_on_batch(*segment, return_dict=True) for segment in zip(*batches, strict=True)]


EAGER_STATIC = {"steps_per_execution": 3, "static_shapes": True, "run_eagerly": True}


@pytest.mark.ci
@pytest.mark.parametrize(
    "options",
    [pytest.param({}, marks=SLOW), {"dropout": 0.2, "dropatt": 0.2}],
    ids=["no dropout", "dropout"],
)
@pytest.mark.parametrize(
    "compile_options",
    [
        EAGER_STATIC,
        *(
            pytest.param(options, marks=SLOW)
            for options in (
                {},
                {"steps_per_execution": 3},
                {"static_shapes": True},
                {"gradient_accumulation_steps": 2},
                {"jit_compile": True},
                {"run_eagerly": True},
            )
        ),
    ],
    ids=str,
)
def test_train_on_batch_over_batches_is_fit_over_them(small_lm, small_batches, options, compile_options):
    batches, weights = small_batches(n=2), []
    for on_batch in (False, True):
        keras.utils.set_random_seed(1)
        lm = small_lm(n_layer=1, **options)
        lm.compile(
            some_learning(), **{**compile_options, "steps_per_execution": 1} if not on_batch else compile_options
        )
        if on_batch:
            logs = on_batches(lm, batches)
        else:
            expected = fit(lm, dataset_of(*batches))
        weights.append(weights_of(lm))
    assert [row["loss"] for row in logs] == expected.loss
    assert [row["grad_norm"] for row in logs] == expected.grad_norm
    assert_weights_equal(*weights, atol=0)


@SLOW
def test_train_on_batch_of_two_replicas_is_that_of_one(small_lm, small_batches, two_replicas):
    batches, runs = small_batches(n=3), []
    for strategy in (tf.distribute.get_strategy(), two_replicas):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            lm = dropping_lm(small_lm)
        logs = on_batches(lm, batches)
        tested = [lm.test_on_batch(*segment) for segment in zip(*batches, strict=True)]
        runs.append((logs, weights_of(lm), tested, lm.evaluate(dataset_of(*batches), verbose=0)))
    (logs, weights, tested, evaluated), (two_logs, two_weights, two_tested, two_evaluated) = runs
    for row, expected in zip(two_logs, logs, strict=True):
        np.testing.assert_allclose(
            [row["loss"], row["grad_norm"]], [expected["loss"], expected["grad_norm"]], rtol=1e-5
        )
    assert_weights_equal(two_weights, weights)
    np.testing.assert_allclose(two_tested, tested, rtol=1e-5)
    np.testing.assert_allclose([np.mean(two_tested), two_evaluated], [evaluated] * 2, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("static_shapes", [pytest.param(False, marks=SLOW), True])
def test_test_on_batch_over_batches_is_evaluate_over_them(small_lm, static_shapes):
    lm, batches = small_lm(n_layer=1), text_with_a_short_end()
    lm.compile(metrics=["perplexity"], static_shapes=static_shapes, run_eagerly=static_shapes)
    expected, _ = mean_scores(lm, *batches)
    for _ in range(2):
        found = [lm.test_on_batch(*segment, return_dict=True) for segment in zip(*batches, strict=True)]
        np.testing.assert_allclose([logs["loss"] for logs in found], expected, rtol=1e-5)
        np.testing.assert_allclose([logs["perplexity"] for logs in found], np.exp(expected), rtol=1e-5)
        evaluated = lm.evaluate(dataset_of(*batches), verbose=0)[0]
        np.testing.assert_allclose(
            np.average([logs["loss"] for logs in found], weights=[5, 5, 5, 2]), evaluated, rtol=1e-5
        )
        lm.reset_memory()


@pytest.mark.slow
def test_memories_of_training_and_testing_batches_are_apart_and_those_of_fit_and_evaluate_too(
    scoring_lm, small_batches
):
    lm, batches = scoring_lm, batches_that_hang_on_memory(scoring_lm, small_batches, n=4)
    means, _ = mean_scores(lm, *batches)
    segments = list(zip(*batches, strict=True))
    found = []
    for segment in segments:
        found.append((lm.train_on_batch(*segment), lm.test_on_batch(*segment)))
        np.testing.assert_allclose(fit(lm, dataset_of(*batches)).loss, means, rtol=1e-5)
        np.testing.assert_allclose(lm.evaluate(dataset_of(*batches), verbose=0), means.mean(), rtol=1e-5)
    np.testing.assert_allclose(found, np.stack([means, means], 1), rtol=1e-5)
    goes_on = lm.train_on_batch(*segments[0])
    assert means[0] - goes_on > 1e-4 * means[0]
    lm.reset_memory()
    again = lm.train_on_batch(*segments[0]), lm.test_on_batch(*segments[0])
    np.testing.assert_allclose(again, [means[0]] * 2, rtol=1e-5)


def test_a_tested_batch_sees_the_weights_as_they_are(small_lm, small_batches):
    lm, (tokens, labels) = small_lm(n_layer=1, mem_len=0), small_batches(n=2)
    lm.compile(some_learning(), run_eagerly=True)
    for segment in zip(tokens, labels, strict=True):
        lm.train_on_batch(*segment)
        np.testing.assert_allclose(lm.test_on_batch(*segment), lm.score(*segment)[0].numpy().mean(), rtol=1e-5)


def test_what_train_on_batch_returns(small_lm, small_batches):
    lm, ((tokens,), (labels,)) = small_lm(n_layer=1), small_batches(n=1)
    loss = float(mean_scores(lm, [tokens], [labels])[0][0])
    lm.compile(no_learning(), run_eagerly=True)
    assert lm.train_on_batch(tokens.tolist(), y=labels) == pytest.approx(loss, rel=1e-5)
    assert sorted(lm.train_on_batch(tf.constant(tokens), labels, return_dict=True)) == ["grad_norm", "loss"]
    lm.compile(no_learning(), metrics=["bits"], run_eagerly=True)
    lm.reset_memory()
    assert lm.train_on_batch(tokens, labels) == pytest.approx([loss, loss / np.log(2)], rel=1e-5)
    lm.reset_memory()
    assert lm.test_on_batch(tokens, labels) == pytest.approx([loss, loss / np.log(2)], rel=1e-5)


@pytest.mark.parametrize("method", ["train_on_batch", "test_on_batch"])
def test_a_bad_batch_is_an_error_that_names_it_and_the_memory_stays(scoring_lm, small_lm, small_batches, method):
    lm, batches = scoring_lm, small_batches(n=2)
    means, _ = mean_scores(lm, *batches)
    segments = list(zip(*batches, strict=True))
    on_batch = getattr(lm, method)
    found = [on_batch(*segments[0])]
    ids = np.zeros([3, 5], np.int32)
    for arguments, facts in [
        ((ids, ids), ("x", method, 2, 3, "reset_memory()")),
        ((ids + 23, ids), ("tokens", 0, 22, 23)),
        ((ids, ids - 1), ("labels", 0, 22, -1)),
        ((ids, ids[:, :4]), ("y", "[3, 5]", "[3, 4]")),
        ((ids.astype(float), ids), ("x", "[batch, tgt_len]", "float64", "[3, 5]")),
        ((ids, ids[0]), ("y", "[batch, tgt_len]", "int32", "[5]")),
        ((ids,), ("y", "[batch, tgt_len]", "NoneType")),
        ((dataset_of(*batches), None), ("x", "[batch, tgt_len]", "_TensorSliceDataset")),
    ]:
        with raises_naming(ValueError, *facts):
            on_batch(*arguments)
    found.append(on_batch(*segments[1]))
    np.testing.assert_allclose(found, means, rtol=1e-5)
    with pytest.raises(ValueError, match="compile"):
        getattr(small_lm(n_layer=1), method)(*segments[0])


def test_train_on_batch_needs_an_optimizer_and_rows_for_every_replica(small_lm, small_batches, two_replicas):
    (tokens,), (labels,) = small_batches(n=1, batch=3)
    lm = small_lm(n_layer=1)
    lm.compile()
    with raises_parameter("optimizer", None):
        lm.train_on_batch(tokens, labels)
    with two_replicas.scope():
        lm = small_lm(n_layer=1)
        lm.compile("sgd")
    with raises_parameter("batch", 3, limit="2 rows"):
        lm.train_on_batch(tokens, labels)


# ---------------------------------------- metrics

METRICS = {"perplexity": np.exp, "bits": lambda nll: nll / np.log(2)}


@pytest.mark.ci
@pytest.mark.parametrize(
    "replicas, k, run_eagerly",
    [(1, 3, True), *(pytest.param(replicas, k, False, marks=SLOW) for replicas in (1, 2) for k in (1, 3))],
)
def test_metrics_are_of_the_mean_nll_over_all_tokens(small_lm, scoring_lm, request, replicas, k, run_eagerly):
    lengths = [5, 3, 7, 4]
    rng = np.random.default_rng(0)
    batches = [[rng.integers(0, 23, [2, length], np.int32) for length in lengths] for _ in range(2)]
    strategy = request.getfixturevalue("two_replicas") if replicas == 2 else tf.distribute.get_strategy()
    with strategy.scope():
        lm = small_lm(n_layer=1)
        metrics = ["perplexity", "bits"]
        lm.compile(no_learning(), metrics=metrics, steps_per_execution=k, run_eagerly=run_eagerly)
    validation = [segments[2:] for segments in text_with_a_short_end()]
    means, _ = mean_scores(scoring_lm, *batches)
    val_means, _ = mean_scores(scoring_lm, *validation)
    nll, val_nll = np.average(means, weights=lengths), np.average(val_means, weights=[5, 2])
    assert np.abs(np.exp(nll) - np.average(np.exp(means), weights=lengths)) > 1e-3  # not the mean of exponentials

    class Rows(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.rows = []

        def on_train_batch_end(self, batch, logs):
            self.rows.append({name: float(value) for name, value in logs.items()})

    rows = Rows()
    history = lm.fit(
        dataset_of(*batches), epochs=1, validation_data=dataset_of(*validation), verbose=0, callbacks=[rows]
    ).history
    for row, mean in zip(rows.rows, means if k == 1 else means[[2, 3]], strict=True):
        for name, of_nll in METRICS.items():
            np.testing.assert_allclose(row[name], of_nll(mean), rtol=1e-5)
    for name, of_nll in METRICS.items():
        np.testing.assert_allclose(history[name], [of_nll(nll)], rtol=1e-5)
        np.testing.assert_allclose(history[f"val_{name}"], [of_nll(val_nll)], rtol=1e-5)
    result = lm.evaluate(dataset_of(*validation), verbose=0, return_dict=True)
    assert list(result) == lm.metrics_names == ["loss", "perplexity", "bits"]
    expected = [val_nll, np.exp(val_nll), val_nll / np.log(2)]
    np.testing.assert_allclose(list(result.values()), expected, rtol=1e-5)
    np.testing.assert_allclose(lm.evaluate(dataset_of(*validation), verbose=0), expected, rtol=1e-5)


def test_metrics_that_nobody_asked_for_are_not_there(small_lm, small_batches):
    lm, dataset = small_lm(n_layer=1), dataset_of(*small_batches(n=1))
    lm.compile(no_learning(), metrics=["bits"], run_eagerly=True)
    lm.fit(dataset, verbose=0)
    lm.compile(no_learning(), run_eagerly=True)
    assert sorted(lm.fit(dataset, validation_data=dataset, verbose=0).history) == ["grad_norm", "loss", "val_loss"]
    assert lm.metrics_names == ["loss"]
    assert isinstance(lm.evaluate(dataset, verbose=0), float)


def test_metrics_are_saved_with_the_model(small_lm, small_batches, tmp_path):
    lm, dataset = small_lm(n_layer=1), dataset_of(*small_batches())
    lm.compile(some_learning(), metrics=["bits", "perplexity"], run_eagerly=True)
    lm.save(tmp_path / "m.keras")
    json.dumps(lm.get_compile_config())
    loaded = keras.saving.load_model(tmp_path / "m.keras")
    assert loaded.metrics_names == ["loss", "bits", "perplexity"]
    assert loaded.run_eagerly
    np.testing.assert_array_equal(loaded.evaluate(dataset, verbose=0), lm.evaluate(dataset, verbose=0))


def test_a_perplexity_beyond_all_floats_is_infinite(small_lm, small_batches):
    lm = small_lm(n_layer=1)
    for variable in lm.trainable_variables:
        variable.assign(variable * 1e3)
    lm.compile(metrics=["perplexity"], run_eagerly=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss, perplexity = lm.evaluate(dataset_of(*small_batches()), verbose=0)
    assert loss > 1000 and perplexity == np.inf


def test_what_compile_refuses(small_lm):
    lm = small_lm(n_layer=1, cutoffs=[6, 14])
    for options, limit in [
        ({"loss": "mse"}, ""),
        ({"loss_weights": [1.0]}, ""),
        ({"metrics": ["accuracy"]}, "perplexity"),
        ({"metrics": [keras.metrics.Mean()]}, "perplexity"),
        ({"metrics": "bits"}, "a list of names"),
        ({"metrics": {"out": "bits"}}, "a list of names"),
        ({"weighted_metrics": ["bits"]}, ""),
        ({"bin_capacities": [8]}, "None"),
        ({"bin_capacities": [8], "static_shapes": True}, "one positive integer for each of the 2 "),
        ({"bin_capacities": 8, "static_shapes": True}, "one positive integer for each of the 2 "),
    ]:
        name = next(iter(options))
        value = [8] if name == "bin_capacities" else options[name]
        with raises_parameter(name, value, limit=limit):
            lm.compile("adam", **options)


def test_compile_takes_keras_s_order_and_its_scaling_of_the_loss(small_lm):
    names = list(inspect.signature(txl_tf.TransformerXLLM.compile).parameters)
    assert names[:6] == list(inspect.signature(keras.Model.compile).parameters)[:6]
    with raises_parameter("loss", "sparse_categorical_crossentropy"):
        small_lm(n_layer=1).compile("adam", "sparse_categorical_crossentropy")
    lm = small_lm(n_layer=1, dtype="mixed_float16")
    for scaled in (True, False):
        lm.compile("adam", auto_scale_loss=scaled)
        assert isinstance(lm.optimizer, keras.optimizers.LossScaleOptimizer) == scaled
        copy = small_lm(n_layer=1, dtype="mixed_float16")
        copy.compile_from_config(lm.get_compile_config())
        assert isinstance(copy.optimizer, keras.optimizers.LossScaleOptimizer) == scaled


# ---------------------------------------- callbacks of Keras


@pytest.mark.slow
def test_callbacks_of_keras_work(small_lm, small_batches, tmp_path):
    lm, dataset = small_lm(n_layer=1), dataset_of(*small_batches(n=1))
    lm.compile(keras.optimizers.SGD(0.1), metrics=["perplexity"], run_eagerly=True)
    best = keras.callbacks.ModelCheckpoint(tmp_path / "best.keras", "val_perplexity", save_best_only=True, mode="min")
    early = keras.callbacks.EarlyStopping("val_perplexity", patience=1, mode="min", restore_best_weights=True)
    backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
    worse = keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 if epoch < 2 else -0.1)  # it goes uphill
    callbacks = [best, early, backup, worse, keras.callbacks.TerminateOnNaN()]
    history = lm.fit(dataset, validation_data=dataset, epochs=9, verbose=0, callbacks=callbacks).history
    values = history["val_perplexity"]
    assert len(values) == 3 and np.argmin(values) == 1
    for model in (lm, keras.saving.load_model(tmp_path / "best.keras")):
        np.testing.assert_allclose(model.evaluate(dataset, verbose=0)[1], min(values), rtol=1e-5)


# ---------------------------------------- save, load


def test_what_is_frozen_is_frozen_in_a_saved_model_too(small_lm, small_batches, tmp_path):
    lm, batch = small_lm(n_layer=2), [ids[0] for ids in small_batches()]
    lm.network.embedding.trainable = lm.network.layers[-1].trainable = False
    lm.compile(some_learning(), run_eagerly=True)
    lm.train_on_batch(*batch)
    lm.save(tmp_path / "m.keras")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = keras.saving.load_model(tmp_path / "m.keras")
    paths = [[weight.path for weight in model.trainable_variables] for model in (lm, loaded)]
    assert paths[0] == paths[1] and len(paths[0]) < len(lm.weights)
    for found, expected in zip(loaded.optimizer.variables, lm.optimizer.variables, strict=True):
        np.testing.assert_array_equal(found, expected)
    loaded.network.embedding.trainable = True
    assert len(loaded.trainable_variables) == len(paths[0]) + len(loaded.network.embedding.weights)


def test_what_is_frozen_after_steps_is_frozen_in_a_saved_model_and_the_optimizer_keeps_its_state(
    small_lm, small_batches, tmp_path
):
    lm, batch = small_lm(n_layer=2), [ids[0] for ids in small_batches()]
    lm.compile(keras.optimizers.Adam(0.01), run_eagerly=True)
    lm.train_on_batch(*batch)
    lm.network.layers[-1].trainable = False
    lm.network.layers[-1].weights[0].trainable = True
    single = lm.trainable_variables[0]
    single.trainable = False
    for step in range(2):  # the second time, from the file of the first time
        lm.save(tmp_path / f"{step}.keras")
        lm.reset_memory()
        lm.train_on_batch(*batch)
    lm.reset_memory()
    for step, more in ((0, 2), (1, 1)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loaded = keras.saving.load_model(tmp_path / f"{step}.keras")
        paths = [[weight.path for weight in model.trainable_variables] for model in (lm, loaded)]
        assert paths[0] == paths[1] and single.path not in paths[1]
        for _ in range(more):
            loaded.reset_memory()
            loaded.train_on_batch(*batch)
        for found, expected in zip(loaded.weights, lm.weights, strict=True):
            np.testing.assert_array_equal(found, expected)


def test_averages_of_weights_are_theirs_after_some_were_frozen(small_lm, small_batches):
    def frozen(optimizer):
        lm = small_lm(n_layer=3)
        lm.compile(optimizer, run_eagerly=True)
        fit(lm, dataset_of(*small_batches()))
        lm.network.decoder_layers[0].trainable = False
        lm.softmax.trainable = False
        return lm

    lm = frozen(txl_tf.make_optimizer(1e-4, optimizer="sgd", momentum=0.0, ema=0.5))
    before = weights_of(lm)
    fit(lm, dataset_of(*small_batches()))
    assert_weights_equal(weights_of(lm), before, atol=1e-2)
    lm = frozen(keras.optimizers.SGD(1e-4, use_ema=True))  # its averages are paired with weights by position
    with raises_parameter("trainable"):
        fit(lm, dataset_of(*small_batches()))


@pytest.mark.slow
def test_saved_model_loads_without_warning_scores_the_same_and_goes_on_training(small_lm, small_batches, tmp_path):
    lm = small_lm(n_layer=1, cutoffs=[8], div_val=2, untie_r=True, proj_share_all_but_first=True, dropout=0.1)
    batches = small_batches(n=2)
    lm.compile(some_learning(), run_eagerly=True)
    fit(lm, dataset_of(*batches))
    lm.save(tmp_path / "m.keras")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = keras.saving.load_model(tmp_path / "m.keras")
    assert isinstance(loaded, txl_tf.TransformerXLLM)
    assert loaded.get_config() == lm.get_config()
    expected, expected_mems = lm.score(batches[0][1], batches[1][1])
    nll, mems = loaded.score(batches[0][1], batches[1][1])
    np.testing.assert_array_equal(nll, expected)
    np.testing.assert_array_equal(mems, expected_mems)

    assert int(loaded.optimizer.iterations.numpy()) == 2
    for model in (lm, loaded):
        fit(model, dataset_of(*batches))
    assert_weights_equal(weights_of(loaded), weights_of(lm))


# ---------------------------------------- errors


@pytest.mark.parametrize("name, bad, jit_compile", [("tokens", -1, False), ("labels", 23, True)])
def test_ids_outside_the_vocabulary_stop_fit_before_anything_changes(small_lm, small_batches, name, bad, jit_compile):
    batches = dict(zip(["tokens", "labels"], small_batches(n=1), strict=True))
    batches[name][0, 0, 2] = bad
    dataset = tf.data.Dataset.from_tensor_slices(tuple(batches.values()))
    lm = small_lm(n_layer=1)
    lm.compile(some_learning(), jit_compile=jit_compile)
    before = weights_of(lm)
    with raises_naming(tf.errors.InvalidArgumentError, name, 0, 22, bad):
        lm.fit(dataset, verbose=0)
    assert_weights_equal(weights_of(lm), before)
    with raises_naming(tf.errors.InvalidArgumentError, name, 0, 22, bad):
        lm.evaluate(dataset, verbose=0)


IDS = np.zeros([3, 2, 5], np.int32)


class Sequence(keras.utils.PyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, i):
        return IDS[i], IDS[i]


class Loader:
    """An iterable of batches, as other libraries have it."""

    def __iter__(self):
        return ((ids, ids) for ids in IDS)


def dataset_in(arrays):
    """Returns a function that makes a dataset of the arrays' slices: a module of tests makes no tensors itself."""
    return lambda: tf.data.Dataset.from_tensor_slices(arrays)


@pytest.mark.ci
@pytest.mark.parametrize(
    "x, kind, way",
    [
        (IDS, "ndarray", "segments"),
        ((IDS, IDS), "tuple", "segments"),
        (IDS.tolist(), "list", "segments"),
        (lambda: tf.constant(IDS), "EagerTensor", "segments"),
        (None, "NoneType", "segments"),
        ({"tokens": IDS, "labels": IDS}, "dict", "segments"),
        (((ids, ids) for ids in IDS), "generator", "generator"),
        (Sequence(), "Sequence", "generator"),
        (Loader(), "Loader", "generator"),
        (dataset_in(IDS), "_TensorSliceDataset of", "segments"),
        (dataset_in((IDS, IDS, IDS[:, :, :3])), "_TensorSliceDataset of", "segments"),
        (dataset_in((IDS, IDS, IDS.astype(str))), "_TensorSliceDataset of", "segments"),
        (dataset_in((IDS, IDS, IDS, IDS)), "_TensorSliceDataset of", "segments"),
        (dataset_in({"tokens": IDS, "labels": IDS}), "_TensorSliceDataset of", "segments"),
        (dataset_in((IDS, IDS.astype(np.float32))), "_TensorSliceDataset of", "segments"),
        (dataset_in((IDS[0], IDS[0])), "_TensorSliceDataset of", "segments"),
        (dataset_in((IDS, IDS[:, :, :4])), "_TensorSliceDataset of", "segments"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("method", ["fit", "evaluate", "validation_data"])
def test_data_of_another_kind_are_an_error_that_says_why_and_how_to_do_it(scoring_lm, method, x, kind, way):
    lm = scoring_lm
    x = x() if inspect.isfunction(x) else x
    name = "validation_data" if method == "validation_data" else "x"
    if method == "validation_data" and x is None:
        return  # no validation
    how = {
        "segments": "txl_tf.segments(text, batch_size, tgt_len)",
        "generator": "tf.data.Dataset.from_generator(",
    }[way]
    calls = {
        "fit": [lambda: lm.fit(x), lambda: lm.fit(x, IDS, 32), lambda: lm.fit(x, y=IDS, shuffle=True, batch_size=2)],
        "evaluate": [lambda: lm.evaluate(x), lambda: lm.evaluate(x, IDS, 32), lambda: lm.evaluate(x=x, y=IDS)],
        "validation_data": [lambda: lm.fit(tf.data.Dataset.from_tensors((IDS[0], IDS[0])), validation_data=x)],
    }
    for call in calls[method]:
        with raises_parameter(name, limit="tf.data.Dataset of (tokens, labels)") as error:
            call()
        message = str(error.value)
        assert f"got {kind}" in message and how in message and "\n" not in message


@SLOW
def test_the_ways_that_the_message_says_train_as_the_dataset_does(small_lm, small_batches):
    class Data(keras.utils.PyDataset):
        def __len__(self):
            return 3

        def __getitem__(self, i):
            return tokens[i], labels[i]

    tokens, labels = small_batches(n=3)
    spec, data = tf.TensorSpec([2, None], tf.int32), Data()
    of_keras = tf.data.Dataset.from_generator(
        lambda: (data[i] for i in range(len(data))), output_signature=(spec, spec)
    )
    weights = []
    for dataset in (dataset_of(tokens, labels), of_keras):
        lm = small_lm(n_layer=1)
        lm.compile(some_learning())
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Your input ran out of data")
            lm.fit(dataset, epochs=2, verbose=0)
        weights.append(weights_of(lm))
    assert_weights_equal(*weights, atol=0)


def test_options_that_need_independent_samples_are_an_error(scoring_lm, small_batches):
    dataset = dataset_of(*small_batches())
    for name, value in {
        "y": IDS,
        "batch_size": 2,
        "sample_weight": np.ones(2),
        "class_weight": {1: 2.0},
        "shuffle": True,
        "validation_split": 0.1,
        "validation_batch_size": 2,
    }.items():
        with raises_parameter(name) as raised:
            scoring_lm.fit(dataset, **{name: value})
        assert raised.value.value is value and str(raised.value).startswith("fit ")
        if name in ("y", "batch_size", "sample_weight"):
            with raises_parameter(name) as raised:
                scoring_lm.evaluate(dataset, **{name: value})
            assert raised.value.value is value and str(raised.value).startswith("evaluate ")


def test_options_of_keras_may_be_given_by_position_and_as_their_defaults(scoring_lm, small_batches):
    lm, batches = scoring_lm, small_batches()
    dataset = dataset_of(*batches)
    assert len(lm.fit(dataset, None, None, 3, 0).history["loss"]) == 3
    lm.fit(dataset, y=None, batch_size=None, shuffle=False, validation_split=0.0, verbose=0)
    result = lm.evaluate(dataset, None, None, 0, return_dict=True)
    np.testing.assert_allclose(result["loss"], mean_scores(lm, *batches)[0].mean(), rtol=1e-5)
    with raises_parameter("epoch", 3, error=txl_tf.UnknownArgumentError):
        lm.fit(dataset, epoch=3)


def test_an_empty_dataset_is_an_error(scoring_lm):
    spec = tf.TensorSpec([None, None], tf.int32)
    empty = tf.data.Dataset.from_generator(lambda: iter(()), output_signature=(spec, spec))
    with raises_parameter("x"):
        scoring_lm.fit(empty, verbose=0)


@pytest.mark.ci
@pytest.mark.parametrize("replicas, k", [(1, 1), pytest.param(1, 2, marks=SLOW), pytest.param(2, 1, marks=SLOW)])
def test_errors_about_a_batch_are_one_sentence(small_lm, scoring_lm, request, replicas, k):
    lm = scoring_lm
    if replicas * k > 1:
        strategy = request.getfixturevalue("two_replicas") if replicas == 2 else tf.distribute.get_strategy()
        with strategy.scope():
            lm = small_lm(n_layer=1)
            lm.compile(no_learning(), steps_per_execution=k)
    ids = np.zeros([5, 5], np.int32)
    longer = [np.zeros([2, length], np.int32) for length in (3, 5)]
    spec = tf.TensorSpec([2, None], tf.int32)
    differ = tf.data.Dataset.from_generator(lambda: iter([(longer[1], longer[0])]), output_signature=(spec, spec))
    last = tf.data.Dataset.from_tensor_slices((ids, ids)).batch(2)  # the last batch has one row
    rows = ("batch", 2, 1, "drop_remainder=True")
    wrong = ids.copy()
    wrong[0, 2] = 23
    outside = tf.data.Dataset.from_tensor_slices((ids, wrong)).batch(2, drop_remainder=True)
    for dataset, facts in [
        (last, rows),
        (outside, ("labels", 0, "n_token", 22, 23)),
        (differ, ("labels", "tokens", "2 x 5", "2 x 3")),
    ]:
        for method in (lm.fit, lm.evaluate):
            with raises_naming(tf.errors.InvalidArgumentError, *facts) as error:
                method(dataset, verbose=0)
            assert len(str(error.value).splitlines()) == 1
    with raises_naming(tf.errors.InvalidArgumentError, "segments", 3, 5) as error:
        lm.evaluate(dataset_of(longer, longer), verbose=0)
    assert len(str(error.value).splitlines()) == 1
    with raises_naming(tf.errors.InvalidArgumentError, *rows) as error:
        lm.fit(dataset_of(longer, longer), validation_data=last, verbose=0)
    assert len(str(error.value).splitlines()) == 1


def test_fit_before_compile_is_an_error(small_lm, small_batches):
    with pytest.raises(ValueError, match="compile"):
        small_lm(n_layer=1).fit(dataset_of(*small_batches(n=1)), verbose=0)


def test_without_an_optimizer_it_evaluates_and_fit_asks_for_one(small_lm, small_batches):
    lm, batches = small_lm(n_layer=1), small_batches(n=2)
    lm.compile(run_eagerly=True)
    expected = mean_scores(lm, *batches)[0].mean()
    np.testing.assert_allclose(lm.evaluate(dataset_of(*batches), verbose=0), expected, rtol=1e-5)
    before = weights_of(lm)
    with raises_parameter("optimizer", None):
        lm.fit(dataset_of(*batches), verbose=0)
    assert_weights_equal(weights_of(lm), before, atol=0)
    np.testing.assert_allclose(lm.evaluate(dataset_of(*batches), verbose=0), expected, rtol=1e-5)
