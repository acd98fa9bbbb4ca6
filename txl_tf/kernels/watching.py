"""Records intermediate results of attention, for pictures and tests.

with watching() as record:
    network(tokens)
record.probs[0]     # the probabilities of the first attention that was computed
"""

import contextlib
import contextvars
from collections.abc import Generator
from typing import Any


class AttentionRecord:
    """The results of the calls of `attend` in a block of `watching`, in order.

    Attributes:
        probs: the probabilities before dropout, `[H, ..., T, K]` each.
        parts: `(q, k, key_positions)` of each of Transformer-XL's attentions: the queries before u and v are added, the
            keys, and `KeyPositions` of `txl_tf.equations`. Only for a memory of hidden states: with cached keys, q and
            k do not belong together.
    """

    def __init__(self) -> None:
        self.probs: list[Any] = []
        self.parts: list[tuple[Any, Any, Any]] = []


_record: contextvars.ContextVar[AttentionRecord | None] = contextvars.ContextVar("record", default=None)


@contextlib.contextmanager
def watching() -> Generator[AttentionRecord, None, None]:
    """Yields an `AttentionRecord` that every call of `attend` in this block writes to.

    Calls in a block of `watching` inside it write only to the inner record.
    """
    record = AttentionRecord()
    token = _record.set(record)
    try:
        yield record
    finally:
        _record.reset(token)


def current_record() -> AttentionRecord | None:
    """The record of the innermost block of `watching`, or `None`."""
    return _record.get()
