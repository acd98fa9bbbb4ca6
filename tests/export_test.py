"""An exported model gives the numbers of the one it was made of, without this library, wherever SavedModels run."""

import contextlib
import importlib.util
import inspect
import io
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    ROOT,
    SMALL,
    Subwords,
    eagerly,
    mentions,
    program,
    raises_naming,
    raises_parameter,
    randomise,
    run_program,
    word_vocab,
)
from tensorflow.core.protobuf import saved_model_pb2

import txl_tf
from txl_tf.config import NetworkConfig
from txl_tf.data.vocabulary import Vocab
from txl_tf.language.generation import Texts, generate
from txl_tf.language.stopping import spell
from txl_tf.runs.folder import RunFolder
from txl_tf.runs.scoring import score_lines
from txl_tf.serving import language_model
from txl_tf.serving import request as request_module
from txl_tf.serving.export import export_saved_model, write_warmup
from txl_tf.serving.language_model import LanguageModelSignatures, limits_of
from txl_tf.serving.signatures import served_model
from txl_tf.serving.subwords import SubwordTokenizer
from txl_tf.serving.tables import GraphTokenizer

pytestmark = pytest.mark.ci

SEGMENTS = [(0, 6), (6, 7), (7, 14)]  # of the 14 tokens that are read: longer, shorter than the memory of 4, and one
TEXTS = ["w3 w5\nw1 unheard-of", "", "w7"]
SAMPLING = {
    "max_new_tokens": np.array([5, 9, 0], np.int32),
    "temperature": np.array([1, 0.8, 0], np.float32),
    "top_k": np.array([0, 12, 3], np.int32),
    "top_p": np.array([1, 0.9, 0.5], np.float32),
    "seed": np.array([3, 4, 5], np.int32),
}
# What a request to a server may leave out; in Python, a signature wants everything.
PLAIN = {
    "max_new_tokens": np.int32([64]),
    "temperature": np.float32([1]),
    "top_k": np.int32([0]),
    "top_p": np.float32([1]),
    "seed": np.int32([0]),
}
NEUTRAL = {
    "min_p": np.float32([0]),
    "repetition_penalty": np.float32([1]),
    "repetition_window": np.int32([64]),
}
ONE = {"num_return_sequences": np.int32([1])}
NO_IDS, NO_TEXT = {"stop_ids": np.zeros([1, 0, 0], np.int32)}, {"stop": np.array([[""]], object)}
GENERATE, GENERATE_TEXT = {**SAMPLING, **NEUTRAL, **ONE, **NO_IDS}, {**SAMPLING, **NEUTRAL, **NO_TEXT}

VECTOR = np.float32([0.5, 0.5, 0.5])

# What a program that has no txl_tf does with the folder of a SavedModel.
STRANGER = """
import sys
sys.modules["txl_tf"] = None
try:
    import txl_tf
except ImportError:
    pass
else:
    raise AssertionError("txl_tf can be imported")
import concurrent.futures
import numpy as np
import tensorflow as tf
from tensorflow.python.tools import saved_model_cli

directory, folder = sys.argv[1:]
given = dict(np.load(f"{folder}/given.npz"))
sampling = {name: given[name] for name in "max_new_tokens temperature top_k top_p seed".split()}
neutral = {"min_p": np.float32([0]), "repetition_penalty": np.float32([1]), "repetition_window": np.int32([64])}
ids = neutral | {"num_return_sequences": np.int32([1]), "stop_ids": np.zeros([1, 0, 0], np.int32)}
texts = neutral | {"stop": np.array([[b""]], object)}

def answers(run, ids={}, texts={}):
    found, state = {}, run("initial_state", batch_size=np.int32(3))["state"]
    for i, (start, end) in enumerate(given["segments"]):
        tokens, labels = given["text"][:, start:end], given["text"][:, start + 1 : end + 1]
        found |= {f"{name}_{i}": value for name, value in run("next", tokens=tokens, state=state).items()}
        scored = run("score", tokens=tokens, labels=labels, state=state)
        found |= {f"nll_{i}": scored["nll"], f"scored_state_{i}": scored["state"]}
        state = scored["state"]
    written = run("generate", tokens=given["text"][:, :6], lengths=given["lengths"], **sampling, **ids)
    found |= {"written": written["tokens"], "written_lengths": written["lengths"]}
    found |= run("score_text", text=given["texts"])
    return found | run("generate_text", text=given["texts"], **sampling, **texts)

signatures = tf.saved_model.load(directory).signatures

def run_loaded(signature, **inputs):
    outputs = signatures[signature](**{name: tf.constant(value) for name, value in inputs.items()})
    return {name: output.numpy() for name, output in outputs.items()}

def save(name, found):
    np.savez(f"{folder}/{name}.npz", **{key: value.astype("S") if value.dtype == object else value
                                        for key, value in found.items()})

save("loaded", answers(run_loaded, ids, texts))

def request(i):
    row = slice(i % 3, i % 3 + 1)
    options = {name: value[row] for name, value in sampling.items()} | ids
    written = run_loaded("generate", tokens=given["text"][row, : 3 + i], lengths=np.array([3 + i], np.int32), **options)
    state = run_loaded("initial_state", batch_size=np.int32(1))["state"]
    tokens = given["text"][row, i : i + 2]
    return written["tokens"].tolist(), run_loaded("score", tokens=tokens, labels=tokens, state=state)["nll"].tolist()

with concurrent.futures.ThreadPoolExecutor(8) as threads:
    together = list(threads.map(request, list(range(8)) * 3))
assert together == [request(i) for i in range(8)] * 3

with tf.compat.v1.Session(graph=tf.Graph()) as session:
    served = tf.compat.v1.saved_model.load(session, ["serve"], directory).signature_def

    def run_in_session(signature, **inputs):
        inputs = {served[signature].inputs[name].name: value for name, value in inputs.items()}
        return session.run({name: info.name for name, info in served[signature].outputs.items()}, inputs)

    save("session", answers(run_in_session))  # which has default values, as a server has

arrays = {"tokens": given["text"][:, :6], "labels": given["text"][:, 1:7], "state": np.zeros(given["shape"], "f")}
for name, array in arrays.items():
    np.save(f"{folder}/{name}.npy", array)
sys.argv[1:] = [
    "run", f"--dir={directory}", "--tag_set=serve", "--signature_def=score", f"--outdir={folder}/cli",
    "--inputs=" + ";".join(f"{name}={folder}/{name}.npy" for name in arrays),
]
saved_model_cli.main()
"""


def exporting(patch, *names):
    """Exports of a language model have these signatures alone, as each takes seconds; returns where all are kept."""
    every, kept = LanguageModelSignatures.signatures, {}

    def signatures(self):
        kept.update(every(self))
        return {name: kept[name] for name in names}

    patch.setattr(LanguageModelSignatures, "signatures", signatures)
    return kept


