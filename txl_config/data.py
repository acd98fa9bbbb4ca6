"""Hyper-parameters of data: which files are read, and how text becomes ids."""

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
INFO_FILE = "corpus-info.json"  # in the folder of a prepared corpus: what the corpus is
COUNTED_LEVELS = ("word", "char", "byte")  # levels whose vocabulary comes from counts of tokens
LEVELS = (*COUNTED_LEVELS, "subword")
SUBWORD_TYPES = ("unigram", "bpe")
PAIR_DATASETS = ("text", "dates")
PAIR_LEVELS = ("word", "char", "subword")
TAGGED_DATASETS = ("text", "towns")
TAG_SCHEMES = ("bio", "bioes", "bmes", "none")
MIN_FREQ = {"char": 0, "word": 2}  # default for tagged tokens, by token_level
COLUMN = satisfies(lambda value: value != 0, "be 1 or more, or -1 for the last, -2 for the one before, ...")


@group
class TextConfig(Config):
    """The text and its tokens: arguments of `build_corpus`."""

    dataset: str | None = option(
        "The text: your own (text), Python's manual (pydoc), ...", one_of(DATASETS), default=None
    )
    data_path: list[str] | str | None = option(
        "UTF-8 file(s) of the text, or the folder of a paper's dataset.", not_empty, default=None
    )
    level: str = option("What a token of your own text is.", one_of(LEVELS), default="char")
    valid_fraction: float = option(
        "Fraction of your own text, at its end, that is held out for validation.", FRACTION, default=0.05
    )
    min_freq: int = option("Symbols of your own text that occur less often become <unk>.", at_least(0), default=0)
    max_size: int | None = option(
        "How many of the most frequent symbols of your own text to keep; others become <unk>.",
        at_least(1),
        default=None,
    )
    lower_case: bool = option("Convert your own text to lower case.", default=False)
    vocab_size: int | None = option("Size of a vocabulary of subwords; default: 8000.", SYMBOLS, default=None)
    subword_type: str = option("How SentencePiece makes subwords.", one_of(SUBWORD_TYPES), default="unigram")
    vocab_path: str | None = option(
        "File of the symbols, one a line, such as a run's vocab.txt; a SentencePiece .model; or a tokenizer.json. "
        "Default: count the symbols.",
        not_empty,
        default=None,
    )
    documents: bool | None = option(
        "End every document, a file, JSON line or row, with </s>. Default: where there is JSON or Parquet.",
        default=None,
    )
    text_field: str | None = option("Field of the text in JSON lines, arrays and Parquet; default: text.", default=None)
    raw_text: bool | None = option(
        "Read files without changes: carriage returns, byte order marks and, in files of other names than .jsonl, JSON "
        "are text. Default: no; yes for runs of earlier versions.",
        default=None,
    )
    skip_bad_lines: bool = option("Skip and count rows of JSON lines and Parquet that have no text.", default=False)
    cutoffs: Sequence[int] | None = option("First word of each softmax cluster, as 20000,40000.", RISING, default=None)
    num_shuffle: int = option("For lm1b: random orders of the sentences to write.", POSITIVE, default=1, flag=4)
    seed: int = option("For lm1b: seed of the random orders.", at_least(0, (1 << 32) - 1), default=123456)


