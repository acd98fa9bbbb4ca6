"""Finds files by folders and patterns, and reads texts from them: plain text, JSON, Parquet, gzip and zip.

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
    Progress,
    blocks_in,
    blocks_of,
    cut_between,
    decoded_blocks,
    line_start,
    lines_before,
    lines_of,
    pieces_of,
    pieces_with_newlines,
    plain_text,
    whole_lines,
)
from txl_tf.errors import ParameterError, brief, named, shortened
from txl_tf.files import naming_read_errors, real

JSON_LINES = (".jsonl", ".ndjson")
TEXT_FIELD = "text"
_LOOK_AT = 20  # lines, or elements of an array, that decide the kind of a file
_MOST_TO_LOOK_AT = 1 << 26  # bytes of a file; if they do not decide, it is judged as if it ended there
_MOST_NAMES = 10  # names of fields in a message
_LONGEST_PATH = 4096  # characters, of a local file
_SPACE = re.compile(r"\s*")
_EMPTY_ZIP = b"PK\x05\x06"  # first bytes of a zip archive without files
_UNREADABLE = (
    gzip.BadGzipFile,
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    NotImplementedError,  # a compression that zipfile does not know
    RuntimeError,  # encrypted
    tf.errors.InvalidArgumentError,  # a position before the beginning
)


class FilePart(NamedTuple):
    """A file, or a part of it that can be read independently.

    Attributes:
        path: path of the file.
        begin: where the part begins: a byte of a plain file (the part begins at a line near it), the number of a file
            in a zip archive, in the order of their names, or the number of a row group of a Parquet file.
        end: where it ends, exclusive; `None`: at the end of the file.
    """

    path: str
    begin: int = 0
    end: int | None = None


class Text(NamedTuple):
    """A text, or the part of it that a portion has. Its pieces can be read once."""

    name: str  # for messages
    pieces: Iterable[str | bytes]  # at level "byte": bytes of a file, or the string of a row, such as a JSON line
    first_line: int = 1  # number of the line at the beginning of the pieces
    is_last: bool = True  # whether the pieces are the end of the text


# ---------------------------------------------------------------------------------------------------- which files


def find_files(data_path: Any, argument: str = "data_path") -> list[str]:
    """Returns the files that paths, patterns and folders name.

    A folder stands for all files in it and in its folders, except those whose names begin with a dot. The files are in
    the order of `data_path`; the files of a pattern or a folder are in the order of their names. A path that does not
    exist is returned, too: reading it raises the error.

    Args:
        data_path: a path, a pattern or a folder; or several of them, in a list or in a string with commas between them.
            In a string, white space around a path is left out, unless a file has exactly this name.
        argument: name of the argument whose value is `data_path`, for errors.

    Raises:
        FileNotFoundError: a pattern or a folder has no file.
        ParameterError: a path is empty, or not UTF-8; or the name of a file is not UTF-8; or there is no file system
            for the scheme of a path.
    """
    return [path for path, _ in find_named_files(data_path, argument)]


def find_named_files(data_path: Any, argument: str = "data_path") -> list[tuple[str, str]]:
    """Finds files as `find_files` does. Returns `(file, name)` for each.

    The name is the path relative to the given folder. For a pattern, it is relative to the last folder before the first
    wildcard; for a file, it is the file's own name.

    Args:
        data_path, argument: see `find_files`.
    """
    named_files = []
    for path in _paths_of(data_path, argument):
        if inputs.is_folder(path):
            root = path
            with inputs.naming_bad_names(argument, path, root):
                files = _files_in(path)
            what = "folder"
        elif _is_pattern(path):
            root = inputs.folder_of(path)
            with inputs.naming_bad_names(argument, path, root):
                matches = inputs.matching(path)
            # A folder and the files in it may both match.
            files = list(dict.fromkeys(file for match in matches for file in find_files([match], argument)))
            what = "pattern"
        else:
            files = [path]
            what = "file"
            root = os.path.dirname(path)
        if not files:
            raise FileNotFoundError(f"there is no file in the {what} {named(path)}")
        named_files += [(file, os.path.relpath(file, root or ".")) for file in files]
    return named_files


def folder_around(paths: Iterable[str], data_path: Any) -> str | None:
    """Returns the folder or pattern in `data_path` by which `find_files` would find one of `paths`; or `None`.

    The `paths` need not exist.
    """
    real_paths = [PurePosixPath(real(path)) for path in paths]
    for path_or_pattern in _paths_of(data_path):
        is_folder = inputs.is_folder(path_or_pattern)
        for path in real_paths if is_folder or _is_pattern(path_or_pattern) else ():
            if is_folder:
                matches = [real(path_or_pattern)]
            else:
                matches = [f for f in (path, *path.parents) if inputs.matches(str(f), path_or_pattern)]
            for match in matches:
                path_in_match = os.path.relpath(path, match)  # "." if the pattern matches the path itself
                if path_in_match == "." or not (path_in_match.startswith(".") or "/." in path_in_match):  # not hidden
                    return path_or_pattern
    return None


def _paths_of(data_path: Any, argument: str = "data_path") -> list[str]:
    """Returns the paths in `data_path`, see `find_named_files`. An existing file may have commas in its name.

    Raises:
        ParameterError: a path is empty or not UTF-8, or there is no file system for its scheme.
    """
    paths = data_path.split(",") if isinstance(data_path, str) else data_path
    paths = [os.fspath(path) for path in ([paths] if isinstance(paths, os.PathLike) else paths)]
    for path in paths:
        inputs.check_readable(argument, path.strip())
        if not inputs.is_utf8(path):
            allowed = "a path in UTF-8"
            raise ParameterError(argument, path, allowed, f"{argument} must be {allowed}, got {named(ascii(path))}")
    clean = _without_spaces if isinstance(data_path, str) else str  # the elements of a list are exact
    if isinstance(data_path, str) and "," in data_path and inputs.exists(data_path):
        paths = [data_path]
    joined = []  # the paths, in which the parts of a name with commas are joined again
    while paths:
        n = _length_of_name(paths, clean)
        if not n:  # the reader will raise an error for this path, and to check all others would take long
            joined += map(clean, paths)
            break
        joined.append(clean(",".join(paths[:n])))
        paths = paths[n:]
    if not all(map(str.strip, joined)):
        number = [path.strip() for path in joined].index("") + 1
        message = f"path {number} of {brief(data_path)} is empty: it must name a file or a folder"
        raise ParameterError(argument, data_path, "paths of files or folders", message)
    return joined


def _without_spaces(path: str) -> str:
    """Returns a path without white space around it, except for the exact name of an existing file."""
    return path if path == path.strip() or inputs.exists(path) else path.strip()


def _length_of_name(parts: list[str], clean: Callable[[str], str]) -> int:
    """Returns how many of the first `parts`, joined by commas, are the path of an existing file or a pattern.

    An empty part counts as a path, which the caller refuses. Returns 0 if no number of parts is a path.

    Args:
        parts: the parts of a path.
        clean: function of a path, which may remove white space around it.
    """
    name = parts[0]
    if not name.strip() or _has_wildcard(name) or inputs.exists(clean(name)):
        return 1
    for n, part in enumerate(parts[1:], 2):
        name += f",{part}"
        if len(name) > _LONGEST_PATH:
            break
        if part and inputs.exists(clean(name)):
            return n
    return 0


def _has_wildcard(path: str) -> bool:
    return any(c in path for c in "*?[")


def _is_pattern(path: str) -> bool:
    """Whether a path has wildcards and is not the name of an existing file."""
    return _has_wildcard(path) and not inputs.exists(path)


def _files_in(folder: str) -> list[str]:
    """Returns the files in a folder and in all folders below it, sorted, without hidden files and hidden folders."""
    paths = []
    for parent, folders, names in inputs.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        hidden = any(part.startswith(".") for part in parent.removeprefix(folder).split("/"))
        paths += [os.path.join(parent, name) for name in names if not name.startswith(".") and not hidden]
    return sorted(paths)


def have_documents(paths: Iterable[str], raw_text: bool = True) -> bool:
    """Whether one of the files, or a file in one of the zip archives, consists of documents.

    JSON lines and Parquet, which the name of a file shows, do. Without `raw_text`, a file whose content is JSON lines
    or a JSON array does, too.
    """
    for path in paths:
        if any(_is_json_lines(name, raw_text) or is_parquet(name) for name in _names_in(path)):
            return True
        if not raw_text and any(kind in _KINDS_OF_DOCUMENTS for kind in _kinds_in(path)):
            return True
    return False


def _is_json_lines(name: str, raw_text: bool) -> bool:
    """Whether the name of a file shows that it has JSON lines. With `raw_text`, the ending must be in lower case."""
    name = name if raw_text else name.lower()
    return name.removesuffix(".gz").endswith(JSON_LINES)


def _names_in(path: str) -> list[str]:
    """Returns the names of the files in a zip archive; for another file, its path."""
    if not inputs.has_ending(path, ".zip") or not inputs.exists(path):
        return [path]
    with _open_zip(path) as archive:
        return [member.filename for member in inputs.files_in_zip(archive)]


def is_json_array(path: str) -> bool:
    """Whether a file is a JSON array of texts or objects, which can only be read as a whole."""
    return any(kind is _Kind.JSON_ARRAY for kind in _kinds_in(path))


def _kinds_in(path: str) -> Iterator[_Kind]:
    """Yields the kind of a text file, or of each file in an archive. Ends at the first file that cannot be read."""
    with contextlib.suppress(ValueError, OSError, tf.errors.OpError):
        for stream in _streams_of(FilePart(path), None, numbered=False):
            yield _kind_and_stream(stream)[0]


# ------------------------------------------------------------------------------------------------- what is in them


def read_texts(
    parts: Iterable[FilePart],
    level: str,
    text_field: str | None = None,
    progress: Progress | None = None,
    numbered: bool = True,
    raw_text: bool = True,
    skipped: Callable[[str], None] | None = None,
    advice: str = "",
) -> Iterator[Text]:
    r"""Yields texts: each JSON line, element of a JSON array, row of Parquet, and each other file, also in archives.

    Args:
        parts: local or remote files, or parts of them; files that end in .gz or .zip are unpacked while they are read.
        level: level of the vocabulary. It decides where pieces are cut, see `read_files`.
        text_field: the field of JSON objects, or the column of Parquet, that has the text. If it is given, all files
            except Parquet are read as JSON. By default, the name or the content of a file decides whether it is JSON,
            and the field is `text`.
        progress: called after each piece with the number of its bytes in the file, which may be packed.
        numbered: whether to count the lines before a part of a file, for the line numbers of errors.
        raw_text: whether files are read unchanged: `\r` and byte order marks are text, and only the name of a file
            shows that it has JSON lines. Otherwise, except at level "byte", texts are changed by `plain_text`; and the
            content of a file may show that it is JSON.
        skipped: called with the reason for each row without a text, which is left out. `None`: such a row is an error.
        advice: what to do with a text that is not UTF-8, for the error.

    Raises:
        ParameterError: a text is empty or is not UTF-8, a line is not JSON or has no such field, a JSON array or an
            archive is damaged. Names file and line.
        FileNotFoundError: a file does not exist.
    """
    field = text_field or TEXT_FIELD
    options = {"raw_text": raw_text, "skipped": skipped}
    for part in parts:
        if is_parquet(part.path):
            rows = parquet_rows(part.path, field, part.begin, part.end, progress)
            yield from texts_of_rows(rows, level, field, **options)
            continue
        for stream in _streams_of(part, progress, numbered, raw_text):
            kind, stream = (_Kind.TEXT, stream) if raw_text else _kind_and_stream(stream)
            if kind is _Kind.JSON_ARRAY:
                yield from texts_of_rows(_json_array(stream), level, field, **options)
            elif (
                kind is _Kind.JSON_LINES
                or _is_json_lines(stream.name, raw_text)
                # The lines of a damaged array are no rows: `skipped` would leave out all of them.
                or (text_field is not None and kind is not _Kind.OTHER_LIST)
            ):
                yield from texts_of_rows(_json_lines(stream, raw_text, skipped), level, field, **options)
            elif text_field is not None or (
                kind in _KINDS_OF_OTHER_JSON and inputs.has_ending(stream.name, ".json", ".json.gz")
            ):
                allowed = "a JSON object in every line, or one array of objects or texts"
                message = (
                    f"{stream.name} must have a JSON object in every line, or be one array of objects or texts: "
                    "`jq -c .` writes one object per line"
                )
                if text_field is None:
                    message += "; raw_text reads the file as plain text"
                raise ParameterError(stream.name, None, allowed, message)
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
    """Yields the texts of rows.

    Args:
        rows: `(name, row)`, where the row is a value for `text_of_row`.
        level, raw_text, skipped: as in `read_texts`.
        field: as in `text_of_row`.

    Raises:
        ParameterError: a row has no text, and `skipped` is `None`.
    """
    for name, row in rows:
        try:
            text = text_of_row(row, field, name)
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
    """Yields the name and the value of each JSON line, without empty lines and a byte order mark at the beginning.

    A line that is not JSON goes to `skipped`; without it, this raises ParameterError.
    """
    pieces = decoded_blocks(stream.blocks, stream.name, stream.first_byte)
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
                raise ParameterError(where, line, "JSON", f"{where} is not JSON: {error}") from error
            yield where, value


def _json_array(stream: _Stream) -> Iterator[tuple[str, Any]]:
    """Yields the name and the value of each element of a JSON array. The whole array is in memory.

    Raises:
        ParameterError: the file is not JSON.
    """
    text = "".join(decoded_blocks(stream.blocks, stream.name)).removeprefix("\ufeff")
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ParameterError(stream.name, None, "JSON", f"{stream.name} is not JSON: {error}") from error
    for number, value in enumerate(values, 1):
        yield f"{stream.name}, text {number}", value


def text_of_row(value: Any, field: str, where: str) -> str:
    """Returns the text of a row: a string, UTF-8 bytes, or a mapping that has one of these at `field`.

    Raises:
        ParameterError: there is no text, it is empty, or it is not UTF-8. The message begins with `where`.
    """
    name = where
    if isinstance(value, Mapping):
        if field not in value:
            names = [brief(name) for name in itertools.islice(value, _MOST_NAMES)]
            if len(value) > _MOST_NAMES:
                names.append("...")
            fields = shortened(", ".join(names), 200) or "none"
            message = (
                f"{where} has no field {brief(field)}; it has {fields}. text_field names the field of "
                "the text, raw_text reads JSON in files of other names than .jsonl as plain text"
            )
            raise ParameterError("text_field", field, list(value), message)
        value = value[field]
        name = f"{where}, field {field!r}"
        where = f"{name},"
    try:
        text = value.decode() if isinstance(value, bytes) else value
        if not isinstance(text, str):
            message = f"{where} must be a string, got {brief(value)}; skip_bad_lines leaves it out"
            raise ParameterError(name, value, "a string", message)
        text.encode()  # raises for half of a surrogate pair
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        message = f"{where} is not UTF-8 text: {error.reason} at {error.start}"
        raise ParameterError(name, value, "UTF-8 text", message) from error
    if not text:
        message = f"{where} is empty: leave the document out, as skip_bad_lines does"
        raise ParameterError(name, value, "a text that is not empty", message)
    return text


# ------------------------------------------------------------------------------------- what a file is, by its beginning


class _Kind(enum.Enum):
    """What a text file contains."""

    TEXT = "plain text"
    JSON_LINES = "an object in every line"
    JSON_ARRAY = "one array of objects or strings"
    OTHER_LIST = "begins as a list, but is neither"
    OTHER_JSON = "begins as JSON, but is none of these"


_KINDS_OF_DOCUMENTS = (_Kind.JSON_LINES, _Kind.JSON_ARRAY)
_KINDS_OF_OTHER_JSON = (_Kind.OTHER_LIST, _Kind.OTHER_JSON)


def _kind_and_stream(stream: _Stream) -> tuple[_Kind, _Stream]:
    """Returns the kind of a text file, by its beginning, and a stream of all blocks, also of those read to decide."""
    if stream.first_byte:  # a later part of a file has the kind of its beginning
        return next(_kinds_in(stream.name), _Kind.TEXT), stream
    start: list[bytes] = []
    kind = None
    for block in stream.blocks:
        start.append(block)
        kind = _kind_of(b"".join(start), whole=False)
        if kind or sum(map(len, start)) > _MOST_TO_LOOK_AT:
            break
    kind = kind or _kind_of(b"".join(start), whole=True) or _Kind.TEXT
    return kind, stream._replace(blocks=itertools.chain(start, stream.blocks))


def _kind_of(data: bytes, whole: bool) -> _Kind | None:
    """Returns the kind of a text file that begins with `data`; `None` if more data is needed to decide.

    A file is JSON lines if its first line, and most of its first 20 lines that are not empty, are objects. A file that
    begins with "{" and is not JSON lines is `OTHER_JSON`. A file that begins with "[" and is not a JSON array is
    `OTHER_LIST`, unless most of the lines after the first are objects. Then it is `OTHER_JSON`: JSON lines whose first
    line is not an object. `whole` is true if `data` is the whole file.
    """
    data = data.removeprefix(codecs.BOM_UTF8).lstrip()
    if not data.startswith((b"{", b"[")):
        return _Kind.TEXT if data or whole else None
    is_list = data.startswith(b"[")
    if is_list:
        kind = _kind_of_list(data.decode("utf-8", "ignore"), whole)
        if kind is not _Kind.OTHER_LIST:
            return kind
    lines = data.splitlines(keepends=True)
    lines = lines if whole or lines[-1].endswith((b"\n", b"\r")) else lines[:-1]
    if not lines or (is_list and not whole and len(lines) < _LOOK_AT):
        return None
    are_objects = [isinstance(_json_or_none(line), dict) for line in lines[: 2 * _LOOK_AT] if line.strip()][:_LOOK_AT]
    if is_list:
        return _Kind.OTHER_JSON if 2 * sum(are_objects) > len(are_objects) - 1 else _Kind.OTHER_LIST
    return _Kind.JSON_LINES if are_objects[0] and 2 * sum(are_objects) > len(are_objects) else _Kind.OTHER_JSON


def _kind_of_list(text: str, whole: bool) -> _Kind | None:
    """Returns the kind of a text that begins with "[": `JSON_ARRAY` if its first 20 elements are objects or strings.

    Otherwise, it is `OTHER_LIST`, also if the list is empty. Returns `None` if more of the text is needed to decide.
    `whole` is true if `text` is the whole text.
    """
    position = 1
    decoder = json.JSONDecoder()
    for _ in range(_LOOK_AT):
        position = _after_space(text, position)
        if text[position : position + 1] not in ("{", '"', ""):
            return _Kind.OTHER_LIST
        try:
            _, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            return _Kind.OTHER_LIST if whole or len(text) > position + _MOST_TO_LOOK_AT else None
        position = _after_space(text, position)
        if text[position : position + 1] != ",":
            if text[position : position + 1] == "]" and not text[position + 1 :].strip():
                return _Kind.JSON_ARRAY
            return _Kind.OTHER_LIST if text[position:] or whole else None
        position += 1
    return _Kind.JSON_ARRAY


def _after_space(text: str, position: int) -> int:
    """Returns the index of the first character at or after `position` that is not white space."""
    match = _SPACE.match(text, position)
    return match.end() if match else position


def _json_or_none(line: bytes) -> Any:
    """Returns the value of a line of JSON; `None` if it is not JSON."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


