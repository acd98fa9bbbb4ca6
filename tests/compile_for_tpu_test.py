"""What a TPU's compiler is given: no tables, and hardly more for more layers. And the compiler, where it can be had."""

import importlib.util
import re
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
from absl import flags
from helpers import ROOT, mentions, raises_naming, raises_parameter

from tools import compile_for_tpu

SMALL = (
    "--n_token=300 --cutoffs=50,100 --d_model=32 --d_embed=32 --n_head=2 --d_head=16 --d_inner=64 --div_val=2 "
    "--dropout=0.1 --dropatt=0.1 --tgt_len=128 --mem_len=128 --train_batch_size=8 --eval_batch_size=8 --replicas=2"
)


def text_of(program, *arguments):
    """The StableHLO of a program of the small model, and its rows."""
    flags.FLAGS.unparse_flags()
    flags.FLAGS(["compile_for_tpu.py", "--model_dir=no such run", *SMALL.split(), *arguments])
    make_lm, tgt_len, rows = compile_for_tpu.make_case()
    text = getattr(compile_for_tpu, program)(make_lm(rows["train"]), rows["train"], tgt_len)
    flags.FLAGS.unparse_flags()
    return text, rows


def operations(text):
    """Number of operations of a program."""
    return len(re.findall(r"^ *%\S+ = ", re.sub(r"^ *%\S+ = stablehlo.constant.*", "", text, flags=re.M), re.M))


@pytest.fixture
def stablehlo():
    """Skips a test where TensorFlow writes no StableHLO, as 2.18 does not."""
    try:
        compile_for_tpu.lower(tf.identity, tf.zeros([]))
    except OSError as error:
        assert f"TensorFlow {tf.__version__} " in str(error)
        pytest.skip(str(error))


def test_a_version_without_stablehlo_is_named(monkeypatch):
    class Old:
        def __init__(self, function, **options):
            pass

        def experimental_get_compiler_ir(self, *arguments):
            def generate(stage):
                raise ValueError(f"Invalid stage selected: '{stage}'. Valid values are: 'hlo'")

            return generate

    monkeypatch.setattr(tf, "function", Old)
    with raises_naming(OSError, "StableHLO", tf.__version__):
        compile_for_tpu.lower(tf.identity, tf.zeros([]))


PLAIN = ["--cutoffs=", "--dropout=0", "--dropatt=0"]


def nodes_of(function, *arguments):
    """Number of operations of TensorFlow's graph, which StableHLO is made of."""
    flat = tf.function(lambda *leaves: function(*tf.nest.pack_sequence_as(arguments, leaves)), autograph=False)
    graph = flat.get_concrete_function(*tf.nest.flatten(arguments)).graph.as_graph_def()
    return len(graph.node) + sum(len(inner.node_def) for inner in graph.library.function)


@pytest.mark.slow
def test_more_layers_are_hardly_more_graph(monkeypatch):
    monkeypatch.setattr(compile_for_tpu, "lower", nodes_of)
    counts = {}
    for n_layer in (2, 4):
        counts[n_layer], rows = text_of("training", f"--n_layer={n_layer}", "--recompute=True", *PLAIN)
        assert rows == {"train": 4, "eval": 4}
    # What is done weight by weight: stacking them, taking their gradient apart, Adam. A layer has 11 weights.
    assert 0 < counts[4] - counts[2] < 2 * 11 * 27


@pytest.mark.slow  # TensorFlow keeps the memory that StableHLO takes
@pytest.mark.parametrize("recompute, arguments", [(True, PLAIN), (True, []), (False, [])])
def test_more_layers_are_hardly_more_program(stablehlo, recompute, arguments):
    counts = {}
    for n_layer in (2, 4):
        text, rows = text_of("training", f"--n_layer={n_layer}", f"--recompute={recompute}", *arguments)
        counts[n_layer] = operations(text)
        assert rows == {"train": 4, "eval": 4}
    assert 0 < counts[4] - counts[2] < 2 * 11 * 55


@pytest.mark.ci
@pytest.mark.parametrize(
    "program",
    [pytest.param(name, marks=[pytest.mark.slow] * (name == "training")) for name in compile_for_tpu.PROGRAMS],
)
def test_programs_hold_no_tables(stablehlo, program):
    text, _ = text_of(program, "--n_layer=1", "--cutoffs=100")
    assert not tables_in(text)  # a mask here is 128 x 256 numbers


def tables_in(text):
    """Shapes of the constants of more than 4,096 bytes."""
    constants = re.findall(r'stablehlo.constant dense<"0x([^"]*)"> : tensor<(\S+)>', text)
    return [shape for digits, shape in constants if len(digits) // 2 > 4096]


def test_a_table_is_found_where_there_is_one(stablehlo):
    table = np.arange(128 * 256, dtype=np.float32).reshape(128, 256)
    assert tables_in(compile_for_tpu.lower(lambda x: x + table, tf.zeros([128, 256]))) == ["128x256xf32"]


needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="there is no libtpu: pip install -e .[tpu-check] brings it"
)


