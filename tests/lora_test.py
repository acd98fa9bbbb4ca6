"""Low-rank updates of kernels: equations, training, files, runs, and what is refused. Freezing of layers by name."""

import keras
import numpy as np
import own_parts
import pytest
import tensorflow as tf
from helpers import SMALL, TEXT, eagerly, raises_parameter, train_run
from own_parts import SETTINGS, assert_all_methods_agree

import txl_tf
from txl_tf.errors import FixedAttributeError
from txl_tf.layers import PositionwiseFF, RelMultiHeadAttn
from txl_tf.runs.checkpoints import average_checkpoints
from txl_tf.runs.folder import RunFolder
from txl_tf.runs.weights import MisfitError

pytestmark = pytest.mark.ci

SLOW = pytest.mark.slow
LORA = {"lora_rank": 2, "lora_alpha": 6.0}


@pytest.fixture
def eager():
    with eagerly():
        yield


def make(model=txl_tf.TransformerXLLM, **options):
    lm = model(**{**SMALL, "d_head": 4, "mem_len": 4, "dropout": 0.0, "seed": 0, **options})
    randomise_all(lm)
    return lm


def randomise_all(model, scale=0.4):
    rng = np.random.default_rng(0)
    for weight in [*model.trainable_variables, *(w for w in model.non_trainable_variables if "seed" not in w.path)]:
        weight.assign(rng.normal(0, scale, weight.shape))


def batch(rows=4, n=7):
    text = np.random.default_rng(0).integers(0, SMALL["n_token"], [rows, n]).astype(np.int32)
    return text[:, :-1], text[:, 1:]


def test_merging_keeps_the_numbers_of_an_own_kernel(eager):
    class Halved(PositionwiseFF):
        def kernel(self, name):
            return 0.5 * super().kernel(name)

    layer = Halved(8, 12)
    layer.build()
    layer.enable_lora(2)
    randomise_all(layer)
    x = tf.random.stateless_normal([2, 3, 8], [1, 2])
    expected = layer(x)
    layer.merge_lora()
    np.testing.assert_allclose(layer(x), expected, atol=1e-6)


def updates_of(part):
    """`{kernel: A B * alpha / rank}` of a layer."""
    found = {}
    for name in part.lora_kernels:
        a, b = (getattr(part, f"{name}_lora_{which}").numpy() for which in "ab")
        found[name] = a @ b * part.lora_alpha / part.lora_rank
    return found


@pytest.mark.parametrize("make_layer", [lambda: PositionwiseFF(8, 12), lambda: RelMultiHeadAttn(8, 2, 4)])
def test_a_layer_computes_with_the_sum_of_kernel_and_update(make_layer, eager):
    layer, plain = make_layer(), make_layer()
    for one in (layer, plain):
        one.build()
    layer.enable_lora(3, lora_alpha=1.5)
    for weight, other in zip([w for w in layer.weights if "_lora_" not in w.name], plain.weights, strict=True):
        other.assign(weight)
    x = tf.random.stateless_normal([2, 5, 8], [1, 2])
    arguments = (x,)
    if isinstance(layer, RelMultiHeadAttn):
        r = txl_tf.layers.positional_embedding(
            txl_tf.layers.relative_positions(5), txl_tf.layers.inverse_frequencies(8)
        )
        arguments = (x, r, tf.ones([2, 4]), tf.ones([2, 4]))
    np.testing.assert_array_equal(layer(*arguments), plain(*arguments))  # B is zeros
    for name in layer.lora_kernels:
        randomise_weight(getattr(layer, f"{name}_lora_b"))
        kernel = getattr(plain, name)
        kernel.assign(kernel + updates_of(layer)[name])
    np.testing.assert_allclose(layer(*arguments), plain(*arguments), atol=1e-5)
    trained = {weight.name for weight in layer.trainable_weights}
    assert trained.isdisjoint(layer.lora_kernels) and {f"{name}_lora_a" for name in layer.lora_kernels} <= trained
    layer.merge_lora()
    np.testing.assert_allclose(layer(*arguments), plain(*arguments), atol=1e-5)
    assert [w.name for w in layer.weights] == [w.name for w in plain.weights]
    assert len(layer.trainable_weights) == len(plain.trainable_weights)


def test_attributes_of_updates_change_by_their_methods_alone(eager):
    layer, x = PositionwiseFF(4, 6), np.ones([1, 2, 4], np.float32)
    layer(x)
    for attributes in ((False, None, None), (True, 2, 3.0), (False, None, None)):
        for name, value in zip(("lora_enabled", "lora_rank", "lora_alpha"), attributes, strict=True):
            assert getattr(layer, name) == value
            with raises_parameter(name, error=FixedAttributeError):
                setattr(layer, name, 7)
        layer.merge_lora() if layer.lora_enabled else layer.enable_lora(2, 3.0)


