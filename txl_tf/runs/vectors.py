"""One vector for each line of text: the mean of the hidden states of its tokens, for search, clustering and probes.

    vectors = text_vectors("runs/quickstart", open("lines.txt"))     # float32 [lines, d_model]

Before each line, the model reads the start tokens of `scoring.py`. The mean includes neither these tokens nor padding.
A line of more than `segment` tokens is read segment by segment, each with the memory of the segment before.

Shapes:
    B: lines of a batch      N: tokens of the longest line, with the start      T: tokens of a segment      E: d_model
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Sized
from typing import Any

import numpy as np
import tensorflow as tf

from txl_tf.config import ScoringConfig, at_least
from txl_tf.data.batching import padded
from txl_tf.data.lines import LineError, encoded, in_blocks, in_places
from txl_tf.data.vocabulary import Vocab
from txl_tf.errors import ParameterError
from txl_tf.kernels.dtypes import at_least_float32
from txl_tf.language.language_model import LanguageModel
from txl_tf.runs.folder import RunFolder
from txl_tf.runs.scoring import Scorer
from txl_tf.schema import takes_keyword


def text_vectors(
    run: str | os.PathLike | tuple[LanguageModel, Vocab],
    lines: Iterable[str | bytes],
    *,
    layer: int = -1,
    segment: int | None = None,
    batch_tokens: int = 1024,
    name: str = "text",
    strict: bool = True,
) -> np.ndarray:
    """Computes one vector for each line of text: the mean of the hidden states of its tokens.

    Args:
        run: folder of a run of a language model; or `(lm, vocab)`, as `load_run` returns them.
        lines: lines with or without newlines at their ends, such as an open file.
        layer: the layer whose output to take: 0 for the embeddings, 1 for the first layer, ..., -1 for the last layer.
        segment: most tokens to read at a time. `None`: 512, or `context_len` of the vanilla language model.
        batch_tokens: tokens of a batch of lines, with padding. The vectors do not depend on it, up to rounding.
        name: what error messages call the lines, such as the name of their file.
        strict: whether a line without a vector raises an error. Otherwise its vector is NaN.

    Returns:
        float32 (float64 if the model's dtype is) array `[lines, d_model]`.

    Raises:
        ParameterError: the run is not one of a language model, or an argument is out of its range, or a line is
            neither a string nor bytes.
        LineError: with `strict`, a line has no tokens, is not UTF-8, or has a symbol that the vocabulary does not have.
    """
    if isinstance(run, str | os.PathLike):
        folder = RunFolder(run, "language_model")
        run = folder.load_model(), folder.load_vocab()
    reader = TextVectors(*run, layer, segment, batch_tokens)
    # An iterator becomes a list, in which `None` is no pause, because no vector is returned before the last line.
    blocks = reader.vectors(in_blocks(lines if isinstance(lines, Sized) else [*lines]), name, strict)
    missing = np.full([reader.width], np.nan, reader.dtype)
    rows = [missing if isinstance(vector, LineError) else vector for block in blocks for vector in block]
    return np.stack(rows) if rows else np.zeros([0, reader.width], reader.dtype)


class TextVectors:
    """Computes the vectors of lines with a language model. For the arguments, see `text_vectors`.

    Attributes:
        width: number of elements of a vector, `d_model`.
        dtype: dtype of a vector.

    Raises:
        ParameterError: the model has no such layer, its network cannot return the output of this layer, or another
            argument is out of its range.
    """

    def __init__(
        self, lm: LanguageModel, vocab: Vocab, layer: int = -1, segment: int | None = None, batch_tokens: int = 1024
    ):
        n_layer = lm.network.n_layer
        at_least(-n_layer - 1, n_layer)("layer", layer)
        self.layer = layer % (n_layer + 1)
        self.network = lm.network
        self.width: int = lm.network.d_model
        self.dtype = lm.loss_dtype
        if self.layer < n_layer and not takes_keyword(self.network.call, "output_hidden_states"):
            allowed = (
                f"-1 or {n_layer}, because the call of {type(self.network).__name__} returns no other hidden states"
            )
            raise ParameterError("layer", layer, allowed)
        config = ScoringConfig(score_end=False, segment=segment, batch_tokens=batch_tokens)
        self._scorer = Scorer(lm, vocab, config)
        self._sums_graph = tf.function(self._sums, autograph=False, reduce_retracing=True)

    def vectors(
        self,
        blocks: Iterable[list[str | bytes]],
        name: str = "text",
        strict: bool = True,
        numbers: Iterable[int] | None = None,
    ) -> Iterator[list[np.ndarray | LineError]]:
        """Computes the vectors of blocks of lines. Arguments and errors: see `Scorer.score`.

        Returns:
            Iterator of a list for each block, with the vector `[d_model]` or the error of each line.
        """
        line_numbers = itertools.count(1) if numbers is None else iter(numbers)
        for block in blocks:
            ids = encoded(block, self._encode, name, strict, itertools.islice(line_numbers, len(block)))
            yield in_places(self._mean_states, ids)

    def _encode(self, line: str | bytes) -> np.ndarray:
        """The tokens of a line, int32 `[n]`. Raises ParameterError if there are none, or if it cannot be encoded."""
        ids = self._scorer.encode(line).ids
        if not len(ids):
            raise ParameterError("line", line, "a line with tokens", "the line has no tokens, so it has no vector")
        return ids

    def _mean_states(self, lines: list[np.ndarray]) -> list[np.ndarray]:
        """The vectors of lines, `[E]` each, in the order of the lines.

        Args:
            lines: the tokens of each line, without the start tokens.
        """
        start = self._scorer.start
        vectors: list[Any] = [None] * len(lines)
        for rows in self._scorer.batches(np.array([len(start) + len(ids) for ids in lines])):
            tokens = padded([np.concatenate([start, lines[i]]) for i in rows])  # [B, N]
            lengths = np.array([len(lines[i]) for i in rows])  # [B]
            # 1 at the tokens of the line, 0 at the start tokens and at padding: [B, N]
            position = np.arange(tokens.shape[1]) - len(start)
            weights = ((position >= 0) & (position < lengths[:, None])).astype(self.dtype)
            total = 0.0  # [B, E]
            mems = self.network.initial_mems(len(rows))
            for first in range(0, tokens.shape[1], self._scorer.segment):
                columns = slice(first, first + self._scorer.segment)
                sums, mems = self._sums_graph(tf.constant(tokens[:, columns]), tf.constant(weights[:, columns]), mems)
                total = total + sums.numpy()
            for i, vector in zip(rows, total / lengths[:, None].astype(self.dtype), strict=True):
                vectors[i] = vector
        return vectors

    def _sums(self, tokens: tf.Tensor, weights: tf.Tensor, mems: Any) -> tuple[Any, Any]:
        """Reads a segment, and sums its hidden states. Padding on the right has no effect on the tokens before it.

        Args:
            tokens: int32 `[B, T]`.
            weights: `[B, T]`, weights of the tokens, 1 or 0.
            mems: the memory before the segment.

        Returns:
            `(sums, new_mems)`: the weighted sums of the hidden states, `[B, E]`, and the memory after the segment.
        """
        if self.layer == self.network.n_layer:
            hidden, new_mems = self.network(tokens, mems=mems)
        else:
            _, new_mems, states = self.network(tokens, mems=mems, output_hidden_states=True)
            hidden = states[self.layer]
        return tf.einsum("bt,bte->be", weights, tf.cast(at_least_float32(hidden), weights.dtype)), new_mems
