"""Evaluation with a sliding window: every token after a full window of text, which is read again for every token.

A segment's first tokens have little before them. A model without memory is at its best where every token is the last of
a window, and pays for it with a window's computation a token (paper, section 3.1). With a `window` of 3 and `step` 1:

    text        a b c d e f

    read        a b c           scores b, c, d
    read          b c d         scores e
    read            c d e       scores f
"""

from typing import Any

import numpy as np

from txl_tf.errors import ParameterError
from txl_tf.kernels.shapes import Tensor
from txl_tf.language.sampling import check_integer
from txl_tf.nn.embedding import check_ids


def sliding_window_nll(lm: Any, tokens: Tensor, window: Any, batch_size: int = 16, step: int = 1, progress: Any = None):
    """The nll of a text, each token predicted from a window of its own.

    Args:
        lm: `TransformerLM` or `TransformerXLLM`; each window starts from `initial_mems`.
        tokens: int `[n]`, n at least 2.
        window: tokens before the one that is predicted; at the beginning of the text, those there are.
        batch_size: windows to compute at a time.
        step: labels to score of a window, its last ones, at most `window`. 1 is the paper's evaluation. With k the
            computation is a k-th, and a token has `window - k + 1` tokens or more before it.
        progress: called with the number of labels of every batch of windows that is done.

    Returns:
        float32 (float64 if the model's dtype is) array `[n - 1]`, the nll of `tokens[1:]` in nats.

    Raises:
        ValueError: an argument out of range; the message names it.

    Reference:
        Dai et al. 2019, section 3.1; Al-Rfou et al. 2018.
    """
    tokens = np.asarray(tokens)
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or tokens.size < 2:
        allowed = "integers [n], n at least 2"
        message = f"tokens must be {allowed}, got {tokens.dtype.name} {list(tokens.shape)}"
        raise ParameterError("tokens", tokens, allowed, message)
    check_ids("tokens", tokens, lm.network.n_token)
    check_integer("window", window, 1)
    check_integer("batch_size", batch_size, 1)
    check_integer("step", step, 1, window)
    tokens = tokens.astype(np.int32)
    last = tokens.size - 1  # the number of labels
    first = min(window, last)
    nll = np.empty([last], lm.loss_dtype)
    nll[:first] = lm._last_nll(tokens[None, :first], tokens[None, 1 : first + 1])[0]

    ends = np.arange(first + step, last + step, step).clip(max=last)
    for i in range(0, ends.size, batch_size):
        end = ends[i : i + batch_size, None]
        labels = end + np.arange(-step, 0)
        new = labels >= np.arange(first, last, step)[i : i + batch_size, None]  # the last window overlaps more
        nll[labels[new]] = lm._last_nll(tokens[end + np.arange(-window, 0)], tokens[labels + 1]).numpy()[new]
        if progress:
            progress(int(new.sum()))
    return nll