def test_a_functional_model_keeps_the_updates_of_a_layer(tmp_path, eager):
    x = keras.Input([5, 8])
    ff = PositionwiseFF(8, 12)
    model = keras.Model(x, keras.layers.Dense(2)(ff(x)))
    ff.enable_lora(2)
    randomise_weight(ff.kernel_1_lora_b)
    expected = model(np.ones([1, 5, 8]))
    model.save(tmp_path / "m.keras")
    loaded = keras.saving.load_model(tmp_path / "m.keras")
    np.testing.assert_array_equal(loaded(np.ones([1, 5, 8])), expected)
    assert len(loaded.trainable_weights) == len(model.trainable_weights)
    layer = txl_tf.layers.TransformerLMLayer(8, 2, 4, 12)
    layer.build((None, None, 8))
    layer.ff.enable_lora(2)
    with raises_parameter("enable_lora"):
        layer.get_config()


def randomise_weight(weight):
    weight.assign(np.random.default_rng(1).normal(0, 0.4, weight.shape))


@pytest.mark.parametrize(
    "setting", ["eager", *(pytest.param(name, marks=SLOW) for name in ("jit_compile", "recompute", "reloaded"))]
)
def test_all_methods_compute_with_the_updates(setting, tmp_path):
    setting = SETTINGS[setting]
    sizes = {**own_parts.SIZES, **own_parts.ADAPTIVE, "n_layer": 1, "dropout": 0.0, "seed": 3}
    sizes |= {"mem_len": 4, "pre_lnorm": True}
    lm = txl_tf.TransformerXLLM(**{**sizes, **LORA, **setting.options})
    randomise_all(lm)
    assert_all_methods_agree(lm, setting, tmp_path)


@pytest.mark.parametrize("model", [txl_tf.TransformerXLLM, pytest.param(txl_tf.TransformerLM, marks=SLOW)])
def test_only_the_updates_are_trained_and_merging_keeps_the_numbers(model, eager, tmp_path):
    lm, data = make(model), batch()
    expected, _ = lm.score(*data)
    lm.enable_lora(2, lora_alpha=6.0)
    np.testing.assert_array_equal(lm.score(*data)[0], expected)
    before = {weight.path: weight.numpy() for weight in lm.weights}
    lm.compile(keras.optimizers.SGD(0.5))
    for _ in range(2):  # in the first step, only B moves, because it is zeros
        lm.train_on_batch(*data)
    moved = {weight.path for weight in lm.weights if np.any(weight.numpy() != before[weight.path])}
    assert moved == {weight.path for weight in lm.weights if "_lora_" in weight.path}
    assert len(moved) == 2 * SMALL["n_layer"] * 4
    lm.save(tmp_path / "m.keras")
    trained, _ = lm.score(*data)
    loaded = keras.saving.load_model(tmp_path / "m.keras")
    np.testing.assert_array_equal(loaded.score(*data)[0], trained)
    lm.reset_memory()
    assert loaded.train_on_batch(*data) == lm.train_on_batch(*data)  # it goes on with the updates alone
    assert len(loaded.trainable_variables) == len(moved)
    trained, _ = lm.score(*data)
    lm.merge_lora()
    np.testing.assert_allclose(lm.score(*data)[0], trained, rtol=1e-4)
    assert lm.lora_rank == 0 and len(lm.trainable_variables) == len(before) - len(moved)
    lm.save(tmp_path / "merged.keras")
    np.testing.assert_array_equal(
        keras.saving.load_model(tmp_path / "merged.keras").score(*data)[0], lm.score(*data)[0]
    )
    with pytest.raises(ValueError):
        lm.train_on_batch(*data)  # compile again


