"""The program that scores lines of text."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest
from helpers import (
    ROOT,
    converse,
    full_disk,
    make_run,
    mentions,
    program,
    raises_naming,
    raises_parameter,
    run_here,
    word_vocab,
    write_text,
)

from txl_tf.data.vocabulary import Vocab
from txl_tf.runs.folder import RunFolder

LINES = ["w3 unheard-of", "", "w1\x85w2\u2028w4 \x01", "w5 " * 30, '"w6"\t\\', "w1 naïve 日本\r"]
TEXT = "\n".join(LINES).encode()  # without a newline at the end
pytestmark = pytest.mark.usefixtures("opened_once")


@pytest.fixture(scope="module")
def word_run(tmp_path_factory):
    folder, vocab = tmp_path_factory.mktemp("runs") / "words", word_vocab()
    return folder, vocab, make_run(folder, vocab, n_layer=1)


@pytest.fixture(scope="module")
def tool():
    yield from program("tools/score.py")


@pytest.fixture
def score_in_graphs(tool, word_run, tmp_path, capsysbinary):
    """Runs the program in this process on bytes; returns what it writes to the standard output, as bytes."""

    def run(*arguments, text=TEXT, model_dir=word_run[0], with_errors=None):
        (tmp_path / "input.txt").write_bytes(text)
        status = run_here(tool, f"--model_dir={model_dir}", f"--input={tmp_path / 'input.txt'}", *arguments)
        written = capsysbinary.readouterr()
        assert status == with_errors if isinstance(with_errors, int) else not status
        return written if with_errors is not None else written.out

    return run


@pytest.fixture
def score(eager, score_in_graphs):
    """The same without graphs, which takes less time for a few lines."""
    return score_in_graphs


@pytest.mark.parametrize("together", [False, True])
def test_a_model_of_bytes_reads_a_byte_order_mark(score, tmp_path, together):
    """In plain text, it is left out."""
    counts, of_bytes = [], Vocab(level="byte")
    of_bytes.build()
    for name, vocab in (("bytes", of_bytes), ("words", word_vocab(raw_text=False))):
        make_run(tmp_path / name, vocab, n_layer=1)
        text = "\ufeffw1\r\nw2\n".encode()
        options = {"model_dir": tmp_path / name, "text": text}
        if together:  # the input is a folder
            (tmp_path / "in").mkdir(exist_ok=True)
            (tmp_path / "in" / "a.txt").write_bytes(text)
            score(f"--input={tmp_path / 'in'}", f"--output={tmp_path / name}.out", "--columns=bytes", **options)
            found = (tmp_path / f"{name}.out" / "a.txt").read_text()
        else:
            found = score("--columns=bytes", **options).decode()
        counts.append([int(number) for number in found.split()])
    assert counts == [[7, 3], [3, 3]]  # with the newline


@pytest.mark.parametrize("lines, share", [("w1 zz w2\nw3 zz\n", "28.6%"), ("w1 w2\n" * 20 + "zz\n", None)])
def test_many_unknown_words_are_reported(score, lines, share):
    """2 of 7 tokens, with the ends of the lines; or 1 of 62."""
    err = score(text=lines.encode(), with_errors=0).err.decode()
    assert mentions(err, share, "<unk>") if share else "<unk>" not in err


def nll_of(lm, vocab, line):
    text = np.array([0, *vocab.encode(f"{line}\n")])[None]
    return lm.score(text[:, :-1], text[:, 1:])[0][0].numpy()


def test_a_line_of_output_for_every_line_of_input_in_order(score_in_graphs, word_run):
    score = score_in_graphs
    _, vocab, lm = word_run
    expected = [nll_of(lm, vocab, line) for line in LINES]
    nll = score().decode().split("\n")
    np.testing.assert_allclose([float(x) for x in nll[:-1]], [some.sum() for some in expected], rtol=1e-5, atol=1e-6)
    assert nll[-1] == ""

    rows = score("--columns=bytes,tokens,ppl,bpb,text").decode().removesuffix("\n").split("\n")
    for line, values, row in zip(LINES, expected, rows, strict=True):
        *numbers, text = row.split("\t", 4)
        size = len(f"{line}\n".encode())
        bits = values.sum() / math.log(2) / size
        np.testing.assert_allclose([float(x) for x in numbers], [size, len(values), np.exp(values.mean()), bits], 1e-4)
        assert text == line


def test_json_round_trips_with_every_token(score, word_run):
    _, vocab, lm = word_run
    without, rows = ([json.loads(row) for row in score(f"--format={kind}").splitlines()] for kind in ("json", "tokens"))
    for line, row, short in zip(LINES, rows, without, strict=True):
        values = nll_of(lm, vocab, line)
        symbols, nll = zip(*row.pop("token_nll"), strict=True)
        assert row == short and row["text"] == line and row["tokens"] == len(values)
        assert list(symbols) == [vocab.symbols[i] for i in vocab.encode(f"{line}\n")]
        np.testing.assert_allclose(nll, values, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(row["nll"], values.sum(), rtol=1e-5)
    empty = json.loads(score("--format=tokens", "--score_end=False", text=b"\n"))
    assert empty == {"text": "", "tokens": 0, "bytes": 0, "nll": 0.0, "ppl": None, "bpb": None, "token_nll": []}


def test_an_output_with_the_ending_of_a_compressed_file_is_refused(score, tmp_path):
    for name in ("nll.tsv.gz", "nll.ZIP"):
        with raises_parameter("output", str(tmp_path / name)):
            score(f"--output={tmp_path / name}")
        assert not (tmp_path / name).exists()


def test_bytes_come_out_as_they_went_in(score, tmp_path):
    vocab = Vocab(level="byte")
    vocab.build()
    make_run(tmp_path / "run", vocab, n_layer=1)
    lines = b"\xff\x00a\n\xc3\xa9\r\n\n"
    options = {"text": lines, "model_dir": tmp_path / "run"}
    assert score("--columns=text", **options) == lines
    rows = [json.loads(row) for row in score("--format=tokens", **options).splitlines()]
    visible = lines.replace(b"\xff", rb"\xff").decode()  # JSON cannot hold a byte that is no part of a character
    assert "\n".join(row["text"] for row in rows) + "\n" == visible


def test_a_file_is_written_whole_or_not_at_all(score, tmp_path):
    output = tmp_path / "output.tsv"
    expected = score()
    assert score(f"--output={output}") == b"" and output.read_bytes() == expected
    with full_disk(500), raises_naming(OSError, "output.tsv"):
        score(f"--output={output}", "--format=tokens")
    assert output.read_bytes() == expected


def test_the_input_is_not_written_over(score, tmp_path):
    (tmp_path / "link.txt").symlink_to(tmp_path / "input.txt")
    for name in ("input.txt", "link.txt"):
        with raises_parameter("output", str(tmp_path / name)):
            score(f"--output={tmp_path / name}")
        assert (tmp_path / "input.txt").read_bytes() == TEXT


def test_carried_memory_and_other_memory_change_the_scores(score, word_run):
    alone, carried, longer = (score(*options).split() for options in ([], ["--carry_memory"], ["--mem_len=9"]))
    assert alone[0] == carried[0] and not set(alone[1:]) & set(carried[1:])
    assert not set(alone) & set(longer)


def test_continuations_are_scored_after_their_contexts(score, word_run):
    _, vocab, lm = word_run
    lines = ["w3 w4\tw5", "w3 w4\tw6 w1"]
    expected = [nll_of(lm, vocab, line)[2:] for line in lines]
    found = score("--continuations", "--columns=nll,tokens,text", text="\n".join(lines).encode()).decode()
    for row, line, nll in zip(found.splitlines(), lines, expected, strict=True):
        number, tokens, text = row.split("\t", 2)
        assert (int(tokens), text) == (len(nll), line) and float(number) == pytest.approx(nll.sum(), rel=1e-5)


def test_a_vocabulary_without_newline_says_that_ends_do_not_count(score, tmp_path):
    vocab = Vocab(level="char", special=list("ab"))
    vocab.build()
    make_run(tmp_path / "run", vocab, n_layer=1)
    out, err = score("--columns=tokens", text=b"ab\na", model_dir=tmp_path / "run", with_errors=0)
    assert out == b"1\n0\n" and err.count(b"no symbol for the end of a line") == 1
    assert mentions(err, "latest", 1)


def test_a_line_that_cannot_be_scored_keeps_its_place(score, tmp_path):
    vocab = Vocab(level="char", special=list("\nab"))
    vocab.build()
    make_run(tmp_path / "run", vocab, n_layer=1)
    options = {"text": b"ab\na\xff\nb\xc3\xa9\n\n", "model_dir": tmp_path / "run"}
    first, *_, last = score("--columns=nll,text", text=b"ab\n\n", model_dir=tmp_path / "run").split(b"\n")[:-1]
    out, err = score("--columns=nll,text", with_errors=1, **options)
    assert out == first + b"\n\n\n" + last + b"\n"
    assert mentions(err, "input.txt", 2, 1) and mentions(err, 3, "'é'")
    assert mentions(err, "min_freq=2") and mentions(err, 2, "--strict") and b"2 lines, 4 tokens" in err
    out, _ = score("--format=json", with_errors=1, **options)
    rows = [json.loads(row) for row in out.splitlines()]
    assert rows[1] == {"text": "a\\xff", "error": "line 2 is not UTF-8 text: see its byte 1"}
    assert rows[2]["text"] == "bé" and rows[3]["tokens"] == 1
    with raises_naming(ValueError, "input.txt", 2, 1):
        score("--strict", **options)


@pytest.mark.parametrize(
    "arguments, name, value",
    [
        (["--columns=nll,size"], "columns", ["nll", "size"]),
        (["--columns="], "columns", []),
        (["--columns=nll,text", "--format=json"], "columns", ["nll", "text"]),
        (["--segment=0"], "segment", 0),
    ],
    ids=str,
)
def test_a_bad_flag_is_an_error_with_its_name(score, arguments, name, value):
    with raises_parameter(name, value):
        score(*arguments, text=b"w1")


@pytest.mark.parametrize(
    "arguments, text, facts",
    [
        (["--output=/no/such/folder/x"], b"w1", ["/no/such/folder/x"]),
        (["--input=/no/such/file"], b"w1", ["/no/such/file"]),
        (["--ckpt_path=ckpt-9"], b"w1", ["ckpt-9"]),
        (["--strict"], b"w1\nw2 \xff\n", ["input.txt", 2, 3]),
        ([], b"", ["input.txt"]),
    ],
    ids=str,
)
def test_bad_input_is_one_clear_error(score, arguments, text, facts):
    with raises_naming((ValueError, OSError), *facts):
        score(*arguments, text=text)


def test_lines_are_scored_as_they_come(tool, word_run, monkeypatch):
    _, vocab, lm = word_run
    lines = ["w1 w2", "", "w7"]
    arguments = [f"--model_dir={word_run[0]}", "--columns=text,nll"]
    written = converse(monkeypatch, tool, [f"{line}\n".encode() for line in lines], *arguments)
    for row, line in zip(written, lines, strict=True):
        text, nll = row.decode().split("\t")
        assert text == line and float(nll) == pytest.approx(nll_of(lm, vocab, line).sum(), rel=1e-5)


@pytest.mark.slow
def test_lines_of_the_standard_input_are_answered_while_it_is_open(word_run):
    _, vocab, lm = word_run
    command = [sys.executable, str(ROOT / "tools" / "score.py"), f"--model_dir={word_run[0]}", "--columns=nll,text"]
    pipes = dict.fromkeys(["stdin", "stdout", "stderr"], subprocess.PIPE)
    with subprocess.Popen(command, **pipes) as process:
        for line in ("w1 w2", "", "w7"):
            process.stdin.write(f"{line}\n".encode())
            process.stdin.flush()
            nll, text = process.stdout.readline().decode().removesuffix("\n").split("\t")
            assert text == line and float(nll) == pytest.approx(nll_of(lm, vocab, line).sum(), rel=1e-5)
        process.stdout.close()  # nobody reads on
        process.stdin.write(b"w3\n")
        _, error = process.communicate()
    assert process.returncode == 0 and b"Traceback" not in error


@pytest.mark.parametrize("path", ["tools/score.py", "tools/embed.py"])
def test_the_vocabulary_is_read_once(word_run, tmp_path, monkeypatch, capsys, path):
    load, read = RunFolder.load_vocabs, []
    monkeypatch.setattr(RunFolder, "load_vocabs", lambda folder: read.append(folder) or load(folder))
    text = write_text(tmp_path / "in.txt", "w1 w2\n")
    outputs = ["out.txt", "out.npy"][: 2 if "embed" in path else 1]
    for tool in program(path):
        for output in outputs:
            assert not run_here(tool, f"--model_dir={word_run[0]}", f"--input={text}", f"--output={tmp_path / output}")
    assert len(read) == len(outputs)
