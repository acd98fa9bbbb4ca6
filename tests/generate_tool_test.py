"""The program that continues a text."""

import io
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import SMALL, program, randomise, run_program, word_vocab

import txl_tf
from txl_tf.data.vocabulary import Vocab
from txl_tf.runs.folder import RunFolder


@pytest.fixture(scope="module")
def tool():
    yield from program("tools/generate.py")


def make_run(folder, vocab):
    model = {**SMALL, "n_token": len(vocab), "mem_len": 4}
    lm = txl_tf.TransformerXLLM(**model)
    randomise(lm)
    RunFolder(folder).create({"dataset": "text"}, model, [vocab], lm, step=1)
    return lm


@pytest.fixture(scope="module")
def word_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "words"
    vocab = word_vocab()
    return folder, vocab, make_run(folder, vocab)


def test_text_comes_after_the_prompt_with_its_nll(word_run):
    folder, vocab, lm = word_run
    arguments = [f"--model_dir={folder}", "--greedy", "--max_new_tokens=6", "--verbose"]
    result = run_program("tools/generate.py", *arguments, input="w3 unheard-of\nw5\n")
    assert result.returncode == 0, result.stderr
    lines = [line.split("\t") for line in result.stdout.splitlines()]
    prompt = vocab.encode("w3 unheard-of\nw5")
    ids = np.array([[vocab.ids[symbol] for symbol, _ in lines]])
    np.testing.assert_array_equal(ids[0, :4], prompt)
    log_probs, mems = lm.log_probs(ids[:, :4])
    log_probs = list(log_probs[0].numpy())
    for i in range(4, 9):
        after, mems = lm.log_probs(ids[:, i : i + 1], mems)
        log_probs.append(after[0, 0].numpy())
    nll = [-after[i] for after, i in zip(log_probs, ids[0, 1:], strict=True)]
    np.testing.assert_allclose([float(value) for _, value in lines[1:]], nll, atol=1e-4)
    assert "6 tokens" in result.stderr


def test_streamed_words_and_bytes_make_the_whole_text(tool):
    vocab = Vocab(special=["<eos>", "a", "b"], eos="<eos>")
    vocab.build()
    stream, ids = tool.TextStream(vocab), [1, 2, 0, 1, 0, 0, 2, 1]
    assert "".join(stream.push(ids[i : i + 2]) for i in range(0, 8, 2)) + stream.end() == vocab.decode(ids)

    vocab = Vocab(level="byte")
    vocab.build()
    stream, text = tool.TextStream(vocab), "naïve 日本".encode()
    pieces = [stream.push([byte]) for byte in text[:-1]]
    assert "".join(pieces) == "naïve 日" and "" in pieces
    assert stream.end() == "\ufffd"


def test_lines_are_answered_in_one_memory_and_bad_ones_refused(tool, tmp_path, monkeypatch, capsys):
    vocab = Vocab(level="char", special=["\n", *"abcd"])
    vocab.build()
    lm = make_run(tmp_path / "run", vocab)
    tool.FLAGS(["generate.py", f"--model_dir={tmp_path / 'run'}", "--interactive", "--greedy", "--max_new_tokens=5"])
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"ab\nzz\ncd\n")))
    tool.main()
    out, err = capsys.readouterr()
    assert "'z' is not in the vocabulary" in err

    answers, mems = "", None
    for line in ("ab\n", "cd\n"):
        tokens = vocab.encode(line)[None]
        for _ in range(5):
            log_probs, mems = lm.log_probs(tokens, mems)
            tokens = np.argmax(log_probs[:, -1:], -1)
            answers += vocab.decode(tokens)
        _, mems = lm.log_probs(tokens, mems)
        answers += "\n"
    assert out == answers


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--prompt="], "prompt is empty"),
        (["--prompt=w1", "--top_p=0"], "top_p must lie in (0, 1], got 0.0"),
        (["--prompt=w1", "--stop=w99"], "stop 'w99' is not in the vocabulary"),
        (["--prompt=w1", "--prompt_file=x"], "exclude each other"),
        (["--prompt_file=no-such-file"], "no-such-file"),
    ],
    ids=str,
)
def test_bad_input_is_one_clear_error(tool, word_run, arguments, message):
    tool.FLAGS.unparse_flags()
    for name in tool.FLAGS.get_key_flags_for_module(tool):
        name.unparse()
    tool.FLAGS(["generate.py", f"--model_dir={word_run[0]}", *arguments])
    with pytest.raises((ValueError, OSError), match=re.escape(message)):
        tool.main()
