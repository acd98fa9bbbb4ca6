"""A tokenizer.json of Hugging Face as a vocabulary: its tokens, and all that a run does with them."""

import json

import numpy as np
import pytest
from helpers import TEXT, program, raises_parameter, run_here, train_run

import txl_tf
from txl_tf.data.hf_tokenizer import TokenizerProcessor, byte_of_character
from txl_tf.data.subwords import SubwordVocab, load_vocab
from txl_tf.data.text.corpus import load_corpus, prepare_ids
from txl_tf.language.text_generator import TextStream
from txl_tf.serving.export import local_signatures

pytestmark = pytest.mark.ci

WORDS = ["The cat sat on the mat, and so on.\n" * 5, "naïve café 诗 hello\n\n  world foo_bar 12345\t x"] * 20
SENTENCE = "The cat naïve 诗\n\n  world"
SHORT = {"training": {"train_steps": 3, "save_steps": 3}, "evaluation": {"max_eval_batch": 3}}


@pytest.fixture(scope="module")
def tokenizers():
    return pytest.importorskip("tokenizers", reason="a tokenizer.json needs tokenizers: pip install tokenizers")


def bytes_bpe(tokenizers, **changes):
    """As GPT-2's: bytes, and a special token that ends documents."""
    from tokenizers import decoders, models, pre_tokenizers, trainers

    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options = {"special_tokens": ["<|endoftext|>"], "initial_alphabet": alphabet, "show_progress": False}
    made.train_from_iterator(WORDS, trainers.BpeTrainer(vocab_size=300, **options))
    return made


def unigram(tokenizers):
    from tokenizers import decoders, models, pre_tokenizers, trainers

    made = tokenizers.Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    options = {"special_tokens": ["<unk>", "</s>"], "unk_token": "<unk>", "show_progress": False}
    made.train_from_iterator(WORDS, trainers.UnigramTrainer(vocab_size=60, **options))
    return made


def wordpiece(tokenizers):
    from tokenizers import decoders, models, pre_tokenizers, trainers

    made = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.decoder = decoders.WordPiece(cleanup=False)
    options = {"special_tokens": ["[UNK]", "[SEP]"], "show_progress": False}
    made.train_from_iterator(WORDS, trainers.WordPieceTrainer(vocab_size=100, **options))
    return made


def saved(made, folder):
    path = folder / "tokenizer.json"
    path.write_text(made.to_str())
    return str(path)


@pytest.mark.parametrize("make", [bytes_bpe, unigram, wordpiece])
def test_ids_and_text_are_those_of_the_package(tokenizers, tmp_path, make):
    made = make(tokenizers)
    made.enable_truncation(2)  # would change a text
    vocab = load_vocab(saved(made, tmp_path), level="subword")
    made.no_truncation()
    ids = vocab.encode(SENTENCE)
    assert ids.tolist() == made.encode(SENTENCE, add_special_tokens=False).ids
    assert vocab.decode(ids) == made.decode(ids.tolist())
    assert vocab.symbols == [made.id_to_token(i) for i in range(made.get_vocab_size())]
    vocab.save(tmp_path / "vocab.model")
    again = SubwordVocab.load(tmp_path / "vocab.model", **vocab.get_config())
    assert again.fingerprint() == vocab.fingerprint() and again.encode(SENTENCE).tolist() == ids.tolist()
    assert vocab.is_tokenizer and vocab.count(SENTENCE) == len(ids)


def test_bytes_of_every_text_come_back(tokenizers, tmp_path):
    vocab = load_vocab(saved(bytes_bpe(tokenizers), tmp_path), level="subword")
    rng = np.random.default_rng(0)
    for _ in range(20):
        text = "".join(map(chr, rng.choice([*range(1, 0x250), 0x4E00, 0x1F600, 9, 10], 30)))
        ids = vocab.encode(text)
        assert vocab.decode(ids) == text
        stream = TextStream(vocab)
        assert "".join(stream.push([i]) for i in ids) + stream.end() == text
        before, after = vocab.split(text, ids, 5)
        assert before + after == text.encode()
    assert sorted(byte_of_character().values()) == list(range(256))


@pytest.mark.parametrize("make, end", [(bytes_bpe, "<|endoftext|>"), (wordpiece, "[SEP]")])
def test_no_text_contains_the_end_of_documents(tokenizers, tmp_path, make, end):
    path = saved(make(tokenizers), tmp_path)
    vocab = load_vocab(path, level="subword", document="</s>")
    assert vocab.document == end
    with raises_parameter("my.txt, line 3", end):
        vocab.encode(f"the cat\n\nthe {end} cat\n", name="my.txt")
    with raises_parameter("text 2, line 1", end):
        txl_tf.prepare(["the cat", f"the {end} cat"] * 50, tmp_path / "data", level="subword", vocab_path=path)
    assert load_vocab(path, level="subword").encode(f"the {end}").tolist()[-1] == vocab.document_id  # no documents


