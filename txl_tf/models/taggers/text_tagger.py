"""Named entities in lines of text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from txl_tf.data.batching import by_length, in_order
from txl_tf.data.tagged.batches import Encoded, SentenceEncoder, features
from txl_tf.models.taggers.flat import Flat
from txl_tf.models.taggers.tagger import Tagger


class Entity(NamedTuple):
    kind: str
    start: int
    end: int  # exclusive
    prob: float  # that its characters have exactly these tags


class TaggedText(NamedTuple):
    tags: list[str]
    entities: list[Entity]


class TextTagger:
    """Sentences to tags and entities.

    Args:
        tagger: `Tagger` of `Tener` or `Flat`.
        encoder: `SentenceEncoder` of its run, see `encoder_of`.
        batch_size: sentences to tag at a time; those of like lengths are together.
    """

    def __init__(self, tagger: Tagger, encoder: SentenceEncoder, batch_size: int = 64):
        self.tagger, self.encoder, self.batch_size = tagger, encoder, batch_size
        self._entities = tf.function(tagger.entities, reduce_retracing=True, autograph=False)

    def split(self, line: str) -> list[str]:
        """The tokens of a line of text, as `tag` takes them."""
        return list(line)

    def describe(self, line: str, found: TaggedText) -> dict:
        """What `tag` found in a line, for JSON: its text, and its entities by kind, start, end, text and prob.

        Args:
            line: text.
            found: of `split(line)`. Its entities count tokens; here `start` and `end` count characters of the line.
        """
        entities = [
            {"kind": kind, "start": start, "end": end, "text": line[start:end], "prob": round(prob, 4)}
            for kind, start, end, prob in found.entities
        ]
        return {"text": line, "entities": entities}

    def encode(self, sentences: Sequence[Sequence[str]], name: str = "text") -> list[Encoded]:
        """Ids of sentences. Raises ValueError, which names the line, where one is too long."""
        most = self.tagger.network.max_seq_len
        for number, tokens in enumerate(sentences, 1):
            if len(tokens) > most:
                raise ValueError(
                    f"{name}, line {number} has {len(tokens):,} characters; the model takes at most max_seq_len={most}"
                )
        return [self.encoder.encode(tokens) for tokens in sentences]

    def tag(
        self,
        sentences: Sequence[Sequence[str]],
        name: str = "text",
        progress: Callable[[int], None] | None = None,
    ) -> list[TaggedText]:
        """The best tags of every sentence and the entities that they mark.

        Args:
            sentences: strings, or lists of characters. One without any has no tags.
            name: what messages call them, such as their file.
            progress: called with the number of sentences of every batch that is done.

        Raises:
            ValueError: a sentence is longer than `max_seq_len`.
        """
        encoded = self.encode(sentences, name)
        lengths = np.array([len(sentence.ids) for sentence in encoded], int)
        return in_order(self._tag, encoded, by_length(lengths, self.batch_size), progress)

    def _tag(self, encoded: list[Encoded]) -> list[TaggedText]:
        full = [sentence for sentence in encoded if sentence.n]  # they follow the empty ones, which are shorter
        empty = [TaggedText([], [])] * (len(encoded) - len(full))
        if not full:
            return empty
        inputs = features(full, lattice=isinstance(self.tagger.network, Flat))
        found = {name: array.numpy() for name, array in self._entities(inputs).items()}
        rows = zip(full, *(found[name] for name in ("tags", "ends", "starts", "kinds", "probs")), strict=True)
        return empty + [self._read(sentence.n, *arrays) for sentence, *arrays in rows]

    def _read(self, n, tags, ends, starts, kinds, probs) -> TaggedText:
        names = self.tagger.kinds
        places = np.flatnonzero(ends)
        entities = [Entity(names[kinds[i]], int(starts[i]), int(i) + 1, float(probs[i])) for i in places]
        return TaggedText([self.tagger.labels[tag] for tag in tags[:n]], entities)
