"""Masks in every form that callers have them: Keras's against Keras's own attention, the articles' against Keras's."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

from txl_tf import layers
from txl_tf.errors import ParameterError

B, T, K, E, H = 3, 4, 5, 8, 2  # batch, queries, keys, width, heads


def floats(*shape):
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def seen(*shape):
    """A random mask in which the first key is always seen."""
    mask = np.random.default_rng(sum(shape)).random(shape) < 0.6
    mask[..., 0] = True
    return mask


def lengths(size, *rows):
    return np.arange(size) < np.array(rows)[:, None]


def masked(x, mask):
    """A tensor with the mask that Keras's layers pass on with it."""
    x = tf.constant(x)
    x._keras_mask = tf.constant(mask)
    return x


Q, V, KEYS = floats(B, T, E), floats(B, K, E), floats(B, K, E) + 1
OF_QUERIES, OF_VALUES, OF_KEYS = lengths(T, 4, 2, 3), lengths(K, 4, 5, 2), lengths(K, 5, 3, 1)


@pytest.fixture(scope="module")
def attentions():
    """Keras's attention and ours with the same weights."""
    ours, keras_s = layers.MultiHeadAttention(E, H), keras.layers.MultiHeadAttention(H, E // H)
    ours(query=Q, value=V)
    keras_s(Q, V)
    for i, weight in enumerate(ours.weights):
        weight.assign(np.random.default_rng(i).normal(size=weight.shape))
    for name, linear in (("query", ours.wq), ("key", ours.wk), ("value", ours.wv)):
        kernel, bias = linear.get_weights()
        getattr(keras_s, f"{name}_dense").set_weights([kernel.reshape(E, H, -1), bias.reshape(H, -1)])
    kernel, bias = ours.dense.get_weights()
    keras_s.output_dense.set_weights([kernel.reshape(H, -1, E), bias])
    return keras_s, ours


MASKS = {
    "none": {},
    "queries and keys": {"attention_mask": seen(T, K)},
    "batch": {"attention_mask": seen(B, T, K)},
    "one row": {"attention_mask": seen(1, T, K)},
    "one query": {"attention_mask": seen(B, 1, K)},
    "heads": {"attention_mask": seen(B, H, T, K)},
    "one head": {"attention_mask": seen(B, 1, T, K)},
    "padding in four dimensions": {"attention_mask": OF_KEYS[:, None, None]},
    "causal": {"use_causal_mask": True},
    "causal and more": {"use_causal_mask": True, "attention_mask": seen(B, T, K)},
    "values": {"value_mask": OF_VALUES},
    "keys": {"key_mask": OF_KEYS},
    "all": {"value_mask": OF_VALUES, "key_mask": OF_KEYS, "attention_mask": seen(B, T, K), "use_causal_mask": True},
}


@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS.keys())
def test_attention_is_keras_s_under_all_its_masks_of_bool_and_of_numbers(attentions, masks):
    keras_s, ours = attentions
    for dtype in ("bool", "int32", "float32"):
        given = {name: mask if mask is True else tf.cast(mask, dtype) for name, mask in masks.items()}
        given["return_attention_scores"] = dtype == "bool"  # Keras has two ways to compute, of which one has scores
        results = ours(query=Q, value=V, key=KEYS, **given), keras_s(Q, V, KEYS, **given)
        for one, other in zip(*map(keras.tree.flatten, results), strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("of", [dict(zip("qvk", on, strict=True)) for on in itertools.product([0, 1], repeat=3)])
def test_masks_of_queries_values_and_keys_are_keras_s_given_or_handed_on(attentions, of):
    keras_s, ours = attentions
    masks = {"query": OF_QUERIES, "value": OF_VALUES, "key": OF_KEYS}
    masks = {name: mask for name, mask in masks.items() if of[name[0]]}
    plain = {"query": Q, "value": V, "key": KEYS}
    handed = {name: masked(x, masks[name]) if name in masks else tf.constant(x) for name, x in plain.items()}
    expected = keras_s(**handed)
    handed = {name: masked(x, masks[name]) if name in masks else tf.constant(x) for name, x in plain.items()}
    got, given = ours(**handed), ours(**plain, **{f"{name}_mask": mask for name, mask in masks.items()})
    np.testing.assert_allclose(got, expected, atol=1e-5)
    np.testing.assert_array_equal(given, got)
    for output in (expected, got, given):
        assert hasattr(output, "_keras_mask") == bool(of["q"])
        if of["q"]:
            np.testing.assert_array_equal(output._keras_mask, OF_QUERIES)


def test_one_tensor_of_values_and_keys_has_one_mask(attentions):
    keras_s, ours = attentions
    np.testing.assert_allclose(ours(query=Q, value=masked(V, OF_VALUES)), keras_s(Q, masked(V, OF_VALUES)), atol=1e-5)


def test_masks_by_the_article_s_names_of_tensors(attentions):
    _, ours = attentions
    expected = ours(query=Q, value=V, key=KEYS, value_mask=OF_VALUES, query_mask=OF_QUERIES)
    by_article = ours(v=V, k=KEYS, q=Q, value_mask=OF_VALUES, query_mask=OF_QUERIES, return_attention_scores=False)
    np.testing.assert_array_equal(by_article, expected)


@pytest.mark.parametrize("dtype", ["mixed_bfloat16", pytest.param("mixed_float16", marks=pytest.mark.slow)])
def test_numbers_of_half_precision_are_masks_too(dtype):
    layer = layers.MultiHeadAttention(E, H, dtype=dtype)
    mask = seen(B, H, T, K)
    results = [layer(query=Q, value=V, attention_mask=form) for form in (mask, mask.astype(np.float32))]
    np.testing.assert_array_equal(*(tf.cast(result, tf.float32) for result in results))


def test_masks_of_numbers_work_in_graphs_and_in_functional_models(attentions):
    _, ours = attentions
    mask, of_values = seen(B, H, T, K).astype(np.int32), OF_VALUES.astype(np.float32)
    expected = ours(query=Q, value=V, attention_mask=mask, value_mask=of_values)

    @tf.function(reduce_retracing=True)
    def graph(q, v, mask, of_values):
        return ours(query=q, value=v, attention_mask=mask, value_mask=of_values)

    specs = [tf.TensorSpec([None, None, E]), tf.TensorSpec([None, None, E])]
    concrete = graph.get_concrete_function(
        *specs, tf.TensorSpec([None, H, None, None], tf.int32), tf.TensorSpec([None, None])
    )
    np.testing.assert_allclose(concrete(*map(tf.constant, (Q, V, mask, of_values))), expected, rtol=1e-5, atol=1e-5)
    inputs = [keras.Input([T, E]), keras.Input([K, E]), keras.Input([H, T, K], dtype="int32"), keras.Input([K])]
    model = keras.Model(inputs, ours(query=inputs[0], value=inputs[1], attention_mask=inputs[2], value_mask=inputs[3]))
    np.testing.assert_allclose(model([Q, V, mask, of_values]), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["mask", "query_mask", "value_mask", "key_mask"])
def test_a_graph_of_unknown_lengths_refuses_a_mask_that_would_broadcast(attentions, name):
    _, ours = attentions
    length = T if name == "query_mask" else K

    @tf.function(
        input_signature=[tf.TensorSpec([None, None, E])] * 2 + [tf.TensorSpec([None, None], tf.bool)], autograph=False
    )
    def graph(q, v, mask):
        return ours(query=q, value=v, **{name: mask})

    q, v, mask = tf.constant(Q), tf.constant(V), tf.ones([B, length], tf.bool)
    np.testing.assert_allclose(graph(q, v, mask), ours(query=q, value=v), rtol=1e-5, atol=1e-5)
    for wrong in (mask[:, :1], mask[:1]):
        with pytest.raises(tf.errors.InvalidArgumentError, match=name):
            graph(q, v, wrong)


R, INDEX, MEMS = floats(7, E), np.arange(B * T * T).reshape(B, T, T) % 7, floats(B, 2, E)
TENSORS = {  # of calls whose sizes a graph may not know
    "TenerAttn": {"x": Q, "mask": OF_QUERIES},
    "TenerLayer": {"x": Q, "mask": OF_QUERIES},
    "LatticeAttn": {"x": Q, "r": R, "index": INDEX, "mask": OF_QUERIES},
    "FlatLayer": {"x": Q, "r": R, "index": INDEX, "mask": OF_QUERIES},
    "RelMultiHeadAttn": {"w": Q, "r": floats(1, 2 + T, E), "mems": MEMS, "content_mask": seen(B, T, 2 + T)},
    "CRF": {"emissions": Q, "mask": OF_QUERIES},
}


@pytest.mark.parametrize("cls, name, axis", [
    *((cls, "mask", axis) for cls in TENSORS if cls != "RelMultiHeadAttn" for axis in (0, 1)),
    *((cls, "index", axis) for cls in ("LatticeAttn", "FlatLayer") for axis in (0, 1, 2)),
    *(("RelMultiHeadAttn", "content_mask", axis) for axis in (0, 1, 2)), ("RelMultiHeadAttn", "r", 1),
])  # fmt: skip
def test_a_graph_of_unknown_sizes_refuses_a_tensor_that_would_broadcast(cls, name, axis):
    sizes = {"TenerLayer": (E, H, 8), "FlatLayer": (E, H, 8), "RelMultiHeadAttn": (E, H, E // H), "CRF": (E,)}
    layer = getattr(layers, cls)(*sizes.get(cls, (E, H)))
    biases = {"r_w_bias": floats(H, E // H), "r_r_bias": floats(H, E // H)} if cls == "RelMultiHeadAttn" else {}
    tensors = {of: tf.constant(x) for of, x in TENSORS[cls].items()}
    expected = layer(**tensors, **biases)
    specs = {of: tf.TensorSpec([*[None] * (x.ndim - 1), E if x.shape[-1] == E else None], tensors[of].dtype)
             for of, x in TENSORS[cls].items()}  # fmt: skip
    graph = tf.function(lambda given: layer(**given, **biases), input_signature=[specs], autograph=False)
    np.testing.assert_allclose(graph(tensors), expected, rtol=1e-5, atol=1e-5)
    wrong = tf.gather(tensors[name], [0], axis=axis)
    with pytest.raises(tf.errors.InvalidArgumentError):
        graph({**tensors, name: wrong})
    with pytest.raises(ParameterError) as caught:
        layer(**{**tensors, name: wrong}, **biases)
    assert caught.value.name == name


# ------------------------------------------------------------------------------------------------------------ refused

WRONG = [
    ("attention_mask", np.full([B, T, K], -1e9, np.float32)),
    ("attention_mask", np.full([B, T, K], 0.5, np.float32)),
    ("attention_mask", np.full([T, K], 2)),
    ("attention_mask", np.ones([B, K], bool)),
    ("attention_mask", np.ones([B, H + 1, T, K], bool)),
    ("attention_mask", np.ones([1, B, H, T, K], bool)),
    ("query_mask", np.ones([B, K], bool)),
    ("query_mask", np.full([B, T], -1e9, np.float32)),
    ("value_mask", np.ones([B, T], bool)),
    ("key_mask", np.ones([B, 1, K], bool)),
    ("forbidden", np.full([B, 1, T, K], -1e9, np.float32)),
    ("mask", np.full([B, 1, T, K], 0.5, np.float32)),
    *((name, np.full([B, 1, T, K], "a")) for name in ("mask", "attention_mask", "forbidden")),
    *((name, np.full([B, T], "a")) for name in ("mask", "query_mask")),
]


@pytest.mark.parametrize("name, mask", WRONG)
def test_what_is_no_mask_is_refused_by_its_name(attentions, name, mask):
    _, ours = attentions
    with pytest.raises(ParameterError) as caught:
        ours(query=Q, value=V, **{name: mask})
    assert caught.value.name == name and caught.value.value.shape == mask.shape


AMBIGUOUS = [
    (lambda **masks: layers.MultiHeadAttention(E, H)(query=Q, value=V, **masks), "mask", (B, K), (B, T, K)),
    (lambda **masks: layers.EncoderLayer(E, H, 8)(V, **masks), "mask", (B, K), (B, K, K)),
    (lambda **masks: layers.DecoderLayer(E, H, 8)(V, Q, **masks), "mask", (B, K), (B, K, K)),
    (lambda **masks: layers.DecoderLayer(E, H, 8)(V, Q, **masks), "padding_mask", (B, T), (B, K, T)),
]


@pytest.mark.parametrize("call, name, two, three", AMBIGUOUS)
def test_numbers_that_keras_and_the_articles_read_differently_are_refused(call, name, two, three):
    for mask in (np.ones(two, np.float32), np.ones(three, np.float32), np.ones(three, np.int32)):
        with pytest.raises(ParameterError) as caught:
            call(**{name: mask})
        assert caught.value.name == name and "cast" in str(caught.value).lower()


# ------------------------------------------------------------------------------- the article's names, other layers


def test_masks_of_a_decoder_layer_by_both_conventions():
    layer, x, source = layers.DecoderLayer(E, H, 8), V, floats(B, T, E)
    own, of_source = OF_VALUES, OF_QUERIES
    expected = layer(x, source, mask=own, padding_mask=of_source, use_causal_mask=True)
    ahead = 1 - np.tri(K)[None, None] * own[:, None, None]
    for article in (ahead.astype(np.float32), ahead == 0):
        for padding in (of_source.astype(np.int32), 1 - of_source[:, None, None].astype(np.float32)):
            got = layer(x, source, look_ahead_mask=article, padding_mask=padding)
            for one, other in zip(got, expected, strict=True):
                np.testing.assert_array_equal(one, other)


class OwnCall(layers.MultiHeadAttention):
    """An attention with a call of its own, which notes the rank of its mask."""

    def call(self, *args, attention_mask=None, **kwargs):
        self.ranks = [*getattr(self, "ranks", []), None if attention_mask is None else len(attention_mask.shape)]
        return super().call(*args, attention_mask=attention_mask, **kwargs)


def test_a_causal_mask_alone_reaches_an_attention_with_its_own_call():
    source = floats(B, T, E)
    encoder, decoder = layers.EncoderLayer(E, H, 8), layers.DecoderLayer(E, H, 8)
    for call, names in (
        (lambda: encoder(Q, use_causal_mask=True, return_attention_scores=True), {"mha": 4}),
        (lambda: decoder(V, source, use_causal_mask=True), {"mha1": 4, "mha2": None}),
    ):
        layer = encoder if "mha" in names else decoder
        expected = call()
        for name in names:
            getattr(layer, name).__class__ = OwnCall
        found = call()
        assert {name: getattr(layer, name).ranks for name in names} == {name: [rank] for name, rank in names.items()}
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)


def segment_layers():
    positions = {"r": floats(1, 7, E), "r_w_bias": floats(H, 4), "r_r_bias": floats(H, 4)}
    return [
        pytest.param(layers.RelMultiHeadAttn(E, H, 4), positions, id="RelMultiHeadAttn"),
        pytest.param(layers.TransformerXLLayer(E, H, 4, 8), positions, id="TransformerXLLayer", marks=pytest.mark.slow),
        pytest.param(layers.MultiHeadAttn(E, H, 4), {}, id="MultiHeadAttn"),
        pytest.param(layers.TransformerLMLayer(E, H, 4, 8), {}, id="TransformerLMLayer", marks=pytest.mark.slow),
    ]


@pytest.mark.parametrize("layer, positions", segment_layers())
def test_attention_masks_of_segments_are_of_heads_too(layer, positions):
    w, mems = floats(B, 4, E), floats(B, 3, E)
    mask = seen(B, H, 4, 7)

    def result(mask, w=w):
        return layer(w=w, mems=mems, **positions, attn_mask=mask)

    expected = result(mask[:, 0])
    same = np.repeat(mask[:, :1], H, 1)
    forms = [same, mask[:, :1], 1 - same.astype(np.int32), 1 - same.astype(np.float32), mask[:, 0].tolist()]
    for form in forms:
        np.testing.assert_allclose(result(form), expected, atol=1e-6)
    assert np.abs(result(mask) - expected).max() > 1e-3
    attention = getattr(layer, "rel_attn", layer)
    probs = attention.attention_probs(w, *positions.values(), mask, mems)  # [n_head, batch, tgt_len, keys]
    np.testing.assert_array_equal(np.transpose(probs, [1, 0, 2, 3])[~mask], 0)
    np.testing.assert_allclose(np.sum(probs, -1), 1, atol=1e-6)
    for wrong in (same * -1e9, np.ones([B, H + 1, 4, 7], bool), np.ones([B, 4, 6], bool)):
        with pytest.raises(ParameterError) as caught:
            result(wrong)
        assert caught.value.name == "attn_mask"


@pytest.mark.parametrize("layer", [layers.RelMultiHeadAttn(E, H, 4), layers.MultiHeadAttn(E, H, 4)])
def test_padding_that_keras_hands_on_hides_keys_of_all_heads(layer):
    positions = segment_layers()[0].values[1] if isinstance(layer, layers.RelMultiHeadAttn) else {}
    w, mems, padding = floats(B, 4, E), floats(B, 3, E), lengths(4, 4, 2, 3)
    mask, of_keys = seen(B, H, 4, 7), np.pad(padding, [(0, 0), (3, 0)], constant_values=True)
    expected = layer(w=w, mems=mems, **positions, attn_mask=mask & of_keys[:, None, None])
    np.testing.assert_array_equal(layer(w=masked(w, padding), mems=mems, **positions, attn_mask=mask), expected)


# ------------------------------------------------------------------------------------- masks of unknown rank


def of_unknown_rank(call):
    return tf.function(call, input_signature=[tf.TensorSpec(None, tf.bool)], autograph=False)


@pytest.mark.parametrize("name", ["attention_mask", "forbidden"])
def test_a_mask_whose_rank_decides_its_axes_must_have_one(attentions, name):
    _, ours = attentions
    with pytest.raises(ParameterError) as caught:
        of_unknown_rank(lambda mask: ours(query=Q, value=V, **{name: mask})).get_concrete_function()
    assert caught.value.name == name


@pytest.mark.parametrize("name", ["look_ahead_mask", "attn_mask"])
def test_so_must_the_masks_of_other_layers(name):
    layer, tensors = {
        "attn_mask": (layers.MultiHeadAttn(E, H, E // H), (Q,)),
        "look_ahead_mask": (layers.DecoderLayer(E, H, 8), (V, Q)),
    }[name]
    layer(*tensors)  # Keras itself cannot build a layer from a shape of unknown rank
    with pytest.raises(ParameterError) as caught:
        of_unknown_rank(lambda mask: layer(*tensors, **{name: mask})).get_concrete_function()
    assert caught.value.name == name


@pytest.mark.parametrize("name, mask", [("mask", OF_VALUES), ("value_mask", OF_VALUES), ("query_mask", OF_QUERIES)])
def test_a_graph_checks_masks_of_elements_when_it_runs(attentions, name, mask):
    _, ours = attentions
    call = of_unknown_rank(lambda mask: ours(query=Q, value=V, **{name: mask}))
    np.testing.assert_allclose(call(mask), ours(query=Q, value=V, **{name: mask}), rtol=1e-5, atol=1e-6)
    for wrong in (mask[:, :1], np.ones([B, T, K], bool)):
        with pytest.raises(tf.errors.InvalidArgumentError):
            call(wrong)
