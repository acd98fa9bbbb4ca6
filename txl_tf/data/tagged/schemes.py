"""Other schemes of tags than BIO, BIOES and BMES. All entities of a file together show which scheme it has.

    scheme                an entity of one token    of several    directly after one of the same kind
    BIO                   B                         B I I         the same
    IOB1 (CoNLL-2003)     I                         I I I         B, B I I
    IO                    I                         I I I         no mark: the two are read as one entity
    BIOES (BMES, BILOU)   S (S, U)                  B I E         the same
    BIE without S         B, or E                   B I E         the same
    IOE2                  E                         I I E         the same
    IOE1                  I                         I I I         the first one of the two ends with E

`spans_of` reads all of them. But a model of BIO or BIOES cannot predict tags that break its scheme. So a file in
another scheme is converted, and a file with a few mistakes is not.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from txl_tf.data.tagged.columns import TaggedSentence, line_of, numbered_tags, tags_of
from txl_tf.data.tagged.tags import NONE, SCHEMES, broken_at, convert_tags, detect_scheme, is_bilou, spans_of, split_tag
from txl_tf.errors import ParameterError, brief

TOO_MANY_MISTAKES = "mixed"  # in place of a scheme: too many entities break each scheme
BOTH_I_AND_M = "several schemes"  # in place of a scheme: a file with both I and M
FEW = 0.05  # largest fraction of the entities of a file that may break its scheme by mistake
CERTAIN = 10  # fewer entities that break a scheme are always mistakes

logger = logging.getLogger("txl_tf")


class _Entity(NamedTuple):
    """An entity in a file."""

    kind: str
    prefixes: str  # one character for each of its tags; I for M, E for L, S for U
    follows: bool  # whether an entity of the same kind ends directly before it
    followed: bool  # whether an entity of the same kind begins directly after it


def _entities_of(tags: Sequence[str]) -> list[_Entity]:
    """Returns the entities of a sentence, with the prefixes of their tags and with their neighbours."""
    prefixes = "".join("I" if split_tag(tag)[0] == "M" else split_tag(tag)[0] for tag in tags)
    spans = spans_of(tags)
    ends = {(span.kind, span.end) for span in spans}
    starts = {(span.kind, span.start) for span in spans}
    return [
        _Entity(kind, prefixes[start:end], (kind, start) in ends, (kind, end) in starts) for kind, start, end in spans
    ]


# Each of these functions says whether an entity follows a scheme.


def _bio(entity: _Entity) -> bool:
    """Whether the first prefix is B."""
    return entity.prefixes[0] == "B"


def _bioes(entity: _Entity) -> bool:
    """Whether the prefixes are B, I, ..., I, E; or S for a single token."""
    n = len(entity.prefixes)
    return entity.prefixes == ("S" if n == 1 else "B" + "I" * (n - 2) + "E")


def _iob1(entity: _Entity) -> bool:
    """Whether the first prefix is B after an entity of the same kind, and otherwise I."""
    return entity.prefixes[0] == ("B" if entity.follows else "I")


def _io(entity: _Entity) -> bool:
    """Whether the first prefix is I."""
    return entity.prefixes[0] == "I"


def _without_s(entity: _Entity) -> bool:
    """Whether the prefixes are B, I, ..., I, E; or B or E for a single token."""
    return entity.prefixes in ("B", "E") or (_bioes(entity) and entity.prefixes != "S")


def _ioe2(entity: _Entity) -> bool:
    """Whether the last prefix is E, and the others are I."""
    return entity.prefixes == "I" * (len(entity.prefixes) - 1) + "E"


def _ioe1(entity: _Entity) -> bool:
    """Whether the last prefix is E before an entity of the same kind, and all other prefixes are I."""
    return entity.prefixes == "I" * (len(entity.prefixes) - 1) + ("E" if entity.followed else "I")


_STANDARD = {"bio": _bio, "bioes": _bioes, "bmes": _bioes}


def other_scheme(sentences: Iterable[Sequence[str]], scheme: str, has_single: bool) -> str | None:
    """Returns the scheme of a file whose tags break `scheme` too often; otherwise `None`.

    Args:
        sentences: the tags of each sentence.
        scheme: "bio", "bioes" or "bmes", by the prefixes of the tags.
        has_single: whether this file or another file of the corpus has an S or a U.

    Returns:
        A name such as "IOB1" if at most 5% of the entities break that scheme, and fewer than break `scheme`. Otherwise
        `TOO_MANY_MISTAKES` if at least 10 entities break `scheme`, and these are more than 5% of all; or if that is so
        among the entities of one kind. Otherwise `None`.
    """
    entities = [entity for tags in sentences for entity in _entities_of(tags)]
    total = Counter(entity.kind for entity in entities)
    broken = Counter(entity.kind for entity in entities if not _STANDARD[scheme](entity))
    if scheme == "bio":
        rules = {"IO": _io, "IOB1": _iob1}
    else:
        rules = {"IOE2": _ioe2, "IOE1": _ioe1}
        if not has_single:
            rules = {f"{'BME' if scheme == 'bmes' else 'BIE'} without S": _without_s, **rules}
    exceptions = {name: sum(not rule(entity) for entity in entities) for name, rule in rules.items()}
    best = min(exceptions, key=exceptions.__getitem__)
    if exceptions[best] < broken.total() and exceptions[best] <= FEW * len(entities):
        return best
    counts = [(broken.total(), len(entities)), *((broken[kind], total[kind]) for kind in broken)]
    return TOO_MANY_MISTAKES if any(wrong >= CERTAIN and wrong > FEW * n for wrong, n in counts) else None


# ------------------------------------------------------------------------------------------------------------- files


def in_one_scheme(
    texts: dict[str, list[TaggedSentence]], names: dict[str, str], wanted: str | None, as_before: bool = False
) -> tuple[dict, str]:
    """Returns `texts` in one scheme, and this scheme: "bio", "bioes", "bmes" or "none".

    With `wanted`, all files are converted to this scheme. Otherwise the scheme is that of the training sentences, and
    only files in BILOU or in a scheme of `other_scheme` are converted to it. Logs what was converted, and a warning
    about mistakes. The scheme "none" changes nothing.

    Args:
        texts: `{split: sentences}`, "train" first if there are several.
        names: `{split: name}` for messages.
        wanted: the scheme to convert to; `None`: the scheme of the training sentences.
        as_before: whether `other_scheme` is not used, as in earlier versions: to resume their runs.

    Raises:
        ParameterError: without `wanted`, a file mixes schemes or has another scheme than the training sentences.
    """
    if wanted == NONE:
        return texts, NONE
    schemes = {split: _scheme_of(text, names[split], bool(wanted)) for split, text in texts.items()}
    target = wanted or schemes["train"]
    if target == "bmes" and not wanted and "bioes" in schemes.values() and "M" not in _prefixes(texts["train"]):
        # B, E and S are of both schemes, and only another file has an entity of three tokens: it has I, not M.
        target = "bioes"
    has_single = any("S" in _prefixes(text) for text in texts.values())
    converted = {}
    actual_schemes = {}  # split -> the scheme that its file really has, if it is not one of `SCHEMES`
    if target is None:  # for the type checker: `_scheme_of` returns None only with `wanted`
        raise ParameterError("tag_scheme", wanted, list(SCHEMES))
    for split, text in texts.items():
        if not wanted:
            _check_prefixes(text, names, split, target)
        own = schemes[split] if wanted else target
        broken = [(sentence, i) for sentence in text for i in broken_at(sentence.tags, own)] if own else []
        actual = None
        if not own:
            actual = BOTH_I_AND_M
        elif any(map(is_bilou, tags_of(text))):
            actual = "BILOU"
        elif broken and not as_before:
            actual = other_scheme((sentence.tags for sentence in text), own, has_single)
        if actual == "IO" and actual_schemes.get("train") == "IOB1":
            actual = "IOB1"  # IOB1 is IO where no entity directly follows one of its kind
        actual_schemes[split] = actual
        is_converted = bool(wanted or actual or actual_schemes.get("train"))
        _log_broken_tags(text, names[split], broken, own, actual, target if is_converted else None)
        if is_converted:
            text = [sentence._replace(tags=convert_tags(sentence.tags, target)) for sentence in text]
        converted[split] = text
    return converted, target


def _prefixes(text: list[TaggedSentence]) -> set[str]:
    """Returns the different prefixes of the tags in a file."""
    return {split_tag(tag)[0] for tag in tags_of(text)}


def _scheme_of(text: list[TaggedSentence], name: str, may_mix: bool) -> str | None:
    """Returns the scheme of the tags of a file; `None` if they mix schemes and `may_mix` is true.

    Raises:
        ParameterError: the tags mix schemes, and `may_mix` is false. The message names the lines.
    """
    lines = {}
    for number, tag in numbered_tags(text):
        lines.setdefault(tag, number)
    try:
        return detect_scheme(lines)
    except ParameterError as error:
        if may_mix:
            return None
        line_of_i, line_of_m = (lines[tag] for tag in error.value)
        message = f"{name}, lines {line_of_i} and {line_of_m}: {error}; tag_scheme=bio, or another one, converts them"
        raise ParameterError(name, list(lines), "tags of one scheme", message) from error


def _check_prefixes(text: list[TaggedSentence], names: dict[str, str], split: str, scheme: str) -> None:
    """Raises ParameterError if a tag of a split has a prefix that `scheme`, of the training file, does not have."""
    for number, tag in numbered_tags(text):
        if split_tag(tag)[0] not in f"O{SCHEMES[scheme]}":
            where = f"{names[split]}, line {number}"
            message = (
                f"{where}: {brief(tag)} is not of the scheme {scheme}, as {names['train']} is; "
                f"tag_scheme={scheme} converts all files to one scheme"
            )
            raise ParameterError(where, tag, f"a tag of the scheme {scheme}", message)


def _log_broken_tags(
    text: list[TaggedSentence], name: str, broken: list, scheme: str | None, actual: str | None, target: str | None
) -> None:
    """Logs how the tags of a file in another scheme than BIO, BIOES or BMES are read, or a warning about mistakes.

    Args:
        text: the sentences of the file.
        name: name of the file.
        broken: `(sentence, position)` of the tags that break `scheme`.
        scheme: scheme of the tags by their prefixes; `None` if they mix schemes.
        actual: name of the scheme that the file really has, such as "IOB1"; `TOO_MANY_MISTAKES` if too many entities
            break every scheme; `BOTH_I_AND_M` if the file has both I and M (then `scheme` is `None`); `None` if it is
            `scheme`.
        target: the scheme that the tags are converted to; `None` if they are kept.
    """
    if actual and actual != TOO_MANY_MISTAKES:
        tags = [tag for sentence in text for tag in sentence.tags]
        numbers = {BOTH_I_AND_M: sum(tag != "O" for tag in tags), "BILOU": sum(map(is_bilou, tags))}
        logger.info(f"{name}: {actual}: {numbers.get(actual, len(broken)):,} tags read as {str(target).upper()}")
    elif broken:
        sentence, i = broken[0]
        done = (
            "all tags are rewritten" if target else "they do not change, and a tag that continues no entity begins one"
        )
        if actual == TOO_MANY_MISTAKES:
            done = f"too many for mistakes: all tags are read as {str(target).upper()}"
        logger.warning(
            f"{name}: {len(broken):,} tags break the scheme {scheme}, the first on line {line_of(sentence, i)} "
            f"({brief(sentence.tags[i])}); {done}"
        )
