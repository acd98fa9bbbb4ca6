"""A text that is prepared in portions gives the tokens, vocabulary, sizes and errors that it gives as a whole."""

import gzip
import json
import sys
import zipfile

import numpy as np
import pytest
from helpers import mentions, raises_parameter, write_text

from txl_tf.data import inputs, text_files
from txl_tf.data.line_files import LineFile, pieces_of_block
from txl_tf.data.subwords import Sample
from txl_tf.data.text import corpus, portions
from txl_tf.data.text.download import LM1B_SHARDS, LM1B_VOCAB
from txl_tf.data.text.portions import ThisProcess
from txl_tf.data.text.texts import FilePart, find_files, read_texts

BLOCK = 100  # bytes


class InPortions(ThisProcess):
    """As the machines of a cluster do it, but here: in portions of so many blocks."""

    def __init__(self, n_blocks):
        self.n_blocks = n_blocks

    def portions(self, paths):
        return cut(paths, self.n_blocks)


def cut(paths, n_blocks):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(portions, "_MOST_BLOCKS", n_blocks)
        patch.setattr(portions, "_PORTIONS_OF_WORKER", 1e-3)
        return portions.cut_in_portions(paths, 1)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(text_files, "BLOCK_BYTES", BLOCK)


def make_text(seed, n_lines=60, ends="\n"):
    """Lines of all lengths, some longer than a block, with white space and characters of all kinds."""
    rng = np.random.default_rng(seed)
    words = ["the", "cat", "", "Öl", "日本語", "\u3000", "ΟΔΟΣ", "\t", "🎉🎉", "a\u2028b", "\r", "long" * 20]
    lines = (" ".join(rng.choice(words, rng.integers(0, 9) ** 2 // 2)) for _ in range(n_lines))
    return "\n".join(lines) + ends


def write_files(folder):
    """Files of every kind."""
    folder.mkdir()
    for i in range(3):
        write_text(folder / f"{i}.txt", make_text(i, ends="" if i else "\n"))
    for i in range(8):
        write_text(folder / f"small-{i}.txt", f"small file {i}")
    write_text(folder / "one-line.txt", "word " * 200 + "日本語 " * 30)
    (folder / "packed.txt.gz").write_bytes(gzip.compress(make_text(7).encode()))
    with zipfile.ZipFile(folder / "packed.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for i in range(4):
            archive.writestr(f"in/{i}.txt", make_text(10 + i))
    return folder


def write_json_lines(folder):
    folder.mkdir()
    for i in range(2):
        texts = make_text(20 + i).split("\n")
        lines = [json.dumps({"text": text, "n": n}, ensure_ascii=n % 2) for n, text in enumerate(texts) if text]
        write_text(folder / f"{i}.jsonl", "\n\n".join(lines))
    return folder


def prepared(folder, *arguments, **options):
    """What is in a prepared folder: `corpus-info.json`, which has checksums of all else."""
    made = corpus.prepare(folder, *arguments, **options)
    return made, json.loads((folder / "corpus-info.json").read_text())


@pytest.mark.parametrize("n_blocks", [7, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 1000))])
@pytest.mark.parametrize(
    "options",
    [
        {"level": "word", "min_freq": 2, "cutoffs": [3]},
        {"level": "char", "lower_case": True, "valid_fraction": 0.3},
        {"level": "char", "documents": True, "valid_fraction": 0.4},
        {"level": "byte"},
        {"level": "word", "documents": True, "max_size": 4, "shard_tokens": 100},
        pytest.param({"level": "subword", "vocab_size": 285}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_portions_of_files_give_what_the_whole_gives(tmp_path, monkeypatch, options, n_blocks):
    monkeypatch.setattr("txl_tf.data.subwords.SAMPLE_BYTES", 3000)
    path = write_files(tmp_path / "text")
    _, expected = prepared(tmp_path / "whole", "text", path, **options)
    _, found = prepared(tmp_path / "portions", "text", path, workers=InPortions(n_blocks), **options)
    assert found == expected and sum(expected["n_tokens"].values()) > 500


@pytest.mark.parametrize("n_blocks", [1, 5])
@pytest.mark.parametrize("options", [{"level": "word"}, {"level": "char", "documents": False}], ids=str)
def test_portions_of_json_lines_give_what_the_whole_gives(tmp_path, options, n_blocks):
    path = write_json_lines(tmp_path / "text")
    _, expected = prepared(tmp_path / "whole", "text", path, **options)
    _, found = prepared(tmp_path / "portions", "text", path, workers=InPortions(n_blocks), **options)
    assert found == expected and ("</s>" == expected["vocab"]["document"]) == (options["level"] == "word")


@pytest.mark.parametrize(("dataset", "options"), [("wt2", {}), ("lm1b", {"num_shuffle": 2}), ("pydoc", {})])
def test_other_datasets_in_portions(tmp_path, dataset, options):
    for split, seed in (("train", 1), ("valid", 2), ("test", 3)):
        write_text(tmp_path / f"{split}.txt", make_text(seed))
    for i in range(2):
        path = tmp_path / LM1B_SHARDS.replace("*", f"0000{i}-of-00100")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, make_text(i))
    write_text(tmp_path / LM1B_VOCAB, "<S>\n<UNK>\nthe\ncat\n")
    options["data_path"] = tmp_path if dataset != "pydoc" else None
    _, expected = prepared(tmp_path / "whole", dataset, **options)
    _, found = prepared(tmp_path / "portions", dataset, workers=InPortions(1), **options)
    assert found == expected


def test_valid_begins_where_it_does_in_the_whole_wherever_that_is(tmp_path):
    path = write_text(tmp_path / "a.txt", "".join(f"{i:08}\n" for i in range(100)))
    for tenth in range(1, 900, 31):
        options = {"level": "char", "valid_fraction": tenth / 900}
        whole = corpus.build_corpus("text", path, **options)
        made, _ = prepared(tmp_path / str(tenth), "text", path, workers=InPortions(1), **options)
        assert made.sizes == whole.sizes
        for split in ("train", "valid"):
            np.testing.assert_array_equal(made.splits[split], whole.splits[split])


def test_parts_of_a_file_have_each_of_its_lines_once(tmp_path):
    for i, text in enumerate((make_text(1), make_text(2, ends=""), "x" * 350, "\n" * 350, "x" * 250 + "\n" + "y" * 99)):
        path = write_text(tmp_path / str(i), text)
        for level in ("char", "byte", "subword"):
            whole = [piece for read in read_texts([FilePart(path)], level) for piece in read.pieces]
            for n_blocks in (1, 2, 3):
                parts = sum(cut([path], n_blocks), [])
                texts = [list(read.pieces) for part in parts for read in read_texts([part], level)]
                pieces = [piece for pieces in texts for piece in pieces]
                assert [piece for piece in pieces if piece] == [piece for piece in whole if piece]


def test_small_files_share_a_portion_and_large_ones_are_cut(tmp_path):
    paths = [write_text(tmp_path / f"{i}.txt", "x" * size) for i, size in enumerate((60, 60, 60, 450, 0))]
    assert cut(paths, 2) == [
        [FilePart(paths[0]), FilePart(paths[1]), FilePart(paths[2])],
        [FilePart(paths[3], 0, 200)],
        [FilePart(paths[3], 200, 400)],
        [FilePart(paths[3], 400), FilePart(paths[4])],
    ]


def test_samples_of_parts_join_to_that_of_the_whole(monkeypatch):
    lines = [f"{i:09}" for i in range(10_000)]
    for most in (100, 9_000, 50_000, 90_000):
        monkeypatch.setattr("txl_tf.data.subwords.SAMPLE_BYTES", most)
        whole, joined = Sample.of(lines), Sample()
        for first in range(0, 10_000, 700):
            joined.join(Sample.of(lines[first : first + 700], first, joined.hash_limit))
        assert joined.lines == whole.lines and joined.hash_limit == whole.hash_limit


@pytest.mark.parametrize(
    ("file", "bad", "name", "value"),
    [
        ("a.jsonl", '{"text": "bad"', "{}/a.jsonl, line 451", '{"text": "bad"'),
        ("a.jsonl", '{"text": ""}', "{}/a.jsonl, line 451, field 'text'", ""),
        ("a.txt", b"\xff", "{}/a.txt", None),
    ],
)
def test_errors_name_the_place_in_the_whole_file(tmp_path, file, bad, name, value):
    lines = [b'{"text": "good one"}\n\n'] * 150 + [b'{"text": "good one"}\n'] * 150
    lines.insert(300, (bad if isinstance(bad, bytes) else bad.encode()) + b"\n")
    path = write_text(tmp_path / file, b"".join(lines))
    with raises_parameter(name.format(tmp_path), value) as raised:
        corpus.prepare(tmp_path / "made", "text", path, workers=InPortions(1))
    assert file != "a.txt" or mentions(str(raised.value), "6450")


def test_an_unknown_symbol_is_on_its_line_of_the_whole_file(tmp_path):
    vocab_path = write_text(tmp_path / "vocab.txt", "a\n\\x20\n\\n\n")
    path = write_text(tmp_path / "a.txt", "a a a\n" * 200 + "a b\n" + "a\n" * 200)
    with raises_parameter(f"{tmp_path}/a.txt, line 201", "b"):
        corpus.prepare(tmp_path / "made", "text", path, vocab_path=vocab_path, workers=InPortions(1))


# --------------------------------------------------------------------------------------------------------- Parquet


def write_parquet(path, texts, rows_of_group=20, column="text"):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pyarrow.table({"id": list(range(len(texts))), column: texts})
    parquet.write_table(table, path, row_group_size=rows_of_group)
    return str(path)


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_rows_of_parquet_are_what_json_lines_are(tmp_path, scheme):
    texts = [text for text in make_text(1).split("\n") if text]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    expected = corpus.build_corpus("text", write_text(tmp_path / "a.jsonl", lines), level="word")
    path = scheme + write_parquet(tmp_path / "a.parquet", texts)
    assert cut([path], 1) == [[FilePart(path, i, i + 1)] for i in range(3)]
    assert cut([path], 1000) == [[FilePart(path)]]
    for name, workers in (("whole", ThisProcess()), ("portions", InPortions(1))):
        made, _ = prepared(tmp_path / name, "text", path, level="word", workers=workers)
        assert made.vocab.symbols == expected.vocab.symbols and made.vocab.document == "</s>"
        assert made.sizes == expected.sizes
        for split in ("train", "valid"):
            np.testing.assert_array_equal(made.splits[split], expected.splits[split])


def test_a_column_can_be_named_and_bad_rows_are_too(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", ["one", "two"] * 30, column="body")
    made = corpus.build_corpus("text", path, text_field="body", valid_fraction=0.4)
    assert made.vocab.decode(made.splits["valid"]) == "one</s>two</s>" * 12
    done = []
    assert len(list(read_texts([FilePart(path)], "char", "body", done.append))) == 60
    assert sum(done) == (tmp_path / "a.parquet").stat().st_size
    with raises_parameter("text_field", "text", ["id", "body"]):
        corpus.build_corpus("text", path)
    path = write_parquet(tmp_path / "b.parquet", ["one"] * 50 + [""] + ["one"] * 20)
    for name, workers in (("whole", ThisProcess()), ("portions", InPortions(1))):
        with raises_parameter(f"{tmp_path}/b.parquet, row 51, field 'text'", ""):
            corpus.prepare(tmp_path / name, "text", path, workers=workers)
    path = write_text(tmp_path / "c.parquet", "no Parquet at all")
    with raises_parameter(f"{tmp_path}/c.parquet", None):
        corpus.build_corpus("text", path)


def test_a_parquet_file_may_have_no_row_groups(tmp_path):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = str(tmp_path / "a.parquet")
    parquet.ParquetWriter(path, pa.schema([("text", pa.string())])).close()
    assert list(read_texts([FilePart(path)], "char")) == []
    whole = write_parquet(tmp_path / "b.parquet", ["one", "two"])
    made = corpus.build_corpus("text", [path, whole], valid_fraction=0.5)
    assert made.vocab.decode(made.splits["valid"]) == "two</s>"


def test_without_pyarrow_parquet_says_what_to_install(tmp_path, monkeypatch):
    path = write_text(tmp_path / "a.parquet", "PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with raises_parameter("data_path", "Parquet files"):
        corpus.build_corpus("text", path)


# ---------------------------------------------------------------------------------------------------------- shards


def test_shards_keep_tokens_and_fingerprints(tmp_path):
    path = write_text(tmp_path / "a.txt", make_text(1))
    whole, _ = prepared(tmp_path / "whole", "text", path)
    made, info = prepared(tmp_path / "shards", "text", path, shard_tokens=1000)
    assert info["files"] == {"train": [f"train-00{i}.npy" for i in range(6)], "valid": ["valid-000.npy"]}
    assert [len(np.load(tmp_path / "shards" / name)) for name in info["files"]["train"]][:4] == [1000] * 4
    for split in ("train", "valid"):
        np.testing.assert_array_equal(made.splits[split][:], whole.splits[split])
        assert made.fingerprint(split) == whole.fingerprint(split)
    for shard_tokens in (1000, None):  # prepared already
        assert corpus.prepare(tmp_path / "shards", "text", path, shard_tokens=shard_tokens).fingerprint("train")
    for folder, shard_tokens in (("shards", 1001), ("shards", 999), ("shards", 10**6), ("whole", 1000)):
        with raises_parameter("shard_tokens", shard_tokens):
            corpus.prepare(tmp_path / folder, "text", path, shard_tokens=shard_tokens)
    with raises_parameter("shard_tokens", 0, "at least 1"):
        corpus.prepare(tmp_path / "none", "text", path, shard_tokens=0)
    with raises_parameter("shard_tokens", 5):
        corpus.prepare(tmp_path / "none", "lm1b", tmp_path, shard_tokens=5)


# -------------------------------------------------------------------------------------------------------------- s3


def test_s3_is_read_by_pyarrow_as_other_files_are(tmp_path, monkeypatch):
    """With a folder in place of a bucket: there is no S3 here."""
    file_systems = pytest.importorskip("pyarrow.fs")
    folder = write_files(tmp_path / "bucket")
    write_files(folder / "sub")
    write_text(folder / ".hidden", "no")
    bucket = file_systems.SubTreeFileSystem(str(folder), file_systems.LocalFileSystem())
    of_disk = inputs._file_system
    in_bucket = lambda path: (bucket, path.removeprefix("s3://bucket").strip("/"))  # noqa: E731
    monkeypatch.setattr(inputs, "_file_system", lambda p: in_bucket(p) if p.startswith("s3://") else of_disk(p))
    for path in ("", "/*.txt", "/packed.*", "/sub,s3://bucket/1.txt", "/nowhere.txt"):
        local, remote = (
            find_files(f"{folder}{path.replace('s3://bucket', str(folder))}"),
            find_files(f"s3://bucket{path}"),
        )
        assert [name.replace("s3://bucket", str(folder)) for name in remote] == local
    (block,) = LineFile("s3://bucket/1.txt", "1.txt", str(tmp_path / "answers"), None).blocks(None)
    assert b"".join(pieces_of_block(block)) == (folder / "1.txt").read_bytes()
    write_parquet(folder / "a.parquet", ["one", "two"])
    expected = corpus.build_corpus("text", folder, level="word")
    made, _ = prepared(tmp_path / "made", "text", "s3://bucket", level="word", workers=InPortions(2))
    np.testing.assert_array_equal(made.splits["train"], expected.splits["train"])
    assert inputs.matching(f"{folder}/none/*") == inputs.matching("s3://bucket/none/*") == []
    with pytest.raises(FileNotFoundError, match="s3://bucket/nowhere.txt"):
        corpus.build_corpus("text", "s3://bucket/nowhere.txt")
    with raises_parameter("pattern", "s3://bucket/*/a"):
        corpus.build_corpus("text", "s3://bucket/*/a")
