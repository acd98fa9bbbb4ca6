"""Wrong calls of the functions in `txl_tf.layers`: each is a typed error, and none fails inside the function.

Calls in the form of the original program and of the articles get an error that shows what to write.
"""

import inspect
import pickle

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import eagerly, raises_parameter

import txl_tf
from txl_tf import layers
from txl_tf.errors import ArgumentTypeError, CallError, ParameterError, UnknownArgumentError, UnknownNameError
from txl_tf.public_calls import SHAPES

B, T, M, E, H, D, N = 2, 3, 2, 8, 2, 4, 10  # batch, tgt_len, mem_len, d_model, n_head, d_head, n_token


def real(*shape):
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def ids(n, *shape):
    return np.random.default_rng(n).integers(0, n, shape).astype(np.int32)


XL = {
    "w": real(B, T, E), "r": real(1, M + T, E), "r_w_bias": real(H, D), "r_r_bias": real(H, D), "mems": real(B, M, E),
    "qkv_kernel": real(E, 3 * H * D), "r_kernel": real(E, H * D),
}  # fmt: skip
FIRST = list(XL.values())[:4]  # w, r, r_w_bias, r_r_bias
MASK = np.triu(np.ones([T, M + T], np.float32), M + 1)
SOFTMAX = {
    "hidden": real(B, T, E), "tables": [real(N, E)], "projs": [None, None], "biases": [real(6), real(4)],
    "clusters": (real(1, E), real(1)),
}  # fmt: skip
CRF = {"emissions": real(B, T, 4), "mask": np.ones([B, T], bool), "transitions": real(4, 4), "start": real(4)}
HEADS = {"q": real(H, B, T, D), "k": real(H, B, T, D)}
POSITIONS = {"pos_s": ids(4, B, T), "pos_e": ids(4, B, T)}
CALLS = {
    "adaptive_log_probs": SOFTMAX,
    "alibi_slopes": {"n_head": 4},
    "attend": {
        **HEADS, "v": real(H, B, T, D), "position_scores": real(H, B, T, T), "visible": np.ones([T, T], bool),
    },
    "attention_probs": {**HEADS, "position_scores": real(H, T, T)},
    "create_look_ahead_mask": {"size": 3},
    "create_mask": {"qlen": 3, "mlen": 2},
    "create_padding_mask": {"ids": ids(5, B, T)},
    "crf_decode": CRF,
    "crf_marginals": CRF,
    "crf_nll": {**CRF, "tags": ids(4, B, T)},
    "cross_entropy": {"labels": ids(4, 5), "logits": real(5, 4)},
    "distance_table": {"places": 4, "d_model": 8},
    "distinct_pairs": POSITIONS,
    "document_mask": {"attn_mask": MASK, "tokens": ids(5, B, T), "reset_token": 1},
    "dropout": {"x": real(B, T), "rate": 0.5, "dropout_key": np.array([1, 2, 0], np.int32)},
    "embedding_lookup": {"table": real(N, E), "ids": ids(N, B, T)},
    "get_angles": {"pos": np.arange(3)[:, None], "i": np.arange(8)[None], "d_model": 8},
    "inverse_frequencies": {"d_model": 8},
    "layer_norm": {"x": real(B, T, E), "gamma": real(E), "beta": real(E), "epsilon": 1e-5},
    "mask_adaptive_embedding_lookup": {
        "x": ids(N, B, T), "tables": [real(6, 8), real(4, 4)], "projs": [real(8, 8), real(4, 8)], "cutoffs": [6],
        "d_proj": 8,
    },
    "mask_adaptive_logsoftmax": {**SOFTMAX, "target": ids(N, B, T)},
    "multihead_attn": {
        "w": XL["w"], "attn_mask": MASK, "mems": XL["mems"], "qkv_kernel": XL["qkv_kernel"], "o_kernel": real(H * D, E),
        "n_head": H,
    },
    "pairwise_scores": {"q": real(H, B, T, D), "r": real(H, B, T, T, D)},
    "point_wise_feed_forward_network": {"d_model": 8, "dff": 16},
    "positional_embedding": {"pos_seq": np.arange(5, dtype=np.float32), "inv_freq": real(4), "bsz": 2},
    "positional_encoding": {"position": 5, "d_model": 8},
    "positionwise_ff": {
        "inp": real(B, T, E), "kernel_1": real(E, 16), "bias_1": real(16), "kernel_2": real(16, E), "bias_2": real(E),
    },
    "register_positions": {"name": "only in a test"},
    "rel_multihead_attn": {**XL, "attn_mask": MASK, "o_kernel": real(H * D, E)},
    "rel_shift": {"x": real(B, H, T, M + T)},
    "relative_positions": {"klen": 5, "clamp_len": 3},
    "scaled_dot_product_attention": {
        "q": real(B, T, D), "k": real(B, 5, D), "v": real(B, 5, D), "mask": np.zeros([T, 5], np.float32),
    },
    "score_terms": XL,
    "shifted_scores": {"q": real(H, B, T, D), "r": real(H, M + T + 1, D), "first": T},
    "span_distances": POSITIONS,
    "static_adaptive_logsoftmax": {**SOFTMAX, "target": ids(N, B, T), "bin_capacities": [6]},
    "tener_position_scores": {**HEADS, "v_bias": real(H, D)},
    "tensor2tensor_frequencies": {"d_model": 8},
    "two_way_positions": {"length": 3, "d_head": 8},
    "two_way_scores": {"q": real(H, B, T, D), "r": real(2 * T, D)},
}  # fmt: skip


