"""What every served model has: stored weights, signatures whose arguments are checked, bounded requests.

Shapes:
    B: batch, rows of a request      T: tokens of a row
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import keras
import tensorflow as tf

from txl_tf.serving.text import Check, require, require_all

# What the arrays of a request may take. Several copies of them exist for moments: docs/serving.md has the peak.
REQUEST_BYTES = 512 * 2**20
MAX_ROWS = 1024  # of a request to a model whose rows are small
TEXT_BYTES = 64  # rough bytes that go with a byte of text: words and their places
LETTERS = {"stop": "BS", "stop_ids": "BSL"}  # of the dimensions of an argument


class RequestLimits:
    """How large a request may be: its rows times the bytes of one, which depend on the tokens of the longest row.

    A subclass has `row_bytes(tokens, new_tokens=0)`: bytes of a row that reads and writes so many, as ints or as int64
    tensors.

    Attributes:
        max_rows: most rows; by default those that take `REQUEST_BYTES` with a token each, from 1 to `MAX_ROWS`.
        max_bytes: most bytes. `REQUEST_BYTES`, or more if one row of `max_tokens` or `max_rows` of one token need it.
    """

    def __init__(self, max_rows: int | None, max_tokens: int):
        self.max_rows = max_rows or min(max(1, REQUEST_BYTES // self.row_bytes(1)), MAX_ROWS)
        self.max_bytes = max(REQUEST_BYTES, self.row_bytes(max_tokens, max_tokens), self.max_rows * self.row_bytes(1))

    def check_rows(self, name: str, rows: tf.Tensor) -> list[Check]:
        return [
            Check(rows >= 1, f"{name} must have at least 1 row", rows),
            Check(rows <= self.max_rows, f"{name} must have at most {self.max_rows} rows", rows),
        ]

    def check_size(self, name: str, rows: tf.Tensor, tokens: tf.Tensor, new_tokens: tf.Tensor | int = 0) -> Check:
        """Checks the whole request; `tokens` is the length of its longest row."""
        tokens, new_tokens = tf.cast(tokens, tf.int64), tf.cast(new_tokens, tf.int64)
        fit = self.max_bytes // self.row_bytes(tokens, new_tokens)

        def message():
            parts = f"{name} must have at most ", fit, " row(s) of ", *self.describe(tokens, new_tokens)
            return tf.strings.join([part if isinstance(part, str) else tf.strings.as_string(part) for part in parts])

        return Check(tf.cast(rows, tf.int64) <= fit, message, rows)

    def describe(self, tokens: tf.Tensor, new_tokens: tf.Tensor) -> list[tf.Tensor | str]:
        """What messages say of the size of a row."""
        return [tokens, " tokens and ", new_tokens, " new ones"]

    def check_bytes(self, text: tf.Tensor) -> Check:
        """Checks a text before it becomes tokens."""
        found, most = tf.reduce_sum(tf.cast(tf.strings.length(text), tf.int64)), self.max_bytes // TEXT_BYTES
        return Check(found <= most, f"text must have at most {most} bytes in all rows", found)


def check_shapes(specs: dict[str, tf.TensorSpec], tensors: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    """`tensors`, found to have the shapes of `specs`: a server passes on any shape that a client sends."""
    # As of no known shape: the rank of `tensors` themselves would be a constant of the graph, that of `specs`.
    unknown = {name: tf.compat.v1.placeholder_with_default(x, None) for name, x in tensors.items()}
    checks = []
    for name, spec in specs.items():
        if spec.shape.rank is None:
            continue
        found, rank = tf.shape(unknown[name]), spec.shape.rank
        sizes = tf.constant([-1 if size is None else size for size in spec.shape], tf.int32)
        valid = tf.size(found) == rank
        if any(size is not None for size in spec.shape):  # a state, of whose sizes only the first is free
            valid &= tf.reduce_all((tf.pad(found, [[0, rank]])[:rank] == sizes) | (sizes < 0))
        letters = [
            letter if size is None else str(size)
            for letter, size in zip(LETTERS.get(name, "BTMHDX"), spec.shape, strict=False)
        ]
        checks.append(Check(valid, f"{name} must be [{', '.join(letters)}]", found))
    with tf.control_dependencies([require_all(checks)] if checks else []):
        return {name: tf.ensure_shape(x, specs[name].shape) for name, x in unknown.items()}


class StoredModel:
    """A model and its weights as they are stored.

    Attributes:
        resources: `tf.Module`, what the signatures refer to, and so what is saved. It does not hold the model.
    """

    def __init__(self, model: keras.Model, weights: str):
        self.model = model
        self.stored = [tf.Variable(tf.cast(weight, weights), trainable=False) for weight in model.weights]
        self.resources = tf.Module()
        self.resources.weights = self.stored

    def _as_stored(self) -> keras.StatelessScope:
        """A scope in which the weights of the model are the stored ones."""
        pairs = zip(self.model.weights, self.stored, strict=True)
        return keras.StatelessScope([(weight, tf.cast(stored, weight.dtype)) for weight, stored in pairs])

    def concrete(self, arguments: dict[Callable, dict[str, tf.TensorSpec]], defaults=None) -> dict[str, Callable]:
        """`{name: graph}` of functions, whose arguments are checked to have the shapes of their specs.

        Args:
            arguments: `{function: {argument: spec}}`.
            defaults: `{argument: tensor}` of arguments that a request to a server may leave out.
        """
        defaults = defaults or {}

        def concrete(function, specs):
            names = sorted(specs, key=lambda name: name in defaults)

            def call(*tensors):
                with self._as_stored():
                    return function(**check_shapes(specs, dict(zip(names, tensors, strict=True))))

            # TensorFlow writes default values of Python's arguments to the signature, if they are tensors.
            none, kind = inspect.Parameter.empty, inspect.Parameter.POSITIONAL_OR_KEYWORD
            parameters = [inspect.Parameter(name, kind, default=defaults.get(name, none)) for name in names]
            call.__signature__ = inspect.Signature(parameters)
            signature = [tf.TensorSpec(specs[name].shape, specs[name].dtype, name) for name in names]
            return tf.function(call, autograph=False, input_signature=signature)

        return {function.__name__: concrete(function, specs) for function, specs in arguments.items()}


def check_ids(name: str, ids: tf.Tensor, n_token: int, least: int = 0) -> tf.Tensor:
    """`ids`, found to be in the vocabulary."""
    valid = (ids >= least) & (ids < n_token)
    message = f"{name} must hold ids between {least} and {n_token - 1}"
    with tf.control_dependencies([require(valid, message, lambda: tf.boolean_mask(ids, ~valid)[:1])]):
        return tf.identity(ids)
