"""Errors keep their fields wherever they are raised: in a layer, in a graph that AutoGraph converted, in a pickle."""

import pickle

import keras
import pytest
import tensorflow as tf
from helpers import SMALL, write_text

import txl_tf
from txl_config.cluster import cluster_address
from txl_tf import layers
from txl_tf.config import ClusterConfig, ModelConfig, PairsConfig, TaggedConfig, TextConfig
from txl_tf.convert.corpus_files import read_corpus
from txl_tf.convert.original import find_tf1_checkpoint, run_to_tf1, tf1_to_run
from txl_tf.convert.pytorch_source import open_source
from txl_tf.convert.torch_file import read_torch_file
from txl_tf.data.lines import LineError
from txl_tf.data.pairs.parallel import read_pairs
from txl_tf.data.tagged.lexicon import Lexicon
from txl_tf.data.tagged.sentences import read_corpus as read_tagged_corpus
from txl_tf.data.tagged.tags import detect_scheme
from txl_tf.data.tagged.word_vectors import read_vectors
from txl_tf.data.text.corpus import build_corpus, load_corpus
from txl_tf.data.text.download import fetch
from txl_tf.data.vocabulary import Vocab
from txl_tf.errors import FixedAttributeError, ParameterError, brief, located, shortened
from txl_tf.files import check_writable, read_json, sha256, write_atomic
from txl_tf.runs.checkpoints import average_checkpoints
from txl_tf.runs.metrics import check_tokenizer
from txl_tf.training.distribution import make_strategy


def test_the_default_message_names_argument_allowed_values_and_value():
    error = ParameterError("n_layer", 0, "at least 1")
    assert str(error) == "n_layer must be at least 1, got 0"
    assert str(ParameterError("pos_embed", "x", ["sin", "learned"])) == "pos_embed must be one of sin, learned, got 'x'"


@pytest.mark.parametrize("kind", [ParameterError, FixedAttributeError])
def test_a_pickled_error_keeps_its_fields(kind):
    error = pickle.loads(pickle.dumps(kind("n_layer", 0, "at least 1", "text")))
    assert (type(error), error.name, error.value, error.allowed, str(error)) == (
        kind,
        "n_layer",
        0,
        "at least 1",
        "text",
    )


def test_a_fixed_attribute_is_an_attribute_error_and_a_value_error():
    with pytest.raises(AttributeError):
        raise FixedAttributeError("rate", 0.5, "set in the constructor")
    assert issubclass(FixedAttributeError, ValueError)


def layer_call():
    layers.EncoderLayer(8, 2, 16)(tf.zeros([2, 3, 7]))


def functional_call():
    layers.EncoderLayer(8, 2, 16)(keras.Input([3, 7]))


def converted_graph():
    layer = layers.EncoderLayer(8, 2, 16)
    layer.build((None, None, 8))
    tf.function(lambda x: layer(x))(tf.zeros([2, 3, 7]))


@pytest.mark.parametrize("call", [layer_call, functional_call, converted_graph])
def test_an_error_in_a_layer_keeps_its_type_and_fields(call):
    with pytest.raises(txl_tf.ParameterError) as caught:
        call()
    assert caught.value.name == "x" and "7" in str(caught.value) and "d_model=8" in caught.value.allowed


@pytest.mark.parametrize("size", [0, True, 2.5, "2"])
def test_sizes_are_positive_integers(size):
    with pytest.raises(txl_tf.ParameterError) as caught:
        layers.Embeddings(vocab=size, d_model=8)
    assert caught.value.name == "vocab" and caught.value.value is size


def test_a_message_has_at_most_500_characters_and_the_fields_are_whole():
    value, names = "x" * 10**6, [f"name{i}" for i in range(10**4)]
    for error in (ParameterError("name", value, names), ParameterError(value, 1, "small", f"{value} The way out.")):
        assert len(str(error)) <= 500 and str(pickle.loads(pickle.dumps(error))) == str(error)
    assert str(error).startswith("xxx") and str(error).endswith("The way out.")
    assert (error.name, ParameterError("name", value, names).value, error.allowed) == (value, value, "small")
    assert len(str(LineError("line", 3, ValueError(value), value))) <= 500


@pytest.mark.parametrize("kind", range(4))
def test_brief_is_brief(kind):
    value = ("x" * 10**5, [["x" * 100] * 9] * 9, {i: "x" * 99 for i in range(99)}, 10**9999)[kind]
    assert len(brief(value)) <= 200


