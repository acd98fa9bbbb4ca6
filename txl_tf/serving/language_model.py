"""The signatures of a served language model.

Shapes:
    B: batch      T: tokens of a request      n: top_n of `next`, or sequences of a prompt
    N: tokens of the longest row of a result      S: stop strings of a row      L: tokens of the longest stop string
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from txl_tf.config import GATED_ACTIVATIONS
from txl_tf.config.checks import check_integer
from txl_tf.data.vocabulary import Vocab, line_start_ids, newline_ids
from txl_tf.language.language_model import LanguageModel
from txl_tf.serving.request import (
    Check,
    RequestLimits,
    StoredModel,
    checked,
    finite,
    in_vocabulary,
    largest,
    same_rows,
    same_shape,
)
from txl_tf.serving.signatures import Served, serves
from txl_tf.serving.state import ServedHiddenStates, ServedMemory, ServedWindow
from txl_tf.serving.subwords import tokenizer_of
from txl_tf.serving.tables import named_vocabs, read_text, without_last_bytes
from txl_tf.serving.writing import (
    DEFAULTS,
    GENERATE_SPECS,
    NUMBER,
    OPTIONS,
    checked_options,
    generate_sequences,
    stops_of_ids,
    stops_of_text,
)

TOKEN_BYTES = 48  # about how many bytes sampling takes for each token of the vocabulary: scores and history
NEW_TOKEN_BYTES = 512  # about how many bytes the random numbers of a new token take


def limits_of(lm: LanguageModel, max_rows: int | None, max_tokens: int) -> RequestLimits:
    """The largest request to a language model. Its size is an estimate of the arrays that its rows take.

    A row takes a fixed part (memory or window, scores of the vocabulary), and a part for every token that is read or
    generated.
    """
    network = lm.network
    first, *later = lm.softmax.bin_sizes
    # A network without attention has neither heads nor feed-forward nets.
    n_head, d_head, d_inner = (getattr(network, name, 0) for name in ("n_head", "d_head", "d_inner"))
    inner = d_inner * (3 if getattr(network, "activation", None) in GATED_ACTIVATIONS else 2)
    keys_and_values = 4 * network.n_layer * 2 * n_head * d_head  # bytes of a position
    # Logits of a token: the words of the first cluster, an entry for each later cluster, and the largest later cluster.
    logits = first + len(later) + max(later, default=0)
    positions = network.mem_len + (lm.context_len if lm.has_window else 0)
    fixed = positions * keys_and_values + TOKEN_BYTES * network.n_token
    token_bytes = keys_and_values + 4 * (logits + inner)

    def row_bytes(tokens: Any, new_tokens: Any = 0) -> Any:
        return fixed + tokens * token_bytes + new_tokens * NEW_TOKEN_BYTES

    return RequestLimits(row_bytes, max_rows, max_tokens)


@serves("language_model", "a language model")
def served_language_model(
    lm: LanguageModel,
    vocab: Vocab | Sequence[Vocab] | None,
    *,
    top_n: int | None = None,
    start_token: int | None = None,
) -> Served:
    """Returns how a language model is served: its signatures, vocabularies and tokenizer.

    Args:
        lm: the language model.
        vocab: its vocabulary; `None` for ids alone.
        top_n: number of tokens that `next` returns, see `export_saved_model`.
        start_token: the token that an empty prompt continues. `None`: `vocab.start_id` or, without a vocabulary, 0.

    Raises:
        ParameterError: a number is out of range, or the vocabulary has another size than the model.
    """
    n_token = lm.network.n_token
    vocabs = {} if vocab is None else named_vocabs(vocab, {"vocab": n_token}, type(lm).__name__)
    if start_token is None:
        start_token = vocabs["vocab"].start_id if vocabs else 0
    if top_n is not None:
        check_integer("top_n", top_n, 1, n_token)
    check_integer("start_token", start_token, 0, n_token - 1)
    make_signatures = functools.partial(LanguageModelSignatures, top_n=top_n or 10, start_token=start_token)
    return Served(make_signatures, vocabs, tokenizer_of)


class LanguageModelSignatures(StoredModel):
    """The signatures of a served language model.

        initial_state(batch_size) -> state
        score(tokens [B, T], labels [B, T], state) -> nll [B, T], state
        next(tokens [B, T], state) -> log_probs [B, n], ids [B, n], state
        generate(tokens [B, T]; lengths, sampling, num_return_sequences [B]; stop_ids [B, S, L])
            -> tokens [B, N], lengths [B], sequences [B, n, N], sequence_lengths [B, n]
        score_text(text [B]) -> nll [B, N], symbols [B, N], lengths [B]
        score_lines(text [B]) -> the same, of lines as tools/score.py scores them
        generate_text(text, sampling [B]; stop [B, S]) -> text [B]
        generate_texts(text, sampling, num_return_sequences [B]; stop [B, S]) -> texts [B, n]

    "sampling" stands for max_new_tokens, temperature, top_k, top_p, seed, min_p, repetition_penalty and
    repetition_window. These, `num_return_sequences`, `stop` and `stop_ids` have default values, which a server uses if
    a request leaves them out. One row of such an argument stands for all rows of the request. By default, a text ends
    with the symbol for the end of documents, if the model is served with a vocabulary that has one.

    Ids and numbers are int32; nll and log-probabilities are float32, in nats. `generate` does what `lm.generate` does,
    row by row. Its results have zeros after `lengths`. A `top_k` of 0 stands for all tokens. A row of length 0
    continues `start_token`, which is not part of the result. The first of the `sequences` of a row is `tokens`. If a
    row asks for fewer sequences than another one, its other sequences have length 0. The lists of stop strings are
    padded with "", and their ids with -1. A text ends with its stop string.

    No token comes before the first token of `score_text`, so its nll is 0. `score_lines` puts the ids of
    `line_start_ids` before each line. It also scores the end of the line if the vocabulary has a token for it. Strings
    are bytes. At byte level, where they need not be UTF-8, the results are called `text_bytes`, `texts_bytes` and
    `symbols_bytes`, which makes TensorFlow Serving encode them in base64.

    Args:
        lm: the language model.
        tables: `{"vocab": tokenizer}`; `None` for ids alone.
        weights, max_tokens, max_rows, top_n, start_token: see `export_saved_model`.
    """

    def __init__(
        self, lm: LanguageModel, tables: dict[str, Any] | None = None, *, weights: str = "float32",
        max_tokens: int = 4096, max_rows: int | None = None, top_n: int = 10, start_token: int = 0,
    ):  # fmt: skip
        super().__init__(lm, weights)
        self.lm = lm
        self.text: Any = (tables or {}).get("vocab")  # `None` for ids alone
        self.start_token = start_token
        self.top_n = min(top_n, lm.network.n_token)
        self.limits = limits_of(lm, max_rows, max_tokens)
        if lm.has_window:
            self.state = ServedWindow(lm)
        elif lm.has_cache:
            self.state = ServedMemory(lm, weights)
        else:
            self.state = ServedHiddenStates(lm)
        self.resources.text = self.text
        self.resources.position_keys = self.state.position_keys
        table = tf.TensorSpec([None, None], tf.int32)
        state = tf.TensorSpec([None, *self.state.shape])
        self.specs = (table, state)
        self._read = self.shared(self.state.read, table, state)
        self._generate_sequences = self.shared(functools.partial(generate_sequences, lm, start_token), *GENERATE_SPECS)
        self._nll_of_texts = self.shared(self._nll_of_texts_in_graph, table)

    warmup_values = {
        "max_new_tokens": 1,
        "top_p": 1,
        "batch_size": 1,
        "text": "",
        "stop": "",
        "stop_ids": -1,
        "repetition_penalty": 1,
        "repetition_window": DEFAULTS["repetition_window"][0],
        "num_return_sequences": 1,
    }

    def signatures(self) -> dict[str, Any]:
        """The graphs of the signatures, `{name: graph}`. Without a vocabulary, signatures of text are left out."""
        tokens, state = self.specs
        lengths = tf.TensorSpec([None], tf.int32)
        stop_ids = tf.TensorSpec([None, None, None], tf.int32)
        any_shape: Any = None  # which the type stubs of TensorFlow do not know
        arguments = {
            self.initial_state: {"batch_size": tf.TensorSpec(any_shape, tf.int32)},
            self.score: {"tokens": tokens, "labels": tokens, "state": state},
            self.next: {"tokens": tokens, "state": state},
            self.generate: {"tokens": tokens, "lengths": lengths, **OPTIONS, **NUMBER, "stop_ids": stop_ids},
        }
        if self.text is not None:
            text = {"text": tf.TensorSpec([None], tf.string)}
            stop = {"stop": tf.TensorSpec([None, None], tf.string)}
            arguments |= {
                self.score_text: text,
                self.score_lines: text,
                self.generate_text: {**text, **OPTIONS, **stop},
                self.generate_texts: {**text, **OPTIONS, **NUMBER, **stop},
            }
        own = {"max_new_tokens": np.minimum(DEFAULTS["max_new_tokens"], self.limits.max_tokens)}
        vocab = self.text and self.text.vocab
        if vocab and vocab.document is not None:
            own |= {"stop": np.array([[vocab.document]]), "stop_ids": np.array([[[vocab.document_id]]], np.int32)}
        return self.concrete(arguments, {name: tf.constant(value) for name, value in (DEFAULTS | own).items()})

    # --------------------------------------------------------------------------------------------------------- ids

    def initial_state(self, batch_size: Any) -> dict[str, tf.Tensor]:
        """The state of new rows, before their first token, `[B, ...]`. B is the sum of `batch_size`."""
        max_rows = self.limits.max_rows
        # `batch_size` may have any shape. With [1, 1, 1] for three rows, a server can join requests along this axis.
        rows: Any = tf.reduce_sum(tf.cast(batch_size, tf.int64))
        valid = tf.reduce_all(batch_size >= 0) & (rows <= max_rows)
        requirement = f"batch_size must be 0 or more, and its sum at most {max_rows}"
        rows = checked([Check(valid, requirement, batch_size)], rows)
        return {"state": self.state.initial(tf.cast(rows, tf.int32))}

    def score(self, tokens: tf.Tensor, labels: tf.Tensor, state: tf.Tensor) -> dict[str, tf.Tensor]:
        """The `nll`, `[B, T]`, of the `labels`, which are the tokens after `tokens`; and the `state` after `tokens`."""
        labels_have_shape = same_shape("labels", labels, "tokens", tokens)
        known_labels = in_vocabulary("labels", labels, self.lm.network.n_token)
        checks = [*self._checks_of_segment(tokens, state, labels_have_shape), known_labels]
        tokens, labels, state = checked(checks, tokens, labels, state)
        hidden, state = self._read(tokens, state)
        return {"nll": self.lm.nll_of(hidden, labels), "state": state}

    def next(self, tokens: tf.Tensor, state: tf.Tensor) -> dict[str, tf.Tensor]:
        """The `top_n` most likely tokens after the `tokens` of each row.

        Returns their `log_probs` and `ids`, both `[B, n]`, the most likely token first, and the `state` after `tokens`.
        """
        tokens, state = checked(self._checks_of_segment(tokens, state), tokens, state)
        hidden, state = tf.cond(
            tf.shape(tokens)[1] == 1,
            lambda: self.state.read_token(tokens, state),
            lambda: self._read(tokens, state),
        )
        log_probs = self.lm.log_probs_of(hidden[:, -1:])
        top = tf.math.top_k(log_probs[:, 0], self.top_n)
        return {"log_probs": top.values, "ids": top.indices, "state": state}

    def generate(
        self, tokens: tf.Tensor, lengths: tf.Tensor, stop_ids: tf.Tensor, **options: tf.Tensor
    ) -> dict[str, tf.Tensor]:
        """Continues prompts of ids.

        Returns:
            The ids of the prompts with their continuations. `sequences` `[B, n, N]` and `sequence_lengths` `[B, n]`
            are those of all samples; `tokens` `[B, N]` and `lengths` `[B]` are those of the first sample of each row.
        """
        stops = stops_of_ids(stop_ids, tf.shape(tokens)[0], self.lm.network.n_token)
        texts = self._generate_sequences(*checked_options(self.limits, "tokens", tokens, lengths, options), stops)
        first = {"tokens": texts.tokens[:, 0], "lengths": texts.lengths[:, 0]}
        return {**first, "sequences": texts.tokens, "sequence_lengths": texts.lengths}

    # -------------------------------------------------------------------------------------------------------- text

    def score_text(self, text: tf.Tensor) -> dict[str, tf.Tensor]:
        """The nll of every token of texts, 0 for the first; the tokens as strings; and their numbers."""
        return self._scores(*self._encode(text), [])

    def score_lines(self, text: tf.Tensor) -> dict[str, tf.Tensor]:
        """The results of `score_text` for single lines. A line may end with a newline or not: the results are the same.

        If the vocabulary has a token for the end of a line, this token is scored, too. The tokens of `line_start_ids`
        come before the line, and have no results.
        """
        vocab = self.text.vocab
        text = read_text(vocab, text)
        size = tf.strings.length(text)
        ended = tf.strings.substr(text, tf.maximum(size - 1, 0), tf.ones_like(size)) == "\n"
        line = without_last_bytes(text, tf.cast(ended, tf.int32))
        line = tf.strings.join([line, "\n"]) if newline_ids(vocab) else line
        return self._scores(*self._encode(line), line_start_ids(vocab))

    def _scores(self, ids: tf.Tensor, lengths: tf.Tensor, start: list[int]) -> dict[str, tf.Tensor]:
        """The results of `score_text` for texts of ids `[B, N]` and lengths `[B]`, each read after the ids `start`.

        The ids `start` have no results. Without them, the nll of the first token of a text is 0.
        """
        batch, n = tf.unstack(tf.shape(ids))
        tokens = tf.concat([tf.tile(tf.constant([start], tf.int32), [batch, 1]), ids], 1)
        n_missing = tf.maximum(2 - len(start) - n, 0)  # the nll needs a token to read and one to predict
        nll = self._nll_of_texts(tf.pad(tokens, [[0, 0], [0, n_missing]]))[:, len(start) : len(start) + n]
        inside = tf.sequence_mask(lengths, n)
        symbols = tf.where(inside, self.text.spell(ids), "")
        return {"nll": tf.where(inside, nll, 0), self._string_result("symbols"): symbols, "lengths": lengths}

    def generate_text(self, **arguments: tf.Tensor) -> dict[str, tf.Tensor]:
        """Each text with one continuation, strings `[B]`."""
        one = {"num_return_sequences": tf.constant(DEFAULTS["num_return_sequences"])}
        return {self._string_result("text"): tf.reshape(self._texts(**arguments, **one), [-1])}

    def generate_texts(self, **arguments: tf.Tensor) -> dict[str, tf.Tensor]:
        """Each text with each of its `num_return_sequences` continuations, strings `[B, n]`."""
        return {self._string_result("texts"): self._texts(**arguments)}

    def _texts(self, text: tf.Tensor, stop: tf.Tensor, **options: tf.Tensor) -> tf.Tensor:
        """Prompts with their continuations, strings `[B, n]`.

        If a row asks for fewer than n continuations, its other strings are "". A text that was ended by a stop string
        ends with this string.
        """
        stops = stops_of_text(stop, tf.shape(text)[0], self.text)
        texts = self._generate_sequences(*checked_options(self.limits, "text", *self._encode(text), options), stops)
        shape = tf.shape(texts.lengths)
        longest = tf.shape(texts.tokens)[-1]
        strings = self.text.decode(tf.reshape(texts.tokens, [-1, longest]), tf.reshape(texts.lengths, [-1]))
        if self.text.vocab.level == "subword":
            # The last subword may contain bytes after the stop string: remove them. Other tokens end with the string.
            strings = without_last_bytes(strings, tf.reshape(texts.excess, [-1]))
        return tf.reshape(strings, shape)

    # ------------------------------------------------------------------------------------------------- their parts

    def _string_result(self, result: str) -> str:
        """The name of a result that contains strings: at byte level it ends with `_bytes`."""
        return f"{result}_bytes" if self.text.vocab.level == "byte" else result

    def _nll_of_texts_in_graph(self, tokens: tf.Tensor) -> tf.Tensor:
        """The nll of every token of whole texts `[B, T]`, T at least 2; 0 for their first tokens."""
        nll = self.lm.nll_of(self.state.read_text(tokens[:, :-1]), tokens[:, 1:])
        return tf.pad(nll, [[0, 0], [1, 0]])

    def _encode(self, text: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """The ids of texts, `[B, longest]`, padded with zeros, and their lengths `[B]`.

        Adds the checks of their size to the graph.
        """
        limits = self.limits
        max_tokens = limits.max_tokens
        ids = self.text.encode(limits.checked_text("text", text))
        lengths = tf.cast(ids.row_lengths(), tf.int32)
        longest = largest(lengths, least=1)
        short = Check(lengths <= max_tokens, f"text must be at most {max_tokens} tokens long", lengths)
        ids, lengths = checked([short, limits.size_check("text", tf.shape(text)[0], longest)], ids, lengths)
        return ids.to_tensor(0), lengths

    def _checks_of_segment(self, tokens: tf.Tensor, state: tf.Tensor, *checks: Check) -> list[Check]:
        """The checks of a request with `tokens` and a `state`, in the order in which they are reported.

        They are: the size of the request, `checks`, the rows and numbers of the state, and the ids.
        """
        return [
            *self.limits.size_checks("tokens", tokens),
            *checks,
            same_rows("state", state, "tokens", tokens),
            finite("state", state),
            in_vocabulary("tokens", tokens, self.lm.network.n_token),
        ]
