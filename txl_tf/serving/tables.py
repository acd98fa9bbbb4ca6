"""Vocabularies as tables of a graph, which turn text into ids and back inside a SavedModel.

Shapes:
    B: batch      N: tokens of the longest row      C: tokens of all rows      S: stop strings      L: their longest
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from txl_tf.data.tagged.batches import UNKNOWN_ID
from txl_tf.data.vocabulary import Vocab
from txl_tf.errors import ParameterError
from txl_tf.language.stopping import NONE
from txl_tf.serving.request import Check, checked, first_row_where

RaggedTensor: Any = tf.RaggedTensor  # the type stubs of TensorFlow lack its methods

# Characters that are white space for `str.split`, but not for `tf.strings.split`.
UNICODE_SPACE = "[\x1c-\x1f\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]"
# All characters that are white space for `str.split`.
WHITE_SPACE = UNICODE_SPACE[:-1] + "\t-\r ]"


def named_vocabs(vocabs: Vocab | Sequence[Vocab], sizes: dict[str, int | None], model: str) -> dict[str, Vocab]:
    """Gives vocabularies names, and checks their types and sizes.

    Args:
        vocabs: the vocabularies, or the only one.
        sizes: `{name: number of symbols that the model has}` in their order; `None` for any number.
        model: name of the model in messages.

    Returns:
        `{name: vocabulary}`.

    Raises:
        ParameterError: there are more or fewer vocabularies than `sizes`, one is no `Vocab`, or one has another size
            than in `sizes`.
    """
    several: Any = vocabs if isinstance(vocabs, (list, tuple)) else [vocabs]
    if len(several) != len(sizes):
        message = f"vocab must be [{', '.join(sizes)}] for {model}, got {len(several)} of them"
        raise ParameterError("vocab", len(several), f"[{', '.join(sizes)}]", message)
    named = dict(zip(sizes, several, strict=True))
    for name, vocab in named.items():
        if not isinstance(vocab, Vocab):
            raise ParameterError(name, vocab, "a Vocab")
        if sizes[name] not in (None, len(vocab)):
            allowed = f"the {sizes[name]} symbols of the model"
            raise ParameterError(name, len(vocab), allowed, f"{name} must hold {allowed}, got {len(vocab)}")
    return named


def check_utf8(name: str, text: tf.Tensor) -> Check:
    """A check that all strings of `text` `[B, ...]` are UTF-8. Its message calls them `name`."""
    valid = tf.strings.unicode_transcode(text, "UTF-8", "UTF-8") == text  # it replaces other bytes by U+FFFD
    found = tf.strings.join(["other bytes in row ", first_row_where(~valid)])
    return Check(valid, f"{name} must be UTF-8 in every row", found)


def read_text(vocab: Vocab, text: tf.Tensor) -> tf.Tensor:
    """Texts in the form that a vocabulary reads: plain text without byte order marks, and with "\\n" as line ends.

    Texts for a vocabulary of bytes, or one with `raw_text`, are not changed.
    """
    if not vocab.has_plain_text:
        return text
    return tf.strings.regex_replace(tf.strings.regex_replace(text, "\ufeff", ""), "\r\n?", "\n")


def _table_of_lines(path: str, by_symbol: bool = True) -> tf.lookup.TextFileInitializer:
    """The content of a table: from lines of a file to their numbers or, unless `by_symbol`, from numbers to lines."""
    line = (tf.string, tf.lookup.TextFileIndex.WHOLE_LINE)
    number = (tf.int64, tf.lookup.TextFileIndex.LINE_NUMBER)
    if by_symbol:
        return tf.lookup.TextFileInitializer(path, *line, *number)
    return tf.lookup.TextFileInitializer(path, *number, *line)


class GraphTokenizer(tf.Module):
    """A `Vocab` of words, characters or bytes as a graph.

    Args:
        vocab: the vocabulary.
        path: path of its file, which becomes an asset of the SavedModel.
    """

    def __init__(self, vocab: Vocab, path: str):
        super().__init__()
        self.vocab = vocab
        self.asset = tf.saved_model.Asset(path)
        self.ids = tf.lookup.StaticHashTable(self._initializer(path, by_symbol=True), -1)
        self.symbols = tf.lookup.StaticHashTable(self._initializer(path, by_symbol=False), "")

    def _initializer(self, path: str, by_symbol: bool) -> Any:
        """The content of a table: from symbols to ids or, unless `by_symbol`, from ids to symbols."""
        if self.vocab.level == "word":
            return _table_of_lines(path, by_symbol)
        # A newline may be a symbol, so a line of the file is not always a symbol.
        symbols = [symbol.encode("utf-8", "surrogateescape") for symbol in self.vocab.symbols]
        ids = tf.range(len(symbols), dtype=tf.int64)
        return tf.lookup.KeyValueTensorInitializer(*((symbols, ids) if by_symbol else (ids, symbols)))

    def encode(self, text: tf.Tensor, name: str = "text") -> tf.RaggedTensor:
        """`Vocab.encode` of every string of `text` `[B]`: int32 ragged `[B, None]`.

        Adds checks of the text, whose messages call the argument `name`: it must be UTF-8 except at byte level. At
        level "word", no word may be the symbol that ends documents. Without an unknown symbol, all symbols must be
        known.
        """
        vocab = self.vocab
        symbols = self._tokenize(text)
        ids: Any = tf.cast(self.ids.lookup(symbols.flat_values), tf.int32)
        checks = [check_utf8(name, text)] if vocab.level != "byte" else []
        if vocab.level == "word" and vocab.document is not None:
            message = f"{name} must not contain the symbol that ends documents"
            checks.append(Check(ids != vocab.document_id, message, tf.constant(vocab.document)))
        unk = None if vocab.unk is None else vocab.ids.get(vocab.unk)
        if unk is None:
            checks.append(self._check_known(name, ids >= 0, symbols.flat_values))
        else:
            ids = tf.where(ids < 0, unk, ids)
        return symbols.with_flat_values(checked(checks, ids))

    def _check_known(self, name: str, known: Any, strings: Any) -> Check:
        """A check that `known` is true everywhere.

        `known[i]` says whether the vocabulary has all symbols of `strings[i]`. The message calls the argument `name`.
        """
        message = f"{name} must be made of the {len(self.vocab)} symbols of the vocabulary"
        return Check(known, message, lambda: strings[~known][:1])

    def stop_units(self, stop: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """The units of stop strings `[B, S]`, see `txl_tf.language.stopping.spell`.

        Returns:
            `(units, lengths)`: int32 `[B, S, L]`, padded with -1, and int32 `[B, S]`. The length of "", which is no
            stop string, is 0.

        Adds checks that the strings are UTF-8, except at byte level, and that every other string has symbols, all of
        them in the vocabulary.
        """
        flat = tf.reshape(stop, [-1])
        symbols = self._tokenize(flat)
        ids = symbols.with_flat_values(tf.cast(self.ids.lookup(symbols.flat_values), tf.int32))
        if self.vocab.bos:
            ids = ids[:, 1:]  # a stop string need not begin a line
        # A string that is a symbol itself, such as "<eos>", stands for this symbol.
        special_ids = tf.cast(self.ids.lookup(flat), tf.int32)[:, None]
        units = ids.to_tensor(NONE)
        longest = tf.shape(units)[1]
        is_special = special_ids >= 0
        special_units = tf.where(tf.range(longest) == 0, special_ids, NONE)
        units = tf.where(is_special, special_units, units)
        lengths = tf.where(is_special[:, 0], 1, tf.cast(ids.row_lengths(), tf.int32))
        unknown = tf.reduce_any(tf.sequence_mask(lengths, longest) & (units < 0), 1)
        is_bad: Any = unknown | ((lengths == 0) & (tf.strings.length(flat) > 0))
        checks = [check_utf8("stop", stop)] if self.vocab.level != "byte" else []
        units, lengths = checked([*checks, self._check_known("stop", ~is_bad, flat)], units, lengths)
        shape = tf.shape(stop)
        return tf.reshape(units, [*tf.unstack(shape), longest]), tf.reshape(lengths, shape)

    def _tokenize(self, text: Any) -> Any:
        """The symbols of every string of `text` `[B]`: ragged `[B, None]`.

        At level "word", lines begin with `bos` and end with `eos`, if the vocabulary has them, as in `Vocab.encode`.
        """
        vocab = self.vocab
        replace = tf.strings.regex_replace
        text = read_text(vocab, text)
        if vocab.level == "byte":
            return tf.strings.bytes_split(text)
        if vocab.lower_case:
            text = lower(text)
        if vocab.level == "char":
            return tf.strings.unicode_split(text, "UTF-8")
        if vocab.bos:
            lines = replace(tf.strings.join([f"{vocab.bos} ", text]), "\n", _as_replacement(f"\n{vocab.bos} "))
            lines = replace(lines, f"\n{re.escape(vocab.bos)} \\z", "\n")  # no line begins after the last newline
            text = tf.where(text == "", text, lines)
        if vocab.eos:
            text = replace(text, "\n", _as_replacement(f" {vocab.eos} "))
        return tf.strings.split(replace(text, UNICODE_SPACE, " "))

    def decode(self, ids: tf.Tensor, lengths: tf.Tensor) -> tf.Tensor:
        """`Vocab.decode` of every row of `ids` `[B, N]` up to its length `[B]`: string `[B]`."""
        vocab = self.vocab
        replace = tf.strings.regex_replace
        symbols = RaggedTensor.from_tensor(self.spell(ids), lengths)
        if vocab.level != "word":
            return tf.strings.reduce_join(symbols, -1)
        if vocab.eos:
            words = symbols.flat_values
            symbols = symbols.with_flat_values(tf.where(words == vocab.eos, "\n", words))
        text = replace(tf.strings.reduce_join(symbols, -1, separator=" "), " ?\n ?", "\n")
        if vocab.bos and vocab.bos == vocab.eos:
            return replace(replace(text, "\n+", "\n"), "^\n", "")
        return replace(text, f"(?m)^(?:{re.escape(vocab.bos)}(?: |$))+", "") if vocab.bos else text

    def spell(self, ids: tf.Tensor) -> tf.Tensor:
        """The symbols of `ids`: strings of the shape of `ids`, which may be any."""
        return self.symbols.lookup(tf.cast(ids, tf.int64))


class SymbolTable(tf.Module):
    """A `Vocab` of level "word" as a table of a graph, for whole symbols: characters, bigrams or words of a lexicon.

    Args:
        vocab: the vocabulary.
        path: file of the vocabulary, which becomes an asset of the SavedModel.
    """

    def __init__(self, vocab: Vocab, path: str):
        super().__init__()
        self.vocab = vocab
        self.table = tf.lookup.StaticHashTable(_table_of_lines(path), -1)

    def has(self, symbols: tf.Tensor) -> tf.Tensor:
        """Whether the vocabulary has each symbol: bool."""
        return self.table.lookup(symbols) >= 0

    def ids(self, symbols: tf.Tensor) -> tf.Tensor:
        """The ids of symbols: int64. "<pad>" and symbols that the vocabulary lacks get the id of the unknown symbol."""
        return tf.maximum(self.table.lookup(symbols), UNKNOWN_ID)


def without_last_bytes(text: tf.Tensor, n: Any) -> tf.Tensor:
    """Strings without their last `n` bytes. `n` is an int32 tensor of the shape of `text`, or one number."""
    size = tf.strings.length(text)
    return tf.strings.substr(text, tf.zeros_like(size), size - n)


def lower(text: tf.Tensor) -> tf.Tensor:
    """Strings `[any]` in lower case. TensorFlow's operation alone would drop the text after a NUL character."""
    parts = tf.strings.split(tf.strings.join([text, "\0"]), "\0")[:, :-1]  # a NUL follows each part
    lowered = tf.ragged.map_flat_values(lambda part: tf.strings.join([tf.strings.lower(part, "utf-8"), "\0"]), parts)
    return without_last_bytes(tf.strings.reduce_join(lowered, -1), 1)


