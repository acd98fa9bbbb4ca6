"""A lexicon, which finds its words in a sentence of characters. The words may overlap."""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from txl_tf.calls import checked_call
from txl_tf.data.tagged import towns
from txl_tf.data.tagged.columns import BLANK, BLANKS
from txl_tf.data.tagged.lexicon_files import words_of
from txl_tf.environment import is_installed
from txl_tf.errors import ParameterError, brief

JIEBA = "jieba"
TOWNS = "towns"
_WHITE = re.compile(r"\s")


class Match(NamedTuple):
    """A word in a sentence."""

    start: int
    end: int  # inclusive
    word: str


class Lexicon:
    """Finds its words, of two characters or more, in sentences.

    Args:
        words: the words; duplicates are left out. White space in a word becomes `BLANK`, ␣, and so do spaces and tabs
            in sentences.

    Attributes:
        words: list of str, in the given order, with `BLANK` for white space.

    Raises:
        ParameterError: a word has fewer than two characters.
    """

    @checked_call
    def __init__(self, words: Iterable[str] | Collection[str]):
        self.words = list(dict.fromkeys(_WHITE.sub(BLANK, word) for word in words))
        short = next((word for word in self.words if len(word) < 2), None)
        if short is not None:
            message = f"words of a lexicon must have two characters or more, got {brief(short)}"
            raise ParameterError("words", short, "words of two characters or more", message)
        self._is_word: dict[str, bool] = {}  # word -> True; beginning of a word that is no word itself -> False
        for word in self.words:
            for end in range(2, len(word)):
                self._is_word[word[:end]] = False
        self._is_word.update(dict.fromkeys(self.words, True))

    def __len__(self) -> int:
        return len(self.words)

    @checked_call
    def matches(self, tokens: str | Sequence[str]) -> list[Match]:
        """Returns all words in a sentence, ordered by start, then by end.

        Args:
            tokens: characters, or tokens of several characters. A word must consist of whole tokens, at least two.
        """
        text = "".join(tokens).translate(BLANKS)
        cuts = [0, *itertools.accumulate(map(len, tokens))]  # positions in `text` between tokens
        matches = []
        is_word = self._is_word
        for start in range(len(tokens)):
            begin = cuts[start]
            for end in range(start + 1, len(tokens)):
                piece = text[begin : cuts[end + 1]]
                known = is_word.get(piece)  # `False`: the piece is the beginning of a word, but no word
                if known is None:
                    break
                if known:
                    matches.append(Match(start, end, piece))
        return matches

    @classmethod
    @checked_call
    def load(cls, path: str | os.PathLike[str], skip_short: bool = False) -> Lexicon:
        """Reads the words of a file: a list of words, jieba's dict.txt, vectors in word2vec's text format, ...

        See `words_of` for where a word ends.

        Args:
            path: path of a UTF-8 file; or "jieba", for the words of the installed package jieba that have two
                characters or more; or "towns", for the words of the made-up sentences.
            skip_short: whether to skip words of one character.

        Raises:
            FileNotFoundError: the file does not exist.
            ParameterError: the file has a word of one character, without `skip_short`; it has no words of two
                characters or more; it has lines of CSV, or is not UTF-8 text; or jieba is not installed. Names the
                file.
        """
        path = os.fspath(path)
        if path == JIEBA:
            return cls.load(_jieba_words(), skip_short=True)
        if path == TOWNS:
            return cls(towns.lexicon())
        words = []
        for number, word in words_of(path):
            if len(word) > 1:
                words.append(word)
            elif not skip_short:
                where = f"{path}, line {number}"
                message = (
                    f"{where}: a word must have two characters or more, got {brief(word)}; "
                    "--skip_short_words leaves out shorter ones"
                )
                raise ParameterError(where, word, "a word of two characters or more", message)
        if not words:
            allowed = "a file with words of two characters or more"
            raise ParameterError("lexicon", path, allowed, f"{path} has no words of two characters or more")
        return cls(words)


def _jieba_words() -> str:
    """Returns the path of the word list of the package jieba, without importing the package.

    Raises:
        ParameterError: jieba is not installed.
    """
    spec = importlib.util.find_spec(JIEBA) if is_installed(JIEBA) else None
    if spec is None or spec.origin is None:
        message = "lexicon=jieba needs the package jieba: pip install jieba"
        raise ParameterError("lexicon", JIEBA, "another lexicon without jieba", message)
    return os.path.join(os.path.dirname(spec.origin), "dict.txt")
