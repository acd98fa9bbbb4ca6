"""Data: what is read, and how it becomes ids."""

from __future__ import annotations

from collections.abc import Sequence

from txl_config.checks import (
    FRACTION,
    POSITIVE,
    RISING,
    SYMBOLS,
    Config,
    at_least,
    group,
    not_empty,
    one_of,
    option,
    satisfies,
)
from txl_config.errors import ParameterError, named
from txl_config.models import TOKEN_LEVELS
from txl_config.schema import check_left_out

DATASETS = ("pydoc", "text", "enwik8", "text8", "ptb", "wt2", "wt103", "lm1b")
COUNTED_LEVELS = ("word", "char", "byte")  # vocabularies that are counted
LEVELS = (*COUNTED_LEVELS, "subword")
SUBWORD_TYPES = ("unigram", "bpe")
PAIR_DATASETS = ("text", "dates")
PAIR_LEVELS = ("word", "char", "subword")
TAGGED_DATASETS = ("text", "towns")
TAG_SCHEMES = ("bio", "bioes", "bmes", "none")
MIN_FREQ = {"char": 0, "word": 2}  # of tagged tokens, by token_level
COLUMN = satisfies(lambda value: value != 0, "be 1 or more, or -1 for the last, -2 for the one before, ...")


@group
class TextConfig(Config):
    """The text and its tokens: arguments of `build_corpus`."""

    dataset: str | None = option(
        "The text: your own (text), Python's manual (pydoc), ...", one_of(DATASETS), default=None
    )
    data_path: list[str] | str | None = option(
        "Its UTF-8 file(s), or the folder of a paper's dataset.", not_empty, default=None
    )
    level: str = option("What a token of your own text is.", one_of(LEVELS), default="char")
    valid_fraction: float = option(
        "Share of your own text, at its end, held out for validation.", FRACTION, default=0.05
    )
    min_freq: int = option("Symbols of your own text that are rarer become <unk>.", at_least(0), default=0)
    max_size: int | None = option(
        "Most frequent symbols of your own text to keep; others are <unk>.", at_least(1), default=None
    )
    lower_case: bool = option("Lower-case your own text.", default=False)
    vocab_size: int | None = option("Pieces of a vocabulary of subwords; default: 8000.", SYMBOLS, default=None)
    subword_type: str = option("How SentencePiece makes subwords.", one_of(SUBWORD_TYPES), default="unigram")
    vocab_path: str | None = option(
        "File of the symbols, one a line, such as a run's vocab.txt, or a SentencePiece .model; default: count.",
        not_empty,
        default=None,
    )
    documents: bool | None = option(
        "End every document, a file, JSON line or row, with </s>. Default: where there is JSON or Parquet.",
        default=None,
    )
    text_field: str | None = option("Field of the text in JSON lines, arrays and Parquet; default: text.", default=None)
    raw_text: bool | None = option(
        "Read files as they are: carriage returns, byte order marks and, in files of other names than .jsonl, JSON are "
        "text. Default: no; of runs of earlier versions yes.",
        default=None,
    )
    skip_bad_lines: bool = option("Leave out and count rows of JSON lines and Parquet without a text.", default=False)
    cutoffs: Sequence[int] | None = option("First word of each softmax cluster, as 20000,40000.", RISING, default=None)
    num_shuffle: int = option("For lm1b: random orders of the sentences to write.", POSITIVE, default=1, flag=4)
    seed: int = option("For lm1b: seed of the random orders.", at_least(0, (1 << 32) - 1), default=123456)


