"""Strategies of `tf.distribute`: one device, all accelerators of this machine, several machines, or a TPU."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from txl_tf.config import AUTO, PRECISIONS, STRATEGIES, at_least, one_of
from txl_tf.data.batching import prefetched
from txl_tf.environment import check_listens, is_address, processor_flags, wait_for_all
from txl_tf.errors import ParameterError, named
from txl_tf.files import reason
from txl_tf.schema import check_left_out
from txl_tf.training import slurm

logger = logging.getLogger("txl_tf")

_EXAMPLE = '{"cluster": {"worker": ["host1:2222", "host2:2222"]}, "task": {"type": "worker", "index": 0}}'
_SECONDS_BETWEEN_SIGNALS = 0.1
BFLOAT16_UNITS = ("amx_bf16", "avx512_bf16")  # features of a processor under Linux's names


def make_strategy(
    strategy: str = "auto",
    tpu: str | None = None,
    tpu_zone: str | None = None,
    gcp_project: str | None = None,
    logical_cpus: int | None = None,
) -> tf.distribute.Strategy:
    """A `tf.distribute` strategy by name. Make it before TensorFlow does anything else.

    Args:
        strategy: where to train:

            - `"one"`: one device.
            - `"mirrored"`: all GPUs of the machine, or all logical CPUs without a GPU.
            - `"multi_worker"`: all GPUs (or the processor) of all machines in the environment variable `TF_CONFIG`.
              Each machine runs the same program. If Slurm's `srun` started several tasks, `TF_CONFIG` is set from them.
            - `"tpu"`: the TPU named `tpu`.
            - `"auto"`: `"tpu"` if `tpu` is given, `"multi_worker"` if `TF_CONFIG` names several workers or `srun`
              started several tasks, `"mirrored"` if there are several GPUs or `logical_cpus`, else `"one"`.
        tpu: name or `grpc://` address of the TPU; `"local"` for the TPU of this machine.
        tpu_zone, gcp_project: zone and project of the TPU; by default those of this machine.
        logical_cpus: number of logical CPU devices to create, for `"mirrored"` or `"auto"` on one machine without GPUs.

    Raises:
        ParameterError: the strategy does not exist, `TF_CONFIG` or Slurm's variables are missing or malformed, the TPU
            arguments do not fit, or the strategy does not use logical CPUs.
        ConnectionError: the TPU cannot be reached, or this worker cannot use its address.
    """
    one_of(STRATEGIES)("strategy", strategy)
    has_gpus = bool(tf.config.list_physical_devices("GPU"))
    if logical_cpus is not None:
        at_least(1)("logical_cpus", logical_cpus)
        several_machines = strategy == "auto" and workers_in_environment() > 1
        if strategy not in ("auto", "mirrored") or tpu or has_gpus or several_machines:
            why = "logical CPUs are for strategy=mirrored or auto, on one machine without GPUs"
            check_left_out({"logical_cpus": logical_cpus}, why)
    if strategy == "tpu" or tpu:
        return _tpu_strategy(strategy, tpu, tpu_zone, gcp_project)
    if tpu_zone or gcp_project:
        raise _must_be_tpu(strategy, "tpu_zone and gcp_project")
    if logical_cpus is not None:
        (cpu,) = tf.config.list_physical_devices("CPU")
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * logical_cpus)
    if strategy in ("auto", "multi_worker"):
        cluster = _cluster(_tf_config())
        if strategy == "multi_worker" or (cluster and len(cluster.workers) > 1):
            return _multi_worker_strategy(cluster)
    # Listing logical devices starts TensorFlow, so that its threads cannot be chosen any more.
    gpus = tf.config.list_logical_devices("GPU") if has_gpus else []
    if strategy == "mirrored" or (strategy == "auto" and max(len(gpus), logical_cpus or 0) > 1):
        return _mirrored_strategy(gpus or tf.config.list_logical_devices("CPU"))
    return tf.distribute.get_strategy()


def interruptible(wait: Callable[[], Any]) -> Any:
    """Calls `wait`, a function that waits for other workers in C++, so that Ctrl-C and SIGTERM can end the program.

    `wait` runs in another thread, because Python handles signals only in its main thread, between two operations of
    Python. `wait` must release Python's lock (the GIL), so that other threads run. In another thread than the main one,
    or if the program has its own handler for SIGTERM, such as one that saves a checkpoint, `wait` is called directly.

    Returns:
        The result of `wait`. If `wait` raises an error, it is raised.

    Raises:
        KeyboardInterrupt: on Ctrl-C. The thread keeps waiting until the program ends.
    """
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, None):  # None: a handler in C
        return wait()
    results = []
    errors = []

    def run():
        try:
            results.append(wait())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True, name="txl_tf waits for workers")
    thread.start()
    while thread.is_alive():
        thread.join(_SECONDS_BETWEEN_SIGNALS)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # TensorFlow's handler does not end the program
    if errors:
        raise errors[0]
    return results[0]


def choose_precision(mixed_precision: str, strategy: tf.distribute.Strategy) -> str:
    """The value of `mixed_precision` that is used. All workers must call this function.

    `"auto"` becomes `"bfloat16"` on TPUs, on GPUs from compute capability 8.0 on, and on processors with units for
    bfloat16 (AMX or AVX-512). Otherwise it becomes `"float16"` on GPUs and `"float32"` on processors. The chief chooses
    for all workers. Any other value is returned unchanged.
    """
    choice = mixed_precision if mixed_precision != AUTO else _fastest_precision(strategy)
    # Workers with another value take part, too. Otherwise the number could meet one of another sum over workers.
    chosen = list(PRECISIONS)[broadcast_from_chief(strategy, list(PRECISIONS).index(choice))]
    return chosen if mixed_precision == AUTO else mixed_precision


def _fastest_precision(strategy: tf.distribute.Strategy) -> str:
    """The value of `mixed_precision` that `"auto"` becomes on this machine, see `choose_precision`."""
    gpus = tf.config.list_physical_devices("GPU")
    if isinstance(strategy, tf.distribute.TPUStrategy):
        return "bfloat16"
    if gpus:
        details = tf.config.experimental.get_device_details(gpus[0])
        return "bfloat16" if details.get("compute_capability", (0, 0)) >= (8, 0) else "float16"
    return "bfloat16" if processor_flags().intersection(BFLOAT16_UNITS) else "float32"


class Cluster(NamedTuple):
    """The workers that train together, and which of them this program is."""

    config: str  # the value of `TF_CONFIG` that names them
    workers: list[str]  # their addresses, the chief first
    own: str  # the address of this worker


def _tf_config() -> str | None:
    """The value of `TF_CONFIG`. If it is not set, the value for the tasks of Slurm's `srun`; without both, `None`."""
    config = os.environ.get("TF_CONFIG")
    return config or (slurm.tf_config() if slurm.several_tasks() else None)


