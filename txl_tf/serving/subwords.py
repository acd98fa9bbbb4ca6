"""Vocabularies of subwords as graphs. TensorFlow Serving contains TensorFlow Text's operation for SentencePiece."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from txl_tf.data.subwords import SPACE, SubwordVocab
from txl_tf.data.vocabulary import Vocab
from txl_tf.environment import is_installed
from txl_tf.language.stopping import NONE
from txl_tf.serving.request import checked, largest
from txl_tf.serving.tables import GraphTokenizer, RaggedTensor, check_utf8, read_text


def has_tensorflow_text() -> bool:
    """Whether tensorflow-text is installed, which is in the extra `subword`."""
    return is_installed("tensorflow_text")


class SubwordTokenizer(tf.Module):
    """A `SubwordVocab` as a graph, with the methods of `GraphTokenizer`.

    Args:
        vocab: the vocabulary.
        path: path of its file, which becomes an asset of the SavedModel. The graph does not read this file: it contains
            the SentencePiece model itself.
    """

    def __init__(self, vocab: SubwordVocab, path: str):
        import tensorflow_text  # an extra; registers the operation

        super().__init__()
        self.vocab = vocab
        self.asset = tf.saved_model.Asset(path)
        int32: Any = tf.int32
        self.tokenizer: Any = tensorflow_text.SentencepieceTokenizer(vocab.model, out_type=int32)

    def encode(self, text: tf.Tensor, name: str = "text") -> tf.RaggedTensor:
        """`SubwordVocab.encode` of every string of `text` `[B]`: int32 ragged `[B, None]`.

        Adds a check that the strings are UTF-8. The message of this check calls the argument by `name`.
        """
        return self._split(read_text(self.vocab, checked([check_utf8(name, text)], text)), ["\n", SPACE])

    def _split(self, text: tf.Tensor, separators: list[str]) -> Any:
        """The ids of every string of `text` `[B]`: int32 ragged `[B, None]`.

        SentencePiece does not know the separators. So each string is cut at the first of `separators`, its parts are
        split with the other separators, and the ids of the separator are put between them. A separator that the
        vocabulary lacks stays in the text.
        """
        if not separators:
            return self.tokenizer.tokenize(text)
        separator, *other_separators = separators
        ids = self.vocab.separators.get(separator)
        if ids is None:
            return self._split(text, other_separators)
        parts: Any = tf.strings.split(text, separator)  # [B, parts]
        pieces = self._split(parts.flat_values, other_separators)  # [all parts, ids]
        after = RaggedTensor.from_tensor(tf.tile(tf.constant([ids], tf.int32), [pieces.nrows(), 1]))
        joined = parts.with_flat_values(tf.concat([pieces, after], 1)).merge_dims(1, 2)
        return joined[:, : -len(ids)]  # no separator follows the last part

    def stop_units(self, stop: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """The units of stop strings `[B, S]`, and their numbers, see `GraphTokenizer.stop_units`. Units are bytes."""
        rows, count = tf.unstack(tf.shape(stop))
        flat = read_text(self.vocab, tf.reshape(stop, [-1]))
        lengths = tf.strings.length(flat)
        longest = largest(lengths, least=1)
        units = tf.cast(tf.io.decode_raw(flat, tf.uint8, fixed_length=longest), tf.int32)
        units = tf.where(tf.sequence_mask(lengths, longest), units, NONE)
        return tf.reshape(units, [rows, count, longest]), tf.reshape(lengths, [rows, count])

    def decode(self, ids: tf.Tensor, lengths: tf.Tensor) -> tf.Tensor:
        """`SubwordVocab.decode` of every row of `ids` `[B, N]` up to its length: string `[B]`."""
        pieces = RaggedTensor.from_tensor(tf.gather(tf.constant(self.vocab.token_bytes), ids), lengths)
        text = tf.strings.unicode_transcode(tf.strings.reduce_join(pieces, -1), "UTF-8", "UTF-8")
        # A model with `adds_space` puts a space before each line; the space is not part of the text.
        return tf.strings.regex_replace(text, "(?m)^ ", "") if self.vocab.adds_space else text

    def spell(self, ids: tf.Tensor) -> tf.Tensor:
        """The names of the pieces with these ids: strings of the shape of `ids`, which may be any."""
        return tf.gather(tf.constant(self.vocab.symbols), ids)


def tokenizer_of(vocab: Vocab, path: str) -> GraphTokenizer | SubwordTokenizer:
    """A vocabulary of any level as a graph. For the arguments, see `GraphTokenizer`."""
    return SubwordTokenizer(vocab, path) if isinstance(vocab, SubwordVocab) else GraphTokenizer(vocab, path)