# -------------------------------------------------------------------------------------------------------- archives


class _Stream(NamedTuple):
    """The bytes of a text file, of a part of it, or of a file in an archive."""

    name: str  # path of the file; for a file in an archive, with its name in it
    blocks: Iterator[bytes]  # cut between lines
    first_byte: int = 0  # position of the first block in the file
    first_line: int = 1  # number of the first line, from 1; always 1 if lines are not numbered
    is_last: bool = True  # whether the blocks reach the end of the file


def _streams_of(part: FilePart, progress: Progress | None, numbered: bool, raw_text: bool = True) -> Iterator[_Stream]:
    """Yields the text file or, for an archive, each text file in the part. Arguments: see `read_texts`."""
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


def _in_archive(part: FilePart, progress: Progress | None) -> Iterator[tuple[str, Iterator[bytes]]]:
    """Yields `(name, blocks of bytes)` for the files in a part of a zip archive.

    Raises ParameterError if the archive is damaged or has no file.
    """
    with _open_zip(part.path) as archive:
        members = inputs.files_in_zip(archive)
        if not members:
            raise ParameterError(part.path, None, "an archive of files", f"{part.path} has no file")
        for member in members[part.begin : part.end]:
            with archive.open(member) as file:
                yield f"{part.path}/{member.filename}", blocks_in(file, f"{part.path}/{member.filename}")
            if progress:
                progress(member.compress_size)


