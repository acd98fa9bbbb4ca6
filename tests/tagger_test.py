"""Tagger over every kind of network: nll and decoding, entities and their counts, training, saving, replicas."""

import collections
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import SMALL, assert_regularized, mentions, raises_naming, raises_parameter, randomise, spread_emissions

import txl_tf
from txl_tf.data.tagged.tags import allowed_transitions, broken_at, prf, spans_of
from txl_tf.errors import ParameterError
from txl_tf.taggers.crf import crf_decode, crf_marginals, crf_nll
from txl_tf.taggers.tagger import SpanScores

LABELS = ["O", "B-X", "I-X", "B-Y", "I-Y"]
N_TOKEN, N_BIGRAM = 9, 7
LENGTHS = [5, 2, 3, 1]
SETTINGS = {"n_token": N_TOKEN, "n_layer": 1, "d_model": 8, "n_head": 2, "d_inner": 12, "d_embed": 6}
KEY = np.array([1, 2, 0], np.int32)
SLOW = pytest.mark.slow


def ids(lengths, n=N_TOKEN, seed=0):
    """Random ids from 1 on, 0 at padding."""
    mask = np.arange(max(lengths))[None] < np.array(lengths)[:, None]
    return np.where(mask, np.random.default_rng(seed).integers(1, n, mask.shape), 0).astype(np.int32)


def tener_inputs(lengths=LENGTHS):
    return {"chars": ids(lengths), "bigrams": ids(lengths, N_BIGRAM, seed=1)}


def flat_inputs(lengths=LENGTHS):
    """Every sentence has one word, of all its characters."""
    chars = ids(lengths)
    inputs = {name: np.pad(chars, [[0, 0], [0, 1]]) for name in ("lattice", "pos_s", "pos_e")}
    for row, length in enumerate(lengths):
        last = max(length - 1, 0)
        for name, of_chars, of_word in (("pos_s", np.arange(length), 0), ("pos_e", np.arange(length), last)):
            inputs[name][row, :length], inputs[name][row, length] = of_chars, of_word
        inputs["lattice"][row, length] = 1 + length % (N_TOKEN - 1)
    lengths = np.array(lengths, np.int32)
    return {**inputs, "bigrams": ids(lengths, N_BIGRAM, 1), "seq_len": lengths, "lex_num": np.ones_like(lengths)}


def plain_encoder(width=8):
    """A functional model of Keras: every element by itself."""
    tokens = keras.Input([None], dtype="int32")
    hidden = keras.layers.Embedding(N_TOKEN, 6)(tokens)
    return keras.Model(tokens, keras.layers.Dense(width, "tanh")(hidden))


def two_inputs_encoder():
    inputs = {name: keras.Input([None], dtype="int32", name=name) for name in ("tokens", "shapes")}
    hidden = [keras.layers.Embedding(N_TOKEN, 6)(x) for x in inputs.values()]
    return keras.Model(inputs, keras.layers.Dense(8, "tanh")(keras.layers.Concatenate()(hidden)))


def both_ways(x):
    """Rows of 5, of `LENGTHS`, with padding on both sides: another number of places before each."""
    return np.stack([np.roll(row, 1 + i) for i, row in enumerate(np.pad(x, [[0, 0], [0, 3]]))])


CASES = {
    "tener": (lambda **o: txl_tf.Tener(**SETTINGS, n_bigram=N_BIGRAM, **o), tener_inputs),
    "flat": (lambda **o: txl_tf.Flat(**SETTINGS, n_bigram=N_BIGRAM, **o), flat_inputs),
    "keras": (plain_encoder, lambda lengths=LENGTHS: ids(lengths)),
    "keras, a mask": (
        plain_encoder,
        lambda lengths=LENGTHS: {"tokens": 1 + ids(lengths) % 8, "mask": ids(lengths) != 0},
    ),
    "keras, two inputs": (
        two_inputs_encoder,
        lambda lengths=LENGTHS: {"tokens": ids(lengths), "shapes": ids(lengths, seed=2), "mask": ids(lengths) != 0},
    ),
    "transformer-xl": (lambda **o: txl_tf.TransformerXL(**SMALL, **o), lambda lengths=LENGTHS: ids(lengths)),
}


def cases(*fast, of=CASES):
    """A parameter for each name; slow but for those that are `fast`."""
    return [name if name in fast else pytest.param(name, marks=SLOW) for name in of]


def make_tagger(name, seed=0, labels=LABELS, network=None, scale=0.8, **options):
    """A tagger with random weights of deviation `scale`, and inputs, in which every tag occurs."""
    make, inputs_of = CASES[name]
    inputs = inputs_of()
    tagger = txl_tf.Tagger(make(**(network or {})), labels, seed=0, **options)
    tagger(inputs)
    randomise(tagger, seed, scale)
    inputs = as_tensors(inputs)
    spread_emissions(tagger, inputs)
    return tagger, inputs


def as_tensors(inputs):
    return {name: tf.constant(x) for name, x in inputs.items()} if isinstance(inputs, dict) else tf.constant(inputs)


def row_of(inputs, row, length, lengths=LENGTHS):
    """A sentence alone: the first `length` elements of a row, its own word too."""
    if isinstance(inputs, dict) and "lattice" in inputs:
        inputs = flat_inputs(lengths)
        own = {name: inputs[name][row : row + 1, : length + 1] for name in ("lattice", "pos_s", "pos_e")}
        rest = {name: inputs[name][row : row + 1] for name in ("seq_len", "lex_num")}
        return as_tensors({**own, **rest, "bigrams": inputs["bigrams"][row : row + 1, :length]})
    if isinstance(inputs, dict):
        return {name: x[row : row + 1, :length] for name, x in inputs.items()}
    return inputs[row : row + 1, :length]


def random_tags(lengths=LENGTHS):
    tags = np.random.default_rng(3).integers(0, len(LABELS), [len(lengths), max(lengths)])
    return np.where(ids(lengths) != 0, tags, 0).astype(np.int32)


# ---------------------------------------- forward


