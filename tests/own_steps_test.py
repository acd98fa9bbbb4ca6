"""Hooks of Keras that a subclass overrides, or an instance replaces: used by all models, or refused by name."""

import functools
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import SMALL, randomise

import txl_tf

pytestmark = pytest.mark.ci

SLOW = pytest.mark.slow


def language_model(base=txl_tf.TransformerXLLM, rate=0.1, **options):
    of_model = {name: options.pop(name) for name in ("mem_len",) if name in options}
    lm = base(**{**SMALL, "n_layer": 1, "mem_len": 4, "dropout": 0.0, **of_model})
    randomise(lm)
    lm.compile(keras.optimizers.SGD(rate), **{"run_eagerly": True, **options})
    return lm


def subclass(base=txl_tf.TransformerXLLM, **methods):
    return type("Mine", (base,), methods)


@pytest.fixture(scope="module")
def dataset(small_batches):
    return tf.data.Dataset.from_tensor_slices(tuple(small_batches(n=2)))


@pytest.fixture(scope="module")
def plain_run(dataset):
    """A function of options of `compile`: what a model without own methods computes. Each option runs once."""

    @functools.cache
    def run(**options):
        plain = language_model(**options)
        history = plain.fit(dataset, epochs=2, validation_data=dataset, verbose=0).history
        weights, mems = arrays_of(plain), plain.carried_arrays()["mems"]
        loss = plain.evaluate(dataset, verbose=0)
        batch = next(dataset.as_numpy_iterator())
        batch_losses = [plain.train_on_batch(*batch), plain.test_on_batch(*batch)]
        return SimpleNamespace(history=history, weights=weights, mems=mems, loss=loss, batch_losses=batch_losses)

    return run


@pytest.fixture
def plain_history(plain_run):
    """Of two epochs of `dataset`, each with a validation."""
    return plain_run().history


def arrays_of(model):
    return np.concatenate([np.ravel(variable) for variable in model.trainable_variables])


# ---------------------------------------- language models: steps


def keras_s(self, data):
    logs = super(type(self), self).train_step(data)
    return {**logs, "twice": 2 * logs["loss"]}


def ours(self, data, mems):
    logs, mems = super(type(self), self).train_step(data, mems)
    return {**logs, "twice": 2 * logs["loss"]}, mems


def of_a_test(self, data):
    logs = super(type(self), self).test_step(data)
    return {**logs, "twice": 2 * logs["loss"]}


@pytest.mark.parametrize(
    "step, options",
    [
        (keras_s, {}),
        *(
            pytest.param(step, options, marks=SLOW)
            for step, options in [(ours, {}), (keras_s, {"run_eagerly": False}), (ours, {"run_eagerly": False})]
        ),
    ],
)
def test_a_step_of_either_signature_trains_with_memory_and_its_logs_are_reported(dataset, plain_run, step, options):
    own, plain = language_model(subclass(train_step=step, test_step=of_a_test), **options), plain_run(**options)
    expected = plain.history
    history = own.fit(dataset, epochs=2, validation_data=dataset, verbose=0).history
    assert {name: history[name] for name in expected} == expected
    for prefix in ("", "val_"):
        np.testing.assert_allclose(history[f"{prefix}twice"], 2 * np.array(expected[f"{prefix}loss"]), rtol=1e-6)
    np.testing.assert_array_equal(arrays_of(own), plain.weights)
    np.testing.assert_array_equal(own.carried_arrays()["mems"], plain.mems)

    loss = plain.loss
    assert own.evaluate(dataset, verbose=0) == pytest.approx([loss, 2 * loss])
    assert own.evaluate(dataset, verbose=0, return_dict=True) == pytest.approx({"loss": loss, "twice": 2 * loss})
    (batch, *_) = dataset.as_numpy_iterator()
    for method, loss in zip(("train_on_batch", "test_on_batch"), plain.batch_losses, strict=True):
        assert getattr(own, method)(*batch) == pytest.approx([loss, 2 * loss])


@SLOW
def test_what_replicas_log_besides_is_its_mean(dataset, two_replicas):
    def step(self, data):
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        return {**super(type(self), self).train_step(data), "replica": tf.cast(replica, tf.float32)}

    with two_replicas.scope():
        lm = language_model(subclass(train_step=step), run_eagerly=False)
    history = lm.fit(dataset, verbose=0).history
    assert history["replica"] == [0.5]
    np.testing.assert_allclose(history["loss"], language_model().fit(dataset, verbose=0).history["loss"], rtol=1e-5)


