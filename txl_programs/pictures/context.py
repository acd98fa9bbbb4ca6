"""Pictures of how much context a language model uses.

nll_by_context, draw_context        nll by the number of tokens that the model sees, the gain from more tokens, and the
                                    paper's relative effective context length (RECL)
nll_by_position, draw_memory        nll by position in the segment, with and without memory
draw_memory_along                   nll along one text, with no memory, half of it and all of it
"""

import math

import numpy as np
import tensorflow as tf

from txl_config.errors import ParameterError
from txl_programs.pictures.drawing import COLORS, METRICS, Figure, FuncFormatter, colors, tidy
from txl_tf.runs.metrics import to_metric

HARD = (1.0, 0.5, 0.1)  # shares of the hardest tokens that are drawn: r in the paper
THRESHOLD = 0.01  # smaller relative gains do not count for the RECL, as in the paper


def nll_of_windows(lm, windows, segment, empty_memory=False):
    """Returns the nll of the tokens of windows of a text. A window is read in segments, with memory between them.

    Args:
        lm: language model.
        windows: int `[n, length + 1]`.
        segment: tokens of a segment.
        empty_memory: whether the memory of the first segment is empty. Otherwise it is zeros of full length.

    Returns:
        float32 `[n, length]`, nats of the tokens from the second of each window on.
    """
    rows = []
    for batch in np.split(windows, range(64, len(windows), 64)):  # up to 64 windows at a time
        mems = None
        columns = []
        if empty_memory:
            mems = [tf.zeros([len(batch), 0, lm.network.d_model], lm.compute_dtype)] * lm.network.n_layer
        for start in range(0, windows.shape[1] - 1, segment):
            piece = batch[:, start : start + segment + 1]
            nll, mems = lm.score(piece[:, :-1], piece[:, 1:], mems)  # [batch, segment]
            columns.append(nll.numpy())
        rows.append(np.concatenate(columns, 1))
    return np.concatenate(rows)


def nll_by_context(lm, ids, step, n_context):
    """Returns the nll of the same tokens with contexts of several lengths.

    A window that predicts `step * n_context` tokens starts at every `step`-th token. So a token is predicted in
    `n_context` windows. In the window that starts last, it is predicted from c tokens, where c is 1 to `step`; in the
    others from c + step, c + 2 * step, ... The memory is empty at the beginning of a window, so the model sees nothing
    else. A segment has `step` tokens, so that a longer context never means fewer keys in segment and memory.

    Args:
        lm: `TransformerXLLM`.
        ids: int `[n]`, the text.
        step: tokens by which each context is longer than the one before.
        n_context: number of context lengths.

    Returns:
        float64 `[n_context, tokens]`, nats, from the shortest context to the longest. It has only the tokens of the
        text that have all contexts.

    Raises:
        ParameterError: the text is too short.
    """
    length = step * n_context
    least = 2 * length - step + 1
    starts = np.arange(0, len(ids) - length, step)
    if len(starts) < n_context:
        message = f"the text must have at least {least} tokens for contexts of up to {length}, got {len(ids)}"
        raise ParameterError("text", len(ids), f"at least {least} tokens", message)
    windows = ids[starts[:, None] + np.arange(length + 1)]
    nll = nll_of_windows(lm, windows, step, empty_memory=True)
    nll = nll.astype(np.float64).reshape(len(starts), n_context, step)
    # Block b of the text, of `step` tokens, is block j of the window that starts j blocks earlier: it has context j.
    blocks = range(n_context - 1, len(starts))
    return np.stack([nll[[b - j for b in blocks], j].ravel() for j in range(n_context)])


def savings(nll):
    """Returns the gain of each context length over the next shorter one, as a fraction of the perplexity.

    A gain may be negative.

    Args:
        nll: `[n_context, tokens]`, nats.

    Returns:
        float64 `[n_context - 1]`.
    """
    return 1 - np.exp(np.diff(nll.mean(1)))


