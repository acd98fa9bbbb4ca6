"""Requests to a served model: checks of their arguments and of their size; and `StoredModel`, which has the weights.

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

# Most bytes of the arrays of a request. At times, several copies of them exist: docs/serving.md has the peak.
REQUEST_BYTES = 512 * 2**20
MAX_ROWS = 1024  # most rows of a request to a model with small rows
TEXT_BYTES = 64  # about how many bytes of arrays a byte of text takes: words and their positions
LETTERS = {"stop": "BS", "stop_ids": "BSL"}  # a letter for each dimension of an argument, for messages
OTHER_LETTERS = "BTMHDX"  # the letters for the dimensions of any other argument


class Check(NamedTuple):
    """A condition that a request must meet.

    Attributes:
        condition: bool tensor of any shape.
        message: what must be the case, such as "text must have 1 row"; or a function that returns this text.
        value: the value to report; or a function that returns it. Functions are traced, but their operations run only
            if a condition is false.
    """

    condition: Any
    message: str | Callable[[], tf.Tensor]
    value: Any


def checked(checks: list[Check], *tensors: Any) -> Any:
    """Adds checks to the graph, and returns `tensors`, which have values only if all checks hold.

    If checks fail, the graph raises an InvalidArgumentError with the message of the first of them. The graph has one
    `tf.cond` for all checks, because one for each would take more time.

    Args:
        checks: the checks.
        *tensors: tensors or structures of tensors.

    Returns:
        The tuple `tensors`; of a single argument, the argument itself.
    """
    conditions = [tf.reduce_all(check.condition) for check in checks]

    def fail() -> tf.Tensor:
        """Evaluates the checks one after the other, so that the first one that fails ends the graph."""
        done: list[Any] = []
        for holds, check in zip(conditions, checks, strict=True):
            message = check.message() if callable(check.message) else check.message
            value = check.value() if callable(check.value) else check.value
            with tf.control_dependencies(done):
                shown = [tf.strings.join([message, ", got"]), tf.strings.as_string(value)]
                done = [tf.debugging.Assert(holds, shown, summarize=8)]  # up to 8 numbers, more than a shape has
        with tf.control_dependencies(done):
            return tf.constant(False)

    with tf.control_dependencies([tf.cond(tf.reduce_all(conditions), lambda: tf.constant(True), fail)]):
        after_checks: Any = tf.nest.map_structure(tf.identity, tensors)
    return after_checks if len(after_checks) > 1 else after_checks[0]


def in_vocabulary(name: str, ids: Any, n_token: int, least: int = 0) -> Check:
    """A check that ids lie between `least` and `n_token - 1`."""
    valid = (ids >= least) & (ids < n_token)
    message = f"{name} must hold ids between {least} and {n_token - 1}"
    return Check(valid, message, lambda: tf.boolean_mask(ids, ~valid)[:1])


def finite(name: str, x: tf.Tensor) -> Check:
    """A check that the sum of all numbers is finite, so that all of them are. The sum needs no copy of `x`.

    Finite numbers whose sum overflows are refused, too.
    """
    message = f"{name} must hold finite numbers"
    find_bad = functools.partial(_not_finite, x)
    return Check(tf.math.is_finite(tf.reduce_sum(x)), message, find_bad)


def _not_finite(x: tf.Tensor) -> tf.Tensor:
    """The first number that is not finite, as a tensor of one number; an empty tensor if there is none."""
    return tf.boolean_mask(x, tf.logical_not(tf.math.is_finite(x)))[:1]


def padded_at_the_end(name: str, ids: Any) -> Check:
    """A check that in every row of ids `[B, T]`, all padding, id 0, comes after all other ids."""
    padding = tf.cast(ids == 0, tf.int32)
    has_gap = tf.reduce_any(padding[:, 1:] < padding[:, :-1], 1)  # [B], whether an id follows padding
    message = f"{name} must have padding, id 0, only at the end of a row"
    return Check(~has_gap, message, lambda: tf.boolean_mask(ids, has_gap)[:1])


def same_rows(name: str, x: tf.Tensor, other: str, like: tf.Tensor) -> Check:
    """A check that `x` has as many rows as `like`. Messages call these arguments `name` and `other`."""
    rows = tf.shape(x)[0]
    return Check(rows == tf.shape(like)[0], f"{name} must have as many rows as {other}", rows)


def same_shape(name: str, x: tf.Tensor, other: str, like: tf.Tensor) -> Check:
    """A check that `x` has the shape of `like`. Messages call these arguments `name` and `other`."""
    shape = tf.shape(x)
    return Check(shape == tf.shape(like), f"{name} must have the shape of {other}", shape)


class RequestLimits:
    """The largest size of a request: the number of its rows, times the bytes of its longest row.

    Args:
        row_bytes: function of `(tokens, new_tokens=0)`, ints or int64 tensors. It estimates how many bytes the arrays
            take for a row that reads `tokens` and generates `new_tokens`.
        max_rows: most rows. `None` stands for as many rows of one token as fit `REQUEST_BYTES`, but from 1 to
            `MAX_ROWS`.
        max_tokens: most tokens of a row, and most new ones.
        longest: a single row of this many tokens, and this many new ones, always fits; by default `max_tokens`.
        row: description of a row for messages, with up to two `{}`: for its tokens, and for its new tokens.

    Attributes:
        max_bytes: most bytes of a request: `REQUEST_BYTES`, or more if a single row of `longest` tokens, or `max_rows`
            rows that read one token and generate none, need more.
    """

    def __init__(
        self,
        row_bytes: Callable,
        max_rows: int | None,
        max_tokens: int,
        longest: int | None = None,
        row: str = "{} tokens and {} new ones",
    ):
        self.row_bytes = row_bytes
        self.max_tokens = max_tokens
        self.row = row
        self.max_rows = max_rows or min(max(1, REQUEST_BYTES // row_bytes(1)), MAX_ROWS)
        longest = longest or max_tokens
        self.max_bytes = max(REQUEST_BYTES, row_bytes(longest, longest), self.max_rows * row_bytes(1))

    def row_checks(self, name: str, rows: Any) -> list[Check]:
        """Checks that an argument has at least one row and at most `max_rows` rows."""
        return [
            Check(rows >= 1, f"{name} must have at least 1 row", rows),
            Check(rows <= self.max_rows, f"{name} must have at most {self.max_rows} rows", rows),
        ]

    def size_check(self, name: str, rows: Any, tokens: Any, new_tokens: Any = 0) -> Check:
        """A check that the rows of a request, each as large as the largest, take at most `max_bytes`.

        Args:
            name: name of the argument, for the message.
            rows: number of rows of the request.
            tokens: number of tokens of its longest row.
            new_tokens: the largest number of new tokens that one of its rows asks for.
        """
        tokens = tf.cast(tokens, tf.int64)
        new_tokens = tf.cast(new_tokens, tf.int64)
        most_rows = self.max_bytes // self.row_bytes(tokens, new_tokens)
        template = f"{name} must have at most {{}} row(s) of {self.row}"
        numbers = [most_rows, tokens, new_tokens][: template.count("{}")]  # `row` may leave out the last ones
        message = functools.partial(tf.strings.format, template, numbers)
        return Check(tf.cast(rows, tf.int64) <= most_rows, message, rows)

    def size_checks(self, name: str, ids: Any, new_tokens: Any = 0) -> list[Check]:
        """Checks of the rows, the tokens of a row, and the size of a request with the argument `ids`, `[B, T, ...]`."""
        rows, length = tf.unstack(tf.shape(ids)[:2])
        message = f"{name} must be 1 to {self.max_tokens} a row"
        return [
            *self.row_checks(name, rows),
            Check((length >= 1) & (length <= self.max_tokens), message, length),
            self.size_check(name, rows, length, new_tokens),
        ]

    def checked_text(self, name: str, text: tf.Tensor) -> tf.Tensor:
        """Adds checks of the rows and bytes of `text` `[B]` to the graph, and returns `text`.

        Call it before the text becomes tokens, which take far more memory.
        """
        n_bytes = tf.reduce_sum(tf.cast(tf.strings.length(text), tf.int64))
        max_bytes = self.max_bytes // TEXT_BYTES
        size = Check(n_bytes <= max_bytes, f"{name} must have at most {max_bytes} bytes in all rows", n_bytes)
        return checked([*self.row_checks(name, tf.shape(text)[0]), size], text)


def largest(numbers: Any, least: int = 0) -> Any:
    """The largest of some numbers `[any]`, or `least` if it is larger. It is `least` for a request without rows."""
    return tf.reduce_max(tf.pad(numbers, [[0, 1]], constant_values=least))


def first_row_where(bad: tf.Tensor) -> tf.Tensor:
    """The index of the first row where `bad`, bool `[B]`, is true, as a string, `[1]`; `[0]` without such a row."""
    return tf.strings.as_string(tf.where(bad)[:1, 0])


def check_shapes(specs: dict[str, tf.TensorSpec], tensors: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    """Adds checks to the graph that tensors have the shapes of their `specs`.

    They are needed because TensorFlow Serving passes on any shape that a client sends.

    Args:
        specs: `{argument: spec}`. An argument whose spec has no rank may have any shape.
        tensors: `{argument: tensor}`.

    Returns:
        `tensors`, with the static shapes of their specs.
    """
    # The placeholders have no static shapes. Otherwise `tf.size(shape)` would be a constant, the rank in `specs`, and
    # the check would not see the rank in the request.
    unknown = {name: tf.compat.v1.placeholder_with_default(x, None) for name, x in tensors.items()}
    checks = []
    for name, spec in specs.items():
        if spec.shape.rank is None:
            continue
        shape: Any = tf.shape(unknown[name])
        rank = spec.shape.rank
        sizes = tf.constant([-1 if size is None else size for size in spec.shape], tf.int32)
        valid = tf.size(shape) == rank
        if any(size is not None for size in spec.shape):  # as in a state, where only the batch may vary
            valid &= tf.reduce_all((tf.pad(shape, [[0, rank]])[:rank] == sizes) | (sizes < 0))  # `shape` may be shorter
        letters = [
            letter if size is None else str(size)
            for letter, size in zip(LETTERS.get(name, OTHER_LETTERS), spec.shape, strict=False)
        ]
        checks.append(Check(valid, f"{name} must be [{', '.join(letters)}]", shape))
    tensors = checked(checks, unknown) if checks else unknown
    return {name: tf.ensure_shape(x, specs[name].shape) for name, x in tensors.items()}


class StoredModel:
    """A model that is exported or served, with a copy of its weights. A subclass defines the signatures.

    Args:
        model: the model.
        weights: type in which the weights are stored, one of `WEIGHT_TYPES`.

    Attributes:
        stored: the copies of the weights, variables in the order of `model.weights`.
        resources: `tf.Module` with everything that the signatures refer to. It is saved instead of the model.
        limits: how large a request may be.
        warmup_values: `{argument: value}` for warm-up requests, see `write_warmup`.
    """

    limits: RequestLimits
    warmup_values: dict[str, Any]

    def __init__(self, model: keras.Model, weights: str):
        self.model: Any = model
        self.stored = [tf.Variable(tf.cast(weight, weights), trainable=False) for weight in model.weights]
        self.resources: Any = tf.Module()
        self.resources.weights = self.stored

    def signatures(self) -> dict[str, Any]:
        """The graphs of the signatures, `{name: graph}`, see `concrete`."""
        raise NotImplementedError

    def _as_stored(self) -> keras.StatelessScope:
        """A scope in which the model computes with the stored weights, cast to the dtypes of its own weights."""
        pairs = zip(self.model.weights, self.stored, strict=True)
        return keras.StatelessScope([(weight, tf.cast(stored, weight.dtype)) for weight, stored in pairs])

    def shared(self, function: Callable, *specs: Any) -> Callable:
        """Makes one graph of a function. If several signatures call the graph, it is saved and loaded only once.

        Args:
            function: function of tensors. In the graph, the model computes with the stored weights.
            *specs: the `tf.TensorSpec` of each tensor.
        """

        def call(*tensors: Any) -> Any:
            with self._as_stored():
                return function(*tensors)

        return tf.function(call, autograph=False, input_signature=specs)

    def concrete(
        self, arguments: dict[Any, dict[str, tf.TensorSpec]], defaults: dict[str, tf.Tensor] | None = None
    ) -> dict[str, Any]:
        """Makes graphs of functions, which check that the arguments have the shapes of their specs.

        In the graphs, the model computes with the stored weights. Results in float64 become float32.

        Args:
            arguments: `{function: {argument: spec}}`.
            defaults: `{argument: value}` of arguments that a request to a server, or a call in Python, may leave out.

        Returns:
            `{name of the function: graph}`.
        """
        defaults = defaults or {}

        def graph_of(function: Any, specs: dict[str, tf.TensorSpec]) -> Any:
            """Makes the graph of one function. Arguments with default values come last."""
            names = sorted(specs, key=lambda name: name in defaults)

            def call(*tensors: Any) -> dict[str, tf.Tensor]:
                with self._as_stored():
                    results = function(**check_shapes(specs, dict(zip(names, tensors, strict=True))))
                return {name: tf.cast(x, tf.float32) if x.dtype == tf.float64 else x for name, x in results.items()}

            # TensorFlow takes the names and default values of the arguments from `__signature__`. Default values that
            # are tensors become part of the exported signature.
            none = inspect.Parameter.empty
            kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
            parameters = [inspect.Parameter(name, kind, default=defaults.get(name, none)) for name in names]
            vars(call)["__signature__"] = inspect.Signature(parameters)
            vars(call)["__wrapped__"] = function  # otherwise, TensorFlow warns that one `call` has so many graphs
            signature = [tf.TensorSpec(specs[name].shape, specs[name].dtype, name) for name in names]
            return tf.function(call, autograph=False, input_signature=signature)

        return {function.__name__: graph_of(function, specs) for function, specs in arguments.items()}