def test_a_step_that_forgets_the_memory_or_the_loss_is_named(dataset):
    def alone(self, data):
        return {"loss": tf.constant(1.0)}

    def without_loss(self, data, mems):
        return {"nll": tf.constant(1.0)}, mems

    for step in (alone, without_loss):
        lm = language_model(subclass(train_step=step))
        with pytest.raises(txl_tf.ParameterError) as caught:
            lm.fit(dataset, verbose=0)
        assert caught.value.name == "train_step"
    without_memory = language_model(subclass(train_step=alone), mem_len=0)
    assert without_memory.fit(dataset, verbose=0).history["loss"] == [1.0]
    with pytest.raises(txl_tf.ParameterError) as caught:
        language_model().train_step(next(iter(dataset)))  # by hand, there is no loop
    assert caught.value.name == "mems"


def test_steps_with_other_arguments_are_refused_by_compile():
    for name in ("train_step", "test_step"):
        for method in (lambda self: None, lambda self, data, mems, key: None):
            with pytest.raises(txl_tf.ParameterError) as caught:
                language_model(subclass(**{name: method}))
            assert caught.value.name == name


@SLOW
def test_several_steps_a_call_report_what_the_library_logs_alone(dataset):
    lm = language_model(subclass(train_step=keras_s), steps_per_execution=2, run_eagerly=False)
    with pytest.raises(txl_tf.ParameterError) as caught:
        lm.fit(dataset, verbose=0)
    assert (caught.value.name, caught.value.value) == ("steps_per_execution", 2)


@pytest.mark.parametrize("value", [0, -1, True, 1.5])
def test_steps_per_execution_must_be_a_number_of_steps(value):
    with pytest.raises(txl_tf.ParameterError) as caught:
        language_model(steps_per_execution=value)
    assert caught.value.name == "steps_per_execution" and caught.value.value is value


def test_a_step_that_is_put_into_a_trained_model_is_used(dataset):
    lm = language_model()
    lm.fit(dataset, verbose=0)
    before = arrays_of(lm)
    lm.train_step = lambda data, mems: ({"loss": tf.constant(7.0)}, mems)
    assert lm.fit(dataset, verbose=0).history["loss"] == [7.0]
    np.testing.assert_array_equal(arrays_of(lm), before)


def test_an_own_segment_nll_counts_in_fit_and_in_evaluate_and_may_leave_out_labels(dataset):
    """With what it gives to `add_loss`, once a step; its penalty of 3 for a weight is a gradient of 3."""

    def first_labels(self, tokens, labels, mems, **options):
        nll, _, mems = super(type(self), self).segment_nll(tokens, labels, mems, **options)
        kept = tf.range(5)[None] < tf.constant([[3], [0]])
        self.add_loss(3 * self.softmax.biases[0][0])
        return tf.where(kept, 10 * nll, 0.0), kept, mems

    lm, other = language_model(subclass(segment_nll=first_labels)), language_model()
    labels = [ids.copy() for _, ids in dataset.as_numpy_iterator()]
    for ids in labels:
        ids[0, 3:] = ids[1] = -100
    some = tf.data.Dataset.zip((dataset.map(lambda x, y: x), tf.data.Dataset.from_tensor_slices(labels)))
    np.testing.assert_allclose(lm.evaluate(dataset, verbose=0), 10 * other.evaluate(some, verbose=0), rtol=1e-5)
    bias = other.softmax.biases[0]
    other.optimizer.learning_rate = 1.0  # ten times as much
    for batch in some.take(1).as_numpy_iterator():
        other.train_on_batch(*batch)
    bias.assign(bias - 0.1 * 3 * tf.one_hot(0, 23))
    lm.fit(dataset.take(1), verbose=0)
    np.testing.assert_allclose(arrays_of(lm), arrays_of(other), rtol=0, atol=2e-5)


# ---------------------------------------- language models: what is refused, and metrics

REFUSED = ("compute_loss", "compute_metrics", "stateless_compute_loss", "predict_step", "make_predict_function")


