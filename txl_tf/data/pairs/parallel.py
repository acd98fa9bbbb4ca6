"""Pairs of lines, sources and targets: from files to ids, and to the batches of an encoder-decoder.

Every line ends with the end symbol. In a batch, a target also begins with the start symbol. On both sides, ids 0, 1 and
2 are padding, start and end. At level "char" the end symbol is the newline, so the text of a file needs no change.

Shapes:
    B: batch      S: symbols of a source      T: symbols of a target, with its start symbol
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from txl_tf.config import PairsConfig
from txl_tf.data import inputs
from txl_tf.data.batching import EpochBatches, by_length, hold_out, padded, shuffled
from txl_tf.data.pairs.dates import make_dates
from txl_tf.data.pairs.files import RESERVED, SIDES, WAY_OUT, PairReader, SideText, read_lines, sides_of, without_ends
from txl_tf.data.subwords import SubwordVocab, train_line_subwords
from txl_tf.data.vocabulary import KNOWN_SYMBOLS, UnknownSymbol, Vocab, check_occurs, escape
from txl_tf.errors import ParameterError, brief
from txl_tf.schema import check_left_out

PADDING, START_ID, END_ID = 0, 1, 2
_NAMES = {"word": [*RESERVED], "char": [*RESERVED[:2], "\n"]}  # level -> the symbols with ids 0, 1 and 2
UNKNOWN = "<unk>"
# The note of an `UnknownSymbol`: a vocabulary of this version has `UNKNOWN` and does not raise this error.
_NO_UNKNOWN = (
    "The vocabulary of an earlier version has no unknown symbol. Leave such symbols out; or train again: new runs read "
    "them as <unk>"
)


class Lines(NamedTuple):
    """The ids of several lines in one array, each line with its end symbol."""

    ids: np.ndarray  # int32 [n]
    ends: np.ndarray  # int64 [lines], position after the last id of each line

    @property
    def lengths(self) -> np.ndarray:
        """The number of ids of each line, with its end: int64 `[lines]`."""
        return np.diff(self.ends, prepend=0)

    def __getitem__(self, i: int) -> np.ndarray:  # pyright: ignore[reportIncompatibleMethodOverride] a line, not a field
        """Returns the ids of line i, with its end symbol."""
        return self.ids[self.ends[i - 1] if i else 0 : self.ends[i]]

    def take(self, is_taken: np.ndarray) -> Lines:
        """Returns the lines for which the bool array `is_taken`, `[lines]`, is true."""
        return Lines(self.ids[np.repeat(is_taken, self.lengths)], np.cumsum(self.lengths[is_taken]))


class Pairs(NamedTuple):
    """Sources and targets. Line i of the targets belongs to line i of the sources."""

    sources: Lines
    targets: Lines

    def __len__(self) -> int:  # of pairs, not of fields
        return len(self.sources.ends)


@dataclasses.dataclass
class ParallelCorpus:
    """Two vocabularies and pairs of ids.

    Attributes:
        splits: `"train"`, `"valid"` and perhaps `"test"` -> `Pairs`.
        names: split -> its files, for messages.
        numbers: split -> the line number of every pair in its files, from 1: int `[pairs]`.
        texts: `"valid"` and perhaps `"test"` -> lists of the lines of sources and of targets. Symbols that `<unk>`
            replaces in `splits` are unchanged here.
        said: sentences about unused columns and skipped lines.
        is_held_out: whether `"valid"` is a part of the file of `"train"`.
    """

    source_vocab: Vocab
    target_vocab: Vocab
    splits: dict[str, Pairs]
    names: dict[str, str]
    numbers: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    texts: dict[str, list[list[str]]] = dataclasses.field(default_factory=dict)
    said: list[str] = dataclasses.field(default_factory=list)
    is_held_out: bool = False

    @property
    def vocabs(self) -> list[Vocab]:
        """The vocabulary of sources and the vocabulary of targets."""
        return [self.source_vocab, self.target_vocab]

    def file_of(self, split: str) -> str:
        """Returns the name of the file that a split was read from."""
        return self.names["train" if split == "valid" and self.is_held_out else split]

    def unknown(self, split: str) -> list[int]:
        """Returns two numbers: how many symbols in the sources of a split are unknown, and how many in its targets."""
        unknown_ids = [-1 if vocab.unk is None else vocab.ids.get(vocab.unk, -1) for vocab in self.vocabs]
        sides = zip(unknown_ids, self.splits[split], strict=True)
        return [int(np.count_nonzero(lines.ids == unknown)) for unknown, lines in sides]

    def fingerprint(self, split: str) -> str:
        """Returns a SHA-256 that changes if the split changes."""
        digest = hashlib.sha256()
        for lines in self.splits[split]:
            digest.update(lines.ids.astype("<i4").tobytes())
        return digest.hexdigest()


# -------------------------------------------------------------------------------------------------------- from files


def read_pairs(
    config: PairsConfig,
    vocabs: list[Vocab] | None = None,
    max_len: int | None = None,
    has_unknown: bool = True,
    extend_vocab: bool = False,
    recorded: Mapping[str, Any] | None = None,
) -> ParallelCorpus:
    """Reads and encodes pairs of lines.

    New vocabularies have the symbols of `train_path`, unless `source_symbols` or `target_symbols` names a file of
    symbols.

    Args:
        config: what to read.
        vocabs: of sources and of targets, instead of new ones.
        max_len: largest number of symbols of a line, with its end. `skip_bad_lines` skips longer lines; without it,
            `max_len` has no effect: see `check_lengths`.
        has_unknown: whether new vocabularies have `<unk>` for unknown symbols, which they had not in earlier versions.
            With `min_freq` or `max_size`, and at level "subword", they always have it.
        extend_vocab: whether symbols that `vocabs` lack get ids after theirs. The options of `config` choose these
            symbols, as they choose the symbols of new vocabularies.
        recorded: values of options that the run has recorded, if it exists. Earlier versions did not refuse options
            without an effect, or files with symbols that no text contains. If `config` has the recorded value, such an
            option is ignored, and such a file is read.

    Raises:
        ParameterError: an option would have no effect, see `unused_options`. Or a file of symbols has one that no text
            contains. Or the files have different numbers of lines, a line is empty, a symbol is not in the vocabulary,
            ...: names file and line, what was found and what is allowed.
        FileNotFoundError: a file does not exist.
    """
    for vocab in vocabs if vocabs and extend_vocab else ():
        vocab.check_extendable()
    recorded = recorded or {}
    for name, error in unused_options(config, vocabs is not None).items():
        if name not in recorded or recorded[name] != getattr(config, name):
            raise error
    inputs.check_options(config, "train_path", "valid_path", "test_path", "source_symbols", "target_symbols")
    sides, names, sentences = _read_splits(config)
    held_out = None if "valid" in sides else hold_out(sides["train"][0].lines, config.valid_fraction, "pairs")
    if vocabs:
        _check_options(config, vocabs, extend_vocab)
    if not vocabs or extend_vocab:
        new = _new_vocabs(config, sides["train"], held_out, has_unknown)
        for name, vocab in zip(("source_symbols", "target_symbols"), new, strict=True):
            path = getattr(config, name)
            if path and recorded.get(name) != path:
                check_occurs(vocab, name, path)
        vocabs = list(map(_extended, vocabs, new)) if vocabs else new
    splits = {}
    for split, texts in sides.items():
        pairs = Pairs(*(encode_side(vocab, text) for vocab, text in zip(vocabs, texts, strict=True)))
        if config.skip_bad_lines and max_len is not None:
            fits, sentence = fitting(np.maximum(pairs.sources.lengths, pairs.targets.lengths), texts, max_len)
            pairs = Pairs(*(lines.take(fits) for lines in pairs))
            sides[split] = [text.take(fits) for text in texts]
            if sentence:
                sentences.append(sentence)
            held_out = held_out[fits] if held_out is not None and split == "train" else held_out
        splits[split] = pairs
    if held_out is not None:  # only now, so that errors of the encoding name the whole file
        names["valid"] = f"{config.valid_fraction:.0%} of {names['train']}"
        all_pairs = splits["train"]
        all_texts = sides["train"]
        for split, in_split in (("train", ~held_out), ("valid", held_out)):
            splits[split] = Pairs(*(lines.take(in_split) for lines in all_pairs))
            sides[split] = [text.take(in_split) for text in all_texts]
    plain_texts = {
        split: [without_ends(text.lines) for text in texts] for split, texts in sides.items() if split != "train"
    }
    numbers = {split: texts[0].numbers for split, texts in sides.items()}
    source_vocab, target_vocab = vocabs
    return ParallelCorpus(
        source_vocab, target_vocab, splits, names, numbers, plain_texts, sentences, held_out is not None
    )


def unused_options(config: PairsConfig, has_vocabs: bool = False) -> dict[str, ParameterError]:
    """Returns `{name: error}` of the options that differ from their defaults and would have no effect.

    Args:
        config: the options. `PairsConfig` itself refuses more of them.
        has_vocabs: whether there are vocabularies already.
    """
    is_dates = config.dataset == "dates"
    sides = (config.source_level, config.source_symbols), (config.target_level, config.target_symbols)
    reasons = {}
    if not is_dates:
        reasons["n_pairs"] = "it is for dataset=dates"
    if is_dates or config.valid_path:
        what = "dataset=dates makes" if is_dates else "valid_path has"
        reasons["valid_fraction"] = f"{what} the pairs to validate on"
    if has_vocabs or not any(level == "subword" and not path for level, path in sides):
        reasons["subword_type"] = "no subwords are made"
    if all(level == "subword" or path for level, path in sides):
        reasons |= dict.fromkeys(("min_freq", "max_size"), "no symbols are counted")
    errors = {}
    for name, why in reasons.items():
        value = getattr(config, name)
        if value != getattr(PairsConfig, name):
            message = f"{name} must be left out, got {brief(value)}: {why}"
            errors[name] = ParameterError(name, value, "left out", message)
    return errors


def _new_vocabs(
    config: PairsConfig, train: Sequence[SideText], held_out: np.ndarray | None, has_unknown: bool
) -> list[Vocab]:
    """Makes the vocabularies of sources and of targets from the training file; with `share_vocab`, one for both.

    Args:
        config: the options.
        train: sources and targets of the training file.
        held_out: bool `[pairs]`, true for the pairs that `valid_fraction` holds out for validation; `None` if another
            file has the pairs for validation. See `_make_vocab`.
        has_unknown: see `read_pairs`.
    """
    if held_out is None:
        sources, targets = (text.lines for text in train)
        held_sources = []
        held_targets = []
    else:
        sources, targets = (text.take(~held_out).lines for text in train)
        held_sources, held_targets = (text.take(held_out).lines for text in train)
    if config.share_vocab:
        lines = sources + targets
        held_lines = held_sources + held_targets
        vocab = _make_vocab(config, "source", config.lower_case, lines, held_lines, has_unknown)
        return [vocab, vocab]
    source_vocab = _make_vocab(config, "source", config.lower_case, sources, held_sources, has_unknown)
    target_vocab = _make_vocab(config, "target", False, targets, held_targets, has_unknown)
    return [source_vocab, target_vocab]


def _read_splits(config: PairsConfig) -> tuple[dict[str, Any], dict[str, str], list[str]]:
    """Returns `{split: (sources, targets)}`, each a `SideText`; `{split: name}`; and sentences about the files."""
    if config.dataset == "dates":
        paths = {name: getattr(config, name) for name in ("train_path", "valid_path", "test_path")}
        check_left_out(paths, "dataset=dates makes its pairs itself")
        splits = make_dates(config.n_pairs)
        names = {split: f"dates, {split}" for split in splits}
        return {split: sides_of(pairs, [names[split]] * 2) for split, pairs in splits.items()}, names, []
    if not config.train_path:
        message = "no pairs: give train_path, a file of source<TAB>target lines or two files, or dataset=dates"
        raise ParameterError("train_path", config.train_path, "one file of pairs, or two files", message)
    paths = {split: getattr(config, f"{split}_path") for split in ("train", "valid", "test")}
    reader = PairReader(config, (config.source_level, config.target_level))
    sides = {split: reader.read(path) for split, path in paths.items() if path}
    names = {split: " and ".join(dict.fromkeys(text.name for text in both)) for split, both in sides.items()}
    return sides, names, reader.said


def fitting(lengths: np.ndarray, texts: Sequence[SideText], max_len: int) -> tuple[np.ndarray, str | None]:
    """Returns which pairs have at most `max_len` symbols on both sides, bool `[pairs]`; and a sentence on the others.

    If there are no others, the sentence is `None`.

    Args:
        lengths: int `[pairs]`, symbols of the longer side, with its end.
        texts: both sides.
        max_len: the limit.

    Raises:
        ParameterError: no pair is short enough.
    """
    fits = lengths <= max_len
    if fits.all():
        return fits, None
    name = " and ".join(dict.fromkeys(text.name for text in texts))
    first = int(np.argmin(fits))
    if not fits.any():
        message = f"{name} has no pair left: all of them are longer than max_len={max_len}"
        raise ParameterError(name, int(lengths.min()), f"pairs of at most max_len={max_len} symbols", message)
    reason = f"{np.sum(~fits):,} (longer than max_len={max_len}); the first is line {texts[0].numbers[first]}"
    return (
        fits,
        f"{name}: lines left out by skip_bad_lines: {reason}, with {lengths[first]:,} symbols, its end included",
    )


def _extended(vocab: Vocab, new: Vocab) -> Vocab:
    """Returns `vocab` extended by the symbols of `new`. If `vocab` has no unknown symbol, it gets the one of `new`."""
    vocab = vocab.extended(new.symbols)
    vocab.unk = vocab.unk or new.unk
    return vocab


def _check_options(config: PairsConfig, vocabs: list[Vocab], extend_vocab: bool) -> None:
    """Raises ParameterError if an option of `config` does not go with the given vocabularies.

    Levels and lower case must be those of the vocabularies. Options that choose symbols must be left out, except with
    `extend_vocab`: there they choose the new symbols.
    """
    if not extend_vocab:
        options = ("min_freq", "max_size", "source_symbols", "target_symbols", "vocab_size")
        check_left_out({name: getattr(config, name) for name in options}, KNOWN_SYMBOLS)
    source, target = vocabs
    known = {"source_level": source.level, "target_level": target.level, "lower_case": source.lower_case}
    for name, value in known.items():
        given = getattr(config, name)
        if given != value:
            message = f"{name} must be {brief(value)}, as in the given vocabularies, got {brief(given)}"
            raise ParameterError(name, given, [value], message)


def _make_vocab(
    config: PairsConfig, side: str, lower_case: bool, lines: list[str], held_out_lines: Sequence[str], has_unknown: bool
) -> Vocab:
    """Makes the vocabulary of a side: subwords, the symbols of a file, or the symbols of `lines` by frequency.

    Args:
        config: the options. At level "subword", `lower_case` and `has_unknown` have no effect.
        side: "source" or "target".
        lower_case: whether the vocabulary converts text to lower case.
        lines: the lines of the side, each with a newline.
        held_out_lines: further lines of the training file, which `valid_fraction` holds out for validation. The symbols
            that only they have come last. They have no effect on subwords, on the symbols of a file, or if `min_freq`
            or `max_size` leaves out rare symbols.
        has_unknown: see `read_pairs`.
    """
    level = getattr(config, f"{side}_level")
    path = getattr(config, f"{side}_symbols")
    if level == "subword":
        return _make_subwords(config, path, lines)
    leaves_out = bool(config.min_freq or config.max_size)
    has_unknown = has_unknown or leaves_out
    special = [*_NAMES[level], UNKNOWN] if has_unknown else _NAMES[level]
    vocab = Vocab(
        level=level,
        lower_case=lower_case,
        special=special,
        unk=UNKNOWN if has_unknown else None,
        eos="</s>" if level == "word" else None,
        min_freq=config.min_freq,
        max_size=config.max_size,
    )
    if path:
        symbols = without_ends(read_lines(path))
        names = map(escape, special) if level == "char" else special  # in the form of the lines of the file
        vocab.set_lines(list(dict.fromkeys([*names, *symbols])), path)
    else:
        vocab.count(lines)
        if not leaves_out:
            counts = vocab.counter.copy()
            vocab.count(held_out_lines)
            for symbol in vocab.counter:  # symbols that only held-out lines have count 0, so they come last
                vocab.counter[symbol] = counts[symbol]
        for symbol in special:  # they have ids already, and `max_size` does not count them
            vocab.counter.pop(symbol, None)
        vocab.build()
    return vocab


def _make_subwords(config: PairsConfig, path: str | None, lines: list[str]) -> SubwordVocab:
    """Makes subwords from lines; or with `path`, reads this SentencePiece model, such as the model of another run.

    Raises:
        ParameterError: as `train_line_subwords`; or the model does not begin with the special pieces of this file.
    """
    if not path:
        return train_line_subwords(lines, config.vocab_size, config.subword_type)
    check_left_out({"vocab_size": config.vocab_size}, KNOWN_SYMBOLS)
    vocab = SubwordVocab.load(path, eos="</s>", unk=UNKNOWN)
    if vocab.symbols[:3] != _NAMES["word"]:
        names = ", ".join(_NAMES["word"])
        message = f"{path} must begin with the pieces {names}, got {', '.join(map(brief, vocab.symbols[:3]))}"
        raise ParameterError(path, vocab.symbols[:3], f"a model that begins with the pieces {names}", message)
    return vocab


def encode_side(vocab: Vocab, text: SideText) -> Lines:
    """Returns the ids of the lines of a side. Errors name the file and the number of the line in it."""
    return encode_lines(vocab, text.lines, text.name, text.side, text.numbers)


def encode_lines(
    vocab: Vocab,
    lines: list[str],
    name: str,
    side: str | None = None,
    numbers: Sequence[int] | np.ndarray | None = None,
) -> Lines:
    """Returns the ids of lines, each of which ends with a newline.

    Args:
        vocab: vocabulary of one side.
        lines: the lines.
        name: how messages call the lines.
        side: "source" or "target", for messages.
        numbers: numbers of the lines, for messages; by default they are counted from 1.

    Raises:
        ParameterError: a line is empty, or has a symbol that is reserved or not in the vocabulary.
    """
    numbers = list(range(1, len(lines) + 1)) if numbers is None else numbers
    try:
        ids = vocab.encode(lines, name=name)
    except UnknownSymbol as error:  # finds the line again by its number: the numbers may have gaps
        for number, line in zip(numbers, lines, strict=True):
            try:
                list(vocab.encode_stream([line], name, int(number)))
            except UnknownSymbol as numbered:
                numbered.__notes__ = [_NO_UNKNOWN]
                raise numbered from error
        raise
    ends = np.flatnonzero(ids == END_ID) + 1
    if len(ends) != len(lines) or np.any(ids < END_ID):  # at level "word", a line contains a reserved symbol
        plain = [line.lower() if vocab.lower_case else line for line in lines]
        number, line = next(
            (i, line) for i, line in zip(numbers, plain, strict=True) if not set(line.split()).isdisjoint(RESERVED)
        )
        reserved = ", ".join(RESERVED)
        reason = f"{name}, line {number} has one of {reserved}, which are no text: {brief(line)}"
        message = f"{reason}; {WAY_OUT}" if side else reason
        raise ParameterError(f"{name}, line {number}", line, f"a text without {reserved}", message)
    encoded = Lines(ids, ends)
    if np.any(encoded.lengths == 1):
        number = numbers[int(np.argmin(encoded.lengths))]
        where = f"{name}, line {number}"
        message = f"{where}: the {side} is empty; {WAY_OUT}" if side else f"{where} is empty"
        raise ParameterError(where, "", "a text that is not empty", message)
    return encoded


def check_lengths(corpus: ParallelCorpus, max_len: int) -> None:
    """Raises ParameterError, which names the longest line of a side, if it has more than `max_len` symbols."""
    for split, pairs in corpus.splits.items():
        for side, lines in zip(SIDES, pairs, strict=True):
            longest = int(np.argmax(lines.lengths))
            length = lines.lengths[longest]
            number = corpus.numbers[split][longest]
            if length > max_len:
                where = f"{corpus.file_of(split)}, line {number}"
                message = (
                    f"{where}: the {side} has {length:,} symbols, its end included; at most max_len={max_len} are "
                    f"allowed; {WAY_OUT}"
                )
                raise ParameterError(where, int(length), f"at most max_len={max_len} symbols", message)


# ----------------------------------------------------------------------------------------------------------- batches


def pair_batches(
    pairs: Pairs, batch_size: int, batch_tokens: int | None = None, seed: int | None = None, multiple: int = 1
) -> EpochBatches:
    """Makes batches of pairs of similar length, `(source, target)`: int32 `[B, S]` and `[B, T]`, 0 at padding.

    Pairs are sorted by the lengths of source and target, and cut into batches. Every epoch has a new order of the
    batches, and of pairs of the same lengths.

    Args:
        pairs: the pairs.
        batch_size: largest number of pairs in a batch.
        batch_tokens: largest number of tokens in a batch, `B * (S + T)` with padding but without the rows that
            `multiple` adds; `None` for no limit. A longer pair gets its own batch.
        seed: seed of the orders; `None`: every epoch is in the order by length.
        multiple: rows of padding are added to every batch until their number is a multiple of this number: of the
            replicas.
    """
    sources = pairs.sources.lengths
    targets = pairs.targets.lengths + 1  # with the start symbol

    def count_rows(remaining):
        """Returns how many of the remaining pairs, the shortest first, form the next batch."""
        candidates = remaining[:batch_size]
        if batch_tokens is None:
            return len(candidates)
        # Tokens of a batch of the first 1, 2, ... candidates. The sources are sorted, so the last one is the longest.
        padded_lengths = sources[candidates] + np.maximum.accumulate(targets[candidates])
        tokens = padded_lengths * np.arange(1, len(candidates) + 1)
        return np.searchsorted(tokens, batch_tokens, side="right")

    def cut(rng):
        """Returns the batches of an epoch, see `EpochBatches`. Pairs of the same lengths are in random order."""
        ties = np.arange(len(pairs)) if rng is None else rng.permutation(len(pairs))
        return shuffled(list(by_length([sources, targets, ties], count_rows)), rng)

    def collate(rows):
        """Returns the batch of some pairs, `(source, target)`."""
        target = padded([np.append(START_ID, pairs.targets[i]) for i in rows], multiple)
        return padded([pairs.sources[i] for i in rows], multiple), target

    return EpochBatches(cut, collate, seed)