def relative_gains(nll, model, hard=1.0):
    """Returns the paper's gain of each context length over the next shorter one (appendix C). It is never negative.

    A token counts with the better of its two contexts. So noise counts as gain, too, and `savings` are smaller.

    With `l_i(c, t)` the nll of token t under model i given c tokens, and c' the next longer context:

        b(c, t)   = min over i of l_i(c, t)                        the group's best at the short context
        f_i(c,c') = mean over T of min(b(c, t), l_i(c', t))        T: the share `hard` of tokens with largest b(c, t)
        g_i(c,c') = (exp f_i(c,c) - exp f_i(c,c')) / exp f_i(c,c)  relative reduction of perplexity

    Args:
        nll: `[models, n_context, tokens]`, nats, of the same tokens for all models.
        model: index of the model, i.
        hard: fraction of the tokens that count, the hardest ones: the paper's r, above 0 and at most 1.

    Returns:
        float64 `[n_context - 1]`: g from context length 0 to 1, from 1 to 2, ...
    """
    gains = []
    for short in range(nll.shape[1] - 1):
        baseline = nll[:, short].min(0)
        hardest = np.argsort(-baseline, kind="stable")[: math.ceil(hard * len(baseline))]
        before = np.minimum(baseline, nll[model, short])[hardest].mean()
        after = np.minimum(baseline, nll[model, short + 1])[hardest].mean()
        gains.append(1 - math.exp(after - before))
    return np.array(gains)


def recl(gains, step):
    """Returns the RECL: the number of tokens of context from which `step` more tokens gain less than `THRESHOLD`.

    The value depends on the group of models, the text, `step` and r. It can be compared only with values for the same
    group, text, `step` and r. The paper's values are for the group of all models that it compares. A single model is a
    group of one: it is compared with its own shorter contexts.

    Args:
        gains: `relative_gains` of the model.
        step: tokens from one context to the next.

    Returns:
        The number of tokens. If all gains reach the threshold, it is the longest context: the RECL is at least that.
    """
    below = np.flatnonzero(gains < THRESHOLD)
    return step * (1 + (below[0] if below.size else len(gains)))


