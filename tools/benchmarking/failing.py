"""Simulates the time of a training run whose workers fail: pure functions of `tools/simulate_training.py`."""

import math

from txl_config.errors import ParameterError

MOST_FAILURES = 100_000  # of a simulated training run; with more, it would hardly end


def step_seconds(workers, tokens, tokens_per_second, parameters, gigabits, message_seconds, shared=False):
    """`(seconds to compute the tokens, seconds to sum the gradients)` of one step."""
    compute = tokens / (tokens_per_second * (1 if shared else workers))
    sent = 2 * (workers - 1) / workers * 4 * parameters
    return compute, sent * 8 / (gigabits * 1e9) + 2 * (workers - 1) * message_seconds


def best_save_steps(step, save_seconds, mtbf):
    """Young's interval between checkpoints, in steps, if some worker fails every `mtbf` seconds."""
    return max(1, round(math.sqrt(2 * save_seconds * mtbf) / step))


def train(steps, step, save_steps, save_seconds, restart_seconds, mtbf, rng):
    """Simulates a training run: seconds of `useful`, `repeated`, `saving`, `starting`, and the number of `failures`."""
    spent = dict.fromkeys(["useful", "repeated", "saving", "starting", "failures"], 0)
    done = 0
    until_failure = rng.exponential(mtbf)
    while done < steps:
        interval = min(save_steps, steps - done)
        whole = interval * step + save_seconds
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
