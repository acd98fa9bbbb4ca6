"""From texts to tokens: `make_vocab` counts tokens in a first pass, `encode` encodes the text in a second pass.

`count`, `take_sample`, `encode_portion` and others are generator functions of a portion of the text. The argument
`workers`, an object as in `portions.py`, calls them for all portions and yields the results in order. The tokens do not
depend on how the text is cut into portions. `workers` passes `progress` and `numbered`, see `Recipe.read`.
"""

from __future__ import annotations

import copy
import functools
import itertools
import logging
import math
import operator
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from txl_tf.data.subwords import Sample, empty_vocab, load_vocab, sentencepiece, train_on_lines, training_lines
from txl_tf.data.text.datasets import UNK, Recipe
from txl_tf.data.text.parquet import Rows
from txl_tf.data.text.portions import THIS_PROCESS
from txl_tf.data.text.sizes import END_OF_DOCUMENT, Extent, TextSize, extent_of
from txl_tf.data.text.texts import FilePart, Text, read_texts
from txl_tf.data.text_files import Progress
from txl_tf.data.token_files import token_type
from txl_tf.data.vocabulary import Vocab, check_occurs
from txl_tf.errors import ParameterError, brief, shortened

logger = logging.getLogger("txl_tf")

_AT_ONCE = 1 << 18  # `_joined` joins short pieces until they have at least so many ids

Portion = list[FilePart] | Rows


class Piece(NamedTuple):
    """Consecutive ids of a shard of a split, and the extent of their text, if it is known."""

    split: str
    shard: int
    ids: np.ndarray
    extent: Extent | None = None


class Counted(NamedTuple):
    """Counts of a portion.

    Attributes:
        counter: how often each token occurs, in the order of first appearance; empty at level "byte". `None` in the
            results of `make_vocab`, which has added it to the vocabulary's counter.
        n_tokens: number of ids, with the ends of documents.
        n_documents: number of documents that end in the portion; 0 for a vocabulary without ends of documents.
        n_to_last_end: number of ids up to the last end of a text in the portion, inclusive.
        n_skipped: number of rows without a text that were left out.
        skipped: why the first of these rows was left out, with the number of its line; `None` if that is not known, or
            if no row was left out.
    """

    counter: Counter
    n_tokens: int
    n_documents: int = 0
    n_to_last_end: int = 0
    n_skipped: int = 0
    skipped: str | None = None


Counts = list[tuple[Portion, Counted]]  # in the order of the text


def _portions(recipe: Recipe, paths: list[str], workers: Any) -> list[Portion]:
    """Returns the portions into which `workers` cuts the files. Python's manual is one portion.

    Raises:
        ParameterError: `workers` cannot do this work.
    """
    if not hasattr(workers, "portions"):
        raise ParameterError("workers", workers, "left out, or the workers of a cluster, see data/text/portions.py")
    return [[FilePart(path) for path in paths]] if recipe.dataset == "pydoc" else workers.portions(paths)


def _pieces(texts: Iterable[Text]) -> Iterator[str | bytes]:
    """Yields the pieces of all texts, one text after the other."""
    return itertools.chain.from_iterable(text.pieces for text in texts)


def _uncounted(vocab: Vocab) -> Vocab:
    """Returns the vocabulary with an empty counter of its own."""
    vocab = copy.copy(vocab)
    vocab.counter = Counter()
    return vocab


# -------------------------------------------------------------------------------------------------------- counting


