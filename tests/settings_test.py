"""Settings: a constructor argument that changes takes effect everywhere, as if made so, or is refused by name.

Every stored argument of every public layer and model is tried; then what graphs, parts, constructors and `fit` do.
"""

import abc

import keras
import numpy as np
import pytest
import tensorflow as tf
from conforming_layers import LAYERS
from helpers import SMALL, eagerly, raises_parameter

import txl_tf
from txl_tf import layers
from txl_tf.errors import FixedAttributeError, ParameterError
from txl_tf.language.session import Session
from txl_tf.nn.arguments import stored_names
from txl_tf.nn.parts import owner_of
from txl_tf.nn.settings import Settings, free_settings_of

pytestmark = pytest.mark.ci

ONE_LAYER = {**SMALL, "n_layer": 1, "dropout": 0.0}
PAIRS = {"num_layers": 1, "d_model": 8, "num_heads": 2, "dff": 12, "input_vocab_size": 9, "target_vocab_size": 9}
TAGS = ["O", "B-X", "I-X"]
ANY_TAG = np.ones([10, 10], bool).tolist()


def language_model(**options):
    return txl_tf.TransformerXLLM(**{**ONE_LAYER, "mem_len": 3, "init_std": 0.5, "seed": 1, **options})


def tagger():
    network = txl_tf.Tener(n_token=9, n_layer=1, d_model=8, n_head=2, d_inner=12)
    return txl_tf.Tagger(network, TAGS, seed=1)


MODELS = {
    "TransformerXLLM": language_model,
    "TransformerLM": lambda: txl_tf.TransformerLM(**ONE_LAYER),
    "TransformerLM-learned": lambda: txl_tf.TransformerLM(**ONE_LAYER, pos_embed="learned"),
    "Transformer": lambda: txl_tf.Transformer(**PAIRS),
    "Tagger": tagger,
}
MAKE = {layer.name: layer.make for layer in LAYERS} | MODELS
ALL = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if "learned" in name else name for name in MAKE]
)


def other_value(name, current):
    """A value of the same kind as the current one, or for `None` of the kind that the name takes."""
    if current is None:
        return {"reset_token": 3, "seed": 5, "allowed": ANY_TAG}.get(name, 1)
    if isinstance(current, (bool, str)):
        return not current if isinstance(current, bool) else current + "x"
    return 0.375 if isinstance(current, float) else current + 3 if isinstance(current, int) else [current]


def described(x):
    """What all parts of `x` know: stored arguments, whether they draw keys, tables of positions."""
    objects = ("kernel_initializer", "initializer", "proj_initializer", "embeddings_initializer", "network")
    return [
        (
            {name: getattr(part, name) for name in stored_names(type(part)) if name not in objects},
            getattr(part, "_draw", None) is not None,
            np.shape(getattr(part, "pe", 0)),
        )
        for part in x._flatten_layers()
        if isinstance(part, Settings)
    ]


@ALL
def test_a_free_setting_changes_to_what_a_new_object_would_have(name):
    x = MAKE[name]()
    values = {setting: other_value(setting, getattr(x, setting)) for setting in free_settings_of(x)}
    for setting, value in values.items():
        setattr(x, setting, value)
    config = x.get_config()
    assert {setting: getattr(x, setting) for setting in values} == values
    assert {setting: config[setting] for setting in values} == values
    assert described(x) == described(type(x).from_config(config))


@ALL
def test_every_other_argument_is_refused_by_name(name):
    x = MAKE[name]()
    free = free_settings_of(x)
    names = [setting for setting in stored_names(type(x)) if setting not in free]
    assert names or name in ("LayerNorm", "RMSNorm")
    for setting in names:
        before, value = getattr(x, setting), object()
        with pytest.raises(FixedAttributeError) as caught:
            setattr(x, setting, value)
        assert (caught.value.name, caught.value.value) == (setting, value) and isinstance(caught.value, AttributeError)
        assert getattr(x, setting) is before
        with pytest.raises(FixedAttributeError):
            delattr(x, setting)


