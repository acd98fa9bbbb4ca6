"""What the pictures have in common: colours, axes, tables of words, files."""

import io

try:
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator
    from PIL import Image  # Matplotlib needs it
except ImportError:  # txl-plot says so
    Figure = Image = FuncFormatter = MaxNLocator = NullLocator = None

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # told apart by the colour-blind too
GREY = "#d8d8d8"  # keys that a query must not see
METRICS = {"bpc": "bits per character", "ppl": "perplexity"}


def colors(n):
    return [COLORS[i % len(COLORS)] for i in range(n)]


def tidy(axes):
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.margins(x=0.02)


def write_cells(axes, words, x=0, **style):
    """Writes a table of words into the cells of an image whose first column is at `x`."""
    for i, row in enumerate(words):
        for j, word in enumerate(row):
            axes.text(x + j, i, word, ha="center", va="center", **style)


def save(figure, path, dpi):
    """Writes a PNG file of 256 colours, which is a third as large as one of all colours."""
    written = io.BytesIO()
    figure.savefig(written, format="png", dpi=dpi)
    Image.open(written).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, "PNG", optimize=True)
