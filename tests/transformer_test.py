"""The encoder-decoder: padding never counts, dropout is the same on any number of replicas, cached equals uncached.

Training by Keras's methods: both forms of a batch, weights, what is frozen, export.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import ANY, assert_regularized, mentions, raises_naming, raises_parameter, randomise

import txl_tf
from txl_tf.errors import ParameterError
from txl_tf.vanilla.transformer import Transformer

SMALL = {
    "num_layers": 2, "d_model": 12, "num_heads": 3, "dff": 20, "input_vocab_size": 9, "target_vocab_size": 9,
    "max_len": 30, "rate": 0.0,
}  # fmt: skip
ALL = {"norm_first": True, "share_embeddings": True, "pos_embed": "learned"}
OPTIONS = [
    ALL,
    {"pos_embed": "rotary"},
    *(pytest.param(one, marks=pytest.mark.slow) for one in ({"norm_first": True}, {"share_embeddings": True})),
]
PLAIN = pytest.param({}, marks=pytest.mark.slow)


def make(**options):
    model = Transformer(**{**SMALL, **options})
    randomise(model)
    return model


def pairs(rows=4, source=6, target=5, seed=0):
    rng = np.random.default_rng(seed)
    sources = rng.integers(3, 9, [rows, source]).astype(np.int32)
    targets = rng.integers(3, 9, [rows, target]).astype(np.int32)
    targets[:, 0] = 1
    return sources, targets


@pytest.mark.parametrize("options", [*OPTIONS, PLAIN], ids=str)
def test_padding_never_changes_a_result(options):
    model, (source, target) = make(**options), pairs()
    expected = model((source, target)).numpy()
    padded = model((np.pad(source, [[0, 0], [0, 4]]), np.pad(target, [[0, 0], [0, 3]])))
    np.testing.assert_allclose(padded[:, :5], expected, atol=2e-5)


def test_attention_of_all_layers_is_that_of_the_call_by_name():
    model, (source, target) = make(), pairs()
    _, weights = model.forward((source, target))
    names = {"cross": "decoder_layer{}_block2", "encoder": "encoder_layer{}", "decoder": "decoder_layer{}_block1"}
    for which, name in names.items():
        found = model.attention(source, target, which)
        for layer in range(2):
            expected = np.swapaxes(weights[name.format(layer)], 0, 1)
            np.testing.assert_allclose(found[layer], expected, rtol=1e-6)
    with raises_parameter("which", "both", limit="decoder"):
        model.attention(source, target, "both")


def test_a_row_is_what_it_is_alone_and_the_future_does_not_count():
    model, (source, target) = make(), pairs()
    whole = model((source, target)).numpy()
    np.testing.assert_allclose(model((source[2:3], target[2:3]))[0], whole[2], atol=2e-5)
    changed = target.copy()
    changed[:, 3:] = 4
    np.testing.assert_allclose(model((source, changed))[:, :3], whole[:, :3], atol=2e-5)
    other = source.copy()
    other[:, 0] = 8
    assert np.abs(model((other, target)) - whole).max() > 1e-3


def test_the_loss_is_the_mean_over_labels_that_are_no_padding_smoothed():
    model, (source, target) = make(num_layers=1, label_smoothing=0.1), pairs()
    labels = np.pad(target[:, 1:], [[0, 0], [0, 1]])
    labels[1, 2:] = 0
    logits = model((source, target)).numpy().astype(np.float64)
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    nll = smoothed = right = count = 0
    for b, t in np.argwhere(labels):
        nll -= log_probs[b, t, labels[b, t]]
        smoothed -= 0.9 * log_probs[b, t, labels[b, t]] + 0.1 * log_probs[b, t].mean()
        right += logits[b, t].argmax() == labels[b, t]
        count += 1
    found = model.loss_of((source, target), tf.constant(labels))
    np.testing.assert_allclose(found, [nll, smoothed, right, count], rtol=1e-5)


def greedy(model, source, start, end, most):
    """Without a cache: the whole targets again for every symbol."""
    targets, scores = np.full([len(source), 1], start, np.int32), np.zeros(len(source))
    for _ in range(most):
        logits = model((source, targets))[:, -1].numpy().astype(np.float64)
        log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        log_probs[:, 0] = -np.inf
        written = np.logical_not(np.any(targets[:, 1:] == end, 1))
        best = np.where(written, log_probs.argmax(-1), 0)
        scores += np.where(written, np.take_along_axis(log_probs, best[:, None], 1)[:, 0], 0)
        targets = np.append(targets, best[:, None], 1).astype(np.int32)
    return targets[:, 1:], scores


@pytest.mark.parametrize("options", [*OPTIONS, pytest.param({}, marks=pytest.mark.slow)], ids=str)
def test_cached_greedy_decoding_is_the_uncached_one(options):
    model, (source, _) = make(**options), pairs(rows=5)
    source[1, 3:] = 0
    ids, scores = model.generate(source, start=1, end=2, max_new_tokens=7)
    expected, expected_scores = greedy(model, source, 1, 2, 7)
    np.testing.assert_array_equal(ids, expected)
    np.testing.assert_allclose(scores, expected_scores, rtol=1e-4)


@pytest.mark.slow
def test_sampling_follows_the_seed_of_a_row_and_no_other_row():
    model, (source, _) = make(num_layers=1), pairs(rows=3)
    options = {"start": 1, "end": 2, "max_new_tokens": 9, "temperature": 1.0}
    whole, scores = model.generate(source, seed=[5, 6, 7], **options)
    alone, score = model.generate(source[1:2], seed=[6], **options)
    np.testing.assert_array_equal(whole[1], alone[0])
    np.testing.assert_allclose(scores[1], score[0], rtol=1e-4)
    other, _ = model.generate(source, seed=[8, 9, 10], **options)
    assert np.any(other != whole)
    coldest, _ = model.generate(source, seed=1, top_k=1, **options)
    np.testing.assert_array_equal(coldest, model.generate(source, **{**options, "temperature": 0.0})[0])


@pytest.mark.slow
def test_dropout_is_the_same_on_two_replicas_and_under_xla(two_replicas):
    def train(**options):
        model = make(rate=0.2, dropatt=0.1, dropact=0.1, seed=3)
        model.compile(txl_tf.make_optimizer(learning_rate=1e-2, train_steps=100), **options)
        dataset = tf.data.Dataset.from_tensors(pairs(rows=4)).repeat(6)
        history = model.fit(dataset, verbose=0).history
        return history["loss"][0], [weight.numpy() for weight in model.trainable_variables]

    loss, weights = train()
    with two_replicas.scope():
        of_two = train()
    for found, found_weights in (of_two, train(jit_compile=True), train(steps_per_execution=3)):
        assert found == pytest.approx(loss, rel=1e-5)
        for array, expected in zip(found_weights, weights, strict=True):
            np.testing.assert_allclose(array, expected, atol=2e-4)


@pytest.mark.slow
def test_fit_takes_arrays_and_generators_as_keras_does_and_learns():
    rng = np.random.default_rng(0)
    source = rng.integers(3, 9, [256, 5]).astype(np.int32)
    target = np.pad(source[:, ::-1], [[0, 0], [1, 1]], constant_values=((0, 0), (1, 2)))  # to be read backwards
    model = Transformer(**{**SMALL, "norm_first": True}, seed=0)
    model.compile(txl_tf.make_optimizer(learning_rate=1e-2, train_steps=400, warmup_steps=20))
    model.fit(source, target, batch_size=32, epochs=40, verbose=0)
    loss, accuracy = model.evaluate(source, target, verbose=0)
    assert loss < 0.2 and accuracy > 0.95
    ids, _ = model.generate(source[:20], start=1, end=2, max_new_tokens=8, beam_size=3)
    assert np.mean(ids[:, :6] == target[:20, 1:]) > 0.9


# ---------------------------------------- forms of a batch, and weights

TARGETS = np.array([[1, 5, 4, 7, 2], [1, 3, 2, 0, 0], [1, 6, 6, 2, 0], [1, 8, 2, 0, 0]], np.int32)


class Stepping:
    """A model whose every call trains one batch from the same weights on."""

    def __init__(self, **options):
        self.model = make(num_layers=1, **options)
        optimizer = txl_tf.make_optimizer(0.1, optimizer="sgd", schedule="constant", momentum=0.0, clip=None)
        self.model.compile(optimizer, run_eagerly=True)
        self.start = self.model.get_weights()

    def __call__(self, x, y, **weights):
        self.model.set_weights(self.start)
        logs = self.model.train_on_batch(x, y, return_dict=True, **weights)
        return logs, self.model.get_weights()

    def assert_same(self, batch, other, rtol=1e-5):
        (logs, weights), (expected, expected_weights) = (self(*x[:2], **x[2]) for x in (batch, other))
        assert logs == pytest.approx(expected, rel=rtol)
        for found, array in zip(weights, expected_weights, strict=True):
            np.testing.assert_allclose(found, array, rtol=0, atol=rtol)


@pytest.fixture(scope="module")
def stepping():
    return Stepping(label_smoothing=0.1)


@pytest.mark.ci
def test_a_batch_may_come_as_source_and_target_or_as_source_and_shifted_targets(stepping):
    source, _ = pairs()
    shifted = (source, TARGETS[:, :-1]), TARGETS[:, 1:]
    stepping.assert_same((*shifted, {}), (source, TARGETS, {}), rtol=0)
    assert np.any(stepping(*shifted)[1][0] != stepping.start[0])
    model = stepping.model
    expected = model.evaluate(source, TARGETS, verbose=0)
    for data in (shifted, (tf.data.Dataset.from_tensors(shifted),), ([source, TARGETS[:, :-1]], TARGETS[:, 1:])):
        assert model.evaluate(*data, verbose=0) == expected
    loss = model.fit(*shifted, verbose=0, validation_data=(source, TARGETS)).history["val_loss"]
    other = model.fit(tf.data.Dataset.from_tensors(shifted), verbose=0, validation_data=shifted).history["val_loss"]
    assert other < loss < [expected[0]]
    np.testing.assert_allclose(model.predict((source, TARGETS), verbose=0), model((source, TARGETS)), atol=1e-6)


@pytest.mark.ci
def test_labels_and_rows_count_by_their_weights(stepping):
    """Weights of 0 train nothing; a row of weight 2 is the row twice; a label of weight 0 is padding."""
    source, _ = pairs()
    logs, weights = stepping(source, TARGETS, sample_weight=np.zeros(4))
    assert logs == {"loss": 0, "accuracy": 0, "grad_norm": 0}
    assert all(np.array_equal(found, array) for found, array in zip(weights, stepping.start, strict=True))

    rows = np.array([1.0, 2.0, 0.0, 1.0])
    twice = [0, 1, 1, 3]
    stepping.assert_same((source, TARGETS, {"sample_weight": rows}), (source[twice], TARGETS[twice], {}))
    stepping.assert_same(
        (source, TARGETS, {"sample_weight": rows[:, None]}),
        (source, TARGETS, {"sample_weight": np.tile(0.1 * rows[:, None], 4)}),
    )
    kept = np.array([[1, 0, 1, 1], [0, 1, 1, 1], [1, 1, 1, 0], [1, 1, 0, 0]])
    x, y = (source, TARGETS[:, :-1]), TARGETS[:, 1:]
    stepping.assert_same((x, y, {"sample_weight": kept}), (x, y * kept, {}))
    of_class = np.where(y == 2, 3.0, np.where(y == 6, 0.5, 1.0))
    classes = {"class_weight": {2: 3, np.int64(6): 0.5, 0: 9}}
    stepping.assert_same((x, y, classes), (x, y, {"sample_weight": of_class}))
    stepping.assert_same((source, TARGETS, classes), (x, y, {"sample_weight": of_class}))


def test_evaluation_weighs_loss_and_accuracy_alike_over_all_batches(stepping):
    source, _ = pairs()
    model, targets = stepping.model, TARGETS.copy()
    targets[:2, 1] = model((source, targets))[:2, 0].numpy().argmax(-1)  # two are right
    labels = targets[:, 1:]
    weights = np.random.default_rng(0).uniform(0, 0.2, labels.shape).astype(np.float32)
    logits = model((source, targets[:, :-1])).numpy().astype(np.float64)
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    nll = -np.take_along_axis(log_probs, labels[..., None], -1)[..., 0]
    counted = np.where(labels != 0, weights, 0)
    expected = [np.average(x, weights=counted) for x in (nll, logits.argmax(-1) == labels)]
    assert model.evaluate(source, targets, 3, sample_weight=weights, verbose=0) == pytest.approx(expected, rel=1e-5)
    triples = tf.data.Dataset.from_tensor_slices((source, targets, weights)).batch(3)
    assert model.evaluate(triples, verbose=0) == pytest.approx(expected, rel=1e-5)
    assert model.test_on_batch(source, targets, sample_weight=weights) == pytest.approx(expected, rel=1e-5)
    assert 0 < expected[1] < 1


class Rows(keras.utils.PyDataset):
    def __init__(self, *arrays):
        super().__init__()
        self.arrays = arrays

    def __len__(self):
        return 2

    def __getitem__(self, i):
        return tuple(array[2 * i : 2 * i + 2] for array in self.arrays)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow) for kind in ("arrays", "generator", "rows")] + ["dataset"]
)
def test_fit_weighs_classes_of_all_kinds_of_data_and_the_validation_not(kind):
    source, _ = pairs()
    model, classes = make(num_layers=1), {2: 3.0}
    model.compile(keras.optimizers.Adam(0.0))  # the loss says what counted
    with raises_parameter("y", None):  # and leaves nothing behind
        model.fit(source, verbose=0)
    of_class = np.where(TARGETS[:, 1:] == 2, 3.0, 1.0)

    def mean(rows, weights=None):
        nll, _, _, total = model.loss_of((source[rows], TARGETS[rows, :-1]), TARGETS[rows, 1:], weights)
        return float(nll / total)

    def fit(*data, **options):
        return model.fit(*data, verbose=0, shuffle=False, **options).history

    plain, weighted = mean(slice(4)), mean(slice(4), of_class)
    assert weighted != pytest.approx(plain, rel=1e-2)
    if kind == "arrays":
        assert fit(source, TARGETS, class_weight=classes)["loss"] == pytest.approx([weighted], rel=1e-5)
        assert fit(source, TARGETS)["loss"] == pytest.approx([plain], rel=1e-5)  # by another graph
    model.run_eagerly = True
    model.make_train_function(force=True)
    dataset = tf.data.Dataset.from_tensor_slices((source, TARGETS)).batch(2)
    data = {
        "arrays": (source, TARGETS),
        "dataset": (dataset,),
        "generator": (((source[i : i + 2], TARGETS[i : i + 2]) for i in (0, 2)),),
        "rows": (Rows(source, TARGETS),),
    }[kind]
    assert fit(*data, class_weight=classes)["loss"] == pytest.approx([weighted], rel=1e-5)
    split = fit(source, TARGETS, class_weight=classes, validation_split=0.5)
    assert split["val_loss"] == pytest.approx([mean(slice(2, 4))], rel=1e-5)


BAD_BATCHES = [
    ((), {}, "y", "fit((source, target_in), target_out)"),
    ((TARGETS,), {"sample_weight": np.ones([4, 5])}, "sample_weight", "[batch, labels=4]"),
    ((TARGETS,), {"sample_weight": np.ones([4, 4, 1])}, "sample_weight", "[batch, labels=4]"),
    ((TARGETS,), {"class_weight": {9: 1.0}}, "class_weight", "0 to 8"),
    ((TARGETS,), {"class_weight": [1.0]}, "class_weight", "a dictionary"),
    ((TARGETS,), {"class_weight": {1: "x"}}, "class_weight", "numbers"),
    ((TARGETS,), {"class_weight": {1: 2.0}, "sample_weight": np.ones(4)}, "class_weight", "None"),
]


def test_bad_batches_are_one_clear_error(stepping):
    source, _ = pairs()
    for arguments, weights, name, limit in BAD_BATCHES:
        with raises_parameter(name, limit=limit):
            stepping.model.train_on_batch(source, *arguments, **weights)
            pytest.fail(f"no error: {name}")
    with raises_parameter("y", limit="batch=4, target=5"):
        stepping.model.fit((source, TARGETS), TARGETS[:, 1:], verbose=0)
    with raises_parameter("y"):
        stepping.model.train_on_batch(source, TARGETS[:, :1])
    with raises_parameter("y"):  # not wrapped to what int32 holds
        stepping.model.test_on_batch((source, TARGETS), TARGETS.astype("int64") + 2**32)


@pytest.mark.ci
@pytest.mark.parametrize("outside", [-100, 9])
def test_ids_outside_the_vocabulary_have_a_name(outside):
    """In arrays before the first step, and in calls."""
    model, (source, target) = make(num_layers=1), pairs()
    model.compile("sgd")
    wrong_source, wrong_target = (
        np.where(np.arange(ids.size).reshape(ids.shape) == 3, outside, ids) for ids in pairs()
    )
    batches = [((wrong_source, target), "x"), ((source, wrong_target), "y")]
    batches += [(((source, wrong_target[:, :-1]), target[:, 1:]), "x[1]")]
    for batch, name in batches:
        for method in (model.fit, model.evaluate):
            with raises_parameter(name):
                method(*batch, verbose=0)
    with raises_parameter("inputs[0]"):
        model((wrong_source, target))
    with raises_parameter("x[1]"):
        model.predict((source, wrong_target), verbose=0)


@pytest.mark.ci
@pytest.mark.parametrize("jit_compile", [False, True])
def test_ids_outside_the_vocabulary_have_a_name_in_datasets(jit_compile):
    """The input pipeline finds them, so XLA and GPUs do not compute with them."""
    model, (source, target) = make(num_layers=1), pairs()
    model.compile("sgd", jit_compile=jit_compile)
    wrong_source, wrong_target = (np.where(ids == ids[1, 2], 9, ids) for ids in (source, target))
    for batch, name in [
        ((wrong_source, target), "x"),
        ((source, wrong_target), "y"),
        (((source, wrong_target[:, :-1]), target[:, 1:]), "x[1]"),
        ((source, target, -np.ones(len(source))), "weights"),
    ]:
        bad = tf.data.Dataset.from_tensors(batch)
        for method in (model.evaluate, model.fit)[: 1 if jit_compile else 2]:
            with raises_naming(tf.errors.InvalidArgumentError, name):
                method(bad, verbose=0)
    with raises_naming(tf.errors.InvalidArgumentError, "x[1]"):
        model.predict(tf.data.Dataset.from_tensors(((source, wrong_target),)), verbose=0)


@pytest.mark.ci
def test_arrays_of_a_wrong_length_have_a_name_after_other_lengths():
    """A graph that has seen several lengths knows none of them."""
    model = make(num_layers=1, max_len=7)
    model.compile("sgd")
    long = np.full([4, 8], 3)
    for width in (4, 3):
        source, target = pairs(source=width, target=width)
        model.evaluate(source, target, verbose=0)
        model.predict((source, target), verbose=0)
    for method in (model.evaluate, model.fit):
        for x, y, name, limit in (
            (source, target[:, :1], "y", "a start and what follows it"),
            (long, target, "x", "max_len=7"),
            (source, np.full([4, 9], 3), "y", "max_len=7 + 1"),
            ((long, target), target, "x[0]", "max_len=7"),
            ((source, target), target[:, 1:], "y", "target=3"),
        ):
            with raises_parameter(name, limit=limit):
                method(x, y, verbose=0)
    before = [weight.numpy() for weight in model.weights]
    with raises_parameter("y"):
        model.fit(source, target, validation_data=(source, target[:, :1]), verbose=0)
    for weight, expected in zip(model.weights, before, strict=True):
        np.testing.assert_array_equal(weight, expected)
    with raises_parameter("x[1]", 8, limit="max_len=7"):
        model.predict((source, long), verbose=0)
    assert model.evaluate(long[:, :7], long, verbose=0)[0] > 0  # 7 tokens to read, and one label more


def dataset_of(batches):
    """Batches of one row, `(source, target)` or `((source, target), labels)` of these lengths, unknown to the graph."""
    ids = tf.TensorSpec([None], tf.int32)
    shifted = isinstance(batches[0][1], tuple)

    def read():
        for source, target in batches:
            source, *targets = (np.full(n, 3, np.int32) for n in (source, *np.ravel(target)))
            yield ((source, targets[0]), targets[1]) if shifted else (source, *targets)

    signature = ((ids, ids), ids) if shifted else (ids, ids)
    return tf.data.Dataset.from_generator(read, output_signature=signature).padded_batch(1)


@pytest.mark.ci
@pytest.mark.parametrize(
    "max_len, cases",
    [
        (
            7,
            [
                ([(4, 5), (8, 5)], ("max_len=7", 8)),
                ([(4, 5), (3, 9)], ("max_len=7", 8)),
                ([(4, 5), (3, 1)], ("y", "a start")),  # no label would be a loss of 0
                ([(4, (1, 1)), (4, (1, 3))], ("y", "x[1]", 1, 3)),
            ],
        ),
        (1, [([(1, 2), (3, 2)], ("max_len=1", 3))]),  # one position would broadcast to all tokens
    ],
    ids=["several positions", "one position"],
)
def test_a_wrong_length_in_a_dataset_of_unknown_lengths_has_a_name(max_len, cases):
    model = make(num_layers=1, max_len=max_len)
    model.compile("sgd")
    for method in [model.fit] * (max_len == 1) + [model.evaluate]:
        for batches, facts in cases:
            with pytest.raises(tf.errors.InvalidArgumentError) as caught:
                method(dataset_of(batches), verbose=0)
            assert mentions(str(caught.value), *facts) and "node" not in str(caught.value)


@pytest.mark.ci
def test_a_dataset_without_ranks_trains_as_its_arrays_do():
    model = make(num_layers=1)
    model.compile("sgd")
    batch = pairs()
    dataset = tf.data.Dataset.from_generator(lambda: iter([batch]), output_types=(tf.int32, tf.int32))
    expected = model.evaluate(*batch, verbose=0)
    np.testing.assert_allclose(model.evaluate(dataset, verbose=0), expected, rtol=1e-5)
    np.testing.assert_allclose(model.fit(dataset, verbose=0).history["loss"], expected[0], rtol=1e-5)


def test_positions_beyond_the_table_have_a_name_in_a_graph():
    layer = txl_tf.layers.PositionalEncoding(d_model=4, max_len=3)
    call = tf.function(lambda x, first: layer(x, first=first), autograph=False, reduce_retracing=True)
    spec = tf.TensorSpec([1, None, 4])
    call = call.get_concrete_function(spec, tf.TensorSpec([], tf.int32))
    np.testing.assert_allclose(call(tf.zeros([1, 2, 4]), tf.constant(1)), layer(tf.zeros([1, 2, 4]), first=1))
    for length, first, facts in ((4, 0, ("x", "max_len=3", 4)), (2, 2, ("first", "max_len=3", 4))):
        with pytest.raises(tf.errors.InvalidArgumentError) as caught:
            call(tf.zeros([1, length, 4]), tf.constant(first))
        assert mentions(str(caught.value), *facts)


@pytest.mark.slow
def test_two_replicas_weigh_as_one(two_replicas):
    source, _ = pairs()
    weights = np.array([2.0, 0.0, 0.1, 0.0])  # another sum on each replica, and no row of the second counts in the end

    def train():
        model = make(num_layers=1)
        model.compile(txl_tf.make_optimizer(0.1, optimizer="sgd", schedule="constant"))
        data = tf.data.Dataset.from_tensors((source, TARGETS, weights)).repeat(3)
        history = model.fit(data, verbose=0).history
        return history["loss"] + history["accuracy"], [weight.numpy() for weight in model.trainable_variables]

    logs, expected = train()
    with two_replicas.scope():
        found_logs, found = train()
    assert found_logs == pytest.approx(logs, rel=1e-5)
    for array, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(array, other, atol=1e-5)


@pytest.mark.slow
def test_a_last_batch_in_unequal_shares_drops_as_on_one_device(two_replicas):
    source, targets = (np.concatenate([ids, ids[:3]]) for ids in (pairs()[0], TARGETS))  # 4 rows, then 2 + 1

    def loss():
        model = make(num_layers=1, rate=0.3, seed=1)
        model.compile(keras.optimizers.SGD(0.0))
        return model.fit(source, targets, batch_size=4, shuffle=False, verbose=0).history["loss"]

    expected = loss()
    with two_replicas.scope():
        assert loss() == pytest.approx(expected, rel=1e-5)


def test_rows_are_numbered_over_replicas_whatever_their_shares(two_replicas):
    with two_replicas.scope():
        model = make(num_layers=1)
    for shares in ([2, 1], [0, 3]):
        rows = two_replicas.experimental_distribute_values_from_function(
            lambda context, shares=shares: tf.constant(shares)[context.replica_id_in_sync_group]
        )
        first = two_replicas.experimental_local_results(two_replicas.run(model.first_row, args=(rows,)))
        assert [int(number) for number in first] == [0, shares[0]]


@pytest.mark.slow
def test_a_loaded_keras_file_draws_the_dropout_of_the_epoch_that_follows(tmp_path):
    source, _ = pairs()
    model = make(num_layers=1, rate=0.2, dropatt=0.1)
    model.compile(txl_tf.make_optimizer(0.01, train_steps=100), run_eagerly=True)
    model.fit(source, TARGETS, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded, other = (keras.saving.load_model(tmp_path / "model.keras") for _ in range(2))
    expected = model.fit(source, TARGETS, shuffle=False, verbose=0).history
    assert loaded.fit(source, TARGETS, shuffle=False, verbose=0).history == expected
    assert all(np.array_equal(*both) for both in zip(loaded.get_weights(), model.get_weights(), strict=True))
    other.optimizer.iterations.assign(0)
    assert other.fit(source, TARGETS, shuffle=False, verbose=0).history["loss"] != expected["loss"]


@pytest.mark.slow
def test_regularizers_are_trained_for():
    def kernel_after_a_step(regularizer):
        model = make()
        kernel = model.final_layer.kernel
        kernel.regularizer, before = regularizer, kernel.numpy()
        model.compile(keras.optimizers.SGD(0.1))
        model.train_on_batch(pairs()[0], TARGETS)
        return before, kernel.numpy()

    assert_regularized(kernel_after_a_step)


@pytest.mark.ci
def test_what_is_frozen_stays_and_the_rest_trains():
    source, _ = pairs()
    for part in ("encoder", "target_embedding", "final_layer"):
        stepping = Stepping()
        getattr(stepping.model, part).trainable = False
        stepping.model.compile(stepping.model.optimizer, run_eagerly=True)
        stepping(source, TARGETS)
        frozen = {weight.path for weight in getattr(stepping.model, part).weights}
        for weight, start in zip(stepping.model.weights, stepping.start, strict=True):
            moved = np.abs(weight.numpy() - start).max() > 0
            assert moved == (weight.path not in frozen) or weight.path.endswith("wk/bias"), weight.path


@pytest.mark.slow
def test_a_step_whose_half_precision_overflows_counts_and_changes_no_weight():
    model = make(num_layers=1, dtype="mixed_float16")
    model.compile(keras.optimizers.LossScaleOptimizer(txl_tf.make_optimizer(0.1), initial_scale=2.0**60))
    before = model.get_weights()
    model.fit(*pairs(), batch_size=2, verbose=0)
    assert int(model.optimizer.iterations.numpy()) == 2 and model.optimizer.dynamic_scale.numpy() == 2.0**58
    for found, array in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(found, array)


@pytest.mark.slow
def test_an_average_begins_with_the_weights_where_the_first_step_overflows():
    model = make(num_layers=1, dtype="mixed_float16")
    optimizer = txl_tf.make_optimizer(1e-3, schedule="constant", ema=0.9)
    model.compile(keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=2.0**60))
    before = model.get_weights()
    model.fit(*pairs(), verbose=0)  # whose end puts the average in place
    for found, array in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(found, array)


@pytest.mark.slow
def test_gradients_that_keras_accumulates_are_counted_by_keras():
    model = make(num_layers=1, dtype="mixed_float16")
    model.compile(keras.optimizers.Adam(1e-3, gradient_accumulation_steps=2))
    before = model.get_weights()
    model.fit(*pairs(), batch_size=1, verbose=0)
    assert int(model.optimizer.iterations) == 2 and np.any(model.get_weights()[0] != before[0])


def test_a_batch_without_labels_has_no_loss_and_no_gradient(stepping):
    source, target = pairs()
    logs, weights = stepping((source, target[:, :-1]), np.zeros([4, 4], int))
    assert logs["loss"] == 0
    for found, array in zip(weights, stepping.start, strict=True):
        np.testing.assert_array_equal(found, array)


BAD_ARGUMENTS = [
    ({"source": np.array([3, 4])}, "source", "[batch, any]"),
    ({"source": np.array([[3.0]])}, "source", "integers"),
    ({"source": np.array([[9]])}, "source", "8"),
    ({"source": np.ones([1, 31], int)}, "source", "max_len=30"),
    ({"source": np.array([[3], [0]])}, "source", "every row"),
    ({"start": 0}, "start", "1 to 8"),
    ({"end": 9}, "end", "1 to 8"),
    ({"end": None, "beam_size": 2}, "end", "1 to 8"),
    ({"max_new_tokens": 31}, "max_new_tokens", "1 to 30"),
    ({"beam_size": 0}, "beam_size", "1 to 8"),
    ({"beam_size": 2, "n_best": 3}, "n_best", "1 to 2"),
    ({"beam_size": "3"}, "beam_size", "1 to 8"),
    ({"beam_size": None}, "beam_size", "1 to 8"),
    ({"length_penalty": -1.0}, "length_penalty", "0"),
    ({"length_penalty": 2.0}, "length_penalty", "beam search"),
    ({"beam_size": 2, "temperature": 0.5}, "temperature", "0"),
    ({"n_best": 1, "top_p": 0.5}, "top_p", "None"),
    ({"beam_size": 2, "seed": 1}, "seed", "None"),
    ({"top_k": 5}, "top_k", "None"),
    ({"temperature": 1.0, "top_p": 0.0}, "top_p", "(0, 1]"),
]


def test_bad_arguments_of_generate_are_one_clear_error():
    model = make(num_layers=1)
    for changes, name, limit in BAD_ARGUMENTS:
        arguments = {"source": np.array([[3, 4]]), "start": 1, "end": 2, **changes}
        with raises_parameter(name, ANY if name == "source" else changes[name], limit=limit):
            model.generate(arguments.pop("source"), **arguments)
            pytest.fail(f"no error: {changes}")


BAD_OPTIONS = [
    ({"num_heads": 5, "d_model": 12}, "d_model", "num_heads=5"),
    ({"share_embeddings": True, "target_vocab_size": 8}, "share_embeddings", ""),
    ({"rate": 1.0}, "rate", "[0, 1)"),
    ({"num_layers": 0}, "num_layers", "1"),
    ({"d_model": 13, "num_heads": 1}, "d_model", "even"),
    ({"d_model": 12, "num_heads": 4, "pos_embed": "rotary"}, "d_model", "even"),
]


def test_bad_hyper_parameters_are_named():
    for options, name, limit in BAD_OPTIONS:
        with raises_parameter(name, options[name], limit=limit):
            Transformer(**{**SMALL, **options})
            pytest.fail(f"no error: {options}")


def test_a_loss_is_refused():
    with raises_parameter("loss", "mse"):
        make(num_layers=1).compile("adam", "mse")
    with pytest.raises(ParameterError) as caught:
        make(num_layers=1).compile("adam", loss_weights=[1.0])
    assert caught.value.name == "loss_weights" and caught.value.value == [1.0]


def test_a_final_layer_of_ones_own_computes_the_logits():
    model = make(num_layers=1)
    source, _ = pairs()
    expected = model((source, TARGETS))
    layer = keras.layers.Dense(model.target_vocab_size, activation="tanh")
    layer.build((None, None, model.d_model))
    layer.set_weights(model.final_layer.get_weights())
    model.final_layer = layer
    np.testing.assert_allclose(model((source, TARGETS)), np.tanh(expected), rtol=1e-5, atol=1e-6)


@pytest.mark.ci
def test_inputs_in_a_dictionary_are_refused_as_in_a_call():
    model = make()
    model.compile("adam")
    source, target = pairs()
    inputs = {"source": source, "target": target[:, :-1]}
    labels = target[:, 1:]
    batches = tf.data.Dataset.from_tensors((inputs, labels))
    calls = [
        lambda: model(inputs),
        lambda: model.predict(inputs, verbose=0),
        lambda: model.fit(inputs, labels, verbose=0),
        lambda: model.evaluate(inputs, labels, verbose=0),
        lambda: model.train_on_batch(inputs, labels),
        lambda: model.test_on_batch(inputs, labels),
        lambda: model.fit(batches, verbose=0),
        lambda: model.evaluate(batches, verbose=0),
    ]
    for call in calls:
        with raises_parameter("inputs"):
            call()
    with raises_parameter("inputs[0]"):
        model.fit(({"source": source}, target[:, :-1]), labels, verbose=0)


@pytest.mark.ci
def test_a_batch_size_that_the_replicas_do_not_divide_is_refused(two_replicas):
    source, target = pairs(rows=7)
    whole = tf.data.Dataset.from_tensor_slices((source, target))
    unequal = whole.batch(3)  # 2 rows and 1
    with two_replicas.scope():
        model = make(num_layers=1)
        model.compile(keras.optimizers.SGD(0.1))
    for run in (model.fit, model.evaluate):
        with raises_parameter("batch_size", 3):
            run(source, target, batch_size=3, verbose=0)
        with raises_parameter("x", 3):  # the only batch
            run(source[:3], target[:3], verbose=0)
        with raises_parameter("x"):
            run(unequal, verbose=0)
    with raises_parameter("validation_data"):
        model.fit(source, target, batch_size=4, validation_data=unequal, verbose=0)
    with raises_parameter("validation_batch_size", 3):
        model.fit(source, target, batch_size=4, validation_data=(source, target), validation_batch_size=3, verbose=0)
    of_eight = {"validation_batch_size": 8}
    with raises_parameter("validation_data", 5):
        model.fit(source, target, batch_size=4, validation_data=(source[:5], target[:5]), verbose=0, **of_eight)
    model.fit(source, target, batch_size=4, verbose=0)  # the last batch is smaller
    model.fit(whole.batch(4), verbose=0)
