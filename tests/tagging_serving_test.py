"""A served tagger finds the entities of `Tagger.entities`, from raw text and without this library."""

import copy
import json
import pickle
import re
import shutil
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import ROOT, raises_naming, raises_parameter, randomise, spread_emissions
from tensorflow.core.protobuf import saved_model_pb2

import txl_tf
from txl_tf.data.tagged.batches import SentenceEncoder, features
from txl_tf.data.tagged.lexicon import Lexicon
from txl_tf.data.tagged.sentences import encoder_of, lexicon_vocab
from txl_tf.data.tagged.tags import all_labels, spans_of
from txl_tf.data.vocabulary import Vocab
from txl_tf.environment import too_old
from txl_tf.serving import request as request_module
from txl_tf.serving.tables import SymbolTable
from txl_tf.serving.tagging import SentenceGraph, TaggingSignatures, limits_of

pytestmark = pytest.mark.ci

LABELS = all_labels(["PER", "LOC"], "bmes")
CHARS = ["长", "江", "大", "桥", "a", "b", "<", "e", "\u0301", "\U0001f600", "\x00", "\x1b", "\ufeff", "\ufffd"]
WORDS = [
    "长江", "江大", "大桥", "长江大桥", "长␣江", "ab", "aa", "aaa", "<pad>", "<unk>", "e\u0301", "\U0001f600a", "a\x00"
]  # fmt: skip
KNOWN_WORDS = ["长江", "大桥", "长江大桥", "aa", "\U0001f600a", "a\x00"]  # the others have no id
BIGRAMS = ["长江", "江大", "桥<eos>", "a<eos>", "aa", "\U0001f600a", "a\x00", "e\u0301", "\x00<eos>", "<pad>"]
TEXTS = [
    "", "长", "a", "长江", "长江大桥", "aaaa", "\u3000长\u3000江 ", " ", "\U0001f600a\U0001f600", "e\u0301e\u0301<eos>",
    "a\x00b\x00", "\x00", "<pad>", "<unk>", "<pad><eos>长", "\x1b\x07\x85\u2028\x1c\r\t", "\ufeff长江\ufeff",
    "\ufffd\ufffe\U0010ffff\ue000", "长江大桥" * 7, "\r", "未知的字", "",
]  # fmt: skip
if too_old("tensorflow", (2, 20), ""):  # it decodes U+FFFE and U+10FFFF, which are no characters, as U+FFFD
    TEXTS = [re.sub("[\ufffe\U0010ffff]", "", text) for text in TEXTS]
SIZES = {"n_layer": 1, "d_model": 8, "n_head": 2, "d_inner": 12, "d_embed": 6, "d_bigram": 4, "max_seq_len": 30}
NETWORKS = {"tener": txl_tf.Tener, "flat": txl_tf.Flat}
EVERY = ("tag", "tag_text", "tag_characters")  # signatures of a SavedModel

# What a program that has no txl_tf does with the folder of a SavedModel.
STRANGER = """
import pickle, sys
sys.modules["txl_tf"] = None
import tensorflow as tf

directory, given, out = sys.argv[1:]
with open(given, "rb") as file:
    requests = pickle.load(file)
found = {}
signatures = tf.saved_model.load(directory).signatures
for name, inputs in requests.items():
    answers = signatures[name](**{key: tf.constant(value) for key, value in inputs.items()})
    found["loaded", name] = {key: answer.numpy() for key, answer in answers.items()}
with tf.compat.v1.Session(graph=tf.Graph()) as session:
    served = tf.compat.v1.saved_model.load(session, ["serve"], directory).signature_def
    for name, inputs in requests.items():
        feeds = {served[name].inputs[key].name: value for key, value in inputs.items()}
        found["session", name] = session.run({key: x.name for key, x in served[name].outputs.items()}, feeds)
with open(out, "wb") as file:
    pickle.dump(found, file)
"""


def vocab_of(symbols):
    vocab = Vocab(special=["<pad>", "<unk>"], unk="<unk>")
    vocab.set_lines(["<pad>", "<unk>", *symbols], "symbols")
    return vocab


def vocabs_of(kind):
    bigrams = vocab_of(symbol for symbol in BIGRAMS if symbol != "<pad>")
    if kind == "tener":
        return [vocab_of(CHARS), bigrams]
    return [vocab_of([*CHARS, *KNOWN_WORDS]), bigrams, lexicon_vocab(Lexicon(WORDS))]


