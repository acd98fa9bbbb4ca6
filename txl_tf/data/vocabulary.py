"""Vocabulary: the tokens of a text and their ids, at the level of words, characters or bytes; see also subwords.py.

A vocabulary is stored in two parts: a text file with one token per line in id order (`save`), and the settings that
say how text becomes tokens (`get_config`, plain values for config.json):

    vocab.save(path)
    same = Vocab.load(path, **vocab.get_config())

Any word list is such a file: `Vocab.load("vocab.txt", eos="<eos>", unk="<unk>")`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import tensorflow as tf

from txl_tf.config import COUNTED_LEVELS, one_of
from txl_tf.data.encodings import not_utf8
from txl_tf.data.text_files import plain_pieces, with_newlines
from txl_tf.errors import ParameterError, named
from txl_tf.files import reading, write_atomic
from txl_tf.schema import brief

_NO_UNKNOWN = (
    "Replace unknown symbols in the text; or train with min_freq=2, which makes rare symbols unknown ones, or train a "
    "language model with level=byte or level=subword, where no symbol is unknown."
)
# The tokens of the bytes; `symbol.encode("utf-8", "surrogateescape")` gives a token's bytes at every level.
BYTE_SYMBOLS = [bytes([value]).decode("utf-8", "surrogateescape") for value in range(256)]

KNOWN_SYMBOLS = "the symbols are known"  # why options that choose some are refused where a vocabulary is there


class UnknownSymbol(ValueError):
    """A text holds a symbol that the vocabulary does not have."""


@dataclasses.dataclass(eq=False, repr=False)
class Vocab:
    r"""Tokens and their ids.

    Ids go to the special tokens first, then to the counted tokens from the most to the least frequent. Tokens of
    equal frequency keep the order of their first appearance.

    Args:
        level: what a token is: `"word"` (split at white space), `"char"` (every character, newlines too) or `"byte"`
            (of the UTF-8 encoding; the vocabulary is always all 256 values in order).
        lower_case: whether text is lower-cased first.
        special: tokens that get the first ids, even if they do not occur.
        unk: token that replaces unknown ones. If it is neither special nor in the text, unknown tokens are errors.
        bos: token that begins each line, at level `"word"`. `None`: none.
        eos: token that each newline becomes, at level `"word"`. `None`: none.
        min_freq: tokens with lower counts are left out.
        max_size: how many of the most frequent tokens to keep, special ones not included. `None`: all.
        document: token that ends each document, which no text may hold. `None`: none. At level `"byte"` its id is 256.
        raw_text: whether `\r` and byte order marks in a text are tokens, or parts of them. Otherwise `\r\n` and `\r`
            end lines as `\n` does, and the marks are left out; level `"byte"` has all bytes nevertheless. A
            configuration of an earlier version, which does not say it, has `True`.

    Attributes:
        symbols: list of str, the tokens in id order.
        ids: dict, token -> id.
        counter: `Counter` of the tokens that `count` has seen.
    """

    level: str = "word"
    lower_case: bool = False
    special: Iterable[str] = ()
    unk: str | None = None
    bos: str | None = None
    eos: str | None = None
    min_freq: int = 0
    max_size: int | None = None
    document: str | None = None
    raw_text: bool = True

    def __post_init__(self) -> None:
        level, special, bos, eos, max_size = self.level, list(self.special), self.bos, self.eos, self.max_size
        one_of(COUNTED_LEVELS)("level", level)
        if level != "word" and (bos or eos):
            raise ValueError(
                f"bos and eos need level 'word', got {brief(bos)} and {brief(eos)} at level {brief(level)}"
            )
        if level == "byte" and (self.lower_case or special or self.unk or self.min_freq or max_size is not None):
            raise ValueError("level 'byte' always has all 256 bytes and takes no other option")
        if level == "word" and any(len(symbol.split()) != 1 for symbol in special):
            raise ValueError(f"special symbols must be words without white space, got {brief(special)}")
        if max_size is not None and max_size < 1:
            raise ValueError(f"max_size must be positive or None, got {max_size}")
        if self.document is not None and (len(self.document) < 2 or len(self.document.split()) != 1):
            raise ValueError(f"document must be a word of several characters, got {brief(self.document)}")
        self.special = special
        self.counter = Counter()
        self._set_symbols([])

    def __len__(self) -> int:
        return len(self.symbols)

    @property
    def document_id(self) -> int | None:
        """Id of the token that ends each document; `None` if there is none."""
        return None if self.document is None else self.ids[self.document]

    @property
    def start_id(self) -> int:
        """Id that the beginning of a text follows: the end of a document, or else of a line; 0 if there is neither."""
        before = [self.document_id] if self.document is not None else newline_ids(self)
        return before[-1] if before else 0

    @property
    def has_plain_text(self) -> bool:
        """Whether texts are read as `plain_text` makes them."""
        return not self.raw_text and self.level != "byte"

    def get_config(self) -> dict:
        """The arguments of `__init__`, as values that JSON can hold."""
        config = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        if self.raw_text:  # which is left out, as by earlier versions
            del config["raw_text"]
        return config

    def fingerprint(self) -> str:
        """SHA-256 of the tokens in the order of their ids."""
        return hashlib.sha256(json.dumps(self.symbols).encode()).hexdigest()

    def difference(self, other: Vocab) -> str | None:
        """The first difference of these tokens, "here", from those of `other`, "there"; `None` if there is none."""
        for i, (here, there) in enumerate(itertools.zip_longest(self.symbols, other.symbols)):
            if here != there:
                here, there = ("nothing" if symbol is None else brief(symbol) for symbol in (here, there))
                return f"symbol {i} is {there} there and {here} here"
        return None

    # ----------------------------------------------------------------------------------------------- building

    def count(self, texts: str | bytes | Iterable[str]) -> int:
        """Counts the tokens of a string or of several; no token may span two. Returns how many ids `encode` makes."""
        n = 0
        for text in as_iterable(texts):
            symbols = self._tokenize(text)
            n += len(symbols)
            if self.level != "byte":
                self.counter.update(symbols)
                n_end = text.count("\n")
                n_begin = n_end + (text[-1:] not in ("", "\n"))  # the last line may have no end
                n += n_begin * bool(self.bos) + n_end * bool(self.eos)
        return n

    def build(self) -> None:
        """Gives ids to the special and the counted symbols."""
        if self.level == "byte":
            self._set_symbols(self._byte_symbols())
            return
        counted = [s for s, n in self.counter.most_common(self.max_size) if n >= self.min_freq]
        self._set_symbols(dict.fromkeys(self.special + [self.document] * (self.document is not None) + counted))
        self._check_line_symbols("the vocabulary: add it to special")

    def check_extendable(self) -> None:
        """Raises ParameterError where the level has a fixed number of tokens. Call it before long work."""
        if self.level not in ("word", "char"):
            message = f"a vocabulary of level {self.level} cannot be extended: leave extend_vocab out"
            raise ParameterError("extend_vocab", True, f"left out at level {self.level}", message)

    def extended(self, symbols: Iterable[str]) -> Vocab:
        """A vocabulary of these tokens, with the same ids, and then of those of `symbols` that are not among them.

        Raises:
            ParameterError: see `check_extendable`.
        """
        self.check_extendable()
        vocab = type(self)(**self.get_config())
        vocab._set_symbols(dict.fromkeys([*self.symbols, *symbols]))
        vocab.counter = self.counter
        return vocab

    def _set_symbols(self, symbols: Iterable[str]) -> None:
        self.symbols = list(symbols)
        self.ids = {symbol: i for i, symbol in enumerate(self.symbols)}

    def _byte_symbols(self) -> list[str]:
        return BYTE_SYMBOLS + [self.document] * (self.document is not None)

    def _check_line_symbols(self, where: str) -> None:
        for name in ("bos", "eos", "document"):
            symbol = getattr(self, name)
            if symbol is not None and symbol not in self.ids:
                raise ValueError(f"{name} symbol {brief(symbol)} is not in {where}")

    # ------------------------------------------------------------------------------------------- text <-> ids

    def encode(self, texts: str | bytes | Iterable[str], name: str = "text") -> np.ndarray:
        """Turns text into ids: int32 array `[n]`.

        Args:
            texts: a string, or an iterable of strings that follow one another. No word may span two of them and, with
                `bos`, no line. At level `"byte"` also `bytes`.
            name: what error messages call the text, such as its file.

        Raises:
            ValueError: a token is not in the vocabulary, and neither is `unk`. Names the token and its line.
        """
        texts = as_iterable(texts)
        pieces = list(self.encode_stream(plain_pieces(texts) if self.has_plain_text else texts, name))
        return np.concatenate(pieces) if pieces else np.zeros([0], np.int32)

    def encode_stream(self, texts: Iterable[str], name: str = "text", first_line: int = 1) -> Iterator[np.ndarray]:
        """Yields the ids of each string of an iterable in turn: `encode`, in bounded memory."""
        unk_id = self.ids.get(self.unk, -1)
        for text in texts:
            symbols = self._tokenize(text, mark_lines=True)
            if self.level == "byte":
                yield np.frombuffer(symbols, np.uint8).astype(np.int32)
                continue
            ids = np.fromiter(map(self.ids.get, symbols, itertools.repeat(unk_id)), np.int32, len(symbols))
            if self.document is not None and np.any(ids == self.document_id):
                number = self._find(text, lambda symbol: symbol == self.document)[1] + first_line
                raise ValueError(f"{name}, line {number}: {self.document} ends documents and must not be in a text")
            if unk_id < 0 and np.any(ids < 0):
                symbol, line = self._find(text, lambda symbol: symbol not in self.ids)
                error = UnknownSymbol(
                    f"{name}, line {line + first_line}: {brief(symbol)} is not in the vocabulary of {len(self)} "
                    f"symbols, and neither is an unknown symbol (unk={self.unk!r})"
                )
                error.add_note(_NO_UNKNOWN)
                raise error
            yield ids
            first_line += text.count("\n")

    def _find(self, text: str, wanted: Callable[[str], bool]) -> tuple[str, int]:
        """The first token of a text that is wanted, and its line, from 0."""
        lines = enumerate(io.StringIO(text))  # only "\n" ends a line
        return next((symbol, i) for i, line in lines for symbol in self._tokenize(line) if wanted(symbol))

    def _tokenize(self, text: str | bytes, mark_lines: bool = False) -> list[str] | str | bytes:
        """The tokens of a string: a list of words, or the string itself as characters or bytes."""
        if self.level == "byte":
            return text if isinstance(text, bytes) else text.encode("utf-8")
        if self.lower_case:
            text = text.lower()
        if self.level == "char":
            return text
        if mark_lines and self.bos and text:
            text = f"{self.bos} " + text[:-1].replace("\n", f"\n{self.bos} ") + text[-1]
        if mark_lines and self.eos:
            text = text.replace("\n", f" {self.eos} ")
        return text.split()

    def decode(self, ids: Iterable[int]) -> str:
        """Turns ids into text. Words are joined by single spaces; `eos` becomes a newline.

        Bytes that are not UTF-8 become U+FFFD. Raises ValueError for an id outside the vocabulary.
        """
        symbols = [self.symbols[i] for i in self.checked_ids(ids)]
        if self.level == "char":
            return "".join(symbols)
        if self.level == "byte":
            return "".join(symbols).encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        lines = [[]]
        for symbol in symbols:
            if symbol == self.bos and not lines[-1]:  # bos and eos may be the same token
                continue
            if symbol == self.eos:
                lines.append([])
            else:
                lines[-1].append(symbol)
        return "\n".join(" ".join(line) for line in lines)

    def split(self, text: str | bytes, ids: np.ndarray, k: int) -> tuple[str | bytes, str | bytes]:
        """Cuts a text before the token number `k` of its `ids`. Not for vocabularies with `bos`."""
        symbols = self._tokenize(text)
        if self.level == "word":
            tokens = re.finditer(r"\S+|\n" if self.eos else r"\S+", text)
            k = next(itertools.islice(tokens, k, None)).start()
            return text[:k], text[k:]
        return symbols[:k], symbols[k:]

    def checked_ids(self, ids: Iterable[int]) -> np.ndarray:
        """`ids` as an int64 array `[n]`. Raises ValueError for one outside the vocabulary."""
        ids = np.asarray(ids, np.int64).ravel()
        bad = ids[(ids < 0) | (ids >= len(self))]
        if bad.size:
            raise ValueError(f"ids must be in [0, {len(self)}), the size of the vocabulary, got {bad[0]}")
        return ids

    # -------------------------------------------------------------------------------------------------- files

    def save(self, path: str | os.PathLike) -> None:
        r"""Writes the tokens atomically, one per line in id order.

        Words are written as they are. Invisible characters and bytes are escaped as in Python (`\n`, `\x20`,
        `\u2028`), and so is the backslash.
        """
        write_atomic(os.fspath(path), self.get_data())

    def get_data(self) -> str | bytes:
        """What `save` writes."""
        lines = self.symbols if self.level == "word" else [escape(symbol) for symbol in self.symbols]
        return "".join(f"{line}\n" for line in lines)

    @classmethod
    def load(cls, path: str | os.PathLike, **config) -> Vocab:
        """Reads a file that `save` wrote, or any word list (the first word of each line counts).

        `config` are the arguments of `__init__`, as `get_config` returns them.

        Raises:
            FileNotFoundError: the file does not exist.
            ValueError: the file is not a vocabulary of these arguments. Names the line.
        """
        vocab = cls(**config)
        if not tf.io.gfile.exists(path):
            raise FileNotFoundError(f"there is no vocabulary file {named(path)}")
        with reading(os.fspath(path)), tf.io.gfile.GFile(path, "rb") as file:
            vocab.set_data(file.read(), path)
        return vocab

    def set_data(self, data: bytes, path: str | os.PathLike) -> None:
        """Takes the tokens from what the file `path` holds."""
        try:
            text = data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            name, place = f"vocabulary file {path}", f"byte {error.start}"
            raise not_utf8(name, data, error.start, place, path=os.fspath(path)) from error
        self.set_lines(with_newlines(text).removesuffix("\n").split("\n"), path)

    def set_lines(self, lines: list[str], path: str | os.PathLike) -> None:
        """Takes the tokens from the lines of a vocabulary file; errors name the file `path`."""
        by_word = self.level == "word"
        symbols = ["".join(line.split()[:1]) if by_word else unescape(line) for line in lines]
        if self.level == "byte" and symbols != self._byte_symbols():
            raise ValueError(f"vocabulary file {path} is not the 256 bytes in order that level 'byte' needs")
        self._set_symbols(symbols)
        for i, symbol in enumerate(symbols):
            if not symbol:
                raise ValueError(f"vocabulary file {path}: line {i + 1} is empty")
            if self.ids[symbol] != i:
                again = self.ids[symbol] + 1
                raise ValueError(f"vocabulary file {path}: {brief(symbol)} is on line {i + 1} and on line {again}")
        self._check_line_symbols(f"vocabulary file {path}")


def escape(symbol: str) -> str:
    r"""Makes a token visible and fit for one line: newline -> `\n`, space -> `\x20`."""

    def escape_character(c):
        if c == " ":
            return r"\x20"
        return c if c.isprintable() and c != "\\" else c.encode("unicode_escape").decode()

    return "".join(map(escape_character, symbol))


def unescape(line: str) -> str:
    r"""Undoes `escape`. A backslash that begins no escape stands for itself."""
    escapes = r"\\(?:[nrt\\]|x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8})"
    return re.sub(escapes, lambda match: match[0].encode().decode("unicode_escape"), line)


def newline_ids(vocab: Vocab) -> list[int]:
    """The ids of a newline, one or, of subwords, several; none where the vocabulary has no token for it."""
    if vocab.level in ("word", "char"):
        symbol = vocab.eos or "\n"
        return [vocab.ids[symbol]] if symbol in vocab.ids else []
    return vocab.encode("\n").tolist()


def line_start_ids(vocab: Vocab) -> list[int]:
    """The ids that a line by itself is scored after: the end of a document, or else of a line.

    None where a line begins with a symbol of its own, `bos`, or the vocabulary has neither: nothing then predicts the
    first token.
    """
    if vocab.document is not None:
        return [vocab.document_id]
    return [] if vocab.level == "word" and vocab.bos else newline_ids(vocab)


def as_iterable(texts: str | bytes | Iterable[str]) -> Iterable[str | bytes]:
    return [texts] if isinstance(texts, (str, bytes)) else texts
