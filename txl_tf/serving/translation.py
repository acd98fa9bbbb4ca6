"""The signatures of a served encoder-decoder.

Shapes:
    B: batch      S: source      T: target      K: n_best      N: tokens of the longest row of a result
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from txl_tf.config import SearchConfig
from txl_tf.data.pairs.parallel import END_ID, PADDING, START_ID
from txl_tf.data.vocabulary import Vocab
from txl_tf.errors import ParameterError
from txl_tf.kernels import cross_entropy
from txl_tf.kernels.packing import pack, unpack
from txl_tf.schema import check_names
from txl_tf.serving.request import (
    Check,
    RequestLimits,
    StoredModel,
    checked,
    first_row_where,
    in_vocabulary,
    largest,
    same_rows,
)
from txl_tf.serving.signatures import Served, serves
from txl_tf.serving.subwords import tokenizer_of
from txl_tf.serving.tables import GraphTokenizer, named_vocabs
from txl_tf.vanilla.generation import allowed_symbols, beam_search, check_suppressed, sample_sequences
from txl_tf.vanilla.transformer import Transformer
from txl_tf.vanilla.translator import assumed_length, check_search, most_symbols, never_written

logger = logging.getLogger("txl_tf")


def limits_of(model: Transformer, beam_size: int, max_rows: int | None, max_tokens: int) -> RequestLimits:
    """The largest request to translate. The size of a row is an estimate, in bytes, of its arrays.

    A row reads a source and generates `beam_size` targets. The decoder keeps the keys and values of all.
    """
    source_bytes = _row_bytes(model)
    cache_bytes = 2 * model.num_layers * 4 * model.d_model  # keys and values of a token
    scores_bytes = 16 * model.target_vocab_size * beam_size  # the scores of the symbols of the vocabulary

    def row_bytes(tokens: Any, new_tokens: Any = 0) -> Any:
        # A step copies the cache of the targets. To be safe, they have 50 more tokens.
        return scores_bytes + source_bytes(tokens) + (tokens + 2 * beam_size * (new_tokens + 50)) * cache_bytes

    return RequestLimits(row_bytes, max_rows, max_tokens)


def target_limits_of(model: Transformer, max_rows: int, max_tokens: int) -> RequestLimits:
    """The largest request to score targets. The decoder computes the logits of all their tokens at once."""
    states_bytes = _row_bytes(model)

    def row_bytes(tokens: Any, new_tokens: Any = 0) -> Any:
        return states_bytes(tokens) + tokens * 4 * model.target_vocab_size

    return RequestLimits(row_bytes, max_rows, max_tokens, row="{} tokens")


def _row_bytes(model: Transformer) -> Callable[[Any], Any]:
    """Returns a function of the number of tokens of a row: how many bytes its states and attention take, roughly."""
    width_bytes = 4 * model.d_model
    token_bytes = 8 * width_bytes + 4 * model.dff  # the states
    pair_bytes = 4 * model.num_heads  # the scores of a pair of tokens

    def row_bytes(tokens: Any) -> Any:
        return tokens * (token_bytes + tokens * pair_bytes)

    return row_bytes


@serves("encoder_decoder", "an encoder-decoder")
def served_encoder_decoder(
    model: Transformer,
    vocabs: Sequence[Vocab] | None,
    *,
    search: dict | None = None,
    suppress_tokens: Sequence[int] | None = None,
) -> Served:
    """Returns how an encoder-decoder is served. For the arguments, see `export_saved_model`.

    Logs a warning if neither the model nor `search` limits the lengths of translations, so that a limit is assumed.

    Raises:
        ParameterError: a name or value of `search`, an id or a vocabulary is wrong.
    """
    if not isinstance(search, Mapping | None):
        raise ParameterError("search", search, f"a dictionary of some of {', '.join(SearchConfig.names())}")
    check_names("export_saved_model's search", {**(search or {})}, SearchConfig.names())
    config = SearchConfig(**(search or {}))
    sizes = {"source_vocab": model.input_vocab_size, "target_vocab": model.target_vocab_size}
    named = {} if vocabs is None else named_vocabs(vocabs, sizes, "Transformer")
    if suppress_tokens is None:
        never = never_written(config, named.get("target_vocab"))
    elif config.allow_special:
        raise ParameterError("suppress_tokens", suppress_tokens, "left out with allow_special")
    else:
        never = sorted(check_suppressed(suppress_tokens, END_ID, model.target_vocab_size))
    if assumed := assumed_length(config, model):
        logger.warning("%s", assumed)
    signatures = functools.partial(TranslationSignatures, search=config, never=never)
    return Served(signatures, named, tokenizer_of, model.max_len)


class TranslationSignatures(StoredModel):
    """The signatures of a served encoder-decoder.

        translate(source [B, S]) -> ids [B, K, N], scores [B, K], lengths [B, K]
        score(source [B, S], target [B, T]) -> nll [B, T]
        translate_text(text [B]) -> text [B, K], scores [B, K]
        score_text(text [B], target_text [B]) -> nll [B, N], symbols [B, N], lengths [B]

    Ids are int32, 0 at padding. Sources and targets end with the end symbol, id 2, and have no start symbol. Scores and
    nll are float32, in nats; `lengths` count the end symbol. Texts are single lines.

    Args:
        model: the encoder-decoder.
        tables: `{name: tokenizer}`, first of sources, then of targets; `None` for ids alone.
        search: the options of the search, for all requests.
        never: ids that no target may contain. By default, the ids that `never_written` returns for the vocabulary of
            targets.
        weights, max_tokens, max_rows: see `export_saved_model`.
    """

    def __init__(
        self, model: Transformer, tables: dict[str, Any] | None = None, *, weights: str = "float32",
        max_tokens: int | None = None, max_rows: int | None = None, search: SearchConfig | None = None,
        never: Sequence[int] | None = None,
    ):  # fmt: skip
        super().__init__(model, weights)
        self.search = search or SearchConfig()
        self.texts = list((tables or {}).values())
        target_vocab = self.texts[1].vocab if self.texts else None
        self.never = never_written(self.search, target_vocab) if never is None else list(never)
        check_search(self.search, model.target_vocab_size, model.max_len, self.never)
        max_tokens = max_tokens or model.max_len
        self.limits = limits_of(model, self.search.beam_size, max_rows, max_tokens)
        self.target_limits = target_limits_of(model, self.limits.max_rows, max_tokens)
        self.resources.texts = self.texts
        self.specs = (tf.TensorSpec([None, None], tf.int32), tf.TensorSpec([None], tf.string))
        self._best_targets = self.shared(self._search, self.specs[0])
        self._nll_of_pairs = self.shared(self._nll, self.specs[0], self.specs[0])
        self.warmup_values = {"source": END_ID, "target": END_ID}
        for name, text in zip(("text", "target_text"), self.texts, strict=False):
            self.warmup_values[name] = text.vocab.symbols[END_ID + 1]  # the first symbol that is text

    def signatures(self) -> dict[str, Any]:
        """The graphs of the signatures, `{name: graph}`. Without vocabularies, signatures of text are left out."""
        ids, text = self.specs
        arguments = {self.translate: {"source": ids}, self.score: {"source": ids, "target": ids}}
        if self.texts:
            arguments |= {self.translate_text: {"text": text}, self.score_text: {"text": text, "target_text": text}}
        return self.concrete(arguments)

    # ------------------------------------------------------------------------------------------------- signatures

    def translate(self, source: tf.Tensor) -> dict[str, tf.Tensor]:
        """The best targets of sources of ids: padded ids, scores and lengths."""
        ids, scores = self._best_targets(
            checked(self._id_checks("source", source, self.model.input_vocab_size), source)
        )
        lengths = tf.reduce_sum(tf.cast(ids != PADDING, tf.int32), -1)
        longest = largest(tf.reshape(lengths, [-1]))
        return {"ids": ids[..., :longest], "scores": scores, "lengths": lengths}

    def score(self, source: tf.Tensor, target: tf.Tensor) -> dict[str, tf.Tensor]:
        """The nll of each symbol of the targets, given the sources; 0 at padding."""
        checks = [
            same_rows("target", target, "source", source),
            *self._id_checks("source", source, self.model.input_vocab_size),
            *self._id_checks("target", target, self.model.target_vocab_size, self.target_limits),
        ]
        return {"nll": self._nll_of_pairs(*checked(checks, source, target))}

    def translate_text(self, text: tf.Tensor) -> dict[str, tf.Tensor]:
        """The best targets of texts: strings without the end, and scores."""
        ids, scores = self._best_targets(self._encode("text", text, self.texts[0]))
        ends = tf.cast((ids == END_ID) | (ids == PADDING), tf.int32)
        lengths = tf.reduce_sum(tf.cast(tf.cumsum(ends, -1) == 0, tf.int32), -1)
        n_best, longest = tf.unstack(tf.shape(ids)[1:])
        texts = self.texts[1].decode(tf.reshape(ids, [-1, longest]), tf.reshape(lengths, [-1]))
        return {"text": tf.reshape(texts, [-1, n_best]), "scores": scores}

    def score_text(self, text: tf.Tensor, target_text: tf.Tensor) -> dict[str, tf.Tensor]:
        """The nll of each symbol of target texts, given the source texts; the symbols; and their number."""
        text, target_text = checked([same_rows("target_text", target_text, "text", text)], text, target_text)
        source = self._encode("text", text, self.texts[0])
        labels = self._encode("target_text", target_text, self.texts[1], self.target_limits)
        symbols = tf.where(labels == PADDING, "", self.texts[1].spell(labels))
        lengths = tf.reduce_sum(tf.cast(labels != PADDING, tf.int32), 1)
        return {"nll": self._nll_of_pairs(source, labels), "symbols": symbols, "lengths": lengths}

    # ------------------------------------------------------------------------------------------------- their parts

    def _search(self, source: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """The best targets `[B, K, N]` of sources and their scores `[B, K]`."""
        search = self.search
        lengths = tf.math.count_nonzero(source != PADDING, 1, dtype=tf.int32)
        allowed = allowed_symbols(self.model, self.never)
        n_columns = self._new_tokens(tf.shape(source)[1])
        # The limit of a row depends on the length of its own source alone, not on longer sources in the batch.
        limits = tf.broadcast_to(self._new_tokens(lengths), tf.shape(lengths))
        if search.beam_size == 1:
            ids, scores = sample_sequences(self.model, source, START_ID, END_ID, n_columns, None, limits, allowed)
            return ids[:, None], scores[:, None]
        return beam_search(
            self.model, source, START_ID, END_ID, n_columns, search.beam_size, search.n_best, search.length_penalty,
            limits, allowed,
        )  # fmt: skip

    def _nll(self, source: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        """The nll of each symbol of the targets, `[B, T]`; 0 at padding, which may be anywhere."""
        mask = labels != PADDING
        _, packed = pack(mask, labels)  # moves padding to the end of each row
        target = tf.pad(packed[:, :-1], [[0, 0], [1, 0]], constant_values=START_ID)
        logits = tf.reshape(self.model((source, target)), [-1, self.model.target_vocab_size])
        nll = tf.reshape(cross_entropy(tf.reshape(packed, [-1]), logits), tf.shape(packed))
        return unpack(mask, nll)  # moves the results to the positions of the labels

    def _new_tokens(self, length: tf.Tensor) -> Any:
        """The largest number of symbols of a target whose source has `length` symbols, both with their ends."""
        return most_symbols(self.search, length, self.model)

    def _id_checks(self, name: str, ids: tf.Tensor, n_token: int, limits: RequestLimits | None = None) -> list[Check]:
        """Checks of the size, the rows and the range of the argument `name`, ids `[B, T]` of `n_token` symbols.

        They check the size with `limits`, by default the limits of a source that is translated.
        """
        limits = limits or self.limits
        empty = tf.reduce_all(ids == PADDING, 1)
        return [
            *limits.size_checks(name, ids, self._new_tokens(tf.shape(ids)[1])),
            Check(~empty, f"{name} must have a symbol in every row", lambda: tf.boolean_mask(ids, empty)[:1]),
            in_vocabulary(name, ids, n_token),
        ]

    def _encode(
        self, name: str, text: tf.Tensor, tokenizer: GraphTokenizer, limits: RequestLimits | None = None
    ) -> tf.Tensor:
        """The ids of texts with their end symbols, `[B, longest]`, 0 at padding.

        Adds the checks of the argument `name` to the graph. They check the size with `limits`, by default the limits of
        a source that is translated.
        """
        limits = limits or self.limits
        rows = tf.shape(text)[0]
        ids = tokenizer.encode(tf.strings.join([limits.checked_text(name, text), "\n"]), name)
        lengths = tf.cast(ids.row_lengths(), tf.int32)
        # 1 in a valid text: its end symbol
        n_reserved = tf.reduce_sum(ids.with_values(tf.cast(ids.values <= END_ID, tf.int32)), 1)
        longest = largest(lengths, least=1)
        max_tokens = limits.max_tokens
        found = tf.strings.join(["one in row ", first_row_where(n_reserved != 1)])
        empty = tf.strings.join(["an empty text in row ", first_row_where(lengths <= 1)])
        checks = [
            Check(lengths <= max_tokens, f"{name} must be at most {max_tokens} symbols, its end included", lengths),
            Check(n_reserved == 1, f"{name} must be one line without the symbols of padding, start and end", found),
            Check(lengths > 1, f"{name} must not be empty", empty),
            limits.size_check(name, rows, longest, self._new_tokens(longest)),
        ]
        return checked(checks, ids).to_tensor(PADDING)
