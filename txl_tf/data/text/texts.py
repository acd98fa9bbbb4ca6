"""Texts as they come: files, folders and patterns, JSON lines, Parquet, gzip and zip. A text may be a document.

```python
paths = find_files("corpus/*.jsonl.gz,more/")           # in a fixed order
for text in read_texts(map(FilePart, paths), "char"):   # Text("corpus/a.jsonl.gz, line 1", <pieces>), ...
    for piece in text.pieces: ...
```
"""

from __future__ import annotations

import codecs
import contextlib
import enum
import gzip
import itertools
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
    pieces_with_newlines,
    plain_text,
    whole_lines,
)
from txl_tf.errors import named, shortened
from txl_tf.files import absolute, reading
from txl_tf.schema import brief

JSON_LINES = (".jsonl", ".ndjson")
TEXT_FIELD = "text"
_LOOK_AT = 20  # lines, or elements of an array, that tell what a file is
_MOST_TO_LOOK_AT = 1 << 26  # bytes
_MOST_NAMES = 10  # of fields in a message
_SPACE = re.compile(r"\s*")
_UNREADABLE = (
    gzip.BadGzipFile,
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    NotImplementedError,  # a compression that zipfile does not know
    RuntimeError,  # encrypted
    tf.errors.InvalidArgumentError,  # a place before the beginning
)


_LONGEST_PATH = 4096  # characters, of a local file


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
            raise FileNotFoundError(f"there is no file in the {what} {named(path)}")
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
    """The paths of a list, or of a string with commas between them. Where a file has a comma in its name, it stays."""
    if isinstance(data_path, str) and "," in data_path and inputs.exists(data_path):
        data_path = [data_path]
    paths = data_path.split(",") if isinstance(data_path, str) else data_path
    paths = [os.fspath(path) for path in ([paths] if isinstance(paths, os.PathLike) else paths)]
    joined = []
    while paths:
        n = _length_of_name(paths)
        if not n:  # the reader says that there is no such file; to look for all others would take long
            joined += [path.strip() for path in paths]
            break
        joined.append(",".join(paths[:n]).strip())
        paths = paths[n:]
    if "" in joined:
        raise ValueError(f"path {joined.index('') + 1} of {brief(data_path)} is empty: it must name a file or a folder")
    return joined


def _length_of_name(parts: list[str]) -> int:
    """How many of the first parts, with commas between them, are the name of a file; 0 if there is none."""
    name = parts[0]
    if not name.strip() or _has_wildcard(name) or inputs.exists(name.strip()):
        return 1
    for n, part in enumerate(parts[1:], 2):
        name += f",{part}"
        if len(name) > _LONGEST_PATH:
            break
        if part and inputs.exists(name.strip()):
            return n
    return 0


def _has_wildcard(path: str) -> bool:
    return any(c in path for c in "*?[")


def _is_pattern(path: str) -> bool:
    return _has_wildcard(path) and not inputs.exists(path)


def _files_in(folder: str) -> list[str]:
    found = []
    for parent, folders, names in inputs.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        hidden = any(part.startswith(".") for part in parent.removeprefix(folder).split("/"))
        found += [os.path.join(parent, name) for name in names if not name.startswith(".") and not hidden]
    return sorted(found)


def have_documents(paths: Iterable[str], raw_text: bool = True) -> bool:
    """Whether a file, or a file in a zip archive, is one of documents: JSON lines or Parquet by its name; or, unless it
    is `raw_text`, JSON lines or a JSON array by what is in it.
    """
    for path in paths:
        if any(_is_json_lines(name, raw_text) or is_parquet(name) for name in _names_in(path)):
            return True
        if not raw_text and any(kind in _OF_DOCUMENTS for kind in _kinds_in(path)):
            return True
    return False


def _is_json_lines(name: str, raw_text: bool) -> bool:
    name = name if raw_text else name.lower()
    return name.removesuffix(".gz").endswith(JSON_LINES)


def _names_in(path: str) -> list[str]:
    if not inputs.has_ending(path, ".zip") or not inputs.exists(path):
        return [path]
    with _open_zip(path) as archive:
        return [member.filename for member in _members(archive)]


def is_json_array(path: str) -> bool:
    """Whether a file is a JSON array of texts, which can only be read as a whole."""
    return any(kind is _Kind.JSON_ARRAY for kind in _kinds_in(path))


def _kinds_in(path: str) -> Iterator[_Kind]:
    """What the text files are that a file is or holds, up to what cannot be read, of which its reader will say so."""
    with contextlib.suppress(ValueError, OSError, tf.errors.OpError):
        for stream in _streams_of(FilePart(path), None, numbered=False):
            yield _recognised(stream)[0]


# ------------------------------------------------------------------------------------------------- what is in them


