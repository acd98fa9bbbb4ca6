"""What several test files use: small models and runs, checkpoints and corpora of the original, programs."""

import collections
import contextlib
import csv
import functools
import importlib.util
import io
import json
import os
import pickle
import re
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import tomllib
import types
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl import flags

from txl_programs import find_program
from txl_tf.config import EvaluationConfig, MachineConfig, ModelConfig, OptimizerConfig, TrainingConfig
from txl_tf.data.text.datasets import PAPER_DATASETS
from txl_tf.data.vocabulary import Vocab
from txl_tf.errors import ParameterError
from txl_tf.language.language_model import LanguageModel, TransformerXLLM
from txl_tf.runs import train
from txl_tf.runs.folder import RunFolder

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
INSTALLED = [name.removeprefix("txl-") for name in PROJECT["scripts"]]

SMALL = {"n_token": 23, "n_layer": 2, "d_model": 8, "d_embed": 8, "n_head": 2, "d_head": 3, "d_inner": 12}


def outside_data(*parts):
    """A folder of data that is too large for a repository; the test is skipped where nobody has it.

    The environment variable TXL_TEST_DATA names the folder that has them all: its path, or where it is from the root of
    this clone. See docs/development.md.
    """
    root = os.environ.get("TXL_TEST_DATA")
    if not root:
        pytest.skip(f"needs {'/'.join(parts)} in the folder TXL_TEST_DATA, which is not set")
    folder = Path(ROOT, root, *parts)
    if not folder.is_dir():
        pytest.skip(f"there is no folder {folder}, of TXL_TEST_DATA={root}")
    return folder


@contextlib.contextmanager
def eagerly():
    """What is called once for each length is quicker without a graph."""
    tf.config.run_functions_eagerly(True)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(False)


@contextlib.contextmanager
def eagerly_in_generation():
    """`eagerly` for `generate` of language models, too, which otherwise traces a graph: quicker for a few tokens."""
    method = LanguageModel._generate_tokens.method

    def without_graph(lm):
        return types.SimpleNamespace(get_concrete_function=lambda *_, **__: functools.partial(method, lm))

    with pytest.MonkeyPatch.context() as patch, eagerly():
        patch.setattr(LanguageModel, "_generate_tokens", property(without_graph))
        yield


# In `raises_parameter`: a field that the test does not compare. Processes of pytest need the same text for it.
ANY = "any value"


@contextlib.contextmanager
def raises_parameter(name, value=ANY, allowed=ANY, error=ParameterError, limit=""):
    """Asserts that the block raises a `ParameterError` with these fields, and yields what `pytest.raises` yields.

    The fields say what is wrong; the wording of the message may change. `limit` is a number or a choice that `allowed`
    contains, such as "1 to 8" in "an integer from 1 to 8".
    """
    with pytest.raises(error) as raised:
        yield raised
    found = raised.value
    assert found.name == name, found
    if value is not ANY:
        assert found.value == value, found
    if allowed is not ANY:
        assert found.allowed == allowed, found
    assert limit in str(found.allowed), found.allowed


def mentions(text, *facts):
    """Whether one line of a text has all facts, such as names, paths, flags and numbers, in any order and wording.

    The text may be bytes, or a list of messages. A fact is found as a whole: 3 is not in "ckpt-30" or in "0.3".
    """
    assert facts
    lines = text if isinstance(text, list) else (text.decode() if isinstance(text, bytes) else text).splitlines()
    patterns = [rf"(?<!\w)(?<!\d\.){re.escape(str(fact))}(?!\w)(?!\.\d)" for fact in facts]
    return any(all(re.search(pattern, line) for pattern in patterns) for line in lines)


@contextlib.contextmanager
def raises_naming(error, *facts):
    """Asserts that the block raises this error with all facts in its message, and yields what `pytest.raises` yields.

    See `mentions`. It is for errors without fields; `raises_parameter` compares those of a `ParameterError`.
    """
    with pytest.raises(error) as raised:
        yield raised
    assert mentions([str(raised.value)], *facts), (str(raised.value), facts)


def steps_of(printed):
    """The steps of the lines that a training printed, as strings."""
    return re.findall(r"^step +(\d+)/", printed, re.M)


