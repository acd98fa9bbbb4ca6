"""A model that is dropped goes, with all its graphs, whatever was done with it."""

import gc
import weakref

import keras
import pytest
import tensorflow as tf
from conforming import ONE_LAYER
from dropping import TOKENS, USES, language_model, trained

import txl_tf
from txl_tf.kernels import fusion

pytestmark = pytest.mark.ci


@pytest.fixture
def graphs(monkeypatch):
    """The graphs that a test makes, as long as they live."""
    tf.compat.v1.get_default_graph()  # TensorFlow's own, which stays
    made, plain = weakref.WeakSet(), tf.Graph.__init__

    def remembered(self, *args, **kwargs):
        plain(self, *args, **kwargs)
        made.add(self)

    monkeypatch.setattr(tf.Graph, "__init__", remembered)
    return made


def collect():
    for _ in range(3):  # what a finalizer of TensorFlow lets go is collected by the next one
        gc.collect()


SLOW = [
    "encoder-decoder and translator", "TENER", "FLAT", "recomputed, by an optimizer of Keras", "exported",
    "language model", "vanilla language model", "static shapes",
]  # fmt: skip
WITHOUT_GRAPHS = ["exported", "load_run"]  # that are still there when they return


@pytest.mark.parametrize("use", [pytest.param(use, marks=[pytest.mark.slow] * (use in SLOW)) for use in USES])
def test_nothing_stays_of_a_model_that_is_dropped(use, graphs, tmp_path):
    function = USES[use]
    used = function(tmp_path) if function.__code__.co_argcount else function()
    used = used if isinstance(used, tuple) else (used,)
    watched = [weakref.ref(each) for each in used]
    assert graphs or use in WITHOUT_GRAPHS
    del used
    collect()
    assert [each() for each in watched] == [None] * len(watched)
    assert not graphs


@pytest.mark.slow
def test_what_xla_compiles_in_a_step_stays_once_and_holds_no_model(graphs, monkeypatch):
    monkeypatch.setattr(fusion, "MIN_ELEMENTS", 1)
    left = []
    for _ in range(2):
        lm = trained(language_model(dropout=0.1, n_head=3, d_inner=20))
        watched = weakref.ref(lm)
        del lm
        collect()
        assert watched() is None
        left.append(len(graphs))
    assert left[0] == left[1] > 0


@pytest.mark.slow
def test_two_replicas_leave_nothing_either(two_replicas, graphs):
    with two_replicas.scope():
        lm = trained(language_model())
    watched = weakref.ref(lm)
    assert graphs
    del lm
    collect()
    assert watched() is None and not graphs


def test_a_model_of_keras_with_our_layers_leaves_nothing(graphs):
    inputs = keras.Input([5], dtype="int32")
    hidden, _ = txl_tf.TransformerXL(**ONE_LAYER, mem_len=4)(inputs)
    model = keras.Model(inputs, keras.layers.Dense(3)(hidden))
    model.predict(TOKENS, verbose=0)
    watched = weakref.ref(model)
    assert graphs
    del model, hidden, inputs
    collect()
    assert watched() is None and not graphs
