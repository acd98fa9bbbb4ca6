"""Training and evaluation of a run, from text to a folder of checkpoints and logs."""

import contextlib
import json
import math
import os
import signal
import sys

import keras
import numpy as np
import tensorflow as tf

from txl_tf.adaptive import check_bins
from txl_tf.callbacks import (
    CheckFinite,
    Progress,
    RunState,
    StepCSVLogger,
    StepTensorBoard,
    StopOnSignal,
    Stopped,
    Validate,
    cut_log,
    step_of,
)
from txl_tf.checkpoint import RunCheckpoints, check_exists, load_weights, save_weights
from txl_tf.corpus import Corpus, build_corpus, get_bin_sizes, load_corpus, num_segments, segments
from txl_tf.datasets import is_by_character
from txl_tf.distribution import agree, is_chief, make_strategy, num_workers
from txl_tf.evaluation import Evaluation
from txl_tf.folders import lock, writing
from txl_tf.language_model import TransformerXLLM
from txl_tf.model import check_arguments
from txl_tf.optimization import make_optimizer
from txl_tf.runs import CONFIG_FILE, VOCAB_FILE, checkpoints_of, find_checkpoint, load_vocab, read_config, write_json
from txl_tf.text_files import read_files

# What of the training a checkpoint depends on; the rest, such as train_steps, may change when a run is continued.
_FIXED = ("tgt_len", "train_batch_size", "mixed_precision", "optimizer", "ema", "static_shapes", "seed")

_COLLECTIVE_FAILED = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.DeadlineExceededError,
    tf.errors.InternalError,
    tf.errors.CancelledError,
)

_PROMPT = 32  # tokens that a sample follows

PRECISIONS = {"float32": "float32", "bfloat16": "mixed_bfloat16", "float16": "mixed_float16"}


