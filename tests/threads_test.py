"""Keras's methods of one model in several threads: numbers as of each alone, or a clear error; no training breaks."""

import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import SMALL, randomise

import txl_tf
from txl_tf.training.trained_model import MethodLock

pytestmark = pytest.mark.ci

SLOW = pytest.mark.slow


def in_threads(*calls):
    """What every call returned, or its exception, each in a thread of its own."""
    found = [None] * len(calls)

    def run(i):
        try:
            found[i] = calls[i]()
        except Exception as error:
            found[i] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "it waits for ever"
    return found


class InTheMiddle(keras.callbacks.Callback):
    """Runs calls in threads of their own after the first batch, and waits for them."""

    def __init__(self, *calls):
        super().__init__()
        self.calls, self.found = calls, None

    def on_train_batch_end(self, batch, logs=None):
        if self.found is None:
            self.found = in_threads(*self.calls)

    on_test_batch_end = on_train_batch_end


@pytest.fixture(scope="module")
def texts():
    """Three datasets of two segments of two rows."""
    rng = np.random.default_rng(0)
    ids = [[rng.integers(0, 23, [2, 2, 5]).astype(np.int32) for _ in "xy"] for _ in range(3)]
    return [tf.data.Dataset.from_tensor_slices(tuple(pair)) for pair in ids]


def language_model(rate=0.0, **options):
    lm = txl_tf.TransformerXLLM(**{**SMALL, "n_layer": 1, "mem_len": 4, "dropout": 0.0})
    randomise(lm)
    lm.compile(keras.optimizers.SGD(rate), **{"run_eagerly": True, **options})
    return lm


def assert_refused(error, method):
    assert isinstance(error, txl_tf.ParameterError) and (error.name, error.value) == (method, "fit")


@pytest.mark.parametrize("options", [{}, pytest.param({"run_eagerly": False}, marks=SLOW)], ids=str)
def test_evaluations_of_a_language_model_do_not_disturb_each_other_nor_its_training(texts, options):
    lm = language_model(**options)
    alone = [lm.evaluate(text, verbose=0) for text in texts]
    batch = next(texts[0].as_numpy_iterator())
    on_batch = lm.test_on_batch(*batch)
    lm.reset_memory()
    history = lm.fit(texts[0], validation_data=texts[1], verbose=0).history
    beside = InTheMiddle(
        *(lambda text=text: lm.evaluate(text, verbose=0) for text in texts),
        lambda: lm.test_on_batch(*batch),
        lambda: lm.fit(texts[0], verbose=0),
        lambda: lm.train_on_batch(*batch),
    )
    assert lm.fit(texts[0], validation_data=texts[1], verbose=0, callbacks=[beside]).history == history
    assert beside.found[:4] == [*alone, on_batch]
    assert_refused(beside.found[4], "fit")
    assert_refused(beside.found[5], "train_on_batch")
    within = InTheMiddle(lambda: lm.evaluate(texts[2], verbose=0))
    assert lm.evaluate(texts[1], verbose=0, callbacks=[within]) == alone[1]
    assert within.found == [alone[2]]


@SLOW
def test_weights_are_those_of_a_training_without_evaluations_beside_it(texts):
    trained = []
    for beside in (False, True):
        lm, stop = language_model(rate=0.5, run_eagerly=False), threading.Event()

        def evaluate(lm=lm, stop=stop):
            while not stop.is_set():
                lm.evaluate(texts[1], verbose=0)

        def train(lm=lm, stop=stop):
            try:
                return lm.fit(texts[0], epochs=30, verbose=0).history
            finally:
                stop.set()

        history, *evaluated = in_threads(train, *[evaluate] * (2 * beside))
        assert evaluated == [None] * (2 * beside)
        trained.append((history, lm.get_weights()))
    assert trained[1][0] == trained[0][0]
    for found, expected in zip(trained[1][1], trained[0][1], strict=True):
        np.testing.assert_array_equal(found, expected)


