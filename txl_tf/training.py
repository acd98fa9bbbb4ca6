"""Training and evaluation of a run, from text to a folder of checkpoints and logs."""

import json
import math
import os
import sys

import keras
import tensorflow as tf

from txl_tf.adaptive import check_bins
from txl_tf.callbacks import Progress, RunState, StepCSVLogger, StepTensorBoard, StopOnInterrupt, step_of
from txl_tf.checkpoint import RunCheckpoints
from txl_tf.corpus import build_corpus, num_segments, segments
from txl_tf.distribution import make_strategy
from txl_tf.evaluation import Evaluation
from txl_tf.language_model import TransformerXLLM
from txl_tf.model import check_arguments
from txl_tf.optimization import make_optimizer

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
    do_train=True,
    do_eval=False,
    eval_split="valid",
    max_eval_batch=-1,
    eval_ckpt_path=None,
    warm_start_path=None,
    iterations=500,
    save_steps=10000,
    max_to_keep=5,
    steps_per_execution=1,
    strategy="auto",
    mixed_precision="float32",
    jit_compile=False,
    seed=0,
):
    """Trains a language model and evaluates it; everything it leaves behind is in `model_dir`.

    A folder that holds checkpoints is continued: weights, optimizer, memory and place in the text.

    Args:
        model_dir: folder of the run: `config.json`, `vocab.txt`, checkpoints, TensorBoard events and `log.csv`.
        data: dict, arguments of `build_corpus`, and `cutoffs` to use instead of the corpus's own (`None`: those).
        model: dict, arguments of `TransformerXLLM` without `n_token` and `cutoffs`.
        optimizer: dict, arguments of `make_optimizer` without `train_steps`.
        tgt_len: tokens of a segment.
        train_batch_size, eval_batch_size: rows over all replicas; evaluation takes those of training by default.
        train_steps: steps in all, those of earlier sessions included.
        do_train, do_eval: what to do. Training ends with an evaluation of the split `"valid"` in any case.
        eval_split: split that `do_eval` evaluates.
        max_eval_batch: batches to evaluate; all of them if not positive.
        eval_ckpt_path: checkpoint to evaluate, rather than the latest.
        warm_start_path: checkpoint whose weights a new run starts from.
        iterations: steps from one line of progress (and of `log.csv`) to the next.
        save_steps: steps from one checkpoint to the next; the split `"valid"` is evaluated as often.
        max_to_keep: number of checkpoints to keep.
        steps_per_execution: steps in one call of the compiled graph; divides `train_steps` and `iterations`.
        strategy: see `make_strategy`.
        mixed_precision: type of the products, of `PRECISIONS`; the weights are float32 in any case.
        jit_compile: compile forward and backward pass with XLA.
        seed: of weights and dropout.

    Returns:
        dict `{split: mean nll in nats}` of the final evaluations.

    Raises:
        ValueError, OSError: bad input, before any long work; the message says what was found and what is allowed.
        KeyboardInterrupt: after Ctrl-C, once the run is saved.
    """
    steps = {"train_steps": train_steps, "iterations": iterations, "save_steps": save_steps}
    eval_batch_size = train_batch_size if eval_batch_size is None else eval_batch_size
    _check_positive(
        **steps, steps_per_execution=steps_per_execution, tgt_len=tgt_len, train_batch_size=train_batch_size,
        eval_batch_size=eval_batch_size,
    )  # fmt: skip
    for name in ("train_steps", "iterations"):
        if steps[name] % steps_per_execution:
            raise ValueError(f"steps_per_execution={steps_per_execution} must divide {name}={steps[name]}")
    if mixed_precision not in PRECISIONS:
        raise ValueError(f"mixed_precision must be one of {', '.join(PRECISIONS)}, got {mixed_precision!r}")
    check_arguments(**model)
    if data.get("cutoffs"):
        check_bins(sys.maxsize, model["d_embed"], data["cutoffs"], model["div_val"])
    _check_writable(model_dir)
    strategy = make_strategy(strategy)
    with strategy.scope():
        optimizer = make_optimizer(train_steps=train_steps, **optimizer)
    keras.utils.set_random_seed(seed)

    corpus = build_corpus(**{name: value for name, value in data.items() if name != "cutoffs"})
    cutoffs = corpus.cutoffs if data.get("cutoffs") is None else data["cutoffs"]
    model = {**model, "n_token": len(corpus.vocab), "cutoffs": list(cutoffs)}
    evaluation = Evaluation(corpus, eval_batch_size, tgt_len, max_eval_batch)
    splits = dict.fromkeys(["valid"] * do_train + [eval_split] * do_eval)
    for split in splits:
        evaluation.check(split)
    num_segments(len(corpus.splits["train"]), train_batch_size, tgt_len, name="train split")  # raises if too short

    with strategy.scope():
        lm = TransformerXLLM(**model, seed=seed, dtype=PRECISIONS[mixed_precision])
        lm.compile(optimizer, jit_compile=jit_compile, steps_per_execution=steps_per_execution)
        lm.optimizer.build(lm.trainable_variables)
    checkpoints = RunCheckpoints(lm, model_dir, max_to_keep)
    sizes = ", ".join(f"{len(tokens):,} {split}" for split, tokens in corpus.splits.items())
    print(f"{data['dataset']}: {len(corpus.vocab):,} symbols; tokens: {sizes}")
    replicas = strategy.num_replicas_in_sync
    print(f"model: {lm.count_params():,} parameters, {mixed_precision}, {replicas} replica{'s' * (replicas > 1)}")

    if do_train:
        _write_config(model_dir, {"data": data, "model": model, "vocab": corpus.vocab.get_config()}, checkpoints)
        corpus.vocab.save(os.path.join(model_dir, "vocab.txt"))
        mems = _restore(checkpoints, warm_start_path)
        _fit(lm, corpus.splits["train"], tgt_len, train_batch_size, steps, evaluation, checkpoints, mems, model_dir)
    else:
        path = eval_ckpt_path or checkpoints.latest
        if path is None:
            raise ValueError(f"model_dir {model_dir} holds no checkpoint to evaluate")
        checkpoints.restore_weights(path)
        print(f"evaluating {path}")
    results = {split: evaluation.run(lm, split) for split in splits}
    if do_train:
        print(f"the run is in {model_dir}: log.csv, checkpoints, curves (tensorboard --logdir={model_dir})")
    return results


