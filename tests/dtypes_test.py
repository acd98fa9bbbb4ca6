"""dtype="float64" computes in float64 everywhere; weights in half precision are not trained."""

import functools
import itertools

import keras
import numpy as np
import pytest
import reference_model
import tensorflow as tf
from conforming import LABELS, MODELS, SLOW, segment
from conforming_layers import LAYERS, NETWORK
from helpers import SMALL, eagerly, raises_parameter, randomise
from reference_model import ReferenceModel

import txl_tf
from txl_tf import layers
from txl_tf.kernels.dropout import scale_of_kept
from txl_tf.kernels.dtypes import wide_dtype
from txl_tf.kernels.gradients import custom_gradient
from txl_tf.language.session import Session

SLOWLY = pytest.mark.slow
CASES = {case.name: case for case in (*MODELS, *SLOW) if case.loss is None}  # the models with a loss of their own
EXACT = {"rtol": 1e-13, "atol": 1e-13}


def of_all(*names):
    """The models as parameters; those that are not named are slow."""
    return pytest.mark.parametrize("name", [pytest.param(n, marks=[SLOWLY] * (n not in names)) for n in CASES])


def random(*shape, seed=0, scale=1.0):
    return np.random.default_rng(seed).normal(0, scale, shape)


def batch_of(name):
    """The batch of a case; targets have no padding, which `fit` packs and `loss_of` does not."""
    inputs, targets = CASES[name].make_batch()
    if name.startswith("transformer"):
        targets = np.maximum(targets, 1)
    return inputs, targets


def loss_of(name, model, **training):
    """The loss of a model as a function of nothing; with `training=True`, its gradient is that of training."""
    inputs, targets = batch_of(name)
    if hasattr(model, "segment_nll"):
        mems = model.initial_mems(len(inputs))
        return lambda: tf.reduce_mean(model.segment_nll(inputs, targets, mems, **training)[0])
    if isinstance(model, txl_tf.Transformer):

        def loss():
            _, smoothed, _, tokens = model.loss_of((inputs, targets[:, :-1]), targets[:, 1:])
            return smoothed / tokens

        return loss
    return lambda: tf.reduce_mean(model.nll(inputs, targets))


def in_float64(inputs):
    return keras.tree.map_structure(lambda x: x.astype("float64") if x.dtype.kind == "f" else x, inputs)


def has_more_digits_than_float32(x):
    """Whether an array has numbers that float32 does not hold."""
    x = np.asarray(x)
    return x.dtype == np.float64 and bool((x != x.astype(np.float32)).any())


# ---------------------------------------- weights in half precision


def assert_refused(dtype, function, *args, **kwargs):
    with pytest.raises(txl_tf.ParameterError) as caught:
        function(*args, **kwargs)
    assert (caught.value.name, caught.value.value) == ("dtype", dtype)
    assert f"mixed_{dtype}" in caught.value.allowed


HALVES = [
    *itertools.product(("language_model", "tener"), ("bfloat16",)),
    *(pytest.param(*case, marks=SLOWLY) for case in itertools.product(CASES, ("bfloat16", "float16"))),
]


@pytest.mark.parametrize("name, dtype", HALVES)
def test_weights_in_half_precision_are_not_trained(name, dtype):
    if (name, dtype) == ("bilstm", "bfloat16"):
        pytest.skip("Keras's initializer of an LSTM has no bfloat16")
    model = CASES[name].make_random(dtype)
    inputs, targets = CASES[name].make_batch()
    model.compile("adam", run_eagerly=True)
    before = model.get_weights()
    dataset = tf.data.Dataset.from_tensors((inputs, targets))
    assert_refused(dtype, model.fit, dataset, verbose=0)
    assert_refused(dtype, model.train_on_batch, inputs, targets)
    assert all((np.asarray(a) == np.asarray(b)).all() for a, b in zip(before, model.get_weights(), strict=True))
    assert np.isfinite(model.evaluate(dataset, verbose=0)).all()  # inference is allowed


