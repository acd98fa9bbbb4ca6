"""Word vectors: what is read from a file, and the embeddings that begin with it."""

import numpy as np
import pytest
from helpers import write_text

from txl_tf.data.tagged.word_vectors import embedding_matrix, read_vectors
from txl_tf.data.text_files import numbered_lines

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
    "content, message",
    [
        ("a 1 2\nb 1\n", r"vectors, line 2 must have a word and 2 numbers, got 1: 'b 1'"),
        ("a 1 2\nb 1 2 3\n", r"vectors, line 2 must have a word and 2 numbers, got 3: 'b 1 2 3'"),
        ("1 3\n\nb 1 2\n", r"vectors, line 3 must have a word and 3 numbers, got 2: 'b 1 2'"),
        ("a\n", r"vectors, line 1 must have a word and numbers, got 0: 'a'"),
        ("a 1 2\nb 1 x\n", r"vectors, line 2: could not convert string to float.*'x'"),
        ("a 1 nan\n", r"vectors, line 1: numbers must be finite, got '1 nan'"),
        ("", "vectors is empty"),
        ("\n", "vectors has no vectors"),
        ("5 4\n\n", "vectors has no vectors"),
        (b"a 1 \xff\n", "vectors is not UTF-8 text: see byte 4"),
    ],
)
def test_what_is_no_file_of_vectors_is_named(tmp_path, content, message):
    with pytest.raises(ValueError, match=message):
        read_vectors(write_text(tmp_path / "vectors", content), {"a", "b"})


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
