"""Turns of contestants, rows of figures, and the tables that show them."""

import statistics

import numpy as np

COLUMNS = {  # figure: heading and format of its column. `None` is the format of the first column
    "tokens_per_second": ("tokens/s", "{:,.0f}"), "words_per_second": ("words/s", "{:,.0f}"),
    "lines_per_second": ("lines/s", "{:,.0f}"), "requests_per_second": ("requests/s", "{:,.1f}"),
    "seconds": ("command", "{:.2f} s"), "quartiles": ("quartiles", None),
    "ratio": ("ratio", "{:.3f}"), "ratio_quartiles": ("quartiles", "{:.2f}"),
    "milliseconds_per_step": ("step", "{:,.1f} ms"), "first_request_seconds": ("first", "{:.1f} s"),
    "export_seconds": ("export", "{:.1f} s"), "megabytes": ("on disk", "{:.0f} MB"),
    "load_seconds": ("load", "{:.1f} s"), "build_seconds": ("build", "{:.1f} s"),
    "weights": ("weights", "{:,.0f}"),
    "first_step_seconds": ("first step", "{:.1f} s"), "command_seconds": ("ended after", "{:.2f} s"),
    "processor_seconds": ("processor", "{:.2f} s"),
    "speedup": ("speed", "{:.2f}"), "collectives": ("collectives", "{:.0f}"),
    "reduced_bytes": ("bytes all-reduced", "{:,.0f}"), "loopback_mb": ("loopback", "{:,.1f} MB"),
    "share_of_peak": ("of peak", "{:.0%}"), "peak_memory_mb": ("peak MB", "{:,.0f}"),
    "worker_peak_mb": ("worker's peak MB", "{:,.0f}"), "failures": ("failures", "{:.0f}"), "step": ("step", "{:.3f} s"),
    "saving": ("saving", "{:.3f} s"), "starting": ("starting", "{:.1f} s"), "real": ("all", "{:.1f} s"),
    "simulated": ("simulated", "{:.1f} s"),
}  # fmt: skip


def take_turns(turns, rounds):
    """Calls functions in turns. Every second round is in reverse order, in case the machine becomes slower.

    Args:
        turns: `{name: function that returns {figure: value}}`.
        rounds: number of calls of each function.

    Returns:
        `{name: {figure: list of its values}}`.
    """
    figures = {name: [] for name in turns}
    for i in range(rounds):
        for name in list(turns)[:: -1 if i % 2 else 1]:
            figures[name].append(turns[name]())
    return {name: {key: [turn[key] for turn in found] for key in found[0]} for name, found in figures.items()}


def rows_of(mode, figure, measured):
    """Makes a row of results for each contestant.

    A row has the median of every figure, and the maximum of the peak memory. For `figure` it also has the quartiles,
    and median and quartiles of the ratio of this contestant to the first one, round by round. Larger ratios are better:
    for seconds, the ratio is inverted.

    Args:
        mode: the mode, which is in the rows.
        figure: name of the figure that is compared.
        measured: the result of `take_turns`.
    """
    first = np.array(next(iter(measured.values()))[figure])
    rows = []
    for name, figures in measured.items():
        values = np.array(figures[figure])
        ratios = first / values if figure == "seconds" else values / first
        row = {"mode": mode, "contestant": name}
        row |= {key: (max if "peak" in key else statistics.median)(turns) for key, turns in figures.items()}
        row |= {"quartiles": np.percentile(values, [25, 75]).tolist(), "ratio": np.median(ratios).item()}
        rows.append(row | {"ratio_quartiles": np.percentile(ratios, [25, 75]).tolist()})
    return rows


def summary_of(rows):
    """For every mode and contestant with a ratio, a dict of `mode`, `contestant`, `ratios` and their `median`.

    There is one ratio for each run: the median over the rounds of the run.
    """
    found = {}
    for row in rows:
        if "ratio" in row:
            found.setdefault((row["mode"], row["contestant"]), []).append(row["ratio"])
    return [
        {"mode": mode, "contestant": name, "ratios": ratios, "median": statistics.median(ratios)}
        for (mode, name), ratios in found.items()
    ]


def print_table(heading, rows):
    """Prints rows as a table. It has the columns of COLUMNS whose figures occur in the rows."""
    keys = [key for key in COLUMNS if any(key in row for row in rows)]

    def cell(row, key):
        values = row.get(key, [])
        form = COLUMNS[key][1] or COLUMNS[keys[0]][1]
        return " - ".join(form.format(value) for value in (values if isinstance(values, list) else [values]))

    lines = [["contestant", *(COLUMNS[key][0] for key in keys)]]
    print_lines(heading, [*lines, *([row["contestant"], *(cell(row, key) for key in keys)] for row in rows)])


def print_summary(heading, summary):
    """Prints the result of `summary_of`, without the contestants whose ratios are all 1: the first of each group."""
    runs = range(1, 1 + max(len(row["ratios"]) for row in summary))
    lines = [["mode", "contestant", *(f"run {n}" for n in runs), "median"]]
    for row in summary:
        if set(row["ratios"]) != {1.0}:
            ratios = [f"{ratio:.3f}" for ratio in [*row["ratios"], row["median"]]]
            lines.append([row["mode"], row["contestant"], *ratios])
    print_lines(heading, lines, left=2)


def print_lines(heading, lines, left=1):
    """Prints lines of cells in columns. The first `left` columns are aligned on the left."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    print(f"\n{heading}")
    for line in lines:
        cells = [f"{text:{'<' if i < left else '>'}{widths[i]}}" for i, text in enumerate(line)]
        print("  " + "  ".join(cells), flush=True)


def describe(shape):
    """A shape as text, without arguments that switch something off: those that are False, 0, -1 or an empty list."""
    return ", ".join(f"{name} {value}" for name, value in shape.items() if value not in (False, -1, []))
