"""Checks the dataset or the batch for `fit`, `evaluate`, `train_on_batch`, ... of a language model.

A batch is `(tokens, labels)` or `(tokens, labels, weights)`. In place of tokens, it may have a dictionary of `tokens`
and `done`, which is true at the last token of a document. A label of `IGNORED` does not count: it always has the weight
0. The checks return batches in one of these forms, so that batches in which every label counts need no weights:

    (tokens, labels)                        every label counts; with static shapes, every label but -1
    (tokens, labels, weights [B, T])        float32; an ignored label is 0 or -1, and has the weight 0
    (tokens, labels, weights [B, 0])        in a dataset without weights: every label of this batch counts
    (tokens, labels, weights, done)         float32 and bool [B, T]; in a dataset with `done`

All batches of a dataset have the same number of tensors. So if only some batches have ignored labels, the others get
weights of the shape `[B, 0]`. The loop of `fit` drops these weights (`shape_and_data` in `txl_tf/training/loop.py`),
and computes such a batch as one without weights.

Shapes:
    B: rows, over all replicas      T: tokens of a segment
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from txl_tf.data.batching import mapped
from txl_tf.errors import ParameterError
from txl_tf.nn.checks import as_array, tensor_error
from txl_tf.nn.embedding import check_ids, check_of_ids

IGNORED = -100  # a label that does not count, as in PyTorch
_LEFT_OUT = -1  # a label that does not count with static shapes, see `static_adaptive_logsoftmax`
_WEIGHTS = "finite and not negative"  # what weights must be, for errors


@dataclasses.dataclass
class Batches:
    """The batches that `fit` and `evaluate` read.

    Attributes:
        dataset: `tf.data.Dataset` of batches in a form of this module, or a distributed dataset.
        rows: number of rows of a batch, over all replicas; if batches differ, of the first one.
        tgt_len: tokens of a segment. If segments differ in length, it is in an evaluation the length of the first,
            which is the longest; in training with `Segments`, the length of all but the last; otherwise `None`.
        count: number of batches, or TensorFlow's negative number for infinite or unknown.
        repeated: whether the dataset repeats these batches forever. Otherwise workers have to agree at every step on
            whether the dataset has ended.
        any_rows: whether batches may have other numbers of rows than the first. Then each call runs one step.
    """

    dataset: Any
    rows: int
    tgt_len: int | None
    count: int
    repeated: bool = False
    any_rows: bool = False

    def __post_init__(self) -> None:
        self._iterator = None
        self._left = 0

    def calls(self, iterator: Any, k: int) -> list[int]:
        """Returns how many steps each of the next calls of the graph runs: together `k`, or fewer if batches run out.

        One call runs all of these steps. But if `any_rows`, or if `count` is unknown, each call runs one step. After
        the last batch of a known number, the result is `[]`.

        Args:
            iterator: iterator of the batches. A new iterator starts at the first batch.
            k: wanted number of steps.
        """
        if self.count >= 0:
            if iterator is not self._iterator or (self.repeated and not self._left):
                self._iterator = iterator
                self._left = self.count
            k = min(k, self._left)
            self._left -= k
        if self.any_rows or self.count == tf.data.UNKNOWN_CARDINALITY:
            return [1] * k
        return [k] if k else []


def check_batches(
    dataset: tf.data.Dataset,
    n_token: int,
    static_shapes: bool,
    evaluation: bool = False,
    name: str = "x",
    *,
    rows_divide_by: int | None = None,
    weighs: str = "where needed",
) -> Batches:
    """Checks the dataset for `fit` or `evaluate`, and adds checks of every batch to it.

    Args:
        dataset: batches `(tokens, labels)` or `(tokens, labels, weights)`, see the top of this file.
        n_token: size of the vocabulary; all ids must be below this number.
        static_shapes: whether the model has static shapes. Then all training segments must have one length, and shorter
            evaluation segments are padded.
        evaluation: whether the dataset is for an evaluation. Then no segment may be longer than the first.
        name: how errors call the dataset.
        rows_divide_by: for a model without memory, a number that must divide the rows of every batch; `None`: all
            batches must have the rows of the first. It has no effect if `element_spec` says how many rows batches have.
        weighs: which batches of a dataset without weights get weights. "where needed": batches with ignored labels.
            "always": all. "never": none, and an ignored label is an error. With static shapes, no batch gets weights;
            with `done`, all batches do.

    Returns:
        `Batches` of the checked dataset. An error in a batch is raised when this batch is read.

    Raises:
        ParameterError: `dataset` is not a dataset of such batches, or is empty; or its segments may differ in length,
            and static shapes do not allow that.
    """
    spec: Any = getattr(dataset, "element_spec", None)
    if not _are_batches(spec):
        raise ParameterError(
            name, dataset, "a tf.data.Dataset of (tokens, labels) or (tokens, labels, weights)",
            f"{name} must be a tf.data.Dataset of (tokens, labels), int [batch, tgt_len] each, "
            f"got {type(dataset).__name__}" + (f" of {spec}" if spec is not None else "")
            + "; a third element may be the weights of the labels, [batch] or [batch, tgt_len]"
            + f". Row r of a batch continues row r of the batch before, and gets its memory; {_remedy(dataset)}",
        )  # fmt: skip
    shape = _tokens_in(spec[0]).shape
    rows, tgt_len = shape if shape.rank else (None, None)
    any_rows = rows is None and rows_divide_by is not None
    usual_len = getattr(dataset, "tgt_len", None)  # `Segments` sets it
    count = int(dataset.cardinality())
    if static_shapes and not evaluation and tgt_len is None:
        message = "static shapes need segments of one length: see drop_remainder of txl_tf.segments"
        raise ParameterError(name, dataset, "a dataset of segments of one length", message)
    if rows is None or (evaluation and tgt_len is None) or count == 0:
        first = next(iter(dataset), None)
        if first is None:
            message = f"{name} must have at least one batch, got an empty dataset"
            raise ParameterError(name, dataset, "a dataset of at least one batch", message)
        rows, first_len = _tokens_in(first[0]).shape
        tgt_len = first_len if evaluation else tgt_len
    longest = tgt_len if evaluation else None
    check = _make_check(n_token, None if any_rows else rows, rows_divide_by, longest, ignoring=weighs != "never")

    def checked(x: Any, *others: Any) -> Any:
        """Adds the checks to the graph of a batch. Returns the batch in a form of this module."""
        done = _bool("done", x["done"], x["tokens"]) if isinstance(x, dict) else None
        tokens, labels, ignored, weights = check(_tokens_in(x), *others)
        if static_shapes:
            if done is not None and weights is None:
                weights = tf.ones_like(tokens, tf.float32)
            batch = _padded(tokens, labels, ignored, weights, tgt_len)
            return batch if done is None else (*batch, _pad(done, False, tgt_len))
        if done is None and weights is None and weighs == "never":
            return tokens, labels
        batch = _with_weights(tokens, labels, ignored, weights, always=weighs == "always" or done is not None)
        return batch if done is None else (*batch, done)

    dataset = mapped(dataset, checked)
    return Batches(dataset, rows, tgt_len or usual_len, count, any_rows=any_rows)


def _tokens_in(x: Any) -> Any:
    """The tokens of the first element of a batch, which may be `{"tokens": tokens, "done": done}`."""
    return x["tokens"] if isinstance(x, dict) else x


def _are_batches(spec: Any) -> bool:
    """Whether a dataset with this `element_spec` may consist of batches of a language model."""
    if not isinstance(spec, tuple) or len(spec) not in (2, 3):
        return False
    tokens, labels, *weights = spec
    if isinstance(tokens, dict):
        if tokens.keys() != {"tokens", "done"} or not all(isinstance(s, tf.TensorSpec) for s in tokens.values()):
            return False
        tokens, done = tokens["tokens"], tokens["done"]
        if not (done.dtype.is_bool or done.dtype.is_integer) or not done.shape.is_compatible_with(tokens.shape):
            return False
    if not all(isinstance(s, tf.TensorSpec) for s in (tokens, labels, *weights)):
        return False
    for ids in (tokens, labels):
        if not ids.dtype.is_integer or ids.shape.rank not in (None, 2):
            return False
    return tokens.shape.is_compatible_with(labels.shape) and all(_weights_fit(w, labels.shape) for w in weights)


def _weights_fit(weights: Any, shape: tf.TensorShape) -> bool:
    """Whether a tensor, array or spec can be the weights of labels of this shape, `[B, T]`, or of their rows."""
    try:
        dtype = tf.as_dtype(weights.dtype)
    except TypeError:  # a dtype that only NumPy has, such as datetime64
        return False
    weights_shape = tf.TensorShape(weights.shape)
    rows, length = shape if shape.rank else (None, None)
    allowed_shapes = [rows], [rows, 1], [rows, length]
    is_number = dtype.is_floating or dtype.is_integer or dtype.is_bool
    return is_number and any(weights_shape.is_compatible_with(allowed) for allowed in allowed_shapes)


def _remedy(data: Any) -> str:
    """Returns advice on how to make a dataset from what `fit` was called with, such as an array or a generator."""
    can_be_iterated = hasattr(data, "__iter__") or hasattr(data, "__getitem__")
    array_or_dataset = hasattr(data, "shape") or hasattr(data, "element_spec")
    if not can_be_iterated or array_or_dataset or isinstance(data, list | tuple | dict | str):
        return "txl_tf.segments(text, batch_size, tgt_len) makes one of a text"
    return (
        "tf.data.Dataset.from_generator(function, output_signature=(spec, spec)) makes one of it, where function() "
        "gives a new iterator and spec is tf.TensorSpec([batch, None], tf.int32)"
    )


# --------------------------------------------------------------------------------------------- checks of every batch


def _make_check(
    n_token: int, rows: int | None, rows_divide_by: int | None, longest: int | None, ignoring: bool
) -> Callable[..., Any]:
    """Returns a function that checks the rows, the length, the ids and the weights of a batch.

    The input pipeline does this on the host: a GPU reads zeros for an id outside the vocabulary, and XLA drops
    assertions.

    Args:
        n_token: size of the vocabulary.
        rows: number of rows of every batch; `None`: any number.
        rows_divide_by: without `rows`, a number that must divide the number of rows, or `None`.
        longest: largest length of a segment; `None` for no limit.
        ignoring: whether labels may be `IGNORED`.

    Returns:
        Function `check(tokens, labels, weights=None)` of the tensors of a batch, which returns `(tokens, labels,
        ignored, weights)`: tokens `[B, T]`; labels `[B, T]`, 0 where they are ignored; bool `[B, T]`, which labels are
        ignored; float32 weights `[B, T]`, or `None` without weights.
    """

    def check(tokens, labels, weights=None):
        """Adds all checks to the graph of a batch."""
        shape: Any = tf.shape(tokens)
        labels_shape: Any = tf.shape(labels)
        checks = []
        if rows is not None:
            hint = "(drop_remainder=True leaves out a shorter last batch)"
            text = f"every batch must have the rows of the first, {rows}, found"
            checks.append((shape[0] == rows, [text, shape[0], hint]))
        elif rows_divide_by is not None and rows_divide_by > 1:
            text = (
                f"the rows of every batch must be a multiple of {rows_divide_by}, the number of replicas times "
                "gradient_accumulation_steps times parallel_parts, found"
            )
            checks.append((shape[0] % rows_divide_by == 0, [text, shape[0]]))
        if longest is not None:
            text = f"segments of an evaluation must not be longer than the first, {longest}, found"
            checks.append((shape[1] <= longest, [text, shape[1]]))
        ignored = is_ignored(labels) if ignoring else tf.zeros_like(labels, tf.bool)
        labels = tf.where(ignored, tf.zeros_like(labels), labels)
        checks += [check_of_ids("tokens", tokens, n_token), check_of_ids("labels", labels, n_token)]
        text = ["labels must have the shape of tokens,", shape[0], "x", shape[1]]
        checks.append((tf.reduce_all(shape == labels_shape), [*text, "but are", labels_shape[0], "x", labels_shape[1]]))
        if weights is not None:
            weights, checks_of_weights = _weights_for(labels, weights)
            checks += checks_of_weights
        # Only operations that are made in this block wait for the checks: hence `ensure_shape` and `identity`.
        with tf.control_dependencies([tf.debugging.Assert(*check) for check in checks]):
            tokens, labels = (tf.ensure_shape(ids, [rows, ids.shape[1]]) for ids in (tokens, labels))
            return tokens, labels, tf.identity(ignored), weights if weights is None else tf.identity(weights)

    return check


def is_ignored(labels: Any) -> Any:
    """Returns which labels are `IGNORED`: bool, of their shape. No unsigned integer is `IGNORED`."""
    return labels == IGNORED if labels.dtype.min < 0 else tf.zeros_like(labels, tf.bool)


def _weights_for(labels: tf.Tensor, weights: tf.Tensor) -> tuple[tf.Tensor, list]:
    """Returns weights as float32 in the shape of the labels; and checks of them, `(condition, message)` each.

    Args:
        labels: int `[B, T]`.
        weights: numbers `[B]`, `[B, 1]` or `[B, T]`. The rank may be unknown when the graph is made.
    """
    weights = tf.cast(weights, tf.float32)
    weights_shape: Any = tf.shape(weights)
    sizes: Any = tf.concat([weights_shape, [1, 1]], 0)  # `[B]` is read as `[B, 1]`
    rows = sizes[0]
    columns = sizes[1]
    rank = tf.size(weights_shape)
    shape = tf.shape(labels)
    fit = ((rank == 1) | (rank == 2)) & (rows == shape[0]) & ((columns == 1) | (columns == shape[1]))
    checks = [
        (fit, ["weights must be [batch] or [batch, tgt_len],", shape[0], "x", shape[1], "but are", weights_shape]),
        check_of_weights(weights),
    ]
    # Without this dependency, a wrong shape could fail in these operations first, with TensorFlow's message.
    with tf.control_dependencies([tf.debugging.Assert(*checks[0])]):
        return tf.broadcast_to(tf.reshape(weights, [rows, columns]), shape), checks


def check_of_weights(weights: tf.Tensor) -> tuple[tf.Tensor, list]:
    """The arguments of `tf.debugging.Assert` for float weights: none is negative or not finite."""
    flat: Any = tf.pad(tf.reshape(weights, [-1]), [[0, 1]])  # the added 0 is valid: `argmax` fails without elements
    wrong = ~(tf.math.is_finite(flat) & (flat >= 0))
    first_wrong = flat[tf.argmax(tf.cast(wrong, tf.float32))]  # a GPU has no argmax of int32
    return ~tf.reduce_any(wrong), [f"weights must be {_WEIGHTS}, found", first_wrong]


# ------------------------------------------------------------------------------- the forms in which a batch is returned
# The arguments of these functions are the results of the function that `_make_check` returns.


def _with_weights(tokens, labels, ignored, weights, always):
    """Returns `(tokens, labels, weights)`, where the weights of ignored labels are 0.

    If `weights` is `None`, the other labels have the weight 1. If also no label of the batch is ignored, and `always`
    is false, the weights are `[B, 0]`, which stands for 1 everywhere: see the top of this file.
    """
    not_ignored = tf.cast(~ignored, tf.float32)
    if weights is not None:
        return tokens, labels, tf.ensure_shape(weights * not_ignored, labels.shape)
    if always:
        return tokens, labels, tf.ensure_shape(not_ignored, labels.shape)
    new_weights = not_ignored[:, : tf.where(tf.reduce_any(ignored), tf.shape(labels)[1], 0)]
    return tokens, labels, tf.ensure_shape(new_weights, [labels.shape[0], None])


def _padded(tokens, labels, ignored, weights, tgt_len):
    """Returns the batch with its segments padded to `tgt_len`, for static shapes.

    Ignored labels, and labels at padding, are -1. Tokens and weights at padding, and weights of ignored labels, are 0.
    The batch is `(tokens, labels)`, or `(tokens, labels, weights)` if there are weights.
    """
    labels = tf.where(ignored, _LEFT_OUT, tf.cast(labels, tf.int32))
    batch = _pad(tokens, 0, tgt_len), _pad(labels, _LEFT_OUT, tgt_len)
    return batch if weights is None else (*batch, _pad(weights * tf.cast(~ignored, tf.float32), 0.0, tgt_len))


def _pad(x, value, tgt_len):
    """Returns `x`, `[B, T]`, padded on the right with `value` to `[B, tgt_len]`."""
    x = tf.pad(x, [[0, 0], [0, tgt_len - tf.shape(x)[1]]], constant_values=value)
    return tf.ensure_shape(x, [x.shape[0], tgt_len])


def _bool(name: str, flags: Any, tokens: Any) -> Any:
    """Returns flags as bool, with checks: they are bool, or the integers 0 and 1, in the shape of `tokens`.

    Errors call the flags `name`.
    """
    is_same = tf.reduce_all(tf.shape(flags) == tf.shape(tokens))
    shapes = [f"{name} must have the shape of tokens,", tf.shape(tokens), "but is", tf.shape(flags)]
    checks = [tf.debugging.Assert(is_same, shapes)]
    if not flags.dtype.is_bool:
        is_flag = (flags == 0) | (flags == 1)
        checks.append(tf.debugging.Assert(tf.reduce_all(is_flag), [f"{name} must be bool, or 0 and 1, got", flags]))
    with tf.control_dependencies(checks):
        return tf.ensure_shape(tf.cast(flags, tf.bool), tokens.shape)


# ------------------------------------------------------------------------------------------------------- one batch


def check_batch(
    tokens: Any, labels: Any, n_token: int, sample_weight: Any = None, static_shapes: bool = False
) -> list[np.ndarray]:
    """Checks the one batch that a method of Keras is called with. Returns it in the form of `check_batches`.

    Args:
        tokens, labels: the arguments `x` and `y`, each int `[batch, tgt_len]`; or `x` is a dictionary with `tokens` and
            `done`.
        n_token: size of the vocabulary.
        sample_weight: weights of the labels, or of the rows; `None` for 1 everywhere except at ignored labels.
        static_shapes: whether the model has static shapes.

    Returns:
        A list of arrays `[batch, tgt_len]`: tokens and labels, int32; then float32 weights, unless `sample_weight` is
        `None` and either no label is ignored or shapes are static; then bool `done`, if `x` has it. With `done`, there
        are always weights.

    Raises:
        ParameterError: an argument has another type or shape, an id is outside the vocabulary, or a weight is negative
            or not finite.
    """
    if isinstance(tokens, dict):
        return _check_batch_of_documents(tokens, labels, n_token, sample_weight, static_shapes)
    arrays = []
    for argument, name, ids in (("x", "tokens", tokens), ("y", "labels", labels)):
        array = as_array(argument, ids, "integers [batch, tgt_len]")
        if array.ndim != 2 or 0 in array.shape or not np.issubdtype(array.dtype, np.integer):
            type_or_shape = type(ids).__name__ if array.dtype == object else f"{array.dtype} {list(array.shape)}"
            what = "the tokens of one batch" if argument == "x" else "the labels of x"
            message = f"{argument} must be integers [batch, tgt_len], {what}, got {type_or_shape}"
            raise ParameterError(argument, ids, "integers [batch, tgt_len]", message)
        check_ids(name, array[array != IGNORED] if name == "labels" else array, n_token)
        arrays.append(array.astype(np.int32))
    tokens, labels = arrays
    if tokens.shape != labels.shape:
        allowed = f"of the shape of x, {list(tokens.shape)}"
        message = f"y must have the shape of x, {list(tokens.shape)}, got {list(labels.shape)}"
        raise ParameterError("y", labels, allowed, message)
    weights = check_weights(sample_weight, labels)
    if weights is None or static_shapes and sample_weight is None:
        return [tokens, np.where(labels == IGNORED, _LEFT_OUT, labels)]
    return [tokens, np.where(labels == IGNORED, 0, labels), weights]


def _check_batch_of_documents(
    x: dict[str, Any], labels: Any, n_token: int, sample_weight: Any, static_shapes: bool
) -> list[np.ndarray]:
    """Does the work of `check_batch` if `x` is a dictionary of `tokens` and `done`."""
    if x.keys() != {"tokens", "done"}:
        message = f"x must have the keys tokens and done if it is a dictionary, got {', '.join(map(str, x))}"
        raise ParameterError("x", x, "tokens, or a dictionary of tokens and done", message)
    tokens, labels, *weights = check_batch(x["tokens"], labels, n_token, sample_weight, static_shapes)
    allowed = f"bool, of the shape of tokens, {list(tokens.shape)}"
    done = as_array("done", x["done"], allowed)
    if done.shape != tokens.shape or not np.isin(done, (0, 1)).all():
        message = f"done must be {allowed}, got {done.dtype} {list(done.shape)}"
        raise ParameterError("done", x["done"], allowed, message)
    weights = weights or [(labels >= 0).astype(np.float32)]
    return [tokens, labels, *weights, done.astype(bool)]


def check_weights(sample_weight: Any, labels: np.ndarray) -> np.ndarray | None:
    """Returns the weights of labels, float32 `[batch, tgt_len]`, 0 for ignored labels.

    Returns `None` if `sample_weight` is `None` and no label is ignored.

    Args:
        sample_weight: `[batch, tgt_len]`, `[batch]` of the rows, or `None`.
        labels: int `[batch, tgt_len]`.

    Raises:
        ParameterError: the weights have another shape, or one is negative or not finite.
    """
    counted = (labels != IGNORED).astype(np.float32)
    if sample_weight is None:
        return None if counted.all() else counted
    weights = as_array("sample_weight", sample_weight, "numbers [batch] or [batch, tgt_len]")
    check_weights_fit(weights, labels)
    weights = weights.astype(np.float32)
    check_values("sample_weight", sample_weight, weights)
    return counted * (weights[:, None] if weights.ndim == 1 else weights)


def check_values(name: str, value: Any, weights: np.ndarray) -> None:
    """Raises ParameterError if a weight is negative or not finite.

    Args:
        name, value: the argument that has the weights.
        weights: the weights as numbers.
    """
    wrong = ~(np.isfinite(weights) & (weights >= 0))
    if wrong.any():
        raise ParameterError(name, value, _WEIGHTS, f"{name} must be {_WEIGHTS}, found {weights[wrong][0]}")


def check_weights_fit(sample_weight: Any, labels: Any) -> None:
    """Raises ParameterError unless weights are numbers (or bool) `[batch, tgt_len]`, `[batch, 1]` or `[batch]`.

    Args:
        sample_weight: the weights, an array or tensor.
        labels: array or tensor `[batch, tgt_len]`.
    """
    if not _weights_fit(sample_weight, tf.TensorShape(labels.shape)):
        allowed = f"numbers [batch] or [batch, tgt_len] = {[*labels.shape]}"
        raise tensor_error("sample_weight", sample_weight, allowed)


@contextlib.contextmanager
def plain_messages() -> Iterator[None]:
    """In this block, an error of a failed check of a batch has only the message of the check, without graph nodes.

    Raises:
        tf.errors.InvalidArgumentError: as the block, with the shorter message.
    """
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        match = re.search(r"assertion failed: \[(.*)\]$", error.message, re.MULTILINE)  # [text] [number] [text] ...
        if not match:
            raise
        message = match[1].replace("] [", " ").replace("\\'", "'")
        raise tf.errors.InvalidArgumentError(None, None, message) from None
