"""Reads files of pairs: two columns of one file, or two files. Can leave out lines that cannot be used.

reader = PairReader(PairFilesConfig(skip_bad_lines=True), levels=("char", "word"))
source, target = reader.read("pairs.tsv")       # `SideText`s: lines, and their numbers in the file
for sentence in reader.said: ...                # such as "pairs.tsv: 3 columns; the source is column 1, ..."
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from txl_config.data import PairFilesConfig
from txl_tf.data import inputs
from txl_tf.data.text_files import numbered_lines
from txl_tf.errors import ParameterError, shortened
from txl_tf.schema import check_left_out

SIDES = ("source", "target")
RESERVED = ("<pad>", "<s>", "</s>")  # special symbols, which a text must not contain at level "word"
WAY_OUT = "skip_bad_lines leaves such lines out"  # the advice of errors about a line
_MOST_COLUMNS = 3  # without source_column and target_column: source, target and a comment


@dataclasses.dataclass
class SideText:
    """The lines of one side, the sources or the targets.

    Attributes:
        lines: list of str, each with its newline.
        name: name of the file, for messages.
        side: "source" or "target".
        numbers: int `[lines]`, the number of each line in its file, from 1.
    """

    lines: list[str]
    name: str
    side: str
    numbers: np.ndarray

    def take(self, is_taken: np.ndarray) -> SideText:
        """Returns the lines for which the bool array `is_taken`, `[lines]`, is true."""
        lines = [line for line, taken in zip(self.lines, is_taken, strict=True) if taken]
        return SideText(lines, self.name, self.side, self.numbers[is_taken])


def sides_of(
    pairs: Sequence[Sequence[str]], names: Sequence[str], numbers: Iterable[int] | None = None
) -> tuple[SideText, SideText]:
    """Returns the sources and the targets of pairs. Each line of the results ends with a newline.

    Args:
        pairs: `(source, target)`, lines without newlines.
        names: names of the file of the sources and of the file of the targets, for messages.
        numbers: line numbers of the pairs; by default they are counted from 1.
    """
    all_numbers = np.arange(1, len(pairs) + 1) if numbers is None else np.array([*numbers], int)
    sources, targets = ([f"{pair[i]}\n" for pair in pairs] for i in range(2))
    source_name, target_name = names
    source = SideText(sources, source_name, "source", all_numbers)
    return source, SideText(targets, target_name, "target", all_numbers)


class Skipped:
    """Counts the lines of a file, or of two, that are left out, by the kind of mistake.

    Attributes:
        counts: kind of mistake -> number of lines.
        first: number of the first line that is left out, and the reason; `(0, "")` if there is none.
    """

    def __init__(self):
        self.counts: collections.Counter[str] = collections.Counter()
        self.first = (0, "")

    def add(self, kind: str, number: int, reason: str) -> None:
        """Counts line `number`. Lines may come in any order."""
        if not self.counts or number < self.first[0]:
            self.first = (number, reason)
        self.counts[kind] += 1

    def describe(self, name: str) -> str:
        """Returns a sentence about the lines of the file `name` that are left out; there must be at least one."""
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in self.counts.items())
        number, reason = self.first
        total = f"{self.counts.total():,}"
        return f"{name}: lines left out by skip_bad_lines: {total} ({kinds}); the first is line {number}: {reason}"


class PairReader:
    """Reads files of pairs.

    Args:
        config: the columns, and whether to skip lines that cannot be used.
        levels: of tokens in sources and in targets. At level "word", a line must not contain `RESERVED` words.

    Attributes:
        said: sentences about unused columns and skipped lines of the files that `read` has read.
    """

    def __init__(self, config: PairFilesConfig | None = None, levels: Sequence[str] = ("char", "char")):
        self.config = config or PairFilesConfig()
        self.levels = levels
        self.said: list[str] = []

    def read(self, path: str | Iterable[str]) -> tuple[SideText, SideText]:
        """Reads sources and targets from one file of `source<TAB>target` lines, or from two files.

        Args:
            path: path of the file; or of two files, as a list or separated by a comma.

        Raises:
            ParameterError: the files have different numbers of lines; a line has too few or too many columns, and there
                is no `skip_bad_lines`; no pair is left; ...: names file and line.
            FileNotFoundError: a file does not exist.
        """
        paths = pair_paths(path)
        skipped = Skipped()
        if len(paths) > 2:
            allowed = "in one file, or in two of sources and targets"
            message = f"pairs must be {allowed}, got {shortened(', '.join(paths), 300)}"
            raise ParameterError("path", paths, "one file, or two of sources and targets", message)
        texts = [without_ends(read_lines(path)) for path in paths]
        if len(texts) == 1:
            numbers, pairs = self._columns(paths[0], [line.split("\t") for line in texts[0]], skipped)
        else:
            check_left_out(self.config.columns, f"{' and '.join(paths)} have one column each")
            counts = list(map(len, texts))
            if counts[0] != counts[1]:
                counts_of_lines = f"{paths[0]} has {counts[0]:,} lines and {paths[1]} has {counts[1]:,}"
                raise ParameterError(
                    "path", paths, "files of equally many lines", f"{counts_of_lines}: they must be pairs"
                )
            numbers = range(1, counts[0] + 1)
            pairs = list(zip(*texts, strict=True))
        if self.config.skip_bad_lines:
            numbers, pairs = self._without_bad(" and ".join(paths), numbers, pairs, skipped)
        return sides_of(pairs, paths * 2 if len(paths) == 1 else paths, numbers)

    def _without_bad(self, name: str, numbers: Iterable[int], pairs: list, skipped: Skipped) -> tuple[list, list]:
        """Returns `(numbers, pairs)` of the pairs that can be used. Counts the others in `skipped`.

        Adds a sentence about all skipped lines, also those that `_columns` left out, to `said`. Raises ParameterError
        if no pair can be used.

        Args:
            name: name of the file or the files, for messages.
            numbers: line numbers of `pairs`.
            pairs: the pairs.
            skipped: contains the lines that `_columns` left out.
        """
        usable = []
        for number, pair in zip(numbers, pairs, strict=True):
            wrong = self._why_bad(pair)
            if wrong is None:
                usable.append((number, pair))
            else:
                skipped.add(wrong[0], number, wrong[1])
        if skipped.counts:
            self.said.append(skipped.describe(name))
        if not usable:
            message = f"{name} has no pair left: skip_bad_lines leaves out all lines"
            raise ParameterError(name, None, "a file with a pair", message)
        return [number for number, _ in usable], [pair for _, pair in usable]

    def _columns(self, name: str, rows: list[list[str]], skipped: Skipped) -> tuple[list[int], list[tuple[str, str]]]:
        """Returns `(numbers, pairs)` of the rows of a file: the numbers of their lines, and the pairs in them.

        With `source_column` or `target_column`, a row can be used if it has both columns; otherwise, if it is as wide
        as most rows. Counts the other rows in `skipped`. Without `skip_bad_lines`, such a row raises ParameterError. So
        do rows of more than three columns without `source_column` and `target_column`.
        """
        columns = self.config.columns
        source = columns["source_column"] or 1
        target = columns["target_column"] or 2
        widths = collections.Counter(len(row) for row in rows if row != [""])
        usual = max(2, widths.most_common(1)[0][0]) if widths else 2
        has_chosen_columns = any(columns.values())
        if not has_chosen_columns and usual > _MOST_COLUMNS:
            message = f"{name} has {usual} columns: source_column and target_column must select two"
            raise ParameterError("source_column", None, f"1 to {usual}", message)
        if usual > 2:
            sentence = f"{name}: {usual} columns; the source is column {source}, the target is column {target}"
            self.said.append(sentence)
        numbers = []
        pairs = []
        for number, row in enumerate(rows, 1):
            if len(row) >= max(source, target) if has_chosen_columns else len(row) == usual:
                numbers.append(number)
                pairs.append((row[source - 1], row[target - 1]))
                continue
            if has_chosen_columns:
                allowed = f"at least {max(source, target)} columns"
                must = f"must have {allowed}, got {len(row)}"
            else:
                allowed = f"{usual} columns"
                tabs = f"got {len(row) - 1} tabs"
                must = f"must be source<TAB>target, {tabs}" if usual == 2 else f"must have {usual} columns, {tabs}"
            if not self.config.skip_bad_lines:
                where = f"{name}, line {number}"
                raise ParameterError(where, "\t".join(row), f"a line of {allowed}", f"{where} {must}; {WAY_OUT}")
            kind, reason = ("empty", "it is empty") if row == [""] else ("of other columns", f"it {must}")
            skipped.add(kind, number, reason)
        return numbers, pairs

    def _why_bad(self, pair: tuple[str, str]) -> tuple[str, str] | None:
        """Returns the kind of mistake of a pair, for `Skipped`, and the reason; `None` if the pair can be used."""
        for line, side, level in zip(pair, SIDES, self.levels, strict=True):
            if not (line if level == "char" else line.strip()):  # at level "char", white space is text
                return "empty", f"the {side} is empty"
            line = line.lower() if getattr(self.config, "lower_case", False) else line
            if level == "word" and not set(line.split()).isdisjoint(RESERVED):
                return "with reserved words", f"the {side} has one of {', '.join(RESERVED)}, which are no text"
        return None


def pair_paths(path: str | Iterable[str]) -> list[str]:
    """Returns the paths in `path`, a list or a text with commas. An existing file may have commas in its name."""
    paths = path.split(",") if isinstance(path, str) else list(map(str, path))
    whole = ",".join(paths)
    return [whole] if len(paths) > 1 and not inputs.exists(paths[0]) and inputs.exists(whole) else paths


def read_lines(path: str) -> list[str]:
    r"""Reads the lines of a UTF-8 file as `numbered_lines` does. Returns each with `\n` at its end."""
    return [f"{line}\n" for _, line in numbered_lines(path)]


def without_ends(lines: Iterable[str]) -> list[str]:
    """Returns the lines of `read_lines` without their newlines."""
    return [line.removesuffix("\n") for line in lines]
