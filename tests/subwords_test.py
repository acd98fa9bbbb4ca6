"""Subwords: every text comes back, training is bounded and repeatable, and every program knows them."""

import contextlib
import importlib.util
import io
import json
import math
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import tensorflow as tf
from helpers import mentions, program, raises_naming, raises_parameter, run_program, train_run, write_text

from txl_tf.config import EvaluationConfig
from txl_tf.data.subwords import Sample, SubwordVocab, train_subwords, training_lines
from txl_tf.data.text import corpus
from txl_tf.data.text.datasets import choose_cutoffs
from txl_tf.data.text_files import pydoc_text, read_files
from txl_tf.errors import visible
from txl_tf.language.constraint import Constraint
from txl_tf.language.generation import generate
from txl_tf.runs.evaluate import evaluate_run
from txl_tf.runs.folder import RunFolder, load_run
from txl_tf.runs.scoring import score_lines
from txl_tf.serving import export
from txl_tf.serving.subwords import SubwordTokenizer

needs_tensorflow_text = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow_text") is None, reason="tensorflow-text, an extra, is not installed"
)
HOSTILE = [
    "", " ", "  two  spaces ", "\n", "\n\n x\r\n", "tab\there", "\u2581", "a\u2581\u2581 b\n\u2581", "\x00\x01",
    "</s>" * 3, "<unk> <s></s><0x41>", "\u2585 \u2047 \ufeff \ufffd", "日本語 🎉🇦🇹 e\u0301 \u00a0\u200b\u2028", "ﬁ Ⅳ",
    "½ Å", "\U0010ffff",
]  # fmt: skip


def made_up_texts(number=300):
    """Strings of all kinds of characters, those that SentencePiece treats specially among them."""
    rng = random.Random(0)
    special = [0, 9, 10, 13, 32, 32, 32, 0x2581, 0x2585, 0x2047, 0xFEFF, 0xA0, 0x200B, 0x301, 0x1F1E6]
    ranges = [(0x20, 0x7F), (0, 0x300), (0x2000, 0x2600), (0x10000, 0x11000)]

    def character():
        kind = rng.randrange(len(ranges) + 1)
        return chr(rng.choice(special) if kind == len(ranges) else rng.randrange(*ranges[kind]))

    return ["".join(character() for _ in range(rng.randrange(30))) for _ in range(number)]


SLOW = pytest.mark.slow


@pytest.fixture(scope="module", params=[pytest.param("unigram", marks=SLOW), "bpe"])
def vocab(request):
    made = train_subwords([pydoc_text()[:100_000]], 600, request.param)
    made.kind = request.param
    return made


def foreign_model(**options):
    """A model as other programs train them, with a space before every text."""
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(pydoc_text()[:30_000].split("\n")), model_writer=written, vocab_size=400, minloglevel=2,
        **options,
    )  # fmt: skip
    return written.getvalue()


# --------------------------------------------------------------------------------------------------- text <-> ids


def test_a_constraint_writes_no_names_of_pieces(vocab):
    pytest.importorskip("outlines_core")
    stop = vocab.ids["\u2581the"]  # any token
    constraint = Constraint(vocab, regex=r".+", stop_token=stop)
    written = {i for state in constraint.table for i in np.flatnonzero(np.asarray(state) >= 0)}
    assert vocab.named_ids == {0, 1} and not written & {0, 1} and len(written) > 256


def test_every_text_comes_back_as_it_was(vocab):
    for text in [*HOSTILE, *made_up_texts()]:
        ids = vocab.encode(text)
        assert ids.dtype == np.int32 and vocab.decode(ids) == text
        assert 0 not in ids and 1 not in ids  # neither unknown nor the end of a document
        assert b"".join(vocab.token_bytes[i] for i in ids) == text.encode()


def test_half_of_a_surrogate_pair_is_no_text(vocab):
    for read in (vocab.encode, vocab.count):
        with raises_parameter("texts", "a\ud83d"):
            read("a\ud83d")