@pytest.fixture
def policy():
    before = keras.config.dtype_policy()
    yield keras.config.set_dtype_policy
    keras.config.set_dtype_policy(before)


def test_a_policy_of_half_precision_is_refused_as_the_argument_is(policy):
    policy("bfloat16")
    lm = txl_tf.TransformerXLLM(**{**SMALL, "n_layer": 1}, mem_len=4)
    lm.compile("sgd")
    assert_refused("bfloat16", lm.train_on_batch, *segment())


@pytest.mark.parametrize("dtype", ["int32", "int8", "bool", "string", "no dtype", 3, tf.int64])
def test_a_dtype_that_is_no_float_is_refused_by_name(dtype):
    class Mine(layers.CRF):
        def __init__(self, **options):
            super().__init__(3, **options)

    for make in (layers.LayerNorm, Mine, functools.partial(txl_tf.TransformerXLLM, **SMALL, mem_len=4)):
        with raises_parameter("dtype", dtype):
            make(dtype=dtype)
        with raises_parameter("dtype"):
            make(dtype=keras.DTypePolicy("int32"))


def reader(dtype):
    """A network of plain Keras layers, one of which has weights of another dtype."""
    return keras.Sequential([keras.layers.Embedding(23, 8, dtype=dtype), keras.layers.Dense(8)])


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=SLOWLY)])
@pytest.mark.parametrize("is_built", [False, True])  # if not, the first step makes the weights
def test_a_part_in_half_precision_is_refused_unless_it_is_frozen(dtype, is_built):
    inputs, tags = np.full([4, 5], 3, np.int32), np.zeros([4, 5], np.int32)
    network = reader(dtype)
    tagger = txl_tf.Tagger(network, LABELS)
    if is_built:
        tagger(inputs)
    tagger.compile("sgd", run_eagerly=True)
    assert_refused(dtype, tagger.fit, inputs, tags, verbose=0)
    assert_refused(dtype, tagger.train_on_batch, inputs, tags)
    network.layers[0].trainable = False
    tagger.compile("sgd", run_eagerly=True)
    assert np.isfinite(tagger.train_on_batch(inputs, tags)).all()


# ---------------------------------------- float64: functions


def softmax(x):
    exp = np.exp(x - x.max(-1, keepdims=True))
    return exp / exp.sum(-1, keepdims=True)


def normalised(x, epsilon):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + epsilon)


@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize("epsilon", [1e-12, 1e-5])
def test_layer_norm_agrees_with_numpy(epsilon, in_graph):
    x, layer = random(2, 6, 8, scale=3.0) + 1, layers.LayerNorm(epsilon, dtype="float64")
    output = tf.function(layer)(tf.constant(x)) if in_graph else layer(x)
    np.testing.assert_allclose(output, normalised(x, epsilon), rtol=0, atol=1e-14)
    gamma, beta = random(8, seed=1), random(8, seed=2)
    for weights in ((gamma, beta), (gamma.astype(np.float32), beta.astype(np.float32))):
        output = layers.layer_norm(tf.constant(x), *map(tf.constant, weights), epsilon)
        np.testing.assert_allclose(output, normalised(x, epsilon) * weights[0] + weights[1], rtol=0, atol=1e-14)


@pytest.mark.parametrize("queries", [1, 4])
def test_attention_agrees_with_numpy(queries):
    q, k, v, positions = random(2, queries, 3), random(2, 5, 3), random(2, 5, 6), random(2, queries, 5)
    visible = np.tri(queries, 5, 1, bool)
    probs = softmax(np.where(visible, (q @ k.transpose(0, 2, 1) + positions) * 0.3, -np.inf))
    found = layers.attention_probs(*map(tf.constant, (q, k, positions, visible)), 0.3)
    np.testing.assert_allclose(found, probs, **EXACT)
    found = layers.attend(*map(tf.constant, (q, k, v, positions, visible)), 0.3)
    np.testing.assert_allclose(found, probs @ v, **EXACT)

    mask = (~visible).astype(np.float32)
    outputs = [layers.scaled_dot_product_attention(*map(tf.constant, (q, k, v, mask)))]
    symbols = [keras.Input(batch_shape=x.shape, dtype=x.dtype.name) for x in (q, k, v, mask)]
    outputs.append(keras.Model(symbols, layers.scaled_dot_product_attention(*symbols))([q, k, v, mask]))
    weights = softmax(np.where(visible, q @ k.transpose(0, 2, 1) / 3**0.5, -np.inf))
    for output, found in outputs:
        np.testing.assert_allclose(found, weights, **EXACT)
        np.testing.assert_allclose(output, weights @ v, **EXACT)


