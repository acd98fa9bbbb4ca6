"""Sentences of tagged tokens, from CoNLL files to ids: vocabularies, labels and initial embeddings."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import re
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from txl_tf.config import MIN_FREQ, TaggedConfig
from txl_tf.data.tagged.batches import SentenceEncoder, TaggedSplit
from txl_tf.data.tagged.lexicon import TOWNS, Lexicon
from txl_tf.data.tagged.symbols import extend_vocabs, make_vocabs
from txl_tf.data.tagged.tags import (
    NONE,
    SCHEMES,
    all_labels,
    broken_at,
    convert_tags,
    detect_scheme,
    kind_of,
    split_tag,
)
from txl_tf.data.tagged.towns import make_sentences
from txl_tf.data.text_files import numbered_lines
from txl_tf.data.vocabulary import KNOWN_SYMBOLS, Vocab
from txl_tf.errors import ParameterError
from txl_tf.schema import brief, check_left_out

logger = logging.getLogger("txl_tf")


# ------------------------------------------------------------------------------------------------------------- files


class TaggedSentence(NamedTuple):
    """Tokens and a tag for each."""

    tokens: list[str]
    tags: list[str]
    line: int  # of the first token in its file


def read_tagged(path: str, segment_digits: bool = False, scheme: str | None = None) -> list[TaggedSentence]:
    """Reads a CoNLL file: a token and a tag a line, first and last column, and blank lines between sentences.

    Spaces or tabs part columns, other white space can be a token. A line whose token is -DOCSTART- is left out where
    a sentence would begin.

    Args:
        path: of a UTF-8 file.
        segment_digits: each token ends with a digit that is no part of it, as in Weibo's "科0".
        scheme: "none" takes any text as a tag.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: a line without a tag or with a malformed one, a token without its digit, a file without sentences
            or that is not UTF-8. Names file and line.
    """
    sentences, begins = [], True
    for number, line in numbered_lines(path):
        columns = re.split("[ \t]+", line.strip(" \t"))
        if not columns[0] or (begins and columns[0] == "-DOCSTART-"):
            begins = True
            continue
        where = f"{path}, line {number}"
        if len(columns) < 2:
            raise ValueError(f"{where} must have a token and a tag, parted by a space or a tab, got {brief(line)}")
        token, tag = columns[0], columns[-1]
        try:
            kind_of(tag, scheme)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        if segment_digits:
            token = _without_digit(token, where)
        if begins:
            sentences.append(TaggedSentence([], [], number))
            begins = False
        sentences[-1].tokens.append(token)
        sentences[-1].tags.append(tag)
    if not sentences:
        raise ValueError(f"{path} has no sentences")
    return sentences


def read_tagged_as(
    path: str, labels: list[str], segment_digits: bool = False, scheme: str | None = None
) -> list[TaggedSentence]:
    """`read_tagged`, in the scheme of a model's labels.

    Raises:
        ValueError: as there; or an entity type is not among the labels. Names file and line.
    """
    text, own = read_tagged(path, segment_digits, scheme), scheme or detect_scheme(labels)
    text = _in_one_scheme({"text": text}, {"text": path}, own)[0]["text"]
    kinds = {kind_of(label, scheme) for label in labels}
    for number, tag in _numbered_tags(text):
        if tag not in labels and kind_of(tag, scheme) not in kinds:
            known = ", ".join(sorted(kinds - {""}))
            raise ValueError(
                f"{path}, line {number}: {brief(tag)} is of a kind that the model does not have; it has {known}"
            )
    return text


def _warn_of_words(text: list[TaggedSentence], name: str) -> None:
    """Warns of tokens that a line of text, which is read character by character, never has."""
    tokens = [(token, number) for s in text for number, token in enumerate(s.tokens, s.line)]
    long = [(token, number) for token, number in tokens if len(token) > 1]
    if not long:
        return
    token, number = long[0]
    logger.warning(
        f"{name}, line {number}: {brief(token)} has {len(token)} characters, as have {len(long):,} of {len(tokens):,} "
        "tokens: text is tagged character by character, where none of these occurs. --token_level=word where tokens "
        "are words, --segment_digits where each ends with a digit of segmentation, as 科0"
    )


def _without_digit(token: str, where: str) -> str:
    if len(token) < 2 or token[-1] not in "0123456789":
        raise ValueError(f"{where}: with segment_digits a token must be text and one digit, as 科0, got {brief(token)}")
    return token[:-1]


# ------------------------------------------------------------------------------------------------------------ corpus


@dataclasses.dataclass
class TaggedCorpus:
    """Vocabularies, labels and encoded sentences.

    Attributes:
        vocab: of characters and of the lexicon's words; or of words that are the tokens.
        bigram_vocab: of bigrams; or of the forms of words, see `form_of`.
        labels: the tags in the order of their ids.
        lexicon: or `None`.
        splits: `"train"`, `"valid"` and perhaps `"test"` -> `TaggedSplit`.
        names: split -> its file.
        scheme: of the labels: "bio", "bioes", "bmes" or "none".
        level: of the tokens: "char" or "word".
        lines: split -> line of the first token of each sentence.
        embeddings: `"vocab"` and `"bigram_vocab"` -> initial embeddings, float32 `[symbols, dim]`, where there are
            vectors.
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

    @property
    def vocabs(self) -> list[Vocab]:
        """Vocabularies of items and of bigrams and, with a lexicon, that of its words."""
        return [self.vocab, self.bigram_vocab, *([lexicon_vocab(self.lexicon)] if self.lexicon else [])]

    @property
    def encoder(self) -> SentenceEncoder:
        return SentenceEncoder(self.vocab, self.bigram_vocab, self.lexicon, self.level)

    def fingerprint(self, split: str) -> str:
        """A SHA-256 that tells whether a split has changed."""
        digest = hashlib.sha256()
        for sentence, tags in zip(*self.splits[split], strict=True):
            for ids in ([sentence.n, len(sentence.ids)], sentence.ids, tags):
                digest.update(np.asarray(ids, "<i4").tobytes())
        return digest.hexdigest()


