"""Input files, local and remote: every file system of `tf.io.gfile`, such as gs://, and s3:// by pyarrow.

Programs read texts with these functions. They write with `txl_tf.files`.
"""

from __future__ import annotations

import contextlib
import fnmatch
import logging
import os
import re
import zipfile
from collections.abc import Iterator
from typing import Any, BinaryIO

import tensorflow as tf

from txl_tf.errors import ParameterError, named
from txl_tf.files import check_scheme, is_remote, real, seekable

logger = logging.getLogger("txl_tf")
_PYARROW = "s3://"  # TensorFlow has no such file system without tensorflow-io


def has_ending(path: str | os.PathLike, *endings: str) -> bool:
    """Whether the name of a file ends in one of `endings`, such as `.gz`, in lower or upper case."""
    return os.fspath(path).lower().endswith(endings)


def check_readable(name: str, path: str | os.PathLike) -> None:
    """Raises ParameterError if there is no file system for `path`, the value of the argument `name`."""
    check_scheme(name, path, _PYARROW.removesuffix("://"))


def check_options(config: Any, *names: str) -> None:
    """Raises ParameterError if an option names a file, or one of several files, for which there is no file system.

    Args:
        config: the group of options.
        *names: the options whose values are `None`, or paths in a list or separated by commas.
    """
    for name in names:
        paths = getattr(config, name) or ()
        for path in paths.split(",") if isinstance(paths, str) else paths:
            check_readable(name, path)


def exists(path: str) -> bool:
    """Whether there is a file or a folder. Raises ParameterError if there is no file system for the path."""
    check_readable("path", path)
    return _info(path).type.name != "NotFound" if _read_by_pyarrow(path) else tf.io.gfile.exists(path)


def is_folder(path: str) -> bool:
    return _info(path).type.name == "Directory" if _read_by_pyarrow(path) else tf.io.gfile.isdir(path)


def size(path: str) -> int:
    """Returns the size of an existing file in bytes."""
    return _info(path).size if _read_by_pyarrow(path) else tf.io.gfile.stat(seekable(path)).length


def stamp(path: str) -> tuple[int, int]:
    """Returns size in bytes and time of the last change in nanoseconds, which show later whether a file has changed."""
    if _read_by_pyarrow(path):
        info = _info(path)
        return info.size, info.mtime_ns
    status = tf.io.gfile.stat(seekable(path))
    return status.length, status.mtime_nsec


def opened(path: str) -> BinaryIO:
    """Opens a file to read bytes from: `read(n)`, `seek(position)`, `tell()`, `close()`."""
    return opened_by_pyarrow(path) if _read_by_pyarrow(path) else tf.io.gfile.GFile(seekable(path), "rb")


def opened_by_pyarrow(path: str) -> Any:
    """Opens a local file, or a file at an address that pyarrow knows, as a `pyarrow.NativeFile`."""
    file_system, inner_path = _file_system(path if is_remote(path) else os.path.abspath(path))
    return file_system.open_input_file(inner_path)


