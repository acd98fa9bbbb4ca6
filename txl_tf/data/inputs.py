"""Files to read, wherever they are: all that `tf.io.gfile` knows, such as gs://, and s3:// by pyarrow.

Programs read texts from here. What they write goes by `txl_tf.files`.
"""

from __future__ import annotations

import fnmatch
import logging
import os
from collections.abc import Iterator
from typing import Any, BinaryIO

import tensorflow as tf

from txl_tf.errors import ParameterError, named
from txl_tf.files import is_remote

logger = logging.getLogger("txl_tf")
_PYARROW = "s3://"  # TensorFlow has no such file system without tensorflow-io


def has_ending(path: str | os.PathLike, *endings: str) -> bool:
    """Whether the name of a file ends in one of `endings`, such as `.gz`, in lower or upper case."""
    return os.fspath(path).lower().endswith(endings)


def exists(path: str) -> bool:
    return _info(path).type.name != "NotFound" if _is_pyarrows(path) else tf.io.gfile.exists(path)


def is_folder(path: str) -> bool:
    return _info(path).type.name == "Directory" if _is_pyarrows(path) else tf.io.gfile.isdir(path)


def size(path: str) -> int:
    """Bytes of a file that exists."""
    return _info(path).size if _is_pyarrows(path) else tf.io.gfile.stat(path).length


def stamp(path: str) -> tuple[int, int]:
    """Bytes of a file that exists, and when it was written, in nanoseconds: another file has others."""
    if _is_pyarrows(path):
        found = _info(path)
        return found.size, found.mtime_ns
    found = tf.io.gfile.stat(path)
    return found.length, found.mtime_nsec


def opened(path: str) -> BinaryIO:
    """A file to read bytes from: `read(n)`, `seek(place)`, `tell()`, `close()`."""
    return opened_by_pyarrow(path) if _is_pyarrows(path) else tf.io.gfile.GFile(path, "rb")


def opened_by_pyarrow(path: str) -> Any:
    """A `pyarrow.NativeFile`, of a local file or of any file system that pyarrow knows."""
    file_system, place = _file_system(path if is_remote(path) else os.path.abspath(path))
    return file_system.open_input_file(place)


def walk(folder: str) -> Iterator[tuple[str, list[str], list[str]]]:
    """`(folder, folders in it, files in it)` of a folder and those in it; what is removed from a list is left out."""
    if not _is_pyarrows(folder):
        for parent, folders, names in tf.io.gfile.walk(folder):
            if not is_remote(folder):
                for some in (folders, names):
                    some[:] = [name for name in some if not _is_loop(folder, os.path.join(parent, name))]
            yield parent, folders, names
        return
    found = _entries(folder)
    folders = [name for name, info in found.items() if info.type.name == "Directory"]
    yield folder, folders, [name for name in found if name not in folders]
    for name in folders:
        yield from walk(os.path.join(folder, name))


def _is_loop(folder: str, path: str) -> bool:
    """Whether a path below `folder` is a symbolic link that leads to itself, or back to a folder that it lies in."""
    if not os.path.islink(path):
        return False
    target = os.path.realpath(path)
    parent = os.path.dirname(path)
    folder = os.path.normpath(folder)
    found = os.path.islink(target)  # what no link leads out of
    while not found:
        found = f"{os.path.realpath(parent)}/".startswith(f"{target.rstrip('/')}/")
        if os.path.normpath(parent) == folder or not parent:
            break
        parent = os.path.dirname(parent)
    if found:
        logger.warning("%s is a loop of symbolic links: it is left out", path)
    return found


def matching(pattern: str) -> list[str]:
    """The files and folders that a pattern such as `shards/*.txt` stands for, by name."""
    if not _is_pyarrows(pattern):
        return sorted(tf.io.gfile.glob(pattern))
    folder, _, names = pattern.rpartition("/")
    if any(c in folder for c in "*?["):
        message = f"a pattern of s3:// must be of names in one folder, got {named(pattern)}"
        raise ParameterError("pattern", pattern, "a pattern of names in one folder", message)
    return [os.path.join(folder, name) for name in sorted(fnmatch.filter(_entries(folder), names))]


def _entries(folder: str) -> dict[str, Any]:
    """`{name: pyarrow.fs.FileInfo}` of what is in a folder."""
    from pyarrow.fs import FileSelector

    file_system, place = _file_system(folder)
    return {info.base_name: info for info in file_system.get_file_info(FileSelector(place))}


def _info(path: str) -> Any:
    file_system, place = _file_system(path)
    return file_system.get_file_info(place)


def _is_pyarrows(path: str) -> bool:
    return os.fspath(path).startswith(_PYARROW)


def _file_system(path: str) -> tuple[Any, str]:
    """`(pyarrow.fs.FileSystem, path in it)`. Keys and region are those of the environment, as pyarrow reads them."""
    return pyarrow(f"{_PYARROW} paths").fs.FileSystem.from_uri(path)


def pyarrow(user: str) -> Any:
    """The package, for what `user` names. Raises ParameterError if it is not installed."""
    try:
        import pyarrow
        import pyarrow.fs
    except ImportError as error:
        message = f"{user} need the package pyarrow, which is not installed: pip install pyarrow"
        raise ParameterError("data_path", user, "files that need no pyarrow", message) from error
    return pyarrow
