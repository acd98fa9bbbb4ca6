"""Word vectors: what is read from a file, and the embeddings that begin with it."""

import bz2
import errno
import gzip
import io
import lzma
import struct
import zipfile

import numpy as np
import pytest
from helpers import ANY, raises_parameter, write_text

from txl_tf.data.tagged.word_vectors import embedding_matrix, read_vectors
from txl_tf.data.text_files import numbered_lines
from txl_tf.errors import ParameterError

LINES = "长 1 -2.5\n江 3e-1 4 \n\u3000 5 6\n\u00a0 7 8\n\u2028x 9 10\n长 0 0\n"
EXPECTED = {"长": [1, -2.5], "江": [0.3, 4], "\u3000": [5, 6], "\u00a0": [7, 8], "\u2028x": [9, 10]}


@pytest.mark.parametrize("content", [LINES, f"6 2\n{LINES}", f"6 2 \n\n{LINES}\n", LINES.replace("\n", "\r\n")])
def test_vectors_of_wanted_words_are_read(tmp_path, content):
    path = write_text(tmp_path / "vectors", content)
    vectors, dim = read_vectors(path, {*EXPECTED, "桥"})
    assert dim == 2 and vectors.keys() == EXPECTED.keys()
    for word, vector in vectors.items():
        np.testing.assert_array_equal(vector, np.array(EXPECTED[word], np.float32), strict=True)
    vectors, dim = read_vectors(path, ["江"])
    assert list(vectors) == ["江"] and dim == 2
    assert read_vectors(path, ()) == ({}, 2)


@pytest.mark.parametrize(
    "content, name, value",
    [
        ("a 1 2\nb 1\n", "{}/vectors, line 2", "b 1"),
        ("5 2\na 1 2 3\nb 1 2 3\n", "path", ANY),
        ("3 2\na 1 2\nb 3 4\n", "{}/vectors", 2),
        ("1 3\n\nb 1 2\n", "{}/vectors, line 3", "b 1 2"),
        ("a\n", "{}/vectors, line 1", "a"),
        ("a 1 2\nb 1 x\n", "{}/vectors, line 2", ["1", "x"]),
        ("a 1 nan\n", "{}/vectors, line 1", ["1", "nan"]),
        ("", "{}/vectors", b""),
        ("\n", "path", ANY),
        ("5 4\n\n", "path", ANY),
        (b"a 1 \xff\n", "{}/vectors", None),
    ],
)
def test_what_is_no_file_of_vectors_is_named(tmp_path, content, name, value):
    with raises_parameter(name.format(tmp_path), value):
        read_vectors(write_text(tmp_path / "vectors", content), {"a", "b"})


@pytest.mark.parametrize(
    "content, expected",
    [
        ("The 0.1 0.2\n. . . 0.3 0.4\nat name@domain.com 0.5 0.6\n", {"The": [0.1, 0.2], ". . .": [0.3, 0.4]}),
        ("3 2\n. . . 0.3 0.4\niphone 6 1 2\nThe 0.1 0.2\n", {". . .": [0.3, 0.4], "iphone 6": [1, 2]}),
        ("The\t0.1 0.2\nNew York\t1\t2\n", {"The": [0.1, 0.2], "New York": [1, 2]}),
        ("2020 0.1 0.2\n7  1  2\n", {"2020": [0.1, 0.2], "7": [1, 2]}),
        ("room 101 1 2\na 3 4\nb 5 6\n", {"room 101": [1, 2], "a": [3, 4]}),
        ("a 1\nb 2\n", {"a": [1], "b": [2]}),
    ],
)
def test_the_last_fields_of_a_line_are_the_numbers(tmp_path, content, expected):
    vectors, dim = read_vectors(write_text(tmp_path / "vectors", content), expected)
    assert dim == len(next(iter(expected.values())))
    assert {word: vector.tolist() for word, vector in vectors.items()} == {
        word: np.float32(numbers).tolist() for word, numbers in expected.items()
    }


def binary(words, dim, newline=b""):
    """A file as word2vec (with newlines) and gensim (without) write it."""
    rows = [f"{word} ".encode() + struct.pack(f"<{dim}f", *numbers) + newline for word, numbers in words.items()]
    return f"{len(words)} {dim}\n".encode() + b"".join(rows)