@pytest.mark.parametrize("base", [txl_tf.TransformerXLLM, txl_tf.TransformerLM])
def test_hooks_that_a_language_model_would_pass_over_are_refused(dataset, base):
    for name in (*REFUSED, "get_metrics_result"):
        with pytest.raises(txl_tf.ParameterError) as caught:
            language_model(subclass(base, **{name: lambda self, *args, **kwargs: None}))
        assert caught.value.name == name
    lm = language_model(base)
    lm.compute_loss = lambda *args, **kwargs: 0.0
    batch = next(dataset.as_numpy_iterator())
    for call in (
        lambda: lm.fit(dataset, verbose=0),
        lambda: lm.evaluate(dataset, verbose=0),
        lambda: lm.train_on_batch(*batch),
        lambda: lm.test_on_batch(*batch),
        lambda: lm.compile("sgd"),
    ):
        with pytest.raises(txl_tf.ParameterError) as caught:
            call()
        assert caught.value.name == "compute_loss"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "compute_loss", lambda *args, **kwargs: 0.0, raising=False)
        with pytest.raises(txl_tf.ParameterError):
            language_model(base)


def test_an_own_call_counts_in_training_evaluation_and_score(dataset):
    def call(self, tokens, mems=None):
        log_probs, new_mems = super(type(self), self).call(tokens, mems)
        return tf.nn.log_softmax(2 * log_probs), new_mems

    lm = language_model(subclass(call=call), rate=0.0)
    found, mems, nll = lm.fit(dataset, verbose=0).history["loss"], None, []
    for tokens, labels in dataset:
        log_probs, _ = lm.log_probs(tokens, mems)
        expected = -tf.gather(log_probs, labels, batch_dims=2)
        actual, mems = lm.score(tokens, labels, mems)
        np.testing.assert_allclose(actual, expected, rtol=1e-5)
        nll.append(tf.reduce_mean(expected))
    np.testing.assert_allclose([found[0], lm.evaluate(dataset, verbose=0)], np.mean(nll), rtol=1e-5)


def test_own_predict_methods_take_the_place_of_hooks_of_keras():
    def method(self, *args, **kwargs):
        return None

    lm = language_model(subclass(predict=method, predict_on_batch=method, predict_step=method))
    assert lm.predict(None) is lm.predict_on_batch(None) is lm.predict_step(None) is None


def test_metrics_of_one_s_own_are_reset_and_reported(dataset, plain_history):
    class Counting(txl_tf.TransformerXLLM):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.steps = keras.metrics.Sum("steps")

        def train_step(self, data, mems):
            self.steps.update_state(1.0)
            return super().train_step(data, mems)

    lm = language_model(Counting)
    history = lm.fit(dataset, epochs=2, validation_data=dataset, verbose=0).history
    assert history["steps"] == [2, 2] and history["val_steps"] == [0, 0]
    assert {name: history[name] for name in plain_history} == plain_history


def with_metric(base, name):
    """A subclass of a model that has a metric of this name as an attribute."""

    def init(self, *args, **kwargs):
        base.__init__(self, *args, **kwargs)
        self.mine = keras.metrics.Sum(name)

    return subclass(base, __init__=init)


@pytest.mark.parametrize("name", ["loss", "grad_norm", "perplexity", "overflow"])
def test_metrics_with_the_name_of_a_log_are_refused(dataset, name):
    lm = language_model(with_metric(txl_tf.TransformerXLLM, name), metrics=["perplexity"])
    batch = next(dataset.as_numpy_iterator())
    for method, data in (
        ("fit", [dataset]),
        ("evaluate", [dataset]),
        ("train_on_batch", batch),
        ("test_on_batch", batch),
    ):
        if name == "overflow":  # a log only with static shapes
            getattr(lm, method)(*data)
            continue
        with pytest.raises(txl_tf.ParameterError) as caught:
            getattr(lm, method)(*data)
        assert (caught.value.name, caught.value.value) == ("metrics", name)


def test_own_functions_of_steps_are_called_and_a_reset_must_call_super(dataset, plain_history):
    calls = []

    def make(self, force=False):
        super(type(self), self).make_train_function(force)
        function = self.train_function
        self.train_function = lambda iterator: (calls.append(1), function(iterator))[1]

    expected = {name: values[:1] for name, values in plain_history.items() if not name.startswith("val_")}
    own = {"make_train_function": make, "reset_metrics": lambda self: super(type(self), self).reset_metrics()}
    assert language_model(subclass(**own)).fit(dataset, verbose=0).history == expected
    assert len(calls) == 2
    forgetful = language_model(subclass(reset_metrics=lambda self: None))
    for method in ("fit", "evaluate"):
        with pytest.raises(txl_tf.ParameterError) as caught:
            getattr(forgetful, method)(dataset, verbose=0)
        assert caught.value.name == "reset_metrics"


