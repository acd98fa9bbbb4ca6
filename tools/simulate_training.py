"""How fast a training on many workers that fail is, how much work it loses, and when to save: a simulation.

    python tools/simulate_training.py --tokens=1e12 --parameters=1e9 --workers=64,256,1024 --mtbf_hours=5000
    python tools/simulate_training.py --tokens=1e6 --parameters=13e6 --workers=1,2,4 --tokens_per_second=4000 --shared

A step takes the time of its tokens, their share on every worker, and of the sum of the gradients in a ring: each worker
sends 2 (N - 1) / N times their bytes, in 2 (N - 1) messages. Any worker that fails takes back all of them to the newest
checkpoint: they notice, start again and repeat the steps since. Failures come at random, by the hours that one worker
lasts in the mean. Every line is the mean of --runs trainings:

    step          seconds of a step: tokens, and sum of the gradients
    save every    steps between two checkpoints; by default the best, sqrt(2 * save_seconds * hours of all), see below
    useful        share of the time that made steps which stayed; repeated is what failures took back, starting and
                  saving are the other losses
    days          until all tokens are trained on
    failures      how many there were

The best interval is Young's (1974): long ones repeat more, short ones save more often. docs/scale.md compares lines
with real runs; the defaults of the flags are guesses.
"""

import math

import numpy as np
from absl import flags
from benchmarking.failing import best_save_steps, step_seconds, train

from txl_programs.flag_values import FLAGS
from txl_programs.program import run

flags.DEFINE_float("tokens", 1e12, "Tokens to train on.")
flags.DEFINE_float("parameters", 1e9, "Weights of the model; each is 4 bytes of a gradient.")
flags.DEFINE_list("workers", ["8", "64", "512"], "Numbers of workers to compare.")
flags.DEFINE_float("batch_tokens", 4e6, "Tokens of a step, over all workers.")
flags.DEFINE_float("tokens_per_second", 4e4, "Of one worker by itself.")
flags.DEFINE_bool("shared", False, "All workers share the processor of one machine: they are as fast as one of them.")
flags.DEFINE_float("gigabits", 100, "Network of a worker, in Gbit/s.")
flags.DEFINE_float("message_seconds", 50e-6, "From one worker to the next, for a message of no size.")
flags.DEFINE_float("mtbf_hours", 5000, "Mean time between failures of one worker.")
flags.DEFINE_float("restart_seconds", 120, "From a failure to the first step after it.")
flags.DEFINE_float("save_seconds", 20, "That a checkpoint takes.")
flags.DEFINE_integer("save_steps", None, "Steps between two checkpoints. Default: Young's.", lower_bound=1)
flags.DEFINE_integer("runs", 20, "Simulated trainings of every number of workers.", lower_bound=1)
flags.DEFINE_integer("seed", 0, "Of the failures.")


def _are_numbers(workers):
    return bool(workers) and all(number.isdecimal() and int(number) > 0 for number in workers)


flags.register_validator("workers", _are_numbers, "must be one positive integer or more, as 8,64")
for _name in ("tokens", "parameters", "batch_tokens", "tokens_per_second", "gigabits", "mtbf_hours"):
    flags.register_validator(_name, lambda value: 0 < value < math.inf, "must be positive")
for _name in ("message_seconds", "restart_seconds", "save_seconds"):
    flags.register_validator(_name, lambda value: 0 <= value < math.inf, "must be 0 or more")


def simulate(workers):
    """The line of the table for a number of workers."""
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
    seconds = sum(mean.values()) - mean["failures"]
    shares = [mean[name] / seconds for name in ("useful", "repeated", "saving", "starting")]
    return compute, ring, save_steps, *shares, seconds / 86400, FLAGS.tokens / seconds, mean["failures"]


def main():
    heading = "workers, step: tokens + sum, save every, useful, repeated, saving, starting, days, tokens/s, failures"
    print("|", heading.replace(", ", " | "), "|")
    print("|" + "---|" * (heading.count(", ") + 1))
    for workers in map(int, FLAGS.workers):
        compute, ring, save_steps, *shares, days, speed, failures = simulate(workers)
        columns = [f"{workers:,}", f"{compute:.3g} + {ring:.3g} s", f"{save_steps:,}", *(f"{x:.1%}" for x in shares)]
        print("|", " | ".join([*columns, f"{days:,.3g}", f"{speed:,.0f}", f"{failures:,.1f}"]), "|")


if __name__ == "__main__":
    run(main)