@group
class PairFilesConfig(Config):
    """How files of pairs are read: arguments of `PairReader`."""

    source_column: int | None = option(
        "Column of the source in one file of pairs, from 1; default: 1, of at most three columns.",
        at_least(1),
        default=None,
    )
    target_column: int | None = option("Column of the target; default: 2.", at_least(1), default=None)
    skip_bad_lines: bool = option(
        "Leave out and count pairs that are empty, too long, of other columns, or hold reserved words.", default=False
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        source, target = self.source_column or 1, self.target_column or 2
        if source == target:
            name = "target_column" if self.target_column else "source_column"
            raise ParameterError(name, source, "another column than that of the other side")

    @property
    def columns(self) -> dict[str, int | None]:
        """The columns as they are given, by name."""
        return {"source_column": self.source_column, "target_column": self.target_column}


@group
class PairsConfig(PairFilesConfig):
    """The pairs of lines and their tokens: arguments of `read_pairs`."""

    dataset: str | None = option(
        "The pairs: your own (text), or made-up dates (dates).", one_of(PAIR_DATASETS), default=None
    )
    train_path: list[str] | str | None = option(
        "A file of source<TAB>target lines, or two files: SOURCE,TARGET.", not_empty, default=None
    )
    valid_path: list[str] | str | None = option(
        "As train_path, to validate on; default: valid_fraction of it.", not_empty, default=None
    )
    test_path: list[str] | str | None = option("As train_path, to test on.", not_empty, default=None)
    valid_fraction: float = option(
        "Share of the sources held out where there is no valid_path.", FRACTION, default=0.05
    )
    source_level: str = option(
        "What a token of a source is: a word between white space, a character, or a piece of a word.",
        one_of(PAIR_LEVELS),
        default="char",
    )
    target_level: str = option("What a token of a target is.", one_of(PAIR_LEVELS), default="char")
    source_symbols: str | None = option(
        "File of the source's symbols, one a line; default: those of train_path.", not_empty, default=None
    )
    target_symbols: str | None = option("File of the target's symbols.", not_empty, default=None)
    vocab_size: int | None = option(
        "Pieces of each vocabulary of subwords; default: 8000, of a small text fewer.", SYMBOLS, default=None
    )
    subword_type: str = option("How SentencePiece makes subwords.", one_of(SUBWORD_TYPES), default="unigram")
    share_vocab: bool = option("One vocabulary for both sides, as share_embeddings needs it.", default=False)
    min_freq: int = option("Symbols that are rarer become <unk>.", at_least(0), default=0)
    max_size: int | None = option(
        "Most frequent symbols of a side to keep; others are <unk>.", at_least(1), default=None
    )
    lower_case: bool = option("Lower-case the sources and, with share_vocab, the targets too.", default=False)
    n_pairs: int = option("For dates: pairs to make for training.", at_least(1, 1_000_000), default=20000)

    def __post_init__(self) -> None:
        super().__post_init__()
        source = (self.source_level, self.source_symbols)
        target = (self.target_level, self.target_symbols)
        if self.share_vocab and source != target:
            message = (
                f"share_vocab needs the same level and symbols on both sides, got {named(source)} and {named(target)}"
            )
            raise ParameterError("share_vocab", True, "False for sides of different levels or symbols", message)
        levels = (self.source_level, self.target_level)
        if "subword" not in levels:
            check_left_out({"vocab_size": self.vocab_size}, "without subwords, max_size limits the vocabulary")
        elif levels == ("subword", "subword"):
            counted = {"min_freq": self.min_freq, "max_size": self.max_size}
            check_left_out(counted, "with subwords, vocab_size sets the size of the vocabulary")
        if self.source_level == "subword":
            check_left_out({"lower_case": self.lower_case}, "subwords keep capitals")
        if self.dataset == "dates":
            check_left_out({**self.columns, "skip_bad_lines": self.skip_bad_lines}, "dates are not read from a file")


@group
class ColumnsConfig(Config):
    """What the columns of a tagged file hold: arguments of `read_tagged`."""

    token_column: int | None = option(
        "Column of the tokens: 1 is the first, -1 the last. Default: 1; 2 where column 1 numbers tokens.",
        COLUMN,
        default=None,
    )
    tag_column: int | None = option(
        "Column of the tags. Default: -1; must be given where column 1 numbers tokens.", COLUMN, default=None
    )
    comments: bool | None = option(
        "Lines that begin with # before the first token of a sentence: comments (True) or tokens (False). Default: "
        "comments where they are no tokens by their columns.",
        default=None,
    )


@group
class TaggedConfig(ColumnsConfig):
    """The tagged sentences and their ids: arguments of `read_corpus`."""

    dataset: str | None = option(
        "The sentences: your own (text), or made-up ones of people and towns (towns).",
        one_of(TAGGED_DATASETS),
        default=None,
    )
    train_path: str | None = option(
        "File of columns: a token, its tag; an empty line ends a sentence.", not_empty, default=None
    )
    valid_path: str | None = option(
        "As train_path, to validate on; default: valid_fraction of it.", not_empty, default=None
    )
    test_path: str | None = option("As train_path, to test on.", not_empty, default=None)
    valid_fraction: float = option(
        "Share of the sentences held out where there is no valid_path.", FRACTION, default=0.05
    )
    token_level: str = option(
        "What a token is: a character, or a word between white space.", one_of(TOKEN_LEVELS), default="char"
    )
    tag_scheme: str | None = option(
        "Scheme to convert the tags to; default: that of the files, but bio for IOB1 and IO, bioes for BILOU. none: "
        "tags are no entities, but parts of speech.",
        one_of(TAG_SCHEMES),
        default=None,
    )
    segment_digits: bool = option("Cut the digit off every character: Weibo's mark of segmentation.", default=False)
    bigrams: bool = option(
        "Give the network the bigrams of characters; of words, capital and last letters.", default=True
    )
    min_freq: int | None = option(
        "Tokens of train_path that are rarer become <unk>; default: 0, of words 2.", at_least(0), default=None
    )
    lexicon: str | None = option(
        "File of words to match, one a line; jieba, towns: of that package or dataset.", not_empty, default=None
    )
    skip_short_words: bool = option("Leave out a lexicon's words of one character.", default=False)
    char_vectors: str | None = option(
        "Vectors of characters to start from: word2vec's or GloVe's text, or word2vec's binary format; .gz, .zip.",
        not_empty,
        default=None,
    )
    bigram_vectors: str | None = option("Vectors of bigrams.", not_empty, default=None)
    word_vectors: str | None = option(
        "Vectors of the lexicon's words; or of words that are the tokens.", not_empty, default=None
    )
    lowercase_vectors: bool = option(
        "Take the vector of its lower-case form for a symbol without a vector.", default=False
    )
    unit_vectors: bool = option("Scale the embeddings to length 1 at the start.", default=False)
    n_sentences: int = option("For towns: sentences to make for training.", at_least(1, 1_000_000), default=4000)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_freq is None:
            object.__setattr__(self, "min_freq", MIN_FREQ[self.token_level])
        if self.dataset == "towns":
            of_files = ("train_path", "valid_path", "test_path", "segment_digits", *ColumnsConfig.names())
            check_left_out({name: getattr(self, name) for name in of_files}, "dataset=towns makes its sentences itself")
            if self.token_level != "char":
                raise ParameterError("token_level", self.token_level, "char for dataset=towns")
        if not (self.char_vectors or self.bigram_vectors or self.word_vectors):
            check_left_out({"lowercase_vectors": self.lowercase_vectors}, "there are no vectors")
        if self.valid_fraction != TaggedConfig.valid_fraction:
            own = "valid_path" if self.valid_path else "dataset=towns" if self.dataset == "towns" else None
            if own:
                check_left_out({"valid_fraction": self.valid_fraction}, f"{own} gives the sentences to validate on")
        if self.token_level == "char":
            if self.word_vectors and not self.lexicon:
                message = "word_vectors are for the words of a lexicon: give lexicon, too"
                raise ParameterError("word_vectors", self.word_vectors, "left out without lexicon", message)
            if not self.lexicon:
                check_left_out({"skip_short_words": self.skip_short_words}, "it is about the words of a lexicon")
            if not self.bigrams:
                check_left_out({"bigram_vectors": self.bigram_vectors}, "there are no bigrams")
            return
        not_of_words = {
            "segment_digits": "a word has no digit of segmentation",
            "lexicon": "its words are found among characters",
            "char_vectors": "word_vectors are those of the words",
            "bigram_vectors": "words have no bigrams",
        }
        for name, why in not_of_words.items():
            check_left_out({name: getattr(self, name)}, f"with token_level=word, {why}")