def forms_of(words: tf.Tensor) -> tf.Tensor:
    """The form of every word, see `form_of`: its last three characters, with every digit as 0.

    If the word begins with a capital letter, "^" comes before them. `words` and the result are strings `[C]`.
    """
    first = tf.strings.substr(words, 0, 1, "UTF8_CHAR")
    length = tf.strings.length(words, "UTF8_CHAR")
    last = tf.strings.substr(words, tf.maximum(length - 3, 0), tf.minimum(length, 3), "UTF8_CHAR")
    capital = tf.where(lower(first) != first, "^", "")
    return tf.strings.join([capital, tf.strings.regex_replace(last, "[0-9]", "0")])


class Tokens(NamedTuple):
    """The tokens of texts, and where they are in the texts.

    Attributes:
        strings, starts, ends: ragged `[B, None]`: the tokens; the index in the text of the first character of each; and
            the index after its last character.
    """

    strings: Any
    starts: Any
    ends: Any


def characters_of(text: tf.Tensor) -> Tokens:
    """The characters of texts `[B]`."""
    chars: Any = tf.strings.unicode_split(text, "UTF-8")
    positions = tf.ragged.range(tf.cast(chars.row_lengths(), tf.int32))
    return Tokens(chars, positions, positions + 1)


def words_of(text: tf.Tensor) -> Tokens:
    """The words of texts `[B]`, as `str.split` finds them."""
    chars, starts, ends = characters_of(text)
    rows = chars.value_rowids()
    flat = chars.flat_values
    starts = starts.flat_values
    # Each of these has one value for each character of all texts.
    inside = tf.logical_not(tf.strings.regex_full_match(flat, WHITE_SPACE))  # whether it belongs to a word
    begins = inside & ((starts == 0) | tf.logical_not(tf.pad(inside[:-1], [[1, 0]])))  # whether a word begins with it
    in_words = tf.where(inside)[:, 0]
    first = tf.where(begins)[:, 0]
    number = tf.gather(tf.cumsum(tf.cast(begins, tf.int32)), in_words) - 1  # of the word of every character
    n_words = tf.size(first)
    words = tf.strings.unsorted_segment_join(tf.gather(flat, in_words), number, n_words)
    ends = tf.math.unsorted_segment_max(tf.gather(ends.flat_values, in_words), number, n_words)
    columns = (words, tf.gather(starts, first), ends)
    return Tokens(*(RaggedTensor.from_value_rowids(x, tf.gather(rows, first), chars.nrows()) for x in columns))


def _as_replacement(text: str) -> str:
    """`text` as the replacement in `tf.strings.regex_replace`, where a single backslash marks the number of a group."""
    return text.replace("\\", "\\\\")