def lexicon_vocab(lexicon: Lexicon) -> Vocab:
    """The words of a lexicon as a vocabulary, whose file a run keeps."""
    vocab = Vocab()
    vocab.set_lines(lexicon.words, "lexicon")
    return vocab


def encoder_of(vocab: Vocab, bigram_vocab: Vocab, lexicon: Vocab | None = None, level: str = "char") -> SentenceEncoder:
    """The encoder of a run's vocabularies, see `TaggedCorpus.vocabs`; `level` is its tagger's `token_level`."""
    return SentenceEncoder(vocab, bigram_vocab, Lexicon(lexicon.symbols) if lexicon else None, level)


def read_corpus(
    config: TaggedConfig,
    vocabs: list[Vocab] | None = None,
    labels: list[str] | None = None,
    extend_vocab: bool = False,
) -> TaggedCorpus:
    """Reads and encodes tagged sentences. Symbols and entity types come from the training sentences.

    What only the other files have gets an id if it has a vector; without one it is unknown.

    Args:
        config: what to read.
        vocabs: see `TaggedCorpus.vocabs`, instead of new ones. The words of `config.lexicon`, if it is given, count
            more than those of a vocabulary; what no vocabulary has is the unknown symbol.
        extend_vocab: whether symbols of the training sentences that `vocabs` lack get ids behind theirs.
        labels: those of a model. They are kept, and with them their scheme, where they have all types of entities.

    Raises:
        ValueError: a file is missing, an entity type that the training sentences do not have, vectors of different
            widths, ...: names file and line, what was found and what is allowed.
        FileNotFoundError: a file does not exist.
    """
    texts, names = _read_splits(config)
    if config.token_level == "char":
        _warn_of_words(texts["train"], names["train"])
    if vocabs:
        return _read_with(config, texts, names, vocabs, labels or [], extend_vocab)
    lexicon = Lexicon.load(config.lexicon, config.skip_short_words) if config.lexicon else None
    texts, scheme = _in_one_scheme(texts, names, config.tag_scheme)
    labels = _make_labels(texts, names, scheme)
    if lexicon:
        _say_lexicon(config.lexicon, lexicon, texts["train"])
    vocab, bigram_vocab, embeddings = make_vocabs(config, texts, lexicon)
    corpus = TaggedCorpus(vocab, bigram_vocab, labels, lexicon, {}, names, scheme, embeddings, config.token_level)
    return _encoded(corpus, texts)


