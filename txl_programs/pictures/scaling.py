"""Pictures of the time of a token against each argument of a model, as `tools/benchmark.py --scaling` measures it."""

import json

from txl_config.errors import ParameterError
from txl_programs.pictures.drawing import Figure, NullLocator, colors, tidy
from txl_tf.files import naming_read_errors

LOGARITHMIC = ("n_token", "tokens_before")  # arguments of the benchmark that grow by large factors


def read_figures(path):
    """Returns the rows of the JSON file of `tools/benchmark.py --scaling`, a list of dictionaries.

    Raises:
        ParameterError: the file is not JSON, or has no such rows.
        OSError: the file cannot be read.
    """
    try:
        with naming_read_errors(path), open(path) as file:
            rows = [row for row in json.load(file)["rows"] if "argument" in row]
    except (ValueError, KeyError, TypeError):  # not JSON, or JSON of another program
        rows = []
    if not rows:
        message = f"{path} has no costs by argument: make it by tools/benchmark.py --scaling --json={path}"
        raise ParameterError("figures", path, "a file of tools/benchmark.py --scaling", message)
    return rows


def draw_scaling(rows):
    """Returns a figure of the time of a token, with a panel for each mode and argument. The axis of time begins at 0.

    Args:
        rows: dictionaries with "mode", "argument", "contestant", "value" and "microseconds_per_token", see
            `read_figures`.
    """
    panels = list(dict.fromkeys((row["mode"], row["argument"]) for row in rows))
    names = list(dict.fromkeys(row["contestant"] for row in rows))
    columns = min(3, len(panels))
    height = -(-len(panels) // columns)
    figure = Figure(figsize=(4 * columns, 2.9 * height + 0.4), layout="constrained")
    grid = figure.subplots(height, columns, squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes, (mode, argument) in zip(grid.flat, panels, strict=False):
        for name, color in zip(names, colors(len(names)), strict=True):
            points = [
                row for row in rows if (row["mode"], row["argument"], row["contestant"]) == (mode, argument, name)
            ]
            values = [row["value"] for row in points]
            axes.plot(values, [row["microseconds_per_token"] for row in points], "o-", color=color, ms=4, label=name)
        tidy(axes)
        ticks = sorted({row["value"] for row in rows if (row["mode"], row["argument"]) == (mode, argument)})
        if argument in LOGARITHMIC:
            axes.set_xscale("log")
            axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks], fontsize=8)
        axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
        axes.set_xlabel(argument)
        axes.set_title(f"{mode}: µs a token", fontsize=10)
    grid[0, 0].legend(frameon=False, fontsize=8)
    return figure
