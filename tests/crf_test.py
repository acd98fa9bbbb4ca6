"""The CRF against all paths, one by one."""

import itertools

import numpy as np
import pytest
import tensorflow as tf
from helpers import assert_round_trips, mentions, raises_naming, raises_parameter

from txl_tf.taggers import crf

LENGTHS = [4, 1, 3, 0]
N_TAG = 3


@pytest.fixture(scope="module")
def case():
    rng = np.random.default_rng(0)
    emissions = rng.normal(0, 2, [len(LENGTHS), 4, N_TAG]).astype(np.float32)
    mask = np.arange(4)[None] < np.array(LENGTHS)[:, None]
    transitions = rng.normal(0, 1, [N_TAG, N_TAG]).astype(np.float32)
    start, end = rng.normal(0, 1, [2, N_TAG]).astype(np.float32)
    tags = rng.integers(0, N_TAG, [len(LENGTHS), 4]).astype(np.int32)
    return emissions, tags, mask, transitions, start, end


def paths(case, row, ends=True):
    """`{path: score}` of all paths of a row."""
    emissions, _, mask, transitions, start, end = case
    length = int(mask[row].sum())
    scores = {}
    for path in itertools.product(range(N_TAG), repeat=length):
        score = sum(emissions[row, t, tag] for t, tag in enumerate(path))
        score += sum(transitions[a, b] for a, b in zip(path, path[1:], strict=False))
        scores[path] = score + (start[path[0]] + end[path[-1]] if ends and length else 0)
    return scores


def probabilities(case, row):
    scores = paths(case, row)
    total = np.logaddexp.reduce(list(scores.values()))
    return {path: np.exp(score - total) for path, score in scores.items()}


def graph_of(function, **options):
    """Without AutoGraph, as in the library's own graphs: to convert code takes longer than to trace it."""
    return tf.function(function, autograph=False, **options)


SLOW = pytest.mark.slow
XLA = {"jit_compile": True}
WAYS = [{}, XLA]


