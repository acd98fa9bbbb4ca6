"""How files become text: line ends, byte order marks, JSON by what is in the file; and what older runs keep."""

import gzip
import itertools
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
from helpers import SMALL, mentions, raises_naming, raises_parameter, train_run, write_text

import txl_tf
from txl_tf.data import text_files
from txl_tf.data.line_files import LineFile, _lines_with_ends
from txl_tf.data.pairs.parallel import PairReader
from txl_tf.data.tagged.lexicon import Lexicon
from txl_tf.data.tagged.sentences import read_tagged
from txl_tf.data.text import corpus
from txl_tf.data.text.portions import cut_in_portions
from txl_tf.data.text.texts import find_files
from txl_tf.data.vocabulary import Vocab
from txl_tf.errors import ParameterError
from txl_tf.language.text_generator import encode_prompt
from txl_tf.runs.evaluate import evaluate_run
from txl_tf.runs.families.language_model import LanguageModelRun
from txl_tf.runs.folder import RunFolder
from txl_tf.runs.scoring import score_lines
from txl_tf.runs.setup import encode_text, open_corpus_of_run

LINES = ["First line é", "", "second line of it", "a a a", "the  end"] * 8
ENDS = {"lf": "\n", "crlf": "\r\n", "cr": "\r", "mixed": None}
ROWS = [{"id": i, "text": text} for i, text in enumerate(["one text", "two\nlines", "three ä", "x"] * 9)]


def joined(lines, end):
    """The lines with an end each: with `None`, of all three kinds in turn, a \\r never before a \\n of another line."""
    ends = itertools.repeat(end) if end else itertools.cycle(["\r", "\r\n", "\n"])
    return "".join(line + end for line, end in zip(lines, ends, strict=False))


def tokens_of(path, **options):
    """Text of all tokens of a corpus, its symbols, and whether it has documents."""
    made = corpus.build_corpus("text", path, valid_fraction=0.3, **options)
    ids = np.concatenate([made.splits["train"], made.splits["valid"]])
    return made.vocab.decode(ids), sorted(made.vocab.symbols), made.vocab.document


# ---------------------------------------------------------------------------------------------------------- line ends


@pytest.mark.parametrize("level", ["char", "word", "subword"])
@pytest.mark.parametrize("ends", ENDS)
def test_all_line_ends_are_one_at_every_level_wherever_pieces_are_cut(tmp_path, monkeypatch, level, ends):
    options = {"level": level, "vocab_size": 275} if level == "subword" else {"level": level}
    expected = tokens_of(write_text(tmp_path / "lf", joined(LINES, "\n")), **options)
    data = "\ufeff" + joined(LINES, ENDS[ends])
    for size in (1 << 20, 3, 7)[: 1 if level == "subword" else 3]:  # SentencePiece learns from pieces of lines
        monkeypatch.setattr(text_files, "BLOCK_BYTES", size)
        assert tokens_of(write_text(tmp_path / "a", data), **options) == expected


def test_level_byte_has_every_byte(tmp_path):
    data = b"\xef\xbb\xbfa\r\nb\rc\n" * 9
    made = corpus.build_corpus("text", write_text(tmp_path / "a", data), level="byte", valid_fraction=0.3)
    assert bytes([*made.splits["train"], *made.splits["valid"]]) == data


def test_a_mark_is_no_symbol_in_any_file_of_a_folder_nor_where_files_were_joined(tmp_path):
    for name in ("a.txt", "b.txt"):
        write_text(tmp_path / name, "\ufeffFirst line\nlast " * 9)
    write_text(tmp_path / "c.jsonl", "\ufeff" + json.dumps({"text": "\ufeffFirst\r\nrow"}))
    for level in ("char", "word"):
        text, symbols, _ = (
            tokens_of(str(tmp_path), level=level, nodocuments=True) if False else tokens_of(str(tmp_path), level=level)
        )
        assert not any("\ufeff" in symbol or "\r" in symbol for symbol in symbols) and "First" in text