def randomise(model, seed=0, scale=0.3):
    """The initial zeros and ones of biases, clusters and layer norms would hide a mistake there."""
    rng = np.random.default_rng(seed)
    for variable in model.trainable_variables:
        variable.assign(rng.normal(0, scale, variable.shape))


def spread_emissions(tagger, inputs):
    """Scales the emissions of each tag to mean 0 and deviation 2 over these inputs: every tag occurs."""
    emissions, mask = tagger.emissions(inputs)
    scale = 2 / tf.math.reduce_std(emissions[mask], 0)
    tagger.out_fc.bias.assign((tagger.out_fc.bias - tf.reduce_mean(emissions[mask], 0)) * scale)
    tagger.out_fc.kernel.assign(tagger.out_fc.kernel * scale)


def program(path):
    """Yields a program, as `tools/plot.py`, as a module with flags of its own in place of other programs'."""
    own, before = flags.FlagValues(), dict(vars(flags.FLAGS))
    vars(flags.FLAGS).update(vars(own))
    flags.DEFINE_integer("verbosity", -1, "absl's own")
    try:
        spec = find_program(path) or importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module
    finally:
        vars(flags.FLAGS).update(before)


def run_program(path, *arguments, **options):
    """Runs a program of this repository in a process of its own, from its root: the finished process, with output."""
    command = [sys.executable, str(ROOT / path), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, **{"cwd": ROOT, "text": True, **options})


def run_here(tool, *arguments):
    """Runs a program of `program` in this process, with nothing left of the command line before; returns its status."""
    tool.FLAGS.unparse_flags()
    for name in tool.FLAGS:
        tool.FLAGS[name].unparse()
    tool.FLAGS([tool.__name__, *map(str, arguments)])
    return tool.main()


def converse(monkeypatch, tool, lines, *arguments):
    """Runs a program as `run_here`; a line comes to its standard input once the one before it is answered.

    Returns:
        What it wrote, as bytes, up to each answer.
    """
    reader, writer = os.pipe()
    feed, rest, written = os.fdopen(writer, "wb", buffering=0), list(lines), []

    def write(data):
        written.append(data)
        feed.write(rest.pop(0)) if rest else feed.close()

    late = threading.Timer(60, feed.close)  # it waits for more before it answers
    stdout = types.SimpleNamespace(buffer=types.SimpleNamespace(write=write), isatty=lambda: False, flush=lambda: None)
    with os.fdopen(reader, "rb") as pipe, feed, monkeypatch.context() as patch:
        patch.setattr(sys, "stdin", types.SimpleNamespace(buffer=pipe, isatty=lambda: False))
        patch.setattr(sys, "stdout", stdout)
        feed.write(rest.pop(0))
        late.start()
        try:
            assert not run_here(tool, *arguments)
        finally:
            late.cancel()
    assert not rest, f"{len(written)} answers before the end of the input"
    return written


