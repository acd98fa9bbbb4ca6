"""Corpora: from text to token arrays, in memory or in a prepared folder, which is whole or not there."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from helpers import ROOT, as_lists, mentions, raises_naming, raises_parameter, write_splits, write_text

from txl_tf.data import text_files
from txl_tf.data.text import batches, corpus, prepared_folder
from txl_tf.data.text.batches import choose_bin_capacities, num_batches, segments
from txl_tf.data.token_files import StoredTokens, TokenWriter

# --------------------------------------------------------------------------------- the original's own numbers


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "dataset, where",
    [
        (dataset, where)
        if (dataset, where) == ("enwik8", "in memory") or dataset == "wt2"
        else pytest.param(dataset, where, marks=SLOW)
        for dataset in ("enwik8", "text8", "ptb", "wt2")
        for where in ("in memory", "prepared", "prepared, streamed")
    ],
)
def test_corpus_and_batches_are_the_originals(reference, tmp_path, dataset, where):
    source = reference / "corpus" / dataset
    golden = np.load(source / "golden.npz")
    if where == "in memory":
        made = corpus.build_corpus(dataset, source)
    else:
        folder = f"file://{tmp_path}" if "streamed" in where else tmp_path
        made = corpus.prepare(folder, dataset, source)
        original = json.loads((source / "corpus-info.json").read_text())
        info = json.loads((tmp_path / "corpus-info.json").read_text())
        assert {name: info[name] for name in original} == original
    assert made.vocab.symbols == golden["vocab"].tolist()
    assert made.cutoffs == []
    for split, batch_size in (("train", 4), ("valid", 4), ("test", 2)):
        tokens = made.splits[split]
        np.testing.assert_array_equal(tokens, golden[split])
        assert num_batches(len(tokens), batch_size, 16) == golden[f"{split}_num_batch"]

        expected = list(zip(golden[f"{split}_inputs_full"], golden[f"{split}_labels_full"], strict=True))
        if f"{split}_inputs_last" in golden:
            expected.append((golden[f"{split}_inputs_last"], golden[f"{split}_labels_last"]))
        found = list(segments(tokens, batch_size, 16).as_numpy_iterator())
        assert len(found) == len(expected)
        for found_batch, expected_batch in zip(found, expected, strict=True):
            np.testing.assert_array_equal(found_batch[0], expected_batch[0])
            np.testing.assert_array_equal(found_batch[1], expected_batch[1])


# ---------------------------------------------------------------------------------------- the prepared folder

TEXT = "".join(f"line {i % 7} of {i}\n\n" for i in range(300))


def test_the_prepared_folder(tmp_path):
    path = write_text(tmp_path / "a.txt", "b a\na a c")
    folder = tmp_path / "made" / "here"
    made = corpus.prepare(folder, "text", path, level="word", valid_fraction=0.5, min_freq=2, cutoffs=[2])
    assert sorted(os.listdir(folder)) == ["corpus-info.json", "train.npy", "valid.npy", "vocab.txt"]
    info = json.loads((folder / "corpus-info.json").read_text())
    assert len(info.pop("checksum")) == 64
    names = ("vocab.txt", "train.npy", "valid.npy")
    assert info.pop("sha256") == {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}
    assert info.pop("input_sha256") == {path: hashlib.sha256(b"b a\na a c").hexdigest()}
    assert info.pop("input_times") == {path: os.stat(path).st_mtime_ns}
    assert info == {
        "vocab_size": 3,
        "cutoffs": [0, 2, 3],
        "dataset": "text",
        "format": 1,
        "n_tokens": {"train": 3, "valid": 4},
        "files": {"train": ["train.npy"], "valid": ["valid.npy"]},
        "vocab": {
            "level": "word",
            "lower_case": False,
            "special": ["<eos>", "<unk>"],
            "unk": "<unk>",
            "bos": None,
            "eos": "<eos>",
            "min_freq": 2,
            "max_size": None,
            "document": None,
            "raw_text": False,
        },
        "options": {
            "level": "word",
            "lower_case": False,
            "min_freq": 2,
            "max_size": None,
            "valid_fraction": 0.5,
            "cutoffs": [2],
        },
        "inputs": {path: 9},
        "sizes": {"train": [4, 4, 2], "valid": [6, 6, 3]},
    }
    assert (folder / "vocab.txt").read_text() == "<eos>\n<unk>\na\n"
    assert np.load(folder / "train.npy").tolist() == [1, 2, 0]
    assert np.load(folder / "valid.npy").tolist() == [2, 2, 1, 0]
    assert np.load(folder / "train.npy").dtype == np.uint8
    assert isinstance(made.splits["train"], np.memmap)
    assert (made.cutoffs, made.by_character) == ([2], False)


KINDS = [
    ("text", {"level": "word"}),
    ("text", {"level": "char", "max_size": 5, "lower_case": True}),
    ("text", {"level": "byte", "valid_fraction": 0.3}),
    ("pydoc", {"level": "word"}),
]
SCHEMES = ["", "file://", "ram://"]


@pytest.mark.parametrize(
    "scheme, dataset, options",
    [
        (scheme, *kind) if i == j else pytest.param(scheme, *kind, marks=SLOW)
        for i, scheme in enumerate(SCHEMES)
        for j, kind in enumerate(KINDS)
    ],
    ids=str,
)
def test_prepared_streamed_and_in_memory_are_the_same(tmp_path, monkeypatch, dataset, options, scheme):
    monkeypatch.setattr(batches, "_READ_AHEAD", 50)
    data_path = write_text(tmp_path / "a.txt", TEXT) if dataset == "text" else None
    expected = corpus.build_corpus(dataset, data_path, **options)
    folder = f"{scheme}{tmp_path}/made"
    corpus.prepare(folder, dataset, data_path, **options)
    found = corpus.load_corpus(folder)
    assert found.vocab.symbols == expected.vocab.symbols
    assert found.vocab.get_config() == expected.vocab.get_config()
    assert (found.cutoffs, found.by_character) == (expected.cutoffs, expected.by_character)
    assert list(found.splits) == list(expected.splits) == ["train", "valid"]
    for split, tokens in expected.splits.items():
        assert len(found.splits[split]) == len(tokens)
        assert isinstance(found.splits[split], StoredTokens if scheme else np.memmap)
        np.testing.assert_array_equal(found.splits[split][7:19], tokens[7:19])
        settings = {"start": 3, "drop_remainder": True} if split == "valid" else {}
        streamed = segments(found.splits[split], 2, 11, **settings).take(60)
        held = segments(tokens, 2, 11, **settings).take(60)
        assert streamed.element_spec == held.element_spec
        assert as_lists(streamed) == as_lists(held)
    train, streamed = expected.splits["train"], found.splits["train"]
    assert choose_bin_capacities(streamed, 2, 8, [3, 5]) == choose_bin_capacities(train, 2, 8, [3, 5])
    start = num_batches(len(train), 3, 50) - 1
    wrapped = as_lists(segments(streamed, 3, 50, start=start, repeat=True).take(3))
    assert wrapped == as_lists(segments(train, 3, 50, start=start, repeat=True).take(3))


def test_token_files_have_the_smallest_type_that_fits(tmp_path):
    for n_symbols, dtype in ((256, np.uint8), (257, np.uint16), (65536, np.uint16), (65537, np.int32)):
        text = " ".join(f"w{i}" for i in range(n_symbols - 2))
        made = corpus.prepare(
            tmp_path / str(n_symbols), "text", write_text(tmp_path / "a.txt", text), level="word", cutoffs=[]
        )
        assert len(made.vocab) == n_symbols
        assert made.splits["train"].dtype == dtype
        assert made.splits["train"][-1] == len(made.splits["train"]) + 1


def test_a_second_run_sees_that_the_work_is_done(tmp_path, capsys):
    write_splits(tmp_path, "a b\n", "b\n", "a\n")
    corpus.prepare(tmp_path, "wt2")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    again = corpus.prepare(tmp_path, "wt2", verbose=1)
    assert mentions(capsys.readouterr().out, tmp_path)
    assert again.splits["train"].tolist() == [1, 2, 0]
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before
    (tmp_path / "train.txt").unlink()
    assert corpus.prepare(tmp_path, "wt2").splits["train"].tolist() == [1, 2, 0]


def test_a_moved_folder_is_the_same(tmp_path):
    (tmp_path / "old").mkdir()
    write_splits(tmp_path / "old", "a b\n", "b\n", "a\n")
    corpus.prepare(tmp_path / "old", "wt2")
    (tmp_path / "old").rename(tmp_path / "new")
    assert corpus.prepare(f"{tmp_path}/new/", "wt2").splits["test"].tolist() == [1, 0]


def test_a_folder_that_was_prepared_otherwise_is_refused_and_kept(tmp_path):
    path = write_text(tmp_path / "a.txt", TEXT)
    folder = tmp_path / "made"
    corpus.prepare(folder, "text", path)
    before = (folder / "corpus-info.json").read_bytes()
    with raises_parameter("level", "word", ["char"]) as raised:
        corpus.prepare(folder, "text", path, level="word", min_freq=2)
    assert re.search("level.*'char'.*'word'.*\n.*min_freq.*0", str(raised.value))
    with raises_parameter("dataset", "pydoc", ["text"]):
        corpus.prepare(folder, "pydoc")
    other = write_text(tmp_path / "b.txt", TEXT)
    with raises_parameter(f"size of {other}", len(TEXT), [None]):
        corpus.prepare(folder, "text", [path, other])
    write_text(tmp_path / "a.txt", TEXT + "more")
    with raises_parameter(f"size of {path}", len(TEXT) + 4, [len(TEXT)]):
        corpus.prepare(folder, "text", path)
    edited = write_text(tmp_path / "a.txt", TEXT.replace("line 3", "lime 3"))
    found, kept = (hashlib.sha256(text.encode()).hexdigest() for text in (TEXT.replace("line 3", "lime 3"), TEXT))
    with raises_parameter(f"checksum of {edited}", found, [kept]):
        corpus.prepare(folder, "text", path)
    write_text(tmp_path / "a.txt", TEXT)  # the time of the file is another one, but not its text
    corpus.prepare(folder, "text", path)
    assert (folder / "corpus-info.json").read_bytes() == before
    (folder / "corpus-info.json").unlink()
    with raises_parameter("data_dir", f"{tmp_path}/made", "a folder without ['train.npy', 'valid.npy', 'vocab.txt']"):
        corpus.prepare(folder, "text", path, level="word")
    for name in ("train.npy", "valid.npy", "vocab.txt"):
        (folder / name).unlink()
    assert corpus.prepare(folder, "text", path, level="word").vocab.level == "word"


@pytest.mark.parametrize("name", ["config.json", "vocab.txt", "train.npy", "valid-003.npy"])
def test_what_no_preparation_has_written_is_refused_before_the_text_is_read_and_kept(tmp_path, name):
    write_splits(tmp_path, "the\n", "the\n", "the\n")
    path = write_text(tmp_path / name, "the 100\ncat 50\n")
    allowed = "another folder than that of a run" if name == "config.json" else f"a folder without ['{name}']"
    for scheme in ("", "file://"):
        with raises_parameter("data_dir", f"{scheme}{tmp_path}", allowed):
            corpus.prepare(f"{scheme}{tmp_path}", "wt2", download=not scheme, download_url="file:///nowhere")
        with raises_parameter("data_dir", f"{scheme}{tmp_path}", allowed):
            corpus.prepare_texts(iter([]), f"{scheme}{tmp_path}", level="word", vocab_path=path)
    assert (tmp_path / name).read_text() == "the 100\ncat 50\n"
    assert len(os.listdir(tmp_path)) == 4


def test_a_folder_of_the_original_program_is_prepared_anew(tmp_path):
    write_splits(tmp_path, "a b\n", "b\n", "a\n")
    write_text(tmp_path / "corpus-info.json", '{"vocab_size": 3, "cutoffs": [], "dataset": "wt2"}')
    with pytest.raises(FileNotFoundError, match="corpus-info.json"):
        corpus.load_corpus(tmp_path)
    assert corpus.prepare(tmp_path, "wt2").splits["train"].tolist() == [1, 2, 0]
    assert corpus.load_corpus(tmp_path).vocab.symbols == ["<eos>", "a", "b"]


def test_a_failed_run_leaves_nothing(tmp_path):
    folder = tmp_path / "made"
    with raises_parameter(f"{tmp_path}/a.txt", None, "UTF-8 text") as raised:
        corpus.prepare(folder, "text", write_text(tmp_path / "a.txt", b"a " * 1_000_000 + b"\xff"), level="word")
    assert "byte 2000000" in str(raised.value)
    assert os.listdir(folder) == []
    write_splits(tmp_path, "a b\n", "a\nb new\n", "a\n")
    with raises_parameter(f"{tmp_path}/valid.txt, line 2", "new"):
        corpus.prepare(folder, "wt103", tmp_path)
    assert os.listdir(folder) == []


def test_a_split_without_a_word_is_refused(tmp_path):
    write_splits(tmp_path, "97 98", "97", " \n")
    with raises_parameter("data_path"):
        corpus.prepare(tmp_path, "enwik8")


def test_a_folder_is_not_made_for_text_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere.txt"):
        corpus.prepare(tmp_path / "made", "text", f"{tmp_path}/nowhere.txt")
    assert os.listdir(tmp_path) == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    path = write_text(tmp_path / "a.txt", TEXT)
    with pytest.raises(OSError, match="a.txt/made"):
        corpus.prepare(f"{path}/made", "text", path)


def test_a_remote_folder_that_takes_no_copy_is_named(monkeypatch):
    def copy(*args, **kwargs):
        raise tf.errors.PermissionDeniedError(None, None, "read-only")

    monkeypatch.setattr(tf.io.gfile, "copy", copy)
    with pytest.raises(OSError, match="ram://closed"):
        with prepared_folder.new_files("ram://closed") as folder:
            write_text(Path(folder, "corpus-info.json"), "{}")


def test_two_processes_do_not_prepare_one_folder(tmp_path):
    path = write_text(tmp_path / "a.txt", TEXT)
    with prepared_folder.new_files(f"{tmp_path}/made"):
        with raises_naming(OSError, tmp_path / "made"):
            corpus.prepare(tmp_path / "made", "text", path)
    assert len(corpus.prepare(tmp_path / "made", "text", path).splits["train"]) == int(len(TEXT) * 0.95)


def test_load_corpus_says_what_does_not_belong_together(tmp_path):
    write_text(tmp_path / "corpus-info.json", "{")
    with raises_parameter(f"{tmp_path}/corpus-info.json"):
        corpus.load_corpus(tmp_path)
    (tmp_path / "corpus-info.json").unlink()
    with pytest.raises(FileNotFoundError, match=f"python tools/prepare_data.py --dataset=.* --data_dir={tmp_path}$"):
        corpus.load_corpus(tmp_path)
    write_splits(tmp_path, "a b\n", "b\n", "a\n")
    corpus.prepare(tmp_path, "wt2")
    tokens = (tmp_path / "test.npy").read_bytes()
    (tmp_path / "test.npy").unlink()
    with pytest.raises(FileNotFoundError, match="test.npy"):
        corpus.load_corpus(tmp_path)
    (tmp_path / "test.npy").write_bytes(tokens[:-1])
    for folder in (tmp_path, f"file://{tmp_path}"):
        with raises_parameter(f"{folder}/test.npy"):
            corpus.load_corpus(folder)
    np.save(tmp_path / "test.npy", np.zeros(9, np.uint8))
    with raises_parameter("n_tokens", 2, "9 for test"):
        corpus.load_corpus(tmp_path)
    (tmp_path / "test.npy").write_bytes(tokens)
    write_text(tmp_path / "vocab.txt", "<eos>\na\n")
    with raises_parameter(f"{tmp_path}/vocab.txt"):
        corpus.load_corpus(tmp_path)
    write_text(tmp_path / "vocab.txt", b"\xff\xfe")  # cannot be read
    with raises_parameter(f"{tmp_path}/vocab.txt", allowed="the file that corpus-info.json describes"):
        corpus.load_corpus(tmp_path)
    write_text(tmp_path / "vocab.txt", "<eos>\na\n")
    info = json.loads((tmp_path / "corpus-info.json").read_text())
    without_sums = {name: value for name, value in info.items() if name not in ("sha256", "checksum")}
    write_text(tmp_path / "corpus-info.json", json.dumps(without_sums))
    with raises_parameter("vocab_size", 3):
        corpus.load_corpus(tmp_path)
    write_text(tmp_path / "corpus-info.json", json.dumps(info))
    (tmp_path / "vocab.txt").unlink()
    with pytest.raises(FileNotFoundError, match="vocab.txt"):
        corpus.load_corpus(tmp_path)
    info = json.loads((tmp_path / "corpus-info.json").read_text())
    write_text(tmp_path / "corpus-info.json", json.dumps({**info, "format": 2}))
    with raises_parameter("format", 2):
        corpus.load_corpus(tmp_path)


def test_progress_counts_the_bytes_of_both_passes(tmp_path, monkeypatch):
    shown = []

    class Bar:
        def __init__(self, target, **_):
            shown.append(target)

        def update(self, current, finalize):
            shown.append((current, finalize))

    monkeypatch.setattr(prepared_folder.keras.utils, "Progbar", Bar)
    path = write_text(tmp_path / "a.txt", "ab cd\n" * 400_000)  # 2.4 MB, read in three pieces
    corpus.prepare(tmp_path / "made", "text", path, level="word", verbose=1)
    assert shown == [5, (1, False), (2, False), (3, False), (4, False), (5, True)]


KILLED = """
import os, signal, sys
sys.path.insert(0, {root!r})
from txl_tf.data import text_files, token_files
from txl_tf.data.text import corpus

