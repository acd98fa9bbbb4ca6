"""The signatures of a served encoder-decoder.

Shapes:
    B: batch      S: source      T: target      K: n_best      N: symbols of the longest row of a result
"""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from txl_tf.config import WEIGHT_TYPES, SearchConfig, one_of
from txl_tf.data.pairs.parallel import END, PADDING, START
from txl_tf.layers.common.ops import cross_entropy
from txl_tf.models.decoding.beam_search import beam_search, sample_sequences
from txl_tf.models.decoding.sampling import check_integer
from txl_tf.models.vanilla.transformer import Transformer
from txl_tf.models.vanilla.translator import most_symbols
from txl_tf.serving.request import RequestLimits, StoredModel, check_ids
from txl_tf.serving.text import Check, GraphTokenizer, require, require_all

_NO_VOCABULARY = "this model was exported without its vocabularies: it takes and gives ids, see translate and score"


class TranslationLimits(RequestLimits):
    """`RequestLimits` of an encoder-decoder: a row reads a source and writes a target."""

    def __init__(self, model: Transformer, beam_size: int, max_rows: int | None, max_tokens: int):
        width = 4 * model.d_model
        self.symbol_bytes = 8 * width + 4 * model.dff  # of the encoder's states
        self.score_bytes = 4 * model.num_heads  # of a pair of symbols
        self.cache_bytes = 2 * 2 * model.num_layers * width * beam_size  # of a symbol; a step has an old and a new one
        self.fresh_bytes = 16 * model.target_vocab_size * beam_size
        super().__init__(max_rows, max_tokens)

    def row_bytes(self, tokens, new_tokens=0):
        read = tokens * (self.symbol_bytes + tokens * self.score_bytes)
        return self.fresh_bytes + read + (tokens + new_tokens + 50) * self.cache_bytes


