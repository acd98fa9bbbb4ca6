"""Tagged sentences: what is read, which ids they become, and the batches of an epoch."""

import itertools

import numpy as np
import pytest
from helpers import ANY, mentions, outside_data, raises_parameter, write_text

from txl_tf.config import TaggedConfig
from txl_tf.data.tagged.batches import SentenceEncoder, TaggedSplit, bigrams_of, features, tagged_batches
from txl_tf.data.tagged.lexicon import Lexicon
from txl_tf.data.tagged.sentences import read_corpus, read_tagged
from txl_tf.data.tagged.tags import spans_of
from txl_tf.data.vocabulary import Vocab
from txl_tf.errors import ParameterError

TRAIN = "长 B-LOC\n江 I-LOC\n大 O\n\n长 O\n桥 B-PER\n"
VALID = "大 B-LOC\n江 I-LOC\n\n船 O\n"
WORDS = "长江\n江大\n大桥\n大江\n"


def corpus_of(folder, train=TRAIN, valid=VALID, **options):
    """Options whose name is that of a file may be its content."""
    paths = {"train_path": write_text(folder / "train.bio", train), "valid_path": write_text(folder / "dev.bio", valid)}
    for name in ("test_path", "lexicon", "char_vectors", "bigram_vectors", "word_vectors"):
        if name in options:
            options[name] = write_text(folder / name, options[name])
    return read_corpus(TaggedConfig(**{**paths, **options}))


def vocab_of(symbols):
    vocab = Vocab(special=["<pad>", "<unk>"], unk="<unk>")
    vocab.set_lines(["<pad>", "<unk>", *symbols], "symbols")
    return vocab


# ------------------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize(
    "content",
    [
        "a O\nb B-X\n\nc O\n",
        "\ufeffa\tO\r\nb\tB-X\r\n\r\nc\tO",
        "-DOCSTART- -X- O O\n\na NN x O\nb NN B-X\n \n\t\n\nc \t NN  O \n\n\n",
    ],
)
def test_token_and_tag_are_the_first_and_the_last_column(tmp_path, content):
    sentences = read_tagged(write_text(tmp_path / "file", content))
    assert [sentence[:2] for sentence in sentences] == [(["a", "b"], ["O", "B-X"]), (["c"], ["O"])]
    lines = [line.lstrip("\ufeff")[:1] for line in content.split("\n")]
    assert [sentence.line for sentence in sentences] == [lines.index("a") + 1, lines.index("c") + 1]


def test_other_white_space_is_a_token(tmp_path):
    ((tokens, _, _),) = read_tagged(write_text(tmp_path / "file", "\u3000 O\n\u00a0\tO\n\u2028 O\n"))
    assert tokens == ["\u3000", "\u00a0", "\u2028"]


def test_digits_of_a_segmentation_are_cut_off(tmp_path):
    path = write_text(tmp_path / "file", "科0\tO\n技1\tO\n10\tO\n")
    assert read_tagged(path, segment_digits=True)[0].tokens == ["科", "技", "1"]
    assert read_tagged(path)[0].tokens == ["科0", "技1", "10"]


@pytest.mark.parametrize(
    "content, digits, name, value",
    [
        ("a O\nb X-PER\n", False, "tag", "X-PER"),
        ("a1 O\nb O\n", True, "{}/file, line 2", "b"),
        ("a1 O\n0 O\n", True, "{}/file, line 2", "0"),
        ("a1 O\nb٣ O\n", True, "{}/file, line 2", "b٣"),
        ("\n\n", False, "{}/file", None),
        ("-DOCSTART- O\n", False, "{}/file", None),
        ("", False, "{}/file", b""),
        (b"a O\n\xff O\n", False, "{}/file", None),
    ],
)
def test_lines_without_token_and_tag_are_named(tmp_path, content, digits, name, value):
    with raises_parameter(name.format(tmp_path), value):
        read_tagged(write_text(tmp_path / "file", content), digits)


