"""Contestants that are language models: the plain port of the original, tests/reference_model.py, and the library.

The reference has time as its first axis, and caches no keys and values.
"""

import functools
import os

import numpy as np
import tensorflow as tf
from benchmarking.products import products_work
from benchmarking.shapes import (
    CONTINUED,
    EVALUATION,
    NETWORK,
    ONE_PART,
    PRODUCTS,
    PROMPT,
    READING,
    REFERENCE,
    ROUNDED,
    WRITING,
)
from benchmarking.work import Calls, Steps, port, repeated


def is_training(mode):
    """Whether the contestants of a mode are language models that train."""
    return mode.startswith(("training", "softmax", "peers"))


def model_arguments(shape):
    """The arguments of `TransformerXLLM` and of `ReferenceModel`."""
    return {**{name: shape[name] for name in [*NETWORK, "mem_len"]}, "d_embed": shape["d_model"]}


def frequencies(n_token):
    """The frequencies of words, `[n_token]`: word i is about 1 / i as frequent as the first."""
    share = 1 / np.arange(1, n_token + 1)
    return share / share.sum()


def random_batch(shape):
    """Random tokens and labels `[batch, tgt_len]`, with the frequencies of `frequencies`."""
    size = [shape["batch_size"], shape["tgt_len"] + 1]
    draws = np.random.default_rng(0).choice(shape["n_token"], size, p=frequencies(shape["n_token"]))
    return tf.constant(draws[:, :-1], tf.int32), tf.constant(draws[:, 1:], tf.int32)


# ------------------------------------------------------------------------------ training, evaluation and generation


def contestants(mode, jit=False):
    """The contestants of training, evaluation and generation: `{name: function of a shape that returns the work}`."""
    options = {"txl_tf float32": {}, "txl_tf bfloat16": {"dtype": "mixed_bfloat16"}}
    if jit and is_training(mode):
        options |= {f"{name} XLA": {**arguments, "jit_compile": True} for name, arguments in options.items()}
    if is_training(mode):
        options[ROUNDED] = {"matmul_precision": "bfloat16"}
    if mode == "training":
        options["txl_tf float32 recompute"] = {"recompute": True}
    if mode in ("training", "evaluation", "generation"):
        options[ONE_PART] = {"parts": 1}
    makers = {REFERENCE: functools.partial(reference_work, mode)}
    makers |= {name: functools.partial(library_work, mode, **arguments) for name, arguments in options.items()}
    if mode == "peers":
        makers |= {f"{PRODUCTS} {dtype}": functools.partial(multiplying_work, dtype=dtype) for dtype in BYTES}
    if mode == "generation":
        makers |= {f"{READING} {dtype}": functools.partial(reading_work, size=size) for dtype, size in BYTES.items()}
    return makers


def carrying(function, carried):
    """Returns work that calls `function(carried) -> (result, carried)` again and again, and waits for each result.

    Args:
        function: the function.
        carried: the first value. Each call gets the value that the last one returned.
    """

    def call():
        nonlocal carried
        result, carried = function(carried)
        return result.numpy()

    return Calls(call)


def reference_work(mode, shape):
    """The work of the reference: it trains on a batch, evaluates a segment, or generates one token."""
    model = port("reference_model").ReferenceModel(**model_arguments(shape))
    tokens, labels = map(tf.transpose, random_batch(shape))
    mems = model.initial_mems(shape["batch_size"])
    if is_training(mode):
        model.compile(learning_rate=1e-3, train_steps=10000)
        return carrying(lambda mems: model.train_step(tokens, labels, mems)[::3], mems)  # the loss and the new memory
    if mode == "evaluation":
        nll = tf.function(model.nll)
        return carrying(lambda mems: nll(tokens, labels, mems), mems)

    @tf.function
    def next_token(carried):
        log_probs, mems = reference_next(model, *carried)
        token = tf.random.categorical(log_probs, 1, tf.int32)[None, :, 0]
        return token, (token, mems)

    return carrying(next_token, (tokens[:1], mems))


def reference_next(model, tokens, mems):
    """Log-probabilities `[batch, n_token]` of the token after `tokens` `[tgt_len, batch]`, and the new memory."""
    hidden, mems = model._hidden(tokens, mems, is_training=False)
    return port("reference_model").full_log_probs(hidden[-1:], **model._softmax_args())[0], mems


