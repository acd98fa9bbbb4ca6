"""Training by several replicas, or by several processes: tasks of processes, all with the txl_tf of this checkout."""

import gc
import json
import os

import numpy as np
import tensorflow as tf
from benchmarking.language_models import model_arguments
from benchmarking.processes import peak_memory
from benchmarking.work import Steps, mean_seconds


def compiled_model(shape, dtype="float32"):
    import txl_tf

    lm = txl_tf.TransformerXLLM(**model_arguments(shape), dtype=dtype)
    lm.compile(txl_tf.make_optimizer(learning_rate=1e-3, train_steps=10000))
    return lm


def random_segments(shape, rows):
    import txl_tf

    text = np.random.default_rng(0).integers(0, shape["n_token"], rows * (8 * shape["tgt_len"] + 1))
    return txl_tf.segments(text, rows, shape["tgt_len"], repeat=True)


def train_replicas(name, shape, replicas, seconds):
    """Trains under MirroredStrategy, on logical CPUs that share the cores."""
    from txl_tf.training.distribution import make_strategy

    with make_strategy("mirrored", logical_cpus=replicas).scope():
        lm = compiled_model(shape, "mixed_bfloat16" if name == "txl_tf bfloat16" else "float32")
    work = Steps(lm, random_segments(shape, shape["batch_size"]))
    work.once()
    taken = mean_seconds(work, seconds, least=2)
    return {"tokens_per_second": shape["batch_size"] * shape["tgt_len"] / taken, "peak_memory_mb": peak_memory()}


_worker = {}  # the work of this process, once it has begun


def begin_worker(shape, rows, cluster=None, index=0, bytes_per_pack=0):
    """Makes a process of one thread that trains on `rows` of every batch, and takes its first steps.

    Args:
        cluster: addresses of all workers, or `None` for a process that trains alone.
        index: of this worker.
        bytes_per_pack: size of the buckets that gradients are all-reduced in; 0 for a single one.

    Returns:
        `parameter_bytes` of the model, and `reduced_bytes`, a list of one number for each collective operation of a
        step.
    """
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    strategy = tf.distribute.get_strategy()
    if cluster:
        task = {"type": "worker", "index": index}
        os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": cluster}, "task": task})
        options = tf.distribute.experimental.CommunicationOptions(bytes_per_pack=bytes_per_pack)
        strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
    with strategy.scope():
        lm = compiled_model(shape)
    _worker["work"] = Steps(lm, random_segments(shape, rows * len(cluster or [1])))
    train_steps(2)
    size = sum(variable.numpy().nbytes for variable in lm.trainable_variables)
    return {"parameter_bytes": size, "reduced_bytes": collective_bytes()}


def collective_bytes():
    """Bytes that each collective operation takes in, in all graphs of this process. A step runs each of them once."""
    graphs = [found for found in gc.get_objects() if isinstance(found, tf.Graph)]
    operations = [operation for graph in graphs for operation in graph.get_operations()]
    taken = [operation.inputs[0] for operation in operations if operation.type.startswith("Collective")]
    return sorted(tensor.shape.num_elements() * tensor.dtype.size for tensor in taken)


def train_steps(steps):
    """Trains for so many steps and one more, which is not counted: all workers take as many."""
    ends = _worker["work"].ends(lambda ends: len(ends) > steps)
    return {"milliseconds_per_step": 1000 * (ends[-1] - ends[0]) / steps, "peak_memory_mb": peak_memory()}
