"""Requests to a served model: checks of their arguments and of their size, and the weights that answer them.

Shapes:
    B: batch, rows of a request      T: tokens of a row
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

# What the arrays of a request may take. Several copies of them exist for moments: docs/serving.md has the peak.
REQUEST_BYTES = 512 * 2**20
MAX_ROWS = 1024  # of a request to a model whose rows are small
TEXT_BYTES = 64  # rough bytes that go with a byte of text: words and their places
LETTERS = {"stop": "BS", "stop_ids": "BSL"}  # of the dimensions of an argument


class Check(NamedTuple):
    """A condition of requests. The message and the value found may be functions, called where it does not hold."""

    condition: tf.Tensor  # bool, of any shape
    message: str | Callable[[], tf.Tensor]
    found: tf.Tensor | Callable[[], tf.Tensor]


def checked(checks: list[Check], *tensors: Any) -> Any:
    """`tensors`, for which all checks must hold.

    They fail with an InvalidArgumentError, the message of the first check that does not hold. One condition for all
    checks costs a good request less than one for each.
    """
    held = [tf.reduce_all(check.condition) for check in checks]

    def fail():
        done = []
        for holds, check in zip(held, checks, strict=True):
            message = check.message() if callable(check.message) else check.message
            found = check.found() if callable(check.found) else check.found
            with tf.control_dependencies(done):
                shown = [tf.strings.join([message, ", got"]), tf.strings.as_string(found)]
                done = [tf.debugging.Assert(holds, shown, summarize=8)]  # a whole shape
        with tf.control_dependencies(done):
            return tf.constant(False)

    with tf.control_dependencies([tf.cond(tf.reduce_all(held), lambda: tf.constant(True), fail)]):
        tensors = tf.nest.map_structure(tf.identity, tensors)
    return tensors if len(tensors) > 1 else tensors[0]


def in_vocabulary(name: str, ids: tf.Tensor, n_token: int, least: int = 0) -> Check:
    valid = (ids >= least) & (ids < n_token)
    message = f"{name} must hold ids between {least} and {n_token - 1}"
    return Check(valid, message, lambda: tf.boolean_mask(ids, ~valid)[:1])


def finite(name: str, x: tf.Tensor) -> Check:
    """A sum is one pass over `x`, without a copy; it is finite unless a value is not."""
    message = f"{name} must hold finite numbers"
    return Check(tf.math.is_finite(tf.reduce_sum(x)), message, lambda: tf.boolean_mask(x, ~tf.math.is_finite(x))[:1])


def padded_at_the_end(name: str, ids: tf.Tensor) -> Check:
    padding = tf.cast(ids == 0, tf.int32)
    gap = tf.reduce_any(padding[:, 1:] < padding[:, :-1])
    return Check(~gap, f"{name} must have padding, id 0, at the end of a row alone", gap)


def same_rows(name: str, x: tf.Tensor, other: str, like: tf.Tensor) -> Check:
    found = tf.shape(x)[0]
    return Check(found == tf.shape(like)[0], f"{name} must have as many rows as {other}", found)


def same_shape(name: str, x: tf.Tensor, other: str, like: tf.Tensor) -> Check:
    found = tf.shape(x)
    return Check(found == tf.shape(like), f"{name} must have the shape of {other}", found)


class RequestLimits:
    """How large a request may be: its rows times the bytes of one, which depend on the tokens of the longest row.

    Args:
        row_bytes: function of `(tokens, new_tokens=0)`, ints or int64 tensors: bytes of a row that reads and writes so
            many.
        max_rows: most rows; `None` for those that take `REQUEST_BYTES` with a token each, from 1 to `MAX_ROWS`.
        max_tokens: most tokens of a row, and most new ones.
        longest: tokens of a row that fits in any case, by default `max_tokens`.
        row: how messages describe the tokens and the new tokens of a row.

    Attributes:
        max_bytes: most bytes. `REQUEST_BYTES`, or more if one longest row or `max_rows` of one token need it.
    """

    def __init__(
        self,
        row_bytes: Callable,
        max_rows: int | None,
        max_tokens: int,
        longest: int | None = None,
        row: str = "{} tokens and {} new ones",
    ):
        self.row_bytes, self.max_tokens, self.row = row_bytes, max_tokens, row
        self.max_rows = max_rows or min(max(1, REQUEST_BYTES // row_bytes(1)), MAX_ROWS)
        longest = longest or max_tokens
        self.max_bytes = max(REQUEST_BYTES, row_bytes(longest, longest), self.max_rows * row_bytes(1))

    def check_rows(self, name: str, rows: tf.Tensor) -> list[Check]:
        return [
            Check(rows >= 1, f"{name} must have at least 1 row", rows),
            Check(rows <= self.max_rows, f"{name} must have at most {self.max_rows} rows", rows),
        ]

    def check_size(self, name: str, rows: tf.Tensor, tokens: tf.Tensor, new_tokens: tf.Tensor | int = 0) -> Check:
        """Checks the whole request; `tokens` is the length of its longest row."""
        tokens, new_tokens = tf.cast(tokens, tf.int64), tf.cast(new_tokens, tf.int64)
        fit = self.max_bytes // self.row_bytes(tokens, new_tokens)
        template, shown = f"{name} must have at most {{}} row(s) of {self.row}", [fit, tokens, new_tokens]
        message = functools.partial(tf.strings.format, template, shown[: template.count("{}")])
        return Check(tf.cast(rows, tf.int64) <= fit, message, rows)

    def check_ids(self, name: str, ids: tf.Tensor, new_tokens: tf.Tensor | int = 0) -> list[Check]:
        """Checks the size of ids `[B, T]`, or of what else has a batch and a length in front."""
        (rows, length), most = tf.unstack(tf.shape(ids)[:2]), self.max_tokens
        return [
            *self.check_rows(name, rows),
            Check((length >= 1) & (length <= most), f"{name} must be 1 to {most} a row", length),
            self.check_size(name, rows, length, new_tokens),
        ]

    def checked_text(self, name: str, text: tf.Tensor) -> tf.Tensor:
        """`text` `[B]`, whose size is checked before it becomes tokens."""
        found, most = tf.reduce_sum(tf.cast(tf.strings.length(text), tf.int64)), self.max_bytes // TEXT_BYTES
        size = Check(found <= most, f"text must have at most {most} bytes in all rows", found)
        return checked([*self.check_rows(name, tf.shape(text)[0]), size], text)


def check_shapes(specs: dict[str, tf.TensorSpec], tensors: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    """`tensors` of the shapes of `specs`: a server passes on any shape that a client sends."""
    # Without static shapes: TensorFlow would take the rank of `tensors` from `specs`, not from the request.
    unknown = {name: tf.compat.v1.placeholder_with_default(x, None) for name, x in tensors.items()}
    checks = []
    for name, spec in specs.items():
        if spec.shape.rank is None:
            continue
        found, rank = tf.shape(unknown[name]), spec.shape.rank
        sizes = tf.constant([-1 if size is None else size for size in spec.shape], tf.int32)
        valid = tf.size(found) == rank
        if any(size is not None for size in spec.shape):  # a state: only the batch may vary
            valid &= tf.reduce_all((tf.pad(found, [[0, rank]])[:rank] == sizes) | (sizes < 0))
        letters = [
            letter if size is None else str(size)
            for letter, size in zip(LETTERS.get(name, "BTMHDX"), spec.shape, strict=False)
        ]
        checks.append(Check(valid, f"{name} must be [{', '.join(letters)}]", found))
    tensors = checked(checks, unknown) if checks else unknown
    return {name: tf.ensure_shape(x, specs[name].shape) for name, x in tensors.items()}


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

    def shared(self, function: Callable, *specs: Any) -> Callable:
        """`function` of tensors like `specs` as one graph, which signatures call: made, saved and loaded once."""

        def call(*tensors):
            with self._as_stored():
                return function(*tensors)

        return tf.function(call, autograph=False, input_signature=specs)

    def concrete(self, arguments: dict[Callable, dict[str, tf.TensorSpec]], defaults=None) -> dict[str, Callable]:
        """`{name: graph}` of functions, whose arguments are checked to have the shapes of their specs.

        Args:
            arguments: `{function: {argument: spec}}`.
            defaults: `{argument: tensor}` of arguments that a request to a server, or a call in Python, may leave out.
        """
        defaults = defaults or {}

        def concrete(function, specs):
            names = sorted(specs, key=lambda name: name in defaults)

            def call(*tensors):
                with self._as_stored():
                    found = function(**check_shapes(specs, dict(zip(names, tensors, strict=True))))
                return {name: tf.cast(x, tf.float32) if x.dtype == tf.float64 else x for name, x in found.items()}

            # TensorFlow writes default values of Python's arguments to the signature, if they are tensors.
            none, kind = inspect.Parameter.empty, inspect.Parameter.POSITIONAL_OR_KEYWORD
            parameters = [inspect.Parameter(name, kind, default=defaults.get(name, none)) for name in names]
            call.__signature__ = inspect.Signature(parameters)
            signature = [tf.TensorSpec(specs[name].shape, specs[name].dtype, name) for name in names]
            return tf.function(call, autograph=False, input_signature=signature)

        return {function.__name__: concrete(function, specs) for function, specs in arguments.items()}
