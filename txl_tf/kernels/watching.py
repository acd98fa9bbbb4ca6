"""What attention computes on its way, for pictures and tests.

with watching() as seen:
    network(tokens)
seen.probs[0]       # of the first attention that was computed
"""

import contextlib
import contextvars

_watcher = contextvars.ContextVar("watcher", default=None)


class Seen:
    """What the attentions in a block of `watching` computed, in order.

    Attributes:
        probs: tensors `[H, ..., T, K]`, before dropout.
        parts: of Transformer-XL's attention, `(q, k, places)`: queries before u and v are added, keys, and `Places` of
            `txl_tf.equations`.
    """

    def __init__(self):
        self.probs, self.parts = [], []


@contextlib.contextmanager
def watching():
    """A `Seen`, which every attention in this block writes into."""
    token = _watcher.set(Seen())
    try:
        yield _watcher.get()
    finally:
        _watcher.reset(token)


def watched():
    """The `Seen` of the innermost block of `watching`, or `None`."""
    return _watcher.get()
