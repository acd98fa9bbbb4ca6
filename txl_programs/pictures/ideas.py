"""Pictures for the articles, without a trained model. All numbers come from the functions that the models call.

draw_masks          which keys a query sees: without memory, with it, with same_length
draw_shift          how `rel_shift` moves scores by distance to their keys
draw_positions      the vanilla Transformer's positions and their products
draw_wavelengths    the wavelengths of the sinusoids, and the distances between positions that follow from them
"""

import numpy as np
import tensorflow as tf

from txl_programs.pictures.drawing import COLORS, GREY, Figure, colors, write_cells
from txl_tf.layers import rel_shift
from txl_tf.nn.positions import inverse_frequencies
from txl_tf.transformer_xl.attention import create_mask

MAX_WRITTEN_COLUMNS = 24  # the numbers of a wider matrix are not written into its cells
LIGHT = ("#cce3f0", "#f7dfcc", "#ccebe3", "#f5e4ed", "#faecd0", "#ddf0fb")  # COLORS, so light that text is legible


# ----------------------------------------------------------------------------------------------------------- masks


def draw_masks(qlen, mlen):
    """Returns a figure of three masks of `create_mask`. A masked key is 1 and grey.

    Args:
        qlen: number of queries.
        mlen: number of keys in the memory.
    """
    masks = {
        "(a) causal: no memory": create_mask(qlen, 0),
        f"(b) with a memory of {mlen}": create_mask(qlen, mlen),
        f"(c) same_length: {mlen + 1} keys for every query": create_mask(qlen, mlen, same_length=True),
    }
    widths = [qlen, mlen + qlen, mlen + qlen]
    cell = min(0.36, 11 / sum(widths))  # inches
    figure = Figure(figsize=(sum(widths) * cell + 2, qlen * cell + 1.2), layout="constrained")
    for axes, (title, mask) in zip(figure.subplots(1, 3, width_ratios=widths), masks.items(), strict=True):
        before = mask.shape[1] - qlen  # keys in the memory
        mask = mask.numpy().astype(int)
        extent = (-before - 0.5, qlen - 0.5, qlen - 0.5, -0.5)
        axes.imshow(mask, cmap=flat_colors(LIGHT[0], GREY), vmin=0, vmax=1, aspect="auto", extent=extent)
        if mask.shape[1] <= MAX_WRITTEN_COLUMNS:
            write_cells(axes, mask, -before, fontsize=8)
        if before:
            axes.axvline(-0.5, color=COLORS[1], lw=2)
        axes.set_title(title, fontsize=9)
        axes.set(xlabel="key; negative: memory" if before else "key", ylabel="query")
        axes.locator_params(integer=True)
    return figure


def flat_colors(*names):
    """Returns Matplotlib's colour map of these colours, without shades in between."""
    from matplotlib.colors import ListedColormap

    return ListedColormap(names)


# ----------------------------------------------------------------------------------------------------------- shift


def shift_steps(qlen, mlen):
    """Returns the steps of `rel_shift` for scores 1, 2, ..., T * K, of T = `qlen` queries and K = `mlen + qlen` keys.

    Returns:
        Four int arrays:

        `[T, K]`: row i has the scores of query i for the distances K - 1, ..., 0.
        `[T, K + 1]`: a column of zeros is added at the left.
        `[K + 1, T]`: the same numbers in rows of T.
        `[T, K]`: the result of `rel_shift`, the same numbers without the first row in rows of K. Column j is key j.
    """
    klen = mlen + qlen
    before = 1 + np.arange(qlen * klen).reshape(qlen, klen)
    padded = np.pad(before, [[0, 0], [1, 0]])
    after = rel_shift(tf.constant(before, tf.float32)).numpy().astype(int)
    return before, padded, padded.reshape(klen + 1, qlen), after


def draw_shift(qlen, mlen):
    """Returns a figure of `shift_steps`. A cell has a distance as text, a query as colour. Masked cells are grey."""
    klen = mlen + qlen
    titles = (
        "1. by distance",
        "2. zeros in front",
        f"3. in rows of {qlen};\nthe first row goes",
        f"4. in rows of {klen}: by key",
    )
    steps = shift_steps(qlen, mlen)
    future = create_mask(qlen, mlen).numpy() > 0
    size = (0.36 * sum(step.shape[1] for step in steps) + 3, 0.3 * (klen + 1) + 1.3)
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(1, 4, width_ratios=[step.shape[1] for step in steps])
    for axes, step, title in zip(panels, steps, titles, strict=True):
        query = (step - 1) // klen  # the scores are 1, 2, ...: klen of them belong to a query
        distance = klen - 1 - (step - 1) % klen
        words = np.where(step > 0, np.char.add("r", distance.astype(str)), "0")
        shades = np.where(step > 0, 1 + query % len(LIGHT), 0)
        if axes is panels[3]:
            shades[future] = len(LIGHT) + 1
        axes.imshow(shades, cmap=flat_colors("white", *LIGHT, GREY), vmin=0, vmax=len(LIGHT) + 1)
        write_cells(axes, words, fontsize=8)
        if axes is panels[2]:
            axes.plot([-0.5, qlen - 0.5], [0, 0], color=COLORS[1])
        axes.set_title(title, fontsize=9)
        axes.set_xticks([])
        axes.set_yticks([])
    for axes in (panels[0], panels[3]):
        axes.set_yticks(range(qlen), [f"query {i}" for i in range(qlen)], fontsize=8)
    panels[0].set_xticks(range(klen), range(klen - 1, -1, -1), fontsize=8)
    panels[0].set_xlabel("distance", fontsize=8)
    panels[3].set_xticks(range(klen), range(-mlen, qlen), fontsize=8)
    panels[3].set_xlabel("key; negative: memory", fontsize=8)
    return figure