def test_files_of_lines_end_with_any_line_end(tmp_path):
    for end in ("\n", "\r\n", "\r"):
        pairs = PairReader().read(write_text(tmp_path / "pairs", f"\ufeffa\tb{end}c\td{end}"))
        assert [side.lines for side in pairs] == [["a\n", "c\n"], ["b\n", "d\n"]]
        tagged = read_tagged(write_text(tmp_path / "tagged", f"\ufeffa O{end}b B-X{end}{end}c O{end}"))
        assert [sentence.tokens for sentence in tagged] == [["a", "b"], ["c"]] and tagged[1].line == 4
        assert Lexicon.load(write_text(tmp_path / "words", f"\ufeff长江{end}大桥 2{end}")).words == ["长江", "大桥"]
        vocab = Vocab.load(write_text(tmp_path / "vocab", f"\ufeffa{end}\\x20{end}\\n{end}"), level="char")
        assert vocab.symbols == ["a", " ", "\n"]


def test_lines_of_files_are_cut_at_any_line_end(tmp_path):
    pieces = [b"a\r", b"\nb\rc", b"d\n\r", b"e"]
    assert list(_lines_with_ends(pieces, True)) == [b"a\r\n", b"b\r", b"cd\n", b"\r", b"e"]
    assert list(_lines_with_ends(pieces, False)) == [b"a\r\n", b"b\rcd\n", b"\re"]
    assert list(_lines_with_ends([b"a", b"b\r", b"\r", b"\n", b"c\r"], True)) == [b"ab\r", b"\r\n", b"c\r"]
    assert list(_lines_with_ends([b"a", b"b", b"\r", b"c\nd\n"], True)) == [b"ab\r", b"c\n", b"d\n"]
    assert list(_lines_with_ends([b"a", b"b", b"\nc", b"\n"], False)) == [b"ab\n", b"c\n"]
    path = write_text(tmp_path / "in", b"a\r\nb\rcd\n\re")
    found = [(b.start, b.length, b.first, b.lines) for b in LineFile(path, "in", str(tmp_path), "", True).blocks(2)]
    assert found == [(0, 5, 1, 2), (5, 4, 3, 2), (9, 1, 5, 1)]


def test_prompts_and_lines_are_read_as_the_text_was(tmp_path, small_lm):
    vocab = Vocab(level="char", raw_text=False)
    vocab.set_lines(["a", "b", "\\n", *"cdefghijklmnopqrstuv"], "made")
    for prompt in ("a\r\nb\rb\n", b"a\r\nb\rb\n", "\ufeffa\nb\nb\r"):
        assert encode_prompt(vocab, prompt).tolist() == [0, 2, 1, 2, 1, 2]
    lm = small_lm(n_layer=1)
    expected = [score.nll for score in score_lines(lm, vocab, ["ab", "", "b"])]
    found = list(score_lines(lm, vocab, ["\ufeffab\r\n", "\r\n", b"b\r"]))
    np.testing.assert_allclose([score.nll for score in found], expected, rtol=1e-6)
    assert [score.bytes for score in found][1:] == [1, 2] and found[2].text == "b"
    raw = Vocab(level="char")
    raw.set_lines(["a", "\\r", "\\n"], "made")
    assert encode_prompt(raw, "a\r\n").tolist() == [0, 1, 2]


# --------------------------------------------------------------------------------------------------------------- JSON


def json_lines(rows=ROWS):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def zipped(name, text):
    def write(path):
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(name, text)

    return write


FILES = {
    "a.jsonl": json_lines(),
    "A.JSONL": json_lines(),
    "a.json": "\ufeff" + json_lines(),
    "a.jl": "\n" + json_lines(),
    "data.txt": json_lines().replace("\n", "\r\n"),
    "no_ending": json_lines().replace("\n", "\r"),
    "a.txt.gz": gzip.compress(json_lines().encode()),
    "A.JSONL.GZ": gzip.compress(json_lines().encode()),
    "a.zip": zipped("inner.txt", json_lines()),
    "A.Zip": zipped("INNER.JSONL", json_lines()),
    "array.json": json.dumps(ROWS, indent=2),
    "array.txt": json.dumps(ROWS),
    "strings.json": json.dumps([row["text"] for row in ROWS]),
    "folder/a.txt": json_lines(),
}


