"""Subwords: a vocabulary of pieces of words. SentencePiece makes the pieces from a text, and cuts texts into them.

A `tokenizer.json` of Hugging Face can take the place of the SentencePiece model, see `hf_tokenizer.py`.

    vocab = train_subwords(lines, vocab_size=8000)      # or SubwordVocab.load("my.model", level="subword")
    vocab.decode(vocab.encode(text)) == text            # for any text: nothing is normalised, nothing is unknown

Models and tokenizers of other programs may change a text, and so do vocabularies without `raw_text`.

Characters without a piece are spelled as bytes. Two characters never reach SentencePiece, because it would not return
them: a newline, which ends its lines, and U+2581, which is its own mark for a space. Each of them has ids of its own,
so a text can be cut at any of them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import itertools
import os
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from txl_tf.config import SUBWORD_TYPES, one_of
from txl_tf.data.hf_tokenizer import TokenizerProcessor, is_tokenizer
from txl_tf.data.text_files import checked_string
from txl_tf.data.vocabulary import Vocab, as_iterable
from txl_tf.errors import ParameterError

SPACE = "\u2581"  # SentencePiece's mark for a space
END = "</s>"  # its token for the end of a text
# In training, SentencePiece skips lines that contain a tab, its mark for a space or its mark for unknown text.
_RESERVED = re.compile(f"[\n\t{SPACE}\u2585]")
SAMPLE_BYTES = 50_000_000  # of text to make subwords from; a sample of lines is taken from a larger text
SUBWORDS = 8000  # default size of a vocabulary
_CHARACTERS_OF_PIECE = 50  # characters of a small text per piece, see `train_line_subwords`
_PIECES = 1  # the field of a SentencePiece model that contains its pieces
_LINE_CHARACTERS = 1000  # of a line in training; SentencePiece skips lines of more than 4,192 bytes
# SentencePiece's errors for a size that the text does not allow.
_TOO_HIGH = re.compile(r"Vocabulary size too high .*<= (\d+)")
_TOO_LOW = re.compile(r"smaller than required_chars\. \d+ vs (\d+)")


def sentencepiece() -> Any:
    """Returns the package, which the extra `subword` installs. Raises ParameterError if it is not installed."""
    try:
        import sentencepiece
    except ImportError as error:
        message = "level 'subword' needs the package sentencepiece, which is not installed: pip install sentencepiece"
        raise ParameterError("level", "subword", "another level without sentencepiece", message) from error
    return sentencepiece


@dataclasses.dataclass(eq=False, repr=False)
class SubwordVocab(Vocab):
    """A SentencePiece model as a `Vocab`: tokens are the names of pieces, such as `▁the`, `ing` or `<0x0A>`.

    Args:
        level: `"subword"`.
        document: token at the end of each document, the model's own `</s>`, or `None`.
        eos: token that replaces each newline, or `None`: a newline is bytes, or a piece.
        unk: the model's unknown token; `None`: it has no name. A model that spells characters as bytes never uses it.
        raw_text: as in `Vocab`. The other options of `Vocab` are for tokens that are counted, and must be left out.

    Attributes:
        model: bytes of the SentencePiece model, or of the tokenizer.json.
        processor: `sentencepiece.SentencePieceProcessor` or `TokenizerProcessor`; `None` before `set_data`.
        token_bytes: list of bytes, the text of each id.
        separators: `{character: its ids}` for the characters that never reach SentencePiece.
        adds_space: whether the model puts a space before each line (a tokenizer.json: before the text), as a model of
            another program may do.
    """

    level: str = "subword"

    def __post_init__(self) -> None:
        known = ("level", "document", "eos", "unk", "raw_text")
        options = {name: value for name, value in self.get_config().items() if name not in known}
        given_names = [name for name, value in options.items() if value not in (None, False, 0, (), [])]
        if self.level != "subword" or given_names:
            message = f"level 'subword' takes no option but document, eos and unk, got {given_names or self.level}"
            if self.level != "subword":
                raise ParameterError("level", self.level, ["subword"], message)
            raise ParameterError(given_names[0], options[given_names[0]], "left out at level subword", message)
        self.special = []
        self.counter = Counter()
        self.model = b""
        self.processor: Any = None
        self.token_bytes: list[bytes] = []
        self.separators: dict[str, list[int]] = {}
        self.adds_space = False
        self._set_symbols([])

    # ------------------------------------------------------------------------------------------------------ the model

    def set_data(self, data: bytes, path: str | os.PathLike[str]) -> None:
        """Takes the pieces of a SentencePiece model, or the tokens of a tokenizer.json.

        Args:
            data: content of the file.
            path: the file, for messages.

        Raises:
            ParameterError: `data` is neither of these, it has no symbol `document` or `eos`, or the package that reads
                it is not installed.
        """
        if is_tokenizer(data):
            self._set_tokenizer(data, path)
            return
        package = sentencepiece()
        try:
            processor = package.SentencePieceProcessor(model_proto=data) if data else None
        except RuntimeError:  # its message is about the parser
            processor = None
        if processor is None or not processor.get_piece_size():
            message = f"{path} is neither a SentencePiece model, which --level=subword makes, nor a tokenizer.json"
            raise ParameterError(os.fspath(path), None, "a SentencePiece model", message)
        self.model = data
        self.processor = processor
        self._set_symbols([processor.id_to_piece(i) for i in range(processor.get_piece_size())])
        self.token_bytes = [self._bytes_of(i) for i in range(len(self))]
        names_of = {character: [f"<0x{byte:02X}>" for byte in character.encode()] for character in ("\n", SPACE)}
        if "\n" in self.ids:
            names_of["\n"] = ["\n"]
        known = {character: names for character, names in names_of.items() if self.ids.keys() >= set(names)}
        self.separators = {character: [self.ids[name] for name in names] for character, names in known.items()}
        self.adds_space = processor.encode("a", out_type=str)[0].startswith(SPACE)
        self._check_ends(path)

    def _set_tokenizer(self, data: bytes, path: str | os.PathLike[str]) -> None:
        """Does the work of `set_data` for a tokenizer.json.

        If it has no `</s>` for the end of documents, or no `unk`, its own tokens for these purposes replace them.
        """
        processor = TokenizerProcessor(data, path)
        self.model = data
        self.processor = processor
        self._set_symbols(processor.symbols)
        self.token_bytes = list(processor.token_bytes)
        self.separators = {}
        self.adds_space = processor.adds_space()
        if self.document == END and END not in self.ids:
            self.document = processor.end or END
        if self.unk is not None and self.unk not in self.ids:
            self.unk = processor.unk
        self._check_ends(path)

    def _check_ends(self, path: str | os.PathLike[str]) -> None:
        """Checks that the vocabulary has `document` and `eos`.

        From then on, a newline is encoded as the id of `eos`, and this id is decoded as a newline.

        Raises:
            ParameterError: one of them is not `None` and not in the vocabulary.
        """
        for symbol, what in ((self.document, "documents"), (self.eos, "lines")):
            if symbol is not None and symbol not in self.ids:
                message = f"{path} has no symbol {symbol}, which must end {what}"
                raise ParameterError(os.fspath(path), None, f"a model with the symbol {symbol}", message)
        if self.eos is not None:
            self.separators["\n"] = [self.ids[self.eos]]
            self.token_bytes[self.ids[self.eos]] = b"\n"

    @property
    def is_tokenizer(self) -> bool:
        """Whether the vocabulary is a tokenizer.json and no SentencePiece model."""
        return isinstance(self.processor, TokenizerProcessor)

    @property
    def named_ids(self) -> set[int]:
        """Ids of pieces that stand for no text of their own, such as `<unk>` and `</s>`, without the end of a line.

        For a tokenizer.json, the set is empty: the `token_bytes` of its special tokens are empty.
        """
        if self.is_tokenizer:
            return set()
        processor = self.processor
        named = {i for i in range(len(self)) if processor.is_unknown(i) or processor.is_control(i)}
        if self.eos is not None:
            named.discard(self.ids[self.eos])
        return named

    def _bytes_of(self, i: int) -> bytes:
        """Returns the bytes of text that a piece stands for. For a control piece such as `</s>`, this is its name."""
        if self.processor.is_byte(i):
            return bytes([int(self.symbols[i][3:5], 16)])
        if self.processor.is_unknown(i):
            return " \u2047 ".encode()  # as SentencePiece does
        if self.processor.is_unused(i):
            return b""
        return self.symbols[i].replace(SPACE, " ").encode()

    def get_data(self) -> bytes:
        """Returns the content of the file that `save` writes: the SentencePiece model, or the tokenizer.json."""
        return self.model

    def fingerprint(self) -> str:
        """SHA-256 of the model. Pieces with the same names but other scores would cut a text differently."""
        return hashlib.sha256(self.model).hexdigest()

    def difference(self, other: Vocab) -> str | None:
        """Describes the first difference to another vocabulary; `None` if there is none."""
        first_difference = super().difference(other)
        if first_difference is None and self.fingerprint() != other.fingerprint():
            return "the pieces are the same, the SentencePiece models are not"
        return first_difference

    # ------------------------------------------------------------------------------------------------- text <-> ids

    def count(self, texts: str | bytes | Iterable[str | bytes]) -> int:
        """Counts the pieces of one or more strings in `counter`. Returns the number of ids that `encode` returns."""
        counts = np.zeros(len(self), np.int64)
        for text in as_iterable(texts):
            ids = [i for _, part_ids in self._encoded_parts(self._as_string(text)) for i in part_ids]
            counts += np.bincount(ids, minlength=len(self))
        self.counter.update({self.symbols[i]: int(counts[i]) for i in np.flatnonzero(counts)})
        return int(counts.sum())

    def split(self, text: str | bytes, ids: np.ndarray, k: int) -> tuple[bytes, bytes]:
        """Cuts a text before token `k` of its `ids`. Both parts are bytes: a token may end within a character.

        Together, the parts are the bytes of the text. If the model changes the text around the cut, by more than a
        space before it, the position of the cut is an estimate.
        """
        string = self._as_string(text)
        data = string.encode()
        position = 0
        for part, part_ids in self._encoded_parts(string):
            size = len(part.encode())
            if k < len(part_ids):
                cut = self._bytes_before(part.encode(), part_ids, k)
                return data[: position + cut], data[position + cut :]
            k -= len(part_ids)
            position += size
        return data, b""

    def _bytes_before(self, data: bytes, ids: list[int], k: int) -> int:
        """Returns how many bytes of a text its first `k` ids stand for, see `split`."""
        before = len(b"".join(self.token_bytes[i] for i in ids[:k]))
        spelled = b"".join(self.token_bytes[i] for i in ids)
        if spelled == data:
            return before
        if spelled == b" " + data:
            return max(before - 1, 0)
        return len(data) * before // max(len(spelled), 1)

    def _as_string(self, text: str | bytes) -> str:
        """Returns the text unchanged. Raises ParameterError if it is bytes, or has half of a surrogate pair."""
        string = super()._as_string(text)
        try:
            string.encode()
        except UnicodeEncodeError as error:
            raise ParameterError("texts", text, "text that UTF-8 can encode") from error
        return string

    def _encoded_parts(self, string: str) -> Iterator[tuple[str, list[int]]]:
        """Yields `(part, its ids)`: the texts between separators, which may be empty, and the separators."""
        separator = re.compile(f"([{''.join(self.separators)}])") if self.separators else None
        parts = separator.split(string) if separator else [string]  # text, separator, text, separator, ..., text
        ids_of_texts = self.processor.encode(parts[::2], out_type=int)
        for i, part in enumerate(parts):
            yield part, self.separators[part] if i % 2 else ids_of_texts[i // 2]

    def encode_stream(
        self, texts: Iterable[str | bytes], name: str = "text", first_line: int = 1
    ) -> Iterator[np.ndarray]:
        """Yields the ids of each string, which must not end within a word.

        Args: see `Vocab.encode_stream`.

        Raises:
            ParameterError: a text contains the token `document`, which a tokenizer.json reads as one token.
        """
        document_id = self.document_id
        for text in texts:
            string = self._as_string(text)
            ids = []
            for part, part_ids in self._encoded_parts(string):
                if document_id in part_ids and part not in self.separators:
                    before = string.partition(str(self.document))[0]
                    raise self._document_error(name, first_line + before.count("\n"))
                ids += part_ids
            yield np.array(ids, np.int32)
            first_line += string.count("\n")

    def decode(self, ids: Iterable[int]) -> str:
        """Converts ids to text. Bytes that are not UTF-8 become U+FFFD. Removes a space that `encode` has added.

        Raises:
            ParameterError: an id is outside the vocabulary.
        """
        text = b"".join(self.token_bytes[i] for i in self.checked_ids(ids)).decode("utf-8", "replace")
        if not self.adds_space:
            return text
        return text.removeprefix(" ") if self.is_tokenizer else re.sub("^ ", "", text, flags=re.MULTILINE)


# -------------------------------------------------------------------------------------------------------- of any level


def empty_vocab(**config: Any) -> Vocab:
    """Returns an empty `Vocab` or, at level "subword", `SubwordVocab`.

    Args:
        **config: arguments of `Vocab`.

    Raises:
        ParameterError: an option is wrong, or is not for the level.
    """
    return (SubwordVocab if config.get("level") == "subword" else Vocab)(**config)


def load_vocab(path: str | os.PathLike[str], **config: Any) -> Vocab:
    """Reads a `Vocab` or, at level "subword", a `SubwordVocab` from a file: see `Vocab.load`."""
    return type(empty_vocab(**config)).load(path, **config)


def vocab_file(name: str, level: str | None) -> str:
    """Returns the name of a vocabulary's file.

    At level "subword", it ends in .model, also if the file is a tokenizer.json and no SentencePiece model. Otherwise,
    it ends in .txt, and the file has a token per line.
    """
    return f"{name}.model" if level == "subword" else f"{name}.txt"


# ------------------------------------------------------------------------------------------------------------ training


def train_subwords(lines: Iterable[str], vocab_size: int, subword_type: str = "unigram", **config: Any) -> SubwordVocab:
    """Makes a vocabulary of the pieces that occur in lines of text, by SentencePiece.

    (The vocabulary of a run is made by the same functions, in `data/text/encoding.py`, which reads the text in
    portions.)

    Args:
        lines: strings; newlines in them end lines too. If they have more than `SAMPLE_BYTES`, a `Sample` is used.
        vocab_size: number of pieces, including 256 bytes, `<unk>` (never used) and `</s>`. These two come first, then
            the others, from the most to the least frequent.
        subword_type: `"unigram"` or `"bpe"`.
        **config: arguments of `SubwordVocab`.

    Raises:
        ParameterError: `vocab_size` is too large or too small for the text; or sentencepiece is not installed.
    """
    one_of(SUBWORD_TYPES)("subword_type", subword_type)
    sentencepiece()  # raises an error before the text is read
    return train_on_lines(Sample.of(training_lines(lines)).lines, vocab_size, subword_type, **config)


def train_line_subwords(lines: Iterable[str], vocab_size: int | None, subword_type: str) -> SubwordVocab:
    """Makes the subwords of an encoder-decoder, in which a newline becomes `</s>`.

    `<pad>`, `<s>`, `</s>` and `<unk>` have the ids 0 to 3, as `txl_tf/data/pairs/parallel.py` expects.

    Args:
        lines: strings.
        vocab_size: number of pieces, including the 4 special ones and 256 bytes. `None`: at most these 260, one for
            every different character of the text and, as long as the sum is below `SUBWORDS`, one for every
            `_CHARACTERS_OF_PIECE` characters of the text. Of a large text, only a `Sample` counts.
        subword_type: `"unigram"` or `"bpe"`.

    Raises:
        ParameterError: as `train_subwords`.
    """
    sentencepiece()  # raises an error before the text is read
    sample = Sample.of(training_lines(lines)).lines
    options: dict[str, Any] = {
        "pad_id": 0,
        "bos_id": 1,
        "eos_id": 2,
        "unk_id": 3,
        "pad_piece": "<pad>",
        "bos_piece": "<s>",
    }
    if vocab_size is None:
        counts = Counter(itertools.chain.from_iterable(sample))
        smallest = 4 + 256 + len(counts)  # special pieces, bytes, characters
        vocab_size = max(smallest, min(SUBWORDS, smallest + counts.total() // _CHARACTERS_OF_PIECE))
        options["hard_vocab_limit"] = False
    return train_on_lines(sample, vocab_size, subword_type, options, eos=END, unk="<unk>")


def train_on_lines(
    lines: list[str], vocab_size: int, subword_type: str, options: dict[str, Any] | None = None, **config: Any
) -> SubwordVocab:
    """Makes subwords from all of the lines, without a sample. Other arguments and errors: see `train_subwords`.

    Args:
        lines: from `training_lines`.
        options: further options of SentencePiece's trainer, such as the ids of special pieces.
    """
    vocab = SubwordVocab(**config)
    options = {"unk_id": 0, "eos_id": 1, "bos_id": -1, "pad_id": -1, **(options or {})}
    package = sentencepiece()
    written = io.BytesIO()
    try:
        package.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=written,
            model_type=subword_type,
            vocab_size=vocab_size,
            byte_fallback=True,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            eos_piece=END,
            minloglevel=2,
            **options,
        )
    except RuntimeError as error:
        for pattern, word in ((_TOO_HIGH, "most"), (_TOO_LOW, "least")):
            match = pattern.search(str(error))
            if match:
                allowed = f"at {word} {match[1]} for this text and {subword_type}"
                raise ParameterError("vocab_size", vocab_size, allowed) from error
        message = f"SentencePiece cannot make {vocab_size} subwords of this text: {error}"
        raise ParameterError("vocab_size", vocab_size, "a number that fits the text", message) from error
    vocab.set_data(written.getvalue(), "the trained model")
    vocab.count(lines)
    newline = vocab.symbols[vocab.separators["\n"][0]]
    vocab.counter[newline] = len(lines)  # about: lines come without newlines, and some are parts of lines
    vocab.set_data(_by_frequency(vocab), "the trained model")
    vocab.counter.clear()
    return vocab


def _by_frequency(vocab: SubwordVocab) -> bytes:
    """Returns the model with its special pieces first, then the others by count, as the adaptive softmax needs them.

    The order decides only the ids: SentencePiece cuts a text by the scores of the pieces.

    This function moves the serialized pieces without reading them. The package also has a class for the model, but this
    class needs a newer protobuf than most versions of TensorFlow allow.
    """
    fields = list(_fields_of(vocab.model))
    pieces = [field for number, field in fields if number == _PIECES]
    other_fields = [field for number, field in fields if number != _PIECES]
    processor = vocab.processor
    n_special = sum(processor.is_unknown(i) or processor.is_control(i) for i in range(len(pieces)))
    order = sorted(range(n_special, len(pieces)), key=lambda i: -vocab.counter[vocab.symbols[i]])
    return b"".join([*pieces[:n_special], *(pieces[i] for i in order), *other_fields])


def _fields_of(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Yields the number and the bytes, with tag and length, of each field of a serialized protobuf message.

    Every field of the message must store its length, as strings and messages do.
    """
    start = 0
    while start < len(message):
        tag, position = _varint(message, start)
        length, position = _varint(message, position)
        yield tag >> 3, message[start : position + length]
        start = position + length


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """Reads a number that protobuf wrote: seven bits a byte, the lowest first. Returns it and the position after it."""
    number = shift = 0
    while True:
        byte = data[position]
        position += 1
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:  # in all bytes but the last, the highest bit is set
            return number, position


