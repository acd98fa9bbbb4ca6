"""Pictures of attention heads: of language models, with their memory, and of encoder-decoders.

attention_of_text, draw_attention       one head, or all of a layer: probabilities by memory and segment
terms_of_text, draw_terms               the terms (a) to (d) of a head of Transformer-XL, their sum, its softmax
attention_of_pair, draw_pair            one head, or all of a layer: source, target, or target to source
"""

import numpy as np
import tensorflow as tf

from txl_config import SearchConfig
from txl_programs.pictures.drawing import COLORS, GREY, Figure
from txl_tf.data.pairs.parallel import END_ID, PADDING, START_ID
from txl_tf.data.vocabulary import escape
from txl_tf.language.reading import memory_after
from txl_tf.transformer_xl.attention import create_mask
from txl_tf.vanilla.translator import most_symbols

MAX_LABELS = 200  # a picture with more keys has no token labels; for encoder-decoders, the queries count, too
TERMS = (
    "(a) q·k: content",
    "(b) q·r: distance, by content of the query",
    "(c) u·k: content of the key alone",
    "(d) v·r: distance alone",
)


# ------------------------------------------------------------------------------------------------- language models


def attention_of_text(lm, ids, tgt_len, layer):
    """Returns the attention probabilities of a layer for the last `tgt_len` ids. The ids before them fill the memory.

    Returns:
        `(probs, n_key)`: float32 `[n_head, tgt_len, mem_len + tgt_len]`, and the number of last keys that are tokens of
        the text. The keys before them are the zeros of the initial memory.
    """
    probs, _ = lm.attention(ids[None, -tgt_len:], memory_after(lm, ids[:-tgt_len], tgt_len))
    return probs[layer, :, 0].numpy(), min(len(ids), probs.shape[-1])


def terms_of_text(lm, ids, tgt_len, layer, head):
    """Returns the four terms of a head's scores, (a) to (d) of `TERMS`, and its probabilities, for the last ids.

    The terms are scaled, and not masked.

    Returns:
        `(terms, probs, n_key)`: float32 `[4, tgt_len, mem_len + tgt_len]` and `[tgt_len, mem_len + tgt_len]`; for
        `n_key` see `attention_of_text`.
    """
    mems = memory_after(lm, ids[:-tgt_len], tgt_len)
    tokens = tf.constant(ids[None, -tgt_len:])
    terms = tf.stack([term[head, 0] for term in lm.network.attention_terms(tokens, mems, layer)])
    probs = lm.network.attention_probs(tokens, mems, layer)[head, 0]
    terms, probs = (tf.cast(x, tf.float32).numpy() for x in (terms, probs))
    return terms, probs, min(len(ids), probs.shape[-1])


def spread(scores):
    """Returns the root of the mean variance of scores: over the keys that a query sees, and averaged over queries.

    A number that is added to all scores of a query changes neither their softmax nor the spread.

    Args:
        scores: masked array `[T, K]`.
    """
    return float(np.mean(np.var(scores, axis=1)) ** 0.5)


def draw_attention(probs, labels, layer, head=None, same_length=False):
    """Returns a figure of the attention of one head of a language model, or of all heads of a layer.

    Args:
        probs: `[n_head, tgt_len, mem_len + tgt_len]`, see `attention_of_text`.
        labels: labels of the last keys, the tokens of the text. The keys before them are zeros.
        layer: index of the layer, for the titles.
        head: index of the head; `None` for all heads.
        same_length: hyper-parameter of the model, which decides which keys are masked.
    """
    n_head, qlen, klen = probs.shape
    mlen = klen - qlen
    single = head is not None
    square = min(0.14 if single else 0.05, 18 / (1 if single else min(2, n_head)) / klen)  # inches
    figure, grid, heads = heads_grid(n_head, head, max(klen * square, 3.5), max(qlen * square, 1.2))
    top = max(probs[h].max() for h in heads)
    masked = create_mask(qlen, mlen, same_length).numpy() > 0
    image = None
    for axes, h in zip(grid.flat, heads, strict=False):
        image = show_roots(axes, np.ma.masked_array(probs[h], masked), top, segment_extent(qlen, klen))
        to_memory = f": {probs[h][:, :mlen].sum(1).mean():.0%} of attention goes to the memory" if mlen else ""
        axes.set_title(f"layer {layer}, head {h}{to_memory}", fontsize=10)
        mark_memory(axes, qlen, klen, len(labels))
        if single and klen <= MAX_LABELS:
            label_segment(axes, labels, qlen, min(72 * square * 0.9, 10))
    for axes in lowest(grid):
        axes.set_xlabel(about_keys(mlen, klen > len(labels)))
    for axes in grid[:, 0]:
        axes.set_ylabel("queries")
    probability_bar(figure, image, grid, top)
    return figure