@pytest.mark.parametrize("name", FILES)
def test_json_is_recognised_by_what_is_in_the_file(tmp_path, monkeypatch, name):
    expected = tokens_of(write_text(tmp_path / "expected.jsonl", json_lines()))
    path, data = tmp_path / name, FILES[name]
    path.parent.mkdir(exist_ok=True)
    data(path) if callable(data) else write_text(path, data)
    path = str(path.parent if "/" in name else path)
    for size in (1 << 20, 5):
        monkeypatch.setattr(text_files, "BLOCK_BYTES", size)
        assert tokens_of(path) == expected
    assert expected[2] == "</s>"


NO_JSON = (
    "{\n  not JSON\n}\n", "[Illustration]\n\nText.\n", '["Hello", he said.]\n', '{"a": 1}\nText, and more.\n', "[1]\n",
)  # fmt: skip


@pytest.mark.parametrize("text", NO_JSON)
def test_text_that_only_begins_as_json_is_text(tmp_path, text):
    text *= 9
    found, _, document = tokens_of(write_text(tmp_path / "a.txt", text))
    assert found == text and document is None
    if text.startswith("{\n"):
        with raises_parameter(f"{tmp_path}/a.json", None):
            tokens_of(write_text(tmp_path / "a.json", text))
        assert tokens_of(str(tmp_path / "a.json"), raw_text=True)[0] == text


def test_raw_text_is_the_way_out_and_a_field_is_named(tmp_path):
    path = write_text(tmp_path / "log.txt", '{"message": "a"}\n' * 20)
    with raises_parameter("text_field", "text", ["message"]):
        tokens_of(path)
    assert tokens_of(path, raw_text=True)[0].startswith('{"message"')
    assert tokens_of(path, text_field="message")[0].startswith("a</s>a")
    array = write_text(tmp_path / "a.json", '[{"message": "b"}, {"message": ""}]')
    with raises_parameter(f"{tmp_path}/a.json, text 2, field 'message'", ""):
        tokens_of(array, text_field="message")


def test_portions_of_json_are_read_as_the_whole_file(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "BLOCK_BYTES", 300)
    monkeypatch.setattr("txl_tf.data.text.portions._PORTIONS_OF_WORKER", 1)

    class Workers:
        def portions(self, paths):
            return cut_in_portions(paths, 3)

        def each(self, function, calls, progress=None):
            for call in calls:
                yield from function(*call)

    for name, data in {"a.txt": json_lines(), "a.json": json.dumps(ROWS)}.items():
        path = write_text(tmp_path / name, data)
        whole = corpus.build_corpus("text", path, valid_fraction=0.3)
        parts = corpus.prepare(tmp_path / f"{name}-made", "text", path, valid_fraction=0.3, workers=Workers())
        for split in whole.splits:
            np.testing.assert_array_equal(parts.splits[split], whole.splits[split])
    assert len(cut_in_portions([str(tmp_path / "a.txt")], 3)) > 1 and len(cut_in_portions([path], 3)) == 1


# ---------------------------------------------------------------------------------------------------- bad rows, commas


def test_rows_without_a_text_are_left_out_and_counted(tmp_path, caplog):
    rows = [{"text": ""}, *ROWS[:5], {"text": None}, {"other": 1}, *ROWS[5:], {"text": ["no"]}]
    expected = tokens_of(write_text(tmp_path / "good.jsonl", json_lines()))
    path = write_text(tmp_path / "bad.jsonl", json_lines(rows) + "no JSON\n")
    with raises_parameter(f"{tmp_path}/bad.jsonl, line 1, field 'text'", ""):
        tokens_of(path)
    assert tokens_of(path, skip_bad_lines=True) == expected
    facts = "skip_bad_lines", 5, f"{path}, line 1", "'text'"
    assert len(caplog.messages) == 1 and mentions(caplog.messages[0], *facts)
    texts = ["", *(row["text"] for row in ROWS), None]
    made = txl_tf.prepare(texts, tmp_path / "made", skip_bad_lines=True, valid_fraction=0.3)
    good = corpus.build_corpus("text", f"{tmp_path}/good.jsonl", valid_fraction=0.3)
    np.testing.assert_array_equal(made.splits["train"], good.splits["train"])
    assert mentions(caplog.messages[-1], "skip_bad_lines", 2, 1)
    again = corpus.prepare(tmp_path / "again", "text", path, skip_bad_lines=True)
    assert len(again.splits["train"]) and mentions(caplog.messages[-1], "skip_bad_lines", 5)
    with raises_naming(ParameterError, 2):
        txl_tf.prepare(["", None], tmp_path / "none", skip_bad_lines=True)
    with raises_parameter("texts", 0):
        txl_tf.prepare([], tmp_path / "none", skip_bad_lines=True)
    with pytest.raises(ParameterError) as caught:
        tokens_of(write_text(tmp_path / "a.txt", "plain text" * 9), skip_bad_lines=True)
    assert caught.value.name == "skip_bad_lines"