@pytest.mark.parametrize("content, line, number", [("a O\n\nb\n", "b", 3), ("\u3000\n", "\u3000", 1)])
def test_lines_of_one_column_are_refused(tmp_path, content, line, number):
    with pytest.raises(ParameterError) as caught:
        read_tagged(write_text(tmp_path / "file", content))
    error = caught.value
    assert error.name == f"{tmp_path / 'file'}, line {number}"
    assert error.value == line and "tag" in error.allowed


# ---------------------------------------------------------------------------------------------------------- encoding


@pytest.fixture
def encoder():
    vocab = vocab_of(["长", "江", "大", "长江", "大桥"])
    return SentenceEncoder(vocab, vocab_of(["长江", "桥<eos>"]), Lexicon(["长江", "江大", "大桥"]))


def test_words_follow_the_characters_of_a_sentence(encoder):
    encoded = encoder.encode("长江大桥")
    assert [array.dtype for array in encoded[:4]] == [np.int32] * 4 and encoded.n == 4
    assert encoded.ids.tolist() == [2, 3, 4, 1, 5, 1, 6]
    assert encoded.starts.tolist() == [0, 1, 2, 3, 0, 1, 2] and encoded.ends.tolist() == [0, 1, 2, 3, 1, 2, 3]
    assert encoded.bigrams.tolist() == [2, 1, 1, 3]
    plain = SentenceEncoder(encoder.vocab).encode(["长", "江大"])
    assert [array.tolist() for array in plain[:4]] == [[2, 1], [0, 0], [0, 1], [0, 1]] and plain.n == 2
    assert encoder.encode(["<pad>", "<unk>"]).ids.tolist() == [1, 1]


def test_bigrams_end_with_eos():
    assert bigrams_of("长江") == ["长江", "江<eos>"] and bigrams_of(["a"]) == ["a<eos>"] and bigrams_of([]) == []


def test_features_of_a_lattice(encoder):
    encoded = [encoder.encode(text) for text in ("江", "长江大桥", "", "长江")]
    found = features(encoded, lattice=True, multiple=3)
    empty = [0] * 7
    expected = {
        "lattice": [[3, *[0] * 6], [2, 3, 4, 1, 5, 1, 6], empty, [2, 3, 5, 0, 0, 0, 0], empty, empty],
        "bigrams": [[1, 0, 0, 0], [2, 1, 1, 3], [0] * 4, [2, 1, 0, 0], [0] * 4, [0] * 4],
        "seq_len": [1, 4, 0, 2, 0, 0],
        "lex_num": [0, 3, 0, 1, 0, 0],
        "pos_s": [empty, [0, 1, 2, 3, 0, 1, 2], empty, [0, 1, 0, 0, 0, 0, 0], empty, empty],
        "pos_e": [empty, [0, 1, 2, 3, 1, 2, 3], empty, [0, 1, 1, 0, 0, 0, 0], empty, empty],
    }
    assert {name: array.tolist() for name, array in found.items()} == expected
    assert {array.dtype for array in found.values()} == {np.dtype(np.int32)}


def test_features_of_characters(encoder):
    encoded = [encoder.encode(text) for text in ("江", "长江")]
    found = features(encoded, lattice=False)
    assert {name: array.tolist() for name, array in found.items()} == {
        "chars": [[3, 0], [2, 3]],
        "bigrams": [[1, 0], [2, 1]],
    }
    shapes = {name: array.shape for name, array in features([encoder.encode("")], True, 2).items()}
    assert shapes == {
        **dict.fromkeys(["lattice", "bigrams", "pos_s", "pos_e"], (2, 0)),
        "seq_len": (2,),
        "lex_num": (2,),
    }
    assert features([], False)["chars"].shape == (0, 0) and features([], True)["seq_len"].shape == (0,)


# ------------------------------------------------------------------------------------------------------------ corpus


