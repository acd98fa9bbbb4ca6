"""Lines to tags: sentences that are longer than the network takes are read in windows, and tagged as one."""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import raises_parameter, randomise, spread_emissions

import txl_tf
from txl_tf.data.tagged.batches import SentenceEncoder, features
from txl_tf.data.tagged.lexicon import Lexicon
from txl_tf.data.tagged.sentence_ends import LineSizes
from txl_tf.data.tagged.tags import spans_of
from txl_tf.data.vocabulary import Vocab
from txl_tf.errors import ParameterError
from txl_tf.taggers.text_tagger import TextTagger, window_begins

LABELS = ["O", "B-X", "I-X", "B-Y", "I-Y"]
SLOW = pytest.mark.slow
SIZES = {"n_layer": 1, "d_model": 8, "n_head": 2, "d_inner": 8, "d_embed": 6, "d_bigram": 4}
TEXT = "abcdbcacdbaabdcdbacbdcadbbcadcb"


def vocab_of(*symbols):
    vocab = Vocab(special=["<pad>", "<unk>"], unk="<unk>")
    vocab.set_lines(["<pad>", "<unk>", *symbols], "symbols")
    return vocab


BIGRAMS = vocab_of(*(a + b for a in "abcd" for b in "abcd"))
ENCODERS = {
    "tener": SentenceEncoder(vocab_of(*"abcd"), BIGRAMS),
    "flat": SentenceEncoder(vocab_of(*"abcd", "bc", "acd"), BIGRAMS, Lexicon(["bc", "acd", "da"])),
}


def text_tagger(kind, max_seq_len, **options):
    """The same weights, whatever `max_seq_len` is."""
    encoder, network = ENCODERS[kind], {"tener": txl_tf.Tener, "flat": txl_tf.Flat}[kind]
    sizes = {"n_token": len(encoder.vocab), "n_bigram": len(BIGRAMS), **SIZES}
    tagger = txl_tf.Tagger(network(max_seq_len=max_seq_len, **sizes), LABELS)
    randomise(tagger, seed=4, scale=0.8)
    spread_emissions(tagger, {name: tf.constant(x) for name, x in inputs_of(encoder, [TEXT], kind).items()})
    return TextTagger(tagger, encoder, **options)


def inputs_of(encoder, texts, kind):
    return features([encoder.encode(text) for text in texts], kind == "flat")


