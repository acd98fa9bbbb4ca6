"""The tasks of a process of the benchmark, see processes.py. Each returns a dict of figures.

The process imports txl_tf from the checkout that PYTHONPATH names first. It may be old, so this file uses only public
names.
"""

import gc
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # errors come as exceptions; the rest is noise

import numpy as np
import tensorflow as tf
from benchmarking.contestants import make_contestants, tokens_of_work
from benchmarking.language_models import carrying, model_arguments, reference_next
from benchmarking.turns import answer_requests, begun, do_twice, peak_memory, turn
from benchmarking.work import Steps, mean_seconds, port

# ------------------------------------------------------------------------------------------- most modes: some turns


def begin(mode, name, shape, jit=False, run=None):
    """Makes a contestant and does its work twice, which traces its graphs and allocates memory.

    Later tasks `turn` repeat this work. Arguments: see `make_contestants`.
    """
    started = time.perf_counter()
    work = make_contestants(mode, jit, run)[name](shape)
    built = time.perf_counter()
    first = do_twice(work, tokens_of_work(mode, name, shape))
    figures = {"build_seconds": built - started, "first_step_seconds": first}
    return {**figures, "weights": work.model.count_params()} if hasattr(work, "model") and mode == "peers" else figures


# ------------------------------------------------------------------------------- preparation, export and start-up


def prepare(name, folder):
    """Prepares train.txt, valid.txt and test.txt in `folder` as WikiText-103: a vocabulary and token files.

    The peak memory includes TensorFlow and Keras also for the contestant "reference", because the original program
    imports TensorFlow.
    """
    import txl_tf

    words = 0
    for split in ("train", "valid", "test"):
        with open(os.path.join(folder, f"{split}.txt")) as file:
            words += sum(len(line.split()) + 1 for line in file)  # with the end of each line
    with tempfile.TemporaryDirectory() as temporary:
        output = os.path.join(temporary, "prepared")
        reference = port("reference_data")
        started = time.perf_counter()
        if name == "reference":
            reference.prepare(folder, output)
        else:
            txl_tf.prepare(data_dir=output, dataset="wt103", data_path=folder)
        taken = time.perf_counter() - started
    return {"words_per_second": words / taken, "words": words, "peak_memory_mb": peak_memory()}


def export(name, shape, directory):
    """Writes a SavedModel of signatures `initial_state` and `next`: the library's, or the reference's function."""
    import txl_tf

    arguments = model_arguments(shape)
    if name.startswith("txl_tf"):
        lm = txl_tf.TransformerXLLM(**arguments)
        started = time.perf_counter()
        txl_tf.export_saved_model(lm, directory, weights="bfloat16" if "bfloat16" in name else "float32")
    else:
        model = port("reference_model").ReferenceModel(**arguments)
        module: Any = tf.Module()
        module.weights = list(model.weights.values())

        def next_token(tokens, state):
            log_probs, mems = reference_next(model, tf.transpose(tokens), tf.unstack(state))
            top = tf.math.top_k(log_probs, 10)
            return {"log_probs": top.values, "ids": top.indices, "state": tf.stack(mems)}

        state = tf.TensorSpec([shape["n_layer"], shape["mem_len"], None, shape["d_model"]], tf.float32, "state")
        inputs = [tf.TensorSpec([None, None], tf.int32, "tokens"), state]
        batch_size = [tf.TensorSpec(None, tf.int32, "batch_size")]
        signatures = {
            "initial_state": tf.function(
                lambda batch_size: {"state": tf.stack(model.initial_mems(batch_size))}, input_signature=batch_size
            ),
            "next": tf.function(next_token, input_signature=inputs),
        }
        started = time.perf_counter()
        tf.saved_model.save(module, directory, signatures=signatures)
    taken = time.perf_counter() - started
    size = sum(path.stat().st_size for path in Path(directory).rglob("*") if path.is_file())
    return {"export_seconds": taken, "megabytes": size / 1e6}


def load(directory):
    """Loads a SavedModel with TensorFlow alone, and predicts two tokens with its signature `next`.

    Later tasks `turn` predict further tokens.
    """
    started = time.perf_counter()
    signatures = tf.saved_model.load(directory).signatures
    loaded = time.perf_counter()

    def next_token(carried):
        result = signatures["next"](**carried)
        tokens = result["ids"][:, :1]
        return tokens, {"tokens": tokens, "state": result["state"]}

    state = signatures["initial_state"](batch_size=tf.constant(1))["state"]
    work = carrying(next_token, {"tokens": tf.zeros([1, 1], tf.int32), "state": state})
    return {"load_seconds": loaded - started, "first_request_seconds": do_twice(work, 1)}