def tagger_of(kind, vocabs, **options):
    sizes = {**SIZES, "n_token": len(vocabs[0]), "n_bigram": len(vocabs[1]), **options}
    tagger = txl_tf.Tagger(NETWORKS[kind](**sizes), LABELS)
    inputs = {name: tf.constant(x) for name, x in inputs_of(kind, vocabs, TEXTS).items()}
    tagger(inputs)
    randomise(tagger, seed=2, scale=0.6)
    spread_emissions(tagger, inputs)
    return tagger


def inputs_of(kind, vocabs, texts):
    encoder = encoder_of(*vocabs)
    return features([encoder.encode(text) for text in texts], kind == "flat")


def entities_of(tagger, inputs, texts):
    """`[(kind, start, end, text, probability)]` of each text, as the model finds them."""
    found = {name: x.numpy() for name, x in tagger.entities(inputs).items()}
    rows = [[] for _ in texts]
    for row, last in zip(*np.nonzero(found["ends"]), strict=True):
        start, kind = found["starts"][row, last], tagger.kinds[found["kinds"][row, last]]
        rows[row].append((kind, start, last + 1, texts[row][start : last + 1], found["probs"][row, last]))
    return rows


def answers_of(answer):
    """The same of an answer of `tag_text`, whose rest must be empty."""
    parts = [answer[name] for name in ("kinds", "starts", "ends", "entities", "probs")]
    assert {part.shape for part in parts} == {(len(answer["numbers"]), max(answer["numbers"]))}
    rows = []
    for row, n in enumerate(answer["numbers"]):
        assert not any(np.any(part[row, n:] != (b"" if part.dtype == object else 0)) for part in parts)
        kinds, starts, ends, texts, probs = (part[row, :n] for part in parts)
        names, texts = ([x.decode() for x in strings] for strings in (kinds, texts))
        rows.append(list(zip(names, starts, ends, texts, probs, strict=True)))
    return rows


def assert_same_entities(found, expected):
    assert [[entity[:4] for entity in row] for row in found] == [[entity[:4] for entity in row] for row in expected]
    for row, own in zip(found, expected, strict=True):
        np.testing.assert_allclose([e[4] for e in row], [e[4] for e in own], rtol=1e-4, atol=1e-5)


def run(signatures, name, **inputs):
    return {key: x.numpy() for key, x in signatures[name](**{k: tf.constant(x) for k, x in inputs.items()}).items()}


class Made:
    """A tagger of a network, and the SavedModel that it became.

    Attributes:
        names: the signatures that it has, with a warm-up request each if these are all.
    """

    def __init__(self, kind, folder, names=EVERY):
        self.kind, self.vocabs, self.folder, self.names = kind, vocabs_of(kind), folder / "1", names
        self.tagger, every = tagger_of(kind, self.vocabs), TaggingSignatures.signatures
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(TaggingSignatures, "signatures", lambda own: {name: every(own)[name] for name in names})
            warmup = None if names == EVERY else False
            txl_tf.export_saved_model(self.tagger, self.folder, self.vocabs, max_rows=64, warmup=warmup)
        self.signatures = tf.saved_model.load(str(self.folder)).signatures

    def inputs(self, texts):
        return inputs_of(self.kind, self.vocabs, texts)


# The fast suite has one graph of text of each network, as each takes seconds.
FAST = {"tener": EVERY, "flat": ("tag", "tag_text")}
WHOLE = [pytest.param(f"whole {kind}", marks=pytest.mark.slow) for kind in NETWORKS]


@pytest.fixture(scope="module", params=[*FAST, *WHOLE])
def made(request, tmp_path_factory):
    """One at a time."""
    return Made(request.param.split()[-1], tmp_path_factory.mktemp("made"), FAST.get(request.param, EVERY))


def of(*names):
    """A test of some of what is made."""
    return pytest.mark.parametrize("made", names, indirect=True)


# ----------------------------------------------------------------------------------------------- text to features


def graph_of(folder, lattice, vocabs, max_tokens=100):
    tables = []
    for i, vocab in enumerate(vocabs):
        vocab.save(folder / f"{i}.txt")
        tables.append(SymbolTable(vocab, str(folder / f"{i}.txt")))
    graph = SentenceGraph(lattice, max_tokens, *tables)
    spec = tf.RaggedTensorSpec([None, None], tf.string)
    graph.traced = tf.function(graph.features, input_signature=[spec], autograph=False)
    return graph


def assert_features(graph, encoder, texts):
    chars = tf.strings.unicode_split(tf.constant([text.encode() for text in texts]), "UTF-8")
    found = graph.traced(chars)
    expected = features([encoder.encode(text) for text in texts], graph.lattice)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == tf.int32
        np.testing.assert_array_equal(found[name], array, err_msg=f"{name} of {texts}", strict=True)