def library_work(mode, shape, dtype="float32", jit_compile=False, recompute=False, matmul_precision=None, parts=None):
    """The work of the library, by `fit`, `evaluate` or `generate`, which generates `tgt_len` tokens.

    `parts` is the `parallel_parts` of `compile`; `None`: as many as train.py would choose.
    """
    import txl_tf

    options = {"jit_compile": jit_compile}
    parts = parts or parallel_parts(mode, shape)
    if not jit_compile and set_threads(parts):
        options["parallel_parts"] = parts
    if matmul_precision:
        txl_tf.set_matmul_precision(matmul_precision)
    lm = txl_tf.TransformerXLLM(**model_arguments(shape), dtype=dtype, recompute=recompute)
    tokens, labels = random_batch(shape)
    if mode == "generation":
        return Calls(lambda: lm.generate(tokens[:, :1], max_new_tokens=shape["tgt_len"], seed=0).numpy())
    lm.compile(txl_tf.make_optimizer(learning_rate=1e-3, train_steps=10000), **options)
    return Steps(lm, repeated([(tokens, labels)]), evaluation=mode == "evaluation")


def set_threads(parts):
    """Sets TensorFlow's threads for several parts. Returns false for 1 part, and if the checkout is too old."""
    import txl_tf

    can = parts > 1 and hasattr(txl_tf, "set_threads")
    if can:
        txl_tf.set_threads(parts)
    return can


