"""What every test shares: three devices, fixed seeds, the reference values, and a pair of equal models.

A plugin that conftest.py loads in the processes that run tests, as it imports TensorFlow.
"""

import os
import sys
from types import SimpleNamespace

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

# Where JAX is installed, TensorFlow Lite imports it, for a converter of models of JAX: 106 MB in every process, and a
# call at every collection of garbage. Later imports find it.
jax = sys.modules.setdefault("jax", None)

import tensorflow as tf  # noqa: E402

if jax is None:
    del sys.modules["jax"]

# Three devices on any machine, so that distribution can be tested. Nothing may touch TensorFlow before this.
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 3
)

from tensorflow.python.data.ops import dataset_ops  # noqa: E402


def _without_autotuning(dataset):
    """As `batching.prefetched` does, for the datasets that Keras and tests make: no test waits a minute."""
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset_ops._OptionsDataset(dataset, options)


dataset_ops.DatasetV2._apply_debug_options = _without_autotuning  # every iterator calls it

from tensorflow.python.util import tf_stack  # noqa: E402

# TensorFlow keeps the Python stack of every operation that it ever traced: megabytes for a graph. One stands for all.
_stack = tf_stack.extract_stack()
tf_stack.extract_stack = lambda stacklevel=1: _stack

from tensorflow.python.autograph.pyct import loader as autograph_files  # noqa: E402
from tensorflow.python.ops import gen_resource_variable_ops  # noqa: E402

# TensorFlow compiles the operation that makes a variable anew for each name that is meant for a debugger.
_var_handle_op = gen_resource_variable_ops.var_handle_op
gen_resource_variable_ops.var_handle_op = lambda debug_name="", **options: _var_handle_op(**options)

import fcntl  # noqa: E402
import gc  # noqa: E402
import inspect  # noqa: E402
import logging  # noqa: E402
import pickle  # noqa: E402
import re  # noqa: E402
import shutil  # noqa: E402
import subprocess  # noqa: E402
from pathlib import Path  # noqa: E402

import keras  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
from helpers import SMALL, TEXT, eagerly, outside_data, randomise, train_run  # noqa: E402
from reference_model import ReferenceModel  # noqa: E402

import txl_tf  # noqa: E402
from txl_programs.printing import log_to_stdout  # noqa: E402
from txl_tf.runs.folder import RunFolder  # noqa: E402

TESTS = Path(__file__).parent
gc.freeze()  # collections need not look at what the imports made


def pytest_collection_modifyitems(items):
    """Leaves out what half precision is in, where TensorFlow itself falls over a product of it.

    TensorFlow looks at the processor, oneDNN at ONEDNN_MAX_CPU_ISA too: 2.21 ends with a segmentation fault.
    """
    if "ONEDNN_MAX_CPU_ISA" not in os.environ:
        return
    product = "import tensorflow as tf; x = tf.ones([4, 8, 8], 'bfloat16'); tf.matmul(x, x)"
    if subprocess.run([sys.executable, "-c", product], capture_output=True).returncode >= 0:
        return
    skip = pytest.mark.skip(reason="tf.matmul of bfloat16 is a segmentation fault with this ONEDNN_MAX_CPU_ISA")
    for item in items:
        if re.search("float16|make_half|mixed_precision", f"{item.name}{inspect.getsource(item.function)}"):
            item.add_marker(skip)


def pytest_collection_finish(session):
    """Has the fast suite run graphs as they are traced: Grappler takes longer to rewrite a small one than that runs.

    One way for all tests of a process, as bits may differ. With slow tests, or --grappler, it is that of users.
    """
    alone = not any(item.get_closest_marker("slow") for item in session.items)
    without = alone and not session.config.getoption("grappler")
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": without})


@pytest.fixture(scope="session", autouse=True)
def other_draws(request):
    """With --seed-offset, NumPy's generators that tests make draw other numbers; those of the library do not."""
    offset = request.config.getoption("seed_offset")
    plain = np.random.default_rng

    def default_rng(seed=None):
        of_a_test = sys._getframe(1).f_code.co_filename.startswith(str(TESTS))
        return plain(seed + offset if of_a_test and isinstance(seed, int) else seed)

    if offset:
        np.random.default_rng = default_rng


