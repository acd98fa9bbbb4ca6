"""Limits of the lengths of targets: the lengths in the training pairs, by the lengths of the sources, and a margin.

Sources are in groups by length. The first group has sources of up to 16 symbols; the limit doubles from group to group.
A run stores `longest_targets` of its training pairs; `target_limits` limits translations.

    longest_targets(pairs)            [40, 82]          sources of up to 16 symbols, and of up to 32
    target_limits([40, 82], 1000)     [144, 144, 256, ...]
"""

from __future__ import annotations

from typing import Any

import numpy as np

from txl_tf.data.pairs.parallel import Pairs

STEP = 16  # symbols of a source in the first group. Limits are rounded up to multiples of it


def rounded(length: Any) -> Any:
    """Rounds a length, or an array or tensor of lengths, up to a multiple of `STEP`."""
    return -(-length // STEP) * STEP


def group_ends(longest_source: int) -> list[int]:
    """Returns the largest number of symbols of a source in each group, up to the group of `longest_source`."""
    ends = [STEP]
    while ends[-1] < longest_source:
        ends.append(2 * ends[-1])
    return ends


def longest_targets(pairs: Pairs) -> list[int]:
    """Returns, for each group, the length of the longest target whose source is in this group or in an earlier one.

    Lengths are in symbols, with the end symbol. The first groups may have no source. They get the length of the first
    group that has one.
    """
    sources, targets = pairs.sources.lengths, pairs.targets.lengths
    longest = [int(targets[sources <= end].max(initial=0)) for end in group_ends(int(sources.max()))]
    return [length or next(filter(None, longest)) for length in longest]


def merged_lengths(one: list[int] | None, other: list[int]) -> list[int]:
    """Merges the `longest_targets` of two training texts, as if they were one text.

    Args:
        one: of the one text; `None` if it is unknown, then the result is `other`.
        other: of the other text.
    """
    if one is None:
        return other
    n = max(len(one), len(other))
    padded = [np.pad(lengths, (0, n - len(lengths)), mode="edge") for lengths in (one, other)]
    return np.maximum(*padded).tolist()


def target_limits(longest: list[int], max_len: int) -> list[int]:
    """Returns the largest length of a translation for each group of sources, in symbols with the end symbol.

    It is 1.5 times the length of the longest training target, plus 10, rounded up to a multiple of `STEP`, and at most
    `max_len`. The training targets of a group are those with sources of this group, of earlier groups and of the next
    group. For a group beyond all training sources, the length of the last group doubles from group to group.

    Args:
        longest: from `longest_targets`.
        max_len: most symbols of a source and of a target. The result has a limit for each group up to the one that has
            sources of this length.
    """
    last = len(longest) - 1
    expected = [longest[min(k + 1, last)] << max(0, k - last) for k in range(len(group_ends(max_len)))]
    return [min(rounded(length + length // 2 + 10), max_len) for length in expected]
