"""How long targets may become: the lengths that training has seen, by the lengths of the sources, and a margin.

The sources of a training are in groups: the first has sources of up to 16 symbols, every further group sources of up to
twice as many. `longest_targets` is what a run records, `target_limits` what a translation may take.

    longest_targets(pairs)            [40, 82]          sources of up to 16 symbols, and of up to 32
    target_limits([40, 82], 1000)     [144, 144, 272, ...]
"""

from __future__ import annotations

import numpy as np

from txl_tf.data.pairs.parallel import Pairs

STEP = 16  # symbols: the lengths of sources and limits are rounded up to multiples of it


def rounded(length):
    """A length, or an array or tensor of them, rounded up to a multiple of `STEP`."""
    return -(-length // STEP) * STEP


def group_ends(longest_source: int) -> list[int]:
    """Most symbols of a source in each group, up to the group that has `longest_source`."""
    ends = [STEP]
    while ends[-1] < longest_source:
        ends.append(2 * ends[-1])
    return ends


def longest_targets(pairs: Pairs) -> list[int]:
    """Symbols of the longest target whose source is in each group or in one before it, ends included.

    Where the first groups have no source, they have the number of the first one that has.
    """
    sources, targets = pairs.sources.lengths, pairs.targets.lengths
    found = [int(targets[sources <= end].max(initial=0)) for end in group_ends(int(sources.max()))]
    return [length or next(filter(None, found)) for length in found]


def merged_lengths(one: list[int] | None, other: list[int]) -> list[int]:
    """The `longest_targets` of two trainings as those of one training on both; `one` may be unknown."""
    if one is None:
        return other
    n = max(len(one), len(other))
    padded = [np.pad(lengths, (0, n - len(lengths)), mode="edge") for lengths in (one, other)]
    return np.maximum(*padded).tolist()


def target_limits(longest: list[int], max_len: int) -> list[int]:
    """Most symbols of a target for the sources of each group, ends included, where the model can read `max_len`.

    A target may be half as long again as the longest one of the training, and 10 symbols more. The training's sources
    that are up to twice as long count too. For sources longer than those of the training, targets grow as they do.
    """
    last = len(longest) - 1
    most = [longest[min(k + 1, last)] << max(0, k - last) for k in range(len(group_ends(max_len)))]
    return [min(rounded(length + length // 2 + 10), max_len) for length in most]
