"""Files of pairs to lines: columns of one file, or two files; lines that cannot be used are left out if asked.

reader = PairReader(PairFilesConfig(skip_bad_lines=True), levels=("char", "word"))
source, target = reader.read("pairs.tsv")       # `SideText`s: lines, and their numbers in the file
for sentence in reader.said: ...                # such as "pairs.tsv: 3 columns; source and target are 1 and 2"
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from txl_config.data import PairFilesConfig
from txl_tf.data.text_files import numbered_lines
from txl_tf.errors import ParameterError, shortened
from txl_tf.schema import check_left_out

SIDES = ("source", "target")
RESERVED = ("<pad>", "<s>", "</s>")  # words that are no text at level "word"
WAY_OUT = "skip_bad_lines leaves such lines out"
_MOST_COLUMNS = 3  # of a file whose columns nobody names: source, target and what is said of them


@dataclasses.dataclass
class SideText:
    """The lines of a side.

    Attributes:
        lines: list of str, each with its newline.
        name: of the file, for messages.
        side: "source" or "target".
        numbers: int `[lines]`, the number of each in its file, from 1.
    """

    lines: list[str]
    name: str
    side: str
    numbers: np.ndarray

    def take(self, chosen: np.ndarray) -> SideText:
        """The lines where the bool array `[lines]` says so."""
        lines = [line for line, taken in zip(self.lines, chosen, strict=True) if taken]
        return SideText(lines, self.name, self.side, self.numbers[chosen])


def sides_of(
    pairs: Sequence[Sequence[str]], names: Sequence[str], numbers: Iterable[int] | None = None
) -> tuple[SideText, SideText]:
    """Both sides of pairs `(source, target)` from the files `names`."""
    numbers = np.arange(1, len(pairs) + 1) if numbers is None else np.array([*numbers], int)
    lines = [[f"{pair[i]}\n" for pair in pairs] for i in range(2)]
    return tuple(SideText(*side, numbers) for side in zip(lines, names, SIDES, strict=True))


class Skipped:
    """Counts the lines of a file that are left out, by the kind of what is wrong with them."""

    def __init__(self):
        self.counts, self.first = collections.Counter(), None

    def add(self, kind: str, number: int, reason: str) -> None:
        self.counts[kind] += 1
        if self.first is None or number < self.first[0]:
            self.first = number, reason

    def describe(self, name: str) -> str:
        """A sentence about the lines of the file `name`."""
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in self.counts.items())
        number, reason = self.first
        total = f"{sum(self.counts.values()):,}"
        return f"{name}: lines left out by skip_bad_lines: {total} ({kinds}); the first is line {number}: {reason}"


class PairReader:
    """Reads files of pairs.

    Args:
        config: which columns, and whether to leave out lines that cannot be used.
        levels: what a token is, of sources and of targets.

    Attributes:
        said: sentences about what was read: columns that are not used, lines that are left out.
    """

    def __init__(self, config: PairFilesConfig | None = None, levels: Sequence[str] = ("char", "char")):
        self.config, self.levels, self.said = config or PairFilesConfig(), levels, []

    def read(self, path: str | Iterable[str]) -> tuple[SideText, SideText]:
        """Sources and targets of one file of `source<TAB>target` lines, or of two files.

        Args:
            path: of the file; or two, as a list or separated by a comma.

        Raises:
            ValueError: files of different length, a line of other columns, ...: names file and line.
            FileNotFoundError: a file does not exist.
        """
        paths, skipped = path.split(",") if isinstance(path, str) else list(map(str, path)), Skipped()
        if len(paths) > 2:
            raise ValueError(
                f"pairs must be in one file, or in two of sources and targets, got {shortened(', '.join(paths), 300)}"
            )
        texts = [without_ends(read_lines(path)) for path in paths]
        if len(texts) == 1:
            numbers, pairs = self._columns(paths[0], [line.split("\t") for line in texts[0]], skipped)
        else:
            check_left_out(self.config.columns, f"{' and '.join(paths)} have one column each")
            counts = list(map(len, texts))
            if counts[0] != counts[1]:
                found = f"{paths[0]} has {counts[0]:,} lines and {paths[1]} has {counts[1]:,}"
                raise ValueError(f"{found}: they must be pairs")
            numbers, pairs = range(1, counts[0] + 1), list(zip(*texts, strict=True))
        if self.config.skip_bad_lines:
            numbers, pairs = self._without_bad(" and ".join(paths), numbers, pairs, skipped)
        return sides_of(pairs, paths * 2 if len(paths) == 1 else paths, numbers)

    def _without_bad(self, name: str, numbers: Iterable[int], pairs: list, skipped: Skipped) -> tuple[list, list]:
        """Numbers and pairs that can be used, of the file or the files `name`."""
        kept = []
        for number, pair in zip(numbers, pairs, strict=True):
            wrong = self._why_bad(pair)
            if wrong is None:
                kept.append((number, pair))
            else:
                skipped.add(wrong[0], number, wrong[1])
        if skipped.counts:
            self.said.append(skipped.describe(name))
        if not kept:
            raise ValueError(f"{name} has no pair left: skip_bad_lines leaves out all lines")
        numbers, pairs = zip(*kept, strict=True)
        return list(numbers), list(pairs)

    def _columns(self, name: str, rows: list[list[str]], skipped: Skipped) -> tuple[list[int], list[tuple[str, str]]]:
        """Line numbers and pairs of the rows of a file."""
        columns = self.config.columns
        source, target = columns["source_column"] or 1, columns["target_column"] or 2
        widths = collections.Counter(len(row) for row in rows if row != [""])
        usual = max(2, widths.most_common(1)[0][0]) if widths else 2
        chosen = any(columns.values())
        if not chosen and usual > _MOST_COLUMNS:
            message = f"{name} has {usual} columns: source_column and target_column must name those of the pairs"
            raise ParameterError("source_column", None, f"1 to {usual}", message)
        if usual > 2:
            said = f"{name}: {usual} columns; the source is column {source}, the target is column {target}"
            self.said.append(said)
        numbers, pairs = [], []
        for number, row in enumerate(rows, 1):
            if len(row) >= max(source, target) if chosen else len(row) == usual:
                numbers.append(number)
                pairs.append((row[source - 1], row[target - 1]))
                continue
            tabs = f"got {len(row) - 1} tabs"
            must = f"must be source<TAB>target, {tabs}" if usual == 2 else f"must have {usual} columns, {tabs}"
            if not self.config.skip_bad_lines:
                raise ValueError(f"{name}, line {number} {must}; {WAY_OUT}")
            kind, reason = ("empty", "it is empty") if row == [""] else ("of other columns", f"it {must}")
            skipped.add(kind, number, reason)
        return numbers, pairs

    def _why_bad(self, pair: tuple[str, str]) -> tuple[str, str] | None:
        """What is wrong with a pair, its kind and a reason; `None` if it can be used."""
        for line, side, level in zip(pair, SIDES, self.levels, strict=True):
            if not line.strip():
                return "empty", f"the {side} is empty"
            line = line.lower() if getattr(self.config, "lower_case", False) else line
            if level == "word" and not set(line.split()).isdisjoint(RESERVED):
                return "with reserved words", f"the {side} has one of {', '.join(RESERVED)}, which are no text"
        return None


def read_lines(path: str) -> list[str]:
    """The lines of a UTF-8 file, each with its newline; `\\r\\n` ends one too. A byte order mark is left out."""
    return [f"{line}\n" for _, line in numbered_lines(path)]


def without_ends(lines: Iterable[str]) -> list[str]:
    """Lines of `read_lines` without their newlines."""
    return [line.removesuffix("\n") for line in lines]