@pytest.mark.parametrize("kind", NETWORKS)
def test_the_graph_makes_the_features_of_any_text(tmp_path, kind):
    vocabs = vocabs_of(kind)
    graph, encoder = graph_of(tmp_path, kind == "flat", vocabs), encoder_of(*vocabs)
    for texts in (TEXTS, TEXTS[::-1], [""], ["", ""], ["a"], ["aaa", "aa"], ["\U0001f600a"] * 3):
        assert_features(graph, encoder, texts)
    for text in TEXTS:
        assert_features(graph, encoder, [text])


def test_a_space_is_the_symbol_that_stands_for_it_in_files(tmp_path):
    vocabs = [vocab_of(["␣", "a", "␣a"]), vocab_of(["␣a", "a␣", "a<eos>"]), lexicon_vocab(Lexicon(["␣a"]))]
    graph, encoder = graph_of(tmp_path, True, vocabs), encoder_of(*vocabs)
    for texts in (["␣a", " a", "\ta", "a b\t", "\u3000a"], [" "]):
        assert_features(graph, encoder, texts)
    assert encoder.encode(" a").ids.tolist() == [2, 3, 4] and encoder.encode("a ").bigrams.tolist() == [3, 1]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 5)), 5])
def test_the_graph_makes_the_features_of_random_texts_and_lexicons(tmp_path, seed):
    rng = np.random.default_rng(seed)
    alphabet = np.array([*"ab长江\x00\u3000\u0301\U0001f600", "\U00020000", "\x85"], object)

    def draw(n, longest, shortest=0):
        return ["".join(rng.choice(alphabet, rng.integers(shortest, longest + 1))) for _ in range(n)]

    words = [word for word in dict.fromkeys(draw(60, 2 + 2 * seed, 2)) if word.split() == [word]]
    known = [word for word in words if rng.random() < 0.5]
    chars = [c for c in alphabet if c.split() == [c] and rng.random() < 0.7]
    bigrams = [pair for pair in dict.fromkeys(draw(40, 2, 2)) if pair.split() == [pair]]
    vocabs = [vocab_of([*chars, *known]), vocab_of(bigrams), lexicon_vocab(Lexicon(words))]
    graph, encoder = graph_of(tmp_path, True, vocabs, max_tokens=20), encoder_of(*vocabs)
    for _ in range(4):
        assert_features(graph, encoder, draw(12, 20))


def test_without_a_lexicon_or_bigrams_there_are_none(tmp_path):
    vocab, bigrams = vocabs_of("flat")[:2]
    assert_features(graph_of(tmp_path, True, [vocab, bigrams]), SentenceEncoder(vocab, bigrams), TEXTS)
    assert_features(graph_of(tmp_path, False, [vocab]), SentenceEncoder(vocab), TEXTS)


def test_words_longer_than_any_text_are_not_looked_for(tmp_path):
    vocabs = [vocab_of("ab"), vocab_of([]), lexicon_vocab(Lexicon(["ab", "ba" * 500]))]
    graph = graph_of(tmp_path, True, vocabs, max_tokens=9)
    assert graph.word_lengths == (2,)
    assert_features(graph, encoder_of(*vocabs), ["abab", "b"])


# ---------------------------------------------------------------------------------------------------------- served


def test_texts_get_the_entities_of_the_model(made):
    expected = entities_of(made.tagger, made.inputs(TEXTS), TEXTS)
    assert {entity[0] for row in expected for entity in row} == {"PER", "LOC"}
    assert any(entity[2] - entity[1] > 1 for row in expected for entity in row)
    answer = run(made.signatures, "tag_text", text=TEXTS)
    assert_same_entities(answers_of(answer), expected)
    assert {name: x.dtype.name for name, x in answer.items()} == {
        "kinds": "object", "starts": "int32", "ends": "int32", "entities": "object", "probs": "float32",
        "numbers": "int32",
    }  # fmt: skip


@of("tener", *WHOLE)
def test_characters_get_their_tags(made):
    answer = run(made.signatures, "tag_characters", text=TEXTS)
    assert answer["lengths"].tolist() == [len(text) for text in TEXTS] and answer["lengths"].dtype == np.int32
    tags = made.tagger.entities(made.inputs(TEXTS))["tags"].numpy()
    assert answer["tags"].shape == tags.shape
    entities = answers_of(run(made.signatures, "tag_text", text=TEXTS))
    for text, row, ids, own in zip(TEXTS, answer["tags"], tags, entities, strict=True):
        names = [tag.decode() for tag in row]
        assert names == [LABELS[i] for i in ids[: len(text)]] + [""] * (tags.shape[1] - len(text))
        assert spans_of(names[: len(text)]) == [entity[:3] for entity in own]