BROKEN_ARRAYS = {
    "a line": json.dumps(ROWS)[:300],
    "many lines": json.dumps(ROWS[:5], indent=1)[:-20],
    "objects on lines": "[\n" + ",\n".join(map(json.dumps, ROWS[:5])) + "\n",
    "a number": json.dumps([*ROWS[:3], 3, *ROWS[3:]]),
}


@pytest.mark.parametrize("data", BROKEN_ARRAYS.values(), ids=BROKEN_ARRAYS)
@pytest.mark.parametrize("name", ["a.json", "a.txt"])
def test_the_lines_of_a_broken_array_are_not_left_out(tmp_path, monkeypatch, name, data):
    path = write_text(tmp_path / name, data)
    for size in (1 << 20, 5):
        monkeypatch.setattr(text_files, "BLOCK_BYTES", size)
        for skip in (False, True):
            with raises_parameter(path, None):
                tokens_of(path, text_field="text", skip_bad_lines=skip)


def test_a_list_before_json_lines_is_a_bad_line(tmp_path, monkeypatch):
    expected = tokens_of(write_text(tmp_path / "good.jsonl", json_lines()))
    path = write_text(tmp_path / "a.txt", "[1, 2]\n" + json_lines())
    for size in (1 << 20, 5):
        monkeypatch.setattr(text_files, "BLOCK_BYTES", size)
        assert tokens_of(path, text_field="text", skip_bad_lines=True) == expected


def test_a_comma_belongs_to_a_name_where_such_a_file_exists(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a,b.txt", "c", "c,d", "e, f,g"):
        write_text(tmp_path / name, name)
    for given in ("a,b.txt", ["a,b.txt"], ["a", "b.txt"]):
        assert find_files(given) == ["a,b.txt"]
    assert find_files("c,a,b.txt,e, f,g") == ["c", "a,b.txt", "e, f,g"] == find_files("c,a,b.txt,e, f,g".split(","))
    assert find_files("c,d") == ["c,d"] and find_files(["c", "d"]) == ["c", "d"]
    assert find_files("x,y.txt") == ["x", "y.txt"]  # their reader says that they do not exist


# ---------------------------------------------------------------------------------------------------------- older runs


def older_text(tmp_path, kind):
    text = joined(LINES, "\r\n") if kind == "crlf" else json_lines()
    return write_text(tmp_path / kind, "\ufeff" + text)


@pytest.mark.parametrize("kind", ["crlf", "a.json"])
def test_the_text_of_a_run_of_an_earlier_version_keeps_its_tokens(tmp_path, small_lm, kind):
    data = {"dataset": "text", "data_path": older_text(tmp_path, kind), "level": "char", "valid_fraction": 0.3}
    before = corpus.build_corpus(**data, raw_text=True)
    assert "\ufeff" in before.vocab.symbols and ("\r" if kind == "crlf" else "{") in before.vocab.symbols
    for raw_text in (True, False):
        made = before if raw_text else corpus.build_corpus(**data)
        folder, n_token = RunFolder(tmp_path / f"run-{raw_text}"), len(made.vocab)
        model = {**SMALL, "n_layer": 1, "mem_len": 4, "n_token": n_token}
        folder.create(data, model, [made.vocab], small_lm(n_layer=1, n_token=n_token), step=1)
        assert folder.load_vocab().raw_text == raw_text  # nothing else says how the text was read
        assert ("raw_text" in folder.read_config()["vocab"]) == (not raw_text)
        resumed = LanguageModelRun(folder, None, data, None, None, None, None)
        for found in (open_corpus_of_run(folder), resumed.open_corpus()):
            assert found.vocab.symbols == made.vocab.symbols and found.vocab.raw_text == raw_text
            for split, tokens in made.splits.items():
                np.testing.assert_array_equal(found.splits[split], tokens)
        resumed.corpus = made
        assert "raw_text" not in resumed.data_config()  # the vocabulary has it


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["crlf", "a.json"])
def test_a_run_of_an_earlier_version_goes_on_and_is_started_from(tmp_path, kind):
    path, data, steps = older_text(tmp_path, kind), {"level": "char", "valid_fraction": 0.3}, {"iterations": 2}
    train_run(tmp_path / "run", path, data={**data, "raw_text": True}, training={"train_steps": 4, **steps})
    folder = RunFolder(tmp_path / "run")
    symbols = folder.load_vocab().symbols
    assert evaluate_run(folder)  # whose text has the fingerprint
    train_run(tmp_path / "run", path, data=data, training={"train_steps": 6, **steps})  # without a word of it
    assert folder.steps()[-1] == 6 and "raw_text" not in folder.read_config()["vocab"]
    tuned = {"train_steps": 4, **steps, "init_from": str(tmp_path / "run")}
    train_run(tmp_path / "tuned", path, data=data, training=tuned)
    assert RunFolder(tmp_path / "tuned").load_vocab().symbols == symbols
    train_run(tmp_path / "new", path, data=data, training={"train_steps": 4, **steps})
    new = RunFolder(tmp_path / "new").load_vocab()
    assert not {"\r", "\ufeff", "{"} & set(new.symbols) and not new.raw_text