@contextlib.contextmanager
def full_disk(size=1000):
    """No file may grow past `size` bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def free_ports(n):
    """`n` different ones, held together until all are known."""
    sockets = [socket.socket() for _ in range(n)]
    for opened in sockets:
        opened.bind(("localhost", 0))
    ports = [opened.getsockname()[1] for opened in sockets]
    for opened in sockets:
        opened.close()
    return ports


def tasks_of_srun(n):
    """What `srun` sets in each of `n` tasks on this machine: dictionaries, of a job whose ports are free."""
    job = next(job for job in range(1, 1000) if all(map(is_free, range(10_000 + 20 * job, 10_000 + 20 * job + n))))
    step = {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": str(n)}
    step |= {"SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_TASKS_PER_NODE": str(n), "SLURMD_NODENAME": "localhost"}
    return [{**step, "SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)} for i in range(n)]


def is_free(port):
    """Whether nobody listens at a port of this machine."""
    with socket.socket() as tried:
        return tried.connect_ex(("localhost", port)) != 0


# ---------------------------------------------------------------------------------------------------- checkpoints

GOLDENS = ROOT / "tests" / "goldens" / "model"
CASES = ["char_tied", "wt103_base", "wt103_large", "lm1b", "eval_same_length"]  # models of the original program


def write_checkpoint(path, arrays):
    """Writes a checkpoint with nothing of txl_tf, and returns its path as text."""
    tensors = [tf.constant(array) for array in arrays.values()]
    tf.raw_ops.SaveV2(prefix=str(path), tensor_names=list(arrays), shape_and_slices=[""] * len(arrays), tensors=tensors)
    return str(path)


def read_checkpoint(path):
    """`{variable: array}` of all that is in a checkpoint."""
    reader = tf.train.load_checkpoint(str(path))
    return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}


def assert_variables_equal(variables, expected):
    """Bit for bit."""
    assert variables.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(variables[name], array, err_msg=name)


# ----------------------------------------------------------------------------------------------------------- runs


TEXT = "the cat sat on the mat, and so on and so on.\n" * 100


TINY_RUN = {
    "model": {
        "n_layer": 1, "d_model": 16, "d_embed": 16, "n_head": 2, "d_head": 8, "d_inner": 16, "dropout": 0.1,
        "dropatt": 0.1, "mem_len": 8,
    },
    "optimizer": {"learning_rate": 1e-2, "warmup_steps": 2, "min_lr_ratio": 0.1, "clip": 0.25},
    "training": {"tgt_len": 8, "train_batch_size": 4, "train_steps": 12, "iterations": 3, "save_steps": 6},
    "evaluation": {"eval_batch_size": 2},
}  # fmt: skip


def train_run(model_dir, text, callbacks=(), **changes):
    """Trains `TINY_RUN`: 12 steps, with a checkpoint at the 6th.

    Args:
        model_dir: the folder of the run.
        text: the file to train on.
        callbacks: given to `fit`.
        **changes: what is other than in `TINY_RUN`, a dictionary for a group.
    """
    groups = {"data": {"dataset": "text", "data_path": text}, **TINY_RUN, "machine": {}}
    groups = {name: {**group, **changes.pop(name, {})} for name, group in groups.items()}
    assert not changes
    return train.train_run(
        str(model_dir),
        data=groups["data"],
        model=ModelConfig(**groups["model"]),
        optimizer=OptimizerConfig(**groups["optimizer"]),
        training=TrainingConfig(**groups["training"]),
        final=EvaluationConfig(**groups["evaluation"]),
        machine=MachineConfig(**groups["machine"]),
        callbacks=callbacks,
    )


def make_run(folder, vocab, family=TransformerXLLM, **options):
    """Writes a run of a small random language model with these symbols, and returns the model."""
    model = {**SMALL, "n_token": len(vocab), "mem_len": 4, **options}
    lm = family(**model)
    randomise(lm)
    RunFolder(folder).create({"dataset": "text"}, model, [vocab], lm, step=1)
    return lm


def at_step(monkeypatch, owner, name, step, action):
    """Calls `action` before the function, of a callback, when it is called at that training step."""
    function = getattr(owner, name)

    def wrapper(self, *args, **kwargs):
        if self.model.optimizer.iterations.numpy() == step:
            action()
        function(self, *args, **kwargs)

    monkeypatch.setattr(owner, name, wrapper)


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


def log_rows(model_dir):
    """The lines of a run's log.csv, as dictionaries of text."""
    with open(model_dir / "log.csv") as file:
        return list(csv.DictReader(file))


def assert_regularized(after_a_step, atol=1e-5):
    """That a step of SGD at rate 0.1 also goes along the gradient of 0.5 times the sum of a weight's squares.

    Args:
        after_a_step: function of the weight's regularizer that returns the weight before and after such a step.
        atol: absolute tolerance.
    """
    before, free = after_a_step(None)
    _, held = after_a_step(keras.regularizers.L2(0.5))
    np.testing.assert_allclose(held, free - 0.1 * before, rtol=0, atol=atol)


def untimed_rows(model_dir):
    """`log_rows` without the speed."""
    return [{name: text for name, text in row.items() if name != "tokens_per_second"} for row in log_rows(model_dir)]