def test_ids_get_what_the_model_answers(made):
    inputs = made.inputs(TEXTS)
    expected = made.tagger.entities(inputs)
    answer = run(made.signatures, "tag", **inputs)
    assert answer.keys() == expected.keys() == {"tags", "ends", "starts", "kinds", "probs"}
    for name, x in expected.items():
        assert answer[name].dtype == x.numpy().dtype
        np.testing.assert_allclose(answer[name], x, rtol=1e-4, atol=1e-5, err_msg=name)
    alone = run(made.signatures, "tag", **made.inputs(["a"]))  # one place
    np.testing.assert_array_equal(alone["tags"], made.tagger.decode(made.inputs(["a"]))[0])


def test_rows_alone_are_as_together(made):
    together = answers_of(run(made.signatures, "tag_text", text=TEXTS))
    for text, row in zip(TEXTS, together, strict=True):
        assert_same_entities(answers_of(run(made.signatures, "tag_text", text=[text])), [row])


def test_empty_texts_alone_have_no_entities(made):
    answer = run(made.signatures, "tag_text", text=["", ""])
    assert answer["numbers"].tolist() == [0, 0] and answer["entities"].shape == (2, 0)
    if "tag_characters" in made.names:
        answer = run(made.signatures, "tag_characters", text=[""])
        assert answer["lengths"].tolist() == [0] and answer["tags"].shape == (1, 0)


@pytest.mark.slow
@of("whole tener", "whole flat")
def test_strangers_get_the_entities_of_the_model(made, tmp_path):
    texts = np.array([text.encode() for text in TEXTS], object)
    requests = {"tag_text": {"text": texts}, "tag_characters": {"text": texts}, "tag": made.inputs(TEXTS)}
    (tmp_path / "given").write_bytes(pickle.dumps(requests))
    shutil.copytree(made.folder, tmp_path / "moved")
    command = [sys.executable, "-c", STRANGER, *(str(tmp_path / name) for name in ("moved", "given", "found"))]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    found = pickle.loads((tmp_path / "found").read_bytes())
    expected = entities_of(made.tagger, made.inputs(TEXTS), TEXTS)
    for way in ("loaded", "session"):
        assert_same_entities(answers_of(found[way, "tag_text"]), expected)
        for name in ("tag_characters", "tag"):
            for key, array in run(made.signatures, name, **requests[name]).items():
                if array.dtype == np.float32:
                    np.testing.assert_allclose(found[way, name][key], array, atol=1e-5)
                else:
                    np.testing.assert_array_equal(found[way, name][key], array)


@of("flat")
def test_the_tables_are_text_files(made):
    assets = made.folder / "assets"
    assert sorted(path.name for path in assets.iterdir()) == ["bigram_vocab.txt", "lexicon.txt", "vocab.txt"]
    assert (assets / "lexicon.txt").read_text() == "".join(f"{word}\n" for word in WORDS).replace(" ", "␣")


# ----------------------------------------------------------------------------------------------------- bad requests