def test_what_is_free_is_what_weights_fit():
    """The list of the issue, one by one: a change of this table is a decision."""
    rates = {"dropout", "dropatt", "label_smoothing", "z_loss"}
    inference = {"mem_len", "same_length", "clamp_len", "reset_token", "layer_norm_epsilon"}
    found = {name: set(free_settings_of(make())) for name, make in MODELS.items()}
    assert found == {
        "TransformerXLLM": rates | inference | {"recompute", "seed"},
        "TransformerLM": rates | {"mem_len", "same_length", "layer_norm_epsilon", "context_len", "recompute", "seed"},
        "TransformerLM-learned": rates | {"mem_len", "same_length", "layer_norm_epsilon", "recompute", "seed"},
        "Transformer": {"rate", "dropatt", "dropact", "label_smoothing", "max_len", "seed"},
        "Tagger": {"constraints", "output_dropout", "seed"},
    }


@pytest.mark.parametrize(
    "setting, value",
    [("mem_len", -1), ("mem_len", 2.5), ("dropout", 1.0), ("dropout", "a"), ("reset_token", 23), ("same_length", 1)],
)
def test_the_checks_are_those_of_the_constructor(setting, value):
    lm = language_model()
    with pytest.raises(ParameterError) as caught:
        setattr(lm, setting, value)
    assert (caught.value.name, caught.value.value) == (setting, value) and not isinstance(caught.value, AttributeError)
    assert lm.get_config() == {**language_model().get_config(), "name": lm.name}


# ---------------------------------------- dropout


def drops(layer, *inputs):
    dropped, whole = layer(*inputs, training=True), layer(*inputs, training=False)
    return bool(np.any(np.asarray(dropped) != np.asarray(whole)))


@pytest.mark.parametrize("setting", ["rate", "dropatt", "dropact"])
def test_a_built_layer_that_dropped_nothing_drops(setting):
    layer, x = layers.EncoderLayer(8, 2, 12, rate=0.0), np.random.default_rng(0).normal(size=[2, 5, 8])
    assert not drops(layer, x)
    setattr(layer, setting, 0.5)
    assert drops(layer, x)
    setattr(layer, setting, 0.0)
    assert not drops(layer, x) and layer.seed is not None


def test_a_layer_in_a_network_drops_by_the_network_s_keys():
    network = txl_tf.TransformerXL(**ONE_LAYER, seed=3)
    network.build()
    (layer,) = network.decoder_layers
    network.dropout = 0.5
    assert layer.rel_attn.dropout == layer.ff.dropout == 0.5 and layer.ff._draw == layer.draw_key
    assert layer.seed_generator is None  # it draws none of its own
    assert drops(layer.ff, tf.ones([2, 3, 8]))


def test_a_seed_that_is_set_draws_what_a_layer_made_with_it_draws():
    x = np.ones([3, 4, 8])
    made, changed = (layers.PositionalEncoding(8, rate=0.5, seed=seed) for seed in (7, 1))
    changed(x, training=True)
    changed.seed = 7
    np.testing.assert_array_equal(changed(x, training=True), made(x, training=True))
    changed.seed = None
    assert isinstance(changed.seed, int)


# ---------------------------------------- graphs


def test_a_longer_memory_counts_after_scores_were_compiled():
    lm, longer = language_model(), language_model(mem_len=7)
    longer.set_weights(lm.get_weights())
    tokens = np.random.default_rng(0).integers(0, 23, [2, 5])
    lm.score(tokens, tokens)
    lm.mem_len = 7
    nll, mems = lm.score(tokens, tokens)
    with eagerly():
        expected, expected_mems = longer.score(tokens, tokens)
    assert mems[0].shape == lm.initial_mems(2)[0].shape == (2, 7, 8)
    np.testing.assert_array_equal(mems[0], expected_mems[0])
    np.testing.assert_allclose(nll, expected, rtol=1e-6)


