"""Preparation of a text on a Ray cluster: its workers count, sample and encode portions of it at the same time.

    corpus = txl_tf.prepare(data_dir="data/mine", data_path="gs://bucket/texts/*.jsonl.gz", ray=True)

The machines of the cluster read the text. The driver, which is the program that calls `prepare`, adds up their counts,
puts their tokens in order and writes the folder. Tokens and vocabulary are the same as without a cluster.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any

from txl_tf.calls import checked_call
from txl_tf.cluster.connection import connected
from txl_tf.config import ClusterConfig, TextConfig
from txl_tf.data.text import corpus
from txl_tf.data.text.parquet import Rows
from txl_tf.data.text.portions import cut_in_portions
from txl_tf.data.text.texts import TEXT_FIELD, FilePart
from txl_tf.errors import ParameterError
from txl_tf.files import reason
from txl_tf.schema import check_names, keywords_of

_AHEAD = 2  # the most portions per worker that are started and whose results were not all taken
_RETRIES = 10  # how often Ray tries a portion again if its worker dies

logger = logging.getLogger("txl_tf")


@checked_call
def prepare(
    texts: Any = None, data_dir: str | os.PathLike[str] | None = None, *,
    ray: bool | str | ClusterConfig | None = None, **options: Any,
) -> corpus.Corpus:  # fmt: skip
    """Prepares a corpus in a folder, in bounded memory, for `train.py --data_dir` and `txl_tf.segments`.

        corpus = txl_tf.prepare(["a text", "another"], "data/mine", level="subword", vocab_size=8000)
        corpus = txl_tf.prepare(data_dir="data/crawl", data_path="crawl/*.jsonl.gz", level="byte", ray=True)
        corpus = txl_tf.prepare(ray.data.read_parquet("s3://bucket/texts"), "data/texts", ray=True)

    Args:
        texts: an iterable of texts, see `prepare_texts`; with `ray`, also a `ray.data.Dataset` with a column
            `text_field`. Without `texts`, the option `data_path` or `dataset` names the files, see `corpus.prepare`.
        data_dir: the folder. A folder that was prepared with the same options is left as it is.
        ray: the Ray cluster to use: an address, a `ClusterConfig`, or `True`. `True` is the cluster that this process
            is connected to, or else the one of `RAY_ADDRESS`, or else a new one on this machine. Without a value, this
            process prepares the text alone.
        **options: options of `prepare_texts`, or without `texts` of `corpus.prepare`, such as `level`.

    Returns:
        The prepared `Corpus`.

    Raises:
        ValueError: an argument or a text is wrong.
        OSError: the folder cannot be written to, or the cluster cannot be reached or has no room for a worker.
    """
    if data_dir is None:
        raise ParameterError("data_dir", None, "the folder to prepare")
    data_dir = os.fspath(data_dir)
    has_path = bool(options.get("data_path") or options.get("dataset"))
    if (texts is not None) == has_path:
        message = f"either texts or data_path must be given, got {'both' if has_path else 'neither'}"
        allowed = "left out where data_path is given" if has_path else "given where data_path is not"
        raise ParameterError("texts", texts, allowed, message)
    inner = corpus.prepare if has_path else corpus.prepare_texts
    check_names("prepare", options, dict.fromkeys([*keywords_of(prepare), *keywords_of(inner), *TextConfig.names()]))
    is_dataset = type(texts).__module__ == "ray.data.dataset"  # not `isinstance`: Ray may not be installed
    if is_dataset and not ray:
        raise ParameterError("ray", ray, "True", "texts are a ray.data.Dataset, which needs ray=True")
    with contextlib.ExitStack() as stack:
        if ray:
            config = ray if isinstance(ray, ClusterConfig) else ClusterConfig(ray_address=None if ray is True else ray)
            dataset = (texts, options.get("text_field", TEXT_FIELD)) if is_dataset else None
            options["workers"] = stack.enter_context(ClusterWorkers(config, dataset))
        if has_path:
            return corpus.prepare(data_dir, **{"dataset": "text", **options})
        return corpus.prepare_texts(None if is_dataset else texts, data_dir, **options)


class ClusterWorkers(contextlib.ExitStack):
    """Runs functions on portions of a text on a Ray cluster. It has the methods of `ThisProcess`.

    It is a context manager: it connects to the cluster at the first use, and disconnects at the end of the block.

    Args:
        config: the cluster, and the resources to use.
        dataset: a `ray.data.Dataset` to read instead of files, and its column of texts.
    """

    def __init__(self, config: ClusterConfig, dataset: tuple[Any, str] | None = None):
        super().__init__()
        self._config = config
        self._dataset: Any = dataset

    @functools.cached_property
    def _ray(self) -> ModuleType:
        """The package Ray, connected to the cluster.

        Raises:
            ValueError: Ray is not installed, or the address is malformed.
            OSError: the cluster cannot be reached, or none of its machines is large enough for a worker.
        """
        ray = self.enter_context(connected(self._config.ray_address))
        cpus = max((node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]), default=0)
        if cpus < self._config.ray_cpus:
            raise OSError(
                f"the Ray cluster has no room for a worker of ray_cpus={self._config.ray_cpus}: "
                f"its largest machine has {cpus:g}"
            )
        # A sum over all machines: if the free cores are on several machines, a worker may wait without this line.
        if ray.available_resources().get("CPU", 0) < self._config.ray_cpus:
            logger.info("the Ray cluster is busy: waiting for room for a worker")
        return ray

    # ------------------------------------------------------------------------------------------------- portions

    def portions(self, paths: Iterable[str]) -> Sequence[list[FilePart] | Rows]:
        """The portions of the files at `paths`, several for each worker; or those of the data set, if there is one."""
        return self._rows if self._dataset else cut_in_portions(paths, self._n_workers())

    @functools.cached_property
    def _rows(self) -> list[Rows]:
        """The blocks of the data set that have rows, in order, with the number of the first row of each, from 1.

        The data set is read once, and the cluster stores the blocks. Raises ParameterError if there are no rows.
        """
        dataset, field = self._dataset
        dataset.context.execution_options.preserve_order = True
        tables = dataset.to_arrow_refs()
        n_rows = self._ray.get([self._ray.remote(_n_rows).remote(table) for table in tables])
        firsts = itertools.accumulate(n_rows, initial=1)
        rows = [Rows(table, field, first) for table, first, n in zip(tables, firsts, n_rows, strict=False) if n]
        if not rows:
            raise ParameterError("texts", [], "at least one text", "texts must hold at least one text, got none")
        return rows

    # ---------------------------------------------------------------------------------------------------- tasks

    def each(self, function: Callable, calls: Iterable[tuple], progress: Callable | None = None) -> Iterator[Any]:
        """Yields the results of a generator function for each of `calls`, in order, as `ThisProcess.each` does.

        A call is a task on a worker. If the caller stops taking results, the unfinished tasks are cancelled.

        Args:
            function: generator function.
            calls: tuples of its arguments.
            progress: called with the number of bytes that were read since its last call.
        """
        options = {"num_cpus": self._config.ray_cpus, "num_returns": "streaming", "max_retries": _RETRIES}
        work = self._ray.remote(scheduling_strategy="SPREAD", **options)(_work)
        begin = functools.partial(work.remote, os.getcwd(), self._ray.put(function))
        calls = iter(calls)
        tasks = collections.deque()  # the started tasks whose results were not all taken, in order
        try:
            while True:
                n_workers = self._n_workers()
                room = min(n_workers - len(self._unfinished(tasks)), _AHEAD * n_workers - len(tasks))
                tasks.extend(begin(*call) for call in itertools.islice(calls, max(room, 0)))
                if not tasks:
                    return
                ready, _ = self._ray.wait([tasks[0], *self._unfinished(tasks)], num_returns=1, fetch_local=False)
                if tasks[0] not in ready:
                    continue
                result, n_bytes = self._next_result(tasks)
                if progress:
                    progress(n_bytes)
                if result is not None:
                    yield result
        finally:
            for task in tasks:
                self._ray.cancel(task)

    def _n_workers(self) -> int:
        """The requested number of workers; without one, as many as the cores of the cluster allow, at least 1."""
        cpus = (node["Resources"].get("CPU", 0) for node in self._ray.nodes() if node["Alive"])
        return self._config.ray_workers or max(1, sum(int(n // max(self._config.ray_cpus, 1)) for n in cpus))

    def _unfinished(self, tasks: Iterable) -> list[Any]:
        """For each task that has not ended, a reference that becomes ready when the task ends."""
        ends = [task.completed() for task in tasks]
        return self._ray.wait(ends, num_returns=len(ends), timeout=0, fetch_local=False)[1] if ends else []

    def _next_result(self, tasks: collections.deque) -> tuple[Any, int]:
        """The next result of the first task, and the number of bytes read for it.

        At the end of the task, removes it from `tasks`, and returns `(None, 0)`.

        Raises:
            ValueError, OSError: raised by the task; or the cluster failed.
        """
        errors = self._ray.exceptions
        try:
            return self._ray.get(next(tasks[0]))
        except StopIteration:
            tasks.popleft()
            return None, 0
        except errors.RayError as error:
            cause = error.cause if isinstance(error, errors.RayTaskError) else error
            if isinstance(cause, FileNotFoundError):
                cause.add_note("Every machine of the cluster must have it, under the same path.")
            if isinstance(cause, (ValueError, OSError)):
                raise cause from error
            if isinstance(cause, (errors.RayError, ImportError, RuntimeError)):
                raise OSError(f"the Ray cluster fails at a portion of the text: {reason(cause)}") from error
            raise


def _n_rows(table: Any) -> int:
    """The number of rows of an Arrow table. Workers call it, so that the driver does not fetch the table."""
    return table.num_rows


def _work(folder: str, function: Callable, *given: Any) -> Iterator[tuple[Any, int]]:
    """Calls a generator function in a worker.

    Args:
        folder: working directory of the driver. If the worker's machine has it, the worker changes to it, so that
            relative paths mean the same files.
        function: generator function of `(*arguments, progress=, numbered=)`.
        *given: its arguments. In `Rows`, the table is a reference to Ray's store.

    Yields:
        `(result, n_bytes)`: each result, with the number of bytes read since the one before; and at the end `(None,
        n_bytes)`, with the bytes read after the last result.
    """
    import ray

    if os.path.isdir(folder):
        os.chdir(folder)
    arguments = [value._replace(table=ray.get(value.table)) if isinstance(value, Rows) else value for value in given]
    n_bytes = 0

    def progress(n):
        nonlocal n_bytes
        n_bytes += n

    try:
        for result in function(*arguments, progress=progress, numbered=False):
            yield result, n_bytes
            n_bytes = 0
    except ValueError:
        # The error should name the line in the whole file. So call the function again with `numbered`, which is slow,
        # because it also counts the lines before the portion.
        for _ in function(*arguments, numbered=True):
            pass  # raises the same error, with the number of the line
        raise
    yield None, n_bytes