LONG = "a" * 31
BAD_TEXT = [
    ({"text": np.zeros([0], "S1")}, ["text", 1, 0]),
    ({"text": ["a"] * 65}, ["text", 64, 65]),
    ({"text": "a"}, ["text", "[B]", "[]"]),
    ({"text": [["a"]]}, ["text", "[B]", "[1 1]"]),
    ({"text": ["a", "a\nb"]}, ["text", 1]),
    ({"text": ["\n"]}, ["text", 0]),
    ({"text": ["a", "", b"a\xff"]}, ["text", "UTF-8", 2]),
    ({"text": [b"\xed\xa0\x80"]}, ["text", "UTF-8", 0]),
    ({"text": [b"\xc0\x80"]}, ["text", "UTF-8"]),
    ({"text": [b"\xe9\x95"]}, ["text", "UTF-8"]),
    ({"text": ["a", LONG]}, ["max_tokens", "text", 30, 31]),
    ({"text": ["长" * 3_000_000]}, ["text", 8388608]),
]
ONES = np.ones([2, 3], np.int32)
BAD_CHARS = [
    ({"chars": ONES * 16}, ["chars", 0, 15]),
    ({"bigrams": -ONES}, ["bigrams", 0, 10]),
    ({"chars": np.int32([[1, 0, 1], [1, 1, 1]])}, ["chars", "[[1 0 1]]"]),
    ({"bigrams": ONES[:, :2]}, ["bigrams", "chars", "[2 2]"]),
    ({"chars": ONES[0]}, ["chars", "[B, T]", 3]),
    ({"chars": ONES[:0], "bigrams": ONES[:0]}, ["chars", 1]),
    ({"chars": np.ones([65, 3], np.int32)}, ["chars", 64]),
    ({"chars": ONES[:, :0], "bigrams": ONES[:, :0]}, ["chars", 1, 30]),
    ({"chars": np.ones([2, 31], np.int32)}, ["chars", 1, 30]),
]
BAD_LATTICE = [
    ({"lattice": np.full([2, 4], 22, np.int32)}, ["lattice", 0, 21]),
    ({"bigrams": ONES * 11}, ["bigrams", 0, 10]),
    ({"bigrams": ONES[:1]}, ["bigrams", "lattice"]),
    ({"bigrams": ONES[:, :0]}, ["bigrams", 1, 30]),
    ({"bigrams": np.ones([2, 5], np.int32)}, ["lattice", "bigrams"]),
    ({"seq_len": np.int32([3, 4])}, ["seq_len", 0, "bigrams"]),
    ({"seq_len": np.int32([-1, 3])}, ["seq_len", 0, "bigrams"]),
    ({"seq_len": np.int32([3])}, ["seq_len", "lattice"]),
    ({"lex_num": np.int32([2, 1])}, ["seq_len", "lex_num", "lattice"]),
    ({"lex_num": np.int32([1, -1])}, ["seq_len", "lex_num", "lattice"]),
    ({"lex_num": np.int32([1, 1, 1])}, ["lex_num", "lattice"]),
    ({"pos_s": ONES}, ["pos_s", "lattice", "[2 3]"]),
    ({"pos_s": np.full([2, 4], 1, np.int32)}, ["pos_s", 0, "pos_e"]),
    ({"pos_s": np.full([2, 4], -1, np.int32)}, ["pos_s", 0, "pos_e"]),
    ({"pos_e": np.full([2, 4], 2**31 - 1, np.int32)}, ["pos_e", 0, 29]),
    ({"lattice": np.ones([2, 5000], np.int32)}, ["lattice"]),
]


def good_of(kind):
    if kind == "tener":
        return {"chars": ONES, "bigrams": ONES}
    lattice, numbers = np.zeros([2, 4], np.int32), np.ones([2], np.int32)
    return {
        "lattice": lattice + 1, "bigrams": ONES, "seq_len": 3 * numbers, "lex_num": numbers, "pos_s": lattice,
        "pos_e": np.int32([[0, 1, 2, 1], [0, 1, 2, 0]]),
    }  # fmt: skip


def bad_requests(made):
    bad = [(name, {}, *rest) for name in made.names if name != "tag" for rest in BAD_TEXT]
    return bad + [("tag", good_of(made.kind), *rest) for rest in (BAD_CHARS if made.kind == "tener" else BAD_LATTICE)]


def test_bad_requests_are_refused_by_name_and_the_model_goes_on(made):
    before = run(made.signatures, "tag", **good_of(made.kind))
    for name, good, changes, facts in bad_requests(made):
        with raises_naming(tf.errors.InvalidArgumentError, *facts):
            run(made.signatures, name, **{**good, **changes})
    for key, array in run(made.signatures, "tag", **good_of(made.kind)).items():
        np.testing.assert_array_equal(array, before[key])


@pytest.mark.slow
@of("whole tener", "whole flat")
def test_a_server_s_graph_refuses_by_name_too(made, tmp_path):
    """A server feeds a session whose placeholders take any shape, as TensorFlow's C library does."""
    folder = tmp_path / "1"
    shutil.copytree(made.folder, folder)
    model = saved_model_pb2.SavedModel.FromString((folder / "saved_model.pb").read_bytes())
    for node in model.meta_graphs[0].graph_def.node:
        if node.op == "Placeholder":
            node.attr["shape"].shape.CopyFrom(tf.TensorShape(None).as_proto())
            node.attr.pop("_output_shapes", None)
    (folder / "saved_model.pb").write_bytes(model.SerializeToString())
    with tf.compat.v1.Session(graph=tf.Graph()) as session:
        served = tf.compat.v1.saved_model.load(session, ["serve"], str(folder)).signature_def

        def send(signature, inputs):
            info = served[signature]
            feeds = {info.inputs[name].name: value for name, value in inputs.items()}
            return session.run({name: output.name for name, output in info.outputs.items()}, feeds)

        for name, good, changes, facts in bad_requests(made):
            with raises_naming(tf.errors.InvalidArgumentError, *facts):
                send(name, {**good, **{k: np.array(x, object) if k == "text" else x for k, x in changes.items()}})
        found = answers_of(send("tag_text", {"text": np.array([text.encode() for text in TEXTS], object)}))
    assert_same_entities(found, answers_of(run(made.signatures, "tag_text", text=TEXTS)))