@pytest.mark.parametrize("name", cases("keras, a mask", "transformer-xl"))
def test_nll_and_decoding_are_the_crf_s_of_projected_hidden_states(name):
    tagger, inputs = make_tagger(name, constraints=False)
    tags = random_tags()
    emissions, mask = tagger.emissions(inputs)
    np.testing.assert_array_equal(mask, ids(LENGTHS) != 0)
    assert emissions.dtype == tf.float32
    np.testing.assert_array_equal(tagger(inputs), emissions)
    if name in ("tener", "flat"):
        hidden = tagger.network(inputs)
    elif name == "transformer-xl":
        hidden, _ = tagger.network(inputs, padding_mask=mask)
    else:
        given = {name: x for name, x in inputs.items() if name != "mask"} if isinstance(inputs, dict) else inputs
        hidden = tagger.network(given if name == "keras, two inputs" or name == "keras" else given["tokens"])
    expected = hidden.numpy() @ tagger.out_fc.kernel.numpy() + tagger.out_fc.bias.numpy()
    np.testing.assert_allclose(emissions.numpy()[mask], expected[mask], rtol=1e-4, atol=1e-5)
    of_crf = tagger.crf.transitions, tagger.crf.start_scores, tagger.crf.end_scores
    np.testing.assert_allclose(tagger.nll(inputs, tags), crf_nll(emissions, tags, mask, *of_crf), rtol=1e-5)
    for found, expected in zip(tagger.decode(inputs), crf_decode(emissions, mask, *of_crf), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("name", cases("flat"))
def test_a_sentence_alone_has_the_same_tags_and_nll(name):
    tagger, inputs = make_tagger(name)
    tags = random_tags()
    nll, (found, score) = tagger.nll(inputs, tags), tagger.decode(inputs)
    assert len(set(found.numpy()[ids(LENGTHS) != 0])) > 1
    for row, length in enumerate(LENGTHS):
        alone = row_of(inputs, row, length)
        np.testing.assert_allclose(tagger.nll(alone, tags[row : row + 1, :length])[0], nll[row], rtol=1e-4)
        own, own_score = tagger.decode(alone)
        np.testing.assert_array_equal(found[row], np.pad(own[0], [0, max(LENGTHS) - length]))
        np.testing.assert_allclose(own_score[0], score[row], rtol=1e-4)


@pytest.mark.parametrize(
    "name", cases("keras, a mask", "transformer-xl", of=["keras", "keras, a mask", "transformer-xl"])
)
def test_padding_may_lie_on_both_sides_of_a_row_and_within_it(name):
    tagger, inputs = make_tagger(name)
    tags = random_tags()
    moved = {key: both_ways(x) for key, x in inputs.items()} if isinstance(inputs, dict) else both_ways(inputs)
    np.testing.assert_allclose(tagger.nll(as_tensors(moved), both_ways(tags)), tagger.nll(inputs, tags), rtol=1e-4)
    for found, expected in zip(tagger.decode(as_tensors(moved)), tagger.decode(inputs), strict=True):
        expected = expected.numpy() if expected.ndim == 1 else both_ways(expected.numpy())
        np.testing.assert_allclose(found, expected, rtol=1e-4)
    one = ids([5])
    apart = np.insert(one, [2, 4, 4], 0, axis=1)
    if name == "keras, a mask":
        one, apart = ({"tokens": 1 + x % 8, "mask": x != 0} for x in (one, apart))
    own, score = tagger.decode(as_tensors(one))
    found, its_score = tagger.decode(as_tensors(apart))
    np.testing.assert_array_equal(found[0], np.insert(own[0], [2, 4, 4], 0))
    np.testing.assert_allclose(its_score, score, rtol=1e-4)


LSTM = {name: SETTINGS[name] for name in ("n_token", "n_layer", "d_model", "d_embed")}


@pytest.mark.parametrize(
    "network, sizes",
    [
        (txl_tf.Tener, SETTINGS),
        *(pytest.param(txl_tf.Tener, {**SETTINGS, "pos_embed": kind, "max_seq_len": 5}, marks=SLOW)
          for kind in ("sin", "fix")),
        pytest.param(txl_tf.BiLSTM, LSTM, marks=SLOW),
    ],
)  # fmt: skip
def test_sentences_may_have_padding_in_front(network, sizes):
    """As `keras.utils.pad_sequences` puts it."""
    tagger = txl_tf.Tagger(network(**sizes, n_bigram=0), LABELS, seed=0)
    randomise(tagger, scale=0.8)
    (chars, tags), (front, tags_front) = (
        [keras.utils.pad_sequences([row[:n] for row, n in zip(x, LENGTHS, strict=True)], padding=padding)
         for x in (ids(LENGTHS), random_tags())]
        for padding in ("post", "pre")
    )  # fmt: skip
    behind, before = ({"chars": tf.constant(x)} for x in (chars, front))
    np.testing.assert_allclose(tagger.nll(before, tags_front), tagger.nll(behind, tags), rtol=1e-4)
    (found, its_score), (own, score) = tagger.decode(before), tagger.decode(behind)
    np.testing.assert_array_equal(found[front != 0], own[chars != 0])
    np.testing.assert_allclose(its_score, score, rtol=1e-4)
    (places, ends), (own_places, own_ends) = (
        [tagger.entities(x)[name].numpy() for name in ("starts", "ends")] for x in (before, behind)
    )
    shift = np.argmax(front != 0, 1)[:, None]
    np.testing.assert_array_equal((places - shift)[ends], own_places[own_ends])


def test_a_row_of_padding_has_no_tags_and_no_nll():
    for name in ("keras", "transformer-xl"):
        tagger, _ = make_tagger(name)
        inputs = as_tensors(CASES[name][1]([3, 0]))
        assert tagger.nll(inputs, random_tags([3, 0]))[1] == 0
        tags, score = tagger.decode(inputs)
        assert not np.any(tags[1]) and score[1] == 0


def test_emissions_at_padding_count_neither_in_nll_and_gradients_nor_in_decoding():
    """Large ones would overflow, and infinity times 0 is no number. The last row is padding alone."""
    rng = np.random.default_rng(0)
    transitions, start, end = (tf.constant(rng.normal(size=shape), tf.float32) for shape in ((3, 3), (3,), (3,)))
    mask, tags = np.arange(4)[None] < np.array([[4], [2], [0]]), rng.integers(0, 3, [3, 4])
    emissions = rng.normal(size=[3, 4, 3]).astype(np.float32)

    def results(emissions):
        emissions = tf.constant(emissions)
        with tf.GradientTape() as tape:
            tape.watch([emissions, transitions, start, end])
            nll = crf_nll(emissions, tags, mask, transitions, start, end)
        gradients = tape.gradient(nll, [emissions, transitions, start, end])
        return nll, *gradients, *crf_decode(emissions, mask, transitions, start, end)

    expected = results(emissions)
    for at_padding in (0.0, 200.0, -200.0, np.inf, np.nan):
        found = results(np.where(mask[..., None], emissions, at_padding).astype(np.float32))
        for array, right in zip(found, expected, strict=True):
            assert np.isfinite(array).all(), at_padding
            np.testing.assert_allclose(array, right, rtol=1e-5, atol=1e-6, err_msg=str(at_padding))


@pytest.mark.parametrize(
    "labels",
    [
        pytest.param(LABELS, marks=SLOW),
        ["B-X", "M-X", "E-X", "S-X", "O"],
        pytest.param(["I-X", "O", "S-X", "B-X", "E-X"], marks=SLOW),
    ],
)
def test_decoding_obeys_the_scheme_where_it_is_constrained(labels):
    broken = {True: 0, False: 0}
    for constraints, seed in itertools.product([True, False], range(3)):
        tagger, inputs = make_tagger("keras", seed, labels=labels, constraints=constraints)
        tags, _ = tagger.decode(inputs)
        for row, length in zip(tags.numpy(), LENGTHS, strict=True):
            broken[constraints] += len(broken_at([labels[i] for i in row[:length]]))
    assert broken[True] == 0 and broken[False] > 5


def test_without_starts_and_ends_there_are_no_weights_of_them():
    tagger, inputs = make_tagger("keras", start_end=False)
    assert tagger.crf.start_scores is None and tagger.crf.end_scores is None
    emissions, mask = tagger.emissions(inputs)
    tags = random_tags()
    np.testing.assert_allclose(
        tagger.nll(inputs, tags), crf_nll(emissions, tags, mask, tagger.crf.transitions), rtol=1e-5
    )


# ---------------------------------------- entities

SCHEMES = [LABELS, ["O", "B-X", "M-X", "E-X", "S-X", "B-Y", "M-Y", "E-Y", "S-Y"], ["B", "M", "E", "S"]]


def paths_of(labels, rows=60, length=8, seed=0):
    """Random paths, malformed ones too, of random lengths, 0 included."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, length + 1, rows)
    lengths[:2] = 0, length
    tags = rng.integers(0, len(labels), [rows, length]).astype(np.int32)
    return tags, np.arange(length)[None] < lengths[:, None]


def python_spans(labels, tags, mask):
    return [spans_of([labels[i] for i in row[keep]]) for row, keep in zip(tags, mask, strict=True)]


@pytest.mark.parametrize("labels", [pytest.param(labels, marks=[] if "M-X" in labels else SLOW) for labels in SCHEMES])
def test_ends_and_starts_are_those_of_the_spans(labels):
    tagger, _ = make_tagger("keras", labels=labels)
    tags, mask = paths_of(labels)
    ends, starts = (x.numpy() for x in tagger.span_ends(tf.constant(tags), tf.constant(mask)))
    expected = python_spans(labels, tags, mask)
    kinds = tagger._kind_ids
    for row, spans in enumerate(expected):
        found = [(tagger.kinds[kinds[tags[row, e]]], starts[row, e], e + 1) for e in np.flatnonzero(ends[row])]
        assert found == [tuple(span) for span in spans]
    assert sum(map(len, expected)) > 100 and not expected[0]


@pytest.mark.parametrize("labels", [pytest.param(labels, marks=[] if "M-X" in labels else SLOW) for labels in SCHEMES])
def test_counts_of_right_found_and_expected_entities(labels):
    tagger, _ = make_tagger("keras", labels=labels)
    tags, mask = paths_of(labels)
    target, _ = paths_of(labels, seed=1)
    target = np.where(np.arange(len(tags))[:, None] % 2, target, tags)  # half of them are right
    target[::6, ::3] = 0
    found, expected = (python_spans(labels, x, mask) for x in (tags, target))
    right = sum(len({*a} & {*b}) for a, b in zip(found, expected, strict=True))
    counts = tagger.count_spans(*(tf.constant(x) for x in (tags, target, mask)))
    assert counts.numpy().tolist() == [right, sum(map(len, found)), sum(map(len, expected))]
    assert 0 < right < counts[1]
    scores = SpanScores()
    assert [float(x) for x in scores.result().values()] == [0, 0, 0]
    scores.update_state(counts)
    np.testing.assert_allclose([*scores.result().values()], prf(*counts.numpy()), rtol=1e-6)
    scores.update_state(counts)
    np.testing.assert_allclose([*scores.result().values()], prf(*counts.numpy()), rtol=1e-6)


@pytest.mark.parametrize(
    "name, constraints",
    [
        ("tener", True),
        ("flat", False),
        *(pytest.param(*case, marks=SLOW) for case in [("tener", False), ("flat", True)]),
    ],
)
def test_entities_are_the_spans_of_the_best_path_with_their_probabilities_among_all_paths(name, constraints):
    labels = ["O", "B-X", "I-X"]
    tagger, _ = make_tagger(name, labels=labels, constraints=constraints)
    lengths = [4, 3, 1, 2, 4, 4]
    inputs = as_tensors(CASES[name][1](lengths))
    found = {key: x.numpy() for key, x in tagger.entities(inputs).items()}
    np.testing.assert_array_equal(found["tags"], tagger.decode(inputs)[0])
    emissions, seen = tagger.emissions(inputs)[0].numpy(), 0
    for row, length in enumerate(lengths):
        probabilities = path_probabilities(tagger, emissions[row, :length], constraints)
        path = tuple(found["tags"][row, :length])
        assert max(probabilities, key=probabilities.get) == path
        spans = spans_of([labels[i] for i in path])
        assert [(found["starts"][row, e], e + 1) for e in np.flatnonzero(found["ends"][row])] == [s[1:] for s in spans]
        for _, start, end in spans:
            expected = sum(p for other, p in probabilities.items() if other[start:end] == path[start:end])
            assert found["probs"][row, end - 1] == pytest.approx(expected, rel=1e-4)
            seen += 1
        assert not found["probs"][row][~found["ends"][row]].any()
    assert seen > 2


def path_probabilities(tagger, emissions, constraints):
    """`{path: probability}` of a sentence, one path at a time; 0 for those that are forbidden."""
    allowed = allowed_transitions(tagger.labels)
    n, crf = len(tagger.labels), tagger.crf
    transitions, start, end = (
        x.numpy().astype(np.float64) for x in (crf.transitions, crf.start_scores, crf.end_scores)
    )
    scores = {}
    for path in itertools.product(range(n), repeat=len(emissions)):
        steps = [(n, path[0]), *zip(path, path[1:], strict=False), (path[-1], n + 1)]
        if constraints and not all(allowed[step] for step in steps):
            continue
        score = start[path[0]] + end[path[-1]] + sum(emissions[t, tag] for t, tag in enumerate(path))
        scores[path] = score + sum(transitions[step] for step in steps[1:-1])
    total = np.logaddexp.reduce(list(scores.values()))
    return {path: np.exp(score - total) for path, score in scores.items()}


def test_entities_of_another_network_lie_where_its_elements_do():
    """Padding on both sides of a row moves them, and nothing else."""
    tagger, inputs = make_tagger("keras")
    plain = {name: x.numpy() for name, x in tagger.entities(inputs).items()}
    moved = {name: x.numpy() for name, x in tagger.entities(tf.constant(both_ways(inputs.numpy()))).items()}
    np.testing.assert_array_equal(moved["tags"], both_ways(plain["tags"]) * (both_ways(inputs.numpy()) != 0))
    for row, length in enumerate(LENGTHS):
        places = [np.flatnonzero(found["ends"][row]) for found in (plain, moved)]
        (here, there), before = places, np.flatnonzero(both_ways(inputs.numpy())[row])
        assert (before[here] == there).all() and here.size <= length
        np.testing.assert_array_equal(before[plain["starts"][row, here]], moved["starts"][row, there])
        np.testing.assert_allclose(plain["probs"][row, here], moved["probs"][row, there], rtol=1e-5)
    assert plain["ends"].sum() > 2


def test_of_the_scheme_none_every_element_counts():
    """Any tag may follow any; precision, recall and F1 are the accuracy; `entities` gives every tag's probability."""
    labels = ["NOUN", "VERB", "X"]
    tagger, inputs = make_tagger("keras", labels=labels, scheme="none")
    emissions, mask = tagger.emissions(inputs)
    marginals = crf_marginals(emissions, mask, *tagger.crf.constrained())
    found = {name: x.numpy() for name, x in tagger.entities(inputs).items()}
    np.testing.assert_array_equal(found["ends"], mask)
    np.testing.assert_array_equal(found["kinds"], found["tags"])
    expected = tf.gather(marginals, found["tags"], batch_dims=2).numpy() * mask.numpy()
    np.testing.assert_allclose(found["probs"], expected, rtol=1e-4, atol=1e-6)
    tags = np.where(mask, random_tags() % 3, -1)
    tagger.compile(sgd())
    measured = tagger.evaluate(inputs, tags, verbose=0, return_dict=True)
    assert measured.keys() == {"loss", "accuracy", "f1"} and tagger.kinds == labels
    right = np.mean(found["tags"][mask] == tags[mask])
    assert measured["accuracy"] == pytest.approx(right) == measured["f1"] and 0 < right < 1


@pytest.mark.slow
def test_tags_at_padding_may_be_anything_but_elements_need_a_label():
    tagger, inputs = make_tagger("tener")
    mask, tags = inputs["chars"].numpy() != 0, random_tags()
    padded = np.where(mask, tags, -100)
    np.testing.assert_array_equal(tagger.nll(inputs, padded), tagger.nll(inputs, np.where(mask, tags, 0)))
    taggers = [make_tagger("tener")[0] for _ in range(2)]
    losses = []
    for own, y in zip(taggers, (padded, np.where(mask, tags, 0)), strict=True):
        own.compile(sgd(), run_eagerly=True)
        losses += [own.train_on_batch(inputs, y, class_weight={1: 2.0}), own.evaluate(inputs, y, verbose=0)]
    assert losses[0] == losses[2] and losses[1] == losses[3] and np.isfinite(losses[0]).all()
    padded[0, 0] = -100
    with raises_naming(ValueError, "tags", 0, -100):
        tagger.nll(inputs, padded)
    with raises_naming(tf.errors.InvalidArgumentError, "tags", 0):
        tf.function(tagger.nll)(inputs, padded)


# ---------------------------------------- dropout


FAST_RATES = [("flat", "output"), ("tener", "network")]


@pytest.mark.ci
@pytest.mark.parametrize(
    "name, where",
    [
        pytest.param(name, where, marks=[] if (name, where) in FAST_RATES else SLOW)
        for name in ("tener", "flat", "transformer-xl")
        for where in ("output", "network")
    ],
)
def test_rates_are_applied_by_the_key_in_training(name, where):
    rates = {"output_dropout": 0.5} if where == "output" else {"network": {"dropout": 0.5}}
    plain, inputs = make_tagger(name, network={"dropout": 0.0})
    tagger, _ = make_tagger(name, **{"network": {"dropout": 0.0}, **rates})
    expected = plain(inputs).numpy()
    for options in ({}, {"dropout_key": KEY, "training": False}):
        np.testing.assert_array_equal(tagger(inputs, **options), expected)
    np.testing.assert_array_equal(plain(inputs, training=True, dropout_key=KEY), expected)
    dropped = tagger(inputs, training=True, dropout_key=KEY).numpy()
    assert np.abs(dropped - expected).max() > 0.05
    np.testing.assert_array_equal(tagger(inputs, training=True, dropout_key=KEY), dropped)
    assert np.abs(tagger(inputs, training=True).numpy() - dropped).max() > 1e-3
    nll = tagger.nll(inputs, random_tags(), training=True, dropout_key=KEY)
    of_crf = tagger.crf.transitions, tagger.crf.start_scores, tagger.crf.end_scores
    np.testing.assert_allclose(nll, crf_nll(dropped, random_tags(), ids(LENGTHS) != 0, *of_crf), rtol=1e-5)


# ---------------------------------------- training and evaluation

TRAINING_LENGTHS = [5, 2, 3, 1, 4, 4, 1, 2]


def batches(name, batch_size=4, lengths=TRAINING_LENGTHS):
    """Sentences whose tags follow from their ids."""
    inputs = CASES[name][1](lengths)
    target = ids(lengths) % len(LABELS)
    return tf.data.Dataset.from_tensor_slices((inputs, target.astype(np.int32))).batch(batch_size)


def sgd(rate=0.1, **options):
    return txl_tf.make_optimizer(rate, optimizer="sgd", schedule="constant", train_steps=1000, **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", cases("keras"))
def test_fit_learns(name):
    tagger = txl_tf.Tagger(CASES[name][0](), LABELS, seed=0)
    tagger.compile(txl_tf.make_optimizer(0.03, schedule="constant", train_steps=1000, clip=5.0))
    before = tagger.evaluate(batches(name), verbose=0, return_dict=True)
    tagger.optimizer.build(tagger.trainable_variables)  # else the step is traced twice
    history = tagger.fit(batches(name), epochs=12, verbose=0).history
    after = tagger.evaluate(batches(name), verbose=0, return_dict=True)
    assert after["loss"] < 0.5 * before["loss"] and after["f1"] > before["f1"]
    assert history["loss"][-1] < history["loss"][0] and history["grad_norm"][0] > 0


def test_a_step_of_sgd_follows_the_gradient_of_the_mean_nll_of_sentences_that_have_elements():
    tagger, _ = make_tagger("tener")
    inputs, tags = as_tensors(tener_inputs([4, 0, 2])), random_tags([4, 0, 2])
    before = [weight.numpy() for weight in tagger.trainable_variables]
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tagger.nll(inputs, tags)) / 2
    gradients = [tf.convert_to_tensor(g) for g in tape.gradient(loss, [w.value for w in tagger.trainable_variables])]
    tagger.compile(sgd(clip=None, momentum=0.0), run_eagerly=True)
    logs = tagger.train_on_batch(inputs, tags, return_dict=True)
    assert logs["loss"] == pytest.approx(float(loss), rel=1e-5)
    assert logs["grad_norm"] == pytest.approx(float(tf.linalg.global_norm(gradients)), rel=1e-5)
    for weight, value, gradient in zip(tagger.trainable_variables, before, gradients, strict=True):
        np.testing.assert_allclose(weight, value - 0.1 * gradient, rtol=1e-5, atol=1e-6, err_msg=weight.path)


@pytest.mark.parametrize("name", cases("keras", of=["keras", "tener", "transformer-xl"]))
def test_evaluation_counts_entities_and_nll_over_all_batches(name):
    """Of batches of 3, 3 and 2, as one pass over Python's spans."""
    tagger, _ = make_tagger(name)
    tagger.compile(sgd(), run_eagerly=name == "keras")  # `test_fit_learns` evaluates it in a graph
    data = batches(name, batch_size=3)
    found = tagger.evaluate(data, verbose=0, return_dict=True)
    counts, nll = np.zeros(3), []
    for inputs, tags in data:
        nll += tagger.nll(inputs, tags).numpy().tolist()
        mask = tagger.emissions(inputs)[1].numpy()
        paths, gold = (python_spans(LABELS, x.numpy(), mask) for x in (tagger.decode(inputs)[0], tags))
        right = sum(len({*a} & {*b}) for a, b in zip(paths, gold, strict=True))
        counts += [right, sum(map(len, paths)), sum(map(len, gold))]
    assert counts[0] > 0
    precision, recall, f1 = prf(*counts)
    expected = {"loss": np.mean(nll), "precision": precision, "recall": recall, "f1": f1}
    assert found.keys() >= expected.keys()
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, rel=1e-5), key


