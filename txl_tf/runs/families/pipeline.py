"""Pipelines, which turn text into results with a run of any family:

```python
tagger = txl_tf.pipeline("runs/tener_resume")
tagger("高勇，男，中国国籍").entities              # a string gives a result, a list gives a list of results
for found in tagger.tag_lines(open("text.txt")):  # any iterator of lines: one result at a time, in bounded memory
    print(found.text, found.entities)
```
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import keras

from txl_tf.calls import checked_call, known_names
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
from txl_tf.runs.ensemble import load_model, members_of
from txl_tf.runs.folder import RunFolder
from txl_tf.runs.scoring import LineScore, Scorer
from txl_tf.schema import check_names, check_type, keywords_of
from txl_tf.taggers.text_tagger import TaggedText, TextTagger
from txl_tf.vanilla.translator import Translation, Translator, assumed_length

logger = logging.getLogger("txl_tf")

POOL = 50  # number of batches of lines that are read at a time, and sorted by length
Lines = Iterable[str | bytes | None]  # `None` of an iterator requests the results so far, see `in_blocks`


@checked_call
def pipeline(model_dir: str | os.PathLike, ckpt_path: str | os.PathLike | None = None, **changes: Any) -> Any:
    """Opens a run as a pipeline, which turns text into results.

    Its methods are `generate_lines` and `score_lines` of a language model, `translate_lines` of an encoder-decoder, and
    `tag_lines` of a tagger. They take a list or an iterator of lines, and yield results in the order of the lines as
    soon as they are computed. A line without a result raises an error. With `strict=False`, the methods yield a
    `LineError` in its place.

    A pipeline can be called, too: with a string it returns a result, with a list a list of results, and with any other
    iterable an iterator of results. These are texts that follow prompts, translations, or tagged lines.

    Args:
        model_dir, ckpt_path, **changes: see `load_run`. A tagger also takes the arguments of `TaggingPipeline.open`:
            `lexicon`, `skip_short_words`, and `max_seq_len`, the most tokens that are read at a time. An
            encoder-decoder also takes `ensemble`, see `TranslationPipeline.open`.

    Returns:
        The `Pipeline` of the family of the run.

    Raises: as `load_run`.
    """
    folder = RunFolder(model_dir)
    return folder.with_checkpoint(ckpt_path, lambda path: folder.family.pipeline.open(folder, path, **changes))


class Pipeline:
    """The base of all pipelines. A subclass defines `lines`, which answers lines of text.

    Args:
        model: model of a run.
        *vocabs: its vocabularies.
        checkpoint: name of the checkpoint in messages.
    """

    def __init__(self, model: keras.Model, *vocabs: Vocab, checkpoint: str | None = None):
        self.model: Any = model
        self.vocabs = vocabs
        self.checkpoint = checkpoint

    def __getstate__(self) -> dict[str, Any]:
        """For `copy` and `pickle`: the attributes without those that contain graphs, which are made when needed."""
        return {name: value for name, value in vars(self).items() if name not in ("_scorer", "tagger")}

    @classmethod
    def open(cls, folder: RunFolder, path: str, **changes: Any) -> Pipeline:
        """Makes the pipeline of a run.

        Args:
            folder: folder of the run.
            path: path of a checkpoint.
            **changes: see `load_run`.
        """
        return cls(folder.load_model(path, **changes), *folder.load_vocabs(), checkpoint=folder.name_of(path))

    def lines(self, lines: Lines, *arguments: Any, **options: Any) -> Iterator[Any]:
        """Yields the result of each line, in the order of the lines."""
        raise NotImplementedError(f"{type(self).__name__}.lines")

    def __call__(self, lines: str | bytes | Lines, **options: Any) -> Any:
        if isinstance(lines, (str, bytes)):
            (answer,) = self.lines([lines], **options)
            return answer
        answers = self.lines(lines, **options)
        return list(answers) if isinstance(lines, (list, tuple)) else answers


class LanguagePipeline(Pipeline):
    """The pipeline of a language model: texts that follow prompts, and scores of lines."""

    # Options of `generate_lines`: its own, all arguments of `TextGenerator` except `lm` and `vocab`, and of sampling.
    _GENERATION_OPTIONS = ["name", "strict", *keywords_of(TextGenerator)[2:], *SAMPLING]

    def generate_lines(
        self, prompts: Lines, max_new_tokens: int = 200, *, name: str = "prompts", strict: bool = True, **options: Any
    ) -> Iterator[str | list[str] | LineError]:
        """Generates the text that follows each prompt.

        Args:
            prompts: lines. Strings in a list may contain newlines.
            max_new_tokens: most tokens of a text.
            name: what messages call the prompts.
            strict: whether a line that cannot be answered raises an error. Otherwise a `LineError` takes its place.
            **options: options of `TextGenerator`, such as `temperature`, `top_p`, `seed`, `stop_strings`, `batch_size`,
                `beam_size`, `logits_processor`.

        Returns:
            Iterator of texts, without the prompts. With `num_return_sequences` above 1, it yields a list of texts for
            each prompt.
        """
        check_names("generate_lines", options, self._GENERATION_OPTIONS)
        writer = TextGenerator(self.model, self.vocabs[0], max_new_tokens, **options)
        answers = writer.generate_lines(prompts, name, strict)
        return (_one_of_one(answer if isinstance(answer, LineError) else answer.texts) for answer in answers)

    lines: Any = generate_lines

    def generate_text(self, prompts: str | bytes | Lines, max_new_tokens: int = 200, **options: Any) -> Any:
        """The text that follows a prompt; for a list of prompts, a list of texts; for an iterator, an iterator.

        Arguments: see `generate_lines`.
        """
        check_names("generate_text", options, self._GENERATION_OPTIONS)
        return self(prompts, max_new_tokens=max_new_tokens, **options)

    def score_lines(
        self, lines: Lines, name: str = "text", strict: bool = True, **options: Any
    ) -> Iterator[LineScore | LineError]:
        """Yields the score of each line, see `txl_tf.runs.scoring.score_lines`."""
        check_names("score_lines", options, ["name", "strict", *ScoringConfig.names()])
        scorer = self._scorer(ScoringConfig(**options))
        return (score for scores in scorer.score(in_blocks(lines), name, strict) for score in scores)

    @functools.cached_property
    def _scorer(self) -> Callable[[ScoringConfig], Scorer]:
        """A function that returns the `Scorer` of a config. It caches eight scorers, because each compiles graphs."""
        return functools.lru_cache(maxsize=8)(lambda config: Scorer(self.model, self.vocabs[0], config))


class TranslationPipeline(Pipeline):
    """The pipeline of an encoder-decoder: translations of lines."""

    _has_warned = False  # whether the warning about the assumed length of the targets was logged

    @classmethod
    def open(
        cls, folder: RunFolder, path: str, *, ensemble: Sequence[str | os.PathLike] = (), **changes: Any
    ) -> Pipeline:
        """Makes the pipeline of a run. With `ensemble`, other runs translate together with it.

        Args:
            folder, path, **changes: see `Pipeline.open`.
            ensemble: see `members_of`.
        """
        model = load_model(folder, path, members_of(folder, ensemble, changes), **changes)
        return cls(model, *folder.load_vocabs(), checkpoint=folder.name_of(path))

    def translate_lines(
        self, lines: Lines, name: str = "source", strict: bool = True, batch_size: int = 64, **options: Any
    ) -> Iterator[Translation | list[Translation] | LineError]:
        """Translates each line.

        Args:
            lines: the sources.
            name: what messages call the lines.
            strict: whether a line that cannot be answered raises an error. Otherwise a `LineError` takes its place.
            batch_size: sources to translate at a time.
            **options: options of `SearchConfig`, such as `beam_size`.

        Returns:
            Iterator of the best `Translation` of each line. With `n_best` above 1, it yields a list of `n_best` of them
            for each line. A `Translation` is a pair of text and score. Its attribute `ended` is false if the text was
            cut at the largest length, and `unknown` is the number of unknown symbols in the source.
        """
        check_names("translate_lines", options, ["name", "strict", "batch_size", *SearchConfig.names()])
        search = SearchConfig(**options)
        assumed = assumed_length(search, self.model)
        if assumed and not self._has_warned:
            logger.warning("%s", assumed)
            self._has_warned = True
        source_vocab, target_vocab = self.vocabs
        translator = Translator(self.model, source_vocab, target_vocab, search, batch_size)
        return map(_one_of_one, translator.translate_lines(lines, name, strict))

    lines: Any = translate_lines


def _one_of_one(result: Any) -> Any:
    """The element of a list with one element. Any other value is returned as it is."""
    return result[0] if isinstance(result, list) and len(result) == 1 else result


class TaggedLine(NamedTuple):
    """The tags and the entities of a line of text.

    Attributes:
        text: the line.
        tokens: its tokens.
        tags: a tag for every token.
        entities: a dictionary for every entity: `kind`, `start`, `end` (in characters, exclusive), `text`, and `prob`,
            the probability that its tokens have exactly these tags.
    """

    text: str
    tokens: list[str]
    tags: list[str]
    entities: list[dict]

    @classmethod
    def of(cls, tagger: TextTagger, text: str, tokens: list[str], tagged: TaggedText) -> TaggedLine:
        """The result of `tagger` for the tokens of a text."""
        return cls(text, list(tokens), tagged.tags, tagger.describe(text, tagged, tokens)["entities"])


class TaggingPipeline(Pipeline):
    """The pipeline of a tagger: named entities in lines.

    Args:
        model, *vocabs, checkpoint: see `Pipeline`.
        window: most tokens that the network reads at a time, see `TextTagger`.
        sizes: lengths of the training lines; `None` if they are unknown. See `warn_of_length`.
        splits: whether a line with more sentences than the training lines have is cut by default, see
            `TextTagger.pieces`.
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
        self.window = window
        self.sizes = sizes
        self.splits = splits
        self._has_warned = False  # whether the warning about a long sentence was logged
        self._has_cut = False  # whether the warning about a line that is cut was logged

    @classmethod
    def open(
        cls,
        folder: RunFolder,
        path: str,
        *,
        lexicon: str | os.PathLike | Lexicon | Iterable[str] | None = None,
        skip_short_words: bool | None = None,
        max_seq_len: int | None = None,
        **changes: Any,
    ) -> TaggingPipeline:
        """Makes the pipeline of a run, see `Pipeline.open`.

        Args:
            folder, path, **changes: see `Pipeline.open`.
            lexicon: for FLAT, words that replace those of the run: a file of words, "jieba", or the words. Words
                that are not in the vocabulary become its unknown symbol. The number of known words is logged.
            skip_short_words: whether to leave out words of one character in `lexicon`; by default as in the run.
            max_seq_len: most tokens that are read at a time. A longer line is read in windows. If it is given, lines
                are cut at the ends of sentences only with `split_sentences` of `tag_lines`. The default is the length
                of the longest training line, at most the `max_seq_len` of the run.

        Raises:
            ParameterError: `lexicon` or `skip_short_words` is given for a model without a lexicon, `skip_short_words`
                without `lexicon`, or `max_seq_len` is out of its range.
            ValueError, FileNotFoundError: see `Lexicon.load` and `load_run`.
        """
        max_of_run = folder.read_config()["model"].get("max_seq_len", SentenceConfig.max_seq_len)
        sizes = line_sizes(folder)
        if max_seq_len is not None and (not is_integer(max_seq_len) or max_seq_len > max_of_run or max_seq_len < 1):
            changes["max_seq_len"] = max_seq_len  # `load_model` raises the error
        vocabs = with_lexicon(folder, folder.load_vocabs(), lexicon, skip_short_words)
        model = folder.load_model(path, **changes)
        # The network has not learned longer distances than those of the longest training line.
        window = max_seq_len or min(sizes.longest if sizes else max_of_run, max_of_run)
        return cls(
            model, *vocabs, checkpoint=folder.name_of(path), window=window, sizes=sizes, splits=max_seq_len is None
        )

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
        """Tags each line. An empty line has no tags.

        Args:
            lines: lines with one or more sentences each.
            name: what messages call the lines.
            strict: whether a line that cannot be answered raises an error. Otherwise a `LineError` takes its place.
            batch_size: sentences to tag at a time.
            numbers: numbers of the lines, for messages; by default they are counted from 1.
            split_sentences: whether to cut lines at the ends of sentences, see `split_at_ends`, and to tag each
                sentence by itself. By default, lines with more sentences than the training lines have are cut, see
                `TextTagger.pieces`, unless the pipeline was opened with `max_seq_len`.

        Returns:
            Iterator of `TaggedLine`.
        """
        at_least(1)("batch_size", batch_size)
        check_type("split_sentences", split_sentences, bool | None)
        tagger = self.tagger
        tagger.batch_size = batch_size
        # `answers` and `encode` count the lines each for themselves.
        numbers, line_numbers = itertools.tee(itertools.count(1) if numbers is None else numbers)

        def encode(line: Any) -> tuple[str, list[str]]:
            """The text and the tokens of a line. Warns if the line is unusually long."""
            number = next(line_numbers)
            text = sentence_of(line)
            tokens = tagger.split(text)
            self.warn_of_length(tokens, f"{name}, line {number}", split_sentences)
            return text, tokens

        def answer(sentences: Sequence[tuple[str, list[str]]]) -> Iterator[TaggedLine]:
            """The results of lines that `encode` has prepared."""
            texts, tokens = zip(*sentences, strict=True) if sentences else ([], [])
            tagged = tagger.tag_in_sentences(tokens, split=split_sentences)
            return map(functools.partial(TaggedLine.of, tagger), texts, tokens, tagged)

        return answers(lines, encode, answer, name, strict, POOL * batch_size, numbers)

    lines: Any = tag_lines

    def warn_of_length(self, tokens: Sequence[str], where: str, split_sentences: bool | None = None) -> None:
        """Warns of the first line that is cut by default, and of the first piece longer than all training lines.

        A piece is a line, or a part of a line that is cut, see `TextTagger.pieces`. If the lengths of the training
        lines are unknown, there is no warning.

        Args:
            tokens: tokens of the line.
            where: what the message calls the line.
            split_sentences: see `tag_lines`.
        """
        if self.sizes is None or (self._has_warned and self._has_cut):
            return
        pieces = self.tagger.pieces(tokens, split_sentences)
        longest = self.sizes.longest
        if split_sentences is None and len(pieces) > 1 and not self._has_cut:
            self._has_cut = True
            logger.warning(
                f"{where} has {len(self.tagger.sentences(tokens)):,} sentences, and 99% of the training lines have "
                f"{self.sizes.most_sentences:,} or fewer: such lines are cut at the ends of sentences. "
                "split_sentences=False reads them as a whole. Further ones are not named"
            )
        n = max(map(len, pieces), default=0)
        if self._has_warned or n <= longest:
            return
        self._has_warned = True
        reads = "at once" if n <= self.tagger.window_size else f"in windows of {self.tagger.window_size:,}"
        ways = "max_seq_len sets the window"
        if len(pieces) == 1 and not split_sentences:
            ways = f"split_sentences tags each sentence of a line by itself, {ways}"
        logger.warning(
            f"{where} has a sentence of {n:,} tokens, the longest training line has {longest:,}: it is read "
            f"{reads}, and more entities may be wrong than usual. {ways}. Further ones are not named"
        )

    @functools.cached_property
    def tagger(self) -> TextTagger:
        """The `TextTagger` of the model."""
        sizes = self.sizes if self.splits else None
        vocabs: Any = self.vocabs
        return TextTagger(self.model, encoder_of(*vocabs), window=self.window, sizes=sizes)


