"""How much context a language model makes use of: its nll by the number of tokens before, and what that gains."""

import math

import numpy as np
import tensorflow as tf

from txl_programs.pictures.drawing import METRICS, Figure, FuncFormatter, colors, tidy
from txl_tf.runs.metrics import to_metric

HARD = (1.0, 0.5, 0.1)  # the paper's r
THRESHOLD = 0.01  # of the relative gain, the paper's


def nll_of_windows(lm, windows, segment, empty_memory=False):
    """Nll of the tokens of windows of a text, each read in segments that carry its memory on.

    Args:
        lm: language model.
        windows: int `[n, length + 1]`.
        segment: tokens that are read at a time.
        empty_memory: begin with a memory of no tokens, where the model itself begins with zeros of full length.

    Returns:
        float32 `[n, length]`, nats.
    """
    rows = []
    for batch in np.split(windows, range(64, len(windows), 64)):
        mems, columns = None, []
        if empty_memory:
            mems = [tf.zeros([len(batch), 0, lm.network.d_model], lm.compute_dtype)] * lm.network.n_layer
        for start in range(0, windows.shape[1] - 1, segment):
            piece = batch[:, start : start + segment + 1]
            nll, mems = lm.score(piece[:, :-1], piece[:, 1:], mems)
            columns.append(nll.numpy())
        rows.append(np.concatenate(columns, 1))
    return np.concatenate(rows)


def nll_by_context(lm, ids, step, n_context):
    """Nll of the same tokens, given ever longer contexts.

    A token is predicted from the c tokens before it and nothing else: the memory starts empty, without its zeros.
    Windows of `step * n_context` tokens start every `step` tokens, so that every token is in `n_context` of them, its
    contexts c, c + step, c + 2 * step, ... where c is 1 to `step`, each for as many tokens. Segments are as long as a
    step, so that a longer context never means fewer keys.

    Args:
        lm: `TransformerXLLM`.
        ids: int `[n]`.
        step: tokens by which a context is longer than the one before.
        n_context: number of context lengths.

    Returns:
        nll: float64 `[n_context, tokens]`, nats; columns are the tokens of the text that have all contexts.

    Raises:
        ValueError: the text is too short.
    """
    length = step * n_context
    starts = np.arange(0, len(ids) - length, step)
    if len(starts) < n_context:
        raise ValueError(f"the text must hold {2 * length} tokens or more for contexts of {length}, got {len(ids)}")
    windows = ids[starts[:, None] + np.arange(length + 1)]
    nll = nll_of_windows(lm, windows, step, empty_memory=True)
    nll = nll.astype(np.float64).reshape(len(starts), n_context, step)
    # Block b of the text is context number j of the window that starts j blocks earlier.
    blocks = range(n_context - 1, len(starts))
    return np.stack([nll[[b - j for b in blocks], j].ravel() for j in range(n_context)])


def relative_gains(nll, model, hard=1.0):
    """Gain of each context length over the one before it (appendix C of the paper).

    With `l_i(c, t)` the nll of token t under model i given c tokens, and c' the next longer context:

        b(c, t)   = min over i of l_i(c, t)                        the group's best at the short context
        f_i(c,c') = mean over T of min(b(c, t), l_i(c', t))        T: the share `hard` of tokens with largest b(c, t)
        g_i(c,c') = (exp f_i(c,c) - exp f_i(c,c')) / exp f_i(c,c)  relative reduction of perplexity

    Args:
        nll: `[models, n_context, tokens]`, nats, the same tokens for all.
        model: i.
        hard: the paper's r, in (0, 1].

    Returns:
        float64 `[n_context - 1]`: g of contexts 0 to 1, 1 to 2, ...
    """
    gains = []
    for short in range(nll.shape[1] - 1):
        baseline = nll[:, short].min(0)
        chosen = np.argsort(-baseline, kind="stable")[: math.ceil(hard * len(baseline))]
        before = np.minimum(baseline, nll[model, short])[chosen].mean()
        after = np.minimum(baseline, nll[model, short + 1])[chosen].mean()
        gains.append(1 - math.exp(after - before))
    return np.array(gains)


def recl(gains, step):
    """Relative effective context length: the context after which `step` more tokens gain less than 1% perplexity.

    A group of one model is compared with its own shorter contexts. The paper's figures are of the group of all the
    models it compares: a value here compares with others of the same group, text, `step` and r alone.

    Args:
        gains: `relative_gains`.
        step: tokens from one context to the next.

    Returns:
        int, the (longest) context in tokens. The longest measured where every gain reaches the threshold: the RECL
        is then that or more.
    """
    below = np.flatnonzero(gains < THRESHOLD)
    return step * (1 + (below[0] if below.size else len(gains)))


def draw_context(nll, names, step, spans, metric):
    """Figure of nll against context, and of the gains that the RECL is read from.

    Args:
        nll: `[models, n_context, tokens]`, nats.
        names: of the models.
        step: tokens from one context to the next.
        spans: the number of keys that each model attends to.
        metric: "bpc" or "ppl".
    """
    contexts = step * (1 + np.arange(nll.shape[1]))
    figure = Figure(figsize=(11, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    for i, color in enumerate(colors(len(names))):
        values = [to_metric(mean, metric) for mean in nll[i].mean(1)]
        label = f"{names[i]}: {values[-1]:.4g} at {contexts[-1]}"
        left.plot(contexts, values, "o-", color=color, ms=4, label=label)
        left.axvline(spans[i], color=color, ls="--", lw=1, label=f"{names[i]}: {spans[i]} keys of attention")
        for hard, style in zip(HARD, ("-", "--", ":"), strict=True):
            gains = relative_gains(nll, i, hard)
            more = "" if (gains < THRESHOLD).any() else "at least "
            label = f"{names[i]}, hardest {hard:.0%}: RECL {more}{recl(gains, step)}"
            right.plot(contexts[:-1], 100 * gains, style, color=color, marker="o", ms=3, label=label)
    left.set_ylabel(METRICS[metric])
    left.set_title(f"the same {nll.shape[2]:,} tokens, given more and more context", fontsize=10)
    right.axhline(100 * THRESHOLD, color="black", lw=1)
    right.set_yscale("log")
    right.set_ylabel(f"gain, % of perplexity (line: {THRESHOLD:.0%})")
    right.yaxis.set_major_formatter(FuncFormatter("{:g}".format))
    right.set_title(f"what {step} tokens more of context gain", fontsize=10)
    for axes in (left, right):
        tidy(axes)
        axes.set_xlabel(f"context, tokens (from {step - 1} fewer)")
        axes.legend(frameon=False, fontsize=9)
    return figure
