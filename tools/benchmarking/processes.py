"""Processes of the benchmark. Each runs functions of this file when told to, and answers with a dict of figures.

    with Process() as process:
        process.call("begin", mode="training", name="txl_tf float32", shape=...)
        process.call("turn", seconds=1)     # and again, whenever it is this contestant's turn

The request, `["turn", {"seconds": 1}]`, and the answer are lines of JSON on its standard input and output.
"""

import contextlib
import gc
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # errors come as exceptions; the rest is noise

import numpy as np
import tensorflow as tf
from benchmarking import contestants

ROOT = Path(__file__).parents[2]
ONE_STEP = {"train_steps": 1, "iterations": 1, "save_steps": 1}
IMPORT = "import tensorflow"
ANSWERS = {  # name: the run's model, further flags, the line to answer
    "generate.py": ("lm", {"prompt": "eta", "max_new_tokens": 1}, ""),
    "score.py": ("lm", {}, "eta\n"),
    "tag.py": ("tagger", {}, "高山在白石\n"),
}


class Process:
    """A new Python that runs functions of this file, with the txl_tf of a checkout."""

    def __init__(self, checkout=ROOT):
        self.errors = tempfile.TemporaryFile("w+")
        command = [sys.executable, "-P", __file__]
        environment = {**os.environ, "PYTHONPATH": f"{checkout}{os.pathsep}{ROOT / 'tools'}"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.errors}
        self.process = subprocess.Popen(command, **pipes, env=environment, text=True)

    def call(self, function, **arguments):
        """The figures of `function(**arguments)` there.

        Raises:
            ValueError: it failed; see `failure`.
        """
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps([function, arguments]), file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            self.errors.seek(0)
            raise failure(f"{function} of {arguments}", self.errors.read())
        return json.loads(answer)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.process.kill()
        with self.errors, contextlib.suppress(BrokenPipeError), self.process:  # closes the pipes, waits for the end
            pass


def failure(what, written):
    """The ValueError of a process that failed, with the last line it has written; --verbosity=1 shows the others."""
    lines = [line for line in written.splitlines() if line.strip() and not line.startswith("(--verbosity")]
    error = ValueError(f"{what} failed: {lines[-1] if lines else 'it says nothing'}")
    error.__cause__ = RuntimeError(written[-3000:])
    return error


def alone(function, **arguments):
    """The figures of `function(**arguments)`, measured in a process that does nothing else."""
    with Process() as process:
        return process.call(function, **arguments)


def peak_memory(process="self"):
    """The largest resident memory of a process so far, in MB."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def loopback_bytes():
    """Bytes that this machine has sent to itself so far, whichever program did."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split(":")[1].split()[8]) for line in lines if line.strip().startswith("lo:"))


def free_ports(n):
    """`n` different ones, held together until all are known."""
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(socket.create_server(("localhost", 0))) for _ in range(n)]
        return [server.getsockname()[1] for server in opened]


def seconds_of(step, seconds, least=1):
    """Mean seconds of a call of `step`, of as many as fill `seconds`, at least `least`."""
    n, started = 0, time.perf_counter()
    while n < least or time.perf_counter() - started < seconds:
        step()
        n += 1
    return (time.perf_counter() - started) / n


# --------------------------------------------------------------------------------------- training to generation

_begun = {}  # what `turn` goes on with: a step and its number of tokens


def take_first_steps(step, tokens, since):
    """Takes two steps, which trace and allocate; returns the seconds from `since` to the end of the first."""
    step()
    first = time.perf_counter() - since
    step()
    _begun.update(step=step, tokens=tokens)
    return first


def begin(mode, name, shape, jit=False):
    """Makes a contestant and takes its first steps."""
    started = time.perf_counter()
    step = contestants.make_contestants(mode, jit)[name](shape)
    built = time.perf_counter()
    first = take_first_steps(step, contestants.tokens_of_step(mode, name, shape), built)
    return {"build_seconds": built - started, "first_step_seconds": first}


def turn(seconds, least=1):
    """As many steps as fill `seconds`, at least `least`."""
    taken = seconds_of(_begun["step"], seconds, least)
    figures = {"tokens_per_second": _begun["tokens"] / taken, "milliseconds_per_step": 1000 * taken}
    return {**figures, "peak_memory_mb": peak_memory()}


