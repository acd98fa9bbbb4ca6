"""Tags: which entities they mark, which may follow which, and other schemes for the same entities."""

import json

import numpy as np
import pytest
from helpers import ROOT, raises_parameter

from txl_tf.config import TAG_SCHEMES
from txl_tf.data.tagged.tags import (
    NONE,
    SCHEMES,
    Span,
    all_labels,
    allowed_transitions,
    broken_at,
    continues_table,
    convert_tags,
    detect_scheme,
    entity_table,
    kind_of,
    prf,
    spans_of,
    split_tag,
)

SPANS = json.loads((ROOT / "tests/goldens/tener/spans/config.json").read_text())["encodings"]


def fast_nlp(spans):
    """Spans as the golden values have them."""
    return [[kind.lower(), [start, end]] for kind, start, end in spans]


@pytest.mark.parametrize("encoding", SPANS)
def test_spans_and_scores_are_those_of_fast_nlp(encoding):
    right = found = expected = 0
    for sequence in SPANS[encoding]["sequences"]:
        gold, pred = (fast_nlp(spans_of(sequence[side])) for side in ("gold", "pred"))
        assert gold == sequence["gold_spans"] and pred == sequence["pred_spans"]
        right += sum(span in gold for span in pred)
        found, expected = found + len(pred), expected + len(gold)
    result = SPANS[encoding]["result"]
    np.testing.assert_allclose(prf(right, found, expected), [result[key] for key in ("pre", "rec", "f")], atol=6e-7)


@pytest.mark.parametrize("encoding", SPANS)
def test_the_tables_mark_the_same_spans(encoding):
    for sequence in SPANS[encoding]["sequences"]:
        for side in ("gold", "pred"):
            tags = sequence[side]
            labels = sorted(set(tags))
            ids = [labels.index(tag) for tag in tags]
            entity, continues = entity_table(labels)[ids], continues_table(labels)
            begins = [bool(entity[i] and not (i and continues[ids[i - 1], ids[i]])) for i in range(len(ids))]
            assert begins == [any(start == i for _, (start, _) in sequence[f"{side}_spans"]) for i in range(len(ids))]


def test_tables():
    labels = ["O", "B-A", "I-A", "B-B", "I-B"]
    expected = [[0, 0, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 0, 0], [0, 0, 0, 0, 1], [0, 0, 0, 0, 1]]
    np.testing.assert_array_equal(continues_table(labels), np.array(expected, bool), strict=True)
    np.testing.assert_array_equal(entity_table(labels), np.array([0, 1, 1, 1, 1], bool), strict=True)


def test_tags_have_a_prefix_and_perhaps_a_kind():
    assert split_tag("B-PER.NOM") == ("B", "PER.NOM") and split_tag("E-a-b") == ("E", "a-b")
    assert split_tag("O") == ("O", "") and split_tag("S") == ("S", "")


@pytest.mark.parametrize("tag", ["X-PER", "b-PER", "PER", "", "B-", "-PER", "O-PER", "B_PER"])
def test_what_is_no_tag_is_named(tag):
    with raises_parameter("tag", tag):
        detect_scheme(["O", tag])


@pytest.mark.parametrize(
    "tags, scheme",
    [
        ("O B-A I-A", "bio"),
        ("O B-A", "bio"),
        ("O", "bio"),
        ("", "bio"),
        ("B-A I-A E-A", "bioes"),
        ("S-A I-A", "bioes"),
        ("B-A E-A O", "bmes"),
        ("S", "bmes"),
        ("O M-A", "bmes"),
        ("B M E S", "bmes"),
    ],
)
def test_schemes_are_told_by_prefixes(tags, scheme):
    assert detect_scheme(tags.split()) == scheme


def test_no_scheme_has_i_and_m():
    with raises_parameter("tags", ["I-A", "M-B"]):
        detect_scheme(["O", "M-B", "I-A"])


def test_labels_of_a_scheme():
    assert (*SCHEMES, NONE) == TAG_SCHEMES
    assert all_labels(["A", "B"], "bio") == ["O", "B-A", "I-A", "B-B", "I-B"]
    assert all_labels(["A"], "bioes") == ["O", "B-A", "I-A", "E-A", "S-A"]
    assert all_labels(["A"], "bmes", outside=False) == ["B-A", "M-A", "E-A", "S-A"]
    assert all_labels([""], "bmes", outside=False) == ["B", "M", "E", "S"]


def test_transitions_are_those_of_fast_nlp(reference):
    cases = [path.parent for path in (reference / "tener").glob("*/golden.npz")]
    for case in cases:
        tags = json.loads((case / "config.json").read_text())["tags"]
        with np.load(case / "golden.npz") as golden:
            np.testing.assert_array_equal(allowed_transitions(tags), golden["const/allowed"], strict=True)
    assert len(cases) == 8


