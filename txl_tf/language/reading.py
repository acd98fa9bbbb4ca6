"""A text as a language model reads it: segment by segment, each with the memory of those before.

    for reading in read_text(lm, ids, tgt_len=64):      # how likely each token was, and what else could stand there
        reading.nll, reading.ids, reading.log_probs
    look_back(lm, ids, place=100, tgt_len=64)           # where each head looked before token 100; what memory is worth
    for start, nll in nll_by_memory(lm, ids, 64, kept=[0, 32, 64]): ...         # given none, half and all of its memory

Shapes:
    n: tokens of a text      T: tokens of a segment      K: keys, of memory and segment
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from txl_tf.errors import ParameterError
from txl_tf.kernels.shapes import Tensor
from txl_tf.language.language_model import LanguageModel
from txl_tf.language.sampling import check_integer


class Reading(NamedTuple):
    """What a model expected of the tokens of a segment but the first one of a text.

    Attributes:
        start: place of the first of these tokens in the text.
        nll: float32 `[T]`, nats.
        ids, log_probs: int32 and float32 `[T, number]`, the likeliest tokens for these places, the likeliest first.
    """

    start: int
    nll: np.ndarray
    ids: np.ndarray
    log_probs: np.ndarray


class LookBack(NamedTuple):
    """Where a model looked when it predicted a token.

    Attributes:
        probs: float32 `[n_layer, n_head, K]`, of the token before it, which is the last key.
        first_key: place in the text of the first key; keys at negative places are zeros.
        segment: place in the text of the first key that is of the segment; those before are of the memory.
        kept: numbers of last positions of memory: none, half, all.
        nll: float32 `[3]`, nats, of the token with as much memory.
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
        ids: int `[n]`, two or more.
        tgt_len: tokens of a segment.
        number: likeliest tokens to give for a place, at most `n_token`.

    Raises:
        ValueError: an argument is out of its range; the message names it.
    """
    mems = lm.initial_mems(1)
    for start, tokens, labels in _segments(ids, tgt_len):
        likeliest, log_probs, _ = lm.alternatives(tokens, number, mems)
        nll, mems = lm.score(tokens, labels, mems)
        yield Reading(start + 1, nll.numpy()[0], likeliest.numpy()[0], log_probs.numpy()[0])


def look_back(lm: LanguageModel, ids: np.ndarray, place: int, tgt_len: int) -> LookBack:
    """Where a model looks when it predicts one token of a text, and what its memory is worth there.

    Args:
        lm, ids, tgt_len: see `read_text`.
        place: of the token, from 1 to n - 1.

    Raises:
        ValueError: an argument is out of its range; the message names it.
    """
    _check_text(ids, tgt_len)
    check_integer("place", place, 1, len(ids) - 1)
    start = (place - 1) // tgt_len * tgt_len
    mems = memory_after(lm, ids[:start], tgt_len)
    tokens, labels = ids[None, start:place], ids[None, start + 1 : place + 1]
    probs, _ = lm.attention(tokens, mems)
    mem_len = mems[0].shape[1]
    kept = 0, mem_len // 2, mem_len
    nll = np.stack([lm.score(tokens, labels, last_of(mems, k))[0].numpy()[0, -1] for k in kept])
    return LookBack(probs[:, :, 0, -1].numpy(), start - mem_len, start, kept, nll)


def nll_by_memory(
    lm: LanguageModel, ids: np.ndarray, tgt_len: int, kept: Sequence[int]
) -> Iterator[tuple[int, np.ndarray]]:
    """Nll of a text whose segments see only the last positions of their memory, segment by segment.

    The memory itself is that of the whole text before: what is left out here is what a segment attends to.

    Args:
        lm, ids, tgt_len: see `read_text`.
        kept: numbers of positions, each from 0 to `mem_len`.

    Yields:
        `(start, nll)`: the place of the first of the tokens, and float32 `[len(kept), T]`, nats. No token but the first
        of the text is left out.

    Raises:
        ValueError: an argument is out of its range; the message names it.
    """
    mem_len = lm.network.mem_len
    for number in kept:
        check_integer("kept", number, 0, mem_len)
    mems = lm.initial_mems(1)
    for start, tokens, labels in _segments(ids, tgt_len):
        with_all, new_mems = lm.score(tokens, labels, mems)
        found = [with_all if k == mem_len else lm.score(tokens, labels, last_of(mems, k))[0] for k in kept]
        yield start + 1, np.stack([nll.numpy()[0] for nll in found])
        mems = new_mems


def memory_after(lm: LanguageModel, ids: np.ndarray, tgt_len: int) -> list[tf.Tensor]:
    """The memory after a text, int `[n]`, that is read in segments; that of `initial_mems` after an empty one."""
    mems = lm.initial_mems(1)
    for start in range(0, len(ids), tgt_len):
        _, mems = lm.network(ids[None, start : start + tgt_len], mems)
    return mems


def last_of(mems: list[tf.Tensor], number: int) -> list[tf.Tensor]:
    """The last positions of a memory, as many as `number`."""
    return [mem[:, mem.shape[1] - number :] for mem in mems]


def _segments(ids: Tensor, tgt_len: int):
    """Yields `(start, tokens, labels)` of the segments of a text: the place of the first token, and int `[1, T]`."""
    _check_text(ids, tgt_len)
    for start in range(0, len(ids) - 1, tgt_len):
        labels = ids[None, start + 1 : start + tgt_len + 1]
        yield start, ids[None, start : start + labels.shape[1]], labels


def _check_text(ids: Tensor, tgt_len: int):
    check_integer("tgt_len", tgt_len, 1)
    if len(ids) < 2:
        message = f"ids must have at least two tokens, because the first is not predicted, got {len(ids)}"
        raise ParameterError("ids", ids, "at least two tokens", message)