def make_vocab(recipe: Recipe, workers: Any = THIS_PROCESS, progress: Progress | None = None) -> tuple[Vocab, Counts]:
    """Returns the vocabulary, and the portions of the counted files with their counts.

    The vocabulary is the one of the recipe, or comes from a file or from the text. The counts of the text are added to
    its `counter`, even to the counter of the recipe's own vocabulary. Logs how many rows were left out, if any.

    Raises:
        ParameterError: the text or the file of the vocabulary is wrong.
    """
    options = recipe.vocab_options
    subwords = recipe.vocab_options["level"] == "subword"
    portions = _portions(recipe, recipe.counted, workers)
    if recipe.vocab is not None:
        vocab = recipe.vocab
    elif recipe.vocab_file:
        vocab = load_vocab(recipe.vocab_file, **options)
        if vocab.level == "char" and UNK in vocab.ids:  # a symbol of several characters can only be special
            vocab.special = [UNK]
            vocab.unk = UNK
        if vocab.unk is not None and vocab.unk not in vocab.ids:
            message = f"unk symbol {brief(vocab.unk)} is not in vocabulary file {recipe.vocab_file}"
            raise ParameterError("vocab_path", recipe.vocab_file, f"a vocabulary with {brief(vocab.unk)}", message)
        check_occurs(vocab, "vocab_path", recipe.vocab_file)
    elif subwords:
        vocab = _make_subwords(recipe, portions, workers)
    else:
        vocab = empty_vocab(**options)
    counts = []
    function = functools.partial(count, recipe, _uncounted(vocab))
    all_counted = workers.each(function, [(portion,) for portion in portions], progress)
    for portion, counted in zip(portions, all_counted, strict=True):
        vocab.counter.update(counted.counter)  # keeps the order of first appearance
        counts.append((portion, counted._replace(counter=None)))
    reasons = [counted.skipped for _, counted in counts if counted.n_skipped]
    log_skipped(sum(counted.n_skipped for _, counted in counts), reasons[0] if reasons else None)
    if vocab.document is not None:
        vocab.counter[vocab.document] = sum(counted.n_documents for _, counted in counts)
    if not (recipe.vocab is not None or recipe.vocab_file or subwords):
        vocab.build()
    return vocab, counts


def count(
    recipe: Recipe, vocab: Vocab, portion: Portion, progress: Progress | None = None, numbered: bool = True
) -> Iterator[Counted]:
    """Yields one `Counted` of a portion."""
    vocab = _uncounted(vocab)
    n_tokens = 0
    n_documents = 0
    n_to_last_end = 0
    skipped = []

    def pieces(texts):
        """Yields the pieces of texts, and counts the documents that end."""
        nonlocal n_documents
        for text in texts:
            yield from text.pieces
            n_documents += vocab.document is not None and text.is_last

    read = recipe.read(portion, progress, numbered, skipped.append)
    # First the texts that end in this portion, then perhaps one that ends in a later portion.
    for is_last, texts in itertools.groupby(read, lambda text: text.is_last):
        n_tokens += vocab.count(pieces(texts))
        n_to_last_end = n_tokens + n_documents if is_last else n_to_last_end
    first = skipped[0] if skipped and numbered else None
    yield Counted(vocab.counter, n_tokens + n_documents, n_documents, n_to_last_end, len(skipped), first)


def log_skipped(number: int, reason: str | None) -> None:
    """Logs how many rows without a text were left out and, if known, why the first of them was."""
    if number:
        first = f", the first because {reason}" if reason else ""
        logger.warning("rows without a text, left out by skip_bad_lines: %s%s", f"{number:,}", first)


def _make_subwords(recipe: Recipe, portions: list[Portion], workers: Any) -> Vocab:
    """Makes subwords from a `Sample` of the whole text: joins the samples of its portions."""
    sentencepiece()  # raises an error before the text is read
    sample = Sample()
    firsts = [0]  # the number of the first line of each portion
    if len(portions) > 1:
        lines = workers.each(functools.partial(count_lines, recipe), [(portion,) for portion in portions])
        firsts = itertools.accumulate(lines, initial=0)
    # `workers` takes these calls one at a time. The limit falls as the sample grows, so a later portion returns fewer
    # lines: only those that may still be in the sample.
    calls = ((portion, first, sample.hash_limit) for portion, first in zip(portions, firsts, strict=False))
    for part in workers.each(functools.partial(take_sample, recipe), calls):
        sample.join(part)
    options = {name: recipe.options[name] for name in ("vocab_size", "subword_type")}
    (vocab,) = workers.each(functools.partial(_train, **options, **recipe.vocab_options), [(sample.lines,)])
    return vocab


def count_lines(
    recipe: Recipe, portion: Portion, progress: Progress | None = None, numbered: bool = True
) -> Iterator[int]:
    """Yields one number: how many lines of a portion `training_lines` returns."""
    yield sum(1 for _ in training_lines(_pieces(recipe.read(portion, progress, numbered))))


def take_sample(
    recipe: Recipe,
    portion: Portion,
    first: int,
    hash_limit: int,
    progress: Progress | None = None,
    numbered: bool = True,
) -> Iterator[Sample]:
    """Yields one `Sample` of the lines of a portion; `first` lines of the text are before the portion."""
    yield Sample.of(training_lines(_pieces(recipe.read(portion, progress, numbered))), first, hash_limit)


def _train(
    lines: list[str], progress: Progress | None = None, numbered: bool = True, **options: Any
) -> Iterator[Vocab]:
    """Yields one vocabulary, the subwords of the lines. `progress` and `numbered`, from `workers`, have no effect."""
    yield train_on_lines(lines, **options)