def call_of(name):
    """Right arguments of a function: those in `CALLS`, with tensors in place of arrays.

    `CALLS` has no tensors, because processes that collect tests make none (`forking.py`).
    """

    def as_tensor(x):
        return tf.constant(x) if isinstance(x, np.ndarray) and x.dtype != np.int64 else x

    return tf.nest.map_structure(as_tensor, CALLS[name])


def wrong_values():
    return {
        "None": None, "text": "text", "object": object(), "an empty list": [], "a dictionary": {}, "half": 0.5,
        "texts": tf.constant(["a"]), "a long row": tf.constant(real(7)),
        "ragged": tf.ragged.constant([[1.0], [1.0, 2.0]]),
    }  # fmt: skip


def wrong_calls(arguments):
    """`(what is wrong, arguments)` of calls with a wrong value, some of which may be right for some arguments."""
    for name, value in arguments.items():
        for what, wrong in wrong_values().items():
            yield f"{name}: {what}", {**arguments, name: wrong}
        if isinstance(value, tf.Tensor):
            yield f"{name}: one more axis", {**arguments, name: value[None]}
            yield f"{name}: one less axis", {**arguments, name: value[0]}
            yield f"{name}: wider", {**arguments, name: tf.concat([value, value[..., :1]], -1)}
        if isinstance(value, (list, tuple)):
            yield f"{name}: shorter", {**arguments, name: list(value)[:-1]}
        rest = {other: x for other, x in arguments.items() if other != name}
        yield f"without {name}", rest
    yield "an unknown name", {**arguments, "unknown": 1}


def functions():
    return {name for name in layers.__all__ if inspect.isfunction(getattr(layers, name))}


def test_every_public_function_has_its_shapes_and_a_call_here():
    assert functions() == SHAPES.keys() == CALLS.keys()
    for name, shapes in SHAPES.items():
        assert shapes.arguments.keys() <= inspect.signature(getattr(layers, name)).parameters.keys(), name


@pytest.mark.parametrize("name", sorted(CALLS))
def test_a_wrong_call_is_a_typed_error(name):
    function = getattr(layers, name)
    function(**call_of(name))
    refused = 0
    for what, arguments in wrong_calls(call_of(name)):
        try:
            function(**arguments)
        except ParameterError:
            refused += 1
        except Exception as error:
            raise AssertionError(f"{name} with {what} fails inside: {error!r}") from error
    assert refused >= 3


@pytest.mark.parametrize("call, name, error", [
    (lambda: layers.rel_multihead_attn(*FIRST, MASK, None, E, H, D, 0, 0, True, None), "rel_multihead_attn", CallError),
    (lambda: layers.rel_multihead_attn(*FIRST, MASK, XL["mems"], E, H, D), "qkv_kernel", ParameterError),
    (lambda: layers.rel_multihead_attn(**XL, attn_mask=MASK, n_head=H), "n_head", UnknownArgumentError),
    (lambda: layers.mask_adaptive_embedding_lookup(ids(N, B, T), N, 8, 8, [6]), "d_proj", ParameterError),
    (lambda: layers.mask_adaptive_embedding_lookup(ids(N, B, T), N, 8, 8, div_val=2), "div_val", UnknownArgumentError),
    (lambda: layers.mask_adaptive_logsoftmax(SOFTMAX["hidden"], ids(N, B, T), N, 8, 8, [6]), "tables", ParameterError),
    (lambda: layers.embedding_lookup(lookup_table=real(N, E), x=ids(N, B, T)), "lookup_table", UnknownArgumentError),
])  # fmt: skip
def test_calls_in_the_original_s_form_name_what_to_write(call, name, error):
    with raises_parameter(name, error=error) as raised:
        call()
    if name != "lookup_table":
        assert "The layer " in str(raised.value)


