"""Which symbols of tagged sentences get an id, and the embeddings that they start from."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from txl_tf.config import TaggedConfig
from txl_tf.data.tagged.batches import BESIDES, SPECIAL
from txl_tf.data.tagged.lexicon import Lexicon
from txl_tf.data.tagged.word_vectors import embedding_matrix, read_vectors
from txl_tf.data.vocabulary import Vocab

logger = logging.getLogger("txl_tf")


class _Symbols(NamedTuple):
    """Symbols that get an id, the vectors of some, and the width of the vectors, `None` without a file of them."""

    symbols: list[str]
    vectors: dict[str, np.ndarray]
    dim: int | None


def make_vocabs(config: TaggedConfig, texts: dict, lexicon: Lexicon | None) -> tuple[Vocab, Vocab, dict]:
    """`(vocab, bigram_vocab, embeddings)`, as `TaggedCorpus` has them, of the sentences of each split."""
    own = "word_vectors" if config.token_level == "word" else "char_vectors"
    chars = _choose(texts, list, config.min_freq, own, getattr(config, own))
    besides = BESIDES[config.token_level]
    bigrams = _choose(texts, besides, config.min_freq, "bigram_vectors", config.bigram_vectors)
    words = _Symbols([], {}, None)
    if lexicon:
        words = _choose(
            texts, lambda tokens: [m.word for m in lexicon.matches(tokens)], 0, "word_vectors", config.word_vectors
        )
    if chars.dim and words.dim and chars.dim != words.dim:
        raise ValueError(
            f"char_vectors {config.char_vectors} have {chars.dim} numbers and word_vectors {config.word_vectors} have "
            f"{words.dim}: with a lexicon both are in one table and must have the same width"
        )
    items = list(dict.fromkeys(chars.symbols + words.symbols))  # a token of several characters may be a word, too
    both = _Symbols(items, words.vectors | chars.vectors, chars.dim or words.dim)
    vocabs, embeddings = [], {}
    for name, table in (("vocab", both), ("bigram_vocab", bigrams)):
        vocab = Vocab(special=SPECIAL, unk=SPECIAL[1], min_freq=config.min_freq)
        vocab.set_lines([*SPECIAL, *table.symbols], config.train_path or config.dataset)
        if table.dim:
            rng = np.random.default_rng(0)
            embeddings[name] = embedding_matrix(vocab.symbols, table.vectors, table.dim, rng)
        vocabs.append(vocab)
    return *vocabs, embeddings


def _choose(texts: dict, symbols_of: Callable, min_freq: int, option: str, path: str | None) -> _Symbols:
    """The symbols of the training sentences by frequency, then those that only other files have and with a vector.

    Args:
        texts: split -> sentences.
        symbols_of: tokens of a sentence -> symbols.
        min_freq: symbols of the training sentences that are rarer are left out, but for words with a vector.
        option: what messages call the vectors.
        path: file of vectors or `None`.
    """
    counts = {}
    for split, text in texts.items():
        counter = Counter(symbol for sentence in text for symbol in symbols_of(sentence.tokens))
        # A vocabulary's file has words without white space; a token such as U+3000 is unknown.
        counts[split] = {s: n for s, n in counter.most_common() if s.split() == [s] and s not in SPECIAL}
    train = counts.pop("train")
    others = {symbol: None for counter in counts.values() for symbol in counter if symbol not in train}
    vectors, dim = read_vectors(path, {SPECIAL[1], *train, *others}) if path else ({}, None)
    kept = vectors if option == "word_vectors" else ()
    symbols = [symbol for symbol, n in train.items() if n >= min_freq or symbol in kept]
    symbols += [symbol for symbol in others if symbol in vectors]
    if path:
        found = sum(symbol in vectors for symbol in symbols)
        what = {"char_vectors": "characters", "bigram_vectors": "bigrams", "word_vectors": "words"}[option]
        logger.info(f"{option} {path}: {found:,} of {len(symbols):,} {what} found")
    return _Symbols(symbols, vectors, dim)
