"""`compile(metrics=...)` of models with metrics of their own: over what, under which names, on several replicas."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import SMALL, randomise

import txl_tf
from txl_tf.errors import ParameterError
from txl_tf.training.compiled_metrics import CompiledMetrics

RNG = np.random.default_rng(0)
LABELS = RNG.integers(0, 5, [6, 4]).astype(np.int32)
LOGITS = RNG.normal(size=[6, 4, 5]).astype(np.float32)
KEPT = (RNG.random([6, 4]) < 0.7).astype(np.float32)
WEIGHTS = KEPT * RNG.integers(1, 4, [6, 4])
RIGHT = LOGITS.argmax(-1) == LABELS
IN_TOP_2 = np.take_along_axis(LOGITS, LABELS[..., None], -1)[..., 0] >= np.sort(LOGITS, -1)[..., -2]
NLL = np.log(np.exp(LOGITS).sum(-1)) - np.take_along_axis(LOGITS, LABELS[..., None], -1)[..., 0]


class Counts(keras.metrics.Metric):
    """Makes its variable in the first update, and returns several numbers."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        if not self.variables:
            self.counts = self.add_variable((2,), "zeros", name="counts")
        self.counts.assign_add(tf.stack([tf.reduce_sum(sample_weight), tf.cast(tf.size(y_true), tf.float32)]))

    def result(self):
        return {"weight": self.counts[0], "all": self.counts[1]}


def is_right(labels, outputs):
    return tf.cast(tf.argmax(outputs, -1, output_type=tf.int32) == labels, tf.float32)


def whole_row(labels, outputs):
    return tf.reduce_min(is_right(labels, outputs), 1)


def right_in_row(labels, outputs):
    return tf.reduce_mean(is_right(labels, outputs), 1)


def largest(labels, outputs):
    return tf.reduce_max(outputs)


def make_metrics():
    top_2 = keras.metrics.SparseTopKCategoricalAccuracy(2, name="top_2")
    own = [is_right, whole_row, Counts(name="counts"), "sparse_categorical_accuracy"]
    return CompiledMetrics(["acc", "ce", top_2, *own], ["sparse_categorical_accuracy"], n_classes=5)


EXPECTED = {
    "acc": np.average(RIGHT, weights=KEPT),
    "ce": np.average(NLL, weights=KEPT),
    "top_2": np.average(IN_TOP_2, weights=KEPT),
    "is_right": np.average(RIGHT, weights=KEPT),
    "whole_row": np.average(RIGHT.all(1), weights=KEPT.any(1)),
    "sparse_categorical_accuracy": np.average(RIGHT, weights=KEPT),
    "weighted_sparse_categorical_accuracy": np.average(RIGHT, weights=WEIGHTS),
    "weight": KEPT.sum(),
    "all": KEPT.size,
}


def test_metrics_are_of_labels_that_count_and_weighted_ones_of_their_weights():
    metrics = make_metrics()
    for rows in (slice(0, 2), slice(2, 6)):
        found = metrics.update(LABELS[rows], LOGITS[rows], KEPT[rows], WEIGHTS[rows])
    assert {name: float(value) for name, value in found.items()} == pytest.approx(EXPECTED, rel=1e-5)
    number = CompiledMetrics([largest])
    for rows in (slice(0, 2), slice(2, 6)):
        found = number.update(LABELS[rows], LOGITS[rows], KEPT[rows], WEIGHTS[rows])
    assert float(found["largest"]) == pytest.approx((LOGITS[:2].max() + LOGITS[2:].max()) / 2)


@pytest.mark.parametrize(
    "make_metric",
    [
        lambda: "crossentropy",
        lambda: "ce",
        lambda: "sparse_categorical_crossentropy",
        lambda: "SparseCategoricalCrossentropy",
        lambda: keras.metrics.SparseCategoricalCrossentropy,
        lambda: keras.losses.SparseCategoricalCrossentropy,
        lambda: keras.metrics.sparse_categorical_crossentropy,
        lambda: keras.losses.sparse_categorical_crossentropy,
        lambda: keras.metrics.SparseCategoricalCrossentropy(from_logits=True),
        lambda: keras.metrics.serialize(keras.metrics.SparseCategoricalCrossentropy(from_logits=True)),
    ],
)
def test_every_spelling_of_the_cross_entropy_is_that_of_logits(make_metric):
    metrics = CompiledMetrics([make_metric()], n_classes=5)
    (value,) = metrics.update(LABELS, LOGITS, KEPT, WEIGHTS).values()
    assert float(value) == pytest.approx(np.average(NLL, weights=KEPT), rel=1e-5)


