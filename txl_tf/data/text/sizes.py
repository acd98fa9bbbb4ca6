"""How much text there is, whatever its tokens are: extents of pieces, which add up to that of the text."""

from __future__ import annotations

from typing import NamedTuple


class TextSize(NamedTuple):
    """UTF-8 bytes, characters, and words between white space: what losses of different vocabularies compare by."""

    bytes: int = 0
    characters: int = 0
    words: int = 0

    def __add__(self, other: TextSize) -> TextSize:
        return TextSize(*(mine + its for mine, its in zip(self, other, strict=True)))


class Extent(NamedTuple):
    """The size of a piece of text, and whether its first and last words may go on beyond it.

    Extents add up in the order of the pieces. A word that two pieces share counts once.

    Attributes:
        begins, ends: whether the piece begins and ends within a word; `None` if nothing is in it.
    """

    size: TextSize = TextSize()
    begins: bool | None = None
    ends: bool | None = None

    def __add__(self, other: Extent) -> Extent:
        size = self.size + other.size
        if self.ends and other.begins:
            size = size._replace(words=size.words - 1)
        begins = other.begins if self.begins is None else self.begins
        return Extent(size, begins, self.ends if other.ends is None else other.ends)


END_OF_DOCUMENT = Extent(begins=False, ends=False)  # the last word ends there


def extent_of(piece: str | bytes) -> Extent:
    """Measures a piece of text; bytes that are not UTF-8 are a character each."""
    text = piece.decode("utf-8", "surrogateescape") if isinstance(piece, bytes) else piece
    if not text:
        return Extent()
    n_bytes = len(piece) if isinstance(piece, bytes) or text.isascii() else len(text.encode("utf-8", "replace"))
    size = TextSize(n_bytes, len(text), len(text.split()))
    return Extent(size, not text[0].isspace(), not text[-1].isspace())