def test_pieces_are_sentencepieces_own(vocab):
    line = "The import statement combines two operations"
    assert vocab.encode(line).tolist() == vocab.processor.encode(line)
    assert [vocab.symbols[i] for i in vocab.encode("\n\u2581")] == ["<0x0A>", "<0xE2>", "<0x96>", "<0x81>"]
    assert len(vocab.encode(line)) < 0.6 * len(line)


def test_a_text_in_pieces_is_encoded_as_the_whole(vocab, tmp_path, monkeypatch):
    text = "".join(f"{word}\n{word} \u2581 x  " for word in made_up_texts(50))
    monkeypatch.setattr("txl_tf.data.text_files.BLOCK_BYTES", 64)
    path = write_text(tmp_path / "a.txt", text.replace("\0", ""))
    pieces = list(read_files([path], "subword"))
    assert len(pieces) > 20 and "".join(pieces) == text.replace("\0", "")
    np.testing.assert_array_equal(vocab.encode(pieces), vocab.encode(text.replace("\0", "")))
    assert vocab.count(pieces) == len(vocab.encode(pieces)) == sum(vocab.counter.values())


def test_half_a_character_becomes_a_replacement_and_a_bad_id_an_error(vocab):
    ids = vocab.encode("日")
    assert vocab.decode(ids[:2]) == "\ufffd" and vocab.decode(ids) == "日"
    with raises_parameter("ids", 600):
        vocab.decode([600])


def test_a_text_is_cut_before_a_token(vocab):
    text = "ein Wörtchen\n日本\u2581"
    ids = vocab.encode(text)
    for k in range(len(ids) + 1):
        before, after = vocab.split(text, ids, k)
        assert before + after == text.encode()
        assert before == b"".join(vocab.token_bytes[i] for i in ids[:k])


def test_a_text_is_cut_without_the_spaces_that_a_model_adds(tmp_path):
    path = write_text(tmp_path / "own.model", foreign_model(byte_fallback=True))
    vocab = SubwordVocab.load(path, level="subword")
    text = "The import statement\n\nsays so\nThe end\n"
    ids = vocab.encode(text)
    for k in range(len(ids) + 1):
        before, after = vocab.split(text, ids, k)
        assert before + after == text.encode() and before.decode() == vocab.decode(ids[:k])
    text = "two  spaces \u2460\n" * 3 + "The end\n"  # the model joins the spaces, and makes a 1 of the circled one
    ids = vocab.encode(text)
    before, after = vocab.split(text, ids, len(ids) - len(vocab.encode("The end\n")))
    assert (before, after) == (text.encode()[: -len("The end\n")], b"The end\n")


# ------------------------------------------------------------------------------------------------------- training


def test_training_again_makes_the_same_model(vocab):
    again = train_subwords([pydoc_text()[:100_000]], 600, vocab.kind)
    assert again.model == vocab.model and again.fingerprint() == vocab.fingerprint()


def test_frequent_pieces_come_first_and_texts_are_cut_as_sentencepiece_would(vocab, monkeypatch):
    text = pydoc_text()[:100_000]
    vocab.counter.clear()
    vocab.count(text)
    counts = [vocab.counter[symbol] for symbol in vocab.symbols[2:]]
    counts_of_lines = sorted(counts, reverse=True)
    assert np.corrcoef(counts, counts_of_lines)[0, 1] > 0.98  # the training's lines are cut at other places, a few
    monkeypatch.setattr("txl_tf.data.subwords._by_frequency", lambda vocab: vocab.model)
    as_trained = train_subwords([text], 600, vocab.kind)
    assert sorted(as_trained.symbols) == sorted(vocab.symbols) and as_trained.symbols != vocab.symbols
    texts = [*HOSTILE, *made_up_texts(100), text[:5000]]
    for text in texts:
        expected = [as_trained.symbols[i] for i in as_trained.encode(text)]
        assert [vocab.symbols[i] for i in vocab.encode(text)] == expected


