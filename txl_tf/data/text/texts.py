"""Texts as they come: files, folders and patterns, JSON lines, gzip and zip. A text may be a document of its own.

paths = find_files("corpus/*.jsonl.gz,more/")           # in a fixed order
for text in read_texts(paths, "char"):                  # Text("corpus/a.jsonl.gz, line 1", <pieces>), ...
    for piece in text.pieces: ...
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, BinaryIO, NamedTuple

import tensorflow as tf

from txl_tf.data.text_files import blocks_in, blocks_of, cut_between, decoded, lines_of, pieces_of
from txl_tf.files import reading
from txl_tf.schema import brief

JSON_LINES = (".jsonl", ".ndjson")
TEXT_FIELD = "text"
_UNREADABLE = (
    gzip.BadGzipFile,
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    NotImplementedError,  # a compression that zipfile does not know
    RuntimeError,  # encrypted
    tf.errors.InvalidArgumentError,  # a place before the beginning
)


class Text(NamedTuple):
    """A text that is read in pieces, once."""

    name: str  # what messages call it
    pieces: Iterable[str | bytes]  # at level "byte" of a file bytes, of a JSON line a string


# ---------------------------------------------------------------------------------------------------- which files


def find_files(data_path: Any) -> list[str]:
    """The files that a path, a pattern or a folder stands for; or several, in a list or separated by commas.

    A folder stands for all files in it and in its folders, but for those whose names begin with a dot. Files come in
    the order of the paths, those of a pattern or a folder in the order of their names.

    Raises:
        FileNotFoundError: a pattern or a folder has no file. A path that does not exist is left for its reader.
    """
    return [path for path, _ in find_named_files(data_path)]


def find_named_files(data_path: Any) -> list[tuple[str, str]]:
    """`find_files`, and the name of each below the folder that was named; of a pattern, below the last folder before
    its first wildcard.
    """
    paths = data_path.split(",") if isinstance(data_path, str) else data_path
    paths = [paths] if isinstance(paths, os.PathLike) else list(paths)
    found = []
    for path in (os.fspath(path).strip() for path in paths):
        if tf.io.gfile.isdir(path):
            files, what, root = _files_in(path), "folder", path
        elif any(c in path for c in "*?[") and not tf.io.gfile.exists(path):
            matches, root = sorted(tf.io.gfile.glob(path)), os.path.dirname(re.split(r"[*?[]", path)[0])
            files, what = [file for match in matches for file in find_files([match])], "pattern"
        else:
            files, what, root = [path], "file", os.path.dirname(path)
        if not files:
            raise FileNotFoundError(f"there is no file in the {what} {path}")
        found += [(file, os.path.relpath(file, root or ".")) for file in files]
    return found


def _files_in(folder: str) -> list[str]:
    found = []
    for parent, folders, names in tf.io.gfile.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        hidden = any(part.startswith(".") for part in parent.removeprefix(folder).split("/"))
        found += [os.path.join(parent, name) for name in names if not name.startswith(".") and not hidden]
    return sorted(found)


def have_json_lines(paths: Iterable[str]) -> bool:
    """Whether a file, or a file in a zip archive, is JSON lines by its name."""
    return any(_is_json_lines(name) for path in paths for name in _names_in(path))


def _is_json_lines(name: str) -> bool:
    return name.removesuffix(".gz").endswith(JSON_LINES)


def _names_in(path: str) -> list[str]:
    if not path.endswith(".zip") or not tf.io.gfile.exists(path):
        return [path]
    with _open_zip(path) as archive:
        return [member.filename for member in _members(archive)]


# ------------------------------------------------------------------------------------------------- what is in them


def read_texts(
    paths: Iterable[str], level: str, text_field: str | None = None, progress: Callable | None = None
) -> Iterator[Text]:
    """Yields the texts of files in turn: each line of JSON lines, each other file, each file in a zip archive.

    Args:
        paths: local or remote files; those that end in .gz or .zip are unpacked as they are read.
        level: of the vocabulary, which says where pieces are cut, see `read_files`.
        text_field: the field of JSON lines that holds the text. If it is given, all files are JSON lines. By default,
            those whose names say so are, and the field is `text`.
        progress: called with the number of bytes of each piece, as it is in the file.

    Raises:
        FileNotFoundError: a file does not exist.
        ValueError: a text is empty or is not UTF-8, a line is not JSON or has no such field, an archive is damaged.
            Names file and line.
    """
    for path in paths:
        for name, blocks in _files_of(path, progress):
            if text_field is not None or _is_json_lines(name):
                for where, text in _json_texts(name, blocks, text_field or TEXT_FIELD):
                    yield Text(where, cut_between([text], level) if level == "word" else [text])
            else:
                yield Text(name, pieces_of(blocks, name, level))


def _json_texts(name: str, blocks: Iterator[bytes], field: str) -> Iterator[tuple[str, str]]:
    """Name and text of each of the JSON lines. Empty lines are none."""
    for number, line in enumerate(lines_of(cut_between(decoded(blocks, name), "line")), 1):
        if line.strip():
            where = f"{name}, line {number}"
            try:
                value = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{where} is not JSON: {error}") from error
            yield where, text_of(value, field, where)


def text_of(value: Any, field: str, where: str) -> str:
    """The text of a JSON object, or of what a data set holds: its field, a string or UTF-8 bytes.

    Raises:
        ValueError: there is none, it is empty, or it is not UTF-8. The message begins with `where`.
    """
    if isinstance(value, Mapping):
        if field not in value:
            raise ValueError(f"{where} has no field {field!r}; it has {', '.join(map(brief, value)) or 'none'}")
        value, where = value[field], f"{where}, field {field!r},"
    try:
        text = value.decode() if isinstance(value, bytes) else value
        if not isinstance(text, str):
            raise ValueError(f"{where} must be a string, got {brief(value)}")
        text.encode()  # half of a surrogate pair is no character
    except UnicodeError as error:
        raise ValueError(f"{where} is not UTF-8 text: {error.reason} at {error.start}") from error
    if not text:
        raise ValueError(f"{where} is empty: leave the document out")
    return text


# -------------------------------------------------------------------------------------------------------- archives


def _files_of(path: str, progress: Callable | None) -> Iterator[tuple[str, Iterator[bytes]]]:
    """Name and blocks of the text files that a file is or holds."""
    if not path.endswith((".gz", ".zip")):
        yield path, blocks_of(path, progress)
    elif path.endswith(".gz"):
        yield path, _unpacked(path, progress)
    else:
        with _open_zip(path) as archive:
            members = _members(archive)
            if not members:
                raise ValueError(f"{path} holds no file")
            for member in members:
                with archive.open(member) as file:
                    yield f"{path}/{member.filename}", blocks_in(file, f"{path}/{member.filename}")
                if progress:
                    progress(member.compress_size)


def _unpacked(path: str, progress: Callable | None) -> Iterator[bytes]:
    with _opened(path) as packed, gzip.GzipFile(fileobj=packed) as file:
        before = 0
        for block in blocks_in(file, path):
            yield block
            if progress:
                progress(packed.tell() - before)
                before = packed.tell()


@contextlib.contextmanager
def _opened(path: str) -> Iterator[BinaryIO]:
    if not tf.io.gfile.exists(path):
        raise FileNotFoundError(f"there is no file {path}")
    with reading(path), tf.io.gfile.GFile(path, "rb") as file:
        try:
            yield file
        except _UNREADABLE as error:
            raise ValueError(f"{path} cannot be unpacked: {error}") from error


@contextlib.contextmanager
def _open_zip(path: str) -> Iterator[zipfile.ZipFile]:
    with _opened(path) as file, zipfile.ZipFile(file) as archive:
        yield archive


def _members(archive: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    """The files of an archive in the order of their names, but for hidden ones and those that macOS adds."""
    members = [member for member in archive.infolist() if not member.is_dir()]
    shown = [m for m in members if not any(part.startswith((".", "__MACOSX")) for part in m.filename.split("/"))]
    return sorted(shown, key=lambda member: member.filename)


# ---------------------------------------------------------------------------------------------------- how much there is


class TextSize(NamedTuple):
    """UTF-8 bytes, characters, and words between white space: what losses of different vocabularies compare by."""

    bytes: int = 0
    characters: int = 0
    words: int = 0

    def __add__(self, other: TextSize) -> TextSize:
        return TextSize(*(mine + its for mine, its in zip(self, other, strict=True)))


class TextMeter:
    """Measures a text that comes in pieces: a word that two of them share counts once."""

    def __init__(self):
        self._within_word = False

    def measure(self, piece: str | bytes, ends_document: bool = False) -> TextSize:
        """The size of the next piece; bytes that are not UTF-8 are a character each. A document ends its last word."""
        text = piece.decode("utf-8", "surrogateescape") if isinstance(piece, bytes) else piece
        n_bytes = len(piece) if isinstance(piece, bytes) or text.isascii() else len(text.encode("utf-8", "replace"))
        n_words = len(text.split())
        if text:
            n_words -= self._within_word and not text[0].isspace()
            self._within_word = not text[-1].isspace()
        self._within_word = self._within_word and not ends_document
        return TextSize(n_bytes, len(text), n_words)
