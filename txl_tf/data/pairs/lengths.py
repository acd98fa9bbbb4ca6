"""Limits of the lengths of targets: the lengths in the training pairs, by the lengths of the sources, and a margin.

The training sources are in groups: the first group has sources of up to 16 symbols, each further group sources of up to
twice as many. A run stores `longest_targets`; `target_limits` limits translations.

    longest_targets(pairs)            [40, 82]          sources of up to 16 symbols, and of up to 32
    target_limits([40, 82], 1000)     [144, 144, 272, ...]
"""

from __future__ import annotations

from typing import Any

import numpy as np

from txl_tf.data.pairs.parallel import Pairs

STEP = 16  # symbols. Lengths of sources, and limits, are rounded up to multiples of it


def rounded(length: Any) -> Any:
    """Rounds a length, or an array or tensor of lengths, up to a multiple of `STEP`."""
    return -(-length // STEP) * STEP


def group_ends(longest_source: int) -> list[int]:
    """Returns the most symbols of a source in each group, up to the group of `longest_source`."""
    ends = [STEP]
    while ends[-1] < longest_source:
        ends.append(2 * ends[-1])
    return ends


def longest_targets(pairs: Pairs) -> list[int]:
    """Returns the symbols, with ends, of the longest target whose source is in each group or in an earlier one.

    The first groups may have no source. They get the number of the first group that has one.
    """
    sources, targets = pairs.sources.lengths, pairs.targets.lengths
    longest = [int(targets[sources <= end].max(initial=0)) for end in group_ends(int(sources.max()))]
    return [length or next(filter(None, longest)) for length in longest]


def merged_lengths(one: list[int] | None, other: list[int]) -> list[int]:
    """Merges the `longest_targets` of two training runs, as if one run had both texts. `None`: `one` is unknown."""
    if one is None:
        return other
    n = max(len(one), len(other))
    padded = [np.pad(lengths, (0, n - len(lengths)), mode="edge") for lengths in (one, other)]
    return np.maximum(*padded).tolist()


def target_limits(longest: list[int], max_len: int) -> list[int]:
    """Returns the most symbols, with ends, of a target for the sources of each group, for a model with `max_len`.

    A target may have 1.5 times the symbols of the longest training target, plus 10. Training sources that are up to
    twice as long count, too. For sources longer than all training sources, the limit grows with the source.
    """
    last = len(longest) - 1
    expected = [longest[min(k + 1, last)] << max(0, k - last) for k in range(len(group_ends(max_len)))]
    return [min(rounded(length + length // 2 + 10), max_len) for length in expected]