def train_replicas(name, shape, replicas, seconds):
    """Trains by `fit` under MirroredStrategy, on logical CPUs that share the cores."""
    import keras

    import txl_tf
    from txl_tf.training.distribution import make_strategy

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
    import txl_tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    strategy = tf.distribute.get_strategy()
    if cluster:
        task = {"type": "worker", "index": index}
        os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": cluster}, "task": task})
        options = tf.distribute.experimental.CommunicationOptions(bytes_per_pack=bytes_per_pack)
        strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
    with strategy.scope():
        lm = txl_tf.TransformerXLLM(**contestants.model_arguments(shape))
        lm.compile(txl_tf.make_optimizer(learning_rate=1e-3, train_steps=10000))
    all_rows = rows * len(cluster or [1])
    text = np.random.default_rng(0).integers(0, shape["n_token"], all_rows * (8 * shape["tgt_len"] + 1))
    _begun.update(lm=lm, batches=txl_tf.segments(text, all_rows, shape["tgt_len"], repeat=True))
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
    """Trains by `fit`; the first step, before which `fit` prepares itself, is not counted."""
    import keras

    ends = []
    callback = keras.callbacks.LambdaCallback(on_train_batch_end=lambda step, logs: ends.append(time.perf_counter()))
    _begun["lm"].fit(_begun["batches"], steps_per_epoch=steps + 1, verbose=0, callbacks=[callback])
    return {"milliseconds_per_step": 1000 * (ends[-1] - ends[0]) / steps, "peak_memory_mb": peak_memory()}


# ---------------------------------------------------------------------------------------- preparation and export


def prepare(name, folder):
    """WikiText-103's way from train.txt, valid.txt and test.txt in `folder` to a vocabulary and token files.

    The peak includes TensorFlow and Keras for both: the original's program imports TensorFlow, too.
    """
    from txl_tf.data.text import corpus

    with tempfile.TemporaryDirectory() as temporary:
        output, reference = os.path.join(temporary, "prepared"), contestants.port("reference_data")
        started = time.perf_counter()
        if name == "reference":
            splits = reference.prepare(folder, output)
        else:
            splits = corpus.prepare(output, "wt103", data_path=folder).splits
        taken = time.perf_counter() - started
        words = sum(map(len, splits.values()))
    return {"words_per_second": words / taken, "words": words, "peak_memory_mb": peak_memory()}


def export(name, shape, directory):
    """Writes a SavedModel of signatures `initial_state` and `next`: the library's, or the reference's function."""
    import txl_tf

    arguments = contestants.model_arguments(shape)
    if name.startswith("txl_tf"):
        lm = txl_tf.TransformerXLLM(**arguments)
        started = time.perf_counter()
        txl_tf.export_saved_model(lm, directory, weights="bfloat16" if "bfloat16" in name else "float32")
    else:
        model = contestants.port("reference_model").ReferenceModel(**arguments)
        module = tf.Module()
        module.weights = list(model.weights.values())

        def next_token(tokens, state):
            log_probs, mems = contestants.reference_next(model, tf.transpose(tokens), tf.unstack(state))
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
    """Loads a SavedModel with nothing but TensorFlow; a step predicts a token by its signature `next`."""
    started = time.perf_counter()
    signatures = tf.saved_model.load(directory).signatures
    loaded = time.perf_counter()

    def next_token(carried):
        result = signatures["next"](**carried)
        tokens = result["ids"][:, :1]
        return tokens, {"tokens": tokens, "state": result["state"]}

    state = signatures["initial_state"](batch_size=tf.constant(1))["state"]
    step = contestants.carrying(next_token, {"tokens": tf.zeros([1, 1], tf.int32), "state": state})
    return {"load_seconds": loaded - started, "first_request_seconds": take_first_steps(step, 1, loaded)}


# ------------------------------------------------------------------------------------------------------ start-up


def command_of(program, **flags):
    return [sys.executable, program, *(f"--{name}={value}" for name, value in flags.items())]


def train_command(shape, text, model_dir):
    """The command that trains a language model of a shape by train.py, for one step."""
    names = "n_layer d_model n_head d_head d_inner dropout dropatt tgt_len mem_len same_length clamp_len div_val"
    named = {name: shape[name] for name in names.split()} | {"d_embed": shape["d_model"]}
    if shape["cutoffs"]:
        named["cutoffs"] = ",".join(map(str, shape["cutoffs"]))
    named |= {"train_batch_size": shape["batch_size"], "eval_batch_size": shape["batch_size"], "preset": "base"}
    return command_of("train.py", **named, dataset="text", data_path=text, model_dir=model_dir, **ONE_STEP)