def test_an_optimizer_s_own_apply_gradients_is_called(dataset):
    class Half(keras.optimizers.SGD):
        def apply_gradients(self, grads_and_vars):
            return super().apply_gradients([(gradient / 2, variable) for gradient, variable in grads_and_vars])

    lm, plain = language_model(), language_model(rate=0.05)
    lm.compile(Half(0.1), run_eagerly=True)
    for model in (lm, plain):
        model.train_on_batch(*next(dataset.as_numpy_iterator()))
    np.testing.assert_allclose(arrays_of(lm), arrays_of(plain), rtol=0, atol=1e-6)


# ---------------------------------------- the encoder-decoder and taggers

IDS = np.random.default_rng(0).integers(3, 9, [4, 5]).astype(np.int32)
TARGETS = np.pad(IDS, [[0, 0], [1, 1]], constant_values=((0, 0), (1, 2)))
TAGS = (IDS % 3).astype(np.int32)


def transformer(base=txl_tf.Transformer, **options):
    sizes = {"num_layers": 1, "d_model": 8, "num_heads": 2, "dff": 8, "rate": 0.0}
    model = base(**sizes, input_vocab_size=9, target_vocab_size=9, **options)
    return compiled(model)


def tagger(base=txl_tf.Tagger, **options):
    network = txl_tf.Tener(n_token=9, n_layer=1, d_model=8, n_head=2, d_inner=8, dropout=0.0)
    return compiled(base(network, ["O", "B-X", "I-X"], output_dropout=0.0, **options))


def compiled(model):
    randomise(model)
    model.compile(keras.optimizers.SGD(0.1), run_eagerly=True)
    return model


MODELS = {
    "transformer": (transformer, (IDS, TARGETS), txl_tf.Transformer),
    "tagger": (tagger, ({"chars": IDS}, TAGS), txl_tf.Tagger),
}


@pytest.fixture(params=["transformer", pytest.param("tagger", marks=SLOW)])
def kind(request):
    """`(make, data, base)`."""
    return MODELS[request.param]


@functools.cache
def made_once(make):
    return make()


@pytest.fixture
def plain(kind):
    """A model without own methods, which tests share: with its first weights, as those of `make`."""
    model = made_once(kind[0])
    randomise(model)
    return model


def fit(model, data, **options):
    return model.fit(*data, batch_size=2, shuffle=False, verbose=0, **options).history


def test_an_own_loss_is_trained_for_and_logged(kind, plain):
    make, data, base = kind

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        share = tf.reduce_mean(y_pred) if training else 100.0
        return 2 * super(type(self), self).compute_loss(x, y, y_pred, sample_weight, training) + share

    def only(self, x, y, y_pred, sample_weight=None):  # without `training`, as before Keras 3.3
        return tf.reduce_mean(y_pred)

    own, other = (make(subclass(base, compute_loss=function)) for function in (compute_loss, only))
    start, batch = arrays_of(plain), [keras.tree.map_structure(lambda x: x[:2], part) for part in data]
    tested = own.evaluate(*data, verbose=0, return_dict=True)
    expected = plain.evaluate(*data, verbose=0, return_dict=True)
    for model in (own, plain, other):
        model.train_on_batch(*batch)
    whole, loss, mean = (arrays_of(model) - start for model in (own, plain, other))
    np.testing.assert_allclose(whole, 2 * loss + mean, rtol=0, atol=2e-5)
    assert np.abs(loss - mean).max() > 1e-3
    np.testing.assert_allclose(tested.pop("loss"), 2 * expected.pop("loss") + 100, rtol=1e-5)
    assert tested == expected


def test_an_own_loss_is_computed_in_float64(kind):
    make, data, base = kind

    def twice(self, x, y, y_pred, sample_weight=None, training=True):
        return 2 * super(type(self), self).compute_loss(x, y, y_pred, sample_weight, training)

    own, plain = make(subclass(base, compute_loss=twice), dtype="float64"), make(dtype="float64")
    weights = np.array([1.0, 2.0, 0.5, 1.0])
    fit(own, data, sample_weight=weights)
    plain.set_weights(own.get_weights())
    losses = [model.evaluate(*data, sample_weight=weights, verbose=0)[0] for model in (own, plain)]
    np.testing.assert_allclose(losses[0], 2 * losses[1], rtol=1e-12)


