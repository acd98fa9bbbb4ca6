"""Files and folders that programs write to: one writer at a time, files written atomically, local and remote paths."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None


def is_remote(path: str | os.PathLike) -> bool:
    """Whether a path has a scheme, such as `gs://`, and only `tf.io.gfile` can open it."""
    return "://" in os.fspath(path)


@contextlib.contextmanager
def lock(folder: str, refusal: str) -> Iterator[None]:
    """Keeps other processes out of a local folder. The lock ends with the process, however that ends.

    Raises:
        OSError: another process holds it; `refusal` is the message.
    """
    if fcntl is None or is_remote(folder):
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise OSError(refusal) from error
        except OSError:  # a file system without locks
            pass
        yield
    finally:
        os.close(handle)


def write_atomic(path: str, text: str) -> None:
    """Writes a text file atomically: readers see the old file or the new one, and a failed write leaves the old one.

    Raises:
        OSError: it cannot be written.
    """
    temporary = f"{path}.{os.getpid()}.tmp"
    with writing(path), removed_on_error(temporary):
        with tf.io.gfile.GFile(temporary, "w") as file:
            file.write(text)
        tf.io.gfile.rename(temporary, path, overwrite=True)


def write_json(path: str, values: Any) -> None:
    """Writes a JSON file atomically."""
    write_atomic(path, json.dumps(values, indent=2) + "\n")


def read_json(path: str) -> dict:
    """A JSON object from a file, local or remote.

    Raises:
        ValueError: the file holds none.
    """
    with tf.io.gfile.GFile(path) as file:
        try:
            values = json.load(file)
        except ValueError as error:
            raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(values).__name__}")
    return values


@contextlib.contextmanager
def writing(path: str) -> Iterator[None]:
    """Turns every error of writing a file into one OSError that names the file and the reason."""
    try:
        yield
    except (OSError, tf.errors.OpError) as error:
        reason = re.sub(r"\{\{.*?\}\} | \[Op:.*", "", str(error)).splitlines()[0]  # TensorFlow adds names of its own
        raise OSError(f"{path} cannot be written: {reason}") from error


@contextlib.contextmanager
def removed_on_error(path: str) -> Iterator[None]:
    """Removes the file or folder `path` if an error occurs."""
    try:
        yield
    except BaseException:
        remove(path)
        raise


def remove(path: str) -> None:
    """Removes a file or a folder, if there is one."""
    if tf.io.gfile.isdir(path):
        tf.io.gfile.rmtree(path)
    elif tf.io.gfile.exists(path):
        tf.io.gfile.remove(path)