def draw_terms(terms, probs, labels, layer, head, same_length=False):
    """Returns a figure of the terms of one head's scores, each on its own scale, their sum, and the probabilities.

    Args:
        terms, probs: see `terms_of_text`.
        layer, head: their indices, for the title.
        labels, same_length: see `draw_attention`.
    """
    _, qlen, klen = terms.shape
    mlen = klen - qlen
    masked = create_mask(qlen, mlen, same_length).numpy() > 0
    square = min(0.14, 9 / klen)  # inches
    size = (2 * max(klen * square, 3.0) + 1.7, 3 * (max(qlen * square, 1.2) + 0.6) + 0.6)
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(3, 2, sharex=True, sharey=True)
    scores = np.ma.masked_array([*terms, terms.sum(0)], np.broadcast_to(masked, (5, qlen, klen)))
    extent = segment_extent(qlen, klen)
    for axes, values, title in zip(grid.flat, scores, (*TERMS, "(a) + (b) + (c) + (d)"), strict=False):
        largest = max(np.abs(values).max(), 1e-9)
        image = axes.imshow(values, cmap="RdBu_r", vmin=-largest, vmax=largest, aspect="auto", extent=extent)
        axes.set_title(f"{title}; spread {spread(values):.2g}", fontsize=9)
        figure.colorbar(image, ax=axes, aspect=12, pad=0.01, label="score")
    probable = show_roots(grid[2, 1], np.ma.masked_array(probs, masked), probs.max(), extent)
    grid[2, 1].set_title("softmax of the sum: probabilities", fontsize=9)
    for axes in grid.flat:
        axes.set_facecolor(GREY)
        mark_memory(axes, qlen, klen, len(labels))
        if klen <= MAX_LABELS:
            label_segment(axes, labels, qlen, min(72 * square * 0.9, 9))
    for axes in grid[-1]:
        axes.set_xlabel(about_keys(mlen, klen > len(labels)))
    for axes in grid[:, 0]:
        axes.set_ylabel("queries")
    probability_bar(figure, probable, grid[2, 1], probs.max(), shrink=1, aspect=12)
    figure.suptitle(f"layer {layer}, head {head}: scores of keys by term, and what they sum to", fontsize=10)
    return figure


# ------------------------------------------------------------------------------------------------ encoder-decoders


def written_by(model, source, never=()):
    """Returns the ids that an encoder-decoder generates for a source. Each is the most likely one.

    Args:
        model: `Transformer`.
        source: int `[S]`.
        never: ids that it must not generate.

    Returns:
        int `[T]`, the target. Its last id is the end symbol, unless the target was cut off.
    """
    max_new_tokens = int(most_symbols(SearchConfig(), len(source), model))
    options = {"start": START_ID, "end": END_ID, "max_new_tokens": max_new_tokens, "suppress_tokens": never}
    ids = model.generate(source[None], **options)[0][0].numpy()
    ends = np.flatnonzero((ids == END_ID) | (ids == PADDING))
    return ids[: ends[0] + 1] if len(ends) else ids


def attention_of_pair(model, source, target, which, layer):
    """Returns the attention probabilities of a layer while a target is generated.

    Args:
        model: `Transformer`.
        source, target: int `[S]` and `[T]`, with their end symbols; the target without its start symbol.
        which: "encoder" or "decoder" for self-attention; "cross" for the attention from the target to the source.
        layer: index of the layer.

    Returns:
        For "encoder" float32 `[num_heads, S, S]`, for "decoder" `[num_heads, T, T]`, for "cross" `[num_heads, T, S]`.
        Row t of the last two has the probabilities when the model generates `target[t]`. The keys of "decoder" are the
        start symbol and `target[:-1]`.
    """
    return model.attention(source[None], np.append(START_ID, target[:-1])[None], which)[layer, :, 0].numpy()


def draw_pair(weights, queries, keys, which, layer, head=None):
    """Returns a figure of the attention of one head of an encoder-decoder, or of all heads of a layer.

    Args:
        weights: `[n_head, queries, keys]`, see `attention_of_pair`.
        queries, keys: labels of the queries and of the keys.
        which: "encoder", "decoder" or "cross".
        layer: index of the layer, for the titles.
        head: index of the head; `None` for all heads.
    """
    n_head, qlen, klen = weights.shape
    single = head is not None
    square = min(0.2, 18 / (1 if single else min(2, n_head)) / klen)  # inches
    figure, grid, heads = heads_grid(n_head, head, max(klen * square, 2.5), max(qlen * square, 1.2))
    top = max(weights[h].max() for h in heads)
    hidden = np.triu(np.full([qlen, klen], which == "decoder"), 1)
    image = None
    for axes, h in zip(grid.flat, heads, strict=False):
        image = show_roots(axes, np.ma.masked_array(weights[h], hidden), top)
        axes.set_title(f"layer {layer}, head {h}", fontsize=10)
        if max(qlen, klen) <= MAX_LABELS:
            label_axes(axes, range(klen), keys, range(qlen), queries, min(72 * square * 0.7, 10))
    for axes in lowest(grid):
        axes.set_xlabel("target, as read" if which == "decoder" else "source")
    for axes in grid[:, 0]:
        axes.set_ylabel("source" if which == "encoder" else "target, as written")
    probability_bar(figure, image, grid, top)
    return figure