def test_own_metrics_are_used(kind, plain):
    make, data, base = kind

    class Counting(base):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.largest = keras.metrics.Mean("largest")

        def compute_metrics(self, x, y, y_pred, sample_weight=None):
            self.largest.update_state(tf.reduce_max(y_pred))
            return {**super().compute_metrics(x, y, y_pred, sample_weight), "seven": 7.0}

    history, expected = (fit(model, data, validation_data=data) for model in (make(Counting), plain))
    assert {name: history.pop(name) for name in expected} == expected
    assert history["seven"] == history["val_seven"] == [7.0]
    assert sorted(history) == ["largest", "seven", "val_largest", "val_seven"]
    assert history["largest"][0] > -100 and history["largest"] != history["val_largest"]

    seven = keras.metrics.Mean("seven")
    seven.update_state(7.0)  # as in Keras's own example, but that nothing else counts in it
    model = make(subclass(base, metrics=property(lambda self: [seven]), reset_metrics=lambda self: None))
    assert fit(model, data) == {"seven": [7.0]}


def test_metrics_that_are_attributes_have_other_names_than_the_models_own(kind, plain):
    make, data, base = kind
    for name in {metric.name for metric in (*plain.own_metrics, plain.grad_norm)}:
        model = make(with_metric(base, name))
        for method in ("fit", "evaluate", "train_on_batch", "test_on_batch"):
            with pytest.raises(txl_tf.ParameterError) as caught:
                getattr(model, method)(*data)
            assert (caught.value.name, caught.value.value) == ("metrics", name)


@SLOW
def test_metrics_that_are_attributes_are_reset_and_reported(kind, plain):
    make, data, base = kind

    class Counting(base):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.steps = keras.metrics.Sum("steps")

        def train_step(self, data):
            self.steps.update_state(1.0)
            return super().train_step(data)

    history, expected = (fit(model, data, epochs=2) for model in (make(Counting), plain))
    assert history.pop("steps") == [2, 2] and history == expected
    with pytest.raises(txl_tf.ParameterError) as caught:
        fit(make(subclass(base, reset_metrics=lambda self: None)), data)
    assert caught.value.name == "reset_metrics"


def test_what_keras_does_not_call_is_refused_and_add_loss_of_an_own_call_counts(kind, plain):
    make, data, base = kind
    for name in ("stateless_compute_loss", *base.unused_methods):
        with pytest.raises(txl_tf.ParameterError) as caught:
            make(subclass(base, **{name: lambda self: None}))
        assert caught.value.name == name

    def call(self, *args, **kwargs):
        result = super(type(self), self).call(*args, **kwargs)
        self.add_loss(3 * tf.reduce_sum(self.trainable_variables[0]))
        return result

    own = make(subclass(base, call=call))
    for model in (own, plain):
        model.train_on_batch(*data)
    first = own.trainable_variables[0], plain.trainable_variables[0]
    np.testing.assert_allclose(first[0], first[1] - 0.1 * 3, rtol=0, atol=1e-5)


def test_weights_of_classes_that_an_own_step_ignores_are_refused(kind, plain):
    make, data, base = kind

    def alone(self, data):
        return {"loss": tf.constant(1.0)}

    def with_super(self, data):
        return super(type(self), self).train_step(data)

    with pytest.raises(txl_tf.ParameterError) as caught:
        fit(make(subclass(base, train_step=alone)), data, class_weight={1: 2.0})
    assert caught.value.name == "class_weight"
    found = fit(make(subclass(base, train_step=with_super)), data, class_weight={1: 2.0})
    assert found == fit(plain, data, class_weight={1: 2.0})


@SLOW
def test_an_own_loss_of_two_replicas_is_that_of_one(two_replicas):
    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        return super(type(self), self).compute_loss(x, y, y_pred, sample_weight) + tf.reduce_mean(y_pred**2)

    for make, data, base in MODELS.values():
        found = []
        for strategy in (tf.distribute.get_strategy(), two_replicas):
            with strategy.scope():
                model = make(subclass(base, compute_loss=compute_loss))
                model.compile(keras.optimizers.SGD(0.1))
            logs = model.train_on_batch(*data, sample_weight=np.array([1.0, 2, 3, 4]), return_dict=True)
            found.append([logs["loss"], *arrays_of(model)])
        np.testing.assert_allclose(found[1], found[0], rtol=1e-5, atol=1e-5)
