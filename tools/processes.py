"""What the benchmark measures in a process of its own, which imports what it needs and no more.

`alone("load", directory=..., seconds=...)` calls the function of that name in a new Python, as

    python tools/processes.py '{"function": "load", "directory": ..., "seconds": ...}'

and returns the dict of figures that it prints, as JSON, in its last line.
"""

import inspect
import json
import os
import runpy
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).parents[1]
IMPORTS = ("interpreter", "import TensorFlow", "import the rest")  # the first imports Keras, which imports Matplotlib
WORK = ("flags and text", "model", "set up fit", "trace, first step", "second step")


def alone(function, **arguments):
    """The figures of `function(**arguments)`, measured in a new process.

    Raises:
        RuntimeError: it failed; with what it wrote to standard error.
    """
    command = [sys.executable, __file__, json.dumps({"function": function, **arguments})]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{function} of {arguments} failed: {done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def age():
    """Seconds since this process was started, to a hundredth."""
    started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


def peak_memory():
    """The largest resident memory of this process so far, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def seconds_of(step, seconds, least=1):
    """Mean seconds of a call of `step`, of as many as fill `seconds`, at least `least`."""
    n, started = 0, time.perf_counter()
    while n < least or time.perf_counter() - started < seconds:
        step()
        n += 1
    return (time.perf_counter() - started) / n


# -------------------------------------------------------------------------------------------------------- training


def train(mode, name, shape, seconds, jit=False):
    """Trains a contestant and does nothing else: four steps or more."""
    from tools import contestants

    started = time.perf_counter()
    step = contestants.make_contestants(mode, jit)[name](shape)
    built = time.perf_counter()
    step()
    first = time.perf_counter() - built
    step()
    taken = seconds_of(step, seconds, least=2)
    return {
        "tokens_per_second": contestants.tokens_of_step(mode, name, shape) / taken,
        "seconds_per_step": taken,
        "build_seconds": built - started,
        "first_step_seconds": first,
        "peak_memory_mb": peak_memory(),
    }


def train_replicas(name, shape, replicas, seconds):
    """Trains by `fit` under MirroredStrategy, on logical CPUs that share the cores."""
    import keras
    import numpy as np
    from txl_tf.distribution import make_strategy

    import txl_tf
    from tools import contestants

    strategy = make_strategy("mirrored", logical_cpus=replicas)
    dtype = "mixed_bfloat16" if name == "txl_tf bfloat16" else "float32"
    with strategy.scope():
        lm = txl_tf.TransformerXLLM(**contestants.model_arguments(shape), dtype=dtype)
        lm.compile(txl_tf.make_optimizer(learning_rate=1e-3, train_steps=10000))
    rows, tgt_len = shape["batch_size"], shape["tgt_len"]
    text = np.random.default_rng(0).integers(0, shape["n_token"], rows * (8 * tgt_len + 1))
    ends = []

    def on_step(step, logs):
        ends.append(time.perf_counter())
        lm.stop_training = len(ends) > 3 and ends[-1] - ends[1] > seconds

    callback = keras.callbacks.LambdaCallback(on_train_batch_end=on_step)
    batches = txl_tf.segments(text, rows, tgt_len, repeat=True)
    lm.fit(batches, steps_per_epoch=1, epochs=10000, verbose=0, callbacks=[callback])
    taken = (ends[-1] - ends[1]) / (len(ends) - 2)
    return {"tokens_per_second": rows * tgt_len / taken, "peak_memory_mb": peak_memory()}


# ----------------------------------------------------------------------------------------------------- preparation


def prepare(name, folder):
    """WikiText-103's way from train.txt, valid.txt and test.txt in `folder` to a vocabulary and token files.

    The peak includes TensorFlow and Keras for both: the original's program imports TensorFlow, too.
    """
    from tests import reference_data
    from txl_tf import corpus

    with tempfile.TemporaryDirectory() as temporary:
        output = os.path.join(temporary, "prepared")
        started = time.perf_counter()
        if name == "reference":
            splits = reference_data.prepare(folder, output)
        else:
            splits = corpus.prepare(output, "wt103", data_path=folder).splits
        taken = time.perf_counter() - started
        words = sum(map(len, splits.values()))
    return {"words_per_second": words / taken, "words": words, "peak_memory_mb": peak_memory()}


# ---------------------------------------------------------------------------------------------------------- export


def export(name, shape, directory):
    """Writes a SavedModel of signatures `initial_state` and `next`: the library's, or the reference's function."""
    import tensorflow as tf

    import txl_tf
    from tests.reference_model import ReferenceModel
    from tools import contestants

    arguments = contestants.model_arguments(shape)
    if name.startswith("txl_tf"):
        lm = txl_tf.TransformerXLLM(**arguments)
        weights = "bfloat16" if "bfloat16" in name else "float32"
        started = time.perf_counter()
        txl_tf.export_saved_model(lm, directory, weights=weights)
    else:
        model = ReferenceModel(**arguments)
        module = tf.Module()
        module.weights = list(model.weights.values())

        @tf.function(input_signature=[tf.TensorSpec(None, tf.int32, "batch_size")])
        def initial_state(batch_size):
            return {"state": tf.stack(model.initial_mems(batch_size))}

        memory = [shape["n_layer"], shape["mem_len"], None, shape["d_model"]]
        tokens = tf.TensorSpec([None, None], tf.int32, "tokens")

        @tf.function(input_signature=[tokens, tf.TensorSpec(memory, tf.float32, "state")])
        def next_token(tokens, state):
            log_probs, mems = contestants.reference_next(model, tf.transpose(tokens), tf.unstack(state))
            top = tf.math.top_k(log_probs, 10)
            return {"log_probs": top.values, "ids": top.indices, "state": tf.stack(mems)}

        started = time.perf_counter()
        signatures = {"initial_state": initial_state, "next": next_token}
        tf.saved_model.save(module, directory, signatures=signatures)
    taken = time.perf_counter() - started
    size = sum(path.stat().st_size for path in Path(directory).rglob("*") if path.is_file())
    return {"export_seconds": taken, "megabytes": size / 1e6}


def load(directory, seconds):
    """Loads a SavedModel with nothing but TensorFlow, and predicts token after token by its signature `next`."""
    import tensorflow as tf

    started = time.perf_counter()
    signatures = tf.saved_model.load(directory).signatures
    loaded = time.perf_counter()
    state = signatures["initial_state"](batch_size=tf.constant(1))["state"]
    tokens = tf.zeros([1, 1], tf.int32)

    def step():
        nonlocal state, tokens
        result = signatures["next"](tokens=tokens, state=state)
        state, tokens = result["state"], result["ids"][:, :1]
        return tokens.numpy()

    step()
    first = time.perf_counter() - loaded
    step()
    taken = seconds_of(step, seconds, least=3)
    figures = {"tokens_per_second": 1 / taken, "milliseconds_per_token": 1000 * taken}
    return {**figures, "load_seconds": loaded - started, "first_request_seconds": first}


# -------------------------------------------------------------------------------------------------------- start-up


def command_of(shape, text, model_dir, steps):
    """The arguments of train.py for the first steps on a text."""
    named = {name: shape[name] for name in ("n_layer", "d_model", "n_head", "d_head", "d_inner", "tgt_len", "mem_len")}
    named |= {"d_embed": shape["d_model"], "dropout": shape["dropout"], "dropatt": shape["dropatt"]}
    named |= {"train_batch_size": shape["batch_size"], "eval_batch_size": shape["batch_size"]}
    named |= {"dataset": "text", "data_path": text, "level": "char", "model_dir": model_dir}
    named |= {"train_steps": steps, "iterations": steps, "save_steps": steps}
    return [f"--{name}={value}" for name, value in named.items()]


def watch(shape, text):
    """Runs train.py as a user does, for one step; seconds until its line of progress, and until it has ended."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "train.py", *command_of(shape, text, os.path.join(folder, "run"), steps=1)]
        started = time.perf_counter()
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            lines = {line.partition("|")[0].strip(): time.perf_counter() - started for line in process.stdout}
            error = process.stderr.read()
        ended = time.perf_counter() - started
    if process.returncode:
        raise RuntimeError(f"train.py failed: {error[-3000:]}")
    last = max(lines.values())
    return {"step_seconds": lines["step 1/1"], "last_line_seconds": last, "command_seconds": ended}


def start(name, shape, model, text):
    """Seconds that each stage takes, from the command to the end of the second training step.

    Args:
        shape: as of the benchmark's mode.
        model: the same as arguments of `ReferenceModel`.
        text: a file.
    """
    moments = [age()]
    import tensorflow  # noqa: F401

    moments.append(age())
    if name.startswith("reference"):
        _start_reference(shape, model, text, moments)
    else:
        _start_library(shape, text, moments)
    seconds = [end - begin for begin, end in zip([0, *moments], moments, strict=False)]
    stages = dict(zip([*IMPORTS, *WORK], seconds, strict=True))
    return {"stages": stages, "seconds": moments[-2]}


def _start_library(shape, text, moments):
    """Runs train.py itself, with the moments at which it comes to certain functions noted."""
    import keras
    import txl_tf.callbacks

    from txl_tf import training

    moments.append(age())

    class Enough(Exception):
        pass

    def noting(function, before=False):
        def noted(*args, **kwargs):
            if before:
                moments.append(age())
                return function(*args, **kwargs)
            result = function(*args, **kwargs)
            moments.append(age())
            if len(moments) == len(IMPORTS) + len(WORK):
                raise Enough
            return result

        return noted

    progress = txl_tf.callbacks.Progress
    with tempfile.TemporaryDirectory() as folder:
        arguments = command_of(shape, text, os.path.join(folder, "run"), steps=2)
        with (
            mock.patch.object(training, "build_corpus", noting(training.build_corpus)),
            mock.patch.object(training.TransformerXLLM, "fit", noting(training.TransformerXLLM.fit, before=True)),
            mock.patch.object(progress, "on_train_begin", noting(progress.on_train_begin)),
            mock.patch.object(progress, "on_train_batch_end", noting(progress.on_train_batch_end)),
            mock.patch.object(sys, "argv", ["train.py", *arguments]),
        ):
            try:
                runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
            except Enough:
                keras.backend.clear_session()


def _start_reference(shape, model, text, moments):
    """The same stages of the reference; it has no Keras, no library and no `fit`."""
    import numpy as np
    import tensorflow as tf

    from tests import reference_data
    from tests.reference_model import ReferenceModel

    moments.append(age())
    vocab = reference_data.ReferenceVocab(delimiter="")
    vocab.count_file(text)
    vocab.build_vocab()
    ids = vocab.encode_file(text, add_eos=False)
    moments.append(age())
    model = ReferenceModel(**{**model, "n_token": len(vocab.idx2sym)})
    model.compile(learning_rate=1e-3, train_steps=10000)
    mems = model.initial_mems(shape["batch_size"])
    moments.append(age())
    tgt_len, rows = shape["tgt_len"], shape["batch_size"]
    columns = ids[: len(ids) // rows * rows].reshape(rows, -1).T.astype(np.int32)
    moments.append(age())
    for start in (0, tgt_len):
        tokens, labels = (tf.constant(columns[i : i + tgt_len]) for i in (start, start + 1))
        *results, mems = model.train_step(tokens, labels, mems)
        results[0].numpy()
        moments.append(age())


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    sys.path.insert(0, str(ROOT))
    arguments = json.loads(sys.argv[1])
    functions = dict(inspect.getmembers(sys.modules[__name__], inspect.isfunction))
    print(json.dumps(functions[arguments.pop("function")](**arguments)))
