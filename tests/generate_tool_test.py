"""The program that continues a text."""

import codecs
import dataclasses
import io
import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import (
    ROOT,
    Subwords,
    converse,
    eagerly,
    make_run,
    mentions,
    program,
    raises_naming,
    raises_parameter,
    run_here,
    word_vocab,
)

import txl_tf
from txl_config import SamplingConfig
from txl_tf.data.batching import padded
from txl_tf.data.lines import LineError
from txl_tf.data.vocabulary import Vocab
from txl_tf.language.generation import generate
from txl_tf.language.text_generator import Continuation, TextStream
from txl_tf.runs.folder import RunFolder

pytestmark = pytest.mark.usefixtures("opened_once")
# Options that do not change the most likely token, and a value of each that is not the default.
OF_SAMPLING = {
    field.name: 5 if isinstance(field.default, int) else 0.5
    for field in dataclasses.fields(SamplingConfig)
    if field.name not in ("repetition_penalty", "repetition_window")
}


@pytest.fixture(scope="module")
def tool():
    yield from program("tools/generate.py")


def set_flags(tool, *arguments):
    """Reads a command line, with nothing left of the one before."""
    tool.FLAGS.unparse_flags()
    for flag in tool.FLAGS.get_key_flags_for_module(tool):
        flag.unparse()
    tool.FLAGS(["generate.py", *arguments])


def opened(folder):
    """The model that the program opens, see `opened_once`: what a test computes by it shares the program's graphs."""
    folder = RunFolder(folder)
    return folder.load_model(folder.find_checkpoint())


def shared_constraint(monkeypatch, tool, vocab, **options):
    """Returns a `Constraint`, which the program uses instead of an equal one of its own, and so shares its graphs."""
    constraint = txl_tf.Constraint(vocab, **options)

    def same_constraint(vocab_of_program, **values):
        assert vocab_of_program.symbols == vocab.symbols
        assert {name: value for name, value in values.items() if value is not None} == options
        return constraint

    monkeypatch.setattr(tool, "Constraint", same_constraint)
    return constraint


@pytest.fixture(scope="module")
def word_run(opened_once, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "words"
    vocab = word_vocab()
    make_run(folder, vocab, n_layer=1)
    return folder, vocab, opened(folder)


def test_text_comes_after_the_prompt_with_its_nll(tool, word_run, monkeypatch, capsys, eager):
    folder, vocab, lm = word_run
    arguments = [f"--model_dir={folder}", "--greedy", "--max_new_tokens=6", "--verbose"]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"w3 unheard-of\nw5\n")))
    run_here(tool, *arguments)
    printed = capsys.readouterr()
    lines = [line.split("\t") for line in printed.out.splitlines()]
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
    assert "6 tokens" in printed.err


def test_streamed_words_and_bytes_make_the_whole_text(tool):
    vocab = Vocab(special=["<eos>", "a", "b"], eos="<eos>")
    vocab.build()
    stream, ids = TextStream(vocab), [1, 2, 0, 1, 0, 0, 2, 1]
    assert "".join(stream.push(ids[i : i + 2]) for i in range(0, 8, 2)) + stream.end() == vocab.decode(ids)

    vocab = Vocab(special=["<s>", "a", "b"], eos="<s>", bos="<s>")
    vocab.build()
    for eos, ids in (("<s>", [0, 1, 0, 0, 2, 1]), (None, [0, 1, 0, 2, 1])):
        vocab.eos = eos
        stream = TextStream(vocab)
        assert "".join(stream.push([i]) for i in ids) == vocab.decode(ids)

    vocab = Vocab(level="byte")
    vocab.build()
    stream, text = TextStream(vocab), "naïve 日本".encode()
    pieces = [stream.push([byte]) for byte in text[:-1]]
    assert "".join(pieces) == "naïve 日" and "" in pieces
    assert stream.end() == "\ufffd"