def train_and_evaluate(
    model_dir,
    *,
    data,
    model,
    optimizer,
    tgt_len,
    train_batch_size,
    train_steps,
    eval_batch_size=None,
    do_eval=False,
    eval_split="valid",
    max_eval_batch=-1,
    token_nll=None,
    sample_tokens=0,
    warm_start_path=None,
    iterations=500,
    save_steps=10000,
    max_to_keep=5,
    steps_per_execution=1,
    strategy="auto",
    tpu=None,
    tpu_zone=None,
    gcp_project=None,
    logical_cpus=None,
    mixed_precision="float32",
    jit_compile=False,
    gradient_accumulation_steps=1,
    recompute=False,
    static_shapes=None,
    seed=0,
):
    """Trains a language model and evaluates it; everything it leaves behind is in `model_dir`.

    A folder that holds checkpoints is continued from the newest that is whole, exactly: weights, optimizer, memory,
    place in the text, dropout and the sums of the window of steps that was under way.

    Where several workers train together, all must see the same `model_dir`; the first alone writes to it and prints.

    Args:
        model_dir: folder of the run: `config.json`, `vocab.txt`, checkpoints, TensorBoard events and `log.csv`; its
            folder `best` has the weights with the lowest validation loss.
        data: dict, the arguments of `load_corpus` (`data_dir`) or of `build_corpus`.
        model: dict, arguments of `TransformerXLLM` without `n_token` and `cutoffs`.
        optimizer: dict, arguments of `make_optimizer` without `train_steps`.
        tgt_len: tokens of a segment.
        train_batch_size, eval_batch_size: rows over all replicas; evaluation takes those of training by default.
        train_steps: steps in all, those of earlier sessions included.
        do_eval: evaluate `eval_split` when the training has ended; `"valid"` is evaluated in any case.
        eval_split: split that `do_eval` evaluates.
        max_eval_batch: batches to evaluate; all of them if not positive.
        token_nll: file to write every token of the split evaluated last to, with its nll.
        sample_tokens: tokens of text to print in the end, a continuation of the beginning of `"valid"`.
        warm_start_path: checkpoint, of a run or of the original program, whose weights a new run starts from.
        iterations: steps from one line of progress (and of `log.csv`) to the next.
        save_steps: steps from one checkpoint to the next; the split `"valid"` is evaluated as often.
        max_to_keep: number of checkpoints to keep, `best` excluded.
        steps_per_execution: steps in one call of the compiled graph; divides `train_steps` and `iterations`.
        strategy, tpu, tpu_zone, gcp_project, logical_cpus: see `make_strategy`.
        mixed_precision: type of the products, of `PRECISIONS`; the weights are float32 in any case.
        jit_compile: compile forward and backward pass with XLA.
        gradient_accumulation_steps: parts of a batch that are computed one after the other, to save memory.
        recompute: compute every layer again in the backward pass, to save memory, see `TransformerXL`.
        static_shapes: give all tensors of training a static shape: rare words have room for as many as the original's
            rule gives their bins (`get_bin_sizes`), those beyond are counted and left out; and the text ends with its
            last whole segment. By default on TPUs, which need it.
        seed: of weights and dropout.

    Returns:
        dict `{split: mean nll in nats}` of the final evaluations.

    Raises:
        ValueError, OSError: bad input, before any long work; the message says what was found and what is allowed. Or
            the training diverged, the disk is full, another worker is gone: the last good checkpoint is named.
        KeyboardInterrupt, SystemExit(0): after Ctrl-C or SIGTERM, once the run is saved.
    """
    steps = {"train_steps": train_steps, "iterations": iterations, "save_steps": save_steps}
    eval_batch_size = train_batch_size if eval_batch_size is None else eval_batch_size
    _check_positive(**steps, steps_per_execution=steps_per_execution, tgt_len=tgt_len)
    _check_positive(train_batch_size=train_batch_size, eval_batch_size=eval_batch_size, max_to_keep=max_to_keep)
    _check_positive(gradient_accumulation_steps=gradient_accumulation_steps)
    for name in ("train_steps", "iterations"):
        if steps[name] % steps_per_execution:
            raise ValueError(f"steps_per_execution={steps_per_execution} must divide {name}={steps[name]}")
    policy = _policy(mixed_precision)
    check_arguments(**model)
    if data.get("cutoffs"):
        check_bins(sys.maxsize, model["d_embed"], data["cutoffs"], model["div_val"])
    strategy = make_strategy(strategy, tpu, tpu_zone, gcp_project, logical_cpus)
    static_shapes = isinstance(strategy, tf.distribute.TPUStrategy) if static_shapes is None else static_shapes
    _check_divides(strategy, gradient_accumulation_steps, train_batch_size=train_batch_size)
    _check_divides(strategy, eval_batch_size=eval_batch_size)
    with strategy.scope():
        rule = make_optimizer(train_steps=train_steps, **optimizer)
    if warm_start_path:
        check_exists(warm_start_path)
    _check_token_nll(token_nll)
    chief = is_chief(strategy)
    with _worker_of(strategy, model_dir), _folder_to_write(model_dir) if chief else contextlib.nullcontext():
        keras.utils.set_random_seed(seed)

        corpus = _open_corpus(data)
        model = {**model, "n_token": len(corpus.vocab), "cutoffs": corpus.cutoffs}
        evaluation = Evaluation(corpus, eval_batch_size, tgt_len, max_eval_batch)
        splits = list(dict.fromkeys(["valid"] + [eval_split] * do_eval))
        for split in splits:
            evaluation.check(split)
        train_text = corpus.splits["train"]
        num_segments(
            len(train_text), train_batch_size, tgt_len, static_shapes, name="train split"
        )  # or it is too short
        bin_sizes = None
        if static_shapes:
            rows = train_batch_size // strategy.num_replicas_in_sync // gradient_accumulation_steps
            bin_sizes = get_bin_sizes(train_text, rows, tgt_len, corpus.cutoffs) if corpus.cutoffs else []

        with strategy.scope():
            lm = TransformerXLLM(**model, recompute=recompute, seed=seed, dtype=policy)
            lm.compile(
                rule,
                jit_compile=jit_compile,
                steps_per_execution=steps_per_execution,
                gradient_accumulation_steps=gradient_accumulation_steps,
                bin_sizes=bin_sizes,
            )
            lm.optimizer.build(lm.trainable_variables)  # before it is restored
        checkpoints = RunCheckpoints(lm, model_dir, max_to_keep, write=chief)
        _print_model(_name(data), corpus, lm, strategy, mixed_precision)
        data = {**data, "by_character": corpus.by_character}
        config = {"data": data, "model": model, "vocab": corpus.vocab.get_config()}
        config["training"] = {
            "tgt_len": tgt_len,
            "train_batch_size": train_batch_size,
            "eval_batch_size": eval_batch_size,
            "mixed_precision": mixed_precision,
            "static_shapes": static_shapes,
            "seed": seed,
            **steps,
            **optimizer,
        }
        _check_same_run(model_dir, config, checkpoints.latest)
        state = _restore(checkpoints, lm, warm_start_path, strategy)
        if chief:
            _describe_run(model_dir, config, corpus.vocab)
        text = segments(
            train_text, train_batch_size, tgt_len, start=step_of(lm), repeat=True, drop_remainder=static_shapes
        )
        _fit(lm, text, train_batch_size * tgt_len, steps, evaluation, checkpoints, state, model_dir)
        if optimizer.get("ema"):
            _keep_average(lm, os.path.join(model_dir, "ema"), write=chief)
        token_nll = token_nll if chief else token_nll and os.devnull
        results = {split: evaluation.run(lm, split, token_nll if split == splits[-1] else None) for split in splits}
        checkpoints.save_best(results["valid"])
        if sample_tokens and chief:
            _print_sample(lm, corpus, sample_tokens, seed)
        print(f"the run is in {model_dir}: log.csv, checkpoints, curves (tensorboard --logdir={model_dir})")
        return results


