"""Evaluation with a sliding window: the model predicts every token from a full window of text.

The first tokens of a segment are hard to predict, because little stands before them. A model without memory is best if
every token comes after a full window. But then it computes a window for every token (paper, section 3.1). With a
`window` of 3 and a `step` of 1:

    text        a b c d e f

    read        a b c           scores b, c, d
    read          b c d         scores e
    read            c d e       scores f
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from txl_tf.config.checks import check_integer
from txl_tf.nn.checks import check_eager, int_array, tensor_error
from txl_tf.nn.embedding import check_ids


def sliding_window_nll(
    lm: Any, tokens: Any, window: int, batch_size: int = 16, step: int = 1, progress: Callable[[int], Any] | None = None
) -> np.ndarray:
    """The nll of a text, where each token is predicted from up to `window` tokens before it, without a memory.

    Args:
        lm: `TransformerLM` or `TransformerXLLM`. Each window starts from `initial_mems`.
        tokens: int `[n]`, n at least 2.
        window: number of tokens before the predicted one. At the beginning of the text, the window is shorter.
        batch_size: number of windows to compute together.
        step: number of labels to score in a window, its last ones, at most `window`. The paper uses 1. With k, the
            computation is k times shorter, and at least `window - k + 1` tokens come before each token, except at the
            beginning of the text.
        progress: function that is called after every batch of windows, with the number of labels that the batch scored.
            The first window is not counted.

    Returns:
        float32 (float64 if the model's dtype is) array `[n - 1]`, the nll of `tokens[1:]` in nats.

    Raises:
        ParameterError: an argument is out of its range.

    Reference:
        Dai et al. 2019, section 3.1; Al-Rfou et al. 2018.
    """
    check_eager("sliding_window_nll")
    allowed = "integers [n], n at least 2"
    tokens = int_array("tokens", tokens, 1, allowed)
    if tokens.size < 2:
        raise tensor_error("tokens", tokens, allowed)
    check_ids("tokens", tokens, lm.network.n_token)
    check_integer("window", window, 1)
    check_integer("batch_size", batch_size, 1)
    check_integer("step", step, 1, window)
    tokens = tokens.astype(np.int32)
    n_labels = tokens.size - 1
    n_first = min(window, n_labels)  # the first window scores all its labels
    nll = np.empty([n_labels], lm.loss_dtype)
    nll[:n_first] = lm._last_nll(tokens[None, :n_first], tokens[None, 1 : n_first + 1])[0]

    # Each further window scores the labels from `start` on, and reads the tokens before `end`.
    starts = np.arange(n_first, n_labels, step)
    ends = np.minimum(starts + step, n_labels)
    for i in range(0, ends.size, batch_size):
        start, end = starts[i : i + batch_size, None], ends[i : i + batch_size, None]
        read = tokens[end + np.arange(-window, 0)]
        labels = end + np.arange(-step, 0)
        # The last window overlaps more, so its first labels may have been scored.
        is_new = labels >= start
        nll[labels[is_new]] = lm._last_nll(read, tokens[labels + 1]).numpy()[is_new]
        if progress:
            progress(int(is_new.sum()))
    return nll