def _read_splits(config: TaggedConfig) -> tuple[dict, dict]:
    """`{split: sentences}` and `{split: name}`."""
    paths = {split: getattr(config, f"{split}_path") for split in ("train", "valid", "test")}
    if config.dataset == TOWNS:
        made = make_sentences(config.n_sentences)
        texts = {split: [TaggedSentence(*row, i) for i, row in enumerate(rows, 1)] for split, rows in made.items()}
        return texts, {split: f"towns, {split}" for split in made}
    for split in ("train", "valid"):
        if not paths[split]:
            raise ValueError(f"{split}_path must be given: a file with a token and a tag a line; or dataset=towns")
    names = {split: path for split, path in paths.items() if path}
    texts = {split: read_tagged(path, config.segment_digits, config.tag_scheme) for split, path in names.items()}
    return texts, names


def longest_in(config: TaggedConfig) -> int:
    """Tokens of the longest training sentence. Raises: as `read_corpus`."""
    texts, _ = _read_splits(dataclasses.replace(config, valid_path=config.train_path, test_path=None))
    return max(len(sentence.tokens) for sentence in texts["train"])


def _read_with(
    config: TaggedConfig, texts: dict, names: dict, vocabs: list[Vocab], known: list[str], extends: bool
) -> TaggedCorpus:
    """The corpus in vocabularies that are there already."""
    check_left_out(
        {name: getattr(config, name) for name in ("char_vectors", "bigram_vectors", "word_vectors")}, KNOWN_SYMBOLS
    )
    if config.min_freq != MIN_FREQ[config.token_level] and not extends:
        check_left_out({"min_freq": config.min_freq}, KNOWN_SYMBOLS)
    wanted = config.tag_scheme
    if not wanted and _kinds(_tags_of(*texts.values())) <= _kinds(known):
        wanted = detect_scheme(known)
    texts, scheme = _in_one_scheme(texts, names, wanted)
    labels = known if _tags_of(*texts.values()) <= set(known) else _make_labels(texts, names, scheme)
    vocab, bigram_vocab, *words = vocabs
    lexicon = Lexicon(words[0].symbols) if words else None
    if words and config.lexicon:
        lexicon = Lexicon.load(config.lexicon, config.skip_short_words)
    if extends:
        vocab, bigram_vocab = extend_vocabs(config, texts, lexicon, vocab, bigram_vocab)
    if lexicon:
        _say_lexicon(config.lexicon or "of the run", lexicon, texts["train"], vocab)
    corpus = TaggedCorpus(vocab, bigram_vocab, labels, lexicon, {}, names, scheme, level=config.token_level)
    return _encoded(corpus, texts)


def _say_lexicon(name: str, lexicon: Lexicon, text: list[TaggedSentence], vocab: Vocab | None = None) -> None:
    """Logs how many words of a lexicon are in the training sentences and, given a vocabulary, how many of these are not
    in that. Raises ParameterError where no sentence has one.
    """
    found = {match.word for sentence in text for match in lexicon.matches(sentence.tokens)}
    if not found:
        such = ", ".join(brief(word) for word in lexicon.words[:3])
        message = f"lexicon {name}: none of its {len(lexicon):,} words, such as {such}, is in the training sentences"
        raise ParameterError("lexicon", name, "a file of words of which the training sentences have some", message)
    unknown = sum(word not in vocab.ids for word in found) if vocab else 0
    rest = f"; {unknown:,} of these have no row in the vocabulary and become {vocab.unk}" if unknown else ""
    logger.info(f"lexicon {name}: {len(lexicon):,} words, {len(found):,} of them in the training sentences{rest}")


def _tags_of(*texts: list[TaggedSentence]) -> set[str]:
    return {tag for text in texts for sentence in text for tag in sentence.tags}


def _kinds(tags: Iterable[str]) -> set[str]:
    return {split_tag(tag)[1] for tag in tags}


