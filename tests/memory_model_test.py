"""`fit`, `evaluate` and `compile` of a model with memory, against loops of training steps written by hand."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import txl_tf


class Losses(keras.callbacks.Callback):
    """The logs of every call of the train function, of all epochs of one `fit`."""

    def on_train_begin(self, logs=None):
        self.loss, self.grad_norm = [], []

    def on_train_batch_end(self, batch, logs):
        self.loss.append(logs["loss"])
        self.grad_norm.append(logs["grad_norm"])


def dataset_of(tokens, labels):
    """A dataset of the segments, which may differ in length."""
    shape = [tokens[0].shape[0], tokens[0].shape[1] if len({t.shape for t in tokens}) == 1 else None]
    spec = tf.TensorSpec(shape, tokens[0].dtype)
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


def mean_scores(lm, tokens, labels, mems=None):
    means = []
    for segment in zip(tokens, labels, strict=True):
        nll, mems = lm.score(*segment, mems)
        means.append(nll.numpy().mean())
    return np.array(means), mems


@pytest.mark.parametrize(
    "options",
    [
        {"mem_len": 4},
        {"mem_len": 2, "same_length": True, "cutoffs": [6, 14], "div_val": 2, "proj_share_all_but_first": True},
    ],
    ids=str,
)
def test_fit_is_a_loop_of_training_steps_that_hand_the_memory_on(small_lm, small_batches, options):
    batches = small_batches(n=4)
    lm = small_lm(n_layer=1, **options)
    lm.compile(some_learning())
    losses = fit(lm, dataset_of(*batches))

    other, mems, optimizer = small_lm(n_layer=1, **options), None, some_learning()
    expected_losses, expected_norms = [], []
    for tokens, labels in zip(*batches, strict=True):
        with tf.GradientTape() as tape:
            nll, mems = other.score(tokens, labels, mems)
            loss = tf.reduce_mean(nll)
        gradients = tape.gradient(loss, other.trainable_variables)
        optimizer.apply(gradients, other.trainable_variables)
        expected_losses.append(loss)
        expected_norms.append(tf.linalg.global_norm(gradients))
    np.testing.assert_allclose(losses.loss, expected_losses, rtol=1e-5)
    np.testing.assert_allclose(losses.grad_norm, expected_norms, rtol=1e-5)
    assert_weights_equal(weights_of(lm), weights_of(other), atol=1e-5)


def test_memory_starts_from_zeros_in_every_fit_and_goes_on_over_epochs(small_lm, small_batches):
    lm = small_lm()
    batches = small_batches(n=3)
    first, mems = mean_scores(lm, *batches)
    second, _ = mean_scores(lm, *batches, mems)
    assert abs(first[0] - second[0]) > 1e-3
    lm.compile(no_learning())
    for _ in range(2):
        losses = fit(lm, dataset_of(*batches), epochs=2)
        np.testing.assert_allclose(losses.loss, [*first, *second], rtol=1e-5)


@pytest.mark.parametrize("k", [1, 2])
def test_segments_may_differ_in_length_and_history_holds_means_over_tokens(small_lm, k):
    rng = np.random.default_rng(0)
    batches = [[rng.integers(0, 23, [2, length], np.int32) for length in (5, 3, 7)] for _ in range(2)]
    lm = small_lm(n_layer=1)
    expected, _ = mean_scores(lm, *batches)
    lm.compile(no_learning(), steps_per_execution=k)
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
    """Losses and weights of two epochs of four batches with dropout, step by step in graph mode."""
    lm = dropping_lm(small_lm)
    losses = fit(lm, dataset_of(*small_batches(n=4)), epochs=2)
    return losses, weights_of(lm)


@pytest.mark.parametrize("k, cardinality", [(2, "known"), (3, "known"), (3, "unknown")])
def test_steps_per_execution_changes_nothing_whether_it_divides_the_batches_or_not(
    small_lm, small_batches, plain_run, k, cardinality
):
    losses, expected = plain_run
    lm = dropping_lm(small_lm, steps_per_execution=k)
    dataset = dataset_of(*small_batches(n=4))
    if cardinality == "unknown":
        dataset = dataset.filter(lambda *_: True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Your input ran out of data")
        k_losses = fit(lm, dataset, epochs=2)
    assert int(lm.optimizer.iterations.numpy()) == 8
    assert_weights_equal(weights_of(lm), expected)
    ends = [min(k * (i + 1), 4) + 4 * epoch - 1 for epoch in range(2) for i in range(-(-4 // k))]
    np.testing.assert_allclose(k_losses.loss, np.array(losses.loss)[ends], rtol=1e-5)


def test_steps_per_epoch_that_steps_per_execution_would_exceed_is_an_error(small_lm, small_batches):
    """Keras would run six steps for four."""
    lm = small_lm(n_layer=1)
    lm.compile(no_learning(), steps_per_execution=3)
    with pytest.raises(ValueError, match="steps_per_epoch must be a multiple of steps_per_execution=3, got 4"):
        lm.fit(dataset_of(*small_batches(n=3)).repeat(), steps_per_epoch=4)


@pytest.mark.parametrize("compile_options", [{"jit_compile": True}, {"run_eagerly": True}], ids=str)
def test_compiled_and_eager_training_equal_the_graph_s_masks_included(
    small_lm, small_batches, plain_run, compile_options
):
    losses, expected = plain_run
    lm = dropping_lm(small_lm, **compile_options)
    others = fit(lm, dataset_of(*small_batches(n=4)), epochs=2)
    np.testing.assert_allclose(others.loss, losses.loss, rtol=1e-5)
    np.testing.assert_allclose(others.grad_norm, losses.grad_norm, rtol=1e-4)
    assert_weights_equal(weights_of(lm), expected, atol=2e-5)


def test_a_training_step_can_be_called_in_a_loop_of_one_s_own(small_lm, small_batches, plain_run):
    losses, expected = plain_run
    lm = dropping_lm(small_lm)
    mems = lm.initial_mems(2)
    tokens, labels = small_batches(n=4)
    for loss, *segment in zip(losses.loss, [*tokens] * 2, [*labels] * 2, strict=True):
        logs, mems = lm.train_step(segment, mems)
        np.testing.assert_allclose(logs["loss"], loss, rtol=1e-5)
    assert_weights_equal(weights_of(lm), expected, atol=1e-5)


def test_dropout_acts_in_fit_anew_at_every_step_and_the_same_from_the_same_seed(small_lm, small_batches):
    batches = [list(ids) * 4 for ids in small_batches(n=1)]
    runs = []
    for seed in (1, 1, 2):
        keras.utils.set_random_seed(seed)
        lm = small_lm(n_layer=1, mem_len=0, dropout=0.3)
        lm.compile(no_learning())
        runs.append(fit(lm, dataset_of(*batches)).loss)
    assert len(set(runs[0])) == 4  # one batch, no learning, no memory: only the masks differ
    assert runs[0] == runs[1]
    assert not set(runs[0]) & set(runs[2])
    nothing_dropped, _ = mean_scores(lm, *batches)
    np.testing.assert_allclose(lm.evaluate(dataset_of(*batches), verbose=0), nothing_dropped[0], rtol=1e-5)


def test_a_plain_keras_optimizer_trains_and_the_gradient_norm_is_reported(small_lm, small_batches):
    batches = [list(ids) * 8 for ids in small_batches(n=1)]
    lm = small_lm(n_layer=1)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(lm.score(batches[0][0], batches[1][0])[0])
    norm = tf.linalg.global_norm(tape.gradient(loss, lm.trainable_variables))
    lm.compile("adam")
    losses = fit(lm, dataset_of(*batches))
    assert losses.loss[-1] < losses.loss[0]
    np.testing.assert_allclose(losses.grad_norm[0], norm, rtol=1e-5)


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


@pytest.mark.parametrize("bins", [{}, {"cutoffs": [6, 14], "div_val": 2}], ids=str)
def test_static_shapes_without_capacities_leave_out_nothing_and_equal_dynamic_ones(small_lm, small_batches, bins):
    batches, runs = small_batches(n=4), []
    for static_shapes in (False, True):
        lm = small_lm(n_layer=1, **bins)
        lm.compile(some_learning(), static_shapes=static_shapes, bin_capacities=None)
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


@pytest.mark.parametrize("k", [1, 3])
def test_evaluate_is_the_mean_over_tokens_with_memory_from_zeros(small_lm, k):
    lm = small_lm(n_layer=1)
    batches = text_with_a_short_end()
    means, _ = mean_scores(lm, *batches)
    expected = np.average(means, weights=[5, 5, 5, 2])
    assert abs(expected - np.mean(means)) > 1e-3
    lm.compile("sgd", steps_per_execution=k)
    for _ in range(2):
        np.testing.assert_allclose(lm.evaluate(dataset_of(*batches), verbose=0), expected, rtol=1e-5)
    result = lm.evaluate(dataset_of(*batches), verbose=0, return_dict=True)
    assert list(result) == ["loss"]
    np.testing.assert_allclose(result["loss"], expected, rtol=1e-5)


def test_validation_leaves_the_training_s_memory_alone(small_lm, small_batches):
    lm = small_lm(n_layer=1)
    batches = small_batches(n=3)
    validation = text_with_a_short_end()
    expected = np.average(mean_scores(lm, *validation)[0], weights=[5, 5, 5, 2])
    lm.compile(no_learning())
    alone = fit(lm, dataset_of(*batches), epochs=2)
    losses = fit(lm, dataset_of(*batches), epochs=2, validation_data=dataset_of(*validation))
    np.testing.assert_array_equal(losses.loss, alone.loss)
    np.testing.assert_allclose(lm.history.history["val_loss"], [expected] * 2, rtol=1e-5)


def test_validation_may_have_another_number_of_rows(small_lm, small_batches):
    lm = small_lm(n_layer=1)
    validation = small_batches(n=2, batch=3, seed=5)
    expected = mean_scores(lm, *validation)[0].mean()
    lm.compile(no_learning())
    fit(lm, dataset_of(*small_batches(n=2)), validation_data=dataset_of(*validation))
    np.testing.assert_allclose(lm.history.history["val_loss"], [expected], rtol=1e-5)


@pytest.mark.parametrize("k", [1, 2])
def test_one_model_takes_batches_of_any_number_of_rows(small_lm, small_batches, k):
    lm = small_lm(n_layer=1)
    lm.compile(no_learning(), steps_per_execution=k)
    for rows in (2, 4, 3):
        batches = small_batches(n=2, batch=rows)
        expected = mean_scores(lm, *batches)[0]
        np.testing.assert_allclose(fit(lm, dataset_of(*batches)).loss[-1], expected[-1], rtol=1e-5)
        np.testing.assert_allclose(lm.evaluate(dataset_of(*batches), verbose=0), expected.mean(), rtol=1e-5)


def test_a_step_whose_half_precision_overflows_counts_and_changes_no_weight(small_lm, small_batches):
    lm = small_lm(n_layer=1, dtype="mixed_float16")
    lm.compile(some_learning())
    for variable in lm.trainable_variables:
        variable.assign(variable * 20)
    before = weights_of(lm)
    fit(lm, dataset_of(*small_batches(n=3)))
    assert_weights_equal(weights_of(lm), before, atol=0)
    assert int(lm.optimizer.iterations.numpy()) == 3


def test_carried_mems_are_those_of_score_and_can_be_set(small_lm, small_batches):
    lm = small_lm()
    batches = small_batches(n=3)
    means, mems = mean_scores(lm, *batches)
    lm.compile(no_learning())
    fit(lm, dataset_of(*batches))
    np.testing.assert_allclose(lm.carried_mems_array(), np.stack(mems), rtol=1e-5, atol=1e-6)

    class GoOn(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.model.set_carried_mems(np.stack(mems))

    losses = Losses()
    lm.fit(dataset_of(*batches), verbose=0, callbacks=[GoOn(), losses])
    np.testing.assert_allclose(losses.loss, mean_scores(lm, *batches, mems)[0], rtol=1e-5)
    assert np.abs(np.array(losses.loss) - means).max() > 1e-3
    with pytest.raises(ValueError, match=r"\[2, 2, 4, 8\], got \[2, 3, 4, 8\]"):
        lm.set_carried_mems(np.zeros([2, 3, 4, 8]))


# ---------------------------------------- save, load


def test_saved_model_loads_without_warning_scores_the_same_and_goes_on_training(small_lm, small_batches, tmp_path):
    lm = small_lm(n_layer=1, cutoffs=[8], div_val=2, untie_r=True, proj_share_all_but_first=True, dropout=0.1)
    batches = small_batches(n=3)
    lm.compile(some_learning())
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

    assert int(loaded.optimizer.iterations.numpy()) == 3
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
    message = rf"(?s){name} must hold ids between 0 and n_token - 1 = 22, found[^\d-]*{bad}\b"
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        lm.fit(dataset, verbose=0)
    assert_weights_equal(weights_of(lm), before)
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        lm.evaluate(dataset, verbose=0)


IDS = np.zeros([3, 2, 5], np.int32)


@pytest.mark.parametrize(
    "x",
    [
        IDS,
        (IDS, IDS),
        tf.data.Dataset.from_tensor_slices(IDS),
        tf.data.Dataset.from_tensor_slices((IDS, IDS, IDS)),
        tf.data.Dataset.from_tensor_slices({"tokens": IDS, "labels": IDS}),
        tf.data.Dataset.from_tensor_slices((IDS, IDS.astype(np.float32))),
        tf.data.Dataset.from_tensor_slices((IDS[0], IDS[0])),
        tf.data.Dataset.from_tensor_slices((IDS, IDS[:, :, :4])),
    ],
    ids=["array", "arrays", "tokens alone", "three", "dict", "float labels", "no batch", "labels of another shape"],
)
def test_a_dataset_of_another_kind_is_an_error_that_says_what_is_wanted(small_lm, x):
    lm = small_lm(n_layer=1)
    lm.compile(no_learning())
    message = r"x must be a tf.data.Dataset of \(tokens, labels\), int \[batch, tgt_len\] each, got"
    with pytest.raises(ValueError, match=message):
        lm.fit(x, verbose=0)
    with pytest.raises(ValueError, match=message):
        lm.evaluate(x, verbose=0)


def test_an_empty_dataset_is_an_error(small_lm):
    lm = small_lm(n_layer=1)
    lm.compile(no_learning())
    spec = tf.TensorSpec([None, None], tf.int32)
    empty = tf.data.Dataset.from_generator(lambda: iter(()), output_signature=(spec, spec))
    with pytest.raises(ValueError, match="empty|no batch"):
        lm.fit(empty, verbose=0)


def test_a_batch_with_other_rows_than_the_first_is_an_error(small_lm):
    lm = small_lm(n_layer=1)
    lm.compile(no_learning())
    ids = np.zeros([5, 5], np.int32)
    dataset = tf.data.Dataset.from_tensor_slices((ids, ids)).batch(2)  # the last batch has one row
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="(?s)every batch must have the rows of the first.*2.*found.*1"
    ):
        lm.fit(dataset, verbose=0)


def test_fit_before_compile_is_an_error(small_lm, small_batches):
    with pytest.raises(ValueError, match="compile"):
        small_lm(n_layer=1).fit(dataset_of(*small_batches(n=1)), verbose=0)


def test_without_an_optimizer_it_evaluates_and_fit_asks_for_one(small_lm, small_batches):
    lm, batches = small_lm(n_layer=1), small_batches(n=2)
    lm.compile()
    expected = mean_scores(lm, *batches)[0].mean()
    np.testing.assert_allclose(lm.evaluate(dataset_of(*batches), verbose=0), expected, rtol=1e-5)
    before = weights_of(lm)
    with pytest.raises(ValueError, match="fit needs an optimizer, got None: compile with txl_tf.make_optimizer"):
        lm.fit(dataset_of(*batches), verbose=0)
    assert_weights_equal(weights_of(lm), before, atol=0)
    np.testing.assert_allclose(lm.evaluate(dataset_of(*batches), verbose=0), expected, rtol=1e-5)
