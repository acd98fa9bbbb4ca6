"""Texts as they come: which files a path stands for, what is in them, and what is wrong with them."""

import gzip
import json
import os
import zipfile

import numpy as np
import pytest
import tensorflow as tf
from helpers import SMALL, raises_parameter, write_splits, write_text

import txl_tf
from txl_tf.data import text_files
from txl_tf.data.subwords import SubwordVocab
from txl_tf.data.text import corpus
from txl_tf.data.text.sizes import END_OF_DOCUMENT, Extent, TextSize, extent_of
from txl_tf.data.text.texts import FilePart, find_files, find_named_files, folder_around, have_documents, read_texts
from txl_tf.data.vocabulary import Vocab
from txl_tf.runs.families.language_model import LanguageModelRun
from txl_tf.runs.folder import RunFolder
from txl_tf.runs.setup import open_corpus_of_run

DOCUMENTS = ["the first one\n", "zweites: äöü\n\nmit Absatz", 'quotes " and \\ and \u2028 no line\x85end', "x"]
JSON = "".join(json.dumps({"id": i, "text": text}, ensure_ascii=i % 2) + "\n" for i, text in enumerate(DOCUMENTS))


def write_gzip(path, text):
    path.write_bytes(gzip.compress(text.encode()))
    return str(path)


def write_zip(path, **files):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return str(path)


def texts_of(path, level="char", text_field=None):
    return [
        (text.name, "".join(piece.decode() if isinstance(piece, bytes) else piece for piece in text.pieces))
        for text in read_texts(map(FilePart, find_files(path)), level, text_field)
    ]


def test_a_folder_a_pattern_and_a_list_stand_for_their_files_in_order(tmp_path):
    for name in ("b.txt", "a.txt", "c.jsonl", ".hidden", "sub/d.txt", ".git/e.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_text(tmp_path / name, name)

    def names(path):
        return [found.removeprefix(f"{tmp_path}/") for found in find_files(path)]

    assert names(str(tmp_path)) == names(tmp_path) == ["a.txt", "b.txt", "c.jsonl", "sub/d.txt"]
    assert names(f"file://{tmp_path}/*.txt") == [f"file://{tmp_path}/a.txt", f"file://{tmp_path}/b.txt"]
    assert names(f"{tmp_path}/b.txt, {tmp_path}/[ac].*") == ["b.txt", "a.txt", "c.jsonl"]
    with raises_parameter("data_path"):
        names(f"{tmp_path}/b.txt,")
    assert names([tmp_path / "sub", f"{tmp_path}/a.txt"]) == ["sub/d.txt", "a.txt"]
    assert names(f"{tmp_path}/nowhere.txt") == ["nowhere.txt"]  # its reader says so
    write_text(tmp_path / "really[1].txt", "x")
    assert names(f"{tmp_path}/really[1].txt") == ["really[1].txt"]
    named = find_named_files(f"{tmp_path},{tmp_path}/s*/*.txt,{tmp_path}/a.txt,file://{tmp_path}/sub/")
    assert [name for _, name in named[-3:]] == ["sub/d.txt", "a.txt", "d.txt"] and named[3][1] == "really[1].txt"
    assert named[4] == (f"{tmp_path}/sub/d.txt", "sub/d.txt") == named[5]
    with pytest.raises(FileNotFoundError, match="/[*].json"):
        find_files(f"{tmp_path}/*.json")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="empty"):
        find_files(tmp_path / "empty")