def watch(shape, text, checkout=ROOT):
    """Runs train.py as a user does, for one step: seconds until its line of progress, and until it has ended."""
    with tempfile.TemporaryDirectory() as folder:
        command = train_command(shape, text, os.path.join(folder, "run"))
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        started, lines, figures = time.perf_counter(), [], {}
        with subprocess.Popen(command, cwd=checkout, **pipes, text=True) as process:
            for line in process.stdout:
                lines.append(line)
                if line.startswith("step 1/1 "):
                    figures["seconds"] = time.perf_counter() - started
                    figures["peak_memory_mb"] = peak_memory(process.pid)
        figures["command_seconds"] = time.perf_counter() - started
    if process.returncode:
        raise failure("train.py", "".join(lines))
    return figures


def watch_reference(shape, text, checkout=ROOT):
    """Seconds from the start of a process to the end of the reference's first training step in it."""
    started = time.perf_counter()
    with Process(checkout) as process:
        figures = process.call("start_reference", shape=shape, text=text)
        return {"seconds": time.perf_counter() - started, **figures}


def start_reference(shape, text):
    vocab = contestants.port("reference_data").ReferenceVocab(delimiter="")
    vocab.count_file(text)
    vocab.build_vocab()
    ids = vocab.encode_file(text, add_eos=False)
    arguments = {**contestants.model_arguments(shape), "n_token": len(vocab.idx2sym)}
    model = contestants.port("reference_model").ReferenceModel(**arguments)
    model.compile(learning_rate=1e-3, train_steps=10000)
    tgt_len, rows = shape["tgt_len"], shape["batch_size"]
    columns = ids[: len(ids) // rows * rows].reshape(rows, -1).T.astype(np.int32)
    model.train_step(columns[:tgt_len], columns[1 : tgt_len + 1], model.initial_mems(rows))[0].numpy()
    return {"peak_memory_mb": peak_memory()}


def train_runs(shape, folder):
    """Trains, for one step, a language model of a shape by character and a tagger, which `answer` asks."""
    text, lm, tagger = (os.path.join(folder, name) for name in ("train.txt", "lm", "tagger"))
    few = {"n_sentences": 100, "model_dir": tagger, **ONE_STEP}  # behind the file, whose flags they override
    commands = [
        [*train_command(shape, text, lm), "--level=char"],
        command_of("tools/train_ner.py", flagfile="configs/tener_towns.cfg", **few),
    ]
    for command in commands:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise failure(command[1], done.stderr)


def answer(name, folder):
    """Runs a program as a user does, on one line: seconds until its answer is complete, and until it has ended.

    generate.py writes the prompt first, and then one token. IMPORT is that alone, for comparison.
    """
    command, line = [sys.executable, "-c", f"{IMPORT}\nprint()"], ""
    if name in ANSWERS:
        model, flags, line = ANSWERS[name]
        command = command_of(f"tools/{name}", model_dir=os.path.join(folder, model), **flags)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    started, before = time.perf_counter(), os.times()
    with subprocess.Popen(command, cwd=ROOT, **pipes, bufsize=0) as process:
        process.stdin.write(line.encode())
        process.stdin.close()
        while process.stdout.read(1 << 16):
            answered = time.perf_counter() - started
        errors = process.stderr.read().decode()
    ended, after = time.perf_counter() - started, os.times()
    if process.returncode:
        raise failure(name, errors)
    processor = after.children_user + after.children_system - before.children_user - before.children_system
    return {"seconds": answered, "command_seconds": ended, "processor_seconds": processor}


def import_seconds():
    """Seconds that `import txl_tf` spends in a few imports, each with those inside it, by `-X importtime`."""
    command = [sys.executable, "-X", "importtime", "-c", "import txl_tf"]
    log = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stderr
    found = re.findall(r"^import time: .* (\d+) \| +(txl_tf|keras|tensorflow|matplotlib\.pyplot)$", log, re.MULTILINE)
    return {name: int(microseconds) / 1e6 for microseconds, name in reversed(found)}


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    for request in sys.stdin:
        function, arguments = json.loads(request)
        print(json.dumps(globals()[function](**arguments)), file=answers, flush=True)