@pytest.mark.parametrize(
    "ends, way", [(True, {}), (False, {}), *(pytest.param(ends, XLA, marks=SLOW) for ends in (True, False))], ids=str
)
def test_nll_is_that_of_all_paths(case, way, ends):
    emissions, tags, mask, transitions, start, end = case
    found = graph_of(crf.crf_nll, **way)(*case[:4], *([start, end] if ends else []))
    for row, length in enumerate(LENGTHS):
        scores = paths(case, row, ends)
        expected = np.logaddexp.reduce(list(scores.values())) - scores[tuple(tags[row, :length])]
        np.testing.assert_allclose(found[row], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("way", [pytest.param({}, marks=SLOW), XLA], ids=str)
def test_gradients_are_those_of_tensorflow_through_all_paths(case, way):
    emissions, tags, mask, transitions, start, end = map(tf.constant, case)
    weights = tf.constant([1.0, -2.0, 0.5, 3.0])

    def by_paths(emissions, transitions, start, end):
        total = 0.0
        for row, length in enumerate(LENGTHS[:3]):
            scores = [
                sum(emissions[row, t, tag] for t, tag in enumerate(path))
                + sum(transitions[a, b] for a, b in zip(path, path[1:], strict=False))
                + start[path[0]]
                + end[path[-1]]
                for path in [*itertools.product(range(N_TAG), repeat=length), tuple(tags[row, :length].numpy())]
            ]
            total += weights[row] * (tf.reduce_logsumexp(tf.stack(scores[:-1])) - scores[-1])
        return total

    def by_crf(emissions, transitions, start, end):
        return tf.reduce_sum(weights * crf.crf_nll(emissions, tags, mask, transitions, start, end))

    sources = emissions, transitions, start, end
    gradients = []
    for function in (by_paths, graph_of(by_crf, **way)):
        with tf.GradientTape() as tape:
            tape.watch(sources)
            loss = function(*sources)
        gradients.append([tf.convert_to_tensor(gradient) for gradient in tape.gradient(loss, sources)])
    for expected, found in zip(*gradients, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_the_best_path_is_the_best_of_all(case, way):
    emissions, _, mask, *scores = case
    tags, score = graph_of(crf.crf_decode, **way)(emissions, mask, *scores)
    for row, length in enumerate(LENGTHS):
        of_path = paths(case, row)
        best = max(of_path, key=of_path.get)
        assert tuple(tags[row, :length].numpy()) == best and not np.any(tags[row, length:])
        np.testing.assert_allclose(score[row], of_path[best], atol=2e-6)


@pytest.mark.parametrize("way", [{}, pytest.param(XLA, marks=SLOW)], ids=str)
def test_marginals_and_pieces_are_sums_over_paths(case, way):
    emissions, tags, mask, *scores = case
    marginals = graph_of(crf.crf_marginals, **way)(emissions, mask, *scores).numpy()
    begins, ends = (x.numpy() for x in graph_of(crf.crf_piece_log_probs, **way)(emissions, tags, mask, *scores))
    for row, length in enumerate(LENGTHS):
        of_path = probabilities(case, row)
        for t in range(4):
            expected = [sum(p for path, p in of_path.items() if t < length and path[t] == k) for k in range(N_TAG)]
            np.testing.assert_allclose(marginals[row, t], expected, rtol=1e-5, atol=1e-6)
        for s, e in itertools.combinations_with_replacement(range(length), 2):
            piece = tuple(tags[row, s : e + 1])
            expected = sum(p for path, p in of_path.items() if path[s : e + 1] == piece)
            np.testing.assert_allclose(np.exp(begins[row, s] + ends[row, e]), expected, rtol=1e-5)


def test_numbers_of_a_long_row_are_those_of_float64():
    """Scores of a path add up to thousands. Probabilities and gradients must not lose the digits of the sums."""
    rng = np.random.default_rng(0)
    time, n_tag = 2000, 5
    arrays = [rng.normal(0, scale, size) for scale, *size in ((6, 2, time, n_tag), (1, n_tag, n_tag), (1, n_tag))]
    tags = rng.integers(0, n_tag, [2, time])
    mask = np.arange(time) < np.array([[time], [time // 2]])

    @tf.function(autograph=False)
    def numbers(dtype):
        emissions, transitions, ends = (tf.constant(x, dtype) for x in arrays)
        with tf.GradientTape() as tape:
            tape.watch([emissions, transitions])
            nll = crf.crf_nll(emissions, tags, mask, transitions, ends, ends)
        best, _ = crf.crf_decode(emissions, mask, transitions, ends, ends)
        begins, ends_of_pieces = crf.crf_piece_log_probs(emissions, best, mask, transitions, ends, ends)
        pieces = begins[:, : time // 2 - 3] + ends_of_pieces[:, 3 : time // 2]
        marginals = crf.crf_marginals(emissions, mask, transitions, ends, ends)
        return [nll, *tape.gradient(nll, [emissions, transitions]), marginals, tf.exp(pieces)]

    for found, expected in zip(numbers("float32"), numbers("float64"), strict=True):
        largest = np.abs(expected).max()
        np.testing.assert_allclose(found / largest, expected / largest, rtol=0, atol=1e-4)


def test_forbidden_transitions_are_not_taken_and_do_not_count_in_the_loss(case):
    emissions, tags, mask, transitions, start, end = case
    rng = np.random.default_rng(3)
    allowed = rng.random([N_TAG + 2, N_TAG + 2]) < 0.6
    allowed[0] = allowed[:, 0] = True  # some path there is
    layer = crf.CRF(N_TAG, allowed=allowed)
    layer.build()
    layer.set_weights([transitions, start, end])
    found, score = layer.decode(emissions, mask)
    _, ends = layer.piece_log_probs(emissions, found, mask)
    begins, _ = layer.piece_log_probs(emissions, found, mask)
    for row, length in enumerate(LENGTHS[:3]):
        ways = {
            path: value
            for path, value in paths(case, row).items()
            if all(allowed[a, b] for a, b in zip(path, path[1:], strict=False))
            and allowed[N_TAG, path[0]]
            and allowed[path[-1], N_TAG + 1]
        }
        best = max(ways, key=ways.get)
        assert tuple(found[row, :length].numpy()) == best
        np.testing.assert_allclose(score[row], ways[best], atol=2e-6)
        expected = ways[best] - np.logaddexp.reduce(list(ways.values()))
        np.testing.assert_allclose(begins[row, 0] + ends[row, length - 1], expected, atol=2e-5)
    np.testing.assert_array_equal(layer.nll(emissions, tags, mask), crf.crf_nll(*case))
    np.testing.assert_array_equal(layer(emissions, mask), found)


def test_padding_changes_nothing(case):
    emissions, tags, mask, *scores = case
    other = np.where(mask[..., None], emissions, 1e6).astype(np.float32)
    longer = [np.pad(x, [[0, 0], [0, 3]] + [[0, 0]] * (x.ndim - 2), constant_values=0) for x in (other, tags, mask)]
    np.testing.assert_array_equal(crf.crf_nll(*longer, *scores), crf.crf_nll(*case))
    for way in (crf.crf_decode, lambda *x: (crf.crf_marginals(*x), 0)):
        now, then = way(longer[0], longer[2], *scores), way(emissions, mask, *scores)
        np.testing.assert_array_equal(now[0][:, :4], then[0])
        np.testing.assert_array_equal(now[1], then[1])


def test_the_layer_takes_padding_anywhere(case):
    """In front, as `keras.utils.pad_sequences` puts it, and among the elements."""
    emissions, tags, mask, transitions, start, end = case
    layer = crf.CRF(N_TAG)
    layer.build()
    for weight, value in zip(layer.weights, (transitions, start, end), strict=True):
        weight.assign(value)
    anywhere = np.array([[1, 1, 1, 1], [0, 0, 1, 0], [1, 0, 1, 1], [0, 0, 0, 0]], bool)
    moved, moved_tags = np.full_like(emissions, 5), np.zeros_like(tags)
    moved[anywhere], moved_tags[anywhere] = emissions[mask], tags[mask]
    np.testing.assert_allclose(layer.nll(moved, moved_tags, anywhere), layer.nll(emissions, tags, mask), rtol=1e-6)
    (found, its_score), (path, score) = layer.decode(moved, anywhere), layer.decode(emissions, mask)
    np.testing.assert_array_equal(found[anywhere], path[mask])
    assert not np.any(found[~anywhere])
    np.testing.assert_allclose(its_score, score, rtol=1e-6)


@pytest.mark.parametrize("name", ["start", "end", "transitions"])
def test_scores_of_minus_infinity_forbid_tags(case, name):
    """They give what very small scores give, gradients too. With such `transitions`, nothing follows the tag 2."""

    def results(small):
        emissions, _, mask, transitions, start, end = map(np.copy, case)
        {"start": start, "end": end, "transitions": transitions.T}[name][2 if name == "transitions" else 1] = small
        tags = np.where(np.arange(4) % 2, 0, 2) * (name == "end")
        scores = list(map(tf.constant, (emissions, transitions, start, end)))
        with tf.GradientTape() as tape:
            tape.watch(scores)
            nll = crf.crf_nll(scores[0], tags, mask, *scores[1:])
        others = (emissions, mask, *scores[1:])
        return nll, *tape.gradient(nll, scores), *crf.crf_decode(*others), crf.crf_marginals(*others)

    for found, expected in zip(results(-np.inf), results(-1e4), strict=True):
        assert np.all(np.isfinite(found))
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_rows_of_one_element(case):
    emissions, tags, mask, transitions, start, end = (x[1:2, :1] if x.ndim > 1 and len(x) == 4 else x for x in case)
    run = graph_of(
        lambda e, t, m: (crf.crf_nll(e, t, m, transitions, start, end), crf.crf_decode(e, m, transitions, start, end)),
        input_signature=[
            tf.TensorSpec([None, None, N_TAG]),
            tf.TensorSpec([None, None], tf.int32),
            tf.TensorSpec([None, None], tf.bool),
        ],
    )
    nll, (best, score) = run(emissions, tags, mask)
    scores = emissions[0, 0] + start + end
    np.testing.assert_allclose(nll[0], np.logaddexp.reduce(scores) - scores[tags[0, 0]], rtol=1e-6)
    assert best.numpy().tolist() == [[scores.argmax()]]
    np.testing.assert_allclose(score[0], scores.max(), rtol=1e-6)


def test_layer_round_trips_and_names_a_wrong_shape():
    assert_round_trips(crf.CRF(2, start_end=False, allowed=np.ones([4, 4], bool)))
    for wrong in (np.ones([2, 2]), [[True] * 4, [True] * 3]):
        with raises_parameter("allowed", limit="[4, 4]"):
            crf.CRF(2, allowed=wrong)
    whether = np.array([[1, 0, 1, 1], [1, 1, 0, 1], [1, 1, 1, 1], [0, 1, 1, 1]])
    for numbers in (whether, whether.astype(np.float32), whether.astype(bool).tolist()):
        assert crf.CRF(2, allowed=numbers).allowed == whether.astype(bool).tolist()
    for wrong in (2 * whether, whether - 0.5, np.where(whether, "yes", "no"), np.where(whether, None, True)):
        with raises_parameter("allowed"):
            crf.CRF(2, allowed=wrong)
    with raises_naming(ValueError, "emissions", "[2, 0, 3]"):
        crf.CRF(3).decode(tf.zeros([2, 0, 3]))


def test_tags_of_elements_must_be_ids():
    emissions, mask = tf.zeros([2, 3, 4]), tf.constant([[1, 1, 0], [1, 0, 0]])
    layer = crf.CRF(4)  # not built
    tags = np.array([[0, 3, -100], [1, 99, -1]])
    np.testing.assert_allclose(layer.nll(emissions, tags, mask), np.log([16, 4]), rtol=1e-6)
    with raises_naming(ValueError, "tags", 0, 3, -100, 99):
        layer.nll(emissions, tags)
    with raises_naming(tf.errors.InvalidArgumentError, "tags", 0, 3):
        graph_of(layer.nll)(emissions, tags)


def test_masks_and_tags_of_another_length_have_a_name_in_a_graph():
    layer = crf.CRF(n_tag=3)
    specs = tf.TensorSpec([2, None, 3]), tf.TensorSpec([2, None], tf.int32), tf.TensorSpec([2, None], tf.bool)
    call = graph_of(layer.nll).get_concrete_function(*specs)
    emissions, tags, mask = tf.zeros([2, 4, 3]), tf.zeros([2, 4], tf.int32), tf.fill([2, 4], True)
    np.testing.assert_allclose(call(emissions, tags, mask), [4 * np.log(3)] * 2, rtol=1e-6)
    for name, tensors in (("mask", (emissions, tags, mask[:, :1])), ("tags", (emissions, tags[:, :1], mask))):
        with pytest.raises(tf.errors.InvalidArgumentError) as caught:
            call(*tensors)
        assert mentions(str(caught.value).replace("] [", " "), name, 4, 1)