@pytest.mark.parametrize("remote", [False, True])
def test_a_pattern_matches_as_in_a_shell(tmp_path, remote):
    for name in ("a.txt", "sub/b.txt", "sub/x/c.txt", ".d.txt", ".git/e.txt", "sub/.x/f.txt", "[1]/g.txt", "h.csv"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        write_text(tmp_path / name, name)
    folder = f"file://{tmp_path}" if remote else str(tmp_path)

    def names(pattern):
        return [path.removeprefix(f"{folder}/") for path in find_files(f"{folder}/{pattern}")]

    shown = ["[1]/g.txt", "a.txt", "sub/b.txt", "sub/x/c.txt"]
    assert names("**/*.txt") == names("**/**/*.txt") == shown
    assert names("**/sub/**/*.txt") == names("sub/**") == ["sub/b.txt", "sub/x/c.txt"]
    assert names("**") == names("*") == names("**/*") == ["[1]/g.txt", "a.txt", "h.csv", "sub/b.txt", "sub/x/c.txt"]
    assert names("*.txt") == ["a.txt"] and names(".*.txt") == [".d.txt"]
    assert names(".*/*") == [".git/e.txt"] and names("**/.x/*") == ["sub/.x/f.txt"]
    assert names("**/[!abc].txt") == names("**/[^abc].txt") == names("**/\\[1\\]/*") == ["[1]/g.txt"]


def test_a_pattern_without_a_folder_is_for_the_current_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "sub/b.txt", ".c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_text(tmp_path / name, name)
    assert [name for _, name in find_named_files("**/*.txt")] == ["a.txt", "sub/b.txt"]
    assert [name for _, name in find_named_files("*.txt")] == ["a.txt"]
    for path, found in (("sub/made.txt", "**/*.txt"), (".sub/made.txt", None), (".made.txt", None), ("made", None)):
        assert folder_around([path], "**/*.txt") == found


def test_the_folder_around_a_path_is_found_through_links_and_schemes(tmp_path, monkeypatch):
    current = tmp_path / "now[1]"
    (current / "texts").mkdir(parents=True)
    write_text(current / "texts" / "a.txt", "a")
    os.symlink(current / "texts", tmp_path / "link")
    monkeypatch.chdir(current)
    for data_path in (
        "texts",
        f"file://{current}/texts",
        str(tmp_path / "link"),
        "*",
        "t*/*.txt",
        f"{tmp_path}/link/*",
    ):
        for path in ("texts/made.txt", f"file://{current}/texts/made.txt", str(tmp_path / "link" / "made.txt")):
            assert folder_around([path], data_path) == data_path
        for path in ("made.csv", str(tmp_path / "made.txt"), f"{tmp_path}/texts/made.txt"):
            assert folder_around([path], data_path) == (data_path if (path, data_path) == ("made.csv", "*") else None)
    assert folder_around(["made"], "texts/.*") is None


def test_a_name_that_is_not_utf8_is_shown_with_its_folder(tmp_path):
    write_text(tmp_path / "good.txt", "a")
    try:
        (tmp_path / os.fsdecode(b"bad\xff.txt")).touch()
    except OSError:
        pytest.skip("this file system has only names in UTF-8")
    for path in (f"{tmp_path}", f"{tmp_path}/*", f"{tmp_path}/**/*.txt"):
        with raises_parameter("data_path") as caught:
            find_files(path)
        assert str(tmp_path) in str(caught.value) and r"bad\xff.txt" in str(caught.value)
        with raises_parameter("input", path):
            find_files(path, "input")
    assert find_files(f"{tmp_path}/g*") == [f"{tmp_path}/good.txt"]
    with raises_parameter("data_path"):
        find_files(str(tmp_path / "bad\udcff.txt"))


def test_white_space_around_a_path_counts_in_a_list_and_in_the_name_of_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in (" a", "b"):
        write_text(tmp_path / name, name)
    for given, found in (
        (" a", [" a"]), ([" a"], [" a"]), (" b", ["b"]), ([" b"], [" b"]), ("a", ["a"]), ("b, a, b", ["b", " a", "b"]),
    ):  # fmt: skip
        assert find_files(given) == found
    assert sorted(map(os.path.basename, find_files("*"))) == [" a", "b"]


@pytest.mark.parametrize("level", ["char", "byte", "subword"])
@pytest.mark.parametrize("kind", ["plain", "gzip", "zip", "remote"])
def test_texts_come_back_as_they_are_from_every_kind_of_file(tmp_path, kind, level):
    if kind == "zip":
        path = write_zip(tmp_path / "a.zip", **{"b/two.txt": "two\r\n", "a.jsonl": JSON, "__MACOSX/a": "no", "b/": ""})
        expected = [(f"{path}/a.jsonl, line {i}", text) for i, text in enumerate(DOCUMENTS, 1)]
        expected.append((f"{path}/b/two.txt", "two\r\n"))
    else:
        write = write_gzip if kind == "gzip" else write_text
        end = ".gz" * (kind == "gzip")
        before = "file://" * (kind == "remote")
        path = (
            before + write(tmp_path / f"a.jsonl{end}", JSON) + "," + before + write(tmp_path / f"b.txt{end}", "two\r\n")
        )
        json_path, other = path.split(",")
        expected = [*((f"{json_path}, line {i}", text) for i, text in enumerate(DOCUMENTS, 1)), (other, "two\r\n")]
    assert texts_of(path, level) == expected
    assert have_documents(find_files(path))


def test_words_get_their_last_newline_in_every_text(tmp_path):
    path = write_text(tmp_path / "a.jsonl", JSON)
    assert [text for _, text in texts_of(path, "word")] == [text.rstrip("\n") + "\n" for text in DOCUMENTS]


def test_a_byte_order_mark_is_no_part_of_the_first_json_line(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "BLOCK_BYTES", 4)
    lines = '\ufeff\n{"text": "\ufeffa"}\n{"text": "b"}\n'
    zipped = write_zip(tmp_path / "a.zip", **{"a.jsonl": lines, "b.jsonl": lines})
    for path in (write_text(tmp_path / "a.jsonl", lines), write_gzip(tmp_path / "a.jsonl.gz", lines), zipped):
        assert [text for _, text in texts_of(path)] == ["\ufeffa", "b"] * (1 + path.endswith("zip"))
    with raises_parameter(f"{tmp_path}/b.jsonl, line 2", '\ufeff{"text": "b"}'):
        texts_of(write_text(tmp_path / "b.jsonl", '{"text": "a"}\n\ufeff{"text": "b"}'))


def test_a_field_can_be_named_and_makes_any_file_json_lines(tmp_path):
    path = write_text(tmp_path / "a.txt", '{"body": "one", "text": "no"}\n\n  \n{"body": "two"}')
    assert texts_of(path, text_field="body") == [(f"{path}, line 1", "one"), (f"{path}, line 4", "two")]
    assert not have_documents([path])


@pytest.mark.parametrize(
    ("line", "name", "value", "allowed"),
    [
        ('{"txt": "a", "n": 1}', "text_field", "text", ["txt", "n"]),
        ("{}", "text_field", "text", []),
        ('{"text": ""}', "{}, line 2, field 'text'", "", "a text that is not empty"),
        ('{"text": null}', "{}, line 2, field 'text'", None, "a string"),
        ('["text"]', "{}, line 2", ["text"], "a string"),
        ('{"text": "a"', "{}, line 2", '{"text": "a"', "JSON"),
        ("[" * 100_000, "{}, line 2", "[" * 100_000, "JSON"),
        ('{"text": "\\ud83d"}', "{}, line 2, field 'text'", "\ud83d", "UTF-8 text"),
    ],
)
def test_a_bad_json_line_is_named(tmp_path, line, name, value, allowed):
    path = write_text(tmp_path / "a.jsonl", f'{{"text": "good"}}\n{line}\n')
    with raises_parameter(name.format(path), value, allowed) as raised:
        corpus.build_corpus("text", path)
    assert f"{path}, line 2" in str(raised.value)


def test_damaged_archives_are_errors_that_name_the_file(tmp_path):
    good = gzip.compress(b"many words here " * 1000)
    for name, data in {
        "no.gz": b"no gzip at all",
        "cut.gz": good[:-20],
        "flipped.gz": good[:30] + b"\xff" + good[31:],
        "no.zip": b"PK\3\4 no zip",
    }.items():
        path = write_text(tmp_path / name, data)
        with raises_parameter(path, None, "an archive that is whole"):
            texts_of(path)
    with raises_parameter(f"{tmp_path}/empty.gz", b""):
        texts_of(write_gzip(tmp_path / "empty.gz", ""))
    with raises_parameter(f"{tmp_path}/none.zip", None, "an archive of files"):
        texts_of(write_zip(tmp_path / "none.zip"))
    with raises_parameter(f"{tmp_path}/one.zip/a.txt", None, "UTF-8 text"):
        texts_of(write_zip(tmp_path / "one.zip", **{"a.txt": b"a\xff"}))
    with pytest.raises(FileNotFoundError, match="gone.gz"):
        texts_of(str(tmp_path / "gone.gz"))


def test_progress_ends_with_the_bytes_of_the_files(tmp_path):
    done = []
    paths = [write_gzip(tmp_path / "a.gz", JSON * 1000), write_text(tmp_path / "b.txt", JSON)]
    for text in read_texts(map(FilePart, paths), "char", progress=done.append):
        list(text.pieces)
    assert sum(done) == sum(tf.io.gfile.stat(path).length for path in paths)


# ------------------------------------------------------------------------------------------------ documents, sizes


@pytest.mark.parametrize(("level", "end"), [("char", 0), ("byte", 256), ("word", 2)])
def test_documents_are_ended_by_a_symbol_that_no_text_has(tmp_path, level, end):
    path = write_text(tmp_path / "a.jsonl", '{"text": "b a"}\n{"text": "a a</s>"}\n{"text": "b"}\n')
    made = corpus.prepare(str(tmp_path / level), "text", path, level=level, valid_fraction=0.2)
    vocab, (train, valid) = made.vocab, made.splits.values()
    assert vocab.document_id == vocab.start_id == vocab.ids["</s>"] == end
    documents = np.split(np.asarray(train), np.flatnonzero(np.asarray(train) == end) + 1)
    newline = "\n" * (level == "word")
    assert [vocab.decode(document[:-1]) for document in documents[:-1]] == [f"b a{newline}", f"a a</s>{newline}"]
    assert documents[-1].size == 0 and vocab.decode(valid) == f"b{newline}</s>"  # documents are not cut
    assert made.sizes == {
        "train": TextSize(10 + 2 * len(newline), 10 + 2 * len(newline), 4),
        "valid": TextSize(1 + len(newline), 1 + len(newline), 1),
    }
    again = corpus.load_corpus(str(tmp_path / level))
    assert again.vocab.get_config() == vocab.get_config() and again.sizes == made.sizes


def test_files_are_documents_only_where_that_is_asked_for(tmp_path):
    write_text(tmp_path / "a.txt", "aa")
    write_text(tmp_path / "b.txt", "bb")
    joined = corpus.build_corpus("text", tmp_path, valid_fraction=0.5)
    assert joined.vocab.document is None and [joined.vocab.decode(ids) for ids in joined.splits.values()] == [
        "aa",
        "bb",
    ]
    documents = corpus.build_corpus("text", tmp_path, documents=True, valid_fraction=0.4)
    assert [documents.vocab.decode(ids) for ids in documents.splits.values()] == ["aa</s>", "bb</s>"]


def test_bad_documents_are_errors(tmp_path):
    path = write_text(tmp_path / "a.jsonl", '{"text": "a\\nb </s>"}\n{"text": "c"}\n')
    with raises_parameter(f"{tmp_path}/a.jsonl, line 1, line 2", "</s>"):
        corpus.build_corpus("text", path, level="word")
    path = write_text(tmp_path / "b.jsonl", '{"text": "a b"}\n{"text": "c d e f g"}\n')
    with raises_parameter("valid_fraction", 0.05):
        corpus.build_corpus("text", path)


def test_sizes_are_those_of_the_whole_text_wherever_it_is_cut():
    text = "Ein Wörtchen \t mehr\u2003oder\n\nweniger: 日本 🎉 "
    for cut in range(len(text) + 1):
        pieces = [text[:cut], "", text[cut:]]
        whole = sum(map(extent_of, pieces), Extent())
        assert whole.size == TextSize(len(text.encode()), len(text), 7)
    assert extent_of(b"a\xff b").size == TextSize(4, 4, 2)
    assert sum([extent_of("a"), END_OF_DOCUMENT, extent_of("b")], Extent()).size.words == 2


@pytest.mark.parametrize("level", ["char", "byte", "word"])
def test_sizes_of_splits_are_measured_where_the_text_is_cut(tmp_path, level):
    text = "one two  three\nfour fünf\n" * 9
    made = corpus.build_corpus("text", write_text(tmp_path / "a.txt", text), level=level, valid_fraction=0.3)
    for split, size in made.sizes.items():
        decoded = made.vocab.decode(made.splits[split])
        assert size.words == len(decoded.split())
    assert sum(made.sizes.values(), TextSize())[:2] == (len(text.encode()), len(text))
    assert made.sizes["train"].bytes / len(text.encode()) == pytest.approx(0.7, abs=0.03)


# ----------------------------------------------------------------------------------------------------- iterables


def test_texts_of_a_program_become_the_corpus_that_a_file_of_them_becomes(tmp_path):
    file = write_text(tmp_path / "a.jsonl", JSON)
    expected = corpus.prepare(str(tmp_path / "file"), "text", file, valid_fraction=0.1, max_size=30)
    rows = {
        "strings": iter(DOCUMENTS),
        "bytes": tf.data.Dataset.from_tensor_slices(DOCUMENTS).as_numpy_iterator(),
        "rows": ({"text": text, "id": i} for i, text in enumerate(DOCUMENTS)),
    }
    for name, texts in rows.items():
        made = txl_tf.prepare(texts, tmp_path / name, valid_fraction=0.1, max_size=30)
        assert made.vocab.symbols == expected.vocab.symbols and made.sizes == expected.sizes
        for split in ("train", "valid"):
            np.testing.assert_array_equal(made.splits[split], expected.splits[split])
        assert sorted(path.name for path in (tmp_path / name).iterdir()) == [
            "corpus-info.json", "train.npy", "valid.npy", "vocab.txt",
        ]  # fmt: skip


def test_a_prepared_folder_is_opened_again_without_reading_a_text(tmp_path):
    made = txl_tf.prepare(["one text", "another"], tmp_path, valid_fraction=0.5)

    def never():
        raise AssertionError("read")
        yield

    again = txl_tf.prepare(never(), tmp_path, valid_fraction=0.5)
    np.testing.assert_array_equal(again.splits["train"], made.splits["train"])
    with raises_parameter("level", "byte", ["char"]):
        txl_tf.prepare(never(), tmp_path, valid_fraction=0.5, level="byte")


@pytest.mark.parametrize(
    ("texts", "options", "name", "value"),
    [
        (["a", ""], {}, "text 2", ""),
        (["a", 3], {}, "text 2", 3),
        ([{"body": "a"}], {}, "text_field", "text"),
        ([b"a\xff"], {}, "text 1", b"a\xff"),
        ([], {}, "texts", 0),
        ("one text", {}, "texts", "one text"),
        ({"text": "one"}, {}, "texts", {"text": "one"}),
        (["a b", "c </s>"], {"level": "word", "valid_fraction": 0.3}, "text 2, line 1", "</s>"),
        (["a b c", "d"], {"level": "sentence"}, "level", "sentence"),
    ],
)
def test_bad_texts_are_named_and_leave_nothing(tmp_path, texts, options, name, value):
    with raises_parameter(name, value):
        txl_tf.prepare(texts, tmp_path / "made", **options)
    assert not (tmp_path / "made").exists() or not list((tmp_path / "made").glob("*.[jn]*"))


@pytest.mark.parametrize(
    "options",
    [
        {"level": "subword"}, {"vocab_size": 300}, {"documents": True}, {"text_field": "text"}, {"min_freq": 2},
        {"max_size": 100}, {"lower_case": True}, {"level": "word"}, {"level": "byte"}, {"valid_fraction": 0.5},
        {"subword_type": "bpe"}, {"skip_bad_lines": True}, {"raw_text": False},
    ],
)  # fmt: skip
def test_the_papers_datasets_have_the_originals_tokens(tmp_path, options):
    ((name, value),) = options.items()
    with raises_parameter(name, value, "left out with dataset=wt2"):
        corpus.build_corpus("wt2", tmp_path, **options)


def test_wrong_workers_and_folders_are_named(tmp_path):
    with raises_parameter("workers", 2):
        txl_tf.prepare(["some words"] * 30, tmp_path / "new", workers=2)
    for folder in ("", "/", 3):
        with raises_parameter("data_dir", folder):
            txl_tf.prepare(["some words"] * 30, folder)


def test_a_folder_that_was_prepared_with_another_field_or_vocabulary_is_refused(tmp_path):
    texts = [{"a": f"first {i}", "b": f"second {i}"} for i in range(30)]
    txl_tf.prepare(texts, tmp_path / "fields", text_field="a", level="char")
    with raises_parameter("text_field", "b"):
        txl_tf.prepare(texts, tmp_path / "fields", text_field="b", level="char")
    for name in ("one", "two"):
        (tmp_path / name).write_text("<eos>\n<unk>\n</s>\nxx\nyy\n" + name)
    options = {"level": "word", "vocab_path": tmp_path / "one"}
    made = txl_tf.prepare(["xx yy"] * 30, tmp_path / "words", **options)
    assert txl_tf.prepare(["xx yy"] * 30, tmp_path / "words", **options).vocab.symbols == made.vocab.symbols
    with raises_parameter("vocab_path"):
        txl_tf.prepare(["xx yy"] * 30, tmp_path / "words", level="word", vocab_path=tmp_path / "two")


def test_the_prepared_folder_lies_outside_of_the_text(tmp_path):
    (tmp_path / "texts" / "old").mkdir(parents=True)
    write_text(tmp_path / "texts" / "a.txt", "a b c d e f " * 9)
    for made in ("texts", "texts/made", "texts/old/made"):
        with raises_parameter("data_dir", f"{tmp_path}/{made}"):
            corpus.prepare(tmp_path / made, "text", [tmp_path / "texts"])
    assert [path.name for path in (tmp_path / "texts").iterdir()] != [] and not (tmp_path / "texts/made").exists()
    for made in ("made", "texts.made", "texts/.made"):  # a hidden one is no text
        corpus.prepare(tmp_path / made, "text", [tmp_path / "texts"])


def test_the_prepared_folder_lies_outside_of_what_a_pattern_would_match(tmp_path):
    (tmp_path / "texts" / "old").mkdir(parents=True)
    path, old = (write_text(tmp_path / name, "a b c d e f " * 9) for name in ("texts/a.txt", "texts/old/b.txt"))
    for pattern, made in (("texts/*", "texts/made"), ("t*s/*", "texts/old/made"), ("*/*.txt", "made"), ("*/*", "made")):
        with raises_parameter("data_dir", f"{tmp_path}/{made}"):
            corpus.prepare(tmp_path / made, "text", f"{path},{tmp_path}/{pattern}")
    assert not list(tmp_path.glob("**/made"))
    for pattern, made in (("texts/*", "made"), ("texts/*", "texts/old/.made"), ("texts/*.txt", "texts/made")):
        for _ in range(2):  # the second finds it done
            corpus.prepare(tmp_path / made, "text", f"{old},{tmp_path}/{pattern}")


def test_a_text_of_lines_ends_with_its_line_in_every_kind_of_file(tmp_path):
    kinds = {"a.txt": "a b\nc", "a.jsonl": json.dumps({"text": "a b\nc"})}
    paths = [write_text(tmp_path / name, text) for name, text in kinds.items()]
    assert [texts_of(path, "line")[0][1] for path in paths] == ["a b\nc\n"] * 2


def test_options_that_do_not_go_together_are_refused(tmp_path):
    path = write_text(tmp_path / "a.txt", "a b c d e f")
    for options, name, value in (
        ({"vocab_size": 300}, "vocab_size", 300),
        ({"level": "subword", "max_size": 300}, "max_size", 300),
        ({"level": "subword", "lower_case": True}, "lower_case", True),
        ({"vocab_path": "x", "vocab_size": 3, "level": "subword"}, "vocab_path", "x"),
        ({"subword_type": "bpe"}, "subword_type", "bpe"),
        ({"vocab_path": "x", "subword_type": "bpe", "level": "subword"}, "subword_type", "bpe"),
        ({"num_shuffle": 2}, "num_shuffle", 2),
        ({"seed": 0}, "seed", 0),
    ):
        with raises_parameter(name, value):
            corpus.build_corpus("text", path, **options)
    for name, value in (("num_shuffle", 2), ("seed", 0)):
        for dataset, data_path in (("pydoc", None), ("wt103", tmp_path)):
            with raises_parameter(name, value, "left out without dataset=lm1b"):
                corpus.build_corpus(dataset, data_path, **{name: value})


def test_options_that_make_subwords_are_refused_with_a_vocabulary(tmp_path):
    path = write_text(tmp_path / "a.txt", "a b c d e f")
    for name, value in (("vocab_size", 300), ("subword_type", "bpe")):
        with raises_parameter(name, value, "left out with a given vocabulary"):
            corpus.build_corpus("text", path, vocab=SubwordVocab(), level="subword", **{name: value})


def test_extend_vocab_needs_a_vocabulary(tmp_path):
    path = write_text(tmp_path / "a.txt", "a a a b b c " * 9)
    with raises_parameter("extend_vocab", True):
        corpus.build_corpus("text", path, level="word", max_size=1, extend_vocab=True)
    known = Vocab(level="word", special=["<eos>", "<unk>"], eos="<eos>", unk="<unk>")
    known.build()
    made = corpus.build_corpus("text", path, known, extend_vocab=True, level="word", max_size=1, raw_text=True)
    assert made.vocab.symbols == ["<eos>", "<unk>", "a"]


def test_a_paper_dataset_may_repeat_the_level_of_a_given_vocabulary(tmp_path):
    folder = write_splits(tmp_path, "A a b\n", "B\n", "b\n")
    made = corpus.build_corpus("ptb", folder)
    repeated = {"level": "word", "lower_case": True}
    again = corpus.build_corpus("ptb", folder, made.vocab, **repeated)
    for split, tokens in made.splits.items():
        np.testing.assert_array_equal(again.splits[split], tokens)
    for name, value in repeated.items():
        with raises_parameter(name, value, "left out with dataset=ptb"):
            corpus.build_corpus("ptb", folder, **{name: value})
    with raises_parameter("level", "byte"):
        corpus.build_corpus("ptb", folder, made.vocab, level="byte")


def test_a_run_that_recorded_options_without_effect_is_opened_and_resumes(tmp_path, small_lm):
    folder = write_splits(tmp_path, "A a b\n", "B\n", "b\n")
    path = write_text(tmp_path / "a.txt", "a b c d e f " * 9)
    for dataset, data_path, ignored in (
        ("ptb", folder, {"level": "byte", "valid_fraction": 0.5, "subword_type": "bpe", "seed": 3}),
        ("text", path, {"subword_type": "bpe", "num_shuffle": 4}),
    ):
        made = corpus.build_corpus(dataset, data_path)
        model = {**SMALL, "n_layer": 1, "mem_len": 4, "n_token": len(made.vocab)}
        run = RunFolder(tmp_path / f"run_{dataset}")
        data = {"dataset": dataset, "data_path": data_path, **ignored}
        run.create(data, model, [made.vocab], small_lm(n_layer=1, n_token=len(made.vocab)), step=1)
        resumed = LanguageModelRun(run, None, data, None, None, None, None)
        for found in (open_corpus_of_run(run), resumed.open_corpus()):
            for split, tokens in made.splits.items():
                np.testing.assert_array_equal(found.splits[split], tokens)
        with raises_parameter("seed" if dataset == "ptb" else "num_shuffle", 9):  # not what the run has recorded
            open_corpus_of_run(run, {**data, "seed" if dataset == "ptb" else "num_shuffle": 9})
