"""The standard error without what libraries in C++ note there for themselves."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator


@contextlib.contextmanager
def without_notes(note: re.Pattern[bytes]) -> Iterator[None]:
    """Holds back what the process writes to the standard error until the end, and leaves out lines like `note`."""
    try:
        stderr, written = os.dup(2), tempfile.TemporaryFile()
    except OSError:  # it is closed, or there is no room: the notes are no matter
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
            others = [line for line in written if not note.match(line)]
            with contextlib.suppress(OSError):
                os.write(2, b"".join(others))
