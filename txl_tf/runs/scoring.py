r"""Scores of lines of text, such as n-best lists to rescore or a corpus to filter.

    for score in score_lines(lm, vocab, open("lines.txt")):
        score.nll, score.tokens, score.ppl, score.bpb, score.token_nll

Lines are read in blocks. Those of a block go through the model side by side, batched by length and filled up to the
right, where causal attention does not look; what a line gets does not depend on the others. The order is kept.

A line gets what `lm.score` gives for it: with the start s, the line a b and its end n,

    tokens   s a b
    labels   a b n

A line of more than `segment` tokens is read segment by segment, each with the memory of the one before. The same goes
for all lines with `carry_memory`, as one text: s a b n c d n ...
"""

from __future__ import annotations

import collections
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from txl_tf.config import ScoringConfig, check_places
from txl_tf.data.batching import by_length, padded
from txl_tf.data.lines import LineError, encoded, in_blocks, in_places, text_of
from txl_tf.data.vocabulary import Vocab, line_start_ids, newline_ids, unescape
from txl_tf.language.language_model import LanguageModel
from txl_tf.runs.metrics import to_metric
from txl_tf.schema import check_names, keywords_of

SEGMENT = 512  # tokens, unless `segment` says otherwise


class LineScore(NamedTuple):
    """The score of a line.

    Attributes:
        text: the line without its newline; bytes that are no text as `surrogateescape` has them.
        bytes: in UTF-8, with the newline where it counts.
        ids: int32 `[n]`, its tokens.
        token_nll: float32 (float64 if the model's dtype is) `[n]`, nats; NaN for a token that does not count.
        nll: nats, the sum over the tokens that count.
        tokens: how many count.
    """

    text: str
    bytes: int
    ids: np.ndarray
    token_nll: np.ndarray
    nll: float
    tokens: int

    @property
    def ppl(self) -> float:
        """Perplexity, the exponential of the mean nll; NaN where no token counts."""
        return to_metric(self.nll / self.tokens, "ppl") if self.tokens else math.nan

    @property
    def bpb(self) -> float:
        """Bits per byte; NaN where no token counts."""
        return to_metric(self.nll / self.bytes, "bpc") if self.tokens and self.bytes else math.nan


class _Line(NamedTuple):
    text: str
    bytes: int
    ids: np.ndarray


def score_lines(
    lm: LanguageModel, vocab: Vocab, lines: Iterable[str | bytes], name: str = "text", strict: bool = True, **options
) -> Iterator[LineScore | LineError]:
    """The scores of lines of text, in their order and in bounded memory.

    Args:
        lm, vocab: of a run, as `load_run` returns them.
        lines: with newlines at their ends or without; an open file will do.
        name: what error messages call them, such as their file.
        strict: whether a line that cannot be scored is an error; else a `LineError` is in the place of its score.
        **options: of `ScoringConfig`.

    Raises:
        ValueError: an option is out of its range. With `strict`, a line is not UTF-8, or has a symbol that the
            vocabulary does not have, and neither an unknown one: names the line.
    """
    check_names("score_lines", options, [*keywords_of(score_lines), *ScoringConfig.names()])
    scorer = Scorer(lm, vocab, ScoringConfig(**options))
    return (score for scores in scorer.score(in_blocks(lines), name, strict) for score in scores)