def start_reference(shape, text):
    """Makes the reference's vocabulary of the file `text`, and trains the reference for one step on its characters."""
    vocab = port("reference_data").ReferenceVocab(delimiter="")
    vocab.count_file(text)
    vocab.build_vocab()
    ids = vocab.encode_file(text, add_eos=False)
    arguments = {**model_arguments(shape), "n_token": len(vocab.idx2sym)}
    model = port("reference_model").ReferenceModel(**arguments)
    model.compile(learning_rate=1e-3, train_steps=10000)
    tgt_len = shape["tgt_len"]
    rows = shape["batch_size"]
    columns = ids[: len(ids) // rows * rows].reshape(rows, -1).T.astype(np.int32)
    model.train_step(columns[:tgt_len], columns[1 : tgt_len + 1], model.initial_mems(rows))[0].numpy()
    return {"peak_memory_mb": peak_memory()}


# ------------------------------------------------------------- training by several replicas, or by several processes


def compiled_model(shape, dtype="float32"):
    """A compiled language model of the library."""
    import txl_tf

    lm = txl_tf.TransformerXLLM(**model_arguments(shape), dtype=dtype)
    lm.compile(txl_tf.make_optimizer(learning_rate=1e-3, train_steps=10000))
    return lm


def random_segments(shape, rows):
    """An endless dataset of segments of a random text, in batches of `rows` rows."""
    import txl_tf

    text = np.random.default_rng(0).integers(0, shape["n_token"], rows * (8 * shape["tgt_len"] + 1))
    return txl_tf.segments(text, rows, shape["tgt_len"], repeat=True)


def train_replicas(name, shape, replicas, seconds):
    """Trains with MirroredStrategy on several replicas: logical CPUs that share the cores.

    `name` is the contestant. A turn takes at least `seconds`.
    """
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * replicas)
    with tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(replicas)]).scope():
        lm = compiled_model(shape, "mixed_bfloat16" if name == "txl_tf bfloat16" else "float32")
    work = Steps(lm, random_segments(shape, shape["batch_size"]))
    work.once()
    taken = mean_seconds(work, seconds, least=2)
    return {"tokens_per_second": shape["batch_size"] * shape["tgt_len"] / taken, "peak_memory_mb": peak_memory()}


def begin_worker(shape, rows, cluster=None, index=0, bytes_per_pack=0):
    """Makes this process a worker with one thread, and trains for some steps. Later tasks `train_steps` continue.

    Args:
        shape: sizes of the model.
        rows: rows of every batch that this worker trains on.
        cluster: addresses of all workers, or `None` for a process that trains alone.
        index: index of this worker in `cluster`.
        bytes_per_pack: size of the buckets that gradients are all-reduced in; 0 for a single one.

    Returns:
        `parameter_bytes`, the bytes of the model's weights; and `reduced_bytes`, a list with the bytes of each
        collective operation of a step.
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
    begun["work"] = Steps(lm, random_segments(shape, rows * len(cluster or [1])))
    train_steps(2)
    size = sum(variable.numpy().nbytes for variable in lm.trainable_variables)
    return {"parameter_bytes": size, "reduced_bytes": collective_bytes()}


def collective_bytes():
    """A sorted list of the bytes of the input of each collective operation in the graphs of this process.

    A step runs each operation once.
    """
    graphs = [found for found in gc.get_objects() if isinstance(found, tf.Graph)]
    operations = [operation for graph in graphs for operation in graph.get_operations()]
    inputs = [operation.inputs[0] for operation in operations if operation.type.startswith("Collective")]
    return sorted(tensor.shape.num_elements() * tensor.dtype.size for tensor in inputs)


def train_steps(steps):
    """Trains for one step and then for `steps` steps, which are timed. `steps` must be the same for all workers."""
    ends = begun["work"].ends(lambda ends: len(ends) > steps)
    return {"milliseconds_per_step": 1000 * (ends[-1] - ends[0]) / steps, "peak_memory_mb": peak_memory()}


if __name__ == "__main__":
    answer_requests(begin, turn, prepare, export, load, start_reference, begin_worker, train_steps, train_replicas)
