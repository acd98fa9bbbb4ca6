"""Subwords of pairs: ids, lines that come back, runs, and a served model that takes text."""

import importlib.util
import random

import numpy as np
import pytest
import tensorflow as tf
from helpers import write_text

import txl_tf
from txl_tf.config import OptimizerConfig, PairsConfig, PairsTrainingConfig, TransformerConfig
from txl_tf.data.pairs.parallel import END_ID, encode_lines, read_pairs
from txl_tf.data.subwords import SubwordVocab, train_line_subwords
from txl_tf.errors import ParameterError
from txl_tf.runs.train import train_run

pytest.importorskip("sentencepiece", reason="sentencepiece, an extra, is not installed")

HOSTILE = [
    "a",
    "  two  spaces ",
    "tab\there",
    "\u2581 \u2581",
    "</s> <s><pad><unk>",
    "日本語 🎉",
    "ﬁ Ⅳ \u2028",
    "x" * 50,
]


@pytest.fixture(scope="module")
def lines():
    rng = random.Random(0)
    words = "the a cat dog house sees walks talks big small red 猫 が".split()
    return [" ".join(rng.choices(words, k=rng.randint(1, 6))) for _ in range(300)]


@pytest.fixture(scope="module")
def path(lines, tmp_path_factory):
    rows = "".join(f"{line}\t{' '.join(line.split()[::-1])}\n" for line in dict.fromkeys(lines))
    return write_text(tmp_path_factory.mktemp("subwords") / "pairs.tsv", rows)


def both(**options):
    return {
        "source_level": "subword",
        "target_level": "subword",
        "valid_fraction": 0.2,
        "subword_type": "bpe",
        **options,
    }


@pytest.mark.parametrize("kind", ["bpe", pytest.param("unigram", marks=pytest.mark.slow)])
def test_every_line_comes_back_and_ends_with_the_end(lines, kind, tmp_path):
    vocab = train_line_subwords(lines, 300, kind)
    assert vocab.symbols[:4] == ["<pad>", "<s>", "</s>", "<unk>"] and len(vocab) == 300
    encoded = encode_lines(vocab, [f"{line}\n" for line in [*lines, *HOSTILE]], "text")
    for i, line in enumerate([*lines, *HOSTILE]):
        assert vocab.decode(encoded[i]) == f"{line}\n" and encoded[i][-1] == END_ID
        assert not np.isin(encoded[i], [0, 1, 3]).any()
    assert sum(encoded.lengths[: len(lines)]) < 0.7 * sum(map(len, lines))
    vocab.save(tmp_path / "v.model")
    again = SubwordVocab.load(tmp_path / "v.model", **vocab.get_config())
    np.testing.assert_array_equal(again.encode(["a red cat\n"]), vocab.encode(["a red cat\n"]))
    assert again.decode([END_ID]) == "\n"


def test_a_small_text_has_fewer_pieces_by_default(lines):
    characters = set("".join(lines))
    expected = 4 + 256 + len(characters) + sum(map(len, lines)) // 50
    assert 260 + len(characters) < len(train_line_subwords(lines, None, "bpe")) <= expected


@pytest.mark.ci
def test_vocabularies_are_those_of_each_side_or_shared_or_of_a_file(path, tmp_path):
    corpus = read_pairs(PairsConfig(train_path=path, **both(vocab_size=300)))
    assert [len(vocab) for vocab in corpus.vocabs] == [300, 300]
    assert corpus.source_vocab.fingerprint() != corpus.target_vocab.fingerprint()
    shared = read_pairs(PairsConfig(train_path=path, **both(vocab_size=300, share_vocab=True)))
    assert shared.source_vocab is shared.target_vocab
    corpus.source_vocab.save(tmp_path / "s.model")
    given = read_pairs(PairsConfig(train_path=path, **both(source_symbols=str(tmp_path / "s.model"))))
    assert given.source_vocab.fingerprint() == corpus.source_vocab.fingerprint() != given.target_vocab.fingerprint()
    mixed = read_pairs(PairsConfig(train_path=path, source_level="subword", valid_fraction=0.2, min_freq=2))
    assert (mixed.source_vocab.level, mixed.target_vocab.level) == ("subword", "char")


