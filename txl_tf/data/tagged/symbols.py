"""Which symbols of tagged sentences get an id, and the embeddings that they start from."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from txl_tf.config import MIN_FREQ, TaggedConfig
from txl_tf.data.tagged.batches import SECOND_SYMBOLS_OF, SPECIAL
from txl_tf.data.tagged.columns import BLANK, TaggedSentence
from txl_tf.data.tagged.lexicon import Lexicon
from txl_tf.data.tagged.word_vectors import embedding_matrix, read_vectors
from txl_tf.data.vocabulary import Vocab
from txl_tf.errors import ParameterError, brief

logger = logging.getLogger("txl_tf")

Texts = dict[str, list[TaggedSentence]]  # split -> its sentences

_CALLED = {"char_vectors": "characters", "bigram_vectors": "bigrams", "word_vectors": "words"}


class _Symbols(NamedTuple):
    """Symbols that get an id, and their vectors."""

    symbols: list[str]
    vectors: dict[str, np.ndarray]  # symbol -> its vector, for those that have one, and perhaps for other symbols
    dim: int | None  # width of the vectors; `None` if no file of vectors is given


def make_vocabs(config: TaggedConfig, texts: Texts, lexicon: Lexicon | None) -> tuple[Vocab, Vocab, dict]:
    """Makes the vocabularies, and the initial embeddings. Returns `(vocab, bigram_vocab, embeddings)`.

    These are attributes of `TaggedCorpus`. The vocabularies have the symbols of the training sentences, and those
    symbols of the other splits that have a vector. `vocab` also has the words of the lexicon in the sentences.

    Raises:
        ParameterError: `min_freq` leaves out all tokens; vectors of characters and of a lexicon's words have different
            widths; a file of vectors is wrong, or has a vector of no symbol.
    """
    token_vectors = "word_vectors" if config.token_level == "word" else "char_vectors"
    min_freq = config.min_freq or 0
    chars = _choose(config, texts, list, min_freq, token_vectors)
    if not chars.symbols and min_freq != MIN_FREQ[config.token_level]:
        message = f"min_freq must be smaller, got {min_freq}: it leaves out all tokens of the training sentences"
        raise ParameterError("min_freq", min_freq, "less, so that some tokens are known", message)
    bigrams = _choose(config, texts, SECOND_SYMBOLS_OF[config.token_level], min_freq, "bigram_vectors")
    words = _Symbols([], {}, None)
    if lexicon:
        words = _choose(config, texts, lambda tokens: [m.word for m in lexicon.matches(tokens)], 0, "word_vectors")
    if chars.dim and words.dim and chars.dim != words.dim:
        message = (
            f"char_vectors {config.char_vectors} have {chars.dim} numbers and word_vectors {config.word_vectors} have "
            f"{words.dim}: with a lexicon both are in one table and must have the same width"
        )
        raise ParameterError("word_vectors", words.dim, f"vectors of {chars.dim} numbers, as char_vectors", message)
    items = list(dict.fromkeys(chars.symbols + words.symbols))  # a token of several characters may be a word, too
    both = _Symbols(items, words.vectors | chars.vectors, chars.dim or words.dim)
    vocabs = {}
    embeddings = {}
    for name, table in (("vocab", both), ("bigram_vocab", bigrams)):
        vocab = Vocab(special=SPECIAL, unk=SPECIAL[1], min_freq=min_freq)
        vocab.set_lines([*SPECIAL, *table.symbols], str(config.train_path or config.dataset))
        if table.dim:
            rng = np.random.default_rng(0)
            embeddings[name] = embedding_matrix(vocab.symbols, table.vectors, table.dim, rng)
        vocabs[name] = vocab
    return vocabs["vocab"], vocabs["bigram_vocab"], embeddings


def extend_vocabs(
    config: TaggedConfig,
    texts: Texts,
    lexicon: Lexicon | None,
    vocab: Vocab,
    bigram_vocab: Vocab,
) -> tuple[Vocab, Vocab, dict]:
    """Returns `vocab` and `bigram_vocab`, extended by the symbols that `make_vocabs` chooses and that they lack.

    The new symbols keep the order of `make_vocabs`.

    Returns:
        `(vocab, bigram_vocab, embeddings)`, as `make_vocabs`. Only the rows of new symbols in `embeddings` are used;
        the rows of symbols that `make_vocabs` did not choose are zero.
    """
    new, new_bigrams, tables = make_vocabs(config, texts, lexicon)
    new_vocabs = {"vocab": new, "bigram_vocab": new_bigrams}
    longer = {"vocab": vocab.extended(new.symbols), "bigram_vocab": bigram_vocab.extended(new_bigrams.symbols)}
    for name, table in tables.items():
        tables[name] = table[[new_vocabs[name].ids.get(symbol, 0) for symbol in longer[name].symbols]]
    return longer["vocab"], longer["bigram_vocab"], tables


def _choose(
    config: TaggedConfig,
    texts: Texts,
    symbols_of: Callable[..., Any],
    min_freq: int,
    option: str,
) -> _Symbols:
    """Chooses the symbols of the training sentences, by frequency, then those of the other splits that have a vector.

    Args:
        config: the options; `config.lowercase_vectors` gives a symbol without a vector that of its lower-case form.
        texts: split -> sentences.
        symbols_of: function of the tokens of a sentence that returns its symbols, such as its bigrams.
        min_freq: symbols of the training sentences that occur less often are left out, except words with a vector from
            `word_vectors`.
        option: name of the option for the file of vectors.
    """
    counts = {}
    path = getattr(config, option)
    for split, text in texts.items():
        counter = Counter(symbol for sentence in text for symbol in symbols_of(sentence.tokens))
        # The file of a vocabulary has words without white space. So a token such as U+3000 is unknown.
        counts[split] = {s: n for s, n in counter.most_common() if s.split() == [s] and s not in SPECIAL}
    train = counts.pop("train")
    other_symbols = {symbol: None for counter in counts.values() for symbol in counter if symbol not in train}
    if not path:
        return _Symbols([symbol for symbol, n in train.items() if n >= min_freq], {}, None)
    # As the file of vectors spells them. It may also have a vector of "<unk>".
    words = {symbol: symbol.replace(BLANK, " ") for symbol in (SPECIAL[1], *train, *other_symbols)}
    vectors_of_words, dim = read_vectors(path, {*words.values(), *map(str.lower, words.values())}, option)
    exact = {symbol: vectors_of_words[word] for symbol, word in words.items() if word in vectors_of_words}
    lower = {
        s: vectors_of_words[word.lower()]
        for s, word in words.items()
        if word not in vectors_of_words and word.lower() in vectors_of_words
    }
    vectors = exact | lower if config.lowercase_vectors else exact
    always_chosen = vectors if option == "word_vectors" else ()
    symbols = [symbol for symbol, n in train.items() if n >= min_freq or symbol in always_chosen]
    symbols += [symbol for symbol in other_symbols if symbol in vectors]
    _log_found(option, path, [*train, *other_symbols], symbols, exact, lower, config.lowercase_vectors)
    return _Symbols(symbols, vectors, dim)


def _log_found(
    option: str,
    path: str,
    wanted: list[str],
    symbols: list[str],
    exact: dict[str, np.ndarray],
    lower: dict[str, np.ndarray],
    takes_lower: bool,
) -> None:
    """Logs how many of the `symbols` that get an id have a vector.

    Raises ParameterError if no symbol of the sentences has one.

    Args:
        option: name of the option for the file of vectors.
        path: path of this file.
        wanted: all symbols of the sentences.
        symbols: the chosen ones, which get an id.
        exact: symbol -> its vector.
        lower: symbol -> vector of its lower-case form, for symbols without a vector of their own.
        takes_lower: whether the vectors of lower-case forms are used.
    """
    n_lower = sum(symbol in lower for symbol in (symbols if takes_lower else wanted))
    is_hint = n_lower and not takes_lower
    if not any(symbol in exact or (takes_lower and symbol in lower) for symbol in wanted):
        such = ", ".join(brief(symbol) for symbol in wanted[:3])
        message = f"{option} {path} has a vector of none of the {len(wanted):,} {_CALLED[option]}, such as {such}"
        message += f"; {n_lower:,} have one in lower case: give lowercase_vectors to use it" if is_hint else ""
        raise ParameterError(option, path, f"a file with vectors of the {_CALLED[option]} of the sentences", message)
    n_exact = sum(symbol in exact for symbol in symbols)
    n_found = f"{n_exact:,} of {len(symbols):,} {_CALLED[option]} found exactly"
    if is_hint:
        n_found += f"; {n_lower:,} more have a vector in lower case: give lowercase_vectors to use it"
    else:
        n_found += f", {n_lower:,} in lower case"
    logger.info(f"{option} {path}: {n_found}")
