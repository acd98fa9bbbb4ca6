"""Translation of lines of text by an encoder-decoder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from txl_tf.config import SearchConfig, at_least
from txl_tf.data.batching import by_length, in_order, padded
from txl_tf.data.lines import LINE, LineError, answers, encoded, sentence_of
from txl_tf.data.pairs.parallel import END_ID, PADDING, START_ID, encode_lines
from txl_tf.data.vocabulary import Vocab
from txl_tf.models.vanilla.transformer import Transformer

POOL = 50  # batches of sources that are read and sorted by length together
_STEP = 16  # lengths are rounded up to multiples of it, so that a source is searched alike whatever is beside it


class Translation(NamedTuple):
    text: str
    score: float  # log-probability in nats, of a search divided by the length penalty


class PairAttention(NamedTuple):
    """What attends to what while a target is written.

    Attributes:
        queries, keys: lists of str, the symbols that attend and those that are attended to.
        weights: float `[num_layers, num_heads, queries, keys]`.
    """

    queries: list[str]
    keys: list[str]
    weights: np.ndarray


def most_symbols(search: SearchConfig, longest: int | tf.Tensor, max_len: int) -> int | tf.Tensor:
    """Most tokens of targets, their ends included, where the longest source has `longest`."""
    if search.max_new_tokens is not None:
        return min(search.max_new_tokens, max_len)
    return tf.minimum(_rounded(longest) + 50, max_len)


def _rounded(length):
    return -(-length // _STEP) * _STEP


class Translator:
    """Sources to targets, as text.

    Args:
        model: `Transformer`.
        source_vocab, target_vocab: `Vocab`s of the model.
        search: `SearchConfig`.
        batch_size: sources to translate at a time.
    """

    def __init__(
        self,
        model: Transformer,
        source_vocab: Vocab,
        target_vocab: Vocab,
        search: SearchConfig | None = None,
        batch_size: int = 64,
    ):
        at_least(1)("batch_size", batch_size)
        self.model, self.source_vocab, self.target_vocab = model, source_vocab, target_vocab
        self.search, self.batch_size = search or SearchConfig(), batch_size

    def encode(self, source: str | bytes) -> np.ndarray:
        """Ids of a line. Raises ValueError where it cannot be translated."""
        ids = encode_lines(self.source_vocab, [f"{sentence_of(source)}\n"], "text").ids
        if len(ids) > self.model.max_len:
            raise ValueError(
                f"{LINE} has {len(ids):,} symbols, its end included; the position table of the model has "
                f"max_len={self.model.max_len}"
            )
        return ids

    def translate(self, sources: Iterable[str | bytes], name: str = "source") -> list[list[Translation]]:
        """The `n_best` translations of every source, the best first.

        Args:
            sources: lines.
            name: what messages call them, such as their file.

        Raises:
            ValueError: a source is empty, too long, not UTF-8, or has a symbol that the vocabulary does not have.
        """
        return self._search(list(encoded(sources, self.encode, name)))

    def translate_lines(
        self,
        sources: Iterable[str | bytes | None],
        name: str = "source",
        strict: bool = True,
        numbers: Iterable[int] | None = None,
    ) -> Iterator[list[Translation] | LineError]:
        """`translate` of lines that come one after the other, see `txl_tf.data.lines`, in bounded memory."""
        return answers(sources, self.encode, self._search, name, strict, POOL * self.batch_size, numbers)

    def attention(self, source: str | bytes, target: str, which: str = "cross") -> PairAttention:
        """Where the model looks in a source while it writes a target, one of its own or any other.

        Args:
            source: a line.
            target: a line, such as the text of a `Translation`; an empty one is its end alone.
            which: see `Transformer.attention`.

        Returns:
            `PairAttention`: a query of "cross" and "decoder" is the symbol that is written, the end symbol included; a
            key of "decoder" is the start symbol or one that was written before.

        Raises:
            ValueError: a line is too long or has a symbol that its vocabulary does not have, or `which` is another
                word.
        """
        source = self.encode(source)
        lines = [f"{sentence_of(target)}\n"] if target else []
        target = encode_lines(self.target_vocab, lines, "target").ids if lines else np.array([END_ID])
        if len(target) > self.model.max_len:
            raise ValueError(f"target must have at most max_len={self.model.max_len} symbols, got {len(target):,}")
        read = np.append(START_ID, target[:-1])
        weights = self.model.attention(source[None], read[None], which)[:, :, 0].numpy()
        of_source = [self.source_vocab.symbols[i] for i in source]
        written, before = ([self.target_vocab.symbols[i] for i in ids] for ids in (target, read))
        queries, keys = {"cross": (written, of_source), "decoder": (written, before)}.get(which, (of_source,) * 2)
        return PairAttention(queries, keys, weights)

    def _search(self, sources: list[np.ndarray]) -> list[list[Translation]]:
        """The translations of encoded sources, batched by length."""
        lengths = _rounded(np.array([len(ids) for ids in sources], int))

        def most(order):
            return np.count_nonzero(lengths[order[: self.batch_size]] == lengths[order[0]])

        return in_order(self._translate, sources, by_length(lengths, most))

    def _translate(self, sources: list[np.ndarray]) -> list[list[Translation]]:
        search, model = self.search, self.model
        longest = _rounded(max(map(len, sources)))
        source = padded(sources, width=min(longest, model.max_len))
        most = int(most_symbols(search, longest, model.max_len))
        searches = {"beam_size": search.beam_size, "n_best": search.n_best, "length_penalty": search.length_penalty}
        ids, scores = model.generate(
            source, start=START_ID, end=END_ID, max_new_tokens=most, **(searches if search.beam_size > 1 else {})
        )
        ids, scores = ids.numpy().reshape([len(sources), -1, most]), scores.numpy().reshape([len(sources), -1])
        return [
            [Translation(self.decode(target), float(score)) for target, score in zip(*found, strict=True)]
            for found in zip(ids, scores, strict=True)
        ]

    def decode(self, ids: np.ndarray) -> str:
        """The text of a target, up to its end."""
        ends = np.flatnonzero((ids == END_ID) | (ids == PADDING))
        return self.target_vocab.decode(ids[: ends[0]] if len(ends) else ids)