@pytest.mark.parametrize("change, name", [
    ({"w": real(T, B, E)}, "mems"),  # time first
    ({"r": real(1, M + T + 1, E)}, "r"),
    ({"attn_mask": np.full([T, M + T], 2, np.float32)}, "attn_mask"),
    ({"attn_mask": np.triu(np.ones([T, T], np.float32), 1)}, "attn_mask"),
    ({"dropatt": 1.0}, "dropatt"),
    ({"dropout_key": np.array([1, 2], np.int32)}, "dropout_key"),
])  # fmt: skip
def test_shapes_and_dtypes_of_relative_attention_are_checked_together(change, name):
    with raises_parameter(name):
        layers.rel_multihead_attn(**{**call_of("rel_multihead_attn"), **change})


def test_a_tensor_of_another_dtype_than_the_first_is_refused():
    arguments = call_of("rel_multihead_attn")
    with raises_parameter("r_kernel"):
        layers.rel_multihead_attn(**{**arguments, "r_kernel": tf.cast(arguments["r_kernel"], tf.float64)})


@pytest.mark.parametrize("dtype", [1, True, np.zeros([2], np.float32), "int32"])
def test_a_dtype_is_no_number_and_no_array(dtype):
    with raises_parameter("dtype"):
        layers.two_way_positions(3, 4, dtype)


def test_lists_and_arrays_become_tensors_of_the_dtype_of_the_others():
    arguments = call_of("layer_norm")
    given = {name: x.numpy().tolist() if isinstance(x, tf.Tensor) else x for name, x in arguments.items()}
    np.testing.assert_allclose(layers.layer_norm(**given), layers.layer_norm(**arguments), atol=1e-6)
    double = {name: np.float64(x) for name, x in call_of("tener_position_scores").items()}
    assert layers.tener_position_scores(**double).dtype == tf.float64
    double["q"] = call_of("tener_position_scores")["q"]
    assert layers.tener_position_scores(**double).dtype == tf.float32


def test_a_number_of_python_is_a_float_where_floats_are_asked_for():
    for x in (3, 3.0, [3]):
        assert layers.dropout(x, 0.5, None, row_axis=None).dtype == tf.float32


def test_the_entries_of_clusters_may_be_lists():
    arguments = call_of("mask_adaptive_logsoftmax")
    clusters = tuple(entry.numpy().tolist() for entry in arguments["clusters"])
    found = layers.mask_adaptive_logsoftmax(**{**arguments, "clusters": clusters})
    np.testing.assert_allclose(found, layers.mask_adaptive_logsoftmax(**arguments), rtol=1e-6)


@pytest.mark.parametrize("name", sorted(CALLS))
def test_symbolic_tensors_of_keras_are_used_or_refused_by_name(name):
    def as_symbolic(x):
        return keras.KerasTensor(x.shape, keras.backend.standardize_dtype(x.dtype)) if hasattr(x, "shape") else x

    function = getattr(layers, name)
    arguments = call_of(name)
    for argument, value in arguments.items():
        symbolic = tf.nest.map_structure(as_symbolic, value)
        if not any(map(keras.backend.is_keras_tensor, tf.nest.flatten(symbolic))):
            continue
        if argument in SHAPES[name].symbolic:
            results = keras.tree.flatten(function(**{**arguments, argument: symbolic}))
            assert any(map(keras.backend.is_keras_tensor, results)), argument
            continue
        with pytest.raises(ParameterError) as caught:
            function(**{**arguments, argument: symbolic})
        assert caught.value.name.split("[")[0] == argument


def test_position_scores_may_be_a_list_with_an_array_of_any_float_type_for_each_head():
    arguments = call_of("attend")
    of_heads = [np.float64(scores) for scores in arguments["position_scores"]]
    found = layers.attend(**{**arguments, "position_scores": of_heads})
    np.testing.assert_array_equal(found, layers.attend(**arguments))
    with raises_parameter("position_scores[1]"):
        layers.attend(**{**arguments, "position_scores": [of_heads[0], of_heads[1][..., :-1]]})


def test_position_scores_of_heads_have_one_shape():
    arguments = call_of("attend")
    first, second = (np.float32(scores) for scores in arguments["position_scores"])
    with raises_parameter("position_scores[1]"):
        layers.attend(**{**arguments, "position_scores": [first, second[..., :-1, :]]})