def evaluate_run(
    model_dir,
    *,
    data=None,
    model=None,
    tgt_len=None,
    eval_batch_size=None,
    eval_split="valid",
    eval_path=None,
    eval_ckpt_path=None,
    max_eval_batch=-1,
    token_nll=None,
    strategy="auto",
    tpu=None,
    tpu_zone=None,
    gcp_project=None,
    logical_cpus=None,
    mixed_precision="float32",
    seed=0,
):
    """Evaluates a checkpoint on a split of a corpus, or on a text file.

    Args:
        model_dir: folder of the run. Without a `config.json`, `model` says it all (as in the original program).
        data: as in `train_and_evaluate`; what the run was trained on where it is empty.
        model: dict, arguments of `TransformerXLLM` to use instead of the run's own.
        tgt_len, eval_batch_size: tokens of a segment and rows, by default those of the training.
        eval_path: text file to evaluate instead of a split, in the vocabulary of the run.
        eval_ckpt_path: checkpoint, of a run or of the original program, rather than the latest.
        others: as in `train_and_evaluate`.

    Returns, Raises: as `train_and_evaluate`.
    """
    policy = _policy(mixed_precision)
    config = {"data": {}, "model": {}}
    if tf.io.gfile.exists(os.path.join(model_dir, CONFIG_FILE)):
        config = read_config(model_dir)
    training = {"tgt_len": 70, "eval_batch_size": 60, **config.get("training", {})}
    tgt_len = training["tgt_len"] if tgt_len is None else tgt_len
    eval_batch_size = training["eval_batch_size"] if eval_batch_size is None else eval_batch_size
    _check_positive(tgt_len=tgt_len, eval_batch_size=eval_batch_size)
    _check_token_nll(token_nll)
    path = find_checkpoint(model_dir, eval_ckpt_path)
    strategy = make_strategy(strategy, tpu, tpu_zone, gcp_project, logical_cpus)
    _check_divides(strategy, eval_batch_size=eval_batch_size)
    if eval_path:
        if "vocab" not in config:
            raise ValueError(f"eval_path needs the vocabulary of a run: {model_dir}/{CONFIG_FILE} does not exist")
        vocab = load_vocab(model_dir)
        tokens = vocab.encode(read_files([eval_path], vocab.level), name=eval_path)
        by_character = config["data"].get("by_character", is_by_character(config["data"].get("dataset"), vocab))
        corpus, eval_split = Corpus(vocab, config["model"]["cutoffs"], {eval_path: tokens}, by_character), eval_path
    else:
        if not (data or config["data"].get("data_dir") or config["data"].get("data_path")):
            if config["data"].get("dataset") != "pydoc":
                raise ValueError("no text to evaluate: give data_dir, dataset with its data_path, or eval_path")
        corpus = _open_corpus(data or config["data"])
        if "vocab" in config and corpus.vocab.symbols != load_vocab(model_dir).symbols:
            raise ValueError(
                f"the corpus has another vocabulary ({len(corpus.vocab)} symbols) than the run in {model_dir} "
                f"({config['model']['n_token']} symbols); evaluate its text by eval_path"
            )
    evaluation = Evaluation(corpus, eval_batch_size, tgt_len, max_eval_batch)
    evaluation.check(eval_split)
    keras.utils.set_random_seed(seed)
    bins = {"n_token": len(corpus.vocab), "cutoffs": corpus.cutoffs}
    with strategy.scope():
        lm = TransformerXLLM(**{**bins, **config["model"], **(model or {})}, dtype=policy)
        static = isinstance(strategy, tf.distribute.TPUStrategy)
        lm.compile(make_optimizer(learning_rate=1.0), bin_sizes=[1] * len(bins["cutoffs"]) if static else None)
    load_weights(lm, path)
    with _worker_of(strategy, model_dir):
        _print_model(eval_path or _name(data or config["data"]), corpus, lm, strategy, mixed_precision)
        sizes = f"tgt_len {tgt_len}, mem_len {lm.network.mem_len}, batch {eval_batch_size}"
        print(f"evaluating {path}: {sizes}", flush=True)
        token_nll = token_nll if is_chief(strategy) else token_nll and os.devnull
        return {eval_split: evaluation.run(lm, eval_split, token_nll)}


