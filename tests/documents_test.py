"""Documents in a new order every epoch: all are read, none is mixed, and a run goes on anywhere."""

import itertools
import json

import numpy as np
import pytest
from helpers import (
    SMALL,
    TINY_RUN,
    WatchedTokens,
    as_lists,
    assert_variables_equal,
    program,
    raises_naming,
    raises_parameter,
    randomise,
    read_checkpoint,
    run_program,
    train_run,
    write_text,
)

from txl_tf.config import EvaluationConfig, MachineConfig, OptimizerConfig, TrainingConfig, TransformerLMConfig
from txl_tf.data.text.batches import Segments
from txl_tf.data.text.corpus import build_corpus
from txl_tf.data.text.documents import DocumentOrder, Documents, document_ends
from txl_tf.data.token_files import StoredTokens
from txl_tf.errors import visible
from txl_tf.language.language_model import TransformerXLLM
from txl_tf.runs import train
from txl_tf.runs.evaluate import evaluate_run
from txl_tf.runs.families.language_model import LanguageModelRun
from txl_tf.runs.folder import RunFolder, load_run
from txl_tf.runs.scoring import score_lines

pytestmark = pytest.mark.ci

END = 0
TOKENS = np.array([1, 2, 0, 3, 0, 0, 4, 5, 6, 0, 7, 8], np.int32)  # the third document is empty, the last has no end
PARTS = [[1, 2, 0], [3, 0], [0], [4, 5, 6, 0], [7, 8]]


def test_documents_end_after_their_symbol_and_with_the_text():
    np.testing.assert_array_equal(document_ends(TOKENS, END), [3, 5, 6, 10, 12])
    np.testing.assert_array_equal(document_ends(TOKENS[:10], END), [3, 5, 6, 10])


def test_an_order_is_read_like_the_text_that_it_is():
    chosen = [3, 0, 4, 2, 1]
    text = np.concatenate([PARTS[i] for i in chosen])
    watched = WatchedTokens(TOKENS)
    for tokens in (TOKENS, StoredTokens([TOKENS[:4], TOKENS[4:]]), watched):
        order = DocumentOrder(tokens, document_ends(TOKENS, END), np.array(chosen))
        assert len(order) == len(text)
        for begin in range(len(text) + 1):
            for end in range(begin, len(text) + 2):
                np.testing.assert_array_equal(order[begin:end], text[begin:end])
    watched.reads[:] = 0
    np.testing.assert_array_equal(order[5:8], text[5:8])
    assert watched.reads.sum() == 3  # and no other token


def test_every_epoch_has_all_documents_in_an_order_of_its_own():
    documents = Documents(TOKENS, END, seed=3)
    orders = [tuple(documents.order(epoch)[:]) for epoch in range(20)]
    assert len(set(orders)) > 10
    for order in orders:
        ends = document_ends(np.array(order), END)  # the one without an end joins the next
        assert sorted(order) == sorted(TOKENS) and len(ends) in (4, 5)
    assert orders == [tuple(Documents(TOKENS, END, seed=3).order(epoch)[:]) for epoch in range(20)]
    assert orders != [tuple(Documents(TOKENS, END, seed=4).order(epoch)[:]) for epoch in range(20)]
    with raises_parameter("tokens", 1):
        Documents(TOKENS[:3], END, 0)


