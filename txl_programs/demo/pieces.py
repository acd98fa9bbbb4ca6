"""HTML pieces of the page.

`element` is the only place where text becomes HTML. It escapes everything that is not `Markup`, and writes control
characters like \\x1b. Colours are numbers from 0 to 1, which style.py mixes with the light or dark colours of the page.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from markupsafe import Markup, escape

from txl_config.errors import visible

PAGE_WIDTH = 1080  # pixels of a picture that has the page to itself
CELL = 18  # width of a cell of a matrix in pixels
LEAST_CELL = 6.5  # its width if the matrix has many columns
ROW = 18  # height of a row of a matrix in pixels
ITEM = 34  # width of a character in a lattice in pixels
LEAST_ITEM = 22  # its width if the sentence is long
LETTER = 7.3  # width of a character of a label in pixels
LONGEST = 14  # characters of a label
SEEN = 0.004  # smallest probability that is drawn


class Span(NamedTuple):
    """An entity in a text."""

    start: int  # in characters
    end: int  # exclusive
    kind: str
    prob: float


class Place(NamedTuple):
    """A token or a word in a picture."""

    text: str
    share: float = 0.0  # strength of its colour, from 0 to 1
    title: str | None = None  # text that appears when the mouse is over it
    pick: str | None = None  # data of a click on it; without, it cannot be clicked
    classes: str = ""  # of style.py


def element(name: str, *children: object, **attributes: object) -> Markup:
    """Returns an HTML element. Children and values that are not `Markup` are text. Attributes with `None` are left out.

    `class_` is written as class, `data_pick` as data-pick.
    """
    inner = Markup("").join(map(_safe, children))
    values = {key.strip("_").replace("_", "-"): value for key, value in attributes.items() if value is not None}
    pairs = Markup("").join(Markup(' {}="{}"').format(key, _safe(value)) for key, value in values.items())
    return Markup("<{0}{1}>{2}</{0}>").format(Markup(name), pairs, inner)


def _safe(value):
    """Returns `Markup` unchanged, and anything else as escaped text with visible control characters."""
    return value if isinstance(value, Markup) else escape(visible(str(value)))


def notice(text: str) -> Markup:
    """Returns an error message to the visitor, as a paragraph."""
    return element("p", text, class_="notice error")


def side_by_side(sections: dict[str, Markup], names: Sequence[str]) -> Markup:
    """Returns the answers of one or several runs in columns. With several names, each has the name of its run above it.

    Args:
        sections: `{name of a run: its answer}`.
        names: names of the runs that the visitor has chosen. A click in a section reports the index of its run in this
            list.
    """
    columns = []
    for name, body in sections.items():
        head = [element("h3", name)] if len(names) > 1 else []
        columns.append(element("section", *head, body, data_run=names.index(name)))
    return element("div", *columns, class_="answer sides" if len(columns) > 1 else "answer")


def figure(title: str, *body: Markup, note: str = "") -> Markup:
    """Returns a picture below its title, and below it a note on how to read it."""
    notes = [element("p", note, class_="note")] if note else []
    return element("div", element("h4", title), *body, *notes, class_="figure")


def facts(**values: str) -> Markup:
    """Returns a line of names and numbers, `{name: number}`. An underscore in a name is shown as a space."""
    spans = [element("span", element("b", value), f" {name.replace('_', ' ')}") for name, value in values.items()]
    return element("p", *spans, class_="facts")


# ------------------------------------------------------------------------------------------------------------ texts


def tokens(places: Iterable[Place]) -> Markup:
    """Returns a text, with every token on its colour. A newline is shown as ↵, and a new line begins after it."""
    return element("div", *map(_token, places), class_="tokens")


def _token(place):
    """Returns a token on its colour, with its title and the data of a click."""
    shown = place.text.replace("\n", "↵").replace("\t", "⇥")
    span = element(
        "span", shown, class_=f"token {place.classes}".strip(), style=f"--a:{min(1, place.share):.3f}",
        title=place.title, data_pick=place.pick, tabindex=0 if place.pick else None,
        role="button" if place.pick else None,
    )  # fmt: skip
    return span + Markup("<br>") * place.text.count("\n")


def legend(low: str, high: str, color: str = "hot") -> Markup:
    """Returns a scale of a colour, with the texts `low` at the weakest and `high` at the strongest colour.

    `color` is "hot", "help" or "harm".
    """
    return element("p", low, element("span", class_=f"scale {color}"), high, class_="legend")


def bars(rows: Iterable[tuple[str, float, str]], color: str = "cool", chosen: int | None = None) -> Markup:
    """Returns rows with a name, a bar and a text each.

    Args:
        rows: `(name, length from 0 to 1, text)` of each row.
        color: "cool" or "help".
        chosen: index of the row that is outlined; `None` for none.
    """
    lines = [
        element(
            "div", element("span", name, class_="name"),
            element("span", element("span", class_=color, style=f"width:{100 * share:.1f}%"), class_="bar"),
            element("span", label, class_="said"), class_="line chosen" if i == chosen else "line",
        )
        for i, (name, share, label) in enumerate(rows)
    ]  # fmt: skip
    return element("div", *lines, class_="bars")


def marked(text: str, spans: Sequence[Span], kinds: Sequence[str]) -> Markup:
    """Returns a text with its entities marked, and their types and probabilities. A type has one of six colours.

    Args:
        text: the text.
        spans: its entities, in their order. They must not overlap.
        kinds: all types of entities. The index of a type chooses its colour.
    """
    parts = []
    end = 0
    for span in spans:
        name = element("small", f"{span.kind} {span.prob:.2f}")
        parts += [text[end : span.start]]
        parts += [element("mark", text[span.start : span.end], name, class_=f"kind{kinds.index(span.kind) % 6}")]
        end = span.end
    return element("p", *parts, text[end:], class_="marked")


def choices(name: str, options: Iterable[tuple[str, str]], chosen: str) -> Markup:
    """Returns a row of small buttons.

    Args:
        name: what is chosen. It stands before the buttons.
        options: `(text, pick)` of each button: its text, and the value that the page receives if it is clicked.
        chosen: the `pick` of the button that is drawn as the chosen one; "" for none.
    """
    buttons = [
        element("button", text, data_pick=pick, class_="chip chosen" if pick == chosen else "chip", type="button")
        for text, pick in options
    ]
    return element("p", element("span", name), *buttons, class_="chips")


# --------------------------------------------------------------------------------------------------------- pictures


def short(label: str) -> str:
    """Returns a label for a picture: with visible spaces, newlines and tabs, and cut to `LONGEST` characters."""
    label = label.replace(" ", "␣").replace("\n", "↵").replace("\t", "⇥")
    return label if len(label) <= LONGEST else f"{label[: LONGEST - 1]}…"


def matrix(
    values: Sequence[Sequence[float]],
    rows: Sequence[Place],
    columns: Sequence[str],
    width: int,
    bar: int | None = None,
    classes: str = "",
) -> Markup:
    """Returns a picture of a matrix of probabilities, coloured by their square roots, because most are small.

    Args:
        values: `[rows, columns]`.
        rows: labels at the left. A click on a label reports its `pick`.
        columns: labels above. They are turned by 90 degrees unless all are single characters.
        width: wanted width in pixels. The picture is wider or narrower if cells would not have `LEAST_CELL` to `CELL`
            pixels.
        bar: index of the column with a line at its left; `None` for no line.
        classes: classes of style.py. With "at-end", a picture that is wider than the page shows its right end first.
    """
    upright = max(map(len, columns), default=0) <= 1
    left = 10 + LETTER * max((len(row.text) for row in rows), default=0)
    top = 18 if upright else 10 + LETTER * max(map(len, columns), default=0)
    cell = min(CELL, max(LEAST_CELL, (width - left) / max(1, len(columns))))
    parts = [_column_label(name, left + cell * (j + 0.5), top - 5, upright, cell) for j, name in enumerate(columns)]
    for i, row in enumerate(rows):
        y = top + ROW * i
        label = {"x": left - 6, "y": y + 13, "text_anchor": "end", "data_pick": row.pick}
        label["class_"] = f"label {row.classes}".strip()
        parts.append(element("text", row.text, **label))
        parts += _cells(values[i], left, y, cell, f"{row.text} → ", columns)
    drawn_width = left + cell * len(columns) + 4
    height = top + ROW * len(rows) + 4
    if bar is not None:
        x = left + cell * bar
        parts.append(element("line", x1=x, x2=x, y1=top - 2, y2=height - 2, class_="memory"))
    return picture(drawn_width, height, *parts, classes=classes)


def _cells(values, left, y, cell, title, columns):
    """Returns the rectangles of a row of a `matrix`, without the rectangles of probabilities below `SEEN`.

    Args:
        values: probabilities of the row.
        left, y: position of the row in pixels.
        cell: width of a cell in pixels.
        title: beginning of the title of each rectangle.
        columns: labels of the columns.
    """
    size = {"width": round(cell - min(1, cell / 10), 2), "height": ROW - 1, "class_": "hot"}
    return [
        element(
            "rect", element("title", f"{title}{columns[j]}: {value:.3f}"), x=round(left + cell * j, 2), y=y,
            style=f"--a:{value**0.5:.3f}", **size,
        )
        for j, value in enumerate(values)
        if value >= SEEN
    ]  # fmt: skip


def _column_label(name, x, y, upright, cell):
    """Returns the label of a column of a matrix, upright or turned by 90 degrees.

    Args:
        name: the label.
        x, y: position of the middle of the column and of the lower end of the label, in pixels.
        upright: whether the label is upright.
        cell: width of a cell in pixels, which bounds the size of the letters.
    """
    size = {"class_": "column", "style": f"--size:{min(12, 1.45 * cell):.1f}px"}
    if upright:
        return element("text", name, x=round(x, 2), y=y, text_anchor="middle", **size)
    return element("text", name, x=x, y=y + 4, transform=f"rotate(-90 {x} {y})", **size)


def picture(width: float, height: float, *parts: Markup, classes: str = "") -> Markup:
    """Returns an SVG picture of this size in pixels, with `classes` of style.py. It scrolls if the page is narrower."""
    drawn = element("svg", *parts, width=f"{width:.0f}", height=f"{height:.0f}", role="img")
    return element("div", drawn, class_=f"picture {classes}".strip())


def lattice(characters: Sequence[Place], words: Sequence[tuple[int, int, Place]], cell: float) -> Markup:
    """Returns a picture: the characters of a sentence in a row, and below them the words of the lexicon that they form.

    Args:
        characters: the characters in their order.
        words: `(start, end, place)` of each word, from the index of its first character to that after its last.
        cell: width of a character in pixels.
    """
    height = 30  # of an item in pixels
    row_height = height + 6
    parts = [_item(place, cell * i, 0, cell, height) for i, place in enumerate(characters)]
    ends = []  # where the last word of each row ends
    for start, end, place in words:
        row = next((i for i, last in enumerate(ends) if last <= start), len(ends))  # the first with room, or a new row
        ends[row : row + 1] = [end]
        parts.append(_item(place, cell * start, row_height * (row + 1) + 6, cell * (end - start), height))
    return picture(cell * len(characters) + 2, row_height * (len(ends) + 1) + 6, *parts)


def _item(place, x, y, width, height):
    """Returns a box with the text of a `Place`. The whole box can be clicked. Position and size are in pixels."""
    box = element(
        "rect", x=x + 1, y=y + 1, width=width - 3, height=height - 2, rx=6, class_=f"item {place.classes}".strip(),
        style=f"--a:{min(1, place.share):.3f}",
    )  # fmt: skip
    text = element("text", short(place.text), x=x + width / 2, y=y + height / 2 + 6, text_anchor="middle")
    title = [element("title", place.title)] if place.title else []
    return element("g", *title, box, text, data_pick=place.pick, class_="pick" if place.pick else None)