def test_streamed_subwords_make_the_whole_text_and_no_piece_has_half_a_character(tool):
    vocab, rng = Subwords(), np.random.default_rng(0)
    half = [vocab.ids[symbol] for symbol in ("\udcc3", "\udca9", "\udce6\udc97", "\udca5")]
    for _ in range(50):
        ids = []
        while len(ids) < 30:  # whole characters of several tokens among others
            ids += [half[:2], half[2:], [int(rng.integers(0, 19))]][rng.integers(3)]
            ids = [i for i in ids if i not in half] if len(ids) > 28 else ids
        stream, cuts = TextStream(vocab), np.sort(rng.integers(0, 30, 5))
        pieces = [stream.push(piece) for piece in np.split(np.array(ids), cuts)]
        assert "\ufffd" not in "".join(pieces) + stream.end()
        assert "".join(pieces) == vocab.bytes_of(ids).decode()
    stream = TextStream(vocab)
    stream.push(half[:1])
    follower = stream.copy()
    assert follower.push(half[1:2]) == "é" == stream.push(half[1:2])
    ser = vocab.ids["ser:"]
    assert stream.push([ser], excess=2) == "se"


class Pieces(io.StringIO):
    """Remembers what was written up to each flush."""

    def __init__(self):
        super().__init__()
        self.flushed = []

    def flush(self):
        self.flushed.append(self.getvalue())


@pytest.mark.slow
def test_text_is_cut_behind_a_stop_string_within_a_token(tool, small_lm, monkeypatch):
    vocab, lm = Subwords(), small_lm(n_layer=1)
    set_flags(tool, "--model_dir=x")
    prompt, stops = np.array([6, 9]), ["ser", "\n", "ab", "é"]
    monkeypatch.setattr(sys, "stdout", Pieces())
    writer = tool.Writer(lm, vocab, {"stop_strings": stops, "temperature": 1.3})
    writer.read(prompt)
    session, stream, cut = writer.session, writer.stream, set()
    for seed in range(8):
        monkeypatch.setattr(sys, "stdout", Pieces())
        writer.session, writer.stream = session, stream
        writer.write_samples(30, [seed])
        free = generate(lm, prompt[None], 30, seed=seed, temperature=1.3)[0, 2:].numpy()
        whole = vocab.bytes_of(free)
        ends = [whole.index(stop.encode()) + len(stop.encode()) for stop in stops if stop.encode() in whole]
        end = min(ends, default=len(whole))
        expected = whole[:end].decode("utf-8", "replace") + "\n"
        assert sys.stdout.getvalue() == sys.stdout.flushed[-1] == expected
        assert len(set(sys.stdout.flushed)) > 1
        cut.add(end not in np.cumsum([len(vocab.token_bytes[i]) for i in free]))
    assert cut == {False, True}


def test_the_number_of_a_sample_comes_before_its_prompt(tool, monkeypatch):
    """Both streams of a program are one terminal."""
    set_flags(tool, "--model_dir=x")
    vocab, terminal = word_vocab(), io.StringIO()
    session = SimpleNamespace(read=lambda tokens: [None], excess=0, ended=True)
    session.copy = lambda: session
    session.write = lambda number, **options: (vocab.encode(f"w{options['seed']}")[None], None)
    monkeypatch.setattr(tool, "Session", lambda lm: session)
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    for seeds in ([4, 5], [4]):
        writer = tool.Writer(None, vocab, {})
        writer.read(vocab.encode("w1 w2"), show=len(seeds) == 1)
        writer.write_samples(1, seeds)
    assert terminal.getvalue() == "--- 1 of 2\nw1 w2 w4\n--- 2 of 2\nw1 w2 w5\nw1 w2 w4\n"


