"""The common parts of pictures: colours, fonts, axes, words in cells, and the file."""

import io
import os
from typing import Any

from txl_config.errors import ParameterError
from txl_programs.answering.lines import check_output
from txl_tf.files import write_atomic

try:
    from matplotlib import font_manager, rcParams
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator
    from PIL import Image  # Matplotlib needs it
except ImportError:  # see `check_matplotlib`
    _missing: Any = None
    Figure = Image = FuncFormatter = MaxNLocator = NullLocator = font_manager = rcParams = _missing

# Colour-blind people can tell these colours apart, too.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
MISSING = 'pictures need matplotlib: pip install "txl_tf[plot]"'
FORMATS = ("png", "pdf", "svg")  # endings of the files
GREY = "#d8d8d8"  # keys that a query must not see
# Column of a log -> label of its axis. The logs of taggers have only the loss.
METRICS = {"bpc": "bits per character", "ppl": "perplexity", "loss": "loss, nats a sentence"}


def check_matplotlib():
    """Raises ValueError if Matplotlib is not installed."""
    if Figure is None:
        raise ValueError(MISSING)


def colors(n):
    """Returns n colours: `COLORS`, which repeat after the last."""
    return [COLORS[i % len(COLORS)] for i in range(n)]


def tidy(axes):
    """Gives axes of curves a grid, few ticks and no frame."""
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.margins(x=0.02)


def use_font(path, text, family="monospace"):
    """Checks that a font has the characters of a text. Makes the font of `path`, if given, the first of its family.

    Args:
        path: font file; `None`: the font that Matplotlib uses for the family is checked.
        text: text to draw.
        family: Matplotlib's family of fonts, such as "monospace".

    Raises:
        ParameterError: the file is not a font, or the font lacks a character, which would be drawn as a box.
    """
    if path is not None:
        try:
            font_manager.fontManager.addfont(path)
        except (OSError, RuntimeError) as error:
            message = f"font {path} cannot be read as a font: {error}"
            raise ParameterError("font", path, "a font file", message) from error
        settings: Any = rcParams  # its type names every key
        name = font_manager.FontProperties(fname=path).get_name()
        settings[f"font.{family}"] = [name, *settings[f"font.{family}"]]
    file = path or font_manager.findfont(font_manager.FontProperties(family=[family]))
    known = font_manager.get_font(file).get_charmap()
    lacking = [character for character in dict.fromkeys(text) if ord(character) not in known]
    if lacking:
        first_lacking = [*map(repr, lacking[:5]), *(["..."] if len(lacking) > 5 else [])]
        message = (
            f"the font {os.path.basename(file)} has no glyphs for {', '.join(first_lacking)}: choose another one by "
            "--font, such as --font=NotoSansCJKsc-Regular.otf for Chinese"
        )
        raise ParameterError("font", path, "a font with these characters", message)


def write_cells(axes, words, x=0, **style):
    """Writes the words of a table into the cells of an image.

    Args:
        axes: the axes of the image.
        words: list of rows.
        x: position of the first column.
        **style: arguments of Matplotlib's `text`.
    """
    for i, row in enumerate(words):
        for j, word in enumerate(row):
            axes.text(x + j, i, word, ha="center", va="center", **style)


def format_of(path):
    """Returns the format of the picture at `path` by its ending: one of `FORMATS`; "png" for a path without an ending.

    Raises ParameterError for another ending.
    """
    ending = os.path.splitext(path)[1]
    name = ending[1:].lower() or "png"
    if name not in FORMATS:
        allowed = f"a path that ends in {', '.join(f'.{name}' for name in FORMATS)}"
        raise ParameterError("output", path, allowed)
    return name


def check_picture(path):
    """Checks --output, the path of a picture. Raises ParameterError if `format_of(path)` does; see `check_output`."""
    format_of(path)
    check_output()


def save(figure, path, dpi):
    """Writes a figure as the file that its ending asks for, see `format_of`.

    A PNG file has 256 colours. It has a third of the size of a file with all colours.

    Args:
        figure: the figure.
        path: path of the file.
        dpi: dots per inch.

    Raises:
        ParameterError: the path has another ending.
        OSError: the file cannot be written.
    """
    format = format_of(path)
    written = io.BytesIO()
    figure.savefig(written, format=format, dpi=dpi)
    if format == "png":
        image = Image.open(written).convert("RGB").quantize(256, dither=Image.Dither.NONE)
        written = io.BytesIO()
        image.save(written, "PNG", optimize=True)
    write_atomic(path, written.getvalue())