def test_positions_agree_with_numpy():
    half = 10000 ** (-np.arange(0, 8, 2) / 8)
    np.testing.assert_allclose(layers.inverse_frequencies(8, "float64"), half, **EXACT)
    places = layers.relative_positions(50, 30, "float64")
    np.testing.assert_array_equal(places, np.minimum(np.arange(49.0, -1, -1), 30))
    angles = places.numpy()[:, None] * half
    found = layers.positional_embedding(places, layers.inverse_frequencies(8, "float64"))
    np.testing.assert_allclose(found[0], np.concatenate([np.sin(angles), np.cos(angles)], 1), **EXACT)
    table = layers.positional_encoding(50, 8, "float64").numpy()[0]
    angles = np.arange(50)[:, None] * half
    np.testing.assert_allclose(table[:, ::2], np.sin(angles), **EXACT)
    np.testing.assert_allclose(table[:, 1::2], np.cos(angles), **EXACT)
    found = layers.PositionalEncoding(8, 60, dtype="float64")(np.zeros([1, 50, 8]))
    np.testing.assert_allclose(found[0], table, **EXACT)


def test_the_cross_entropy_agrees_with_numpy():
    logits, labels = random(5, 7, scale=9.0), np.array([0, 3, 6, 2, 2])
    expected = -np.log(softmax(logits))[np.arange(5), labels]
    np.testing.assert_allclose(layers.cross_entropy(labels.astype(np.int32), tf.constant(logits)), expected, **EXACT)


def test_the_adaptive_softmax_agrees_with_numpy():
    hidden, tables = random(2, 3, 4), [random(6, 4, seed=1), random(5, 2, seed=2)]
    projs, biases = [None, random(2, 4, seed=3)], [random(6, seed=4), random(5, seed=5)]
    clusters = random(1, 4, seed=6), random(1, seed=7)
    head = softmax(hidden @ np.concatenate([tables[0], clusters[0]]).T + np.concatenate([biases[0], clusters[1]]))
    tail = softmax(hidden @ projs[1].T @ tables[1].T + biases[1])
    expected = np.log(np.concatenate([head[..., :6], head[..., 6:] * tail], -1))
    weights = tables, projs, biases, clusters
    np.testing.assert_allclose(layers.adaptive_log_probs(hidden, *weights), expected, **EXACT)
    labels = np.array([[0, 5, 6], [10, 3, 8]])
    nll = -np.take_along_axis(expected, labels[..., None], -1)[..., 0]
    np.testing.assert_allclose(layers.mask_adaptive_logsoftmax(hidden, labels, *weights), nll, **EXACT)
    found, kept = layers.static_adaptive_logsoftmax(tf.constant(hidden), tf.constant(labels), *weights, [6])
    np.testing.assert_allclose(found, nll, **EXACT)
    assert kept.numpy().all()