class Scorer:
    """Lines of text to scores.

    Args:
        lm: `TransformerXLLM` or `TransformerLM`, with the symbols of `vocab`.
        vocab: `Vocab`.
        config: `ScoringConfig`.

    Attributes:
        start: int32 array, the tokens before every line; empty where its first token is not scored. Lines of a
            vocabulary with `bos` begin with a start of their own.
        score_end: whether the end of a line counts: only where the vocabulary has a symbol for it.
        segment: most tokens that are read at a time.
    """

    def __init__(self, lm: LanguageModel, vocab: Vocab, config: ScoringConfig | None = None):
        config = config or ScoringConfig()
        if len(vocab) != lm.network.n_token:
            raise ValueError(f"vocab must hold the {lm.network.n_token} symbols of the model, got {len(vocab)}")
        if lm.static_shapes:
            raise ValueError("lm must not be compiled with static_shapes: lines have any length")
        self.lm, self.vocab = lm, vocab
        self.newline = newline_ids(vocab)
        self.start = np.array(self._start_ids(config.start), np.int32)
        self.score_end = config.score_end and bool(self.newline)
        self.carry_memory, self.batch_tokens = config.carry_memory, config.batch_tokens
        self.segment = config.segment or (lm.context_len if lm.has_window else SEGMENT)
        check_places(vars(lm), segment=self.segment)
        spec = tf.TensorSpec([None, None], tf.int32)
        self._first_nll = tf.function(lm.first_nll, [spec, spec], autograph=False)
        self._next_nll = tf.function(lm.evaluation_nll, autograph=False, reduce_retracing=True)

    def score(
        self,
        blocks: Iterable[list[str | bytes]],
        name: str = "text",
        strict: bool = True,
        numbers: Iterable[int] | None = None,
    ) -> Iterator[list[LineScore | LineError]]:
        """The scores of blocks of lines, a list for each: of its own lines or, with `carry_memory`, of those that it
        completes, and of the rest at the end. A line that cannot be scored is no part of the text.

        Raises what `score_lines` raises, before anything of the block is scored. `numbers`: see `encoded`.
        """
        numbers = itertools.count(1) if numbers is None else iter(numbers)
        blocks = (
            list(encoded(block, self._encode, name, strict, itertools.islice(numbers, len(block)))) for block in blocks
        )
        each = functools.partial(in_places, self._each_by_itself)
        return self._as_one_text(blocks) if self.carry_memory else map(each, blocks)

    # ----------------------------------------------------------------------------------------------- text to tokens

    def _start_ids(self, start: str | None) -> list[int]:
        if start is None:
            return line_start_ids(self.vocab)
        start = unescape(start)
        if start == "none":
            return []
        if start == "\n" and self.newline:
            return self.newline
        return [self.vocab.ids[start]] if start in self.vocab.ids else self.vocab.encode(start, name="start").tolist()

    def _encode(self, line: str | bytes) -> _Line:
        """The text and the tokens of a line."""
        by_byte = self.vocab.level == "byte"
        text = text_of(line, "surrogateescape" if by_byte else "strict")
        text = text.removesuffix("\r") if self.vocab.has_plain_text else text
        data = text.encode("utf-8", "surrogateescape")
        source, newline = (data, b"\n") if by_byte else (text, "\n")
        if self.score_end or (self.carry_memory and self.newline):
            source += newline
        return _Line(text, len(data) + self.score_end, self.vocab.encode(source))

    def _result(self, line: _Line, token_nll: np.ndarray, first: int = 0) -> LineScore:
        """The score of a line from the nll of all its tokens, of which those from `first` on count."""
        n = len(line.ids)
        end = n if self.score_end or not self.carry_memory else n - len(self.newline)
        first = min(first, end)
        counted = np.full([n], np.nan, self.lm.loss_dtype)
        counted[first:end] = token_nll[first:end]
        return LineScore(*line, counted, float(token_nll[first:end].sum(dtype=np.float64)), end - first)

    # ---------------------------------------------------------------------------------------------- tokens to scores

    def _each_by_itself(self, lines: list[_Line]) -> list[LineScore]:
        texts = [np.concatenate([self.start, line.ids]) for line in lines]
        dtype = self.lm.loss_dtype
        found = [np.full([len(text)], np.nan, dtype) for text in texts]  # nothing predicts a first token
        for rows in self._batches(np.array([len(text) - 1 for text in texts])):
            for i, nll in zip(rows, self._nll([texts[i] for i in rows]), strict=True):
                found[i][1:] = nll
        n, first = len(self.start), int(not len(self.start))
        return [self._result(line, nll[n:], first) for line, nll in zip(lines, found, strict=True)]

    def _batches(self, lengths: np.ndarray) -> Iterator[np.ndarray]:
        """The rows of every batch, the longest first; none of the length 0."""
        some = np.flatnonzero(lengths > 0)

        def fitting(left):
            return self.batch_tokens // min(lengths[some[left[0]]], self.segment)

        return (some[rows] for rows in by_length(-lengths[some], fitting))

    def _nll(self, texts: list[np.ndarray]) -> list[np.ndarray]:
        """The nll of every token of the texts but their first ones."""
        ids = padded(texts)
        tokens, labels = ids[:, :-1], ids[:, 1:]
        if tokens.shape[1] <= self.segment:
            nll = self._first_nll(tokens, labels).numpy()
        else:
            reader = self._reader(len(texts))
            starts = range(0, tokens.shape[1], self.segment)
            pieces = [reader(*(x[:, i : i + self.segment] for x in (tokens, labels))) for i in starts]
            nll = np.concatenate(pieces, 1)
        return [row[: len(text) - 1] for row, text in zip(nll, texts, strict=True)]

    def _reader(self, batch_size: int) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
        """A function of tokens and labels `[batch_size, n]` that returns their nll, the memory going on."""
        carried = self.lm.start_evaluation(batch_size, self.segment)

        def read(tokens, labels):
            nonlocal carried
            nll, _, carried = self._next_nll(tf.constant(tokens), tf.constant(labels), carried)
            return nll.numpy()

        return read

    def _as_one_text(self, blocks: Iterable[list[_Line | LineError]]) -> Iterator[list[LineScore | LineError]]:
        """As `_each_by_itself`, in segments of the whole text."""
        read, uncounted = self._reader(1), int(not len(self.start))
        start = _Line("", 0, self.start)
        lines = collections.deque([start])  # that are not done
        text = self.start  # tokens to read
        found = np.full([1], np.nan, self.lm.loss_dtype)  # nll to hand out, of the first none
        for block in itertools.chain(blocks, [None]):
            lines.extend(block or [])
            new = [line.ids for line in block or [] if not isinstance(line, LineError)]
            text, nll, scores = np.concatenate([text, *new]), [found], []
            while len(text) > (self.segment if block is not None else 1):
                segment = text[None, : self.segment + 1]
                nll.append(read(segment[:, :-1], segment[:, 1:])[0])
                text = text[segment.size - 1 :]
            found = np.concatenate(nll)
            while lines and (isinstance(lines[0], LineError) or len(lines[0].ids) <= len(found)):
                line = lines.popleft()
                if isinstance(line, LineError):
                    scores.append(line)
                    continue
                if line is not start:
                    scores.append(self._result(line, found[: len(line.ids)], uncounted))
                found = found[len(line.ids) :]
                uncounted *= not len(line.ids)
            yield scores
