"""The training curves of a run, from its log.csv."""

import csv
import math
import os

import numpy as np
import tensorflow as tf

from txl_config.errors import ParameterError
from txl_programs.pictures.drawing import METRICS, Figure, FuncFormatter, colors, tidy
from txl_tf.files import naming_read_errors
from txl_tf.runs.folder import RunFolder
from txl_tf.runs.metrics import to_metric


def read_log(model_dir):
    """Returns `log.csv` of a run as `{column: float array}`, with NaN for NA.

    If a run was killed and then repeated steps, the last row of each step counts. Logs that were written before
    2026-11-23 lack the validation after the last step. If this validation was the best one, its values come from the
    folder of the best weights.

    Raises:
        ParameterError: the run has no log.csv, or log.csv has no rows, lacks a column or is damaged.
    """
    path = os.path.join(model_dir, "log.csv")
    if not tf.io.gfile.exists(path):
        message = f"model_dir {model_dir} has no curves: {path} does not exist (converted runs have none)"
        raise ParameterError("model_dir", model_dir, "a run with a log.csv", message)
    try:
        with naming_read_errors(path), tf.io.gfile.GFile(path) as file:
            rows = {int(row["step"]): row for row in csv.DictReader(file)}
        ordered = [rows[step] for step in sorted(rows)]
        names = ordered[0] if ordered else ()
        log = {
            name: np.array([math.nan if row[name] == "NA" else float(row[name]) for row in ordered]) for name in names
        }
    except (KeyError, TypeError, ValueError, csv.Error, tf.errors.OpError) as error:
        message = f"{path} is not the log of a training run: {type(error).__name__}: {error}"
        raise ParameterError("model_dir", model_dir, "a run with a whole log.csv", message) from error
    if not rows:
        message = f"{path} has no rows: the run has not reached its first line of progress"
        raise ParameterError("model_dir", model_dir, "a run with rows in its log.csv", message)
    metric = next((name for name in METRICS if name in log), "loss")
    missing = [name for name in (metric, f"val_{metric}", "val_loss", "learning_rate", "grad_norm") if name not in log]
    if missing:
        message = f"{path} is not the log of a training run: it has no column {missing[0]}"
        raise ParameterError("model_dir", model_dir, "a run with a whole log.csv", message)
    best = RunFolder(model_dir).find_best()
    if best and best["step"] == log["step"][-1] and math.isnan(log["val_loss"][-1]):
        for name in ("val_loss", "val_f1", "val_bpc", "val_ppl"):
            if name in best:
                log[name][-1] = best[name]
            elif name in log and "val_loss" in best:
                log[name][-1] = to_metric(best["val_loss"], name.removeprefix("val_"))
    return log


def draw_curves(logs):
    """Returns a figure of the loss, the learning rate and the gradient norm of runs by training step.

    Args:
        logs: `{name of a run: its log}`, see `read_log`.

    Raises:
        ParameterError: the runs have different units of loss (see `METRICS`).
    """
    metrics = {next(name for name in METRICS if name in log) for log in logs.values()}
    if len(metrics) > 1:
        message = f"model_dir has runs in {' and in '.join(sorted(metrics))}, which do not fit into one picture"
        raise ParameterError("model_dir", list(logs), "runs with one metric", message)
    (metric,) = metrics
    figure = Figure(figsize=(8, 7.5), layout="constrained")
    loss, rate, norm = figure.subplots(3, 1, sharex=True, height_ratios=[3, 1, 1])
    for (name, log), color in zip(logs.items(), colors(len(logs)), strict=True):
        valid = ~np.isnan(log[f"val_{metric}"])
        loss.plot(log["step"], log[metric], color=color, alpha=0.6, lw=1.2, label=f"{name}: training")
        if valid.any():
            best = f"{np.nanmin(log[f'val_{metric}']):.4g}"
            if "val_f1" in log:
                score = "accuracy" if "val_accuracy" in log else "F1"
                best = f"{score} {np.nanmax(log['val_f1']):.2%}"
            label = f"{name}: validation (best {best})"
            loss.plot(log["step"][valid], log[f"val_{metric}"][valid], "o-", color=color, ms=4, lw=2, label=label)
        rate.plot(log["step"], log["learning_rate"], color=color)
        norm.plot(log["step"], log["grad_norm"], color=color)
    if metric == "ppl":
        loss.set_yscale("log")
        loss.yaxis.set_major_formatter(FuncFormatter("{:g}".format))
        loss.yaxis.set_minor_formatter(FuncFormatter("{:g}".format))
    loss.set_ylabel(METRICS[metric])
    loss.legend(frameon=False)
    rate.set_ylabel("learning rate")
    norm.set_ylabel("gradient norm")
    norm.set_ylim(bottom=0)
    norm.set_xlabel("training step")
    for axes in (loss, rate, norm):
        tidy(axes)
    return figure