class Exported:
    """Version 1 as the program writes it: the whole of a model, or of a smaller one the signatures `PART`.

    Attributes:
        path: its folder.
        names: of all signatures that a whole one has, but of the whole one itself.
        traced: functions of those signatures of a smaller one that were not saved, and of `initial_state`.
    """

    def __init__(self, whole, lm, vocab, folder):
        self.whole, self.path, self.names, self.traced = whole, folder / "my" / "1", set(), {}
        model = {name: lm.get_config()[name] for name in NetworkConfig.names()}
        RunFolder(folder / "run").create({"dataset": "text"}, model, [vocab], lm, step=1)
        flags = [f"--model_dir={folder / 'run'}", f"--output={folder / 'my'}", "--top_n=4"]
        flags += ["--max_tokens=100", "--max_rows=64"]
        if whole:
            result = run_program("tools/export_saved_model.py", *flags)
            written, errors = result.stdout, result.stderr
        else:
            written, errors = self.in_this_process([*flags, "--nowarmup"]), ""
        assert written == f"{self.path}\n", errors

    def in_this_process(self, flags):
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
            every = exporting(patch, *PART)
            for tool in program("tools/export_saved_model.py"):
                tool.FLAGS(["export_saved_model.py", *flags])
                tool.main()
        self.names = set(every)
        self.traced = {name: function for name, function in every.items() if name not in PART[1:]}
        return out.getvalue()


PART = ("initial_state", "next", "generate", "score_text")


@pytest.fixture(scope="module", params=["part", pytest.param("whole", marks=pytest.mark.slow)])
def whole(request):
    """Whether all is exported."""
    return request.param == "whole"


@pytest.fixture(scope="module")
def vocab():
    return word_vocab()


@pytest.fixture(scope="module")
def lm(whole):
    sizes = {**SMALL, "n_layer": 2 if whole else 1}
    lm = txl_tf.TransformerXLLM(**sizes, mem_len=4, dropout=0.0, cutoffs=[5, 12], div_val=2)
    randomise(lm)
    return lm


@pytest.fixture(scope="module")
def text():
    return np.random.default_rng(0).integers(0, SMALL["n_token"], [3, 15]).astype(np.int32)


@pytest.fixture(scope="module")
def made(whole, lm, vocab, tmp_path_factory):
    return Exported(whole, lm, vocab, tmp_path_factory.mktemp("export"))


@pytest.fixture(scope="module")
def exported(made):
    """The folder."""
    return made.path


@pytest.fixture(scope="module")
def loaded(exported):
    return tf.saved_model.load(str(exported))


@pytest.fixture(scope="module")
def signatures(made, loaded):
    """Functions of all signatures: loaded, or, of those that were not exported, traced when they are asked for."""

    class Functions(dict):
        def __missing__(self, name):
            self[name] = made.traced[name].get_concrete_function()
            return self[name]

    return Functions(loaded.signatures)


def empty_state(lm, rows):
    return np.zeros([rows, lm.network.n_layer, 2, 2, 4, 3], np.float32)


@pytest.fixture
def request_of(signatures, lm, text):
    """Sends a good request, but for the arguments given."""

    def send(signature, **changes):
        state = empty_state(lm, 3)
        good = {
            "initial_state": {"batch_size": np.int32(3)},
            "score": {"tokens": text[:, :6], "labels": text[:, 1:7], "state": state},
            "next": {"tokens": text[:, :6], "state": state},
            "generate": {"tokens": text[:, :6], "lengths": np.array([6, 2, 3], np.int32), **GENERATE},
            "score_text": {"text": np.array(TEXTS, object)},
            "score_lines": {"text": np.array(TEXTS, object)},
            "generate_text": {"text": np.array(TEXTS, object), **GENERATE_TEXT},
            "generate_texts": {"text": np.array(TEXTS, object), **GENERATE_TEXT, **ONE},
        }[signature]
        outputs = signatures[signature](**{name: tf.constant(x) for name, x in {**good, **changes}.items()})
        return {name: output.numpy() for name, output in outputs.items()}

    return send


def expected(lm, vocab, text):
    """What every way to serve must answer."""
    found, mems = {}, None
    for i, (start, end) in enumerate(SEGMENTS):
        log_probs, _ = lm.log_probs(text[:, start:end], mems)
        top = tf.math.top_k(log_probs[:, -1], 4)
        nll, mems = lm.score(text[:, start:end], text[:, start + 1 : end + 1], mems)
        found |= {f"log_probs_{i}": top.values, f"ids_{i}": top.indices, f"nll_{i}": nll}

    options = [{name: values[row] for name, values in SAMPLING.items()} for row in range(3)]
    options = [{**option, "top_k": option["top_k"] or None} for option in options]
    rows = [generate(lm, text[row : row + 1, :n], **options[row])[0] for row, n in enumerate([6, 2, 3])]
    found["written"] = [np.pad(row, [0, 15 - len(row)]) for row in rows]
    found["written_lengths"] = [11, 11, 3]

    prompts = [vocab.encode(line) for line in TEXTS]
    prompts[1] = np.array([vocab.ids["<eos>"]])
    rows = [generate(lm, prompt[None], **option)[0] for prompt, option in zip(prompts, options, strict=True)]
    found["text"] = [vocab.decode(rows[0]), vocab.decode(rows[1][1:]), vocab.decode(rows[2])]
    found["lengths"] = [5, 0, 1]
    found["nll"] = np.zeros([3, 5])
    found["nll"][0, 1:] = lm.score(prompts[0][None, :-1], prompts[0][None, 1:])[0]
    found["symbols"] = [["w3", "w5", "<eos>", "w1", "<unk>"], [""] * 5, ["w7", "", "", "", ""]]
    return found


def test_a_request_to_a_server_may_leave_out_what_has_a_default(exported, whole):
    """The signature's own table, which servers take values from; a TF 1 session takes them from the graph."""
    model = saved_model_pb2.SavedModel.FromString((exported / "saved_model.pb").read_bytes())
    signatures = model.meta_graphs[0].signature_def
    neutral = {**PLAIN, **NEUTRAL}
    expected = {"generate": {**neutral, **ONE, **NO_IDS}, "generate_text": {**neutral, **NO_TEXT}}
    expected["generate_texts"] = {**expected["generate_text"], **ONE}
    assert signatures.keys() >= (WARMUP.keys() if whole else {*PART})
    for name, signature in signatures.items():
        found = {key: tf.make_ndarray(value) for key, value in signature.defaults.items()}
        assert found.keys() == expected.get(name, {}).keys()
        for key, value in found.items():
            assert value.dtype == expected[name][key].dtype and value.shape == expected[name][key].shape
            assert np.all(value == (b"" if key == "stop" else expected[name][key]))