def test_ids_are_those_of_the_training_sentences(tmp_path):
    corpus = corpus_of(tmp_path)
    assert corpus.vocab.symbols == ["<pad>", "<unk>", "长", "江", "大", "桥"]
    assert corpus.bigram_vocab.symbols == ["<pad>", "<unk>", "长江", "江大", "大<eos>", "长桥", "桥<eos>"]
    assert corpus.vocabs == [corpus.vocab, corpus.bigram_vocab] and corpus.scheme == "bio"
    assert corpus.labels == ["O", "B-LOC", "I-LOC", "B-PER", "I-PER"]
    train, valid = corpus.splits["train"], corpus.splits["valid"]
    assert len(train) == len(valid) == 2 and corpus.names["valid"] == str(tmp_path / "dev.bio")
    assert [s.ids.tolist() for s in train.sentences] == [[2, 3, 4], [2, 5]]
    assert [tags.tolist() for tags in train.tags] == [[1, 2, 0], [0, 3]]
    assert [s.ids.tolist() for s in valid.sentences] == [[4, 3], [1]]
    assert valid.sentences[0].bigrams.tolist() == [1, 1] and valid.tags[0].dtype == np.int32
    assert corpus.embeddings == {} and corpus.lexicon is None


def test_words_of_the_training_sentences_follow_the_characters(tmp_path):
    corpus = corpus_of(tmp_path, lexicon=WORDS)
    assert corpus.vocab.symbols[6:] == ["长江", "江大"] and corpus.lexicon.words == WORDS.split()
    assert corpus.splits["train"].sentences[0].ids.tolist() == [2, 3, 4, 6, 7]
    assert corpus.splits["valid"].sentences[0].ids.tolist() == [4, 3, 1]
    assert corpus.encoder.encode("长江").ids.tolist() == [2, 3, 6]


def test_rare_characters_are_unknown_but_words_are_kept(tmp_path):
    corpus = corpus_of(tmp_path, min_freq=2, lexicon=WORDS, char_vectors="大 1\n", test_path="大 O\n")
    assert corpus.vocab.symbols == ["<pad>", "<unk>", "长", "长江", "江大"]
    assert corpus.bigram_vocab.symbols == ["<pad>", "<unk>"]
    with raises_parameter("min_freq", 99):
        corpus_of(tmp_path, min_freq=99)


def test_white_space_and_special_symbols_are_unknown(tmp_path):
    corpus = corpus_of(tmp_path, train=TRAIN + "\u3000 O\n<pad> O\n<unk> O\n")
    assert corpus.vocab.symbols == ["<pad>", "<unk>", "长", "江", "大", "桥"]
    assert corpus.splits["train"].sentences[1].ids.tolist() == [2, 5, 1, 1, 1]
    for name, vocab in (("chars", corpus.vocab), ("bigrams", corpus.bigram_vocab)):
        vocab.save(tmp_path / name)
        assert Vocab.load(tmp_path / name, **vocab.get_config()).symbols == vocab.symbols


def test_vectors_give_ids_and_first_embeddings(tmp_path, caplog):
    vectors = {
        "char_vectors": "3 2\n长 1 2\n船 3 4\n沙 5 6\n",
        "word_vectors": "大江 7 8\n江大 9 1\n大桥 x x\n",
        "bigram_vectors": "船<eos> 1 2 3\n",
    }
    with caplog.at_level("INFO", "txl_tf"):
        corpus = corpus_of(tmp_path, lexicon=WORDS, **vectors)
    assert corpus.vocab.symbols == ["<pad>", "<unk>", "长", "江", "大", "桥", "船", "长江", "江大", "大江"]
    matrix, bigrams = corpus.embeddings["vocab"], corpus.embeddings["bigram_vocab"]
    assert matrix.shape == (10, 2) and bigrams.shape == (8, 3) and matrix.dtype == np.float32
    assert matrix[[0, 2, 6, 8, 9]].tolist() == [[0, 0], [1, 2], [3, 4], [9, 1], [7, 8]]
    assert corpus.bigram_vocab.symbols[7] == "船<eos>" and bigrams[7].tolist() == [1, 2, 3]
    assert np.all(np.abs(matrix[[1, 3, 4, 5, 7]]) <= np.sqrt(1.5)) and np.all(matrix[[1, 3, 4, 5, 7]])
    messages = [record.getMessage() for record in caplog.records]
    numbers = {"lexicon": (4, 2), "char_vectors": (2, 5, 0), "bigram_vectors": (1, 6, 0), "word_vectors": (2, 3, 0)}
    for message, (name, found) in zip(messages, numbers.items(), strict=True):
        assert mentions(message, f"{name} {tmp_path}/{name}", *found)
    again = corpus_of(tmp_path, lexicon=WORDS, **vectors)
    for name, array in corpus.embeddings.items():
        np.testing.assert_array_equal(again.embeddings[name], array)