def test_transitions_of_bio_and_bmes():
    bio = [
        [1, 1, 0, 0, 1],  # O
        [1, 1, 1, 0, 1],  # B-A
        [1, 1, 1, 0, 1],  # I-A
        [1, 1, 0, 0, 0],  # start
        [0, 0, 0, 0, 0],  # end
    ]
    np.testing.assert_array_equal(allowed_transitions(["O", "B-A", "I-A"]), np.array(bio, bool))
    bmes = [
        [0, 1, 1, 0, 0, 0],  # B
        [0, 1, 1, 0, 0, 0],  # M
        [1, 0, 0, 1, 0, 1],  # E
        [1, 0, 0, 1, 0, 1],  # S
        [1, 0, 0, 1, 0, 0],
        [0, 0, 0, 0, 0, 0],
    ]
    np.testing.assert_array_equal(allowed_transitions(["B", "M", "E", "S"]), np.array(bmes, bool))


def test_a_scheme_that_is_given_is_one_of_the_labels():
    both = ["O", "B-A", "E-A", "S-A"]
    for scheme in ("bmes", "bioes"):
        np.testing.assert_array_equal(allowed_transitions(both, scheme), allowed_transitions(both))
    # With the scheme BIOES, an entity that begins with B ends with E.
    assert allowed_transitions(["O", "B-A"], "bio")[1, 3] and not allowed_transitions(["O", "B-A"], "bioes")[1, 3]
    for labels, scheme in ((both, "bio"), (["O", "I-A"], "bmes"), (both, "another")):
        with raises_parameter("scheme", scheme):
            allowed_transitions(labels, scheme)


@pytest.mark.parametrize(
    "tags, scheme, places",
    [
        ("O B-A I-A O", None, []),
        ("I-A I-A O I-B I-A", None, [0, 3, 4]),
        ("B-A M-A O E-A B-A", None, [1, 3, 4]),
        ("O B-A O", "bmes", [1]),
        ("S-A M-A S-A", None, [1]),
        ("B-A E-A S-A O", None, []),
        ("B-A", "bmes", [0]),
        ("B-A", None, []),
        ("M-A", None, [0]),
        ("", None, []),
        ("B-A I-A", "bioes", [1]),
    ],
)
def test_tags_that_break_their_scheme_are_found(tags, scheme, places):
    tags = tags.split()
    assert broken_at(tags, scheme) == places
    labels = all_labels(["A", "B"], scheme or detect_scheme(tags))
    allowed, ids = allowed_transitions(labels), [labels.index(tag) for tag in tags]
    steps = zip([len(labels), *ids], [*ids, len(labels) + 1], strict=True)
    broken = [i for i, step in enumerate(steps) if ids and not allowed[step]]  # from the tag before to tag i
    assert len(places) <= len(broken) and all(i in broken or i + 1 in broken for i in places)


def test_schemes_convert_there_and_back():
    bio = "B-A O B-A I-A B-B I-B I-B O B-B B-B".split()
    bioes = "S-A O B-A E-A B-B I-B E-B O S-B S-B".split()
    bmes = [tag.replace("I", "M") for tag in bioes]
    for tags in (bio, bioes, bmes):
        assert [convert_tags(tags, scheme) for scheme in ("bio", "bioes", "bmes")] == [bio, bioes, bmes]
    assert convert_tags(["B", "E", "S"], "bio") == ["B", "I", "B"] and convert_tags([], "bmes") == []


def test_of_the_scheme_none_every_token_is_marked_by_itself():
    tags = ["NOUN", "NOUN", "O", "B-X"]
    assert spans_of(tags, NONE) == [Span(tag, i, i + 1) for i, tag in enumerate(tags)]
    assert kind_of("NOUN", NONE) == "NOUN" and kind_of("B-X") == "X" and allowed_transitions(tags, NONE) is None
    assert not continues_table(tags, NONE).any() and entity_table(tags, NONE).all()
    with raises_parameter("tag", "NOUN"):
        kind_of("NOUN")


def test_conversion_repairs_tags():
    assert convert_tags("O I-A I-A I-B".split(), "bio") == "O B-A I-A B-B".split()
    assert convert_tags("B-A O M-A E-B E-B".split(), "bmes") == "S-A O S-A S-B S-B".split()
    rng = np.random.default_rng(0)
    for scheme in ("bio", "bioes", "bmes"):
        labels = all_labels(["A", "B"], scheme)
        for _ in range(50):
            tags = [labels[i] for i in rng.integers(len(labels), size=12)]
            repaired = convert_tags(tags, scheme)
            assert spans_of(repaired) == spans_of(tags) and not broken_at(repaired, scheme)


def test_a_span_says_kind_start_and_end():
    assert spans_of(["O", "B-A", "I-A", "S-B"]) == [Span("A", 1, 3), Span("B", 3, 4)]
    assert spans_of([]) == []


def test_scores_are_0_where_there_is_nothing():
    assert prf(0, 0, 0) == (0, 0, 0) and prf(0, 3, 0) == (0, 0, 0) and prf(0, 0, 3) == (0, 0, 0)
    assert prf(1, 2, 4) == (0.5, 0.25, pytest.approx(1 / 3))
