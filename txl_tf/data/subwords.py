"""Subwords: a vocabulary of pieces of words, which SentencePiece makes of a text and cuts texts into.

    vocab = train_subwords(lines, vocab_size=8000)      # or SubwordVocab.load("my.model", level="subword")
    vocab.decode(vocab.encode(text)) == text            # of any text: nothing is normalised, nothing unknown

Characters without a piece are spelt as bytes. Two characters never reach SentencePiece, as it would not give them back:
a newline, which ends its lines, and U+2581, which is its own mark of a space. They are pieces or bytes of their own, so
that a text can be cut at them anywhere.
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
from txl_tf.data.vocabulary import Vocab, as_iterable

SPACE = "\u2581"  # SentencePiece's mark of a space
END = "</s>"  # its token for the end of a text
# SentencePiece skips lines in training that hold a tab, its space or its sign for what is unknown.
_RESERVED = re.compile(f"[\n\t{SPACE}\u2585]")
SAMPLE_BYTES = 50_000_000  # of text that subwords are made from; of a larger one, lines from all over it
SUBWORDS = 8000  # of a vocabulary of no other size
_CHARACTERS_OF_PIECE = 50  # of a small text, see `train_line_subwords`
_PIECES = 1  # the field of a SentencePiece model that has its pieces
_LINE_CHARACTERS = 1000  # of a line in training; SentencePiece skips lines above 4,192 bytes
_TOO_HIGH = re.compile(r"Vocabulary size too high .*<= (\d+)")
_TOO_LOW = re.compile(r"smaller than required_chars\. \d+ vs (\d+)")


def sentencepiece() -> Any:
    """The package, which the extra `subword` installs."""
    try:
        import sentencepiece
    except ImportError as error:
        raise ValueError(
            "level 'subword' needs the package sentencepiece, which is not installed: pip install sentencepiece"
        ) from error
    return sentencepiece


@dataclasses.dataclass(eq=False, repr=False)
class SubwordVocab(Vocab):
    """A SentencePiece model as a `Vocab`: tokens are the names of pieces, such as `▁the`, `ing` or `<0x0A>`.

    Args:
        level: `"subword"`.
        document: token that ends each document, the model's own `</s>`, or `None`.
        eos: token that each newline becomes, or `None`: bytes, or a piece.
        unk: the model's unknown token, which no text has: its bytes spell all characters. `None`: that has no name.
            The other options of `Vocab` are for tokens that are counted.

    Attributes:
        model: bytes of the SentencePiece model.
        processor: `sentencepiece.SentencePieceProcessor`.
        token_bytes: list of bytes, the text that every id stands for.
        separators: `{character: ids}` of the characters that never reach SentencePiece.
        adds_space: whether the model puts a space before a text, as those of other programs may do.
    """

    level: str = "subword"

    def __post_init__(self) -> None:
        known = ("level", "document", "eos", "unk", "raw_text")
        options = {name: value for name, value in self.get_config().items() if name not in known}
        given = [name for name, value in options.items() if value not in (None, False, 0, (), [])]
        if self.level != "subword" or given:
            raise ValueError(f"level 'subword' takes no option but document, eos and unk, got {given or self.level}")
        self.special = []
        self.counter = Counter()
        self.model, self.processor, self.token_bytes, self.separators, self.adds_space = b"", None, [], {}, False
        self._set_symbols([])

    # ------------------------------------------------------------------------------------------------------ the model

    def set_data(self, model: bytes, path: str | os.PathLike) -> None:
        """Takes the pieces of a SentencePiece model, of `save` or of any other program; errors name the file `path`.

        Raises:
            ValueError: it is no SentencePiece model, or sentencepiece is not installed.
        """
        package = sentencepiece()
        try:
            processor = package.SentencePieceProcessor(model_proto=model) if model else None
        except RuntimeError:  # its text is about the parser
            processor = None
        if processor is None or not processor.get_piece_size():
            raise ValueError(f"{path} is not a SentencePiece model, such as --level=subword writes")
        self.model, self.processor = model, processor
        self._set_symbols([processor.id_to_piece(i) for i in range(processor.get_piece_size())])
        self.token_bytes = [self._bytes_of(i) for i in range(len(self))]
        spelt = {character: [f"<0x{byte:02X}>" for byte in character.encode()] for character in ("\n", SPACE)}
        if "\n" in self.ids:
            spelt["\n"] = ["\n"]
        known = {character: names for character, names in spelt.items() if self.ids.keys() >= set(names)}
        self.separators = {character: [self.ids[name] for name in names] for character, names in known.items()}
        self.adds_space = processor.encode("a", out_type=str)[0].startswith(SPACE)
        for symbol, what in ((self.document, "documents"), (self.eos, "lines")):
            if symbol is not None and symbol not in self.ids:
                raise ValueError(f"{path} has no symbol {symbol} to end {what} with")
        if self.eos is not None:
            self.separators["\n"] = [self.ids[self.eos]]
            self.token_bytes[self.ids[self.eos]] = b"\n"

    def _bytes_of(self, i: int) -> bytes:
        if self.processor.is_byte(i):
            return bytes([int(self.symbols[i][3:5], 16)])
        if self.processor.is_unknown(i):
            return " \u2047 ".encode()  # as SentencePiece does
        if self.processor.is_unused(i):
            return b""
        return self.symbols[i].replace(SPACE, " ").encode()

    def get_data(self) -> bytes:
        """What `save` writes: the SentencePiece model."""
        return self.model

    def fingerprint(self) -> str:
        """SHA-256 of the model: pieces of the same names and other scores cut a text otherwise."""
        return hashlib.sha256(self.model).hexdigest()

    def difference(self, other: Vocab) -> str | None:
        found = super().difference(other)
        if found is None and self.fingerprint() != other.fingerprint():
            return "the pieces are the same, the SentencePiece models are not"
        return found

    # ------------------------------------------------------------------------------------------------- text <-> ids

    def count(self, texts: str | bytes | Iterable[str]) -> int:
        """Counts the pieces of a string or of several; returns how many ids `encode` makes."""
        counts = np.zeros(len(self), np.int64)
        for ids in self.encode_stream(as_iterable(texts)):
            counts += np.bincount(ids, minlength=len(self))
        self.counter.update({self.symbols[i]: int(counts[i]) for i in np.flatnonzero(counts)})
        return int(counts.sum())

    def split(self, text: str, ids: np.ndarray, k: int) -> tuple[bytes, bytes]:
        before = b"".join(self.token_bytes[i] for i in ids[:k])
        return before, text.encode()[len(before) :]

    def encode_stream(self, texts: Iterable[str], name: str = "text", first_line: int = 1) -> Iterator[np.ndarray]:
        """Yields the ids of each string of an iterable in turn. A string must not end within a word."""
        cut = re.compile(f"([{''.join(self.separators)}])") if self.separators else re.compile("(?!)()")
        for text in texts:
            parts = cut.split(text)
            pieces = self.processor.encode(parts[::2], out_type=int)
            between = [self.separators[separator] for separator in parts[1::2]]
            ids = itertools.chain.from_iterable(itertools.chain.from_iterable(zip(pieces, [*between, []], strict=True)))
            yield np.fromiter(ids, np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        """Turns ids into text. Bytes that are not UTF-8 become U+FFFD; ValueError for an id outside the vocabulary."""
        text = b"".join(self.token_bytes[i] for i in self.checked_ids(ids)).decode("utf-8", "replace")
        return re.sub("^ ", "", text, flags=re.MULTILINE) if self.adds_space else text


# -------------------------------------------------------------------------------------------------------- of any level


def empty_vocab(**config) -> Vocab:
    """An empty `Vocab` or `SubwordVocab`, by its level; checks the options."""
    return (SubwordVocab if config.get("level") == "subword" else Vocab)(**config)


def load_vocab(path: str | os.PathLike, **config) -> Vocab:
    """Reads the vocabulary of the level that `config`, the arguments of `Vocab`, has."""
    return type(empty_vocab(**config)).load(path, **config)


def vocab_file(name: str, level: str | None) -> str:
    """The name of a vocabulary's file: a text of tokens, or a SentencePiece model."""
    return f"{name}.model" if level == "subword" else f"{name}.txt"