@pytest.mark.slow
def test_the_functions_of_a_loaded_model_have_these_defaults(loaded, request_of, text, whole):
    """And take lists, as its signatures do not."""
    tokens, lengths = text[:, :6], [6, 2, 3]
    plain = {name: np.resize(values, 3) for name, values in PLAIN.items()}
    for given in ({}, {"max_new_tokens": [5, 9, 0], "seed": [3, 4, 5], "top_k": [3], "temperature": [2]}):
        written = loaded.generate(tokens.tolist(), lengths, **given)
        types = {name: np.resize(np.array(value, PLAIN[name].dtype), 3) for name, value in given.items()}
        for key, value in request_of("generate", **{**plain, **types}).items():
            np.testing.assert_array_equal(written[key], value, err_msg=key)
    state = loaded.initial_state(3)["state"]
    np.testing.assert_array_equal(loaded.next(tokens, state)["ids"], request_of("next")["ids"])
    np.testing.assert_array_equal(loaded.score_text(TEXTS)["nll"], request_of("score_text")["nll"])
    with raises_naming(TypeError, "lengths"):
        loaded.generate(tokens)
    if whole:
        given = {"text": np.array(TEXTS, object), "stop": np.array([["w3", "\n"]], object)}
        sent = request_of("generate_text", **given, **{**plain, "seed": np.int32([7] * 3)})["text"]
        assert loaded.generate_text(TEXTS, seed=[7], stop=[["w3", "\n"]])["text"].numpy().tolist() == sent.tolist()


@pytest.mark.slow
def test_what_signatures_have_in_common_is_one_graph(small_lm, tmp_path, monkeypatch):
    made = []

    def write(lm, start_token, tokens, lengths, options, stops):
        made.append(lm)
        return Texts(tokens[:, None], lengths[:, None], lengths[:, None])

    monkeypatch.setattr(language_model, "generate_sequences", write)
    _, tokenizer = write_vocab(tmp_path, [], level="byte")
    served = LanguageModelSignatures(small_lm(n_token=256, n_layer=1), {"vocab": tokenizer}).signatures()
    graphs = [served[name].get_concrete_function() for name in ("generate", "generate_text", "generate_texts")]
    assert len(graphs) == 3 and len(made) == 1


LINES = ["ab ba", "", "b\na", "a\n"]  # with a line end or without


@pytest.mark.parametrize(
    "options",
    [
        {"special": ["<eos>"], "eos": "<eos>", "unk": "<eos>"},
        pytest.param({"special": ["<S>"], "eos": "<S>", "bos": "<S>"}, marks=pytest.mark.slow),
        pytest.param({"level": "char"}, marks=pytest.mark.slow),
        pytest.param({"level": "char", "special": [" "], "document": "</s>"}, marks=pytest.mark.slow),
        pytest.param({"level": "byte", "document": "</s>"}, marks=pytest.mark.slow),
        {"level": "char", "texts": ["ab "], "lines": ["ab ba", "a\n", ""]},
    ],
    ids=str,
)
def test_served_lines_are_scored_as_the_program_scores_lines(small_lm, tmp_path, options, eager):
    """Token by token; NaN, of a token that does not count, is 0."""
    options = dict(options)
    lines, texts = options.pop("lines", LINES), options.pop("texts", ["ab ba\na b"])
    vocab, tokenizer = write_vocab(tmp_path, texts, **options)
    lm = small_lm(n_token=len(vocab), n_layer=1, mem_len=4)
    served = LanguageModelSignatures(lm, {"vocab": tokenizer}, max_tokens=50).score_lines(tf.constant(lines))
    symbols = served["symbols_bytes" if vocab.level == "byte" else "symbols"].numpy()
    for row, score in enumerate(score_lines(lm, vocab, lines)):
        n = len(score.ids)
        assert served["lengths"][row] == n and [*map(vocab.ids.get, decoded_symbols(symbols[row, :n]))] == [*score.ids]
        np.testing.assert_allclose(served["nll"][row, :n], np.nan_to_num(score.token_nll), rtol=1e-5, atol=1e-6)
        assert float(tf.reduce_sum(served["nll"][row])) == pytest.approx(score.nll, rel=1e-5)
        assert not np.any(served["nll"][row, n:])


@pytest.mark.slow
def test_a_served_model_of_documents_stops_where_one_ends_by_default(small_lm, tmp_path):
    vocab, tokenizer = write_vocab(tmp_path, ["ab ab\na b"], level="char", document="</s>")
    lm, most = small_lm(n_token=len(vocab), n_layer=1, mem_len=4), {"max_new_tokens": tf.constant([60])}
    served = LanguageModelSignatures(lm, {"vocab": tokenizer}).signatures()
    (text,) = served["generate_text"](text=tf.constant(["ab"]), **most)["text"].numpy()
    assert text.endswith(b"</s>") and text.count(b"</s>") == 1
    (more,) = served["generate_text"](text=tf.constant(["ab"]), stop=tf.constant([[""]]), **most)["text"].numpy()
    assert more.startswith(text) and more != text
    by_default = inspect.signature(served["generate"].python_function).parameters["stop_ids"].default
    assert by_default.numpy().tolist() == [[[vocab.document_id]]]


def decoded_symbols(symbols):
    return [symbol.decode("utf-8", "surrogateescape") for symbol in symbols]