def test_the_speed_counts_all_tokens_after_the_first_call(tool, monkeypatch, capsys):
    set_flags(tool, "--model_dir=x")
    vocab = word_vocab()
    session = SimpleNamespace(copy=lambda: session, excess=0, ended=False)
    session.write = lambda number, **options: (np.full([1, number], vocab.ids["w1"]), None)
    monkeypatch.setattr(tool, "Session", lambda lm: session)
    writer = tool.Writer(None, vocab, {})
    writer.write_samples(2, [1])
    writer.report()
    assert capsys.readouterr().err == ""
    writer.write_samples(2, [2])
    writer.seconds = 0.5
    writer.report()
    assert capsys.readouterr().err == "4 tokens, 4 tokens/s\n"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_terminal_is_told_that_the_program_waits_for_input(tool, monkeypatch, capsys, is_terminal):
    set_flags(tool, "--model_dir=x")
    stdin = SimpleNamespace(isatty=lambda: is_terminal, buffer=io.BytesIO(b"w1 w2\n"))
    monkeypatch.setattr(sys, "stdin", stdin)
    assert tool.read_prompt(word_vocab()) == b"w1 w2"
    assert ("Ctrl-D" in capsys.readouterr().err) == is_terminal


@pytest.mark.slow
def test_several_samples_are_those_of_generate(tool, word_run, capfd):
    folder, vocab, lm = word_run
    arguments = ["--num_return_sequences=3", "--seed=5", "--max_new_tokens=9", "--min_p=0.01"]
    arguments += [
        "--repetition_penalty=1.5",
        "--repetition_window=4",
        "--stop=w11",
        r"--stop=w2\nw3",
        "--temperature=1.2",
    ]
    set_flags(tool, f"--model_dir={folder}", "--prompt=w3 w5", *arguments)
    tool.main()
    out, err = capfd.readouterr()
    texts, lengths = generate(
        lm, vocab.encode("w3 w5")[None], 9, num_return_sequences=3, seed=5, min_p=0.01, repetition_penalty=1.5,
        repetition_window=4, temperature=1.2, stop_strings=["w11", "w2\nw3"], vocab=vocab, with_lengths=True,
    )  # fmt: skip
    expected = [vocab.decode(text[:length]) for text, length in zip(texts.numpy(), lengths, strict=True)]
    assert out == "".join(f"{text}\n" for text in expected) and len(set(expected)) == 3
    assert [line for line in err.splitlines() if line.startswith("---")] == [f"--- {i} of 3" for i in (1, 2, 3)]


def test_stop_strings_are_utf_8_in_any_locale(tool, word_run):
    folder, *_ = word_run
    set_flags(tool, f"--model_dir={folder}", "--stop=\udcc3\udca9", "--stop=é", r"--stop=a\n")
    assert tool.text_options(RunFolder(folder))["stop_strings"] == ["é", "é", "a\n"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "stop",
    [*(pytest.param(flag, marks=pytest.mark.slow) for flag in ("--stop_at_newline", r"--stop=\n")), "--stop=<eos>"],
)
def test_text_ends_with_its_line(tool, word_run, capfd, stop):
    folder, vocab, lm = word_run
    set_flags(tool, f"--model_dir={folder}", "--prompt=w3 w5", "--seed=2", "--max_new_tokens=60", stop)
    tool.main()
    text, length = generate(
        lm, vocab.encode("w3 w5")[None], 60, seed=2, stop_at_newline=True, vocab=vocab, with_lengths=True
    )
    assert length[0] < 62
    assert capfd.readouterr().out == vocab.decode(text[0, : length[0]]) + "\n"