@contextlib.contextmanager
def _worker_of(strategy, model_dir):
    """Of several workers, lets the chief alone print, and says what to do where another one is gone."""
    with contextlib.ExitStack() as stack:
        if not is_chief(strategy):
            stack.enter_context(contextlib.redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
        try:
            yield
        except _COLLECTIVE_FAILED as error:
            if num_workers(strategy) == 1:
                raise
            saved = checkpoints_of(model_dir)
            raise OSError(
                f"another worker is gone ({type(error).__name__}): start all {num_workers(strategy)} again, and they "
                f"go on from {saved[-1] if saved else 'the beginning'}"
            ) from error


@contextlib.contextmanager
def _folder_to_write(model_dir):
    """Makes the folder of a run and keeps other runs out of it."""
    _check_writable(model_dir)
    with lock(model_dir, f"another run is training in model_dir {model_dir}"):
        yield


def _open_corpus(data):
    if not data:
        raise ValueError("no corpus: give data_dir, a folder that tools/prepare_data.py prepared, or dataset")
    if "data_dir" in data:
        return load_corpus(data["data_dir"])
    return build_corpus(**{name: value for name, value in data.items() if name != "by_character"})


def _name(data):
    return data.get("data_dir") or data["dataset"]


def _policy(mixed_precision):
    if mixed_precision not in PRECISIONS:
        raise ValueError(f"mixed_precision must be one of {', '.join(PRECISIONS)}, got {mixed_precision!r}")
    return PRECISIONS[mixed_precision]


def _print_model(name, corpus, lm, strategy, mixed_precision):
    sizes = ", ".join(f"{len(tokens):,} {split}" for split, tokens in corpus.splits.items())
    print(f"{name}: {len(corpus.vocab):,} symbols; tokens: {sizes}")
    replicas = strategy.num_replicas_in_sync
    print(
        f"model: {lm.count_params():,} parameters, {mixed_precision}, {replicas} replica{'s' * (replicas > 1)}",
        flush=True,
    )


def _fit(lm, text, tokens_per_step, steps, evaluation, checkpoints, state, model_dir):
    """Trains to the last step. A Keras epoch is a window of `iterations` steps; the text goes round and round."""
    start = step_of(lm)
    iterations, train_steps = steps["iterations"], steps["train_steps"]
    if start >= train_steps:
        print(f"already trained: {start} steps, train_steps={train_steps}")
        lm.optimizer.finalize_variable_values(lm.trainable_variables)  # the moving average, as at the end of `fit`
        return
    if start % lm.steps_per_execution:
        raise ValueError(
            f"steps_per_execution={lm.steps_per_execution} must divide the step to go on from, {start}: "
            "take one that does"
        )
    stop = StopOnSignal(lm)
    callbacks = [
        CheckFinite(checkpoints),
        Validate(evaluation.dataset("valid"), stop, steps),
        Progress(train_steps, tokens_per_step, evaluation.measure),
    ]
    if checkpoints.write:
        log = os.path.join(model_dir, "log.csv")
        mid_window = state[1] is not None
        cut_log(log, start - 1 if mid_window else start)
        callbacks += [StepTensorBoard(model_dir, checkpoints), StepCSVLogger(log, evaluation.measure, checkpoints)]
    run_state = RunState(checkpoints, state, steps, callbacks)
    with stop:
        try:
            lm.fit(
                text,
                initial_epoch=start // iterations,
                epochs=math.ceil(train_steps / iterations),
                steps_per_epoch=iterations,
                verbose=0,
                callbacks=[*callbacks, run_state],
            )
        except Stopped:
            run_state.save(mid_window=True)
            path = checkpoints.latest
            print(f"{stop.reason}: step {step_of(lm)} is saved as {path}; the same command goes on from there")
            raise KeyboardInterrupt if stop.received == signal.SIGINT else SystemExit(0) from None


def _print_sample(lm, corpus, number, seed):
    """Continues the first tokens of the held-out text."""
    prompt = np.array(corpus.splits["valid"][:_PROMPT])
    text = lm.generate(prompt[None], number, temperature=0.8, seed=seed)[0]
    print(f"a sample at temperature 0.8, after {corpus.vocab.decode(prompt)!r}:")
    print(corpus.vocab.decode(text[len(prompt) :]), flush=True)


def _restore(checkpoints, lm, warm_start_path, strategy):
    """Sets what a checkpoint of the run, or else the warm start, gives; returns the state to go on with."""
    step = checkpoints.newest_whole()
    step = agree(strategy, -1 if step is None else step)
    if step >= 0:
        print(f"continuing from {checkpoints.path(step)}", flush=True)
        return checkpoints.restore(checkpoints.path(step))
    if checkpoints.write:  # what an earlier run left, whose checkpoints are gone
        checkpoints.remove_best()
    if warm_start_path:
        print(f"starting from the weights of {warm_start_path}")
        load_weights(lm, warm_start_path)
    return None, None


def _keep_average(lm, folder, write):
    """Writes the moving average that training ended with."""
    if write:
        save_weights(lm, folder, step_of(lm))
    print(f"averaged weights: {folder}/ckpt-{step_of(lm)} (for --eval_ckpt_path)")


def _check_positive(**numbers):
    for name, value in numbers.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")


def _check_token_nll(path):
    """Raises OSError where the file cannot be written."""
    if path:
        with writing(path), tf.io.gfile.GFile(path, "a") as file:
            file.write("")


def _check_divides(strategy, parts=1, **batch_size):
    """Raises ValueError where a batch cannot be divided evenly among the replicas, and on each into `parts`."""
    ((name, rows),) = batch_size.items()
    replicas = strategy.num_replicas_in_sync
    if rows % (replicas * parts):
        among = f"{replicas} replicas" + f" times gradient_accumulation_steps={parts}" * (parts > 1)
        raise ValueError(f"{name} must be a multiple of {replicas * parts}, for {among}, got {rows}")


def _check_writable(model_dir):
    """Makes the folder; raises OSError where it cannot be made or written to."""
    if not model_dir:
        raise ValueError("model_dir must name the folder of the run")
    try:
        tf.io.gfile.makedirs(model_dir)
        probe = os.path.join(model_dir, f"writable.{os.getpid()}.tmp")
        with tf.io.gfile.GFile(probe, "w") as file:
            file.write("")
        tf.io.gfile.remove(probe)
    except (OSError, tf.errors.OpError) as error:
        raise OSError(f"model_dir {model_dir} cannot be written to: {error}") from error


def _describe_run(model_dir, config, vocab):
    write_json(os.path.join(model_dir, CONFIG_FILE), config)
    path = os.path.join(model_dir, VOCAB_FILE)
    with writing(path):
        vocab.save(path)


def _check_same_run(model_dir, config, latest):
    """Raises ValueError where the folder holds checkpoints of another configuration."""
    if not latest:
        return
    before, config = read_config(model_dir), json.loads(json.dumps(config))
    changes = [
        f"{part}.{name}: {before.get(part, {}).get(name)!r} there, {value!r} now"
        for part, values in config.items()
        for name, value in values.items()
        if before.get(part, {}).get(name) != value and (part != "training" or name in _FIXED)
    ]
    if changes:
        raise ValueError(
            f"model_dir {model_dir} holds a run of another configuration; choose another folder, or:\n  "
            + "\n  ".join(changes)
        )