def draw_context(nll, names, step, spans, metric):
    """Returns a figure of the nll against the context, and next to it `savings` and `relative_gains` with the RECL.

    Args:
        nll: `[models, n_context, tokens]`, nats, see `nll_by_context`.
        names: names of the models.
        step: tokens from one context to the next.
        spans: number of keys that each model attends to.
        metric: "bpc" or "ppl".
    """
    contexts = step * (1 + np.arange(nll.shape[1]))
    figure = Figure(figsize=(11, 5.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for i, color in enumerate(colors(len(names))):
        values = [to_metric(mean, metric) for mean in nll[i].mean(1)]
        label = f"{names[i]}: {values[-1]:.4g} at {contexts[-1]}"
        left.plot(contexts, values, "o-", color=color, ms=4, label=label)
        left.axvline(spans[i], color=color, ls="--", lw=1, label=f"{names[i]}: {spans[i]} keys of attention")
        saved = 100 * savings(nll[i])
        right.plot(contexts[:-1], saved, "o-", color=color, ms=4, label=f"{names[i]}: saved, all tokens")
        for hard, style in zip(HARD, ("-.", "--", ":"), strict=True):
            gains = relative_gains(nll, i, hard)
            more = "" if (gains < THRESHOLD).any() else "at least "
            part = "all tokens" if hard == 1 else f"hardest {hard:.0%}"
            label = f"{names[i]}: the paper's gain, {part}: RECL {more}{recl(gains, step)}"
            right.plot(contexts[:-1], 100 * gains, style, color=color, lw=1, alpha=0.7, label=label)
    left.set_ylabel(METRICS[metric])
    left.set_title(f"the same {nll.shape[2]:,} tokens, given more and more context", fontsize=10)
    right.axhline(0, color="black", lw=1)
    right.axhline(100 * THRESHOLD, color="black", lw=0.8, ls=":", label=f"{THRESHOLD:.0%}: where the RECL ends")
    right.set_yscale("symlog", linthresh=0.1)
    right.set_ylabel("% of perplexity")
    right.yaxis.set_major_formatter(FuncFormatter("{:g}".format))
    right.set_title(f"what {step} tokens more of context save", fontsize=10)
    for axes in (left, right):
        tidy(axes)
        axes.set_xlabel(f"context, tokens (from {step - 1} fewer)")
        axes.legend(frameon=False, fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.13))
    return figure


def nll_by_position(lm, ids, tgt_len, rows=8):
    """Returns the nll of the same tokens by their position in a segment, without and with memory.

    The text is cut into rows, and the model reads each row from its beginning to its end. The first segment of a row
    has no memory yet, so it is left out. "Without memory" is an empty memory: with zeros, the nll would be higher.

    Args:
        lm: language model with memory.
        ids: int `[n]`, the text.
        tgt_len: tokens of a segment.
        rows: number of rows.

    Returns:
        float64 `[2, segments, tgt_len]`, nats: first without memory, then with it, for the segments of all rows.

    Raises:
        ParameterError: the text is too short.
    """
    segments = (len(ids) - 1) // (rows * tgt_len)  # of a row
    if segments < 2:
        least = 2 * rows * tgt_len + 1
        message = f"the text must have at least {least:,} tokens, got {len(ids):,}"
        raise ParameterError("text", len(ids), f"at least {least} tokens", message)
    starts = segments * tgt_len * np.arange(rows)[:, None]
    with_memory = nll_of_windows(lm, ids[starts + np.arange(segments * tgt_len + 1)], tgt_len)
    starts = (starts + tgt_len * np.arange(1, segments)).reshape(-1, 1)  # of each segment but the first of a row
    without = nll_of_windows(lm, ids[starts + np.arange(tgt_len + 1)], tgt_len, empty_memory=True)
    with_memory = with_memory.reshape(rows, segments, tgt_len)[:, 1:].reshape(without.shape)
    return np.stack([without, with_memory]).astype(np.float64)


def draw_memory(nll, mem_len, metric):
    """Returns a figure of the nll by position in a segment, without and with memory. Close positions are averaged.

    Args:
        nll: `[2, segments, tgt_len]`, nats, see `nll_by_position`.
        mem_len: length of the memory in positions.
        metric: "bpc" or "ppl".
    """
    _, segments, length = nll.shape
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes = figure.subplots()
    groups = np.array_split(np.arange(length), min(16, length))  # of close positions
    places = [1 + group.mean() for group in groups]  # positions counted from 1
    curves = []
    names = "every segment on its own", f"with a memory of the {mem_len} before"
    for name, values, color in zip(names, nll, COLORS[1::-1], strict=True):
        curves.append([to_metric(values[:, group].mean(), metric) for group in groups])
        label = f"{name}: {to_metric(values.mean(), metric):.2f} {METRICS[metric]}"
        axes.plot(places, curves[-1], "o-", color=color, ms=4, label=label)
    axes.fill_between(places, *curves, color=COLORS[2], alpha=0.15, label="what the memory is worth")
    tidy(axes)
    axes.set_xlabel(f"place in a segment of {length} tokens")
    axes.set_ylabel(f"{METRICS[metric]} (less is better)")
    axes.set_title(f"how hard the next token is to predict: {segments * length:,} held-out tokens", fontsize=10)
    axes.legend(frameon=False)
    return figure


def draw_memory_along(nll, labels, kept, tgt_len, a_row=100):
    """Returns a figure of the nll along a text, with none, half and all of the memory.

    Args:
        nll: `[3, n - 1]`, nats, with none, half and all of the memory.
        labels: labels of the n tokens of the text. The first token has no nll.
        kept: the three lengths of the memory, in positions.
        tgt_len: tokens of a segment. A vertical line marks where one begins.
        a_row: most tokens in a row of the figure.
    """
    bits = nll / math.log(2)
    n = len(labels)
    rows = -(-(n - 1) // a_row)
    figure = Figure(figsize=(14, 1.9 * rows + 0.6), layout="constrained")
    panels = figure.subplots(rows, 1, squeeze=False, sharey=True)[:, 0]
    for axes, first in zip(panels, range(1, n, a_row), strict=True):
        places = np.arange(first, min(first + a_row, n))
        for values, number, color in zip(bits, kept, (COLORS[1], COLORS[4], COLORS[0]), strict=True):
            mean = values.mean()
            label = f"{number} positions of memory: {mean:.2f} bits a token" if first == 1 else None
            axes.plot(places, values[places - 1], "o-", color=color, ms=2.5, lw=1, label=label)
        axes.fill_between(places, bits[0, places - 1], bits[-1, places - 1], color=COLORS[2], alpha=0.2)
        for start in range(1, n, tgt_len):
            if start in places:
                axes.axvline(start - 0.5, color="0.6", lw=1)
        axes.set_xlim(first - 1, first + a_row)
        axes.set_xticks(places, [labels[i] for i in places], fontsize=7, family="monospace", parse_math=False)
        axes.tick_params(axis="x", length=0, rotation=0 if max(map(len, labels)) <= 2 else 90)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_ylabel("bits")
    figure.legend(*panels[0].get_legend_handles_labels(), frameon=False, loc="outside upper center", ncols=3)
    return figure