def test_cutoffs_are_chosen_from_the_counts_as_those_of_words(vocab, monkeypatch):
    monkeypatch.setattr("txl_tf.data.text.datasets.FEWEST_WITH_BINS", 500)
    monkeypatch.setattr("txl_tf.data.text.datasets.WHOLE", 10)
    vocab.counter.clear()
    vocab.count(pydoc_text()[:100_000])
    cutoffs = choose_cutoffs(vocab)
    counts = np.array([vocab.counter[symbol] for symbol in vocab.symbols])
    shares = [counts[:cutoff].sum() / counts.sum() for cutoff in cutoffs]
    assert len(cutoffs) == 3 and all(cutoff % 10 == 0 for cutoff in cutoffs)
    for cutoff, share, wanted in zip(cutoffs, shares, (0.90, 0.95, 0.99), strict=True):
        assert share >= wanted > counts[: cutoff - 10].sum() / counts.sum()


def test_lines_for_training_are_never_skipped():
    lines = list(training_lines(["a\tb\u2581c\u2585d\n\n" + "x y " * 1000, "é" * 5000]))
    assert lines[:4] == ["a", "b", "c", "d"] and "".join(lines[4:]) == "x y " * 1000 + "é" * 5000
    assert max(len(line.encode()) for line in lines) <= 4192


def test_a_large_text_is_sampled_from_all_over_it(monkeypatch):
    lines = [f"{i:09}" for i in range(10_000)]
    monkeypatch.setattr("txl_tf.data.subwords.SAMPLE_BYTES", 9_000)
    kept = Sample.of(iter(lines)).lines
    assert 300 < len(kept) <= 1000 and kept == Sample.of(iter(lines)).lines
    counts, _ = np.histogram([int(line) for line in kept], bins=5, range=(0, 10_000))
    assert counts.min() > len(kept) / 10
    monkeypatch.setattr("txl_tf.data.subwords.SAMPLE_BYTES", 90_000)
    assert Sample.of(lines).lines == lines


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_a_size_that_the_text_does_not_allow_is_an_error_that_says_what_it_allows(kind):
    texts = [pydoc_text()[:5000]]
    with raises_parameter("vocab_size", 100000) as error:
        train_subwords(texts, 100_000, kind)
    most = int(re.findall(r"\d+", error.value.allowed)[-1])
    assert len(train_subwords(texts, most, kind)) == most
    with raises_parameter("vocab_size", 20) as error:
        train_subwords(texts, 20, kind)
    least = int(re.findall(r"\d+", error.value.allowed)[0])
    assert len(train_subwords(texts, least, kind)) == least
    with raises_parameter("vocab_size", 300):
        train_subwords([""], 300, kind)


# ----------------------------------------------------------------------------------------------- models and files


def test_a_model_of_another_program_is_taken_as_it_is(tmp_path):
    path = write_text(tmp_path / "own.model", foreign_model(byte_fallback=True))
    vocab = SubwordVocab.load(path, level="subword")
    text = "The import statement\n\nsays é\n"
    assert vocab.adds_space and vocab.decode(vocab.encode(text)) == text
    assert vocab.encode("The").tolist() == vocab.processor.encode("The")
    plain = write_text(tmp_path / "plain.model", foreign_model())
    vocab = SubwordVocab.load(plain, level="subword")
    assert vocab.separators == {} and vocab.decode(vocab.encode("The import ☃")) == "The import  \u2047 "
    with raises_parameter(f"{tmp_path}/no.model", None):
        path = write_text(tmp_path / "no.model", foreign_model(eos_id=-1))
        SubwordVocab.load(path, level="subword", document="</s>")


@pytest.mark.parametrize("data", [b"", b"garbage", b"\0" * 100, b"a\nb\n" * 500, "cut"])
def test_a_file_that_is_no_model_is_named(tmp_path, data):
    data = foreign_model()[:-3] if data == "cut" else data
    path = write_text(tmp_path / "x.model", data)
    with raises_parameter(f"{tmp_path}/x.model", None):
        corpus.build_corpus("text", write_text(tmp_path / "a.txt", "abc"), level="subword", vocab_path=path)
    with raises_naming(FileNotFoundError, "nowhere.model"):
        SubwordVocab.load("nowhere.model", level="subword")