@pytest.mark.parametrize("which", ["emissions", "transitions"])
def test_the_crf_agrees_with_all_paths(which):
    """One argument in float64 is enough; the others are numbers that float32 holds."""
    emissions, mask = random(2, 4, 3), np.array([[1, 1, 1, 1], [1, 1, 0, 0]], bool)
    others = {"transitions": random(3, 3, seed=1), "start": random(3, seed=2), "end": random(3, seed=3)}
    arrays = {"emissions": emissions, **others}
    arrays = {name: x if name == which else x.astype(np.float32) for name, x in arrays.items()}
    emissions, transitions, start, end = (x.astype(np.float64) for x in arrays.values())
    weights = [arrays[name] for name in others]
    tags = np.array([[0, 2, 1, 1], [2, 2, 0, 0]])
    nll = layers.crf_nll(arrays["emissions"], tags, mask, *weights)
    best, score = layers.crf_decode(arrays["emissions"], mask, *weights)
    marginals = layers.crf_marginals(arrays["emissions"], mask, *weights)
    for row, length in enumerate(mask.sum(1)):
        paths = np.array(list(itertools.product(range(3), repeat=length)))
        scores = start[paths[:, 0]] + end[paths[:, -1]] + emissions[row, np.arange(length), paths].sum(1)
        scores += transitions[paths[:, :-1], paths[:, 1:]].sum(1)
        probs = softmax(scores)
        of_tags = (paths == tags[row, :length]).all(1)
        np.testing.assert_allclose(nll[row], -np.log(probs[of_tags][0]), **EXACT)
        np.testing.assert_allclose(score[row], scores.max(), **EXACT)
        np.testing.assert_array_equal(best[row, :length], paths[scores.argmax()])
        expected = [[probs[paths[:, t] == k].sum() for k in range(3)] for t in range(length)]
        np.testing.assert_allclose(marginals[row, :length], expected, **EXACT)


def test_dropout_scales_exactly():
    found = layers.dropout(tf.ones([1000], tf.float64), 0.3, [3, 4, 0]).numpy()
    assert set(found) == {0.0, scale_of_kept(0.3)}


def test_dtypes_count_but_numbers_and_lists_do_not():
    float64 = (
        "float64",
        tf.float64,
        np.float64,
        np.dtype("float64"),
        np.float64(1),
        np.ones(1),
        tf.Variable(np.ones(1)),
    )
    for value in float64:
        assert wide_dtype(2, [1.0], None, value) == tf.float64
    for value in (1, 2, 2.0, True, [2.0], None, "float16", tf.float32, np.float32(2), tf.constant(2.0)):
        assert wide_dtype(value) == tf.float32


def test_a_python_float_is_as_exact_as_the_tensors_beside_it():
    """In a graph, where it becomes a tensor."""
    times = custom_gradient(lambda x, factor: (x * factor, lambda upstream: (upstream * factor, None)))
    for dtype, expected in (("float64", 0.1), ("float32", float(np.float32(0.1)))):
        found = tf.function(times)(tf.ones([], dtype), 0.1)
        assert found.dtype == dtype and float(found) == expected


# ---------------------------------------- float64: gradients by differences


def assert_gradients_are_those_of_differences(loss, variables, directions):
    """Compares the slopes of `loss` in some directions with difference quotients.

    Args:
        directions: `directions(number)` -> list of lists of the numbers of variables that are moved together.
    """
    with tf.GradientTape() as tape:
        value = loss()
    assert value.dtype == tf.float64
    gradients = [tf.convert_to_tensor(gradient).numpy() for gradient in tape.gradient(value, variables)]
    total = np.sqrt(sum((gradient**2).sum() for gradient in gradients))
    for variable, gradient in zip(variables, gradients, strict=True):
        zero = np.abs(gradient).max() < 1e-12 * total  # the bias of keys, which is the same for all keys of a query
        assert zero or has_more_digits_than_float32(gradient), variable.path
    rng = np.random.default_rng(3)
    for group in directions(len(variables)):
        before = [variables[i].numpy() for i in group]
        moves = [rng.normal(size=array.shape) for array in before]
        moves = [move / np.linalg.norm(move) for move in moves]
        values = []
        for step in (1e-6, -1e-6):
            for i, array, move in zip(group, before, moves, strict=True):
                variables[i].assign(array + step * move)
            values.append(float(loss()))
        for i, array in zip(group, before, strict=True):
            variables[i].assign(array)
        slope = sum((gradients[i] * move).sum() for i, move in zip(group, moves, strict=True))
        quotient = (values[0] - values[1]) / 2e-6
        assert quotient == pytest.approx(slope, rel=1e-6, abs=1e-8 * total), [variables[i].path for i in group]