def read_texts(
    parts: Iterable[FilePart],
    level: str,
    text_field: str | None = None,
    progress: Callable | None = None,
    numbered: bool = True,
    raw_text: bool = True,
    skipped: Callable[[str], None] | None = None,
    advice: str = "",
) -> Iterator[Text]:
    r"""Yields the texts of files in turn: each JSON line, each row of Parquet, each other file, also in archives.

    Args:
        parts: local or remote files; those that end in .gz or .zip are unpacked as they are read.
        level: of the vocabulary, which says where pieces are cut, see `read_files`.
        text_field: the field of JSON lines that holds the text. If it is given, all files but Parquet are JSON. By
            default, those whose names or lines say so are, and the field is `text`.
        progress: called with the number of bytes of each piece, as it is in the file.
        numbered: whether to count the lines before a part of a file, as an error needs them.
        raw_text: whether files are read as they are: `\r` and byte order marks are text, and names alone tell JSON
            lines. Else texts are `plain_text`, except at level "byte", and JSON is also told by the lines.
        skipped: called with the reason for each row without a text, which is left out. `None`: it is an error.
        advice: a way out for a text that is not UTF-8.

    Raises:
        ValueError: a text is empty or is not UTF-8, a line is not JSON or has no such field, an archive is damaged.
            Names file and line.
        FileNotFoundError: a file does not exist.
    """
    field, options = text_field or TEXT_FIELD, {"raw_text": raw_text, "skipped": skipped}
    for part in parts:
        if is_parquet(part.path):
            rows = parquet_rows(part.path, field, part.begin, part.end, progress)
            yield from texts_of_rows(rows, level, field, **options)
            continue
        for stream in _streams_of(part, progress, numbered, raw_text):
            kind, stream = (_Kind.TEXT, stream) if raw_text else _recognised(stream)
            if kind is _Kind.JSON_ARRAY:
                yield from texts_of_rows(_json_array(stream), level, field, **options)
            elif kind is _Kind.JSON_LINES or text_field is not None or _is_json_lines(stream.name, raw_text):
                yield from texts_of_rows(_json_lines(stream, raw_text, skipped), level, field, **options)
            elif kind is _Kind.OTHER_JSON and inputs.has_ending(stream.name, ".json", ".json.gz"):
                raise ValueError(
                    f"{stream.name} must have a JSON object in every line, or be one array of objects or texts: "
                    f"jq -c . writes an object a line; raw_text reads the file as plain text"
                )
            else:
                pieces = pieces_of(stream.blocks, stream.name, level, stream.first_byte, raw_text, advice)
                yield Text(stream.name, pieces, stream.first_line, stream.is_last)


def texts_of_rows(
    rows: Iterable[tuple[str, Any]],
    level: str,
    field: str,
    raw_text: bool = True,
    skipped: Callable[[str], None] | None = None,
) -> Iterator[Text]:
    """The texts of rows, `(name, row)`, which are what `text_of` takes; `raw_text` and `skipped` as in `read_texts`."""
    for name, row in rows:
        try:
            text = text_of(row, field, name)
        except ValueError as error:
            if not skipped:
                raise
            skipped(str(error))
            continue
        text = text if raw_text or level == "byte" else plain_text(text)
        yield Text(name, cut_between([text], level, name) if level in ("word", "line") else [text])


def _json_lines(
    stream: _Stream, raw_text: bool, skipped: Callable[[str], None] | None = None
) -> Iterator[tuple[str, Any]]:
    """Name and value of each of the JSON lines. Empty lines are none, and a byte order mark is no part of the first."""
    pieces = decoded(stream.blocks, stream.name, stream.first_byte)
    pieces = pieces if raw_text else pieces_with_newlines(pieces)
    for number, line in enumerate(lines_of(cut_between(pieces, "line")), stream.first_line):
        if number == stream.first_line and not stream.first_byte:
            line = line.removeprefix("\ufeff")
        if line.strip():
            where = f"{stream.name}, line {number}"
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                if skipped:
                    skipped(f"{where} is not JSON: {error}")
                    continue
                raise ValueError(f"{where} is not JSON: {error}") from error
            yield where, value


def _json_array(stream: _Stream) -> Iterator[tuple[str, Any]]:
    """Name and value of each element of a JSON array, which is held in memory as a whole."""
    text = "".join(decoded(stream.blocks, stream.name)).removeprefix("\ufeff")
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{stream.name} is not JSON: {error}") from error
    for number, value in enumerate(values, 1):
        yield f"{stream.name}, text {number}", value


def text_of(value: Any, field: str, where: str) -> str:
    """The text of a JSON object, or of what a data set holds: its field, a string or UTF-8 bytes.

    Raises:
        ValueError: there is none, it is empty, or it is not UTF-8. The message begins with `where`.
    """
    if isinstance(value, Mapping):
        if field not in value:
            names = [*map(brief, itertools.islice(value, _MOST_NAMES)), *["..."] * (len(value) > _MOST_NAMES)]
            found = shortened(", ".join(names), 200) or "none"
            raise ValueError(
                f"{where} has no field {brief(field)}; it has {found}. text_field names the field of "
                "the text, raw_text reads JSON in files of other names than .jsonl as plain text"
            )
        value, where = value[field], f"{where}, field {field!r},"
    try:
        text = value.decode() if isinstance(value, bytes) else value
        if not isinstance(text, str):
            raise ValueError(f"{where} must be a string, got {brief(value)}; skip_bad_lines leaves it out")
        text.encode()  # half of a surrogate pair is no character
    except UnicodeError as error:
        raise ValueError(f"{where} is not UTF-8 text: {error.reason} at {error.start}") from error
    if not text:
        raise ValueError(f"{where} is empty: leave the document out, as skip_bad_lines does")
    return text


