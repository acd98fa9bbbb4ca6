"""Products of float32 numbers that are rounded to bfloat16 before: what it does, and where it cannot be had."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
from helpers import ROOT, raises_parameter

from txl_config.environment import processor_flags
from txl_tf import set_matmul_precision
from txl_tf.kernels.precision import VARIABLE, matmul, rounds

CAN_ROUND = "amx_bf16" in processor_flags() and not {"TF_ENABLE_ONEDNN_OPTS", "ONEDNN_MAX_CPU_ISA"} & set(os.environ)
IN_A_NEW_PROCESS = """
import json, sys
import numpy as np
import tensorflow as tf
import txl_tf
from txl_tf.kernels import project

txl_tf.set_matmul_precision(sys.argv[1])
rng = np.random.default_rng(0)
a, b = (tf.constant(rng.normal(size=[96, 96]), tf.float32) for _ in "ab")
with tf.GradientTape() as tape:
    tape.watch(a)
    product = project(a, b)
exact, of_a = a.numpy().astype(float) @ b.numpy().astype(float), np.ones([96, 96]) @ b.numpy().astype(float).T
found = {
    "product": np.abs(product - exact).max() / np.abs(exact).max(),
    "gradient": np.abs(tape.gradient(product, a) - of_a).max() / np.abs(of_a).max(),
}
lm = txl_tf.TransformerXLLM(
    n_token=50, n_layer=2, d_model=64, d_embed=64, n_head=4, d_head=16, d_inner=128, mem_len=16, seed=0, dropout=0.0
)
for variable in lm.variables:
    variable.assign(rng.normal(size=variable.shape, scale=0.1))
tokens = rng.integers(50, size=[8, 33])
nll, mems = lm.score(tokens[:, :-1], tokens[:, 1:])
print(json.dumps({**found, "nll": float(np.mean(nll)), "types": [nll.dtype.name, mems[0].dtype.name]}))
"""


def test_products_are_tensorflow_s_unless_it_is_asked_for():
    a, b = (tf.random.stateless_normal([5, 7], [0, i]) for i in range(2))
    np.testing.assert_array_equal(matmul(a, b, transpose_b=True), tf.matmul(a, b, transpose_b=True))


def test_another_word_is_an_error():
    with raises_parameter("matmul_precision", "half", ["float32", "bfloat16"]):
        set_matmul_precision("half")


def test_after_the_first_product_it_is_too_late(monkeypatch):
    monkeypatch.setenv(VARIABLE, "STRICT")
    tf.matmul(tf.ones([1, 64, 64]), tf.ones([1, 64, 64]))
    with raises_parameter("matmul_precision", "bfloat16"):
        set_matmul_precision("bfloat16")
    assert os.environ[VARIABLE] == "STRICT" and not rounds()


@pytest.mark.parametrize("variable", [VARIABLE, "ONEDNN_DEFAULT_FPMATH_MODE"])
def test_float32_cannot_be_had_where_the_environment_says_otherwise(monkeypatch, variable):
    set_matmul_precision("float32")
    monkeypatch.setenv(variable, "BF16")
    with raises_parameter("matmul_precision", "float32", f"bfloat16 where {variable}=BF16"):
        set_matmul_precision("float32")


def test_accelerators_round_in_their_own_way(monkeypatch):
    gpu = tf.config.LogicalDevice("/device:GPU:0", "GPU")
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda: [gpu])
    with raises_parameter("matmul_precision", "bfloat16", "float32 where there is a GPU or TPU"):
        set_matmul_precision("bfloat16")


@pytest.mark.slow
@pytest.mark.skipif(not CAN_ROUND, reason="needs oneDNN and a processor with units for bfloat16")
def test_factors_are_rounded_and_all_else_is_float32():
    found = {}
    for precision in ("float32", "bfloat16"):
        command = [sys.executable, "-c", IN_A_NEW_PROCESS, precision]
        result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        assert result.returncode == 0, result.stderr
        found[precision] = json.loads(result.stdout)
    exact, rounded = found["float32"], found["bfloat16"]
    for name in ("product", "gradient"):
        assert exact[name] < 1e-6 and 2**-12 < rounded[name] < 2**-6, (name, exact, rounded)
    assert exact["types"] == rounded["types"] == ["float32", "float32"]
    assert 0 < abs(rounded["nll"] - exact["nll"]) < 0.005 * exact["nll"]
