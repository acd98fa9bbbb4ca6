"""Records intermediate results of attention, for pictures and tests.

with watching() as seen:
    network(tokens)
seen.probs[0]       # the probabilities of the first attention that was computed
"""

import contextlib
import contextvars
from collections.abc import Generator
from typing import Any


class Seen:
    """The results of the calls of `attend` in a block of `watching`, in order.

    Attributes:
        probs: the probabilities before dropout, `[H, ..., T, K]` each.
        parts: `(q, k, places)` of each of Transformer-XL's attentions: the queries before u and v are added, the keys,
            and `Places` of `txl_tf.equations`. Only for a memory of hidden states: with cached keys, q and k do not
            belong together.
    """

    def __init__(self) -> None:
        self.probs: list[Any] = []
        self.parts: list[tuple[Any, Any, Any]] = []


_watcher: contextvars.ContextVar[Seen | None] = contextvars.ContextVar("watcher", default=None)


@contextlib.contextmanager
def watching() -> Generator[Seen, None, None]:
    """Yields a `Seen` that every call of `attend` in this block writes to.

    Calls in a block of `watching` inside it write only to the inner `Seen`.
    """
    seen = Seen()
    token = _watcher.set(seen)
    try:
        yield seen
    finally:
        _watcher.reset(token)


def watched() -> Seen | None:
    """The `Seen` of the innermost block of `watching`, or `None`."""
    return _watcher.get()
