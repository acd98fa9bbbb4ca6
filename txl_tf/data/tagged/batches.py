"""Batches of tagged sentences: the ids of a sentence, and the batches of an epoch.

The items of a sentence are its characters and then, with a lexicon, the words of the lexicon in it. Ids 0 and 1 are
padding and unknown, both in the vocabulary of characters and words and in the vocabulary of bigrams.

If the tokens are words, they replace the characters, and their forms replace the bigrams: see `form_of`. Then there is
no lexicon.

A space and a tab become the symbol "␣", as in tagged files. Other white space, such as U+3000, can be a token in these
files; no vocabulary has it, so its id is that of unknown symbols.

Shapes:
    B: batch      n: characters of a sentence      w: words of the lexicon in it      L: max n      T: max n + w
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from txl_tf.data.batching import EpochBatches, by_length, padded, shuffled
from txl_tf.data.tagged.columns import with_blanks
from txl_tf.data.tagged.lexicon import Lexicon, Match
from txl_tf.data.vocabulary import Vocab

PADDING = 0
UNKNOWN_ID = 1
SPECIAL = ["<pad>", "<unk>"]
END = "<eos>"  # second half of a sentence's last bigram, as in TENER's program; in FLAT's it is "<end>"
_POOL = 50  # batches whose sentences are sorted by length together


class Encoded(NamedTuple):
    """The ids of a sentence, all int32."""

    ids: np.ndarray  # [n + w], characters, then words
    bigrams: np.ndarray  # [n]
    starts: np.ndarray  # [n + w], first character of each item
    ends: np.ndarray  # [n + w], last character of each item, inclusive
    n: int  # number of characters

    def window(self, begin: int, end: int) -> Encoded:
        """Returns the characters from `begin` to `end`, exclusive, and the words within them.

        The last bigram still contains the character after the window.
        """
        inside = (self.starts >= begin) & (self.ends < end)
        starts, ends = self.starts[inside] - begin, self.ends[inside] - begin
        return Encoded(self.ids[inside], self.bigrams[begin:end], starts, ends, end - begin)


@dataclasses.dataclass(frozen=True)
class SentenceEncoder:
    """Converts tokens to ids.

    Args:
        vocab: vocabulary of characters and words; its first symbols are "<pad>" and "<unk>".
        bigram_vocab: vocabulary of pairs of tokens, with the same first symbols; `None`: the ids of bigrams are 0.
        lexicon: its words are found in sentences; `None`: no words.
        level: level of the tokens, "char" or "word".
    """

    vocab: Vocab
    bigram_vocab: Vocab | None = None
    lexicon: Lexicon | None = None
    level: str = "char"

    def matches(self, tokens: Sequence[str], left_out: Collection[str] = ()) -> list[Match]:
        """Returns the words of the lexicon in a sentence, without the words in `left_out`."""
        matches = self.lexicon.matches(tokens) if self.lexicon else []
        return [match for match in matches if match.word not in left_out]

    def encode(self, tokens: Sequence[str], left_out: Collection[str] = ()) -> Encoded:
        """Returns the ids of a sentence of any length, even 0. Symbols that are not in a vocabulary are unknown.

        Words of the lexicon that are in `left_out` are no items.
        """
        tokens = with_blanks(tokens)
        matches = self.matches(tokens, left_out)
        n = len(tokens)
        positions = range(n)
        bigrams = np.zeros([n], np.int32)
        if self.bigram_vocab:
            bigrams = _look_up(self.bigram_vocab, SECOND_SYMBOLS_OF[self.level](tokens))
        return Encoded(
            _look_up(self.vocab, [*tokens, *(match.word for match in matches)]),
            bigrams,
            np.array([*positions, *(match.start for match in matches)], np.int32),
            np.array([*positions, *(match.end for match in matches)], np.int32),
            n,
        )


def bigrams_of(tokens: Sequence[str]) -> list[str]:
    """Returns each token joined with the next one, and the last one joined with "<eos>"."""
    return [first + second for first, second in itertools.pairwise([*tokens, END])]


def form_of(word: str) -> str:
    """Returns the form of a word: "^" if it begins with a capital, and its last three characters.

    An unknown word can still have a known form. Digits become 0. So "Blackburn" is "^urn", "rejects" is "cts" and
    "1996-08-22" is "-00".
    """
    capital = "^" if word[:1].lower() != word[:1] else ""
    return capital + re.sub("[0-9]", "0", word[-3:])


def forms_of(tokens: Sequence[str]) -> list[str]:
    """Returns the form of each word."""
    return list(map(form_of, tokens))


SECOND_SYMBOLS_OF = {"char": bigrams_of, "word": forms_of}  # level of tokens -> function that returns a symbol for each


def _look_up(vocab: Vocab, symbols: Sequence[str]) -> np.ndarray:
    """Returns the ids of symbols, int32 `[n]`; never `PADDING`."""
    ids = np.fromiter(map(vocab.ids.get, symbols, itertools.repeat(UNKNOWN_ID)), np.int32, len(symbols))
    return np.maximum(ids, UNKNOWN_ID)  # "<pad>" in a text is not padding


def features(encoded: Sequence[Encoded], lattice: bool, multiple: int = 1) -> dict[str, np.ndarray]:
    """Returns the inputs of a model for some sentences, int32, 0 at padding.

    Args:
        encoded: the sentences.
        lattice: whether to include the words of the lexicon, as Flat needs them.
        multiple: rows of padding are added until B is a multiple of this number: of the replicas.

    Returns:
        Without `lattice`: `chars` and `bigrams` [B, L]. With it: `lattice` [B, T], the characters of each sentence,
        directly followed by its words; `bigrams` [B, L]; `seq_len`, n, and `lex_num`, w, [B]; `pos_s` and `pos_e`
        [B, T], the first and the last character of each item.
    """
    if not lattice:
        chars = padded([sentence.ids[: sentence.n] for sentence in encoded], multiple)
        return {"chars": chars, "bigrams": padded([sentence.bigrams for sentence in encoded], multiple)}
    lengths = np.array([(sentence.n, len(sentence.ids) - sentence.n) for sentence in encoded], np.int32)
    lengths = np.pad(lengths.reshape(-1, 2), [(0, -len(encoded) % multiple), (0, 0)])
    return {
        "lattice": padded([sentence.ids for sentence in encoded], multiple),
        "bigrams": padded([sentence.bigrams for sentence in encoded], multiple),
        "seq_len": lengths[:, 0].copy(),
        "lex_num": lengths[:, 1].copy(),
        "pos_s": padded([sentence.starts for sentence in encoded], multiple),
        "pos_e": padded([sentence.ends for sentence in encoded], multiple),
    }


class TaggedSplit(NamedTuple):
    """Sentences and the ids of their tags."""

    sentences: list[Encoded]
    tags: list[np.ndarray]  # int32 [n] each

    def __len__(self) -> int:  # of sentences, not of fields
        return len(self.sentences)


def tagged_batches(
    split: TaggedSplit, lattice: bool, batch_size: int, seed: int | None = None, multiple: int = 1
) -> EpochBatches:
    """Makes batches of sentences of similar length, `(features, tags)`; the tags are int32 `[B, L]`, 0 at padding.

    With a seed, the sentences of an epoch are shuffled and cut into pools of 50 batches. Each pool is sorted by length
    and cut into batches, and then the batches of all pools are shuffled. Without a seed, all sentences are sorted by
    length.

    Args:
        split: the sentences and their tags.
        lattice: whether to include the words of the lexicon, see `features`.
        batch_size: sentences of a batch; the last batch of a pool may be smaller.
        seed: seed of the orders; `None`: every epoch is in the order by length.
        multiple: rows of padding are added to every batch until their number is a multiple of this number: of the
            replicas.
    """
    lengths = np.array([len(s.ids) if lattice else s.n for s in split.sentences])

    def cut(rng):
        """Returns the rows of each batch of an epoch, see `EpochBatches`."""
        n = len(split)
        order = np.arange(n) if rng is None else rng.permutation(n)
        pool_size = n if rng is None else _POOL * batch_size
        pools = [order[begin : begin + pool_size] for begin in range(0, n, pool_size)]
        return shuffled([rows[i] for rows in pools for i in by_length(lengths[rows], batch_size)], rng)

    def collate(rows):
        """Returns the batch of some sentences, `(features, tags)`."""
        tags = padded([split.tags[i] for i in rows], multiple)
        return features([split.sentences[i] for i in rows], lattice, multiple), tags

    return EpochBatches(cut, collate, seed)