def test_a_fingerprint_tells_of_every_change(tmp_path):
    corpora = [
        corpus_of(tmp_path),
        corpus_of(tmp_path, valid=VALID.replace("B-LOC", "O")),
        corpus_of(tmp_path, valid=VALID.replace("大", "桥")),
        corpus_of(tmp_path, valid=VALID.replace("\n\n", "\n")),
    ]
    assert len({corpus.fingerprint("valid") for corpus in corpora}) == 4
    assert len({corpus.fingerprint("train") for corpus in corpora}) == 1


def test_tags_are_converted(tmp_path):
    corpus = corpus_of(tmp_path, valid="大 B-LOC\n江 M-LOC\n大 E-LOC\n桥 S-PER\n", tag_scheme="bioes")
    assert corpus.labels == ["O", "B-LOC", "I-LOC", "E-LOC", "S-LOC", "B-PER", "I-PER", "E-PER", "S-PER"]
    assert [tags.tolist() for tags in corpus.splits["train"].tags] == [[1, 3, 0], [0, 8]]
    assert [tags.tolist() for tags in corpus.splits["valid"].tags] == [[1, 2, 3, 8]] and corpus.scheme == "bioes"


def test_tags_of_segmentation_have_no_kind(tmp_path):
    corpus = corpus_of(tmp_path, train="长 B\n江 E\n大 S\n", valid="长 B\n江 M\n江 E\n")
    assert corpus.labels == ["B", "M", "E", "S"] and corpus.splits["valid"].tags[0].tolist() == [0, 1, 2]
    corpus = corpus_of(tmp_path, train="长 B\n江 E\n大 S\n", valid="长 O\n", tag_scheme="bio")
    assert corpus.labels == ["O", "B", "I"]


BROKEN = "长 O\n江 B-LOC\n\n长 O\n江 I-LOC\n大 I-LOC\n桥 I-PER\n"


def test_broken_tags_are_kept_with_one_warning(tmp_path, caplog):
    corpus = corpus_of(tmp_path, train=BROKEN)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert mentions(record.getMessage(), f"{tmp_path}/train.bio", 2, "bio", 5, "'I-LOC'")
    assert [corpus.labels[i] for i in corpus.splits["train"].tags[1]] == ["O", "I-LOC", "I-LOC", "I-PER"]


def test_broken_tags_are_rewritten_where_tags_are_converted(tmp_path, caplog):
    corpus = corpus_of(tmp_path, train=BROKEN, tag_scheme="bio")
    (record,) = caplog.records
    assert mentions(record.getMessage(), 2, "bio", 5, "'I-LOC'")
    assert [corpus.labels[i] for i in corpus.splits["train"].tags[1]] == ["O", "B-LOC", "I-LOC", "B-PER"]


def test_tags_that_leave_an_entity_unfinished_are_named(tmp_path, caplog):
    corpus_of(tmp_path, train="长 O\n江 B-LOC\n大 O\n\n长 B-LOC\n江 E-LOC\n", valid="长 S-LOC\n")
    assert mentions(caplog.text, "train.bio", 1, "bmes", 2, "'B-LOC'")


def test_tokens_of_several_characters_are_a_warning(tmp_path, caplog):
    corpus_of(tmp_path, train="-DOCSTART- O\n\n长 B-LOC\n江0 I-LOC\n\nBlackburn B-PER\n")
    (record,) = caplog.records
    facts = f"{tmp_path}/train.bio", 4, "'江0'", 2, 3, "--token_level=word", "--segment_digits", "科0"
    assert mentions(record.getMessage(), *facts)
    caplog.clear()
    corpus_of(tmp_path, train="长0 B-LOC\n江1 I-LOC\n", valid="长0 O\n", segment_digits=True)
    assert not caplog.records
    corpus = corpus_of(tmp_path, train="长 B-LOC\n江 I-LOC\n", valid="长 O\n")
    path = write_text(tmp_path / "other.bio", "长江 B-LOC\n江 I-LOC\n")
    read_corpus(TaggedConfig(train_path=path, valid_path=path), corpus.vocabs, corpus.labels)  # as with --init_from
    assert mentions(caplog.text, "'长江'", 2, 1)


