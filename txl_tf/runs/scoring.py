r"""Scores of lines of text, such as n-best lists to rescore or a corpus to filter.

    for score in score_lines(lm, vocab, open("lines.txt")):
        score.nll, score.tokens, score.ppl, score.bpb, score.token_nll

Lines are read in blocks. The model scores the lines of a block in batches of similar length. Shorter lines are padded
on the right, which causal attention does not see, so the score of a line does not depend on the other lines. The scores
have the order of the lines.

The score of a line is that of `lm.score`. With the start s, the line a b and its end n:

    tokens   s a b
    labels   a b n

A line of more than `segment` tokens is read segment by segment, each with the memory of the segment before. With
`carry_memory`, all lines are read like this, as one text: s a b n c d n ...

With `continuations`, a line is a context, a tab and a continuation, and only the tokens of the continuation count.
Context and continuation are cut into tokens as one text.
"""

from __future__ import annotations

import collections
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from txl_tf.config import ScoringConfig, check_position_count
from txl_tf.data.batching import by_length, padded
from txl_tf.data.lines import LINE, LineError, encoded, in_blocks, in_places, text_of
from txl_tf.data.vocabulary import Vocab, line_start_ids, newline_ids, unescape
from txl_tf.errors import ParameterError
from txl_tf.language.language_model import LanguageModel
from txl_tf.runs.metrics import to_metric
from txl_tf.schema import check_names, keywords_of

SEGMENT = 512  # tokens, the default of `segment`


class LineScore(NamedTuple):
    """The score of a line.

    All tokens count except the first one if nothing predicts it, the newline without `score_end`, and the context with
    `continuations`.

    Attributes:
        text: the line without its newline. Bytes that are not UTF-8 are decoded by `surrogateescape`.
        bytes: number of bytes in UTF-8, with the newline if it counts, and without the context of a continuation.
        ids: int32 `[n]`, the tokens of the line, also those that do not count.
        token_nll: float32 (float64 if the model's dtype is) `[n]`, nats; NaN for a token that does not count.
        nll: nats, the sum over the tokens that count.
        tokens: number of tokens that count.
    """

    text: str
    bytes: int
    ids: np.ndarray
    token_nll: np.ndarray
    nll: float
    tokens: int

    @property
    def ppl(self) -> float:
        """Perplexity, the exponential of the mean nll; NaN if no token counts."""
        return to_metric(self.nll / self.tokens, "ppl") if self.tokens else math.nan

    @property
    def bpb(self) -> float:
        """Bits per byte; NaN if no token counts."""
        return to_metric(self.nll / self.bytes, "bpc") if self.tokens and self.bytes else math.nan


class _Line(NamedTuple):
    """A line and its tokens, see `LineScore`. The first `context` tokens are the context, and do not count."""

    text: str
    bytes: int
    ids: np.ndarray
    context: int = 0


def score_lines(
    lm: LanguageModel, vocab: Vocab, lines: Iterable[str | bytes], name: str = "text", strict: bool = True, **options
) -> Iterator[LineScore | LineError]:
    """Scores lines of text, in their order and in bounded memory.

    Args:
        lm, vocab: language model and vocabulary, as `load_run` returns them.
        lines: lines with or without newlines at their ends, such as an open file.
        name: what error messages call the lines, such as the name of their file.
        strict: whether a line that cannot be scored raises an error. Otherwise a `LineError` takes the place of its
            score.
        **options: options of `ScoringConfig`.

    Returns:
        Iterator of `LineScore`; without `strict`, also of `LineError`.

    Raises:
        ParameterError: an option is out of its range, or the model does not fit, see `Scorer`.
        LineError: with `strict`, a line is not UTF-8; it has a symbol that the vocabulary does not have, and the
            vocabulary has no unknown symbol; or it has no tab with `continuations`. The iterator raises this error.
    """
    check_names("score_lines", options, [*keywords_of(score_lines), *ScoringConfig.names()])
    scorer = Scorer(lm, vocab, ScoringConfig(**options))
    return (score for scores in scorer.score(in_blocks(lines), name, strict) for score in scores)


def at_tab(text: str, level: str) -> tuple[str, str]:
    """Splits a line at its first tab.

    Returns:
        `(context, whole)`: the context, and context and continuation as one text without the tab. At level "word", a
        space takes the place of the tab unless one of them is empty. At level "subword", spaces at the end of the
        context belong to the continuation, because tokens begin with them.

    Raises:
        ParameterError: there is no tab.
    """
    context, tab, continuation = text.partition("\t")
    if not tab:
        allowed = "a context, a tab and a continuation"
        raise ParameterError(LINE, text, allowed, f"{LINE} has no tab: it must have {allowed}")
    if level == "word":
        return context, " ".join(filter(None, (context, continuation)))
    return context.rstrip(" ") if level == "subword" else context, context + continuation


def _as_bytes(text: str) -> bytes:
    """A text in UTF-8. Bytes that were not UTF-8, which `surrogateescape` has decoded, are the original bytes again."""
    return text.encode("utf-8", "surrogateescape")


