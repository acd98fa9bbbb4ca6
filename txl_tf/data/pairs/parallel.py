"""Pairs of lines, sources and targets: from files to ids, and to the batches of an encoder-decoder.

Every line ends with the end symbol, a target begins with the start symbol once it is in a batch. Ids 0, 1 and 2 are
padding, start and end on both sides. At level "char" the end symbol is the newline, so that a file's text is what is
encoded.

Shapes:
    B: batch      S: source      T: target, its start symbol included
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from txl_tf.config import PairsConfig
from txl_tf.data.batching import EpochBatches, by_length, hold_out, padded, shuffled
from txl_tf.data.pairs.dates import make_dates
from txl_tf.data.text_files import numbered_lines
from txl_tf.data.vocabulary import KNOWN_SYMBOLS, Vocab, escape
from txl_tf.schema import brief, check_left_out

PADDING, START_ID, END_ID = 0, 1, 2
_NAMES = {"word": ["<pad>", "<s>", "</s>"], "char": ["<pad>", "<s>", "\n"]}
UNKNOWN = "<unk>"
_SIDES = ("source", "target")


class Lines(NamedTuple):
    """Lines of ids, one after the other, each with its end symbol."""

    ids: np.ndarray  # int32 [n]
    ends: np.ndarray  # int64 [lines], where each ends in `ids`, exclusive

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.ends, prepend=0)

    def __getitem__(self, i: int) -> np.ndarray:
        return self.ids[self.ends[i - 1] if i else 0 : self.ends[i]]

    def take(self, chosen: np.ndarray) -> Lines:
        """The lines where the bool array `[lines]` says so."""
        return Lines(self.ids[np.repeat(chosen, self.lengths)], np.cumsum(self.lengths[chosen]))


class Pairs(NamedTuple):
    """Sources and targets, a line of one for every line of the other."""

    sources: Lines
    targets: Lines

    def __len__(self) -> int:  # of pairs, not of fields
        return len(self.sources.ends)


@dataclasses.dataclass
class ParallelCorpus:
    """Two vocabularies and pairs of ids.

    Attributes:
        splits: `"train"`, `"valid"` and perhaps `"test"` -> `Pairs`.
        names: split -> what messages call it: its files.
        numbers: split -> the line of every pair in its files, from 1, where a split has not all of their lines.
        texts: held-out split -> sources and targets as they were read, also what no vocabulary can spell.
    """

    source_vocab: Vocab
    target_vocab: Vocab
    splits: dict[str, Pairs]
    names: dict[str, str]
    numbers: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    texts: dict[str, list[list[str]]] = dataclasses.field(default_factory=dict)

    @property
    def vocabs(self) -> list[Vocab]:
        return [self.source_vocab, self.target_vocab]

    def fingerprint(self, split: str) -> str:
        """A SHA-256 that tells whether a split has changed."""
        digest = hashlib.sha256()
        for lines in self.splits[split]:
            digest.update(lines.ids.astype("<i4").tobytes())
        return digest.hexdigest()


# -------------------------------------------------------------------------------------------------------- from files


def read_pairs(config: PairsConfig, vocabs: list[Vocab] | None = None) -> ParallelCorpus:
    """Reads and encodes pairs of lines. The vocabularies come from `train_path`, unless files give symbols.

    Args:
        config: what to read.
        vocabs: of sources and of targets, instead of new ones.

    Raises:
        ValueError: files of different length, an empty line, a symbol that the vocabulary does not have, ...: names
            file and line, what was found and what is allowed.
        FileNotFoundError: a file does not exist.
    """
    sides, names = _read_splits(config)
    numbers, held_out, train, others = {}, None, [text.lines for text in sides["train"]], [[], []]
    if "valid" not in sides:
        held_out = hold_out(train[0], config.valid_fraction, "pairs")
        others = [list(itertools.compress(lines, held_out)) for lines in train]
        train = [list(itertools.compress(lines, ~held_out)) for lines in train]
    if vocabs:
        _check_vocabs(config, vocabs)
    else:
        both, shared = (sum(lines, []) for lines in (train, others)), config.share_vocab
        of_source = both if shared else (train[0], others[0])
        vocabs = [_make_vocab(config, "source", config.lower_case, *of_source)]
        vocabs += vocabs if shared else [_make_vocab(config, "target", False, train[1], others[1])]
    splits = {}
    for split, texts in sides.items():
        splits[split] = Pairs(*(encode_lines(vocab, *text) for vocab, text in zip(vocabs, texts, strict=True)))
    held = {split: [text.lines for text in texts] for split, texts in sides.items() if split != "train"}
    if held_out is not None:  # after encoding, so that messages have the lines' own numbers
        whole, names["valid"] = splits["train"], f"{config.valid_fraction:.0%} of {names['train']}"
        for split, chosen in (("train", ~held_out), ("valid", held_out)):
            splits[split] = Pairs(*(lines.take(chosen) for lines in whole))
            numbers[split] = np.flatnonzero(chosen) + 1
        held["valid"] = others
    read = {split: [*map(without_ends, both)] for split, both in held.items()}
    return ParallelCorpus(*vocabs, splits, names, numbers, read)


class _Text(NamedTuple):
    lines: list[str]  # each with its newline
    name: str
    side: str


def _read_splits(config: PairsConfig) -> tuple[dict, dict]:
    """`{split: (sources, targets)}`, a `_Text` each, and `{split: name}`."""
    if config.dataset == "dates":
        given = [name for name in ("train_path", "valid_path", "test_path") if getattr(config, name)]
        if given:
            raise ValueError(f"{given[0]} must be left out for dataset=dates, which makes its pairs itself")
        made = make_dates(config.n_pairs)
        names = {split: f"dates, {split}" for split in made}
        return {split: _sides(pairs, names[split]) for split, pairs in made.items()}, names
    if not config.train_path:
        raise ValueError("no pairs: give train_path, a file of source<TAB>target lines or two files, or dataset=dates")
    paths = {split: getattr(config, f"{split}_path") for split in ("train", "valid", "test")}
    sides = {split: read_sides(path) for split, path in paths.items() if path}
    names = {split: " and ".join(dict.fromkeys(text.name for text in both)) for split, both in sides.items()}
    return sides, names


def read_sides(path: str | Iterable[str]) -> tuple[_Text, _Text]:
    """Sources and targets of one file of `source<TAB>target` lines, or of two files.

    Args:
        path: of the file; or two, as a list or separated by a comma.

    Raises: as `read_pairs`.
    """
    paths = path.split(",") if isinstance(path, str) else list(map(str, path))
    if len(paths) > 2:
        raise ValueError(f"pairs must be in one file, or in two of sources and targets, got {', '.join(paths)}")
    texts = [_Text(read_lines(path), path, side) for path, side in zip(paths, _SIDES, strict=False)]
    if len(texts) == 2:
        counts = [len(text.lines) for text in texts]
        if counts[0] != counts[1]:
            raise ValueError(f"{paths[0]} has {counts[0]:,} lines and {paths[1]} has {counts[1]:,}: they must be pairs")
        return tuple(texts)
    rows = [line.split("\t") for line in without_ends(texts[0].lines)]
    for number, row in enumerate(rows, 1):
        if len(row) != 2:
            raise ValueError(f"{paths[0]}, line {number} must be source<TAB>target, got {len(row) - 1} tabs")
    return _sides(rows, paths[0])


def _sides(pairs: list, name: str) -> tuple[_Text, _Text]:
    return tuple(_Text([f"{pair[i]}\n" for pair in pairs], name, side) for i, side in enumerate(_SIDES))


def read_lines(path: str) -> list[str]:
    """The lines of a UTF-8 file, each with its newline; `\\r\\n` ends one too. A byte order mark is left out."""
    return [f"{line}\n" for _, line in numbered_lines(path)]


def without_ends(lines: Iterable[str]) -> list[str]:
    """Lines of `read_lines` without their newlines."""
    return [line.removesuffix("\n") for line in lines]


def _check_vocabs(config: PairsConfig, vocabs: list[Vocab]) -> None:
    """Raises ValueError where options choose other symbols, or are not those of the vocabularies to use."""
    chosen = ("min_freq", "max_size", "source_symbols", "target_symbols")
    check_left_out({name: getattr(config, name) for name in chosen}, KNOWN_SYMBOLS)
    source, target = vocabs
    known = {"source_level": source.level, "target_level": target.level, "lower_case": source.lower_case}
    for name, value in known.items():
        if getattr(config, name) != value:
            raise ValueError(f"{name} must be {value!r}, as the vocabularies to use, got {getattr(config, name)!r}")


def _make_vocab(
    config: PairsConfig, side: str, lower_case: bool, lines: list[str], others: Sequence[str] = ()
) -> Vocab:
    """The vocabulary of a side: the symbols of `lines` by frequency, then what only `others` have."""
    level, path = getattr(config, f"{side}_level"), getattr(config, f"{side}_symbols")
    has_unknown = bool(config.min_freq or config.max_size)
    vocab = Vocab(
        level=level,
        lower_case=lower_case,
        special=_NAMES[level] + [UNKNOWN] * has_unknown,
        unk=UNKNOWN if has_unknown else None,
        eos="</s>" if level == "word" else None,
        min_freq=config.min_freq,
        max_size=config.max_size,
    )
    if path:
        symbols = without_ends(read_lines(path))
        names = map(escape, _NAMES[level]) if level == "char" else _NAMES[level]  # as a saved vocabulary has them
        vocab.set_lines(list(dict.fromkeys([*names, *symbols])), path)
    else:
        vocab.count(lines)
        if not has_unknown:
            counts = vocab.counter.copy()
            vocab.count(others)
            vocab.counter.update({symbol: counts[symbol] - n for symbol, n in vocab.counter.items()})
        for symbol in _NAMES[level]:  # no part of `max_size`
            vocab.counter.pop(symbol, None)
        vocab.build()
    return vocab


def encode_lines(vocab: Vocab, lines: list[str], name: str, side: str | None = None) -> Lines:
    """Ids of lines that end with a newline; `name` is what messages call them, `side` the "source" or the "target".

    Raises:
        ValueError: a line is empty or holds a symbol that the vocabulary does not have or uses itself.
    """
    ids = vocab.encode(lines, name=name)
    ends = np.flatnonzero(ids == END_ID) + 1
    if len(ends) != len(lines) or np.any(ids < END_ID):
        plain = [line.lower() if vocab.lower_case else line for line in lines]
        number, line = next(
            (i, line) for i, line in enumerate(plain, 1) if not set(line.split()).isdisjoint(_NAMES["word"])
        )
        raise ValueError(
            f"{name}, line {number} has one of {', '.join(_NAMES['word'])}, which are no text: {brief(line)}"
        )
    encoded = Lines(ids, ends)
    if np.any(encoded.lengths == 1):
        raise ValueError(f"{name}, line {np.argmin(encoded.lengths) + 1}{f': the {side}' if side else ''} is empty")
    return encoded


def check_lengths(corpus: ParallelCorpus, max_len: int) -> None:
    """Raises ValueError where a line is longer than the position table."""
    for split, pairs in corpus.splits.items():
        for side, lines in zip(_SIDES, pairs, strict=True):
            longest = int(np.argmax(lines.lengths))
            found, name, number = lines.lengths[longest], corpus.names[split], longest + 1
            if split in corpus.numbers:
                name, number = corpus.names["train"], corpus.numbers[split][longest]
            if found > max_len:
                raise ValueError(
                    f"{name}, line {number}: the {side} has {found:,} symbols, its end included; at most "
                    f"max_len={max_len} are allowed"
                )


# ----------------------------------------------------------------------------------------------------------- batches


def pair_batches(
    pairs: Pairs, batch_size: int, batch_tokens: int | None = None, seed: int | None = None, multiple: int = 1
) -> EpochBatches:
    """Batches of pairs of like lengths, `(source, target)`: int32 `[B, S]` and `[B, T]`, 0 at padding.

    Pairs are sorted by the lengths of source and target, those of the same lengths in a new order every epoch, and cut
    into batches, which come in a new order every epoch.

    Args:
        pairs: `Pairs`.
        batch_size: most pairs of a batch.
        batch_tokens: most tokens of a batch, `B * (S + T)`; `None` for no limit. A pair that is longer is alone.
        seed: of the orders; `None` keeps the order by length.
        multiple: every batch has a multiple of it in rows, filled up with padding: the number of replicas.
    """
    sources, targets = pairs.sources.lengths, pairs.targets.lengths + 1

    def fitting(left):
        left = left[:batch_size]
        if batch_tokens is None:
            return len(left)
        tokens = (sources[left] + np.maximum.accumulate(targets[left])) * np.arange(1, len(left) + 1)
        return np.searchsorted(tokens, batch_tokens, side="right")

    def cut(rng):
        ties = np.arange(len(pairs)) if rng is None else rng.permutation(len(pairs))
        return shuffled(list(by_length([sources, targets, ties], fitting)), rng)

    def collate(rows):
        target = padded([np.append(START_ID, pairs.targets[i]) for i in rows], multiple)
        return padded([pairs.sources[i] for i in rows], multiple), target

    return EpochBatches(cut, collate, seed)