@SLOW
@pytest.mark.parametrize("options", [{"gradient_accumulation_steps": 2}, {"jit_compile": True, "static_shapes": True}])
def test_every_kind_of_step_trains_the_same(options):
    def trained(**of_compile):
        lm = make(**LORA, cutoffs=[6, 14])
        lm.compile(keras.optimizers.SGD(0.1), **of_compile)
        lm.train_on_batch(*batch())
        return lm.get_weights()

    for found, expected in zip(trained(**options), trained(), strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


@SLOW
def test_two_replicas_train_as_one(two_replicas):
    def trained():
        lm = make()
        lm.enable_lora(2, b_initializer="ones", a_initializer="ones")
        lm.compile(keras.optimizers.SGD(0.1))
        lm.train_on_batch(*batch())
        return lm.get_weights()

    expected = trained()
    with two_replicas.scope():
        lm = make()
    lm.enable_lora(2, b_initializer="ones", a_initializer="ones")  # outside of the scope
    with two_replicas.scope():
        lm.compile(keras.optimizers.SGD(0.1))
    lm.train_on_batch(*batch())
    for found, other in zip(lm.get_weights(), expected, strict=True):
        np.testing.assert_allclose(found, other, rtol=0, atol=1e-5)


def test_what_is_refused(eager, tmp_path):
    lm = make()
    for arguments, name in (((0,), "rank"), ((2, -1.0), "lora_alpha")):
        with raises_parameter(name):
            lm.enable_lora(*arguments)
    lm.enable_lora(2)
    with raises_parameter("enable_lora"):
        lm.enable_lora(2)
    with raises_parameter("lora_rank", 2):
        txl_tf.save_tf1_checkpoint(lm, tmp_path / "model.ckpt-0")
    with raises_parameter("enable_lora"):
        PositionwiseFF(8, 12).enable_lora(2)  # not built


# ---------------------------------------- runs


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("lora") / "text.txt"
    path.write_text(TEXT)
    return str(path)


@SLOW
def test_a_run_is_fine_tuned_by_updates_resumed_and_merged(tmp_path, text):
    train_run(tmp_path / "whole", text)
    tuned = {"init_from": str(tmp_path / "whole"), "train_steps": 6, "seed": 1}
    train_run(tmp_path / "lora", text, training=tuned, model={"lora_rank": 2})
    whole, vocab = txl_tf.load_run(tmp_path / "whole")
    lm, _ = txl_tf.load_run(tmp_path / "lora")
    assert lm.lora_rank == 2
    for weight, other in zip(whole.network.embedding.weights, lm.network.embedding.weights, strict=True):
        np.testing.assert_array_equal(weight, other)
    ff, before = lm.network.decoder_layers[0].ff, whole.network.decoder_layers[0].ff
    np.testing.assert_array_equal(ff.kernel_1, before.kernel_1)
    assert np.abs(updates_of(ff)["kernel_1"]).max() > 0
    train_run(tmp_path / "lora", text, training={**tuned, "train_steps": 9}, model={"lora_rank": 2})  # it goes on
    lm, _ = txl_tf.load_run(tmp_path / "lora")
    average_checkpoints(str(tmp_path / "lora"), str(tmp_path / "merged"), num_last_checkpoints=1, merge_lora=True)
    merged, _ = txl_tf.load_run(tmp_path / "merged")
    ids = vocab.encode(TEXT[:40])[None]
    np.testing.assert_allclose(merged.log_probs(ids)[0], lm.log_probs(ids)[0], atol=1e-4)
    assert merged.lora_rank == 0 and not [w for w in merged.weights if "_lora_" in w.path]
    with raises_parameter("merge_lora"):
        average_checkpoints(str(tmp_path / "merged"), str(tmp_path / "x"), num_last_checkpoints=1, merge_lora=True)
    with raises_parameter("lora_rank", 3):
        train_run(
            tmp_path / "other", text, training={**tuned, "init_from": str(tmp_path / "lora")}, model={"lora_rank": 3}
        )


@SLOW
def test_layers_are_frozen_by_name(tmp_path, text):
    train_run(tmp_path / "whole", text)
    tuned = {"init_from": str(tmp_path / "whole"), "train_steps": 6, "freeze": ["adaptive_embed", "rel_*"]}
    train_run(tmp_path / "tuned", text, training=tuned)
    (whole, _), (lm, _) = (txl_tf.load_run(tmp_path / name) for name in ("whole", "tuned"))
    layer, before = lm.network.decoder_layers[0], whole.network.decoder_layers[0]
    for weight, other in ((layer.rel_attn.qkv_kernel, before.rel_attn.qkv_kernel),):
        np.testing.assert_array_equal(weight, other)
    np.testing.assert_array_equal(lm.network.embedding.tables[0], whole.network.embedding.tables[0])
    assert np.abs(layer.ff.kernel_1 - before.ff.kernel_1).max() > 0
    assert RunFolder(tmp_path / "tuned").read_config()["training"]["freeze"] == tuned["freeze"]
    with pytest.raises(MisfitError):  # a resumed run has the same frozen layers
        train_run(tmp_path / "tuned", text, training={**tuned, "train_steps": 8, "freeze": None})
    with raises_parameter("freeze", "layer_9"):
        train_run(tmp_path / "other", text, training={**tuned, "freeze": ["layer_9"]})
