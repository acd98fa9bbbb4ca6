"""The size of a text, independent of its tokens: extents of pieces, which add up to the extent of the text."""

from __future__ import annotations

from typing import NamedTuple


class TextSize(NamedTuple):
    """Numbers of UTF-8 bytes, characters, and words between white space.

    A loss per byte, character or word can be compared between vocabularies; a loss per token cannot.
    """

    bytes: int = 0
    characters: int = 0
    words: int = 0

    def __add__(self, other: TextSize) -> TextSize:  # pyright: ignore[reportIncompatibleMethodOverride] sizes, not tuples
        return TextSize(*(mine + its for mine, its in zip(self, other, strict=True)))


class Extent(NamedTuple):
    """The size of a piece of text, and whether its first and last words may continue in the pieces next to it.

    Extents add up in the order of the pieces. A word that is in two pieces counts once.

    Attributes:
        size: size of the piece.
        begins: whether the piece begins with a character of a word, not with white space; `None` if it is empty.
        ends: whether the piece ends with a character of a word; `None` if it is empty.
    """

    size: TextSize = TextSize()
    begins: bool | None = None
    ends: bool | None = None

    def __add__(self, other: Extent) -> Extent:  # pyright: ignore[reportIncompatibleMethodOverride] extents, not tuples
        size = self.size + other.size
        if self.ends and other.begins:
            size = size._replace(words=size.words - 1)
        begins = other.begins if self.begins is None else self.begins
        return Extent(size, begins, self.ends if other.ends is None else other.ends)


END_OF_DOCUMENT = Extent(begins=False, ends=False)  # between documents: a word does not continue in the next one


def extent_of(piece: str | bytes) -> Extent:
    """Measures a piece of text. Each byte that is not UTF-8 counts as a character."""
    text = piece.decode("utf-8", "surrogateescape") if isinstance(piece, bytes) else piece
    if not text:
        return Extent()
    n_bytes = len(piece) if isinstance(piece, bytes) or text.isascii() else len(text.encode("utf-8", "replace"))
    size = TextSize(n_bytes, len(text), len(text.split()))
    return Extent(size, not text[0].isspace(), not text[-1].isspace())