def assert_same_run(run_dir, expected_dir, step, more_than=30):
    """Bit for bit: the variables of the checkpoints of `step`, `more_than` so many, and log.csv but for the speed."""
    found, expected = (read_checkpoint(folder / f"ckpt-{step}") for folder in (run_dir, expected_dir))
    assert len(expected) > more_than
    assert_variables_equal(found, expected)
    assert untimed_rows(run_dir) == untimed_rows(expected_dir)


def word_vocab(**options):
    """A vocabulary of as many words as `SMALL` has, `<eos>` and `<unk>` first."""
    vocab = Vocab(special=["<eos>", "<unk>", *(f"w{i}" for i in range(21))], eos="<eos>", unk="<unk>", **options)
    vocab.build()
    return vocab


class Subwords:
    """What the library needs of a vocabulary of subwords: as many as `SMALL` has symbols, and no end."""

    level, unk, eos, bos, document, document_id = "subword", None, None, None, None, None
    has_plain_text = False
    named_ids = frozenset()
    token_bytes = [
        b"", *(bytes([c]) for c in b"User: \nab"), b"User", b"ser:", b"s:", b"r: a", b"\n\n", b"ab", b"ba",
        "é".encode(), b"\xc3", b"\xa9", "日".encode(), b"\xe6\x97", b"\xa5",
    ]  # fmt: skip

    def __init__(self):
        self.symbols = ["<end>", *(data.decode("utf-8", "surrogateescape") for data in self.token_bytes[1:])]
        self.ids = {symbol: i for i, symbol in enumerate(self.symbols)}

    def __len__(self):
        return len(self.symbols)

    def bytes_of(self, ids):
        return b"".join(self.token_bytes[i] for i in ids)


# ------------------------------------------------------------------------------------ cache.pkl of the original

CACHED_SYMBOLS = ["<eos>", "the", "é", "\u3000x"]
CACHED_TOKENS = {"train": [1, 2, 3, 0, 1], "valid": [2, 0], "test": [3]}


class Python2Pickler(pickle._Pickler):
    """Writes text and bytes alike as Python 2 did: strings of bytes."""

    dispatch = dict(pickle._Pickler.dispatch)

    def save_string(self, value):
        data = value.encode() if isinstance(value, str) else value
        self.write(pickle.BINSTRING + struct.pack("<i", len(data)) + data)
        self.memoize(value)

    dispatch[str] = dispatch[bytes] = save_string


def make_cache(
    path,
    monkeypatch,
    modules=("data_utils", "vocabulary"),
    pickler=pickle.Pickler,
    protocol=2,
    symbols=CACHED_SYMBOLS,
    **changes,
):
    """Pickles what the original's `Corpus` and `Vocab` hold, as classes of these modules; returns the path as text."""

    def instance(module, name, attributes):
        cls = type(name, (), {"__module__": module})
        if module not in sys.modules:
            monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
        monkeypatch.setattr(sys.modules[module], name, cls, raising=False)
        made = cls()
        made.__dict__.update(attributes)
        return made

    vocab = {
        "counter": collections.Counter(["the", "the", "é"]),
        "special": ["<eos>"],
        "lower_case": False,
        "idx2sym": symbols,
        "sym2idx": collections.OrderedDict((symbol, i) for i, symbol in enumerate(symbols)),
    }
    corpus = {
        "dataset": "wt103",
        "vocab": instance(modules[1], "Vocab", vocab),
        "cutoffs": [0, 2, np.int64(3), 4],
        **{split: np.array(ids) for split, ids in CACHED_TOKENS.items()},
        **changes,
    }
    file = io.BytesIO()
    pickler(file, protocol).dump(instance(modules[0], "Corpus", corpus))
    data = file.getvalue()
    if pickler is Python2Pickler:
        data = data.replace(b"cnumpy._core.", b"cnumpy.core.")
    path.write_bytes(data)
    return str(path)


# --------------------------------------------------------------------------------------------------------- layers


def assert_round_trips(layer):
    """A layer made of the configuration of `layer` has the same one, and weights of the same shapes; builds `layer`."""
    copy = type(layer).from_config(layer.get_config())
    assert copy.get_config() == layer.get_config()
    for original in (layer, copy):
        original.build()
    assert [v.shape for v in copy.weights] == [v.shape for v in layer.weights]