# -------------------------------------------------------------------------------------------------------- encoding


def encode(
    recipe: Recipe,
    vocab: Vocab,
    counts: Counts,
    workers: Any = THIS_PROCESS,
    progress: Progress | None = None,
) -> Iterator[Piece]:
    """Yields the pieces of each split in order. The shard is 0, except for the shuffled files of lm1b.

    Args:
        recipe: recipe of the text.
        vocab, counts: from `make_vocab`.
        workers, progress: as in `ThisProcess.each`.

    Raises:
        ParameterError: the text is wrong, or is too short for `valid_fraction`, or its last document is too long for
            it.
    """
    vocab = _uncounted(vocab)
    for split, paths in recipe.files.items():
        if split == "train" and recipe.shuffles:
            yield from _encode_shuffled(recipe, vocab, workers, progress)
            continue
        if recipe.valid_fraction is None:
            calls = ((portion, split, math.inf) for portion in _portions(recipe, paths, workers))
        else:
            calls = _train_and_valid(counts, vocab.document is not None, recipe.valid_fraction)
        splits = set()
        for piece in workers.each(functools.partial(encode_portion, recipe, vocab), calls, progress):
            splits.add(piece.split)
            yield piece
        if recipe.valid_fraction is not None and "valid" not in splits:
            message = (
                f"the last document is more than valid_fraction={recipe.valid_fraction} of the text of "
                f"{sum(counted.n_tokens for _, counted in counts)} tokens, and documents are not cut: none is left to "
                "validate on"
            )
            allowed = "at least the share of the last document"
            raise ParameterError("valid_fraction", recipe.valid_fraction, allowed, message)


def _train_and_valid(counts: Counts, by_document: bool, valid_fraction: float) -> Iterator[tuple[Portion, str, float]]:
    """Yields `(portion, split, n_before_valid)` of each portion, as `encode_portion` takes them.

    The first tokens of the text are train, the last ones valid. With `by_document`, documents are not cut: the document
    at the border is train.

    Raises:
        ParameterError: train or valid would have no token.
    """
    n_tokens = sum(counted.n_tokens for _, counted in counts)
    n_train = int(n_tokens * (1 - valid_fraction))
    if n_train in (0, n_tokens):
        message = f"a text of {n_tokens} tokens is too short to hold out {valid_fraction} of it"
        raise ParameterError("valid_fraction", valid_fraction, "a share of at least one token", message)
    split = "train"
    position = 0
    for portion, counted in counts:
        last = counted.n_to_last_end if by_document else counted.n_tokens  # the last position where it can be cut
        has_border = split == "train" and last and position + last >= n_train
        yield portion, split, n_train - position if has_border else math.inf
        split = "valid" if has_border else split
        position += counted.n_tokens


def encode_portion(
    recipe: Recipe,
    vocab: Vocab,
    portion: Portion,
    split: str,
    n_before_valid: float,
    progress: Progress | None = None,
    numbered: bool = True,
) -> Iterator[Piece]:
    """Yields the pieces of a portion.

    The first `n_before_valid` tokens are of `split`, the others of "valid". With documents, "valid" begins at the first
    end of a document after at least so many tokens. If the number is infinite, all tokens are of `split`.
    """
    encoded = _encoded(recipe.read(portion, progress, numbered), vocab)
    yield from _joined(_divided(encoded, vocab, split, n_before_valid), token_type(len(vocab)))


def encode_files(
    paths: list[str], vocab: Vocab, text_field: str | None = None, skip_bad_lines: bool = False
) -> tuple[np.ndarray, TextSize]:
    """Returns the ids of files in the vocabulary of a model, int32 `[n]`, and the size of the text.

    If the vocabulary has a token for the end of a document, the ids have it after each text.

    Args:
        paths: paths of the files, see `read_texts`.
        vocab: the vocabulary.
        text_field: see `read_texts`.
        skip_bad_lines: whether rows without a text are left out.

    Raises:
        ParameterError, FileNotFoundError: as `read_texts` and `Vocab.encode`; or no row has a text.
    """
    skipped = []
    level = "line" if vocab.bos else vocab.level
    rows = {"raw_text": vocab.raw_text, "skipped": skipped.append if skip_bad_lines else None}
    texts = read_texts(map(FilePart, paths), level, text_field, **rows)
    pieces = list(_divided(_encoded(texts, vocab), vocab, "", math.inf))
    log_skipped(len(skipped), skipped[0] if skipped else None)
    if not pieces:
        message = f"{shortened(', '.join(paths), 300)}: no row has a text"
        raise ParameterError("paths", paths, "files with a text", message)
    extent = functools.reduce(operator.add, (piece.extent for piece in pieces if piece.extent), Extent())
    return np.concatenate([piece.ids for piece in pieces]), extent.size