@group
class PairFilesConfig(Config):
    """Columns of files of pairs, and lines to skip: arguments of `PairReader`."""

    source_column: int | None = option(
        "Column of the source in a file of pairs, counted from 1; default: 1, if there are at most three columns.",
        at_least(1),
        default=None,
    )
    target_column: int | None = option("Column of the target; default: 2.", at_least(1), default=None)
    skip_bad_lines: bool = option(
        "Skip and count pairs that are empty, too long, have other columns, or contain reserved words.", default=False
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        source, target = self.source_column or 1, self.target_column or 2
        if source == target:
            name = "target_column" if self.target_column else "source_column"
            raise ParameterError(name, source, "another column than the one of the other side")

    @property
    def columns(self) -> dict[str, int | None]:
        """`{option: column}`, counted from 1; `None` for a column that is not given."""
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
        "Fraction of the sources that is held out if there is no valid_path.", FRACTION, default=0.05
    )
    source_level: str = option(
        "What a token of a source is: a word between white space, a character, or a piece of a word.",
        one_of(PAIR_LEVELS),
        default="char",
    )
    target_level: str = option("What a token of a target is.", one_of(PAIR_LEVELS), default="char")
    source_symbols: str | None = option(
        "File of the source's symbols, one per line; default: the symbols in train_path.", not_empty, default=None
    )
    target_symbols: str | None = option("File of the target's symbols.", not_empty, default=None)
    vocab_size: int | None = option(
        "Size of each vocabulary of subwords; default: 8000, or fewer for a small text.", SYMBOLS, default=None
    )
    subword_type: str = option("How SentencePiece makes subwords.", one_of(SUBWORD_TYPES), default="unigram")
    share_vocab: bool = option("Use one vocabulary for both sides; share_embeddings needs this.", default=False)
    min_freq: int = option("Symbols that occur less often become <unk>.", at_least(0), default=0)
    max_size: int | None = option(
        "How many of the most frequent symbols of a side to keep; others become <unk>.", at_least(1), default=None
    )
    lower_case: bool = option("Convert the sources and, with share_vocab, the targets to lower case.", default=False)
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
    """Columns of a tagged file, and its comments: arguments of `read_tagged`."""

    token_column: int | None = option(
        "Column of the tokens: 1 is the first, -1 the last. Default: 1; 2 where column 1 numbers tokens.",
        COLUMN,
        default=None,
    )
    tag_column: int | None = option(
        "Column of the tags. Default: -1; required if column 1 numbers tokens.", COLUMN, default=None
    )
    comments: bool | None = option(
        "Whether lines that begin with # before the first token of a sentence are comments (True) or tokens (False). "
        "Default: comments, if their columns are not those of tokens.",
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
        "File of columns: a token and its tag; an empty line ends a sentence.", not_empty, default=None
    )
    valid_path: str | None = option(
        "As train_path, to validate on; default: valid_fraction of it.", not_empty, default=None
    )
    test_path: str | None = option("As train_path, to test on.", not_empty, default=None)
    valid_fraction: float = option(
        "Fraction of the sentences that is held out if there is no valid_path.", FRACTION, default=0.05
    )
    token_level: str = option(
        "What a token is: a character, or a word between white space.", one_of(TOKEN_LEVELS), default="char"
    )
    tag_scheme: str | None = option(
        "Scheme to convert the tags to; default: the scheme of the files, but bio for IOB1 and IO, bioes for BILOU. "
        "none: the tags do not mark entities, but for example parts of speech.",
        one_of(TAG_SCHEMES),
        default=None,
    )
    segment_digits: bool = option(
        "Remove the digit after every character, which marks segmentation in Weibo.", default=False
    )
    bigrams: bool = option(
        "Give the network the bigrams of characters, or the capitals and last letters of words.", default=True
    )
    min_freq: int | None = option(
        "Tokens of train_path that occur less often become <unk>; default: 0 for characters, 2 for words.",
        at_least(0),
        default=None,
    )
    lexicon: str | None = option(
        "File of words to match, one per line; jieba or towns: the words of that package or dataset.",
        not_empty,
        default=None,
    )
    skip_short_words: bool = option("Skip the words of a lexicon that have one character.", default=False)
    char_vectors: str | None = option(
        "File of initial vectors of characters: text of word2vec or GloVe, or word2vec's binary format; .gz, .zip.",
        not_empty,
        default=None,
    )
    bigram_vectors: str | None = option("File of initial vectors of bigrams.", not_empty, default=None)
    word_vectors: str | None = option(
        "File of initial vectors of the lexicon's words, or of the tokens at token_level=word.", not_empty, default=None
    )
    lowercase_vectors: bool = option(
        "For a symbol without a vector, use the vector of its lower-case form.", default=False
    )
    unit_vectors: bool = option("Scale the initial embeddings to length 1.", default=False)
    n_sentences: int = option("For towns: sentences to make for training.", at_least(1, 1_000_000), default=4000)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_freq is None:
            object.__setattr__(self, "min_freq", MIN_FREQ[self.token_level])
        if self.dataset == "towns":
            options_of_files = ("train_path", "valid_path", "test_path", "segment_digits", *ColumnsConfig.names())
            check_left_out(
                {name: getattr(self, name) for name in options_of_files}, "dataset=towns makes its sentences itself"
            )
            if self.token_level != "char":
                raise ParameterError("token_level", self.token_level, "char for dataset=towns")
        if not (self.char_vectors or self.bigram_vectors or self.word_vectors):
            check_left_out({"lowercase_vectors": self.lowercase_vectors}, "there are no vectors")
        if self.valid_fraction != TaggedConfig.valid_fraction:
            source = "valid_path" if self.valid_path else "dataset=towns" if self.dataset == "towns" else None
            if source:
                check_left_out({"valid_fraction": self.valid_fraction}, f"{source} gives the sentences to validate on")
        if self.token_level == "char":
            if self.word_vectors and not self.lexicon:
                message = "word_vectors are for the words of a lexicon: give lexicon, too"
                raise ParameterError("word_vectors", self.word_vectors, "left out without lexicon", message)
            if not self.lexicon:
                check_left_out({"skip_short_words": self.skip_short_words}, "it is for the words of a lexicon")
            if not self.bigrams:
                check_left_out({"bigram_vectors": self.bigram_vectors}, "there are no bigrams")
            return
        not_for_words = {
            "segment_digits": "words have no digit of segmentation",
            "lexicon": "its words are found among characters",
            "skip_short_words": "it is for the words of a lexicon",
            "char_vectors": "the words have word_vectors",
            "bigram_vectors": "words have no bigrams",
        }
        for name, why in not_for_words.items():
            check_left_out({name: getattr(self, name)}, f"with token_level=word, {why}")