@pytest.mark.slow
def test_text_appears_while_it_is_written(word_run):
    """A reader at the other end of a pipe sees it long before the program ends."""
    folder, vocab, lm = word_run
    command = [sys.executable, str(ROOT / "tools" / "generate.py"), f"--model_dir={folder}", "--prompt=w3", "--seed=1"]
    process = subprocess.Popen(
        [*command, "--max_new_tokens=3000"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT
    )
    pieces = []
    while piece := os.read(process.stdout.fileno(), 1 << 16):
        pieces.append((piece, process.poll()))
    assert process.wait() == 0
    text = b"".join(piece for piece, _ in pieces).decode()
    assert text == vocab.decode(generate(lm, vocab.encode("w3")[None], 3000, seed=1)[0]) + "\n"
    early = [piece for piece, ended in pieces if ended is None]
    assert len(early) > 20 and sum(map(len, early[:10])) < len(text) / 2


@pytest.mark.ci
def test_lines_are_answered_in_one_memory_and_bad_ones_refused(tool, tmp_path, monkeypatch, capsys):
    vocab = Vocab(level="char", special=["\n", *"abcd"])
    vocab.build()
    lm = make_run(tmp_path / "run", vocab, n_layer=1)
    set_flags(tool, f"--model_dir={tmp_path / 'run'}", "--interactive", "--greedy", "--max_new_tokens=5")
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"ab\nzz\ncd\n")))
    tool.main()
    out, err = capsys.readouterr()
    assert mentions(err, "'z'")

    answers, mems = "", None
    with eagerly():
        for line in ("ab\n", "cd\n"):
            tokens = vocab.encode(line)[None]
            for _ in range(5):
                log_probs, mems = lm.log_probs(tokens, mems)
                tokens = np.argmax(log_probs[:, -1:], -1)
                answers += vocab.decode(tokens)
            _, mems = lm.log_probs(tokens, mems)
            answers += "\n"
    assert out == answers


@pytest.mark.slow
def test_every_line_is_a_prompt_of_its_own(tool, word_run, tmp_path, capsys):
    """Its text is that of the same prompt alone; one that cannot be continued keeps its place."""
    folder, vocab, lm = word_run
    (tmp_path / "in").write_bytes(b"w3 w5\n\nw1\xff\nw7\nw1 w2 w3 w4\n")
    arguments = [f"--model_dir={folder}", f"--input={tmp_path / 'in'}", "--max_new_tokens=9", "--seed=4"]
    output = [f"--output={tmp_path / 'out'}", "--num_return_sequences=2"]
    assert run_here(tool, *arguments, *output, "--format=json") == 1
    rows = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    err = capsys.readouterr().err
    assert rows[1] == {"prompt": "", "error": "line 2 is empty: it must have at least one token"}
    assert rows[2] == {"prompt": "w1\\xff", "error": "line 3 is not UTF-8 text: see its byte 2"}
    assert mentions(err, "latest", 1) and mentions(err, tmp_path / "in", 2)
    ids = vocab.encode("w3 w5")
    texts = generate(lm, ids[None], 9, seed=4, num_return_sequences=2).numpy()
    assert rows[0] == {"prompt": "w3 w5", "texts": [vocab.decode(text).removeprefix("w3 w5") for text in texts]}
    pipe = txl_tf.pipeline(folder)
    assert pipe.generate_text(["w7", "w1 w2 w3 w4"], 9, seed=4) == [row["texts"][0] for row in rows[3:]]
    with raises_naming(ValueError, tmp_path / "in", 2):
        run_here(tool, *arguments, "--strict")
    set_flags(tool, "--model_dir=x", "--input=y", "--num_return_sequences=2")
    assert tool.line_of(Continuation("w1", ["a\nb", "c"], [True, True])) == "a\\nb\nc\n"
    assert tool.line_of(LineError(b"", 2, ValueError("text is empty"), "y")) == "\n\n"


@pytest.mark.slow
def test_a_byte_order_mark_is_no_part_of_a_prompt(tool, word_run, tmp_path, monkeypatch, capfd):
    marked = codecs.BOM_UTF8 + b"w3 w5"
    (tmp_path / "prompt").write_bytes(marked)
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(marked), isatty=lambda: False))
    written = []
    for source in (["--prompt=w3 w5"], [f"--prompt_file={tmp_path / 'prompt'}"], []):
        run_here(tool, f"--model_dir={word_run[0]}", "--max_new_tokens=3", "--greedy", *source)
        written.append(capfd.readouterr().out)
    assert written[0].startswith("w3 w5") and written == written[:1] * 3