@pytest.fixture(scope="session", autouse=True)
def no_files_of_autograph():
    """Deletes the files that AutoGraph wrote: a forked child ends without the functions of `atexit`, which do that."""
    removals = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(autograph_files, "atexit", SimpleNamespace(register=removals.append))
        yield
    for remove in removals:
        remove()


@pytest.fixture(scope="module", autouse=True)
def fixed_seed_of_tensorflow(request):
    """Setting it empties the caches of all kernels, so that functions which tests share would be optimised anew."""
    tf.random.set_seed(1 + request.config.getoption("seed_offset"))


@pytest.fixture(autouse=True)
def fixed_seeds(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tf.random, "set_seed", lambda seed: None)
        keras.utils.set_random_seed(1 + request.config.getoption("seed_offset"))


@pytest.fixture(autouse=True)
def messages_of_the_library():
    """As the programs print them, so that tests can look at what a user sees."""
    log_to_stdout()
    logging.getLogger("txl_tf").setLevel(logging.INFO)


@pytest.fixture(scope="session")
def reference():
    """The folder of numbers computed by the original program; tests that need it are skipped where it is absent."""
    return outside_data("reference")


@pytest.fixture
def eager():
    """For a test that needs no graph: many small ones take longer than what they compute."""
    with eagerly():
        yield


@pytest.fixture(scope="session")
def two_replicas():
    """Without collectives, since those of several strategies in one process get mixed up."""
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], tf.distribute.ReductionToOneDevice())


@pytest.fixture(scope="session")
def three_replicas():
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1", "CPU:2"], tf.distribute.ReductionToOneDevice())


@pytest.fixture(scope="session")
def small_lm():
    """Makes a small language model whose weights are all random, biases and layer norms included."""

    def make(seed=0, **options):
        lm = txl_tf.TransformerXLLM(**{**SMALL, "mem_len": 4, "dropout": 0.0, **options})
        randomise(lm, seed)
        return lm

    return make


@pytest.fixture(scope="session")
def small_pair(small_lm):
    """Makes a small language model, and the plain port of the original with the same weights.

    `assign` raises unless both have the same variables, by the original's names, and the same shapes.
    """

    def make(seed=0, **options):
        lm = small_lm(seed, **options)
        model = ReferenceModel(**{**SMALL, "mem_len": 4, **options})
        model.assign(txl_tf.tf1_variables(lm))
        return lm, model

    return make


@pytest.fixture(scope="session")
def small_batches():
    """Makes int32 tokens and labels, `[n, batch, tgt_len]` each: n consecutive segments of a random text."""

    def make(n=2, batch=2, tgt_len=5, n_token=SMALL["n_token"], seed=0):
        text = np.random.default_rng(seed).integers(0, n_token, [batch, n * tgt_len + 1]).astype(np.int32)
        tokens, labels = text[:, :-1], text[:, 1:]
        return [ids.reshape(batch, n, tgt_len).transpose(1, 0, 2).copy() for ids in (tokens, labels)]

    return make


@pytest.fixture
def text_file(tmp_path):
    """Path of a text that a small model learns fast."""
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return str(path)


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory):
    """A trained `TINY_RUN`, for tests that read it: its folder, and what `train_run` returned.

    The first process that wants it trains it for all, and each has a copy of its own.
    """
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "trained_by_one"
    shared.mkdir(exist_ok=True)
    with open(shared / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if not (shared / "results").exists():
            (shared / "text.txt").write_text(TEXT)
            results = train_run(shared / "run", str(shared / "text.txt"))
            (shared / "results").write_bytes(pickle.dumps(results))
    folder = shutil.copytree(shared, tmp_path_factory.mktemp("trained") / "copy")
    return folder / "run", pickle.loads((folder / "results").read_bytes())


@pytest.fixture(scope="module")
def opened_once():
    """Programs open a checkpoint with the same settings only once for a file of tests, which share its graphs."""
    load_model, opened = RunFolder.load_model, {}

    def load_once(folder, ckpt_path=None, **changes):
        key = str(folder), ckpt_path, tuple(changes.items())
        if ckpt_path is None or key not in opened:
            opened[key] = load_model(folder, ckpt_path, **changes)
        return opened[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunFolder, "load_model", load_once)
        yield


@pytest.fixture
def run_dir(tmp_path):
    """Folder of a run, which is not there yet."""
    return tmp_path / "run"