@pytest.mark.parametrize("drop_remainder", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_batches_are_those_of_each_epochs_text_wherever_they_begin(drop_remainder):
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 6, 203).astype(np.int32)
    options = {"batch_size": 4, "tgt_len": 7, "drop_remainder": drop_remainder}
    documents = Documents(tokens, END, seed=1)
    expected = []
    for epoch in range(3):
        expected += as_lists(Segments(documents.order(epoch)[:], **options).dataset())
    assert expected[: len(expected) // 3] != expected[len(expected) // 3 : 2 * len(expected) // 3]
    for start in (0, 7, 16):
        found = Segments(tokens, start=start, repeat=True, documents=documents, **options).dataset()
        assert as_lists(found.take(len(expected) - start)) == expected[start:]
        rows = Segments(tokens, start=start, repeat=True, documents=documents, **options).dataset(range(1, 3))
        expected_rows = [([row for row in batch[1:3]], [row for row in labels[1:3]]) for batch, labels in expected]
        assert as_lists(rows.take(len(expected) - start)) == expected_rows[start:]


def write_json_lines(folder):
    rng = np.random.default_rng(0)
    texts = ["".join(rng.choice(list("abcde \n"), rng.integers(5, 60))) for _ in range(40)]
    return write_text(folder / "texts.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in texts))


@pytest.fixture
def json_lines(tmp_path):
    return write_json_lines(tmp_path)


DATA = {"valid_fraction": 0.3}
TRAINING = {"shuffle_documents": True, "reset_memory_at_documents": True, "train_batch_size": 12, "save_steps": 12}
OPTIONS = {"data": DATA, "model": {"dropout": 0.0, "dropatt": 0.0}}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run that shuffles documents and starts each without memory: its folder, its text, its result."""
    folder = tmp_path_factory.mktemp("made")
    text = write_json_lines(folder)
    return folder / "run", text, train_run(folder / "run", text, training=TRAINING, **OPTIONS)


@pytest.mark.slow
def test_a_run_that_shuffles_goes_on_in_its_second_epoch_with_the_batches_of_the_uninterrupted_run(made):
    folder, text, _ = made
    corpus = build_corpus("text", text, **DATA)
    tokens, options = corpus.splits["train"], {"batch_size": 12, "tgt_len": 8}
    training = TrainingConfig(**{**TINY_RUN["training"], **TRAINING})
    run = LanguageModelRun(RunFolder(folder), None, {}, None, None, training, MachineConfig())
    run.corpus = corpus
    documents, expected = Documents(tokens, corpus.vocab.document_id, training.seed), []
    for epoch in (0, 1):
        expected += as_lists(Segments(documents.order(epoch)[:], **options).dataset())
    assert len(expected) // 2 < 12 < len(expected) and expected != 2 * expected[: len(expected) // 2]
    for start in (0, 12):
        assert as_lists(run.batches(start).dataset().take(len(expected) - start)) == expected[start:]
    in_order = {**TRAINING, "shuffle_documents": False}
    with raises_naming(ValueError, "training.shuffle_documents"):
        train_run(folder, text, training=in_order, **OPTIONS)


@pytest.mark.slow
def test_a_shuffled_run_resumes_bit_for_bit_in_its_second_epoch(tmp_path, json_lines):
    training = {"shuffle_documents": True, "train_steps": 60, "iterations": 20, "save_steps": 10, "max_to_keep": 9}
    result = train_run(tmp_path / "run", json_lines, training=training)
    whole = read_checkpoint(str(tmp_path / "run" / "ckpt-60"))
    for step in (50, 60):  # as if it had been killed after step 40; an epoch has 35 or so
        for file in (tmp_path / "run").glob(f"ckpt-{step}.*"):
            file.unlink()
    assert train_run(tmp_path / "run", json_lines, training=training) == result
    assert_variables_equal(read_checkpoint(str(tmp_path / "run" / "ckpt-60")), whole)

    other = {**training, "shuffle_documents": False}
    assert train_run(tmp_path / "other", json_lines, training=other) != result
    with raises_naming(ValueError, "training.shuffle_documents"):
        train_run(tmp_path / "run", json_lines, training=other)


@pytest.mark.parametrize("name", ["shuffle_documents", "reset_memory_at_documents"])
def test_documents_are_needed(tmp_path, name):
    path = write_text(tmp_path / "a.txt", "a b c d\n" * 100)
    with raises_parameter(name, True, "left out for a text without ends of documents"):
        train_run(tmp_path / "run", path, training={name: True})


@pytest.mark.slow
def test_a_run_starts_every_document_with_the_memory_of_a_new_text(made):
    """Its losses on the documents are those of the documents by themselves, in training's segments."""
    folder, text, result = made
    (nll,) = result.values()
    lm, vocab = load_run(str(folder))
    assert lm.network.reset_token == vocab.document_id
    tokens = build_corpus("text", text, **DATA).splits["valid"]
    rows = np.reshape(tokens[: len(tokens) // 2 * 2], [2, -1])
    total, count = 0.0, 0
    for row in rows:
        starts = np.flatnonzero(row[:-1] == vocab.document_id).tolist()
        for begin, end in itertools.pairwise(sorted({0, *starts, len(row) - 1})):
            mems, places = None, sorted({begin, *range((begin // 8 + 1) * 8, end, 8), end})
            for first, last in itertools.pairwise(places):
                found, mems = lm.score(row[None, first:last], row[None, first + 1 : last + 1], mems)
                total, count = total + float(np.sum(found)), count + last - first
    assert nll == pytest.approx(total / count, rel=1e-5)


@pytest.mark.parametrize("reset", [pytest.param(None, marks=pytest.mark.slow), False])
def test_an_evaluation_starts_documents_as_the_run_did_or_as_it_is_told(made, reset):
    folder, _, result = made
    evaluation = EvaluationConfig(eval_batch_size=2, tgt_len=8, reset_memory_at_documents=reset)
    found = evaluate_run(str(folder), evaluation=evaluation)
    assert (found == {"valid": pytest.approx(result["valid"], rel=1e-5)}) == (reset is None)


def test_a_model_without_memory_has_none_to_reset(tmp_path, json_lines):
    model = {name: value for name, value in TINY_RUN["model"].items() if name != "mem_len"}
    with raises_parameter("reset_memory_at_documents", True, "left out"):
        train.train_run(
            str(tmp_path / "run"),
            data={"dataset": "text", "data_path": json_lines},
            model=TransformerLMConfig(**model),
            optimizer=OptimizerConfig(**TINY_RUN["optimizer"]),
            training=TrainingConfig(**TINY_RUN["training"], reset_memory_at_documents=True),
        )


@pytest.fixture(scope="module")
def generate_tool():
    yield from program("tools/generate.py")


@pytest.mark.slow
def test_a_text_begins_with_a_document_and_ends_with_it(tmp_path, json_lines, generate_tool, capsys, monkeypatch):
    """In scores of lines and in generation, of a random model."""
    vocab = build_corpus("text", json_lines, level="char").vocab
    end, sizes = vocab.document_id, {**SMALL, "n_layer": 1, "n_token": len(vocab), "mem_len": 4}
    lm = TransformerXLLM(**sizes)
    randomise(lm)
    RunFolder(tmp_path / "run").create({"dataset": "text"}, sizes, [vocab], lm, step=1)
    (score,) = score_lines(lm, vocab, ["abc"], score_end=False)
    ids = vocab.encode("abc")
    nll, _ = lm.score([[end, *ids[:-1]]], [ids])
    assert score.nll == pytest.approx(float(np.sum(nll)), rel=1e-5)

    monkeypatch.setattr(RunFolder, "load_model", lambda *args: lm)  # whose graphs are made once
    assert generate_tool.encode_prompt(vocab, b"", "prompt").tolist() == [end]
    shown = []
    for more in ("--stop_at_document", "--nostop_at_document"):
        flags = [f"--model_dir={tmp_path / 'run'}", "--prompt=", "--max_new_tokens=100", "--seed=3", more]
        generate_tool.FLAGS.unparse_flags()
        generate_tool.FLAGS(["generate.py", *flags])
        generate_tool.main()
        shown.append(capsys.readouterr().out)
    first, whole = shown
    assert first.endswith("</s>\n") and whole == first[:-1] + whole[len(first) - 1 :] != first
    assert whole.count("</s>") > 1 == first.count("</s>")


@pytest.mark.slow
@pytest.mark.parametrize("level", ["char", "byte"])
def test_a_run_learns_where_documents_end(tmp_path, json_lines, level):
    """In scores of lines, in generation and in a served model."""
    folder = tmp_path / "run"
    train_run(folder, json_lines, data={"level": level}, training={"train_steps": 300, "iterations": 100})
    lm, vocab = load_run(str(folder))
    end = vocab.document_id
    (score,) = score_lines(lm, vocab, ["abc"], score_end=False)
    ids = vocab.encode("abc")
    nll, _ = lm.score([[end, *ids[:-1]]], [ids])
    assert score.nll == pytest.approx(float(np.sum(nll)), rel=1e-5)

    options = f"--model_dir={folder}", "--prompt=", "--max_new_tokens=400", "--seed=3"
    done = run_program("tools/generate.py", *options)
    text = lm.generate([[end]], 400, seed=3)[0, 1:]
    first = np.flatnonzero(np.asarray(text) == end)[0]  # it has learnt that documents end
    assert done.stdout == visible(vocab.decode(text[: first + 1])) + "\n" and done.stdout.endswith("</s>\n")
    whole = run_program("tools/generate.py", *options, "--nostop_at_document")
    assert whole.stdout == visible(vocab.decode(text)) + "\n"