def test_prompts_are_continued_as_they_come(tool, word_run, monkeypatch):
    arguments = [f"--model_dir={word_run[0]}", "--input=-", "--max_new_tokens=3", "--seed=1", "--batch_size=1"]
    first, second, again = converse(monkeypatch, tool, [b"w3\n", b"w5\n", b"w3\n"], *arguments)
    assert first == again and [text.count(b"\n") for text in (first, second)] == [1, 1]


# ------------------------------------------------------------------------ texts that are printed when they are complete


@pytest.fixture(scope="module")
def char_run(opened_once, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "characters"
    vocab = Vocab(level="char", special=["\n"])
    vocab.count('0123456789-ab {}":')
    vocab.build()
    make_run(folder, vocab, n_layer=1)
    return folder, vocab, opened(folder)


def texts_of(vocab, prompt, generated):
    """The texts after a prompt that `generate` returns with `with_lengths`."""
    tokens, lengths = (part.numpy() for part in generated)
    return [vocab.decode(row[len(prompt) : n]) for row, n in zip(tokens, lengths, strict=True)]


@pytest.mark.ci
def test_beam_search_prints_the_best_texts(tool, char_run, tmp_path, capfd):
    """The same for a prompt alone and for one line among others, and by a pipeline."""
    folder, vocab, lm = char_run
    search = {"beam_size": 3, "length_penalty": 1.5, "num_return_sequences": 2}
    expected = {
        prompt: texts_of(
            vocab,
            prompt,
            lm.generate(vocab.encode(prompt)[None], 9, stop_token=vocab.ids["\n"], with_lengths=True, **search),
        )
        for prompt in ("ab", "7")
    }
    arguments = [f"--model_dir={folder}", "--max_new_tokens=9", "--stop_at_newline"]
    arguments += [f"--{name}={value}" for name, value in search.items()]
    run_here(tool, *arguments, "--prompt=ab")
    out, err = capfd.readouterr()
    assert out == "".join(f"ab{text}\n" for text in expected["ab"]) and "--- 2 of 2" in err
    (tmp_path / "in").write_text("7\nab\n")
    run_here(tool, *arguments, f"--input={tmp_path / 'in'}", "--format=json")
    rows = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert rows == [{"prompt": prompt, "texts": expected[prompt]} for prompt in ("7", "ab")]
    pipe = txl_tf.pipeline(folder, RunFolder(folder).find_checkpoint())
    found = pipe.generate_text(["7", "ab"], 9, stop_at_newline=True, **search)
    assert found == [expected["7"], expected["ab"]] and len(set(expected["ab"])) == 2


@pytest.mark.ci
def test_texts_match_a_regular_expression_and_their_end_is_not_printed(tool, char_run, tmp_path, monkeypatch, capfd):
    pytest.importorskip("outlines_core")
    folder, vocab, lm = char_run
    regex = "[0-9]{2}[ab]?"
    form = shared_constraint(monkeypatch, tool, vocab, regex=regex, stop_token=vocab.ids["\n"])
    options = {"logits_processor": form, "stop_token": form.stop_token, "with_lengths": True}
    sampled = lm.generate(vocab.encode("ab")[None], 3, seed=2, temperature=4.0, num_return_sequences=8, **options)
    expected = texts_of(vocab, "ab", sampled)
    ended = [text.endswith("\n") for text in expected]
    arguments = [f"--model_dir={folder}", f"--regex={regex}", "--max_new_tokens=3"]
    samples = ["--seed=2", "--temperature=4", "--num_return_sequences=8"]
    run_here(tool, *arguments, *samples, "--prompt=ab")
    out, err = capfd.readouterr()
    assert out == "".join(f"ab{text.removesuffix(chr(10))}\n" for text in expected)
    assert all(re.fullmatch(regex, text.removesuffix("\n")) for text, end in zip(expected, ended, strict=True) if end)
    assert set(ended) == {False, True} and mentions(err, ended.count(False), 8)
    (tmp_path / "in").write_text("ab\n")
    run_here(tool, *arguments, *samples, f"--input={tmp_path / 'in'}", "--format=json")
    out, err = capfd.readouterr()
    texts = [text.removesuffix("\n") for text in expected]
    assert json.loads(out) == {"prompt": "ab", "texts": texts, "ended": ended}
    assert mentions(err, ended.count(False), 8)

    run_here(tool, *arguments, "--beam_size=3", "--prompt=ab")
    (best,) = texts_of(vocab, "ab", lm.generate(vocab.encode("ab")[None], 3, beam_size=3, **options))
    assert capfd.readouterr().out == f"ab{best.removesuffix(chr(10))}\n"


@pytest.mark.ci
def test_json_of_a_schema_and_its_file(tool, char_run, tmp_path, capfd):
    pytest.importorskip("outlines_core")
    schema = {"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"]}
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    arguments = [f"--model_dir={char_run[0]}", f"--json_schema={tmp_path / 'schema.json'}", "--seed=1"]
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "prompts").write_text("ab\n7\n")
    files = [f"--input={tmp_path / 'in'}", f"--output={tmp_path / 'out'}"]
    run_here(tool, *arguments, *files)
    lines = (tmp_path / "out" / "prompts").read_text().splitlines()
    assert len(lines) == 2 and all(json.loads(line)["a"] in (1, 22) for line in lines)
    schema["properties"]["a"]["enum"] = ["b"]  # the answers of the other schema are no answers to this one
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    run_here(tool, *arguments, *files)
    assert [json.loads(line) for line in (tmp_path / "out" / "prompts").read_text().splitlines()] == [{"a": "b"}] * 2
    (tmp_path / "schema.json").write_text("{")
    with raises_parameter("json_schema", "{"):
        run_here(tool, *arguments, "--prompt=ab")