@pytest.mark.slow
@pytest.mark.parametrize("whole", ["whole"], indirect=True)
def test_strangers_get_the_numbers_of_the_model(lm, vocab, text, exported, tmp_path):
    np.savez(
        tmp_path / "given.npz", text=text, segments=SEGMENTS, lengths=np.array([6, 2, 3], np.int32),
        texts=np.array(TEXTS, "S"), shape=[3, 2, 2, 2, 4, 3], **SAMPLING,
    )  # fmt: skip
    command = [sys.executable, "-c", STRANGER, str(exported), str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    answers = expected(lm, vocab, text)
    for way in ("loaded", "session"):
        found = dict(np.load(tmp_path / f"{way}.npz"))
        for name, value in answers.items():
            if found[name].dtype.kind == "S":
                assert np.char.decode(found[name]).tolist() == value, (way, name)
            else:
                np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-5, err_msg=f"{way} {name}")
        for i in range(3):
            np.testing.assert_allclose(found[f"state_{i}"], found[f"scored_state_{i}"], atol=1e-6)
    np.testing.assert_allclose(np.load(tmp_path / "cli" / "nll.npy"), answers["nll_0"], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("whole", ["whole"], indirect=True)
def test_a_c_program_scores_and_survives_bad_requests(lm, text, exported, tmp_path):
    if shutil.which("gcc") is None:
        pytest.skip("there is no gcc")
    library = os.path.dirname(tf.__file__)
    link = [f"-L{library}", "-l:libtensorflow_cc.so.2", "-l:libtensorflow_framework.so.2", f"-Wl,-rpath,{library}"]
    program = tmp_path / "serve"
    command = ["gcc", "-Wall", "-Werror", f"-I{library}/include", f"{ROOT}/tests/serve.c", "-o", str(program), *link]
    subprocess.run(command, check=True)

    model = saved_model_pb2.SavedModel.FromString((exported / "saved_model.pb").read_bytes())
    score = model.meta_graphs[0].signature_def["score"]
    tensors = [score.inputs[name].name for name in ("tokens", "labels", "state")]
    tensors += [score.outputs[name].name for name in ("nll", "state")]
    result = subprocess.run([program, exported, *tensors, "3", "6"], input=text.tobytes(), capture_output=True)
    assert result.returncode == 0, result.stderr.decode()
    lines = result.stdout.decode().splitlines()

    mems, rows = None, []
    for start in (0, 6, 12):
        labels = text[:, start + 1 : start + 7]
        nll, mems = lm.score(text[:, start : start + labels.shape[1]], labels, mems)
        rows += list(nll.numpy())
    for line, row in zip(lines[:9], rows, strict=True):
        np.testing.assert_allclose(np.array(line.split(), float), row, atol=2e-5)
    for line, start in zip(lines[9:12], ("id: ", "labels: ", "state: "), strict=True):
        assert line.startswith(f"{start}invalid argument")
    assert mentions(lines[9], "tokens", 0, 22, 1073741824)
    assert mentions(lines[10], "labels", "[3 5]")
    assert mentions(lines[11], "state", "[B, 2, 2, 2, 4, 3]", "[3 3 2 2 5 3]")
    assert lines[12:] == lines[:3]


def test_by_default_a_request_has_as_many_rows_as_fit(small_lm, monkeypatch):
    """Keys and values of a place: 2 layers * 2 * 2 heads * 3 numbers * 4 bytes. Logits: 5 words, 2 bins, 11 words."""
    lm = small_lm(mem_len=100_000, cutoffs=[5, 12])
    limits = limits_of(lm, None, max_tokens=4096)
    assert limits.row_bytes(3, 7) == 100_000 * 96 + 48 * 23 + 3 * (96 + 4 * (5 + 2 + 11 + 2 * 12)) + 7 * 512
    assert limits.max_rows == 2**29 // limits.row_bytes(1) == 55
    assert limits.max_bytes == 2**29
    assert limits_of(small_lm(mem_len=0), None, max_tokens=4096).max_rows == 1024
    monkeypatch.setattr(request_module, "REQUEST_BYTES", 1)
    assert limits_of(lm, None, max_tokens=4096).max_rows == 1


def test_what_the_exporter_asks_for_fits_in_any_case(small_lm):
    lm = small_lm(mem_len=100_000, cutoffs=[5, 12])
    many, long = limits_of(lm, 70, max_tokens=4096), limits_of(lm, None, max_tokens=10**7)
    assert many.max_bytes == 70 * many.row_bytes(1) > 2**29
    assert long.max_bytes == long.row_bytes(10**7, 10**7) > 2**29


@pytest.mark.slow
def test_long_rows_are_fewer(small_lm, monkeypatch):
    monkeypatch.setattr(request_module, "REQUEST_BYTES", 1)
    served = LanguageModelSignatures(small_lm(), max_tokens=50, max_rows=6)
    limits = served.limits
    fit = {n: limits.max_bytes // limits.row_bytes(n) for n in (1, 20, 50)}
    assert limits.max_bytes == limits.row_bytes(50, 50)
    assert fit[50] == 2 and fit[20] == 5 and fit[1] > 6
    state = served.initial_state(tf.constant(6))["state"]
    for rows, n in [(6, 1), (5, 20), (2, 50), (6, 20), (3, 50)]:
        tokens, memory = tf.zeros([rows, n], tf.int32), state[:rows]
        for request, arguments in [(served.score, (tokens, tokens, memory)), (served.next, (tokens, memory))]:
            if rows <= fit[n]:
                assert request(*arguments)["state"].shape[0] == rows
                continue
            with raises_naming(tf.errors.InvalidArgumentError, "tokens", fit[n], n, 0, rows):
                request(*arguments)

    def lengths_of(rows, n, max_new_tokens):
        options = {name: tf.constant(values[:1].repeat(rows)) for name, values in SAMPLING.items()}
        options["max_new_tokens"] = tf.constant(max_new_tokens)
        options |= {name: tf.constant(value) for name, value in {**NEUTRAL, **ONE, **NO_IDS}.items()}
        return served.generate(tf.zeros([rows, n], tf.int32), tf.fill([rows], n), **options)["lengths"].numpy()

    assert lengths_of(1, 50, [50]).tolist() == [100]
    with raises_naming(tf.errors.InvalidArgumentError, "tokens", 1, 20, 50, 2):
        lengths_of(2, 20, [0, 50])


def test_a_text_with_too_many_bytes_is_reported_by_the_name_of_its_argument():
    limits = request_module.RequestLimits(lambda tokens, new_tokens=0: 1, max_rows=1, max_tokens=4)
    text = tf.constant(["a" * (limits.max_bytes // request_module.TEXT_BYTES + 1)])
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"\btarget_text\b.*bytes"):
        limits.checked_text("target_text", text)


def test_the_padded_size_of_texts_counts_and_rows_are_counted_before_tokens(small_lm, tmp_path, monkeypatch, eager):
    monkeypatch.setattr(request_module, "REQUEST_BYTES", 1)
    _, tokenizer = write_vocab(tmp_path, [], level="byte")
    served = LanguageModelSignatures(small_lm(n_token=256), {"vocab": tokenizer}, max_tokens=50, max_rows=4)
    fit = served.limits.max_bytes // served.limits.row_bytes(40)
    assert fit < 3
    assert served.score_text(tf.constant(["a" * 50]))["lengths"].numpy().tolist() == [50]
    with raises_naming(tf.errors.InvalidArgumentError, "text", fit, 40, 0, 3):
        served.score_text(tf.constant(["a" * 40, "", "a"]))
    monkeypatch.setattr(tokenizer, "encode", None)
    with raises_naming(tf.errors.InvalidArgumentError, "text", 4, 5):
        served.score_text(tf.constant([""] * 5))


def test_rows_do_not_see_each_other(request_of, lm, text):
    """64 rows, no new tokens, and empty prompts only, of no column at all."""
    many = {name: np.resize(values, 64) for name, values in SAMPLING.items()}
    tokens, lengths = np.resize(text[:, :6], [64, 6]), np.resize(np.int32([6, 2, 3]), 64)
    together = request_of("generate", tokens=tokens, lengths=lengths, **many)
    alone = request_of("generate")
    for key, value in together.items():
        np.testing.assert_array_equal(value, np.resize(alone[key], value.shape), err_msg=key)

    nothing = request_of("generate", max_new_tokens=np.int32([0, 0, 0]), lengths=np.int32([6, 0, 3]))
    np.testing.assert_array_equal(nothing["lengths"], [6, 0, 3])
    np.testing.assert_array_equal(nothing["tokens"], text[:, :6] * (np.arange(6) < [[6], [0], [3]]))
    empty = {"tokens": np.zeros([3, 0], np.int32), "lengths": np.int32([0, 0, 0])}
    begun = request_of("generate", **empty, max_new_tokens=np.int32([4, 4, 4]), temperature=VECTOR * 0)["tokens"]
    tokens, mems = [[0]], None
    for chosen in begun[0]:
        log_probs, mems = lm.log_probs(tokens, mems)
        assert chosen == np.argmax(log_probs[0, -1])
        tokens = [[chosen]]
    assert request_of("initial_state", batch_size=np.int32([1, 1]))["state"].shape == empty_state(lm, 2).shape


WANTED = {  # row by row
    "max_new_tokens": np.int32([12, 9, 5]), "temperature": np.float32([1, 0.8, 1.3]), "top_k": np.int32([0, 12, 3]),
    "top_p": np.float32([1, 0.9, 1]), "seed": np.int32([3, 4, 5]), "min_p": np.float32([0, 0.05, 0.3]),
    "repetition_penalty": np.float32([2, 1, 0.5]), "repetition_window": np.int32([3, 64, 1]),
    "num_return_sequences": np.int32([3, 1, 2]),
}  # fmt: skip


STOPS = [["w3 w5", "\n"], ["w9", ""], ["<unk> w1", "w2"]]


def sequences_of(lm, vocab, prompt, row, stops=STOPS):
    """What `lm.generate` writes with the options of a row of `WANTED` and these stop strings, as a list of lists."""
    options = {name: values[row] for name, values in WANTED.items()}
    options |= {"top_k": options["top_k"] or None, "num_return_sequences": 3}  # one graph for all rows
    strings = [string for string in stops[row] if string]
    tokens, lengths = generate(lm, [prompt], **options, stop_strings=strings, vocab=vocab, with_lengths=True)
    found = [text[:length] for text, length in zip(tokens.numpy().tolist(), lengths, strict=True)]
    return found[: WANTED["num_return_sequences"][row]]


def test_sequences_and_stop_strings_are_those_of_generate(request_of, lm, vocab, text):
    """The first row ends in the middle; the stop string of the second is no word that it writes."""
    free = request_of("generate", **WANTED)["sequences"]
    unwritten = next(word for word in vocab.symbols[2:] if vocab.ids[word] not in free[1])
    stops = [[vocab.decode(free[0, 0, 8:10]), "\n"], [unwritten, ""], STOPS[2]]
    ids = np.full([3, 2, 2], -1, np.int32)
    for row, strings in enumerate(stops):
        for place, string in zip(ids[row], filter(None, strings), strict=False):
            found = vocab.encode(string)
            place[: len(found)] = found
    served = request_of("generate", **WANTED, stop_ids=ids)
    assert served["sequences"].shape == (3, 3, 18) and served["sequence_lengths"].shape == (3, 3)
    ended = []
    for row, n in enumerate([6, 2, 3]):
        expected = sequences_of(lm, vocab, text[row, :n], row, stops)
        ended += [len(sequence) < n + WANTED["max_new_tokens"][row] for sequence in expected]
        expected += [[]] * (3 - len(expected))
        assert served["sequence_lengths"][row].tolist() == [len(sequence) for sequence in expected]
        np.testing.assert_array_equal(served["sequences"][row], [np.pad(x, [0, 18 - len(x)]) for x in expected])
    assert set(ended) == {False, True}
    np.testing.assert_array_equal(served["tokens"], served["sequences"][:, 0])
    np.testing.assert_array_equal(served["lengths"], served["sequence_lengths"][:, 0])


def test_texts_and_stop_strings_are_those_of_generate(request_of, lm, vocab, whole):
    written = request_of("generate_texts", **WANTED, stop=np.array(STOPS, object))["texts"]
    if whole:  # `generate_text` writes the first of these
        one = {name: values for name, values in WANTED.items() if name not in ONE}
        first = request_of("generate_text", **one, stop=np.array(STOPS, object))["text"]
        assert first.tolist() == written[:, 0].tolist()
    for row, prompt in enumerate(TEXTS):
        start = vocab.encode(prompt or "\n")
        expected = sequences_of(lm, vocab, start, row)
        expected = [vocab.decode(sequence[prompt == "" :]) for sequence in expected]
        assert [text.decode() for text in written[row]] == expected + [""] * (3 - len(expected))


def rows_of(batch):
    return {"tokens": np.zeros([batch, 6], np.int32), "state": batch}


BAD = [  # an integer as a state stands for an empty one of so many rows, a float for one of that value
    ("score", {"tokens": np.full([3, 6], 23, np.int32)}, ["tokens", 0, 22]),
    ("score", {"labels": np.full([3, 6], -1, np.int32)}, ["labels", 0, 22]),
    ("score", {"labels": np.zeros([3, 7], np.int32)}, ["labels", "tokens"]),
    ("score", {"state": 2}, ["state", "tokens"]),
    ("score", {"state": np.zeros([3, 3, 2, 2, 4, 3], np.float32)}, ["state", "[3 3 2 2 4 3]"]),
    ("next", {"state": np.zeros([3, 2, 2, 4, 3], np.float32)}, ["state", "[3 2 2 4 3]"]),
    ("next", {"state": np.nan}, ["state", "nan"]),
    ("score", {"state": np.inf}, ["state", "inf"]),
    ("next", {"state": np.float32(0)}, ["state", "[]"]),
    ("next", {"tokens": np.zeros([3], np.int32)}, ["tokens", "[B, T]", 3]),
    ("score", {"tokens": np.int32(0)}, ["tokens", "[B, T]", "[]"]),
    ("score", {"labels": np.zeros([3, 6, 1], np.int32)}, ["labels", "[B, T]", "[3 6 1]"]),
    ("score", {**rows_of(0), "labels": np.zeros([0, 6], np.int32)}, ["tokens", 1, 0]),
    ("score", {**rows_of(65), "labels": np.zeros([65, 6], np.int32)}, ["tokens", 64, "65"]),
    ("next", rows_of(0), ["tokens", 1, 0]),
    ("next", rows_of(65), ["tokens", 64, 65]),
    ("next", {"tokens": np.zeros([3, 0], np.int32)}, ["tokens", 1, 100]),
    ("next", {"tokens": np.zeros([3, 101], np.int32)}, ["tokens", 1, 100]),
    ("generate", {"tokens": np.zeros([3, 101], np.int32)}, ["tokens", 100]),
    ("generate", {"tokens": np.full([3, 6], 23, np.int32)}, ["tokens", 0, 22]),
    ("generate", {"tokens": np.zeros([0, 6], np.int32)}, ["tokens", 1, 0]),
    ("generate", {"tokens": np.zeros([65, 6], np.int32)}, ["tokens", 64, 65]),
    ("generate", {"tokens": np.zeros([6], np.int32)}, ["tokens", "[B, T]", 6]),
    ("generate", {"lengths": np.int32([[6, 2, 3]])}, ["lengths", "[B]", "[1 3]"]),
    ("generate", {"lengths": np.int32([7, 1, 1])}, ["lengths", 0, "tokens"]),
    ("generate", {"max_new_tokens": np.int32([1, -1, 1])}, ["max_new_tokens", 0, 100]),
    ("generate", {"max_new_tokens": np.int32([1, 2**31 - 1, 1])}, ["max_new_tokens", 0, 100]),
    ("generate", {"temperature": VECTOR - 1}, ["temperature", 0]),
    ("generate", {"temperature": VECTOR * np.float32("nan")}, ["temperature", 0]),
    ("generate", {"temperature": VECTOR[:2]}, ["temperature", "[batch]"]),
    ("generate", {"temperature": np.float32(1)}, ["temperature", "[B]", "[]"]),
    ("generate", {"top_k": np.int32([1, -1, 1])}, ["top_k", 1, 0]),
    ("generate", {"top_p": VECTOR * 0}, ["top_p"]),
    ("generate_text", {"top_p": VECTOR + 1}, ["top_p"]),
    ("generate", {"min_p": VECTOR + 0.5}, ["min_p", "[0, 1)"]),
    ("generate", {"min_p": VECTOR[:2]}, ["min_p", "[batch]"]),
    ("generate_text", {"repetition_penalty": VECTOR * 0}, ["repetition_penalty"]),
    ("generate", {"repetition_penalty": VECTOR * np.float32("inf")}, ["repetition_penalty"]),
    ("generate", {"repetition_window": np.int32([0])}, ["repetition_window", 1, 1073741823]),
    ("generate", {"repetition_window": np.int32([9])}, ["repetition_window", 9]),
    ("generate_text", {"repetition_window": np.int32([64, 9, 64])}, ["repetition_window", 9]),
    ("generate", {"num_return_sequences": np.int32([2, 0, 1])}, ["num_return_sequences", 1]),
    ("generate", {"num_return_sequences": np.int32([22])}, [64, "num_return_sequences", 66]),
    ("generate_texts", {"num_return_sequences": np.int32([2**31 - 1])}, ["num_return_sequences", 6442450941]),
    ("generate", {"stop_ids": np.int32([[[3, 23]]])}, ["stop_ids", -1, 22, 23]),
    ("generate", {"stop_ids": np.int32([[[-1, 3]]])}, ["stop_ids", -1, "stop"]),
    ("generate", {"stop_ids": np.zeros([2, 1, 1], np.int32)}, ["stop_ids", 1]),
    ("generate", {"stop_ids": np.zeros([1, 9, 1], np.int32)}, ["stop_ids", 8, "stop"]),
    ("generate", {"stop_ids": np.zeros([1, 1, 65], np.int32)}, ["stop", "stop_ids", 64]),
    ("generate", {"stop_ids": np.int32([[3]])}, ["stop_ids", "[B, S, L]", "[1 1]"]),
    ("generate_text", {"stop": np.array([["w3", "w3 w99"]], object)}, [23, "w3", "w99"]),
    ("generate_text", {"stop": np.array([[" "]], object)}, ["stop", 23]),
    ("generate_text", {"stop": np.array([["w3"]] * 2, object)}, ["stop", 1]),
    ("generate_texts", {"stop": np.array([["w3 " * 22]], object)}, ["stop", 64]),
    ("generate_text", {"stop": np.array(["w3"], object)}, ["stop", "[B, S]", 1]),
    ("generate_text", {"text": np.array(["", "", "w1 " * 350_000], object)}, ["text", 100, "tokens"]),
    ("score_text", {"text": np.array(["w1 " * 350_000], object)}, ["text", 100, "tokens"]),
    ("score_text", {"text": np.array(["w1 " * 3_000_000], object)}, [8388608]),
    ("score_text", {"text": np.array([], object)}, ["text", 1, 0]),
    ("score_text", {"text": np.array(["w1"] * 65, object)}, ["text", 64, 65]),
    ("score_text", {"text": np.array("w1", object)}, ["text", "[B]", "[]"]),
    ("score_text", {"text": np.array([b"w1 w2", b"w1 \xff"], object)}, ["text", "UTF-8", 1]),
    ("generate_text", {"text": np.array([], object)}, ["text", 1, 0]),
    ("generate_text", {"text": np.array(["w1"] * 400, object)}, ["text", 64, 400]),
    ("generate_text", {"text": np.array([["w1"]], object)}, ["text", "[B]", "[1 1]"]),
    ("initial_state", {"batch_size": np.int32(-1)}, ["batch_size", 0, 64]),
    ("initial_state", {"batch_size": np.int32(10**9)}, ["batch_size", 0, 64]),
    ("initial_state", {"batch_size": np.int32([2**31 - 1, 2**31 - 1, 3])}, ["batch_size", 0, 64]),
]  # fmt: skip


def bad_requests(lm):
    """`BAD` for the layers of a model."""
    for name, changes, facts in BAD:
        state = changes.get("state")
        if isinstance(state, int):
            changes = {**changes, "state": empty_state(lm, state)}
        elif isinstance(state, float):
            changes = {**changes, "state": np.full_like(empty_state(lm, 3), state)}
        yield name, changes, facts


def test_bad_requests_are_refused_by_name_and_the_model_goes_on(request_of, lm, whole):
    bad = list(bad_requests(lm))
    if not whole:  # `generate_text` is a case of `generate_texts`, and takes as long to trace
        bad = [("generate_texts" if name == "generate_text" else name, *rest) for name, *rest in bad]
    good = {name: request_of(name) for name, _, _ in bad}
    for name, changes, facts in bad:
        with raises_naming(tf.errors.InvalidArgumentError, *facts):
            request_of(name, **changes)
    for name, answer in good.items():
        for key, value in request_of(name).items():
            np.testing.assert_array_equal(value, answer[key], err_msg=f"{name} {key}")


@pytest.mark.slow
@pytest.mark.parametrize("whole", ["whole"], indirect=True)
def test_a_server_s_graph_refuses_by_name_too(exported, lm, tmp_path):
    """A server feeds a session whose placeholders take any shape, as TensorFlow's C library does."""
    folder = tmp_path / "1"
    shutil.copytree(exported, folder)
    model = saved_model_pb2.SavedModel.FromString((exported / "saved_model.pb").read_bytes())
    for node in model.meta_graphs[0].graph_def.node:
        if node.op in ("Placeholder", "PlaceholderWithDefault"):
            node.attr["shape"].shape.CopyFrom(tf.TensorShape(None).as_proto())
            node.attr.pop("_output_shapes", None)
    (folder / "saved_model.pb").write_bytes(model.SerializeToString())
    tokens, state = np.zeros([3, 6], np.int32), np.zeros([3, 2, 2, 2, 4, 3], np.float32)
    texts = np.array(TEXTS, object)
    good = {
        "initial_state": {"batch_size": np.int32(3)},
        "score": {"tokens": tokens, "labels": tokens, "state": state},
        "next": {"tokens": tokens, "state": state},
        "generate": {"tokens": tokens, "lengths": np.int32([6, 2, 3]), **GENERATE},
        "score_text": {"text": texts},
        "generate_text": {"text": texts, **GENERATE_TEXT},
        "generate_texts": {"text": texts, **GENERATE_TEXT, **ONE},
    }
    with tf.compat.v1.Session(graph=tf.Graph()) as session:
        served = tf.compat.v1.saved_model.load(session, ["serve"], str(folder)).signature_def

        def send(signature, **changes):
            info = served[signature]
            feeds = {info.inputs[name].name: value for name, value in {**good[signature], **changes}.items()}
            return session.run({name: output.name for name, output in info.outputs.items()}, feeds)

        for name, changes, facts in bad_requests(lm):
            with raises_naming(tf.errors.InvalidArgumentError, *facts):
                send(name, **changes)
        assert send("initial_state")["state"].shape == (3, 2, 2, 2, 4, 3)
        assert send("next")["ids"].shape == (3, 4)


@pytest.mark.parametrize("level", ["word", "bos", "char", "byte"])
def test_stop_strings_are_spelled_as_in_the_vocabulary(tmp_path, level):
    options = {"special": ["<end>"], "level": level}
    if level in ("word", "bos"):
        options = {"special": ["<eos>", "<s>"], "eos": "<eos>", "bos": "<s>" if level == "bos" else None}
    vocab, served = write_vocab(tmp_path, ["a b: \nb é"], **({"level": level} if level == "byte" else options))
    stops = [["a b:\n", "", "\n\n"], ["é", "<eos>" if level in ("word", "bos") else "b\n", "b:\nb"]]
    units, lengths = served.stop_units(tf.constant(stops))
    for found, length, stop in zip(units.numpy().reshape(6, -1), lengths.numpy().ravel(), sum(stops, []), strict=True):
        expected = spell(vocab, stop) if stop else []
        assert found[:length].tolist() == expected and set(found[length:]) <= {-1}


@pytest.mark.slow
def test_stop_strings_of_subwords_are_bytes(small_lm, tmp_path):
    """The served text ends with the stop string: with a token, where the last token goes on, or where there is none."""
    vocab = Subwords()

    class Tokenizer(SubwordTokenizer):
        def __init__(self):
            tf.Module.__init__(self)
            self.vocab = vocab

        def encode(self, text):
            return tf.RaggedTensor.from_tensor(tf.zeros([tf.size(text), 1], tf.int32))

        def decode(self, ids, lengths):
            pieces = tf.RaggedTensor.from_tensor(tf.gather(tf.constant(vocab.token_bytes), ids), lengths)
            return tf.strings.reduce_join(pieces, -1)

    lm, stops, kinds = small_lm(n_layer=1), ["ab", "\n", "ser", "é"], {}
    for seed, row in enumerate(generate(lm, np.zeros([300, 1], int), 7, seed=np.arange(300))[:, 1:].numpy()):
        whole = vocab.bytes_of(row)
        ends = [whole.index(stop.encode()) + len(stop.encode()) for stop in stops if stop.encode() in whole]
        end, of_tokens = min(ends, default=len(whole)), np.cumsum([len(vocab.token_bytes[i]) for i in row])
        kinds.setdefault((end < len(whole), end in of_tokens), []).append((seed, whole[:end]))
    seeds, expected = zip(*(each for kind in kinds.values() for each in kind[:5]), strict=True)
    assert len(kinds) == 3 and len(seeds) == 15

    served, n = LanguageModelSignatures(lm, {"vocab": Tokenizer()}, max_tokens=50), len(seeds)
    options = {name: tf.repeat(values[:1], n) for name, values in {**SAMPLING, **NEUTRAL}.items()}
    options |= {"max_new_tokens": tf.fill([n], 7), "seed": tf.constant(seeds)}
    written = served.generate_text(text=tf.fill([n], ""), stop=tf.constant([stops]), **options)["text"]
    assert written.numpy().tolist() == list(expected)


def write_vocab(folder, texts, **options):
    vocab = Vocab(**options)
    vocab.count(texts)
    vocab.build()
    vocab.save(str(folder / "vocab.txt"))
    return vocab, GraphTokenizer(vocab, str(folder / "vocab.txt"))


@pytest.mark.parametrize(
    "options",
    [
        {"special": ["<eos>", "<unk>"], "eos": "<eos>", "unk": "<unk>", "min_freq": 2},
        {"special": ["<S>", "a\\1"], "eos": "<S>", "bos": "<S>"},
        {"special": ["</s>", "[b] "[:3]], "eos": "</s>", "bos": "[b]", "lower_case": True, "unk": "the"},
        {"level": "char", "special": ["<unk>"], "unk": "<unk>", "max_size": 9},
        {"level": "char", "lower_case": True},
        {"level": "byte"},
    ],
    ids=str,
)
def test_text_becomes_ids_and_text_as_in_the_vocabulary(tmp_path, options):
    texts = [
        "The the\u00a0end\u3000of\u2003the  line \n\n of \u0416\u0436 \u00c9t\u00e9 the the \n", "\nof\r\nthe end", "",
        "the \\1 end", "\n", "\x1cthe\x85of\x1f the", "\U0001f600 the", "\0The\0 \0of THE\0\0",
    ]  # fmt: skip
    vocab, served = write_vocab(tmp_path, texts, **options)
    ids = served.encode(tf.constant([text.encode() for text in texts]))
    for text, row in zip(texts, ids, strict=True):
        np.testing.assert_array_equal(row, vocab.encode(text), err_msg=repr(text))
    decoded = served.decode(ids.to_tensor(), tf.cast(ids.row_lengths(), tf.int32)).numpy()
    assert [text.decode() for text in decoded] == [vocab.decode(row) for row in ids]


def test_unknown_symbols_are_an_error_where_nothing_stands_for_them(tmp_path):
    _, served = write_vocab(tmp_path, ["ab"], level="char")
    with raises_naming(tf.errors.InvalidArgumentError, 2, "?"):
        served.encode(tf.constant(["ab", "a?"]))


@pytest.mark.slow
def test_bytes_that_are_no_text_come_back(small_lm, tmp_path):
    vocab, served = write_vocab(tmp_path, [], level="byte")
    lm = small_lm(n_token=256, n_layer=1)
    model = LanguageModelSignatures(lm, {"vocab": served}, max_tokens=50, start_token=10)
    given = [bytes(range(256))[-20:] + b"\x00\xff", b"\xed\xa0\x80"]
    sampling = {name: tf.constant(values[:2]) for name, values in GENERATE_TEXT.items()}
    written = model.generate_text(text=tf.constant(given), **sampling)["text_bytes"].numpy()
    for row, prompt in enumerate(given):
        top_k = int(SAMPLING["top_k"][row]) or None
        options = {name: SAMPLING[name][row] for name in ("temperature", "top_p", "seed")}
        ids = generate(lm, [list(prompt)], SAMPLING["max_new_tokens"][row], top_k=top_k, **options)[0]
        assert written[row] == bytes(ids.numpy().astype(np.uint8)) and written[row].startswith(prompt)
    assert model.score_text(tf.constant([b"\xff\x00"]))["symbols_bytes"].numpy().tolist() == [[b"\xff", b"\x00"]]


def test_a_session_of_three_requests_is_one_long_text(small_lm, text, eager):
    """Where every token sees as far back as any other; the first of a segment sees less without same_length."""
    lm = small_lm(same_length=True)
    served, state = LanguageModelSignatures(lm, max_tokens=50), np.zeros([3, 2, 2, 2, 4, 3], np.float32)
    nll = []
    for start, end in SEGMENTS:
        tokens, labels = (tf.constant(text[:, start + i : end + i]) for i in (0, 1))
        answer = served.score(tokens, labels, tf.constant(state))
        nll.append(answer["nll"])
        state = answer["state"]
    np.testing.assert_allclose(np.concatenate(nll, 1), lm.score(text[:, :-1], text[:, 1:])[0], rtol=1e-5)


def test_warmup_is_true_or_false(small_lm, tmp_path):
    with raises_parameter("warmup", "no"):
        export_saved_model(small_lm(n_layer=1), tmp_path / "1", warmup="no")


def test_half_weights_are_those_of_a_rounded_model(small_lm, small_batches, tmp_path, monkeypatch):
    exporting(monkeypatch, "initial_state", "score")
    lm, (tokens, labels) = small_lm(n_layer=1, mem_len=0, untie_r=True), small_batches(1)
    directory = tmp_path / "1"
    export_saved_model(lm, directory, weights="bfloat16", warmup=False)
    for weight in lm.weights:
        weight.assign(tf.cast(tf.cast(weight, "bfloat16"), "float32"))
    serve = tf.saved_model.load(str(directory)).signatures
    state = serve["initial_state"](batch_size=tf.constant(2))["state"]
    found = serve["score"](tokens=tf.constant(tokens[0]), labels=tf.constant(labels[0]), state=state)
    with eagerly():
        expected, _ = lm.score(tokens[0], labels[0])
    np.testing.assert_allclose(found["nll"], expected, rtol=1e-5)
    assert state.shape == (2, 1, 2, 2, 0, 3)
    stored = tf.train.load_checkpoint(str(directory / "variables" / "variables")).get_variable_to_dtype_map()
    assert set(stored.values()) == {tf.bfloat16, tf.string}


# Shapes and types of a warm-up request for the model of this file: one row of one token.
SAMPLING_INPUTS = {
    "max_new_tokens": ([1], tf.int32), "temperature": ([1], tf.float32), "top_k": ([1], tf.int32),
    "top_p": ([1], tf.float32), "seed": ([1], tf.int32), "min_p": ([1], tf.float32),
    "repetition_penalty": ([1], tf.float32), "repetition_window": ([1], tf.int32),
}  # fmt: skip
NUMBER_INPUT, STOP_INPUT = {"num_return_sequences": ([1], tf.int32)}, {"stop": ([1, 1], tf.string)}
STATE_INPUT = {"state": ([1, None, 2, 2, 4, 3], tf.float32)}  # of some layers
WARMUP = {
    "initial_state": {"batch_size": ([], tf.int32)},
    "score": {"tokens": ([1, 1], tf.int32), "labels": ([1, 1], tf.int32), **STATE_INPUT},
    "next": {"tokens": ([1, 1], tf.int32), **STATE_INPUT},
    "generate": {
        "tokens": ([1, 1], tf.int32), "lengths": ([1], tf.int32), **SAMPLING_INPUTS, **NUMBER_INPUT,
        "stop_ids": ([1, 1, 1], tf.int32),
    },
    "score_text": {"text": ([1], tf.string)},
    "score_lines": {"text": ([1], tf.string)},
    "generate_text": {"text": ([1], tf.string), **SAMPLING_INPUTS, **STOP_INPUT},
    "generate_texts": {"text": ([1], tf.string), **SAMPLING_INPUTS, **STOP_INPUT, **NUMBER_INPUT},
}  # fmt: skip


def warmup_requests(directory):
    """The requests of an exported model, by signature, parsed by TensorFlow Serving's own protocol buffers."""
    from tensorflow_serving.apis import prediction_log_pb2  # slow to import

    path = directory / "assets.extra" / "tf_serving_warmup_requests"
    records = [record.numpy() for record in tf.data.TFRecordDataset([str(path)])]
    requests = [prediction_log_pb2.PredictionLog.FromString(record).predict_log.request for record in records]
    assert len({request.model_spec.signature_name for request in requests}) == len(records)
    return {request.model_spec.signature_name: request for request in requests}


def test_warm_up_requests_are_records_of_every_signature_which_answers_them(
    exported, made, signatures, lm, tmp_path, whole
):
    names = WARMUP.keys() if whole else {"initial_state", "score", "generate_texts"}  # which are traced already
    if not whole:
        traced = {name: made.traced[name] for name in names}
        graphs = {name: function.experimental_get_tracing_count() for name, function in traced.items()}
        write_warmup(str(tmp_path / "assets.extra"), traced, LanguageModelSignatures.warmup_values)
        assert graphs == {name: function.experimental_get_tracing_count() for name, function in traced.items()}
    requests = warmup_requests(exported if whole else tmp_path)
    assert requests.keys() == names and (signatures.keys() if whole else made.names) == WARMUP.keys()
    for name, request in requests.items():
        inputs = {name: tf.constant(tf.make_ndarray(proto)) for name, proto in request.inputs.items()}
        found = {name: ([*x.shape], x.dtype) for name, x in inputs.items()}
        layers = lm.network.n_layer
        assert found == {key: ([size or layers for size in shape], kind) for key, (shape, kind) in WARMUP[name].items()}
        outputs = signatures[name](**inputs)
        assert set(outputs) == set(signatures[name].structured_outputs)
        assert all(output.shape.rank is not None for output in outputs.values())


@pytest.mark.slow
def test_warm_up_requests_are_written_where_serving_s_api_is_installed_unless_told_otherwise(
    small_lm, tmp_path, monkeypatch, capsys
):
    lm, kept = small_lm(n_layer=1), exporting(monkeypatch, "initial_state")
    export_saved_model(lm, tmp_path / "with")
    assert warmup_requests(tmp_path / "with").keys() == {"initial_state"}
    assert kept.keys() == {"initial_state", "score", "next", "generate"}  # without a vocabulary
    export_saved_model(lm, tmp_path / "unwanted", warmup=False)
    assert capsys.readouterr().out == "" and not (tmp_path / "unwanted" / "assets.extra").exists()

    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda *name: find_spec(*name) if "serving" not in name[0] else None
    )
    export_saved_model(lm, tmp_path / "without")
    assert mentions(capsys.readouterr().out, "tensorflow-serving-api")
    assert not (tmp_path / "without" / "assets.extra").exists()
    with raises_parameter("warmup", True):
        export_saved_model(lm, tmp_path / "error", warmup=True)
    assert not (tmp_path / "error").exists()


@pytest.mark.parametrize(
    "options, value",
    [
        ({"weights": "int8"}, "int8"),
        ({"top_n": 0}, 0),
        ({"top_n": 1000}, 1000),
        ({"max_tokens": 0}, 0),
        ({"max_rows": 0}, 0),
        ({"start_token": 23}, 23),
        ({"vocab": Vocab("byte")}, 0),
        ({"vocab": ["vocab.txt"]}, "vocab.txt"),
    ],
    ids=["weights", "top_n", "top_n above", "max_tokens", "max_rows", "start_token", "vocab", "no vocab"],
)
def test_export_refuses_by_name(lm, tmp_path, options, value):
    with raises_parameter(*options, value):
        export_saved_model(lm, tmp_path, **options)


def test_the_vocabularies_may_be_a_list_of_one(lm, vocab):
    """As `RunFolder.load_vocabs` returns it."""
    for given in (vocab, [vocab]):
        assert served_model(lm, given, {}).vocabs == {"vocab": vocab}


def test_export_keeps_what_a_folder_holds(lm, tmp_path):
    (tmp_path / "something").touch()
    with raises_parameter("directory", str(tmp_path), "a new or empty folder"):
        export_saved_model(lm, tmp_path)
