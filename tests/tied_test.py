"""Layers that share the weights of an embedding, in functional models: files, clones, training, and what is refused."""

import copy
import json
import pickle
import subprocess
import sys
import zipfile

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import ROOT, raises_parameter, randomise

import txl_tf
from txl_tf import layers
from txl_tf.errors import ParameterError
from txl_tf.vanilla.embeddings import EmbeddingLogits

IDS = np.random.default_rng(0).integers(0, 20, [2, 5]).astype(np.int32)
PLAIN = {"n_token": 20, "d_embed": 8, "d_proj": 8}
CUTOFFS = {**PLAIN, "cutoffs": [6, 12]}
DIV_VAL = {**CUTOFFS, "div_val": 2}
PROJECTED = {**CUTOFFS, "d_embed": 6}


def ids():
    return keras.Input([None], dtype="int32")


def dense(units=8):
    return keras.layers.Dense(units)


class Adaptive:
    """The two kinds of tied layers: an embedding of the sizes, and the outputs that share its table."""

    @staticmethod
    def embedding(sizes, **options):
        return layers.AdaptiveEmbedding(**sizes, **options)

    @staticmethod
    def outputs(sizes, hidden, embedding):
        return layers.AdaptiveSoftmax(**sizes, proj_share_all_but_first=True)(hidden, embedding=embedding)


class Logits:
    @staticmethod
    def embedding(sizes, **options):
        return layers.Embeddings(vocab=20, d_model=8, **options)

    @staticmethod
    def outputs(sizes, hidden, embedding):
        return embedding.logits(hidden)


@keras.saving.register_keras_serializable("tied_test")
class Two(keras.layers.Layer):
    """A layer of the user's with two embeddings of one size, of which the second is tied."""

    def __init__(self, kind, sizes, **kwargs):
        super().__init__(**kwargs)
        self.kind, self.sizes = kind, dict(sizes)
        self.parts = [globals()[kind].embedding(sizes) for _ in range(2)]

    def build(self, shape):
        for part in self.parts:
            part.build(shape)

    def call(self, tokens):
        return self.parts[0](tokens) - self.parts[1](tokens)

    def get_config(self):
        return {**super().get_config(), "kind": self.kind, "sizes": dict(self.sizes)}


# ------------------------------------------------------------------------------- models, by whose the embedding is


def of_a_layer(kind, sizes):
    tokens, embedding = ids(), kind.embedding(sizes)
    return keras.Model(tokens, kind.outputs(sizes, dense()(embedding(tokens)), embedding))


def of_a_network(kind, sizes):
    tokens, sizes = ids(), dict(sizes)
    options = {"n_layer": 1, "n_head": 2, "d_head": 4, "d_inner": 8, "dropout": 0.0, "mem_len": 2}
    network = txl_tf.TransformerXL(**options, d_model=8, **{k: v for k, v in sizes.items() if k != "d_proj"})
    return keras.Model(tokens, kind.outputs(sizes, network(tokens)[0], network.embedding))


def of_a_nested_model(kind, sizes):
    tokens, embedding = ids(), kind.embedding(sizes)
    inner, tokens = keras.Model(tokens, dense()(embedding(tokens))), ids()
    return keras.Model(tokens, kind.outputs(sizes, inner(tokens), embedding))


def of_a_sequential_model(kind, sizes):
    tokens, inner = ids(), keras.Sequential([kind.embedding(sizes), dense()])
    hidden = inner(tokens)
    return keras.Model(tokens, kind.outputs(sizes, hidden, inner.layers[0]))


def of_a_layer_of_ones_own(kind, sizes):
    tokens, two = ids(), Two(kind.__name__, sizes)
    return keras.Model(tokens, kind.outputs(sizes, two(tokens), two.parts[1]))


def of_nobody(kind, sizes):
    tokens = ids()
    return keras.Model(tokens, kind.outputs(sizes, kind.embedding(sizes)(tokens), kind.embedding(sizes)))


def inside_a_nested_model(kind, sizes):
    tokens = ids()
    return keras.Model(tokens, dense(3)(of_a_layer(kind, sizes)(tokens)))


def of_two_outputs(kind, sizes):
    """Two layers that are tied to one embedding; the second is called twice."""
    tokens, embedding = ids(), kind.embedding(sizes)
    hidden = dense()(embedding(tokens))
    softmax, other = layers.AdaptiveSoftmax(**sizes), dense()(hidden)
    calls = [softmax(hidden, embedding=embedding), softmax(other, embedding=embedding)]
    return keras.Model(tokens, [kind.outputs(sizes, hidden, embedding), *calls])