def test_answers_are_not_written_over_a_schema(tool, char_run, tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "prompts").write_text("ab\n")
    (tmp_path / "out").mkdir()
    schema = tmp_path / "out" / "prompts"
    schema.write_text("{}")
    for inputs, output in ((tmp_path / "in" / "prompts", schema), (tmp_path / "in", tmp_path / "out")):
        with raises_parameter("output", str(output), "another file than --json_schema"):
            flags = [f"--json_schema={schema}", f"--input={inputs}", f"--output={output}"]
            run_here(tool, f"--model_dir={char_run[0]}", *flags)
    assert schema.read_text() == "{}"


@pytest.mark.ci
@pytest.mark.parametrize(
    "flags, end",
    [
        ([], "<end>"),
        pytest.param(["--stop_at_newline"], "\n", marks=pytest.mark.slow),
        pytest.param(["--nostop_at_document"], "\n", marks=pytest.mark.slow),
    ],
)
def test_a_form_ends_at_the_end_of_a_document_if_there_are_documents(tool, tmp_path, monkeypatch, capfd, flags, end):
    pytest.importorskip("outlines_core")
    vocab = Vocab(level="char", special=["\n"], document="<end>")
    vocab.count("ab")
    vocab.build()
    make_run(tmp_path / "run", vocab, n_layer=1)
    arguments = [f"--model_dir={tmp_path / 'run'}", "--prompt=a", *flags]
    with monkeypatch.context() as patch:
        form = shared_constraint(patch, tool, vocab, regex="b*a", stop_token=vocab.ids[end])
        run_here(tool, *arguments, "--regex=b*a", "--seed=1")
    options = {"logits_processor": form, "stop_token": form.stop_token, "with_lengths": True}
    generated = opened(tmp_path / "run").generate(vocab.encode("a")[None], 30, seed=1, **options)
    (text,) = texts_of(vocab, "a", generated)
    assert text.endswith(end)
    assert capfd.readouterr().out == f"a{text.removesuffix(end)}\n"
    run_here(tool, *arguments, "--regex=b{3}a", "--beam_size=2")
    assert capfd.readouterr().out == "abbba\n"


