"""Tags of tokens and the entities that they mark: the schemes BIO, BIOES, BMES and BILOU, or none.

A tag is "O", outside of all entities, or a prefix and the kind of an entity, such as "B-PER". Tags of word segmentation
have no kind, such as "B". A tag continues the entity of the tag before it if both have the same kind, the earlier
prefix is B, I or M, and the later one is I, M or E. Every other tag except "O" begins an entity. So every sequence
marks entities, even a malformed one. The entities are the same as in fastNLP's `SpanFPreRecMetric` (which converts
kinds to lower case; here "per" and "PER" differ). L and U, the prefixes of BILOU, are other names of E and S. For IOB1,
IO and other schemes, in which I may begin an entity, see schemes.py.

In the scheme "none", any text is a tag, such as NOUN. Each token counts as an entity whose kind is the tag. Then
precision, recall and F1 are all the accuracy of the tags.

Shapes:
    K: labels
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from txl_tf.calls import checked_call
from txl_tf.errors import ParameterError, brief

SCHEMES = {"bio": "BI", "bioes": "BIES", "bmes": "BMES"}  # scheme -> its prefixes, without O
NONE = "none"
_INSIDE = {"bio": "I", "bioes": "I", "bmes": "M"}  # scheme -> prefix of a tag that neither begins nor ends an entity
_PREFIXES = frozenset("OBIMES")
_BIOES_PREFIX = {"L": "E", "U": "S"}  # last and unit -> end and single
_CONTINUED = frozenset("BIM")  # prefixes after which an entity may continue
_CONTINUING = frozenset("IME")  # prefixes that may continue an entity
_BEGINNING = frozenset("BSO")  # prefixes that continue no entity
_ENDING = frozenset("ESO")  # prefixes after which no entity may continue
_OUTSIDE = ("O", "")  # prefix and kind of "O"


class Span(NamedTuple):
    """An entity of the tokens from `start` to `end`."""

    kind: str
    start: int
    end: int  # exclusive


@functools.lru_cache(4096)
def split_tag(tag: str) -> tuple[str, str]:
    """Returns `(prefix, kind)`. Prefix L becomes E, and U becomes S. The kind of "O" and of a tag without one is "".

    Raises:
        ParameterError: the text is not a tag.
    """
    prefix, dash, kind = tag.partition("-")
    prefix = _BIOES_PREFIX.get(prefix, prefix)
    if prefix not in _PREFIXES or bool(dash) != bool(kind) or (prefix == "O" and kind):
        allowed = "O, or one of B, I, M, E, S with a kind or alone, or L or U of BILOU, as B-PER"
        way_out = "other tags, such as parts of speech, are of the scheme none"
        raise ParameterError("tag", tag, allowed, f"a tag must be {allowed}, got {brief(tag)}; {way_out}")
    return prefix, kind


def kind_of(tag: str, scheme: str | None = None) -> str:
    """Returns the kind of a tag, see `split_tag`; in the scheme "none", the tag itself."""
    return tag if scheme == NONE else split_tag(tag)[1]


def is_bilou(tag: str) -> bool:
    """Whether a tag has a prefix that only BILOU has."""
    return tag.partition("-")[0] in _BIOES_PREFIX


def detect_scheme(tags: Iterable[str]) -> str:
    """Returns the scheme of a collection of tags: "bio", "bioes" or "bmes". BILOU is "bioes".

    With E or S, but neither M, I, L nor U, a collection can be of BIOES or BMES: then it is "bmes".

    Raises:
        ParameterError: names a tag that no scheme has, or two tags that no scheme has together. In the second case, its
            value is a list of the two tags: one that BMES does not have, and one with M.
    """
    tags = list(tags)
    by_prefix = {split_tag(tag)[0]: tag for tag in tags}
    not_bmes = by_prefix.get("I") or next(filter(is_bilou, tags), None)  # a tag that BMES does not have, or `None`
    if "M" in by_prefix and not_bmes:
        both = [not_bmes, by_prefix["M"]]
        message = f"no scheme has both {brief(not_bmes)} and {brief(by_prefix['M'])}"
        raise ParameterError("tags", both, "tags of one scheme", message)
    if "M" in by_prefix:
        return "bmes"
    if "E" in by_prefix or "S" in by_prefix:
        return "bioes" if not_bmes else "bmes"
    return "bio"


def all_labels(kinds: Iterable[str], scheme: str, outside: bool = True) -> list[str]:
    """Returns all tags of a scheme: "O" if `outside`, then the tags of each kind, in the order of `SCHEMES`."""
    labels = [_join(prefix, kind) for kind in kinds for prefix in SCHEMES[scheme]]
    return ["O", *labels] if outside else labels


def _join(prefix: str, kind: str) -> str:
    """Returns the tag of a prefix and a kind, which may be ""."""
    return f"{prefix}-{kind}" if kind else prefix


# ---------------------------------------------------------------------------------------------------------- entities


def _continues(previous: tuple[str, str], current: tuple[str, str]) -> bool:
    """Whether a tag continues the entity of the previous tag; both are `(prefix, kind)`."""
    return previous[0] in _CONTINUED and current[0] in _CONTINUING and previous[1] == current[1]


def continues_table(labels: Sequence[str], scheme: str | None = None) -> np.ndarray:
    """Returns bool `[K, K]`: true in row i, column j if label j after label i continues the entity of label i."""
    if scheme == NONE:
        return np.zeros([len(labels), len(labels)], bool)
    parts = [split_tag(label) for label in labels]
    return np.array([[_continues(previous, current) for current in parts] for previous in parts], bool)


def entity_table(labels: Sequence[str], scheme: str | None = None) -> np.ndarray:
    """Returns bool `[K]`: true for labels that are part of an entity."""
    return np.array([label != "O" or scheme == NONE for label in labels], bool)


def spans_of(tags: Iterable[str], scheme: str | None = None) -> list[Span]:
    """Returns the entities that the tags of a sentence mark, in order.

    Args:
        tags: tags of the tokens of a sentence.
        scheme: with "none", each token is an entity. Otherwise, the tags themselves show their scheme.

    Raises:
        ParameterError: a text is not a tag.
    """
    if scheme == NONE:
        return [Span(tag, i, i + 1) for i, tag in enumerate(tags)]
    spans = []
    previous = _OUTSIDE
    for i, tag in enumerate(tags):
        current = split_tag(tag)
        if _continues(previous, current):
            spans[-1] = spans[-1]._replace(end=i + 1)
        elif current != _OUTSIDE:
            spans.append(Span(current[1], i, i + 1))
        previous = current
    return spans


def convert_tags(tags: Sequence[str], scheme: str) -> list[str]:
    """Returns the tags of `scheme`, one of `SCHEMES`, that mark the same entities as `tags`."""
    converted = ["O"] * len(tags)
    for kind, start, end in spans_of(tags):
        prefixes = ["B", *_INSIDE[scheme] * (end - start - 1)]
        if scheme != "bio":
            prefixes[-1] = "E" if end - start > 1 else "S"
        converted[start:end] = [_join(prefix, kind) for prefix in prefixes]
    return converted


def prf(right: int, predicted: int, expected: int) -> tuple[float, float, float]:
    """Returns precision, recall and F1, from 0 to 1. A ratio without entities is 0.

    Args:
        right: number of entities that are both predicted and expected.
        predicted: number of predicted entities.
        expected: number of expected entities.
    """
    precision = right / predicted if predicted else 0.0
    recall = right / expected if expected else 0.0
    return precision, recall, 2 * right / (predicted + expected) if right else 0.0


# ------------------------------------------------------------------------------------------------------- transitions


def _may_follow(previous: tuple[str, str], current: tuple[str, str], scheme: str) -> bool:
    """Whether the scheme allows tag `current` after `previous`, each as `(prefix, kind)`.

    Callers pass "O" for the start and the end of a sentence.
    """
    may_end = scheme == "bio" or previous[0] in _ENDING
    return _continues(previous, current) or (may_end and current[0] in _BEGINNING)


@checked_call
def allowed_transitions(labels: Sequence[str], scheme: str | None = None) -> np.ndarray | None:
    """Returns bool `[K + 2, K + 2]`: true if the label of the column may follow the label of the row.

    Row K is the start of a sentence, column K + 1 its end. The table is the same as that of fastNLP's
    `allowed_transitions(..., include_start_end=True)`.

    Args:
        labels: labels of one scheme, which they show: see `detect_scheme`.
        scheme: `None` is the scheme that `detect_scheme` finds. With "none", the result is `None`: every transition is
            allowed. Another scheme must have all tags of the labels.

    Raises:
        ParameterError: the labels have no common scheme, or `scheme` does not have all of them.
    """
    if scheme == NONE:
        return None
    n = len(labels)
    parts = [*map(split_tag, labels), _OUTSIDE]
    detected = detect_scheme(labels)
    prefixes = {prefix for prefix, _ in parts}
    fitting = [name for name in SCHEMES if prefixes <= {"O", *SCHEMES[name]}]
    if scheme is not None and scheme not in fitting:
        raise ParameterError("scheme", scheme, f"None, {NONE} or a scheme of the labels, {' or '.join(fitting)}")
    scheme = scheme or detected
    table = np.zeros([n + 2, n + 2], bool)
    inner = [[_may_follow(previous, current, scheme) for current in parts] for previous in parts]
    table[: n + 1, [*range(n), n + 1]] = inner
    table[n, n + 1] = False  # no sentence is empty
    return table


def broken_at(tags: Sequence[str], scheme: str | None = None) -> list[int]:
    """Returns the positions of the tags in a sentence that break their scheme.

    Such a tag should continue an entity, but there is none; or it is the last tag of an entity that it does not end.

    Args:
        tags: tags of a sentence.
        scheme: the scheme of the tags; `None`: the result of `detect_scheme(tags)`.
    """
    scheme = scheme or detect_scheme(tags)
    parts = [_OUTSIDE, *map(split_tag, tags), _OUTSIDE]  # tag i is parts[i + 1]
    breaks = [i for i in range(len(parts) - 1) if not _may_follow(parts[i], parts[i + 1], scheme)]
    return sorted({i - 1 if parts[i + 1][0] in _BEGINNING else i for i in breaks})


def unused_labels(labels: Sequence[str], scheme: str | None = None) -> list[str]:
    """Returns the labels that no allowed sequence of labels contains, such as I-A of the labels ["O", "I-A"].

    In the scheme "none", there are no such labels. `scheme`: see `allowed_transitions`.
    """
    allowed = allowed_transitions(labels, scheme)
    n = len(labels)
    if allowed is None:
        return []
    steps = allowed[:n, :n].astype(int)
    # Bool [K]: which labels can be reached from the start of a sentence, and from which its end can be reached.
    reached, ending = allowed[n, :n], allowed[:n, n + 1]
    for _ in labels:  # no shortest path has more steps than there are labels
        reached = reached | (reached @ steps > 0)
        ending = ending | (steps @ ending > 0)
    return [label for label, used in zip(labels, reached & ending, strict=True) if not used]