def test_functions_in_graphs_check_and_compute_the_same_and_can_be_pickled():
    x = call_of("rel_shift")["x"]
    np.testing.assert_array_equal(tf.function(layers.rel_shift)(x), layers.rel_shift(x))
    with raises_parameter("x"):
        tf.function(layers.rel_shift)(tf.zeros([5, 3]))
    assert pickle.loads(pickle.dumps(layers.rel_shift)) is layers.rel_shift


@pytest.mark.parametrize("module, name, allowed", [
    (layers, "_create_mask", "txl_tf.layers.create_mask"),
    (layers, "ProjectedAdaptiveLogSoftmax", "txl_tf.layers.AdaptiveSoftmax"),
    (txl_tf, "rel_shift", "txl_tf.layers.rel_shift"),
    (txl_tf, "AdaptiveSoftmax", "txl_tf.layers.AdaptiveSoftmax"),
    (txl_tf, "TransfoXLLMHeadModel", "txl_tf.TransformerXLLM"),
])  # fmt: skip
def test_a_name_at_another_place_is_named(module, name, allowed):
    with raises_parameter(f"{module.__name__}.{name}", name, allowed, UnknownNameError):
        getattr(module, name)
    assert not hasattr(module, name)


@pytest.mark.parametrize("call, name, error", [
    (lambda: layers.EncoderLayer(8, 2, 16)(real(B, T, E), False), "EncoderLayer", CallError),
    (lambda: layers.EncoderLayer(8, 2, 16)(), "EncoderLayer", CallError),
    (lambda: layers.EncoderLayer(8, 2, 16)(real(B, T, E), maks=None), "maks", UnknownArgumentError),
    (lambda: layers.RelMultiHeadAttn(8, 2, 4)(*FIRST, attn_mask={}, mems=XL["mems"]), "attn_mask", ParameterError),
    (lambda: layers.TenerAttn(8, 2)(real(B, T, E), mask=object()), "mask", ParameterError),
    (lambda: txl_tf.Vocab(["a", "b"]), "level", ArgumentTypeError),
    (lambda: txl_tf.Vocab(special="abc"), "special", ArgumentTypeError),
    (lambda: txl_tf.Vocab.load(["a"]), "path", ArgumentTypeError),
    (lambda: txl_tf.Vocab(level="char").encode(3), "texts", ArgumentTypeError),
    (lambda: txl_tf.Vocab(level="char").encode([b"abc"]), "texts", ParameterError),
    (lambda: txl_tf.Vocab(level="char").decode("abc"), "ids", ArgumentTypeError),
    (lambda: txl_tf.Lexicon("abc"), "words", ArgumentTypeError),
    (lambda: txl_tf.Lexicon([b"abc"]), "words", ArgumentTypeError),
    (lambda: txl_tf.Lexicon.load(None), "path", ArgumentTypeError),
    (lambda: txl_tf.allowed_transitions("O"), "labels", ArgumentTypeError),
    (lambda: txl_tf.segments(np.arange(20), 2, 3.5), "tgt_len", ArgumentTypeError),
    (lambda: txl_tf.tf1_variables("lm"), "lm", ArgumentTypeError),
    (lambda: txl_tf.make_optimizer("adam"), "learning_rate", ArgumentTypeError),
    (lambda: layers.create_mask(2, 0, same_length="no"), "same_length", ArgumentTypeError),
    (
        lambda: layers.document_mask(np.zeros([2, 2]), np.ones([1, 2], int), 0, same_length="no"),
        "same_length", ArgumentTypeError,
    ),
    *(
        (lambda name=name, value=value: layers.EncoderLayer(4, 2, 8)(tf.zeros([1, 2, 4]), **{name: value}), name,
         ParameterError)
        for value in ("no", 3, [1], [1.0, 2.0, 3.0], np.ones([2, 3], int))
        for name in ("dropout_key",)
    ),
    *(
        (lambda name=name, value=value: layers.EncoderLayer(4, 2, 8)(tf.zeros([1, 2, 4]), **{name: value}), name,
         ArgumentTypeError)
        for name, value in (("training", "no"), ("use_causal_mask", "no"), ("return_attention_scores", 2))
    ),
])  # fmt: skip
def test_wrong_calls_of_layers_and_other_public_names_are_typed_errors(call, name, error):
    with raises_parameter(name, error=error):
        call()


@pytest.mark.ci
def test_checked_methods_work_inside_a_function_of_tensorflow():
    """AutoGraph converts the code that it calls, also the checks."""
    sizes = {"n_token": 7, "n_layer": 1, "d_model": 4, "d_embed": 4, "n_head": 2, "d_head": 2, "d_inner": 4}
    lm, tokens = txl_tf.TransformerXLLM(**sizes, mem_len=3), tf.constant([[1, 2], [3, 4]])

    @tf.function
    def nll(tokens):
        return lm.score(tokens, tokens, lm.initial_mems(2))[0]

    with eagerly():
        expected, _ = lm.score(tokens, tokens)
    np.testing.assert_allclose(nll(tokens), expected, rtol=1e-6)
    with raises_parameter("labls", error=UnknownArgumentError):
        tf.function(lambda: lm.score(tokens, labls=tokens))()


