"""How right tags are: precision, recall and F1 by kind of entity, and what was taken for what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from txl_tf.data.tagged.tags import Span, prf, spans_of

ALL = "all"
NONE = "(none)"  # no entity at this place


def score_table(found: Sequence[Sequence[str]], expected: Sequence[Sequence[str]]) -> list[tuple]:
    """Rows `(kind, precision, recall, f1, entities)`, kinds in alphabetical order, then all of them together.

    Args:
        found, expected: tags of every sentence.
    """
    right, of_found, of_expected = Counter(), Counter(), Counter()
    for spans, truth in _spans_of_both(found, expected):
        of_found.update(span.kind for span in spans)
        of_expected.update(span.kind for span in truth)
        right.update(span.kind for span in spans & truth)
    kinds = sorted({*of_found, *of_expected})
    counts = [(kind, right[kind], of_found[kind], of_expected[kind]) for kind in kinds]
    counts.append((ALL, right.total(), of_found.total(), of_expected.total()))
    return [(kind, *prf(r, f, e), e) for kind, r, f, e in counts]


def confusion(found: Sequence[Sequence[str]], expected: Sequence[Sequence[str]]) -> dict[tuple[str, str], int]:
    """`{(expected kind, found kind): number}` of places, first and last element, that either has an entity at.

    A place that only one of the two has is an entity of the kind `NONE` to the other: missed, wrongly cut, or made up.
    """
    table = Counter()
    for spans, truth in _spans_of_both(found, expected):
        here, there = ({span[1:]: span.kind for span in side} for side in (spans, truth))
        table.update((there.get(place, NONE), here.get(place, NONE)) for place in {*here, *there})
    return dict(table)


def _spans_of_both(found: Sequence, expected: Sequence) -> list[tuple[set[Span], set[Span]]]:
    return [({*spans_of(tags)}, {*spans_of(truth)}) for tags, truth in zip(found, expected, strict=True)]


def format_scores(rows: list[tuple]) -> str:
    """`score_table` as text."""
    width = max(len(kind) for kind, *_ in rows)
    lines = [f"{'kind':<{width}}  precision  recall      F1  entities"]
    for kind, precision, recall, f1, number in rows:
        lines.append(f"{kind:<{width}}  {precision:>9.2%}  {recall:>6.2%}  {f1:>6.2%}  {number:>8,}")
    return "\n".join(lines)


def format_confusion(table: dict[tuple[str, str], int]) -> str:
    """`confusion` as text: a row for every expected kind, a column for every kind that was found."""
    kinds = [*sorted({kind for pair in table for kind in pair} - {NONE}), NONE]
    width = max(map(len, kinds)) + 2
    lines = [f"{'expected / found':<{max(width, 18)}}" + "".join(f"{kind:>{width}}" for kind in kinds)]
    for row in kinds:
        cells = "".join(f"{table.get((row, column), 0) or '.':>{width}}" for column in kinds)
        lines.append(f"{row:<{max(width, 18)}}{cells}")
    return "\n".join(lines)
