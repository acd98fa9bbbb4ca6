"""Vocabulary: the symbols of a text and their ids, at the level of words, characters or bytes.

A vocabulary is kept in two parts: a plain-text file with one symbol a line, in id order (`save`), and the
settings that say how text becomes symbols (`get_config`, plain values for the run's config.json):

    vocab.save(path)
    same = Vocab.load(path, **vocab.get_config())

Any word list is such a file: `Vocab.load("vocab.txt", eos="<eos>", unk="<unk>")`.
"""

import io
import itertools
import os
import re
from collections import Counter

import numpy as np
import tensorflow as tf

from txl_tf.config import LEVELS
from txl_tf.files import write_atomic

# The symbols of the bytes; `symbol.encode("utf-8", "surrogateescape")` gives a symbol's bytes at every level.
BYTE_SYMBOLS = [bytes([value]).decode("utf-8", "surrogateescape") for value in range(256)]


class Vocab:
    r"""Symbols and their ids.

    Ids go to the special symbols first, then to the counted ones from the most to the least frequent, those
    of equal frequency in order of first appearance.

    Args:
        level: what a symbol is: `"word"` (split at white space), `"char"` (every character, the newline too)
            or `"byte"` (of the UTF-8 encoding; the vocabulary is always all 256, in value order).
        lower_case: whether text is lower-cased first.
        special: symbols that get the first ids, whether they occur or not.
        unk: symbol that stands for those the vocabulary does not have. It may be special or occur in the
            text. If it does neither, an unknown symbol is an error.
        bos: symbol that begins each line, at level `"word"`. `None`: none.
        eos: symbol that each newline becomes, at level `"word"`. `None`: none.
        min_freq: symbols counted less often are left out.
        max_size: number of most frequent symbols to keep, special ones not included. `None`: all.

    Attributes:
        symbols: list of str, the symbols in id order.
        ids: dict, symbol -> id.
        counter: `Counter` of the symbols that `count` has seen.
    """

    def __init__(
        self,
        level="word",
        lower_case=False,
        special=(),
        unk=None,
        bos=None,
        eos=None,
        min_freq=0,
        max_size=None,
    ):
        if level not in LEVELS:
            raise ValueError(f"level must be one of {', '.join(LEVELS)}, got {level!r}")
        if level != "word" and (bos or eos):
            raise ValueError(f"bos and eos need level 'word', got {bos!r} and {eos!r} at level {level!r}")
        if level == "byte" and (lower_case or special or unk or min_freq or max_size is not None):
            raise ValueError("level 'byte' always has all 256 bytes and takes no other option")
        if level == "word" and any(len(symbol.split()) != 1 for symbol in special):
            raise ValueError(f"special symbols must be words without white space, got {list(special)}")
        if max_size is not None and max_size < 1:
            raise ValueError(f"max_size must be positive or None, got {max_size}")
        self.level = level
        self.lower_case = lower_case
        self.special = list(special)
        self.unk = unk
        self.bos = bos
        self.eos = eos
        self.min_freq = min_freq
        self.max_size = max_size
        self.counter = Counter()
        self._set_symbols([])

    def __len__(self):
        return len(self.symbols)

    def get_config(self):
        """The arguments of `__init__`, as values that JSON can hold."""
        names = ("level", "lower_case", "special", "unk", "bos", "eos", "min_freq", "max_size")
        return {name: getattr(self, name) for name in names}

    # ----------------------------------------------------------------------------------------------- building

    def count(self, texts):
        """Counts the symbols of a string or an iterable of strings. No symbol may span two strings.

        Returns:
            int, the number of ids that `encode` makes of the same texts.
        """
        n = 0
        for text in _as_iterable(texts):
            if self.level == "byte":
                n += len(_as_bytes(text))
                continue
            symbols = self._tokenize(text)
            self.counter.update(symbols)
            n += len(symbols) + self._count_markers(text)
        return n

    def _count_markers(self, text):
        lines = text.count("\n")
        begun = lines + (not text.endswith("\n")) if text else 0
        return lines * bool(self.eos) + begun * bool(self.bos)

    def build(self):
        """Gives ids to the special symbols and to those counted."""
        if self.level == "byte":
            self._set_symbols(BYTE_SYMBOLS)
            return
        counted = [s for s, n in self.counter.most_common(self.max_size) if n >= self.min_freq]
        self._set_symbols(dict.fromkeys(self.special + counted))
        self._check_line_symbols("the vocabulary: add it to special")

    def _set_symbols(self, symbols):
        self.symbols = list(symbols)
        self.ids = {symbol: i for i, symbol in enumerate(self.symbols)}

    def _check_line_symbols(self, where):
        for name in ("bos", "eos"):
            symbol = getattr(self, name)
            if symbol is not None and symbol not in self.ids:
                raise ValueError(f"{name} symbol {symbol!r} is not in {where}")

    # ------------------------------------------------------------------------------------------- text <-> ids

    def encode(self, texts, name="text"):
        """Turns text into ids.

        Args:
            texts: a string, or an iterable of strings that follow one another. No word may span two of them
                and, with `bos`, no line. At level `"byte"`, `bytes` will do as well.
            name: what an error message calls the text, such as its file.

        Returns:
            int32 array `[n]`.

        Raises:
            ValueError: a symbol is not in the vocabulary, nor is `unk`. Names the symbol and its line.
        """
        pieces = list(self.encode_stream(_as_iterable(texts), name))
        return np.concatenate(pieces) if pieces else np.zeros([0], np.int32)

    def encode_stream(self, texts, name="text"):
        """Yields the ids of each string of an iterable in turn: `encode`, in bounded memory."""
        first_line = 1
        for text in texts:
            if self.level == "byte":
                yield np.frombuffer(_as_bytes(text), np.uint8).astype(np.int32)
            else:
                yield self._encode_text(text, name, first_line)
                first_line += text.count("\n")

    def _encode_text(self, text, name, first_line):
        unk_id = self.ids.get(self.unk, -1)
        symbols = self._tokenize(text, mark_lines=True)
        ids = np.fromiter(map(self.ids.get, symbols, itertools.repeat(unk_id)), np.int32, len(symbols))
        if unk_id < 0 and np.any(ids < 0):
            symbol, line = self._find_unknown(text, first_line)
            raise ValueError(
                f"{name}, line {line}: {symbol!r} is not in the vocabulary of {len(self)} symbols, "
                f"and neither is an unknown symbol (unk={self.unk!r})"
            )
        return ids

    def _find_unknown(self, text, first_line):
        for number, line in enumerate(io.StringIO(text), first_line):
            for symbol in self._tokenize(line):
                if symbol not in self.ids:
                    return symbol, number

    def _tokenize(self, text, mark_lines=False):
        """The symbols of a string, as a list of words or a string of characters."""
        if self.lower_case:
            text = text.lower()
        if self.level == "char":
            return text
        if mark_lines and self.bos and text:
            text = f"{self.bos} " + text[:-1].replace("\n", f"\n{self.bos} ") + text[-1]
        if mark_lines and self.eos:
            text = text.replace("\n", f" {self.eos} ")
        return text.split()

    def decode(self, ids):
        """Turns ids into text, with a newline for `eos` and bytes that are not UTF-8 replaced by U+FFFD.

        Args:
            ids: array or list of integers.

        Returns:
            str. Words are joined by single spaces.
        """
        ids = np.asarray(ids, np.int64).ravel()
        if np.any((ids < 0) | (ids >= len(self))):
            bad = ids[(ids < 0) | (ids >= len(self))][0]
            raise ValueError(f"ids must be in [0, {len(self)}), the size of the vocabulary, got {bad}")
        symbols = [self.symbols[i] for i in ids]
        if self.level == "word":
            return self._join_words(symbols)
        text = "".join(symbols)
        if self.level == "byte":
            text = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        return text

    def _join_words(self, symbols):
        lines = [[]]
        for symbol in symbols:
            if symbol == self.bos and not lines[-1]:  # bos and eos may be the same symbol
                continue
            if symbol == self.eos:
                lines.append([])
            else:
                lines[-1].append(symbol)
        return "\n".join(" ".join(line) for line in lines)

    # -------------------------------------------------------------------------------------------------- files

    def save(self, path):
        r"""Writes the symbols, one a line in id order. The file appears in one go, whole.

        Words are written as they are. Characters and bytes that would not be seen are escaped as in Python
        (`\n`, `\x20`, `\u2028`), and so is the backslash.
        """
        lines = self.symbols if self.level == "word" else [escape(symbol) for symbol in self.symbols]
        write_atomic(os.fspath(path), "".join(f"{line}\n" for line in lines))

    @classmethod
    def load(cls, path, **config):
        """Reads a file that `save` wrote, or any word list (of each line, the first word counts).

        Args:
            path: the file.
            **config: the arguments of `__init__`, as `get_config` gives them.

        Returns:
            `Vocab`.

        Raises:
            FileNotFoundError: the file is not there.
            ValueError: the file is not a vocabulary of these arguments. Names the line.
        """
        vocab = cls(**config)
        lines = _read_lines(path)
        if vocab.level == "word":
            symbols = ["".join(line.split()[:1]) for line in lines]
        else:
            symbols = [unescape(line) for line in lines]
        if vocab.level == "byte" and symbols != BYTE_SYMBOLS:
            raise ValueError(f"vocabulary file {path} is not the 256 bytes in order that level 'byte' needs")
        vocab._set_symbols(symbols)
        for i, symbol in enumerate(symbols):
            if not symbol:
                raise ValueError(f"vocabulary file {path}: line {i + 1} is empty")
            if vocab.ids[symbol] != i:
                again = vocab.ids[symbol] + 1
                raise ValueError(f"vocabulary file {path}: {symbol!r} is on line {i + 1} and on line {again}")
        vocab._check_line_symbols(f"vocabulary file {path}")
        return vocab


def _read_lines(path):
    if not tf.io.gfile.exists(path):
        raise FileNotFoundError(f"there is no vocabulary file {path}")
    with tf.io.gfile.GFile(path, "rb") as file:
        data = file.read()
    try:
        return data.decode("utf-8").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"vocabulary file {path} is not UTF-8 text: see byte {error.start}") from error


def escape(symbol):
    r"""Writes a symbol so that it can be seen and fits a line: newline -> `\n`, space -> `\x20`."""

    def escape_character(c):
        if c == " ":
            return r"\x20"
        return c if c.isprintable() and c != "\\" else c.encode("unicode_escape").decode()

    return "".join(map(escape_character, symbol))


def unescape(line):
    r"""Undoes `escape`. A backslash that begins no escape stands for itself."""
    escapes = r"\\(?:[nrt\\]|x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8})"
    return re.sub(escapes, lambda match: match[0].encode().decode("unicode_escape"), line)


def _as_bytes(text):
    return text if isinstance(text, bytes) else text.encode("utf-8")


def _as_iterable(texts):
    return [texts] if isinstance(texts, (str, bytes)) else texts
