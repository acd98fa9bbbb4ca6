"""HTML pieces of the page.

`element` is the only place where text becomes HTML. It escapes everything that is not `Markup`, and writes control
characters like \\x1b. Colours are numbers from 0 to 1, which style.py mixes with the light or dark colours of the page.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from markupsafe import Markup, escape

from txl_config.errors import visible

ROOM = 1080  # pixels of a picture that has the page to itself
CELL = 18  # pixels of a matrix
LEAST_CELL = 6.5
ROW = 18
ITEM = 34  # pixels of a character in a lattice
LEAST_ITEM = 22
LETTER = 7.3  # pixels of a character in its labels
LONGEST = 14  # characters of a label
SEEN = 0.004  # least probability that is drawn


class Span(NamedTuple):
    """An entity in a text."""

    start: int
    end: int  # exclusive
    kind: str
    prob: float


class Place(NamedTuple):
    """A token or a word in a picture: its text, the strength of its colour, and the data of a click on it."""

    text: str
    share: float = 0.0
    title: str | None = None
    pick: str | None = None
    look: str = ""  # classes of style.py


def element(name: str, *children: object, **attributes: object) -> Markup:
    """An HTML element. Children and values that are not `Markup` are text. Attributes that are `None` are left out.

    `class_` is written as class, `data_pick` as data-pick.
    """
    inner = Markup("").join(map(_safe, children))
    values = {key.strip("_").replace("_", "-"): value for key, value in attributes.items() if value is not None}
    pairs = Markup("").join(Markup(' {}="{}"').format(key, _safe(value)) for key, value in values.items())
    return Markup("<{0}{1}>{2}</{0}>").format(Markup(name), pairs, inner)


def _safe(value):
    return value if isinstance(value, Markup) else escape(visible(str(value)))


def notice(text: str, look: str = "error") -> Markup:
    """A message to the visitor."""
    return element("p", text, class_=f"notice {look}")


def side_by_side(sections: dict[str, Markup], names: Sequence[str]) -> Markup:
    """The answers of several runs, each below the name of its run. If the page shows only one run, without the name.

    Args:
        sections: `{name of a run: its answer}`.
        names: the names of all runs of the page. The data of a click in a section contains the index of its run here.
    """
    columns = []
    for name, body in sections.items():
        head = [element("h3", name)] if len(names) > 1 else []
        columns.append(element("section", *head, body, data_run=names.index(name)))
    return element("div", *columns, class_="answer sides" if len(columns) > 1 else "answer")


def figure(title: str, *body: Markup, note: str = "") -> Markup:
    """A picture below its title, and a note on how to read it."""
    notes = [element("p", note, class_="note")] if note else []
    return element("div", element("h4", title), *body, *notes, class_="figure")


def facts(**values: str) -> Markup:
    """Names and numbers in one line. The `_` in a name is shown as a space."""
    spans = [element("span", element("b", value), f" {name.replace('_', ' ')}") for name, value in values.items()]
    return element("p", *spans, class_="facts")


# ------------------------------------------------------------------------------------------------------------ texts


def tokens(places: Iterable[Place]) -> Markup:
    """A text, with every token on its colour. A newline is visible, and begins a line."""
    return element("div", *map(_token, places), class_="tokens")


def _token(place):
    """A token on its colour, with a title and the data of a click."""
    shown = place.text.replace("\n", "↵").replace("\t", "⇥")
    span = element(
        "span", shown, class_=f"token {place.look}".strip(), style=f"--a:{min(1, place.share):.3f}", title=place.title,
        data_pick=place.pick, tabindex=0 if place.pick else None, role="button" if place.pick else None,
    )  # fmt: skip
    return span + Markup("<br>") * place.text.count("\n")


def legend(low: str, high: str, look: str = "hot") -> Markup:
    """The meaning of the colours, from none to the strongest."""
    return element("p", low, element("span", class_=f"scale {look}"), high, class_="legend")


def bars(rows: Iterable[tuple[str, float, str]], look: str = "cool", chosen: int | None = None) -> Markup:
    """Rows with a name, a bar and a text.

    Args:
        rows: `(name, length from 0 to 1, text)` of each row.
        look: class of the bars.
        chosen: index of the row that is outlined.
    """
    lines = [
        element(
            "div", element("span", name, class_="name"),
            element("span", element("span", class_=look, style=f"width:{100 * share:.1f}%"), class_="bar"),
            element("span", label, class_="said"), class_="line chosen" if i == chosen else "line",
        )
        for i, (name, share, label) in enumerate(rows)
    ]  # fmt: skip
    return element("div", *lines, class_="bars")


def marked(text: str, spans: Sequence[Span], kinds: Sequence[str]) -> Markup:
    """A text with its entities, their types and probabilities. Every type has a colour. Entities must not overlap."""
    parts = []
    end = 0
    for span in spans:
        name = element("small", f"{span.kind} {span.prob:.2f}")
        parts += [text[end : span.start]]
        parts += [element("mark", text[span.start : span.end], name, class_=f"kind{kinds.index(span.kind) % 6}")]
        end = span.end
    return element("p", *parts, text[end:], class_="marked")


def choices(name: str, options: Iterable[tuple[str, str]], chosen: str) -> Markup:
    """A row of small buttons.

    Args:
        name: what is chosen. It stands before the buttons.
        options: `(text, pick)` of each button: its text, and the value that the page receives if it is clicked.
        chosen: the `pick` of the button that is drawn as the chosen one.
    """
    buttons = [
        element("button", text, data_pick=pick, class_="chip chosen" if pick == chosen else "chip", type="button")
        for text, pick in options
    ]
    return element("p", element("span", name), *buttons, class_="chips")


# --------------------------------------------------------------------------------------------------------- pictures


def short(label: str) -> str:
    """A short label for a picture: spaces and newlines are visible, and a long label is cut."""
    label = label.replace(" ", "␣").replace("\n", "↵").replace("\t", "⇥")
    return label if len(label) <= LONGEST else f"{label[: LONGEST - 1]}…"


def matrix(
    values: Sequence[Sequence[float]],
    rows: Sequence[Place],
    columns: Sequence[str],
    room: int,
    bar: int | None = None,
    look: str = "",
) -> Markup:
    """A picture of the probabilities from rows to columns, coloured by their square roots, because most are small.

    Args:
        values: `[rows, columns]`.
        rows: labels at the left. A click on one has its pick.
        columns: labels above, upright where they are single characters.
        room: width in pixels, unless it is far too small.
        bar: draw a line to the left of this column.
        look: classes of style.py. With "at-end", a picture that is wider than the page shows its right end first.
    """
    upright = max(map(len, columns), default=0) <= 1
    left = 10 + LETTER * max((len(row.text) for row in rows), default=0)
    top = 18 if upright else 10 + LETTER * max(map(len, columns), default=0)
    cell = min(CELL, max(LEAST_CELL, (room - left) / max(1, len(columns))))
    parts = [_column_label(name, left + cell * (j + 0.5), top - 5, upright, cell) for j, name in enumerate(columns)]
    for i, row in enumerate(rows):
        y = top + ROW * i
        label = {"x": left - 6, "y": y + 13, "text_anchor": "end", "data_pick": row.pick}
        label["class_"] = f"label {row.look}".strip()
        parts.append(element("text", row.text, **label))
        parts += _cells(values[i], left, y, cell, f"{row.text} → ", columns)
    width = left + cell * len(columns) + 4
    height = top + ROW * len(rows) + 4
    if bar is not None:
        x = left + cell * bar
        parts.append(element("line", x1=x, x2=x, y1=top - 2, y2=height - 2, class_="memory"))
    return picture(width, height, *parts, look=look)


def _cells(values, left, y, cell, title, columns):
    """The rectangles of a row of a `matrix`, without those that are too pale to be seen."""
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
    """The label of a column of a matrix, upright or turned by 90 degrees."""
    size = {"class_": "column", "style": f"--size:{min(12, 1.45 * cell):.1f}px"}
    if upright:
        return element("text", name, x=round(x, 2), y=y, text_anchor="middle", **size)
    return element("text", name, x=x, y=y + 4, transform=f"rotate(-90 {x} {y})", **size)


def picture(width: float, height: float, *parts: Markup, look: str = "") -> Markup:
    """An SVG picture in its own size, with the classes `look`. It scrolls if the page is narrower."""
    drawn = element("svg", *parts, width=f"{width:.0f}", height=f"{height:.0f}", role="img")
    return element("div", drawn, class_=f"picture {look}".strip())


def lattice(characters: Sequence[Place], words: Sequence[tuple[int, int, Place]], wide: float) -> Markup:
    """The characters of a sentence in a row, and the words of the lexicon below the characters that they span.

    Args:
        characters: in their order.
        words: first character, end (exclusive), and the word as a `Place`.
        wide: width of a character in pixels.
    """
    parts = []
    tall = 30
    for i, place in enumerate(characters):
        parts += _item(place, wide * i, 0, wide, tall)
    levels = []  # where the last word of each row ends
    for start, end, place in words:
        level = next((i for i, last in enumerate(levels) if last <= start), len(levels))
        levels[level : level + 1] = [end]
        parts += _item(place, wide * start, (tall + 6) * (level + 1) + 6, wide * (end - start), tall)
    height = (tall + 6) * (len(levels) + 1) + 6
    return picture(wide * len(characters) + 2, height, *parts)


def _item(place, x, y, width, height):
    """A box with its text. The whole box can be clicked."""
    box = element(
        "rect", x=x + 1, y=y + 1, width=width - 3, height=height - 2, rx=6, class_=f"item {place.look}".strip(),
        style=f"--a:{min(1, place.share):.3f}",
    )  # fmt: skip
    text = element("text", short(place.text), x=x + width / 2, y=y + height / 2 + 6, text_anchor="middle")
    title = [element("title", place.title)] if place.title else []
    return [element("g", *title, box, text, data_pick=place.pick, class_="pick" if place.pick else None)]
