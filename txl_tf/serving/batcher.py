"""Joins requests for a signature that come at the same time into one batch, for a server in Python.

    batcher = Batcher(signatures, max_rows=64)
    results = await batcher.call("score_text", {"text": np.array([b"to be"])})     # {"nll": ..., "symbols": ...}

While a signature computes, new requests for it wait. Then the first of them and those that can be joined with it, up
to `max_rows` rows, are computed as one batch. Requests can be joined if they have the same arguments, and arrays of the
same dtypes (strings of any length) and of the same shapes apart from the number of rows. Requests for `generate` and
for `generate_texts` must also have the same largest `max_new_tokens` and `num_return_sequences`. Requests for
`initial_state` are never joined.
Rows do not affect each other, so a request gets the result that it would get alone, up to rounding errors. If a batch
fails, its requests are computed one by one, so that each gets its own result or error.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
from collections.abc import Collection
from typing import Any

import numpy as np
import tensorflow as tf

from txl_tf.errors import ParameterError
from txl_tf.serving.decoder import Busy

MAX_COMPUTING = 2  # most signatures that compute at the same time
# Names of results that contain the lengths of rows. Other results of the same signature are padded to the longest row.
_LENGTHS = ("lengths", "numbers")


@dataclasses.dataclass(frozen=True, eq=False)  # arrays cannot be compared
class _Request:
    arrays: dict[str, np.ndarray]  # the arguments by name, each `[rows, ...]` if the request can be joined
    rows: int | None  # `None` for a request that is not joined with others
    key: Any  # requests with equal keys can be joined; `None` if this one cannot
    result: asyncio.Future


class Batcher:
    """Calls signatures for requests that come concurrently, see the module.

    Args:
        signatures: `{name: function}`, as `local_signatures(...).signatures()` returns them.
        max_rows: most rows of a joined batch. A single request may have more.
        max_waiting: most requests that wait, for all signatures together.

    Attributes:
        largest: number of requests in the largest batch so far.
    """

    def __init__(self, signatures: dict[str, Any], max_rows: int, max_waiting: int = 128):
        self.signatures = signatures
        self.max_rows = max_rows
        self.max_waiting = max_waiting
        self.largest = 0
        self._waiting: dict[str, collections.deque[_Request]] = collections.defaultdict(collections.deque)
        self._tasks: dict[str, asyncio.Task] = {}
        self._compute_slots: asyncio.Semaphore | None = None  # made when the event loop runs

    async def call(self, name: str, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Calls a signature, perhaps together with other requests.

        Args:
            name: name of the signature.
            arrays: `{argument: array}`.

        Returns:
            `{result: array}`, with the rows of this request alone.

        Raises:
            Busy: `max_waiting` requests are waiting.
            ParameterError: an array has another shape than the signature takes.
            tf.errors.OpError: the signature refuses the request.
        """
        _check_shapes(self.signatures[name], arrays)
        if sum(map(len, self._waiting.values())) >= self.max_waiting:
            raise Busy(f"{self.max_waiting} requests are waiting: try again later")
        result = asyncio.get_running_loop().create_future()
        self._waiting[name].append(_request(name, arrays, required_arguments(self.signatures[name]), result))
        if name not in self._tasks:
            self._tasks[name] = asyncio.create_task(self._compute_waiting(name))
        return await result

    async def _compute_waiting(self, name: str) -> None:
        """Computes the waiting requests for a signature, batch by batch, until none waits."""
        self._compute_slots = self._compute_slots or asyncio.Semaphore(MAX_COMPUTING)
        waiting = self._waiting[name]
        try:
            while waiting:
                async with self._compute_slots:
                    batch = self._next_batch(waiting)
                    if batch:
                        self.largest = max(self.largest, len(batch))
                        await self._answer(name, batch)
        finally:
            del self._tasks[name]

    def _next_batch(self, waiting: collections.deque[_Request]) -> list[_Request]:
        """Removes from `waiting` the first request and those that can be joined with it, and returns them.

        Leaves out cancelled requests: their clients have closed the connection. The list is empty if no other request
        waits.
        """
        while waiting and waiting[0].result.cancelled():
            waiting.popleft()
        if not waiting:
            return []
        first = waiting.popleft()
        batch = [first]
        if first.rows is None:
            return batch
        rows = first.rows
        for request in list(waiting):
            has_room = request.rows is not None and rows + request.rows <= self.max_rows
            if has_room and request.key == first.key and not request.result.cancelled():
                rows += request.rows or 0  # never `None` here, which a type checker cannot see
                batch.append(request)
                waiting.remove(request)
        return batch

    async def _answer(self, name: str, batch: list[_Request]) -> None:
        """Computes a batch, and sets the result of each request.

        If the batch fails, computes each of its requests alone. A request that fails alone gets the error.
        """
        try:
            results = await asyncio.to_thread(self._compute, name, batch)
        except Exception as error:  # every kind of error is handed to the caller
            if len(batch) > 1:
                for request in batch:
                    await self._answer(name, [request])
            elif not batch[0].result.done():
                batch[0].result.set_exception(error)
            return
        for request, result in zip(batch, results, strict=True):
            if not request.result.done():
                request.result.set_result(result)

    def _compute(self, name: str, batch: list[_Request]) -> list[dict[str, np.ndarray]]:
        """Calls the signature for a batch, and returns the results of each request. Blocks, so it runs in a thread."""
        arrays = batch[0].arrays
        if len(batch) > 1:
            arrays = {key: np.concatenate([request.arrays[key] for request in batch]) for key in arrays}
        tensors = self.signatures[name](**{key: tf.constant(array) for key, array in arrays.items()})
        results = {key: tensor.numpy() for key, tensor in tensors.items()}
        if len(batch) == 1:
            return [results]
        ends = np.cumsum([request.rows or 0 for request in batch])
        spans = [slice(end - (request.rows or 0), end) for request, end in zip(batch, ends, strict=True)]
        return [_trimmed(name, {key: array[rows] for key, array in results.items()}) for rows in spans]


