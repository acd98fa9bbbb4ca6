"""Words as tokens, and tags that are no entities: read, trained, tagged from lines, served."""

import json
import re

import numpy as np
import pytest
import tensorflow as tf
from helpers import eagerly, log_rows, program, raises_naming, raises_parameter, run_here, write_text

import txl_tf
from txl_tf.config import OptimizerConfig, TaggedConfig, TaggerTrainingConfig, TenerTaggerConfig
from txl_tf.data.tagged.batches import features, form_of, forms_of
from txl_tf.data.tagged.sentences import encoder_of, read_corpus, read_tagged_as
from txl_tf.errors import ParameterError
from txl_tf.runs.metrics import score_table
from txl_tf.runs.train import train_run
from txl_tf.serving.tables import SymbolTable, words_of
from txl_tf.serving.tagging import TaggingSignatures, tagger_vocabs
from txl_tf.taggers.text_tagger import TextTagger

pytestmark = pytest.mark.ci

NER = """-DOCSTART- -X- -X- O

Peter NNP B-NP B-PER
Blackburn NNP I-NP I-PER
left VBD B-VP O

He PRP B-NP O
left VBD B-VP O
"""
LINES = [
    "Zork left Quux .",
    "",
    "  Anna\tmet\u00a0Ünal \u2003quickly",
    "1996-08-22 U.N. e\u0301 \U0001f600\U0001f600 .",
]


def pos(number, seed):
    """Sentences of names, verbs and nouns; hardly a name occurs twice."""
    rng, sentences = np.random.default_rng(seed), []
    for _ in range(number):
        name = "".join(rng.choice(["ba", "ker", "lin", "ton", "mar", "vel", "son", "du"], 3)).capitalize()
        rows = [(name, "PROPN"), (rng.choice(["left", "met", "saw"]), "VERB")]
        rows += [(rng.choice(["the", "a"]), "DET"), (rng.choice(["plan", "offer"]), "NOUN")] * int(rng.integers(0, 2))
        sentences.append("".join(f"{word}\t{tag}\n" for word, tag in [*rows, (".", "PUNCT")]))
    return "\n".join(sentences)


# ------------------------------------------------------------------------------------------------------------ reading


def test_words_of_a_file_of_several_columns(tmp_path):
    path, vectors = write_text(tmp_path / "a.conll", NER), write_text(tmp_path / "vectors", "He 1 2\n")
    corpus = read_corpus(TaggedConfig(train_path=path, valid_path=path, token_level="word", word_vectors=vectors))
    assert corpus.vocab.symbols == ["<pad>", "<unk>", "left", "He"]  # twice, or with a vector; the others train <unk>
    assert corpus.bigram_vocab.symbols == ["<pad>", "<unk>", "eft"] and corpus.labels == ["O", "B-PER", "I-PER"]
    assert [s.ids.tolist() for s in corpus.splits["train"].sentences] == [[1, 1, 2], [3, 2]]
    assert [s.bigrams.tolist() for s in corpus.splits["train"].sentences] == [[1, 1, 2], [1, 2]]
    assert corpus.embeddings["vocab"][3].tolist() == [1, 2] and corpus.lines["train"] == [3, 7]
    every = read_corpus(TaggedConfig(train_path=path, valid_path=path, token_level="word", min_freq=0))
    assert every.vocab.symbols[2:] == ["left", "Peter", "Blackburn", "He"]
    assert every.bigram_vocab.symbols[2:] == ["eft", "^ter", "^urn", "^He"]


@pytest.mark.parametrize("lowercase", [False, True])
def test_vectors_of_lower_case_forms_are_counted_and_taken(tmp_path, lowercase, caplog):
    """As GloVe's 6B has no other ones: not one name has a vector of its own."""
    path = write_text(tmp_path / "a.conll", NER)
    vectors = write_text(tmp_path / "glove", "peter 1 2\nblackburn 3 4\nleft 5 6\nhe 7 8\nHe 9 9\n")
    options = {"token_level": "word", "word_vectors": vectors, "lowercase_vectors": lowercase}
    with caplog.at_level("INFO", "txl_tf"):
        corpus = read_corpus(TaggedConfig(train_path=path, valid_path=path, **options))
    rows = dict(zip(corpus.vocab.symbols, corpus.embeddings["vocab"].tolist(), strict=True))
    assert rows["left"] == [5, 6] and rows["He"] == [9, 9]
    assert {name: rows.get(name) for name in ("Peter", "Blackburn")} == (
        {"Peter": [1, 2], "Blackburn": [3, 4]} if lowercase else {"Peter": None, "Blackburn": None}
    )
    (said,) = caplog.messages
    expected = "2 of 4 words found exactly, 2 in lower case" if lowercase else (
        "2 of 2 words found exactly; 2 more have a vector in lower case: give lowercase_vectors to use it"
    )  # fmt: skip
    assert said == f"word_vectors {vectors}: {expected}"


