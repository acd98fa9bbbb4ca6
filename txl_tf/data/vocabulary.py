"""Vocabulary: the tokens of a text and their ids. Tokens are words, characters or bytes; for subwords, see subwords.py.

A vocabulary is stored in two parts: a text file with one token per line in the order of the ids (`save`), and the
settings that control how text becomes tokens (`get_config`, plain values for config.json):

    vocab.save(path)
    same = Vocab.load(path, **vocab.get_config())

Any word list is such a file: `Vocab.load("vocab.txt", eos="<eos>", unk="<unk>")`.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import io
import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Self

import numpy as np
import tensorflow as tf

from txl_tf.calls import checked_call, checked_init
from txl_tf.config import COUNTED_LEVELS, one_of
from txl_tf.data.encodings import not_utf8
from txl_tf.data.text_files import plain_pieces, with_newlines
from txl_tf.errors import ParameterError, brief, named
from txl_tf.files import naming_read_errors, seekable, write_atomic

_NO_UNKNOWN = (
    "Replace unknown symbols in the text; or train with min_freq=2, which makes rare symbols unknown ones, or train a "
    "language model with level=byte or level=subword, where no symbol is unknown."
)
# The tokens of level "byte". At every level, `symbol.encode("utf-8", "surrogateescape")` returns the bytes of a token.
BYTE_SYMBOLS = [bytes([value]).decode("utf-8", "surrogateescape") for value in range(256)]

_BRACKETED = re.compile(r"<.+>|\[.+\]")

MUCH_UNKNOWN = 0.05  # a larger share of unknown symbols in a text causes a message
KNOWN_SYMBOLS = "the symbols are known"  # why an option that chooses symbols is refused if a vocabulary is given


class UnknownSymbol(ParameterError):
    """A text has a symbol that the vocabulary does not have.

    Attributes:
        name: the text and the line, such as "in.txt, line 2".
        value: the symbol.
    """


@checked_init
@dataclasses.dataclass(eq=False, repr=False)
class Vocab:
    r"""Tokens and their ids.

    Ids go to the special tokens first, then to the counted tokens from the most to the least frequent. Tokens of
    equal frequency keep the order of their first appearance.

    Args:
        level: what a token is: `"word"` (split at white space), `"char"` (every character, newlines too) or `"byte"`
            (of the UTF-8 encoding; the vocabulary is always all 256 values in order).
        lower_case: whether text is converted to lower case first.
        special: tokens that get the first ids, even if they do not occur.
        unk: token that replaces unknown tokens. If it is not in the vocabulary, or `None`, an unknown token is an
            error.
        bos: token at the beginning of each line, at level `"word"`. `None`: no token.
        eos: token that replaces each newline, at level `"word"`. `None`: no token.
        min_freq: tokens that occur less often are left out.
        max_size: how many of the most frequent tokens to keep, without the special ones. `None`: all.
        document: token at the end of each document. At level `"word"`, no text may contain it. `None`: no token. At
            level `"byte"`, its id is 256.
        raw_text: whether `\r` and byte order marks in a text are tokens, or parts of tokens; at level `"word"`, `\r` is
            then white space. Otherwise `\r\n` and `\r` end lines as `\n` does, and the marks are left out. Level
            `"byte"` keeps all bytes in either case. The configurations of earlier versions do not contain it; they
            mean `True`.

    Attributes:
        symbols: list of str, the tokens in the order of their ids.
        ids: dict, token -> id.
        counter: `Counter` of the tokens that `count` has counted, without `bos` and `eos`; empty at level `"byte"`.
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
        level = self.level
        special = list(self.special)
        one_of(COUNTED_LEVELS)("level", level)
        if level != "word" and (self.bos or self.eos):
            name = "bos" if self.bos else "eos"
            both_values = f"got {brief(self.bos)} and {brief(self.eos)} at level {brief(level)}"
            message = f"bos and eos need level 'word', {both_values}"
            raise ParameterError(name, self.bos or self.eos, f"None at level {level}", message)
        options = {"lower_case": self.lower_case, "special": special, "unk": self.unk, "min_freq": self.min_freq}
        given_names = [name for name, value in options.items() if value]
        if self.max_size is not None:
            given_names.append("max_size")
        if level == "byte" and given_names:
            message = "level 'byte' always has all 256 bytes and takes no other option"
            raise ParameterError(given_names[0], getattr(self, given_names[0]), "left out at level byte", message)
        if level == "word" and any(len(symbol.split()) != 1 for symbol in special):
            message = f"special symbols must be words without white space, got {brief(special)}"
            raise ParameterError("special", special, "words without white space", message)
        if self.min_freq < 0:
            raise ParameterError("min_freq", self.min_freq, "0 or more")
        if self.max_size is not None and self.max_size < 1:
            raise ParameterError("max_size", self.max_size, "positive or None")
        if self.document is not None and (len(self.document) < 2 or len(self.document.split()) != 1):
            raise ParameterError("document", self.document, "a word of several characters")
        self.special = special
        self.counter: Counter[str] = Counter()
        self._set_symbols([])

    def __len__(self) -> int:
        return len(self.symbols)

    @property
    def document_id(self) -> int | None:
        """Id of the token that ends each document; `None` if there is none."""
        return None if self.document is None else self.ids[self.document]

    @property
    def start_id(self) -> int:
        """The id before the first token of a text: the end of a document; else the last id of a newline; else 0."""
        if self.document is not None:
            return self.ids[self.document]
        newline = newline_ids(self)
        return newline[-1] if newline else 0

    @property
    def has_plain_text(self) -> bool:
        """Whether `encode` replaces line ends and drops byte order marks, as `plain_text` does."""
        return not self.raw_text and self.level != "byte"

    def note_on_unknown(self, unknown: int, total: int, where: str) -> str | None:
        """What a user must know if many tokens of a text are unknown; `None` if they are few.

        Args:
            unknown: number of unknown tokens.
            total: number of all tokens.
            where: what the message calls the text.
        """
        if unknown <= MUCH_UNKNOWN * total:
            return None
        return (
            f"{unknown / total:.1%} of the tokens of {where} are not in the vocabulary, read as {self.unk}: "
            "the losses cannot be compared with those of other texts"
        )

    @functools.cached_property
    def has_zero_bytes(self) -> bool:
        """Whether a token contains a zero byte, as those of rows of JSON may."""
        return any("\0" in token for token in self.ids)

    @property
    def unk_id(self) -> int | None:
        """The id of `unk`; `None` if the vocabulary does not have it."""
        return None if self.unk is None else self.ids.get(self.unk)

    def get_config(self) -> dict[str, Any]:
        """The arguments of `__init__`, as values that JSON can store."""
        config = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        if self.raw_text:  # as in the configurations of earlier versions, which do not contain it
            del config["raw_text"]
        return config

    def fingerprint(self) -> str:
        """SHA-256 of the tokens in the order of their ids."""
        return hashlib.sha256(json.dumps(self.symbols).encode()).hexdigest()

    @checked_call
    def difference(self, other: Vocab) -> str | None:
        """Describes the first token that differs from `other`'s: "token 3 is 'a', and 'b' in the other vocabulary".

        Returns:
            The text; `None` if both vocabularies have the same tokens.
        """
        for i, (own, others) in enumerate(itertools.zip_longest(self.symbols, other.symbols)):
            if own != others:
                shown = "missing" if own is None else brief(own)
                shown_of_other = "missing" if others is None else brief(others)
                return f"token {i} is {shown}, and {shown_of_other} in the other vocabulary"
        return None

    # ----------------------------------------------------------------------------------------------- building

    @checked_call
    def count(self, texts: str | bytes | Iterable[str | bytes]) -> int:
        """Counts the tokens of one or more strings in `counter`; no token may span two strings.

        At level `"byte"`, `counter` does not change, because the vocabulary is always the same.

        Returns:
            The number of ids that `encode` returns for these strings.

        Raises:
            ParameterError: a text is bytes, and the level is not `"byte"`.
        """
        n = 0
        for text in as_iterable(texts):
            if self.level == "byte":
                n += len(_as_bytes(text))
                continue
            text = self._as_string(text)
            symbols = self._tokenize(text)
            self.counter.update(symbols)
            n += len(symbols)
            n_newlines = text.count("\n")
            if self.eos:
                n += n_newlines
            if self.bos:
                has_open_line = bool(text) and not text.endswith("\n")
                n += n_newlines + 1 if has_open_line else n_newlines
        return n

    def build(self) -> None:
        """Gives ids to the special tokens, `document` and the counted tokens, in this order.

        Raises:
            ParameterError: `bos` or `eos` is neither special nor counted, or is the same token as `document`; or
                `min_freq` leaves out all counted tokens.
        """
        self._check_document("bos", "eos")  # not in `__init__`: existing files must open
        if self.level == "byte":
            self._set_symbols(self._byte_symbols())
            return
        counted = [s for s, n in self.counter.most_common(self.max_size) if n >= self.min_freq]
        document = [] if self.document is None else [self.document]
        if self.min_freq > 1 and not {*counted} - {*self.special, *document}:
            numbers = [n for symbol, n in self.counter.items() if symbol not in self.special and symbol not in document]
            if numbers:
                most = f"at most {max(numbers)}, the number of the most frequent token"
                message = f"min_freq must be {most}, got {self.min_freq}: it leaves out all tokens of the text"
                raise ParameterError("min_freq", self.min_freq, most, message)
        self._set_symbols(dict.fromkeys([*self.special, *document, *counted]))
        self._check_line_symbols("the vocabulary: add it to special")

    def _check_document(self, *others: str) -> None:
        """Raises ParameterError if `document` is also one of the tokens `others`: an id could mean either of them."""
        for name in others:
            if self.document is not None and self.document == getattr(self, name):
                raise ParameterError("document", self.document, f"another token than {name}")

    def check_extendable(self) -> None:
        """Raises ParameterError if `extended` is not possible at this level. Call it before long work."""
        if self.level not in ("word", "char"):
            message = f"a vocabulary of level {self.level} cannot be extended: leave extend_vocab out"
            raise ParameterError("extend_vocab", True, f"left out at level {self.level}", message)

    @checked_call
    def extended(self, symbols: Iterable[str]) -> Vocab:
        """Returns a vocabulary with these tokens, which keep their ids, followed by new tokens from `symbols`.

        The result has the same `counter`.

        Raises:
            ParameterError: the level is `"byte"` or `"subword"`, where the number of tokens is fixed.
        """
        self.check_extendable()
        vocab = type(self)(**self.get_config())
        vocab._set_symbols(dict.fromkeys([*self.symbols, *symbols]))
        vocab.counter = self.counter
        return vocab

    def _set_symbols(self, symbols: Iterable[str]) -> None:
        """Replaces the tokens; their ids are 0, 1, ..."""
        self.symbols: list[str] = list(symbols)
        self.ids: dict[str, int] = {symbol: i for i, symbol in enumerate(self.symbols)}

    def _byte_symbols(self) -> list[str]:
        return BYTE_SYMBOLS if self.document is None else [*BYTE_SYMBOLS, self.document]

    def _check_line_symbols(self, where: str) -> None:
        """Raises ParameterError if `bos`, `eos` or `document` is given and not in the vocabulary.

        `where` names the vocabulary for the message.
        """
        for name in ("bos", "eos", "document"):
            symbol = getattr(self, name)
            if symbol is not None and symbol not in self.ids:
                raise ParameterError(name, symbol, f"in {where}", f"{name} symbol {brief(symbol)} is not in {where}")

    # ------------------------------------------------------------------------------------------- text <-> ids

    @checked_call
    def encode(self, texts: str | bytes | Iterable[str | bytes], name: str = "text") -> np.ndarray:
        """Converts text to ids: int32 array `[n]`.

        Args:
            texts: a string, or an iterable of consecutive strings. No word may span two of them and, with `bos`, no
                line. At level `"byte"` also `bytes`.
            name: how error messages call the text, such as its file.

        Raises:
            UnknownSymbol: a token is not in the vocabulary, and neither is `unk`. Names the token and its line.
            ParameterError: at level `"word"`, a text contains the token `document`, or would get it as `bos`, `eos` or
                `unk`; or a text is bytes at another level than `"byte"`.
        """
        strings = as_iterable(texts)
        pieces = list(self.encode_stream(plain_pieces(strings) if self.has_plain_text else strings, name))
        return np.concatenate(pieces) if pieces else np.zeros([0], np.int32)

    @checked_call
    def encode_stream(
        self, texts: Iterable[str | bytes], name: str = "text", first_line: int = 1
    ) -> Iterator[np.ndarray]:
        """Yields the ids of each string, int32 `[n]`. Memory holds one string at a time.

        It leaves line ends and byte order marks as they are, even without `raw_text`: see `plain_pieces`.

        Args:
            texts, name: see `encode`.
            first_line: number of the first line, for errors.

        Raises:
            UnknownSymbol, ParameterError: as `encode`.
        """
        unk_id = -1 if self.unk_id is None else self.unk_id
        id_of: Callable[[str, int], int] = self.ids.get
        for text in texts:
            if self.level == "byte":
                yield np.frombuffer(_as_bytes(text), np.uint8).astype(np.int32)
                continue
            text = self._as_string(text)
            symbols = self._tokenize(text, mark_lines=True)
            ids = np.fromiter(map(id_of, symbols, itertools.repeat(unk_id)), np.int32, len(symbols))
            if self.document is not None and np.any(ids == self.document_id):
                self._check_document("bos", "eos", "unk")
                raise self._document_error(
                    name, self._find(text, lambda symbol: symbol == self.document)[1] + first_line
                )
            if unk_id < 0 and np.any(ids < 0):
                symbol, line = self._find(text, lambda symbol: symbol not in self.ids)
                where = f"{name}, line {line + first_line}"
                message = (
                    f"{where}: {brief(symbol)} is not in the vocabulary of {len(self)} symbols, which has no symbol "
                    f"for unknown ones (unk={self.unk!r})"
                )
                error = UnknownSymbol(where, symbol, f"one of the {len(self)} symbols of the vocabulary", message)
                error.add_note(_NO_UNKNOWN)
                raise error
            yield ids
            first_line += text.count("\n")

    def _document_error(self, name: str, line: int) -> ParameterError:
        """The error if a text contains the token `document`. `name` and `line` say where."""
        where = f"{name}, line {line}"
        message = f"{where}: {self.document} ends documents and must not be in a text"
        return ParameterError(where, self.document, f"a text without {self.document}", message)

    def _find(self, text: str, wanted: Callable[[str], bool]) -> tuple[str, int]:
        """Returns the first token of a text for which `wanted` is true, and its line, counted from 0."""
        lines = enumerate(io.StringIO(text))  # only "\n" ends a line
        return next((symbol, i) for i, line in lines for symbol in self._tokenize(line) if wanted(symbol))

    def _as_string(self, text: str | bytes) -> str:
        """Returns the text unchanged. Raises ParameterError if it is bytes."""
        if isinstance(text, bytes):
            raise ParameterError("texts", text, f"strings at level {self.level}")
        return text

    def _tokenize(self, text: str, mark_lines: bool = False) -> Sequence[str]:
        """Returns the tokens of a string: a list of words, or the string itself, whose characters are the tokens.

        Args:
            mark_lines: whether the tokens contain `bos` and `eos`.
        """
        if self.lower_case:
            text = text.lower()
        if self.level == "char":
            return text
        if mark_lines and self.bos and text:  # a newline at the end of the text begins no line
            text = f"{self.bos} " + text[:-1].replace("\n", f"\n{self.bos} ") + text[-1]
        if mark_lines and self.eos:
            text = text.replace("\n", f" {self.eos} ")
        return text.split()

    @checked_call
    def decode(self, ids: Iterable[int]) -> str:
        """Converts ids to text. Words are joined by single spaces; `eos` becomes a newline, and `bos` is left out.

        At level `"byte"`, bytes that are not UTF-8 become U+FFFD.

        Raises:
            ParameterError: an id is outside the vocabulary.
        """
        symbols = [self.symbols[i] for i in self.checked_ids(ids)]
        if self.level == "char":
            return "".join(symbols)
        if self.level == "byte":
            return "".join(symbols).encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        lines: list[list[str]] = [[]]
        for symbol in symbols:
            if symbol == self.bos and not lines[-1]:  # bos and eos may be the same token
                continue
            if symbol == self.eos:
                lines.append([])
            else:
                lines[-1].append(symbol)
        return "\n".join(" ".join(line) for line in lines)

    def split(self, text: str | bytes, ids: np.ndarray, k: int) -> tuple[str | bytes, str | bytes]:
        """Cuts a text before token `k` of its `ids`. Not for vocabularies with `bos`.

        The two parts are bytes at level `"byte"`, otherwise strings; at level `"char"`, in lower case if `lower_case`.
        """
        if self.level == "byte":
            data = _as_bytes(text)
            return data[:k], data[k:]
        text = self._as_string(text)
        if self.level == "word":
            tokens = re.finditer(r"\S+|\n" if self.eos else r"\S+", text)
            cut = next(itertools.islice(tokens, k, None)).start()
            return text[:cut], text[cut:]
        characters = text.lower() if self.lower_case else text
        return characters[:k], characters[k:]

    def checked_ids(self, ids: Iterable[int]) -> np.ndarray:
        """Returns `ids` as an int64 array `[n]`. Raises ParameterError for an id outside the vocabulary."""
        array = np.asarray(ids, np.int64).ravel()
        bad = array[(array < 0) | (array >= len(self))]
        if bad.size:
            allowed = f"in [0, {len(self)}), the size of the vocabulary"
            raise ParameterError("ids", int(bad[0]), allowed)
        return array

    def can_occur(self, symbol: str) -> bool:
        """Whether a text may contain a token, for example of a word list. False only if that is certain.

        A special token, or any symbol in angle or square brackets such as `[UNK]`, counts as one that may occur.
        """
        if self.level not in ("word", "char"):
            return True
        if symbol in (*self.special, self.unk, self.bos, self.eos, self.document) or _BRACKETED.fullmatch(symbol):
            return True
        is_token = self.level != "char" or len(symbol) == 1
        return is_token and not (self.lower_case and symbol != symbol.lower())

    # -------------------------------------------------------------------------------------------------- files

    @checked_call
    def save(self, path: str | os.PathLike[str]) -> None:
        r"""Writes the tokens atomically, one per line in id order.

        Words are written unchanged. Invisible characters and bytes are escaped as in Python (`\n`, `\x20`,
        `\u2028`), and so is the backslash.
        """
        write_atomic(os.fspath(path), self.get_data())

    def get_data(self) -> str | bytes:
        """Returns the content of the file that `save` writes."""
        lines = self.symbols if self.level == "word" else [escape(symbol) for symbol in self.symbols]
        return "".join(f"{line}\n" for line in lines)

    @classmethod
    @checked_call
    def load(cls, path: str | os.PathLike[str], **config: Any) -> Self:
        """Reads a file that `save` wrote, or any word list. At level `"word"`, it uses the first word of each line.

        Args:
            path: path of the file.
            **config: the arguments of `__init__`, as `get_config` returns them.

        Raises:
            FileNotFoundError: the file does not exist.
            ParameterError: the file is not a vocabulary for these arguments. Names the file and, if known, the line.
        """
        vocab = cls(**config)
        if not tf.io.gfile.exists(path):
            raise FileNotFoundError(f"there is no vocabulary file {named(path)}")
        with naming_read_errors(os.fspath(path)), tf.io.gfile.GFile(seekable(os.fspath(path)), "rb") as file:
            vocab.set_data(file.read(), path)
        return vocab

    def set_data(self, data: bytes, path: str | os.PathLike[str]) -> None:
        """Replaces the tokens by those in `data`, the content of the file `path`. Errors: see `load`."""
        try:
            text = data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            where = f"byte {error.start}"
            raise not_utf8(f"vocabulary file {path}", data, error.start, where, path=os.fspath(path)) from error
        self.set_lines(with_newlines(text).removesuffix("\n").split("\n"), path)

    def set_lines(self, lines: list[str], path: str | os.PathLike[str]) -> None:
        """Replaces the tokens by those in the lines of the vocabulary file `path`.

        Raises:
            ParameterError: a line is empty, two lines have the same token, or `bos`, `eos` or `document` is missing;
                or the tokens are not those of level `"byte"`.
        """
        by_word = self.level == "word"
        symbols = ["".join(line.split()[:1]) if by_word else unescape(line) for line in lines]
        if self.level == "byte" and symbols != self._byte_symbols():
            message = f"vocabulary file {path} is not the 256 bytes in order that level 'byte' needs"
            raise ParameterError(os.fspath(path), symbols, "the 256 bytes in order", message)
        self._set_symbols(symbols)
        for i, symbol in enumerate(symbols):
            if not symbol:
                message = f"vocabulary file {path}: line {i + 1} is empty"
                raise ParameterError(f"{path}, line {i + 1}", symbol, "a symbol", message)
            if self.ids[symbol] != i:
                other_line = self.ids[symbol] + 1
                message = f"vocabulary file {path}: {brief(symbol)} is on line {i + 1} and on line {other_line}"
                raise ParameterError(f"{path}, line {i + 1}", symbol, "a symbol that no other line has", message)
        self._check_line_symbols(f"vocabulary file {path}")