@pytest.mark.parametrize("name", cases("keras, a mask"))
def test_predict_gives_the_tags_that_decode_gives(name):
    tagger, inputs = make_tagger(name)
    tagger.compile()
    data = tf.data.Dataset.from_tensors(inputs).repeat(2)
    np.testing.assert_array_equal(tagger.predict(data, verbose=0), np.tile(tagger.decode(inputs)[0], [2, 1]))


def test_compile_takes_no_loss():
    tagger, _ = make_tagger("keras")
    with raises_parameter("loss", "mse"):
        tagger.compile(sgd(), loss="mse")
    with pytest.raises(ParameterError) as caught:
        tagger.compile(sgd(), loss_weights=[1.0])
    assert caught.value.name == "loss_weights"


@SLOW
@pytest.mark.parametrize("name", ["tener", "flat", "transformer-xl"])
def test_two_replicas_train_and_evaluate_as_one(name, two_replicas):
    def train():
        tagger, _ = make_tagger(name, output_dropout=0.1, network={"dropout": 0.1, "seed": 1})
        tagger.compile(sgd(clip=1.0))
        history = tagger.fit(batches(name), epochs=1, verbose=0).history
        scores = tagger.evaluate(batches(name), verbose=0, return_dict=True)
        return history["loss"], scores, [weight.numpy() for weight in tagger.trainable_variables]

    losses, scores, weights = train()
    with two_replicas.scope():
        found_losses, found_scores, found_weights = train()
    np.testing.assert_allclose(found_losses, losses, rtol=1e-5)
    assert found_scores == pytest.approx(scores, rel=1e-4)
    for found, expected in zip(found_weights, weights, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@SLOW
@pytest.mark.parametrize("name", ["tener", "flat"])
def test_xla_trains_as_a_graph_does(name):
    def train(**options):
        tagger, _ = make_tagger(name, output_dropout=0.1, network={"dropout": 0.1, "seed": 1})
        tagger.compile(sgd(0.02, clip=1.0), **options)
        return tagger.fit(batches(name), epochs=2, verbose=0).history["loss"]

    np.testing.assert_allclose(train(jit_compile=True), train(), rtol=1e-5)


# ---------------------------------------- weights


class Stepping:
    """A tagger whose every call trains one batch from the same weights on."""

    def __init__(self, name):
        self.model, _ = make_tagger(name)
        self.model.compile(sgd(clip=None, momentum=0.0), run_eagerly=True)
        self.start = self.model.get_weights()

    def __call__(self, x, y, **weights):
        self.model.set_weights(self.start)
        logs = self.model.train_on_batch(x, y, return_dict=True, **weights)
        return logs, self.model.get_weights()

    def assert_same(self, batch, other):
        (logs, weights), (expected, expected_weights) = (self(*x[:2], **x[2]) for x in (batch, other))
        assert logs == pytest.approx(expected, rel=1e-4)
        for found, array in zip(weights, expected_weights, strict=True):
            np.testing.assert_allclose(found, array, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "labels", [set(LABELS), {label: i for i, label in enumerate(reversed(LABELS))}], ids=["set", "ids"]
)
def test_labels_without_an_order_are_refused(labels):
    with raises_parameter("labels", labels, "a list of tags"):
        txl_tf.Tagger(txl_tf.Tener(**SETTINGS), labels)


def test_kinds_follow_from_the_labels():
    tagger = txl_tf.Tagger(txl_tf.Tener(**SETTINGS), LABELS)
    with pytest.raises(AttributeError):
        tagger.kinds = ["X"]
    assert tagger.kinds == ["X", "Y"]


def network_of_ids():
    """A network of the user's own, with an attribute that functional models have, too."""

    class Own(keras.layers.Embedding):
        def outputs(self):
            raise AssertionError

    return Own(N_TOKEN, 4)


def test_a_mask_of_a_network_of_the_user_s_own_is_bool_or_0_and_1():
    tagger, array = txl_tf.Tagger(network_of_ids(), LABELS), ids(LENGTHS)
    mask = array != 0
    expected = tagger.decode({"a": array, "mask": mask})[1]
    np.testing.assert_array_equal(tagger.decode({"a": array, "mask": mask.astype("float32")})[1], expected)
    added = np.where(mask, 0, -1e9).astype("float32")
    tagger.compile("sgd")
    for use in (tagger.decode, lambda inputs: tagger.fit(inputs, np.zeros_like(array), verbose=0)):
        with raises_parameter("inputs['mask']"):
            use({"a": array, "mask": added})


def test_a_crf_of_a_user_is_used_by_its_nll_and_decode_but_its_call_is_refused():
    class Last(txl_tf.layers.CRF):
        """Decodes the last tag everywhere."""

        def decode(self, emissions, mask=None):
            tags, score = super().decode(emissions, mask)
            return tf.ones_like(tags) * (self.n_tag - 1), score

    class OwnCall(txl_tf.layers.CRF):
        def call(self, emissions, mask=None):
            return super().call(emissions, mask) * 0

    def with_crf(cls):
        tagger = txl_tf.Tagger(plain_encoder(), LABELS)
        tagger.crf = cls(len(LABELS))
        return tagger

    inputs, tagger = tf.constant(ids(LENGTHS)), with_crf(Last)
    assert np.unique(tagger.predict(inputs, verbose=0)).tolist() == [len(LABELS) - 1]
    tagger.compile("sgd")
    tagger = with_crf(OwnCall)
    tags = tf.constant(random_tags())
    methods = (
        lambda: tagger.compile("sgd"), lambda: tagger.fit(inputs, tags, verbose=0), lambda: tagger.entities(inputs),
        lambda: tagger.evaluate(inputs, tags, verbose=0), lambda: tagger.predict(inputs, verbose=0),
    )  # fmt: skip
    for method in methods:
        with raises_parameter("call"):
            method()


def test_a_set_of_labels_is_refused():
    with raises_parameter("labels", set(LABELS), "a list of tags"):
        txl_tf.Tagger(txl_tf.Tener(**SETTINGS), set(LABELS))


def test_methods_take_lists():
    tagger, array = txl_tf.Tagger(txl_tf.Tener(**SETTINGS), LABELS), ids([3, 2])
    lists, inputs = {"chars": array.tolist()}, {"chars": array}
    np.testing.assert_array_equal(tagger.decode(lists)[1], tagger.decode(inputs)[1])
    np.testing.assert_array_equal(tagger.entities(lists)["probs"], tagger.entities(inputs)["probs"])
    np.testing.assert_array_equal(tagger.nll(lists, [[0, 1, 2], [0, 0, 0]]), tagger.nll(inputs, [[0, 1, 2], [0, 0, 0]]))
    probs = [tagger.network.attention_probs(x, layer=0) for x in (lists, inputs)]
    np.testing.assert_array_equal(*probs)


@pytest.mark.parametrize("wrong", [N_TOKEN, -1])
def test_ids_outside_the_vocabulary_are_named(wrong):
    tagger = txl_tf.Tagger(txl_tf.Tener(**SETTINGS, n_bigram=N_BIGRAM), LABELS)
    for name in ("chars", "bigrams"):
        inputs = {"chars": [[1, 2]], "bigrams": [[1, 2]], name: [[1, wrong]]}
        with raises_parameter(f"inputs['{name}']", wrong):
            tagger.decode(inputs)


@pytest.mark.ci
@pytest.mark.parametrize(
    "name, changed, number, jit_compile",
    [
        ("tener", "chars", N_TOKEN, False), ("tener", "bigrams", -1, False), ("flat", "lattice", N_TOKEN, False),
        ("flat", "seq_len", 9, False), ("flat", "lex_num", -1, False), ("flat", "pos_e", -1, False),
        ("keras", "tags", len(LABELS), False), ("keras", "tags", len(LABELS), True),
    ],
)  # fmt: skip
def test_values_in_datasets_are_named(name, changed, number, jit_compile):
    """The input pipeline finds them, so XLA and GPUs do not compute with them. Tags at padding have no meaning."""
    make, make_inputs = CASES[name]
    tagger = txl_tf.Tagger(make(), LABELS)
    tagger.compile("sgd", jit_compile=jit_compile)
    inputs, tags = make_inputs(), random_tags()

    def batches(inputs, tags):
        return tf.data.Dataset.from_tensors((inputs, tags))

    good = batches(inputs, np.where(ids(LENGTHS) != 0, tags, 99))
    array = (tags if changed == "tags" else inputs[changed]).copy()
    array[(0,) * array.ndim] = number
    bad = batches(inputs, array) if changed == "tags" else batches({**inputs, changed: array}, tags)
    argument = "tags" if changed == "tags" else f"inputs['{changed}']"
    for method in (tagger.fit, tagger.evaluate):
        with raises_naming(tf.errors.InvalidArgumentError, argument):
            method(bad, verbose=0)
    if name == "tener":
        with raises_naming(tf.errors.InvalidArgumentError, argument):
            tagger.fit(good, validation_data=bad, verbose=0)


def test_a_dataset_may_have_named_elements_and_its_labels_do_not_matter_to_predict():
    tagger = txl_tf.Tagger(txl_tf.Tener(**SETTINGS), LABELS)
    tagger.compile("sgd")
    inputs = {"chars": ids(LENGTHS)}
    named = collections.namedtuple("Named", "x y")(inputs, random_tags())
    assert len(tagger.fit(tf.data.Dataset.from_tensors(named), verbose=0).history["loss"]) == 1
    expected = tagger.predict(inputs, verbose=0)
    for others in (([f"row {i}" for i in range(len(LENGTHS))],), (np.arange(len(LENGTHS)), -np.ones(len(LENGTHS)))):
        found = tagger.predict(tf.data.Dataset.from_tensors((inputs, *others)), verbose=0)
        np.testing.assert_array_equal(found, expected)


def test_a_sentence_of_weight_zero_may_have_an_impossible_path():
    tagger = txl_tf.Tagger(txl_tf.Tener(**SETTINGS), LABELS)
    tagger.crf.end_scores.assign([0, 0, -np.inf, 0, 0])
    emissions, mask = tf.zeros([2, 3, 5]), tf.fill([2, 3], True)
    tags, weights = tf.constant([[0, 1, 2], [0, 0, 0]]), tf.constant([0.0, 2.0])
    found = tagger._nll_and_weight(emissions, mask, tags, weights)
    np.testing.assert_allclose(found, [2 * np.log(5 * 5 * 4), 2], rtol=1e-6)


@pytest.mark.parametrize("name", cases("keras, a mask", of=["tener", "flat", "keras, a mask"]))
def test_sentences_count_by_their_weights_or_by_the_mean_of_those_of_their_elements(name):
    """Weights of 0 train nothing; a sentence of weight 2 is the sentence twice. One row is padding alone."""
    stepping, lengths = Stepping(name), [5, 0, 3, 2]
    inputs, tags = CASES[name][1](lengths), random_tags(lengths)
    logs, weights = stepping(inputs, tags, sample_weight=np.zeros(4))
    assert logs == {"loss": 0, "grad_norm": 0}
    assert all(np.array_equal(found, array) for found, array in zip(weights, stepping.start, strict=True))

    rows, twice = np.array([1.0, 4.0, 2.0, 0.0]), [0, 2, 2]
    again = {key: np.take(x, twice, 0) for key, x in inputs.items()}
    stepping.assert_same((inputs, tags, {"sample_weight": rows}), (again, tags[twice], {}))
    if name == "keras, a mask":  # elements anywhere in a row
        inputs, tags = {key: np.roll(x, 2, 1) for key, x in inputs.items()}, np.roll(tags, 2, 1)
    mask = np.roll(ids(lengths), 2 * (name == "keras, a mask"), 1) != 0
    elements = np.random.default_rng(0).uniform(0, 2, mask.shape)
    means = [x[kept].mean() if kept.any() else 7.0 for x, kept in zip(elements, mask, strict=True)]
    of_elements = {"sample_weight": elements.astype(np.float32)}
    stepping.assert_same((inputs, tags, of_elements), (inputs, tags, {"sample_weight": np.array(means)}))
    of_class = np.where(tags == 1, 3.0, np.where(tags == 0, 0.5, 1.0))
    stepping.assert_same(
        (inputs, tags, {"class_weight": {1: 3.0, 0: 0.5}}), (inputs, tags, {"sample_weight": of_class})
    )


def test_evaluation_weighs_the_nll_and_counts_entities_as_they_are():
    tagger, inputs = make_tagger("tener")
    tagger.compile(sgd(), run_eagerly=True)
    tags, weights = random_tags(), np.array([0.1, 0.2, 0.0, 0.3], np.float32)
    tags[2] = tagger.decode(inputs)[0][2]  # which counts, although its weight is 0
    plain = tagger.evaluate(inputs, tags, verbose=0, return_dict=True)
    expected = {**plain, "loss": np.average(tagger.nll(inputs, tags), weights=weights)}
    assert expected["f1"] > 0 and expected["loss"] != pytest.approx(plain["loss"], rel=1e-2)
    found = tagger.evaluate(inputs, tags, batch_size=3, sample_weight=weights, verbose=0, return_dict=True)
    assert found == pytest.approx(expected, rel=1e-5)
    triples = tf.data.Dataset.from_tensors((inputs, tags, weights))
    assert tagger.evaluate(triples, verbose=0, return_dict=True) == pytest.approx(expected, rel=1e-5)


def test_bad_weights_and_no_tags_are_one_clear_error():
    tagger, inputs = make_tagger("keras")
    tagger.compile(sgd(), run_eagerly=True)
    for arguments, weights, name, limit in [
        ((), {}, "y", "fit(inputs, tags)"),
        ((random_tags(),), {"sample_weight": np.ones([4, 4])}, "sample_weight", "[batch, labels=5]"),
        ((random_tags(),), {"class_weight": {5: 1.0}}, "class_weight", "0 to 4"),
    ]:
        with raises_parameter(name, limit=limit):
            tagger.train_on_batch(inputs, *arguments, **weights)
            pytest.fail(f"no error: {name}")


# ---------------------------------------- export


@pytest.mark.parametrize("name", cases("keras, two inputs"))
def test_an_exported_tagger_gives_its_emissions_for_batches_of_any_size(name, tmp_path):
    """Before any call, where the network knows its inputs; after one; and loaded from a file."""
    make, inputs_of = CASES[name]
    tagger, inputs = txl_tf.Tagger(make(), LABELS), as_tensors(inputs_of([3, 7, 2]))
    if name == "transformer-xl":
        with raises_parameter("export"):
            tagger.export(tmp_path / "unknown", verbose=False)
    if name in ("transformer-xl", "keras, a mask"):
        tagger(inputs_of())
        tagger.save(tmp_path / "tagger.keras")
        tagger = keras.saving.load_model(tmp_path / "tagger.keras")
    tagger.export(tmp_path / "model", verbose=False)
    served = tf.saved_model.load(tmp_path / "model")
    np.testing.assert_allclose(served.serve(inputs), tagger(inputs), atol=1e-5)


# ---------------------------------------- saving and half precision


@pytest.mark.parametrize("name", cases("keras, two inputs"))
def test_a_saved_tagger_gives_identical_emissions(name, tmp_path):
    tagger, inputs = make_tagger(name, output_dropout=0.1, constraints=False)
    tagger.save(tmp_path / "tagger.keras")
    loaded = keras.saving.load_model(tmp_path / "tagger.keras")
    np.testing.assert_array_equal(loaded(inputs), tagger(inputs))
    tags = random_tags()
    np.testing.assert_array_equal(loaded.nll(inputs, tags), tagger.nll(inputs, tags))
    assert (loaded.labels, loaded.constraints, loaded.output_dropout, loaded.seed) == (LABELS, False, 0.1, 0)


@pytest.mark.parametrize("name", cases("keras, a mask", of=["flat", "keras, a mask", "transformer-xl"]))
def test_a_saved_tagger_trains_on_as_it_would_have(name, tmp_path):
    """The optimizer's state and the keys of dropout are those of the second epoch."""
    rates = {} if "keras" in name else {"network": {"dropout": 0.1}}
    tagger, inputs = make_tagger(name, output_dropout=0.1, **rates)
    tagger.compile(sgd(momentum=0.9), run_eagerly=True)
    data = batches(name, batch_size=8)
    tagger.fit(data, verbose=0)
    tagger.save(tmp_path / "tagger.keras")
    loaded = keras.saving.load_model(tmp_path / "tagger.keras")
    expected = tagger.fit(data, verbose=0).history
    assert loaded.fit(data, verbose=0).history == expected
    np.testing.assert_array_equal(loaded(inputs), tagger(inputs))
    other = keras.saving.load_model(tmp_path / "tagger.keras")
    other.optimizer.iterations.assign(0)
    assert other.fit(data, verbose=0).history != expected


class Lazy:
    """A network without `build`, whose parts its call builds."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.embedding = keras.layers.Embedding(N_TOKEN, 6)
        self.dense = keras.layers.Dense(8)

    def call(self, x):
        x = [self.embedding(tokens) for tokens in (x.values() if isinstance(x, dict) else [x])]
        return self.dense(tf.concat(x, -1))


@keras.saving.register_keras_serializable("tagger_test")
class LazyLayer(Lazy, keras.Layer):
    pass


@keras.saving.register_keras_serializable("tagger_test")
class LazyModel(Lazy, keras.Model):
    pass


@keras.saving.register_keras_serializable("tagger_test")
class LazyTagger(txl_tf.Tagger):
    """A tagger with a part of its own that its call builds."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.scores = keras.layers.Dense(len(LABELS))

    def call(self, inputs, training=None, dropout_key=None):
        return self.scores(super().call(inputs, training=training, dropout_key=dropout_key))


@pytest.mark.filterwarnings("ignore")  # of Keras: its `build` cannot build the layer
@pytest.mark.ci
@pytest.mark.parametrize("cls, make, name, frozen", [
    (txl_tf.Tagger, LazyLayer, "keras", False),
    (txl_tf.Tagger, LazyLayer, "keras, two inputs", True),
    (txl_tf.Tagger, LazyModel, "keras, two inputs", False),
    (LazyTagger, plain_encoder, "keras, a mask", False),
])  # fmt: skip
def test_a_saved_tagger_has_the_weights_of_parts_that_its_call_builds(cls, make, name, frozen, tmp_path):
    """And the state of their optimizer, and what is frozen in them."""
    tagger, inputs = cls(make(), LABELS, seed=0), CASES[name][1]()
    tagger(inputs)
    if frozen:
        [*tagger.network._flatten_layers()][-1].trainable = False
    tagger.compile(sgd(momentum=0.9))
    tags = random_tags()
    tagger.fit(inputs, tags, verbose=0)
    tagger.save(tmp_path / "tagger.keras")
    loaded = keras.saving.load_model(tmp_path / "tagger.keras")
    assert [w.shape for w in loaded.trainable_variables] == [w.shape for w in tagger.trainable_variables]
    np.testing.assert_array_equal(loaded(inputs), tagger(inputs))
    for variable, expected in zip(loaded.optimizer.variables, tagger.optimizer.variables, strict=True):
        np.testing.assert_array_equal(variable, expected)
    for model in (tagger, loaded):
        model.fit(inputs, tags, verbose=0)
    np.testing.assert_array_equal(loaded(inputs), tagger(inputs))


@pytest.mark.parametrize("name", cases("tener", of=["tener", "flat"]))
def test_in_bfloat16_emissions_and_nll_stay_float32_and_close(name):
    options = {"dtype": "mixed_bfloat16"}
    # With a scale of 0.8, attention scores of FLAT reach 400: one rounding of bfloat16 changes a score by 1. With seed
    # 1, errors are at most 0.3 of the tolerance, by oneDNN with AMX and by Eigen; with seed 0, up to 1.01 of it.
    sizes = {"scale": 0.3, "seed": 1}
    expected, inputs = make_tagger(name, **sizes)
    tagger, _ = make_tagger(name, **sizes, network=options, **options)
    tags = random_tags()
    emissions, _ = tagger.emissions(inputs)
    nll = tagger.nll(inputs, tags)
    assert tagger.network(inputs).dtype == tf.bfloat16
    assert emissions.dtype == nll.dtype == tf.float32
    assert all(weight.dtype == "float32" for weight in tagger.trainable_variables)
    np.testing.assert_allclose(nll, expected.nll(inputs, tags), rtol=0.05, atol=0.1)
    assert np.abs(nll - expected.nll(inputs, tags)).max() > 0


@SLOW
def test_in_bfloat16_fit_learns():
    options = {"dtype": "mixed_bfloat16"}
    tagger, _ = make_tagger("flat", network=options, **options)
    tagger.compile(txl_tf.make_optimizer(0.02, schedule="constant", train_steps=1000, clip=5.0))
    losses = tagger.fit(batches("flat"), epochs=8, verbose=0).history["loss"]
    assert losses[-1] < 0.8 * losses[0]


# ---------------------------------------- errors


BAD = [
    ({"labels": []}, "labels", "at least one"),
    ({"labels": ["O", "O"]}, "labels", "different"),
    ({"output_dropout": 1.0}, "output_dropout", "[0, 1)"),
    ({"scheme": "bio"}, "scheme", "none"),
    ({"token_level": "byte"}, "token_level", "word"),
    ({"start_end": "yes"}, "start_end", "True"),
]


def test_bad_arguments_are_errors():
    for options, name, limit in BAD:
        with raises_parameter(name, options[name], limit=limit):
            txl_tf.Tagger(plain_encoder(), **{"labels": LABELS, **options})
            pytest.fail(f"no error: {options}")
    for labels, wrong in ((["O", "X-PER"], "'X-PER'"), (["O", "I-X", "M-X"], "'M-X'")):
        with pytest.raises(ValueError) as raised:
            txl_tf.Tagger(plain_encoder(), labels)
        assert wrong in str(raised.value)


def test_inputs_without_a_mask_are_an_error_also_for_their_shapes():
    tagger = txl_tf.Tagger(two_inputs_encoder(), LABELS)
    inputs = {name: np.array([[3, 7, 2]], np.int32) for name in ("tokens", "shapes")}
    shapes = {name: x.shape for name, x in inputs.items()}
    with raises_parameter("inputs"):
        tagger(inputs)
    with raises_parameter("inputs", shapes):
        tagger.compute_output_shape(shapes)
    assert tagger.compute_output_shape({**shapes, "mask": (1, 3)}) == (1, 3, len(LABELS))


@keras.saving.register_keras_serializable("tests")
class Dropped(keras.layers.Layer):
    """A layer that leaves it to Keras to tell its layers whether this is training."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.embedding = keras.layers.Embedding(N_TOKEN, 8, embeddings_initializer="ones")
        self.dropout, self.norm = keras.layers.Dropout(0.5, seed=0), keras.layers.BatchNormalization()
        self.zeros = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, tokens):
        hidden = self.dropout(self.embedding(tokens))
        self.zeros.assign(tf.reduce_mean(tf.cast(hidden == 0, tf.float32)))
        return self.norm(hidden)


@pytest.mark.slow
def test_layers_of_a_network_without_an_argument_for_it_know_whether_this_is_training():
    tagger = txl_tf.Tagger(Dropped(), LABELS, seed=0)
    tagger.compile(sgd())
    inputs, tags = ids([9] * 20), random_tags([9] * 20)
    tagger.fit(inputs, tags, batch_size=20, verbose=0)
    assert 0.4 < float(tagger.network.zeros) < 0.6
    assert float(tf.reduce_max(abs(tagger.network.norm.moving_mean))) > 1e-3
    tagger.evaluate(inputs, tags, verbose=0)
    assert float(tagger.network.zeros) == 0


def test_weights_are_loaded_over_a_functional_network_and_are_an_error_where_a_call_must_make_them(tmp_path):
    file = str(tmp_path / "tagger.weights.h5")
    tagger, inputs = make_tagger("keras")
    tagger.save_weights(file)
    for built in (False, True):
        other = txl_tf.Tagger(plain_encoder(), LABELS)
        if built:
            other.build((None, 5))
        other.load_weights(file)
        np.testing.assert_array_equal(other(inputs), tagger(inputs))

    class Network(keras.Model):  # whose width only a call tells
        def call(self, x):
            return tf.one_hot(x, 8)

    by_call = txl_tf.Tagger(Network(), LABELS)
    by_call.build((None, 5))
    with raises_parameter("load_weights", file):
        by_call.load_weights(file)


@pytest.mark.parametrize("make", [
    lambda base: base(CASES["tener"][0](), LABELS),
    pytest.param(lambda base: base(plain_encoder(), LABELS), marks=SLOW),
])  # fmt: skip
def test_a_subclass_may_add_layers_after_the_constructor(make):
    class Own(txl_tf.Tagger):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.head = keras.layers.Dense(2)

    tagger = make(Own)
    assert tagger.head in tagger.layers


@pytest.mark.parametrize("name", ["call", "functional"])
def test_a_network_of_keras_does_not_read_padding_that_a_mask_names(name):
    keras.utils.set_random_seed(0)
    network = keras.layers.Bidirectional(keras.layers.LSTM(4, return_sequences=True))
    if name == "functional":
        features = keras.Input([None, 3])
        network = keras.Model(features, network(features))
    tagger = txl_tf.Tagger(network, LABELS, seed=0)
    x, tags = np.random.default_rng(0).normal(size=(2, 5, 3)).astype(np.float32), random_tags([5, 5])
    alone = tagger.nll({"x": x[:, :3], "mask": np.ones([2, 3], bool)}, tags[:, :3])
    padded = tagger.nll({"x": x, "mask": np.arange(5) < np.array([[3], [3]])}, tags)
    np.testing.assert_allclose(padded, alone, rtol=1e-5)


@pytest.mark.parametrize("name", cases("tener", "keras", of=["tener", "flat", "keras"]))
def test_there_is_a_tag_for_every_element(name):
    tagger, inputs = make_tagger(name)
    tagger.compile(sgd())
    for tags in (random_tags([6] * 4), random_tags([4] * 4)):
        with raises_parameter("tags", limit="time=5"):
            tagger.train_on_batch(inputs, tags)
        with raises_parameter("tags", limit="batch=4, time=5"):
            tagger.nll(inputs, tags)


@pytest.mark.slow
def test_batches_whose_gradients_keras_accumulates_have_masks_of_their_own():
    tagger, inputs = make_tagger("tener", network={"dropout": 0.5})
    tagger.compile(keras.optimizers.SGD(0.0, gradient_accumulation_steps=3))
    losses = [tagger.train_on_batch(inputs, random_tags(), return_dict=True)["loss"] for _ in range(4)]
    assert len(set(losses)) == 4


@pytest.mark.slow
def test_regularizers_of_the_network_are_trained_for():
    def kernel_after_a_step(regularizer):
        keras.utils.set_random_seed(0)
        tokens = keras.Input([None], dtype="int32")
        hidden = keras.layers.Embedding(N_TOKEN, 6)(tokens)
        network = keras.Model(tokens, keras.layers.Dense(8, kernel_regularizer=regularizer)(hidden))
        before = network.layers[-1].kernel.numpy()
        tagger = txl_tf.Tagger(network, LABELS, seed=0)
        tagger.compile(sgd(clip=None, momentum=0.0))
        tagger.fit(ids(LENGTHS), random_tags(), verbose=0)
        return before, network.layers[-1].kernel.numpy()

    assert_regularized(kernel_after_a_step, atol=1e-6)


@pytest.mark.ci
def test_tags_of_another_length_have_a_name_once_lengths_are_unknown():
    tagger = txl_tf.Tagger(txl_tf.Tener(**SETTINGS, pos_embed="fix", max_seq_len=6), LABELS)
    tagger.compile("sgd")

    def dataset(lengths):
        """Batches of one sentence, of unknown lengths: those of the characters and of the tags."""
        pairs = [({"chars": np.full(n, 3, np.int32)}, np.zeros(n_tags, np.int32)) for n, n_tags in lengths]
        spec = tf.TensorSpec([None], tf.int32)
        data = tf.data.Dataset.from_generator(lambda: iter(pairs), output_signature=({"chars": spec}, spec))
        return data.padded_batch(1)

    tagger.evaluate(dataset([(4, 4)]), verbose=0)
    inputs = {"chars": ids([5, 4])}
    for n in (1, 6):
        for method in (tagger.fit, tagger.evaluate):
            with raises_parameter("tags", limit="time=5"):
                method(inputs, np.zeros([2, n], np.int32), verbose=0)
    for lengths, facts in (([(4, 4), (5, 6)], ("tags", 5, 6)), ([(4, 4), (7, 7)], ("max_seq_len=6", 7))):
        with pytest.raises(tf.errors.InvalidArgumentError) as caught:
            tagger.fit(dataset(lengths), verbose=0)
        assert mentions(str(caught.value), *facts) and "node" not in str(caught.value)


@pytest.mark.ci
def test_a_dataset_without_ranks_trains_as_its_arrays_do():
    tagger = txl_tf.Tagger(txl_tf.Tener(**SETTINGS), LABELS)
    tagger.compile("sgd")
    batch = {"chars": ids(LENGTHS)}, random_tags()
    dataset = tf.data.Dataset.from_generator(lambda: iter([batch]), output_types=({"chars": tf.int32}, tf.int32))
    expected = tagger.evaluate(*batch, verbose=0)
    np.testing.assert_allclose(tagger.evaluate(dataset, verbose=0), expected, rtol=1e-5)
    np.testing.assert_allclose(tagger.fit(dataset, verbose=0).history["loss"], expected[0], rtol=1e-5)


def test_fractions_are_no_ids_and_no_tags():
    tagger = txl_tf.Tagger(txl_tf.Tener(**SETTINGS), LABELS)
    chars, tags = ids(LENGTHS), random_tags()
    expected = tagger.nll({"chars": chars}, tags)
    np.testing.assert_array_equal(tagger.nll({"chars": chars.astype(np.float64)}, tags.astype(np.float32)), expected)
    with raises_parameter("inputs['chars']", allowed="whole numbers"):
        tagger({"chars": chars + 0.5})
    with raises_parameter("tags", allowed="whole numbers"):
        tagger.nll({"chars": chars}, tags + 0.5)
    tagger.compile("sgd")
    with raises_parameter("tags", allowed="whole numbers"):
        tagger.evaluate({"chars": chars}, tags + 0.5, verbose=0)
    dataset = tf.data.Dataset.from_tensors(({"chars": chars}, tags + 0.5))
    with pytest.raises(tf.errors.InvalidArgumentError, match="tags must be whole"):
        tagger.evaluate(dataset, verbose=0)


def test_wrong_ids_in_any_row_of_arrays_have_a_name_before_the_first_step():
    tagger = txl_tf.Tagger(txl_tf.Tener(**SETTINGS), LABELS)
    tagger.compile("sgd")
    chars, tags = ids(LENGTHS), random_tags()
    weights = [variable.numpy() for variable in tagger.weights]
    for outside in (-1, SETTINGS["n_token"]):
        wrong = chars.copy()
        wrong[-1, 0] = outside
        with raises_parameter("inputs['chars']"):
            tagger.fit({"chars": wrong}, tags, batch_size=1, verbose=0)
    for outside in (-100, len(LABELS)):
        wrong = tags.copy()
        wrong[-1, 0] = outside
        with raises_parameter("tags"):
            tagger.fit({"chars": chars}, wrong, batch_size=1, verbose=0)
    for variable, before in zip(tagger.weights, weights, strict=True):
        np.testing.assert_array_equal(variable, before)
    with raises_parameter("inputs['chars']"):
        tagger.predict_on_batch({"chars": np.full([1, 2], -1)})


@pytest.mark.ci
def test_tags_of_ids_for_a_network_of_keras_are_checked_too():
    tagger = txl_tf.Tagger(plain_encoder(), LABELS)
    tagger.compile("sgd", jit_compile=True)  # whose graphs drop the checks
    chars, tags = ids(LENGTHS), random_tags()
    tags[-1, 0] = len(LABELS)
    for method in (tagger.fit, tagger.evaluate):
        with raises_parameter("tags"):
            method(chars, tags, batch_size=1, verbose=0)
    with raises_parameter("x"):  # features, of which nobody knows the padding
        tagger.fit(np.ones([2, 3, 4], np.float32), np.zeros([2, 3], int), verbose=0)


@pytest.mark.parametrize("make_inputs", [tener_inputs, flat_inputs])
def test_an_unknown_input_is_refused(make_inputs):
    inputs, tags = as_tensors(make_inputs()), random_tags()
    network = (txl_tf.Tener if make_inputs is tener_inputs else txl_tf.Flat)(**SETTINGS, n_bigram=N_BIGRAM)
    tagger = txl_tf.Tagger(network, LABELS)
    tagger.compile(sgd())
    wrong = {**inputs, "bigram": inputs["bigrams"]}
    dataset = tf.data.Dataset.from_tensors((wrong, tags))
    for run in (network, tagger, tagger.decode, tagger.predict, lambda x: tagger.fit(x, tags)):
        with raises_parameter("inputs", "bigram"):
            run(wrong)
    with raises_parameter("inputs", "bigram"):
        tagger.fit(dataset)


def test_numbers_may_be_the_mask_of_a_dictionary():
    tagger, inputs = make_tagger("keras, two inputs")
    numbers, tags = {**inputs, "mask": tf.cast(inputs["mask"], tf.int32)}, random_tags()
    tagger.compile(sgd(), run_eagerly=True)
    assert tagger.evaluate(numbers, tags, verbose=0) == tagger.evaluate(inputs, tags, verbose=0)


def test_a_dictionary_needs_a_mask():
    tagger, inputs = make_tagger("keras, two inputs")
    with raises_parameter("inputs", limit="mask"):
        tagger.decode({name: x for name, x in inputs.items() if name != "mask"})


@pytest.mark.parametrize(
    "change",
    [
        lambda x: tf.reduce_mean(x, 1), lambda x: x[:, 1:], lambda x: tf.cast(x, tf.int32), lambda x: None,
        lambda x: {"hidden": x}, lambda x: x[..., None],
    ],
    ids=["one for each row", "too short", "integers", "nothing", "a dictionary", "four dimensions"],
)  # fmt: skip
def test_a_network_without_a_hidden_state_for_every_element_is_named(change):
    class Changed(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.embedding = keras.layers.Embedding(10, 8)

        def build(self, shape):
            self.embedding.build(shape)

        def call(self, x):
            return change(self.embedding(x))

    tagger = txl_tf.Tagger(Changed(), labels=["O", "B-X", "I-X"])
    with pytest.raises(ParameterError) as caught:
        tagger.decode(np.ones([2, 5], "int32"))
    assert "network" in caught.value.name