def _encoded(corpus: TaggedCorpus, texts: dict) -> TaggedCorpus:
    """A corpus with its sentences."""
    encoder, ids = corpus.encoder, {label: i for i, label in enumerate(corpus.labels)}
    corpus.lines |= {split: [sentence.line for sentence in text] for split, text in texts.items()}
    for split, text in texts.items():
        encoded = [encoder.encode(sentence.tokens) for sentence in text]
        tags = [np.array([ids[tag] for tag in sentence.tags], np.int32) for sentence in text]
        corpus.splits[split] = TaggedSplit(encoded, tags)
    return corpus


# -------------------------------------------------------------------------------------------------------------- tags


def _in_one_scheme(texts: dict, names: dict, wanted: str | None) -> tuple[dict, str]:
    """`texts` in the scheme `wanted`, or all in that of the training sentences; and the scheme. Warns of broken tags.

    Raises:
        ValueError: a file mixes schemes or, without `wanted`, has another one than the training sentences.
    """
    if wanted == NONE:
        return texts, NONE
    schemes = {}
    for split, text in texts.items():
        schemes[split] = _scheme_of(text, names[split])
        if not wanted:
            schemes[split] = schemes["train"]
            _check_prefixes(text, names, split, schemes["train"])
    for split, text in texts.items():
        _warn_of_broken(text, names[split], schemes[split], bool(wanted))
    if not wanted:
        return texts, schemes["train"]
    converted = {
        split: [sentence._replace(tags=convert_tags(sentence.tags, wanted)) for sentence in text]
        for split, text in texts.items()
    }
    return converted, wanted


def _scheme_of(text: list[TaggedSentence], name: str) -> str:
    """`detect_scheme` of a file's tags, whose error names the lines."""
    first = {}
    for number, tag in _numbered_tags(text):
        first.setdefault(split_tag(tag)[0], (number, tag))
    try:
        return detect_scheme(tag for _, tag in first.values())
    except ValueError as error:
        raise ValueError(f"{name}, lines {first['I'][0]} and {first['M'][0]}: {error}") from error


def _check_prefixes(text: list[TaggedSentence], names: dict, split: str, scheme: str) -> None:
    for number, tag in _numbered_tags(text):
        if split_tag(tag)[0] not in f"O{SCHEMES[scheme]}":
            raise ValueError(
                f"{names[split]}, line {number}: {brief(tag)} is not of the scheme {scheme}, as {names['train']} is; "
                f"tag_scheme={scheme} converts all files to one scheme"
            )


def _numbered_tags(text: list[TaggedSentence]) -> Iterable[tuple[int, str]]:
    """Every tag with its line."""
    for sentence in text:
        yield from enumerate(sentence.tags, sentence.line)


def _warn_of_broken(text: list[TaggedSentence], name: str, scheme: str, converted: bool) -> None:
    broken = [(sentence, i) for sentence in text for i in broken_at(sentence.tags, scheme)]
    if not broken:
        return
    sentence, i = broken[0]
    done = "all tags are rewritten" if converted else "they are kept, and one that continues no entity begins one"
    logger.warning(
        f"{name}: {len(broken):,} tags break the scheme {scheme}, the first on line {sentence.line + i} "
        f"({brief(sentence.tags[i])}); {done}"
    )


def _make_labels(texts: dict, names: dict, scheme: str) -> list[str]:
    """The labels of the training sentences, entity types in alphabetical order. Other files may have no other type."""
    tags = {split: _tags_of(text) for split, text in texts.items()}
    kinds = sorted(tags["train"]) if scheme == NONE else sorted({split_tag(tag)[1] for tag in tags["train"] - {"O"}})
    has_outside = any("O" in found for found in tags.values())
    labels = kinds if scheme == NONE else all_labels(kinds, scheme, has_outside)
    for split, text in texts.items():
        unknown = tags[split].difference(labels)
        for number, tag in _numbered_tags(text) if unknown else ():
            if tag in unknown:
                raise ValueError(
                    f"{names[split]}, line {number}: {brief(tag)} is of a kind that {names['train']} does not have; "
                    f"it has {', '.join(kinds) or 'none'}"
                )
    return labels