def check_occurs(vocab: Vocab, argument: str, path: str) -> None:
    """Raises ParameterError if no text can contain some of the tokens of a vocabulary file, see `Vocab.can_occur`.

    Args:
        vocab: the tokens of the file.
        argument: the argument that names the file.
        path: path of the file.
    """
    lost = [symbol for symbol in vocab.symbols if not vocab.can_occur(symbol)]
    if lost:
        message = (
            f"{argument}={named(path)} has {len(lost):,} symbols that no text contains at level={vocab.level} with "
            f"lower_case={vocab.lower_case}: {brief(lost[:5])}"
        )
        raise ParameterError(argument, path, "a vocabulary of symbols that may occur", message)


def escape(symbol: str) -> str:
    r"""Makes a token visible, so that it fits on one line: newline -> `\n`, space -> `\x20`."""

    def escape_character(c: str) -> str:
        if c == " ":
            return r"\x20"
        return c if c.isprintable() and c != "\\" else c.encode("unicode_escape").decode()

    return "".join(map(escape_character, symbol))


def unescape(line: str) -> str:
    r"""Reverses `escape`. A backslash that does not begin an escape stands for itself."""
    escapes = r"\\(?:[nrt\\]|x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8})"
    return re.sub(escapes, lambda match: match[0].encode().decode("unicode_escape"), line)


def newline_ids(vocab: Vocab) -> list[int]:
    """Returns the ids of a newline: one id; or several, of the subwords that spell it; or none if it has no token."""
    if vocab.level in ("word", "char"):
        symbol = vocab.eos or "\n"
        return [vocab.ids[symbol]] if symbol in vocab.ids else []
    return vocab.encode("\n").tolist()


def line_start_ids(vocab: Vocab) -> list[int]:
    """Returns the ids to put before a line that is scored alone: the document token or, without one, the newline.

    Without a document token, the list is empty if lines begin with `bos`, or if there is no token for a newline. If the
    list is empty, the first token of the line gets no score. With `bos`, the first token is `bos` itself.
    """
    if vocab.document is not None:
        return [vocab.ids[vocab.document]]
    return [] if vocab.bos else newline_ids(vocab)


def as_iterable(texts: str | bytes | Iterable[str | bytes]) -> Iterable[str | bytes]:
    """Returns a list of the one text, or several texts unchanged."""
    return [texts] if isinstance(texts, (str, bytes)) else texts


def _as_bytes(text: str | bytes) -> bytes:
    """Returns bytes unchanged, and a string as UTF-8."""
    return text if isinstance(text, bytes) else text.encode("utf-8")
