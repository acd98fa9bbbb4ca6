"""Compiles the programs of a run or of a configuration by a TPU's own compiler, on a machine that has no TPU.

    pip install -e ".[tpu-check]"
    python tools/compile_for_tpu.py --model_dir=runs/my --chip=v5e
    python tools/compile_for_tpu.py --flagfile=configs/enwik8_base.cfg --n_token=204 --replicas=4 --largest_batch
    python tools/compile_for_tpu.py --published=enwik8_base,wt103_base --chip=v4 --precisions=float32,bfloat16

The programs are the training step (with the update), the evaluation step and the generation of one token. For each, it
prints the compile time, the size of the program, the peak memory of a core, and the operations of a core and the bytes
that it reads and writes. The hyper-parameters are those of the run. Without a run, they are the flags of train.py, with
--n_token and --cutoffs in place of a text. The exit status is 1 if a program does not compile or does not fit.

The compiler does not show the communication between cores or the time of a step.
"""

import dataclasses
import functools
import itertools
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

from absl import flags

os.environ.update(TPU_SKIP_MDS_QUERY="1", JAX_PLATFORMS="cpu", ALLOW_MULTIPLE_LIBTPU_LOAD="1")
os.environ.update(TPU_ACCELERATOR_TYPE="v4-8", TPU_WORKER_HOSTNAMES="localhost")  # without them, it prints warnings

from txl_config import AUTO, PRECISIONS, OptimizerConfig, one_of
from txl_config.errors import ParameterError
from txl_programs import train  # defines the flags of a configuration
from txl_programs.flag_values import FLAGS, check_used, completed, values, without_unused
from txl_programs.program import read_flags, run

FLAGS.set_default("model_dir", "")  # train.py requires it, and this program does not

ROOT = Path(__file__).parents[1]
GIB = 2**30
# The compiler's name of each chip, and the memory of a core in GiB. In v4 and v5p, two cores work as one.
CHIPS = {"v4": ("v4:2x2x1", 32), "v5e": ("v5e:2x2", 16), "v5p": ("v5p:2x2x1", 95), "v6e": ("v6e:2x2", 32)}
PROGRAMS = ("training", "evaluation", "generation")
# The published configurations: size of the vocabulary, and number of GPUs or TPU cores in the original's scripts.
PUBLISHED = {
    "enwik8_base": (204, 4), "text8_base": (27, 4), "wt103_base": (267735, 4), "lm1b_base": (793471, 4),
    "enwik8_large": (204, 32), "text8_large": (27, 32), "wt103_large": (267735, 64), "lm1b_large": (793471, 512),
}  # fmt: skip
HEADING = (
    f"{'program':12} {'rows':>5} {'tokens':>6} {'compiled':>9} {'program':>9} {'memory':>9} {'of':>7} "
    f"{'Tflop':>8} {'GB':>8}  of a core of "
)

flags.DEFINE_enum("chip", "v4", CHIPS, "Kind of TPU.")
flags.DEFINE_list("program", list(PROGRAMS), f"Programs to compile, of {', '.join(PROGRAMS)}.")
flags.DEFINE_integer("replicas", 1, "Number of cores that share a batch.", lower_bound=1)
flags.DEFINE_integer("n_token", None, "Size of the vocabulary. Needed without a run.", lower_bound=1)
flags.DEFINE_bool(
    "largest_batch", False, "Find the largest number of training rows that fits into a core. Compiles more batches."
)
flags.DEFINE_list("published", None, "Compile the training of published configurations, of " + ", ".join(PUBLISHED))
flags.DEFINE_list("precisions", "float32,bfloat16", "With --published: values of --mixed_precision.")

read_flags(__name__)

import keras
import numpy as np
import tensorflow as tf
from tensorflow.compiler.xla.service import hlo_pb2

from txl_tf import make_optimizer
from txl_tf.data.text.batches import choose_bin_capacities
from txl_tf.data.text.datasets import PAPER_DATASETS
from txl_tf.language.generation import TextState, next_token, precompute_for
from txl_tf.language.sampling import check_sampling, no_history
from txl_tf.runs.families.record import family_of
from txl_tf.runs.folder import RunFolder
from txl_tf.runs.setup import open_corpus_of_run


