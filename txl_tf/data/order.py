"""Checks whether the segments of a dataset are in the order of the text: searches its transformations for shuffles.

A model with memory needs this order: row r of a batch continues row r of the previous batch. Documents may be shuffled
if they are cut into segments afterwards:

    segments.shuffle(100)                                   shuffled
    rows.shuffle(100).map(to_tokens_and_labels).batch(8)    shuffled: every row is already a segment
    documents.shuffle(100).flat_map(to_tokens).batch(...)   in order: `flat_map` joins the documents to one text

The rule: shuffled elements are segments, unless `flat_map`, `interleave` or `unbatch` takes them apart afterwards. Then
they are documents, with three exceptions that are still segments: pairs of batches `[batch, any]`; elements as long as
a segment, or one token longer; and windows of `Dataset.window`. The check cannot see shuffles in Python, before
`from_generator` or in an array.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

_REORDERS = ("ShuffleDataset", "ShuffleAndRepeatDataset", "GroupByWindowDataset")
_TAKES_APART = ("FlatMapDataset", "InterleaveDataset", "ParallelInterleaveDataset", "UnbatchDataset")
_IGNORE_STATE = 1  # option of `DatasetToGraphV2`: Python functions in the dataset are not an error

Component = tuple[tf.DType, tf.TensorShape]  # type and shape of a tensor in an element of a dataset


def is_shuffled(dataset: tf.data.Dataset) -> bool:
    """Whether the segments in `dataset` are shuffled, or drawn at random from several datasets.

    Args:
        dataset: its elements are `(tokens, labels, ...)`, as `fit` takes them.
    """
    shape = tf.nest.flatten(dataset.element_spec)[0].shape
    tgt_len = shape[-1] if shape.rank else None
    return any(_are_segments(components, apart, tgt_len) for components, apart in _reordered(dataset))


def _are_segments(components: list[Component], taken_apart: bool, tgt_len: int | None) -> bool:
    """Whether shuffled elements are segments, by the rule at the top of this file.

    Args:
        components: of an element.
        taken_apart: whether a later transformation takes the elements apart.
        tgt_len: tokens of a segment, or `None` if that is unknown.
    """
    if not taken_apart or any(dtype == tf.variant for dtype, _ in components):
        return True
    shapes = [shape for dtype, shape in components if dtype.is_integer and shape.rank]
    as_long = tgt_len is not None and any(shape[-1] in (tgt_len, tgt_len + 1) for shape in shapes)
    return as_long or (len(shapes) > 1 and all(shape.rank == 2 for shape in shapes))


def _reordered(dataset: tf.data.Dataset, taken_apart: bool = False) -> Iterator[tuple[list[Component], bool]]:
    """Yields `(components, taken_apart)` for every shuffle, as `_are_segments` takes them.

    They are the components of the elements that it reorders, and whether a later transformation takes these elements
    apart. The function goes from the end of the dataset to its sources, and into the functions that the dataset calls.

    Args:
        dataset: the dataset.
        taken_apart: whether a transformation after `dataset` takes its elements apart.
    """
    # Private attributes, because the public way to the inputs writes the dataset as a graph, with all its arrays.
    kind = _kind_of(dataset)
    inputs = dataset._inputs()
    if kind in _REORDERS:
        yield _components(inputs[0].element_spec), taken_apart
    if kind == "DirectedInterleaveDataset":
        selector, *inputs = inputs
        if _is_random(selector):
            yield _components(dataset.element_spec), taken_apart
    for function in dataset._functions():
        for graph in _graphs_of(function.function):
            yield from _reordered_in(graph, taken_apart)
    for source in inputs:
        yield from _reordered(source, taken_apart or kind in _TAKES_APART)


# ------------------------------------------------------------------------------------------------ reading beforehand

ROWS = 2000  # approximate number of rows that `first_batches` reads
# Kinds of datasets that only rearrange arrays, and kinds that keep the order and whose reading changes nothing.
_ARRAY_DATASETS = ("TensorSliceDataset", "TensorDataset", "ZipDataset", "TakeDataset", "SkipDataset", "RepeatDataset")
_IN_BATCHES = ("BatchDataset", "ParallelBatchDataset", "PaddedBatchDataset")
_PASSED_ON = (*_ARRAY_DATASETS, *_IN_BATCHES, "MapDataset", "ParallelMapDataset", "PrefetchDataset", "OptionsDataset")


def first_batches(x: Any, y: Any = None) -> Iterator[Any]:
    """Yields the first rows of the data for Keras's `fit`, as batches `(x, y, ...)`, for checks before training.

    It yields `ROWS` rows of arrays, about as many of a dataset, and the first batch of a `PyDataset`. It yields nothing
    if reading could change the training: reading uses up an iterator, and a shuffled dataset would have another order
    afterwards. So of a shuffled dataset, it yields rows from before the shuffle, if they have the structure of the
    batches.
    """
    if y is not None:
        yield keras.tree.map_structure(lambda array: array[:ROWS], (x, y))
    elif isinstance(x, keras.utils.PyDataset):
        yield x[0]
    elif isinstance(x, tf.data.Dataset) and (dataset := _before_shuffles(x)) is not None:
        n = 0
        for batch in dataset:
            if tf.nest.flatten(batch[1])[0].shape.rank == 1:  # the shuffle comes before `batch`: this is one row
                batch = tf.nest.map_structure(lambda part: part[None], batch)
            yield batch
            n += tf.nest.flatten(batch)[0].shape[0]
            if n >= ROWS:
                return


def _before_shuffles(dataset: tf.data.Dataset) -> tf.data.Dataset | None:
    """Returns the dataset before the first shuffle: the input of the shuffle that elements pass first.

    Without a shuffle, returns the dataset itself. Returns `None` unless the dataset has elements `(x, y, ...)`, it
    reads arrays, only shuffles and `_PASSED_ON` come after the arrays, a zip has only `_ARRAY_DATASETS` as inputs, and
    the elements before the shuffle have the same structure.
    """
    structure = tf.nest.map_structure(lambda spec: 0, dataset.element_spec)  # only the nesting: shapes may differ
    before_shuffles = dataset
    if not isinstance(dataset.element_spec, tuple) or len(dataset.element_spec) < 2:
        return None
    while True:
        if _kind_of(dataset) in _REORDERS:
            (before_shuffles,) = dataset._inputs()
        elif _kind_of(dataset) not in _PASSED_ON:
            return None
        inputs = dataset._inputs()
        if len(inputs) != 1:
            break
        (dataset,) = inputs
    if not all(_kind_of(source) in _ARRAY_DATASETS for source in _sources(dataset)):
        return None
    return before_shuffles if tf.nest.map_structure(lambda spec: 0, before_shuffles.element_spec) == structure else None


def _sources(dataset: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
    """Yields a dataset and all datasets that it reads, directly or indirectly."""
    yield dataset
    for source in dataset._inputs():
        yield from _sources(source)


def _kind_of(dataset: tf.data.Dataset) -> str:
    """Returns the name of a dataset's class, such as "ShuffleDataset"."""
    return type(dataset).__name__.lstrip("_")


