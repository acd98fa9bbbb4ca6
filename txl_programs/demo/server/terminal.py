"""Standard output and error of a server: what a visitor sends does nothing on a terminal but be printed."""

import contextlib
import io
import sys
from collections.abc import Iterator
from typing import TextIO

from txl_config.errors import shortened, visible


class Plain(io.TextIOBase):
    r"""A stream that writes control characters like `\x1b`, and of every line 500 characters at most."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write("\n".join(map(shortened, visible(text).split("\n"))))
        return len(text)

    def flush(self) -> None:
        self._stream.flush()

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        return self._stream.fileno()

    def writable(self) -> bool:
        return True

    @property
    def encoding(self) -> str:
        return self._stream.encoding


@contextlib.contextmanager
def plain_output() -> Iterator[None]:
    """Everything that this process prints in Python goes through `Plain`."""
    with contextlib.redirect_stdout(Plain(sys.stdout)), contextlib.redirect_stderr(Plain(sys.stderr)):
        yield