data_path, folder = sys.argv[1:]
text_files.BLOCK_BYTES = 2000
moments = 0

def killed_at(moment, function):
    def called(*args, **options):
        global moments
        moments += 1
        if moments == moment:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **options)
    return called

def run(moment):
    child = os.fork()
    if not child:
        os.replace = killed_at(moment, os.replace)
        token_files.TokenWriter.add = killed_at(moment, token_files.TokenWriter.add)
        token_files.TokenWriter.close = killed_at(moment, token_files.TokenWriter.close)
        corpus.Vocab._tokenize = killed_at(moment, corpus.Vocab._tokenize)
        corpus.prepare(folder, "text", data_path, level="word")
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

moment = 1
while (status := run(moment)) == -signal.SIGKILL:
    print(sorted(os.listdir(folder)), flush=True)
    try:
        corpus.load_corpus(folder)
        sys.exit("looks finished")
    except FileNotFoundError:
        moment += 1
sys.exit(status)
"""


class Killed(BaseException):
    pass


def test_a_run_that_ends_at_any_moment_looks_unfinished_and_the_next_one_succeeds(tmp_path, monkeypatch):
    """As `kill -9` leaves it: the folder of new files is not removed."""
    path, folder = write_text(tmp_path / "a.txt", TEXT), tmp_path / "made"
    monkeypatch.setattr(text_files, "BLOCK_BYTES", 2000)

    def run(moment):
        left = (folder / "prepare.tmp").exists()  # it is removed first
        moments, removals = iter(range(1, 1000)), iter(range(0 if left else 1, 1000))

        def killed_at_the_moment(function):
            def called(*args, **options):
                if next(moments) == moment:
                    raise Killed
                return function(*args, **options)

            return called

        remove = shutil.rmtree
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", killed_at_the_moment(os.replace))
            for owner, name in ((TokenWriter, "add"), (TokenWriter, "close"), (corpus.Vocab, "_tokenize")):
                patch.setattr(owner, name, killed_at_the_moment(getattr(owner, name)))
            patch.setattr(shutil, "rmtree", lambda *args, **options: next(removals) or remove(*args, **options))
            corpus.prepare(folder, "text", path, level="word")

    left_behind = []
    for moment in range(1, 1000):
        try:
            run(moment)
            break
        except Killed:
            left_behind.append(sorted(os.listdir(folder)))
            with pytest.raises(FileNotFoundError):
                corpus.load_corpus(folder)
    assert len(left_behind) > 10 and left_behind[0] == ["prepare.tmp"]
    assert left_behind[-1] == ["prepare.tmp", "train.npy", "valid.npy", "vocab.txt"]
    expected, found = corpus.build_corpus("text", path, level="word"), corpus.load_corpus(folder)
    for split in ("train", "valid"):
        np.testing.assert_array_equal(found.splits[split], expected.splits[split])


@pytest.mark.parametrize("scheme, function", [("", "os.replace"), ("file://", "tensorflow.io.gfile.copy")])
def test_files_of_a_run_that_ended_as_it_moved_them_are_not_in_the_way(tmp_path, monkeypatch, scheme, function):
    path, folder, move = write_text(tmp_path / "a.txt", TEXT), tmp_path / "made", []

    def killed_at_the_last(*args, **options):
        if args[1].endswith("made/vocab.txt"):
            raise Killed
        move[0](*args, **options)

    with monkeypatch.context() as patch:
        move.append(os.replace if not scheme else prepared_folder.tf.io.gfile.copy)
        patch.setattr(function, killed_at_the_last)
        with pytest.raises(Killed):
            corpus.prepare(f"{scheme}{folder}", "text", path)
    assert sorted(os.listdir(folder)) == ["prepare.tmp", "train.npy", "valid.npy"]
    write_text(tmp_path / "b.txt", b"\xff")
    with raises_parameter(f"{tmp_path}/b.txt", None, "UTF-8 text"):
        corpus.prepare(f"{scheme}{folder}", "text", f"{tmp_path}/b.txt")
    assert len(corpus.prepare(f"{scheme}{folder}", "text", path).splits["train"]) == int(len(TEXT) * 0.95)
    assert sorted(os.listdir(folder)) == ["corpus-info.json", "train.npy", "valid.npy", "vocab.txt"]


@SLOW
def test_a_run_that_is_killed_looks_unfinished_and_the_next_one_succeeds(tmp_path):
    path = write_text(tmp_path / "a.txt", TEXT)
    program = KILLED.format(root=str(ROOT))
    result = subprocess.run(
        [sys.executable, "-c", program, path, str(tmp_path / "made")], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr
    left_behind = result.stdout.splitlines()  # after each kill -9, from the first piece of text to the last move
    assert len(left_behind) > 10
    assert left_behind[0] == "['prepare.tmp']"
    assert left_behind[-1] == "['prepare.tmp', 'train.npy', 'valid.npy', 'vocab.txt']"
    expected = corpus.build_corpus("text", path, level="word")
    found = corpus.load_corpus(tmp_path / "made")
    for split in ("train", "valid"):
        np.testing.assert_array_equal(found.splits[split], expected.splits[split])
    assert sorted(os.listdir(tmp_path / "made")) == ["corpus-info.json", "train.npy", "valid.npy", "vocab.txt"]
