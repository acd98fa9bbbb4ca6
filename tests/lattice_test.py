"""FLAT's lattice: distances of all pairs, each fused once; attention, layer norm and residuals, in loops over pairs."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from flat_program import FUSIONS, LatticeProcess, ProgramAttn, ProgramFusion, ProgramLayer
from helpers import assert_round_trips, raises_parameter, randomise

from txl_tf.config import FlatConfig
from txl_tf.errors import UnknownArgumentError
from txl_tf.taggers.flat_layers import FlatLayer, LatticeAttn
from txl_tf.taggers.lattice import (
    DISTANCES,
    PositionFusion,
    _DistanceTable,
    distance_table,
    distinct_pairs,
    fused_sum,
    span_distances,
)

# Two sentences, of 4 characters with the words 1-2 and 0-3, and of 2 with the word 0-1; then padding.
POS_S = np.array([[0, 1, 2, 3, 1, 0], [0, 1, 0, 0, 0, 0]], np.int32)
POS_E = np.array([[0, 1, 2, 3, 2, 3], [0, 1, 1, 0, 0, 0]], np.int32)
MASK = np.arange(6)[None] < np.array([[6], [3]])
BATCH, ITEMS = POS_S.shape
PAIRS = MASK[:, :, None] & MASK[:, None]
WIDTH, HEADS = 8, 2


def arrays(*shapes, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.normal(0, 1, shape).astype(np.float32) for shape in shapes]


def sinusoid(distance, width=WIDTH):
    """[sin, ..., cos, ...] of one distance, in float64."""
    half = width // 2
    angles = distance * 10000.0 ** (-np.arange(half) / (half - 1))
    return np.concatenate([np.sin(angles), np.cos(angles)])


def distances_of(b, i, j):
    """`{name: distance}` of a pair, query minus key."""
    (s_i, e_i), (s_j, e_j) = (POS_S[b, i], POS_E[b, i]), (POS_S[b, j], POS_E[b, j])
    return {"ss": s_i - s_j, "se": s_i - e_j, "es": e_i - s_j, "ee": e_i - e_j}


def all_pairs():
    return [tuple(pair) for pair in np.argwhere(PAIRS)]


# ---------------------------------------- distances


def test_distances_of_spans_in_loops():
    found = span_distances(tf.constant(POS_S), tf.constant(POS_E))
    assert tuple(found) == DISTANCES
    for b, i, j in np.ndindex(BATCH, ITEMS, ITEMS):
        assert {name: int(distances[b, i, j]) for name, distances in found.items()} == distances_of(b, i, j)
    assert distances_of(0, 4, 5) == {"ss": 1, "se": -2, "es": 2, "ee": -1}  # the word 1-2 and the word 0-3


@pytest.mark.parametrize("names", [DISTANCES, ("ss", "ee"), ("es",)], ids=str)
def test_distinct_pairs_have_the_distances_of_every_pair_and_are_as_few_as_can_be(names):
    pairs = distinct_pairs(tf.constant(POS_S), tf.constant(POS_E), tf.constant(MASK), names)
    expected = {tuple(distances_of(*pair)[name] for name in names) for pair in all_pairs()}
    assert pairs.places == 4
    assert [distances.dtype for distances in pairs.distances] == [tf.int32] * len(names)
    assert {tuple(map(int, row)) for row in zip(*pairs.distances, strict=True)} == expected
    assert len(pairs.distances[0]) == len(expected)
    for pair in all_pairs():
        found = [int(distances[pairs.index[pair]]) for distances in pairs.distances]
        assert found == [distances_of(*pair)[name] for name in names]
    assert np.all(pairs.index < len(expected)) and pairs.index.shape == PAIRS.shape


def test_distinct_pairs_of_random_lattices():
    """Long sentences, whose four distances are one number below 2^63, and any positions at padding.

    Each begins with a character: a pair with padding is one with that.
    """
    rng = np.random.default_rng(0)
    lengths = np.array([40, 7, 1])
    mask = np.arange(40)[None] < lengths[:, None]
    pos_s = rng.integers(0, 3000, mask.shape)
    pos_e = pos_s + rng.integers(0, 5, mask.shape)
    pos_s[:, 0] = pos_e[:, 0] = 0
    found = distinct_pairs(tf.constant(pos_s), tf.constant(pos_e), tf.constant(mask))
    expected = np.stack(list(span_distances(tf.constant(pos_s), tf.constant(pos_e)).values()), -1)
    pairs = mask[:, :, None] & mask[:, None]
    again = np.stack([np.asarray(distances)[found.index] for distances in found.distances], -1)
    np.testing.assert_array_equal(again[pairs], expected[pairs])
    assert len(found.distances[0]) == len(np.unique(expected[pairs], axis=0))
    far_off = np.where(mask, pos_s, 10**6), np.where(mask, pos_e, 10**6)
    same = distinct_pairs(*map(tf.constant, far_off), tf.constant(mask))
    assert same.places == found.places
    np.testing.assert_array_equal(np.stack(same.distances), np.stack(found.distances))
    np.testing.assert_array_equal(np.asarray(same.index)[pairs], np.asarray(found.index)[pairs])


def test_a_batch_without_any_item_has_one_pair():
    nothing = tf.zeros([2, 3], tf.int32)
    pairs = distinct_pairs(nothing, nothing, tf.zeros([2, 3], bool))
    assert pairs.places == 1 and [d.numpy().tolist() for d in pairs.distances] == [[0]] * 4


@pytest.mark.parametrize("shift", [0, 10])
def test_the_table_holds_the_distances_of_sentences(shift):
    expected = [sinusoid(distance + shift) for distance in range(-3, 4)]
    np.testing.assert_allclose(distance_table(tf.constant(4), WIDTH, shift), expected, atol=2e-6)
    np.testing.assert_allclose(distance_table(1, WIDTH, shift), [sinusoid(shift)], atol=2e-6)


@pytest.mark.parametrize("dtype", ["float32", tf.float64])
def test_the_table_of_symbolic_places_has_its_dtype(dtype, tmp_path):
    places = keras.Input([], batch_size=1, dtype="int32")
    model = keras.Model(places, distance_table(places[0], WIDTH, 2, dtype))
    model.save(tmp_path / "table.keras")
    expected = distance_table(4, WIDTH, 2, dtype).numpy()
    for table in (model, keras.saving.load_model(tmp_path / "table.keras")):
        found = table(np.array([4], np.int32)).numpy()
        assert found.dtype == table.output.dtype == tf.as_dtype(dtype).name
        np.testing.assert_array_equal(found, expected)


def test_a_table_that_was_saved_without_its_dtype_is_float32():
    layer = _DistanceTable(WIDTH, 2, dtype="float64")
    config = layer.get_config()
    del config["table_dtype"]
    found = _DistanceTable.from_config(config)(tf.constant(4))
    assert found.dtype == tf.float32
    np.testing.assert_array_equal(found, distance_table(4, WIDTH, 2))


# ---------------------------------------- fusion


def test_the_fused_sum_is_one_product_of_all_distances():
    pairs = distinct_pairs(POS_S, POS_E, MASK, ("ss", "es", "ee"))
    (kernel,) = arrays((3 * WIDTH, 5))
    found = fused_sum(pairs, distance_table(pairs.places, WIDTH), tf.constant(kernel))
    for row, distances in zip(found, zip(*pairs.distances, strict=True), strict=True):
        expected = np.concatenate([sinusoid(int(distance)) for distance in distances]) @ kernel
        np.testing.assert_allclose(row, expected, rtol=1e-4, atol=1e-5)


def linear_of(layer, x):
    return x @ layer.kernel.numpy().astype(np.float64) + layer.bias.numpy()


def softmax(x):
    x = np.exp(x - x.max(0))
    return x / x.sum(0)


def fused_in_loops(fusion, b, i, j, shift=0):
    """The vector of one pair, from the sinusoids of its four distances."""
    names = ("ss", "ee") if fusion.names == ("ss", "ee") else DISTANCES
    parts = [sinusoid(distances_of(b, i, j)[name] + shift) for name in names]
    if fusion.kind.startswith("ff"):
        fused = linear_of(fusion.forward, np.concatenate(parts))
        return fused if fusion.kind == "ff_linear" else np.maximum(fused, 0)
    scores = linear_of(fusion.score_2, np.maximum(linear_of(fusion.score_0, np.concatenate(parts)), 0))
    weights = softmax(scores.reshape([4, WIDTH if fusion.kind == "gate" else 1]))
    return sum(weight * linear_of(fusion.w_r, part) for weight, part in zip(weights, parts, strict=True))


def make_fusion(name):
    fusion = ProgramFusion(WIDTH, name)
    fusion.build()
    randomise(fusion, scale=0.5)
    return fusion


@pytest.mark.parametrize(
    "name, shift",
    [
        *((name, 0) for name in FUSIONS),
        *(pytest.param(name, 10, marks=[] if name == "gate" else pytest.mark.slow) for name in FUSIONS),
    ],
)
def test_fusion_of_every_pair_in_loops(name, shift):
    fusion = make_fusion(name)
    pairs = distinct_pairs(POS_S, POS_E, MASK, fusion.names)
    found = tf.gather(fusion(pairs, distance_table(pairs.places, WIDTH, shift)), pairs.index).numpy()
    for pair in all_pairs():
        np.testing.assert_allclose(found[pair], fused_in_loops(fusion, *pair, shift), rtol=1e-4, atol=1e-5)


def test_no_fusion_is_another():
    found = {name: fused_in_loops(make_fusion(name), 0, 4, 5) for name in FUSIONS}
    for one, other in itertools.combinations(FUSIONS, 2):
        assert np.abs(found[one] - found[other]).max() > 0.01


@pytest.mark.parametrize("name", ["ff", "ff_two"])
def test_fusions_of_the_library_are_those_of_the_program(name):
    ours, program = PositionFusion(WIDTH, name), make_fusion(name)
    ours.build()
    ours.set_weights(program.get_weights())
    pairs = distinct_pairs(POS_S, POS_E, MASK, ours.names)
    table = distance_table(pairs.places, WIDTH)
    np.testing.assert_array_equal(ours(pairs, table), program(pairs, table))
    assert_round_trips(PositionFusion(WIDTH, name))


@pytest.mark.parametrize("name", ["sum", "attn"])
def test_an_unknown_fusion_is_an_error(name):
    with raises_parameter("fusion", name, ["ff", "ff_two"]):
        PositionFusion(WIDTH, name)


# ---------------------------------------- attention


@pytest.fixture(scope="module")
def case():
    """Hidden states, fused positions of the pairs that differ, and which each pair has."""
    index = distinct_pairs(POS_S, POS_E, MASK).index
    x, r = arrays((BATCH, ITEMS, WIDTH), (int(tf.reduce_max(index)) + 1, WIDTH))
    return x, r, index


def of_program(options):
    """Whether there are options that only the original program has: then the port is tested, else the library."""
    return options.keys() & FlatConfig.removed.keys()


def make_attn(**options):
    attn = (ProgramAttn if of_program(options) else LatticeAttn)(WIDTH, HEADS, **options)
    attn.build()
    randomise(attn, scale=0.5)
    return attn


PROJECTIONS = list(itertools.product([True, False], repeat=4))
SLOW = pytest.mark.slow


def attention_in_loops(attn, x, r, index):
    """Probabilities and results by the equation, with what is projected projected."""

    def projected(linear, x):
        return x if linear is None else linear_of(linear, x)

    d_head = WIDTH // HEADS
    by_head = [slice(h * d_head, (h + 1) * d_head) for h in range(HEADS)]
    q, k, v = (projected(linear, x) for linear in (attn.w_q, attn.w_k, attn.w_v))
    r = projected(attn.w_r, r)
    u_bias, v_bias = attn.u.numpy(), attn.v.numpy()
    probs, vectors = np.zeros([HEADS, BATCH, ITEMS, ITEMS]), np.zeros(x.shape)
    for h, b, i in np.ndindex(HEADS, BATCH, ITEMS):
        d, scores = by_head[h], np.full(ITEMS, -np.inf)
        for j in np.flatnonzero(MASK[b]):
            of_content = (q[b, i, d] + u_bias[h]) @ k[b, j, d]
            of_position = (q[b, i, d] + v_bias[h]) @ r[index[b, i, j]][d]
            scores[j] = (of_content + of_position) / (d_head**0.5 if attn.scale else 1)
        probs[h, b, i] = softmax(scores)
        vectors[b, i, d] = probs[h, b, i] @ v[b][:, d]
    return probs, projected(getattr(attn, "ff_final", None), vectors)


@pytest.mark.parametrize(
    "q_proj, k_proj, v_proj, r_proj",
    [one if i % 5 == 0 else pytest.param(*one, marks=SLOW) for i, one in enumerate(PROJECTIONS)],
)
def test_attention_with_every_combination_of_projections_in_loops(case, q_proj, k_proj, v_proj, r_proj):
    attn = make_attn(q_proj=q_proj, k_proj=k_proj, v_proj=v_proj, r_proj=r_proj)
    probs, expected = attention_in_loops(attn, *case)
    np.testing.assert_allclose(attn.attention_probs(*case, MASK).numpy()[:, MASK], probs[:, MASK], atol=1e-5)
    np.testing.assert_allclose(attn(*case, MASK).numpy()[MASK], expected[MASK], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [{"scale": True}, {"attn_ff": True}, {"attn_ff": True, "k_proj": False}], ids=str)
def test_attention_scaled_or_with_an_output_projection_in_loops(case, options):
    attn = make_attn(**options)
    np.testing.assert_allclose(
        attn(*case, MASK).numpy()[MASK], attention_in_loops(attn, *case)[1][MASK], rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("k_proj", [True, False])
def test_attention_of_the_library_in_loops(case, k_proj):
    attn = make_attn(k_proj=k_proj)
    assert type(attn) is LatticeAttn
    probs, expected = attention_in_loops(attn, *case)
    np.testing.assert_allclose(attn.attention_probs(*case, MASK).numpy()[:, MASK], probs[:, MASK], atol=1e-5)
    np.testing.assert_allclose(attn(*case, MASK).numpy()[MASK], expected[MASK], rtol=1e-4, atol=1e-5)


def test_attention_round_trips_and_names_a_bad_width():
    for k_proj in (True, False):
        assert_round_trips(LatticeAttn(8, 2, True, k_proj=k_proj, dropatt=0.1))
    with raises_parameter("q_proj", False, error=UnknownArgumentError):
        LatticeAttn(8, 2, q_proj=False)
    with raises_parameter("d_model", 8, limit="n_head=3"):
        LatticeAttn(8, 3)


# ---------------------------------------- what stands around sublayers


def normal(x, norm):
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    return x * norm.gamma.numpy() + norm.beta.numpy()


@pytest.mark.parametrize("sequence", ["", "a", "n", "an", "na", "nan"])
def test_a_process_adds_and_normalises_in_order(sequence):
    y, added = arrays((2, 3, WIDTH), (2, 3, WIDTH))
    process = LatticeProcess(sequence)
    process.build(y.shape)
    randomise(process, scale=0.5)
    expected = y
    for operation in sequence:
        expected = expected + added if operation == "a" else normal(expected, process.layer_norm)
    np.testing.assert_allclose(process(y, added), expected, rtol=1e-4, atol=1e-5)
    assert LatticeProcess.from_config(process.get_config()).sequence == sequence


def make_layer(**options):
    layer = (ProgramLayer if of_program(options) else FlatLayer)(WIDTH, HEADS, 12, **options)
    layer.build()
    randomise(layer, scale=0.5)
    return layer


@pytest.mark.parametrize("activation", ["relu", "leaky"])
def test_the_feed_forward_net(activation):
    layer = make_layer(activation=activation) if activation == "leaky" else make_layer()
    (x,) = arrays((BATCH, ITEMS, WIDTH))
    inner = linear_of(layer.ff_0, x)
    inner = np.where(inner > 0, inner, 0.01 * inner * (activation == "leaky"))
    np.testing.assert_allclose(layer.feed_forward(x), linear_of(layer.ff_1, inner), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "pre, post, residual",
    [
        ("", "an", "own"),
        ("n", "a", "input"),
        ("", "n", "input"),
        *(pytest.param(*one, marks=SLOW) for one in [("", "an", "input"), ("n", "a", "own"), ("", "n", "own")]),
    ],
)
def test_a_residual_adds_the_sublayer_s_input_or_as_the_program_its_own_output(case, pre, post, residual):
    others = {} if (pre, post) == ("", "an") else {"pre": pre, "post": post}
    layer = make_layer(residual=residual, **others)
    x, r, index = case

    def sublayer(x, function):
        """`post(f(pre(x)))`, both sublayers with the same two norms."""
        y = function(normal(x, layer.preprocess.layer_norm) if pre else x)
        if "a" in post:
            y = y + (x if residual == "input" else y)
        return normal(y, layer.postprocess.layer_norm) if "n" in post else y

    expected = sublayer(x, lambda y: layer.attn(tf.constant(y, tf.float32), r, index, MASK).numpy())
    expected = sublayer(expected, lambda y: layer.feed_forward(tf.constant(y, tf.float32)).numpy())
    np.testing.assert_allclose(layer(*case, MASK).numpy()[MASK], expected[MASK], rtol=1e-3, atol=1e-4)


def test_the_program_s_layer_has_no_residual_connection(case):
    """`LN(a + a)` is `LN(a)`, but for epsilon: what comes in has no way around the sublayers."""
    own, none = make_layer(residual="own"), make_layer(post="n")
    weights = {weight.path.partition("/")[2]: weight for weight in own.weights}
    for weight in none.weights:
        weight.assign(weights[weight.path.partition("/")[2]])
    np.testing.assert_allclose(own(*case, MASK).numpy()[MASK], none(*case, MASK).numpy()[MASK], atol=2e-3)
    assert np.abs(own(*case, MASK).numpy() - make_layer()(*case, MASK).numpy()).max() > 0.1


@pytest.mark.parametrize("options", [{}, {"residual": "own", "pre": "n"}], ids=str)
def test_padding_changes_nothing(case, options):
    layer, (x, r, index) = make_layer(**options), case
    found = layer(*case, MASK).numpy()
    (noise,) = arrays(x.shape, seed=1)
    other = np.where(MASK[..., None], x, 9 * noise), r, np.where(PAIRS, index, 0)
    np.testing.assert_array_equal(layer(*other, MASK).numpy()[MASK], found[MASK])
    alone = layer(x[1:, :3], r, index[1:, :3, :3], MASK[1:, :3])
    np.testing.assert_allclose(alone[0], found[1, :3], rtol=1e-5, atol=1e-5)


def test_every_rate_is_applied_in_its_own_place(case):
    key = tf.constant([1, 2, 0])
    plain = make_layer()
    expected = plain(*case, MASK).numpy()
    np.testing.assert_array_equal(plain(*case, MASK, dropout_key=key), expected)
    for options in ({"dropout": 0.5}, {"attention": {"dropatt": 0.5}}):
        layer = make_layer(**options)
        np.testing.assert_array_equal(layer(*case, MASK), expected)
        dropped = layer(*case, MASK, dropout_key=key).numpy()
        assert np.abs(dropped - expected)[MASK].max() > 0.1
        np.testing.assert_array_equal(layer(*case, MASK, dropout_key=key), dropped)
    attn = make_attn(dropatt=0.5)
    assert np.abs(attn(*case, MASK, dropout_key=key).numpy() - attn(*case, MASK).numpy())[MASK].max() > 0.1


def test_a_layer_round_trips_and_names_bad_arguments():
    assert_round_trips(FlatLayer(8, 2, 12))
    assert_round_trips(FlatLayer(8, 2, 12, residual="own", dropout=0.1, attention={"k_proj": False, "scale": True}))
    with raises_parameter("residual", "both", ["input", "own"]):
        FlatLayer(8, 2, 12, residual="both")
    with raises_parameter("attn_ff", True, error=UnknownArgumentError):
        FlatLayer(8, 2, 12, attention={"attn_ff": True})