def _components(spec: Any) -> list[Component]:
    """Returns the components of elements with the `element_spec` `spec`. A dataset in an element is a variant."""
    return [
        (tf.variant, tf.TensorShape([])) if isinstance(part, tf.data.DatasetSpec) else (part.dtype, part.shape)
        for part in tf.nest.flatten(spec)
        if isinstance(part, tf.data.DatasetSpec) or hasattr(part, "dtype")
    ]


def _is_random(selector: tf.data.Dataset) -> bool:
    """Whether `selector`, a dataset that chooses among others, is random."""
    kind = _kind_of(selector)
    return kind == "RandomDataset" or kind in _REORDERS or any(map(_is_random, selector._inputs()))


# --------------------------------------------------------------------------- datasets that are made within a dataset


def _graphs_of(function: Any) -> Iterator[Any]:
    """Yields the GraphDef of a function that a dataset calls, and those of the datasets that the function captures."""
    yield function.graph.as_graph_def()
    for tensor in function.captured_inputs:
        if tensor.dtype == tf.variant:
            try:
                serialized = tf.raw_ops.DatasetToGraphV2(input_dataset=tensor, external_state_policy=_IGNORE_STATE)
            except tf.errors.OpError:  # another variant, or a dataset that cannot be serialized
                continue
            yield tf.compat.v1.GraphDef.FromString(serialized.numpy())


def _reordered_in(graph: Any, taken_apart: bool) -> Iterator[tuple[list[Component], bool]]:
    """Yields `(components, taken_apart)` at every shuffle in a GraphDef, as `_reordered` does for a dataset.

    If any dataset in the graph takes elements apart, the elements at all shuffles in it count as taken apart.
    """
    nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
    kinds = {node.name: node.op.rstrip("V0123456789") for node in nodes}
    taken_apart = taken_apart or not {*kinds.values()}.isdisjoint(_TAKES_APART)
    for node in nodes:
        if kinds[node.name] in _REORDERS:
            types, shapes = node.attr["output_types"].list.type, node.attr["output_shapes"].list.shape
            yield list(zip(map(tf.as_dtype, types), map(tf.TensorShape, shapes), strict=True)), taken_apart