def _check_shapes(signature: Any, arrays: dict[str, np.ndarray]) -> None:
    """Raises ParameterError if an array has a shape that the signature does not take.

    In TensorFlow 2.21, a call with such an array would block all later calls.
    """
    for spec in signature.input_signature:
        array = arrays.get(spec.name)
        if array is not None and not spec.shape.is_compatible_with(array.shape):
            sizes = ", ".join("any" if size is None else str(size) for size in spec.shape)
            message = f"{spec.name} must be of the shape [{sizes}], got {list(array.shape)}"
            raise ParameterError(spec.name, array.shape, f"of the shape [{sizes}]", message)


def required_arguments(signature: Any) -> list[str]:
    """Returns the names of the arguments of a signature that have no default value."""
    parameters = signature.function_spec.function_type.parameters
    return [name for name, parameter in parameters.items() if not parameter.optional]


def _request(name: str, arrays: dict[str, np.ndarray], required: Collection[str], result: asyncio.Future) -> _Request:
    """Makes a `_Request`, and decides whether it can be joined with others.

    In a request that can be joined, an optional array with one row, which stands for all rows, is repeated for each
    row.

    Args:
        name: name of the signature.
        arrays: `{argument: array}`.
        required: names of the arguments that have one row for each row of the result.
        result: gets the results.
    """
    sizes = {argument: array.shape[0] if array.ndim else -1 for argument, array in arrays.items()}
    rows = next((size for argument, size in sizes.items() if argument in required), 0)
    # `initial_state` makes as many rows as its argument says, so its requests are not joined. An array of another size
    # is wrong: computed alone, the request gets its own error, which names the argument.
    fits = all(size == rows or (size == 1 and argument not in required) for argument, size in sizes.items())
    if name == "initial_state" or rows < 1 or not fits:
        return _Request(arrays, None, None, result)
    arrays = {argument: np.repeat(x, rows, 0) if len(x) < rows else x for argument, x in arrays.items()}
    # The length in a dtype of strings, such as 5 in S5, is that of the longest string of the request: it may differ.
    kinds = [
        (argument, x.dtype.kind if x.dtype.kind in "OSU" else x.dtype.str, x.shape[1:])
        for argument, x in arrays.items()
    ]
    # The largest of these numbers decide the shapes of the results, so only requests with equal ones are joined.
    largest = []
    if name in ("generate", "generate_texts"):
        largest = [arrays[option].max() for option in ("num_return_sequences", "max_new_tokens") if option in arrays]
    return _Request(arrays, rows, (sorted(kinds), largest), result)


def _trimmed(name: str, results: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Removes the padding that results of a request have only because other requests in the batch have longer rows.

    Results of `generate` have no such padding: all requests of a batch have equally long rows.
    """
    lengths = next((results[key] for key in _LENGTHS if key in results), None)
    if lengths is None or name == "generate":
        return results
    longest = int(lengths.max(initial=0))
    axis = lengths.ndim  # the axis of the elements of a row, in results that are padded
    return {key: x.take(range(longest), axis) if x.ndim > axis else x for key, x in results.items()}
