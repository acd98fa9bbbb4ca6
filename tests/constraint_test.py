"""Texts that match a regular expression or a JSON schema, token by token."""

import json
import re

import numpy as np
import pytest
from helpers import SMALL, Subwords, raises_parameter, randomise

import txl_tf
from txl_tf.data.vocabulary import Vocab

pytestmark = pytest.mark.ci

pytest.importorskip("outlines_core")

SLOW = pytest.mark.slow


def characters(text='0123456789-abcdef "{}:,é'):
    vocab = Vocab(level="char", special=["<end>"])
    vocab.count(text)
    vocab.build()
    return vocab


def make(vocab, **options):
    sizes = {**SMALL, "n_layer": 1, "n_token": len(vocab), "mem_len": 4}
    lm = txl_tf.TransformerXLLM(**{**sizes, "dropout": 0.0, "seed": 0, **options})
    randomise(lm, scale=0.5)
    return lm


def written(lm, vocab, constraint, room=12, rows=6, lengths=None, **options):
    """New texts and whether they ended."""
    prompt = np.tile(vocab.encode("abc"), [rows, 1])
    lengths = [3] * rows if lengths is None else lengths
    tokens, ends = lm.generate(
        prompt, room, logits_processor=constraint, stop_token=constraint.stop_token, with_lengths=True, lengths=lengths,
        **options,
    )  # fmt: skip
    new = [row[n:end].tolist() for row, n, end in zip(tokens.numpy(), lengths, ends.numpy(), strict=True)]
    ended = [bool(row) and row[-1] == constraint.stop_token for row in new]
    return [vocab.decode(row[:-1] if end else row) for row, end in zip(new, ended, strict=True)], ended


@pytest.mark.parametrize("regex", ["[0-9]{2}(-[a-c]+)?", pytest.param("é+|(ab|cd)*", marks=SLOW)])
def test_texts_match_and_end_only_where_they_may(regex):
    vocab = characters()
    lm, constraint = make(vocab), txl_tf.Constraint(vocab, regex=regex, stop_token=vocab.ids["<end>"])
    texts, ended = written(lm, vocab, constraint, seed=[*range(6)], lengths=[3, 2, 3, 1, 3, 3])
    for text, end in zip(texts, ended, strict=True):
        assert not end or re.fullmatch(regex, text), text
    assert any(ended)


def test_the_table_is_the_automaton():
    vocab = characters("ab")
    end, a, b = (vocab.ids[symbol] for symbol in ("<end>", "a", "b"))
    table = txl_tf.Constraint(vocab, regex="ab*", stop_token=end).table
    state = table[1, a]
    assert (table[1, b], table[1, end]) == (-1, -1)  # nothing but a comes first
    assert table[state, a] == -1 and table[state, end] == 0
    assert table[table[state, b], end] == 0 and table[0, end] == 0 and (table[0, [a, b]] == -1).all()


def test_the_end_of_a_document_does_not_spell_its_name():
    vocab = Subwords()
    vocab.document, vocab.document_id = "<end>", 0
    vocab.token_bytes = [b"ab", *vocab.token_bytes[1:]]
    table = txl_tf.Constraint(vocab, regex="(ab)+", stop_token=vocab.ids["\n"]).table
    assert table[1, 0] == -1 and table[1, vocab.ids["ab"]] > 0 and table[1, vocab.ids["a"]] > 0


@SLOW
def test_json_of_a_schema_by_sampling_and_by_beam_search():
    vocab = characters()
    schema = {"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"]}
    lm, constraint = make(vocab), txl_tf.Constraint(vocab, json_schema=schema, stop_token=vocab.ids["<end>"])
    for options in ({"seed": 1}, {"beam_size": 3}):
        texts, ended = written(lm, vocab, constraint, room=30, rows=2, **options)
        for text, end in zip(texts, ended, strict=True):
            assert end and json.loads(text)["a"] in (1, 22), text


def test_bytes_spell_characters_of_several_bytes():
    vocab = Vocab(level="byte")
    vocab.build()
    lm, constraint = make(vocab), txl_tf.Constraint(vocab, regex="é{2}x", stop_token=0)
    texts, ended = written(lm, vocab, constraint, room=8, rows=1, seed=1)
    assert (texts, ended) == (["ééx"], [True])


def test_what_cannot_be_used_is_refused():
    vocab = characters("ab")
    end = vocab.ids["<end>"]
    words = Vocab(special=["w1", "w2"])
    words.build()
    for arguments, name in (
        ({}, "regex"),
        ({"regex": "a", "json_schema": {}}, "regex"),
        ({"regex": "(a"}, "regex"),
        ({"regex": "xyz"}, "regex"),
        ({"json_schema": "no json"}, "json_schema"),
    ):
        with raises_parameter(name):
            txl_tf.Constraint(vocab, **arguments, stop_token=end)
    with raises_parameter("stop_token"):
        txl_tf.Constraint(vocab, regex="a", stop_token=99)
    with raises_parameter("vocab"):
        txl_tf.Constraint(words, regex="a", stop_token=0)
    constraint = txl_tf.Constraint(vocab, regex="a", stop_token=end)
    with raises_parameter("stop_token", None):
        make(vocab).generate([[1]], 2, logits_processor=constraint)
    with raises_parameter("logits_processor"):
        make(characters("abc")).generate([[1]], 2, logits_processor=constraint, stop_token=end)
