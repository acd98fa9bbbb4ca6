"""Error rates, by a plain loop; BLEU and chrF, which sacrebleu computes."""

import functools
import itertools

import numpy as np
import pytest

from txl_tf.errors import ParameterError
from txl_tf.runs.metrics import check_tokenizer, choose_tokenizer, corpus_scores, error_rates, group_references


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


LINES = {
    "zh": ["我爱北京天安门", "你好世界", "他在 2024 年买了 iPhone"],
    "char": ["私は北京が好きです", "こんにちは世界", "カメラ"],
    "char ": ["나는 학교에 간다", "안녕하세요"],
    "char  ": ["ฉันรักกรุงเทพ", "สวัสดีชาวโลก"],
    "char   ": ["ခင်ဗျားတို့ အားလုံး", "មនុស្សទាំងអស់"],
    "13a": ["Ich mag Berlin.", "Guten Tag, Welt, wie geht es dir?"],
    "13a ": ["I love the song 東京 by them, really.", "Я люблю Москву и её улицы."],
    "13a  ": ["yes", "no", "a b c"],
    "13a   ": ["2026-11-21", "1999-01-01"],
    "zh ": ["三九", "一"],
}


@pytest.mark.parametrize("tokenizer", LINES)
def test_lines_that_are_all_right_have_a_bleu_of_100_in_every_script(tokenizer, monkeypatch):
    pytest.importorskip("sacrebleu", reason="sacrebleu, an extra, is not installed")
    of_mecab = ("MeCab", "mecab_ko")
    monkeypatch.setattr("txl_tf.runs.metrics.is_installed", lambda name: name not in of_mecab)
    lines = LINES[tokenizer]
    assert choose_tokenizer(lines) == tokenizer.strip()
    for found in (lines, lines[-1:], [line[:1] for line in lines]):
        for others in ([], ["something else that nobody says here"]):
            scores = corpus_scores(found, [[line, *others] for line in found])
            assert " = 100.00 " in scores["BLEU"] and scores["chrF2"].endswith(" = 100.00")


def test_the_tokenizer_is_chosen_by_packages_and_by_what_a_token_is(monkeypatch):
    assert choose_tokenizer(["2026-11-21", "ab"], "char") == "char" == choose_tokenizer(["kæt", "dɔg"], "char")
    assert choose_tokenizer(["the cat sat", "a dog", "yes"], "char") == "13a" == choose_tokenizer(["123", "4"], "word")
    monkeypatch.setattr("txl_tf.runs.metrics.is_installed", lambda name: True)
    assert [choose_tokenizer(LINES[name]) for name in ("char", "char ")] == ["ja-mecab", "ko-mecab"]


def test_bleu_leaves_no_orders_out_where_the_right_lines_have_them():
    sacrebleu = pytest.importorskip("sacrebleu", reason="sacrebleu, an extra, is not installed")
    found, right = ["the cat sat", "on it", "a"], [["the cat sat on a mat"], ["it was on it"], ["a dog barks here"]]
    scores = corpus_scores(found, right)
    expected = sacrebleu.corpus_bleu(found, [list(column) for column in zip(*right, strict=True)])
    assert f" = {expected.score:.2f} " in scores["BLEU"] and "|eff:no|tok:13a|" in scores["BLEU"]
    assert scores["BLEU"].startswith("BLEU|nrefs:1|") and scores["chrF2"].startswith("chrF2|nrefs:1|")
    short = corpus_scores(["the cat", "a dog"], [["the cat"], ["a cat"]])["BLEU"]
    assert "|eff:yes|" in short and " = 61.24 75.0/50.0/0.0/0.0 " in short  # the root of 3/4 times 1/2
    assert "|tok:char|" in corpus_scores(found, right, "char")["BLEU"]


def test_tokenizers_that_sacrebleu_lacks_are_refused(monkeypatch):
    pytest.importorskip("sacrebleu", reason="sacrebleu, an extra, is not installed")
    check_tokenizer("zh")
    with pytest.raises(ParameterError) as caught:
        check_tokenizer("jp")
    assert (caught.value.name, caught.value.value) == ("bleu_tokenize", "jp") and "ja-mecab" in caught.value.allowed
    monkeypatch.setattr("sacrebleu.tokenizers.tokenizer_ja_mecab.MeCab", None)
    with pytest.raises(ParameterError) as caught:
        check_tokenizer("ja-mecab")
    assert caught.value.value == "ja-mecab" and "13a" in caught.value.allowed
    monkeypatch.setattr("txl_tf.runs.metrics.is_installed", lambda name: False)
    with pytest.raises(ParameterError) as caught:
        check_tokenizer("zh")
    assert caught.value.name == "bleu_tokenize"


def test_without_sacrebleu_there_are_none(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert corpus_scores(["a"], [["a"]]) == {}
