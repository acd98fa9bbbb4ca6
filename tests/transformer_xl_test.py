"""The network: its memory, its initial weights, where it drops, and its reuse in other Keras models."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import ROOT, SMALL, raises_parameter, randomise

import txl_tf
from txl_tf.config import ModelConfig
from txl_tf.errors import ParameterError
from txl_tf.kernels import attending
from txl_tf.kernels import dropout as dropping
from txl_tf.nn import position_schemes
from txl_tf.transformer_xl import network as transformer_xl
from txl_tf.transformer_xl.network import cache_mems

SLOW = pytest.mark.slow

TOKENS = np.random.default_rng(0).integers(0, 23, [2, 5]).astype(np.int32)


def network(seed=0, **options):
    """A built network whose weights are all random."""
    net = txl_tf.TransformerXL(**{**SMALL, "mem_len": 4, "dropout": 0.0, **options})
    net.build()
    randomise(net, seed)
    return net


# ---------------------------------------- memory


def test_cache_mems_keeps_the_last_of_memory_and_segment():
    def positions(values):
        return tf.reshape(tf.constant(values, tf.float32), [1, -1, 1])

    compiled = tf.function(cache_mems, jit_compile=True)
    for mem, mem_len, expected in [
        ([1, 2], 0, []),
        ([1, 2], 2, [4, 5]),
        ([1, 2], 3, [3, 4, 5]),
        ([1, 2], 4, [2, 3, 4, 5]),
        ([1, 2], 9, [1, 2, 3, 4, 5]),
        ([], 2, [4, 5]),
        ([], 4, [3, 4, 5]),
    ]:
        for update in (cache_mems, compiled):
            got = update(positions([3, 4, 5]), positions(mem), mem_len)
            np.testing.assert_array_equal(got, positions(expected), err_msg=f"{mem} {mem_len}")


def test_cache_mems_of_unknown_length():
    spec = tf.TensorSpec([None, None, 1])
    update = tf.function(lambda hidden, mems: cache_mems(hidden, mems, 4), input_signature=[spec, spec])
    for hidden, mem in itertools.product([[3.0], [3.0, 4.0, 5.0, 6.0, 7.0]], [[], [1.0, 2.0]]):
        got = update(tf.reshape(hidden, [1, -1, 1]), tf.reshape(tf.constant(mem, tf.float32), [1, -1, 1]))
        np.testing.assert_array_equal(got[0, :, 0], [*mem, *hidden][-4:])


@pytest.mark.parametrize("mem_len", [3, 12])
def test_no_gradient_flows_into_the_memory(mem_len):
    net = network(mem_len=mem_len)
    with tf.GradientTape() as tape:
        _, mems = net(TOKENS)
        loss = tf.add_n([tf.reduce_sum(mem**2) for mem in mems])
    assert all(gradient is None for gradient in tape.gradient(loss, net.trainable_variables))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=SLOW),
        {"untie_r": True, "same_length": True, "clamp_len": 3},
        {"mem_len": 0, "cutoffs": [5, 12], "div_val": 2},
        pytest.param({"mem_len": 9, "d_embed": 6}, marks=SLOW),
    ],
    ids=str,
)
def test_hidden_states_and_memory_are_those_of_the_plain_port(small_pair, options):
    lm, model = small_pair(**options)
    mems, expected_mems = lm.initial_mems(2), model.initial_mems(2)
    for _ in range(2):
        hidden, mems = lm.network(TOKENS, mems)
        expected, expected_mems = model._hidden(TOKENS.T, expected_mems, is_training=False)
        np.testing.assert_allclose(hidden, tf.transpose(expected, [1, 0, 2]), rtol=1e-5, atol=1e-5)
        for mem, expected_mem in zip(mems, expected_mems, strict=True):
            np.testing.assert_allclose(mem, tf.transpose(expected_mem, [1, 0, 2]), rtol=1e-5, atol=1e-5)


def in_segments(net, tokens, lengths, mems):
    hidden = []
    for segment in np.split(tokens, np.cumsum(lengths)[:-1], axis=1):
        output, mems = net(segment, mems)
        hidden.append(output)
    return np.concatenate(hidden, 1), mems


LONG = np.random.default_rng(1).integers(0, 23, [2, 12]).astype(np.int32)


def test_with_full_attention_segments_equal_one_long_segment_while_the_memory_holds_everything():
    """From an empty memory: the original's first memory is zeros, which are attended to, and push out nothing."""
    net = network(mem_len=12)
    empty = [tf.zeros([2, 0, 8])] * 2
    whole, whole_mems = net(LONG, empty)
    for lengths in ([6, 6], [1, 4, 7], [11, 1]):
        hidden, mems = in_segments(net, LONG, lengths, empty)
        np.testing.assert_allclose(hidden, whole, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(mems, whole_mems, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mem_len, clamp_len", [*(pytest.param(n, -1, marks=SLOW) for n in (2, 5)), (5, 3)])
def test_with_same_length_segments_equal_one_long_segment_for_any_memory(mem_len, clamp_len):
    """Every token sees the mem_len positions before it and itself, however the text is cut, zeros in front included."""
    net = network(mem_len=mem_len, same_length=True, clamp_len=clamp_len)
    whole, _ = net(LONG)
    for lengths in ([6, 6], [1, 4, 7]):
        hidden, _ = in_segments(net, LONG, lengths, None)
        np.testing.assert_allclose(hidden, whole, rtol=1e-5, atol=1e-5)


def test_full_attention_with_a_memory_that_is_too_short_differs_from_one_long_segment():
    net = network(mem_len=2)
    hidden, _ = in_segments(net, LONG, [6, 6], None)
    assert np.abs(hidden - net(LONG)[0])[:, 6:].max() > 1e-3


def test_hidden_states_depend_on_the_past_alone():
    net = network()
    hidden, _ = net(TOKENS)
    changed = TOKENS.copy()
    changed[:, 3] = (changed[:, 3] + 1) % 23
    difference = np.abs(net(changed)[0] - hidden).max((0, 2))
    np.testing.assert_allclose(difference[:3], 0, atol=1e-6)
    assert difference[3:].min() > 1e-3


def test_clamp_len_makes_all_far_distances_the_same():
    far, clamped = network(mem_len=8), network(mem_len=8, clamp_len=2)
    assert np.abs(far(TOKENS)[0] - clamped(TOKENS)[0]).max() > 1e-3
    np.testing.assert_array_equal(far(TOKENS)[0], network(mem_len=8, clamp_len=100)(TOKENS)[0])
    # With all distances clamped to one, which of the far positions holds what does not matter in the first layer.
    one_layer = network(mem_len=8, n_layer=1, clamp_len=2)
    mem = np.random.default_rng(2).normal(size=(2, 8, 8)).astype(np.float32)
    reversed_mem = np.concatenate([mem[:, 5::-1], mem[:, 6:]], 1)
    np.testing.assert_allclose(one_layer(TOKENS, [mem])[0], one_layer(TOKENS, [reversed_mem])[0], rtol=1e-5, atol=1e-5)


# ---------------------------------------- attention's probabilities


def probs_in_numpy(net, hidden, mem, layer):
    """Equation (6) of a layer given its input and memory, in float64; without `same_length`."""
    attn, heads = net.decoder_layers[layer].rel_attn, (net.n_head, net.d_head)
    qkv, r_kernel = attn.qkv_kernel.numpy().astype(np.float64), attn.r_kernel.numpy().astype(np.float64)
    width, (qlen, mlen) = net.n_head * net.d_head, (hidden.shape[1], mem.shape[1])
    keys = np.concatenate([mem, hidden], 1)
    q = (hidden @ qkv[:, :width]).reshape(*hidden.shape[:2], *heads)
    k = (keys @ qkv[:, width : 2 * width]).reshape(*keys.shape[:2], *heads)
    u, v = (np.asarray(bias) for bias in net.biases(layer))
    probs = np.zeros([net.n_head, len(hidden), qlen, mlen + qlen])
    for n, b, i in np.ndindex(*probs.shape[:3]):
        scores = []
        for j in range(mlen + i + 1):
            angles = (mlen + i - j) / 10000 ** (np.arange(0, net.d_model, 2) / net.d_model)
            r = (np.concatenate([np.sin(angles), np.cos(angles)]) @ r_kernel).reshape(heads)[n]
            scores.append(((q[b, i, n] + u[n]) @ k[b, j, n] + (q[b, i, n] + v[n]) @ r) / net.d_head**0.5)
        weights = np.exp(np.array(scores) - max(scores))
        probs[n, b, i, : mlen + i + 1] = weights / weights.sum()
    return probs


@pytest.mark.parametrize("layer", [0, 1])
def test_attention_probs_are_equation_6_in_numpy(layer):
    net = network(mem_len=5, untie_r=True, dropout=0.5, dropatt=0.5)  # which drop nothing here
    mems = [np.random.default_rng(i).normal(size=(2, 3, 8)).astype(np.float32) for i in range(2)]
    _, after = net(TOKENS, mems)
    inputs = [mem.numpy()[:, -5:] for mem in after]  # what the layers were given: the memory is as long as the segment
    probs = net.attention_probs(TOKENS, mems, layer)
    expected = probs_in_numpy(net, inputs[layer], mems[layer], layer)
    np.testing.assert_allclose(probs, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(np.sum(probs, -1), 1, rtol=1e-6)


@pytest.mark.parametrize("layer", [pytest.param(0, marks=SLOW), 1])
def test_attention_probs_in_half_precision_sum_to_1(layer):
    expected = network(same_length=True).attention_probs(TOKENS, network().initial_mems(2), layer)
    net = network(same_length=True, dtype="mixed_bfloat16")
    probs = net.attention_probs(TOKENS, net.initial_mems(2), layer)
    assert probs.dtype == tf.bfloat16
    probs = tf.cast(probs, tf.float32)
    np.testing.assert_allclose(np.sum(probs, -1), 1, rtol=2**-7)
    np.testing.assert_allclose(probs, expected, rtol=0, atol=0.03)
    assert np.abs(probs - expected).max() > 0  # it was not float32 after all


# ---------------------------------------- initial weights

WIDE = {"n_token": 2000, "n_layer": 2, "d_model": 64, "d_embed": 64, "n_head": 4, "d_head": 16, "d_inner": 64}
BINS = {"cutoffs": (500, 1000), "div_val": 2, "untie_r": True}


def kind(path):
    name = path.split("/", 1)[1]
    if "layer_norm" in name:
        return "layer norm"
    if "ff/bias" in name or "softmax/bias" in name or "cluster" in name:
        return "zeros"
    return "projection" if "proj" in name else "weight"


def initial_weights(init):
    lm = txl_tf.TransformerXLLM(**WIDE, **BINS, mem_len=4, init=init, init_std=0.5, proj_init_std=0.1, init_range=0.3)
    weights = {}
    for variable in lm.trainable_variables:
        weights.setdefault(kind(variable.path), {})[variable.path] = variable.numpy()
    return weights


@pytest.mark.parametrize("init", ["normal", "uniform"])
def test_initial_weights_have_the_original_s_distributions(init):
    weights = initial_weights(init)
    assert {kind: len(group) for kind, group in weights.items()} == {
        "weight": 2 + 3 + 2 * 5,
        "projection": 3 + 3,
        "zeros": 2 * 2 + 3 + 2,
        "layer norm": 2 * 2 * 2,
    }
    for group, std in (("weight", 0.5), ("projection", 0.1)):
        for path, array in weights[group].items():
            n, variance = array.size, 0.5  # of the sample's deviation, in std**2 / n
            if init == "uniform":
                std, variance = 0.3 / 3**0.5, 0.2
                assert 0.3 * (1 - 15 / n) < np.abs(array).max() <= 0.3, path  # all n below that: exp(-15)
            assert array.std() == pytest.approx(std, rel=5 * (variance / n) ** 0.5), path
            assert abs(array.mean()) < 5 * std / n**0.5, path
    for path, array in weights["zeros"].items():
        np.testing.assert_array_equal(array, np.zeros(array.shape), err_msg=path)
    for path, array in weights["layer norm"].items():
        np.testing.assert_array_equal(array, np.full(array.shape, float(path.endswith("gamma"))), err_msg=path)


def with_a_generator():
    return keras.initializers.RandomNormal(seed=keras.random.SeedGenerator(3))


@pytest.mark.parametrize(
    "init",
    ["normal", "uniform", keras.initializers.HeNormal(seed=3), with_a_generator, "glorot_uniform"],
    ids=["normal", "uniform", "seed", "generator", "name"],
)
def test_every_weight_of_every_layer_is_drawn_anew(init):
    """A Keras initialiser draws the same numbers at every call: no two weights may begin alike."""
    weights = initial_weights(init() if init is with_a_generator else init)
    arrays = {**weights["weight"], **weights["projection"]}
    for (path, array), (other_path, other) in itertools.combinations(arrays.items(), 2):
        n = min(array.size, other.size)
        correlation = np.corrcoef(array.flat[:n], other.flat[:n])[0, 1]
        assert abs(correlation) < 6 / n**0.5, (path, other_path)


def test_a_keras_initializer_draws_all_weights_that_init_governs():
    weights = initial_weights(keras.initializers.Constant(0.25))
    for path, array in {**weights["weight"], **weights["projection"]}.items():
        np.testing.assert_array_equal(array, np.full(array.shape, 0.25), err_msg=path)
    learned = txl_tf.TransformerLM(**WIDE, pos_embed="learned", context_len=9, init=keras.initializers.Constant(0.25))
    np.testing.assert_array_equal(learned.network.pos_table, np.full([9, WIDE["d_model"]], 0.25))


FORMS = [keras.initializers.HeNormal(seed=3), "he_normal", keras.initializers.HeNormal]
FORMS.append(keras.initializers.serialize(FORMS[0]))


@pytest.mark.ci
@pytest.mark.parametrize("init", FORMS, ids=["object", "name", "class", "configuration"])
def test_an_initializer_is_in_configurations_and_files(init, tmp_path):
    lm = txl_tf.TransformerXLLM(**SMALL, mem_len=2, init=init)
    assert json.loads(json.dumps(lm.get_config()))["init"] == lm.network.get_config()["init"]
    lm.save(tmp_path / "lm.keras")
    loaded = keras.models.load_model(tmp_path / "lm.keras")
    assert loaded.get_config() == lm.get_config()
    config = ModelConfig(**SMALL, init=init)
    read = ModelConfig(**{**json.loads(json.dumps(config.to_dict())), "cutoffs": ()})
    assert read == config
    if init is FORMS[0]:  # seeded
        found, expected = (txl_tf.TransformerXLLM(**SMALL, mem_len=2, init=x) for x in (read.init, init))
        for weight, other in zip(found.get_weights(), expected.get_weights(), strict=True):
            np.testing.assert_array_equal(weight, other)


@pytest.mark.parametrize(
    "init", ["xavier", 3, None, ["normal"], {"module": "keras.layers", "class_name": "Dense", "config": {"units": 2}}]
)
def test_what_is_no_initializer_is_an_error(init):
    for make in (txl_tf.TransformerXL, ModelConfig):
        with pytest.raises(ParameterError) as caught:
            make(**SMALL, init=init)
        assert (caught.value.name, caught.value.value) == ("init", init) and "normal" in caught.value.allowed


# ---------------------------------------- dropout


@pytest.fixture
def dropout_calls(monkeypatch):
    """Records every call of `dropout` as (shape, rate, key); `only` leaves one place active."""
    calls, original = [], transformer_xl.dropout

    def make(only=None):
        calls.clear()

        def recording(x, rate, key, row_axis=0):
            calls.append((tuple(x.shape), rate, None if key is None else tuple(key.numpy())))
            return original(x, rate, key, row_axis) if only in (None, len(calls) - 1) else x

        for module in (transformer_xl, position_schemes, attending, dropping):
            monkeypatch.setattr(module, "dropout", recording)
        return calls

    return make


PLACES = ["positions", "embeddings"] + ["probabilities", "attention", "inner", "feed-forward"] * 2 + ["hidden"]


def test_dropout_acts_in_all_the_original_s_places_with_its_rate_and_a_key_of_its_own(dropout_calls):
    calls = dropout_calls()
    network(dropout=0.2, dropatt=0.3)(TOKENS, training=True)
    hidden = (2, 5, 8)
    layer = [((2, 2, 5, 9), 0.3), (hidden, 0.2), ((2, 5, 12), 0.2), (hidden, 0.2)]  # [H, B, T, K] probabilities
    expected = [((1, 9, 8), 0.2), (hidden, 0.2), *layer, *layer, (hidden, 0.2)]
    assert [call[:2] for call in calls] == expected
    keys = [call[2] for call in calls]
    assert None not in keys and len(set(keys)) == len(keys)


def test_every_place_drops_in_training_and_none_in_inference(dropout_calls):
    net = network(dropout=0.4, dropatt=0.4)
    expected, _ = net(TOKENS)
    for i, place in enumerate(PLACES):
        dropout_calls(only=i)
        dropped, _ = net(TOKENS, training=True)
        assert np.abs(dropped - expected).max() > 1e-3, f"{i} {place}"
    dropout_calls()
    np.testing.assert_array_equal(net(TOKENS)[0], expected)
    np.testing.assert_array_equal(net(TOKENS, training=False, dropout_key=tf.constant([1, 2]))[0], expected)


def test_masks_follow_the_key_and_are_drawn_anew_without_one():
    net = network(n_layer=1, dropout=0.4)
    key = tf.constant([3, 4], tf.int64)
    once = net(TOKENS, training=True, dropout_key=key)[0]
    np.testing.assert_array_equal(once, net(TOKENS, training=True, dropout_key=key)[0])
    assert np.abs(once - net(TOKENS, training=True, dropout_key=key + 1)[0]).max() > 1e-3
    assert np.abs(net(TOKENS, training=True)[0] - net(TOKENS, training=True)[0]).max() > 1e-3


@pytest.mark.parametrize("jit_compile", [False, pytest.param(True, marks=SLOW)])
def test_shares_of_a_batch_are_dropped_as_the_whole_batch_is(jit_compile):
    net = network(dropout=0.3, dropatt=0.3)

    def call(tokens, mems, key):
        return net(tokens, mems, training=True, dropout_key=key)

    call = tf.function(call, jit_compile=True) if jit_compile else call
    tokens = np.random.default_rng(4).integers(0, 23, [4, 5]).astype(np.int32)
    mems = [np.random.default_rng(i).normal(size=(4, 4, 8)).astype(np.float32) for i in range(2)]
    whole, whole_mems = call(tokens, mems, key=tf.constant([3, 4]))
    assert np.abs(whole - net(tokens, mems)[0]).max() > 0.1
    for rows, first in ((slice(0, 2), 0), (slice(2, 4), 2)):
        hidden, new_mems = call(tokens[rows], [mem[rows] for mem in mems], key=tf.constant([3, 4, first]))
        np.testing.assert_allclose(hidden, whole[rows], rtol=0, atol=1e-6)
        for mem, whole_mem in zip(new_mems, whole_mems, strict=True):
            np.testing.assert_allclose(mem, whole_mem[rows], rtol=0, atol=1e-6)


# ---------------------------------------- recomputed layers


def loss_and_gradients(net, tokens, key):
    with tf.GradientTape() as tape:
        hidden, new_mems = net(tokens, training=True, dropout_key=key)
        loss = tf.reduce_sum(tf.cast(hidden, tf.float32) ** 2 * tf.range(float(hidden.shape[-1])))
    gradients = tape.gradient(loss, net.trainable_variables)
    return loss, new_mems, [tf.convert_to_tensor(gradient) for gradient in gradients]


@pytest.mark.parametrize(
    "mode, options",
    [
        ("eager", {}),
        *(
            pytest.param(*case, marks=SLOW)
            for case in [("graph", {"untie_r": True, "dtype": "mixed_bfloat16"}), ("xla", {}), ("two replicas", {})]
        ),
    ],
    ids=str,
)
def test_recomputed_layers_give_the_same_loss_memory_and_gradients(mode, options, request):
    def run(recompute):
        if mode == "two replicas":
            strategy = request.getfixturevalue("two_replicas")
            with strategy.scope():
                net = network(dropout=0.3, dropatt=0.3, recompute=recompute, **options)
        else:
            net = network(dropout=0.3, dropatt=0.3, recompute=recompute, **options)

        def step():
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            return loss_and_gradients(net, TOKENS, tf.stack([3, 6, replica * TOKENS.shape[0]]))

        if mode == "eager":
            return step()
        if mode == "two replicas":
            return strategy.experimental_local_results(tf.function(lambda: strategy.run(step))())
        return tf.function(step, jit_compile=mode == "xla")()

    for got, expected in zip(tf.nest.flatten(run(True)), tf.nest.flatten(run(False)), strict=True):
        got, expected = tf.cast(got, tf.float32), tf.cast(expected, tf.float32)
        scale = np.abs(expected).max(initial=0)
        assert scale > 0 or not tf.size(expected)
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-6 * scale)


PEAK_MEMORY = """
import sys
import tensorflow as tf
import txl_tf

def resident(peak_or_now):  # getrusage's peak is inherited from the parent process
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(peak_or_now))

net = txl_tf.TransformerXL(
    n_token=23, n_layer=6, d_model=8, d_embed=8, n_head=4, d_head=3, d_inner=12, mem_len=128, dropatt=0.1,
    recompute=sys.argv[1] == "True",
)
net.build()

@tf.function
def step(key):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(net(tf.zeros([32, 128], tf.int32), training=True, dropout_key=key)[0] ** 3)
    return tape.gradient(loss, net.trainable_variables)

before = resident("VmRSS")
step(tf.constant([1, 2, 0]))
print(resident("VmHWM") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
@SLOW
def test_recomputed_layers_need_less_memory():
    """Attention's tensors of 17 MB, several of them a layer; in processes of their own, since peaks stay."""
    command = [sys.executable, "-c", PEAK_MEMORY]
    processes = [
        subprocess.Popen([*command, str(recompute)], stdout=subprocess.PIPE, cwd=ROOT) for recompute in (True, False)
    ]
    recomputed, kept = (int(process.communicate()[0]) for process in processes)
    assert recomputed < 0.65 * kept


# ---------------------------------------- in other Keras models, saved


def classifier(net):
    """A functional Keras model over the network: which of three classes a text of any length belongs to."""
    tokens = keras.Input([None], dtype="int32")
    hidden, _ = net(tokens)
    return keras.Model(tokens, keras.layers.Dense(3)(hidden[:, -1]))


def test_network_alone_round_trips_through_a_keras_file(tmp_path):
    net = network(
        untie_r=True, cutoffs=[5, 12], div_val=2, same_length=True, clamp_len=3, init="uniform", recompute=True
    )
    net.save(tmp_path / "net.keras")
    loaded = keras.saving.load_model(tmp_path / "net.keras")
    assert loaded.get_config() == net.get_config()
    for got, expected in zip(tf.nest.flatten(loaded(TOKENS)), tf.nest.flatten(net(TOKENS)), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_network_inside_a_functional_model_round_trips_takes_any_length_and_memory(tmp_path):
    net = network(mem_len=3)
    mems = [keras.Input([None, 8]) for _ in range(2)]
    tokens = keras.Input([None], dtype="int32")
    model = keras.Model([tokens, *mems], net(tokens, mems))
    given = [np.random.default_rng(i).normal(size=(2, 4, 8)).astype(np.float32) for i in range(2)]
    model.save(tmp_path / "m.keras")
    loaded = keras.saving.load_model(tmp_path / "m.keras")
    for length in (2, 5):
        ids = TOKENS[:, :length]
        expected = tf.nest.flatten(net(ids, given))
        for output in (model([ids, *given]), loaded([ids, *given])):
            for got, array in zip(tf.nest.flatten(output), expected, strict=True):
                np.testing.assert_allclose(got, array, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_dropout_acts_in_a_functional_model_when_it_trains():
    model = classifier(network(dropout=0.4))
    expected = model(TOKENS)
    np.testing.assert_array_equal(model(TOKENS, training=False), expected)
    np.testing.assert_allclose(model.predict(TOKENS, verbose=0), expected, rtol=1e-5, atol=1e-6)
    assert np.abs(model(TOKENS, training=True) - expected).max() > 1e-3


@SLOW
def test_network_is_trained_by_another_model_s_fit():
    model = classifier(network())
    before = [variable.numpy() for variable in model.trainable_variables]
    model.compile(keras.optimizers.Adam(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    history = model.fit(TOKENS, np.array([0, 2]), epochs=20, verbose=0).history
    assert history["loss"][-1] < 0.5 * history["loss"][0]
    for variable, array in zip(model.trainable_variables, before, strict=True):
        assert np.abs(variable.numpy() - array).max() > 1e-4, variable.path


@pytest.mark.parametrize("policy", [pytest.param("mixed_bfloat16", marks=SLOW), "mixed_float16"])
def test_half_precision_computes_in_half_and_keeps_weights_in_float32(policy):
    net = network(dtype=policy)
    hidden, mems = net(TOKENS)
    half = policy.removeprefix("mixed_")
    assert {x.dtype.name for x in (hidden, *mems, *net.initial_mems(2))} == {half}
    assert {variable.dtype for variable in net.trainable_variables} == {"float32"}
    expected, _ = network()(TOKENS)
    np.testing.assert_allclose(tf.cast(hidden, tf.float32), expected, rtol=0, atol=0.05)


def test_bad_arguments_are_named():
    with raises_parameter("d_model", 9):
        network(d_model=9)
    with raises_parameter("mem_len", -2, "at least 0"):
        network(mem_len=-2)
    with pytest.raises(ParameterError) as caught:
        network(init="no such initializer")
    assert caught.value.name == "init"