def _fit(lm, tokens, tgt_len, batch_size, steps, evaluation, checkpoints, mems, model_dir):
    """Trains to the last step. A Keras epoch is a window of `iterations` steps; the text goes round and round."""
    start, iterations, train_steps, save_steps = (
        step_of(lm),
        *(steps[n] for n in ("iterations", "train_steps", "save_steps")),
    )
    if start >= train_steps:
        print(f"already trained: {start} steps, train_steps={train_steps}")
        return
    windows = math.ceil(train_steps / iterations)
    stop = StopOnInterrupt()
    lm.fit(
        segments(tokens, batch_size, tgt_len, start=start, repeat=True),
        initial_epoch=start // iterations,
        epochs=windows,
        steps_per_epoch=iterations,
        validation_data=evaluation.dataset("valid"),
        # With every checkpoint; the end of the training is evaluated by itself.
        validation_freq=[w for w in range(1, windows) if w * iterations % save_steps < iterations] or windows + 1,
        verbose=0,
        callbacks=[
            RunState(checkpoints, mems, train_steps, save_steps),
            Progress(train_steps, batch_size * tgt_len, evaluation.measure),
            StepTensorBoard(model_dir),
            StepCSVLogger(os.path.join(model_dir, "log.csv"), evaluation.measure, append=start > 0),
            stop,
        ],
    )
    if stop.interrupted:
        print(f"interrupted: step {step_of(lm)} is saved as {checkpoints.latest}; the same command goes on from there")
        raise KeyboardInterrupt


def _restore(checkpoints, warm_start_path):
    """Sets what a checkpoint of the run, or else the warm start, gives; returns the memory to go on with."""
    if checkpoints.latest:
        print(f"continuing from {checkpoints.latest}")
        return checkpoints.restore(checkpoints.latest)
    if warm_start_path:
        print(f"starting from the weights of {warm_start_path}")
        checkpoints.restore_weights(warm_start_path)
    return None


def _check_positive(**numbers):
    for name, value in numbers.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")


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


def _write_config(model_dir, config, checkpoints):
    """Writes `config.json`, unless the folder holds checkpoints of another configuration: then ValueError."""
    path = os.path.join(model_dir, "config.json")
    config = json.loads(json.dumps(config))
    if checkpoints.latest and tf.io.gfile.exists(path):
        with tf.io.gfile.GFile(path) as file:
            before = json.load(file)
        changes = [
            f"{part}.{name}: {before.get(part, {}).get(name)!r} there, {value!r} now"
            for part, values in config.items()
            for name, value in values.items()
            if before.get(part, {}).get(name) != value
        ]
        if changes:
            raise ValueError(
                f"model_dir {model_dir} holds a run of another configuration; choose another folder, or:\n  "
                + "\n  ".join(changes)
            )
        return
    temporary = f"{path}.{os.getpid()}.tmp"
    with tf.io.gfile.GFile(temporary, "w") as file:
        file.write(json.dumps(config, indent=2) + "\n")
    tf.io.gfile.rename(temporary, path, overwrite=True)