@pytest.mark.parametrize("most", [0, 1, 10, 60, 61, 500, 999, 1000])
def test_shortened_keeps_the_beginning_and_the_end(most):
    text = "a" * 500 + "b" * 500
    found = shortened(text, most)
    assert len(found) <= most and (found == text) == (most == 1000)
    assert most < 100 or (found.startswith("aaa") and found.endswith("bbb"))


LONG = "x" * 100_000
CALLS = {  # of the library, each with a value without end
    "data_path": lambda: build_corpus("text", LONG),
    "data_path, a list": lambda: build_corpus("text", [LONG, LONG]),
    "a pattern": lambda: build_corpus("text", f"{LONG}*"),
    "a path of many": lambda: build_corpus("text", ",".join(["x"] * 10_000)),
    "vocab_path": lambda: build_corpus("text", __file__, vocab_path=LONG),
    "cutoffs": lambda: build_corpus("text", __file__, cutoffs=list(range(1, 50_000))),
    "a folder of a paper's data": lambda: build_corpus("ptb", LONG),
    "data_dir": lambda: load_corpus(LONG),
    "prepare's data_dir": lambda: txl_tf.prepare(data_dir=LONG, data_path=__file__),
    "dataset": lambda: txl_tf.prepare(data_dir="here", dataset=LONG),
    "texts": lambda: txl_tf.prepare([LONG, 1], data_dir=None),
    "model_dir": lambda: txl_tf.load_run(LONG),
    "pipeline": lambda: txl_tf.pipeline(LONG),
    "a checkpoint": lambda: txl_tf.load_tf1_checkpoint(None, LONG),
    "run_to_tf1": lambda: run_to_tf1(LONG, LONG),
    "tf1_to_run": lambda: tf1_to_run(LONG, LONG, LONG, mem_len=1),
    "model_arguments": lambda: find_tf1_checkpoint(LONG),
    "pytorch_to_run": lambda: open_source(LONG),
    "a corpus": lambda: read_corpus(LONG),
    "a corpus of a dataset": lambda: read_corpus(f"{LONG}/vocab.txt", "ptb"),
    "a file of torch": lambda: read_torch_file(LONG),
    "average": lambda: average_checkpoints(LONG, LONG, [LONG]),
    "averaged checkpoints": lambda: average_checkpoints(LONG, LONG, ["", LONG]),
    "pairs": lambda: read_pairs(PairsConfig(train_path=LONG)),
    "pairs of two files": lambda: read_pairs(PairsConfig(train_path=f"{LONG},{LONG}")),
    "symbols of pairs": lambda: PairsConfig(source_symbols=LONG, share_vocab=True, train_path="a"),
    "tagged": lambda: read_tagged_corpus(TaggedConfig(train_path=LONG)),
    "a vocabulary": lambda: Vocab.load(LONG),
    "eos": lambda: Vocab(eos=LONG).build(),
    "a lexicon": lambda: txl_tf.Lexicon.load(LONG),
    "labels": lambda: txl_tf.allowed_transitions([LONG, "B-x"]),
    "tags": lambda: detect_scheme([LONG, "B-x"]),
    "a strategy": lambda: make_strategy(LONG),
    "a TPU": lambda: make_strategy("tpu", f"grpc://{LONG}"),
    "a TPU's zone": lambda: make_strategy("one", tpu_zone=LONG),
    "ray_address": lambda: ClusterConfig(ray_address=LONG),
    "a TPU that does not answer": lambda: make_strategy("tpu", f"grpc://{LONG}:1"),
    "preparation's address": lambda: cluster_address("ray_address", LONG),
    "a flag of a choice": lambda: TextConfig(level=LONG),
    "a unit": lambda: txl_tf.make_optimizer(learning_rate=LONG, train_steps=1),
    "a model": lambda: ModelConfig(**{**SMALL, "n_token": LONG}),
    "cutoffs of a model": lambda: txl_tf.TransformerXLLM(**SMALL, mem_len=1, cutoffs=list(range(1, 5_000))),
    "a tokenizer": lambda: check_tokenizer(LONG),
    "a dataset to download": lambda: fetch(LONG, "here", None),
    "a new file": lambda: write_atomic(LONG, "text"),
    "a lock": lambda: check_writable(LONG),
    "a file to read": lambda: sha256(LONG),
}


@pytest.mark.parametrize("call", CALLS)
def test_no_error_of_the_library_is_long(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ValueError, OSError)) as caught:
        CALLS[call]()
    assert 0 < len(str(caught.value)) <= 500, str(caught.value)[:300]


def test_a_malformed_environment_is_one_short_error(monkeypatch):
    for text in (LONG, '{"cluster": {"worker": ["' + LONG + '"]}, "task": {"type": "worker", "index": 0}}'):
        monkeypatch.setenv("TF_CONFIG", text)
        with pytest.raises(ValueError) as caught:
            make_strategy("multi_worker")
        assert len(str(caught.value)) <= 500