@pytest.mark.ci
def test_suppressed_tokens_do_not_occur(tool, word_run, monkeypatch, capfd):
    folder, vocab, lm = word_run
    prompt, options = vocab.encode("w3")[None], {"seed": 3, "temperature": 1.5}
    free = lm.generate(prompt, 40, **options)[0].numpy()
    assert set(free[1:]) & {vocab.ids["w3"], vocab.ids["w5"]}

    suppressed = ["w3", "w5", "<eos>"]
    process = tool.suppressing(vocab, suppressed)
    allowed = np.array([symbol not in suppressed for symbol in vocab.symbols])
    log_probs = np.random.default_rng(0).normal(size=[2, len(vocab)])
    np.testing.assert_array_equal(process(None, log_probs), np.where(allowed, log_probs, -np.inf))

    monkeypatch.setattr(tool, "suppressing", lambda _, symbols: {tuple(suppressed): process}[tuple(symbols)])
    arguments = [f"--model_dir={folder}", "--prompt=w3", "--max_new_tokens=40", "--seed=3", "--temperature=1.5"]
    run_here(tool, *arguments, *(f"--suppress_tokens={symbol}" for symbol in suppressed))
    out = capfd.readouterr().out
    assert out == vocab.decode(lm.generate(prompt, 40, logits_processor=process, **options)[0]) + "\n"
    assert not set(out.removeprefix("w3").split()) & {"w3", "w5"} and out.count("\n") == 1


@pytest.mark.ci
@pytest.mark.parametrize("family", ["TransformerXLLM", pytest.param("TransformerLM", marks=pytest.mark.slow)])
def test_a_long_prompt_is_read_in_pieces_wherever_it_comes_from(tool, tmp_path, monkeypatch, capfd, family, eager):
    vocab = word_vocab()
    options = {} if family == "TransformerXLLM" else {"mem_len": 0, "context_len": 6, "family": txl_tf.TransformerLM}
    make_run(tmp_path / "run", vocab, n_layer=1, **options)
    monkeypatch.setattr(tool, "READ_AT_ONCE", 4)
    prompts = [" ".join(f"w{(i * i) % 21}" for i in range(n)) for n in (11, 3, 8)]
    arguments = [f"--model_dir={tmp_path / 'run'}", "--max_new_tokens=5", "--seed=4", "--temperature=0.5"]
    printed = []
    for prompt in prompts:
        run_here(tool, *arguments, f"--prompt={prompt}")
        printed.append(capfd.readouterr().out)
    (tmp_path / "in").write_text("".join(f"{prompt}\n" for prompt in prompts))
    run_here(tool, *arguments, f"--input={tmp_path / 'in'}", "--format=json")
    rows = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [row["prompt"] + row["texts"][0] + "\n" for row in rows] == printed
    segment = 4 if family == "TransformerXLLM" else None
    ids = [vocab.encode(prompt) for prompt in [*prompts, prompts[-1]]]  # a batch as large as that of the program
    texts, ends = opened(tmp_path / "run").generate(
        padded(ids), 5, lengths=[len(row) for row in ids], seed=4, temperature=0.5, segment=segment, with_lengths=True
    )
    assert printed == [vocab.decode(text[:end]) + "\n" for text, end in zip(texts[:3], ends[:3], strict=True)]


