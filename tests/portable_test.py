"""Models as ONNX and TFLite give the numbers of the model, over segments, without TensorFlow's graph of it."""

import json

import numpy as np
import pytest
import tensorflow as tf
from helpers import SMALL, eagerly, program, raises_parameter, randomise, run_here, word_vocab
from small_runs import make_encoder_decoder, make_flat, make_tagger

import txl_tf
from txl_tf.data.vocabulary import Vocab
from txl_tf.environment import too_old
from txl_tf.serving import portable
from txl_tf.serving.portable import FORMATS, export_portable
from txl_tf.taggers.crf import crf_decode, crf_decode_unrolled

pytestmark = pytest.mark.ci

BATCH, LENGTH = 2, 5


@pytest.fixture(params=FORMATS)
def format(request):
    if request.param == "onnx":
        for name in ("tf2onnx", "onnxruntime"):
            pytest.importorskip(name, reason=f"ONNX needs {name}: pip install tf2onnx onnx onnxruntime")
    return request.param


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.slow)], ids=["as traced", "simplified"])
def simplified(request, format, monkeypatch):
    """Whether tf2onnx simplifies a graph, which takes it longer than all else. It always does for language models."""
    if format == "onnx" and not request.param:
        from tf2onnx import optimizer

        optimize = optimizer.optimize_graph
        monkeypatch.setattr(optimizer, "optimize_graph", lambda graph, *_, **__: optimize(graph, optimizers={}))


def runner(path):
    """A function of arrays by their names, which returns arrays by their names."""
    if path.endswith(".onnx"):
        import onnxruntime

        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        names = [output.name for output in session.get_outputs()]
        return lambda **arrays: dict(zip(names, session.run(None, arrays), strict=True))
    interpreter = tf.lite.Interpreter(path)
    return interpreter.get_signature_runner()


def check_names(folder, found):
    """That model.json names the outputs with their shapes."""
    outputs = json.loads((folder / "model.json").read_text())["outputs"]
    assert outputs.keys() == found.keys()
    for name, array in found.items():
        assert outputs[name] == {"dtype": array.dtype.name, "shape": list(array.shape)}


LMS = [
    {},
    {"positions": "rotary", "d_head": 4},
    {"n_layer": 1, "cutoffs": (6, 12), "div_val": 2, "same_length": True, "clamp_len": 3},
]


@pytest.mark.parametrize("options", [pytest.param(LMS[0], marks=pytest.mark.slow), *LMS[1:]])
def test_a_language_model_over_two_segments(tmp_path, format, options):
    lm = txl_tf.TransformerXLLM(**{**SMALL, "mem_len": 4, **options})
    randomise(lm)
    vocab = word_vocab()
    path = export_portable(lm, tmp_path / "out", vocab, format=format, batch_size=BATCH, length=LENGTH)
    run = runner(path)
    assert (tmp_path / "out" / "vocab.txt").read_text() == vocab.get_data()
    ids = np.random.default_rng(0).integers(0, SMALL["n_token"], [BATCH, 2 * LENGTH]).astype(np.int32)
    mems = lm.initial_mems(BATCH)
    state = {f"mem{i}": np.zeros([BATCH, 4, SMALL["d_model"]], np.float32) for i in range(lm.network.n_layer)}
    memory = json.loads((tmp_path / "out" / "model.json").read_text())["memory"]
    for tokens in (ids[:, :LENGTH], ids[:, LENGTH:]):
        with eagerly():
            expected, mems = lm.log_probs(tokens, mems)
        found = run(tokens=tokens, **state)
        check_names(tmp_path / "out", found)
        state = {name: found[new] for name, new in memory.items()}
        np.testing.assert_allclose(found["log_probs"], expected, atol=2e-5)
        for i, mem in enumerate(mems):
            np.testing.assert_allclose(state[f"mem{i}"], mem, atol=2e-5)


def test_the_vanilla_language_model(tmp_path, format):
    lm = txl_tf.TransformerLM(**{**SMALL, "n_layer": 1, "context_len": 8})
    randomise(lm)
    run = runner(export_portable(lm, tmp_path / "out", format=format, batch_size=BATCH, length=LENGTH))
    ids = np.random.default_rng(0).integers(0, SMALL["n_token"], [BATCH, LENGTH]).astype(np.int32)
    with eagerly():
        expected, _ = lm.log_probs(ids)
    np.testing.assert_allclose(run(tokens=ids)["log_probs"], expected, atol=2e-5)
    with raises_parameter("length"):
        export_portable(lm, tmp_path / "other", format=format, length=9)


@pytest.mark.usefixtures("simplified")
def test_an_encoder_decoder(tmp_path, format):
    make_encoder_decoder(tmp_path / "run")
    model, vocabs = txl_tf.load_run(tmp_path / "run")
    folder = tmp_path / "out"
    run = runner(export_portable(model, folder, vocabs, format=format, batch_size=BATCH, length=4, source_length=6))
    source, target = (
        np.array([[3, 4, 5, 2, 0, 0], [4, 2, 0, 0, 0, 0]], np.int32),
        np.array([[1, 3, 0, 0], [1, 5, 4, 3]]),
    )
    target = target.astype(np.int32)
    found = run(source=source, target=target)
    check_names(folder, found)
    expected = tf.nn.log_softmax(model((source, target)))
    seen = target != 0
    np.testing.assert_allclose(found["log_probs"][seen], expected[seen], atol=2e-5)
    assert (folder / "source_vocab.txt").exists() and (folder / "target_vocab.txt").exists()


