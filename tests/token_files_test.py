"""Token files: what is written is what is read, whole or in slices, and no damaged file is read."""

import os

import numpy as np
import pytest
import tensorflow as tf
from helpers import raises_naming, raises_parameter

from txl_tf.data import token_files
from txl_tf.errors import ArgumentTypeError


def write_tokens(path, pieces, n_symbols=300):
    writer = token_files.TokenWriter(str(path), n_symbols)
    for piece in pieces:
        writer.add(piece)
    writer.close()
    return str(path)


def test_a_token_file_is_an_npy_file_of_all_that_was_added(tmp_path):
    path = write_tokens(tmp_path / "a.npy", [[1, 2], [], np.array([299])])
    assert np.load(path).dtype == np.uint16
    assert np.load(path).tolist() == [1, 2, 299]


def test_an_unclosed_file_holds_no_token(tmp_path):
    writer = token_files.TokenWriter(str(tmp_path / "a.npy"), 300)
    writer.add([1, 2])
    assert np.load(tmp_path / "a.npy").tolist() == []


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_slices_are_those_of_the_joined_array(tmp_path, scheme):
    pieces = [np.arange(5), np.arange(5, 6), np.arange(6, 20)]
    paths = [scheme + write_tokens(tmp_path / f"{i}.npy", [piece]) for i, piece in enumerate(pieces)]
    tokens, expected = token_files.open_tokens(paths), np.arange(20)
    assert len(tokens) == 20
    np.testing.assert_array_equal(np.asarray(tokens), expected)
    for first in (None, 0, 3, 5, 6, 19, 20, 25, -3):
        for last in (None, 0, 4, 5, 6, 7, 20, 99, -1):
            np.testing.assert_array_equal(tokens[first:last], expected[first:last])
            assert tokens[first:last].dtype == np.uint16


@pytest.mark.parametrize("index", [3, slice(0, 4, 2)])
def test_only_plain_slices_are_read(index):
    with raises_parameter("index", index, error=ArgumentTypeError):
        token_files.StoredTokens([np.arange(5)])[index]


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_files_that_are_not_whole_are_refused(tmp_path, scheme):
    path = write_tokens(tmp_path / "a.npy", [[1, 2, 3]])
    (tmp_path / "a.npy").write_bytes((tmp_path / "a.npy").read_bytes()[:-1])
    with raises_parameter(scheme + path):
        token_files.open_tokens([scheme + path])
    (tmp_path / "a.npy").write_bytes(b"1 2 3")
    with raises_parameter(scheme + path):
        token_files.open_tokens([scheme + path])
    with pytest.raises(FileNotFoundError, match="b.npy"):
        token_files.open_tokens([f"{scheme}{tmp_path}/b.npy"])


def test_a_file_that_is_lost_while_it_is_read_is_named(tmp_path, monkeypatch):
    path = "file://" + write_tokens(tmp_path / "a.npy", [[1, 2, 3]])
    tokens = token_files.open_tokens([path])
    (tmp_path / "a.npy").rename(tmp_path / "b.npy")
    with raises_naming(OSError, "a.npy"):
        tokens[:2]

    def lost(path):
        raise tf.errors.UnavailableError(None, None, "no connection")

    monkeypatch.setattr(tf.io.gfile, "stat", lost)
    with raises_naming(OSError, "b.npy"):
        token_files.read_header(str(tmp_path / "b.npy"))


@pytest.mark.skipif(os.name != "posix", reason="limits of file sizes are those of POSIX")
def test_a_full_disk_names_the_file(tmp_path):
    import resource  # not on every system

    writer = token_files.TokenWriter(str(tmp_path / "tokens.npy"), n_symbols=256)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with raises_naming(OSError, tmp_path / "tokens.npy"):
            writer.add(np.zeros(2000, int))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