def all_at_once(number):
    return [list(range(number))]


def one_by_one(number):
    return [[i] for i in range(number)]


COVERED = "TransformerXL", "Tener", "BiLSTM"  # by their layers, and by Keras's tests
DIRECTIONS = pytest.mark.parametrize(
    "directions", [all_at_once, pytest.param(one_by_one, marks=SLOWLY)], ids=["all", "one by one"]
)


@DIRECTIONS
@of_all("adaptive_language_model", "transformer", "tener")
def test_the_gradients_of_models_are_those_of_differences(name, directions):
    model = CASES[name].make_random("float64")
    assert {variable.dtype for variable in model.trainable_variables} == {"float64"}
    assert_gradients_are_those_of_differences(loss_of(name, model), model.trainable_variables, directions)


@DIRECTIONS
@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.name, marks=[SLOWLY] * (case.name in COVERED)) for case in LAYERS]
)
def test_the_gradients_of_layers_are_those_of_differences_and_outputs_are_float64(case, directions):
    layer, inputs, more = case.make(dtype="float64"), in_float64(case.inputs), dict(case.more)
    if "embedding" in more:
        more["embedding"] = layers.AdaptiveEmbedding(20, NETWORK["d_embed"], NETWORK["d_model"], dtype="float64")
    layer(**inputs, **more)
    randomise(layer)
    output, *_ = keras.tree.flatten(layer(**inputs, **more))  # memories, which follow, have no gradient
    tags = np.random.default_rng(0).integers(0, 8, [4, 5])

    def loss():
        if case.name == "CRF":
            return tf.reduce_sum(layer.nll(inputs["emissions"], tags))
        return tf.reduce_sum(keras.tree.flatten(layer(**inputs, **more))[0] * random(*output.shape, seed=2))

    assert case.name == "CRF" or has_more_digits_than_float32(output)
    if layer.trainable_variables:
        assert_gradients_are_those_of_differences(loss, layer.trainable_variables, directions)


# ---------------------------------------- float64: models


ADAPTIVE = {"cutoffs": [6, 14], "div_val": 2, "same_length": True, "clamp_len": 5}


@pytest.mark.parametrize("options", [ADAPTIVE, pytest.param({}, marks=SLOWLY)], ids=["adaptive", "plain"])
def test_scores_agree_with_the_plain_port(monkeypatch, options):
    monkeypatch.setattr(reference_model, "FLOAT", tf.float64)
    sizes = {**SMALL, "mem_len": 4, **options}
    lm, plain = txl_tf.TransformerXLLM(**sizes, dropout=0.0, dtype="float64"), ReferenceModel(**sizes)
    randomise(lm)
    plain.assign(txl_tf.tf1_variables(lm))
    mems, plain_mems = None, plain.initial_mems(4)
    for tokens, labels in (segment(), (segment()[1], segment()[0])):
        with eagerly():
            nll, mems = lm.score(tokens, labels, mems)
        expected, plain_mems = plain.nll(tokens.T, labels.T, plain_mems)
        assert nll.dtype == mems[0].dtype == tf.float64
        np.testing.assert_allclose(nll, tf.transpose(expected), **EXACT)


@pytest.mark.parametrize(
    "name", ["adaptive_language_model", pytest.param("adaptive_vanilla_language_model", marks=SLOWLY)]
)
def test_all_methods_of_a_language_model_give_the_same_numbers(name):
    lm, (tokens, labels) = CASES[name].make_random("float64"), segment()
    lm.compile(run_eagerly=True)
    with eagerly():
        nll, mems = lm.score(tokens, labels)
        next_nll, _ = lm.score(labels, tokens, mems)
        log_probs, _ = lm.log_probs(tokens)
        assert lm.attention(tokens)[0].dtype == lm.alternatives(tokens, 2)[1].dtype == tf.float64
    assert has_more_digits_than_float32(nll)
    np.testing.assert_allclose(-tf.gather(log_probs, labels, batch_dims=2), nll, **EXACT)
    np.testing.assert_allclose(lm.first_nll(tokens, labels), nll, **EXACT)
    dataset = tf.data.Dataset.from_tensor_slices(([tokens, labels], [labels, tokens]))
    assert lm.evaluate(dataset, verbose=0) == pytest.approx(np.mean([nll, next_nll]), rel=1e-13)


