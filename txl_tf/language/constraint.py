"""Texts that match a regular expression or a JSON schema: a processor of logits for `generate`.

    digits = Constraint(vocab, regex="[0-9]{4}-[0-9]{2}", stop_token=end)
    lm.generate(prompt, 10, logits_processor=digits, stop_token=end)

outlines-core compiles the expression to an automaton over the tokens of the vocabulary: for every state, which tokens
may follow, and the state after each. It is stored as a table, in which the graph of generation looks up the state of a
row.

Shapes:
    B: batch      S: states of the automaton      N: tokens of the vocabulary
"""

from __future__ import annotations

import importlib
import json
from typing import Any

import numpy as np
import tensorflow as tf

from txl_tf.config.checks import check_integer
from txl_tf.environment import is_installed
from txl_tf.errors import ParameterError, brief
from txl_tf.kernels.shapes import Tensor, shape_of

_MOST_ENTRIES = 1 << 28  # of the table, 1 GB
_ENDED = 0  # the state after the stop token
_START = 1  # the first state


class Constraint:
    """A `logits_processor` that allows only new text that matches a regular expression as a whole, or a JSON schema.

    It needs the package outlines-core: `pip install "txl_tf[constrained]"`.

    Args:
        vocab: vocabulary of the model, of characters, bytes or subwords.
        regex: regular expression, in the syntax of Rust's `regex` without look-around.
        json_schema: JSON schema, as a dictionary or as text. Give either this or `regex`.
        stop_token: id of the token that ends a text, also an argument of `generate`. The text itself cannot contain it.

    Attributes:
        table: int32 `[S, N]`, the state after each token; -1 where a token may not follow.

    Raises:
        ParameterError: outlines-core is not installed, the vocabulary is of words, the expression or the schema is not
            valid, no text of the vocabulary matches, the automaton is too large, or an argument is out of its range.
    """

    sees_prompt_end = True  # so `generate` also gives it `first`, and compares its `stop_token` with that of the call

    def __init__(
        self, vocab: Any, *, regex: str | None = None, json_schema: dict[str, Any] | str | None = None, stop_token: int
    ) -> None:
        if (regex is None) == (json_schema is None):
            raise ParameterError("regex", regex, "given without json_schema, or the reverse")
        check_integer("stop_token", stop_token, 0, len(vocab) - 1)
        if not is_installed("outlines_core"):
            message = 'a Constraint needs the package outlines-core: pip install "txl_tf[constrained]"'
            raise ParameterError("regex", regex, "left out without outlines-core", message)
        outlines_core: Any = importlib.import_module("outlines_core")  # an extra
        schemas: Any = importlib.import_module("outlines_core.json_schema")
        self.n_token = len(vocab)
        self.stop_token = stop_token
        name, given = ("regex", regex) if json_schema is None else ("json_schema", json_schema)
        try:
            if json_schema is not None:
                text = json_schema if isinstance(json_schema, str) else json.dumps(json_schema)
                regex = schemas.build_regex_from_schema(text)
            index = outlines_core.Index(regex, outlines_core.Vocabulary(stop_token, _pieces(vocab, stop_token)))
        except (ValueError, TypeError) as error:
            if isinstance(error, ParameterError):
                raise
            message = f"{name} cannot be used with this vocabulary, got {brief(given)}: {error}"
            raise ParameterError(name, given, "an expression that texts of the vocabulary match", message) from error
        self.table = _table_of(index, self.n_token, stop_token, name, given)

    def __call__(self, tokens: Tensor, log_probs: Tensor, first: Any) -> Tensor:
        """`log_probs` with -inf for tokens that may not follow.

        Args:
            tokens: int32 `[B, any]`, prompts and text so far.
            log_probs: float `[B, N]`.
            first: index of the first column of new text.

        Raises:
            ParameterError: the model has another number of tokens than the vocabulary.
        """
        if log_probs.shape[1] != self.n_token:
            allowed = f"for a model of {log_probs.shape[1]} tokens"
            raise ParameterError("logits_processor", self.n_token, allowed)
        table = tf.constant(self.table)
        batch, length = shape_of(tokens)

        def follow(i: Any, state: Tensor) -> tuple[Any, Any]:
            """The state after column i. -1, the state after a token that may not follow, counts as `_ENDED`."""
            return i + 1, tf.gather_nd(table, tf.stack([tf.maximum(state, 0), tokens[:, i]], 1))

        start = tf.fill([batch], _START)
        _, state = tf.while_loop(lambda i, _: i < length, follow, (tf.convert_to_tensor(first), start))
        allowed = tf.gather(table, tf.maximum(state, 0)) >= 0
        return tf.where(allowed, log_probs, tf.constant(-np.inf, log_probs.dtype))


def _pieces(vocab: Any, stop_token: int) -> dict[Any, list[int]]:
    """`{text of a token, as a string or as bytes: ids}`, without special symbols, stop token and end of a document.

    Raises ParameterError for a vocabulary of words.
    """
    if vocab.level == "word":
        message = "a Constraint needs a vocabulary of characters, bytes or subwords, got one of words"
        raise ParameterError("vocab", vocab.level, ["char", "byte", "subword"], message)
    if vocab.level == "subword":
        named = vocab.named_ids
        texts: list[Any] = [b"" if i in named else text for i, text in enumerate(vocab.token_bytes)]
    elif vocab.level == "byte":
        texts = [bytes([i]) if i < 256 else b"" for i in range(len(vocab))]
    else:
        texts = [symbol if len(symbol) == 1 else "" for symbol in vocab.symbols]
    found: dict[Any, list[int]] = {}
    for i, text in enumerate(texts):
        if text and i not in (stop_token, vocab.document_id):
            found.setdefault(text, []).append(i)
    return found


def _table_of(index: Any, n_token: int, stop_token: int, name: str, given: Any) -> np.ndarray:
    """The automaton as a table, see `Constraint`. Its rows are states: `_ENDED`, `_START` and others.

    Args:
        index: `outlines_core.Index`.
        n_token, stop_token: number of tokens, and the id of the stop token.
        name, given: name and value of the argument that errors name: the expression or the schema.

    Raises:
        ParameterError: the table is too large.
    """
    transitions = index.get_transitions()
    first = index.get_initial_state()
    finals = index.get_final_states()
    states = [first, *sorted({*transitions, *finals} - {first})]
    if (len(states) + 1) * n_token > _MOST_ENTRIES:
        allowed = f"an expression of at most {_MOST_ENTRIES // n_token:,} states"
        message = f"{name} must be {allowed} for {n_token:,} tokens, got {len(states):,} states"
        raise ParameterError(name, given, allowed, message)
    row_of = {state: i + 1 for i, state in enumerate(states)}
    table = np.full([len(states) + 1, n_token], -1, np.int32)
    for state, following in transitions.items():
        for token, after in following.items():
            if token != stop_token:
                table[row_of[state], token] = row_of[after]
    for row in (_ENDED, *(row_of[state] for state in finals)):
        table[row, stop_token] = _ENDED
    return table