def _encoded(texts: Iterable[Text], vocab: Vocab) -> Iterator[tuple[str | bytes, np.ndarray, bool]]:
    """Yields `(piece of text, its ids, False)`; with documents, also `("", id of the end, True)` after each text."""
    end = np.array([vocab.document_id], np.int32) if vocab.document is not None else None
    for text in texts:
        pieces, same = itertools.tee(text.pieces)  # each piece is both encoded and yielded
        for piece, ids in zip(same, vocab.encode_stream(pieces, text.name, text.first_line), strict=True):
            yield piece, ids, False
        if end is not None and text.is_last:
            yield "", end, True


def _divided(
    encoded: Iterable[tuple[str | bytes, np.ndarray, bool]], vocab: Vocab, split: str, n_before_valid: float
) -> Iterator[Piece]:
    """Yields the pieces of a portion, each of `split` or of "valid": see `encode_portion`.

    Args:
        encoded: from `_encoded`.
        vocab, split, n_before_valid: as in `encode_portion`.
    """
    position = 0
    for text, ids, ends_document in encoded:
        n_before = n_before_valid - position  # tokens from the beginning of this piece to the border
        position += len(ids)
        if vocab.document is None and 0 < n_before < len(ids):
            k = int(n_before)
            before, text = vocab.split(text, ids, k)
            yield Piece(split, 0, ids[:k], extent_of(before))
            split = "valid"
            ids = ids[k:]
        yield Piece(split, 0, ids, END_OF_DOCUMENT if ends_document else extent_of(text))
        if position >= n_before_valid and (ends_document or vocab.document is None):
            split = "valid"


def _joined(pieces: Iterable[Piece], dtype: np.dtype) -> Iterator[Piece]:
    """Joins consecutive short pieces until they have `_AT_ONCE` ids, and converts the ids to `dtype`.

    `dtype` has room for all ids. Pieces of different splits or shards are not joined.
    """
    for (split, shard), same in itertools.groupby(pieces, lambda piece: (piece.split, piece.shard)):
        waiting = []
        n_waiting = 0
        extent = Extent()
        for piece in same:
            waiting.append(piece.ids)
            n_waiting += len(piece.ids)
            extent += piece.extent or Extent()
            if n_waiting >= _AT_ONCE:
                yield Piece(split, shard, np.concatenate(waiting, dtype=dtype, casting="unsafe"), extent)
                waiting = []
                n_waiting = 0
                extent = Extent()
        if waiting:
            yield Piece(split, shard, np.concatenate(waiting, dtype=dtype, casting="unsafe"), extent)


def _encode_shuffled(recipe: Recipe, vocab: Vocab, workers: Any, progress: Progress | None) -> Iterator[Piece]:
    """Yields the training files of lm1b, the sentences of each in the original's random order for the seed.

    Each order of each file is a shard. The shards of the first order of all files have the first numbers, then those of
    the second order, ...
    """
    rng = np.random.RandomState(recipe.options["seed"])
    calls = [([FilePart(path)],) for path in recipe.files["train"]]
    encoded = workers.each(functools.partial(encode_sentences, recipe, vocab), calls, progress)
    for shard, (ids, lengths, extent) in enumerate(encoded):
        sentences = np.split(ids, np.cumsum(lengths)[:-1])
        for shuffle in range(recipe.shuffles):
            rng.shuffle(sentences)
            yield Piece("train", shuffle * len(calls) + shard, np.concatenate(sentences), extent)


def encode_sentences(
    recipe: Recipe, vocab: Vocab, portion: Portion, progress: Progress | None = None, numbered: bool = True
) -> Iterator[tuple[np.ndarray, list[int], Extent]]:
    """Yields once, for a file of a sentence a line: its ids, the number of ids of each sentence, and its extent.

    The ids of a sentence are those of `bos`, of its words and of `eos`.
    """
    ids = []
    lengths = []
    extent = Extent()
    for text in recipe.read(portion, progress, numbered):
        for piece in text.pieces:
            ids.append(vocab.encode(piece, name=text.name))
            lines = piece.decode() if isinstance(piece, bytes) else piece
            lengths.extend(len(line.split()) + 2 for line in lines.split("\n")[:-1])
            extent += extent_of(piece)
    yield np.concatenate(ids), lengths, extent
