"""Files and folders, local and remote: locks, atomic writes, checksums, and the files of processes that were killed."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from txl_tf.environment import is_pipe, is_system_pipe
from txl_tf.errors import ParameterError, brief, located, named

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None

_PACKED = (".gz", ".zip", ".bz2", ".xz", ".zst")  # endings of compressed files
logger = logging.getLogger("txl_tf")
_COPIES: dict[tuple[int, int], Any] = {}  # device and inode of a pipe -> temporary file with its content
_SECONDS_FOR_A_READER = 10  # how long `new_file` waits until a process reads from a named pipe


def is_remote(path: str | os.PathLike) -> bool:
    """Whether a path has a scheme, such as `gs://`, and only `tf.io.gfile` can open it."""
    return "://" in os.fspath(path)


def check_scheme(name: str, path: str | os.PathLike, *others: str) -> None:
    """Raises ParameterError if a path begins with a scheme, such as `https://`, for which there is no file system.

    Args:
        name: name of the argument whose value is `path`, for the error.
        path: local or remote path.
        *others: allowed schemes besides those that TensorFlow knows, such as "s3".
    """
    scheme = re.match(r"([a-zA-Z][\w.+-]*)://", os.fspath(path))
    known = {*tf.io.gfile.get_registered_schemes(), *others} - {""} if scheme else set()
    if scheme and scheme[1] not in known:
        allowed = f"a local path, or begin with {', '.join(f'{known_scheme}://' for known_scheme in sorted(known))}"
        message = f"{name} must be {allowed}: {scheme[0]} is no file system that this program knows, got {brief(path)}"
        raise ParameterError(name, os.fspath(path), allowed, message)


def has_pattern(path: str | os.PathLike) -> bool:
    r"""Whether a path has `[`, `]` or a backslash.

    TensorFlow reads the path of a checkpoint, and of the variables of a SavedModel, as a pattern. These characters do
    not match themselves in a pattern.
    """
    return bool(re.search(r"[\[\]\\]", os.fspath(path)))


def check_no_pattern(name: str, path: str | os.PathLike) -> None:
    """Raises ParameterError if `path`, the value of the argument `name`, has one of the characters of `has_pattern`.

    TensorFlow could write a checkpoint or a SavedModel to such a path, but no program could open it by this path.
    """
    if has_pattern(path):
        message = f"{name} must not contain [, ] or a backslash, which TensorFlow takes as a pattern, got {brief(path)}"
        raise ParameterError(name, os.fspath(path), "a path without [, ] and \\", message)


def absolute(path: str) -> str:
    """Returns the absolute form of a local path, and a remote path as it is."""
    return path if is_remote(path) else os.path.abspath(path)


def real(path: str) -> str:
    """Returns the absolute form of a local path, also of `file://`, without symbolic links. A remote path stays."""
    local = path.removeprefix("file://")
    return path if is_remote(local) else os.path.realpath(local)


def same_path(one: str, other: str) -> bool:
    """Whether two paths lead to the same file or folder, see `real`."""
    return real(one) == real(other)


def seekable(path: str) -> str:
    """Returns a path that can be read several times, and from any position.

    That is `path` itself, except for a pipe in /dev or /proc, such as the /dev/fd/63 of a shell's `<(command)`: the
    first call reads the pipe to its end, and copies it to a temporary file without a name, which ends with the process.
    """
    if not is_system_pipe(path):
        return path
    status = os.stat(path)
    key = (status.st_dev, status.st_ino)
    if key not in _COPIES:
        copy = tempfile.TemporaryFile()
        with open(path, "rb") as pipe:
            shutil.copyfileobj(pipe, copy)
        copy.flush()
        _COPIES[key] = copy
    return f"/dev/fd/{_COPIES[key].fileno()}"


@contextlib.contextmanager
def lock(folder: str, refusal: str) -> Iterator[None]:
    """In this block, a local folder is locked against other calls of `lock`. The end of the process ends the lock.

    Windows, some network file systems and all remote ones have no such locks. Then the block runs without a lock, after
    a warning.

    Raises:
        OSError: another process, or another block of this one, holds the lock (then `refusal` is the message); or a
            local folder does not exist or cannot be opened.
    """
    unlocked = "%s has no file locks: make sure that no other program writes to it"
    if fcntl is None or is_remote(folder):
        logger.warning(unlocked, folder)
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise OSError(refusal) from error
        except OSError:
            logger.warning(unlocked, folder)
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def new_file(path: str) -> Iterator[Any]:
    """Yields an object whose method `write` takes text or bytes for a new file at `path`.

    The file appears under its name at the end of the block, and replaces an existing one. Until then, and after an
    error, `path` is as it was before. Pipes and devices, such as /dev/stdout, are written directly.

    Raises:
        OSError: the file cannot be written, or no process opens a named pipe to read from it within 10 seconds. Errors
            that the block raises itself are not changed.
    """
    special = _is_special(path)
    temporary = path if special else _temporary_name(path)
    with contextlib.nullcontext() if special else removed_on_error(temporary):
        file = _NewFile(path, temporary)
        try:
            yield file
        except BaseException:
            with contextlib.suppress(OSError):  # the first error counts
                file.close()
            raise
        file.close()
        if not special:
            with naming_write_errors(path):
                tf.io.gfile.rename(temporary, path, overwrite=True)


class _NewFile:
    """The open file that `new_file` yields.

    Args:
        path: the name of the file in error messages.
        temporary: the path that is written to.
    """

    def __init__(self, path: str, temporary: str):
        self._path = path
        self._file = tf.io.gfile.GFile(temporary, "w")
        with _waiting_for_reader(temporary):
            # The first write opens the file. In this block, a named pipe has a reader, without which opening it would
            # block, and is held open until this write has opened it, too.
            self.write("")

    def write(self, data: str | bytes) -> None:
        with naming_write_errors(self._path):
            self._file.write(data)

    def close(self) -> None:
        with naming_write_errors(self._path):
            self._file.close()


@contextlib.contextmanager
def _waiting_for_reader(path: str) -> Iterator[None]:
    """Waits until a process reads from `path`, if it is a named pipe or a socket. Otherwise, does nothing.

    Without a reader, opening the pipe to write would block for ever. Within the block, this function keeps the pipe
    open, so that the reader does not see its end before the block has opened it, too.

    Raises:
        OSError: no process reads from the pipe within 10 seconds, or it cannot be opened.
    """
    if not is_pipe(path):
        yield
        return
    handle = None
    deadline = time.monotonic() + _SECONDS_FOR_A_READER
    while handle is None:
        try:
            handle = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            if error.errno != errno.ENXIO or time.monotonic() > deadline:  # ENXIO: there is no reader
                why = "nobody reads from it" if error.errno == errno.ENXIO else error.strerror
                raise OSError(f"{path} cannot be written: it is a named pipe or a socket, and {why}") from error
            time.sleep(0.1)
    try:
        yield
    finally:
        os.close(handle)


def _temporary_name(path: str) -> str:
    """Returns a name next to `path` that no other process uses, on this or another machine that shares the folder."""
    return f"{path}.{os.getpid()}.{os.urandom(4).hex()}.tmp"


def check_writable(path: str | None) -> None:
    """Raises OSError if `new_file(path)` could not write the file, or if `path` is a folder.

    It writes a temporary file next to `path`, and removes it. Pipes and devices are not tried. `None` and "" are
    allowed.
    """
    if not path:
        return
    if not _is_special(path):
        probe = _temporary_name(path)
        with naming_write_errors(path):
            with tf.io.gfile.GFile(probe, "w") as file:
                file.write("")
            tf.io.gfile.remove(probe)
    if tf.io.gfile.isdir(path):
        raise OSError(f"{path} cannot be written: it is a folder")


def check_not_packed(name: str, path: str | None) -> None:
    """Raises ParameterError if `path`, the value of the argument `name`, ends as a compressed file, such as `.gz`.

    The programs write plain text, but readers of a file with such a name try to unpack it.
    """
    ending = os.path.splitext(path or "")[1]
    if ending.lower() in _PACKED:
        message = f"{name} must not end in {ending}: the file is written without compression, got {brief(path)}"
        raise ParameterError(name, path, f"a path that does not end in {', '.join(_PACKED)}", message)


def _is_special(path: str) -> bool:
    """Whether a local path exists and is no ordinary file, but a pipe, a device or a folder.

    A symbolic link to one of these counts only in /dev and /proc. The file that is written replaces other links.
    """
    if is_remote(path) or not os.path.exists(path) or os.path.isfile(path):
        return False
    return not os.path.islink(path) or os.path.abspath(path).startswith(("/dev/", "/proc/"))


def has_hard_links(path: str) -> bool:
    """Whether a local file has a second name, a hard link: appending to the file changes it under both names.

    False for a remote path. Raises OSError if a local file does not exist.
    """
    return not is_remote(path) and os.lstat(path).st_nlink > 1


def write_atomic(path: str, text: str | bytes) -> None:
    """Writes a file atomically: readers see the old file or the complete new one."""
    with new_file(path) as file:
        file.write(text)


def check_not_overwritten(path: str, data: str | bytes) -> None:
    """Raises ParameterError if writing `data` to `path` would overwrite a file that has other content."""
    if not tf.io.gfile.exists(path):
        return
    with naming_read_errors(path), tf.io.gfile.GFile(path, "rb") as file:
        content = file.read()
    if content != (data.encode() if isinstance(data, str) else data):
        message = f"{path} exists with other content: choose a new folder, or move the file away"
        raise ParameterError(path, None, "a file of the same content, or no file", message)


def sha256(path: str) -> str:
    """The SHA-256 checksum of a file, local or remote, as 64 hexadecimal digits."""
    digest = hashlib.sha256()
    with naming_read_errors(path), tf.io.gfile.GFile(seekable(path), "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def write_json(path: str, values: dict) -> None:
    """Writes a JSON object atomically. Its first key is "checksum", with the checksum of the other values."""
    write_atomic(path, json_text(values))


def json_text(values: dict) -> str:
    """Returns the text that `write_json` writes.

    The checksum comes first: if you remove its line, the text is still JSON. If it came last, the line before it would
    be left with a comma.
    """
    return json.dumps({"checksum": _checksum(values), **values}, indent=2) + "\n"


def read_json(path: str, check: Callable[[dict], None]) -> dict:
    """Reads a JSON object from a file, local or remote, and returns it without its checksum.

    The checksum is compared with the other values. A file without a checksum is accepted.

    Args:
        path: path of the file.
        check: function of the object that raises ParameterError if a key or a value is wrong, such as
            `txl_tf.schema.check_values`.

    Raises:
        ParameterError: the file is not a JSON object, `check` has raised a ValueError, or the checksum does not match.
            The message names the file.
        OSError: the file cannot be read.
    """
    with naming_read_errors(path), tf.io.gfile.GFile(path, "rb") as file:
        data = file.read()
    try:
        values = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ParameterError(path, None, "a file of JSON", f"{named(path)} is not JSON: {error}") from error
    if not isinstance(values, dict):
        message = f"{path} must hold a JSON object, got {type(values).__name__}"
        raise ParameterError(path, values, "a JSON object", message)
    checksum = values.pop("checksum", None)
    try:
        check(values)
    except ValueError as error:
        raise located(error, path) from error
    if checksum not in (None, _checksum(values)):
        message = (
            f"{path} was changed or damaged: its checksum differs. If you changed it on purpose, remove the line "
            '"checksum"; if not, it is damaged'
        )
        raise ParameterError("checksum", checksum, "the checksum of the other values", message)
    return values


def _checksum(values: dict) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


@contextlib.contextmanager
def naming_write_errors(path: str, cannot_be: str = "written") -> Iterator[None]:
    """In this block, an OSError or an error of TensorFlow becomes an OSError that names the file and the reason.

    Its message is "`path` cannot be `cannot_be`: ...".
    """
    try:
        yield
    except (OSError, tf.errors.OpError) as error:
        raise OSError(f"{named(path)} cannot be {cannot_be}: {named(reason(error))}") from error


@contextlib.contextmanager
def naming_read_errors(path: str) -> Iterator[None]:
    """For a block that reads a file: errors become an OSError that names the file, as in `naming_write_errors`.

    Raises:
        OSError: `path` is a named pipe or a socket, from which a program might wait for data for ever; or the block
            raises an OSError or an error of TensorFlow. Pipes in /dev and /proc, such as /dev/stdin, can be read.
    """
    with naming_write_errors(path, "read"):
        if is_pipe(path):
            raise OSError("it is a named pipe or a socket, not a file")
        yield


def reason(error: Exception) -> str:
    """Returns the first line of an error's message, without the names of operations that TensorFlow adds.

    For an error without another message, returns the name of its class.
    """
    lines = re.sub(r"\{\{.*?\}\} | \[Op:.*", "", str(error)).strip().splitlines()
    return lines[0] if lines else type(error).__name__


@contextlib.contextmanager
def removed_on_error(path: str) -> Iterator[None]:
    """Removes the file or folder `path` if the block raises an error, unless `path` existed before the block."""
    existed = tf.io.gfile.exists(path) if is_remote(path) else os.path.lexists(path)
    try:
        yield
    except BaseException:
        if not existed:
            remove(path)
        raise


@contextlib.contextmanager
def empty_removed_on_error(folder: str) -> Iterator[None]:
    """Removes a local folder if the block raises an error and the folder is new and still empty."""
    existed = is_remote(folder) or os.path.lexists(folder)
    try:
        yield
    except BaseException:
        if not existed:
            with contextlib.suppress(OSError):  # raised if the folder is not empty
                os.rmdir(folder)
        raise


def remove(path: str) -> None:
    """Removes a file, or a folder with its content, if it exists. Removes a symbolic link, but not the link's target.

    All code that deletes folders must call this function, because `tf.io.gfile.rmtree` follows links out of the folder.
    """
    path = os.fspath(path).rstrip("/") or path  # a path that ends with "/" would be taken for the link's target
    if is_remote(path):
        if tf.io.gfile.isdir(path):
            tf.io.gfile.rmtree(path)
        elif tf.io.gfile.exists(path):
            tf.io.gfile.remove(path)
    elif os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.remove(path)


def check_no_link(folder: str, *names: str) -> None:
    """Raises OSError if a path below a local folder, or a folder on the way to it, is a symbolic link.

    A program that writes to such a folder, or appends to such a file, would change files outside of `folder`.

    A remote folder has no links, and is not checked.

    Args:
        folder: the folder. It may be a link itself.
        names: paths relative to `folder`, such as `"best"`.
    """
    if is_remote(folder):
        return
    for name in names:
        path = folder
        for part in os.path.normpath(name).split("/"):
            path = os.path.join(path, part)
            if os.path.islink(path):
                raise OSError(
                    f"{path} cannot be written: it is a symbolic link to {brief(os.readlink(path))}, and {folder} must "
                    "contain its own files. Remove the link, or replace it with a copy of its target"
                )


# ------------------------------------------------------------------------------------------------- dead processes

# `new_file` writes to `<name>.<process>.<8 hexadecimal digits>.tmp` first, `export_saved_model` to
# `<name>.<process>.tmp`.
_TEMPORARY = re.compile(r"(?P<name>.+?)\.(?P<process>\d{1,9})(\.[0-9a-f]{8})?\.tmp", re.DOTALL)


def remove_leftovers(folder: str, name: str | None = None) -> list[str]:
    """Removes the temporary files and folders that killed processes left in a local folder. Returns the removed names.

    The caller must hold the lock of the folder, or be the only one to write `name`.

    Args:
        folder: the folder. If it cannot be listed, nothing is removed.
        name: only temporary files and folders for the file or folder `name` are removed; `None`: for any.
    """
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return []
    removed = []
    for entry in names:
        match = _TEMPORARY.fullmatch(entry)
        if not match or (name is not None and match["name"] != name) or is_alive(int(match["process"])):
            continue
        with contextlib.suppress(OSError):
            remove(os.path.join(folder, entry))
            removed.append(entry)
    if removed:
        logger.info("%s: removed %s, which a dead process left", folder, ", ".join(removed))
    return removed


def is_alive(process: int) -> bool:
    """Whether a process with this id exists on this machine. True also if the operating system cannot tell."""
    if os.name != "posix":
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True