def _cluster(config: str | None) -> Cluster | None:
    """The cluster that a value of `TF_CONFIG` describes; `None` without a value.

    Raises:
        ParameterError: `config` is malformed.
    """
    if not config:
        return None
    try:
        parsed = json.loads(config)
        cluster = parsed["cluster"]
        task = parsed["task"]
        kind = task["type"]
        index = int(task["index"])
        workers = [*cluster.get("chief", []), *cluster.get("worker", [])]
        usable = kind in ("chief", "worker") and 0 <= index < len(cluster.get(kind, []))
        usable = usable and len(cluster.get("chief", [])) <= 1
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        message = (
            f"TF_CONFIG is malformed ({type(error).__name__}: {named(error)}), got {named(config)}; it looks like "
            f"{_EXAMPLE}"
        )
        raise ParameterError("TF_CONFIG", config, f"such as {_EXAMPLE}", message) from error
    if not usable or not all(isinstance(worker, str) and is_address(worker) for worker in workers):
        message = (
            "TF_CONFIG must name a task among the one chief and the workers of its cluster, each as host:port, "
            f"got {named(config)}; it looks like {_EXAMPLE}"
        )
        raise ParameterError("TF_CONFIG", config, f"such as {_EXAMPLE}", message)
    return Cluster(config, workers, own=cluster[kind][index])


