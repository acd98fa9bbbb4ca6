"""What a GPU would run, by TensorFlow's own register of kernels: no machine here has a GPU.

A graph's operation runs on the GPU where a kernel for it and its types is registered; else it runs on the host, and the
GPU waits. Only text and messages are meant for the host.
"""

import collections
import functools
import itertools

import pytest
import tensorflow as tf
from conforming import MODELS, SLOW
from helpers import SMALL, word_vocab
from tensorflow.python.framework import kernels

import txl_tf
from txl_tf.kernels.dropout import dropout, split

CASES_BY_NAME = {case.name: case for case in (*MODELS, *SLOW)}
PLAIN = CASES_BY_NAME["language_model"]
DEMANDING = CASES_BY_NAME["adaptive_language_model"]  # the one with bins

pytestmark = pytest.mark.skipif(
    not tf.test.is_built_with_gpu_support(),
    reason="this TensorFlow (tensorflow-cpu, or that of macOS) registers no kernels for GPUs",
)


def slow_but_for(fast, cases):
    """Parameters of a test that is fast for one case alone."""
    return [pytest.param(case, id=case.name, marks=[pytest.mark.slow] * (case is not fast)) for case in cases]


CASES = slow_but_for(DEMANDING, CASES_BY_NAME.values())
LANGUAGE_MODELS = slow_but_for(DEMANDING, [case for case in CASES_BY_NAME.values() if "language_model" in case.name])
TAGGERS = [CASES_BY_NAME[name] for name in ("tener", "flat", "bilstm")]
TRANSFORMERS = [case for case in CASES_BY_NAME.values() if case.name.startswith("transformer")]

# Operations that stay on the host, and why.
MESSAGES = {"Const", "StringJoin", "AsString", "StringFormat"}  # what a refused request is told, of text
TEXT = {  # from text to ids and back: TensorFlow has no kernels of text for GPUs
    "StringLength", "StaticRegexReplace", "StringSplitV2", "LookupTableFindV2", "SelectV2", "Reshape", "GatherV2",
    "Equal", "StridedSlice", "UnsortedSegmentJoin", "UnicodeDecodeWithOffsets", "UnicodeEncode", "StringLower",
    "UnicodeTranscode",  # whether a text is UTF-8
    "DecodeRaw", "DenseBincount", "RaggedTensorToTensor",  # of the words of each text
}  # fmt: skip


def nodes(function):
    """All operations of a graph and of the functions in it, but for calls of these functions."""
    graph = function.graph.as_graph_def()
    functions = {inner.signature.name for inner in graph.library.function}
    for part in (graph.node, *(inner.node_def for inner in graph.library.function)):
        yield from (node for node in part if node.op not in functions)


def types_of(node, name):
    attribute = node.attr[name]
    return set(attribute.list.type) if attribute.HasField("list") else {attribute.type}


@functools.cache
def kernels_of(op):
    """`{attribute: types}` of every kernel of an operation that is for a GPU, or for any device."""
    found = [k for k in kernels.get_registered_kernels_for_op(op).kernel if k.device_type in ("GPU", "DEFAULT")]
    return [{c.name: set(c.allowed_values.list.type) for c in k.constraint} for k in found]


def runs_on_gpu(node):
    """Whether a kernel for a GPU, or for any device, takes the node's types."""
    return any(
        all(not types or types_of(node, name) <= types for name, types in constraints.items())
        for constraints in kernels_of(node.op)
    )


def on_host(function):
    """`{operation: how often}` of what has no kernel for a GPU."""
    return collections.Counter(node.op for node in nodes(function) if not runs_on_gpu(node))


def training(case, **options):
    """The graph of a training step."""
    model, batch = case.compile(case.make_random(), **options), tf.nest.map_structure(tf.constant, case.make_batch())
    if not hasattr(model, "initial_mems"):
        model.optimizer.build(model.trainable_variables)
        return tf.function(lambda *batch: model.train_step(batch)).get_concrete_function(*batch)
    model._ready_to_train("fit")
    step = tf.function(lambda tokens, labels, mems: model.train_step((tokens, labels), mems))
    return step.get_concrete_function(*batch, model.initial_mems(4))


@pytest.fixture(scope="module")
def graph_of():
    """`training`, of each model once."""
    return functools.cache(training)