# ----------------------------------------------------------------------------------------------- parts of pictures


def heads_grid(n_head, head, width, height):
    """Makes a figure with a cell for one head, or for all heads in two columns.

    Args:
        n_head: number of heads of the model.
        head: the head to show; `None` for all.
        width, height: size of a cell in inches.

    Returns:
        `(figure, grid, heads)`: the figure, its array of axes, and the indices of the heads that are shown.
    """
    heads, columns = (range(n_head), min(2, n_head)) if head is None else ([head], 1)
    rows = -(-len(heads) // columns)
    figure = Figure(figsize=(width * columns + 1.5, (height + 0.6) * rows + 0.6), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    for axes in grid.flat[len(heads) :]:
        axes.set_visible(False)
    for axes in lowest(grid):
        axes.tick_params(labelbottom=True)  # `sharex` allows labels in the last row only, whose last cell may be hidden
    return figure, grid, heads


def lowest(grid):
    """Returns the lowest visible axes of each column of a grid."""
    return [[axes for axes in column if axes.get_visible()][-1] for column in grid.T]


def show_roots(axes, probs, top, extent=None):
    """Draws probabilities up to `top`, coloured by their square roots, because most are small. Returns the image."""
    axes.set_facecolor(GREY)
    return axes.imshow(np.sqrt(probs), cmap="Blues", vmin=0, vmax=top**0.5, aspect="auto", extent=extent)


def probability_bar(figure, image, grid, top, shrink=0.8, aspect=30):
    """Adds a colour bar whose ticks are probabilities up to `top`, at the positions of their square roots.

    Args:
        figure: the figure.
        image: from `show_roots`.
        grid: the axes next to which the bar stands.
        top: largest probability of the colours.
        shrink, aspect: see Matplotlib's `colorbar`.
    """
    bar = figure.colorbar(image, ax=grid, shrink=shrink, aspect=aspect, pad=0.01)
    ticks = [tick for tick in (0, 0.01, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1) if tick <= top]
    bar.set_ticks(np.sqrt(ticks), labels=[f"{tick:g}" for tick in ticks])
    bar.set_label("probability")


def segment_extent(qlen, klen):
    """Returns Matplotlib's extent of an image `[qlen, klen]` in which key 0 begins the segment, after the memory."""
    return qlen - klen - 0.5, qlen - 0.5, qlen - 0.5, -0.5


def mark_memory(axes, qlen, klen, n_key):
    """Draws a line between memory and segment, and hatches over the keys that are zeros before the text.

    Without memory, it draws nothing.

    Args:
        axes: axes of an image with `segment_extent`.
        qlen, klen: numbers of queries and keys.
        n_key: number of last keys that are tokens of the text.
    """
    if klen > qlen:
        axes.axvline(-0.5, color=COLORS[1], lw=2)
    if klen > n_key:
        axes.axvspan(qlen - klen - 0.5, qlen - n_key - 0.5, facecolor="none", edgecolor="#888888", hatch="///", lw=0)


def about_keys(mlen, hatched):
    """Returns the label of the axis of `mlen` keys of memory, and those of the segment.

    `hatched`: whether `mark_memory` has drawn hatches.
    """
    if not mlen:
        return "keys"
    about_hatches = ", hatched where it is zeros before the text" if hatched else ""
    return f"keys: {mlen} of memory{about_hatches}; right of the line the segment"


def label_segment(axes, labels, qlen, fontsize):
    """Writes labels along the axes of an image of a segment: all at the last keys, the last `qlen` at the queries."""
    label_axes(axes, range(qlen - len(labels), qlen), labels, range(qlen), labels[-qlen:], fontsize)


def label_of(symbol):
    """Returns the label of a symbol in a picture: a space is visible, control characters are written as in Python."""
    return "␣" if symbol == " " else escape(symbol)


def label_axes(axes, columns, keys, rows, queries, fontsize):
    """Writes the labels `keys` at the columns of an image, and `queries` at its rows."""
    style = {"fontsize": fontsize, "family": "monospace", "parse_math": False}  # a $ is a $
    axes.set_xticks(columns, keys, rotation=90 if max(map(len, keys)) > 2 else 0, **style)
    axes.set_yticks(rows, queries, **style)
    axes.tick_params(length=0, pad=2)
