"""How the cost of a token grows with each argument, and with the length of a text."""

import statistics

import numpy as np
from benchmarking import language_models, processes
from benchmarking.contestants import tokens_of_work
from benchmarking.shapes import CUTOFFS, REFERENCE, SCALING
from benchmarking.tables import describe, take_turns
from benchmarking.work import mean_seconds


def measure(works, rounds, seconds):
    """Measures several works in this process, in turns. Returns their seconds, an array `[rounds, works]`.

    First, each work is done twice, which traces graphs and allocates memory.

    Args:
        works: the works, see work.py.
        rounds: number of turns of each.
        seconds: shortest length of a turn.
    """
    for work in works:
        work.once()
        work.once()
    return np.array([[mean_seconds(work, seconds) for work in works] for _ in range(rounds)])


def scale(mode, shape, makers, rounds, seconds):
    """Measures the cost of a token at several values of each argument in `SCALING[mode]`.

    Prints it in microseconds, and returns a row for each value. `replicas` is only measured for txl_tf, in 1 turn if
    `rounds` is less than 3, otherwise in 2.

    Args:
        mode: the mode.
        shape: `{argument: value}` of all arguments; one of them at a time gets other values.
        makers: the contestants, `{name: function that takes a shape and returns the work}`.
        rounds, seconds: see `measure`.
    """
    rows = []
    for argument, values in SCALING[mode].items():
        print_scale(mode, shape, argument, values)
        for name, make in makers.items():
            if argument == "replicas":
                if name != REFERENCE:
                    rows += costs_of(mode, name, argument, values, replica_costs(name, shape, values, rounds, seconds))
                continue
            shapes = [{**shape, argument: value} for value in values]
            if argument == "n_token":
                shapes = [{**scaled, "cutoffs": CUTOFFS.get(scaled["n_token"], [])} for scaled in shapes]
            # One number for each shape:
            median_seconds = np.median(measure([make(scaled) for scaled in shapes], rounds, seconds), 0)
            costs = median_seconds / [tokens_of_work(mode, name, scaled) for scaled in shapes]
            rows += costs_of(mode, name, argument, values, costs)
    return rows


def replica_costs(name, shape, values, rounds, seconds):
    """Seconds per token of `fit` with replicas on the cores of this machine, each measured in its own process."""
    arguments = {"name": name, "shape": shape, "seconds": seconds}
    turns = {n: lambda n=n: processes.alone("train_replicas", replicas=n, **arguments) for n in values}
    measured = take_turns(turns, 1 if rounds < 3 else 2)
    return [1 / statistics.median(measured[n]["tokens_per_second"]) for n in values]


def scale_length(mode, shape, makers, segments):
    """Like `scale`, for the cost of a token after 1, 2, 4, ... segments of one text. Leaves out the reference.

    `segments` is the number of segments that are measured. The cost after n segments is the median over the segments
    from n / 2 to 3 n / 2.
    """
    counts = [2**i for i in range(segments.bit_length())]
    values = [count * shape["tgt_len"] for count in counts]
    print_scale(mode, shape, "tokens_before", values)
    rows = []
    for name in list(makers)[1:]:
        dtype = "mixed_bfloat16" if "bfloat16" in name else "float32"
        continuing = mode == "generation"
        work = language_models.continuing_work(shape, dtype, parts=1) if continuing else makers[name](shape)
        work.once()
        seconds = np.diff(work.ends(lambda ends: len(ends) > segments))
        costs = [np.median(seconds[n // 2 : 3 * n // 2]) for n in counts]
        tokens = tokens_of_work(mode, name, shape)
        rows += costs_of(mode, name, "tokens_before", values, [cost / tokens for cost in costs])
    return rows


def print_scale(mode, shape, argument, values):
    """Prints the heading of a table of costs, with the arguments that do not change."""
    others = {name: value for name, value in shape.items() if name != argument}
    print(f"\n{mode}: {describe(others)}")
    print(f"  {f'us per token, by {argument}':32}" + "".join(f"{value:>10,}" for value in values))


def costs_of(mode, name, argument, values, costs):
    """Prints a contestant's line of the table, and returns a row for each value. Costs are seconds per token."""
    print(f"  {name:32}" + "".join(f"{cost * 1e6:>10,.0f}" for cost in costs), flush=True)
    common = {"mode": mode, "contestant": name, "argument": argument}
    pairs = zip(values, costs, strict=True)
    return [{**common, "value": value, "microseconds_per_token": float(cost * 1e6)} for value, cost in pairs]
