"""The standard error stream, without the log lines that C++ libraries write to it."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Generator


@contextlib.contextmanager
def without_notes(note: re.Pattern[bytes]) -> Generator[None]:
    """Collects what the block writes to the standard error. At its end, writes the lines that `note` does not match."""
    try:
        stderr = os.dup(2)
        written = tempfile.TemporaryFile()
    except OSError:  # the standard error is closed, or the disk is full: then the lines are not left out
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