@pytest.mark.usefixtures("simplified")
def test_taggers_have_the_best_paths_of_their_crf(tmp_path, format):
    make_tagger(tmp_path / "tener")
    make_flat(tmp_path / "flat")
    inputs = {
        "tener": {
            "chars": np.array([[2, 3, 4, 0, 0], [4, 3, 2, 2, 3]]), "bigrams": np.array([[2, 1, 3, 0, 0], [1] * 5]),
        },
        "flat": {
            "lattice": np.array([[2, 3, 4, 5, 0, 0, 0, 0, 0, 0]] * BATCH),
            "bigrams": np.array([[2, 1, 1, 0, 0]] * BATCH),
            "seq_len": np.array([3, 3]), "lex_num": np.array([1, 1]),
            "pos_s": np.array([[0, 1, 2, 1, 0, 0, 0, 0, 0, 0]] * BATCH),
            "pos_e": np.array([[0, 1, 2, 2, 0, 0, 0, 0, 0, 0]] * BATCH),
        },
    }  # fmt: skip
    if format == "tflite":
        with raises_parameter("format"):
            export_portable(txl_tf.load_run(tmp_path / "flat")[0], tmp_path / "out", format=format)
        del inputs["flat"]
    if format == "tflite" and too_old("tensorflow", (2, 20), ""):
        with raises_parameter("format", "tflite", ["onnx"]):
            export_portable(txl_tf.load_run(tmp_path / "tener")[0], tmp_path / "out", format=format)
        return
    for name, arrays in inputs.items():
        tagger, vocabs = txl_tf.load_run(tmp_path / name)
        folder = tmp_path / f"{name}-out"
        run = runner(export_portable(tagger, folder, vocabs, format=format, batch_size=BATCH, length=LENGTH))
        assert json.loads((folder / "model.json").read_text())["labels"] == tagger.labels
        arrays = {key: array.astype(np.int32) for key, array in arrays.items()}
        found = run(**arrays)
        check_names(folder, found)
        with eagerly():
            tags, score = tagger.decode(arrays)
        np.testing.assert_array_equal(found["tags"][:, : tags.shape[1]], tags)
        np.testing.assert_allclose(found["score"], score, rtol=1e-5)


def test_best_path_is_the_viterbi_algorithm_without_loops():
    rng = np.random.default_rng(0)
    emissions, transitions = rng.normal(size=[4, 6, 3]).astype(np.float32), rng.normal(size=[3, 3]).astype(np.float32)
    start, end = rng.normal(size=[2, 3]).astype(np.float32)
    mask = np.arange(6) < np.array([6, 4, 1, 0])[:, None]
    for found, expected in zip(
        *(f(emissions, mask, transitions, start, end) for f in (crf_decode_unrolled, crf_decode)), strict=True
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_wrong_arguments_are_named(tmp_path):
    lm = txl_tf.TransformerXLLM(**SMALL, mem_len=4)
    for name, options in {"format": {"format": "pb"}, "batch_size": {"batch_size": 0}, "length": {"length": 0},
                          "vocab": {"vocab": Vocab("byte")},
                          "source_length": {"source_length": 3}}.items():  # fmt: skip
        with raises_parameter(name):
            export_portable(lm, tmp_path / "out", **{"format": "tflite", **options})
    half = txl_tf.TransformerXLLM(**SMALL, mem_len=4, dtype="mixed_bfloat16")
    with raises_parameter("dtype"):
        export_portable(half, tmp_path / "out", format="tflite")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with raises_parameter("directory"):
        export_portable(lm, tmp_path / "full", format="tflite")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("exists", [False, True])
def test_an_error_leaves_the_folder_as_it_was(tmp_path, monkeypatch, exists):
    lm, out = txl_tf.TransformerXLLM(**SMALL, mem_len=4), tmp_path / "out"
    if exists:
        out.mkdir()
    monkeypatch.setattr(portable, "to_tflite", lambda model: (b"model", {}))
    with monkeypatch.context() as full:

        def write_json(*_):
            raise OSError("no space left")

        full.setattr(portable, "write_json", write_json)
        with pytest.raises(OSError):
            export_portable(lm, out, word_vocab(), format="tflite")
    assert out.exists() == exists and [*tmp_path.rglob("*")] == [out][:exists]
    path = export_portable(lm, out, word_vocab(), format="tflite")
    assert path == str(out / "model.tflite") and (out / "model.tflite").read_bytes() == b"model"
    assert {file.name for file in out.iterdir()} == {"model.tflite", "model.json", "vocab.txt"}
    assert [*tmp_path.iterdir()] == [out]


def test_the_program_refuses_flags_of_the_other_format(tmp_path):
    for tool in program("tools/export_saved_model.py"):
        base = [f"--model_dir={tmp_path}", f"--output={tmp_path / 'out'}"]
        with raises_parameter("length"):
            run_here(tool, *base, "--length=3")
        with raises_parameter("version"):
            run_here(tool, *base, "--format=tflite", "--version=2")