def line_sizes(folder: RunFolder) -> LineSizes | None:
    """The `LineSizes` of the training lines of a tagger's run; `None`, after a warning, if they are unknown.

    They are the tokens of the longest line, and the usual and nearly the largest number of sentences in a line. Runs of
    earlier versions do not record all three numbers. For these runs, the function reads the training file. If it cannot
    read this file, the result has only the length of the longest line, if the run records it.
    """
    config = folder.read_config()
    training = config.get("training", {})
    recorded = [training.get(name) for name in ("longest_sentence", "usual_sentences", "most_sentences")]
    if all(recorded):
        return LineSizes(*recorded)
    data = config["data"]
    name = data.get("train_path") or data.get("dataset")
    try:
        sizes = line_sizes_in(TaggedConfig(**data))
    except (ValueError, OSError):
        if recorded[0]:
            return LineSizes(recorded[0])
        max_seq_len = config["model"].get("max_seq_len", SentenceConfig.max_seq_len)
        logger.warning(
            f"{folder} does not record its longest training line, and {name} cannot be read: "
            f"{max_seq_len} tokens, its max_seq_len, are assumed"
        )
        return None
    if not recorded[0]:
        longest = f"in {name} it has {sizes.longest:,} tokens"
        logger.info(f"{folder} does not record its longest training line: {longest}")
    return sizes


