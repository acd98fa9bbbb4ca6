"""Made-up sentences of people and towns: what decides about a word, and who has seen it before."""

import re

import pytest

from txl_tf.config import TaggedConfig
from txl_tf.data.tagged import towns
from txl_tf.data.tagged.lexicon import Lexicon
from txl_tf.data.tagged.sentences import read_corpus
from txl_tf.data.tagged.tags import spans_of


@pytest.fixture(scope="module")
def made():
    return towns.make_sentences(2000)


def marked(characters, tags):
    """The text with its entities in brackets: [高山/PER]昨天在[白石/LOC]住。"""
    text = "".join(characters)
    for start, end, kind in sorted(((s.start, s.end, s.kind) for s in spans_of(tags)), reverse=True):
        text = f"{text[:start]}[{text[start:end]}/{kind}]{text[end:]}"
    return text


def clauses(sentences):
    return [clause for sentence in sentences for clause in re.split("[，。]", marked(*sentence)) if clause]


def test_of_two_words_the_one_next_to_the_cue_is_the_name(made):
    """The word right of 在 is a place and the word right of 是 a person, whatever word stands behind it."""
    between = "|".join(filter(None, towns.BETWEEN))
    known = "|".join(sorted(towns.words(), key=len, reverse=True))
    name, other = rf"\[({known})/%s\]", f"({known})?"
    left, right = rf"{other}{name}({between})?", rf"({between})?{name}{other}"
    verb = "|".join(towns.VERBS)
    forms = [
        rf"{left % 'PER'}在{right % 'LOC'}({verb})",
        rf"在{right % 'LOC'}({verb})的是{right % 'PER'}",
        rf"{other}({known})({between})?是{right % 'PER'}(画的|送的)",
        rf"\[({known})市/LOC\]\[长[{towns.SURNAMES}]({'|'.join(towns.GIVEN)})/LOC\].*({'|'.join(towns.OF_THINGS)})",
        rf"\[({known})/LOC\]市长\[[{towns.SURNAMES}]({'|'.join(towns.GIVEN)})/PER\].*({'|'.join(towns.OF_PEOPLE)})",
    ]
    for split in made.values():
        matched = [[bool(re.fullmatch(form, clause)) for form in forms] for clause in clauses(split)]
        assert all(map(any, matched))
        assert all(sum(column) > len(matched) / 20 for column in zip(*matched, strict=True))  # every form occurs


def test_any_word_may_be_a_person_a_place_or_no_name(made):
    text = ",".join(clauses(made["train"]))
    for word in towns.words()[: towns.N_SEEN : 40]:
        assert f"[{word}/PER]" in text and f"[{word}/LOC]" in text
        assert re.search(rf"[^\[]{word}[^市/]", text)


def test_a_third_of_the_words_is_not_in_the_training_sentences(made):
    found = {split: set(re.findall(r"\[(\w+)/", ",".join(clauses(text)))) for split, text in made.items()}
    new = set(towns.words()[towns.N_SEEN :])
    assert not new & found["train"]
    for split in ("valid", "test"):
        assert len(new & found[split]) > len(new) / 2
        assert 0.25 < len(new & found[split]) / len(set(towns.words()) & found[split]) < 0.4


def test_the_lexicon_has_every_name(made):
    known = set(towns.lexicon())
    names = {name for text in made.values() for name in re.findall(r"\[(\w+)/", ",".join(clauses(text)))}
    assert {name for name in names - known} == {name for name in names if name[0] in towns.SURNAMES}  # 江大桥
    assert {f"长{name}" for name in names if name[0] in towns.SURNAMES} <= known
    assert Lexicon.load("towns").words == towns.lexicon()


def test_sentences_depend_on_the_seed_alone(made):
    assert towns.make_sentences(2000) == made
    assert towns.make_sentences(2000, seed=1)["train"] != made["train"]


def test_a_corpus_of_them_has_three_splits():
    corpus = read_corpus(TaggedConfig(dataset="towns", lexicon="towns", n_sentences=50))
    assert {split: len(text) for split, text in corpus.splits.items()} == {"train": 50, "valid": 500, "test": 500}
    assert corpus.names["valid"] == "towns, valid" and corpus.lines["test"][:3] == [1, 2, 3]
    kinds = [f"{prefix}-{kind}" for kind in ("LOC", "PER") for prefix in "BMES"]
    assert sorted(corpus.labels) == sorted([*kinds, "O"]) and corpus.scheme == "bmes"