def test_a_tied_softmax_has_no_initializer():
    with raises_parameter("initializer", "zeros"):
        layers.AdaptiveSoftmax(7, 4, 4, initializer="zeros")
    assert layers.AdaptiveSoftmax(7, 4, 4, tie_weight=False, initializer="zeros").get_config()["initializer"]


DONE = np.array([[0, 1, 0], [0, 0, 1]])
TOKENS = np.array([[3, 1, 0], [2, 3, 1]], np.int32)  # 0 begins a document after the token that is done


@pytest.mark.parametrize("done", [DONE, DONE.tolist(), DONE.astype(bool), DONE.astype(np.float32)])
def test_documents_are_found_from_done_alone(done):
    found = layers.document_mask(MASK, done=done)
    expected = layers.document_mask(MASK, TOKENS, 0)
    for one, other in zip(found[:3], expected[:3], strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(found.last, [[2], [T]])  # the second row ends a document
    both = layers.document_mask(MASK, TOKENS, 3, done=done)
    np.testing.assert_array_equal(both.starts, [[0, 0, 2], [-(1 << 30), 1, 1]])


@pytest.mark.ci
@pytest.mark.parametrize("same_length", [True, False])
@pytest.mark.parametrize("names", [["tokens"], ["done"], ["tokens", "lengths"], ["tokens", "done", "lengths"]])
def test_symbolic_inputs_give_the_masks_of_documents_also_from_a_file(tmp_path, names, same_length):
    values = {"tokens": TOKENS, "done": DONE.astype(bool), "lengths": np.array([2, 3], np.int32)}
    values = {name: tf.constant(values[name]) for name in names}
    inputs = {name: keras.Input(x.shape[1:], dtype=x.dtype.name) for name, x in values.items()}
    options = {"reset_token": 0 if "tokens" in names else None, "same_length": same_length}
    memory = tf.constant(real(B, M, E))
    expected = layers.document_mask(MASK, **values, **options)
    expected = [*expected, *expected.forget([memory], values.get("lengths"))]
    symbolic_memory = keras.Input([M, E])
    mask = layers.document_mask(MASK, **inputs, **options)
    outputs = [*mask, *mask.forget([symbolic_memory], inputs.get("lengths"))]
    model = keras.Model([*inputs.values(), symbolic_memory], outputs)
    model.save(tmp_path / "model.keras")
    for functional in (model, keras.models.load_model(tmp_path / "model.keras")):
        for one, other in zip(functional([*values.values(), memory]), expected, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("arguments, name, value", [
    ({}, "reset_token", None),
    ({"tokens": TOKENS}, "reset_token", None),
    ({"reset_token": 0}, "tokens", None),
    ({"reset_token": 0, "done": DONE}, "tokens", None),
    ({"reset_token": 0.5, "done": DONE, "tokens": TOKENS}, "reset_token", 0.5),
    ({"done": DONE[:, :2]}, "done", None),
    ({"done": DONE[:1], "tokens": TOKENS}, "done", None),
    ({"done": DONE[:1], "lengths": np.array([2, 3])}, "done", None),
    ({"done": DONE[0]}, "done", None),
    ({"done": DONE + 1}, "done", None),
    ({"done": "abc"}, "done", None),
])  # fmt: skip
def test_documents_that_cannot_be_found_are_typed_errors(arguments, name, value):
    with raises_parameter(name) as raised:
        layers.document_mask(MASK, **arguments)
    assert name == "done" or raised.value.value == value


def test_arguments_that_may_be_none_by_the_signature_may_be_none():
    for name, shapes in SHAPES.items():
        parameters = inspect.signature(getattr(layers, name)).parameters
        for argument, description in shapes.arguments.items():
            is_optional = parameters[argument].default is None
            assert description.split()[0].endswith("?") or not is_optional, (name, argument)


@pytest.mark.parametrize("name, argument", [("multihead_attn", "attn_mask"), ("attend", "position_scores")])
def test_a_tensor_of_unknown_rank_is_a_typed_error(name, argument):
    @tf.function(input_signature=[tf.TensorSpec(None)], autograph=False)
    def call(tensor):
        return getattr(layers, name)(**{**CALLS[name], argument: tensor})

    with raises_parameter(argument):
        call.get_concrete_function()