# ------------------------------------------------------------------------------------------------------- positions


def rises(products):
    """Returns the distances k for which the product at k + 1 is larger than the one at k: int array.

    Args:
        products: `[n]`, for the distances 0 to n - 1.
    """
    return np.flatnonzero(np.diff(products) > 0)


def draw_positions(table):
    """Returns a figure of positional encodings: the table, the products of its rows, and the products by distance.

    Args:
        table: `[n, d_model]`, the encoding of each position.
    """
    products = table @ table.T
    middle = len(table) // 2
    figure = Figure(figsize=(13, 4), layout="constrained")
    table_axes, product_axes, distance_axes = figure.subplots(1, 3)
    for axes, values, title, label in (
        (table_axes, table, "PE(pos): sines and cosines in turn", "dimension"),
        (product_axes, products, "PE(pos) . PE(other)", "other position"),
    ):
        largest = np.abs(values).max()
        image = axes.imshow(values, cmap="RdBu_r", aspect="auto", vmin=-largest, vmax=largest, interpolation="nearest")
        figure.colorbar(image, ax=axes)
        axes.set(title=title, xlabel=label, ylabel="position")
    distances = np.arange(len(table)) - middle
    distance_axes.plot(distances, products[middle], color=COLORS[0], label=f"from position {middle}")
    distance_axes.plot(-distances, products[middle], "--", color=COLORS[1], label="the same, mirrored")
    backwards = products[middle, middle::-1]  # distances 0 ... middle
    rising = rises(backwards)
    title = "the same forwards and backwards"
    if len(rising):
        title = f"{title}, not monotone:\n{len(rising)} of {middle} steps rise, the first after k = {rising[0]}"
    distance_axes.set_title(title, fontsize=9)
    distance_axes.set(xlabel="distance k", ylabel="PE(pos) . PE(pos + k)")
    distance_axes.margins(y=0.22)  # room for the legend
    distance_axes.legend(frameon=False, loc="upper right", fontsize=8)
    return figure


def wavelengths(d_model):
    """Returns the periods of the sinusoids in positions: float64 `[d_model / 2]`, from 2 pi to nearly 2 pi * 10000."""
    return 2 * np.pi / inverse_frequencies(d_model).numpy().astype(np.float64)


def gaps(n, d_model):
    """Returns the distances between the encodings of positions that are 1, 2, ..., n - 1 apart: float64 `[n - 1]`.

    A pair of sine and cosine is a point on a circle, which turns by an angle w from one position to the next. After k
    positions, the point is `2 |sin(k w / 2)|` away from where it was. If all distances are above 0, all n encodings
    are different.
    """
    half_angles = np.pi / wavelengths(d_model) * np.arange(1, n)[:, None]  # k * w / 2
    return 2 * np.sqrt(np.sum(np.sin(half_angles) ** 2, 1))


def draw_wavelengths(n, d_model):
    """Returns a figure of the period of each pair of dimensions, some of the waves, and `gaps`, for n positions."""
    periods = wavelengths(d_model)
    figure = Figure(figsize=(13, 3.6), layout="constrained")
    by_pair, waves, apart = figure.subplots(1, 3)
    by_pair.semilogy(periods, ".", color=COLORS[0])
    by_pair.axhline(n, color="black", lw=1)
    shorter = int(np.sum(periods <= n))
    by_pair.set_title(f"{shorter} of {len(periods)} waves go round within {n:,} positions (line)", fontsize=10)
    by_pair.set(xlabel="pair of dimensions", ylabel="period, positions")
    pairs = np.unique(np.linspace(0, len(periods) - 1, 5).astype(int)[:-1])
    positions = np.linspace(0, min(n, 100) - 1, 1000)
    for pair, color in zip(pairs, colors(len(pairs)), strict=True):
        label = f"pair {pair}: {periods[pair]:,.4g}"
        waves.plot(positions, np.sin(2 * np.pi * positions / periods[pair]), color=color, label=label)
    waves.set_title("sines of some pairs, and their periods", fontsize=10)
    waves.set(xlabel="position", ylabel="sine", ylim=(-1.1, 1.75))
    waves.legend(frameon=False, fontsize=8, loc="upper center", ncols=2)
    distances = gaps(n, d_model)
    nearest = int(np.argmin(distances))
    apart.plot(np.arange(1, n), distances, color=COLORS[0], lw=1)
    apart.plot(nearest + 1, distances[nearest], "o", color=COLORS[1])
    title = f"of {n:,} positions, the nearest two are {nearest + 1} apart: {distances[nearest]:.3g}"
    apart.set_title(title, fontsize=10)
    apart.set(xlabel="distance k", ylabel="|PE(pos) - PE(pos + k)|")
    apart.set_ylim(bottom=0)
    return figure