@SLOWLY
@pytest.mark.parametrize("name", ["adaptive_language_model", "adaptive_vanilla_language_model"])
def test_generated_text_has_the_nll_of_the_model(name):
    """With all options, by a session, whose nll comes from cached keys and values."""
    lm, (tokens, _) = CASES[name].make_random("float64"), segment()
    options = {"temperature": 0.7, "top_k": 9, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.3, "seed": 3}
    session = Session(lm, 4)
    of_tokens = session.read(tokens)
    written, of_written = session.write(6, with_nll=True, **options)
    np.testing.assert_array_equal(lm.generate(tokens, 6, **options)[:, 5:], written)
    text, mems, expected = np.concatenate([tokens, written], 1), None, []
    is_window = isinstance(lm, txl_tf.TransformerLM)  # which has the whole text in view
    for start, end in [(0, 10)] if is_window else [(0, 5), *((i, i + 1) for i in range(5, 10))]:
        nll, mems = lm.score(text[:, start:end], text[:, start + 1 : end + 1], mems)
        expected.append(nll.numpy())
    expected = np.concatenate(expected, 1)
    np.testing.assert_allclose(of_tokens[:, 1:], expected[:, :4], **EXACT)
    np.testing.assert_allclose(of_written, expected[:, 4:], **EXACT)


@SLOWLY
@pytest.mark.parametrize("options", [{}, {"beam_size": 3}, {"temperature": 0.7, "top_p": 0.9, "seed": 3}], ids=str)
def test_scores_of_written_targets_are_those_of_the_model(options):
    model, source = CASES["transformer"].make_random("float64"), np.maximum(segment()[0], 1)
    ids, scores = model.generate(source, start=1, end=2, max_new_tokens=5, **options)
    ids = ids.numpy()
    log_probs = tf.nn.log_softmax(model((source, np.concatenate([np.ones([4, 1], int), ids[:, :-1]], 1)))).numpy()
    expected = (np.take_along_axis(log_probs, ids[..., None], -1)[..., 0] * (ids > 0)).sum(1)
    expected /= ((5 + (ids > 0).sum(1)) / 6) ** (0.6 if "beam_size" in options else 0)
    np.testing.assert_allclose(scores, expected, **EXACT)


# ---------------------------------------- float64: training


@of_all("adaptive_language_model", "tener")
def test_a_step_subtracts_the_gradient(name):
    """The rate is a power of two, as optimizers keep it in float32."""
    model, (inputs, targets) = CASES[name].make_random("float64"), batch_of(name)
    loss, variables = loss_of(name, model, training=True), model.trainable_variables
    with tf.GradientTape() as tape:
        value = loss()
    gradients = [tf.convert_to_tensor(gradient).numpy() for gradient in tape.gradient(value, variables)]
    before = [variable.numpy() for variable in variables]
    model.compile(keras.optimizers.SGD(0.25), run_eagerly=True)
    logs = model.train_on_batch(inputs, targets, return_dict=True)
    for variable, old, gradient in zip(variables, before, gradients, strict=True):
        np.testing.assert_allclose(variable.numpy(), old - 0.25 * gradient, err_msg=variable.path, **EXACT)
    if name != "transformer_pre_norm":  # whose labels are smoothed in training alone
        assert float(logs["loss"]) == pytest.approx(float(value), rel=1e-14)