class Sample:
    """A sample of the lines of a text, from all parts of it, of at most `SAMPLE_BYTES`.

    A text always has the same sample. A line is in it if a 32-bit hash of the line's number is below `hash_limit`. The
    sample halves this limit until it is small enough. So the samples of the parts of a text, joined, are the sample of
    the whole text.

    Args:
        hash_limit: the limit at the start. By default it admits every line.
    """

    def __init__(self, hash_limit: int = 1 << 32):
        self.hash_limit = hash_limit
        self._hashed: list[tuple[int, str]] = []  # hash and line
        self._n_bytes = 0

    @classmethod
    def of(cls, lines: Iterable[str], first: int = 0, hash_limit: int = 1 << 32) -> Sample:
        """Returns the sample of some lines; `first` is the number of the first one in the whole text, from 0."""
        sample = cls(hash_limit)
        for number, line in enumerate(lines, first):
            sample._add(zlib.crc32(number.to_bytes(8, "little")), line)
        return sample

    @property
    def lines(self) -> list[str]:
        """The lines of the sample, in the order of the text."""
        return [line for _, line in self._hashed]

    def join(self, other: Sample) -> None:
        """Adds the sample of the next part of the text."""
        self._lower_limit(min(self.hash_limit, other.hash_limit))
        for hashed, line in other._hashed:
            self._add(hashed, line)

    def _add(self, hashed: int, line: str) -> None:
        """Adds a line if its hash is below the limit. Halves the limit while the sample is too large."""
        if hashed >= self.hash_limit:
            return
        self._hashed.append((hashed, line))
        self._n_bytes += len(line.encode())
        while self._n_bytes > SAMPLE_BYTES:
            self._lower_limit(self.hash_limit // 2)

    def _lower_limit(self, hash_limit: int) -> None:
        """Sets the limit, if it is lower than now, and drops the lines whose hash is not below it."""
        if hash_limit < self.hash_limit:
            self.hash_limit = hash_limit
            self._hashed = [(hashed, line) for hashed, line in self._hashed if hashed < hash_limit]
            self._n_bytes = sum(len(line.encode()) for _, line in self._hashed)


def training_lines(texts: Iterable[str | bytes]) -> Iterator[str]:
    """Yields the lines of texts in a form that SentencePiece does not skip.

    It cuts the texts at the characters of `_RESERVED`, drops them and empty lines, and cuts a line of more than
    `_LINE_CHARACTERS` characters, at a space if possible.
    """
    for text in texts:
        for line in _RESERVED.split(checked_string(text)):
            begin = 0
            while begin < len(line):
                end = len(line)
                if end - begin > _LINE_CHARACTERS:
                    end = line.rfind(" ", begin + 1, begin + _LINE_CHARACTERS)
                    end = end if end > 0 else begin + _LINE_CHARACTERS
                yield line[begin:end]
                begin = end