def test_vectors_of_none_of_the_words_are_an_error(tmp_path):
    path, vectors = write_text(tmp_path / "a.conll", NER), write_text(tmp_path / "glove", "peter 1 2\nhe 7 8\n")
    options = {"train_path": path, "valid_path": path, "token_level": "word", "word_vectors": vectors}
    with raises_naming(ParameterError, 2) as caught:
        read_corpus(TaggedConfig(**options))
    assert (caught.value.name, caught.value.value) == ("word_vectors", vectors)
    assert read_corpus(TaggedConfig(**options, lowercase_vectors=True)).embeddings["vocab"].shape == (5, 2)


def test_forms_of_words():
    words = ["Blackburn", "rejects", "1996-08-22", "U.N.", "a", "Ü", "ß", "ÉTÉS"]
    assert forms_of(words) == ["^urn", "cts", "-00", "^.N.", "a", "^Ü", "ß", "^TÉS"]
    assert form_of("") == ""


def test_tags_of_the_scheme_none_are_labels_as_they_are(tmp_path):
    path = write_text(tmp_path / "a.pos", pos(9, 0))
    corpus = read_corpus(TaggedConfig(train_path=path, valid_path=path, token_level="word", tag_scheme="none"))
    assert corpus.labels == ["DET", "NOUN", "PROPN", "PUNCT", "VERB"] and corpus.scheme == "none"
    assert [corpus.labels[i] for i in corpus.splits["valid"].tags[0]][:2] == ["PROPN", "VERB"]
    other = write_text(tmp_path / "other", "Zork\tPROPN\nsings\tSINGS\n")
    with raises_naming(ValueError, "other", 2, "'SINGS'", "DET"):
        read_tagged_as(other, corpus.labels, scheme="none")
    assert read_tagged_as(path, corpus.labels, scheme="none")[0].tags[:2] == ["PROPN", "VERB"]
    with raises_naming(ValueError, "a.pos", 1, "'PROPN'"):
        read_corpus(TaggedConfig(train_path=path, valid_path=path, token_level="word"))


@pytest.mark.parametrize("name", ["segment_digits", "lexicon", "char_vectors", "bigram_vectors"])
def test_what_words_do_not_have_is_refused(name):
    with raises_naming(ValueError, name, "token_level=word"):
        TaggedConfig(token_level="word", **{name: True if name == "segment_digits" else "file"})