class Scorer:
    """Scores lines of text with a language model.

    Args:
        lm: language model with the symbols of `vocab`.
        vocab: vocabulary.
        config: options.

    Attributes:
        start: int32 `[n]`, the tokens before every line. It is empty if the first token of a line is not scored, such
            as with a vocabulary with `bos`, which begins every line with this token.
        score_end: whether the end of a line counts. The vocabulary must have a symbol for it.
        continuations: whether only the part of a line after its first tab counts.
        segment: most tokens that are read at a time.

    Raises:
        ParameterError: the model has another number of symbols than the vocabulary or is compiled with static shapes,
            or `config.start` or `config.segment` does not fit it.
    """

    def __init__(self, lm: LanguageModel, vocab: Vocab, config: ScoringConfig | None = None):
        config = config or ScoringConfig()
        if len(vocab) != lm.network.n_token:
            allowed = f"the {lm.network.n_token} symbols of the model"
            raise ParameterError("vocab", len(vocab), allowed, f"vocab must hold {allowed}, got {len(vocab)}")
        if lm.static_shapes:
            message = "lm must not be compiled with static_shapes: lines have any length"
            raise ParameterError("static_shapes", True, [False], message)
        self.lm = lm
        self.vocab = vocab
        self.newline = newline_ids(vocab)
        self.start = np.array(self._start_ids(config.start), np.int32)
        self.score_end = config.score_end and bool(self.newline)
        self.carry_memory = config.carry_memory
        self.continuations = config.continuations
        self.batch_tokens = config.batch_tokens
        self.segment = config.segment or (lm.context_len if lm.has_window else SEGMENT)
        check_position_count(dict(vars(lm)), segment=self.segment)
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
        """Scores blocks of lines.

        Args:
            blocks: lists of lines.
            name, strict: see `score_lines`.
            numbers: numbers of the lines, for messages, see `encoded`.

        Returns:
            Iterator that yields, for each block, a list of the scores of its lines. With `carry_memory`, the list has
            the scores of the lines whose last token has been read by then, and a further list at the end has the
            remaining scores. A line that cannot be scored is then left out of the text.

        Raises:
            LineError: with `strict`, a line cannot be scored. No line of its block has been scored then.
        """
        counted = itertools.count(1) if numbers is None else iter(numbers)
        encoded_blocks = (
            list(encoded(block, self.encode, name, strict, itertools.islice(counted, len(block)))) for block in blocks
        )
        if self.carry_memory:
            return self._as_one_text(encoded_blocks)
        return map(functools.partial(in_places, self._each_by_itself), encoded_blocks)

    # ----------------------------------------------------------------------------------------------- text to tokens

    def _start_ids(self, start: str | None) -> list[int]:
        """The ids of the option `start`: by default (`None`) those of `line_start_ids`; for "none", no ids."""
        if start is None:
            return line_start_ids(self.vocab)
        start = unescape(start)
        if start == "none":
            return []
        if start == "\n" and self.newline:
            return self.newline
        return [self.vocab.ids[start]] if start in self.vocab.ids else self.vocab.encode(start, name="start").tolist()

    def encode(self, line: str | bytes) -> _Line:
        """The text and the tokens of a line. Raises ParameterError if the line cannot be encoded."""
        by_byte = self.vocab.level == "byte"
        text = text_of(line, "surrogateescape" if by_byte else "strict", zeros=self.vocab.has_zero_bytes)
        text = text.removesuffix("\r") if self.vocab.has_plain_text else text  # as the training text was read
        context, whole = at_tab(text, self.vocab.level) if self.continuations else ("", text)
        has_end = self.score_end or bool(self.carry_memory and self.newline)
        read = whole + "\n" if has_end else whole
        ids = self._ids(read)
        size = len(_as_bytes(whole)) - len(_as_bytes(context)) + int(self.score_end)
        return _Line(text, size, ids, self._tokens_of_context(context, read, ids))

    def _tokens_of_context(self, context: str, read: str, ids: np.ndarray) -> int:
        """How many of the first tokens of a line end in its context.

        A subword may begin in the context and end in the continuation. It belongs to the continuation.

        Args:
            context: from `at_tab`.
            read: context and continuation, and perhaps the end of the line.
            ids: the tokens of `read`.
        """
        n = len(self._ids(context)) if context else 0
        if self.vocab.level != "subword" or not n:
            return n
        size = len(context.encode())

        def is_in_context(n: int) -> bool:
            """Whether the first `n` tokens end in the context."""
            return len(self.vocab.split(read, ids, n)[0]) <= size

        # The tokens of the context alone may be others than those of the line.
        while not is_in_context(n):
            n -= 1
        while n < len(ids) and is_in_context(n + 1):
            n += 1
        return n

    def _ids(self, text: str) -> np.ndarray:
        """The tokens of a text: int32 `[n]`."""
        return self.vocab.encode(_as_bytes(text) if self.vocab.level == "byte" else text)

    def _result(self, line: _Line, token_nll: np.ndarray, first: int = 0) -> LineScore:
        """Makes the score of a line.

        Args:
            line: the line.
            token_nll: `[n]`, the nll of all its tokens.
            first: index of the first token that counts.
        """
        n = len(line.ids)
        # With `carry_memory`, the tokens have a newline even if it does not count.
        end = n if self.score_end or not self.carry_memory else n - len(self.newline)
        first = min(max(first, line.context), end)
        counted = np.full([n], np.nan, self.lm.loss_dtype)
        counted[first:end] = token_nll[first:end]
        nll = float(token_nll[first:end].sum(dtype=np.float64))
        return LineScore(line.text, line.bytes, line.ids, counted, nll, end - first)

    # ---------------------------------------------------------------------------------------------- tokens to scores

    def _each_by_itself(self, lines: list[_Line]) -> list[LineScore]:
        """The scores of lines, each read as a text of its own, with the memory of a new text (zeros)."""
        texts = [np.concatenate([self.start, line.ids]) for line in lines]
        dtype = self.lm.loss_dtype
        scores = [np.full([len(text)], np.nan, dtype) for text in texts]  # nothing predicts a first token
        for rows in self.batches(np.array([len(text) - 1 for text in texts])):
            for i, nll in zip(rows, self._nll([texts[i] for i in rows]), strict=True):
                scores[i][1:] = nll
        n_start = len(self.start)
        first = 0 if n_start else 1
        return [self._result(line, nll[n_start:], first) for line, nll in zip(lines, scores, strict=True)]

    def batches(self, lengths: np.ndarray) -> Iterator[np.ndarray]:
        """The batches in which texts of these lengths are read: arrays of indices of the texts, the longest first.

        A batch has one text; or several, whose first segments have at most `batch_tokens` tokens together, with
        padding. Empty texts are in no batch.
        """
        not_empty = np.flatnonzero(lengths > 0)

        def most_rows(left: np.ndarray) -> Any:
            longest = lengths[not_empty[left[0]]]  # of the remaining texts
            return self.batch_tokens // min(longest, self.segment)

        return (not_empty[rows] for rows in by_length(-lengths[not_empty], most_rows))

    def _nll(self, texts: list[np.ndarray]) -> list[np.ndarray]:
        """For each text, the nll of every token except the first: `[n - 1]` for a text of n tokens."""
        ids = padded(texts)
        tokens = ids[:, :-1]
        labels = ids[:, 1:]
        if tokens.shape[1] <= self.segment:  # no memory is needed
            nll = self._first_nll(tokens, labels).numpy()
        else:
            reader = self._reader(len(texts))
            starts = range(0, tokens.shape[1], self.segment)
            of_segments = [reader(tokens[:, i : i + self.segment], labels[:, i : i + self.segment]) for i in starts]
            nll = np.concatenate(of_segments, 1)
        return [row[: len(text) - 1] for row, text in zip(nll, texts, strict=True)]

    def _reader(self, batch_size: int) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
        """A function of tokens and labels, `[batch_size, n]` each, that returns the nll of the labels.

        The first call reads with the memory of a new text, each later call with the memory of the call before.
        """
        carried = self.lm.start_evaluation(batch_size, self.segment)

        def read(tokens: np.ndarray, labels: np.ndarray) -> np.ndarray:
            nonlocal carried
            nll, _, carried = self._next_nll(tf.constant(tokens), tf.constant(labels), carried)
            return nll.numpy()

        return read

    def _as_one_text(self, blocks: Iterable[list[_Line | LineError]]) -> Iterator[list[LineScore | LineError]]:
        """Yields scores of lines that are read as one text, segment by segment. See `score`."""
        read = self._reader(1)
        n_unpredicted = 0 if len(self.start) else 1  # tokens of the next line that nothing predicts
        start = _Line("", 0, self.start)
        waiting: collections.deque[_Line | LineError] = collections.deque([start])  # lines without a score
        unread = self.start  # tokens to read: the last label of the segment before, and tokens after it
        # The nll of the tokens of the lines in `waiting`, as far as they are read. Nothing predicts the first token of
        # the text, so its nll is NaN.
        nll = np.full([1], np.nan, self.lm.loss_dtype)
        for block in itertools.chain(blocks, [None]):  # `None`: the end of the text
            waiting.extend(block or [])
            new = [line.ids for line in block or [] if not isinstance(line, LineError)]
            unread = np.concatenate([unread, *new])
            of_segments = [nll]
            while len(unread) > (self.segment if block is not None else 1):
                segment = unread[None, : self.segment + 1]  # [1, T + 1]: T tokens, and T labels one position later
                of_segments.append(read(segment[:, :-1], segment[:, 1:])[0])
                unread = unread[segment.size - 1 :]  # the last label is the first token of the next segment
            nll = np.concatenate(of_segments)
            scores: list[LineScore | LineError] = []
            while waiting and (isinstance(waiting[0], LineError) or len(waiting[0].ids) <= len(nll)):
                line = waiting.popleft()
                if isinstance(line, LineError):
                    scores.append(line)
                    continue
                if line is not start:
                    scores.append(self._result(line, nll[: len(line.ids)], n_unpredicted))
                nll = nll[len(line.ids) :]
                if len(line.ids):
                    n_unpredicted = 0
            yield scores
