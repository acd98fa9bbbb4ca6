"""How right translations are: lines and symbols that are wrong, BLEU and chrF."""

from __future__ import annotations

import importlib.util
import itertools

import numpy as np
import tensorflow as tf


def group_references(sources: list[str], targets: list[str]) -> dict[str, list[str]]:
    """`{source: its targets}`: a source may stand on several lines, each with a target that is right."""
    references = {}
    for source, target in zip(sources, targets, strict=True):
        references.setdefault(source, []).append(target)
    return references


def error_rates(translations: list[str], references: list[list[str]], level: str) -> dict[str, float]:
    """`"lines"` and `"symbols"` that are wrong, as shares.

    A line is right where it equals one of its references. Wrong symbols are the edits to the nearest reference (those
    that turn the one into the other: to insert, delete, replace), over the symbols of these references.

    Args:
        translations: a text for every source.
        references: the right ones of every source, at least one.
        level: what a symbol is: "word" or "char".
    """
    pairs = [(i, text, right) for i, text in enumerate(translations) for right in references[i]]
    rows, texts, rights = zip(*pairs, strict=True)
    found, right = ([_symbols(text, level) for text in side] for side in (texts, rights))
    distances, lengths = _edit_distances(found, right), np.array(list(map(len, right)))
    order = np.lexsort([lengths, distances, rows])  # the nearest reference of every row first
    nearest = order[np.unique(np.array(rows)[order], return_index=True)[1]]
    wrong = np.mean([text not in right for text, right in zip(translations, references, strict=True)])
    return {"lines": float(wrong), "symbols": float(distances[nearest].sum() / lengths[nearest].sum())}


def _symbols(text: str, level: str) -> list[str]:
    return text.split() if level == "word" else list(text)


def _edit_distances(found: list[list[str]], right: list[list[str]]) -> np.ndarray:
    def sparse(side):
        symbols = list(itertools.chain.from_iterable(side))
        return tf.RaggedTensor.from_row_lengths(symbols, list(map(len, side))).to_sparse()

    return tf.edit_distance(sparse(found), sparse(right), normalize=False).numpy()


def corpus_scores(translations: list[str], references: list[list[str]]) -> dict[str, str]:
    """BLEU and chrF by sacrebleu, each as it prints them; empty where it is not installed."""
    if importlib.util.find_spec("sacrebleu") is None:
        return {}
    import sacrebleu  # an extra

    most = max(map(len, references))
    columns = [[right[i] if i < len(right) else None for right in references] for i in range(most)]
    scores = sacrebleu.corpus_bleu(translations, columns), sacrebleu.corpus_chrf(translations, columns)
    return {score.name: score.format(width=2) for score in scores}
