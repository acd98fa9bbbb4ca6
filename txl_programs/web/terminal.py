"""The standard output and error of a server: text of visitors cannot control the terminal."""

import contextlib
import io
import sys
from collections.abc import Iterator
from typing import TextIO

from txl_config.errors import shortened, visible


class Plain(io.TextIOBase):
    r"""A stream that writes to another one: control characters like `\x1b`, and lines shortened to 500 characters."""

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
    def encoding(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]  # read only in TextIOBase, too
        return self._stream.encoding


@contextlib.contextmanager
def plain_output() -> Iterator[None]:
    """In this block, everything that Python code of this process prints goes through `Plain`."""
    with contextlib.redirect_stdout(Plain(sys.stdout)), contextlib.redirect_stderr(Plain(sys.stderr)):
        yield