@pytest.mark.slow
def test_a_longer_memory_is_that_of_a_model_made_so(tmp_path):
    """After everything was compiled: evaluation, generation, files, the served model."""
    lm, longer = language_model(dropout=0.1), language_model(dropout=0.1, mem_len=7)
    text = np.random.default_rng(0).integers(0, 23, [4, 2, 6]).astype(np.int32)
    dataset = tf.data.Dataset.from_tensor_slices((text[:, :, :-1], text[:, :, 1:]))
    for model in (lm, longer):
        model.compile(txl_tf.make_optimizer(train_steps=100, warmup_steps=1))
    lm.fit(dataset, verbose=0)
    for change in (lambda: setattr(lm, "mem_len", 7), lambda: setattr(lm.network, "mem_len", 7)):
        lm.mem_len = 3
        lm.evaluate(dataset, verbose=0), lm.generate(text[0], 9, seed=1), lm.train_on_batch(text[0], text[1])
        change()
        longer.set_weights(lm.get_weights())
        assert lm.get_config() == {**longer.get_config(), "name": lm.name} and lm.network.mem_len == lm.mem_len == 7
        assert lm.evaluate(dataset, verbose=0) == longer.evaluate(dataset, verbose=0)
        np.testing.assert_array_equal(lm.generate(text[0], 9, seed=1), longer.generate(text[0], 9, seed=1))
        lm.test_on_batch(text[0], text[1])  # from zeros of the new length
    lm.save(tmp_path / "lm.keras")
    assert keras.models.load_model(tmp_path / "lm.keras").mem_len == 7
    txl_tf.export_saved_model(lm, tmp_path / "served")
    assert tf.saved_model.load(tmp_path / "served").initial_state(1)["state"].shape == (1, 1, 2, 2, 7, 3)


