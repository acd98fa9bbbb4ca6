"""Runs that the page has open."""

import threading
from typing import Any

from txl_programs.demo.language import Refusal, said
from txl_tf.runs.folder import RunFolder


class OpenRun:
    """A run: what `load_run` gives, and a lock for those who compute with it.

    Args:
        model_dir: its folder.
        name: what the page calls it.

    Attributes:
        folder: its `RunFolder`.
        task: of its family, such as "language_model".
    """

    def __init__(self, model_dir: str, name: str):
        self.folder = folder = RunFolder(model_dir)
        self.name, self.task, self.config = name, folder.family.task, folder.read_config()
        self.family, self.vocabs, self.model = folder.family.name, folder.load_vocabs(), folder.load_model()
        self.lock = threading.Lock()

    def describe(self) -> str:
        """One line on the run."""
        return said("{family}, {number:,} weights", family=self.family, number=self.model.count_params())


def picked(pick: Any, *numbers: int) -> list[int]:
    """The whole numbers of what a click says, such as "0:17", as many as one of `numbers`. Else raises ValueError."""
    parts = pick.split(":") if isinstance(pick, str) and len(pick) < 100 else []
    if len(parts) not in numbers or not all(part.isascii() and part.isdigit() for part in parts):
        raise Refusal("This click is of another page: load the page again.")
    return [int(part) for part in parts]
