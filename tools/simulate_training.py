"""Simulates training on many workers that fail: its speed, the lost work, and the best interval of checkpoints.

    python tools/simulate_training.py --tokens=1e12 --parameters=1e9 --workers=64,256,1024 --mtbf_hours=5000
    python tools/simulate_training.py --tokens=1e6 --parameters=13e6 --workers=1,2,4 --tokens_per_second=4000 --shared

A step takes the time for a worker's share of the tokens, and the time for the ring all-reduce of the gradients: each
worker sends 2 (N - 1) / N times their bytes, in 2 (N - 1) messages. If one worker fails, all workers return to the
newest checkpoint: they notice the failure, restart and repeat the steps since then. Failures are random, with the given
mean time between failures of one worker. Every line is the mean of --runs simulated training runs:

    workers       number of workers
    step          seconds of a step: for the tokens, and for the all-reduce of the gradients
    save every    steps between two checkpoints. Default: the best number, see below
    useful        share of the time for steps that no failure has undone
    repeated      share of the time for steps that were repeated after a failure
    saving        share of the time to save checkpoints
    starting      share of the time to notice failures and restart
    days          until all tokens are read
    tokens/s      speed of all workers together, with all losses of time
    failures      number of failures

The best interval is Young's (1974), sqrt(2 * save_seconds * mean time between failures of all workers): with a longer
one, more steps are repeated, and with a shorter one, more checkpoints are saved. docs/scale.md compares lines with real
runs. The defaults of the flags are guesses.
"""

import math

import numpy as np
from absl import flags
from benchmarking.failing import best_save_steps, step_seconds, train

from txl_programs.flag_values import FLAGS
from txl_programs.program import run

flags.DEFINE_float("tokens", 1e12, "Tokens to train on.")
flags.DEFINE_float("parameters", 1e9, "Weights of the model. The gradient of each has 4 bytes.")
flags.DEFINE_list("workers", ["8", "64", "512"], "Numbers of workers to compare.")
flags.DEFINE_float("batch_tokens", 4e6, "Tokens of a step, of all workers together.")
flags.DEFINE_float("tokens_per_second", 4e4, "Speed of a single worker.")
flags.DEFINE_bool("shared", False, "All workers share the processor of one machine: together they are as fast as one.")
flags.DEFINE_float("gigabits", 100, "Network bandwidth of a worker, in Gbit/s.")
flags.DEFINE_float("message_seconds", 50e-6, "Latency of a message between two workers, in seconds.")
flags.DEFINE_float("mtbf_hours", 5000, "Mean time between failures of one worker, in hours.")
flags.DEFINE_float("restart_seconds", 120, "Time from a failure to the next step, in seconds.")
flags.DEFINE_float("save_seconds", 20, "Time to save a checkpoint, in seconds.")
flags.DEFINE_integer("save_steps", None, "Steps between two checkpoints. Default: Young's.", lower_bound=1)
flags.DEFINE_integer("runs", 20, "Simulated runs for every number of workers.", lower_bound=1)
flags.DEFINE_integer("seed", 0, "Random seed of the failures.")


def _are_numbers(workers):
    """Whether `--workers` is a list of one positive integer or more."""
    return bool(workers) and all(number.isdecimal() and int(number) > 0 for number in workers)


flags.register_validator("workers", _are_numbers, "must be one positive integer or more, as 8,64")
for _name in ("tokens", "parameters", "batch_tokens", "tokens_per_second", "gigabits", "mtbf_hours"):
    flags.register_validator(_name, lambda value: 0 < value < math.inf, "must be positive")
for _name in ("message_seconds", "restart_seconds", "save_seconds"):
    flags.register_validator(_name, lambda value: 0 <= value < math.inf, "must be 0 or more")


def simulate(workers):
    """Simulates `--runs` training runs with a number of workers.

    Returns:
        The values of a line of the table: seconds of a step for the tokens and for the all-reduce, steps between
        checkpoints, the shares of useful steps, repeated steps, checkpoints and restarts, days, tokens per second, and
        number of failures.
    """
    rng = np.random.default_rng(FLAGS.seed)
    compute, ring = step_seconds(
        workers, FLAGS.batch_tokens, FLAGS.tokens_per_second, FLAGS.parameters, FLAGS.gigabits, FLAGS.message_seconds,
        FLAGS.shared,
    )  # fmt: skip
    mtbf = FLAGS.mtbf_hours * 3600 / workers
    step = compute + ring
    save_steps = FLAGS.save_steps or best_save_steps(step, FLAGS.save_seconds, mtbf)
    steps = math.ceil(FLAGS.tokens / FLAGS.batch_tokens)
    options = (steps, step, save_steps, FLAGS.save_seconds, FLAGS.restart_seconds, mtbf)
    runs = [train(*options, rng) for _ in range(FLAGS.runs)]
    mean = {name: np.mean([spent[name] for spent in runs]) for name in runs[0]}
    seconds = sum(mean.values()) - mean["failures"]  # all other values are seconds
    shares = [mean[name] / seconds for name in ("useful", "repeated", "saving", "starting")]
    return compute, ring, save_steps, *shares, seconds / 86400, FLAGS.tokens / seconds, mean["failures"]


def main():
    heading = [
        "workers", "step: computation + all-reduce", "save every", "useful", "repeated", "saving", "starting", "days",
        "tokens/s", "failures",
    ]  # fmt: skip
    print("|", " | ".join(heading), "|")
    print("|" + "---|" * len(heading))
    for workers in map(int, FLAGS.workers):
        compute, ring, save_steps, *shares, days, tokens_per_second, failures = simulate(workers)
        columns = [f"{workers:,}", f"{compute:.3g} + {ring:.3g} s", f"{save_steps:,}", *(f"{x:.1%}" for x in shares)]
        print("|", " | ".join([*columns, f"{days:,.3g}", f"{tokens_per_second:,.0f}", f"{failures:,.1f}"]), "|")


if __name__ == "__main__":
    run(main)
