"""Files of a lexicon's words: lists of words, with or without further columns.

```python
list(words_of("words.txt"))     # [(1, "长江"), (2, "New␣York"), ...]: the number of the line and the word
```

The first 10,000 lines together decide where the word of each line of the file ends. Lines with a single field do not
count:

| lines | the word |
|---|---|
| `New York<TAB>3 nz` | ends at the tab |
| `New York 3 nz`, `长江 120`, `长江 0.1 -0.2` | ends before the numbers and a tag of a part of speech |
| `长江 ns`, if no word of the file is ASCII | ends before the tag |
| `New York` | is the line |
| `长江,3,n` | an error: it would never be found in a sentence |
"""

from __future__ import annotations

import collections
import itertools
import re
import shlex
from collections.abc import Callable, Iterator

from txl_tf.data.tagged.columns import BLANK
from txl_tf.data.tagged.vector_files import is_header, is_number
from txl_tf.data.text_files import numbered_lines
from txl_tf.errors import ParameterError, brief

_SAMPLE = 10_000  # first lines, which decide the format of a file
_WHITE_WORD = re.compile(r"[ \t]*([^\S \t])[ \t]")  # white space that is a word, in vectors of characters
_TAG = re.compile(r"[a-z]{1,4}[0-9]?")  # a part of speech, as in jieba
# A separator that is neither between digits nor before text of another script than that of tags and numbers.
_CSV = re.compile(r"[^\s,;|，；]+(?: [^\s,;|，；]+)*\s*(?:(?<![0-9])[,;|，；]|[,;|，；](?![0-9]))\s*[\"!-~]")
# A word, a slash and a part of speech.
_SLASH = re.compile(r"[^\s!-~]\S*/[a-z]{1,4}")


def words_of(path: str) -> Iterator[tuple[int, str]]:
    """Yields the line number and the word of each line of a file. A space in a word becomes `BLANK`.

    White space around a column, even U+3000, is not part of it. But a line that begins with one such character and a
    space or tab, as in vectors of characters, has this character as its word. Empty lines and word2vec's header are
    skipped.

    Raises:
        FileNotFoundError: the file does not exist.
        ParameterError: most lines are CSV, or have a tag after a slash; or the file is empty or not UTF-8 text.
    """
    lines = ((number, line) for number, line in numbered_lines(path) if line.strip(" \t"))
    lines = ((number, line) for number, line in lines if number > 1 or not is_header(line.strip(" \t")))
    first = list(itertools.islice(lines, _SAMPLE))
    _check_no_csv(path, first)
    cut = _choose_cut([line for _, line in first])
    for number, line in itertools.chain(first, lines):
        white_word = _WHITE_WORD.match(line)
        word = white_word[1] if white_word else BLANK.join(cut(line).split())
        if word:
            yield number, word


def _check_no_csv(path: str, lines: list[tuple[int, str]]) -> None:
    """Raises ParameterError if a comma, slash or similar mark follows most words. A line is `(number, text)`."""
    separated = [(number, line) for number, line in lines if _CSV.match(line[:200]) or _SLASH.fullmatch(line.strip())]
    if 2 * len(separated) <= len(lines):
        return
    number, line = separated[0]
    mark = next(character for character in line if character in ",;|，；/")
    message = (
        f"{path}, line {number}: {mark!r} follows the word in {brief(line)}, but only white space may separate a word "
        f"from further columns: sed 's/ *[{mark}].*//' {shlex.quote(path)} > NEW_FILE leaves the words"
    )
    raise ParameterError("lexicon", path, "a file of a word a line, perhaps with columns after white space", message)


def _choose_cut(lines: list[str]) -> Callable[[str], str]:
    """Returns a function of a line that returns the part with its word, by the rules at the top of this file.

    Args:
        lines: the first lines of the file, which decide the rule.
    """
    rows = [row for row in map(str.split, lines) if len(row) > 1]  # a single field is a word and decides nothing
    if 2 * sum("\t" in line.strip() for line in lines) > len(rows):
        return lambda line: line.strip(" \t").partition("\t")[0]
    counts = collections.Counter(_count_numbers(row) for row in rows)  # number of numbers -> number of lines
    with_numbers = len(rows) - counts.pop(0, 0)
    if 2 * with_numbers > len(rows):
        usual = counts.most_common(1)[0][0]
        return lambda line: " ".join(_before_numbers(line.split(), usual))
    if rows and all(map(_ends_with_tag, rows)):
        return lambda line: " ".join(_before_tag(line.split()))
    return lambda line: line


def _count_numbers(row: list[str]) -> int:
    """Returns how many numbers are at the end of a row, or before a tag at its end; the first field does not count."""
    row = row[:-1] if len(row) > 2 and not is_number(row[-1]) else row
    return sum(1 for _ in itertools.takewhile(is_number, reversed(row[1:])))


def _before_numbers(row: list[str], max_numbers: int) -> list[str]:
    """Returns a row without a tag at its end, and without the last numbers before this tag, at most `max_numbers`."""
    end = len(row)
    if end > 2 and not is_number(row[-1]) and is_number(row[-2]):
        end -= 1
    elif end > 1 and not is_number(row[-1]):
        return _before_tag(row)
    first = max(end - max_numbers, 1)
    while end > first and is_number(row[end - 1]):
        end -= 1
    return row[:end]


def _ends_with_tag(row: list[str]) -> bool:
    """Whether a row begins with a word that is not ASCII and ends with what may be a part of speech."""
    return not row[0].isascii() and bool(_TAG.fullmatch(row[-1]))


def _before_tag(row: list[str]) -> list[str]:
    """Returns a row without a tag at its end, if it has one."""
    return row[:-1] if len(row) > 1 and _ends_with_tag(row) else row