# ------------------------------------------------------------------------------------------------- text and tokens

LEXICON = ["南京", "南京市", "长江", "长江大桥", "大桥"]


def made_up(number, seed):
    """Sentences in which 南京 and 北京 are places after 在, and names after 叫."""
    rng, sentences = np.random.default_rng(seed), []
    for _ in range(number):
        rows = [(c, "O") for c in rng.choice(list("我他看去了来好"), rng.integers(1, 5))]
        for _ in range(rng.integers(0, 3)):
            before, kind = [("在", "LOC"), ("叫", "PER")][rng.integers(2)]
            name = str(rng.choice(["南京", "北京", "长江大桥", "京"]))
            prefixes = "S" if len(name) == 1 else f"B{'M' * (len(name) - 2)}E"
            rows += [(before, "O"), *((c, f"{p}-{kind}") for c, p in zip(name, prefixes, strict=True)), ("了", "O")]
        sentences.append("".join(f"{c} {tag}\n" for c, tag in rows))
    return "\n".join(sentences)


def write_text(path, content):
    """Writes text or bytes, and returns the path as text."""
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    return str(path)


def write_splits(folder, train, valid, test):
    """Writes a dataset as those of the paper are, and returns its folder as text."""
    for split, text in (("train", train), ("valid", valid), ("test", test)):
        write_text(folder / f"{split}.txt", text)
    return str(folder)


class WatchedTokens:
    """A part of `StoredTokens` that counts how often each token is read: `reads`, int `[n]`."""

    def __init__(self, tokens):
        self.tokens, self.dtype = tokens, tokens.dtype
        self.reads = np.zeros(len(tokens), int)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        self.reads[index] += 1
        return self.tokens[index]


def as_lists(dataset):
    """The batches of a `tf.data.Dataset` of `(tokens, labels)` as nested lists."""
    return [(tokens.tolist(), labels.tolist()) for tokens, labels in dataset.as_numpy_iterator()]


# -------------------------------------------------------------------------------------------------- configurations

OF_ANY_TEXT = ("quickstart", "tinyshakespeare", "tinyshakespeare_2min", "tinyshakespeare_best")
N_TOKEN = {"enwik8": 204, "text8": 27, "ptb": 10000, "wt2": 33278, "wt103": 267735, "lm1b": 793471}


def dataset_of(name):
    """The dataset of one of configs/*.cfg, or of a script of the original."""
    return re.split("[_.]", name)[0]


def bins_of(name):
    """`n_token` and `cutoffs` that a configuration trains with."""
    if name in OF_ANY_TEXT:
        return {"n_token": 128, "cutoffs": []}
    return {"n_token": N_TOKEN[dataset_of(name)], "cutoffs": PAPER_DATASETS[dataset_of(name)].cutoffs}


# ------------------------------------------------------------------------------------------------- hostile files

# Reads each file of a folder by `attempt` in a process of its own: with 3 GB to spare and for 20 seconds at most.
_READ_ALL = """
import json, os, resource, signal, sys, time
from pathlib import Path

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

def read(path):
    virtual = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (virtual + 3 * 2**30, -1))
    signal.alarm(20)
    before, start = peak(), time.process_time()
    try:
        found = attempt(path)
    except (ValueError, OSError) as error:
        found = str(error)
    values = [path.name, found[:10_000], len(found), path.stat().st_size, peak() - before, time.process_time() - start]
    print(json.dumps(values), flush=True)

for path in sorted(Path(sys.argv[1]).iterdir()):
    child = os.fork()
    if not child:
        try:
            read(path)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
"""


def read_hostile(folder, attempt):
    """Reads each file of a folder in a process of its own, with limits of memory and time.

    Args:
        attempt: Python's source of a function `attempt(path)`, with its imports. It returns what became of the file.

    Returns:
        `{file: [what became of it or its ValueError, length of that, size of the file, growth of the peak in bytes,
        seconds of the processor]}`, and what all processes wrote as errors.
    """
    command = [sys.executable, "-c", attempt + _READ_ALL, str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    return {name: found for name, *found in map(json.loads, result.stdout.splitlines())}, result.stderr