def files_in_zip(archive: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    """Returns the files of an archive in the order of their names, without hidden files and those that macOS adds."""
    files = [member for member in archive.infolist() if not member.is_dir()]
    shown = [file for file in files if not any(p.startswith((".", "__MACOSX")) for p in file.filename.split("/"))]
    return sorted(shown, key=lambda file: file.filename)


def walk(folder: str) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yields `(folder, names of the folders in it, names of the files in it)` for a folder and all folders below it.

    This is like `os.walk`, but follows symbolic links, and leaves out links that lead in circles, with a warning. A
    folder that the caller removes from the list of folders is not visited.
    """
    if not _read_by_pyarrow(folder):
        yield from _walk_by_tensorflow(folder)
        return
    infos = _entries(folder)
    folders = [name for name, info in infos.items() if info.type.name == "Directory"]
    yield folder, folders, [name for name in infos if name not in folders]
    for name in folders:
        yield from walk(os.path.join(folder, name))


def _walk_by_tensorflow(folder: str) -> Iterator[tuple[str, list[str], list[str]]]:
    """`walk` without pyarrow. Links that lead back to a folder around them are left out."""
    for parent, folders, names in tf.io.gfile.walk(folder):
        if not is_remote(folder):
            for entries in (folders, names):
                entries[:] = [name for name in entries if not _is_loop(folder, os.path.join(parent, name))]
        yield parent, folders, names


def _is_loop(folder: str, path: str) -> bool:
    """Whether a path below `folder` is a symbolic link that leads in circles, or to a folder that contains it.

    Logs a warning if it is.
    """
    if not os.path.islink(path):
        return False
    target = os.path.realpath(path)
    parent = os.path.dirname(path)
    folder = os.path.normpath(folder)
    is_loop = os.path.islink(target)  # `realpath` returns a link if the links form a loop
    while not is_loop:  # compares the target with each folder from `parent` up to `folder`
        is_loop = f"{os.path.realpath(parent)}/".startswith(f"{target.rstrip('/')}/")
        if os.path.normpath(parent) == folder or not parent:
            break
        parent = os.path.dirname(parent)
    if is_loop:
        logger.warning("%s is a loop of symbolic links, so it is skipped", path)
    return is_loop


@contextlib.contextmanager
def naming_bad_names(name: str, path: str, folder: str) -> Iterator[None]:
    """In this block, the error for a file whose name is not UTF-8 becomes a ParameterError that names the file.

    Args:
        name: the argument whose value is `path`.
        path: the folder or pattern whose files the block looks for.
        folder: the folder that contains all these files; "" for the current one.
    """
    try:
        yield
    except UnicodeDecodeError as error:
        paths = [
            os.path.join(parent, entry)
            for parent, folders, names in os.walk(folder or ".")
            for entry in [*folders, *names]
            if not is_utf8(entry)
        ]
        found = os.fsencode(paths[0] if paths else folder).decode("utf-8", "backslashreplace")
        message = f"{named(folder or '.')} has a file or folder whose name is not UTF-8: rename {named(found)}"
        raise ParameterError(name, path, "files whose names are UTF-8", message) from error


def is_utf8(path: str) -> bool:
    """Whether a path can be encoded in UTF-8. Python decodes other names of files to lone surrogates."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def matching(pattern: str) -> list[str]:
    """Returns the files and folders that match a pattern such as `shards/*.txt`, sorted; none if there is no folder.

    As in a shell, `**` between slashes stands for any number of folders, also for none, and only a part of the pattern
    that begins with a dot matches a hidden name, which begins with a dot.

    Raises:
        ParameterError: a pattern of s3:// has a wildcard in the name of a folder.
        UnicodeDecodeError: the name of a local file is not UTF-8; see `naming_bad_names`.
    """
    parts = _parts(pattern)
    folder = folder_of(pattern)
    if _read_by_pyarrow(pattern):
        folder, _, names = pattern.rpartition("/")
        if any(c in folder for c in "*?["):
            message = f"a pattern of s3:// must be of names in one folder, got {named(pattern)}"
            raise ParameterError("pattern", pattern, "a pattern of names in one folder", message)
        return [os.path.join(folder, name) for name in sorted(_entries(folder)) if _match([name], [names])]
    if "**" in parts[:-1]:
        depth = len(_parts(folder))
        with_hidden = any(part.startswith(".") for part in parts[depth:])
        return sorted(path for path in _paths_below(folder, with_hidden) if _match(_parts(path)[depth:], parts[depth:]))
    paths = sorted(tf.io.gfile.glob(pattern))
    return [path for path in paths if not any(map(_is_hidden, reversed(_parts(path)), reversed(parts)))]


def matches(path: str, pattern: str) -> bool:
    """Whether a pattern matches a path, as in `matching`. The path need not exist; it is the result of `real`."""
    folder = folder_of(pattern)
    names = _parts(os.path.relpath(path, real(folder)))
    return names[:1] != [".."] and _match(names, _parts(pattern)[len(_parts(folder)) :])


def folder_of(pattern: str) -> str:
    """Returns the folder in which a pattern begins to have wildcards; "" for the current one."""
    return os.path.dirname(re.split(r"[*?[]", pattern)[0])


def _parts(path: str) -> list[str]:
    """Returns the names of the folders in a path or a pattern, and its last name."""
    return [part for part in path.split("/") if part not in ("", ".")]


def _paths_below(folder: str, with_hidden: bool) -> Iterator[str]:
    """Yields the paths of all files and folders below a folder ("": the current one), perhaps without hidden ones."""
    for parent, folders, names in walk(folder or "."):
        if not with_hidden:
            folders[:] = [name for name in folders if not name.startswith(".")]
        for name in [*folders, *names]:
            yield os.path.join(parent, name.rstrip("/")).removeprefix("" if folder else "./")


def _match(names: list[str], parts: list[str]) -> bool:
    """Whether the parts of a pattern match the names in a path."""
    if not names or not parts:
        return not names and not parts
    if parts[0] == "**" and len(parts) > 1:
        return _match(names, parts[1:]) or (not _is_hidden(names[0], "") and _match(names[1:], parts))
    if _is_hidden(names[0], parts[0]):
        return False
    # `fnmatch` has other signs than TensorFlow: [!a] instead of [^a], and [*] instead of \*.
    part = re.sub(r"\\(.)", lambda match: f"[{match[1]}]" if match[1] in "*?[" else match[1], parts[0])
    return fnmatch.fnmatchcase(names[0], part.replace("[^", "[!")) and _match(names[1:], parts[1:])


def _is_hidden(name: str, part: str) -> bool:
    """Whether a name begins with a dot, and the part of the pattern that stands for this name does not."""
    return name.startswith(".") and not part.startswith(".")


def _entries(folder: str) -> dict[str, Any]:
    """Returns `{name: pyarrow.fs.FileInfo}` for the files and folders in a folder; empty if there is no such folder."""
    from pyarrow.fs import FileSelector

    file_system, inner_path = _file_system(folder)
    selector = FileSelector(inner_path, allow_not_found=True)
    return {info.base_name: info for info in file_system.get_file_info(selector)}


def _info(path: str) -> Any:
    """Returns the `pyarrow.fs.FileInfo` of a path."""
    file_system, inner_path = _file_system(path)
    return file_system.get_file_info(inner_path)


def _read_by_pyarrow(path: str) -> bool:
    return os.fspath(path).startswith(_PYARROW)


def _file_system(path: str) -> tuple[Any, str]:
    """Returns `(pyarrow.fs.FileSystem, path in it)`. Pyarrow reads keys and region from the environment."""
    return pyarrow(f"{_PYARROW} paths").fs.FileSystem.from_uri(path)


def pyarrow(users: str) -> Any:
    """Returns the package pyarrow.

    Args:
        users: what needs the package, in the plural, for the error.

    Raises:
        ParameterError: the package is not installed.
    """
    try:
        import pyarrow
        import pyarrow.fs
    except ImportError as error:
        message = f"{users} need the package pyarrow, which is not installed: pip install pyarrow"
        raise ParameterError("data_path", users, "files that need no pyarrow", message) from error
    return pyarrow