@dataclasses.dataclass
class Compiled:
    """The results of the compiler for a program, for one core."""

    seconds: float  # of the compilation
    program: int  # bytes of the program
    memory: int  # peak memory in bytes, without the program
    flops: float  # floating-point operations
    bytes: float  # bytes that are read from and written to the chip's memory


def compiler_of(chip):
    """A description of a core of this chip, whose client compiles for the core. Raises OSError without the compiler."""
    try:
        from jax.experimental import topologies

        return topologies.get_topology_desc(topology_name=CHIPS[chip][0], platform="tpu").devices[0]
    except (ImportError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise OSError(
            f'the compiler for TPUs is not available: {reason}. To install it: pip install -e ".[tpu-check]"'
        ) from error


def lower(function, *arguments):
    """The StableHLO of a function, as text. The variables that the function uses become parameters of the program.

    Raises:
        OSError: this version of TensorFlow does not write StableHLO.
    """

    @functools.partial(tf.function, jit_compile=True, autograph=False)
    def flat(*leaves):
        return function(*tf.nest.pack_sequence_as(arguments, leaves))

    try:
        text = flat.experimental_get_compiler_ir(*tf.nest.flatten(arguments))(stage="stablehlo")
    except ValueError as error:
        if "Invalid stage" not in str(error):
            raise
        raise OSError(
            f"the TPU's compiler needs StableHLO, which TensorFlow {tf.__version__} does not write"
        ) from error
    # The compiler knows all operations in the text except `mhlo.copy`.
    return re.sub(r"mhlo\.copy (%\S+) : (tensor<[^>]*>)", r"stablehlo.convert \1 : (\2) -> \2", text)


def compile_text(text, device, n_layer):
    """Compiles a program.

    Args:
        text: the program in StableHLO.
        device: the result of `compiler_of`.
        n_layer: number of layers of the model, see `cost_of`.

    Raises:
        RuntimeError: the compiler refuses the program, or the program does not fit into the memory.
    """
    import jax
    from jax._src.interpreters import mlir
    from jax._src.lib import _jax, xla_client
    from jaxlib.mlir import ir

    options = xla_client.CompileOptions()
    options.num_replicas = options.num_partitions = 1
    options.device_assignment = xla_client.DeviceAssignment.create(np.array([[device.id]]))
    started = time.perf_counter()
    with mlir.make_ir_context():
        module = ir.Module.parse(text)
        executable = device.client.compile(module, _jax.DeviceList((device,)), options)
    seconds = time.perf_counter() - started
    sizes = executable.get_compiled_memory_stats()
    program = sizes.generated_code_size_in_bytes
    cost = cost_of(executable.hlo_modules()[0], jax.local_devices()[0].client, n_layer)
    return Compiled(seconds, program, sizes.peak_memory_in_bytes, cost["flops"], cost["bytes accessed"])


def cost_of(module, client, n_layer):
    """The operations and bytes of a compiled program: dict of "flops" and "bytes accessed".

    XLA's own analysis counts the body of a loop once. This function counts it as often as it runs, also within loops,
    branches of conditionals and called computations. A loop whose limit is not a constant of its condition is assumed
    to be the backward pass over the layers, and counted `n_layer` times.

    Args:
        module: the program.
        client: a client of JAX, which makes the analysis.
        n_layer: number of layers of the model.
    """
    from jax._src.lib import _jax

    whole = hlo_pb2.HloModuleProto.FromString(module.as_serialized_hlo_module_proto())
    computations = {computation.id: computation for computation in whole.computations}

    def cost_with_loops_once(computation):
        """The cost of a computation and of those that it calls, by XLA's own analysis.

        It counts the body of each loop once, and of a conditional the branch that costs most.
        """
        alone = hlo_pb2.HloModuleProto(name=whole.name, id=whole.id, entry_computation_id=computation.id)
        alone.entry_computation_name = computation.name
        alone.host_program_shape.CopyFrom(computation.program_shape)
        needed = [computation.id]
        for number in needed:
            called = [
                i for instruction in computations[number].instructions for i in instruction.called_computation_ids
            ]
            needed += [i for i in called if i not in needed]
        alone.computations.extend(c for c in whole.computations if c.id in needed)  # in order, as it must be
        analysis = _jax.hlo_module_cost_analysis(
            client, type(module).from_serialized_hlo_module_proto(alone.SerializeToString())
        )
        return {name: analysis.get(name, 0.0) for name in ("flops", "bytes accessed")}

    def all_times(computation):
        """The cost of a computation and of those that it calls, with the body of each loop as often as it runs."""
        total = cost_with_loops_once(computation)
        for instruction in computation.instructions:
            if instruction.opcode not in ("while", "conditional", "call", "async-start"):
                continue  # the others call no computation with a loop
            called = [computations[i] for i in instruction.called_computation_ids]
            n = 1
            if instruction.opcode == "while":
                body, condition = called
                limits = [i.literal.s32s[0] for i in condition.instructions if i.literal.s32s]
                n = limits[0] if limits else n_layer
                called = [body]
            counted = [cost_with_loops_once(one) for one in called]  # `total` already contains them
            costs = [all_times(one) for one in called]
            for name in total:
                total[name] += n * max(cost[name] for cost in costs) - max(cost[name] for cost in counted)
        return total

    return all_times(computations[whole.entry_computation_id])


# ------------------------------------------------------------------------------------------------------ the programs


def unallocated():
    """A context in which no weight is initialised. The system does not provide memory that is never written."""

    def initialize(variable, initializer):
        variable._initialize(tf.raw_ops.Empty(shape=variable.shape, dtype=variable.dtype, init=False))

    return mock.patch.object(keras.Variable, "_initialize_with_initializer", initialize)


def zipf_text(n, n_token):
    """Random tokens with the frequencies of words, by Zipf's law, in place of a text."""
    weights = 1 / np.arange(1, n_token + 1)
    return np.random.default_rng(0).choice(n_token, n, p=weights / weights.sum())


def make_case():
    """The model of the run in `--model_dir` or, without a run, of the flags.

    Returns:
        `(make_lm, tgt_len, rows)`. `make_lm(rows)` returns the compiled model for a core that trains on `rows` rows.
        `rows` is `{"train": rows of a core in training, "eval": in evaluation}`.

    Raises:
        ParameterError: there is neither a run nor `--n_token`; or a batch cannot be divided evenly between the replicas
            and, in training, into the parts of `--gradient_accumulation_steps`.
    """
    folder = RunFolder(FLAGS.model_dir, "language_model")
    parts = FLAGS.gradient_accumulation_steps
    tokens = None
    optimizer_names = OptimizerConfig.names()
    names = ["tgt_len", "train_batch_size", "eval_batch_size", "train_steps", "mixed_precision", *optimizer_names]
    settings = values(names)
    if FLAGS.model_dir and folder.has_config():
        config = folder.read_config()
        family = folder.family
        model = config["model"]
        settings = {**settings, **config["training"], **values(names, given_only=True)}
        tokens = open_corpus_of_run(folder).splits["train"] if model["cutoffs"] else None
    elif FLAGS.n_token is None:
        reason = f"{FLAGS.model_dir} is no run" if FLAGS.model_dir else "there is no model_dir"
        message = f"{reason}: give n_token, the size of the vocabulary, and cutoffs"
        raise ParameterError("n_token", None, "given without a run", message)
    else:
        family = family_of(train.MODELS[FLAGS.model])
        cutoffs = [int(cutoff) for cutoff in FLAGS.cutoffs or []]
        hyper_parameters = completed(family.config, train.model_defaults(family.config, {}))
        train.check_model_flags(family.config, hyper_parameters.get("positions", "relative"))
        model = {**hyper_parameters, "n_token": FLAGS.n_token, "cutoffs": cutoffs}
    rows = {}
    tgt_len = settings["tgt_len"]
    policy = {**PRECISIONS, AUTO: "mixed_bfloat16"}[settings["mixed_precision"]]  # a TPU has bfloat16
    for program, shares in (("train", FLAGS.replicas * parts), ("eval", FLAGS.replicas)):
        batch = settings[f"{program}_batch_size"]
        if batch % shares:
            name = f"{program}_batch_size"
            message = f"{name}={batch} must be a multiple of {shares}, for replicas={FLAGS.replicas}"
            if shares > FLAGS.replicas:
                message += f" and gradient_accumulation_steps={parts}"
            raise ParameterError(name, batch, f"a multiple of {shares}", message)
        rows[program] = batch // FLAGS.replicas

    def make_lm(rows):
        """Makes and compiles the model without memory for its weights."""
        capacities = []
        if model["cutoffs"]:
            text = zipf_text(16 * rows * tgt_len, model["n_token"]) if tokens is None else tokens
            capacities = choose_bin_capacities(text, rows // parts, tgt_len, model["cutoffs"])
        with unallocated():
            arguments = {name: settings[name] for name in (*optimizer_names, "train_steps")}
            optimizer = make_optimizer(**without_unused(arguments))
            lm = family.make(**model, recompute=FLAGS.recompute, seed=0, dtype=policy)
            lm.compile(optimizer, static_shapes=True, bin_capacities=capacities, gradient_accumulation_steps=parts)
            lm.optimizer.build(lm.trainable_variables)
        return lm

    return make_lm, tgt_len, rows


def stand_ins(function):
    """Tensors with the shapes and dtypes of those that a function returns. Their memory is never written."""
    outputs = tf.function(function, autograph=False).get_concrete_function().structured_outputs

    def stand_in(x):
        return None if x is None else tf.raw_ops.Empty(shape=x.shape, dtype=x.dtype, init=False)

    return tf.nest.map_structure(stand_in, outputs)


def training(lm, rows, tgt_len):
    """A training step on `[rows, tgt_len]` tokens, with the update of the weights, as StableHLO."""
    ids, mems = stand_ins(lambda: (tf.zeros([rows, tgt_len], tf.int32), lm.initial_mems(rows)))
    return lower(lambda tokens, labels, mems: lm.train_step((tokens, labels), mems), ids, ids, mems)


def evaluation(lm, rows, tgt_len):
    """An evaluation step on `[rows, tgt_len]` tokens, with cached keys and values, as StableHLO."""
    ids, carried = stand_ins(lambda: (tf.zeros([rows, tgt_len], tf.int32), lm.start_evaluation(rows, tgt_len)))
    return lower(lambda tokens, labels, carried: lm.test_step((tokens, labels), carried), ids, ids, carried)


def generation(lm, rows, tgt_len):
    """The generation of one token for each of `rows` rows, as StableHLO. `tgt_len` has no effect."""
    cache = lm.decoding_cache(static_shapes=True)
    hidden, state, history, weights = stand_ins(
        lambda: (
            tf.zeros([rows, lm.network.d_model], lm.compute_dtype),
            cache.initial_state(rows),
            no_history(rows, lm.network.n_token),
            precompute_for(lm, cache),
        )
    )
    text = TextState(hidden, state, history)
    arguments = weights, text, tf.zeros([rows, 2], tf.float64), check_sampling(rows, seed=1)
    return lower(lambda *arguments: next_token(lm, cache, *arguments), *arguments)


# ------------------------------------------------------------------------------------------------------- the answers


def row_of(program, rows, tokens, compiled):
    """A line of the table: the sizes, and the cost of the compiled program, under the words of `HEADING`."""
    limit = CHIPS[FLAGS.chip][1]
    return (
        f"{program:12} {rows:5} {tokens:6} {compiled.seconds:7.0f} s {compiled.program / 2**20:6.1f} MB "
        f"{compiled.memory / GIB:6.2f} GB {limit:4} GB {compiled.flops / 1e12:8.3f} {compiled.bytes / 1e9:8.1f}"
    )


def rows_that_fit(rows, compiled, attempt):
    """Finds the largest training batch that fits into the memory of a core, up to an error of 5%.

    Args:
        rows, compiled: a batch that fits, and the result for it.
        attempt: function of a number of rows that returns `Compiled`, or raises RuntimeError if they do not fit.

    Returns:
        `(rows, compiled)` for the largest batch.
    """
    parts = FLAGS.gradient_accumulation_steps
    too_many = None
    while too_many is None or too_many - rows > max(parts, rows / 20):
        n = 2 * rows if too_many is None else (rows + too_many) // 2 // parts * parts
        try:
            compiled = attempt(n)
            rows = n
        except RuntimeError:  # it does not fit
            too_many = n
    return rows, compiled


def compile_published():
    """Compiles the training step of each configuration in `--published`, in new processes, and prints their rows.

    Then it exits, with status 1 if a process failed.
    """
    failed = False
    for name in FLAGS.published:
        one_of(PUBLISHED)("published", name)
    print(f"{'configuration':13} {'precision':9} {'recompute':9} {HEADING}{FLAGS.chip}; CPU time, memory of the host")
    for name, precision, recompute in itertools.product(FLAGS.published, FLAGS.precisions, (False, True)):
        n_token, replicas = PUBLISHED[name]
        cutoffs = PAPER_DATASETS[name.partition("_")[0]].cutoffs
        command = [
            sys.executable, __file__, f"--flagfile={ROOT}/configs/{name}.cfg", f"--n_token={n_token}",
            f"--cutoffs={','.join(map(str, cutoffs))}", f"--replicas={replicas}", f"--mixed_precision={precision}",
            f"--recompute={recompute}", f"--chip={FLAGS.chip}", "--program=training",
        ]  # fmt: skip
        process: Any = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        answer = process.stdout.read().strip().splitlines()[-1:]
        _, status, used = os.wait4(process.pid, 0)
        failed |= status != 0
        host = f"; {used.ru_utime + used.ru_stime:.0f} s, {used.ru_maxrss / 2**20:.1f} GB"
        print(f"{name:13} {precision:9} {'yes' if recompute else 'no':9} {''.join(answer)}{host}", flush=True)
    sys.exit(failed)


def main():
    for program in FLAGS.program:
        one_of(PROGRAMS)("program", program)
    of_one_model = ("model_dir", "n_token", "program", "replicas", "largest_batch")
    check_used(
        (("precisions",), FLAGS.published is not None, "is for --published, which is not given"),
        (of_one_model, FLAGS.published is None, "has no effect with --published"),
        (("largest_batch",), "training" in FLAGS.program, "is for --program=training"),
    )
    device = compiler_of(FLAGS.chip)
    if FLAGS.published is not None:
        FLAGS.published = [name for name in FLAGS.published if name] or list(PUBLISHED)
        compile_published()
    make_lm, tgt_len, rows_of = make_case()
    failed = False
    print(HEADING + FLAGS.chip, flush=True)
    shapes = {"training": (rows_of["train"], tgt_len), "evaluation": (rows_of["eval"], tgt_len), "generation": (1, 1)}
    for program in FLAGS.program:
        rows, tokens = shapes[program]

        def attempt(rows, program=program, tokens=tokens):
            lm = make_lm(rows)
            lower_program = globals()[program]  # the function of this module with the program's name
            return compile_text(lower_program(lm, rows, tokens), device, lm.network.n_layer)

        try:
            compiled = attempt(rows)
            print(row_of(program, rows, tokens, compiled), flush=True)
            if program == "training" and FLAGS.largest_batch:
                rows, compiled = rows_that_fit(rows, compiled, attempt)
                print(row_of("largest", rows, tokens, compiled), flush=True)
        except RuntimeError as error:  # the compiler's
            failed = True
            print(f"{program:12} {rows:5} {tokens:6} does not compile: {str(error).strip().partition(chr(10))[0]}")
    sys.exit(failed)


if __name__ == "__main__":
    run(main)