def in_zip(data, path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("__MACOSX/._vectors.txt", b"x")
        archive.writestr("vectors.txt", data)
    return path.read_bytes()


@pytest.mark.parametrize("newline", [b"", b"\n"])
@pytest.mark.parametrize("pack", [None, gzip.compress, bz2.compress, lzma.compress, in_zip])
def test_binary_and_packed_files_are_read_by_their_content(tmp_path, newline, pack):
    rng = np.random.default_rng(0)
    words = {word: rng.normal(size=50) for word in ("长", "the", "\u3000", "New_York")}
    text = "".join(f"{word} {' '.join(map(str, numbers))}\n" for word, numbers in words.items()).encode()
    for data in (binary(words, 50, newline), text):
        if pack:
            data = pack(data, tmp_path / "packed") if pack is in_zip else pack(data)
        (tmp_path / "vectors").write_bytes(data)
        vectors, dim = read_vectors(str(tmp_path / "vectors"), words)
        assert dim == 50 and vectors.keys() == words.keys()
        for word, numbers in words.items():
            np.testing.assert_array_equal(vectors[word], numbers.astype(np.float32), strict=True)


@pytest.mark.parametrize("block", [7, 64, 1 << 20])
def test_binary_vectors_may_end_between_blocks(tmp_path, monkeypatch, block):
    monkeypatch.setattr("txl_tf.data.text_files.BLOCK_BYTES", max(block, 64))
    words = {f"w{i}": np.full(3, i + 0.5) for i in range(40)}
    (tmp_path / "vectors.bin").write_bytes(binary(words, 3))
    vectors, _ = read_vectors(str(tmp_path / "vectors.bin"), words)
    assert {word: vector[0] for word, vector in vectors.items()} == {f"w{i}": i + 0.5 for i in range(40)}


@pytest.mark.parametrize(
    "content, name, value",
    [
        (binary({"a": [0.1, 2.5], "b": [3.3, 4.1]}, 2)[:-3], "{}/vectors", 1),
        (binary({"a": [0.1, np.inf]}, 2), "{}/vectors, vector 1", ANY),
        (gzip.compress(b"a 1 2\n" * 999, mtime=0)[:-20], "path", ANY),
        (b"\xba\x16\x4f\x2f\x0c\0\0\0", "path", ANY),
        (b"\x80\x04\x95\x00\x01", "path", ANY),
        ("5 2\n长 1 2\n江 3 4\n".encode("gbk"), "{}/vectors", "gb18030"),
    ],
)
def test_files_that_are_not_whole_or_of_other_formats_are_named(tmp_path, content, name, value):
    with raises_parameter(name.format(tmp_path), value):
        read_vectors(write_text(tmp_path / "vectors", content), {"a", "b"})


def test_an_archive_of_two_files_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "v.zip", "w") as archive:
        archive.writestr("glove.50d.txt", "a 1\n")
        archive.writestr("glove.100d.txt", "a 1\n")
    with pytest.raises(ParameterError) as caught:
        read_vectors(str(tmp_path / "v.zip"), {"a"}, "word_vectors")
    assert (caught.value.name, caught.value.value) == ("word_vectors", str(tmp_path / "v.zip"))


def test_hidden_files_in_any_folder_of_an_archive_do_not_count(tmp_path):
    with zipfile.ZipFile(tmp_path / "v.zip", "w") as archive:
        for name, content in {"v/.DS_Store": "x", "v/__MACOSX/._v": "x", ".a/b": "x", "v/v.txt": "a 1\n"}.items():
            archive.writestr(name, content)
    vectors, dim = read_vectors(str(tmp_path / "v.zip"), {"a"})
    assert dim == 1 and vectors["a"].tolist() == [1]


def test_an_archive_without_files_and_one_that_is_cut_off_are_refused(tmp_path):
    zipfile.ZipFile(tmp_path / "v.zip", "w").close()
    with raises_parameter("path", str(tmp_path / "v.zip"), "an archive of one file"):
        read_vectors(str(tmp_path / "v.zip"), {"a"})
    with raises_parameter("path", allowed="an archive that is whole"):
        read_vectors(write_text(tmp_path / "cut", b"PK\x03\x04ab"), {"a"})


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
def test_an_error_of_the_disk_is_not_an_error_of_the_archive(tmp_path, monkeypatch, pack):
    path = write_text(tmp_path / "v", pack(b"a 1 2\n" * 9))
    with raises_parameter("path", allowed="an archive that is whole"):
        read_vectors(write_text(tmp_path / "damaged", pack(b"a 1 2\n" * 9)[:10] + b"xyz" * 20), {"a"})

    class Failing(io.FileIO):
        n_reads = 0

        def read(self, size=-1):
            self.n_reads += 1
            if self.n_reads > 1:
                raise OSError(errno.EIO, "Input/output error")
            return super().read(size)

    monkeypatch.setattr("txl_tf.data.inputs.opened", Failing)
    with pytest.raises(OSError) as raised:
        read_vectors(path, {"a"})
    assert not isinstance(raised.value, ValueError)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        read_vectors(str(tmp_path / "nowhere"), {"a"})


def test_lines_have_numbers(tmp_path):
    path = write_text(tmp_path / "lines", "\ufeffa\r\n\nb\u2028c\n\ufeffd")
    assert list(numbered_lines(path)) == [(1, "a"), (2, ""), (3, "b\u2028c"), (4, "\ufeffd")]


def test_embeddings_begin_with_the_vectors():
    vectors = {"a": np.float32([1, 2, 3]), "<pad>": np.float32([9, 9, 9])}
    symbols = ["<pad>", "<unk>", "b", "a"] + [f"w{i}" for i in range(2000)]
    matrix = embedding_matrix(symbols, vectors, 3, np.random.default_rng(0))
    assert matrix.dtype == np.float32 and matrix.shape == (2004, 3)
    assert matrix[0].tolist() == [0, 0, 0] and matrix[3].tolist() == [1, 2, 3]
    others = matrix[4:]
    assert -1 <= others.min() < -0.99 and 0.99 < others.max() <= 1 and abs(others.mean()) < 0.03
    same = embedding_matrix(symbols, {}, 3, np.random.default_rng(0))
    assert np.flatnonzero(np.any(same != matrix, axis=1)).tolist() == [3]
    assert embedding_matrix([], {}, 3, np.random.default_rng(0)).shape == (0, 3)