def test_batches_of_several_threads_are_trained_on_one_after_the_other(texts):
    lm, other = language_model(0.5), language_model(0.5)
    batch = next(texts[0].as_numpy_iterator())
    expected = [other.train_on_batch(*batch) for _ in range(3)]
    assert sorted(in_threads(*[lambda: lm.train_on_batch(*batch)] * 3)) == sorted(expected)
    for found, array in zip(lm.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_array_equal(found, array)


def test_a_training_that_fails_lets_the_others_go_on(texts):
    lm = language_model()

    class Fails(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            raise RuntimeError("the disk is full")

    for _ in range(2):
        (error,) = in_threads(lambda: lm.fit(texts[0], verbose=0, callbacks=[Fails()]))
        assert str(error) == "the disk is full"
    lm.train_on_batch(*next(texts[0].as_numpy_iterator()))


def encoder_decoder():
    sizes = {"num_layers": 1, "d_model": 8, "num_heads": 2, "dff": 8, "rate": 0.0}
    return txl_tf.Transformer(**sizes, input_vocab_size=9, target_vocab_size=9)


def tagger():
    network = txl_tf.Tener(n_token=9, n_layer=1, d_model=8, n_head=2, d_inner=8, dropout=0.0)
    return txl_tf.Tagger(network, ["O", "B-X", "I-X"], output_dropout=0.0)


@pytest.mark.parametrize("make", [encoder_decoder, pytest.param(tagger, marks=SLOW)])
def test_models_that_count_in_metrics_evaluate_one_after_the_other_and_not_beside_fit(make):
    ids = np.random.default_rng(0).integers(3, 9, [4, 5]).astype(np.int32)
    data = (ids, ids) if make is encoder_decoder else ({"chars": ids}, ids % 3)
    model = make()
    randomise(model)
    model.compile(keras.optimizers.SGD(0.0), run_eagerly=True)
    alone = model.evaluate(*data, verbose=0)
    assert in_threads(*[lambda: model.evaluate(*data, batch_size=2, verbose=0)] * 2) == [pytest.approx(alone)] * 2
    beside = InTheMiddle(
        lambda: model.evaluate(*data, verbose=0),
        lambda: model.test_on_batch(*data),
        lambda: model.train_on_batch(*data),
        lambda: model.fit(*data, verbose=0),
    )
    history = model.fit(*data, verbose=0, batch_size=2, validation_data=data, callbacks=[beside]).history
    for error, method in zip(beside.found, ("evaluate", "test_on_batch", "train_on_batch", "fit"), strict=True):
        assert_refused(error, method)
    assert history["loss"] == pytest.approx([alone[0]]) and history["val_loss"] == pytest.approx([alone[0]])
    model.train_on_batch(*data)


def test_a_lock_may_be_taken_again_and_is_released_by_an_exception():
    lock, order, inside = MethodLock(), [], threading.Event()

    def first():
        with lock("evaluate"), lock("evaluate"):
            inside.set()
            order.append("begins")
            threading.Event().wait(0.05)
            order.append("ends")

    def second():
        inside.wait()
        with lock("fit"):
            order.append("second")
            (error,) = in_threads(lambda: lock("evaluate").__enter__())
            assert_refused(error, "evaluate")
            raise RuntimeError

    none, error = in_threads(first, second)
    assert none is None and type(error) is RuntimeError and order == ["begins", "ends", "second"]
    with lock("evaluate"):
        pass


@SLOW
def test_two_replicas_evaluate_beside_a_training(texts, two_replicas):
    with two_replicas.scope():
        lm = language_model(run_eagerly=False)
    alone = [lm.evaluate(text, verbose=0) for text in texts]
    history = lm.fit(texts[0], epochs=5, verbose=0).history
    found = in_threads(
        lambda: lm.fit(texts[0], epochs=5, verbose=0).history,
        *(lambda text=text: lm.evaluate(text, verbose=0) for text in texts),
    )
    assert found == [history, *alone]
