"""Folders that programs write to: one writer at a time, and files that appear whole."""

import contextlib
import os
import re

import tensorflow as tf

from txl_tf.token_files import is_remote

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None


@contextlib.contextmanager
def lock(folder, refusal):
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


def write_whole(path, text):
    """Writes a file that appears in one go, whole.

    Raises:
        OSError: it cannot be written; what was there stays.
    """
    temporary = f"{path}.{os.getpid()}.tmp"
    with writing(path), removed_on_error(temporary):
        with tf.io.gfile.GFile(temporary, "w") as file:
            file.write(text)
        tf.io.gfile.rename(temporary, path, overwrite=True)


@contextlib.contextmanager
def writing(path):
    """Makes one OSError, which names the file and the reason, of all that goes wrong in writing it."""
    try:
        yield
    except (OSError, tf.errors.OpError) as error:
        reason = re.sub(r"\{\{.*?\}\} | \[Op:.*", "", str(error)).splitlines()[0]  # TensorFlow adds names of its own
        raise OSError(f"{path} cannot be written: {reason}") from error


@contextlib.contextmanager
def removed_on_error(path):
    """Leaves nothing of the file or folder `path` if an error occurs."""
    try:
        yield
    except BaseException:
        remove(path)
        raise


def remove(path):
    """Removes a file or a folder, if there is one."""
    if tf.io.gfile.isdir(path):
        tf.io.gfile.rmtree(path)
    elif tf.io.gfile.exists(path):
        tf.io.gfile.remove(path)