@pytest.mark.parametrize(
    "make_metric",
    [
        keras.metrics.SparseCategoricalCrossentropy,
        keras.losses.SparseCategoricalCrossentropy,
        lambda: keras.metrics.serialize(keras.metrics.SparseCategoricalCrossentropy()),
        lambda: "binary_crossentropy",
    ],
)
def test_a_metric_of_probabilities_is_refused(make_metric):
    metric = make_metric()
    with pytest.raises(ParameterError) as caught:
        CompiledMetrics(weighted_metrics=[metric], n_classes=5)
    assert caught.value.name == "weighted_metrics" and caught.value.value is metric


class OfProbabilities(keras.metrics.SparseCategoricalCrossentropy):
    """A metric of the user's, which turns logits into probabilities itself."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        super().update_state(y_true, tf.nn.softmax(y_pred), sample_weight)


def test_a_metric_of_ones_own_decides_itself_what_it_does_with_logits():
    found = CompiledMetrics([OfProbabilities(name="own")], n_classes=5).update(LABELS, LOGITS, KEPT, WEIGHTS)
    assert float(found["own"]) == pytest.approx(np.average(NLL, weights=KEPT), rel=1e-4)


def test_two_replicas_of_unequal_shares_find_what_one_finds(two_replicas):
    with two_replicas.scope():
        metrics = make_metrics()

    def step(*arrays):
        first = tf.distribute.get_replica_context().replica_id_in_sync_group == 0
        return metrics.update(*(tf.cond(first, lambda x=x: x[:2], lambda x=x: x[2:]) for x in map(tf.constant, arrays)))

    found = two_replicas.run(step, args=(LABELS, LOGITS, KEPT, WEIGHTS))
    for replica in range(2):
        values = {name: float(two_replicas.experimental_local_results(x)[replica]) for name, x in found.items()}
        assert values == pytest.approx(EXPECTED, rel=1e-5)


@pytest.mark.parametrize(
    "make_metrics",
    [
        lambda: ["nothing of Keras"],
        lambda: [3],
        lambda: [np.array([1, 2])],
        lambda: [np.array(["acc"])],
        lambda: {"output": "acc"},
        lambda: [keras.metrics.SparseCategoricalAccuracy(name="loss")],
        lambda: ["acc", "acc"],
    ],
)
def test_what_is_no_metric_and_names_that_are_taken_are_errors(make_metrics):
    with pytest.raises(ParameterError) as caught:
        CompiledMetrics(make_metrics(), own_names=["loss", "accuracy"])
    assert caught.value.name == "metrics" and caught.value.allowed


@pytest.mark.parametrize("argument", ["metrics", "weighted_metrics"])
def test_a_metric_of_another_strategy_is_an_error(two_replicas, argument):
    metric = keras.metrics.SparseCategoricalAccuracy(name="mine")
    with two_replicas.scope(), pytest.raises(ParameterError) as caught:
        CompiledMetrics(**{argument: [metric]})
    assert (caught.value.name, caught.value.value) == (argument, "mine")


def test_a_name_that_a_weighted_metric_takes_again_is_an_error_of_its_argument():
    metric = keras.metrics.SparseCategoricalAccuracy(name="acc")
    with pytest.raises(ParameterError) as caught:
        CompiledMetrics(["acc"], [metric], n_classes=5)
    assert (caught.value.name, caught.value.value) == ("weighted_metrics", "acc")


# ---------------------------------------- models


def transformer():
    keras.utils.set_random_seed(0)
    model = txl_tf.Transformer(
        num_layers=1, d_model=8, num_heads=2, dff=8, input_vocab_size=5, target_vocab_size=5, rate=0.0, seed=1
    )
    randomise(model)
    return model


def tagger():
    keras.utils.set_random_seed(0)
    model = txl_tf.Tagger(
        txl_tf.Tener(n_token=5, n_layer=1, d_model=8, n_head=2, d_inner=8), ["O", "B-X", "I-X"], seed=1
    )
    randomise(model)
    return model


SOURCE = RNG.integers(1, 5, [6, 4])
TARGET = np.where(np.arange(5) < RNG.integers(2, 6, [6, 1]), RNG.integers(1, 5, [6, 5]), 0)
TAGS = RNG.integers(0, 3, [6, 5])


def test_an_encoder_decoder_measures_labels_and_logits():
    """Its own accuracy is what Keras calls so; other names are besides, in every method."""
    model = transformer()
    names = ["accuracy", "sparse_categorical_accuracy", "sparse_top_k_categorical_accuracy"]
    model.compile(keras.optimizers.SGD(0.0), metrics=names, weighted_metrics=[is_right], run_eagerly=True)
    logits, labels = model((SOURCE, TARGET[:, :-1])).numpy(), TARGET[:, 1:]
    weights = RNG.random(labels.shape).astype(np.float32)
    right, kept = logits.argmax(-1) == labels, labels > 0
    plain, weighted = np.average(right, weights=kept), np.average(right, weights=kept * weights)
    data = SOURCE, TARGET, weights
    for logs in (model.test_on_batch(*data, return_dict=True), model.train_on_batch(*data, return_dict=True)):
        assert logs["accuracy"] == pytest.approx(weighted, rel=1e-5)
        assert logs["sparse_categorical_accuracy"] == pytest.approx(plain, rel=1e-5)
        assert logs["is_right"] == pytest.approx(weighted, rel=1e-5)
        assert logs["sparse_top_k_categorical_accuracy"] == 1.0  # of five symbols
    assert [metric.name for metric in model.metrics] == ["loss", *names, "is_right"]
    with pytest.raises(ParameterError) as caught:
        model.compile("adam", metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")])
    assert caught.value.value == "accuracy"


def test_a_tagger_measures_tags_and_emissions():
    model = tagger()
    model.compile(keras.optimizers.SGD(0.0), metrics=["accuracy"], run_eagerly=True)
    inputs = {"chars": TARGET}
    emissions, mask = model.emissions(inputs)
    expected = np.average(emissions.numpy().argmax(-1) == TAGS, weights=mask)
    found = model.test_on_batch(inputs, TAGS, return_dict=True)
    assert found["accuracy"] == pytest.approx(expected, rel=1e-5) and {"loss", "f1"} <= set(found)
    single = txl_tf.Tagger(model.network, ["NOUN", "VERB"], scheme="none")
    with pytest.raises(ParameterError) as caught:  # the accuracy of the best path, which is another
        single.compile("adam", metrics=["accuracy"])
    assert caught.value.value == "accuracy"


def test_a_model_in_float64_measures_rows_by_their_weights():
    model = txl_tf.Transformer(
        num_layers=1, d_model=8, num_heads=2, dff=8, input_vocab_size=5, target_vocab_size=5, rate=0.0, seed=1,
        dtype="float64",
    )  # fmt: skip
    randomise(model, scale=1.0)
    model.compile(keras.optimizers.SGD(0.0), metrics=[right_in_row], weighted_metrics=[whole_row], run_eagerly=True)
    labels = TARGET[:, 1:]
    kept = labels > 0
    right = model((SOURCE, TARGET[:, :-1])).numpy().argmax(-1) == labels
    weights = RNG.random(labels.shape)
    of_rows = (kept * weights).sum(1) / np.maximum(kept.sum(1), 1)
    assert kept.any(1).all() and 0 < right.mean() < 1
    logs = model.test_on_batch(SOURCE, TARGET, weights, return_dict=True)
    assert logs["right_in_row"] == pytest.approx(right.mean(1).mean(), rel=1e-5)
    assert logs["whole_row"] == pytest.approx(np.average(right.all(1), weights=of_rows), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("make, data", [(transformer, (SOURCE, TARGET)), (tagger, ({"chars": TARGET}, TAGS))])
def test_fit_and_evaluate_measure_whole_epochs_on_any_number_of_replicas(make, data, two_replicas, tmp_path):
    def train():
        model = make()
        metrics = [keras.metrics.SparseTopKCategoricalAccuracy(2, name="top_2"), Counts(name="counts")]
        model.compile(keras.optimizers.SGD(0.1), metrics=metrics)
        options = {"batch_size": 2, "shuffle": False, "verbose": 0}
        history = model.fit(*data, epochs=2, validation_data=data, **options).history
        return model, history, model.evaluate(*data, batch_size=2, verbose=0, return_dict=True)

    one, history, result = train()
    assert history["all"] == [6 * (TARGET[:, 1:] if make is transformer else TAGS).shape[1]] * 2
    assert {f"val_{name}" for name in result} <= set(history)
    for name, value in result.items():
        assert history[f"val_{name}"][-1] == pytest.approx(value, rel=1e-5)
    with two_replicas.scope():
        _, of_two, result_of_two = train()
    for name, values in history.items():
        np.testing.assert_allclose(of_two[name], values, rtol=1e-4, atol=1e-6, err_msg=name)
    assert result_of_two == pytest.approx(result, rel=1e-4)
    more = {"window": one.metric_totals["window"] + 1}
    one.set_metric_totals(more)
    np.testing.assert_array_equal(one.metric_totals["window"], more["window"])
    with keras.saving.custom_object_scope({"Counts": Counts}):
        one.save(tmp_path / "model.keras")
        loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.evaluate(*data, batch_size=2, verbose=0, return_dict=True) == pytest.approx(result, rel=1e-6)


@pytest.mark.parametrize("argument", ["metrics", "weighted_metrics"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: "mse", lambda: "top_k_categorical_accuracy", lambda: keras.metrics.AUC(),
        lambda: keras.metrics.CategoricalAccuracy(), lambda: keras.metrics.mean_squared_error,
        lambda: keras.losses.CategoricalCrossentropy(from_logits=True), lambda: keras.metrics.MeanIoU(5),
        lambda: keras.metrics.OneHotMeanIoU(5), lambda: keras.metrics.Mean(),
    ],
    ids=["mse", "top_k", "AUC", "categorical", "function", "loss", "MeanIoU", "OneHotMeanIoU", "Mean"],
)  # fmt: skip
def test_metrics_of_keras_for_other_labels_are_refused_by_name(make, argument):
    metric = make()
    with pytest.raises(ParameterError) as caught:
        tagger().compile("adam", **{argument: [metric]})
    assert caught.value.name == argument and caught.value.value is metric


def test_a_metric_over_classes_counts_them():
    model = tagger()
    iou = keras.metrics.MeanIoU(model.n_classes, sparse_y_pred=False, name="iou")
    model.compile(keras.optimizers.SGD(0.0), metrics=[iou], run_eagerly=True)
    found = model.evaluate({"chars": TARGET}, TAGS, verbose=0, return_dict=True)["iou"]
    emissions, _ = model.emissions({"chars": TARGET})
    predicted = np.argmax(emissions, -1)
    own = keras.metrics.MeanIoU(model.n_classes)
    own.update_state(TAGS, predicted, sample_weight=TARGET != 0)
    assert found == pytest.approx(float(own.result()))


class WithMeans(txl_tf.TransformerXLLM):
    """A language model with metrics of its own, under the names that it is told."""

    def watch(self, *names):
        self.means = [keras.metrics.Mean(name=name) for name in names]
        return self


def test_sums_of_a_language_model_s_own_metrics_are_restored_by_name(caplog):
    sizes = {**SMALL, "mem_len": 2}
    before, after = WithMeans(**sizes).watch("first", "second"), WithMeans(**sizes).watch("new", "second", "first")
    for mean, value in zip(before.means, (2.0, 3.0), strict=True):
        mean.update_state(value)
    after.means[0].update_state(9.0)
    after.set_metric_totals(before.metric_totals)
    assert {mean.name: float(mean.result()) for mean in after.means[1:]} == {"first": 2.0, "second": 3.0}
    assert [record.args for record in caplog.records] == [("new",)]