def served_of(folder, kind, vocabs, **options):
    graph = graph_of(folder, kind == "flat", vocabs)
    names = ("vocab", "bigram_vocab", "lexicon")
    tables = dict(zip(names, (x for x in (graph.vocab, graph.bigram_vocab, graph.lexicon) if x), strict=False))
    return TaggingSignatures(tagger_of(kind, vocabs), tables, **options)


def test_long_rows_are_fewer(tmp_path, monkeypatch):
    monkeypatch.setattr(request_module, "REQUEST_BYTES", 1)
    served = served_of(tmp_path, "tener", vocabs_of("tener"), max_rows=6)
    limits = served.limits
    assert limits.max_bytes == limits.row_bytes(30) and served.max_items == 30
    fit = limits.max_bytes // limits.row_bytes(15)
    assert 1 < fit < 6
    assert served.tag_text(tf.constant(["a" * 15] * fit))["numbers"].shape == (fit,)
    with raises_naming(tf.errors.InvalidArgumentError, "text", fit, 15, fit + 1):
        served.tag_text(tf.constant(["a" * 15] + [""] * fit))
    with raises_naming(tf.errors.InvalidArgumentError, "chars", fit, 15, fit + 1):
        served.tag(chars=tf.ones([fit + 1, 15], tf.int32), bigrams=tf.ones([fit + 1, 15], tf.int32))


def test_the_words_of_a_text_count(tmp_path, monkeypatch):
    """30 characters and as many words fit in any case; a text in which every piece is a word is too large."""
    monkeypatch.setattr(request_module, "REQUEST_BYTES", 1)
    vocabs = [vocab_of("ab"), vocab_of(["aa"]), lexicon_vocab(Lexicon(["a" * n for n in range(2, 9)]))]
    served = served_of(tmp_path, "flat", vocabs, max_rows=2)
    assert served.max_items == 60
    assert served.tag_text(tf.constant(["a" * 11]))["numbers"].shape == (1,)  # 11 + 10 + ... + 4 items
    with raises_naming(tf.errors.InvalidArgumentError, 60, 68):
        served.tag_text(tf.constant(["a" * 12]))
    with raises_naming(tf.errors.InvalidArgumentError, 1, 60):
        served.tag_text(tf.constant(["a" * 11, ""]))


def test_by_default_many_short_texts_fit(made):
    limits = limits_of(made.tagger, None, 512)
    assert limits.max_rows == 1024 and limits.max_bytes == 2**29
    assert limits_of(made.tagger, None, 10**5).max_bytes > 2**29


# --------------------------------------------------------------------------------------------------------- exports


@pytest.mark.slow
@of("whole tener", "whole flat")
def test_half_weights_are_those_of_a_rounded_model(made, tmp_path):
    txl_tf.export_saved_model(made.tagger, tmp_path / "1", made.vocabs, weights="bfloat16", warmup=False)
    rounded = tagger_of(made.kind, made.vocabs)
    for weight in rounded.weights:
        weight.assign(tf.cast(tf.cast(weight, "bfloat16"), "float32"))
    signatures = tf.saved_model.load(str(tmp_path / "1")).signatures
    expected = entities_of(rounded, made.inputs(TEXTS), TEXTS)
    assert_same_entities(answers_of(run(signatures, "tag_text", text=TEXTS)), expected)
    stored = tf.train.load_checkpoint(str(tmp_path / "1" / "variables" / "variables")).get_variable_to_dtype_map()
    assert set(stored.values()) == {tf.bfloat16, tf.string}


@of("tener", *WHOLE)
def test_warm_up_requests_are_answered(made):
    pytest.importorskip("tensorflow_serving.apis")
    from tensorflow_serving.apis import prediction_log_pb2

    path = made.folder / "assets.extra" / "tf_serving_warmup_requests"
    records = [record.numpy() for record in tf.data.TFRecordDataset([str(path)])]
    requests = [prediction_log_pb2.PredictionLog.FromString(record).predict_log.request for record in records]
    assert {request.model_spec.signature_name for request in requests} == made.signatures.keys()
    for request in requests:
        inputs = {name: tf.make_ndarray(proto) for name, proto in request.inputs.items()}
        answer = run(made.signatures, request.model_spec.signature_name, **inputs)
        assert all(len(array) == 1 for array in answer.values())