def test_without_sentencepiece_there_is_one_clear_error(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with raises_parameter("level", "subword"):
        corpus.build_corpus("text", write_text(tmp_path / "a.txt", "abc " * 100), level="subword", vocab_size=300)


def test_a_prepared_folder_keeps_the_model(tmp_path):
    text = pydoc_text()[:40_000]
    path = write_text(tmp_path / "a.txt", text)
    options = {"level": "subword", "vocab_size": 400, "valid_fraction": 0.1}
    made = corpus.prepare(str(tmp_path / "made"), "text", path, **options)
    info = json.loads((tmp_path / "made" / "corpus-info.json").read_text())
    assert (tmp_path / "made" / "vocab.model").read_bytes() == made.vocab.model and "vocab.model" in info["sha256"]
    assert info["options"]["vocab_size"] == 400 and made.cutoffs == [] and not made.by_character
    decoded = [made.vocab.decode(made.splits[split]) for split in ("train", "valid")]
    assert "".join(decoded) == text
    assert [size.bytes for size in made.sizes.values()] == [len(part.encode()) for part in decoded]
    given = corpus.build_corpus("text", path, level="subword", vocab_path=str(tmp_path / "made" / "vocab.model"))
    assert given.vocab.difference(made.vocab) is None
    other = train_subwords([text[:20_000]], 400)
    assert "token" in other.difference(made.vocab)


def test_documents_end_with_the_models_own_symbol():
    vocab = train_subwords(["a b c d e f g"], 270, "bpe", document="</s>")
    assert vocab.document_id == vocab.start_id == 1
    assert vocab.decode(vocab.encode("a </s> b")) == "a </s> b" and 1 not in vocab.encode("</s>")


# -------------------------------------------------------------------------------------------------- every program


OPTIONS = {
    "data": {"level": "subword", "vocab_size": 400},
    "model": {"dropout": 0.0, "dropatt": 0.0},
    "evaluation": {"max_eval_batch": 5},  # all of one length, so that there is one graph
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of subwords, `(folder, text)`."""
    folder = tmp_path_factory.mktemp("subwords")
    text = write_text(folder / "text.txt", pydoc_text()[:30_000])
    train_run(folder / "run", text, **OPTIONS)
    return folder / "run", text


@pytest.mark.slow
def test_a_run_resumes_with_its_vocabulary_and_is_evaluated_by_the_byte(run, tmp_path, capsys):
    folder, text = run
    lm, vocab = load_run(str(folder))
    assert isinstance(vocab, SubwordVocab) and len(vocab) == lm.network.n_token == 400
    other = write_text(tmp_path / "other.txt", "The import statement, 日本 and so on.\n" * 40)
    nll_file = tmp_path / "nll.txt"
    evaluation = EvaluationConfig(eval_path=other, eval_batch_size=2, token_nll=str(nll_file))
    (nll,) = evaluate_run(str(folder), evaluation=evaluation).values()
    found = capsys.readouterr().out
    n_tokens, size = len(vocab.encode(Path(other).read_text())), len(Path(other).read_bytes())
    assert mentions(found, f"{nll * n_tokens / size / math.log(2):.4f}")
    assert "| ppl " in found and "| ppl per word " in found
    lines = [line.split("\t") for line in nll_file.read_text().splitlines()]
    assert {"▁", "<0xE6>", "<0x0A>"} <= {symbol for symbol, _ in lines}
    assert np.mean([float(value) for _, value in lines]) == pytest.approx(nll, abs=1e-5)

    train_run(folder, text, **OPTIONS)  # evaluates, for it is trained
    assert f"{folder}/ckpt-" in capsys.readouterr().out
    with raises_naming(ValueError, 399):
        train_run(folder, text, **{**OPTIONS, "data": {"level": "subword", "vocab_size": 399}})


@pytest.mark.slow
def test_a_run_trains_on(run, tmp_path, capsys):
    folder = shutil.copytree(run[0], tmp_path / "run")
    train_run(folder, run[1], **OPTIONS, training={"train_steps": 15})
    assert f"{folder}/ckpt-" in capsys.readouterr().out


@pytest.mark.slow
def test_one_command_goes_from_a_text_to_its_first_step(tmp_path):
    text = write_text(tmp_path / "text.txt", pydoc_text()[:20_000])
    sizes = "--n_layer=1 --d_model=16 --d_embed=16 --n_head=2 --d_head=8 --d_inner=16 --mem_len=8 --tgt_len=8"
    steps = "--train_batch_size=2 --train_steps=1 --iterations=1"
    done = run_program(
        "train.py", f"--data_path={text}", "--level=subword", "--vocab_size=350", "--subword_type=bpe",
        f"--model_dir={tmp_path / 'run'}", *sizes.split(), *steps.split(),
    )  # fmt: skip
    assert "text: 350 symbols" in done.stdout and "step 1/1" in done.stdout and "bits per byte" in done.stdout


@needs_tensorflow_text
def test_the_graph_cuts_and_joins_as_the_vocabulary_does(vocab, tmp_path):
    vocab.save(tmp_path / "vocab.model")
    table = SubwordTokenizer(vocab, str(tmp_path / "vocab.model"))
    texts = [*HOSTILE, *made_up_texts()]
    ids = tf.function(table.encode, autograph=False)(tf.constant(texts))
    assert ids.to_list() == [vocab.encode(text).tolist() for text in texts]
    decode = tf.function(table.decode, autograph=False)
    decoded = decode(ids.to_tensor(0), tf.cast(ids.row_lengths(), tf.int32))
    assert [text.decode() for text in decoded.numpy()] == texts
    rows = np.random.default_rng(0).integers(1, 300, [300, 20])  # bytes that are no text, most of them
    decoded = table.decode(tf.constant(rows, tf.int32), tf.fill([300], 20))
    assert [text.decode() for text in decoded.numpy()] == [vocab.decode(row) for row in rows]
    assert table.spell(tf.constant([[58]])).numpy()[0, 0].decode() == vocab.symbols[58]


STRANGER = """
import sys
sys.modules["txl_tf"] = None
import json
import tensorflow as tf
import tensorflow_text
serve = tf.saved_model.load(sys.argv[1]).signatures
texts = json.loads(sys.argv[2])
scored = serve["score_text"](text=tf.constant(texts))
n = len(texts)
sampling = {"max_new_tokens": [12] * n, "temperature": [0.8] * n, "top_k": [0] * n, "top_p": [1.0] * n}
names = serve["generate_text"].structured_input_signature[1]
given = {name: tf.constant(value, names[name].dtype) for name, value in {**sampling, "seed": list(range(n))}.items()}
neutral = {"repetition_penalty": 1.0, "num_return_sequences": 1, "repetition_window": 64}
for name, spec in names.items():
    if name not in given and name != "text":
        shape = [n] + [0] * (spec.shape.rank - 1)
        given[name] = tf.fill(shape, tf.constant(neutral.get(name, "" if spec.dtype == tf.string else 0), spec.dtype))
if sys.argv[3]:
    given["stop"] = tf.constant([[sys.argv[3]]] * n)
written = serve["generate_text"](text=tf.constant(texts), **given)["text"]
print(json.dumps({"nll": scored["nll"].numpy().tolist(), "text": [text.decode() for text in written.numpy()],
                  "symbols": [[s.decode() for s in row] for row in scored["symbols"].numpy()]}))
"""


@pytest.mark.slow
@needs_tensorflow_text
def test_a_served_model_takes_and_gives_text_where_the_library_is_not(run, tmp_path, capsys):
    lm, vocab = load_run(str(run[0]))
    export.export_saved_model(lm, str(tmp_path / "served"), vocab)
    assert (tmp_path / "served" / "assets" / "vocab.model").read_bytes() == vocab.model
    said = capsys.readouterr().out
    assert mentions(said, tmp_path / "served", "tensorflow_text")
    code = STRANGER.replace("import tensorflow_text\n", "")
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "served")], capture_output=True, text=True)
    assert done.returncode and "Op type not registered 'SentencepieceOp'" in done.stderr  # docs/serving.md has it
    texts = ["The import statement\n", "日本 \u2581 x"]
    whole = generate(lm, vocab.encode(texts[0])[None], 12, temperature=0.8, seed=0)[0]
    written = vocab.decode(whole)[len(texts[0]) :].replace("\ufffd", "?")
    stop = written[2:5]  # which begins and ends within pieces
    done = subprocess.run(
        [sys.executable, "-c", STRANGER, str(tmp_path / "served"), json.dumps(texts), stop],
        capture_output=True, text=True, cwd=tmp_path, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    for row, text in enumerate(texts):
        ids = vocab.encode(text)
        nll, _ = lm.score(ids[None, :-1], ids[None, 1:])
        np.testing.assert_allclose(found["nll"][row][1 : len(ids)], nll[0], rtol=1e-5)
        assert found["symbols"][row][: len(ids)] == [vocab.symbols[i] for i in ids]
        expected = vocab.decode(generate(lm, ids[None], 12, temperature=0.8, seed=row)[0])
        end = expected.find(stop, len(text))
        assert found["text"][row] == (expected if end < 0 else expected[: end + len(stop)])
    assert found["text"][0].endswith(stop) and len(found["text"][0]) == len(texts[0]) + written.find(stop) + len(stop)


@pytest.mark.slow
def test_without_tensorflow_text_the_model_has_signatures_of_ids_alone_and_that_is_said(
    run, tmp_path, monkeypatch, capsys
):
    lm, vocab = load_run(str(run[0]))
    monkeypatch.setattr(export, "has_tensorflow_text", lambda: False)
    written = []
    monkeypatch.setattr(export, "_write", lambda *args: written.append(args))
    export.export_saved_model(lm, "served", vocab)
    assert mentions(capsys.readouterr().out, "served", "tensorflow-text")
    ((make, directory, _),) = written
    assert directory == "served"
    signatures = make(str(tmp_path)).signatures()
    assert not list(tmp_path.iterdir())
    assert "score" in signatures and "score_text" not in signatures

    monkeypatch.setattr(export, "has_tensorflow_text", lambda: True)
    export.export_saved_model(lm, "served", vocab)
    assert mentions(capsys.readouterr().out, "served", "tensorflow_text")


@pytest.mark.slow
def test_without_tensorflow_text_the_model_is_served_for_ids_and_that_is_said(run, tmp_path, monkeypatch, capsys):
    lm, vocab = load_run(str(run[0]))
    monkeypatch.setattr(export, "has_tensorflow_text", lambda: False)
    export.export_saved_model(lm, str(tmp_path / "served"), vocab)
    assert mentions(capsys.readouterr().out, "served", "tensorflow-text")
    signatures = tf.saved_model.load(str(tmp_path / "served")).signatures
    assert "score" in signatures and "score_text" not in signatures


@pytest.mark.slow
def test_lines_are_scored_in_pieces(run):
    lm, vocab = load_run(str(run[0]))
    lines = ["The import statement", "日本 \u2581 x", "", "a  b"]
    for line, score in zip(lines, score_lines(lm, vocab, lines), strict=True):
        ids = vocab.encode(f"\n{line}\n")
        nll, _ = lm.score(ids[None, :-1], ids[None, 1:])
        assert score.nll == pytest.approx(float(np.sum(nll)), rel=1e-5)
        assert score.tokens == len(ids) - 1 and score.bytes == len(line.encode()) + 1


@pytest.mark.slow
def test_the_program_continues_a_text(run, monkeypatch, capsys):
    lm, vocab = load_run(str(run[0]))
    text = generate(lm, vocab.encode("The import ")[None], 20, seed=1)[0]
    monkeypatch.setattr(RunFolder, "load_model", lambda *args: lm)
    with contextlib.closing(program("tools/generate.py")) as loaded:
        tool = next(loaded)
        flags = f"--model_dir={run[0]}", "--prompt=The import ", "--max_new_tokens=20", "--seed=1"
        tool.FLAGS(["generate.py", *flags])
        tool.main()
    assert capsys.readouterr().out == visible(vocab.decode(text)) + "\n"


@pytest.mark.slow
def test_the_programs_continue_a_text(run):
    lm, vocab = load_run(str(run[0]))
    text = generate(lm, vocab.encode("The import ")[None], 20, seed=1)[0]
    done = run_program(
        "tools/generate.py", f"--model_dir={run[0]}", "--prompt=The import ", "--max_new_tokens=20", "--seed=1"
    )
    assert done.stdout == visible(vocab.decode(text)) + "\n"