def test_a_word_that_is_called_as_the_start_of_a_document_is_a_word(tmp_path):
    text = "-DOCSTART- -X- O\n\na O\n-DOCSTART- O\n\n-DOCSTART-x O\n"
    assert [found.tokens for found in read_tagged(write_text(tmp_path / "a", text))] == [
        ["a", "-DOCSTART-"],
        ["-DOCSTART-x"],
    ]


OTHER_SCHEME = "'S-PER' is not of the scheme bio, as .*train.bio is; tag_scheme=bio converts all files to one scheme"


@pytest.mark.parametrize(
    "options, name, value",
    [
        ({"valid": "大 O\n\n江 B-ORG\n"}, "{}/dev.bio, line 3", "B-ORG"),
        ({"valid": "大 B-ORG\n", "tag_scheme": "bmes"}, "{}/dev.bio, line 1", "S-ORG"),
        ({"train": "大 O\n"}, "{}/dev.bio, line 1", "B-LOC"),
        ({"valid": "大 O\n江 S-PER\n"}, "{}/dev.bio, line 2", "S-PER"),
        ({"valid": "大 M-LOC\n江 I-LOC\n"}, "{}/dev.bio", ["M-LOC", "I-LOC"]),
        ({"train_path": None}, "train_path", None),
        ({"valid_path": None, "valid_fraction": 1e-9}, "valid_fraction", 1e-09),
        ({"valid_fraction": 0.1}, "valid_fraction", 0.1),
        ({"word_vectors": "长江 1\n"}, "word_vectors", ANY),
        (
            {"lexicon": WORDS, "word_vectors": "长江 1\n", "char_vectors": "长 1 2\n"},
            "word_vectors",
            1,
        ),
        ({"lexicon": "长江\n桥\n"}, "{}/lexicon, line 2", "桥"),
        ({"char_vectors": "长 1 2\n江 1\n"}, "{}/char_vectors, line 2", "江 1"),
        ({"segment_digits": True}, "{}/train.bio, line 1", "长"),
    ],
)
def test_bad_input_is_named(tmp_path, options, name, value):
    with raises_parameter(name.format(tmp_path), value):
        corpus_of(tmp_path, **options)


@pytest.mark.parametrize(
    "name, content, others",
    [
        ("lexicon", "南京\n北京\n", {}),
        ("char_vectors", "南 1\n京 2\n", {}),
        ("bigram_vectors", "南京 1\n", {}),
        ("word_vectors", "南京 1\n大 2\n", {"lexicon": WORDS}),
    ],
)
def test_files_that_match_nothing_are_errors_that_name_them(tmp_path, name, content, others):
    with pytest.raises(ParameterError) as caught:
        corpus_of(tmp_path, **{name: content}, **others)
    assert (caught.value.name, caught.value.value) == (name, str(tmp_path / name))


def test_words_with_spaces_are_found_in_sentences_and_vectors(tmp_path):
    """Also in text, where the space is one."""
    train = "".join(f"{c} O\n" for c in "在New␣York了")
    vectors = "New York 1 2\nOld Town 3 4\n"
    corpus = corpus_of(tmp_path, train, train, lexicon="New York\nOld Town\n", word_vectors=vectors)
    assert corpus.vocab.symbols[-1] == "New␣York" and corpus.embeddings["vocab"][-1].tolist() == [1, 2]
    encoded = corpus.encoder.encode("在New York了")
    assert encoded.ids[-1] == len(corpus.vocab) - 1 and (encoded.starts[-1], encoded.ends[-1]) == (1, 8)
    corpus.vocabs[2].save(tmp_path / "words")
    assert Lexicon.load(str(tmp_path / "words")).words == ["New␣York", "Old␣Town"]