def with_lexicon(
    folder: RunFolder,
    vocabs: list[Vocab],
    given: str | os.PathLike | Lexicon | Iterable[str] | None = None,
    skip_short_words: bool | None = None,
) -> list[Vocab]:
    """The vocabularies of a run, in which the words `given`, if any, replace the words of its lexicon.

    If words are given, logs how many of them are in the vocabulary.

    Args:
        folder: folder of the run.
        vocabs: its vocabularies.
        given, skip_short_words: `lexicon` and `skip_short_words` of `TaggingPipeline.open`.

    Raises:
        ParameterError: words are given for a model without a lexicon, or `skip_short_words` without words.
        ValueError, FileNotFoundError: see `Lexicon.load`.
    """
    if given is None and skip_short_words is None:
        return vocabs
    if len(vocabs) < 3:
        family = folder.family.name
        name, value = ("skip_short_words", skip_short_words) if given is None else ("lexicon", given)
        message = f"{name} must be left out: the model of {folder}, of the family {family}, takes no words"
        raise ParameterError(name, value, "left out", message)
    if given is None:
        raise ParameterError("skip_short_words", skip_short_words, "left out without a lexicon")
    if skip_short_words is None:
        skip_short_words = bool(folder.read_config()["data"].get("skip_short_words", False))
    if isinstance(given, (str, os.PathLike)):
        name = os.fspath(given)
        lexicon = Lexicon.load(name, skip_short_words)
    else:
        name = "that is given"
        words = given.words if isinstance(given, Lexicon) else list(given)
        lexicon = Lexicon([word for word in words if len(word) > 1] if skip_short_words else words)
    known = sum(word in vocabs[0].ids for word in lexicon.words)
    about_unknown = f"; the others become {vocabs[0].unk} where they are found" if known < len(lexicon) else ""
    logger.info(f"lexicon {name}: {len(lexicon):,} words, {known:,} of them are in the vocabulary{about_unknown}")
    return [*vocabs[:2], lexicon_vocab(lexicon)]
