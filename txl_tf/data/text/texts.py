"""Texts as they come: files, folders and patterns, JSON lines, Parquet, gzip and zip. A text may be a document.

```python
paths = find_files("corpus/*.jsonl.gz,more/")           # in a fixed order
for text in read_texts(map(FilePart, paths), "char"):   # Text("corpus/a.jsonl.gz, line 1", <pieces>), ...
    for piece in text.pieces: ...
```
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
from pathlib import PurePosixPath
from typing import Any, BinaryIO, NamedTuple

import tensorflow as tf

from txl_tf.data import inputs
from txl_tf.data.text.parquet import is_parquet, parquet_rows
from txl_tf.data.text_files import (
    blocks_in,
    blocks_of,
    cut_between,
    decoded,
    line_start,
    lines_before,
    lines_of,
    pieces_of,
    whole_lines,
)
from txl_tf.files import absolute, reading
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


class FilePart(NamedTuple):
    """A file, or a part of it that can be read by itself.

    Attributes:
        begin, end: from where to where: near which bytes of a plain file, which are cut between lines; which files of a
            zip archive, in the order of their names; which row groups of a Parquet file. `None`: to the end.
    """

    path: str
    begin: int = 0
    end: int | None = None


class Text(NamedTuple):
    """A text, or a part of it, that is read in pieces, once."""

    name: str  # what messages call it
    pieces: Iterable[str | bytes]  # at level "byte" of a file bytes, of a JSON line a string
    first_line: int = 1  # number of the line that the pieces begin with
    is_last: bool = True  # whether the text ends with them


# ---------------------------------------------------------------------------------------------------- which files


def find_files(data_path: Any) -> list[str]:
    """The files that a path, a pattern or a folder stands for; or several, in a list or separated by commas.

    A folder stands for all files in it and in its folders, but for those whose names begin with a dot. Files come in
    the order of the paths, those of a pattern or a folder in the order of their names.

    Raises:
        FileNotFoundError: a pattern or a folder has no file. A path that does not exist is left for its reader.
        ValueError: a path is empty.
    """
    return [path for path, _ in find_named_files(data_path)]


def find_named_files(data_path: Any) -> list[tuple[str, str]]:
    """`find_files`, and the name of each below the folder that was named; of a pattern, below the last folder before
    its first wildcard.
    """
    found = []
    for path in _paths_of(data_path):
        if inputs.is_folder(path):
            files, what, root = _files_in(path), "folder", path
        elif _is_pattern(path):
            matches, root = inputs.matching(path), os.path.dirname(re.split(r"[*?[]", path)[0])
            files, what = [file for match in matches for file in find_files([match])], "pattern"
        else:
            files, what, root = [path], "file", os.path.dirname(path)
        if not files:
            raise FileNotFoundError(f"there is no file in the {what} {path}")
        found += [(file, os.path.relpath(file, root or ".")) for file in files]
    return found


def folder_around(paths: Iterable[str], data_path: Any) -> str | None:
    """The folder or pattern of `data_path` that has one of `paths`, which need not exist yet, among what `find_files`
    looks at; or `None`.
    """
    paths = [PurePosixPath(absolute(path)) for path in paths]
    for given in _paths_of(data_path):
        is_folder, is_pattern = inputs.is_folder(given), _is_pattern(given)
        for path in paths if is_folder or is_pattern else ():
            folders = [absolute(given)] if is_folder else [f for f in (path, *path.parents) if f.match(absolute(given))]
            places = [os.path.relpath(path, folder) for folder in folders]
            if any(place == "." or not place.startswith(".") and "/." not in place for place in places):  # none hidden
                return given
    return None


def _paths_of(data_path: Any) -> list[str]:
    paths = data_path.split(",") if isinstance(data_path, str) else data_path
    paths = [os.fspath(path).strip() for path in ([paths] if isinstance(paths, os.PathLike) else paths)]
    if "" in paths:
        raise ValueError(f"path {paths.index('') + 1} of {brief(data_path)} is empty: it must name a file or a folder")
    return paths


def _is_pattern(path: str) -> bool:
    return any(c in path for c in "*?[") and not inputs.exists(path)


def _files_in(folder: str) -> list[str]:
    found = []
    for parent, folders, names in inputs.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        hidden = any(part.startswith(".") for part in parent.removeprefix(folder).split("/"))
        found += [os.path.join(parent, name) for name in names if not name.startswith(".") and not hidden]
    return sorted(found)


def have_documents(paths: Iterable[str]) -> bool:
    """Whether a file, or a file in a zip archive, is one of documents by its name: JSON lines or Parquet."""
    return any(_is_json_lines(name) or is_parquet(name) for path in paths for name in _names_in(path))


def _is_json_lines(name: str) -> bool:
    return name.removesuffix(".gz").endswith(JSON_LINES)


def _names_in(path: str) -> list[str]:
    if not path.endswith(".zip") or not inputs.exists(path):
        return [path]
    with _open_zip(path) as archive:
        return [member.filename for member in _members(archive)]


# ------------------------------------------------------------------------------------------------- what is in them


def read_texts(
    parts: Iterable[FilePart],
    level: str,
    text_field: str | None = None,
    progress: Callable | None = None,
    numbered: bool = True,
) -> Iterator[Text]:
    """Yields the texts of files in turn: each JSON line, each row of Parquet, each other file, each file in an archive.

    Args:
        parts: local or remote files; those that end in .gz or .zip are unpacked as they are read.
        level: of the vocabulary, which says where pieces are cut, see `read_files`.
        text_field: the field of JSON lines that holds the text. If it is given, all files but Parquet are JSON lines.
            By default, those whose names say so are, and the field is `text`.
        progress: called with the number of bytes of each piece, as it is in the file.
        numbered: whether to count the lines before a part of a file, as an error needs them.

    Raises:
        FileNotFoundError: a file does not exist.
        ValueError: a text is empty or is not UTF-8, a line is not JSON or has no such field, an archive is damaged.
            Names file and line.
    """
    for part in parts:
        if is_parquet(part.path):
            rows = parquet_rows(part.path, text_field or TEXT_FIELD, part.begin, part.end, progress)
            yield from texts_of_rows(rows, level, text_field or TEXT_FIELD)
            continue
        for stream in _streams_of(part, progress, numbered):
            if text_field is not None or _is_json_lines(stream.name):
                yield from texts_of_rows(_json_lines(stream), level, text_field or TEXT_FIELD)
            else:
                pieces = pieces_of(stream.blocks, stream.name, level, stream.first_byte)
                yield Text(stream.name, pieces, stream.first_line, stream.is_last)


def texts_of_rows(rows: Iterable[tuple[str, Any]], level: str, field: str) -> Iterator[Text]:
    """The texts of rows, `(name, row)`, which are what `text_of` takes."""
    for name, row in rows:
        text = text_of(row, field, name)
        yield Text(name, cut_between([text], level) if level in ("word", "line") else [text])


def _json_lines(stream: _Stream) -> Iterator[tuple[str, Any]]:
    """Name and value of each of the JSON lines. Empty lines are none, and a byte order mark is no part of the first."""
    lines = lines_of(cut_between(decoded(stream.blocks, stream.name, stream.first_byte), "line"))
    for number, line in enumerate(lines, stream.first_line):
        if number == stream.first_line and not stream.first_byte:
            line = line.removeprefix("\ufeff")
        if line.strip():
            where = f"{stream.name}, line {number}"
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{where} is not JSON: {error}") from error
            yield where, value


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


class _Stream(NamedTuple):
    """A text file, a part of it, or a file in an archive."""

    name: str
    blocks: Iterator[bytes]
    first_byte: int = 0
    first_line: int = 1
    is_last: bool = True


def _streams_of(part: FilePart, progress: Callable | None, numbered: bool) -> Iterator[_Stream]:
    """The text files that a file is or holds."""
    if part.path.endswith(".zip"):
        for name, blocks in _in_archive(part, progress):
            yield _Stream(name, whole_lines(blocks))
    elif part.path.endswith(".gz"):
        yield _Stream(part.path, whole_lines(_unpacked(part.path, progress)))
    else:
        begin = line_start(part.path, part.begin)
        end = line_start(part.path, part.end) if part.end is not None else None
        first_line = 1 + lines_before(part.path, begin) if numbered else 1
        blocks = whole_lines(blocks_of(part.path, progress, begin, end))
        yield _Stream(part.path, blocks, begin, first_line, is_last=end is None)


def _in_archive(part: FilePart, progress: Callable | None) -> Iterator[tuple[str, Iterator[bytes]]]:
    with _open_zip(part.path) as archive:
        members = _members(archive)
        if not members:
            raise ValueError(f"{part.path} holds no file")
        for member in members[part.begin : part.end]:
            with archive.open(member) as file:
                yield f"{part.path}/{member.filename}", blocks_in(file, f"{part.path}/{member.filename}")
            if progress:
                progress(member.compress_size)


def sizes_in_zip(path: str) -> list[int]:
    """How many bytes of an archive each of its files takes."""
    with _open_zip(path) as archive:
        return [member.compress_size for member in _members(archive)]


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
    if not inputs.exists(path):
        raise FileNotFoundError(f"there is no file {path}")
    with reading(path), inputs.opened(path) as file:
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