@pytest.mark.slow
def test_training_heeds_a_rate_that_changes_while_it_runs():
    """A callback may set rates; what `fit` cannot heed, the length of its memory, it refuses."""

    class Change(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.model.network.dropout = 0.5 * epoch
            with pytest.raises(FixedAttributeError) as caught:
                self.model.mem_len = 9
            assert caught.value.name == "mem_len"

    lm = language_model()
    text = np.random.default_rng(0).integers(0, 23, [2, 2, 5]).astype(np.int32)
    lm.compile(keras.optimizers.SGD(0.0))
    dataset = tf.data.Dataset.from_tensor_slices((text, text))
    losses = lm.fit(dataset, epochs=2, verbose=0, callbacks=[Change()]).history["loss"]
    assert losses[0] != losses[1] and lm.dropout == 0.5 and lm.running_method is None
    lm.mem_len = 9


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Transformer", "Tagger"])
def test_keras_s_fit_evaluate_and_predict_compile_again(name):
    chars = np.random.default_rng(0).integers(3, 9, [4, 5])
    data = ({"chars": chars}, chars % 3) if name == "Tagger" else (chars, chars)
    model = MODELS[name]()
    model.compile(keras.optimizers.SGD(0.0))
    takes = data[0] if name == "Tagger" else data
    before = model.train_on_batch(*data), model.evaluate(*data, verbose=0), model.predict(takes, verbose=0)
    setattr(model, *(("output_dropout", 0.5) if name == "Tagger" else ("rate", 0.9)))
    after = model.train_on_batch(*data), model.evaluate(*data, verbose=0), model.predict(takes, verbose=0)
    assert np.ravel(before[0])[0] != np.ravel(after[0])[0]  # dropout
    assert before[1][0] == after[1][0]
    np.testing.assert_array_equal(before[2], after[2])


def test_a_graph_of_somebody_else_keeps_the_value_while_it_lives():
    layer, x = layers.PositionWiseFFN(6, 4), keras.Input([3])
    model = keras.Model(x, layer(x))
    layer.rate = 0.1  # symbols are no graph
    model.predict(np.ones([1, 3]), verbose=0)
    with pytest.raises(FixedAttributeError) as caught:
        layer.rate = 0.5
    assert (caught.value.name, caught.value.value, layer.rate) == ("rate", 0.5, 0.1)
    layer.rate = 0.1  # is what it is
    del model.predict_function
    model.compile()
    layer.rate = 0.5
    assert layer.get_config()["rate"] == 0.5


def test_a_session_of_before_is_an_error():
    lm = language_model()
    with eagerly():
        session = Session(lm)
        session.read(np.ones([1, 2], int))
        lm.clamp_len = 2
        for other in (session, session.copy()):
            with pytest.raises(ParameterError) as caught:
                other.read(np.ones([1, 2], int))
            assert caught.value.name == "lm"
        Session(lm).read(np.ones([1, 2], int))


def session_with_graphs(lm):
    session = lm.session()
    session.read([[1, 2, 3]])
    session.write(8, seed=1)  # more than `EAGER_TOKENS`, so by a graph
    return session


def test_a_setting_changes_after_a_session_has_made_graphs():
    lm = language_model()
    session = session_with_graphs(lm)
    lm.mem_len = 6
    assert lm.initial_mems(1)[0].shape[1] == 6
    for other in (session, session.copy()):
        with pytest.raises(ParameterError) as caught:
            other.write(1)
        assert caught.value.name == "lm"


def test_a_session_goes_on_if_the_change_is_refused():
    lm = language_model()
    session = session_with_graphs(lm)
    expected = session.copy().write(6, seed=1)[0]
    foreign = tf.function(lambda tokens: lm(tokens)[0])
    foreign(tf.constant([[1, 2]]))
    with pytest.raises(FixedAttributeError) as caught:
        lm.mem_len = 6
    assert (caught.value.name, lm.mem_len) == ("mem_len", 3)
    np.testing.assert_array_equal(session.write(6, seed=1)[0], expected)


@pytest.mark.parametrize("name", ["TransformerXLLM", "Transformer", "Tagger", "Flat", "EncoderLayer", "LayerNorm"])
def test_the_dtype_policy_of_all_parts_is_that_of_the_constructor(name):
    model = MAKE[name]()
    for part in (model, *model._flatten_layers()):
        with pytest.raises(FixedAttributeError) as caught:
            part.dtype_policy = "mixed_bfloat16"
        assert (caught.value.name, part.compute_dtype) == ("dtype_policy", "float32")
        part.dtype_policy = part.dtype_policy
        part.dtype_policy = "float32"  # the same


def test_a_constructor_of_a_subclass_cannot_change_the_dtype_policy_either():
    class Half(layers.PositionwiseFF):
        def __init__(self):
            super().__init__(8, 8)
            self.dtype_policy = "mixed_bfloat16"

    with raises_parameter("dtype_policy", "mixed_bfloat16"):
        Half()


def test_a_language_model_refuses_a_regularizer_of_its_output_that_fit_would_not_use():
    regularizer = keras.regularizers.L2(0.1)
    for make in (language_model, MODELS["TransformerLM"]):
        lm = make()
        with pytest.raises(FixedAttributeError, match="activity_regularizer"):
            lm.activity_regularizer = regularizer
    with pytest.raises(ParameterError) as caught:
        language_model(activity_regularizer=regularizer)
    assert (caught.value.name, caught.value.value) == ("activity_regularizer", regularizer)


# ---------------------------------------- integers of NumPy


@ALL
def test_numpy_s_integers_become_ints(name):
    first = MAKE[name]()
    given = {key: getattr(first, key) for key in stored_names(type(first))}
    ints = {key: value for key, value in given.items() if type(value) is int}
    second = type(first)(**given | {key: np.int64(value) for key, value in ints.items()})
    assert {key: (type(getattr(second, key)), getattr(second, key)) for key in ints} == {
        key: (int, value) for key, value in ints.items()
    }


def test_numpy_s_integers_are_used_and_saved_as_ints():
    layer = layers.EncoderLayer(np.int64(8), np.int32(2), np.uint8(16), seed=np.int64(3))
    layer.build((None, None, np.int64(8)))
    assert layer.get_config()["dff"] == 16 and layer(np.ones([1, 3, 8], np.float32)).shape == (1, 3, 8)
    lm = language_model(cutoffs=[np.int64(5), np.int64(9)], seed=np.int64(3))
    assert set(map(type, lm.cutoffs)) == {int} and lm.network.seed_generator.state[0] == 3
    lm.seed, lm.mem_len = np.int64(7), np.int64(5)
    assert lm.network.seed_generator.state[0] == 7 and lm.initial_mems(1)[0].shape[1] == 5
    lm.enable_lora(np.int64(2))
    assert {type(lm.get_config()[name]) for name in ("seed", "mem_len", "lora_rank")} == {int}


@pytest.mark.parametrize("seed", [True, 1.5, 2**70])
def test_a_seed_that_is_refused_changes_nothing(seed):
    lm = language_model()
    for call in (lambda: setattr(lm, "seed", seed), lambda: language_model(seed=seed)):
        with pytest.raises(ParameterError) as caught:
            call()
        assert (caught.value.name, lm.seed) == ("seed", 1)


# ---------------------------------------- parts, subclasses, names of one's own


def test_a_part_changes_with_its_owner():
    lm = language_model(n_layer=2)
    layer = lm.network.decoder_layers[0]
    for part, name in ((layer, "dropout"), (layer.ff, "dropout"), (layer.ff.layer_norm, "epsilon")):
        with pytest.raises(FixedAttributeError) as caught:
            setattr(part, name, 0.25)
        assert caught.value.value == 0.25
    lm.network.dropatt = 0.25
    assert lm.dropatt == layer.rel_attn.dropatt == 0.25
    layer.rel_attn.dropatt = 0.25  # as it is
    alone = layers.EncoderLayer(8, 2, 12)
    alone.mha.rate = 0.25  # the only copy
    assert alone.dropatt == alone.get_config()["dropatt"] == 0.25


def test_a_method_that_is_set_on_a_part_counts_from_now_on_and_is_not_lost_in_a_file(tmp_path):
    lm = language_model(n_layer=1)
    tokens = tf.constant([[1, 2, 3]])
    before = lm.score(tokens, tokens)[0]
    embed, added = lm.network.embed, tf.random.stateless_normal([1, 3, lm.network.d_model], [1, 2])

    def moved(*args, **kwargs):
        hidden, positions = embed(*args, **kwargs)
        return hidden + added, positions

    lm.network.embed = moved
    log_probs = lm.log_probs(tokens)[0]
    after = lm.score(tokens, tokens)[0]
    assert np.abs(after - before).max() > 1e-3
    np.testing.assert_allclose(after, -tf.gather(log_probs, tokens, batch_dims=2), rtol=1e-5)
    with raises_parameter("embed"):
        lm.save(tmp_path / "lm.keras")


def set_method(model, name):
    """Sets a method on the model itself, which calls the one of its class."""
    method = getattr(model, name)
    setattr(model, name, lambda *args, **kwargs: method(*args, **kwargs))


@pytest.mark.parametrize("name, method", [("Transformer", "logits"), ("TransformerXLLM", "nll_of"),
                                          ("TransformerLM", "nll_of"), ("Tagger", "decode")])  # fmt: skip
def test_a_method_that_is_set_on_a_model_is_not_lost_in_a_file(name, method, tmp_path):
    model = MODELS[name]()
    set_method(model, method)
    for save in (model.get_config, lambda: model.save(tmp_path / "model.keras")):
        with raises_parameter(method):
            save()
    delattr(model, method)
    set_method(model, "train_step")  # it may be set: it is not part of what a file computes
    assert model.get_config().keys() == MODELS[name]().get_config().keys()


@keras.saving.register_keras_serializable("settings_test")
class SetsItsMethod(txl_tf.Transformer):
    """Its constructor sets a method on the instance, so a loaded model has it."""

    def __init__(self, **options):
        super().__init__(**options)
        set_method(self, "logits")


def test_a_method_that_a_constructor_sets_is_saved():
    model = SetsItsMethod(**PAIRS)
    assert "logits" in vars(SetsItsMethod.from_config(model.get_config()))


def test_a_part_that_was_replaced_is_independent():
    layer = layers.EncoderLayer(8, 2, 12)
    old = layer.mha
    layer.mha = new = layers.MultiHeadAttention(8, 2)
    old.rate = 0.25
    assert layer.dropatt == new.rate == 0.0
    assert not any(part is old for part in layer._flatten_layers())


@pytest.mark.parametrize("remove", [lambda layer: setattr(layer, "mha", layers.MultiHeadAttention(8, 2)),
                                    lambda layer: delattr(layer, "mha")], ids=["set", "del"])  # fmt: skip
def test_a_part_stays_a_part_while_another_attribute_has_it(remove):
    layer = layers.EncoderLayer(8, 2, 12)
    layer.first = layer.mha
    remove(layer)
    assert any(part is layer.first for part in layer._flatten_layers())
    assert owner_of(layer.first) is layer


def test_decoding_constraints_come_and_go():
    model = tagger()
    allowed = model.crf.allowed
    model.constraints = False
    assert model.crf.allowed is None
    model.constraints = True
    assert model.crf.allowed == allowed
    crf = layers.CRF(3)
    with pytest.raises(ParameterError) as caught:
        crf.allowed = [[True]]
    assert caught.value.name == "allowed"


def test_a_subclass_may_use_any_name_in_its_constructor():
    class Mine(layers.EncoderLayer, abc.ABC):
        def __init__(self, **options):
            self.rate = "before"
            super().__init__(8, 2, 12, **options)
            self.rate = 0.25  # takes effect
            self.dropatt = 0.25
            self.num_heads, self.dropact = "mine", ["mine"]  # no values of these settings: names of its own
            self.own = 1
            self._settings, self._owner = {}, "mine"

    layer = Mine(rate=0.0)
    assert (layer.rate, layer.mha.rate, layer.num_heads, layer.dropact) == (0.25, 0.25, "mine", ["mine"])
    assert drops(layer, np.ones([2, 3, 8]))
    layer.own = 2
    with pytest.raises(FixedAttributeError):
        layer.num_heads = 4


TAGGER = {"n_token": 9, "n_layer": 1, "d_model": 8, "n_head": 2, "d_inner": 8}


@pytest.mark.parametrize(
    "make, name, value",
    [
        (lambda: layers.MultiHeadAttention(8, 2), "depth", 4),
        (lambda: txl_tf.Tener(**TAGGER).stacked[0].self_attn, "score_scale", 1.0),
        (lambda: txl_tf.Flat(**TAGGER).stacked[0].attn, "score_scale", 1.0),
    ],
)
def test_what_follows_from_settings_cannot_change(make, name, value):
    attention = make()
    assert getattr(attention, name) == value
    with pytest.raises(FixedAttributeError, match=name):
        setattr(attention, name, 2 * value)
    assert getattr(attention, name) == value


def test_a_table_of_positions_is_what_its_method_or_a_constructor_makes():
    class Mine(layers.PositionalEncoding):
        def __init__(self, **options):
            super().__init__(4, max_len=3, **options)
            self.pe = np.ones([1, 3, 4], np.float32)

    positions, mine = layers.PositionalEncoding(4, max_len=3), Mine()
    table = positions.pe
    for layer in (positions, mine):
        with pytest.raises(FixedAttributeError, match="pe"):
            layer.pe = np.zeros([1, 3, 4], np.float32)
    assert positions.pe is table
    np.testing.assert_array_equal(mine(np.zeros([1, 3, 4], np.float32)), np.ones([1, 3, 4]))


def test_what_is_of_a_class_or_of_compile_says_so():
    lm = language_model()
    for name in ("static_shapes", "gradient_accumulation_steps", "bin_capacities"):
        with pytest.raises(FixedAttributeError) as caught:
            setattr(lm, name, 2)
        assert caught.value.name == name
    with pytest.raises(FixedAttributeError):
        lm.network.layer_class = layers.TransformerLMLayer
    with pytest.raises(FixedAttributeError):
        txl_tf.TransformerLM(**ONE_LAYER).clamp_len = 3
    lm.trainable = False  # Keras's own
    assert not lm.network.trainable