def _multi_worker_strategy(cluster: Cluster | None) -> tf.distribute.Strategy:
    """Waits for all workers of the cluster, and connects them.

    Raises:
        ParameterError: there is no cluster.
        ConnectionError: this worker cannot use its address.
    """
    if cluster is None:
        message = (
            f"strategy=multi_worker needs the environment variable TF_CONFIG, such as {_EXAMPLE}, or several tasks of "
            "srun"
        )
        raise ParameterError("TF_CONFIG", None, f"such as {_EXAMPLE}", message)
    os.environ["TF_CONFIG"] = cluster.config  # for TensorFlow
    workers = ", ".join(cluster.workers)
    if len(cluster.workers) > 1:
        # TensorFlow's server always listens on 0.0.0.0, whatever the address of the worker (grpc_server_lib.cc).
        logger.warning(
            "TensorFlow listens on all network interfaces, without a password: whoever reaches %s can read and "
            "write files as this user. Let only the workers in, see docs/distributed.md",
            workers,
        )
        logger.info("waiting for all %d workers: %s", len(cluster.workers), workers)
        wait_for_all(cluster.own, cluster.workers)
    try:
        return interruptible(tf.distribute.MultiWorkerMirroredStrategy)
    except tf.errors.UnknownError as error:  # TensorFlow does not name the address
        where = f"the workers are {workers}, and each needs a port of its own"
        raise ConnectionError(f"strategy=multi_worker cannot start: {reason(error)}; {where}") from error


def _mirrored_strategy(devices: Sequence[Any]) -> tf.distribute.Strategy:
    """The strategy for all of these logical devices of this machine."""
    if len(devices) == 1:
        logger.info("strategy=mirrored: there is only one device, %s, and training uses it", devices[0].name)
    # Otherwise, TensorFlow mixes up the sums of two training runs in one process.
    tf.distribute.MirroredStrategy._collective_key_base += 100
    return tf.distribute.MirroredStrategy([device.name for device in devices])


def _must_be_tpu(strategy: str, arguments: str) -> ParameterError:
    """The error for arguments of a TPU that are given with another strategy."""
    return ParameterError("strategy", strategy, f"tpu where {arguments} is given")


def _tpu_strategy(
    strategy: str, tpu: str | None, tpu_zone: str | None, gcp_project: str | None
) -> tf.distribute.TPUStrategy:
    """Connects to a TPU. Arguments: see `make_strategy`.

    Raises:
        ParameterError: `strategy` is not for TPUs, or `tpu` is no name or address.
        ConnectionError: the TPU cannot be reached.
    """
    if strategy not in ("tpu", "auto"):
        raise _must_be_tpu(strategy, "tpu")
    if not tpu:
        message = "strategy=tpu needs tpu, the name or the grpc:// address of the TPU, or local"
        raise ParameterError("tpu", tpu, "a name, grpc://host:port or local", message)
    if tpu.startswith("grpc://"):
        address = tpu.removeprefix("grpc://")
        if not is_address(address):
            allowed = "a name or grpc://host:port"
            raise ParameterError("tpu", tpu, allowed, f"tpu must be {allowed}, got {named(tpu)}")
        check_listens(address, f"the TPU {named(tpu)}")
    try:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver.connect(tpu, tpu_zone, gcp_project)
    except Exception as error:  # the name service, the network and TensorFlow raise errors of many classes
        where = "".join(f", {key} {value}" for key, value in (("zone", tpu_zone), ("project", gcp_project)) if value)
        what = (str(error) or type(error).__name__).splitlines()[0].partition(" with these attrs")[0]
        raise ConnectionError(f"the TPU {named(tpu)}{named(where)} cannot be reached: {named(what)}") from error
    return tf.distribute.TPUStrategy(resolver)


def workers_in_environment() -> int:
    """How many programs will train together by `TF_CONFIG` or, if it is not set, by the tasks of Slurm's `srun`.

    Raises:
        ParameterError: `TF_CONFIG` or Slurm's variables are malformed.
    """
    cluster = _cluster(_tf_config())
    return len(cluster.workers) if cluster else 1