MODELS = [
    (of_a_network, Adaptive, DIV_VAL),
    (of_a_layer_of_ones_own, Adaptive, CUTOFFS),
    (of_nobody, Adaptive, PROJECTED),
    (of_a_nested_model, Logits, PLAIN),
]
SLOW = [
    *((of_a_layer, Adaptive, sizes) for sizes in (PLAIN, CUTOFFS, DIV_VAL, PROJECTED)),
    *((of_a_network, Adaptive, sizes) for sizes in (PLAIN, PROJECTED)),
    *(
        (make, Adaptive, DIV_VAL)
        for make in (of_a_nested_model, of_a_sequential_model, of_nobody, inside_a_nested_model)
    ),
    *((make, Logits, PLAIN) for make in (of_a_layer, of_a_sequential_model, of_a_layer_of_ones_own, of_nobody)),
    (inside_a_nested_model, Logits, PLAIN),
    (of_two_outputs, Adaptive, DIV_VAL),
]
ALL = [pytest.param(*case, id=f"{case[0].__name__}-{case[1].__name__}-{len(case[2])}") for case in MODELS]
ALL += [
    pytest.param(*case, id=f"{case[0].__name__}-{case[1].__name__}-{'-'.join(case[2])}", marks=pytest.mark.slow)
    for case in SLOW
]


def made(make, kind, sizes):
    model = make(kind, sizes)
    randomise(model)
    return model


def outputs(model, inputs=IDS):
    return [np.asarray(x) for x in keras.tree.flatten(model(inputs))]


def assert_equal(arrays, expected):
    for array, other in zip(arrays, expected, strict=True):
        np.testing.assert_array_equal(array, other)


def train_step(model):
    """One step of gradient descent; returns the weights without a gradient."""
    with tf.GradientTape() as tape:
        loss = tf.add_n([tf.reduce_mean(tf.square(x)) for x in keras.tree.flatten(model(IDS))])
    gradients = tape.gradient(loss, [weight.value for weight in model.trainable_weights])
    unused = [
        weight.name for weight, gradient in zip(model.trainable_weights, gradients, strict=True) if gradient is None
    ]
    for weight, gradient in zip(model.trainable_weights, gradients, strict=True):
        if gradient is not None:
            weight.assign_sub(0.1 * tf.convert_to_tensor(gradient))
    return unused


def by_file(model, path):
    model.save(path / "model.keras")
    return keras.models.load_model(path / "model.keras")


def with_weights_of(model, other):
    model.set_weights(other.get_weights())
    return model


def by_clone(model, path):
    return with_weights_of(keras.models.clone_model(model), model)


def by_recursive_clone(model, path):
    def clone(layer):
        return type(layer).from_config(layer.get_config())

    return with_weights_of(keras.models.clone_model(model, clone_function=clone, recursive=True), model)


def by_json(model, path):
    return with_weights_of(keras.models.model_from_json(model.to_json()), model)


def by_pickle(model, path):
    return pickle.loads(pickle.dumps(model))


def by_deepcopy(model, path):
    return copy.deepcopy(model)


def tied_layers(model):
    return [layer for layer in model._flatten_layers() if isinstance(layer, layers.AdaptiveSoftmax | EmbeddingLogits)]


FAST_WAYS = by_file, by_clone