@of_all()
def test_two_replicas_fit_as_one(name, two_replicas):
    found = []
    for scope in (tf.distribute.get_strategy().scope, two_replicas.scope):
        with scope():
            model = CASES[name].make_random("float64")
            model.compile(txl_tf.make_optimizer(0.02, train_steps=9), steps_per_execution=2)
        dataset = tf.data.Dataset.from_tensors(batch_of(name)).repeat(4)
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
        history = model.fit(dataset.with_options(options), epochs=2, verbose=0).history
        for measured, values in history.items():  # float32 holds some shares, such as 1/4
            assert measured == "accuracy" or has_more_digits_than_float32(np.float64(values)), measured
        found.append(np.concatenate([*history.values(), *(x.numpy().ravel() for x in model.trainable_variables)]))
    np.testing.assert_allclose(*found, rtol=1e-10, atol=1e-10)


@SLOWLY
@pytest.mark.parametrize(
    "options",
    [
        {"gradient_accumulation_steps": 2},
        {"static_shapes": True},
        {"jit_compile": True, "run_eagerly": False},
        {"steps_per_execution": 2, "run_eagerly": False, "metrics": ["bits"]},
    ],
    ids=str,
)
def test_options_of_compile_change_nothing(options):
    found = []
    for given in ({}, options):
        lm = CASES["adaptive_language_model"].make_random("float64")
        lm.compile(txl_tf.make_optimizer(0.02, train_steps=9), **{"run_eagerly": True, **given})
        history = lm.fit(tf.data.Dataset.from_tensors(segment()).repeat(2), verbose=0).history
        found.append([history["loss"][0], history["grad_norm"][0], *(x.numpy() for x in lm.trainable_variables)])
    for actual, expected in zip(*found, strict=True):
        np.testing.assert_allclose(actual, expected, **EXACT)


@SLOWLY
@pytest.mark.parametrize("optimizer", ["adam", "adamw", "lamb", "sgd", "muon"])
def test_optimizers_compute_in_float64(optimizer):
    """The update is linear in the rate, whatever the optimizer, so half of it moves half as far."""
    moved = []
    for rate in (0.5, 0.25):
        variable = keras.Variable(random(4, 3), dtype="float64")
        before = variable.numpy()
        made = txl_tf.make_optimizer(rate, train_steps=9, optimizer=optimizer, clip=0.1, clip_value=0.5)
        made.apply([tf.constant(random(4, 3, seed=1))], [variable])
        assert has_more_digits_than_float32(made.gradient_norm.numpy())
        moved.append(variable.numpy() - before)
    np.testing.assert_allclose(moved[0], 2 * moved[1], **EXACT)


@SLOWLY
def test_a_network_in_float64_trains_in_a_tagger_in_float32():
    """The norm that gradients are clipped by is that of both types."""
    network = functools.partial(txl_tf.Tener, n_token=23, n_layer=1, d_model=8, n_head=2, d_inner=12, d_embed=8)
    moved = []
    for dtype in ("float32", "float64"):
        tagger = txl_tf.Tagger(network(dtype=dtype), LABELS)
        randomise(tagger)
        tagger.compile(txl_tf.make_optimizer(0.25, train_steps=9, optimizer="sgd", clip=0.1), run_eagerly=True)
        tagger.train_on_batch({"chars": segment()[0]}, segment()[1] % 5)
        moved.append([variable.numpy() for variable in tagger.trainable_variables])
    for actual, expected in zip(*moved, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-6)


def test_a_map_of_dtypes_is_refused_by_models_and_by_layers_with_parts(policy):
    policies = keras.dtype_policies.DTypePolicyMap(default_policy="float32")
    policies[".*layer_norm.*"] = keras.DTypePolicy("mixed_bfloat16")
    for dtype in (policies, keras.dtype_policies.serialize(policies)):
        with raises_parameter("dtype", "DTypePolicyMap"):
            txl_tf.TransformerXLLM(**SMALL, mem_len=4, dtype=dtype)
        with raises_parameter("dtype", "DTypePolicyMap"):
            layers.EncoderLayer(8, 2, 8, dtype=dtype)
    policy(policies)
    with raises_parameter("dtype", "DTypePolicyMap"):
        layers.PositionwiseFF(8, 8)
    norm = layers.LayerNorm()
    norm.build([2, 8])
    assert norm.compute_dtype == "bfloat16"
