"""Error rates, by a plain loop; BLEU and chrF, which sacrebleu computes."""

import functools
import itertools

import numpy as np
import pytest

from txl_tf.runs.metrics import corpus_scores, error_rates, group_references


def edits(a, b):
    """Levenshtein's distance by its definition."""

    @functools.cache
    def distance(i, j):
        if not i or not j:
            return i + j
        return min(distance(i - 1, j) + 1, distance(i, j - 1) + 1, distance(i - 1, j - 1) + (a[i - 1] != b[j - 1]))

    return distance(len(a), len(b))


@pytest.mark.parametrize("level", ["char", "word"])
def test_rates_are_those_of_a_plain_loop(level):
    rng = np.random.default_rng(0)
    space = " " if level == "word" else ""

    def text(least=1):
        return space.join(rng.choice(list("abc"), rng.integers(least, 7)))

    found = [text(0) for _ in range(50)]
    references = [[text() for _ in range(rng.integers(1, 4))] for _ in found]
    references[7] = [text(), found[8], found[7] or "a"]
    rates = error_rates(found, references, level)
    wrong = total = lines = 0
    for one, right in zip(found, references, strict=True):
        symbols = [x.split() if level == "word" else list(x) for x in (one, *right)]
        nearest = min((edits(symbols[0], reference), len(reference)) for reference in symbols[1:])
        wrong, total, lines = wrong + nearest[0], total + nearest[1], lines + (one not in right)
    assert rates == {"lines": pytest.approx(lines / 50), "symbols": pytest.approx(wrong / total)}


def test_a_source_on_several_lines_has_several_targets():
    grouped = group_references(["a", "b", "a"], ["x", "y", "z"])
    assert grouped == {"a": ["x", "z"], "b": ["y"]}
    assert error_rates(["z", "y"], list(grouped.values()), "char") == {"lines": 0, "symbols": 0}


@pytest.mark.parametrize("found, right, lines, symbols", [("", "a b", 1, 1), ("a", "", 1, 2), ("", "", 0, 0)])
def test_translations_and_references_may_all_be_empty(found, right, lines, symbols):
    assert error_rates([found] * 2, [[right]] * 2, "word") == {"lines": lines, "symbols": symbols}


def test_lines_of_words_are_right_whatever_their_spaces():
    assert error_rates(["a b", "a b"], [["a  b "], ["ab"]], "word") == {"lines": 0.5, "symbols": pytest.approx(2 / 3)}
    assert error_rates(["a b"], [["a b "]], "char") == {"lines": 1, "symbols": 0.25}


def test_bleu_and_chrf_are_sacrebleus():
    sacrebleu = pytest.importorskip("sacrebleu", reason="sacrebleu, an extra, is not installed")
    found, right = ["the cat sat on the mat", "a dog"], [["the cat sat on a mat", "the cat is there"], ["a dog barks"]]
    scores = corpus_scores(found, right)
    columns = [list(column) for column in itertools.zip_longest(*right)]
    assert list(scores) == ["BLEU", "chrF2"]
    assert f"{sacrebleu.corpus_bleu(found, columns).score:.2f}" in scores["BLEU"]
    assert f"{sacrebleu.corpus_chrf(found, columns).score:.2f}" in scores["chrF2"]


def test_without_sacrebleu_there_are_none(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert corpus_scores(["a"], [["a"]]) == {}
