"""Tagged sentences, from CoNLL files to ids: vocabularies, labels and initial embeddings."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import logging
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from txl_tf.config import MIN_FREQ, ColumnsConfig, TaggedConfig
from txl_tf.data import inputs
from txl_tf.data.batching import hold_out
from txl_tf.data.tagged.batches import SentenceEncoder, TaggedSplit
from txl_tf.data.tagged.columns import (
    BLANK,
    TaggedSentence,
    line_of,
    numbered_tags,
    read_sentences,
    tags_of,
)
from txl_tf.data.tagged.lexicon import TOWNS, Lexicon
from txl_tf.data.tagged.schemes import in_one_scheme
from txl_tf.data.tagged.sentence_ends import LineSizes
from txl_tf.data.tagged.symbols import extend_vocabs, make_vocabs
from txl_tf.data.tagged.tags import NONE, all_labels, detect_scheme, kind_of, split_tag
from txl_tf.data.tagged.towns import make_sentences
from txl_tf.data.vocabulary import KNOWN_SYMBOLS, Vocab
from txl_tf.errors import ParameterError, brief, shortened
from txl_tf.schema import check_left_out

VECTORS = ("char_vectors", "bigram_vectors", "word_vectors")  # options for files of vectors

logger = logging.getLogger("txl_tf")


# ------------------------------------------------------------------------------------------------------------- files


def read_tagged(
    path: str,
    segment_digits: bool = False,
    scheme: str | None = None,
    columns: ColumnsConfig | None = None,
    labels: Iterable[str] = (),
) -> list[TaggedSentence]:
    """Reads a file that has a token and a tag per line, in two of its columns, and empty lines between sentences.

    Columns are separated by spaces or tabs; other white space can be a token. At the beginning of a sentence, a line
    with -DOCSTART- in the first column is skipped, and so are comments, see columns.py. A space or a tab in a token
    becomes "␣".

    Args:
        path: path of a UTF-8 file.
        segment_digits: whether each token ends with a digit that is not part of it, as in Weibo's "科0".
        scheme: with "none", any text is a tag.
        columns: columns of tokens and tags. By default, tokens are in the first column and tags in the last. In
            CoNLL-U, tokens are in the second column, and the column of the tags must be given.
        labels: see `read_sentences`.

    Raises:
        FileNotFoundError: the file does not exist.
        ParameterError: a line has no tag or a malformed one, with `segment_digits` a token has no digit, the file has
            no sentences or is not UTF-8, or the columns are ambiguous. Names file and line.
    """
    sentences = read_sentences(path, columns or ColumnsConfig(), scheme, labels)
    if not sentences:
        raise ParameterError(path, None, "a file of sentences", f"{path} has no sentences")
    return _without_digits(sentences, path) if segment_digits else sentences


def read_tagged_as(
    path: str,
    labels: list[str],
    segment_digits: bool = False,
    scheme: str | None = None,
    columns: ColumnsConfig | None = None,
) -> list[TaggedSentence]:
    """Reads a file of tagged sentences, and converts the tags to the scheme of a model's labels; see `read_tagged`.

    It reads the output of tools/tag.py, too. Such a file has no digits of segmentation: if all tokens are single
    characters, `segment_digits` has no effect.

    Args:
        path, segment_digits, columns: as in `read_tagged`.
        labels: labels of the model.
        scheme: "none", or the scheme to convert the tags to; `None`: the scheme of the labels.

    Raises:
        ParameterError: as `read_tagged`; or an entity type is not among the labels. Names file and line.
    """
    text = read_tagged(path, False, scheme, columns, labels)
    if segment_digits and any(len(token) > 1 for sentence in text for token in sentence.tokens):
        text = _without_digits(text, path)
    own = scheme or detect_scheme(labels)
    text = in_one_scheme({"text": text}, {"text": path}, own)[0]["text"]
    kinds = {kind_of(label, scheme) for label in labels}
    for number, tag in numbered_tags(text):
        if tag not in labels and kind_of(tag, scheme) not in kinds:
            known = ", ".join(sorted(kinds - {""}))
            where = f"{path}, line {number}"
            message = f"{where}: {brief(tag)} is of a kind that the model does not have; it has {known}"
            raise ParameterError(where, tag, sorted(kinds - {""}), message)
    return text


def _warn_of_unseen(text: list[TaggedSentence], name: str, level: str) -> None:
    """Logs a warning if a file has tokens that a model will never see in plain text.

    Plain text is split into characters or, with `level` "word", at white space.
    """
    n = sum(len(sentence.tokens) for sentence in text)
    unseen = []
    for sentence in text:
        for i, token in enumerate(sentence.tokens):
            if (len(token) > 1) if level == "char" else (BLANK in token):
                unseen.append((token, sentence, i))
    if not unseen:
        return
    token, sentence, i = unseen[0]
    number = line_of(sentence, i)
    share = f"as have {len(unseen):,} of {n:,} tokens"
    if level == "char":
        has = f"{len(token)} characters, {share}: text is tagged character by character, where none of these occurs"
        ways = (
            "--token_level=word where tokens are words, --segment_digits where each ends with a digit of segmentation"
        )
        logger.warning(f"{name}, line {number}: {brief(token)} has {has}. {ways}, as 科0")
    else:
        has = f"a space within, {share}: text is split at white space, where none of these occurs"
        logger.warning(f"{name}, line {number}: {brief(token)} has {has}")


def _without_digits(text: list[TaggedSentence], path: str) -> list[TaggedSentence]:
    """Removes the digit at the end of every token, the position of the character in its word (`segment_digits`).

    Raises:
        ParameterError: a token has no such digit, or is only a digit. Names file and line.
    """
    for sentence in text:
        for i, token in enumerate(sentence.tokens):
            if len(token) < 2 or token[-1] not in "0123456789":
                where = f"{path}, line {line_of(sentence, i)}"
                allowed = "text and one digit, as 科0"
                message = f"{where}: with segment_digits a token must be {allowed}, got {brief(token)}"
                raise ParameterError(where, token, allowed, message)
    return [sentence._replace(tokens=[token[:-1] for token in sentence.tokens]) for sentence in text]


# ------------------------------------------------------------------------------------------------------------ corpus


@dataclasses.dataclass
class TaggedCorpus:
    """Vocabularies, labels and encoded sentences.

    Attributes:
        vocab: vocabulary of characters and of the lexicon's words; or of words, if the tokens are words.
        bigram_vocab: vocabulary of bigrams; or of the forms of words, see `form_of`.
        labels: the tags in the order of their ids.
        lexicon: the lexicon, or `None`.
        splits: `"train"`, `"valid"` and perhaps `"test"` -> `TaggedSplit`.
        names: split -> its file, for messages.
        scheme: scheme of the labels: "bio", "bioes", "bmes" or "none".
        level: level of the tokens: "char" or "word".
        lines: split -> line number of the first token of each sentence.
        sizes: lengths of the training sentences, without those that are held out for validation.
        embeddings: `"vocab"` and `"bigram_vocab"` -> initial embeddings, float32 `[symbols, dim]`, if there are
            vectors. If the vocabularies were extended, only the rows of new symbols are used.
    """

    vocab: Vocab
    bigram_vocab: Vocab
    labels: list[str]
    lexicon: Lexicon | None
    splits: dict[str, TaggedSplit]
    names: dict[str, str]
    scheme: str
    embeddings: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    level: str = "char"
    lines: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    sizes: LineSizes | None = None

    @property
    def vocabs(self) -> list[Vocab]:
        """`vocab`, `bigram_vocab` and, with a lexicon, the vocabulary of its words: see `lexicon_vocab`."""
        return [self.vocab, self.bigram_vocab, *([lexicon_vocab(self.lexicon)] if self.lexicon else [])]

    @property
    def encoder(self) -> SentenceEncoder:
        return SentenceEncoder(self.vocab, self.bigram_vocab, self.lexicon, self.level)

    def fingerprint(self, split: str) -> str:
        """Returns a SHA-256 that changes if the split changes."""
        digest = hashlib.sha256()
        for sentence, tags in zip(*self.splits[split], strict=True):
            for ids in ([sentence.n, len(sentence.ids)], sentence.ids, tags):
                digest.update(np.asarray(ids, "<i4").tobytes())
        return digest.hexdigest()


def lexicon_vocab(lexicon: Lexicon) -> Vocab:
    """Returns the words of a lexicon as a vocabulary, which a run stores in a file."""
    vocab = Vocab()
    vocab.set_lines(lexicon.words, "lexicon")
    return vocab


def encoder_of(vocab: Vocab, bigram_vocab: Vocab, lexicon: Vocab | None = None, level: str = "char") -> SentenceEncoder:
    """Returns the encoder for the vocabularies of a run.

    Args:
        vocab, bigram_vocab: of the run.
        lexicon: the words of its lexicon, or `None`.
        level: level of the tokens, "char" or "word".
    """
    return SentenceEncoder(vocab, bigram_vocab, Lexicon(lexicon.symbols) if lexicon else None, level)


def read_corpus(
    config: TaggedConfig,
    vocabs: list[Vocab] | None = None,
    labels: list[str] | None = None,
    extend_vocab: bool = False,
    as_before: bool = False,
    recorded: Mapping[str, Any] | None = None,
) -> TaggedCorpus:
    """Reads and encodes tagged sentences.

    New vocabularies have the symbols of the training sentences, and those symbols of the other files that have a
    vector. Other symbols are unknown. The kinds of entities come from the training sentences.

    Args:
        config: what to read.
        vocabs: the vocabularies to use instead of new ones, as in `TaggedCorpus.vocabs`. If they have a lexicon and
            `config.lexicon` is given, its words are found instead; without `extend_vocab`, words that `vocabs` lack
            are unknown.
        labels: with `vocabs`, the labels of an existing model. If `config.tag_scheme` is not set and the labels have
            all kinds of entities of the files, the tags are converted to the scheme of the labels. Labels that contain
            every tag are kept; otherwise new ones are made.
        extend_vocab: whether symbols that `vocabs` lack get ids after theirs. These are the symbols that a new
            vocabulary would have.
        as_before: see `in_one_scheme`.
        recorded: values of options that the run has recorded, if it exists. Earlier versions did not refuse
            `n_sentences` without an effect. It is ignored if it has the recorded value.

    Raises:
        ParameterError: `n_sentences` would have no effect. Or a kind of entity is not in the training sentences,
            vectors have different widths, ...: names file and line, what was found and what is allowed.
        FileNotFoundError: a file does not exist.
    """
    usual = (TaggedConfig.n_sentences, (recorded or {}).get("n_sentences"))
    if config.dataset != TOWNS and config.n_sentences not in usual:
        check_left_out({"n_sentences": config.n_sentences}, "it is for dataset=towns")
    inputs.check_options(
        config, "train_path", "valid_path", "test_path", "lexicon", "char_vectors", "bigram_vectors", "word_vectors"
    )
    texts, names = _read_splits(config)
    _warn_of_unseen(texts["train"], names["train"], config.token_level)
    if "valid" not in texts:
        names["valid"] = f"{config.valid_fraction:.0%} of {names['train']}"
    if vocabs:
        return _read_with(config, texts, names, vocabs, labels or [], extend_vocab, as_before)
    lexicon = Lexicon.load(config.lexicon, config.skip_short_words) if config.lexicon else None
    texts, scheme = in_one_scheme(texts, names, config.tag_scheme, as_before)
    labels = _make_labels(texts, names, scheme)
    texts = _with_validation(config, texts)
    if lexicon:
        _log_lexicon(config.lexicon, lexicon, texts["train"])
    vocab, bigram_vocab, embeddings = make_vocabs(config, texts, lexicon)
    corpus = TaggedCorpus(vocab, bigram_vocab, labels, lexicon, {}, names, scheme, embeddings, config.token_level)
    return _encoded(corpus, texts)


def _read_splits(config: TaggedConfig) -> tuple[dict, dict]:
    """Reads the files of the configuration. Returns `{split: sentences}` and `{split: name of its file}`."""
    paths = {split: getattr(config, f"{split}_path") for split in ("train", "valid", "test")}
    if config.dataset == TOWNS:
        splits = make_sentences(config.n_sentences)
        texts = {split: [TaggedSentence(*row, i) for i, row in enumerate(rows, 1)] for split, rows in splits.items()}
        return texts, {split: f"towns, {split}" for split in splits}
    if not paths["train"]:
        message = "train_path must be given: a file with a token and a tag a line; or dataset=towns"
        raise ParameterError("train_path", None, "a file with a token and a tag a line", message)
    names = {split: path for split, path in paths.items() if path}
    texts = {
        split: read_tagged(path, config.segment_digits, config.tag_scheme, config) for split, path in names.items()
    }
    return texts, names


def line_sizes_in(config: TaggedConfig) -> LineSizes:
    """Returns the lengths of all sentences in the training file. Raises errors as `read_tagged` does."""
    texts, _ = _read_splits(dataclasses.replace(config, valid_path=None, test_path=None))
    return LineSizes.of((sentence.tokens for sentence in texts["train"]), config.token_level == "word")


def _with_validation(config: TaggedConfig, texts: dict[str, list[TaggedSentence]]) -> dict[str, Any]:
    """Returns `texts` with a split "valid".

    If they have none, `valid_fraction` of the training sentences is moved to it.
    """
    if "valid" in texts:
        return texts
    train = texts["train"]
    other_splits = {split: text for split, text in texts.items() if split != "train"}
    held_out = hold_out(["\n".join(sentence.tokens) for sentence in train], config.valid_fraction, "sentences")
    return {
        "train": list(itertools.compress(train, ~held_out)),
        "valid": list(itertools.compress(train, held_out)),
        **other_splits,
    }


def _read_with(
    config: TaggedConfig,
    texts: dict[str, list[TaggedSentence]],
    names: dict[str, str],
    vocabs: list[Vocab],
    model_labels: list[str],
    extend_vocab: bool,
    as_before: bool,
) -> TaggedCorpus:
    """Does the work of `read_corpus` with existing vocabularies.

    Args:
        config, vocabs, extend_vocab, as_before: as in `read_corpus`.
        texts, names: from `_read_splits`.
        model_labels: `labels` of `read_corpus`.
    """
    if not extend_vocab:
        vectors = {name: getattr(config, name) for name in VECTORS}
        check_left_out(vectors, f"{KNOWN_SYMBOLS}; with extend_vocab, new symbols start from vectors")
    if config.min_freq != MIN_FREQ[config.token_level] and not extend_vocab:
        check_left_out({"min_freq": config.min_freq}, KNOWN_SYMBOLS)
    tag_scheme = config.tag_scheme
    if not tag_scheme and _kinds(tags_of(*texts.values())) <= _kinds(model_labels):
        tag_scheme = detect_scheme(model_labels)
    texts, scheme = in_one_scheme(texts, names, tag_scheme, as_before)
    labels = model_labels if tags_of(*texts.values()) <= set(model_labels) else _make_labels(texts, names, scheme)
    texts = _with_validation(config, texts)
    vocab, bigram_vocab, *words = vocabs
    lexicon = Lexicon(words[0].symbols) if words else None
    if words and config.lexicon:
        lexicon = Lexicon.load(config.lexicon, config.skip_short_words)
    embeddings = {}
    if extend_vocab:
        vocab, bigram_vocab, embeddings = extend_vocabs(config, texts, lexicon, vocab, bigram_vocab)
    if lexicon:
        _log_lexicon(config.lexicon, lexicon, texts["train"], vocab)
    corpus = TaggedCorpus(vocab, bigram_vocab, labels, lexicon, {}, names, scheme, embeddings, config.token_level)
    return _encoded(corpus, texts)


def _log_lexicon(path: str | None, lexicon: Lexicon, text: list[TaggedSentence], vocab: Vocab | None = None) -> None:
    """Logs how many words of a lexicon are in the training sentences and how many of these are not in `vocab`.

    Args:
        path: path of the lexicon; `None` for the lexicon of the run.
        lexicon: the words.
        text: the training sentences.
        vocab: an existing vocabulary; `None` if it will be made from these words.

    Raises:
        ParameterError: no sentence has a word of the file `path`. For the lexicon of the run, this is only a warning.
    """
    name = path or "of the run"
    words = {match.word for sentence in text for match in lexicon.matches(sentence.tokens)}
    if not words:
        such = ", ".join(brief(word) for word in lexicon.words[:3])
        message = f"lexicon {name}: none of its {len(lexicon):,} words, such as {such}, is in a training sentence"
        if not path:
            logger.warning(f"{message}; give other words with lexicon")
            return
        raise ParameterError("lexicon", path, "a file with words that occur in the training sentences", message)
    about_unknown = ""
    if vocab and (unknown := sum(word not in vocab.ids for word in words)):
        about_unknown = f"; {unknown:,} of these are not in the vocabulary and become {vocab.unk}"
    logger.info(
        f"lexicon {name}: {len(lexicon):,} words, {len(words):,} of them in the training sentences{about_unknown}"
    )


def _kinds(tags: Iterable[str]) -> set[str]:
    """Returns the different kinds of tags; the kind of "O" is ""."""
    return {split_tag(tag)[1] for tag in tags}


def _encoded(corpus: TaggedCorpus, texts: dict[str, list[TaggedSentence]]) -> TaggedCorpus:
    """Encodes the sentences of `texts`. Adds them, their lines and their sizes to `corpus`, and returns it."""
    encoder = corpus.encoder
    ids = {label: i for i, label in enumerate(corpus.labels)}
    corpus.sizes = LineSizes.of((sentence.tokens for sentence in texts["train"]), corpus.level == "word")
    corpus.lines |= {split: [sentence.line for sentence in text] for split, text in texts.items()}
    for split, text in texts.items():
        encoded = [encoder.encode(sentence.tokens) for sentence in text]
        tags = [np.array([ids[tag] for tag in sentence.tags], np.int32) for sentence in text]
        corpus.splits[split] = TaggedSplit(encoded, tags)
    return corpus


def _make_labels(texts: dict[str, list[TaggedSentence]], names: dict[str, str], scheme: str) -> list[str]:
    """Returns the labels for the kinds of entities in the training sentences, ordered by kind.

    "O" comes first if any file has it. In the scheme "none", the labels are the tags of the training sentences, sorted.

    Raises:
        ParameterError: another file has another kind of entity. Names file and line.
    """
    tags = {split: tags_of(text) for split, text in texts.items()}
    kinds = sorted(tags["train"]) if scheme == NONE else sorted({split_tag(tag)[1] for tag in tags["train"] - {"O"}})
    has_outside = any("O" in split_tags for split_tags in tags.values())
    labels = kinds if scheme == NONE else all_labels(kinds, scheme, has_outside)
    for split, text in texts.items():
        unknown = tags[split].difference(labels)
        for number, tag in numbered_tags(text) if unknown else ():
            if tag in unknown:
                where = f"{names[split]}, line {number}"
                message = (
                    f"{where}: {brief(tag)} is of a kind that {names['train']} does not have; "
                    f"it has {shortened(', '.join(kinds), 200) or 'none'}"
                )
                raise ParameterError(where, tag, kinds, message)
    return labels
