"""Tags lines of text: named entities, parts of speech."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from txl_tf.config import at_least
from txl_tf.data.batching import by_length, in_order
from txl_tf.data.tagged.batches import Encoded, SentenceEncoder, features
from txl_tf.data.tagged.sentence_ends import LineSizes, split_at_ends
from txl_tf.errors import ParameterError
from txl_tf.kernels.dtypes import at_least_float32
from txl_tf.nn.checks import check_eager
from txl_tf.nn.settings import add_user
from txl_tf.schema import check_type
from txl_tf.taggers.tagger import Tagger
from txl_tf.training.keras_arguments import refuse_hooks


class Entity(NamedTuple):
    """An entity of a text. `start` and `end` count the tokens of the text, from 0."""

    kind: str
    start: int
    end: int  # exclusive
    prob: float  # the probability that its tokens have exactly these tags


class TaggedText(NamedTuple):
    """The tags and entities of a text."""

    tags: list[str]
    entities: list[Entity]  # with the scheme "none", every token is an entity whose kind is its tag


class Item(NamedTuple):
    """A token of a sentence, or a word that the lexicon finds in it. `start` and `end` count tokens, from 0."""

    start: int
    end: int  # exclusive
    text: str


class SentenceAttention(NamedTuple):
    """The attention of a network in a sentence.

    Attributes:
        items: the tokens, then the words of the lattice.
        probs: float `[n_layer, n_head, queries, keys]`, which sum to 1 over the keys.
    """

    items: list[Item]
    probs: np.ndarray


class TextTagger:
    """Finds the tags and entities of sentences.

    The network reads a sentence of more than `window` tokens in overlapping windows. Each token has the emissions of
    the window whose middle is closest to it, and the CRF tags the whole sentence.

    Args:
        tagger: `Tagger` with a `SentenceNetwork`. Its `token_level` defines the tokens.
        encoder: `SentenceEncoder` with the vocabularies and the lexicon of the tagger. Its level is replaced by the
            `token_level`.
        batch_size: number of sentences to tag together. A batch has sentences of similar length.
        window: most tokens that the network reads at a time; by default its `max_seq_len`, which is the limit.
        sizes: the lengths of the lines on which the tagger was trained, see `pieces`.

    Raises:
        ParameterError: `batch_size` or `window` is out of its range, the network is no `SentenceNetwork`, or the
            encoder does not fit it.
    """

    def __init__(
        self, tagger: Tagger, encoder: SentenceEncoder, batch_size: int = 64, window: int | None = None,
        sizes: LineSizes | None = None,
    ) -> None:  # fmt: skip
        at_least(1)("batch_size", batch_size)
        check_encoder(tagger, encoder)
        if window is not None:
            at_least(1, tagger.network.max_seq_len)("window", window)
        self.tagger = tagger
        self.batch_size = batch_size
        self.window = window
        self.sizes = sizes
        self.encoder = dataclasses.replace(encoder, level=tagger.token_level)
        self.reads_lattice = tagger.reads_lattice
        self.drop_graphs()
        add_user(tagger, self)
        add_user(tagger.network, self)

    def drop_graphs(self) -> None:
        """Replaces the graphs by new ones, which the next calls trace.

        The tagger and its network call it after one of their settings has changed.
        """
        self._entities: Any = tf.function(self.tagger.entities, reduce_retracing=True, autograph=False)
        self._emissions: Any = tf.function(self.tagger.emissions, reduce_retracing=True, autograph=False)
        self._entities_of: Any = tf.function(self.tagger.entities_of, reduce_retracing=True, autograph=False)

    @property
    def window_size(self) -> int:
        """Most tokens that the network reads at a time."""
        return self.window or self.tagger.network.max_seq_len

    def split(self, line: str) -> list[str]:
        """The tokens of a line of text for `tag`: its characters, or the words between white space."""
        return line.split() if self.tagger.token_level == "word" else list(line)

    def sentences(self, tokens: Sequence[str]) -> list[Sequence[str]]:
        """The sentences of a text, see `split_at_ends`."""
        return split_at_ends(tokens, self.tagger.token_level == "word")

    def pieces(self, tokens: Sequence[str], split: bool | None = None) -> list[Sequence[str]]:
        """The parts of a line of text that are tagged separately.

        Args:
            tokens: the tokens of the line.
            split: `True` splits the line into sentences, `False` does not split it. With `None`, a line that has
                more sentences than nearly all lines of the training text (`most_sentences` of `LineSizes`) is cut into
                parts of `usual_sentences`. If these numbers are unknown, the line is not split.
        """
        check_type("split", split, bool | None)
        if split:
            return self.sentences(tokens)
        if split is False or self.sizes is None or self.sizes.most_sentences is None:
            return [tokens]
        sentences = self.sentences(tokens)
        if len(sentences) <= self.sizes.most_sentences:
            return [tokens]
        ends = [0, *itertools.accumulate(map(len, sentences))]  # the first cut is at 0
        cuts = [*ends[: -1 : self.sizes.usual_sentences], ends[-1]]
        return [tokens[begin:end] for begin, end in itertools.pairwise(cuts)]

    def describe(self, line: str, tagged: TaggedText, tokens: Sequence[str] | None = None) -> dict:
        """The result of `tag` for a line as a dictionary for JSON.

        It contains the text of the line and its entities, with their kind, start, end, text and prob.

        Args:
            line: text.
            tagged: the result for the tokens of the line. In it, `start` and `end` of an entity count tokens. In the
                dictionary, they count characters.
            tokens: the tokens of the line in order; by default `split(line)`.
        """
        spans = []
        end = 0
        for token in self.split(line) if tokens is None else tokens:
            start = line.index(token, end)
            end = start + len(token)
            spans.append((start, end))
        rows = []
        for kind, first, after, prob in tagged.entities:
            start, _ = spans[first]
            _, end = spans[after - 1]
            rows.append({"kind": kind, "start": start, "end": end, "text": line[start:end], "prob": round(prob, 4)})
        return {"text": line, "entities": rows}

    def encode(self, sentences: Sequence[Sequence[str]], left_out: Collection[str] = ()) -> list[Encoded]:
        """The ids of sentences, see `tag`."""
        sentences = checked_sentences(sentences, self.tagger.token_level)
        if left_out and not self.reads_lattice:
            raise ParameterError("left_out", left_out, "empty for a network that reads no words of a lexicon")
        return [self.encoder.encode(tokens, left_out) for tokens in sentences]

    def tag_in_sentences(
        self, texts: Sequence[Sequence[str]], left_out: Collection[str] = (), split: bool | None = True
    ) -> list[TaggedText]:
        """Tags lines of text in parts: by default, each sentence separately.

        Args:
            texts: the tokens of each line.
            left_out: see `tag`.
            split: `True`: each sentence; `False`: whole lines; `None`: parts as long as the lines of the training text,
                see `pieces`.

        Returns:
            The result of each line. The positions of its entities count the tokens of the whole line.
        """
        pieces = [self.pieces(tokens, split) for tokens in texts]
        results = iter(self.tag([piece for text in pieces for piece in text], left_out))
        return [joined([next(results) for _ in text]) for text in pieces]

    def tag(self, sentences: Sequence[Sequence[str]], left_out: Collection[str] = ()) -> list[TaggedText]:
        """The best tags of every sentence and the entities that they mark.

        Args:
            sentences: sequences of tokens, see `split`. If the tokens are characters, strings are possible. An empty
                sentence has no tags.
            left_out: words of the lexicon that FLAT ignores.

        Returns:
            The result of each sentence, in the order of the sentences.

        Raises:
            ParameterError: a sentence is no sequence of tokens, there are words to leave out without a lexicon, the
                tagger overrides `decode`, or it overrides `entities` and a sentence is longer than `window`: this
                method would not use them.
        """
        check_eager("tag")
        self.tagger.refuse_unused("decode")
        encoded = self.encode(sentences, left_out)
        if any(sentence.n > self.window_size for sentence in encoded):
            longer = f"a sentence of more than {self.window_size} tokens is read in windows: override entities_of"
            refuse_hooks(self.tagger, {"entities": longer})
        lengths = np.array([len(sentence.ids) for sentence in encoded], int)
        return in_order(self._tag, encoded, by_length(lengths, self.batch_size))

    def attention(self, tokens: Sequence[str], left_out: Collection[str] = ()) -> SentenceAttention:
        """The attention of every layer and head in one sentence.

        Args:
            tokens: the tokens of the sentence, see `split`.
            left_out: see `tag`.

        Raises:
            ParameterError: the network has no attention, or the sentence is empty or has more than `window` tokens:
                `tag` reads such a sentence in windows, each with an attention of its own.
        """
        network = self.tagger.network
        if not hasattr(network, "attention_probs"):
            message = f"a tagger with attention is needed, got one with {type(network).__name__}"
            raise ParameterError("tagger", self.tagger, "a tagger with attention", message)
        if not 0 < len(tokens) <= self.window_size:
            allowed = f"1 to {'window' if self.window else 'max_seq_len'}={self.window_size} tokens"
            raise ParameterError("tokens", tokens, allowed, f"tokens must be {allowed}, got {len(tokens):,}")
        (encoded,) = self.encode([tokens], left_out)
        places = list(zip(encoded.starts.tolist(), encoded.ends.tolist(), strict=True))
        inputs = {name: tf.constant(array) for name, array in features([encoded], self.reads_lattice).items()}
        if not self.reads_lattice:
            places = places[: encoded.n]
        probs = [network.attention_probs(inputs, layer)[:, 0] for layer in range(network.n_layer)]
        items = [Item(first, last + 1, "".join(tokens[first : last + 1])) for first, last in places]
        return SentenceAttention(items, at_least_float32(tf.stack(probs)).numpy())

    def _tag(self, encoded: list[Encoded]) -> list[TaggedText]:
        """Tags the sentences of one batch. Sentences that are longer than a window are tagged one by one."""
        fitting = [sentence for sentence in encoded if 0 < sentence.n <= self.window_size]
        results = iter(())
        if fitting:
            lengths = [sentence.n for sentence in fitting]
            results = iter(self._read(lengths, self._entities(features(fitting, self.reads_lattice))))
        empty = TaggedText([], [])
        return [
            empty if not sentence.n else self._tag_long(sentence) if sentence.n > self.window_size else next(results)
            for sentence in encoded
        ]

    def _tag_long(self, sentence: Encoded) -> TaggedText:
        """Tags a sentence by the emissions of overlapping windows, which are cut in the middle of each overlap."""
        n = sentence.n
        window = self.window_size
        rows = []  # the emissions of each window, [window, K]
        begins = window_begins(n, window)
        windows = [sentence.window(begin, begin + window) for begin in begins]
        for i in range(0, len(windows), self.batch_size):
            batch = features(windows[i : i + self.batch_size], self.reads_lattice)
            rows += [*self._emissions(batch)[0].numpy()]
        cuts = [0, *((left + right + window + 1) // 2 for left, right in itertools.pairwise(begins)), n]
        pieces = zip(rows, begins, itertools.pairwise(cuts), strict=True)
        emissions = np.concatenate([row[first - begin : end - begin] for row, begin, (first, end) in pieces])
        return self._read([n], self._entities_of(emissions[None], np.ones([1, n], bool)))[0]

    def _read(self, lengths: list[int], entities: dict[str, tf.Tensor]) -> list[TaggedText]:
        """Converts the result of `Tagger.entities` for a batch to a `TaggedText` for each sentence.

        Args:
            lengths: numbers of tokens of the sentences.
            entities: the result.
        """
        labels = self.tagger.labels
        kinds = self.tagger.kinds
        names = ("tags", "ends", "starts", "kinds", "probs")
        texts = []
        for n, tags, ends, starts, kind_ids, probs in zip(
            lengths, *(entities[name].numpy() for name in names), strict=True
        ):
            last_tokens = np.flatnonzero(ends)
            spans = [Entity(kinds[kind_ids[i]], int(starts[i]), int(i) + 1, float(probs[i])) for i in last_tokens]
            texts.append(TaggedText([labels[tag] for tag in tags[:n]], spans))
        return texts


def check_encoder(tagger: Tagger, encoder: SentenceEncoder) -> None:
    """Raises ParameterError if the network of the tagger cannot read the ids or the words of the encoder."""
    network: Any = tagger.network
    if not tagger.reads_sentences:
        allowed = "a Tagger of Tener, Flat, BiLSTM or another SentenceNetwork, which reads the ids of an encoder"
        message = f"tagger must be {allowed}, got one of {type(network).__name__}"
        raise ParameterError("tagger", tagger, allowed, message)
    if len(encoder.vocab) > network.n_token:
        raise ParameterError("encoder.vocab", len(encoder.vocab), f"at most n_token={network.n_token} symbols")
    if encoder.bigram_vocab and len(encoder.bigram_vocab) > network.n_bigram:
        allowed = f"at most n_bigram={network.n_bigram} symbols" if network.n_bigram else "None for this network"
        raise ParameterError("encoder.bigram_vocab", len(encoder.bigram_vocab), allowed)
    if encoder.lexicon is not None and not tagger.reads_lattice:
        raise ParameterError("encoder.lexicon", encoder.lexicon, f"None for {type(network).__name__}")


def checked_sentences(sentences: Any, token_level: str) -> list[Sequence[str]]:
    """The sentences as a list. Raises ParameterError unless each is a sequence of tokens, see `TextTagger.tag`."""
    allowed = "a list of sentences, each a list of its tokens, see split()"
    if isinstance(sentences, str | bytes) or not isinstance(sentences, Iterable):
        message = f"sentences must be {allowed}, got one {type(sentences).__name__}"
        raise ParameterError("sentences", sentences, allowed, message)
    sentences = list(sentences)
    for i, tokens in enumerate(sentences):
        has_tokens = isinstance(tokens, Sequence | np.ndarray) and all(isinstance(token, str) for token in tokens)
        if not has_tokens or (isinstance(tokens, str) and token_level == "word"):
            raise ParameterError(f"sentences[{i}]", tokens, "a list of its tokens, see split()")
    return sentences


def joined(pieces: Sequence[TaggedText]) -> TaggedText:
    """Joins the results for the pieces of a text. Positions of entities then count the tokens of the whole text."""
    tags = []
    entities = []
    for piece in pieces:
        entities += [e._replace(start=e.start + len(tags), end=e.end + len(tags)) for e in piece.entities]
        tags += piece.tags
    return TaggedText(tags, entities)


def window_begins(n: int, size: int) -> list[int]:
    """The positions where overlapping windows of `size` tokens begin in a sentence of `n` tokens, more than `size`.

    The first window begins at 0, and the last one ends at `n`. Each overlaps the next one by at least half;
    windows of one token do not overlap.
    """
    steps = -(-(n - size) // max(1, size // 2))
    return [i * (n - size) // steps for i in range(steps + 1)]