def compiled(*arguments):
    """What the program prints, and its status."""
    command = [sys.executable, "tools/compile_for_tpu.py", "--model_dir=no such run", *SMALL.split(), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return done.stdout, done.returncode


@pytest.mark.slow
@needs_compiler
def test_a_small_step_compiles():
    out, status = compiled("--n_layer=2", "--program=training", "--chip=v5e")
    assert status == 0, out
    (row,) = re.findall(r"^training +4 +128 +\d+ s +([\d.]+) MB +([\d.]+) GB +16 GB +[\d.]+ +[\d.]+$", out, re.M)
    assert 1 < float(row[0]) < 40 and 0 < float(row[1]) < 1


@pytest.mark.slow
@needs_compiler
def test_a_loop_counts_as_often_as_it_runs():
    device, costs = compile_for_tpu.compiler_of("v4"), {}
    for n_layer in (1, 2, 3):
        text, _ = text_of("training", f"--n_layer={n_layer}")
        costs[n_layer] = compile_for_tpu.compile_text(text, device, n_layer)
    for name in ("flops", "bytes"):
        one, two, three = (getattr(costs[n_layer], name) for n_layer in (1, 2, 3))
        assert two > one and abs((three - two) / (two - one) - 1) < 0.35


def test_loops_within_conditionals_and_loops_count_as_often_as_they_run():
    """By the compiler of CPUs, in place of a TPU's: a product of 8 x 8 matrices has 1,024 operations."""
    jax = pytest.importorskip("jax", reason="there is no jax: pip install -e .[tpu-check] brings it")
    x = np.ones([8, 8], np.float32)

    def flops(function):
        (module,) = jax.jit(function).lower(x).compile().runtime_executable().hlo_modules()
        return compile_for_tpu.cost_of(module, jax.local_devices()[0].client, n_layer=1)["flops"]

    def five(x):
        return jax.lax.fori_loop(0, 5, lambda i, y: y @ (x + y), x)

    def of_conditional(x):
        return jax.lax.cond(x[0, 0] > 0, five, lambda x: 2 * x, x)

    def of_loop(x):
        return jax.lax.fori_loop(0, 3, lambda i, y: five(y), x)

    for function, products in ((five, 5), (of_conditional, 5), (of_loop, 15)):
        assert products * 1024 <= flops(function) < 1.25 * products * 1024


@pytest.mark.slow
@needs_compiler
def test_what_does_not_fit_has_status_1():
    size = "--cutoffs= --tgt_len=2048 --mem_len=2048 --train_batch_size=512"
    out, status = compiled("--n_layer=1", "--program=training", *size.split())
    assert status == 1 and mentions(out, "RESOURCE_EXHAUSTED")


def test_without_the_compiler_there_is_an_error_that_says_what_brings_it(monkeypatch):
    for name in ("jax", "jax.experimental"):
        monkeypatch.setitem(sys.modules, name, None)
    flags.FLAGS.unparse_flags()
    flags.FLAGS(["compile_for_tpu.py", "--model_dir=no such run", *SMALL.split()])
    with raises_naming(OSError, "[tpu-check]"):
        compile_for_tpu.main()
    flags.FLAGS.unparse_flags()


@pytest.mark.slow
def test_without_the_compiler_the_program_says_what_brings_it():
    command = [sys.executable, "tools/compile_for_tpu.py", "--model_dir=no such run", *SMALL.split()]
    without = "import sys; sys.modules['jax'] = None; import runpy; sys.argv = sys.argv[1:]; "
    done = subprocess.run(
        [sys.executable, "-c", without + "runpy.run_path(sys.argv[0], run_name='__main__')", *command[1:]],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1
    assert mentions(done.stderr, "compile_for_tpu.py") and "[tpu-check]" in done.stderr


@pytest.mark.parametrize(
    "line, name",
    [
        ("--n_token=9 --precisions=float32", "precisions"),
        ("--published=wt103_base --replicas=2", "replicas"),
        ("--n_token=9 --program=evaluation --largest_batch", "largest_batch"),
    ],
)
def test_flags_without_effect_are_refused(line, name):
    flags.FLAGS.unparse_flags()
    flags.FLAGS(["compile_for_tpu.py", *line.split()])
    with raises_parameter(name):
        compile_for_tpu.main()
    flags.FLAGS.unparse_flags()


def test_a_folder_without_a_run_needs_a_vocabulary():
    flags.FLAGS.unparse_flags()
    flags.FLAGS(["compile_for_tpu.py", "--model_dir=no such run"])
    with raises_parameter("n_token", None):
        compile_for_tpu.make_case()
    flags.FLAGS.unparse_flags()
    flags.FLAGS(["compile_for_tpu.py", "--model_dir="])
    with raises_parameter("n_token", None):
        compile_for_tpu.make_case()
    flags.FLAGS.unparse_flags()