# ------------------------------------------------------------------------------------- what a file is, by its beginning


class _Kind(enum.Enum):
    TEXT = "plain text"
    JSON_LINES = "an object in every line"
    JSON_ARRAY = "one array of objects or strings"
    OTHER_JSON = "it begins as JSON does"


_OF_DOCUMENTS = (_Kind.JSON_LINES, _Kind.JSON_ARRAY)


def _recognised(stream: _Stream) -> tuple[_Kind, _Stream]:
    """What a text file is by its beginning, and the stream, which still has that beginning."""
    if stream.first_byte:  # a later part of a file, which is what its beginning is
        return next(_kinds_in(stream.name), _Kind.TEXT), stream
    start, kind = [], None
    for block in stream.blocks:
        start.append(block)
        kind = _kind_of(b"".join(start), whole=False)
        if kind or sum(map(len, start)) > _MOST_TO_LOOK_AT:
            break
    kind = kind or _kind_of(b"".join(start), whole=True)
    return kind, stream._replace(blocks=itertools.chain(start, stream.blocks))


def _kind_of(data: bytes, whole: bool) -> _Kind | None:
    """What a text file is that begins with these bytes, or is `whole`; `None` where that is not clear yet."""
    data = data.removeprefix(codecs.BOM_UTF8).lstrip()
    if not data.startswith((b"{", b"[")):
        return _Kind.TEXT if data or whole else None
    if data.startswith(b"["):
        return _array_or_text(data.decode("utf-8", "ignore"), whole)
    lines = data.splitlines(keepends=True)
    lines = lines if whole or lines[-1].endswith((b"\n", b"\r")) else lines[:-1]
    if not lines:
        return None
    some = [isinstance(_json_or_none(line), dict) for line in lines[: 2 * _LOOK_AT] if line.strip()][:_LOOK_AT]
    return _Kind.JSON_LINES if some[0] and 2 * sum(some) > len(some) else _Kind.OTHER_JSON


def _array_or_text(text: str, whole: bool) -> _Kind | None:
    """`_kind_of` a text that begins with a bracket: an array if the first elements are objects or strings."""
    place, decoder = 1, json.JSONDecoder()
    for _ in range(_LOOK_AT):
        place = _SPACE.match(text, place).end()
        if text[place : place + 1] not in ("{", '"', ""):
            return _Kind.OTHER_JSON
        try:
            _, place = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            return _Kind.OTHER_JSON if whole or len(text) > place + _MOST_TO_LOOK_AT else None
        place = _SPACE.match(text, place).end()
        if text[place : place + 1] != ",":
            ends = text[place : place + 1] == "]" and not text[place + 1 :].strip()
            return _Kind.JSON_ARRAY if ends else _Kind.OTHER_JSON if text[place:] or whole else None
        place += 1
    return _Kind.JSON_ARRAY


def _json_or_none(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


# -------------------------------------------------------------------------------------------------------- archives


class _Stream(NamedTuple):
    """A text file, a part of it, or a file in an archive."""

    name: str
    blocks: Iterator[bytes]
    first_byte: int = 0
    first_line: int = 1
    is_last: bool = True


def _streams_of(part: FilePart, progress: Callable | None, numbered: bool, raw_text: bool = True) -> Iterator[_Stream]:
    """The text files that a file is or holds."""
    if inputs.has_ending(part.path, ".zip"):
        for name, blocks in _in_archive(part, progress):
            yield _Stream(name, whole_lines(blocks))
    elif inputs.has_ending(part.path, ".gz"):
        yield _Stream(part.path, whole_lines(_unpacked(part.path, progress)))
    else:
        begin = line_start(part.path, part.begin)
        end = line_start(part.path, part.end) if part.end is not None else None
        first_line = 1 + lines_before(part.path, begin, raw_text) if numbered else 1
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
        raise FileNotFoundError(f"there is no file {named(path)}")
    with reading(path), inputs.opened(path) as file:
        try:
            yield file
        except _UNREADABLE as error:
            raise ValueError(f"{path} cannot be unpacked: {error}") from error


@contextlib.contextmanager
def _open_zip(path: str) -> Iterator[zipfile.ZipFile]:
    if inputs.exists(path) and not inputs.size(path):  # zipfile's own message is of a negative position
        raise ValueError(f"{path} is empty: it is no zip archive")
    with _opened(path) as file, zipfile.ZipFile(file) as archive:
        yield archive


def _members(archive: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    """The files of an archive in the order of their names, but for hidden ones and those that macOS adds."""
    members = [member for member in archive.infolist() if not member.is_dir()]
    shown = [m for m in members if not any(part.startswith((".", "__MACOSX")) for part in m.filename.split("/"))]
    return sorted(shown, key=lambda member: member.filename)
