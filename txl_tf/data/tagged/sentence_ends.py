"""Splits the tokens of a text into sentences.

```python
split_at_ends("他来了。“好！”她说。")     # ["他来了。", "“好！”", "她说。"]
```
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

_ENDS = frozenset("。！？；…!?;｡．‼⁇⁈⁉")  # always end a sentence
_CLOSING = frozenset(["''", *"”’」』）】》〉〗〕］｝)]}"])  # are part of the sentence before them
_QUOTES = frozenset("\"'")  # the same character opens and closes a quotation
_ABBREVIATIONS = frozenset((
    "Mr", "Mrs", "Ms", "Dr", "Prof", "St", "Mt", "No", "vs", "Inc", "Ltd", "Co", "Corp", "Jr", "Sr", "Gen", "Col", "Lt",
    "Sgt", "Rep", "Sen", "Gov",
))  # fmt: skip


class LineSizes(NamedTuple):
    """Lengths of the lines of a text, such as the training text of a model.

    Attributes:
        longest: tokens of the longest line.
        usual_sentences: mean number of sentences of a line, rounded.
        most_sentences: number of sentences that 99% of the lines do not exceed; `None` if it is unknown.
    """

    longest: int
    usual_sentences: int = 1
    most_sentences: int | None = None

    @classmethod
    def of(cls, lines: Iterable[Sequence[str]], by_words: bool = False) -> LineSizes:
        """Measures lines of tokens; there must be at least one. `by_words`: see `split_at_ends`."""
        sizes = [(len(tokens), len(split_at_ends(tokens, by_words))) for tokens in lines]
        counts = sorted(count for _, count in sizes)
        usual = round(sum(counts) / len(counts))
        nearly_largest = counts[-1 - len(counts) // 100]
        return cls(max(n for n, _ in sizes), max(usual, 1), max(nearly_largest, 1))


def split_at_ends(tokens: Sequence[str], by_words: bool = False) -> list[Sequence[str]]:
    """Cuts tokens into sentences. Together, the sentences have all tokens in their order.

    A sentence ends with 。！？；… or ! ? ; or a similar mark, and includes closing quotes, brackets and white space
    directly after it. Among characters, a full stop `.` ends a sentence, unless an ASCII letter or digit follows
    directly, or an initial or a common abbreviation is before it. Among words, a word that consists of such marks and
    full stops ends a sentence: in "the offer ." the last word, in "U.S. troops" none.

    Args:
        tokens: characters, as a string or a list; or words.
        by_words: whether the tokens are words.
    """
    pieces = []
    begin = 0
    n = len(tokens)
    for i in range(n):
        if i < begin or not (_is_last_word(tokens[i]) if by_words else _is_end(tokens, i)):
            continue
        end = i + 1
        while end < n and _goes_with_end(tokens, begin, end):
            end += 1
        while end < n and tokens[end].isspace():
            end += 1
        pieces.append(tokens[begin:end])
        begin = end
    return [*pieces, tokens[begin:]] if begin < n else pieces


def _is_last_word(word: str) -> bool:
    """Whether a word consists of marks that end a sentence and of full stops."""
    return bool(word) and set(word) <= _ENDS | {"."}


def _is_end(characters: Sequence[str], i: int) -> bool:
    """Whether character i ends a sentence. The full stop of an abbreviation, an initial or a number does not."""
    if characters[i] != ".":
        return characters[i] in _ENDS
    following = characters[i + 1] if i + 1 < len(characters) else " "
    if following == "." or (following.isascii() and following.isalnum()):
        return False
    begin = i
    while begin and characters[begin - 1].isascii() and characters[begin - 1].isalpha():
        begin -= 1
    word = "".join(characters[begin:i])
    return not (len(word) == 1 and word.isupper()) and word not in _ABBREVIATIONS


def _goes_with_end(tokens: Sequence[str], begin: int, i: int) -> bool:
    """Whether token `i`, after the end of the sentence that starts at `begin`, still belongs to this sentence.

    It does if it is a further mark of an end, a closing bracket, or a quote that closes a quotation.
    """
    token = tokens[i]
    if token in _QUOTES:
        return sum(quote == token for quote in tokens[begin:i]) % 2 == 1
    return token in _CLOSING or _is_last_word(token)
