"""Translates lines of text with an encoder-decoder."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sized
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from txl_tf.config import SearchConfig, TransformerConfig, at_least
from txl_tf.data.batching import by_length, in_order, padded
from txl_tf.data.lines import LINE, LineError, answers, encoded, in_blocks, sentence_of
from txl_tf.data.pairs.lengths import STEP, group_ends, rounded, target_limits
from txl_tf.data.pairs.parallel import END_ID, PADDING, START_ID, encode_lines
from txl_tf.data.vocabulary import Vocab
from txl_tf.errors import ParameterError
from txl_tf.language.beam_search import check_length_penalty
from txl_tf.vanilla.ensemble import Ensemble
from txl_tf.vanilla.transformer import Transformer

POOL = 50  # batches of sources that are read and sorted by length together
# If a run does not record `target_lengths`, the limit of a target is the length of its source, rounded up to a multiple
# of `STEP`, plus this number of symbols.
_MORE = 50


class _Scored(NamedTuple):
    """The tuple that a `Translation` is."""

    text: str
    score: float


class Translation(_Scored):
    """A translation: the tuple `(text, score)` with two more attributes.

    Attributes:
        text: str.
        score: the log-probability of the translation in nats; from a beam search, divided by the length penalty.
        ended: whether the model ended the translation. `False` means that it reached the largest number of symbols and
            is cut off.
        unknown: number of symbols of the source that its vocabulary does not contain.
    """

    ended: bool = True
    unknown: int = 0

    def __new__(cls, text: str, score: float, ended: bool = True, unknown: int = 0) -> Translation:
        translation = super().__new__(cls, text, score)
        translation.ended = ended
        translation.unknown = unknown
        return translation


class PairAttention(NamedTuple):
    """The attention weights of a translation.

    Attributes:
        queries, keys: lists of str, the symbols of the queries and of the keys.
        weights: float `[num_layers, num_heads, queries, keys]`.
    """

    queries: list[str]
    keys: list[str]
    weights: np.ndarray


def most_symbols(
    search: SearchConfig, lengths: int | tf.Tensor, model: Transformer | Ensemble | TransformerConfig
) -> int | tf.Tensor:
    """The largest number of symbols of a target, its end included.

    Args:
        search: its `max_new_tokens` is used if it is given, up to `max_len`. Otherwise, the number depends on the
            length of the source.
        lengths: number of symbols of a source, its end included; or a tensor of such numbers.
        model: the model or its configuration. Its `target_lengths` are the lengths of the longest targets of the
            training, by length of the source, see `txl_tf.data.pairs.lengths`.

    Returns:
        An int with `max_new_tokens`; otherwise an int32 tensor of the shape of `lengths`.
    """
    if search.max_new_tokens is not None:
        return min(search.max_new_tokens, model.max_len)
    if model.target_lengths is None:
        return tf.minimum(rounded(lengths) + _MORE, model.max_len)
    ends = group_ends(model.max_len)
    limits = target_limits([*model.target_lengths], model.max_len)
    # The group of a source is the number of groups that end below its length. The last group has no end.
    is_longer = tf.expand_dims(tf.cast(lengths, tf.int32), -1) > tf.constant(ends[:-1], tf.int32)
    return tf.gather(limits, tf.reduce_sum(tf.cast(is_longer, tf.int32), -1))


def never_written(search: SearchConfig, vocab: Vocab | None) -> list[int]:
    """Ids that no target may contain: the start symbol and the unknown symbol of `vocab`, if it is given and has one.

    If the search has `allow_special`, there are no such ids.
    """
    if search.allow_special:
        return []
    return [START_ID, *([vocab.ids[vocab.unk]] if vocab and vocab.unk in vocab.ids else [])]


def check_search(search: SearchConfig, n_symbols: int, max_len: int, never: list[int]) -> None:
    """Raises ParameterError if a search asks for more symbols or hypotheses than the model has.

    It also does if a `length_penalty` would have no effect, because there is one hypothesis.

    Args:
        search: the options of the search.
        n_symbols, max_len: `target_vocab_size` and `max_len` of the model.
        never: ids from `never_written`.
    """
    most = n_symbols - 1 - len(never)  # - 1, because no target contains padding
    if search.beam_size > most:
        raise ParameterError("beam_size", search.beam_size, f"at most {most}, the symbols that a target may contain")
    if search.max_new_tokens is not None and search.max_new_tokens > max_len:
        raise ParameterError("max_new_tokens", search.max_new_tokens, f"at most max_len={max_len}, as the model has it")
    check_length_penalty(search.length_penalty, search.beam_size > 1)


def did_not_end(number: int, among: int, search: SearchConfig, model: Transformer | TransformerConfig) -> str:
    """The message of a program that `number` of `among` translations are cut off."""
    advice = f"--max_new_tokens allows up to {model.max_len:,}"
    if search.max_new_tokens is not None:
        least = search.max_new_tokens
        limit = f"{least:,} symbols"
    elif model.target_lengths is None:
        least = STEP + _MORE  # of the shortest sources
        limit = f"as many symbols as the source has, rounded up to a multiple of {STEP}, and {_MORE} more"
    else:
        lengths = [*model.target_lengths]
        limits = target_limits(lengths, model.max_len)[: len(lengths)]
        least = limits[0]
        least_to_most = " to ".join(f"{length:,}" for length in sorted({least, limits[-1]}))
        limit = f"{least_to_most} symbols, by the length of the source (longer sources than in training: more)"
    if least >= model.max_len:  # every source has the largest limit
        limit = f"{model.max_len:,} symbols"
        advice = "the model cannot write more"
    return f"{number:,} of {among:,} translations did not end within {limit}, and are cut off: {advice}"


def assumed_length(search: SearchConfig, model: Transformer | Ensemble | TransformerConfig) -> str | None:
    """A message about the assumed lengths of targets, if neither the run nor the search specifies them."""
    if search.max_new_tokens is not None or model.target_lengths is not None:
        return None
    return (
        "the model does not record how long the targets of its training are: a translation has at most as many symbols "
        f"as its source, rounded up to a multiple of {STEP}, and {_MORE} more. max_new_tokens sets another limit"
    )


class Translator:
    """Translates texts.

    Args:
        model: `Transformer` or `Ensemble`.
        source_vocab, target_vocab: vocabularies of the model.
        search: `SearchConfig`.
        batch_size: number of sources to translate together.

    Raises:
        ParameterError: `max_new_tokens` or `beam_size` is more than the model allows.
    """

    def __init__(
        self, model: Transformer | Ensemble, source_vocab: Vocab, target_vocab: Vocab,
        search: SearchConfig | None = None, batch_size: int = 64,
    ) -> None:  # fmt: skip
        at_least(1)("batch_size", batch_size)
        self.model = model
        self.source_vocab = source_vocab
        self.target_vocab = target_vocab
        self.search = search or SearchConfig()
        self.batch_size = batch_size
        self.never = never_written(self.search, target_vocab)
        check_search(self.search, model.target_vocab_size, model.max_len, self.never)

    def encode(self, source: str | bytes) -> np.ndarray:
        """The ids of a line, with the end symbol. Raises ValueError if the line cannot be translated, see `translate`.

        A line may not have more than `max_len` symbols.
        """
        ids = encode_lines(self.source_vocab, [f"{sentence_of(source)}\n"], "text").ids
        if len(ids) > self.model.max_len:
            max_len = self.model.max_len
            message = (
                f"{LINE} has {len(ids):,} symbols, its end included; the position table of the model has "
                f"max_len={max_len}"
            )
            raise ParameterError(LINE, source, f"at most max_len={max_len} symbols", message)
        return ids

    def translate(self, sources: Iterable[str | bytes], name: str = "source") -> list[list[Translation]]:
        """The `n_best` translations of every source, the best first; with a `beam_size` of 1, a single translation.

        Args:
            sources: lines.
            name: the name of the sources in messages, such as their file.

        Raises:
            ValueError: a source is empty, too long or not UTF-8, or it has a symbol that is reserved, or that is not in
                a vocabulary without an unknown symbol.
        """
        lines = itertools.chain.from_iterable(in_blocks(sources if isinstance(sources, Sized) else [*sources]))
        return self._search(list(encoded(lines, self.encode, name)))

    def translate_lines(
        self, sources: Iterable[str | bytes | None], name: str = "source", strict: bool = True,
        numbers: Iterable[int] | None = None,
    ) -> Iterator[list[Translation] | LineError]:  # fmt: skip
        """Translates a stream of lines in bounded memory. Arguments: see `translate` and `txl_tf.data.lines`."""
        return answers(sources, self.encode, self._search, name, strict, POOL * self.batch_size, numbers)

    def attention(self, source: str | bytes, target: str, which: str = "cross") -> PairAttention:
        """The attention of the model while it writes a target, which may be its own translation or any other text.

        Args:
            source: a line.
            target: a line, such as the text of a `Translation`. An empty target contains only the end symbol. A target
                of `max_len` symbols has no end symbol.
            which: "cross", target to source; "encoder", source to itself; or "decoder", target to itself.

        Returns:
            `PairAttention`. The queries of "cross" and "decoder" are the symbols of the target, with the end symbol.
            The keys of "cross" are the symbols of the source, with its end symbol. The keys of "decoder" are the start
            symbol and the symbols of the target that come before the end symbol. Queries and keys of "encoder" are the
            symbols of the source.

        Raises:
            ValueError: a line is too long or cannot be encoded, see `translate`; or `which` is another word.
            ParameterError: the model is an `Ensemble`, which has no attention of its own.
        """
        if isinstance(self.model, Ensemble):
            raise ParameterError("model", self.model, "a Transformer, whose attention can be computed")
        source_ids = self.encode(source)
        target_ids = np.array([END_ID])
        if target not in ("", b""):
            target_ids = encode_lines(self.target_vocab, [f"{sentence_of(target)}\n"], "target").ids
        max_len = self.model.max_len
        if len(target_ids) > max_len + 1:
            allowed = f"at most max_len={max_len} symbols"
            raise ParameterError("target", target, allowed, f"target must have {allowed}, got {len(target_ids) - 1:,}")
        target_ids = target_ids[:max_len]  # a translation may end at the limit, without the end symbol
        read_ids = np.append(START_ID, target_ids[:-1])
        weights = self.model.attention(source_ids[None], read_ids[None], which)
        weights = weights[:, :, 0].numpy()  # [layers, heads, batch, queries, keys] of the one pair
        read = [self.target_vocab.symbols[i] for i in read_ids]
        written = [self.target_vocab.symbols[i] for i in target_ids]
        source_symbols = [self.source_vocab.symbols[i] for i in source_ids]
        if which == "cross":
            return PairAttention(written, source_symbols, weights)
        if which == "decoder":
            return PairAttention(written, read, weights)
        return PairAttention(source_symbols, source_symbols, weights)

    def _search(self, sources: list[np.ndarray]) -> list[list[Translation]]:
        """Translates encoded sources in batches of the same rounded length. Returns translations in their order."""
        lengths = rounded(np.array([len(ids) for ids in sources], int))

        def most(order):
            """The number of sources in the next batch: those whose rounded length is that of the first one."""
            return np.count_nonzero(lengths[order[: self.batch_size]] == lengths[order[0]])

        return in_order(self._translate, sources, by_length(lengths, most))

    def _translate(self, sources: list[np.ndarray]) -> list[list[Translation]]:
        """The translations of the encoded sources of one batch."""
        search = self.search
        model = self.model
        longest = rounded(max(map(len, sources)))
        source = padded(sources, width=min(longest, model.max_len))
        max_new_tokens = int(most_symbols(search, longest, model))
        n_best = search.n_best if search.beam_size > 1 else None  # a number would be a beam search with one hypothesis
        ids, scores = model.generate(
            source, start=START_ID, end=END_ID, max_new_tokens=max_new_tokens, suppress_tokens=self.never,
            beam_size=search.beam_size, n_best=n_best, length_penalty=search.length_penalty,
        )  # fmt: skip
        ids = ids.numpy().reshape([len(sources), -1, max_new_tokens])
        scores = scores.numpy().reshape([len(sources), -1])
        unk = self.source_vocab.unk
        unknown_id = -1 if unk is None else self.source_vocab.ids.get(unk, -1)  # no symbol has the id -1
        unknown = np.count_nonzero(source == unknown_id, axis=1)
        ended = np.any(ids == END_ID, axis=-1)
        return [
            [
                Translation(self.decode(target), float(score), bool(end), int(unknown[row]))
                for target, score, end in zip(ids[row], scores[row], ended[row], strict=True)
            ]
            for row in range(len(sources))
        ]

    def decode(self, ids: np.ndarray) -> str:
        """The text of a target: its symbols before the end symbol or padding."""
        ends = np.flatnonzero((ids == END_ID) | (ids == PADDING))
        return self.target_vocab.decode(ids[: ends[0]] if len(ends) else ids)