# Calls with the path of a file that has the content, and how the message begins; `{}` is the path.
FILE_MESSAGES = [
    (
        b"ab\xff",
        lambda path: build_corpus("text", path),
        "{} is not UTF-8 text: see byte 2, line 1. level='byte' reads any file",
    ),
    (b"", lambda path: build_corpus("text", path), "{} is empty"),
    ("{", lambda path: read_json(path, print), "{} is not JSON: "),
    ("[]", lambda path: read_json(path, print), "{} must hold a JSON object, got list"),
    (
        '{"checksum": "0"}',
        lambda path: read_json(path, lambda values: None),
        '{} was changed or damaged: its checksum differs. If you changed it on purpose, remove the line "checksum"; ',
    ),
    (
        '{"body": "a"}',
        lambda path: build_corpus("text", path),
        "{}, line 1 has no field 'text'; it has 'body'. text_field names the field of the text",
    ),
    (
        '{"text": ""}\n{"text": "a"}',
        lambda path: build_corpus("text", path),
        "{}, line 1, field 'text', is empty: leave the document out, as skip_bad_lines does",
    ),
    ("a\n\n", Vocab.load, "vocabulary file {}: line 2 is empty"),
    ("a\nb\na\n", Vocab.load, "vocabulary file {}: 'a' is on line 1 and on line 3"),
    (
        "a",
        lambda path: read_pairs(PairsConfig(train_path=path)),
        "{}, line 1 must be source<TAB>target, got 0 tabs; skip_bad_lines leaves such lines out",
    ),
    (
        "\tb",
        lambda path: read_pairs(PairsConfig(train_path=path, valid_path=path)),
        "{}, line 1: the source is empty; skip_bad_lines leaves such lines out",
    ),
    (
        "a X-B",
        lambda path: read_tagged_corpus(TaggedConfig(train_path=path)),
        "{}, line 1: a tag must be O, or one of B, I, M, E, S with a kind or alone, or L or U of BILOU, as B-PER, got ",
    ),
    ("a 1 2\nb 1", lambda path: read_vectors(path, {"b"}), "{}, line 2 must have a word and 2 numbers, got 1: 'b 1'"),
    (
        "桥",
        Lexicon.load,
        "{}, line 1: a word must have two characters or more, got '桥'; --skip_short_words leaves out shorter ones",
    ),
]


@pytest.mark.parametrize("content, call, message", FILE_MESSAGES, ids=[message for *_, message in FILE_MESSAGES])
def test_the_message_of_each_kind_of_mistake_in_a_file(tmp_path, content, call, message):
    path = write_text(tmp_path / "file.jsonl" if '"' in str(content) else tmp_path / "file", content)
    with pytest.raises(ParameterError) as raised:
        call(path)
    assert str(raised.value).startswith(message.format(path))


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda: Vocab().encode("a x"),
            "text, line 1: 'a' is not in the vocabulary of 0 symbols, which has no symbol for unknown ones (unk=None)",
        ),
        (lambda: Vocab().decode([3]), "ids must be in [0, 0), the size of the vocabulary, got 3"),
        (
            lambda: txl_tf.segments([1, 2, 3], 4, 2),
            "the text has 3 tokens: batch_size=4 and tgt_len=2 need at least 8, 2 a row",
        ),
        (
            lambda: build_corpus("wt2", "folder", min_freq=2),
            "min_freq is for your own text, got 2: dataset 'wt2' has the original's tokens; dataset 'text' with "
            "data_path reads its files like any others",
        ),
        (
            lambda: detect_scheme(["I-A", "M-A"]),
            "no scheme has both 'I-A' and 'M-A'",
        ),
        (
            lambda: txl_tf.prepare("text", data_dir="folder"),
            "texts must be an iterable of texts, got one str: put it in a list",
        ),
        (lambda: fetch("wt2", "gs://bucket"), "download needs a local data_dir, got gs://bucket"),
    ],
)
def test_the_message_of_each_kind_of_wrong_argument(call, message):
    with pytest.raises(ParameterError) as raised:
        call()
    assert str(raised.value) == message


def test_an_error_with_a_place_in_front_keeps_its_fields():
    error = located(ParameterError("n_layer", 0, "at least 1"), "config.json")
    assert (error.name, error.value, error.allowed) == ("n_layer", 0, "at least 1")
    assert str(error) == "config.json: n_layer must be at least 1, got 0"
    assert located(ValueError("wrong"), "config.json").name == "config.json"
