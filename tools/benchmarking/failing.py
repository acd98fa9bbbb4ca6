"""Simulates the time of a training run whose workers fail: pure functions of `tools/simulate_training.py`."""

import math

from txl_config.errors import ParameterError

MOST_FAILURES = 100_000  # of a simulated training run; with more, it would hardly end


def step_seconds(workers, tokens, tokens_per_second, parameters, gigabits, message_seconds, shared=False):
    """The seconds of a training step: `(to compute the tokens, to sum the gradients)`.

    Args:
        workers: number of workers.
        tokens: tokens of a step, of all workers together.
        tokens_per_second: speed of a single worker.
        parameters: number of weights, whose gradients have 4 bytes each.
        gigabits: network bandwidth of a worker, in Gbit/s.
        message_seconds: latency of a message.
        shared: whether all workers share one processor, so that together they are as fast as one.
    """
    compute = tokens / (tokens_per_second * (1 if shared else workers))
    sent = 2 * (workers - 1) / workers * 4 * parameters
    return compute, sent * 8 / (gigabits * 1e9) + 2 * (workers - 1) * message_seconds


def best_save_steps(step, save_seconds, mtbf):
    """Young's interval between checkpoints, in steps; at least 1.

    Args:
        step, save_seconds: seconds of a step, and to save a checkpoint.
        mtbf: mean seconds between failures of any worker.
    """
    return max(1, round(math.sqrt(2 * save_seconds * mtbf) / step))


def train(steps, step, save_steps, save_seconds, restart_seconds, mtbf, rng):
    """Simulates a training run. No worker fails during a restart.

    Args:
        steps: number of steps.
        step: seconds of a step.
        save_steps: steps between two checkpoints.
        save_seconds, restart_seconds: seconds to save a checkpoint, and from a failure to the next step.
        mtbf: mean seconds between failures of any worker.
        rng: random generator, whose method `exponential(mtbf)` draws the seconds until the next failure.

    Returns:
        Dict with the seconds of steps whose checkpoint was saved (`useful`), of work that a failure destroyed
        (`repeated`), of checkpoints (`saving`) and restarts (`starting`), and the number of `failures`.

    Raises:
        ParameterError: there are more than `MOST_FAILURES` failures.
    """
    spent = dict.fromkeys(["useful", "repeated", "saving", "starting", "failures"], 0)
    done = 0
    until_failure = rng.exponential(mtbf)
    while done < steps:
        interval = min(save_steps, steps - done)
        whole = interval * step + save_seconds  # seconds until the next checkpoint is saved
        if until_failure >= whole:
            until_failure -= whole
            done += interval
            spent["useful"] += interval * step
            spent["saving"] += save_seconds
        else:
            spent["repeated"] += until_failure
            spent["starting"] += restart_seconds
            spent["failures"] += 1
            until_failure = rng.exponential(mtbf)
            if spent["failures"] > MOST_FAILURES:
                message = f"a failure every {mtbf:.3g} s interrupts nearly all {whole:.3g} s between checkpoints"
                raise ParameterError("mtbf_hours", mtbf / 3600, "much longer than a checkpoint takes", message)
    return spent
