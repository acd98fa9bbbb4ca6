"""What a user changes on a compiled model counts in the next training step, although the step has been traced."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import txl_tf

pytestmark = pytest.mark.ci

RNG = np.random.default_rng(0)
IDS = RNG.integers(1, 12, [4, 5])
TAGS = RNG.integers(0, 3, [4, 5])


def make_language_model():
    lm = txl_tf.TransformerXLLM(
        n_token=12, n_layer=1, d_model=4, d_embed=4, n_head=1, d_head=4, d_inner=4, mem_len=2, seed=0
    )
    return lm, lm.network.decoder_layers[0], (IDS, TAGS)


def make_tagger():
    tagger = txl_tf.Tagger(keras.Sequential([keras.layers.Embedding(12, 4)]), ["O", "B-X", "I-X"])
    tagger(IDS)
    return tagger, tagger.network, (IDS, TAGS)


def largest_change(weights, function):
    before = [weight.numpy() for weight in weights]
    function()
    return max(np.abs(weight.numpy() - old).max() for weight, old in zip(weights, before, strict=True))


@pytest.mark.parametrize("make", [make_language_model, make_tagger])
def test_the_next_step_has_the_optimizer_and_the_frozen_parts_of_now(make):
    model, part, batch = make()
    model.compile(keras.optimizers.SGD(0.1))

    def step():
        model.train_on_batch(*batch)

    assert largest_change(part.weights, step) > 0
    part.trainable = False
    assert largest_change(part.weights, step) == 0
    part.trainable = True
    model.optimizer = keras.optimizers.SGD(0.0)
    assert largest_change(model.weights, step) == 0


@pytest.mark.parametrize("make", [make_language_model, make_tagger])
def test_the_next_step_has_the_regularizers_and_constraints_of_now(make):
    model, _, batch = make()
    model.compile(keras.optimizers.SGD(0.1))
    model.train_on_batch(*batch)
    regularized, *_, constrained = model.trainable_weights
    regularized.assign(np.ones(regularized.shape))
    regularized.regularizer = keras.regularizers.L2(1e3)  # its gradient is 2e3
    constrained.constraint = keras.constraints.MaxNorm(0.0)
    assert 190 < largest_change([regularized], lambda: model.train_on_batch(*batch)) < 210
    assert not constrained.numpy().any()


@pytest.mark.parametrize("make", [make_language_model, make_tagger])
def test_the_next_step_has_the_activity_regularizer_of_now(make):
    model, part, batch = make()
    model.compile(keras.optimizers.SGD(0.01))

    def step():
        model.train_on_batch(*batch)

    for regularizer in (None, keras.regularizers.L2(1e3), None):
        part.activity_regularizer = regularizer
        assert (largest_change(part.weights, step) > 0.1) == (regularizer is not None)


def test_the_next_step_runs_eagerly_or_in_a_graph_as_now():
    model, _, batch = make_language_model()
    traced = []

    class Watched(type(model)):
        def segment_nll(self, tokens, *args, **kwargs):
            traced.append(not hasattr(tokens, "numpy"))
            return super().segment_nll(tokens, *args, **kwargs)

    model.__class__ = Watched
    model.compile(keras.optimizers.SGD(0.1), run_eagerly=True)
    for run_eagerly in (True, False):
        model.run_eagerly = run_eagerly
        for step in (model.train_on_batch, model.test_on_batch):
            traced.clear()
            step(*batch)
            assert set(traced) == {not run_eagerly}


@pytest.mark.parametrize("make", [make_language_model, make_tagger])
def test_the_next_fit_has_the_steps_per_execution_of_now(make):
    model, _, batch = make()
    model.compile(keras.optimizers.SGD(0.1))
    dataset = tf.data.Dataset.from_tensors(batch).repeat(4)
    for steps, ends in ((1, [0, 1, 2, 3]), (2, [1, 3]), (4, [3])):
        model.steps_per_execution = steps
        seen = []
        count = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs, seen=seen: seen.append(batch))
        model.fit(dataset, verbose=0, callbacks=[count])
        assert seen == ends
        if not isinstance(model, txl_tf.TransformerXLLM):  # it has no `predict`
            assert model.predict(IDS, batch_size=1, verbose=0).shape[0] == len(IDS)
            evaluated = model.evaluate(*batch, batch_size=1, verbose=0)
            assert evaluated == pytest.approx(model.evaluate(*batch, verbose=0), rel=1e-5)