# ------------------------------------------------------------------------------------------------------------ training


def train_subwords(lines: Iterable[str], vocab_size: int, subword_type: str = "unigram", **config) -> SubwordVocab:
    """Has SentencePiece make a vocabulary of the pieces that occur in lines of text.

    Args:
        lines: strings; newlines in them end lines too. A `Sample` of them counts.
        vocab_size: number of pieces, among them 256 bytes, `<unk>` (never used) and `</s>`. The frequent come first.
        subword_type: `"unigram"` or `"bpe"`.
        **config: of `SubwordVocab`.

    Raises:
        ValueError: `vocab_size` is more, or less, than the text allows; or sentencepiece is not installed.
    """
    one_of(SUBWORD_TYPES)("subword_type", subword_type)
    sentencepiece()  # or else says so before it reads the text
    return train_on_lines(Sample.of(training_lines(lines)).lines, vocab_size, subword_type, **config)


def train_line_subwords(lines: Iterable[str], vocab_size: int | None, subword_type: str) -> SubwordVocab:
    """Subwords of the lines of an encoder-decoder: the first ids are `<pad>`, `<s>`, `</s>` and `<unk>`, as those of
    `txl_tf.data.pairs.parallel`, and a newline becomes `</s>`.

    Args:
        lines: strings.
        vocab_size: number of pieces, the special ones and 256 bytes among them. `None`: `SUBWORDS`, and of a small text
            one for every `_CHARACTERS_OF_PIECE` characters besides its own characters.
        subword_type: `"unigram"` or `"bpe"`.

    Raises: as `train_subwords`.
    """
    sentencepiece()  # or else says so before it reads the text
    sample = Sample.of(training_lines(lines)).lines
    options = {"pad_id": 0, "bos_id": 1, "eos_id": 2, "unk_id": 3, "pad_piece": "<pad>", "bos_piece": "<s>"}
    if vocab_size is None:
        counts = Counter(itertools.chain.from_iterable(sample))
        own = 4 + 256 + len(counts)  # special pieces, bytes, characters
        vocab_size = max(own, min(SUBWORDS, own + counts.total() // _CHARACTERS_OF_PIECE))
        options["hard_vocab_limit"] = False
    return train_on_lines(sample, vocab_size, subword_type, options, eos=END, unk="<unk>")


def train_on_lines(
    lines: list[str], vocab_size: int, subword_type: str, options: dict | None = None, **config
) -> SubwordVocab:
    """As `train_subwords`, of all of the lines, which are those of `training_lines`.

    `options`: further ones of SentencePiece's trainer, such as the ids of special pieces.
    """
    vocab = SubwordVocab(**config)
    options = {"unk_id": 0, "eos_id": 1, "bos_id": -1, "pad_id": -1, **(options or {})}
    package, written = sentencepiece(), io.BytesIO()
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
            found = pattern.search(str(error))
            if found:
                raise ValueError(
                    f"vocab_size must be at {word} {found[1]} for this text and {subword_type}, got {vocab_size}"
                ) from error
        raise ValueError(f"SentencePiece makes no {vocab_size} subwords of this text: {error}") from error
    vocab.set_data(written.getvalue(), "the trained model")
    vocab.count(lines)
    vocab.counter[vocab.symbols[vocab.separators["\n"][0]]] = len(lines)
    vocab.set_data(_by_frequency(vocab), "the trained model")
    vocab.counter.clear()
    return vocab


def _by_frequency(vocab: SubwordVocab) -> bytes:
    """The model with its pieces in the order of their counts, as the adaptive softmax wants them; special ones first.

    To SentencePiece the order is nothing but the ids: scores say which pieces a text is cut into.

    The bytes of each piece are moved as they are. The package also has a class for the model, but that needs a newer
    protobuf than most versions of TensorFlow allow.
    """
    fields = list(_fields_of(vocab.model))
    pieces = [field for number, field in fields if number == _PIECES]
    others = [field for number, field in fields if number != _PIECES]
    processor = vocab.processor
    n_special = sum(processor.is_unknown(i) or processor.is_control(i) for i in range(len(pieces)))
    order = sorted(range(n_special, len(pieces)), key=lambda i: -vocab.counter[vocab.symbols[i]])
    return b"".join([*pieces[:n_special], *(pieces[i] for i in order), *others])


def _fields_of(message: bytes) -> Iterator[tuple[int, bytes]]:
    """The number and the bytes of each field of a serialized protobuf message, all of whose fields have a length."""
    start = 0
    while start < len(message):
        tag, at = _varint(message, start)
        length, at = _varint(message, at)
        yield tag >> 3, message[start : at + length]
        start = at + length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number that protobuf wrote at a place, seven bits a byte, the lowest first; and the place after it."""
    number = shift = 0
    while True:
        number |= (data[at] & 0x7F) << shift
        shift += 7
        at += 1
        if data[at - 1] < 0x80:
            return number, at


class Sample:
    """Some of the lines of a text, at most `SAMPLE_BYTES`, from all over it.

    They are always the same ones: a line stays if a hash of its number is below a share, which is halved until the
    lines are few enough. So samples of the parts of a text join to that of the whole text.

    Args:
        share: what the hashes, of 32 bits, must be below at least.
    """

    def __init__(self, share: int = 1 << 32):
        self.share, self._kept, self._n_bytes = share, [], 0

    @classmethod
    def of(cls, lines: Iterable[str], first: int = 0, share: int = 1 << 32) -> Sample:
        """The sample of lines of which the first one has the number `first` in the text."""
        sample = cls(share)
        for number, line in enumerate(lines, first):
            sample._add(zlib.crc32(number.to_bytes(8, "little")), line)
        return sample

    @property
    def lines(self) -> list[str]:
        return [line for _, line in self._kept]

    def join(self, other: Sample) -> None:
        """Adds that of the part that follows."""
        self._take_below(min(self.share, other.share))
        for place, line in other._kept:
            self._add(place, line)

    def _add(self, place: int, line: str) -> None:
        if place >= self.share:
            return
        self._kept.append((place, line))
        self._n_bytes += len(line.encode())
        while self._n_bytes > SAMPLE_BYTES:
            self._take_below(self.share // 2)

    def _take_below(self, share: int) -> None:
        if share < self.share:
            self.share = share
            self._kept = [(place, line) for place, line in self._kept if place < share]
            self._n_bytes = sum(len(line.encode()) for _, line in self._kept)


def training_lines(texts: Iterable[str]) -> Iterator[str]:
    """The lines of texts as SentencePiece takes them: none is skipped, none is empty."""
    for text in texts:
        for line in _RESERVED.split(text):
            begin = 0
            while begin < len(line):
                end = len(line)
                if end - begin > _LINE_CHARACTERS:
                    end = line.rfind(" ", begin + 1, begin + _LINE_CHARACTERS)
                    end = end if end > 0 else begin + _LINE_CHARACTERS
                yield line[begin:end]
                begin = end