@pytest.mark.parametrize("words", [None, "长江\n江大\n大桥\n桥江\n"])
def test_another_lexicon_takes_the_place_of_the_words_that_are_known(tmp_path, words, caplog):
    known = corpus_of(tmp_path, lexicon=WORDS)
    path = write_text(tmp_path / "other", words) if words else None
    files = {"train_path": str(tmp_path / "train.bio"), "valid_path": str(tmp_path / "dev.bio")}
    caplog.clear()
    with caplog.at_level("INFO", "txl_tf"):
        again = read_corpus(TaggedConfig(**files, lexicon=path), known.vocabs, known.labels)
    assert again.lexicon.words == (words or WORDS).split() and again.vocab.symbols == known.vocab.symbols
    assert again.splits["train"].sentences[0].ids.tolist() == [2, 3, 4, 6, 7]
    assert again.encoder.encode("桥江").ids.tolist() == [5, 3, 1][: 3 if words else 2]
    (said,) = caplog.messages
    assert mentions(said, "lexicon", path or "run", 4, 2)
    write_text(tmp_path / "train.bio", TRAIN + "桥 O\n江 O\n")
    with caplog.at_level("INFO", "txl_tf"):
        read_corpus(TaggedConfig(**files, lexicon=path), known.vocabs, known.labels)
    assert mentions(caplog.messages[1], 1, "<unk>") == bool(words)


def test_a_text_without_the_words_of_the_run_is_only_a_warning(tmp_path, caplog):
    """The user has named no file, and the network reads sentences without words."""
    known = corpus_of(tmp_path, lexicon=WORDS)
    files = {name: write_text(tmp_path / "new", "船 B-LOC\n海 O\n") for name in ("train_path", "valid_path")}
    caplog.clear()
    assert read_corpus(TaggedConfig(**files), known.vocabs, known.labels).lexicon.words == WORDS.split()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    with pytest.raises(ParameterError) as caught:
        read_corpus(TaggedConfig(**files, lexicon=str(tmp_path / "lexicon")), known.vocabs, known.labels)
    assert caught.value.name == "lexicon"


def test_vocabularies_are_extended_at_their_ends(tmp_path):
    known = corpus_of(tmp_path, lexicon=WORDS)
    train = "船 B-LOC\n江 I-LOC\n大 O\n\n船 O\n海 O\n"
    words = write_text(tmp_path / "more", WORDS + "船江\n")
    files = {name: write_text(tmp_path / "new", train) for name in ("train_path", "valid_path")}
    longer = read_corpus(TaggedConfig(**files, lexicon=words), known.vocabs, known.labels, extend_vocab=True)
    assert longer.vocab.symbols == [*known.vocab.symbols, "船", "海", "船江"]
    n = len(known.bigram_vocab)
    assert longer.bigram_vocab.symbols[:n] == known.bigram_vocab.symbols
    assert longer.bigram_vocab.symbols[n:] == ["船江", "船海", "海<eos>"]
    rare = TaggedConfig(**files, lexicon=words, min_freq=2)
    assert read_corpus(rare, known.vocabs, known.labels, extend_vocab=True).vocab.symbols[8:] == ["船", "船江"]
    with raises_parameter("min_freq", 2):
        read_corpus(rare, known.vocabs, known.labels)