def num_workers(strategy: tf.distribute.Strategy) -> int:
    """The number of programs that train together, usually one on each machine. A TPU needs only one program."""
    if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        cluster = _cluster(os.environ.get("TF_CONFIG"))
        return len(cluster.workers) if cluster else 1
    return 1


def is_default(strategy: tf.distribute.Strategy) -> bool:
    """Whether a strategy is TensorFlow's default, which a program has without choosing one."""
    with strategy.scope():
        return not tf.distribute.has_strategy()


def is_chief(strategy: tf.distribute.Strategy) -> bool:
    """Whether this program is the chief, the only one of several workers that writes files and logs."""
    return worker_index(strategy) == 0


def worker_index(strategy: tf.distribute.Strategy) -> int:
    """The index of this worker in the order of the replicas. The chief has 0."""
    if num_workers(strategy) == 1:
        return 0
    resolver: Any = strategy.cluster_resolver
    chiefs = len(resolver.cluster_spec().as_dict().get("chief", []))
    return resolver.task_id + (chiefs if resolver.task_type == "worker" else 0)


def broadcast_from_chief(strategy: tf.distribute.Strategy, number: int) -> int:
    """Returns the `number` of the chief on every worker. All workers must call it."""
    return int(_sum_over_workers(strategy, number if is_chief(strategy) else 0))


def any_worker(strategy: tf.distribute.Strategy, flag: bool) -> bool:
    """Whether `flag` is set on any worker. All workers must call it."""
    return bool(_sum_over_workers(strategy, int(flag)))


def text_of_worker(strategy: tf.distribute.Strategy, worker: int, text: str) -> str:
    """Returns the `text` of the worker of this index on every worker. All workers must call it."""
    own = np.frombuffer(text.encode() if worker_index(strategy) == worker else b"", np.uint8)
    sent = np.zeros(_sum_over_workers(strategy, len(own)), np.int64)
    sent[: len(own)] = own  # the other workers add zeros
    return bytes(np.asarray(_sum_over_workers(strategy, sent), np.uint8)).decode()


def all_rows(strategy: tf.distribute.Strategy, tensors: list) -> list[tf.Tensor]:
    """Returns each of `tensors` with the rows of all replicas, in order. All workers must call this function.

    Args:
        strategy: strategy that has the replicas.
        tensors: values of which every replica has its share of the rows.
    """
    if num_workers(strategy) == 1:
        return [tf.concat(replica_tensors(tensor), 0) for tensor in tensors]
    return _gather_function(strategy)(tensors)


def replica_tensors(value: Any) -> list[Any]:
    """The tensors of a value on the replicas of this worker, as a list. A plain tensor gives a list of itself."""
    return tf.nest.flatten(value, expand_composites=True)


def to_replicas(strategy: tf.distribute.Strategy, shares: Sequence[Any], dtype: Any) -> Any:
    """Returns a value that is `shares[r]` on replica r, on the device of the replica. All workers must call it.

    Args:
        strategy: strategy that has the replicas.
        shares: an array or tensor for each replica of all workers, all of one shape.
        dtype: dtype of the value.
    """
    if strategy.num_replicas_in_sync == 1:
        return tf.cast(shares[0], dtype)
    return _share_function(strategy)(tf.cast(np.stack(shares), dtype))


def sum_over_replicas(tensors: Any) -> Any:
    """The sums over all replicas of the tensors in a nested structure. Every replica must call it, within its step."""
    context = tf.distribute.get_replica_context()
    if context.num_replicas_in_sync == 1:
        return tensors
    # It does what `context.all_reduce` does, but without `tf.custom_gradient`, which would keep the graph in memory for
    # ever: see `kernels/gradients.py`.
    flat = tf.nest.flatten(tensors)
    sums = context.merge_call(
        lambda strategy, *flat: strategy.extended.batch_reduce_to("SUM", [(x, x) for x in flat]), flat
    )
    return tf.nest.pack_sequence_as(tensors, sums)


def _once_per_strategy(make: Any) -> Callable:
    """Decorator: computes `make(strategy)` once for each strategy, and stores the result on the strategy."""

    @functools.wraps(make)
    def get(strategy):
        values = vars(strategy).setdefault("_txl_tf", {})
        if make.__name__ not in values:
            values[make.__name__] = make(strategy)
        return values[make.__name__]

    return get


