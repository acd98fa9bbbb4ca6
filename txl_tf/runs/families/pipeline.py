"""Text in, result out, with a run of any family:

```python
tagger = txl_tf.pipeline("runs/tener_resume")
tagger("高勇，男，中国国籍").entities              # a string: its result; a list: a list
for found in tagger.tag_lines(open("text.txt")):  # any iterator of lines: results as they come, in bounded memory
    print(found.text, found.entities)
```
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import keras

from txl_tf.config import ScoringConfig, SearchConfig, SentenceConfig, TaggedConfig, at_least
from txl_tf.config.checks import is_integer
from txl_tf.data.lines import LineError, answers, in_blocks, sentence_of
from txl_tf.data.tagged.lexicon import Lexicon
from txl_tf.data.tagged.sentence_ends import LineSizes
from txl_tf.data.tagged.sentences import encoder_of, lexicon_vocab, line_sizes_in
from txl_tf.data.vocabulary import Vocab
from txl_tf.errors import ParameterError
from txl_tf.language.sampling import SAMPLING
from txl_tf.language.text_generator import TextGenerator
from txl_tf.runs.folder import RunFolder
from txl_tf.runs.scoring import LineScore, Scorer
from txl_tf.schema import check_names, keywords_of, known_names
from txl_tf.taggers.text_tagger import TaggedText, TextTagger
from txl_tf.vanilla.translator import Translation, Translator, assumed_length

logger = logging.getLogger("txl_tf")

POOL = 50  # batches of sentences to tag that are read and sorted by length together
Lines = Iterable[str | bytes | None]  # see `txl_tf.data.lines`


def pipeline(model_dir: str | os.PathLike, ckpt_path: str | None = None, **changes: Any) -> Any:
    """What turns text into results with a run: `score_lines` and `generate_lines` of a language model,
    `translate_lines` of an encoder-decoder, `tag_lines` of a tagger.

    Args:
        model_dir, ckpt_path, **changes: see `load_run`. Of a tagger also those of `TaggingPipeline.open`: `lexicon`,
            `skip_short_words`, and `max_seq_len`, the most tokens that are read at a time.

    Returns:
        The `Pipeline` of the run's family. Called, it gives the result of a string, a list of those of a list, and an
        iterator over those of any other iterable: of a language model the texts that follow prompts, else translations
        or what is tagged. Its methods take lists and iterators, and yield results in the order of the lines as soon as
        they are there. `strict=False` has them yield a `LineError` in the place of a line without result, which is else
        raised.

    Raises: as `load_run`.
    """
    folder = RunFolder(model_dir)
    return folder.with_checkpoint(ckpt_path, lambda path: folder.family.pipeline.open(folder, path, **changes))


class Pipeline:
    """The base of all pipelines. A subclass says in `lines` how it answers lines.

    Args:
        model: of a run.
        *vocabs: of the run.
        checkpoint: what the weights are, for messages.
    """

    def __init__(self, model: keras.Model, *vocabs: Vocab, checkpoint: str | None = None):
        self.model, self.vocabs, self.checkpoint = model, vocabs, checkpoint

    @classmethod
    def open(cls, folder: RunFolder, path: str, **changes) -> Pipeline:
        """The pipeline of a run with the weights of its checkpoint at `path`; `changes` are those of `load_run`."""
        return cls(folder.load_model(path, **changes), *folder.load_vocabs(), checkpoint=folder.name_of(path))

    def lines(self, lines: Lines, **options) -> Iterator:
        raise NotImplementedError(f"{type(self).__name__}.lines")

    def __call__(self, lines: str | bytes | Lines, **options) -> Any:
        if isinstance(lines, (str, bytes)):
            (answer,) = self.lines([lines], **options)
            return answer
        found = self.lines(lines, **options)
        return list(found) if isinstance(lines, (list, tuple)) else found


class LanguagePipeline(Pipeline):
    """Texts that follow prompts, and scores of lines."""

    _WRITING = ["name", "strict", *keywords_of(TextGenerator)[2:], *SAMPLING]  # without lm and vocab

    def generate_lines(
        self, prompts: Lines, max_new_tokens: int = 200, *, name: str = "prompts", strict: bool = True, **options
    ) -> Iterator[str | list[str] | LineError]:
        """The text that follows each prompt, without the prompt; with `num_return_sequences` above 1, a list of texts.

        Args:
            prompts: lines; strings in a list may have newlines within.
            max_new_tokens: most tokens of a text.
            name: what messages call the prompts.
            strict: see `pipeline`.
            **options: of `TextGenerator`, such as `temperature`, `top_p`, `seed`, `stop_strings`, `batch_size`.
        """
        check_names("generate_lines", options, self._WRITING)
        writer = TextGenerator(self.model, self.vocabs[0], max_new_tokens, **options)
        found = writer.generate_lines(prompts, name, strict)
        return (_one_of_one(texts if isinstance(texts, LineError) else texts[1]) for texts in found)

    lines = generate_lines

    def generate_text(self, prompts: str | bytes | Lines, max_new_tokens: int = 200, **options) -> Any:
        """The text that follows a prompt; of a list or an iterator those that follow each, see `generate_lines`."""
        check_names("generate_text", options, self._WRITING)
        return self(prompts, max_new_tokens=max_new_tokens, **options)

    def score_lines(
        self, lines: Lines, name: str = "text", strict: bool = True, **options
    ) -> Iterator[LineScore | LineError]:
        """How likely each line is, see `txl_tf.runs.scoring.score_lines`."""
        check_names("score_lines", options, ["name", "strict", *ScoringConfig.names()])
        scorer = self._scorer(ScoringConfig(**options))
        return (score for scores in scorer.score(in_blocks(lines), name, strict) for score in scores)

    @functools.cached_property
    def _scorer(self):
        """A `Scorer` by its config, once: it has graphs."""
        return functools.lru_cache(maxsize=8)(lambda config: Scorer(self.model, self.vocabs[0], config))


class TranslationPipeline(Pipeline):
    """Translations of lines."""

    _has_said = False  # what is assumed of the lengths of targets

    def translate_lines(
        self, lines: Lines, name: str = "source", strict: bool = True, batch_size: int = 64, **options
    ) -> Iterator[Translation | list[Translation] | LineError]:
        """The best translation of each line, a `Translation`; with `n_best` above 1, a list of so many.

        It is the pair of a text and its score. Its attributes `ended` and `unknown` say whether it ended within the
        most symbols that it may have, and how many symbols of its source are unknown.

        Args:
            lines: the sources.
            name: what messages call them.
            strict: see `pipeline`.
            batch_size: sources to translate at a time.
            **options: of `SearchConfig`, such as `beam_size`.
        """
        check_names("translate_lines", options, ["name", "strict", "batch_size", *SearchConfig.names()])
        search = SearchConfig(**options)
        assumed = assumed_length(search, self.model)
        if assumed and not self._has_said:
            logger.warning("%s", assumed)
            self._has_said = True
        translator = Translator(self.model, *self.vocabs, search, batch_size)
        return map(_one_of_one, translator.translate_lines(lines, name, strict))

    lines = translate_lines


def _one_of_one(found: list | LineError) -> Any:
    return found[0] if isinstance(found, list) and len(found) == 1 else found


class TaggedLine(NamedTuple):
    """What was found in a line of text.

    Attributes:
        text: the line.
        tokens: what it is made of.
        tags: one for every token.
        entities: a dictionary each: `kind`, `start`, `end` (in characters, exclusive), `text`, and `prob`, the
            probability that its tokens have just these tags.
    """

    text: str
    tokens: list[str]
    tags: list[str]
    entities: list[dict]

    @classmethod
    def of(cls, tagger: TextTagger, text: str, tokens: list[str], found: TaggedText) -> TaggedLine:
        """What `tagger` found in the tokens of a text."""
        return cls(text, list(tokens), found.tags, tagger.describe(text, found, tokens)["entities"])


class TaggingPipeline(Pipeline):
    """Named entities in lines.

    Args:
        model, *vocabs, checkpoint: see `Pipeline`.
        window: most tokens that the network reads at a time, see `TextTagger`.
        sizes: how long the training sentences are, where that is known; the first longer line is a warning.
        splits: whether lines of more sentences than in training are cut by default, see `TextTagger.pieces`.
    """

    def __init__(
        self,
        model: keras.Model,
        *vocabs: Vocab,
        checkpoint: str | None = None,
        window: int | None = None,
        sizes: LineSizes | None = None,
        splits: bool = True,
    ):
        super().__init__(model, *vocabs, checkpoint=checkpoint)
        self.window, self.sizes, self.splits = window, sizes, splits
        self._has_warned = self._has_cut = False

    @classmethod
    def open(
        cls,
        folder: RunFolder,
        path: str,
        *,
        lexicon: str | os.PathLike | Lexicon | Iterable[str] | None = None,
        skip_short_words: bool | None = None,
        max_seq_len: int | None = None,
        **changes,
    ) -> TaggingPipeline:
        """See `Pipeline.open`.

        Args:
            lexicon: of FLAT, words to find in place of the run's: a file of them, "jieba", or the words. Those that the
                vocabulary has no row for become its unknown symbol; a message says how many.
            skip_short_words: whether to leave out words of one character; by default as the run does.
            max_seq_len: most tokens that are read at a time; a longer line is read in windows, and lines are cut at the
                ends of sentences only if `tag_lines` is told so. By default as many as the longest training sentence
                has, or the run's own, where that is less.

        Raises:
            ParameterError: `lexicon` is given for a model without one; `max_seq_len` is out of its range.
            ValueError, FileNotFoundError: see `Lexicon.load` and `load_run`.
        """
        config, vocabs = folder.read_config(), folder.load_vocabs()
        most, sizes = config["model"].get("max_seq_len", SentenceConfig.max_seq_len), line_sizes(folder)
        if max_seq_len is not None and (not is_integer(max_seq_len) or max_seq_len > most or max_seq_len < 1):
            changes["max_seq_len"] = max_seq_len  # which is checked there
        vocabs = with_lexicon(folder, vocabs, lexicon, skip_short_words)
        model = folder.load_model(path, **changes)
        window, splits = max_seq_len or min(sizes.longest if sizes else most, most), max_seq_len is None
        return cls(model, *vocabs, checkpoint=folder.name_of(path), window=window, sizes=sizes, splits=splits)

    @known_names
    def tag_lines(
        self,
        lines: Lines,
        name: str = "text",
        strict: bool = True,
        batch_size: int = 64,
        numbers: Iterable[int] | None = None,
        split_sentences: bool | None = None,
    ) -> Iterator[TaggedLine | LineError]:
        """The tags and the entities of each line. An empty one has none.

        Args:
            lines: a sentence each.
            name: what messages call them.
            strict: see `pipeline`.
            batch_size: sentences to tag at a time.
            numbers: of the lines, for messages; by default they are counted from 1.
            split_sentences: whether to cut lines at the ends of sentences, see `split_at_ends`, and to tag each by
                itself. By default, lines of more sentences than those of the training are cut, see `TextTagger.pieces`,
                unless the pipeline was opened with `max_seq_len`.
        """
        at_least(1)("batch_size", batch_size)
        tagger = self.tagger
        tagger.batch_size = batch_size
        numbers, of_lines = itertools.tee(itertools.count(1) if numbers is None else numbers)

        def encode(line):
            number, text = next(of_lines), sentence_of(line)
            tokens = tagger.split(text)
            self.warn_of_length(tokens, f"{name}, line {number}", split_sentences)
            return text, tokens

        def answer(sentences):
            texts, tokens = zip(*sentences, strict=True) if sentences else ([], [])
            found = tagger.tag_in_sentences(tokens, split=split_sentences)
            return map(functools.partial(TaggedLine.of, tagger), texts, tokens, found)

        return answers(lines, encode, answer, name, strict, POOL * batch_size, numbers)

    lines = tag_lines

    def warn_of_length(self, tokens: Sequence[str], where: str, split_sentences: bool | None = None) -> None:
        """Says once that a line is cut which need not be; warns once of a sentence that is longer than all that the
        model was trained on.
        """
        if self.sizes is None or (self._has_warned and self._has_cut):
            return
        pieces, longest = self.tagger.pieces(tokens, split_sentences), self.sizes.longest
        if split_sentences is None and len(pieces) > 1 and not self._has_cut:
            self._has_cut = True
            logger.warning(
                f"{where} has {len(self.tagger.sentences(tokens)):,} sentences, and 99% of the training lines have "
                f"{self.sizes.most:,} or fewer: such lines are cut at the ends of sentences. split_sentences=False "
                "reads them as a whole. Further ones are not named"
            )
        n = max(map(len, pieces), default=0)
        if self._has_warned or n <= longest:
            return
        self._has_warned = True
        reads = "at once" if n <= self.tagger.most else f"in windows of {self.tagger.most:,}"
        ways = "max_seq_len sets the window" if len(pieces) > 1 or split_sentences else (
            "split_sentences tags each sentence of a line by itself, max_seq_len sets the window"
        )  # fmt: skip
        logger.warning(
            f"{where} has a sentence of {n:,} tokens, the longest training sentence has {longest:,}: it is read "
            f"{reads}, and more entities may be wrong than usual. {ways}. Further ones are not named"
        )

    @functools.cached_property
    def tagger(self) -> TextTagger:
        sizes = self.sizes if self.splits else None
        return TextTagger(self.model, encoder_of(*self.vocabs), window=self.window, sizes=sizes)


def line_sizes(folder: RunFolder) -> LineSizes | None:
    """How long the training sentences of a tagger's run are; `None`, and a message, where nothing says it.

    Runs of earlier versions do not record it: it is looked up in the file that they were trained on.
    """
    config = folder.read_config()
    training = config.get("training", {})
    recorded = [training.get(name) for name in ("longest_sentence", "usual_sentences", "most_sentences")]
    if all(recorded):
        return LineSizes(*recorded)
    data, model = config["data"], config["model"]
    name = data.get("train_path") or data.get("dataset")
    try:
        sizes = line_sizes_in(TaggedConfig(**data))
    except (ValueError, OSError):
        if recorded[0]:
            return LineSizes(recorded[0])
        most = model.get("max_seq_len", SentenceConfig.max_seq_len)
        logger.warning(
            f"{folder} does not record its longest training sentence, and {name} cannot be read: "
            f"{most} tokens, its max_seq_len, are assumed"
        )
        return None
    if not recorded[0]:
        longest = f"in {name} it has {sizes.longest:,} tokens"
        logger.info(f"{folder} does not record its longest training sentence: {longest}")
    return sizes


def with_lexicon(
    folder: RunFolder,
    vocabs: list[Vocab],
    given: str | os.PathLike | Lexicon | Iterable[str] | None = None,
    skip_short_words: bool | None = None,
) -> list[Vocab]:
    """The vocabularies of a run, with other words to find where they are `given`. Says how many the model knows.

    Args: see `TaggingPipeline.open`. Raises: as there.
    """
    if given is None and skip_short_words is None:
        return vocabs
    if len(vocabs) < 3:
        family = folder.family.name
        message = f"lexicon must be left out: the model of {folder}, of the family {family}, takes no words"
        raise ParameterError("lexicon", given, "left out", message)
    if given is None:
        raise ParameterError("skip_short_words", skip_short_words, "left out without a lexicon")
    if skip_short_words is None:
        skip_short_words = folder.read_config()["data"].get("skip_short_words", False)
    is_file = isinstance(given, (str, os.PathLike))
    name = os.fspath(given) if is_file else "that is given"
    lexicon = Lexicon.load(name, skip_short_words) if is_file else _as_lexicon(given, skip_short_words)
    known = sum(word in vocabs[0].ids for word in lexicon.words)
    rest = f"; the others become {vocabs[0].unk} where they are found" if known < len(lexicon) else ""
    logger.info(f"lexicon {name}: {len(lexicon):,} words, {known:,} of them have a row in the vocabulary{rest}")
    return [*vocabs[:2], lexicon_vocab(lexicon)]


def _as_lexicon(words: Lexicon | Iterable[str], skip_short_words: bool) -> Lexicon:
    words = list(getattr(words, "words", words))
    return Lexicon([word for word in words if len(word) > 1] if skip_short_words else words)