def test_subwords_cannot_be_extended_and_this_is_said_before_anything_is_read(lines):
    vocab = train_line_subwords(lines[:50], None, "bpe")
    with pytest.raises(ParameterError) as caught:
        read_pairs(PairsConfig(train_path="nowhere", **both()), [vocab, vocab], extend_vocab=True)
    assert (caught.value.name, caught.value.allowed) == ("extend_vocab", "left out at level subword")


@pytest.mark.parametrize(
    "options, name",
    [
        (both(min_freq=2), "min_freq"),
        (both(max_size=20), "max_size"),
        (both(lower_case=True), "lower_case"),
        ({"vocab_size": 300}, "vocab_size"),
        (both(subword_type="wordpiece"), "subword_type"),
    ],
)
def test_options_of_other_levels_are_refused(options, name):
    with pytest.raises(ParameterError) as caught:
        PairsConfig(train_path="x", **options)
    assert caught.value.name == name


def test_the_graph_cuts_and_joins_lines_as_the_vocabulary_does(lines, tmp_path):
    pytest.importorskip("tensorflow_text", reason="tensorflow-text, an extra, is not installed")
    from txl_tf.serving.subwords import SubwordTokenizer

    vocab = train_line_subwords(lines, 300, "bpe")
    vocab.save(tmp_path / "v.model")
    table = SubwordTokenizer(vocab, str(tmp_path / "v.model"))
    texts = [f"{line}\n" for line in [*lines[:20], *HOSTILE]]
    ids = table.encode(tf.constant(texts))
    assert ids.to_list() == [vocab.encode([text]).tolist() for text in texts]
    decoded = table.decode(ids.to_tensor(), tf.cast(ids.row_lengths(), tf.int32) - 1)
    assert [text.decode() for text in decoded.numpy()] == [text[:-1] for text in texts]


@pytest.mark.slow
def test_a_run_trains_opens_translates_and_is_served(path, tmp_path):
    train_run(
        str(tmp_path / "run"),
        data=PairsConfig(train_path=path, **both(vocab_size=300)),
        model=TransformerConfig(num_layers=1, d_model=16, num_heads=2, dff=16, max_len=60, norm_first=True),
        optimizer=OptimizerConfig(),
        training=PairsTrainingConfig(train_steps=2, iterations=2, save_steps=2, batch_size=16, eval_sources=5),
    )
    assert {"source_vocab.model", "target_vocab.model"} <= {file.name for file in (tmp_path / "run").iterdir()}
    model, vocabs = txl_tf.load_run(tmp_path / "run")
    model.final_layer.bias.assign(np.where(np.arange(300) == END_ID, 2.0, 0.0))  # it learned nothing yet
    pipe = txl_tf.pipeline(tmp_path / "run")
    pipe.model.set_weights(model.get_weights())
    found = pipe(["the red cat", "猫 </s> ☃"])
    assert all("\n" not in text for text, _ in found)
    if importlib.util.find_spec("tensorflow_text") is None:
        return
    from txl_tf.serving.subwords import SubwordTokenizer

    tables = {}
    for name, vocab in zip(("source", "target"), vocabs, strict=True):
        vocab.save(tmp_path / f"{name}.model")
        tables[name] = SubwordTokenizer(vocab, str(tmp_path / f"{name}.model"))
    served = txl_tf.serving.translation.TranslationSignatures(model, tables)
    texts = served.translate_text(tf.constant(["the red cat", "猫 </s> ☃"]))["text"].numpy()[:, 0]
    assert [text.decode() for text in texts] == [text for text, _ in found]
