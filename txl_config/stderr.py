"""The standard error stream, without the log lines that C++ libraries write to it."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Generator


@contextlib.contextmanager
def without_notes(note: re.Pattern[bytes]) -> Generator[None]:
    """Leaves the lines that match `note` out of the standard error of the block.

    All lines are collected, and the other lines are written when the block ends. If they cannot be collected, all lines
    are written at once.

    Args:
        note: pattern of the beginning of a line to leave out.
    """
    try:  # C++ writes to the file descriptor 2, so it does not help to replace `sys.stderr`
        stderr = os.dup(2)
        written = tempfile.TemporaryFile()
    except OSError:  # the standard error is closed, or the disk is full
        yield
        return
    with written:
        os.dup2(written.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            written.seek(0)
            other_lines = [line for line in written if not note.match(line)]
            with contextlib.suppress(OSError):
                os.write(2, b"".join(other_lines))