def test_wrong_files_are_named(tokenizers, tmp_path):
    from tokenizers import models, pre_tokenizers

    lossy = tokenizers.Tokenizer(models.BPE())
    lossy.pre_tokenizer = pre_tokenizers.Whitespace()
    lossy.train_from_iterator(WORDS)
    gap = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 5}, unk_token="a"))
    for name, text in {"lossy": lossy.to_str(), "empty": "{}", "no json": "{", "gap": gap.to_str()}.items():
        with raises_parameter(name):
            TokenizerProcessor(text.encode(), name)


def test_a_run_with_documents(tokenizers, tmp_path, eager):
    """Training, generation and scores; what ends a document is the tokenizer's own token."""
    path = saved(bytes_bpe(tokenizers), tmp_path)
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in TEXT.splitlines()))
    data = {"dataset": "text", "data_path": str(tmp_path / "text.jsonl"), "level": "subword", "vocab_path": path}
    train_run(tmp_path / "run", None, data=data, **SHORT)
    lm, vocab = txl_tf.load_run(tmp_path / "run")
    assert vocab.document == "<|endoftext|>" and vocab.is_tokenizer and len(vocab) == lm.network.n_token
    pipe = txl_tf.pipeline(tmp_path / "run")
    (text,) = pipe.generate_text(["The cat"], max_new_tokens=8, seed=1)
    assert isinstance(text, str)
    (score,) = pipe.score_lines(["the cat sat"])
    ids = vocab.encode("the cat sat")
    assert score.ids.tolist()[: len(ids)] == ids.tolist() and score.nll > 0
    assert not {"score_text", "generate_text"} & local_signatures(lm, vocab).signatures().keys()  # ids alone
    for tool in program("tools/score.py"):
        (tmp_path / "lines.txt").write_text("the cat\n")
        options = [f"--input={tmp_path / 'lines.txt'}", f"--output={tmp_path / 'scores.txt'}"]
        assert not run_here(tool, f"--model_dir={tmp_path / 'run'}", *options)
    assert float((tmp_path / "scores.txt").read_text().split()[0]) > 0


# ---------------------------------------------------------------------------------------------------------- own ids


def test_own_ids_become_a_run(tmp_path, eager):
    ids = np.tile(np.arange(7), 200)
    corpus = prepare_ids({"train": ids, "valid": iter([ids[:100], ids[:50]])}, tmp_path / "data", n_token=9)
    assert corpus.vocab.symbols == [str(i) for i in range(9)]
    found = load_corpus(tmp_path / "data")
    np.testing.assert_array_equal(found.splits["train"], ids)
    assert len(found.splits["valid"]) == 150
    listed = prepare_ids({"train": ids.tolist(), "valid": [ids[:100], ids[:50]]}, tmp_path / "listed")
    for split in ("train", "valid"):
        np.testing.assert_array_equal(listed.splits[split], found.splits[split])
    train_run(tmp_path / "run", None, data={"data_dir": str(tmp_path / "data")}, **SHORT)
    lm, vocab = txl_tf.load_run(tmp_path / "run")
    assert lm.network.n_token == 9
    (text,) = txl_tf.pipeline(tmp_path / "run").generate_text(["5 6 0"], max_new_tokens=4, temperature=0.0)
    assert all(number in vocab.ids for number in text.split()) and len(text.split()) == 4


def test_wrong_ids_are_named(tmp_path):
    good = np.arange(5)
    for name, arguments in {
        "ids": ({"valid": good},), "n_token": ({"train": good}, None, 3), "data_dir": ({"train": good},),
    }.items():  # fmt: skip
        if name == "data_dir":
            prepare_ids({"train": good}, tmp_path / "data")
        with raises_parameter(name):
            ids, vocab, n_token = (*arguments, None, None)[:3]
            prepare_ids(ids, tmp_path / "data", vocab, n_token=n_token)
    with raises_parameter("n_token", 7.0):
        prepare_ids({"train": good}, tmp_path / "other", n_token=7.0)
    with raises_parameter("shard_tokens", 2.0):
        prepare_ids({"train": good}, tmp_path / "other", shard_tokens=2.0)
    with raises_parameter("vocab", "vocab.txt"):
        prepare_ids({"train": good}, tmp_path / "other", "vocab.txt")
    wrong_arrays = good.astype(float), good[None], good - 1, good[:1], good[:0], np.array([2**31])
    for wrong in (3, "1 2", [0.5, 1.0], ["a", "b"], *wrong_arrays):
        with raises_parameter("ids"):
            prepare_ids({"train": wrong}, tmp_path / "other")
    assert not (tmp_path / "other" / "corpus-info.json").exists()
