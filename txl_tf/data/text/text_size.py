"""How much text there is, in bytes, characters and words: what losses of different vocabularies compare by."""

from __future__ import annotations

from typing import NamedTuple


class TextSize(NamedTuple):
    """UTF-8 bytes, characters, and words: what white space parts."""

    bytes: int = 0
    characters: int = 0
    words: int = 0

    def __add__(self, other: TextSize) -> TextSize:
        return TextSize(*(mine + its for mine, its in zip(self, other, strict=True)))


class TextMeter:
    """Measures a text that comes in pieces: a word that two of them share counts once."""

    def __init__(self):
        self._within_word = False

    def measure(self, piece: str | bytes, ends_document: bool = False) -> TextSize:
        """The size of the next piece; bytes that are not UTF-8 are a character each. A document ends its last word."""
        text = piece.decode("utf-8", "surrogateescape") if isinstance(piece, bytes) else piece
        n_bytes = len(piece) if isinstance(piece, bytes) or text.isascii() else len(text.encode("utf-8", "replace"))
        n_words = len(text.split())
        if text:
            n_words -= self._within_word and not text[0].isspace()
            self._within_word = not text[-1].isspace()
        self._within_word = self._within_word and not ends_document
        return TextSize(n_bytes, len(text), n_words)