@pytest.mark.parametrize(
    "n, most, begins",
    [
        (5, 4, [0, 1]),
        (6, 4, [0, 2]),
        (9, 4, [0, 1, 3, 5]),
        (10, 4, [0, 2, 4, 6]),
        (3, 1, [0, 1, 2]),
        (8, 3, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_windows_overlap_by_half_or_more(n, most, begins):
    assert window_begins(n, most) == begins


def test_a_window_has_the_words_that_lie_in_it():
    whole = ENCODERS["flat"].encode("abcacdacd")
    assert whole.starts.tolist() == [*range(9), 1, 3, 5, 6]
    window = whole.window(2, 7)
    assert window.ids.tolist() == [*whole.ids[2:7], *whole.ids[10:12]] and window.n == 5
    assert window.starts.tolist() == [0, 1, 2, 3, 4, 1, 3] and window.ends.tolist() == [0, 1, 2, 3, 4, 3, 4]
    assert window.bigrams.tolist() == whole.bigrams[2:7].tolist()  # the last one knows what follows


@pytest.mark.parametrize(
    "kind, most", [pytest.param("tener", 7, marks=SLOW), pytest.param("tener", 1, marks=SLOW), ("flat", 8)]
)
def test_long_sentences_have_the_emissions_of_the_windows_in_whose_middle_tokens_stand(kind, most, eager):
    """By a loop over tokens and windows; then one path through the whole sentence, and its probabilities."""
    tagging = text_tagger(kind, most, batch_size=3)
    tagger, encoder, n = tagging.tagger, tagging.encoder, len(TEXT)
    begins, whole = window_begins(n, most), encoder.encode(TEXT)
    windows = features([whole.window(begin, begin + most) for begin in begins], kind == "flat")
    of_windows = tagger.emissions(windows)[0].numpy()
    expected = []
    for place in range(n):

        def room(i, place=place):  # to the nearer edge of a window, unless it is that of the sentence
            left = place - begins[i] if begins[i] else n
            right = begins[i] + most - 1 - place if begins[i] + most < n else n
            return min(left, right) if begins[i] <= place < begins[i] + most else -1

        best = max(range(len(begins)), key=lambda i: (room(i), -i))
        expected.append(of_windows[best, place - begins[best]])
    emissions, mask = tf.constant(expected)[None], tf.ones([1, n], tf.bool)
    found = {name: x.numpy()[0] for name, x in tagger.entities_of(emissions, mask).items()}
    (result,) = tagging.tag([TEXT])
    assert result.tags == [LABELS[i] for i in found["tags"]]
    assert [(e.kind, e.start, e.end) for e in result.entities] == spans_of(result.tags) != []
    np.testing.assert_allclose([e.prob for e in result.entities], found["probs"][found["ends"]], rtol=1e-4)


@pytest.mark.slow
def test_a_window_may_be_shorter_than_the_limit_of_the_network():
    texts = [TEXT]
    shorter, by_limit = text_tagger("tener", 40, window=8), text_tagger("tener", 8)
    for found, expected in zip(shorter.tag(texts), by_limit.tag(texts), strict=True):
        assert found.tags == expected.tags
        np.testing.assert_allclose(*([e.prob for e in some.entities] for some in (found, expected)), rtol=1e-5)
    assert shorter.tagger.network.max_seq_len == 40 and (shorter.window_size, by_limit.window_size) == (8, 8)
    with pytest.raises(ParameterError) as caught:
        text_tagger("tener", 40, window=41)
    assert (caught.value.name, caught.value.value, caught.value.allowed) == ("window", 41, "at most 40")


def test_texts_are_tagged_sentence_by_sentence(eager):
    """Each as by itself; tags and entities are in the places of the text."""
    tagging = text_tagger("tener", 40)
    pieces = ["abcdb。", "cacd！”", "baabd"]
    found, empty, one = tagging.tag_in_sentences(["".join(pieces), "", "ab"])
    alone, start = tagging.tag(pieces), 0
    assert found.tags == sum((piece.tags for piece in alone), []) and empty == ([], [])
    entities = []
    for piece, text in zip(alone, pieces, strict=True):
        entities += [(e.kind, e.start + start, e.end + start, pytest.approx(e.prob, rel=1e-4)) for e in piece.entities]
        start += len(text)
    assert [tuple(entity) for entity in found.entities] == entities != []
    assert one.tags == tagging.tag(["ab"])[0].tags and tagging.tag(["".join(pieces)])[0].entities != found.entities


@pytest.mark.ci
@pytest.mark.parametrize(
    "usual, most, expected",
    [
        (1, 2, ["ab。", "cd！", "a；", "b。", "dd"]),
        (2, 4, ["ab。cd！", "a；b。", "dd"]),
        (3, 4, ["ab。cd！a；", "b。dd"]),
        (1, 5, ["ab。cd！a；b。dd"]),
        (1, None, ["ab。cd！a；b。dd"]),
    ],
)
def test_lines_of_more_sentences_than_in_training_are_cut(usual, most, expected, eager):
    tagging = text_tagger("tener", 40, sizes=LineSizes(20, usual, most))
    text, sentences = "ab。cd！a；b。dd", ["ab。", "cd！", "a；", "b。", "dd"]
    assert tagging.pieces(text) == expected and tagging.pieces(list(text)) == [list(piece) for piece in expected]
    assert tagging.pieces(text, False) == [text] and tagging.pieces(text, True) == sentences
    assert tagging.pieces("") == [""] and tagging.pieces("", True) == []
    (found,), alone = tagging.tag_in_sentences([text], split=None), tagging.tag(expected)
    assert found.tags == sum((piece.tags for piece in alone), [])


@pytest.mark.parametrize("split", [0, 1, "no", np.False_])
def test_whether_to_split_is_true_false_or_none(split, eager):
    with raises_parameter("split", split):
        text_tagger("tener", 40).tag_in_sentences(["ab。cd"], split=split)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tener", pytest.param("flat", marks=SLOW)])
def test_sentences_that_fit_are_tagged_as_ever_beside_long_ones(kind):
    short, long = text_tagger(kind, 7), text_tagger(kind, 40)
    texts = [TEXT[:7], "", TEXT, TEXT[5:9], TEXT[3:20]]
    found, whole = short.tag(texts), long.tag(texts)
    for i in (0, 1, 3):
        assert found[i].tags == whole[i].tags and len(found[i].tags) == len(texts[i])
        assert [e[:3] for e in found[i].entities] == [e[:3] for e in whole[i].entities]
        np.testing.assert_allclose(*([e.prob for e in some[i].entities] for some in (found, whole)), rtol=1e-4)
    assert [len(result.tags) for result in found] == list(map(len, texts))


def test_lines_of_characters_are_described_by_place():
    tagging = text_tagger("tener", 40)
    (result,) = tagging.tag([tagging.split(TEXT)])
    found = tagging.describe(TEXT, result)
    assert found["text"] == TEXT and tagging.split("a b") == ["a", " ", "b"]
    assert [(e["kind"], e["start"], e["end"], e["text"]) for e in found["entities"]] == [
        (kind, start, end, TEXT[start:end]) for kind, start, end in spans_of(result.tags)
    ]


@pytest.mark.parametrize("kind", ["tener", "flat"])
def test_attention_of_a_sentence_is_that_of_the_network_by_layer(kind):
    tagging = text_tagger(kind, 40)
    items, probs = tagging.attention("abcacdb")
    words = [("bc", 1, 3), ("acd", 3, 6)] if kind == "flat" else []
    assert [(item.text, item.start, item.end) for item in items] == [
        *((letter, i, i + 1) for i, letter in enumerate("abcacdb")),
        *words,
    ]
    inputs = {name: tf.constant(x) for name, x in inputs_of(tagging.encoder, ["abcacdb"], kind).items()}
    assert probs.shape == (1, 2, len(items), len(items))
    np.testing.assert_allclose(probs[0], tagging.tagger.network.attention_probs(inputs, 0)[:, 0], rtol=1e-5)


def test_a_word_that_is_left_out_is_as_one_that_the_lexicon_has_not(eager):
    tagging, text = text_tagger("flat", 40), "abcacdb"
    encoder = SentenceEncoder(ENCODERS["flat"].vocab, BIGRAMS, Lexicon(["bc", "da"]))
    left_out = {"acd"}
    for mine, expected in zip(tagging.encoder.encode(text, left_out), encoder.encode(text), strict=True):
        np.testing.assert_array_equal(mine, expected)
    assert [item.text for item in tagging.attention(text, left_out).items] == [*text, "bc"]
    without = TextTagger(tagging.tagger, encoder).tag([text])
    assert tagging.tag([text], left_out) == without != tagging.tag([text])


@pytest.mark.parametrize(
    "sentences, name",
    [("abc", "sentences"), (None, "sentences"), (["ab", None], "sentences[1]"), ([[1, 2]], "sentences[0]")],
    ids=str,
)
def test_sentences_are_sequences_of_tokens(sentences, name):
    with raises_parameter(name):
        text_tagger("tener", 7).tag(sentences)


def test_words_are_left_out_only_with_a_lexicon():
    with raises_parameter("left_out", {"bc"}):
        text_tagger("tener", 7).tag(["abc"], {"bc"})


@pytest.mark.parametrize(
    "changes, name",
    [
        ({"vocab": vocab_of(*"abcdefgh")}, "encoder.vocab"),
        ({"bigram_vocab": vocab_of(*map(str, range(30)))}, "encoder.bigram_vocab"),
        ({"lexicon": Lexicon(["bc"])}, "encoder.lexicon"),
    ],
)
def test_the_network_can_read_what_the_encoder_writes(changes, name):
    tagger = text_tagger("tener", 7).tagger
    with raises_parameter(name):
        TextTagger(tagger, dataclasses.replace(ENCODERS["tener"], **changes))


def test_a_network_of_the_user_s_own_reads_no_text():
    tagger = txl_tf.Tagger(keras.layers.Embedding(9, 4), LABELS)
    with raises_parameter("tagger", tagger):
        TextTagger(tagger, ENCODERS["tener"])


@pytest.mark.parametrize("tokens", ["", "abcdabcd"])
def test_attention_is_of_a_sentence_that_the_network_takes(tokens):
    with raises_parameter("tokens", tokens, limit="max_seq_len=7"):
        text_tagger("tener", 7).attention(tokens)


def test_attention_is_of_a_sentence_that_is_read_at_once():
    tagging = text_tagger("tener", 7, window=4)
    assert tagging.attention("abcd").probs.shape == (1, 2, 4, 4)
    with raises_parameter("tokens", "abcda", limit="window=4"):
        tagging.attention("abcda")


def test_a_network_without_attention_tags_and_says_that_it_has_none():
    sizes = {"n_token": 6, "n_bigram": len(BIGRAMS), "d_embed": 6, "d_bigram": 4, "d_model": 8, "n_layer": 1}
    tagging = TextTagger(txl_tf.Tagger(txl_tf.BiLSTM(**sizes), LABELS), ENCODERS["tener"])
    assert len(tagging.tag(["abcd"])[0].tags) == 4
    with raises_parameter("tagger", tagging.tagger):
        tagging.attention("abcd")


class OwnDecode(txl_tf.Tagger):
    def decode(self, inputs):
        tags, score = super().decode(inputs)
        return tf.zeros_like(tags), score


class OwnEntities(txl_tf.Tagger):
    def entities(self, inputs):
        found = super().entities(inputs)
        return {**found, "probs": 0.5 * found["probs"]}


class OwnEntitiesOf(txl_tf.Tagger):
    def entities_of(self, emissions, mask):
        found = super().entities_of(emissions, mask)
        return {**found, "probs": 0.5 * found["probs"]}


@pytest.mark.ci
def test_own_entities_count_for_each_sentence_that_fits_and_are_refused_for_a_longer_one():
    plain = text_tagger("tener", 8)
    short, long = TEXT[:8], TEXT[:9]
    expected = [0.5 * entity.prob for tagged in plain.tag([short, long]) for entity in tagged.entities]
    n = len(plain.tag([short])[0].entities)
    assert 0 < n < len(expected)
    plain.tagger.__class__ = OwnEntitiesOf
    plain.drop_graphs()
    found = [entity.prob for tagged in plain.tag([short, long]) for entity in tagged.entities]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    plain.tagger.__class__ = OwnEntities
    plain.drop_graphs()
    np.testing.assert_allclose([e.prob for e in plain.tag([short])[0].entities], expected[:n], rtol=1e-5)
    with raises_parameter("entities"):
        plain.tag([short, long])


def test_an_own_decode_is_refused_where_it_would_not_be_called(tmp_path):
    """Of a tagger that is not compiled, too."""
    tagging = text_tagger("tener", 8)
    tagging.tagger.__class__ = OwnDecode
    inputs = inputs_of(tagging.encoder, [TEXT[:8]], "tener")
    assert not np.any(tagging.tagger.decode(inputs)[0])
    calls = [
        lambda: tagging.tagger.entities(inputs),
        lambda: tagging.tag([TEXT[:8]]),
        lambda: tagging.tag([TEXT]),
        lambda: txl_tf.export_saved_model(tagging.tagger, tmp_path / "export"),
    ]
    for call in calls:
        with raises_parameter("decode"):
            call()
    assert not any(tmp_path.iterdir())