@pytest.mark.ci
@pytest.mark.parametrize(
    "ways",
    [
        pytest.param(FAST_WAYS, id="fast"),
        pytest.param((by_recursive_clone, by_json, by_pickle, by_deepcopy), id="others", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("make, kind, sizes", [pytest.param(*MODELS[0], marks=pytest.mark.slow), *ALL[1:]])
def test_a_copy_computes_and_learns_the_same_and_shares_nothing(make, kind, sizes, ways, tmp_path):
    model = made(make, kind, sizes)
    expected, copies = outputs(model), [way(model, tmp_path) for way in ways]
    assert len(model.weights) == len({id(weight) for weight in model.weights})
    for other in copies:
        assert_equal(outputs(other), expected)
        assert [weight.shape for weight in other.weights] == [weight.shape for weight in model.weights]
        assert not {*map(id, other.variables)} & {*map(id, model.variables)}
    before = model.get_weights()
    unused = train_step(model)  # projections that softmax and embedding do not share
    trained, after = model.get_weights(), outputs(model)
    moved = [np.abs(array - old).max() > 0 for array, old in zip(trained, before, strict=True)]
    assert moved.count(False) == len(unused) and not [name for name in unused if not name.startswith("proj_W_")]
    for weight in model.weights:
        weight.assign(0 * weight)
    for other in copies:
        assert train_step(other) == unused
        assert_equal(other.get_weights(), trained)
        assert_equal(outputs(other), after)
        for layer in tied_layers(other):  # still tied: what it computes with are weights of the model, and no others
            assert {*map(id, layer.weights)} <= {*map(id, other.weights)}


@pytest.mark.parametrize("make, kind, sizes", [*ALL[1:], pytest.param(*MODELS[0], marks=pytest.mark.slow)])
def test_a_model_that_is_made_again_reads_the_weights(make, kind, sizes, tmp_path):
    model, again = made(make, kind, sizes), make(kind, sizes)
    model.save_weights(tmp_path / "a.weights.h5")
    again.load_weights(tmp_path / "a.weights.h5")
    assert_equal(outputs(again), outputs(model))


IN_ANOTHER_PROCESS = """
import sys
sys.path.insert(0, sys.argv[1])
import numpy as np, tied_test
model = tied_test.of_a_network(tied_test.Adaptive, tied_test.DIV_VAL)
model.load_weights(sys.argv[2])
np.testing.assert_array_equal(tied_test.outputs(model)[0], np.load(sys.argv[3]))
"""


@pytest.mark.slow
def test_another_process_reads_the_weights(tmp_path):
    model = made(of_a_network, Adaptive, DIV_VAL)
    model.save_weights(tmp_path / "a.weights.h5")
    np.save(tmp_path / "expected.npy", outputs(model)[0])
    arguments = [str(ROOT / "tests"), tmp_path / "a.weights.h5", tmp_path / "expected.npy"]
    result = subprocess.run([sys.executable, "-c", IN_ANOTHER_PROCESS, *arguments], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("make, kind, sizes", ALL)
def test_an_export_computes_the_same(make, kind, sizes, tmp_path):
    model = made(make, kind, sizes)
    expected = outputs(model)
    model.export(tmp_path / "served", verbose=False)
    served = tf.saved_model.load(tmp_path / "served")
    for got, array in zip(keras.tree.flatten(served.serve(tf.constant(IDS))), expected, strict=True):
        np.testing.assert_allclose(got, array, rtol=1e-5, atol=1e-6)
    tf.saved_model.save(model, tmp_path / "saved")
    saved = tf.saved_model.load(tmp_path / "saved")
    got = saved.signatures["serving_default"](tf.constant(IDS))
    for i, array in enumerate(expected):
        np.testing.assert_allclose(got[f"output_{i}"], array, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("make, kind, sizes", ALL[:4])
def test_keras_s_fit_goes_on_after_loading_as_without(make, kind, sizes, tmp_path):
    model = made(make, kind, sizes)
    model.compile(keras.optimizers.Adam(0.03), "mse")
    labels = np.ones([2, 5, model.output.shape[-1]], np.float32)
    model.fit(IDS, labels, verbose=0)
    loaded = by_file(model, tmp_path)
    assert loaded.fit(IDS, labels, epochs=3, verbose=0).history == model.fit(IDS, labels, epochs=3, verbose=0).history


@pytest.mark.parametrize("policy", ["mixed_bfloat16", pytest.param("mixed_float16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind, sizes", [(Adaptive, DIV_VAL), (Logits, PLAIN)])
def test_half_precision_is_kept(kind, sizes, policy, tmp_path):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        model = made(of_a_layer, kind, sizes)
    finally:
        keras.config.set_dtype_policy(before)
    (expected,) = outputs(model)
    assert expected.dtype == np.float32 and {weight.dtype for weight in model.weights} == {"float32"}
    for way in FAST_WAYS:
        copied = way(model, tmp_path)
        assert copied.layers[-1].compute_dtype == policy.removeprefix("mixed_")
        assert_equal(outputs(copied), [expected])


# ------------------------------------------------------------------------------------------------- one layer of Keras


def test_logits_of_a_functional_model_are_those_of_tensors():
    model = made(of_a_layer, Logits, PLAIN)
    _, embedding, inner, logits = model.layers
    expected = inner(embedding(IDS)).numpy() @ embedding.lut.numpy().T
    np.testing.assert_allclose(outputs(model)[0], expected, atol=1e-5)
    assert isinstance(logits, EmbeddingLogits) and logits.embedding is embedding and model.output.dtype == "float32"


def test_keras_shows_the_tied_layer_and_counts_its_table_once():
    model = of_a_layer(Adaptive, PLAIN)
    softmax, lines = model.get_layer(model.layers[-1].name), []
    assert [type(layer).__name__ for layer in model.layers[1:]] == ["AdaptiveEmbedding", "Dense", "AdaptiveSoftmax"]
    assert softmax.embedding is model.layers[1] and softmax.location == (model.layers[1].name, 0)
    model.summary(print_fn=lambda line, **_: lines.append(line))
    n_params = 20 * 8 + 8 * 8 + 8 + 20
    assert f"Total params: {n_params}" in "".join(lines) and model.count_params() == n_params


def test_freezing_a_tied_layer_freezes_what_belongs_to_it(tmp_path):
    """The table of another layer does not; one that it has as a part does. A file keeps both."""
    for make, n_trainable in ((of_a_layer, 3), (of_nobody, 1)):
        model = made(make, Adaptive, PLAIN)
        model.layers[-1].trainable = False
        assert len(model.trainable_weights) == len(by_file(model, tmp_path).trainable_weights) == n_trainable


def test_the_end_of_a_model_has_its_table(tmp_path):
    whole = made(of_a_layer, Adaptive, CUTOFFS)
    end = keras.Model(whole.layers[-2].output, whole.output)
    hidden = np.random.default_rng(0).normal(size=[2, 3, 8]).astype(np.float32)
    assert {id(whole.layers[1].tables[0])} < {*map(id, end.trainable_weights)}
    for way in (by_file, by_deepcopy):
        other = way(end, tmp_path)
        assert len(other.weights) == len(end.weights)
        assert_equal(outputs(other, hidden), outputs(end, hidden))
    with pytest.raises(ParameterError) as caught:  # the clone cannot know whether the layer is in this model, too
        keras.models.clone_model(end)
    assert caught.value.name == "embedding"


def test_none_by_position_is_no_embedding():
    tokens, embedding = ids(), Adaptive.embedding(PLAIN)
    softmax = layers.AdaptiveSoftmax(**PLAIN)
    softmax(embedding(tokens), embedding=embedding)
    softmax(embedding(tokens), None)
    other = layers.AdaptiveSoftmax.from_config(softmax.get_config())
    model = keras.Model(tokens, other(embedding(tokens), None))
    assert softmax.embedding is other.embedding is embedding
    np.testing.assert_array_equal(model(IDS), other(embedding(IDS), embedding=embedding))


def test_tensors_tie_nothing():
    embedding, softmax = Adaptive.embedding(PLAIN), layers.AdaptiveSoftmax(**PLAIN)
    hidden = tf.random.normal([2, 3, 8])
    first = softmax(hidden, embedding=embedding)
    other = Adaptive.embedding(PLAIN)
    assert np.abs(softmax(hidden, embedding=other) - first).max() > 0
    assert softmax.embedding is None and len(softmax.weights) == 1 and "tied_to" not in softmax.get_config()


# --------------------------------------------------------------- embeddings that hidden does not come from; refusals


def branches(embedding, first, second=None):
    """Outputs of `first(ids)`, and of a softmax of other hidden states that is tied to the embedding."""
    tokens, others = ids(), ids()
    hidden = (second or keras.layers.Embedding(20, 8))(others)
    return lambda: keras.Model([tokens, others], [first(tokens), Adaptive.outputs(PLAIN, hidden, embedding)])


def n_tables(model):
    return len([layer for layer in model._flatten_layers() if isinstance(layer, layers.AdaptiveEmbedding)])


def test_an_embedding_beside_hidden_is_one_table_in_a_file_and_refused_in_a_clone(tmp_path):
    embedding = Adaptive.embedding(PLAIN)
    model = branches(embedding, embedding)()
    randomise(model)
    for way in (by_file, by_deepcopy):
        other = way(model, tmp_path)
        assert n_tables(other) == 1 and len(other.weights) == len(model.weights)
        assert_equal(outputs(other, [IDS, IDS]), outputs(model, [IDS, IDS]))
    for way in (by_clone, by_json):
        with raises_parameter("embedding"):
            way(model, tmp_path)


def test_a_part_of_a_layer_beside_hidden_is_refused(tmp_path):
    tokens, two = ids(), Two("Adaptive", PLAIN)
    beside, hidden = two(tokens), keras.layers.Embedding(20, 8)(tokens)
    with pytest.raises(ParameterError) as caught:
        Adaptive.outputs(PLAIN, hidden, two.parts[1])
    assert (caught.value.name, caught.value.value) == ("embedding", two.parts[1])

    two = Two("Adaptive", PLAIN)  # called after the softmax: then there is no file
    two.build((None, None))
    model = keras.Model(tokens, [Adaptive.outputs(PLAIN, hidden, two.parts[1]), two(tokens), beside])
    with pytest.raises(ParameterError) as caught:
        model.save(tmp_path / "model.keras")
    assert (caught.value.name, caught.value.value) == ("embedding", two.parts[1])


def test_two_layers_of_one_embedding_of_nobody_keep_it_in_a_file(tmp_path):
    tokens, embedding = ids(), Adaptive.embedding(PLAIN)
    hidden = keras.layers.Embedding(20, 8)(tokens)
    model = keras.Model(tokens, [Adaptive.outputs(PLAIN, x, embedding) for x in (hidden, dense()(hidden))])
    randomise(model)
    loaded = by_file(model, tmp_path)
    assert n_tables(loaded) == 1
    assert_equal(outputs(loaded), outputs(model))
    with pytest.raises(ParameterError) as caught:
        by_clone(model, tmp_path)
    assert caught.value.name == "embedding"


def test_a_clone_function_may_share_layers_but_not_break_a_tie():
    model = made(of_a_layer, Adaptive, PLAIN)
    softmax, embedding = model.layers[-1], model.layers[1]

    def clone(keep=lambda layer: False, **changed):
        def function(layer):
            if keep(layer):
                return layer
            return type(layer).from_config({**layer.get_config(), **{k: v(layer) for k, v in changed.items()}})

        return keras.models.clone_model(model, clone_function=function)

    assert_equal(outputs(clone(keep=lambda layer: True)), outputs(model))
    assert clone(keep=lambda layer: layer is not softmax).layers[-1].embedding is embedding
    for refused, value in (
        ({"keep": lambda layer: layer is softmax}, None),  # it would compute with the table of the original
        ({"name": lambda layer: f"{layer.name}_copy"}, embedding.name),
    ):
        with pytest.raises(ParameterError) as caught:
            clone(**refused)
        assert caught.value.name == "embedding" and value in (None, caught.value.value)


def test_a_layer_has_one_embedding_and_of_its_sizes():
    tokens, embedding, other = ids(), Adaptive.embedding(PLAIN), Adaptive.embedding(PLAIN)
    hidden, softmax = embedding(tokens), layers.AdaptiveSoftmax(**PLAIN)
    softmax(hidden, embedding=embedding)
    softmax(hidden, embedding=embedding)
    for wrong in (other, None, Adaptive.embedding({**PLAIN, "n_token": 21}), Logits.embedding(PLAIN)):
        called = softmax if wrong is other else layers.AdaptiveSoftmax(**PLAIN)
        with pytest.raises(ParameterError) as caught:
            called(hidden, embedding=wrong)
        assert (caught.value.name, caught.value.value) == ("embedding", wrong)
    with pytest.raises(ParameterError) as caught:
        layers.AdaptiveSoftmax(**PLAIN)(tf.zeros([2, 3, 8]))
    assert caught.value.name == "embedding"
    with pytest.raises(ParameterError) as caught:
        layers.AdaptiveSoftmax(**PLAIN)(keras.Input([None, 7]), embedding=embedding)
    assert caught.value.name == "hidden"


# ---------------------------------------------------------------------------------------------- files of old versions


def as_before(path):
    """Rewrites a file as it was when the embedding was an argument of the call."""
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    config = json.loads(files["config.json"])
    for layer in config["config"]["layers"]:
        tied = layer["config"].pop("tied_to", None)
        for node in layer["inbound_nodes"] if tied else []:
            node["kwargs"]["embedding"] = tied["embedding"]
    files["config.json"] = json.dumps(config).encode()
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)


def test_a_file_of_an_old_version_loads_and_is_tied(tmp_path):
    model = made(of_a_layer, Adaptive, DIV_VAL)
    model.save(tmp_path / "old.keras")
    as_before(tmp_path / "old.keras")
    loaded = keras.models.load_model(tmp_path / "old.keras")
    assert loaded.layers[-1].embedding is loaded.layers[1]
    assert_equal(outputs(loaded), outputs(model))
    assert_equal(outputs(by_clone(loaded, tmp_path)), outputs(model))


def test_an_old_file_without_the_table_is_an_error_and_its_weights_can_be_read(tmp_path):
    model = made(of_a_layer_of_ones_own, Adaptive, PLAIN)
    model.save(tmp_path / "old.keras")
    as_before(tmp_path / "old.keras")
    with pytest.raises(ValueError, match="load_weights"):  # Keras wraps the error
        keras.models.load_model(tmp_path / "old.keras")
    again = of_a_layer_of_ones_own(Adaptive, PLAIN)
    again.load_weights(tmp_path / "old.keras")
    assert_equal(outputs(again), outputs(model))
