"""What every layer must do that people put into models of their own. A new layer joins `conforming_layers.py`."""

import re
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from conforming_layers import LAYERS, B, symbols
from helpers import raises_parameter, randomise
from keras.src import testing

from txl_tf import layers
from txl_tf.environment import too_old
from txl_tf.errors import ParameterError

KEY = [3, 4, 0]
DROPPING = [case for case in LAYERS if case.rates]
FAST = "PositionwiseFF", "TenerLayer"  # of the tests that need graphs
KINDS = *FAST, "MultiHeadAttention", "TransformerXLLayer", "LatticeAttn", "CRF"  # of the tests that take long


def all_of(cases, fast=None):
    def mark(case):
        return [pytest.mark.slow] if fast is not None and case.name not in fast else []

    return pytest.mark.parametrize("case", [pytest.param(case, id=case.name, marks=mark(case)) for case in cases])


@pytest.mark.parametrize("in_graph", [False, True])
@all_of(LAYERS, fast=KINDS)
def test_gradients_in_a_remat_scope_are_those_without(case, in_graph):
    if case.name == "BiLSTM" and in_graph:
        pytest.skip("Keras's Bidirectional cannot be in a RematScope there")

    def gradients(layer):
        names = [name for name, x in case.inputs.items() if np.asarray(x).dtype == np.float32]
        tensors = [tf.constant(case.inputs[name]) for name in names]
        with tf.GradientTape() as tape:
            tape.watch(tensors)
            given = dict(zip(names, tensors, strict=True))
            outputs = layer(**{**case.inputs, **given}, **case.more, training=True)
            loss = sum(tf.reduce_sum(tf.sin(x)) for x in keras.tree.flatten(outputs) if x.dtype.is_floating)
        if isinstance(loss, int):
            return []
        found = tape.gradient(loss, [*tensors, *layer.trainable_variables], unconnected_gradients="zero")
        return [tf.convert_to_tensor(x) for x in found]

    options = {"seed": 5, **dict.fromkeys(case.rates, 0.5)} if case.rates else {}
    plain = case.make(**options)
    with keras.RematScope(mode="full"):
        layer = case.make(**options)
    for one in (plain, layer):
        made(case, one)
    layer.set_weights(plain.get_weights())
    call = tf.function(gradients, autograph=False) if in_graph else gradients
    for found, expected in zip(call(layer), gradients(plain), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def flat(outputs):
    return [np.asarray(tf.cast(x, tf.float32)) for x in keras.tree.flatten(outputs)]


def first(outputs):
    return flat(outputs)[0]


def made(case, layer, **options):
    """The first output of a layer whose weights are random, so that none of them is hidden by a zero."""
    if not layer.built:
        layer(**case.inputs, **case.more)
        randomise(layer)
    return first(layer(**case.inputs, **case.more, **options))


# ----------------------------------------------------------------------------------------------------------- dropout


@all_of(DROPPING, fast=KINDS)
def test_training_drops_and_nothing_else_does(case):
    layer, same = case.dropping(seed=7), case.dropping(seed=7)
    expected = made(case, layer)
    np.testing.assert_array_equal(made(case, layer, training=False), expected)
    np.testing.assert_array_equal(made(case, layer, training=False, dropout_key=KEY), expected)
    one, two = (made(case, layer, training=True) for _ in range(2))
    assert np.abs(one - expected).max() > 1e-3 and np.abs(two - one).max() > 1e-3
    made(case, same)
    np.testing.assert_array_equal(made(case, same, training=True), one)  # the same seed
    by_key = made(case, layer, training=True, dropout_key=KEY)
    np.testing.assert_array_equal(made(case, layer, dropout_key=KEY), by_key)
    assert np.abs(by_key - expected).max() > 1e-3


@pytest.mark.slow
@all_of(DROPPING)
def test_every_rate_drops_by_itself_and_none_draws_nothing(case):
    for rate in case.rates:
        layer = case.make(**{rate: 0.5}, seed=7)
        assert np.abs(made(case, layer) - made(case, layer, training=True)).max() > 1e-3, rate
        with raises_parameter(rate, 1.5):
            case.make(**{rate: 1.5})
    layer = case.make(**dict.fromkeys(case.rates, 0.0))
    np.testing.assert_array_equal(made(case, layer, training=True), made(case, layer))


@all_of(DROPPING, {*FAST, "MultiHeadAttention"})
def test_two_replicas_draw_what_one_device_draws(case, two_replicas):
    layer = case.dropping(seed=7)
    made(case, layer)
    expected = first(layer(**case.inputs, training=True))
    with two_replicas.scope():
        replicated = case.dropping(seed=7)
        made(case, replicated)
    for to, of in zip(replicated.weights, layer.weights, strict=True):
        to.assign(of)

    def share(x, replica):  # of what has rows
        return keras.tree.map_structure(lambda y: y[2 * replica :][:2] if len(y) == B else y, x)

    def step():
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        inputs = {name: share(x, int(tf.get_static_value(replica))) for name, x in case.inputs.items()}
        return keras.tree.flatten(replicated(**inputs, training=True))[0]

    results = two_replicas.experimental_local_results(two_replicas.run(step))
    np.testing.assert_allclose(np.concatenate([x.numpy() for x in results]), expected, rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------------------------ shapes and types


@all_of(LAYERS, fast=KINDS)
def test_a_model_of_ones_own_with_the_layer_has_a_summary(case):
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.layer = case.make()

        def call(self, inputs):
            return self.layer(**inputs, **case.more)

    model, lines = Own(), []
    outputs = model(case.inputs)
    model.summary(line_length=150, print_fn=lambda line, **_: lines.append(line))
    shape = str(tuple(keras.tree.flatten(outputs)[0].shape))
    assert shape in lines[0] or case.name == "PositionFusion"  # of pairs, whose number Keras does not know


@all_of(LAYERS, fast=KINDS)
def test_output_shapes_are_those_of_the_call_of_symbols_too(case):
    layer = case.make()
    outputs = layer(**case.inputs, **case.more)
    shapes = [keras.tree.map_structure(np.shape, x) for x in case.inputs.values()]
    of_shapes = keras.tree.flatten(
        keras.tree.map_shape_structure(keras.KerasTensor, layer.compute_output_shape(*shapes))
    )
    of_symbols = keras.tree.flatten(case.make()(**symbols(case.inputs), **case.more))
    for shape, symbol, output in zip(of_shapes, of_symbols, keras.tree.flatten(outputs), strict=True):
        assert symbol.dtype == output.dtype.name
        for computed in (shape, symbol):
            assert tf.TensorShape(computed.shape).is_compatible_with(output.shape)
            assert None not in computed.shape or computed is symbol or case.name == "PositionFusion"


@all_of(LAYERS, fast=KINDS)
@pytest.mark.parametrize(
    "policy", ["mixed_bfloat16", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mixed_float16", "float16"))]
)
def test_half_precision_is_close_and_holds_ids(case, policy):
    layer = case.make(dtype=policy)
    expected, got = made(case, case.make()), made(case, layer)
    kinds = {weight.dtype for weight in layer.weights}
    assert kinds <= ({"float32"} if policy.startswith("mixed") else {"float16"})
    if case.name != "CRF":  # whose output are ids
        np.testing.assert_allclose(got, expected, atol=0.1 * np.abs(expected).max())


# ----------------------------------------------------------------------------------------------------------- masks

MASKED = [case for case in LAYERS if case.masked]
VANILLA = "MultiHeadAttention", "EncoderLayer", "DecoderLayer"
KEYS = {"MultiHeadAttention": "k", "DecoderLayer": "x"}  # whose places the mask is of, where not the first input's


def mask_for(case):
    rows, length = case.inputs[KEYS.get(case.name, next(iter(case.inputs)))].shape[:2]
    return np.arange(length) < [[length], [length - 1], [2], [3]][:rows]


@all_of(MASKED)
def test_what_a_mask_hides_does_not_count_given_or_handed_on_by_keras(case):
    """Elements that the mask leaves out are replaced by others: what remains visible must not change."""
    layer, mask = case.make(), mask_for(case)
    expected = made(case, layer, mask=mask)
    names = {"MultiHeadAttention": ("v", "k")}.get(case.name, (KEYS.get(case.name, next(iter(case.inputs))),))
    changed = {name: np.where(mask[..., None], x, 9.0) if name in names else x for name, x in case.inputs.items()}
    got = first(layer(**changed, mask=mask))
    seen = np.ones(got.shape[:2], bool) if case.name == "MultiHeadAttention" else mask
    np.testing.assert_array_equal(got[seen], expected[seen])
    assert np.abs(made(case, layer) - expected)[seen].max() > 1e-3 or case.name == "CRF"

    handed = {name: tf.constant(x) for name, x in case.inputs.items()}
    for name in names:
        handed[name]._keras_mask = tf.constant(mask)
    np.testing.assert_array_equal(first(layer(**handed)), expected)
    np.testing.assert_array_equal(first(layer(*handed.values(), None)), expected)


@all_of(MASKED, fast=("TenerLayer", "LatticeAttn", "CRF"))
def test_a_graph_of_unknown_sizes_gives_the_same(case):
    layer, mask = case.make(), mask_for(case)
    expected = made(case, layer, mask=mask)
    inputs = {name: tf.constant(x) for name, x in case.inputs.items()}

    def spec(x):
        return tf.TensorSpec([None] * (len(x.shape) - 1) + [x.shape[-1] if x.dtype.is_floating else None], x.dtype)

    causal_too = case.name in VANILLA
    graph = tf.function(
        lambda inputs, mask: layer(**inputs, mask=mask),
        input_signature=[{name: spec(x) for name, x in inputs.items()}, tf.TensorSpec([None, None], tf.bool)],
    )
    np.testing.assert_allclose(first(graph(inputs, tf.constant(mask))), expected, rtol=1e-5, atol=1e-6)
    if causal_too:
        causal = tf.function(lambda **inputs: layer(**inputs, use_causal_mask=True), reduce_retracing=True)
        concrete = causal.get_concrete_function(**{name: spec(x) for name, x in inputs.items()})
        np.testing.assert_allclose(
            first(concrete(**inputs)), made(case, layer, use_causal_mask=True), rtol=1e-5, atol=1e-6
        )


@all_of(LAYERS, fast=("EncoderLayer", "TransformerXL", "BiLSTM"))
def test_a_graph_without_ranks_gives_the_same_or_an_error_with_the_argument(case):
    layer = case.make()
    expected = made(case, layer)
    inputs = keras.tree.map_structure(tf.constant, case.inputs)
    specs = keras.tree.map_structure(lambda x: tf.TensorSpec(None, x.dtype), inputs)
    graph = tf.function(lambda inputs: layer(**inputs, **case.more), input_signature=[specs], autograph=False)
    try:
        found = first(graph(inputs))
    except ParameterError as error:
        assert error.name in case.inputs and type(layer).__name__ in str(error)
        assert case.name not in ("Embeddings", "TransformerXL", "Tener", "Flat", "BiLSTM")
    else:
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@all_of(MASKED)
def test_wrong_masks_are_named(case):
    layer, mask = case.make(), mask_for(case)
    rows, length = mask.shape
    wrong = [mask[0], mask[:, :-1], mask[:1, :-1], np.ones([rows, length, length + 1, 1], bool)]
    wrong += [np.ones([rows, length + 1, length], bool), np.full([rows, length], "a"), 2 * mask.astype(np.int32)]
    if case.name in VANILLA:  # whose numbers may be those of Keras or of the articles
        wrong += [mask.astype(np.float32), np.ones([rows, length, length], np.int32)]
    for each in wrong:
        with pytest.raises(ParameterError) as caught:
            layer(**case.inputs, mask=each)
        assert caught.value.name == "mask" and caught.value.value.shape == each.shape


@all_of(MASKED)
def test_numbers_0_and_1_say_what_bool_says(case):
    layer, mask = case.make(), mask_for(case)
    expected = made(case, layer, mask=mask)
    for dtype in (np.int32, np.uint8, np.int64) if case.name in VANILLA else (np.int32, np.uint8, np.float32):
        np.testing.assert_array_equal(made(case, layer, mask=mask.astype(dtype)), expected)


@all_of([case for case in LAYERS if case.name in ("EncoderLayer", "MultiHeadAttention")])
def test_masks_of_keras_and_of_the_articles_say_the_same(case):
    layer = case.make()
    queries = case.inputs["q" if case.name == "MultiHeadAttention" else "x"].shape[1]
    seen = np.random.default_rng(0).random([4, queries, 5]) < 0.6
    seen[..., 0] = True

    def results(**masks):
        return made(case, layer, **masks)

    expected = results(mask=seen)
    for dtype in (bool, np.int32, np.float32):
        np.testing.assert_array_equal(results(attention_mask=seen.astype(dtype)), expected)
        np.testing.assert_array_equal(results(attention_mask=seen[:, None].astype(dtype)), expected)
    np.testing.assert_array_equal(results(forbidden=~seen[:, None]), expected)
    np.testing.assert_array_equal(results(forbidden=1 - seen[:, None].astype(np.float32)), expected)
    np.testing.assert_array_equal(results(mask=1 - seen[:, None].astype(np.float32)), expected)  # four dimensions
    both = results(mask=seen[:, 0], attention_mask=seen[1])
    np.testing.assert_array_equal(both, results(mask=seen[:, :1] & seen[1]))
    causal = results(use_causal_mask=True)
    np.testing.assert_array_equal(causal, results(attention_mask=np.tri(queries, 5, dtype=bool)))
    for wrong in (seen * -1e9, seen * 2, seen[:, 0], seen[:3], seen[:, None, None]):
        with pytest.raises(ParameterError) as caught:
            results(attention_mask=wrong)
        assert caught.value.name == "attention_mask"


@all_of(
    [
        case
        for case in LAYERS
        if np.shape(next(iter(case.inputs.values()))) == (4, 5, 8) and case.name != "MultiHeadAttention"
    ]
)
def test_masks_go_on_and_nobody_is_warned(case):
    layer = case.make()
    name, x = next(iter(case.inputs.items()))
    x, mask = tf.constant(x), np.arange(5) < [[5], [4], [2], [3]]
    x._keras_mask = tf.constant(mask)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        output = keras.tree.flatten(layer(**{**case.inputs, name: x}, **case.more))[0]
        if case.masked:
            layer(**case.inputs, mask=mask)
    np.testing.assert_array_equal(output._keras_mask, mask)


# ----------------------------------------------------------------------------------------------- errors by name


def probes(case):
    """`(argument, {argument: a wrong value})` for every argument of the call."""
    for name, x in case.inputs.items():
        parts = x if isinstance(x, dict) else {None: x}
        for part, array in parts.items():
            wrong = [array[0], array[None], array.astype(bool), array.astype(str), None]
            wrong += [[1, "a"]] if part is None else []  # Keras refuses lists beside tensors, by what holds them
            if array.dtype.kind == "f":
                wrong += [array[..., :-1], array.astype(np.int32)]
            for value in wrong:
                yield part or name, value, {**case.inputs, name: value if part is None else {**x, part: value}}
            if part is not None:
                yield part, "left out", {**case.inputs, name: {key: y for key, y in x.items() if key != part}}


# Layers that work on every row or id by itself take any rank.
ANY_RANK = "Embeddings", "AdaptiveEmbedding", "LayerNorm", "RMSNorm", "PositionWiseFFN"


@pytest.mark.ci
def test_wrong_inputs_are_named_by_the_first_line_of_the_error():
    unnamed, n = [], 0
    for case in LAYERS:
        layer = case.make()
        layer(**case.inputs, **case.more)
        for name, value, inputs in probes(case):
            rank = isinstance(value, np.ndarray) and value.ndim != case.inputs.get(name, value).ndim
            if (name == "mems" and value is None) or (case.name in ANY_RANK and rank):
                continue
            n += 1
            try:
                layer(**inputs, **case.more)
                message = "accepted"
            except Exception as error:
                lines = re.sub(r"\x1b\[\d*m", "", str(error)).splitlines()  # Keras writes it bold
                lines = [line for line in lines if line and "Exception encountered" not in line]
                message = f"{type(error).__name__} {lines[0]}"
                if isinstance(error, (ValueError, TypeError)) and re.search(rf"\b{name}\b", lines[0]):
                    continue
            unnamed.append(f"{case.name} {name} {getattr(value, 'dtype', value)} {np.shape(value)}: {message[:150]}")
    assert n > 320 and not unnamed, f"{len(unnamed)} of {n}:\n" + "\n".join(unnamed)


# ---------------------------------------------------------------------------------------- models that hold a layer

IN_MODELS = [case for case in LAYERS if not case.more]  # a functional model holds tensors alone


def model_with(case, **options):
    """A functional model of a layer, whose weights are random, and its inputs as `fit` takes them."""
    layer, inputs = case.dropping(seed=7, **options) if case.rates else case.make(**options), symbols(case.inputs)
    model = keras.Model(inputs, keras.tree.flatten(layer(**inputs))[0])
    randomise(model)
    return model


@all_of(IN_MODELS, fast=("MultiHeadAttention", "TenerLayer", "Embeddings"))
def test_a_configuration_makes_layer_and_model_again(case):
    layer = case.make()
    again = type(layer).from_config(layer.get_config())
    assert again.get_config() == layer.get_config()
    model = model_with(case)
    expected = first(model(case.inputs))
    copies = keras.models.model_from_json(model.to_json()), keras.models.clone_model(model)
    for copy in copies:
        copy.set_weights(model.get_weights())
        np.testing.assert_array_equal(first(copy(case.inputs)), expected)
    if case.rates:
        np.testing.assert_array_equal(
            first(copies[0](case.inputs, training=True)), first(model(case.inputs, training=True))
        )


def fit(model, inputs):
    return model.fit(inputs, np.ones([4, 1, 1], np.float32), batch_size=4, shuffle=False, verbose=0).history["loss"][0]


TRAINED = [
    case for case in IN_MODELS if case.name != "CRF" and all(len(x) == 4 for x in keras.tree.flatten(case.inputs))
]


@pytest.mark.ci
@all_of(TRAINED, fast=FAST[:1])
def test_a_model_is_trained_with_dropout_saved_goes_on_and_is_exported(case, tmp_path):
    model = model_with(case)
    model.compile(keras.optimizers.Adam(0.01), loss="mse")
    expected = first(model(case.inputs))
    losses = [fit(model, case.inputs) for _ in range(2)]
    if case.rates:
        without = np.mean((expected - 1) ** 2)
        assert abs(losses[0] - without) > 1e-3 * without
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert fit(loaded, case.inputs) == pytest.approx(fit(model, case.inputs), rel=1e-5)  # place of dropout, moments

    if isinstance(model.input, dict) and too_old("keras", (3, 10), ""):
        pytest.skip(f"exports of Keras {keras.__version__} do not take dictionaries")
    model.export(tmp_path / "exported", verbose=False)
    served = tf.saved_model.load(tmp_path / "exported")
    inputs = [tf.constant(x[:3]) for x in keras.tree.flatten(case.inputs)]
    again = first(model(keras.tree.map_structure(lambda x: x[:3], case.inputs)))
    np.testing.assert_allclose(
        first(served.serve(keras.tree.pack_sequence_as(model.input, inputs))), again, rtol=1e-4, atol=1e-5
    )


@all_of(TRAINED, fast=FAST[:1])
def test_a_frozen_layer_keeps_its_weights_and_computes_the_same(case):
    layer = case.make()
    inputs = symbols(case.inputs)
    hidden = keras.tree.flatten(layer(**inputs))[0]
    model = keras.Model(inputs, keras.layers.Dense(3)(hidden))
    randomise(model)
    expected = made(case, layer)
    layer.trainable = False
    np.testing.assert_array_equal(made(case, layer), expected)
    before = [weight.numpy() for weight in layer.weights]
    model.compile("sgd", loss="mse")
    fit(model, case.inputs)
    for weight, array in zip(layer.weights, before, strict=True):
        np.testing.assert_array_equal(weight, array)


@all_of([case for case in LAYERS if case.name not in ("PositionFusion", "AdaptiveSoftmax")], fast=FAST[:1])
def test_keras_s_own_test_of_layers(case):
    """Its serialization, build, symbolic call, training and mixed precision, as far as Keras can do them.

    It trains layers of one input alone, whose outputs are neither ids nor a list, and knows no arguments besides
    tensors in mixed precision. It expects as many weights after a symbolic call as after an eager one, but a symbolic
    call of `AdaptiveSoftmax` adds those of the embedding that it ties, see tied_test.py.
    """
    arrays = {name: x for name, x in case.inputs.items() if not isinstance(x, dict)}
    about = {"input_data": tf.constant(next(iter(arrays.values())))} if len(arrays) == 1 else {}
    if len(arrays) > 1:
        about["input_shape"] = {f"{name}_shape": x.shape for name, x in arrays.items()}
        about["input_dtype"] = {f"{name}_shape": x.dtype.name for name, x in arrays.items()}
    options = {**dict.fromkeys(case.rates, 0.5), **({"seed": 7} if case.rates else {})}
    testing.TestCase().run_layer_test(
        case.make, options, **about, call_kwargs=case.more, supports_masking=True,
        run_training_check=len(arrays) == 1 and not case.more and case.name not in ("CRF", "TransformerXL"),
        run_mixed_precision_check=not case.more,
    )  # fmt: skip


@pytest.mark.parametrize("names", [("query", "value"), ("query", "value", "key")])
def test_keras_s_own_test_of_its_attention(names):
    shapes = {f"{name}_shape": (4, 3 if name == "query" else 5, 8) for name in names}
    testing.TestCase().run_layer_test(
        layers.MultiHeadAttention, {"d_model": 8, "num_heads": 2}, input_shape=shapes, expected_output_shape=(4, 3, 8),
        supports_masking=True, run_training_check=False,
    )  # fmt: skip