def test_a_folder_of_an_earlier_version_stays_prepared(tmp_path):
    path = write_text(tmp_path / "a.json", json_lines())
    corpus.prepare(tmp_path / "made", "text", path, raw_text=True)
    info = json.loads((tmp_path / "made" / "corpus-info.json").read_text())
    info["vocab"].pop("raw_text", None), info.pop("checksum")
    (tmp_path / "made" / "corpus-info.json").write_text(json.dumps(info))
    assert corpus.prepare(tmp_path / "made", "text", path).vocab.raw_text  # it is prepared already
    with raises_parameter("raw_text", False, [True]):
        corpus.prepare(tmp_path / "made", "text", path, raw_text=False)


def test_the_field_and_bad_rows_of_a_text_to_evaluate(tmp_path):
    vocab = Vocab(level="char", raw_text=False)
    vocab.set_lines([*"abc", "\\n"], "made")
    plain = write_text(tmp_path / "plain.txt", "abc\r\n" * 3)
    rows = write_text(tmp_path / "rows.txt", json_lines([{"body": body} for body in ("abc\r\n", "", "abc\nabc\r")]))
    expected, size = encode_text(plain, vocab, {})
    found, of_rows = encode_text(rows, vocab, {}, {"text_field": "body", "skip_bad_lines": True})
    assert found.tolist() == expected.tolist() == [0, 1, 2, 3] * 3 and size == of_rows == (12, 12, 3)
    of_run = {"text_field": "body", "skip_bad_lines": True}
    assert encode_text(rows, vocab, of_run)[0].tolist() == found.tolist()
    assert encode_text(plain, vocab, of_run)[0].tolist() == found.tolist()  # they are about rows
    with raises_parameter("text_field", "text", ["body"]):
        encode_text(rows, vocab, {})
    with pytest.raises(ParameterError) as caught:
        encode_text(plain, vocab, {}, {"skip_bad_lines": True})
    assert caught.value.name == "skip_bad_lines"


def test_parts_of_a_file_know_their_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "BLOCK_BYTES", 8)
    path = write_text(tmp_path / "a", b"a\rb\r\nc\nd\r\ne\r" * 4)
    for place in (8, 16, 24):
        begin = text_files.line_start(path, place)
        before = Path(path).read_bytes()[:begin]
        assert text_files.lines_before(path, begin, raw_text=False) == len(before.splitlines())
        assert text_files.lines_before(path, begin) == before.count(b"\n")