@pytest.mark.parametrize(
    "arguments, name",
    [
        (["--beam_size=3", "--temperature=0.5"], "temperature"),
        (["--beam_size=3", "--seed=1"], "seed"),
        (["--beam_size=3", "--top_k=4"], "top_k"),
        (["--beam_size=3", "--repetition_penalty=2"], "repetition_penalty"),
        (["--beam_size=3", "--greedy"], "greedy"),
        (["--beam_size=3", "--interactive"], "interactive"),
        (["--beam_size=3", "--num_return_sequences=4"], "num_return_sequences"),
        (["--beam_size=3", "--stop=w1", "--stop_at_newline"], "stop_strings"),
        (["--beam_size=3", "--stop=w1 w2"], "stop_strings"),
        (["--beam_size=3", "--length_penalty=-1"], "length_penalty"),
        (["--beam_size=0"], "beam_size"),
        (["--beam_size=24"], "beam_size"),
        (["--length_penalty=1"], "length_penalty"),
        (["--regex=w1"], "regex"),  # the tokens are words
        (["--regex="], "regex"),
        (["--regex=w1", "--json_schema=x"], "regex"),
        (["--regex=w1", "--verbose"], "verbose"),
        (["--regex=w1", "--suppress_tokens=w2"], "regex"),
        (["--suppress_tokens=w2", "--suppress_tokens=w99"], "suppress_tokens"),
    ],
    ids=str,
)
def test_what_does_not_go_together_is_refused_before_the_model_is_loaded(tool, word_run, monkeypatch, arguments, name):
    monkeypatch.setattr(tool, "load_model", None)
    set_flags(tool, f"--model_dir={word_run[0]}", "--prompt=w1", *arguments)
    with raises_parameter(name):
        tool.main()


@pytest.mark.parametrize(
    "arguments, name",
    [
        (["--input=x", "--prompt=w1"], "prompt"),
        (["--prompt=w1", "--format=json"], "format"),
        (["--prompt=w1", "--repetition_window=9"], "repetition_window"),
        (["--interactive", "--num_return_sequences=2"], "num_return_sequences"),
        (["--prompt=w1", "--prompt_file=x"], "prompt"),
        *(([f"--{name}={value}", "--prompt=w1", "--greedy"], name) for name, value in OF_SAMPLING.items()),
        *(
            ([f"--{name}={value}", "--prompt=w1", "--temperature=0"], name)
            for name, value in OF_SAMPLING.items()
            if name != "temperature"
        ),
        (["--prompt=w1", "--greedy", "--num_return_sequences=2"], "num_return_sequences"),
        (["--prompt=w1", "--greedy", "--seed=5"], "seed"),
        (["--prompt=w1", "--temperature=0", "--seed=5"], "seed"),
    ],
    ids=str,
)
def test_a_bad_flag_is_an_error_with_its_name(tool, word_run, arguments, name):
    set_flags(tool, f"--model_dir={word_run[0]}", *arguments)
    with raises_parameter(name):
        tool.main()


@pytest.mark.parametrize("data", [b"\xff\xfea\x00b\x00", b""])
def test_a_file_that_is_no_prompt_is_named(tool, word_run, tmp_path, data):
    path = tmp_path / "prompt.txt"
    path.write_bytes(data)
    set_flags(tool, f"--model_dir={word_run[0]}", f"--prompt_file={path}")
    with raises_naming(ValueError, str(path)) as raised:
        tool.main()
    assert mentions(str(raised.value), "prompt_file")


@pytest.mark.parametrize(
    "arguments, named",
    [
        (["--input=no-such-file"], "no-such-file"),
        (["--prompt="], "prompt"),
        (["--prompt=w1", "--top_p=0"], "top_p"),
        (["--prompt=w1", "--stop="], "stop_strings"),
        (["--prompt=w1", "--min_p=1"], "min_p"),
        (["--prompt=w1", "--repetition_penalty=0"], "repetition_penalty"),
        (["--prompt=w1", "--repetition_penalty=2", "--repetition_window=0"], "repetition_window"),
        (["--prompt=w1", "--num_return_sequences=0"], "num_return_sequences"),
        (["--prompt=w1", "--stop=w1", "--stop=w99"], "'w99'"),
        (["--prompt_file=no-such-file"], "no-such-file"),
    ],
    ids=str,
)
def test_bad_input_is_one_clear_error(tool, word_run, arguments, named):
    set_flags(tool, f"--model_dir={word_run[0]}", *arguments)
    with raises_naming((ValueError, OSError), named):
        tool.main()