@pytest.mark.slow
@of("whole tener", "whole flat")
def test_without_vocabularies_there_are_ids_alone(made, tmp_path):
    txl_tf.export_saved_model(made.tagger, tmp_path / "1", warmup=False)
    signatures = tf.saved_model.load(str(tmp_path / "1")).signatures
    assert list(signatures) == ["tag"]
    inputs = made.inputs(TEXTS)
    np.testing.assert_array_equal(run(signatures, "tag", **inputs)["tags"], made.tagger.decode(inputs)[0])


@pytest.mark.slow
@pytest.mark.parametrize("kind", NETWORKS)
def test_a_model_without_bigrams_does_not_read_their_vocabulary(tmp_path, kind):
    vocabs = vocabs_of(kind)
    tagger = tagger_of(kind, vocabs, n_bigram=0)
    txl_tf.export_saved_model(tagger, tmp_path / "1", vocabs, warmup=False)
    signatures = tf.saved_model.load(str(tmp_path / "1")).signatures
    found = answers_of(run(signatures, "tag_text", text=TEXTS))
    assert_same_entities(found, entities_of(tagger, inputs_of(kind, vocabs, TEXTS), TEXTS))
    assert not (tmp_path / "1" / "assets" / "bigram_vocab.txt").exists()


@pytest.mark.slow
def test_a_tagger_that_was_never_called_can_be_exported(tmp_path):
    vocabs = vocabs_of("flat")
    network = txl_tf.Flat(**SIZES, n_token=len(vocabs[0]), n_bigram=len(vocabs[1]))
    tagger = txl_tf.Tagger(network, LABELS)
    txl_tf.export_saved_model(tagger, tmp_path / "1", vocabs[:2], max_tokens=3, warmup=False)
    signatures = tf.saved_model.load(str(tmp_path / "1")).signatures
    found = answers_of(run(signatures, "tag_text", text=["aaa", ""]))
    assert_same_entities(found, entities_of(tagger, inputs_of("flat", vocabs[:2], ["aaa", ""]), ["aaa", ""]))
    with raises_naming(tf.errors.InvalidArgumentError, "text", 3):
        run(signatures, "tag_text", text=["aaaa"])


@pytest.fixture(scope="module")
def taggers():
    """A tagger of each network, and its vocabularies."""
    return {kind: (tagger_of(kind, vocabs_of(kind)), vocabs_of(kind)) for kind in NETWORKS}


class Level(Vocab):
    """A vocabulary of characters as long as another one."""

    def __init__(self, symbols):
        super().__init__(level="char", special=symbols)
        self.build()


def with_symbol(vocab, symbol):
    changed = copy.copy(vocab)
    changed.symbols = [*vocab.symbols[:-1], symbol]
    return changed


@pytest.mark.parametrize(
    "kind, options, name, value",
    [
        ("tener", {"top_n": 3}, "top_n", 3),
        ("tener", {"start_token": 0}, "start_token", 0),
        ("tener", {"search": {}}, "search", {}),
        ("tener", {"weights": "int8"}, "weights", "int8"),
        ("tener", {"max_tokens": 31}, "max_tokens", 31),
        ("flat", {"max_rows": 0}, "max_rows", 0),
        ("tener", {"vocab": lambda v, b: [v]}, "vocab", 1),
        ("tener", {"vocab": lambda v, b: [v, b, b]}, "vocab", 3),
        ("flat", {"vocab": lambda v, b, w: [v, b, w, w]}, "vocab", 4),
        ("tener", {"vocab": lambda v, b: [b, v]}, "vocab", 11),
        ("tener", {"vocab": lambda v, b: [v, v]}, "bigram_vocab", 16),
        ("tener", {"vocab": lambda v, b: [Level(v.symbols), b]}, "vocab", "char"),
        ("tener", {"vocab": lambda v, b: [with_symbol(v, "\r"), b]}, "vocab", "\r"),
        ("tener", {"vocab": lambda v, b: [v, with_symbol(b, "")]}, "bigram_vocab", ""),
        ("flat", {"vocab": lambda v, b, w: [v, b, Vocab()]}, "lexicon", []),
    ],
    ids=lambda value: "vocab" if isinstance(value, dict) and "vocab" in value else str(value),
)
def test_bad_arguments_of_an_export_are_named(taggers, tmp_path, kind, options, name, value):
    tagger, vocabs = taggers[kind]
    vocab = options.get("vocab", lambda *vocabs: list(vocabs))(*vocabs)
    with raises_parameter(name, value):
        txl_tf.export_saved_model(tagger, tmp_path / "1", **{"warmup": False, **options, "vocab": vocab})
    assert not (tmp_path / "1").exists()