def test_scores_of_the_scheme_none_count_tokens():
    rows = score_table([["NOUN", "VERB", "X"]], [["NOUN", "NOUN", "X"]], "none")
    assert [(kind, round(f1, 3), number) for kind, _, _, f1, number in rows] == [
        ("NOUN", 0.667, 2), ("VERB", 0, 0), ("X", 1, 1), ("all", 0.667, 3),
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------------- a run, from lines


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder of a run of words with parts of speech, and what its training returned."""
    folder = tmp_path_factory.mktemp("words")
    paths = {f"{split}_path": write_text(folder / split, pos(n, n)) for split, n in (("train", 120), ("valid", 30))}
    found = train_run(
        str(folder / "run"),
        data=TaggedConfig(**paths, token_level="word", tag_scheme="none"),
        model=TenerTaggerConfig(n_layer=1, d_model=16, n_head=2, d_inner=16, max_seq_len=6, d_embed=8, d_bigram=8),
        optimizer=OptimizerConfig(learning_rate=3e-2, clip=5.0, optimizer="adam", schedule="linear", warmup_steps=2),
        training=TaggerTrainingConfig(train_steps=40, iterations=20, save_steps=20, batch_size=16),
    )
    return folder / "run", found


@pytest.fixture(scope="module")
def text_tagger(made):
    tagger, vocabs = txl_tf.load_run(made[0], "best")
    return TextTagger(tagger, encoder_of(*vocabs))


@pytest.mark.slow
def test_a_run_of_words_starts_from_another(made, tmp_path, capsys):
    paths = {f"{split}_path": write_text(tmp_path / split, pos(20, 7)) for split in ("train", "valid")}
    for module in program("tools/train_ner.py"):
        module.FLAGS.unparse_flags()
        flags = [f"--{name}={value}" for name, value in {**paths, "model_dir": tmp_path / "run"}.items()]
        flags += [f"--init_from={made[0]}", "--train_steps=2", "--iterations=1", "--save_steps=2", "--warmup_steps=0"]
        module.FLAGS(["train_ner.py", *flags])
        module.main()
    assert re.search(rf"init_from {made[0]}: step \d+, best\n", capsys.readouterr().out)
    before, after = (json.loads((path / "config.json").read_text()) for path in (made[0], tmp_path / "run"))
    assert after["model"] == before["model"] and after["data"]["token_level"] == "word"
    assert txl_tf.load_run(tmp_path / "run")[1][0].symbols == txl_tf.load_run(made[0])[1][0].symbols
    vocabs = txl_tf.load_run(made[0])[1]
    with raises_parameter("min_freq", 3):
        read_corpus(TaggedConfig(**paths, token_level="word", tag_scheme="none", min_freq=3), vocabs)


def test_a_run_of_words_tags_and_describes_them(made, text_tagger, eager):
    folder, found = made
    assert found["valid"]["accuracy"] == found["valid"]["f1"] > 0.5  # what it reaches depends on the processor
    assert json.loads((folder / "best" / "best.json").read_text())["val_f1"] == found["valid"]["f1"]
    assert float(log_rows(folder)[0]["val_accuracy"]) > 0.5 and "val_precision" not in log_rows(folder)[0]
    config = json.loads((folder / "config.json").read_text())
    assert config["data"]["min_freq"] == 2 and config["model"]["scheme"] == "none"
    line = "  Zorklin met\tthe offer ."
    assert text_tagger.split(line) == ["Zorklin", "met", "the", "offer", "."]
    (result,) = text_tagger.tag([text_tagger.split(line)])
    rows = text_tagger.describe(line, result)["entities"]
    assert [(r["kind"], r["text"]) for r in rows] == list(zip(result.tags, line.split(), strict=True))
    assert [(r["start"], r["end"]) for r in rows[:2]] == [(2, 9), (10, 13)]
    assert all(line[r["start"] : r["end"]] == r["text"] and 0 < r["prob"] <= 1 for r in rows)
    by_line = txl_tf.pipeline(folder)(line)
    assert (by_line.tokens, by_line.tags, by_line.entities) == (line.split(), result.tags, rows)


def test_the_rules_of_entities_are_not_for_tags_of_the_scheme_none(made, tmp_path):
    for tool in program("tools/tag.py"):
        for source in ("input", "tagged"):
            with raises_parameter("constraints", False):
                run_here(tool, f"--model_dir={made[0]}", f"--{source}={tmp_path}/a", "--noconstraints")


def test_served_words_are_those_of_lines(text_tagger, tmp_path):
    """As `tag_text` and `tag_words` compute them; the white space is that of `str.split`."""
    tagger, encoder = text_tagger.tagger, text_tagger.encoder
    tables = {}
    for name, vocab in tagger_vocabs(tagger, [encoder.vocab, encoder.bigram_vocab]).items():
        vocab.save(tmp_path / name)
        tables[name] = SymbolTable(vocab, str(tmp_path / name))
    serve, text = TaggingSignatures(tagger, tables, max_tokens=6), tf.constant(LINES)
    assert {*serve.signatures()} == {"tag", "tag_text", "tag_words"}
    words = [text_tagger.split(line) for line in LINES]
    with eagerly():
        expected = text_tagger.tag(words)
    inputs = serve.graph.features(words_of(text).strings)
    for name, array in features(text_tagger.encode(words), False).items():
        np.testing.assert_array_equal(inputs[name], array)
    found = {name: x.numpy() for name, x in serve.tag_words(text).items()}
    entities = {name: x.numpy() for name, x in serve.tag_text(text).items()}
    assert found["lengths"].tolist() == entities["numbers"].tolist() == list(map(len, words))
    for row, (line, tokens, own) in enumerate(zip(LINES, words, expected, strict=True)):
        n = len(tokens)
        assert [x.decode() for x in found["words"][row][:n]] == tokens
        assert [x.decode() for x in found["tags"][row][:n]] == own.tags
        columns = [entities[name][row][:n].tolist() for name in ("kinds", "starts", "ends", "entities")]
        served = [(kind.decode(), start, end, text.decode()) for kind, start, end, text in zip(*columns, strict=True)]
        rows = text_tagger.describe(line, own)["entities"]
        assert served == [(r["kind"], r["start"], r["end"], r["text"]) for r in rows]
    with raises_naming(tf.errors.InvalidArgumentError, "text", 6):
        serve.tag_text(tf.constant(["a b c d e f g"]))


def test_a_tagger_remembers_what_its_tokens_and_tags_are(text_tagger, tmp_path):
    text_tagger.tagger.save(tmp_path / "a.keras")
    loaded = txl_tf.Tagger.from_config(text_tagger.tagger.get_config())
    assert (loaded.scheme, loaded.token_level) == ("none", "word") and loaded.crf.allowed is None