def parallel_parts(mode, shape):
    """The number of parts of a batch that train.py would choose, see --parallel_parts.

    In the mode "generation", it is the number for which generate.py sets the threads.
    """
    # In the modes of the softmax, there are too many weights: gradients of two parts take too long.
    if mode.startswith("softmax"):
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if mode == "generation":
        return 2 if cores == 2 and shape["batch_size"] <= 16 else 1
    divisors = [parts for parts in range(1, min(cores, 8) + 1) if shape["batch_size"] % parts == 0]
    return max(divisors, key=lambda parts: (parts * (cores // parts), parts))


def multiplying_work(shape, dtype):
    """The work of computing the matrix products of a training step of the library with TensorFlow."""

    def make(products):
        pairs = [[tf.cast(tf.random.normal(size), dtype) for size in product.factors] for product in products]

        @tf.function
        def multiply(pairs):
            return [
                tf.matmul(a, b, transpose_a=product.transposed == "a", transpose_b=product.transposed == "b")
                for product, (a, b) in zip(products, pairs, strict=True)
            ]

        return lambda: multiply(pairs)

    return Calls(products_work(shape, make))


BYTES = {"float32": 4, "bfloat16": 2}  # bytes of a number


def bytes_of_token(shape, size):
    """Bytes to read for one token: kernels, keys, values, position keys and softmax, with `size` bytes per number."""
    width = shape["n_head"] * shape["d_head"]
    d_model = shape["d_model"]
    positions = shape["mem_len"] + 1
    layer = d_model * (4 * width + 2 * shape["d_inner"]) + positions * width * (2 * shape["batch_size"] + 1)
    return size * (shape["n_layer"] * layer + shape["n_token"] * d_model)


def reading_work(shape, size):
    """Work that only reads the bytes that `tgt_len` tokens need, token by token, on all cores.

    A number of the model has `size` bytes.
    """
    numbers = tf.random.normal([bytes_of_token(shape, size) // 4])  # float32, 4 bytes each
    largest = tf.function(lambda: tf.reduce_max(numbers))
    return Calls(lambda: [largest().numpy() for _ in range(shape["tgt_len"])])


def training_operations(shape):
    """The floating-point operations of the matrix products in a training step.

    For each product of the forward pass, the backward pass has two. It has only one for the keys and values of the
    memory and for the position keys, because their inputs (memory and distances) get no gradient.
    """
    rows, tgt_len, mem_len, d_model = (shape[name] for name in ("batch_size", "tgt_len", "mem_len", "d_model"))
    tokens = rows * tgt_len
    klen = mem_len + tgt_len
    width = shape["n_head"] * shape["d_head"]
    layer = tokens * d_model * (4 * width + 2 * shape["d_inner"])  # queries, keys, values, output; feed-forward
    layer += 3 * tokens * klen * width  # scores of keys and of positions; values
    without_gradient = (2 * rows * mem_len + klen) * d_model * width  # keys and values of the memory; position keys
    ends = [*shape["cutoffs"], shape["n_token"]]
    softmax = tokens * d_model * (ends[0] + len(ends) - 1)
    labels = random_batch(shape)[1].numpy()
    for i, (start, end) in enumerate(zip(ends, ends[1:], strict=False), 1):
        softmax += ((labels >= start) & (labels < end)).sum() * (end - start) * (d_model // shape["div_val"] ** i)
    return int(2 * (3 * (shape["n_layer"] * layer + softmax) + 2 * shape["n_layer"] * without_gradient))


# --------------------------------------------------------------------------------------------------------- writing


def writing_contestants():
    """The contestants of the mode "writing": `{name: function of a shape that returns the work}`."""
    makers = {name: functools.partial(writing_work, **options) for name, options in WRITING.items()}
    return makers | {CONTINUED: functools.partial(continuing_work, read=PROMPT)}


def writing_work(shape, rows=1, prompt=1, tokens=None, **sampling):
    """Generates text after prompts.

    Args:
        shape: sizes of the model.
        rows: number of prompts.
        prompt: tokens of each prompt.
        tokens: number of new tokens of each, by default `tgt_len`.
        **sampling: options of `lm.generate`.
    """
    import txl_tf

    set_threads(parallel_parts("generation", {"batch_size": rows}))
    lm = txl_tf.TransformerXLLM(**model_arguments(shape))
    prompts = np.random.default_rng(0).integers(shape["n_token"], size=[rows, prompt])
    return Calls(lambda: lm.generate(prompts, max_new_tokens=tokens or shape["tgt_len"], seed=0, **sampling).numpy())


def continuing_work(shape, dtype="float32", read=1, parts=None):
    """Generates `tgt_len` tokens at a time after a text of `read` tokens. A session reads the text only once.

    `Session` is not a public name, so older checkouts may not have it. `parts` is as in `library_work`.
    """
    import txl_tf
    from txl_tf.language.session import Session

    set_threads(parts or parallel_parts("generation", shape))
    session = Session(txl_tf.TransformerXLLM(**model_arguments(shape), dtype=dtype), shape["batch_size"])
    session.read(np.zeros([shape["batch_size"], read], int))
    return Calls(lambda: session.write(shape["tgt_len"]))


# --------------------------------------------------------------------------------------------------------- scoring


def scoring_contestants(run):
    """The contestants of the mode "scoring": `{name: function}`.

    Each function takes `shape`, the sizes by name, and returns the work (see work.py).

    Args:
        run: folder of a run whose vocabulary has the words of `random_lines`, see `processes.train_to_score`.
    """
    return {
        "one line at a time": functools.partial(scoring_one_by_one, run=run),
        "txl_tf float32": functools.partial(scoring_in_batches, run=run),
        EVALUATION: functools.partial(library_work, "evaluation"),
    }


def words_of(shape):
    """The words of the vocabulary: all symbols except the end of a line."""
    return [f"w{i}" for i in range(shape["n_token"] - 1)]


def random_lines(shape):
    """Random lines with lengths as of sentences: about 22 words, from 2 to 200."""
    rng = np.random.default_rng(0)
    words = words_of(shape)
    lengths = rng.lognormal(3.1, 0.6, shape["lines"]).clip(2, 200).astype(int)
    draws = [rng.choice(len(words), n, p=frequencies(len(words))) for n in lengths]
    return [" ".join(words[i] for i in ids) for ids in draws]


def scoring_one_by_one(shape, run):
    """The nll of lines, line by line, with `lm.score`."""
    import txl_tf

    lm, vocab = txl_tf.load_run(run)

    def nll_of(line):
        ids = vocab.encode(f"\n{line}\n")[None]
        return lm.score(ids[:, :-1], ids[:, 1:])[0].numpy().sum(dtype=np.float64)

    lines = random_lines(shape)
    return Calls(lambda: [nll_of(line) for line in lines])


def scoring_in_batches(shape, run):
    """The nll of all lines, in batches by length, as tools/score.py scores them."""
    import txl_tf

    pipe = txl_tf.pipeline(run)
    lines = random_lines(shape)
    return Calls(lambda: [score.nll for score in pipe.score_lines(lines)])