def test_errors_of_an_export_say_what_is_allowed(taggers, tmp_path):
    tagger, (vocab, _) = taggers["tener"]
    with raises_parameter("search", {}):
        txl_tf.export_saved_model(tagger, tmp_path / "1", search={})
    with raises_parameter("vocab", 1, "[vocab, bigram_vocab]"):
        txl_tf.export_saved_model(tagger, tmp_path / "1", [vocab])
    flat, (vocab, bigram_vocab, words) = taggers["flat"]
    with raises_parameter("words", "a"):
        txl_tf.export_saved_model(flat, tmp_path / "1", [vocab, bigram_vocab, with_symbol(words, "a")])


def test_a_tagger_over_another_network_is_served_for_ids(tmp_path):
    tokens = keras.Input([None], dtype="int32")
    tagger = txl_tf.Tagger(keras.Model(tokens, keras.layers.Embedding(9, 4)(tokens)), LABELS)
    ids = np.array([[0, 3, 4, 0, 5], [1, 2, 3, 4, 8]], np.int32)
    with raises_parameter("vocab", allowed=[None]):
        txl_tf.export_saved_model(tagger, tmp_path / "1", vocabs_of("tener"))
    tagger(ids)
    randomise(tagger, seed=2, scale=0.6)
    txl_tf.export_saved_model(tagger, tmp_path / "1", max_tokens=6, warmup=False)
    signatures = tf.saved_model.load(str(tmp_path / "1")).signatures
    assert list(signatures) == ["tag"]
    found, expected = run(signatures, "tag", inputs=ids), tagger.entities(ids)
    assert found.keys() == expected.keys() and found["ends"].any()
    for name, x in expected.items():
        np.testing.assert_allclose(found[name], x, rtol=1e-5, err_msg=name)
    with raises_naming(tf.errors.InvalidArgumentError, "inputs", 1, 6):
        run(signatures, "tag", inputs=np.ones([1, 7], np.int32))


def test_a_tagger_over_features_is_served_with_its_mask_and_warmed_up(tmp_path):
    features = keras.Input([None, 3], name="features")
    tagger = txl_tf.Tagger(keras.Model(features, keras.layers.Dense(4)(features)), LABELS)
    inputs = {"features": np.ones([2, 5, 3], np.float32), "mask": np.ones([2, 5], bool)}
    tagger(inputs)
    randomise(tagger, seed=2, scale=0.6)
    txl_tf.export_saved_model(tagger, tmp_path / "1", max_tokens=6)
    assert (tmp_path / "1" / "assets.extra").is_dir()
    found = run(tf.saved_model.load(str(tmp_path / "1")).signatures, "tag", **inputs)
    np.testing.assert_array_equal(found["tags"], tagger.entities(inputs)["tags"])


# -------------------------------------------------------------------------------------------------------- the page


def section():
    return re.split(r"^## ", (ROOT / "docs" / "serving.md").read_text().split("## Named entities")[1], flags=re.M)[0]


@of("tener")
def test_the_page_has_the_signatures_of_text(made):
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) \|$", section(), re.M)
    shown = {name: [set(re.findall(r"`([a-z_]+)`", cell)) for cell in cells] for name, *cells in rows}
    assert shown.keys() == made.signatures.keys()
    for name, function in made.signatures.items():
        if name != "tag":  # whose arguments are the network's
            assert shown[name][0] == set(function.structured_input_signature[1])
        assert shown[name][1] == set(function.structured_outputs)


@of("tener")
def test_the_request_of_the_page_is_answered_in_its_form(made):
    (code,) = re.findall(r"^```json\n(.*?)^```", section(), re.M | re.S)
    request, end = json.JSONDecoder().raw_decode(code)
    shown = json.loads(code[end:])["outputs"]
    answer = run(made.signatures, request["signature_name"], **request["inputs"])
    assert shown.keys() == answer.keys()
    n = max(shown["numbers"])
    assert all(len(row) == n for name, table in shown.items() if name != "numbers" for row in table)
    for text, starts, ends, entities in zip(
        request["inputs"]["text"], shown["starts"], shown["ends"], shown["entities"], strict=True
    ):
        assert [text[start:end] for start, end in zip(starts, ends, strict=True)] == entities