def sizes_in_zip(path: str) -> list[int]:
    """Returns the compressed size in bytes of each file in a zip archive, in the order of their names."""
    with _open_zip(path) as archive:
        return [member.compress_size for member in inputs.files_in_zip(archive)]


def _unpacked(path: str, progress: Progress | None) -> Iterator[bytes]:
    """Yields the unpacked bytes of a gzip file. `progress` gets numbers of packed bytes."""
    with _opened(path) as packed, gzip.GzipFile(fileobj=packed) as file:
        before = 0
        for block in blocks_in(file, path):
            yield block
            if progress:
                progress(packed.tell() - before)
                before = packed.tell()


@contextlib.contextmanager
def _opened(path: str) -> Iterator[BinaryIO]:
    """Opens a packed file for the block. If unpacking it in the block fails, this raises ParameterError."""
    if not inputs.exists(path):
        raise FileNotFoundError(f"there is no file {named(path)}")
    with naming_read_errors(path), inputs.opened(path) as file:
        try:
            yield file
        except _UNREADABLE as error:
            message = f"{path} cannot be unpacked: {error}"
            raise ParameterError(path, None, "an archive that is whole", message) from error


@contextlib.contextmanager
def _open_zip(path: str) -> Iterator[zipfile.ZipFile]:
    """Opens a zip archive for the block. Raises ParameterError if it is empty or damaged."""
    # For the first two errors, zipfile's own message is about a negative position.
    if inputs.exists(path) and not inputs.size(path):
        raise ParameterError(path, b"", "a zip archive", f"{path} is empty: it is not a zip archive")
    with _opened(path) as file:
        if file.read(len(_EMPTY_ZIP)) == _EMPTY_ZIP:
            raise ParameterError(path, None, "an archive of files", f"{path} has no file")
        file.seek(0)
        with zipfile.ZipFile(file) as archive:
            yield archive