class TranslationSignatures(StoredModel):
    """The signatures of a served encoder-decoder.

        translate(source [B, S]) -> ids [B, K, N], scores [B, K], lengths [B, K]
        score(source [B, S], target [B, T]) -> nll [B, T]
        translate_text(text [B]) -> text [B, K], scores [B, K]
        score_text(text [B], target_text [B]) -> nll [B, N], symbols [B, N], lengths [B]

    Ids are int32, 0 at padding. Sources and targets end with the end symbol, id 2, and have no start symbol. Scores and
    nll are float32, nats; `lengths` count the end symbol. How targets are looked for is decided at the export. Texts
    are single lines. Without vocabularies, the signatures of text fail with a message that says so.

    Args:
        model: `Transformer`.
        weights: type the weights are stored in.
        search: `SearchConfig`.
        max_tokens: most symbols of a source or of a target.
        texts: `GraphTokenizer` of sources and of targets; `None` for ids alone.
        max_rows: most rows of a request.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self, model: Transformer, weights: str, search: SearchConfig, max_tokens: int | None = None,
        texts: list[GraphTokenizer] | None = None, max_rows: int | None = None,
    ):  # fmt: skip
        one_of(WEIGHT_TYPES)("weights", weights)
        max_tokens = model.max_len if max_tokens is None else max_tokens
        check_integer("max_tokens", max_tokens, 1, model.max_len)
        if max_rows is not None:
            check_integer("max_rows", max_rows, 1)
        super().__init__(model, weights)
        self.search, self.texts, self.max_tokens = search, texts, max_tokens
        self.limits = TranslationLimits(model, search.beam_size, max_rows, max_tokens)
        self.resources.texts = texts

    @property
    def warmup_values(self) -> dict:
        """Of `write_warmup`: the first symbol that is text."""
        first = [text.vocab.symbols[END + 1] for text in self.texts] if self.texts else [None, None]
        return {"source": END, "target": END, "text": first[0], "target_text": first[1]}

    def signatures(self) -> dict[str, Callable]:
        ids, text = tf.TensorSpec([None, None], tf.int32), tf.TensorSpec([None], tf.string)
        return self.concrete(
            {
                self.translate: {"source": ids},
                self.score: {"source": ids, "target": ids},
                self.translate_text: {"text": text},
                self.score_text: {"text": text, "target_text": text},
            }
        )

    # ------------------------------------------------------------------------------------------------ signatures

    def translate(self, source: tf.Tensor) -> dict:
        ids, scores = self._search(self._check_rows("source", source, self.model.input_vocab_size))
        lengths = tf.reduce_sum(tf.cast(ids != PADDING, tf.int32), -1)
        longest = tf.reduce_max(tf.pad(tf.reshape(lengths, [-1]), [[0, 1]]))
        return {"ids": ids[..., :longest], "scores": scores, "lengths": lengths}

    def score(self, source: tf.Tensor, target: tf.Tensor) -> dict:
        found = tf.shape(target)[0]
        same = require(tf.shape(source)[0] == found, "target must have as many rows as source", found)
        with tf.control_dependencies([same]):
            source = self._check_rows("source", source, self.model.input_vocab_size)
        return {"nll": self._nll(source, self._check_rows("target", target, self.model.target_vocab_size))}

    def translate_text(self, text: tf.Tensor) -> dict:
        if self.texts is None:
            return self._refuse(text=tf.string, scores=tf.float32)
        ids, scores = self._search(self._encode("text", text, self.texts[0]))
        ends = tf.cast((ids == END) | (ids == PADDING), tf.int32)
        lengths = tf.reduce_sum(tf.cast(tf.cumsum(ends, -1) == 0, tf.int32), -1)
        n_best, longest = tf.unstack(tf.shape(ids)[1:])
        texts = self.texts[1].decode(tf.reshape(ids, [-1, longest]), tf.reshape(lengths, [-1]))
        return {"text": tf.reshape(texts, [-1, n_best]), "scores": scores}

    def score_text(self, text: tf.Tensor, target_text: tf.Tensor) -> dict:
        if self.texts is None:
            return self._refuse(nll=tf.float32, symbols=tf.string, lengths=tf.int32)
        found = tf.shape(target_text)[0]
        same = require(tf.shape(text)[0] == found, "target_text must have as many rows as text", found)
        with tf.control_dependencies([same]):
            source = self._encode("text", tf.identity(text), self.texts[0])
        labels = self._encode("target_text", target_text, self.texts[1])
        symbols = tf.where(labels == PADDING, "", self.texts[1].spell(labels))
        lengths = tf.reduce_sum(tf.cast(labels != PADDING, tf.int32), 1)
        return {"nll": self._nll(source, labels), "symbols": symbols, "lengths": lengths}

    # ------------------------------------------------------------------------------------------------- their parts

    def _search(self, source: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Targets `[B, K, N]` and scores `[B, K]`."""
        search = self.search
        most = self._new_tokens(tf.shape(source)[1])
        if search.beam_size == 1:
            ids, scores = sample_sequences(self.model, source, START, END, most, None)
            return ids[:, None], scores[:, None]
        found = beam_search(self.model, source, START, END, most, search.beam_size, search.length_penalty)
        return tuple(part[:, : search.n_best] for part in found)

    def _nll(self, source: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        """The nll of targets `[B, T]`, 0 at padding."""
        target = tf.pad(labels[:, :-1], [[0, 0], [1, 0]], constant_values=START)
        logits = tf.reshape(self.model((source, target)), [-1, self.model.target_vocab_size])
        nll = tf.reshape(cross_entropy(tf.reshape(labels, [-1]), logits), tf.shape(labels))
        return tf.where(labels == PADDING, 0.0, nll)

    def _check_rows(self, name: str, ids: tf.Tensor, n_symbols: int) -> tf.Tensor:
        rows, length = tf.unstack(tf.shape(ids))
        padding = tf.cast(ids == PADDING, tf.int32)
        gap = tf.reduce_any(padding[:, 1:] < padding[:, :-1])
        empty = tf.reduce_any(tf.reduce_all(ids == PADDING, 1))
        checks = [
            *self.limits.check_rows(name, rows),
            Check((length >= 1) & (length <= self.max_tokens), f"{name} must be 1 to {self.max_tokens} a row", length),
            self.limits.check_size(name, rows, length, self._new_tokens(length)),
            Check(~gap, f"{name} must have padding, id {PADDING}, at the end of a row alone", gap),
            Check(~empty, f"{name} must have a symbol in every row", empty),
        ]
        with tf.control_dependencies([require_all(checks)]):
            return check_ids(name, tf.identity(ids), n_symbols)

    def _new_tokens(self, length: tf.Tensor) -> tf.Tensor:
        return most_symbols(self.search, length, self.model.max_len)

    def _encode(self, name: str, text: tf.Tensor, tokenizer: GraphTokenizer) -> tf.Tensor:
        """Ids `[B, N]` with their end symbols, 0 at padding."""
        rows = tf.shape(text)[0]
        with tf.control_dependencies(
            [require_all([*self.limits.check_rows(name, rows), self.limits.check_bytes(text)])]
        ):
            ids = tokenizer.encode(tf.strings.join([text, "\n"]), name)
        lengths = tf.cast(ids.row_lengths(), tf.int32)
        own = ids.with_values(tf.cast(ids.values <= END, tf.int32))
        reserved = tf.reduce_sum(own, 1)
        longest = tf.reduce_max(tf.pad(lengths, [[0, 1]], constant_values=1))
        checks = [
            Check(
                lengths <= self.max_tokens,
                f"{name} must be at most {self.max_tokens} symbols, its end included",
                lengths,
            ),
            Check(reserved == 1, f"{name} must be one line without the symbols of padding, start and end", reserved),
            Check(lengths > 1, f"{name} must not be empty", lengths),
            self.limits.check_size(name, rows, longest, self._new_tokens(longest)),
        ]
        with tf.control_dependencies([require_all(checks)]):
            return ids.to_tensor(PADDING)

    def _refuse(self, **results: tf.DType) -> dict:
        """Results of these types, which are never given."""
        with tf.control_dependencies([tf.debugging.Assert(False, [_NO_VOCABULARY])]):
            return {name: tf.identity(tf.zeros([0, 1], kind)) for name, kind in results.items()}
