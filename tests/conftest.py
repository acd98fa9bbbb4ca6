"""Set-up that every test shares: three devices, fixed seeds, the reference values, and a pair of equal models."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tensorflow as tf

# Three devices on any machine, so that distribution can be tested. Nothing may touch TensorFlow before this.
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 3
)

import importlib.util  # noqa: E402
from pathlib import Path  # noqa: E402

import keras  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
from absl import flags  # noqa: E402
from reference_model import ReferenceModel  # noqa: E402

import txl_tf  # noqa: E402

REFERENCE = Path(__file__).parents[2] / "shared" / "reference"

SMALL = {"n_token": 23, "n_layer": 2, "d_model": 8, "d_embed": 8, "n_head": 2, "d_head": 3, "d_inner": 12}


@pytest.fixture(autouse=True)
def fixed_seeds():
    keras.utils.set_random_seed(1)


@pytest.fixture(scope="session")
def reference():
    """The folder of numbers computed by the original program; tests that need it are skipped where it is absent."""
    if not REFERENCE.is_dir():
        pytest.skip(f"the original program's reference values are not at {REFERENCE}")
    return REFERENCE


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
    """Makes a small language model, and the documents' code with the same weights.

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


def randomise(model, seed=0, scale=0.3):
    """The initial zeros and ones of biases, clusters and layer norms would hide a mistake there."""
    rng = np.random.default_rng(seed)
    for variable in model.trainable_variables:
        variable.assign(rng.normal(0, scale, variable.shape))


def program(path):
    """Yields a program as a module, with flags of its own in place of those that other programs define."""
    own, before = flags.FlagValues(), dict(vars(flags.FLAGS))
    vars(flags.FLAGS).update(vars(own))
    flags.DEFINE_integer("verbosity", -1, "absl's own")
    try:
        spec = importlib.util.spec_from_file_location(Path(path).stem, Path(__file__).parents[1] / path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module
    finally:
        vars(flags.FLAGS).update(before)