def test_the_register_tells_gpus_from_processors():
    """The check can fail: text has kernels for processors alone, and a type may have one or not."""
    graph = tf.function(lambda x: tf.strings.lower(tf.as_string(tf.matmul(x, x)))).get_concrete_function(
        tf.ones([2, 2])
    )
    assert on_host(graph) == {"AsString": 1, "StringLower": 1}
    total = tf.function(lambda x: tf.reduce_max(x))
    assert on_host(total.get_concrete_function(tf.ones([3], tf.uint16))) == {"Max": 1}
    assert not on_host(total.get_concrete_function(tf.ones([3])))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_training_runs_on_the_gpu(case, graph_of):
    """Taggers check their tags; what they would say of wrong ones is text, and on the host."""
    graph = graph_of(case)
    on_host_types = [types_of(node, "dtype") for node in nodes(graph) if node.op == "Const" and not runs_on_gpu(node)]
    assert set(on_host(graph)) <= ({"Const"} if case in TAGGERS else set())
    assert all(types == {tf.string.as_datatype_enum} for types in on_host_types)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case, dtype",
    [
        (PLAIN, "mixed_float16"),
        pytest.param(DEMANDING, "mixed_float16", marks=pytest.mark.slow),
        pytest.param(DEMANDING, "mixed_bfloat16", marks=pytest.mark.slow),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_training_in_half_precision_runs_on_the_gpu(case, dtype):
    assert not on_host(training(case._replace(make=lambda _: case.make(dtype))))


@pytest.mark.parametrize(
    "row_axis, dtype",
    [
        (1, tf.bfloat16),
        *(
            pytest.param(row_axis, dtype, marks=pytest.mark.slow)
            for row_axis, dtype in itertools.product([0, 1, None], [tf.float32, tf.bfloat16, tf.float16])
            if (row_axis, dtype) != (1, tf.bfloat16)
        ),
    ],
    ids=str,
)
def test_dropout_runs_on_the_gpu(row_axis, dtype):
    """The models above have none."""
    x, key = tf.TensorSpec([None, None, None], dtype), tf.TensorSpec([3], tf.int32)

    @tf.function(autograph=False)
    def drop(x, key):
        return tf.stack([dropout(x, 0.1, key, row_axis) for key in split(key, 2)])

    assert not on_host(drop.get_concrete_function(x, key))


@pytest.mark.parametrize("static_shapes", [False, True])
@pytest.mark.parametrize("case", LANGUAGE_MODELS)
@pytest.mark.slow
def test_evaluation_runs_on_the_gpu(case, static_shapes):
    lm, batch = case.compile(case.make_random(), static_shapes=static_shapes), map(tf.constant, case.make_batch())
    carried = lm.start_evaluation(4, 5)
    step = tf.function(lambda tokens, labels: lm.evaluation_nll(tokens, labels, carried)[0])
    assert not on_host(step.get_concrete_function(*batch))


@pytest.mark.parametrize("case", LANGUAGE_MODELS)
def test_scoring_of_lines_runs_on_the_gpu(case):
    ids = tf.TensorSpec([None, None], tf.int32)
    first_nll = tf.function(case.make_random().first_nll, autograph=False)
    # A message, if the lines are longer than a table of learned positions.
    assert on_host(first_nll.get_concrete_function(ids, ids)).keys() <= MESSAGES


@pytest.mark.slow
def test_what_the_gpu_waits_for(graph_of):
    """How many tokens each bin has: of two bins, both are asked in the embedding, the second in the softmax.

    With static shapes, or one bin, nothing is asked.
    """
    static = training(DEMANDING, static_shapes=True, bin_capacities=[20])
    for function, n_where in ((graph_of(DEMANDING), 3), (static, 0)):
        assert collections.Counter(node.op for node in nodes(function))["Where"] == n_where
    one_bin = collections.Counter(node.op for node in nodes(graph_of(PLAIN)))
    assert one_bin["Where"] == one_bin["Unique"] == 0


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """`{name: function}` of the signatures of a served language model."""
    lm = txl_tf.TransformerXLLM(**SMALL, mem_len=4, cutoffs=[5, 12], div_val=2)
    folder = str(tmp_path_factory.mktemp("served"))
    txl_tf.export_saved_model(lm, folder, word_vocab())
    return dict(tf.saved_model.load(folder).signatures)


@pytest.mark.slow
@pytest.mark.parametrize("name", "initial_state score next generate score_text generate_text generate_texts".split())
def test_a_served_model_runs_on_the_gpu_but_for_text(served, name):
    text = name.endswith(("_text", "_texts"))
    assert set(on_host(served[name])) <= MESSAGES | (TEXT if text else set())
    if not text:  # nothing but text is on the host
        assert {t for node in nodes(served[name]) if node.op == "Const" and not runs_on_gpu(node)
                for t in types_of(node, "dtype")} <= {tf.string.as_datatype_enum}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", slow_but_for(TAGGERS[1], TAGGERS))
def test_tagging_runs_on_the_gpu(case):
    tagger = case.make("float32")
    inputs = tf.nest.map_structure(tf.constant, case.inputs())
    tagger(inputs)  # builds it
    assert not on_host(tf.function(tagger.decode).get_concrete_function(inputs))


@pytest.mark.slow
@pytest.mark.parametrize("case", [*TAGGERS, *TRANSFORMERS], ids=lambda case: case.name)
def test_served_taggers_and_translators_run_on_the_gpu_but_for_messages(case, tmp_path):
    model = case.make("float32")
    model(tf.nest.map_structure(tf.constant, case.inputs()))  # builds it
    txl_tf.export_saved_model(model, tmp_path / "1", warmup=False)
    signatures = tf.saved_model.load(str(tmp_path / "1")).signatures
    for name, function in signatures.items():
        assert set(on_host(function)) <= MESSAGES, name
    assert signatures