@_once_per_strategy
def _gather_function(strategy: Any) -> Callable:
    """The function that concatenates the rows of all replicas, for each tensor in a list."""
    return tf.function(lambda tensors: [strategy.gather(tensor, 0) for tensor in tensors])


@_once_per_strategy
def _share_function(strategy: Any) -> Callable:
    """The function that gives replica r the element r of a tensor."""

    def share(shares):
        return shares[tf.distribute.get_replica_context().replica_id_in_sync_group]

    return tf.function(lambda shares: strategy.run(share, args=(shares,)), reduce_retracing=True)


def _sum_over_workers(strategy: Any, number: Any) -> Any:
    """The sum of the integers, or of the arrays of integers, of all workers, who must all call it."""
    if num_workers(strategy) == 1:
        return number
    return interruptible(lambda: _sum_function(strategy)(tf.constant(number, tf.int64)).numpy())


@_once_per_strategy
def _sum_function(strategy: Any) -> Callable:
    """The function that sums one number, or one array, of each worker."""
    replicas = strategy.num_replicas_in_sync // num_workers(strategy)

    def share(number):  # the number on one replica of each worker, 0 on the others
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        return number if replica % replicas == 0 else tf.zeros_like(number)

    return tf.function(lambda number: strategy.reduce("SUM", strategy.run(share, args=(number,)), axis=None))


@contextlib.contextmanager
def only_chief_logs(strategy: tf.distribute.Strategy) -> Iterator[None]:
    """In this block, the library logs only warnings on workers other than the chief."""
    level = logger.level
    if not is_chief(strategy):
        logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


def rows_of_this_worker(strategy: tf.distribute.Strategy, rows: int) -> range:
    """The indices of the rows of a batch that belong to the replicas of this worker. They are consecutive.

    Args:
        strategy: strategy that has the workers.
        rows: number of rows of the batch, a multiple of the number of workers.
    """
    share = rows // num_workers(strategy)
    index = worker_index(strategy)
    return range(index * share, (index + 1) * share)


def own_rows(dataset: tf.data.Dataset, strategy: tf.distribute.Strategy) -> tf.data.Dataset:
    """Returns a dataset with this worker's rows of each batch of a dataset. Batches are tuples.

    Reading a batch whose rows are not a multiple of the number of replicas raises InvalidArgumentError.
    """
    replicas = strategy.num_replicas_in_sync
    workers = num_workers(strategy)
    index = worker_index(strategy)

    def own(x):
        """The rows of one tensor that belong to this worker."""
        rows = tf.shape(x)[0]
        requirement = "the number of rows of the batch must be divisible by the number of replicas, got"
        text = [requirement, rows, "rows on", replicas, "replicas"]
        with tf.control_dependencies([tf.debugging.Assert(rows % replicas == 0, text)]):
            return tf.split(x, workers)[index]

    return dataset.map(lambda *batch: tf.nest.map_structure(own, batch))


def divided(dataset: tf.data.Dataset, strategy: tf.distribute.Strategy) -> Any:
    """Distributes a dataset of this worker's rows. Each replica gets a contiguous share of every batch.

    `experimental_distribute_dataset` cannot be used: of W workers, it would give worker w the shares w, w + W, ... of
    whole batches, but the rows of a worker must be consecutive.
    """
    replicas = strategy.num_replicas_in_sync // num_workers(strategy)

    def shares_of_batch(*batch):
        """The shares of a batch. (`unbatch` crashes for tensors without elements, such as weights `[B, 0]`.)"""
        shares = tf.nest.map_structure(lambda x: tf.stack(tf.split(x, replicas)), batch)
        return tf.data.Dataset.range(replicas).map(lambda i: tf.nest.map_structure(lambda x: x[i], shares))

    def shares_of(context):
        """The dataset of the shares of this worker's replicas, one after the other."""
        shares = dataset
        if replicas > 1:
            shares = shares.flat_map(shares_of_batch)
            if dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
                shares = shares.repeat()  # tells TensorFlow that it is infinite; else every step asks for the end
        return prefetched(shares)

    return strategy.distribute_datasets_from_function(shares_of)
