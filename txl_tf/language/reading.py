"""Shows how a language model reads a text: segment by segment, with memory.

    for reading in read_text(lm, ids, tgt_len=64):      # the nll of each token, and the most likely tokens
        reading.nll, reading.ids, reading.log_probs
    look_back(lm, ids, place=100, tgt_len=64)           # the attention before token 100, and the nll with less memory
    for start, nll in nll_by_memory(lm, ids, 64, kept=[0, 32, 64]): ...         # no, 32 and 64 positions of memory

Shapes:
    n: tokens of a text      T: tokens of a segment      K: keys in memory and segment
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from txl_tf.calls import checked_call
from txl_tf.config.checks import check_integer
from txl_tf.errors import ParameterError
from txl_tf.kernels.shapes import Tensor
from txl_tf.language.language_model import LanguageModel
from txl_tf.nn.checks import as_array, check_eager, tensor_error


class Reading(NamedTuple):
    """The predictions of a model for the T tokens that follow the tokens of a segment.

    Attributes:
        start: position of the first predicted token in the text. It is 1 in the first segment, because no token
            predicts the first token of the text.
        nll: float32 `[T]`, nats, of the predicted tokens.
        ids, log_probs: int32 and float32 `[T, number]`, the tokens that the model finds most likely at these positions,
            the most likely first, and their log-probabilities.
    """

    start: int
    nll: np.ndarray
    ids: np.ndarray
    log_probs: np.ndarray


class LookBack(NamedTuple):
    """The attention of a model when it predicted a token.

    Attributes:
        probs: float32 `[n_layer, n_head, K]`, the attention probabilities. The token before the predicted one is the
            query, and also the last key.
        first_key: position of the first key in the text. Keys at negative positions are zeros.
        segment: position of the first key that belongs to the segment. Earlier keys belong to the memory.
        kept: three numbers of positions of the memory: none, half and all of them.
        nll: float32 `[3]`, nats, of the predicted token with each of these numbers.
    """

    probs: np.ndarray
    first_key: int
    segment: int
    kept: tuple[int, int, int]
    nll: np.ndarray


def read_text(lm: LanguageModel, ids: np.ndarray, tgt_len: int, number: int = 10) -> Iterator[Reading]:
    """Reads a text and yields a `Reading` for each segment.

    Args:
        lm: `TransformerXLLM` or `TransformerLM`.
        ids: int `[n]`, n at least 2.
        tgt_len: number of tokens of a segment.
        number: number of most likely tokens at each position, at most `n_token`.

    Raises:
        ParameterError: an argument is out of its range.
    """
    mems = lm.first_mems(1)
    for start, tokens, labels in _segments(ids, tgt_len):
        likeliest, log_probs, _ = lm.alternatives(tokens, number, mems)
        nll, mems = lm.score(tokens, labels, mems)
        yield Reading(start + 1, nll.numpy()[0], likeliest.numpy()[0], log_probs.numpy()[0])


def look_back(lm: LanguageModel, ids: np.ndarray, place: int, tgt_len: int) -> LookBack:
    """The attention of a model when it predicts one token of a text, and the token's nll with no, half and all memory.

    Args:
        lm: `TransformerXLLM` or `TransformerLM`.
        ids: int `[n]`, the text, n at least 2.
        place: position of the token in the text, from 1 to n - 1.
        tgt_len: number of tokens of a segment.

    Raises:
        ParameterError: an argument is out of its range.
    """
    ids = _checked_text(ids, tgt_len)
    check_integer("place", place, 1, len(ids) - 1)
    start = (place - 1) // tgt_len * tgt_len
    mems = memory_after(lm, ids[:start], tgt_len)
    tokens = ids[None, start:place]
    labels = ids[None, start + 1 : place + 1]
    probs, _ = lm.attention(tokens, mems)
    mem_len = mems[0].shape[1]
    kept = (0, mem_len // 2, mem_len)
    nll = np.stack([lm.score(tokens, labels, last_of(mems, k))[0].numpy()[0, -1] for k in kept])
    last_query_probs = probs[:, :, 0, -1].numpy()  # from [n_layer, n_head, batch, T, K], with a batch of 1
    return LookBack(last_query_probs, first_key=start - mem_len, segment=start, kept=kept, nll=nll)


@checked_call
def nll_by_memory(
    lm: LanguageModel, ids: np.ndarray, tgt_len: int, kept: Sequence[int]
) -> Iterator[tuple[int, np.ndarray]]:
    """The nll of a text whose segments attend only to the last positions of their memory.

    The hidden states in the memory are computed with the full memory.

    Args:
        lm, ids, tgt_len: see `read_text`.
        kept: numbers of memory positions, each from 0 to `mem_len`. For each number k, the text is scored with only the
            last k positions of the memory, which gives one row of `nll`.

    Yields:
        `(start, nll)` for each segment: the position of its first label, and float32 `[len(kept), T]` in nats. Only the
        first token of the text has no nll.

    Raises:
        ParameterError: an argument is out of its range.
    """
    mem_len = lm.network.mem_len
    for number in kept:
        check_integer("kept", number, 0, mem_len)
    mems = lm.first_mems(1)
    for start, tokens, labels in _segments(ids, tgt_len):
        full_memory_nll, new_mems = lm.score(tokens, labels, mems)
        scores = [full_memory_nll if k == mem_len else lm.score(tokens, labels, last_of(mems, k))[0] for k in kept]
        yield start + 1, np.stack([nll.numpy()[0] for nll in scores])
        mems = new_mems


def memory_after(lm: LanguageModel, ids: np.ndarray, tgt_len: int) -> list[Tensor]:
    """The memory after the model has read `ids`, int `[n]`, in segments of `tgt_len`; `initial_mems` if n is 0."""
    mems = lm.first_mems(1)
    for start in range(0, len(ids), tgt_len):
        _, mems = lm.network(ids[None, start : start + tgt_len], mems)
    return mems


def last_of(mems: list[Tensor], number: int) -> list[Tensor]:
    """The last `number` positions of the memory of every layer."""
    return [mem[:, mem.shape[1] - number :] for mem in mems]


def _segments(ids: np.ndarray, tgt_len: int) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Yields `(start, tokens, labels)` of each segment of a text: the position of the first token, and int `[1, T]`."""
    ids = _checked_text(ids, tgt_len)
    for start in range(0, len(ids) - 1, tgt_len):
        labels = ids[None, start + 1 : start + tgt_len + 1]
        yield start, ids[None, start : start + labels.shape[1]], labels


def _checked_text(ids: Any, tgt_len: int) -> np.ndarray:
    """`ids` as an array. Raises ParameterError unless there are two or more, and `tgt_len` is positive."""
    check_eager("reading a text")
    check_integer("tgt_len", tgt_len, 1)
    ids = as_array("ids", ids, "integers [n]")
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise tensor_error("ids", ids, "integers [n]")
    if len(ids) < 2:
        message = f"ids must have at least two tokens, because the first is not predicted, got {len(ids)}"
        raise ParameterError("ids", ids, "at least two tokens", message)
    return ids