def test_sentences_are_held_out_where_there_is_no_valid_path(tmp_path):
    """Equal ones are on one side, in their lines; kinds of the others may be in the held out ones alone."""
    rows = [[f"w{i % 30}", f"x{i % 30}"] for i in range(60)]
    text = "\n".join(f"{a} B-K{i % 30}\n{b} O\n" for i, (a, b) in enumerate(rows))
    corpus = corpus_of(tmp_path, train=text, valid_path=None, valid_fraction=0.3, token_level="word", min_freq=0)
    assert corpus.names["valid"] == f"30% of {tmp_path}/train.bio" and len(corpus.labels) == 61
    sides = {split: [(line - 1) // 3 for line in corpus.lines[split]] for split in ("train", "valid")}
    assert sorted(sides["train"] + sides["valid"]) == list(range(60))
    assert not {i % 30 for i in sides["train"]} & {i % 30 for i in sides["valid"]} and 6 <= len(sides["valid"]) <= 36
    for split, numbers in sides.items():
        for i, sentence, tags in zip(numbers, *corpus.splits[split], strict=True):
            assert [corpus.labels[tag] for tag in tags] == [f"B-K{i % 30}", "O"]
            known = [corpus.vocab.symbols[token] for token in sentence.ids]
            assert known == (rows[i] if split == "train" else ["<unk>", "<unk>"])


def test_a_space_is_the_symbol_that_stands_for_it_in_files(tmp_path):
    corpus = corpus_of(tmp_path, train="␣ O\n长 B-LOC\n", valid="长\tO\n \tO\n", lexicon="␣长\n")
    assert corpus.vocab.symbols[2:] == ["␣", "长", "␣长"] and corpus.bigram_vocab.symbols[2:] == ["␣长", "长<eos>"]
    assert corpus.splits["valid"].sentences[0].ids.tolist() == [3, 2]
    encoded = [corpus.encoder.encode(text) for text in ("␣长", " 长", "\t长")]
    assert all(e.ids.tolist() == [2, 3, 4] and e.bigrams.tolist() == [2, 3] for e in encoded)
    assert corpus.encoder.encode("\u3000长").ids.tolist() == [1, 3]


def test_short_words_may_be_left_out(tmp_path):
    assert corpus_of(tmp_path, lexicon="桥\n长江\n", skip_short_words=True).lexicon.words == ["长江"]


@pytest.fixture(scope="session")
def ner():
    return outside_data("data", "ner")


@pytest.mark.ci
def test_resume_and_weibo_are_read(ner, caplog):
    resume = [ner / "resume" / f"{split}.char.bmes" for split in ("train", "dev", "test")]
    weibo = [ner / "weibo" / f"weiboNER_2nd_conll.{split}" for split in ("train", "dev", "test")]
    for paths, counts, n_labels, scheme, digits in (
        (resume, [3821, 463, 477], 33, "bmes", False),
        (weibo, [1350, 270, 270], 17, "bio", True),
    ):
        options = dict(zip(("train_path", "valid_path", "test_path"), map(str, paths), strict=True))
        corpus = read_corpus(TaggedConfig(**options, segment_digits=digits))
        assert [len(split) for split in corpus.splits.values()] == counts
        assert len(corpus.labels) == n_labels and corpus.scheme == scheme
        for split, path in zip(corpus.splits.values(), paths, strict=True):
            tags = [line.split()[-1] for line in path.read_text().splitlines() if line.strip()]
            found = [[corpus.labels[i] for i in ids] for ids in split.tags]
            assert [*itertools.chain(*found)] == tags
            assert len(spans_of(tags)) <= sum(len(spans_of(sentence)) for sentence in found)
    warnings = [
        ("resume/train.char.bmes", 4, "bmes", 62390),
        ("weibo/weiboNER_2nd_conll.train", 5873, "'\ufffd\ufffd'", 2, 284, "73,778"),
        ("weibo/weiboNER_2nd_conll.train", 10, "bio", 1266),
        ("weibo/weiboNER_2nd_conll.test", 4, "bio", 4450),
    ]
    for record, facts in zip(caplog.records, warnings, strict=True):
        assert mentions(record.getMessage(), *facts)


# ---------------------------------------------------------------------------------------------------------- batches


@pytest.fixture(scope="module")
def split():
    """700 sentences of random lengths, whose ids and tags tell the number of the sentence."""
    rng = np.random.default_rng(0)
    encoder = SentenceEncoder(vocab_of([f"s{i}" for i in range(700)]), None, Lexicon(["s3s3"]))
    sentences = [encoder.encode([f"s{i}"] * n) for i, n in enumerate(rng.integers(1, 40, 700))]
    return TaggedSplit(sentences, [np.full(sentence.n, i, np.int32) for i, sentence in enumerate(sentences)])


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("lattice", [False, True])
def test_an_epoch_has_every_sentence_once_in_batches_of_like_lengths(split, seed, lattice):
    batches = tagged_batches(split, lattice, 8, seed)
    assert len(batches) == 88
    seen, kept, size = [], 0, 0
    for step in range(len(batches)):
        inputs, tags = batches.batch(step)
        rows = batches.rows(step)
        seen.extend(rows)
        ids = inputs["lattice" if lattice else "chars"]
        for i, id_row, tag_row in zip(rows, ids, tags, strict=True):
            sentence = split.sentences[i]
            items = sentence.ids if lattice else sentence.ids[: sentence.n]
            assert id_row[id_row != 0].tolist() == items.tolist()
            assert tag_row.tolist() == [i] * sentence.n + [0] * (len(tag_row) - sentence.n)
        kept, size = kept + np.sum(ids != 0), size + ids.size
    assert sorted(seen) == list(range(700)) and kept > 0.9 * size
    lengths = [len(split.sentences[i].ids) if lattice else split.sentences[i].n for i in seen]
    assert (lengths == sorted(lengths)) == (seed is None)


def test_batches_are_cut_from_pools_sorted_by_length(split):
    batches = tagged_batches(split, False, 2, seed=5)
    rng = np.random.default_rng([5, 1])
    order, expected = rng.permutation(700), []
    for begin in range(0, 700, 100):
        pool = sorted(order[begin : begin + 100], key=lambda i: split.sentences[i].n)
        expected += [pool[i : i + 2] for i in range(0, 100, 2)]
    expected = [expected[i] for i in rng.permutation(350)]
    assert [batches.rows(350 + i).tolist() for i in range(350)] == expected


def as_lists(batches):
    return [
        ({name: array.tolist() for name, array in inputs.items()}, tags.tolist())
        for inputs, tags in batches.as_numpy_iterator()
    ]


@pytest.mark.parametrize("lattice", [False, True])
def test_a_step_has_the_same_batch_wherever_a_run_begins(split, lattice):
    batches = tagged_batches(split, lattice, 32, seed=3)
    n = len(batches)
    whole = as_lists(batches.dataset(repeat=True).take(2 * n + 3))
    for start in (5, n - 1, n, n + 7):
        later = tagged_batches(split, lattice, 32, seed=3).dataset(start, repeat=True).take(3)
        assert as_lists(later) == whole[start : start + 3]
    assert whole[:n] != whole[n : 2 * n]
    other = as_lists(tagged_batches(split, lattice, 32, seed=4).dataset())
    assert other != whole[:n] and len(other) == n
    assert as_lists(tagged_batches(split, lattice, 32).dataset()) == as_lists(
        tagged_batches(split, lattice, 32).dataset()
    )


@pytest.mark.parametrize("lattice", [False, True])
def test_rows_are_filled_up_for_replicas(split, lattice):
    batches, even = tagged_batches(split, lattice, 27, 0), tagged_batches(split, lattice, 27, 0, multiple=4)
    for (inputs, tags), (wider, more) in zip(batches.dataset(), even.dataset(), strict=True):
        n = len(tags)
        assert len(more) == n + -n % 4
        for array, filled in [(tags, more), *((inputs[name], wider[name]) for name in inputs)]:
            assert len(filled) == len(more)
            np.testing.assert_array_equal(filled[:n], array)
            assert not np.any(filled[n:])


def test_a_dataset_knows_its_dimensions(split):
    inputs, tags = tagged_batches(split, True, 8).dataset().element_spec
    assert {name: spec.shape.rank for name, spec in inputs.items()} == {
        "lattice": 2, "bigrams": 2, "seq_len": 1, "lex_num": 1, "pos_s": 2, "pos_e": 2,
    }  # fmt: skip
    assert tags.shape.rank == 2


def test_a_number_of_sentences_is_for_made_up_ones_unless_a_run_has_recorded_it(tmp_path):
    path = write_text(tmp_path / "train", "a B-X\nb O\n\n")
    config = TaggedConfig(train_path=path, valid_path=path, n_sentences=9)
    for recorded in (None, {}, {"n_sentences": 8}):
        with raises_parameter("n_sentences", 9, "left out"):
            read_corpus(config, recorded=recorded)
    assert len(read_corpus(config, recorded={"n_sentences": 9}).splits["train"].sentences) == 1
