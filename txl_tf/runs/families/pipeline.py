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
import logging
import os
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import keras

from txl_tf.config import ScoringConfig, SearchConfig, at_least
from txl_tf.data.lines import LineError, answers, in_blocks, sentence_of
from txl_tf.data.tagged.sentences import encoder_of
from txl_tf.data.vocabulary import Vocab
from txl_tf.models.decoding.sampling import SAMPLING
from txl_tf.models.decoding.text_generator import TextGenerator
from txl_tf.models.taggers.text_tagger import TaggedText, TextTagger
from txl_tf.models.vanilla.translator import Translation, Translator, assumed_length
from txl_tf.runs.folder import RunFolder
from txl_tf.runs.scoring import LineScore, Scorer
from txl_tf.schema import check_names, keywords_of, known_names

logger = logging.getLogger("txl_tf")

POOL = 50  # batches of sentences to tag that are read and sorted by length together
Lines = Iterable[str | bytes | None]  # see `txl_tf.data.lines`


def pipeline(model_dir: str | os.PathLike, ckpt_path: str | None = None, **changes) -> Pipeline:
    """What turns text into results with a run: `score_lines` and `generate_lines` of a language model,
    `translate_lines` of an encoder-decoder, `tag_lines` of a tagger.

    Args:
        model_dir, ckpt_path, **changes: see `load_run`.

    Returns:
        A `Pipeline`. Called, it gives the result of a string, a list of those of a list, and an iterator over those of
        any other iterable: of a language model the texts that follow prompts, else translations or what is tagged. Its
        methods take lists and iterators, and yield results in the order of the lines as soon as they are there.
        `strict=False` has them yield a `LineError` in the place of a line without result, which is else raised.

    Raises: as `load_run`.
    """
    folder = RunFolder(model_dir)
    vocabs = folder.load_vocabs()

    def opened(path):
        return folder.family.pipeline(folder.load_model(path, **changes), *vocabs, checkpoint=folder.name_of(path))

    return folder.with_checkpoint(ckpt_path, opened)


class Pipeline:
    """The base of all pipelines. A subclass says in `lines` how it answers lines.

    Args:
        model: of a run.
        *vocabs: of the run.
        checkpoint: what the weights are, for messages.
    """

    def __init__(self, model: keras.Model, *vocabs: Vocab, checkpoint: str | None = None):
        self.model, self.vocabs, self.checkpoint = model, vocabs, checkpoint

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
    """Named entities in lines."""

    @known_names
    def tag_lines(
        self,
        lines: Lines,
        name: str = "text",
        strict: bool = True,
        batch_size: int = 64,
        numbers: Iterable[int] | None = None,
    ) -> Iterator[TaggedLine | LineError]:
        """The tags and the entities of each line. An empty one has none.

        Args:
            lines: a sentence each.
            name: what messages call them.
            strict: see `pipeline`.
            batch_size: sentences to tag at a time.
            numbers: of the lines, for messages; by default they are counted from 1.
        """
        at_least(1)("batch_size", batch_size)
        tagger = self._tagger
        tagger.batch_size = batch_size

        def encode(line):
            text = sentence_of(line)
            return text, tagger.split(text)

        def answer(sentences):
            texts, tokens = zip(*sentences, strict=True) if sentences else ([], [])
            return map(functools.partial(TaggedLine.of, tagger), texts, tokens, tagger.tag(tokens))

        return answers(lines, encode, answer, name, strict, POOL * batch_size, numbers)

    lines = tag_lines

    @functools.cached_property
    def _tagger(self):
        return TextTagger(self.model, encoder_of(*self.vocabs))
